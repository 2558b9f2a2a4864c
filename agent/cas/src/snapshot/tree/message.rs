//! `Directory` messages: the one encoder and the strict decoder.
//!
//! A message is read entry by entry, and each is accepted only if encoding the decoded entry gives the same
//! bytes again, in the canonical order. So unknown fields and odd encodings need no rules of their own, equal trees
//! have equal digests, and a message that is all wrong costs no more memory than its first entry. Names are
//! single path segments.

use agent_fs::name_of_text;
use agent_model::Digest;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bytes::Bytes;
use prost::Message;

use super::TreeError;
use crate::digest_of;
use crate::remote::{digest_from_wire, digest_to_wire};

/// The longest name of a file, in bytes, that Linux file systems take.
const MAX_NAME: usize = 255;

/// The largest entry of a `Directory` message, in bytes: a link with the longest target and the longest text of a name,
/// rounded up.
pub(super) const MAX_ENTRY: usize = 8 * 1024;

/// Memory of a directory beside its entries: its digest, its place in the tables of the tree.
const DIRECTORY_WEIGHT: u64 = 300;

/// Memory of an entry beside the text of its name and target.
const ENTRY_WEIGHT: u64 = 112;

/// What one directory holds, each kind sorted by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::snapshot) struct Directory {
    /// Name, content, executable.
    pub(in crate::snapshot) files: Vec<(String, Digest, bool)>,
    /// Name, message.
    pub(in crate::snapshot) directories: Vec<(String, Digest)>,
    /// Name, target.
    pub(in crate::snapshot) links: Vec<(String, String)>,
}

impl Directory {
    /// Its canonical message.
    pub(in crate::snapshot) fn encode(mut self) -> (Digest, Bytes) {
        self.files.sort_unstable();
        self.directories.sort_unstable();
        self.links.sort_unstable();
        let file = |(name, digest, is_executable)| reapi::FileNode {
            name,
            digest: Some(digest_to_wire(&digest)),
            is_executable,
            node_properties: None,
        };
        let directory = |(name, digest)| reapi::DirectoryNode { name, digest: Some(digest_to_wire(&digest)) };
        let link = |(name, target)| reapi::SymlinkNode { name, target, node_properties: None };
        let message = reapi::Directory {
            files: self.files.into_iter().map(file).collect(),
            directories: self.directories.into_iter().map(directory).collect(),
            symlinks: self.links.into_iter().map(link).collect(),
            node_properties: None,
        };
        let bytes = Bytes::from(message.encode_to_vec());
        (digest_of(&bytes), bytes)
    }

    /// Decodes a message, if it is canonical. Node properties (times, full modes) are of no use here, and ours never
    /// have them; a message with them is refused like one with an unknown field.
    pub(super) fn decode(directory: Digest, bytes: &[u8]) -> Result<Directory, TreeError> {
        let mut decoder = Decoder { directory, rest: bytes, decoded: Directory::default() };
        let mut last = FILE;
        while !decoder.rest.is_empty() {
            let key = decoder.key()?;
            match key {
                _ if key < last => return Err(TreeError::NotCanonical { directory }),
                FILE => decoder.file()?,
                DIRECTORY => decoder.directory()?,
                LINK => decoder.link()?,
                _ => return Err(TreeError::NotCanonical { directory }),
            }
            last = key;
        }
        let mut decoded = decoder.decoded;
        decoded.check_names(directory)?;
        decoded.files.shrink_to_fit();
        decoded.directories.shrink_to_fit();
        decoded.links.shrink_to_fit();
        Ok(decoded)
    }

    /// Each kind is sorted, and no name is used twice, of whatever kind.
    fn check_names(&self, directory: Digest) -> Result<(), TreeError> {
        let files = self.files.iter().map(|(name, ..)| name);
        let directories = self.directories.iter().map(|(name, _)| name);
        let links = self.links.iter().map(|(name, _)| name);
        let sorted =
            files.clone().is_sorted() && directories.clone().is_sorted() && links.clone().is_sorted();
        let mut names: Vec<&String> = files.chain(directories).chain(links).collect();
        names.sort_unstable();
        match sorted && names.windows(2).all(|pair| pair[0] != pair[1]) {
            true => Ok(()),
            false => Err(TreeError::NotCanonical { directory }),
        }
    }

    /// Roughly its memory, in bytes; never less than the size of its message.
    pub(super) fn weight(&self) -> u64 {
        let files = self.files.iter().map(|(name, ..)| name.len());
        let directories = self.directories.iter().map(|(name, _)| name.len());
        let links = self.links.iter().map(|(name, target)| name.len() + target.len());
        let text = files.chain(directories).chain(links).map(|length| ENTRY_WEIGHT + length as u64);
        DIRECTORY_WEIGHT + text.sum::<u64>()
    }
}

/// The key before each entry of a message: the field number of its kind, and the wire type of a message.
const FILE: usize = 1 << 3 | 2;
const DIRECTORY: usize = 2 << 3 | 2;
const LINK: usize = 3 << 3 | 2;

/// A message being decoded, one entry at a time.
struct Decoder<'a> {
    directory: Digest,
    rest: &'a [u8],
    decoded: Directory,
}

impl Decoder<'_> {
    fn malformed(&self, source: prost::DecodeError) -> TreeError {
        TreeError::Malformed { directory: self.directory, source }
    }

    fn key(&mut self) -> Result<usize, TreeError> {
        // A key is encoded like a length; one in more bytes than needed is not canonical.
        let before = self.rest.len();
        let key = prost::decode_length_delimiter(&mut self.rest).map_err(|source| self.malformed(source))?;
        let is_shortest = before - self.rest.len() == prost::length_delimiter_len(key);
        if is_shortest { Ok(key) } else { Err(TreeError::NotCanonical { directory: self.directory }) }
    }

    /// The next entry, if its encoding is canonical.
    fn entry<M: Message + Default>(&mut self) -> Result<M, TreeError> {
        let mut peeked = self.rest;
        let length = prost::decode_length_delimiter(&mut peeked).map_err(|source| self.malformed(source))?;
        if length > MAX_ENTRY {
            return Err(TreeError::LargeEntry { directory: self.directory, limit: MAX_ENTRY });
        }
        let before = self.rest;
        let entry = M::decode_length_delimited(&mut self.rest).map_err(|source| self.malformed(source))?;
        let taken = &before[..before.len() - self.rest.len()];
        match entry.encode_length_delimited_to_vec() == taken {
            true => Ok(entry),
            false => Err(TreeError::NotCanonical { directory: self.directory }),
        }
    }

    fn name(&self, name: String) -> Result<String, TreeError> {
        match is_segment(&name) {
            true => Ok(name),
            false => Err(TreeError::Name { directory: self.directory, name }),
        }
    }

    fn content(&self, name: &str, digest: Option<reapi::Digest>) -> Result<Digest, TreeError> {
        let understood = digest.and_then(|wire| digest_from_wire(&wire).ok());
        understood.ok_or_else(|| TreeError::Content { directory: self.directory, name: name.to_owned() })
    }

    fn file(&mut self) -> Result<(), TreeError> {
        let node: reapi::FileNode = self.entry()?;
        if node.node_properties.is_some() {
            return Err(TreeError::NotCanonical { directory: self.directory });
        }
        let name = self.name(node.name)?;
        let digest = self.content(&name, node.digest)?;
        self.decoded.files.push((name, digest, node.is_executable));
        Ok(())
    }

    fn directory(&mut self) -> Result<(), TreeError> {
        let node: reapi::DirectoryNode = self.entry()?;
        let name = self.name(node.name)?;
        let digest = self.content(&name, node.digest)?;
        self.decoded.directories.push((name, digest));
        Ok(())
    }

    fn link(&mut self) -> Result<(), TreeError> {
        let node: reapi::SymlinkNode = self.entry()?;
        if node.node_properties.is_some() {
            return Err(TreeError::NotCanonical { directory: self.directory });
        }
        let name = self.name(node.name)?;
        self.decoded.links.push((name, node.target));
        Ok(())
    }
}

/// The bytes of a name on a disk.
pub(super) fn length(name: &str) -> usize {
    name_of_text(name).len()
}

/// `name` is one segment of a path, and not a special one.
pub(super) fn is_segment(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && length(name) <= MAX_NAME && !name.contains(['/', '\0'])
}
