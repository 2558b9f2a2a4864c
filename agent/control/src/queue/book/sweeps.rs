//! Sweeps: arrays whose tasks are trials, each with values of its own.
//!
//! A sweep waits in line, is placed, held and canceled as the array that it is ([`arrays`](super::arrays)). Here is
//! what an array has not: the values of a trial, what trials logged, and what follows from that. Invariants: the values
//! of a trial are drawn in the commit that places it, are in its record, and are never drawn again; what a policy
//! decides is in the record of the trial, with its numbers, in the commit that asks its node to end it; an ended trial
//! has all that it logged in its record. What a trial that runs has logged is read again after a start: it is stored
//! where the trial recorded it, so it is not stored here.

mod bayes;

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_model::job::Array;
use agent_model::sweep::{Curve, Decision, Logged, Sampling, Sweep, Trial, Trials, Values};
use agent_model::words::count;
use agent_model::{Boot, Code, Fault, JobEvent, JobId, JobSpec, JobState, ReplicaId, Verdict};

use super::{Book, Moment, arrays};
use crate::store::{ArrayRecord, JobRecord};

/// One sweep that has not ended.
#[derive(Debug)]
struct Going {
    sweep: Box<Sweep>,
    seed: u64,
    trials: Trials,
    /// Its time is over, and all of its trials were asked to end.
    is_over_time: bool,
}

/// The sweeps that have not ended.
#[derive(Debug, Default)]
pub(super) struct Sweeps(BTreeMap<JobId, Going>);

impl Sweeps {
    /// As they are on disk: `jobs` have not ended; `ended` are trials that have, each with the sweep that has use for it.
    pub(super) fn load(jobs: &[JobRecord], ended: &[(JobId, JobRecord)]) -> Sweeps {
        let mut sweeps = Sweeps::default();
        jobs.iter().for_each(|job| sweeps.begin(&job.id, &job.spec));
        ended.iter().for_each(|(sweep, trial)| sweeps.learn(sweep, trial));
        for trial in jobs {
            if let Some((sweep, _)) = trial.task() {
                sweeps.learn(&sweep, trial);
            }
        }
        sweeps
    }

    /// Takes in a trial as it is on record, of this sweep or of one that it extends.
    pub(super) fn learn(&mut self, sweep: &JobId, job: &JobRecord) {
        if let (Some((_, index)), Some(trial)) = (job.task(), &job.trial)
            && let Some(going) = self.0.get_mut(sweep)
        {
            going.trials.load(index, (**trial).clone(), job.state.verdict());
        }
    }

    /// A sweep was submitted.
    pub(super) fn begin(&mut self, id: &JobId, spec: &JobSpec) {
        if let Some(sweep) = spec.sweep.clone() {
            let seed = sweep.sampling.seed(id.as_str());
            let going = Going { sweep, seed, trials: Trials::default(), is_over_time: false };
            self.0.insert(id.clone(), going);
        }
    }

    /// It has ended.
    pub(super) fn end(&mut self, id: &JobId) {
        self.0.remove(id);
    }

    pub(super) fn has(&self, id: &JobId) -> bool {
        self.0.contains_key(id)
    }

    /// The values that a trial gets if it is placed now; `None` of an array.
    pub(super) fn draw(&self, sweep: &JobRecord, index: u32) -> Option<Values> {
        let Going { sweep, seed, trials, .. } = self.0.get(&sweep.id)?;
        let given = sweep.given.get(&index).cloned();
        Some(given.unwrap_or_else(|| match sweep.sampling {
            Sampling::Bayesian { .. } => bayes::draw(sweep, *seed, trials, index),
            _ => sweep.drawn(*seed, index, 0),
        }))
    }

    /// How a sweep ends whose trials have ended. Trials that a policy ended, or that failed, do not fail it.
    pub(super) fn verdict(
        &self,
        job: &JobRecord,
        sweep: &Sweep,
        tasks: &ArrayRecord,
    ) -> (Verdict, Option<Fault>) {
        let Some(going) = self.0.get(&job.id) else { return (tasks.verdict(), None) };
        let metric = &sweep.objective.metric;
        // Trials of a sweep that it extends say nothing of how this one ended.
        let own = job.spec.array.as_ref().map(Array::indices);
        let is_own = |index: u32| own.is_some_and(|own| own.contains(index));
        let ended =
            going.trials.iter().filter(|(index, _, end)| is_own(*index) && *end == Some(Verdict::Completed));
        let ended: Vec<&Trial> = ended.map(|(_, trial, _)| trial).collect();
        if ended.iter().any(|trial| trial.curve.best.is_some()) {
            return (Verdict::Completed, None);
        }
        let completed = ended.len();
        let fault = match (completed, tasks.failed.is_empty()) {
            (0, false) => arrays::failed(job, tasks),
            (0, true) if going.is_over_time => Some(over_time(sweep)),
            (0, true) => return (Verdict::Canceled, None),
            _ => {
                let what = format!(
                    "no trial logged the metric `{metric}`, and {} completed",
                    count(completed as u64, "trial")
                );
                Some(no_metric(what, &going.trials, job))
            }
        };
        (Verdict::Failed, fault)
    }
}

fn over_time(sweep: &Sweep) -> Fault {
    let limit = sweep.timeout.unwrap_or_default().as_secs();
    Fault::new(
        Code::TimeLimit,
        format!("the sweep ran longer than its limit of {limit} s, and no trial had completed"),
    )
    .fix("set a longer `limits.timeout`")
}

fn no_metric(what: String, trials: &Trials, job: &JobRecord) -> Fault {
    let others: Vec<String> = trials.others().into_iter().take(20).map(|name| format!("`{name}`")).collect();
    let logged = match others.is_empty() {
        true => "they logged no metric at all".to_owned(),
        false => format!("they logged {}", others.join(", ")),
    };
    Fault::new(Code::MetricMissing, what).why(logged).fix(format!(
        "write one of the names that are logged as `objective.primary_metric`, or log it; see agentctl metrics {}",
        job.id.task(0).map(String::from).unwrap_or_default()
    ))
}

/// `batch=16, lr=0.01`
fn told(values: &Values) -> String {
    let texts: Vec<String> = values.iter().map(|(name, value)| format!("{name}={value}")).collect();
    texts.join(", ")
}

impl Book {
    /// A trial gets a record.
    pub(super) fn begin_trial(&mut self, id: &JobId, sweep: &JobId, index: u32, trial: &Trial, now: Moment) {
        if let Some(going) = self.sweeps.0.get_mut(sweep) {
            going.trials.begin(index, trial.values.clone());
        }
        let values = told(&trial.values);
        self.jobs.tell(id, None, now, format!("trial {index} of {sweep}: {values}"));
        self.jobs.tell(sweep, None, now, format!("trial {index}: {values}"));
    }

    /// Takes in what a trial logged; false when it does not come from the latest attempt of a trial.
    pub(crate) fn observe(&mut self, replica: &ReplicaId, logged: Logged, now: Moment) -> bool {
        let current = |job: &&Arc<JobRecord>| job.epoch == replica.epoch && !job.state.is_terminal();
        let Some((sweep, index)) = self.jobs.get(&replica.job).filter(current).and_then(|job| job.task())
        else {
            return false;
        };
        let Some(going) = self.sweeps.0.get_mut(&sweep) else { return false };
        going.trials.observe(index, logged);
        let Some(Curve { count, last, best, .. }) = going.trials.get(index).map(|trial| &trial.curve) else {
            return false;
        };
        let shown = Curve { count: *count, last: *last, best: *best, points: Vec::new() };
        self.jobs.note(&replica.job, |job| {
            if let Some(trial) = &mut job.trial {
                trial.curve = shown;
            }
        });
        self.follow(&sweep, now);
        true
    }

    /// Does what follows from what is known of the trials.
    fn follow(&mut self, sweep: &JobId, now: Moment) {
        let Some(going) = self.sweeps.0.get_mut(sweep) else { return };
        for decision in going.trials.next(&going.sweep) {
            match decision {
                Decision::Stop(index, stop) => {
                    let Some(id) = sweep.task(index) else { continue };
                    // Its verdict may be fixed already.
                    let state = self.jobs.state(&id);
                    if state.and_then(|state| state.after(JobEvent::CancelRequested)).is_none() {
                        continue;
                    }
                    self.jobs.edit(&id, |job| {
                        job.trial.iter_mut().for_each(|trial| trial.stop = Some(stop.clone()));
                    });
                    self.jobs.tell(sweep, None, now, format!("trial {index} is ended by {stop}"));
                    self.cancel(&id, &format!("the policy {stop}"), now);
                }
                Decision::NoMetric(index) => self.tell_no_metric(sweep, index, now),
            }
        }
    }

    fn tell_no_metric(&mut self, sweep: &JobId, index: u32, now: Moment) {
        let (Some(going), Some(job)) = (self.sweeps.0.get(sweep), self.jobs.get(sweep)) else { return };
        let metric = &going.sweep.objective.metric;
        let fault =
            no_metric(format!("trial {index} completed and logged no metric `{metric}`"), &going.trials, job);
        self.jobs.tell(sweep, None, now, fault.to_string());
    }

    /// A job has ended: if it is a trial, all that it logged is put into its record, and its sweep hears of it.
    pub(super) fn end_trial(&mut self, id: &JobId, now: Moment) {
        let Some((sweep, index)) = self.jobs.get(id).and_then(|job| job.task()) else { return };
        let verdict = self.jobs.verdict(id);
        let Some(going) = self.sweeps.0.get_mut(&sweep) else { return };
        going.trials.end(index, verdict);
        let Some(trial) = going.trials.get(index).cloned() else { return };
        let (best, metric) = (going.trials.best(going.sweep.objective.goal), &going.sweep.objective.metric);
        let is_best = best.is_some_and(|best| best.trial == index);
        let state = JobState::from(verdict).name();
        let value = match trial.curve.best {
            Some(value) => format!("best {metric} {value} of {}", count(trial.curve.count, "logging")),
            None => format!("no {metric}"),
        };
        let first = if is_best { ", the best so far" } else { "" };
        self.jobs.edit(id, |job| {
            let stop = job.trial.as_ref().and_then(|trial| trial.stop.clone());
            job.trial = Some(Box::new(Trial { stop, ..trial }));
        });
        let made = self.jobs.get(id).and_then(|job| job.made.clone()).filter(|_| is_best);
        self.jobs.edit(&sweep, |job| {
            job.best = best;
            job.made = made.or(job.made.take());
        });
        self.jobs.tell(&sweep, None, now, format!("trial {index} {state}: {value}{first}"));
        self.follow(&sweep, now);
    }

    /// Ends the trials of the sweeps whose time is over.
    pub(super) fn expire_sweeps(&mut self, now: Moment) {
        let due = |job: &Arc<JobRecord>, going: &Going| {
            let (Some(began), Some(limit)) = (job.started_at, going.sweep.timeout) else { return false };
            !going.is_over_time && now.wall >= began + limit
        };
        let going = self.sweeps.0.iter();
        let due = going.filter(|(id, going)| self.jobs.get(id).is_some_and(|job| due(job, going)));
        for id in due.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            if let Some(going) = self.sweeps.0.get_mut(&id) {
                going.is_over_time = true;
            }
            self.urgent = true;
            self.jobs.tell(&id, None, now, "its time is over: all of its trials are ended".to_owned());
            self.cancel_tasks(&id, "the time limit of its sweep", now);
        }
    }

    /// When the time of a sweep is over next.
    pub(super) fn next_sweep_end(&self, now: Moment) -> Option<Boot> {
        let ends = self
            .sweeps
            .0
            .iter()
            .filter(|(_, going)| !going.is_over_time)
            .filter_map(|(id, going)| Some(self.jobs.get(id)?.started_at? + going.sweep.timeout?));
        ends.min().map(|end| now.boot + end.since(now.wall))
    }
}

#[cfg(test)]
mod tests;
