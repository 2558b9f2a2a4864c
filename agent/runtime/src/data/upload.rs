//! Sends what a job left to a store, or to a folder of this machine.
//!
//! Owns which user does it: the daemon's own, because the files are the daemon's after the end of the job, and because
//! the credentials of a store must not be within reach of a job. Hides the program. The notes of what has arrived are
//! the caller's, so that an upload can be repeated by another process of the daemon.

use std::path::PathBuf;

use agent_blocking::blocking;
use agent_env::{EngineEvent, StoreUpload, Task, UploadTarget, Uploaded};
use agent_model::failpoint;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::{DataCache, DataError, EngineRun};
use crate::env::Progress;

/// How long a request may take, in seconds: it sends at most a part of 8 MiB.
const REQUEST_S: u64 = 120;

/// Files to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataUpload {
    /// The directory of the job.
    pub base: PathBuf,
    /// The folder with the files, relative to it.
    pub folder: PathBuf,
    /// This file of the folder alone; otherwise all of them.
    pub file: Option<String>,
    /// Where to.
    pub to: UploadTarget,
    /// The file with the notes of what has arrived; its directory is made if needed.
    pub notes: PathBuf,
}

impl DataCache {
    /// Sends the files that have not arrived yet. `told` is sent the progress. Dropping the future ends it, and the
    /// same upload goes on there later.
    pub fn upload<'a>(
        &'a self,
        upload: &'a DataUpload,
        told: &'a watch::Sender<Option<Progress>>,
    ) -> BoxFuture<'a, Result<Uploaded, DataError>> {
        async move {
            let (root, notes) = (&self.0.config.root, upload.notes.clone());
            let prepare = move || {
                failpoint::hit("env.data.upload")?;
                notes.parent().map_or(Ok(()), std::fs::create_dir_all)
            };
            blocking(prepare).await.map_err(DataError::file("prepare", &upload.notes))?;
            let task = Task::Upload(Box::new(StoreUpload {
                base: upload.base.clone(),
                folder: upload.folder.clone(),
                file: upload.file.clone(),
                to: upload.to.clone(),
                notes: upload.notes.clone(),
                stall_s: REQUEST_S,
            }));
            let run = EngineRun { task, cwd: root, mark: &upload.notes, user: None };
            let done = self.run(run, told).await;
            told.send_replace(None);
            match done? {
                EngineEvent::Uploaded(uploaded) => Ok(uploaded),
                other => Err(DataError::Failed(format!("the program answered something else: {other:?}"))),
            }
        }
        .boxed()
    }
}
