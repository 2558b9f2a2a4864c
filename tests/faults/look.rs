//! What can be seen of the product from outside: its processes, descriptors, databases and last words.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use agent_tests::fleet::{Daemon, processes_below};

/// The Python of the machine, which starts at once; the one of a user may be a script.
pub(crate) const PYTHON: &str = "/usr/bin/python3";

/// A command, with nothing to read.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    command
}

/// Runs a Python script to its end; panics when it fails.
#[track_caller]
pub(crate) fn python(script: &str, arguments: &[&str]) -> Output {
    let ran = command(PYTHON).arg("-c").arg(script).args(arguments).output().expect("Python starts");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    ran
}

/// Every database below a directory that is not whole, and why.
pub(crate) fn broken_databases(state: &Path) -> Vec<String> {
    const CHECK: &str = "
import sqlite3, sys
for path in sys.argv[1:]:
    try:
        said = sqlite3.connect(path, timeout=10).execute('pragma integrity_check').fetchone()[0]
    except sqlite3.Error as error:
        said = str(error)
    if said != 'ok':
        print(path, said)
";
    let is_database = |path: &PathBuf| {
        let mut head = [0; 16];
        let read = fs::File::open(path).and_then(|mut file| file.read_exact(&mut head));
        read.is_ok() && &head == b"SQLite format 3\0"
    };
    let found = files_below(state).into_iter().filter(is_database);
    let found: Vec<String> = found.map(|path| path.display().to_string()).collect();
    let found: Vec<&str> = found.iter().map(String::as_str).collect();
    let said = String::from_utf8_lossy(&python(CHECK, &found).stdout).into_owned();
    said.lines().map(str::to_owned).collect()
}

/// Every file below a directory; links are not followed.
pub(crate) fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(files_below(&entry.path())),
            Ok(kind) if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

/// The panics a daemon and the supervisors of its jobs told of.
pub(crate) fn panics(daemon: &Daemon) -> Vec<String> {
    let shims = daemon.job_dirs().into_iter();
    let logs = shims.map(|dir| fs::read_to_string(dir.join("shim.log")).unwrap_or_default());
    let all = logs.chain([daemon.log()]).collect::<Vec<_>>().join("\n");
    all.lines().filter(|line| line.contains("panicked at")).map(str::to_owned).collect()
}

/// Whether a process is there and not merely waiting to be reaped.
pub(crate) fn lives(pid: u32) -> bool {
    state_and_start(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// The state of a process and when it started, in ticks since boot.
pub(crate) fn state_and_start(pid: u32) -> Option<(char, u64)> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
    Some((fields.first()?.chars().next()?, fields.get(19)?.parse().ok()?))
}

/// The processes below a directory that live, looked for so often that one which always becomes another
/// process is met, too.
pub(crate) fn living_below(dir: &Path) -> Vec<u32> {
    (0..5).flat_map(|_| processes_below(dir)).filter(|pid| lives(*pid)).collect()
}

/// What the descriptors of a process stand for.
pub(crate) fn descriptors(pid: u32) -> Vec<PathBuf> {
    let listed = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    listed.filter_map(|entry| fs::read_link(entry.path()).ok()).collect()
}
