//! Small blobs, one after another in files of some hundred megabytes.
//!
//! Owns `segments/<number>` and the notes `segments/<number>.note` beside them. Blobs are appended to the last
//! segment under one lock, and a batch pays one flush; batches that wait for the disk at the same time share
//! it. **An append is acknowledged, and its blobs enter the index, after the flush.** A segment that is full is
//! sealed and gets a [`note`]; opening the store reads notes, and scans only bytes that no note covers.
//!
//! Nothing is removed in place: a removed blob leaves the index, and a sealed segment of which less than three
//! quarters are wanted is copied forward and unlinked. Until then a scan may find such a blob again; it still matches
//! its digest. No scan returns a damaged record, and the note that named it is written anew.
//!
//! Lock order: `noting` or `flushing`, then `tail`, then the index. Nobody does I/O while holding the index.

mod note;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, OnceLock};

use agent_model::{Digest, failpoint};
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use self::note::Note;
use super::home::{Home, hit, is_proof, now};
use super::index::{BlobLocation, Index};
use super::record;
use super::{OpenError, WriteError, batches};
use crate::{digest_of, parallel};

/// The size up to which a segment grows, in bytes.
pub(super) const SEGMENT: u64 = 256 * 1024 * 1024;

/// Bytes appended at once.
const RUN: u64 = 4 * 1024 * 1024;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Segments {
    home: Arc<Home>,
    index: Arc<Mutex<Index>>,
    /// The size up to which a segment grows.
    limit: u64,
    tail: Mutex<Tail>,
    /// Held during a flush; other threads queue here and find their flush done.
    flushing: Mutex<()>,
    /// Held while notes are written or removed, so that no older one replaces a newer one.
    noting: Mutex<()>,
}

#[derive(Debug)]
struct Tail {
    open: Option<Open>,
    /// The number of the next segment.
    next: u32,
}

/// The segment that grows.
#[derive(Debug)]
struct Open {
    number: u32,
    file: Arc<File>,
    length: u64,
    /// The flush that the next append waits for.
    round: Arc<Round>,
    /// A flush failed: it is unknown which of its bytes are on the disk.
    broken: bool,
}

/// A flush, and how it ended.
type Round = OnceLock<Result<(), Errno>>;

/// Records that are written and not in the index yet. Their segment is kept while this exists.
#[derive(Debug)]
struct Appended {
    index: Arc<Mutex<Index>>,
    segment: u32,
    records: Vec<(Digest, u32)>,
    round: Arc<Round>,
}

impl Drop for Appended {
    fn drop(&mut self) {
        self.index.lock().settle(self.segment);
    }
}

fn segment_name(number: u32) -> String {
    format!("segments/{number:08x}")
}

fn note_name(number: u32) -> String {
    format!("segments/{number:08x}.note")
}

impl Segments {
    /// Puts all blobs of the segments into the index.
    pub(super) fn open(
        home: &Arc<Home>,
        index: &Arc<Mutex<Index>>,
        limit: u64,
    ) -> Result<Segments, OpenError> {
        let numbers = numbers(home)?;
        let next = numbers.last().map_or(1, |last| last.saturating_add(1));
        let tail = Mutex::new(Tail { open: None, next });
        let segments = Segments {
            home: Arc::clone(home),
            index: Arc::clone(index),
            limit: limit.min(SEGMENT),
            tail,
            flushing: Mutex::new(()),
            noting: Mutex::new(()),
        };
        let last = numbers.last().copied();
        let loaded = parallel::map(&numbers, parallel::cores(), |number| {
            match segments.load(*number, Some(*number) == last) {
                Ok(open) => Ok(open),
                // A store opened without a segment that it cannot read now would report its blobs missing. But a
                // part of a disk that is broken for good must not keep the rest from being used.
                Err(source) if !is_proof(&source) && Errno::from_io_error(&source) != Some(Errno::IO) => {
                    Err(OpenError::Directory { path: home.at(&segment_name(*number)), source })
                }
                Err(error) => {
                    tracing::error!(segment = segment_name(*number), %error, "cannot read segment");
                    Ok(None)
                }
            }
        });
        let loaded: Vec<Option<Open>> = loaded.into_iter().collect::<Result<_, _>>()?;
        segments.tail.lock().open = loaded.into_iter().flatten().next_back();
        segments.write_notes(false);
        Ok(segments)
    }

    /// Loads a segment. The last one may grow further: then it is cut after its last whole record.
    fn load(&self, number: u32, last: bool) -> io::Result<Option<Open>> {
        let file = self.home.open_file(&segment_name(number))?;
        let meta = file.metadata()?;
        let mut preface = [0; record::PREFACE];
        let read = file.read_exact_at(&mut preface, 0);
        if let Err(error) = &read
            && !is_proof(error)
        {
            return Err(error
                .raw_os_error()
                .map_or_else(|| error.kind().into(), io::Error::from_raw_os_error));
        }
        let chance = read.is_ok().then(|| record::chance(&preface)).flatten();
        let note = chance.and_then(|chance| self.read_note(number, chance, meta.len()));
        let noted = note.as_ref().map_or(0, |note| note.covered);
        let mut records = note.map(|note| note.records).unwrap_or_default();
        let mut end = noted;
        if noted < meta.len() {
            let found = record::scan(&file, number, noted.max(record::PREFACE as u64))?;
            let lost = meta.len().saturating_sub(found.end) + found.passed;
            if lost > 0 && chance.is_some() {
                let segment = segment_name(number);
                tracing::warn!(segment, lost, "skipped bytes of segment that are unfinished or damaged");
            }
            // They may have been written by a process that was killed before it flushed them.
            rustix::fs::fdatasync(&file)?;
            records.extend(found.records);
            end = found.end;
        }
        let used = u32::try_from(meta.mtime()).unwrap_or(0);
        let open = (last && end < self.limit && chance.is_some()).then(|| self.reopen(number, end)).flatten();
        let length = open.as_ref().map_or(meta.len(), |open| open.length);
        if records.is_empty() && chance.is_none() && meta.len() > 0 {
            return Ok(None); // of a later release, or of nobody: it is left alone
        }
        let mut index = self.index.lock();
        index.open_segment(number, length, open.is_none(), noted == length);
        for (digest, offset) in records {
            index.load(digest, BlobLocation::Record { segment: number, offset }, used);
        }
        Ok(open)
    }

    fn read_note(&self, number: u32, chance: u64, length: u64) -> Option<Note> {
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut self.home.open_file(&note_name(number)).ok()?, &mut bytes).ok()?;
        let note = Note::decode(&bytes).filter(|note| note.chance == chance && note.covered <= length)?;
        let within = |(digest, offset): &(Digest, u32)| {
            u64::from(*offset) + record::length(digest.size) <= note.covered
        };
        note.records.iter().all(within).then_some(note)
    }

    /// The last segment, to grow from `end` on. One that cannot be written is left as it is.
    fn reopen(&self, number: u32, end: u64) -> Option<Open> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || {
            let file =
                File::from(rustix::fs::openat(&self.home.root, segment_name(number), flags, Mode::empty())?);
            hit("cas.segment.cut")?;
            let end = end.max(record::PREFACE as u64);
            if file.metadata()?.len() != end {
                file.set_len(end)?;
            }
            Ok::<_, io::Error>((Arc::new(file), end))
        };
        let (file, length) = open().ok()?;
        Some(Open { number, file, length, round: Arc::default(), broken: false })
    }

    /// Keeps blobs whose bytes are right. When this returns they survive a power failure.
    pub(super) fn write(&self, blobs: &[(Digest, Bytes)]) -> Result<(), WriteError> {
        if blobs.is_empty() {
            return Ok(());
        }
        let size = blobs.iter().map(|(digest, _)| record::length(digest.size)).sum();
        if !self.home.has_room(size) {
            return Err(self.home.write_error("segments", Errno::NOSPC));
        }
        for appended in self.append_durably(blobs)? {
            let mut index = self.index.lock();
            let now = now();
            for (digest, offset) in &appended.records {
                index.insert(
                    *digest,
                    BlobLocation::Record { segment: appended.segment, offset: *offset },
                    now,
                );
            }
        }
        self.write_notes(false);
        Ok(())
    }

    fn append_durably(&self, blobs: &[(Digest, Bytes)]) -> Result<Vec<Appended>, WriteError> {
        let runs = batches(blobs, RUN.min(self.limit), usize::MAX, |(digest, _)| record::length(digest.size));
        let appended = runs.iter().map(|run| self.append(run)).collect::<Result<Vec<_>, _>>()?;
        for part in &appended {
            let failed = |source| self.home.write_error(&segment_name(part.segment), source);
            self.flush(&part.round).map_err(failed)?;
        }
        Ok(appended)
    }

    /// Appends records. They are not durable yet.
    fn append(&self, blobs: &[&(Digest, Bytes)]) -> Result<Appended, WriteError> {
        let size: u64 = blobs.iter().map(|(digest, _)| record::length(digest.size)).sum();
        let mut tail = self.tail.lock();
        if tail.open.as_ref().is_some_and(|open| open.broken || open.length + size > self.limit) {
            self.seal(&mut tail);
        }
        if tail.open.is_none() {
            tail.open = Some(self.create(tail.next)?);
            tail.next = tail.next.saturating_add(1);
        }
        let Some(open) = &mut tail.open else { return Err(self.home.write_error("segments", Errno::IO)) };
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
        let mut records = Vec::with_capacity(blobs.len());
        for (digest, content) in blobs {
            let offset = u32::try_from(open.length + bytes.len() as u64).unwrap_or(u32::MAX);
            bytes.extend_from_slice(&record::header(open.number, offset, digest));
            bytes.extend_from_slice(content);
            records.push((*digest, offset));
        }
        let written =
            failpoint::hit("cas.segment.append").and_then(|()| open.file.write_all_at(&bytes, open.length));
        if let Err(source) = written {
            // The next append begins at the same byte; until then a part of this one takes no room.
            let _ = open.file.set_len(open.length);
            return Err(self.home.write_error(&segment_name(open.number), source));
        }
        open.length += size;
        self.index.lock().grow(open.number, open.length);
        let (index, round) = (Arc::clone(&self.index), Arc::clone(&open.round));
        Ok(Appended { index, segment: open.number, records, round })
    }

    /// Waits until a round is flushed, maybe by another thread.
    fn flush(&self, round: &Arc<Round>) -> Result<(), Errno> {
        let _turn = self.flushing.lock();
        if let Some(outcome) = round.get() {
            return *outcome;
        }
        let begun = self
            .tail
            .lock()
            .open
            .as_mut()
            .map(|open| (open.number, Arc::clone(&open.file), std::mem::take(&mut open.round)));
        if let Some((number, file, begun)) = begun {
            let outcome = sync(&file);
            if outcome.is_err()
                && let Some(open) = self.tail.lock().open.as_mut().filter(|open| open.number == number)
            {
                open.broken = true;
            }
            let _ = begun.set(outcome);
        }
        // Sealing flushes as well, so a round that is not the one flushed here was flushed by sealing.
        round.get().copied().unwrap_or(Err(Errno::IO))
    }

    /// Ends the segment that grows.
    fn seal(&self, tail: &mut Tail) {
        let Some(open) = tail.open.take() else { return };
        // Somebody waits for the round unless all was flushed before.
        if Arc::strong_count(&open.round) > 1 {
            let _ = open.round.set(sync(&open.file));
        }
        self.index.lock().seal(open.number);
    }

    /// Begins a segment; its name is durable when this returns.
    fn create(&self, number: u32) -> Result<Open, WriteError> {
        let name = segment_name(number);
        let make = || {
            let chance = getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?;
            failpoint::hit("cas.segment.create")?;
            let file = self.home.create_file(&name, Mode::RUSR | Mode::WUSR)?;
            file.write_all_at(&record::preface(chance), 0)?;
            self.home.flush_directory("segments")?;
            Ok::<_, io::Error>(Arc::new(file))
        };
        let file = make().map_err(|source| {
            let _ = self.home.remove_file(&name);
            self.home.write_error(&name, source)
        })?;
        let length = record::PREFACE as u64;
        self.index.lock().open_segment(number, length, false, false);
        Ok(Open { number, file, length, round: Arc::default(), broken: false })
    }

    /// The bytes of a blob, unchecked.
    pub(super) fn read(&self, segment: u32, offset: u32, digest: &Digest) -> io::Result<Bytes> {
        read_blob(&self.home.open_file(&segment_name(segment))?, offset, digest)
    }

    /// Bytes of a segment.
    pub(super) fn read_range(&self, segment: u32, start: u64, end: u64) -> io::Result<Bytes> {
        read_range(&self.home.open_file(&segment_name(segment))?, start, end)
    }

    /// Removes a damaged blob from the index, if it is still there, and keeps its bytes for someone to look at.
    pub(super) fn put_away(&self, digest: &Digest, segment: u32, offset: u32) -> bool {
        let there = self.index.lock().remove(digest, BlobLocation::Record { segment, offset });
        if there {
            self.quarantine(digest, segment, offset);
            // A note that still names it costs one more check after the next start.
            if let Err(error) = self.forget_note(segment) {
                tracing::warn!(segment = segment_name(segment), %error, "cannot forget damaged blob");
            }
        }
        there
    }

    fn quarantine(&self, digest: &Digest, segment: u32, offset: u32) {
        let read = hit("cas.blob.quarantine").ok().and_then(|()| self.read(segment, offset, digest).ok());
        let Some((bytes, name)) = read.zip(self.home.quarantine_name(digest)) else { return };
        let kept = self.home.create_file(&name, Mode::RUSR).map(|file| file.write_all_at(&bytes, 0));
        if !matches!(kept, Ok(Ok(()))) {
            let _ = self.home.remove_file(&name); // a disk without room for it has none for a part
        }
    }

    /// Removes the note of a segment: a record that left the index must not come back through it.
    fn forget_note(&self, segment: u32) -> Result<(), Errno> {
        {
            let _alone = self.noting.lock();
            self.home.remove_file(&note_name(segment))?;
            self.home.flush_directory("segments")?;
        }
        self.write_notes(false);
        Ok(())
    }

    /// Writes the notes that are due; `closing` means that nothing is appended any more. One that cannot be
    /// written costs a scan.
    pub(super) fn write_notes(&self, closing: bool) {
        let _alone = self.noting.lock();
        let due = self.index.lock().take_unnoted(closing);
        for (number, (covered, records)) in due {
            if let Err(error) = self.write_note(number, covered, records) {
                let segment = segment_name(number);
                tracing::warn!(segment, %error, "cannot note content of segment: it is read at the next start");
            }
        }
    }

    fn write_note(&self, number: u32, covered: u64, records: Vec<(Digest, u32)>) -> io::Result<()> {
        let mut preface = [0; record::PREFACE];
        self.home.open_file(&segment_name(number))?.read_exact_at(&mut preface, 0)?;
        let Some(chance) = record::chance(&preface) else { return Ok(()) };
        let note = Note { chance, covered, records }.encode();
        self.home.replace_file(&note_name(number), &note, "cas.segment.note")
    }

    /// Blobs whose records are whole and that are not in the index, with the place of each.
    pub(super) fn strays(&self) -> io::Result<Vec<(Digest, BlobLocation)>> {
        let numbers = numbers(&self.home).map_err(io::Error::other)?;
        let mut strays = Vec::new();
        for number in numbers {
            let scan = |file: File| record::scan(&file, number, record::PREFACE as u64);
            let found = match self
                .home
                .open_file(&segment_name(number))
                .map_err(io::Error::from)
                .and_then(scan)
            {
                Ok(found) => found,
                Err(error) => {
                    tracing::error!(segment = segment_name(number), %error, "cannot look for blobs in segment");
                    continue;
                }
            };
            let index = self.index.lock();
            let stray = |(digest, _): &(Digest, u32)| index.find(digest).is_none();
            let place = |(digest, offset)| (digest, BlobLocation::Record { segment: number, offset });
            strays.extend(found.records.into_iter().filter(stray).map(place));
        }
        Ok(strays)
    }

    /// Segments that are mostly waste.
    pub(super) fn sparse(&self) -> Vec<u32> {
        let mut tail = self.tail.lock();
        let worth = self.limit / 16;
        if tail.open.as_ref().is_some_and(|open| self.index.lock().is_waste(open.number, worth)) {
            self.seal(&mut tail);
        }
        drop(tail);
        self.index.lock().sparse()
    }

    /// Appends copies of the `wanted` blobs of a sealed segment and removes it. If some are damaged, the segment and
    /// the index do not change, and those blobs are returned.
    pub(super) fn copy_forward(
        &self,
        number: u32,
        wanted: &[(Digest, u32)],
    ) -> Result<Vec<Digest>, WriteError> {
        let size: u64 = wanted.iter().map(|(digest, _)| record::length(digest.size)).sum();
        if self.home.free().is_some_and(|free| free < size) {
            return Err(self.home.write_error("segments", Errno::NOSPC));
        }
        let name = segment_name(number);
        let file = self.home.open_file(&name).map_err(|source| self.home.write_error(&name, source))?;
        let (mut damaged, mut copies) = (Vec::new(), Vec::new());
        for run in batches(wanted, RUN.min(self.limit), usize::MAX, |(digest, _)| record::length(digest.size))
        {
            let read = |(digest, offset): &&(Digest, u32)| match read_blob(&file, *offset, digest) {
                Ok(bytes) if digest_of(&bytes) == *digest => Ok((*digest, bytes)),
                _ => Err(*digest),
            };
            let (good, bad): (Vec<_>, Vec<_>) = run.iter().map(read).partition(Result::is_ok);
            damaged.extend(bad.into_iter().filter_map(Result::err));
            let good: Vec<(Digest, Bytes)> = good.into_iter().flatten().collect();
            hit("cas.segment.copy").map_err(|source| self.home.write_error("segments", source))?;
            copies.extend(self.append_durably(&good)?);
        }
        if !damaged.is_empty() {
            return Ok(damaged);
        }
        let copied = copies.iter().flat_map(|copy| copy.records.iter().map(|record| (copy.segment, *record)));
        for ((digest, from), (segment, (_, to))) in wanted.iter().zip(copied) {
            let from = BlobLocation::Record { segment: number, offset: *from };
            self.index.lock().moved(digest, from, BlobLocation::Record { segment, offset: to });
        }
        drop(copies);
        self.remove(number);
        Ok(damaged)
    }

    /// Removes a segment in which nothing is wanted.
    fn remove(&self, number: u32) {
        if !self.index.lock().drop_segment(number) {
            return;
        }
        let removed = hit("cas.segment.unlink")
            .and_then(|()| self.home.remove_file(&note_name(number)))
            .and_then(|()| self.home.remove_file(&segment_name(number)));
        if let Err(error) = removed {
            let segment = segment_name(number);
            tracing::error!(segment, %error, "cannot remove unneeded segment");
        }
    }
}

/// Waits until all appended bytes are on the disk.
fn sync(file: &File) -> Result<(), Errno> {
    hit("cas.segment.sync")?;
    rustix::io::retry_on_intr(|| rustix::fs::fdatasync(file))
}

/// The bytes of the blob whose record begins at `offset`, unchecked.
fn read_blob(file: &File, offset: u32, digest: &Digest) -> io::Result<Bytes> {
    let start = u64::from(offset) + record::HEADER as u64;
    read_range(file, start, start + digest.size)
}

fn read_range(file: &File, start: u64, end: u64) -> io::Result<Bytes> {
    let mut bytes = BytesMut::zeroed(usize::try_from(end - start).unwrap_or(0));
    file.read_exact_at(&mut bytes, start)?;
    Ok(bytes.freeze())
}

/// The numbers of all segments, in order. A note without its segment is removed.
fn numbers(home: &Home) -> Result<Vec<u32>, OpenError> {
    let path = home.at("segments");
    let fail = |source| OpenError::Directory { path: path.clone(), source };
    let (mut numbers, mut notes) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(&path).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name().to_string_lossy().into_owned();
        let (number, list) = match name.strip_suffix(".note") {
            Some(number) => (number, &mut notes),
            None => (&name[..], &mut numbers),
        };
        list.extend(u32::from_str_radix(number, 16).ok().filter(|_| number.len() == 8));
    }
    numbers.sort_unstable();
    for note in notes.into_iter().filter(|note| numbers.binary_search(note).is_err()) {
        let _ = home.remove_file(&note_name(note)); // it says nothing to anybody
    }
    Ok(numbers)
}
