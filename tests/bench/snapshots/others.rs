//! The other sides: git, rsync with a daemon of its own, and a relay that counts.

#![allow(clippy::disallowed_methods, reason = "the other side of the ratio")]

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_tests::{SOON, eventually};

/// Bytes of the file system for clones.
const XFS: u64 = 4 << 30;

/// A repository beside the tree it is of, so that nobody else sees it.
pub(super) struct Git {
    tree: PathBuf,
    repository: PathBuf,
}

impl Git {
    pub(super) fn new(tree: &Path, repository: &Path) -> Git {
        let git = Git { tree: tree.to_owned(), repository: repository.to_owned() };
        crate::measure::time(git.command(&["init", "--quiet"]));
        git
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("git");
        command.arg("--git-dir").arg(&self.repository).arg("--work-tree").arg(&self.tree);
        // Packing in the background would be counted in whatever is measured next.
        command.args(["-c", "gc.auto=0", "-c", "maintenance.auto=false"]);
        command.args(["-c", "user.name=bench", "-c", "user.email=bench@localhost"]).args(words);
        command.current_dir(&self.tree).stdin(Stdio::null());
        command
    }

    pub(super) fn status(&self) -> Command {
        self.command(&["status", "--porcelain"])
    }

    /// Everything that changed, as a commit.
    pub(super) fn commit(&self) -> Command {
        let words = ["-c", "alias.keep=!git add -A && git commit --quiet --allow-empty -m x", "keep"];
        self.command(&words)
    }
}

/// A daemon that serves everything below a directory.
pub(super) struct Rsync {
    daemon: Child,
    base: PathBuf,
    port: u16,
}

impl Rsync {
    pub(super) fn start(base: &Path) -> Rsync {
        let config = base.join("rsyncd.conf");
        let text = "use chroot = no\nuid = 0\ngid = 0\n[base]\nread only = no\npath = ";
        fs::write(&config, format!("{text}{}\n", base.display())).expect("a file");
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
        let port = free.expect("a port").port();
        let mut command = Command::new("rsync");
        command.args(["--daemon", "--no-detach", "--address=127.0.0.1"]).arg(format!("--port={port}"));
        command.arg(format!("--config={}", config.display())).stdin(Stdio::null()).stderr(Stdio::null());
        let daemon = command.spawn().expect("rsync is installed");
        eventually("the daemon listens", SOON, || TcpStream::connect(("127.0.0.1", port)).ok());
        Rsync { daemon, base: base.to_owned(), port }
    }

    fn served(&self, dir: &Path) -> String {
        let below = dir.strip_prefix(&self.base).expect("it is served");
        format!("rsync://127.0.0.1:{}/base/{}/", self.port, below.display())
    }

    fn copy(from: String, to: String) -> Command {
        let mut command = Command::new("rsync");
        command.args(["-a", "--delete"]).args([from, to]).stdin(Stdio::null());
        command
    }

    /// To a copy named `to` beside the tree.
    pub(super) fn local(&self, tree: &Path, to: &str) -> Command {
        Rsync::copy(format!("{}/", tree.display()), format!("{}/", self.base.join(to).display()))
    }

    pub(super) fn push(&self, tree: &Path, to: &Path) -> Command {
        Rsync::copy(format!("{}/", tree.display()), self.served(to))
    }

    pub(super) fn pull(&self, from: &Path, to: &Path) -> Command {
        Rsync::copy(self.served(from), format!("{}/", to.display()))
    }
}

impl Drop for Rsync {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// NativeLink, where it is on the path: a server of the same protocol, with its files checked and flushed as ours are,
/// and spoken to by our own client.
pub(super) struct NativeLink {
    server: Child,
    /// `http://host:port/instance`.
    pub(super) place: String,
}

impl NativeLink {
    /// With an empty store below `home`.
    pub(super) fn start(home: &Path) -> Option<NativeLink> {
        fs::create_dir(home).expect("a directory");
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
        let port = free.expect("a port").port();
        let config = home.join("config.json5");
        let text = include_str!("nativelink.json5");
        let text = text.replace("HOME", &home.display().to_string()).replace("PORT", &port.to_string());
        fs::write(&config, text).expect("a file");
        let mut command = Command::new("nativelink");
        command.arg(&config).env("RUST_LOG", "error").stdin(Stdio::null());
        let server = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        eventually("the server listens", SOON, || TcpStream::connect(("127.0.0.1", port)).ok());
        Some(NativeLink { server, place: format!("http://127.0.0.1:{port}/main") })
    }
}

impl Drop for NativeLink {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A file system that can clone, in a file of `home`.
pub(super) struct Xfs {
    pub(super) path: PathBuf,
}

impl Xfs {
    pub(super) fn mount(home: &Path) -> Xfs {
        let (image, path) = (home.join("image"), home.join("mounted"));
        fs::create_dir_all(&path).expect("a directory");
        fs::File::create(&image).and_then(|file| file.set_len(XFS)).expect("a file");
        let mut make = Command::new("mkfs.xfs");
        make.args(["-q", "-m", "reflink=1"]).arg(&image);
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop"]).args([&image, &path]);
        for command in [make, mount] {
            crate::measure::time(command);
        }
        Xfs { path }
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.path).status();
    }
}

/// A socket that leads to another one and counts what passes, in both directions.
pub(super) struct Relay {
    pub(super) socket: PathBuf,
    passed: Arc<AtomicU64>,
}

impl Relay {
    pub(super) fn start(to: &Path, socket: &Path) -> Relay {
        let listener = UnixListener::bind(socket).expect("a socket");
        let (to, passed) = (to.to_owned(), Arc::new(AtomicU64::new(0)));
        let counter = Arc::clone(&passed);
        // It ends with the program: one that is short needs no way to stop it.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = UnixStream::connect(&to) else { continue };
                for (from, into) in [(&client, &server), (&server, &client)] {
                    let (from, into) = (from.try_clone(), into.try_clone());
                    let counter = Arc::clone(&counter);
                    std::thread::spawn(move || pass(from?, into?, &counter));
                }
            }
        });
        Relay { socket: socket.to_owned(), passed }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.passed.load(Ordering::SeqCst)
    }
}

fn pass(mut from: UnixStream, mut into: UnixStream, counter: &AtomicU64) -> io::Result<()> {
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let length = from.read(&mut buffer)?;
        if length == 0 {
            return into.shutdown(Shutdown::Write);
        }
        counter.fetch_add(length as u64, Ordering::SeqCst);
        into.write_all(&buffer[..length])?;
    }
}
