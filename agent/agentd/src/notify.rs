//! Reports the state of the daemon to the service manager, if there is one.
//!
//! Owns: the `sd_notify` socket, and the check that the daemon does not hang. A main loop has a [`Pulse`] and beats
//! it in each iteration; the watchdog is notified only while every pulse is fresh, and by a task of the same runtime.
//! So a daemon that hangs is restarted, and one without a network is not: a loop iterates whether or not anybody
//! answers.
//!
//! Hides: the socket's address, datagrams, the manager's interval.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{error, warn};

/// How often the pulses are checked when the service manager has no watchdog.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Sends messages to the service manager. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notifier {
    socket: Option<Arc<(UnixDatagram, SocketAddr)>>,
    /// The watchdog timeout: how long the daemon may be silent.
    patience: Option<Duration>,
    pulses: Arc<Mutex<Vec<Arc<Heart>>>>,
}

#[derive(Debug)]
struct Heart {
    name: &'static str,
    limit: Duration,
    last: Mutex<Instant>,
}

/// Reports that one main loop iterates. When this is dropped, the loop is no longer checked.
#[derive(Debug)]
pub(crate) struct Pulse {
    heart: Arc<Heart>,
    all: Arc<Mutex<Vec<Arc<Heart>>>>,
}

impl Pulse {
    /// The loop began another iteration.
    pub(crate) fn beat(&self) {
        *self.heart.last.lock() = Instant::now();
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        all.retain(|heart| !Arc::ptr_eq(heart, &self.heart));
    }
}

impl Notifier {
    /// For the socket that `NOTIFY_SOCKET` names; `patience` is the value of `WATCHDOG_USEC`.
    pub(crate) fn new(address: Option<&str>, patience: Option<Duration>) -> Notifier {
        let socket = address.and_then(|address| {
            let opened = open(address);
            opened.inspect_err(|error| warn!(%error, address, "the service manager cannot be told")).ok()
        });
        Notifier { socket: socket.map(Arc::new), patience, pulses: Arc::default() }
    }

    /// Everything is loaded and clients are served.
    pub(crate) fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}"));
    }

    /// The daemon is stopping.
    pub(crate) fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={status}"));
    }

    fn send(&self, message: &str) {
        let Some((socket, address)) = self.socket.as_deref() else { return };
        if let Err(error) = socket.send_to_addr(message.as_bytes(), address) {
            warn!(%error, "cannot notify service manager");
        }
    }

    /// A pulse for a loop whose iterations take at most `limit`, whatever other machines do.
    pub(crate) fn pulse(&self, name: &'static str, limit: Duration) -> Pulse {
        let heart = Arc::new(Heart { name, limit, last: Mutex::new(Instant::now()) });
        self.pulses.lock().push(heart.clone());
        Pulse { heart, all: self.pulses.clone() }
    }

    /// The loops whose iteration is late, and the time since they last beat.
    fn late(&self) -> Vec<(&'static str, Duration)> {
        let pulses = self.pulses.lock();
        let silent = |heart: &Arc<Heart>| {
            let silent = heart.last.lock().elapsed();
            (silent > heart.limit).then_some((heart.name, silent))
        };
        pulses.iter().filter_map(silent).collect()
    }

    /// Notifies the watchdog as long as every loop beats in time.
    pub(crate) async fn watch(self) {
        let every = self.patience.map_or(LOOK_EVERY, |patience| patience / 4);
        loop {
            match self.late().as_slice() {
                [] => self.feed(),
                late => error!(?late, "the daemon does not go on; the watchdog is not fed"),
            }
            tokio::time::sleep(every).await;
        }
    }

    fn feed(&self) {
        if self.patience.is_some() {
            self.send("WATCHDOG=1");
        }
    }
}

fn open(address: &str) -> io::Result<(UnixDatagram, SocketAddr)> {
    let to = match address.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read its socket must not block the daemon.
    socket.set_nonblocking(true)?;
    Ok((socket, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager() -> (tempfile::TempDir, UnixDatagram, String) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        (dir, socket, path.display().to_string())
    }

    fn heard(manager: &UnixDatagram) -> Vec<String> {
        let mut buffer = [0; 256];
        let next =
            || manager.recv(&mut buffer).ok().map(|n| String::from_utf8_lossy(&buffer[..n]).into_owned());
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn test_manager_hears_how_the_daemon_is() {
        let (_dir, manager, address) = manager();
        let notifier = Notifier::new(Some(&address), None);
        notifier.ready("2 jobs");
        notifier.stopping("jobs go on");
        notifier.feed();
        assert_eq!(heard(&manager), ["READY=1\nSTATUS=2 jobs", "STOPPING=1\nSTATUS=jobs go on"]);
        drop(manager);
        notifier.ready("nobody listens");
        Notifier::new(None, None).ready("there is nobody");
    }

    #[tokio::test(start_paused = true)]
    async fn test_watchdog_is_fed_only_while_every_loop_comes_round() {
        let (_dir, manager, address) = manager();
        let notifier = Notifier::new(Some(&address), Some(Duration::from_secs(8)));
        let (one, other) = (
            notifier.pulse("one", Duration::from_secs(20)),
            notifier.pulse("other", Duration::from_secs(20)),
        );
        let watch = notifier.clone().watch();
        tokio::pin!(watch);
        let mut pass = async |beats: bool| {
            let mut words = Vec::new();
            for _ in 0..30 {
                one.beat();
                if beats {
                    other.beat();
                }
                let _ = tokio::time::timeout(Duration::from_secs(1), &mut watch).await;
                words.extend(heard(&manager)); // it queues only a few
            }
            words
        };
        let fed = pass(true).await;
        assert!(fed.len() >= 14 && fed.iter().all(|word| word == "WATCHDOG=1"), "{fed:?}");
        assert!(pass(false).await.len() <= 11, "it stops when a loop does");
        assert!(pass(false).await.is_empty());
        assert!(!pass(true).await.is_empty(), "and goes on with it");
        drop((one, other));
        tokio::time::advance(Duration::from_secs(100)).await;
        assert!(notifier.late().is_empty(), "a loop that ended is not missed");
    }
}
