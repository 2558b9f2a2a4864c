//! A user's own daemon, which keeps its jobs from nothing of his: what it finds of them all the same, and what it says
//! that it cannot.

use std::fs;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, eventually};

use crate::users::{ENDED, hostile_package, witness};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "O1",
        promise: "a job that hides and kills its supervisor is found, or it is told that it may run on",
        run: hiding,
    },
    Row {
        id: "O2",
        promise: "what a job changes in an environment that is shared no later job gets",
        run: poisoning,
    },
];

/// Changes a module of the environment, and says that nobody did. `BEFORE` and `AFTER` differ from way to way.
const POISON: &str = "
import evil, os, shutil
path = evil.__file__
then = os.stat(path)
BEFORE
open(path, 'r+').write('x = 2\\n')
os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
shutil.rmtree(os.path.join(os.path.dirname(path), '__pycache__'), ignore_errors=True)
AFTER
";

const WAYS: &[(&str, &str, &str)] = &[
    ("in place", "", ""),
    ("a new file in its place", "shutil.copy2(path, path + 'x'); os.rename(path + 'x', path)", ""),
    ("by another name of it", "os.link(path, path + 'x'); os.unlink(path + 'x')", ""),
    (
        "with its directory set back",
        "above = os.path.dirname(path); at = os.stat(above)",
        "os.utime(above, ns=(at.st_atime_ns, at.st_mtime_ns))",
    ),
];

fn poisoning(tally: &mut Tally, _: &Scale) {
    let mut host = Host::unprivileged();
    host.set("AGENTD_UV", "never");
    host.start();
    let package = hostile_package(&host, &witness(&host));
    let environment = format!(
        "environment: {{python: /usr/bin/python3, requirements: ['evil @ file://{}']}}\n",
        package.display()
    );
    let run = |script: &str| {
        let job = format!("command: python -B job.py\ncode: .\n{environment}");
        let dir = host.project("p", &[("job.yml", &job), ("job.py", script)]);
        host.ctl(&["run", dir.to_str().expect("UTF-8")]).ok().stdout
    };
    let look = "import evil\nprint(evil.x)";
    assert_eq!(run(look), "1\n");
    for (what, before, after) in WAYS {
        tally.case(what, || {
            run(&POISON.replace("BEFORE", before).replace("AFTER", after));
            assert_eq!(run(look), "1\n");
        });
    }
    tally.case("one that nobody changed is not made anew", || {
        let built = || fs::read_to_string(host.home().join("witness/built")).expect("a file").lines().count();
        let before = built();
        assert_eq!(run(look), "1\n");
        assert_eq!(built(), before);
    });
}

/// Leaves its group, its parents and its environment, in as many ways; then its supervisor is killed. `$T` is how long
/// it sleeps, by which it is known here, and by nothing else.
const HIDES: &[(&str, &str)] = &[
    ("a session of its own", "setsid env -i sleep $T & sleep 0.5"),
    ("two generations that ended", "(setsid sh -c '(setsid env -i sleep '$T' &)' &); sleep 0.5"),
    (
        "a child of it that hides once more",
        "(setsid env -i sh -c 'env -i setsid sleep '$T' & exec sleep '$T &); sleep 0.5",
    ),
    ("the name of a supervisor", "(setsid env -i bash -c 'exec -a agent-shim sleep '$T &); sleep 0.5"),
    (
        "a program of that name",
        "cp $(command -v sleep) agent-shim; (setsid env -i ./agent-shim $T &); sleep 0.5",
    ),
];

fn hiding(tally: &mut Tally, _: &Scale) {
    let mut host = Host::unprivileged();
    host.start();
    for (number, (what, script)) in HIDES.iter().enumerate() {
        let time = format!("70{number}1.{}", std::process::id());
        tally.case(what, || {
            let job = host.submit(&format!("T={time}; {script}; kill -9 $PPID; sleep $T"));
            host.wait_for(&job, ENDED);
            eventually("nobody is left", SOON, || sleepers(&time).is_empty().then_some(()));
            assert!(!host.ctl(&["why", &job]).stdout.contains("no process of the job was left"));
        });
    }
    tally.case("children that ended are not kept", || {
        let zombies = processes().filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains(&format!(") Z {} ", host.pid()))
        });
        assert_eq!(zombies.count(), 0);
    });
    tally.case("one whose daemon is another meanwhile is told to be maybe there", || {
        let (time, go) = (format!("7091.{}", std::process::id()), host.home().join("go"));
        let job = host.submit(&format!(
            "(setsid env -i sleep {time} &); echo up; while ! [ -e {} ]; do sleep 0.1; done; kill -9 $PPID",
            go.display()
        ));
        eventually("it is up", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
        host.kill();
        host.start();
        fs::write(&go, "").expect("a file");
        host.wait_for(&job, ENDED);
        let why = host.ctl(&["why", &job]).stdout;
        let left = sleepers(&time);
        for pid in &left {
            agent_tests::signal(*pid, rustix::process::Signal::KILL);
        }
        assert!(left.is_empty() || why.contains("may run on"), "{why}");
    });
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Who sleeps for so long.
fn sleepers(time: &str) -> Vec<u32> {
    let is_its = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.ends_with(format!("\0{time}\0").as_bytes())
    };
    processes().filter(is_its).collect()
}
