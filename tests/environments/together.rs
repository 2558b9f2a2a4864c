//! Group K: engines side by side on one cache, and engines that are killed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_env::{Build, Sweep, Task};
use agent_tests::chance::Chance;
use agent_tests::channel::Server;
use agent_tests::{SOON, eventually, signal};
use rustix::process::Signal;

use crate::environments::bench::{Room, files, server, text, tiny};
use agent_tests::table::{Row, Scale, Tally};

/// The cases of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "K1",
        promise: "engines on one cold cache all build, and fetch each package once",
        run: side_by_side,
    },
    Row { id: "K2", promise: "a stalled download holds up nobody who does not want it", run: unrelated },
    Row {
        id: "K3",
        promise: "killed at any moment, the same works later, and a sweep finds every orphan",
        run: killed,
    },
    Row { id: "K4", promise: "a sweep takes nothing from under a build", run: swept_meanwhile },
    Row { id: "K5", promise: "asked to end, or left alone, an engine is gone soon", run: ended },
];

fn start(room: &Room, wish: &Build) -> crate::environments::bench::Running {
    room.start(&Task::Build(Box::new(wish.clone())))
}

#[track_caller]
fn sound(prefix: &Path) {
    for part in 0..30 {
        for number in 0..25 {
            let path = format!("share/part-{part:02}/{number}.txt");
            assert_eq!(text(prefix, &path), format!("{part} {number} {}\n", prefix.display()));
        }
    }
    assert_eq!(fs::metadata(prefix.join("share/big.bin")).expect("big.bin").len(), 4 << 20);
}

fn side_by_side(tally: &mut Tally, scale: &Scale) {
    for engines in if scale.full { vec![2, 4, 8, 16] } else { vec![2, 8] } {
        tally.case(&format!("{engines} engines"), || {
            let (room, server) = (Room::new(), server());
            let wishes: Vec<_> =
                (0..engines).map(|_| room.wish(&server.url("plain"), &["parts", "big", "linked"])).collect();
            let running: Vec<_> = wishes.iter().map(|wish| start(&room, wish)).collect();
            for (engine, wish) in running.into_iter().zip(&wishes) {
                engine.finish().built();
                sound(&wish.prefix);
            }
            let twice: Vec<_> = server
                .all_requests()
                .into_iter()
                .filter(|(path, count)| path.ends_with(".conda") && *count > 1)
                .collect();
            assert!(twice.is_empty(), "fetched more than once: {twice:#?}");
        });
    }
}

fn unrelated(tally: &mut Tally, _: &Scale) {
    let mut ratios = Vec::new();
    for (stalls, shared) in [("stall~big", false), ("stall~big", true), ("stall-repodata", false)] {
        tally.case(&format!("{stalls}, with a package in common: {shared}"), || {
            let (room, server) = (Room::new(), server());
            let specs = ["part-00", "part-01", "part-02", "noarch-tool"];
            let alone = {
                let other = Room::new();
                let begun = Instant::now();
                other.made(&server.url("plain"), &specs);
                begun.elapsed()
            };
            let mut wish =
                room.wish(&server.url(stalls), if shared { &["big", "part-00"] } else { &["big"] });
            wish.stall_s = 120;
            let mut stuck = start(&room, &wish);
            eventually("it stalls", SOON, || (server.stalled() > 0).then_some(()));
            let begun = Instant::now();
            let (prefix, _) = room.made(&server.url("plain"), &specs);
            let beside = begun.elapsed();
            assert!(stuck.at_work() && server.stalled() > 0, "the other one was not stalled any more");
            assert_eq!(text(&prefix, "share/part-01/1.txt"), format!("1 1 {}\n", prefix.display()));
            ratios.push(format!("{stalls}: alone {alone:.2?}, beside it {beside:.2?}"));
            server.release();
            stuck.finish().built();
        });
    }
    ratios.into_iter().for_each(|ratio| tally.note(ratio));
}

/// What is in a cache, without what differs from one time to another.
fn shape(cache: &Path) -> BTreeSet<PathBuf> {
    files(cache).into_iter().collect()
}

fn killed(tally: &mut Tally, scale: &Scale) {
    const SPECS: [&str; 3] = ["parts", "big", "noarch-tool"];
    let server = server();
    // Slow enough that downloads take a part of the time, too.
    let url = server.url("slow~8000000");
    let (reference, whole) = reference(&url, &SPECS);
    let mut chance = Chance::new(scale.seed);
    let (mut struck, mut cold) = (0, Room::new());
    let points = if scale.full { 200 } else { 40 };
    for point in 0..points {
        // Every fourth begins with an empty cache; the others find what was left by those before.
        if point % 4 == 0 {
            orphans(tally, &cold, &reference);
            cold = Room::new();
        }
        let after = Duration::from_micros(chance.below(u64::try_from(whole.as_micros()).unwrap_or(u64::MAX)));
        tally.case(&format!("after {after:?}"), || {
            let wish = cold.wish(&url, &SPECS);
            let engine = start(&cold, &wish);
            std::thread::sleep(after);
            struck += u32::from(engine.kill());
        });
        if point % 4 == 3 || chance.percent(30) {
            tally.case(&format!("built after one killed after {after:?}"), || {
                let (prefix, _) = cold.made(&url, &SPECS);
                sound(&prefix);
            });
        }
    }
    orphans(tally, &cold, &reference);
    tally.note(format!("{struck} of {points} were struck at work; one undisturbed takes {whole:.2?}"));
}

/// The cache after an undisturbed build, and how long that took.
fn reference(url: &str, specs: &[&str]) -> (BTreeSet<PathBuf>, Duration) {
    let room = Room::new();
    let begun = Instant::now();
    room.made(url, specs);
    let whole = begun.elapsed();
    room.sweep(3600);
    (shape(&room.cache), whole)
}

/// After a sweep a cache holds nothing that an undisturbed one would not.
fn orphans(tally: &mut Tally, room: &Room, reference: &BTreeSet<PathBuf>) {
    tally.case("no orphan", || {
        age_scraps(room);
        room.sweep(3600);
        let bytes = |path: &&PathBuf| fs::metadata(room.cache.join(path)).map_or(0, |meta| meta.len());
        let here = shape(&room.cache);
        let more: Vec<_> = here.difference(reference).filter(|path| bytes(path) > 0).collect();
        let sum: u64 = more.iter().map(bytes).sum();
        assert_eq!(sum, 0, "{} orphans: {:#?}", more.len(), &more[..more.len().min(20)]);
    });
}

/// Makes what is left of lists two hours older: nothing but its age tells that nobody works on it.
fn age_scraps(room: &Room) {
    for path in files(&room.cache.join("repodata")) {
        if path.to_string_lossy().starts_with(".tmp") {
            let file = fs::File::open(room.cache.join("repodata").join(path)).expect("a file");
            let written = file.metadata().and_then(|meta| meta.modified()).expect("a time");
            file.set_modified(written - Duration::from_secs(7200)).expect("root may");
        }
    }
}

fn swept_meanwhile(tally: &mut Tally, scale: &Scale) {
    let server: Server = server();
    for round in 0..if scale.full { 20 } else { 3 } {
        tally.case(&format!("round {round}"), || {
            let room = Room::new();
            let wish = room.wish(&server.url("slow~8000000"), &["parts", "big"]);
            let mut engine = start(&room, &wish);
            let mut sweeps = 0;
            while engine.at_work() {
                room.start(&Task::Sweep(Sweep { cache: room.cache.clone(), unused_for_s: 0 })).finish();
                sweeps += 1;
            }
            engine.finish().built();
            sound(&wish.prefix);
            assert!(sweeps > 0);
        });
    }
}

fn ended(tally: &mut Tally, _: &Scale) {
    const GRACE: Duration = Duration::from_secs(5);
    for (name, mode) in [("in a download", "stall~big"), ("in a list", "stall-repodata")] {
        tally.case(&format!("a signal {name}"), || {
            let (room, server) = (Room::new(), server());
            let mut engine = start(&room, &room.wish(&server.url(mode), &["big"]));
            eventually("it stalls", SOON, || (server.stalled() > 0).then_some(()));
            signal(engine.pid(), Signal::TERM);
            eventually("it ends", GRACE, || (!engine.at_work()).then_some(()));
        });
        tally.case(&format!("whoever asked dies {name}"), || {
            let (room, server) = (Room::new(), server());
            orphaned(&room, &room.wish(&server.url(mode), &["big"]), &server);
        });
    }
    tally.case("nothing is written afterwards", || {
        let room = Room::new();
        let wish = room.wish(&tiny("main"), &["many-files", "parts"]);
        let engine = start(&room, &wish);
        eventually("it links", SOON, || wish.prefix.join("share").exists().then_some(()));
        engine.kill();
        let before = files(&room.home);
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(files(&room.home), before);
    });
}

/// Starts an engine by a shell, kills the shell, and waits for the engine to be gone.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
fn orphaned(room: &Room, wish: &Build, server: &Server) {
    let request =
        agent_env::EngineRequest { version: agent_env::VERSION, task: Task::Build(Box::new(wish.clone())) };
    let (asked, told) = (room.home.join("request"), room.home.join("pid"));
    fs::write(&asked, serde_json::to_string(&request).expect("JSON")).expect("a file");
    let mut shell = std::process::Command::new("sh");
    let script = "\"$0\" < \"$1\" > \"$2.out\" & echo $! > \"$2\"; wait";
    shell.arg("-c").arg(script).arg(room.command().get_program()).arg(&asked).arg(&told);
    let mut shell = shell.spawn().expect("a shell");
    eventually("it stalls", SOON, || (server.stalled() > 0).then_some(()));
    let pid: u32 = fs::read_to_string(&told).expect("a process id").trim().parse().expect("a number");
    shell.kill().expect("a signal");
    shell.wait().expect("its own child");
    let gone = || {
        // One that nobody has reaped yet is gone as well.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z ")
    };
    eventually("the engine is gone", Duration::from_secs(5), || gone().then_some(()));
}
