//! Stores the outputs of a replica when the controller asks for it: of one that ended without storing them, or whose
//! outputs the store has lost, from its retained directory; of one that runs, what it has written so far.
//!
//! Tried once for each order; the controller repeats the order while somebody waits.

use std::time::Duration;

use agent_cas::Store;
use agent_model::outcome::first_left_out;
use agent_model::{Code, Fault, ReplicaId};
use agent_shim::JobDir;
use tracing::{info, warn};

use super::outputs::Collected;
use super::recover::read_order;
use super::report::{Outbox, OutputsWanted, StoredOutputs};
use super::retention::{self, Retention, Stay};
use super::{faults, outputs};
use crate::disk::DiskKeeper;

/// Stores the outputs in the directory of a replica, and reports the result.
pub(crate) async fn store(
    store: Store,
    outbox: Outbox,
    disk: DiskKeeper,
    dir: JobDir,
    replica: ReplicaId,
    wanted: OutputsWanted,
    (retention, stay): (Retention, Duration),
) {
    let stored = attempt(&store, &outbox, &disk, &dir, &replica, wanted).await;
    info!(%replica, ?wanted, ?stored, "asked to store outputs of job");
    let is_whole = stored.as_ref().is_ok_and(|stored| stored.missing.is_empty());
    if wanted == OutputsWanted::AfterItsEnd && is_whole && retention::is_over(&dir) {
        // Now it is a copy, and takes its room no longer than others.
        if let Err(error) = retention.put(&dir, Stay::Copy(stay)).await {
            warn!(%replica, %error, "cannot note retention of directory");
        }
    }
    let told = stored.map(|Collected { artifacts, missing, left_out }| {
        let missing = missing.iter().map(|file| format!("{} {}", file.path.display(), file.why));
        let left_out = first_left_out(missing.chain(left_out).collect());
        StoredOutputs { artifacts, left_out }
    });
    outbox.tell_outputs(&replica, wanted, told).await;
}

async fn attempt(
    store: &Store,
    outbox: &Outbox,
    disk: &DiskKeeper,
    dir: &JobDir,
    replica: &ReplicaId,
    wanted: OutputsWanted,
) -> Result<Collected, Box<Fault>> {
    let from = dir.clone();
    let record = agent_blocking::blocking_io(move || read_order(&from)).await.map_err(|error| {
        Fault::new(Code::OutputsUnstored, "the outputs could not be stored")
            .why(format!("{} keeps no directory of {}", outbox.node(), replica.job))
            .because(&error)
            .fix("submit the job again")
    })?;
    let stored = match wanted {
        OutputsWanted::AfterItsEnd => outputs::collect(store, dir, &record.spec, Vec::new())
            .await
            .map_err(|error| faults::outputs(&error, dir.data(), &replica.job)),
        OutputsWanted::SoFar => outputs::collect_so_far(store, dir, &record.spec, disk.spare())
            .await
            .map_err(|error| faults::outputs_so_far(&error, dir.data(), &replica.job)),
    };
    Ok(stored?)
}
