//! Whom jobs and builders run as: what the job of one user tries on that of another, on builders, and on the daemon.
//!
//! The daemon is that of a machine which several people use. Its state is not below `/tmp`, so that jobs have places of
//! their own there.

#![allow(clippy::disallowed_methods, reason = "is a client and a neighbour that no daemon starts")]

use std::fs::{self, Permissions};
use std::io::Write;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use agent_tests::engine::Engine;
use agent_tests::images::Image;
use agent_tests::split::serve;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, Ran, eventually, finish};

use crate::boundaries::prey::{VANDAL, is_whole};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "U1",
        promise: "a job runs as its owner, with his groups and without a right of root's",
        run: who,
    },
    Row {
        id: "U2",
        promise: "a job reaches nothing of a job of another user, of one group or not",
        run: others,
    },
    Row { id: "U3", promise: "jobs with users of their own are apart, across restarts too", run: per_run },
    Row {
        id: "U4",
        promise: "jobs of root are refused where others have jobs, and root is told how",
        run: roots,
    },
    Row {
        id: "U5",
        promise: "builders and interpreters are nobody, and what they make is the daemon's",
        run: builders,
    },
    Row {
        id: "U6",
        promise: "each job has its own /tmp and /dev/shm, and sees its own processes",
        run: places,
    },
    Row { id: "U7", promise: "secrets are told to jobs of their owner and are nowhere else", run: secrets },
    Row {
        id: "U9",
        promise: "in a container a job has the number of its owner, and root's has nobody's",
        run: containers,
    },
];

pub(crate) const NOBODY: u32 = 65_534;
/// A user of every machine whose group is that of nobody.
const SYNC: u32 = 4;
pub(crate) const GAMES: u32 = 5;
pub(crate) const ENDED: &[&str] = &["Completed", "Failed", "Canceled"];

/// The daemon of a machine that the members of `nogroup` may use.
pub(crate) fn shared(settings: &[(&str, &str)]) -> Host {
    shared_by("", settings)
}

/// The same, where these words start the program of the daemon, in its home.
fn shared_by(starter: &str, settings: &[(&str, &str)]) -> Host {
    let mut host = Host::for_everybody_below(Path::new("/var/tmp"));
    let socket = host.home().join("run.sock");
    let set: String = settings.iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect();
    let state = host.state();
    let script = format!(
        "#!/bin/sh\nexport AGENTD_SOCKET_GROUP=nogroup\n{set}exec {starter} \"$1\" run --state-dir {} --socket {}\n",
        state.display(),
        socket.display()
    );
    serve(&mut host, &script, &socket, &[NOBODY, SYNC, GAMES]);
    host
}

fn client(host: &Host, user: u32, arguments: &[&str]) -> Command {
    let theirs = host.home().join(user.to_string());
    let mut command = host.client(arguments);
    command.uid(user).gid(NOBODY).env("HOME", &theirs).env("XDG_CACHE_HOME", theirs.join("cache"));
    command.current_dir(&theirs);
    command
}

/// `agentctl` as somebody else.
pub(crate) fn by(host: &Host, user: u32, arguments: &[&str]) -> Ran {
    finish(&mut client(host, user, arguments))
}

/// A job of somebody: what its file says beside the command.
#[track_caller]
pub(crate) fn submitted(host: &Host, user: u32, command: &str, more: &str) -> String {
    let ran = try_submit(host, user, command, more).ok();
    ran.stdout.trim().to_owned()
}

fn try_submit(host: &Host, user: u32, command: &str, more: &str) -> Ran {
    let dir = host.home().join(user.to_string()).join("p");
    fs::create_dir_all(&dir).expect("a directory");
    let command = serde_json::to_string(command).expect("JSON");
    let usual = if more.contains("environment:") { "" } else { "environment: host\n" };
    fs::write(dir.join("job.yml"), format!("command: {command}\ncode: .\n{usual}{more}")).expect("a file");
    by(host, user, &["submit", dir.to_str().expect("UTF-8")])
}

/// What a job of somebody printed.
#[track_caller]
fn says(host: &Host, user: u32, command: &str) -> String {
    let job = submitted(host, user, command, "");
    host.wait_for(&job, ENDED);
    host.ctl(&["logs", &job]).ok().stdout
}

fn job_dir(host: &Host, job: &str) -> PathBuf {
    let jobs = host.state().join("jobs");
    let entries = fs::read_dir(jobs).expect("a directory").flatten().map(|entry| entry.path());
    let is_its =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(job));
    entries.into_iter().find(is_its).expect("the directory of a job")
}

/// Starts the daemon with groups of its own, `adm` and `sudo`, where `games` is a member of two others.
const WITH_GROUPS: &str = "setpriv --groups 4,27 unshare --mount sh -c 'sed \"s/^audio:.*/audio:x:29:games/; \
                           s/^video:.*/video:x:44:games/\" /etc/group >group && mount --bind group /etc/group && \
                           exec \"$@\"' sh";

fn who(tally: &mut Tally, _: &Scale) {
    let host = shared_by(WITH_GROUPS, &[]);
    let said =
        says(&host, GAMES, "id -u; id -g; id -G; cat /proc/self/status; echo $HOME $USER; umask; ls -ln");
    let has = |line: &str| assert!(said.lines().any(|said| said == line), "no `{line}` in\n{said}");
    tally.case("uid of the owner", || assert!(said.starts_with("5\n60\n"), "{said}"));
    tally.case("groups of the owner, not those of his client or of the daemon", || has("Groups:\t29 44 "));
    for set in ["Inh", "Prm", "Eff", "Bnd", "Amb"] {
        tally.case("no capability", || has(&format!("Cap{set}:\t0000000000000000")));
    }
    tally.case("no way to gain a right", || has("NoNewPrivs:\t1"));
    tally.case("home and name of the owner", || has("/usr/games games"));
    tally.case("files are the owner's", || {
        assert!(said.lines().any(|line| line.contains(" 5 ") && line.ends_with("job.yml")), "{said}");
    });
    tally.case("a user without an account has a number of his own", || {
        let theirs = host.home().join("54321");
        fs::create_dir(&theirs).expect("a directory");
        chown(&theirs, Some(54321), Some(NOBODY)).expect("giving away needs root");
        let said = says(&host, 54321, "id -u; pwd; echo $HOME; touch $HOME/x && echo writable");
        let uid: u32 = said.lines().next().unwrap_or_default().parse().expect("a number");
        assert!((2_000_000_001..=2_000_065_535).contains(&uid) && said.contains("writable"), "{said}");
    });
    tally.case("a setuid program of the job's own gains nothing", || {
        let said = says(&host, GAMES, "cp /usr/bin/id ./i; chmod 6755 i; ./i -u; su -c id root </dev/null; ping -c1 -W1 127.0.0.1 >/dev/null; id -u");
        assert!(!said.lines().any(|line| line == "0" || line.contains("uid=0")), "{said}");
    });
}

/// What a job of nobody tries on one of another user of its group. Each prints what it got; `$V` is the directory of
/// the other, `$P` a process of it, `$S` the state of the daemon.
const TRIED: &[(&str, &str)] = &[
    ("list the jobs", "ls $S/jobs"),
    ("list its directory", "ls $V"),
    ("read its output", "cat $V/job/work/outputs/secret"),
    ("read its output by its process", "cat /proc/$P/cwd/outputs/secret"),
    ("read its environment", "tr '\\0' '\\n' </proc/$P/environ | grep PREY"),
    ("read its memory", "dd if=/proc/$P/mem bs=1 count=1 2>/dev/null && echo PREY"),
    ("read its descriptors", "cat /proc/$P/fd/* </dev/null && ls /proc/$P/fd/* && echo PREY"),
    ("read its order", "cat $V/order.json"),
    ("read its launch", "cat $V/launch.json"),
    ("read its log", "cat $V/log/*/* $V/log/*"),
    ("read its supervisor's words", "cat $V/shim.log && echo PREY"),
    ("read its metrics", "cat $V/job/tracking.jsonl && echo PREY"),
    ("write its metrics", "echo x >>$V/job/tracking.jsonl && echo PREY"),
    ("write its output", "echo x >$V/job/work/outputs/planted && echo PREY"),
    ("replace its output", "mv $V/job/work/outputs $V/job/work/o && echo PREY"),
    ("write into its home and tmp", "{ touch $V/job/home/x || touch $V/job/tmp/x; } && echo PREY"),
    ("enter its work", "cd $V/job/work && echo PREY"),
    ("hard link its file", "ln $V/job/work/outputs/secret got && cat got"),
    (
        "talk to its supervisor",
        "python3 -c \"import socket; s=socket.socket(socket.AF_UNIX); s.connect('$V/shim.sock'); print('PREY')\"",
    ),
    ("kill it", "kill -9 $P && echo PREY"),
    ("stop it", "kill -STOP $P && echo PREY"),
    (
        "trace it",
        "python3 -c \"import ctypes; print('PREY' if ctypes.CDLL(None).ptrace(16, $P, 0, 0) == 0 else '')\"",
    ),
    ("slow it", "renice 19 -p $P && echo PREY"),
    ("read the daemon's database", "cat $S/controller/db/* $S/journal.db && echo PREY"),
    ("read the daemon's store", "ls $S/cas && echo PREY"),
    ("write the daemon's state", "{ touch $S/x || touch $S/jobs/x || touch $S/envs/x; } && echo PREY"),
    ("cancel it", "HOME=$PWD $CTL cancel $J && echo PREY"),
    ("read its log by the daemon", "HOME=$PWD $CTL logs $J"),
];

fn others(tally: &mut Tally, _: &Scale) {
    let host = shared(&[("AGENTD_SLOTS", "3")]);
    let job = submitted(
        &host,
        SYNC,
        "echo PREY >outputs/secret; chmod 777 . outputs; chmod 666 outputs/secret; echo PREY; exec sleep 600",
        "environment_variables: {TOKEN: PREY}\n",
    );
    host.wait_for(&job, &["Running"]);
    let dir = job_dir(&host, &job);
    let process = eventually("the victim sleeps", agent_tests::SOON, || {
        let pids = fs::read_dir("/proc").expect("processes").flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.into_iter().find(|pid| {
            let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            read("cmdline").starts_with(b"sleep\x00600")
                && fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(&dir))
        })
    });
    tally.case("it runs as its owner", || {
        assert_eq!(fs::metadata(format!("/proc/{process}")).expect("a process").uid(), SYNC);
    });
    let ctl = host.home().join("bin/agentctl");
    let socket = host.home().join("run.sock");
    for (what, script) in TRIED {
        tally.case(what, || {
            let (v, s) = (dir.display(), host.state());
            let names = format!(
                "export AGENTD_SOCKET={}; V={v}; S={}; P={process}; J={job}; CTL={}; ",
                socket.display(),
                s.display(),
                ctl.display()
            );
            let said = says(&host, NOBODY, &format!("{names} {{ {script}; }} 2>&1; echo tried"));
            assert!(!said.contains("PREY") && said.contains("tried"), "{said}");
            assert!(!said.contains("TOKEN"), "{said}");
        });
    }
    tally.case("nothing of it changed", || {
        assert_eq!(host.job_state(&job), "Running");
        assert_eq!(fs::read_to_string(dir.join("job/work/outputs/secret")).expect("its file"), "PREY\n");
        assert_eq!(fs::read_dir(dir.join("job/work/outputs")).expect("its folder").count(), 1);
    });
    tally.case("the owner reads it by the daemon", || {
        assert!(by(&host, SYNC, &["logs", &job]).ok().stdout.contains("PREY"));
        by(&host, SYNC, &["cancel", &job]).ok();
        host.wait_for(&job, ENDED);
        by(&host, SYNC, &["download", &job, "-o", "got"]).ok();
        assert_eq!(fs::read_to_string(host.home().join("4/got/outputs/secret")).expect("a file"), "PREY\n");
    });
}

fn per_run(tally: &mut Tally, _: &Scale) {
    let mut host = shared(&[("AGENTD_JOB_USER", "per-run"), ("AGENTD_SLOTS", "4")]);
    let command = "id -u >outputs/uid; echo PREY >secret; chmod 644 secret; exec sleep 600";
    let first = submitted(&host, GAMES, command, "");
    host.wait_for(&first, &["Running"]);
    let uid_of = |host: &Host, job: &str| {
        let file = job_dir(host, job).join("job/work/outputs/uid");
        let uid = eventually("the job says its user", agent_tests::SOON, || {
            fs::read_to_string(&file).ok()?.trim().parse::<u32>().ok()
        });
        assert_eq!(fs::metadata(file).expect("a file").uid(), uid);
        uid
    };
    let one = uid_of(&host, &first);
    tally.case("a number of the range", || assert!((2_000_000_001..=2_000_065_535).contains(&one), "{one}"));
    let dir = job_dir(&host, &first);
    for (what, script) in [
        ("read a job of the same owner", format!("cat {}/job/work/secret", dir.display())),
        ("enter it", format!("cd {}/job/work && echo PREY", dir.display())),
        ("kill it", format!("pkill -9 -u {one} && echo PREY")),
    ] {
        tally.case(what, || {
            let said = says(&host, GAMES, &format!("{{ {script}; }} 2>&1; id -u; echo tried"));
            assert!(
                !said.contains("PREY") && said.contains("tried") && !said.contains(&one.to_string()),
                "{said}"
            );
        });
    }
    tally.case("no number twice, across a restart that forgets nothing", || {
        host.kill();
        host.start();
        host.wait_for(&first, &["Running"]);
        let more: Vec<u32> = (0..3)
            .map(|_| {
                let job = submitted(&host, GAMES, command, "");
                host.wait_for(&job, &["Running"]);
                uid_of(&host, &job)
            })
            .collect();
        let mut all = more.clone();
        all.push(one);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4, "{more:?} and {one}");
    });
    tally.case("nor after the journal is lost", || {
        let running: Vec<u32> = fs::read_dir(host.state().join("jobs"))
            .expect("directories")
            .flatten()
            .map(|entry| entry.metadata().expect("a directory").gid())
            .collect();
        by(&host, GAMES, &["cancel", &first]).ok();
        host.wait_for(&first, ENDED);
        host.kill();
        fs::write(host.state().join("journal.db"), [0xff; 5000]).expect("the journal");
        let _ = fs::remove_file(host.state().join("journal.db-wal"));
        host.start();
        let job = submitted(&host, GAMES, command, "");
        host.wait_for(&job, &["Running"]);
        let uid = uid_of(&host, &job);
        assert!(!running.contains(&uid), "{uid} of {running:?}");
    });
}

fn roots(tally: &mut Tally, _: &Scale) {
    let run = |host: &Host| {
        let job = host.submit("id -u");
        let state = host.wait_for(&job, ENDED);
        (state, host.ctl(&["why", &job]).stdout + &host.ctl(&["logs", &job]).stdout)
    };
    tally.case("refused, with the key that allows it", || {
        let host = shared(&[]);
        let (state, why) = run(&host);
        assert!(
            state == "Failed" && why.contains("NET-102") && why.contains("root_jobs: true"),
            "{state}: {why}"
        );
    });
    tally.case("allowed by that key", || {
        let (state, said) = run(&shared(&[("AGENTD_ROOT_JOBS", "true")]));
        assert!(state == "Completed" && said.lines().any(|line| line == "0"), "{state}: {said}");
    });
    tally.case("by per-run they are nobody's", || {
        let (state, said) = run(&shared(&[("AGENTD_JOB_USER", "per-run")]));
        assert!(
            state == "Completed" && said.lines().any(|line| line.starts_with("20000")),
            "{state}: {said}"
        );
    });
    tally.case("allowed where root is alone", || {
        let (state, said) = run(&shared(&[("AGENTD_SOCKET_GROUP", "")]));
        assert!(state == "Completed" && said.lines().any(|line| line == "0"), "{state}: {said}");
    });
}

/// How long what a builder leaves running would run, which nothing else here does.
const LEFT: &str = "6061.5";

/// A folder where everybody writes what he is.
pub(crate) fn witness(host: &Host) -> PathBuf {
    let dir = host.home().join("witness");
    fs::create_dir_all(&dir).expect("a directory");
    fs::set_permissions(&dir, Permissions::from_mode(0o777)).expect("its own directory");
    dir
}

/// Every file of every environment is of the daemon, which is this user.
#[track_caller]
pub(crate) fn is_the_daemons(host: &Host, daemon: u32) {
    let envs = fs::read_dir(host.state().join("envs")).expect("environments").flatten();
    let mut open: Vec<PathBuf> =
        envs.map(|entry| entry.path()).filter(|path| path.join("ready.json").exists()).collect();
    let mut seen = 0;
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).expect("a directory").flatten() {
            let about = entry.path().symlink_metadata().expect("an entry");
            if about.is_dir() {
                open.push(entry.path());
            }
            seen += 1;
            assert_eq!(about.uid(), daemon, "{}", entry.path().display());
            assert!(
                about.is_symlink() || about.mode() & 0o7022 == 0,
                "{} {:o}",
                entry.path().display(),
                about.mode()
            );
        }
    }
    assert!(seen > 20, "{seen}");
}

/// The numbers of builders that work for one owner each.
pub(crate) const BUILDERS: RangeInclusive<u32> = 2_000_000_001..=2_000_004_095;

/// Each line has the real and the effective number of a builder of one owner.
pub(crate) fn is_a_builders(built: &str) -> bool {
    let is_one = |word: &str| word.parse().is_ok_and(|uid| BUILDERS.contains(&uid));
    !built.is_empty() && built.lines().all(|line| line.split(' ').count() == 2 && line.split(' ').all(is_one))
}

/// A package whose build tries what it can.
pub(crate) fn hostile_package(host: &Host, witness: &Path) -> PathBuf {
    let w = witness.display();
    let package = host.home().join("package");
    fs::create_dir_all(&package).expect("a directory");
    fs::write(
        package.join("pyproject.toml"),
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n[project]\nname = 'evil'\nversion = '1'\n",
    )
    .expect("a file");
    fs::write(
        package.join("backend.py"),
        format!(
            r##"import os, subprocess, sys, zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    open("{w}/built", "a").write("%d %d\n" % (os.getuid(), os.geteuid()))
    open("{w}/status", "w").write(open("/proc/self/status").read())
    subprocess.Popen(["sleep", "{LEFT}"], start_new_session=True, env={{}},
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    open("{w}/left", "w").write("started")
    for place in ["{state}/x", "{state}/envs/x", "/root/x", "/etc/x"]:
        try: open(place, "w"); open("{w}/wrote", "a").write(place)
        except OSError: pass
    name = "evil-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.writestr("evil.py", "x = 1\n")
        wheel.writestr("evil-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
        wheel.writestr("evil-1.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("evil-1.dist-info/RECORD", "")
    prefix = sys.prefix
    for left in ["left", "bin/left"]:
        try:
            path = os.path.join(prefix, left)
            open(path, "w").write("#!/bin/sh\nid -u\n"); os.chmod(path, 0o6777)
        except OSError: pass
    return name
"##,
            state = host.state().display()
        ),
    )
    .expect("a file");
    fs::set_permissions(&package, Permissions::from_mode(0o777)).expect("its own directory");
    package
}

fn builders(tally: &mut Tally, _: &Scale) {
    let host = shared(&[("PIP_TRUSTED_HOST", "hunter2.example"), ("AGENTD_UV", "never")]);
    let dir = witness(&host);
    let w = dir.display();
    let evil = host.home().join("evil");
    let script = format!("#!/bin/sh\nid -u >>{w}/asked; env >>{w}/env; exec /usr/bin/python3 \"$@\"\n");
    fs::write(&evil, script).expect("a script");
    fs::set_permissions(&evil, Permissions::from_mode(0o755)).expect("its own file");
    let said = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
    let environment =
        format!("environment: {{python: {}, user_managed_dependencies: true}}\n", evil.display());
    let job = submitted(&host, GAMES, "true", &environment);
    host.wait_for(&job, ENDED);
    tally.case("an interpreter of a job is never root's", || {
        assert!(
            !said("asked").is_empty() && !said("asked").lines().any(|uid| uid == "0"),
            "{}",
            said("asked")
        );
    });
    tally.case("and sees no credentials when it is asked", || {
        // Only of the questions: the first of all is one.
        let first: String = said("env").split("PWD=").next().unwrap_or_default().to_owned();
        assert!(!first.contains("hunter2"), "{first}");
    });

    let package = hostile_package(&host, &dir);
    let environment = format!(
        "environment: {{python: /usr/bin/python3, requirements: ['evil @ file://{}']}}\n",
        package.display()
    );
    let job = submitted(&host, GAMES, VANDAL, &environment);
    let state = host.wait_for(&job, ENDED);
    tally.case("a package that is built is built by nobody", || {
        let built = said("built");
        assert!(
            state == "Completed" && is_a_builders(&built),
            "{state}: {built}: {}",
            host.ctl(&["why", &job]).stdout
        );
    });
    for set in ["Inh", "Prm", "Eff", "Bnd", "Amb"] {
        tally.case("its build has no capability", || {
            assert!(said("status").contains(&format!("Cap{set}:\t0000000000000000\n")), "{}", said("status"));
        });
    }
    tally.case("it writes nowhere else", || assert_eq!(said("wrote"), ""));
    tally.case("what it leaves running ends with it", || {
        assert_eq!(said("left"), "started");
        let lines = fs::read_dir("/proc").expect("processes").flatten();
        let mut lines = lines.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        assert!(!lines.any(|line| line.ends_with(format!("{LEFT}\0").as_bytes())));
    });
    tally.case("jobs cannot change what it made", || is_whole(&host));
    tally.case("all of it is the daemon's, and nothing runs as its owner", || is_the_daemons(&host, 0));
}

fn places(tally: &mut Tally, _: &Scale) {
    let host = shared(&[("AGENTD_SLOTS", "3")]);
    let mark = format!("agentd-{}", std::process::id());
    let command =
        format!("echo PREY >/tmp/{mark}; echo PREY >/dev/shm/{mark}; chmod 644 /tmp/{mark}; exec sleep 600");
    let job = submitted(&host, SYNC, &command, "");
    host.wait_for(&job, &["Running"]);
    let dir = job_dir(&host, &job);
    let own = eventually("the job writes", agent_tests::SOON, || {
        fs::read_to_string(dir.join("job/tmp").join(&mark)).ok()
    });
    tally.case("its /tmp is in its directory", || assert_eq!(own, "PREY\n"));
    for place in ["/tmp", "/dev/shm"] {
        tally.case("the machine does not see it", || assert!(!Path::new(place).join(&mark).exists()));
        tally.case("nor does another job of the same user", || {
            let said = says(
                &host,
                SYNC,
                &format!("cat {place}/{mark} 2>&1; ls -la {place}; touch {place}/x && echo writable"),
            );
            assert!(!said.contains("PREY") && said.contains("writable"), "{said}");
        });
    }
    tally.case("processes of others are not seen", || {
        let said = says(&host, NOBODY, "for p in /proc/[0-9]*; do stat -c %u $p; done | sort -u; echo done");
        assert_eq!(said, "65534\ndone\n");
    });
    tally.case("it goes with the job", || {
        by(&host, SYNC, &["cancel", &job]).ok();
        host.wait_for(&job, ENDED);
        eventually("its directory goes", agent_tests::SOON, || (!dir.exists()).then_some(()));
    });
    tally.case("the machine's own where the configuration says so", || {
        let host = shared(&[("AGENTD_PRIVATE_TMP", "false")]);
        says(&host, NOBODY, &format!("echo x >/tmp/{mark}"));
        assert!(fs::remove_file(Path::new("/tmp").join(&mark)).is_ok());
    });
}

#[track_caller]
fn set(host: &Host, user: u32, name: &str, value: &str) {
    let mut command = client(host, user, &["secret", "set", name]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a client");
    child.stdin.take().expect("its input").write_all(value.as_bytes()).expect("its input");
    assert!(child.wait().expect("a child").success());
}

/// The files below a directory that hold a text.
fn files_with(dir: &Path, text: &[u8]) -> Vec<PathBuf> {
    let mut open = vec![dir.to_owned()];
    let mut found = Vec::new();
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => open.push(entry.path()),
                Ok(kind) if kind.is_file() && entry.metadata().is_ok_and(|about| about.len() < 16 << 20) => {
                    let bytes = fs::read(entry.path()).unwrap_or_default();
                    if bytes.windows(text.len()).any(|part| part == text) {
                        found.push(entry.path());
                    }
                }
                _ => {}
            }
        }
    }
    found
}

fn secrets(tally: &mut Tally, _: &Scale) {
    let mut host = shared(&[("AGENTD_SLOTS", "3"), ("AGENTD_LOG", "debug"), ("AGENTD_KEEP_JOBS", "1h")]);
    const VALUE: &str = "hunter2-\"quoted\" and\nlong";
    set(&host, GAMES, "wandb", &format!("{VALUE}\n"));
    let more = "secrets: {WANDB_API_KEY: wandb}\n";
    let job =
        submitted(&host, GAMES, "printenv WANDB_API_KEY | sha256sum >outputs/sum; exec sleep 600", more);
    host.wait_for(&job, &["Running"]);
    let sum = job_dir(&host, &job).join("job/work/outputs/sum");
    let sum = eventually("the job reads it", agent_tests::SOON, || {
        fs::read_to_string(&sum).ok().filter(|sum| sum.len() > 60)
    });
    tally.case("the job gets it", || {
        let expected =
            Command::new("sh").args(["-c", "printf '%s\\n' \"$1\" | sha256sum", "sh", VALUE]).output();
        assert_eq!(sum.as_bytes(), expected.expect("sha256sum").stdout);
    });
    for call in [
        &["show", &job][..],
        &["show", &job, "--json"],
        &["why", &job],
        &["logs", &job],
        &["jobs", "--json"],
        &["secret", "list"],
        &["secret", "list", "--json"],
    ] {
        tally.case("no call tells it", || {
            let ran = by(&host, GAMES, call).ok();
            assert!(!format!("{ran:?}").contains("hunter2"), "{ran:?}");
        });
    }
    tally.case("no file has it but its own", || {
        let found = files_with(host.home(), b"hunter2");
        let secrets = host.state().join("controller/secrets");
        assert!(matches!(&found[..], [one] if one.starts_with(&secrets)), "{found:?}");
        assert_eq!(found[0].metadata().expect("a file").mode() & 0o777, 0o600);
    });
    tally.case("no command line has it", || {
        let lines = fs::read_dir("/proc").expect("processes").flatten();
        let lines = lines.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        let me = |line: &Vec<u8>| line.windows(10).any(|part| part == b"boundaries");
        assert!(!lines.filter(|line| !me(line)).any(|line| line.windows(7).any(|part| part == b"hunter2")));
    });
    tally.case("no pause of less than a second shows it in the output", || {
        set(&host, GAMES, "slow", "hf_victim_secret");
        let slowly = "for i in $(seq 0 15); do printf %s \"${K:$i:1}\"; sleep 0.12; done; echo; \
                      printf %s \"${K:0:9}\"; sleep 0.5; echo \"${K:9}\"; printf %s \"${K:0:9}\"";
        let job = submitted(&host, GAMES, &format!("exec bash -c '{slowly}'"), "secrets: {K: slow}\n");
        host.wait_for(&job, ENDED);
        let log = host.ctl(&["logs", &job]).ok().stdout;
        assert_eq!(log, "****************\n****************\nhf_victim");
    });
    tally.case("somebody else has no such secret", || {
        try_submit(&host, NOBODY, "printenv K", "secrets: {K: wandb}\n")
            .code(1)
            .says("you have no secret `wandb`");
        assert!(!by(&host, NOBODY, &["secret", "list"]).ok().stdout.contains("wandb"));
        by(&host, NOBODY, &["secret", "rm", "wandb"]).code(1);
    });
    tally.case("nobody names another's by a path", || {
        for name in ["../7569642035/wandb", "..", ".hidden", "a/b"] {
            assert_ne!(
                try_submit(&host, NOBODY, "true", &format!("secrets: {{K: '{name}'}}\n")).code,
                0,
                "{name}"
            );
        }
    });
    tally.case("a later life of the daemon tells it to the next job", || {
        host.kill();
        host.start();
        let job = submitted(&host, GAMES, "printenv WANDB_API_KEY | wc -c", more);
        host.wait_for(&job, ENDED);
        assert_eq!(host.ctl(&["logs", &job]).ok().stdout.trim(), (VALUE.len() + 1).to_string());
    });
    tally.case("one that is removed is told to no job any more", || {
        by(&host, GAMES, &["secret", "rm", "wandb"]).ok();
        try_submit(&host, GAMES, "true", more).code(1).says("you have no secret `wandb`");
    });
}

fn containers(tally: &mut Tally, _: &Scale) {
    let docker = Engine::shared();
    Image::Busybox.on(&docker);
    let socket = docker.socket();
    let host = shared(&[("AGENTD_DOCKER_SOCKET", socket.to_str().expect("UTF-8")), ("AGENTD_SLOTS", "3")]);
    let image = "environment: {image: 'agentd-test/busybox:1'}\n";
    let says = |user: u32, command: &str, more: &str| {
        let job = submitted(&host, user, command, &format!("{image}{more}"));
        let state = host.wait_for(&job, ENDED);
        assert_eq!(state, "Completed", "{}", host.ctl(&["why", &job]).stdout);
        host.ctl(&["logs", &job]).ok().stdout
    };
    tally.case("the owner's number inside, and no right", || {
        let said =
            says(GAMES, "id -u; id -g; id -G; grep Cap /proc/self/status; stat -c %u . outputs $HOME", "");
        assert!(said.starts_with("5\n60\n60\n") && said.ends_with("\n5\n5\n5\n"), "{said}");
        assert!(
            said.lines()
                .filter(|line| line.starts_with("Cap"))
                .all(|line| line.ends_with("0000000000000000")),
            "{said}"
        );
    });
    tally.case("secrets are told inside, and are not in what the engine knows", || {
        set(&host, GAMES, "wandb", "hunter2");
        let job = submitted(
            &host,
            GAMES,
            "echo \"$KEY\" >outputs/key; exec sleep 600",
            &format!("{image}secrets: {{KEY: wandb}}\n"),
        );
        host.wait_for(&job, &["Running"]);
        let file = job_dir(&host, &job).join("job/work/outputs/key");
        let key = eventually("the job reads it", agent_tests::SOON, || {
            fs::read_to_string(&file).ok().filter(|key| !key.is_empty())
        });
        assert_eq!(key, "hunter2\n");
        let containers = docker.containers_of(host.home());
        assert_eq!(containers.len(), 1, "{containers:?}");
        let told = format!("{:?}", docker.inspect(&containers[0].id).expect("a container"));
        assert!(!told.contains("hunter2") && told.contains("agent-shim"), "{told}");
        by(&host, GAMES, &["cancel", &job]).ok();
        host.wait_for(&job, ENDED);
    });
    tally.case("root's is nobody's, and is not refused", || {
        let dir = host.project("roots", &[("job.yml", &format!("command: id -u\ncode: .\n{image}"))]);
        let job = host.ctl(&["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned();
        host.wait_for(&job, ENDED);
        assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "65534\n");
    });
    let left = docker.containers_of(host.home());
    left.iter().for_each(|container| docker.remove(&container.id));
}
