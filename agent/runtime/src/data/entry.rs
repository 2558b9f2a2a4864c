//! The directory of an entry: written, found again and removed.
//!
//! Invariants: `entry.json` is written before the directory gets its final name; a time of last use is the time of that
//! file's last change.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

#[cfg(test)]
use agent_env::Fetch;
use agent_env::Fetched;
use agent_model::failpoint;
use serde::{Deserialize, Serialize};

use super::{DataError, DataSource, KeptData, PART};
use crate::env::Builder;

const FILE: &str = "entry.json";
/// The prefix of the name of a removed entry.
const TRASH: &str = ".trash-";

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) url: String,
    pub(super) is_file: bool,
    pub(super) version: Option<String>,
    files: u64,
    bytes: u64,
}

impl Entry {
    pub(super) fn of(source: &DataSource, fetched: &Fetched) -> Entry {
        Entry {
            url: source.url.clone(),
            is_file: source.is_file,
            version: fetched.version.clone(),
            files: fetched.files,
            bytes: fetched.bytes,
        }
    }

    /// The entry in a directory; `None` if it is absent or not readable, so that it is fetched anew.
    pub(super) fn read(place: &Path) -> Option<Entry> {
        serde_json::from_slice(&fs::read(place.join(FILE)).ok()?).ok()
    }

    pub(super) fn fetched(&self) -> Fetched {
        Fetched { is_new: false, version: self.version.clone(), files: self.files, bytes: self.bytes }
    }

    /// Notes that it is used now.
    pub(super) fn touch(&self, place: &Path) {
        let path = place.join(FILE);
        let file = File::options().write(true).open(&path);
        if let Err(error) = file.and_then(|file| rustix_now(&file)) {
            tracing::debug!(path = %path.display(), %error, "cannot note the use of data");
        }
    }

    /// Makes the finished part of `key` its entry, in place of an older one.
    pub(super) fn keep(&self, root: &Path, key: &str, builder: Option<&Builder>) -> Result<(), DataError> {
        let (part, place) = (root.join(format!("{PART}{key}")), root.join(key));
        let written = || -> io::Result<()> {
            failpoint::hit("env.data.keep")?;
            builder.map_or(Ok(()), |builder| builder.take_back(&part))?;
            make_readable(&part)?;
            agent_fs::write_durable(&part.join(FILE), &serde_json::to_vec(self)?)?;
            fs::set_permissions(part.join(FILE), Permissions::from_mode(0o600))
        };
        written().map_err(DataError::file("keep", &part))?;
        if place.exists() {
            remove(root, key)?;
        }
        let moved = fs::rename(&part, &place).and_then(|()| agent_fs::flush_directory(root));
        moved.map_err(DataError::file("keep", &place))
    }
}

/// Sets the time of last change of an open file.
fn rustix_now(file: &File) -> io::Result<()> {
    use rustix::fs::{Timespec, Timestamps, UTIME_NOW};
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Ok(rustix::fs::futimens(file, &Timestamps { last_access: now, last_modification: now })?)
}

/// All may read the files, and nobody may write; the directories above keep strangers out.
fn make_readable(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            make_readable(&entry.path())?;
            fs::set_permissions(entry.path(), Permissions::from_mode(0o755))?;
        } else if kind.is_file() {
            fs::set_permissions(entry.path(), Permissions::from_mode(0o444))?;
        }
    }
    Ok(())
}

/// Builders must be able to reach their part; nobody can list what there is.
pub(super) fn pass_only(root: &Path) -> io::Result<()> {
    fs::set_permissions(root, Permissions::from_mode(0o711))
}

/// The one file of an entry that is a file.
pub(super) fn only_file(data: &Path) -> PathBuf {
    data.join("file")
}

/// Everything that is kept.
pub(super) fn list(root: &Path) -> io::Result<Vec<KeptData>> {
    let mut kept = Vec::new();
    for found in fs::read_dir(root)? {
        let found = found?;
        let Ok(key) = found.file_name().into_string() else { continue };
        if key.starts_with(TRASH) {
            continue;
        }
        let path = found.path();
        let mark = match key.starts_with(PART) {
            true => path.clone(),
            false => path.join(FILE),
        };
        let used = mark.metadata().and_then(|mark| mark.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let url = Entry::read(&path).map(|entry| entry.url).unwrap_or_default();
        kept.push(KeptData { url, bytes: taken(&path), used, is_in_use: false, key });
    }
    Ok(kept)
}

/// How much of the disk a tree takes; what cannot be looked at counts nothing.
fn taken(path: &Path) -> u64 {
    let Ok(found) = path.symlink_metadata() else { return 0 };
    let below =
        || fs::read_dir(path).map(|entries| entries.flatten().map(|entry| taken(&entry.path())).sum());
    found.blocks() * 512 + if found.is_dir() { below().unwrap_or(0) } else { 0 }
}

/// Removes an entry: out of the way at once, its files then.
pub(super) fn remove(root: &Path, key: &str) -> Result<(), DataError> {
    let (path, trash) = (root.join(key), root.join(format!("{TRASH}{key}")));
    let gone = || -> io::Result<()> {
        agent_spawn::remove_tree(&trash)?;
        failpoint::hit("env.data.remove")?;
        match fs::rename(&path, &trash) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            moved => moved.and_then(|()| agent_spawn::remove_tree(&trash)),
        }
    };
    gone().map_err(DataError::file("remove", &path))
}

/// Removes what an earlier process was removing.
pub(super) fn empty_trash(root: &Path) -> io::Result<()> {
    for found in fs::read_dir(root)? {
        let found = found?;
        if found.file_name().to_string_lossy().starts_with(TRASH) {
            agent_spawn::remove_tree(&found.path())?;
        }
    }
    Ok(())
}

/// The folder of the data below a part, as the program that fetches names it.
#[cfg(test)]
pub(super) fn part_data(root: &Path, key: &str) -> PathBuf {
    root.join(format!("{PART}{key}")).join(Fetch::DATA)
}
