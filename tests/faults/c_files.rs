//! Group C, the files of a running job and of the daemon: somebody removes, cuts, replaces or locks them away.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, eventually};

use crate::faults::judge::whole;
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "C12",
        promise: "a missing file is not a death: jobs whose files are harmed go on to their true end",
        run: harms,
    },
    Row {
        id: "C13",
        promise: "a daemon whose files are harmed goes on, or names the file and loses nothing",
        run: harms_of_state,
    },
];

/// The files by which a job is known, in its directory.
const FILES: [&str; 7] =
    ["shim.log", "hello.json", "started", "shim.sock", "exit.tmp", "launch.json", "order.json"];

/// What is done to them.
const HARMS: [&str; 5] = ["removed", "emptied", "a directory", "without rights", "somebody else's"];

const LINES: u64 = 20;

fn harms(tally: &mut Tally, scale: &Scale) {
    for (down, mode) in [(true, "down"), (false, "up")] {
        for (round, every) in HARMS.iter().enumerate().take(scale.of(2, HARMS.len())) {
            // A merge removes every file once with each state of the daemon, and does one of the other things to it.
            let harm_of = |place: usize| match (scale.full, round) {
                (true, _) => *every,
                (false, 0) => HARMS[0],
                (false, _) => HARMS[1 + (place + usize::from(down)) % (HARMS.len() - 1)],
            };
            together(tally, down, mode, harm_of);
        }
    }
}

/// One job for each file, on one node.
fn together(tally: &mut Tally, down: bool, mode: &str, harm_of: impl Fn(usize) -> &'static str) {
    let mut fleet = Fleet::started(&Setup { nodes: 1, slots: FILES.len(), ..Setup::default() });
    let go = fleet.home().join("go");
    let wishes = format!("--lines {LINES} --until {}", go.display());
    let jobs: Vec<String> = FILES.iter().map(|_| fleet.submit(&wishes)).collect();
    for job in &jobs {
        fleet.client.reached(job, &["Running"]);
        eventually("its command runs", SOON, || (!fleet.witness.of(job).is_empty()).then_some(()));
    }
    if down {
        fleet.nodes[0].kill();
    }
    for (place, (file, job)) in FILES.iter().zip(&jobs).enumerate() {
        let mut dirs = fleet.nodes[0].job_dirs().into_iter();
        let of_job = |dir: &PathBuf| dir.to_string_lossy().ends_with(&format!("/{job}.1.0"));
        harm(&dirs.find(of_job).expect("its directory").join(file), harm_of(place));
    }
    if down {
        fleet.nodes[0].spawn();
        fleet.ready();
    }
    std::thread::sleep(Duration::from_millis(1500));
    fs::write(go, "").expect("the sign to end");
    for (place, (file, job)) in FILES.iter().zip(&jobs).enumerate() {
        let name = format!("{file} is {} while the daemon is {mode}", harm_of(place));
        tally.case(&name, || whole(&fleet, job, LINES));
    }
}

fn harm(path: &Path, what: &str) {
    assert!(fs::symlink_metadata(path).is_ok(), "{} is not there", path.display());
    let done = match what {
        "removed" => fs::remove_file(path),
        // A socket cannot be emptied.
        "emptied" => fs::remove_file(path).and_then(|()| match fs::write(path, "") {
            Err(error) if error.raw_os_error() == Some(6) => Ok(()), // ENXIO: the socket was made again so soon
            written => written,
        }),
        "a directory" => fs::remove_file(path).and_then(|()| match fs::create_dir(path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()), // made again so soon
            made => made,
        }),
        "without rights" => fs::set_permissions(path, fs::Permissions::from_mode(0o0)),
        "cut in half" => {
            let cut = |file: fs::File| file.set_len(file.metadata()?.len() / 2);
            fs::File::options().write(true).open(path).and_then(cut)
        }
        _ => std::os::unix::fs::chown(path, Some(65534), Some(65534)),
    };
    done.expect("root may do that");
}

/// The files of the state directory of a box that is both roles, but for those of jobs.
const STATE: [&str; 12] = [
    "lock",
    "tracking.port",
    "ballast",
    "agentd.sock",
    "journal.db",
    "journal.db-wal",
    "controller/db",
    "controller/db-wal",
    "controller/db-shm",
    "controller/db.redo",
    "controller/db.ballast",
    "cas/segments/00000001",
];

/// What is done to them, the first most often.
const HARMS_OF_STATE: [&str; 6] =
    ["removed", "emptied", "cut in half", "a directory", "without rights", "somebody else's"];

fn harms_of_state(tally: &mut Tally, scale: &Scale) {
    for (place, file) in STATE.iter().enumerate() {
        for (number, harm) in HARMS_OF_STATE.iter().enumerate() {
            // A merge does one thing to each file, another one to each.
            if !scale.full && number != place % 4 || *file == "agentd.sock" && *harm == "cut in half" {
                continue;
            }
            for down in [true, false].into_iter().take(scale.of(1, 2)) {
                let mode = if down { "down" } else { "up" };
                let name = format!("{file} is {harm} while the daemon is {mode}");
                tally.case(&name, || one_of_state(file, harm, down));
            }
        }
    }
}

/// A job runs, and one has ended, when a file of the daemon is harmed and the daemon is started again.
fn one_of_state(file: &str, what: &str, down: bool) {
    let mut fleet = Fleet::one_box();
    let before = fleet.submit(&format!("--lines {LINES}"));
    fleet.client.ended(&before);
    let go = fleet.home().join("go");
    let job = fleet.submit(&format!("--lines {LINES} --until {}", go.display()));
    fleet.client.reached(&job, &["Running"]);
    eventually("its command runs", SOON, || (!fleet.witness.of(&job).is_empty()).then_some(()));
    let (path, kept) = (fleet.controller.state().join(file), fleet.home().join("kept"));
    let is_file = eventually("it is there", SOON, || fs::symlink_metadata(&path).ok()).is_file();
    if down {
        fleet.controller.kill();
    }
    if is_file {
        fs::copy(&path, &kept).expect("a copy");
    }
    harm(&path, what);
    if !down {
        fleet.controller.kill();
    }
    fleet.controller.spawn();
    let gave_up = eventually("it is ready, or gives up", SOON, || match fleet.controller.ended() {
        Some(_) => Some(true),
        None => fleet.client.nodes().is_ok().then_some(false),
    });
    if gave_up {
        // It says which file it is; with that one back nothing is lost.
        let said = fleet.controller.log();
        let last = said.lines().rev().take(12).collect::<Vec<_>>().join("\n");
        // The database tells of itself, and not of the files beside it.
        let named = path.display().to_string();
        let named = named.trim_end_matches("-wal").trim_end_matches("-shm");
        assert!(last.contains(named), "it does not name {file}:\n{last}");
        let _ = fs::remove_dir(&path);
        if is_file {
            fs::copy(&kept, &path).expect("it is brought back");
        }
        fleet.controller.kill();
        fleet.controller.spawn();
    }
    fleet.ready();
    fs::write(go, "").expect("the sign to end");
    whole(&fleet, &job, LINES);
    whole(&fleet, &before, LINES);
    let next = fleet.client.run("true");
    assert_eq!(fleet.client.ended(&next).state, "Completed", "it goes on");
}
