//! Group C, what is gone or cannot be written while the daemons go on: it is shown as it was, mended or told.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, binaries, eventually};
use serde_json::Value;

use crate::faults::c_disk::library;
use crate::faults::judge::whole;
use crate::faults::look::{broken_databases, command, panics};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "C14",
        promise: "while the database cannot be written users are shown what was, and since when",
        run: unwritten,
    },
    Row {
        id: "C15",
        promise: "a database removed under its controller loses nothing that was answered",
        run: removed,
    },
    Row {
        id: "C16",
        promise: "a removed or shortened log or record costs itself alone, and is told",
        run: holes,
    },
];

/// A command of the product: its code, and both its outputs.
pub(crate) fn ctl(socket: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut ctl = command(binaries().join("agentctl"));
    let ran =
        ctl.arg("--socket").arg(socket).args(arguments).env("NO_COLOR", "1").output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (ran.status.code().unwrap_or(-1), text(&ran.stdout), text(&ran.stderr))
}

fn unwritten(tally: &mut Tally, scale: &Scale) {
    let errors = [
        (5, "EIO", "fails or may only be read"),
        (30, "EROFS", "fails or may only be read"),
        (28, "ENOSPC", "is full"),
    ];
    for (number, name, said) in errors.into_iter().take(scale.of(3, 3)) {
        tally.case(name, || {
            let mut fleet = Fleet::new(&Setup { slots: 2, ..Setup::default() });
            let refuse = fleet.home().join("refuse");
            fleet.controller.set("LD_PRELOAD", &library().display().to_string());
            fleet.controller.set("REFUSE_MATCH", "controller/db");
            fleet.controller.set("REFUSE_FILE", &refuse.display().to_string());
            fleet.start();
            let go = fleet.home().join("go");
            let job = fleet.submit(&format!("--lines 20 --until {}", go.display()));
            fleet.client.reached(&job, &["Running"]);
            let before = fleet.client.run("echo before");
            assert_eq!(fleet.client.ended(&before).state, "Completed");
            fs::write(&refuse, number.to_string()).expect("a file");
            let socket = fleet.controller.socket();
            let (code, ..) = ctl(&socket, &["cancel", &job]);
            assert_ne!(code, 0, "nobody is told of what is not on disk");
            for words in [
                vec!["status"],
                vec!["jobs"],
                vec!["show", &job],
                vec!["logs", &before],
                vec!["nodes"],
                vec!["why", &job],
            ] {
                let (code, out, err) = ctl(&socket, &words);
                assert_eq!(code, 0, "{words:?}: {err}");
                assert!(
                    err.contains("cannot write its database since") && err.contains(said),
                    "{words:?}: {err}"
                );
                assert!(!out.is_empty(), "{words:?}");
            }
            let (_, out, _) = ctl(&socket, &["show", &job, "--json"]);
            let shown: Value = serde_json::from_str(&out).expect("JSON");
            assert_eq!(
                (&shown["state"], &shown["cancel_requested"]),
                (&"Running".into(), &false.into()),
                "{out}"
            );
            assert!(
                shown["unwritten"]["since_ms"].is_u64() && shown["unwritten"]["why"].is_string(),
                "{out}"
            );
            fs::remove_file(&refuse).expect("there is room again");
            assert_eq!(fleet.client.ended(&job).state, "Canceled", "what was decided is written by itself");
            let (code, _, err) = ctl(&socket, &["jobs"]);
            assert_eq!((code, err.as_str()), (0, ""));
            assert_eq!(panics(&fleet.controller), Vec::<String>::new());
        });
    }
}

fn removed(tally: &mut Tally, scale: &Scale) {
    let all = ["db db-wal db-shm", "db", "db-wal", "db db-wal db-shm db.redo", "db.redo"];
    for (what, stops) in all.into_iter().flat_map(|what| [(what, false), (what, true)]).take(scale.of(6, 10))
    {
        let name = format!("{what}, then {}", if stops { "a stop" } else { "a kill" });
        tally.case(&name, || {
            let mut fleet = Fleet::one_box();
            let go = fleet.home().join("go");
            let job = fleet.submit(&format!("--lines 20 --until {}", go.display()));
            fleet.client.reached(&job, &["Running"]);
            for file in what.split(' ') {
                fs::remove_file(fleet.controller.state().join("controller").join(file)).expect("it is there");
            }
            let after: Vec<String> =
                (0..3).map(|number| fleet.client.run(&format!("echo {number}"))).collect();
            let states = |fleet: &Fleet| -> BTreeSet<String> {
                fleet.client.jobs(false).expect("an answer").into_iter().map(|job| job.job).collect()
            };
            let known = states(&fleet);
            if stops {
                fleet.controller.stop();
            }
            fleet.controller.kill();
            fleet.controller.spawn();
            fleet.ready();
            assert_eq!(states(&fleet), known, "what was answered is on disk");
            fs::write(go, "").expect("the sign to end");
            whole(&fleet, &job, 20);
            for (number, job) in after.iter().enumerate() {
                assert_eq!(fleet.client.ended(job).state, "Completed");
                fleet.client.wrote(job, &format!("{number}\n"));
            }
            assert_eq!(panics(&fleet.controller), Vec::<String>::new());
            fleet.controller.kill();
            assert_eq!(broken_databases(&fleet.controller.state()), Vec::<String>::new());
        });
    }
}

fn holes(tally: &mut Tally, _: &Scale) {
    for (what, cut) in [("removed", None), ("shortened", Some(3))] {
        tally.case(&format!("the archive of a job that ended is {what}"), || archive(cut));
    }
    tally.case("a byte in the archive of a job that ended is changed", changed);
    for live in [true, false] {
        let name = if live { "while it runs" } else { "after its end" };
        tally.case(&format!("segments are removed {name}, with the daemon down"), || segments(live));
    }
}

fn archive(cut: Option<u64>) {
    let mut fleet = Fleet::one_box();
    let job =
        fleet.client.run(r#"echo one; echo two; echo '{"metric": "loss", "value": 1}' >>"$AGENTD_METRICS""#);
    assert_eq!(fleet.client.ended(&job).state, "Completed");
    fleet.controller.kill();
    for channel in ["job", "tracking"] {
        let file = fleet.controller.state().join(format!("controller/archive/{job}/1.0.{channel}"));
        match cut {
            Some(length) => fs::File::options().write(true).open(file).and_then(|file| file.set_len(length)),
            None => fs::remove_file(file),
        }
        .expect("the archive has it");
    }
    fleet.controller.spawn();
    fleet.ready();
    let socket = fleet.controller.socket();
    for words in [["logs", &job].as_slice(), &["logs", "-f", &job], &["metrics", &job]] {
        let (code, _, err) = ctl(&socket, words);
        assert!(err.contains("are gone from the archive"), "{words:?}: {err}");
        assert!(!err.contains("has recorded nothing"), "{words:?}: {err}");
        assert_eq!(code == 0, words[1] == "-f", "{words:?}: who follows gets the end of the job: {err}");
    }
}

fn changed() {
    let mut fleet = Fleet::one_box();
    let job = fleet.client.run("echo one; echo two");
    assert_eq!(fleet.client.ended(&job).state, "Completed");
    fleet.controller.kill();
    let file = fleet.controller.state().join(format!("controller/archive/{job}/1.0.job"));
    let text = fs::read_to_string(&file).expect("the archive has it");
    fs::write(&file, text.replace("two", "tow")).expect("it can be written");
    fleet.controller.spawn();
    fleet.ready();
    let (code, out, err) = ctl(&fleet.controller.socket(), &["logs", &job]);
    assert!(code != 0 && err.contains("are not what the job wrote"), "{code}: {out} {err}");
    assert_eq!(out, "one\ntow\n", "what there is is shown");
}

fn segments(live: bool) {
    let mut fleet = Fleet::one_box();
    let (go, said) = (fleet.home().join("go"), fleet.home().join("said"));
    let record = |n: u32| {
        format!(
            r#"echo '{{"metric": "loss", "value": {n}, "step": {n}}}' >>"$AGENTD_METRICS"; echo line {n}"#
        )
    };
    let script = format!(
        "{}; touch {}; until [ -e {} ]; do sleep 0.1; done; {}",
        record(1),
        said.display(),
        go.display(),
        record(2)
    );
    let job = fleet.client.run(&script);
    eventually("its command runs", SOON, || said.exists().then_some(()));
    fleet.controller.kill();
    if !live {
        fs::write(&go, "").expect("the sign to end");
    }
    let dir = fleet.controller.job_dirs().into_iter().next().expect("its directory");
    if !live {
        eventually("it ended", SOON, || dir.join("exit.json").exists().then_some(()));
    }
    for stream in ["log/job", "log/tracking"] {
        let of_stream = fs::read_dir(dir.join(stream)).expect("its segments").flatten();
        for entry in of_stream.filter(|entry| entry.path().extension().is_some_and(|end| end == "seg")) {
            fs::remove_file(entry.path()).expect("it is there");
        }
    }
    fleet.controller.spawn();
    fleet.ready();
    fs::write(&go, "").expect("the sign to end");
    let ended = fleet.client.ended(&job);
    let fault = ended.outcome.and_then(|outcome| outcome.fault);
    let socket = fleet.controller.socket();
    if live {
        // The supervisor had the files open, and nothing is lost.
        assert_eq!((ended.state.as_str(), fault), ("Completed", None));
        fleet.client.wrote(&job, "line 1\nline 2\n");
        assert!(ctl(&socket, &["metrics", &job]).1.contains("loss"));
        assert_eq!(fleet.client.records(&job).iter().filter(|line| line.contains("loss")).count(), 2);
    } else {
        // A part may have arrived before; that the rest did not is told.
        let fault = fault.expect("it is told");
        let told = format!("{} {:?}", fault.what, fault.why);
        assert!(told.contains("of the log") && told.contains("of the metrics"), "{told}");
    }
}
