//! The machines that a document means: agentd is installed there, `ada` is an operator, and paths are as written.
//!
//! Owns their files and daemons. Hides how several machines are on one: every process of one runs in a mount namespace in
//! which the directories of that machine are `/etc`, `/home`, `/run` and `/var/lib`, and has its host name. All machines
//! share the network, in which `controller` and `controller.lab` are the one with that name. Needs root.
//!
//! Invariant: nothing is written outside the temporary directory of the machines, and no daemon outlives them.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use agent_tests::channel::{Channel, Server};
use agent_tests::fleet::{Daemon, processes_below};
use agent_tests::{Ran, SOON, binaries, engine, eventually, finish, root, signal};
use rustix::process::Signal;

/// Where the programs are on a machine, which everybody may run.
const PROGRAMS: &str = "/var/lib/programs";

/// Runs a program on a machine. The first words are the directory of the machine, its name, and where the programs are.
const ENTER: &str = r#"set -e
top=$1 name=$2
hostname "$name"
mount --bind "$3" "$top/lib/programs"
for dir in etc home run; do mount --bind "$top/$dir" "/$dir"; done
mount --rbind "$top/lib" /var/lib
shift 3
exec "$@""#;

/// What a package, and whoever looks after the machine, did before the document begins.
const SETUP: &str = "set -e
echo '127.0.0.1 controller controller.lab' >>/etc/hosts
useradd --system agentd
groupadd --system agentd-admin
groupadd --system --force docker
useradd --create-home --shell /bin/bash --groups agentd,agentd-admin ada
cp -r /var/lib/project ~ada/work
chown -R ada: ~ada";

/// The machines of one document.
pub(super) struct Machines {
    home: tempfile::TempDir,
    port: u16,
    machines: BTreeMap<String, Machine>,
    channel: Option<Server>,
    files: Vec<(&'static str, &'static str)>,
    listens: bool,
}

struct Machine {
    top: PathBuf,
    daemon: Daemon,
}

impl Machines {
    /// None yet; each will have these files where `ada` works. The controller listens, unless the document has to say
    /// that it does.
    pub(super) fn new(files: &[(&'static str, &'static str)], listens: bool) -> Machines {
        let home = tempfile::Builder::new().prefix("documents-").tempdir().unwrap();
        fs::set_permissions(home.path(), Permissions::from_mode(0o755)).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Machines { home, port, machines: BTreeMap::new(), channel: None, files: files.to_vec(), listens }
    }

    /// The port of the controller.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Has machines made from now on find packages in a channel, and make environments of them.
    pub(super) fn have_packages(&mut self) {
        engine();
        self.channel = Some(Server::start(Channel::t0()));
    }

    /// Makes a machine, unless it is there. All but a laptop run the daemon.
    fn make(&mut self, name: &str) {
        if self.machines.contains_key(name) {
            return;
        }
        let top = self.home.path().join(name);
        for dir in ["home", "run", "lib/programs", "lib/project"] {
            fs::create_dir_all(top.join(dir)).unwrap();
        }
        copy_etc(&top.join("etc"));
        let mut config = fs::read_to_string(root().join("packaging/deb/agentd.yaml")).unwrap();
        if self.listens && name == "controller" {
            config.push_str(&format!("listen: 0.0.0.0:{}\n", self.port));
        }
        if let Some(channel) = &self.channel {
            config.push_str(&format!("conda_alias: {}\n", channel.alias()));
        }
        fs::write(top.join("etc/agentd/agentd.yaml"), config).unwrap();
        for (path, text) in &self.files {
            let path = top.join("lib/project").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        // What a test passes to the daemon is dropped: the service has no arguments.
        let starter = words(&top, name).into_iter().chain(["sh", "-c", "exec agentd run"].map(str::to_owned));
        let daemon = Daemon::new(top.join("daemon"), String::new()).started_by(starter.collect());
        let machine = Machine { top, daemon };
        self.machines.insert(name.to_owned(), machine);
        self.type_at(name, true, SETUP, "").ok();
        if name != "laptop" {
            self.start(name);
        }
    }

    /// Types lines into a shell of `ada`, or of root, where `ada` works; `input` is what is asked for then.
    #[allow(clippy::disallowed_methods, reason = "types what it tests")]
    pub(super) fn type_at(&mut self, name: &str, is_root: bool, lines: &str, input: &str) -> Ran {
        self.make(name);
        let mut whole = words(&self.machines[name].top, name);
        if !is_root {
            whole.extend(["setpriv", "--reuid=ada", "--regid=ada", "--init-groups"].map(str::to_owned));
        }
        // As with sudo, which leaves them as they are.
        let setting = format!("export USER=ada HOME=/home/ada; cd ~/work 2>/dev/null\n{lines}");
        whole.extend(["bash".to_owned(), "-c".to_owned(), setting]);
        let typed = self.home.path().join("input");
        fs::write(&typed, input).unwrap();
        let mut command = Command::new(&whole[0]);
        finish(command.args(&whole[1..]).stdin(fs::File::open(typed).unwrap()))
    }

    /// What systemd does for the service, where there is systemd.
    pub(super) fn systemctl(&mut self, name: &str, verb: &str) {
        self.make(name);
        if verb != "start" {
            self.machines.get_mut(name).unwrap().daemon.stop();
        }
        if verb != "stop" {
            self.start(name);
        }
    }

    /// Starts the daemon, and waits until its machine can run jobs: its controller says so.
    fn start(&mut self, name: &str) {
        self.machines.get_mut(name).unwrap().daemon.spawn();
        let joined = self.machines[name].top.join("lib/agentd/identity.json").exists();
        let controller = if joined { "controller" } else { name };
        eventually(&format!("{name} is ready"), SOON, || {
            let asked = self.type_at(controller, true, "agentctl nodes --json", "");
            let nodes: serde_json::Value = serde_json::from_str(&asked.stdout).ok()?;
            let is_ready = |node: &serde_json::Value| node["node"] == name && node["liveness"] == "ready";
            nodes["nodes"].as_array()?.iter().any(is_ready).then_some(())
        });
    }

    /// What the daemons said, for whoever looks at a failed test.
    pub(super) fn logs(&self) -> String {
        let log = |(name, machine): (&String, &Machine)| format!("--- {name}\n{}", machine.daemon.log());
        self.machines.iter().map(log).collect()
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        self.machines.values_mut().for_each(|machine| machine.daemon.kill());
        processes_below(self.home.path()).into_iter().for_each(|pid| signal(pid, Signal::KILL));
    }
}

/// The words that run what follows them on a machine, with nothing of the environment of the tests.
fn words(top: &Path, name: &str) -> Vec<String> {
    let path = format!("PATH={PROGRAMS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    let (top, programs) = (top.display().to_string(), binaries().display().to_string());
    let own = format!("XDG_RUNTIME_DIR={top}");
    let env = ["env", "-i", "LANG=C.UTF-8", "NO_COLOR=1", &path, &own];
    let words = ["unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", &top, name, &programs];
    env.into_iter().chain(words).map(str::to_owned).collect()
}

/// Gives a machine what is in `/etc` here, and what the package puts there.
#[allow(clippy::disallowed_methods, reason = "prepares the machines of the test")]
fn copy_etc(to: &Path) {
    let copied = Command::new("cp").args(["-a", "/etc"]).arg(to).status().unwrap();
    assert!(copied.success());
    fs::create_dir_all(to.join("agentd")).unwrap();
}
