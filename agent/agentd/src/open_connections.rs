//! Who holds the connections of a listener, and which one is closed to make room for another. Every listener of the daemon
//! has it: that of this machine, of a fleet, of other nodes, the tracking endpoint, and the ports of ranks.
//!
//! Owns that choice: of those that nobody is known to hold, the one that was silent for longest; else the same of
//! whoever has most. The last one of a holder stays. So however many connections somebody opens, others always get
//! one: before all are taken by others, as many holders would have to be there as there are places.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Context;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::limits::Connections;

/// How long the place of a connection that was closed may stay taken; its task does nothing but end.
const ROOM: Duration = Duration::from_secs(1);

/// The places of one listener; clones share them.
#[derive(Clone)]
pub(crate) struct OpenConnections(Arc<Shared>);

struct Shared {
    connections: Connections,
    held: Mutex<HashMap<u64, Counted>>,
    taken: AtomicU64,
}

/// A connection that is not closed.
struct Counted {
    holding: Holding,
    end: CancellationToken,
}

/// What decides whether it is the one to be closed.
#[derive(Debug, Clone)]
struct Holding {
    /// Whose it is, once that is known.
    holder: Option<Arc<str>>,
    /// When it was taken, or bytes last came over it.
    heard: Instant,
}

impl OpenConnections {
    pub(crate) fn new(connections: Connections) -> OpenConnections {
        OpenConnections(Arc::new(Shared { connections, held: Mutex::default(), taken: AtomicU64::new(0) }))
    }

    /// The count of connections, to see how many are left.
    pub(crate) fn connections(&self) -> &Connections {
        &self.0.connections
    }

    /// Room for one more, for which another connection is closed if there is none.
    pub(crate) async fn take(&self, holder: Option<&str>) -> Option<OpenConnection> {
        let permit = match self.0.connections.permit() {
            Some(permit) => permit,
            None => {
                self.close_one()?;
                timeout(ROOM, self.0.connections.next()).await.ok()??
            }
        };
        let number = self.0.taken.fetch_add(1, Ordering::Relaxed);
        let end = CancellationToken::new();
        let over = Box::pin(end.clone().cancelled_owned());
        let holding = Holding { holder: holder.map(Arc::from), heard: Instant::now() };
        self.0.held.lock().insert(number, Counted { holding, end: end.clone() });
        Some(OpenConnection { number, places: self.clone(), end, over, _permit: permit })
    }

    /// From now on the connection of this number is known to be the holder's.
    pub(crate) fn belongs(&self, number: u64, holder: &str) {
        if let Some(held) = self.0.held.lock().get_mut(&number)
            && held.holding.holder.as_deref() != Some(holder)
        {
            held.holding.holder = Some(Arc::from(holder));
        }
    }

    fn close_one(&self) -> Option<()> {
        let mut held = self.0.held.lock();
        let number = first_to_close(held.iter().map(|(number, held)| (*number, &held.holding)))?;
        held.remove(&number)?.end.cancel();
        Some(())
    }
}

/// The number of the connection to be closed, if one may be. See the module.
fn first_to_close<'a>(all: impl Iterator<Item = (u64, &'a Holding)> + Clone) -> Option<u64> {
    let mut of_holder: HashMap<&str, usize> = HashMap::new();
    for holder in all.clone().filter_map(|(_, held)| held.holder.as_deref()) {
        *of_holder.entry(holder).or_default() += 1;
    }
    // One that nobody is known to hold goes before any other.
    let order = |held: &Holding| held.holder.as_deref().map_or(usize::MAX, |holder| of_holder[holder]);
    all.filter(|(_, held)| order(held) > 1)
        .min_by_key(|(number, held)| (usize::MAX - order(held), held.heard, *number))
        .map(|(number, _)| number)
}

/// The place of one connection, until it is dropped.
pub(crate) struct OpenConnection {
    number: u64,
    places: OpenConnections,
    end: CancellationToken,
    over: Pin<Box<WaitForCancellationFutureOwned>>,
    _permit: OwnedSemaphorePermit,
}

impl OpenConnection {
    /// Tells it from all others of its listener.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Bytes came over the connection.
    pub(crate) fn heard(&self) {
        if let Some(held) = self.places.0.held.lock().get_mut(&self.number) {
            held.holding.heard = Instant::now();
        }
    }

    /// Until another takes the place: for who waits for something else than bytes.
    pub(crate) fn until_over(&self) -> WaitForCancellationFutureOwned {
        self.end.clone().cancelled_owned()
    }

    /// Whether it must end because another takes the place; the task is woken when this changes.
    pub(crate) fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        self.over.as_mut().poll(cx).is_ready()
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.places.0.held.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_silent_connections_of_nobody_are_closed_first_and_the_last_of_a_holder_never() {
        let start = Instant::now();
        let closed = |all: &[(Option<&str>, u64)]| {
            let all: Vec<Holding> = all
                .iter()
                .map(|(holder, at)| Holding {
                    holder: holder.map(Arc::from),
                    heard: start + Duration::from_secs(*at),
                })
                .collect();
            first_to_close(all.iter().enumerate().map(|(number, held)| (number as u64, held)))
        };
        let (nobody, ada, ben) = (None, Some("ada"), Some("ben"));
        assert_eq!(closed(&[(ada, 1), (nobody, 9), (nobody, 7), (ada, 2)]), Some(2));
        assert_eq!(closed(&[(nobody, 3)]), Some(0));
        assert_eq!(closed(&[(ben, 1), (ben, 2), (ada, 4), (ada, 3), (ada, 5)]), Some(3));
        assert_eq!(closed(&[(ada, 4), (ben, 1), (ada, 2)]), Some(2));
        assert_eq!(closed(&[(ada, 4), (ben, 1)]), None);
        assert_eq!(closed(&[]), None);
    }
}
