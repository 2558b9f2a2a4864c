//! A machine of the simulation: its clock, its disk, its supervisors, its agent.
//!
//! The decisions of the agent and the supervisors come from `agent_model::protocol`, as in the programs. This module
//! models how those programs carry them out, and what is lost when: the memory of the agent when its process ends, a
//! supervisor at a reboot, a job directory never.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use agent_model::lease::Terms;
use agent_model::outcome::UsedEnvironment;
use agent_model::protocol::gang::{RankPlace, Ready};
use agent_model::protocol::orders::{Desired, OrderFence, Stamps};
use agent_model::protocol::start::Deadline;
use agent_model::{
    Boot, Code, Epoch, ExitStatus, Fault, JobId, JobSpec, NodeId, Outcome, ReplicaId, ReplicaStep,
};
use agent_model::{Timestamp, Verdict};

use crate::queue::Held;

/// A clock that runs a little too fast or too slow. Times are in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Drifting {
    /// When it was set to zero, in true time.
    pub(super) since: u64,
    /// By how many millionths it is too fast.
    pub(super) ppm: i64,
}

impl Drifting {
    fn rate(self) -> u64 {
        (1_000_000 + self.ppm) as u64
    }

    pub(super) fn boot(self, now: u64) -> Boot {
        Boot(Duration::from_micros((now - self.since) * self.rate() / 1000))
    }

    /// When, in true time, it has shown `boot`.
    pub(super) fn when(self, boot: Boot) -> u64 {
        self.since + ((boot.0.as_micros() as u64) * 1000).div_ceil(self.rate()) + 1
    }
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Code(i32),
    Stopped,
    LeaseOver,
}

/// A job directory: what a power cut leaves.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    pub(super) spec: JobSpec,
    /// The mark of a start.
    pub(super) started: bool,
    pub(super) exit: Option<End>,
    /// Its outcome, once decided.
    pub(super) ending: Option<(Verdict, Option<Fault>)>,
    /// The length of the log, once it does not grow any more.
    pub(super) written: u64,
    /// Below this the log is deleted: the controller has it.
    pub(super) trimmed: u64,
}

/// A supervisor and its command.
#[derive(Debug, Clone)]
pub(super) struct Shim {
    /// Distinguishes events of this one from those of another.
    pub(super) instance: u64,
    pub(super) started_at: u64,
    pub(super) deadline: Deadline,
    pub(super) grace: Duration,
    /// How it will end, when it was asked to.
    pub(super) dying: Option<End>,
    /// The command ended, but the supervisor hangs: it answers nobody and writes no record.
    pub(super) hung: bool,
    /// Milliseconds between two lines of output.
    pub(super) pace: u64,
}

impl Shim {
    pub(super) fn written(&self, now: u64) -> u64 {
        (now - self.started_at) / self.pace
    }
}

/// The progress of the agent with a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Preparing,
    /// A rank of a gang that could start, and waits for its go.
    Ready,
    /// Everything is ready, but the lease is over.
    Unleased,
    Running,
    /// The command ended; the log and the outcome are being sent.
    Ending,
    Done,
}

/// What the agent has in memory about a replica.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) desired: Desired,
    pub(super) deadline: Deadline,
    pub(super) work: Work,
    /// How much of the log the controller has, as it reported.
    pub(super) stored: Option<u64>,
    /// The controller wants none of the log.
    pub(super) unwanted: bool,
    /// What it reported when it could start, in this process of the agent.
    pub(super) ready: Option<Ready>,
}

impl Run {
    pub(super) fn new(desired: Desired, deadline: Deadline, work: Work) -> Run {
        Run { desired, deadline, work, stored: None, unwanted: false, ready: None }
    }

    pub(super) fn step(&self) -> ReplicaStep {
        match self.work {
            Work::Preparing => ReplicaStep::Fetching,
            Work::Ready | Work::Unleased => ReplicaStep::Launching,
            Work::Running => ReplicaStep::Running,
            Work::Ending => ReplicaStep::Uploading,
            Work::Done => ReplicaStep::Reported,
        }
    }
}

/// One process of the agent.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) session: u64,
    pub(super) order_fence: OrderFence,
    pub(super) stamps: Stamps,
    pub(super) runs: BTreeMap<ReplicaId, Run>,
    /// Jobs of which some attempt got a go: only a mistake uses it.
    pub(super) gone: BTreeSet<JobId>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) slots: u32,
    pub(super) clock: Drifting,
    pub(super) boots: u64,
    pub(super) up: bool,
    /// It never comes back.
    pub(super) dead: bool,
    /// The controller let it go: it is about to be removed.
    pub(super) cleared: bool,
    /// It was drained for a while, and is open for good.
    pub(super) reopened: bool,
    pub(super) directories: BTreeMap<ReplicaId, Directory>,
    pub(super) shims: BTreeMap<ReplicaId, Shim>,
    pub(super) agent: Option<Agent>,
    /// Until when nothing reaches the controller, and nothing arrives from it.
    pub(super) cut: (u64, u64),
}

impl Node {
    pub(super) fn boot_id(&self) -> String {
        format!("b{}", self.boots)
    }

    /// Everything the agent holds, as it reports it.
    pub(super) fn held(&self) -> Vec<Held> {
        let Some(agent) = &self.agent else { return Vec::new() };
        let held = agent.runs.iter().map(|(replica, run)| Held {
            described: None,
            replica: replica.clone(),
            step: run.step(),
            detail: String::new(),
            started_at: (run.work == Work::Running).then_some(Timestamp(1)),
            ready: run.ready.clone(),
            preempted: false,
            alive: run.work != Work::Running || self.shims.get(replica).is_some_and(|shim| !shim.hung),
        });
        held.collect()
    }

    /// The length of a log now.
    pub(super) fn written(&self, replica: &ReplicaId, now: u64) -> u64 {
        match self.shims.get(replica).filter(|shim| !shim.hung) {
            Some(shim) => shim.written(now),
            None => self.directories.get(replica).map_or(0, |directory| directory.written),
        }
    }
}

/// The verdict and fault that a node derives from the end of a command.
pub(super) fn ending(end: &End, desired: &Desired, epoch: Epoch) -> (Verdict, Option<Fault>) {
    match (end, desired) {
        (End::Code(0), _) => (Verdict::Completed, None),
        (_, Desired::Stop { .. }) | (End::Stopped, _) => (Verdict::Canceled, None),
        // After some failures another attempt may succeed.
        (End::Code(_), _) if epoch.0.is_multiple_of(2) => {
            (Verdict::Failed, Some(Fault::new(Code::CommandFailed, "no luck")))
        }
        (End::Code(_), _) => (Verdict::Failed, Some(Fault::new(Code::LaunchFailed, "no luck"))),
        (End::LeaseOver, _) => (Verdict::Failed, Some(Fault::new(Code::LeaseOver, "unheard"))),
    }
}

pub(super) fn outcome(ending: &(Verdict, Option<Fault>)) -> Outcome {
    Outcome {
        verdict: ending.0,
        exit: (ending.0 == Verdict::Completed).then_some(ExitStatus::Code(0)),
        fault: ending.1.clone(),
        started_at: None,
        ended_at: Timestamp(1),
        streams: Vec::new(),
        tracking_bytes: 0,
        tracking: None,
        artifacts: None,
        usage: None,
        environment: Some(Box::new(UsedEnvironment { key: "python".to_owned(), lock: None })),
        left_out: Vec::new(),
    }
}

/// The terms of every lease of the simulation.
pub(super) fn terms() -> Terms {
    Terms { gather: Duration::from_secs(120), ..Terms::default() }
}

/// Where the others reach the ranks of a node; each process of its agent has another place.
pub(super) fn place(session: u64) -> RankPlace {
    let first_port = (session % 50_000) as u16;
    RankPlace { address: [127, 0, 0, 1].into(), network: "127.0.0.0/8".into(), first_port, ports: 1 }
}
