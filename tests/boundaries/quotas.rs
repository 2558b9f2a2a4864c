//! What one job takes of the daemon: memory, threads, connections, the disk. While it takes, everybody else is answered.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, eventually, resident};

use crate::boundaries::links::{attack, root_daemon};
use crate::boundaries::prey::Prey;

pub(crate) const ROWS: &[Row] = &[
    Row { id: "Q1", promise: "files of any size cost neither the disk nor a cancel", run: sizes },
    Row {
        id: "Q2",
        promise: "calls without end keep no thread from others, and who calls too often is told so",
        run: calls,
    },
    Row { id: "Q3", promise: "names without end leave the daemon as small as it was", run: names },
    Row { id: "Q4", promise: "connections without end keep nobody from the endpoint", run: connections },
];

/// The daemon answers, and another job runs to its end beside.
#[track_caller]
fn others_go_on(host: &Host) {
    host.ctl(&["status"]).ok();
    let job = host.submit("echo beside");
    assert_eq!(host.wait_for(&job, &["Completed", "Failed"]), "Completed");
    assert!(host.ctl(&["logs", &job]).ok().stdout.contains("beside"));
}

/// How much a job leaves that is hardly anything.
const SIZES: &[(&str, &str)] = &[
    (
        "a metrics file with a hole",
        "truncate -s 1T $AGENTD_METRICS || truncate -s 8T $AGENTD_METRICS; echo x >> $AGENTD_METRICS",
    ),
    ("a metrics file of one line without end", "head -c 30000000 /dev/zero | tr '\\0' x >> $AGENTD_METRICS"),
    ("an output with a hole", "truncate -s 500G outputs/a"),
    ("a log with a hole", "truncate -s 500G logs/a"),
    ("many outputs with holes", "for i in $(seq 200); do truncate -s 100G outputs/$i; done"),
    ("a deep folder", "cd outputs; for i in $(seq 900); do mkdir d && cd d || break; done; echo x > x"),
    ("many names", "cd outputs; mkdir d; cd d; seq 20000 | xargs touch"),
];

fn sizes(tally: &mut Tally, _: &Scale) {
    let host = root_daemon();
    for (what, script) in SIZES {
        tally.case(what, || {
            let prey = Prey::new();
            let job = host.submit(&format!("{}{script}; echo made; :", prey.names()));
            eventually("it is made", SOON, || {
                host.ctl(&["logs", &job]).stdout.contains("made").then_some(())
            });
            host.ctl(&["show", &job, "--json"]).ok();
            others_go_on(&host);
            host.ctl(&["cancel", &job]);
            host.wait_for(&job, &["Completed", "Failed", "Canceled"]);
            host.ctl(&["show", &job, "--json"]).ok();
            let taken = taken(host.home());
            assert!(taken < MOST_TAKEN, "{taken} bytes of the disk are gone");
        });
    }
}

/// What all these jobs together may take of the disk, in bytes: more than that is what the holes would take.
const MOST_TAKEN: u64 = 2 << 30;

/// Bytes that a directory takes.
fn taken(dir: &Path) -> u64 {
    let (mut left, mut bytes) = (vec![dir.to_owned()], 0);
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(found) if found.is_dir() => left.push(entry.path()),
                Ok(found) => bytes += found.blocks() * 512,
                Err(_) => {} // it was removed meanwhile
            }
        }
    }
    bytes
}

/// Calls the endpoint on many threads at once, and says how often it was answered and how often put off.
const CALLS: &str = r#"
import collections, json, os, sys, threading, urllib.error, urllib.request
uri, run = os.environ["MLFLOW_TRACKING_URI"], os.environ["MLFLOW_RUN_ID"]
head = {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"]}
came, guard = collections.Counter(), threading.Lock()
def ask(path, body=None, method=None):
    asked = urllib.request.Request(uri + path, data=body, headers=head, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=100) as answer:
            answer.read()
            code = answer.status
    except urllib.error.HTTPError as error:
        code = error.code
        if code in (429, 503) and not error.headers.get("Retry-After"):
            code = "no date"
    except OSError as error:
        code = "broken"
    with guard: came[code] += 1
def together(count, *args, **more):
    threads = [threading.Thread(target=ask, args=args, kwargs=more) for _ in range(count)]
    [thread.start() for thread in threads]; print("begun", flush=True); [thread.join() for thread in threads]
artifacts = "/api/2.0/mlflow-artifacts/artifacts/" + os.environ["MLFLOW_EXPERIMENT_ID"] + "/" + run + "/artifacts"
"#;

const KINDS: &[(&str, &str)] = &[
    (
        "histories of five million values",
        "together(700, f'/api/2.0/mlflow/metrics/get-history?run_id={run}&metric_key=loss')",
    ),
    ("whole runs", "together(700, f'/api/2.0/mlflow/runs/get?run_id={run}')"),
    ("searches", "together(300, '/api/2.0/mlflow/runs/search', b'{}')"),
    ("lists of artifacts", "together(700, f'/api/2.0/mlflow/artifacts/list?run_id={run}')"),
    ("uploads", "together(300, artifacts + '/a', b'x' * 100000, 'PUT')"),
    ("downloads", "ask(artifacts + '/a', b'x' * 1000000, 'PUT'); together(300, artifacts + '/a')"),
    (
        "batches",
        "together(200, '/api/2.0/mlflow/runs/log-batch', json.dumps({'run_id': run, 'tags': [{'key': f't{i}', 'value': 'x' * 4000} for i in range(100)]}).encode())",
    ),
];

fn calls(tally: &mut Tally, scale: &Scale) {
    let host = root_daemon();
    let lines = scale.of(500_000, 5_000_000);
    for (what, script) in KINDS {
        tally.case(what, || {
            let fill = format!(
                "awk 'BEGIN {{ for (i = 0; i < {lines}; i++) print \"{{\\\"metric\\\":\\\"loss\\\",\\\"value\\\":1,\\\"step\\\":\" i \"}}\" }}' >> $AGENTD_METRICS"
            );
            let fill = if what.contains("histories") { fill.as_str() } else { ":" };
            let code = format!("{CALLS}\n{script}\nprint('came', dict(came))");
            let dir = host.project("calls", &[("calls.py", code.as_str())]);
            let ran = host.ctl(&["submit", dir.to_str().expect("UTF-8"), "--", "sh", "-c", &format!("{fill}; python3 calls.py")]);
            let job = ran.ok().stdout.trim().to_owned();
            let log = || host.ctl(&["logs", &job]).stdout;
            eventually("it calls", SOON, || log().contains("begun").then_some(()));
            others_go_on(&host);
            assert!(threads(host.pid()) < 600, "the daemon has {} threads", threads(host.pid()));
            host.wait_for(&job, &["Completed", "Failed"]);
            let said = log();
            assert!(said.contains("came") && said.contains("200:"), "nobody was answered: {said}");
            assert!(!said.contains("no date"), "somebody was put off without a date: {said}");
        });
    }
}

fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// How a job has the daemon remember things.
const NAMES: &[(&str, &str)] = &[
    ("tags", r#"{\"tag\":\"t" i "\",\"text\":\"x\"}"#),
    ("parameters", r#"{\"param\":\"p" i "\",\"text\":\"x\"}"#),
    ("metrics", r#"{\"metric\":\"m" i "\",\"value\":1}"#),
];

fn names(tally: &mut Tally, scale: &Scale) {
    /// What is known of one run takes a quarter of that; the rest is what a daemon takes anyway.
    const MOST: u64 = 300 << 20;
    let count = scale.of(300_000, 3_000_000);
    for (what, line) in NAMES {
        tally.case(&format!("{count} {what}"), || {
            let host = root_daemon();
            let script = format!(
                "awk 'BEGIN {{ for (i = 0; i < {count}; i++) print \"{line}\" }}' >> $AGENTD_METRICS; \
                 for i in 1 2; do python3 -c 'import os, urllib.request as u; \
                 u.urlopen(u.Request(os.environ[\"MLFLOW_TRACKING_URI\"] + \"/api/2.0/mlflow/runs/get?run_id=\" + os.environ[\"MLFLOW_RUN_ID\"], \
                 headers={{\"Authorization\": \"Bearer \" + os.environ[\"MLFLOW_TRACKING_TOKEN\"]}})).read()'; done; echo asked"
            );
            let (job, _) = attack(&host, &Prey::new(), &script);
            assert!(host.ctl(&["logs", &job]).stdout.contains("asked"));
            let resident = resident(host.pid());
            assert!(resident < MOST, "the daemon has {} MiB", resident >> 20);
            others_go_on(&host);
        });
    }
}

/// How somebody comes, and says nothing, or not all of it.
const WAYS: &[(&str, &str)] = &[
    ("nothing is said", "b''"),
    ("half of a head is said", "b'GET / HTTP/1.1\\r\\nHost: x\\r\\n'"),
    (
        "half of a body is said",
        "b'POST /api/2.0/mlflow/runs/search HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 1000\\r\\n\\r\\n{'",
    ),
];

fn connections(tally: &mut Tally, scale: &Scale) {
    for (what, said) in WAYS {
        tally.case(what, || {
            let host = root_daemon();
            let count = scale.of(1100, 3000);
            let code = format!(
                "{CALLS}\nimport resource, socket, time\n\
                 hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n\
                 resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8000), hard))\n\
                 host, port = uri.removeprefix('http://').split(':')\nheld = []\n\
                 for _ in range({count}):\n  try:\n    s = socket.create_connection((host, int(port)), 5); s.sendall({said}); held.append(s)\n  except OSError: pass\n\
                 print('begun', len(held), flush=True)\n\
                 while 200 not in came:\n  ask(f'/api/2.0/mlflow/runs/get?run_id={{run}}'); time.sleep(0.5)\n\
                 print('came', dict(came))"
            );
            let dir = host.project("connects", &[("calls.py", code.as_str())]);
            let job = host.ctl(&["submit", dir.to_str().expect("UTF-8"), "--", "python3", "calls.py"]);
            let job = job.ok().stdout.trim().to_owned();
            eventually("it is connected", SOON, || {
                host.ctl(&["logs", &job]).stdout.contains("begun").then_some(())
            });
            others_go_on(&host);
            assert_eq!(host.wait_for(&job, &["Completed", "Failed"]), "Completed");
            let said = host.ctl(&["logs", &job]).stdout;
            assert!(said.contains("200:") && !said.contains("no date"), "{said}");
        });
    }
}
