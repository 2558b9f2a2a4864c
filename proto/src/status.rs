//! A fault inside a gRPC status.

use agent_model::{Code, Fault};
use prost::Message;
use tonic::Status;

use crate::v1;

/// The status that carries `fault` to a client.
pub fn status(fault: &Fault) -> Status {
    let code = match fault.code {
        Code::JobNotFound | Code::SnapshotMissing => tonic::Code::NotFound,
        Code::JobConflict | Code::NodeTaken => tonic::Code::AlreadyExists,
        Code::Fenced => tonic::Code::FailedPrecondition,
        Code::Denied | Code::NodeTwice => tonic::Code::PermissionDenied,
        Code::Unidentified | Code::TokenRefused | Code::NodeRemoved => tonic::Code::Unauthenticated,
        Code::DiskFull => tonic::Code::ResourceExhausted,
        Code::ControllerStore | Code::SnapshotStore => tonic::Code::Unavailable,
        Code::Bug => tonic::Code::Internal,
        _ => tonic::Code::InvalidArgument,
    };
    Status::with_details(code, fault.to_string(), v1::Fault::from(fault.clone()).encode_to_vec().into())
}

/// The fault inside a status; one is made up for a status that carries none.
pub fn fault(status: &Status) -> Fault {
    let carried = (!status.details().is_empty())
        .then(|| v1::Fault::decode(status.details()).ok().and_then(|wire| Fault::try_from(wire).ok()))
        .flatten();
    carried.unwrap_or_else(|| {
        let code = match status.code() {
            tonic::Code::Unavailable | tonic::Code::DeadlineExceeded | tonic::Code::Cancelled => {
                Code::Unreachable
            }
            tonic::Code::PermissionDenied | tonic::Code::Unauthenticated => Code::Denied,
            _ => Code::Bug,
        };
        Fault::new(code, "the daemon's answer was not understood").why(format!(
            "{}: {}",
            status.code(),
            status.message()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_fault_survives_a_status() {
        let sent = Fault::new(Code::EnvUnsatisfied, "no such package").why("a").why("b").fix("spell it");
        assert_eq!(fault(&status(&sent)), sent);
    }

    #[test]
    fn test_foreign_status_becomes_a_fault() {
        assert_eq!(fault(&Status::unavailable("gone")).code, Code::Unreachable);
        assert_eq!(
            fault(&Status::with_details(tonic::Code::Internal, "x", vec![0xff].into())).code,
            Code::Bug
        );
    }
}
