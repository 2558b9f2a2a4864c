//! The blobs that the controller needs. The collector asks for them whenever it is about to remove blobs.
//!
//! Needed are the code and the inputs of every job that has not ended, the outputs of jobs, because there is no other
//! copy of them, the locks and build logs of the environments that nodes keep, the locks of those that jobs ran in,
//! and data with a name.
//! All of it follows from the
//! database and from the reports of nodes, so a crash changes nothing. A database that lost jobs does not know their
//! outputs: then the question fails, and nothing is removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_cas::gc::{Holder, Pin, Pins, Unknown};
use agent_model::job::Input;
use agent_model::{Artifacts, Digest, JobDraft, Outcome};

use crate::queue::Queue;
use crate::queue::assets::Assets;
use crate::store::Naming;
use crate::store::{Among, JobRecord, Missing, RankEnd, Recovery, Store};

/// The name under which the collector knows the controller.
pub(crate) const USER: &str = "the controller";

/// Jobs that are read from the database at a time.
const PAGE: u32 = 500;

impl JobRecord {
    /// What earlier attempts left for the next one.
    fn left_trees(&self) -> impl Iterator<Item = Digest> + use<> {
        [self.left, self.so_far].into_iter().flatten().map(|left| left.artifacts.root)
    }
}

/// The trees that a job needs until it ends.
pub(crate) fn of_spec(spec: &JobDraft) -> Vec<Pin> {
    spec.snapshots().into_iter().map(|root| Pin::tree(root, Holder::Jobs)).collect()
}

/// The outputs of a job, and the list of the packages that it ran with.
pub(crate) fn of_outcome(outcome: &Outcome) -> Vec<Pin> {
    let lock = outcome.environment.as_ref().and_then(|used| used.lock);
    let lock = lock.map(|lock| Pin::blob(lock, Holder::Environments));
    outcome.artifacts.map(of_outputs).into_iter().chain(lock).collect()
}

/// Outputs that are stored.
pub(crate) fn of_outputs(artifacts: Artifacts) -> Pin {
    Pin::tree(artifacts.root, Holder::Outputs)
}

/// Everything that a job needs or left.
pub(crate) fn of_job(job: &JobRecord) -> Vec<Pin> {
    let reads = if job.state.is_terminal() { Vec::new() } else { of_spec(&job.spec) };
    let told = job.replicas.iter().filter_map(|replica| match &replica.end {
        Some(RankEnd::Told(outcome)) => Some(outcome),
        _ => None,
    });
    let resumed = job.left_trees().filter(|_| !job.state.is_terminal());
    let resumed = resumed.map(|root| Pin::tree(root, Holder::Jobs));
    let outcomes = job.outcome.iter().chain(told).flat_map(of_outcome);
    let named = job.named.values().filter_map(|naming| match naming {
        Naming::Found(data) => data.snapshot(),
        Naming::Named(_) | Naming::Unnamed(_) => None,
    });
    let made = job.made.iter().chain(job.steps.iter().flat_map(|steps| steps.made.values()));
    let made = made.flat_map(BTreeMap::values).filter_map(Input::snapshot);
    let named = named.chain(made).map(|root| Pin::tree(root, Holder::Outputs));
    reads.into_iter().chain(outcomes).chain(resumed).chain(named).collect()
}

/// Lists everything that is needed.
pub(crate) fn all(queue: Queue, store: Arc<dyn Store>, assets: Assets) -> Pins {
    Box::new(move || {
        let (queue, store, assets) = (queue.clone(), Arc::clone(&store), assets.clone());
        Box::pin(async move { collect(&queue, &*store, &assets).await })
    })
}

async fn collect(queue: &Queue, store: &dyn Store, assets: &Assets) -> Result<Vec<Pin>, Unknown> {
    if let Some(recovery) = store.recovery() {
        known(recovery)?;
    }
    let unknown = |error: &dyn std::error::Error| Unknown(error.to_string());
    // Jobs that have not ended first: one that ends while the database is read is in one of the two.
    let jobs = queue.jobs().await.map_err(|error| unknown(&error))?;
    let mut pins: Vec<Pin> = jobs.iter().flat_map(|view| of_job(&view.job)).collect();
    let mut before = None;
    loop {
        let page = store.page(Among::All, before, PAGE).await.map_err(|error| unknown(&error))?;
        pins.extend(page.iter().flat_map(of_job));
        match page.last() {
            Some(last) => before = Some(last.seq),
            None => break,
        }
    }
    for node in queue.nodes().await.map_err(|error| unknown(&error))? {
        let kept = &node.record.inventory.environments;
        let texts = kept.iter().flat_map(|kept| [kept.lock, kept.log]).flatten();
        pins.extend(texts.map(|text| Pin::blob(text, Holder::Environments)));
    }
    pins.extend(assets.pins());
    Ok(pins)
}

/// Whether the database still knows every job.
fn known(recovery: &Recovery) -> Result<(), Unknown> {
    match &recovery.kept {
        _ if recovery.missing() == Missing::Nothing => Ok(()),
        Some(kept) => Err(Unknown(format!(
            "its database was damaged, and what jobs left that are gone from it is not known; remove {} when \
             nobody needs it any more",
            kept.display()
        ))),
        None => Err(Unknown(
            "its database is an older one, and what later jobs left is not known until it is started again"
                .to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn test_a_database_that_lost_jobs_lets_nothing_go() {
        let mended = Recovery { kept: Some(PathBuf::from("/db.damaged")), rows: 7, ..Recovery::default() };
        assert_eq!(known(&mended), Ok(()));
        for lost in [
            Recovery { bad: 1, ..mended.clone() },
            Recovery { lost: vec!["train-1".into()], ..mended.clone() },
            Recovery { kept: None, ..mended },
        ] {
            assert!(known(&lost).is_err(), "{lost:?}");
        }
    }
}
