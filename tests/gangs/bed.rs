//! What the rows have in common: a fleet on hosts, jobs on several of them, and what can be seen of both.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::JobDraft;
use agent_model::job::{Distribution, Limits, OnDisconnect, Resources, RetryPolicy};
use agent_proto::v1;
use agent_tests::engine::Engine;
use agent_tests::fleet::{Daemon, Fleet, Setup, processes_below};
use agent_tests::images::Image;
use agent_tests::{Ran, binaries, eventually, finish};
use serde_json::Value;

/// The lease of these fleets, and the grace of their jobs.
pub(crate) const LEASE: Duration = Duration::from_secs(3);
const GRACE: Duration = Duration::from_secs(1);

/// How long a rank may be there when its gang is not any more.
pub(crate) const OUTLIVES: Duration = Duration::from_secs(30);

/// So many nodes, each on a host.
pub(crate) fn fleet(nodes: usize) -> Fleet {
    Fleet::started(&setup(nodes))
}

pub(crate) fn setup(nodes: usize) -> Setup {
    let controller = format!("lease: {}s\n", LEASE.as_secs());
    Setup { nodes, hosts: true, controller, ..Setup::default() }
}

/// The same, where each host has a container engine of its own that has the image. Engines go after the fleet.
pub(crate) fn fleet_with_engines(nodes: usize, image: Image) -> (Fleet, Vec<Engine>) {
    let mut fleet = Fleet::new(&setup(nodes));
    open_to_all(fleet.home());
    let on = |index| Engine::on(fleet.hosts.as_ref().expect("there are hosts").on(index));
    let engines: Vec<Engine> = (0..nodes).map(on).collect();
    image.on(&engines[0].docker());
    for (node, engine) in fleet.nodes.iter_mut().zip(&engines) {
        if engine.socket() != engines[0].socket() {
            engines[0].docker().copy_image(image.tag(), &engine.docker());
        }
        node.set("AGENTD_DOCKER_SOCKET", engine.socket().to_str().expect("UTF-8"));
    }
    fleet.start();
    (fleet, engines)
}

/// Lets every user pass through a directory.
pub(crate) fn open_to_all(dir: &Path) {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("its own directory");
}

/// A job on so many nodes.
pub(crate) fn draft(nodes: u32, command: &str, distribution: Option<Distribution>) -> JobDraft {
    JobDraft {
        command: command.to_owned(),
        resources: Resources { nodes, ..Resources::default() },
        limits: Limits { grace: Some(GRACE), ..Limits::default() },
        distribution,
        ..JobDraft::default()
    }
}

/// One that begins anew when a rank is lost.
pub(crate) fn replaced(draft: JobDraft) -> JobDraft {
    JobDraft {
        limits: Limits { on_disconnect: OnDisconnect::Replace, ..draft.limits },
        retry: RetryPolicy { max_attempts: 4, backoff: Duration::from_millis(200) },
        ..draft
    }
}

/// Submits the job of a directory that holds these files and a job file, as people do; gives its name.
#[track_caller]
pub(crate) fn from_file(fleet: &Fleet, name: &str, job: &str, files: &[(&str, &str)]) -> String {
    let dir = fleet.home().join(name);
    fs::create_dir_all(&dir).expect("a directory");
    let usual = if job.contains("environment:") { "" } else { "environment: host\n" };
    let job = format!("code: .\n{usual}limits: {{grace: 1s}}\n{job}");
    for (path, text) in files.iter().chain(&[("job.yml", job.as_str())]) {
        fs::write(dir.join(path), text).expect("a file");
    }
    ctl(fleet, &["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned()
}

/// Runs `agentctl` against a fleet.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
pub(crate) fn ctl(fleet: &Fleet, words: &[&str]) -> Ran {
    let mut command = std::process::Command::new(binaries().join("agentctl"));
    command.arg("--socket").arg(fleet.controller.socket()).args(words).env("NO_COLOR", "1");
    finish(&mut command)
}

/// The job, which must have completed.
#[track_caller]
pub(crate) fn completed(fleet: &Fleet, job: &str) -> v1::Job {
    let ended = fleet.client.ended(job);
    assert_eq!(ended.state, "Completed", "{}", told(fleet, &ended));
    ended
}

/// What there is to say about a job that did not do what it should.
pub(crate) fn told(fleet: &Fleet, job: &v1::Job) -> String {
    let fault = job.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref());
    let why = ctl(fleet, &["why", &job.job]).stdout;
    let logs: String = (0..job.spec.as_ref().and_then(|s| s.resources.as_ref()).map_or(1, |r| r.nodes))
        .map(|rank| format!("rank {rank}: {}\n", log(fleet, &job.job, rank)))
        .collect();
    format!("{}: {fault:?}\n{why}\n{logs}", job.state)
}

/// The log of one rank.
pub(crate) fn log(fleet: &Fleet, job: &str, rank: u32) -> String {
    ctl(fleet, &["logs", job, "--rank", &rank.to_string()]).stdout
}

/// What `why` says, as events of an attempt and the moments they were at.
pub(crate) fn history(fleet: &Fleet, job: &str) -> Vec<(u64, u64, String)> {
    let why = ctl(fleet, &["why", job, "--json"]).ok().json();
    let events = why["events"].as_array().cloned().unwrap_or_default();
    let one = |event: &Value| {
        let text = event["text"].as_str().unwrap_or_default().to_owned();
        (event["attempt"].as_u64().unwrap_or(0), event["at_ms"].as_u64().unwrap_or(0), text)
    };
    events.iter().map(one).collect()
}

/// A command that leaves a beat in a file ten times a second, so often.
pub(crate) fn beating(file: &Path, beats: u32, then: &str) -> String {
    let file = file.display();
    format!(
        "n=0; while [ $n -lt {beats} ]; do echo \"$AGENTD_REPLICA $(date +%s%3N) $$\" >> {file}; sleep 0.1; \
         n=$((n+1)); done; {then}"
    )
}

/// The first and the last beat of each replica, and its process.
pub(crate) fn beats(file: &Path) -> BTreeMap<String, (u64, u64, u32)> {
    let mut seen: BTreeMap<String, (u64, u64, u32)> = BTreeMap::new();
    for line in fs::read_to_string(file).unwrap_or_default().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [replica, at, pid] = words[..] else { continue };
        let (Ok(at), Ok(pid)) = (at.parse::<u64>(), pid.parse::<u32>()) else { continue };
        let known = seen.entry(replica.to_owned()).or_insert((at, at, pid));
        *known = (known.0.min(at), known.1.max(at), pid);
    }
    seen
}

/// Fails unless what ranks did is what gangs are promised: none before all could start, no two attempts side by side.
#[track_caller]
pub(crate) fn check_beats(fleet: &Fleet, job: &str, file: &Path) {
    let (history, seen) = (history(fleet, job), beats(file));
    let epoch =
        |replica: &str| -> u64 { replica.split('.').nth(1).and_then(|e| e.parse().ok()).unwrap_or(0) };
    let mut spans: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (replica, (first, last, _)) in &seen {
        let span = spans.entry(epoch(replica)).or_insert((*first, *last));
        *span = (span.0.min(*first), span.1.max(*last));
    }
    for (epoch, (first, _)) in &spans {
        let goes = history.iter().find(|(of, _, text)| of == epoch && text.ends_with("they go"));
        let goes = goes.unwrap_or_else(|| panic!("attempt {epoch} ran and was not told to: {history:#?}"));
        assert!(goes.1 <= first + 5, "attempt {epoch} ran at {first}, was told to at {}", goes.1);
    }
    let spans: Vec<_> = spans.into_iter().collect();
    for pair in spans.windows(2) {
        assert!(pair[0].1.1 <= pair[1].1.0, "attempts {} and {} ran side by side", pair[0].0, pair[1].0);
    }
}

/// The processes of jobs below a daemon's home.
pub(crate) fn job_processes(daemon: &Daemon) -> Vec<u32> {
    let jobs: PathBuf = daemon.state().join("jobs");
    let own = daemon.pid();
    processes_below(&jobs).into_iter().filter(|pid| *pid != own).collect()
}

/// The kept ports at which somebody listens on the host of a daemon.
pub(crate) fn held_ports(daemon: &Daemon) -> Vec<u16> {
    const LISTENS: &str = "0A";
    let text = fs::read_to_string(format!("/proc/{}/net/tcp", daemon.pid())).unwrap_or_default();
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, state) = (words.get(1)?, words.get(3)?);
        let port = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
        (*state == LISTENS && (20_000..21_000).contains(&port)).then_some(port)
    };
    text.lines().filter_map(port).collect()
}

/// Waits until nothing of any job is left on any node.
#[track_caller]
pub(crate) fn nothing_left(fleet: &Fleet) {
    eventually("no rank outlives its gang", OUTLIVES, || {
        let left =
            fleet.nodes.iter().any(|node| !job_processes(node).is_empty() || !held_ports(node).is_empty());
        (!left).then_some(())
    });
}
