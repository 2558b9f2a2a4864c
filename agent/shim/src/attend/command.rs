//! A command of a session, on a terminal or on pipes.
//!
//! It leads a session of its own, so its signals reach what it started and nothing else. When the connection ends, it
//! is hung up like a program whose terminal is gone, and killed if it stays.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use agent_shim::session::{FromJob, FromUser, TerminalSize};
use agent_shim::sys;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, tcgetpgrp};

use super::SessionLink;

/// How long a command may take to end after its connection ended.
const HANGUP: Duration = Duration::from_secs(5);

/// How long output is read after the command ended: a process that it left may hold it open.
const REST: Duration = Duration::from_secs(2);

/// How often the end of a thread is looked for.
const LOOK: Duration = Duration::from_millis(2);

/// Runs a command to its end, or to that of the connection.
pub(super) fn run(link: &SessionLink, argv: &[String], terminal: Option<TerminalSize>, term: &str) {
    let (started, files) = match start(argv, terminal, term) {
        Ok(started) => started,
        Err(error) => {
            let code = if error.kind() == ErrorKind::NotFound { 127 } else { 126 };
            let program = argv.first().map_or("", String::as_str);
            return link.refuse(format!("could not start `{program}`: {error}"), Some(code));
        }
    };
    let group = CommandGroup { pid: started.id() as i32, ended: Mutex::new(false), terminal: files.terminal };
    let _ = link.send(&FromJob::Ready); // the first read finds out that the other side is gone
    thread::scope(|scope| {
        let outputs: Vec<_> = files
            .outputs
            .into_iter()
            .map(|(output, is_error)| scope.spawn(move || link.relay(output, is_error)))
            .collect();
        let input = files.input;
        scope.spawn(|| {
            let over = obey(link, &group, input);
            if over.is_err() || !group.has_ended() {
                group.hang_up();
            }
        });
        let code = group.wait(started);
        let end = Instant::now() + REST;
        while outputs.iter().any(|output| !output.is_finished()) && Instant::now() < end {
            thread::sleep(LOOK);
        }
        let _ = link.send(&FromJob::End(code));
        // Ends the threads that still read or write.
        let _ = link.stream.shutdown(std::net::Shutdown::Both);
    });
}

/// What a command reads and writes, as seen from here.
struct Files {
    input: Option<OwnedFd>,
    outputs: Vec<(File, bool)>,
    terminal: Option<Arc<OwnedFd>>,
}

fn start(argv: &[String], terminal: Option<TerminalSize>, term: &str) -> io::Result<(Child, Files)> {
    let [program, args @ ..] = argv else { return Err(ErrorKind::InvalidInput.into()) };
    #[allow(clippy::disallowed_methods, reason = "starts a process of a job, in the job")]
    let mut command = Command::new(program);
    command.args(args);
    sys::lead_session(&mut command, terminal.is_some());
    let Some(size) = terminal else {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let out = child.stdout.take().map(|out| (File::from(OwnedFd::from(out)), false));
        let err = child.stderr.take().map(|err| (File::from(OwnedFd::from(err)), true));
        let input = child.stdin.take().map(OwnedFd::from);
        return Ok((child, Files { input, outputs: out.into_iter().chain(err).collect(), terminal: None }));
    };
    let (ours, theirs) = open_terminal(size)?;
    let (input, output) = (ours.try_clone()?, ours.try_clone()?);
    command.stdin(theirs.try_clone()?).stdout(theirs.try_clone()?).stderr(theirs);
    if !term.is_empty() {
        command.env("TERM", term);
    }
    let child = command.spawn()?;
    drop(command); // its ends of the terminal, which would keep it open
    let files =
        Files { input: Some(input), outputs: vec![(output.into(), false)], terminal: Some(Arc::new(ours)) };
    Ok((child, files))
}

/// Both sides of a new terminal, which belongs to the job's user.
fn open_terminal(size: TerminalSize) -> io::Result<(OwnedFd, OwnedFd)> {
    let ours = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let name = ptsname_r(&ours)?;
    let theirs = nix::fcntl::open(
        name.as_str(),
        OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC,
        nix::sys::stat::Mode::empty(),
    )?;
    let ours = OwnedFd::from(ours);
    sys::set_terminal_size(ours.as_fd(), size)?;
    Ok((ours, theirs))
}

/// Does what the user sends, until the connection ends.
fn obey(link: &SessionLink, group: &CommandGroup, mut input: Option<OwnedFd>) -> io::Result<()> {
    if let Some(input) = &input {
        fcntl(input, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    }
    while let Some(frame) = link.next()? {
        match frame {
            FromUser::Data(data) => {
                // A program that reads no more goes on.
                if input.as_ref().is_some_and(|input| feed(input, &data, link).is_err()) {
                    input = None;
                }
            }
            FromUser::EndOfData => input = None,
            FromUser::Size(size) => group.resize(size),
            FromUser::Signal(number) => group.signal(Signal::try_from(number)?),
            FromUser::Open(_) => return Err(ErrorKind::InvalidData.into()),
        }
    }
    Ok(())
}

/// Writes all of it, unless the connection ends meanwhile.
fn feed(input: &OwnedFd, mut data: &[u8], link: &SessionLink) -> io::Result<()> {
    while !data.is_empty() {
        match nix::unistd::write(input, data) {
            Ok(length) => data = &data[length..],
            Err(nix::errno::Errno::EINTR) => {}
            Err(nix::errno::Errno::EAGAIN) => {
                let mut fds = [
                    PollFd::new(input.as_fd(), PollFlags::POLLOUT),
                    PollFd::new(link.stream.as_fd(), PollFlags::empty()), // reports its end all the same
                ];
                poll(&mut fds, PollTimeout::NONE)?;
                if fds[1].any().unwrap_or(false) {
                    return Err(ErrorKind::ConnectionAborted.into());
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The command, and what it started.
struct CommandGroup {
    pid: i32,
    /// Its number may be another process's from then on.
    ended: Mutex<bool>,
    terminal: Option<Arc<OwnedFd>>,
}

impl CommandGroup {
    fn has_ended(&self) -> bool {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of the command; its exit code, as a shell reports it.
    fn wait(&self, mut child: Child) -> u8 {
        let pid = Pid::from_raw(self.pid);
        let ended = || waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        while ended() == Err(nix::errno::Errno::EINTR) {}
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        *ended = true;
        child.wait().map_or(1, crate::rank::code_of)
    }

    fn resize(&self, size: TerminalSize) {
        if let Some(terminal) = &self.terminal {
            let _ = sys::set_terminal_size(terminal.as_fd(), size); // it keeps its size then
        }
    }

    /// Sends a signal to the processes that a terminal would send it to.
    fn signal(&self, signal: Signal) {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *ended {
            return;
        }
        let foreground = self.terminal.as_ref().and_then(|terminal| tcgetpgrp(terminal.as_fd()).ok());
        let own = Pid::from_raw(self.pid);
        for group in [Some(own), foreground.filter(|group| *group != own && group.as_raw() > 1)] {
            let _ = group.map(|group| killpg(group, signal)); // one that is gone has ended
        }
    }

    /// The user is gone.
    fn hang_up(&self) {
        self.signal(Signal::SIGHUP);
        self.signal(Signal::SIGCONT);
        let end = Instant::now() + HANGUP;
        while !self.has_ended() && Instant::now() < end {
            thread::sleep(LOOK * 10);
        }
        self.signal(Signal::SIGKILL);
    }
}
