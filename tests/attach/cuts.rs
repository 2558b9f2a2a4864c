//! Connections that are cut: at any byte of the upload, and at any moment of the whole.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::bed::{Bed, Machine, Special, package, place};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "C1", promise: "an upload that is cut at a random byte goes on from there", run: upload },
    Row {
        id: "C2",
        promise: "cut at any moment and run again it ends well, and detach leaves nothing",
        run: anywhere,
    },
];

fn begun(bed: &Bed) -> Child {
    let mut command = bed.attaching(&place("root", 1), &["--accept-new"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("agentctl")
}

/// Ends the connection from the side of the machine, as a router that was restarted does.
pub(crate) fn cut(machine: &Machine) {
    machine.sh("for pid in $(pgrep -f '^sshd: root'); do kill -9 $pid; done; true");
}

/// What there is of the package on a machine.
fn parts(machine: &Machine) -> Vec<(PathBuf, u64)> {
    let entries = std::fs::read_dir(machine.file("/var/tmp/agentd-attach-0")).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "part"));
    parts.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.len()))).collect()
}

fn upload(tally: &mut Tally, scale: &Scale) {
    let bed = Bed::new(&[Special::default()]);
    let machine = &bed.machines[0];
    let size = std::fs::metadata(package()).expect("a package").len();
    let mut chance = scale.chance();
    let mut kept = 0;
    for number in 0..scale.of(3, 20) {
        tally.case("cut", || {
            let at = kept + chance.below(size - kept) / scale.of(2, 8);
            let mut attach = begun(&bed);
            let reached = eventually("so much has arrived", SOON, || {
                let there = parts(machine).first().map_or(0, |(_, size)| *size);
                (there >= at || attach.try_wait().expect("agentctl").is_some()).then_some(there)
            });
            cut(machine);
            let code = attach.wait().expect("agentctl");
            let now = parts(machine).first().map_or(0, |(_, size)| *size);
            assert!(now >= kept, "{number}: of {kept} bytes {now} are left ({reached} had arrived, {code})");
            kept = now;
        });
        if kept == size {
            break;
        }
    }
    tally.case("a part that was damaged is sent again", || {
        if let Some((part, size)) = parts(machine).first() {
            use std::os::unix::fs::FileExt;
            let file = std::fs::File::options().write(true).open(part).expect("a part");
            file.write_all_at(b"damaged", size / 2).expect("a part");
        }
        bed.attach(&place("root", 1), &[]).ok();
        assert_eq!(bed.ready(), ["host1"]);
    });
}

fn anywhere(tally: &mut Tally, scale: &Scale) {
    let bed = Bed::new(&[Special::default()]);
    let machine = &bed.machines[0];
    let before = machine.written();
    let root = place("root", 1);
    let started = Instant::now();
    tally.case("once uncut", || {
        bed.attach(&root, &["--accept-new"]).ok();
        bed.detach(&root, &[]).ok();
    });
    let whole = started.elapsed();
    let mut chance = scale.chance();
    for _ in 0..scale.of(4, 20) {
        tally.case("cut and run again", || {
            let mut attach = begun(&bed);
            let at = Duration::from_millis(chance.below(u64::try_from(whole.as_millis()).unwrap_or(1)));
            let end = Instant::now() + at;
            while Instant::now() < end && attach.try_wait().expect("agentctl").is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
            if chance.below(2) == 0 {
                cut(machine);
            } else {
                let _ = attach.kill();
            }
            let _ = attach.wait();
            bed.attach(&root, &["--accept-new"]).ok();
            assert_eq!(bed.ready(), ["host1"]);
            bed.detach(&root, &[]).ok();
            assert_eq!(machine.written(), before);
        });
    }
}
