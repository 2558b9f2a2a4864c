//! What a job finds when it starts: its command line, its folders and its environment.
//!
//! Pure, but for looking whether `bash` exists. The names are those scripts written for the cloud look for.
//! Called by `worker::runner`, once for each launch.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use agent_model::expr::{self, Reference};
use agent_model::job::{Input, Output};
use agent_model::{Boot, Fault, JobSpec, ReplicaId};
use agent_shim::{JobDir, Launch, Limits, LogPolicy, User, VERSION};

use super::tracking::experiment_id;
use crate::config::{HostVariables, JobUser};

/// Everything a launch is made of.
pub(crate) struct Facts<'a> {
    pub(crate) replica: &'a ReplicaId,
    pub(crate) spec: &'a JobSpec,
    pub(crate) dir: &'a JobDir,
    pub(crate) host: &'a HostVariables,
    pub(crate) user: Option<&'a JobUser>,
    /// What goes first on `PATH`, from the environment.
    pub(crate) path_entries: &'a [PathBuf],
    /// The environment's own variables.
    pub(crate) environment: &'a BTreeMap<String, String>,
    pub(crate) tracking_uri: &'a str,
    pub(crate) tracking_token: &'a str,
    /// What its log may take of the disk.
    pub(crate) log_quota: u64,
    /// Until when the job may run if nothing more is heard; for ever when absent.
    pub(crate) lease_until: Option<Boot>,
}

/// Processes and threads a job may have at a time: more than any does that works, and few enough to leave
/// the machine some.
const PIDS: u64 = 32_768;

/// The file an output of the kind `file` is written to, or the folder of one of the kind `folder`.
fn output_path(dir: &JobDir, name: &str, output: Output) -> PathBuf {
    match output {
        Output::Folder => dir.out().join(name),
        Output::File => dir.out().join(name).join(name),
    }
}

/// Where an input lies; `None` for a literal.
fn input_path(dir: &JobDir, name: &str, input: &Input) -> Option<PathBuf> {
    match input {
        Input::Literal(_) => None,
        Input::Folder(_) => Some(dir.inputs().join(name)),
        Input::File { name: file, .. } => Some(dir.inputs().join(name).join(file)),
    }
}

impl Facts<'_> {
    /// The record the shim obeys.
    pub(crate) fn launch(&self) -> Result<Launch, Fault> {
        let command = expr::substitute(&self.spec.command, |reference| self.resolve(reference))?;
        Ok(Launch {
            version: VERSION,
            replica: self.replica.clone(),
            argv: vec![shell(&self.host.path), "-c".to_owned(), command],
            env: self.variables(),
            cwd: self.dir.work(),
            grace: self.spec.limits.grace(),
            timeout: self.spec.limits.timeout,
            user: self.user.map(|user| User { uid: user.uid, gid: user.gid }),
            log: LogPolicy { quota: self.log_quota, ..LogPolicy::default() },
            limits: Limits {
                memory: Some(self.spec.resources.memory).filter(|memory| *memory > 0),
                pids: Some(PIDS),
            },
            lease_until: self.lease_until,
            cgroup: None,
        })
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
                .map(|kind| text(output_path(self.dir, name, *kind)))
                .unwrap_or_default(),
        }
    }

    /// The whole environment; what the job itself says comes last and wins.
    fn variables(&self) -> BTreeMap<String, String> {
        let mut variables = self.host.job.clone();
        if let Some(user) = self.user {
            for (name, value) in [("HOME", &user.home), ("USER", &user.name), ("LOGNAME", &user.name)] {
                variables.insert(name.to_owned(), value.clone());
            }
        }
        keep_loopback_direct(&mut variables);
        variables.insert("PATH".to_owned(), self.search_path());
        variables.extend(self.environment.clone());
        variables.extend(self.contract());
        variables.extend(self.spec.environment_variables.clone());
        variables
    }

    fn search_path(&self) -> String {
        let entries = self.path_entries.iter().map(|entry| entry.display().to_string());
        entries.chain([self.host.path.clone()]).collect::<Vec<_>>().join(":")
    }

    /// The variables that say which job this is and where its things are.
    fn contract(&self) -> BTreeMap<String, String> {
        let text = |path: &Path| path.display().to_string();
        let job = self.replica.job.to_string();
        let mut variables: BTreeMap<String, String> = [
            ("AGENTD_JOB", job.clone()),
            ("AGENTD_REPLICA", self.replica.to_string()),
            ("AGENTD_METRICS", text(&self.dir.tracking())),
            ("AZUREML_RUN_ID", job.clone()),
            ("AZUREML_ROOT_RUN_ID", job.clone()),
            ("AZUREML_DATA_CONTAINER_ID", format!("dcid.{job}")),
            ("AZUREML_EXPERIMENT_ID", experiment_id(&self.spec.experiment)),
            ("AZUREML_ARM_PROJECT_NAME", self.spec.experiment.clone()),
            ("AZUREML_NODE_COUNT", self.spec.resources.nodes.to_string()),
            ("AZUREML_CR_NODE_RANK", self.replica.rank.to_string()),
            ("AZUREML_CR_EXECUTION_WORKING_DIR_PATH", text(&self.dir.work())),
            ("AZUREML_COMPUTE_USE_COMMON_RUNTIME", "true".to_owned()),
            ("MLFLOW_TRACKING_URI", self.tracking_uri.to_owned()),
            ("MLFLOW_TRACKING_TOKEN", self.tracking_token.to_owned()),
            ("MLFLOW_RUN_ID", job),
            ("MLFLOW_EXPERIMENT_ID", experiment_id(&self.spec.experiment)),
            ("MLFLOW_EXPERIMENT_NAME", self.spec.experiment.clone()),
            // The pages its client would name are not there.
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
            let path = output_path(self.dir, name, *output);
            variables.insert(format!("AZURE_ML_OUTPUT_{name}"), text(&path));
        }
        if self.spec.resources.gpus == 0 {
            // A job that asked for no GPU sees none.
            variables.insert("CUDA_VISIBLE_DEVICES".to_owned(), String::new());
            variables.insert("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned());
        }
        variables
    }
}

/// Where a proxy is set, loopback must stay reachable without it: the tracking endpoint is there.
fn keep_loopback_direct(variables: &mut BTreeMap<String, String>) {
    let proxied = |name: &str| name.to_ascii_lowercase().ends_with("_proxy");
    if !variables.keys().any(|name| proxied(name)) {
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

/// `bash` where there is one, as in the cloud; every machine has `sh`.
fn shell(path: &str) -> String {
    let bash = path.split(':').map(|dir| Path::new(dir).join("bash")).find(|bash| bash.is_file());
    bash.map_or_else(|| "sh".to_owned(), |bash| bash.display().to_string())
}

#[cfg(test)]
mod tests {
    use agent_model::{Digest, JobDraft};

    use super::*;

    fn host(job: &[(&str, &str)]) -> HostVariables {
        let job: BTreeMap<String, String> =
            job.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        HostVariables { path: "/no/bin:/bin".into(), builder: BTreeMap::new(), job }
    }

    fn launch(draft: JobDraft, host: &HostVariables, user: Option<&JobUser>) -> Launch {
        let facts = Facts {
            replica: &"train.3.0".parse().unwrap(),
            spec: &draft.validate().unwrap(),
            dir: &JobDir::new("/j/train.3.0"),
            host,
            user,
            path_entries: &["/envs/pip-1/bin".into()],
            environment: &[("VIRTUAL_ENV".to_owned(), "/envs/pip-1".to_owned())].into(),
            tracking_uri: "http://127.0.0.1:5",
            tracking_token: "token",
            log_quota: 1 << 30,
            lease_until: Some(Boot::from_millis(60_000)),
        };
        facts.launch().unwrap()
    }

    fn draft(command: &str) -> JobDraft {
        JobDraft { command: command.into(), experiment: "birds".into(), ..JobDraft::default() }
    }

    #[test]
    fn test_command_names_inputs_and_outputs() {
        let job = JobDraft {
            inputs: [
                ("lr".to_owned(), Input::Literal("0.1".into())),
                ("data".to_owned(), Input::Folder(Digest::EMPTY)),
                ("table".to_owned(), Input::File { root: Digest::EMPTY, name: "t.csv".into() }),
            ]
            .into(),
            outputs: [("model".to_owned(), Output::Folder), ("report".to_owned(), Output::File)].into(),
            ..draft(
                "t ${{inputs.lr}} ${{inputs.data}} ${{inputs.table}} ${{outputs.model}} ${{outputs.report}}",
            )
        };
        let launch = launch(job, &host(&[]), None);
        let j = "/j/train.3.0";
        let command =
            format!("t 0.1 {j}/inputs/data {j}/inputs/table/t.csv {j}/out/model {j}/out/report/report");
        assert_eq!(launch.argv[1..], ["-c".to_owned(), command]);
        assert_eq!(launch.cwd, Path::new("/j/train.3.0/work"));
        assert_eq!(launch.env["AZURE_ML_INPUT_table"], format!("{j}/inputs/table/t.csv"));
        assert_eq!(launch.env["AZURE_ML_OUTPUT_report"], format!("{j}/out/report/report"));
        assert!(!launch.env.contains_key("AZURE_ML_INPUT_lr"));
    }

    #[test]
    fn test_job_finds_the_variables_it_looks_for() {
        let env = launch(draft("true"), &host(&[("HOME", "/root"), ("TZ", "UTC")]), None).env;
        for (name, value) in [
            ("PATH", "/envs/pip-1/bin:/no/bin:/bin"),
            ("VIRTUAL_ENV", "/envs/pip-1"),
            ("HOME", "/root"),
            ("TZ", "UTC"),
            ("AZUREML_RUN_ID", "train"),
            ("AZUREML_NODE_COUNT", "1"),
            ("AZUREML_CR_NODE_RANK", "0"),
            ("AZUREML_ARM_PROJECT_NAME", "birds"),
            ("MLFLOW_TRACKING_URI", "http://127.0.0.1:5"),
            ("MLFLOW_RUN_ID", "train"),
            ("MLFLOW_EXPERIMENT_NAME", "birds"),
            ("MLFLOW_TRACKING_TOKEN", "token"),
            ("AGENTD_METRICS", "/j/train.3.0/tracking.jsonl"),
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
    fn test_job_user_has_its_own_home() {
        let user = JobUser { name: "job".into(), uid: 900, gid: 901, home: "/var/job".into() };
        let launch = launch(draft("true"), &host(&[("HOME", "/root"), ("USER", "root")]), Some(&user));
        assert_eq!((launch.env["HOME"].as_str(), launch.env["USER"].as_str()), ("/var/job", "job"));
        assert_eq!(launch.user, Some(User { uid: 900, gid: 901 }));
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
