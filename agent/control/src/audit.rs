//! The audit log: a line of JSON for each call that changes something (but see `UNAUDITED` in `api::access`), and for
//! every call that was refused.
//!
//! Bounded: when a file is full, a new one is begun and the oldest is removed. It is best effort: a line that cannot
//! be written is put into the daemon's log instead, and the call goes on.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_model::Timestamp;
use parking_lot::Mutex;
use serde::Serialize;

/// Bytes in a file.
const FULL: u64 = 16 << 20;
/// Older files that are kept beside the present one.
const OLD: u32 = 4;

/// One call.
#[derive(Debug, Serialize)]
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
}

/// See the module. Clones write the same files.
#[derive(Debug, Clone)]
pub(crate) struct Audit(Arc<Mutex<AuditFile>>);

#[derive(Debug)]
struct AuditFile {
    path: PathBuf,
    full: u64,
    file: Option<(File, u64)>,
}

impl Audit {
    pub(crate) fn new(path: &Path) -> Audit {
        Audit::of_size(path, FULL)
    }

    fn of_size(path: &Path, full: u64) -> Audit {
        Audit(Arc::new(Mutex::new(AuditFile { path: path.to_owned(), full, file: None })))
    }

    /// Writes a line. Blocks.
    pub(crate) fn write(&self, entry: &AuditEntry) {
        let mut line = serde_json::to_vec(entry).unwrap_or_default();
        line.push(b'\n');
        let mut writer = self.0.lock();
        if let Err(error) = writer.append(&line) {
            tracing::warn!(%error, path = %writer.path.display(), ?entry, "the audit log cannot be written");
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
    use super::*;

    #[test]
    fn test_lines_are_bounded_and_the_latest_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let entry = |call: u32| AuditEntry {
            at_ms: Timestamp(7),
            who: "user ada".into(),
            from: "10.0.0.7:5".into(),
            call: format!("Jobs/{call}"),
            about: String::new(),
            answer: "ok".into(),
        };
        for call in 0..100 {
            // Another process continues where the one before it stopped.
            Audit::of_size(&path, 300).write(&entry(call));
        }
        let audit = Audit::of_size(&path, 300);
        (100..200).for_each(|call| audit.write(&entry(call)));
        let files: Vec<PathBuf> =
            fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 1 + OLD as usize, "{files:?}");
        assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() < 300 + 200));
        let last = fs::read_to_string(&path).unwrap();
        let last: serde_json::Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
        assert_eq!((&last["call"], &last["who"]), (&"Jobs/199".into(), &"user ada".into()));
    }
}
