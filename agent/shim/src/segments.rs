//! The log of a job on disk: one stream of bytes in files of bounded size, so that bytes that the controller has
//! can be removed while the job runs.
//!
//! ```text
//! log/job/00000000000000000000.seg   bytes 0 to 16777216 of the stream
//! log/job/00000000000016777216.seg   the rest so far: only the last file grows
//! log/job/reserve                    room for the last gap line of a full disk
//! ```
//!
//! Owns the names and their meaning. One shim writes ([`Writer`]) and one daemon reads and trims
//! ([`Reader`]); they share nothing but the directory. Invariants: a file is named by the offset of its
//! first byte, and each begins where the one before it ends, unless somebody harms it; bytes at an offset never change; the last file is
//! never trimmed, so the end of the stream is always known; bytes that could not be written are counted, and
//! reported in the stream itself at the place where they are missing.

mod reader;
mod writer;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, io};

pub use reader::Reader;
pub use writer::Writer;

/// The smallest size of a segment, in bytes.
const SMALLEST: u64 = 4096;

/// The file of the segment that begins at `start`.
fn path_of(dir: &Path, start: u64) -> PathBuf {
    dir.join(format!("{start:020}.seg"))
}

/// Where the segments in `dir` begin, in order.
fn starts(dir: &Path) -> io::Result<Vec<u64>> {
    let mut starts = Vec::new();
    for entry in fs::read_dir(dir)? {
        starts.extend(start_of(&entry?.file_name()));
    }
    starts.sort_unstable();
    Ok(starts)
}

fn start_of(name: &OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_suffix(".seg")?;
    if digits.len() == 20 { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests;
