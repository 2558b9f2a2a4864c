//! One pass of the scheduler over the line, and what follows from it for each job: a place, or a reason to wait.

use std::collections::HashSet;
use std::time::Duration;

use agent_model::{Fault, JobEvent, JobId, NodeId, Retry};

use super::{Book, Moment, arrays, dates, line, pipelines};
use crate::scheduler::{self, Pending, Wait};
use crate::store::ReplicaRecord;

impl Book {
    /// Places what can be placed, if anything changed since the last time.
    pub(crate) fn schedule(&mut self, now: Moment) {
        self.settle_predecessors(now);
        self.end_overdue(now);
        let come = self.line.come(now.wall);
        if !std::mem::take(&mut self.replan) && !come {
            return;
        }
        self.follow_pipelines(now);
        self.end_arrays_again(now);
        let (rooms, pythons) = self.rooms(now);
        let (pending, waiting) = self.waiting(arrays::most(&rooms));
        let decided = scheduler::place(&pending, rooms, &pythons, self.limits);
        let mut placed = Vec::with_capacity(decided.placed.len());
        for (job, nodes) in decided.placed {
            self.start_task(&job, now);
            self.place(&job, &nodes, now);
            placed.push(job);
        }
        // Of an array the first task that waits has the reason.
        let mut known = HashSet::new();
        for (job, reason) in waiting.into_iter().chain(decided.waiting) {
            let job = self.in_line(job);
            if known.insert(job.clone()) {
                self.explain(&job, reason, now);
            }
        }
        self.explain_full_arrays(&placed, now);
    }

    /// Notes why a job waits.
    pub(super) fn explain(&mut self, id: &JobId, reason: Wait, now: Moment) {
        if let Some(reason) = self.line.explain(id, reason) {
            self.jobs.tell(id, None, now, format!("waits: {reason}"));
        }
    }

    /// The jobs that need only room, and those that must wait for something else. Of an array there are at most as many
    /// tasks as `room` and one more.
    pub(super) fn waiting(&self, room: usize) -> (Vec<Pending>, Vec<(JobId, Wait)>) {
        let (mut pending, mut waiting) = (Vec::new(), Vec::new());
        let unheard = self.fleet.unheard();
        for job in self.line.iter().filter_map(|id| self.jobs.get(id)) {
            if let Some(nodes) = unheard.clone() {
                waiting.push((job.id.clone(), Wait::Unheard { nodes }));
            } else if let Some(wait) = scheduler::blocked(self.held_by(job), &job.waits_for) {
                waiting.push((job.id.clone(), wait));
            } else if self.line.has_date(&job.id) {
                waiting.push((job.id.clone(), dates::wait(job)));
            } else if let Some(why) = self.closed.clone() {
                waiting.push((job.id.clone(), Wait::Closed { why }));
            } else if let Some(steps) = pipelines::running(job) {
                waiting.push((job.id.clone(), Wait::Steps { steps }));
            } else if let Some(tasks) = &job.tasks {
                match arrays::offered(job, tasks, room) {
                    Ok(offered) => pending.extend(offered),
                    Err(wait) => waiting.push((job.id.clone(), wait)),
                }
            } else {
                pending.push(line::pending(job));
            }
        }
        (pending, waiting)
    }

    /// A new attempt, with a node for each rank.
    fn place(&mut self, id: &JobId, nodes: &[NodeId], now: Moment) {
        if !self.jobs.advance(id, JobEvent::Placed) {
            return;
        }
        let (fleet, lives) = (&mut self.fleet, &mut self.lives);
        self.jobs.edit(id, |job| {
            let epoch = lives.next(job.epoch);
            job.uncharged += epoch.0 - job.epoch.next().0; // a gap is no failure
            (job.epoch, job.not_before, job.started_at) = (epoch, None, None);
            let mark = lives.mark();
            let replica = |(rank, node)| ReplicaRecord {
                rank,
                placed: Some(mark.clone()),
                ..ReplicaRecord::on(node, fleet.get(node).map_or("", |node| &node.record.boot_id))
            };
            job.replicas = (0..).zip(nodes).map(replica).collect();
            (job.go, job.broken, job.so_far) = (None, None, None);
        });
        let Some(job) = self.jobs.get(id) else { return };
        let attempt = job.epoch;
        for replica in &job.replicas {
            let sent = fleet.get(&replica.node).and_then(|node| node.sent);
            self.leases.grant_run(job, replica.rank, sent, now.boot);
            fleet.assign(&replica.node, id);
        }
        self.line.leave(job);
        self.urgent = true;
        let names: Vec<&str> = nodes.iter().map(NodeId::as_str).collect();
        let only = nodes.first().filter(|_| nodes.len() == 1);
        self.jobs.tell(id, only, now, format!("placed on {} as attempt {attempt}", names.join(", ")));
    }

    /// Back in line after a failed or lost attempt.
    pub(super) fn requeue(&mut self, id: &JobId, fault: &Fault, node: NodeId, now: Moment) {
        self.leave_node(id);
        let Some(job) = self.jobs.get(id) else { return };
        let next = self.lives.next(job.epoch);
        let counted = u32::try_from(job.epoch.0 + 1 - job.uncharged).unwrap_or(u32::MAX);
        let wait = match fault.retry {
            _ if fault.is_free() => Duration::ZERO,
            Retry::SameNode => Duration::ZERO,
            Retry::After(at_least) => job.spec.retry.wait_before(counted).max(at_least),
            Retry::Never | Retry::OtherNode => job.spec.retry.wait_before(counted),
        };
        self.jobs.edit(id, |job| {
            job.avoid = Some(node).filter(|_| fault.retry == Retry::OtherNode);
            job.not_before = Some(now.wall + wait);
            job.leave_replicas();
        });
        self.jobs.get(id).into_iter().for_each(|job| self.line.join(job));
        self.replan = true;
        let when = if wait.is_zero() { "now".to_owned() } else { format!("in {} s", wait.as_secs_f32()) };
        self.jobs.tell(id, None, now, format!("attempt {next} may start {when}"));
    }
}
