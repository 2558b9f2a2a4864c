//! The network: one client for every request.
//!
//! Owns routes to mirrors, retries, credentials and the diagnosis of errors. Hides HTTP: other modules ask for an
//! address and, when a step failed, for the [`Net::blame`].
//!
//! Invariants: the client is made at the first request, because reading the system's certificates takes longer than
//! many builds; credentials are added below all other layers, so that no address that is recorded or reported
//! contains any; offline, no request leaves this process.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use agent_env::{Build, Failure, FailureKind};
use agent_model::causes;
use parking_lot::Mutex;
use rattler_networking::authentication_storage::backends::file::FileStorage;
use rattler_networking::{AuthenticationMiddleware, AuthenticationStorage, LazyClient, OfflineMiddleware};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::redirect::{Action, Attempt, Policy};
use reqwest::{Request, Response, StatusCode};
use reqwest_middleware::{ClientBuilder, Middleware, Next};
use url::Url;

use super::routes::Routes;
use super::{Advise, Done, failed};

/// How many rounds of requests are made in all.
pub(crate) const ROUNDS: u32 = 4;

/// The longest time that a server can delay a request.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The most redirects of a request.
const MOST_REDIRECTS: usize = 10;

/// What is wrong with an answer, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("{host} answered {status} for {}", plainly(path))]
    Status { status: u16, host: String, path: String, known: bool },
    #[error("{host} answered with a web page instead of {}", plainly(path))]
    WebPage { host: String, path: String },
    #[error("{host} redirects requests for {} in a circle", plainly(path))]
    Circle { host: String, path: String },
    #[error("{host} stopped sending {}", plainly(path))]
    Stalled { host: String, path: String },
    #[error("cannot fetch {} from {host}: {why}", plainly(path))]
    Broken { host: String, path: String, why: String },
}

/// A file under the name that users know: channels have more files than users have heard of.
fn plainly(path: &str) -> String {
    match path.rsplit_once('/') {
        Some((dir, file)) if file.starts_with("repodata") => format!("the list of packages in {dir}"),
        _ => path.to_owned(),
    }
}

/// The client and the faults it met.
pub(crate) struct Net {
    /// For the libraries; it is made at its first use.
    pub(crate) client: LazyClient,
    /// The mirrors.
    pub(crate) routes: Arc<Routes>,
    notes: Arc<Notes>,
    storage: AuthenticationStorage,
    offline: bool,
}

#[derive(Default)]
struct Notes {
    worst: Mutex<Option<Fault>>,
    secrets: Mutex<Vec<String>>,
}

impl Net {
    /// The network of a build.
    pub(crate) fn of(build: &Build) -> Done<Self> {
        let notes = Arc::new(Notes::default());
        let routes = Arc::new(Routes::to(&build.channels));
        let storage = credentials(build, &notes)?;
        let offline = build.offline;
        let kept_storage = storage.clone();
        let (stall, kept, ways) = (Duration::from_secs(build.stall_s.max(1)), notes.clone(), routes.clone());
        let client = LazyClient::new(move || {
            let builder = ClientBuilder::new(plain(stall));
            if offline {
                return builder.with(OfflineMiddleware).build();
            }
            let courier = Courier { routes: ways, notes: kept, storage: storage.clone() };
            builder.with(courier).with(AuthenticationMiddleware::from_auth_storage(storage)).build()
        });
        Ok(Self { client, routes, notes, storage: kept_storage, offline })
    }

    /// The fault of an answer with an error status.
    pub(crate) fn of_status(&self, url: &Url, status: StatusCode) -> Fault {
        of_status(&self.storage, url, status)
    }

    /// The fault of a request without an answer.
    pub(crate) fn fault(&self, url: &Url, error: &reqwest_middleware::Error) -> Fault {
        match error {
            reqwest_middleware::Error::Reqwest(error) => of_error(url, error),
            reqwest_middleware::Error::Middleware(error) => match error.downcast_ref::<Fault>() {
                Some(fault) => fault.clone(),
                None => Fault::Broken { host: host(url), path: url.path().into(), why: error.to_string() },
            },
        }
    }

    /// The failure of the gravest fault so far, if there was one; the fault is then forgotten.
    pub(crate) fn blame(&self) -> Option<Failure> {
        if self.offline {
            return None;
        }
        self.notes.worst.lock().take().map(|fault| self.explain(&fault))
    }

    /// The failure that a fault leads to.
    pub(crate) fn explain(&self, fault: &Fault) -> Failure {
        let message = self.scrub(&fault.to_string());
        match fault {
            Fault::Status { status: 401 | 403 | 407, host, known, .. } => {
                let hint = if *known {
                    format!("The credentials that the node has for {host} are not accepted: renew them in the file that `conda_credentials` names.")
                } else {
                    format!("Put credentials for {host} into the file that `conda_credentials` names in the node's configuration.")
                };
                failed(FailureKind::Denied, message).advise(hint)
            }
            Fault::WebPage { host, .. } => failed(FailureKind::Denied, message).advise(format!(
                "That is mostly a login page or a wrong address: check the channel, and the credentials for {host}."
            )),
            Fault::Status { status: 404 | 410, .. } => failed(FailureKind::NotFound, message)
                .advise("The server does not have it: check the address, or ask whoever keeps the channel."),
            Fault::Circle { .. } => failed(FailureKind::Network, message).advise("Check the address of the channel."),
            Fault::Broken { why, .. } if why.to_lowercase().contains("certificate") => {
                failed(FailureKind::Network, message).advise(
                    "This machine does not trust the server: install the certificate of its authority (or the package \
                     ca-certificates), and check the clock.",
                )
            }
            _ => failed(FailureKind::Network, message),
        }
    }

    /// The text without secrets.
    pub(crate) fn scrub(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for secret in self.notes.secrets.lock().iter() {
            text = text.replace(secret.as_str(), "***");
        }
        scrub_urls(&text)
    }
}

/// The text without credentials in addresses: neither `//user:password@` nor `/t/token/`.
pub(crate) fn scrub_urls(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        out.push_str(before);
        let end = after.find(|c: char| c == '/' || c.is_whitespace() || c == '"').unwrap_or(after.len());
        let host = &after[..end];
        out.push_str(host.rsplit_once('@').map_or(host, |(_, host)| host));
        rest = &after[end..];
        if let Some(token) = rest.strip_prefix("/t/") {
            let end = token.find(|c: char| c == '/' || c.is_whitespace() || c == '"').unwrap_or(token.len());
            out.push_str("/t/***");
            rest = &token[end..];
        }
    }
    out.push_str(rest);
    out
}

fn credentials(build: &Build, notes: &Notes) -> Done<AuthenticationStorage> {
    let mut storage = AuthenticationStorage::empty();
    let Some(path) = &build.credentials else { return Ok(storage) };
    let refused = |why: String| {
        failed(FailureKind::Denied, format!("the credentials file {} cannot be used: {why}", path.display()))
            .advise(
                "It is a JSON object of host names, each with `BearerToken`, `CondaToken` or `BasicHTTP`.",
            )
    };
    let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    // The error itself is left out: it may quote the file.
    let value: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| refused(format!("no JSON at line {}", error.line())))?;
    let file = FileStorage::from_path(path.clone()).map_err(|_| refused("it has another form".into()))?;
    storage.add_backend(Arc::new(file));
    collect_secrets(&value, &mut notes.secrets.lock());
    Ok(storage)
}

/// Every string of a credentials file except user names, which also occur in ordinary text.
fn collect_secrets(value: &serde_json::Value, secrets: &mut Vec<String>) {
    match value {
        serde_json::Value::String(text) if text.len() > 3 => secrets.push(text.clone()),
        serde_json::Value::Object(map) => {
            map.iter()
                .filter(|(key, _)| key.as_str() != "username")
                .for_each(|(_, v)| collect_secrets(v, secrets));
        }
        _ => {}
    }
}

pub(crate) fn plain(stall: Duration) -> reqwest::Client {
    // It fails if another caller has installed one already, which does as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = || {
        reqwest::Client::builder()
            .user_agent(concat!("agent-env/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(Duration::from_secs(15))
            .read_timeout(stall)
            .dns_resolver(Arc::new(Names))
            .redirect(Policy::custom(redirect))
    };
    // Without the system's certificates, plain addresses still work, and the others report what is wrong.
    builder().build().or_else(|_| builder().tls_certs_only([]).build()).unwrap_or_default()
}

/// The metadata services of clouds, which give the identity of the machine to everybody who asks. What is fetched for a
/// job is not fetched from there, because the job itself may not reach them.
pub(crate) fn is_metadata(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => {
            address.is_unicast_link_local() || address == Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)
        }
    }
}

/// Whether the host of an address is such a service by its number.
pub(crate) fn names_metadata(url: &Url) -> bool {
    match url.host() {
        Some(url::Host::Ipv4(address)) => is_metadata(address.into()),
        Some(url::Host::Ipv6(address)) => is_metadata(address.into()),
        Some(url::Host::Domain(_)) | None => false,
    }
}

/// Finds the numbers of hosts, except those of metadata services.
struct Names;

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let found: Vec<SocketAddr> = found.filter(|found| !is_metadata(found.ip())).collect();
            match found.is_empty() {
                true => Err(std::io::Error::other("it has no address that may be asked").into()),
                false => Ok(Box::new(found.into_iter()) as Addrs),
            }
        })
    }
}

fn redirect(attempt: Attempt<'_>) -> Action {
    match attempt.previous().len() > MOST_REDIRECTS || names_metadata(attempt.url()) {
        true => attempt.error("it is redirected too often, or to where nothing may be fetched"),
        false => attempt.follow(),
    }
}

impl Notes {
    fn note(&self, fault: Fault) {
        let weight = |fault: &Fault| match fault {
            Fault::Status { status: 401 | 403 | 407, .. } => 4,
            Fault::WebPage { .. } => 3,
            Fault::Circle { .. } => 2,
            _ => 1,
        };
        let mut worst = self.worst.lock();
        if worst.as_ref().is_none_or(|known| weight(&fault) >= weight(known)) {
            *worst = Some(fault);
        }
    }
}

/// Sends requests to the mirrors of a channel, more than once if needed.
struct Courier {
    routes: Arc<Routes>,
    notes: Arc<Notes>,
    storage: AuthenticationStorage,
}

/// What to do about an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the answer.
    Take,
    /// It is the answer unless another mirror has a better one.
    Elsewhere,
    /// Ask again after this time.
    Again(Duration),
}

#[async_trait::async_trait]
impl Middleware for Courier {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut http::Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let mut best: Option<(Url, reqwest_middleware::Result<Response>)> = None;
        for round in 0..ROUNDS {
            let (mut pause, mut definite) = (Duration::MAX, false);
            for url in self.routes.of(request.url()) {
                let Some(mut attempt) = request.try_clone() else {
                    return next.run(request, extensions).await;
                };
                *attempt.url_mut() = url.clone();
                let outcome =
                    next.clone().run(attempt, extensions).await.and_then(|answer| no_page(&url, answer));
                match judge(&outcome, round) {
                    Verdict::Take => return outcome,
                    Verdict::Elsewhere => definite = true,
                    Verdict::Again(wait) => {
                        self.routes.shun(&url);
                        pause = pause.min(wait);
                    }
                }
                if best.as_ref().is_none_or(|(_, known)| telling(&outcome) > telling(known)) {
                    best = Some((url, outcome));
                }
            }
            // If one mirror has a final answer, mirrors without one are not waited for.
            if definite || round + 1 == ROUNDS {
                break;
            }
            tokio::time::sleep(pause.min(LONGEST_WAIT)).await;
        }
        let Some((url, outcome)) = best else { return next.run(request, extensions).await };
        if let Some(fault) = self.fault(&url, &outcome) {
            self.notes.note(fault);
        }
        outcome
    }
}

impl Courier {
    /// The fault to note. A missing file is none: libraries ask for some files that many servers lack.
    fn fault(&self, url: &Url, outcome: &reqwest_middleware::Result<Response>) -> Option<Fault> {
        match outcome {
            Ok(answer) if answer.status() == StatusCode::NOT_FOUND => None,
            Ok(answer) => Some(of_status(&self.storage, url, answer.status())),
            Err(reqwest_middleware::Error::Reqwest(error)) => Some(of_error(url, error)),
            Err(reqwest_middleware::Error::Middleware(error)) => error.downcast_ref::<Fault>().cloned(),
        }
    }
}

fn of_status(storage: &AuthenticationStorage, url: &Url, status: StatusCode) -> Fault {
    let known = storage.get_by_url_with_host(url.clone()).is_ok_and(|(_, found)| found.is_some());
    Fault::Status { status: status.as_u16(), host: host(url), path: url.path().into(), known }
}

/// The fault that an error of the client means.
pub(crate) fn of_error(url: &Url, error: &reqwest::Error) -> Fault {
    let (host, path) = (host(url), url.path().to_owned());
    if let Some(status) = error.status() {
        return Fault::Status { status: status.as_u16(), host, path, known: false };
    }
    if error.is_redirect() {
        return Fault::Circle { host, path };
    }
    if error.is_timeout() && !error.is_connect() {
        return Fault::Stalled { host, path };
    }
    let why = causes(error).last().map_or_else(|| error.to_string(), ToString::to_string);
    Fault::Broken { host, path, why }
}

/// The name of the server for people.
pub(crate) fn host(url: &Url) -> String {
    match (url.host_str(), url.port()) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        (Some(host), None) => host.to_owned(),
        (None, _) => "this machine".to_owned(),
    }
}

/// Turns a web page, which is never what was requested, into an error.
fn no_page(url: &Url, answer: Response) -> reqwest_middleware::Result<Response> {
    let page = answer
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .is_some_and(|kind| kind.trim_start().to_ascii_lowercase().starts_with("text/html"));
    if page && answer.status().is_success() {
        let fault = Fault::WebPage { host: host(url), path: url.path().into() };
        return Err(reqwest_middleware::Error::middleware(fault));
    }
    Ok(answer)
}

fn judge(outcome: &reqwest_middleware::Result<Response>, round: u32) -> Verdict {
    let backoff = Duration::from_millis(300 << round.min(8));
    match outcome {
        Ok(answer) => {
            let asked = answer.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()?.trim().parse().ok());
            judge_status(answer.status(), asked.map(Duration::from_secs), backoff)
        }
        Err(reqwest_middleware::Error::Reqwest(error)) if error.is_redirect() => Verdict::Elsewhere,
        Err(reqwest_middleware::Error::Reqwest(_)) => Verdict::Again(backoff),
        Err(reqwest_middleware::Error::Middleware(_)) => Verdict::Elsewhere,
    }
}

/// How informative an answer is. "Not found" is an answer, because libraries ask for files that need not exist; any
/// other trouble of a mirror is not.
fn telling(outcome: &reqwest_middleware::Result<Response>) -> u8 {
    match outcome {
        Ok(answer) if matches!(answer.status().as_u16(), 404 | 410) => 4,
        Ok(answer) if matches!(answer.status().as_u16(), 401 | 403 | 407) => 3,
        Ok(_) | Err(reqwest_middleware::Error::Middleware(_)) => 2,
        Err(reqwest_middleware::Error::Reqwest(_)) => 1,
    }
}

pub(crate) fn judge_status(status: StatusCode, asked: Option<Duration>, backoff: Duration) -> Verdict {
    match status.as_u16() {
        // Some servers answer 501 to a kind of request that they do not know.
        501 => Verdict::Elsewhere,
        408 | 425 | 429 | 500..=599 => Verdict::Again(asked.unwrap_or(backoff).min(LONGEST_WAIT)),
        400..=499 => Verdict::Elsewhere,
        _ => Verdict::Take,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_no_address_keeps_credentials() {
        for (text, scrubbed) in [
            ("see https://u:p@h.example/c and done", "see https://h.example/c and done"),
            ("https://h.example/t/tok-1/c/noarch", "https://h.example/t/***/c/noarch"),
            ("\"https://u:p@h.example/t/x\" a@b", "\"https://h.example/t/***\" a@b"),
            ("nothing", "nothing"),
            ("file:///a/b", "file:///a/b"),
        ] {
            assert_eq!(scrub_urls(text), scrubbed);
        }
    }

    #[test]
    fn test_which_answers_are_asked_for_again() {
        let backoff = Duration::from_millis(300);
        let judge = |status: u16, asked| judge_status(StatusCode::from_u16(status).unwrap(), asked, backoff);
        assert_eq!(judge(200, None), Verdict::Take);
        assert_eq!(judge(304, None), Verdict::Take);
        for again in [429, 500, 502, 503, 504] {
            assert_eq!(judge(again, None), Verdict::Again(backoff), "{again}");
        }
        assert_eq!(judge(429, Some(Duration::from_secs(2))), Verdict::Again(Duration::from_secs(2)));
        assert_eq!(judge(503, Some(Duration::from_secs(9000))), Verdict::Again(LONGEST_WAIT));
        for elsewhere in [401, 403, 404, 501] {
            assert_eq!(judge(elsewhere, None), Verdict::Elsewhere, "{elsewhere}");
        }
    }

    #[test]
    fn test_secrets_are_all_texts_but_user_names() {
        let value = serde_json::json!({"h": {"BasicHTTP": {"username": "some", "password": "hidden"}}, "g": {"BearerToken": "tok-tok"}});
        let mut secrets = Vec::new();
        collect_secrets(&value, &mut secrets);
        secrets.sort();
        assert_eq!(secrets, ["hidden", "tok-tok"]);
    }
}
