//! Filters a job's bytes for a terminal: text is shown, control sequences have no effect.
//!
//! Text, line feeds, tabs, carriage returns (progress bars need them) and colours pass. Every other control
//! character, and every byte that is not text, is shown in a visible form: a job's output must not be able to change
//! the window's title, send input as if typed, or hide a line.

use super::text::steers;

/// The longest colour sequence that is accepted, in bytes.
const LONGEST: usize = 48;

/// Filters a stream of bytes, whose pieces may be cut anywhere.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    /// The beginning of a character or of a colour sequence whose rest has not arrived yet.
    held: Vec<u8>,
    /// A colour was set and not reset.
    coloured: bool,
}

/// What some bytes begin with.
enum TerminalPiece<'a> {
    /// This many bytes pass as they are.
    Pass(usize),
    /// A colour sequence; `true` if it resets colours.
    Colour(&'a [u8], bool),
    /// This many bytes are shown in this form.
    Shown(usize, String),
    /// More bytes are needed to decide.
    Unfinished,
}

impl Filter {
    /// What to write for the next bytes.
    pub(crate) fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut all = std::mem::take(&mut self.held);
        all.extend_from_slice(bytes);
        let mut shown = Vec::with_capacity(all.len());
        let mut rest = all.as_slice();
        while !rest.is_empty() {
            match piece(rest) {
                TerminalPiece::Pass(count) => {
                    shown.extend_from_slice(&rest[..count]);
                    rest = &rest[count..];
                }
                TerminalPiece::Colour(sequence, back) => {
                    shown.extend_from_slice(sequence);
                    self.coloured = !back;
                    rest = &rest[sequence.len()..];
                }
                TerminalPiece::Shown(count, form) => {
                    shown.extend_from_slice(form.as_bytes());
                    rest = &rest[count..];
                }
                TerminalPiece::Unfinished => {
                    self.held = rest.to_vec();
                    break;
                }
            }
        }
        shown
    }

    /// What to write at the end.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        let held = std::mem::take(&mut self.held);
        let mut shown: Vec<u8> = held.iter().flat_map(|byte| byte_form(*byte).into_bytes()).collect();
        if std::mem::take(&mut self.coloured) {
            shown.extend_from_slice(b"\x1b[0m");
        }
        shown
    }
}

fn piece(rest: &[u8]) -> TerminalPiece<'_> {
    let plain = |byte: &u8| matches!(byte, b' '..=b'~' | b'\n' | b'\t' | b'\r');
    match rest.iter().position(|byte| !plain(byte)) {
        None => TerminalPiece::Pass(rest.len()),
        Some(0) if rest[0] == 0x1b => escape(rest),
        Some(0) if rest[0] < 0x80 => TerminalPiece::Shown(1, byte_form(rest[0])),
        Some(0) => character(rest),
        Some(count) => TerminalPiece::Pass(count),
    }
}

/// `ESC [ numbers m` is a colour; of any other sequence the ESC is made visible, so that it has no effect.
fn escape(rest: &[u8]) -> TerminalPiece<'_> {
    let told = |byte: &u8| !matches!(byte, b'0'..=b'9' | b';' | b':');
    match (rest.get(1), rest.iter().skip(2).position(told)) {
        (None, _) => TerminalPiece::Unfinished,
        (Some(b'['), Some(numbers))
            if rest[numbers + 2] == b'm' && numbers < LONGEST && !hides(&rest[2..numbers + 2]) =>
        {
            let back = rest[2..numbers + 2].iter().all(|byte| matches!(byte, b'0' | b';'));
            TerminalPiece::Colour(&rest[..numbers + 3], back)
        }
        (Some(b'['), None) if rest.len() < LONGEST => TerminalPiece::Unfinished,
        _ => TerminalPiece::Shown(1, byte_form(0x1b)),
    }
}

/// Whether a colour sequence hides text: it has the number 8, and not as a colour's index (`38;5;8`).
fn hides(numbers: &[u8]) -> bool {
    let numbers: Vec<&[u8]> = numbers.split(|byte| matches!(byte, b';' | b':')).collect();
    numbers.iter().enumerate().any(|(at, number)| {
        let named = at >= 1 && matches!(numbers[at - 1], b"5")
            || numbers[..at].iter().rev().take(5).any(|before| *before == b"2");
        number.iter().skip_while(|digit| **digit == b'0').eq(b"8") && !named
    })
}

fn character(rest: &[u8]) -> TerminalPiece<'_> {
    let first = &rest[..rest.len().min(4)];
    let (valid, broken) = match std::str::from_utf8(first) {
        Ok(text) => (text, None),
        Err(error) => (std::str::from_utf8(&first[..error.valid_up_to()]).unwrap_or(""), Some(error)),
    };
    match (valid.chars().next(), broken) {
        // C1 controls are characters of two bytes.
        (Some(c), _) if steers(c) => TerminalPiece::Shown(c.len_utf8(), c.escape_unicode().to_string()),
        (Some(c), _) => TerminalPiece::Pass(c.len_utf8()),
        (None, Some(error)) if error.error_len().is_none() && rest.len() < 4 => TerminalPiece::Unfinished,
        (None, _) => TerminalPiece::Shown(1, byte_form(rest[0])),
    }
}

/// A control byte as `^X`, any other as `\xNN`.
fn byte_form(byte: u8) -> String {
    match byte {
        0..0x20 => format!("^{}", char::from(byte + 0x40)),
        0x7f => "^?".to_owned(),
        _ => format!("\\x{byte:02x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(bytes: &[u8]) -> String {
        let mut filter = Filter::default();
        let mut shown = filter.pass(bytes);
        shown.extend(filter.finish());
        String::from_utf8(shown).unwrap()
    }

    #[test]
    fn test_text_and_colours_pass() {
        for text in ["a\tb\r\nc", "ü — 漢 🙂", "\x1b[1;31mred\x1b[0m", "\x1b[38:5:9mx\x1b[m"] {
            assert_eq!(shown(text.as_bytes()), text);
        }
    }

    #[test]
    fn test_commands_to_the_terminal_are_shown_instead() {
        for (bytes, text) in [
            (&b"\x1b]0;title\x07"[..], "^[]0;title^G"),
            (b"\x1b[2J", "^[[2J"),
            (b"\x1b[6n", "^[[6n"),
            (b"\x1bPq", "^[Pq"),
            (b"a\x08b\x7f\0", "a^Hb^?^@"),
            ("\u{9b}31m".as_bytes(), "\\u{9b}31m"),
            (b"\xff\xc3(", "\\xff\\xc3("),
            (b"\x1b", "^["),
            (b"\xe6\xbc", "\\xe6\\xbc"),
        ] {
            assert_eq!(shown(bytes), text);
        }
        let endless = [&b"\x1b["[..], &[b'1'; 500][..]].concat();
        assert_eq!(shown(&endless), format!("^[[{}", "1".repeat(500)));
    }

    #[test]
    fn test_it_does_not_matter_where_the_stream_is_cut() {
        let bytes = "ü\x1b[31m漢\x1b]0;x\x07\u{9b}🙂\x1b[0m".as_bytes();
        let whole = shown(bytes);
        for cut in 0..=bytes.len() {
            let mut filter = Filter::default();
            let mut parts = filter.pass(&bytes[..cut]);
            parts.extend(filter.pass(&bytes[cut..]));
            parts.extend(filter.finish());
            assert_eq!(String::from_utf8(parts).unwrap(), whole, "cut at {cut}");
        }
    }

    #[test]
    fn test_colours_left_on_are_taken_off() {
        assert_eq!(shown(b"\x1b[31mred"), "\x1b[31mred\x1b[0m");
    }

    #[test]
    fn test_text_that_nobody_would_see_is_shown() {
        assert_eq!(shown(b"\x1b[8mhidden\x1b[0m"), "^[[8mhidden\x1b[0m");
        assert_eq!(shown(b"\x1b[1;08mhidden"), "^[[1;08mhidden");
        for colour in ["\x1b[38;5;8mgrey\x1b[0m", "\x1b[38;2;8;8;8mdark\x1b[0m"] {
            assert_eq!(shown(colour.as_bytes()), colour);
        }
        assert_eq!(shown("a\u{202e}b\u{200f}".as_bytes()), "a\\u{202e}b\\u{200f}");
    }

    #[test]
    fn test_no_bytes_at_all_can_steer_the_terminal() {
        let mut state = 7u64;
        let mut chance = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        let likely = b"\x1b[]0;mPX^_\x07\\\x9b\x9d\xc2\xe2\x80\xae\r\n5218";
        for _ in 0..300 {
            let bytes: Vec<u8> = (0..400)
                .map(|_| match chance() % 3 {
                    0 => chance() as u8,
                    _ => likely[chance() as usize % likely.len()],
                })
                .collect();
            let (mut filter, mut out) = (Filter::default(), Vec::new());
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (part, after) = rest.split_at((1 + chance() as usize % 50).min(rest.len()));
                out.extend(filter.pass(part));
                assert!(filter.held.len() <= LONGEST + 4);
                rest = after;
            }
            out.extend(filter.finish());
            let text = String::from_utf8(out).expect("what is shown is text");
            let mut text = text.as_str();
            while let Some(at) = text.find(|c: char| steers(c) && !matches!(c, '\n' | '\t' | '\r')) {
                let colour = text[at..].strip_prefix("\x1b[").and_then(|rest| rest.split_once('m'));
                let (numbers, rest) = colour.unwrap_or_else(|| panic!("{:?}", &text[at..]));
                assert!(numbers.chars().all(|c| c.is_ascii_digit() || matches!(c, ';' | ':')));
                text = rest;
            }
        }
    }
}
