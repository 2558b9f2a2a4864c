//! One attempt to lay a snapshot out, in a process of its own: so it can be said what it took, and nothing it
//! does to itself harms the table.
//!
//! `tables probe STORE ROOT DEST` is that process; STORE is the directory of a store or the socket of a
//! controller. It prints one line, an [`Attempt`] in words.

use std::error::Error;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use agent_cas::snapshot::{MaterializeError, TreeError, materialize};
use agent_cas::store::ReadError;
use agent_cas::{Disk, Remote};
use agent_model::Digest;
use agent_tests::client::{channel, runtime};
use agent_tests::{cpu_seconds, eventually};
use rustix::process::{Resource, Rlimit, setrlimit};

/// What a node may spend on a snapshot that it refuses: seconds of a processor, bytes of memory.
pub(crate) const PROCESSOR: f64 = 10.0;
pub(crate) const MEMORY: u64 = 256 << 20;

/// Bytes of address space after which an attempt is ended.
const RUNAWAY: u64 = 4 << 30;

/// After that it hangs, whatever the load of the machine.
const HANGS: Duration = Duration::from_secs(240);

/// What came of an attempt.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    /// The name of the refusal; `laid` for none.
    pub(crate) outcome: String,
    /// The refusal in words.
    pub(crate) words: String,
    /// Most memory it had, in bytes.
    pub(crate) memory: u64,
    /// Seconds of a processor it used.
    pub(crate) processor: f64,
}

/// Most memory a process had so far, in bytes.
pub(crate) fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}

/// A process that ends with the test, whatever becomes of that.
struct Running(Option<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Lays `root` out to `dest` in a process of its own.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
pub(crate) fn attempt(store: &Path, root: Digest, dest: &Path) -> Attempt {
    // Not by its path: the build of what is tested may have put another file there.
    let mut command = Command::new("/proc/self/exe");
    command.arg("probe").arg(store).arg(root.to_string()).arg(dest);
    let mut probe = Running(Some(command.stdout(Stdio::piped()).spawn().expect("the probe starts")));
    // It says little, which fits into the pipe.
    eventually("the probe ends", HANGS, || {
        probe.0.as_mut().and_then(|probe| probe.try_wait().expect("its own child"))
    });
    let said = probe.0.take().expect("it ran").wait_with_output().expect("the probe is reaped");
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let mut parts = text.trim_end().splitn(4, '\t');
    let mut part = || parts.next().unwrap_or_default().to_owned();
    let (outcome, memory, processor, words) = (part(), part(), part(), part());
    assert!(said.status.success() && !outcome.is_empty(), "the probe died of {}: {text}", said.status);
    let number = |text: &str| text.parse::<f64>().expect("a number");
    Attempt { outcome, words, memory: number(&memory) as u64, processor: number(&processor) }
}

/// The process.
#[allow(clippy::print_stdout, reason = "its answer")]
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let [store, root, dest] = arguments else { return ExitCode::from(2) };
    // One that goes wild takes itself down, and not the machine.
    let limit = Rlimit { current: Some(RUNAWAY), maximum: Some(RUNAWAY) };
    setrlimit(Resource::As, limit).expect("less is always allowed");
    let (store, dest) = (Path::new(store), Path::new(dest));
    let root: Digest = root.parse().expect("a digest");
    let result = match store.is_dir() {
        true => {
            let disk = Disk::open(store).expect("a store");
            runtime().block_on(materialize(&disk, root, dest, None, &[]))
        }
        false => runtime().block_on(materialize(&Remote::new(channel(store)), root, dest, None, &[])),
    };
    let (outcome, words) = match &result {
        Ok(laid) => ("laid".to_owned(), format!("{} files, {} bytes", laid.files, laid.bytes)),
        Err(error) => (name(error), in_words(error)),
    };
    let me = std::process::id();
    println!("{outcome}\t{}\t{}\t{}", peak(me), cpu_seconds(me), words.escape_debug());
    ExitCode::SUCCESS
}

/// The step that refused.
pub(crate) fn name(error: &MaterializeError) -> String {
    let read = |error: &ReadError| match error {
        ReadError::Absent { .. } => "absent",
        error if error.is_damage() => "damaged",
        _ => "unreadable",
    };
    let name = match error {
        MaterializeError::Tree(error) => match error {
            TreeError::Read(error) => read(error),
            TreeError::TooLarge { .. } => "large directory",
            TreeError::LargeEntry { .. } => "large entry",
            TreeError::Malformed { .. } => "malformed",
            TreeError::NotCanonical { .. } => "not canonical",
            TreeError::Name { .. } => "name",
            TreeError::Content { .. } => "content",
            TreeError::Link { .. } => "link",
            TreeError::TooHeavy { .. } => "heavy",
            TreeError::PathTooLong { .. } => "long path",
            TreeError::TooDeep { .. } => "deep",
            TreeError::TooManyDirectories { .. } => "many directories",
            TreeError::TooManyFiles { .. } => "many files",
        },
        MaterializeError::Exists { .. } => "exists",
        MaterializeError::Destination { .. } => "destination",
        MaterializeError::Read { source, .. } => read(source),
        MaterializeError::Write { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            "no room"
        }
        MaterializeError::Write { .. } => "write",
        MaterializeError::NoSuchPart { .. } => "part",
    };
    name.to_owned()
}

fn in_words(error: &dyn Error) -> String {
    let next = error.source().map(|source| format!(": {}", in_words(source))).unwrap_or_default();
    format!("{error}{next}")
}
