//! Where one build happens: its directory, its log, and the way to run a command there.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use agent_model::failpoint;

use super::AcquireError;
use super::flight::Transcript;
use crate::exec::Command;

/// How much of a command's output is kept to judge it by, in bytes.
const KEPT: usize = 64 << 10;

/// What a builder made of its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Built {
    /// The variables a command needs to use it, besides `PATH`.
    pub vars: BTreeMap<String, String>,
    /// What goes first on `PATH`.
    pub path_entries: Vec<PathBuf>,
    /// The version of its interpreter.
    pub python_version: String,
}

/// How a command of a builder ended.
pub(super) struct Ran {
    pub(super) success: bool,
    /// The end of what it printed.
    pub(super) text: String,
}

/// Where one build happens.
pub struct Bench {
    prefix: PathBuf,
    transcript: Arc<Transcript>,
    stall: Duration,
}

impl Bench {
    pub(super) fn new(prefix: PathBuf, transcript: Arc<Transcript>, stall: Duration) -> Bench {
        Bench { prefix, transcript, stall }
    }

    /// The directory to build in, empty at first. The environment stays there.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Adds a line of the agent's own to the build log.
    pub fn say(&self, line: &str) {
        self.transcript.write(format!("{line}\n").as_bytes());
    }

    /// Runs a command; what it prints goes to the build log. It is ended when it is silent for too long, when the
    /// build is dropped, and, by its mark, when the daemon dies.
    pub(super) async fn run(&self, step: &'static str, command: Command) -> Result<Ran, AcquireError> {
        failpoint::hit("env.build.spawn").map_err(AcquireError::io("build in", &self.prefix))?;
        let command = command.cwd(&self.prefix).mark(&self.prefix.to_string_lossy()).stall(self.stall);
        let mut kept = Vec::new();
        let status = command
            .stream(|bytes| {
                self.transcript.write(bytes);
                kept.extend_from_slice(bytes);
                let excess = kept.len().saturating_sub(2 * KEPT);
                if excess > 0 {
                    kept.drain(..excess + KEPT);
                }
            })
            .await
            .map_err(AcquireError::command(step))?;
        if let Some(signal) = killed_by(status) {
            return Err(AcquireError::Killed { step, signal });
        }
        Ok(Ran { success: status.success(), text: String::from_utf8_lossy(&kept).into_owned() })
    }
}

/// The signal with which somebody ended a command for good; a shell says it of its child by its own code.
fn killed_by(status: ExitStatus) -> Option<i32> {
    const KILL: i32 = 9;
    status.signal().or_else(|| status.code().map(|code| code - 128).filter(|signal| *signal == KILL))
}

impl Ran {
    /// The last lines printed, for an error that has no better words.
    pub(super) fn tail(&self) -> String {
        const LINES: usize = 5;
        let lines: Vec<&str> = self.text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        match lines.len() {
            0 => "it printed nothing".to_owned(),
            count => lines[count.saturating_sub(LINES)..].join(" | "),
        }
    }
}
