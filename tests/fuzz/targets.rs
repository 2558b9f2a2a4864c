//! Everything that takes bytes of others: one target for each parser, with honest inputs to begin from.

use std::fs;
use std::path::Path;

use agent_attach::Package;
use agent_cas::{Memory, digest_of, snapshot};
use agent_identity::{Certified, Contexts, Credentials, PrivateKey, SigningRequest, Token, TokenKind};
use agent_jobfile::{
    self as jobfile, Dialect, command_job, condafile, environment_document, requirement, runconfig, yaml,
};
use agent_model::data::AssetRef;
use agent_model::protocol::gang::Gang;
use agent_model::protocol::grant::{Given, Grant, PlacedAt};
use agent_model::protocol::record::{Ending, JobUser, Record};
use agent_model::tracking::TrackingLine;
use agent_model::{Address, Code, DataUri, EnvSpec, Fault, JobSpec, Outcome, ReplicaStep, Timestamp};
use agent_model::{container, expr, node, size};
use agent_proto::v1;
use agent_shim::segments::Reader;
use agent_shim::session::{FromJob, FromUser, SessionTarget, read_frame};
use agent_shim::{Hello, JobDir, RecordError};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bazel_remote_apis::build::bazel::remote::execution::v2::{Digest, Directory, FileNode, SymlinkNode};
use prost::Message;
use tempfile::TempDir;

/// A parser and what it is tried with.
pub(crate) struct Target {
    /// Also the file of its corpus.
    pub(crate) name: &'static str,
    /// Feeds it; whether it took the bytes for something.
    pub(crate) run: fn(&[u8]) -> bool,
    /// Inputs that it takes.
    pub(crate) seeds: fn() -> Vec<Vec<u8>>,
}

impl Target {
    /// Inputs that once did harm, or that reach what others do not: a line of base64 each.
    pub(crate) fn kept(&self) -> Vec<Vec<u8>> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(self.name);
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().map(|line| STANDARD.decode(line).expect("a line of base64")).collect()
    }
}

/// All of them.
pub(crate) const TARGETS: &[Target] = &[
    Target { name: "job-file", run: job_file, seeds: || texts(JOB_FILES) },
    Target { name: "runconfig", run: run_configuration, seeds: || texts(RUN_CONFIGURATIONS) },
    Target { name: "environment", run: environment, seeds: || texts(ENVIRONMENTS) },
    Target { name: "conda-lock", run: conda_lock, seeds: || texts(LOCKS) },
    Target { name: "requirements", run: requirements, seeds: || texts(REQUIREMENTS) },
    Target { name: "words", run: words, seeds: || texts(WORDS) },
    Target { name: "wire", run: wire, seeds: wire_seeds },
    Target { name: "order", run: order, seeds: || vec![json(&spec())] },
    Target { name: "tracking", run: tracking, seeds: || texts(TRACKING) },
    Target { name: "journal", run: journal, seeds: journal_seeds },
    Target { name: "records", run: records, seeds: record_seeds },
    Target { name: "segments", run: segments, seeds: || texts(&["one line\nanother\n"]) },
    Target { name: "frames", run: frames, seeds: frame_seeds },
    Target { name: "tree", run: tree, seeds: tree_seeds },
    Target { name: "package", run: package, seeds: package_seeds },
    Target { name: "host", run: host, seeds: || texts(HOSTS) },
    Target { name: "provider", run: provider, seeds: || texts(ANSWERS) },
    Target { name: "identity", run: identity, seeds: identity_seeds },
    Target { name: "gpus", run: gpus, seeds: || texts(GPUS) },
];

const JOB_FILES: &[&str] = &[
    include_str!("../../packaging/examples/diabetes/job.yml"),
    "$schema: https://azuremlschemas.azureedge.net/latest/commandJob.schema.json\ncommand: python a.py --lr ${{inputs.lr}} --in ${{inputs.d}}\n\
     code: ./src\nenvironment:\n  image: ubuntu\n  conda_file: {dependencies: [python=3.10, {pip: [numpy]}]}\ninputs:\n  lr: 0.1\n  d: \
     {type: uri_folder, path: 'https://x/y', mode: ro_mount}\noutputs: {m: {type: uri_folder, path: 'azureml://datastores/s/paths/p'}}\n\
     resources: {instance_count: 2, shm_size: 2g, docker_args: '--ulimit memlock=-1'}\ndistribution: {type: pytorch, process_count_per_instance: 2}\n\
     limits: {timeout: 3600}\nservices: {t: {type: tensor_board, log_dir: l}}\ntags: {a: b}\n",
];
const RUN_CONFIGURATIONS: &[&str] = &[
    "script: train.py\narguments: [--lr, 0.1]\ntarget: cluster\nframework: Python\ncommunicator: OpenMpi\nnodeCount: 4\n\
     mpi: {processCountPerNode: 2}\nenvironment:\n  docker: {baseImage: ubuntu, arguments: [--shm-size, 1g]}\n  python:\n    \
     userManagedDependencies: false\n    condaDependencies: {name: e, dependencies: [python=3.6, {pip: ['azureml-defaults']}]}\n\
     dataReferences: {}\nhistory: {outputCollection: true}\nmaxRunDurationSeconds: 60\n",
    "{\"script\": \"a.py\", \"target\": \"local\", \"nodeCount\": 1}",
];
const ENVIRONMENTS: &[&str] = &[
    "name: e\nchannels: [conda-forge]\ndependencies:\n  - python=3.10\n  - conda-forge::numpy>=1.2,<2\n  - pip:\n    - requests\n    \
     - torch==2.0; python_version > '3'\nvariables: {A: b}\n",
    "name: e\nimage: ubuntu:22.04\nconda_file: conda.yml\n",
];
const LOCKS: &[&str] = &[
    "# platform: linux-64\n@EXPLICIT\nhttps://x/linux-64/a-1.0-0.conda#0123456789abcdef0123456789abcdef\n# pip b @ \
     https://x/b.whl --hash=sha256:00\n",
];
const REQUIREMENTS: &[&str] = &[
    "numpy==1.2 \\\n  --hash=sha256:00\n-r more.txt\n--index-url https://u:p@x/simple\nb @ git+https://x/b.git@v1#egg=b\n${A}\n# c\n",
];
const WORDS: &[&str] = &[
    "python a.py ${{inputs.a}} ${{outputs.b}}",
    "azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/d/paths/p",
    "--gpus all --shm-size=2g --ulimit memlock=-1 -v /a:/b:ro --env A=b",
    "unix:/run/x.sock",
    "https://[::1]:80",
];
const TRACKING: &[&str] = &[
    "{\"metric\":\"loss\",\"value\":0.5,\"step\":3,\"time\":1}",
    "{\"run\":\"trial/1\",\"param\":\"lr\",\"text\":\"NaN\"}",
];
const HOSTS: &[&str] = &[
    "agentd-attach os Ubuntu 22.04\nagentd-attach arch x86_64\nagentd-attach glibc 2.35\nagentd-attach uid 0\nagentd-attach system_kb 99999999\n\
     agentd-attach stage_writable yes\nagentd-attach clock 1700000000\nagentd-attach done\n",
];
const ANSWERS: &[&str] =
    &["{\"machines\":[{\"id\":\"a\",\"request\":\"r\",\"name\":\"n\",\"state\":\"running\"}]}", "{\"id\":7}"];
const GPUS: &[&str] =
    &["{\"driver\":{\"state\":\"works\",\"version\":\"580\",\"cuda\":\"13.0\"},\"gpus\":[]}"];

fn texts(of: &[&str]) -> Vec<Vec<u8>> {
    of.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn json(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data")
}

/// A job with something in most of its fields.
fn spec() -> JobSpec {
    let draft = command_job(JOB_FILES[1], &[]).expect("a job file").draft;
    JobSpec::try_from(draft).expect("a job")
}

/// Text, as a file that is read as text would be: what is not UTF-8 is refused before.
fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

thread_local! {
    static DIR: TempDir = in_memory();
    static RUNTIME: tokio::runtime::Runtime =
        tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
}

/// A directory that costs no disk: much is written to it, and little of that matters.
fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").expect("a directory in memory")
}

/// A file with these bytes, for what reads by path.
fn in_file<T>(name: &str, bytes: &[u8], read: impl FnOnce(&Path) -> T) -> T {
    DIR.with(|dir| {
        let file = dir.path().join(name);
        fs::create_dir_all(file.parent().expect("a parent")).expect("a directory");
        fs::write(&file, bytes).expect("written");
        read(&file)
    })
}

fn job_file(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let _ = Dialect::of("job.yml", text);
    let Ok(file) = command_job(text, &[]) else { return false };
    // What was read can be judged and written.
    let _ = jobfile::job_text(&file.draft);
    let _ = JobSpec::try_from(file.draft);
    true
}

fn run_configuration(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let _ = runconfig(text, &["a.py".to_owned()], ".azureml");
    runconfig(text, &[], "").is_ok()
}

fn environment(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let document = environment_document(text);
    let Ok((file, _)) = condafile::parse(text) else { return document.is_ok() };
    let _ = (file.normalized_specs(), file.channels_of_specs(), file.names(), file.lacks_pip());
    true
}

fn conda_lock(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let Ok(lock) = condafile::parse_lock(text) else { return false };
    let (file, _) = condafile::parse(ENVIRONMENTS[0]).expect("a conda file");
    let _ = lock.lacks(&file);
    true
}

fn requirements(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let lines = requirement::logical_lines(text);
    lines.iter().fold(false, |any, (_, line)| {
        let _ = (requirement::judge(line), requirement::variable(line), requirement::holds_credentials(line));
        any | requirement::package(line).is_some()
    })
}

fn words(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let command = expr::substitute(text, |reference| format!("{reference:?}"));
    let address = (text.parse::<DataUri>(), text.parse::<Address>(), AssetRef::parse(text));
    let options = container::Options::parse(&text.split_whitespace().collect::<Vec<_>>());
    let _ = size::parse(text);
    command.is_ok() || address.0.is_ok() || address.1.is_ok() || options.is_ok()
}

/// The first byte chooses the message.
fn wire(bytes: &[u8]) -> bool {
    fn read<W: Message + Default, T: TryFrom<W>>(bytes: &[u8]) -> bool {
        W::decode(bytes).is_ok_and(|message| T::try_from(message).is_ok())
    }
    let Some((which, bytes)) = bytes.split_first() else { return false };
    match which % 8 {
        0 => read::<v1::JobSpec, JobSpec>(bytes),
        1 => read::<v1::Outcome, Outcome>(bytes),
        2 => read::<v1::Inventory, node::Inventory>(bytes),
        3 => read::<v1::Environment, EnvSpec>(bytes),
        4 => read::<v1::Fault, Fault>(bytes),
        5 => read::<v1::GangOrder, Gang>(bytes),
        6 => v1::NodeReport::decode(bytes).is_ok(),
        _ => v1::NodeOrders::decode(bytes).is_ok(),
    }
}

fn wire_seeds() -> Vec<Vec<u8>> {
    let of = |which: u8, message: Vec<u8>| [vec![which], message].concat();
    let (spec, fault) = (v1::JobSpec::from(spec()), Fault::new(Code::Bug, "what").why("why").fix("fix"));
    vec![
        of(3, spec.environment.clone().expect("an environment").encode_to_vec()),
        of(0, spec.encode_to_vec()),
        of(4, v1::Fault::from(fault).encode_to_vec()),
        of(
            2,
            v1::Inventory { cpus: 8, gpus: vec![v1::Gpu::default()], ..Default::default() }.encode_to_vec(),
        ),
    ]
}

/// The document of an order, as a node keeps and returns it.
fn order(bytes: &[u8]) -> bool {
    let read = serde_json::from_slice::<JobSpec>(bytes);
    read.inspect(|spec| assert!(serde_json::to_string(spec).is_ok(), "what was read can be written")).is_ok()
}

/// The record of a replica, which a node keeps in a row of its journal and, sealed, as `order.json`.
fn journal(bytes: &[u8]) -> bool {
    let _ = agent_shim::is_sound(bytes);
    let Ok(record) = serde_json::from_slice::<Record>(bytes) else { return false };
    let _ = record.is_for_another_boot();
    let sealed = agent_shim::seal(&record).expect("what was read can be written");
    assert!(agent_shim::is_sound(&sealed), "and proves itself");
    let again: Record = serde_json::from_slice(&sealed).expect("and read");
    assert_eq!((again.replica, again.step), (record.replica, record.step));
    true
}

fn journal_seeds() -> Vec<Vec<u8>> {
    let accepted = || {
        let replica = "train-1.2.0".parse().expect("a replica");
        Record::accepted(replica, spec(), "boot", "token".to_owned())
    };
    let fault = Fault::new(Code::Bug, "what").why("why").fix("fix");
    let ended = Record {
        given: Some(Given {
            document: String::from_utf8(json(&spec())).expect("JSON"),
            grant: Grant {
                key: "k1".to_owned(),
                mark: PlacedAt { life: "0".repeat(32), commit: 7 },
                mac: "0".repeat(64),
            },
        }),
        step: ReplicaStep::Uploading,
        ending: Some(Ending::failed(fault, Timestamp(1_700_000_000_000))),
        gpus: vec!["GPU-1".to_owned()],
        user: Some(JobUser { name: "ada".into(), uid: 7, gid: 8, groups: vec![9], home: "/home/ada".into() }),
        precious: true,
        environment: Some("pip-1".to_owned()),
        ..accepted()
    };
    let all = [accepted(), ended];
    let sealed = all.iter().map(|record| agent_shim::seal(record).expect("plain data"));
    all.iter().map(json).chain(sealed).collect()
}

fn tracking(bytes: &[u8]) -> bool {
    let lines: Vec<TrackingLine> =
        bytes.split(|byte| *byte == b'\n').filter_map(TrackingLine::parse).collect();
    for line in &lines {
        assert!(
            TrackingLine::parse(line.to_line().as_bytes()).is_some(),
            "what was read can be written and read"
        );
    }
    !lines.is_empty()
}

fn records(bytes: &[u8]) -> bool {
    fn is_one<T>(read: Result<Option<T>, RecordError>) -> bool {
        read.is_ok_and(|record| record.is_some())
    }
    ["launch.json", "hello.json", "exit.json"].into_iter().fold(false, |any, name| {
        in_file(&format!("job/{name}"), bytes, |file| {
            let dir = JobDir::new(file.parent().expect("a parent"));
            let taken = match name {
                "launch.json" => is_one(dir.read_launch()),
                "hello.json" => is_one(dir.read_hello()),
                _ => is_one(dir.read_exit()),
            };
            any | taken
        })
    })
}

/// A launch and an exit record with the fields that every release has written.
const RECORDS: &[&str] = &[
    "{\"version\":2,\"replica\":\"train-1.2.0\",\"argv\":[\"bash\",\"-c\",\"true\"],\"env\":{\"PATH\":\"/bin\"},\"cwd\":\"work\",\
     \"grace_ms\":1000,\"user\":{\"uid\":7,\"gid\":8,\"groups\":[9]},\"lease_until_ms\":60000,\"hold_port\":8080}",
    "{\"version\":2,\"instance\":\"77777777777777777777777777777777\",\"replica\":\"train-1.2.0\",\"end\":{\"exited\":{\"code\":1}},\
     \"started_at\":1700000000000,\"ended_at\":1700000000001,\"stopped\":null,\"timed_out\":false,\"oom\":true,\
     \"log_bytes\":5,\"log_dropped\":0,\"log_error\":null,\"tracking_bytes\":0,\"max_rss\":1,\"cpu_ms\":1,\"leftovers\":0,\"unkilled\":0}",
];

fn record_seeds() -> Vec<Vec<u8>> {
    let hello = Hello {
        version: agent_shim::VERSION,
        instance: "7".repeat(32),
        replica: "train-1.2.0".parse().expect("a replica"),
        pid: 7,
        boot_id: "b".to_owned(),
        at: Timestamp(1_700_000_000_000),
        containment: String::new(),
        groups: vec!["/sys/fs/cgroup/a".into()],
        container: false,
        kills: None,
    };
    let sealed = agent_shim::seal(&hello).expect("plain data");
    texts(RECORDS).into_iter().chain([json(&hello), sealed]).collect()
}

/// The first byte says where the log is cut into two segments, and where the second is said to begin.
fn segments(bytes: &[u8]) -> bool {
    let Some((cut, bytes)) = bytes.split_first() else { return false };
    let at = usize::from(*cut).min(bytes.len());
    let (first, second) = bytes.split_at(at);
    in_file("log/00000000000000000000.seg", first, |_| ());
    let begin = if cut % 3 == 0 { u64::from(*cut) * 7 } else { at as u64 };
    in_file(&format!("log/{begin:020}.seg"), second, |file| {
        let dir = file.parent().expect("a parent");
        let mut reader = Reader::open(dir, Path::new("none")).expect("a directory");
        let (mut offset, mut piece) = (reader.start(), [0; 64]);
        while let Ok(read @ 1..) = reader.read_at(offset, &mut piece) {
            offset += read as u64;
        }
        let whole = reader.len().is_ok_and(|length| length == offset);
        fs::remove_dir_all(dir).expect("removed");
        whole
    })
}

fn frames(mut bytes: &[u8]) -> bool {
    let mut any = false;
    while let Ok(Some((kind, frame))) = read_frame(&mut bytes) {
        any |= FromUser::of_frame(kind, frame.clone()).is_ok() | FromJob::of_frame(kind, frame).is_ok();
    }
    any
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let open =
        FromUser::Open(SessionTarget::Command { argv: texts_of(["sh"]), terminal: None, term: "x".into() });
    vec![
        [open.to_frame(), FromUser::Data(b"ls\n".to_vec()).to_frame(), FromUser::EndOfData.to_frame()]
            .concat(),
    ]
}

fn texts_of<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

/// A directory of a snapshot, which names itself and another one.
fn tree(bytes: &[u8]) -> bool {
    let (store, root) = (Memory::new(), digest_of(bytes));
    store.corrupt(root, bytes.to_vec());
    store.corrupt(digest_of(b"hello"), &b"hello"[..]);
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            if snapshot::list(&store, root).await.is_err() {
                return false;
            }
            let dir = in_memory();
            let laid = snapshot::download(&store, root, &dir.path().join("in")).await;
            let beside = fs::read_dir(dir.path()).expect("read").count();
            assert!(beside <= 1, "nothing is written beside it");
            laid.is_ok()
        })
    })
}

fn tree_seeds() -> Vec<Vec<u8>> {
    let hello = Digest { hash: digest_of(b"hello").hex(), size_bytes: 5 };
    let file = |name: &str| FileNode { name: name.into(), digest: Some(hello.clone()), ..Default::default() };
    let link = SymlinkNode { name: "l".into(), target: "a".into(), ..Default::default() };
    let directory =
        Directory { files: vec![file("a"), file("b")], symlinks: vec![link], ..Default::default() };
    vec![directory.encode_to_vec(), Directory::default().encode_to_vec()]
}

fn package(bytes: &[u8]) -> bool {
    in_file("package.tar.gz", bytes, Package::open).is_ok()
}

#[allow(clippy::disallowed_methods, reason = "makes what is tried")]
fn package_seeds() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("p.tar.gz");
    fs::create_dir(dir.path().join("bin")).expect("a directory");
    fs::write(dir.path().join("bin/agentd"), "GLIBC_2.31").expect("written");
    let mut tar = std::process::Command::new("tar");
    agent_tests::finish(tar.arg("-C").arg(dir.path()).arg("-czf").arg(&file).arg("bin")).ok();
    vec![fs::read(&file).expect("read")]
}

fn host(bytes: &[u8]) -> bool {
    agent_attach::fuzz::report(&String::from_utf8_lossy(bytes))
}

fn provider(bytes: &[u8]) -> bool {
    if let Some(Ok(node)) = text(bytes).map(yaml::parse) {
        let _ = agent_control::provider::read_providers(node);
    }
    agent_control::provider::fuzz::answer(bytes)
}

fn identity(bytes: &[u8]) -> bool {
    let der = Certified::read(bytes).is_ok() | SigningRequest::read(bytes).is_ok();
    let Some(text) = text(bytes) else { return der };
    let _ = in_file("contexts.json", bytes, Contexts::read);
    let credentials = in_file("identity.json", bytes, Credentials::read).ok().flatten();
    if let Some(credentials) = &credentials {
        let _ = (credentials.certified(), credentials.authority(), credentials.key());
    }
    der | credentials.is_some() | text.parse::<Token>().is_ok()
}

fn identity_seeds() -> Vec<Vec<u8>> {
    let key = PrivateKey::generate().expect("a key");
    let credentials = Credentials::new("https://x:1", b"a", b"b", &key);
    let token = Token::generate(TokenKind::Join, [7; 32]).expect("a token");
    vec![key.request().expect("a request"), json(&credentials), token.to_string().into_bytes()]
}

fn gpus(bytes: &[u8]) -> bool {
    agent_node::gpu::parse(bytes).is_ok()
}
