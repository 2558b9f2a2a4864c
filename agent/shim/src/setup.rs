//! From a bare process to a supervisor that listens. Everything inherited is shed first.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use agent_model::{Clock as _, SystemClock};
use agent_shim::cgroup::Groups;
use agent_shim::segments::Writer;
use agent_shim::tracking::Intake;
use agent_shim::{Hello, JobDir, Launch, Place, RecordError, VERSION, WriteError, process, sys};
use nix::fcntl::OFlag;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::{Mode, umask};

use crate::alarm::Alarm;
use crate::clients::Clients;
use crate::exit_file::ExitFile;
use crate::job_log::JobLog;
use crate::notes::Notes;
use crate::supervise::{Life, Supervisor, Tracking};
use crate::tree::Tree;

/// Why the shim cannot do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShimError {
    #[error("the command was started before; it is never started again")]
    Started,
    #[error("there is no launch record")]
    NoLaunch,
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("could not {step}")]
    Step { step: &'static str, source: io::Error },
}

/// Names the step in an error of it.
pub(crate) fn step<T, E: Into<io::Error>>(step: &'static str, result: Result<T, E>) -> Result<T, ShimError> {
    result.map_err(|source| ShimError::Step { step, source: source.into() })
}

/// Becomes a process of its own, enters the job directory and takes the shim's place there; `None` when it
/// is taken.
pub(crate) fn take_place(dir: &Path) -> io::Result<Option<Place>> {
    close_inherited()?;
    let _ = nix::unistd::setsid(); // fails only where it leads a group already, which serves as well
    umask(Mode::from_bits_truncate(0o077));
    sys::survive_failed_writes();
    std::env::set_current_dir(dir)?;
    here().take_place()
}

/// The job directory, which is the current one.
pub(crate) fn here() -> JobDir {
    JobDir::new(".")
}

/// Makes everything that is needed before `go`, and greets.
pub(crate) fn prepare(notes: &Notes) -> Result<Supervisor<'_>, ShimError> {
    let dir = here();
    if dir.is_started() || dir.exit().exists() {
        return Err(ShimError::Started);
    }
    let launch = dir.read_launch()?.ok_or(ShimError::NoLaunch)?;
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
    let tracking = step("watch the tracking file", watch_tracking(&dir, &launch))?;
    let exit_file = step("reserve the exit record", ExitFile::reserve(&dir))?;
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
        dir,
        launch,
        hello,
        notes,
        signals,
        alarm,
        clients,
        log,
        tracking,
        exit_file,
        tree,
        life,
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

fn listen_for_signals() -> nix::Result<SignalFd> {
    let mut mask = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        mask.add(signal);
    }
    mask.thread_block()?;
    SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
}

/// What tells that somebody removed, replaced or emptied a file in a directory, or changed its rights.
const HARM: AddWatchFlags = AddWatchFlags::IN_DELETE
    .union(AddWatchFlags::IN_MOVE)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_CLOSE_WRITE);

/// The job may append to the file as well as the daemon, so it belongs to the job's user.
fn watch_tracking(dir: &JobDir, launch: &Launch) -> io::Result<Tracking> {
    let options = OpenOptions::new().append(true).create(true).custom_flags(OFlag::O_NOFOLLOW.bits()).clone();
    let file = options.open(dir.tracking())?;
    if let Some(user) = launch.user {
        std::os::unix::fs::fchown(file.as_fd(), Some(user.uid), Some(user.gid))?;
    }
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    // The folder tells of writes to files in it, to those too that were removed and are written still.
    let changes = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | HARM;
    inotify.add_watch(dir.path(), changes)?;
    Ok(Tracking { inotify, intake: Intake::open(dir, launch.log)? })
}

/// Tells whoever started this that it listens. Nobody may be there any more, which is no reason to stop.
fn greet(instance: &str) {
    let _ = writeln!(io::stdout(), "{instance}");
    let _ = File::options().write(true).open("/dev/null").map(nix::unistd::dup2_stdout);
}
