//! The file of data stores: what an operator says about where data is, and where outputs may be sent.
//!
//! Owns its form, the choice of the place of an address ([`Stores::place`]) and of the target of an output
//! ([`Stores::target`]); pure, except for reading the file and the files of credentials that it names. Hides which
//! entry wins: the longest prefix.
//!
//! Invariants: an error never quotes the value of a setting; a file with settings is not readable for everybody; a
//! store takes outputs only if the file says so.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use agent_jobfile::yaml::{self, At, Node};
use agent_model::DataUri;
use agent_model::data::AssetRef;
use agent_runtime::data::{Options, UploadTarget};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

/// What the file says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Stores {
    stores: BTreeMap<String, DataStore>,
    /// From the beginning of an address, or a name, to where it is.
    map: BTreeMap<String, Root>,
}

/// Where a data store, or what begins with an address, is.
#[derive(Debug, PartialEq, Eq)]
enum Root {
    Path(PathBuf),
    Url(String),
}

#[derive(Debug, PartialEq, Eq)]
struct DataStore {
    root: Root,
    settings: BTreeMap<String, Hidden>,
    /// Outputs of jobs may be sent to it.
    is_writable: bool,
}

/// A value that is not printed.
#[derive(Clone, PartialEq, Eq)]
struct Hidden(String);

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad("***")
    }
}

/// Where the data of one address is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DataPlace {
    /// On this machine.
    Here(PathBuf),
    /// To be fetched from there; the settings of the store hold credentials.
    There {
        /// The address.
        url: String,
        /// The settings.
        options: BTreeMap<String, String>,
    },
}

/// Why the place of an address is unknown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoresError {
    #[error("no data store `{name}` is configured in {}; configured are: {}", file.display(), listed(known))]
    Unknown {
        name: String,
        /// Those that are.
        known: Vec<String>,
        file: PathBuf,
    },
    #[error("{} does not say under `data_map` what `{name}` is", file.display())]
    UnknownName { name: String, file: PathBuf },
    #[error("{} does not say that the data store `{name}` is `writable`", file.display())]
    ReadOnly { name: String, file: PathBuf },
    #[error("{} has no data store for {url} that is `writable`", file.display())]
    NoStore { url: String, file: PathBuf },
    #[error("{}: {at}", file.display())]
    Form { file: PathBuf, at: At },
    #[error("{} cannot be read", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} holds settings of a store, and everybody may read it", file.display())]
    Open { file: PathBuf },
}

fn listed(known: &[String]) -> String {
    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
}

impl Stores {
    /// Reads the file; nothing is configured where there is none.
    pub(crate) fn read(file: &Path) -> Result<Stores, StoresError> {
        let unreadable = |source| StoresError::Unreadable { path: file.to_owned(), source };
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Stores::default()),
            Err(error) => return Err(unreadable(error)),
        };
        let stores = parse(&text).map_err(|at| StoresError::Form { file: file.to_owned(), at })?;
        let has_settings = stores.stores.values().any(|store| !store.settings.is_empty());
        let mode = file.metadata().map_err(unreadable)?.permissions().mode();
        match has_settings && mode & 0o004 != 0 {
            true => Err(StoresError::Open { file: file.to_owned() }),
            false => Ok(stores),
        }
    }

    /// The names of data in `data_map`, without their versions.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        let named = self.map.keys().filter_map(|key| AssetRef::parse(key.strip_prefix("azureml:")?));
        named.map(|reference| reference.name).collect()
    }

    /// Where an address is.
    pub(crate) fn place(&self, uri: &DataUri, file: &Path) -> Result<DataPlace, StoresError> {
        match uri {
            DataUri::Url(url) => self.of_url(url),
            DataUri::Asset(_) => match self.map.get(&uri.to_string()) {
                Some(Root::Path(path)) => Ok(DataPlace::Here(path.clone())),
                Some(Root::Url(url)) => self.of_url(url),
                None => Err(StoresError::UnknownName { name: uri.to_string(), file: file.to_owned() }),
            },
            DataUri::Stored { store: name, path } => match &self.store(name, file)?.root {
                Root::Path(root) => Ok(DataPlace::Here(below(root, path))),
                Root::Url(root) => self.of_url(&joined(root, &escaped(path))),
            },
        }
    }

    fn store(&self, name: &str, file: &Path) -> Result<&DataStore, StoresError> {
        self.stores.get(name).ok_or_else(|| StoresError::Unknown {
            name: name.to_owned(),
            known: self.stores.keys().cloned().collect(),
            file: file.to_owned(),
        })
    }

    /// Where an output is sent that is to lie at an address. What is made in a directory is to belong to `owner`.
    pub(crate) fn target(
        &self,
        uri: &DataUri,
        owner: Option<(u32, u32)>,
        file: &Path,
    ) -> Result<UploadTarget, StoresError> {
        let no_store = || StoresError::NoStore { url: uri.to_string(), file: file.to_owned() };
        match uri {
            DataUri::Stored { store: name, path } => {
                let store = self.store(name, file)?;
                match (&store.root, store.is_writable) {
                    (_, false) => Err(StoresError::ReadOnly { name: name.clone(), file: file.to_owned() }),
                    (Root::Path(root), true) => {
                        Ok(UploadTarget::Folder { root: root.clone(), path: path.clone(), owner })
                    }
                    (Root::Url(url), true) => store.takes(url, path),
                }
            }
            DataUri::Url(url) => {
                let place = self.mapped(url);
                let (store, path) = self.writable_at(&place).ok_or_else(no_store)?;
                match &store.root {
                    Root::Path(root) => Ok(UploadTarget::Folder { root: root.clone(), path, owner }),
                    // What is below the store is escaped here, so the address stays one.
                    Root::Url(_) => store.takes(&place, ""),
                }
            }
            DataUri::Asset(_) => Err(no_store()),
        }
    }

    /// The path or the address that an address stands for.
    fn mapped(&self, url: &str) -> String {
        match longest(self.map.iter().map(|(prefix, root)| (prefix.as_str(), root)), url) {
            Some((Root::Path(root), rest)) => below(root, &plain(rest)).display().to_string(),
            Some((Root::Url(root), rest)) => joined(root, rest),
            None => url.to_owned(),
        }
    }

    /// The store that is nearest to a path or an address, if it is writable; and the path in it.
    fn writable_at(&self, place: &str) -> Option<(&DataStore, String)> {
        let roots = self.stores.values().filter_map(|store| match &store.root {
            Root::Path(root) => Some((root.to_str()?, store)),
            Root::Url(root) => Some((root.as_str(), store)),
        });
        let (store, path) = longest(roots, place)?;
        store.is_writable.then(|| (store, path.to_owned()))
    }

    fn of_url(&self, url: &str) -> Result<DataPlace, StoresError> {
        let mapped = longest(self.map.iter().map(|(prefix, root)| (prefix.as_str(), root)), url);
        let url = match mapped {
            Some((Root::Path(root), rest)) => {
                return Ok(DataPlace::Here(below(root, &plain(without_query(rest)))));
            }
            Some((Root::Url(root), rest)) => joined(root, rest),
            None => url.to_owned(),
        };
        let roots = self.stores.values().filter_map(|store| match &store.root {
            Root::Url(root) => Some((root.as_str(), store)),
            Root::Path(_) => None,
        });
        let settings = longest(roots, &url).map(|(store, _)| &store.settings);
        let options = settings.map_or_else(|| Ok(BTreeMap::new()), filled)?;
        Ok(DataPlace::There { url, options })
    }
}

/// The entry with the longest prefix of `text` that ends at the end of a part of the path; and what follows it.
fn longest<'a, T>(entries: impl Iterator<Item = (&'a str, T)>, text: &'a str) -> Option<(T, &'a str)> {
    let matching = entries.filter_map(|(prefix, value)| {
        let rest = text.strip_prefix(prefix.trim_end_matches('/'))?;
        let is_whole = rest.is_empty() || rest.starts_with(['/', '?']);
        is_whole.then_some((prefix.len(), value, rest.trim_start_matches('/')))
    });
    matching.max_by_key(|(length, ..)| *length).map(|(_, value, rest)| (value, rest))
}

fn without_query(path: &str) -> &str {
    path.split(['?', '#']).next().unwrap_or_default()
}

/// What means something else in an address than in a path.
const SPECIAL: &AsciiSet =
    &CONTROLS.add(b' ').add(b'"').add(b'#').add(b'%').add(b'<').add(b'>').add(b'?').add(b'\\');

/// A path as a part of an address.
fn escaped(path: &str) -> String {
    utf8_percent_encode(path, SPECIAL).to_string()
}

/// The path that a part of an address stands for.
fn plain(part: &str) -> String {
    percent_decode_str(part).decode_utf8_lossy().into_owned()
}

fn below(root: &Path, path: &str) -> PathBuf {
    if path.is_empty() { root.to_owned() } else { root.join(path) }
}

fn joined(root: &str, path: &str) -> String {
    let root = root.trim_end_matches('/');
    if path.is_empty() { root.to_owned() } else { format!("{root}/{path}") }
}

/// The settings with the contents of files instead of their names: `KEY_file` names the file with the value of `KEY`.
fn filled(settings: &BTreeMap<String, Hidden>) -> Result<BTreeMap<String, String>, StoresError> {
    let value = |(key, Hidden(value)): (&String, &Hidden)| match key.strip_suffix("_file") {
        None => Ok((key.clone(), value.clone())),
        Some(key) => {
            let path = PathBuf::from(value);
            let text =
                std::fs::read_to_string(&path).map_err(|source| StoresError::Unreadable { path, source })?;
            Ok((key.to_owned(), text.trim().to_owned()))
        }
    };
    settings.iter().map(value).collect()
}

fn parse(text: &str) -> Result<Stores, At> {
    let document = yaml::parse(text)?;
    if document.value == yaml::Value::Null {
        return Ok(Stores::default());
    }
    let mut top = document.map()?;
    let [named, mapped] = ["datastores", "data_map"].map(|key| top.take(key));
    if let Some((key, _)) = top.rest().into_iter().next() {
        let message = format!("unknown key `{}`; the keys are `datastores` and `data_map`", key.text);
        return Err(At { place: key.place, message });
    }
    let mut stores = Stores::default();
    for (key, node) in named.map(Node::map).transpose()?.into_iter().flat_map(yaml::Entries::rest) {
        stores.stores.insert(key.text, data_store(node)?);
    }
    for (key, node) in mapped.map(Node::map).transpose()?.into_iter().flat_map(yaml::Entries::rest) {
        if !matches!(key.text.parse(), Ok(DataUri::Url(_) | DataUri::Asset(_))) {
            let message = format!(
                "`{}` is neither the beginning of an address such as `https://host/path` nor a name such as \
                 `azureml:iris:1`",
                key.text
            );
            return Err(At { place: key.place, message });
        }
        stores.map.insert(key.text, root(&node)?);
    }
    Ok(stores)
}

impl DataStore {
    /// This store as a target: the path below an address, with its settings.
    fn takes(&self, url: &str, path: &str) -> Result<UploadTarget, StoresError> {
        let options = Options(filled(&self.settings)?);
        Ok(UploadTarget::Store { url: url.to_owned(), path: path.to_owned(), options })
    }
}

fn data_store(node: Node) -> Result<DataStore, At> {
    let place = node.place;
    let mut entries = node.map()?;
    let where_it_is = match (entries.take("path"), entries.take("url")) {
        (Some(node), None) | (None, Some(node)) => root(&node)?,
        _ => return Err(At { place, message: "a data store has a `path` or a `url`".to_owned() }),
    };
    let is_writable = entries.take("writable").map(|node| node.flag()).transpose()?.unwrap_or(false);
    let setting = |(key, node): (yaml::Key, Node)| Ok((key.text, Hidden(node.text()?.to_owned())));
    let settings = entries.rest().into_iter().map(setting).collect::<Result<BTreeMap<_, _>, At>>()?;
    match (&where_it_is, settings.keys().next()) {
        (Root::Path(_), Some(key)) => Err(At { place, message: format!("a `path` has no setting `{key}`") }),
        // Otherwise the library might write as the machine itself.
        (Root::Url(_), None) if is_writable => {
            let message =
                "a `url` that is `writable` needs settings with credentials; a web server takes no files";
            Err(At { place, message: message.to_owned() })
        }
        _ => Ok(DataStore { root: where_it_is, settings, is_writable }),
    }
}

/// An absolute path, or an address without credentials.
fn root(node: &Node) -> Result<Root, At> {
    let text = node.text()?;
    if Path::new(text).is_absolute() {
        return Ok(Root::Path(PathBuf::from(text)));
    }
    match text.parse::<DataUri>() {
        Ok(DataUri::Url(url)) => Ok(Root::Url(url)),
        Ok(_) => Err(node.fault("an `azureml:` name cannot stand for another one")),
        Err(error) => Err(node.fault(format!("expected an absolute path or an address: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "
datastores:
  share: {path: /mnt/share}
  web: {url: 'https://h.example/data/'}
  s3: {url: 's3://bucket/base', access_key_id: me, secret_access_key: hidden}
data_map:
  wasbs://data@acc.blob.core.windows.net/: /srv/data
  https://h.example/data/old: https://mirror.example/x
  azureml:iris:1: https://h.example/data/old/iris.csv
  azureml:iris@latest: /srv/iris.csv
";

    fn place(uri: &str) -> DataPlace {
        parse(FILE).unwrap().place(&uri.parse().unwrap(), Path::new("/etc/data.yaml")).unwrap()
    }

    fn there(url: &str) -> DataPlace {
        DataPlace::There { url: url.to_owned(), options: BTreeMap::new() }
    }

    #[test]
    fn test_each_address_has_its_place() {
        for (uri, path) in [
            ("azureml://datastores/share/paths/a/b.csv", "/mnt/share/a/b.csv"),
            ("azureml://datastores/share", "/mnt/share"),
            ("azureml:iris@latest", "/srv/iris.csv"),
            ("wasbs://data@acc.blob.core.windows.net/iris.csv", "/srv/data/iris.csv"),
            ("wasbs://data@acc.blob.core.windows.net/a%20b/%C3%A4+.csv", "/srv/data/a b/ä+.csv"),
            ("azureml://datastores/share/paths/ü b/ä%41+.csv", "/mnt/share/ü b/ä%41+.csv"),
        ] {
            assert_eq!(place(uri), DataPlace::Here(path.into()), "{uri}");
        }
        for (uri, url) in [
            ("azureml://datastores/web/paths/iris.csv", "https://h.example/data/iris.csv"),
            ("https://h.example/data/old/a?x=1", "https://mirror.example/x/a?x=1"),
            ("azureml://datastores/web/paths/old/a", "https://mirror.example/x/a"),
            ("azureml:iris:1", "https://mirror.example/x/iris.csv"),
            (
                "azureml://datastores/web/paths/ü b/ä%41+?.csv",
                "https://h.example/data/%C3%BC%20b/%C3%A4%2541+%3F.csv",
            ),
            ("https://h.example/data/older/a", "https://h.example/data/older/a"),
            ("wasbs://data@other.blob.core.windows.net/a", "wasbs://data@other.blob.core.windows.net/a"),
        ] {
            assert_eq!(place(uri), there(url), "{uri}");
        }
    }

    #[test]
    fn test_the_example_of_the_guide_is_read() {
        let page = include_str!("../../../../docs/data.md");
        let shown = page.split("```yaml\n").find(|block| block.starts_with("datastores:")).unwrap();
        let stores = parse(shown.split("```").next().unwrap()).unwrap();
        assert_eq!((stores.stores.len(), stores.map.len()), (6, 3));
        let uri = "azureml:iris:1".parse().unwrap();
        assert_eq!(stores.place(&uri, Path::new("/x")).unwrap(), there("https://example.org/iris.csv"));
    }

    #[test]
    fn test_settings_belong_to_all_addresses_of_the_store_and_are_not_printed() {
        for uri in ["azureml://datastores/s3/paths/a", "s3://bucket/base/a"] {
            let DataPlace::There { url, options } = place(uri) else { panic!("{uri}") };
            assert_eq!(
                (url.as_str(), options["secret_access_key"].as_str()),
                ("s3://bucket/base/a", "hidden")
            );
        }
        assert_eq!(place("s3://bucket/based/a"), there("s3://bucket/based/a"));
        assert!(!format!("{:?}", parse(FILE).unwrap()).contains("hidden"));
    }

    const WRITABLE: &str = "
datastores:
  share: {path: /mnt/share, writable: true}
  read: {path: /mnt/read}
  s3: {url: 's3://bucket/base', secret_access_key: hidden, writable: true}
  inner: {url: 's3://bucket/base/kept', secret_access_key: other}
data_map:
  wasbs://data@acc.blob.core.windows.net/: /mnt/share/cloud
  s3://moved: s3://bucket/base
";

    fn target(uri: &str) -> Result<UploadTarget, StoresError> {
        let file = Path::new("/etc/data.yaml");
        parse(WRITABLE).unwrap().target(&uri.parse().unwrap(), Some((7, 8)), file)
    }

    #[test]
    fn test_outputs_are_sent_to_stores_that_are_writable_alone() {
        let folder = |path: &str| UploadTarget::Folder {
            root: "/mnt/share".into(),
            path: path.to_owned(),
            owner: Some((7, 8)),
        };
        assert_eq!(target("azureml://datastores/share/paths/ä b/%41").unwrap(), folder("ä b/%41"));
        let mapped = target("wasbs://data@acc.blob.core.windows.net/runs/1").unwrap();
        assert_eq!(mapped, folder("cloud/runs/1"));
        let options = || Options([("secret_access_key".to_owned(), "hidden".to_owned())].into());
        let store = |url: &str, path: &str| UploadTarget::Store {
            url: url.to_owned(),
            path: path.to_owned(),
            options: options(),
        };
        assert_eq!(target("azureml://datastores/s3/paths/a?b").unwrap(), store("s3://bucket/base", "a?b"));
        for uri in ["s3://bucket/base/a", "s3://moved/a"] {
            assert_eq!(target(uri).unwrap(), store("s3://bucket/base/a", ""), "{uri}");
        }
        for (uri, said) in [
            ("azureml://datastores/read/paths/a", "`read` is `writable`"),
            ("azureml://datastores/other/paths/a", "no data store `other`"),
            ("s3://bucket/base/kept/a", "no data store for s3://bucket/base/kept/a"),
            ("s3://bucket/elsewhere", "no data store for"),
            ("azureml:iris:1", "no data store for azureml:iris:1"),
        ] {
            let error = target(uri).unwrap_err().to_string();
            assert!(error.contains(said), "{uri}: {error}");
        }
    }

    #[test]
    fn test_unknown_stores_are_told_with_those_that_are_known() {
        let uri = "azureml://datastores/blob/paths/a".parse().unwrap();
        let error = parse(FILE).unwrap().place(&uri, Path::new("/etc/data.yaml")).unwrap_err().to_string();
        assert!(error.contains("`blob`") && error.ends_with("s3, share, web"), "{error}");
    }

    #[test]
    fn test_mistakes_name_their_place() {
        for (text, said) in [
            ("stores: {}\n", "line 1, column 1: unknown key `stores`"),
            ("datastores:\n  a: {}\n", "line 2, column 6: a data store has a `path` or a `url`"),
            ("datastores: {a: {path: x}}\n", "expected an absolute path or an address"),
            ("datastores: {a: {path: /x, key: y}}\n", "a `path` has no setting `key`"),
            ("datastores: {a: {path: /x, writable: maybe}}\n", "line 1, column 38"),
            ("datastores: {a: {url: 'https://h/a', writable: true}}\n", "needs settings with credentials"),
            ("datastores: {a: {url: 'https://u:p@h'}}\n", "it holds credentials"),
            ("data_map: {iris: /x}\n", "is neither the beginning of an address"),
            ("data_map: {'https://h': 'azureml://datastores/a'}\n", "cannot stand for another"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(said) && !error.contains("u:p"), "{error}");
        }
        assert_eq!(parse("").unwrap(), Stores::default());
    }

    #[test]
    fn test_credentials_come_from_files_and_are_not_for_everybody() {
        let dir = tempfile::tempdir().unwrap();
        let (file, key) = (dir.path().join("data.yaml"), dir.path().join("key"));
        std::fs::write(&key, "hidden\n").unwrap();
        std::fs::write(&file, format!("datastores: {{a: {{url: 's3://b', token_file: {}}}}}", key.display()))
            .unwrap();
        let set = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        set(0o644);
        assert!(matches!(Stores::read(&file), Err(StoresError::Open { .. })));
        set(0o600);
        let uri = "s3://b/x".parse().unwrap();
        let DataPlace::There { options, .. } = Stores::read(&file).unwrap().place(&uri, &file).unwrap()
        else {
            panic!()
        };
        assert_eq!(options, [("token".to_owned(), "hidden".to_owned())].into());
        assert_eq!(Stores::read(Path::new("/nowhere")).unwrap(), Stores::default());
    }
}
