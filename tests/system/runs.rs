//! Runs compared: one table of parameters and metrics, the best first.

use agent_tests::Host;

/// Logs a loss that depends on its argument, as a script without any library does.
const SCRIPT: &str = r#"
import argparse, json, os
given = argparse.ArgumentParser()
given.add_argument("--learning-rate", type=float)
given.add_argument("--epochs", type=int, default=1)
given = given.parse_args()
with open(os.environ["AGENTD_METRICS"], "a") as file:
    for step in range(given.epochs):
        file.write(json.dumps({"metric": "loss", "value": abs(given.learning_rate - 0.1) + 1 / (step + 1), "step": step}) + "\n")
    file.write(json.dumps({"param": "optimizer", "text": "sgd"}) + "\n")
    file.write(json.dumps({"tag": "team", "text": "vision" if given.learning_rate < 1 else "audio"}) + "\n")
"#;

fn lines(text: &str) -> Vec<Vec<&str>> {
    text.lines().map(|line| line.split_whitespace().collect()).collect()
}

/// A host with three runs of one script, as README shows first: with arguments on the command line.
fn three() -> Host {
    let host = Host::started();
    let dir = host.project("digits", &[("train.py", SCRIPT)]);
    let script = dir.join("train.py").display().to_string();
    for (name, rate) in [("far", "3"), ("best", "0.1"), ("near", "0.2")] {
        let line = ["run", &script, "--name", name, "--", "--learning-rate", rate, "--epochs", "4"];
        host.ctl(&line).ok();
    }
    host
}

#[test]
fn test_which_run_was_best_and_what_were_its_parameters() {
    let host = three();
    host.submit("true"); // of another experiment
    let runs = |more: &[&str]| host.ctl(&[&["runs", "--experiment", "digits"], more].concat()).ok();
    let shown = runs(&["--minimize", "loss"]);
    let table = lines(&shown.stdout);
    assert_eq!(table[0], ["NAME", "STATE", "TIME", "loss", "learning_rate"], "{}", shown.stdout);
    assert_eq!([table[1][0], table[1][3], table[1][4]], ["best", "0.25", "0.1"]);
    assert_eq!([table[2][0], table[3][0]], ["near", "far"]);
    assert_eq!(table.len(), 4);
    let shown = shown.says("the same in all: epochs=4, optimizer=sgd");
    assert!(!shown.stderr.contains("--maximize"), "{}", shown.stderr);
    assert_eq!(lines(&runs(&["--maximize", "loss"]).stdout)[1][0], "far");
    runs(&[]).says("--minimize METRIC");

    let csv = runs(&["--minimize", "loss", "--csv"]).stdout;
    let heading =
        "job,state,owner,experiment,seconds,param.epochs,param.learning_rate,param.optimizer,metric.loss";
    assert!(csv.starts_with(heading), "{csv}");
    assert!(csv.lines().nth(1).unwrap().ends_with(",4,0.1,sgd,0.25"), "{csv}");
    let all = runs(&["--minimize", "loss", "--json"]).json();
    assert_eq!(all["runs"][0]["job"], "best", "{all}");
    assert_eq!(all["runs"][0]["params"]["learning_rate"], "0.1");
    assert_eq!(all["runs"][0]["metrics"]["loss"], 0.25);
    assert_eq!(all["runs"][2]["tags"]["team"], "audio");
    assert_eq!(all["more"], false);

    assert_eq!(lines(&runs(&["--tag", "team=vision"]).stdout).len(), 3);
    let two = host.ctl(&["runs", "far", "ne", "--minimize", "loss"]).ok().stdout;
    assert_eq!(lines(&two).iter().map(|line| line[0]).collect::<Vec<_>>(), ["NAME", "near", "far"]);
    host.ctl(&["runs", "--experiment", "none"]).ok().says("there is no such run");
}

#[test]
fn test_jobs_have_columns_of_what_they_recorded_and_are_sorted_by_them() {
    let host = three();
    let columns = ["jobs", "-o", "columns=name,metric:loss,param:learning_rate,owner"];
    let shown = |sort: &str| host.ctl(&[&columns[..], &["--sort", sort]].concat()).ok().stdout;
    let ascending = shown("metric:loss");
    let table = lines(&ascending);
    assert_eq!(table[0], ["NAME", "loss", "learning_rate", "OWNER"], "{ascending}");
    assert_eq!([table[1][0], table[1][1], table[1][2]], ["best", "0.25", "0.1"]);
    let names = |text: &str| lines(text)[1..].iter().map(|line| line[0].to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&shown("-metric:loss")), ["far", "near", "best"]);
    assert_eq!(names(&shown("name")), ["best", "far", "near"]);
    let refused = host.ctl(&["jobs", "--sort", "size"]).code(2);
    refused.says("there is no column `size`").says("metric:NAME");
}

#[test]
fn test_the_tasks_of_an_array_and_the_trials_of_a_sweep_are_compared() {
    let host = Host::started();
    let record = "echo '{\"metric\":\"score\",\"value\":'$((${{inputs.x}} * 10))'}' >> $AGENTD_METRICS";
    let job = format!("command: {}\ninputs: {{x: 2}}\n", serde_json::Value::from(record));
    let dir = host.project("p", &[("job.yml", &job)]);
    let path = dir.to_str().unwrap();
    host.ctl(&[
        "sweep",
        path,
        "--name",
        "tries",
        "--set",
        "x=choice(3,1)",
        "--max",
        "2",
        "--sampling",
        "grid",
        "--maximize",
        "score",
    ])
    .ok();
    let shown = host.ctl(&["runs", "tries"]).ok().stdout;
    let table = lines(&shown);
    assert_eq!(table[0], ["NAME", "STATE", "TIME", "score", "x"], "{shown}");
    assert_eq!([&table[1][3..], &table[2][3..]], [["30", "3"], ["10", "1"]], "the best first: {shown}");
    host.ctl(&["run", path, "--name", "row", "--count", "2"]).ok();
    let shown = host.ctl(&["runs", "row"]).ok();
    assert_eq!(lines(&shown.stdout).len(), 3, "{}", shown.stdout);
    shown.says("the same in all: x=2");
}

#[test]
fn test_who_uses_what_now_is_on_one_screen() {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", "1");
    host.start();
    assert!(host.ctl(&["top"]).ok().stdout.ends_with("no job runs or waits\n"));
    let gate = host.home().join("gate");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let dir = host.project("p", &[("a.txt", "a")]);
    let path = dir.to_str().unwrap();
    let submit = |more: &[&str]| host.ctl(&[&["submit", path], more, &["--", &wait]].concat()).ok();
    let running = submit(&["--memory", "64m"]).stdout.trim().to_owned();
    host.wait_for(&running, &["Running"]);
    submit(&["--count", "3"]);
    let used = host.ctl(&["top", "--json"]).ok().json();
    let owner = &used["owners"][0];
    assert_eq!([&owner["running"], &owner["waiting"]], [1, 3], "{used}");
    assert_eq!(owner["memory_bytes"], 64 << 20);
    let node = used["nodes"][0]["node"].as_str().unwrap();
    assert_eq!(owner["nodes"][0], node);
    let shown = host.ctl(&["top"]).ok().stdout;
    let user = owner["owner"].as_str().unwrap();
    let row = shown.lines().rfind(|line| line.starts_with(user)).unwrap();
    assert_eq!(row.split_whitespace().collect::<Vec<_>>(), [user, "1", "3", "64", "MiB", node], "{shown}");
    let machines = host.ctl(&["nodes"]).ok().stdout;
    assert!(lines(&machines)[1].ends_with(&[user]), "{machines}");
    std::fs::write(gate, "").unwrap();
}
