//! Makes the launch order of a job: its command line, its folders and its environment variables.
//!
//! Pure, except for the checks whether `bash` exists and where a link leads. The names are those that scripts for the cloud expect.

pub(crate) mod gang;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use agent_model::expr::{self, Reference};
use agent_model::job::{Input, Output};
use agent_model::protocol::record::JobUser;
use agent_model::{Boot, Fault, JobSpec, ReplicaId};
use agent_runtime::env::Image;
use agent_shim::DeviceNode;
use agent_shim::view::View;
use agent_shim::{JobDir, Launch, Limits, LogPolicy, User, VERSION};

use self::gang::Seating;
use super::fetch::{self, given_path};
use super::slurm;
use super::stand_in;
use crate::config::HostVariables;

/// Everything that a launch order is made of.
pub(crate) struct Facts<'a> {
    pub(crate) replica: &'a ReplicaId,
    pub(crate) spec: &'a JobSpec,
    pub(crate) dir: &'a JobDir,
    pub(crate) host: &'a HostVariables,
    pub(crate) user: Option<&'a JobUser>,
    /// The first entries of `PATH`, from the environment.
    pub(crate) path_entries: &'a [PathBuf],
    /// Packages that it installs are its own, and not its user's.
    pub(crate) own_packages: bool,
    /// The environment's own variables.
    pub(crate) environment: &'a BTreeMap<String, String>,
    /// The image it runs in; `None` for the machine itself.
    pub(crate) image: Option<&'a Image>,
    pub(crate) tracking_uri: &'a str,
    pub(crate) tracking_port: u16,
    pub(crate) tracking_token: &'a str,
    /// The id of the experiment at the tracking endpoint.
    pub(crate) experiment_id: &'a str,
    /// How much of the disk its log may take, in bytes.
    pub(crate) log_quota: u64,
    /// The GPUs it is given; as many as it asked for.
    pub(crate) gpus: &'a [String],
    /// The device nodes of GPUs that it does not have.
    pub(crate) denied: &'a [DeviceNode],
    /// The memory limit of a job that sets none, in bytes; 0 is no limit.
    pub(crate) usual_memory: u64,
    /// It has a `/tmp` of its own.
    pub(crate) private: bool,
    /// Its view of the daemon's files.
    pub(crate) view: Option<View>,
    /// It may use the cloud's metadata service, which gives the machine's identity.
    pub(crate) metadata: bool,
    /// Until when the job may run if the lease is not renewed; without a limit when absent.
    pub(crate) lease_until: Option<Boot>,
    /// Its place among the ranks of its job, if it needs that.
    pub(crate) seating: Option<&'a Seating>,
}

/// The most processes and threads of a job: more than any correct job has, and few enough to leave some for the
/// machine.
const PIDS: u64 = 32_768;

/// The variable that container engines read.
const NVIDIA_VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// The GPUs that a command was, or was to be, started with.
pub(crate) fn gpus_of(launch: &Launch) -> Vec<String> {
    let visible = launch.env.get(NVIDIA_VISIBLE).map(String::as_str).unwrap_or_default();
    visible.split(',').filter(|gpu| !gpu.is_empty() && *gpu != "void").map(str::to_owned).collect()
}

/// The `PATH` in an image that sets none.
const IMAGE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Gives the command to `bash` if the image has it, which cannot be checked from outside.
const IMAGE_SHELL: &str =
    r#"if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi"#;

/// The file of an output of kind `file`, or the folder of one of kind `folder`.
fn output_path(dir: &JobDir, name: &str, output: &Output) -> PathBuf {
    let folder = dir.out().join(name);
    if output.is_file() { folder.join(name) } else { folder }
}

/// The path of an input; `None` for a literal.
fn input_path(dir: &JobDir, name: &str, input: &Input) -> Option<PathBuf> {
    match input {
        Input::Literal(_) => None,
        Input::Data(data) => Some(given_path(dir, name, data)),
        Input::Folder(_) => Some(dir.inputs().join(name)),
        Input::File { name: file, .. } => Some(dir.inputs().join(name).join(file)),
    }
}

impl Facts<'_> {
    /// The launch order for the shim.
    pub(crate) fn launch(&self) -> Result<Launch, Fault> {
        let command = expr::substitute(&self.spec.command, |reference| self.resolve(reference))?;
        let command = match self.seating {
            Some(seating) => seating.command(self.spec, command),
            None => command,
        };
        Ok(Launch {
            version: VERSION,
            replica: self.replica.clone(),
            argv: self.argv(command),
            env: self.variables(),
            cwd: self.dir.work(),
            grace: self.spec.limits.grace(),
            timeout: self.spec.limits.timeout,
            user: self.user.map(|user| User { uid: user.uid, gid: user.gid, groups: user.groups.clone() }),
            nameless: self.user.is_some_and(|user| user.home.is_empty()),
            tmp: self.private.then(|| self.dir.tmp()),
            view: self.view.clone(),
            metadata: self.metadata,
            denied: self.denied.to_vec(),
            hold_port: Some(self.tracking_port),
            secrets: BTreeMap::new(),
            log: LogPolicy { quota: self.log_quota, ..LogPolicy::default() },
            limits: Limits {
                memory: [self.spec.resources.memory, self.usual_memory]
                    .into_iter()
                    .find(|memory| *memory > 0),
                pids: Some(PIDS),
            },
            open_files: self.host.open_files,
            lease_until: self.lease_until,
            cgroup: None,
            container: self.image.is_some(),
            gang: self.seating.map(|seating| seating.launch(self.spec)),
        })
    }

    /// A shell that runs the command: the machine's, or one of the image.
    fn argv(&self, command: String) -> Vec<String> {
        match self.image {
            None => vec![shell(&self.host.path), "-c".to_owned(), command],
            Some(_) => {
                ["sh", "-c", IMAGE_SHELL, "sh"].map(str::to_owned).into_iter().chain([command]).collect()
            }
        }
    }

    fn resolve(&self, reference: &Reference) -> String {
        let text = |path: PathBuf| path.display().to_string();
        // A name that is not defined was refused when the job was validated.
        match reference {
            Reference::Input(name) => match self.spec.inputs.get(name) {
                Some(Input::Literal(value)) => value.clone(),
                Some(input) => input_path(self.dir, name, input).map(text).unwrap_or_default(),
                None => String::new(),
            },
            Reference::Output(name) => self
                .spec
                .outputs
                .get(name)
                .map(|kind| text(output_path(self.dir, name, kind)))
                .unwrap_or_default(),
            // A trial has its values in its command.
            Reference::Drawn(_) => String::new(),
        }
    }

    /// All variables; those that the job sets itself come last and win, except for its GPUs.
    fn variables(&self) -> BTreeMap<String, String> {
        let mut variables = match self.image {
            None => self.host.job.clone(),
            Some(image) => self.of_image(image),
        };
        if let Some(user) = self.user {
            let home = match self.image.is_some() || user.home.is_empty() {
                true => self.dir.home().display().to_string(),
                false => user.home.clone(),
            };
            for (name, value) in [("HOME", &home), ("USER", &user.name), ("LOGNAME", &user.name)] {
                variables.insert(name.to_owned(), value.clone());
            }
        }
        keep_loopback_direct(&mut variables);
        if self.own_packages && self.image.is_none() {
            let base = self.dir.user_base().display().to_string();
            let usual = variables.insert("PYTHONUSERBASE".to_owned(), base);
            let home = variables.get("HOME").map(|home| format!("{}/.local", home.trim_end_matches('/')));
            variables.extend(usual.or(home).map(|usual| (fetch::USUAL_BASE.to_owned(), usual)));
        }
        let path = self.search_path(&variables);
        variables.insert("PATH".to_owned(), path);
        variables.extend(self.environment.clone());
        variables.extend(self.contract());
        variables
            .extend(self.seating.map(|seating| seating.variables(self.spec, self.dir)).unwrap_or_default());
        variables.extend(self.spec.environment_variables.clone());
        if self.spec.azureml_stand_in {
            let path = stand_in::python_path(self.dir, variables.get("PYTHONPATH"));
            variables.insert("PYTHONPATH".to_owned(), path);
        }
        if slurm::is_meant(self.spec) {
            let addresses = self.seating.map(Seating::addresses).unwrap_or_default();
            slurm::complete(&mut variables, self.spec, self.replica, self.dir, &addresses);
        }
        // The job may not choose its visible GPUs: the others belong to other jobs.
        variables.extend(self.visible_gpus());
        variables
    }

    /// The variables of the image, a writable home, and the machine's proxies: the container shares its network, but
    /// not its files.
    fn of_image(&self, image: &Image) -> BTreeMap<String, String> {
        let mut variables: BTreeMap<String, String> = self
            .host
            .job
            .iter()
            .filter(|(name, _)| is_proxy(name))
            .map(|(n, v)| (n.clone(), v.clone()))
            .collect();
        variables.extend(image.env.clone());
        variables.insert("HOME".to_owned(), self.dir.home().display().to_string());
        // Nothing in the image says who the user of this machine is.
        let who = ["USER", "LOGNAME"].map(|name| Some((name.to_owned(), self.host.job.get(name)?.clone())));
        variables.extend(who.into_iter().flatten());
        variables
    }

    /// The environment's programs, then those that `pip install` puts into the home if it may not write to the
    /// environment.
    fn search_path(&self, variables: &BTreeMap<String, String>) -> String {
        let usual = match self.image {
            None => self.host.path.clone(),
            Some(image) => image.env.get("PATH").cloned().unwrap_or_else(|| IMAGE_PATH.to_owned()),
        };
        let entries = self.path_entries.iter().map(|entry| entry.display().to_string());
        let own = variables.get("PYTHONUSERBASE").map(|base| format!("{base}/bin"));
        let home = variables.get("HOME").map(|home| format!("{}/.local/bin", home.trim_end_matches('/')));
        entries.chain(own).chain(home).chain([usual]).collect::<Vec<_>>().join(":")
    }

    /// The variables with the job's identity and paths.
    fn contract(&self) -> BTreeMap<String, String> {
        let text = |path: &Path| path.display().to_string();
        let job = self.replica.job.to_string();
        let mut variables: BTreeMap<String, String> = [
            ("AGENTD_JOB", job.clone()),
            ("AGENTD_REPLICA", self.replica.to_string()),
            ("AGENTD_METRICS", text(&self.dir.tracking())),
            ("AGENTD_PREEMPTION_FILE", text(&self.dir.preemption())),
            ("AZUREML_RUN_ID", job.clone()),
            ("AZUREML_ROOT_RUN_ID", job.clone()),
            ("AZUREML_DATA_CONTAINER_ID", format!("dcid.{job}")),
            ("AZUREML_EXPERIMENT_ID", self.experiment_id.to_owned()),
            ("AZUREML_ARM_PROJECT_NAME", self.spec.experiment.clone()),
            ("AZUREML_NODE_COUNT", self.spec.resources.nodes.to_string()),
            ("AZUREML_CR_NODE_RANK", self.replica.rank.to_string()),
            ("AZUREML_CR_EXECUTION_WORKING_DIR_PATH", text(&self.dir.work())),
            ("AZUREML_COMPUTE_USE_COMMON_RUNTIME", "true".to_owned()),
            ("MLFLOW_TRACKING_URI", self.tracking_uri.to_owned()),
            ("MLFLOW_TRACKING_TOKEN", self.tracking_token.to_owned()),
            ("MLFLOW_RUN_ID", job),
            ("MLFLOW_EXPERIMENT_ID", self.experiment_id.to_owned()),
            // The web pages that the client would print do not exist.
            ("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true".to_owned()),
            ("PYTHONUNBUFFERED", "1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        for (name, input) in &self.spec.inputs {
            if let Some(path) = input_path(self.dir, name, input) {
                variables.insert(format!("AZURE_ML_INPUT_{name}"), text(&path));
            }
        }
        for (name, output) in &self.spec.outputs {
            let path = output_path(self.dir, name, output);
            variables.insert(format!("AZURE_ML_OUTPUT_{name}"), text(&path));
        }
        variables
    }

    /// The variables that libraries and container engines read: a job sees the GPUs it was given, by UUIDs, which do
    /// not change when another GPU is lost. A job that asked for none sees none.
    fn visible_gpus(&self) -> [(String, String); 3] {
        let gpus = self.gpus.join(",");
        let void = if gpus.is_empty() { "void".to_owned() } else { gpus.clone() };
        [
            ("CUDA_VISIBLE_DEVICES", gpus),
            (NVIDIA_VISIBLE, void),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
    }
}

fn is_proxy(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with("_proxy")
}

/// If a proxy is set, loopback must be reached without it, because of the tracking endpoint.
fn keep_loopback_direct(variables: &mut BTreeMap<String, String>) {
    if !variables.keys().any(|name| is_proxy(name)) {
        return;
    }
    for name in ["NO_PROXY", "no_proxy"] {
        let direct = variables.entry(name.to_owned()).or_default();
        for host in ["127.0.0.1", "localhost"] {
            if direct != "*" && !direct.split(',').any(|known| known.trim() == host) {
                if !direct.is_empty() {
                    direct.push(',');
                }
                direct.push_str(host);
            }
        }
    }
}

/// `bash` if there is one, as in the cloud; every machine has `sh`.
fn shell(path: &str) -> String {
    let bash = path.split(':').map(|dir| Path::new(dir).join("bash")).find(|bash| bash.is_file());
    bash.map_or_else(|| "sh".to_owned(), |bash| bash.display().to_string())
}

#[cfg(test)]
mod tests {
    use agent_model::{DataInput, Digest, JobDraft};

    use super::*;

    fn host(job: &[(&str, &str)]) -> HostVariables {
        let job: BTreeMap<String, String> =
            job.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        HostVariables { path: "/no/bin:/bin".into(), builder: BTreeMap::new(), open_files: Some(1024), job }
    }

    fn launch(draft: JobDraft, host: &HostVariables, user: Option<&JobUser>) -> Launch {
        launch_in(None, draft, host, user)
    }

    fn launch_in(
        image: Option<&Image>,
        draft: JobDraft,
        host: &HostVariables,
        user: Option<&JobUser>,
    ) -> Launch {
        let gpus: Vec<String> = (0..draft.resources.gpus).map(|n| format!("GPU-{n}")).collect();
        let facts = Facts {
            replica: &"train.3.0".parse().unwrap(),
            spec: &draft.validate().unwrap(),
            dir: &JobDir::new("/j/train.3.0"),
            host,
            user,
            path_entries: &["/envs/pip-1/bin".into()],
            environment: &[("VIRTUAL_ENV".to_owned(), "/envs/pip-1".to_owned())].into(),
            image,
            tracking_uri: "http://127.0.0.1:5",
            tracking_port: 5,
            tracking_token: "token",
            experiment_id: "17",
            log_quota: 1 << 30,
            gpus: &gpus,
            denied: &[],
            usual_memory: 7 << 30,
            own_packages: user.is_some(),
            private: user.is_some(),
            view: None,
            metadata: false,
            lease_until: Some(Boot::from_millis(60_000)),
            seating: None,
        };
        facts.launch().unwrap()
    }

    fn draft(command: &str) -> JobDraft {
        JobDraft { command: command.into(), experiment: "birds".into(), ..JobDraft::default() }
    }

    fn far(uri: &str, is_file: bool) -> Input {
        Input::Data(DataInput { uri: uri.parse().unwrap(), is_file, is_own_copy: false })
    }

    #[test]
    fn test_command_names_inputs_and_outputs() {
        let job = JobDraft {
            inputs: [
                ("lr".to_owned(), Input::Literal("0.1".into())),
                ("data".to_owned(), Input::Folder(Digest::EMPTY)),
                ("table".to_owned(), Input::File { root: Digest::EMPTY, name: "t.csv".into() }),
                ("far".to_owned(), far("https://h.example/a/far.csv?x", true)),
                ("farther".to_owned(), far("azureml://datastores/blob/paths/a", false)),
            ]
            .into(),
            outputs: [("model".to_owned(), Output::Folder), ("report".to_owned(), Output::File)].into(),
            ..draft(
                "t ${{inputs.lr}} ${{inputs.data}} ${{inputs.table}} ${{outputs.model}} ${{outputs.report}}",
            )
        };
        let launch = launch(job, &host(&[]), None);
        let j = "/j/train.3.0/job";
        let command =
            format!("t 0.1 {j}/inputs/data {j}/inputs/table/t.csv {j}/out/model {j}/out/report/report");
        assert_eq!(launch.argv[1..], ["-c".to_owned(), command]);
        assert_eq!(launch.cwd, Path::new("/j/train.3.0/job/work"));
        assert_eq!(launch.env["AZURE_ML_INPUT_table"], format!("{j}/inputs/table/t.csv"));
        assert_eq!(launch.env["AZURE_ML_OUTPUT_report"], format!("{j}/out/report/report"));
        assert!(!launch.env.contains_key("AZURE_ML_INPUT_lr"));
        assert_eq!(launch.env["AZURE_ML_INPUT_far"], format!("{j}/inputs/far/far.csv"));
        assert_eq!(launch.env["AZURE_ML_INPUT_farther"], format!("{j}/inputs/farther"));
    }

    #[test]
    fn test_job_finds_the_variables_it_looks_for() {
        let env = launch(draft("true"), &host(&[("HOME", "/root"), ("TZ", "UTC")]), None).env;
        for (name, value) in [
            ("PATH", "/envs/pip-1/bin:/root/.local/bin:/no/bin:/bin"),
            ("VIRTUAL_ENV", "/envs/pip-1"),
            ("HOME", "/root"),
            ("TZ", "UTC"),
            ("AZUREML_RUN_ID", "train"),
            ("AZUREML_NODE_COUNT", "1"),
            ("AZUREML_CR_NODE_RANK", "0"),
            ("AZUREML_ARM_PROJECT_NAME", "birds"),
            ("MLFLOW_TRACKING_URI", "http://127.0.0.1:5"),
            ("MLFLOW_RUN_ID", "train"),
            ("MLFLOW_EXPERIMENT_ID", "17"),
            ("MLFLOW_TRACKING_TOKEN", "token"),
            ("AGENTD_METRICS", "/j/train.3.0/job/tracking.jsonl"),
            ("AGENTD_REPLICA", "train.3.0"),
            ("PYTHONUNBUFFERED", "1"),
            ("CUDA_VISIBLE_DEVICES", ""),
            ("NVIDIA_VISIBLE_DEVICES", "void"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
        // With these the cloud's own SDK would call the cloud.
        assert!(!env.contains_key("AZUREML_RUN_TOKEN") && !env.contains_key("AZUREML_SERVICE_ENDPOINT"));
    }

    #[test]
    fn test_what_the_job_says_wins() {
        let said = [("PYTHONUNBUFFERED".to_owned(), "0".to_owned()), ("MINE".to_owned(), "1".to_owned())];
        let job = JobDraft { environment_variables: said.into(), ..draft("true") };
        let env = launch(job, &host(&[]), None).env;
        assert_eq!((env["PYTHONUNBUFFERED"].as_str(), env["MINE"].as_str()), ("0", "1"));
    }

    #[test]
    fn test_only_who_asks_has_the_stand_in_and_behind_its_own_path() {
        assert!(!launch(draft("true"), &host(&[]), None).env.contains_key("PYTHONPATH"));
        let said = [("PYTHONPATH".to_owned(), "src".to_owned())];
        let job = JobDraft { azureml_stand_in: true, environment_variables: said.into(), ..draft("true") };
        assert_eq!(launch(job, &host(&[]), None).env["PYTHONPATH"], "src:/j/train.3.0/job/azureml");
    }

    #[test]
    fn test_job_sees_the_gpus_it_was_given_whatever_it_says() {
        let said = [("CUDA_VISIBLE_DEVICES".to_owned(), "0,1".to_owned())];
        let mut job = JobDraft { environment_variables: said.into(), ..draft("true") };
        let none = launch(job.clone(), &host(&[]), None);
        assert_eq!((none.env["CUDA_VISIBLE_DEVICES"].as_str(), gpus_of(&none)), ("", Vec::new()));
        job.resources.gpus = 2;
        let two = launch(job, &host(&[("CUDA_VISIBLE_DEVICES", "7")]), None);
        assert_eq!(two.env["CUDA_VISIBLE_DEVICES"], "GPU-0,GPU-1");
        assert_eq!(two.env["NVIDIA_VISIBLE_DEVICES"], "GPU-0,GPU-1");
        assert_eq!(two.env["CUDA_DEVICE_ORDER"], "PCI_BUS_ID");
        assert_eq!(gpus_of(&two), ["GPU-0", "GPU-1"]);
    }

    #[test]
    fn test_job_user_has_its_own_home() {
        let user =
            JobUser { name: "job".into(), uid: 900, gid: 901, groups: vec![44], home: "/var/job".into() };
        let launch = launch(draft("true"), &host(&[("HOME", "/root"), ("USER", "root")]), Some(&user));
        assert_eq!((launch.env["HOME"].as_str(), launch.env["USER"].as_str()), ("/var/job", "job"));
        assert_eq!(launch.user, Some(User { uid: 900, gid: 901, groups: vec![44] }));
    }

    #[test]
    fn test_image_says_what_its_commands_find_and_the_machine_does_not() {
        let env = [("PATH", "/image/bin"), ("LANG", "C.UTF-8"), ("HOME", "/root")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let image = Image { env, ..Image::default() };
        let user =
            JobUser { name: "job".into(), uid: 900, gid: 901, groups: vec![44], home: "/var/job".into() };
        let machine = host(&[("LANG", "de_DE"), ("SSL_CERT_FILE", "/etc/x"), ("https_proxy", "http://p")]);
        let launch = launch_in(Some(&image), draft("t 1"), &machine, Some(&user));
        for (name, value) in [
            ("PATH", "/envs/pip-1/bin:/j/train.3.0/job/home/.local/bin:/image/bin"),
            ("LANG", "C.UTF-8"),
            ("HOME", "/j/train.3.0/job/home"),
            ("USER", "job"),
            ("https_proxy", "http://p"),
            ("NO_PROXY", "127.0.0.1,localhost"),
            ("AZUREML_RUN_ID", "train"),
        ] {
            assert_eq!(launch.env.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(launch.container && !launch.env.contains_key("SSL_CERT_FILE"));
        assert_eq!((launch.argv[0].as_str(), launch.argv[4].as_str()), ("sh", "t 1"));
        let plain = launch_in(Some(&Image::default()), draft("t"), &machine, None);
        assert_eq!(
            plain.env["PATH"],
            format!("/envs/pip-1/bin:/j/train.3.0/job/home/.local/bin:{IMAGE_PATH}")
        );
        assert_eq!(plain.env["HOME"], "/j/train.3.0/job/home");
        let own = launch_in(
            Some(&Image::default()),
            draft("t"),
            &host(&[("USER", "ada"), ("LOGNAME", "ada")]),
            None,
        );
        assert_eq!(
            (own.env["USER"].as_str(), own.env["LOGNAME"].as_str()),
            ("ada", "ada"),
            "of one's own daemon"
        );
    }

    #[test]
    fn test_proxies_never_stand_before_loopback() {
        let env =
            launch(draft("true"), &host(&[("https_proxy", "http://p"), ("no_proxy", "lab,localhost")]), None)
                .env;
        assert_eq!(env["no_proxy"], "lab,localhost,127.0.0.1");
        assert_eq!(env["NO_PROXY"], "127.0.0.1,localhost");
        assert!(!launch(draft("true"), &host(&[]), None).env.contains_key("NO_PROXY"));
    }

    #[test]
    fn test_shell_is_looked_up() {
        assert_eq!(shell("/nowhere"), "sh");
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("bash"), "").unwrap();
        assert_eq!(
            shell(&format!("/nowhere:{}", dir.path().display())),
            dir.path().join("bash").display().to_string()
        );
    }
}
