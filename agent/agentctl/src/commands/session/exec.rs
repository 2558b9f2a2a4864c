//! `exec`: a command in the surroundings of a job.
//!
//! At a terminal the command has one, too, and every key is its own. Otherwise it has pipes, and the signals that this
//! process gets are passed on.

use std::future::pending;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;
use std::thread;

use agent_proto::v1;
use agent_proto::v1::session_input::More as Input;
use agent_proto::v1::session_open::To;
use agent_proto::v1::session_output::More;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Inputs, OpenSession, PIECE, SessionPlace, input};
use crate::cli::{ExecArgs, variable};
use crate::client::{Client, Target};
use crate::failure::{DETACHED, Failure};

/// Runs a command in a job; the exit code is the command's.
pub(super) async fn exec(args: ExecArgs, to: Option<&Target>) -> Result<ExitCode, Failure> {
    let client = Client::find(to).await?;
    let place = SessionPlace { job: client.named(&args.job).await?, rank: args.rank };
    let with_terminal = !args.no_terminal && io::stdin().is_terminal() && io::stdout().is_terminal();
    let command = v1::SessionCommand {
        argv: args.command,
        terminal: with_terminal.then(terminal_size),
        term: variable("TERM").unwrap_or_default(),
    };
    let mut signals = Signals::new(with_terminal)?;
    let mut session = OpenSession::open(&client, &place, To::Command(command)).await?;
    let mut raw = None;
    let mut interrupted = false;
    loop {
        let more = tokio::select! {
            more = session.next() => more?,
            caught = signals.next() => match caught {
                Caught::Size => {
                    let _ = session.inputs.try_send(input(Input::Size(terminal_size()))); // its end is seen above
                    continue;
                }
                Caught::Signal(number) => {
                    let again = std::mem::replace(&mut interrupted, true) || with_terminal;
                    // Where what was sent before waits, the end of the connection is faster.
                    if again || session.inputs.try_send(input(Input::Signal(number))).is_err() {
                        return Ok(ExitCode::from(DETACHED));
                    }
                    continue;
                }
            },
        };
        match more {
            More::Ready(_) => {
                raw = if with_terminal { Raw::enter() } else { None };
                let inputs = session.inputs.clone();
                thread::spawn(move || read_input(&inputs));
            }
            More::Out(data) => write(data, false).await?,
            More::Err(data) => write(data, true).await?,
            More::End(end) => {
                drop(raw);
                return Ok(ExitCode::from(u8::try_from(end.code).unwrap_or(1)));
            }
            More::Failed(_) => {} // an error of `next`
        }
    }
}

/// Sends standard input until its end.
fn read_input(inputs: &Inputs) {
    let mut stdin = io::stdin().lock();
    let mut piece = vec![0; PIECE];
    loop {
        let more = match stdin.read(&mut piece) {
            Ok(length @ 1..) => Input::Data(piece[..length].to_vec()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => Input::EndOfData(v1::SessionEof {}),
        };
        let is_last = matches!(more, Input::EndOfData(_));
        if inputs.blocking_send(input(more)).is_err() || is_last {
            return;
        }
    }
}

/// Writes what the command wrote, unchanged, without keeping the session from going on meanwhile.
async fn write(data: Vec<u8>, is_error: bool) -> Result<(), Failure> {
    let write = move || {
        if is_error {
            io::stderr().lock().write_all(&data)
        } else {
            let mut stdout = io::stdout().lock();
            stdout.write_all(&data).and_then(|()| stdout.flush())
        }
    };
    let written = agent_blocking::blocking_io(write).await;
    written.map_err(|_| Failure::PipeClosed)
}

fn terminal_size() -> v1::SessionSize {
    let size = tcgetwinsize(io::stdout()).map_or((24, 80), |size| (size.ws_row, size.ws_col));
    v1::SessionSize { rows: size.0.into(), columns: size.1.into() }
}

/// A terminal that passes every key on, until this is dropped.
struct Raw(Termios);

impl Raw {
    fn enter() -> Option<Raw> {
        let usual = tcgetattr(io::stdin()).ok()?;
        let mut raw = usual.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw).ok()?;
        Some(Raw(usual))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0); // the terminal may be gone
    }
}

enum Caught {
    /// The terminal has another size.
    Size,
    /// A signal, by its number.
    Signal(u32),
}

/// The signals that mean something to a session.
struct Signals {
    size: Option<Signal>,
    interrupt: Signal,
    terminate: Signal,
    quit: Signal,
    hangup: Signal,
}

impl Signals {
    fn new(with_terminal: bool) -> Result<Signals, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| {
                Failure::refused(
                    format!("cannot listen for signals: {error}"),
                    "close some programs and try again",
                )
            })
        };
        Ok(Signals {
            size: with_terminal.then(|| listen(SignalKind::window_change())).transpose()?,
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            quit: listen(SignalKind::quit())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Caught {
        let number = |kind: SignalKind| Caught::Signal(u32::try_from(kind.as_raw_value()).unwrap_or(0));
        let size = async {
            match &mut self.size {
                Some(size) => size.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = size => Caught::Size,
            _ = self.interrupt.recv() => number(SignalKind::interrupt()),
            _ = self.terminate.recv() => number(SignalKind::terminate()),
            _ = self.quit.recv() => number(SignalKind::quit()),
            _ = self.hangup.recv() => number(SignalKind::hangup()),
        }
    }
}
