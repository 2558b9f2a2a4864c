//! Jobs in every state that must survive, and what must become of them.
//!
//! [`begin`] brings a box there and ends with its daemon dead, in the middle of storing outputs. [`go_on`] is for the
//! daemon that comes next: it checks that each job has one true result. Jobs are known by their names. Those that wait
//! for somebody look for the file `go` in their directory, wherever that is by then.

use std::fs;
use std::path::PathBuf;

use agent_tests::table::Tally;
use agent_tests::{Host, SOON, eventually, signal};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Jobs that have ended before the release changes.
const ENDED: [&str; 3] = ["ended", "failed", "canceled"];
const OVER: [&str; 3] = ["Completed", "Failed", "Canceled"];

/// Tasks of the array, of which these end before the release changes.
const TASKS: u64 = 7;
const EARLY: u64 = 3;

/// Seconds that the job whose first attempt is lost waits for its second: longer than it takes to change the release.
const BACKOFF: u32 = 60;

/// Outputs of the job that ends in between: so many, of so many bytes each, which the store keeps in a file of its own.
const OUTPUTS: u32 = 6;
const LARGE: usize = 200_000;

/// Waits for the file.
const WAIT: &str = "until [ -e go ]; do sleep 0.05; done";
/// Numbered lines until the file is there, and how many there were.
pub(crate) const LINES: &str =
    "echo begin; i=0; until [ -e go ]; do echo line $i; i=$((i+1)); sleep 0.02; done; echo end $i";

/// What became of the processes that ran when the daemon died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meanwhile {
    /// They live.
    Lived,
    /// They are gone, as after a restart of the machine.
    Gone,
}

/// A box that can have these jobs; no daemon runs.
pub(crate) fn host() -> Host {
    let mut host = Host::new();
    host.set("AGENTD_NODE_NAME", "box");
    host.set("AGENTD_SLOTS", "6");
    host
}

/// Submits the job that this file describes, under a name.
#[track_caller]
pub(crate) fn submit(host: &Host, name: &str, mut file: Value, more: &[&str]) {
    file["environment"] = "host".into();
    let dir = host.project(&format!("code-{name}"), &[("job.yml", &file.to_string())]);
    let words = ["submit", dir.to_str().expect("UTF-8"), "--name", name];
    host.ctl(&[&words, more].concat()).ok();
}

/// Waits until a job has said this.
#[track_caller]
pub(crate) fn said(host: &Host, job: &str, text: &str) {
    eventually(&format!("{job} says `{text}`"), SOON, || {
        host.ctl(&["logs", job]).stdout.contains(text).then_some(())
    });
}

/// Opens the door for every job that waits for that now.
pub(crate) fn let_go(host: &Host, of: &str) {
    for entry in fs::read_dir(host.state().join("jobs")).into_iter().flatten().flatten() {
        let work = entry.path().join("job/work");
        if entry.file_name().to_string_lossy().starts_with(of) && work.is_dir() {
            let _ = fs::write(work.join("go"), ""); // its directory may go meanwhile
        }
    }
}

/// The supervisor of the first attempt of a job.
fn supervisor(host: &Host, job: &str) -> u32 {
    let dir = format!("jobs/{job}.1.0");
    let read = |pid: u32, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let is_its =
        |pid: &u32| read(*pid, "comm").trim() == "agent-shim" && read(*pid, "cmdline").contains(&dir);
    host.processes().into_iter().find(is_its).expect("a running job has a supervisor")
}

/// Brings a box whose daemon runs to where its release is changed. Returns what is said of the jobs that have ended.
pub(crate) fn begin(host: &mut Host) -> Value {
    end_some(host);
    have_an_array_half_done(host);
    submit(host, "runs", json!({ "command": LINES }), &[]);
    submit(host, "sleeps", json!({ "command": "trap '' TERM; echo up; sleep 1000; sleep 1000" }), &[]);
    let writes = format!(
        "echo begin; for n in $(seq {OUTPUTS}); do yes kept-$n | head -c {LARGE} >outputs/$n; done; echo up; {WAIT}; \
         echo end"
    );
    submit(host, "half", json!({ "command": writes }), &[]);
    let twice = "case $AGENTD_REPLICA in *.1.0) echo one; sleep 1000;; esac; echo two";
    let retry = json!({ "max_attempts": 2, "backoff": BACKOFF });
    submit(host, "retry", json!({ "command": twice, "retry": retry }), &[]);
    [("runs", "line 9\n"), ("sleeps", "up"), ("half", "up"), ("retry", "one")]
        .iter()
        .for_each(|(job, text)| said(host, job, text));
    have_some_wait(host);
    let told = ENDED.map(|job| (job.to_owned(), told(host, job)));
    lose_one(host);
    die_while_storing(host);
    Value::Object(told.into_iter().collect())
}

fn end_some(host: &Host) {
    let writes = "echo begin; printf weights >${{outputs.model}}/w; printf kept >outputs/kept; \
                  echo '{\"metric\": \"loss\", \"value\": 0.5, \"step\": 1}' >>$AGENTD_METRICS";
    let model = json!({ "model": { "type": "uri_folder", "name": "iris-model" } });
    submit(host, "ended", json!({ "command": writes, "outputs": model }), &[]);
    submit(host, "failed", json!({ "command": "echo no; exit 3" }), &[]);
    submit(host, "canceled", json!({ "command": "echo up; sleep 1000" }), &[]);
    said(host, "canceled", "up");
    host.ctl(&["cancel", "canceled"]).ok();
    ENDED.iter().for_each(|job| drop(host.wait_for(job, &OVER)));
}

/// The first attempt of a job is lost; the second has to wait. It is the last that is done, or its wait could be over
/// before the daemon dies.
fn lose_one(host: &Host) {
    signal(supervisor(host, "retry"), Signal::KILL);
    host.wait_for("retry", &["Queued"]);
}

fn have_an_array_half_done(host: &Host) {
    let command = format!(
        "echo task $AGENTD_ARRAY_INDEX; echo $AGENTD_ARRAY_INDEX >outputs/index; \
         [ $AGENTD_ARRAY_INDEX -lt {EARLY} ] || {WAIT}"
    );
    let retry = json!({ "max_attempts": 3, "backoff": 1 });
    let tasks = format!("0-{}%2", TASKS - 1);
    submit(host, "array", json!({ "command": command, "retry": retry }), &["--array", &tasks]);
    eventually("the array is half done", SOON, || {
        let tasks = host.show("array")["tasks"].clone();
        (tasks["completed"] == EARLY && tasks["active"] == "3-4").then_some(())
    });
    ["array--3", "array--4"].iter().for_each(|task| said(host, task, "task"));
}

/// Jobs that wait for a place, for another job, for more machines than there are, and for somebody's word.
fn have_some_wait(host: &Host) {
    let key = host.project("key", &[("key", "0123456789")]).join("key");
    let mut set = host.client(&["secret", "set", "wandb"]);
    agent_tests::finish(set.stdin(fs::File::open(key).expect("its own file"))).ok();
    let secret = json!({ "command": "echo ${#TOKEN}", "secrets": { "TOKEN": "wandb" } });
    submit(host, "held", secret, &[]);
    host.ctl(&["hold", "held"]).ok();
    submit(host, "after", json!({ "command": "echo after" }), &["--after", "half"]);
    submit(host, "gang", json!({ "command": "true", "resources": { "instance_count": 2 } }), &[]);
}

/// The daemon dies while it stores the outputs of a job: some are stored, some are not.
fn die_while_storing(host: &mut Host) {
    host.kill();
    host.set("AGENTD_FAILPOINTS", "cas.blob.rename=kill@3");
    host.start();
    let retry = host.show("retry");
    assert_eq!((&retry["state"], &retry["attempt"]), (&"Queued".into(), &1.into()), "it waits too short");
    let_go(host, "half.");
    host.died();
    host.set("AGENTD_FAILPOINTS", "");
}

/// What is said of a job that has ended.
fn told(host: &Host, job: &str) -> Value {
    let json = |verb: &str| host.ctl(&[verb, job, "--json"]).ok().json();
    let log = host.ctl(&["logs", job]).ok().stdout;
    json!({ "show": json("show"), "why": json("why"), "metrics": json("metrics"), "log": log })
}

/// Where something of an old document does not stand in the new one: new fields may appear, `agent/docs/json.md`.
fn lost(new: &Value, old: &Value) -> Option<String> {
    let below = |name: &dyn std::fmt::Display, lost: String| format!("{name}.{lost}");
    match (new, old) {
        (Value::Object(new), Value::Object(old)) => old.iter().find_map(|(name, old)| match new.get(name) {
            Some(new) => lost(new, old).map(|lost| below(name, lost)),
            None => Some(format!("{name} is gone: {old}")),
        }),
        (Value::Array(new), Value::Array(old)) if new.len() == old.len() => {
            let both = new.iter().zip(old).enumerate();
            both.into_iter().find_map(|(at, (new, old))| lost(new, old).map(|lost| below(&at, lost)))
        }
        // Sentences name people now where they had numbers.
        (Value::String(new), Value::String(old)) if *new == old.replace("uid 0", "root") => None,
        _ => (new != old).then(|| format!("it was {old} and is {new}")),
    }
}

/// Checks what becomes of the jobs of [`begin`] when the next daemon runs. `before` is what was said of those that
/// have ended.
pub(crate) fn go_on(tally: &mut Tally, host: &Host, before: &Value, meanwhile: Meanwhile) {
    for job in ENDED {
        tally.case(&format!("what is said of the job `{job}`"), || {
            assert_eq!(lost(&told(host, job), &before[job]), None);
        });
    }
    tally.case("what waits for a word or for machines still waits", || {
        let (held, gang) = (host.show("held"), host.show("gang"));
        assert_eq!((&held["state"], &gang["state"]), (&"Queued".into(), &"Queued".into()));
        host.ctl(&["release", "held"]).ok();
        host.ctl(&["cancel", "gang"]).ok();
    });
    tally.case("what ran has one true result", || running(host, meanwhile));
    tally.case("outputs that were half stored are stored", || {
        assert_eq!(over(host, "half"), "Completed", "{}", host.ctl(&["why", "half"]).stdout);
        assert_eq!(log(host, "half"), "begin\nup\nend\n");
        let to = downloaded(host, "half");
        for n in 1..=OUTPUTS {
            let text = fs::read_to_string(to.join(format!("outputs/{n}"))).expect("an output");
            let whole = text.len() == LARGE && text.lines().all(|line| format!("kept-{n}").starts_with(line));
            assert!(whole, "outputs/{n} is another file of {} bytes", text.len());
        }
        assert_eq!((over(host, "after"), log(host, "after")), ("Completed".into(), "after\n".into()));
    });
    tally.case("each task of the array ends once", || array(host));
    tally.case("the retry is tried, once", || {
        assert_eq!(over(host, "retry"), "Completed");
        assert_eq!((host.show("retry")["attempt"].clone(), log(host, "retry")), (2.into(), "two\n".into()));
        let why = host.ctl(&["why", "retry"]).ok().stdout;
        assert!(why.contains("RUN-107"), "{why}");
    });
    tally.case("secrets, names of data and outputs are there", || kept_things(host));
    tally.case("a gang that never had its machines can be canceled", || {
        assert_eq!(over(host, "gang"), "Canceled");
    });
    tally.case("the next job runs", || {
        submit(host, "next", json!({ "command": "echo next" }), &[]);
        assert_eq!((over(host, "next"), log(host, "next")), ("Completed".into(), "next\n".into()));
    });
}

/// The final state of a job, which comes by itself.
#[track_caller]
fn over(host: &Host, job: &str) -> String {
    host.wait_for(job, &OVER)
}

#[track_caller]
fn log(host: &Host, job: &str) -> String {
    host.ctl(&["logs", job]).ok().stdout
}

fn downloaded(host: &Host, job: &str) -> PathBuf {
    let to = host.home().join(format!("got-{job}"));
    host.ctl(&["download", job, "-o", to.to_str().expect("UTF-8")]).ok();
    to
}

/// The log of [`LINES`] has every line once and in order; so many are behind `begin`.
#[track_caller]
pub(crate) fn check_lines(log: &str, ended: bool) {
    let mut lines: Vec<&str> = log.lines().collect();
    let end = if ended { lines.pop() } else { None };
    let count = lines.len().saturating_sub(1);
    let expected: Vec<String> = (0..count).map(|n| format!("line {n}")).collect();
    assert!(count > 9 && lines[0] == "begin" && lines[1..] == expected, "{log}");
    assert_eq!(end, ended.then_some(format!("end {count}").as_str()), "{log}");
}

/// The two jobs that ran, and may not be started again.
fn running(host: &Host, meanwhile: Meanwhile) {
    let lived = meanwhile == Meanwhile::Lived;
    if lived {
        host.ctl(&["exec", "runs", "--", "sh", "-c", "exit 7"]).code(7);
        let pid = supervisor(host, "sleeps");
        host.ctl(&["cancel", "sleeps"]).ok();
        assert_eq!(over(host, "sleeps"), "Canceled");
        eventually("its supervisor ends", SOON, || {
            (!fs::exists(format!("/proc/{pid}")).expect("there is /proc")).then_some(())
        });
        let_go(host, "runs.");
    }
    let jobs: &[&str] = if lived { &["runs"] } else { &["runs", "sleeps"] };
    for job in jobs {
        assert_eq!(over(host, job), if lived { "Completed" } else { "Failed" });
        let code = host.show(job)["fault"]["code"].clone();
        assert_eq!(code == "NODE-103" || code == "RUN-107", !lived, "{job}: {code}");
    }
    check_lines(&log(host, "runs"), lived);
}

fn array(host: &Host) {
    eventually("every task has ended", SOON, || {
        let_go(host, "array--");
        let tasks = host.show("array")["tasks"].clone();
        (tasks["completed"] == TASKS).then_some(())
    });
    assert_eq!(over(host, "array"), "Completed");
    for index in 0..TASKS {
        let task = format!("array[{index}]");
        assert_eq!(
            (host.job_state(&task), log(host, &task)),
            ("Completed".into(), format!("task {index}\n"))
        );
        // A task that was over is not done again.
        let attempts = host.show(&task)["attempt"].as_u64().expect("a number");
        assert!(attempts == 1 || index >= EARLY, "{task} has had {attempts} attempts");
    }
    let to = downloaded(host, "array");
    for index in 0..TASKS {
        let text = fs::read_to_string(to.join(format!("{index}/outputs/index"))).expect("an output");
        assert_eq!(text, format!("{index}\n"));
    }
}

fn kept_things(host: &Host) {
    assert_eq!((over(host, "held"), log(host, "held")), ("Completed".into(), "10\n".into()));
    let inputs = json!({ "model": { "type": "uri_folder", "path": "azureml:iris-model:1" } });
    submit(host, "reads", json!({ "command": "cat ${{inputs.model}}/w", "inputs": inputs }), &[]);
    assert_eq!((over(host, "reads"), log(host, "reads")), ("Completed".into(), "weights".into()));
    let kept = fs::read_to_string(downloaded(host, "ended").join("outputs/kept")).expect("an output");
    assert_eq!(kept, "kept");
}
