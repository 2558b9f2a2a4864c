//! Stores the outputs of an ended replica from its retained directory when the controller asks for it: they could not
//! be stored when it ended, or the store has lost them since.
//!
//! Tried once for each order; the controller repeats the order while somebody waits.

use agent_cas::Store;
use agent_model::{Artifacts, Code, Fault, ReplicaId};
use agent_shim::JobDir;
use tracing::info;

use super::journal::Record;
use super::recover::ORDER;
use super::report::Outbox;
use super::{faults, outputs};

/// Stores the outputs in the directory of a replica, and reports the result.
pub(crate) async fn store(store: Store, outbox: Outbox, dir: JobDir, replica: ReplicaId) {
    let stored = attempt(&store, &outbox, &dir, &replica).await;
    info!(%replica, ?stored, "asked to store outputs of earlier job");
    outbox.tell_outputs(&replica, stored).await;
}

async fn attempt(
    store: &Store,
    outbox: &Outbox,
    dir: &JobDir,
    replica: &ReplicaId,
) -> Result<Option<Artifacts>, Box<Fault>> {
    let order = tokio::fs::read(dir.path().join(ORDER)).await;
    let record = order.and_then(|text| Ok(serde_json::from_slice::<Record>(&text)?)).map_err(|error| {
        Fault::new(Code::OutputsUnstored, "the outputs could not be stored")
            .why(format!("{} keeps no directory of {} any more", outbox.node(), replica.job))
            .because(&error)
            .fix("submit the job again")
    })?;
    let stored = outputs::collect(store, dir, &record.spec, Vec::new()).await;
    let stored = stored.map_err(|error| faults::outputs(&error, dir.data(), &replica.job))?;
    if !stored.missing.is_empty() {
        info!(%replica, missing = ?stored.missing, "cannot read part of outputs");
    }
    Ok(stored.artifacts)
}
