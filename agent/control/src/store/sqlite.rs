//! The store in one SQLite file: write-ahead log, every commit forced to the disk.
//!
//! Owns the schema and its versions (`PRAGMA user_version`), and the order of a start: refuse what a later
//! version wrote, check every page and every row, salvage what does not hold, take up what only the second
//! copy ([`redo`]) knows, and say what happened ([`Recovery`]). Invariants: a file that is damaged is set
//! aside and never replaced by an empty one; one that is newer than this program, or missing beside an
//! archive that proves it once was there, is refused in words; a commit that failed in any way is never
//! acknowledged, and the connection it failed on is not used again. Only the queue's task writes, so writers
//! never wait for each other.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agent_model::{JobId, failpoint};
use futures_util::TryStreamExt;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, Connection};

use super::ballast::Ballast;
use super::redo::{self, Line, Redo, Remembered};
use super::rows::{self, RowError, integer, natural};
use super::salvage::{self, SalvageError, WAL_COPY};
use super::{Changes, Event, JobRecord, Loaded, Recovery, Store, StoreError};

/// One step per version of the schema, oldest first. A step that was released never changes.
const VERSIONS: [&str; 2] = [include_str!("schema.sql"), include_str!("schema_2.sql")];

const LAST_REV: &str = "SELECT MAX(CAST(value AS INTEGER)) FROM meta WHERE name = 'rev'";
const LAST_EVENT: &str = "SELECT MAX(number) FROM events";

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
    /// A file beside it cannot be used.
    #[error("cannot use {}", path.display())]
    Beside {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is damaged, and nothing new could be made of it.
    #[error("the controller's database {} is damaged ({problem}) and could not be salvaged", path.display())]
    Damaged {
        /// The database.
        path: PathBuf,
        /// The first thing found.
        problem: String,
        /// Why.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
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
    redo: Redo,
    ballast: Ballast,
    /// The numbers of the last commit and the last event.
    rev: AtomicU64,
    event: AtomicU64,
    incarnation: String,
    /// What this start had to mend.
    mended: bool,
    recovery: Option<Recovery>,
}

/// What a look at the database found.
enum Looked {
    Whole(SqlitePool),
    Damaged(String),
}

impl Sqlite {
    /// Opens the database at `path`, made when absent, checks it, mends it and brings its schema up to date.
    ///
    /// `archive` is the directory that a controller makes right after its first database.
    pub(crate) async fn open(path: &Path, archive: &Path) -> Result<Sqlite, OpenStoreError> {
        if !path.exists() && archive.exists() {
            return Err(OpenStoreError::Gone { path: path.to_owned(), archive: archive.to_owned() });
        }
        refuse_newer(path)?;
        let copy = with_suffix(path, ".redo");
        let mut remembered = redo::read(&copy).unwrap_or_else(|error| {
            tracing::warn!(path = %copy.display(), %error, "the second copy of the jobs cannot be read");
            None
        });
        keep_log(path)?;
        let is_empty = path.metadata().is_ok_and(|file| file.len() == 0);
        let looked = if is_empty && (archive.exists() || remembered.is_some()) {
            Looked::Damaged("it is empty".to_owned())
        } else {
            look(path).await?
        };
        let (writer, mut mended) = match looked {
            Looked::Whole(writer) => (writer, false),
            Looked::Damaged(problem) => {
                (mend(path, problem, remembered.take().unwrap_or_default()).await?, true)
            }
        };
        let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
        let mut recovery = {
            let mut to = writer.acquire().await.map_err(cannot)?;
            recall(&mut to).await.map_err(cannot)?
        };
        if let Err(source) = demand_writable(&writer).await {
            writer.close().await; // what is open for reading alone is shared with whoever opens it next
            return Err(cannot(source));
        }
        if let Some(behind) = catch_up(&writer, remembered, mended).await.map_err(cannot)? {
            mended = true;
            recovery = Some(behind);
        }
        let incarnation = incarnate(&writer, mended).await.map_err(cannot)?;
        let sqlite = Sqlite {
            reader: connect(options(path).read_only(true)).await.map_err(cannot)?,
            redo: Redo::new(&copy),
            ballast: Ballast::new(&with_suffix(path, ".ballast")),
            rev: AtomicU64::new(number(&writer, LAST_REV).await.map_err(cannot)?),
            event: AtomicU64::new(number(&writer, LAST_EVENT).await.map_err(cannot)?),
            writer,
            incarnation,
            mended,
            recovery,
        };
        sqlite.renew_copy().await;
        let _ = std::fs::remove_file(with_suffix(path, WAL_COPY)); // it has served; the next start replaces it
        Ok(sqlite)
    }

    /// Ends all connections, so that the file may be opened by another process.
    pub(crate) async fn close(&self) {
        self.reader.close().await;
        self.writer.close().await;
    }

    /// A random name, another one after the database was rebuilt or found to be older than it should be.
    pub(crate) fn incarnation(&self) -> &str {
        &self.incarnation
    }

    /// What happened to the database, as long as that concerns anybody.
    pub(crate) fn recovery(&self) -> Option<&Recovery> {
        self.recovery.as_ref().filter(|recovery| recovery.kept.as_ref().is_none_or(|kept| kept.exists()))
    }

    /// The disk has room for new jobs, beyond what the end of the present ones needs.
    pub(crate) fn has_room(&self) -> bool {
        self.ballast.take()
    }

    #[cfg(test)]
    pub(crate) fn pool(&self) -> &SqlitePool {
        &self.writer
    }

    /// Makes the second copy anew.
    async fn renew_copy(&self) {
        match self.copy_lines().await {
            Ok(lines) => self.redo.renew(&lines),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the second copy stays as it is");
            }
        }
    }

    async fn copy_lines(&self) -> Result<Vec<Line>, StoreError> {
        let rev = self.rev.load(Ordering::Relaxed);
        let ended = format!(
            "SELECT {} FROM jobs WHERE active = 0 ORDER BY seq DESC LIMIT {}",
            rows::JOB,
            redo::ENDED
        );
        let active = format!("SELECT {} FROM jobs WHERE active = 1 ORDER BY seq", rows::JOB);
        let head = Line { incarnation: Some(self.incarnation.clone()), rev, ..Line::default() };
        let mut lines = vec![head];
        for query in [ended, active] {
            let found = self.all(query, "the jobs", rows::job).await?;
            lines.extend(found.into_iter().map(|job| Line { rev, jobs: vec![job], ..Line::default() }));
        }
        let nodes = self.all("SELECT id, document, proof FROM nodes".into(), "the nodes", rows::node).await?;
        let settled = "SELECT replica, node, proof FROM settled".to_owned();
        let settled = self.all(settled, "the settled replicas", rows::settled).await?;
        lines.push(Line { rev, nodes, settled, ..Line::default() });
        Ok(lines)
    }

    async fn all<T>(
        &self,
        query: String,
        what: &'static str,
        read: impl Fn(&SqliteRow) -> Result<T, RowError>,
    ) -> Result<Vec<T>, StoreError> {
        let found = sqlx::query(AssertSqlSafe(query)).fetch_all(&self.reader).await;
        let found = found.map_err(|source| StoreError::Read { what, source })?;
        found.iter().map(|row| read(row).map_err(|error| error.reading(what))).collect()
    }

    /// One commit. A connection on which anything failed is closed: what it did not force to the disk the
    /// system may have dropped, and nothing may be built on it.
    async fn write(&self, line: &Line) -> Result<(), sqlx::Error> {
        let mut connection = self.writer.acquire().await?;
        let written = async {
            let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
            rows::write_all(&mut transaction, line).await?;
            failpoint::hit("control.store.commit")?;
            transaction.commit().await
        };
        let written = written.await;
        if written.is_err() {
            connection.close_on_drop();
        }
        written
    }

    async fn one_job(&self, query: String, key: &str) -> Result<Option<JobRecord>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(query)).bind(key).fetch_optional(&self.reader).await;
        let row = row.map_err(|source| StoreError::Read { what: "a job", source })?;
        let read = |row| rows::job(&row).map(|(_, job)| job).map_err(|error| error.reading("a job"));
        row.map(read).transpose()
    }
}

/// The file beside `path` whose name ends in `suffix`.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(BUSY)
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

/// Refuses what a later version wrote before anything touches it: the number stands at a fixed place.
fn refuse_newer(path: &Path) -> Result<(), OpenStoreError> {
    let mut head = [0; 64];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
    if read.is_err() || !head.starts_with(b"SQLite format 3\0") {
        return Ok(()); // absent or damaged: that is found out later
    }
    let found = u32::from_be_bytes([head[60], head[61], head[62], head[63]]);
    let (found, known) = (usize::try_from(found).unwrap_or(usize::MAX), VERSIONS.len());
    if found > known { Err(OpenStoreError::Newer { path: path.to_owned(), found, known }) } else { Ok(()) }
}

/// Copies the log of a process that did not end in order, before SQLite takes it in or throws it away.
fn keep_log(path: &Path) -> Result<(), OpenStoreError> {
    let (log, copy) = (with_suffix(path, "-wal"), with_suffix(path, WAL_COPY));
    if log.metadata().is_ok_and(|file| file.len() > 0) {
        if let Err(error) = std::fs::copy(&log, &copy) {
            // Most likely a full disk; without a copy a damaged log is only less well salvaged.
            tracing::warn!(path = %copy.display(), %error, "the database's log has no copy");
            let _ = std::fs::remove_file(&copy);
        }
        return Ok(());
    }
    match std::fs::remove_file(&copy) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(OpenStoreError::Beside { path: copy, source })
        }
        _ => Ok(()),
    }
}

/// Opens and checks everything that jobs rest on.
async fn look(path: &Path) -> Result<Looked, OpenStoreError> {
    let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
    let writer = match connect(options(path)).await {
        Ok(writer) => writer,
        Err(error) if is_damage(&error) => return Ok(Looked::Damaged(words(&error))),
        Err(source) => return Err(cannot(source)),
    };
    let problem = match check(&writer, path).await {
        Ok(()) => return Ok(Looked::Whole(writer)),
        Err(Checked::Refused(error)) => Err(error),
        Err(Checked::Row(RowError::Store(error))) => Ok(error.to_string()),
        Err(Checked::Row(RowError::Sql(error))) if is_damage(&error) => Ok(words(&error)),
        Err(Checked::Row(RowError::Sql(source))) => Err(cannot(source)),
        Err(Checked::Found(problem)) => Ok(problem),
    };
    writer.close().await;
    problem.map(Looked::Damaged)
}

/// What a check may end with.
enum Checked {
    /// Nothing can be said about the content.
    Refused(OpenStoreError),
    Row(RowError),
    /// SQLite's own check found this.
    Found(String),
}

impl From<sqlx::Error> for Checked {
    fn from(error: sqlx::Error) -> Checked {
        Checked::Row(error.into())
    }
}

async fn check(writer: &SqlitePool, path: &Path) -> Result<(), Checked> {
    let found: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(writer).await?;
    let (found, known) = (usize::try_from(found).unwrap_or(usize::MAX), VERSIONS.len());
    if found > known {
        return Err(Checked::Refused(OpenStoreError::Newer { path: path.to_owned(), found, known }));
    }
    let problem: String = sqlx::query_scalar("PRAGMA integrity_check(1)").fetch_one(writer).await?;
    if problem != "ok" {
        return Err(Checked::Found(problem.lines().last().unwrap_or_default().trim().to_owned()));
    }
    upgrade(writer, path, found).await?;
    let jobs = format!("SELECT {} FROM jobs", rows::JOB);
    believe(writer, &jobs, |row| rows::job(row).map(drop)).await?;
    believe(writer, "SELECT id, document, proof FROM nodes", |row| rows::node(row).map(drop)).await?;
    let settled = "SELECT replica, node, proof FROM settled";
    believe(writer, settled, |row| rows::settled(row).map(drop)).await
}

/// Reads every row of a query.
async fn believe(
    writer: &SqlitePool,
    query: &str,
    read: impl Fn(&SqliteRow) -> Result<(), RowError>,
) -> Result<(), Checked> {
    let mut rows = sqlx::query(AssertSqlSafe(query.to_owned())).fetch(writer);
    while let Some(row) = rows.try_next().await? {
        read(&row).map_err(Checked::Row)?;
    }
    Ok(())
}

/// What SQLite found, without who said so.
fn words(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}

/// Whether an error speaks of the content of the file, not of the disk or the rights to it.
fn is_damage(error: &sqlx::Error) -> bool {
    const ERROR: u32 = 1;
    const CORRUPT: u32 = 11;
    const NOT_A_DATABASE: u32 = 26;
    const SHORT_READ: u32 = 522;
    match error {
        sqlx::Error::Database(error) => {
            let code = error.code().and_then(|code| code.parse::<u32>().ok()).unwrap_or_default();
            matches!(code & 0xff, CORRUPT | NOT_A_DATABASE | ERROR) || code == SHORT_READ
        }
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. } => true,
        _ => false,
    }
}

/// Whether the disk had no room for a commit.
pub(super) fn is_full(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => {
            error.code().and_then(|code| code.parse().ok()).is_some_and(agent_fs::is_full_for_sqlite)
        }
        sqlx::Error::Io(error) => agent_fs::is_full(error),
        _ => false,
    }
}

/// SQLite opens a database that it may only read, too. Nobody would hear of that before the first job.
async fn demand_writable(pool: &SqlitePool) -> Result<(), sqlx::Error> {
    let stamp = AssertSqlSafe(format!("PRAGMA user_version = {}", VERSIONS.len()));
    match sqlx::raw_sql(stamp).execute(pool).await {
        Err(error) if is_read_only(&error) => Err(error),
        _ => Ok(()), // a disk that is full is no reason not to begin
    }
}

fn is_read_only(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<i32>().ok());
    code.is_some_and(|code| code & 0xff == 8)
}

async fn upgrade(pool: &SqlitePool, path: &Path, found: usize) -> Result<(), Checked> {
    for (step, sql) in VERSIONS.iter().enumerate().skip(found) {
        let version = step + 1;
        let failed = |source| {
            if is_damage(&source) {
                return Checked::from(source);
            }
            Checked::Refused(OpenStoreError::Upgrade { path: path.to_owned(), version, source })
        };
        let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
        sqlx::raw_sql(*sql).execute(&mut *transaction).await.map_err(failed)?;
        let stamp = AssertSqlSafe(format!("PRAGMA user_version = {version}")); // takes no parameter
        sqlx::raw_sql(stamp).execute(&mut *transaction).await.map_err(failed)?;
        transaction.commit().await.map_err(failed)?;
    }
    Ok(())
}

/// Puts a new database in the place of a damaged one.
async fn mend(path: &Path, problem: String, remembered: Remembered) -> Result<SqlitePool, OpenStoreError> {
    tracing::error!(path = %path.display(), problem, "the controller's database is damaged: salvaging it");
    let damaged = |problem: String, source: Option<SalvageError>| OpenStoreError::Damaged {
        path: path.to_owned(),
        problem,
        source: source.map(Into::into),
    };
    let fresh = with_suffix(path, ".new");
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(with_suffix(&fresh, suffix)); // of a start that was cut short
    }
    match look(&fresh).await? {
        Looked::Whole(new) => new.close().await,
        Looked::Damaged(worse) => return Err(damaged(worse, None)),
    }
    let done = salvage::salvage(path, &problem, remembered, &fresh).await;
    let recovery = done.map_err(|error| damaged(problem.clone(), Some(error)))?;
    tracing::error!(
        kept = ?recovery.kept, rows = recovery.rows, copied = recovery.copied, bad = recovery.bad,
        lost = ?recovery.lost, "the controller's database was rebuilt"
    );
    match look(path).await? {
        Looked::Whole(writer) => Ok(writer),
        Looked::Damaged(worse) => Err(damaged(worse, None)),
    }
}

async fn recall(from: &mut SqliteConnection) -> Result<Option<Recovery>, sqlx::Error> {
    let text = rows::get(from, "recovery").await?;
    let told: Option<Recovery> = text.and_then(|text| serde_json::from_str(&text).ok());
    Ok(told.filter(|told| told.kept.as_ref().is_some_and(|kept| kept.exists())))
}

/// Takes up what the second copy says of commits that the database does not have. One commit is what a crash
/// may leave; more, or another database's copy, or none at all, says that this database is an older one.
async fn catch_up(
    writer: &SqlitePool,
    remembered: Option<Remembered>,
    mended: bool,
) -> Result<Option<Recovery>, sqlx::Error> {
    let mut to = writer.acquire().await?;
    let known = rows::get(&mut to, "incarnation").await?;
    let rev = rows::get(&mut to, "rev").await?.and_then(|rev| rev.parse::<u64>().ok()).unwrap_or_default();
    let older =
        |problem: &str, copied| Recovery { problem: problem.to_owned(), copied, ..Recovery::default() };
    if mended {
        return Ok(None);
    }
    let Some(remembered) = remembered else {
        let gone = || older("its second copy is gone: it may have been restored from a backup", 0);
        return Ok(known.map(|_| gone()));
    };
    // A database without a name lost even its first commit: then the copy has everything.
    if let (Some(known), Some(copied)) = (&known, &remembered.incarnation)
        && known != copied
    {
        return Ok(Some(older("its second copy is of another database: it was restored from a backup", 0)));
    }
    let behind = remembered.rev.saturating_sub(rev);
    if behind == 0 {
        return Ok(None);
    }
    let mut line = remembered.since(rev);
    let copied = line.jobs.len();
    let mut transaction = to.begin_with("BEGIN IMMEDIATE").await?;
    let events = std::mem::take(&mut line.events);
    rows::write_all(&mut transaction, &line).await?;
    for (number, event) in events {
        let id = event.job.as_str();
        let found: Option<i64> = sqlx::query_scalar("SELECT 1 FROM jobs WHERE id = ?")
            .bind(id)
            .fetch_optional(&mut *transaction)
            .await?;
        if found.is_some() {
            let only = Line { rev: line.rev, events: vec![(number, event)], ..Line::default() };
            rows::write_all(&mut transaction, &only).await?;
        }
    }
    transaction.commit().await?;
    tracing::warn!(behind, copied, "the database was behind its second copy");
    Ok((behind > 1).then(|| older(&format!("it had lost its last {behind} commits"), copied)))
}

/// The name of this database; a new one when it is new, or not the one it was.
async fn incarnate(writer: &SqlitePool, anew: bool) -> Result<String, sqlx::Error> {
    let mut to = writer.acquire().await?;
    if let Some(known) = rows::get(&mut to, "incarnation").await?.filter(|_| !anew) {
        return Ok(known);
    }
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| sqlx::Error::Io(io::Error::other(error.to_string())))?;
    let name = agent_model::ids::hex(&bytes);
    rows::set(&mut to, "incarnation", &name).await?;
    Ok(name)
}

async fn number(from: &SqlitePool, query: &'static str) -> Result<u64, sqlx::Error> {
    let found: Option<i64> = sqlx::query_scalar(query).fetch_one(from).await?;
    Ok(found.map_or(0, natural))
}

impl Store for Sqlite {
    async fn load(&self) -> Result<Loaded, StoreError> {
        let active = format!("SELECT {} FROM jobs WHERE active = 1 ORDER BY seq", rows::JOB);
        let jobs = self.all(active, "the jobs", rows::job).await?;
        let nodes = "SELECT id, document, proof FROM nodes".to_owned();
        let settled = "SELECT replica, node, proof FROM settled".to_owned();
        let last_seq = number(&self.reader, "SELECT MAX(seq) FROM jobs").await;
        Ok(Loaded {
            jobs: jobs.into_iter().map(|(_, job)| job).collect(),
            nodes: self.all(nodes, "the nodes", rows::node).await?,
            settled: self.all(settled, "the settled replicas", rows::settled).await?,
            last_seq: last_seq.map_err(|source| StoreError::Read { what: "the jobs", source })?,
            mended: self.mended,
        })
    }

    async fn commit(&self, changes: &Changes) -> Result<(), StoreError> {
        let rev = self.rev.load(Ordering::Relaxed) + 1;
        let line = Line::of(changes, rev, self.event.load(Ordering::Relaxed) + 1);
        self.redo.add(&line);
        let mut written = self.write(&line).await;
        if written.as_ref().is_err_and(is_full) && self.ballast.give() {
            written = self.write(&line).await;
        }
        written.map_err(|source| StoreError::Commit {
            jobs: changes.jobs.len(),
            events: changes.events.len(),
            source,
        })?;
        self.rev.store(rev, Ordering::Relaxed);
        self.event.fetch_add(changes.events.len() as u64, Ordering::Relaxed);
        self.ballast.take();
        if self.redo.is_large() {
            self.renew_copy().await;
        }
        Ok(())
    }

    async fn job(&self, id: &JobId) -> Result<Option<JobRecord>, StoreError> {
        self.one_job(format!("SELECT {} FROM jobs WHERE id = ?", rows::JOB), id.as_str()).await
    }

    async fn submitted(&self, request: &str) -> Result<Option<JobRecord>, StoreError> {
        self.one_job(format!("SELECT {} FROM jobs WHERE request = ?", rows::JOB), request).await
    }

    async fn page(&self, before: Option<u64>, limit: u32) -> Result<Vec<JobRecord>, StoreError> {
        let query = format!("SELECT {} FROM jobs WHERE seq < ? ORDER BY seq DESC LIMIT ?", rows::JOB);
        let found = sqlx::query(AssertSqlSafe(query))
            .bind(before.map_or(i64::MAX, integer))
            .bind(limit)
            .fetch_all(&self.reader)
            .await
            .map_err(|source| StoreError::Read { what: "the jobs", source })?;
        let read = |row: &SqliteRow| rows::job(row).map(|(_, job)| job).map_err(|e| e.reading("the jobs"));
        found.iter().map(read).collect()
    }

    async fn history(&self, id: &JobId) -> Result<Vec<Event>, StoreError> {
        let query = format!("SELECT {} FROM events WHERE job = ? ORDER BY number", rows::EVENT);
        let what = "the history of a job";
        let found = sqlx::query(AssertSqlSafe(query)).bind(id.as_str()).fetch_all(&self.reader).await;
        let found = found.map_err(|source| StoreError::Read { what, source })?;
        let read = |row: &SqliteRow| match rows::event(row) {
            Ok((_, event)) => Some(Ok(event)),
            Err(RowError::Store(error)) => {
                // One line of a story is no reason to tell none of it.
                tracing::error!(job = %id, error = &error as &dyn std::error::Error, "an event is damaged");
                None
            }
            Err(error) => Some(Err(error.reading(what))),
        };
        found.iter().filter_map(read).collect()
    }
}
