//! What a run recorded, as the fold of its tracking file.
//!
//! The file is the only truth: to record is to append to it, to know is to read it from where one stopped. So
//! the lines a script writes itself count as much as those of the endpoint. A script may replace the file too; what
//! was in it is known still, and a new life of the daemon knows what the old one knew, because the supervisor of the
//! job keeps all of it in a stream ([`agent_shim::tracking`]).
//!
//! A job has one file, but a script may begin further runs in it. Their records carry the run's label and a
//! slash before their names. What the endpoint must remember of a run beyond what the script recorded is a tag
//! whose name begins with `agentd.`, never shown to the script.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use agent_model::tracking::TrackingRecord;
use agent_model::{Timestamp, failpoint};
use agent_shim::segments::Reader;
use agent_shim::source::{Piece, Source};
use rustix::fs::OFlags;

/// Names of tags that are the endpoint's own begin so.
pub(super) const OWN: &str = "agentd.";
/// The tag whose presence makes a run; its value is the name people see.
pub(super) const RUN: &str = "agentd.run";
/// The longest line read, in bytes; longer ones are no records.
const MAX_LINE: usize = 1 << 20;

/// The latest value of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) value: f64,
    pub(super) step: i64,
    pub(super) time: Timestamp,
}

/// What one run recorded.
#[derive(Debug, Default)]
pub(super) struct Data {
    pub(super) metrics: BTreeMap<String, Point>,
    pub(super) params: BTreeMap<String, String>,
    pub(super) tags: BTreeMap<String, String>,
}

impl Data {
    /// A tag of the endpoint's own.
    pub(super) fn own(&self, name: &str) -> Option<&str> {
        self.tags.get(name).map(String::as_str)
    }
}

/// What all runs of one job recorded.
pub(super) struct Book {
    path: PathBuf,
    /// Where all that the file ever held is kept.
    stream: PathBuf,
    /// The file, once the stream was read.
    reader: Option<LineReader>,
    /// By label; the job's own run has the empty one.
    runs: BTreeMap<String, Data>,
}

impl Book {
    /// Of a file and a stream that need not exist yet.
    pub(super) fn new(path: PathBuf, stream: PathBuf) -> Book {
        let runs = BTreeMap::from([(String::new(), Data::default())]);
        Book { path, stream, reader: None, runs }
    }

    /// Everything recorded until now.
    pub(super) fn runs(&mut self) -> io::Result<&BTreeMap<String, Data>> {
        let runs = &mut self.runs;
        let mut fold_line = |line: &[u8]| {
            if let Some(record) = TrackingRecord::parse(line) {
                fold(runs, record);
            }
        };
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => {
                // What is in both is folded twice, which changes nothing.
                read_stream(&self.stream, &mut fold_line)?;
                none.insert(LineReader::new(&self.path))
            }
        };
        reader.read(fold_line)?;
        Ok(runs)
    }

    /// Appends records of the run with this label, and returns when they are on the disk.
    pub(super) fn append(&mut self, label: &str, records: Vec<TrackingRecord>) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        self.runs()?;
        let mut text = String::new();
        if self.reader.as_ref().is_some_and(|reader| reader.lines.is_inside_one()) {
            text.push('\n'); // somebody died while writing it
        }
        for record in records {
            text.push_str(&labeled(label, record).to_line());
        }
        // The job may have put a link or a pipe there.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
        let flags = i32::try_from(flags).map_err(io::Error::other)?;
        let mut file = OpenOptions::new().create(true).append(true).custom_flags(flags).open(&self.path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("something that is no file stands in its place"));
        }
        failpoint::hit("node.tracking.write")?;
        file.write_all(text.as_bytes())?;
        failpoint::hit("node.tracking.sync")?;
        file.sync_data()?;
        // Known at once: the script may remove the file before somebody asks.
        self.runs().map(drop)
    }

    /// Every value of one metric, in the order of recording.
    pub(super) fn history(&self, label: &str, name: &str) -> io::Result<Vec<Point>> {
        let name = full_name(label, name);
        let mut earlier = History::default();
        read_stream(&self.stream, |line| earlier.take(line, &name))?;
        if earlier.is_broken {
            return Ok(earlier.points); // not all of it is in the file any more
        }
        let mut whole = History::default();
        LineReader::new(&self.path).read(|line| whole.take(line, &name))?;
        Ok(whole.points)
    }
}

/// The values of one metric.
#[derive(Default)]
struct History {
    points: Vec<Point>,
    /// The file was replaced on the way.
    is_broken: bool,
}

impl History {
    fn take(&mut self, line: &[u8], name: &str) {
        match TrackingRecord::parse(line) {
            Some(TrackingRecord::Metric { metric, value, step, time }) if metric == name => {
                self.points.push(Point { value, step, time: time.unwrap_or_default() });
            }
            Some(TrackingRecord::Note { .. }) => self.is_broken = true,
            _ => {}
        }
    }
}

fn full_name(label: &str, name: &str) -> String {
    if label.is_empty() { name.to_owned() } else { format!("{label}/{name}") }
}

fn labeled(label: &str, mut record: TrackingRecord) -> TrackingRecord {
    match &mut record {
        TrackingRecord::Metric { metric: name, .. }
        | TrackingRecord::Param { param: name, .. }
        | TrackingRecord::Tag { tag: name, .. } => *name = full_name(label, name),
        TrackingRecord::Note { .. } => {}
    }
    record
}

fn fold(runs: &mut BTreeMap<String, Data>, record: TrackingRecord) {
    match record {
        TrackingRecord::Metric { metric, value, step, time } => {
            let (run, name) = owner(runs, metric);
            let point = Point { value, step, time: time.unwrap_or_default() };
            let latest = run.metrics.entry(name).or_insert(point);
            if (point.step, point.time) >= (latest.step, latest.time) {
                *latest = point;
            }
        }
        TrackingRecord::Param { param, text } => {
            let (run, name) = owner(runs, param);
            run.params.insert(name, text);
        }
        TrackingRecord::Tag { tag, text } => {
            if let Some((label, RUN)) = tag.split_once('/') {
                runs.entry(label.to_owned()).or_default();
            }
            let (run, name) = owner(runs, tag);
            match text.as_str() {
                "" => run.tags.remove(&name), // there is no record that deletes
                _ => run.tags.insert(name, text),
            };
        }
        TrackingRecord::Note { .. } => {}
    }
}

/// The run a name belongs to, and what the run calls it. A slash may as well be part of the name.
fn owner(runs: &mut BTreeMap<String, Data>, name: String) -> (&mut Data, String) {
    let (label, name) = match name.split_once('/') {
        Some((label, rest)) if runs.contains_key(label) => (label.to_owned(), rest.to_owned()),
        _ => (String::new(), name),
    };
    (runs.entry(label).or_default(), name)
}

/// Cuts bytes into lines.
#[derive(Default)]
struct Lines {
    /// The start of a line whose end has not come yet.
    rest: Vec<u8>,
}

impl Lines {
    fn is_inside_one(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Hands over each line that is whole now.
    fn add(&mut self, bytes: &[u8], take: &mut impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.rest.len() <= MAX_LINE {
                self.rest.extend_from_slice(piece);
            }
            if piece.ends_with(b"\n") {
                self.end(take);
            }
        }
    }

    /// No more of the line will come.
    fn end(&mut self, take: &mut impl FnMut(&[u8])) {
        take(&self.rest);
        self.rest.clear();
    }
}

/// Reads the whole lines of a file that grows or is replaced, from where it stopped the last time.
struct LineReader {
    source: Source,
    lines: Lines,
}

impl LineReader {
    fn new(path: &Path) -> LineReader {
        LineReader { source: Source::new(path.to_owned(), 0, Vec::new()), lines: Lines::default() }
    }

    /// Hands over each new line. A file that is not there has none.
    fn read(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        let lines = &mut self.lines;
        while self.source.read(None, |piece| match piece {
            Piece::Bytes(bytes) => lines.add(bytes, &mut take),
            Piece::Restart => lines.end(&mut take),
            Piece::Hole(_) | Piece::Strange(_) => {}
        })? {}
        Ok(())
    }
}

/// Hands over the whole lines of a stream; one that is not there has none.
fn read_stream(dir: &Path, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    if !dir.is_dir() {
        return Ok(());
    }
    let (mut stream, mut lines, mut at) = (Reader::open(dir, dir)?, Lines::default(), 0);
    let mut buffer = vec![0; 64 << 10];
    loop {
        match stream.read_at(at, &mut buffer)? {
            0 => return Ok(()),
            count => {
                lines.add(&buffer[..count], &mut take);
                at += count as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use agent_shim::LogPolicy;
    use agent_shim::segments::Writer;

    use super::*;

    fn metric(name: &str, value: f64, step: i64) -> TrackingRecord {
        TrackingRecord::Metric { metric: name.into(), value, step, time: Some(Timestamp(9)) }
    }

    fn tag(name: &str, text: &str) -> TrackingRecord {
        TrackingRecord::Tag { tag: name.into(), text: text.into() }
    }

    #[test]
    fn test_what_was_recorded_in_a_file_that_was_replaced_is_known_still() {
        let dir = tempfile::tempdir().unwrap();
        let (path, stream) = (dir.path().join("tracking.jsonl"), dir.path().join("stream"));
        let mut writer = Writer::open(&stream, LogPolicy::default()).unwrap();
        let mut book = Book::new(path.clone(), stream.clone());
        book.append("", vec![metric("loss", 1.0, 1)]).unwrap();
        let before = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        book.append("", vec![metric("loss", 2.0, 2)]).unwrap();
        assert_eq!(book.history("", "loss").unwrap().len(), 1, "the supervisor has not looked");
        let note = TrackingRecord::Note { note: "replaced".into() }.to_line();
        for part in [before, note.into_bytes(), std::fs::read(&path).unwrap()] {
            writer.append(&part, std::time::Instant::now());
        }
        std::fs::write(&path, metric("acc", 0.5, 0).to_line()).unwrap();
        let mut again = Book::new(path, stream);
        for book in [&mut book, &mut again] {
            let runs = book.runs().unwrap();
            assert_eq!((runs[""].metrics["loss"].value, runs[""].metrics["acc"].value), (2.0, 0.5));
            assert_eq!(book.history("", "loss").unwrap().iter().map(|p| p.step).collect::<Vec<_>>(), [1, 2]);
        }
    }

    #[test]
    fn test_book_is_the_same_after_a_new_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tracking.jsonl");
        let book_of = |path: &Path| Book::new(path.to_owned(), dir.path().join("stream"));
        let mut book = book_of(&path);
        assert_eq!(book.runs().unwrap().len(), 1);
        book.append("", vec![metric("trial/loss", 3.0, 0), metric("loss", 1.0, 2), metric("loss", 2.0, 1)])
            .unwrap();
        book.append("trial", vec![tag(RUN, "Trial"), metric("loss", 0.5, 0)]).unwrap();
        book.append("", vec![tag("a", "1"), tag("b", "2"), tag("a", "")]).unwrap();
        let mut again = book_of(&path);
        for book in [&mut book, &mut again] {
            let runs = book.runs().unwrap();
            assert_eq!(runs[""].metrics["loss"].value, 1.0, "the value of the highest step");
            assert_eq!(runs[""].metrics["trial/loss"].value, 3.0, "recorded before that run began");
            assert_eq!(runs["trial"].metrics["loss"].value, 0.5);
            assert_eq!(runs["trial"].own(RUN), Some("Trial"));
            assert_eq!(runs[""].tags.keys().collect::<Vec<_>>(), ["b"]);
        }
        assert_eq!(again.history("", "loss").unwrap().iter().map(|p| p.step).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn test_lines_of_the_script_count_and_a_torn_one_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tracking.jsonl");
        let book_of = |path: &Path| Book::new(path.to_owned(), dir.path().join("stream"));
        let mut book = book_of(&path);
        std::fs::write(&path, "{\"metric\":\"loss\",\"value\":1}\nnonsense\n{\"metric\":\"lo").unwrap();
        assert_eq!(book.runs().unwrap()[""].metrics["loss"].value, 1.0);
        book.append("", vec![metric("acc", 0.5, 0)]).unwrap();
        assert_eq!(book.runs().unwrap()[""].metrics["acc"].value, 0.5);

        let mut long = vec![b'x'; MAX_LINE * 3];
        long.extend_from_slice(b"\n{\"param\":\"p\",\"text\":\"t\"}\n");
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&long).unwrap();
        assert_eq!(book.runs().unwrap()[""].params["p"], "t");
    }
}
