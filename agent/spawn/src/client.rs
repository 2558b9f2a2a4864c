//! The daemon's side of the verbs: one connection to the helper for each.
//!
//! A helper that is being restarted, is stopped or hangs is waited for, and [`away`] says so meanwhile. Decided here
//! alone, so that no caller takes the helper's absence for a fault of what it asked for.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::wire::{self, GivenPart, RootAnswer, RootVerb, TakenPart};
use crate::{Ended, Program, Scope, ScopeError, Started};

/// How long a helper may take to do what it is asked; giving a large tree takes longest.
const ANSWER: Duration = Duration::from_secs(600);

/// How long a helper that is not there is waited for. Then whoever asked has an error.
const PATIENCE: Duration = Duration::from_secs(600);

/// The pause before it is asked again.
const AGAIN: Duration = Duration::from_millis(200);

/// After so long without an answer it is asked whether it is there at all.
const LOOK: Duration = Duration::from_secs(5);

/// How long it may take to say that.
const GREETING: Duration = Duration::from_secs(2);

/// Since when the helper does not answer, and what shows that.
static AWAY: Mutex<Option<(Instant, String)>> = Mutex::new(None);

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

/// Why there is no answer.
enum Unanswered {
    /// Nobody has the request: nobody listens.
    Away(io::Error),
    /// It ended, or closed the connection, with the request.
    Lost(io::Error),
    Failed(io::Error),
}

impl From<io::Error> for Unanswered {
    fn from(error: io::Error) -> Unanswered {
        match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof => {
                Unanswered::Lost(error)
            }
            _ => Unanswered::Failed(error),
        }
    }
}

type Answered = (RootAnswer, Vec<OwnedFd>, OwnedFd);

/// Asks until there is an answer: a helper that is being restarted is there in a moment. Every verb but `copy`, which
/// goes into an empty directory, may be done twice.
fn ask(helper: &Helper, verb: &RootVerb, descriptors: &[BorrowedFd<'_>]) -> io::Result<Answered> {
    let patience = match verb {
        RootVerb::Kill { within_ms, .. } => Duration::from_millis((*within_ms).into()) + GREETING,
        _ => PATIENCE,
    };
    let begun = Instant::now();
    loop {
        let error = match attempt(helper, verb, descriptors) {
            Ok(answered) => {
                note(None);
                return Ok(answered);
            }
            Err(Unanswered::Failed(error)) => return Err(error),
            Err(Unanswered::Lost(error)) if matches!(verb, RootVerb::Copy { .. }) => return Err(error),
            Err(Unanswered::Lost(error) | Unanswered::Away(error)) => error,
        };
        if begun.elapsed() >= patience {
            return Err(error);
        }
        note(Some(&error));
        std::thread::sleep(AGAIN);
    }
}

fn attempt(helper: &Helper, verb: &RootVerb, descriptors: &[BorrowedFd<'_>]) -> Result<Answered, Unanswered> {
    let stream = connected(helper, LOOK).map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied => Unanswered::Failed(error),
        _ => Unanswered::Away(error),
    })?;
    wire::send(stream.as_fd(), verb, descriptors)?;
    let begun = Instant::now();
    loop {
        match wire::receive(stream.as_fd()) {
            Ok(received) => {
                let (answer, got) = received.ok_or_else(|| io::Error::from(ErrorKind::UnexpectedEof))?;
                return Ok((answer, got, stream));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                what_is_wrong(helper);
                if begun.elapsed() >= ANSWER {
                    return Err(Unanswered::Failed(ErrorKind::TimedOut.into()));
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A connection on which nothing takes longer than `within`.
fn connected(helper: &Helper, within: Duration) -> io::Result<OwnedFd> {
    let stream = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    let limit = TimeVal::seconds(within.as_secs() as i64);
    setsockopt(&stream, sockopt::SendTimeout, &limit)?;
    setsockopt(&stream, sockopt::ReceiveTimeout, &limit)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(&helper.socket)?).map_err(|errno| {
        let error = io::Error::from(errno);
        io::Error::new(error.kind(), format!("nobody answers at {}: {error}", helper.socket.display()))
    })?;
    Ok(stream)
}

fn greet(helper: &Helper) -> io::Result<()> {
    let stream = connected(helper, GREETING)?;
    wire::send(stream.as_fd(), &RootVerb::Greet, &[])?;
    match wire::receive::<RootAnswer>(stream.as_fd()) {
        Ok(Some((RootAnswer::Done, _))) => Ok(()),
        Ok(Some((answer, _))) => Err(odd(&answer)),
        Ok(None) => Err(io::Error::from(ErrorKind::UnexpectedEof)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            let what = format!("it said nothing for {} s", GREETING.as_secs());
            Err(io::Error::new(ErrorKind::TimedOut, what))
        }
        Err(error) => Err(error),
    }
}

/// Asks the helper whether it is there; if not, what is wrong.
pub(crate) fn what_is_wrong(helper: &Helper) -> Option<String> {
    let greeted = greet(helper);
    note(greeted.as_ref().err());
    away()
}

/// What is known to be wrong with the helper.
pub(crate) fn away() -> Option<String> {
    let away = AWAY.lock().unwrap_or_else(PoisonError::into_inner);
    let (since, why) = away.as_ref()?;
    Some(format!("agent-spawn does not answer since {} s: {why}", since.elapsed().as_secs()))
}

fn note(error: Option<&io::Error>) {
    let mut away = AWAY.lock().unwrap_or_else(PoisonError::into_inner);
    *away = error.map(|error| {
        let since = away.as_ref().map_or_else(Instant::now, |(since, _)| *since);
        (since, error.to_string())
    });
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

fn done((answer, ..): Answered) -> io::Result<()> {
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

fn started((answer, mut got, end): Answered) -> io::Result<Started> {
    match (answer, got.pop()) {
        (RootAnswer::Started { pid }, Some(pidfd)) => {
            setsockopt(&end, sockopt::ReceiveTimeout, &TimeVal::seconds(0))?;
            Ok(Started { pid, pidfd, end })
        }
        (answer, _) => Err(odd(&answer)),
    }
}

/// A helper that has ended took its builders with it, and how a supervisor ended nobody knows.
pub(crate) fn wait(started: &Started) -> io::Result<Ended> {
    let lost = Ended { status: ExitStatus::from_raw(Signal::SIGKILL as i32), out_of_memory: false };
    match wire::receive(started.end.as_fd()) {
        Ok(Some((RootAnswer::Ended { status, out_of_memory }, _))) => {
            Ok(Ended { status: ExitStatus::from_raw(status), out_of_memory })
        }
        Ok(Some((answer, _))) => Err(odd(&answer)),
        Ok(None) => Ok(lost),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(lost),
        Err(error) => Err(error),
    }
}
