//! Why a command did not do what was asked, and every exit code there is.
//!
//! | Code | `run`, `wait`, `logs -f`: the code is the job's | Every other command |
//! |---|---|---|
//! | 0 | the job completed | done |
//! | 1 | the job's code, or it failed though its command returned 0 | refused, or failed |
//! | 2 | the job's code | the command line is wrong |
//! | 3 | the job's code | nobody reads the output any more |
//! | 4 | the job's code | no daemon answers, or it does not allow this |
//! | 70 | the job's code | a mistake of this program |
//! | 124 | `wait --timeout`: its time is over, the job goes on | |
//! | 125 | the command never ran, or what came of it cannot be told: the reason is on standard error | |
//! | 128 + N | signal N ended the command | |
//! | 130 | you stopped following; the job goes on | |

use std::process::ExitCode;

use agent_model::{Code, Fault};

/// The time of a wait is over; the job goes on.
pub(crate) const TIMED_OUT: u8 = 124;
/// The job never ran, or what came of it cannot be told.
pub(crate) const NOT_THE_JOBS: u8 = 125;
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

    /// The exit code of a command that is not about one job's end.
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
