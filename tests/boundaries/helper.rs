//! Root's helper itself: whose files it touches, and what keeps it from its work.
//!
//! What it refuses a daemon that was taken over is in [`split`](super::split).

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, eventually};

use crate::boundaries::split::{job_dir, split};
use crate::boundaries::users::{ENDED, GAMES, NOBODY, submitted};

pub(crate) const ROWS: &[Row] = &[Row {
    id: "K1",
    promise: "no file changes hands that has a name elsewhere, or another owner; outputs have it all the same",
    run: links,
}];

/// A file of the machine that a job links to: its name, its owner, its mode.
type Linked = (&'static str, u32, u32);

const LINKED: [Linked; 4] = [
    ("data/a.csv", GAMES, 0o644),
    ("data/key", GAMES, 0o600),
    ("shared/results", NOBODY, 0o666),
    ("shared/private", NOBODY, 0o622),
];

/// Makes the files of people at a place that all may enter.
fn homes(host: &Host) -> PathBuf {
    let place = host.home().join("people");
    for (dir, uid) in [("data", GAMES), ("shared", NOBODY)] {
        fs::create_dir_all(place.join(dir)).expect("a directory");
        chown(place.join(dir), Some(uid), Some(uid)).expect("giving away needs root");
        fs::set_permissions(place.join(dir), Permissions::from_mode(0o755)).expect("its own directory");
    }
    for (name, uid, mode) in LINKED {
        fs::write(place.join(name), name).expect("a file");
        chown(place.join(name), Some(uid), Some(uid)).expect("giving away needs root");
        fs::set_permissions(place.join(name), Permissions::from_mode(mode)).expect("its own file");
    }
    place
}

#[track_caller]
fn are_as_they_were(place: &Path) {
    for (name, uid, mode) in LINKED {
        let found = place.join(name).metadata().expect("it is there");
        assert_eq!((found.uid(), found.mode() & 0o7777), (uid, mode), "{name}");
        assert_eq!(fs::read_to_string(place.join(name)).expect("root reads it"), name);
    }
}

fn links(tally: &mut Tally, _: &Scale) {
    let (host, _helper) = split();
    let place = homes(&host);
    let (data, shared) = (place.join("data"), place.join("shared"));
    let link = format!(
        "umask 077; cp -al {} outputs/data && cp -al {} work2 && ln {}/results outputs/results",
        data.display(),
        data.display(),
        shared.display()
    );
    let got = |job: &str, name: &str| {
        let to = host.home().join(name);
        host.ctl(&["download", job, "--output", to.to_str().expect("UTF-8")]).ok();
        move |file: &str| fs::read_to_string(to.join("outputs").join(file)).ok()
    };
    tally.case("outputs that are links to files elsewhere are stored, and those stay whose they are", || {
        let job = submitted(&host, GAMES, &format!("{link}; cd outputs; echo 1 >x; ln x y"), "");
        assert_eq!(host.wait_for(&job, ENDED), "Completed", "{}", host.ctl(&["logs", &job]).stdout);
        let got = got(&job, "got");
        assert_eq!(got("data/a.csv").as_deref(), Some("data/a.csv"));
        assert_eq!(got("data/key").as_deref(), Some("data/key"), "the owner's own, wherever else it is");
        assert_eq!((got("x"), got("y")), (Some("1\n".to_owned()), Some("1\n".to_owned())));
        are_as_they_were(&place);
        eventually("the directory is removed", SOON, || (!job_dir(&host, &job).exists()).then_some(()));
        are_as_they_were(&place);
    });
    tally.case("outputs so far are those of the job's user, and nobody's else", || {
        let command = format!("{link}; ln {}/private outputs/private; echo up; sleep 600", shared.display());
        let job = submitted(&host, GAMES, &command, "");
        eventually("it is up", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
        let got = got(&job, "so far");
        assert_eq!(got("data/key").as_deref(), Some("data/key"));
        assert_eq!(got("private"), None, "root could have read it, the job could not");
        host.ctl(&["cancel", &job]).ok();
        assert_eq!(host.wait_for(&job, ENDED), "Canceled");
        eventually("the directory is removed", SOON, || (!job_dir(&host, &job).exists()).then_some(()));
        are_as_they_were(&place);
    });
}
