//! The whole product under test.
//!
//! A [`Host`] is one box: its own home, state and processes, with the real `agentd`, `agent-shim` and
//! `agentctl` of this workspace, built once when the first test needs them. Nothing of it outlives the test,
//! whatever the test did to it. Tests wait with [`eventually`] on a condition and a deadline.
//!
//! A [`fleet::Fleet`] is a controller and its nodes as separate processes, with a [`link::Link`] in between
//! that can be cut; its jobs run the program `fix`, whose words a [`witness::Witness`] checks. GPUs are told by
//! an [`nvml::FakeNvml`].

pub mod before;
pub mod bounds;
pub mod chance;
pub mod channel;
pub mod client;
pub mod cost;
pub mod docker;
pub mod engine;
pub mod fleet;
pub mod hosts;
pub mod images;
pub mod link;
pub mod machines;
pub mod manager;
pub mod metadata;
pub mod mutate;
pub mod nvml;
pub mod post;
pub mod python;
pub mod queue;
pub mod registry;
pub mod simulated;
pub mod split;
pub mod table;
pub mod trips;
mod wait;
pub mod witness;

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

pub use wait::{eventually, within};

/// How long anything may take that normally takes a moment; generous, because CI is slow and shared.
pub const SOON: Duration = Duration::from_secs(120);

/// What a package of the product installs.
pub const PROGRAMS: [&str; 4] = ["agentd", "agentctl", "agent-shim", "agent-spawn"];

/// The directory of the binaries, built on first use with the profile of the test itself; or the one that
/// `AGENTD_TEST_BINARIES` names, as it is.
#[allow(clippy::disallowed_methods, reason = "asks for what it is to test")]
pub fn binaries() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(named) = std::env::var_os("AGENTD_TEST_BINARIES") {
            return PathBuf::from(named);
        }
        let profile_dir = profile_dir();
        let mut build = cargo();
        // All of it, as the tests are built: another choice has other features, and would be compiled once more.
        build.args(["build", "--locked", "--workspace", "--bins", "--quiet", "--target-dir"]);
        build.arg(profile_dir.join("..")).arg(match profile_dir.ends_with("release") {
            true => "--release",
            false => "--tests",
        });
        let built = build.current_dir(root()).status().expect("cargo runs");
        assert!(built.success(), "the binaries under test do not build");
        profile_dir
    })
}

/// Cargo by the path, where rustup tells it its compiler: the program that built this would take any.
#[allow(clippy::disallowed_methods, reason = "builds what it tests")]
pub fn cargo() -> Command {
    Command::new("cargo")
}

/// Where cargo puts the programs of the profile that this test has.
fn profile_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    test.ancestors().find(|dir| dir.join("deps").is_dir()).expect("cargo's layout").to_owned()
}

/// The conda engine, built on first use beside the daemon, which is where the daemon looks for it. A build of
/// its own: nothing else is to be compiled with what only the engine needs. Where `AGENT_ENV_BIN` names one, a
/// copy of that is put there instead; where `AGENTD_TEST_BINARIES` names the programs, it is waited for there.
#[allow(clippy::disallowed_methods, reason = "asks for what it is to test")]
pub fn engine() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let dir = binaries();
        let engine = dir.join("agent-env");
        if let Some(named) = std::env::var_os("AGENT_ENV_BIN") {
            let new = dir.join(format!("agent-env.{}", std::process::id()));
            copy_program(Path::new(&named), &new);
            fs::rename(&new, &engine).expect("the place of AGENT_ENV_BIN");
            return engine;
        }
        if std::env::var_os("AGENTD_TEST_BINARIES").is_some() {
            // Whoever built those builds this too, at its time.
            eventually("the conda engine is built", 5 * SOON, || engine.is_file().then_some(()));
            return engine;
        }
        let mut build = cargo();
        build.args(["build", "--locked", "--quiet", "-p", "agent-env", "--features", "engine", "--bins"]);
        build.arg("--target-dir").arg(dir.join(".."));
        if dir.ends_with("release") {
            build.arg("--release");
        }
        let built = build.current_dir(root()).status().expect("cargo runs");
        assert!(built.success(), "the conda engine does not build");
        engine
    })
}

/// The conda engines that work for a box: for its daemon, or on files below its home.
pub fn engines(home: &Path, daemon: u32) -> Vec<u32> {
    let works_here = |pid: &u32| {
        let parent = || {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("PPid:").map(str::trim));
            line.and_then(|line| line.parse::<u32>().ok())
        };
        let mut open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let below =
            |entry: fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|path| path.starts_with(home));
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "agent-env")
            && (parent() == Some(daemon) || fleet::processes_below(home).contains(pid) || open.any(below))
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(works_here).collect()
}

/// The top of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the repository exists")
}

/// Copies a directory with all files that are in it; sockets and the like are no part of a copy.
pub fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory").flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else if entry.path().is_file() {
            fs::copy(entry.path(), target).expect("a copy");
        }
    }
}

/// What a finished command said.
#[derive(Debug)]
pub struct Ran {
    /// Its exit code; 128 + n for a signal.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Ran {
    /// Itself, if the code is `code`; panics with everything it said otherwise.
    #[track_caller]
    pub fn code(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Itself, if it ended well.
    #[track_caller]
    pub fn ok(self) -> Ran {
        self.code(0)
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in:\n{}", self.stdout))
    }

    /// Fails unless standard error holds `text`.
    #[track_caller]
    pub fn says(self, text: &str) -> Ran {
        assert!(self.stderr.contains(text), "no `{text}` in stderr:\n{}", self.stderr);
        self
    }
}

/// One box under test.
#[derive(Debug)]
pub struct Host {
    home: tempfile::TempDir,
    programs: PathBuf,
    agentd: Option<Child>,
    variables: Vec<(String, String)>,
    user: Option<u32>,
    /// What runs the daemon, with its program as the first argument.
    runner: Option<PathBuf>,
}

impl Default for Host {
    fn default() -> Host {
        Host::new()
    }
}

impl Host {
    /// A box with nothing on it; no daemon runs.
    pub fn new() -> Host {
        let programs = binaries().to_owned();
        let home = tempfile::Builder::new().prefix("agentd-test-").tempdir().expect("a temporary directory");
        Host { home, programs, agentd: None, variables: Vec::new(), user: None, runner: None }
    }

    /// A box whose programs everybody may run.
    pub fn for_everybody() -> Host {
        Host::for_everybody_below(&std::env::temp_dir())
    }

    /// The same, at a place below this directory.
    pub fn for_everybody_below(dir: &Path) -> Host {
        let home = tempfile::Builder::new().prefix("agentd-test-").tempdir_in(dir);
        let mut host = Host::new();
        host.home = home.expect("a temporary directory");
        let programs = host.home().join("bin");
        fs::create_dir(&programs).expect("a directory");
        fs::set_permissions(host.home(), Permissions::from_mode(0o755)).expect("its own directory");
        host.programs = programs;
        host.install(binaries());
        host
    }

    /// Puts programs in the place of those that this box has for itself, as a package does: what runs goes on.
    pub fn install(&mut self, from: &Path) {
        for name in PROGRAMS {
            let (new, program) = (self.programs.join("new"), self.programs.join(name));
            copy_program(&from.join(name), &new);
            fs::rename(new, program).expect("a program");
        }
    }

    /// Has every program that is started from now on come from this directory.
    pub fn use_programs(&mut self, from: &Path) {
        self.programs = from.to_owned();
    }

    /// A box that belongs to a user without any privilege.
    pub fn unprivileged() -> Host {
        const NOBODY: u32 = 65534;
        let mut host = Host::for_everybody();
        chown(host.home(), Some(NOBODY), Some(NOBODY)).expect("giving a home away needs root");
        host.user = Some(NOBODY);
        host.set("PATH", "/usr/bin:/bin");
        let home = host.home().display().to_string();
        host.set("HOME", &home);
        host
    }

    /// A box whose daemon runs.
    pub fn started() -> Host {
        let mut host = Host::new();
        host.start();
        host
    }

    /// Has the daemon run by `runner` from now on, which gets its program as the first argument.
    pub fn run_by(&mut self, runner: &Path) {
        self.runner = Some(runner.to_owned());
    }

    /// A box whose daemon is run by `runner`.
    pub fn started_by(runner: &Path) -> Host {
        let mut host = Host::new();
        host.run_by(runner);
        host.start();
        host
    }

    /// Sets a variable for the daemon and every client from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.variables.push((name.to_owned(), value.to_owned()));
    }

    /// The directory that is this box's home.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Where the daemon keeps its state.
    pub fn state(&self) -> PathBuf {
        self.home().join("agentd")
    }

    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    fn command(&self, program: &str) -> Command {
        let path = self.programs.join(program);
        let mut command = match &self.runner {
            Some(runner) if program == "agentd" => {
                let mut command = Command::new(runner);
                command.arg(path);
                command
            }
            _ => Command::new(path),
        };
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        command.env("XDG_DATA_HOME", self.home()).env("XDG_CACHE_HOME", self.home().join("cache"));
        command.env_remove("AGENTD_SOCKET").env("NO_COLOR", "1");
        command.envs(self.variables.iter().map(|(n, v)| (n, v)));
        command.current_dir(self.home()).stdin(Stdio::null());
        command
    }

    /// A client command to be started by the test itself.
    pub fn client<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = self.command("agentctl");
        command.args(arguments);
        command
    }

    /// Runs `agentctl` to its end.
    #[track_caller]
    pub fn ctl<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Ran {
        finish(&mut self.client(arguments))
    }

    /// Starts the daemon and waits until it answers. Its log goes to `agentd.log` of the home.
    #[track_caller]
    pub fn start(&mut self) {
        assert!(self.agentd.is_none(), "the daemon runs already");
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.home().join("agentd.log"))
            .expect("a log");
        let mut command = self.command("agentd");
        command.args(["run", "--user"]).stdout(Stdio::null()).stderr(log);
        let mut agentd = once_free(|| command.spawn()).expect("agentd starts");
        eventually("the daemon answers", SOON, || {
            let ended = agentd.try_wait().expect("its own child");
            assert!(ended.is_none(), "the daemon ended with {ended:?}:\n{}", self.log());
            (self.ctl(&["nodes"]).code == 0).then_some(())
        });
        self.agentd = Some(agentd);
    }

    /// Ends the daemon at once, as a crash would; jobs are not asked.
    #[track_caller]
    pub fn kill(&mut self) {
        let mut agentd = self.agentd.take().expect("the daemon runs");
        agentd.kill().expect("SIGKILL is sent");
        agentd.wait().expect("the daemon is reaped");
    }

    /// Waits for the daemon to die of itself, as a failure that was planned makes it.
    #[track_caller]
    pub fn died(&mut self) {
        let mut agentd = self.agentd.take().expect("the daemon runs");
        eventually("the daemon dies", SOON, || agentd.try_wait().expect("its own child"));
    }

    /// Ends the daemon as an operator would, and gives its exit code.
    #[track_caller]
    pub fn stop(&mut self) -> i32 {
        let mut agentd = self.agentd.take().expect("the daemon runs");
        signal(agentd.id(), Signal::TERM);
        let status = eventually("the daemon stops", SOON, || agentd.try_wait().expect("its own child"));
        status.code().unwrap_or(-1)
    }

    /// Runs a verb of the daemon's program on the same state, to its end.
    pub fn agentd(&self, verb: &[&str]) -> Ran {
        finish(self.command("agentd").args(verb).arg("--user"))
    }

    /// Starts another daemon on the same state and waits for it to give up.
    #[track_caller]
    pub fn second_daemon(&self) -> Ran {
        let mut command = self.command("agentd");
        command.args(["run", "--user"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut second = once_free(|| command.spawn()).expect("agentd starts");
        eventually("the second daemon gives up", SOON, || second.try_wait().expect("its own child"));
        told(second.wait_with_output().expect("its own child"))
    }

    /// The process id of the running daemon.
    pub fn pid(&self) -> u32 {
        self.agentd.as_ref().expect("the daemon runs").id()
    }

    /// Writes a code directory and gives its path.
    pub fn project(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let dir = self.home().join(name);
        for (path, text) in files {
            let path = dir.join(path);
            fs::create_dir_all(path.parent().expect("a file has a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        }
        dir
    }

    /// Submits a shell command in an empty code directory and gives the job's name.
    #[track_caller]
    pub fn submit(&self, command: &str) -> String {
        let dir = self.project("empty", &[("job.txt", "")]);
        let ran = self.ctl(&["submit", dir.to_str().expect("UTF-8"), "--", "sh", "-c", command]).ok();
        ran.stdout.trim().to_owned()
    }

    /// A job as `agentctl show --json` gives it.
    #[track_caller]
    pub fn show(&self, job: &str) -> Value {
        self.ctl(&["show", job, "--json"]).ok().json()
    }

    /// The state of a job.
    #[track_caller]
    pub fn job_state(&self, job: &str) -> String {
        self.show(job)["state"].as_str().expect("a state").to_owned()
    }

    /// Waits until a job is in one of these states and gives which.
    #[track_caller]
    pub fn wait_for(&self, job: &str, states: &[&str]) -> String {
        eventually(&format!("{job} to be {states:?}"), SOON, || {
            let ran = self.ctl(&["show", job, "--json"]);
            let state =
                (ran.code == 0).then(|| ran.json()["state"].as_str().unwrap_or_default().to_owned())?;
            states.contains(&state.as_str()).then_some(state)
        })
    }

    /// The processes that belong to this box: those that run, or were started, below its home.
    pub fn processes(&self) -> Vec<u32> {
        fleet::processes_below(self.home())
    }

    /// The daemon's log, for messages of failing tests.
    pub fn log(&self) -> String {
        fs::read_to_string(self.home().join("agentd.log")).unwrap_or_default()
    }
}

impl Drop for Host {
    #[allow(clippy::print_stderr, reason = "what the daemon said belongs to a failing test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- agentd.log\n{}", self.log());
            // Another panic would end the program, with all other tests.
            if let Ok(jobs) = self.client(&["jobs", "--json"]).output() {
                eprintln!("--- jobs\n{}", String::from_utf8_lossy(&jobs.stdout));
            }
        }
        if let Some(mut agentd) = self.agentd.take() {
            let _ = agentd.kill();
            let _ = agentd.wait();
        }
        // Jobs are made to outlive their daemon.
        end_all(|| self.processes());
    }
}

/// Copies a program that is to be run at once, by a process of its own: whatever another thread starts meanwhile would
/// have a file that this one writes open too for a moment, and what is open for writing cannot be run.
#[allow(clippy::disallowed_methods, reason = "makes what the tests need")]
pub fn copy_program(from: &Path, to: &Path) {
    finish(Command::new("cp").arg(from).arg(to)).ok();
}

/// What `start` gives. A script that another thread's child still has open for writing is tried again, for a moment.
pub fn once_free<T>(mut start: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    let started = within(Duration::from_secs(10), || match start() {
        Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => None,
        started => Some(started),
    });
    started.unwrap_or_else(start)
}

/// Runs a command to its end. It cannot ask whoever runs the tests; one that does not end is killed, and fails with
/// what it had said.
#[track_caller]
pub fn finish(command: &mut Command) -> Ran {
    /// Nothing that a test runs takes so long.
    const PATIENCE: Duration = Duration::from_secs(600);
    static ASKS_NOBODY: std::sync::Once = std::sync::Once::new();
    ASKS_NOBODY.call_once(|| {
        let nothing = fs::File::open("/dev/null").expect("there is nothing");
        rustix::stdio::dup2_stdin(nothing).expect("standard input");
    });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = once_free(|| command.spawn()).expect("the program starts");
    let (pid, (ended, end)) = (child.id(), std::sync::mpsc::channel::<()>());
    let watch = std::thread::spawn(move || {
        let is_late = end.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        if is_late {
            signal(pid, Signal::KILL);
        }
        is_late
    });
    let ran = told(child.wait_with_output().expect("its own child"));
    drop(ended);
    let is_late = watch.join().expect("it only waits");
    assert!(
        !is_late,
        "{command:?} had not ended after {PATIENCE:?}\nstdout:\n{}\nstderr:\n{}",
        ran.stdout, ran.stderr
    );
    ran
}

fn told(output: Output) -> Ran {
    let code = output.status.code().or_else(|| output.status.signal().map(|s| 128 + s)).unwrap_or(-1);
    Ran {
        code,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Sends a signal; a process that is gone already is fine.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Ends the processes that `find` finds, until it finds none; whatever resists for ten seconds stays.
pub fn end_all(find: impl Fn() -> Vec<u32>) {
    let _ = within(Duration::from_secs(10), || {
        let left = find();
        left.iter().for_each(|pid| signal(*pid, Signal::KILL));
        left.is_empty().then_some(())
    });
}

/// Resident memory of a process in bytes.
pub fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}

/// Processor time a process used so far, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0 // USER_HZ is 100 on every Linux there is
}
