//! Lays out what a job reads: its code in `work/`, each input in `inputs/NAME/`, and the empty folders it
//! may write to.
//!
//! Redoing it after an interruption begins with empty folders. Called by `worker::runner`.

use std::io;
use std::os::unix::fs::{PermissionsExt, chown, lchown};
use std::path::{Path, PathBuf};

use agent_cas::Store;
use agent_cas::snapshot::{MaterializeError, materialize};
use agent_model::job::{Input, JobDraft};
use agent_shim::JobDir;

use crate::config::JobUser;

/// Why a job's files could not be laid out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// The code.
    #[error("the code could not be laid out")]
    Code(#[source] MaterializeError),
    /// An input.
    #[error("the input `{name}` could not be laid out")]
    Input {
        /// Its name.
        name: String,
        #[source]
        source: MaterializeError,
    },
    /// A folder of the job directory.
    #[error("the folder {} could not be prepared", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Lays everything out, anew. The folders belong to `user` where one is given.
pub(crate) async fn lay_out(
    store: &Store,
    job: &JobDraft,
    dir: &JobDir,
    user: Option<&JobUser>,
) -> Result<(), FetchError> {
    let (empty, names) = (dir.clone(), job.outputs.keys().cloned().collect::<Vec<_>>());
    blocking(dir.path(), move || clear(&empty, &names)).await?;
    if let Some(code) = job.code {
        materialize(store, code, &dir.work()).await.map_err(FetchError::Code)?;
    }
    for (name, input) in &job.inputs {
        if let Input::Folder(root) | Input::File { root, .. } = input {
            let to = dir.inputs().join(name);
            let laid = materialize(store, *root, &to).await;
            laid.map_err(|source| FetchError::Input { name: name.clone(), source })?;
        }
    }
    let (dir, user) = (dir.clone(), user.cloned());
    let path = dir.path().to_owned();
    blocking(&path, move || finish(&dir, user.as_ref())).await
}

/// Makes a home for the user in a container, and, if `all` is to be its, gives it what was laid out for somebody else.
pub(crate) async fn settle(dir: &JobDir, user: Option<JobUser>, all: bool) -> Result<(), FetchError> {
    let (path, dir) = (dir.home(), dir.clone());
    let settle = move || {
        std::fs::create_dir_all(dir.home())?;
        let Some(user) = user else { return Ok(()) };
        if all {
            finish(&dir, Some(&user))?;
        }
        chown(dir.home(), Some(user.uid), Some(user.gid))
    };
    blocking(&path, settle).await
}

/// Empty folders for code, inputs and outputs.
fn clear(dir: &JobDir, outputs: &[String]) -> io::Result<()> {
    for folder in [dir.work(), dir.inputs(), dir.out()] {
        remove(&folder)?;
        std::fs::create_dir_all(&folder)?;
    }
    outputs.iter().try_for_each(|name| std::fs::create_dir_all(dir.out().join(name)))
}

/// The folders every command may write to, and whose everything is.
fn finish(dir: &JobDir, user: Option<&JobUser>) -> io::Result<()> {
    for folder in ["outputs", "logs"] {
        std::fs::create_dir_all(dir.work().join(folder))?;
    }
    std::fs::File::options().create(true).append(true).open(dir.tracking())?;
    let Some(user) = user else { return Ok(()) };
    // The way to what belongs to the job, and for its user only.
    chown(dir.path(), None, Some(user.gid))?;
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o710))?;
    chown(dir.tracking(), Some(user.uid), Some(user.gid))?;
    [dir.work(), dir.inputs(), dir.out()].iter().try_for_each(|folder| own(folder, user))
}

/// Gives a tree that no process of the job has seen yet to the user; links themselves, not what they name.
fn own(path: &Path, user: &JobUser) -> io::Result<()> {
    lchown(path, Some(user.uid), Some(user.gid))?;
    if path.symlink_metadata()?.is_dir() {
        for entry in std::fs::read_dir(path)? {
            own(&entry?.path(), user)?;
        }
    }
    Ok(())
}

/// Removes a tree; one that is not there is fine.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

async fn blocking(
    path: &Path,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<(), FetchError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
    done.map_err(|source| FetchError::Folder { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use agent_cas::{Disk, snapshot};
    use agent_model::Digest;
    use agent_model::job::Output;

    use super::*;

    async fn store(dir: &Path) -> (Store, Digest) {
        let code = dir.join("code");
        std::fs::create_dir_all(&code).unwrap();
        std::fs::write(code.join("t.py"), "print(1)").unwrap();
        let store = Store::Disk(Disk::open(&dir.join("cas")).unwrap());
        let scanned = snapshot::scan(&code).unwrap();
        snapshot::push(&scanned, &store, |_| {}).await.unwrap();
        (store, scanned.root)
    }

    #[tokio::test]
    async fn test_layout_is_complete_and_can_be_redone() {
        let temp = tempfile::tempdir().unwrap();
        let (store, root) = store(temp.path()).await;
        let job = JobDraft {
            code: Some(root),
            inputs: [("data".to_owned(), Input::Folder(root)), ("lr".to_owned(), Input::Literal("1".into()))]
                .into(),
            outputs: [("model".to_owned(), Output::Folder)].into(),
            ..JobDraft::default()
        };
        let dir = JobDir::new(temp.path().join("j.1.0"));
        dir.create().unwrap();
        for _ in 0..2 {
            lay_out(&store, &job, &dir, None).await.unwrap();
            for path in
                ["work/t.py", "work/outputs", "work/logs", "inputs/data/t.py", "out/model", "tracking.jsonl"]
            {
                assert!(dir.path().join(path).exists(), "{path}");
            }
            assert!(!dir.work().join("left").exists());
            std::fs::write(dir.work().join("left"), "by an interrupted attempt").unwrap();
        }
    }

    #[tokio::test]
    async fn test_absent_code_is_told_apart() {
        let temp = tempfile::tempdir().unwrap();
        let (store, root) = store(temp.path()).await;
        let job = JobDraft { code: Some(Digest { size: root.size + 1, ..root }), ..JobDraft::default() };
        let dir = JobDir::new(temp.path().join("j.1.0"));
        let error = lay_out(&store, &job, &dir, None).await.unwrap_err();
        assert_eq!(super::super::faults::fetch(&error).code, agent_model::Code::SnapshotMissing);
    }
}
