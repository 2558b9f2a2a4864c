//! The numbers for Prometheus, read by Prometheus: its checker, a scrape, the alerts and the dashboard of `packaging/`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use agent_tests::nvml::{FakeNvml, State};
use agent_tests::{Host, SOON, eventually, finish, root};
use serde_json::Value;

/// A port that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A box with a GPU that serves its numbers at this port, not started.
fn serving(dir: &Path, port: u16) -> Host {
    let library = FakeNvml::build(dir);
    State::with(1).write(&library);
    let mut host = Host::new();
    host.set("AGENTD_NVML_LIBRARY", library.to_str().unwrap());
    host.set("AGENTD_METRICS_LISTEN", &format!("127.0.0.1:{port}"));
    host
}

/// Sends this and gives the whole answer.
fn ask(port: u16, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The page, once it has this.
fn page_with(port: u16, part: &str) -> String {
    eventually(&format!("the page has {part}"), SOON, || {
        TcpStream::connect(("127.0.0.1", port)).ok()?;
        let answer = ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, page) = answer.split_once("\r\n\r\n")?;
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("version=0.0.4"), "{head}");
        page.contains(part).then(|| page.to_owned())
    })
}

#[allow(clippy::disallowed_methods, reason = "runs what reads the numbers")]
fn program(name: &str) -> Command {
    Command::new(name)
}

/// What is wrong with a page.
fn checked(dir: &Path, page: &str) -> String {
    let file = dir.join("page.txt");
    fs::write(&file, page).unwrap();
    let mut promtool = program("promtool");
    promtool.args(["check", "metrics"]).stdin(fs::File::open(&file).unwrap());
    let ran = finish(&mut promtool);
    format!("{}{}", ran.stdout, ran.stderr)
}

/// The names of numbers in a text.
fn names_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("agent_")).map(str::to_owned).collect()
}

fn packaged(name: &str) -> PathBuf {
    root().join("packaging/prometheus").join(name)
}

/// A machine that joined a controller elsewhere has these as well.
const ELSEWHERE: [&str; 1] = ["agent_certificate_end_timestamp_seconds"];

#[test]
fn test_the_page_is_one_that_prometheus_reads_and_names_no_user() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut host = serving(dir.path(), port);
    host.start();
    let job =
        host.ctl(&["submit", "--name", "busy", "--gpus", "1", "--memory", "1GiB", "--", "sleep", "600"]);
    let job = job.ok().stdout.trim().to_owned();
    let failed = host.submit("exit 3");
    host.wait_for(&failed, &["Failed"]);
    // Both are there, and the picture of the controller is newer than the start of the job.
    page_with(port, "agent_job_memory_bytes{hpc_job=\"busy\",rank=\"0\"} ");
    let page = page_with(port, "agent_jobs{state=\"Running\"} 1");
    assert_eq!(checked(dir.path(), &page), "", "{page}");
    assert!(page.contains("agent_jobs_ended_total{outcome=\"Failed\",blame=\"user\"} 1"), "{page}");
    assert!(
        page.contains("agent_gpu_given{uuid=\"GPU-") && page.contains("agent_gpus{state=\"given\"} 1"),
        "{page}"
    );
    let named = page.lines().filter(|line| !line.starts_with('#') && line.contains("busy"));
    let of_node = |line: &str| line.starts_with("agent_job_") || line.starts_with("agent_gpu_");
    assert!(named.clone().all(of_node), "jobs are named on the page of their node alone: {page}");
    assert!(named.count() >= 5, "{page}");
    let of_people = ["root", "user=", "owner=", "uid "];
    assert!(!of_people.iter().any(|word| page.contains(word)), "{page}");

    // Every number that is shown, warned of or explained is there.
    let there = names_in(&page);
    let mut told = BTreeMap::new();
    for name in ["dashboard.json", "rules.yml"] {
        told.insert(name.to_owned(), names_in(&fs::read_to_string(packaged(name)).unwrap()));
    }
    told.insert(
        "see.md".to_owned(),
        names_in(&fs::read_to_string(root().join("agent/docs/see.md")).unwrap()),
    );
    for (file, names) in &told {
        let unknown =
            names.iter().filter(|name| !there.contains(*name) && !ELSEWHERE.contains(&name.as_str()));
        assert_eq!(unknown.collect::<Vec<_>>(), Vec::<&String>::new(), "{file}");
        assert!(names.len() > 5, "{file}");
    }
    let explained = &told["see.md"];
    let families = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    for family in families.filter(|family| *family != "agent_build_info") {
        assert!(explained.contains(family), "{family} is not in the guide");
    }

    // A job that ended is no label any more.
    host.ctl(&["cancel", &job]).ok();
    host.wait_for(&job, &["Canceled"]);
    let page = page_with(port, "agent_jobs_running 0");
    assert!(!page.contains("hpc_job"), "{page}");
}

/// A Prometheus that is ended when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn test_a_real_prometheus_scrapes_with_the_files_of_the_package() {
    let dir = tempfile::tempdir().unwrap();
    let (port, own) = (free_port(), free_port());
    let mut host = serving(dir.path(), port);
    host.start();
    let scrape = fs::read_to_string(packaged("scrape.yml")).unwrap();
    let scrape = scrape.replace("9465", &port.to_string()).replace("15s", "1s").replace('\n', "\n  ");
    let rules = packaged("rules.yml");
    let config = dir.path().join("prometheus.yml");
    fs::write(&config, format!("rule_files: [{}]\nscrape_configs:\n  {scrape}\n", rules.display())).unwrap();
    let mut prometheus = program("prometheus");
    prometheus.arg(format!("--config.file={}", config.display()));
    prometheus.arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()));
    prometheus.arg(format!("--web.listen-address=127.0.0.1:{own}"));
    prometheus.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _running = Running(prometheus.spawn().unwrap());
    let query = |expression: &str| -> Option<Value> {
        TcpStream::connect(("127.0.0.1", own)).ok()?;
        let request = format!("GET /api/v1/query?query={expression} HTTP/1.0\r\nHost: x\r\n\r\n");
        let answer = ask(own, request.as_bytes());
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    };
    let becomes = |expression: &str, expected: &str| {
        eventually(&format!("Prometheus knows that {expression} is {expected}"), SOON, || {
            (query(expression)?["data"]["result"][0]["value"][1] == expected).then_some(())
        });
    };
    becomes("agent_slots", "2");
    becomes("sum(agent_nodes)", "1");
    becomes("up", "1");
    // Every query of the dashboard is one.
    let dashboard: Value =
        serde_json::from_str(&fs::read_to_string(packaged("dashboard.json")).unwrap()).unwrap();
    let mut queries = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            let encoded: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
            let answer = query(&encoded).unwrap();
            assert_eq!(answer["status"], "success", "{expression}: {answer}");
            queries += 1;
        }
    }
    assert!(queries >= 12);
}

#[test]
fn test_each_alert_of_the_package_fires_where_it_should_and_only_there() {
    for arguments in [["check", "rules", "rules.yml"], ["test", "rules", "rules.test.yml"]] {
        let mut promtool = program("promtool");
        promtool.current_dir(root().join("packaging/prometheus")).args(arguments);
        let ran = finish(&mut promtool).ok();
        assert!(format!("{}{}", ran.stdout, ran.stderr).contains("SUCCESS"), "{} {}", ran.stdout, ran.stderr);
    }
}

#[test]
fn test_the_page_is_answered_when_the_controller_cannot_write_and_whatever_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut host = serving(dir.path(), port);
    host.set("AGENTD_FAILPOINTS", "control.commit=errno:28@4");
    host.start();
    // What cannot be written is not taken, and nobody is kept waiting by that.
    let _ = host.ctl(&["submit", "--", "true"]);
    let page = page_with(port, "agent_store_stalled 1");
    assert!(page.contains("agent_commits_failed_total "), "{page}");

    let silent: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    assert!(ask(port, b"GET / HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask(port, b"POST /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 405 "));
    assert_eq!(ask(port, &[b'x'; 100]).len().min(1), 0, "what never ends is ended");
    page_with(port, "agent_build_info");
    drop(silent);
}

#[test]
fn test_an_address_that_others_reach_is_refused_and_a_taken_one_stops_nothing() {
    let mut host = Host::new();
    for place in ["0.0.0.0:9465", "10.0.0.1:9465", "9465", "127.0.0.1:0"] {
        host.set("AGENTD_METRICS_LISTEN", place);
        let refused = host.agentd(&["check-config"]).code(78);
        assert!(
            refused.stderr.contains("metrics_listen") && refused.stderr.contains("loopback"),
            "{}",
            refused.stderr
        );
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    host.set("AGENTD_METRICS_LISTEN", &taken.local_addr().unwrap().to_string());
    host.start();
    let job = host.submit("true");
    host.wait_for(&job, &["Completed"]);
    assert!(host.log().contains("cannot serve metrics"), "{}", host.log());
}
