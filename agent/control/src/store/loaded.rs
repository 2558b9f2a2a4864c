//! What a controller reads at its start: the jobs that have not ended, and what these need of others.

use agent_model::JobId;
use agent_model::job::{JobSpec, MAX_TASKS};

use super::{Among, Document, JobRecord, Store, StoreError};

/// What of earlier decisions a database may lack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Missing {
    #[default]
    Nothing,
    /// Those after some moment: it is an older one.
    Later,
    /// Any: rows of a damaged one could not be read.
    Any,
}

/// What a controller loads at its start.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Every job that has not ended.
    pub(crate) jobs: Vec<JobRecord>,
    /// The trials that ended, of each sweep that has not and has use for them.
    pub(crate) trials: Vec<(JobId, JobRecord)>,
    pub(crate) documents: Vec<Document>,
    /// The highest place in the order of submission ever given.
    pub(crate) last_seq: u64,
    /// The database was rebuilt, or is older than the last decisions: the nodes may know more than it.
    pub(crate) mended: bool,
    /// What it may lack.
    pub(crate) missing: Missing,
}

impl Loaded {
    /// The documents of one kind.
    pub(crate) fn all<T>(&self, of_kind: impl Fn(&Document) -> Option<&T>) -> Vec<T>
    where
        T: Clone,
    {
        self.documents.iter().filter_map(of_kind).cloned().collect()
    }
}

/// How many sweeps may extend each other.
const EXTENSIONS: usize = 16;

/// The trials of the sweeps that a sweep extends, those of the first one first.
pub(crate) async fn earlier_trials(store: &dyn Store, spec: &JobSpec) -> Result<Vec<JobRecord>, StoreError> {
    let extended = |spec: &JobSpec| spec.sweep.as_ref().and_then(|sweep| sweep.extends.clone());
    let (mut next, mut found) = (extended(spec), Vec::new());
    for _ in 0..EXTENSIONS {
        let Some(sweep) = next else { break };
        found.splice(0..0, store.page(Among::TasksOf(&sweep), None, MAX_TASKS).await?);
        next = store.job(&sweep).await?.and_then(|sweep| extended(&sweep.spec));
    }
    found.retain(|trial| trial.state.is_terminal());
    Ok(found)
}
