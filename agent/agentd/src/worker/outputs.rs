//! Stores what a job left behind, as one snapshot, and measures its logs.
//!
//! What is stored: `outputs/…` and `logs/…` of the working directory, each named output below
//! `named-outputs/NAME/`, and what was logged through the tracking endpoint at the top. Everything else in
//! the working directory is dropped. Called by `worker::runner`; redoing it stores nothing twice.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use agent_cas::snapshot::{self, PushError, ScanError, Snapshot};
use agent_cas::{Hasher, Store};
use agent_model::job::JobDraft;
use agent_model::{Artifacts, Digest};
use agent_shim::JobDir;
use tracing::{info, warn};

/// Why the outputs could not be stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectError {
    /// They could not be read.
    #[error("the outputs could not be read")]
    Scan(#[source] ScanError),
    /// They could not be sent.
    #[error("the outputs could not be sent to the store")]
    Push(#[source] PushError),
}

/// Stores the outputs; `None` when there are none.
pub(crate) async fn collect(
    store: &Store,
    dir: &JobDir,
    job: &JobDraft,
) -> Result<Option<Artifacts>, CollectError> {
    let places = places(dir, job);
    let scanned = tokio::task::spawn_blocking(move || scan(&places)).await;
    let scanned = match scanned {
        Ok(scanned) => scanned.map_err(CollectError::Scan)?,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    };
    for warning in &scanned.warnings {
        info!(dir = %dir.path().display(), warning, "part of the outputs is left out");
    }
    if scanned.files == 0 {
        return Ok(None);
    }
    snapshot::push(&scanned, store, |_| {}).await.map_err(CollectError::Push)?;
    Ok(Some(Artifacts { root: scanned.root, files: scanned.files, bytes: scanned.bytes }))
}

/// Where outputs are, and below which prefix each is stored. What the job wrote wins over what was logged.
fn places(dir: &JobDir, job: &JobDraft) -> Vec<(String, PathBuf)> {
    let mut places = vec![
        ("outputs".to_owned(), dir.work().join("outputs")),
        ("logs".to_owned(), dir.work().join("logs")),
    ];
    places.extend(job.outputs.keys().map(|name| (format!("named-outputs/{name}"), dir.out().join(name))));
    places.push((String::new(), dir.artifacts()));
    places
}

fn scan(places: &[(String, PathBuf)]) -> Result<Snapshot, ScanError> {
    let parts: Vec<(&str, &Path)> =
        places.iter().map(|(prefix, path)| (prefix.as_str(), path.as_path())).collect();
    snapshot::scan_all(&parts)
}

/// The digest of a whole log. One that was never begun, or cannot be read, is empty.
pub(crate) async fn measure(path: PathBuf) -> Digest {
    let shown = path.display().to_string();
    let measured = tokio::task::spawn_blocking(move || digest(&path)).await;
    measured.map_err(io::Error::other).flatten().unwrap_or_else(|error| {
        warn!(path = shown, %error, "a log cannot be read");
        Digest::EMPTY
    })
}

/// The length of a file in bytes; 0 when there is none.
pub(crate) fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |found| found.len())
}

/// The last bytes of a log, enough for a few lines.
pub(crate) async fn tail(path: PathBuf) -> Vec<u8> {
    const BYTES: u64 = 8 * 1024;
    let read = move || -> io::Result<Vec<u8>> {
        let mut file = File::open(&path)?;
        file.seek(SeekFrom::Start(length(&path).saturating_sub(BYTES)))?;
        let mut end = Vec::new();
        file.take(BYTES).read_to_end(&mut end)?;
        Ok(end)
    };
    // Without it a fault only says less.
    tokio::task::spawn_blocking(read).await.map_err(io::Error::other).flatten().unwrap_or_default()
}

fn digest(path: &Path) -> io::Result<Digest> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Digest::EMPTY),
        Err(error) => return Err(error),
    };
    let (mut hasher, mut buffer) = (Hasher::new(), vec![0; 256 * 1024]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            length => hasher.update(&buffer[..length]),
        }
    }
}

#[cfg(test)]
mod tests {
    use agent_cas::Disk;
    use agent_model::job::Output;

    use super::*;

    #[tokio::test]
    async fn test_outputs_logs_named_outputs_and_artifacts_are_stored_together() {
        let temp = tempfile::tempdir().unwrap();
        let dir = JobDir::new(temp.path().join("j.1.0"));
        dir.create().unwrap();
        for (path, text) in [
            ("work/outputs/deep/model", "weights"),
            ("work/outputs/.gitignore", "*"),
            ("work/logs/x.log", "log"),
            ("work/dropped", "dropped"),
            ("out/table/a.csv", "a"),
            ("artifacts/notes/n.txt", "note"),
        ] {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let job = JobDraft { outputs: [("table".to_owned(), Output::Folder)].into(), ..JobDraft::default() };
        let store = Store::Disk(Disk::open(&temp.path().join("cas")).unwrap());
        let artifacts = collect(&store, &dir, &job).await.unwrap().unwrap();
        let mut paths: Vec<String> = snapshot::list(&store, artifacts.root)
            .await
            .unwrap()
            .into_iter()
            .map(|entry| entry.path)
            .collect();
        paths.sort();
        let expected = [
            "logs/x.log",
            "named-outputs/table/a.csv",
            "notes/n.txt",
            "outputs/.gitignore",
            "outputs/deep/model",
        ];
        assert_eq!(paths, expected);
        assert_eq!(collect(&store, &dir, &job).await.unwrap(), Some(artifacts));
    }

    #[tokio::test]
    async fn test_job_that_left_nothing_has_no_artifacts() {
        let temp = tempfile::tempdir().unwrap();
        let dir = JobDir::new(temp.path().join("j.1.0"));
        dir.create().unwrap();
        let store = Store::Disk(Disk::open(&temp.path().join("cas")).unwrap());
        assert_eq!(collect(&store, &dir, &JobDraft::default()).await.unwrap(), None);
    }

    #[tokio::test]
    async fn test_log_is_measured_whole() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("log");
        assert_eq!(measure(path.clone()).await, Digest::EMPTY);
        let text = "line\n".repeat(100_000);
        std::fs::write(&path, &text).unwrap();
        assert_eq!(tail(path.clone()).await.len(), 8 * 1024);
        assert_eq!(measure(path).await, agent_cas::digest_of(text.as_bytes()));
    }
}
