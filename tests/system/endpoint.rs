//! Every call of the tracking endpoint, by everybody whom it is not for, and with what nobody sends.
//!
//! The calls are read from the router, so one that is added is tried here without a word.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use agent_tests::chance::Chance;
use agent_tests::{Host, SOON, eventually, resident, root};
use serde_json::{Value, json};

/// Records something of each kind, says how it is reached, and waits.
const PREY: &str = r#"
import json, os, pathlib, sys, time, urllib.request
word = sys.argv[1]
uri, run, experiment = (os.environ["MLFLOW_" + name] for name in ("TRACKING_URI", "RUN_ID", "EXPERIMENT_ID"))
def call(method, path, body):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"], "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(uri + path, body, head, method=method)).read()
    return json.loads(answer or b"{}")
api = "/api/2.0/mlflow/"
call("POST", api + "runs/set-tag", {"run_id": run, "key": "k", "value": word})
call("POST", api + "runs/log-metric", {"run_id": run, "key": word, "value": 0.5, "timestamp": 1, "step": 0})
call("POST", api + "registered-models/create", {"name": "prey", "description": word})
model = call("POST", api + "logged-models", {"experiment_id": experiment, "name": "net", "source_run_id": run,
             "params": [{"key": "k", "value": word}]})["model"]["info"]["model_id"]
call("PUT", f"/api/2.0/mlflow-artifacts/artifacts/{experiment}/{run}/artifacts/prey.txt", word.encode())
print(json.dumps({"uri": uri, "run": run, "experiment": experiment, "model": model,
                  "token": os.environ["MLFLOW_TRACKING_TOKEN"]}), flush=True)
time.sleep(600)
"#;

/// What the prey records.
const WORD: &str = "hidden-word";

/// How a job reaches the endpoint.
struct Run {
    address: String,
    named: BTreeMap<String, String>,
}

impl Run {
    fn of(host: &Host, name: &str, word: &str) -> Run {
        let dir = host.project(name, &[("t.py", PREY)]);
        let job =
            host.ctl(&["submit", dir.to_str().unwrap(), "--", "python", "-u", "t.py", word]).ok().stdout;
        let line = eventually("it has recorded", SOON, || {
            let log = host.ctl(&["logs", job.trim()]).stdout;
            log.lines().find(|line| line.starts_with('{')).map(str::to_owned)
        });
        let named: BTreeMap<String, String> = serde_json::from_str(&line).unwrap();
        Run { address: named["uri"].strip_prefix("http://").unwrap().to_owned(), named }
    }

    fn token(&self) -> Option<&str> {
        Some(&self.named["token"])
    }

    /// What it recorded, as it is told.
    fn told(&self) -> Vec<String> {
        let (run, experiment, model) = (&self.named["run"], &self.named["experiment"], &self.named["model"]);
        let paths = [
            format!("/api/2.0/mlflow/runs/get?run_id={run}"),
            "/api/2.0/mlflow/registered-models/get?name=prey".to_owned(),
            format!("/api/2.0/mlflow/logged-models/{model}"),
            format!("/api/2.0/mlflow-artifacts/artifacts/{experiment}/{run}/artifacts/prey.txt"),
        ];
        let told = paths.iter().map(|path| self.ask("GET", path, b"", self.token()).1);
        let told: Vec<String> =
            told.map(|told| told.split("\r\n\r\n").nth(1).unwrap_or("").to_owned()).collect();
        assert!(told.iter().all(|told| told.contains(WORD)), "{told:?}");
        told
    }

    /// A request with this token; the status, 0 where the connection ended without one, and what was answered.
    fn ask(&self, method: &str, path: &str, body: &[u8], token: Option<&str>) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let shown = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\n{shown}Content-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        // It may be refused before all of it is sent.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        (status, answer)
    }
}

/// The calls of the router: method and path.
fn calls() -> Vec<(&'static str, String)> {
    let source = fs::read_to_string(root().join("agent/agentd/src/worker/tracking.rs")).unwrap();
    let source = &source[source.find("fn router(").unwrap()..];
    let mut calls = Vec::new();
    for block in source.split("    let ").skip(1) {
        let name = block.split(' ').next().unwrap();
        let nested = source.lines().find(|line| line.trim_end().ends_with(&format!(", {name})")));
        let Some(prefix) = nested.and_then(|line| line.split('"').nth(1)) else { continue };
        for route in block.split(".route(").skip(1) {
            let path = route.split('"').nth(1).unwrap();
            for (method, word) in [
                ("GET", "get("),
                ("POST", "post("),
                ("PUT", "put("),
                ("PATCH", "patch("),
                ("DELETE", "delete("),
            ] {
                let handlers = &route[path.len() + 2..];
                if handlers.contains(&format!(" {word}")) || handlers.contains(&format!(").{word}")) {
                    calls.push((method, format!("{prefix}{}", path.trim_end_matches('/'))));
                }
            }
        }
    }
    calls
}

/// A call about everything that a run has: its path, and all fields that name something.
fn about(run: &Run, path: &str) -> (String, Value) {
    let (id, experiment, model) = (&run.named["run"], &run.named["experiment"], &run.named["model"]);
    let file = format!("{experiment}/{id}/artifacts/prey.txt");
    let path = path.replace("{id}", model).replace("{tag}", "k").replace("{*address}", &file);
    let query = format!(
        "run_id={id}&run_uuid={id}&experiment_id={experiment}&experiment_ids={experiment}&name=prey&version=1&\
         metric_key={WORD}&path=.&alias=a&key=k&request_id={model}"
    );
    let body = json!({
        "run_id": id, "run_uuid": id, "experiment_id": experiment, "experiment_ids": [experiment], "name": "prey",
        "new_name": "taken", "version": "1", "key": "k", "value": "v", "timestamp": 1, "step": 1, "alias": "a",
        "metrics": [{"key": WORD, "value": 1.0, "timestamp": 1, "step": 0}], "status": "FAILED", "source": file,
        "model_id": model, "models": [{"model_id": model}], "tags": [{"key": "k", "value": "v"}], "description": "taken",
        "params": [{"key": "k", "value": "v"}], "source_run_id": id, "stage": "Archived", "datasets": [],
        "trace": {"trace_info": {"trace_id": model, "trace_location": {"type": "MLFLOW_EXPERIMENT",
        "mlflow_experiment": {"experiment_id": experiment}}}}, "locations": []
    });
    (format!("{path}?{query}"), body)
}

#[test]
fn test_the_tracking_endpoint_serves_a_job_and_nobody_else() {
    let host = Host::started();
    let (prey, hunter) = (Run::of(&host, "prey", WORD), Run::of(&host, "hunter", "own"));
    let calls = calls();
    assert!(calls.len() >= 60, "{calls:?}");
    let (before, memory) = (prey.told(), resident(host.pid()));
    let mut chance = Chance::new(1);
    let mut tried = 0;
    for (method, path) in &calls {
        let (address, body) = about(&prey, path);
        let body = body.to_string();
        for token in [None, Some(""), Some("none"), Some(&hunter.named["token"][1..])] {
            let (status, answer) = prey.ask(method, &address, body.as_bytes(), token);
            assert_eq!(status, 401, "{method} {path} by a stranger: {answer}");
            tried += 1;
        }
        let (status, answer) = prey.ask(method, &address, body.as_bytes(), hunter.token());
        assert!(!answer.contains(WORD), "{method} {path} of another job's: {answer}");
        assert!((200..500).contains(&status), "{method} {path} of another job's: {answer}");
        tried += 1;
        let (address, body) = about(&hunter, path);
        for _ in 0..20 {
            let odd = odd(&body, &mut chance);
            let (status, answer) = hunter.ask(method, &address, &odd, hunter.token());
            let shown = String::from_utf8_lossy(&odd[..odd.len().min(300)]).into_owned();
            assert!((200..500).contains(&status), "{method} {address}: {status} {answer}\n{shown}");
            tried += 1;
        }
    }
    println!("{tried} requests for {} calls", calls.len());
    assert_eq!(prey.told(), before, "nothing of it was changed");
    let grown = resident(host.pid()).saturating_sub(memory);
    assert!(grown < 256 << 20, "the daemon took {grown} bytes more");
    host.ctl(&["status"]).ok();
}

/// A body that is not what the call expects: another value somewhere, or no JSON at all.
fn odd(body: &Value, chance: &mut Chance) -> Vec<u8> {
    let values = [
        json!(null),
        json!(-1),
        json!(1e308),
        json!(u64::MAX),
        json!(""),
        json!("\u{0}"),
        json!("../../../etc/passwd"),
        json!("x".repeat(100_000)),
        json!([]),
        json!({}),
        json!([[[[{"a": null}]]]]),
        json!(true),
        json!("🙂\u{202e}\r\n"),
    ];
    let mut body = body.clone();
    let fields = body.as_object_mut().unwrap();
    let names: Vec<String> = fields.keys().cloned().collect();
    for _ in 0..=chance.below(4) {
        fields.insert(chance.pick(&names).clone(), chance.pick(&values).clone());
    }
    let mut text = body.to_string().into_bytes();
    match chance.below(6) {
        0 => text.truncate(usize::try_from(chance.below(text.len() as u64)).unwrap()),
        1 => text = b"[".repeat(50_000),
        2 => text.push(0xff),
        _ => {}
    }
    text
}
