//! `agent-spawn --state-dir DIR --user NAME [--job-uids FIRST-LAST] [--account NAME]... [--root-jobs]`: does what
//! needs root for a daemon that is an ordinary user, and no more than its arguments allow. Listens at its standard
//! input, where a service manager puts the socket; has no network and reads no file of the daemon.
//!
//! Exit codes: 64 usage · 70 the socket cannot be served · 71 the supervisor's program is not there

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::ExitCode;

use agent_spawn::helper;
use agent_spawn::limits::HelperLimits;
use nix::unistd::User;

const USAGE: u8 = 64;
const NOT_SERVED: u8 = 70;
const NO_SHIM: u8 = 71;

/// The daemon's default.
const JOB_UIDS: std::ops::RangeInclusive<u32> = 2_000_000_000..=2_000_065_535;

fn main() -> ExitCode {
    let limits = match limits(std::env::args().skip(1)) {
        Ok(limits) => limits,
        Err(problem) => return fail(&problem, USAGE),
    };
    if !limits.shim.is_file() {
        return fail("`agent-shim` is not beside this program", NO_SHIM);
    }
    match helper::serve(io::stdin().as_fd(), limits) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("standard input is no socket that listens: {error}"), NOT_SERVED),
    }
}

fn limits(mut words: impl Iterator<Item = String>) -> Result<HelperLimits, String> {
    let (mut state_dir, mut keeper) = (None, None);
    let (mut job_uids, mut accounts, mut root_jobs) = (JOB_UIDS, Vec::new(), false);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--state-dir" => state_dir = Some(PathBuf::from(value()?)).filter(|path| path.is_absolute()),
            "--user" => keeper = Some(account(&value()?)?),
            "--job-uids" => job_uids = range(&value()?).ok_or("--job-uids needs two numbers, FIRST-LAST")?,
            "--account" => accounts.push(account(&value()?)?.uid.as_raw()),
            "--root-jobs" => root_jobs = true,
            _ => return Err(format!("there is no argument {word}")),
        }
    }
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let keeper = keeper.ok_or("--user must say as whom the daemon runs")?;
    if keeper.uid.is_root() {
        return Err("a daemon that is root needs no helper".to_owned());
    }
    Ok(HelperLimits {
        state_dir: state_dir.ok_or("--state-dir must name an absolute path")?,
        keeper: (keeper.uid.as_raw(), keeper.gid.as_raw()),
        job_uids,
        accounts,
        root_jobs,
        shim: own.with_file_name("agent-shim"),
        daemon: own.with_file_name("agentd"),
        files: u64::MAX,
    })
}

fn account(name: &str) -> Result<User, String> {
    User::from_name(name).ok().flatten().ok_or_else(|| format!("there is no user {name}"))
}

/// Numbers below 1000, which are the system's, are refused.
fn range(text: &str) -> Option<std::ops::RangeInclusive<u32>> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (1000 <= first && first < last && last < u32::MAX).then_some(first..=last)
}

fn fail(problem: &str, code: u8) -> ExitCode {
    let _ = writeln!(io::stderr(), "agent-spawn: {problem}");
    ExitCode::from(code)
}
