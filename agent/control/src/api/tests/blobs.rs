//! Which blobs are kept, and which are removed.

use std::collections::BTreeMap;
use std::path::Path;

use agent_cas::{BlobStore, Remote, digest_of, snapshot};
use agent_model::Digest;

use super::*;

/// Stores a directory with these files.
async fn push(dir: &Path, to: &Remote, files: &[(&str, &str)]) -> Digest {
    let dir = dir.join(digest_of(format!("{files:?}").as_bytes()).hex());
    for (path, text) in files {
        std::fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
        std::fs::write(dir.join(path), text).unwrap();
    }
    let scanned = snapshot::scan(&dir).unwrap();
    snapshot::push(&scanned, to, |_| {}).await.unwrap();
    scanned.root
}

fn with_code(name: &str, code: Digest) -> v1::JobSpec {
    v1::JobSpec { code: code.to_string(), ..request(name) }
}

fn with_outputs(root: Digest) -> v1::Outcome {
    let artifacts = Some(v1::Artifacts { root: root.to_string(), files: 1, bytes: 1 });
    v1::Outcome { artifacts, ..outcome(0, b"") }
}

/// Removes all blobs that may be removed; returns the reasons why the others are kept.
async fn collect(rig: &mut Rig) -> BTreeMap<String, u64> {
    let all = v1::CollectBlobsRequest { all: true, dry_run: false };
    let answer = within("a collection", rig.nodes.collect_blobs(all)).await.unwrap().into_inner();
    assert!(answer.enough);
    answer.stays.into_iter().map(|stay| (stay.reason, stay.blobs)).collect()
}

#[tokio::test]
async fn test_what_jobs_need_stays_and_what_they_left_stays_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let blobs = rig.blobs().await;
    let ran = push(dir.path(), &blobs, &[("a.py", "a"), ("lib/b.py", "b")]).await;
    let waits = push(dir.path(), &blobs, &[("a.py", "a"), ("c.py", "c")]).await;
    let outputs = push(dir.path(), &blobs, &[("outputs/model", "m")]).await;
    push(dir.path(), &blobs, &[("nobody", "needs it")]).await;
    let mut node = Node::join(&rig, 1).await;
    rig.try_submit("runs", with_code("runs", ran)).await.unwrap();
    node.ordered("runs.1.0").await;
    rig.try_submit("waits", with_code("waits", waits)).await.unwrap();
    node.step("runs.1.0", ReplicaStep::Running).await;
    node.deliver("runs.1.0", with_outputs(outputs)).await.unwrap();
    rig.ended("runs").await;
    // Of the code of the job that ended, only what the other one needs is left.
    let expected = [("jobs".to_owned(), 3), ("outputs".to_owned(), 3)];
    assert_eq!(collect(&mut rig).await, BTreeMap::from(expected.clone()));
    let (a, b) = (digest_of(b"a"), digest_of(b"b"));
    assert_eq!(blobs.missing(&[ran, waits, outputs, a, b]).await.unwrap(), [ran, b]);
    // The same after a crash, because it follows from what is on disk.
    rig.kill().await;
    let mut rig = Rig::start(dir.path()).await;
    assert_eq!(collect(&mut rig).await, BTreeMap::from(expected));
    rig.stop().await;
}

#[tokio::test]
async fn test_a_snapshot_with_a_gap_is_asked_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let blobs = rig.blobs().await;
    let files = [("a.py", "a"), ("lib/b.py", "b")];
    let ran = push(dir.path(), &blobs, &files).await;
    // Between the push and the submission everything is removed.
    collect(&mut rig).await;
    let refused = rig.try_submit("j", with_code("j", ran)).await.unwrap_err();
    assert_eq!(code(&refused), Code::SnapshotMissing);
    push(dir.path(), &blobs, &files).await;
    rig.try_submit("j", with_code("j", ran)).await.unwrap();

    let outputs = push(dir.path(), &blobs, &[("outputs/model", "m")]).await;
    let mut node = Node::join(&rig, 1).await;
    node.ordered("j.1.0").await;
    node.step("j.1.0", ReplicaStep::Uploading).await;
    // The node was away for so long that its outputs were removed before it reported them.
    collect(&mut rig).await;
    let early = node.deliver("j.1.0", with_outputs(outputs)).await.unwrap_err();
    assert_eq!((code(&early), early.code()), (Code::SnapshotMissing, tonic::Code::FailedPrecondition));
    push(dir.path(), &blobs, &[("outputs/model", "m")]).await;
    node.deliver("j.1.0", with_outputs(outputs)).await.unwrap();
    rig.stop().await;
}

#[tokio::test]
async fn test_check_reads_everything_and_says_what_was_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let blobs = rig.blobs().await;
    push(dir.path(), &blobs, &[("a.py", "a"), ("b.py", "b")]).await;
    let b = digest_of(b"b");
    agent_cas::damage(&dir.path().join("cas"), &b, |bytes| bytes[0] ^= 1);
    let mut told = rig.nodes.check_blobs(v1::CheckBlobsRequest {}).await.unwrap().into_inner();
    let mut last = v1::CheckBlobsResponse::default();
    while let Some(message) = within("a word about the check", told.message()).await.unwrap() {
        assert!(!last.done);
        last = message;
    }
    assert_eq!((last.blobs, last.damaged, last.done), (3, 1, true));
    assert_eq!(blobs.missing(&[b]).await.unwrap(), [b]);
    rig.stop().await;
}
