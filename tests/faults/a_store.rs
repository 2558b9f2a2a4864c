//! Group A, what is kept: databases that are damaged or come out of a backup, machines that start anew.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::JobDraft;
use agent_model::job::RetryPolicy;
use agent_tests::chance::Chance;
use agent_tests::client::is_over;
use agent_tests::finish;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::link::Way;

use crate::faults::judge::{broken, contents, instances, whole, whole_after_loss};
use crate::faults::look::{PYTHON, command};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "A7",
        promise: "a restart of the machine, or a power cut, is told as such, and starts nothing by itself",
        run: reboots,
    },
    Row {
        id: "A10",
        promise: "a controller restored from a backup reuses no epoch and kills no job",
        run: old_backup,
    },
    Row { id: "A13", promise: "a damaged database loses no job and no run, and is reported", run: damage },
];

const LINES: u64 = 200;

/// The machine of a node goes down at random phases of its jobs.
fn reboots(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let mut fleet = Fleet::started(&Setup { nodes: 1, slots: 2, ..Setup::default() });
    let mut lost = 0;
    for round in 0..scale.of(10, 50) {
        let (retries, cut) = (round % 2 == 1, round % 4 > 1);
        let (pause, what) = (chance.millis(0, 900), if cut { "power cut" } else { "reboot" });
        tally.case(&format!("{what} {pause:?} after the submit, retries: {retries}"), || {
            let attempts = if retries { 3 } else { 1 };
            let draft = JobDraft {
                retry: RetryPolicy { max_attempts: attempts, backoff: Duration::ZERO },
                ..fleet.draft("--lines 20 --seconds 0.5")
            };
            let job = fleet.client.submit(&draft);
            std::thread::sleep(pause);
            fleet.nodes[0].reboot(&format!("00000000-0000-4000-8000-{round:012}"));
            if cut {
                lost += take_back_unforced(&fleet.nodes[0].state());
            }
            // The node comes up long before it reaches its controller.
            fleet.links[0].break_all();
            fleet.links[0].cut(Way::Both);
            let before = fleet.witness.execs();
            fleet.nodes[0].spawn();
            std::thread::sleep(Duration::from_millis(1500));
            assert_eq!(fleet.witness.execs(), before, "something started before the controller was asked");
            fleet.links[0].heal();
            fleet.links[0].break_all();
            let ended = fleet.client.ended(&job);
            let outcome = ended.outcome.clone().unwrap_or_default();
            let code = outcome.fault.map(|fault| fault.code).unwrap_or_default();
            let finished = fleet.witness.of(&job).iter().any(|seen| seen.kind == "end");
            match ended.state.as_str() {
                "Completed" => assert!(finished, "{ended:?}"),
                "Failed" => assert!(code == rebooted() && !retries, "{code}: {ended:?}"),
                other => panic!("{job} ended as {other}"),
            }
        });
    }
    tally.count(0, "runs of one epoch", &fleet.witness.run_twice());
    tally.count(0, "runs at the same time", &fleet.witness.overlaps());
    tally.note(format!("{lost} records of the journal were really taken back"));
}

/// What was not forced to the disk is gone; how many records of the journal were.
fn take_back_unforced(state: &Path) -> u32 {
    finish(command(PYTHON).arg("-c").arg(include_str!("unforced.py")).arg(state))
        .ok()
        .stdout
        .trim()
        .parse()
        .expect("a number")
}

fn rebooted() -> &'static str {
    agent_model::Code::NodeRebooted.as_str()
}

/// The controller's database, as files.
fn database(fleet: &Fleet) -> PathBuf {
    fleet.controller.state().join("controller/db")
}

/// The files of a database that exist.
fn files(database: &Path) -> Vec<PathBuf> {
    let file = |ending| PathBuf::from(format!("{}{ending}", database.display()));
    ["", "-wal", "-shm"].into_iter().map(file).filter(|file| file.exists()).collect()
}

/// A backup is taken, jobs run, the backup comes back.
fn old_backup(tally: &mut Tally, scale: &Scale) {
    for round in 0..scale.of(2, 10) {
        tally.case(&format!("restore {round}"), || {
            let mut fleet = Fleet::started(&Setup { nodes: 1, slots: 2, ..Setup::default() });
            let go = fleet.home().join("go");
            let live = fleet.submit(&format!("--lines {LINES} --until {}", go.display()));
            fleet.client.reached(&live, &["Running"]);
            // In line when the backup is taken, and run to its end after it.
            fleet.client.set_eligibility("n0", "cordon").expect("the node is cordoned");
            let waiting = fleet.submit("--lines 20 --seconds 0.2");
            let backup = fleet.home().join("backup");
            fs::create_dir(&backup).expect("a directory");
            fleet.controller.kill();
            for file in files(&database(&fleet)) {
                fs::copy(&file, backup.join(file.file_name().expect("a name"))).expect("a copy");
            }
            fleet.controller.spawn();
            fleet.ready();
            fleet.client.set_eligibility("n0", "uncordon").expect("the node is uncordoned");
            whole(&fleet, &waiting, 20);
            let later: Vec<String> =
                (0..scale.of(4, 50)).map(|_| fleet.submit("--lines 20 --seconds 0.1")).collect();
            later.iter().for_each(|job| whole(&fleet, job, 20));
            let after = fleet.submit(&format!("--lines {LINES} --until {}", go.display()));
            fleet.client.reached(&after, &["Running"]);
            let runs = instances(&fleet.nodes[0]);

            fleet.controller.kill();
            files(&database(&fleet)).iter().for_each(|file| fs::remove_file(file).expect("it is removed"));
            for file in files(&backup.join("db")) {
                let to = database(&fleet).with_file_name(file.file_name().expect("a name"));
                fs::copy(&file, to).expect("a copy");
            }
            fleet.controller.spawn();
            fleet.ready();
            let _ = fleet.client.set_eligibility("n0", "uncordon");
            std::thread::sleep(Duration::from_secs(4));
            let alive = instances(&fleet.nodes[0]);
            let killed: Vec<_> = runs.keys().filter(|dir| !alive.contains_key(*dir) || ended(dir)).collect();
            assert!(killed.is_empty(), "runs were ended without anybody being asked: {killed:?}");
            fs::write(&go, "").expect("the sign to end");
            whole(&fleet, &live, LINES);
            assert!(fleet.witness.run_twice().is_empty(), "{:?}", fleet.witness.run_twice());
        });
    }
}

fn ended(dir: &Path) -> bool {
    dir.join("exit.json").exists()
}

/// Bits are flipped and ends are cut off in the databases of both sides while jobs run.
fn damage(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    for round in 0..scale.of(2, 10) {
        let mut fleet = Fleet::started(&Setup { nodes: 1, slots: 2, ..Setup::default() });
        let go = fleet.home().join("go");
        let done = fleet.submit("--lines 20 --seconds 0.1");
        whole(&fleet, &done, 20);
        let wishes = format!("--lines {LINES} --until {}", go.display());
        let live = [0, 1].map(|_| fleet.submit(&wishes));
        live.iter().for_each(|job| drop(fleet.client.reached(job, &["Running"])));
        let mut all: Vec<String> = live.to_vec();
        let before = instances(&fleet.nodes[0]);
        let (mut mattered, mut reported) = (0, 0);
        for case in 0..scale.of(6, 10) {
            all.push(fleet.submit("--lines 20 --seconds 0.1")); // acknowledged, and in line
            let number = round * 100 + case;
            tally.case(&format!("damage {number}"), || {
                // After a stop everything is in the database itself, after a kill most is in its log.
                if chance.percent(50) {
                    fleet.controller.stop();
                    fleet.nodes[0].stop();
                }
                fleet.controller.kill();
                fleet.nodes[0].kill();
                let journal = fleet.nodes[0].state().join("journal.db");
                let of_controller = chance.percent(60);
                let hit = if of_controller { database(&fleet) } else { journal };
                let (before_it, files_before) = (contents(&hit), damaged_files(&fleet));
                let what = hurt(&hit, &mut chance);
                let (differs, damage) = (contents(&hit) != before_it, broken(&hit));
                mattered += u32::from(differs || damage.is_some());
                let logged = [fleet.controller.log().len(), fleet.nodes[0].log().len()];
                fleet.controller.spawn();
                fleet.nodes[0].spawn();
                fleet.ready();
                let log = match of_controller {
                    true => fleet.controller.log()[logged[0]..].to_lowercase(),
                    false => fleet.nodes[0].log()[logged[1]..].to_lowercase(),
                };
                // What is missing at the end of a journal looks like a kill, and the directories have it all.
                if damage.is_some() || (of_controller && differs) {
                    let said = |word: &&str| log.contains(*word);
                    let told = ["damage", "corrupt", "malformed", "behind its second copy"].iter().any(said)
                        || files_before != damaged_files(&fleet) // set aside
                        || !fleet.client.notices().unwrap_or_default().is_empty();
                    assert!(told, "{what}: nobody says so. It is: {damage:?}");
                    reported += 1;
                }
                for job in &all {
                    let now =
                        fleet.client.try_job(job).unwrap_or_else(|status| panic!("{what}: {job}: {status}"));
                    assert!((now.epoch <= 1 || now.epoch > 1000) && !is_over(&now), "{what}: {now:?}");
                }
                assert_eq!(fleet.client.job(&done).state, "Completed", "{what}");
                assert_eq!(instances(&fleet.nodes[0]), before, "{what}: the supervisors changed");
            });
        }
        fs::write(go, "").expect("the sign to end");
        for job in &all {
            let lines = if live.contains(job) { LINES } else { 20 };
            tally.case(&format!("the end of {job}"), || {
                whole_after_loss(&fleet, job, lines);
            });
        }
        let cases = scale.of(6, 10);
        tally.note(format!(
            "{mattered} of {cases} damages changed what is read, {reported} had to be reported"
        ));
    }
}

/// The databases that were set aside because they were damaged.
fn damaged_files(fleet: &Fleet) -> usize {
    let below = [fleet.controller.state().join("controller"), fleet.nodes[0].state()];
    let listed = below.iter().flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten());
    listed.filter(|entry| entry.file_name().to_string_lossy().contains(".damaged-")).count()
}

/// Does harm to a file of a database; says what was done.
fn hurt(database: &Path, chance: &mut Chance) -> String {
    const PAGE: u64 = 4096;
    let has_more = |file: &PathBuf| fs::metadata(file).is_ok_and(|file| file.len() > 0);
    let files = files(database).into_iter().filter(|file| !file.to_string_lossy().ends_with("-shm"));
    let files: Vec<PathBuf> = files.filter(has_more).collect();
    let file = chance.pick(&files);
    let open = fs::File::options().read(true).write(true).open(file).expect("the file opens");
    let length = open.metadata().expect("its length").len();
    let at = chance.below(length);
    let name = file.file_name().expect("a name").to_string_lossy();
    match chance.below(4) {
        0 => {
            open.set_len(at).expect("it is cut");
            format!("{name} of {length} bytes was cut at {at}")
        }
        kind @ (1 | 2) => {
            let (at, fill) = (at / PAGE * PAGE, if kind == 1 { 0 } else { 0xa5 });
            let page = vec![fill; usize::try_from(PAGE.min(length - at)).expect("a page")];
            open.write_all_at(&page, at).expect("it is written");
            format!("a page of {name} of {length} bytes became {fill:#x} at {at}")
        }
        _ => {
            let mut byte = [0];
            open.read_exact_at(&mut byte, at).expect("it is read");
            byte[0] ^= 1 << chance.below(8);
            open.write_all_at(&byte, at).expect("it is written");
            format!("a bit of {name} of {length} bytes was flipped at {at}")
        }
    }
}
