//! Refuses packages that must not be installed.
//!
//! Owns the checks of a package's name and of its extracted files. Hides the many ways out of a directory.
//!
//! Invariants: no name, no listed path and no link of a package that passes leads out of the environment, whether the
//! link is listed as one or not, and over whatever other links of the package; what is listed as a file is one, and has
//! no name elsewhere. What two packages do together is for whoever links them.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use rattler_conda_types::PackageRecord;
use rattler_conda_types::package::PathType;

use agent_model::size::binary;

use super::package::{ListedFile, PackageInfo, Undescribed};
use super::tree::{self, EntryKind, OpenTree, PlainPath};

/// Why a package is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackageRefused {
    #[error("its {part} `{text}` is no name for a file")]
    Name { part: &'static str, text: String },
    #[error("it lists `{0}`, which lies outside of the environment")]
    Path(PathBuf),
    #[error("its link `{link}` leads to `{target}`, outside of the environment")]
    Link { link: PathBuf, target: PathBuf },
    #[error("it lists `{0}` as a file, which is a link or lies behind one")]
    Behind(PathBuf),
    #[error("its file `{0}` is also a file outside of it")]
    Shared(PathBuf),
    #[error("a file of it lies outside of the environment")]
    Escape,
    #[error("it asks for programs in a way that cannot be followed: {0}")]
    EntryPoints(String),
    #[error("`{0}` is a device, a pipe or a socket")]
    Special(PathBuf),
    #[error("it unpacks to more than {}, which is out of proportion to its {}", binary(*.limit), binary(*.size))]
    Bomb { limit: u64, size: u64 },
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] io::Error),
}

/// How many bytes a package of this size may unpack to.
pub(crate) fn limit(size: u64) -> u64 {
    (size.saturating_mul(200)).max(64 << 20)
}

/// Refuses a name, version or build that could be a path, or that of what completes another package.
pub(crate) fn record(record: &PackageRecord) -> Result<(), PackageRefused> {
    let (version, build) = (record.version.to_string(), record.build.to_string());
    for (part, text) in [("name", record.name.as_normalized()), ("version", &version), ("build", &build)] {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-+!~=".contains(c);
        let short = text.len() <= 128 && (!text.is_empty() || part == "build");
        if !short
            || !text.chars().all(plain)
            || text.contains("..")
            || text.starts_with(['.', '-'])
            || text.ends_with(".lock")
        {
            return Err(PackageRefused::Name { part, text: text.chars().take(80).collect() });
        }
    }
    Ok(())
}

/// Refuses an unpacked package that is not what it says, contains a way out of its directory, or is too large. The
/// modes of its files become those of files for all.
pub(crate) fn extracted(dir: &Path, limit: u64, size: u64) -> Result<(), PackageRefused> {
    let tree = OpenTree::open(dir)?;
    walk(&tree, limit, size)?;
    match PackageInfo::read(&tree) {
        Ok(package) => listed(&tree, &package)?,
        Err(Undescribed::Path(path)) => return Err(PackageRefused::Path(path)),
        Err(Undescribed::EntryPoints(error)) => return Err(PackageRefused::EntryPoints(error.to_string())),
        // A package without a description cannot be linked; that is found when it is checked.
        Err(Undescribed::Unreadable(_)) => {}
    }
    // Last: until here the files could have been somebody else's, too.
    tree.walk(&mut |met| {
        let mode = match met.kind {
            EntryKind::Directory => 0o755,
            EntryKind::File(_) => tree::mode_for_all(met.stat.st_mode),
            EntryKind::Link | EntryKind::Other => return Ok(()),
        };
        if met.stat.st_mode & 0o7777 != mode {
            met.set_mode(mode)?;
        }
        Ok(())
    })
}

/// Refuses links that lead out, files with a name elsewhere, what is no file, and too much of it all.
fn walk(tree: &OpenTree, limit: u64, size: u64) -> Result<(), PackageRefused> {
    let (mut bytes, mut names) = (0, HashMap::new());
    tree.walk(&mut |met| {
        match met.kind {
            EntryKind::File(len) => {
                bytes += len;
                if met.stat.st_nlink > 1 {
                    let file = (met.stat.st_dev, met.stat.st_ino);
                    names.entry(file).or_insert((0, met.stat.st_nlink, met.way.clone())).0 += 1;
                }
            }
            EntryKind::Link if tree.leads_out(met.way)? => {
                let (link, target) = (met.way.path().to_owned(), tree.target(met.way)?);
                return Err(PackageRefused::Link { link, target });
            }
            EntryKind::Other => return Err(PackageRefused::Special(met.way.path().to_owned())),
            EntryKind::Link | EntryKind::Directory => {}
        }
        if bytes > limit { Err(PackageRefused::Bomb { limit, size }) } else { Ok(()) }
    })?;
    match names.into_values().find(|(here, all, _)| here != all) {
        Some((_, _, way)) => Err(PackageRefused::Shared(way.path().to_owned())),
        None => Ok(()),
    }
}

/// Refuses a list that says of a link, or of what lies behind one, that it is a file. What is missing is found when the
/// package is checked.
fn listed(tree: &OpenTree, package: &PackageInfo) -> Result<(), PackageRefused> {
    let is_link = |way: &PlainPath| tree.kind(way).is_ok_and(|kind| kind == EntryKind::Link);
    for ListedFile { way, entry } in &package.listed {
        let patched = entry.prefix_placeholder.is_some();
        let is_other = match tree.kind(way) {
            Ok(kind) => kind == EntryKind::Link && (entry.path_type != PathType::SoftLink || patched),
            Err(_) => way.parents().any(|parent| is_link(&parent)),
        };
        if is_other {
            return Err(PackageRefused::Behind(way.path().to_owned()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn named(name: &str, version: &str, build: &str) -> Result<(), PackageRefused> {
        let json = serde_json::json!({"name": name, "version": version, "build": build, "build_number": 0,
            "subdir": "noarch", "depends": []});
        record(&serde_json::from_value(json).unwrap())
    }

    #[test]
    fn test_names_that_lead_somewhere_are_refused() {
        named("numpy", "1!2.0+local", "py311h_0").unwrap();
        named("_libgcc_mutex", "0.1", "conda_forge").unwrap();
        for (name, version, build) in [
            ("con/../x", "1", "0"),
            ("../x", "1", "0"),
            ("a", "1", "../0"),
            ("a", "1", "0/b"),
            ("a", "1", "0.lock"),
            (".a", "1", "0"),
        ] {
            assert!(
                matches!(named(name, version, build), Err(PackageRefused::Name { .. })),
                "{name} {version} {build}"
            );
        }
    }

    fn package(paths: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("info")).unwrap();
        std::fs::create_dir_all(dir.path().join("lib")).unwrap();
        let listed =
            format!(r#"{{"paths_version":1,"paths":[{{"_path":"{paths}","path_type":"hardlink"}}]}}"#);
        std::fs::write(dir.path().join("info/paths.json"), listed).unwrap();
        let index =
            r#"{"name":"a","version":"1","build":"0","build_number":0,"depends":[],"subdir":"noarch"}"#;
        std::fs::write(dir.path().join("info/index.json"), index).unwrap();
        dir
    }

    #[test]
    fn test_extracted_packages_that_lead_out_are_refused() {
        extracted(package("lib/a").path(), 1 << 20, 1).unwrap();
        let ways_out =
            ["../a", "lib/../../a", "/etc/a", "conda-meta/a.json", "./conda-meta/a", "conda-meta//a", ""];
        for path in ways_out {
            assert!(
                matches!(extracted(package(path).path(), 1 << 20, 1), Err(PackageRefused::Path(_))),
                "{path}"
            );
        }
        for target in ["../../x", "/etc/passwd", "l/../../x"] {
            let dir = package("lib/other");
            symlink(".", dir.path().join("lib/l")).unwrap();
            symlink(target, dir.path().join("lib/a")).unwrap();
            assert!(
                matches!(extracted(dir.path(), 1 << 20, 1), Err(PackageRefused::Link { .. })),
                "{target}"
            );
        }
    }

    #[test]
    fn test_what_is_listed_as_a_file_is_one() {
        let dir = package("lib/a");
        std::fs::write(dir.path().join("lib/b"), "b").unwrap();
        symlink("b", dir.path().join("lib/a")).unwrap();
        assert!(matches!(extracted(dir.path(), 1 << 20, 1), Err(PackageRefused::Behind(_))));
        let dir = package("lib/l/a");
        std::fs::write(dir.path().join("lib/a"), "b").unwrap();
        symlink(".", dir.path().join("lib/l")).unwrap();
        assert!(matches!(extracted(dir.path(), 1 << 20, 1), Err(PackageRefused::Behind(_))));
    }

    #[test]
    fn test_files_of_others_are_refused_and_keep_their_mode() {
        let (dir, other) = (package("lib/a"), tempfile::NamedTempFile::new_in("/tmp").unwrap());
        std::fs::write(dir.path().join("lib/c"), "c").unwrap();
        std::fs::hard_link(dir.path().join("lib/c"), dir.path().join("lib/d")).unwrap();
        std::fs::set_permissions(dir.path().join("lib/c"), Permissions::from_mode(0o4777)).unwrap();
        extracted(dir.path(), 1 << 20, 1).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&dir.path().join("lib/d")), 0o755);
        std::fs::hard_link(other.path(), dir.path().join("lib/a")).unwrap();
        assert!(matches!(extracted(dir.path(), 1 << 20, 1), Err(PackageRefused::Shared(_))));
        assert_eq!(mode(other.path()), 0o600);
    }

    #[test]
    fn test_bombs_are_refused() {
        let dir = package("lib/a");
        std::fs::File::create(dir.path().join("lib/a")).unwrap().set_len(1 << 30).unwrap();
        assert!(matches!(extracted(dir.path(), limit(100), 100), Err(PackageRefused::Bomb { .. })));
        assert_eq!(limit(1 << 30), 200 << 30);
    }
}
