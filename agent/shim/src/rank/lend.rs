//! A rank that runs command lines for the `mpirun` of the first rank: both ends of the connection for that.
//!
//! `mpirun` uses [`rsh`] as its remote shell, with the arguments of `ssh`. The rank at the other end runs the command
//! line with its own variables, and returns its output and its exit code. So no machine needs a server for remote
//! shells, and the started processes are part of the job there: in its control group, as its user, in its container.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{ChildStderr, ChildStdout, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use agent_model::protocol::gang::Secret;
use agent_shim::gang::{GangLaunch, Host};

use super::FailedProcess;
use super::wire::{self, PIECE, Told};
use super::{RankError, code_of, command, own_words, quoted, say, write};

/// How long a connection, and the request on it, may take.
const ASKS: Duration = Duration::from_secs(20);
/// How long connecting to a rank is tried.
const THERE: Duration = Duration::from_secs(60);
/// Between two tries.
const AGAIN: Duration = Duration::from_millis(200);
/// How long the remaining output of an ended process is read.
const REST: Duration = Duration::from_secs(2);

/// The exit code of a remote shell that does not reach its machine.
const UNREACHED: u8 = 255;

/// The file with the order, and the program that is used as remote shell.
const ORDER: &str = "order.json";
const RSH: &str = "rsh";

/// Runs the command lines that the first rank sends, until this process is ended, or a process of the command has
/// failed here and `mpirun` does not react.
pub(super) fn run(order: &GangLaunch) -> Result<u8, RankError> {
    let own = order.hosts.get(order.rank as usize).cloned();
    let at = own.map_or(SocketAddr::from(([127, 0, 0, 1], 0)), |own| SocketAddr::new(own.address, own.port));
    let listener =
        TcpListener::bind(at).map_err(|source| RankError::Listen { at: at.to_string(), source })?;
    listener.set_nonblocking(true).map_err(RankError::Wait)?;
    let mut failure = FailedProcess::default();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let secret = order.secret.clone();
                thread::spawn(move || serve(stream, &secret));
            }
            Err(_) => thread::sleep(AGAIN),
        }
        if let Some(code) = failure.look() {
            return Ok(code);
        }
    }
}

fn serve(mut stream: TcpStream, secret: &Secret) {
    let heard = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(ASKS)))
        .and_then(|()| wire::asked(&mut stream, secret));
    let done = heard.and_then(|line| run_line(&line, &stream));
    if let Err(error) = done {
        say(&format!("somebody asked this rank to start something: {error}"));
    }
}

/// Runs a command line, and sends its output and exit code.
fn run_line(line: &str, stream: &TcpStream) -> io::Result<()> {
    let back = Arc::new(Mutex::new(stream.try_clone()?));
    let mut child = command(&["sh", "-c", line])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let out = child.stdout.take().map(|out: ChildStdout| relay(out, &back, Told::Out));
    let err = child.stderr.take().map(|err: ChildStderr| relay(err, &back, Told::Err));
    let status = child.wait()?;
    // A daemon that it left behind may hold them open.
    let end = Instant::now() + REST;
    while [&out, &err].into_iter().flatten().any(|thread| !thread.is_finished()) && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    let mut back = back.lock().unwrap_or_else(PoisonError::into_inner);
    wire::tell(&mut *back, &Told::Exit(code_of(status)))
}

fn relay(
    mut from: impl Read + Send + 'static,
    back: &Arc<Mutex<TcpStream>>,
    told: fn(Vec<u8>) -> Told,
) -> thread::JoinHandle<()> {
    let back = Arc::clone(back);
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        while let Ok(length) = from.read(&mut piece) {
            if length == 0 {
                return;
            }
            let mut back = back.lock().unwrap_or_else(PoisonError::into_inner);
            // The other rank may be gone; the process must not wait for that.
            let _ = wire::tell(&mut *back, &told(piece[..length].to_vec()));
        }
    })
}

/// Writes the program that `mpirun` uses as remote shell; returns its path.
pub(super) fn write_rsh(order: &GangLaunch) -> Result<String, RankError> {
    let failed = |source| RankError::Write { path: Path::new(super::FOLDER).join(RSH), source };
    let text = serde_json::to_vec(order).map_err(io::Error::other).map_err(failed)?;
    write(ORDER, &text, 0o600)?;
    let folder = std::env::current_dir().map_err(failed)?.join(super::FOLDER);
    let words = own_words().map_err(failed)?;
    let words: Vec<String> = words
        .iter()
        .map(OsStr::new)
        .chain([OsStr::new(agent_shim::RSH), folder.join(ORDER).as_os_str()])
        .map(quoted)
        .collect();
    write(RSH, format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" ")).as_bytes(), 0o700)?;
    Ok(folder.join(RSH).display().to_string())
}

/// `agent-shim rsh ORDER [-FLAGS] HOST WORD…`: has the rank of a host run a command line.
pub(crate) fn rsh(words: &[OsString]) -> ExitCode {
    let Some((order_at, words)) = words.split_first() else { return ExitCode::from(UNREACHED) };
    let order_at = Path::new(order_at);
    let text = |word: &OsString| word.to_string_lossy().into_owned();
    let mut words = words.iter().map(text).skip_while(|word| word.starts_with('-'));
    let (host, line) = (words.next().unwrap_or_default(), words.collect::<Vec<_>>().join(" "));
    let read = fs::read(order_at).and_then(|text| serde_json::from_slice(&text).map_err(io::Error::other));
    let order: GangLaunch = match read {
        Ok(order) => order,
        Err(error) => {
            say(&format!("the ranks of this job cannot be read: {error}"));
            return ExitCode::from(UNREACHED);
        }
    };
    let line = elsewhere(&line, order_at.with_file_name(RSH).as_path());
    let found = order.hosts.iter().position(|known| known.address.to_string() == host);
    match found {
        Some(rank) if rank != order.rank as usize => {
            let told = reach(&order.hosts[rank], &order.secret, &line).unwrap_or_else(|lost| {
                say(&match lost {
                    Lost::Before(error) => {
                        format!("rank {rank} at {host} does not start what it is asked to: {error}")
                    }
                    // It had: it came to its end, or its machine did.
                    Lost::After(error) => format!("rank {rank} at {host} is not heard any more: {error}"),
                });
                UNREACHED
            });
            ExitCode::from(told)
        }
        // On this machine no other rank is needed.
        Some(_) => {
            let error = command(&["sh", "-c", &line]).exec();
            say(&format!("a shell cannot be started: {error}"));
            ExitCode::from(UNREACHED)
        }
        None => {
            say(&format!("no rank of this job is at `{host}`"));
            ExitCode::from(UNREACHED)
        }
    }
}

/// A command line of `mpirun` for another machine, where the remote shell `rsh` of this one does not exist. The daemon
/// that Open MPI starts there uses none, and yet ends if the one it is told is not found: it is told one that is.
fn elsewhere(line: &str, rsh: &Path) -> String {
    line.replace(&*rsh.to_string_lossy(), "sh")
}

/// How the conversation with a rank broke.
#[derive(Debug)]
enum Lost {
    /// It was not asked, or did not take it.
    Before(io::Error),
    /// It had begun what it was asked to.
    After(io::Error),
}

/// Has a rank run a command line; the code with which that ended.
fn reach(host: &Host, secret: &Secret, line: &str) -> Result<u8, Lost> {
    let mut stream = begin(host, secret, line).map_err(Lost::Before)?;
    let mut heard = false;
    follow(&mut stream, &mut heard)
        .map_err(|error| if heard { Lost::After(error) } else { Lost::Before(error) })
}

fn begin(host: &Host, secret: &Secret, line: &str) -> io::Result<TcpStream> {
    let (at, end) = (SocketAddr::new(host.address, host.port), Instant::now() + THERE);
    let mut stream = loop {
        match TcpStream::connect_timeout(&at, ASKS) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= end => return Err(error),
            Err(_) => thread::sleep(AGAIN),
        }
    };
    stream.set_read_timeout(Some(ASKS))?;
    wire::ask(&mut stream, secret, line)?;
    stream.set_read_timeout(None)?;
    Ok(stream)
}

fn follow(stream: &mut TcpStream, heard: &mut bool) -> io::Result<u8> {
    loop {
        let told = wire::told(stream)?;
        *heard = true;
        match told {
            Told::Out(data) => io::stdout().write_all(&data).and_then(|()| io::stdout().flush())?,
            Told::Err(data) => io::stderr().write_all(&data)?,
            Told::Exit(code) => return Ok(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_no_path_of_this_machine_is_told_another_one() {
        let line = r#"orted -mca ess "env" --mca plm_rsh_agent "/w/a.1.0/.agentd/rsh" -mca plm "rsh""#;
        let told = elsewhere(line, Path::new("/w/a.1.0/.agentd/rsh"));
        assert_eq!(told, r#"orted -mca ess "env" --mca plm_rsh_agent "sh" -mca plm "rsh""#);
    }

    #[test]
    fn test_a_command_line_runs_elsewhere_and_tells_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let host = Host { address: at.ip(), port: at.port(), ports: (0, 0), slots: 1 };
        let secret = Secret::new("s");
        let known = secret.clone();
        thread::spawn(move || listener.incoming().flatten().for_each(|stream| serve(stream, &known)));
        assert_eq!(reach(&host, &secret, "exit 7").unwrap(), 7);
        assert_eq!(reach(&host, &secret, "kill -9 $$").unwrap(), 137);
        // One that leaves a daemon behind keeps nobody waiting for it.
        assert_eq!(reach(&host, &secret, "sleep 600 & exit 0").unwrap(), 0);
        assert!(reach(&host, &Secret::new("other"), "exit 0").is_err());
    }
}
