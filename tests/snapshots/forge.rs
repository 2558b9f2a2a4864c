//! Snapshots as somebody makes them who does not use our encoder: `Directory` messages byte by byte, right or
//! wrong in any way, and the blobs that belong to them.

use agent_cas::digest_of;
use agent_model::Digest;
use bytes::Bytes;

/// The fields of a `Directory`, in the order they must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Link,
}

impl Kind {
    pub(crate) const ALL: [Kind; 3] = [Kind::File, Kind::Directory, Kind::Link];

    /// The number of its field.
    pub(crate) fn field(self) -> u64 {
        self as u64 + 1
    }

    pub(crate) fn word(self) -> &'static str {
        ["file", "directory", "link"][self as usize]
    }

    /// An entry of this kind that is right but for its name, which may be anything.
    pub(crate) fn named(self, name: &[u8]) -> Vec<u8> {
        match self {
            Kind::File | Kind::Directory => entry(self, &node(name, &content(&Digest::EMPTY))),
            Kind::Link => link(name, b"target"),
        }
    }
}

/// A number as the wire has it.
pub(crate) fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let low = (number & 0x7f) as u8;
        number >>= 7;
        if number == 0 {
            bytes.push(low);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}

/// A field that is a number.
pub(crate) fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

/// A field that is text, bytes or a message.
pub(crate) fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
    [varint(field << 3 | 2), varint(value.len() as u64), value.to_vec()].concat()
}

/// A `Digest` message with this hash and size, as they are.
pub(crate) fn digest(hash: &[u8], size: i64) -> Vec<u8> {
    let size = if size == 0 { Vec::new() } else { number(2, size.cast_unsigned()) };
    [text(1, hash), size].concat()
}

/// The `Digest` message of a digest.
pub(crate) fn content(of: &Digest) -> Vec<u8> {
    digest(of.hex().as_bytes(), of.size.cast_signed())
}

/// A field that is text; one without any is left out, as it must be.
fn text(field: u64, value: &[u8]) -> Vec<u8> {
    if value.is_empty() { Vec::new() } else { bytes(field, value) }
}

/// The inside of a file or a directory: a name and a content.
pub(crate) fn node(name: &[u8], content: &[u8]) -> Vec<u8> {
    [text(1, name), bytes(2, content)].concat()
}

/// An entry with this inside.
pub(crate) fn entry(kind: Kind, inside: &[u8]) -> Vec<u8> {
    bytes(kind.field(), inside)
}

pub(crate) fn file(name: &str, of: &Digest) -> Vec<u8> {
    entry(Kind::File, &node(name.as_bytes(), &content(of)))
}

pub(crate) fn directory(name: &str, of: &Digest) -> Vec<u8> {
    entry(Kind::Directory, &node(name.as_bytes(), &content(of)))
}

pub(crate) fn link(name: &[u8], target: &[u8]) -> Vec<u8> {
    entry(Kind::Link, &[text(1, name), text(2, target)].concat())
}

/// A tree in the making: blobs of which the last directory kept is the root.
#[derive(Debug, Clone, Default)]
pub(crate) struct Forge {
    pub(crate) blobs: Vec<Bytes>,
    /// Bytes that a store is made to hold under a digest that is not theirs.
    pub(crate) forged: Vec<(Digest, Bytes)>,
}

impl Forge {
    pub(crate) fn new() -> Forge {
        Forge::default()
    }

    /// Keeps bytes as they are.
    pub(crate) fn keep(&mut self, bytes: impl Into<Bytes>) -> Digest {
        let bytes = bytes.into();
        let digest = digest_of(&bytes);
        if digest != Digest::EMPTY {
            self.blobs.push(bytes);
        }
        digest
    }

    /// Keeps a directory of these entries.
    pub(crate) fn directory(&mut self, entries: &[Vec<u8>]) -> Digest {
        self.keep(entries.concat())
    }

    /// `inner` below so many directories of this name.
    pub(crate) fn below(&mut self, depth: usize, name: &str, inner: Digest) -> Digest {
        (0..depth).fold(inner, |inner, _| self.directory(&[directory(name, &inner)]))
    }
}
