//! The answer to a call that is refused: what each part of the controller makes of a failure, once, for users.

use agent_model::{Code, Fault};
use tonic::Status;

use crate::archive::ArchiveError;
use crate::queue::AskError;
use crate::store::StoreError;

/// The answer to a call that is refused.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// A fault, which users can read.
    Fault(Box<Fault>),
    /// The controller is going down; the call may be repeated elsewhere or later.
    Stopping,
    /// A node reports about an attempt that is not on record; it is being asked about it, and may repeat the call.
    Unheard,
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        Refusal::Fault(Box::new(fault))
    }
}

impl From<agent_proto::WireError> for Refusal {
    fn from(error: agent_proto::WireError) -> Refusal {
        Fault::from(error).into()
    }
}

impl From<agent_model::ids::IdError> for Refusal {
    fn from(error: agent_model::ids::IdError) -> Refusal {
        agent_proto::WireError::from(error).into()
    }
}

impl From<AskError> for Refusal {
    fn from(error: AskError) -> Refusal {
        let unstored = |what: &str| Fault::new(Code::ControllerStore, what).because(&error);
        let not_stored = || unstored("the controller could not store the change");
        match error {
            AskError::Stopping => Refusal::Stopping,
            AskError::NotRead => unstored("the controller can neither write its database nor read it")
                .fix("look for a failing disk in the daemon's log; jobs go on")
                .into(),
            AskError::DiskFull => not_stored()
                .fix("make room on the disk of the controller; the change is tried again")
                .into(),
            AskError::Moved => not_stored()
                .fix("make room for it in the state directory; the daemon's log says what failed, and it is tried again")
                .into(),
            AskError::NotWritten => not_stored()
                .fix("look for a failing or read-only disk in the daemon's log; the change is tried again")
                .into(),
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        Fault::new(Code::ControllerStore, "the controller could not read its database").because(&error).into()
    }
}

impl From<ArchiveError> for Refusal {
    fn from(error: ArchiveError) -> Refusal {
        match error {
            ArchiveError::Stopping => Refusal::Stopping,
            error => {
                let code = if error.is_full() { Code::DiskFull } else { Code::ControllerStore };
                Fault::new(code, "the controller could not use its archive of logs").because(&error).into()
            }
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        match refusal {
            Refusal::Fault(fault) => agent_proto::status(&fault),
            Refusal::Stopping => Status::unavailable("the controller is stopping"),
            Refusal::Unheard => {
                Status::unavailable("the attempt is not on record; it is taken over with the next report")
            }
        }
    }
}

/// A request that does not follow the protocol.
pub(crate) fn invalid(why: impl Into<String>) -> Fault {
    Fault::new(Code::RequestInvalid, "the request is not valid").why(why)
}
