//! Changes to jobs.

use agent_model::Timestamp;
use agent_model::job::{Change, Priority};

use super::{WireError, from_wire, value};
use crate::v1;

impl TryFrom<v1::ChangeJobRequest> for Change {
    type Error = WireError;
    fn try_from(wire: v1::ChangeJobRequest) -> Result<Change, WireError> {
        let priority = match wire.priority.as_str() {
            "" => None,
            word => Some(Priority::parse(word).ok_or_else(|| value("priority", word))?),
        };
        Ok(Change {
            priority,
            timeout: wire.timeout.map(from_wire),
            gpus: wire.gpus,
            cpus: wire.cpus,
            memory: wire.memory_bytes,
            begin: wire.begin_ms.map(Timestamp),
            deadline: wire.deadline_ms.map(Timestamp),
            held: wire.held,
        })
    }
}

/// The request for a change of a job.
pub fn change_request(job: String, change: &Change) -> v1::ChangeJobRequest {
    let Change { priority, timeout, gpus, cpus, memory, begin, deadline, held } = change.clone();
    v1::ChangeJobRequest {
        job,
        priority: priority.map(|priority| priority.name().to_owned()).unwrap_or_default(),
        timeout: timeout.map(super::to_wire),
        gpus,
        cpus,
        memory_bytes: memory,
        begin_ms: begin.map(|at| at.0),
        deadline_ms: deadline.map(|at| at.0),
        held,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn test_a_change_comes_back_as_it_was() {
        for change in [
            Change::default(),
            Change { priority: Some(Priority::Low), gpus: Some(0), held: Some(false), ..Change::default() },
            Change {
                timeout: Some(Duration::from_millis(1500)),
                cpus: Some(3),
                memory: Some(1 << 40),
                begin: Some(Timestamp(0)),
                deadline: Some(Timestamp(9)),
                ..Change::default()
            },
        ] {
            assert_eq!(Change::try_from(change_request("a".into(), &change)).unwrap(), change);
        }
        let odd = v1::ChangeJobRequest {
            priority: "highest".into(),
            ..change_request("a".into(), &Change::default())
        };
        assert!(Change::try_from(odd).is_err());
    }
}
