//! The way to a server that is far away: a port that passes everything on, late or step by step.
//!
//! Step by step, it passes on what the client says only when that has stopped talking, and then waits for the server in
//! the same way. So whatever the client sends without waiting for an answer goes in one step, and the number of steps is
//! the number of round trips, however fast the machine is. What TCP itself waits for on a real wire, it does not show:
//! [`Report::sent`] tells whether the messages fit into its first window.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::client::runtime;

/// How long a client must be silent until it counts as waiting: longer than it reads a directory.
const CLIENT_RESTS: Duration = Duration::from_millis(1000);
/// The same for the server.
const SERVER_RESTS: Duration = Duration::from_millis(300);

/// What the way does with what comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Passes it on at once.
    Free,
    /// Passes it on after half of this time.
    Late(Duration),
    /// See the module.
    Steps,
}

/// What was counted since the pace was set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Round trips, with that of each new connection of TCP.
    pub trips: u32,
    /// Bytes that clients sent.
    pub sent: u64,
}

#[derive(Debug)]
struct Shared {
    pace: Pace,
    report: Report,
}

/// The port.
#[derive(Debug)]
pub struct FarServer {
    port: u16,
    shared: Arc<Mutex<Shared>>,
    task: tokio::task::JoinHandle<()>,
}

impl FarServer {
    /// A way to the server that listens there; it is free at first.
    #[track_caller]
    pub fn new(server: SocketAddr) -> FarServer {
        let bind = TcpListener::bind(("127.0.0.1", 0));
        let listener = runtime().block_on(bind).expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let shared = Arc::new(Mutex::new(Shared { pace: Pace::Free, report: Report::default() }));
        let known = Arc::clone(&shared);
        let task = runtime().spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                runtime().spawn(carry(near, server, Arc::clone(&known)));
            }
        });
        FarServer { port, shared, task }
    }

    /// Where it listens, on the loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets the pace of new connections, and counts from 0.
    pub fn set(&self, pace: Pace) {
        *lock(&self.shared) = Shared { pace, report: Report::default() };
    }

    /// What was counted.
    pub fn report(&self) -> Report {
        lock(&self.shared).report
    }
}

impl Drop for FarServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(shared: &Mutex<Shared>) -> std::sync::MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn carry(near: TcpStream, server: SocketAddr, shared: Arc<Mutex<Shared>>) -> io::Result<()> {
    let pace = {
        let mut shared = lock(&shared);
        shared.report.trips += 1;
        shared.pace
    };
    let far = TcpStream::connect(server).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
    match pace {
        Pace::Free => race(from_near, to_near, from_far, to_far, Duration::ZERO).await,
        Pace::Late(round) => {
            sleep(round).await; // the connection of TCP
            race(from_near, to_near, from_far, to_far, round / 2).await
        }
        Pace::Steps => step(from_near, to_near, from_far, to_far, &shared).await,
    }
}

/// Both directions beside each other, until one ends.
async fn race(
    from_near: impl AsyncRead + Unpin + Send + 'static,
    to_near: impl AsyncWrite + Unpin + Send + 'static,
    from_far: impl AsyncRead + Unpin + Send + 'static,
    to_far: impl AsyncWrite + Unpin + Send + 'static,
    delay: Duration,
) -> io::Result<()> {
    tokio::select! {
        ended = pass(from_near, to_far, delay) => ended,
        ended = pass(from_far, to_near, delay) => ended,
    }
}

/// Passes on what comes, each piece after the delay; what comes meanwhile is not held up by it.
async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin + Send + 'static,
    delay: Duration,
) -> io::Result<()> {
    let (sender, mut pieces) = tokio::sync::mpsc::unbounded_channel::<(tokio::time::Instant, Vec<u8>)>();
    let write = async move {
        while let Some((due, piece)) = pieces.recv().await {
            tokio::time::sleep_until(due).await;
            to.write_all(&piece).await?;
        }
        io::Result::Ok(())
    };
    let read = async move {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let length = from.read(&mut buffer).await?;
            let piece = (tokio::time::Instant::now() + delay, buffer[..length].to_vec());
            if length == 0 || sender.send(piece).is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let (read, written) = tokio::join!(read, write);
    read.and(written)
}

async fn step(
    mut from_near: impl AsyncRead + Unpin,
    mut to_near: impl AsyncWrite + Unpin,
    mut from_far: impl AsyncRead + Unpin,
    mut to_far: impl AsyncWrite + Unpin,
    shared: &Mutex<Shared>,
) -> io::Result<()> {
    let (mut near, mut far) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        tokio::select! {
            length = from_near.read(&mut near) => {
                let first = near[..length?].to_vec();
                let said = all_of(first, &mut from_near, CLIENT_RESTS).await?;
                if said.is_empty() {
                    return Ok(());
                }
                to_far.write_all(&said).await?;
                let mut shared = lock(shared);
                shared.report.trips += 1;
                shared.report.sent += said.len() as u64;
            }
            length = from_far.read(&mut far) => {
                let first = far[..length?].to_vec();
                let said = all_of(first, &mut from_far, SERVER_RESTS).await?;
                if said.is_empty() {
                    return Ok(());
                }
                to_near.write_all(&said).await?;
            }
        }
    }
}

/// The first bytes, and what follows until there is silence.
async fn all_of(
    mut said: Vec<u8>,
    from: &mut (impl AsyncRead + Unpin),
    rests: Duration,
) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 64 << 10];
    while !said.is_empty() {
        match timeout(rests, from.read(&mut buffer)).await {
            Ok(length) => match length? {
                0 => break,
                length => said.extend_from_slice(&buffer[..length]),
            },
            Err(_) => break,
        }
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net;

    use super::*;

    #[test]
    fn test_what_is_sent_without_waiting_is_one_trip() {
        let server = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let far = FarServer::new(server.local_addr().unwrap());
        far.set(Pace::Steps);
        let answers = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            let mut heard = [0; 2];
            for _ in 0..2 {
                stream.read_exact(&mut heard).unwrap();
                stream.write_all(b"ok").unwrap();
            }
        });
        let mut client = net::TcpStream::connect(("127.0.0.1", far.port())).unwrap();
        let mut answer = [0; 2];
        for _ in 0..2 {
            client.write_all(b"a").unwrap();
            std::thread::sleep(Duration::from_millis(100));
            client.write_all(b"b").unwrap();
            client.read_exact(&mut answer).unwrap();
        }
        answers.join().unwrap();
        assert_eq!(far.report(), Report { trips: 3, sent: 4 }, "the connection, and two questions");
    }
}
