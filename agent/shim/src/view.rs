//! The view that a job has of the daemon's files: its software environment, which it may change without changing it for
//! others, and, if it runs as the daemon's own user, nothing of the daemon's state but its own folder.
//!
//! What a job writes into its environment goes into a layer of its own, an overlay, which is removed with its
//! directory. There are two ways to mount it:
//! - the job of another user: its supervisor has the privilege, and mounts it for the job ([`layer`]). The files appear
//!   as the job's, by an idmapped mount, so that it can replace them like a user who has their own environment;
//! - the job of the daemon's user: it mounts it itself, in a user namespace in which it has only its own user
//!   ([`enter`]). Nothing outside of the namespace can be traced from inside, though the user is the same.
//!
//! Invariant: with an error nothing was started in a view that is incomplete.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde::{Deserialize, Serialize};

use crate::sys::{self, User};

/// What a job sees in another way than the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Its environment, if that has files.
    #[serde(default)]
    pub environment: Option<PathBuf>,
    /// The directory with the job's own layer over it, on a file system that can have one.
    pub layer: PathBuf,
    /// The daemon's state, for a job of the daemon's own user.
    #[serde(default)]
    pub state: Option<Cover>,
}

/// A directory of which a job sees only a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cover {
    /// It.
    pub dir: PathBuf,
    /// What the job may read of it, if it exists.
    pub readable: Vec<PathBuf>,
    /// What it may change.
    pub writable: Vec<PathBuf>,
}

const NONE: Option<&str> = None;

/// The two folders of a layer: the job's files, and a place where the kernel prepares them.
const FOLDERS: [&str; 2] = ["upper", "work"];

/// Makes the empty folders of a layer for `view`, and returns the one that must belong to the job's user.
pub fn make_layer(dir: &Path) -> io::Result<PathBuf> {
    let [upper, work] = FOLDERS.map(|folder| dir.join(folder));
    fs::create_dir(dir)?;
    [&upper, &work].into_iter().try_for_each(fs::create_dir)?;
    Ok(upper)
}

/// Mounts the layer of a job that runs as `user`, in this process's own mounts. For a process of one thread that may
/// mount. The mount acts with the capabilities of this process, so directories of others are refused.
pub fn layer(view: &View, user: Option<&User>) -> io::Result<()> {
    let Some(environment) = &view.environment else { return Ok(()) };
    let (own, owner) = (nix::unistd::geteuid().as_raw(), File::from(open(environment)?).metadata()?);
    let user = user.map_or(own, |user| user.uid);
    if owner.uid() != own && owner.uid() != user {
        return Err(io::Error::other("the environment belongs to somebody else"));
    }
    if user != owner.uid() {
        sys::show_as(environment, (owner.uid(), owner.gid()), user)?;
    }
    let (upper, work) = open_layer(view)?;
    if (owner_of(&upper)?, owner_of(&work)?) != (user, own) {
        return Err(io::Error::other("the layer belongs to somebody else"));
    }
    sys::with_every_capability(|| overlay(environment, &open(environment)?, &upper, &work, ""))
}

/// Enters the view, and then `cwd`, in a new user namespace. For a process of one thread that becomes the job.
pub fn enter(view: &View, cwd: &Path) -> io::Result<()> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_SLAVE, NONE)?;
    let opened = |environment: &PathBuf| Ok::<_, io::Error>((open(environment)?, open_layer(view)?));
    let below = view.environment.as_ref().map(opened).transpose()?;
    view.state.as_ref().map_or(Ok(()), hide)?;
    if let (Some(environment), Some((lower, (upper, work)))) = (&view.environment, below) {
        // Without privilege the kernel keeps its marks in attributes of the user.
        overlay(environment, &lower, &upper, &work, ",userxattr")?;
    }
    std::env::set_current_dir(cwd)?;
    sys::confine_signals();
    Ok(())
}

/// Why no job of this user can have a view, if none can: everything is tried in `dir`, in which files can be made. Ends
/// with this process inside; for one that does nothing else.
pub fn try_out(dir: &Path) -> io::Result<()> {
    let environment = dir.join("environment");
    fs::create_dir(&environment)?;
    fs::write(environment.join("old"), "")?;
    let view = View { environment: Some(environment.clone()), layer: dir.join("layer"), state: None };
    make_layer(&view.layer)?;
    enter(&view, dir)?;
    fs::write(environment.join("new"), "")?;
    fs::remove_file(environment.join("old"))
}

/// Covers a directory with an empty one in which only its visible parts are.
fn hide(state: &Cover) -> io::Result<()> {
    let parts =
        state.readable.iter().map(|path| (path, true)).chain(state.writable.iter().map(|path| (path, false)));
    let mut visible = Vec::new();
    for (path, read_only) in parts {
        match open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => visible.push((path, found?, read_only)),
        }
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("agentd"), &state.dir, Some("tmpfs"), flags, Some("mode=0755,size=1m"))?;
    for (path, fd, read_only) in visible {
        fs::create_dir_all(path)?;
        mount(Some(&by_descriptor(&fd)), path, NONE, MsFlags::MS_BIND | MsFlags::MS_REC, NONE)?;
        if read_only {
            remount_read_only(path)?;
        }
    }
    remount_read_only(&state.dir)
}

/// Only what a mount already forbids may be repeated when it is mounted again without privilege, and it must be.
fn remount_read_only(path: &Path) -> io::Result<()> {
    use nix::sys::statvfs::FsFlags;
    let now = nix::sys::statvfs::statvfs(path)?.flags();
    let kept = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    let kept =
        kept.into_iter().filter(|(is, _)| now.contains(*is)).map(|(_, flag)| flag).collect::<MsFlags>();
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | kept;
    Ok(mount(NONE, path, NONE, flags, NONE)?)
}

/// Mounts the overlay at `at`. By descriptors, because its options give some characters of a path a meaning.
fn overlay(at: &Path, lower: &OwnedFd, upper: &OwnedFd, work: &OwnedFd, more: &str) -> io::Result<()> {
    let [lower, upper, work] = [lower, upper, work].map(|fd| by_descriptor(fd).display().to_string());
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}{more}");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(Some("agentd"), at, Some("overlay"), flags, Some(options.as_str()))?)
}

/// The two folders of the layer.
fn open_layer(view: &View) -> io::Result<(OwnedFd, OwnedFd)> {
    let [upper, work] = FOLDERS.map(|folder| open(&view.layer.join(folder)));
    Ok((upper?, work?))
}

fn owner_of(fd: &OwnedFd) -> io::Result<u32> {
    Ok(nix::sys::stat::fstat(fd)?.st_uid)
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    use nix::fcntl::OFlag;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(nix::fcntl::open(path, flags, nix::sys::stat::Mode::empty())?)
}

fn by_descriptor(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}
