//! Opening the database's file at a start.
//!
//! Owns the schema and its versions (`PRAGMA user_version`), and the order of a start: refuse a file of a later
//! version, check every page and the rows of jobs and documents, salvage a damaged file, add the commits that only
//! the second copy ([`redo`]) has, and report what happened ([`Recovery`]). A long history does not delay a start: of a
//! file larger than [`AT_ONCE`] only what jobs depend on is checked before, and the rest later ([`check_rest`]); what is
//! found then is salvaged at the next start. Invariants: a file that is damaged is set aside and never replaced by an
//! empty one; one that is missing although there was one is mended as a damaged one; one that is newer than this program
//! is refused with an error.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use agent_model::failpoint;
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnection, SqlitePool, SqliteRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};

use super::file::{connect, is_damage, options, random_name, with_suffix, words};
use super::redo::{self, Line, Remembered};
use super::rows::last_commit;
use super::rows::{self, RowError};
use super::salvage::{self, SalvageError, WAL_COPY};
use super::{Missing, choice};

/// One step per version of the schema, oldest first. A step that was released never changes.
const VERSIONS: [&str; 4] = [
    include_str!("schema.sql"),
    include_str!("schema_2.sql"),
    include_str!("schema_3.sql"),
    include_str!("schema_4.sql"),
];

/// The largest file, in bytes, that is checked as a whole before a start: that takes a fraction of a second.
pub(super) const AT_ONCE: u64 = 32 * 1024 * 1024;

/// The suffix of the file that says that the database was found to be damaged while it was in use.
const SUSPECT: &str = ".suspect";

/// Why the controller's database cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum OpenStoreError {
    #[error("cannot open the controller's database {}", path.display())]
    File { path: PathBuf, source: sqlx::Error },
    #[error("cannot use {}", path.display())]
    Beside { path: PathBuf, source: io::Error },
    #[error("the controller's database {} is damaged ({problem}) and could not be salvaged", path.display())]
    Damaged { path: PathBuf, problem: String, source: Option<Box<dyn std::error::Error + Send + Sync>> },
    #[error("the controller's database {} has version {found}; this program knows {known}", path.display())]
    Newer { path: PathBuf, found: usize, known: usize },
    #[error("cannot bring the controller's database {} to version {version}", path.display())]
    Upgrade { path: PathBuf, version: usize, source: sqlx::Error },
}

/// What was repaired in a damaged or old database.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recovery {
    /// What was found.
    pub(crate) problem: String,
    /// Where the damaged database is.
    pub(crate) kept: Option<PathBuf>,
    /// Jobs that could be read from it.
    pub(crate) rows: usize,
    /// Jobs whose latest state came from the second copy.
    pub(crate) copied: usize,
    /// Things in it that could not be read: rows, stretches of rows, lines of the second copy.
    pub(crate) bad: usize,
    /// Jobs of which only the name is left.
    pub(crate) lost: Vec<String>,
}

impl Recovery {
    /// What the database may lack because of it.
    pub(crate) fn missing(&self) -> Missing {
        match self.kept {
            _ if self.bad > 0 || !self.lost.is_empty() => Missing::Any,
            Some(_) => Missing::Nothing,
            None => Missing::Later,
        }
    }
}

/// A database that passed the checks.
pub(super) struct Opened {
    pub(super) writer: SqlitePool,
    /// Another one after it was rebuilt, or found to be older than it should be.
    pub(super) incarnation: String,
    pub(super) mended: bool,
    pub(super) recovery: Option<Recovery>,
    /// Its history was not checked.
    pub(super) unchecked: bool,
}

/// Opens the database at `path`, creates it when absent, checks and repairs it and brings its schema up to date. One of
/// more than `at_once` bytes is not checked as a whole.
pub(super) async fn open(path: &Path, archive: &Path, at_once: u64) -> Result<Opened, OpenStoreError> {
    refuse_newer(path)?;
    let copy = redo::beside(path);
    let mut remembered = redo::read(&copy).unwrap_or_else(|error| {
        tracing::warn!(path = %copy.display(), %error, "cannot read second copy of the database");
        None
    });
    keep_log(path)?;
    // Missing, emptied and damaged are one case: there was a database, and it is mended from what is left.
    let is_known = archive.exists() || remembered.is_some();
    let is_missing = is_known && !path.exists();
    if is_missing {
        File::create_new(path).map_err(|source| OpenStoreError::Beside { path: path.to_owned(), source })?;
    }
    let is_empty = path.metadata().is_ok_and(|file| file.len() == 0);
    let suspect = with_suffix(path, SUSPECT);
    let is_large = path.metadata().is_ok_and(|file| file.len() > at_once);
    let unchecked = is_large && !suspect.exists();
    let looked = if is_empty && is_known {
        Looked::Damaged(if is_missing { "it is missing" } else { "it is empty" }.to_owned())
    } else {
        look(path, if unchecked { CheckScope::Needed(remembered.as_ref()) } else { CheckScope::All }).await?
    };
    let (writer, mut mended) = match looked {
        Looked::Whole(writer) => (writer, false),
        Looked::Damaged(problem) => (mend(path, problem, remembered.take().unwrap_or_default()).await?, true),
    };
    let unchecked = unchecked && !mended;
    if !unchecked {
        let _ = std::fs::remove_file(&suspect); // most often there is none; one that stays costs a slow start
    }
    let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
    let mut recovery = {
        let mut to = writer.acquire().await.map_err(cannot)?;
        recall(&mut to).await.map_err(cannot)?
    };
    if let Err(source) = demand_writable(&writer).await {
        writer.close().await; // what is open read-only is shared with the next one that opens it
        return Err(cannot(source));
    }
    if let Some(behind) = catch_up(&writer, remembered, mended).await.map_err(cannot)? {
        mended = true;
        recovery = Some(behind);
    }
    let incarnation = incarnate(&writer, mended).await.map_err(cannot)?;
    Ok(Opened { writer, incarnation, mended, recovery, unchecked })
}

/// How much of the database is checked.
#[derive(Clone, Copy)]
enum CheckScope<'a> {
    All,
    /// What jobs depend on: documents, jobs that have not ended, and the latest that did. An index that lost an entry
    /// would hide a job, so there must be all that the second copy knows.
    Needed(Option<&'a Remembered>),
}

/// The result of a look at the database.
enum Looked {
    Whole(SqlitePool),
    Damaged(String),
}

/// Refuses a file of a later version before anything changes it: the number is at a fixed offset.
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

/// Copies the write-ahead log that a killed process left, before SQLite applies it or discards it.
fn keep_log(path: &Path) -> Result<(), OpenStoreError> {
    let (log, copy) = (with_suffix(path, "-wal"), with_suffix(path, WAL_COPY));
    if log.metadata().is_ok_and(|file| file.len() > 0) {
        if let Err(error) = std::fs::copy(&log, &copy) {
            // Most likely a full disk; without a copy a damaged log is only less well salvaged.
            tracing::warn!(path = %copy.display(), %error, "cannot copy log of database");
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

/// Opens and checks it.
async fn look(path: &Path, scope: CheckScope<'_>) -> Result<Looked, OpenStoreError> {
    let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
    let writer = match connect(options(path)).await {
        Ok(writer) => writer,
        Err(error) if is_damage(&error) => return Ok(Looked::Damaged(words(&error))),
        Err(source) => return Err(cannot(source)),
    };
    let problem = match check(&writer, path, scope).await {
        Ok(()) => return Ok(Looked::Whole(writer)),
        Err(end) => end.problem(path),
    };
    writer.close().await;
    problem.map(Looked::Damaged)
}

/// Checks everything while the controller works; returns what is wrong. The next start checks all of a database that was
/// found to be damaged, and salvages it.
pub(super) async fn check_rest(path: &Path) -> Result<Option<String>, OpenStoreError> {
    let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
    // It takes its time, and that is nothing to warn of.
    let quiet = options(path).read_only(true).disable_statement_logging();
    let reader = connect(quiet).await.map_err(cannot)?;
    let checked = check_all(&reader).await;
    reader.close().await;
    let Err(end) = checked else { return Ok(None) };
    let (problem, suspect) = (end.problem(path)?, with_suffix(path, SUSPECT));
    failpoint::hit("control.store.suspect")
        .and_then(|()| agent_fs::write_durable(&suspect, problem.as_bytes()))
        .map_err(|source| OpenStoreError::Beside { path: suspect, source })?;
    Ok(Some(problem))
}

/// What a check may end with.
enum CheckEnd {
    /// Nothing can be said about the content.
    Refused(OpenStoreError),
    Row(RowError),
    /// SQLite's own check found this.
    Found(String),
}

impl CheckEnd {
    /// What is wrong with the database, if it is that.
    fn problem(self, path: &Path) -> Result<String, OpenStoreError> {
        match self {
            CheckEnd::Refused(error) => Err(error),
            CheckEnd::Row(RowError::Store(error)) => Ok(error.to_string()),
            CheckEnd::Row(RowError::Sql(error)) if is_damage(&error) => Ok(words(&error)),
            CheckEnd::Row(RowError::Sql(source)) => {
                Err(OpenStoreError::File { path: path.to_owned(), source })
            }
            CheckEnd::Found(problem) => Ok(problem),
        }
    }
}

impl From<sqlx::Error> for CheckEnd {
    fn from(error: sqlx::Error) -> CheckEnd {
        CheckEnd::Row(error.into())
    }
}

async fn check(writer: &SqlitePool, path: &Path, scope: CheckScope<'_>) -> Result<(), CheckEnd> {
    let found: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(writer).await?;
    let (found, known) = (usize::try_from(found).unwrap_or(usize::MAX), VERSIONS.len());
    if found > known {
        return Err(CheckEnd::Refused(OpenStoreError::Newer { path: path.to_owned(), found, known }));
    }
    match scope {
        CheckScope::Needed(remembered) if found == known => {
            add_indexes(writer).await?;
            check_needed(writer, remembered).await?;
        }
        _ => {
            check_pages(writer).await?;
            upgrade(writer, path, found).await?;
            add_indexes(writer).await?;
            check_rows(writer).await?;
        }
    }
    // What goes on counts from these.
    last_commit(&mut *writer.acquire().await?).await?;
    let _: Option<i64> = sqlx::query_scalar(rows::LAST_EVENT).fetch_one(writer).await?;
    Ok(())
}

async fn check_all(from: &SqlitePool) -> Result<(), CheckEnd> {
    check_pages(from).await?;
    check_rows(from).await
}

/// SQLite's own check of the whole file.
async fn check_pages(from: &SqlitePool) -> Result<(), CheckEnd> {
    let problem: String = sqlx::query_scalar("PRAGMA integrity_check(1)").fetch_one(from).await?;
    match problem.as_str() {
        "ok" => Ok(()),
        _ => Err(CheckEnd::Found(problem.lines().last().unwrap_or_default().trim().to_owned())),
    }
}

/// Every job and document is what was written.
async fn check_rows(from: &SqlitePool) -> Result<(), CheckEnd> {
    let jobs = format!("SELECT {} FROM jobs", rows::JOB);
    believe(from, &jobs, |row| rows::job(row).map(drop)).await?;
    check_documents(from).await
}

async fn check_documents(from: &SqlitePool) -> Result<(), CheckEnd> {
    let documents = format!("SELECT {} FROM documents", rows::DOCUMENT);
    believe(from, &documents, |row| rows::kept(row).map(drop)).await
}

async fn check_needed(from: &SqlitePool, remembered: Option<&Remembered>) -> Result<(), CheckEnd> {
    let (jobs, open) = (format!("SELECT {} FROM jobs", rows::JOB), rows::ACTIVE);
    let mut unended = BTreeSet::new();
    let mut read = |row: &SqliteRow| {
        unended.insert(rows::job(row)?.1.seq);
        Ok(())
    };
    believe(from, &format!("{jobs} WHERE active IN {open}"), &mut read).await?;
    let latest = format!("{jobs} ORDER BY seq DESC LIMIT {}", redo::ENDED);
    believe(from, &latest, |row| rows::job(row).map(drop)).await?;
    check_documents(from).await?;
    let rev = last_commit(&mut *from.acquire().await?).await?;
    for (at, job) in remembered.into_iter().flat_map(|copy| copy.jobs.values()) {
        if *at > rev || job.state.is_terminal() || unended.contains(&job.seq) {
            continue;
        }
        let row = AssertSqlSafe(format!("{jobs} WHERE seq = ?"));
        let row = sqlx::query(row).bind(rows::integer(job.seq)).fetch_optional(from).await?;
        let found = row.as_ref().map(rows::job).transpose().map_err(CheckEnd::Row)?;
        let ended = found.filter(|(_, found)| found.state.is_terminal());
        if ended.is_none() {
            return Err(CheckEnd::Found(format!("the job {} is missing", job.id)));
        }
    }
    Ok(())
}

/// Without the indexes of lists, to find some jobs is to read all.
async fn add_indexes(writer: &SqlitePool) -> Result<(), sqlx::Error> {
    match sqlx::raw_sql(AssertSqlSafe(choice::indexes())).execute(writer).await {
        Err(error) if is_damage(&error) => Err(error),
        _ => Ok(()), // nothing is wrong without them, on a full disk
    }
}

/// Reads every row of a query.
async fn believe(
    writer: &SqlitePool,
    query: &str,
    mut read: impl FnMut(&SqliteRow) -> Result<(), RowError>,
) -> Result<(), CheckEnd> {
    let mut rows = sqlx::query(AssertSqlSafe(query.to_owned())).fetch(writer);
    while let Some(row) = rows.try_next().await? {
        read(&row).map_err(CheckEnd::Row)?;
    }
    Ok(())
}

/// SQLite also opens a database that it may only read. That would not be noticed before the first job.
async fn demand_writable(pool: &SqlitePool) -> Result<(), sqlx::Error> {
    let stamp = AssertSqlSafe(format!("PRAGMA user_version = {}", VERSIONS.len()));
    match sqlx::raw_sql(stamp).execute(pool).await {
        Err(error) if is_read_only(&error) => Err(error),
        _ => Ok(()), // a full disk is no reason not to start
    }
}

fn is_read_only(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<i32>().ok());
    code.is_some_and(|code| code & 0xff == 8)
}

async fn upgrade(pool: &SqlitePool, path: &Path, found: usize) -> Result<(), CheckEnd> {
    for (step, sql) in VERSIONS.iter().enumerate().skip(found) {
        let version = step + 1;
        let failed = |source| {
            if is_damage(&source) {
                return CheckEnd::from(source);
            }
            CheckEnd::Refused(OpenStoreError::Upgrade { path: path.to_owned(), version, source })
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
    tracing::error!(path = %path.display(), problem, "salvaging database of controller: it is damaged");
    let damaged = |problem: String, source: Option<SalvageError>| OpenStoreError::Damaged {
        path: path.to_owned(),
        problem,
        source: source.map(Into::into),
    };
    let fresh = with_suffix(path, ".new");
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(with_suffix(&fresh, suffix)); // of a start that was cut short
    }
    match look(&fresh, CheckScope::All).await? {
        Looked::Whole(new) => new.close().await,
        Looked::Damaged(worse) => return Err(damaged(worse, None)),
    }
    let done = salvage::salvage(path, &problem, remembered, &fresh).await;
    let recovery = done.map_err(|error| damaged(problem.clone(), Some(error)))?;
    tracing::error!(
        kept = ?recovery.kept, rows = recovery.rows, copied = recovery.copied, bad = recovery.bad,
        lost = ?recovery.lost, "rebuilt database of controller"
    );
    match look(path, CheckScope::All).await? {
        Looked::Whole(writer) => Ok(writer),
        Looked::Damaged(worse) => Err(damaged(worse, None)),
    }
}

async fn recall(from: &mut SqliteConnection) -> Result<Option<Recovery>, sqlx::Error> {
    let text = rows::get(from, "recovery").await?;
    let told: Option<Recovery> = text.and_then(|text| serde_json::from_str(&text).ok());
    Ok(told.filter(|told| told.kept.as_ref().is_some_and(|kept| kept.exists())))
}

/// Adds the commits that only the second copy has. A crash may leave one such commit; more of them, the copy of
/// another database, or no copy at all mean that this database is an older one.
async fn catch_up(
    writer: &SqlitePool,
    remembered: Option<Remembered>,
    mended: bool,
) -> Result<Option<Recovery>, sqlx::Error> {
    let mut to = writer.acquire().await?;
    let known = rows::get(&mut to, "incarnation").await?;
    let rev = last_commit(&mut to).await?;
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
    tracing::warn!(behind, copied, "recovered commits from second copy of the database");
    Ok((behind > 1).then(|| older(&format!("it had lost its last {behind} commits"), copied)))
}

/// The name of this database; a new one when it is new, was rebuilt or is an older one.
async fn incarnate(writer: &SqlitePool, anew: bool) -> Result<String, sqlx::Error> {
    let mut to = writer.acquire().await?;
    if let Some(known) = rows::get(&mut to, "incarnation").await?.filter(|_| !anew) {
        return Ok(known);
    }
    let name = random_name()?;
    rows::set(&mut to, "incarnation", &name).await?;
    Ok(name)
}
