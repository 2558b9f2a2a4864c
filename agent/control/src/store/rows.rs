//! Rows of the database and their checksums.
//!
//! Owns the SQL of every table. Invariants: a row is written with a checksum over all of its columns and the number
//! of its commit, and is accepted only when its document is valid and its checksum, if it has one, matches.

use agent_model::{Epoch, Timestamp};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::redo::Line;
use super::{Document, Event, JobRecord, StoreError, checksum};

/// The number of the last event.
pub(super) const LAST_EVENT: &str = "SELECT MAX(number) FROM events";

/// The columns of a job, in the order [`job`] reads them.
pub(super) const JOB: &str = "seq, id, request, active, document, rev, proof";
/// The columns of an event, in the order [`event`] reads them.
pub(super) const EVENT: &str = "number, job, at, epoch, node, text, proof";

/// The columns of a document, in the order [`kept`] reads them.
pub(super) const DOCUMENT: &str = "name, document, proof";

/// The name under which the last writer is stored.
pub(super) const OWNER: &str = "owner";

/// Writes all changes of a line.
pub(super) async fn write_all(to: &mut SqliteConnection, line: &Line) -> Result<(), sqlx::Error> {
    for (rev, job) in &line.jobs {
        let (seq, rev, text) = (integer(job.seq), integer(*rev), document(job));
        let active = standing(job);
        if job.is_removed() {
            sqlx::query("DELETE FROM events WHERE job = ?").bind(job.id.as_str()).execute(&mut *to).await?;
        } else {
            // The name of a removed job is free again.
            sqlx::query("DELETE FROM jobs WHERE id = ? AND seq < ? AND active = 2")
                .bind(job.id.as_str())
                .bind(seq)
                .execute(&mut *to)
                .await?;
        }
        sqlx::query(
            "INSERT INTO jobs (seq, id, request, active, document, rev, proof) VALUES (?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (seq) DO UPDATE
             SET active = excluded.active, document = excluded.document, rev = excluded.rev,
                 proof = excluded.proof",
        )
        .bind(seq)
        .bind(job.id.as_str())
        .bind(&job.request)
        .bind(active)
        .bind(&text)
        .bind(rev)
        .bind(job_proof(seq, job.id.as_str(), &job.request, active, &text, rev))
        .execute(&mut *to)
        .await?;
    }
    for (number, event) in &line.events {
        write_event(to, *number, event).await?;
    }
    for one in &line.documents {
        let (name, text) = (one.name(), document(one));
        sqlx::query(
            "INSERT INTO documents (name, document, proof) VALUES (?, ?, ?)
             ON CONFLICT (name) DO UPDATE SET document = excluded.document, proof = excluded.proof",
        )
        .bind(&name)
        .bind(&text)
        .bind(document_proof(&name, &text))
        .execute(&mut *to)
        .await?;
    }
    for name in &line.dropped {
        sqlx::query("DELETE FROM documents WHERE name = ?").bind(name).execute(&mut *to).await?;
    }
    set(to, "rev", &line.rev.to_string()).await
}

/// The values of the column `active` of jobs that have not ended.
pub(super) const ACTIVE: &str = "(1, 4)";

/// The column `active`: a job has ended (0) or not (1), or was removed (2); a task of an array has ended (3) or not (4).
fn standing(job: &JobRecord) -> i64 {
    match (job.is_removed(), job.is_task, job.state.is_terminal()) {
        (true, ..) => 2,
        (false, false, ended) => i64::from(!ended),
        (false, true, true) => 3,
        (false, true, false) => 4,
    }
}

async fn write_event(to: &mut SqliteConnection, number: u64, event: &Event) -> Result<(), sqlx::Error> {
    let (number, at, epoch) = (integer(number), integer(event.at.0), integer(event.epoch.0));
    let node = event.node.as_ref().map(|node| node.as_str());
    sqlx::query(
        "INSERT INTO events (number, job, at, epoch, node, text, proof) VALUES (?, ?, ?, ?, ?, ?, ?)
         ON CONFLICT (number) DO NOTHING",
    )
    .bind(number)
    .bind(event.job.as_str())
    .bind(at)
    .bind(epoch)
    .bind(node)
    .bind(&event.text)
    .bind(event_proof(number, event.job.as_str(), at, epoch, node, &event.text))
    .execute(to)
    .await
    .map(drop)
}

/// A value that describes the database itself, by its name.
pub(super) async fn get(from: &mut SqliteConnection, name: &str) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar("SELECT value FROM meta WHERE name = ?").bind(name).fetch_optional(from).await
}

/// Stores one.
pub(super) async fn set(to: &mut SqliteConnection, name: &str, value: &str) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO meta (name, value) VALUES (?, ?)
         ON CONFLICT (name) DO UPDATE SET value = excluded.value",
    )
    .bind(name)
    .bind(value)
    .execute(to)
    .await
    .map(drop)
}

/// Why a row is not accepted.
#[derive(Debug, thiserror::Error)]
pub(super) enum RowError {
    #[error("{0}")]
    Sql(#[from] sqlx::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RowError {
    /// The error for a caller that asked for `what`.
    pub(super) fn reading(self, what: &'static str) -> StoreError {
        match self {
            RowError::Sql(source) => StoreError::Read { what, source },
            RowError::Store(error) => error,
        }
    }
}

/// A job and the commit that wrote it, from the columns [`JOB`].
pub(super) fn job(row: &SqliteRow) -> Result<(u64, JobRecord), RowError> {
    let (seq, id): (i64, String) = (row.try_get(0)?, row.try_get(1)?);
    let (request, active): (String, i64) = (row.try_get(2)?, row.try_get(3)?);
    let (text, rev): (String, i64) = (row.try_get(4)?, row.try_get(5)?);
    let found = job_proof(seq, &id, &request, active, &text, rev);
    prove("job", &id, row.try_get(6)?, found)?;
    Ok((natural(rev), parse("job", id, &text)?))
}

/// An event and its number, from the columns [`EVENT`].
pub(super) fn event(row: &SqliteRow) -> Result<(u64, Event), RowError> {
    let (number, job, at): (i64, String, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let (epoch, node): (i64, Option<String>) = (row.try_get(3)?, row.try_get(4)?);
    let text: String = row.try_get(5)?;
    let found = event_proof(number, &job, at, epoch, node.as_deref(), &text);
    prove("event of the job", &job, row.try_get(6)?, found)?;
    let event = Event {
        job: named("job", &job)?,
        at: Timestamp(natural(at)),
        epoch: Epoch(natural(epoch)),
        node: node.map(|node| named("node", &node)).transpose()?,
        text,
    };
    Ok((natural(number), event))
}

/// A document, from the columns [`DOCUMENT`].
pub(super) fn kept(row: &SqliteRow) -> Result<Document, RowError> {
    let (name, text): (String, String) = (row.try_get(0)?, row.try_get(1)?);
    prove("document", &name, row.try_get(2)?, document_proof(&name, &text))?;
    Ok(parse("document", name, &text)?)
}

fn prove(what: &'static str, id: &str, proof: Option<i64>, found: i64) -> Result<(), StoreError> {
    match proof {
        Some(proof) if proof != found => Err(StoreError::Damaged { what, id: id.to_owned() }),
        _ => Ok(()),
    }
}

fn job_proof(seq: i64, id: &str, request: &str, active: i64, text: &str, rev: i64) -> i64 {
    let numbers = [seq, active, rev].map(i64::to_le_bytes).concat();
    checksum(&[&numbers, id.as_bytes(), request.as_bytes(), text.as_bytes()])
}

fn event_proof(number: i64, job: &str, at: i64, epoch: i64, node: Option<&str>, text: &str) -> i64 {
    let numbers = [number, at, epoch].map(i64::to_le_bytes).concat();
    checksum(&[&numbers, job.as_bytes(), node.unwrap_or("").as_bytes(), text.as_bytes()])
}

fn document_proof(name: &str, text: &str) -> i64 {
    checksum(&[name.as_bytes(), text.as_bytes()])
}

/// SQLite has no unsigned numbers; none of ours is large enough to reach the sign bit.
pub(super) fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn natural(value: i64) -> u64 {
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

/// Who wrote last, and the number of that commit.
pub(super) async fn last_writer(from: &mut SqliteConnection) -> Result<(Option<String>, u64), sqlx::Error> {
    let query = sqlx::query_as(
        "SELECT (SELECT value FROM meta WHERE name = ?), (SELECT value FROM meta WHERE name = 'rev')",
    );
    let (owner, rev): (Option<String>, Option<String>) = query.bind(OWNER).fetch_one(from).await?;
    Ok((owner, rev.and_then(|rev| rev.parse().ok()).unwrap_or_default()))
}

/// The number of the last commit.
pub(super) async fn last_commit(from: &mut SqliteConnection) -> Result<u64, sqlx::Error> {
    let rev = get(from, "rev").await?;
    Ok(rev.and_then(|rev| rev.parse().ok()).unwrap_or_default())
}
