//! Where the engine is tried: a room of its own for each case, requests, and what the engine told.
//!
//! Owns how the engine is started and ended, and what a build that came about must look like. An engine that says
//! nothing at its end, or takes longer than [`PATIENCE`], fails the case whatever it was about.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use agent_env::{
    Activation, Build, Built, Channel, EngineEvent, EngineRequest, Failure, FailureKind, Platform, Priority,
    Spec, Sweep, Task, VERSION,
};
use agent_tests::channel::{self, Server};

/// How long one run of the engine may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// What no output, file or list may ever hold: the secrets of `serve.py`.
pub(crate) const SECRETS: [&str; 3] = ["basic-secret", "bearer-secret", "token-secret"];

/// Builds and makes what every case needs, so that no case is charged for it.
pub(crate) fn prepare() {
    engine();
    channel::Channel::t0();
    machine();
}

fn engine() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| {
        let path = channel::engine();
        assert!(
            path.is_file(),
            "there is no engine {}: build agent-env with its feature `engine`",
            path.display()
        );
        path
    })
}

/// What this machine offers, as the engine says.
pub(crate) fn machine() -> &'static Platform {
    static TOLD: OnceLock<Platform> = OnceLock::new();
    TOLD.get_or_init(|| {
        let room = Room::new();
        let told = room.start(&Task::Probe).finish();
        let Some(EngineEvent::Probed(platform)) = told.events.last() else {
            panic!("no answer to a probe: {told:?}")
        };
        platform.clone()
    })
}

/// The platform of this machine with another set of graphics drivers.
pub(crate) fn machine_with_cuda(version: Option<&str>) -> Platform {
    let mut platform = machine().clone();
    platform.virtual_packages.retain(|package| !package.starts_with("__cuda"));
    platform.virtual_packages.extend(version.map(|version| format!("__cuda={version}=0")));
    platform.virtual_packages.sort();
    platform
}

/// A place for a package cache and some environments.
#[derive(Debug)]
pub(crate) struct Room {
    _dir: Option<tempfile::TempDir>,
    /// Everything is below.
    pub(crate) home: PathBuf,
    /// The package cache.
    pub(crate) cache: PathBuf,
    made: AtomicU32,
}

impl Room {
    /// A new one.
    pub(crate) fn new() -> Room {
        let dir = tempfile::Builder::new().prefix("environments-").tempdir().expect("a temporary directory");
        let home = dir.path().to_owned();
        Room { _dir: Some(dir), ..Room::at(&home) }
    }

    /// One in a directory that exists.
    pub(crate) fn at(home: &Path) -> Room {
        let cache = home.join("cache");
        fs::create_dir_all(&cache).expect("a directory");
        fs::create_dir_all(home.join("home")).expect("a directory");
        Room { _dir: None, home: home.to_owned(), cache, made: AtomicU32::new(0) }
    }

    /// An empty directory for an environment, where no other was.
    pub(crate) fn prefix(&self) -> PathBuf {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let prefix = self.home.join(format!("environments/{number:020}"));
        fs::create_dir_all(&prefix).expect("a directory");
        prefix
    }

    /// A request for these packages from one channel, one line each, from line 1 on.
    pub(crate) fn wish(&self, url: &str, specs: &[&str]) -> Build {
        Build {
            prefix: self.prefix(),
            cache: self.cache.clone(),
            channels: vec![from("main", url)],
            specs: specs
                .iter()
                .enumerate()
                .map(|(at, text)| Spec { text: (*text).to_owned(), line: at + 1 })
                .collect(),
            lock: None,
            priority: Priority::Strict,
            offline: false,
            platform: machine().clone(),
            credentials: None,
            solve_within_s: 60,
            stall_s: 30,
            hard_links: false,
            for_everybody: false,
        }
    }

    /// A request for exactly these packages.
    pub(crate) fn wish_locked(&self, lock: &str) -> Build {
        Build { lock: Some(lock.to_owned()), channels: Vec::new(), ..self.wish("file:///nowhere", &[]) }
    }

    /// Starts the engine on a task.
    pub(crate) fn start(&self, task: &Task) -> Running {
        let request = EngineRequest { version: VERSION, task: task.clone() };
        self.start_with(&serde_json::to_string(&request).expect("JSON"), &mut self.command())
    }

    /// The engine, not yet started; its home is empty and stays so.
    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(engine());
        command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", self.home.join("home"));
        command.current_dir(&self.home);
        command
    }

    /// Starts a command that is the engine with this text on its standard input.
    pub(crate) fn start_with(&self, request: &str, command: &mut Command) -> Running {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("the engine starts");
        // One that ends without reading is judged by what it says.
        let _ = process.stdin.take().expect("a pipe").write_all(request.as_bytes());
        let (lines, told) = channel();
        let stdout = process.stdout.take().expect("a pipe");
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = lines.send(line);
            }
        });
        let mut stderr = process.stderr.take().expect("a pipe");
        let complaints = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let told = Mutex::new(told);
        Running { process, told, complaints: Some(complaints), events: Vec::new(), begun: Instant::now() }
    }

    /// Builds, to the end.
    #[track_caller]
    pub(crate) fn build(&self, wish: &Build) -> Told {
        self.start(&Task::Build(Box::new(wish.clone()))).finish()
    }

    /// Builds these packages from one channel; it must come about.
    #[track_caller]
    pub(crate) fn made(&self, url: &str, specs: &[&str]) -> (PathBuf, Built) {
        let wish = self.wish(url, specs);
        let built = self.build(&wish).built().clone();
        (wish.prefix, built)
    }

    /// Runs the activation scripts of an environment.
    #[track_caller]
    pub(crate) fn activate(&self, prefix: &Path) -> Activation {
        let told = self.start(&Task::Activate { prefix: prefix.to_owned() }).finish();
        match told.events.last() {
            Some(EngineEvent::Activated(activation)) => activation.clone(),
            other => panic!("it was not activated: {other:#?}"),
        }
    }

    /// Sweeps the cache; how many bytes came free.
    #[track_caller]
    pub(crate) fn sweep(&self, unused_for_s: u64) -> u64 {
        let told = self.start(&Task::Sweep(Sweep { cache: self.cache.clone(), unused_for_s })).finish();
        let Some(EngineEvent::Swept { freed }) = told.events.last() else {
            panic!("it was not swept: {told:?}")
        };
        *freed
    }

    /// The file of credentials of this room, with these for the servers of the tests.
    pub(crate) fn credentials(&self, server: &Server, json: &str) -> PathBuf {
        let path = self.home.join("credentials.json");
        fs::write(&path, format!("{{\"127.0.0.1:{0}\": {json}, \"127.0.0.1\": {json}}}", server.port()))
            .expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
        path
    }
}

/// A channel without mirrors.
pub(crate) fn from(name: &str, url: &str) -> Channel {
    Channel { name: name.to_owned(), url: url.to_owned(), mirrors: Vec::new() }
}

/// The address of a channel of the smallest tier, without a server.
pub(crate) fn tiny(name: &str) -> String {
    channel::Channel::t0().file_url(name)
}

/// A server of the smallest tier.
pub(crate) fn server() -> Server {
    Server::start(channel::Channel::t0())
}

/// An engine at work.
#[derive(Debug)]
pub(crate) struct Running {
    process: Child,
    told: Mutex<Receiver<String>>,
    complaints: Option<std::thread::JoinHandle<String>>,
    events: Vec<EngineEvent>,
    begun: Instant,
}

impl Running {
    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Whether it still works.
    pub(crate) fn at_work(&mut self) -> bool {
        self.process.try_wait().expect("its own child").is_none()
    }

    /// Ends it as a crash would; `false` when it had ended by itself.
    pub(crate) fn kill(mut self) -> bool {
        let struck = self.at_work();
        let _ = self.process.kill();
        let _ = self.process.wait();
        struck
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Told {
        let status = self.end();
        let mut complaints = String::new();
        if let Some(thread) = self.complaints.take() {
            complaints = thread.join().expect("a text");
        }
        let mut events = std::mem::take(&mut self.events);
        let lines =
            std::mem::replace(&mut self.told, Mutex::new(channel().1)).into_inner().expect("no panic");
        for line in lines.iter() {
            let event = serde_json::from_str(&line);
            events.push(event.unwrap_or_else(|error| panic!("not an event ({error}): {line}")));
        }
        let told = Told { events, complaints, status, took: self.begun.elapsed() };
        told.keeps_the_protocol();
        told
    }

    #[track_caller]
    fn end(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.process.try_wait().expect("its own child") {
                return status;
            }
            if self.begun.elapsed() > PATIENCE {
                let _ = self.process.kill();
                panic!("the engine did not end within {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What an engine told.
#[derive(Debug)]
pub(crate) struct Told {
    /// Line by line.
    pub(crate) events: Vec<EngineEvent>,
    /// Its standard error.
    pub(crate) complaints: String,
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// How long it took.
    pub(crate) took: Duration,
}

impl Told {
    /// The last event, and it alone, is the outcome; the exit status repeats it; no secret is told.
    #[track_caller]
    fn keeps_the_protocol(&self) {
        let ends =
            |event: &&EngineEvent| !matches!(event, EngineEvent::Progress(_) | EngineEvent::Say { .. });
        let outcomes = self.events.iter().filter(ends).count();
        let last = self.events.last().is_some_and(|event| ends(&event));
        assert!(outcomes == 1 && last, "no outcome as the last event: {self:#?}");
        let failed = matches!(self.events.last(), Some(EngineEvent::Failed(_)));
        assert_eq!(self.status.success(), !failed, "the exit status says something else: {self:#?}");
        assert!(!self.complaints.contains("panicked at"), "the engine panicked: {}", self.complaints);
        let text = format!("{:?}", self);
        for secret in SECRETS {
            assert!(!text.contains(secret), "`{secret}` was told: {text}");
        }
    }

    /// The environment that was made.
    #[track_caller]
    pub(crate) fn built(&self) -> &Built {
        match self.events.last() {
            Some(EngineEvent::Built(built)) => built,
            other => panic!("it was not built: {other:#?}\n{}", self.complaints),
        }
    }

    /// The failure, which must be one of these kinds and must say something.
    #[track_caller]
    pub(crate) fn failed(&self, kinds: &[FailureKind]) -> &Failure {
        let Some(EngineEvent::Failed(failure)) = self.events.last() else {
            panic!("it should have failed: {:#?}", self.events.last())
        };
        assert!(kinds.contains(&failure.kind), "not one of {kinds:?}: {failure:#?}");
        assert!(!failure.message.trim().is_empty(), "it says nothing: {failure:#?}");
        failure
    }

    /// What it said for the build log.
    pub(crate) fn said(&self) -> String {
        let lines = self.events.iter().filter_map(|event| match event {
            EngineEvent::Say { line } => Some(line.as_str()),
            _ => None,
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// Every file below a directory by relative path; links are named, not followed.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    fn walk(top: &Path, dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                walk(top, &path, found);
            } else {
                found.push(path.strip_prefix(top).expect("below the top").to_owned());
            }
        }
    }
    let mut found = Vec::new();
    walk(dir, dir, &mut found);
    found.sort();
    found
}

/// The files below a directory that hold these bytes.
pub(crate) fn holding(dir: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let holds = |path: &PathBuf| {
        let path = dir.join(path);
        !path.is_symlink()
            && fs::read(path).is_ok_and(|text| text.windows(bytes.len()).any(|part| part == bytes))
    };
    files(dir).into_iter().filter(holds).collect()
}

/// The text of a file of an environment.
#[track_caller]
pub(crate) fn text(prefix: &Path, path: &str) -> String {
    fs::read_to_string(prefix.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}
