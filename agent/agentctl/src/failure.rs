//! Why a command did not do what was asked, and the exit code of each reason.

use std::process::ExitCode;

use agent_model::{Code, Fault};

/// The job was accepted and never ran.
pub(crate) const NEVER_RAN: u8 = 125;
/// The user stopped following; the job goes on.
pub(crate) const DETACHED: u8 = 130;

/// Why a command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something failed that has a page.
    Fault(Box<Fault>),
    /// This program will not do it.
    Refused {
        /// What it will not do.
        what: String,
        /// What to do instead.
        fix: String,
    },
    /// Nobody reads standard output any more.
    PipeClosed,
}

impl Failure {
    /// A refusal of this program itself.
    pub(crate) fn refused(what: impl Into<String>, fix: impl Into<String>) -> Failure {
        Failure::Refused { what: what.into(), fix: fix.into() }
    }

    /// The exit code.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Refused { .. } => 1,
            Failure::PipeClosed => 3,
            Failure::Fault(fault) => match fault.code {
                Code::Unreachable | Code::Denied => 4,
                Code::Bug => 70,
                _ => 1,
            },
        })
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Failure {
        Failure::Fault(Box::new(fault))
    }
}
