//! The part of the book that starts attempts of several ranks: all of them together, or none.
//!
//! The protocol is explained in `agent_model::protocol::gang`. This module decides when a gang may start
//! ([`Assembly`]), and ends one that takes too long for that, or to start ([`Gangs`]).
//!
//! Invariants: an attempt is started at most once, and its go is on disk before any node receives it; it is started
//! only when every rank has reported, since this controller was started, that it is ready and reaches the others; an
//! attempt that is to be stopped is not started any more, and then does not wait for ranks whose node is silent.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::protocol::gang::{GO_WITHIN, Gang, Roster, Seat};
use agent_model::{Boot, Code, Epoch, Fault, JobId, JobState, ReplicaStep, Verdict};

use super::{Book, Held, Moment, Report, without_run};
use crate::store::{Broken, Go, JobRecord, RankEnd, ReplicaRecord};

/// How long the report of a start may take after the date by which a rank must have started.
const SLACK: Duration = Duration::from_secs(15);

/// A phase of an attempt that has a time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GangPhase {
    /// Until every rank could start, from when the first could.
    Gather,
    /// Until every rank has started, from the go.
    Start,
}

/// The time limits of attempts in their present phase.
#[derive(Debug)]
pub(super) struct Gangs {
    gather: Duration,
    due: BTreeMap<JobId, (Epoch, GangPhase, Boot)>,
}

impl Gangs {
    pub(super) fn new(gather: Duration) -> Gangs {
        Gangs { gather, due: BTreeMap::new() }
    }

    /// Loads a job from disk. Its time starts now: it is not stored since when it waits.
    pub(super) fn load(&mut self, job: &JobRecord, now: Boot) {
        if is_gang(job) && job.state.is_placed() {
            let phase = if job.go.is_some() { GangPhase::Start } else { GangPhase::Gather };
            self.expect(job, phase, now);
        }
    }

    fn expect(&mut self, job: &JobRecord, phase: GangPhase, now: Boot) {
        let known = self.due.get(&job.id).is_some_and(|(epoch, of, _)| (*epoch, *of) == (job.epoch, phase));
        if !known {
            let within = match phase {
                GangPhase::Gather => self.gather,
                GangPhase::Start => GO_WITHIN + SLACK,
            };
            self.due.insert(job.id.clone(), (job.epoch, phase, now + within));
        }
    }

    /// The job has no run any more.
    pub(super) fn end(&mut self, job: &JobId) {
        self.due.remove(job);
    }

    /// When the next time limit is over.
    pub(super) fn next(&self) -> Option<Boot> {
        self.due.values().map(|(_, _, at)| *at).min()
    }

    fn over(&mut self, now: Boot) -> Vec<(JobId, Epoch, GangPhase)> {
        let over = self.due.extract_if(.., |_, (_, _, at)| *at <= now);
        over.map(|(job, (epoch, phase, _))| (job, epoch, phase)).collect()
    }
}

fn is_gang(job: &JobRecord) -> bool {
    job.spec.resources.nodes > 1 && job.tasks.is_none()
}

/// How far an attempt is from starting.
#[derive(Debug, PartialEq)]
enum Assembly<'a> {
    /// This rank could not start yet.
    Missing(&'a ReplicaRecord),
    /// This rank has another environment than the first.
    Unlike(&'a ReplicaRecord),
    /// Some rank has not reported yet that it reaches the others.
    Meeting,
    /// Nothing is missing.
    Complete(Roster),
}

impl JobRecord {
    /// Every rank of the latest attempt, if all of them could start.
    fn roster(&self) -> Option<Roster> {
        let seat = |rank: u32| {
            let replica = self.rank(rank)?;
            #[cfg(test)]
            let anyone = || self.replicas.iter().find_map(|other| other.ready.as_ref());
            #[cfg(test)]
            let other = if broken!(GoWithoutAll) { anyone() } else { None };
            #[cfg(not(test))]
            let other = None;
            let place = replica.ready.as_ref().or(other)?.place.clone();
            Some(Seat { node: replica.node.clone(), place })
        };
        (0..self.spec.resources.nodes).map(seat).collect::<Option<_>>().map(Roster)
    }

    /// The gang as a rank's order contains it; `None` before all ranks could start.
    pub(crate) fn gang(&self, rank: u32) -> Option<Gang> {
        if !is_gang(self) {
            return None;
        }
        let first = self.rank(0).and_then(|first| first.ready.as_ref());
        let secret = first.map(|ready| ready.secret.clone()).unwrap_or_default();
        Some(match &self.go {
            Some(Go { roster, until }) => {
                let go = usize::try_from(rank).ok().and_then(|rank| until.get(rank).copied());
                Gang { roster: roster.clone(), secret, go }
            }
            None => Gang { roster: self.roster()?, secret, go: None },
        })
    }

    fn assembly(&self) -> Assembly<'_> {
        let Some(roster) = self.roster() else {
            let missing = self.replicas.iter().filter(|replica| replica.ready.is_none());
            return match missing.min_by_key(|replica| (replica.step, replica.rank)) {
                Some(missing) => Assembly::Missing(missing),
                None => Assembly::Meeting, // a rank is not on record
            };
        };
        let (digest, mut ready) =
            (roster.digest(), self.replicas.iter().filter_map(|r| Some((r, r.ready.as_ref()?))));
        let first = self.rank(0).and_then(|first| first.ready.as_ref()).map(|ready| &ready.environment);
        if let Some((unlike, _)) = ready.clone().find(|(_, ready)| Some(&ready.environment) != first) {
            return Assembly::Unlike(unlike);
        }
        match ready.all(|(_, ready)| ready.met == digest) || broken!(GoWithoutAll) {
            true => Assembly::Complete(roster),
            false => Assembly::Meeting,
        }
    }
}

impl Book {
    /// Takes in whether a rank could start, from a report that is no old copy.
    pub(super) fn hear_ready(&mut self, report: &Report, held: &Held, now: Moment) {
        let id = &held.replica.job;
        let Some(job) = self.jobs.get(id).filter(|job| is_gang(job)) else { return };
        let has_run = held.step >= ReplicaStep::Running && held.started_at.is_some();
        if has_run && job.go.is_none() && !broken!(GoNotRecorded) {
            // It got its go from a controller whose records are lost.
            self.jobs.edit(id, |job| job.go = Some(Go { roster: Roster::default(), until: Vec::new() }));
            self.urgent = true;
        }
        let Some(known) = self.jobs.get(id).and_then(|job| job.rank(held.replica.rank)) else { return };
        if !self.believes(report) || known.ready == held.ready {
            return;
        }
        let place = held.ready.as_ref().filter(|_| known.ready.is_none()).map(|ready| ready.place.clone());
        self.jobs.edit(id, |job| {
            for known in job.replicas.iter_mut().filter(|known| known.rank == held.replica.rank) {
                known.ready.clone_from(&held.ready);
            }
        });
        if let Some(place) = place.filter(|_| held.step < ReplicaStep::Running) {
            let text =
                format!("rank {} could start, at {}:{}", held.replica.rank, place.address, place.first_port);
            self.jobs.tell(id, Some(&report.node), now, text);
        }
        self.muster(id, now);
    }

    /// Gives the go to a gang that is complete, and ends one that cannot become complete.
    fn muster(&mut self, id: &JobId, now: Moment) {
        let Some(job) = self.jobs.get(id) else { return };
        if job.go.is_some() || job.state != JobState::Preparing || job.why_stopped().is_some() {
            return;
        }
        if job.replicas.iter().any(|replica| replica.ready.is_some()) {
            self.gangs.expect(job, GangPhase::Gather, now.boot);
        }
        match job.assembly() {
            Assembly::Missing(_) | Assembly::Meeting => {}
            Assembly::Unlike(unlike) => {
                let what = format!("rank {} on {} has other packages than rank 0", unlike.rank, unlike.node);
                let fault = Fault::new(Code::GangUnlike, what).fix(
                    "name a lock of the environment as `conda_lock`, or remove the older environment where it is kept \
                     (`agentctl envs list`, `agentctl envs rm KEY`)",
                );
                let rank = unlike.rank;
                self.break_gang(id, rank, fault, now);
            }
            Assembly::Complete(roster) => {
                let sent = |seat: &Seat| self.fleet.get(&seat.node).and_then(|node| node.sent);
                let sent: Option<Vec<Boot>> = roster.0.iter().map(sent).collect();
                let heard = roster.0.iter().all(|seat| self.fleet.is_heard(&seat.node));
                let Some(sent) = sent.filter(|_| heard) else { return };
                let until = sent.into_iter().map(|sent| sent + GO_WITHIN).collect();
                self.jobs.edit(id, |job| job.go = Some(Go { roster, until }));
                self.urgent = true;
                if let Some(job) = self.jobs.get(id) {
                    self.gangs.expect(job, GangPhase::Start, now.boot);
                    let text =
                        format!("all {} ranks could start and reach each other: they go", job.replicas.len());
                    self.jobs.tell(id, None, now, text);
                }
            }
        }
    }

    /// Ends an attempt of several ranks because of one of them.
    pub(super) fn break_gang(&mut self, id: &JobId, rank: u32, fault: Fault, now: Moment) {
        self.jobs.tell(id, None, now, format!("given up: {fault}"));
        self.jobs.edit(id, |job| job.broken = Some(Broken { rank, fault }));
        self.urgent = true;
    }

    /// Ends attempts that take too long to start, and the silent ranks of stopped attempts that got no go.
    pub(super) fn expire_gangs(&mut self, now: Moment) {
        for (id, epoch, phase) in self.gangs.over(now.boot) {
            let Some(job) = self.jobs.get(&id).filter(|job| job.epoch == epoch) else { continue };
            if job.why_stopped().is_some() || !job.state.is_placed() {
                continue;
            }
            if let Some((rank, fault)) = too_slow(job, phase, self.gangs.gather) {
                self.break_gang(&id, rank, fault, now);
            }
        }
        self.give_up_silent(now);
    }

    /// A rank without a go has not been started, whatever its node does: nothing waits for it.
    fn give_up_silent(&mut self, now: Moment) {
        if self.fleet.unheard().is_some() {
            return;
        }
        let never_went = |job: &JobRecord| {
            is_gang(job) && (job.go.is_none() || broken!(StartedRankGivenUp)) && job.why_stopped().is_some()
        };
        let stuck = self.jobs.iter().filter(|job| job.state.is_placed() && never_went(job));
        let stuck: Vec<_> = stuck.cloned().collect();
        for job in stuck {
            let silent =
                |replica: &&ReplicaRecord| replica.end.is_none() && !self.fleet.is_heard(&replica.node);
            for replica in job.replicas.iter().filter(silent).cloned().collect::<Vec<_>>() {
                let ended = without_run(Verdict::Canceled, None, now.wall);
                let text = format!("rank {} was never started, and is not waited for", replica.rank);
                self.jobs.tell(&job.id, Some(&replica.node), now, text);
                self.end_rank(&job.replica(replica.rank), RankEnd::Told(ended), now);
            }
        }
    }
}

/// The rank that keeps an attempt from starting, and the fault; `None` when no rank does.
fn too_slow(job: &JobRecord, phase: GangPhase, gather: Duration) -> Option<(u32, Fault)> {
    match phase {
        GangPhase::Gather if job.go.is_none() => {
            let slow = match job.assembly() {
                Assembly::Missing(slow) => slow,
                _ => job.replicas.iter().min_by_key(|replica| (replica.step, replica.rank))?,
            };
            let doing = match slow.step {
                None => "its node has not taken it".to_owned(),
                Some(step) => step.describe_with(&slow.detail),
            };
            let what = format!(
                "rank {} on {} could not start within {} s after the first could",
                slow.rank,
                slow.node,
                gather.as_secs()
            );
            let fault = Fault::new(Code::GangIncomplete, what)
                .why(doing)
                .fix("look at that node (`agentctl nodes`); a longer time can be given with `gang_wait` of the controller");
            Some((slow.rank, fault))
        }
        GangPhase::Start if job.go.is_some() => {
            let waits = |replica: &&ReplicaRecord| {
                replica.end.is_none() && replica.step.is_none_or(|step| step < ReplicaStep::Running)
            };
            let slow = job.replicas.iter().find(waits)?;
            let what = format!(
                "rank {} on {} did not start within {} s after all could",
                slow.rank,
                slow.node,
                GO_WITHIN.as_secs()
            );
            let fault = Fault::new(Code::GangLate, what).fix("look at that node: `agentctl nodes`");
            Some((slow.rank, fault))
        }
        GangPhase::Gather | GangPhase::Start => None,
    }
}

#[cfg(test)]
mod tests;
