//! The names of the database's files while it is open.
//!
//! Somebody may remove them or put others in their place. SQLite goes on with the files that it has, which nobody can
//! open any more, so all that is written after that ends with the process. Invariant: nothing here opens a file of the
//! database, because to close one would give up the locks that SQLite has on it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use agent_model::failpoint;

use super::sqlite::with_suffix;

/// Device and number.
type FileId = (u64, u64);

/// The files of a database as they were when it was opened.
#[derive(Debug)]
pub(super) struct Names(Vec<(PathBuf, FileId)>);

impl Names {
    /// Those of the database at `path`, which is open.
    pub(super) fn of(path: &Path) -> Names {
        let names = ["", "-wal"].map(|suffix| with_suffix(path, suffix));
        Names(names.into_iter().filter_map(|name| Some((name.clone(), id_of(&name)?))).collect())
    }

    /// One that does not lead to the open file any more.
    pub(super) fn lost(&self) -> Option<&Path> {
        let lost = self.0.iter().find(|(name, id)| id_of(name) != Some(*id));
        lost.map(|(name, _)| name.as_path())
    }
}

fn id_of(name: &Path) -> Option<FileId> {
    fs::symlink_metadata(name).ok().map(|file| (file.dev(), file.ino()))
}

/// Gives a complete database at `new` the name `path`. What stands there meanwhile is kept beside it.
pub(super) fn take_place(new: &Path, path: &Path) -> io::Result<()> {
    failpoint::hit("control.store.name")?;
    fs::File::open(new)?.sync_all()?; // nobody has opened this one before
    // The log of another database must not be taken for one of the new.
    for suffix in ["-wal", "-shm"] {
        let name = with_suffix(path, suffix);
        fs::remove_file(&name).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            io::ErrorKind::IsADirectory => fs::rename(&name, with_suffix(&name, ".found")),
            _ => Err(error),
        })?;
    }
    match fs::rename(path, with_suffix(path, ".found")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::rename(new, path)?;
    agent_fs::flush_directory(path.parent().unwrap_or(Path::new(".")))
}
