//! A fleet to which everything happens at once, for a while: partitions, kills and freezes at random, under jobs on one
//! node and on several.
//!
//! What a job did is told by a file that the product knows nothing of. At the end every job is in the state that this
//! file proves, no attempt ran twice or beside another one, and no line of a log is missing, doubled or out of its place.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_model::job::{Limits, OnDisconnect};
use agent_proto::v1;
use agent_tests::chance::Chance;
use agent_tests::client::is_over;
use agent_tests::fleet::{Daemon, Fleet};
use agent_tests::link::{Link, Way};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually, signal};
use rustix::process::Signal;

use crate::gangs::bed::{beats, draft, log, nothing_left, replaced, setup};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "R1",
    promise: "after random partitions, kills and freezes every job is in its true state",
    run: at_random,
}];

const NODES: usize = 6;
/// Jobs that have not ended, at a time.
const AT_ONCE: usize = 8;
/// The longest that anything stays broken: well beyond a lease, and within it as often.
const LONGEST: Duration = Duration::from_secs(7);
/// Until the last job has ended when nothing happens any more.
const AFTERWARDS: Duration = Duration::from_secs(240);

/// How long things happen; `GANGS_MINUTES` says it for the whole table.
#[allow(clippy::disallowed_methods, reason = "asks how long the test may take")]
fn duration(scale: &Scale) -> Duration {
    let minutes = std::env::var("GANGS_MINUTES").ok().and_then(|text| text.parse().ok()).unwrap_or(30);
    scale.of(Duration::from_secs(15), Duration::from_secs(60 * minutes))
}

/// A job of this table.
struct Tried {
    id: String,
    ranks: u32,
    lines: u32,
    file: PathBuf,
}

/// Something that is broken until a moment.
enum Trouble {
    Cut(usize),
    Frozen(usize),
    Unplugged(usize),
    Dead(usize),
}

struct Storm {
    fleet: Fleet,
    chance: Chance,
    jobs: Vec<Tried>,
    broken: Vec<(Instant, Trouble)>,
    happened: BTreeMap<&'static str, u32>,
}

fn at_random(tally: &mut Tally, scale: &Scale) {
    let mut storm = Storm {
        fleet: Fleet::started(&setup(NODES)),
        chance: scale.chance(),
        jobs: Vec::new(),
        broken: Vec::new(),
        happened: BTreeMap::new(),
    };
    let end = Instant::now() + duration(scale);
    let mut next = Instant::now();
    while Instant::now() < end {
        storm.mend(false);
        storm.submit();
        if Instant::now() >= next {
            storm.strike();
            next = Instant::now() + storm.chance.millis(300, 2500);
        }
        sleep(Duration::from_millis(100));
    }
    storm.mend(true);
    storm.await_all();
    let complaints: Vec<String> =
        storm.jobs.iter().filter_map(|job| judge(&storm.fleet, job).err()).collect();
    tally.count(u32::try_from(storm.jobs.len()).unwrap_or(u32::MAX), "jobs", &complaints);
    tally.case("nothing is left", || nothing_left(&storm.fleet));
    tally.notes.push(storm.told());
}

impl Storm {
    /// Keeps enough jobs waiting and running.
    fn submit(&mut self) {
        // A controller that is being started again takes nothing.
        let Ok(active) = self.fleet.client.jobs(true) else { return };
        if active.len() >= AT_ONCE {
            return;
        }
        let (ranks, lines) = (*self.chance.pick(&[1, 1, 2, 2, 3]), 10 + self.chance.below(30));
        let lines = u32::try_from(lines).unwrap_or(10);
        let name = format!("storm-{}", self.jobs.len());
        let file = self.fleet.home().join(&name);
        let command = format!(
            "n=0; while [ $n -lt {lines} ]; do echo \"$AGENTD_REPLICA $(date +%s%3N) $$\" >> {}; echo line $n; \
             sleep 0.2; n=$((n+1)); done; echo over",
            file.display()
        );
        let new = replaced(draft(ranks, &command, None));
        // Half of them wait for a silent node, the others end there and begin anew elsewhere.
        let new = match self.chance.percent(50) {
            true => new,
            false => {
                JobDraft { limits: Limits { on_disconnect: OnDisconnect::Hold, ..new.limits.clone() }, ..new }
            }
        };
        // Asked again with the same name it is the same job.
        let request = format!("{name}-{}", std::process::id());
        let id = eventually("a job is taken", SOON, || self.fleet.client.try_submit(&request, &new).ok());
        self.jobs.push(Tried { id, ranks, lines, file });
    }

    /// Breaks something.
    fn strike(&mut self) {
        let index = usize::try_from(self.chance.below(NODES as u64)).unwrap_or(0);
        let until = Instant::now() + self.chance.millis(200, u64::try_from(LONGEST.as_millis()).unwrap_or(0));
        let is_whole = !self.broken.iter().any(|(_, broken)| match broken {
            Trouble::Cut(at) | Trouble::Frozen(at) | Trouble::Unplugged(at) | Trouble::Dead(at) => {
                *at == index
            }
        });
        let (what, broken) = match self.chance.below(7) {
            0 if is_whole => {
                self.fleet.links[index].cut(*self.chance.pick(&[Way::Both, Way::Up, Way::Down]));
                ("partitions", Some(Trouble::Cut(index)))
            }
            1 if is_whole => {
                self.fleet.nodes[index].freeze();
                ("freezes", Some(Trouble::Frozen(index)))
            }
            2 if is_whole => {
                self.fleet.hosts.iter().for_each(|hosts| hosts.plug(index, false));
                ("unplugged hosts", Some(Trouble::Unplugged(index)))
            }
            3 if is_whole => {
                self.fleet.nodes[index].kill();
                ("killed agents", Some(Trouble::Dead(index)))
            }
            4 => {
                let shims = self.fleet.nodes[index].shims();
                let Some((_, pid)) = shims.get(usize::try_from(self.chance.below(4)).unwrap_or(0)) else {
                    return;
                };
                signal(*pid, Signal::KILL);
                ("killed supervisors", None)
            }
            5 => {
                self.fleet.links[index].break_all();
                ("broken connections", None)
            }
            6 if self.chance.percent(30) => {
                self.fleet.controller.bounce();
                ("killed controllers", None)
            }
            _ => return,
        };
        *self.happened.entry(what).or_default() += 1;
        self.broken.extend(broken.map(|broken| (until, broken)));
    }

    /// Makes whole again what was broken long enough; all of it at the end.
    fn mend(&mut self, all: bool) {
        let now = Instant::now();
        let due = |(until, _): &mut (Instant, Trouble)| all || *until <= now;
        let mended: Vec<Trouble> = self.broken.extract_if(.., due).map(|(_, broken)| broken).collect();
        for broken in mended {
            match broken {
                Trouble::Cut(at) => self.fleet.links[at].heal(),
                Trouble::Frozen(at) => self.fleet.nodes[at].thaw(),
                Trouble::Unplugged(at) => self.fleet.hosts.iter().for_each(|hosts| hosts.plug(at, true)),
                Trouble::Dead(at) => self.fleet.nodes[at].spawn(),
            }
        }
        if all {
            self.fleet.links.iter().for_each(Link::heal);
            self.fleet.nodes.iter().for_each(Daemon::thaw);
            self.fleet.ready();
        }
    }

    #[track_caller]
    fn await_all(&self) {
        eventually("every job has ended", AFTERWARDS, || {
            let active = self.fleet.client.jobs(true).ok()?;
            active.is_empty().then_some(())
        });
    }

    /// What happened, in a line.
    fn told(&self) -> String {
        let gangs = self.jobs.iter().filter(|job| job.ranks > 1).count();
        let mut text = format!("{} jobs, {gangs} of them gangs", self.jobs.len());
        let mut states: BTreeMap<String, u32> = BTreeMap::new();
        let mut attempts = 0;
        for job in &self.jobs {
            let ended = self.fleet.client.job(&job.id);
            attempts += ended.epoch;
            *states.entry(ended.state).or_default() += 1;
        }
        let _ = write!(text, " in {attempts} attempts: ");
        let counts = states.iter().map(|(what, count)| format!("{count} {what}"));
        let faults = self.happened.iter().map(|(what, count)| format!("{count} {what}"));
        text + &counts.chain(faults).collect::<Vec<_>>().join(", ")
    }
}

/// Whether what is said of a job is what it did.
fn judge(fleet: &Fleet, job: &Tried) -> Result<(), String> {
    let ended = fleet.client.job(&job.id);
    let fail = |why: String| Err(format!("{} ({} ranks): {why}; {:?}", job.id, job.ranks, ended.outcome));
    if !is_over(&ended) {
        return fail(format!("it is {}", ended.state));
    }
    if let Err(why) = never_twice(job) {
        return fail(why);
    }
    let code =
        ended.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref()).map(|fault| fault.code.as_str());
    match ended.state.as_str() {
        "Completed" => {}
        "Failed" if code.is_some_and(|code| !code.is_empty()) => {}
        other => return fail(format!("it is {other} and nobody says why")),
    }
    let is_complete = ended.state == "Completed";
    for rank in 0..job.ranks {
        if let Err(why) = log_is_true(fleet, job, &ended, rank, is_complete) {
            return fail(why);
        }
    }
    Ok(())
}

/// No attempt ran twice, and none while another one did.
fn never_twice(job: &Tried) -> Result<(), String> {
    let mut processes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in fs::read_to_string(&job.file).unwrap_or_default().lines() {
        let mut words = line.split(' ');
        if let (Some(replica), Some(pid)) = (words.next(), words.nth(1)) {
            processes.entry(replica.to_owned()).or_default().insert(pid.to_owned());
        }
    }
    if let Some((replica, pids)) = processes.iter().find(|(_, pids)| pids.len() > 1) {
        return Err(format!("{replica} was started {} times", pids.len()));
    }
    let mut spans: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (replica, (first, last, _)) in beats(&job.file) {
        let epoch = replica.split('.').nth(1).and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        let span = spans.entry(epoch).or_insert((first, last));
        *span = (span.0.min(first), span.1.max(last));
    }
    let spans: Vec<_> = spans.into_iter().collect();
    match spans.windows(2).find(|pair| pair[0].1.1 > pair[1].1.0) {
        Some(pair) => Err(format!("attempts {} and {} ran side by side", pair[0].0, pair[1].0)),
        None => Ok(()),
    }
}

/// The log of a rank is what it printed: all of it where it completed, else the beginning of it.
fn log_is_true(
    fleet: &Fleet,
    job: &Tried,
    ended: &v1::Job,
    rank: u32,
    is_complete: bool,
) -> Result<(), String> {
    let whole: String =
        (0..job.lines).map(|line| format!("line {line}\n")).chain(["over\n".to_owned()]).collect();
    let said = log(fleet, &job.id, rank);
    // What the agent adds about the end of a rank is no line of the job.
    let own: String = said.split_inclusive('\n').filter(|line| !line.starts_with("[agentd")).collect();
    let is_true = if is_complete { own == whole } else { whole.starts_with(&own) };
    if !is_true {
        return Err(format!("the log of rank {rank} is not what it printed: {said:?}"));
    }
    let replica = format!("{}.{}.{rank}", job.id, ended.epoch);
    match is_complete && !beats(&job.file).contains_key(&replica) {
        true => Err(format!("{replica} never ran")),
        false => Ok(()),
    }
}
