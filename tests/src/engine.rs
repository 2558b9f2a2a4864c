//! A container engine of a test's own, to be killed, frozen, stopped and started again without a word to that of
//! the machine.
//!
//! Owns a `containerd` and a `dockerd` with everything of theirs below one directory; no network is made, so
//! containers have that of the machine or none. As where an operator installs them, the two are separate: a container
//! does not need `dockerd` to live on, and whether it may is for `live-restore` to say.
//!
//! Nothing outlives an engine: its containers are removed by itself, then it is ended and what is still mounted or
//! still runs is cleared away. What a killed test left is swept by the next that starts one ([`sweep`]).

#![allow(clippy::disallowed_methods, reason = "runs what tests are made with")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, Once, OnceLock, PoisonError};
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::Signal;

use crate::docker::Docker;
use crate::{SOON, end_all, eventually, signal, within};

/// What the directory of every engine is called.
const PREFIX: &str = "agentd-engine-";

/// One engine.
#[derive(Debug)]
pub struct Engine {
    dir: PathBuf,
    live_restore: bool,
    /// What its programs are started by, if not by themselves.
    starter: Vec<String>,
    containerd: Option<Child>,
    dockerd: Option<Child>,
}

impl Engine {
    /// One that runs. With `live_restore` containers live on while it is away; else the next start ends them.
    pub fn started(live_restore: bool) -> Engine {
        let mut engine = Engine::absent(live_restore);
        engine.start();
        engine
    }

    /// One that runs where these words start it: its containers have the network of that host.
    pub fn on(starter: Vec<String>) -> Engine {
        let mut engine = Engine::absent(true);
        engine.starter = starter;
        engine.start();
        engine
    }

    /// One that does not run yet; its socket has a place already.
    pub fn absent(live_restore: bool) -> Engine {
        static SWEPT: Once = Once::new();
        SWEPT.call_once(sweep);
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir().expect("a temporary directory").keep();
        // Whose it is, so that nobody sweeps it before its time.
        fs::write(dir.join("owner"), std::process::id().to_string()).expect("a file");
        Engine { dir, live_restore, starter: Vec::new(), containerd: None, dockerd: None }
    }

    /// The engine that all tests share which leave it in peace: started by the first, ended by [`end_shared`].
    pub fn shared() -> Docker {
        let mut shared = shared().lock().unwrap_or_else(PoisonError::into_inner);
        shared.get_or_insert_with(|| Engine::started(true)).docker()
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("docker.sock")
    }

    /// It, to be asked.
    pub fn docker(&self) -> Docker {
        Docker::at(self.socket())
    }

    /// Starts it and waits until it answers.
    #[track_caller]
    pub fn start(&mut self) {
        assert!(self.dockerd.is_none(), "the engine runs already");
        if self.containerd.is_none() {
            self.containerd = Some(self.start_containerd());
        }
        // The number of a process that was killed may be somebody else's by now.
        let _ = fs::remove_file(self.dir.join("pid"));
        let mut dockerd = self.daemon("dockerd", "dockerd.log");
        let at = |name: &str| self.dir.join(name);
        fs::write(at("dockerd.json"), "{}").expect("a configuration");
        dockerd.arg("--config-file").arg(at("dockerd.json")).arg("--pidfile").arg(at("pid"));
        dockerd.arg("--containerd").arg(at("containerd.sock"));
        dockerd.arg("--host").arg(format!("unix://{}", self.socket().display()));
        dockerd.arg("--data-root").arg(at("data")).arg("--exec-root").arg(at("exec"));
        dockerd.args(["--bridge=none", "--iptables=false", "--ip-forward=false", "--shutdown-timeout=5"]);
        dockerd.arg(format!("--cgroup-parent=/{}", self.name()));
        if self.live_restore {
            dockerd.arg("--live-restore");
        }
        let mut dockerd = dockerd.spawn().expect("dockerd is installed (package docker.io)");
        let docker = self.docker();
        eventually("the container engine answers", SOON, || {
            let ended = dockerd.try_wait().expect("its own child");
            assert!(ended.is_none(), "the container engine ended with {ended:?}:\n{}", self.log());
            docker.answers().then_some(())
        });
        self.dockerd = Some(dockerd);
    }

    fn start_containerd(&self) -> Child {
        let mut containerd = self.daemon("containerd", "containerd.log");
        containerd.arg("--root").arg(self.dir.join("content")).arg("--state").arg(self.dir.join("state"));
        containerd.arg("--address").arg(self.dir.join("containerd.sock"));
        let child = containerd.spawn().expect("containerd is installed (package containerd)");
        let socket = self.dir.join("containerd.sock");
        eventually("containerd listens", SOON, || socket.exists().then_some(()));
        child
    }

    /// A program of the engine that leaves nothing in the terminal, and that no signal of the terminal reaches.
    fn daemon(&self, program: &str, log: &str) -> Command {
        use std::os::unix::process::CommandExt;
        let log = File::options().create(true).append(true).open(self.dir.join(log)).expect("a log");
        let usual = Path::new("/usr/sbin").join(program);
        let program = if usual.exists() { usual } else { PathBuf::from(program) };
        let mut command = match self.starter.split_first() {
            Some((first, words)) => {
                let mut command = Command::new(first);
                command.args(words).arg(program);
                command
            }
            None => Command::new(program),
        };
        // The place of its own temporary files goes with it.
        let scratch = self.dir.join("tmp");
        fs::create_dir_all(&scratch).expect("a directory");
        command.env("TMPDIR", &scratch).env("DOCKER_TMPDIR", &scratch).process_group(0);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        command
    }

    /// Whether it runs, frozen or not.
    pub fn runs(&self) -> bool {
        self.dockerd.is_some()
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut dockerd) = self.dockerd.take() {
            let _ = dockerd.kill();
            let _ = dockerd.wait();
        }
    }

    /// Ends it as an operator would, who has patience.
    #[track_caller]
    pub fn stop(&mut self) {
        let mut dockerd = self.dockerd.take().expect("the engine runs");
        signal(dockerd.id(), Signal::TERM);
        eventually("the container engine stops", SOON, || dockerd.try_wait().expect("its own child"));
    }

    /// Stops it from doing anything; its socket takes calls that are not answered.
    pub fn freeze(&self) {
        self.send(Signal::STOP);
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.send(Signal::CONT);
    }

    fn send(&self, which: Signal) {
        self.dockerd.iter().for_each(|dockerd| signal(dockerd.id(), which));
    }

    /// What it said last.
    pub fn log(&self) -> String {
        let text = fs::read_to_string(self.dir.join("dockerd.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    fn name(&self) -> String {
        self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Has it remove its containers, which it does best itself.
    fn empty(&mut self) {
        if self.containerd.is_none() {
            return; // it never ran
        }
        self.thaw();
        if self.dockerd.is_none() {
            self.start();
        }
        let docker = self.docker();
        docker.containers().iter().for_each(|container| docker.remove(&container.id));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let emptied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.empty()));
        for mut child in self.dockerd.take().into_iter().chain(self.containerd.take()) {
            signal(child.id(), Signal::TERM);
            let ended = within(Duration::from_secs(10), || child.try_wait().ok().flatten());
            if ended.is_none() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        clear(&self.dir);
        if let (Err(why), false) = (emptied, std::thread::panicking()) {
            std::panic::resume_unwind(why);
        }
    }
}

fn shared() -> &'static Mutex<Option<Engine>> {
    static SHARED: OnceLock<Mutex<Option<Engine>>> = OnceLock::new();
    SHARED.get_or_init(Mutex::default)
}

/// Ends the engine that tests share, if there is one: the last thing a suite does.
pub fn end_shared() {
    drop(shared().lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Clears away what a test left that was killed.
fn sweep() {
    let owner = |dir: &Path| fs::read_to_string(dir.join("owner")).unwrap_or_default();
    for entry in fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let dir = entry.path();
        let named = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let orphan =
            || owner(&dir).parse::<u32>().is_ok_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        if named && orphan() {
            clear(&dir);
        }
    }
}

/// Ends what runs for an engine, takes down what is mounted, and removes its directory and its control groups.
fn clear(dir: &Path) {
    end_all(|| running(dir));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut points: Vec<PathBuf> =
        mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from).collect();
    points.retain(|point| point.starts_with(dir));
    for point in points.into_iter().rev() {
        let _ = unmount(&point, UnmountFlags::DETACH);
    }
    let _ = fs::remove_dir_all(dir);
    let name = dir.file_name().unwrap_or_default();
    let groups = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    for group in groups.map(|entry| entry.path().join(name)).chain([Path::new("/sys/fs/cgroup").join(name)]) {
        remove_group(&group);
    }
}

/// The programs of an engine, those that keep its containers, and what runs in these.
fn running(dir: &Path) -> Vec<u32> {
    let text = dir.to_string_lossy().into_owned();
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let names = |pid: u32, file: &str, what: &str| {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        bytes.windows(what.len()).any(|window| window == what.as_bytes())
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut found: Vec<u32> = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    found.retain(|pid| {
        let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        // A test that names the directory is no part of the engine.
        let part = ["dockerd", "containerd", "runc"].iter().any(|part| program.starts_with(part));
        *pid != std::process::id()
            && ((part && names(*pid, "cmdline", &text)) || names(*pid, "cgroup", &format!("/{name}/")))
    });
    found
}

fn remove_group(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_group(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}
