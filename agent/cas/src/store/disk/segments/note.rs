//! A note beside a segment: which records are in its first bytes, so that opening the store reads none of them.
//!
//! It repeats the random number of its segment, so that a note left behind by an earlier segment of the same
//! name is ignored, and ends with the SHA-256 of all before. It is never flushed: one that is torn, old or missing
//! only costs reading the segment.

use agent_model::Digest;

use super::super::home::{sealed, unsealed};

const KIND: [u8; 8] = *b"agentdn1";
const HEAD: usize = 28;
const ENTRY: usize = 40;

/// The content of a note.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Note {
    /// The random number of its segment.
    pub(super) chance: u64,
    /// The bytes of the segment that it covers.
    pub(super) covered: u64,
    /// Blobs, and where their records begin.
    pub(super) records: Vec<(Digest, u32)>,
}

impl Note {
    /// The bytes of the file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let count = u32::try_from(self.records.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEAD + self.records.len() * ENTRY);
        bytes.extend(KIND);
        bytes.extend(self.chance.to_le_bytes());
        bytes.extend(self.covered.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        for (digest, offset) in &self.records {
            bytes.extend(digest.hash);
            bytes.extend(u32::try_from(digest.size).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        sealed(bytes)
    }

    /// `None` if it is not a whole note.
    pub(super) fn decode(bytes: &[u8]) -> Option<Note> {
        let (head, entries) = unsealed(bytes)?.split_at_checked(HEAD)?;
        let number = |from: usize| head[from..from + 8].try_into().map(u64::from_le_bytes).ok();
        let count = u32::from_le_bytes(head[24..].try_into().ok()?);
        let sound = head[..8] == KIND && entries.len() as u64 == u64::from(count) * ENTRY as u64;
        let entry = |entry: &[u8]| {
            let number = |from: usize| entry[from..from + 4].try_into().map(u32::from_le_bytes).ok();
            let digest = Digest { hash: entry[..32].try_into().ok()?, size: number(32)?.into() };
            Some((digest, number(36)?))
        };
        let records = sound.then(|| entries.chunks_exact(ENTRY).map(entry).collect::<Option<_>>())??;
        Some(Note { chance: number(8)?, covered: number(16)?, records })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest_of;

    #[test]
    fn test_note_comes_back_whole_or_not_at_all() {
        let records: Vec<(Digest, u32)> = (0..3u32).map(|n| (digest_of(&n.to_le_bytes()), n * 60)).collect();
        for records in [records, Vec::new()] {
            let note = Note { chance: 7, covered: 4711, records };
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes).as_ref(), Some(&note));
            for at in 0..bytes.len() {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1;
                assert_eq!((Note::decode(&flipped), Note::decode(&bytes[..at])), (None, None), "byte {at}");
            }
        }
    }
}
