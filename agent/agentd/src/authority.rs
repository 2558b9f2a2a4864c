//! Connections of clients whose `:authority` is no host.
//!
//! Over a Unix socket many gRPC libraries send its path as the authority: percent-encoded (the C core, with Python,
//! C++ and Ruby on it) or as it is (Java). The HTTP/2 library here accepts only hosts and resets such a call before a
//! service sees it. Nothing on this socket depends on the authority, so each byte of it that is not valid in a host
//! is replaced by `-` while the connection is read.
//!
//! Hides the frames of HTTP/2 and the fields of HPACK; only their boundaries are parsed. Invariants: no length
//! changes, neither of a frame nor of a decoded text, so the dynamic tables of both ends stay the same; bytes that
//! are not understood are passed on unchanged, and refused as before. So is an authority in the Huffman code. See ADR
//! 0018.

use std::io;
use std::task::Context;

use crate::incoming::Reads;

/// The length of the connection preface, which a client sends before its first frame.
const PREFACE: usize = 24;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;
/// Bytes of the priority fields in a HEADERS frame.
const PRIORITY_LENGTH: usize = 5;
/// The name of the field, and its index in the static table. The C core sends the name as a literal.
const AUTHORITY: &[u8] = b":authority";
const AUTHORITY_INDEX: usize = 1;

/// Accepts any authority on a connection.
#[derive(Default)]
pub(crate) struct AnyAuthority(Filter);

impl Reads for AnyAuthority {
    fn saw(&mut self, bytes: &mut [u8]) {
        self.0.pass(bytes);
    }

    fn over(&mut self, _: &mut Context<'_>) -> Option<io::Error> {
        None
    }
}

/// The position of the next byte in the client's stream.
struct Filter {
    part: FramePart,
    field: Field,
    /// The value of the field is an authority.
    is_authority: bool,
}

enum FramePart {
    /// In bytes that are left as they are: how many remain.
    Skip(usize),
    /// In the header of a frame: its bytes, and how many have arrived.
    Head([u8; 9], usize),
    /// At the padding length of a HEADERS frame: the bytes after it, and how many precede the fields.
    Padding(usize, usize),
    /// Before the fields of a frame: bytes to skip, bytes of fields, bytes of padding.
    Before(usize, usize, usize),
    /// In the fields: how many bytes of them, and how many of padding, are still to come.
    Fields(usize, usize),
    /// This is not HTTP/2.
    Strange,
}

#[derive(Clone, Copy)]
enum Field {
    Start,
    /// Before the length of a text.
    Length(Follows),
    /// In a number: what it is for, its value so far, and the shift of the next bits.
    Number(Follows, usize, u32),
    /// In a text: what it is, and how many bytes remain.
    Text(Follows, usize),
}

#[derive(Clone, Copy)]
enum Follows {
    /// No text: the field consists of the number alone.
    Nothing,
    /// The number is the index of the name, or 0 if a name follows; then a value follows.
    Literal,
    Name,
    Value,
    /// The value, in the Huffman code.
    Coded,
}

impl Default for Filter {
    fn default() -> Filter {
        Filter { part: FramePart::Skip(PREFACE), field: Field::Start, is_authority: false }
    }
}

impl Filter {
    /// Replaces what must be replaced in the next bytes.
    fn pass(&mut self, mut bytes: &mut [u8]) {
        while let Some(first) = bytes.first_mut() {
            let mut taken = 1;
            self.part = match std::mem::replace(&mut self.part, FramePart::Strange) {
                FramePart::Strange => return,
                FramePart::Skip(0) => {
                    taken = 0;
                    FramePart::Head([0; 9], 0)
                }
                FramePart::Skip(left) => {
                    taken = left.min(bytes.len());
                    FramePart::Skip(left - taken)
                }
                FramePart::Head(mut head, came) => {
                    head[came] = *first;
                    if came + 1 < head.len() { FramePart::Head(head, came + 1) } else { self.begin(head) }
                }
                FramePart::Padding(left, before) => match left.checked_sub(before + usize::from(*first)) {
                    Some(fields) => FramePart::Before(before, fields, usize::from(*first)),
                    None => FramePart::Strange,
                },
                FramePart::Before(0, fields, padding) => {
                    taken = 0;
                    FramePart::Fields(fields, padding)
                }
                FramePart::Before(left, fields, padding) => FramePart::Before(left - 1, fields, padding),
                FramePart::Fields(0, padding) => {
                    taken = 0;
                    FramePart::Skip(padding)
                }
                FramePart::Fields(left, padding) => match self.field_byte(first) {
                    Some(next) => {
                        self.field = next;
                        FramePart::Fields(left - 1, padding)
                    }
                    None => FramePart::Strange,
                },
            };
            bytes = &mut bytes[taken..];
        }
    }

    /// The part that follows the header of a frame.
    fn begin(&mut self, head: [u8; 9]) -> FramePart {
        let [a, b, c, kind, flags, ..] = head;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let before = if flags & PRIORITY != 0 { PRIORITY_LENGTH } else { 0 };
        match kind {
            HEADERS => {
                self.field = Field::Start;
                match (flags & PADDED != 0, length.checked_sub(1), length.checked_sub(before)) {
                    (true, Some(left), _) => FramePart::Padding(left, before),
                    (false, _, Some(fields)) => FramePart::Before(before, fields, 0),
                    _ => FramePart::Strange,
                }
            }
            CONTINUATION => FramePart::Fields(length, 0),
            _ => FramePart::Skip(length),
        }
    }

    /// The state after a byte of the fields; `None` when the encoding is invalid.
    fn field_byte(&mut self, byte: &mut u8) -> Option<Field> {
        match self.field {
            Field::Start => {
                // The first byte of a field determines how many bits of its first number it contains.
                let (bits, follows) = match *byte {
                    0x80.. => (7, Follows::Nothing),
                    0x40.. => (6, Follows::Literal),
                    0x20.. => (5, Follows::Nothing),
                    _ => (4, Follows::Literal),
                };
                Some(self.number(*byte, bits, follows))
            }
            Field::Length(follows) => {
                let is_coded = *byte & 0x80 != 0 && matches!(follows, Follows::Value);
                Some(self.number(*byte, 7, if is_coded { Follows::Coded } else { follows }))
            }
            Field::Number(follows, value, shift) => {
                let value = usize::from(*byte & 0x7f).checked_shl(shift)?.checked_add(value)?;
                match *byte & 0x80 {
                    0 => Some(self.counted(follows, value)),
                    _ if shift < 21 => Some(Field::Number(follows, value, shift + 7)),
                    _ => None, // more than any frame holds
                }
            }
            Field::Text(follows, left) => {
                match follows {
                    Follows::Name if self.is_authority => {
                        self.is_authority = AUTHORITY[AUTHORITY.len() - left] == *byte;
                    }
                    Follows::Value if self.is_authority && !is_of_host(*byte) => *byte = b'-',
                    _ => {}
                }
                Some(text(follows, left - 1))
            }
        }
    }

    /// A number begins, with the lowest `bits` of a byte.
    fn number(&mut self, byte: u8, bits: u32, follows: Follows) -> Field {
        let most = (1 << bits) - 1;
        match byte & most {
            value if value == most => Field::Number(follows, usize::from(value), 0),
            value => self.counted(follows, usize::from(value)),
        }
    }

    /// The state after a complete number.
    fn counted(&mut self, follows: Follows, value: usize) -> Field {
        match follows {
            Follows::Nothing => Field::Start,
            Follows::Literal => {
                self.is_authority = value == AUTHORITY_INDEX;
                Field::Length(if value == 0 { Follows::Name } else { Follows::Value })
            }
            follows => {
                if matches!(follows, Follows::Name) {
                    self.is_authority = value == AUTHORITY.len();
                }
                text(follows, value)
            }
        }
    }
}

fn text(follows: Follows, left: usize) -> Field {
    match (follows, left) {
        (Follows::Name, 0) => Field::Length(Follows::Value),
        (_, 0) => Field::Start,
        _ => Field::Text(follows, left),
    }
}

/// Whether a byte is valid in a host, or in a port after it.
fn is_of_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:[]".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u8 = 4;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    fn literal(first: u8, value: &str) -> Vec<u8> {
        [&[first, u8::try_from(value.len()).unwrap()], value.as_bytes()].concat()
    }

    /// The frames after the filter; the result is the same however the stream is cut.
    fn passed(frames: &[Vec<u8>]) -> Vec<u8> {
        let sent = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frames.concat()].concat();
        let mut whole = sent.clone();
        Filter::default().pass(&mut whole);
        for step in [1, 2, 7, 30] {
            let (mut cut, mut filter) = (sent.clone(), Filter::default());
            cut.chunks_mut(step).for_each(|piece| filter.pass(piece));
            assert_eq!(cut, whole, "cut at every {step} bytes");
        }
        whole.split_off(PREFACE)
    }

    #[test]
    fn test_authority_that_is_a_path_becomes_a_host_of_its_length() {
        for (sent, made) in [
            ("%2Frun%2Fagentd.sock", "-2Frun-2Fagentd.sock"),
            ("/run/agentd.sock", "-run-agentd.sock"),
            ("localhost:80", "localhost:80"),
            ("[::1]:80", "[::1]:80"),
            ("", ""),
        ] {
            for first in [0x41, 0x01, 0x11] {
                let block = |value| [literal(first, value), literal(0x44, "/x%y/z")].concat();
                assert_eq!(passed(&[frame(HEADERS, END, &block(sent))]), frame(HEADERS, END, &block(made)));
                let padded = |value| [&[3, 9, 9, 9, 9, 9][..], &block(value), b"%%/"].concat();
                let flags = END | PADDED | PRIORITY;
                let (sent, made) = (padded(sent), padded(made));
                assert_eq!(passed(&[frame(HEADERS, flags, &sent)]), frame(HEADERS, flags, &made));
            }
        }
    }

    #[test]
    fn test_authority_is_found_by_its_name() {
        let block = |name: &str, value| {
            let length = u8::try_from(name.len()).unwrap();
            [&[0x40, length][..], name.as_bytes(), &literal(0, value)[1..]].concat()
        };
        let frames = |value| {
            let fields =
                [block(":authority", value), block("x-authority", "a/b"), block(":authoritz", "a/b")];
            [frame(HEADERS, END, &fields.concat())]
        };
        assert_eq!(passed(&frames("tmp%2Fx.sock")), frames("tmp-2Fx.sock").concat());
    }

    #[test]
    fn test_all_else_passes_as_it_is() {
        let long = "a/%".repeat(100);
        let named = [&[0x40, 3][..], b"a/b", &[0x7f, 0xad, 1], long.as_bytes()].concat();
        let coded = [&[0x41, 0x83][..], b"%%%"].concat();
        let indexed = vec![0x82, 0xff, 0x80, 0x01, 0x3f, 0xe1, 0x1f];
        let block = [indexed, named, coded, literal(0x44, "/a%2Fb")].concat();
        let frames = [
            frame(4, 0, b"%%/"),
            frame(HEADERS, 0, &block[..5]),
            frame(CONTINUATION, 0, &block[5..60]),
            frame(CONTINUATION, END, &block[60..]),
            frame(0, 0, &[b'%'; 500]),
        ];
        assert_eq!(passed(&frames), frames.concat());
        let odd = [frame(HEADERS, PADDED, &[200, b'%']), frame(HEADERS, END, &literal(0x41, "%"))];
        assert_eq!(passed(&odd), odd.concat());
    }

    #[test]
    fn test_authority_is_found_across_frames_and_behind_long_fields() {
        let long = "/%".repeat(100);
        let block = |value| {
            let field = [&[0x44, 0x7f, 0x49][..], long.as_bytes()].concat();
            [field, literal(0x41, value)].concat()
        };
        let frames = |value| {
            let block = block(value);
            [frame(HEADERS, 0, &block[..206]), frame(CONTINUATION, END, &block[206..])]
        };
        assert_eq!(passed(&frames("%2Fsock")), frames("-2Fsock").concat());
    }
}
