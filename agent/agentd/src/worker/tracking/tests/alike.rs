//! Where a real MLflow server counts, shortens, refuses or forgets, so does the endpoint.

use super::*;

async fn refused(fixture: &Fixture, call: &str, body: Value) -> String {
    let (status, answer) = fixture.post(call, body).await;
    assert_eq!(status, 400, "{call}: {answer}");
    answer["message"].as_str().unwrap_or_default().to_owned()
}

async fn taken(fixture: &Fixture, call: &str, body: Value) -> Value {
    let (status, answer) = fixture.post(call, body).await;
    assert_eq!(status, 200, "{call}: {answer}");
    answer
}

#[tokio::test]
async fn test_texts_are_counted_in_characters_and_long_values_are_shortened() {
    let fixture = Fixture::new().await;
    let whole = "提".repeat(6000);
    let long = format!("{whole}示");
    for (key, value) in [("whole", &whole), ("long", &long), ("long", &long)] {
        taken(&fixture, "runs/log-parameter", json!({"run_id": "train", "key": key, "value": value})).await;
    }
    taken(&fixture, "runs/set-tag", json!({"run_id": "train", "key": "note", "value": "é".repeat(9000)}))
        .await;
    let run = fixture.run("train").await;
    assert_eq!(value(&run, "params", "whole"), whole.as_str());
    assert_eq!(value(&run, "params", "long"), whole.as_str(), "and the same again is the same");
    assert_eq!(value(&run, "tags", "note"), "é".repeat(8000).as_str());
    let name = |length| json!({"run_id": "train", "key": "ü".repeat(length), "value": "x"});
    taken(&fixture, "runs/set-tag", name(250)).await;
    assert!(refused(&fixture, "runs/set-tag", name(251)).await.contains("250 characters"));
}

#[tokio::test]
async fn test_names_that_are_no_paths_and_times_before_all_are_refused() {
    let fixture = Fixture::new().await;
    for name in ["", ".", "..", "../a", "/a", "a//b", "a/../b", "a/"] {
        let metric = json!({"run_id": "train", "key": name, "value": 1.0, "timestamp": 1});
        assert!(refused(&fixture, "runs/log-metric", metric).await.contains("cannot be the name"), "{name}");
        let pair = json!({"run_id": "train", "key": name, "value": "x"});
        refused(&fixture, "runs/log-parameter", pair.clone()).await;
        refused(&fixture, "runs/set-tag", pair).await;
    }
    let metric =
        |time: i64| json!({"run_id": "train", "key": "a/b", "value": 1.0, "timestamp": time, "step": 1});
    assert!(refused(&fixture, "runs/log-metric", metric(-5)).await.contains("timestamp -5"));
    for _ in 0..3 {
        taken(&fixture, "runs/log-metric", metric(7)).await;
    }
    let (_, history) = fixture.get("metrics/get-history?run_id=train&metric_key=a/b").await;
    assert_eq!(history["metrics"].as_array().map(Vec::len), Some(1), "the same point is one point");
    for (name, expected) in [("a/b", 400), ("a:b", 400), ("", 400), ("a b", 200)] {
        assert_eq!(
            fixture.post("registered-models/create", json!({"name": name})).await.0,
            expected,
            "{name}"
        );
    }
    refused(&fixture, "runs/search", json!({"page_token": "garbage"})).await;
}

#[tokio::test]
async fn test_a_deleted_run_takes_nothing_and_a_deleted_version_keeps_its_number() {
    let fixture = Fixture::new().await;
    let made = taken(&fixture, "runs/create", json!({"run_name": "kid"})).await;
    let kid = made["run"]["info"]["run_id"].clone();
    let metric = json!({"run_id": kid, "key": "a", "value": 1.0, "timestamp": 1});
    taken(&fixture, "runs/delete", json!({"run_id": kid})).await;
    assert!(refused(&fixture, "runs/log-metric", metric.clone()).await.contains("'active' state"));
    taken(&fixture, "runs/restore", json!({"run_id": kid})).await;
    taken(&fixture, "runs/log-metric", metric).await;

    taken(&fixture, "registered-models/create", json!({"name": "m"})).await;
    let version = json!({"name": "m", "source": "s"});
    for expected in ["1", "2"] {
        let made = taken(&fixture, "model-versions/create", version.clone()).await;
        assert_eq!(made["model_version"]["version"], expected);
    }
    let gone = json!({"name": "m", "version": "2"}).to_string();
    let delete = format!("{API}/model-versions/delete");
    assert_eq!(fixture.exchange("DELETE", &delete, "secret", gone.as_bytes()).await.0, 200);
    let made = taken(&fixture, "model-versions/create", version).await;
    assert_eq!(made["model_version"]["version"], "3");
}

#[tokio::test]
async fn test_a_data_set_keeps_each_of_its_contexts_and_presence_can_be_asked_for() {
    let fixture = Fixture::new().await;
    for context in ["train", "eval"] {
        let tags = json!([{"key": "mlflow.data.context", "value": context}]);
        let data = json!({"dataset": {"name": "iris", "digest": "d"}, "tags": tags});
        taken(&fixture, "runs/log-inputs", json!({"run_id": "train", "datasets": [data]})).await;
    }
    taken(&fixture, "runs/set-tag", json!({"run_id": "train", "key": "g", "value": "1"})).await;
    for (filter, expected) in [
        ("dataset.context = 'eval'", 1),
        ("dataset.context = 'train'", 1),
        ("tags.g IS NOT NULL", 1),
        ("tags.g is null", 0),
        ("params.none IS NULL and tags.g = '1'", 1),
    ] {
        let found = taken(&fixture, "runs/search", json!({"filter": filter})).await;
        assert_eq!(found["runs"].as_array().map(Vec::len), Some(expected), "{filter}");
    }
    let experiments = |filter: &str| json!({"filter": filter});
    for (filter, expected) in [("name LIKE 'ex%'", 1), ("name = 'other'", 0), ("", 1)] {
        let found = taken(&fixture, "experiments/search", experiments(filter)).await;
        assert_eq!(found["experiments"].as_array().map(Vec::len), Some(expected), "{filter}");
    }
}

#[tokio::test]
async fn test_traces_are_found_by_run_and_name_tagged_assessed_and_deleted() {
    let fixture = Fixture::new().await;
    let call = async |method: &str, path: &str, body: Value| {
        let path = format!("/api/3.0/mlflow/traces{path}");
        let (status, answer) = fixture.exchange(method, &path, "secret", body.to_string().as_bytes()).await;
        assert_eq!(status, 200, "{method} {path}: {}", String::from_utf8_lossy(&answer));
        serde_json::from_slice::<Value>(&answer).unwrap()
    };
    for number in 1..4 {
        let info = json!({
            "trace_id": format!("tr-{number}"),
            "request_time": format!("2026-01-01T00:00:0{number}.5Z"),
            "trace_metadata": {"mlflow.sourceRun": if number < 3 { "train" } else { "other" }},
            "tags": {"mlflow.traceName": format!("root{number}")},
        });
        call("POST", "", json!({"trace": {"trace_info": info}})).await;
    }
    let found = async |filter: &str| {
        let found = call("POST", "/search", json!({"filter": filter})).await;
        let traces = found["traces"].as_array().unwrap().iter();
        traces.map(|trace| trace["trace_id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(found("attribute.run_id = 'train'").await, ["tr-2", "tr-1"]);
    assert_eq!(found("trace.name = 'root3'").await, ["tr-3"]);
    let old = "/api/2.0/mlflow/traces/tr-1/tags";
    let tag = json!({"key": "team", "value": "vision"}).to_string();
    assert_eq!(fixture.exchange("PATCH", old, "secret", tag.as_bytes()).await.0, 200);
    assert_eq!(found("tags.team = 'vision'").await, ["tr-1"]);
    assert_eq!(fixture.exchange("DELETE", old, "secret", br#"{"key": "team"}"#).await.0, 200);
    assert_eq!(found("tags.team = 'vision'").await, Vec::<String>::new());

    let feedback = json!({"assessment": {"assessment_name": "good", "feedback": {"value": true}}});
    let made = call("POST", "/tr-1/assessments", feedback.clone()).await["assessment"].clone();
    let path = format!("/tr-1/assessments/{}", made["assessment_id"].as_str().unwrap());
    assert_eq!(call("GET", &path, json!({})).await["assessment"], made);
    let changed = json!({"assessment": {"feedback": {"value": false}}});
    assert_eq!(call("PATCH", &path, changed).await["assessment"]["feedback"]["value"], false);
    call("DELETE", &path, json!({})).await;
    let trace = call("GET", "/tr-1", json!({})).await;
    assert_eq!(trace["trace"]["trace_info"]["assessments"], json!([]));

    let deleted = call("POST", "/delete-traces", json!({"request_ids": ["tr-2"]})).await;
    assert_eq!(deleted["traces_deleted"], 1);
    let until = json!({"max_timestamp_millis": 1_767_225_601_999_u64}); // within the second of the first
    assert_eq!(call("POST", "/delete-traces", until).await["traces_deleted"], 1);
    assert_eq!(found("").await, ["tr-3"]);
}
