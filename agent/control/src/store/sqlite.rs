//! The store in one SQLite file: write-ahead log, every commit forced to the disk.
//!
//! Owns the connections and every query. Invariants: a commit that failed in any way is never acknowledged, and the
//! connection it failed on is not used again. Only the queue's task writes, so writers never wait for each other.
//! Opening the file at a start is in [`opening`].

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_model::job::MAX_TASKS;
use agent_model::words::duration;
use agent_model::{JobId, Verdict, failpoint};
use async_trait::async_trait;
use parking_lot::RwLock;
use sqlx::sqlite::{SqlitePool, SqliteRow};
use sqlx::{AssertSqlSafe, Connection};

use super::ballast::Ballast;
use super::file::{self, Names, connect, is_full, options, random_name, with_suffix};
use super::opening::{self, OpenStoreError, Opened};
use super::redo::{self, Line, Redo};
use super::rows::{self, RowError, integer, last_commit, last_writer, natural};
use super::salvage::WAL_COPY;
use super::{Among, Changes, Document, Event, JobRecord, Loaded, Recovery, Store, StoreError};

/// See the module.
#[derive(Debug)]
pub(super) struct Sqlite {
    path: PathBuf,
    open: RwLock<OpenFile>,
    redo: Redo,
    ballast: Ballast,
    /// The numbers of the last commit and the last event.
    rev: AtomicU64,
    event: AtomicU64,
    incarnation: String,
    /// Distinguishes this process from earlier and later users of the database.
    owner: String,
    /// Whether this start had to repair the database, or found an older one.
    mended: bool,
    recovery: Option<Recovery>,
    /// Its history is still to be checked.
    unchecked: bool,
    /// What was wrong with it.
    damage: OnceLock<String>,
    /// What happened to the name of a file while it was open, the first time.
    moved: OnceLock<String>,
}

/// What came of a commit that did not fail.
enum Written {
    Done,
    /// The database lacks commits before it, which this controller made.
    Behind,
    /// Another controller has written since the one before.
    Taken,
}

/// The open file.
#[derive(Debug)]
struct OpenFile {
    /// One connection, so that no read ever makes a commit wait.
    writer: SqlitePool,
    /// Another connection.
    reader: SqlitePool,
    names: Names,
}

impl OpenFile {
    async fn of(writer: SqlitePool, path: &Path) -> Result<OpenFile, sqlx::Error> {
        let reader = connect(options(path).read_only(true)).await?;
        Ok(OpenFile { writer, reader, names: Names::of(path) })
    }
}

impl Sqlite {
    /// Opens the database at `path`, whatever state it is in. The history of one of more than `at_once` bytes is left to
    /// [`Store::check_rest`].
    pub(super) async fn open(path: &Path, archive: &Path, at_once: u64) -> Result<Sqlite, OpenStoreError> {
        let Opened { writer, incarnation, mended, recovery, unchecked } =
            opening::open(path, archive, at_once).await?;
        let cannot = |source| OpenStoreError::File { path: path.to_owned(), source };
        let rev = async { last_commit(&mut *writer.acquire().await?).await };
        let sqlite = Sqlite {
            path: path.to_owned(),
            redo: Redo::new(&redo::beside(path)),
            ballast: Ballast::new(&with_suffix(path, ".ballast")),
            rev: AtomicU64::new(rev.await.map_err(cannot)?),
            event: AtomicU64::new(number(&writer, rows::LAST_EVENT).await.map_err(cannot)?),
            open: RwLock::new(OpenFile::of(writer, path).await.map_err(cannot)?),
            incarnation,
            owner: random_name().map_err(cannot)?,
            mended,
            recovery,
            unchecked,
            damage: OnceLock::new(),
            moved: OnceLock::new(),
        };
        sqlite.renew_copy().await;
        let _ = std::fs::remove_file(with_suffix(path, WAL_COPY)); // not needed any more; the next start replaces it
        Ok(sqlite)
    }

    #[cfg(test)]
    pub(super) fn mended(&self) -> bool {
        self.mended
    }

    #[cfg(test)]
    pub(super) fn pool(&self) -> SqlitePool {
        self.writer()
    }

    fn writer(&self) -> SqlitePool {
        self.open.read().writer.clone()
    }

    fn reader(&self) -> SqlitePool {
        self.open.read().reader.clone()
    }

    /// Writes the database back from the open connection if a name of its files is gone: nothing that is only in
    /// unlinked files may be acknowledged.
    async fn stay(&self) -> Result<(), StoreError> {
        let Some(lost) = self.open.read().names.lost().map(Path::to_owned) else { return Ok(()) };
        tracing::error!(path = %lost.display(), "writing the database back: somebody removed or replaced this file of it");
        let new = with_suffix(&self.path, ".new");
        let written = self.write_back(&new).await;
        if written.is_err() {
            let _ = std::fs::remove_file(&new); // the error says more
        }
        written.map_err(|source| StoreError::Moved { path: lost.clone(), source })?;
        self.moved.get_or_init(|| format!("{} was removed or replaced", lost.display()));
        Ok(())
    }

    async fn write_back(&self, new: &Path) -> Result<(), sqlx::Error> {
        failpoint::hit("control.store.back")?;
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(with_suffix(new, suffix)); // of a try that was cut short
        }
        let old = (self.writer(), self.reader());
        let into = new.display().to_string();
        sqlx::query("VACUUM INTO ?").bind(into).execute(&old.0).await?;
        let (from, to) = (new.to_owned(), self.path.clone());
        let named = agent_blocking::spawn_blocking(move || file::take_place(&from, &to)).await;
        named.map_err(io::Error::other).flatten()?;
        let writer = connect(options(&self.path)).await?;
        *self.open.write() = OpenFile::of(writer, &self.path).await?;
        // These hold the old files. They are closed last, because SQLite looks at the names then.
        old.0.close().await;
        old.1.close().await;
        Ok(())
    }

    /// Rewrites the second copy.
    async fn renew_copy(&self) {
        match self.copy_lines().await {
            Ok(lines) => self.redo.renew(&lines),
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot trim second copy of the database"
                );
            }
        }
    }

    async fn copy_lines(&self) -> Result<Vec<Line>, StoreError> {
        let rev = self.rev.load(Ordering::Relaxed);
        let ended = format!(
            "SELECT {} FROM jobs WHERE active NOT IN {} ORDER BY seq DESC LIMIT {}",
            rows::JOB,
            rows::ACTIVE,
            redo::ENDED
        );
        let active = format!("SELECT {} FROM jobs WHERE active IN {} ORDER BY seq", rows::JOB, rows::ACTIVE);
        let head = Line { incarnation: Some(self.incarnation.clone()), rev, ..Line::default() };
        let mut lines = vec![head];
        for query in [ended, active] {
            let found = self.all(query, "the jobs", rows::job).await?;
            lines.extend(found.into_iter().map(|job| Line { rev, jobs: vec![job], ..Line::default() }));
        }
        lines.push(Line { rev, documents: self.documents().await?, ..Line::default() });
        Ok(lines)
    }

    async fn documents(&self) -> Result<Vec<Document>, StoreError> {
        self.all(format!("SELECT {} FROM documents", rows::DOCUMENT), "the documents", rows::kept).await
    }

    async fn all<T>(
        &self,
        query: String,
        what: &'static str,
        read: impl Fn(&SqliteRow) -> Result<T, RowError>,
    ) -> Result<Vec<T>, StoreError> {
        let found = sqlx::query(AssertSqlSafe(query)).fetch_all(&self.reader()).await;
        let found = found.map_err(|source| StoreError::Read { what, source })?;
        found.iter().map(|row| read(row).map_err(|error| error.reading(what))).collect()
    }

    /// One commit. A connection on which anything
    /// failed is closed: the system may have dropped what it did not force to the disk, and nothing may depend on
    /// that.
    async fn write(&self, line: &Line) -> Result<Written, sqlx::Error> {
        let mut connection = self.writer().acquire().await?;
        let written = async {
            let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
            let (owner, last) = last_writer(&mut transaction).await?;
            if last + 1 < line.rev {
                // A connection that was opened anew took in less of a harmed log than was in it, whoever wrote the rest.
                return Ok(Written::Behind);
            }
            if owner.as_ref() != Some(&self.owner) {
                // The first commit of this controller, or another one has written since.
                if last + 1 != line.rev {
                    return Ok(Written::Taken);
                }
                rows::set(&mut transaction, rows::OWNER, &self.owner).await?;
            }
            rows::write_all(&mut transaction, line).await?;
            failpoint::hit("control.store.commit")?;
            transaction.commit().await?;
            Ok(Written::Done)
        };
        let written = written.await;
        if written.is_err() {
            connection.close_on_drop();
        }
        written
    }

    /// Takes in the tasks of an array that have ended: its own record may be older than theirs.
    async fn recount(&self, job: &mut JobRecord) -> Result<(), StoreError> {
        let id = job.id.clone();
        let Some(tasks) = &mut job.tasks else { return Ok(()) };
        for task in self.page(Among::TasksOf(&id), None, MAX_TASKS).await? {
            let (index, verdict) = (task.id.as_task().map(|(_, index)| index), task.state.verdict());
            if let (Some(index), Some(verdict)) = (index, verdict) {
                tasks.begin(index);
                let (exit, fault) = task.outcome.map_or((None, None), |ended| (ended.exit, ended.fault));
                let made = task.made.filter(|_| verdict == Verdict::Completed);
                if let (Some(steps), Some(made)) = (&mut job.steps, made) {
                    steps.complete(index, made, None);
                }
                if tasks.settle(index, verdict, exit) && verdict == Verdict::Failed {
                    fault.into_iter().for_each(|fault| tasks.blame(fault.blame));
                }
            }
        }
        Ok(())
    }

    /// Up to `limit` jobs of a query, from the place `at` on.
    async fn jobs(
        &self,
        query: String,
        at: i64,
        limit: u32,
        given: Vec<String>,
    ) -> Result<Vec<JobRecord>, StoreError> {
        let query = sqlx::query(AssertSqlSafe(query)).bind(at).bind(limit);
        let query = given.into_iter().fold(query, |query, text| query.bind(text));
        let found = query.fetch_all(&self.reader()).await;
        let found = found.map_err(|source| StoreError::Read { what: "the jobs", source })?;
        let read = |row: &SqliteRow| rows::job(row).map(|(_, job)| job).map_err(|e| e.reading("the jobs"));
        found.iter().map(read).collect()
    }

    async fn one_job(&self, query: String, key: &str) -> Result<Option<JobRecord>, StoreError> {
        let row = sqlx::query(AssertSqlSafe(query)).bind(key).fetch_optional(&self.reader()).await;
        let row = row.map_err(|source| StoreError::Read { what: "a job", source })?;
        let read = |row| rows::job(&row).map(|(_, job)| job).map_err(|error| error.reading("a job"));
        row.map(read).transpose()
    }
}

/// The names of the jobs that have not ended, oldest first. Changes nothing.
pub(super) async fn unfinished(path: &Path) -> Result<Vec<String>, sqlx::Error> {
    let reader = connect(options(path).read_only(true)).await?;
    let query = format!("SELECT id FROM jobs WHERE active IN {} ORDER BY seq", rows::ACTIVE);
    let names = sqlx::query_scalar(AssertSqlSafe(query)).fetch_all(&reader).await;
    reader.close().await;
    names
}

async fn number(from: &SqlitePool, query: &'static str) -> Result<u64, sqlx::Error> {
    let found: Option<i64> = sqlx::query_scalar(query).fetch_one(from).await?;
    Ok(found.map_or(0, natural))
}

#[async_trait]
impl Store for Sqlite {
    async fn load(&self) -> Result<Loaded, StoreError> {
        let active = format!("SELECT {} FROM jobs WHERE active IN {} ORDER BY seq", rows::JOB, rows::ACTIVE);
        let jobs = self.all(active, "the jobs", rows::job).await?;
        let mut jobs: Vec<JobRecord> = jobs.into_iter().map(|(_, job)| job).collect();
        if self.mended {
            for job in &mut jobs {
                self.recount(job).await?;
            }
        }
        let mut trials = Vec::new();
        for sweep in jobs.iter().filter(|job| job.spec.sweep.is_some()) {
            let mut ended = super::earlier_trials(self, &sweep.spec).await?;
            ended.extend(self.page(Among::TasksOf(&sweep.id), None, MAX_TASKS).await?);
            let ended = ended.into_iter().filter(|trial| trial.state.is_terminal());
            trials.extend(ended.map(|trial| (sweep.id.clone(), trial)));
        }
        let last_seq = number(&self.reader(), "SELECT MAX(seq) FROM jobs").await;
        Ok(Loaded {
            jobs,
            trials,
            documents: self.documents().await?,
            last_seq: last_seq.map_err(|source| StoreError::Read { what: "the jobs", source })?,
            mended: self.mended,
            missing: self
                .recovery
                .as_ref()
                .filter(|_| self.mended)
                .map(Recovery::missing)
                .unwrap_or_default(),
        })
    }

    async fn commit(&self, changes: &Changes) -> Result<(), StoreError> {
        self.stay().await?;
        let rev = self.rev.load(Ordering::Relaxed) + 1;
        let line = Line::of(changes, rev, self.event.load(Ordering::Relaxed) + 1);
        self.redo.add(&line);
        let mut written = self.write(&line).await;
        let is_full =
            |written: &Result<_, _>| written.as_ref().is_err_and(|error| is_full(error, &self.path));
        let mut full = is_full(&written);
        if full && self.ballast.give() {
            written = self.write(&line).await;
            full = is_full(&written);
        }
        let (jobs, events) = (changes.jobs.len(), changes.events.len());
        match written.map_err(|source| StoreError::Commit { jobs, events, full, source })? {
            Written::Done => {}
            Written::Behind => return Err(StoreError::Behind),
            Written::Taken => return Err(StoreError::Taken),
        }
        self.rev.store(rev, Ordering::Relaxed);
        self.event.fetch_add(changes.events.len() as u64, Ordering::Relaxed);
        self.ballast.take();
        if self.redo.is_to_be_renewed() {
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

    async fn page(
        &self,
        among: Among<'_>,
        before: Option<u64>,
        limit: u32,
    ) -> Result<Vec<JobRecord>, StoreError> {
        let (query, given) = among.query(rows::JOB);
        self.jobs(query, before.map_or(i64::MAX, integer), limit, given).await
    }

    async fn oldest(&self, after: u64, limit: u32) -> Result<Vec<JobRecord>, StoreError> {
        let query =
            format!("SELECT {} FROM jobs WHERE seq > ?1 AND active < 2 ORDER BY seq LIMIT ?2", rows::JOB);
        self.jobs(query, integer(after), limit, Vec::new()).await
    }

    async fn history(&self, id: &JobId) -> Result<Vec<Event>, StoreError> {
        let query = format!("SELECT {} FROM events WHERE job = ? ORDER BY number", rows::EVENT);
        let what = "the history of a job";
        let found = sqlx::query(AssertSqlSafe(query)).bind(id.as_str()).fetch_all(&self.reader()).await;
        let found = found.map_err(|source| StoreError::Read { what, source })?;
        let read = |row: &SqliteRow| match rows::event(row) {
            Ok((_, event)) => Some(Ok(event)),
            Err(RowError::Store(error)) => {
                // One damaged event is no reason to return none.
                tracing::error!(job = %id, error = &error as &dyn std::error::Error, "skipped damaged event");
                None
            }
            Err(error) => Some(Err(error.reading(what))),
        };
        found.iter().filter_map(read).collect()
    }

    fn has_room(&self) -> bool {
        self.ballast.take()
    }

    fn incarnation(&self) -> &str {
        &self.incarnation
    }

    fn recovery(&self) -> Option<&Recovery> {
        self.recovery.as_ref().filter(|recovery| recovery.kept.as_ref().is_none_or(|kept| kept.exists()))
    }

    async fn check_rest(&self) {
        if !self.unchecked {
            return;
        }
        let path = &self.path;
        let begun = std::time::Instant::now();
        match opening::check_rest(path).await {
            Ok(None) => tracing::info!(took = duration(begun.elapsed()), "checked history of jobs"),
            Ok(Some(problem)) => {
                tracing::error!(path = %path.display(), problem, "found damage in the history of jobs");
                self.damage.get_or_init(|| problem);
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(path = %path.display(), error, "cannot check the history of jobs");
            }
        }
    }

    fn damage(&self) -> Option<&str> {
        self.damage.get().map(String::as_str)
    }

    fn is_moved(&self) -> bool {
        self.open.read().names.lost().is_some()
    }

    fn moved(&self) -> Option<&str> {
        self.moved.get().map(String::as_str)
    }

    async fn close(&self) {
        self.reader().close().await;
        self.writer().close().await;
    }
}
