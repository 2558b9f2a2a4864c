//! A controller on one host, and on others machines that have a root file system and an SSH server of their own.
//!
//! Such a root lies over that of this machine and is thrown away; what was written to it can be listed, and so it can be
//! seen what attach makes and what detach leaves. Nothing of a bed outlives it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use agent_tests::fleet::Daemon;
use agent_tests::hosts::{Hosts, address};
use agent_tests::{Ran, SOON, binaries, eventually, finish};

/// Gives a machine its root: where, of which size, called what, and what makes it ready.
const ENTER: &str = r#"set -e
root=$1 size=$2 prepare=$3
mount -t tmpfs -o "size=$size" tmpfs "$root"
mkdir "$root/upper" "$root/work" "$root/all"
mount -t overlay overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" "$root/all"
cd "$root/all"
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
for volatile in run tmp var/tmp; do mount -t tmpfs -o mode=1777 tmpfs $volatile; done
exec chroot . sh -c "$prepare"
"#;

/// A machine with nothing on it: the users root and ada, whose password is `secret`, and keys of its own.
const PREPARE: &str = r#"set -e
chmod 755 /run
mkdir -p /run/sshd /run/lock
rm -rf /var/lib/agentd* /usr/local/lib/agentd /usr/local/bin/agent* /root/.ssh /etc/ssh/ssh_host_* /etc/sudoers.d/*
rm -f /usr/bin/agentd
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
useradd -m -s /bin/bash ada
echo ada:secret | chpasswd
for home in /root /home/ada; do
    mkdir -p $home/.ssh
    echo "$KEY" >$home/.ssh/authorized_keys
    chmod 700 $home/.ssh
done
chown -R ada: /home/ada
"#;

const SERVE: &str = "exec /usr/sbin/sshd -D -e -o PermitRootLogin=yes -o StrictModes=no";

/// Port of the controller.
pub(crate) const PORT: u16 = 7443;

/// The package that all rows install: the programs under test, without what only a debugger reads.
#[allow(clippy::disallowed_methods, reason = "makes what it tests")]
pub(crate) fn package() -> &'static Path {
    static MADE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, file) = MADE.get_or_init(|| {
        let home = tempfile::tempdir().expect("a directory");
        let bin = home.path().join("bin");
        fs::create_dir(&bin).expect("a directory");
        for name in ["agentd", "agentctl", "agent-shim"] {
            let mut strip = Command::new("strip");
            strip.arg("-o").arg(bin.join(name)).arg(binaries().join(name));
            finish(&mut strip).ok();
        }
        let file = home.path().join("agentd.tar.gz");
        let mut tar = Command::new("tar");
        finish(tar.arg("-C").arg(home.path()).arg("-czf").arg(&file).arg("bin")).ok();
        (home, file)
    });
    file
}

/// What is special about a machine.
#[derive(Default)]
pub(crate) struct Special {
    /// Shell, before its SSH server starts.
    pub(crate) prepare: &'static str,
    /// Options of its SSH server.
    pub(crate) sshd: &'static str,
    /// Of its root, for example `2g`.
    pub(crate) size: Option<&'static str>,
}

/// A machine, until it is dropped.
pub(crate) struct Machine {
    child: Child,
    root: PathBuf,
    log: PathBuf,
}

pub(crate) struct Bed {
    pub(crate) machines: Vec<Machine>,
    pub(crate) controller: Daemon,
    hosts: Hosts,
    home: tempfile::TempDir,
}

impl Bed {
    /// A controller, and a machine for each of these.
    pub(crate) fn new(machines: &[Special]) -> Bed {
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
        for machine in &bed.machines {
            eventually("the SSH server listens", SOON, || {
                let log = fs::read_to_string(&machine.log).unwrap_or_default();
                log.contains("Server listening").then_some(())
            });
        }
        bed
    }

    /// One machine that is as usual.
    pub(crate) fn plain() -> Bed {
        Bed::new(&[Special::default()])
    }

    #[allow(clippy::disallowed_methods, reason = "runs what the tests need")]
    fn machine(&self, index: usize, special: &Special) -> Machine {
        let root = self.home.path().join(format!("m{index}"));
        fs::create_dir(&root).expect("a directory");
        let log = self.home.path().join(format!("m{index}.log"));
        let prepare = format!("{PREPARE}{}\n{SERVE} {}", special.prepare, special.sshd);
        let words = self.hosts.on(index);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]);
        command.args(["sh", "-c", ENTER, "sh"]).arg(&root).arg(special.size.unwrap_or("2g")).arg(prepare);
        command.env("KEY", self.public_key()).env("HOME", "/root").env_remove("XDG_DATA_HOME");
        let file = File::create(&log).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        Machine { child: command.spawn().expect("unshare"), root, log }
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
    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let starter = self.hosts.on(0);
        let mut command = Command::new(&starter[0]);
        command.args(&starter[1..]).arg(binaries().join("agentctl")).args(words);
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

impl Machine {
    /// Runs a shell command there.
    #[allow(clippy::disallowed_methods, reason = "looks at what it tests")]
    pub(crate) fn sh(&self, script: &str) -> Ran {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.init()))
            .args(["--mount", "--pid", "--net", "--root", "--wd"]);
        finish(command.args(["sh", "-c", script]))
    }

    /// What was written to its root: files, and directories that this machine has not. Logs and the record of logins
    /// are the SSH server's.
    pub(crate) fn written(&self) -> BTreeSet<String> {
        let upper = self.root.join("upper");
        let script = format!(
            "cd {} && find . ! -type d -printf '%P %y %m %s\\n' && find . -mindepth 1 -type d -printf '%P\\n' | \
             while read -r dir; do [ -d \"/$dir\" ] || echo \"$dir\"; done",
            upper.display()
        );
        let listed = self.outside(&script).ok().stdout;
        let is_ours = |line: &&str| {
            let others = [
                "var/log/",
                "root/.pyenv",
                "var/lib/sudo",
                "run/",
                "var/cache/",
                "root/.cache",
                "root/.bash_history",
            ];
            !others.iter().any(|other| line.starts_with(other))
        };
        listed.lines().filter(is_ours).map(str::to_owned).collect()
    }

    /// In its mount namespace, but not below its root.
    #[allow(clippy::disallowed_methods, reason = "looks at what it tests")]
    fn outside(&self, script: &str) -> Ran {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.init()));
        finish(command.args(["sh", "-c", script]))
    }

    /// Its first process: what was started became `unshare`, whose one child that is.
    fn init(&self) -> u32 {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        children.split_whitespace().next().and_then(|child| child.parse().ok()).expect("the machine runs")
    }

    /// A file of its root, as seen from here.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init()))
    }

    /// The programs of the agent that run there, by path.
    pub(crate) fn agents(&self) -> String {
        self.sh("for at in /proc/[0-9]*; do readlink $at/exe; done 2>/dev/null | grep /agentd/ || true")
            .stdout
    }

    /// The daemons that run there, by process; the supervisor of a job that has just ended may still be ending.
    pub(crate) fn daemons(&self) -> String {
        self.sh("for at in /proc/[0-9]*; do case $(readlink $at/exe) in */agentd/*/agentd) echo $at;; esac; done 2>/dev/null")
            .stdout
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.controller.kill();
        self.machines.clear();
        // Mounts of a namespace go with its last process, which may take a moment.
        std::thread::sleep(Duration::from_millis(200));
    }
}
