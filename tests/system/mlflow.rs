//! What jobs recorded, as MLflow's own clients read it from an export.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use agent_tests::{Host, finish};

/// One client of each generation in use.
const CLIENTS: [&str; 2] = ["mlflow-skinny>=2,<3", "mlflow-skinny>=3"];

const SCRIPT: &str = r#"
import math, pathlib
import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag

client = MlflowClient()
with mlflow.start_run() as run:
    mlflow.log_param("alpha", "0.5\nand more")
    mlflow.set_tag("team", "vision")
    for step in range(200):
        mlflow.log_metric("loss", 0.1 + 0.2 / (step + 1), step=step)
    mlflow.log_metrics({"test/nothing": math.nan, "tiny": 5e-324, "huge": -1.7976931348623157e308})
    pathlib.Path("note.txt").write_text("kept")
    mlflow.log_artifact("note.txt", "notes")
    data = Dataset("iris", "abc", "local", "iris.csv", schema='{"a": 1}', profile=None)
    client.log_inputs(run.info.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])
    with mlflow.start_run(nested=True, run_name="kid"):
        mlflow.log_metric("acc", 0.5)
        pathlib.Path("inside.txt").write_text("of the kid")
        mlflow.log_artifact("inside.txt")
    client.create_registered_model("best", tags={"area": "test"})
    client.create_model_version("best", run.info.artifact_uri + "/notes", run.info.run_id)
    client.set_registered_model_alias("best", "champion", "1")
    if hasattr(mlflow, "initialize_logged_model"):
        model = mlflow.initialize_logged_model(name="net", model_type="net", params={"depth": "3"})
        mlflow.log_metric("val", 0.9, model_id=model.model_id)
        mlflow.finalize_logged_model(model.model_id, "READY")
        with mlflow.start_span("outer", span_type="CHAIN") as outer:
            outer.set_inputs({"question": "größe"})
            with mlflow.start_span("inner") as inner:
                inner.set_attribute("tokens", 7)
            outer.set_outputs({"answer": 42})
        mlflow.set_trace_tag(outer.trace_id, "team", "vision")
        mlflow.flush_trace_async_logging()
with open("outputs/expected.txt", "w") as file:
    for step in range(200):
        file.write(repr(0.1 + 0.2 / (step + 1)) + "\n")
"#;

/// Reads the store in the directory that it is given, and compares it with what the job recorded.
const READING: &str = r#"
import logging, math, pathlib, sys, warnings
import mlflow
from mlflow import MlflowClient

store, job = sys.argv[1:3]
mlflow.set_tracking_uri(store)
client = MlflowClient(tracking_uri=store)
def is_(what, found, expected):
    assert found == expected, f"{what}: {found!r}, not {expected!r}"
experiments = {each.name: each.experiment_id for each in client.search_experiments()}
is_("the experiment", list(experiments), ["birds"])
runs = {run.data.tags["agentd.job"] + "/" + run.info.run_name: run for run in client.search_runs([experiments["birds"]])}
run, kid = runs[job + "/python t.py"], runs[job + "/kid"]
is_("status", (run.info.status, kid.info.status), ("FINISHED", "FINISHED"))
is_("parameter", run.data.params, {"alpha": "0.5\nand more"})
is_("tag", run.data.tags["team"], "vision")
is_("parent", kid.data.tags["mlflow.parentRunId"], run.info.run_id)
history = client.get_metric_history(run.info.run_id, "loss")
is_("steps", [point.step for point in history], list(range(200)))
assert all(abs(point.timestamp - run.info.start_time) < 3_600_000 for point in history), history
expected = pathlib.Path(client.download_artifacts(run.info.run_id, "outputs/expected.txt")).read_text().split()
is_("values", [repr(point.value) for point in history], expected)
is_("small and great", (run.data.metrics["tiny"], run.data.metrics["huge"]), (5e-324, -1.7976931348623157e308))
assert math.isnan(run.data.metrics["test/nothing"]), run.data.metrics
is_("of the kid", (kid.data.metrics, [each.path for each in client.list_artifacts(kid.info.run_id)]), ({"acc": 0.5}, ["inside.txt"]))
is_("a file", pathlib.Path(client.download_artifacts(run.info.run_id, "notes/note.txt")).read_text(), "kept")
[data] = run.inputs.dataset_inputs
is_("data", (data.dataset.name, data.dataset.digest, data.dataset.source), ("iris", "abc", "iris.csv"))
is_("its use", [(tag.key, tag.value) for tag in data.tags], [("mlflow.data.context", "training")])
[model] = [each for each in client.search_registered_models() if each.tags["agentd.job"] == job]
is_("registered", (model.tags["area"], model.aliases), ("test", {"champion": "1"}))
version = client.get_model_version(model.name, "1")
is_("version", (version.run_id, version.current_stage), (run.info.run_id, "None"))
assert version.source.endswith(run.info.run_id + "/artifacts/notes"), version.source
is_("its files", client.get_model_version_download_uri(model.name, "1"), version.source)
if hasattr(mlflow, "search_logged_models"):
    [net] = client.search_logged_models([experiments["birds"]], filter_string=f"source_run_id = '{run.info.run_id}'")
    is_("logged model", (net.name, net.params, str(net.status)), ("net", {"depth": "3"}, "READY"))
    is_("measured", [(metric.key, metric.value) for metric in net.metrics], [("val", 0.9)])
    [trace] = client.search_traces([experiments["birds"]], filter_string="trace.status = 'OK'")
    info, spans = trace.info, {span.name: span for span in trace.data.spans}
    is_("trace", (info.tags["team"], info.tags["agentd.job"], info.experiment_id), ("vision", job, experiments["birds"]))
    is_("its run", info.trace_metadata["mlflow.sourceRun"], run.info.run_id)
    is_("spans", sorted(spans), ["inner", "outer"])
    outer, inner = spans["outer"], spans["inner"]
    is_("nesting", (outer.parent_id, inner.parent_id), (None, outer.span_id))
    is_("what it held", (outer.inputs, outer.outputs, outer.span_type), ({"question": "größe"}, {"answer": 42}, "CHAIN"))
    is_("attribute", inner.get_attribute("tokens"), 7)
    length = (outer.end_time_ns - outer.start_time_ns) / 1e6
    assert abs(info.execution_duration - length) < 2 and abs(info.request_time - outer.start_time_ns / 1e6) < 2, info
    [found] = client.search_traces([experiments["birds"]], filter_string="tags.team = 'vision'", include_spans=False)
    is_("found by its tag", found.info.trace_id, info.trace_id)
print("as it was recorded")
"#;

/// The interpreter with the packages that a job had.
fn environment(host: &Host, job: &str) -> String {
    let log = host.ctl(&["logs", job]).ok().stdout;
    log.lines().find_map(|line| line.strip_prefix("python ")).unwrap_or_else(|| panic!("{log}")).to_owned()
}

#[test]
fn test_clients_of_two_generations_read_what_was_exported() {
    let host = Host::started();
    let store = host.home().join("mlruns");
    let mut pythons = Vec::new();
    let jobs = ["train-2", "train-3"];
    for (client, job) in CLIENTS.iter().zip(jobs) {
        let script = format!("import sys\nprint('python ' + sys.executable)\n{SCRIPT}");
        let file = format!(
            "name: {job}\ndisplay_name: python t.py\nexperiment_name: birds\ncode: .\ncommand: python t.py\n\
             environment: {{python: python3, requirements: requirements.txt}}\n"
        );
        let requirements = format!("{client}\n");
        let files = [("t.py", script.as_str()), ("requirements.txt", &requirements), ("job.yml", &file)];
        host.ctl(&["run", host.project(job, &files).to_str().unwrap()]).ok();
        pythons.push(environment(&host, job));
    }
    let to = store.to_str().unwrap();
    let export = |job: &str| host.ctl(&["mlflow", "export", job, "--to", to]).ok().says("1 job, 2 runs");
    export(jobs[0]);
    // A client reads what one of an older generation wrote; what is only of MLflow 3, the older one does not know.
    read(&host, &pythons[0], &store, jobs[0]);
    export(jobs[0]);
    export(jobs[1]);
    for job in jobs {
        read(&host, &pythons[1], &store, job);
    }
}

#[allow(clippy::disallowed_methods, reason = "it is what reads the export")]
fn read(host: &Host, python: &str, store: &Path, job: &str) {
    let script = host.home().join("reading.py");
    // Models beside runs are of MLflow 3.
    let text = READING.replace("if hasattr(mlflow, \"search_logged_models\"):", "if job == \"train-3\":");
    fs::write(&script, text).unwrap();
    let mut command = Command::new(python);
    command.arg(&script).arg(store).arg(job).env("MLFLOW_ALLOW_FILE_STORE", "true").current_dir(host.home());
    let ran = command.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(said.contains("as it was recorded"), "{said}{}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn test_the_installed_mlflow_shows_an_export_and_one_that_lacks_is_told() {
    let host = Host::started();
    let job = host.submit(r#"echo '{"metric":"m","value":2.5}' >> $AGENTD_METRICS"#);
    host.wait_for(&job, &["Completed"]);
    let bin = host.home().join("bin");
    fs::create_dir(&bin).unwrap();
    let program = |name: &str, text: &str| {
        fs::write(bin.join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    program("python3", "exit 1");
    // Programs of the machine that the ones above need.
    let path = format!("{}:/bin", bin.display());
    let store = host.home().join("shown");
    let words = ["mlflow", "ui", &job, "--to", store.to_str().unwrap(), "--", "--port", "5001"];
    let ui = || finish(host.client(&words).env("PATH", &path));
    ui().code(1).says("pip install mlflow").says(store.to_str().unwrap());
    program("mlflow", r#"echo "shows $* $MLFLOW_ALLOW_FILE_STORE"; exit 7"#);
    let ran = ui().code(7);
    let due = format!("shows ui --backend-store-uri {} --port 5001 true", store.display());
    assert!(ran.stdout.contains(&due), "{}", ran.stdout);
    assert_eq!(
        fs::read_dir(&store).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count(),
        2
    );
}
