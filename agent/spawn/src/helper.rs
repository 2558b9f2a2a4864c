//! The helper: receives verbs from the daemon's user, checks the limits, and carries the verbs out.
//!
//! One thread for each connection that asked for something; it lasts as long as the process that it started. The helper
//! keeps no state: when it is killed, supervisors and jobs go on, and the next one recognises them by what the kernel
//! reports. A builder ends with the helper that started it: nobody could tell how it ended, and the next try of the build
//! would have it beside it.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use agent_shim::apart::Assigned;
use agent_shim::cgroup::{Groups, SCOPE_PREFIX};
use agent_shim::process;
use agent_shim::sys;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::Pid;
use rustix::fs::Stat;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::limits::{HelperLimits, LimitError, Undone};
use crate::memory::{BuilderGate, Limit};
use crate::silent::{HelperClient, Silent, SilentConnection};
use crate::wire::{self, GivenPart, RootAnswer, RootVerb, TakenPart};
use crate::{Program, Scope, copies, files, owners, scope, start};

/// Connections that asked for something at a time: each supervisor that this helper started has one until it ends.
const MOST: usize = 4096;

/// How many of these only the daemon can have.
const FOR_DAEMON: usize = 64;

/// Stack of a thread, in bytes.
const STACK: usize = 1 << 20;

/// The longest time a kill may take.
const LONGEST_KILL: Duration = Duration::from_secs(60);

/// Serves every client, for ever.
pub fn serve(listener: BorrowedFd<'_>, limits: HelperLimits) -> io::Result<()> {
    let limits = HelperLimits { files: raise_files(), ..limits };
    let (limits, taken) = (Arc::new(limits), Arc::new(AtomicUsize::new(0)));
    let mut silent = Silent::default();
    loop {
        let (is_new, asking) = silent.wait(listener)?;
        for connection in asking {
            let (limits, of) = (Arc::clone(&limits), Taken(Arc::clone(&taken)));
            let most = if connection.peer.is_daemon { MOST } else { MOST - FOR_DAEMON };
            if of.0.fetch_add(1, Ordering::Relaxed) >= most {
                continue;
            }
            let serve = move || {
                let _of = of;
                let _ = converse(&connection.stream, &limits); // the client is gone
            };
            let _ = thread::Builder::new().stack_size(STACK).spawn(serve); // as if it had been closed
        }
        if !is_new {
            continue;
        }
        match sys::accept(listener) {
            Ok(stream) => {
                if let Some(peer) = keeper(&stream, &limits) {
                    silent.add(SilentConnection { stream, peer });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error), // nobody listens
            Err(_) => {
                silent.close_others();
                thread::sleep(Duration::from_millis(10)); // others give descriptors back
            }
        }
    }
}

/// Lets this process have as many files open as it may, and returns how many it could before, which is what it starts
/// programs with.
fn raise_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // It goes on with fewer.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    limit.current.unwrap_or(u64::MAX)
}

/// Counts one open connection.
struct Taken(Arc<AtomicUsize>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Who has connected, if it is of the daemon's user: the socket is that user's, and the kernel is asked all the same.
fn keeper(stream: &OwnedFd, limits: &HelperLimits) -> Option<HelperClient> {
    let peer =
        getsockopt(stream, sockopt::PeerCredentials).ok().filter(|peer| peer.uid() == limits.keeper.0)?;
    Some(HelperClient { pid: peer.pid(), is_daemon: runs(peer.pid(), &limits.daemon) })
}

fn converse(stream: &OwnedFd, limits: &HelperLimits) -> io::Result<()> {
    let (verb, descriptors) = match wire::receive::<RootVerb>(stream.as_fd()) {
        Ok(Some(request)) => request,
        Ok(None) => return Ok(()),
        Err(error) => return wire::send(stream.as_fd(), &RootAnswer::failed(&error), &[]),
    };
    let answer = match obey(stream, limits, verb, descriptors) {
        Ok(answer) => answer,
        Err(Undone::Refused(refusal)) => RootAnswer::Refused { why: refusal.to_string() },
        Err(Undone::Failed(error)) => RootAnswer::failed(&error),
    };
    wire::send(stream.as_fd(), &answer, &[])
}

fn obey(
    stream: &OwnedFd,
    limits: &HelperLimits,
    verb: RootVerb,
    descriptors: Vec<OwnedFd>,
) -> Result<RootAnswer, Undone> {
    let wanted = match verb {
        RootVerb::Supervise { .. } => 1,
        RootVerb::Build(_) => 3,
        _ => 0,
    };
    if descriptors.len() != wanted {
        return Err(LimitError::Descriptors.into());
    }
    match verb {
        RootVerb::Greet => Ok(RootAnswer::Done),
        RootVerb::Give { path, uid, kind } => give(limits, &path, uid, kind),
        RootVerb::Take { path, part } => {
            if let TakenPart::Readable { uid, .. } | TakenPart::Whole { uid } = part {
                limits.may_be(uid)?;
            }
            files::take(&limits.open(&path)?, limits.keeper, part, &|uid| limits.may_be(uid).is_ok())?;
            Ok(RootAnswer::Done)
        }
        RootVerb::Copy { from, to, uid, most } => copy(limits, [&from, &to], uid, most),
        RootVerb::Supervise { replica, uid } => {
            let (mut child, pidfd) = supervise(limits, &replica, uid, descriptors)?;
            wire::send(stream.as_fd(), &RootAnswer::Started { pid: child.id() as i32 }, &[pidfd.as_fd()])?;
            Ok(RootAnswer::Ended { status: child.wait()?.into_raw(), out_of_memory: false })
        }
        RootVerb::Build(program) => follow(stream, build(limits, &program, descriptors)?),
        RootVerb::Enclose { pid, scope } => enclose(limits, pid, &scope),
        RootVerb::Kill { groups, mark, within_ms } => {
            limits.targets(&groups, &mark)?;
            let within = Duration::from_millis(within_ms.into()).min(LONGEST_KILL);
            let (found, left) =
                agent_shim::cgroup::kill_all(&Groups::new(groups), agent_shim::MARK, &mark, within);
            Ok(RootAnswer::Killed { found, left })
        }
    }
}

fn give(limits: &HelperLimits, path: &Path, uid: u32, kind: GivenPart) -> Result<RootAnswer, Undone> {
    let user = limits.user(uid)?;
    owners::may_lend(limits, path, uid)?;
    // Users of single jobs have nothing but what the daemon gave them. What belongs to a person is given to nobody, and
    // what belongs to the builder of one owner to no other.
    let is_due = |of| {
        of == limits.keeper.0 || of == uid || limits.job_uids.contains(&of) && !limits.is_of_an_owner(of)
    };
    files::give(&limits.open(path)?, (user.uid, user.gid), &is_due, kind)?;
    Ok(RootAnswer::Done)
}

fn copy(limits: &HelperLimits, [from, to]: [&Path; 2], uid: u32, most: u64) -> Result<RootAnswer, Undone> {
    limits.may_be(uid)?;
    let (from, to) = (limits.open(from)?, limits.open(to)?);
    if rustix::fs::fstat(&to)?.st_uid != limits.keeper.0 {
        return Err(LimitError::Destination.into());
    }
    let is_due = |seen: &Stat| copies::is_of_the_run(seen, limits.keeper.0, uid);
    let left_out = copies::copy(&from, &to, Some(limits.keeper), &is_due, most)?;
    Ok(RootAnswer::Copied { left_out })
}

fn supervise(
    limits: &HelperLimits,
    replica: &str,
    uid: u32,
    mut descriptors: Vec<OwnedFd>,
) -> Result<(Child, OwnedFd), Undone> {
    let replica = limits.replica(replica)?;
    let assigned = Assigned { keeper: limits.keeper, user: limits.user(uid)? };
    let below = Path::new("jobs").join(replica.to_string());
    let owner = rustix::fs::fstat(limits.open(&below)?)?.st_uid;
    if owner != limits.keeper.0 {
        return Err(LimitError::Path(below).into());
    }
    let greeting = descriptors.pop().filter(is_pipe).ok_or(LimitError::Descriptors)?;
    let mut command = start::supervisor(&limits.shim, &limits.state_dir.join(below), Some(&assigned));
    command.current_dir("/").stdin(Stdio::null()).stdout(greeting).stderr(Stdio::null());
    let child = process::start_supervisor(|| command.spawn(), |child| i32::try_from(child.id()).ok())?;
    child_with_handle(child)
}

fn build(limits: &HelperLimits, program: &Program, descriptors: Vec<OwnedFd>) -> Result<Builder, Undone> {
    let [input, output, error]: [OwnedFd; 3] = descriptors.try_into().map_err(|_| LimitError::Descriptors)?;
    if !is_pipe(&output) || !is_pipe(&error) {
        return Err(LimitError::Descriptors.into());
    }
    for tree in &program.sees {
        limits.open(tree)?;
    }
    let uid = match &program.owner {
        Some(owner) => owners::builder_of(limits, owner)?,
        None => limits.builder(),
    };
    let mut gate = BuilderGate::new()?;
    let mut command = start::builder(limits, uid, program, &gate.path())?;
    command.stdin(input).stdout(output).stderr(error).process_group(0);
    let mut child = command.spawn()?;
    let pid = child.id() as i32;
    if program.nice > 0 {
        start::give_way(pid, program.nice);
    }
    let limit = program.memory.map(|memory| Limit::of(pid, memory));
    let ready = sys::pidfd_open(pid).and_then(|pidfd| {
        gate.open(limit.as_ref().and_then(Limit::each))?;
        Ok(pidfd)
    });
    match ready {
        Ok(pidfd) => Ok(Builder { child, pidfd, limit, _gate: gate }),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error.into())
        }
    }
}

/// A builder that runs.
struct Builder {
    child: Child,
    pidfd: OwnedFd,
    limit: Option<Limit>,
    _gate: BuilderGate,
}

/// A child is given the daemon's end of a pipe, and nothing that root could write into.
fn is_pipe(descriptor: &OwnedFd) -> bool {
    let seen = rustix::fs::fstat(descriptor);
    seen.is_ok_and(|seen| rustix::fs::FileType::from_raw_mode(seen.st_mode).is_fifo())
}

fn child_with_handle(child: Child) -> Result<(Child, OwnedFd), Undone> {
    let pidfd = sys::pidfd_open(child.id() as i32)?;
    Ok((child, pidfd))
}

/// A builder is killed when the client that waits for it is gone.
fn follow(stream: &OwnedFd, mut builder: Builder) -> Result<RootAnswer, Undone> {
    let pid = builder.child.id() as i32;
    let told = wire::send(stream.as_fd(), &RootAnswer::Started { pid }, &[builder.pidfd.as_fd()]);
    let [ends, gone] = [&builder.pidfd, stream].map(|file| PollFd::new(file.as_fd(), PollFlags::POLLIN));
    let mut waits = [ends, gone];
    let ended = told.and_then(|()| {
        loop {
            match poll(&mut waits, PollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => {}
                ready => break ready.map(drop).map_err(io::Error::from),
            }
        }
    });
    let out_of_memory = builder.limit.as_ref().is_some_and(Limit::was_exceeded);
    let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL); // not reaped yet, so the number is still its own
    let status = builder.child.wait()?;
    ended?;
    Ok(RootAnswer::Ended { status: status.into_raw(), out_of_memory })
}

fn enclose(limits: &HelperLimits, pid: i32, wanted: &Scope) -> Result<RootAnswer, Undone> {
    // Builders are put into theirs as they are started.
    let is_due = matches!(wanted, Scope::Job { .. }) && is_supervisor(limits, pid);
    if !is_due {
        return Err(LimitError::Process(pid).into());
    }
    let group = scope::make(pid, wanted).map_err(io::Error::other)?;
    if is_supervisor(limits, pid) {
        delegate(pid, limits.keeper)?;
    }
    Ok(RootAnswer::Enclosed { group })
}

/// It runs the supervisor's program as the daemon's user; only the daemon itself could start another such process.
fn is_supervisor(limits: &HelperLimits, pid: i32) -> bool {
    let owner = fs::metadata(format!("/proc/{pid}")).map(|found| found.uid());
    runs(pid, &limits.shim) && owner.is_ok_and(|uid| uid == limits.keeper.0)
}

/// The process runs this program, or the one that was there before an upgrade.
fn runs(pid: i32, program: &Path) -> bool {
    let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let program = fs::canonicalize(program).unwrap_or_else(|_| program.to_owned());
    exe == program
        || exe.to_str().and_then(|exe| exe.strip_suffix(" (deleted)")).map(Path::new) == Some(&program)
}

/// Lets the supervisor make groups for its job in its scope, in every hierarchy that has the scope.
fn delegate(pid: i32, (uid, gid): (u32, u32)) -> io::Result<()> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(hierarchy), Some(path)) = (parts.next(), parts.next()) else { continue };
        let is_scope = path.rsplit('/').next().is_some_and(|name| name.starts_with(SCOPE_PREFIX));
        let root = Path::new("/sys/fs/cgroup").join(hierarchy.trim_start_matches("name="));
        let roots = if hierarchy.is_empty() { vec![root.join("unified"), root] } else { vec![root] };
        let group =
            roots.into_iter().map(|root| root.join(path.trim_start_matches('/'))).find(|dir| dir.is_dir());
        let Some(group) = group.filter(|_| is_scope) else { continue };
        chown(&group, Some(uid), Some(gid))?;
        for file in ["cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks"] {
            match chown(group.join(file), Some(uid), Some(gid)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}
