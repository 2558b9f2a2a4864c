//! Steps of pipelines that are not run, because the same ran before.
//!
//! A step whose turn has come, and that may be reused, is looked for in the store before it gets a record. The states of
//! that are in memory alone: after a restart the step is looked for again.
//!
//! ```text
//! turn comes ─> Open ──(store)──> Found ──(all of it is there)──> completed, without a record of its own
//!    │           ^ └─(nothing like it)─┬─(some of it is gone)─┘
//!    │           │                     v
//!    └──> Behind the same step     Run: it gets a record, and its history says why
//! ```
//!
//! Invariants: of steps that are alike one runs at a time; a step is taken for another one in the commit in which the
//! record of its pipeline gets what that one left; whatever is not answered in time is run.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::job::{Input, reuse};
use agent_model::{Boot, Digest, JobId, Verdict};

use super::{Book, Moment};
use crate::store::{JobRecord, ReuseRecord};

/// A step that is looked for longer than this is run.
const PATIENCE: Duration = Duration::from_secs(30);

/// A step that may be reused and whose turn has come.
#[derive(Debug)]
struct ReusableStep {
    /// In what it may be like another one; `None` of one that is always run.
    record: Option<Box<ReuseRecord>>,
    asking: Asking,
}

/// How it stands.
#[derive(Debug)]
enum Asking {
    /// The store is to be asked.
    Open { since: Boot },
    /// The same step runs for another pipeline, or in this one.
    Behind,
    /// This one left the same. Whether all of it is still there is to be looked at.
    Found { like: JobId, made: BTreeMap<String, Input>, since: Boot },
    /// It is run, for this reason.
    Run(String),
}

/// What is known of steps that may be reused.
#[derive(Debug, Default)]
pub(super) struct Reuses {
    asked: BTreeMap<JobId, ReusableStep>,
    /// The step that runs, by its key.
    running: BTreeMap<String, JobId>,
}

/// What the store has that is like a step: the newest of each kind that completed.
#[derive(Debug, Default)]
pub(crate) struct Similar {
    /// In all that decides what it leaves.
    pub(crate) same: Option<JobRecord>,
    /// In its environment, as it is defined.
    pub(crate) resolved: Option<JobRecord>,
    /// In being that step.
    pub(crate) last: Option<JobRecord>,
}

/// What a step need not do again: who did it, and what that left. Otherwise why it is run.
pub(crate) fn judge(
    step: &ReuseRecord,
    similar: Similar,
) -> Result<(JobId, BTreeMap<String, Input>), String> {
    let another = if broken!(ReuseOfAnother) { similar.last.clone() } else { None };
    let Some(same) = similar.same.or(another) else {
        return Err(match similar.last.as_ref().and_then(|last| Some((last, last.reuse.as_ref()?))) {
            Some((last, before)) => {
                let parts = reuse::differing(&step.parts, &before.parts);
                format!("another {parts} than when {} ran", last.id)
            }
            None => "no earlier run of this step is on record".to_owned(),
        });
    };
    let used = |job: &JobRecord| job.outcome.as_ref()?.environment.clone();
    let Some(before) = used(&same) else {
        return Err(format!("no machine said what the environment of {} was", same.id));
    };
    if let Some(newer) = similar.resolved.filter(|newer| used(newer).is_some_and(|now| now != before)) {
        return Err(format!(
            "its environment has become another one since {} ran: {} has it",
            same.id, newer.id
        ));
    }
    same.made.map(|made| (same.id.clone(), made)).ok_or_else(|| format!("{} left nothing", same.id))
}

impl Reuses {
    /// After a start: a step that runs.
    pub(super) fn load(&mut self, job: &JobRecord) {
        if let Some(reuse) = job.reuse.as_ref().filter(|_| !job.state.is_terminal()) {
            self.running.insert(reuse.key.clone(), job.id.clone());
        }
    }

    /// When a step has been looked for long enough; at once if the store is to be asked.
    pub(super) fn next(&self, now: Moment) -> Option<Boot> {
        let at = self.asked.values().filter_map(|asked| match &asked.asking {
            Asking::Open { .. } => Some(now.boot),
            Asking::Found { since, .. } => Some(*since + PATIENCE),
            Asking::Behind | Asking::Run(_) => None,
        });
        at.min()
    }
}

impl Book {
    /// Whether a step whose turn has come waits because the same may have run before.
    pub(super) fn is_looked_for(&mut self, job: &JobRecord, index: u32, now: Moment) -> bool {
        let of = job.spec.pipeline.as_ref().filter(|of| !of.force_rerun);
        let step = of.and_then(|of| of.step(index)).filter(|step| step.reuse);
        let Some((id, step)) = job.id.task(index).zip(step) else { return false };
        let known = self.reuses.asked.get(&id);
        let has_ended = |record: &ReuseRecord| !self.reuses.running.contains_key(&record.key);
        match known.map(|asked| (&asked.asking, &asked.record)) {
            Some((Asking::Run(_), _)) => return false,
            Some((Asking::Behind, Some(record))) if has_ended(record) => {}
            Some(_) => return true,
            None => {}
        }
        let known = self.reuses.asked.remove(&id).and_then(|asked| asked.record);
        let record = match known {
            Some(record) => Ok(record),
            None => {
                let Some(record) = job.waiting_task(index, None) else { return false };
                ReuseRecord::of(&step.name, &record.spec).map(Box::new)
            }
        };
        let (record, asking) = match record {
            Err(why) => (None, Asking::Run(format!("it always is: {why}"))),
            Ok(record) => {
                let asking = match self.reuses.running.get(&record.key) {
                    Some(same) => {
                        let told = format!("{} waits for {same}, which does the same", step.name);
                        self.jobs.tell(&job.id, None, now, told);
                        Asking::Behind
                    }
                    None => Asking::Open { since: now.boot },
                };
                (Some(record), asking)
            }
        };
        let waits = !matches!(asking, Asking::Run(_));
        self.reuses.asked.insert(id, ReusableStep { record, asking });
        waits
    }

    /// A step gets a record: in what it may be like another one, and why it is run.
    pub(super) fn begin_reusable(
        &mut self,
        job: &mut JobRecord,
        pipeline: &JobId,
        index: u32,
    ) -> Option<String> {
        let of = self.jobs.get(pipeline)?.spec.pipeline.as_ref()?;
        let step = of.step(index).filter(|step| step.reuse)?;
        let (known, why) = match self.reuses.asked.remove(&job.id) {
            Some(ReusableStep { record, asking: Asking::Run(why) }) => (record, Some(why)),
            _ => (None, None),
        };
        job.reuse = known.or_else(|| ReuseRecord::of(&step.name, &job.spec).ok().map(Box::new));
        if let Some(record) = &job.reuse {
            self.reuses.running.insert(record.key.clone(), job.id.clone());
        }
        why
    }

    /// A step has ended: those that wait for it are looked for.
    pub(super) fn end_reusable(&mut self, id: &JobId) {
        let Some(reuse) = self.jobs.get(id).and_then(|job| job.reuse.as_ref()) else { return };
        if self.reuses.running.get(&reuse.key) == Some(id) {
            self.reuses.running.remove(&reuse.key);
            self.replan = true;
        }
    }

    /// Forgets steps that do not wait any more, and runs those that were looked for long enough.
    pub(super) fn expire_reuse(&mut self, now: Moment) {
        let jobs = &self.jobs;
        let waits = |id: &JobId| {
            let (pipeline, index) = id.as_task()?;
            Some(jobs.get(&pipeline)?.tasks.as_ref()?.waiting.contains(index))
        };
        self.reuses.asked.retain(|id, _| waits(id) == Some(true));
        for asked in self.reuses.asked.values_mut() {
            if let Asking::Open { since } | Asking::Found { since, .. } = &asked.asking
                && *since + PATIENCE <= now.boot
            {
                asked.asking = Asking::Run("nobody said in time whether the same ran before".to_owned());
                self.replan = true;
            }
        }
    }

    /// The steps for which the store is to be asked; [`Book::resolve_reuse`] takes the answer.
    pub(crate) fn reuse_questions(&self) -> Vec<(JobId, ReuseRecord)> {
        let open = |(id, asked): (&JobId, &ReusableStep)| match asked {
            ReusableStep { record: Some(record), asking: Asking::Open { .. } } => {
                Some((id.clone(), (**record).clone()))
            }
            _ => None,
        };
        self.reuses.asked.iter().filter_map(open).collect()
    }

    /// What the store has, as [`judge`] judges it.
    pub(crate) fn resolve_reuse(
        &mut self,
        id: &JobId,
        found: Result<(JobId, BTreeMap<String, Input>), String>,
        now: Moment,
    ) {
        if let Some(ReusableStep { asking: asking @ Asking::Open { .. }, .. }) = self.reuses.asked.get_mut(id)
        {
            *asking = match found {
                Ok((like, made)) => Asking::Found { like, made, since: now.boot },
                Err(why) => Asking::Run(why),
            };
            self.replan = true;
        }
    }

    /// The steps of which it is to be looked at whether all that the other one left is still there: the snapshots.
    pub(crate) fn reuse_candidates(&self) -> Vec<(JobId, Vec<Digest>)> {
        let found = |(id, asked): (&JobId, &ReusableStep)| match &asked.asking {
            Asking::Found { made, .. } => {
                Some((id.clone(), made.values().filter_map(Input::snapshot).collect()))
            }
            _ => None,
        };
        self.reuses.asked.iter().filter_map(found).collect()
    }

    /// Whether all of it is there. If so the step has completed; returns whether that is so.
    pub(crate) fn reuse_checked(&mut self, id: &JobId, is_whole: bool, now: Moment) -> bool {
        let Some(ReusableStep { asking, .. }) = self.reuses.asked.get_mut(id) else { return false };
        let Asking::Found { like, made, .. } = asking else { return false };
        let (like, made) = (like.clone(), made.clone());
        self.replan = true;
        if !is_whole {
            *asking = Asking::Run(format!("what {like} left is not all in the store any more"));
            return false;
        }
        self.reuses.asked.remove(id);
        let Some((pipeline, index)) = id.as_task() else { return false };
        let Some(job) = self.jobs.get(&pipeline).filter(|job| !job.state.is_terminal()) else { return false };
        let name = job.spec.pipeline.as_ref().map(|of| of.name(index)).unwrap_or_default();
        let mut taken = false;
        self.jobs.edit(&pipeline, |job| {
            if let (Some(tasks), Some(steps)) = (&mut job.tasks, &mut job.steps) {
                taken = tasks.waiting.remove(index);
                if taken {
                    steps.complete(index, made, Some(like.clone()));
                }
            }
        });
        if taken {
            self.urgent = true;
            self.jobs.tell(&pipeline, None, now, format!("{name} is not run: {like} did the same"));
            self.predecessors.has_ended(id, Verdict::Completed);
            self.leave_line_if_begun(&pipeline);
        }
        taken
    }
}

#[cfg(test)]
mod tests;
