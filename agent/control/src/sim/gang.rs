//! Gangs: several replicas under one epoch, all of them or none.
//!
//! The book does not place gangs yet, so this is their rule alone, with the real leases, orders and node: a
//! rank that is lost or fails ends all of them, and the next epoch is given only when every rank of the one
//! before is proven gone, by its node or by its lease.

use std::collections::BTreeMap;

use agent_model::job::{Limits, OnDisconnect};
use agent_model::{Boot, Epoch, JobDraft, JobId, JobState, NodeId, ReplicaId, Timestamp, Verdict};

use super::mutant::{self, Mutant};
use super::node::terms;
use super::world::GRACE;
use crate::lease::{Desired, Leases, Order};
use crate::queue::{Report, Standing};
use crate::store::{JobRecord, ReplicaRecord};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Up,
    /// A rank is gone; the others are being ended.
    Ending,
    Over,
}

#[derive(Debug, Clone)]
struct Rank {
    node: NodeId,
    named: bool,
    /// It can have no process any more.
    gone: bool,
    /// Its result is in, and it is this.
    result: Option<Verdict>,
}

/// A gang, as it is written down.
#[derive(Debug, Clone)]
pub(super) struct Gang {
    record: JobRecord,
    phase: Phase,
    ranks: Vec<Rank>,
}

impl Gang {
    /// A gang of two ranks that waits.
    pub(super) fn new(name: &str) -> Gang {
        let limits = Limits { grace: Some(GRACE), on_disconnect: OnDisconnect::Replace, ..Limits::default() };
        let draft = JobDraft { command: "true".into(), limits, ..JobDraft::default() };
        let record = JobRecord {
            id: name.parse().unwrap(),
            seq: 0,
            request: String::new(),
            spec: draft.validate().unwrap(),
            state: JobState::Queued,
            epoch: Epoch(0),
            uncharged: 0,
            not_before: None,
            avoid: None,
            submitted_at: Timestamp(0),
            started_at: None,
            ended_at: None,
            cancel: None,
            replicas: Vec::new(),
            outcome: None,
        };
        Gang { record, phase: Phase::Waiting, ranks: Vec::new() }
    }

    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    fn lose(&mut self, rank: usize) {
        self.ranks[rank].gone = true;
        if self.phase == Phase::Up {
            self.phase = Phase::Ending;
        }
    }
}

/// The gangs of one life of the controller.
#[derive(Debug)]
pub(super) struct Gangs {
    pub(super) all: Vec<Gang>,
    leases: Leases,
    boots: BTreeMap<NodeId, (String, Boot)>,
    /// Something was decided.
    pub(super) urgent: bool,
}

/// Whether a replica is of a gang.
pub(super) fn is_gang(job: &JobId) -> bool {
    job.as_str().starts_with('g')
}

impl Gangs {
    pub(super) fn new(all: Vec<Gang>, now: Boot) -> Gangs {
        let mut leases = Leases::new(terms());
        for gang in all.iter().filter(|gang| matches!(gang.phase, Phase::Up | Phase::Ending)) {
            leases.grant(&gang.record, None, now);
        }
        Gangs { all, leases, boots: BTreeMap::new(), urgent: false }
    }

    /// Takes in what a node says of the ranks of gangs, and is `believed` to have no more.
    pub(super) fn report(&mut self, report: &Report, believed: bool, now: Boot) {
        let latest = self.boots.insert(report.node.clone(), (report.boot_id.clone(), report.sent));
        let rebooted = latest.as_ref().is_none_or(|(boot, _)| *boot != report.boot_id);
        if let Some((_, sent)) = latest.filter(|(_, sent)| !rebooted && report.sent < *sent) {
            self.boots.insert(report.node.clone(), (report.boot_id.clone(), sent));
            return;
        }
        for gang in &mut self.all {
            for rank in 0..gang.ranks.len() {
                let replica = gang.record.replica(rank as u32);
                if gang.ranks[rank].node != report.node || gang.ranks[rank].gone {
                    continue;
                }
                if rebooted {
                    self.leases.rebooted(&replica);
                }
                match report.replicas.iter().find(|held| held.replica == replica) {
                    Some(held) => {
                        self.urgent |= !gang.ranks[rank].named;
                        gang.ranks[rank].named = true;
                        if held.alive {
                            self.leases.renew(&replica, report.sent, now);
                        }
                    }
                    None if gang.ranks[rank].named && !believed => {}
                    None if gang.ranks[rank].named => {
                        self.urgent = true;
                        gang.lose(rank);
                    }
                    None if gang.phase == Phase::Up => self.leases.offer(&replica, report.sent, now),
                    None => {}
                }
            }
        }
    }

    pub(super) fn standing(&self, replica: &ReplicaId) -> Standing {
        match self.all.iter().find(|gang| gang.record.id == replica.job) {
            Some(gang) if gang.record.epoch == replica.epoch && gang.phase != Phase::Waiting => {
                match gang.ranks.get(replica.rank as usize) {
                    Some(rank) if rank.result.is_some() => Standing::Settled,
                    Some(rank) if !rank.gone => Standing::Open,
                    _ => Standing::Fenced,
                }
            }
            _ => Standing::Fenced,
        }
    }

    pub(super) fn settle(&mut self, replica: &ReplicaId, verdict: Verdict) {
        let Some(gang) = self.all.iter_mut().find(|gang| gang.record.id == replica.job) else { return };
        let rank = replica.rank as usize;
        gang.ranks[rank].result = Some(verdict);
        self.urgent = true;
        if verdict == Verdict::Completed {
            gang.ranks[rank].gone = true;
        } else {
            gang.lose(rank);
        }
        if gang.phase == Phase::Up && gang.ranks.iter().all(|rank| rank.gone) {
            gang.phase = Phase::Over;
            self.leases.end(&gang.record.id);
        }
    }

    /// Ends leases, and places gangs whose former ranks are all gone on `nodes`.
    pub(super) fn tick(&mut self, now: Boot, nodes: &[(NodeId, Boot)]) {
        for replica in self.leases.over(now) {
            if let Some(gang) = self.all.iter_mut().find(|gang| gang.record.id == replica.job) {
                let rank = replica.rank as usize;
                if !gang.ranks[rank].gone {
                    self.urgent = true;
                    gang.lose(rank);
                }
            }
        }
        for gang in &mut self.all {
            let gone = match mutant::is(Mutant::GangRestartedPartly) {
                true => gang.ranks.iter().any(|rank| rank.gone),
                false => gang.ranks.iter().all(|rank| rank.gone),
            };
            let ready = gang.phase == Phase::Waiting || (gang.phase == Phase::Ending && gone);
            if !ready || nodes.len() < 2 {
                continue;
            }
            self.urgent = true;
            self.leases.end(&gang.record.id);
            gang.phase = Phase::Up;
            gang.record.epoch = gang.record.epoch.next();
            let start = gang.record.epoch.0 as usize;
            let chosen = [&nodes[start % nodes.len()], &nodes[(start + 1) % nodes.len()]];
            let rank = |node: &NodeId| Rank { node: node.clone(), named: false, gone: false, result: None };
            gang.ranks = chosen.map(|(node, _)| rank(node)).into();
            gang.record.replicas.clear();
            for (rank, (node, _)) in chosen.iter().enumerate() {
                let (boot_id, detail) = (String::new(), String::new());
                let rank = rank as u32;
                gang.record.replicas.push(ReplicaRecord {
                    rank,
                    node: node.clone(),
                    boot_id,
                    step: None,
                    detail,
                });
            }
            self.leases.grant(&gang.record, None, now);
            for (rank, (_, sent)) in chosen.iter().enumerate() {
                self.leases.renew(&gang.record.replica(rank as u32), *sent, now);
            }
        }
    }

    /// When the next lease is over. One that is over already says nothing: the others are noticed with the
    /// next message.
    pub(super) fn next(&self, now: Boot) -> Option<Boot> {
        self.leases.next().filter(|at| *at > now)
    }

    /// What a node should hold of gangs.
    pub(super) fn orders(&self, node: &NodeId) -> Vec<Order> {
        let mut orders = Vec::new();
        for gang in &self.all {
            for (rank, state) in gang.ranks.iter().enumerate().filter(|(_, rank)| rank.node == *node) {
                let replica = gang.record.replica(rank as u32);
                let desired = match (gang.phase, state.result) {
                    (_, Some(_)) => Desired::Forget,
                    (Phase::Up, None) => {
                        let until = self.leases.until(&replica);
                        Desired::Run(gang.record.spec.clone(), until)
                    }
                    (Phase::Ending, None) if !state.gone => {
                        Desired::Stop { grace: GRACE, reason: "another rank is gone".into() }
                    }
                    _ => continue,
                };
                orders.push(Order { replica, desired });
            }
        }
        orders
    }

    /// The latest report of each node that was heard in this life.
    pub(super) fn heard(&self) -> Vec<(NodeId, Boot)> {
        self.boots.iter().map(|(node, (_, sent))| (node.clone(), *sent)).collect()
    }
}
