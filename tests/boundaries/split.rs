//! The privilege split: the daemon of a machine that is an ordinary user, with the helper that does what root alone can;
//! and what somebody who has taken the daemon over asks of that helper.

#![allow(clippy::disallowed_methods, reason = "starts the helper, and is who attacks it")]

use std::fs::{self, Permissions};
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use agent_tests::channel::{Channel, Server};
use agent_tests::engine::Engine;
use agent_tests::images::Image;
use agent_tests::nvml::{self, FakeNvml};
use agent_tests::split::{Helper, KEEPER, split_with};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, copy_program, eventually, root};
use serde_json::{Value, json};

use crate::boundaries::prey::{VANDAL, is_whole};
use crate::boundaries::users::{
    ENDED, GAMES, NOBODY, hostile_package, is_a_builders, is_the_daemons, submitted, witness,
};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "H1",
        promise: "an ordinary user's daemon runs, ends and keeps jobs of others, through its restarts and its helper's",
        run: jobs,
    },
    Row {
        id: "H2",
        promise: "a daemon that was taken over gets nothing of root's from its helper",
        run: attacks,
    },
    Row {
        id: "H4",
        promise: "an ordinary user's daemon has environments built by nobody, and runs jobs in containers",
        run: elsewhere,
    },
    Row {
        id: "H5",
        promise: "an ordinary user's daemon gives jobs packages of conda and GPUs",
        run: supplies,
    },
    Row { id: "H3", promise: "what the service may is little, and is not more one day", run: exposure },
];

pub(crate) fn job_dir(host: &Host, job: &str) -> PathBuf {
    host.state().join("jobs").join(format!("{job}.1.0"))
}

/// What a job printed, once it is over.
pub(crate) fn says(host: &Host, user: u32, command: &str) -> String {
    let job = submitted(host, user, command, "");
    let state = host.wait_for(&job, ENDED);
    let logs = host.ctl(&["logs", &job]).ok().stdout;
    assert_eq!(state, "Completed", "{logs}{}", host.ctl(&["show", &job]).stdout);
    logs
}

fn status_of(pid: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    line.trim().to_owned()
}

fn jobs(tally: &mut Tally, _: &Scale) {
    let (mut host, mut helper) = split_with(&[]);
    tally.case("the daemon has no right of root's", || {
        for set in ["CapEff:", "CapPrm:", "CapBnd:", "CapAmb:"] {
            assert_eq!(status_of(host.pid(), set), "0000000000000000", "{set}");
        }
        assert!(status_of(host.pid(), "Uid:").starts_with("33\t33"));
    });
    tally.case("a job is its owner's, and has nothing else", || {
        let said =
            says(&host, GAMES, "id -u; id -G; cat /proc/self/status; ls -ln; echo $HOME; touch outputs/x");
        assert!(said.starts_with("5\n60\n"), "{said}");
        assert!(said.contains("CapEff:\t0000000000000000") && said.contains("NoNewPrivs:\t1"), "{said}");
        assert!(said.lines().any(|line| line.contains(" 5 ") && line.ends_with("job.yml")), "{said}");
    });
    tally.case("who has no account has a number of the range", || {
        let said = says(&host, 54_321, "id -u; id -g; echo x > $HOME/x; cat $HOME/x");
        let uid: u32 = said.lines().next().expect("a line").parse().expect("a number");
        assert!((2_000_000_001..=2_000_065_535).contains(&uid), "{said}");
    });
    tally.case("it has its own /tmp, and sees its own processes", || {
        let said =
            says(&host, GAMES, "ls -a /tmp | wc -l; ls -d /proc/[0-9]* | wc -l; touch /tmp/x && echo made");
        assert!(said.contains("made") && said.starts_with("2\n"), "{said}");
    });
    tally.case("outputs are stored, whatever the job closed, and its directory goes", || {
        let command =
            "umask 077; mkdir outputs/d; echo kept >outputs/d/f; chmod 000 outputs/d/f; chmod 500 outputs/d";
        let job = submitted(&host, GAMES, command, "");
        assert_eq!(host.wait_for(&job, ENDED), "Completed");
        let to = host.home().join("got");
        host.ctl(&["download", &job, "--output", to.to_str().expect("UTF-8")]).ok();
        let found = Command::new("grep").args(["-r", "kept"]).arg(&to).output().expect("grep runs");
        assert!(found.status.success(), "nothing was downloaded");
        eventually("the directory is removed", SOON, || (!job_dir(&host, &job).exists()).then_some(()));
    });
    tally.case("outputs so far are fetched while it runs", || {
        let command = "umask 077; echo kept >outputs/f; echo up; sleep 600";
        let job = submitted(&host, GAMES, command, "");
        eventually("it is up", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
        let to = host.home().join("so far");
        host.ctl(&["download", &job, "--output", to.to_str().expect("UTF-8")]).ok();
        assert_eq!(fs::read_to_string(to.join("outputs/f")).expect("an output"), "kept\n");
        let its = job_dir(&host, &job).join("job/work/outputs/f").metadata().expect("it is the job's");
        assert_eq!(its.uid(), GAMES);
        host.ctl(&["cancel", &job]).ok();
        assert_eq!(host.wait_for(&job, ENDED), "Canceled");
    });
    tally.case("metrics are recorded", || {
        let wrote = r#"echo '{"metric":"loss","value":0.5}' >> $AGENTD_METRICS"#;
        let job = submitted(&host, GAMES, wrote, "");
        assert_eq!(host.wait_for(&job, ENDED), "Completed");
        let listed = host.ctl(&["metrics", &job, "--json"]).ok().json();
        assert_eq!(listed["metrics"][0]["last"], 0.5, "{listed}");
    });
    tally.case("cancel ends all of it, what hid from the command too", || {
        let command =
            "setsid sleep 600 & (setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done' &) ; echo up; wait";
        let job = submitted(&host, GAMES, command, "");
        host.wait_for(&job, &["Running"]);
        eventually("it is up", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
        host.ctl(&["cancel", &job]).ok();
        assert_eq!(host.wait_for(&job, ENDED), "Canceled");
        // Rows beside this one have processes of this user for a moment.
        eventually("nothing of it is left", SOON, || of_user(GAMES).is_empty().then_some(()));
    });
    through_restarts(tally, &mut host, &mut helper);
    tally.case("a job of root's is refused", || {
        let root = host.project("root", &[("job.yml", "command: id\ncode: .\nenvironment: host\n")]);
        let job = host.ctl(&["submit", root.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned();
        assert_eq!(host.wait_for(&job, ENDED), "Failed");
    });
}

fn through_restarts(tally: &mut Tally, host: &mut Host, helper: &mut Helper) {
    let long = "i=0; while [ $i -lt 8 ]; do echo line $i; i=$((i+1)); sleep 1; done; echo done >outputs/x";
    tally.case("jobs go on while daemon and helper are killed and started again", || {
        let job = submitted(host, GAMES, long, "");
        host.wait_for(&job, &["Running"]);
        helper.kill();
        host.kill();
        *helper = Helper::start(host.home(), &host.state());
        host.start();
        assert_eq!(host.wait_for(&job, ENDED), "Completed");
        let lines: Vec<String> = (0..8).map(|n| format!("line {n}")).collect();
        let said = host.ctl(&["logs", &job]).ok().stdout;
        assert_eq!(said.lines().collect::<Vec<_>>(), lines, "no line is lost or twice");
    });
    tally.case("a supervisor that is killed leaves nobody behind", || {
        let job = submitted(host, GAMES, "setsid sleep 600 & sleep 600", "");
        host.wait_for(&job, &["Running"]);
        eventually("it is up", SOON, || (!of_user(GAMES).is_empty()).then_some(()));
        let hello = fs::read_to_string(job_dir(host, &job).join("hello.json")).expect("a record");
        let hello: Value = serde_json::from_str(&hello).expect("JSON");
        let supervisor = hello["pid"].as_u64().expect("a number") as u32;
        assert_eq!(fs::metadata(format!("/proc/{supervisor}")).expect("it runs").uid(), KEEPER);
        agent_tests::signal(supervisor, rustix::process::Signal::KILL);
        host.wait_for(&job, ENDED);
        eventually("nobody is left", SOON, || of_user(GAMES).is_empty().then_some(()));
    });
}

/// What `agentd join` and `agentd leave` write is the daemon's, though root calls them.
fn membership(tally: &mut Tally) {
    tally.case("what root does to the membership of the machine is the daemon's", || {
        let temp = tempfile::tempdir().expect("a temporary directory");
        chown(temp.path(), Some(KEEPER), Some(KEEPER)).expect("giving away needs root");
        let agentd = agent_tests::binaries().join("agentd");
        let state = temp.path().to_str().expect("UTF-8");
        let left = Command::new(agentd).args(["leave", "--state-dir", state]).output().expect("agentd runs");
        assert!(left.status.success(), "{left:?}");
        let entries: Vec<_> = fs::read_dir(temp.path()).expect("a directory").flatten().collect();
        assert!(!entries.is_empty());
        for entry in entries {
            assert_eq!(entry.metadata().expect("an entry").uid(), KEEPER, "{}", entry.path().display());
        }
    });
}

fn elsewhere(tally: &mut Tally, _: &Scale) {
    membership(tally);
    let docker = Engine::shared();
    Image::Busybox.on(&docker);
    let path = docker.socket();
    let socket = path.to_str().expect("UTF-8");
    chown(socket, None, Some(KEEPER)).expect("giving away needs root");
    let (host, _helper) = split_with(&[("AGENTD_UV", "never"), ("AGENTD_DOCKER_SOCKET", socket)]);
    let dir = witness(&host);
    let package = hostile_package(&host, &dir);
    let environment = format!(
        "environment: {{python: /usr/bin/python3, requirements: ['evil @ file://{}']}}\n",
        package.display()
    );
    let job = submitted(&host, GAMES, VANDAL, &environment);
    let (state, built) =
        (host.wait_for(&job, ENDED), fs::read_to_string(dir.join("built")).unwrap_or_default());
    tally.case("a package is built by nobody", || {
        let why = host.ctl(&["why", &job]).stdout;
        assert!(state == "Completed" && is_a_builders(&built), "{state}: {built}: {why}");
        assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "5\n");
    });
    tally.case("what it made is the daemon's", || is_the_daemons(&host, KEEPER));
    tally.case("and no job changes it", || is_whole(&host));
    fetched(tally, &host);
    tally.case("a job in a container has its owner's number, its outputs are stored, and it goes", || {
        let image = "environment: {image: 'agentd-test/busybox:1'}\n";
        let job = submitted(&host, GAMES, "id -u; umask 077; echo kept >outputs/x", image);
        let state = host.wait_for(&job, ENDED);
        assert_eq!(state, "Completed", "{}", host.ctl(&["why", &job]).stdout);
        assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "5\n");
        let to = host.home().join("got");
        host.ctl(&["download", &job, "--output", to.to_str().expect("UTF-8")]).ok();
        assert_eq!(fs::read_to_string(to.join("outputs/x")).expect("an output"), "kept\n");
        eventually("its container goes", SOON, || docker.containers_of(host.home()).is_empty().then_some(()));
        eventually("its directory goes", SOON, || (!job_dir(&host, &job).exists()).then_some(()));
    });
}

/// What else the daemon makes and hands out without root's rights: packages of conda, of uv, GPUs.
fn supplies(tally: &mut Tally, _: &Scale) {
    let (channel, temp) = (Channel::t1(), tempfile::tempdir().expect("a temporary directory"));
    fs::set_permissions(temp.path(), Permissions::from_mode(0o755)).expect("its own directory");
    let library = FakeNvml::build(temp.path());
    nvml::State::with(2).write(&library);
    let server = Server::start(channel);
    let (host, _helper) = split_with(&[
        ("AGENTD_CONDA_ALIAS", &server.alias()),
        ("AGENTD_CONDA_CHANNELS", "main"),
        ("AGENTD_NVML_LIBRARY", library.to_str().expect("UTF-8")),
    ]);
    copy_program(agent_tests::engine(), &host.home().join("bin/agent-env"));
    let conda = "environment: {conda_file: conda.yml}\n";
    let packages = "channels: [main]\ndependencies: [python, pip]\n";
    host.project(&format!("{GAMES}/p"), &[("conda.yml", packages)]);
    let change =
        "python -c 'import sys; open(sys.prefix + \"/x\", \"w\")' && python -c 'print(6 * 7)'; id -u";
    for what in ["packages of conda, and a layer over them", "the same again, from the kept environment"] {
        tally.case(what, || {
            let job = submitted(&host, GAMES, change, conda);
            assert_eq!(host.wait_for(&job, ENDED), "Completed", "{}", host.ctl(&["why", &job]).stdout);
            assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "42\n5\n");
        });
    }
    tally.case("GPUs are given, and each job sees its own", || {
        let wants = "resources: {gpus: 1}\n";
        let job = submitted(&host, GAMES, "echo $CUDA_VISIBLE_DEVICES", wants);
        assert_eq!(host.wait_for(&job, ENDED), "Completed", "{}", host.ctl(&["why", &job]).stdout);
        let said = host.ctl(&["logs", &job]).ok().stdout;
        assert!((0..2).any(|index| said.trim() == nvml::uuid(index)), "{said}");
    });
}

/// Data that a job names by its address.
fn fetched(tally: &mut Tally, host: &Host) {
    copy_program(agent_tests::engine(), &host.home().join("bin/agent-env"));
    let dir = host.home().join("served");
    fs::create_dir(&dir).expect("a directory");
    fs::write(dir.join("a.csv"), "1,2\n").expect("a file");
    let mut server = Command::new("python3")
        .args(["-u", "-m", "http.server", "--bind", "127.0.0.1", "0", "--directory"])
        .arg(&dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("Python runs");
    let mut said = String::new();
    let mut lines = std::io::BufReader::new(server.stdout.take().expect("a pipe"));
    std::io::BufRead::read_line(&mut lines, &mut said).expect("it says where it listens");
    let port = said.split_whitespace().skip_while(|word| *word != "port").nth(1).expect("a port");
    tally.case("data is fetched by nobody, and what a job changes of it is its own", || {
        let more = format!("inputs: {{d: {{type: uri_file, path: 'http://127.0.0.1:{port}/a.csv'}}}}\n");
        for _ in 0..2 {
            let job = submitted(host, GAMES, "cat ${{inputs.d}}; echo x >>${{inputs.d}} || true", &more);
            let state = host.wait_for(&job, ENDED);
            assert_eq!(state, "Completed", "{}", host.ctl(&["why", &job]).stdout);
            assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "1,2\n");
        }
    });
    let _ = server.kill();
    let _ = server.wait();
}

fn of_user(uid: u32) -> Vec<PathBuf> {
    of_users(uid..=uid)
}

/// The processes of these users.
pub(crate) fn of_users(uids: RangeInclusive<u32>) -> Vec<PathBuf> {
    let entries = fs::read_dir("/proc").expect("a directory").flatten().map(|entry| entry.path());
    let is_its = |path: &PathBuf| {
        path.join("stat").exists() && path.metadata().is_ok_and(|found| uids.contains(&found.uid()))
    };
    entries.filter(is_its).collect()
}

/// Asks the helper as a daemon that was taken over, or as somebody else; says what it answered.
const ASK: &str = r"
import json, os, socket, struct, sys
path, order = sys.argv[1], json.loads(sys.argv[2])
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack('ll', 20, 0))
try:
    s.connect(path)
    s.settimeout(20)
    body = order.get('raw', '').encode() * order.get('times', 1) or json.dumps(order['verb']).encode()
    fds = [os.pipe()[1] if fd == 'pipe' else os.open(fd, os.O_RDONLY) for fd in order.get('fds', [])]
    socket.send_fds(s, [body], fds) if fds else s.send(body)
    print((s.recv(1 << 17) or b'closed').decode())
except OSError as error:
    print('closed', error)
";

pub(crate) fn ask(helper: &Helper, user: u32, order: &Value) -> String {
    at_helper(ASK, helper, user, order)
}

/// What a script prints that somebody runs with the place of the helper's socket, and what he wants of it.
pub(crate) fn at_helper(script: &str, helper: &Helper, user: u32, order: &Value) -> String {
    let uid = user.to_string();
    let asked = Command::new("setpriv")
        .args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "/usr/bin/python3", "-c", script])
        .arg(helper.socket())
        .arg(order.to_string())
        .output()
        .expect("Python runs");
    format!("{}{}", String::from_utf8_lossy(&asked.stdout), String::from_utf8_lossy(&asked.stderr))
}

type Order = (&'static str, Value);

fn give(path: &str, uid: u32) -> Value {
    json!({"verb": {"give": {"path": path, "uid": uid, "kind": "everything"}}})
}

fn copy(from: &str, to: &str) -> Value {
    json!({"verb": {"copy": {"from": from, "to": to, "uid": 2_000_000_001, "most": 1 << 30}}})
}

fn take(path: &str) -> Value {
    json!({"verb": {"take": {"path": path, "part": {"whole": {"uid": 2_000_000_001}}}}})
}

fn of_files(secret: &str) -> Vec<Order> {
    vec![
        ("a path above the state directory", give("../secret", 2_000_000_001)),
        ("a path with dots inside", give("jobs/../../secret", 2_000_000_001)),
        ("an absolute path", give(secret, 2_000_000_001)),
        ("a whole root", give("jobs", 2_000_000_001)),
        ("the controller's secrets", give("controller/secrets", 2_000_000_001)),
        ("a link in the path", give("jobs/a.1.0/out", 2_000_000_001)),
        ("a link to a directory", give("envs/root", 2_000_000_001)),
        ("a file", give("jobs/a.1.0/hard", 2_000_000_001)),
        ("giving to root", give("jobs/a.1.0", 0)),
        ("giving to a system account", give("jobs/a.1.0", 2)),
        ("giving to nobody", give("jobs/a.1.0", NOBODY)),
        ("taking through a link", take("envs/root")),
        ("taking above", take("envs/../..")),
        (
            "taking what is root's",
            json!({"verb": {"take": {"path": "jobs/a.1.0", "part": {"whole": {"uid": 0}}}}}),
        ),
        (
            "copying what is root's",
            json!({"verb": {"copy": {"from": "jobs/a.1.0", "to": "jobs/e.1.0", "uid": 0, "most": 1 << 30}}}),
        ),
        ("copying through a link", copy("envs/root", "jobs/e.1.0")),
        ("copying above", copy("jobs/../..", "jobs/e.1.0")),
        ("copying the controller's secrets", copy("controller/secrets", "jobs/e.1.0")),
        ("copying to a link", copy("jobs/a.1.0", "envs/root")),
        ("copying to a directory of another user", copy("jobs/e.1.0", "jobs/c.1.0")),
        ("copying above the state directory", copy("jobs/a.1.0", "../run")),
    ]
}

fn of_processes(helper: u32, daemon: u32) -> Vec<Order> {
    let supervise = |replica: &str, uid: u32, fds: &[&str]| json!({"verb": {"supervise": {"replica": replica, "uid": uid}}, "fds": fds});
    let kill = |groups: &[&str], mark: &str| json!({"verb": {"kill": {"groups": groups, "mark": mark, "within_ms": 1000}}});
    let build = |fds: &[&str]| json!({"verb": {"build": {"argv": ["/usr/bin/id"], "env": [], "cwd": "/", "nice": 0}}, "fds": fds});
    let build_as = |owner: &str, sees: &str| {
        let program = json!({
            "argv": ["/usr/bin/id"], "env": [], "cwd": "/", "nice": 0, "owner": owner, "sees": [sees]});
        json!({"verb": {"build": program}, "fds": ["/dev/null", "pipe", "pipe"]})
    };
    let scope = |pid: u32| {
        json!({"verb": {"enclose": {"pid": pid, "scope": {"job": {
            "replica": "a.1.0", "instance": "0123456789", "metadata": false}}}}})
    };
    let uuid = "0f0e0d0c-0b0a-0908-0706-050403020100";
    vec![
        ("a supervisor for root", supervise("a.1.0", 0, &["pipe"])),
        ("a supervisor for the daemon itself", supervise("a.1.0", KEEPER, &["pipe"])),
        ("a supervisor for a number of nobody", supervise("a.1.0", 59_998, &["pipe"])),
        ("a supervisor elsewhere", supervise("../../etc", 2_000_000_001, &["pipe"])),
        ("a supervisor that is not there", supervise("none.1.0", 2_000_000_001, &["pipe"])),
        ("a greeting to a file", supervise("a.1.0", 2_000_000_001, &["/dev/null"])),
        ("a supervisor without a pipe", supervise("a.1.0", 2_000_000_001, &[])),
        ("too many pipes", supervise("a.1.0", 2_000_000_001, &["pipe", "pipe"])),
        ("more descriptors than there is room", supervise("a.1.0", 2_000_000_001, &["pipe"; 9])),
        ("a builder that writes to files", build(&["/dev/null", "/dev/null", "/dev/null"])),
        ("a builder without streams", build(&[])),
        ("a builder of nobody", build_as("nobody", "envs/pip-1")),
        ("a builder of what is no owner", build_as("../../jobs", "envs/pip-1")),
        ("a builder of whom the caches do not belong to", build_as("daemon", "envs/pip-1")),
        ("a builder that sees the secrets", build_as("ada", "controller/secrets")),
        ("a builder that sees a link", build_as("ada", "envs/root")),
        ("an environment for the builder of nobody", give("envs/pip-1", 2_000_000_007)),
        ("caches of another for a builder", give("packages/of/ada", 2_000_000_009)),
        ("killing the machine's groups", kill(&["/sys/fs/cgroup/system.slice"], uuid)),
        ("killing through dots", kill(&["/sys/fs/cgroup/agentd-x/../init.scope"], uuid)),
        ("killing by another mark", kill(&[], "/")),
        ("a scope for the first process", scope(1)),
        ("a scope for the helper", scope(helper)),
        ("a scope for the daemon", scope(daemon)),
        ("a verb that is none", json!({"verb": {"exec": {"argv": ["id"]}}})),
        (
            "a field too many",
            json!({"verb": {"take": {"path": "jobs/a.1.0", "part": "directories", "as": "root"}}}),
        ),
        ("no JSON", json!({"raw": "{"})),
        ("deep JSON", json!({"raw": "[", "times": 100_000})),
        ("a frame that is too long", json!({"raw": "x", "times": 131_073})),
    ]
}

fn attacks(tally: &mut Tally, _: &Scale) {
    let (mut host, helper) = split_with(&[]);
    let (state, daemon) = (host.state(), host.pid());
    host.kill(); // it would remove what it does not know
    let secret = host.home().join("secret");
    fs::write(&secret, "root's").expect("a file");
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).expect("its own file");
    let tree = state.join("jobs/a.1.0");
    fs::create_dir_all(&tree).expect("a directory");
    fs::hard_link(&secret, tree.join("hard")).expect("one file system");
    symlink(&secret, tree.join("soft")).expect("a link");
    symlink(host.home(), tree.join("out")).expect("a link");
    let (copies, others) = (state.join("jobs/e.1.0"), state.join("jobs/c.1.0"));
    for (dir, uid) in [(&copies, KEEPER), (&others, GAMES)] {
        fs::create_dir(dir).expect("a directory");
        chown(dir, Some(uid), Some(uid)).expect("giving away needs root");
    }
    for path in [&tree, &tree.join("soft")] {
        std::os::unix::fs::lchown(path, Some(KEEPER), Some(KEEPER)).expect("giving away needs root");
    }
    symlink("/root", state.join("envs/root")).expect("a link");
    fs::create_dir_all(state.join("envs/pip-1")).expect("a directory");
    for (owner, uid) in [("ada", 2_000_000_008), ("bob", 2_000_000_009), ("daemon", KEEPER)] {
        let cache = state.join("packages/of").join(owner);
        fs::create_dir_all(&cache).expect("a directory");
        chown(&cache, Some(uid), Some(uid)).expect("giving away needs root");
    }
    let secret_path = secret.to_str().expect("UTF-8");
    let orders = of_files(secret_path).into_iter().chain(of_processes(helper.pid(), daemon));
    for (what, order) in orders {
        tally.case(what, || {
            let said = ask(&helper, KEEPER, &order);
            let is_no = ["refused", "failed", "closed"].iter().any(|word| said.contains(word));
            assert!(is_no && !said.contains("Traceback"), "{said}");
        });
    }
    for user in [GAMES, NOBODY, 1000, 2_000_000_001] {
        tally.case("somebody else asks", || {
            let said = ask(&helper, user, &give("jobs/a.1.0", 2_000_000_001));
            assert!(said.contains("closed"), "{user}: {said}");
        });
    }
    tally.case("what was refused did nothing, and what is done leaves root's files alone", || {
        let said = ask(&helper, KEEPER, &give("jobs/a.1.0", 2_000_000_001));
        assert!(said.contains("done"), "{said}");
        assert_eq!(tree.metadata().expect("a directory").uid(), 2_000_000_001);
        for path in [&secret, &tree.join("hard"), host.home()] {
            assert_eq!(path.metadata().expect("it is there").uid(), 0, "{}", path.display());
        }
        assert_eq!(fs::read_to_string(&secret).expect("root reads it"), "root's");
        let said = ask(&helper, KEEPER, &copy("jobs/a.1.0", "jobs/e.1.0"));
        assert!(said.contains("copied") && said.contains("hard"), "{said}");
        let copied = fs::read_dir(&copies).expect("a directory").flatten().map(|entry| entry.file_name());
        let mut copied: Vec<_> = copied.collect();
        copied.sort();
        assert_eq!(copied, ["soft"], "only the link is not root's");
        let said = ask(&helper, KEEPER, &take("jobs/a.1.0"));
        assert!(said.contains("done"), "{said}");
        assert_eq!(secret.metadata().expect("it is there").uid(), 0);
    });
    wrong_launch(tally, &host, &helper);
}

/// The launch record is the daemon's own: what it says of users counts for nothing, and its supervisor writes nowhere
/// that the daemon could not.
fn wrong_launch(tally: &mut Tally, host: &Host, helper: &Helper) {
    let dir = host.state().join("jobs/b.1.0");
    for part in ["", "log", "job", "job/work"] {
        fs::create_dir_all(dir.join(part)).expect("a directory");
        chown(dir.join(part), Some(KEEPER), Some(KEEPER)).expect("giving away needs root");
    }
    let roots = host.home().join("roots");
    fs::write(&roots, "as it was\n").expect("a file");
    let launch = json!({"version": 2, "replica": "b.1.0", "argv": ["/bin/sh", "-c", "id"], "env": {},
        "cwd": "work", "grace_ms": 1000, "user": {"uid": 0, "gid": 0, "groups": [0]}});
    for (name, text) in [("launch.json", launch.to_string()), ("job/tracking.jsonl", String::new())] {
        fs::write(dir.join(name), text).expect("a file");
        chown(dir.join(name), Some(KEEPER), Some(KEEPER)).expect("giving away needs root");
    }
    symlink(&roots, dir.join("shim.log")).expect("a link");
    let order = json!({"verb": {"supervise": {"replica": "b.1.0", "uid": 2_000_000_001}}, "fds": ["pipe"]});
    tally.case("a supervisor follows no link further than the daemon", || {
        ask(helper, KEEPER, &order);
        std::thread::sleep(std::time::Duration::from_secs(1)); // it would have written at once
        assert_eq!(fs::read_to_string(&roots).expect("root reads it"), "as it was\n");
    });
    tally.case("a launch record makes nobody root", || {
        fs::remove_file(dir.join("shim.log")).expect("a link");
        ask(helper, KEEPER, &order);
        eventually("the supervisor stands", SOON, || dir.join("shim.sock").exists().then_some(()));
        let go = "import socket,sys\ns=socket.socket(socket.AF_UNIX);s.settimeout(20);s.connect(sys.argv[1])\n\
                  s.recv(4096);s.sendall(b'{\"verb\":\"go\"}\\n');print(s.recv(4096))";
        let told = Command::new("setpriv")
            .args(["--reuid", "33", "--regid", "33", "--clear-groups", "/usr/bin/python3", "-c", go])
            .arg(dir.join("shim.sock"))
            .output()
            .expect("Python runs");
        let exit = eventually("the job is over", SOON, || fs::read_to_string(dir.join("exit.json")).ok());
        let log = Command::new("grep").args(["-rah", "uid="]).arg(dir.join("log")).output().expect("grep runs");
        let said = String::from_utf8_lossy(&log.stdout).into_owned();
        assert!(said.contains("uid=2000000001 gid=2000000001"), "{said} {exit} {told:?}");
    });
}

/// What `systemd-analyze` says of the unit, at most.
const EXPOSURE: f64 = 3.0;

fn exposure(tally: &mut Tally, _: &Scale) {
    tally.case("the exposure of the service", || {
        let temp = tempfile::tempdir().expect("a temporary directory");
        let unit = temp.path().join("agentd.service");
        fs::copy(root().join("systemd/agentd.service"), &unit).expect("a unit");
        let told = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager"])
            .arg(unit)
            .output()
            .expect("systemd-analyze runs: install systemd");
        let said = String::from_utf8_lossy(&told.stdout).into_owned();
        let score = said.lines().find_map(|line| {
            let (_, rest) = line.split_once("exposure level for agentd.service: ")?;
            rest.split_whitespace().next()?.parse::<f64>().ok()
        });
        assert!(score.is_some_and(|score| score <= EXPOSURE), "{said}");
    });
}
