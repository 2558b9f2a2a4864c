//! Where data comes from: a web server, or a store of objects.
//!
//! Owns what there is at an address ([`DataSource::look`]) and how it is read from a given byte on ([`DataSource::read`]). Hides
//! HTTP and the stores' own protocols.
//!
//! Invariants: no error names a credential; a part that is read later belongs to the same version of the file.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_env::{Failure, FailureKind, Fetch};
use agent_model::causes;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path as Location;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreScheme};
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED, RANGE,
    RETRY_AFTER,
};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use url::Url;

use super::super::net::{self, Verdict};
use super::super::{Advise, Done, failed};

/// The name of a file that was named itself: the caller gives it its own.
const ONE_FILE: &str = "file";

/// One file at the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    /// Its path below the address.
    pub(super) name: String,
    /// Its path at the source.
    pub(super) place: String,
    /// Its length, if announced.
    pub(super) size: Option<u64>,
    /// What changes with its content, if there is something.
    pub(super) tag: Option<String>,
}

/// Why an answer is none.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It may pass; the server may say after which time.
    Passing(Failure, Option<Duration>),
    /// It will not.
    Lasting(Failure),
}

/// The parts of a file.
pub(super) type Pieces = BoxStream<'static, Result<Bytes, Trouble>>;

/// Where data comes from.
pub(super) enum DataSource {
    Web { client: Client, url: Url },
    Store { store: Box<dyn ObjectStore>, root: Location, host: String },
}

impl DataSource {
    pub(super) fn open(fetch: &Fetch, stall: Duration) -> Done<DataSource> {
        let url = address(&fetch.url)?;
        // Also makes the cryptography of the whole process known.
        let client = net::plain(stall);
        let is_store = !matches!(url.scheme(), "http" | "https") || !fetch.options.0.is_empty();
        if !is_store {
            return Ok(DataSource::Web { client, url });
        }
        let OpenedStore { store, root, host } = open_store(&url, fetch.options.0.clone(), None)?;
        Ok(DataSource::Store { store, root, host })
    }

    /// The files at the address, in the order of their names; at least one.
    pub(super) async fn look(&self, is_file: bool) -> Result<Vec<Object>, Trouble> {
        match self {
            DataSource::Web { client, url } if is_file => Ok(vec![look_at(client, url).await?]),
            DataSource::Web { url, .. } => Err(Trouble::Lasting(
                failed(FailureKind::Spec, format!("a web server does not list the folder {}", shown(url)))
                    .advise(
                        "Name one file (`type: uri_file`), or give the address of a store that can list.",
                    ),
            )),
            DataSource::Store { store, root, host } if is_file => {
                let options = GetOptions { head: true, ..GetOptions::default() };
                let found =
                    store.get_opts(root, options).await.map_err(|error| of_store(host, root, &error))?;
                let tag = tag_of(&found.meta);
                Ok(vec![Object {
                    name: ONE_FILE.to_owned(),
                    place: root.to_string(),
                    size: Some(found.meta.size),
                    tag,
                }])
            }
            DataSource::Store { store, root, host } => list(store.as_ref(), root, host).await,
        }
    }

    /// The content of a file, at best from the byte `from` on; and from which byte on it really is.
    pub(super) async fn read(&self, object: &Object, from: u64) -> Result<(u64, Pieces), Trouble> {
        match self {
            DataSource::Web { client, url } => read_web(client, url, object, from).await,
            DataSource::Store { store, host, .. } => {
                // Parsed, not converted: a conversion would escape what is unusual in a name once more.
                let location = Location::parse(&object.place).map_err(|error| {
                    Trouble::Lasting(failed(
                        FailureKind::Refused,
                        format!("`{}` is no name: {error}", object.place),
                    ))
                })?;
                let range = (from > 0).then_some(GetRange::Offset(from));
                let if_match = object.tag.clone().filter(|tag| tag.starts_with('"'));
                let options = GetOptions { range, if_match, ..GetOptions::default() };
                let found = store.get_opts(&location, options).await;
                let found = found.map_err(|error| of_store(host, &location, &error))?;
                let (start, host) = (found.range.start, host.clone());
                let pieces = found.into_stream().map_err(move |error| of_store(&host, &location, &error));
                Ok((start, pieces.boxed()))
            }
        }
    }
}

/// A store of objects, the place in it that an address names, and its name for people.
pub(super) struct OpenedStore {
    pub(super) store: Box<dyn ObjectStore>,
    pub(super) root: Location,
    pub(super) host: String,
}

/// Reads an address.
pub(super) fn address(text: &str) -> Done<Url> {
    let url: Url =
        native(text).parse().map_err(|error: url::ParseError| unusable(text, &error.to_string()))?;
    match net::names_metadata(&url) {
        true => Err(unusable(text, "it is the cloud's service for this machine, which has no data")),
        false => Ok(url),
    }
}

/// Opens the store at an address. A request may take so long, unless the settings say otherwise.
pub(super) fn open_store(
    url: &Url,
    mut options: BTreeMap<String, String>,
    request: Option<Duration>,
) -> Done<OpenedStore> {
    if options.is_empty() {
        // Without it, the machine's own identity would be used.
        options.insert("skip_signature".to_owned(), "true".to_owned());
    }
    if let Some(request) = request {
        options.entry("timeout".to_owned()).or_insert_with(|| format!("{}s", request.as_secs()));
    }
    check_options(url, &options)?;
    let opened = object_store::parse_url_opts(url, options);
    let (store, root) = opened.map_err(|error| unusable(&shown(url), &causes::tell(&error)))?;
    Ok(OpenedStore { store, root, host: url.host_str().unwrap_or_default().to_owned() })
}

fn unusable(address: &str, why: &str) -> Failure {
    failed(FailureKind::Spec, format!("`{address}` is no address: {why}"))
}

/// The form of an address that the libraries know.
fn native(url: &str) -> String {
    match url.split_once("://") {
        Some(("wasb" | "wasbs", rest)) => format!("abfss://{}", rest.replacen(".blob.", ".dfs.", 1)),
        _ => url.to_owned(),
    }
}

/// The library would ignore a misspelt setting.
fn check_options(url: &Url, options: &BTreeMap<String, String>) -> Done<()> {
    let scheme = ObjectStoreScheme::parse(url).map(|(scheme, _)| scheme);
    let is_known = |key: &String| match &scheme {
        Ok(ObjectStoreScheme::AmazonS3) => key.parse::<object_store::aws::AmazonS3ConfigKey>().is_ok(),
        Ok(ObjectStoreScheme::MicrosoftAzure) => key.parse::<object_store::azure::AzureConfigKey>().is_ok(),
        Ok(ObjectStoreScheme::GoogleCloudStorage) => {
            key.parse::<object_store::gcp::GoogleConfigKey>().is_ok()
        }
        _ => false,
    };
    let unknown: Vec<&str> = options.keys().filter(|key| !is_known(key)).map(String::as_str).collect();
    match unknown.is_empty() {
        true => Ok(()),
        false => Err(failed(
            FailureKind::Spec,
            format!("the store at {} has no setting `{}`", shown(url), unknown.join("`, `")),
        )),
    }
}

/// An address without its parameters.
fn shown(url: &Url) -> String {
    net::scrub_urls(url.as_str().split(['?', '#']).next().unwrap_or_default())
}

async fn look_at(client: &Client, url: &Url) -> Result<Object, Trouble> {
    let mut answer = send(url, client.head(url.clone())).await?;
    // Some servers know no HEAD. The body of the answer is not read.
    if matches!(answer.status(), StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED) {
        answer = send(url, client.get(url.clone())).await?;
    }
    judge(url, &answer)?;
    let headers = answer.headers();
    let tag = text(headers, ETAG.as_str()).or_else(|| text(headers, LAST_MODIFIED.as_str()));
    let size = text(headers, CONTENT_LENGTH.as_str()).and_then(|length| length.parse().ok());
    Ok(Object { name: ONE_FILE.to_owned(), place: String::new(), size, tag })
}

async fn read_web(client: &Client, url: &Url, object: &Object, from: u64) -> Result<(u64, Pieces), Trouble> {
    let mut request = client.get(url.clone());
    let tag = object.tag.as_deref().filter(|tag| !tag.starts_with("W/"));
    if let Some(tag) = tag.filter(|_| from > 0) {
        request = request.header(RANGE, format!("bytes={from}-")).header(IF_RANGE, tag);
    }
    let answer = send(url, request).await?;
    judge(url, &answer)?;
    let now = text(answer.headers(), ETAG.as_str());
    if now.is_some() && object.tag.as_ref().is_some_and(|tag| tag.contains('"')) && now != object.tag {
        let message = format!("{} was changed while it was fetched", shown(url));
        return Err(Trouble::Lasting(failed(FailureKind::Damaged, message)));
    }
    let start = match answer.status() {
        StatusCode::PARTIAL_CONTENT => start_of(answer.headers()).filter(|start| *start <= from),
        _ => Some(0),
    };
    let Some(start) = start else {
        let message = format!("{} sent another part of {} than it was asked for", net::host(url), shown(url));
        return Err(Trouble::Lasting(failed(FailureKind::Damaged, message)));
    };
    let url = url.clone();
    let pieces = answer.bytes_stream().map_err(move |error| broken(&url, &error));
    Ok((start, pieces.boxed()))
}

async fn send(url: &Url, request: RequestBuilder) -> Result<Response, Trouble> {
    let request = request.header(ACCEPT_ENCODING, "identity");
    request.send().await.map_err(|error| broken(url, &error))
}

fn broken(url: &Url, error: &reqwest::Error) -> Trouble {
    Trouble::Passing(failed(FailureKind::Network, net::of_error(url, error).to_string()), None)
}

/// The start in `bytes 100-199/200`.
fn start_of(headers: &HeaderMap) -> Option<u64> {
    text(headers, CONTENT_RANGE.as_str())?.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.trim().to_owned())
}

fn judge(url: &Url, answer: &Response) -> Result<(), Trouble> {
    let status = answer.status();
    if status.is_success() {
        return Ok(());
    }
    let said = format!("{} answered {} for {}", net::host(url), status.as_u16(), shown(url));
    let failure = of_status(status.as_u16(), said);
    let asked = text(answer.headers(), RETRY_AFTER.as_str()).and_then(|text| text.parse().ok());
    match net::judge_status(status, None, Duration::ZERO) {
        Verdict::Again(_) => Err(Trouble::Passing(failure, asked.map(Duration::from_secs))),
        _ => Err(Trouble::Lasting(failure)),
    }
}

/// The failure of a status that is no success.
fn of_status(status: u16, said: String) -> Failure {
    match status {
        404 | 410 => failed(FailureKind::NotFound, said),
        401 | 403 | 407 => failed(FailureKind::Denied, said),
        400..=499 if !matches!(status, 408 | 425 | 429) => failed(FailureKind::Refused, said),
        _ => failed(FailureKind::Network, said),
    }
}

async fn list(store: &dyn ObjectStore, root: &Location, host: &str) -> Result<Vec<Object>, Trouble> {
    let found: Result<Vec<_>, _> = store.list(Some(root)).try_collect().await;
    let mut found = found.map_err(|error| of_store(host, root, &error))?;
    found.sort_by(|a, b| a.location.cmp(&b.location));
    let object = |meta: &object_store::ObjectMeta| {
        let parts: Option<Vec<String>> = meta
            .location
            .prefix_match(root)
            .map(|parts| parts.map(|part| part.as_ref().to_owned()).collect());
        Object {
            name: parts.map(|parts| parts.join("/")).unwrap_or_default(),
            place: meta.location.to_string(),
            size: Some(meta.size),
            tag: tag_of(meta),
        }
    };
    let objects: Vec<Object> = found.iter().map(object).collect();
    let objects = without_markers(objects);
    match objects.is_empty() {
        false => Ok(objects),
        true => {
            Err(Trouble::Lasting(failed(FailureKind::NotFound, format!("{host} has nothing below `{root}`"))))
        }
    }
}

/// Without the empty objects by which some stores mark a folder.
fn without_markers(objects: Vec<Object>) -> Vec<Object> {
    let names: Vec<String> = objects.iter().map(|object| object.name.clone()).collect();
    let is_marker = |object: &Object| {
        let below = format!("{}/", object.name);
        object.name.is_empty()
            || (object.size == Some(0) && names.iter().any(|name| name.starts_with(&below)))
    };
    objects.into_iter().filter(|object| !is_marker(object)).collect()
}

fn tag_of(meta: &object_store::ObjectMeta) -> Option<String> {
    Some(meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339()))
}

pub(super) fn of_store(host: &str, location: &Location, error: &object_store::Error) -> Trouble {
    use object_store::Error as E;
    let said = |what: &str| format!("{host} {what} `{location}`");
    match error {
        E::NotFound { .. } => Trouble::Lasting(failed(FailureKind::NotFound, said("does not have"))),
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
            Trouble::Lasting(failed(FailureKind::Denied, said("does not give away")))
        }
        E::Precondition { .. } => {
            Trouble::Lasting(failed(FailureKind::Damaged, said("changed, while it was fetched,")))
        }
        // The last cause is the plain one; those before it repeat the request, and may name its parameters.
        other => {
            let why = causes(other).last().map(ToString::to_string).unwrap_or_default();
            let message = format!("{}: {}", said("does not answer for"), net::scrub_urls(&why));
            Trouble::Passing(failed(FailureKind::Network, message), None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(url: &str, options: &[(&str, &str)]) -> Done<DataSource> {
        let options = options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let fetch = Fetch {
            url: url.to_owned(),
            is_file: false,
            options: agent_env::Options(options),
            to: "/nowhere".into(),
            known: None,
            stall_s: 1,
        };
        DataSource::open(&fetch, Duration::from_secs(1))
    }

    #[test]
    fn test_every_kind_of_address_has_a_source() {
        assert!(matches!(open("https://h.example/a", &[]).unwrap(), DataSource::Web { .. }));
        for url in [
            "wasbs://data@acc.blob.core.windows.net/a/b",
            "abfss://data@acc.dfs.core.windows.net/a/b",
            "s3://bucket/a/b",
        ] {
            let DataSource::Store { root, .. } = open(url, &[]).unwrap() else { panic!("{url}") };
            assert_eq!(root.as_ref(), "a/b", "{url}");
        }
    }

    #[test]
    fn test_the_service_with_the_keys_of_the_machine_is_no_data() {
        for host in ["169.254.169.254", "0xa9fea9fe", "[fd00:ec2::254]", "[::ffff:169.254.170.2]"] {
            let failure = open(&format!("http://{host}/latest/meta-data"), &[]).err().unwrap();
            assert!(failure.message.contains("no data"), "{host}: {}", failure.message);
        }
        for host in ["127.0.0.1", "10.0.0.1", "[::1]", "h.example"] {
            assert!(open(&format!("http://{host}/a"), &[]).is_ok(), "{host}");
        }
    }

    #[test]
    fn test_a_misspelt_setting_is_told_without_its_value() {
        let failure = open("s3://bucket", &[("secret_acces_key", "hidden")]).err().unwrap();
        assert!(failure.message.contains("`secret_acces_key`") && !failure.message.contains("hidden"));
        assert!(open("s3://bucket", &[("access_key_id", "a"), ("secret_access_key", "b")]).is_ok());
    }

    #[test]
    fn test_folders_are_no_files() {
        let object =
            |name: &str, size| Object { name: name.into(), place: name.into(), size: Some(size), tag: None };
        let found = vec![object("", 0), object("a", 0), object("a/x", 1), object("b", 0)];
        let names: Vec<String> = without_markers(found).into_iter().map(|object| object.name).collect();
        assert_eq!(names, ["a/x", "b"]);
    }

    #[test]
    fn test_whose_fault_a_status_is() {
        for (status, kind) in [
            (404, FailureKind::NotFound),
            (403, FailureKind::Denied),
            (400, FailureKind::Refused),
            (429, FailureKind::Network),
            (503, FailureKind::Network),
        ] {
            assert_eq!(of_status(status, String::new()).kind, kind, "{status}");
        }
    }
}
