//! Requests and answers in the format of MLflow's REST protocol.

use std::time::Duration;

use agent_model::Timestamp;
use agent_model::tracking::OWN;
use axum::Json;
use axum::extract::{FromRequest, Query, Request};
use axum::http::header::{CONNECTION, RETRY_AFTER};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::book::{Data, Point, RUN};

/// The largest body of a call that is not an artifact, in bytes; clients keep below 1 MiB.
const MAX_BODY: usize = 8 << 20;

/// How long such a body may take to arrive.
const BODY_WITHIN: Duration = Duration::from_secs(30);

/// The tag with the name of a run.
pub(super) const RUN_NAME: &str = "mlflow.runName";
/// Documents of a run: the data sets it read, the models it read, those it made.
pub(super) const INPUT: &str = "input";
pub(super) const MODEL_INPUT: &str = "model-input";
pub(super) const OUTPUT: &str = "output";

/// The result of a call.
pub(super) type Answer = Result<Json<Value>, Refusal>;

/// Why a call is refused. Never a status on which clients retry, because the script would hang for minutes; except
/// for [`Refusal::busy`], when it makes too many calls at once.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl Refusal {
    pub(super) fn invalid(message: impl Into<String>) -> Refusal {
        Refusal { status: StatusCode::BAD_REQUEST, code: "INVALID_PARAMETER_VALUE", message: message.into() }
    }

    pub(super) fn missing(message: impl Into<String>) -> Refusal {
        Refusal { status: StatusCode::NOT_FOUND, code: "RESOURCE_DOES_NOT_EXIST", message: message.into() }
    }

    /// An entity of that name exists already.
    pub(super) fn exists(message: impl Into<String>) -> Refusal {
        Refusal { status: StatusCode::BAD_REQUEST, code: "RESOURCE_ALREADY_EXISTS", message: message.into() }
    }

    pub(super) fn denied(message: impl Into<String>) -> Refusal {
        Refusal { status: StatusCode::FORBIDDEN, code: "PERMISSION_DENIED", message: message.into() }
    }

    pub(super) fn stranger() -> Refusal {
        let message = "the token of this request belongs to no job that runs here".to_owned();
        Refusal { status: StatusCode::UNAUTHORIZED, code: "UNAUTHENTICATED", message }
    }

    pub(super) fn busy() -> Refusal {
        let message = "the job makes more calls at once than are answered: come again".to_owned();
        Refusal { status: StatusCode::TOO_MANY_REQUESTS, code: "REQUEST_LIMIT_EXCEEDED", message }
    }

    pub(super) fn unknown_call() -> Refusal {
        let message = "the tracking endpoint of a job does not offer this call".to_owned();
        Refusal { status: StatusCode::NOT_FOUND, code: "ENDPOINT_NOT_FOUND", message }
    }

    /// The disk failed: a fault of the node, but clients should not retry.
    pub(super) fn disk(what: &str, error: &std::io::Error) -> Refusal {
        tracing::warn!(what, %error, "failed tracking call");
        let message = format!("{what}: {error}");
        Refusal { status: StatusCode::BAD_REQUEST, code: "INTERNAL_ERROR", message }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json!({ "error_code": self.code, "message": self.message });
        let later = (self.status == StatusCode::TOO_MANY_REQUESTS).then_some([(RETRY_AFTER, "1")]);
        // A client without a valid token must not keep the connection.
        let close = (self.status == StatusCode::UNAUTHORIZED).then_some([(CONNECTION, "close")]);
        (self.status, later, close, Json(body)).into_response()
    }
}

/// The arguments of a call: the query of a GET, else a JSON body, whatever its content type.
pub(super) struct Asked<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Asked<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        if request.method() == Method::GET {
            let Query(asked) =
                Query::try_from_uri(request.uri()).map_err(|e| Refusal::invalid(e.body_text()))?;
            return Ok(Asked(asked));
        }
        let body = timeout(BODY_WITHIN, axum::body::to_bytes(request.into_body(), MAX_BODY)).await;
        let body = body.map_err(|_| Refusal::invalid("the body did not come in time"))?;
        let body = body.map_err(|_| Refusal::invalid(format!("a body may have {MAX_BODY} bytes")))?;
        let body: &[u8] = if body.is_empty() { b"{}" } else { &body };
        serde_json::from_slice(body).map(Asked).map_err(|e| Refusal::invalid(e.to_string()))
    }
}

/// An integer; in the JSON form of protocol buffers it may be a string.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Integer(pub(super) i64);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        match Value::deserialize(from)? {
            Value::Null => Ok(Integer(0)),
            Value::String(text) => text.parse().map(Integer).map_err(D::Error::custom),
            #[allow(clippy::cast_possible_truncation, reason = "a whole number written with a point")]
            Value::Number(number) => number
                .as_i64()
                .or_else(|| number.as_f64().filter(|value| value.fract() == 0.0).map(|value| value as i64))
                .map(Integer)
                .ok_or_else(|| D::Error::custom(format!("{number} is not an integer"))),
            other => Err(D::Error::custom(format!("{other} is not an integer"))),
        }
    }
}

/// A number, or one of the strings `NaN`, `Infinity`, `-Infinity`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Float(pub(super) f64);

impl<'de> Deserialize<'de> for Float {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        match Value::deserialize(from)? {
            Value::String(text) => text.parse().map(Float).map_err(D::Error::custom),
            Value::Number(number) => Ok(Float(number.as_f64().unwrap_or(f64::NAN))),
            other => Err(D::Error::custom(format!("{other} is not a number"))),
        }
    }
}

/// A metric as clients send it.
#[derive(Deserialize)]
pub(super) struct Metric {
    pub(super) key: String,
    pub(super) value: Float,
    #[serde(default)]
    pub(super) timestamp: Integer,
    #[serde(default)]
    pub(super) step: Integer,
    /// The model that was measured, and the data set used for that.
    #[serde(default)]
    pub(super) model_id: String,
    #[serde(default)]
    pub(super) dataset_name: String,
    #[serde(default)]
    pub(super) dataset_digest: String,
}

/// A key and a text; the same shape for parameters and tags.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pair {
    pub(super) key: String,
    pub(super) value: String,
}

/// A time from a client, in milliseconds; `None` if it is not positive.
pub(super) fn moment(at: Integer) -> Option<Timestamp> {
    u64::try_from(at.0).ok().filter(|at| *at > 0).map(Timestamp)
}

/// A number as the JSON form of protocol buffers writes it.
pub(super) fn number(value: f64) -> Value {
    match value {
        value if value.is_finite() => json!(value),
        value if value.is_nan() => json!("NaN"),
        value if value > 0.0 => json!("Infinity"),
        _ => json!("-Infinity"),
    }
}

pub(super) fn point(key: &str, point: &Point) -> Value {
    json!({ "key": key, "value": number(point.value), "timestamp": point.time.0, "step": point.step })
}

pub(super) fn pairs<'a>(pairs: impl Iterator<Item = (&'a String, &'a String)>) -> Vec<Value> {
    pairs.map(|(key, value)| json!({ "key": key, "value": value })).collect()
}

/// What identifies a run in an answer.
pub(super) struct Identity<'a> {
    pub(super) run_id: &'a str,
    pub(super) experiment_id: &'a str,
    pub(super) artifact_uri: &'a str,
    pub(super) started: Timestamp,
}

/// A whole run. The endpoint's own tags are not shown.
pub(super) fn run(identity: &Identity<'_>, data: &Data) -> Value {
    let metrics: Vec<Value> = data.metrics.iter().map(|(key, at)| point(key, at)).collect();
    let info = info(identity, data);
    let mut tags = pairs(data.tags.iter().filter(|(key, _)| !key.starts_with(OWN)));
    if data.tag(RUN_NAME).is_none() {
        tags.push(json!({ "key": RUN_NAME, "value": info["run_name"] }));
    }
    json!({
        "info": info,
        "data": { "metrics": metrics, "params": pairs(data.params.iter()), "tags": tags },
        "inputs": {
            "dataset_inputs": data.documents(INPUT).collect::<Vec<Value>>(),
            "model_inputs": data.documents(MODEL_INPUT).collect::<Vec<Value>>(),
        },
        "outputs": { "model_outputs": data.documents(OUTPUT).collect::<Vec<Value>>() },
    })
}

pub(super) fn info(identity: &Identity<'_>, data: &Data) -> Value {
    let name = data.tag(RUN_NAME).or(data.tag(RUN)).unwrap_or(identity.run_id);
    let started = data.tag("agentd.started").and_then(|at| at.parse().ok()).unwrap_or(identity.started.0);
    let mut info = json!({
        "run_id": identity.run_id,
        "run_uuid": identity.run_id,
        "experiment_id": identity.experiment_id,
        "user_id": data.tag("mlflow.user").unwrap_or_default(),
        "run_name": name,
        "status": data.tag("agentd.status").unwrap_or("RUNNING"),
        "start_time": started,
        "artifact_uri": identity.artifact_uri,
        "lifecycle_stage": data.tag("agentd.lifecycle").unwrap_or("active"),
    });
    if let Some(ended) = data.tag("agentd.ended").and_then(|at| at.parse::<u64>().ok()) {
        info["end_time"] = json!(ended);
    }
    info
}
