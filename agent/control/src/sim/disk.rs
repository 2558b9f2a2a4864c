//! The controller's database as it should be, and the checks that need only what is written to it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use agent_model::job::Input;
use agent_model::{JobEvent, JobId, JobState, ReplicaId, Verdict};

use super::mutant::{self, Mutant};
use crate::queue::Similar;
use crate::store::{Changes, Document, JobRecord, Loaded, ReuseRecord, SettledRecord};

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Broken {
    pub(super) invariant: &'static str,
    pub(super) how: String,
}

pub(super) fn broken<T>(invariant: &'static str, how: String) -> Result<T, Broken> {
    Err(Broken { invariant, how })
}

/// One piece of output, which depends only on its replica and index, so that it can be checked.
pub(super) fn line(replica: &ReplicaId, index: u64) -> u32 {
    let mut hash = 0x811c_9dc5_u32;
    for byte in replica.job.as_str().bytes() {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    let place = replica.epoch.0 * 1009 + u64::from(replica.rank);
    (hash ^ (place as u32)).wrapping_mul(0x9E37_79B1) ^ (index as u32).wrapping_mul(0x85EB_CA6B)
}

pub(super) fn lines(replica: &ReplicaId, range: Range<u64>) -> Vec<u32> {
    range.map(|index| line(replica, index)).collect()
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk {
    pub(super) jobs: BTreeMap<JobId, Arc<JobRecord>>,
    documents: BTreeMap<String, Document>,
    results: BTreeMap<ReplicaId, u32>,
    pub(super) logs: BTreeMap<ReplicaId, Vec<u32>>,
    /// The state before the last commit; kept only for the mistake that needs it.
    before: Option<Box<Disk>>,
}

impl Disk {
    /// Writes everything. `alive` says whether a job has a live run.
    pub(super) fn commit(&mut self, changes: &Changes, alive: impl Fn(&JobId) -> bool) -> Result<(), Broken> {
        self.keep();
        for document in &changes.documents {
            self.documents.insert(document.name(), document.clone());
            let Document::Settled(SettledRecord { replica, .. }) = document else { continue };
            let counted = self.results.entry(replica.clone()).or_default();
            *counted += 1;
            if *counted > 1 {
                return broken("a result counts once", format!("{replica} counted again"));
            }
            if let Some(job) = self.jobs.get(&replica.job).filter(|job| job.epoch != replica.epoch) {
                return broken("only the latest epoch counts", format!("{replica} counted at {}", job.epoch));
            }
        }
        for name in &changes.dropped {
            self.documents.remove(name);
        }
        for job in &changes.jobs {
            if let Some(before) = self.jobs.get(&job.id) {
                let over = before.state.is_terminal();
                if over && (before.state, before.epoch) != (job.state, job.epoch) {
                    let how = format!("{}: {:?} became {:?}", job.id, before.state, job.state);
                    return broken("a terminal state never changes", how);
                }
                if job.seq != before.seq {
                    return broken(
                        "a job is made once",
                        format!("{}: {} and {}", job.id, before.seq, job.seq),
                    );
                }
                if job.epoch < before.epoch {
                    return broken("an epoch never goes back", job.id.to_string());
                }
            }
            if (job.state.is_terminal() || job.state == JobState::Queued) && alive(&job.id) {
                let how = format!("{} is {} at epoch {}", job.id, job.state, job.epoch);
                return broken("a job that ended or waits has no live run", how);
            }
            let expression = |input: &Input| matches!(input, Input::Literal(text) if text.starts_with("${{"));
            if job.made.is_some() && job.spec.inputs.values().any(expression) {
                return broken("a step has what it reads", job.id.to_string());
            }
            self.jobs.insert(job.id.clone(), job.clone());
        }
        changes.jobs.iter().try_for_each(|job| self.check_reuse(job))?;
        self.check_cancels()
    }

    /// The steps that completed and are like this one, the newest of each kind.
    pub(super) fn similar(&self, step: &ReuseRecord) -> Similar {
        let newest = |like: &dyn Fn(&ReuseRecord) -> bool| {
            let completed = self.jobs.values().filter(|job| job.state == JobState::Completed);
            let alike = completed.filter(|job| job.reuse.as_ref().is_some_and(|known| like(known)));
            alike.max_by_key(|job| job.seq).map(|job| JobRecord::clone(job))
        };
        Similar {
            same: newest(&|known| known.key == step.key),
            resolved: newest(&|known| known.environment == step.environment),
            last: newest(&|known| known.step == step.step),
        }
    }

    /// What a step is taken for completed and was the same.
    fn check_reuse(&self, pipeline: &JobRecord) -> Result<(), Broken> {
        let (Some(of), Some(steps)) = (&pipeline.spec.pipeline, &pipeline.steps) else { return Ok(()) };
        for (index, from) in &steps.reused {
            let spec = pipeline.spec.step(&pipeline.id, *index, |output| steps.made(output).cloned());
            let own = spec.and_then(|spec| ReuseRecord::of(&of.name(*index), &spec).ok());
            let same = self.jobs.get(from).filter(|job| job.state == JobState::Completed);
            let known = same.and_then(|job| job.reuse.as_ref()).map(|known| &known.key);
            if known.is_none() || known != own.as_ref().map(|own| &own.key) {
                return broken(
                    "a step is taken for one that did the same",
                    format!("{}: {from}", pipeline.id),
                );
            }
        }
        Ok(())
    }

    /// Whoever sees that a pipeline is to end sees that all of its steps are.
    fn check_cancels(&self) -> Result<(), Broken> {
        let is_canceled = |job: &&Arc<JobRecord>| job.state == JobState::Finalizing(Verdict::Canceled);
        for pipeline in self.jobs.values().filter(is_canceled).filter(|job| job.steps.is_some()) {
            let active = pipeline.tasks.iter().flat_map(|tasks| tasks.active.iter());
            let steps = active.filter_map(|step| self.jobs.get(&pipeline.id.task(step)?));
            let mut left = steps.filter(|step| {
                step.cancel.is_none() && step.state.after(JobEvent::CancelRequested).is_some()
            });
            if let Some(step) = left.next() {
                return broken("a cancel goes down to every step", format!("{} is {}", step.id, step.state));
            }
        }
        Ok(())
    }

    /// Adds to a log, which must stay a prefix of the output.
    pub(super) fn append(&mut self, replica: &ReplicaId, data: &[u32]) -> Result<(), Broken> {
        self.keep();
        let log = self.logs.entry(replica.clone()).or_default();
        let start = log.len() as u64;
        log.extend_from_slice(data);
        let right = data.iter().enumerate().all(|(i, piece)| *piece == line(replica, start + i as u64));
        if right { Ok(()) } else { broken("a log is what was produced", format!("{replica} at {start}")) }
    }

    /// What a controller loads at its start.
    pub(super) fn load(&self) -> Loaded {
        let open = self.jobs.values().filter(|job| !job.state.is_terminal());
        let kept = |job: &Arc<JobRecord>| {
            let mut job = JobRecord::clone(job);
            // The reports of ranks that they could start are not stored.
            job.replicas.iter_mut().for_each(|replica| replica.ready = None);
            job
        };
        Loaded {
            jobs: open.map(kept).collect(),
            documents: self.documents.values().cloned().collect(),
            last_seq: self.jobs.values().map(|job| job.seq).max().unwrap_or(0),
            ..Loaded::default()
        }
    }

    fn keep(&mut self) {
        if mutant::is(Mutant::LastCommitLost) {
            self.before = None;
            self.before = Some(Box::new(self.clone()));
        }
    }

    /// The controller crashed.
    pub(super) fn crash(&mut self) {
        if let Some(before) = self.before.take() {
            *self = *before;
        }
    }
}
