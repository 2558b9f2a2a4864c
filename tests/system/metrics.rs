//! Metrics, from real MLflow clients and from the plain file.

use std::collections::BTreeMap;

use agent_tests::Host;

/// One client of each generation in use.
const CLIENTS: [&str; 2] = ["mlflow-skinny>=2,<3", "mlflow-skinny>=3"];

const SCRIPT: &str = r#"
import math, pathlib, sys
import mlflow

mlflow.set_experiment("another name")
with mlflow.start_run():
    mlflow.log_param("alpha", 0.5)
    mlflow.set_tag("team", "vision")
    for step in range(5):
        mlflow.log_metric("loss", 1.0 / (step + 1), step=step)
    mlflow.log_metrics({"accuracy": 0.9, "nothing": math.nan})
    pathlib.Path("note.txt").write_text("kept")
    mlflow.log_artifact("note.txt", "notes")
    run = mlflow.active_run().info.run_id
print(mlflow.get_run(run).data.params["alpha"], run)
sys.exit(3)
"#;

#[test]
fn test_mlflow_clients_of_two_generations() {
    let host = Host::started();
    for (index, client) in CLIENTS.iter().enumerate() {
        let requirements = format!("{client}\n");
        let code =
            host.project(&format!("p{index}"), &[("t.py", SCRIPT), ("requirements.txt", &requirements)]);
        let name = format!("client-{index}");
        let ran = host.ctl(&["run", code.to_str().unwrap(), "--name", &name, "--", "python", "t.py"]);
        // The script's own code decides, although the client reports FINISHED when it leaves.
        let ran = ran.code(3).says("accuracy");
        assert!(ran.stdout.contains(&format!("0.5 {name}")), "{}", ran.stdout);

        let listed = host.ctl(&["metrics", &name, "--json"]).ok().json();
        let metrics: BTreeMap<&str, &serde_json::Value> = listed["metrics"]
            .as_array()
            .unwrap()
            .iter()
            .map(|metric| (metric["name"].as_str().unwrap(), metric))
            .collect();
        assert_eq!(metrics["loss"]["count"], 5, "{listed}");
        assert_eq!(metrics["loss"]["last"], 0.2);
        assert_eq!(metrics["accuracy"]["last"], 0.9);
        assert!(metrics.contains_key("nothing"));
        assert_eq!(listed["params"]["alpha"], "0.5");
        assert_eq!(listed["tags"]["team"], "vision");

        let to = host.home().join(&name);
        host.ctl(&["download", &name, "-o", to.to_str().unwrap()]).ok();
        assert_eq!(std::fs::read_to_string(to.join("notes/note.txt")).unwrap(), "kept");
    }
}

/// What a script asks of its own models, runs, traces and registry. What a tracking server of its own answers to the same
/// calls stands behind `expected`.
const ASKING: &str = r#"
import mlflow
from mlflow import MlflowClient

client = MlflowClient()
def is_(what, found, expected):
    assert found == expected, f"{what}: {found!r}, not {expected!r}"
with mlflow.start_run() as run:
    mlflow.log_metric("acc", 0.9800000000000001, step=1)
    mlflow.set_tag("empty", "")
    models = [mlflow.initialize_logged_model(name=name, model_type="net") for name in ("a", "b")]
    for model, value in zip(models, (0.9, 0.7)):
        mlflow.log_metric("val", value, model_id=model.model_id)
        mlflow.finalize_logged_model(model.model_id, "READY")
    def found(**asked):
        return [model.name for model in mlflow.search_logged_models(output_format="list", **asked)]
    is_("best model", found(order_by=[{"field_name": "metrics.val", "ascending": False}]), ["a", "b"])
    is_("newest model", found(), ["b", "a"])
    is_("models by metric", found(filter_string="metrics.val > 0.8"), ["a"])
    client.create_registered_model("best")
    client.create_model_version("best", f"models:/{models[0].model_id}", run.info.run_id)
    client.set_registered_model_alias("best", "champion", "1")
    is_("version", client.get_model_version_by_alias("best", "champion").version, "1")
    is_("registered", [model.name for model in client.search_registered_models("name LIKE 'be%'")], ["best"])
    with mlflow.start_run(nested=True, run_name="kid") as kid:
        mlflow.log_metric("acc", 0.5)
        mlflow.log_param("kind", "a_b")
    mlflow.log_metric("kid/acc", 7.0)
    is_("metrics of the nested run", client.get_run(kid.info.run_id).data.metrics, {"acc": 0.5})
    ids = {run.info.run_id: "run", kid.info.run_id: "kid"}
    def runs(filter="", **asked):
        return [ids[one.info.run_id] for one in client.search_runs([run.info.experiment_id], filter, **asked)]
    is_("LIKE", runs("params.kind LIKE 'a%'"), ["kid"])
    is_("ILIKE", runs("params.kind ILIKE 'A_B'"), ["kid"])
    is_("IN", runs(f"attributes.run_id IN ('{run.info.run_id}')"), ["run"])
    is_("order", runs(), ["kid", "run"])
    whole = client.get_run(run.info.run_id)
    is_("value", whole.data.metrics["acc"], 0.9800000000000001)
    is_("empty tag", whole.data.tags["empty"], "")
    mlflow.log_dict({"columns": ["a"], "data": [[1]]}, "t.json")
    with mlflow.start_span("step") as span:
        span.set_inputs({"x": 1})
    mlflow.flush_trace_async_logging()
    is_("traces", [[span.name for span in trace.data.spans] for trace in mlflow.search_traces(return_type="list")], [["step"]])
print("as a server answers")
"#;

#[test]
fn test_script_finds_its_models_runs_and_traces_as_at_a_server_of_its_own() {
    let host = Host::started();
    let code = host.project("asking", &[("t.py", ASKING), ("requirements.txt", "mlflow-skinny>=3\n")]);
    let ran = host.ctl(&["run", code.to_str().unwrap(), "--name", "asking", "--", "python", "t.py"]).ok();
    assert!(ran.stdout.contains("as a server answers"), "{}", ran.stdout);
    let listed = host.ctl(&["metrics", "asking", "--json"]).ok().json();
    let metrics = listed["metrics"].as_array().unwrap();
    let last =
        |name: &str| metrics.iter().find(|metric| metric["name"] == name).map(|metric| &metric["last"]);
    assert_eq!(last("acc"), Some(&serde_json::json!(0.980_000_000_000_000_1)), "{listed}");
    assert!(last("kid/acc").is_some(), "{listed}");
    let tags = listed["tags"].as_object().unwrap();
    assert!(tags.keys().all(|tag| !tag.contains("agentd.")) && tags["empty"] == "", "{listed}");
}

#[test]
fn test_lines_that_are_no_records_do_no_harm() {
    let host = Host::started();
    let job = host.submit(
        r#"echo nonsense >> $AGENTD_METRICS; echo '{"metric":"m","value":2.5}' >> $AGENTD_METRICS; printf '{"metric":"cut' >> $AGENTD_METRICS"#,
    );
    host.wait_for(&job, &["Completed"]);
    let listed = host.ctl(&["metrics", &job, "--json"]).ok().json();
    assert_eq!(listed["metrics"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(listed["metrics"][0]["last"], 2.5);
}
