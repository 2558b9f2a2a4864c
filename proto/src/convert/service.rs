//! Wire ↔ model of what can be opened in a job.

use agent_model::job::{JobService, ServiceKind};

use super::{WireError, value};
use crate::v1;

impl From<JobService> for v1::Service {
    fn from(service: JobService) -> v1::Service {
        v1::Service {
            r#type: service.kind.name().to_owned(),
            port: service.port.map_or(0, Into::into),
            log_dir: service.log_dir,
            rank: service.rank,
        }
    }
}

impl TryFrom<v1::Service> for JobService {
    type Error = WireError;
    fn try_from(wire: v1::Service) -> Result<JobService, WireError> {
        let port = u16::try_from(wire.port).map_err(|_| value("service.port", &wire.port.to_string()))?;
        Ok(JobService {
            kind: ServiceKind::parse(&wire.r#type).ok_or_else(|| value("service.type", &wire.r#type))?,
            port: (port > 0).then_some(port),
            log_dir: wire.log_dir,
            rank: wire.rank,
        })
    }
}
