//! Inputs by chance: what is known, changed in a few places.

use crate::chance::Chance;

/// An input of none but such bytes is as long at most.
const LONGEST: usize = 64 << 10;

/// What parsers tend to take for something.
const TOKENS: &[&[u8]] = &[
    b"\0",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b"-",
    b":",
    b"- ",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b"'",
    b"\\",
    b"/",
    b"..",
    b"../",
    b"#",
    b"&a ",
    b"*a",
    b"!!",
    b"|",
    b">",
    b"<<: ",
    b"null",
    b"true",
    b"1e999",
    b"-1",
    b"NaN",
    b"$",
    b"${{",
    b"}}",
    b"%s",
    b"@",
    b"=",
    b";",
    b",",
    b"18446744073709551615",
    b"9223372036854775808",
    b"\xff",
    b"\xc3\xa9",
    b"\xe2\x80\xae",
    b"\xf0\x9f\x98\x80",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\x80\x80\x80\x80\x10",
];

/// One of them, or two joined, with one to eight changes.
pub fn changed(known: &[Vec<u8>], chance: &mut Chance) -> Vec<u8> {
    let mut bytes = chance.pick(known).clone();
    for _ in 0..=chance.below(8) {
        change(&mut bytes, known, chance);
        bytes.truncate(LONGEST);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, known: &[Vec<u8>], chance: &mut Chance) {
    let at = below(bytes.len() + 1, chance);
    let end = at + below((bytes.len() - at).min(1 + below(64, chance)) + 1, chance);
    match chance.below(9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << chance.below(8),
        1 if at < bytes.len() => bytes[at] = u8::try_from(chance.below(256)).unwrap_or(0),
        2 => drop(bytes.drain(at..end)),
        3 => bytes.truncate(at),
        4 => {
            let piece = bytes[at..end].to_vec();
            let times = 1 + below(if chance.percent(5) { 2_000 } else { 8 }, chance);
            bytes.splice(at..at, piece.repeat(times));
        }
        5 => {
            let other = chance.pick(known);
            let from = below(other.len() + 1, chance);
            bytes.splice(at..end, other[from..].iter().copied());
        }
        6 => {
            let token = chance.pick(TOKENS);
            let times = if chance.percent(2) { 20_000 } else { 1 };
            bytes.splice(at..at, token.repeat(times));
        }
        _ => drop(bytes.splice(at..end, chance.pick(TOKENS).iter().copied())),
    }
}

fn below(end: usize, chance: &mut Chance) -> usize {
    usize::try_from(chance.below(end as u64)).unwrap_or(0)
}
