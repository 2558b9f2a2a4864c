//! The database as a file: how it is opened, what its errors mean, and its names while it is open.
//!
//! Somebody may remove them or put others in their place. SQLite goes on with the files that it has, which nobody can
//! open any more, so all that is written after that ends with the process. Invariant: nothing here opens a file of the
//! database, because to close one would give up the locks that SQLite has on it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use agent_model::failpoint;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

/// How long a read may wait for a checkpoint.
const BUSY: Duration = Duration::from_secs(5);

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

/// The file beside `path` whose name ends in `suffix`.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

pub(super) fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(BUSY)
}

pub(super) async fn connect(options: SqliteConnectOptions) -> Result<SqlitePool, sqlx::Error> {
    SqlitePoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .connect_with(options)
        .await
}

/// SQLite's own message, without the prefix of the library.
pub(super) fn words(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}

/// SQLite's number of an error of its own.
fn code_of(error: &sqlx::Error) -> Option<u32> {
    error.as_database_error()?.code()?.parse().ok()
}

/// Whether SQLite found that the file is none of its own, or has been changed by somebody else.
pub(super) fn is_malformed(error: &sqlx::Error) -> bool {
    const CORRUPT: u32 = 11;
    const NOT_A_DATABASE: u32 = 26;
    const SHORT_READ: u32 = 522;
    let is = |code: u32| matches!(code & 0xff, CORRUPT | NOT_A_DATABASE) || code == SHORT_READ;
    code_of(error).is_some_and(is)
}

/// Whether an error is about the content of the file, not about the disk or access rights.
pub(super) fn is_damage(error: &sqlx::Error) -> bool {
    const ERROR: u32 = 1;
    match error {
        sqlx::Error::Database(_) => {
            is_malformed(error) || code_of(error).is_none_or(|code| code & 0xff == ERROR)
        }
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. } => true,
        _ => false,
    }
}

/// Whether the disk had no room for a commit to the database at `path`.
pub(super) fn is_full(error: &sqlx::Error, path: &Path) -> bool {
    match error {
        sqlx::Error::Database(error) => {
            let code = error.code().and_then(|code| code.parse().ok());
            code.is_some_and(|code| agent_fs::is_full_for_sqlite(code, path))
        }
        sqlx::Error::Io(error) => agent_fs::is_full(error),
        _ => false,
    }
}

pub(super) fn random_name() -> Result<String, sqlx::Error> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| sqlx::Error::Io(io::Error::other(error.to_string())))?;
    Ok(agent_model::ids::hex(&bytes))
}
