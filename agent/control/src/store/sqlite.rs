//! The store in one SQLite file: write-ahead log, every commit forced to the disk.
//!
//! Owns the schema and its versions (`PRAGMA user_version`). Invariants: a file that is damaged, newer than
//! this program, or missing beside an archive that proves it once was there, is refused in words; it is
//! never replaced by an empty one. Only the queue's task writes, so writers never wait for each other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::{Epoch, JobId, Timestamp};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions,
    SqliteSynchronous,
};

use super::{Changes, Event, JobRecord, Loaded, Store, StoreError};

/// One step per version of the schema, oldest first. A step that was released never changes.
const VERSIONS: [&str; 1] = [include_str!("schema.sql")];

/// How long a read may wait for a checkpoint.
const BUSY: Duration = Duration::from_secs(5);

/// Why the controller's database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenStoreError {
    /// The file cannot be opened as a database.
    #[error("cannot open the controller's database {}", path.display())]
    File {
        /// The database.
        path: PathBuf,
        /// What SQLite said.
        source: sqlx::Error,
    },
    /// SQLite's own check found damage.
    #[error("the controller's database {} is damaged: {problem}", path.display())]
    Damaged {
        /// The database.
        path: PathBuf,
        /// The first thing found.
        problem: String,
    },
    /// There is an archive of logs but no database.
    #[error("the controller's database {} is gone, but its archive {} is not", path.display(), archive.display())]
    Gone {
        /// The database.
        path: PathBuf,
        /// The archive.
        archive: PathBuf,
    },
    /// A later version of the program wrote it.
    #[error("the controller's database {} has version {found}; this program knows {known}", path.display())]
    Newer {
        /// The database.
        path: PathBuf,
        /// Its version.
        found: usize,
        /// The highest version known here.
        known: usize,
    },
    /// The schema could not be brought up to date.
    #[error("cannot bring the controller's database {} to version {version}", path.display())]
    Upgrade {
        /// The database.
        path: PathBuf,
        /// The version that was being made.
        version: usize,
        /// What SQLite said.
        source: sqlx::Error,
    },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Sqlite {
    /// One connection, so that no read ever makes a commit wait.
    writer: SqlitePool,
    /// Another one.
    reader: SqlitePool,
}

impl Sqlite {
    /// Opens the database at `path`, made when absent, checks it and brings its schema up to date.
    ///
    /// `archive` is the directory that a controller makes right after its first database.
    pub(crate) async fn open(path: &Path, archive: &Path) -> Result<Sqlite, OpenStoreError> {
        let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY);
        let gone = !path.exists() && archive.exists();
        if gone {
            return Err(OpenStoreError::Gone { path: path.to_owned(), archive: archive.to_owned() });
        }
        let writer = connect(options.clone()).await.map_err(cannot)?;
        let problem: String =
            sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(&writer).await.map_err(cannot)?;
        if problem != "ok" {
            return Err(OpenStoreError::Damaged { path: path.to_owned(), problem });
        }
        upgrade(&writer, path, archive).await?;
        let reader = connect(options.read_only(true)).await.map_err(cannot)?;
        Ok(Sqlite { writer, reader })
    }

    /// Ends all connections, so that the file may be opened by another process.
    pub(crate) async fn close(&self) {
        self.reader.close().await;
        self.writer.close().await;
    }

    #[cfg(test)]
    pub(crate) fn pool(&self) -> &SqlitePool {
        &self.writer
    }

    async fn write(&self, changes: &Changes) -> Result<(), sqlx::Error> {
        let mut transaction = self.writer.begin_with("BEGIN IMMEDIATE").await?;
        write_all(&mut transaction, changes).await?;
        transaction.commit().await
    }

    async fn one_job(&self, query: &'static str, key: &str) -> Result<Option<JobRecord>, StoreError> {
        let row: Option<(String, String)> = sqlx::query_as(query)
            .bind(key)
            .fetch_optional(&self.reader)
            .await
            .map_err(|source| StoreError::Read { what: "a job", source })?;
        row.map(|(id, text)| parse("job", id, &text)).transpose()
    }
}

async fn connect(options: SqliteConnectOptions) -> Result<SqlitePool, sqlx::Error> {
    SqlitePoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .connect_with(options)
        .await
}

async fn upgrade(pool: &SqlitePool, path: &Path, archive: &Path) -> Result<(), OpenStoreError> {
    let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
    let found: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(pool).await.map_err(cannot)?;
    let found = usize::try_from(found).unwrap_or(usize::MAX);
    let known = VERSIONS.len();
    if found > known {
        return Err(OpenStoreError::Newer { path: path.to_owned(), found, known });
    }
    if found == 0 && archive.exists() {
        return Err(OpenStoreError::Gone { path: path.to_owned(), archive: archive.to_owned() });
    }
    for (step, sql) in VERSIONS.iter().enumerate().skip(found) {
        let version = step + 1;
        let failed = |source| OpenStoreError::Upgrade { path: path.to_owned(), version, source };
        let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
        sqlx::raw_sql(*sql).execute(&mut *transaction).await.map_err(failed)?;
        let stamp = sqlx::AssertSqlSafe(format!("PRAGMA user_version = {version}")); // takes no parameter
        sqlx::raw_sql(stamp).execute(&mut *transaction).await.map_err(failed)?;
        transaction.commit().await.map_err(failed)?;
    }
    Ok(())
}

async fn write_all(to: &mut SqliteConnection, changes: &Changes) -> Result<(), sqlx::Error> {
    for job in &changes.jobs {
        sqlx::query(
            "INSERT INTO jobs (seq, id, request, active, document) VALUES (?, ?, ?, ?, ?)
             ON CONFLICT (seq) DO UPDATE SET active = excluded.active, document = excluded.document",
        )
        .bind(integer(job.seq))
        .bind(job.id.as_str())
        .bind(&job.request)
        .bind(!job.state.is_terminal())
        .bind(document(&**job))
        .execute(&mut *to)
        .await?;
    }
    for node in &changes.nodes {
        sqlx::query(
            "INSERT INTO nodes (id, document) VALUES (?, ?)
             ON CONFLICT (id) DO UPDATE SET document = excluded.document",
        )
        .bind(node.id.as_str())
        .bind(document(node))
        .execute(&mut *to)
        .await?;
    }
    for event in &changes.events {
        sqlx::query("INSERT INTO events (job, at, epoch, node, text) VALUES (?, ?, ?, ?, ?)")
            .bind(event.job.as_str())
            .bind(integer(event.at.0))
            .bind(integer(event.epoch.0))
            .bind(event.node.as_ref().map(|node| node.as_str()))
            .bind(&event.text)
            .execute(&mut *to)
            .await?;
    }
    for (replica, node) in &changes.settled {
        sqlx::query("INSERT INTO settled (replica, node) VALUES (?, ?) ON CONFLICT DO NOTHING")
            .bind(replica.to_string())
            .bind(node.as_str())
            .execute(&mut *to)
            .await?;
    }
    for replica in &changes.forgotten {
        sqlx::query("DELETE FROM settled WHERE replica = ?")
            .bind(replica.to_string())
            .execute(&mut *to)
            .await?;
    }
    Ok(())
}

impl Store for Sqlite {
    async fn load(&self) -> Result<Loaded, StoreError> {
        let reading = |what| move |source| StoreError::Read { what, source };
        let jobs: Vec<(String, String)> =
            sqlx::query_as("SELECT id, document FROM jobs WHERE active = 1 ORDER BY seq")
                .fetch_all(&self.reader)
                .await
                .map_err(reading("the jobs"))?;
        let nodes: Vec<(String, String)> = sqlx::query_as("SELECT id, document FROM nodes")
            .fetch_all(&self.reader)
            .await
            .map_err(reading("the nodes"))?;
        let settled: Vec<(String, String)> = sqlx::query_as("SELECT replica, node FROM settled")
            .fetch_all(&self.reader)
            .await
            .map_err(reading("the settled replicas"))?;
        let last_seq: i64 = sqlx::query_scalar("SELECT COALESCE(MAX(seq), 0) FROM jobs")
            .fetch_one(&self.reader)
            .await
            .map_err(reading("the jobs"))?;
        Ok(Loaded {
            jobs: jobs.into_iter().map(|(id, text)| parse("job", id, &text)).collect::<Result<_, _>>()?,
            nodes: nodes.into_iter().map(|(id, text)| parse("node", id, &text)).collect::<Result<_, _>>()?,
            settled: settled
                .into_iter()
                .map(|(replica, node)| Ok((named("replica", &replica)?, named("node", &node)?)))
                .collect::<Result<_, _>>()?,
            last_seq: natural(last_seq),
        })
    }

    async fn commit(&self, changes: &Changes) -> Result<(), StoreError> {
        self.write(changes).await.map_err(|source| StoreError::Commit {
            jobs: changes.jobs.len(),
            events: changes.events.len(),
            source,
        })
    }

    async fn job(&self, id: &JobId) -> Result<Option<JobRecord>, StoreError> {
        self.one_job("SELECT id, document FROM jobs WHERE id = ?", id.as_str()).await
    }

    async fn submitted(&self, request: &str) -> Result<Option<JobRecord>, StoreError> {
        self.one_job("SELECT id, document FROM jobs WHERE request = ?", request).await
    }

    async fn page(&self, before: Option<u64>, limit: u32) -> Result<Vec<JobRecord>, StoreError> {
        let rows: Vec<(String, String)> =
            sqlx::query_as("SELECT id, document FROM jobs WHERE seq < ? ORDER BY seq DESC LIMIT ?")
                .bind(before.map_or(i64::MAX, integer))
                .bind(limit)
                .fetch_all(&self.reader)
                .await
                .map_err(|source| StoreError::Read { what: "the jobs", source })?;
        rows.into_iter().map(|(id, text)| parse("job", id, &text)).collect()
    }

    async fn history(&self, id: &JobId) -> Result<Vec<Event>, StoreError> {
        let rows: Vec<(i64, i64, Option<String>, String)> =
            sqlx::query_as("SELECT at, epoch, node, text FROM events WHERE job = ? ORDER BY number")
                .bind(id.as_str())
                .fetch_all(&self.reader)
                .await
                .map_err(|source| StoreError::Read { what: "the history of a job", source })?;
        rows.into_iter()
            .map(|(at, epoch, node, text)| {
                Ok(Event {
                    job: id.clone(),
                    at: Timestamp(natural(at)),
                    epoch: Epoch(natural(epoch)),
                    node: node.map(|node| named("node", &node)).transpose()?,
                    text,
                })
            })
            .collect()
    }
}

/// SQLite has no unsigned numbers; none of ours comes near the sign.
fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn natural(value: i64) -> u64 {
    u64::try_from(value).unwrap_or_default()
}

fn document<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default() // maps with text keys always serialise
}

fn parse<T: DeserializeOwned>(what: &'static str, id: String, text: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|source| StoreError::Document { what, id, source })
}

fn named<T>(what: &'static str, text: &str) -> Result<T, StoreError>
where
    T: std::str::FromStr<Err = agent_model::ids::IdError>,
{
    text.parse().map_err(|source| StoreError::Name { what, id: text.to_owned(), source })
}
