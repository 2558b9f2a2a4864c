//! A box with its own controller joins a fleet, and its jobs go on there.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use agent_tests::fleet::Daemon;
use agent_tests::{Ran, SOON, eventually, finish};
use serde_json::Value;

use super::{Site, calls};

/// A box that is its own controller, and runs. Its node keeps logs in segments of 512 KiB.
fn alone(site: &Site, name: &str, slots: u32) -> Daemon {
    let config = format!("node_name: {name}\nslots: {slots}\ndisk_reserve: 64MiB\nlog_quota: 2MiB\n");
    let mut daemon = Daemon::new(site.path(name), config);
    daemon.spawn();
    eventually("the box answers", SOON, || (at(site, &daemon, &["nodes"]).code == 0).then_some(()));
    daemon
}

/// `agentctl` at the socket of a box.
fn at(site: &Site, daemon: &Daemon, arguments: &[&str]) -> Ran {
    finish(site.client("local", arguments).env("AGENTD_SOCKET", daemon.socket()))
}

/// Submits a job whose project is a directory of its own; returns its name.
fn submit(site: &Site, daemon: &Daemon, name: &str, job: &str, options: &[&str]) -> String {
    let dir = site.path("projects").join(format!("{}-{name}", daemon.state().display()).replace('/', "_"));
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("data.txt"), format!("code of {name}\n")).unwrap();
    fs::write(dir.join("job.yml"), format!("code: .\nenvironment: host\n{job}")).unwrap();
    let words = [&["submit", dir.to_str().unwrap()], options].concat();
    at(site, daemon, &words).ok().stdout.trim().to_owned()
}

/// The box's controller has the log of a job, and its node has removed most of it.
fn until_trimmed(site: &Site, daemon: &Daemon, job: &str) {
    eventually("the log is stored", SOON, || {
        let log = at(site, daemon, &["logs", job]).ok().stdout;
        (log.lines().count() == 300_001 && is_trimmed(daemon, job)).then_some(())
    });
}

fn until_running(site: &Site, daemon: &Daemon, job: &str) {
    eventually("the job runs", SOON, || {
        (at(site, daemon, &["show", job, "--json"]).ok().json()["state"] == "Running").then_some(())
    });
}

/// The node has removed the first segment of the log of a job, because its controller has it.
fn is_trimmed(daemon: &Daemon, job: &str) -> bool {
    let log = daemon.state().join("jobs").join(format!("{job}.1.0")).join("log/job");
    assert!(log.is_dir(), "{}", log.display());
    !log.join("00000000000000000000.seg").exists()
}

/// A job that writes a line when it begins, waits for a file, and writes another line.
fn gated(site: &Site, name: &str, gate: &str) -> String {
    let (gate, witness) = (site.path(gate), witness(site));
    let (gate, witness) = (gate.display(), witness.display());
    format!(
        "command: 'cat data.txt; seq 300000; echo {name} >> {witness}; while ! [ -e {gate} ]; do sleep 0.05; done; \
         echo out > outputs/x; echo ended'\n"
    )
}

fn witness(site: &Site) -> PathBuf {
    site.path("witness")
}

fn noted(site: &Site) -> Vec<String> {
    fs::read_to_string(witness(site)).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// `agentd join` of a stopped box, with more words and a failure planned.
fn join(site: &Site, daemon: &Daemon, token: &str, words: &[&str], failpoints: &str) -> Ran {
    let file = daemon.state().with_file_name("token");
    fs::write(&file, token).unwrap();
    let address = site.address("127.0.0.1");
    let all = [&["join", &address, "--token-file", file.to_str().unwrap()], words].concat();
    let mut command = daemon.command_of(&all);
    command.env("AGENTD_FAILPOINTS", failpoints).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(&mut command)
}

fn leave(daemon: &Daemon) -> Ran {
    finish(daemon.command_of(&["leave"]).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

fn shown(site: &Site, job: &str) -> Value {
    site.ctl(&["show", job, "--json"]).ok().json()
}

fn until_completed(site: &Site, job: &str) {
    eventually(&format!("{job} has completed"), 2 * SOON, || {
        let now = shown(site, job);
        let state = now["state"].as_str().unwrap_or_default();
        assert!(!["Failed", "Canceled"].contains(&state), "{now}");
        (state == "Completed").then_some(())
    });
}

#[test]
fn test_a_box_joins_a_fleet_with_its_running_and_waiting_jobs() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    let mut joiner = alone(&site, "box", 2);
    let runs = ["one", "two"].map(|name| submit(&site, &joiner, name, &gated(&site, name, name), &[]));
    runs.iter().for_each(|job| until_running(&site, &joiner, job));
    let file = witness(&site);
    let note = |name: &str| format!("command: 'cat data.txt; echo {name} >> {}'\n", file.display());
    let after = submit(&site, &joiner, "after", &note("after"), &["--after", &runs[0]]);
    let array = submit(&site, &joiner, "array", &note("task-$AGENTD_ARRAY_INDEX"), &["--count", "3"]);
    let high = "queue_settings: {priority: high}\n";
    let high = submit(&site, &joiner, "high", &format!("{}{high}", note("high")), &[]);
    until_trimmed(&site, &joiner, &runs[0]);
    joiner.stop();

    let ran = join(&site, &joiner, &site.token(&["--jobs-of", "root=ada"]), &["--move-jobs"], "").ok();
    assert!(ran.stdout.contains("2 running jobs go on there, 3 waiting jobs were moved there"), "{ran:?}");
    for job in runs.iter().chain([&after, &array, &high]) {
        assert_eq!(shown(&site, job)["owner"], "user ada", "{job}");
    }
    assert_eq!(shown(&site, &runs[0])["state"], "Running");
    joiner.spawn();
    site.nodes.push(joiner);
    site.until_ready("box");
    fs::write(site.path("one"), "").unwrap();
    for job in [&runs[0], &high, &after, &array] {
        until_completed(&site, job);
    }
    fs::write(site.path("two"), "").unwrap();
    until_completed(&site, &runs[1]);

    let noted = noted(&site);
    let (begun, rest) = noted.split_at(2);
    assert!(begun.contains(&"one".into()) && begun.contains(&"two".into()), "{begun:?}");
    assert_eq!(rest, ["high", "after", "task-0", "task-1", "task-2"], "each once, in order");
    for (name, job) in [("one", &runs[0]), ("two", &runs[1])] {
        let log = site.by("ada", &["logs", job]).ok().stdout;
        let lines: Vec<&str> = log.lines().collect();
        let first = format!("code of {name}");
        assert_eq!(
            (lines.len(), lines[0], lines[1], lines[300_001]),
            (300_002, first.as_str(), "1", "ended")
        );
        assert_eq!(shown(&site, job)["attempt"], 1);
        site.by("ada", &["download", job, "-o", name]).ok();
        assert_eq!(fs::read_to_string(site.path("ada").join(name).join("outputs/x")).unwrap(), "out\n");
    }
    assert_eq!(site.by("ada", &["logs", &high]).ok().stdout, "code of high\n");

    // From now on it brings nothing, and on its own it runs none of them again.
    let mut joiner = site.nodes.pop().unwrap();
    joiner.stop();
    site.until("box", "not_responding");
    let refused = calls::bring(&site, &joiner.state().join("identity.json"), "box");
    assert!(refused.message().contains("box may bring no jobs"), "{refused:?}");
    leave(&joiner).ok();
    joiner.spawn();
    eventually("the box answers", SOON, || (at(&site, &joiner, &["nodes"]).code == 0).then_some(()));
    for job in runs.iter().chain([&after, &array, &high]) {
        let left = at(&site, &joiner, &["show", job, "--json"]).ok().json();
        assert_eq!(left["state"], "Canceled", "{left}");
    }
    let why = at(&site, &joiner, &["why", &after]).ok().stdout;
    assert!(why.contains("moved to https://"), "{why}");
    let next = submit(&site, &joiner, "next", &note("next"), &[]);
    at(&site, &joiner, &["wait", &next]).ok();
    assert_eq!(self::noted(&site).len(), 8, "only the new one ran");
    site.nodes.push(joiner);
}

#[test]
fn test_a_move_that_is_cut_off_anywhere_is_finished_and_nothing_runs_twice() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    let points = [
        ("node.move.blobs", false),
        ("node.move.logs", false),
        ("node.move.begin", false),
        ("node.move.join", false),
        ("node.move.send", true),
        ("node.move.sent", true),
        ("control.store.commit", true),
        ("node.move.done", true),
    ];
    for (index, (point, is_node)) in points.into_iter().enumerate() {
        let name = format!("box-{index}");
        let mut joiner = alone(&site, &name, 1);
        let [run, wait] = ["run", "wait"].map(|job| format!("{name}-{job}"));
        let gate = format!("go-{index}");
        let runs = submit(&site, &joiner, &run, &gated(&site, &run, &gate), &[]);
        until_running(&site, &joiner, &runs);
        let waits = submit(&site, &joiner, &wait, &gated(&site, &wait, &gate), &[]);
        joiner.stop();
        let token = site.token(&["--jobs-of", "root=ada"]);
        let cut = join(&site, &joiner, &token, &["--move-jobs"], &format!("{point}=kill"));
        assert_ne!(cut.code, 0, "{point}");
        assert_eq!(joiner.state().join("identity.json").exists(), is_node, "{point}");
        if is_node {
            leave(&joiner).code(1).says("JOB-1").says("both go on with the move");
        }
        // The daemon finishes it, or whoever joins again does.
        if !is_node || index % 2 == 1 {
            join(&site, &joiner, &token, &["--move-jobs"], "").ok();
            assert!(!joiner.state().join("moving").exists(), "{point}");
        }
        joiner.spawn();
        site.nodes.push(joiner);
        site.until_ready(&name);
        fs::write(site.path(&gate), "").unwrap();
        for (job, label) in [(&runs, &run), (&waits, &wait)] {
            until_completed(&site, job);
            let log = site.by("ada", &["logs", job]).ok().stdout;
            assert_eq!(log.lines().count(), 300_002, "{point}");
            assert_eq!(noted(&site).iter().filter(|noted| *noted == label).count(), 1, "{point}: {label}");
        }
        let mut joiner = site.nodes.pop().unwrap();
        joiner.stop();
        leave(&joiner).ok();
        let mut other = alone(&site, &name, 1);
        let active = at(&site, &other, &["jobs", "--json"]).ok().json();
        let states: Vec<&Value> =
            active["jobs"].as_array().unwrap().iter().map(|job| &job["state"]).collect();
        assert!(states.iter().all(|state| **state == "Canceled"), "{point}: {active}");
        other.kill();
    }
}

#[test]
fn test_jobs_that_the_fleet_does_not_take_keep_the_box_out_and_change_nothing() {
    let site = Site::new();
    site.add_user("ada", "submit");
    site.ctl(&["token", "create", "--jobs-of", "root=nobody"]).code(1).says("no user `nobody`");
    site.ctl(&["token", "create", "--jobs-of", "root=ada", "--uses", "2"]).code(1).says("one machine");
    let mut joiner = alone(&site, "box", 1);
    let runs = submit(&site, &joiner, "runs", &gated(&site, "runs", "go"), &[]);
    until_running(&site, &joiner, &runs);
    let waits = submit(&site, &joiner, "waits", "name: mine\ncommand: 'true'\n", &[]);
    joiner.stop();
    let refused = |token: &str, words: &[&str], says: &[&str]| {
        let ran = join(&site, &joiner, token, words, "").code(1);
        for text in says {
            assert!(ran.stderr.contains(text), "no `{text}` in {}", ran.stderr);
        }
        assert!(!joiner.state().join("identity.json").exists());
        assert!(!joiner.state().join("moving").exists());
    };
    let good = site.token(&["--jobs-of", "root=ada"]);
    refused(&good, &[], &["2 jobs", "--move-jobs", "--lose-jobs"]);
    refused(&site.token(&[]), &["--move-jobs"], &["NET-104", "no jobs of root", "--jobs-of root=USER"]);
    refused(&site.token(&["--jobs-of", "ada"]), &["--move-jobs"], &["no jobs of root"]);
    // There is another job of a name.
    let project = site.project("ada", "name: mine\ncommand: 'true'\n");
    site.by("ada", &["submit", &project]).ok();
    refused(&good, &["--move-jobs"], &["another job `mine`", "agentctl cancel --wait mine"]);
    // All is as it was: the box goes on alone.
    joiner.spawn();
    eventually("the box answers", SOON, || (at(&site, &joiner, &["nodes"]).code == 0).then_some(()));
    fs::write(site.path("go"), "").unwrap();
    for job in [&runs, &waits] {
        at(&site, &joiner, &["wait", job]).ok();
    }
    assert_eq!(noted(&site), ["runs"]);
    joiner.kill();
}

/// What `--lose-jobs` leaves, beside which a move is worth its steps.
#[test]
fn test_a_box_that_leaves_its_jobs_behind_still_has_those_that_run_adopted() {
    let mut site = Site::new();
    let mut joiner = alone(&site, "box", 1);
    let runs = submit(&site, &joiner, "runs", &gated(&site, "runs", "go"), &[]);
    until_running(&site, &joiner, &runs);
    let waits = submit(&site, &joiner, "waits", "command: 'true'\n", &[]);
    until_trimmed(&site, &joiner, &runs);
    joiner.stop();
    join(&site, &joiner, &site.token(&[]), &["--lose-jobs"], "").ok();
    joiner.spawn();
    site.nodes.push(joiner);
    site.until_ready("box");
    eventually("the job is adopted", SOON, || (site.ctl(&["show", &runs]).code == 0).then_some(()));
    fs::write(site.path("go"), "").unwrap();
    until_completed(&site, &runs);
    let job = shown(&site, &runs);
    assert_eq!((&job["attempt"], &job["owner"]), (&1.into(), &"".into()), "{job}");
    // Its node has no longer what the box's own controller had acknowledged.
    assert_eq!(job["fault"]["code"], "CTL-101", "{job}");
    assert!(site.ctl(&["logs", &runs]).ok().stdout.lines().count() < 300_002);
    site.ctl(&["show", &waits]).code(1).says("JOB-104");
}
