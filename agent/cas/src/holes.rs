//! Files with holes: stretches that read as zeros and take no room on the disk.
//!
//! A digest covers what a file reads as, so a hole and written zeros are the same content. [`Reader`] returns the
//! zeros of holes without reading them, which would fill the page cache with them; [`Writer`] leaves holes in place
//! of long stretches of zeros. So a sparse file stays sparse, in the store and where it is laid out.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::io::Errno;

/// Zeros from this length on become a hole: more than a block of any file system, and little to write.
const STRETCH: usize = 64 * 1024;

/// The unit of blocks in `stat`, in bytes.
const BLOCK: u64 = 512;

/// Reads a file from its current position.
#[derive(Debug)]
pub(crate) struct Reader {
    file: File,
    holes: Holes,
}

#[derive(Debug)]
enum Holes {
    /// Nobody looked yet.
    Unknown,
    /// There are none.
    None,
    /// The position of the reader, and the next range of data.
    Some(u64, Range<u64>),
}

impl Reader {
    pub(crate) fn new(file: File) -> Reader {
        Reader { file, holes: Holes::Unknown }
    }

    /// The file itself.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Holes::Unknown = self.holes {
            let about = self.file.metadata()?;
            let is_sparse = about.is_file() && about.blocks().saturating_mul(BLOCK) < about.len();
            self.holes =
                if is_sparse { Holes::Some(self.file.stream_position()?, 0..0) } else { Holes::None };
        }
        let Holes::Some(at, data) = &mut self.holes else { return self.file.read(buffer) };
        if *at >= data.end {
            match next_data(&self.file, *at)? {
                Some(next) => *data = next,
                None => return Ok(0),
            }
        }
        let end = if *at < data.start { data.start } else { data.end };
        let most = usize::try_from(end - *at).unwrap_or(usize::MAX).min(buffer.len());
        let length = if *at < data.start {
            buffer[..most].fill(0);
            most
        } else {
            self.file.read_at(&mut buffer[..most], *at)?
        };
        *at += length as u64;
        Ok(length)
    }
}

/// The next range of data from `at` on; an empty one at the end of the file when only a hole is left; `None` at the
/// end.
fn next_data(file: &File, at: u64) -> io::Result<Option<Range<u64>>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(start) => Ok(Some(start..rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start))?)),
        Err(Errno::NXIO) => {
            let end = file.metadata()?.len();
            Ok((at < end).then_some(end..end))
        }
        // A file system that does not support holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(at..u64::MAX)),
        Err(error) => Err(error.into()),
    }
}

/// Writes a file from its current position to its end.
#[derive(Debug)]
pub(crate) struct Writer {
    file: File,
    /// The last stretch was left as a hole.
    ends_in_hole: bool,
}

impl Writer {
    pub(crate) fn new(file: File) -> Writer {
        Writer { file, ends_in_hole: false }
    }

    /// Adds the bytes that follow.
    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let whole = |is_hole: bool| {
                bytes.chunks_exact(STRETCH).take_while(|piece| is_zero(piece) == is_hole).count()
            };
            let holes = whole(true) * STRETCH;
            if holes > 0 {
                self.file.seek(SeekFrom::Current(i64::try_from(holes).unwrap_or(i64::MAX)))?;
                self.ends_in_hole = true;
                bytes = &bytes[holes..];
                continue;
            }
            let data = whole(false) * STRETCH;
            // The rest after the last whole piece is never a hole.
            let data = if bytes.len() - data < STRETCH { bytes.len() } else { data };
            self.file.write_all(&bytes[..data])?;
            self.ends_in_hole = false;
            bytes = &bytes[data..];
        }
        Ok(())
    }

    /// Extends the file over a hole at its end.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        match self.ends_in_hole {
            true => self.file.stream_position().and_then(|length| self.file.set_len(length)),
            false => Ok(()),
        }
    }
}

fn is_zero(piece: &[u8]) -> bool {
    // For nearly all data the first bytes decide.
    piece[..16].iter().all(|byte| *byte == 0) && piece.iter().fold(0, |sum, byte| sum | byte) == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(file: File) -> Vec<u8> {
        let mut bytes = Vec::new();
        Reader::new(file).read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn test_holes_are_read_as_zeros_from_anywhere() {
        let mut file = tempfile::tempfile().unwrap();
        let data = 300_000..301_000;
        file.set_len(1_000_000).unwrap();
        file.write_all_at(&[7; 1000], data.start).unwrap();
        let mut right = vec![0; 1_000_000];
        right[300_000..301_000].fill(7);
        for at in [0, 1, 299_999, 300_500, 700_000, 999_999, 1_000_000, 2_000_000] {
            file.seek(SeekFrom::Start(at)).unwrap();
            let from = usize::try_from(at).unwrap().min(right.len());
            assert!(all(file.try_clone().unwrap()) == right[from..], "from {at}");
        }
    }

    #[test]
    fn test_long_zeros_take_no_room() {
        let file = tempfile::tempfile().unwrap();
        let mut writer = Writer::new(file.try_clone().unwrap());
        let zeros = vec![0; 1 << 20];
        for piece in [&zeros[..], &zeros, b"data", &zeros, &zeros] {
            writer.append(piece).unwrap();
        }
        writer.finish().unwrap();
        let about = file.metadata().unwrap();
        assert_eq!(about.len(), (4 << 20) + 4);
        assert!(about.blocks() * BLOCK < 512 * 1024, "{} blocks", about.blocks());
    }

    proptest! {
        #[test]
        fn test_what_is_written_is_read(
            stretches in prop::collection::vec((any::<bool>(), 0..3 * STRETCH), 0..6),
            cut in 1..2 * STRETCH,
        ) {
            let bytes: Vec<u8> = stretches.iter().flat_map(|(hole, length)| vec![u8::from(!hole); *length]).collect();
            let mut file = tempfile::tempfile().unwrap();
            let mut writer = Writer::new(file.try_clone().unwrap());
            for piece in bytes.chunks(cut) {
                writer.append(piece).unwrap();
            }
            writer.finish().unwrap();
            file.rewind().unwrap();
            prop_assert!(all(file) == bytes);
        }
    }
}
