//! A metadata service that answers as the documents of Azure, AWS and GCP say, and says what a test tells it to.
//!
//! It is strict: a request without the header that the provider wants, by another method, through a proxy, or with a
//! token that is not good, gets the status that the provider documents, and is remembered.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Clock, SystemClock};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio::sync::watch;

use crate::client::runtime;

/// The name that the machine has at Azure.
const NAME: &str = "spot_7";

/// Which provider's service it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// Scheduled events, for a set of machines.
    Azure,
    /// Instance actions of spot instances, with IMDSv2 alone.
    Aws,
    /// `preempted`, which can be waited for.
    Gcp,
}

impl Provider {
    /// All of them.
    pub const ALL: [Provider; 3] = [Provider::Azure, Provider::Aws, Provider::Gcp];

    /// As the configuration of a node names it.
    pub fn name(self) -> &'static str {
        match self {
            Provider::Azure => "azure",
            Provider::Aws => "aws",
            Provider::Gcp => "gcp",
        }
    }
}

/// What it says.
#[derive(Debug, Clone, Default)]
struct Said {
    /// The machine goes: when, as wall time in milliseconds, and the number of the notice.
    notice: Option<(u64, u64)>,
    notices: u64,
    /// Grows with every change.
    version: u64,
    /// Good tokens.
    tokens: BTreeSet<String>,
    tokens_given: u64,
    /// Advice to move, which is no notice.
    advice: bool,
    /// Every answer is this status.
    broken: Option<u16>,
    asked: u64,
    refused: Vec<String>,
}

/// The service; it ends with the value.
#[derive(Debug)]
pub struct Metadata {
    address: SocketAddr,
    provider: Provider,
    said: Arc<watch::Sender<Said>>,
    server: tokio::task::JoinHandle<()>,
}

impl Metadata {
    /// One that has nothing to say yet.
    #[allow(clippy::disallowed_methods, reason = "ended with the value")]
    pub fn start(provider: Provider) -> Metadata {
        let said = Arc::new(watch::Sender::new(Said::default()));
        let listener = runtime().block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("a port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new().fallback(answer).with_state((provider, said.clone()));
        let server = runtime().spawn(async move {
            axum::serve(listener, router).await.expect("a server on loopback");
        });
        Metadata { address, provider, said, server }
    }

    /// The lines of a node's configuration with which it asks here.
    pub fn configuration(&self) -> String {
        format!("preemption: {}\npreemption_endpoint: http://{}\n", self.provider.name(), self.address)
    }

    /// The machine goes after this time; at GCP always after 30 seconds.
    pub fn preempt(&self, after: Duration) {
        let date = SystemClock.now().0 + after.as_millis() as u64;
        self.change(|said| {
            said.notices += 1;
            said.notice = Some((date, said.notices));
        });
    }

    /// It stays.
    pub fn withdraw(&self) {
        self.change(|said| said.notice = None);
    }

    /// It is advised to move what the machine does, which is no notice.
    pub fn advise(&self) {
        self.change(|said| said.advice = true);
    }

    /// No token that was given so far is good any more.
    pub fn expire_tokens(&self) {
        self.change(|said| said.tokens.clear());
    }

    /// Every answer is this status from now on, or with `None` what it should be.
    pub fn break_with(&self, status: Option<u16>) {
        self.change(|said| said.broken = status);
    }

    /// How often it was asked.
    pub fn asked(&self) -> u64 {
        self.said.borrow().asked
    }

    /// What it refused, and why.
    pub fn refused(&self) -> Vec<String> {
        self.said.borrow().refused.clone()
    }

    fn change(&self, change: impl FnOnce(&mut Said)) {
        self.said.send_modify(|said| {
            change(said);
            said.version += 1;
        });
    }
}

impl Drop for Metadata {
    fn drop(&mut self) {
        self.server.abort();
    }
}

type Shared = (Provider, Arc<watch::Sender<Said>>);

async fn answer(State((provider, said)): State<Shared>, request: Request) -> Response {
    said.send_if_modified(|said| {
        said.asked += 1;
        false
    });
    if let Some(status) = said.borrow().broken {
        return (StatusCode::from_u16(status).expect("a status"), "broken").into_response();
    }
    let (request, _) = request.into_parts();
    let what = format!("{} {}", request.method, request.uri);
    let answered = if header(&request, "X-Forwarded-For").is_empty() {
        match provider {
            Provider::Azure => azure(&said, &request),
            Provider::Aws => aws(&said, &request),
            Provider::Gcp => gcp(&said, &request).await,
        }
    } else {
        Err((StatusCode::FORBIDDEN, "it came through a proxy"))
    };
    answered.unwrap_or_else(|(status, why)| {
        said.send_if_modified(|said| {
            said.refused.push(format!("{what}: {why}"));
            false
        });
        (status, why).into_response()
    })
}

type Answered = Result<Response, (StatusCode, &'static str)>;

fn header<'a>(request: &'a Parts, name: &str) -> &'a str {
    request.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn parameter<'a>(request: &'a Parts, name: &str) -> Option<&'a str> {
    let pairs = request.uri.query().unwrap_or_default().split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

fn only_get(request: &Parts) -> Result<(), (StatusCode, &'static str)> {
    match request.method == Method::GET {
        true => Ok(()),
        false => Err((StatusCode::METHOD_NOT_ALLOWED, "only GET is answered")),
    }
}

fn azure(said: &watch::Sender<Said>, request: &Parts) -> Answered {
    if header(request, "Metadata") != "true" {
        return Err((StatusCode::BAD_REQUEST, "the header `Metadata: true` is required"));
    }
    only_get(request)?;
    let version = parameter(request, "api-version").ok_or((StatusCode::BAD_REQUEST, "no api-version"))?;
    match (request.uri.path(), version) {
        ("/metadata/instance/compute/name", "2021-02-01") if parameter(request, "format") == Some("text") => {
            Ok(NAME.into_response())
        }
        ("/metadata/scheduledevents", "2020-07-01") => {
            let said = said.borrow();
            // Other machines of the set, and other kinds of events, are in the document as well.
            let mut events = vec![
                azure_event("0F", "Freeze", NAME, &http_date(said.version)),
                azure_event("0P", "Preempt", "spot_8", "Mon, 19 Sep 2016 18:29:47 GMT"),
            ];
            events.extend(
                said.notice.map(|(date, number)| {
                    azure_event(&format!("{number}P"), "Preempt", NAME, &http_date(date))
                }),
            );
            let document = json!({ "DocumentIncarnation": said.version, "Events": events });
            Ok(([("content-type", "application/json")], document.to_string()).into_response())
        }
        _ => Err((StatusCode::NOT_FOUND, "there is nothing of that name and version")),
    }
}

fn azure_event(id: &str, kind: &str, machine: &str, date: &str) -> serde_json::Value {
    json!({
        "EventId": id,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "EventStatus": "Scheduled",
        "NotBefore": date,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    })
}

fn aws(said: &watch::Sender<Said>, request: &Parts) -> Answered {
    let path = request.uri.path();
    if path == "/latest/api/token" {
        if request.method != Method::PUT {
            return Err((StatusCode::METHOD_NOT_ALLOWED, "a token is asked for by PUT"));
        }
        let life = header(request, "X-aws-ec2-metadata-token-ttl-seconds").parse::<u32>();
        if !life.is_ok_and(|life| (1..=21_600).contains(&life)) {
            return Err((StatusCode::BAD_REQUEST, "the life of a token is from 1 to 21600 seconds"));
        }
        let mut token = String::new();
        said.send_if_modified(|said| {
            said.tokens_given += 1;
            token = format!("AQAEA-{}==", said.tokens_given);
            said.tokens.insert(token.clone());
            false
        });
        return Ok(token.into_response());
    }
    only_get(request)?;
    let said = said.borrow();
    if !said.tokens.contains(header(request, "X-aws-ec2-metadata-token")) {
        // It asks for another one; that is no mistake of whoever had a good one before.
        return match header(request, "X-aws-ec2-metadata-token") {
            "" => Err((StatusCode::UNAUTHORIZED, "there is no token")),
            _ => Ok(StatusCode::UNAUTHORIZED.into_response()),
        };
    }
    match path {
        "/latest/meta-data/spot/instance-action" => Ok(match said.notice {
            None => StatusCode::NOT_FOUND.into_response(),
            Some((date, _)) => {
                let time = agent_model::Timestamp(date).rfc3339();
                json!({ "action": "terminate", "time": time }).to_string().into_response()
            }
        }),
        "/latest/meta-data/events/recommendations/rebalance" => Ok(match said.advice {
            false => StatusCode::NOT_FOUND.into_response(),
            true => json!({ "noticeTime": "2026-01-01T08:22:00Z" }).to_string().into_response(),
        }),
        _ => Err((StatusCode::NOT_FOUND, "there is nothing of that name")),
    }
}

async fn gcp(said: &watch::Sender<Said>, request: &Parts) -> Answered {
    if header(request, "Metadata-Flavor") != "Google" {
        return Err((StatusCode::FORBIDDEN, "the header `Metadata-Flavor: Google` is required"));
    }
    only_get(request)?;
    if request.uri.path() != "/computeMetadata/v1/instance/preempted" {
        return Err((StatusCode::NOT_FOUND, "there is nothing of that name"));
    }
    let mut changes = said.subscribe();
    let etag = |said: &Said| format!("{:016x}", said.notices * 2 + u64::from(said.notice.is_some()));
    if parameter(request, "wait_for_change") == Some("true") {
        let known = parameter(request, "last_etag").unwrap_or_default().to_owned();
        let within = parameter(request, "timeout_sec").and_then(|seconds| seconds.parse().ok()).unwrap_or(60);
        let other = changes.wait_for(|said| etag(said) != known);
        let _ = tokio::time::timeout(Duration::from_secs(within), other).await; // it answers anyway
    }
    let said = said.borrow();
    let value = if said.notice.is_some() { "TRUE" } else { "FALSE" };
    let headers = [("Metadata-Flavor", "Google".to_owned()), ("ETag", etag(&said))];
    Ok((headers, value).into_response())
}

/// `Mon, 19 Sep 2016 18:29:47 GMT`
fn http_date(millis: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let text = agent_model::Timestamp(millis).utc();
    let day = DAYS[usize::try_from(millis / 86_400_000 % 7).unwrap_or(0)];
    let month = MONTHS[text[5..7].parse::<usize>().map_or(0, |month| month - 1)];
    format!("{day}, {} {month} {} {} GMT", &text[8..10], &text[..4], &text[11..19])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_dates_are_those_of_http() {
        assert_eq!(http_date(1_474_309_787_000), "Mon, 19 Sep 2016 18:29:47 GMT");
        assert_eq!(http_date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
    }
}
