//! What the controller must never forget, and the one way to write it down.
//!
//! Owns the stored records and the [`Store`] trait. Hides SQL. A [`Changes`] is everything that follows from
//! the messages handled together, and is written whole or not at all; so the facts of one business step,
//! for example the new epoch and the placement, can never be told apart by a crash. Documents carry unknown
//! fields without complaint, so that a store can be read after an upgrade and after a downgrade.
//!
//! A database that is damaged is mended at the start, and what had to be done is told ([`Recovery`]).
//!
//! Called by `queue` (load, commit) and by `api` (reads of what has ended).

mod ballast;
mod redo;
mod rows;
mod salvage;
mod sqlite;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use agent_model::job::JobSpec;
use agent_model::machine::{Eligibility, Liveness};
use agent_model::node::Inventory;
use agent_model::{
    Epoch, Fault, JobId, JobState, NodeId, Outcome, Principal, ReplicaId, ReplicaStep, Timestamp,
};
use serde::{Deserialize, Serialize};

pub use sqlite::OpenStoreError;
pub(crate) use sqlite::Sqlite;

/// A job, from its submission to its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    pub(crate) id: JobId,
    /// Its place in the order of submission; unique.
    pub(crate) seq: u64,
    /// The client's identifier of the submission; unique.
    pub(crate) request: String,
    /// Who submitted it; nobody knows of one that was taken over from a node, or is older than owners are.
    #[serde(default)]
    pub(crate) owner: Option<Principal>,
    pub(crate) spec: JobSpec,
    pub(crate) state: JobState,
    /// The latest assignment; 0 before the first.
    pub(crate) epoch: Epoch,
    /// Assignments that no node ever took up: they count against no limit of attempts.
    #[serde(default)]
    pub(crate) uncharged: u64,
    /// The next attempt may not start before.
    #[serde(default)]
    pub(crate) not_before: Option<Timestamp>,
    /// The node of the attempt before, if another one should be tried.
    #[serde(default)]
    pub(crate) avoid: Option<NodeId>,
    pub(crate) submitted_at: Timestamp,
    #[serde(default)]
    pub(crate) started_at: Option<Timestamp>,
    #[serde(default)]
    pub(crate) ended_at: Option<Timestamp>,
    /// Why the job is to end early, in the words of whoever asked: `canceled by uid 1000`.
    #[serde(default)]
    pub(crate) cancel: Option<String>,
    /// The replicas of the latest attempt; none while the job waits.
    #[serde(default)]
    pub(crate) replicas: Vec<ReplicaRecord>,
    #[serde(default)]
    pub(crate) outcome: Option<Outcome>,
}

impl JobRecord {
    /// The replica of the latest attempt that has this rank.
    pub(crate) fn replica(&self, rank: u32) -> ReplicaId {
        ReplicaId { job: self.id.clone(), epoch: self.epoch, rank }
    }

    /// What is on record of a rank of the latest attempt.
    pub(crate) fn rank(&self, rank: u32) -> Option<&ReplicaRecord> {
        self.replicas.iter().find(|replica| replica.rank == rank)
    }
}

/// One rank of the latest attempt of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplicaRecord {
    pub(crate) rank: u32,
    pub(crate) node: NodeId,
    /// The boot of the node when it last reported this replica.
    #[serde(default)]
    pub(crate) boot_id: String,
    /// What the node last reported; nothing before its first word about this replica.
    #[serde(default)]
    pub(crate) step: Option<ReplicaStep>,
    #[serde(default)]
    pub(crate) detail: String,
    /// What came of it.
    #[serde(default)]
    pub(crate) end: Option<RankEnd>,
}

impl ReplicaRecord {
    /// Rank 0, placed on a node that was last heard under this boot.
    pub(crate) fn on(node: &NodeId, boot_id: &str) -> ReplicaRecord {
        let (node, boot_id) = (node.clone(), boot_id.to_owned());
        ReplicaRecord { rank: 0, node, boot_id, step: None, detail: String::new(), end: None }
    }
}

/// What came of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RankEnd {
    /// Its node said so.
    Told(Outcome),
    /// It can have no process any more, and nobody will say what came of it.
    Lost {
        fault: Fault,
        /// When its node was last heard.
        heard: Timestamp,
    },
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeRecord {
    pub(crate) id: NodeId,
    #[serde(default)]
    pub(crate) boot_id: String,
    pub(crate) liveness: Liveness,
    pub(crate) eligibility: Eligibility,
    #[serde(default)]
    pub(crate) last_seen: Timestamp,
    #[serde(default)]
    pub(crate) inventory: Inventory,
}

/// One thing that happened to a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) job: JobId,
    pub(crate) at: Timestamp,
    /// The attempt it belongs to; 0 before the first.
    pub(crate) epoch: Epoch,
    pub(crate) node: Option<NodeId>,
    pub(crate) text: String,
}

/// Everything one transaction writes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Changes {
    /// Jobs as they stand now.
    pub(crate) jobs: Vec<Arc<JobRecord>>,
    /// Nodes as they stand now.
    pub(crate) nodes: Vec<NodeRecord>,
    /// What happened, in order.
    pub(crate) events: Vec<Event>,
    /// Replicas whose outcome was accepted and that their node still holds.
    pub(crate) settled: Vec<(ReplicaId, NodeId)>,
    /// Settled replicas that their node holds no more.
    pub(crate) forgotten: Vec<ReplicaId>,
}

/// What a controller starts from.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Every job that has not ended.
    pub(crate) jobs: Vec<JobRecord>,
    pub(crate) nodes: Vec<NodeRecord>,
    pub(crate) settled: Vec<(ReplicaId, NodeId)>,
    /// The highest place in the order of submission ever given.
    pub(crate) last_seq: u64,
    /// The database was rebuilt, or is older than what was last decided: the nodes may know more than it.
    pub(crate) mended: bool,
}

/// What became of a database that did not hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recovery {
    /// What was found.
    pub(crate) problem: String,
    /// Where the damaged database is.
    pub(crate) kept: Option<PathBuf>,
    /// Jobs that could be read from it.
    pub(crate) rows: usize,
    /// Jobs whose latest state came from the second copy.
    pub(crate) copied: usize,
    /// Things in it that could not be read: rows, stretches of rows, lines of the second copy.
    pub(crate) bad: usize,
    /// Jobs of which nothing is left but that they were.
    pub(crate) lost: Vec<String>,
}

/// A checksum over parts, whose borders count.
fn checksum(parts: &[&[u8]]) -> i64 {
    let mut hasher = agent_cas::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let [a, b, c, d, e, f, g, h, ..] = hasher.finish().hash;
    i64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Which step of talking to the controller's database failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A transaction was not committed.
    #[error("cannot write {jobs} jobs and {events} events to the controller's database")]
    Commit {
        /// Jobs in it.
        jobs: usize,
        /// Events in it.
        events: usize,
        /// What SQLite said.
        source: sqlx::Error,
    },
    /// Something cannot be read.
    #[error("cannot read {what} from the controller's database")]
    Read {
        /// What was asked for.
        what: &'static str,
        /// What SQLite said.
        source: sqlx::Error,
    },
    /// A document is not what this program writes.
    #[error("the {what} `{id}` in the controller's database cannot be understood")]
    Document {
        /// What it describes.
        what: &'static str,
        /// Its name.
        id: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A row is not what was written.
    #[error("the {what} `{id}` in the controller's database is damaged")]
    Damaged {
        /// What it describes.
        what: &'static str,
        /// Its name, as far as it can be trusted.
        id: String,
    },
    /// A name breaks the rules for names.
    #[error("the {what} `{id}` in the controller's database has a name that is not valid")]
    Name {
        /// What it names.
        what: &'static str,
        /// The name.
        id: String,
        /// The rule.
        source: agent_model::ids::IdError,
    },
}

impl StoreError {
    /// The disk had no room for a transaction.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, StoreError::Commit { source, .. } if sqlite::is_full(source))
    }
}

/// Durable memory: when [`Store::commit`] returns, a power cut takes nothing back.
pub(crate) trait Store: Send + Sync + 'static {
    /// What is not over yet.
    fn load(&self) -> impl Future<Output = Result<Loaded, StoreError>> + Send;
    /// Writes everything, or nothing.
    fn commit(&self, changes: &Changes) -> impl Future<Output = Result<(), StoreError>> + Send;
    /// One job.
    fn job(&self, id: &JobId) -> impl Future<Output = Result<Option<JobRecord>, StoreError>> + Send;
    /// The job that a submission made.
    fn submitted(&self, request: &str) -> impl Future<Output = Result<Option<JobRecord>, StoreError>> + Send;
    /// Up to `limit` jobs, newest first, older than `before`.
    fn page(
        &self,
        before: Option<u64>,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<JobRecord>, StoreError>> + Send;
    /// Everything that happened to a job, in order.
    fn history(&self, id: &JobId) -> impl Future<Output = Result<Vec<Event>, StoreError>> + Send;
}

#[cfg(test)]
pub(crate) mod tests;
