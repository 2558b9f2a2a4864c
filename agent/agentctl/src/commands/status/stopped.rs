//! What the disk says of a daemon that does not run: whose node the machine is, and which jobs go on without it.
//!
//! Reads only, and only what this user may read.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use agent_identity::Credentials;
use agent_model::Fault;
use agent_model::paths::Places;

use crate::cli::variable;
use crate::client::Target;
use crate::output::text::{clean, count};

/// The most jobs that are named.
const NAMED: usize = 5;

/// Adds to the fault that no daemon answers what is on the disk of each that may be meant.
pub(super) fn told(fault: Fault, to: Option<&Target>) -> Fault {
    let meant = match to {
        Some(Target::Context(_)) => Vec::new(),
        Some(Target::Socket(socket)) => socket.parent().map(Path::to_owned).into_iter().collect(),
        None => {
            let usual = Places::user(variable).into_iter().chain([Places::system()]);
            usual.map(|places| places.state_dir).collect::<Vec<PathBuf>>()
        }
    };
    meant.iter().flat_map(|state_dir| lines(state_dir)).fold(fault, Fault::why)
}

/// What is kept in a state directory, a line for each fact; none where no daemon ever ran.
fn lines(state_dir: &Path) -> Vec<String> {
    let place = state_dir.display();
    match fs::symlink_metadata(state_dir.join("lock")) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return vec![closed(state_dir)],
        Err(_) => return Vec::new(),
    }
    let mut lines = vec![format!("{place} is of a daemon that ran here")];
    match Credentials::read(&state_dir.join("identity.json")) {
        Ok(Some(known)) => {
            let name = known.certified().map(|certified| certified.subject.who.to_string());
            lines.push(format!(
                "this machine is {} of {}",
                name.unwrap_or_default(),
                clean(&known.controller)
            ));
        }
        Ok(None) => {}
        Err(error) if error.kind() == ErrorKind::PermissionDenied => lines.push(closed(state_dir)),
        Err(error) => lines.push(format!("its identity cannot be read: {error}")),
    }
    match left_running(&state_dir.join("jobs")) {
        Ok(jobs) if jobs.is_empty() => {}
        Ok(jobs) => {
            let more = if jobs.len() > NAMED { ", ..." } else { "" };
            lines.push(format!(
                "{} started and without an end on record: {}{more}; jobs go on without it",
                count(jobs.len() as u64, "replica"),
                jobs[..jobs.len().min(NAMED)].join(", ")
            ));
        }
        Err(_) => lines.push(closed(state_dir)),
    }
    lines.dedup();
    lines
}

fn closed(state_dir: &Path) -> String {
    format!("what it keeps in {} is not open to you: `sudo agentctl status` says more", state_dir.display())
}

/// The replicas whose command was started and whose supervisor has not written how it ended.
fn left_running(jobs: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(jobs) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut running = Vec::new();
    for entry in entries {
        let entry = entry?;
        let is = |name: &str| entry.path().join(name).try_exists();
        if is("started")? && !is("exit.json")? {
            running.push(clean(&entry.file_name().to_string_lossy()).into_owned());
        }
    }
    running.sort();
    Ok(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_stopped_daemon_is_told_by_what_it_left() {
        let home = tempfile::tempdir().unwrap();
        let state_dir = home.path();
        assert_eq!(lines(state_dir), Vec::<String>::new(), "nothing ever ran there");
        fs::write(state_dir.join("lock"), "7").unwrap();
        for (replica, files) in
            [("waits.1.0", &[][..]), ("train-1.1.0", &["started"]), ("done.1.0", &["started", "exit.json"])]
        {
            let dir = state_dir.join("jobs").join(replica);
            fs::create_dir_all(&dir).unwrap();
            files.iter().for_each(|file| fs::write(dir.join(file), "").unwrap());
        }
        let told = lines(state_dir).join("\n").replace(&state_dir.display().to_string(), "DIR");
        assert_eq!(
            told,
            "DIR is of a daemon that ran here\n\
             1 replica started and without an end on record: train-1.1.0; jobs go on without it"
        );
        fs::write(state_dir.join("identity.json"), "{").unwrap();
        assert!(lines(state_dir)[1].starts_with("its identity cannot be read: "), "{:?}", lines(state_dir));
    }
}
