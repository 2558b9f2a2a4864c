//! The daemon is killed at some instant: what was begun is not lost, and nothing is done twice.

use std::fs;
use std::time::Duration;

use agent_model::JobDraft;
use agent_proto::v1;
use agent_tests::fleet::Fleet;
use agent_tests::{SOON, eventually};

const TICKER: &str = r#"
import json, os, sys, time
metrics = open(os.environ["AGENTD_METRICS"], "a", buffering=1)
open("outputs/starts", "a").write("started\n")
for number in range(1000):
    print("line", number)
    if number % 10 == 0:
        metrics.write(json.dumps({"metric": "n", "value": number}) + "\n")
    time.sleep(0.002)
sys.exit(7)
"#;

fn ticked() -> String {
    (0..1000).map(|number| format!("line {number}\n")).collect()
}

pub(crate) fn ticker(fleet: &Fleet) -> String {
    let code = Some(fleet.client.try_push(&[("t.py", TICKER)]).unwrap());
    fleet.client.submit(&JobDraft { command: "python t.py".into(), code, ..JobDraft::default() })
}

/// The job ran once, to its end, and everything it said is there once.
pub(crate) fn assert_whole(fleet: &Fleet, job: &str) {
    let ended = fleet.client.ended(job);
    assert_eq!(ended.epoch, 1, "it was tried again: {ended:?}");
    assert!(fleet.client.text(job) == ticked(), "the log differs");
    assert_eq!(fleet.client.records(job).len(), 100);
    let exit = ended.outcome.as_ref().and_then(|outcome| outcome.exit).and_then(|exit| exit.kind);
    assert_eq!(exit, Some(v1::exit::Kind::Code(7)), "{ended:?}");
    assert_eq!(fleet.client.outputs(&ended), [("outputs/starts".to_owned(), "started\n".to_owned())]);
}

#[test]
fn test_kills_in_every_step_start_the_command_once() {
    // A kill soon after the submit meets a replica in each of its steps, in some round or other.
    let mut fleet = Fleet::one_box();
    for delay in [0, 2, 4, 6, 8, 10, 13, 16, 20, 25, 35, 50] {
        let job = fleet.client.run("echo once >> outputs/starts; echo line; exit 7");
        std::thread::sleep(Duration::from_millis(delay));
        fleet.bounce();
        let ended = fleet.client.ended(&job);
        assert_eq!((ended.epoch, ended.state.as_str()), (1, "Failed"), "after {delay} ms: {ended:?}");
        assert_eq!(fleet.client.text(&job), "line\n", "after {delay} ms");
        let outputs = fleet.client.outputs(&ended);
        assert_eq!(outputs, [("outputs/starts".to_owned(), "once\n".to_owned())], "after {delay} ms");
    }
}

#[test]
fn test_damaged_journal_costs_nothing() {
    let mut fleet = Fleet::one_box();
    let job = ticker(&fleet);
    fleet.client.reached(&job, &["Running"]);
    bounce_without_journal(&mut fleet);
    assert_whole(&fleet, &job);
}

/// Kills the daemon, and starts one that cannot read the journal.
fn bounce_without_journal(fleet: &mut Fleet) {
    fleet.controller.kill();
    for (file, bytes) in [("journal.db", vec![0xa5; 8192]), ("journal.db-wal", vec![])] {
        fs::write(fleet.controller.state().join(file), bytes).unwrap();
    }
    fleet.serve();
    eventually("the journal is set aside", SOON, || {
        fleet.controller.state().join("journal.db.damaged-1").exists().then_some(())
    });
}

#[test]
fn test_cancel_that_comes_before_a_kill_still_counts() {
    let mut fleet = Fleet::one_box();
    let script = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))\nprint('up')\nsignal.pause()\n";
    let code = Some(fleet.client.try_push(&[("t.py", script)]).unwrap());
    let job = fleet.client.submit(&JobDraft { command: "python t.py".into(), code, ..JobDraft::default() });
    fleet.client.wrote(&job, "up\n");
    fleet.client.cancel(&job).unwrap();
    fleet.bounce();
    assert_eq!(fleet.client.ended(&job).state, "Canceled");
    assert_eq!(fleet.client.text(&job), "up\nbye\n");
}

const REPORTER: &str = r#"
import json, os, pathlib, time, urllib.request
print("up")
url = os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/runs/log-metric"
body = {"run_id": os.environ["MLFLOW_RUN_ID"], "key": "loss", "value": 0.5, "timestamp": 1, "step": 0}
headers = {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"], "Content-Type": "application/json"}
for step, gate in enumerate(("go", "again")):
    body["step"] = step
    while not pathlib.Path(gate).exists(): time.sleep(0.02)
    while True:  # as the client does: again when nobody listens, never after a refusal
        try:
            print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).status)
        except urllib.error.HTTPError as refused:
            print(refused.code)
        except OSError:
            time.sleep(0.005)
            continue
        break
"#;

#[test]
fn test_tracking_endpoint_is_where_it_was_after_a_restart() {
    let mut fleet = Fleet::one_box();
    let code = Some(fleet.client.try_push(&[("t.py", REPORTER)]).unwrap());
    let job = fleet.client.submit(&JobDraft { command: "python t.py".into(), code, ..JobDraft::default() });
    fleet.client.wrote(&job, "up\n");
    fleet.bounce();
    fleet.controller.open_gate("go");
    fleet.client.wrote(&job, "up\n200\n");
    // The secret that the command was given is known without the journal, too.
    bounce_without_journal(&mut fleet);
    fleet.controller.open_gate("again");
    assert_eq!(fleet.client.ended(&job).state, "Completed", "{}", fleet.client.text(&job));
    assert_eq!(fleet.client.text(&job), "up\n200\n200\n");
    assert_eq!(fleet.client.records(&job).len(), 2);
}
