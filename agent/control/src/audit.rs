//! The audit log: a line of JSON for each call that changes something (but see `UNAUDITED` in `api::access`), and for
//! calls that were refused.
//!
//! | File | What is in it |
//! |---|---|
//! | `audit.jsonl` | calls of callers who are known, those that were refused to them among it |
//! | `refused.jsonl` | what callers asked for who proved nothing, and calls that do not exist |
//!
//! Bounded in what anybody can put into it: an entry is short, the same call of the same caller that was refused or that
//! failed again, and what he does more than [`EACH`] times, is counted within a minute and not written again, and a full file makes room for a new one while the oldest is removed. So nobody pushes
//! out what others did. It is best effort: a line that cannot be written is put into the daemon's log instead, and the
//! call goes on.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::Timestamp;
use parking_lot::Mutex;
use serde::Serialize;

/// Bytes in a file.
const FULL: u64 = 16 << 20;
/// Older files that are kept beside the present one.
const OLD: u32 = 4;
/// The most characters of each field of an entry.
const FIELD: usize = 120;
/// How many calls of a kind that were done are written in that time of one caller; more are counted.
const EACH: u64 = 600;
/// How long the same refusal is counted before it is written again.
const COUNTED: Duration = Duration::from_secs(60);
/// The most refusals that are counted each by itself; any more are counted together.
const APART: usize = 1_000;

/// One call.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct AuditEntry {
    pub(crate) at_ms: Timestamp,
    /// The caller, as far as the transport proved it.
    pub(crate) who: String,
    /// The address of the caller; empty for this machine.
    pub(crate) from: String,
    /// `service/method`
    pub(crate) call: String,
    /// The object of the call: `job train-1`.
    pub(crate) about: String,
    /// `ok`, or the message of the error.
    pub(crate) answer: String,
    /// The caller proved who he is, and there is such a call.
    #[serde(skip)]
    pub(crate) is_known: bool,
    /// It was refused so often since it was last written.
    #[serde(skip_serializing_if = "is_once")]
    pub(crate) times: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_once(times: &u64) -> bool {
    *times == 1
}

impl AuditEntry {
    fn shortened(mut self) -> AuditEntry {
        for field in [&mut self.who, &mut self.from, &mut self.call, &mut self.about, &mut self.answer] {
            if let Some((end, _)) = field.char_indices().nth(FIELD) {
                field.truncate(field.char_indices().nth(FIELD - 1).map_or(end, |(end, _)| end));
                field.push('…');
            }
        }
        self
    }
}

/// See the module. Clones write the same files.
#[derive(Debug, Clone)]
pub(crate) struct Audit(Arc<Mutex<AuditFiles>>);

#[derive(Debug)]
struct AuditFiles {
    known: AuditFile,
    refused: AuditFile,
    counted: HashMap<(String, String, bool), Counted>,
}

/// A refusal that was written a short time ago.
#[derive(Debug)]
struct Counted {
    since: Timestamp,
    /// How many were written.
    written: u64,
    /// The last one that was not written, and how many there were.
    more: Option<AuditEntry>,
}

#[derive(Debug)]
struct AuditFile {
    path: PathBuf,
    full: u64,
    file: Option<(File, u64)>,
}

impl Audit {
    /// In this directory.
    pub(crate) fn new(dir: &Path) -> Audit {
        Audit::of_size(dir, FULL)
    }

    fn of_size(dir: &Path, full: u64) -> Audit {
        let file = |name: &str| AuditFile { path: dir.join(name), full, file: None };
        let (known, refused) = (file("audit.jsonl"), file("refused.jsonl"));
        Audit(Arc::new(Mutex::new(AuditFiles { known, refused, counted: HashMap::new() })))
    }

    /// Writes a line about a call that was allowed, or counts it: there are many of it, or it failed again. Blocks.
    pub(crate) fn write(&self, entry: AuditEntry) {
        let most = if entry.answer == "ok" { EACH } else { 1 };
        self.0.lock().note(entry.shortened(), most);
    }

    /// Writes a line about a call that was refused, or counts it. Blocks. A number is written with the first entry after
    /// [`COUNTED`].
    pub(crate) fn refuse(&self, entry: AuditEntry) {
        self.0.lock().note(entry.shortened(), 1);
    }
}

impl AuditFiles {
    fn write(&mut self, entry: AuditEntry) {
        let mut line = serde_json::to_vec(&entry).unwrap_or_default();
        line.push(b'\n');
        let file = if entry.is_known { &mut self.known } else { &mut self.refused };
        if let Err(error) = file.append(&line) {
            tracing::warn!(%error, path = %file.path.display(), ?entry, "the audit log cannot be written");
        }
    }

    /// Writes an entry if it is among the first `most` of its caller, call and kind of answer.
    fn note(&mut self, mut entry: AuditEntry, most: u64) {
        self.settle(entry.at_ms);
        let mut key = (entry.who.clone(), entry.call.clone(), entry.answer == "ok");
        if self.counted.len() >= APART && !self.counted.contains_key(&key) {
            (entry.who, entry.call) = ("several callers".to_owned(), "several calls".to_owned());
            key = (entry.who.clone(), entry.call.clone(), false);
        }
        match self.counted.get_mut(&key) {
            None => {
                self.counted.insert(key, Counted { since: entry.at_ms, written: 1, more: None });
                self.write(entry);
            }
            Some(counted) if counted.written < most => {
                counted.written += 1;
                self.write(entry);
            }
            Some(counted) => {
                entry.times += counted.more.as_ref().map_or(0, |more| more.times);
                counted.more = Some(entry);
            }
        }
    }

    fn settle(&mut self, now: Timestamp) {
        let is_over = |counted: &Counted| now.since(counted.since) >= COUNTED;
        let over: Vec<_> = self.counted.extract_if(|_, counted| is_over(counted)).collect();
        for more in over.into_iter().filter_map(|(_, counted)| counted.more) {
            self.write(more);
        }
    }
}

impl AuditFile {
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.file.as_ref().is_some_and(|(_, length)| *length >= self.full) {
            self.file = None;
            self.rotate()?;
        }
        let (file, length) = match &mut self.file {
            Some(open) => open,
            None => {
                let file = File::options().create(true).append(true).mode(0o600).open(&self.path)?;
                let length = file.metadata()?.len();
                self.file.insert((file, length))
            }
        };
        file.write_all(line)?;
        *length += line.len() as u64;
        Ok(())
    }

    /// `audit.jsonl` becomes `audit.jsonl.1`, that one `.2`, and the last is overwritten.
    fn rotate(&self) -> io::Result<()> {
        let numbered = |number: u32| self.path.with_added_extension(number.to_string());
        for number in (1..OLD).rev() {
            match fs::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, numbered(1))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn entry(who: &str, call: &str, at: u64) -> AuditEntry {
        AuditEntry {
            at_ms: Timestamp(at),
            who: who.into(),
            from: "10.0.0.7:5".into(),
            call: call.into(),
            about: String::new(),
            answer: "ok".into(),
            is_known: who != "nobody",
            times: 1,
        }
    }

    fn lines(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn test_lines_are_bounded_and_the_latest_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let call = |number: u32| entry("user ada", &format!("Jobs/{number}"), 7);
        for number in 0..100 {
            // Another process continues where the one before it stopped.
            Audit::of_size(dir.path(), 300).write(call(number));
        }
        let audit = Audit::of_size(dir.path(), 300);
        (100..200).for_each(|number| audit.write(call(number)));
        let files: Vec<PathBuf> =
            fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 1 + OLD as usize, "{files:?}");
        assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() < 300 + 200));
        let last = lines(&path).pop().unwrap();
        assert_eq!((&last["call"], &last["who"]), (&"Jobs/199".into(), &"user ada".into()));
    }

    #[test]
    fn test_a_long_entry_is_shortened() {
        let dir = tempfile::tempdir().unwrap();
        let long = "é".repeat(8_000);
        Audit::new(dir.path()).write(AuditEntry {
            about: long.clone(),
            answer: long,
            ..entry("user ada", "Jobs/Get", 7)
        });
        let written = lines(&dir.path().join("audit.jsonl")).pop().unwrap();
        for field in ["about", "answer"] {
            let text = written[field].as_str().unwrap();
            assert_eq!((text.chars().count(), text.ends_with('…')), (FIELD, true));
        }
    }

    #[test]
    fn test_refusals_are_counted_and_push_nothing_out() {
        let dir = tempfile::tempdir().unwrap();
        let audit = Audit::of_size(dir.path(), 2_000);
        audit.write(entry("user ada", "Jobs/Submit", 1));
        // Whoever asks, and however often.
        for at in 0..10_000 {
            audit.refuse(entry("nobody", "unknown call", at));
            audit.refuse(entry("user eve", "Nodes/Preempt", at));
        }
        let known = lines(&dir.path().join("audit.jsonl"));
        assert_eq!(
            known.iter().map(|line| &line["call"]).collect::<Vec<_>>(),
            ["Jobs/Submit", "Nodes/Preempt"]
        );
        let refused = lines(&dir.path().join("refused.jsonl"));
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0]["times"], Value::Null, "it is the first");
        audit.write(entry("user ada", "Jobs/Cancel", 60_000));
        let refused = lines(&dir.path().join("refused.jsonl"));
        assert_eq!(refused.len(), 2);
        assert_eq!((&refused[1]["times"], &refused[1]["at_ms"]), (&9_999.into(), &9_999.into()));
        // Callers of many names are counted together in the end.
        for number in 0..20_000 {
            audit.refuse(entry(&format!("user u{number}"), "Nodes/Preempt", 61_000));
        }
        assert!(audit.0.lock().counted.len() <= APART + 1);
    }

    #[test]
    fn test_what_fails_again_and_is_done_without_end_is_counted_too() {
        let dir = tempfile::tempdir().unwrap();
        let audit = Audit::new(dir.path());
        let answered = |call: &str, answer: &str, at| AuditEntry {
            answer: answer.into(),
            ..entry("user eve", call, at)
        };
        for at in 0..5_000 {
            audit.write(answered("Secrets/Remove", &format!("you have no secret `{at}`"), at));
            audit.write(answered("Secrets/Set", "ok", at));
        }
        audit.write(answered("Jobs/Cancel", "ok", 60_000));
        let written = lines(&dir.path().join("audit.jsonl"));
        let of = |call: &str| written.iter().filter(|line| line["call"] == call).collect::<Vec<_>>();
        let (failed, done) = (of("Secrets/Remove"), of("Secrets/Set"));
        assert_eq!((failed.len(), done.len(), of("Jobs/Cancel").len()), (2, 601, 1));
        assert_eq!((&failed[1]["times"], &done[600]["times"]), (&4_999.into(), &4_400.into()));
    }
}
