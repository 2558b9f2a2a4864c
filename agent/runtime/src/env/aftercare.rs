//! Work on a new environment after it is ready, for which nobody waits.
//!
//! Its files are forced to the disk, see [`EnvDir::settle`]. Then its Python files are compiled: a conda package for
//! every Python version contains only sources, and a job may not be allowed to write the bytecode; then each start of
//! it would compile them again. The process that compiles gives way to all others, and is stopped when its
//! environment is removed. Interrupted work is repeated at the next use.
//!
//! Tasks: one per environment, owned here, aborted on drop.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_blocking::blocking_io;
use agent_command::Command;
use futures_util::FutureExt;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::task::{AbortHandle, JoinSet};

use super::builder::Builder;
use super::cache::{EnvDir, Left};

/// How long compiling may take: it prints nothing while it works.
const WITHIN: Duration = Duration::from_secs(3600);

/// The lowest priority.
const NICE: i32 = 19;

/// The environments that are being worked on.
#[derive(Debug, Default)]
pub(super) struct Aftercare {
    running: Mutex<Running>,
}

#[derive(Debug, Default)]
struct Running {
    tasks: JoinSet<()>,
    by_name: HashMap<String, AbortHandle>,
}

impl Aftercare {
    /// Does the remaining work for an environment, unless it is being done. `who` runs the Python that compiles.
    pub(super) fn start(&self, place: &EnvDir, left: Left, who: Option<Builder>) {
        let mut running = self.running.lock();
        while running.tasks.try_join_next().is_some() {}
        running.by_name.retain(|_, task| !task.is_finished());
        if !running.by_name.contains_key(place.name()) {
            let task = running.tasks.spawn(look_after(place.clone(), left, who).boxed());
            running.by_name.insert(place.name().to_owned(), task);
        }
    }

    /// Stops the work for an environment that is about to be removed.
    pub(super) fn stop(&self, name: &str) {
        let mut running = self.running.lock();
        if let Some(task) = running.by_name.remove(name) {
            task.abort();
        }
    }
}

async fn look_after(place: EnvDir, left: Left, builder: Option<Builder>) {
    if left.settle {
        let settling = place.clone();
        match agent_blocking::spawn_blocking(move || settling.settle()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(place = place.name(), %error, "cannot force environment to disk")
            }
            Err(error) => {
                tracing::warn!(place = place.name(), %error, "cannot force environment to disk")
            }
        }
    }
    if left.compile {
        compile(place, builder).await;
    }
}

async fn compile(place: EnvDir, builder: Option<Builder>) {
    let apart = place.compiled();
    let compiled = compile_apart(&place, &apart, builder).await;
    let (from, prefix) = (apart.clone(), place.prefix().to_owned());
    let kept = blocking_io(move || compiled.and_then(|()| move_in(&from, &prefix))).await;
    // A file that cannot be compiled is not reported: the job that imports it gets the error.
    match kept {
        Ok(()) => {
            // If this is interrupted, everything is compiled again.
            let _ = agent_blocking::spawn_blocking(move || place.note_compiled()).await;
        }
        Err(error) => tracing::warn!(place = place.name(), %error, "an environment is not compiled"),
    }
    let removed = blocking_io(move || agent_spawn::remove_tree(&apart)).await;
    if let Err(error) = removed {
        tracing::debug!(%error, "cannot remove what was compiled");
    }
}

/// Compiles into a directory of its own, as the builder, because Python runs start files of the packages. The environment
/// stays the daemon's meanwhile: jobs have layers over it, in which every file has one owner.
async fn compile_apart(place: &EnvDir, apart: &Path, builder: Option<Builder>) -> io::Result<()> {
    let lib = place.prefix().join("lib");
    let pythons = lib.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let pythons: Vec<PathBuf> = pythons.filter(|dir| dir.join("site-packages").is_dir()).collect();
    // First the packages that jobs import. They do not import tests.
    let dirs = pythons.iter().map(|dir| dir.join("site-packages")).chain(pythons.iter().cloned());
    let command = Command::new(place.prefix().join("bin/python"))
        .args(["-I", "-X", &format!("pycache_prefix={}", apart.display())])
        .args(["-m", "compileall", "-q", "-x", r"/(tests?|lib2to3|idlelib|turtledemo)/"])
        .args(dirs)
        .envs([("LC_ALL", "C.UTF-8")])
        .cwd(place.prefix())
        .mark(&place.prefix().to_string_lossy())
        .stall(WITHIN)
        .nice(NICE);
    let command = match &builder {
        Some(builder) => builder.runs(command),
        None => command,
    };
    let (lender, lent) = (builder.clone(), apart.to_owned());
    blocking_io(move || {
        agent_spawn::remove_tree(&lent)?;
        std::fs::create_dir(&lent)?;
        lender.map_or(Ok(()), |builder| builder.lend(&lent))
    })
    .await?;
    let compiled = command.capture().await;
    let lent = apart.to_owned();
    blocking_io(move || builder.map_or(Ok(()), |builder| builder.take_back(&lent))).await?;
    compiled.map(drop).map_err(io::Error::other)
}

/// Moves byte code beside its sources. Neither tree is trusted: no link is followed, and only files of that kind are
/// taken.
fn move_in(apart: &Path, prefix: &Path) -> io::Result<()> {
    let below = prefix.strip_prefix("/").unwrap_or(prefix);
    let flags = OFlags::DIRECTORY;
    let apart = agent_fs::open_directory(apart)?;
    let compiled = agent_fs::open_beneath(&apart, below, flags, Mode::empty(), agent_fs::Links::Never)?;
    let sources = agent_fs::open_directory(prefix)?;
    let mut left = vec![PathBuf::new()];
    while let Some(below) = left.pop() {
        let at = agent_fs::open_beneath(&compiled, &below, flags, Mode::empty(), agent_fs::Links::Never)?;
        let mut cache = None;
        for entry in Dir::read_from(&at)? {
            let entry = entry?;
            let name = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
            if [".", ".."].iter().any(|dots| name.as_os_str() == *dots) {
                continue;
            }
            let seen = rustix::fs::statat(&at, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(seen.st_mode) {
                FileType::Directory => left.push(below.join(name)),
                FileType::RegularFile if name.extension().is_some_and(|ending| ending == "pyc") => {
                    let cache = match &cache {
                        Some(cache) => cache,
                        None => cache.insert(open_cache(&sources, &below)?),
                    };
                    rustix::fs::renameat(&at, name, cache, name)?;
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// The directory for the byte code of the sources in a directory.
fn open_cache(prefix: &OwnedFd, below: &Path) -> io::Result<OwnedFd> {
    const CACHE: &str = "__pycache__";
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let at = agent_fs::open_beneath(prefix, below, OFlags::DIRECTORY, Mode::empty(), agent_fs::Links::Never)?;
    match rustix::fs::mkdirat(&at, CACHE, Mode::from_raw_mode(0o755)) {
        Err(error) if error != Errno::EXIST => return Err(error.into()),
        _ => {}
    }
    Ok(rustix::fs::openat(&at, CACHE, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn test_byte_code_is_moved_and_nothing_that_links_lead_to() {
        let temp = tempfile::tempdir().unwrap();
        let at = |path: &str| temp.path().join(path);
        let (prefix, elsewhere) = (at("envs/own"), at("envs/other"));
        for dir in [prefix.join("lib/linked"), elsewhere.join("linked")] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(elsewhere.join("linked/theirs.pyc"), "theirs").unwrap();
        let compiled = at("apart").join(prefix.strip_prefix("/").unwrap());
        fs::create_dir_all(compiled.join("lib")).unwrap();
        fs::write(compiled.join("lib/own.pyc"), "own").unwrap();
        fs::write(compiled.join("lib/own.py"), "not byte code").unwrap();
        symlink(elsewhere.join("linked"), compiled.join("lib/linked")).unwrap();
        symlink(elsewhere.join("linked/theirs.pyc"), compiled.join("lib/one.pyc")).unwrap();
        move_in(&at("apart"), &prefix).unwrap();
        let moved =
            fs::read_dir(prefix.join("lib/__pycache__")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(moved.collect::<Vec<_>>(), ["own.pyc"]);
        assert!(elsewhere.join("linked/theirs.pyc").exists());
    }

    #[test]
    fn test_a_link_above_what_was_compiled_is_not_followed() {
        let temp = tempfile::tempdir().unwrap();
        let (prefix, other) = (temp.path().join("own"), temp.path().join("other"));
        for dir in [&prefix, &other] {
            fs::create_dir_all(dir.join("lib")).unwrap();
        }
        fs::write(other.join("lib/theirs.pyc"), "theirs").unwrap();
        let apart = temp.path().join("apart");
        let compiled = apart.join(prefix.strip_prefix("/").unwrap());
        fs::create_dir_all(compiled.parent().unwrap()).unwrap();
        symlink(&other, &compiled).unwrap();
        move_in(&apart, &prefix).unwrap_err();
        assert!(other.join("lib/theirs.pyc").exists());
    }
}
