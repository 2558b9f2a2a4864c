//! Group C, harm that nobody planned: files of the state directory are changed, cut, emptied, removed and exchanged at
//! random, with the daemon alive or down, and its disk fails for a while.
//!
//! Whatever was harmed, everything that was acknowledged is right afterwards, or somebody is told what is not. A merge
//! tries some; `--full` tries a thousand.

use std::fs;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::JobDraft;
use agent_tests::chance::Chance;
use agent_tests::client::{Client, is_over};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::queue::said;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, binaries, copy_program, eventually, within, witness};

use crate::faults::c_disk::library;
use crate::faults::c_lost::ctl;
use crate::faults::c_trees::at_once;
use crate::faults::judge::whole;
use crate::faults::look::{files_below, panics};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "C17",
        promise: "whatever file is harmed, all is right afterwards or somebody is told",
        run: damages,
    },
    Row { id: "C18", promise: "a journal removed under its daemon costs nothing", run: journal },
    Row {
        id: "C19",
        promise: "a job waits for a disk that fails, says so, and loses no attempt",
        run: failing,
    },
    Row {
        id: "C20",
        promise: "a node that cannot start jobs gets none until it can, and its jobs wait",
        run: unfit,
    },
];

/// Lines of the job that runs while harm is done.
const LINES: u64 = 60;
/// What the job that ended before wrote.
const KEPT_LINES: usize = 200;
/// Files that nobody is to believe, or that are a job's own; and the shared memory of SQLite: who cuts that ends the daemon
/// by a signal of the kernel, as a kill does.
const NOT_HARMED: [&str; 7] = [".sock", ".lock", ".log", "/lock", "/job/", "ballast", "-shm"];

/// What came of a case.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Came {
    /// Nothing is missing or wrong.
    Right,
    /// Something is, and it is said.
    Told,
    /// The daemon does not start, and says why.
    Refused,
}

fn damages(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let cases: Vec<(usize, u64)> = (0..scale.of(12, 1000)).map(|number| (number, chance.number())).collect();
    let mut counts = [0; 3];
    for ((number, seed), came) in at_once(2, cases, |(_, seed)| damage(*seed)) {
        let came = tally.case(&format!("damage {number} of {seed}"), || match came {
            Ok((_, came)) => came,
            Err(why) => panic!("{why}"),
        });
        came.into_iter().for_each(|came| counts[came as usize] += 1);
    }
    let [right, told, refused] = counts;
    tally.note(format!("{right} right, {told} told, {refused} where the daemon says why it does not start"));
}

/// What waits for its end while harm is done, and what ended before.
struct Bed {
    fleet: Fleet,
    go: PathBuf,
    running: String,
    kept: String,
}

impl Bed {
    fn new() -> Bed {
        let fleet = Fleet::one_box();
        let go = fleet.home().join("go");
        let kept = fleet.client.run(&format!(
            r#"for i in $(seq {KEPT_LINES}); do echo kept $i; done; echo output > outputs/x; echo '{{"metric": "loss", "value": 1}}' >>"$AGENTD_METRICS""#
        ));
        assert_eq!(fleet.client.ended(&kept).state, "Completed");
        let running = fleet.submit(&format!("--lines {LINES} --until {}", go.display()));
        fleet.client.reached(&running, &["Running"]);
        Bed { fleet, go, running, kept }
    }

    /// Starts the daemon; false if it ends again and says why.
    fn start(&mut self) -> bool {
        self.fleet.controller.kill();
        let before = self.fleet.controller.log().len();
        self.fleet.controller.spawn();
        let up = within(SOON, || {
            if self.fleet.controller.ended().is_some() {
                return Some(false);
            }
            self.fleet.client.nodes().ok()?.iter().all(|node| node.liveness == "ready").then_some(true)
        });
        let up = up.expect("the daemon is there, or it ended");
        let log = self.fleet.controller.log();
        assert!(up || log[before..].contains("error["), "it ended for no reason: {}", &log[before..]);
        up
    }

    /// What is shown of the job that ended, and whether anything is missing.
    fn kept(&self) -> Result<Came, String> {
        let socket = self.fleet.controller.socket();
        let mut came = Came::Right;
        let wrote: String = (1..=KEPT_LINES).map(|line| format!("kept {line}\n")).collect();
        let results = self.fleet.home().join("results");
        let _ = fs::remove_dir_all(&results);
        let into = results.display().to_string();
        for words in
            [&["logs", &self.kept][..], &["download", &self.kept, "-o", &into], &["metrics", &self.kept]]
        {
            let (code, out, err) = ctl(&socket, words);
            let is_right = match words[0] {
                "logs" => out == wrote,
                "download" => fs::read(results.join("outputs/x")).is_ok_and(|read| read == b"output\n"),
                _ => out.contains("loss"),
            };
            let is_told = code != 0 && !err.is_empty() || self.is_noticed();
            match (is_right, is_told) {
                (true, _) => {}
                (false, true) => came = Came::Told,
                (false, false) => return Err(format!("{words:?} is wrong and nobody says so: {out} {err}")),
            }
        }
        Ok(came)
    }

    /// The controller says that records of it were lost.
    fn is_noticed(&self) -> bool {
        self.fleet.client.notices().is_ok_and(|notices| !notices.is_empty())
    }

    /// The same of the job that ran.
    fn ran(&self) -> Result<Came, String> {
        let ended = self.fleet.client.ended(&self.running);
        let fault = ended.outcome.clone().and_then(|outcome| outcome.fault);
        let log = self.fleet.client.try_log(&self.running, ended.epoch, "job").unwrap_or_default();
        let found = witness::lines(&log, LINES);
        let is_right = ended.state == "Completed" && found.is_whole() && found.read == LINES;
        let in_log = found.strange.iter().any(|line| line.contains("[agentd:"));
        let twice = self.fleet.witness.run_twice();
        match (is_right, fault.is_some() || in_log || self.is_noticed()) {
            _ if !twice.is_empty() => Err(format!("it ran twice: {twice:?}")),
            (true, _) => Ok(Came::Right),
            (false, true) => Ok(Came::Told),
            (false, false) => Err(format!("{ended:?} with {found:?}, and nobody says so")),
        }
    }
}

/// Harm is done to one box, which has a job that ended and one that runs.
fn damage(seed: u64) -> (String, Came) {
    let (mut bed, mut chance) = (Bed::new(), Chance::new(seed));
    let live = chance.percent(60);
    if !live {
        bed.fleet.controller.kill();
    }
    let what = harm(&bed.fleet.controller.state(), &mut chance);
    let what = format!("{what}, {}", if live { "alive" } else { "down" });
    let came = catch_unwind(AssertUnwindSafe(|| after_harm(&mut bed, live, &mut chance)));
    match came.unwrap_or_else(|panic| Err(said(&*panic))) {
        Ok(came) => (what, came),
        Err(why) => panic!("{what}: {why}"),
    }
}

fn after_harm(bed: &mut Bed, live: bool, chance: &mut Chance) -> Result<Came, String> {
    let mut came = Vec::new();
    if live {
        std::thread::sleep(chance.millis(0, 2500));
        // Alive it is asked before and after: what it has in memory must not hide what the disk has lost. One whose
        // database was harmed refuses new jobs, says so and ends; the next start mends it.
        let draft = JobDraft { command: "echo next".to_owned(), ..JobDraft::default() };
        let id = Client::request_id();
        let soon = Duration::from_secs(10);
        match within(soon, || bed.fleet.client.try_submit(&id, &draft).ok()) {
            Some(next) => {
                if within(soon, || is_over(&bed.fleet.client.job(&next)).then_some(())).is_none() {
                    // It may need an environment that is made anew as soon as nobody uses it.
                    fs::write(&bed.go, "").expect("the sign to end");
                    bed.fleet.client.ended(&next);
                }
            }
            None => {
                let refused = bed.fleet.client.try_submit(&id, &draft).expect_err("it refused before");
                let ended = bed.fleet.controller.ended().is_some()
                    && bed.fleet.controller.log().contains("harmed while it was open");
                if !ended && !refused.message().contains("the controller could not") {
                    return Err(format!("it takes no job, and does not say why: {refused:?}"));
                }
                came.push(Came::Told);
            }
        }
        came.push(bed.kept()?);
    }
    if chance.percent(50) {
        fs::write(&bed.go, "").expect("the sign to end");
    }
    if !bed.start() {
        return Ok(Came::Refused);
    }
    fs::write(&bed.go, "").expect("the sign to end");
    came.push(bed.ran()?);
    came.push(bed.kept()?);
    let after = bed.fleet.client.run("echo after");
    let after = bed.fleet.client.ended(&after);
    if after.state != "Completed" {
        return Err(format!("the next job: {after:?}"));
    }
    let panics = panics(&bed.fleet.controller);
    if !panics.is_empty() {
        return Err(format!("{panics:?}"));
    }
    Ok(if came.contains(&Came::Told) { Came::Told } else { Came::Right })
}

/// Does harm to a file below a directory; says what was done.
fn harm(state: &Path, chance: &mut Chance) -> String {
    let mut files = files_below(state);
    let is_harmed = |path: &PathBuf| {
        let name = path.display().to_string();
        let is_empty = fs::metadata(path).map_or(true, |file| file.len() == 0);
        !is_empty && !NOT_HARMED.iter().any(|part| name.contains(part))
    };
    files.retain(is_harmed);
    files.sort();
    let file = chance.pick(&files).clone();
    let name = file.strip_prefix(state).expect("it is below").display().to_string();
    let length = fs::metadata(&file).map_or(0, |file| file.len());
    let open = || fs::File::options().read(true).write(true).open(&file).expect("the file opens");
    let at = chance.below(length);
    match chance.below(6) {
        0 => {
            fs::remove_file(&file).expect("it is there");
            format!("{name} was removed")
        }
        1 => {
            open().set_len(0).expect("it is emptied");
            format!("{name} was emptied")
        }
        2 => {
            open().set_len(at).expect("it is cut");
            format!("{name} of {length} bytes was cut at {at}")
        }
        3 => {
            // With one of its kind where there is one, for that proves itself best.
            let same: Vec<&PathBuf> = files
                .iter()
                .filter(|other| **other != file && other.extension() == file.extension())
                .collect();
            let Some(other) = (!same.is_empty()).then(|| (*chance.pick(&same)).clone()) else {
                fs::remove_file(&file).expect("it is there");
                return format!("{name} was removed");
            };
            let between = file.with_extension("exchanged");
            fs::rename(&file, &between).expect("it is there");
            fs::rename(&other, &file).expect("it is there");
            fs::rename(&between, &other).expect("it is there");
            format!("{name} and {} were exchanged", other.display())
        }
        kind => {
            let size = usize::try_from(length - at).expect("a length").min(if kind == 4 { 1 } else { 512 });
            let mut bytes = vec![0; size];
            open().read_exact_at(&mut bytes, at).expect("it is read");
            bytes.iter_mut().for_each(|byte| *byte ^= 1 << chance.below(8));
            open().write_all_at(&bytes, at).expect("it is written");
            format!("{size} bytes of {name} of {length} bytes were changed at {at}")
        }
    }
}

fn journal(tally: &mut Tally, _: &Scale) {
    for (files, stops) in
        [("journal.db journal.db-wal", false), ("journal.db", true), ("journal.db-wal", false)]
    {
        let name = format!("{files}, then {}", if stops { "a stop" } else { "a kill" });
        tally.case(&name, || {
            let mut bed = Bed::new();
            for file in files.split(' ') {
                // A journal in which little was written may have no log beside it.
                let _ = fs::remove_file(bed.fleet.controller.state().join(file));
            }
            let later = bed.fleet.submit(&format!("--lines {LINES} --until {}", bed.go.display()));
            bed.fleet.client.reached(&later, &["Running"]);
            if stops {
                bed.fleet.controller.stop();
            }
            assert!(bed.start(), "it starts");
            fs::write(&bed.go, "").expect("the sign to end");
            whole(&bed.fleet, &bed.running, LINES);
            whole(&bed.fleet, &later, LINES);
            assert_eq!(bed.kept(), Ok(Came::Right));
            assert!(bed.fleet.controller.state().join("journal.db").exists());
        });
    }
}

/// The node's disk takes none of its records for a while.
fn failing(tally: &mut Tally, _: &Scale) {
    for (number, name) in [(5, "EIO"), (30, "EROFS")] {
        tally.case(name, || {
            let mut fleet = Fleet::new(&Setup::default());
            let refuse = fleet.home().join("refuse");
            fleet.controller.set("LD_PRELOAD", &library().display().to_string());
            fleet.controller.set("REFUSE_MATCH", "journal.db");
            fleet.controller.set("REFUSE_FILE", &refuse.display().to_string());
            fleet.start();
            fs::write(&refuse, number.to_string()).expect("a file");
            let job = fleet.submit("--lines 20");
            let waits = |detail: &str| {
                detail.contains("fails the check `disk`: it takes no records of jobs")
                    && detail.contains("I/O error")
            };
            eventually("it says for what it waits", SOON, || {
                waits(&fleet.client.job(&job).detail).then_some(())
            });
            let status = ctl(&fleet.controller.socket(), &["status"]).1;
            assert!(status.contains("degraded") && status.contains("sudo dmesg"), "{status}");
            std::thread::sleep(Duration::from_secs(2));
            assert!(waits(&fleet.client.job(&job).detail), "it still does");
            fs::remove_file(&refuse).expect("it is mended");
            whole(&fleet, &job, 20);
        });
    }
}

/// The program that stands beside each job is missing, and is put back.
fn unfit(tally: &mut Tally, _: &Scale) {
    tally.case("agent-shim is missing", || {
        let programs = tempfile::tempdir().expect("a directory");
        for entry in fs::read_dir(binaries()).expect("they are built").flatten() {
            let name = entry.file_name().display().to_string();
            if name.starts_with("agent") && !name.contains('.') && entry.path().is_file() {
                copy_program(&entry.path(), &programs.path().join(name));
            }
        }
        let mut fleet = Fleet::new(&Setup::default());
        fleet.controller.use_programs(programs.path());
        fleet.start();
        fs::remove_file(programs.path().join("agent-shim")).expect("it is there");
        let job = fleet.submit("--lines 20");
        let waits = || fleet.client.job(&job).detail;
        eventually("its node is held back", SOON, || waits().contains("could not start jobs").then_some(()));
        let socket = fleet.controller.socket();
        for words in [&["status"][..], &["nodes"], &["why", &job]] {
            let (_, out, _) = ctl(&socket, words);
            assert!(out.contains("could not start jobs and is tried again at"), "{words:?}: {out}");
        }
        assert!(ctl(&socket, &["status"]).1.contains("agentctl undrain"));
        copy_program(&binaries().join("agent-shim"), &programs.path().join("agent-shim"));
        let (code, _, err) = ctl(&socket, &["undrain", "box"]);
        assert_eq!(code, 0, "{err}");
        let ended = fleet.client.ended(&job);
        assert_eq!(ended.state, "Completed", "{ended:?}");
        assert!(ctl(&socket, &["status"]).1.contains("ready"), "the node is as good as ever");
    });
}
