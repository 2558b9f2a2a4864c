//! The sweep: every named failpoint of the product fails in every way there is, while a job runs.
//!
//! A case is one name and one action, planned for the first life of every daemon and for the supervisors
//! they start. A daemon that dies is started again without the plan, as a service manager would; only where
//! something fails for ever it may be killed and started without it after a while. Whatever happened, the job
//! ends with one true result, and the next job runs as if nothing had been.
//!
//! It begins with cases that are late at every name at once, which also tell what names a job visits.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use agent_model::{Digest, EnvSpec, JobDraft, failpoint};
use agent_tests::chance::Chance;
use agent_tests::client::{Client, is_over};
use agent_tests::fleet::{Daemon, Fleet, Setup, keep_evidence};
use agent_tests::{SOON, eventually};

use crate::faults::judge::truthful;
use crate::faults::look;
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "SWEEP",
        promise: "whatever fails at any named place, the job gets one true result",
        run: sweep,
    },
    Row {
        id: "A3",
        promise: "killed anywhere between accepted and running, a command is started once at most",
        run: start,
    },
];

/// The action after which a daemon may need a start without the plan to go on.
const FOR_EVER: &str = "error";

/// Lines of the job of a case.
pub(crate) const LINES: u64 = 40;

/// What makes a job of a case visit more names: an environment of its own, and a log that is trimmed.
const KINDS: [&str; 2] = ["env.", "node.log."];

/// One name and one action.
#[derive(Debug, Clone)]
struct Case {
    /// One of the names, or of [`KINDS`] for all names at once.
    name: &'static str,
    action: String,
    /// The node is a process of its own.
    apart: bool,
    /// Who is killed together with the one that dies at the failpoint.
    both: bool,
    seed: u64,
}

/// What became of a case.
#[derive(Debug)]
struct Came {
    /// The names that failed as planned.
    visited: BTreeSet<&'static str>,
    /// `Completed`, or the code of the fault.
    result: String,
    /// It went on only without the plan.
    helped: bool,
    took: Duration,
}

fn sweep(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let mut late =
        |name| Case { name, action: "delay:20".into(), apart: false, both: false, seed: chance.number() };
    let (held, visited) = run_all(KINDS.map(&mut late).into());
    tally.add(held);
    // A merge does not try what no job visits.
    let tried = failpoint::NAMES.iter().filter(|name| scale.full || visited.contains(*name));
    let mut cases = Vec::new();
    for apart in scale.of(vec![false], vec![false, true]) {
        for name in tried.clone() {
            let first = |what: &str| format!("{what}=1");
            let later = |what: &str, visit: u64| format!("{what}={visit}");
            let once = ["error", "kill", "panic"].map(first);
            let more = [
                FOR_EVER.to_owned(),
                "delay:300".to_owned(),
                later("error", 2 + chance.below(3)),
                later("kill", 2 + chance.below(3)),
            ];
            // A case takes seconds, so a merge tries one way of three at each name.
            let one = vec![chance.pick(&once).clone()];
            for action in scale.of(one, [&once[..], &more[..]].concat()) {
                cases.push(Case { name, action, apart, both: false, seed: chance.number() });
            }
        }
    }
    tally.add(run_all(cases).0);
}

/// The names a command passes on its way from accepted to running.
const BEFORE_RUNNING: [&str; 5] = ["node.journal.enter", "node.order", "node.launch", "node.fetch", "env."];

fn start(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let shim = |name: &&&str| {
        name.starts_with("shim.") && !name.starts_with("shim.exit") && !name.starts_with("shim.lease")
    };
    // A build takes seconds; for a merge the sweep has these.
    let agent = |name: &&&str| {
        BEFORE_RUNNING.iter().any(|begin| name.starts_with(begin))
            && (scale.full || !name.starts_with("env."))
    };
    let names = failpoint::NAMES.iter().filter(|name| shim(name) || agent(name));
    let mut cases = Vec::new();
    for name in names {
        for round in 0..scale.of(1, 10) {
            // In a merge the sweep has those where one dies alone.
            for both in scale.of(vec![true], vec![false, true]) {
                let action = format!("kill={}", 1 + round % 3);
                cases.push(Case { name, action, apart: round % 2 == 1, both, seed: chance.number() });
            }
        }
    }
    tally.add(run_all(cases).0);
}

/// Runs the cases, two at a time; also gives the names that were visited.
fn run_all(cases: Vec<Case>) -> (Tally, BTreeSet<&'static str>) {
    let total = cases.len();
    let (next, tally) = (Mutex::new(cases.into_iter()), Mutex::new(Tally::default()));
    let came = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(case) = next.lock().expect("nobody panics here").next() else { return };
                    keep_evidence(false);
                    let mut one = Tally::default();
                    let what =
                        format!("{}={} apart={} both={}", case.name, case.action, case.apart, case.both);
                    if let Some(result) = one.case(&what, || live_through(&case)) {
                        came.lock().expect("nobody panics here").push((case.names(), case.name, result));
                    }
                    tally.lock().expect("nobody panics here").add(one);
                }
            });
        }
    });
    let mut tally = tally.into_inner().expect("nobody panics here");
    let came = came.into_inner().expect("nobody panics here");
    let visited: BTreeSet<_> = came.iter().flat_map(|(_, _, came)| came.visited.iter().copied()).collect();
    let tried: BTreeSet<_> = came.iter().flat_map(|(names, ..)| names.iter().copied()).collect();
    let mut results = BTreeMap::<_, u32>::new();
    came.iter()
        .filter(|(_, _, came)| !came.visited.is_empty())
        .for_each(|(_, _, came)| *results.entry(&came.result).or_default() += 1);
    let mut slow: Vec<_> = came.iter().map(|(_, name, came)| (came.took.as_millis(), *name)).collect();
    slow.sort_unstable();
    slow.reverse();
    tally.note(format!("slowest, in ms: {:?}", &slow[..slow.len().min(8)]));
    let helped = came.iter().filter(|(_, _, came)| came.helped).count();
    tally.note(format!("{total} cases; {} of {} names were visited by the job", visited.len(), tried.len()));
    let never: Vec<_> = tried.difference(&visited).copied().collect();
    if !never.is_empty() {
        tally.note(format!("not visited: {}", never.join(" ")));
    }
    tally.note(format!("results where it failed: {results:?}; {helped} needed a start without the failure"));
    (tally, visited)
}

impl Case {
    /// The names that fail.
    fn names(&self) -> Vec<&'static str> {
        match KINDS.contains(&self.name) {
            true => failpoint::NAMES.to_vec(),
            false => vec![self.name],
        }
    }

    /// What is planned, and the file that tells what became of it.
    fn plan(&self, trace: &Path) -> String {
        let planned = self.names().into_iter().map(|name| format!("{name}={}", self.action));
        planned.chain([format!("trace={}", trace.display())]).collect::<Vec<_>>().join(",")
    }
}

/// One case, from the first start of the daemons to the next job.
fn live_through(case: &Case) -> Came {
    let mut chance = Chance::new(case.seed);
    let mut fleet = Fleet::new(&Setup { nodes: usize::from(case.apart), slots: 2, ..Setup::default() });
    let trace = fleet.home().join("trace");
    let plan = case.plan(&trace);
    daemons(&mut fleet).for_each(|daemon| {
        daemon.set(failpoint::VARIABLE, &plan);
        daemon.spawn();
    });
    let mut job = Submission::new(&fleet, case.name);
    let (mut helped, mut killed) = (false, false);
    let (begun, patience) = (Instant::now(), Duration::from_secs(3));
    loop {
        for daemon in daemons(&mut fleet) {
            if daemon.ended().is_some() {
                daemon.kill(); // only to be reaped
                daemon.set(failpoint::VARIABLE, "");
                daemon.spawn();
            }
        }
        if case.both && !killed && trace.exists() {
            killed = true;
            kill_everybody(&mut fleet);
            continue;
        }
        if job.is_over(&fleet) {
            break;
        }
        if !helped && case.action == FOR_EVER && begun.elapsed() > patience {
            helped = true;
            daemons(&mut fleet).for_each(|daemon| {
                daemon.set(failpoint::VARIABLE, "");
                daemon.bounce();
            });
        }
        assert!(
            begun.elapsed() < patience + SOON,
            "the job does not end: {:?}",
            job.name.map(|job| fleet.client.try_job(&job))
        );
        std::thread::sleep(chance.millis(20, 40));
    }
    let name = job.name.expect("it is over, so it was submitted");
    heals(&mut fleet);
    let ended = truthful(&fleet, &name, LINES);
    let code = ended.outcome.and_then(|outcome| outcome.fault).map(|fault| fault.code);
    let told = fs::read_to_string(&trace).unwrap_or_default();
    let visited =
        failpoint::NAMES.iter().copied().filter(|name| told.lines().any(|line| line == *name)).collect();
    Came { visited, result: code.unwrap_or(ended.state), helped, took: begun.elapsed() }
}

/// Without the plan the next job runs, and nothing of the first is left.
fn heals(fleet: &mut Fleet) {
    daemons(fleet).for_each(|daemon| {
        if daemon.has(failpoint::VARIABLE) || daemon.ended().is_some() {
            daemon.set(failpoint::VARIABLE, "");
            daemon.bounce();
        }
    });
    let next = fleet.client.run("true");
    let ended = fleet.client.ended(&next);
    assert_eq!(ended.state, "Completed", "the next job: {ended:?}");
    eventually("every supervisor has gone", SOON, || fleet.node().shims().is_empty().then_some(()));
}

fn daemons(fleet: &mut Fleet) -> impl Iterator<Item = &mut Daemon> {
    std::iter::once(&mut fleet.controller).chain(&mut fleet.nodes)
}

/// The daemon that runs jobs and every supervisor, at one instant.
fn kill_everybody(fleet: &mut Fleet) {
    let node = fleet.node();
    let shims = node.shims();
    node.kill();
    for (_, pid) in shims {
        agent_tests::signal(pid, rustix::process::Signal::KILL);
    }
    node.set(failpoint::VARIABLE, "");
    node.spawn();
}

/// The job of a case, on its way into the queue.
pub(crate) struct Submission {
    request: String,
    draft: JobDraft,
    code: Option<Digest>,
    pub(crate) name: Option<String>,
}

impl Submission {
    pub(crate) fn new(fleet: &Fleet, failpoint: &str) -> Submission {
        // What is stored of a log is trimmed by the megabyte.
        let width = if failpoint.starts_with("node.log.") { 40_000 } else { 60 };
        let fix = fleet.fix(&format!("--lines {LINES} --width {width} --seconds 0.5"));
        let metric = r#"echo '{"metric": "loss", "value": 0.5}' >> "$AGENTD_METRICS""#;
        let command = format!("cp code.txt outputs/model; {metric}; {fix}");
        let mut draft = JobDraft { command, ..JobDraft::default() };
        if failpoint.starts_with("env.") {
            let requirements = vec!["--no-index".to_owned()];
            draft.environment = EnvSpec::Pip { python: look::PYTHON.into(), requirements };
        }
        Submission { request: Client::request_id(), draft, code: None, name: None }
    }

    /// Brings it a step further, as far as the controller answers.
    pub(crate) fn is_over(&mut self, fleet: &Fleet) -> bool {
        // Somebody has to start the daemon again meanwhile.
        let client = fleet.client.hasty(Duration::from_secs(1));
        if self.code.is_none() {
            self.code = client.try_push(&[("code.txt", "the code")]).ok();
            self.draft.code = self.code;
        }
        if self.name.is_none() && self.code.is_some() {
            self.name = client.try_submit(&self.request, &self.draft).ok();
        }
        self.name.as_ref().and_then(|job| client.try_job(job).ok()).is_some_and(|job| is_over(&job))
    }
}
