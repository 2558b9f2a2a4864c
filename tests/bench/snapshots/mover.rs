//! Our side, as a program of its own: `bench move scan|push|pull|fetch`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use agent_cas::snapshot::{StatCache, download, materialize, push, scan};
use agent_cas::{Disk, Remote, Tiered};
use agent_model::Digest;
use agent_tests::client::{channel, runtime};

/// What one of them tells when it ends.
pub(super) struct Told {
    /// Files whose content was read.
    pub(super) read: u64,
    /// Bytes sent, directories included.
    pub(super) sent: u64,
    /// The most memory it had, in bytes.
    pub(super) peak: u64,
}

/// Runs this program with these words to its end.
#[allow(clippy::disallowed_methods, reason = "a side of the ratio")]
pub(super) fn start(words: &[&str]) -> Told {
    let program = std::env::current_exe().expect("it runs");
    let mut command = Command::new(program);
    command.arg("move").args(words).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{words:?}: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [read, sent, peak] = numbers[..] else { panic!("{words:?} said {text:?}") };
    Told { read, sent, peak }
}

/// The whole life of such a program.
pub(crate) fn main(words: &[String]) {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (read, sent) = match words[..] {
        ["scan", dir] => (scan(Path::new(dir)).expect("it can be read").read, 0),
        ["scan", dir, cache] => (remembering(dir, cache).read, 0),
        ["push", socket, dir, cache] => {
            let snapshot = remembering(dir, cache);
            let store = remote(socket);
            let pushed = runtime().block_on(push(&snapshot, &store, |_| {}));
            (snapshot.read, pushed.expect("it is taken").bytes_sent)
        }
        ["pull", socket, root, dest] => {
            let store = remote(socket);
            runtime().block_on(download(&store, digest(root), Path::new(dest))).expect("it is there");
            (0, 0)
        }
        ["fetch", socket, root, dest, near] => {
            let near = Disk::open(Path::new(near)).expect("a directory");
            let store = Tiered::new(near, remote(socket));
            runtime().block_on(materialize(&store, digest(root), Path::new(dest))).expect("it is there");
            (0, 0)
        }
        _ => panic!("nothing is moved by {words:?}"),
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    println!("{read} {sent} {}", peak_in(&status));
}

fn remembering(dir: &str, cache: &str) -> agent_cas::snapshot::Snapshot {
    StatCache::at(PathBuf::from(cache)).scan(Path::new(dir)).expect("it can be read")
}

fn remote(socket: &str) -> Remote {
    Remote::new(channel(Path::new(socket)))
}

fn digest(text: &str) -> Digest {
    let (hash, size) = text.split_once('/').expect("a hash and a size");
    Digest::from_parts(hash, size.parse().expect("a size")).expect("a digest")
}

/// The most memory a process had, from its `status`, in bytes.
pub(super) fn peak_in(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}
