//! A job as the text of a job file: the way back from a draft.
//!
//! What is written holds all that the job is: code, inputs and image contexts by their content, environments as texts,
//! so that no file beside it is needed. Read again, it is the same draft ([`job_text`] and `command_job` are inverse),
//! except for what belongs to one submission: the name, which is used up, the owner, and the jobs it came after.

mod sweep;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::yaml::{self, Item};
use agent_model::job::{Distribution, Input, JobDraft, JobService, Limits, OnDisconnect, Output, OutputName};
use agent_model::job::{POOL, Priority, Resources, RetryPolicy};
use agent_model::{DataInput, Digest, EnvSpec, SnapshotRef};

/// The text of a job file that makes this job.
pub fn job_text(draft: &JobDraft) -> String {
    yaml::write(&document(draft))
}

/// The same as a text for each key, as `resources.memory`; items of lists are lines.
pub fn job_entries(draft: &JobDraft) -> BTreeMap<String, String> {
    let mut entries = BTreeMap::new();
    flatten("", &document(draft), &mut entries);
    entries
}

fn flatten(path: &str, item: &Item, entries: &mut BTreeMap<String, String>) {
    match item {
        Item::Map(below) => {
            for (key, item) in below {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, item, entries);
            }
        }
        Item::List(items) => {
            let lines: Vec<String> = items.iter().map(plain).collect();
            entries.insert(path.to_owned(), lines.join("\n"));
        }
        item => drop(entries.insert(path.to_owned(), plain(item))),
    }
}

fn plain(item: &Item) -> String {
    match item {
        Item::Text(text) => text.clone(),
        Item::Whole(number) => number.to_string(),
        Item::Number(number) => number.clone(),
        Item::Flag(flag) => flag.to_string(),
        // Only the search space of a sweep has such items.
        item @ (Item::List(_) | Item::Map(_)) => yaml::write(item).trim_end().replace('\n', " "),
    }
}

fn document(draft: &JobDraft) -> Item {
    // A new field has to be written as well, so all are named.
    let JobDraft {
        name: _,
        owner: _,
        owner_since: _,
        // A pipeline is made of several files, and is run again as it is on record.
        pipeline: _,
        predecessors: _,
        // The moments were of that submission.
        begin: _,
        deadline: _,
        resumes: _,
        display_name,
        description,
        experiment,
        tags,
        command,
        code,
        environment,
        environment_variables,
        inputs,
        outputs,
        output_names,
        compute,
        array,
        sweep,
        resources,
        distribution,
        limits,
        retry,
        priority,
        secrets,
        visible_to_all,
        resume_outputs,
        azureml_stand_in,
        success_exit_codes,
        services,
    } = draft;
    let mut job = Mapping::default();
    job.text("display_name", display_name);
    job.text("experiment_name", experiment);
    job.text("description", description);
    job.texts("tags", tags);
    job.add("command", Item::Text(command.clone()));
    job.0.extend(code.map(|root| ("code".to_owned(), snapshot(root, None))));
    job.add("environment", of_environment(environment));
    job.texts("environment_variables", environment_variables);
    job.texts("secrets", secrets);
    job.named("inputs", inputs, of_input);
    let written = outputs.iter().map(|(key, output)| (key.clone(), of_output(output, output_names.get(key))));
    job.mapping("outputs", Mapping(written.collect()));
    job.text("compute", compute.as_deref().unwrap_or_default());
    job.0.extend(array.as_ref().map(|array| ("array".to_owned(), Item::Text(array.to_string()))));
    let mut resources = resources.clone();
    if compute.is_some() {
        resources.labels.remove(POOL); // where the job goes next, its pool may not be
    }
    job.mapping("resources", of_resources(&resources));
    job.mapping("distribution", distribution.as_ref().map(of_distribution).unwrap_or_default());
    job.mapping("limits", of_limits(limits));
    job.mapping("retry", of_retry(retry));
    if *priority != Priority::default() {
        job.add("queue_settings", Item::Map(vec![("priority".to_owned(), priority.name().into())]));
    }
    if *visible_to_all {
        job.add("visibility", "all".into());
    }
    if *resume_outputs {
        job.add("resume", "outputs".into());
    }
    if *azureml_stand_in {
        job.add("azureml_core", "stand_in".into());
    }
    if !success_exit_codes.is_empty() {
        let codes = success_exit_codes.iter().map(|code| Item::Whole(u64::from(*code)));
        job.add("success_exit_codes", Item::List(codes.collect()));
    }
    job.named("services", services, of_service);
    match sweep {
        Some(sweep) => Item::Map(sweep::of_sweep(job, sweep, array.as_ref()).0),
        None => Item::Map(job.0),
    }
}

/// The environment with exactly the packages of a lock, where its form has a place for them.
pub fn locked(environment: &EnvSpec, lock: &str) -> Option<EnvSpec> {
    match environment {
        EnvSpec::Conda { file, document, .. } => Some(EnvSpec::Conda {
            file: file.clone(),
            document: document.clone(),
            lock: Some(lock.to_owned()),
        }),
        EnvSpec::Named { .. } => {
            Some(EnvSpec::Conda { file: String::new(), document: String::new(), lock: Some(lock.to_owned()) })
        }
        EnvSpec::Pip { python, requirements } => {
            let pip = crate::condafile::parse_lock(lock).ok()?.pip;
            let options = requirements.iter().filter(|line| line.starts_with('-')).cloned();
            Some(EnvSpec::Pip { python: python.clone(), requirements: options.chain(pip).collect() })
        }
        EnvSpec::Host { .. } | EnvSpec::Image { .. } | EnvSpec::Build { .. } => None,
    }
}

/// Entries in the order in which they are added; what is empty is left out.
#[derive(Default)]
struct Mapping(Vec<(String, Item)>);

impl Mapping {
    fn add(&mut self, key: &str, item: Item) {
        self.0.push((key.to_owned(), item));
    }

    fn text(&mut self, key: &str, text: &str) {
        if !text.is_empty() {
            self.add(key, text.into());
        }
    }

    fn number(&mut self, key: &str, number: impl Into<u64>) {
        match number.into() {
            0 => {}
            number => self.add(key, Item::Whole(number)),
        }
    }

    fn texts(&mut self, key: &str, texts: &BTreeMap<String, String>) {
        self.named(key, texts, |text| text.as_str().into());
    }

    fn mapping(&mut self, key: &str, mapping: Mapping) {
        if !mapping.0.is_empty() {
            self.add(key, Item::Map(mapping.0));
        }
    }

    fn named<T>(&mut self, key: &str, of: &BTreeMap<String, T>, item: impl Fn(&T) -> Item) {
        self.mapping(key, Mapping(of.iter().map(|(name, value)| (name.clone(), item(value))).collect()));
    }
}

fn snapshot(root: Digest, file: Option<&str>) -> Item {
    Item::Text(SnapshotRef { root, file: file.map(str::to_owned) }.to_string())
}

fn lines(lines: &[String]) -> Item {
    Item::List(lines.iter().map(|line| line.as_str().into()).collect())
}

/// A text that is read as the content of a file: it has more than one line, or ends its only one.
fn content(text: &str) -> Item {
    match text.contains('\n') {
        true => text.into(),
        false => Item::Text(format!("{text}\n")),
    }
}

fn of_environment(environment: &EnvSpec) -> Item {
    let mut mapping = Mapping::default();
    match environment {
        EnvSpec::Host { python, requirements } if requirements.is_empty() => {
            if python == EnvSpec::DEFAULT_PYTHON {
                return "host".into();
            }
            mapping.add("python", python.as_str().into());
        }
        EnvSpec::Host { python, requirements } => {
            mapping.add("python", python.as_str().into());
            mapping.add("requirements", lines(requirements));
            mapping.add("user_managed_dependencies", Item::Flag(true));
        }
        EnvSpec::Pip { python, requirements } => {
            mapping.add("python", python.as_str().into());
            mapping.add("requirements", lines(requirements));
        }
        EnvSpec::Conda { file: _, document, lock } => {
            if !document.is_empty() {
                mapping.add("conda_file", content(document));
            }
            mapping.0.extend(lock.as_ref().map(|lock| ("conda_lock".to_owned(), content(lock))));
        }
        EnvSpec::Image { image, conda } => {
            mapping.add("image", image.as_str().into());
            mapping.0.extend(conda.as_ref().map(|document| ("conda_file".to_owned(), content(document))));
        }
        EnvSpec::Build { context, dockerfile } => {
            let mut build = Mapping::default();
            build.add("path", snapshot(*context, None));
            build.add("dockerfile_path", dockerfile.as_str().into());
            mapping.mapping("build", build);
        }
        EnvSpec::Named { reference } => return reference.as_str().into(),
    }
    Item::Map(mapping.0)
}

fn of_input(input: &Input) -> Item {
    let (is_file, path, is_own_copy) = match input {
        Input::Literal(text) => return text.as_str().into(),
        Input::Folder(root) => (false, snapshot(*root, None), false),
        Input::File { root, name } => (true, snapshot(*root, Some(name)), false),
        Input::Data(DataInput { uri, is_file, is_own_copy }) => {
            (*is_file, Item::Text(uri.to_string()), *is_own_copy)
        }
    };
    let mut mapping = Mapping::default();
    mapping.add("type", if is_file { "uri_file" } else { "uri_folder" }.into());
    mapping.add("path", path);
    if is_own_copy {
        mapping.add("mode", "download".into());
    }
    Item::Map(mapping.0)
}

fn of_output(output: &Output, name: Option<&OutputName>) -> Item {
    let mut mapping = Mapping::default();
    mapping.add("type", if output.is_file() { "uri_file" } else { "uri_folder" }.into());
    if let Some(output) = output.data() {
        mapping.add("path", Item::Text(output.to_string()));
    }
    if let Some(OutputName { name, version }) = name {
        mapping.text("name", name);
        mapping.text("version", version.as_deref().unwrap_or_default());
    }
    Item::Map(mapping.0)
}

fn of_resources(resources: &Resources) -> Mapping {
    let Resources { nodes, gpus, memory, cpus, labels, shm, docker_args } = resources;
    let mut mapping = Mapping::default();
    mapping.number("instance_count", if *nodes == 1 { 0 } else { *nodes });
    mapping.number("gpus", *gpus);
    mapping.number("cpus", *cpus);
    mapping.number("memory", *memory);
    mapping.texts("labels", labels);
    mapping.number("shm_size", *shm);
    if !docker_args.is_empty() {
        mapping.add("docker_args", lines(docker_args));
    }
    mapping
}

fn of_distribution(distribution: &Distribution) -> Mapping {
    let mut mapping = Mapping::default();
    mapping.add("type", distribution.name().into());
    match distribution {
        Distribution::Mpi { processes } | Distribution::PyTorch { processes } => {
            mapping.number("process_count_per_instance", *processes);
        }
        Distribution::TensorFlow { workers, parameter_servers } => {
            mapping.number("worker_count", *workers);
            mapping.number("parameter_server_count", *parameter_servers);
        }
        Distribution::Ray { port, dashboard, dashboard_port, head_arguments, worker_arguments } => {
            mapping.number("port", *port);
            mapping.0.extend(dashboard.map(|flag| ("include_dashboard".to_owned(), Item::Flag(flag))));
            mapping.number("dashboard_port", *dashboard_port);
            mapping.text("head_node_additional_args", head_arguments);
            mapping.text("worker_node_additional_args", worker_arguments);
        }
        Distribution::Spark => {}
    }
    mapping
}

/// Job files have whole seconds; a part of one is rounded up.
fn seconds(time: Duration) -> Item {
    Item::Whole(time.as_secs() + u64::from(time.subsec_nanos() > 0))
}

fn of_limits(limits: &Limits) -> Mapping {
    let Limits { timeout, grace, on_disconnect } = limits;
    let mut mapping = Mapping::default();
    mapping.0.extend(timeout.map(|time| ("timeout".to_owned(), seconds(time))));
    mapping.0.extend(grace.map(|time| ("grace".to_owned(), seconds(time))));
    if *on_disconnect != OnDisconnect::default() {
        mapping.add("on_disconnect", on_disconnect.name().into());
    }
    mapping
}

fn of_retry(retry: &RetryPolicy) -> Mapping {
    let RetryPolicy { max_attempts, backoff } = retry;
    let mut mapping = Mapping::default();
    if *retry != RetryPolicy::default() {
        mapping.number("max_attempts", *max_attempts);
        mapping.add("backoff", seconds(*backoff));
    }
    mapping
}

fn of_service(service: &JobService) -> Item {
    let JobService { kind, port, log_dir, rank } = service;
    let mut mapping = Mapping::default();
    mapping.add("type", kind.name().into());
    mapping.number("port", port.unwrap_or(0));
    mapping.text("log_dir", log_dir);
    if *rank > 0 {
        mapping.add("nodes", Item::Text(rank.to_string()));
    }
    Item::Map(mapping.0)
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::*;
    use crate::env::normalized;
    use crate::{EnvironmentRef, JobFile, command_job};
    use agent_model::DataOutput;
    use agent_model::job::ServiceKind;

    /// What a job file says, as a draft.
    #[track_caller]
    fn read(text: &str) -> JobDraft {
        let JobFile { draft, code, environment, inputs, warnings } =
            command_job(text, &[]).unwrap_or_else(|refused| panic!("{text}\n{refused:?}"));
        assert_eq!((code, inputs, warnings.len()), (None, Vec::new(), 0), "{text}");
        let EnvironmentRef::Spec(environment) = environment else { panic!("a file is named:\n{text}") };
        JobDraft { environment, ..draft }
    }

    const EMPTY: Digest = Digest::EMPTY;

    #[test]
    fn test_a_job_is_written_as_people_write_it() {
        let draft = JobDraft {
            display_name: "Train".into(),
            experiment: "diabetes".into(),
            command: "python train.py --lr ${{inputs.lr}}\ncat ${{inputs.data}}\n".into(),
            code: Some(EMPTY),
            environment: EnvSpec::Conda {
                file: "conda.yml".into(),
                document: "dependencies:\n- python=3.11 # why\n".into(),
                lock: None,
            },
            inputs: BTreeMap::from([
                ("lr".to_owned(), Input::Literal("0.1".into())),
                ("data".to_owned(), Input::File { root: EMPTY, name: "x.csv".into() }),
            ]),
            outputs: BTreeMap::from([("model".to_owned(), Output::File)]),
            retry: RetryPolicy { max_attempts: 3, ..RetryPolicy::default() },
            ..JobDraft::default()
        };
        let text = job_text(&draft).replace(&EMPTY.hex(), "HASH");
        let expected = r#"display_name: Train
experiment_name: diabetes
command: |
  python train.py --lr ${{inputs.lr}}
  cat ${{inputs.data}}
code: "snapshot:HASH/0"
environment:
  conda_file: |
    dependencies:
    - python=3.11 # why
inputs:
  data:
    type: uri_file
    path: "snapshot:HASH/0/x.csv"
  lr: "0.1"
outputs:
  model:
    type: uri_file
retry:
  max_attempts: 3
  backoff: 10
"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn test_each_key_has_a_text() {
        let resources =
            Resources { memory: 7, docker_args: vec!["-a".into(), "-b".into()], ..Resources::default() };
        let inputs = BTreeMap::from([("lr".to_owned(), Input::Literal("0.1".into()))]);
        let draft = JobDraft { command: "x".into(), resources, inputs, ..JobDraft::default() };
        let expected = [
            ("command", "x"),
            ("environment", "host"),
            ("inputs.lr", "0.1"),
            ("resources.docker_args", "-a\n-b"),
            ("resources.memory", "7"),
        ];
        let expected = expected.map(|(key, text)| (key.to_owned(), text.to_owned()));
        assert_eq!(job_entries(&draft), BTreeMap::from(expected));
    }

    #[test]
    fn test_every_environment_is_read_as_it_was() {
        let python = || "/opt/p 3/bin/python".to_owned();
        let lock = "@EXPLICIT\nhttps://h/c/noarch/a-1-0.conda".to_owned();
        for environment in [
            EnvSpec::host(),
            EnvSpec::Host { python: python(), requirements: Vec::new() },
            EnvSpec::Host { python: python(), requirements: vec!["numpy==1; python_version<'4'".into()] },
            EnvSpec::Pip {
                python: python(),
                requirements: vec!["-i https://h/simple".into(), "a[b]".into()],
            },
            EnvSpec::Pip { python: python(), requirements: Vec::new() },
            EnvSpec::Conda { file: String::new(), document: "a: 1\n\n".into(), lock: None },
            EnvSpec::Conda { file: String::new(), document: "a: 1\nb: 2".into(), lock: Some(lock.clone()) },
            EnvSpec::Conda { file: String::new(), document: String::new(), lock: Some(lock) },
            EnvSpec::Image { image: "ubuntu:24.04".into(), conda: None },
            EnvSpec::Image { image: "ubuntu".into(), conda: Some("\n\ta: [\n".into()) },
            EnvSpec::Build { context: EMPTY, dockerfile: "d/Dockerfile".into() },
            EnvSpec::Named { reference: "azureml:AzureML-sklearn-1.5@latest".into() },
        ] {
            let draft = JobDraft { command: "x".into(), environment, ..JobDraft::default() };
            assert_eq!(read(&job_text(&draft)), draft);
        }
        // Of a text of one line, the end of that line is added, and the environment stays the same.
        let one = EnvSpec::Conda { file: String::new(), document: "dependencies: [a]".into(), lock: None };
        let draft = JobDraft { command: "x".into(), environment: one.clone(), ..JobDraft::default() };
        assert_eq!(normalized(&read(&job_text(&draft)).environment), normalized(&one));
    }

    #[test]
    fn test_a_lock_takes_the_place_of_what_was_left_open() {
        let lock = "@EXPLICIT\nhttps://h/c/noarch/a-1-0.conda\n# pip six==1.0\n";
        let pip = |lines: &[&str]| EnvSpec::Pip {
            python: "python3".into(),
            requirements: lines.iter().map(|line| (*line).to_owned()).collect(),
        };
        assert_eq!(locked(&pip(&["--pre", "six"]), lock), Some(pip(&["--pre", "six==1.0"])));
        let conda = |document: &str, lock: Option<&str>| EnvSpec::Conda {
            file: String::new(),
            document: document.into(),
            lock: lock.map(str::to_owned),
        };
        assert_eq!(locked(&conda("d", None), lock), Some(conda("d", Some(lock))));
        let named = EnvSpec::Named { reference: "azureml:a:1".into() };
        assert_eq!(locked(&named, lock), Some(conda("", Some(lock))));
        assert_eq!(locked(&EnvSpec::host(), lock), None);
    }

    /// Texts that are hard to write.
    fn text() -> impl Strategy<Value = String> {
        let hard = vec![
            "",
            "~",
            "yes",
            "1_000",
            "1:30",
            "- a",
            "a: b",
            "# a",
            "'",
            "\"",
            "\\",
            "|",
            "a\n",
            "\n\na",
            " a",
            "a ",
            "\ta",
            "---",
            "...\nb",
            "0x1f",
            "é\u{85}b",
            "a\r\nb",
            "\u{feff}",
            "a #b",
            "%x",
            "@a",
            "{a",
            "? a",
            "1e3",
        ];
        let hard = prop::sample::select(hard.into_iter().map(str::to_owned).collect::<Vec<_>>());
        prop_oneof![hard, "[ -~]{0,12}", "[a-z:# \n'\"-]{0,20}"]
    }

    fn name() -> impl Strategy<Value = String> {
        "[A-Za-z0-9_][A-Za-z0-9_.-]{0,6}"
    }

    fn input() -> impl Strategy<Value = Input> {
        let url = |is_own_copy| {
            let uri = "https://h/a".parse().unwrap();
            Input::Data(DataInput { uri, is_file: true, is_own_copy })
        };
        prop_oneof![
            text().prop_map(Input::Literal),
            Just(Input::Folder(EMPTY)),
            name().prop_map(|name| Input::File { root: EMPTY, name }),
            any::<bool>().prop_map(url),
        ]
    }

    fn sent(is_file: bool) -> Output {
        let text = "azureml://datastores/share/paths/runs/${{name}}";
        Output::Data(DataOutput::parse(text, "s", is_file).unwrap())
    }

    fn draft() -> impl Strategy<Value = JobDraft> {
        let texts = || btree_map(name(), text(), 0..4);
        let needs = (0..9_u32, 0..u64::MAX >> 8, texts(), any::<bool>());
        let times = (prop::option::of(1..9_999_u64), prop::option::of(0..9_u64), 1..5_u32, 0..99_u64);
        let service = (any::<bool>(), 1..u16::MAX, text()).prop_map(|(custom, port, log_dir)| JobService {
            kind: if custom { ServiceKind::Custom } else { ServiceKind::TensorBoard },
            port: Some(port),
            log_dir,
            rank: 0,
        });
        let services = btree_map(name(), service, 0..3);
        let words = (text(), text(), text(), texts(), text());
        let parts = (words, btree_map(name(), input(), 0..4), needs, times, services, vec(any::<bool>(), 4));
        parts.prop_map(|(words, inputs, needs, times, services, flags)| JobDraft {
            display_name: words.0,
            description: words.1,
            experiment: words.2,
            tags: words.3.clone(),
            environment_variables: words.3,
            command: words.4.replace("${{", ""),
            code: flags[0].then_some(EMPTY),
            compute: flags[0].then(|| "gpu".to_owned()),
            inputs,
            outputs: BTreeMap::from([
                ("m".to_owned(), if flags[1] { Output::File } else { Output::Folder }),
                ("s".to_owned(), sent(flags[2])),
            ]),
            output_names: flags[2]
                .then(|| OutputName { name: "a-b".into(), version: flags[3].then(|| "007".to_owned()) })
                .map(|name| ("m".to_owned(), name))
                .into_iter()
                .collect(),
            resources: Resources { gpus: needs.0, memory: needs.1, labels: needs.2, ..Resources::default() },
            limits: Limits {
                timeout: times.0.map(Duration::from_secs),
                grace: times.1.map(Duration::from_secs),
                on_disconnect: if times.2 > 1 { OnDisconnect::Replace } else { OnDisconnect::Hold },
            },
            retry: RetryPolicy { max_attempts: times.2, backoff: Duration::from_secs(times.3) },
            distribution: flags[2].then_some(Distribution::PyTorch { processes: 2 }),
            priority: if flags[3] { Priority::High } else { Priority::Medium },
            visible_to_all: needs.3,
            azureml_stand_in: needs.3,
            array: flags[1].then(|| format!("0-{}:2%3", times.3).parse().unwrap()),
            services,
            ..JobDraft::default()
        })
    }

    proptest! {
        #[test]
        fn test_what_is_written_is_read_as_the_same_job(draft in draft()) {
            prop_assert_eq!(read(&job_text(&draft)), draft);
        }
    }
}
