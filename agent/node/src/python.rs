//! Which Python jobs would get, and whether it could make virtual environments. Guessed from files: nothing is run.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What the files show.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Python {
    /// Where it was found.
    pub(crate) path: PathBuf,
    /// Its version as far as file names show it, for example `3.10`.
    pub(crate) version: Option<String>,
    /// Whether the files of `venv` and `ensurepip` are there, if it is known where to look.
    pub(crate) venv: Option<bool>,
}

/// The first `python3` of a search path.
pub(crate) fn find(search: &str) -> Option<Python> {
    let path = search.split(':').filter(|dir| dir.starts_with('/')).map(|dir| Path::new(dir).join("python3"));
    let path = path.into_iter().find(|path| is_executable(path))?;
    let library = interpreter(&path).as_deref().and_then(library);
    let (version, venv) = match library {
        Some((version, library)) => {
            let has = |module: &str| library.join(module).join("__init__.py").is_file();
            (Some(version), Some(has("venv") && has("ensurepip")))
        }
        None => (None, None),
    };
    Some(Python { path, version, venv })
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// The file behind a name. A version manager puts scripts into a folder `shims`, and beside that folder a file
/// that names the version they start.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let folder = path.parent()?;
    if folder.file_name()? == "shims" {
        let manager = folder.parent()?;
        let version = std::fs::read_to_string(manager.join("version")).ok()?;
        return manager
            .join("versions")
            .join(version.lines().next()?.trim())
            .join("bin/python3")
            .canonicalize()
            .ok();
    }
    path.canonicalize().ok()
}

/// `PREFIX/bin/pythonX.Y` has its library at `PREFIX/lib/pythonX.Y`.
fn library(interpreter: &Path) -> Option<(String, PathBuf)> {
    let name = interpreter.file_name()?.to_str()?;
    let version = name.strip_prefix("python").filter(|version| version.contains('.'))?;
    let library = interpreter.parent()?.parent()?.join("lib").join(name);
    library.is_dir().then(|| (version.to_owned(), library))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn executable(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn modules(prefix: &Path, names: &[&str]) {
        for name in names {
            let dir = prefix.join("lib/python3.10").join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("__init__.py"), "").unwrap();
        }
    }

    #[test]
    fn test_distribution_python_without_ensurepip_cannot_make_environments() {
        let root = tempfile::tempdir().unwrap();
        let usr = root.path().join("usr");
        executable(&usr.join("bin/python3.10"));
        symlink("python3.10", usr.join("bin/python3")).unwrap();
        modules(&usr, &["venv"]);
        let search = format!("relative:{}", usr.join("bin").display());
        let found = find(&search).unwrap();
        assert_eq!((found.version.as_deref(), found.venv), (Some("3.10"), Some(false)));
        modules(&usr, &["ensurepip"]);
        assert_eq!(find(&search).unwrap().venv, Some(true));
    }

    #[test]
    fn test_script_of_a_version_manager_is_followed() {
        let root = tempfile::tempdir().unwrap();
        executable(&root.path().join("shims/python3"));
        let search = root.path().join("shims").display().to_string();
        assert_eq!(find(&search).unwrap().version, None);
        let version = root.path().join("versions/3.10.4");
        executable(&version.join("bin/python3.10"));
        symlink("python3.10", version.join("bin/python3")).unwrap();
        modules(&version, &["venv", "ensurepip"]);
        fs::write(root.path().join("version"), "3.10.4\n").unwrap();
        let found = find(&search).unwrap();
        assert_eq!((found.version.as_deref(), found.venv), (Some("3.10"), Some(true)));
    }

    #[test]
    fn test_no_python_is_none() {
        assert_eq!(find("/nowhere:"), None);
    }
}
