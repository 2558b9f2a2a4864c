//! The records that the controller must never lose, and the one way to write them.
//!
//! Owns the stored records and the [`Store`] trait. Hides SQL, and which database is used. A [`Changes`] is
//! everything that follows from the messages handled together, and is written whole or not at all; so a crash can
//! never separate the facts of one step, for example the new epoch and the placement. Documents may have unknown
//! fields, which are ignored, so that a store can be read after an upgrade and after a downgrade.
//!
//! Jobs and events are searched for, so they have tables of their own. Everything else is a [`Document`]: a new kind
//! of them is a variant there and its name, and nothing else here changes.
//!
//! A damaged database is repaired at the start, and the repair is reported ([`Recovery`]). A controller writes
//! nothing once another one has written ([`StoreError::Taken`]).

mod arrays;
mod ballast;
mod choice;
mod error;
mod file;
mod loaded;
mod members;
mod opening;
mod pools;
mod redo;
mod rows;
mod salvage;
mod seats;
mod sqlite;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use agent_model::asset::Asset;
use agent_model::job::{Input, JobSpec, LeftOutputs, Predecessor};
use agent_model::machine::{Eligibility, Liveness};
use agent_model::node::Inventory;
use agent_model::protocol::gang::{Ready, Roster};
use agent_model::protocol::grant::PlacedAt;
use agent_model::sweep::{Best, Trial};
use agent_model::{
    Boot, Breaker, Epoch, Fault, JobDraft, JobId, JobState, NodeId, Outcome, PoolName, Principal, ReplicaId,
    ReplicaStep, Timestamp,
};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use seats::Earlier;
pub(crate) use seats::RankPlace;

pub(crate) use arrays::{ArrayRecord, ReuseRecord, StepsRecord};
pub(crate) use choice::{Alike, Among, JobFilter};
pub use error::StoreError;
pub(crate) use loaded::{Loaded, Missing, earlier_trials};
pub(crate) use members::{MemberRecord, RemovedRecord, TokenRecord, UserRecord};
pub use opening::OpenStoreError;
pub(crate) use opening::Recovery;
pub(crate) use pools::{MachineRecord, MachineStep, PoolRecord, SeenMachine};

/// Opens the controller's database at `path`.
///
/// `archive` is the directory that a controller makes right after its first database.
pub(crate) async fn open(path: &Path, archive: &Path) -> Result<Arc<dyn Store>, OpenStoreError> {
    Ok(Arc::new(sqlite::Sqlite::open(path, archive, opening::AT_ONCE).await?))
}

/// An output that gets a name when its job completes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Naming {
    /// What it is. Its job has not ended.
    Found(Input),
    /// It is this version of its name.
    Named(String),
    /// It has no name, for this reason.
    Unnamed(String),
}

/// A job, from its submission to its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    pub(crate) id: JobId,
    /// Its place in the order of submission; unique.
    pub(crate) seq: u64,
    /// The client's identifier of the submission; unique.
    pub(crate) request: String,
    /// Who submitted it, in a record of a release whose spec did not say so.
    #[serde(default, rename = "owner", skip_serializing_if = "Option::is_none")]
    pub(crate) owner_before: Option<Principal>,
    pub(crate) spec: JobSpec,
    pub(crate) state: JobState,
    /// The latest assignment; 0 before the first.
    pub(crate) epoch: Epoch,
    /// Assignments that no node ever reported: they do not count against the limit of attempts.
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
    /// Why the job is to end early, as text: `canceled by uid 1000`.
    #[serde(default)]
    pub(crate) cancel: Option<String>,
    /// Who holds it, as text: `held by uid 1000`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) held: Option<String>,
    /// The predecessors for whose end it still waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) waits_for: Vec<Predecessor>,
    /// The replicas of the latest attempt; none while the job waits.
    #[serde(default)]
    pub(crate) replicas: Vec<ReplicaRecord>,
    /// Where the attempts before were, the latest last; not those of a release that did not write it down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) earlier: Vec<Earlier>,
    #[serde(default)]
    pub(crate) outcome: Option<Outcome>,
    /// When it was removed. Its name and its last attempt are kept, so that another job of the name has later
    /// attempts, and no node confuses the two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) removed_at: Option<Timestamp>,
    /// The go of the latest attempt, if it is one of several ranks that was told to start.
    #[serde(default)]
    pub(crate) go: Option<Go>,
    /// Why the latest attempt of several ranks is ended as a whole, where no rank ended first.
    #[serde(default)]
    pub(crate) broken: Option<Broken>,
    /// Of a job that resumes its outputs: what the next attempt begins with, or the present one began with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) left: Option<LeftOutputs>,
    /// What the present attempt stored last of its outputs while it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) so_far: Option<LeftOutputs>,
    /// Of an array: how its tasks stand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tasks: Option<Box<ArrayRecord>>,
    /// Of a trial of a sweep: its values, and what was seen of its metric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trial: Option<Box<Trial>>,
    /// Of a sweep: the best of the trials that completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) best: Option<Best>,
    /// Of a pipeline: what its steps made, and which of them are not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) steps: Option<Box<StepsRecord>>,
    /// Of a step of a pipeline: what it left in each of its outputs, once it has completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) made: Option<BTreeMap<String, Input>>,
    /// Of a step that need not run again where the same ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reuse: Option<Box<ReuseRecord>>,
    /// It is a task of an array, which its name tells, with its index.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_task: bool,
    /// Of outputs that get a name when it completes: what they are, and later which version.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) named: BTreeMap<String, Naming>,
}

impl JobRecord {
    /// A job that waits for its first attempt.
    pub(crate) fn new(id: JobId, request: String, spec: JobSpec, submitted_at: Timestamp) -> JobRecord {
        JobRecord {
            id,
            seq: 0,
            request,
            owner_before: None,
            spec,
            state: JobState::Queued,
            epoch: Epoch::default(),
            uncharged: 0,
            not_before: None,
            avoid: None,
            submitted_at,
            started_at: None,
            ended_at: None,
            cancel: None,
            held: None,
            waits_for: Vec::new(),
            replicas: Vec::new(),
            earlier: Vec::new(),
            outcome: None,
            removed_at: None,
            go: None,
            broken: None,
            left: None,
            so_far: None,
            tasks: None,
            trial: None,
            best: None,
            steps: None,
            made: None,
            reuse: None,
            is_task: false,
            named: BTreeMap::new(),
        }
    }

    /// What is kept of an ended job when it is removed.
    pub(crate) fn removed(self, now: Timestamp) -> JobRecord {
        let owner = self.owner().cloned();
        let spec = JobDraft { command: ":".to_owned(), owner, ..JobDraft::default() }.validate();
        JobRecord {
            spec: spec.unwrap_or(self.spec), // never fails: the draft is valid
            outcome: None,
            replicas: Vec::new(),
            earlier: Vec::new(),
            cancel: None,
            left: None,
            so_far: None,
            tasks: None,
            trial: None,
            best: None,
            steps: None,
            made: None,
            reuse: None,
            named: BTreeMap::new(),
            removed_at: Some(now),
            ..self
        }
    }

    /// Who submitted it; `None` where that is not on record.
    pub(crate) fn owner(&self) -> Option<&Principal> {
        self.spec.owner.as_ref().or(self.owner_before.as_ref())
    }

    /// It is not shown any more.
    pub(crate) fn is_removed(&self) -> bool {
        self.removed_at.is_some()
    }

    /// The replica of the latest attempt that has this rank.
    pub(crate) fn replica(&self, rank: u32) -> ReplicaId {
        ReplicaId { job: self.id.clone(), epoch: self.epoch, rank }
    }

    /// The record of a rank of the latest attempt.
    pub(crate) fn rank(&self, rank: u32) -> Option<&ReplicaRecord> {
        self.replicas.iter().find(|replica| replica.rank == rank)
    }
}

/// An attempt of several ranks was told to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Go {
    /// Its ranks; none in a record that was made from the reports of nodes.
    pub(crate) roster: Roster,
    /// Until when each may be started, on the clock of its node.
    pub(crate) until: Vec<Boot>,
}

/// Why an attempt of several ranks is ended as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Broken {
    /// The rank that is the cause.
    pub(crate) rank: u32,
    pub(crate) fault: Fault,
}

/// One rank of the latest attempt of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplicaRecord {
    pub(crate) rank: u32,
    pub(crate) node: NodeId,
    /// The boot of the node when it last reported this replica.
    #[serde(default)]
    pub(crate) boot_id: String,
    /// What the node last reported; `None` before its first report of this replica.
    #[serde(default)]
    pub(crate) step: Option<ReplicaStep>,
    #[serde(default)]
    pub(crate) detail: String,
    /// How it ended.
    #[serde(default)]
    pub(crate) end: Option<RankEnd>,
    /// What it reported when it could start. Only reports to this controller process count, and the secret in it must
    /// not be stored.
    #[serde(skip)]
    pub(crate) ready: Option<Ready>,
    /// Its node ends it because the machine will be taken away, whatever becomes of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) preempted: bool,
    /// When it was placed, for the grant that its node gets; `None` where a release before grants placed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) placed: Option<PlacedAt>,
    /// It was taken over from what its node showed: it gets no secrets.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) adopted: bool,
}

impl ReplicaRecord {
    /// Rank 0, placed on a node that was last heard under this boot.
    pub(crate) fn on(node: &NodeId, boot_id: &str) -> ReplicaRecord {
        let (node, boot_id) = (node.clone(), boot_id.to_owned());
        ReplicaRecord {
            rank: 0,
            node,
            boot_id,
            step: None,
            detail: String::new(),
            end: None,
            ready: None,
            preempted: false,
            placed: None,
            adopted: false,
        }
    }
}

/// How one rank ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RankEnd {
    /// As its node reported.
    Told(Outcome),
    /// It can have no process any more, and its outcome will never be known.
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
    /// That it will be taken away.
    #[serde(default)]
    pub(crate) preemption: NodePreemption,
    /// Whether it is held back because jobs do not start there.
    #[serde(default)]
    pub(crate) breaker: Breaker,
}

/// What is known of the end of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct NodePreemption {
    /// As the node reports it.
    pub(crate) found: Option<Notice>,
    /// As an operator said.
    pub(crate) asked: Option<Notice>,
}

/// A notice that a machine will be taken away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Notice {
    pub(crate) noticed_at: Timestamp,
    pub(crate) deadline: Timestamp,
    pub(crate) reason: String,
}

impl NodePreemption {
    /// The notice that counts: the one that comes first.
    pub(crate) fn notice(&self) -> Option<&Notice> {
        [&self.found, &self.asked].into_iter().flatten().min_by_key(|notice| notice.deadline)
    }
}

/// A replica whose outcome was accepted and that its node still holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SettledRecord {
    pub(crate) replica: ReplicaId,
    pub(crate) node: NodeId,
}

/// What the database has of one life of the controller: see `queue::book::lives`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LifeRecord {
    pub(crate) life: String,
    /// The number of its last commit that placed something.
    pub(crate) commit: u64,
    /// No attempt that begins from now on has a number up to this one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) floor: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A record that is stored whole under its name and read whole at the start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Document {
    Node(Box<NodeRecord>),
    Settled(SettledRecord),
    Member(MemberRecord),
    User(UserRecord),
    Token(TokenRecord),
    Pool(PoolRecord),
    Machine(MachineRecord),
    Asset(Box<Asset>),
    Life(LifeRecord),
    Removed(RemovedRecord),
}

impl Document {
    /// The name, which begins with the kind.
    pub(crate) fn name(&self) -> String {
        match self {
            Document::Node(node) => Document::name_of_node(&node.id),
            Document::Settled(settled) => Document::name_of_settled(&settled.replica),
            Document::Member(member) => format!("member/{}", member.node),
            Document::User(user) => format!("user/{}", user.name),
            Document::Token(token) => format!("token/{}", token.hash),
            Document::Pool(pool) => Document::name_of_pool(&pool.name),
            Document::Machine(machine) => Document::name_of_machine(&machine.name),
            Document::Asset(asset) => Document::name_of_asset(asset),
            Document::Life(life) => format!("life/{}", life.life),
            Document::Removed(removed) => format!("removed/{}", removed.enrollment),
        }
    }

    pub(crate) fn name_of_pool(pool: &PoolName) -> String {
        format!("pool/{pool}")
    }

    pub(crate) fn name_of_machine(machine: &NodeId) -> String {
        format!("machine/{machine}")
    }

    pub(crate) fn name_of_asset(asset: &Asset) -> String {
        let owner = asset.owner.as_ref().map(Principal::to_string).unwrap_or_default();
        format!("asset/{owner}/{}/{}", asset.name, asset.version)
    }

    pub(crate) fn name_of_node(node: &NodeId) -> String {
        format!("node/{node}")
    }

    pub(crate) fn name_of_settled(replica: &ReplicaId) -> String {
        format!("settled/{replica}")
    }
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
    /// Jobs in their present state.
    pub(crate) jobs: Vec<Arc<JobRecord>>,
    /// What happened, in order.
    pub(crate) events: Vec<Event>,
    /// Documents in their present state.
    pub(crate) documents: Vec<Document>,
    /// Names of documents that are not needed any more.
    pub(crate) dropped: Vec<String>,
}

/// The names of the jobs in a database that have not ended, oldest first; none where there is no database.
pub(crate) async fn unfinished(path: &Path) -> Result<Vec<String>, StoreError> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    sqlite::unfinished(path).await.map_err(|source| StoreError::Read { what: "the jobs", source })
}

/// A checksum over parts and the borders between them.
fn checksum(parts: &[&[u8]]) -> i64 {
    let mut hasher = agent_cas::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let [a, b, c, d, e, f, g, h, ..] = hasher.finish().hash;
    i64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Durable storage: when [`Store::commit`] returns, a power cut loses nothing.
#[async_trait]
pub(crate) trait Store: fmt::Debug + Send + Sync {
    /// The jobs that have not ended, and all documents.
    async fn load(&self) -> Result<Loaded, StoreError>;
    /// Writes everything, or nothing; nothing at all once another controller has written.
    async fn commit(&self, changes: &Changes) -> Result<(), StoreError>;
    /// One job, also one that was removed.
    async fn job(&self, id: &JobId) -> Result<Option<JobRecord>, StoreError>;
    /// The job that a submission made.
    async fn submitted(&self, request: &str) -> Result<Option<JobRecord>, StoreError>;
    /// Up to `limit` jobs, newest first, older than `before`, without those that were removed. [`Among::Named`] has an
    /// order of its own and no `before`.
    async fn page(
        &self,
        among: Among<'_>,
        before: Option<u64>,
        limit: u32,
    ) -> Result<Vec<JobRecord>, StoreError>;
    /// Up to `limit` jobs, oldest first, newer than `after`, without those that were removed and tasks of arrays.
    async fn oldest(&self, after: u64, limit: u32) -> Result<Vec<JobRecord>, StoreError>;
    /// Everything that happened to a job, in order.
    async fn history(&self, id: &JobId) -> Result<Vec<Event>, StoreError>;
    /// There is room for new jobs, beyond what the end of the present ones needs.
    fn has_room(&self) -> bool;
    /// A random name, another one after the database was rebuilt or found to be older than it should be.
    fn incarnation(&self) -> &str;
    /// What was repaired in the database; `None` once the damaged file is removed.
    fn recovery(&self) -> Option<&Recovery>;
    /// Checks the history, if it is so long that the start left it.
    async fn check_rest(&self);
    /// What is wrong with it, as far as is known; the next start mends it.
    fn damage(&self) -> Option<&str>;
    /// A name of its files does not lead to the open file: the next commit writes it back, or fails.
    fn is_moved(&self) -> bool {
        false
    }
    /// What happened to a name of its files since the start, after which it was written back.
    fn moved(&self) -> Option<&str> {
        None
    }
    /// Ends all connections, so that another process may open it.
    async fn close(&self);
}

#[cfg(test)]
pub(crate) mod tests;
