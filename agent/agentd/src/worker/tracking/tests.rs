//! The endpoint over a real loopback connection, call by call as clients make them.

mod alike;

use std::path::Path;

use agent_model::SystemClock;
use agent_model::tracking::{TrackingLine, TrackingRecord};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::*;

const API: &str = "/api/2.0/mlflow";
const BYTES: &str = "/api/2.0/mlflow-artifacts/artifacts";

/// An endpoint that answers for one run.
struct Fixture {
    dir: TempDir,
    tracking: Tracking,
    registration: Option<Registration>,
    _stop: oneshot::Sender<()>,
    _serving: JoinSet<()>,
}

impl Fixture {
    async fn new() -> Fixture {
        Fixture::with(Connections::new()).await
    }

    async fn with(connections: Connections) -> Fixture {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (_stop, stopped) = oneshot::channel::<()>();
        let stop = async { drop(stopped.await) };
        let (tracking, serve) =
            Tracking::start_with(listener, connections, Arc::new(SystemClock), stop).unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(serve);
        let mut fixture = Fixture {
            dir: tempfile::tempdir().unwrap(),
            tracking,
            registration: None,
            _stop,
            _serving: serving,
        };
        fixture.register();
        fixture
    }

    fn register(&mut self) {
        self.registration = Some(self.answer_for("train", "secret", self.file()));
    }

    fn answer_for(&self, run_id: &str, token: &str, file: PathBuf) -> Registration {
        self.tracking.register(TrackedRun {
            replica: format!("{run_id}.1.0").parse().unwrap(),
            run_id: run_id.to_owned(),
            token: token.to_owned(),
            experiment: "exp".to_owned(),
            tracking_stream: file.with_extension("stream"),
            tracking_file: file,
            artifacts: self.dir.path().join("artifacts"),
        })
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("tracking.jsonl")
    }

    fn records(&self) -> Vec<TrackingRecord> {
        let text = std::fs::read(self.file()).unwrap_or_default();
        text.split(|byte| *byte == b'\n').filter_map(TrackingLine::parse).map(|line| line.record).collect()
    }

    async fn exchange(&self, method: &str, path: &str, token: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(self.tracking.address).await.unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\
             Content-Type: text/plain\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        let status = std::str::from_utf8(&answer[9..12]).unwrap().parse().unwrap();
        (status, answer.split_off(end + 4))
    }

    async fn post(&self, call: &str, body: Value) -> (u16, Value) {
        let (status, body) =
            self.exchange("POST", &format!("{API}/{call}"), "secret", body.to_string().as_bytes()).await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    async fn get(&self, call: &str) -> (u16, Value) {
        let (status, body) = self.exchange("GET", &format!("{API}/{call}"), "secret", b"").await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    async fn run(&self, run_id: &str) -> Value {
        let (status, body) = self.get(&format!("runs/get?run_uuid={run_id}&run_id={run_id}")).await;
        assert_eq!(status, 200, "{body}");
        body["run"].clone()
    }

    fn artifact(&self, path: &str) -> String {
        format!("{BYTES}/{}/train/artifacts/{path}", experiment_id("exp"))
    }
}

fn value<'a>(run: &'a Value, list: &str, key: &str) -> &'a Value {
    let found = run["data"][list].as_array().unwrap().iter().find(|entry| entry["key"] == key);
    found.map_or(&Value::Null, |entry| &entry["value"])
}

#[tokio::test]
async fn test_metrics_params_and_tags_are_lines_of_the_file_and_seen_by_the_run() {
    let fixture = Fixture::new().await;
    let metric =
        |value: Value| json!({"run_id": "train", "key": "loss", "value": value, "timestamp": 5, "step": "3"});
    assert_eq!(fixture.post("runs/log-metric", metric(json!(0.25))).await, (200, json!({})));
    assert_eq!(fixture.post("runs/log-metric", metric(json!("NaN"))).await.0, 200);
    let batch = json!({
        "run_id": "train",
        "metrics": [{"key": "acc", "value": "-Infinity", "timestamp": "7", "step": 0, "run_id": "train"}],
        "params": [{"key": "lr", "value": "0.1"}],
        "tags": [{"key": "team", "value": "vision"}, {"key": "gone", "value": "x"}],
    });
    assert_eq!(fixture.post("runs/log-batch", batch).await.0, 200);
    assert_eq!(fixture.post("runs/delete-tag", json!({"run_id": "train", "key": "gone"})).await.0, 200);

    let records = fixture.records();
    assert_eq!(records.len(), 7, "{records:?}");
    let first = TrackingRecord::Metric {
        metric: "loss".into(),
        value: 0.25,
        step: 3,
        time: Some(agent_model::Timestamp(5)),
    };
    assert_eq!(records[0], first);
    let run = fixture.run("train").await;
    assert_eq!(value(&run, "metrics", "loss"), "NaN");
    assert_eq!(value(&run, "metrics", "acc"), "-Infinity");
    assert_eq!(value(&run, "params", "lr"), "0.1");
    assert_eq!(value(&run, "tags", "team"), "vision");
    assert_eq!(value(&run, "tags", "gone"), &Value::Null);
    let (_, history) = fixture.get("metrics/get-history?run_id=train&metric_key=loss&max_results=1").await;
    assert_eq!(history["metrics"][0], json!({"key": "loss", "value": 0.25, "timestamp": 5, "step": 3}));
    let token = history["next_page_token"].as_str().unwrap();
    let rest = format!("metrics/get-history?run_id=train&metric_key=loss&page_token={token}");
    assert_eq!(fixture.get(&rest).await.1["metrics"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn test_parameter_keeps_its_first_value() {
    let fixture = Fixture::new().await;
    let param = |value: &str| json!({"run_id": "train", "key": "lr", "value": value});
    assert_eq!(fixture.post("runs/log-parameter", param("1")).await.0, 200);
    assert_eq!(fixture.post("runs/log-parameter", param("1")).await.0, 200);
    let (status, body) = fixture.post("runs/log-parameter", param("2")).await;
    assert_eq!((status, &body["error_code"]), (400, &json!("INVALID_PARAMETER_VALUE")));
    assert_eq!(fixture.records().len(), 1);
    let batch = json!({"run_id": "train", "params": [param("3")], "tags": [{"key": "a", "value": "b"}]});
    assert_eq!(fixture.post("runs/log-batch", batch).await.0, 400);
    assert_eq!(fixture.records().len(), 1, "a batch is recorded whole or not at all");
}

#[tokio::test]
async fn test_end_of_the_own_run_is_not_the_scripts_to_say() {
    let fixture = Fixture::new().await;
    let end = json!({"run_id": "train", "run_uuid": "train", "status": "FINISHED", "end_time": 9});
    let (status, body) = fixture.post("runs/update", end).await;
    assert_eq!((status, &body["run_info"]["status"]), (200, &json!("RUNNING")));
    assert!(fixture.records().is_empty());
    assert_eq!(fixture.post("runs/delete", json!({"run_id": "train"})).await.0, 403);
}

#[tokio::test]
async fn test_nested_runs_share_the_file_and_keep_their_names_apart() {
    let fixture = Fixture::new().await;
    let create = json!({
        "experiment_id": experiment_id("exp"), "user_id": "u", "run_name": "lr = 0.1", "start_time": 77,
        "tags": [{"key": "mlflow.parentRunId", "value": "train"}],
    });
    let (_, first) = fixture.post("runs/create", create.clone()).await;
    let (_, second) = fixture.post("runs/create", create).await;
    let id = |body: &Value| body["run"]["info"]["run_id"].as_str().unwrap().to_owned();
    let (first, second) = (id(&first), id(&second));
    assert_ne!(first, second);
    for (run, loss) in [("train", 1.0), (first.as_str(), 2.0), (second.as_str(), 3.0)] {
        let metric = json!({"run_id": run, "key": "val/loss", "value": loss, "timestamp": 1, "step": 0});
        assert_eq!(fixture.post("runs/log-metric", metric).await.0, 200);
    }
    fixture.post("runs/update", json!({"run_id": first, "status": "FAILED", "end_time": 99})).await;
    for (run, loss) in [("train", 1.0), (first.as_str(), 2.0), (second.as_str(), 3.0)] {
        assert_eq!(value(&fixture.run(run).await, "metrics", "val/loss"), &json!(loss));
    }
    let info = fixture.run(&first).await["info"].clone();
    assert_eq!(
        (&info["status"], &info["end_time"], &info["start_time"]),
        (&json!("FAILED"), &json!(99), &json!(77))
    );
    assert_eq!(info["run_name"], "lr = 0.1");

    let search = json!({
        "experiment_ids": [experiment_id("exp")],
        "filter": "tags.`mlflow.parentRunId` = 'train'",
        "order_by": ["metrics.`val/loss` DESC"],
        "max_results": 1,
    });
    let (_, found) = fixture.post("runs/search", search).await;
    assert_eq!(found["runs"][0]["info"]["run_id"], second.as_str());
    assert_eq!(found["next_page_token"], "1");
}

#[tokio::test]
async fn test_a_slash_in_a_name_leads_to_no_other_run() {
    let fixture = Fixture::new().await;
    let (_, child) = fixture.post("runs/create", json!({"run_name": "trial"})).await;
    let child = child["run"]["info"]["run_id"].as_str().unwrap().to_owned();
    let batch = json!({
        "run_id": "train",
        "metrics": [{"key": "trial/loss", "value": 1}],
        "params": [{"key": "trial/lr", "value": "2"}],
        "tags": [{"key": "trial/team", "value": "a"}, {"key": "trial/agentd.lifecycle", "value": "deleted"}],
    });
    assert_eq!(fixture.post("runs/log-batch", batch).await.0, 200);
    let (parent, child) = (fixture.run("train").await, fixture.run(&child).await);
    for (list, key) in [("metrics", "loss"), ("params", "lr"), ("tags", "team")] {
        assert_ne!(value(&parent, list, &format!("trial/{key}")), &Value::Null, "{list}");
        assert_eq!(value(&child, list, key), &Value::Null, "{list}");
    }
    assert_eq!(child["info"]["lifecycle_stage"], "active");
}

#[tokio::test]
async fn test_new_life_of_the_daemon_knows_what_was_recorded() {
    let mut fixture = Fixture::new().await;
    let (_, child) = fixture.post("runs/create", json!({"run_name": "trial"})).await;
    let child = child["run"]["info"]["run_id"].as_str().unwrap().to_owned();
    fixture.post("runs/set-tag", json!({"run_id": child, "key": "a", "value": "b"})).await;
    fixture.registration = None;
    assert_eq!(fixture.get("runs/get?run_id=train").await.0, 401);
    fixture.register();
    assert_eq!(value(&fixture.run(&child).await, "tags", "a"), "b");
}

#[tokio::test]
async fn test_every_experiment_name_is_that_of_the_job() {
    let fixture = Fixture::new().await;
    let (status, body) = fixture.get("experiments/get-by-name?experiment_name=another+name").await;
    assert_eq!((status, &body["experiment"]["experiment_id"]), (200, &json!(experiment_id("exp"))));
    assert_eq!(body["experiment"]["name"], "another name");
    fixture.get("experiments/get-by-name?experiment_name=another+name").await;
    assert_eq!(fixture.records().len(), 1, "the name is remembered once");
    assert_eq!(value(&fixture.run("train").await, "tags", "agentd.experiment"), &Value::Null);
    assert_eq!(fixture.get("experiments/get?experiment_id=7").await.0, 404);
    assert_eq!(fixture.post("experiments/delete", json!({})).await.0, 403);
}

#[tokio::test]
async fn test_artifacts_are_stored_listed_and_read_back() {
    let fixture = Fixture::new().await;
    let bytes = vec![7; 3 << 20];
    let (status, _) = fixture.exchange("PUT", &fixture.artifact("a%20b/big.bin"), "secret", &bytes).await;
    assert_eq!(status, 200);
    fixture.exchange("PUT", &fixture.artifact("top.txt"), "secret", b"one").await;
    fixture.exchange("PUT", &fixture.artifact("top.txt"), "secret", b"two").await;
    assert_eq!(
        fixture.exchange("GET", &fixture.artifact("top.txt"), "secret", b"").await,
        (200, b"two".to_vec())
    );
    assert_eq!(
        fixture.exchange("GET", &fixture.artifact("a%20b/big.bin"), "secret", b"").await,
        (200, bytes)
    );
    assert_eq!(fixture.exchange("GET", &fixture.artifact("a%20b"), "secret", b"").await.0, 404);

    let (_, listed) = fixture.get("artifacts/list?run_id=train&path=a%20b").await;
    assert_eq!(listed["files"], json!([{"path": "a b/big.bin", "is_dir": false, "file_size": 3 << 20}]));
    let (_, top) = fixture.get("artifacts/list?run_id=train").await;
    assert_eq!(top["files"].as_array().unwrap().len(), 2);
    assert_eq!(fixture.get("artifacts/list?run_id=train&path=nothing").await.1["files"], json!([]));
    let listing = format!("{BYTES}?path={}/train/artifacts/a%20b", experiment_id("exp"));
    let (_, body) = fixture.exchange("GET", &listing, "secret", b"").await;
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["files"][0]["path"], "big.bin");

    assert_eq!(fixture.exchange("DELETE", &fixture.artifact("top.txt"), "secret", b"").await.0, 200);
    assert_eq!(fixture.exchange("GET", &fixture.artifact("top.txt"), "secret", b"").await.0, 404);
}

#[tokio::test]
async fn test_artifacts_never_leave_their_folder() {
    let fixture = Fixture::new().await;
    let outside = fixture.dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret.txt"), "s").unwrap();
    let folder = fixture.dir.path().join("artifacts");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(&outside, folder.join("link")).unwrap();
    std::os::unix::fs::symlink(outside.join("secret.txt"), folder.join("file")).unwrap();
    for path in ["../outside/x", "%2e%2e/outside/x", "link/x", "a/../../outside/x"] {
        let (status, body) = fixture.exchange("PUT", &fixture.artifact(path), "secret", b"bad").await;
        assert_eq!(status, 400, "{path}: {}", String::from_utf8_lossy(&body));
    }
    for path in ["link/secret.txt", "file"] {
        assert_eq!(fixture.exchange("GET", &fixture.artifact(path), "secret", b"").await.0, 404, "{path}");
    }
    let left: Vec<_> = std::fs::read_dir(&outside).unwrap().collect();
    assert_eq!(left.len(), 1);
    assert_eq!(fixture.get("artifacts/list?run_id=train").await.1["files"], json!([]));

    // A link in the place of the file is replaced, not followed.
    assert_eq!(fixture.exchange("PUT", &fixture.artifact("file"), "secret", b"new").await.0, 200);
    assert_eq!(std::fs::read_to_string(outside.join("secret.txt")).unwrap(), "s");
}

#[tokio::test]
async fn test_upload_that_breaks_off_leaves_nothing() {
    let fixture = Fixture::new().await;
    let mut stream = TcpStream::connect(fixture.tracking.address).await.unwrap();
    let path = fixture.artifact("half.bin");
    let head = format!(
        "PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\nhalf"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let folder = fixture.dir.path().join("artifacts");
    let entries = |folder: &Path| std::fs::read_dir(folder).map_or(0, Iterator::count);
    until(|| entries(&folder) == 1).await;
    drop(stream);
    until(|| entries(&folder) == 0).await;
}

async fn until(mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "waited too long");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn test_strangers_and_unknown_calls_are_refused_with_words() {
    let fixture = Fixture::new().await;
    let get = format!("{API}/runs/get?run_id=train");
    assert_eq!(fixture.exchange("GET", &get, "wrong", b"").await.0, 401);
    for (method, path) in [("GET", "/api/2.0/mlflow/webhooks"), ("POST", "/"), ("GET", "/version")] {
        let (status, body) = fixture.exchange(method, path, "secret", b"").await;
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((status, &body["error_code"]), (404, &json!("ENDPOINT_NOT_FOUND")), "{path}");
    }
    let (status, body) = fixture.get("runs/get?run_id=another").await;
    assert_eq!((status, &body["error_code"]), (404, &json!("RESOURCE_DOES_NOT_EXIST")));
    assert_eq!(fixture.get("runs/get?run_id=train--").await.0, 404);
    assert_eq!(
        fixture.post("runs/log-metric", json!({"run_id": "train", "key": "x", "value": "much"})).await.0,
        400
    );
    assert_eq!(
        fixture.exchange("POST", &format!("{API}/runs/log-batch"), "secret", b"{nonsense").await.0,
        400
    );
    assert!(fixture.records().is_empty());
}

#[tokio::test]
async fn test_disk_that_fails_is_refused_without_asking_to_repeat() {
    let fixture = Fixture::new().await;
    std::fs::create_dir(fixture.file()).unwrap();
    let (status, body) =
        fixture.post("runs/log-metric", json!({"run_id": "train", "key": "x", "value": 1})).await;
    assert_eq!((status, &body["error_code"]), (400, &json!("INTERNAL_ERROR")));
}

#[tokio::test]
async fn test_concurrent_calls_each_leave_one_whole_line() {
    let fixture = Arc::new(Fixture::new().await);
    let mut callers = JoinSet::new();
    for caller in 0..4 {
        let fixture = fixture.clone();
        callers.spawn(async move {
            for step in 0..25 {
                let metric =
                    json!({"run_id": "train", "key": format!("m{caller}"), "value": step, "step": step});
                assert_eq!(fixture.post("runs/log-metric", metric).await.0, 200);
            }
        });
    }
    callers.join_all().await;
    assert_eq!(std::fs::read_to_string(fixture.file()).unwrap().lines().count(), 100);
    assert_eq!(fixture.records().len(), 100);
}

#[tokio::test]
async fn test_logged_model_is_remembered_with_its_files() {
    let mut fixture = Fixture::new().await;
    let create = json!({"name": "mine", "source_run_id": "train", "params": [{"key": "a", "value": "1"}]});
    let (_, body) = fixture.post("logged-models", create).await;
    let id = body["model"]["info"]["model_id"].as_str().unwrap().to_owned();
    let uri = body["model"]["info"]["artifact_uri"].as_str().unwrap().trim_start_matches("mlflow-artifacts:");
    let file = format!("{BYTES}{uri}/MLmodel");
    assert_eq!(fixture.exchange("PUT", &file, "secret", b"flavor").await.0, 200);
    let patch = |path: &str| format!("{API}/logged-models/{id}{path}");
    let ready = br#"{"status":"LOGGED_MODEL_READY"}"#;
    assert_eq!(fixture.exchange("PATCH", &patch(""), "secret", ready).await.0, 200);
    let tags = br#"{"tags":[{"key":"t","value":"v"}]}"#;
    assert_eq!(fixture.exchange("PATCH", &patch("/tags"), "secret", tags).await.0, 200);
    fixture.register();
    let (_, body) = fixture.get(&format!("logged-models/{id}")).await;
    assert_eq!(body["model"]["info"]["status"], "LOGGED_MODEL_READY");
    assert_eq!(body["model"]["info"]["tags"], json!([{"key": "t", "value": "v"}]));
    let (_, listed) = fixture.get(&format!("logged-models/{id}/artifacts/directories")).await;
    assert_eq!(listed["files"][0]["path"], "MLmodel");
    assert_eq!(
        fixture.post("logged-models/search", json!({})).await.1["models"].as_array().unwrap().len(),
        1
    );
    assert_eq!(fixture.get("logged-models/m-none").await.0, 404);
}

/// Makes a model for each pair of a name and its accuracy.
async fn logged_models(fixture: &Fixture, models: &[(&str, f64)]) -> Vec<String> {
    let mut ids = Vec::new();
    for (at, (name, accuracy)) in models.iter().enumerate() {
        let (_, body) = fixture.post("logged-models", json!({"name": name, "source_run_id": "train"})).await;
        let id = body["model"]["info"]["model_id"].as_str().unwrap().to_owned();
        let metric = json!({
            "run_id": "train", "key": "accuracy", "value": accuracy, "timestamp": 10 + at, "step": 0,
            "model_id": id, "dataset_name": "iris", "dataset_digest": "d",
        });
        assert_eq!(fixture.post("runs/log-metric", metric).await.0, 200);
        ids.push(id);
    }
    ids
}

#[tokio::test]
async fn test_models_are_found_by_what_was_measured_of_them_and_in_the_order_asked_for() {
    let fixture = Fixture::new().await;
    let ids = logged_models(&fixture, &[("a", 0.5), ("b", 0.9), ("a", 0.7)]).await;
    let found = async |search: Value| -> Vec<usize> {
        let (status, body) = fixture.post("logged-models/search", search).await;
        assert_eq!(status, 200, "{body}");
        let models = body["models"].as_array().unwrap().clone();
        models
            .iter()
            .map(|m| ids.iter().position(|id| m["info"]["model_id"] == id.as_str()).unwrap())
            .collect()
    };
    let best = json!([{"field_name": "metrics.accuracy", "ascending": false}]);
    assert_eq!(found(json!({})).await, [2, 1, 0], "the newest first");
    assert_eq!(found(json!({"order_by": best})).await, [1, 2, 0]);
    assert_eq!(found(json!({"order_by": best, "max_results": 1})).await, [1]);
    assert_eq!(found(json!({"filter": "name = 'a' AND metrics.accuracy > 0.6"})).await, [2]);
    assert_eq!(
        found(json!({"filter": "metrics.accuracy > 0.6", "datasets": [{"dataset_name": "iris"}]})).await,
        [2, 1]
    );
    assert_eq!(
        found(json!({"filter": "metrics.accuracy > 0.6", "datasets": [{"dataset_name": "x"}]})).await,
        [0; 0]
    );
    let (_, one) = fixture.get(&format!("logged-models/{}", ids[1])).await;
    assert_eq!(one["model"]["data"]["metrics"][0]["value"], 0.9);
    assert_eq!(fixture.post("logged-models/search", json!({"filter": "nonsense"})).await.0, 400);

    // Repeated with the model's id: it is recorded once.
    let again = json!({
        "run_id": "train",
        "metrics": [{"key": "accuracy", "value": 0.7, "timestamp": 12, "step": 0, "model_id": ids[0]}],
    });
    assert_eq!(fixture.post("runs/log-batch", again).await.0, 200);
    let (_, history) = fixture.get("metrics/get-history?run_id=train&metric_key=accuracy").await;
    assert_eq!(history["metrics"].as_array().unwrap().len(), 3);
    let delete = format!("{API}/logged-models/{}", ids[1]);
    assert_eq!(fixture.exchange("DELETE", &delete, "secret", b"").await.0, 200);
    assert_eq!(found(json!({"order_by": best})).await, [2, 0]);
    assert_eq!(fixture.get(&format!("logged-models/{}", ids[1])).await.0, 404);
    let (_, another) = fixture.post("logged-models", json!({"name": "c"})).await;
    assert!(ids.iter().all(|id| another["model"]["info"]["model_id"] != id.as_str()), "{another}");
}

#[tokio::test]
async fn test_registered_models_have_versions_aliases_and_stages() {
    let fixture = Fixture::new().await;
    let model = logged_models(&fixture, &[("net", 0.5)]).await.remove(0);
    assert_eq!(fixture.post("registered-models/create", json!({"name": "best net"})).await.0, 200);
    let (status, again) = fixture.post("registered-models/create", json!({"name": "best net"})).await;
    assert_eq!((status, &again["error_code"]), (400, &json!("RESOURCE_ALREADY_EXISTS")));
    for (source, number) in [(format!("models:/{model}"), "1"), ("mlflow-artifacts:/x".to_owned(), "2")] {
        let create = json!({"name": "best net", "source": source, "run_id": "train"});
        let (_, body) = fixture.post("model-versions/create", create).await;
        assert_eq!(
            (&body["model_version"]["version"], &body["model_version"]["status"]),
            (&json!(number), &json!("READY"))
        );
    }
    let (_, uri) = fixture.get("model-versions/get-download-uri?name=best+net&version=1").await;
    assert!(uri["artifact_uri"].as_str().unwrap().ends_with(&format!("models/{model}/artifacts")), "{uri}");

    let alias = json!({"name": "best net", "alias": "champion", "version": "1"});
    assert_eq!(fixture.post("registered-models/alias", alias).await.0, 200);
    let (_, named) = fixture.get("registered-models/alias?name=best+net&alias=champion").await;
    assert_eq!(
        (&named["model_version"]["version"], &named["model_version"]["aliases"]),
        (&json!("1"), &json!(["champion"]))
    );
    for version in ["1", "2"] {
        let stage = json!({"name": "best net", "version": version, "stage": "production", "archive_existing_versions": true});
        assert_eq!(fixture.post("model-versions/transition-stage", stage).await.0, 200);
    }
    let (_, latest) = fixture
        .post("registered-models/get-latest-versions", json!({"name": "best net", "stages": ["Production"]}))
        .await;
    assert_eq!(latest["model_versions"][0]["version"], "2");
    let (_, found) = fixture.get("model-versions/search?filter=name%3D%27best%20net%27").await;
    assert_eq!(found["model_versions"].as_array().unwrap().len(), 2);
    let (_, models) = fixture.get("registered-models/search?filter=name%20LIKE%20%27best%25%27").await;
    assert_eq!(models["registered_models"][0]["name"], "best net");
    let (status, missing) = fixture.get("registered-models/get?name=other").await;
    assert_eq!((status, &missing["error_code"]), (404, &json!("RESOURCE_DOES_NOT_EXIST")));
    let delete = format!("{API}/model-versions/delete");
    let body = br#"{"name": "best net", "version": "2"}"#;
    assert_eq!(fixture.exchange("DELETE", &delete, "secret", body).await.0, 200);
    assert_eq!(fixture.get("model-versions/get?name=best+net&version=2").await.0, 404);
}

#[tokio::test]
async fn test_traces_are_kept_and_found() {
    let fixture = Fixture::new().await;
    for (id, state) in [("tr-1", "OK"), ("tr-2", "ERROR")] {
        let info = json!({"trace_id": id, "state": state, "request_time": format!("2026-01-01T00:00:0{}Z", &id[3..])});
        let body = json!({"trace": {"trace_info": info}}).to_string();
        let (status, answer) =
            fixture.exchange("POST", "/api/3.0/mlflow/traces", "secret", body.as_bytes()).await;
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        let files =
            answer["trace"]["trace_info"]["tags"]["mlflow.artifactLocation"].as_str().unwrap_or_default();
        assert!(status == 200 && files.ends_with(&format!("traces/{id}/artifacts")), "{answer}");
        let file = format!("{BYTES}{}/traces.json", files.trim_start_matches("mlflow-artifacts:"));
        assert_eq!(fixture.exchange("PUT", &file, "secret", b"{}").await.0, 200);
    }
    for (search, expected) in
        [(json!({}), vec!["tr-2", "tr-1"]), (json!({"filter": "status = 'OK'"}), vec!["tr-1"])]
    {
        let (_, found) = fixture
            .exchange("POST", "/api/3.0/mlflow/traces/search", "secret", search.to_string().as_bytes())
            .await;
        let found: Value = serde_json::from_slice(&found).unwrap();
        let ids: Vec<_> =
            found["traces"].as_array().unwrap().iter().map(|trace| trace["trace_id"].clone()).collect();
        assert_eq!(ids, expected);
    }
    let bad = br#"{"trace": {"trace_info": {"trace_id": "../x"}}}"#;
    assert_eq!(fixture.exchange("POST", "/api/3.0/mlflow/traces", "secret", bad).await.0, 400);
}

#[tokio::test]
async fn test_inputs_and_models_of_a_run_are_told_and_empty_tags_are_tags() {
    let fixture = Fixture::new().await;
    let data = json!({"dataset": {"name": "iris", "digest": "d", "source_type": "local"}, "tags": []});
    assert_eq!(fixture.post("runs/log-inputs", json!({"run_id": "train", "datasets": [data]})).await.0, 200);
    let history = json!({"run_id": "train", "model_json": "{\"artifact_path\": \"m\", \"signature\": 1}"});
    assert_eq!(fixture.post("runs/log-model", history).await.0, 200);
    assert_eq!(
        fixture.post("runs/set-tag", json!({"run_id": "train", "key": "empty", "value": ""})).await.0,
        200
    );
    let run = fixture.run("train").await;
    assert_eq!(run["inputs"]["dataset_inputs"], json!([data]));
    assert_eq!(value(&run, "tags", "empty"), "");
    assert_eq!(value(&run, "tags", "mlflow.runName"), "train");
    assert_eq!(value(&run, "tags", "mlflow.log-model.history"), r#"[{"artifact_path":"m"}]"#);
}

#[test]
fn test_experiment_ids_are_stable_numbers() {
    assert_eq!(experiment_id("exp one"), "921214234208740972");
    assert!(experiment_id("").len() <= 18 && experiment_id("").bytes().all(|byte| byte.is_ascii_digit()));
}

/// A call over a connection that stays open; whether it was answered. The answer is short and sent in one piece.
async fn call_again(stream: &mut TcpStream, token: &str) -> bool {
    let head = head_with("GET", "experiments/search", token, "");
    let mut answer = vec![0; 64 << 10];
    let sent = stream.write_all(head.as_bytes()).await;
    sent.is_ok()
        && stream.read(&mut answer).await.is_ok_and(|length| answer[..length].starts_with(b"HTTP/1.1 200"))
}

fn head_with(method: &str, call: &str, token: &str, more: &str) -> String {
    format!("{method} {API}/{call} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n{more}\r\n")
}

#[tokio::test]
async fn test_no_number_of_connections_takes_the_last_one_of_a_job() {
    let fixture = Fixture::with(Connections::of_a_test()).await;
    let _other = fixture.answer_for("other", "other", fixture.dir.path().join("other.jsonl"));
    let mut kept = TcpStream::connect(fixture.tracking.address).await.unwrap();
    assert!(call_again(&mut kept, "secret").await);
    let body_to_come = head_with("POST", "runs/set-tag", "other", "Content-Length: 9\r\n");
    let mut held = Vec::new();
    for begun in ["", "GET / HTTP/1.1\r\n", &body_to_come, "GET / HTTP/1.1\r\n", &body_to_come] {
        for _ in 0..20 {
            let mut stream = TcpStream::connect(fixture.tracking.address).await.unwrap();
            stream.write_all(begun.as_bytes()).await.unwrap();
            held.push(stream);
        }
        let metric = json!({"run_id": "train", "key": "loss", "value": 1});
        assert_eq!(fixture.post("runs/log-metric", metric).await.0, 200, "a new connection, {begun:?}");
    }
    assert!(call_again(&mut kept, "secret").await, "the connection that was first");
    assert_eq!(fixture.records().len(), 5);
}

/// One job asks for more than it gets; others do not notice, and neither do the threads of the daemon.
#[test]
fn test_calls_of_one_job_keep_nobody_waiting() {
    const FLOOD: usize = 300;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(4)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let fixture = Arc::new(Fixture::new().await);
        let other = fixture.answer_for("other", "other", fixture.dir.path().join("other.jsonl"));
        let record = TrackingRecord::Metric { metric: "m".into(), value: 1.0, step: 1, time: None };
        let line = TrackingLine::from(record).to_line();
        std::fs::write(fixture.file(), line.repeat(60_000)).unwrap();
        let done = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let mut flood = JoinSet::new();
        for _ in 0..FLOOD {
            let (fixture, done) = (Arc::clone(&fixture), Arc::clone(&done));
            flood.spawn(async move {
                let path = format!("{API}/metrics/get-history?run_id=train&metric_key=absent");
                let (status, _) = fixture.exchange("GET", &path, "secret", b"").await;
                done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                status
            });
        }
        // All calls are waiting.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let body = json!({"run_id": "other", "key": "loss", "value": 1}).to_string();
        let path = format!("{API}/runs/log-metric");
        assert_eq!(fixture.exchange("POST", &path, "other", body.as_bytes()).await.0, 200);
        // Blocking threads of the daemon are free, too.
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        let answered = done.load(std::sync::atomic::Ordering::Relaxed);
        let statuses = flood.join_all().await;
        let late = statuses.iter().filter(|status| **status == 429).count();
        assert!(statuses.iter().all(|status| matches!(status, 200 | 429)), "{statuses:?}");
        assert!(late > 0 && answered < FLOOD - 20, "{late} told to come later, {answered} answered before");
        drop(other);
    });
}
