//! Is there a container engine behind its socket, and does it answer?
//!
//! A hung engine still accepts connections, so only an answer counts; every step has a deadline.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

const PATIENCE: Duration = Duration::from_millis(300);

/// What came of asking.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// It answered.
    Answers,
    /// There is no socket, or nobody behind it.
    Absent,
    /// This user may not ask.
    Denied,
    /// It took the connection but did not answer in time, or answered something else.
    Silent,
}

/// Asks the engine behind a socket whether it is well.
pub(crate) fn ask(socket: &Path) -> Engine {
    match ping(socket) {
        Ok(true) => Engine::Answers,
        Ok(false) => Engine::Silent,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Engine::Denied,
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Engine::Silent,
            _ => Engine::Absent,
        },
    }
}

fn ping(path: &Path) -> io::Result<bool> {
    // A blocking connect waits for as long as the listener's backlog is full.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let mut stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")?;
    let mut start = [0; 12];
    stream.read_exact(&mut start)?;
    Ok(start.starts_with(b"HTTP/1.") && start.ends_with(b" 200"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn test_engine_that_answers_is_told_from_one_that_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("docker.sock");
        assert_eq!(ask(&path), Engine::Absent);

        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(ask(&path), Engine::Silent);

        let _hung = listener.accept().unwrap();
        let server = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            client.write_all(b"HTTP/1.0 200 OK\r\n\r\nOK").unwrap();
            let _ = client.read(&mut [0; 512]);
        });
        assert_eq!(ask(&path), Engine::Answers);
        server.join().unwrap();
        assert_eq!(ask(&path), Engine::Absent);
    }
}
