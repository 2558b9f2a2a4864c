//! The jobs of a machine's own controller, for the machine that joins another one with them.
//!
//! Owns the decision which jobs can be moved, and the mark in the machine's own records that they were. It is used while
//! no daemon runs. Invariant: a job is marked as moved, and so is never run again from these records, in one commit with
//! all others, after the other controller has them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_model::{
    Code, Digest, Fault, JobId, JobState, NodeId, Outcome, Principal, ReplicaId, Stream, Timestamp, Verdict,
};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::archive::{Channel, file_of};
use crate::queue::without_run;
use crate::store::{self, Changes, Event, JobRecord, OpenStoreError, Store, StoreError};

/// Why the own jobs of a machine cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OwnJobsError {
    /// Its database cannot be opened.
    #[error("the controller's database cannot be used")]
    Open(#[source] OpenStoreError),
    /// Its database cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its database was damaged, and may lack the last decisions.
    #[error("its database was damaged, or is an older copy: what its jobs did last is not known")]
    Mended,
}

/// A job that has not ended.
#[derive(Debug, Clone)]
pub struct OwnJob {
    /// Its name.
    pub id: JobId,
    /// Who submitted it; `None` where that is not on record.
    pub owner: Option<Principal>,
    /// It has an attempt that is not over.
    pub runs: bool,
    /// The names of the secrets that it reads.
    pub secrets: Vec<String>,
    /// The snapshots that it needs.
    pub trees: Vec<Digest>,
    /// What the archive has of its attempts.
    pub logs: Vec<OwnLog>,
    /// Its record, as JSON.
    pub record: Vec<u8>,
}

/// A file of the archive.
#[derive(Debug, Clone)]
pub struct OwnLog {
    /// The replica that it is of.
    pub replica: ReplicaId,
    /// What it holds, as the word on the wire.
    pub channel: String,
    /// The file.
    pub path: PathBuf,
}

/// The jobs of a machine's own controller that have not ended, in the order of submission.
pub struct OwnJobs {
    store: Option<Arc<dyn Store>>,
    archive: PathBuf,
    jobs: Vec<JobRecord>,
}

impl OwnJobs {
    /// Those of the controller in this state directory. There may never have been one.
    pub fn open(state_dir: &Path) -> BoxFuture<'_, Result<OwnJobs, OwnJobsError>> {
        async move {
            let home = state_dir.join("controller");
            let (database, archive) = (home.join("db"), home.join("archive"));
            if !database.exists() && !archive.exists() {
                return Ok(OwnJobs { store: None, archive, jobs: Vec::new() });
            }
            let store = store::open(&database, &archive).await.map_err(OwnJobsError::Open)?;
            let loaded = store.load().await?;
            if loaded.mended {
                store.close().await;
                return Err(OwnJobsError::Mended);
            }
            let mut jobs = loaded.jobs;
            jobs.sort_by_key(|job| job.seq);
            Ok(OwnJobs { store: Some(store), archive, jobs })
        }
        .boxed()
    }

    /// All of them.
    pub fn list(&self) -> Vec<OwnJob> {
        self.jobs.iter().map(|job| own_job(job, &self.archive)).collect()
    }

    /// Why they cannot be moved with the machine `node`, if they cannot.
    pub fn obstacle(&self, node: &NodeId) -> Option<Fault> {
        let stuck: Vec<&JobRecord> = self.jobs.iter().filter(|job| !moves_with(job, node)).collect();
        let first = stuck.first()?;
        let names: Vec<&str> = stuck.iter().map(|job| job.id.as_str()).collect();
        Some(
            Fault::new(
                Code::JobActive,
                "some jobs of this machine run on other machines, which do not join with it",
            )
            .why(names.join(", "))
            .fix(format!("let them end, or end them: agentctl cancel --wait {}", first.id)),
        )
    }

    /// Notes that all of them are jobs of the controller `to` now; returns when that is on disk.
    pub fn mark_moved<'a>(&'a self, to: &'a str, now: Timestamp) -> BoxFuture<'a, Result<(), OwnJobsError>> {
        async move {
            let Some(store) = self.store.as_ref().filter(|_| !self.jobs.is_empty()) else { return Ok(()) };
            let mut changes = Changes::default();
            for job in &self.jobs {
                let text = format!("moved to {to}");
                changes.events.push(Event {
                    job: job.id.clone(),
                    at: now,
                    epoch: job.epoch,
                    node: None,
                    text,
                });
                changes.jobs.push(Arc::new(moved(job.clone(), to, now)));
            }
            Ok(store.commit(&changes).await?)
        }
        .boxed()
    }

    /// Ends all access to the database.
    pub async fn close(self) {
        if let Some(store) = self.store {
            store.close().await;
        }
    }
}

impl std::fmt::Debug for OwnJobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnJobs").field("jobs", &self.jobs.len()).finish_non_exhaustive()
    }
}

/// Whether everything that runs of a job is on this machine.
fn moves_with(job: &JobRecord, node: &NodeId) -> bool {
    match &job.replicas[..] {
        [] => true,
        [one] => one.node == *node && one.rank == 0 && job.spec.resources.nodes == 1,
        _ => false,
    }
}

fn own_job(job: &JobRecord, archive: &Path) -> OwnJob {
    let logs = (1..=job.epoch.0).flat_map(|epoch| {
        let replica = ReplicaId { job: job.id.clone(), epoch: agent_model::Epoch(epoch), rank: 0 };
        let channels = Stream::ALL.map(Channel::Log).into_iter().chain([Channel::Tracking]);
        channels.map(move |channel| OwnLog {
            path: file_of(archive, &replica, channel),
            replica: replica.clone(),
            channel: channel.to_string(),
        })
    });
    OwnJob {
        id: job.id.clone(),
        owner: job.owner.clone(),
        runs: !job.replicas.is_empty(),
        secrets: job.spec.secrets.values().cloned().collect(),
        trees: job.trees(),
        logs: logs.filter(|log| log.path.exists()).collect(),
        record: serde_json::to_vec(job).unwrap_or_default(), // maps with text keys always serialise
    }
}

/// What the machine's own controller keeps of a job that another one has.
fn moved(job: JobRecord, to: &str, now: Timestamp) -> JobRecord {
    let mut tasks = job.tasks;
    tasks.iter_mut().for_each(|tasks| tasks.give_up());
    JobRecord {
        state: JobState::Canceled,
        cancel: Some(format!("moved to {to}")),
        ended_at: Some(now),
        outcome: Some(Outcome { started_at: job.started_at, ..without_run(Verdict::Canceled, None, now) }),
        replicas: Vec::new(),
        held: None,
        not_before: None,
        waits_for: Vec::new(),
        left: None,
        so_far: None,
        tasks,
        ..job
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ReplicaRecord;
    use crate::store::tests::job;

    fn node(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn running(name: &str, seq: u64, on: &[&str]) -> JobRecord {
        let ranks = (0..).zip(on);
        let replicas =
            ranks.map(|(rank, on)| ReplicaRecord { rank, ..ReplicaRecord::on(&node(on), "b") }).collect();
        JobRecord { state: JobState::Running, epoch: agent_model::Epoch(2), replicas, ..job(name, seq) }
    }

    #[test]
    fn test_what_runs_elsewhere_does_not_move() {
        let own = |jobs| OwnJobs { store: None, archive: PathBuf::new(), jobs };
        let here = vec![job("waits", 1), running("runs", 2, &["box"])];
        assert_eq!(own(here.clone()).obstacle(&node("box")), None);
        for far in [running("far", 3, &["other"]), running("far", 3, &["box", "other"])] {
            let fault = own([here.clone(), vec![far]].concat()).obstacle(&node("box")).unwrap();
            assert_eq!((fault.code, fault.why), (Code::JobActive, vec!["far".to_owned()]));
        }
    }

    #[tokio::test]
    async fn test_moved_jobs_have_ended_in_the_own_records_and_their_logs_stay() {
        let state = tempfile::tempdir().unwrap();
        assert!(OwnJobs::open(state.path()).await.unwrap().list().is_empty());
        let home = state.path().join("controller");
        std::fs::create_dir_all(&home).unwrap();
        let store = store::open(&home.join("db"), &home.join("archive")).await.unwrap();
        let jobs = vec![Arc::new(running("runs", 1, &["box"])), Arc::new(job("waits", 2))];
        store.commit(&Changes { jobs, ..Changes::default() }).await.unwrap();
        store.close().await;
        std::fs::create_dir_all(home.join("archive/runs")).unwrap();
        for name in ["1.0.job", "2.0.job", "2.0.tracking", "2.0.job.wrong"] {
            std::fs::write(home.join("archive/runs").join(name), "text").unwrap();
        }

        let own = OwnJobs::open(state.path()).await.unwrap();
        let list = own.list();
        let seen: Vec<_> = list.iter().map(|job| (job.id.as_str(), job.runs, job.logs.len())).collect();
        assert_eq!(seen, [("runs", true, 3), ("waits", false, 0)]);
        own.mark_moved("https://c:7443", Timestamp(9)).await.unwrap();
        own.close().await;

        let again = OwnJobs::open(state.path()).await.unwrap();
        assert!(again.list().is_empty());
        let left = again.store.as_ref().unwrap().job(&"runs".parse().unwrap()).await.unwrap().unwrap();
        assert_eq!(
            (left.state, left.cancel.as_deref()),
            (JobState::Canceled, Some("moved to https://c:7443"))
        );
        assert!(home.join("archive/runs/2.0.job").exists());
    }
}
