//! Takes ended jobs off the record when they are older than is configured.
//!
//! Owns the rule, and nothing else: a job is removed as `agentctl rm` removes it, so its outputs go when the store needs
//! their room. A job that has not ended stays, however old it is; without the setting, every job does. The record is
//! read from its oldest job to the first that cannot be due, so that a long one costs little.

use std::time::Duration;

use agent_model::Timestamp;
use agent_model::words::duration;

use crate::api::Services;
use crate::refusal::Refusal;
use crate::store::JobRecord;

/// How often the record is looked through.
const EVERY: Duration = Duration::from_secs(10 * 60);
/// How many jobs are read at a time.
const PAGE: u32 = 200;

/// Keeps the record short until the queue ends; `keep` is for how long ended jobs stay.
pub(crate) async fn run(services: Services, keep: Option<Duration>) {
    let Some(keep) = keep else { return };
    let queue = services.queue.clone();
    loop {
        match sweep(&services, keep).await {
            Ok(0) => {}
            Ok(removed) => {
                tracing::info!(removed, older_than = duration(keep), "removed jobs that ended long ago");
            }
            Err(refusal) => tracing::warn!(?refusal, "cannot remove old jobs: trying again later"),
        }
        tokio::select! {
            () = queue.closed() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Removes what is due; returns how many jobs that were.
pub(crate) async fn sweep(services: &Services, keep: Duration) -> Result<usize, Refusal> {
    let (now, mut after, mut removed) = (services.gate.clock.now(), 0, 0);
    loop {
        let page = services.store.oldest(after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(removed) };
        after = last.seq;
        let may_be_due = now.since(last.submitted_at) >= keep;
        for job in page.into_iter().filter(|job| is_due(job, keep, now)) {
            services.take_off_record(&job.id).await?;
            removed += 1;
        }
        if !may_be_due {
            return Ok(removed);
        }
    }
}

/// Whether it ended at least `keep` ago.
fn is_due(job: &JobRecord, keep: Duration, now: Timestamp) -> bool {
    job.state.is_terminal() && job.ended_at.is_some_and(|ended| now.since(ended) >= keep)
}
