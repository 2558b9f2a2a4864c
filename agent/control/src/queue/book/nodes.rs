//! The half of the book that hears nodes: reports, lost replicas, ended leases, room and orders.
//!
//! Invariants: a report is the whole truth about its node; a replica that the node once named and names no
//! more is lost, also when the machine was restarted; silence alone never takes a job from its node.

use std::collections::BTreeSet;

use agent_model::machine::{Eligibility, Liveness, LivenessEvent};
use agent_model::node::{Grade, Inventory, Load};
use agent_model::{Code, Fault, JobEvent, JobId, JobState, NodeId, ReplicaId, ReplicaStep, Timestamp};

use super::{Book, Moment, Standing, may_retry, without_run};
use crate::lease::{self, Order};
use crate::scheduler::{Room, Taken};
use crate::store::{NodeRecord, ReplicaRecord};

/// What a node says about itself and what it holds.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) node: NodeId,
    pub(crate) boot_id: String,
    pub(crate) inventory: Option<Inventory>,
    pub(crate) load: Load,
    pub(crate) replicas: Vec<Held>,
}

/// A replica a node holds.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) replica: ReplicaId,
    pub(crate) step: ReplicaStep,
    pub(crate) detail: String,
    pub(crate) started_at: Option<Timestamp>,
}

/// A node and what is only known while the controller runs.
#[derive(Debug, Clone)]
pub(crate) struct NodeState {
    pub(crate) record: NodeRecord,
    pub(crate) load: Load,
    /// Its Sync stream is open.
    pub(crate) linked: bool,
    /// The jobs placed on it.
    pub(crate) jobs: BTreeSet<JobId>,
}

impl NodeState {
    pub(super) fn new(record: NodeRecord) -> NodeState {
        NodeState { record, load: Load::default(), linked: false, jobs: BTreeSet::new() }
    }

    /// Why it takes no new work, for people.
    fn closed(&self) -> Option<&'static str> {
        match (self.record.eligibility, self.record.liveness) {
            (Eligibility::Draining, _) => Some("is being drained"),
            (Eligibility::Cordoned, _) => Some("is cordoned"),
            (_, Liveness::Degraded) => Some("fails a check, see `agentctl doctor`"),
            (_, Liveness::NotResponding | Liveness::Down) => Some("does not answer"),
            (_, Liveness::Removed) => Some("was removed"),
            (_, Liveness::Enrolling | Liveness::Ready) => (!self.linked).then_some("is not connected"),
        }
    }
}

impl Book {
    /// Takes in what a node says, whole.
    pub(crate) fn report(&mut self, report: &Report, now: Moment) {
        let id = &report.node;
        let mut node = self.nodes.remove(id).unwrap_or_else(|| {
            NodeState::new(NodeRecord {
                id: id.clone(),
                boot_id: String::new(),
                liveness: Liveness::Enrolling,
                eligibility: Eligibility::Open,
                last_seen: now.wall,
                inventory: Inventory::default(),
            })
        });
        let before = NodeRecord { last_seen: now.wall, ..node.record.clone() };
        if let Some(inventory) = &report.inventory {
            node.record.inventory = inventory.clone();
        }
        let healthy = node.record.inventory.findings.iter().all(|finding| finding.grade != Grade::Bad);
        node.record.liveness = node.record.liveness.after(LivenessEvent::Synced { healthy });
        node.record.boot_id = report.boot_id.clone();
        node.record.last_seen = now.wall;
        node.load = report.load;
        if node.record != before {
            self.dirty_nodes.insert(id.clone());
            self.replan = true;
        }
        let jobs: Vec<JobId> = node.jobs.iter().cloned().collect();
        self.nodes.insert(id.clone(), node);
        self.leases.renew(id, now.steady);

        for held in &report.replicas {
            self.see(id, &report.boot_id, held, now);
        }
        for job in jobs {
            self.miss(&job, report, now);
        }
        let holds = |replica: &ReplicaId| report.replicas.iter().any(|held| held.replica == *replica);
        self.settled.retain(|replica, settled| {
            let gone = settled.node == *id && settled.hear(holds(replica));
            if gone {
                self.changes.forgotten.push(replica.clone());
            }
            !gone
        });
    }

    /// The node holds this replica: evidence that it is alive, and where it stands.
    fn see(&mut self, node: &NodeId, boot_id: &str, held: &Held, now: Moment) {
        let id = &held.replica.job;
        if self.standing(&held.replica, node) != Standing::Open {
            return;
        }
        if self.advance(id, JobEvent::SeenAgain) {
            self.tell(id, Some(node), now, format!("{node} answers again"));
        }
        let Some(replica) = self
            .jobs
            .get(id)
            .and_then(|job| job.replicas.iter().find(|replica| replica.rank == held.replica.rank))
        else {
            return;
        };
        let stepped = replica.step != Some(held.step);
        if stepped || replica.detail != held.detail || replica.boot_id != boot_id {
            self.edit(id, |job| {
                job.started_at = held.started_at.or(job.started_at);
                for replica in job.replicas.iter_mut().filter(|replica| replica.rank == held.replica.rank) {
                    replica.step = Some(held.step);
                    replica.detail.clone_from(&held.detail);
                    boot_id.clone_into(&mut replica.boot_id);
                }
            });
        }
        if stepped {
            let mut text = held.step.describe().to_owned();
            if !held.detail.is_empty() && held.detail != text {
                text = format!("{text}: {}", held.detail);
            }
            self.tell(id, Some(node), now, text);
        }
        let running = |replica: &ReplicaRecord| replica.step >= Some(ReplicaStep::Running);
        if self.jobs.get(id).is_some_and(|job| job.replicas.iter().all(running)) {
            self.advance(id, JobEvent::AllRunning);
        }
    }

    /// Declares the replicas of `job` lost that the node had and now has not.
    fn miss(&mut self, id: &JobId, report: &Report, now: Moment) {
        let Some(job) = self.jobs.get(id) else { return };
        let holds = |replica: &ReplicaId| report.replicas.iter().any(|held| held.replica == *replica);
        let lost = job
            .replicas
            .iter()
            .filter(|replica| replica.node == report.node && !holds(&job.replica(replica.rank)))
            .find_map(|replica| lease::lost(replica, &report.boot_id));
        let Some(code) = lost else { return };
        let fault = match code {
            Code::NodeRebooted => {
                Fault::new(code, format!("{} was restarted while the job was there", report.node))
            }
            _ => Fault::new(code, format!("{} does not know the job any more", report.node)),
        };
        let retry = may_retry(job, &fault);
        self.tell(id, Some(&report.node), now, format!("lost: {fault}"));
        self.advance(id, JobEvent::LeaseExpired);
        self.advance(id, JobEvent::GraceOver { retry });
        self.urgent = true;
        if self.state(id) == Some(JobState::Queued) {
            self.requeue(id, &fault, now);
        } else {
            let verdict = self.verdict(id);
            self.end(id, without_run(verdict, Some(fault), now.wall), now);
            self.edit(id, |job| job.replicas.clear()); // what the node may still deliver is fenced
        }
    }

    /// Ends the leases that are over.
    pub(crate) fn expire(&mut self, now: Moment) {
        for id in self.leases.tick(now.steady) {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.record.liveness = node.record.liveness.after(LivenessEvent::LeaseOver);
            self.dirty_nodes.insert(id.clone());
            self.replan = true;
            for job in node.jobs.clone() {
                if self.advance(&job, JobEvent::LeaseExpired) {
                    self.tell(&job, Some(&id), now, format!("{id} stopped answering"));
                }
            }
        }
    }

    /// Says which nodes have an open stream.
    pub(crate) fn link(&mut self, linked: impl Fn(&NodeId) -> bool) {
        for (id, node) in &mut self.nodes {
            let now = linked(id);
            self.replan |= node.linked != now;
            node.linked = now;
        }
    }

    /// The size of a node, and what takes room on it.
    pub(super) fn room(&self, node: &NodeState) -> Room {
        let inventory = &node.record.inventory;
        Room {
            node: node.record.id.clone(),
            closed: node.closed(),
            slots: inventory.slots,
            gpus: u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX),
            memory: inventory.memory,
            taken: node
                .jobs
                .iter()
                .filter_map(|id| self.jobs.get(id))
                .map(|job| Taken {
                    job: job.id.clone(),
                    gpus: job.spec.resources.gpus,
                    memory: job.spec.resources.memory,
                })
                .collect(),
        }
    }

    /// What `node` should hold now.
    pub(crate) fn orders(&self, node: &NodeId) -> Vec<Order> {
        let jobs = self.nodes.get(node).into_iter().flat_map(|node| &node.jobs);
        let settled =
            self.settled.iter().filter(|(_, settled)| settled.node == *node).map(|(replica, _)| replica);
        lease::orders(node, jobs.filter_map(|id| self.jobs.get(id)).map(|job| &**job), settled)
    }
}
