//! The blobs that the replicas of this node need: the code and the inputs of each open one, and the outputs of one
//! whose outcome is not delivered yet.
//!
//! They are read from the journal, so they are the same after a crash.

use std::sync::{Arc, Weak};

use agent_cas::gc::{Holder, Pin, Pins, Unknown};

use super::journal::{Journal, Record};

/// The node's name as a user of the collector.
pub(crate) const USER: &str = "the node";

/// The pins of all open replicas, for as long as the journal exists.
pub(crate) fn all(journal: &Arc<dyn Journal>) -> Pins {
    let journal = Arc::downgrade(journal);
    Box::new(move || {
        let journal = Weak::clone(&journal);
        Box::pin(async move {
            let journal = journal.upgrade().ok_or_else(|| Unknown("the daemon is stopping".to_owned()))?;
            let records = journal.open_replicas().await.map_err(|error| Unknown(error.to_string()))?;
            Ok(records.iter().flat_map(of_record).collect())
        })
    })
}

fn of_record(record: &Record) -> Vec<Pin> {
    let outputs = record.outcome.as_ref().and_then(|outcome| outcome.artifacts);
    let roots = record.spec.snapshots().into_iter().chain(outputs.map(|outputs| outputs.root));
    roots.map(|root| Pin::tree(root, Holder::Replicas)).collect()
}

#[cfg(test)]
mod tests {
    use agent_model::{Artifacts, Digest, JobDraft, Outcome, Timestamp, Verdict};

    use super::super::journal::tests::record;
    use super::*;

    #[test]
    fn test_code_and_undelivered_outputs_of_an_open_replica_are_needed() {
        let digest = |size| Digest { size, ..Digest::EMPTY };
        let draft = JobDraft { command: "true".into(), code: Some(digest(1)), ..JobDraft::default() };
        let open = Record { spec: draft.validate().unwrap(), ..record("a.1.0") };
        assert_eq!(of_record(&open), [Pin::tree(digest(1), Holder::Replicas)]);
        let outcome = Outcome {
            verdict: Verdict::Completed,
            exit: None,
            fault: None,
            started_at: None,
            ended_at: Timestamp(1),
            streams: Vec::new(),
            tracking_bytes: 0,
            tracking: None,
            artifacts: Some(Artifacts { root: digest(2), files: 1, bytes: 1 }),
            usage: None,
            environment: None,
            left_out: Vec::new(),
        };
        let ended = Record { outcome: Some(outcome), ..open };
        let expected = [digest(1), digest(2)].map(|root| Pin::tree(root, Holder::Replicas));
        assert_eq!(of_record(&ended), expected);
    }
}
