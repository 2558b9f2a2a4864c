//! Group C, the files of a running job: somebody removes, empties, replaces or locks them away.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, eventually};

use crate::judge::whole;
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "C12",
    promise: "a missing file is not a death: jobs whose files are harmed go on to their true end",
    run: harms,
}];

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
        "emptied" => fs::remove_file(path).and_then(|()| fs::write(path, "")),
        "a directory" => fs::remove_file(path).and_then(|()| match fs::create_dir(path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()), // made again so soon
            made => made,
        }),
        "without rights" => fs::set_permissions(path, fs::Permissions::from_mode(0o0)),
        _ => std::os::unix::fs::chown(path, Some(65534), Some(65534)),
    };
    done.expect("root may do that");
}
