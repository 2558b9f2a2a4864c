//! Keeps the store of blobs small, for all roles of this daemon.
//!
//! When the store is above its limit, or the disk is tight, the [`Collector`] removes blobs that nobody needs. What
//! was removed is logged; why too little could be removed is logged once, until that changes.

use std::time::Duration;

use agent_cas::gc::{CollectError, Collected, Collector, Goal, Holder, Reason};
use agent_model::disk::Pressure;
use agent_model::{causes, size};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{info, warn};

use super::Reclaimer;

/// How often the size of the store is checked.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The wait before the next try when too little could be removed.
const AGAIN: Duration = Duration::from_secs(120);

/// The blobs that nobody needs.
pub(crate) struct Unneeded {
    collector: Collector,
    last: Mutex<Last>,
}

/// The result of the last try.
#[derive(Default)]
struct Last {
    /// Why too little was removed, as it was logged.
    told: String,
    /// When the next try is allowed.
    again: Option<Instant>,
}

impl Unneeded {
    pub(crate) fn new(collector: Collector) -> Unneeded {
        Unneeded { collector, last: Mutex::default() }
    }

    async fn collect(&self) {
        let waits = self.last.lock().again.is_some_and(|again| again > Instant::now());
        if waits {
            return;
        }
        if !self.collector.is_due().await {
            *self.last.lock() = Last::default();
            return;
        }
        let collected = self.collector.collect(Goal::Limits, false).await;
        if let Ok(Collected { freed, before, .. }) = &collected
            && freed.blobs > 0
        {
            let (freed, taken) = (size::binary(freed.bytes), size::binary(before.taken));
            info!(freed, taken, "removed blobs that nobody needs");
        }
        let Some(why) = shortfall(&collected, self.collector.limits().size) else { return };
        let mut last = self.last.lock();
        if last.told != why {
            warn!(why, "cannot make blob store small enough");
            last.told = why;
        }
        last.again = Some(Instant::now() + AGAIN);
    }
}

impl Reclaimer for Unneeded {
    fn starts_at(&self) -> Pressure {
        Pressure::Tight
    }
    fn tidy(&self) -> BoxFuture<'_, Duration> {
        self.collect().map(|()| LOOK_EVERY).boxed()
    }
    fn reclaim(&self, _: u64) -> BoxFuture<'_, ()> {
        self.collect().boxed()
    }
}

/// Why not enough was removed; `None` when it was enough.
fn shortfall(collected: &Result<Collected, CollectError>, limit: u64) -> Option<String> {
    let collected = match collected {
        Ok(collected) if collected.is_enough() => return None,
        Ok(collected) => collected,
        Err(error) => return Some(causes::tell(error)),
    };
    let stay = |stay: &agent_cas::gc::Stay| format!("{} {}", size::binary(stay.bytes), holds(stay.reason));
    let stays: Vec<String> = collected.stays.iter().map(stay).collect();
    let limit = size::binary(limit);
    Some(format!(
        "of at most {limit}, {}",
        if stays.is_empty() { "nothing is left".into() } else { stays.join(", ") }
    ))
}

fn holds(reason: Reason) -> &'static str {
    match reason {
        Reason::Held(Holder::Jobs) => "are needed by jobs that have not ended",
        Reason::Held(Holder::Outputs) => "are outputs of jobs",
        Reason::Held(Holder::Environments) => "tell of environments",
        Reason::Held(Holder::Assets) => "are data with a name",
        Reason::Held(Holder::Replicas) => "are needed by what runs here",
        Reason::Recent => "were just used",
        Reason::Room => "may go",
    }
}

#[cfg(test)]
mod tests {
    use agent_cas::Evicted;
    use agent_cas::gc::{Room, Stay};

    use super::*;

    #[test]
    fn test_what_holds_the_store_is_named() {
        let stay = |reason, bytes| Stay { reason, blobs: 1, bytes };
        let stays = vec![stay(Reason::Held(Holder::Outputs), 3 << 30), stay(Reason::Recent, 1 << 20)];
        let before = Room { taken: 4 << 30, free: 0 };
        let freed = Evicted { blobs: 1, bytes: 10 };
        let collected = Collected { before, wanted: 11, freed, stays };
        let why = shortfall(&Ok(collected.clone()), 2 << 30).unwrap();
        assert_eq!(why, "of at most 2 GiB, 3 GiB are outputs of jobs, 1 MiB were just used");
        assert_eq!(shortfall(&Ok(Collected { wanted: 10, ..collected }), 2 << 30), None);
        let away = shortfall(&Err(CollectError::NotYet { user: "the node" }), 0);
        assert_eq!(away.as_deref(), Some("it is not known yet what the node needs"));
    }
}
