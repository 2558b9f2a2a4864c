//! Hides the values of secrets in the output of a job, before it is written anywhere.
//!
//! Owns which bytes are hidden: each value, and each line of a value of several, without the spaces around it, if it
//! has at least [`SHORTEST`] bytes. Every byte of it becomes `*`, so that nothing moves. What a job writes in another
//! form, as base64, is not found.

use std::collections::BTreeSet;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

/// Fewer bytes are no secret, and hiding them would make a log unreadable.
const SHORTEST: usize = 4;

/// The values that are hidden. See the module.
#[derive(Debug, Default)]
pub(crate) struct Mask {
    values: Vec<Value>,
    /// Finds them; where two begin at the same byte, the longer one.
    finder: Option<AhoCorasick>,
}

impl Mask {
    /// Hides these.
    pub(crate) fn of<'a>(secrets: impl IntoIterator<Item = &'a str>) -> Mask {
        let lines = |secret: &'a str| std::iter::once(secret).chain(secret.lines()).map(str::trim);
        let long = |value: &&str| value.len() >= SHORTEST;
        let values: BTreeSet<&str> = secrets.into_iter().flat_map(lines).filter(long).collect();
        // The kind whose size is that of the values: a table of all transitions is a hundred times that.
        let kind = Some(AhoCorasickKind::ContiguousNFA);
        let finder =
            AhoCorasick::builder().kind(kind).match_kind(MatchKind::LeftmostLongest).build(&values).ok();
        Mask { values: values.into_iter().map(Value::of).collect(), finder }
    }

    /// Hides what it finds in `text`; returns how many bytes of it are settled. With the rest a value may begin whose
    /// end is not there yet: there is none if this is the `last` of the text.
    pub(crate) fn hide(&self, text: &mut [u8], last: bool) -> usize {
        let Some(finder) = self.finder.as_ref().filter(|_| !self.values.is_empty()) else {
            return text.len();
        };
        let mut settled = if last { text.len() } else { self.open_from(text) };
        let found: Vec<_> = finder.find_iter(&*text).take_while(|value| value.start() < settled).collect();
        for value in found {
            text[value.range()].fill(b'*');
            settled = settled.max(value.end());
        }
        settled
    }

    /// From where on `text` may be the beginning of a value.
    fn open_from(&self, text: &[u8]) -> usize {
        text.len() - self.values.iter().map(|value| value.begins_at_end_of(text)).max().unwrap_or(0)
    }
}

/// A value, and for each of its beginnings how long its longest end is that is a beginning, too, and shorter (Knuth,
/// Morris and Pratt): by that the beginning with which a text ends is found in one pass, whatever the value is.
#[derive(Debug)]
struct Value {
    bytes: Vec<u8>,
    borders: Vec<u32>,
}

impl Value {
    fn of(value: &str) -> Value {
        let bytes = value.as_bytes().to_vec();
        let (mut borders, mut length) = (vec![0_u32; bytes.len()], 0);
        for at in 1..bytes.len() {
            length = further(&bytes, &borders, length, bytes[at]);
            borders[at] = u32::try_from(length).unwrap_or(0);
        }
        Value { bytes, borders }
    }

    /// The length of the longest beginning of the value, but not all of it, with which this text ends.
    fn begins_at_end_of(&self, text: &[u8]) -> usize {
        let most = self.bytes.len() - 1;
        let end = &text[text.len().saturating_sub(most)..];
        end.iter().fold(0, |length, byte| further(&self.bytes, &self.borders, length, *byte))
    }
}

/// How much of the value is met with one more byte, if so much was met before it.
fn further(value: &[u8], borders: &[u32], mut met: usize, byte: u8) -> usize {
    while met > 0 && value[met] != byte {
        met = borders[met - 1] as usize;
    }
    if value[met] == byte { met + 1 } else { 0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The text as it is written when it arrives in these pieces.
    fn hidden(mask: &Mask, pieces: &[&[u8]]) -> String {
        let (mut written, mut rest) = (Vec::new(), Vec::new());
        for piece in pieces {
            rest.extend_from_slice(piece);
            let settled = mask.hide(&mut rest, false);
            written.extend(rest.drain(..settled));
        }
        mask.hide(&mut rest, true);
        written.extend(rest);
        String::from_utf8(written).unwrap()
    }

    #[test]
    fn test_values_and_their_lines_are_hidden_and_nothing_else() {
        let mask = Mask::of(["hunter22\n", "abc", "-----BEGIN-----\nMIIB\n  \"k\": 1,\n", "hunter22-longer"]);
        for (text, expected) in [
            ("key hunter22, hunter2", "key ********, hunter2"),
            ("hunter22-longer", "***************"),
            ("hunter22-longe", "********-longe"),
            ("abc abc", "abc abc"),
            ("-----BEGIN-----\nMIIB\n", "***************\n****\n"),
            ("{  \"k\": 1,", "{  *******"),
            ("hunter22hunter22", "****************"),
            ("", ""),
        ] {
            assert_eq!(hidden(&mask, &[text.as_bytes()]), expected, "{text}");
        }
        assert_eq!(hidden(&Mask::default(), &[b"hunter22"]), "hunter22");
    }

    #[test]
    fn test_values_that_repeat_themselves_and_many_large_ones_cost_no_more_than_others() {
        let repeated = "k".repeat(8192);
        let near = [&repeated.as_bytes()[1..], b"x"].concat().repeat(200);
        let mask = Mask::of([repeated.as_str(), "hunter22secret"]);
        let mut rest = Vec::new();
        for piece in near.chunks(100) {
            rest.extend_from_slice(piece);
            let settled = mask.hide(&mut rest, false);
            rest.drain(..settled);
        }
        let large: Vec<String> = (0..60).map(|n| format!("{n:04}-ä").repeat(1000)).collect();
        let mask = Mask::of(large.iter().map(String::as_str));
        let size = mask.finder.as_ref().map(AhoCorasick::memory_usage).unwrap_or_default();
        assert!(size > 0 && size < 40 << 20, "{size} bytes for 480 kB of values");
    }

    proptest! {
        #[test]
        fn test_pieces_are_hidden_as_the_whole_is(
            text in "[ab ]{0,60}", values in prop::collection::vec("[ab]{4,7}", 0..4), cuts in prop::collection::vec(0..61_usize, 0..6),
        ) {
            let mask = Mask::of(values.iter().map(String::as_str));
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut < text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|ends| &text.as_bytes()[ends[0]..ends[1]]).collect();
            let whole = hidden(&mask, &[text.as_bytes()]);
            prop_assert_eq!(hidden(&mask, &pieces), whole.clone());
            prop_assert!(values.iter().all(|value| !whole.contains(value.as_str())), "{}", whole);
        }
    }
}
