//! Connections that have not asked for anything yet, and which of them are closed to make room.
//!
//! Every program of the daemon's user may connect, the supervisors of jobs among them, and what says nothing costs a
//! descriptor. Invariants: no program but the daemon has more than [`MOST_OF_ONE`] of these; when there are
//! [`MOST_SILENT`], the one that has waited longest is closed, but none of the daemon's while there is another; where
//! all are the daemon's, the next waits until one has asked. So nobody keeps the daemon from its helper by silence.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How long a request may take to arrive.
const REQUEST: Duration = Duration::from_secs(10);

/// Silent connections at a time.
const MOST_SILENT: usize = 128;

/// Those of one program other than the daemon.
const MOST_OF_ONE: usize = 16;

/// Whose a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HelperClient {
    pub(crate) pid: i32,
    pub(crate) is_daemon: bool,
}

/// One that is connected.
pub(crate) struct SilentConnection {
    pub(crate) stream: OwnedFd,
    pub(crate) peer: HelperClient,
}

/// The silent connections, in the order in which they came.
#[derive(Default)]
pub(crate) struct Silent(Vec<(SilentConnection, Instant)>);

impl Silent {
    /// Waits until somebody new connects (`true`), or some of these say something or are closed, which are returned.
    pub(crate) fn wait(&mut self, listener: BorrowedFd<'_>) -> io::Result<(bool, Vec<SilentConnection>)> {
        let is_open = self.0.len() < MOST_SILENT || surplus(&self.peers()).is_some();
        let listens = if is_open { PollFlags::POLLIN } else { PollFlags::empty() };
        let mut waits = vec![PollFd::new(listener, listens)];
        waits.extend(self.0.iter().map(|(silent, _)| PollFd::new(silent.stream.as_fd(), PollFlags::POLLIN)));
        let now = Instant::now();
        let left = self.0.first().map(|(_, since)| (*since + REQUEST).saturating_duration_since(now));
        let timeout = left.map_or(PollTimeout::NONE, |left| {
            PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut waits, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let spoke: Vec<bool> = waits.iter().map(|wait| wait.any().unwrap_or(true)).collect();
        let mut said = spoke.iter().skip(1);
        let (asking, silent): (Vec<_>, Vec<_>) =
            self.0.drain(..).partition(|_| said.next().copied().unwrap_or(false));
        let now = Instant::now();
        self.0 = silent.into_iter().filter(|(_, since)| now < *since + REQUEST).collect();
        Ok((spoke.first().copied().unwrap_or(false), asking.into_iter().map(|(asking, _)| asking).collect()))
    }

    /// Waits for the request of one more, and closes another where there are too many.
    pub(crate) fn add(&mut self, connection: SilentConnection) {
        self.0.push((connection, Instant::now()));
        if let Some(index) = surplus(&self.peers()) {
            self.0.remove(index);
        }
    }

    /// Closes all but the daemon's: there are too few descriptors.
    pub(crate) fn close_others(&mut self) {
        self.0.retain(|(silent, _)| silent.peer.is_daemon);
    }

    fn peers(&self) -> Vec<HelperClient> {
        self.0.iter().map(|(silent, _)| silent.peer).collect()
    }
}

/// Which one to close, of those in the order in which they came.
fn surplus(peers: &[HelperClient]) -> Option<usize> {
    let newest = peers.last()?;
    let of_the_newest = peers.iter().filter(|peer| peer.pid == newest.pid).count();
    if !newest.is_daemon && of_the_newest > MOST_OF_ONE {
        return peers.iter().position(|peer| peer.pid == newest.pid);
    }
    if peers.len() >= MOST_SILENT { peers.iter().position(|peer| !peer.is_daemon) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn others(count: usize, pid: impl Fn(usize) -> i32) -> Vec<HelperClient> {
        (0..count).map(|number| HelperClient { pid: pid(number), is_daemon: false }).collect()
    }

    #[test]
    fn test_the_oldest_of_whoever_has_most_is_closed_and_the_daemons_stay() {
        let daemon = HelperClient { pid: 1, is_daemon: true };
        assert_eq!(surplus(&[]), None);
        assert_eq!(surplus(&others(MOST_OF_ONE, |_| 7)), None);
        let flood = [vec![daemon], others(MOST_OF_ONE + 1, |_| 7)].concat();
        assert_eq!(surplus(&flood), Some(1), "its own oldest");
        let many = [vec![daemon], others(MOST_SILENT - 1, |number| 10 + number as i32)].concat();
        assert_eq!(surplus(&many), Some(1), "somebody's oldest, not the daemon's");
        assert_eq!(
            surplus(&[vec![daemon; MOST_SILENT - 1], others(1, |_| 7)].concat()),
            Some(MOST_SILENT - 1)
        );
        assert_eq!(surplus(&vec![daemon; MOST_SILENT]), None, "the next one waits");
    }
}
