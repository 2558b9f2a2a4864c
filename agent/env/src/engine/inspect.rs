//! Refuses packages that must not be installed.
//!
//! Owns the checks of a package's name and of its extracted files. Hides the many ways out of a directory.
//!
//! Invariants: no name, no listed path and no link of a package that passes leads out of the environment, whether the
//! link is listed as one or not.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use rattler_conda_types::PackageRecord;
use rattler_conda_types::package::{LinkJson, PackageFile};

use agent_model::size::decimal;

use super::cache;

/// Why a package is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackageRefused {
    /// Its name, version or build is no valid file name.
    #[error("its {part} `{text}` is no name for a file")]
    Name { part: &'static str, text: String },
    /// A listed path leads out of it.
    #[error("it lists `{0}`, which lies outside of the environment")]
    Path(PathBuf),
    /// A link leads out of it.
    #[error("its link `{link}` leads to `{target}`, outside of the environment")]
    Link { link: PathBuf, target: PathBuf },
    /// A file of it lies outside, by its name or through a link.
    #[error("a file of it lies outside of the environment")]
    Escape,
    /// Its description of entry points cannot be read.
    #[error("it asks for programs in a way that cannot be followed: {0}")]
    EntryPoints(String),
    /// Something that is no file, directory or link.
    #[error("`{0}` is a device, a pipe or a socket")]
    Special(PathBuf),
    /// It unpacks to far more than its size allows.
    #[error("it unpacks to more than {}, which is out of proportion to its {}", decimal(*.limit), decimal(*.size))]
    Bomb { limit: u64, size: u64 },
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] io::Error),
}

/// How many bytes a package of this size may unpack to.
pub(crate) fn limit(size: u64) -> u64 {
    (size.saturating_mul(200)).max(64 << 20)
}

/// Refuses a name, version or build that could be a path.
pub(crate) fn record(record: &PackageRecord) -> Result<(), PackageRefused> {
    let (version, build) = (record.version.to_string(), record.build.to_string());
    for (part, text) in [("name", record.name.as_normalized()), ("version", &version), ("build", &build)] {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-+!~=".contains(c);
        let short = text.len() <= 128 && (!text.is_empty() || part == "build");
        if !short || !text.chars().all(plain) || text.contains("..") || text.starts_with(['.', '-']) {
            return Err(PackageRefused::Name { part, text: text.chars().take(80).collect() });
        }
    }
    Ok(())
}

/// Refuses an extracted package that contains a way out of its directory, or is too large.
pub(crate) fn extracted(dir: &Path, limit: u64, size: u64) -> Result<(), PackageRefused> {
    // A package without a list of paths cannot be linked; that is found when it is checked.
    if let Ok(paths) = cache::paths(dir) {
        for entry in &paths.paths {
            let inside = entry
                .relative_path
                .components()
                .all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
            let own = !entry.relative_path.starts_with("conda-meta");
            if !inside || !own || entry.relative_path.as_os_str().is_empty() {
                return Err(PackageRefused::Path(entry.relative_path.clone()));
            }
        }
    }
    match LinkJson::from_package_directory(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(PackageRefused::EntryPoints(error.to_string()));
        }
        _ => {}
    }
    let mut bytes = 0;
    walk(dir, Path::new(""), &mut |path, kind, len| {
        bytes += len;
        if bytes > limit {
            return Err(PackageRefused::Bomb { limit, size });
        }
        if kind.is_symlink() {
            let target = std::fs::read_link(dir.join(path))?;
            if !stays_inside(path, &target) {
                return Err(PackageRefused::Link { link: path.to_owned(), target });
            }
        } else if kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
            return Err(PackageRefused::Special(path.to_owned()));
        }
        Ok(())
    })
}

fn walk(
    root: &Path,
    below: &Path,
    visit: &mut impl FnMut(&Path, FileType, u64) -> Result<(), PackageRefused>,
) -> Result<(), PackageRefused> {
    for entry in std::fs::read_dir(root.join(below))? {
        let entry = entry?;
        let (path, kind) = (below.join(entry.file_name()), entry.file_type()?);
        let len = if kind.is_file() { entry.metadata()?.len() } else { 0 };
        visit(&path, kind, len)?;
        if kind.is_dir() {
            walk(root, &path, visit)?;
        }
    }
    Ok(())
}

/// Whether the link at `link`, relative to a package, stays in that package, judged by its target's text alone.
fn stays_inside(link: &Path, target: &Path) -> bool {
    let mut depth = link.components().count().saturating_sub(1);
    for component in target.components() {
        match component {
            Component::Normal(_) => depth += 1,
            Component::CurDir => {}
            Component::ParentDir if depth > 0 => depth -= 1,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
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
            (".a", "1", "0"),
        ] {
            assert!(
                matches!(named(name, version, build), Err(PackageRefused::Name { .. })),
                "{name} {version} {build}"
            );
        }
    }

    #[test]
    fn test_links_stay_in_their_package() {
        for (link, target, inside) in [
            ("lib/a.so", "a.so.1", true),
            ("lib/x/a", "../../bin/b", true),
            ("bin/a", "../../etc/passwd", false),
            ("a", "/etc/passwd", false),
            ("a", "..", false),
            ("lib/a", "b/../../c", true),
            ("lib/a", "b/../../../c", false),
        ] {
            assert_eq!(stays_inside(Path::new(link), Path::new(target)), inside, "{link} -> {target}");
        }
    }

    fn package(paths: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("info")).unwrap();
        std::fs::create_dir_all(dir.path().join("lib")).unwrap();
        let listed =
            format!(r#"{{"paths_version":1,"paths":[{{"_path":"{paths}","path_type":"hardlink"}}]}}"#);
        std::fs::write(dir.path().join("info/paths.json"), listed).unwrap();
        dir
    }

    #[test]
    fn test_extracted_packages_that_lead_out_are_refused() {
        extracted(package("lib/a").path(), 1 << 20, 1).unwrap();
        for path in ["../a", "lib/../../a", "/etc/a", "conda-meta/a.json"] {
            assert!(
                matches!(extracted(package(path).path(), 1 << 20, 1), Err(PackageRefused::Path(_))),
                "{path}"
            );
        }
        let dir = package("lib/a");
        std::os::unix::fs::symlink("../../x", dir.path().join("lib/a")).unwrap();
        assert!(matches!(extracted(dir.path(), 1 << 20, 1), Err(PackageRefused::Link { .. })));
    }

    #[test]
    fn test_bombs_are_refused() {
        let dir = package("lib/a");
        std::fs::File::create(dir.path().join("lib/a")).unwrap().set_len(1 << 30).unwrap();
        assert!(matches!(extracted(dir.path(), limit(100), 100), Err(PackageRefused::Bomb { .. })));
        assert_eq!(limit(1 << 30), 200 << 30);
    }
}
