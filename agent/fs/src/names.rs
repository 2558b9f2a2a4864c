//! Names of files as text, and back: each name that the system takes has exactly one text, and it is its own wherever
//! it is UTF-8.
//!
//! A byte that is not part of any UTF-8 character becomes `\xHH`; a backslash becomes `\x5c`, but only where it would
//! be read as the beginning of such a sequence. A text that no name has (of a program that is not ours) stands for the
//! name with exactly these bytes. `/` is left alone, so both work on paths as on names. Pure.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// How a sequence begins; two digits follow, in lower case.
const MARK: &[u8] = b"\\x";

/// The text of a name, or of a path.
pub fn text_of_name(name: &[u8]) -> Cow<'_, str> {
    match str::from_utf8(name) {
        Ok(text) if !has_sequence(text.as_bytes()) => return Cow::Borrowed(text),
        _ => {}
    }
    let mut text = String::with_capacity(name.len() + 16);
    for chunk in name.utf8_chunks() {
        let valid = chunk.valid();
        for (at, c) in valid.char_indices() {
            match sequence(&valid.as_bytes()[at..]) {
                Some(_) => text.push_str("\\x5c"),
                None => text.push(c),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    Cow::Owned(text)
}

/// The name, or the path, that has this text.
pub fn name_of_text(text: &str) -> Cow<'_, OsStr> {
    if !has_sequence(text.as_bytes()) {
        return Cow::Borrowed(OsStr::new(text));
    }
    let names: Vec<Vec<u8>> = text.split('/').map(name_of_segment).collect();
    Cow::Owned(OsStr::from_bytes(&names.join(&b'/')).to_owned())
}

fn name_of_segment(text: &str) -> Vec<u8> {
    let (mut name, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, after @ ..] = rest {
        match sequence(rest) {
            Some(byte) => {
                name.push(byte);
                rest = &rest[MARK.len() + 2..];
            }
            None => {
                name.push(*first);
                rest = after;
            }
        }
    }
    if text_of_name(&name) == text { name } else { text.as_bytes().to_vec() }
}

/// Whether there may be a sequence in it.
fn has_sequence(text: &[u8]) -> bool {
    text.windows(MARK.len() + 2).any(|window| sequence(window).is_some())
}

/// The byte of the sequence at the beginning of `text`.
fn sequence(text: &[u8]) -> Option<u8> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let [high, low, ..] = text.strip_prefix(MARK)? else { return None };
    let byte = digit(*high)? << 4 | digit(*low)?;
    (byte >= 0x80 || byte == b'\\').then_some(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_each_name_has_a_text_of_its_own_and_the_text_leads_back_to_it() {
        for (name, text) in [
            (&b"plain.txt"[..], "plain.txt"),
            ("résultats/数.csv".as_bytes(), "résultats/数.csv"),
            (b"r\xe9sultats.csv", "r\\xe9sultats.csv"),
            (b"\xff/a\xfe", "\\xff/a\\xfe"),
            // As systemd names its units: no sequence of ours.
            (b"dev-disk\\x2dby.device", "dev-disk\\x2dby.device"),
            (b"\\xE9", "\\xE9"),
            (b"\\xe9", "\\x5cxe9"),
            (b"\\x5c", "\\x5cx5c"),
            (b"\\x5cxe9", "\\x5cx5cxe9"),
            (b"\\xe\xe9", "\\xe\\xe9"),
            (b"\\\xe9", "\\\\xe9"),
            (b"\xc3", "\\xc3"),
            (b"back\\slash\\", "back\\slash\\"),
        ] {
            assert_eq!(text_of_name(name), text);
            assert_eq!(name_of_text(text).as_bytes(), name, "{text}");
        }
    }

    #[test]
    fn test_any_bytes_come_back() {
        let mut seed = 7u64;
        let letters = b"\\x5ce9\xe9\xc3\xa9/";
        for _ in 0..20_000 {
            let mut name = Vec::new();
            for _ in 0..8 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                name.push(letters[(seed >> 33) as usize % letters.len()]);
            }
            let text = text_of_name(&name).into_owned();
            assert_eq!(name_of_text(&text).as_bytes(), name, "{text}");
        }
    }

    #[test]
    fn test_a_text_that_no_name_has_stands_for_itself() {
        // These bytes are UTF-8, so their name is its own text.
        assert_eq!(name_of_text("\\xc3\\xa9").as_bytes(), b"\\xc3\\xa9");
        assert_eq!(name_of_text("\\xc3\\xa9/\\xff").as_bytes(), b"\\xc3\\xa9/\xff");
    }
}
