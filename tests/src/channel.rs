//! Conda channels made on the spot, and servers of them that can be as bad as a test wants.
//!
//! Owns where the channels of the tests are and when they are made: once for a target directory and an
//! interpreter, by `tests/channel/make.py`, whichever process comes first. Nothing here knows what is in them;
//! `tests/channel/tiny.py` and `make.py` say that. A [`Server`] is `tests/channel/serve.py`, whose head lists the
//! modes; it ends with the value.

#![allow(clippy::disallowed_methods, reason = "runs what tests are made with")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use crate::python;

/// A directory of channels.
#[derive(Debug, Clone)]
pub struct Channel {
    dir: PathBuf,
    python: String,
    portable: bool,
}

impl Channel {
    /// Packages of a few bytes, one for each thing that packages do; its Python is a shell script.
    pub fn t0() -> &'static Channel {
        static MADE: OnceLock<Channel> = OnceLock::new();
        MADE.get_or_init(|| make("T0"))
    }

    /// A real Python with pip and some packages of one module.
    pub fn t1() -> &'static Channel {
        static MADE: OnceLock<Channel> = OnceLock::new();
        MADE.get_or_init(|| make("T1"))
    }

    /// What [`Channel::t1`] has, and scikit-learn with what it needs.
    pub fn t2() -> &'static Channel {
        static MADE: OnceLock<Channel> = OnceLock::new();
        MADE.get_or_init(|| make("T2"))
    }

    /// Where the channels are: one directory each, usually `main` alone.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The address of one of them without a server.
    pub fn file_url(&self, name: &str) -> String {
        format!("file://{}/{name}", self.dir.display())
    }

    /// The version of its newest Python.
    pub fn python(&self) -> &str {
        &self.python
    }

    /// Whether its Python brings all it needs, so that it works in another root as well.
    pub fn portable(&self) -> bool {
        self.portable
    }

    /// Wheels for pip to find; the false Python has none.
    pub fn wheels(&self) -> PathBuf {
        self.dir.join("wheels")
    }

    /// A copy that a test may change.
    pub fn copy(&self, to: &Path) -> Channel {
        crate::copy_tree(&self.dir, to);
        Channel { dir: to.to_owned(), ..self.clone() }
    }
}

/// A channel behind HTTP.
#[derive(Debug)]
pub struct Server {
    process: Child,
    port: u16,
}

impl Server {
    /// Serves these channels on a port that is free.
    pub fn start(channel: &Channel) -> Server {
        Server::serve(channel, None)
    }

    /// Serves them where another server was.
    pub fn start_at(channel: &Channel, port: u16) -> Server {
        Server::serve(channel, Some(port))
    }

    fn serve(channel: &Channel, port: Option<u16>) -> Server {
        let mut command = python::command(&tools());
        command.arg(sources().join("serve.py")).arg(channel.dir());
        command.args(port.map(|port| port.to_string()));
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the server starts");
        let mut line = String::new();
        let stdout = process.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("the server talks");
        let port = line.trim().parse().expect("the server says its port first; its complaint is above");
        Server { process, port }
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The address of the channel `main`, served in a mode.
    pub fn url(&self, mode: &str) -> String {
        self.url_of(mode, "main")
    }

    /// What channels are below: an address at which this can be told how to serve, see [`Server::set`].
    pub fn alias(&self) -> String {
        format!("http://127.0.0.1:{}/told", self.port)
    }

    /// The address of a channel, served in a mode.
    pub fn url_of(&self, mode: &str, channel: &str) -> String {
        format!("http://127.0.0.1:{}/{mode}/{channel}", self.port)
    }

    /// How often each path was asked for.
    pub fn all_requests(&self) -> BTreeMap<String, u64> {
        let told: Value = serde_json::from_str(&self.ask("GET", "requests")).expect("JSON");
        let counts = told.as_object().expect("counts").iter();
        counts.map(|(path, count)| (path.clone(), count.as_u64().unwrap_or_default())).collect()
    }

    /// How often paths that hold this text were asked for.
    pub fn requests(&self, part: &str) -> u64 {
        self.all_requests().iter().filter(|(path, _)| path.contains(part)).map(|(_, count)| count).sum()
    }

    /// How many answers have stopped half-way.
    pub fn stalled(&self) -> u64 {
        self.ask("GET", "stalled").trim().parse().expect("a number")
    }

    /// Lets answers that have stopped go on; none stops from now on.
    pub fn release(&self) {
        self.ask("POST", "release");
    }

    /// Lets answers stop again.
    pub fn hold(&self) {
        self.ask("POST", "hold");
    }

    /// Forgets what was asked for.
    pub fn clear(&self) {
        self.ask("POST", "clear");
    }

    /// Serves what is asked for in the mode `told` in this mode from now on.
    pub fn set(&self, mode: &str) {
        self.ask("POST", &format!("mode/{mode}"));
    }

    fn ask(&self, method: &str, what: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
        write!(
            stream,
            "{method} /control/{what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        .expect("the server listens");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the server answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        assert!(head.starts_with("HTTP/1.1 20"), "{method} {what}: {head}");
        body.to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The conda engine: the one named by `AGENT_ENV_BIN`, or that of this workspace.
pub fn engine() -> PathBuf {
    std::env::var_os("AGENT_ENV_BIN").map_or_else(|| crate::engine().to_owned(), PathBuf::from)
}

/// Where the programs that make and serve channels are.
fn sources() -> PathBuf {
    crate::root().join("tests/channel")
}

/// Where channels are kept: beside what cargo builds.
fn kept() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| {
        let dir = crate::profile_dir().with_file_name("channels");
        fs::create_dir_all(&dir).expect("a directory");
        dir
    })
}

/// Makes a tier, unless it is there.
fn make(tier: &str) -> Channel {
    let tools = tools();
    let dir = kept().join(format!("{tier}-{}", tools.file_name().expect("a name").display()));
    {
        let _alone = alone(tier);
        let mut command = python::command(&tools);
        command.arg(sources().join("make.py")).args(["--tier", tier, "--out"]).arg(&dir);
        let made = command.stdin(Stdio::null()).status().expect("Python starts");
        assert!(made.success(), "the channel {tier} cannot be made; make.py said why");
    }
    let told = fs::read_to_string(dir.join("channel.json")).expect("make.py writes it last");
    let told: Value = serde_json::from_str(&told).expect("JSON");
    Channel {
        python: told["python"].as_str().expect("a version").to_owned(),
        portable: told["patched"] == false,
        dir,
    }
}

/// A Python with what the programs of the channels need, made once for the first `python3` on the path.
fn tools() -> PathBuf {
    const DESCRIBE: &str = "import sys; print('%d.%d.%d' % sys.version_info[:3], sys.base_prefix); \
                            sys.exit(sys.version_info < (3, 10))";
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let said = Command::new("python3").args(["-c", DESCRIBE]).output();
        let said = said.expect("the channels of the tests need Python: install python3, 3.10 or later");
        let described = String::from_utf8_lossy(&said.stdout).replace(['/', ' ', '\n'], "_");
        assert!(said.status.success(), "python3 is {described}, too old: put one from 3.10 on first on PATH");
        let dir = kept().join(format!("python-{}", described.trim_matches('_')));
        let _alone = alone("python");
        python::make(&dir, "zstandard", &[&["zstandard"]]);
        dir
    });
    made.clone()
}

/// Keeps other test programs out until it is dropped.
fn alone(what: &str) -> File {
    let lock = File::create(kept().join(format!("{what}.lock"))).expect("a lock file");
    lock.lock().expect("a lock");
    lock
}
