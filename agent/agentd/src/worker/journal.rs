//! The replicas that this node holds, stored across restarts of the daemon.
//!
//! Owns: `journal.db`, one row for each replica that the node is still responsible for. Hides: SQL, fsync, damage.
//!
//! Invariants: a record is written when [`Journal::enter`] returns, before the step it names begins, and outlives the
//! process; it outlives a power cut too if [another boot needs it](Record::is_for_another_boot); every step can be
//! repeated from its record; a record that is not exactly what was written is never used: it is set aside, and so is an
//! unreadable file. Neither loses a replica whose directory exists, because `worker::recover` finds it there.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use agent_cas::digest_of;
pub(crate) use agent_model::protocol::record::{Ending, Record};
use agent_model::{ReplicaId, failpoint};
use futures_util::future::BoxFuture;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteLockingMode, SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row};
use tokio::sync::Mutex;
use tracing::{error, warn};

/// Why an operation of the journal failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("cannot open the journal {}", path.display())]
    Open { path: PathBuf, source: sqlx::Error },
    #[error("the journal {} has version {found}; this program knows {VERSION}", path.display())]
    Newer { path: PathBuf, found: i64 },
    #[error("cannot set the damaged journal {} aside", path.display())]
    SetAside { path: PathBuf, source: std::io::Error },
    #[error("cannot write the journal record of {replica}")]
    Write {
        /// Whose.
        replica: ReplicaId,
        source: sqlx::Error,
    },
    #[error("the disk did not take the journal record of {replica}")]
    Disk {
        /// Whose.
        replica: ReplicaId,
        source: io::Error,
    },
    #[error("cannot read the journal")]
    Read(#[source] sqlx::Error),
}

impl JournalError {
    fn write(replica: &ReplicaId, journal: &Path, source: sqlx::Error) -> JournalError {
        let replica = replica.clone();
        match primary(&source).is_some_and(|(_, whole)| agent_fs::is_full_for_sqlite(whole, journal)) {
            true => JournalError::Disk { replica, source: io::Error::new(ErrorKind::StorageFull, source) },
            false => JournalError::Write { replica, source },
        }
    }

    /// There was no room for the record; it may fit when ballast is released.
    pub(crate) fn is_full(&self) -> bool {
        match self {
            JournalError::Disk { source, .. } | JournalError::SetAside { source, .. } => {
                agent_fs::is_full(source)
            }
            _ => false,
        }
    }
}

/// Stores each step of each replica.
pub(crate) trait Journal: Send + Sync + 'static {
    /// Stores the record. When this returns, it outlives the process, and a power cut if another boot needs it.
    fn enter<'a>(&'a self, record: &'a Record) -> BoxFuture<'a, Result<(), JournalError>>;

    /// Forgets a replica. After a power cut it may be there again; its controller then says once more to forget it.
    fn done<'a>(&'a self, replica: &'a ReplicaId) -> BoxFuture<'a, Result<(), JournalError>>;

    /// Every replica that was entered and is not done.
    fn open_replicas(&self) -> BoxFuture<'_, Result<Vec<Record>, JournalError>>;
}

/// The journal of a running daemon.
pub(crate) struct Sqlite {
    path: PathBuf,
    writer: Mutex<Committer>,
}

struct Committer {
    connection: SqliteConnection,
    /// Whether its commits are forced to the disk now.
    forced: bool,
}

impl Committer {
    /// The connection, whose commits are forced to the disk or not. One that is not is in the write-ahead log, with its
    /// checksum, when it returns: a power cut may take it and those that follow, and nothing else.
    async fn committing(&mut self, forced: bool) -> Result<&mut SqliteConnection, sqlx::Error> {
        if self.forced != forced {
            let how = if forced { "PRAGMA synchronous = FULL" } else { "PRAGMA synchronous = NORMAL" };
            sqlx::raw_sql(how).execute(&mut self.connection).await?;
            self.forced = forced;
        }
        Ok(&mut self.connection)
    }
}

/// The version of the layout, as `PRAGMA user_version` has it. Fields that a record gets need no higher one.
const VERSION: i64 = 2;

/// The layout of the tables. The step is stored outside the record too, so that people can read it; `sum` is the
/// digest of the record, and is empty where a daemon of version 1 wrote it.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS replica (id TEXT PRIMARY KEY, step TEXT NOT NULL, record TEXT NOT NULL) STRICT;
    CREATE TABLE IF NOT EXISTS set_aside (id TEXT NOT NULL, record TEXT NOT NULL, reason TEXT NOT NULL) STRICT;
";
const ADD_SUM: &str = "
    BEGIN IMMEDIATE;
    ALTER TABLE replica ADD COLUMN sum TEXT NOT NULL DEFAULT '';
    PRAGMA user_version = 2;
    COMMIT;
";

impl Sqlite {
    /// Opens the journal, or begins a new one where there is none or where the old one is damaged; the
    /// damaged file is kept beside it. One of a later version is refused and stays as it is.
    pub(crate) async fn open(path: &Path) -> Result<Sqlite, JournalError> {
        let connection = match connect(path).await {
            Err(JournalError::Open { source: damage, .. }) if is_damage(&damage) => {
                let kept = set_file_aside(path)?;
                error!(error = %damage, kept = %kept.display(), "cannot read journal: finding replicas by their directories");
                connect(path).await
            }
            opened => opened,
        };
        let writer = Mutex::new(Committer { connection: connection?, forced: true });
        Ok(Sqlite { path: path.to_owned(), writer })
    }
}

async fn connect(path: &Path) -> Result<SqliteConnection, JournalError> {
    let open = |source| JournalError::Open { path: path.to_owned(), source };
    let mut connection = connect_checked(path).await.map_err(open)?;
    let version = sqlx::query_scalar("PRAGMA user_version").fetch_one(&mut connection).await.map_err(open)?;
    if version > VERSION {
        let _ = connection.close().await;
        return Err(JournalError::Newer { path: path.to_owned(), found: version });
    }
    bring_up_to_date(&mut connection, version).await.map_err(open)?;
    Ok(connection)
}

/// A connection to a file that is a sound database, or empty.
async fn connect_checked(path: &Path) -> Result<SqliteConnection, sqlx::Error> {
    // Its side files get its mode; records contain what jobs are given, so nobody else may read them.
    File::options().create(true).append(true).mode(0o600).open(path)?;
    let mut connection = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        // The daemon alone has it open: so there is no shared memory in a file, whose loss would end the daemon.
        .locking_mode(SqliteLockingMode::Exclusive)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .disable_statement_logging()
        .connect()
        .await?;
    let check: String = sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(&mut connection).await?;
    if check != "ok" {
        connection.close().await?;
        return Err(sqlx::Error::Protocol(check));
    }
    Ok(connection)
}

async fn bring_up_to_date(connection: &mut SqliteConnection, version: i64) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(SCHEMA).execute(&mut *connection).await?;
    if version < VERSION {
        sqlx::raw_sql(ADD_SUM).execute(&mut *connection).await?;
    }
    // A file that is unreadable or read-only is better found now than later.
    sqlx::query(READ).fetch_all(&mut *connection).await?;
    let stamp = AssertSqlSafe(format!("PRAGMA user_version = {VERSION}"));
    match sqlx::raw_sql(stamp).execute(connection).await {
        Err(error) if primary(&error).is_some_and(|(code, _)| code == READ_ONLY) => Err(error),
        _ => Ok(()), // a full disk is no reason not to start
    }
}

/// SQLite's code for a database that cannot be written; opening one succeeds.
const READ_ONLY: i32 = 8;

const READ: &str = "SELECT rowid, id, record, sum FROM replica ORDER BY rowid";

/// SQLite's primary result code, and the extended one.
fn primary(error: &sqlx::Error) -> Option<(i32, i32)> {
    let sqlx::Error::Database(error) = error else { return None };
    let code = error.code().and_then(|code| i32::from_str(&code).ok())?;
    Some((code & 0xff, code))
}

/// Whether SQLite reports that the file is no database, or a corrupt one, or one with other tables; any other error
/// (no space, no permission) is not a reason to give up its contents.
fn is_damage(error: &sqlx::Error) -> bool {
    const NO_SUCH_TABLE: i32 = 1;
    const CORRUPT: i32 = 11;
    const MISMATCH: i32 = 20;
    const FORMAT: i32 = 24;
    const NOT_A_DATABASE: i32 = 26;
    match (error, primary(error)) {
        (sqlx::Error::Protocol(_) | sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_), _) => true,
        (_, Some((code, _))) => [NO_SUCH_TABLE, CORRUPT, MISMATCH, FORMAT, NOT_A_DATABASE].contains(&code),
        _ => false,
    }
}

/// Moves a damaged file and its side files out of the way; nothing is deleted.
fn set_file_aside(path: &Path) -> Result<PathBuf, JournalError> {
    let fail = |source| JournalError::SetAside { path: path.to_owned(), source };
    let free = (1_u32..).map(|n| path.with_extension(format!("db.damaged-{n}"))).find(|to| !to.exists());
    let to = free.unwrap_or_else(|| path.with_extension("db.damaged"));
    failpoint::hit("node.journal.aside").and_then(|()| std::fs::rename(path, &to)).map_err(fail)?;
    for side in ["-wal", "-shm"] {
        let beside = |path: &Path| PathBuf::from(format!("{}{side}", path.display()));
        match std::fs::rename(beside(path), beside(&to)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(fail(error)),
            _ => {}
        }
    }
    Ok(to)
}

impl Journal for Sqlite {
    fn enter<'a>(&'a self, record: &'a Record) -> BoxFuture<'a, Result<(), JournalError>> {
        Box::pin(async move {
            let disk = |source| JournalError::Disk { replica: record.replica.clone(), source };
            failpoint::hit("node.journal.enter").map_err(disk)?;
            let failed = |source| JournalError::write(&record.replica, &self.path, source);
            let text = serde_json::to_string(record).unwrap_or_default(); // plain data always serialises
            let mut writer = self.writer.lock().await;
            let connection = writer.committing(record.is_for_another_boot()).await.map_err(failed)?;
            sqlx::query("INSERT OR REPLACE INTO replica (id, step, record, sum) VALUES (?, ?, ?, ?)")
                .bind(record.replica.to_string())
                .bind(record.step.to_string())
                .bind(&text)
                .bind(digest_of(text.as_bytes()).to_string())
                .execute(connection)
                .await
                .map(drop)
                .map_err(failed)
        })
    }

    fn done<'a>(&'a self, replica: &'a ReplicaId) -> BoxFuture<'a, Result<(), JournalError>> {
        Box::pin(async move {
            let disk = |source| JournalError::Disk { replica: replica.clone(), source };
            failpoint::hit("node.journal.done").map_err(disk)?;
            let failed = |source| JournalError::write(replica, &self.path, source);
            let mut writer = self.writer.lock().await;
            let connection = writer.committing(false).await.map_err(failed)?;
            let delete = sqlx::query("DELETE FROM replica WHERE id = ?").bind(replica.to_string());
            delete.execute(connection).await.map(drop).map_err(failed)
        })
    }

    fn open_replicas(&self) -> BoxFuture<'_, Result<Vec<Record>, JournalError>> {
        Box::pin(async move {
            let connection = &mut self.writer.lock().await.connection;
            let rows = sqlx::query(READ).fetch_all(&mut *connection).await.map_err(JournalError::Read)?;
            let mut records = Vec::new();
            for row in rows {
                // As bytes: damage need not be text.
                let bytes = |column| row.try_get_unchecked::<Vec<u8>, _>(column).unwrap_or_default();
                let (rowid, id, record, sum) = (row.get::<i64, _>(0), bytes(1), bytes(2), bytes(3));
                match read(&id, &record, &sum) {
                    Ok(record) => records.push(record),
                    Err(reason) => {
                        let id = String::from_utf8_lossy(&id).into_owned();
                        error!(replica = id, reason, "quarantined journal record");
                        let record = String::from_utf8_lossy(&record).into_owned();
                        if let Err(error) = set_row_aside(connection, rowid, &id, &record, &reason).await {
                            warn!(replica = id, %error, "cannot quarantine journal record");
                        }
                    }
                }
            }
            Ok(records)
        })
    }
}

/// The record of a row, or why it is not the one that was written there.
fn read(id: &[u8], record: &[u8], sum: &[u8]) -> Result<Record, String> {
    if !sum.is_empty() && sum != digest_of(record).to_string().as_bytes() {
        return Err("it is not what was written".to_owned());
    }
    let record: Record = serde_json::from_slice(record).map_err(|error| error.to_string())?;
    if record.replica.to_string().as_bytes() != id {
        return Err(format!("it is the record of {}", record.replica));
    }
    Ok(record)
}

async fn set_row_aside(
    connection: &mut SqliteConnection,
    rowid: i64,
    id: &str,
    record: &str,
    reason: &str,
) -> Result<(), sqlx::Error> {
    let mut change = connection.begin().await?;
    sqlx::query("INSERT INTO set_aside (id, record, reason) VALUES (?, ?, ?)")
        .bind(id)
        .bind(record)
        .bind(reason)
        .execute(&mut *change)
        .await?;
    sqlx::query("DELETE FROM replica WHERE rowid = ?").bind(rowid).execute(&mut *change).await?;
    change.commit().await
}

#[cfg(test)]
pub(crate) mod tests {
    use agent_model::{JobDraft, ReplicaStep};

    use super::*;

    impl Sqlite {
        /// Closes it as an orderly stop of the daemon does.
        pub(crate) async fn close(self) {
            self.writer.into_inner().connection.close().await.unwrap();
        }
    }

    /// A record of a replica that was just accepted.
    pub(crate) fn record(replica: &str) -> Record {
        let draft = JobDraft { command: "python train.py".into(), ..JobDraft::default() };
        let spec = draft.validate().unwrap();
        Record::accepted(replica.parse().unwrap(), spec, "boot", "secret".into())
    }

    #[tokio::test]
    async fn test_journal_that_cannot_be_written_is_told_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        Sqlite::open(&path).await.unwrap().close().await;
        std::fs::create_dir(dir.path().join("journal.db-wal")).unwrap();
        let Err(refused) = Sqlite::open(&path).await else { panic!("it was opened") };
        assert!(matches!(&refused, JournalError::Open { path: told, .. } if *told == path), "{refused:?}");
    }

    async fn steps(path: &Path) -> Vec<(String, ReplicaStep)> {
        let journal = Sqlite::open(path).await.unwrap();
        let open = journal.open_replicas().await.unwrap();
        open.into_iter().map(|record| (record.replica.to_string(), record.step)).collect()
    }

    #[tokio::test]
    async fn test_open_replicas_survive_a_restart_at_their_last_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        let journal = Sqlite::open(&path).await.unwrap();
        for id in ["a.1.0", "b.1.0", "a.2.0"] {
            journal.enter(&record(id)).await.unwrap();
        }
        journal.enter(&Record { step: ReplicaStep::Running, ..record("b.1.0") }).await.unwrap();
        journal.done(&"a.1.0".parse().unwrap()).await.unwrap();
        drop(journal); // as when a daemon is killed: without closing
        let mut found = steps(&path).await;
        found.sort();
        assert_eq!(found, [("a.2.0".into(), ReplicaStep::Accepted), ("b.1.0".into(), ReplicaStep::Running)]);
    }

    #[tokio::test]
    async fn test_bad_row_costs_one_replica() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        let journal = Sqlite::open(&path).await.unwrap();
        journal.enter(&record("good.1.0")).await.unwrap();
        journal.enter(&record("bad.1.0")).await.unwrap();
        sqlx::query("UPDATE replica SET record = substr(record, 1, 40) WHERE id = 'bad.1.0'")
            .execute(&mut journal.writer.lock().await.connection)
            .await
            .unwrap();
        assert_eq!(journal.open_replicas().await.unwrap(), [record("good.1.0")]);
        assert_eq!(journal.open_replicas().await.unwrap(), [record("good.1.0")], "it is told once");
        let kept: String = sqlx::query_scalar("SELECT id FROM set_aside")
            .fetch_one(&mut journal.writer.lock().await.connection)
            .await
            .unwrap();
        assert_eq!(kept, "bad.1.0");
    }

    #[tokio::test]
    async fn test_record_that_was_changed_behind_its_back_is_not_obeyed() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Sqlite::open(&dir.path().join("journal.db")).await.unwrap();
        for damage in [
            "UPDATE replica SET record = replace(record, 'train.py', 'drain.py')",
            "UPDATE replica SET id = 'b.1.0'",
            "UPDATE replica SET record = CAST(x'ff80' AS TEXT)",
            "UPDATE replica SET id = CAST(x'ff80' AS TEXT)",
        ] {
            journal.enter(&record("a.1.0")).await.unwrap();
            sqlx::raw_sql(damage).execute(&mut journal.writer.lock().await.connection).await.unwrap();
            assert_eq!(journal.open_replicas().await.unwrap(), [], "{damage}");
        }
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM set_aside");
        assert_eq!(count.fetch_one(&mut journal.writer.lock().await.connection).await.unwrap(), 4);
    }

    #[tokio::test]
    async fn test_journal_of_the_version_before_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        let mut old =
            SqliteConnectOptions::new().filename(&path).create_if_missing(true).connect().await.unwrap();
        sqlx::raw_sql(SCHEMA).execute(&mut old).await.unwrap();
        sqlx::raw_sql("PRAGMA user_version = 1").execute(&mut old).await.unwrap();
        sqlx::query("INSERT INTO replica (id, step, record) VALUES ('a.1.0', 'Accepted', ?)")
            .bind(serde_json::to_string(&record("a.1.0")).unwrap())
            .execute(&mut old)
            .await
            .unwrap();
        old.close().await.unwrap();
        assert_eq!(steps(&path).await, [("a.1.0".into(), ReplicaStep::Accepted)]);
        assert_eq!(steps(&path).await.len(), 1, "the change is made once");
    }

    #[tokio::test]
    async fn test_journal_of_a_later_version_is_refused_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        let journal = Sqlite::open(&path).await.unwrap();
        journal.enter(&record("a.1.0")).await.unwrap();
        let mut connection = journal.writer.into_inner().connection;
        sqlx::raw_sql("PRAGMA user_version = 3").execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        let whole = std::fs::read(&path).unwrap();
        let refused = Sqlite::open(&path).await.err().unwrap();
        assert!(matches!(&refused, JournalError::Newer { found: 3, .. }), "{refused:?}");
        assert_eq!(std::fs::read(&path).unwrap(), whole, "nothing touched it");
    }

    #[tokio::test]
    async fn test_damaged_file_is_set_aside() {
        for damage in [&b"this was never a database, whatever its name says it is"[..], &[0xff; 9000]] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("journal.db");
            std::fs::write(&path, damage).unwrap();
            assert_eq!(steps(&path).await, []);
            assert_eq!(std::fs::read(dir.path().join("journal.db.damaged-1")).unwrap(), damage);
        }
    }

    #[tokio::test]
    async fn test_truncated_file_still_opens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        {
            let journal = Sqlite::open(&path).await.unwrap();
            for n in 0..50 {
                journal.enter(&record(&format!("job-{n}.1.0"))).await.unwrap();
            }
            journal.writer.into_inner().connection.close().await.unwrap();
        }
        let whole = std::fs::metadata(&path).unwrap().len();
        for length in [0, 1, 100, 4096, whole / 2, whole - 1] {
            let cut = dir.path().join(format!("cut-{length}.db"));
            std::fs::write(&cut, &std::fs::read(&path).unwrap()[..usize::try_from(length).unwrap()]).unwrap();
            assert!(steps(&cut).await.len() <= 50, "{length}");
        }
    }
}
