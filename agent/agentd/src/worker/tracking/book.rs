//! The state of a run, as the fold of its tracking file.
//!
//! The file is the only source: recording appends to it, and the state is updated by reading its new lines. So lines
//! that a script writes itself count like those of the endpoint. A script may also replace the file; its earlier
//! records still count, also after a restart of the daemon, because the supervisor of the job copies everything into
//! a stream ([`agent_shim::tracking`]).
//!
//! A job has one file, but a script may begin further runs in it; their records name the run. The endpoint's own data
//! about a run are tags whose names begin with `agentd.`, never shown to the script.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use agent_model::tracking::{OWN, TrackingLine, TrackingRecord};
use agent_model::{Timestamp, failpoint};
use agent_shim::segments::Reader;
use agent_shim::source::{Piece, Source};
use serde_json::Value;

/// The tag that makes a run exist; its value is the name that users see.
pub(super) const RUN: &str = "agentd.run";
/// The longest line that is read, in bytes; longer ones are no records.
const MAX_LINE: usize = 1 << 20;
/// The most memory for a job's names and texts, in bytes: far more than any reasonable script records.
pub(super) const MOST_KEPT: usize = 16 << 20;
/// The overhead of each of them, in bytes: most of it in an answer, where each is a separate map.
const ENTRY: usize = 640;
/// The most that one call reads of the records, in bytes.
const SCAN: u64 = 32 << 20;

/// The latest value of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) value: f64,
    pub(super) step: i64,
    pub(super) time: Timestamp,
    /// The newest time of any of its values.
    pub(super) newest: Timestamp,
}

impl Point {
    fn new(value: f64, step: i64, time: Option<Timestamp>) -> Point {
        let time = time.unwrap_or_default();
        Point { value, step, time, newest: time }
    }
}

/// The state of one run.
#[derive(Debug, Default)]
pub(super) struct Data {
    pub(super) metrics: BTreeMap<String, Point>,
    pub(super) params: BTreeMap<String, String>,
    pub(super) tags: BTreeMap<String, String>,
}

impl Data {
    /// The text of a tag.
    pub(super) fn tag(&self, name: &str) -> Option<&str> {
        self.tags.get(name).map(String::as_str)
    }

    /// The endpoint's documents of one kind, in the order of ids.
    pub(super) fn documents(&self, kind: &str) -> impl Iterator<Item = Value> {
        let from = document(kind, "");
        let tags = self.tags.range(from.clone()..).take_while(move |(name, _)| name.starts_with(&from));
        tags.filter_map(|(_, text)| serde_json::from_str(text).ok())
    }

    /// Adds a value; returns the change in memory use.
    fn measure(&mut self, metric: String, point: Point, room: bool) -> isize {
        match self.metrics.get_mut(&metric) {
            Some(latest) => {
                let newest = latest.newest.max(point.newest);
                if (point.step, point.time) >= (latest.step, latest.time) {
                    *latest = point;
                }
                latest.newest = newest;
            }
            None if room => {
                let size = size_of_pair(&metric, "");
                self.metrics.insert(metric, point);
                return size;
            }
            None => {}
        }
        0
    }
}

/// The name of the tag that contains a document of the endpoint.
pub(super) fn document(kind: &str, id: &str) -> String {
    format!("{OWN}{kind}.{id}")
}

/// The state of all runs of one job.
pub(super) struct Book {
    path: PathBuf,
    /// The stream of everything that was ever in the file.
    stream: PathBuf,
    /// The reader of the file; set after the stream was read.
    reader: Option<LineReader>,
    runs: Runs,
    /// The stream contains a note that the file was replaced.
    is_broken: bool,
}

impl Book {
    /// For a file and a stream that need not exist yet.
    pub(super) fn new(path: PathBuf, stream: PathBuf) -> Book {
        Book { path, stream, reader: None, runs: Runs::new(), is_broken: false }
    }

    /// The state of all runs, by label, updated with all records until now.
    pub(super) fn runs(&mut self) -> io::Result<&BTreeMap<String, Data>> {
        let (runs, is_broken) = (&mut self.runs, &mut self.is_broken);
        let mut fold_line = |line: &[u8]| {
            if let Some(line) = TrackingLine::parse(line) {
                *is_broken |= matches!(line.record, TrackingRecord::Note { .. });
                runs.fold(line);
            }
        };
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => {
                // Records in both are folded twice, which changes nothing.
                read_stream(&self.stream, &mut fold_line)?;
                none.insert(LineReader::new(&self.path))
            }
        };
        reader.read(fold_line)?;
        Ok(&self.runs.by_label)
    }

    /// Appends records of the run with this label, and returns when they are on the disk.
    pub(super) fn append(&mut self, label: &str, records: Vec<TrackingRecord>) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        self.runs()?;
        let mut text = String::new();
        if self.reader.as_ref().is_some_and(|reader| reader.lines.is_inside_one()) {
            text.push('\n'); // its writer was killed while writing it
        }
        for record in records {
            text.push_str(&TrackingLine { run: label.to_owned(), record }.to_line());
        }
        // The job may have put a link or a pipe there.
        let mut file = agent_fs::append_plain(&self.path)?;
        failpoint::hit("node.tracking.write")?;
        file.write_all(text.as_bytes())?;
        failpoint::hit("node.tracking.sync")?;
        file.sync_data()?;
        // Read at once, because the script may remove the file before the next call.
        self.runs().map(drop)
    }

    /// The place of all values of metrics.
    pub(super) fn history(&self) -> History {
        // A file that was never replaced has all of them, and is always up to date.
        let is_whole = self.reader.as_ref().is_none_or(|reader| !reader.is_broken) && !self.is_broken;
        if is_whole { History::File(self.path.clone()) } else { History::Stream(self.stream.clone()) }
    }

    /// Whether there is room for these records.
    pub(super) fn has_room_for(&self, label: &str, records: &[TrackingRecord]) -> bool {
        let known = |record: &TrackingRecord| {
            let Some(data) = self.runs.get(label) else { return false };
            match record {
                TrackingRecord::Metric { metric, .. } => data.metrics.contains_key(metric),
                TrackingRecord::Param { param, .. } => data.params.contains_key(param),
                TrackingRecord::Tag { tag, .. } => data.tags.contains_key(tag),
                TrackingRecord::Untag { .. } | TrackingRecord::Note { .. } => true,
            }
        };
        self.runs.kept < MOST_KEPT || records.iter().all(known)
    }
}

/// The place of the values of metrics, in the order of recording.
pub(super) enum History {
    /// In the file, which was never replaced.
    File(PathBuf),
    /// In the stream of everything that was ever in the file.
    Stream(PathBuf),
}

impl History {
    /// Up to `most` values of a metric of a run from byte `from` on, and the byte from which there may be more. Reads
    /// at most [`SCAN`] bytes, and may find none in them.
    pub(super) fn page(
        &self,
        (run, name): (&str, &str),
        from: u64,
        most: usize,
    ) -> io::Result<(Vec<Point>, Option<u64>)> {
        let mut reader = match self {
            History::File(path) => match Reader::plain(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), None)),
                reader => reader?,
            },
            History::Stream(dir) if !dir.is_dir() => return Ok((Vec::new(), None)),
            History::Stream(dir) => Reader::open(dir, dir)?,
        };
        let (mut points, mut lines, mut buffer) = (Vec::new(), Lines::default(), vec![0; 64 << 10]);
        // `next` is the end of the last whole line.
        let (mut at, mut next) = (from, from);
        loop {
            let count = reader.read_at(at, &mut buffer)?;
            if count == 0 {
                return Ok((points, None));
            }
            for piece in buffer[..count].split_inclusive(|byte| *byte == b'\n') {
                lines.add(piece, &mut |line| points.extend(value_of(line, run, name)));
                at += piece.len() as u64;
                if piece.ends_with(b"\n") {
                    next = at;
                }
                if at == next && points.len() >= most {
                    return Ok((points, Some(next)));
                }
                if at - from >= SCAN {
                    // The rest of such a long line is no record either.
                    return Ok((points, Some(if next > from { next } else { at })));
                }
            }
        }
    }
}

fn value_of(line: &[u8], run: &str, name: &str) -> Option<Point> {
    let line = TrackingLine::parse(line).filter(|line| line.run == run)?;
    match line.record {
        TrackingRecord::Metric { metric, value, step, time } if metric == name => {
            Some(Point::new(value, step, time))
        }
        _ => None,
    }
}

/// The state of runs, by label; the label of the job's own run is empty.
struct Runs {
    by_label: BTreeMap<String, Data>,
    /// About how much memory names and texts take, in bytes.
    kept: usize,
}

impl Runs {
    fn new() -> Runs {
        Runs { by_label: BTreeMap::from([(String::new(), Data::default())]), kept: 0 }
    }

    fn get(&self, label: &str) -> Option<&Data> {
        self.by_label.get(label)
    }

    /// Adds a record; in a full book, new names are ignored.
    fn fold(&mut self, TrackingLine { run, record }: TrackingLine) {
        let room = self.kept < MOST_KEPT;
        let data = match self.by_label.get_mut(&run) {
            Some(data) => data,
            None if room && matches!(&record, TrackingRecord::Tag { tag, .. } if tag == RUN) => {
                self.by_label.entry(run).or_default()
            }
            // A record of a run that was never begun.
            None => return,
        };
        let change = match record {
            TrackingRecord::Metric { metric, value, step, time } => {
                data.measure(metric, Point::new(value, step, time), room)
            }
            TrackingRecord::Param { param, text } => put(&mut data.params, param, text, room),
            TrackingRecord::Tag { tag, text } => put(&mut data.tags, tag, text, room),
            TrackingRecord::Untag { untag } => {
                data.tags.remove(&untag).map_or(0, |old| -size_of_pair(&untag, &old))
            }
            TrackingRecord::Note { .. } => 0,
        };
        self.kept = self.kept.saturating_add_signed(change);
    }
}

/// Sets a text, a new one only if there is room; returns the change in memory use.
fn put(texts: &mut BTreeMap<String, String>, name: String, text: String, room: bool) -> isize {
    let size = size_of_pair(&name, &text);
    let before = texts.get(&name).map(|old| size_of_pair(&name, old));
    if before.is_none() && !room {
        return 0;
    }
    texts.insert(name, text);
    size - before.unwrap_or(0)
}

fn size_of_pair(name: &str, text: &str) -> isize {
    isize::try_from(ENTRY + name.len() + text.len()).unwrap_or(isize::MAX)
}

/// Splits bytes into lines.
#[derive(Default)]
struct Lines {
    /// The start of a line whose end has not arrived yet.
    rest: Vec<u8>,
}

impl Lines {
    fn is_inside_one(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Calls `take` with each line that is whole now.
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

    /// Ends the line, of which no more bytes will arrive.
    fn end(&mut self, take: &mut impl FnMut(&[u8])) {
        take(&self.rest);
        self.rest.clear();
    }
}

/// Reads the whole lines of a file that grows or is replaced, from where it stopped the last time.
struct LineReader {
    source: Source,
    lines: Lines,
    /// The file was replaced.
    is_broken: bool,
}

impl LineReader {
    fn new(path: &Path) -> LineReader {
        let source = Source::new(path.to_owned(), 0, Vec::new());
        LineReader { source, lines: Lines::default(), is_broken: false }
    }

    /// Calls `take` with each new line. A file that does not exist has none.
    fn read(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        let (lines, is_broken) = (&mut self.lines, &mut self.is_broken);
        while self.source.read(None, |piece| match piece {
            Piece::Bytes(bytes) => lines.add(bytes, &mut take),
            Piece::Restart => {
                *is_broken = true;
                lines.end(&mut take);
            }
            Piece::Hole(_) | Piece::Strange(_) => {}
        })? {}
        Ok(())
    }
}

/// Calls `take` with the whole lines of a stream; one that does not exist has none.
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

    fn untag(name: &str) -> TrackingRecord {
        TrackingRecord::Untag { untag: name.into() }
    }

    /// The steps of all values of a metric, page by page.
    fn steps(book: &Book, name: &str) -> Vec<i64> {
        let (history, mut steps, mut next) = (book.history(), Vec::new(), Some(0));
        while let Some(from) = next {
            let (points, more) = history.page(("", name), from, 1).unwrap();
            steps.extend(points.iter().map(|point| point.step));
            next = more;
        }
        steps
    }

    #[test]
    fn test_history_goes_on_where_a_page_ended_and_reads_so_much_at_most() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tracking.jsonl");
        let mut book = Book::new(path.clone(), dir.path().join("stream"));
        for step in 0..5 {
            book.append("", vec![metric("loss", 1.0, step), metric("other", 1.0, step)]).unwrap();
        }
        assert_eq!(steps(&book, "loss"), [0, 1, 2, 3, 4]);
        assert_eq!(steps(&book, "absent"), [0; 0]);
        // A hole, as large as it may be: each call reads a part of it.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let before = file.metadata().unwrap().len();
        file.set_len(before + 100 * SCAN).unwrap();
        let (points, next) = book.history().page(("", "loss"), before, 1).unwrap();
        assert!(points.is_empty());
        assert_eq!(next.map(|next| (next - before) / SCAN), Some(1));
        assert_eq!(book.history().page(("", "loss"), 0, 5).unwrap().0.len(), 5);
    }

    #[test]
    fn test_names_and_texts_take_so_much_memory_at_most() {
        let dir = tempfile::tempdir().unwrap();
        let mut book = Book::new(dir.path().join("tracking.jsonl"), dir.path().join("stream"));
        let text = "x".repeat(8000);
        let mut lines = String::new();
        for number in 0..10_000 {
            lines.push_str(&TrackingLine::from(tag(&format!("t{number}"), &text)).to_line());
        }
        std::fs::write(dir.path().join("tracking.jsonl"), lines).unwrap();
        let kept: usize = book.runs().unwrap()[""].tags.values().map(String::len).sum();
        assert!(kept < MOST_KEPT && kept > MOST_KEPT / 2, "{kept}");
        // Known names can still be changed and removed, and removal makes room.
        assert!(!book.has_room_for("", &[metric("loss", 1.0, 0)]));
        assert!(book.has_room_for("", &[tag("t0", "new")]));
        book.append("", vec![untag("t0"), untag("t1")]).unwrap();
        assert!(book.has_room_for("", &[metric("loss", 1.0, 0)]));
        assert_eq!(book.runs.kept, weighed(&book.runs));
    }

    fn weighed(runs: &Runs) -> usize {
        let of = |data: &Data| {
            let texts =
                data.params.iter().chain(&data.tags).map(|(name, text)| name.len() + text.len() + ENTRY);
            texts.chain(data.metrics.keys().map(|name| name.len() + ENTRY)).sum::<usize>()
        };
        runs.by_label.values().map(of).sum()
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
        assert_eq!(steps(&book, "loss"), [0; 0], "the supervisor has not looked");
        let note = TrackingLine::from(TrackingRecord::Note { note: "replaced".into() }).to_line();
        for part in [before, note.into_bytes(), std::fs::read(&path).unwrap()] {
            writer.append(&part, std::time::Instant::now());
        }
        std::fs::write(&path, TrackingLine::from(metric("acc", 0.5, 0)).to_line()).unwrap();
        let mut again = Book::new(path, stream);
        for book in [&mut book, &mut again] {
            let runs = book.runs().unwrap();
            assert_eq!((runs[""].metrics["loss"].value, runs[""].metrics["acc"].value), (2.0, 0.5));
            assert_eq!(steps(book, "loss"), [1, 2]);
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
        book.append("", vec![metric("trial/loss", 4.0, 1), tag("trial/x", "y")]).unwrap();
        book.append("nobody", vec![metric("loss", 9.0, 9)]).unwrap();
        book.append("", vec![tag("a", "1"), tag("b", ""), untag("a")]).unwrap();
        let mut again = book_of(&path);
        for book in [&mut book, &mut again] {
            let runs = book.runs().unwrap();
            assert_eq!(runs[""].metrics["loss"].value, 1.0, "the value of the highest step");
            assert_eq!(runs.len(), 2);
            assert_eq!(runs[""].metrics["trial/loss"].value, 4.0, "a name of the job's own run");
            assert_eq!(runs["trial"].metrics["loss"].value, 0.5);
            assert_eq!((runs["trial"].tag(RUN), runs["trial"].tags.len()), (Some("Trial"), 1));
            assert_eq!(runs[""].tags.keys().collect::<Vec<_>>(), ["b", "trial/x"], "an empty text is a text");
        }
        assert_eq!(steps(&again, "loss"), [2, 1]);
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
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&long).unwrap();
        assert_eq!(book.runs().unwrap()[""].params["p"], "t");
    }
}
