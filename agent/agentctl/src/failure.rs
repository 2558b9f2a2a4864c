//! Why a command failed, and all exit codes: [`EXIT_CODES`] in short, `agent/docs/exit-codes.md` for authors of
//! scripts.

use std::process::ExitCode;

use agent_model::{Code, Fault};

/// The time of a wait is over; the job goes on.
pub(crate) const TIMED_OUT: u8 = 124;
/// The job never ran, or its outcome cannot be reported.
pub(crate) const NOT_THE_JOBS: u8 = 125;
/// The user stopped following, and the job goes on; or stopped sending, and there is no job.
pub(crate) const DETACHED: u8 = 130;

/// The exit codes, below `agentctl --help`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0    done; for run, wait and logs -f: the job completed
  1    refused, or failed
  2    the command line is wrong
  3    nobody reads the output any more
  4    no daemon answers, or it does not allow this
  70   a mistake of agentctl itself
Of run, wait and logs -f it is the job's own instead, of exec that of its command; 128 + N
where signal N ended it, 1 where the job failed though its command returned 0, and:
  124  wait --timeout is over; the job goes on
  125  the command never ran, or what came of it cannot be told
  130  you stopped following, and the job goes on; or stopped before there was one";

/// The same, below the help of the three commands whose code is the job's.
pub(crate) const JOB_CODES: &str = "\
Exit codes of run, wait and logs -f: the job's own; 124 when --timeout is over; 125 when the command never ran \
or what came of it cannot be told; 130 when you stopped it.";

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A fault, whose code has a page.
    Fault(Box<Fault>),
    /// A refusal of this program itself, which has no code.
    Refused {
        /// What it will not do.
        what: String,
        /// What to do instead.
        fix: String,
    },
    /// Nobody reads standard output any more.
    PipeClosed,
    /// The user stopped it before there was a job.
    Interrupted,
}

impl Failure {
    /// A refusal of this program itself.
    pub(crate) fn refused(what: impl Into<String>, fix: impl Into<String>) -> Failure {
        Failure::Refused { what: what.into(), fix: fix.into() }
    }

    /// The exit code of a command that does not return a job's exit code.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Refused { .. } => 1,
            Failure::PipeClosed => 3,
            Failure::Interrupted => DETACHED,
            Failure::Fault(fault) => match fault.code {
                Code::Unreachable | Code::Denied | Code::Unidentified => 4,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_help_and_document_name_the_same_exit_codes() {
        let document = include_str!("../../docs/exit-codes.md");
        let rows = document.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
        let mut told: Vec<&str> = rows.filter(|code| code.bytes().all(|b| b.is_ascii_digit())).collect();
        told.dedup();
        let lines = EXIT_CODES.lines().filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next());
        assert_eq!(told, lines.collect::<Vec<_>>());
        for code in [TIMED_OUT, NOT_THE_JOBS, DETACHED] {
            assert!(
                told.contains(&code.to_string().as_str()) && JOB_CODES.contains(&code.to_string()),
                "{code}"
            );
        }
    }
}
