//! The supervisor's end of the attendant ([`crate::attend`]), the process of the job that opens sessions in it.
//!
//! A job without one runs as well: then sessions are refused. It belongs to the job's user, so nothing that it says is
//! trusted, and nothing waits for it.

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use agent_shim::sys;
use agent_shim::wire::Event;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::clients::Clients;
use crate::notes::Notes;

/// How long its number may take, which was sent before: only what is frozen has not.
const TOLD: Duration = Duration::from_secs(5);

/// How long it may take to be gone once it was killed; after that it counts like any process that is left.
const GONE: Duration = Duration::from_millis(500);

/// How often its end is looked for.
const LOOK: Duration = Duration::from_micros(200);

/// The attendant of a job, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Attendant {
    link: Option<UnixStream>,
    /// Its number; it is a child of this process from its start on.
    pid: Option<Pid>,
}

impl Attendant {
    /// One that will be started with this end of its socket.
    pub(crate) fn prepare() -> io::Result<(Attendant, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((Attendant { link: Some(ours), pid: None }, theirs.into()))
    }

    /// Takes in its number, which it sent before the command was executed, if it was started.
    pub(crate) fn started(mut self) -> io::Result<Attendant> {
        let mut number = [0; 4];
        if let Some(link) = &mut self.link {
            link.set_read_timeout(Some(TOLD))?;
            link.read_exact(&mut number)?;
            link.set_nonblocking(true)?;
        }
        self.pid = Some(Pid::from_raw(i32::from_ne_bytes(number)));
        Ok(self)
    }

    /// Hands the connection of a client over to it, if the command `runs`.
    pub(crate) fn open(&self, clients: &mut Clients, place: usize, runs: bool, notes: &Notes) {
        let refused = |why: &str| Event::Refused { why: why.to_owned() };
        let link = match &self.link {
            _ if !runs => return clients.answer(place, &refused("the command does not run")),
            Some(link) if self.pid.is_some() => link,
            _ => {
                let why = "the process of the job that opens sessions is not there";
                return clients.answer(place, &refused(why));
            }
        };
        clients.answer(place, &Event::Attached);
        if let Some(connection) = clients.release(place)
            && let Err(error) = sys::send_descriptor(link.as_fd(), connection.as_fd())
        {
            notes.say(format_args!("a session was not opened: {error}"));
        }
    }

    /// A child of this process ended: it may have been this one.
    pub(crate) fn reaped(&mut self, pid: i32) {
        if self.pid == Some(Pid::from_raw(pid)) {
            *self = Attendant::default();
        }
    }

    /// Ends it: the command has ended, and it is no process that the command left.
    pub(crate) fn end(&mut self) {
        let Some(pid) = std::mem::take(self).pid else { return };
        let _ = kill(pid, Signal::SIGKILL); // not reaped yet, so the number is its own
        let end = Instant::now() + GONE;
        while waitpid(pid, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive) && Instant::now() < end {
            thread::sleep(LOOK);
        }
    }
}
