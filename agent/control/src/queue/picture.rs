//! What users are shown of jobs and nodes.
//!
//! While everything is on disk that is the book. While a commit fails the book is ahead of the disk, and what it has
//! may never become true: then users are shown what the store has, the last picture that was made durable, and since
//! when ([`Stall`]). Invariant: no answer here depends on a change that is not on disk.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_model::{JobId, NodeId, Timestamp};
use tokio::sync::watch;

use super::{AskError, JobView, NodeState, Queue, Reply, Request, Task};
use crate::store::{Document, JobRecord, NodeRecord, StoreError};

/// A question that changes nothing. The methods of [`super::Queue`] describe them.
#[derive(Debug)]
pub(super) enum Showing {
    Job(JobId, Reply<Option<JobView>>),
    Jobs(Reply<Vec<JobView>>),
    Watch(JobId, Reply<Option<watch::Receiver<JobView>>>),
    Nodes(Reply<Vec<NodeState>>),
}

/// The controller cannot write to its database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stall {
    /// Everything up to then is on disk.
    pub(crate) since: Timestamp,
    pub(crate) why: AskError,
}

impl Queue {
    /// The same as [`Queue::job`], for a user: see the module.
    pub(crate) async fn shown_job(&self, id: &JobId) -> Result<Option<JobView>, AskError> {
        self.ask(|reply| Request::Showing(Showing::Job(id.clone(), reply))).await
    }

    /// The same as [`Queue::jobs`], for a user.
    pub(crate) async fn shown_jobs(&self) -> Result<Vec<JobView>, AskError> {
        self.ask(|reply| Request::Showing(Showing::Jobs(reply))).await
    }

    /// The same as [`Queue::nodes`], for a user.
    pub(crate) async fn shown_nodes(&self) -> Result<Vec<NodeState>, AskError> {
        self.ask(|reply| Request::Showing(Showing::Nodes(reply))).await
    }

    /// A job that has not ended, as it changes; its last value is the terminal one.
    pub(crate) async fn watch(&self, id: &JobId) -> Result<Option<watch::Receiver<JobView>>, AskError> {
        self.ask(|reply| Request::Showing(Showing::Watch(id.clone(), reply))).await
    }

    /// Since when nothing can be written, and why; `None` while everything is on disk, or soon will be.
    pub(crate) fn stall(&self) -> Option<Stall> {
        *self.stall.lock()
    }

    /// [`Queue::flush`] for a read of the store, for which what is on disk does if nothing can be written.
    pub(crate) async fn flush_if_possible(&self) -> Result<(), AskError> {
        match self.flush().await {
            Err(AskError::NotWritten | AskError::DiskFull | AskError::Moved) => Ok(()),
            written => written,
        }
    }
}

impl Task {
    /// Answers from the book, which is on disk.
    pub(super) fn show(&mut self, look: Showing) {
        let publisher = &mut self.publisher;
        match look {
            Showing::Job(id, reply) => reply.send(Ok(publisher.view(&id))),
            Showing::Jobs(reply) => reply.send(Ok(publisher.views())),
            Showing::Watch(id, reply) => reply.send(Ok(publisher.watch(&id))),
            Showing::Nodes(reply) => reply.send(Ok(publisher.book.nodes().cloned().collect())),
        }
    }

    /// Answers from the store, which the book is ahead of.
    pub(super) async fn show_durable(&mut self, look: Showing) {
        match look {
            Showing::Job(id, reply) => reply.send(self.durable_job(&id).await.map_err(unread)),
            Showing::Jobs(reply) => {
                let loaded = self.store.load().await.map_err(unread);
                reply.send(loaded.map(|loaded| loaded.jobs.into_iter().map(|job| self.told(job)).collect()));
            }
            Showing::Watch(id, reply) => {
                let view = self.durable_job(&id).await.map_err(unread);
                reply.send(view.map(|view| view.map(|view| self.publisher.watch_from(view))));
            }
            Showing::Nodes(reply) => reply.send(self.durable_nodes().await.map_err(unread)),
        }
    }

    /// `None` when it has ended, as far as the disk knows.
    async fn durable_job(&self, id: &JobId) -> Result<Option<JobView>, StoreError> {
        if let Some(job) = self.store.job(id).await? {
            let goes_on = !job.state.is_terminal() && !job.is_removed();
            return Ok(goes_on.then(|| self.told(job)));
        }
        let Some((array, index)) = id.as_task() else { return Ok(None) };
        let array = self.store.job(&array).await?.filter(|array| !array.state.is_terminal());
        let task = array.and_then(|array| array.waiting_task(index, None));
        Ok(task.map(|task| self.told(task)))
    }

    /// A job with the book's words for it, if the book has nothing newer.
    fn told(&self, job: JobRecord) -> JobView {
        let same = self.publisher.view(&job.id).filter(|view| *view.job == job);
        same.unwrap_or_else(|| JobView { job: Arc::new(job), detail: String::new() })
    }

    async fn durable_nodes(&self) -> Result<Vec<NodeState>, StoreError> {
        let loaded = self.store.load().await?;
        let kept = loaded.all(|one| if let Document::Node(node) = one { Some(&**node) } else { None });
        let mut kept: BTreeMap<NodeId, NodeRecord> =
            kept.into_iter().map(|node| (node.id.clone(), node)).collect();
        // How it is linked and what it holds was reported, not decided: of that the book alone knows.
        let durable = |node: &NodeState| {
            let record = kept.remove(&node.record.id)?;
            let here = |job: &&JobRecord| job.replicas.iter().any(|replica| replica.node == record.id);
            let jobs = loaded.jobs.iter().filter(here).map(|job| job.id.clone()).collect();
            let mut node = node.clone();
            (node.record, node.jobs) = (record, jobs);
            Some(node)
        };
        Ok(self.publisher.book.nodes().filter_map(durable).collect())
    }
}

fn unread(error: StoreError) -> AskError {
    tracing::error!(error = &error as &dyn std::error::Error, "cannot read what is on disk");
    AskError::NotRead
}
