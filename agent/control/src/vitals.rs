//! Numbers about the controller for Prometheus: what it committed, and what it showed last.
//!
//! Owns the last picture of jobs and nodes ([`Vitals::look`], called by whoever serves the numbers, at intervals); what
//! became durable is counted by the one task that commits ([`Counts`]). Invariants: a page is made
//! of what is here and asks nobody, so it is answered when the controller is busy or its disk is gone; nothing counted
//! here names a user or a job, and every label has a few values.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use agent_model::exposition::{MetricsPage, NumberKind};
use agent_model::{Clock, JobState, Timestamp};
use parking_lot::Mutex;

use crate::counts::Counts;
use crate::queue::{JobView, NodeState, Queue};

/// How long a look may take.
const WITHIN: Duration = Duration::from_secs(10);

/// The states of a job that has not ended: those with none are shown, too.
const STATES: [&str; 5] = ["Queued", "Preparing", "Running", "Finalizing", "NotResponding"];

/// The numbers of one controller. Clones share them.
#[derive(Clone)]
pub struct Vitals {
    queue: Queue,
    clock: Arc<dyn Clock>,
    counts: Arc<Mutex<Counts>>,
    picture: Arc<Mutex<Option<Picture>>>,
}

/// Jobs and nodes at one moment.
#[derive(Debug, Clone, PartialEq)]
struct Picture {
    at: Timestamp,
    jobs: BTreeMap<&'static str, u32>,
    /// How long the job that waits longest has waited, of those that nothing but room is missing for.
    oldest: Duration,
    nodes: BTreeMap<&'static str, u32>,
    slots: u32,
    gpus: BTreeMap<&'static str, u32>,
    stalled: bool,
}

impl Picture {
    fn of(jobs: &[JobView], nodes: &[NodeState], stalled: bool, now: Timestamp) -> Picture {
        let mut picture = Picture {
            at: now,
            jobs: STATES.map(|state| (state, 0)).into(),
            oldest: Duration::ZERO,
            nodes: BTreeMap::new(),
            slots: 0,
            gpus: BTreeMap::new(),
            stalled,
        };
        for JobView { job, .. } in jobs.iter().filter(|view| !view.job.state.is_terminal()) {
            *picture.jobs.entry(job.state.name()).or_default() += 1;
            let is_ready =
                job.held.is_none() && job.waits_for.is_empty() && job.not_before.is_none_or(|at| at <= now);
            if job.state == JobState::Queued && is_ready {
                picture.oldest = picture.oldest.max(now.since(job.submitted_at));
            }
        }
        for NodeState { record, .. } in nodes {
            *picture.nodes.entry(record.liveness.name()).or_default() += 1;
            picture.slots += record.inventory.slots;
            for gpu in &record.inventory.gpus {
                let state = match (&gpu.held, &gpu.unfit) {
                    (Some(_), _) => "given",
                    (None, Some(_)) => "unfit",
                    (None, None) => "free",
                };
                *picture.gpus.entry(state).or_default() += 1;
            }
        }
        picture
    }

    /// Adds it to a page.
    fn write(&self, page: &mut MetricsPage, now: Timestamp) {
        let by = |label: &'static str, counts: &BTreeMap<&'static str, u32>| {
            let samples = counts.iter().map(|(name, count)| ([(label, (*name).to_owned())], *count));
            samples.collect::<Vec<_>>()
        };
        let age = now.since(self.at).as_secs_f64();
        page.one(
            "agent_picture_age_seconds",
            NumberKind::Gauge,
            "How old the numbers about jobs and nodes are; it grows while the controller does not answer.",
            age,
        );
        page.family(
            "agent_jobs",
            NumberKind::Gauge,
            "Jobs that have not ended, by state.",
            by("state", &self.jobs),
        );
        page.one(
            "agent_queue_oldest_seconds",
            NumberKind::Gauge,
            "How long the longest wait of a job in line is that only lacks a place to run.",
            self.oldest.as_secs_f64(),
        );
        page.family("agent_nodes", NumberKind::Gauge, "Nodes by how they answer.", by("state", &self.nodes));
        page.one(
            "agent_slots",
            NumberKind::Gauge,
            "Jobs that all nodes together run at a time, at most.",
            self.slots,
        );
        page.family("agent_gpus", NumberKind::Gauge, "GPUs of all nodes by state.", by("state", &self.gpus));
        page.one(
            "agent_store_stalled",
            NumberKind::Gauge,
            "1 while the controller cannot write to its database.",
            u32::from(self.stalled),
        );
    }
}

impl Vitals {
    pub(crate) fn new(queue: Queue, clock: Arc<dyn Clock>, counts: Arc<Mutex<Counts>>) -> Vitals {
        Vitals { queue, clock, counts, picture: Arc::default() }
    }

    /// Takes the next picture; keeps the last one if the controller does not answer in time.
    pub async fn look(&self) {
        let looked = async {
            let (jobs, nodes) = (self.queue.shown_jobs().await?, self.queue.shown_nodes().await?);
            Ok::<_, crate::queue::AskError>(Picture::of(
                &jobs,
                &nodes,
                self.queue.stall().is_some(),
                self.clock.now(),
            ))
        };
        if let Ok(Ok(picture)) = tokio::time::timeout(WITHIN, looked).await {
            *self.picture.lock() = Some(picture);
        }
    }

    /// Adds the numbers to a page, at once.
    pub fn write(&self, page: &mut MetricsPage) {
        if let Some(picture) = &*self.picture.lock() {
            picture.write(page, self.clock.now());
        }
        self.counts.lock().write(page);
    }
}

impl fmt::Debug for Vitals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vitals").finish_non_exhaustive()
    }
}
