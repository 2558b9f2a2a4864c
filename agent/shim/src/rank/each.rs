//! Several processes of the command on one machine. When the first one fails, the others are ended, and its exit code
//! is that of all.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{RankError, code_of, command, say};

/// How long the others may take to end once they were asked to.
const GRACE: Duration = Duration::from_secs(10);

/// How often ended processes are looked for.
const LOOK: Duration = Duration::from_millis(20);

/// Starts the command once for each set of variables, and waits for all.
pub(super) fn run(argv: &[OsString], variables: &[BTreeMap<String, String>]) -> Result<u8, RankError> {
    let mut running: Vec<(usize, Child)> = Vec::new();
    let mut failed: Option<(u8, Instant)> = None;
    for (index, variables) in variables.iter().enumerate() {
        match command(argv).envs(variables).spawn() {
            Ok(child) => running.push((index, child)),
            Err(source) => {
                signal_all(&running, Signal::SIGKILL);
                let program = argv.first().map(|program| program.to_string_lossy().into_owned());
                return Err(RankError::Start { program: program.unwrap_or_default(), source });
            }
        }
    }
    while !running.is_empty() {
        for (index, status) in ended(&mut running).map_err(RankError::Wait)? {
            let code = code_of(status);
            if code != 0 && failed.is_none() {
                say(&format!("process {index} of this node {}; the others are ended", how(status)));
                signal_all(&running, Signal::SIGTERM);
                failed = Some((code, Instant::now() + GRACE));
            }
        }
        if failed.is_some_and(|(_, end)| Instant::now() >= end) {
            signal_all(&running, Signal::SIGKILL);
        }
        thread::sleep(LOOK);
    }
    Ok(failed.map_or(0, |(code, _)| code))
}

/// Those that have ended, which are no longer among the running.
fn ended(running: &mut Vec<(usize, Child)>) -> io::Result<Vec<(usize, ExitStatus)>> {
    let mut ended = Vec::new();
    let mut left = Vec::new();
    for (index, mut child) in running.drain(..) {
        match child.try_wait()? {
            Some(status) => ended.push((index, status)),
            None => left.push((index, child)),
        }
    }
    *running = left;
    Ok(ended)
}

fn signal_all(running: &[(usize, Child)], signal: Signal) {
    for (_, child) in running {
        // One that has ended is a child still, so its number is nobody else's.
        let _ = kill(Pid::from_raw(child.id() as i32), signal);
    }
}

fn how(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("was ended by signal {signal}"),
        None => format!("ended with code {}", code_of(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv(script: &str) -> Vec<OsString> {
        ["sh", "-c", script].map(OsString::from).into()
    }

    fn numbered(count: usize) -> Vec<BTreeMap<String, String>> {
        (0..count).map(|index| [("LOCAL_RANK".to_owned(), index.to_string())].into()).collect()
    }

    #[test]
    fn test_each_has_its_variables_and_the_first_failure_ends_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().display();
        let script = format!("echo $LOCAL_RANK > {path}/$LOCAL_RANK");
        assert_eq!(run(&argv(&script), &numbered(3)).unwrap(), 0);
        for index in 0..3 {
            let said = std::fs::read_to_string(dir.path().join(index.to_string())).unwrap();
            assert_eq!(said.trim(), index.to_string());
        }
        assert_eq!(run(&argv("[ $LOCAL_RANK = 1 ] && exit 7; exec sleep 600"), &numbered(3)).unwrap(), 7);
        assert_eq!(
            run(&argv("[ $LOCAL_RANK = 0 ] && kill -9 $$; exec sleep 600"), &numbered(2)).unwrap(),
            137
        );
        assert!(run(&["/no/such/program".into()], &numbered(2)).is_err());
    }
}
