//! The daemon's side of the verbs: one connection to the helper for each.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::wire::{self, GivenPart, RootAnswer, RootVerb, TakenPart};
use crate::{Program, Scope, ScopeError, Started};

/// How long a helper may take to answer; giving a large tree takes longest.
const ANSWER: Duration = Duration::from_secs(600);

/// Where a helper listens, and its state directory.
#[derive(Debug)]
pub(crate) struct Helper {
    pub(crate) socket: PathBuf,
    pub(crate) state_dir: PathBuf,
}

impl Helper {
    fn relative(&self, path: &Path) -> io::Result<PathBuf> {
        let below = path.strip_prefix(&self.state_dir);
        below.map(Path::to_owned).map_err(|_| io::Error::other("it is not in the state directory"))
    }
}

/// The error for an answer other than the expected one.
fn odd(answer: &RootAnswer) -> io::Error {
    match answer {
        RootAnswer::Refused { why } => {
            io::Error::new(ErrorKind::PermissionDenied, format!("the helper `agent-spawn` refuses: {why}"))
        }
        RootAnswer::Failed { os_error: Some(number), .. } => io::Error::from_raw_os_error(*number),
        RootAnswer::Failed { what, .. } => io::Error::other(what.clone()),
        _ => io::Error::new(ErrorKind::InvalidData, "the helper `agent-spawn` answers something else"),
    }
}

fn ask(
    helper: &Helper,
    verb: &RootVerb,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<(RootAnswer, Vec<OwnedFd>, OwnedFd)> {
    let stream = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    let whole =
        |error| io::Error::new(ErrorKind::NotConnected, format!("{}: {error}", helper.socket.display()));
    connect(stream.as_raw_fd(), &UnixAddr::new(&helper.socket)?).map_err(whole)?;
    setsockopt(&stream, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER.as_secs() as i64))?;
    wire::send(stream.as_fd(), verb, descriptors)?;
    let (answer, got) = wire::receive(stream.as_fd())?.ok_or(ErrorKind::UnexpectedEof)?;
    Ok((answer, got, stream))
}

pub(crate) fn give(helper: &Helper, path: &Path, uid: u32, kind: GivenPart) -> io::Result<()> {
    done(ask(helper, &RootVerb::Give { path: helper.relative(path)?, uid, kind }, &[])?)
}

pub(crate) fn take(helper: &Helper, path: &Path, part: TakenPart) -> io::Result<()> {
    done(ask(helper, &RootVerb::Take { path: helper.relative(path)?, part }, &[])?)
}

pub(crate) fn copy(helper: &Helper, from: &Path, to: &Path, uid: u32, most: u64) -> io::Result<Vec<PathBuf>> {
    let (from, to) = (helper.relative(from)?, helper.relative(to)?);
    match ask(helper, &RootVerb::Copy { from, to, uid, most }, &[])?.0 {
        RootAnswer::Copied { left_out } => Ok(left_out),
        answer => Err(odd(&answer)),
    }
}

fn done((answer, ..): (RootAnswer, Vec<OwnedFd>, OwnedFd)) -> io::Result<()> {
    if let RootAnswer::Done = answer { Ok(()) } else { Err(odd(&answer)) }
}

pub(crate) fn kill(
    helper: &Helper,
    groups: &[PathBuf],
    mark: &str,
    within: Duration,
) -> io::Result<(usize, usize)> {
    let within_ms = within.as_millis().try_into().unwrap_or(u32::MAX);
    let verb = RootVerb::Kill { groups: groups.to_vec(), mark: mark.to_owned(), within_ms };
    match ask(helper, &verb, &[])?.0 {
        RootAnswer::Killed { found, left } => Ok((found, left)),
        answer => Err(odd(&answer)),
    }
}

pub(crate) fn enclose(helper: &Helper, pid: i32, scope: &Scope) -> Result<PathBuf, ScopeError> {
    match ask(helper, &RootVerb::Enclose { pid, scope: scope.clone() }, &[])?.0 {
        RootAnswer::Enclosed { group } => Ok(group),
        answer => Err(odd(&answer).into()),
    }
}

pub(crate) fn supervise(helper: &Helper, dir: &Path, uid: u32, greeting: &OwnedFd) -> io::Result<Started> {
    let replica = dir.file_name().and_then(|name| name.to_str()).ok_or(ErrorKind::InvalidFilename)?;
    started(ask(helper, &RootVerb::Supervise { replica: replica.to_owned(), uid }, &[greeting.as_fd()])?)
}

pub(crate) fn build(helper: &Helper, program: &Program, streams: &[OwnedFd; 3]) -> io::Result<Started> {
    started(ask(helper, &RootVerb::Build(program.clone()), &streams.each_ref().map(AsFd::as_fd))?)
}

fn started((answer, mut got, end): (RootAnswer, Vec<OwnedFd>, OwnedFd)) -> io::Result<Started> {
    match (answer, got.pop()) {
        (RootAnswer::Started { pid }, Some(pidfd)) => {
            setsockopt(&end, sockopt::ReceiveTimeout, &TimeVal::seconds(0))?;
            Ok(Started { pid, pidfd, end })
        }
        (answer, _) => Err(odd(&answer)),
    }
}

pub(crate) fn wait(started: &Started) -> io::Result<ExitStatus> {
    match wire::receive(started.end.as_fd())?.ok_or(ErrorKind::UnexpectedEof)?.0 {
        RootAnswer::Ended { status } => Ok(ExitStatus::from_raw(status)),
        answer => Err(odd(&answer)),
    }
}
