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
