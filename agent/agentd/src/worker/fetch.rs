//! Lays out what a job reads: its code in `work/`, each input in `inputs/NAME/`, and the empty folders it
//! may write to.
//!
//! Redoing it after an interruption begins with empty folders. Until all is there, the job directory is closed to
//! whoever the job runs as. Called by `worker::runner`.

use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_cas::snapshot::{Laid, MaterializeError, Owner, Spare, materialize};
use agent_cas::{Store, remove_tree};
use agent_model::Digest;
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

/// Lays everything out, anew, with the help of `spares`. The folders belong to `user` where one is given. Returns which
/// trees these were.
pub(crate) async fn lay_out(
    store: &Store,
    spares: &[Arc<Spare>],
    job: &JobDraft,
    dir: &JobDir,
    user: Option<&JobUser>,
) -> Result<Vec<(Digest, Laid)>, FetchError> {
    let (empty, names) = (dir.clone(), job.outputs.keys().cloned().collect::<Vec<_>>());
    blocking(dir.path(), move || clear(&empty, &names)).await?;
    let (owner, mut trees) = (user.map(owner), Vec::new());
    if let Some(code) = job.code {
        let laid = materialize(store, code, &dir.work(), owner, spares).await;
        trees.push((code, laid.map_err(FetchError::Code)?));
    }
    for (name, input) in &job.inputs {
        if let Input::Folder(root) | Input::File { root, .. } = input {
            let to = dir.inputs().join(name);
            let laid = materialize(store, *root, &to, owner, spares).await;
            trees.push((*root, laid.map_err(|source| FetchError::Input { name: name.clone(), source })?));
        }
    }
    let (dir, user) = (dir.clone(), user.cloned());
    let path = dir.path().to_owned();
    blocking(&path, move || finish(&dir, user.as_ref())).await?;
    Ok(trees)
}

/// Whose files a job of this user has.
pub(crate) fn owner(user: &JobUser) -> Owner {
    Owner { uid: user.uid, gid: user.gid }
}

/// Makes a home for the user in a container, and, if `all` is to be its, gives it what was laid out for somebody else.
pub(crate) async fn settle(dir: &JobDir, user: Option<JobUser>, all: bool) -> Result<(), FetchError> {
    let (path, dir) = (dir.home(), dir.clone());
    let settle = move || {
        std::fs::create_dir_all(dir.home())?;
        let Some(user) = user else { return Ok(()) };
        if all {
            finish(&dir, Some(&user))?;
            [dir.work(), dir.inputs(), dir.out()].iter().try_for_each(|folder| own(folder, &user))?;
        }
        chown(dir.home(), Some(user.uid), Some(user.gid))
    };
    blocking(&path, settle).await
}

/// Empty folders for code, inputs and outputs, which nobody else can reach.
fn clear(dir: &JobDir, outputs: &[String]) -> io::Result<()> {
    std::fs::create_dir_all(dir.path())?;
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700))?;
    for folder in [dir.work(), dir.inputs(), dir.out()] {
        remove_tree(&folder)?;
        std::fs::create_dir_all(&folder)?;
    }
    outputs.iter().try_for_each(|name| std::fs::create_dir_all(dir.out().join(name)))
}

/// The folders every command may write to, and whose they are; the trees have been their owner's from the beginning.
fn finish(dir: &JobDir, user: Option<&JobUser>) -> io::Result<()> {
    let written = ["outputs", "logs"].map(|folder| dir.work().join(folder));
    for folder in &written {
        std::fs::create_dir_all(folder).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                let name = folder.file_name().unwrap_or_default().display();
                io::Error::new(error.kind(), format!("the code has something else where `{name}` belongs"))
            }
            _ => error,
        })?;
    }
    std::fs::File::options().create(true).append(true).open(dir.tracking())?;
    let Some(user) = user else { return Ok(()) };
    for folder in [dir.work(), dir.inputs()].iter().chain(&written) {
        lchown(folder, Some(user.uid), Some(user.gid))?;
    }
    own(&dir.out(), user)?;
    // The way to what belongs to the job, and for its user only.
    chown(dir.path(), None, Some(user.gid))?;
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o710))?;
    chown(dir.tracking(), Some(user.uid), Some(user.gid))
}

/// Gives a tree that no process of the job has seen yet to the user; links themselves, not what they name.
fn own(path: &Path, user: &JobUser) -> io::Result<()> {
    let about = path.symlink_metadata()?;
    if (about.uid(), about.gid()) != (user.uid, user.gid) {
        lchown(path, Some(user.uid), Some(user.gid))?;
    }
    if about.is_dir() {
        for entry in std::fs::read_dir(path)? {
            own(&entry?.path(), user)?;
        }
    }
    Ok(())
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
            lay_out(&store, &[], &job, &dir, None).await.unwrap();
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
        let error = lay_out(&store, &[], &job, &dir, None).await.unwrap_err();
        assert_eq!(super::super::faults::fetch(&error, false).code, agent_model::Code::SnapshotMissing);
    }
}
