//! One job, left to right: the story of the code tour, told by the program itself.

use agent_tests::{Host, finish};

#[test]
fn test_a_job_runs_from_nothing_to_its_outputs() {
    // Nothing runs; the first command brings the daemon up.
    let host = Host::new();
    let code = host
        .project("train", &[("job.yml", JOB), ("train.py", SCRIPT), ("lib/data.py", "ROWS = [1, 2, 3]\n")]);
    let ran = host.ctl(&["run", code.to_str().unwrap()]).ok();

    // What the job wrote is on standard output, byte for byte and in order; what we say is not.
    assert_eq!(ran.stdout, "learning from 3 rows at rate 0.5\nto stderr\ndone\n");
    let ran = ran.says("3 files").says("Completed").says("outputs/model.txt").says("loss");

    // The job can be looked at afterwards.
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    assert!(ran.stderr.contains(&job), "{}", ran.stderr);
    assert_eq!(host.job_state(&job), "Completed");
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, ran.stdout);
    let why = host.ctl(&["why", &job]).ok().stdout;
    // What takes less than the pause between two reports of the node may be left out.
    for step in ["queued", "given to", "preparing the environment", "running", "stored 1 file"] {
        assert!(why.contains(step), "no `{step}` in:\n{why}");
    }
    host.ctl(&["stop"]).ok();
    assert_eq!(host.ctl(&["jobs"]).code, 4, "no daemon answers any more");
}

#[test]
fn test_a_file_for_the_cloud_runs_without_a_warning_and_belongs_to_its_directory() {
    let host = Host::started();
    let file = "$schema: https://example.org/latest/commandJob.schema.json\ncommand: echo \"hello world\"\n\
                environment: host\ncompute: azureml:cpu-cluster\nidentity: {type: aml_token}\n";
    let dir = host.project("hello", &[("hello-world.yml", file)]);
    let ran = finish(host.client(&["run", "hello-world.yml"]).current_dir(&dir)).ok();
    assert_eq!(ran.stdout, "hello world\n");
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0].clone();
    assert_eq!((&job["title"], &job["experiment"]), (&"echo hello".into(), &"hello".into()));
}

const JOB: &str = "\
type: command
display_name: story
code: .
command: python train.py --rate ${{inputs.rate}}
inputs:
  rate: 0.5
environment:
  python: python3
";

const SCRIPT: &str = r#"
import json, os, sys
from lib.data import ROWS

print(f"learning from {len(ROWS)} rows at rate {sys.argv[2]}")
print("to stderr", file=sys.stderr)
with open(os.environ["AGENTD_METRICS"], "a") as metrics:
    for step in range(3):
        metrics.write(json.dumps({"metric": "loss", "value": 1 / (step + 1), "step": step}) + "\n")
with open("outputs/model.txt", "w") as model:
    model.write("weights")
print("done")
"#;

#[test]
fn test_a_script_runs_by_its_name_and_its_job_is_found_by_a_part_of_its() {
    let host = Host::started();
    let dir = host.project("p", &[("t.py", "import sys; print(*sys.argv[1:])\n")]);
    let ran = host.ctl(&["run", dir.join("t.py").to_str().unwrap(), "--", "a", "b"]).ok();
    assert_eq!(ran.stdout, "a b\n");
    let job = host.ctl(&["ps", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    for given in ["-", &job[..job.len() - 2], &job] {
        assert_eq!(host.ctl(&["logs", given]).ok().stdout, "a b\n", "{given}");
        assert_eq!(host.show(given)["job"], job.as_str(), "{given}");
        host.ctl(&["wait", given]).ok();
        host.ctl(&["why", given]).ok();
        host.ctl(&["cancel", given]).ok().says(&job);
    }
    assert!(host.ctl(&["logs", "no-such"]).stderr.contains("JOB-104"));
}
