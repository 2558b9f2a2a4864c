//! A box beside a channel of packages, and the files of jobs that want some of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_tests::channel::{Channel, Server};
use agent_tests::{Host, Ran, SOON, engine, eventually};

/// Building an environment takes longer than most things, most of all with an engine that is not optimised.
pub(super) const BUILT: Duration = Duration::from_secs(180);

/// A box whose channel is served on loopback: `main` has a working Python, pip, tiny-one and tiny-two.
pub(super) struct Site {
    pub(super) host: Host,
    pub(super) channel: Server,
}

impl Site {
    /// A box that does not run yet, to be configured.
    pub(super) fn new() -> Site {
        let channel = Server::start(Channel::t1());
        Site { host: beside(&channel.alias()), channel }
    }

    /// A box that runs.
    pub(super) fn started() -> Site {
        let mut site = Site::new();
        site.host.start();
        site
    }

    /// Writes a job with a conda file and gives its directory.
    pub(super) fn job(&self, name: &str, conda: &str, command: &str) -> PathBuf {
        job(&self.host, name, conda, command)
    }

    /// Submits such a job and gives its name.
    #[track_caller]
    pub(super) fn submit(&self, name: &str, conda: &str, command: &str) -> String {
        submit(&self.host, &self.job(name, conda, command))
    }

    /// Runs such a job to its end.
    pub(super) fn run(&self, name: &str, conda: &str, command: &str) -> Ran {
        run(&self.host, &self.job(name, conda, command))
    }

    /// Waits for the end of a job that builds, and gives its state.
    #[track_caller]
    pub(super) fn ended(&self, job: &str) -> String {
        ended(&self.host, job)
    }

    /// The engines that work for this box.
    pub(super) fn engines(&self) -> Vec<u32> {
        agent_tests::engines(self.host.home(), self.host.pid())
    }

    /// Waits until an engine works.
    #[track_caller]
    pub(super) fn building(&self) -> u32 {
        eventually("an engine works", SOON, || self.engines().first().copied())
    }

    /// Requests for packages so far.
    pub(super) fn packages_served(&self) -> u64 {
        self.channel.requests(".conda")
    }

    /// Everything that was asked for so far, to be compared with nothing.
    pub(super) fn asked(&self) -> Vec<String> {
        self.channel.all_requests().into_keys().collect()
    }
}

/// The channel of the packages that do one strange thing each.
pub(super) fn traps() -> String {
    Channel::t0().file_url("main")
}

/// A box that uses the channels at an address and packages of pip from a folder, and no other index.
pub(super) fn beside(channels: &str) -> Host {
    engine();
    let mut host = Host::new();
    host.set("AGENTD_CONDA_ALIAS", channels);
    host.set("AGENTD_CONDA_CHANNELS", "main");
    host.set("PIP_NO_INDEX", "1");
    host.set("PIP_FIND_LINKS", Channel::t1().wheels().to_str().expect("UTF-8"));
    host
}

/// An environment file of these packages, and of these lines for pip.
pub(super) fn conda_file(packages: &[&str], pip: &[&str]) -> String {
    let mut text = "channels: [main]\ndependencies:\n".to_owned();
    packages.iter().for_each(|package| text.push_str(&format!("  - {package}\n")));
    if !pip.is_empty() {
        text.push_str("  - pip:\n");
        pip.iter().for_each(|line| text.push_str(&format!("      - {line}\n")));
    }
    text
}

/// What is nobody's fault is tried again, as a job says that wants it.
const RETRY: &str = "retry: {max_attempts: 5}\n";

/// Writes a job with a conda file and gives its directory.
pub(super) fn job(host: &Host, name: &str, conda: &str, command: &str) -> PathBuf {
    let command = serde_json::Value::from(command);
    let job = format!("command: {command}\ncode: .\nenvironment: {{conda_file: conda.yml}}\n{RETRY}");
    host.project(name, &[("job.yml", &job), ("conda.yml", conda)])
}

/// Submits a directory and gives the job's name.
#[track_caller]
pub(super) fn submit(host: &Host, dir: &Path) -> String {
    host.ctl(&["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned()
}

/// Runs a directory to its end.
pub(super) fn run(host: &Host, dir: &Path) -> Ran {
    host.ctl(&["run", dir.to_str().expect("UTF-8")])
}

/// Waits for the end of a job that builds, and gives its state.
#[track_caller]
pub(super) fn ended(host: &Host, job: &str) -> String {
    eventually(&format!("{job} to end"), BUILT, || {
        let state = host.job_state(job);
        ["Completed", "Failed", "Canceled"].contains(&state.as_str()).then_some(state)
    })
}

/// The environments that a box keeps, as `envs list` tells them.
#[track_caller]
pub(super) fn kept(host: &Host) -> Vec<serde_json::Value> {
    let listed = host.ctl(&["envs", "list", "--json"]).ok().json();
    listed["environments"].as_array().expect("a list of environments").clone()
}

/// Every file below a directory by its path from there; links are not followed.
pub(super) fn files_below(dir: &Path) -> BTreeSet<PathBuf> {
    fn walk(top: &Path, dir: &Path, found: &mut BTreeSet<PathBuf>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => walk(top, &path, found),
                _ => {
                    found.insert(path.strip_prefix(top).expect("it is below").to_owned());
                }
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(dir, dir, &mut found);
    found
}
