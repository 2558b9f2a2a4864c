//! What part of an upload is new, and what to send next.

use std::ops::Range;

/// How an upload fits what is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Splice {
    /// This part of the upload is new; the part before it is stored already.
    Append(Range<usize>),
    /// All of it is stored already.
    Known,
    /// Something before it is missing, so none of it is taken. The answer is the length there is.
    Gap,
}

/// What to take of `length` bytes that belong at `offset` when `stored` bytes are there.
pub fn splice(stored: u64, offset: u64, length: usize) -> Splice {
    let Some(known) = stored.checked_sub(offset) else { return Splice::Gap };
    match usize::try_from(known) {
        Ok(known) if known < length => Splice::Append(known..length),
        _ => Splice::Known,
    }
}

/// What to send of `written` bytes when the other side reported that it has `stored`; at most `most`. No record of
/// earlier sends is kept.
pub fn unsent(stored: u64, written: u64, most: u64) -> Option<Range<u64>> {
    (stored < written).then(|| stored..written.min(stored.saturating_add(most)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn test_overlap_is_trimmed_and_a_gap_is_refused() {
        assert_eq!(splice(10, 10, 5), Splice::Append(0..5));
        assert_eq!(splice(10, 7, 5), Splice::Append(3..5));
        assert_eq!(splice(10, 5, 5), Splice::Known);
        assert_eq!(splice(10, 10, 0), Splice::Known);
        assert_eq!(splice(10, 0, 2), Splice::Known);
        assert_eq!(splice(10, 11, 5), Splice::Gap);
        assert_eq!(splice(u64::MAX, 0, 5), Splice::Known);
    }

    proptest! {
        #[test]
        fn test_whatever_arrives_how_often_the_stored_is_a_prefix(
            source in prop::collection::vec(any::<u8>(), 0..200),
            sends in prop::collection::vec((0usize..250, 0usize..60), 0..60),
        ) {
            let mut stored: Vec<u8> = Vec::new();
            for (offset, length) in sends {
                let offset = offset.min(source.len());
                let piece = &source[offset..(offset + length).min(source.len())];
                if let Splice::Append(range) = splice(stored.len() as u64, offset as u64, piece.len()) {
                    stored.extend_from_slice(&piece[range]);
                }
                prop_assert!(source.starts_with(&stored));
            }
            while let Some(next) = unsent(stored.len() as u64, source.len() as u64, 7) {
                prop_assert!(next.end - next.start <= 7);
                stored.extend_from_slice(&source[next.start as usize..next.end as usize]);
            }
            prop_assert_eq!(stored, source);
        }
    }
}
