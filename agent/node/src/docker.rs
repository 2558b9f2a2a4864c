//! Whether a container engine listens at its socket, and answers.
//!
//! A hung engine still accepts connections, so only an answer counts; every step has a deadline.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_millis(300);

/// The most that is read of the engine's description of itself, in bytes; it is far shorter.
const LONGEST: u64 = 1 << 20;

/// Hooks that make the engine pass GPUs on although it lists no runtime for them, where packages install them.
const HOOKS: [&str; 2] = ["/usr/bin/nvidia-container-runtime-hook", "/usr/bin/nvidia-container-toolkit"];

/// The result of asking.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// It answered.
    Answers {
        /// Whether it can give GPUs to containers; `None` when it did not answer that in time.
        gpus: Option<bool>,
    },
    /// There is no socket, or nobody listens at it.
    Absent,
    /// This user may not ask.
    Denied,
    /// It took the connection but did not answer in time, or answered something else.
    Silent,
}

/// Asks the engine behind a socket whether it is well.
pub(crate) fn ask(socket: &Path) -> Engine {
    match ping(socket) {
        Ok(true) => Engine::Answers { gpus: information(socket).map(|told| passes_gpus(&told)) },
        Ok(false) => Engine::Silent,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Engine::Denied,
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Engine::Silent,
            _ => Engine::Absent,
        },
    }
}

fn ping(path: &Path) -> io::Result<bool> {
    let mut stream = begin(path, "/_ping")?;
    let mut start = [0; 12];
    stream.read_exact(&mut start)?;
    Ok(is_well(&start))
}

/// The engine's description of itself; `None` if it does not arrive in time.
fn information(path: &Path) -> Option<serde_json::Value> {
    let (end, mut stream) = (Instant::now() + PATIENCE, begin(path, "/info").ok()?);
    let (mut answer, mut piece) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        stream.set_read_timeout(Some(left)).ok()?;
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => answer.extend_from_slice(&piece[..read]),
            Err(_) => return None,
        }
        if answer.len() as u64 > LONGEST {
            return None;
        }
    }
    let head = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    is_well(answer.get(..12)?).then(|| serde_json::from_slice(&answer[head + 4..]).ok())?
}

/// Sends a request. It is sent as HTTP/1.0, so that the answer arrives whole and ends the connection.
fn begin(path: &Path, what: &str) -> io::Result<UnixStream> {
    // A blocking connect waits for as long as the listener's backlog is full.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let mut stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("GET {what} HTTP/1.0\r\nHost: docker\r\n\r\n").as_bytes())?;
    Ok(stream)
}

fn is_well(status: &[u8]) -> bool {
    status.starts_with(b"HTTP/1.") && status.ends_with(b" 200")
}

/// A runtime for GPUs is configured, the engine lists GPU devices, or the hook that it looks for is installed.
fn passes_gpus(told: &serde_json::Value) -> bool {
    let is_nvidia = |device: &serde_json::Value| {
        device["ID"].as_str().is_some_and(|name| name.starts_with("nvidia.com/gpu"))
    };
    told["Runtimes"].as_object().is_some_and(|known| known.keys().any(|name| name.starts_with("nvidia")))
        || told["DiscoveredDevices"].as_array().is_some_and(|devices| devices.iter().any(is_nvidia))
        || HOOKS.iter().any(|hook| Path::new(hook).exists())
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
        // It is gone before it is asked for more.
        assert_eq!(ask(&path), Engine::Answers { gpus: None });
        server.join().unwrap();
        assert_eq!(ask(&path), Engine::Absent);
    }

    #[test]
    fn test_engine_tells_whether_it_passes_gpus_on() {
        for (body, passes) in [
            (r#"{"Runtimes":{"nvidia":{"path":"nvidia-container-runtime"},"runc":{}}}"#, Some(true)),
            (r#"{"DiscoveredDevices":[{"Source":"cdi","ID":"nvidia.com/gpu=all"}]}"#, Some(true)),
            (r#"{"Runtimes":{"runc":{"path":"runc"}}}"#, Some(HOOKS.iter().any(|at| Path::new(at).exists()))),
            (r#"{"Runtimes":{"#, None),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("docker.sock");
            let listener = UnixListener::bind(&path).unwrap();
            let server = std::thread::spawn(move || {
                let (mut client, _) = listener.accept().unwrap();
                let mut question = [0; 64];
                assert!(
                    client.read(&mut question).unwrap() > 0
                        && question.starts_with(b"GET /info HTTP/1.0\r\n")
                );
                write!(client, "HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{body}").unwrap();
            });
            let told = information(&path);
            server.join().unwrap();
            assert_eq!(told.map(|told| passes_gpus(&told)), passes, "{body}");
        }
    }
}
