//! The part of `Nodes` that is about the store of blobs: making room in it, and checking it.
//!
//! Both are safe: only blobs that nobody needs, or that are damaged, are removed.

use agent_cas::Checked;
use agent_cas::gc::{Collected, Goal, Holder, Reason, Stay};
use agent_model::{Code, Fault};
use agent_proto::v1;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use tokio::sync::mpsc;
use tonic::Status;

use super::{Refusal, Services};

/// Progress messages of a check that may wait for the client; later ones are dropped meanwhile.
const TOLD: usize = 16;

impl Services {
    /// Makes room as asked, and returns what is kept.
    pub(super) async fn collect(
        &self,
        request: v1::CollectBlobsRequest,
        who: &str,
    ) -> Result<v1::CollectBlobsResponse, Refusal> {
        let goal = if request.all { Goal::All } else { Goal::Limits };
        let collected = self.collector.collect(goal, request.dry_run).await.map_err(|error| {
            Fault::new(Code::SnapshotStore, "nothing more was removed from the store of blobs")
                .because(&error)
                .fix("nothing is lost; see with `agentctl status` what is wrong, then try again")
        })?;
        let (freed, taken) = (collected.freed.bytes, collected.before.taken);
        tracing::info!(who, ?goal, dry = request.dry_run, freed, taken, "asked to collect blobs");
        Ok(to_wire(&collected, self.collector.room().await.taken, self.collector.limits().size))
    }

    /// Reads every blob; the last message is about all of them.
    pub(super) fn check(&self, who: &str) -> BoxStream<'static, Result<v1::CheckBlobsResponse, Status>> {
        tracing::info!(who, "asked to check every blob");
        let (sender, told) = mpsc::channel(TOLD);
        let disk = self.collector.disk().clone();
        let progress = move |checked| {
            let _ = sender.try_send(checked); // a slow client gets a later one
        };
        let check: BoxFuture<'static, Checked> = Box::pin(async move { disk.check(progress).await });
        stream::unfold((told, Some(check)), |(mut told, check)| async move {
            let mut check = check?;
            tokio::select! {
                biased;
                checked = &mut check => Some((Ok(checked_to_wire(checked, true)), (told, None))),
                Some(checked) = told.recv() => Some((Ok(checked_to_wire(checked, false)), (told, Some(check)))),
            }
        })
        .boxed()
    }
}

fn checked_to_wire(checked: Checked, done: bool) -> v1::CheckBlobsResponse {
    let Checked { blobs, bytes, damaged, unread, found } = checked;
    v1::CheckBlobsResponse { blobs, bytes, damaged, done, unread, found }
}

fn to_wire(collected: &Collected, taken: u64, limit: u64) -> v1::CollectBlobsResponse {
    v1::CollectBlobsResponse {
        freed_blobs: collected.freed.blobs,
        freed_bytes: collected.freed.bytes,
        store_bytes: taken,
        store_limit_bytes: limit,
        enough: collected.wanted == u64::MAX || collected.is_enough(),
        stays: collected.stays.iter().map(stay_to_wire).collect(),
    }
}

fn stay_to_wire(stay: &Stay) -> v1::BlobsStay {
    let reason = match stay.reason {
        Reason::Held(Holder::Jobs) => "jobs",
        Reason::Held(Holder::Outputs) => "outputs",
        Reason::Held(Holder::Environments) => "environments",
        Reason::Held(Holder::Assets) => "assets",
        Reason::Held(Holder::Replicas) => "replicas",
        Reason::Recent => "recent",
        Reason::Room => "room",
    };
    v1::BlobsStay { reason: reason.to_owned(), blobs: stay.blobs, bytes: stay.bytes }
}
