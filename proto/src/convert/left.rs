//! What an attempt had, and what it left for the next one.

use agent_model::Epoch;
use agent_model::job;
use agent_model::outcome::UsedEnvironment;

use super::WireError;
use crate::v1;

impl From<job::LeftOutputs> for v1::LeftOutputs {
    fn from(left: job::LeftOutputs) -> v1::LeftOutputs {
        let job::LeftOutputs { attempt, artifacts, is_earlier } = left;
        v1::LeftOutputs { attempt: attempt.0, artifacts: Some(artifacts.into()), is_earlier }
    }
}

impl TryFrom<v1::LeftOutputs> for job::LeftOutputs {
    type Error = WireError;
    fn try_from(wire: v1::LeftOutputs) -> Result<job::LeftOutputs, WireError> {
        let artifacts = wire.artifacts.ok_or(WireError::Missing("resumes.artifacts"))?.try_into()?;
        Ok(job::LeftOutputs { attempt: Epoch(wire.attempt), artifacts, is_earlier: wire.is_earlier })
    }
}

/// The environment that it ran in.
pub(super) fn used_environment(wire: v1::UsedEnvironment) -> Result<Box<UsedEnvironment>, WireError> {
    let lock = Some(wire.lock).filter(|lock| !lock.is_empty());
    Ok(Box::new(UsedEnvironment { key: wire.key, lock: lock.map(|lock| lock.parse()).transpose()? }))
}
