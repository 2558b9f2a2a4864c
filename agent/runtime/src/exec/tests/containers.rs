//! Real jobs in real containers. They need a container engine, and two images that are made here from `busybox`.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::Stdio;

use agent_shim::{Limits, OomScope, User};
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, CreateImageOptionsBuilder, InspectContainerOptions,
    KillContainerOptionsBuilder, RemoveContainerOptionsBuilder, StopContainerOptionsBuilder,
};
use futures_util::TryStreamExt as _;
use tokio::sync::OnceCell;

use super::*;
use crate::env::Image;

const SOCKET: &str = "/var/run/docker.sock";
const WITHIN: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

/// The user of the jobs, if the tests may choose.
const NOBODY: User = User { uid: 65_534, gid: 65_534, groups: Vec::new() };

/// The images of these tests: one with a shell and little else, and one with nothing.
struct Images {
    busybox: Image,
    scratch: Image,
}

async fn images() -> Option<&'static Images> {
    static IMAGES: OnceCell<Option<Images>> = OnceCell::const_new();
    let make = || async {
        if tokio::net::UnixStream::connect(SOCKET).await.is_err() {
            #[allow(clippy::disallowed_methods, reason = "a test that must not be left out says so")]
            let required = std::env::var_os("CI").is_some();
            assert!(!required, "no container engine answers at {SOCKET}");
            eprintln!("left out: no container engine answers at {SOCKET}");
            return None;
        }
        let docker = client();
        Some(Images { busybox: busybox(&docker).await, scratch: scratch(&docker).await })
    };
    IMAGES.get_or_init(make).await.as_ref()
}

/// A shell with its commands, and variables that programs from outside the image must not obey.
pub(super) async fn busybox(docker: &Docker) -> Image {
    let env = ["PATH=/bin", "IMAGE_SAYS=hello", "LD_PRELOAD=/lib/none.so", "NVIDIA_VISIBLE_DEVICES=all"];
    let fill = |root: &Path| {
        let bin = root.join("bin");
        fs::create_dir(&bin).unwrap();
        fs::create_dir(root.join("tmp")).unwrap();
        fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o777)).unwrap();
        fs::copy(static_busybox(), bin.join("busybox")).unwrap();
        let listed = command("/usr/bin/env").args(["busybox", "--list"]).output().unwrap().stdout;
        for applet in String::from_utf8(listed).unwrap().lines().filter(|name| *name != "busybox") {
            std::os::unix::fs::symlink("busybox", bin.join(applet)).unwrap();
        }
    };
    made(docker, "busybox", &env, fill).await
}

fn static_busybox() -> &'static str {
    let program = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    program.expect("the package `busybox-static` is installed")
}

async fn scratch(docker: &Docker) -> Image {
    made(docker, "scratch", &[], |root| fs::write(root.join("empty"), "").unwrap()).await
}

#[allow(clippy::disallowed_methods, reason = "tests use the programs of the machine")]
fn command(program: &str) -> std::process::Command {
    std::process::Command::new(program)
}

/// An image of a directory, made once for all runs of these tests.
async fn made(docker: &Docker, name: &str, env: &[&str], fill: impl FnOnce(&Path)) -> Image {
    let reference = format!("agentd-test-exec/{name}:2");
    let inspect = |client: bollard::Docker| {
        let reference = reference.clone();
        async move { client.inspect_image(&reference).await }
    };
    if docker.ask("look", WITHIN, inspect).await.is_err() {
        let root = tempfile::tempdir().unwrap();
        fill(root.path());
        let mut tar = command("tar");
        tar.arg("-C").arg(root.path()).args(["--owner=0", "--group=0", "-c", "."]).stderr(Stdio::null());
        let tar = tar.output().unwrap().stdout;
        let changes = env.iter().map(|variable| format!("ENV {variable}"));
        let changes = changes.chain(["LABEL agentd.test=exec".to_owned()]).collect::<Vec<_>>().join("\n");
        let options =
            CreateImageOptionsBuilder::default().from_src("-").repo(&reference).changes(vec![changes]);
        let import = |client: bollard::Docker| async move {
            let body = bollard::body_full(tar.into());
            client.create_image(Some(options.build()), Some(body), None).try_collect::<Vec<_>>().await
        };
        docker.ask("import", WITHIN, import).await.unwrap();
    }
    let id = docker.ask("look", WITHIN, inspect).await.unwrap().id.unwrap();
    let pair = |variable: &&str| {
        let (name, value) = variable.split_once('=').unwrap();
        (name.to_owned(), value.to_owned())
    };
    Image { id, reference, env: env.iter().map(pair).collect(), mounts: Vec::new(), gpu: None }
}

fn client() -> Docker {
    Docker::at(SOCKET)
}

/// A job in a container; whatever remains of it is removed when the test ends.
pub(super) struct Case {
    docker: Docker,
    pub(super) dir: JobDir,
    pub(super) containers: Containers,
    pub(super) executor: Local,
    pub(super) container_spec: ContainerSpec,
    replica: String,
    _keep: tempfile::TempDir,
}

impl Case {
    pub(super) fn of(docker: Docker, image: &Image) -> Case {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let replica = format!("test-exec-{}-{number}.3.0", std::process::id());
        let keep = tempfile::tempdir().unwrap();
        let dir = JobDir::new(keep.path().join("d".repeat(120)).join(&replica));
        dir.create().unwrap();
        std::fs::create_dir(dir.work()).unwrap();
        if own_user().is_some() {
            chown(dir.data(), None, Some(NOBODY.gid)).unwrap();
            fs::set_permissions(dir.data(), fs::Permissions::from_mode(0o710)).unwrap();
            fs::write(dir.tracking(), "").unwrap();
            for own in [dir.work(), dir.tracking()] {
                chown(own, Some(NOBODY.uid), Some(NOBODY.gid)).unwrap();
            }
        }
        let node = keep.path().display().to_string();
        let containers = Containers::new(docker.clone(), shim(), node);
        let container_spec = ContainerSpec { image: image.clone(), ..ContainerSpec::default() };
        let executor = Local::new(shim(), containers.clone());
        Case { docker, dir, containers, executor, container_spec, replica, _keep: keep }
    }

    async fn busybox() -> Option<Case> {
        Some(Case::of(client(), &images().await?.busybox))
    }

    pub(super) fn launch_of(&self, argv: &[&str]) -> Launch {
        let mut env: BTreeMap<String, String> = self.container_spec.image.env.clone();
        env.remove("LD_PRELOAD");
        let replica = self.replica.parse().unwrap();
        Launch { replica, env, user: own_user(), container: true, ..launch_of(argv) }
    }

    pub(super) async fn launch(&self, launch: &Launch) -> Running {
        self.executor.launch(&self.dir, launch, Some(&self.container_spec)).await.unwrap()
    }

    pub(super) async fn start(&self, script: &str) -> Running {
        self.launch(&self.launch_of(&["sh", "-c", script])).await
    }

    pub(super) async fn run(&self, script: &str) -> ExitRecord {
        over(&self.start(script).await).await
    }

    fn log(&self) -> Vec<u8> {
        let mut log = Reader::of(&self.dir).unwrap();
        let mut bytes = vec![0; log.len().unwrap() as usize];
        assert_eq!(log.read_at(0, &mut bytes).unwrap(), bytes.len());
        bytes
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.log()).into_owned()
    }

    pub(super) async fn until_log_has(&self, text: &str) {
        until(|| self.text().contains(text)).await;
    }

    fn name(&self) -> String {
        format!("agentd-{}", self.replica)
    }

    async fn inspect(&self) -> Option<bollard::models::ContainerInspectResponse> {
        let name = self.name();
        let ask = |client: bollard::Docker| async move {
            client.inspect_container(&name, None::<InspectContainerOptions>).await
        };
        self.docker.ask("look", WITHIN, ask).await.ok()
    }

    async fn kill(&self, signal: &str) {
        let (name, options) = (self.name(), KillContainerOptionsBuilder::default().signal(signal).build());
        let kill = |client: bollard::Docker| async move { client.kill_container(&name, Some(options)).await };
        self.docker.ask("kill", WITHIN, kill).await.unwrap();
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        let (name, docker) = (self.name(), self.docker.clone());
        let remove = async move {
            let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
            let remove =
                |client: bollard::Docker| async move { client.remove_container(&name, Some(options)).await };
            drop(docker.ask("remove", WITHIN, remove).await);
        };
        // This thread cannot block on the runtime of the test.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(remove);
        });
        drop(thread.join());
    }
}

/// The user of the jobs: only user 0 may choose.
fn own_user() -> Option<User> {
    (nix::unistd::geteuid().as_raw() == 0).then_some(NOBODY)
}

pub(super) async fn over(running: &Running) -> ExitRecord {
    tokio::time::timeout(WITHIN, running.wait()).await.expect("the job ends").unwrap()
}

pub(super) async fn lost(running: &Running) -> Lost {
    let lost = tokio::time::timeout(WITHIN, running.wait()).await.expect("the job is lost").unwrap_err();
    let WaitError::Lost { lost, .. } = lost else { panic!("{lost}") };
    lost
}

#[tokio::test]
async fn test_exit_codes_signals_and_limits_are_told_as_they_were() {
    for (script, status) in [
        ("exit 0", ExitStatus::Code(0)),
        ("exit 42", ExitStatus::Code(42)),
        ("no-such-program", ExitStatus::Code(127)),
        ("kill -KILL $$", ExitStatus::Signal(9)),
        ("exit 137", ExitStatus::Code(137)),
    ] {
        let Some(bench) = Case::busybox().await else { return };
        let limits = Limits { memory: Some(64 * MIB), pids: Some(100) };
        let launch = Launch { limits, ..bench.launch_of(&["sh", "-c", script]) };
        let record = over(&bench.launch(&launch).await).await;
        assert_eq!(record.end, End::Exited(status), "{script}");
        assert!(record.oom.is_none() && record.oom_kills == 0, "{script}: {record:?}");
        assert_eq!((record.limits, &record.limits_unmet[..]), (limits, &[][..]), "{script}");
        assert_eq!(record.containment, "container");
        assert!(record.memory_peak.is_some_and(|peak| peak > 0), "{record:?}");
    }
}

#[tokio::test]
async fn test_output_is_kept_byte_for_byte() {
    let Some(bench) = Case::busybox().await else { return };
    let script = "printf 'a\\000\\377'; echo error >&2; seq 1 50000; printf end";
    assert_eq!(bench.run(script).await.end, End::Exited(ExitStatus::Code(0)));
    let mut expected = b"a\0\xfferror\n".to_vec();
    expected.extend((1..=50_000).flat_map(|number| format!("{number}\n").into_bytes()));
    expected.extend(b"end");
    assert!(bench.log() == expected, "{} bytes, {} expected", bench.log().len(), expected.len());
}

#[tokio::test]
async fn test_job_has_its_directory_and_variables_and_no_rights() {
    let Some(bench) = Case::busybox().await else { return };
    let script = "pwd; id -u; echo $IMAGE_SAYS-$LD_PRELOAD; grep -E 'Cap|NoNewPrivs' /proc/self/status; \
                  mkdir outputs && echo model > outputs/m; ls /.agentd; ls /var/run/docker.sock; \
                  df -m /dev/shm | tail -1; cat /proc/1/environ | tr '\\0' '\\n'; echo end; ls /dev";
    let record = bench.run(script).await;
    let text = bench.text();
    assert_eq!(record.end, End::Exited(ExitStatus::Code(0)), "{text}");
    let user = own_user().map_or(nix::unistd::geteuid().as_raw(), |user| user.uid);
    assert!(text.starts_with(&format!("{}\n{user}\nhello-\n", bench.dir.work().display())), "{text}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert!(text.contains(&format!("{set}:\t0000000000000000\n")), "{set}: {text}");
    }
    assert!(own_user().is_none() || text.contains("CapBnd:\t0000000000000000\n"), "{text}");
    assert!(text.contains("NoNewPrivs:\t1\n") && text.contains("agent-shim"), "{text}");
    assert!(text.contains("docker.sock: No such file") && text.contains(" 2048 "), "{text}");
    assert!(!text.contains("NVIDIA_VISIBLE_DEVICES=all"), "{text}");
    assert_eq!(fs::read_to_string(bench.dir.work().join("outputs/m")).unwrap(), "model\n");
    assert!(!text.contains("mem\n") && !text.contains("sda"), "{text}");
}

#[tokio::test]
async fn test_job_sees_its_part_and_nothing_of_its_supervisor() {
    let Some(bench) = Case::busybox().await else { return };
    let data = bench.dir.data().display().to_string();
    let script = format!(
        "ls {data}/..; echo -; ls /proc/1/cwd/ /proc/1/fd/ /proc/1/root/ 2>/dev/null; cat /proc/1/environ; echo -; \
         find / -xdev -name launch.json; echo -; /.agentd/agent-shim --door /.agentd/door {data}; echo $?; \
         grep ^Cap /proc/1/status | grep -v CapBnd; sed -n 's/^Uid:.//p' /proc/1/status"
    );
    assert_eq!(bench.run(&script).await.end, End::Exited(ExitStatus::Code(0)));
    let text = bench.text();
    assert!(text.contains("\njob\n-\n") || text.starts_with("job\n-\n"), "{text}");
    assert!(!text.contains("launch.json") && text.contains("\n74\n"), "{text}");
    let kept = if own_user().is_some() { "0000000000000020" } else { "0000000000000000" };
    for set in ["CapPrm", "CapEff"] {
        assert!(text.contains(&format!("{set}:\t{kept}\n")), "{set}: {text}");
    }
    assert!(!bench.dir.path().join(agent_shim::door::DOOR).exists(), "the door is shut");
}

#[tokio::test]
async fn test_supervisor_with_a_loader_is_refused_and_says_why() {
    let Some(bench) = Case::busybox().await else { return };
    let containers = Containers::new(client(), std::env::current_exe().unwrap(), "none");
    let launch = bench.launch_of(&["true"]);
    let error = containers.prepare(&bench.dir, &launch, &bench.container_spec).await.unwrap_err();
    assert!(error.to_string().contains("supervisor"), "{error}");
    assert!(bench.inspect().await.is_none());
}

#[tokio::test]
async fn test_container_that_a_file_names_is_not_removed_unless_it_is_the_jobs() {
    let Some(bench) = Case::busybox().await else { return };
    let other = Case::busybox().await.unwrap();
    let running = other.start("echo ready; exec sleep 1000").await;
    other.until_log_has("ready").await;
    assert_eq!(bench.run("true").await.end, End::Exited(ExitStatus::Code(0)));
    let note = |case: &Case| case.dir.path().join("container.json");
    fs::copy(note(&other), note(&bench)).unwrap();
    bench.containers.clear(&bench.dir).await.unwrap();
    assert!(other.dir.has_shim().unwrap() && other.inspect().await.is_some());
    running.stop(Duration::ZERO, "enough").await.unwrap();
    over(&running).await;
}

#[tokio::test]
async fn test_want_of_memory_is_told_from_any_other_kill() {
    let Some(bench) = Case::busybox().await else { return };
    let limits = Limits { memory: Some(32 * MIB), pids: None };
    let script = "tail -c 400000000 /dev/zero; echo went on with $?; exit 9";
    let launch = Launch { limits, ..bench.launch_of(&["sh", "-c", script]) };
    let record = over(&bench.launch(&launch).await).await;
    assert_eq!((record.oom, record.limits), (Some(OomScope::Own), limits), "{}", bench.text());
    assert!(record.oom_kills >= 1 && record.end == End::Exited(ExitStatus::Code(9)), "{record:?}");
    assert!(record.memory_peak.is_some_and(|peak| peak > 24 * MIB && peak <= 32 * MIB), "{record:?}");
}

#[tokio::test]
async fn test_what_a_job_in_a_container_takes_is_counted_from_outside() {
    let Some(case) = Case::busybox().await else { return };
    let running = case.start("echo up; sleep 600").await;
    case.until_log_has("up").await;
    let usage = case.executor.groups(&case.dir).usage();
    assert!(
        usage.memory.is_some_and(|bytes| bytes > 0) && usage.tasks.is_some_and(|tasks| tasks >= 2),
        "{usage:?}"
    );
    running.stop(Duration::ZERO, "seen").await.unwrap();
    over(&running).await;
}

#[tokio::test]
async fn test_stop_ends_a_nasty_tree_and_tells_why() {
    let Some(bench) = Case::busybox().await else { return };
    let script = "trap '' TERM; (trap '' TERM; setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done') & \
                  setsid setsid sleep 1000 & echo ready; while :; do sleep 1; done";
    let running = bench.start(script).await;
    bench.until_log_has("ready").await;
    running.stop(Duration::from_millis(300), "enough").await.unwrap();
    let record = over(&running).await;
    assert_eq!(record.end, End::Exited(ExitStatus::Signal(9)));
    assert_eq!((record.stopped.as_deref(), record.stop_signal, record.unkilled), (Some("enough"), None, 0));
    let hello = bench.dir.read_hello().unwrap().unwrap();
    assert!(marked(MARK, &hello.instance).is_empty());
}

#[tokio::test]
async fn test_job_that_runs_is_found_again_and_started_once() {
    let Some(bench) = Case::busybox().await else { return };
    let script = "echo one; while ! test -e go; do sleep 0.05; done; echo two; exit 7";
    drop(bench.start(script).await);
    bench.until_log_has("one").await;
    let Found::Running(running) = bench.executor.reattach(&bench.dir).await.unwrap() else {
        panic!("it runs")
    };
    let again = bench.start("echo never").await;
    assert_eq!(bench.containers.sweep(&|_| false).await.unwrap(), 0);
    bench.containers.clear(&bench.dir).await.unwrap();
    fs::write(bench.dir.work().join("go"), "").unwrap();
    assert_eq!(over(&running).await.end, End::Exited(ExitStatus::Code(7)));
    assert_eq!(over(&again).await.end, End::Exited(ExitStatus::Code(7)));
    assert_eq!(bench.log(), b"one\ntwo\n");
    assert!(bench.inspect().await.is_some());
    bench.containers.clear(&bench.dir).await.unwrap();
    assert!(bench.inspect().await.is_none());
    bench.containers.clear(&bench.dir).await.unwrap();
}

#[tokio::test]
async fn test_container_of_a_daemon_that_died_before_go_is_used_or_replaced() {
    let Some(bench) = Case::busybox().await else { return };
    let launch = bench.launch_of(&["sh", "-c", "echo once"]);
    let prepare = || bench.containers.prepare(&bench.dir, &launch, &bench.container_spec);
    prepare().await.unwrap();
    let first = bench.dir.read_hello().unwrap().unwrap();
    prepare().await.unwrap();
    assert_eq!(bench.dir.read_hello().unwrap().unwrap(), first);
    let reattached = bench.executor.reattach(&bench.dir).await.unwrap();
    assert!(matches!(reattached, Found::NotStarted));
    bench.kill("KILL").await;
    until(|| !bench.dir.has_shim().unwrap()).await;
    let record = over(&bench.launch(&launch).await).await;
    assert_ne!(record.instance, first.instance);
    assert_eq!(bench.log(), b"once\n");
}

#[tokio::test]
async fn test_container_of_somebody_else_is_left_alone_and_named() {
    let Some(bench) = Case::busybox().await else { return };
    let body = bollard::models::ContainerCreateBody {
        image: Some(bench.container_spec.image.id.clone()),
        cmd: Some(vec!["true".into()]),
        ..Default::default()
    };
    let options = CreateContainerOptionsBuilder::default().name(&bench.name()).build();
    let create = |client: bollard::Docker| async move { client.create_container(Some(options), body).await };
    let id = client().ask("make", WITHIN, create).await.unwrap().id;
    let launch = bench.launch_of(&["true"]);
    let error = bench.executor.launch(&bench.dir, &launch, Some(&bench.container_spec)).await.unwrap_err();
    assert!(error.to_string().contains(&bench.name()) && error.to_string().contains(&id[..12]), "{error}");
    assert_eq!(bench.inspect().await.unwrap().id.unwrap(), id);
}

#[tokio::test]
async fn test_container_that_is_killed_or_removed_loses_the_job_with_the_reason() {
    for (by_removal, why) in [(false, "its container was killed"), (true, "was removed by somebody")] {
        let Some(bench) = Case::busybox().await else { return };
        let running = bench.start("echo ready; setsid sleep 1000 & exec sleep 1000").await;
        bench.until_log_has("ready").await;
        if by_removal {
            let options = RemoveContainerOptionsBuilder::default().force(true).build();
            let name = bench.name();
            let remove =
                |client: bollard::Docker| async move { client.remove_container(&name, Some(options)).await };
            client().ask("remove", WITHIN, remove).await.unwrap();
        } else {
            bench.kill("KILL").await;
        }
        let lost = lost(&running).await;
        assert!(lost.why.as_ref().is_some_and(|said| said.contains(why)), "{lost:?}");
        assert_eq!((lost.left, lost.rebooted), (0, false));
        let launch = bench.launch_of(&["true"]);
        let again = bench.executor.launch(&bench.dir, &launch, Some(&bench.container_spec)).await;
        assert!(matches!(again, Err(LaunchError::Lost { .. })), "{again:?}");
        bench.containers.sweep(&|_| true).await.unwrap();
        assert_eq!(bench.inspect().await.is_none(), by_removal);
        bench.containers.sweep(&|_| false).await.unwrap();
        assert!(bench.inspect().await.is_none());
    }
}

#[tokio::test]
async fn test_engine_that_stops_a_container_is_named_and_nobody_else() {
    let Some(bench) = Case::busybox().await else { return };
    let running = bench.start("echo ready; exec sleep 1000").await;
    bench.until_log_has("ready").await;
    let (name, options) = (bench.name(), StopContainerOptionsBuilder::default().build());
    let stop = |client: bollard::Docker| async move { client.stop_container(&name, Some(options)).await };
    client().ask("stop", WITHIN, stop).await.unwrap();
    let record = over(&running).await;
    assert_eq!((record.stop_signal, record.stopped.is_some()), (Some(15), false), "{record:?}");
}

#[tokio::test]
async fn test_image_without_a_shell_is_a_record_and_not_a_mystery() {
    let Some(images) = images().await else { return };
    let bench = Case::of(client(), &images.scratch);
    let mut launch = bench.launch_of(&["sh", "-c", "true"]);
    launch.env.insert("PATH".into(), "/usr/bin:/bin".into());
    let record = over(&bench.launch(&launch).await).await;
    let why = NotStarted::Exec { program: "sh".into(), os_error: 2 };
    assert_eq!(record.end, End::NeverStarted(why));
}

#[tokio::test]
async fn test_supervisor_that_does_not_start_says_why() {
    let Some(bench) = Case::busybox().await else { return };
    // busybox chooses its command by its file name, and has none of this name.
    let program = bench.dir.path().join("no-shim");
    fs::copy(static_busybox(), &program).unwrap();
    let containers = Containers::new(client(), program, "none");
    let error =
        containers.prepare(&bench.dir, &bench.launch_of(&["true"]), &bench.container_spec).await.unwrap_err();
    let LaunchError::Unready { status: 127, said, .. } = error else { panic!("{error}") };
    assert_eq!(said, "agent-shim: applet not found");
}

#[tokio::test]
async fn test_absent_engine_is_said_and_nothing_is_lost() {
    let Some(bench) = Case::busybox().await else { return };
    let socket = bench.dir.path().join("no.sock");
    let containers = Containers::new(Docker::at(socket), shim(), "none");
    let launch = bench.launch_of(&["sh", "-c", "exit 3"]);
    let error = containers.prepare(&bench.dir, &launch, &bench.container_spec).await.unwrap_err();
    assert!(error.is_engine_away(), "{error}");
    assert_eq!(over(&bench.launch(&launch).await).await.end, End::Exited(ExitStatus::Code(3)));
    let gone = ContainerSpec {
        image: Image { id: "sha256:00".into(), ..Image::default() },
        ..ContainerSpec::default()
    };
    let bench = Case::busybox().await.unwrap();
    let error = bench.containers.prepare(&bench.dir, &launch, &gone).await.unwrap_err();
    assert!(!error.is_engine_away(), "{error}");
}

/// A measurement, not a promise: the cost of a start compared with the engine's own client, same image and options.
#[tokio::test]
#[ignore = "measures, for people"]
async fn measure_start_beside_the_engines_own_client() {
    const ROUNDS: usize = 15;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let Some(bench) = Case::busybox().await else { return };
        let limits = Limits { memory: Some(512 * MIB), pids: Some(1000) };
        let launch = Launch { limits, ..bench.launch_of(&["sh", "-c", "true"]) };
        let from = Instant::now();
        bench.containers.prepare(&bench.dir, &launch, &bench.container_spec).await.unwrap();
        let stood = from.elapsed();
        let running = bench.launch(&launch).await;
        let started = from.elapsed();
        over(&running).await;
        ours.push((from.elapsed(), stood, started));
        bench.containers.clear(&bench.dir).await.unwrap();
        let dir = bench.dir.path().display();
        let from = Instant::now();
        let mut run = command("docker");
        run.args([
            "run",
            "--rm",
            "--network=host",
            "--log-driver=none",
            "--cgroupns=private",
            "--cap-drop=ALL",
        ]);
        run.args(["--memory=512m", "--memory-swap=512m", "--pids-limit=1000", "--shm-size=2g"]);
        run.args(["--security-opt=no-new-privileges", "--user=65534:65534", "-v", &format!("{dir}:{dir}")]);
        assert!(
            run.arg(&bench.container_spec.image.id).args(["sh", "-c", "true"]).status().unwrap().success()
        );
        theirs.push(from.elapsed());
    }
    ours.sort();
    theirs.sort();
    let (ours, theirs) = (ours[ROUNDS / 2], theirs[ROUNDS / 2]);
    println!("ours {ours:?} (all, until it stood, until it was started), the client {theirs:?}");
    println!("ratio {:.2}", ours.0.as_secs_f64() / theirs.as_secs_f64());
}
