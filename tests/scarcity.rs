//! The table of scarcity: every operation while something is scarce for seconds, tried against the real programs.
//! A row is a resource, and below it is told what came of each operation. How rows are chosen and told:
//! [`agent_tests::table`].
//!
//! Nothing that was acknowledged is lost, what is refused is told by its cause, and when there is plenty again
//! everything goes on. A merge tries all operations in one scarcity; `--full` each by itself as well.

mod acts;
mod means;

use std::time::Duration;

use agent_tests::table::{Part, Row, Scale, Suite, Tally};
use agent_tests::{SOON, eventually};

use acts::{Act, Kept, Round, went_on};
use means::{Bed, Means};

const ROWS: &[Row] = &[
    Row {
        id: "FD",
        promise: "descriptors: three more than are open",
        run: |tally, scale| row(Means::Descriptors, tally, scale),
    },
    Row {
        id: "MEM",
        promise: "memory: a control group that is full",
        run: |tally, scale| row(Means::Memory, tally, scale),
    },
    Row {
        id: "PIDS",
        promise: "processes and threads: one more than there are",
        run: |tally, scale| row(Means::Processes, tally, scale),
    },
    Row {
        id: "INODE",
        promise: "inodes: none are left",
        run: |tally, scale| row(Means::Inodes, tally, scale),
    },
    Row {
        id: "BYTES",
        promise: "bytes: the disk is full",
        run: |tally, scale| row(Means::Bytes, tally, scale),
    },
    Row {
        id: "BLOCK",
        promise: "threads for what blocks: all of them wait for a disk that hangs",
        run: |tally, scale| row(Means::Threads, tally, scale),
    },
    Row {
        id: "RANDOM",
        promise: "entropy: there is none",
        run: |tally, scale| row(Means::Entropy, tally, scale),
    },
    Row {
        id: "WATCH",
        promise: "watches of files: other programs of the user have all of them",
        run: |tally, scale| row(Means::Watches, tally, scale),
    },
    Row {
        id: "SPACES",
        promise: "namespaces of users and mounts: none is left",
        run: |tally, scale| row(Means::Namespaces, tally, scale),
    },
];

/// How long something is scarce.
const SCARCE: Duration = Duration::from_secs(3);

fn row(means: Means, tally: &mut Tally, scale: &Scale) {
    let mut bed = Bed::new(means);
    let kept = Kept::new(&bed.fleet);
    let mut came = vec![one(&mut bed, &kept, tally, &Act::ALL, "all")];
    if scale.full {
        came.extend(Act::ALL.map(|act| one(&mut bed, &kept, tally, &[act], act.name())));
    }
    came.push(vec![cell(tally, "restart", || restart(&mut bed, &kept, scale))]);
    came.push(vec![cell(tally, "afterwards", || afterwards(&mut bed, &kept))]);
    came.iter().for_each(|cells| tally.note(cells.join(", ")));
}

/// One cell of the table: what came of it.
fn cell(tally: &mut Tally, name: &str, case: impl FnOnce() -> Result<String, String>) -> String {
    let came = tally.case(name, || case().unwrap_or_else(|why| panic!("{why}")));
    format!("{name}: {}", came.as_deref().unwrap_or("FAILED"))
}

/// One scarcity with these operations in it.
fn one(bed: &mut Bed, kept: &Kept, tally: &mut Tally, acts: &[Act], name: &str) -> Vec<String> {
    let mut round = Round::lay(bed, acts, name);
    bed.squeeze(&kept.job);
    round.begin(&bed.fleet, acts, kept);
    std::thread::sleep(SCARCE);
    let lived = bed.lives();
    bed.release();
    round.over();
    let mut came: Vec<String> =
        acts.iter().map(|act| cell(tally, act.name(), || round.came(*act, bed, kept))).collect();
    came.push(cell(tally, "the daemon lives", || lived));
    came
}

/// The daemon is ended and started again meanwhile, as a service manager does as often as it ends.
fn restart(bed: &mut Bed, kept: &Kept, scale: &Scale) -> Result<String, String> {
    let means = bed.means;
    let running = bed.fleet.submit("--lines 400 --seconds 6");
    bed.fleet.client.reached(&running, &["Running"]);
    bed.squeeze(&kept.job);
    bed.fleet.controller.kill();
    let before = bed.fleet.controller.log().len();
    let (begun, mut starts) = (std::time::Instant::now(), 0);
    while begun.elapsed() < scale.of(SCARCE, 4 * SCARCE) {
        if bed.fleet.controller.pid() == 0 || bed.fleet.controller.ended().is_some() {
            bed.fleet.controller.kill();
            bed.spawn();
            starts += 1;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    let ended = bed.fleet.controller.ended();
    bed.release();
    let log = bed.fleet.controller.log()[before..].to_lowercase();
    if let Some(status) = ended {
        let is_told = bed.means.names().iter().any(|name| log.contains(name));
        let by_kernel = bed.means == Means::Memory && status.code().is_none();
        if !is_told && !by_kernel {
            return Err(format!("it ended with {status} and does not say what is scarce"));
        }
    }
    eventually("the box is ready again", SOON, || {
        if bed.fleet.controller.ended().is_some() {
            bed.fleet.controller.kill();
            bed.spawn();
            starts += 1;
        }
        bed.fleet.client.nodes().ok()?.iter().all(|node| node.liveness == "ready").then_some(())
    });
    went_on(means, &bed.fleet, &running, 400).map_err(|why| format!("what ran before: {why}"))?;
    kept.check(&bed.fleet)?;
    Ok(if starts == 1 && ended.is_none() { "started".into() } else { format!("{starts} starts") })
}

/// Everything is as before, and what comes next is as ever.
fn afterwards(bed: &mut Bed, kept: &Kept) -> Result<String, String> {
    let next = bed.fleet.client.run("echo next");
    let ended = eventually("the next job ends", SOON, || Some(bed.fleet.client.ended(&next)));
    if ended.state != "Completed" {
        return Err(format!("the next job: {:?}", ended.outcome));
    }
    kept.check(&bed.fleet)?;
    let log = bed.fleet.controller.log();
    match log.lines().find(|line| line.contains("panicked at")) {
        Some(panic) => Err(panic.to_owned()),
        None => Ok("whole".into()),
    }
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "scarcity",
        rows: ROWS.iter().collect(),
        cases: &[],
        prepare: || _ = agent_tests::binaries(),
        merge: Part::Nothing,
        after: &[],
        long: &[],
    }
}
