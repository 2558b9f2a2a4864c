//! `agent-shim DIRECTORY`: the supervisor of one job.
//!
//! Reads `launch.json`, greets on standard output when it listens, waits for `go`, executes the command once
//! and stays until every process of the job is gone, its output is in the log and the exit record is
//! durable. It needs nobody: the daemon that started it may be killed at any instruction.
//!
//! One thread and one `poll` loop ([`supervise`]); no timer runs while the job is quiet. The other modules
//! are what the loop moves: [`clients`] the socket, [`job_log`] the output, [`job`] the start of the
//! command, [`tree`] the processes, [`ladder`] when to signal them, [`memory`] who ran out of it, [`alarm`] the
//! dates, [`exit_file`] the exit record.
//!
//! Exit codes: 0 the exit record is written · 64 usage · 70 see `shim.log` · 74 no such directory, or it
//! cannot be written · 75 another shim stands there.

mod alarm;
mod clients;
mod exit_file;
mod job;
mod job_log;
mod ladder;
mod memory;
mod notes;
mod setup;
mod supervise;
mod tree;

use std::path::Path;
use std::process::ExitCode;

use notes::Notes;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let (Some(dir), None) = (args.next(), args.next()) else {
        return ExitCode::from(64);
    };
    let place = match setup::take_place(Path::new(&dir)) {
        Ok(Some(place)) => place,
        Ok(None) => return ExitCode::from(agent_shim::PLACE_TAKEN as u8),
        Err(_) => return ExitCode::from(74), // there is nowhere to say more
    };
    let notes = Notes::new(place);
    match setup::prepare(&notes).and_then(|supervisor| supervisor.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            notes.error(&error);
            ExitCode::from(70)
        }
    }
}
