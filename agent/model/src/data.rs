//! Where data lies that a job reads and nobody sends, or is to lie that a job makes: the forms of an address, read in
//! one place.
//!
//! Owns [`DataUri`], every form that a job file may use, [`DataInput`] and [`DataOutput`], an input and an output with
//! such an address, and [`SnapshotRef`], the name of files that were sent before. Hides how the forms differ:
//! `azureml:` has a short form, a long one, and one for names.
//!
//! Invariants: an address holds no credentials, because it is kept in records and printed; its path never leads out
//! of what it is below (`..`).

mod output;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Digest;

pub use output::{DataOutput, DataOutputError, Output};

/// An input of a job that its node fetches, or finds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataInput {
    /// Where it lies.
    pub uri: DataUri,
    /// It is one file; otherwise a folder with all that is below it.
    pub is_file: bool,
    /// The job may change its copy.
    #[serde(default)]
    pub is_own_copy: bool,
}

/// The address of data.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DataUri {
    /// An address that every machine understands in the same way.
    Url(String),
    /// A path in a data store, which the configuration of a node explains.
    Stored {
        /// The name of the store.
        store: String,
        /// The path in it, without a slash at either end; empty for all of it.
        path: String,
    },
    /// A name that a user or an operator gave to data: `NAME:VERSION` or `NAME@LABEL`.
    Asset(String),
}

/// Why a text is no address of data that is fetched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DataUriError {
    #[error("data is not fetched by `{0}:`")]
    Scheme(String),
    #[error("{0}, which only a workspace of the cloud knows")]
    Workspace(&'static str),
    #[error("it does not say {0}")]
    Incomplete(&'static str),
    #[error("it holds credentials, which would be kept in the records of the job")]
    Credentials,
    #[error("its path has a part `{0}`")]
    Path(String),
}

impl DataUriError {
    /// What to do about it.
    pub fn fix(&self) -> &'static str {
        match self {
            DataUriError::Scheme(_) => {
                "use `https:`, `s3:`, `gs:`, `wasbs:`, `abfss:` or `azureml://datastores/NAME/paths/PATH`"
            }
            DataUriError::Workspace(_) => {
                "write the address of the data itself, a path in a data store (`azureml://datastores/NAME/paths/PATH`), \
                 or a local path"
            }
            DataUriError::Incomplete(_) => "write the whole address",
            DataUriError::Credentials => {
                "take them out, and ask the operator to put them into the file that `data_stores` names in the \
                 node's configuration"
            }
            DataUriError::Path(_) => "write the path without it",
        }
    }
}

/// Schemes of addresses that are fetched.
const SCHEMES: &[&str] = &["http", "https", "s3", "s3a", "gs", "az", "wasb", "wasbs", "abfs", "abfss"];

/// Parameters of an address that let their bearer in.
const SECRETS: &[&str] =
    &["sig", "x-amz-signature", "x-goog-signature", "signature", "token", "access_token"];

impl FromStr for DataUri {
    type Err = DataUriError;

    fn from_str(text: &str) -> Result<DataUri, DataUriError> {
        let text = text.trim();
        let (scheme, rest) = text.split_once(':').ok_or(DataUriError::Incomplete("how to reach the data"))?;
        match scheme {
            "azureml" => stored(rest),
            "runs" => Err(DataUriError::Workspace("it names an output of a run")),
            _ if SCHEMES.contains(&scheme) => url(text, scheme, rest),
            _ => Err(DataUriError::Scheme(scheme.to_owned())),
        }
    }
}

fn url(text: &str, scheme: &str, rest: &str) -> Result<DataUri, DataUriError> {
    let rest = rest.strip_prefix("//").ok_or(DataUriError::Incomplete("the host: `//` is missing"))?;
    let (whole, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (host, path) = whole.split_once('/').unwrap_or((whole, ""));
    // Before the `@` of the cloud's own forms is the container.
    let has_container = matches!(scheme, "wasb" | "wasbs" | "abfs" | "abfss");
    match host.split_once('@') {
        Some((container, account)) if has_container => {
            if container.is_empty() || account.is_empty() {
                return Err(DataUriError::Incomplete("the container and the account: `CONTAINER@ACCOUNT`"));
            }
            if container.contains(':') {
                return Err(DataUriError::Credentials);
            }
        }
        Some(_) => return Err(DataUriError::Credentials),
        None if has_container => {
            return Err(DataUriError::Incomplete("the container and the account: `CONTAINER@ACCOUNT`"));
        }
        None if host.is_empty() => return Err(DataUriError::Incomplete("the host")),
        None => {}
    }
    let is_secret = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default();
        SECRETS.iter().any(|secret| name.eq_ignore_ascii_case(secret))
    };
    if query.split('&').any(is_secret) {
        return Err(DataUriError::Credentials);
    }
    check_path(path)?;
    match text.chars().find(|c| c.is_whitespace() || c.is_control()) {
        Some(stranger) => Err(DataUriError::Path(stranger.escape_default().to_string())),
        None => Ok(DataUri::Url(text.to_owned())),
    }
}

/// After `azureml:`.
fn stored(rest: &str) -> Result<DataUri, DataUriError> {
    let Some(rest) = rest.strip_prefix("//") else {
        return asset(rest);
    };
    // The long form begins with the names of a workspace.
    let rest = match rest.starts_with("subscriptions/") {
        true => rest.find("/datastores/").map_or(rest, |at| &rest[at + 1..]),
        false => rest,
    };
    let Some(rest) = rest.strip_prefix("datastores/") else {
        return Err(DataUriError::Workspace(match rest.split('/').next() {
            Some("registries") => "it names something of a registry",
            Some("jobs") => "it names an output of a job",
            _ => "it names something else than a data store",
        }));
    };
    let (store, path) = rest.split_once('/').unwrap_or((rest, ""));
    let path = match path.split_once('/') {
        Some(("paths", path)) => path,
        None if matches!(path, "" | "paths") => "",
        _ => return Err(DataUriError::Incomplete("the path: `azureml://datastores/NAME/paths/PATH`")),
    };
    if store.is_empty() {
        return Err(DataUriError::Incomplete("the name of the data store"));
    }
    check_path(path)?;
    Ok(DataUri::Stored { store: store.to_owned(), path: path.trim_matches('/').to_owned() })
}

/// `NAME:VERSION` or `NAME@LABEL`.
fn asset(reference: &str) -> Result<DataUri, DataUriError> {
    if !reference.contains([':', '@']) {
        return Err(DataUriError::Incomplete("the version: `azureml:NAME:VERSION`"));
    }
    match AssetRef::parse(reference) {
        Some(_) => Ok(DataUri::Asset(reference.to_owned())),
        None => Err(DataUriError::Incomplete("a name and a version: `azureml:NAME:VERSION`")),
    }
}

fn check_path(path: &str) -> Result<(), DataUriError> {
    let is_bad = |part: &&str| {
        let plain = part.to_ascii_lowercase().replace("%2e", ".");
        plain == ".." || plain == "." || plain.contains("%2f") || part.contains(['\0', '\n'])
    };
    match path.split('/').find(is_bad) {
        Some(part) => Err(DataUriError::Path(part.escape_default().to_string())),
        None => Ok(()),
    }
}

impl DataUri {
    /// The last part of its path, or the name of an asset: the name of the file that it names.
    pub fn file_name(&self) -> Option<&str> {
        let path = match self {
            DataUri::Url(url) => url.split(['?', '#']).next()?.split_once("://")?.1.split_once('/')?.1,
            DataUri::Stored { path, .. } => path,
            DataUri::Asset(reference) => reference.split([':', '@']).next()?,
        };
        path.rsplit('/').next().filter(|name| !name.is_empty())
    }
}

impl fmt::Display for DataUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataUri::Url(url) => f.pad(url),
            DataUri::Asset(reference) => write!(f, "azureml:{reference}"),
            DataUri::Stored { store, path } => write!(f, "azureml://datastores/{store}/paths/{path}"),
        }
    }
}

impl TryFrom<String> for DataUri {
    type Error = DataUriError;
    fn try_from(text: String) -> Result<DataUri, DataUriError> {
        text.parse()
    }
}

impl From<DataUri> for String {
    fn from(uri: DataUri) -> String {
        uri.to_string()
    }
}

/// Files that the controller has, by what is in them: `snapshot:HASH/SIZE` is a directory, and with `/NAME` behind it
/// the one file of that directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRef {
    /// The directory.
    pub root: Digest,
    /// The file in it that is meant.
    pub file: Option<String>,
}

/// A text that begins as the name of a snapshot, and is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a snapshot is named `snapshot:HASH/SIZE`, with the 64 digits of its hash, and one file `snapshot:HASH/SIZE/NAME`"
)]
pub struct NoSnapshot;

impl SnapshotRef {
    /// How such a name begins.
    pub const SCHEME: &str = "snapshot";
}

impl FromStr for SnapshotRef {
    type Err = NoSnapshot;

    fn from_str(text: &str) -> Result<SnapshotRef, NoSnapshot> {
        let rest = text.trim().strip_prefix(SnapshotRef::SCHEME).and_then(|rest| rest.strip_prefix(':'));
        let mut parts = rest.ok_or(NoSnapshot)?.splitn(3, '/');
        let (hash, size) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let root = format!("{hash}/{size}").parse().map_err(|_| NoSnapshot)?;
        let file = parts.next().map(str::to_owned);
        match file.as_deref() {
            Some("" | "." | "..") => Err(NoSnapshot),
            Some(name) if name.contains(['/', '\0']) => Err(NoSnapshot),
            _ => Ok(SnapshotRef { root, file }),
        }
    }
}

impl fmt::Display for SnapshotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", SnapshotRef::SCHEME, self.root)?;
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))
    }
}

/// Which version of a name is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssetRef {
    /// The name.
    pub name: String,
    /// The version, or the label.
    pub which: Which,
}

/// A version by itself, or by its label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// `NAME:VERSION`
    Version(String),
    /// `NAME@LABEL`
    Label(String),
}

impl AssetRef {
    /// `NAME:VERSION` or `NAME@LABEL`, without the `azureml:` before it; `None` for anything else.
    pub fn parse(text: &str) -> Option<AssetRef> {
        let at = text.find([':', '@'])?;
        let (name, word) = (&text[..at], &text[at + 1..]);
        let word = Some(word).filter(|word| is_asset_word(word) && is_asset_word(name))?.to_owned();
        let which = if text[at..].starts_with(':') { Which::Version(word) } else { Which::Label(word) };
        Some(AssetRef { name: name.to_owned(), which })
    }
}

impl fmt::Display for AssetRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.which {
            Which::Version(version) => write!(f, "azureml:{}:{version}", self.name),
            Which::Label(label) => write!(f, "azureml:{}@{label}", self.name),
        }
    }
}

/// Most characters of a name, a version or a label.
const LONGEST: usize = 100;

/// Whether a text can be a name, a version or a label.
pub fn is_asset_word(text: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    !text.is_empty() && !text.starts_with('.') && text.chars().count() <= LONGEST && text.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_snapshots_are_named_by_their_content() {
        let root = Digest { size: 7, ..Digest::EMPTY };
        let folder = SnapshotRef { root, file: None };
        let file = SnapshotRef { root, file: Some("a b.csv".to_owned()) };
        for one in [folder, file] {
            assert_eq!(one.to_string().parse(), Ok(one));
        }
        let hex = root.hex();
        for text in [
            "snapshot:1/2",
            "snapshot:",
            "other:x",
            &format!("snapshot:{hex}"),
            &format!("snapshot:{hex}/7/a/b"),
        ] {
            assert_eq!(text.parse::<SnapshotRef>(), Err(NoSnapshot), "{text}");
        }
        assert_eq!(format!("snapshot:{hex}/7/..").parse::<SnapshotRef>(), Err(NoSnapshot));
    }

    fn stored(store: &str, path: &str) -> DataUri {
        DataUri::Stored { store: store.to_owned(), path: path.to_owned() }
    }

    #[test]
    fn test_every_form_is_read_and_written_back() {
        for url in [
            "https://h.example/a/iris.csv",
            "http://127.0.0.1:8000/iris.csv?v=2",
            "s3://bucket/a",
            "gs://bucket",
            "wasbs://data@acc.blob.core.windows.net/iris.csv",
            "abfss://data@acc.dfs.core.windows.net/",
        ] {
            assert_eq!(url.parse(), Ok(DataUri::Url(url.to_owned())), "{url}");
        }
        let long = "azureml://subscriptions/s/resourcegroups/r/workspaces/w/datastores/blob/paths/a/b.csv";
        for (text, uri) in [
            ("azureml://datastores/blob/paths/a/b.csv", stored("blob", "a/b.csv")),
            ("azureml://datastores/blob/paths/a/", stored("blob", "a")),
            ("azureml://datastores/blob", stored("blob", "")),
            (" azureml://datastores/blob/paths/ ", stored("blob", "")),
            (long, stored("blob", "a/b.csv")),
            ("azureml:iris:1", DataUri::Asset("iris:1".to_owned())),
            ("azureml:iris@latest", DataUri::Asset("iris@latest".to_owned())),
        ] {
            let read: DataUri = text.parse().unwrap();
            assert_eq!(read, uri, "{text}");
            assert_eq!(read.to_string().parse(), Ok(uri), "{text}");
        }
    }

    #[test]
    fn test_what_is_not_fetched_is_told_apart() {
        for (text, what) in [
            ("ftp://h/x", "data is not fetched by `ftp:`"),
            ("azureml:iris", "does not say the version"),
            ("azureml:iris:", "a name and a version"),
            ("azureml:../x:1", "a name and a version"),
            ("azureml://registries/r/data/d/versions/1", "of a registry"),
            ("azureml://jobs/j/outputs/o/paths/p", "an output of a job"),
            ("runs:/1/model", "an output of a run"),
            ("azureml://datastores/blob/a.csv", "does not say the path"),
            ("azureml://datastores//paths/a", "the name of the data store"),
            ("https:iris.csv", "does not say the host"),
            ("https:///iris.csv", "does not say the host"),
            ("wasbs://acc.blob.core.windows.net/x", "the container and the account"),
            ("https://me:secret@h/x", "credentials"),
            ("https://h/x?sv=1&sig=abc", "credentials"),
            ("https://h/x?X-Amz-Signature=abc", "credentials"),
            ("https://h/a/../x", "`..`"),
            ("azureml://datastores/blob/paths/../../etc", "`..`"),
            ("https://h/%2e%2E/x", "has a part"),
            ("https://h/a b", "has a part"),
        ] {
            let error = text.parse::<DataUri>().unwrap_err();
            assert!(error.to_string().contains(what), "{text}: {error}");
            assert!(!error.fix().is_empty());
        }
    }

    #[test]
    fn test_file_names_are_the_last_part_of_the_path() {
        for (text, name) in [
            ("https://h/a/iris.csv?x=/y", Some("iris.csv")),
            ("https://h", None),
            ("https://h/a/", None),
            ("azureml://datastores/blob/paths/a/b.csv", Some("b.csv")),
            ("azureml://datastores/blob", None),
            ("azureml:iris:1", Some("iris")),
        ] {
            assert_eq!(text.parse::<DataUri>().unwrap().file_name(), name, "{text}");
        }
    }

    #[test]
    fn test_references_are_read_and_written() {
        for text in ["iris:1", "iris@latest", "a-b.c:2024-01"] {
            assert_eq!(AssetRef::parse(text).unwrap().to_string(), format!("azureml:{text}"));
        }
        for text in ["iris", "iris:", ":1", "iris:1:2", "iris@a@b", "../x:1", ".a:1", "a b:1"] {
            assert_eq!(AssetRef::parse(text), None, "{text}");
        }
    }
}
