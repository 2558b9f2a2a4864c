//! What this node holds, remembered across the end of the daemon.
//!
//! Owns: `journal.db`, one row for each replica the node still answers for. Hides: SQL, fsync, damage.
//!
//! Invariants: a record is on disk when [`Journal::enter`] returns, before the step it names begins; every
//! step can be done again from its record; a row that cannot be read costs one replica, a file that cannot
//! be read costs none (it is set aside, and `worker::recover` finds the replicas by their directories).
//!
//! Called by `worker::runner` (writes) and `worker::recover` (reads, once).

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use agent_model::{JobSpec, Outcome, ReplicaId, ReplicaStep, Timestamp};
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Row};
use tokio::sync::Mutex;
use tracing::{error, warn};

use super::faults::Ending;

/// Everything needed to go on with a replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Which replica.
    pub(crate) replica: ReplicaId,
    /// What it runs.
    pub(crate) spec: JobSpec,
    /// The boot in which it was accepted; in another one none of its processes is left.
    pub(crate) boot_id: String,
    /// The secret of its tracking endpoint.
    pub(crate) token: String,
    /// The step it is in.
    pub(crate) step: ReplicaStep,
    /// When the command was started.
    pub(crate) started_at: Option<Timestamp>,
    /// What came of the command, from the moment that is certain.
    pub(crate) ending: Option<Ending>,
    /// The outcome, from the moment its outputs are stored.
    pub(crate) outcome: Option<Outcome>,
    /// Something of it is nowhere else, so its directory stays for a while when it is over.
    #[serde(default)]
    pub(crate) precious: bool,
}

impl Record {
    /// Of a replica that was just ordered.
    pub(crate) fn accepted(replica: ReplicaId, spec: JobSpec, boot_id: &str, token: String) -> Record {
        Record {
            replica,
            spec,
            boot_id: boot_id.to_owned(),
            token,
            step: ReplicaStep::Accepted,
            started_at: None,
            ending: None,
            outcome: None,
            precious: false,
        }
    }
}

/// Why the journal could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    /// The file can neither be opened nor set aside.
    #[error("cannot open the journal {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        #[source]
        source: sqlx::Error,
    },
    /// A damaged file could not be moved out of the way.
    #[error("cannot set the damaged journal {} aside", path.display())]
    SetAside {
        /// The file.
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// A record could not be written.
    #[error("cannot write the journal record of {replica}")]
    Write {
        /// Whose.
        replica: ReplicaId,
        #[source]
        source: sqlx::Error,
    },
    /// The records could not be read.
    #[error("cannot read the journal")]
    Read(#[source] sqlx::Error),
}

/// Remembers each step of each replica.
pub(crate) trait Journal: Send + Sync + 'static {
    /// Stores the record; it is on disk when this returns.
    fn enter(&self, record: &Record) -> impl Future<Output = Result<(), JournalError>> + Send;

    /// Forgets a replica.
    fn done(&self, replica: &ReplicaId) -> impl Future<Output = Result<(), JournalError>> + Send;

    /// Every replica that was entered and is not done.
    fn open_replicas(&self) -> impl Future<Output = Result<Vec<Record>, JournalError>> + Send;
}

/// The journal of a running daemon.
pub(crate) struct Sqlite {
    connection: Mutex<SqliteConnection>,
}

/// The layout of the tables. A step is repeated outside its record so that people can read it.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS replica (id TEXT PRIMARY KEY, step TEXT NOT NULL, record TEXT NOT NULL) STRICT;
    CREATE TABLE IF NOT EXISTS set_aside (id TEXT NOT NULL, record TEXT NOT NULL, reason TEXT NOT NULL) STRICT;
    PRAGMA user_version = 1;
";

impl Sqlite {
    /// Opens the journal, or begins a new one where there is none or where the old one is damaged; the
    /// damaged file is kept beside it.
    pub(crate) async fn open(path: &Path) -> Result<Sqlite, JournalError> {
        let open = |source| JournalError::Open { path: path.to_owned(), source };
        match connect(path).await {
            Ok(connection) => Ok(Sqlite { connection: Mutex::new(connection) }),
            Err(damage) if is_damage(&damage) => {
                let kept = set_file_aside(path)?;
                error!(error = %damage, kept = %kept.display(), "the journal is damaged; replicas are found by their directories");
                let connection = connect(path).await.map_err(open)?;
                Ok(Sqlite { connection: Mutex::new(connection) })
            }
            Err(source) => Err(open(source)),
        }
    }
}

async fn connect(path: &Path) -> Result<SqliteConnection, sqlx::Error> {
    // Its side files take its mode; records hold what jobs are told, so nobody else may read them.
    File::options().create(true).append(true).mode(0o600).open(path)?;
    let mut connection = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
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
    sqlx::raw_sql(SCHEMA).execute(&mut connection).await?;
    Ok(connection)
}

/// SQLite says that the file is no database, or a broken one; anything else (no space, no permission) is
/// not a reason to give up what is in it.
fn is_damage(error: &sqlx::Error) -> bool {
    const CORRUPT: &str = "11";
    const NOT_A_DATABASE: &str = "26";
    match error {
        sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(error) => {
            let primary =
                error.code().and_then(|code| i32::from_str(&code).ok()).map(|code| (code & 0xff).to_string());
            matches!(primary.as_deref(), Some(CORRUPT | NOT_A_DATABASE))
        }
        _ => false,
    }
}

fn set_file_aside(path: &Path) -> Result<PathBuf, JournalError> {
    let fail = |source| JournalError::SetAside { path: path.to_owned(), source };
    let free = (1_u32..).map(|n| path.with_extension(format!("db.damaged-{n}"))).find(|to| !to.exists());
    let to = free.unwrap_or_else(|| path.with_extension("db.damaged"));
    std::fs::rename(path, &to).map_err(fail)?;
    for side in ["db-wal", "db-shm"] {
        match std::fs::remove_file(path.with_extension(side)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(fail(error)),
            _ => {}
        }
    }
    Ok(to)
}

impl Journal for Sqlite {
    async fn enter(&self, record: &Record) -> Result<(), JournalError> {
        let text = serde_json::to_string(record).unwrap_or_default(); // plain data always serialises
        sqlx::query("INSERT OR REPLACE INTO replica (id, step, record) VALUES (?, ?, ?)")
            .bind(record.replica.to_string())
            .bind(record.step.to_string())
            .bind(text)
            .execute(&mut *self.connection.lock().await)
            .await
            .map(drop)
            .map_err(|source| JournalError::Write { replica: record.replica.clone(), source })
    }

    async fn done(&self, replica: &ReplicaId) -> Result<(), JournalError> {
        sqlx::query("DELETE FROM replica WHERE id = ?")
            .bind(replica.to_string())
            .execute(&mut *self.connection.lock().await)
            .await
            .map(drop)
            .map_err(|source| JournalError::Write { replica: replica.clone(), source })
    }

    async fn open_replicas(&self) -> Result<Vec<Record>, JournalError> {
        let mut connection = self.connection.lock().await;
        let rows = sqlx::query("SELECT id, record FROM replica ORDER BY rowid")
            .fetch_all(&mut *connection)
            .await
            .map_err(JournalError::Read)?;
        let mut records = Vec::new();
        for row in rows {
            let (id, text): (String, String) = (row.get(0), row.get(1));
            match serde_json::from_str::<Record>(&text) {
                Ok(record) => records.push(record),
                Err(reason) => {
                    warn!(replica = id, %reason, "a journal record cannot be read and is set aside");
                    set_row_aside(&mut connection, &id, &reason.to_string())
                        .await
                        .map_err(JournalError::Read)?;
                }
            }
        }
        Ok(records)
    }
}

async fn set_row_aside(connection: &mut SqliteConnection, id: &str, reason: &str) -> Result<(), sqlx::Error> {
    let mut change = connection.begin().await?;
    sqlx::query("INSERT INTO set_aside (id, record, reason) SELECT id, record, ? FROM replica WHERE id = ?")
        .bind(reason)
        .bind(id)
        .execute(&mut *change)
        .await?;
    sqlx::query("DELETE FROM replica WHERE id = ?").bind(id).execute(&mut *change).await?;
    change.commit().await
}

#[cfg(test)]
pub(crate) mod tests {
    use agent_model::JobDraft;

    use super::*;

    /// A record of a replica that was just accepted.
    pub(crate) fn record(replica: &str) -> Record {
        let draft = JobDraft { command: "python train.py".into(), ..JobDraft::default() };
        let spec = draft.validate().unwrap();
        Record::accepted(replica.parse().unwrap(), spec, "boot", "secret".into())
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
        drop(journal); // as a killed daemon does: without closing
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
            .execute(&mut *journal.connection.lock().await)
            .await
            .unwrap();
        assert_eq!(journal.open_replicas().await.unwrap(), [record("good.1.0")]);
        let kept: String = sqlx::query_scalar("SELECT id FROM set_aside")
            .fetch_one(&mut *journal.connection.lock().await)
            .await
            .unwrap();
        assert_eq!(kept, "bad.1.0");
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
            journal.connection.into_inner().close().await.unwrap();
        }
        let whole = std::fs::metadata(&path).unwrap().len();
        for length in [0, 1, 100, 4096, whole / 2, whole - 1] {
            let cut = dir.path().join(format!("cut-{length}.db"));
            std::fs::write(&cut, &std::fs::read(&path).unwrap()[..usize::try_from(length).unwrap()]).unwrap();
            assert!(steps(&cut).await.len() <= 50, "{length}");
        }
    }
}
