//! A user far away: how many round trips a submission takes. The files are so few that all may be asked for: those that
//! were written a moment ago are read again. With 20,000 older ones it is the same, which `tests/run bench far` shows.

use std::fs;

use agent_tests::trips::{FarServer, Pace};

use super::Site;

/// The most for one changed file of many: the connection, TLS, what is new, the new, the job.
const MOST: u32 = 5;
/// Bytes that fit into the first window of TCP, about; each trip has more than the one before.
const FEW: u64 = 64 << 10;

#[test]
fn test_a_submission_from_far_away_takes_few_round_trips() {
    let site = Site::new();
    let far = FarServer::new(([127, 0, 0, 1], site.port).into());
    let code = site.json(&["user", "add", "ada", "--json"])["token"].as_str().unwrap().to_owned();
    site.log_in_at("ada", &code, &format!("https://127.0.0.1:{}", far.port())).ok();
    let project = site.project("ada", "command: 'true'\n");
    for index in 0..300 {
        let dir = std::path::Path::new(&project).join(format!("d{:02}/e{}", index % 40, index % 7));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(format!("f{index}.txt")), format!("file {index}\n")).unwrap();
    }
    site.by("ada", &["submit", &project]).ok();

    far.set(Pace::Steps);
    fs::write(format!("{project}/d07/e0/f7.txt"), "changed\n").unwrap();
    let submitted = site.by("ada", &["submit", &project]).ok();
    let report = far.report();
    assert!(submitted.stderr.contains("302 files, 1 changed"), "{submitted:?}");
    assert!((MOST - 1..=MOST).contains(&report.trips) && report.sent < FEW, "{report:?}");

    // The controller has all of it: a job that reads the file could start.
    far.set(Pace::Free);
    site.by("ada", &["code", submitted.stdout.trim(), "-o", "back"]).ok();
    assert_eq!(fs::read_to_string(site.path("ada/back/d07/e0/f7.txt")).unwrap(), "changed\n");
    // Without a change nothing is sent, and there is one question less.
    far.set(Pace::Steps);
    let submitted = site.by("ada", &["submit", &project]).ok();
    let report = far.report();
    assert!(submitted.stderr.contains("0 changed"), "{submitted:?}");
    assert!(report.trips < MOST, "{report:?}");
}
