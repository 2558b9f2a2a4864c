//! What really happened: `fix` writes it to a file that the product knows nothing of, and this reads it.
//!
//! A line of the file is `KIND JOB EPOCH PID BOOT_MILLIS`: `exec` when the program began, `beat` ten times a
//! second while it lived, `end` when it was about to exit by itself. Each line is one append, so lines of
//! processes that run at the same time do not mix.
//!
//! A line of output is `NUMBER PAYLOAD TAG`; [`lines`] checks that each is there once, in order and whole.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Milliseconds since this machine was started, as `fix` writes them.
pub fn boottime() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(now).map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// Line `number` of a program that writes `width` bytes a line.
pub fn line(number: u64, width: usize) -> String {
    let head = format!("{number} ");
    let payload = width.saturating_sub(head.len() + 18);
    let head = format!("{head}{}", "x".repeat(payload));
    format!("{head} {:016x}\n", tag(&head))
}

fn tag(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// What became of the lines of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lines {
    /// Whole lines that were read.
    pub read: u64,
    /// Lines that should be there and are not.
    pub lost: u64,
    /// Lines that are there more than once.
    pub duplicated: u64,
    /// Lines that stand after a later one.
    pub reordered: u64,
    /// Lines that are no line of `fix`, the first few as text.
    pub strange: Vec<String>,
}

impl Lines {
    /// All there, each once, in order.
    pub fn is_whole(&self) -> bool {
        self.lost == 0 && self.duplicated == 0 && self.reordered == 0 && self.strange.is_empty()
    }
}

/// Checks a log against the `expected` first lines of `fix`; 0 expects no particular number.
pub fn lines(log: &[u8], expected: u64) -> Lines {
    let mut found = Lines::default();
    let (mut seen, mut next) = (BTreeSet::new(), 0);
    for text in log.split_inclusive(|byte| *byte == b'\n') {
        let Some(number) = number(text) else {
            if found.strange.len() < 5 {
                found.strange.push(String::from_utf8_lossy(&text[..text.len().min(200)]).into_owned());
            }
            continue;
        };
        found.read += 1;
        if number == next {
            found.reordered += u64::from(!seen.is_empty());
            next += 1; // the usual case costs no memory
        } else if number < next || seen.contains(&number) {
            found.duplicated += 1;
        } else {
            if seen.last().is_some_and(|last| *last > number) {
                found.reordered += 1;
            }
            seen.insert(number);
        }
        while seen.first() == Some(&next) {
            seen.pop_first();
            next += 1;
        }
    }
    // What was seen beyond a hole that was never filled, and what never came at all.
    let top = seen.last().map_or(next, |last| last + 1).max(expected);
    found.lost = top - next - seen.len() as u64;
    found
}

fn number(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('\n')?;
    let (head, said) = text.rsplit_once(' ')?;
    (u64::from_str_radix(said, 16).ok()? == tag(head)).then_some(())?;
    head.split(' ').next()?.parse().ok()
}

/// One line of the witness file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// `exec`, `beat` or `end`.
    pub kind: String,
    /// The job.
    pub job: String,
    /// The attempt.
    pub epoch: u64,
    /// Who wrote it.
    pub pid: u32,
    /// When, in boot time.
    pub at: u64,
}

/// The witness file.
#[derive(Debug, Clone)]
pub struct Witness {
    path: PathBuf,
}

impl Witness {
    /// The file at `path`, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Witness {
        Witness { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Everything that was seen.
    pub fn records(&self) -> Vec<Record> {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        text.lines().filter_map(record).collect()
    }

    /// Everything that was seen of a job.
    pub fn of(&self, job: &str) -> Vec<Record> {
        self.records().into_iter().filter(|record| record.job == job).collect()
    }

    /// How often each attempt of each job was executed.
    pub fn execs(&self) -> BTreeMap<(String, u64), u32> {
        let mut execs = BTreeMap::new();
        for record in self.records().into_iter().filter(|record| record.kind == "exec") {
            *execs.entry((record.job, record.epoch)).or_default() += 1;
        }
        execs
    }

    /// Attempts that were executed more than once, for people.
    pub fn run_twice(&self) -> Vec<String> {
        let twice = self.execs().into_iter().filter(|(_, count)| *count > 1);
        twice.map(|((job, epoch), count)| format!("{job}.{epoch} was executed {count} times")).collect()
    }

    /// Two attempts of one job that lived at the same time, for people.
    pub fn overlaps(&self) -> Vec<String> {
        let mut lives: BTreeMap<String, BTreeMap<u64, (u64, u64)>> = BTreeMap::new();
        for record in self.records() {
            let life = lives.entry(record.job).or_default().entry(record.epoch);
            let life = life.or_insert((record.at, record.at));
            *life = (life.0.min(record.at), life.1.max(record.at));
        }
        let mut found = Vec::new();
        for (job, epochs) in lives {
            let epochs: Vec<_> = epochs.into_iter().collect();
            for (index, (epoch, (from, to))) in epochs.iter().enumerate() {
                for (other, (begin, end)) in &epochs[index + 1..] {
                    if begin <= to && from <= end {
                        found.push(format!("{job}: epoch {epoch} {from}..{to} and {other} {begin}..{end}"));
                    }
                }
            }
        }
        found
    }
}

fn record(line: &str) -> Option<Record> {
    let words: Vec<&str> = line.split(' ').collect();
    let [kind, job, epoch, pid, at] = words[..] else { return None };
    Some(Record {
        kind: kind.to_owned(),
        job: job.to_owned(),
        epoch: epoch.parse().ok()?,
        pid: pid.parse().ok()?,
        at: at.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(numbers: &[u64]) -> Vec<u8> {
        numbers.iter().map(|number| line(*number, 60)).collect::<String>().into_bytes()
    }

    #[test]
    fn test_lines_are_counted_for_what_they_are() {
        assert!(lines(&log(&[0, 1, 2]), 3).is_whole());
        assert_eq!(lines(&log(&[0, 1]), 5).lost, 3);
        let mixed = lines(&log(&[0, 3, 1, 1, 5]), 0);
        assert_eq!((mixed.lost, mixed.duplicated, mixed.reordered), (2, 1, 1));
        assert_eq!(lines(b"0 xx 00\nhalf", 0).strange.len(), 2);
    }

    #[test]
    fn test_lives_that_touch_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let witness = Witness::new(dir.path().join("w"));
        let text = "exec a 1 7 100\nbeat a 1 7 200\nexec a 2 8 150\nexec b 1 9 0\nexec b 2 9 10\nexec b 2 9 11\nbroken\n";
        std::fs::write(witness.path(), text).unwrap();
        assert_eq!(witness.overlaps(), ["a: epoch 1 100..200 and 2 150..150"]);
        assert_eq!(witness.run_twice(), ["b.2 was executed 2 times"]);
    }
}
