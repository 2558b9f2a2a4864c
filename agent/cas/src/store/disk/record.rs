//! What a segment is made of, byte by byte.
//!
//! A segment begins with a preface of 16 bytes: eight that identify the format, and eight random ones, which its
//! note repeats. Then follow records, each a header of 56 bytes and the bytes of one blob:
//!
//! | Bytes | What |
//! |---|---|
//! | 0–4 | `blob` |
//! | 4–8 | number of the segment |
//! | 8–12 | where in it the record begins |
//! | 12–16 | size of the blob |
//! | 16–48 | SHA-256 of the blob |
//! | 48–56 | the first bytes of the SHA-256 of all that |
//!
//! Numbers are little-endian. A header contains its own offset, so a copy of it elsewhere is invalid. The reader
//! trusts nothing: a blob counts when its bytes have its hash. Invalid bytes are skipped up to the next valid record,
//! because acknowledged blobs may follow.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use agent_model::Digest;

use super::SMALL;
use crate::digest_of;

/// Bytes before the first record.
pub(in super::super) const PREFACE: usize = 16;

/// Bytes before the content in a record.
pub(in super::super) const HEADER: usize = 56;

const KIND: [u8; 8] = *b"agentd1\n";
const MARK: [u8; 4] = *b"blob";

/// Bytes read at once.
const WINDOW: usize = 1024 * 1024;

/// The bytes of a record with a blob of this size.
pub(in super::super) fn length(size: u64) -> u64 {
    HEADER as u64 + size
}

/// The first bytes of a segment with this random number.
pub(super) fn preface(chance: u64) -> [u8; PREFACE] {
    let mut bytes = [0; PREFACE];
    bytes[..8].copy_from_slice(&KIND);
    bytes[8..].copy_from_slice(&chance.to_le_bytes());
    bytes
}

/// The random number of a segment that begins with these bytes.
pub(super) fn chance(preface: &[u8; PREFACE]) -> Option<u64> {
    let chance = preface[8..].try_into().map(u64::from_le_bytes).ok();
    chance.filter(|_| preface[..8] == KIND)
}

/// The header of a record.
pub(super) fn header(segment: u32, offset: u32, digest: &Digest) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    let size = u32::try_from(digest.size).unwrap_or(u32::MAX);
    bytes[..4].copy_from_slice(&MARK);
    for (at, number) in [(4, segment), (8, offset), (12, size)] {
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    bytes[16..48].copy_from_slice(&digest.hash);
    let check = digest_of(&bytes[..48]).hash;
    bytes[48..].copy_from_slice(&check[..8]);
    bytes
}

/// The blob of a record that begins with these bytes in this place.
pub(in super::super) fn parse(bytes: &[u8], segment: u32, offset: u32) -> Option<Digest> {
    if bytes.get(..MARK.len())? != MARK {
        return None;
    }
    let size = u32::from_le_bytes(bytes.get(12..16)?.try_into().ok()?);
    let digest = Digest { hash: bytes.get(16..48)?.try_into().ok()?, size: size.into() };
    (digest.size <= SMALL && bytes.get(..HEADER)? == header(segment, offset, &digest)).then_some(digest)
}

/// The result of a scan.
#[derive(Debug, Default)]
pub(super) struct ScannedRecord {
    /// Blobs whose bytes are right, and where their records begin.
    pub(super) records: Vec<(Digest, u32)>,
    /// The end of the last of them.
    pub(super) end: u64,
    /// Bytes before that which are part of no such record.
    pub(super) passed: u64,
}

/// Reads a segment from the byte `from` on and hashes every blob.
pub(super) fn scan(file: &File, segment: u32, from: u64) -> io::Result<ScannedRecord> {
    let mut window = Window { file, length: file.metadata()?.len(), bytes: Vec::new(), at: 0 };
    let mut found = ScannedRecord { end: from, ..ScannedRecord::default() };
    let mut at = from;
    while at < window.length {
        let Ok(offset) = u32::try_from(at) else { break };
        let Some(digest) = window.get(at, HEADER)?.and_then(|bytes| parse(bytes, segment, offset)) else {
            match window.next_mark(at + 1)? {
                Some(next) => at = next,
                None => break,
            }
            continue;
        };
        let size = usize::try_from(digest.size).unwrap_or(usize::MAX);
        let next = at + length(digest.size);
        if window.get(at + HEADER as u64, size)?.is_some_and(|bytes| digest_of(bytes) == digest) {
            found.passed += at - found.end;
            found.records.push((digest, offset));
            found.end = next;
            at = next;
        } else {
            at = window.next_mark(at + 1)?.unwrap_or(window.length);
        }
    }
    Ok(found)
}

/// A part of a file in memory.
struct Window<'a> {
    file: &'a File,
    length: u64,
    bytes: Vec<u8>,
    at: u64,
}

impl Window<'_> {
    /// These bytes of the file, unless it ends before them.
    fn get(&mut self, at: u64, length: usize) -> io::Result<Option<&[u8]>> {
        let end = at.saturating_add(length as u64);
        if end > self.length {
            return Ok(None);
        }
        if at < self.at || end > self.at + self.bytes.len() as u64 {
            let rest = usize::try_from(self.length - at).unwrap_or(usize::MAX);
            self.bytes.resize(rest.min(WINDOW.max(length)), 0);
            self.at = at;
            if let Err(error) = self.file.read_exact_at(&mut self.bytes, at) {
                self.bytes.clear();
                return Err(error);
            }
        }
        let start = usize::try_from(at - self.at).unwrap_or(0);
        Ok(self.bytes.get(start..start + length))
    }

    /// Where the next header may begin.
    fn next_mark(&mut self, from: u64) -> io::Result<Option<u64>> {
        let mut at = from;
        while at + (HEADER as u64) <= self.length {
            let rest = usize::try_from(self.length - at).unwrap_or(usize::MAX).min(64 * 1024);
            let Some(bytes) = self.get(at, rest)? else { break };
            match bytes.windows(MARK.len()).position(|bytes| bytes == MARK) {
                Some(position) => return Ok(Some(at + position as u64)),
                None => at += (rest - (MARK.len() - 1)) as u64,
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::conformance::content;

    /// A segment of blobs of these sizes: its bytes, and the blobs with their places.
    fn segment(number: u32, sizes: &[usize]) -> (Vec<u8>, Vec<(Digest, u32)>) {
        let (mut bytes, mut records) = (preface(1).to_vec(), Vec::new());
        for (seed, size) in sizes.iter().enumerate() {
            let blob = content(seed as u64, *size);
            let (digest, offset) = (digest_of(&blob), bytes.len() as u32);
            bytes.extend(header(number, offset, &digest));
            bytes.extend(blob);
            records.push((digest, offset));
        }
        (bytes, records)
    }

    fn found(bytes: &[u8], number: u32) -> ScannedRecord {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        scan(&file, number, PREFACE as u64).unwrap()
    }

    #[test]
    fn test_whole_segment_is_found_and_cut_anywhere_what_is_before() {
        let (bytes, records) = segment(3, &[100, 0, 1, 300]);
        assert_eq!(found(&bytes, 3).records, records);
        assert!(found(&bytes, 4).records.is_empty(), "a header says which segment it is in");
        for cut in PREFACE..bytes.len() {
            let whole =
                |(digest, offset): &&(Digest, u32)| u64::from(*offset) + length(digest.size) <= cut as u64;
            let expected: Vec<_> = records.iter().filter(whole).copied().collect();
            let found = found(&bytes[..cut], 3);
            assert_eq!(found.records, expected, "cut at {cut}");
            let end =
                expected.last().map_or(PREFACE as u64, |(d, offset)| u64::from(*offset) + length(d.size));
            assert_eq!((found.end, found.passed), (end, 0));
        }
    }

    #[test]
    fn test_flipped_bit_costs_one_record_and_none_that_follows() {
        let (bytes, records) = segment(3, &[70, 200, 40]);
        for at in PREFACE..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            let mut expected = records.clone();
            expected.remove(records.iter().rposition(|(_, offset)| *offset as usize <= at).unwrap());
            assert_eq!(found(&bytes, 3).records, expected, "bit at {at}");
        }
    }

    #[test]
    fn test_bytes_of_a_blob_that_look_like_a_record_are_none() {
        let (mut bytes, mut records) = segment(3, &[70]);
        let (inner, _) = segment(3, &[10, 20]);
        let (digest, offset) = (digest_of(&inner), bytes.len() as u32);
        let mut broken = header(3, offset, &digest);
        broken[20] ^= 1;
        bytes.extend(broken);
        bytes.extend(inner);
        let blob = content(9, 2_000_000 / 20);
        records.push((digest_of(&blob), bytes.len() as u32));
        bytes.extend(header(3, bytes.len() as u32, &digest_of(&blob)));
        bytes.extend(blob);
        let found = found(&bytes, 3);
        assert_eq!(found.records, records);
        assert!(found.passed > 0);
    }
}
