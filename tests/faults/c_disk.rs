//! Group C, the rows about what a daemon stands on: its disk, its clock, and who watches over it.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use agent_model::{JobDraft, failpoint};
use agent_tests::bounds::SmallDisk;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::manager::ServiceManager;
use agent_tests::{SOON, eventually, within};

use crate::faults::judge::truthful;
use crate::faults::look::{broken_databases, command, panics};
use crate::faults::sweep::Submission;
use agent_tests::queue::said;
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this part of the group. Of C6 only the wall clock is stepped: the clock that counts leases and
/// limits cannot be set under a process that runs, only under one that is started.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "C6", promise: "a wall clock that is set ends no job and loses none", run: clock },
    Row { id: "C7", promise: "a disk that takes nothing costs no result, and no restart", run: disk_full },
    Row { id: "C8", promise: "what could not be forced to the disk is not acknowledged", run: lost_writes },
    Row {
        id: "C10",
        promise: "the service manager hears of progress inside, and of nothing else",
        run: watchdog,
    },
];

/// The library of `preload.c`, built once.
pub(crate) fn library() -> &'static Path {
    static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let (source, path) = (dir.path().join("preload.c"), dir.path().join("preload.so"));
        fs::write(&source, include_str!("preload.c")).expect("a file");
        let mut cc = command("cc");
        let built = cc
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&path)
            .arg(&source)
            .args(["-ldl", "-lpthread"])
            .status();
        assert!(built.expect("cc starts").success(), "preload.c does not build");
        (dir, path)
    });
    path
}

fn clock(tally: &mut Tally, scale: &Scale) {
    const HOUR: i64 = 3600;
    const YEARS: i64 = 10 * 365 * 24 * HOUR;
    let mut fleet = Fleet::new(&Setup { nodes: 1, slots: 8, ..Setup::default() });
    let file = fleet.home().join("clock");
    fs::write(&file, "0").expect("a file");
    for daemon in std::iter::once(&mut fleet.controller).chain(&mut fleet.nodes) {
        daemon.set("LD_PRELOAD", &library().display().to_string());
        daemon.set("CLOCK_FILE", &file.display().to_string());
    }
    fleet.start();
    let mut draft = fleet.draft("--lines 4000 --rate 200 --seconds 20");
    draft.limits.timeout = Some(Duration::from_secs(300));
    draft.limits.on_disconnect = agent_model::job::OnDisconnect::Replace;
    let long = fleet.client.submit(&draft);
    fleet.client.reached(&long, &["Running"]);
    for (name, step) in [
        ("an hour on", HOUR),
        ("an hour back", -HOUR),
        ("10 years on", YEARS),
        ("10 years back", -YEARS),
        ("back to now", 0),
    ] {
        tally.case(name, || {
            fs::write(&file, step.to_string()).expect("a file");
            std::thread::sleep(Duration::from_millis(scale.of(1500, 30_000)));
            let nodes = fleet.client.nodes().expect("an answer");
            assert!(nodes.iter().all(|node| node.liveness == "ready"), "{nodes:?}");
            assert_eq!(
                (fleet.client.job(&long).state.as_str(), fleet.client.job(&long).epoch),
                ("Running", 1)
            );
            let job = fleet.client.run("sleep 0.3; echo fine");
            assert_eq!(fleet.client.ended(&job).state, "Completed");
            assert_eq!(fleet.client.log(&job, "job"), b"fine\n");
            fleet.nodes[0].bounce();
            fleet.controller.bounce();
            fleet.ready();
            assert_eq!(fleet.client.job(&long).epoch, 1);
        });
    }
    tally.case("the job that saw all of it", || crate::faults::judge::whole(&fleet, &long, 4000));
    tally.note("not tried: steps of the clock since boot, which nobody can set under a running process");
}

/// Names at which something is written or made durable.
fn write_sites() -> Vec<&'static str> {
    let writes = [
        "write", "sync", "create", "rename", "commit", "fill", "make", "enter", "done", "keep", "begin",
        "reserve", "trim", "open",
    ];
    let is_write = |name: &&&str| writes.iter().any(|word| name.rsplit('.').next() == Some(word));
    failpoint::NAMES.iter().filter(is_write).copied().collect()
}

/// How long a disk fails that a supervisor needs.
const STAYS: Duration = Duration::from_secs(20);

const ERRORS: [(i32, &str); 4] =
    [(28, "disk full"), (122, "quota exceeded"), (5, "input/output error"), (30, "read-only")];

fn disk_full(tally: &mut Tally, scale: &Scale) {
    let sites = write_sites();
    let first = usize::try_from(scale.seed).unwrap_or(0);
    let mut cases = Vec::new();
    for (index, name) in sites.iter().enumerate() {
        for which in 0..scale.of(1, ERRORS.len()) {
            cases.push((*name, ERRORS[(first + index + which) % ERRORS.len()]));
        }
    }
    let (mut visited, mut restarts) = (0, Vec::new());
    for ((name, (_, error)), came) in
        crate::faults::c_trees::at_once(2, cases, |(name, (errno, _))| refuse(name, *errno))
    {
        let came = tally.case(&format!("{error} at {name}"), || came.unwrap_or_else(|why| panic!("{why}")));
        if let Some((was_visited, restarted)) = came {
            visited += u32::from(was_visited);
            restarts.extend(restarted.then_some(name));
        }
    }
    tally.note(format!("{} places, {visited} of them met on the way of the job", sites.len()));
    if !restarts.is_empty() {
        tally.note(format!("the daemon could not start until there was room again: {}", restarts.join(" ")));
    }
    tally.case("a small disk that a job fills", small_disk);
}

/// Four times in a row something cannot be written, then there is room again. Whether the place was met, and
/// whether the daemon did not even start before.
fn refuse(name: &str, errno: i32) -> (bool, bool) {
    let mut fleet = Fleet::new(&Setup { slots: 2, ..Setup::default() });
    let trace = fleet.home().join("trace");
    let mut plan = vec![format!("{name}=errno:{errno}=1"); 4];
    plan.push(format!("trace={}", trace.display()));
    fleet.controller.set(failpoint::VARIABLE, &plan.join(","));
    fleet.controller.spawn();
    let mut job = Submission::new(&fleet, name);
    let (mut restarted, mut mended, begun) = (false, false, Instant::now());
    let over = within(SOON, || {
        // Each supervisor meets it anew, as on a disk that stays so: the job waits for that, until there is room.
        if name.starts_with("shim.") && !mended && begun.elapsed() > STAYS {
            mended = true;
            fleet.controller.kill();
            fleet.controller.set(failpoint::VARIABLE, "");
            fleet.controller.spawn();
        }
        if let Some(status) = fleet.controller.ended() {
            // Where there is no room for what a daemon needs to start, it says so and is started again.
            assert!(
                status.code().is_some_and(|code| [70, 75, 78, 1].contains(&code)),
                "it ended with {status}"
            );
            assert!(fleet.client.nodes().is_err(), "it ended while it served");
            restarted = true;
            fleet.controller.kill();
            fleet.controller.set(failpoint::VARIABLE, "");
            fleet.controller.spawn();
        }
        job.is_over(&fleet).then_some(())
    });
    let last = || job.name.as_ref().map(|job| fleet.client.try_job(job));
    assert!(over.is_some(), "the job does not end: {:?}", last());
    let pid = fleet.controller.pid();
    let name_of_job = job.name.expect("it is over");
    let dropped =
        |job: &str| String::from_utf8_lossy(&fleet.client.log(job, "job")).contains("were dropped here");
    if !dropped(&name_of_job) {
        truthful(&fleet, &name_of_job, crate::faults::sweep::LINES);
    }
    // Every supervisor begins the plan anew, so for their places there is room only after a start without it.
    if name.starts_with("shim.") {
        fleet.controller.set(failpoint::VARIABLE, "");
        fleet.controller.bounce();
        fleet.ready();
    }
    let pid = if name.starts_with("shim.") { fleet.controller.pid() } else { pid };
    // The errors that are left may hit the next jobs; then there is room, without a restart.
    let next = || {
        let job = fleet.client.run("echo next");
        let ended = fleet.client.ended(&job);
        let fault = ended.outcome.and_then(|outcome| outcome.fault);
        assert!(ended.state == "Completed" || fault.is_some(), "{job} failed and nobody says why");
        (ended.state == "Completed").then_some(())
    };
    assert!((0..6).any(|_| next().is_some()), "no job completes, though there is room again");
    assert_eq!((fleet.controller.ended(), fleet.controller.pid()), (None, pid), "the daemon ended");
    assert_eq!(panics(&fleet.controller), Vec::<String>::new());
    fleet.controller.kill();
    assert_eq!(broken_databases(&fleet.controller.state()), Vec::<String>::new());
    (trace.exists(), restarted)
}

/// A job fills the disk that the daemon lives on, another one writes, others are asked for; then there is room.
fn small_disk() {
    let disk = SmallDisk::mount("size=64m");
    let mut fleet = Fleet::new(&Setup::default());
    fleet.controller.set("AGENTD_DISK_RESERVE", "8m"); // it counts more than the file
    disk.hold(&fleet.controller);
    fleet.start();
    let kept = fleet.client.run("echo kept; echo x > outputs/x");
    assert_eq!(fleet.client.ended(&kept).state, "Completed");
    let writer = fleet.submit("--lines 4000 --rate 500");
    fleet.client.reached(&writer, &["Running"]);
    let gate = fleet.home().join("gate");
    let fill = format!(
        "head -c 200M /dev/zero > fill; touch {0}.full; while [ ! -e {0} ]; do sleep 0.1; done; rm fill",
        gate.display()
    );
    let fill = fleet.client.run(&fill);
    eventually("the disk is full", SOON, || gate.with_extension("full").exists().then_some(()));
    let full = Instant::now();
    while full.elapsed() < Duration::from_secs(4) {
        fleet.client.nodes().expect("an answer while the disk is full");
        assert_eq!(fleet.controller.ended(), None);
        std::thread::sleep(Duration::from_millis(200));
    }
    // It may be refused or may wait; it must be answered.
    let asked = fleet
        .client
        .try_submit("while-full", &JobDraft { command: "echo asked".into(), ..JobDraft::default() });
    fs::write(&gate, "").expect("a file");
    let room = Instant::now();
    fleet.client.ended(&fill);
    let after = fleet.client.run("echo after");
    assert_eq!(fleet.client.ended(&after).state, "Completed", "{:?}", fleet.client.job(&after));
    assert!(room.elapsed() < Duration::from_secs(40), "there has been room for {:?}", room.elapsed());
    if let Ok(job) = asked {
        assert_eq!(fleet.client.ended(&job).state, "Completed", "{:?}", fleet.client.job(&job));
    }
    let ended = fleet.client.ended(&writer);
    let log = fleet.client.log(&writer, "job");
    let lines = agent_tests::witness::lines(&log, 4000);
    let told = lines.strange.iter().any(|line| line.contains("dropped"));
    assert!(
        lines.is_whole() || told || ended.state == "Failed",
        "lines are missing and nobody says so: {lines:?}"
    );
    assert_eq!(fleet.client.log(&kept, "job"), b"kept\n");
    assert_eq!(panics(&fleet.controller), Vec::<String>::new());
    fleet.controller.kill();
    assert_eq!(broken_databases(&disk.path().join("controller")), Vec::<String>::new());
    assert_eq!(broken_databases(disk.path()), Vec::<String>::new());
}

/// Applies what the library recorded: what was to be written when it failed, and was not written again, is not
/// there after a power cut.
fn lose(record: &Path) -> u32 {
    let mut losses: Vec<(PathBuf, u64, u64, u64)> = Vec::new();
    for line in fs::read_to_string(record).unwrap_or_default().lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [what, path, inode, from, to] = fields[..] else { continue };
        let number = |text: &str| text.parse::<u64>().expect("a number");
        let (inode, from, to) = (number(inode), number(from), number(to));
        if what == "lost" {
            losses.push((path.into(), inode, from, to));
            continue;
        }
        let (ours, mut others): (Vec<_>, Vec<_>) = losses.into_iter().partition(|(_, of, _, _)| *of == inode);
        for (path, inode, begin, end) in ours {
            others.push((path.clone(), inode, begin, end.min(from)));
            others.push((path, inode, begin.max(to), end));
        }
        losses = others.into_iter().filter(|(_, _, begin, end)| begin < end).collect();
    }
    let mut lost = 0;
    for (path, inode, from, to) in losses {
        let Ok(file) = fs::File::options().write(true).open(path) else { continue };
        let found = file.metadata().expect("an open file");
        let to = to.min(found.len());
        // A file that was made anew since is another one.
        if found.ino() == inode && from < to {
            let zeros = vec![0; usize::try_from(to - from).expect("it fits")];
            file.write_all_at(&zeros, from).expect("the loss is written");
            lost += 1;
        }
    }
    lost
}

/// One forced write fails; then the power is cut and what the kernel had not written is gone.
fn lost_writes(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let mut lost = 0;
    for round in 0..scale.of(8, 60) {
        let (what, on_node) = [
            ("controller/archive", false),
            ("controller/db-wal", false),
            ("journal.db-wal", true),
            ("controller/db.redo", false),
        ][round % 4];
        let at = 1 + chance.below(scale.of(8, 25));
        tally.case(&format!("{what}, write {at}"), || {
            let mut fleet = Fleet::new(&Setup { nodes: 1, ..Setup::default() });
            let record = fleet.home().join("lost");
            let victim = if on_node { &mut fleet.nodes[0] } else { &mut fleet.controller };
            victim.set("LD_PRELOAD", &library().display().to_string());
            victim.set("LOSSY_MATCH", what);
            victim.set("LOSSY_AT", &at.to_string());
            victim.set("LOSSY_RECORD", &record.display().to_string());
            let mut lost_early = 0;
            fleet.controller.spawn();
            fleet.nodes.iter_mut().for_each(agent_tests::fleet::Daemon::spawn);
            let mut restart = |fleet: &mut Fleet| {
                for daemon in std::iter::once(&mut fleet.controller).chain(&mut fleet.nodes) {
                    if daemon.ended().is_some() {
                        // The power goes with it: the library knows only of the life that it was loaded into.
                        daemon.kill();
                        lost_early += lose(&record);
                        let _ = fs::remove_file(&record);
                        ["LD_PRELOAD", "LOSSY_MATCH"].iter().for_each(|name| daemon.set(name, ""));
                        daemon.spawn();
                    }
                }
            };
            let mut names = Vec::new();
            for number in 0..3 {
                let id = format!("{round}-{number}");
                let draft = fleet.draft("--lines 300 --seconds 0.4");
                names.push(eventually("the job is taken", SOON, || {
                    restart(&mut fleet); // a daemon may choose to end rather than to go on
                    fleet.client.try_submit(&id, &draft).ok()
                }));
            }
            let over = |fleet: &Fleet, job: &str| {
                fleet.client.try_job(job).ok().filter(agent_tests::client::is_over)
            };
            let before = eventually("the jobs end", SOON, || {
                restart(&mut fleet);
                names.iter().map(|job| over(&fleet, job)).collect::<Option<Vec<_>>>()
            });
            fleet.controller.kill();
            fleet.nodes.iter_mut().for_each(agent_tests::fleet::Daemon::kill);
            lost += lost_early + lose(&record);
            for daemon in std::iter::once(&mut fleet.controller).chain(&mut fleet.nodes) {
                ["LD_PRELOAD", "LOSSY_MATCH"].iter().for_each(|name| daemon.set(name, ""));
            }
            fleet.start();
            for (job, before) in names.iter().zip(before) {
                let after = fleet.client.ended(job);
                assert_eq!(after.state, before.state, "{job} changed its end");
                truthful(&fleet, job, 300);
            }
            assert_eq!(broken_databases(&fleet.controller.state()), Vec::<String>::new());
        });
    }
    tally.note(format!("{lost} times something was really gone from the disk"));
}

fn watchdog(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::new(&Setup { nodes: 1, ..Setup::default() });
    let manager = ServiceManager::of(&mut fleet.nodes[0]);
    fleet.start();
    tally.case("it says that it is ready", || {
        eventually("READY=1", SOON, || {
            manager.heard().iter().any(|said| said.starts_with("READY=1\n")).then_some(())
        });
    });
    let (time, least) = (Duration::from_secs(scale.of(4, 30)), scale.of(2, 20));
    tally.case("it feeds the watchdog", || assert!(manager.feeds_within(time) >= least));
    let job = fleet.submit("--lines 100 --seconds 8");
    fleet.client.reached(&job, &["Running"]);
    tally.case("also while its controller does not answer", || {
        fleet.controller.freeze();
        let pings =
            catch(|| assert!(manager.feeds_within(time) >= least, "a partition would restart the daemon"));
        fleet.controller.thaw();
        pings.unwrap_or_else(|why| panic!("{why}"));
    });
    tally.case("and no more once it is stuck", || {
        fleet.nodes[0].freeze();
        let pings = manager.feeds_within(time);
        fleet.nodes[0].thaw();
        assert!(pings <= 1, "{pings} pings of a process that does not run");
    });
    tally.case("a stop is announced", || {
        manager.heard();
        fleet.nodes[0].stop();
        assert!(manager.heard().iter().any(|said| said.starts_with("STOPPING=1")));
    });
    fleet.nodes[0].spawn();
    tally.case("the job did not notice", || crate::faults::judge::whole(&fleet, &job, 100));
}

fn catch(work: impl FnOnce()) -> Result<(), String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(|panic| said(&*panic))
}
