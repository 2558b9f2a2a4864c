//! The reading half: bytes by offset, and the removal of segments that are not needed any more.
//!
//! Works beside a writer and after it. A stream of an earlier release, one plain file, is read the same way.
//! Bytes lost in a crash of the machine end the stream: the bytes after a hole are not served.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use agent_fs::open_plain;
use agent_model::Stream;

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
}

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
        Reader::open(&dir.tracking_stream(), &dir.tracking())
    }

    /// The stream in the directory `dir`, or, where there is no such directory, in the file `plain`.
    pub fn open(dir: &Path, plain: &Path) -> io::Result<Reader> {
        match starts(dir) {
            Ok(starts) => Ok(Reader { place: StreamPlace::Segments(dir.to_owned()), starts, open: None }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Reader::plain(plain),
            Err(error) => Err(error),
        }
    }

    /// The stream in one file.
    pub fn plain(path: &Path) -> io::Result<Reader> {
        let file = open_plain(path)?;
        Ok(Reader { place: StreamPlace::Plain(path.to_owned()), starts: vec![0], open: Some((0, file)) })
    }

    /// Below this offset everything has been trimmed.
    pub fn start(&self) -> u64 {
        self.starts.first().copied().unwrap_or(0)
    }

    /// Up to this offset there are bytes, without a hole.
    pub fn len(&mut self) -> io::Result<u64> {
        self.look()?;
        let mut end = self.start();
        for (index, start) in self.starts.iter().enumerate() {
            end = start + open_plain(&self.path(*start))?.metadata()?.len();
            match self.starts.get(index + 1) {
                Some(next) if end < *next => break,
                Some(next) => end = *next,
                None => {}
            }
        }
        Ok(end)
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
            let count = match self.segment_of(at) {
                Some(index) => self.read_in(index, at, &mut buffer[done..])?,
                None => 0,
            };
            done += count;
            if count == 0 {
                if looked {
                    break;
                }
                self.look()?;
                if at < self.start() {
                    return Err(io::Error::new(io::ErrorKind::NotFound, "these bytes have been trimmed"));
                }
                looked = true;
            }
        }
        Ok(done)
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
