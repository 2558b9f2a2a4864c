//! What the metadata services of Azure, AWS and GCP say about the end of this machine.
//!
//! Owns their addresses, headers, tokens and documents, as the providers describe them (August 2025): Azure
//! *Scheduled Events* 2020-07-01, AWS *Spot instance interruption notices* with IMDSv2, GCP *preempted* of the
//! metadata server. Everything they say is data that may be wrong: what is not understood is an error, and no notice.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use agent_model::Timestamp;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::{Rfc2822, Rfc3339};
use tracing::info;

use super::http::{self, Answer, AskError};
use crate::config::{PreemptionSettings, Provider};

/// How long a service may take to answer. Azure's takes up to two minutes for the first call of a machine.
const WITHIN: Duration = Duration::from_secs(10);
const FIRST_OF_AZURE: Duration = Duration::from_secs(130);

/// How often Azure and AWS are asked; GCP answers when something changes.
const AZURE_EVERY: Duration = Duration::from_secs(1);
const AWS_EVERY: Duration = Duration::from_secs(5);
const GCP_EVERY: Duration = Duration::from_millis(500);

/// How long GCP holds an answer back, and how long a machine has there after the notice.
const GCP_HOLDS: Duration = Duration::from_secs(60);
const GCP_LEAVES: Duration = Duration::from_secs(30);

/// How long AWS is asked to accept a token.
const TOKEN_SECONDS: &str = "21600";

/// The machine will be taken away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProviderEvent {
    /// The provider's name of it: of the same event always the same.
    pub(super) id: String,
    pub(super) when: When,
    /// For people.
    pub(super) reason: String,
}

/// When that will be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// On this date.
    At(Timestamp),
    /// So long after now.
    In(Duration),
}

/// Why it is unknown what a service says.
#[derive(Debug, thiserror::Error)]
pub(super) enum LookError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error("the service answered with status {0}")]
    Status(StatusCode),
    #[error("the service answered with something else than its documentation says: {0}")]
    Odd(String),
    #[error("the service is none of {0}: its answer lacks the header by which that is known")]
    Stranger(&'static str),
}

/// The service of this machine, and what is remembered between two questions.
pub(super) struct MetadataService {
    endpoint: (String, u16),
    kind: Vendor,
}

enum Vendor {
    Azure { name: Option<String> },
    Aws { token: Option<String>, advised: bool },
    Gcp { etag: Option<String> },
}

impl fmt::Debug for MetadataService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Vendor::Azure { .. } => "azure",
            Vendor::Aws { .. } => "aws",
            Vendor::Gcp { .. } => "gcp",
        };
        write!(f, "{kind} at {}:{}", self.endpoint.0, self.endpoint.1)
    }
}

impl MetadataService {
    /// The service that the settings name, or that of the provider whose firmware this machine has; `None` where there
    /// is none. Asks nothing over the network.
    pub(super) fn find(settings: &PreemptionSettings) -> Option<MetadataService> {
        let dmi = |file: &str| {
            let path = Path::new("/sys/class/dmi/id").join(file);
            std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
        };
        let kind = match settings.provider.unwrap_or_else(|| provider_of(dmi))? {
            Provider::Azure => Vendor::Azure { name: None },
            Provider::Aws => Vendor::Aws { token: None, advised: false },
            Provider::Gcp => Vendor::Gcp { etag: None },
        };
        Some(MetadataService { endpoint: settings.endpoint.clone(), kind })
    }

    /// How long to wait before the next question.
    pub(super) fn pause(&self) -> Duration {
        match &self.kind {
            Vendor::Azure { .. } => AZURE_EVERY,
            Vendor::Aws { .. } => AWS_EVERY,
            Vendor::Gcp { .. } => GCP_EVERY,
        }
    }

    /// What the service says now.
    pub(super) async fn look(&mut self) -> Result<Option<ProviderEvent>, LookError> {
        let endpoint = &self.endpoint;
        match &mut self.kind {
            Vendor::Azure { name } => look_azure(endpoint, name).await,
            Vendor::Aws { token, advised } => look_aws(endpoint, token, advised).await,
            Vendor::Gcp { etag } => look_gcp(endpoint, etag).await,
        }
    }
}

/// The provider of the machine with this firmware.
fn provider_of(dmi: impl Fn(&str) -> String) -> Option<Provider> {
    /// What Azure writes into the asset tag of every chassis. Other machines of Microsoft's hypervisor have none.
    const AZURE: &str = "7783-7084-3265-9085-8269-3286-77";
    if dmi("chassis_asset_tag") == AZURE {
        return Some(Provider::Azure);
    }
    let of_xen = || dmi("bios_version").to_ascii_lowercase().contains("amazon");
    if dmi("sys_vendor") == "Amazon EC2" || of_xen() {
        return Some(Provider::Aws);
    }
    (dmi("product_name") == "Google Compute Engine").then_some(Provider::Gcp)
}

/// The answer, if it is one.
fn found(answer: Answer) -> Result<Answer, LookError> {
    if answer.status.is_success() { Ok(answer) } else { Err(LookError::Status(answer.status)) }
}

fn odd(answer: &Answer) -> LookError {
    LookError::Odd(answer.text().chars().take(200).collect())
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzureDocument {
    #[serde(default)]
    events: Vec<AzureEvent>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzureEvent {
    event_id: String,
    event_type: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    not_before: String,
    #[serde(default)]
    description: String,
}

async fn look_azure(
    endpoint: &(String, u16),
    name: &mut Option<String>,
) -> Result<Option<ProviderEvent>, LookError> {
    const HEADERS: &[(&str, &str)] = &[("Metadata", "true")];
    const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
    const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
    let (own, within) = match name {
        Some(name) => (name.clone(), WITHIN),
        None => {
            let answer = found(http::ask(endpoint, Method::GET, NAME, HEADERS, WITHIN).await?)?;
            (answer.text(), FIRST_OF_AZURE)
        }
    };
    let answer = found(http::ask(endpoint, Method::GET, EVENTS, HEADERS, within).await?)?;
    *name = Some(own.clone());
    let document: AzureDocument = serde_json::from_slice(&answer.body).map_err(|_| odd(&answer))?;
    // One document is for all machines of a set.
    let ours = |event: &&AzureEvent| event.resources.iter().any(|name| name.eq_ignore_ascii_case(&own));
    let events = document.events.iter().filter(ours).map(azure_event);
    let events: Vec<ProviderEvent> =
        events.collect::<Option<Vec<_>>>().ok_or_else(|| odd(&answer))?.into_iter().flatten().collect();
    Ok(events.into_iter().min_by_key(|event| match event.when {
        When::At(date) => date,
        When::In(_) => Timestamp::default(),
    }))
}

/// One event: `Some(None)` if it does not take the machine away, `None` if it is not understood.
fn azure_event(event: &AzureEvent) -> Option<Option<ProviderEvent>> {
    let what = match event.event_type.as_str() {
        "Preempt" => "Azure takes the spot machine back",
        "Terminate" => "Azure deletes the machine",
        _ => return Some(None),
    };
    let when = match event.not_before.trim() {
        "" => When::In(Duration::ZERO), // it has begun
        date => When::At(timestamp(OffsetDateTime::parse(date, &Rfc2822).ok()?)?),
    };
    let reason = match event.description.trim() {
        "" => what.to_owned(),
        described => format!("{what} ({})", described.chars().take(100).collect::<String>()),
    };
    Some(Some(ProviderEvent { id: event.event_id.clone(), when, reason }))
}

fn timestamp(date: OffsetDateTime) -> Option<Timestamp> {
    u64::try_from(date.unix_timestamp()).ok().map(|seconds| Timestamp(seconds * 1000))
}

#[derive(Debug, Deserialize)]
struct AwsAction {
    action: String,
    time: String,
}

async fn look_aws(
    endpoint: &(String, u16),
    token: &mut Option<String>,
    advised: &mut bool,
) -> Result<Option<ProviderEvent>, LookError> {
    const ACTION: &str = "/latest/meta-data/spot/instance-action";
    const ADVICE: &str = "/latest/meta-data/events/recommendations/rebalance";
    let Some(answer) = ask_aws(endpoint, token, ACTION).await? else {
        // It only says that an interruption has become likelier.
        if !*advised && ask_aws(endpoint, token, ADVICE).await?.is_some() {
            *advised = true;
            info!("AWS advises to move what this spot instance does: an interruption has become likelier");
        }
        return Ok(None);
    };
    let action: AwsAction = serde_json::from_slice(&answer.body).map_err(|_| odd(&answer))?;
    let what = match action.action.as_str() {
        "terminate" => "terminates",
        "stop" => "stops",
        "hibernate" => "hibernates",
        _ => return Err(odd(&answer)),
    };
    let date = OffsetDateTime::parse(&action.time, &Rfc3339).ok().and_then(timestamp);
    let when = When::At(date.ok_or_else(|| odd(&answer))?);
    let id = format!("{} {}", action.action, action.time);
    Ok(Some(ProviderEvent { id, when, reason: format!("AWS {what} the spot instance") }))
}

/// The answer to a question about spot instances; `None` where there is nothing to say, which is status 404.
async fn ask_aws(
    endpoint: &(String, u16),
    token: &mut Option<String>,
    path: &str,
) -> Result<Option<Answer>, LookError> {
    let mut fresh = false;
    loop {
        let known = match token {
            Some(known) => known.clone(),
            None => {
                let asks = [("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_SECONDS)];
                let given = http::ask(endpoint, Method::PUT, "/latest/api/token", &asks, WITHIN).await?;
                fresh = true;
                token.insert(found(given)?.text()).clone()
            }
        };
        let shows = [("X-aws-ec2-metadata-token", known.as_str())];
        let answer = http::ask(endpoint, Method::GET, path, &shows, WITHIN).await?;
        match answer.status {
            StatusCode::NOT_FOUND => return Ok(None),
            StatusCode::UNAUTHORIZED if !fresh => *token = None, // it was good for long enough
            _ => return found(answer).map(Some),
        }
    }
}

async fn look_gcp(
    endpoint: &(String, u16),
    etag: &mut Option<String>,
) -> Result<Option<ProviderEvent>, LookError> {
    const HEADERS: &[(&str, &str)] = &[("Metadata-Flavor", "Google")];
    const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";
    let holds = GCP_HOLDS.as_secs();
    let path = match etag {
        None => PREEMPTED.to_owned(),
        Some(etag) => format!("{PREEMPTED}?wait_for_change=true&timeout_sec={holds}&last_etag={etag}"),
    };
    let answer = found(http::ask(endpoint, Method::GET, &path, HEADERS, GCP_HOLDS + WITHIN).await?)?;
    if answer.header("Metadata-Flavor") != "Google" {
        return Err(LookError::Stranger("Google's"));
    }
    let plain = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric());
    *etag = Some(answer.header("ETag").to_owned()).filter(|etag| plain(etag));
    match answer.text().as_str() {
        "TRUE" => {
            let reason = "GCP takes the machine back".to_owned();
            Ok(Some(ProviderEvent { id: "preempted".to_owned(), when: When::In(GCP_LEAVES), reason }))
        }
        "FALSE" => Ok(None),
        _ => Err(odd(&answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_firmware_names_the_provider() {
        let machine = |pairs: &'static [(&str, &str)]| {
            provider_of(move |file| {
                let known = pairs.iter().find(|(name, _)| *name == file);
                known.map(|(_, text)| (*text).to_owned()).unwrap_or_default()
            })
        };
        let azure = &[("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77")];
        assert_eq!(machine(azure), Some(Provider::Azure));
        assert_eq!(machine(&[("sys_vendor", "Microsoft Corporation")]), None, "a Hyper-V of one's own");
        assert_eq!(machine(&[("sys_vendor", "Amazon EC2")]), Some(Provider::Aws));
        assert_eq!(machine(&[("bios_version", "4.11.amazon")]), Some(Provider::Aws));
        assert_eq!(machine(&[("product_name", "Google Compute Engine")]), Some(Provider::Gcp));
        assert_eq!(machine(&[("sys_vendor", "Dell Inc."), ("product_name", "PowerEdge")]), None);
    }

    #[test]
    fn test_events_of_azure() {
        let event = |text: &str| azure_event(&serde_json::from_str(text).unwrap());
        let preempt = event(
            r#"{"EventId": "A1", "EventType": "Preempt", "Resources": ["vm"], "EventStatus": "Scheduled",
                "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT", "Description": "", "EventSource": "Platform"}"#,
        );
        let preempt = preempt.unwrap().unwrap();
        assert_eq!((preempt.id.as_str(), preempt.when), ("A1", When::At(Timestamp(1_474_309_787_000))));
        let begun =
            event(r#"{"EventId": "A2", "EventType": "Terminate", "NotBefore": ""}"#).unwrap().unwrap();
        assert_eq!(begun.when, When::In(Duration::ZERO));
        assert_eq!(event(r#"{"EventId": "A3", "EventType": "Freeze", "NotBefore": "soon"}"#), Some(None));
        assert_eq!(event(r#"{"EventId": "A4", "EventType": "Preempt", "NotBefore": "soon"}"#), None);
    }
}
