//! What a job puts in the place of its files. The daemon is root and the job is not: whatever the daemon opens for it,
//! it must not open what the job could not have opened itself.

use std::fs;
use std::path::Path;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, eventually};

use crate::boundaries::prey::{Prey, Probe, judge, nothing_setuid_below, script};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "L1",
        promise: "what lies in the place of outputs and logs leads the daemon nowhere",
        run: outputs,
    },
    Row {
        id: "L2",
        promise: "a job of another user reaches neither its supervisor nor what that trusts",
        run: inside,
    },
    Row {
        id: "L3",
        promise: "what the job does to the daemon's files and its own, while the daemon is away, ends nothing",
        run: away,
    },
];

/// From inside, as the job. The shell's parent is its supervisor.
const INSIDE: &[Probe] = &[
    ("what lies beside its part", "ls ../.. || ls ../../.."),
    ("the launch record", "cat ../../launch.json"),
    ("the hello record", "cat ../../hello.json"),
    ("the order", "cat ../../order.json"),
    ("the log of the supervisor", "cat ../../shim.log"),
    ("its own log", "ls ../../log || cat ../../log/job/00000000000000000000.seg"),
    ("an exit record of its own", "echo '{}' > ../../exit.json"),
    ("its exit record, reserved", "echo x > ../../exit.tmp"),
    ("a file beside its part", "touch ../../x || mkdir ../../x || ln -s /etc ../../x"),
    ("its part in another place", "mv ../../job ../../gone"),
    ("the folders of its part", "mv ../artifacts ../gone || rmdir ../artifacts || ln -s $FOLDER ../x"),
    ("its directory", "mv ../.. ../../../gone"),
    (
        "the supervisor's socket",
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"../../shim.sock\")'",
    ),
    ("another socket in its place", "rm -f ../../shim.sock || mv ../../shim.sock ../../gone"),
    ("the lock", "python3 -c 'import fcntl; fcntl.flock(open(\"../..\"), fcntl.LOCK_EX)'"),
    (
        "a signal to the supervisor",
        "kill -TERM $(ps -o ppid= -p $PPID) || kill -STOP $(ps -o ppid= -p $PPID)",
    ),
    ("the memory of the supervisor", "cat /proc/$(ps -o ppid= -p $PPID | tr -d ' ')/mem"),
    ("the variables of the daemon", "cat /proc/$(pgrep -x agentd | head -1)/environ | grep ."),
    ("the files of the daemon", "ls /proc/$(pgrep -x agentd | head -1)/fd/ | grep ."),
    ("the state of the daemon", "ls ../../../../journal.db && cat ../../../../journal.db"),
    ("other jobs", "ls ../../../"),
    ("a program with the rights of root", "cp /bin/sh s && chown 0:0 s && chmod 4755 s"),
    ("rights by a program that has them", "su -c true root || sudo -n true"),
    ("new privileges", "grep 'NoNewPrivs:.0' /proc/self/status"),
    ("the metrics file is a link", "ln -sf $TARGET $AGENTD_METRICS"),
    ("the metrics file is a pipe", "rm $AGENTD_METRICS && mkfifo $AGENTD_METRICS"),
    ("the files of others", "cat $SECRET || echo x > $TARGET || touch $FOLDER/x"),
];

fn inside(tally: &mut Tally, _: &Scale) {
    let host = root_daemon();
    let prey = Prey::new();
    let dir = host.project("inside", &[("attack", &format!("{}\n{}", prey.names(), script(INSIDE)))]);
    let ran = host.ctl(&["run", dir.to_str().expect("UTF-8"), "--", "sh", "attack"]);
    judge(tally, "host", INSIDE, &ran.stdout);
    tally.case("what was not the job's is as it was", || {
        prey.is_untouched();
        prey.not_in(&ran.stdout, "the log");
        nothing_setuid_below(&host.state());
    });
}

/// What is done to files of a job that runs, while nobody looks. The last word is the daemon's, and the job goes on;
/// and how it ends: a folder that is not the job's own is no output of it, and told as lost.
const AWAY: &[(&str, &str, &str)] = &[
    ("the log of the supervisor is removed", "rm shim.log", "Completed"),
    ("it is a link", "rm shim.log; ln -s $SECRET shim.log", "Completed"),
    ("it is a pipe", "rm shim.log; mkfifo shim.log", "Completed"),
    ("the hello record is a link", "ln -sf $SECRET hello.json", "Completed"),
    ("the launch record is a link", "rm launch.json; ln -s $SECRET launch.json", "Completed"),
    ("the metrics file is a pipe", "rm job/tracking.jsonl; mkfifo job/tracking.jsonl", "Completed"),
    ("the metrics file is a link", "rm job/tracking.jsonl; ln -s $SECRET job/tracking.jsonl", "Completed"),
    ("the artifacts are a link", "rm -rf job/artifacts; ln -s $FOLDER/.. job/artifacts", "Failed"),
];

fn away(tally: &mut Tally, _: &Scale) {
    for (what, script, end) in AWAY {
        tally.case(what, || {
            let (mut host, prey) = (root_daemon(), Prey::new());
            let go = host.home().join("go");
            let job = host.submit(&format!(
                "echo up; while ! [ -e {} ]; do sleep 0.05; done; echo kept > outputs/a",
                go.display()
            ));
            eventually("it runs", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
            host.kill();
            shell(&host.state().join(format!("jobs/{job}.1.0")), &format!("{}{script}", prey.names()));
            host.start();
            fs::write(&go, "").expect("the sign to end");
            assert_eq!(host.wait_for(&job, &["Completed", "Failed", "Canceled"]), *end);
            let to = host.home().join("got");
            host.ctl(&["download", &job, "-o", to.to_str().expect("UTF-8")]).ok();
            assert_eq!(fs::read_to_string(to.join("outputs/a")).expect("an output"), "kept\n");
            prey.not_below(&to);
            for command in ["why", "metrics", "logs"] {
                let ran = host.ctl(&[command, &job]);
                prey.not_in(&format!("{}{}", ran.stdout, ran.stderr), command);
            }
            prey.is_untouched();
        });
    }
}

#[allow(clippy::disallowed_methods, reason = "does as root what an attacker would have got done")]
fn shell(dir: &Path, script: &str) {
    let done = std::process::Command::new("sh").arg("-c").arg(script).current_dir(dir).status();
    assert!(done.is_ok_and(|status| status.success()), "the attack itself failed");
}

/// A box whose daemon is root, and whose jobs are not.
pub(crate) fn root_daemon() -> Host {
    let mut host = Host::for_everybody();
    host.set("AGENTD_JOB_USER", "nobody");
    host.start();
    host
}

/// What is left where outputs belong. `$SECRET`, `$TARGET` and `$FOLDER` are not the job's.
const LEFT: &[(&str, &str)] = &[
    ("a link to a file", "ln -s $SECRET outputs/a"),
    ("a link to a folder", "ln -s $FOLDER/.. outputs/a"),
    ("a link in the place of the outputs", "rmdir outputs && ln -s $FOLDER/.. outputs"),
    ("a link in the place of the logs", "rmdir logs && ln -s $FOLDER/.. logs"),
    ("a relative link", "ln -s ../../../../../../../../../../..$SECRET outputs/a"),
    ("a link by /proc", "ln -s /proc/self/root$SECRET outputs/a"),
    ("a chain of links", "ln -s $SECRET outputs/z; for i in $(seq 30); do ln -s z outputs/l$i; done"),
    ("a folder of links", "mkdir outputs/d; ln -s $FOLDER/.. outputs/d/e; ln -s e/secret outputs/d/f"),
    ("a hard link", "ln $SECRET outputs/a"),
    ("a hard link to a file of the daemon", "ln ../../launch.json outputs/a"),
    ("a link to a file of the daemon", "ln -s ../../../launch.json outputs/a"),
    ("a link to the folder of the daemon", "rmdir outputs && ln -s ../.. outputs"),
    ("a pipe", "mkfifo outputs/a logs/b"),
    ("a device", "mknod outputs/a c 1 3"),
    ("a socket", "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"outputs/a\")'"),
];

fn outputs(tally: &mut Tally, _: &Scale) {
    let host = root_daemon();
    for (number, (what, script)) in LEFT.iter().enumerate() {
        tally.case(what, || {
            let prey = Prey::new();
            let (job, _) = attack(&host, &prey, script);
            let to = host.home().join(format!("got-{number}"));
            host.ctl(&["download", &job, "-o", to.to_str().expect("UTF-8")]);
            prey.not_below(&to);
            prey.not_in(&host.ctl(&["why", &job]).stdout, "why");
            prey.is_untouched();
        });
    }
}

/// Runs a script as a job, to its end; its name and its state.
#[track_caller]
pub(crate) fn attack(host: &Host, prey: &Prey, script: &str) -> (String, String) {
    let job = host.submit(&format!("{}{script}; :", prey.names()));
    let state = host.wait_for(&job, &["Completed", "Failed", "Canceled"]);
    prey.not_in(&host.ctl(&["logs", &job]).stdout, "the log");
    (job, state)
}
