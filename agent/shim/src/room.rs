//! The room of a builder: what of the machine a short program of somebody else sees, and that nothing of it is left.
//!
//! It has process numbers, mounts and IPC of its own, an empty `/tmp` and `/dev/shm`, of `/dev` what needs no device of the
//! machine, and of the state directory what it works on. So two builders do not meet, not even those of one user. A machine that does not allow this, such as a
//! container, gives it less: then each process that it leaves becomes a child of the one that waits for it, and is killed.
//!
//! Invariant: when the first process of a builder has ended by itself, no other process of it runs.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::{process, sys};

/// What a builder sees.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuilderRoom {
    /// The state directory of the daemon, of which it sees only parts; absent where it is the daemon's own user.
    pub state_dir: Option<PathBuf>,
    /// These directories, relative to the state directory.
    pub sees: Vec<PathBuf>,
}

const NONE: Option<&str> = None;
const PLAIN: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

/// Continues in the room, and becomes the only process that is in it. For a process of one thread.
pub(crate) fn enter(room: &BuilderRoom) -> io::Result<()> {
    sys::enter_own_processes(process::end_descendants)?;
    let Some(state_dir) = &room.state_dir else { return Ok(()) };
    let here = std::env::current_dir();
    if unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC).is_err()
        || mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_SLAVE, NONE).is_err()
    {
        return Ok(()); // the rights of files remain
    }
    let _ = mount(Some("proc"), "/proc", Some("proc"), PLAIN | MsFlags::MS_NOEXEC, NONE);
    hide(state_dir, &room.sees)?;
    // Where the state is below one of them, the builder needs it.
    if !state_dir.starts_with("/dev") {
        own_devices()?;
    }
    if !state_dir.starts_with("/tmp") {
        let _ = mount(Some("tmpfs"), "/tmp", Some("tmpfs"), PLAIN, Some("mode=1777"));
    }
    // The directory that it was in lies below what hides it now: from there, `..` would lead behind it.
    match here.and_then(std::env::set_current_dir) {
        Ok(()) => Ok(()),
        Err(_) => std::env::set_current_dir("/"),
    }
}

/// Shows at a place what was opened before that was hidden.
fn show(opened: &OwnedFd, place: &Path) -> io::Result<()> {
    let from = format!("/proc/self/fd/{}", opened.as_raw_fd());
    Ok(mount(Some(from.as_str()), place, NONE, MsFlags::MS_BIND, NONE)?)
}

/// Puts another `/dev` in the place of the machine's, with nothing of its hardware in it: GPUs are of jobs.
fn own_devices() -> io::Result<()> {
    let open =
        |name: &str| rustix::fs::open(format!("/dev/{name}"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let shown = ["null", "zero", "full", "random", "urandom", "tty", "pts"].map(|name| (name, open(name)));
    let made = MsFlags::MS_NOSUID;
    if mount(Some("tmpfs"), "/dev", Some("tmpfs"), made, Some("mode=0755,size=64k,nr_inodes=64")).is_err() {
        return Ok(());
    }
    for (name, at) in shown.into_iter().filter_map(|(name, at)| Some((name, at.ok()?))) {
        let place = Path::new("/dev").join(name);
        match name {
            "pts" => std::fs::create_dir(&place)?,
            _ => drop(std::fs::File::create(&place)?),
        }
        show(&at, &place)?;
    }
    let links = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ];
    links.into_iter().try_for_each(|(name, to)| symlink(to, Path::new("/dev").join(name)))?;
    std::fs::create_dir("/dev/shm")?;
    Ok(mount(Some("tmpfs"), "/dev/shm", Some("tmpfs"), PLAIN, Some("mode=1777"))?)
}

/// Leaves of a directory what is seen. A machine that lets nobody mount keeps it as it is; but nothing is half hidden.
fn hide(dir: &Path, sees: &[PathBuf]) -> io::Result<()> {
    let root = agent_fs::open_directory(dir)?;
    // Opened before they are hidden, without following what others could put there.
    let open = |path: &PathBuf| {
        let flags = OFlags::DIRECTORY | OFlags::PATH;
        agent_fs::open_beneath(&root, path, flags, Mode::empty(), agent_fs::Links::Never)
    };
    let seen = sees.iter().map(|path| Ok((path, open(path)?))).collect::<io::Result<Vec<_>>>()?;
    if mount(Some("tmpfs"), dir, Some("tmpfs"), PLAIN, Some("mode=0711,size=64k,nr_inodes=256")).is_err() {
        return Ok(());
    }
    for (path, at) in seen {
        let place = dir.join(path);
        std::fs::create_dir_all(&place)?;
        show(&at, &place)?;
    }
    Ok(())
}
