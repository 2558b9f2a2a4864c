use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use agent_command::Command;
use tempfile::TempDir;
use tokio::sync::watch;

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::*;

mod conda;
mod images;
mod installers;
mod kills;

/// A progress channel without a reader.
fn nobody() -> watch::Sender<Option<Progress>> {
    watch::Sender::new(None)
}

/// A directory with everything a test needs: environments, logs, and other files.
struct Fixture {
    dir: TempDir,
    search: String,
}

impl Fixture {
    #[allow(
        clippy::disallowed_methods,
        reason = "the interpreter under test is that of whoever runs the tests"
    )]
    fn new() -> Fixture {
        let search = std::env::var("PATH").unwrap();
        Fixture { dir: tempfile::tempdir().unwrap(), search }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn config(&self) -> EnvConfig {
        let stall = Duration::from_secs(120);
        EnvConfig { stall, ..EnvConfig::plain(self.path("envs"), self.search.clone()) }
    }

    fn open(&self) -> Environments {
        Environments::open(self.config()).unwrap()
    }

    fn scripted(&self, scripts: impl IntoIterator<Item = Script>) -> Environments {
        let builder: Arc<dyn EnvBuilder> = Arc::new(Scripted::new(scripts));
        Environments::with_builders(&self.config(), Arc::new([builder])).unwrap()
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// A script that answers like the real Python, but runs `on_venv` in place of making an environment.
    async fn python(&self, name: &str, on_venv: &str) -> String {
        let real = self.real_python().await;
        let path = self.path(name);
        let script =
            format!("#!/bin/sh\ncase \"$*\" in *'-m venv'*) {on_venv};; *) exec {real} \"$@\";; esac\n");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        // It reports itself as the executable; otherwise the real one would make the environment.
        let wrapper = self.path(&format!("{name}-asks"));
        let answer = format!(
            "#!/bin/sh\ncase \"$*\" in *json*) {real} \"$@\" | sed 's#{real}#{}#';; *) exec {} \"$@\";; esac\n",
            path.display(),
            path.display()
        );
        fs::write(&wrapper, answer).unwrap();
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
        wrapper.display().to_string()
    }

    async fn real_python(&self) -> String {
        let config = Arc::new(self.config());
        fs::create_dir_all(&config.root).unwrap();
        let found = Interpreters::new(config).find("python3").await.unwrap();
        found.executable.display().to_string()
    }

    /// Makes a wheel of one module, and the lines that install it without an index.
    async fn wheel(&self, name: &str, version: &str, needs: &str) -> Vec<String> {
        const SCRIPT: &str = r"
import sys, zipfile
folder, name, version, needs = sys.argv[1:]
info = f'{name}-{version}.dist-info'
meta = f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n' + (f'Requires-Dist: {needs}\n' if needs else '')
with zipfile.ZipFile(f'{folder}/{name}-{version}-py3-none-any.whl', 'w') as wheel:
    wheel.writestr(f'{name}.py', f'VERSION = {version!r}\n')
    wheel.writestr(f'{info}/METADATA', meta)
    wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    wheel.writestr(f'{info}/RECORD', f'{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n')
";
        let folder = self.path("wheels");
        fs::create_dir_all(&folder).unwrap();
        let python = self.real_python().await;
        let command = Command::new(python).args(["-c", SCRIPT]).arg(&folder).args([name, version, needs]);
        let output = command.capture().await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.text));
        vec!["--no-index".to_owned(), format!("--find-links {}", folder.display())]
    }
}

fn pip(python: &str, requirements: &[String]) -> EnvSpec {
    EnvSpec::Pip { python: python.to_owned(), requirements: requirements.to_vec() }
}

async fn run(lease: &EnvLease, code: &str) -> String {
    let python = lease.path_entries()[0].join("python");
    let output = Command::new(python).args(["-c", code]).envs(lease.vars()).capture().await.unwrap();
    String::from_utf8(output.text).unwrap().trim_end().to_owned()
}

/// Waits until a condition holds that depends on other processes.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[tokio::test]
async fn test_build_that_an_engine_breaks_off_is_begun_anew_only_while_it_gets_further() {
    let fixture = Fixture::new();
    let broken = |done| {
        let error =
            crate::docker::DockerError::Broken { step: "build an image", detail: "it said EOF".into() };
        Script { fails: Some(AcquireError::BrokenOff { error, done, times: 1 }), ..Script::default() }
    };
    let away = Script {
        fails: Some(AcquireError::Engine(crate::docker::DockerError::Absent {
            socket: "/gone".into(),
            detail: "nobody".into(),
        })),
        ..Script::default()
    };
    let steps = [1, 1, 2, 2, 5, 4].map(broken).into_iter();
    let environments = fixture.scripted(steps.chain([away.clone(), away, broken(5)]));
    let spec = pip("a", &[]);
    for _ in 0..8 {
        let error = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap_err();
        assert!(error.is_waiting(), "{error}");
    }
    let error = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap_err();
    assert!(!error.is_waiting(), "{error}");
    let told = error.to_string();
    assert!(told.contains("3 times") && told.contains("it said EOF"), "{told}");
    environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
}

#[tokio::test]
async fn test_pip_environment_is_built_then_reused_at_once() {
    let fixture = Fixture::new();
    let mut lines = fixture.wheel("tiny", "1.5", "").await;
    lines.push("tiny".to_owned());
    let (environments, spec) = (fixture.open(), pip("python3", &lines));
    let lease = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
    assert!(!lease.reused());
    assert_eq!(run(&lease, "import tiny; print(tiny.VERSION)").await, "1.5");
    assert_eq!(
        run(&lease, "import platform; print(platform.python_version())").await,
        lease.python_version()
    );
    assert_eq!(lease.vars()["VIRTUAL_ENV"], lease.prefix().display().to_string());
    assert!(!lease.prefix().join("tmp").exists());
    let log = fixture.log("log");
    assert!(log.contains("Successfully installed tiny-1.5") && log.contains(" is ready after "), "{log}");

    let mut best = Duration::MAX;
    for _ in 0..20 {
        let started = Instant::now();
        let again = environments.acquire(&spec, &fixture.path("again"), &nobody()).await.unwrap();
        best = best.min(started.elapsed());
        assert!(again.reused() && again.key() == lease.key());
    }
    assert!(best < Duration::from_millis(5), "{best:?}");
    assert!(!fixture.path("again").exists(), "nothing was built, so nothing is logged");

    let next_life = fixture.open();
    assert!(next_life.acquire(&spec, &fixture.path("again"), &nobody()).await.unwrap().reused());
}

#[tokio::test]
async fn test_environment_that_did_not_reach_the_disk_is_none_in_the_next_boot() {
    let fixture = Fixture::new();
    let (environments, spec) = (fixture.open(), pip("python3", &[]));
    let lease = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
    let marker = lease.prefix().join("ready.json");
    drop(lease);
    let told = || fs::read_to_string(&marker).unwrap();
    until("it is on the disk", || !told().contains("\"boot\"")).await;
    assert!(fixture.open().acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap().reused());
    fs::write(&marker, told().replacen('{', "{\"boot\": \"an earlier one\",", 1)).unwrap();
    assert!(!environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap().reused());
}

#[tokio::test]
async fn test_requirement_that_cannot_be_met_is_named() {
    let fixture = Fixture::new();
    let mut lines = fixture.wheel("tiny", "1.5", "absent==9").await;
    lines.push("tiny".to_owned());
    let environments = fixture.open();
    let error =
        environments.acquire(&pip("python3", &lines), &fixture.path("log"), &nobody()).await.unwrap_err();
    let AcquireError::Unsatisfied { requirement, .. } = &error else { panic!("{error:?}") };
    assert!(requirement.starts_with("absent==9"), "{requirement}");
    let log = fixture.log("log");
    assert!(log.contains("No matching distribution found for absent==9"), "{log}");

    let started = Instant::now();
    let again =
        environments.acquire(&pip("python3", &lines), &fixture.path("again"), &nobody()).await.unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    let AcquireError::Remembered { ago, left, .. } = again else { panic!("{again:?}") };
    assert_eq!(ago + left, Duration::from_secs(60));
    assert!(started.elapsed() < Duration::from_millis(500), "a lasting failure is remembered");
    assert_eq!(fixture.log("again"), log);
    let prefix = fixture.path("envs");
    until("the half-built environment is removed", || {
        prefix.read_dir().unwrap().all(|entry| !entry.unwrap().path().is_dir())
    })
    .await;
}

#[tokio::test]
async fn test_packages_that_exclude_each_other_are_named() {
    let fixture = Fixture::new();
    fixture.wheel("base", "1", "").await;
    fixture.wheel("base", "2", "").await;
    fixture.wheel("left", "1", "base==1").await;
    let mut lines = fixture.wheel("right", "1", "base==2").await;
    lines.extend(["left".to_owned(), "right".to_owned()]);
    let error =
        fixture.open().acquire(&pip("python3", &lines), &fixture.path("log"), &nobody()).await.unwrap_err();
    let AcquireError::Unsatisfied { requirement, detail } = &error else { panic!("{error:?}") };
    assert!(requirement.contains("left") && requirement.contains("right"), "{requirement}");
    assert!(detail.contains("base==1") && detail.contains("base==2"), "{detail}");
}

#[tokio::test]
async fn test_index_that_cannot_be_reached_is_a_matter_of_the_network() {
    let fixture = Fixture::new();
    // Nothing listens on the discard port of loopback.
    let lines = ["--index-url http://127.0.0.1:9/simple".to_owned(), "tiny".to_owned()];
    let mut config = fixture.config();
    config.vars = BTreeMap::from([("PIP_RETRIES".to_owned(), "1".to_owned())]);
    let environments = Environments::open(config).unwrap();
    let error =
        environments.acquire(&pip("python3", &lines), &fixture.path("log"), &nobody()).await.unwrap_err();
    assert!(matches!(error, AcquireError::Network { .. }), "{error:?}");
}

#[tokio::test]
async fn test_python_that_is_missing_or_broken_is_told() {
    let fixture = Fixture::new();
    let environments = fixture.open();
    let log = fixture.path("log");
    for name in ["python-of-nobody", "/not/there/python", "relative/python"] {
        let error = environments.acquire(&pip(name, &[]), &log, &nobody()).await.unwrap_err();
        assert!(matches!(&error, AcquireError::PythonMissing { name: told } if told == name), "{error:?}");
    }
    let broken = fixture.path("broken");
    fs::write(&broken, "#!/bin/sh\necho version 9 is not installed >&2; exit 127\n").unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
    let spec = EnvSpec::Host { python: broken.display().to_string(), requirements: vec![] };
    let error = environments.acquire(&spec, &log, &nobody()).await.unwrap_err();
    assert!(
        matches!(&error, AcquireError::PythonUnusable { detail, .. }
        if detail == "version 9 is not installed"),
        "{error:?}"
    );
    let error =
        environments.acquire(&EnvSpec::Named { reference: "x".into() }, &log, &nobody()).await.unwrap_err();
    assert!(matches!(error, AcquireError::NameUnknown { .. }), "{error:?}");
}

#[tokio::test]
async fn test_missing_venv_names_the_package_to_install() {
    let fixture = Fixture::new();
    let debian = "echo 'The virtual environment was not created successfully because ensurepip is not available.'; exit 1";
    let python = fixture.python("bare", debian).await;
    let environments = fixture.open();
    let error = environments.acquire(&pip(&python, &[]), &fixture.path("log"), &nobody()).await.unwrap_err();
    let AcquireError::VenvMissing { package, .. } = &error else { panic!("{error:?}") };
    assert!(package.starts_with("python3.") && package.ends_with("-venv") && package.len() < 16, "{package}");
}

#[tokio::test]
async fn test_venv_that_failed_without_a_reason_is_made_again() {
    let fixture = Fixture::new();
    let marker = fixture.path("tried");
    let once = format!(
        "[ -e {0} ] || {{ touch {0}; echo \"Error: Command '[-m ensurepip]' returned non-zero exit status 1.\"; exit 1; }}; \
         echo \"Error: [Errno 11] Resource temporarily unavailable\"; exit 1",
        marker.display()
    );
    let python = fixture.python("mute", &once).await;
    let environments = fixture.open();
    let error = environments.acquire(&pip(&python, &[]), &fixture.path("log"), &nobody()).await.unwrap_err();
    assert!(error.is_lack(), "{error:?}");
    assert!(marker.exists());
}

#[tokio::test]
async fn test_silent_builder_is_given_up() {
    let fixture = Fixture::new();
    let python = fixture.python("silent", "sleep 1000").await;
    let environments =
        Environments::open(EnvConfig { stall: Duration::from_millis(300), ..fixture.config() });
    let error =
        environments.unwrap().acquire(&pip(&python, &[]), &fixture.path("log"), &nobody()).await.unwrap_err();
    assert!(matches!(error, AcquireError::Stalled { .. }), "{error:?}");
}

#[tokio::test]
async fn test_host_interpreter_is_found_as_python_with_its_packages() {
    let fixture = Fixture::new();
    let environments = fixture.open();
    let lease = environments.acquire(&EnvSpec::host(), &fixture.path("log"), &nobody()).await.unwrap();
    let prefix = "import sys; print(sys.prefix)";
    let real = Command::new(fixture.real_python().await).args(["-c", prefix]).capture().await.unwrap();
    assert_eq!(run(&lease, prefix).await, String::from_utf8(real.text).unwrap().trim_end());
    assert!(lease.path_entries()[0].join("python3").exists() && lease.vars().is_empty());
    assert!(environments.acquire(&EnvSpec::host(), &fixture.path("log"), &nobody()).await.unwrap().reused());
}

#[tokio::test]
async fn test_virtual_environment_of_the_user_is_used_in_place() {
    let fixture = Fixture::new();
    let venv = fixture.path("mine");
    let python = fixture.real_python().await;
    let made = Command::new(python).args(["-m", "venv", "--without-pip"]).arg(&venv).capture().await.unwrap();
    assert!(made.status.success());
    let spec = EnvSpec::Host { python: venv.join("bin/python").display().to_string(), requirements: vec![] };
    let lease = fixture.open().acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
    assert_eq!(run(&lease, "import sys; print(sys.prefix)").await, venv.display().to_string());
    assert_eq!(lease.vars()["VIRTUAL_ENV"], venv.display().to_string());
}

#[tokio::test]
async fn test_many_waiters_share_one_build_and_one_log() {
    let fixture = Fixture::new();
    let script = Script { takes: Duration::from_millis(200), ..Script::default() };
    let environments = fixture.scripted([script]);
    let spec = EnvSpec::host();
    let mut waiters = tokio::task::JoinSet::new();
    for number in 0..8 {
        let (environments, spec) = (environments.clone(), spec.clone());
        let log = fixture.path(&format!("log-{number}"));
        waiters.spawn(async move { environments.acquire(&spec, &log, &nobody()).await.unwrap() });
    }
    let leases = waiters.join_all().await;
    assert!(leases.iter().all(|lease| lease.key() == leases[0].key() && !lease.reused()));
    let log = fixture.log("log-0");
    assert_eq!(count(&log, "the script begins\n"), 1, "{log}");
    for number in 1..8 {
        assert_eq!(fixture.log(&format!("log-{number}")), log);
    }
}

#[tokio::test]
async fn test_two_processes_on_one_directory_build_once() {
    let fixture = Fixture::new();
    let script = || Script { takes: Duration::from_millis(300), ..Script::default() };
    let (one, two) = (fixture.scripted([script()]), fixture.scripted([script()]));
    let spec = EnvSpec::host();
    let (log_one, log_two) = (fixture.path("one"), fixture.path("two"));
    let told = nobody();
    let (first, second) = tokio::join!(one.acquire(&spec, &log_one, &told), async {
        until("the first builds", || fixture.path("one").exists() && fixture.log("one").contains("begins"))
            .await;
        two.acquire(&spec, &log_two, &nobody()).await
    });
    assert_eq!(first.unwrap().prefix(), second.unwrap().prefix());
    let second = fixture.log("two");
    assert!(second.starts_with("waiting for another agent"), "{second}");
    assert_eq!(count(&second, "the script begins"), 1, "the log of the other process: {second}");
}

#[tokio::test]
async fn test_environment_that_is_there_after_all_is_not_said_to_be_built() {
    let fixture = Fixture::new();
    let environments = fixture.scripted([Script::default()]);
    let spec = EnvSpec::host();
    let lease = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
    let (builder, place) = (&environments.builders[0], environments.cache.found(lease.key()).unwrap());
    // Like a waiter that found the lock held by another one's look.
    let flight = SingleFlights::join(&environments.flights, &place, builder, &spec, None).unwrap();
    let made = flight.follow(&fixture.path("second"), &nobody()).await.unwrap();
    assert_eq!((made, fixture.log("second").as_str()), (Made::Before, ""));
}

#[tokio::test]
async fn test_build_goes_on_while_one_waits_and_ends_with_the_last() {
    let fixture = Fixture::new();
    let pid_file = fixture.path("pid");
    let on_venv = format!("sleep 1000 & echo $! > {}.new; mv {0}.new {0}; wait", pid_file.display());
    let python = fixture.python("slow", &on_venv).await;
    let (environments, spec) = (fixture.open(), pip(&python, &[]));
    let (log_one, log_two) = (fixture.path("one"), fixture.path("two"));
    let told = nobody();
    let mut one = Box::pin(environments.acquire(&spec, &log_one, &told));
    let mut two = Box::pin(environments.acquire(&spec, &log_two, &told));
    tokio::select! {
        _ = &mut one => panic!("it sleeps"),
        _ = &mut two => panic!("it sleeps"),
        () = until("the builder runs", || pid_file.exists()) => {}
    }
    let pid = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    let lives = || agent_shim::process::Process::find(pid).is_some();
    drop(one);
    tokio::select! {
        _ = &mut two => panic!("it sleeps"),
        () = tokio::time::sleep(Duration::from_millis(300)) => assert!(lives()),
    }
    drop(two);
    until("the child of the builder is killed", || !lives()).await;
    let place =
        environments.cache.place(spec.kind(), &Pip::identity(&pip_of(&fixture), &spec).await.unwrap());
    until("the half-built environment is removed", || !place.prefix().exists()).await;
}

fn pip_of(fixture: &Fixture) -> Pip {
    let config = Arc::new(fixture.config());
    let installer = Arc::new(Installer::new(config.clone()));
    Pip::new(config.clone(), Arc::new(Interpreters::new(config)), installer)
}

#[tokio::test]
async fn test_what_a_killed_daemon_left_is_ended_and_built_anew() {
    let fixture = Fixture::new();
    let spec = EnvSpec::host();
    let prefix = {
        let environments = fixture.scripted([]);
        let lease = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
        lease.prefix().to_owned()
    };
    // The state after a kill: files without a marker, and a builder that still works.
    fs::remove_file(prefix.join("ready.json")).unwrap();
    fs::write(prefix.join("junk"), "half").unwrap();
    let orphan =
        Command::new("/bin/sh").args(["-c", "echo up; exec sleep 1000"]).mark(&prefix.to_string_lossy());
    let mut orphans = tokio::task::JoinSet::new();
    orphans.spawn(async move { orphan.capture().await });
    let mark = prefix.to_string_lossy().into_owned();
    until("the orphan is up", || !agent_shim::process::marked(agent_shim::MARK, &mark).is_empty()).await;

    let (fixture, environments) = tokio::task::spawn_blocking(move || {
        let environments = fixture.scripted([]);
        (fixture, environments)
    })
    .await
    .unwrap();
    assert!(!orphans.join_next().await.unwrap().unwrap().unwrap().status.success());
    assert!(!prefix.exists());
    let lease = environments.acquire(&spec, &fixture.path("again"), &nobody()).await.unwrap();
    assert!(!lease.reused() && !prefix.join("junk").exists());
}

#[tokio::test]
async fn test_failure_that_somebody_may_mend_at_once_is_not_remembered() {
    use AcquireError as E;
    let fixture = Fixture::new();
    let log = fixture.path("log");
    let text = || "so it is".to_owned();
    let failures = [
        E::Network { detail: text() },
        E::PythonMissing { name: text() },
        E::PythonUnusable { path: "/p".into(), detail: text() },
        E::VenvMissing { python: "/p".into(), package: text() },
        E::EngineMissing { looked: None },
        E::Lacks { python: "/p".into(), missing: vec![text()] },
    ];
    for (number, error) in failures.into_iter().enumerate() {
        let environments = fixture.scripted([Script { fails: Some(error.clone()), ..Script::default() }]);
        let spec = pip("python3", &[format!("number=={number}")]);
        let told = environments.acquire(&spec, &log, &nobody()).await.unwrap_err();
        assert_eq!(format!("{told:?}"), format!("{error:?}"));
        assert!(environments.acquire(&spec, &log, &nobody()).await.is_ok(), "{error:?}");
    }
}

#[tokio::test]
async fn test_damaged_or_moved_environment_is_built_anew() {
    let fixture = Fixture::new();
    let environments = fixture.scripted([]);
    let (spec, log) = (EnvSpec::host(), fixture.path("log"));
    let prefix = environments.acquire(&spec, &log, &nobody()).await.unwrap().prefix().to_owned();
    fs::remove_file(prefix.join("bin/python")).unwrap();
    assert!(!environments.acquire(&spec, &log, &nobody()).await.unwrap().reused());

    fs::rename(fixture.path("envs"), fixture.path("old")).unwrap();
    let environments = fixture.scripted([]);
    fs::rename(fixture.path("old").join(prefix.file_name().unwrap()), &prefix).unwrap();
    assert!(environments.acquire(&spec, &log, &nobody()).await.unwrap().reused());
    let elsewhere = fixture.path("envs").join("host-000000000000");
    fs::rename(&prefix, &elsewhere).unwrap();
    fixture.scripted([]);
    assert!(!elsewhere.exists(), "a marker is valid only where it was written");
}

#[tokio::test]
async fn test_environment_in_use_is_not_taken_for_building() {
    let fixture = Fixture::new();
    let environments = fixture.scripted([]);
    let spec = EnvSpec::host();
    let lease = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
    fs::remove_file(lease.prefix().join("bin/python")).unwrap();
    let (log, told) = (fixture.path("second"), nobody());
    let mut second = Box::pin(environments.acquire(&spec, &log, &told));
    tokio::select! {
        _ = &mut second => panic!("a lease is held"),
        () = until("it says what it waits for", || log.exists() && !fixture.log("second").is_empty()) => {}
    }
    drop(lease);
    second.await.unwrap();
}
