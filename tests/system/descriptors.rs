//! A box that is short of descriptors: strangers that hold connections cost no output of a job, no metric, and nobody
//! the daemon.

use std::fs::{self, Permissions};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use agent_tests::{Host, SOON, eventually};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Connections that strangers hold.
const STRANGERS: usize = 1_100;

/// The same of those that say nothing.
const SILENT: usize = 1_300;

/// Leaves many small files and two large ones, says where the tracking endpoint is and how many files it may open, and
/// ends when it may.
const COMMAND: &str = "for i in $(seq 600); do echo \"file $i\" > outputs/$i; done; \
     head -c 3000000 /dev/zero | tr '\\0' x > outputs/large; head -c 400000 /dev/urandom > outputs/random; \
     sha256sum outputs/* | sort | sha256sum > outputs/sum; echo limit $(ulimit -Sn); echo $MLFLOW_TRACKING_URI";

/// When it may, logs a hundred metrics, each over a connection of its own, and says how the calls were answered.
const METRICS: &str = r#"
import collections, json, os, pathlib, time, urllib.request
print(os.environ["MLFLOW_TRACKING_URI"], flush=True)
while not pathlib.Path(os.environ["MAY"]).exists():
    time.sleep(0.05)
answers = collections.Counter()
for step in range(100):
    body = {"run_id": os.environ["MLFLOW_RUN_ID"], "key": "m", "value": step, "step": step, "timestamp": 1}
    head = {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"], "Content-Type": "application/json"}
    path = os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/runs/log-metric"
    try:
        answers[urllib.request.urlopen(urllib.request.Request(path, json.dumps(body).encode(), head)).status] += 1
    except Exception as error:
        answers[repr(error)] += 1
print(dict(answers))
"#;

/// A program that starts the daemon with these limits of open files.
fn with_limits(dir: &Path, soft: u32, hard: Option<u32>) -> std::path::PathBuf {
    let runner = dir.join(format!("limited-{soft}"));
    let hard = hard.map_or(String::new(), |hard| format!("ulimit -Hn {hard}; "));
    fs::write(&runner, format!("#!/bin/sh\nulimit -Sn {soft}; {hard}exec \"$@\"\n")).unwrap();
    fs::set_permissions(&runner, Permissions::from_mode(0o755)).unwrap();
    runner
}

/// Other programs of a user may have taken all that the kernel has of watches for files: jobs run all the same, their
/// metrics arrive while they run, and their supervisors are found.
#[test]
fn test_jobs_need_no_watches_of_files() {
    let scripts = tempfile::tempdir().unwrap();
    let runner = scripts.path().join("unwatched");
    let script = "#!/bin/sh\nexec unshare --user --map-root-user sh -c \
                  'echo 0 > /proc/sys/user/max_inotify_instances && exec \"$@\"' sh \"$@\"\n";
    fs::write(&runner, script).unwrap();
    fs::set_permissions(&runner, Permissions::from_mode(0o755)).unwrap();
    let mut host = Host::started_by(&runner);
    let job = host.submit(
        "echo '{\"metric\":\"loss\",\"value\":1.5}' >> $AGENTD_METRICS; while [ ! -e go ]; do sleep 0.1; done; \
         echo '{\"metric\":\"loss\",\"value\":0.5}' >> $AGENTD_METRICS",
    );
    let points = || host.ctl(&["metrics", &job, "--json"]).ok().json()["metrics"][0]["count"].clone();
    eventually("the first point arrives", SOON, || (points() == 1).then_some(()));
    let dir = host.state().join(format!("jobs/{job}.1.0"));
    let notes = fs::read_to_string(dir.join("shim.log")).unwrap();
    assert!(notes.contains("cannot be watched"), "{notes}");
    fs::remove_file(dir.join("hello.json")).unwrap();
    eventually("the supervisor is found again", SOON, || dir.join("hello.json").exists().then_some(()));
    assert_eq!(host.stop(), 0);
    host.start();
    fs::write(dir.join("job/work/go"), "").unwrap();
    host.wait_for(&job, &["Completed"]);
    let points = host.ctl(&["metrics", &job, "--json"]).ok().json()["metrics"][0]["count"].clone();
    assert_eq!(points, 2);
}

/// The files of a directory and what is in them.
fn content(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = files
        .map(|path| (path.file_name().unwrap().display().to_string(), fs::read(&path).unwrap()))
        .collect();
    all.sort();
    all
}

fn strangers_cost_nothing(soft: u32, hard: Option<u32>) {
    let scripts = tempfile::tempdir().unwrap();
    let mut host = Host::started_by(&with_limits(scripts.path(), soft, hard));
    let job = host.submit(COMMAND);
    host.wait_for(&job, &["Completed"]);
    let log = host.ctl(&["logs", &job]).ok().stdout;
    let (limit, uri) = log.trim().split_once('\n').unwrap();
    assert_eq!(limit, format!("limit {soft}"), "a job has the limit that the daemon was started with");
    let download = |host: &Host, to: &str| {
        let to = host.home().join(to);
        let ran = host.ctl(&["download", &job, "--force", "-o", to.to_str().unwrap()]);
        (ran, to.join("outputs"))
    };
    let (ran, before) = download(&host, "before");
    ran.ok();
    let before = content(&before);
    assert_eq!(before.len(), 603);

    // This process holds what the strangers would.
    let usual = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: usual.maximum, ..usual }).unwrap();
    let address = uri.trim_start_matches("http://");
    let strangers: Vec<TcpStream> = (0..STRANGERS).filter_map(|_| TcpStream::connect(address).ok()).collect();
    assert!(strangers.len() > STRANGERS / 2, "only {} connections", strangers.len());
    for round in 0..3 {
        let (ran, _) = download(&host, &format!("meanwhile-{round}"));
        let told = ["damaged", "is not in the store", "SNP-105", "SNP-103"];
        assert!(!told.iter().any(|word| ran.stderr.contains(word)), "{}", ran.stderr);
    }
    let other = host.submit("true");
    drop(strangers);
    host.wait_for(&other, &["Completed"]);

    let (ran, after) = eventually("a download that holds", SOON, || {
        let (ran, after) = download(&host, "after");
        (ran.code == 0).then_some((ran, after))
    });
    assert_eq!((content(&after) == before, ran.code), (true, 0));
    host.ctl(&["gc", "--check"]).ok();
    assert_eq!(host.stop(), 0);
    host.start();
    let (ran, again) = download(&host, "again");
    ran.ok();
    assert!(content(&again) == before, "after a restart");
}

#[test]
fn test_idle_connections_cost_no_output_with_the_usual_limit() {
    strangers_cost_nothing(1024, None);
}

#[test]
fn test_idle_connections_cost_no_output_where_the_limit_cannot_be_raised() {
    strangers_cost_nothing(256, Some(256));
}

/// This process holds so many silent connections, which it opens anew until `done` says so; returns what that says.
pub(crate) fn beside_silent_connections<S, T>(
    connect: impl Fn() -> Option<S>,
    mut done: impl FnMut() -> Option<T>,
) -> T {
    let usual = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: usual.maximum, ..usual }).unwrap();
    let mut held: Vec<S> = (0..SILENT).filter_map(|_| connect()).collect();
    assert!(held.len() > SILENT / 2, "only {} connections", held.len());
    eventually("it is done", SOON, || {
        held.splice(0..SILENT / 10, (0..SILENT / 10).filter_map(|_| connect()));
        done()
    })
}

#[test]
fn test_silent_connections_take_no_metric_of_a_job_and_the_daemon_from_nobody() {
    let host = Host::started();
    let may = host.home().join("may");
    let job = host.submit(&format!("MAY={} exec python3 -c '{METRICS}'", may.display()));
    let uri = eventually("it says where", SOON, || {
        let log = host.ctl(&["logs", &job]).stdout;
        log.lines().next().filter(|line| line.starts_with("http://")).map(str::to_owned)
    });
    let address = uri.trim_start_matches("http://");
    beside_silent_connections(
        || TcpStream::connect(address).ok(),
        || {
            fs::write(&may, "").unwrap();
            ["Completed", "Failed"].contains(&host.job_state(&job).as_str()).then_some(())
        },
    );
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, format!("{uri}\n{{200: 100}}\n"));
    let socket = host.state().join("agentd.sock");
    let calls = std::cell::Cell::new(0);
    beside_silent_connections(
        || UnixStream::connect(&socket).ok(),
        || {
            host.ctl(&["jobs"]).ok();
            calls.set(calls.get() + 1);
            (calls.get() == 3).then_some(())
        },
    );
}
