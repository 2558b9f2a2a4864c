//! Activation: the variables that an environment sets.
//!
//! Owns the single run of the activation scripts, and the difference they make. Hides the shell.
//!
//! Invariants: a build runs no script: the daemon has that done by a process of its own, as the user of builders where
//! there is one. Scripts see only variables of their environment, and none of the daemon's; they end within their time
//! limit, and every process they started is killed then; an environment that cannot be activated is still usable.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_env::Activation;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use super::tell::Teller;
use super::tree::{OpenTree, PlainPath};
use super::{Done, disk};

/// How long all scripts together may take.
const WITHIN: Duration = Duration::from_secs(30);

/// The system's directories of programs.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Variables that a shell changes by itself.
const NOISE: &[&str] = &["_", "SHLVL", "PWD", "OLDPWD", "PATH", "HOME", "LANG", "BASH_EXECUTION_STRING"];

/// Where the lists of variables and the scripts are.
const LISTS: &str = "etc/conda/env_vars.d";
const SCRIPTS: &str = "etc/conda/activate.d";

/// The largest list, in bytes.
const LARGEST: u64 = 4 << 20;

/// The variables that the environment at `prefix` sets without a script.
pub(crate) fn without_scripts(prefix: &Path, teller: &Teller) -> io::Result<Activation> {
    let tree = OpenTree::open(prefix)?;
    let mut vars = BTreeMap::from([
        ("CONDA_PREFIX".to_owned(), prefix.display().to_string()),
        ("CONDA_DEFAULT_ENV".to_owned(), prefix.display().to_string()),
    ]);
    for way in listed(&tree, LISTS, "json") {
        let list = tree.read_through(&way, LARGEST);
        let path = way.path().display();
        match list.map(|text| serde_json::from_slice::<BTreeMap<String, String>>(&text)) {
            Ok(Ok(set)) => vars.extend(set.into_iter().filter(|(name, _)| is_name(name))),
            Ok(Err(error)) => teller.say(format!("{path} is not a list of variables: {error}")),
            Err(error) => teller.say(format!("cannot read {path}: {error}")),
        }
    }
    Ok(Activation { vars, path_entries: vec![prefix.join("bin")] })
}

/// Whether the environment has scripts, which [`activate`] runs.
pub(crate) fn has_scripts(prefix: &Path) -> io::Result<bool> {
    Ok(!listed(&OpenTree::open(prefix)?, SCRIPTS, "sh").is_empty())
}

/// Runs the scripts of the environment at `prefix` to find out which variables activating it sets. They are code of
/// packages, and run with the rights of this process.
pub(crate) fn activate(prefix: &Path, teller: &Teller) -> Done<Activation> {
    let trouble = |error: io::Error| disk::trouble(prefix, "reading the environment", &error);
    let Activation { mut vars, mut path_entries } = without_scripts(prefix, teller).map_err(trouble)?;
    let tree = OpenTree::open(prefix).map_err(trouble)?;
    let scripts: Vec<PathBuf> =
        listed(&tree, SCRIPTS, "sh").iter().map(|way| prefix.join(way.path())).collect();
    let bin = prefix.join("bin");
    let path = format!("{}:{SYSTEM_PATH}", bin.display());
    match run(&scripts, prefix, &path, &vars) {
        Ok((after, said)) => {
            said.iter().for_each(|line| teller.say(format!("activation: {line}")));
            path_entries = entries(after.get("PATH").map_or(path.as_str(), String::as_str), &bin);
            vars.extend(
                after.into_iter().filter(|(name, _)| is_name(name) && !NOISE.contains(&name.as_str())),
            );
        }
        Err(why) => teller.say(format!("the {} activation scripts are left out: {why}", scripts.len())),
    }
    Ok(Activation { vars, path_entries })
}

/// The files of a directory with an extension, in the order in which conda runs them.
fn listed(tree: &OpenTree, dir: &str, extension: &str) -> Vec<PlainPath> {
    let Some(dir) = PlainPath::of(dir) else { return Vec::new() };
    let names = tree.names_through(&dir).into_iter();
    let names = names.filter(|name| Path::new(name).extension().is_some_and(|found| found == extension));
    names.filter_map(|name| PlainPath::of(dir.path().join(name))).collect()
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The entries of a `PATH` that are not the system's, with the environment's own directory among them.
fn entries(path: &str, bin: &Path) -> Vec<PathBuf> {
    let system: Vec<&str> = SYSTEM_PATH.split(':').collect();
    let mut entries: Vec<PathBuf> = Vec::new();
    for entry in path.split(':').filter(|entry| entry.starts_with('/') && !system.contains(entry)) {
        let entry = PathBuf::from(entry);
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    if !entries.iter().any(|entry| entry == bin) {
        entries.push(bin.to_owned());
    }
    entries
}

type After = (BTreeMap<String, String>, Vec<String>);

/// Runs scripts in one shell; returns the variables that are set afterwards, and the output.
#[allow(
    clippy::disallowed_methods,
    reason = "the scripts of packages are for a shell, and this is the process that may be killed"
)]
fn run(
    scripts: &[PathBuf],
    prefix: &Path,
    path: &str,
    vars: &BTreeMap<String, String>,
) -> Result<After, String> {
    let home = tempfile::tempdir().map_err(|error| format!("no directory for them: {error}"))?;
    // Their output is sent to standard error, so that standard output carries the variables alone.
    let text = r#"exec 3>&1 1>&2; for script in "$@"; do . "$script"; done; exec 1>&3 3>&-; command env -0"#;
    let mut shell = Command::new("bash");
    shell
        .args(["--noprofile", "--norc", "-c", text, "activate"])
        .args(scripts)
        .env_clear()
        .envs(vars)
        .env("PATH", path)
        .env("HOME", home.path())
        .env("LANG", "C.UTF-8")
        .current_dir(prefix)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = shell.spawn().map_err(|error| format!("this machine has no bash ({error})"))?;
    let (out, said, status) = end_within(child, WITHIN)?;
    let said: Vec<String> = String::from_utf8_lossy(&said)
        .lines()
        .take(20)
        .map(|line| line.chars().take(300).collect())
        .collect();
    if !status {
        return Err(format!("they failed: {}", said.last().map_or("", String::as_str)));
    }
    let text = String::from_utf8_lossy(&out);
    let pairs = text.split('\0').filter_map(|pair| pair.split_once('='));
    Ok((pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(), said))
}

/// Reads the output of a child until it ends; kills it, and all it started, when its time is over.
fn end_within(mut child: Child, within: Duration) -> Result<(Vec<u8>, Vec<u8>, bool), String> {
    // Orphans of the child become children of this process, which can then kill them.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let out = Gathered::from(child.stdout.take());
    let said = Gathered::from(child.stderr.take());
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status.success()),
            Ok(None) if begun.elapsed() < within => std::thread::sleep(Duration::from_millis(3)),
            Ok(None) | Err(_) => break None,
        }
    };
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    end_leftovers();
    let (out, said) = (out.end(), said.end());
    let status = status.ok_or_else(|| format!("they did not end within {} s", within.as_secs()))?;
    Ok((out, said, status))
}

/// The output of a child, read by a thread of its own.
struct Gathered {
    text: Arc<Mutex<Vec<u8>>>,
    reader: std::thread::JoinHandle<()>,
}

impl Gathered {
    /// The most that is kept, in bytes.
    const MOST: usize = 4 << 20;

    fn from(pipe: Option<impl Read + Send + 'static>) -> Gathered {
        let text = Arc::new(Mutex::new(Vec::new()));
        let kept = text.clone();
        let read = move || {
            let Some(mut pipe) = pipe else { return };
            let mut buffer = [0; 16 << 10];
            while let Ok(length @ 1..) = pipe.read(&mut buffer) {
                let mut kept = kept.lock();
                let room = Gathered::MOST - kept.len();
                kept.extend_from_slice(&buffer[..length.min(room)]);
            }
        };
        Gathered { text, reader: std::thread::spawn(read) }
    }

    /// What there is now that the child has ended. Something that it started may have the pipe open, and is not waited
    /// for.
    fn end(self) -> Vec<u8> {
        let begun = Instant::now();
        while !self.reader.is_finished() && begun.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(3));
        }
        std::mem::take(&mut *self.text.lock())
    }
}

/// Whether the numbers that `/proc` has are those of this process: it shows another namespace to a builder.
fn sees_itself() -> bool {
    std::fs::read_link("/proc/self").is_ok_and(|own| own == Path::new(&std::process::id().to_string()))
}

/// Kills every child of this process, and their children, until none is left. Those of a builder end with it.
fn end_leftovers() {
    if !sees_itself() {
        return;
    }
    for _ in 0..100 {
        let own = std::process::id();
        let text = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let others = std::fs::read_dir(format!("/proc/{own}/task")).into_iter().flatten().flatten();
        let all: String = others
            .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
            .chain([text])
            .collect::<Vec<_>>()
            .join(" ");
        let children: Vec<Pid> =
            all.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect();
        if children.is_empty() {
            return;
        }
        children.iter().for_each(|pid| {
            let _ = kill_process(*pid, Signal::KILL);
        });
        while matches!(wait(WaitOptions::NOHANG), Ok(Some(_))) {}
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [`end_leftovers`] kills all children of the process, so also those of other tests.
    static ALONE: Mutex<()> = Mutex::new(());

    fn prefix(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn test_activation_is_what_scripts_change() {
        let _alone = ALONE.lock();
        let dir = prefix(&[
            ("etc/conda/env_vars.d/a.json", r#"{"FROM_JSON": "one two", "bad-name": "x"}"#),
            (
                "etc/conda/activate.d/10.sh",
                "echo hello; export A=\"$FROM_JSON\nline\"; cd /; unset NOTHING\n",
            ),
            ("etc/conda/activate.d/20.sh", "export B=$A; export PATH=\"$CONDA_PREFIX/extra:$PATH\"\n"),
            ("etc/conda/activate.d/ignored.csh", "setenv C d\n"),
        ]);
        let activation = activate(dir.path(), &Teller::to_stdout()).unwrap();
        let own = dir.path().display().to_string();
        let expected: BTreeMap<String, String> = [
            ("A", "one two\nline"),
            ("B", "one two\nline"),
            ("CONDA_DEFAULT_ENV", own.as_str()),
            ("CONDA_PREFIX", own.as_str()),
            ("FROM_JSON", "one two"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        assert_eq!(activation.vars, expected);
        assert_eq!(activation.path_entries, [dir.path().join("extra"), dir.path().join("bin")]);
    }

    #[test]
    fn test_a_path_without_scripts_is_the_own_directory() {
        let dir = prefix(&[]);
        assert!(!has_scripts(dir.path()).unwrap());
        let plain = without_scripts(dir.path(), &Teller::to_stdout()).unwrap();
        assert_eq!(plain.path_entries, [dir.path().join("bin")]);
        assert_eq!(entries("/usr/bin:relative::/bin", Path::new("/p/bin")), [PathBuf::from("/p/bin")]);
    }

    #[test]
    fn test_a_script_that_hangs_is_ended_with_what_it_started() {
        let _alone = ALONE.lock();
        #[allow(clippy::disallowed_methods, reason = "a child to end")]
        let child = Command::new("bash")
            .args(["-c", "sleep 600 & exec sleep 600"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let error = end_within(child, Duration::from_millis(200)).unwrap_err();
        assert!(error.contains("did not end"), "{error}");
    }

    #[test]
    fn test_what_keeps_the_output_open_is_not_waited_for() {
        let (ours, mut theirs) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut theirs, b"A=1").unwrap();
        let begun = Instant::now();
        assert_eq!(Gathered::from(Some(ours)).end(), b"A=1");
        assert!(begun.elapsed() < Duration::from_secs(60));
        drop(theirs);
    }
}
