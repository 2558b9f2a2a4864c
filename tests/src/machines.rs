//! Machines that have a root file system and an SSH server of their own.
//!
//! Such a root lies over that of this machine and is thrown away; what was written to it can be listed. Files of this
//! machine are there, but for agentd and what ever ran as it. Needs root; nothing of a machine outlives it.

#![allow(clippy::disallowed_methods, reason = "runs what tests are made with")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::{Ran, SOON, binaries, eventually, finish};

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

/// A package to be installed there: the programs under test, without what only a debugger reads.
pub fn package() -> &'static Path {
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
#[derive(Debug, Default)]
pub struct Special<'a> {
    /// Shell, before its SSH server starts.
    pub prepare: &'a str,
    /// Options of its SSH server.
    pub sshd: &'a str,
    /// Of its root, for example `2g`.
    pub size: Option<&'a str>,
}

/// A machine, until it is dropped.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    root: PathBuf,
    log: PathBuf,
}

impl Machine {
    /// Starts one with its root at this place, where these words start it; it lets in whoever has the key.
    pub fn start(starter: &[String], root: PathBuf, special: &Special<'_>, key: &str) -> Machine {
        fs::create_dir(&root).expect("a directory");
        let log = root.with_extension("log");
        let prepare = format!("{PREPARE}{}\n{SERVE} {}", special.prepare, special.sshd);
        let unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"];
        let words: Vec<&str> = starter.iter().map(String::as_str).chain(unshare).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        command.args(["sh", "-c", ENTER, "sh"]).arg(&root).arg(special.size.unwrap_or("2g")).arg(prepare);
        command.env("KEY", key).env("HOME", "/root").env_remove("XDG_DATA_HOME");
        let file = File::create(&log).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        Machine { child: command.spawn().expect("unshare"), root, log }
    }

    /// Waits until its SSH server listens.
    pub fn listens(&self) {
        eventually("the SSH server listens", SOON, || {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            log.contains("Server listening").then_some(())
        });
    }

    /// Runs a shell command there.
    pub fn sh(&self, script: &str) -> Ran {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.init()))
            .args(["--mount", "--pid", "--net", "--root", "--wd"]);
        finish(command.args(["sh", "-c", script]))
    }

    /// What was written to its root: files, and directories that this machine has not. Logs and the record of logins
    /// are the SSH server's.
    pub fn written(&self) -> BTreeSet<String> {
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
    pub fn file(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init()))
    }

    /// The programs of the agent that run there, by path.
    pub fn agents(&self) -> String {
        self.sh("for at in /proc/[0-9]*; do readlink $at/exe; done 2>/dev/null | grep /agentd/ || true")
            .stdout
    }

    /// The daemons that run there, by process; the supervisor of a job that has just ended may still be ending.
    pub fn daemons(&self) -> String {
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
