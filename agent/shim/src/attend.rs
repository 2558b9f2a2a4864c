//! `agent-shim attend`: the attendant, a process of the job that opens sessions in it ([`agent_shim::session`]).
//!
//! It is started beside the command, so it has the job's user, control groups, mounts, limits and variables, whatever
//! the machine allowed; later nobody could give these, because the supervisor has given up its rights. On standard
//! input it has a socket, by which the supervisor hands connections over. A thread serves each of them.
//!
//! It is killed when the command has ended, and what it started is ended like everything else of the job.

mod command;
mod port;

use std::io::{self, Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use agent_shim::session::{
    FromJob, FromUser, HEAD, MOST, SessionFailure, SessionTarget, data_head, read_frame,
};
use agent_shim::sys;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Sessions at a time.
const SESSIONS: usize = 64;

/// How long the daemon may take to say what it wants.
const ASKS: Duration = Duration::from_secs(20);

/// Serves sessions until the supervisor is gone.
pub(crate) fn run() -> ExitCode {
    static OPEN: AtomicUsize = AtomicUsize::new(0);
    while let Ok(connection) = sys::receive_descriptor(io::stdin()) {
        let Ok(link) = SessionLink::new(UnixStream::from(connection)) else { continue };
        if OPEN.load(Ordering::Relaxed) >= SESSIONS {
            link.refuse(format!("{SESSIONS} sessions are open in this job"), None);
            continue;
        }
        OPEN.fetch_add(1, Ordering::Relaxed);
        let served = thread::Builder::new().spawn(move || {
            serve(&link);
            OPEN.fetch_sub(1, Ordering::Relaxed);
        });
        if served.is_err() {
            OPEN.fetch_sub(1, Ordering::Relaxed); // the job has as many threads as it may have
        }
    }
    ExitCode::SUCCESS
}

fn serve(link: &SessionLink) {
    match link.first() {
        Ok(SessionTarget::Command { argv, terminal, term }) => command::run(link, &argv, terminal, &term),
        Ok(SessionTarget::Port(port)) => port::run(link, port),
        Err(error) => link.refuse(format!("nobody said what to open: {error}"), None),
    }
}

/// The connection of a session.
#[derive(Debug)]
struct SessionLink {
    stream: UnixStream,
    /// A frame is written whole.
    writes: Mutex<()>,
}

impl SessionLink {
    fn new(stream: UnixStream) -> io::Result<SessionLink> {
        stream.set_nonblocking(false)?;
        Ok(SessionLink { stream, writes: Mutex::new(()) })
    }

    fn first(&self) -> io::Result<SessionTarget> {
        self.stream.set_read_timeout(Some(ASKS))?;
        let first = self.next()?;
        self.stream.set_read_timeout(None)?;
        match first {
            Some(FromUser::Open(to)) => Ok(to),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// The next frame; `None` when the other side is gone.
    fn next(&self) -> io::Result<Option<FromUser>> {
        read_frame(&mut &self.stream)?.map(|(kind, bytes)| FromUser::of_frame(kind, bytes)).transpose()
    }

    fn send(&self, frame: &FromJob) -> io::Result<()> {
        self.write(&frame.to_frame())
    }

    fn write(&self, frame: &[u8]) -> io::Result<()> {
        let _whole = self.writes.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.stream).write_all(frame)
    }

    fn refuse(&self, why: String, code: Option<u8>) {
        let _ = self.send(&FromJob::Failed(SessionFailure { why, code })); // whoever asked may be gone
    }

    /// Sends what can be read until its end, or until the connection ends.
    fn relay(&self, mut from: impl Read + AsFd, of_standard_error: bool) {
        let mut piece = vec![0; HEAD + MOST];
        loop {
            let fd = from.as_fd();
            // The connection reports its end whatever is asked of it.
            let mut fds = [fd, self.stream.as_fd()].map(|fd| PollFd::new(fd, PollFlags::empty()));
            fds[0].set_events(PollFlags::POLLIN);
            match poll(&mut fds, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                Ok(_) if !fds[1].any().unwrap_or(false) => {}
                Ok(_) | Err(_) => return,
            }
            let length = match from.read(&mut piece[HEAD..]) {
                Ok(length @ 1..) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => return, // a terminal ends with an error
            };
            piece[..HEAD].copy_from_slice(&data_head(of_standard_error, length));
            if self.write(&piece[..HEAD + length]).is_err() {
                return;
            }
        }
    }
}
