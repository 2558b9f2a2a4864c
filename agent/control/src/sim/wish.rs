//! The jobs that users of the simulated cluster want.

use std::time::Duration;

use agent_model::job::{Limits, OnDisconnect, Resources, RetryPolicy};
use agent_model::{JobDraft, JobId, JobSpec};

use super::chance::Chance;
use super::world::GRACE;

/// A job that a user wants, and what was answered.
#[derive(Debug, Clone)]
pub(super) struct Wish {
    pub(super) id: JobId,
    pub(super) spec: JobSpec,
    pub(super) submitted: bool,
    /// The controller confirmed the cancel.
    pub(super) canceled: bool,
}

pub(super) fn wish(index: u64, gangs: bool, chance: &mut Chance) -> Wish {
    let nodes = if gangs && chance.per_mille(400) { 2 } else { 1 };
    let replace = chance.per_mille(500);
    let draft = JobDraft {
        command: "true".into(),
        resources: Resources { nodes, ..Resources::default() },
        limits: Limits {
            timeout: None,
            grace: Some(GRACE),
            on_disconnect: if replace { OnDisconnect::Replace } else { OnDisconnect::Hold },
        },
        retry: RetryPolicy {
            max_attempts: if chance.per_mille(200) { 2 } else { 1000 },
            backoff: Duration::ZERO,
        },
        ..JobDraft::default()
    };
    Wish {
        id: format!("j{index}").parse().unwrap(),
        spec: draft.validate().unwrap(),
        submitted: false,
        canceled: false,
    }
}
