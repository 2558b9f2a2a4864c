//! Jobs in containers of an engine that fails: an engine of these tests, which is frozen, killed and restarted.

use std::path::Path;
use std::process::{Child, Stdio};

use super::containers::{Case, busybox, lost, over};
use super::*;

/// An engine below a directory of its own; killed, with its processes, when the test ends.
struct Engine {
    root: tempfile::TempDir,
    live_restore: bool,
    child: Option<Child>,
}

impl Engine {
    /// `None` if there is no engine to start, or this user may not start it.
    async fn start(live_restore: bool) -> Option<Engine> {
        let program =
            ["/usr/sbin/dockerd", "/usr/bin/dockerd"].into_iter().any(|path| Path::new(path).exists());
        if !program || nix::unistd::geteuid().as_raw() != 0 {
            #[allow(clippy::disallowed_methods, reason = "a test that must not be left out says so")]
            let required = std::env::var_os("CI").is_some();
            assert!(!required, "there is no `dockerd`, or this is not user 0");
            eprintln!("left out: there is no `dockerd`, or this is not user 0");
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("config.json"), "{}").unwrap();
        let mut engine = Engine { root, live_restore, child: None };
        engine.again().await;
        Some(engine)
    }

    fn docker(&self) -> Docker {
        Docker::at(self.root.path().join("s"))
    }

    /// Starts it, and waits until it answers.
    async fn again(&mut self) {
        let path = |name: &str| self.root.path().join(name).display().to_string();
        #[allow(clippy::disallowed_methods, reason = "tests use the programs of the machine")]
        let mut command = std::process::Command::new("dockerd");
        command.args(["--config-file", &path("config.json"), "--data-root", &path("data")]);
        command.args(["--exec-root", &path("exec"), "--pidfile", &path("pid")]);
        command.args(["--host", &format!("unix://{}", path("s")), "--storage-driver=vfs", "--bridge=none"]);
        command.args(["--iptables=false", "--ip6tables=false"]);
        command.args(self.live_restore.then_some("--live-restore"));
        let log = fs::File::options().create(true).append(true).open(path("log")).unwrap();
        let output = log.try_clone().unwrap();
        command.stdin(Stdio::null()).stdout(output).stderr(log);
        // A containerd from before counts as alive until it is reaped.
        let below = path("exec/containerd/containerd.pid");
        if let Some(below_it) = fs::read_to_string(&below).ok().and_then(|text| text.trim().parse().ok()) {
            until(|| Member::find(below_it).is_none()).await;
        }
        drop([path("pid"), below].map(fs::remove_file));
        self.child = Some(command.spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(120);
        while let Err(error) = self.docker().ping(Duration::from_secs(5)).await {
            let log = || fs::read_to_string(path("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "the engine answers: {error}\n{}", log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.as_ref().unwrap().id()).unwrap();
        assert!(Member::find(id).unwrap().signal(signal).unwrap());
    }

    /// Ends it by a signal, and waits until it is gone.
    async fn end(&mut self, signal: Signal) {
        self.signal(signal);
        let mut child = self.child.take().unwrap();
        tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        // The processes that hold its containers outlive it; their command lines contain its directory.
        let own = self.root.path().display().to_string();
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
            let number = process.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
            if String::from_utf8_lossy(&line).contains(&own)
                && let Some(found) =
                    number.filter(|pid| *pid != std::process::id() as i32).and_then(Member::find)
            {
                let _ = found.signal(Signal::SIGKILL);
            }
        }
        for (_, mount) in mounts_below(&own) {
            #[allow(clippy::disallowed_methods, reason = "tests use the programs of the machine")]
            let _ = std::process::Command::new("umount").args(["--lazy", &mount]).status();
        }
    }
}

/// Mounts that an engine left, the deepest first.
fn mounts_below(root: &str) -> Vec<(std::cmp::Reverse<usize>, String)> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|at| at.starts_with(root));
    let mut found: Vec<_> = places.map(|at| (std::cmp::Reverse(at.len()), at.to_owned())).collect();
    found.sort();
    found
}

#[tokio::test]
async fn test_frozen_engine_holds_up_no_job_that_runs_and_is_named_to_others() {
    let Some(engine) = Engine::start(false).await else { return };
    let image = busybox(&engine.docker()).await;
    let (one, two, next) = (
        Case::of(engine.docker(), &image),
        Case::of(engine.docker(), &image),
        Case::of(engine.docker(), &image),
    );
    let script = "echo ready; while ! test -e go; do sleep 0.05; done; seq 1 1000; exit 7";
    let (first, second) = (one.start(script).await, two.start("echo ready; exec sleep 1000").await);
    one.until_log_has("ready").await;
    two.until_log_has("ready").await;
    engine.signal(Signal::SIGSTOP);
    fs::write(one.dir.work().join("go"), "").unwrap();
    assert_eq!(over(&first).await.end, End::Exited(ExitStatus::Code(7)));
    one.until_log_has("\n1000\n").await;
    second.stop(Duration::from_millis(200), "enough").await.unwrap();
    assert_eq!(over(&second).await.stopped.as_deref(), Some("enough"));
    let launch = next.launch_of(&["sh", "-c", "exit 3"]);
    let error = next.containers.prepare(&next.dir, &launch, &next.container_spec).await.unwrap_err();
    assert!(error.is_engine_away(), "{error}");
    engine.signal(Signal::SIGCONT);
    assert_eq!(over(&next.launch(&launch).await).await.end, End::Exited(ExitStatus::Code(3)));
}

#[tokio::test]
async fn test_engine_that_restores_what_runs_may_be_killed_again_and_again() {
    let Some(mut engine) = Engine::start(true).await else { return };
    let image = busybox(&engine.docker()).await;
    let case = Case::of(engine.docker(), &image);
    let running = case.start("echo ready; while ! test -e go; do sleep 0.05; done; exit 7").await;
    case.until_log_has("ready").await;
    for _ in 0..3 {
        engine.end(Signal::SIGKILL).await;
        let Found::Running(_) = case.executor.reattach(&case.dir).await.unwrap() else {
            panic!("it runs");
        };
        let other = Case::of(engine.docker(), &image);
        let launch = other.launch_of(&["sh", "-c", "true"]);
        let error = other.containers.prepare(&other.dir, &launch, &other.container_spec).await.unwrap_err();
        assert!(error.is_engine_away(), "{error}");
        engine.again().await;
        assert_eq!(over(&other.launch(&launch).await).await.end, End::Exited(ExitStatus::Code(0)));
    }
    fs::write(case.dir.work().join("go"), "").unwrap();
    assert_eq!(over(&running).await.end, End::Exited(ExitStatus::Code(7)));
    case.containers.clear(&case.dir).await.unwrap();
}

#[tokio::test]
async fn test_engine_that_ends_its_containers_is_named_as_the_reason() {
    let Some(mut engine) = Engine::start(false).await else { return };
    let image = busybox(&engine.docker()).await;
    // One that ends when asked to, and one that has to be killed.
    for script in ["echo ready; exec sleep 1000", "trap '' TERM; echo ready; while :; do sleep 1; done"] {
        let case = Case::of(engine.docker(), &image);
        let grace = Duration::from_secs(if script.starts_with("trap") { 600 } else { 1 });
        let launch = Launch { grace, ..case.launch_of(&["sh", "-c", script]) };
        let running = case.launch(&launch).await;
        case.until_log_has("ready").await;
        engine.end(Signal::SIGKILL).await;
        assert!(case.dir.has_shim().unwrap(), "it runs without its engine");
        if grace > Duration::from_secs(1) {
            let hello = case.dir.read_hello().unwrap().unwrap();
            let ended = case.executor.end(&case.dir, LONG).await.unwrap();
            assert!(ended.0 >= 2 && ended.1 == 0, "{ended:?}");
            assert!(marked(MARK, &hello.instance).is_empty());
            let lost = lost(&running).await;
            assert!(lost.why.as_ref().is_some_and(|why| why.contains("stopped or restarted")), "{lost:?}");
            engine.again().await;
        } else {
            engine.again().await;
            let record = over(&running).await;
            assert_eq!((record.stop_signal, record.containment.as_str()), (Some(15), "container"));
        }
    }
}
