//! Arrays: one submission whose command runs once for each of many indices.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use agent_tests::{Host, eventually};
use serde_json::Value;

/// A host whose daemon has room for so many jobs.
fn host(slots: &str) -> Host {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", slots);
    host.start();
    host
}

/// Submits a command as an array; returns its name.
fn submit(host: &Host, array: &[&str], command: &str) -> String {
    let dir = host.project("array", &[("job.yml", &format!("command: {command}\n"))]);
    let mut line = vec!["submit", dir.to_str().unwrap()];
    line.extend(array);
    host.ctl(&line).ok().stdout.trim().to_owned()
}

fn tasks(host: &Host, array: &str) -> Vec<Value> {
    host.ctl(&["jobs", array, "--all", "--json"]).ok().json()["jobs"].as_array().unwrap().clone()
}

fn until(host: &Host, array: &str, what: &str, ready: impl Fn(&Value) -> bool) -> Value {
    eventually(what, Duration::from_secs(60), || {
        let stand = host.show(array)["tasks"].clone();
        ready(&stand).then_some(stand)
    })
}

#[test]
fn test_200_tasks_each_run_once_with_their_index_over_a_kill_of_the_daemon() {
    let mut host = host("6");
    let seen = host.home().join("seen");
    let told = "$AGENTD_ARRAY_INDEX $SLURM_ARRAY_TASK_ID $SLURM_ARRAY_TASK_COUNT $LSB_JOBINDEX";
    let begun = Instant::now();
    let array = submit(&host, &["--count", "200"], &format!("echo \"{told}\" | tee -a {}", seen.display()));
    let submitted = begun.elapsed();
    until(&host, &array, "some have completed", |tasks| tasks["completed"].as_u64() > Some(20));
    host.kill();
    host.start();
    host.ctl(&["wait", &array]).ok();
    println!("200 tasks: submitted in {submitted:?}, completed in {:?}", begun.elapsed());
    let lines = fs::read_to_string(&seen).unwrap();
    let mut lines: Vec<&str> = lines.lines().collect();
    lines.sort_by_key(|line| line.split(' ').next().unwrap().parse::<u32>().unwrap());
    let expected: Vec<String> = (0..200).map(|index| format!("{index} {index} 200 {index}")).collect();
    assert_eq!(lines, expected);
    let tasks = tasks(&host, &array);
    let indices: Vec<u64> = tasks.iter().map(|task| task["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, (0..200).collect::<Vec<u64>>());
    assert!(tasks.iter().all(|task| task["state"] == "Completed"));
    assert_eq!(host.ctl(&["logs", &format!("{array}[117]")]).ok().stdout, "117 117 200 117\n");
    // The array is one line among the jobs, and one of the names that begin so.
    let jobs = host.ctl(&["jobs", "--json"]).ok().json();
    assert_eq!(jobs["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(jobs["jobs"][0]["tasks"]["completed"], 200);
    assert!(host.ctl(&["jobs"]).ok().stdout.contains("200 of 200 completed"));
    host.ctl(&["show", &format!("{}[3]", &array[..4]), "--json"]).ok();
    host.ctl(&["logs", &array]).code(1).says("is an array of 200 tasks").says(&format!("{array}[0]"));
    host.ctl(&["show", &format!("{array}[200]")]).code(1).says("the indices of the array are 0-199");
    host.ctl(&["rm", &array]).ok();
    host.ctl(&["show", &format!("{array}[7]")]).code(1).says("JOB-104");
    assert_eq!(host.ctl(&["jobs", "--json"]).ok().json()["jobs"], Value::Array(Vec::new()));
}

#[test]
fn test_no_more_tasks_run_at_a_time_than_may_and_those_that_failed_run_again() {
    let host = host("4");
    let dir = host.home().join("running");
    fs::create_dir(&dir).unwrap();
    let running = dir.display();
    let script = format!(
        "touch {running}/$AGENTD_ARRAY_INDEX; ls {running} | wc -l; sleep 0.3; rm {running}/$AGENTD_ARRAY_INDEX; \
         mkdir -p outputs; echo $AGENTD_ARRAY_INDEX >outputs/index; test -e {running}.fixed || test \
         $AGENTD_ARRAY_INDEX != 7"
    );
    let array = submit(&host, &["--array", "1,3,5-9:2%2", "--name", "sweep"], &script);
    assert_eq!(array, "sweep");
    let after = host.project("after", &[("job.yml", "command: 'true'\n")]);
    let after = after.to_str().unwrap();
    let any = host.ctl(&["submit", after, "--after-any", "sweep"]).ok().stdout.trim().to_owned();
    let good = host.ctl(&["submit", after, "--after", "sweep"]).ok().stdout.trim().to_owned();
    host.ctl(&["wait", "sweep"]).code(1).says("1 task of 5 failed").says("index 7").says("JOB-110");
    host.wait_for(&any, &["Completed"]);
    host.wait_for(&good, &["Failed"]);
    for index in [1, 3, 5, 7, 9] {
        let at_once = host.ctl(&["logs", &format!("sweep[{index}]")]).ok().stdout;
        assert!(matches!(at_once.trim(), "1" | "2"), "{index}: {at_once} at a time");
    }
    let to = host.home().join("results");
    host.ctl(&["download", "sweep", "-o", to.to_str().unwrap(), "--logs"]).ok();
    assert_eq!(fs::read_to_string(to.join("9/outputs/index")).unwrap(), "9\n");
    assert!(to.join("7/user_logs/std_log.txt").exists());
    fs::write(PathBuf::from(format!("{running}.fixed")), "").unwrap();
    let again = host.ctl(&["rerun", "sweep", "--failed"]).ok().stdout.trim().to_owned();
    host.ctl(&["wait", &again]).ok();
    assert_eq!(host.show(&again)["spec"]["array"], "7%2");
    host.ctl(&["rerun", &again, "--failed"]).code(1).says("no task of");
    // Names of tasks are taken, and a name is free again once the array is removed.
    host.ctl(&["submit", after, "--name", "sweep--3"]).code(1).says("those of the tasks of arrays");
    host.ctl(&["submit", after, "--name", "sweep", "--count", "2"]).code(1).says("JOB-105");
    host.ctl(&["rm", "sweep"]).ok();
    host.ctl(&["submit", after, "--name", "sweep", "--count", "8"]).ok();
    host.ctl(&["wait", "sweep"]).ok();
}

#[test]
fn test_one_task_is_canceled_and_then_all_of_them() {
    let host = host("2");
    let array = submit(&host, &["--array", "0-99"], "sleep 60");
    until(&host, &array, "two run", |tasks| tasks["active"] == "0-1");
    host.wait_for(&format!("{array}[0]"), &["Running"]);
    let waiting = host.show(&format!("{array}[50]"));
    assert_eq!((&waiting["state"], &waiting["index"]), (&"Queued".into(), &50.into()));
    assert!(waiting["detail"].as_str().unwrap().contains("slots of"), "{waiting}");
    host.ctl(&["cancel", "--wait", &format!("{array}[50]"), &format!("{array}[0]")]).ok();
    let stand = until(&host, &array, "another runs", |tasks| tasks["active"] == "1-2");
    assert_eq!((&stand["canceled"], &stand["waiting"]), (&"0,50".into(), &"3-49,51-99".into()));
    host.ctl(&["cancel", "--wait", &array]).ok().says("Canceled");
    let stand = host.show(&array)["tasks"].clone();
    assert_eq!((&stand["canceled"], &stand["waiting"]), (&"0-99".into(), &"".into()));
    assert_eq!(tasks(&host, &array).len(), 4, "the others never had a record");
    host.ctl(&["show", &format!("{array}[70]")]).code(1).says("it was never started");
    assert_eq!(host.job_state(&array), "Canceled");
}

#[test]
fn test_what_names_no_array_is_refused_before_anything_is_sent() {
    let host = host("1");
    let dir = host.project("p", &[("job.yml", "command: 'true'\n"), ("bad.yml", "command: x\narray: 5-1\n")]);
    for (array, says) in [
        ("0-10000", "at most 10000"),
        ("5-1", "ends before it begins"),
        ("0-3,2", "index 2 is named twice"),
        ("a", "neither an index nor a range"),
        ("0-9%0", "how many may run at a time"),
    ] {
        host.ctl(&["submit", dir.to_str().unwrap(), "--array", array]).code(2).says(says);
    }
    host.ctl(&["submit", dir.to_str().unwrap(), "--count", "0"]).code(2).says("names no index");
    host.ctl(&["submit", dir.join("bad.yml").to_str().unwrap()])
        .code(1)
        .says("line 2, column 8")
        .says("`array`");
    assert_eq!(host.ctl(&["jobs", "--json"]).ok().json()["jobs"], Value::Array(Vec::new()));
}

/// What waits is one record: what ten thousand tasks cost until they run.
#[test]
fn test_10_000_tasks_wait_as_one_record() {
    let host = host("2");
    let hold = submit(&host, &["--array", "0-1"], "sleep 60");
    until(&host, &hold, "both run", |tasks| tasks["active"] == "0-1");
    for count in ["1000", "10000"] {
        let begun = Instant::now();
        let array = submit(&host, &["--count", count], "'true'");
        let submitted = begun.elapsed();
        let begun = Instant::now();
        assert!(host.ctl(&["jobs"]).ok().stdout.contains(&format!("0 of {count} completed")));
        println!("{count} tasks: submitted in {submitted:?}, listed in {:?}", begun.elapsed());
        assert_eq!(tasks(&host, &array), Vec::<Value>::new());
    }
    host.ctl(&["cancel", "--all"]).ok();
}

#[test]
fn test_who_follows_an_array_hears_of_tasks_that_fail_while_others_run() {
    let host = host("2");
    let (gate, dir) = (host.home().join("gate"), host.project("array", &[("a.txt", "a")]));
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let command = format!("[ $AGENTD_ARRAY_INDEX = 1 ] || exit 3; {wait}");
    let mut run =
        host.client(&["run", dir.to_str().unwrap(), "--name", "row", "--count", "2", "--", &command]);
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    let told = lines.find(|line| line.starts_with("failed so far: 0"));
    fs::write(gate, "").unwrap();
    assert!(told.is_some_and(|line| line.ends_with("agentctl why 'row[INDEX]'")));
    let rest: Vec<String> = lines.collect();
    assert!(rest.iter().any(|line| line.contains("row Failed")), "{rest:?}");
    assert_eq!(run.wait().unwrap().code(), Some(3), "that of the first that failed");
}
