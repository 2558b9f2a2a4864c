//! From a bare process to a supervisor that listens. Everything inherited is dropped first.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use agent_model::{Clock as _, SystemClock};
use agent_shim::apart::Assigned;
use agent_shim::cgroup::Groups;
use agent_shim::segments::Writer;
use agent_shim::tracking::Intake;
use agent_shim::{Hello, JobDir, Launch, ShimPlace, VERSION, door, process, sys};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::{Mode, umask};

use crate::alarm::Alarm;
use crate::attendant::Attendant;
use crate::clients::Clients;
use crate::exit_file::ExitFile;
use crate::job_log::JobLog;
use crate::notes::Notes;
use crate::supervise::{Life, Supervisor, Tracking};
use crate::tree::Tree;
use crate::watch::Watch;
use crate::{ShimError, step};

/// How the shim gets its job directory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Way<'a> {
    /// By its path.
    Path { dir: &'a Path, assigned: Option<&'a Assigned> },
    /// As the first process of a container, through the socket; the job's part of it is `folder` there.
    Door { socket: &'a Path, folder: &'a Path },
}

/// Detaches from its parent, enters the job directory and takes the shim's lock there; `None` when another
/// shim has it.
pub(crate) fn take_place(way: Way<'_>) -> io::Result<Option<ShimPlace>> {
    close_inherited()?;
    let _ = nix::unistd::setsid(); // fails only where it leads a group already, which serves as well
    umask(Mode::from_bits_truncate(0o077));
    sys::survive_failed_writes();
    match way {
        Way::Path { dir, assigned } => {
            assigned.map_or(Ok(()), Assigned::enter)?;
            std::env::set_current_dir(dir)?;
        }
        Way::Door { socket, .. } => {
            // From here on no process of the job may inspect this one, whatever its user.
            nix::sys::prctl::set_dumpable(false)?;
            let directory = door::enter(socket)?;
            be_owner_of(&directory)?;
            nix::unistd::fchdir(directory)?;
        }
    }
    here().take_place()
}

/// In a container, becomes the directory's owner, the daemon's user, unless that is user 0: nobody else may write
/// there.
fn be_owner_of(directory: &OwnedFd) -> io::Result<()> {
    let owner = File::from(directory.try_clone()?).metadata()?;
    if !nix::unistd::geteuid().is_root() || owner.uid() == 0 {
        return Ok(());
    }
    sys::become_with(owner.uid(), owner.gid(), sys::IN_CONTAINER)?;
    Ok(nix::sys::prctl::set_dumpable(false)?)
}

/// The job directory, which is the current one.
pub(crate) fn here() -> JobDir {
    JobDir::new(".")
}

/// Makes everything that is needed before `go`, and greets.
pub(crate) fn prepare<'a>(notes: &'a Notes, way: Way<'_>) -> Result<Supervisor<'a>, ShimError> {
    let dir = here();
    if dir.is_started() || dir.exit().exists() {
        return Err(ShimError::Started);
    }
    let mut launch = dir.read_launch()?.ok_or(ShimError::NoLaunch)?;
    if let Way::Path { assigned: Some(assigned), .. } = way {
        launch.user = Some(assigned.user.clone());
        launch.tmp = launch.tmp.map(|_| dir.tmp());
    }
    let instance = step("make a random instance", fs::read_to_string("/proc/sys/kernel/random/uuid"))?;
    let instance = instance.trim().to_owned();
    // Orphans of the job become children of this process, so nothing it starts can get away.
    step("become the parent of orphans", nix::sys::prctl::set_child_subreaper(true))?;
    if let Err(error) = sys::ask_for_oom_protection() {
        notes.say(format_args!("it may be ended like any other process when memory runs out: {error}"));
    }
    if !launch.container {
        remove_groups_of_former(&dir);
    }
    let signals = step("listen for signals", listen_for_signals())?;
    let alarm = step("make a timer", Alarm::new())?;
    let log = JobLog::new(step("open the job's log", Writer::open(dir.segments(), launch.log))?);
    let intake = step("open the tracking file", open_tracking(&dir, &launch))?;
    let (watch, unwatched) = Watch::of(&dir);
    if let Some(error) = unwatched {
        notes.say(format_args!("files are looked at every second, because they cannot be watched: {error}"));
    }
    let folder = match way {
        Way::Path { .. } => dir.data().to_owned(),
        Way::Door { folder, .. } => folder.to_owned(),
    };
    let exit_file = step("reserve the exit record", ExitFile::reserve(&dir))?;
    let held_port = launch.hold_port.and_then(|port| {
        let held = hold_port(port);
        let complaint =
            held.as_ref().err().map(|error| format!("port {port} is not kept from others: {error}"));
        complaint.into_iter().for_each(|complaint| notes.say(complaint));
        held.ok()
    });
    let hello = Hello {
        version: VERSION,
        instance: instance.clone(),
        replica: launch.replica.clone(),
        pid: std::process::id() as i32,
        boot_id: process::boot_id(),
        at: SystemClock.now(),
        containment: String::new(),
        groups: Vec::new(),
        container: launch.container,
        kills: None,
    };
    dir.write_hello(&hello)?;
    let clients = step("listen at the socket", Clients::listen(&dir.socket(), instance.clone()))?;
    greet(&instance);
    notes.say(format_args!("ready for {}, instance {instance}, process {}", launch.replica, hello.pid));
    let life = Life::new(SystemClock.boot(), launch.lease_until);
    let tree = if launch.container { Tree::of_container() } else { Tree::default() };
    let supervisor = Supervisor {
        gives_up: launch.container || matches!(way, Way::Path { assigned: Some(_), .. }),
        dir,
        folder,
        launch,
        hello,
        notes,
        signals,
        alarm,
        clients,
        log,
        tracking: Tracking { watch, intake },
        exit_file,
        tree,
        life,
        attendant: Attendant::default(),
        _held_port: held_port,
    };
    Ok(supervisor)
}

/// A shim that died before it started the command may have made groups for it, which are empty.
fn remove_groups_of_former(dir: &JobDir) {
    if let Ok(Some(former)) = dir.read_hello()
        && former.boot_id == process::boot_id()
    {
        Groups::of(&former).remove();
    }
}

fn close_inherited() -> io::Result<()> {
    let open =
        fs::read_dir("/proc/self/fd")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let extra: Vec<i32> = open.filter(|fd| *fd > 2).collect();
    for fd in extra {
        let _ = nix::unistd::close(fd); // the descriptor that listed them is gone already
    }
    Ok(())
}

/// Binds a port of loopback without listening there: processes of this user may share it with `SO_REUSEPORT`, others
/// cannot bind it.
fn hold_port(port: u16) -> nix::Result<OwnedFd> {
    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt,
    };
    let held = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&held, sockopt::ReusePort, &true)?;
    bind(held.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port))?;
    Ok(held)
}

fn listen_for_signals() -> nix::Result<SignalFd> {
    let mut mask = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        mask.add(signal);
    }
    mask.thread_block()?;
    SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
}

/// The job may append to the file as well as the daemon, so it belongs to the job's user.
fn open_tracking(dir: &JobDir, launch: &Launch) -> io::Result<Intake> {
    // If it exists it is the job's already, and not to be written by this process.
    let file = match agent_fs::open_plain(&dir.tracking()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => agent_fs::append_plain(&dir.tracking())?,
        file => file?,
    };
    let found = file.metadata()?;
    // Where this is no root's process the file is the daemon's, and open to whoever comes to it.
    if let Some(user) = &launch.user
        && nix::unistd::geteuid().is_root()
        && (found.uid(), found.gid()) != (user.uid, user.gid)
    {
        std::os::unix::fs::fchown(file.as_fd(), Some(user.uid), Some(user.gid))?;
    }
    Intake::open(dir, launch.log)
}

/// Tells the process that started this one that it listens. That may be gone by now, which is no reason to stop.
fn greet(instance: &str) {
    let _ = writeln!(io::stdout(), "{instance}");
    let _ = File::options().write(true).open("/dev/null").map(nix::unistd::dup2_stdout);
}
