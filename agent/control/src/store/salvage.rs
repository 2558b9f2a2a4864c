//! Makes a new database from a damaged one and its second copy.
//!
//! The damaged file is kept beside the new database as `db.damaged-N`, with the log as it was before SQLite opened
//! it. Rows are read one by one from a working copy; damaged ones are skipped, and records that the second copy has
//! alone, or in a later state, are taken from there. The new database is complete before it takes the old one's name,
//! so that after a crash in between all of this is done again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use agent_model::{Epoch, JobId, failpoint};
use futures_util::TryStreamExt;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};

use super::file::with_suffix;
use super::redo::{Line, Remembered};
use super::rows::{self, RowError};
use super::{Document, Event, JobRecord, Recovery};

/// Consecutive numbers that are tried one by one before larger steps are made.
const PATIENCE: i64 = 256;
/// The size of SQLite's pages, which is its default.
const PAGE: usize = 4096;

/// Why a damaged database could not be salvaged.
#[derive(Debug, thiserror::Error)]
pub(super) enum SalvageError {
    #[error("cannot copy, name or remove {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot write the new database")]
    Write(#[source] sqlx::Error),
}

/// What could be read.
#[derive(Debug, Default)]
struct Salvaged {
    jobs: BTreeMap<u64, (u64, JobRecord)>,
    events: BTreeMap<u64, Event>,
    documents: HashMap<String, Document>,
    /// Damaged rows.
    bad: usize,
}

/// Makes a new database at `path`. `fresh` is an empty one with the schema.
pub(super) async fn salvage(
    path: &Path,
    problem: &str,
    remembered: Remembered,
    fresh: &Path,
) -> Result<Recovery, SalvageError> {
    let kept = set_aside(path)?;
    let work = with_suffix(path, ".work");
    let mut read = read_copy(path, &work, fresh).await?;
    let (rows, broken) = (read.jobs.len(), remembered.broken);
    let copied = merge(&mut read, remembered);
    let lost = orphans(&mut read);
    let recovery = Recovery {
        problem: problem.to_owned(),
        kept: Some(kept),
        rows,
        copied,
        bad: read.bad + broken,
        lost: lost.into_iter().map(String::from).collect(),
    };
    fill(fresh, read, &recovery).await.map_err(SalvageError::Write)?;
    // The log of the damaged one must not be taken for one of the new.
    for suffix in ["-wal", "-shm"] {
        remove(&with_suffix(path, suffix))?;
    }
    failpoint::hit("control.salvage.rename")
        .and_then(|()| std::fs::rename(fresh, path))
        .map_err(|source| SalvageError::File { path: fresh.to_owned(), source })?;
    for suffix in ["", "-wal", "-shm"] {
        remove(&with_suffix(&work, suffix))?;
    }
    Ok(recovery)
}

/// Gives the damaged files names of their own, beside the ones they have.
fn set_aside(path: &Path) -> Result<PathBuf, SalvageError> {
    let free = |number: &u32| !with_suffix(path, &format!(".damaged-{number}")).exists();
    let number = (1..).find(free).unwrap_or_default();
    let kept = with_suffix(path, &format!(".damaged-{number}"));
    failpoint::hit("control.salvage.keep")
        .and_then(|()| std::fs::hard_link(path, &kept).or_else(|_| std::fs::copy(path, &kept).map(drop)))
        .map_err(|source| SalvageError::File { path: kept.clone(), source })?;
    let log = with_suffix(path, WAL_COPY);
    if log.exists() {
        let to = with_suffix(&kept, "-wal");
        std::fs::copy(&log, &to).map_err(|source| SalvageError::File { path: to, source })?;
    }
    Ok(kept)
}

/// The suffix of the copy of the log that is made before SQLite may change it.
pub(super) const WAL_COPY: &str = "-wal.before";

fn remove(path: &Path) -> Result<(), SalvageError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(SalvageError::File { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Reads a copy of the damaged database: with its log, without, and with the first page of a new one.
async fn read_copy(path: &Path, work: &Path, fresh: &Path) -> Result<Salvaged, SalvageError> {
    let mut best = Salvaged::default();
    for attempt in 0..3 {
        for suffix in ["", "-wal", "-shm"] {
            remove(&with_suffix(work, suffix))?;
        }
        let fail = |source| SalvageError::File { path: work.to_owned(), source };
        std::fs::copy(path, work).map_err(fail)?;
        let log = with_suffix(path, WAL_COPY);
        if attempt == 0 && log.exists() {
            std::fs::copy(&log, with_suffix(work, "-wal")).map_err(fail)?;
        }
        if attempt == 2 {
            graft(fresh, work).map_err(fail)?;
        }
        let found = read_all(work).await;
        let is_whole = found.bad == 0 && !found.jobs.is_empty();
        if found.jobs.len() + found.events.len() > best.jobs.len() + best.events.len() {
            best = found;
        }
        if is_whole {
            break;
        }
    }
    if best.jobs.is_empty() && best.events.is_empty() {
        best.bad = best.bad.max(1); // all of it
    }
    Ok(best)
}

/// Gives `work` the first page of `fresh`, which contains where the tables begin.
fn graft(fresh: &Path, work: &Path) -> io::Result<()> {
    let mut page = vec![0; PAGE];
    File::open(fresh)?.read_exact(&mut page)?;
    let mut file = File::options().read(true).write(true).open(work)?;
    let pages = u32::try_from(file.metadata()?.len() / PAGE as u64).unwrap_or(u32::MAX);
    page[28..32].copy_from_slice(&pages.to_be_bytes());
    page.copy_within(24..28, 92); // the number of pages counts
    page[18..20].fill(1); // no log
    page[32..40].fill(0); // no free pages
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&page)
}

async fn read_all(work: &Path) -> Salvaged {
    let mut read = Salvaged::default();
    let options = SqliteConnectOptions::new().filename(work).pragma("cell_size_check", "ON");
    let Ok(mut from) = options.connect().await else {
        read.bad = 1;
        return read;
    };
    let jobs = format!("SELECT {} FROM jobs NOT INDEXED WHERE seq > ? ORDER BY seq", rows::JOB);
    let (jobs, bad) = walk(&mut from, &jobs, rows::job, |(_, job)| job.seq).await;
    read.jobs = jobs.into_iter().map(|(rev, job)| (job.seq, (rev, job))).collect();
    read.bad += bad;
    let events = format!("SELECT {} FROM events NOT INDEXED WHERE number > ? ORDER BY number", rows::EVENT);
    let (events, bad) = walk(&mut from, &events, rows::event, |(number, _)| *number).await;
    read.events = events.into_iter().collect();
    read.bad += bad;
    for order in ["ASC", "DESC"] {
        let (documents, bad) = sweep(&mut from, order).await;
        read.documents.extend(documents.into_iter().map(|one| (one.name(), one)));
        if bad == 0 {
            break;
        }
        read.bad += bad;
    }
    let _ = from.close().await; // a copy that is thrown away
    read
}

/// Reads a table in the order of its numbers, stepping over what cannot be read.
async fn walk<T>(
    from: &mut SqliteConnection,
    query: &str,
    read: impl Fn(&SqliteRow) -> Result<T, RowError>,
    number: impl Fn(&T) -> u64,
) -> (Vec<T>, usize) {
    let (mut found, mut bad) = (Vec::new(), 0);
    let (mut after, mut step) = (i64::MIN, 1);
    loop {
        let mut rows = sqlx::query(AssertSqlSafe(query.to_owned())).bind(after).fetch(&mut *from);
        let failed = loop {
            match rows.try_next().await {
                Ok(None) => break false,
                Err(_) => break true,
                Ok(Some(row)) => match (read(&row), sqlx::Row::try_get::<i64, _>(&row, 0)) {
                    (Ok(one), _) if rows::integer(number(&one)) > after => {
                        after = rows::integer(number(&one));
                        step = 1;
                        found.push(one);
                    }
                    (_, Ok(at)) if at > after => {
                        after = at;
                        step = 1;
                        bad += 1;
                    }
                    _ => break true, // going in circles
                },
            }
        };
        if !failed {
            return (found, bad);
        }
        bad += usize::from(step == 1);
        after = after.max(0).saturating_add(if step > PATIENCE { step } else { 1 });
        step = if step < PATIENCE { step + 1 } else { step.saturating_mul(2) };
        if step > i64::MAX / 4 {
            return (found, bad);
        }
    }
}

/// Reads the documents, which have no numbers, up to the first thing that cannot be read.
async fn sweep(from: &mut SqliteConnection, order: &str) -> (Vec<Document>, usize) {
    let query = format!("SELECT {} FROM documents ORDER BY name {order}", rows::DOCUMENT);
    let (mut found, mut bad) = (Vec::new(), 0);
    let mut rows = sqlx::query(AssertSqlSafe(query)).fetch(from);
    loop {
        match rows.try_next().await {
            Ok(None) => return (found, bad),
            Err(_) => return (found, bad + 1),
            Ok(Some(row)) => match rows::kept(&row) {
                Ok(one) => found.push(one),
                Err(_) => bad += 1,
            },
        }
    }
}

/// Adds what only the second copy has, or has in a later state. Returns the number of jobs this changed.
fn merge(read: &mut Salvaged, remembered: Remembered) -> usize {
    let mut copied = 0;
    for (rev, job) in remembered.jobs.into_values() {
        if read.jobs.get(&job.seq).is_none_or(|(known, _)| *known < rev) {
            read.jobs.insert(job.seq, (rev, job));
            copied += 1;
        }
    }
    for (name, (_, document)) in remembered.documents {
        match document {
            Some(document) => read.documents.insert(name, document),
            None => read.documents.remove(&name),
        };
    }
    for (number, event) in remembered.events {
        read.events.entry(number).or_insert(event);
    }
    copied
}

/// Removes the history of jobs that are lost, and returns their names.
fn orphans(read: &mut Salvaged) -> BTreeSet<JobId> {
    let known: BTreeSet<&JobId> = read.jobs.values().map(|(_, job)| &job.id).collect();
    let removed = read.jobs.values().filter(|(_, job)| job.is_removed());
    let removed: BTreeMap<&JobId, Epoch> = removed.map(|(_, job)| (&job.id, job.epoch)).collect();
    read.events.retain(|_, event| removed.get(&event.job).is_none_or(|last| event.epoch > *last));
    let lost: BTreeSet<JobId> =
        read.events.values().map(|event| &event.job).filter(|id| !known.contains(id)).cloned().collect();
    read.events.retain(|_, event| !lost.contains(&event.job));
    lost
}

/// Writes everything into the new database.
async fn fill(fresh: &Path, read: Salvaged, recovery: &Recovery) -> Result<(), sqlx::Error> {
    failpoint::hit("control.salvage.fill")?;
    let options = SqliteConnectOptions::new().filename(fresh).foreign_keys(true);
    let mut to = options.connect().await?;
    let mut transaction = to.begin().await?;
    let rev = read.jobs.values().map(|(rev, _)| *rev).max().unwrap_or_default();
    let line = Line {
        rev,
        jobs: read.jobs.into_values().collect(),
        events: read.events.into_iter().collect(),
        documents: read.documents.into_values().collect(),
        ..Line::default()
    };
    rows::write_all(&mut transaction, &line).await?;
    let text = serde_json::to_string(recovery).unwrap_or_default(); // a plain struct
    rows::set(&mut transaction, "recovery", &text).await?;
    transaction.commit().await?;
    to.close().await
}
