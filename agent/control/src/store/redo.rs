//! A second copy of the latest commits, beside the database.
//!
//! Owns the file `db.redo`: one line of JSON for each commit, after its checksum, written before the commit and not
//! forced to the disk. So it proves nothing, costs a few microseconds, and helps when SQLite's files are damaged: a
//! flipped bit costs one line here and at most one page there, and hardly ever the same job in both. At each start,
//! and when it has grown, it is rewritten with every job that has not ended and the last [`ENDED`] that did.
//!
//! Invariants: a line that is not whole is skipped; a failure to write never fails a commit; a line that was never
//! committed may be applied later, because the callers were told that it is tried again.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use agent_model::{JobId, failpoint};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::file::with_suffix;
use super::{Changes, Document, Event, JobRecord};

/// Ended jobs that a rewritten file contains.
pub(super) const ENDED: u32 = 1000;
/// The size in bytes above which a file is rewritten, unless its first content is more than a quarter of it.
const LARGE: u64 = 16 * 1024 * 1024;
/// The longest line that is read, in bytes.
const LONGEST: u64 = 256 * 1024 * 1024;

/// One line: a commit, or a part of what a new file begins with.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Line {
    /// That of the database; in the first line of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) incarnation: Option<String>,
    /// The number of the commit.
    pub(super) rev: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) jobs: Vec<(u64, JobRecord)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) events: Vec<(u64, Event)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) documents: Vec<Document>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) dropped: Vec<String>,
}

impl Line {
    /// A commit with its number, whose events are counted from `first_event`.
    pub(super) fn of(changes: &Changes, rev: u64, first_event: u64) -> Line {
        Line {
            incarnation: None,
            rev,
            jobs: changes.jobs.iter().map(|job| (rev, (**job).clone())).collect(),
            events: (first_event..).zip(changes.events.iter().cloned()).collect(),
            documents: changes.documents.clone(),
            dropped: changes.dropped.clone(),
        }
    }

    fn encode(&self) -> Vec<u8> {
        let text = serde_json::to_vec(self).unwrap_or_default(); // maps with text keys always serialise
        let mut line = format!("{:016x} ", super::checksum(&[&text])).into_bytes();
        line.extend_from_slice(&text);
        line.push(b'\n');
        line
    }

    fn decode(line: &[u8]) -> Option<Line> {
        let (sum, text) = (line.get(..16)?, line.get(17..)?);
        let sum = u64::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
        (sum == super::checksum(&[text]).cast_unsigned()).then(|| serde_json::from_slice(text).ok())?
    }
}

/// The content of a file: the latest state of each job and document, and all events.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    /// Of the first line, if it is whole.
    pub(super) incarnation: Option<String>,
    /// The highest commit.
    pub(super) rev: u64,
    pub(super) jobs: HashMap<JobId, (u64, JobRecord)>,
    pub(super) events: Vec<(u64, Event)>,
    /// The latest state of each document, with its commit; `None` where it was dropped.
    pub(super) documents: HashMap<String, (u64, Option<Document>)>,
    /// Lines that are not whole.
    pub(super) broken: usize,
}

impl Remembered {
    fn take(&mut self, line: Line) {
        self.incarnation = line.incarnation.or_else(|| self.incarnation.take());
        self.rev = self.rev.max(line.rev);
        for (rev, job) in line.jobs {
            match self.jobs.get(&job.id) {
                Some((known, _)) if *known > rev => {}
                _ => drop(self.jobs.insert(job.id.clone(), (rev, job))),
            }
        }
        self.events.extend(line.events);
        let kept = line.documents.into_iter().map(|one| (one.name(), (line.rev, Some(one))));
        self.documents.extend(kept);
        self.documents.extend(line.dropped.into_iter().map(|name| (name, (line.rev, None))));
    }

    /// The changes of commits after `rev`, and all events.
    pub(super) fn since(self, rev: u64) -> Line {
        let (mut documents, mut dropped) = (Vec::new(), Vec::new());
        for (name, (at, document)) in self.documents {
            match document {
                _ if at <= rev => {}
                Some(document) => documents.push(document),
                None => dropped.push(name),
            }
        }
        Line {
            incarnation: None,
            rev: self.rev,
            jobs: self.jobs.into_values().filter(|(at, _)| *at > rev).collect(),
            events: self.events,
            documents,
            dropped,
        }
    }
}

/// Where the second copy of the database at `path` is.
pub(super) fn beside(path: &Path) -> PathBuf {
    with_suffix(path, ".redo")
}

/// Reads a file as far as it can be read; `None` if there is no file.
pub(super) fn read(path: &Path) -> io::Result<Option<Remembered>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let (mut reader, mut remembered, mut line) = (BufReader::new(file), Remembered::default(), Vec::new());
    loop {
        line.clear();
        if io::Read::take(&mut reader, LONGEST).read_until(b'\n', &mut line)? == 0 {
            return Ok(Some(remembered));
        }
        match Line::decode(line.strip_suffix(b"\n").unwrap_or(&line)) {
            Some(line) => remembered.take(line),
            None => remembered.broken += usize::from(line != b"\n"),
        }
    }
}

/// The open file.
#[derive(Debug)]
pub(super) struct Redo {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// None after it could not be created: then there is no second copy until the next start.
    file: Option<File>,
    /// The last line, so that a commit that is tried again is written once.
    last: Option<i64>,
    /// The last write may have stopped within a line.
    torn: bool,
    begun_with: u64,
    size: u64,
}

impl Redo {
    /// One that takes no lines until it is rewritten.
    pub(super) fn new(path: &Path) -> Redo {
        Redo { path: path.to_owned(), state: Mutex::default() }
    }

    /// Rewrites the file, beginning with `lines`.
    pub(super) fn renew(&self, lines: &[Line]) {
        let mut state = self.state.lock();
        match begin(&self.path, lines) {
            Ok((file, size)) => {
                *state = State { file: Some(file), size, begun_with: size, ..State::default() };
            }
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot write second copy of the database");
                state.begun_with = state.size; // not again before it has grown as much once more
            }
        }
    }

    /// Adds a commit. A failure costs the copy of this commit, nothing else.
    pub(super) fn add(&self, line: &Line) {
        let mut state = self.state.lock();
        let bytes = line.encode();
        let sum = super::checksum(&[&bytes]);
        if state.last == Some(sum) {
            return;
        }
        let torn = state.torn;
        let Some(file) = &mut state.file else { return };
        let written = failpoint::hit("control.redo.write").and_then(|()| {
            if torn {
                file.write_all(b"\n")?;
            }
            file.write_all(&bytes)
        });
        match written {
            Ok(()) => {
                state.last = Some(sum);
                state.torn = false;
                state.size += bytes.len() as u64;
            }
            Err(error) => {
                if !state.torn {
                    tracing::warn!(path = %self.path.display(), %error, "cannot copy commit to second copy");
                }
                state.torn = true;
            }
        }
    }

    /// It is time to rewrite it: it is large, or somebody removed it.
    pub(super) fn is_to_be_renewed(&self) -> bool {
        let state = self.state.lock();
        let is_gone = |file: &File| file.metadata().is_ok_and(|file| file.nlink() == 0);
        state.size > LARGE.max(4 * state.begun_with) || state.file.as_ref().is_some_and(is_gone)
    }
}

fn begin(path: &Path, lines: &[Line]) -> io::Result<(File, u64)> {
    let half = path.with_extension("new");
    failpoint::hit("control.redo.begin")?;
    let mut file = File::create(&half)?;
    let mut size = 0;
    for line in lines {
        let bytes = line.encode();
        size += bytes.len() as u64;
        file.write_all(&bytes)?;
    }
    file.sync_all()?;
    std::fs::rename(&half, path)?;
    Ok((file, size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_model::ReplicaId;

    use crate::store::SettledRecord;
    use crate::store::tests::job;

    fn line(rev: u64, name: &str) -> Line {
        Line { rev, jobs: vec![(rev, job(name, rev))], ..Line::default() }
    }

    #[test]
    fn test_lines_that_are_not_whole_cost_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("redo");
        assert!(read(&path).unwrap().is_none());
        let head = Line { incarnation: Some("x".into()), ..Line::default() };
        let redo = Redo::new(&path);
        redo.renew(&[head, line(1, "a")]);
        redo.add(&line(2, "b"));
        redo.add(&line(2, "b"));
        redo.add(&line(3, "c"));
        drop(redo);

        let mut bytes = std::fs::read(&path).unwrap();
        let all = read(&path).unwrap().unwrap();
        assert_eq!((all.incarnation.as_deref(), all.rev, all.jobs.len(), all.broken), (Some("x"), 3, 3, 0));
        let b = bytes.windows(2).position(|two| two == b"\"b").unwrap();
        bytes[b + 1] ^= 1;
        bytes.truncate(bytes.len() - 1); // the line feed alone
        std::fs::write(&path, &bytes).unwrap();
        let all = read(&path).unwrap().unwrap();
        assert_eq!((all.rev, all.jobs.len(), all.broken), (3, 2, 1));
        bytes.truncate(bytes.len() - 20);
        bytes.extend([0; 300]);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path).unwrap().unwrap().jobs.len(), 1);
    }

    #[test]
    fn test_the_latest_word_counts() {
        let mut all = Remembered::default();
        let replica: ReplicaId = "a.1.0".parse().unwrap();
        let settled = SettledRecord { replica: replica.clone(), node: "box".parse().unwrap() };
        all.take(Line { documents: vec![Document::Settled(settled)], ..line(5, "a") });
        all.take(line(4, "a"));
        let name = Document::name_of_settled(&replica);
        all.take(Line { rev: 6, dropped: vec![name.clone()], ..Line::default() });
        assert_eq!(all.jobs[&replica.job].0, 5);
        let rest = all.since(5);
        assert_eq!((rest.jobs.len(), rest.documents.len(), rest.dropped), (0, 0, vec![name]));
    }
}
