//! The socket: its connections, their requests, and their unread output.
//!
//! Nothing here blocks and nothing grows: a watcher that does not read gets no further progress until it
//! has, and then only the latest. Only the user of the shim, and root, are served.

use std::fs::{self, Metadata};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use agent_model::failpoint;
use agent_shim::wire::{Event, MAX_LINE, Progress, Request};
use agent_shim::{JobDir, VERSION};
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Connections at a time; a further one is closed at once.
const MOST: usize = 16;

/// The shortest time between two progress events to one watcher.
const PACE: Duration = Duration::from_millis(2);

/// How long the end of a line is waited for before its beginning is told: many programs write the line feed by itself,
/// and whoever reads lines would get each of them a [`PACE`] later.
const REST_OF_LINE: Duration = Duration::from_millis(1);

/// How long the last event may take to be sent.
const FAREWELL: Duration = Duration::from_secs(1);

/// The socket and its connections.
#[derive(Debug)]
pub(crate) struct Clients {
    listener: UnixListener,
    /// The device and the number of the socket's file, by which it is known.
    file: (u64, u64),
    instance: String,
    clients: Vec<Client>,
    /// Since when the log ends within a line.
    line_since: Option<Instant>,
}

#[derive(Debug)]
struct Client {
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    watch: Option<Watch>,
    closed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Watch {
    sent: Option<Progress>,
    next_at: Instant,
}

impl Clients {
    /// Listens at `path`, in place of a shim that is gone.
    pub(crate) fn listen(path: &Path, instance: String) -> io::Result<Clients> {
        let (listener, file) = bind(path)?;
        Ok(Clients { listener, file, instance, clients: Vec::new(), line_since: None })
    }

    /// Listens there again if nobody could connect any more: somebody removed the socket, or took our rights from it.
    /// Returns whether that was so. Open connections are kept.
    pub(crate) fn mend(&mut self, path: &Path) -> io::Result<bool> {
        let usable = |found: &Metadata| {
            let own = nix::unistd::geteuid().as_raw();
            self.file == (found.dev(), found.ino()) && found.uid() == own && found.mode() & 0o600 == 0o600
        };
        if fs::symlink_metadata(path).is_ok_and(|found| usable(&found)) {
            return Ok(false);
        }
        JobDir::clear_way(path);
        (self.listener, self.file) = bind(path)?;
        Ok(true)
    }

    /// What to wait for: the listener, then each client in order.
    pub(crate) fn interests(&self) -> impl Iterator<Item = PollFd<'_>> {
        let of_client = |client: &Client| {
            if client.output.is_empty() { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT }
        };
        let clients =
            self.clients.iter().map(move |client| PollFd::new(client.stream.as_fd(), of_client(client)));
        std::iter::once(PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)).chain(clients)
    }

    /// Reads and writes what can be; `ready` is in the order of [`interests`](Self::interests). Returns the
    /// requests, each with the index of its client, which is valid until [`publish`](Self::publish).
    pub(crate) fn serve(&mut self, ready: &[bool], gone: bool) -> Vec<(usize, Request)> {
        let mut requests = Vec::new();
        for (place, client) in self.clients.iter_mut().enumerate() {
            if ready.get(place + 1).copied().unwrap_or(false) {
                client.flush();
                client.read(|request| requests.push((place, request)));
            }
        }
        if ready.first().copied().unwrap_or(false) {
            self.accept(gone);
        }
        requests
    }

    /// Answers a request.
    pub(crate) fn answer(&mut self, place: usize, event: &Event) {
        if let Some(client) = self.clients.get_mut(place) {
            if failpoint::hit("shim.socket.answer").is_err() {
                client.closed = true; // as a connection that breaks under the answer
                return;
            }
            client.say(event);
        }
    }

    /// Takes a connection out, for somebody else; `None` if its client has not read everything that was sent to it.
    pub(crate) fn release(&mut self, place: usize) -> Option<UnixStream> {
        let client = self.clients.get_mut(place)?;
        if client.closed || !client.output.is_empty() {
            return None;
        }
        client.closed = true;
        client.stream.try_clone().ok()
    }

    /// Starts to send progress.
    pub(crate) fn watch(&mut self, place: usize, now: Instant) {
        if let Some(client) = self.clients.get_mut(place) {
            client.watch = Some(Watch { sent: None, next_at: now });
        }
    }

    /// Removes closed connections, and sends progress to each watcher that does not have it, or returns when that
    /// may be done. The first change after the first event is sent at once: it may be the line somebody waits for.
    /// `in_line`: the log ends within a line.
    pub(crate) fn publish(&mut self, progress: Progress, in_line: bool, now: Instant) -> Option<Instant> {
        self.clients.retain(|client| !client.closed);
        self.line_since = in_line.then(|| self.line_since.unwrap_or(now));
        let line_told_at = self.line_since.map(|since| since + REST_OF_LINE);
        let mut later: Option<Instant> = None;
        for client in &mut self.clients {
            let Some(watch) = &mut client.watch else { continue };
            if watch.sent == Some(progress) || !client.output.is_empty() {
                continue; // one that has not read yet wakes us when it has
            }
            let due = line_told_at.map_or(watch.next_at, |told_at| told_at.max(watch.next_at));
            if now < due {
                later = Some(later.map_or(due, |other| other.min(due)));
                continue;
            }
            let first = watch.sent.replace(progress).is_none();
            watch.next_at = if first { now } else { now + PACE };
            client.say(&Event::Progress(progress));
        }
        later
    }

    /// Sends the final progress to each watcher, whatever it was sent last and when.
    pub(crate) fn publish_final(&mut self, progress: Progress) {
        for client in self.clients.iter_mut().filter(|client| client.watch.is_some()) {
            client.say(&Event::Progress(progress));
        }
    }

    /// Whether any client is kept waiting by a later end. One that does not watch yet is about to: the command may
    /// end before its daemon asks for more than the start.
    pub(crate) fn is_connected(&self) -> bool {
        self.clients.iter().any(|client| !client.closed)
    }

    /// Tells every client that the job is over.
    pub(crate) fn farewell(&mut self) {
        for client in self.clients.iter_mut() {
            // The connection ends here, so this may block for a moment.
            let _ = client.stream.set_nonblocking(false);
            let _ = client.stream.set_write_timeout(Some(FAREWELL));
            client.say(&Event::Ended);
        }
    }

    fn accept(&mut self, gone: bool) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.clients.len() >= MOST || !is_welcome(&stream) || stream.set_nonblocking(true).is_err() {
                continue;
            }
            let mut client =
                Client { stream, input: Vec::new(), output: Vec::new(), watch: None, closed: false };
            client.say(&Event::Hello { version: VERSION, instance: self.instance.clone(), gone });
            self.clients.push(client);
        }
    }
}

fn bind(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    failpoint::hit("shim.socket.listen")?;
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    let found = fs::symlink_metadata(path)?;
    Ok((listener, (found.dev(), found.ino())))
}

fn is_welcome(stream: &UnixStream) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    getsockopt(stream, PeerCredentials).is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}

impl Client {
    fn say(&mut self, event: &Event) {
        self.output.extend_from_slice(event.to_line().as_bytes());
        self.flush();
    }

    fn flush(&mut self) {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(count @ 1..) => drop(self.output.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(0) | Err(_) => {
                    self.closed = true;
                    self.output.clear();
                }
            }
        }
    }

    fn read(&mut self, mut asked: impl FnMut(Request)) {
        let mut buffer = [0; 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(count @ 1..) => self.input.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(0) | Err(_) => {
                    self.closed = true;
                    break;
                }
            }
            while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.input.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(request) => asked(request),
                    Err(error) => self.say(&Event::Refused { why: error.to_string() }),
                }
            }
            if self.input.len() > MAX_LINE {
                self.closed = true;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_line_is_told_with_its_end_or_its_beginning_a_moment_later() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("socket");
        let mut clients = Clients::listen(&path, "one".to_owned()).unwrap();
        let _reader = UnixStream::connect(&path).unwrap();
        clients.serve(&[true], false);
        let begun = Instant::now();
        clients.watch(0, begun);
        // When to look again, in microseconds; `None`: it was told.
        let mut publish = |log_bytes, in_line, at| {
            let progress = Progress { log_bytes, tracking_bytes: 0 };
            let later = clients.publish(progress, in_line, begun + Duration::from_micros(at));
            later.map(|later| (later - begun).as_micros())
        };
        assert_eq!(publish(0, false, 0), None);
        assert_eq!(publish(9, true, 5_000), Some(6_000), "its end may follow");
        assert_eq!(publish(10, false, 5_060), None, "the end came");
        assert_eq!(publish(20, false, 5_100), Some(7_060), "another line, too soon after the last");
        assert_eq!(publish(20, false, 7_060), None);
        assert_eq!(publish(21, true, 20_000), Some(21_000));
        assert_eq!(publish(22, true, 21_000), None, "no end came");
        assert_eq!(publish(23, true, 25_000), None, "of the same line nothing waits any more");
    }
}
