//! The last pieces of a log, in memory, for whoever follows it.
//!
//! Invariants: they lie one behind the other, without a gap; there are few of them, because a small piece may keep the
//! whole buffer that it came in.

use std::collections::VecDeque;

use bytes::Bytes;

/// The most pieces, and the most bytes of all but the last.
const PIECES: usize = 16;
const BYTES: u64 = 4 << 20;

/// A piece of this length is worth a message of its own although more follows it.
const LARGE: usize = 64 << 10;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fresh(VecDeque<(u64, Bytes)>);

impl Fresh {
    /// Something was written at `offset`: `piece`, or nothing that is worth keeping.
    pub(super) fn add(&mut self, offset: u64, piece: Option<Bytes>) {
        if self.end() != Some(offset) || piece.is_none() {
            self.0.clear();
        }
        let Some(piece) = piece else { return };
        while self.0.len() == PIECES || self.0.front().is_some_and(|(start, _)| offset - start > BYTES) {
            self.0.pop_front();
        }
        self.0.push_back((offset, piece));
    }

    /// What begins at `offset`, if it ends at `length`, which is all there is, or is large. Otherwise one read from the
    /// file takes more of it.
    pub(super) fn get(&self, offset: u64, length: u64) -> Option<Bytes> {
        let after = self.0.partition_point(|(start, _)| *start <= offset);
        let (start, piece) = self.0.get(after.checked_sub(1)?)?;
        let skipped = usize::try_from(offset - start).ok().filter(|skipped| *skipped < piece.len())?;
        let end = start + piece.len() as u64;
        let part = piece.slice(skipped..);
        (end == length || (part.len() >= LARGE && end < length)).then_some(part)
    }

    fn end(&self) -> Option<u64> {
        self.0.back().map(|(start, piece)| start + piece.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(byte: u8, length: usize) -> Option<Bytes> {
        Some(vec![byte; length].into())
    }

    #[test]
    fn test_the_last_piece_is_had_from_any_place_in_it() {
        let mut fresh = Fresh::default();
        fresh.add(10, piece(b'a', 5));
        fresh.add(15, piece(b'b', 3));
        assert_eq!(fresh.get(15, 18).unwrap(), "bbb");
        assert_eq!(fresh.get(17, 18).unwrap(), "b");
        assert_eq!(fresh.get(18, 18), None, "there is no more");
        assert_eq!(fresh.get(10, 18), None, "the file has more at once");
        assert_eq!(fresh.get(9, 18), None, "it was never here");
    }

    #[test]
    fn test_a_large_piece_is_had_before_others_and_only_when_told() {
        let mut fresh = Fresh::default();
        fresh.add(0, piece(b'a', LARGE));
        fresh.add(LARGE as u64, piece(b'b', LARGE));
        assert_eq!(fresh.get(0, 2 * LARGE as u64).unwrap().len(), LARGE);
        assert_eq!(fresh.get(LARGE as u64, LARGE as u64), None, "it was written and not told");
        assert_eq!(fresh.get(1, 2 * LARGE as u64), None, "less than a large one is left");
    }

    #[test]
    fn test_few_are_kept_and_none_after_a_gap() {
        let mut fresh = Fresh::default();
        for place in 0..2 * PIECES as u64 {
            fresh.add(place, piece(b'a', 1));
        }
        assert_eq!(fresh.0.len(), PIECES);
        fresh.add(2 * PIECES as u64, None);
        assert_eq!(fresh.0.len(), 0, "nobody follows");
        for place in 0..2 * PIECES as u64 {
            fresh.add(place * BYTES / 2, piece(b'a', BYTES as usize / 2));
        }
        assert_eq!(fresh.0.len(), 3, "large ones");
        fresh.add(100, piece(b'a', 1));
        fresh.add(50, piece(b'b', 1));
        assert_eq!((fresh.0.len(), fresh.get(50, 51).unwrap()), (1, Bytes::from_static(b"b")));
    }
}
