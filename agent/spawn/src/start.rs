//! The command lines of supervisors and builders. They may run as root, so variables from the daemon are passed only
//! under names of our own, and they stay our own program until they have switched to their target user.

use std::path::Path;
use std::process::Command;

use agent_model::failpoint;
use agent_shim::apart::{AS, ASSIGNED, Assigned, FILES, FOR_PROGRAM, GATE, STARTER, WORKS_IN};
use agent_shim::room::BuilderRoom;

use crate::Program;
use crate::limits::HelperLimits;

/// A supervisor for a job directory, which runs as the users it is assigned.
#[allow(clippy::disallowed_methods, reason = "whoever runs it owns it")]
pub fn supervisor(shim: &Path, dir: &Path, assigned: Option<&Assigned>) -> Command {
    let mut command = Command::new(shim);
    if let Some(assigned) = assigned {
        command.arg(ASSIGNED).arg(assigned.to_string());
    }
    command.arg(dir).env_clear();
    if let Some(plan) = failpoint::plan() {
        command.env(failpoint::VARIABLE, plan);
    }
    command
}

/// A program that runs as the user of builders, once it may pass the gate.
#[allow(clippy::disallowed_methods, reason = "whoever runs it owns it")]
pub(crate) fn builder(
    limits: &HelperLimits,
    uid: u32,
    program: &Program,
    gate: &Path,
) -> Result<Command, serde_json::Error> {
    let room = BuilderRoom { state_dir: Some(limits.state_dir.clone()), sees: program.sees.clone() };
    let mut command = Command::new(&limits.shim);
    command.arg(AS).arg(uid.to_string()).arg(serde_json::to_string(&room)?);
    command.args(&program.argv).env_clear();
    command.envs(program.env.iter().map(|(name, value)| (format!("{FOR_PROGRAM}{name}"), value)));
    command.env(WORKS_IN, &program.cwd).env(FILES, limits.files.to_string()).current_dir("/");
    command.env(STARTER, std::process::id().to_string()).env(GATE, gate);
    Ok(command)
}

/// `oom_score_adj` of a child that gives way to others, of at most 1000.
const OOM_SCORE: &str = "500";

/// Makes a child give way to others: this much nicer than this process, and killed first when memory runs out. Does
/// nothing to one that has ended.
pub fn give_way(pid: i32, nice: i32) {
    let child = rustix::process::Pid::from_raw(pid);
    let own = rustix::process::getpriority_process(None).unwrap_or(0);
    let _ = rustix::process::setpriority_process(child, (own + nice).min(19));
    let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), OOM_SCORE);
}
