//! Jobs that a job comes after.

use agent_model::job;

use super::{WireError, value};
use crate::v1;

impl From<job::Predecessor> for v1::Predecessor {
    fn from(predecessor: job::Predecessor) -> v1::Predecessor {
        v1::Predecessor { job: predecessor.job.into(), end: predecessor.end.name().to_owned() }
    }
}

impl TryFrom<v1::Predecessor> for job::Predecessor {
    type Error = WireError;
    fn try_from(wire: v1::Predecessor) -> Result<job::Predecessor, WireError> {
        let end = job::WantedEnd::parse(&wire.end).ok_or_else(|| value("end", &wire.end))?;
        Ok(job::Predecessor { job: wire.job.parse()?, end })
    }
}
