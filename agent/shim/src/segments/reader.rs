//! The reading half: bytes by offset, and the removal of segments that are not needed any more.
//!
//! Works beside a writer and after it. A stream of an earlier release, one plain file, is read the same way.
//!
//! A file of it may be gone or short: somebody removed it, or the machine crashed. Its bytes are then served as blanks
//! that end in a line which says so, and counted ([`Reader::missing`]). So every byte that is there keeps its offset, and
//! none behind a hole is lost.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use agent_fs::open_plain;
use agent_model::Stream;
use agent_model::tracking::{TrackingLine, TrackingRecord};

use super::{path_of, starts};
use crate::JobDir;

/// A log to be read. Cheap to open; see the module.
#[derive(Debug)]
pub struct Reader {
    place: StreamPlace,
    /// Where the known segments begin, oldest first.
    starts: Vec<u64>,
    /// The segment that was read last.
    open: Option<(u64, File)>,
    /// Holes that were served: where each begins, by its end.
    holes: BTreeMap<u64, u64>,
    /// The line at the end of each.
    notice: String,
}

/// In the place of output that is gone.
const GONE: &str = "[agentd: output is missing here: its file on the node is gone or harmed]\n";

#[derive(Debug)]
enum StreamPlace {
    /// A directory of segments.
    Segments(PathBuf),
    /// One file that is the whole stream.
    Plain(PathBuf),
}

impl Reader {
    /// The log of the job in `dir`, whichever release wrote it.
    pub fn of(dir: &JobDir) -> io::Result<Reader> {
        Reader::open(&dir.segments(), &dir.log(Stream::Job))
    }

    /// The tracking records of the job in `dir`. A shim of an earlier release left them in one file.
    pub fn of_tracking(dir: &JobDir) -> io::Result<Reader> {
        let reader = Reader::open(&dir.tracking_stream(), &dir.tracking())?;
        let note = "records are missing here: their file on the node is gone or harmed".to_owned();
        Ok(Reader { notice: TrackingLine::from(TrackingRecord::Note { note }).to_line(), ..reader })
    }

    /// The stream in the directory `dir`, or, where there is no such directory, in the file `plain`.
    pub fn open(dir: &Path, plain: &Path) -> io::Result<Reader> {
        match starts(dir) {
            Ok(starts) => Ok(Reader::new(StreamPlace::Segments(dir.to_owned()), starts, None)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Reader::plain(plain),
            Err(error) => Err(error),
        }
    }

    /// The stream in one file.
    pub fn plain(path: &Path) -> io::Result<Reader> {
        let file = open_plain(path)?;
        Ok(Reader::new(StreamPlace::Plain(path.to_owned()), vec![0], Some((0, file))))
    }

    fn new(place: StreamPlace, starts: Vec<u64>, open: Option<(u64, File)>) -> Reader {
        Reader { place, starts, open, holes: BTreeMap::new(), notice: GONE.to_owned() }
    }

    /// Below this offset everything has been trimmed.
    pub fn start(&self) -> u64 {
        self.starts.first().copied().unwrap_or(0)
    }

    /// Where the stream ends.
    pub fn len(&mut self) -> io::Result<u64> {
        self.look()?;
        match self.starts.last() {
            Some(last) => Ok(last + open_plain(&self.path(*last))?.metadata()?.len()),
            None => Ok(0),
        }
    }

    /// How many bytes were served as blanks, because they are gone.
    pub fn missing(&self) -> u64 {
        self.holes.iter().map(|(end, start)| end - start).sum()
    }

    /// Nothing was ever written.
    pub fn is_empty(&mut self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Reads from `offset` on; fewer bytes than asked for mean that there are no more.
    pub fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        let mut looked = false;
        while done < buffer.len() {
            let at = offset + done as u64;
            let mut count = match self.segment_of(at) {
                Some(index) => self.read_in(index, at, &mut buffer[done..])?,
                None => 0,
            };
            if count == 0 && !looked {
                self.look()?;
                looked = true;
                continue;
            }
            if count == 0 {
                count = self.fill(at, &mut buffer[done..]);
            }
            if count == 0 {
                break;
            }
            done += count;
            looked = false;
        }
        Ok(done)
    }

    /// Serves blanks for what is gone at `at`, if more of the stream follows.
    fn fill(&mut self, at: u64, buffer: &mut [u8]) -> usize {
        let Some(end) = self.starts.iter().copied().find(|start| *start > at) else { return 0 };
        let known = self.holes.entry(end).or_insert(at);
        *known = at.min(*known);
        let count = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        let notice = format!("\n{}", self.notice).into_bytes();
        for (place, byte) in (at..).zip(&mut buffer[..count]) {
            let left = usize::try_from(end - place).unwrap_or(usize::MAX);
            // The same whatever part of the hole is read: it is counted from the end.
            *byte = match notice.len().checked_sub(left) {
                Some(index) if *known + notice.len() as u64 <= end => notice[index],
                _ if left == 1 => b'\n',
                _ => b' ',
            };
        }
        count
    }

    /// As [`read_at`](Self::read_at), if the whole part is in memory; never waits for a disk.
    pub fn read_cached(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let segment = self.open.as_ref().filter(|(start, _)| *start <= offset);
        segment.is_some_and(|(start, file)| agent_fs::read_cached(file, buffer, offset - start))
    }

    /// Removes every segment that holds nothing at or above `offset`, but never the last one. Returns how many
    /// were removed.
    pub fn trim_below(&mut self, offset: u64) -> io::Result<usize> {
        let StreamPlace::Segments(_) = &self.place else { return Ok(0) };
        if !self.can_trim(offset) {
            self.look()?;
        }
        let mut trimmed = 0;
        while self.can_trim(offset) {
            match fs::remove_file(self.path(self.starts[0])) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            self.starts.remove(0);
            trimmed += 1;
        }
        Ok(trimmed)
    }

    /// Whether the oldest known segment ends at or below `offset`.
    pub fn can_trim(&self, offset: u64) -> bool {
        self.starts.get(1).is_some_and(|second| *second <= offset)
    }

    fn path(&self, start: u64) -> PathBuf {
        match &self.place {
            StreamPlace::Segments(dir) => path_of(dir, start),
            StreamPlace::Plain(path) => path.clone(),
        }
    }

    /// Lists the segments anew.
    fn look(&mut self) -> io::Result<()> {
        if let StreamPlace::Segments(dir) = &self.place {
            self.starts = starts(dir)?;
            let is_gone = |(_, file): &(u64, File)| file.metadata().is_ok_and(|file| file.nlink() == 0);
            self.open.take_if(|open| is_gone(open)); // it may have been written again
        }
        Ok(())
    }

    /// The known segment that holds `offset`, if any does.
    fn segment_of(&self, offset: u64) -> Option<usize> {
        self.starts.partition_point(|start| *start <= offset).checked_sub(1)
    }

    fn read_in(&mut self, index: usize, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let start = self.starts[index];
        let most = match self.starts.get(index + 1) {
            Some(next) => usize::try_from(next - at).unwrap_or(usize::MAX).min(buffer.len()),
            None => buffer.len(),
        };
        if self.open.as_ref().is_none_or(|(open, _)| *open != start) {
            match open_plain(&self.path(start)) {
                Ok(file) => self.open = Some((start, file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0), // trimmed meanwhile
                Err(error) => return Err(error),
            }
        }
        let Some((_, file)) = &self.open else { return Ok(0) };
        loop {
            match file.read_at(&mut buffer[..most], at - start) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}
