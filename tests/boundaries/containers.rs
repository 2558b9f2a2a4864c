//! Images and jobs in containers against the supervisor, the machine and other containers. For a daemon of root, whose
//! jobs are somebody else in a container, and for an ordinary user's own, whose jobs are that user there as well.

#![allow(clippy::disallowed_methods, reason = "makes hostile programs with the compiler of the machine")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use agent_tests::docker::Docker;
use agent_tests::engine::Engine;
use agent_tests::images::{Image, Root};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, eventually};
use serde_json::Value;

use crate::boundaries::prey::{Prey, Probe, judge, nothing_setuid_below, script};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "C1",
        promise: "root's daemon: a job in a container reaches neither its supervisor nor what that trusts",
        run: |tally, _| inside(tally, Owner::Root),
    },
    Row {
        id: "C2",
        promise: "a user's daemon: a job that is the same user in a container does not either",
        run: |tally, _| inside(tally, Owner::User),
    },
    Row {
        id: "C3",
        promise: "nothing of a hostile image runs as anybody but the job",
        run: |tally, _| [Owner::Root, Owner::User].into_iter().for_each(|owner| images(tally, owner)),
    },
    Row {
        id: "C4",
        promise: "a user's daemon: links in the job's part lead neither the endpoint nor the outputs out of it",
        run: endpoint,
    },
    Row {
        id: "C5",
        promise: "containers that are not the job's stay, whatever its files say",
        run: strangers,
    },
];

/// Whose daemon it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Root,
    User,
}

/// A box beside the engine that all rows share, and what is not its jobs'.
struct Cage {
    host: Host,
    docker: Docker,
    prey: Prey,
    owner: Owner,
}

impl Drop for Cage {
    fn drop(&mut self) {
        let left = self.docker.containers_of(self.host.home());
        left.iter().for_each(|container| self.docker.remove(&container.id));
    }
}

const BUSYBOX: &str = "agentd-test/busybox:1";

/// `get PATH`: an artifact of the run from the tracking endpoint.
const GET: &str = r#"
AT=$MLFLOW_TRACKING_URI/api/2.0/mlflow-artifacts/artifacts
RUN=$MLFLOW_EXPERIMENT_ID/$MLFLOW_RUN_ID/artifacts
ask() { wget -q -O - --header "Authorization: Bearer $MLFLOW_TRACKING_TOKEN" "$@"; }
get() { ask "$AT/$RUN/$1"; }
list() { ask "$AT?path=$RUN/$1"; }
send() { # METHOD PATH TEXT
    host=${MLFLOW_TRACKING_URI#http://}
    { printf '%s %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: %s\r\nConnection: close\r\n\r\n%s' \
        "$1" "/api/2.0/mlflow-artifacts/artifacts/$RUN/$2" "$host" "$MLFLOW_TRACKING_TOKEN" "${#3}" "$3"; sleep 0.2; } |
        nc "${host%:*}" "${host#*:}" | head -1 | grep ' 200 '
}
D=$(dirname $AGENTD_METRICS)
"#;

impl Cage {
    fn new(owner: Owner) -> Cage {
        let docker = Engine::shared();
        Image::Busybox.on(&docker);
        // An ordinary user who may use the engine, as members of the group `docker` may.
        let socket = docker.socket();
        for (path, mode) in [(socket.parent().expect("a directory"), 0o711), (socket, 0o666)] {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("the engine of the tests");
        }
        let (mut host, prey) = match owner {
            Owner::Root => (Host::for_everybody(), Prey::new()),
            Owner::User => (Host::unprivileged(), Prey::of(65_534)),
        };
        host.set("AGENTD_DOCKER_SOCKET", socket.to_str().expect("UTF-8"));
        host.start();
        Cage { host, docker, prey, owner }
    }

    /// Submits a script that an image runs; the job's name.
    #[track_caller]
    fn submit(&self, name: &str, image: &str, script: &str) -> String {
        let command = Value::from("sh ./attack");
        let job = format!("command: {command}\ncode: .\nenvironment: {{image: '{image}'}}\n");
        let script = format!("{}{GET}{script}", self.prey.names());
        let dir = self.host.project(name, &[("job.yml", job.as_str()), ("attack", script.as_str())]);
        self.host.ctl(&["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned()
    }

    /// Runs it to its end; what it printed.
    #[track_caller]
    fn run(&self, name: &str, image: &str, script: &str) -> String {
        let job = self.submit(name, image, script);
        self.host.wait_for(&job, &["Completed", "Failed", "Canceled"]);
        let printed = self.host.ctl(&["logs", &job]).stdout;
        if printed.is_empty() { self.host.ctl(&["why", &job]).stdout } else { printed }
    }

    /// Fails if anything was got at.
    #[track_caller]
    fn holds(&self) {
        self.prey.is_untouched();
        self.prey.not_below(&self.host.state());
        nothing_setuid_below(&self.host.state());
    }
}

/// From inside, as the job.
const INSIDE: &[Probe] = &[
    ("the launch record beside its part", "cat $D/../launch.json"),
    ("any file of the supervisor", "find / -xdev -name launch.json -o -xdev -name shim.log | grep ."),
    ("a file beside its part", "echo x > $D/../exit.json"),
    ("its part in another place", "mv $D $D.gone"),
    ("a mount of its own", "mkdir -p m && mount -t tmpfs none m"),
    ("its part mounted over", "mount --bind / $D"),
    ("its part unmounted", "umount $D || umount -l $D"),
    ("the directory of the first process", "ls /proc/1/cwd/ | grep launch"),
    ("a file by the directory of the first process", "cat /proc/1/cwd/launch.json"),
    ("the machine by the root of the first process", "cat /proc/1/root/etc/hostname || ls /proc/1/root/"),
    ("the machine above the directory of the first process", "cat /proc/1/cwd/../../../../../../etc/passwd"),
    ("the open files of the first process", "ls /proc/1/fd/ | grep ."),
    ("its memory", "dd if=/proc/1/mem of=/dev/null bs=1 count=1 skip=4194304"),
    ("its maps", "grep . /proc/1/maps"),
    ("its variables", "grep . /proc/1/environ"),
    ("its threads", "cat /proc/1/task/1/environ || ls /proc/1/task/1/fd/ | grep ."),
    ("its namespaces", "nsenter -t 1 -m true || nsenter -t 1 -p true"),
    (
        "a kill of the first process",
        "kill -KILL 1; kill -STOP 1; kill -SEGV 1; kill -QUIT 1; sleep 0.2; ! kill -0 1 2>/dev/null && ! [ -d /proc/1 ]",
    ),
    ("its score", "echo 1000 > /proc/1/oom_score_adj"),
    ("the program of the supervisor", "echo x >> /.agentd/agent-shim"),
    ("the program of the supervisor, by what runs", "echo x >> /proc/1/exe"),
    ("another program in its place", "rm -f /.agentd/agent-shim || mv /.agentd /agentd"),
    ("a second supervisor at its door", "/.agentd/agent-shim --door /.agentd/door $D"),
    ("a second supervisor in its part", "cd / && /.agentd/agent-shim $D"),
    ("the door", "nc local:/.agentd/door </dev/null"),
    ("a device of the machine", "mknod disk b 8 0 || mknod mem c 1 1"),
    ("a program with the rights of root", "cp /bin/busybox shell && chown 0:0 shell && chmod 4755 shell"),
    ("a user namespace", "unshare -r true"),
    ("a mount namespace", "unshare -m true"),
    ("another root", "chroot / true"),
    (
        "a capability",
        "grep -E '^Cap(Prm|Eff|Inh|Amb|Bnd):' /proc/self/status | grep -v 0000000000000000 | grep -v CapBnd",
    ),
    ("new privileges", "grep 'NoNewPrivs:.0' /proc/self/status"),
    ("the container engine", "ls /var/run/docker.sock /run/docker.sock"),
    ("the name of the machine", "hostname changed"),
    ("settings of the kernel", "echo 1 > /proc/sys/kernel/panic || echo b > /proc/sysrq-trigger"),
    ("the groups of the machine", "mkdir /sys/fs/cgroup/x || mkdir /sys/fs/cgroup/memory/x"),
    ("the files of others", "cat $SECRET || ls $FOLDER"),
    ("the files of others, by links", "ln -s $SECRET l && cat l"),
];

fn inside(tally: &mut Tally, owner: Owner) {
    let cage = Cage::new(owner);
    let printed = cage.run("inside", BUSYBOX, &script(INSIDE));
    judge(tally, &format!("{owner:?}"), INSIDE, &printed);
    tally.case("what was not the job's is as it was", || {
        cage.holds();
        cage.prey.not_in(&printed, "the log");
    });
}

/// A library that a loader is told to load, wherever it is: it leaves a program with root's rights where it can.
const PRELOADED: &str = r#"
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) {
    char line[8192]; int fd = open("/proc/self/cmdline", O_RDONLY);
    long count = read(fd, line, sizeof line - 1); char *last = line;
    for (long at = 0; at + 1 < count; at++) if (!line[at]) last = line + at + 1;
    if (chdir(last)) return;
    int file = open("pwned", O_CREAT | O_WRONLY, 0755);
    fchmod(file, 04755); close(file);
}
"#;

/// A program that says whether it can become root.
const CLIMBER: &str = r#"
#include <unistd.h>
int main(void) { return !(setuid(0) == 0 || seteuid(0) == 0 || setgid(0) == 0); }
"#;

fn compiled(source: &str, options: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a directory");
    let (from, to) = (dir.path().join("a.c"), dir.path().join("a"));
    fs::write(&from, source).expect("a file");
    let made = Command::new("cc").args(options).arg("-o").arg(&to).arg(&from).status().expect("a compiler");
    assert!(made.success(), "the hostile program does not compile");
    fs::read(to).expect("a program")
}

/// What an image has, beside the usual tools.
fn hostile() -> Vec<(&'static str, Root)> {
    let preloaded = compiled(PRELOADED, &["-shared", "-fPIC"]);
    let mut images = Vec::new();
    let mut preload = Root::new();
    preload.file("evil.so", 0o755, &preloaded);
    preload.file("etc/ld.so.preload", 0o644, b"/evil.so\n");
    images.push(("preload", preload));
    let mut libraries = Root::new();
    for name in ["lib64/ld-linux-x86-64.so.2", "lib/ld-musl-x86_64.so.1", "lib/x86_64-linux-gnu/libc.so.6"] {
        libraries.file(name, 0o755, &preloaded);
    }
    libraries.file("etc/ld.so.conf", 0o644, b"/lib\n");
    images.push(("libraries", libraries));
    let mut climber = Root::new();
    climber.file("climb", 0o4755, &compiled(CLIMBER, &["-static"]));
    images.push(("setuid", climber));
    let mut place = Root::new();
    place.dir("elsewhere", 0o777);
    place.link(".agentd", "elsewhere");
    images.push(("a link in the place of the supervisor", place));
    let mut ready = Root::new();
    ready.dir(".agentd", 0o777);
    ready.file(".agentd/agent-shim", 0o755, b"#!/bin/sh\nexec sh\n");
    images.push(("another supervisor", ready));
    images
}

fn images(tally: &mut Tally, owner: Owner) {
    let cage = Cage::new(owner);
    for (number, (what, root)) in hostile().into_iter().enumerate() {
        let tag = format!("agentd-test/hostile-{}-{number}:1", owner as u8);
        cage.docker.layer(BUSYBOX, root.finish(), &tag);
        tally.case(&format!("{owner:?}: {what}"), || {
            // What it left goes with the job's directory.
            let look = "/climb && echo BROKE; find / -xdev -name pwned | grep . && echo BROKE; [ -e $D/pwned ] && echo BROKE; echo ran";
            let printed = cage.run(&format!("image-{number}"), &tag, look);
            assert!(printed.contains("ran") && !printed.contains("BROKE"), "{printed}");
            cage.holds();
        });
        cage.docker.remove_image(&tag);
    }
    tally.case(&format!("{owner:?}: an image with nothing in it"), || {
        Image::Scratch.on(&cage.docker);
        let job = cage.submit("scratch", Image::Scratch.tag(), "");
        cage.host.wait_for(&job, &["Failed"]);
        let why = cage.host.ctl(&["why", &job]).stdout;
        assert!(why.contains("RUN-102") || why.contains("sh"), "{why}");
    });
}

/// By the endpoint, which the daemon answers with its own rights.
const ENDPOINT: &[Probe] = &[
    (
        "the folder of artifacts is a link",
        "rm -rf $D/artifacts; ln -s $FOLDER/.. $D/artifacts; get secret || get folder/secret",
    ),
    ("the same, listed", "list '' | grep secret"),
    ("the same, written", "send PUT folder/made text; get folder/made"),
    ("the same, removed", "send DELETE target; false"),
    ("a link to a file", "rm -rf $D/artifacts; mkdir $D/artifacts; ln -s $SECRET $D/artifacts/a; get a"),
    ("a link to a folder", "ln -s $FOLDER/.. $D/artifacts/d; get d/secret || list d | grep secret"),
    ("a link to a folder, written", "send PUT d/folder/made text; get d/folder/made"),
    (
        "a link to a file, written",
        "ln -s $TARGET $D/artifacts/w; send PUT w changed; cat $D/artifacts/w | grep -v changed",
    ),
    ("a link by /proc", "ln -s /proc/self/root$SECRET $D/artifacts/p; get p"),
    ("a pipe", "mkfifo $D/artifacts/f; get f"),
    ("the folder itself is a pipe", "rm -rf $D/artifacts; mkfifo $D/artifacts; get a || list '' | grep path"),
    ("the folder itself is a file", "rm -rf $D/artifacts; echo x > $D/artifacts; get a"),
    (
        "the way out by names",
        "rm -rf $D/artifacts; mkdir $D/artifacts; get ..%2f..%2flaunch.json || get ../../launch.json",
    ),
    (
        "the metrics file is a link",
        "rm $AGENTD_METRICS; ln -s $TARGET $AGENTD_METRICS; ask --post-data '{\"run_id\":\"'$MLFLOW_RUN_ID'\",\"key\":\"k\",\"value\":\"v\"}' $MLFLOW_TRACKING_URI/api/2.0/mlflow/runs/set-tag",
    ),
    (
        "the metrics file is a pipe",
        "rm -rf $AGENTD_METRICS; mkfifo $AGENTD_METRICS; ask --post-data '{\"run_id\":\"'$MLFLOW_RUN_ID'\",\"key\":\"k\",\"value\":\"v\"}' $MLFLOW_TRACKING_URI/api/2.0/mlflow/runs/set-tag",
    ),
    (
        "the metrics file is a folder",
        "rm -rf $AGENTD_METRICS; mkdir $AGENTD_METRICS; ask --post-data '{\"run_id\":\"'$MLFLOW_RUN_ID'\",\"key\":\"k\",\"value\":\"v\"}' $MLFLOW_TRACKING_URI/api/2.0/mlflow/runs/set-tag",
    ),
];

/// A folder and a link change places all the time, while the endpoint is asked for what the link leads to.
const RACE: &str = r#"
rm -rf $D/artifacts; mkdir $D/artifacts $D/real; ln -s $FOLDER/.. $D/link
(while [ ! -e stop ]; do mv $D/artifacts $D/aside; mv -T $D/link $D/artifacts; mv -T $D/artifacts $D/link; mv -T $D/aside $D/artifacts; done) &
for i in $(seq TRIES); do get secret; list ''; done
touch stop; wait; echo raced
"#;

fn endpoint(tally: &mut Tally, scale: &Scale) {
    let cage = Cage::new(Owner::User);
    let printed = cage.run("endpoint", BUSYBOX, &script(ENDPOINT));
    judge(tally, "endpoint", ENDPOINT, &printed);
    tally.case("what was not the job's is as it was", || {
        cage.holds();
        cage.prey.not_in(&printed, "the log");
    });
    let tries = scale.of(150, 1000);
    let raced = cage.run("race", BUSYBOX, &RACE.replace("TRIES", &tries.to_string()));
    let held = raced.contains("raced") && !raced.contains("prey") && !raced.contains("secret");
    let complaints = if held { vec![] } else { vec![raced] };
    tally.count(2 * tries, "a folder and a link change places", &complaints);
    let left = [
        ("the outputs are a link", "rmdir outputs; ln -s $FOLDER/.. outputs"),
        ("the logs are a link", "rmdir logs; ln -s $FOLDER/.. logs"),
        ("all of the code is a link", "cd $D; mv work gone; ln -s $FOLDER/.. work"),
        ("the home is a link", "rm -rf $D/home; ln -s $FOLDER $D/home"),
        ("the outputs are the artifacts", "rm -rf $D/artifacts; ln -s $FOLDER/.. $D/artifacts"),
        (
            "a link to the files of the daemon",
            "ln -s ../../../launch.json outputs/a; ln -s ../../../shim.log logs/b",
        ),
        ("a hard link to the metrics", "ln $AGENTD_METRICS outputs/a; rm $AGENTD_METRICS"),
    ];
    for (number, (what, script)) in left.iter().enumerate() {
        tally.case(what, || {
            let job = cage.submit(&format!("left-{number}"), BUSYBOX, script);
            cage.host.wait_for(&job, &["Completed", "Failed"]);
            let to = cage.host.home().join(format!("got-{number}"));
            cage.host.ctl(&["download", &job, "-o", to.to_str().expect("UTF-8")]);
            cage.prey.not_below(&to);
            assert!(!to.join("outputs/a").exists() || !read(&to.join("outputs/a")).contains("argv"));
            cage.holds();
        });
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn strangers(tally: &mut Tally, _: &Scale) {
    let cage = Cage::new(Owner::Root);
    let named = [("by number", true), ("by name", false)];
    for (number, (what, by_number)) in named.into_iter().enumerate() {
        let name = format!("agentd-test-stranger-{number}");
        let stranger = cage.docker.create(&name, BUSYBOX, &["sleep", "1000"], &[("agentd.test", "stranger")]);
        cage.docker.start(&stranger);
        tally.case(&format!("a stranger's container is named {what}"), || {
            let job = cage.submit(&format!("names-{number}"), BUSYBOX, "echo up; sleep 1000");
            eventually("it runs", SOON, || {
                cage.host.ctl(&["logs", &job]).stdout.contains("up").then_some(())
            });
            let note = cage.host.state().join(format!("jobs/{job}.1.0/container.json"));
            let mut said: Value = serde_json::from_str(&read(&note)).expect("a record");
            said["id"] = Value::from(if by_number { stranger.as_str() } else { "" });
            said["name"] = Value::from(name.as_str());
            fs::write(&note, said.to_string()).expect("root may write");
            cage.host.ctl(&["cancel", &job]).ok();
            cage.host.wait_for(&job, &["Canceled"]);
            std::thread::sleep(std::time::Duration::from_millis(500));
            let state = cage.docker.inspect(&stranger).and_then(|found| found.state);
            assert_eq!(state.and_then(|state| state.running), Some(true), "it was ended or removed");
        });
        cage.docker.remove(&stranger);
    }
    assert_eq!(cage.owner, Owner::Root);
}
