//! Our side, as a program of its own: `bench move scan|push|pull|fetch|near|lay`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_cas::snapshot::{Choice, PrestagedTree, StatCache, download, materialize, push, scan};
use agent_cas::{BlobStore, Disk, Remote, Tiered, remote};
use agent_model::Digest;
use agent_tests::client::{channel, runtime};
use tonic::transport::Endpoint;

/// What one of them tells when it ends.
pub(super) struct Told {
    /// Files whose content was read.
    pub(super) read: u64,
    /// Bytes sent, directories included.
    pub(super) sent: u64,
    /// The most memory it had, in bytes.
    pub(super) peak: u64,
    /// How long the parts of its work took that count, if not all of it does.
    pub(super) took: [Duration; 2],
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
    let [read, sent, one, two, peak] = numbers[..] else { panic!("{words:?} said {text:?}") };
    Told { read, sent, peak, took: [one, two].map(Duration::from_micros) }
}

/// The whole life of such a program.
pub(crate) fn main(words: &[String]) {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut took = [Duration::ZERO; 2];
    let (read, sent) = match words[..] {
        ["scan", dir] => (scan(Path::new(dir)).expect("it can be read").read, 0),
        ["scan", dir, cache] => (remembering(dir, cache).read, 0),
        ["push", socket, dir, cache] => {
            let snapshot = remembering(dir, cache);
            let store = store_at(socket);
            let pushed = runtime().block_on(push(&snapshot, &store, |_| {}));
            (snapshot.read, pushed.expect("it is taken").bytes_sent)
        }
        ["pull", socket, root, dest] => {
            let store = store_at(socket);
            runtime().block_on(download(&store, digest(root), Path::new(dest))).expect("it is there");
            (0, 0)
        }
        ["fetch", socket, root, dest, near] => {
            let near = Disk::open(Path::new(near)).expect("a directory");
            let store = Tiered::new(near, store_at(socket));
            runtime()
                .block_on(materialize(&store, digest(root), Path::new(dest), None, &[]))
                .expect("it is there");
            (0, 0)
        }
        ["near", socket, before, root, home, near] => {
            let near = Disk::open(Path::new(near)).expect("a directory");
            let store = Tiered::new(near, store_at(socket));
            took[0] = by_spare(&store, digest(before), digest(root), &Path::new(home).join("near"));
            took[1] = by_spare(&store, digest(root), digest(root), &Path::new(home).join("same"));
            (0, 0)
        }
        ["lay", dir, store, dest] => {
            let store = Disk::open(Path::new(store)).expect("a directory");
            let scanned = scan(Path::new(dir)).expect("it can be read");
            runtime().block_on(push(&scanned, &store, |_| {})).expect("it is taken");
            let begun = Instant::now();
            runtime()
                .block_on(materialize(&store, scanned.root, Path::new(dest), None, &[]))
                .expect("it is there");
            took[0] = begun.elapsed();
            (0, 0)
        }
        _ => panic!("nothing is moved by {words:?}"),
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let [one, two] = took.map(|took| took.as_micros());
    println!("{read} {sent} {one} {two} {}", peak_in(&status));
}

/// Lays `root` out by a prestaged tree of `before`; how long that took, without the prestaged tree.
fn by_spare(store: &impl BlobStore, before: Digest, root: Digest, dest: &Path) -> Duration {
    runtime().block_on(async {
        let prestaged = PrestagedTree::lay(store, before, &dest.with_extension("prestaged"), None)
            .await
            .expect("it is laid out");
        let prestaged_trees = [Arc::new(prestaged)];
        let begun = Instant::now();
        materialize(store, root, dest, None, &prestaged_trees).await.expect("it is there");
        let took = begun.elapsed();
        assert!(prestaged_trees[0].is_claimed(), "it was of no use");
        took
    })
}

fn remembering(dir: &str, cache: &str) -> agent_cas::snapshot::Snapshot {
    Choice { cache: Some(&StatCache::at(PathBuf::from(cache))), ..Choice::default() }
        .scan(Path::new(dir))
        .expect("it can be read")
}

/// The store behind a daemon's socket, or that of another server: `http://host:port/instance`.
fn store_at(place: &str) -> Remote {
    match place.strip_prefix("http://").and_then(|rest| rest.split_once('/')) {
        Some((server, instance)) => {
            let _inside = runtime().enter();
            let endpoint = Endpoint::from_shared(format!("http://{server}")).expect("an address");
            Remote::far(remote::far(endpoint).connect_lazy(), instance)
        }
        None => Remote::new(channel(Path::new(place))),
    }
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
