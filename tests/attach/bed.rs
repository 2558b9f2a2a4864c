//! A controller on one host, and on others machines that have a root file system and an SSH server of their own.
//!
//! Such a root lies over that of this machine and is thrown away; what was written to it can be listed, and so it can be
//! seen what attach makes and what detach leaves. Nothing of a bed outlives it.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use agent_tests::fleet::Daemon;
use agent_tests::hosts::{Hosts, address};
pub(crate) use agent_tests::machines::{Machine, Special, package};
use agent_tests::{Ran, SOON, binaries, eventually, finish};

/// Port of the controller.
pub(crate) const PORT: u16 = 7443;

pub(crate) struct Bed {
    pub(crate) machines: Vec<Machine>,
    pub(crate) controller: Daemon,
    pub(crate) hosts: Hosts,
    home: tempfile::TempDir,
}

impl Bed {
    /// A controller, and a machine for each of these.
    pub(crate) fn new(machines: &[Special<'_>]) -> Bed {
        let home = tempfile::Builder::new().prefix("attach-").tempdir().expect("a directory");
        let hosts = Hosts::new(machines.len() + 1);
        let config = format!("roles: controller\nlisten: 0.0.0.0:{PORT}\ndisk_reserve: 64MiB\n");
        let mut controller = Daemon::new(home.path().join("c"), config).started_by(hosts.on(0));
        controller.spawn();
        let mut bed = Bed { machines: Vec::new(), controller, hosts, home };
        fs::create_dir_all(bed.home.path().join("user/.ssh")).expect("a directory");
        bed.keygen("key", "");
        for (index, special) in machines.iter().enumerate() {
            let machine = bed.machine(index + 1, special);
            bed.machines.push(machine);
        }
        eventually("the controller answers", SOON, || (bed.ctl(&["nodes"]).code == 0).then_some(()));
        bed.machines.iter().for_each(Machine::listens);
        bed
    }

    /// One machine that is as usual.
    pub(crate) fn plain() -> Bed {
        Bed::new(&[Special::default()])
    }

    fn machine(&self, index: usize, special: &Special<'_>) -> Machine {
        let root = self.home.path().join(format!("m{index}"));
        Machine::start(&self.hosts.on(index), root, special, &self.public_key())
    }

    /// Makes a key of the user, with a passphrase or none.
    #[allow(clippy::disallowed_methods, reason = "makes what the tests need")]
    pub(crate) fn keygen(&self, name: &str, passphrase: &str) {
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-t", "ed25519", "-N", passphrase, "-f"]).arg(self.path(name));
        finish(&mut command).ok();
    }

    fn public_key(&self) -> String {
        fs::read_to_string(self.path("key.pub")).expect("a key").trim().to_owned()
    }

    /// A file of the user.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.home.path().join("user").join(name)
    }

    /// `agentctl` of the user, on the controller's host.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.on(0, binaries().join("agentctl"));
        command.args(words);
        command.env("HOME", self.home.path().join("user")).env("NO_COLOR", "1");
        command.env("AGENTD_SOCKET", self.controller.socket());
        for name in
            ["SSH_AUTH_SOCK", "AGENTCTL_CONTEXT", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"]
        {
            command.env_remove(name);
        }
        // A terminal of whoever runs the tests is not to be asked.
        command.stdin(Stdio::null());
        command
    }

    /// A program on a host.
    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    pub(crate) fn on(&self, index: usize, program: impl AsRef<OsStr>) -> Command {
        let starter = self.hosts.on(index);
        let mut command = Command::new(&starter[0]);
        command.args(&starter[1..]).arg(program);
        command
    }

    pub(crate) fn ctl(&self, words: &[&str]) -> Ran {
        finish(&mut self.command(words))
    }

    /// What attaching a machine takes.
    pub(crate) fn attaching(&self, place: &str, more: &[&str]) -> Command {
        let mut command = self.command(&["attach", place, "--package"]);
        command.arg(package());
        if !more.contains(&"--controller") {
            command.args(["--controller", &controller()]);
        }
        if !more.contains(&"--password-stdin") {
            command.arg("--key").arg(self.path("key"));
        }
        command.args(more);
        command
    }

    pub(crate) fn attach(&self, place: &str, more: &[&str]) -> Ran {
        finish(&mut self.attaching(place, more))
    }

    pub(crate) fn detach(&self, place: &str, more: &[&str]) -> Ran {
        let mut command = self.command(&["detach", place, "--controller", &controller()]);
        finish(command.arg("--key").arg(self.path("key")).args(more))
    }

    /// Makes ada a user of the controller, and logs her in.
    pub(crate) fn log_in(&self) {
        let code = self.ctl(&["user", "add", "ada"]).ok().stdout;
        told(self.command(&["login", &controller()]), &code).ok();
        fs::create_dir_all(self.path("code")).expect("a directory");
    }

    /// `agentctl run` of ada, who is logged in.
    pub(crate) fn run(&self, script: &str) -> Command {
        let mut run = self.command(&["--context", "10.77.0.2", "run", "--", "sh", "-c", script]);
        run.env_remove("AGENTD_SOCKET").current_dir(self.path("code"));
        run
    }

    /// The nodes that are ready.
    pub(crate) fn ready(&self) -> Vec<String> {
        let nodes = self.ctl(&["nodes", "--json"]).ok().json();
        let nodes = nodes["nodes"].as_array().cloned().unwrap_or_default();
        let ready =
            nodes.into_iter().filter(|node| node["liveness"] == "ready" || node["liveness"] == "degraded");
        ready.filter_map(|node| Some(node["node"].as_str()?.to_owned())).collect()
    }
}

/// A place for a command line to be given by standard input.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
pub(crate) fn told(mut command: Command, text: &str) -> Ran {
    let mut file = tempfile::tempfile().expect("a file");
    std::io::Write::write_all(&mut file, text.as_bytes()).expect("a file");
    std::io::Seek::rewind(&mut file).expect("a file");
    finish(command.stdin(file))
}

/// The controller as machines know it.
pub(crate) fn controller() -> String {
    format!("https://{}:{PORT}", address(0))
}

/// Where a machine is.
pub(crate) fn place(user: &str, index: usize) -> String {
    format!("{user}@{}", address(index))
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.controller.kill();
        self.machines.clear();
        // Mounts of a namespace go with its last process, which may take a moment.
        std::thread::sleep(Duration::from_millis(200));
    }
}
