//! Root's helper itself: whose files it touches, and what keeps it from its work.
//!
//! What it refuses a daemon that was taken over is in [`split`](super::split).

#![allow(clippy::disallowed_methods, reason = "is a neighbour that no daemon starts")]

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use agent_tests::split::{Helper, KEEPER, split_with};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, bounds, eventually};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::boundaries::split::{ask, at_helper, job_dir, of_users, says};
use crate::boundaries::users::{BUILDERS, ENDED, GAMES, NOBODY, submitted, witness};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "K1",
        promise: "no file changes hands that has a name elsewhere, or another owner; outputs have it all the same",
        run: links,
    },
    Row {
        id: "K2",
        promise: "each verb, malformed, cut off, in races and through a restart, leaves the helper as it was",
        run: verbs,
    },
    Row { id: "K3", promise: "a flood of silent connections keeps nobody from the helper", run: flood },
    Row { id: "K4", promise: "a tree of any depth that a job leaves is removed", run: deep },
    Row {
        id: "K5",
        promise: "without its helper the daemon waits and says so, builds begin anew, and none is left beside",
        run: away,
    },
    Row { id: "K6", promise: "the memory of a build is that of all its processes", run: memory },
];

/// A file of the machine that a job links to: its name, its owner, its mode.
type Linked = (&'static str, u32, u32);

const LINKED: [Linked; 4] = [
    ("data/a.csv", GAMES, 0o644),
    ("data/key", GAMES, 0o600),
    ("shared/results", NOBODY, 0o666),
    ("shared/private", NOBODY, 0o622),
];

/// Makes the files of people at a place that all may enter.
fn homes(host: &Host) -> PathBuf {
    let place = host.home().join("people");
    for (dir, uid) in [("data", GAMES), ("shared", NOBODY)] {
        fs::create_dir_all(place.join(dir)).expect("a directory");
        chown(place.join(dir), Some(uid), Some(uid)).expect("giving away needs root");
        fs::set_permissions(place.join(dir), Permissions::from_mode(0o755)).expect("its own directory");
    }
    for (name, uid, mode) in LINKED {
        fs::write(place.join(name), name).expect("a file");
        chown(place.join(name), Some(uid), Some(uid)).expect("giving away needs root");
        fs::set_permissions(place.join(name), Permissions::from_mode(mode)).expect("its own file");
    }
    place
}

#[track_caller]
fn are_as_they_were(place: &Path) {
    for (name, uid, mode) in LINKED {
        let found = place.join(name).metadata().expect("it is there");
        assert_eq!((found.uid(), found.mode() & 0o7777), (uid, mode), "{name}");
        assert_eq!(fs::read_to_string(place.join(name)).expect("root reads it"), name);
    }
}

fn links(tally: &mut Tally, _: &Scale) {
    let (host, _helper) = split_with(&[]);
    let place = homes(&host);
    let (data, shared) = (place.join("data"), place.join("shared"));
    let link = format!(
        "umask 077; cp -al {} outputs/data && cp -al {} work2 && ln {}/results outputs/results",
        data.display(),
        data.display(),
        shared.display()
    );
    let got = |job: &str, name: &str| {
        let to = host.home().join(name);
        host.ctl(&["download", job, "--output", to.to_str().expect("UTF-8")]).ok();
        move |file: &str| fs::read_to_string(to.join("outputs").join(file)).ok()
    };
    tally.case("outputs that are links to files elsewhere are stored, and those stay whose they are", || {
        let job = submitted(&host, GAMES, &format!("{link}; cd outputs; echo 1 >x; ln x y"), "");
        assert_eq!(host.wait_for(&job, ENDED), "Completed", "{}", host.ctl(&["logs", &job]).stdout);
        let got = got(&job, "got");
        assert_eq!(got("data/a.csv").as_deref(), Some("data/a.csv"));
        assert_eq!(got("data/key").as_deref(), Some("data/key"), "the owner's own, wherever else it is");
        assert_eq!((got("x"), got("y")), (Some("1\n".to_owned()), Some("1\n".to_owned())));
        are_as_they_were(&place);
        eventually("the directory is removed", SOON, || (!job_dir(&host, &job).exists()).then_some(()));
        are_as_they_were(&place);
    });
    tally.case("outputs so far are those of the job's user, and nobody's else", || {
        let command = format!("{link}; ln {}/private outputs/private; echo up; sleep 600", shared.display());
        let job = submitted(&host, GAMES, &command, "");
        eventually("it is up", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
        let got = got(&job, "so far");
        assert_eq!(got("data/key").as_deref(), Some("data/key"));
        assert_eq!(got("private"), None, "root could have read it, the job could not");
        host.ctl(&["cancel", &job]).ok();
        assert_eq!(host.wait_for(&job, ENDED), "Canceled");
        eventually("the directory is removed", SOON, || (!job_dir(&host, &job).exists()).then_some(()));
        are_as_they_were(&place);
    });
}

/// One order of each verb, such as a daemon sends it, about the directory `jobs/a.1.0`.
fn every_verb() -> Vec<(&'static str, Value)> {
    let uid = 2_000_000_001_u32;
    let scope = json!({"job": {"replica": "a.1.0", "instance": "0123456789", "metadata": false}});
    let id = json!({"argv": ["/usr/bin/id"], "env": [], "cwd": "/", "nice": 0, "memory": null});
    let uuid = "0f0e0d0c-0b0a-0908-0706-050403020100";
    vec![
        ("greet", json!({"verb": "greet"})),
        ("give", json!({"verb": {"give": {"path": "jobs/a.1.0", "uid": uid, "kind": "everything"}}})),
        ("take", json!({"verb": {"take": {"path": "jobs/a.1.0", "part": {"whole": {"uid": uid}}}}})),
        (
            "copy",
            json!({"verb": {"copy": {"from": "jobs/a.1.0", "to": "jobs/b.1.0", "uid": uid, "most": 1 << 20}}}),
        ),
        ("supervise", json!({"verb": {"supervise": {"replica": "c.1.0", "uid": uid}}, "fds": ["pipe"]})),
        ("build", json!({"verb": {"build": id}, "fds": ["/dev/null", "pipe", "pipe"]})),
        ("enclose", json!({"verb": {"enclose": {"pid": 1, "scope": scope}}})),
        ("kill", json!({"verb": {"kill": {"groups": [], "mark": uuid, "within_ms": 100}}})),
    ]
}

/// Sends an order in ways that no daemon would, as the daemon's user; says what was answered.
const ABUSE: &str = r#"
import json, os, socket, sys
path, body = sys.argv[1], sys.argv[2].encode()
kept = []
def connected():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(20)
    s.connect(path)
    return s
def answer(data, count):
    with connected() as s:
        pipe = os.pipe()
        socket.send_fds(s, [data], [pipe[1]] * count)
        for end in pipe: os.close(end)
        return s.recv(1 << 17).decode()
for _ in range(40):
    print(answer(body, 60))                # more descriptors than there is room
print(answer(body[:-1], 3))                # cut off
print(answer(body.replace(b":", b";"), 4)) # no JSON
for _ in range(20):
    kept.append(connected())               # says nothing
for _ in range(20):
    with connected() as s: s.send(body)    # does not wait for the answer
"#;

fn abused(helper: &Helper, verb: &Value) -> String {
    at_helper(ABUSE, helper, KEEPER, verb)
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count()
}

fn verbs(tally: &mut Tally, _: &Scale) {
    let (mut host, mut helper) = split_with(&[]);
    host.kill(); // it would remove what it does not know
    let (home, state) = (host.home().to_owned(), host.state());
    for name in ["a.1.0", "b.1.0", "c.1.0"] {
        let dir = state.join("jobs").join(name);
        fs::create_dir_all(dir.join("d")).expect("a directory");
        for path in [&dir, &dir.join("d")] {
            chown(path, Some(KEEPER), Some(KEEPER)).expect("giving away needs root");
        }
    }
    let before = descriptors(helper.pid());
    for (what, order) in every_verb() {
        tally.case(&format!("{what}, malformed and cut off"), || {
            let said = abused(&helper, &order["verb"]);
            assert_eq!(said.matches("failed").count(), 42, "{said}");
            assert!(ask(&helper, KEEPER, &json!({"verb": "greet"})).contains("done"), "{what}");
            eventually("nothing of it stays open", SOON, || {
                (descriptors(helper.pid()) <= before).then_some(())
            });
        });
        tally.case(&format!("{what}, twice at once"), || {
            let said = std::thread::scope(|scope| {
                let asked = [0, 1].map(|_| scope.spawn(|| ask(&helper, KEEPER, &order)));
                asked.map(|asked| asked.join().expect("it asks"))
            });
            for said in said {
                assert!(!said.contains("closed") && !said.contains("Traceback"), "{said}");
            }
        });
        tally.case(&format!("{what}, through a restart"), || {
            std::thread::scope(|scope| {
                let asked = scope.spawn(|| ask(&helper, KEEPER, &order));
                agent_tests::signal(helper.pid(), Signal::KILL);
                asked.join().expect("it asks");
            });
            helper.kill();
            helper = Helper::start(&home, &state);
            let said = ask(&helper, KEEPER, &order);
            assert!(!said.contains("closed") && !said.contains("Traceback"), "{said}");
        });
    }
    tally.case("nobody is left of it", || {
        eventually("builders end with their helper", SOON, || of_users(BUILDERS).is_empty().then_some(()));
    });
}

/// Has so many connections that say nothing, and opens another for each that is closed.
const FLOOD: &str = r#"
import select, socket, sys, time
path, most = sys.argv[1], int(sys.argv[2])
poll, held, told = select.poll(), {}, False
while True:
    tried = 0
    while len(held) < most and tried < 50:
        tried += 1
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.setblocking(False)
        try: s.connect(path)
        except OSError: s.close(); break
        held[s.fileno()] = s
        poll.register(s, select.POLLIN)
    for fd, _ in poll.poll(1):
        poll.unregister(fd)
        held.pop(fd).close()
    if not told and tried: print("begun", flush=True); told = True
"#;

struct Flood(Child);

impl Flood {
    fn of(helper: &Helper, most: usize) -> Flood {
        let keeper = KEEPER.to_string();
        let limit = rustix::process::Resource::Nofile;
        let mut wide = rustix::process::getrlimit(limit);
        wide.current = wide.maximum;
        rustix::process::setrlimit(limit, wide).expect("its own limit");
        let mut child = Command::new("setpriv")
            .args(["--reuid", &keeper, "--regid", &keeper, "--clear-groups", "/usr/bin/python3", "-c", FLOOD])
            .arg(helper.socket())
            .arg(most.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python runs");
        let mut said = String::new();
        let mut lines = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
        std::io::BufRead::read_line(&mut lines, &mut said).expect("it says when it begins");
        Flood(child)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn flood(tally: &mut Tally, _: &Scale) {
    let (host, helper) = split_with(&[]);
    let flood = Flood::of(&helper, 1500);
    tally.case("another program of the daemon's user is answered", || {
        for _ in 0..5 {
            let said = ask(&helper, KEEPER, &json!({"verb": "greet"}));
            assert!(said.contains("done"), "{said}");
        }
    });
    tally.case("and a job runs", || assert_eq!(says(&host, GAMES, "echo ran"), "ran\n"));
    tally.case("when it is over, nothing of it is kept", || {
        drop(flood);
        eventually("all are closed", SOON, || (descriptors(helper.pid()) < 20).then_some(()));
    });
}

/// So many levels, the last of them closed for everybody.
fn nested(levels: usize) -> String {
    format!(
        "python3 -c 'import os\nfor i in range({levels}): os.mkdir(\"d\"); os.chdir(\"d\")\n\
         open(\"x\", \"w\"); os.chmod(\".\", 0)'"
    )
}

fn deep(tally: &mut Tally, _: &Scale) {
    let (host, _helper) = split_with(&[]);
    for levels in [700, 5000] {
        tally.case(&format!("{levels} levels"), || {
            let job = submitted(&host, GAMES, &nested(levels), "");
            assert_eq!(host.wait_for(&job, ENDED), "Completed", "{}", host.ctl(&["logs", &job]).stdout);
            eventually("its directory is removed", SOON, || {
                let left = fs::read_dir(host.state().join("jobs")).expect("a directory").flatten();
                let mut names = left.map(|entry| entry.file_name().to_string_lossy().into_owned());
                (!names.any(|name| name.contains(&job))).then_some(())
            });
        });
    }
}

/// A package that says when it is built, and then takes a while.
pub(crate) fn slow_package(host: &Host, name: &str, witness: &Path, build: &str) -> PathBuf {
    let package = host.home().join(name);
    fs::create_dir_all(&package).expect("a directory");
    let project = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n\
                   [project]\nname = 'slow'\nversion = '1'\n";
    fs::write(package.join("pyproject.toml"), project).expect("a file");
    // Builders of several users write there.
    let begun = witness.join("begun");
    fs::File::options().create(true).append(true).open(&begun).expect("a file");
    fs::set_permissions(&begun, Permissions::from_mode(0o666)).expect("its own file");
    let backend = format!(
        r#"import os, subprocess, sys, time, zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    open("{w}/begun", "a").write("begun\n")
    {build}
    name = "slow-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.writestr("slow.py", "x = 1\n")
        wheel.writestr("slow-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: slow\nVersion: 1\n")
        wheel.writestr("slow-1.dist-info/WHEEL",
                       "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("slow-1.dist-info/RECORD", "")
    return name
"#,
        w = witness.display()
    );
    fs::write(package.join("backend.py"), backend).expect("a file");
    fs::set_permissions(&package, Permissions::from_mode(0o777)).expect("its own directory");
    package
}

pub(crate) fn needs(package: &Path) -> String {
    format!(
        "environment: {{python: /usr/bin/python3, requirements: ['slow @ file://{}']}}\n",
        package.display()
    )
}

pub(crate) fn begun(witness: &Path) -> usize {
    fs::read_to_string(witness.join("begun")).unwrap_or_default().lines().count()
}

fn away(tally: &mut Tally, _: &Scale) {
    let (host, mut helper) = split_with(&[("AGENTD_UV", "never")]);
    let dir = witness(&host);
    let package = slow_package(&host, "slow", &dir, "time.sleep(4)");
    tally.case("a build begins anew when its helper is started again, and is alone", || {
        let job = submitted(&host, GAMES, "python -c 'import slow; print(slow.x)'", &needs(&package));
        eventually("it is built", SOON, || (begun(&dir) == 1).then_some(()));
        helper.kill();
        eventually("the build ends with its helper", SOON, || of_users(BUILDERS).is_empty().then_some(()));
        helper = Helper::start(host.home(), &host.state());
        let state = host.wait_for(&job, ENDED);
        assert_eq!(state, "Completed", "{}", host.ctl(&["why", &job]).stdout);
        assert_eq!(begun(&dir), 2);
        assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "1\n");
    });
    let says_why = |job: &str| {
        eventually("the job says what it waits for", SOON, || {
            host.ctl(&["show", job]).stdout.contains("agent-spawn does not answer").then_some(())
        });
    };
    let doctor = |grade: &str| {
        eventually("the machine says it too", SOON, || {
            let said = host.ctl(&["doctor"]).stdout;
            said.lines().any(|line| line.contains(grade) && line.contains("privileges")).then_some(())
        });
    };
    tally.case("a helper that is stopped is waited for", || {
        helper.kill();
        let job = submitted(&host, GAMES, "echo ran", "");
        says_why(&job);
        doctor("limited");
        helper = Helper::start(host.home(), &host.state());
        assert_eq!(host.wait_for(&job, ENDED), "Completed");
        doctor("good");
    });
    tally.case("a helper that is frozen is waited for", || {
        agent_tests::signal(helper.pid(), Signal::STOP);
        let job = submitted(&host, GAMES, "echo ran", "");
        says_why(&job);
        doctor("limited");
        agent_tests::signal(helper.pid(), Signal::CONT);
        assert_eq!(host.wait_for(&job, ENDED), "Completed");
        doctor("good");
    });
}

fn memory(tally: &mut Tally, _: &Scale) {
    let (host, _helper) = split_with(&[("AGENTD_UV", "never"), ("AGENTD_BUILDER_MEMORY", "256MiB")]);
    let dir = witness(&host);
    let takes = |name: &str, processes: usize, megabytes: usize| {
        let program = format!("import time; x = b\"x\" * ({megabytes} << 20); time.sleep(3)");
        let build = format!(
            "all = [subprocess.Popen([sys.executable, '-c', '{program}']) for _ in range({processes})]\n    \
             if any([each.wait() for each in all]): sys.exit(1)\n    \
             open('{}/{name}', 'w').write('took it')",
            dir.display()
        );
        let package = slow_package(&host, name, &dir, &build);
        let job = submitted(&host, GAMES, "true", &needs(&package));
        let state = host.wait_for(&job, ENDED);
        (state, dir.join(name).exists(), host.ctl(&["why", &job]).stdout)
    };
    tally.case("a child of a build that takes more is ended", || {
        let (state, took, why) = takes("one", 1, 600);
        assert_eq!((state.as_str(), took), ("Failed", false), "{why}");
    });
    if bounds::Group::new("memory", ("memory.limit_in_bytes", "1073741824")).is_none() && !bounds::unified() {
        return; // each process has a limit of its own then
    }
    tally.case("several that take more together are ended, and it is told why", || {
        let (state, took, why) = takes("several", 3, 150);
        assert_eq!((state.as_str(), took), ("Failed", false), "{why}");
        assert!(why.contains("builder_memory"), "{why}");
    });
    tally.case("what stays below is built", || {
        let (state, took, why) = takes("less", 2, 50);
        assert_eq!((state.as_str(), took), ("Completed", true), "{why}");
    });
}
