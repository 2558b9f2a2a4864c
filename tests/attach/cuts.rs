//! Connections that are cut: at any byte of the upload, and at any moment of the whole.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::attach::bed::{Bed, Machine, Special, package, place};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "C1", promise: "an upload that is cut at a random byte goes on from there", run: upload },
    Row {
        id: "C2",
        promise: "cut at any moment and run again it ends well, and detach leaves nothing",
        run: anywhere,
    },
    Row { id: "C3", promise: "the same before and after each step of attach and of detach", run: each_step },
];

fn begun(bed: &Bed) -> Child {
    let mut command = bed.attaching(&place("root", 1), &["--accept-new"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("agentctl")
}

/// Ends the connection from the side of the machine, as a router that was restarted does.
pub(crate) fn cut(machine: &Machine) {
    machine.sh("for pid in $(pgrep -f '^sshd: root'); do kill -9 $pid; done; true");
}

/// A shell that counts the steps of attach and detach, and cuts the connection before or after the one that is told to it.
const CUTTING: &str = r#"cat >/usr/local/bin/sh <<'SHELL'
#!/bin/bash
case "$1 $2" in -s*|*'cat >>'*) ;; *) exec /bin/sh "$@" ;; esac
number=$(($(cat /run/steps 2>/dev/null || echo 0) + 1))
echo $number >/run/steps
read -r at when 2>/dev/null </run/cut
cut() { for pid in $(pgrep -f '^sshd: root'); do kill -9 $pid; done; exit 1; }
[ "$at" = $number ] || exec /bin/sh "$@"
[ "$when" = after ] || cut
/bin/sh "$@"
cut
SHELL
chmod +x /usr/local/bin/sh
"#;

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

fn each_step(tally: &mut Tally, scale: &Scale) {
    let bed = Bed::new(&[Special { prepare: CUTTING, ..Special::default() }]);
    let machine = &bed.machines[0];
    let before = machine.written();
    let root = place("root", 1);
    let steps = || {
        let told = machine.sh("cat /run/steps; rm -f /run/steps").ok().stdout;
        told.trim().parse::<usize>().expect("a number of steps")
    };
    let (mut of_attach, mut of_detach) = (0, 0);
    tally.case("once uncut", || {
        bed.attach(&root, &["--accept-new"]).ok();
        of_attach = steps();
        bed.detach(&root, &[]).ok();
        of_detach = steps();
        assert_eq!(machine.written(), before);
    });
    tally.note(format!("attach is {of_attach} commands over SSH, detach {of_detach}"));
    let every = (1..=of_attach).map(|at| (true, at)).chain((1..=of_detach).map(|at| (false, at)));
    let mut cuts: Vec<_> =
        every.flat_map(|(attach, at)| [(attach, at, "before"), (attach, at, "after")]).collect();
    // Short, it is each step of attach at one of its ends.
    if !scale.full {
        let mut chance = scale.chance();
        cuts.retain(|(attach, _, _)| *attach);
        cuts = cuts.chunks(2).map(|ends| ends[usize::from(chance.below(2) == 0)]).collect();
    }
    for (attach, at, when) in cuts {
        let what = if attach { "attach" } else { "detach" };
        tally.case(&format!("{what} cut {when} step {at}"), || {
            if !attach {
                bed.attach(&root, &[]).ok();
            }
            machine.sh("rm -f /run/steps").ok();
            std::fs::write(machine.file("/run/cut"), format!("{at} {when}\n")).expect("a file");
            let ran = if attach { bed.attach(&root, &[]) } else { bed.detach(&root, &[]) };
            machine.sh("rm /run/cut").ok();
            // Whoever is only letting go has done what was asked.
            let is_last = at == if attach { of_attach } else { of_detach };
            assert!(
                is_last || (ran.code == 1 && ran.stderr.contains("SSH-10")),
                "{} {}",
                ran.code,
                ran.stderr
            );
            if attach {
                bed.attach(&root, &[]).ok();
                assert_eq!(bed.ready(), ["host1"]);
            }
            bed.detach(&root, &[]).ok();
            assert_eq!(machine.written(), before);
            assert_eq!(machine.agents(), "");
        });
    }
}
