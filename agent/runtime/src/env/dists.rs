//! The Python packages in an environment, as their installers noted them in `site-packages`.
//!
//! Read from files, without starting an interpreter: name and version from the name of a folder, its installer, and
//! its origin if that was a URL.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::Path;

use serde::Deserialize;

/// A Python package that is installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Dist {
    pub(super) name: String,
    pub(super) version: String,
    /// `conda`, `pip`, `uv` or nothing.
    installer: String,
    /// Its origin, if that was a URL and not an index.
    url: Option<String>,
    sha256: Option<String>,
}

/// The Python packages of an environment, by normalised name.
pub(super) type Dists = BTreeMap<String, Dist>;

#[derive(Deserialize)]
struct DirectUrl {
    url: String,
    archive_info: Option<ArchiveInfo>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ArchiveInfo {
    hash: Option<String>,
    hashes: HashMap<String, String>,
}

impl ArchiveInfo {
    fn sha256(self) -> Option<String> {
        let old = self.hash.as_deref().and_then(|hash| hash.strip_prefix("sha256=")).map(str::to_owned);
        self.hashes.get("sha256").cloned().or(old)
    }
}

/// A name in normalised form.
pub(super) fn same(name: &str) -> String {
    let mut plain = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '-' | '_' | '.' if plain.ends_with('-') => {}
            '-' | '_' | '.' => plain.push('-'),
            c => plain.push(c.to_ascii_lowercase()),
        }
    }
    plain
}

/// The largest file of a package's description that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// The packages installed below a prefix. What is there was made by a builder, and is read only as far as it is beneath.
pub(super) fn dists(prefix: &Path) -> Dists {
    let Ok(root) = agent_fs::open_directory(prefix) else { return Dists::new() };
    let names = |path: &Path| agent_fs::names_beneath(&root, path).unwrap_or_default();
    let lib = Path::new("lib");
    let folders = names(lib).into_iter().map(|python| lib.join(python).join("site-packages"));
    let paths = folders.flat_map(|folder| names(&folder).into_iter().map(move |name| folder.join(name)));
    paths.filter_map(|path| dist(&root, &path)).map(|dist| (same(&dist.name), dist)).collect()
}

fn dist(root: &OwnedFd, path: &Path) -> Option<Dist> {
    let (name, version) = path.file_name()?.to_str()?.strip_suffix(".dist-info")?.rsplit_once('-')?;
    let read = |name: &str| agent_fs::read_beneath(root, path.join(name), LARGEST).ok();
    let installer = String::from_utf8_lossy(&read("INSTALLER").unwrap_or_default()).trim().to_owned();
    let direct = read("direct_url.json");
    let direct: Option<DirectUrl> = direct.and_then(|text| serde_json::from_slice(&text).ok());
    let (url, info) = direct.map(|direct| (direct.url, direct.archive_info)).unzip();
    let sha256 = info.flatten().and_then(ArchiveInfo::sha256);
    Some(Dist { name: name.to_owned(), version: version.to_owned(), installer, url, sha256 })
}

/// The difference between two looks: new packages, and packages of conda that were replaced by one of them.
pub(super) fn changes<'a>(before: &'a Dists, after: &'a Dists) -> (Vec<&'a Dist>, Vec<(&'a Dist, &'a Dist)>) {
    let new: Vec<(&String, &Dist)> =
        after.iter().filter(|(name, dist)| before.get(*name) != Some(dist)).collect();
    let replaced = new.iter().filter_map(|(name, dist)| {
        let old = before.get(*name).filter(|old| old.installer == "conda")?;
        Some((old, *dist))
    });
    let replaced = replaced.collect();
    (new.into_iter().map(|(_, dist)| dist).collect(), replaced)
}

/// The hashes that an installer reported, by the name of the package.
pub(super) type Hashes = HashMap<String, Vec<String>>;

/// The line of a lock that installs the same package again.
pub(super) fn locked(dist: &Dist, hashes: &Hashes) -> String {
    let Dist { name, version, url, sha256, .. } = dist;
    if let Some(url) = url {
        let fragment = sha256.as_ref().map(|hex| format!("#sha256={hex}")).unwrap_or_default();
        return format!("{name} @ {url}{fragment}");
    }
    let hashes = hashes.get(&same(name)).into_iter().flatten();
    hashes.fold(format!("{name}=={version}"), |line, hash| format!("{line} --hash=sha256:{hash}"))
}

/// Reads pip's report of an installation (`--report`).
pub(super) fn hashes_of_report(text: &[u8]) -> Hashes {
    #[derive(Deserialize)]
    struct Report {
        install: Vec<Item>,
    }
    #[derive(Deserialize)]
    struct Item {
        download_info: Download,
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Download {
        archive_info: Option<ArchiveInfo>,
    }
    #[derive(Deserialize)]
    struct Metadata {
        name: String,
    }
    let items = serde_json::from_slice::<Report>(text).map(|report| report.install).unwrap_or_default();
    let of = |item: Item| Some((same(&item.metadata.name), vec![item.download_info.archive_info?.sha256()?]));
    items.into_iter().filter_map(of).collect()
}

/// Reads uv's output for frozen requirements (`pip compile --generate-hashes`): each package on lines of its own.
pub(super) fn hashes_of_list(text: &str) -> Hashes {
    let mut hashes = Hashes::new();
    let mut current = None;
    for line in text.lines().map(|line| line.trim().trim_end_matches('\\').trim_end()) {
        if let Some((name, _)) = line.split_once("==").filter(|_| !line.starts_with(['-', '#'])) {
            current = Some(same(name));
        }
        for word in line.split_whitespace() {
            if let (Some(name), Some(hash)) = (&current, word.strip_prefix("--hash=sha256:")) {
                hashes.entry(name.clone()).or_default().push(hash.to_owned());
            }
        }
    }
    hashes
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn install(prefix: &Path, folder: &str, installer: &str) -> PathBuf {
        let path = prefix.join("lib/python3.11/site-packages").join(folder);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("INSTALLER"), installer).unwrap();
        path
    }

    #[test]
    fn test_what_came_and_what_it_replaced_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        install(dir.path(), "numpy-1.26.4.dist-info", "conda\n");
        install(dir.path(), "scipy-1.11.0.dist-info", "conda");
        let before = dists(dir.path());
        fs::remove_dir_all(dir.path().join("lib/python3.11/site-packages/numpy-1.26.4.dist-info")).unwrap();
        install(dir.path(), "NumPy-2.0.0.dist-info", "pip\n");
        let path = install(dir.path(), "My_Own.pkg-1.dist-info", "uv");
        let direct =
            r#"{"url": "https://h/My_Own.pkg-1-py3-none-any.whl", "archive_info": {"hash": "sha256=ab"}}"#;
        fs::write(path.join("direct_url.json"), direct).unwrap();
        let after = dists(dir.path());
        let (new, replaced) = changes(&before, &after);
        let hashes = hashes_of_list("numpy==2.0.0 \\\n    --hash=sha256:01 \\\n    --hash=sha256:02\n");
        let lines: Vec<String> = new.iter().map(|dist| locked(dist, &hashes)).collect();
        assert_eq!(
            lines,
            [
                "My_Own.pkg @ https://h/My_Own.pkg-1-py3-none-any.whl#sha256=ab",
                "NumPy==2.0.0 --hash=sha256:01 --hash=sha256:02"
            ]
        );
        let [(old, now)] = replaced[..] else { panic!("{replaced:?}") };
        assert_eq!((old.version.as_str(), now.version.as_str()), ("1.26.4", "2.0.0"));
    }

    #[test]
    fn test_report_of_pip_gives_hashes() {
        let report = r#"{"install": [
            {"download_info": {"url": "x", "archive_info": {"hashes": {"sha256": "0a"}}}, "metadata": {"name": "A_b"}},
            {"download_info": {"url": "y", "dir_info": {}}, "metadata": {"name": "c"}}]}"#;
        assert_eq!(
            hashes_of_report(report.as_bytes()),
            Hashes::from([("a-b".to_owned(), vec!["0a".to_owned()])])
        );
        assert!(hashes_of_report(b"nothing").is_empty());
    }
}
