//! Our credentials for registries: a file in the format of Docker's own `config.json`.
//!
//! Read anew each time, because passwords change. Its content is never shown: errors name only the file and the host.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bollard::auth::DockerCredentials;
use serde::Deserialize;

use super::super::AcquireError;
use super::reference::{HUB, Reference};

/// The key under which the engine looks for the credentials of its default registry.
const HUB_ADDRESS: &str = "https://index.docker.io/v1/";

/// Credentials of registries.
#[derive(Default)]
pub(super) struct Credentials {
    by_host: BTreeMap<String, DockerCredentials>,
    /// Some credentials are kept by a helper program, which is not called.
    elsewhere: bool,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.by_host.keys()).finish()
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct File {
    auths: BTreeMap<String, Entry>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

impl Credentials {
    /// Reads a file; empty when none is configured.
    pub(super) fn read(path: Option<&Path>) -> Result<Credentials, AcquireError> {
        let Some(path) = path else { return Ok(Credentials::default()) };
        let text = fs::read(path).map_err(AcquireError::io("read", path))?;
        Credentials::parse(&text).map_err(|detail| AcquireError::Refused {
            at: vec![path.display().to_string()],
            detail,
            hint: Some(
                "the operator of the node corrects the file that `docker_credentials` names".to_owned(),
            ),
        })
    }

    fn parse(text: &[u8]) -> Result<Credentials, String> {
        // The parser's message may quote the text, so it is left out.
        let file: File = serde_json::from_slice(text)
            .map_err(|error| format!("it is not of Docker's form: line {}", error.line()))?;
        let mut by_host = BTreeMap::new();
        for (key, entry) in file.auths {
            let host = host_of(&key);
            let Some(credentials) = entry.read().map_err(|why| format!("the entry of {host}: {why}"))? else {
                continue;
            };
            by_host.insert(host, credentials);
        }
        Ok(Credentials { by_host, elsewhere: file.creds_store.is_some() || !file.cred_helpers.is_empty() })
    }

    /// The credentials for the registry of an image.
    pub(super) fn of(&self, reference: &Reference) -> Option<DockerCredentials> {
        let host = reference.registry.as_deref()?;
        let found = self.by_host.get(&host_of(host))?.clone();
        Some(DockerCredentials { serveraddress: Some(address(host)), ..found })
    }

    /// All of them, as a build needs them.
    pub(super) fn all(&self) -> HashMap<String, DockerCredentials> {
        self.by_host.iter().map(|(host, found)| (address(host), found.clone())).collect()
    }

    /// Whether some are kept by a helper program.
    pub(super) fn has_elsewhere(&self) -> bool {
        self.elsewhere
    }
}

impl Entry {
    fn read(self) -> Result<Option<DockerCredentials>, &'static str> {
        let (mut username, mut password) = (self.username, self.password);
        if let Some(auth) = self.auth.filter(|auth| !auth.is_empty()) {
            let text = STANDARD.decode(auth.trim()).map_err(|_| "`auth` is not base64")?;
            let text = String::from_utf8(text).map_err(|_| "`auth` is not text")?;
            let (name, word) = text.split_once(':').ok_or("`auth` has no colon")?;
            username = Some(name.to_owned());
            password = Some(word.trim_end_matches('\0').to_owned());
        }
        let known = username.is_some() || self.identitytoken.is_some() || self.registrytoken.is_some();
        Ok(known.then_some(DockerCredentials {
            username,
            password,
            identitytoken: self.identitytoken,
            registrytoken: self.registrytoken,
            ..DockerCredentials::default()
        }))
    }
}

/// `https://index.docker.io/v1/` is `docker.io`, `https://h.example/v2/` is `h.example`.
fn host_of(key: &str) -> String {
    let bare = key.split_once("://").map_or(key, |(_, rest)| rest);
    let host = bare.split('/').next().unwrap_or(bare).to_ascii_lowercase();
    match host.as_str() {
        "index.docker.io" | "registry-1.docker.io" => HUB.to_owned(),
        _ => host,
    }
}

fn address(host: &str) -> String {
    if host_of(host) == HUB { HUB_ADDRESS.to_owned() } else { host.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_credentials_are_found_by_the_registry_of_an_image() {
        let auth = STANDARD.encode("ada:se:cret");
        let text = format!(
            r#"{{"auths": {{"https://index.docker.io/v1/": {{"auth": "{auth}"}}, "H.example": {{"username": "b",
            "password": "w"}}, "empty.example": {{}}}}, "HttpHeaders": {{}}, "credsStore": "pass"}}"#
        );
        let read = Credentials::parse(text.as_bytes()).unwrap();
        let of = |image: &str| read.of(&Reference::parse(image).unwrap());
        let hub = of("ubuntu").unwrap();
        assert_eq!((hub.username.as_deref(), hub.password.as_deref()), (Some("ada"), Some("se:cret")));
        assert_eq!(hub.serveraddress.as_deref(), Some(HUB_ADDRESS));
        assert_eq!(of("h.example/x").unwrap().password.as_deref(), Some("w"));
        assert!(of("empty.example/x").is_none() && of("other.example/x").is_none());
        assert_eq!(read.all().len(), 2);
        assert!(read.has_elsewhere());
    }

    #[test]
    fn test_nothing_of_the_file_is_shown() {
        for text in [
            r#"{"auths": {"h": {"auth": "c2VjcmV0"}}}"#,
            r#"{"auths": {"h": {"auth": "sec ret"}}}"#,
            "secret",
        ] {
            let why = Credentials::parse(text.as_bytes()).unwrap_err();
            assert!(!why.contains("sec"), "{why}");
        }
        let auth = STANDARD.encode("ada:secret");
        let read = Credentials::parse(format!(r#"{{"auths": {{"h": {{"auth": "{auth}"}}}}}}"#).as_bytes());
        assert_eq!(format!("{:?}", read.unwrap()), r#"{"h"}"#);
    }
}
