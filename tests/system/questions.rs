//! What a new user asks, and what he does wrong: each has an answer that one command gives.

use std::fs;
use std::path::PathBuf;

use agent_tests::{Host, finish};

/// A script that logs a loss and takes an option.
const SCRIPT: &str = r#"
import json, os, sys
rate = float(sys.argv[sys.argv.index("--lr") + 1])
open(os.environ["AGENTD_METRICS"], "a").write(json.dumps({"metric": "loss", "value": rate * 2}) + "\n")
"#;

/// A host with one slot, the path of a script, and a job that waits for a file to be made.
fn host() -> (Host, String, String, PathBuf) {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", "1");
    host.start();
    let dir = host.project("digits", &[("train.py", SCRIPT)]);
    let script = dir.join("train.py").display().to_string();
    for (name, rate) in [("run-a", "0.5"), ("run-b", "0.1")] {
        host.ctl(&["run", &script, "--name", name, "--", "--lr", rate]).ok();
    }
    let gate = host.home().join("gate");
    let long = host.submit(&format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display()));
    host.wait_for(&long, &["Running"]);
    (host, script, long, gate)
}

#[test]
fn test_each_question_of_a_new_user_is_answered_by_one_command() {
    let (host, script, long, gate) = host();
    let waiting = host.ctl(&["submit", &script, "--", "--lr", "1"]).ok().stdout.trim().to_owned();
    let begins = &waiting[..waiting.len() - 1];
    for (question, line, answer) in [
        ("who uses what now", "top", "OWNER"),
        ("why does it wait", &*format!("why {begins}"), &*long),
        ("is it still running", "jobs --active", &*long),
        ("what fills the disk", "gc --all --dry-run", "BLOBS"),
        ("which run was best", "runs --experiment digits --minimize loss --limit 3", "run-b"),
        ("what were its parameters", "runs run-b", "0.1"),
        ("what did it use", "show run-b", "used"),
        ("in what do they differ", "diff run-a run-b", "0.5"),
        ("what would be sent", &*format!("files {script}"), "train.py"),
        ("can I run it again with another", "rerun run-b --name again -- --lr 0.3", "again"),
        ("what is this machine", "doctor", "python"),
        ("how do I stop all of it", "cancel --all --wait", &*long),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let ran = host.ctl(&words).ok();
        assert!(format!("{}{}", ran.stdout, ran.stderr).contains(answer), "{question}: {ran:?}");
    }
    fs::write(gate, "").unwrap();
    assert_eq!(host.job_state(&long), "Canceled");
    let best = host.ctl(&["runs", "--experiment", "digits", "--minimize", "loss"]).ok().stdout;
    assert!(best.lines().nth(1).unwrap().starts_with("run-b"), "{best}");
}

#[test]
fn test_each_mistake_of_a_new_user_is_told_with_what_to_write() {
    let host = Host::started();
    let dir = host.project(
        "p",
        &[
            ("train.py", "print(1)"),
            ("slurm.sh", "#!/bin/bash\n#SBATCH --mail-type=END\ntrue\n"),
            ("slip.yml", "command: 'true'\nenviroment: {python: python3}\n"),
            ("uv.lock", "version = 1\n"),
        ],
    );
    let path = |name: &str| dir.join(name).display().to_string();
    let script = path("train.py");
    for (line, code, answer) in [
        (format!("run {script} --lr 0.3"), 125, format!("agentctl run {script} -- --lr 0.3")),
        (format!("sbatch {script}"), 2, "agentctl submit SCRIPT".to_owned()),
        (format!("run {}", path("trian.py")), 125, format!("did you mean `{script}`")),
        ("squeue".to_owned(), 2, "agentctl jobs --active".to_owned()),
        ("history".to_owned(), 2, "agentctl jobs --all".to_owned()),
        (format!("submit {}", path("slip.yml")), 1, "did you mean `environment`".to_owned()),
        (format!("submit {script} --memory 4"), 2, "write 4g for GiB".to_owned()),
        (format!("submit {script} --gpus 99 --strict"), 1, "no machine here has 99 GPUs".to_owned()),
        (format!("submit {script} --gpus 99"), 0, "no machine here has 99 GPUs for jobs".to_owned()),
        (format!("submit {}", path("slurm.sh")), 0, "agentctl wait JOB".to_owned()),
        (format!("submit {script} --count 2 -- --seed $AGENTD_ARRAY_INDEX"), 0, "only a shell".to_owned()),
        (format!("submit {script} --env NOT_SET_HERE"), 2, "NOT_SET_HERE=VALUE".to_owned()),
        (format!("submit {script} --secret TOKEN=nothing"), 1, "agentctl secret set".to_owned()),
        (format!("submit {script} --env-file {}", path("uv.lock")), 1, "uv export".to_owned()),
        (format!("submit {script}"), 0, "uv.lock is not used".to_owned()),
        ("jobs -o columns=name,loss".to_owned(), 2, "metric:NAME".to_owned()),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let ran = host.ctl(&words).code(code);
        let told = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(told.contains(&answer), "{line}: {told}");
    }
}

#[test]
fn test_verbs_that_do_something_answer_programs_too() {
    let host = Host::started();
    let dir = host.project("p", &[("a.sh", "echo x >outputs/x")]);
    let json = |line: &[&str]| host.ctl(line).ok().json();
    let job = json(&["submit", dir.to_str().unwrap(), "--json", "--", "bash", "a.sh"])["job"].clone();
    let job = job.as_str().unwrap();
    let again = json(&["rerun", job, "--json"])["job"].clone();
    let again = again.as_str().unwrap();
    let ended = json(&["wait", job, again, "--json"]);
    assert_eq!([&ended["jobs"][0]["job"], &ended["jobs"][1]["state"]], [job, "Completed"]);
    assert_eq!(json(&["files", dir.to_str().unwrap(), "--json"])["parts"][0]["files"], 1);
    assert_eq!(json(&["explain", "ENV-103", "--json"])["code"], "ENV-103");
    assert!(json(&["explain", "--json"]).as_array().unwrap().len() > 50);
    let fetched = json(&["download", job, "--json"]);
    assert_eq!([&fetched["files"], &fetched["bytes"]], [1, 2], "{fetched}");
    assert_eq!(json(&["cancel", job, "--json"])["jobs"][0]["state"], "Completed");
    assert_eq!(json(&["rm", job, again, "--json"])["removed"], serde_json::json!([job, again]));
}

#[test]
fn test_a_command_gets_the_variables_and_the_secrets_of_the_one_who_submits() {
    let host = Host::started();
    let dir = host.project("p", &[("a.txt", "a")]);
    let value = host.home().join("value");
    fs::write(&value, "hidden").unwrap();
    finish(host.client(&["secret", "set", "wandb"]).stdin(fs::File::open(value).unwrap())).ok();
    let line =
        ["run", dir.to_str().unwrap(), "--env", "FLAVOUR", "--env", "A=b", "--secret", "KEY=wandb", "--"];
    let command = ["sh -c 'echo $FLAVOUR $A ${#KEY}'"];
    let ran = finish(host.client(&[&line[..], &command].concat()).env("FLAVOUR", "plum")).ok();
    assert_eq!(ran.stdout, "plum b 6\n");
    ran.says("environment: python3 of the machine as it is");
}
