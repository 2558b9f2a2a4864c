//! `agent-shim DIRECTORY`: the supervisor of one job. `agent-shim --assigned ORDER DIRECTORY` where a helper of the
//! daemon starts it and assigns its user ([`agent_shim::apart::Assigned`]). `agent-shim --door SOCKET FOLDER` in a
//! container, where the directory is received through the socket ([`agent_shim::door`]) and FOLDER is the part of it
//! that the container sees.
//!
//! Reads `launch.json`, greets on standard output when it listens, waits for `go`, executes the command once
//! and runs until every process of the job is gone, its output is in the log and the exit record is
//! durable. It depends on no other process: the daemon that started it may be killed at any instruction.
//!
//! One thread and one `poll` loop ([`supervise`]); no timer runs while the job is quiet, unless files cannot be watched
//! ([`watch`]). The other modules are the parts of the loop: [`clients`] the socket, [`job_log`] the output, [`mask`] what
//! is hidden in it, [`job`] the start of the command, [`tree`] the processes, [`kill_escalation`] when to signal them,
//! [`memory`] whose memory ran out, [`alarm`] the dates, [`exit_file`] the exit record.
//!
//! In a job of several ranks the same program is also the first process of the command ([`rank`]), and in every job one
//! beside it that opens sessions ([`attend`], [`attendant`]).
//!
//! Exit codes: 0 the exit record is written · 64 usage · 70 see `shim.log` · 71 the same, and it is a lack that others may
//! end: descriptors, processes, memory, room · 74 no such directory, or it cannot be written · 75 another shim runs there.

mod alarm;
mod attend;
mod attendant;
mod clients;
mod exit_file;
mod job;
mod job_log;
mod kill_escalation;
mod mask;
mod memory;
mod notes;
mod rank;
mod setup;
mod supervise;
mod tree;
mod watch;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use agent_model::causes;
use agent_shim::apart::{self, AS, ASSIGNED, Assigned, FILES, FOR_PROGRAM, GATE, ITSELF, STARTER, WORKS_IN};
use agent_shim::{RecordError, WriteError};
use notes::Notes;
use setup::Way;

/// Why the shim cannot do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShimError {
    #[error("the command was started before; it is never started again")]
    Started,
    #[error("there is no launch record")]
    NoLaunch,
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("could not {step}")]
    Step { step: &'static str, source: io::Error },
}

impl ShimError {
    /// What it says of that when it ends.
    fn exit_code(&self) -> u8 {
        causes(self).filter_map(|cause| cause.downcast_ref()).find_map(not_begun).unwrap_or(70)
    }
}

/// The exit code of a shim that this error kept from its work, if that may be different later.
fn not_begun(error: &io::Error) -> Option<u8> {
    match error {
        lack if agent_shim::is_lack(lack) || agent_fs::is_full(lack) => Some(agent_shim::LACKS as u8),
        failing if agent_fs::is_failing(failing) => Some(agent_shim::DISK_FAILS as u8),
        _ => None,
    }
}

/// Names the step in an error of it.
pub(crate) fn step<T, E: Into<io::Error>>(step: &'static str, result: Result<T, E>) -> Result<T, ShimError> {
    result.map_err(|source| ShimError::Step { step, source: source.into() })
}

/// `agent-shim as ID ROOM PROGRAM ARGUMENT...`: becomes the program, as that user, in that room. Supervises nothing.
/// Where variables are [`FOR_PROGRAM`], the program has these alone.
fn as_somebody(id: &Path, room: &Path, program: &Path, args: &[PathBuf]) -> ExitCode {
    let number = |id: &str| id.parse::<u32>().ok().filter(|id| *id != 0);
    let id = match id.to_str() {
        Some(ITSELF) => None,
        Some(id) if number(id).is_some() => number(id),
        _ => return ExitCode::from(64),
    };
    let Ok(room) = serde_json::from_slice(room.as_os_str().as_bytes()) else { return ExitCode::from(64) };
    #[allow(clippy::disallowed_methods, reason = "this process becomes it")]
    let mut command = std::process::Command::new(program);
    #[allow(clippy::disallowed_methods, reason = "they are the program's")]
    let variables: Vec<(OsString, OsString)> = std::env::vars_os().filter_map(for_program).collect();
    if !variables.is_empty() {
        command.env_clear().envs(variables);
    }
    if !wait_for_starter(&mut command) {
        return ExitCode::from(70);
    }
    let Err(error) = apart::run_as(id, &room, command.args(args));
    let _ = writeln!(std::io::stderr(), "{}: {error}", program.display());
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}

/// Does what whoever started this says in variables; `false` if that has ended.
#[allow(clippy::disallowed_methods, reason = "whoever starts this says so")]
fn wait_for_starter(command: &mut std::process::Command) -> bool {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    if let Some(place) = std::env::var_os(WORKS_IN) {
        command.current_dir(place);
    }
    if let Some(starter) = number(STARTER)
        && apart::end_with(starter as i32).is_err()
    {
        return false;
    }
    if let Some(gate) = std::env::var_os(GATE) {
        apart::pass(Path::new(&gate));
    }
    if let Some(files) = number(FILES) {
        apart::allow_files(files);
    }
    true
}

fn for_program((name, value): (OsString, OsString)) -> Option<(OsString, OsString)> {
    let name = name.as_bytes().strip_prefix(FOR_PROGRAM.as_bytes())?;
    Some((OsStr::from_bytes(name).to_owned(), value))
}

/// `agent-shim try-view DIRECTORY`: whether this user can give jobs a view of their own; if not, standard output says why.
fn try_view(dir: &Path) -> ExitCode {
    let Err(error) = agent_shim::view::try_out(dir) else { return ExitCode::SUCCESS };
    let _ = writeln!(std::io::stdout(), "{error}");
    ExitCode::FAILURE
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    match words.split_first() {
        Some((verb, argv)) if verb == agent_shim::RANK => return rank::run(argv),
        Some((verb, [])) if verb == agent_shim::ATTEND => return attend::run(),
        Some((verb, words)) if verb == agent_shim::RSH => return rank::rsh(words),
        Some((verb, [dir])) if verb == agent_shim::TRY_VIEW => return try_view(Path::new(dir)),
        _ => {}
    }
    let args: Vec<PathBuf> = words.into_iter().map(PathBuf::from).collect();
    let assigned = match args.as_slice() {
        [verb, order, _] if verb.as_os_str() == ASSIGNED => order.to_str().and_then(Assigned::parse),
        _ => None,
    };
    let way = match (args.as_slice(), &assigned) {
        ([_, _, dir], Some(assigned)) => Way::Path { dir, assigned: Some(assigned) },
        ([dir], _) => Way::Path { dir, assigned: None },
        ([door, socket, folder], _) if door.as_os_str() == "--door" => Way::Door { socket, folder },
        ([verb, id, room, program, args @ ..], _) if verb.as_os_str() == AS => {
            return as_somebody(id, room, program, args);
        }
        _ => return ExitCode::from(64),
    };
    let place = match setup::take_place(way) {
        Ok(Some(place)) => place,
        Ok(None) => return ExitCode::from(agent_shim::PLACE_TAKEN as u8),
        Err(error) => {
            // The container engine keeps it in its log.
            let _ = writeln!(std::io::stderr(), "cannot enter the job directory: {error}");
            return ExitCode::from(not_begun(&error).unwrap_or(74));
        }
    };
    let notes = Notes::new(place);
    match setup::prepare(&notes, way).and_then(|supervisor| supervisor.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            notes.error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
