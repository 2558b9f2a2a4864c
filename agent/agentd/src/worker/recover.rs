//! Which replicas this node is responsible for when the daemon starts.
//!
//! They are in the journal, and again in the job directories, each in `order.json`, so that a damaged journal loses
//! nothing.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use agent_model::{ReplicaId, failpoint};
use agent_shim::JobDir;
use tracing::warn;

use super::journal::{Journal, JournalError, Record};
use super::launch::gpus_of;
use super::retention;

/// The file of a job directory with its order.
const ORDER: &str = "order.json";

/// Why the replicas of this node cannot be found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecoverError {
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("cannot look through the job directories")]
    Directories(#[source] io::Error),
}

/// Makes the directory of a replica, with the order in it. The directory outlives a power cut, so that what its
/// supervisor forces to the disk does so too; the order need not, since the journal has it as well.
pub(crate) async fn prepare(dir: &JobDir, record: &Record) -> io::Result<()> {
    let (dir, text) = (dir.clone(), agent_shim::seal(record));
    let make = move || {
        dir.create().map_err(io::Error::other)?;
        failpoint::hit("node.order.write")?;
        agent_fs::write_whole(&dir.path().join(ORDER), &text.map_err(io::Error::other)?)?;
        dir.path().parent().map_or(Ok(()), agent_fs::flush_directory) // the directory is new
    };
    agent_blocking::blocking_io(make).await
}

/// Every replica of the journal, and every one that has a directory and is not over.
pub(crate) async fn open_replicas(journal: &dyn Journal, jobs: &Path) -> Result<Vec<Record>, RecoverError> {
    let mut records = journal.open_replicas().await?;
    let known: BTreeSet<ReplicaId> = records.iter().map(|record| record.replica.clone()).collect();
    for entry in std::fs::read_dir(jobs).map_err(RecoverError::Directories)? {
        let path = entry.map_err(RecoverError::Directories)?.path();
        let id = path.file_name().and_then(|name| name.to_str()?.parse::<ReplicaId>().ok());
        let Some(id) = id.filter(|id| !known.contains(id)) else { continue };
        let dir = JobDir::new(path);
        if !retention::is_over(&dir) {
            let found = accepted(&dir, &id);
            if found.is_some() {
                warn!(replica = %id, "found replica by its directory: the journal does not know it");
            }
            records.extend(found);
        }
    }
    Ok(records)
}

/// The GPUs of these replicas, which nobody else gets until they give them back. For a replica that the journal lost,
/// they are read from the launch order of its command.
pub(crate) fn held_gpus(found: &[Record], jobs: &Path) -> Vec<(ReplicaId, Vec<String>)> {
    let held = |record: &Record| {
        let mut gpus = record.gpus.clone();
        if gpus.is_empty() && record.spec.resources.gpus > 0 && record.ending.is_none() {
            let launch = JobDir::new(jobs.join(record.replica.to_string())).read_launch();
            gpus = launch.ok().flatten().as_ref().map(gpus_of).unwrap_or_default();
        }
        (record.replica.clone(), gpus)
    };
    found.iter().map(held).collect()
}

/// The order in a job directory, if it proves itself.
pub(super) fn read_order(dir: &JobDir) -> io::Result<Record> {
    let text = std::fs::read(dir.path().join(ORDER))?;
    match agent_shim::is_sound(&text) {
        true => Ok(serde_json::from_slice(&text)?),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not as it was written")),
    }
}

/// The record with which a replica was accepted, read from its directory. A directory without one was never
/// used: the daemon died while making it, and the controller repeats the order.
pub(crate) fn accepted(dir: &JobDir, replica: &ReplicaId) -> Option<Record> {
    match read_order(dir) {
        Ok(record) if record.replica == *replica => return Some(record),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Err(error) = agent_cas::remove_tree(dir.path()) {
                warn!(dir = %dir.path().display(), %error, "cannot remove unused job directory");
            }
        }
        _ => {
            warn!(dir = %dir.path().display(), "cannot read launch record of job directory: it is left alone")
        }
    }
    None
}

#[cfg(test)]
mod tests {

    use agent_model::{ReplicaStep, SystemClock};

    use super::super::journal::Sqlite;
    use super::super::journal::tests::record;
    use super::*;

    #[tokio::test]
    async fn test_lost_journal_loses_no_replica() {
        let temp = tempfile::tempdir().unwrap();
        let (path, jobs) = (temp.path().join("journal.db"), temp.path().join("jobs"));
        let dir = |id: &str| JobDir::new(jobs.join(id));
        std::fs::create_dir(&jobs).unwrap();
        let journal = Sqlite::open(&path).await.unwrap();
        for id in ["a.1.0", "b.1.0", "over.1.0"] {
            prepare(&dir(id), &record(id)).await.unwrap();
            journal.enter(&record(id)).await.unwrap();
        }
        dir("half.1.0").create().unwrap();
        let retention = retention::Retention::new(jobs.clone(), std::sync::Arc::new(SystemClock), "boot");
        retention.put(&dir("over.1.0"), retention::Stay::Original).await.unwrap();
        journal.done(&"over.1.0".parse().unwrap()).await.unwrap();
        drop(journal);
        std::fs::write(&path, [0xff; 5000]).unwrap();
        let _ = std::fs::remove_file(path.with_extension("db-wal"));

        let journal = Sqlite::open(&path).await.unwrap();
        let mut found = open_replicas(&journal, &jobs).await.unwrap();
        found.sort_by(|a, b| a.replica.cmp(&b.replica));
        assert_eq!(found, [record("a.1.0"), record("b.1.0")]);
        assert!(!dir("half.1.0").path().exists() && dir("over.1.0").path().exists());
    }

    /// Offsets that look random and are the same in each run.
    fn offset(round: u64, length: u64) -> usize {
        let mixed = (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        usize::try_from(mixed % length).unwrap()
    }

    #[tokio::test]
    async fn test_damage_at_a_hundred_places_loses_no_replica_and_changes_none() {
        let temp = tempfile::tempdir().unwrap();
        let (path, jobs) = (temp.path().join("journal.db"), temp.path().join("jobs"));
        std::fs::create_dir(&jobs).unwrap();
        let ids: Vec<String> = (0..8).map(|n| format!("job-{n}.1.0")).collect();
        let mut open = None; // a daemon that is killed does not close it
        for half in ids.chunks(4) {
            // The first half is in the database file, the second in its write-ahead log.
            let journal = Sqlite::open(&path).await.unwrap();
            for id in half {
                prepare(&JobDir::new(jobs.join(id)), &record(id)).await.unwrap();
                journal.enter(&record(id)).await.unwrap();
                journal.enter(&Record { step: ReplicaStep::Running, ..record(id) }).await.unwrap();
            }
            match half[0] == "job-0.1.0" {
                true => journal.close().await,
                false => open = Some(journal),
            }
        }
        let wal = path.with_extension("db-wal");
        let files = [&path, &wal].map(|file| std::fs::read(file).unwrap());
        assert!(open.is_some() && files.iter().all(|bytes| bytes.len() > 4096));

        for round in 0..100_u64 {
            let mut damaged = files.clone();
            let target = &mut damaged[usize::from(round % 2 == 1)];
            let at = offset(round, target.len() as u64);
            match round % 4 {
                0 | 1 => target[at] ^= 1 << (round % 8),
                _ => target.truncate(at),
            }
            let dir = tempfile::tempdir().unwrap();
            let copy = dir.path().join("journal.db");
            std::fs::write(&copy, &damaged[0]).unwrap();
            std::fs::write(copy.with_extension("db-wal"), &damaged[1]).unwrap();
            let journal = Sqlite::open(&copy).await.unwrap();
            let mut found = open_replicas(&journal, &jobs).await.unwrap();
            found.sort_by(|a, b| a.replica.cmp(&b.replica));
            let expected: Vec<Record> = ids.iter().map(|id| record(id)).collect();
            // An earlier step is fine: each can be repeated.
            let found: Vec<Record> =
                found.into_iter().map(|record| Record { step: ReplicaStep::Accepted, ..record }).collect();
            assert_eq!(found, expected, "round {round}, at {at}");
        }
    }
}
