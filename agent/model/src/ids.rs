//! Identifiers: each kind of id is its own type, parsed once at the boundary and valid from then on.
//!
//! A [`ReplicaId`] carries the epoch, the fencing number: the same rank of the same job under a later epoch
//! is a different replica everywhere, in file names, in log keys and in reports.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a string is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` is not a valid {kind}: {rule}")]
pub struct IdError {
    /// What was being parsed, for example `job name`.
    pub kind: &'static str,
    /// The text that was refused.
    pub value: String,
    /// The rule it breaks.
    pub rule: &'static str,
}

/// The longest job name accepted, in bytes.
pub const MAX_NAME: usize = 96;

fn check_name(kind: &'static str, value: &str) -> Result<(), IdError> {
    let fail = |rule| Err(IdError { kind, value: value.to_owned(), rule });
    if value.is_empty() || value.len() > MAX_NAME {
        return fail("it must have between 1 and 96 characters");
    }
    if !value.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return fail("it must start with a letter or a digit");
    }
    if !value.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') {
        return fail("it may hold only letters, digits, `-` and `_`");
    }
    Ok(())
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(value: &str) -> Result<Self, IdError> {
                check_name($kind, value)?;
                Ok(Self(value.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(value: String) -> Result<Self, IdError> {
                check_name($kind, &value)?;
                Ok(Self(value))
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name_type!(
    /// A job's name: unique on a controller, chosen by the user or made by [`JobId::generate`].
    JobId,
    "job name"
);
name_type!(
    /// A node's name: unique on a controller.
    NodeId,
    "node name"
);
name_type!(
    /// The name of a user from elsewhere: unique on a controller.
    UserName,
    "user name"
);

/// The name of a pool: 3 to 24 letters, digits and `-`, the first one a letter. Its machines' names begin with it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PoolName(String);

impl PoolName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of one of its machines, that of the node too.
    pub fn machine(&self, random: u32) -> NodeId {
        NodeId(format!("{}-{}", self.0, suffix(random)))
    }
}

/// Stands for any of its machines.
impl From<&PoolName> for NodeId {
    fn from(pool: &PoolName) -> NodeId {
        NodeId(pool.0.clone())
    }
}

impl TryFrom<String> for PoolName {
    type Error = IdError;
    fn try_from(value: String) -> Result<PoolName, IdError> {
        let plain = value.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if plain && (3..=24).contains(&value.len()) && value.starts_with(|c: char| c.is_ascii_alphabetic()) {
            return Ok(PoolName(value));
        }
        let rule = "it must be 3 to 24 letters, digits and `-`, and start with a letter";
        Err(IdError { kind: "name of a pool", value, rule })
    }
}

impl FromStr for PoolName {
    type Err = IdError;
    fn from_str(value: &str) -> Result<PoolName, IdError> {
        value.to_owned().try_into()
    }
}

impl From<PoolName> for String {
    fn from(name: PoolName) -> String {
        name.0
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Five letters and digits that are not mistaken for others.
fn suffix(random: u32) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz23456789x";
    (0..5).map(|i| char::from(ALPHABET[((random >> (5 * i)) & 31) as usize])).collect()
}

/// What stands between the name of an array and the index of a task in the name of the task.
const TASK: &str = "--";

impl JobId {
    /// The name of a task of this array; `None` when it is too long.
    pub fn task(&self, index: u32) -> Option<JobId> {
        format!("{self}{TASK}{index}").parse().ok()
    }

    /// The array and the index that a name is made of, if it has the form of a task's.
    pub fn as_task(&self) -> Option<(JobId, u32)> {
        let (array, index) = self.0.rsplit_once(TASK)?;
        let (array, index): (JobId, u32) = (array.parse().ok()?, index.parse().ok()?);
        (array.task(index).as_ref() == Some(self)).then_some((array, index))
    }

    /// A readable name from a title and random bits: `train-resnet-4f7q2`.
    pub fn generate(title: &str, random: u32) -> JobId {
        let mut slug = String::new();
        for c in title.chars() {
            if c.is_ascii_alphanumeric() {
                slug.push(c.to_ascii_lowercase());
            } else if !slug.is_empty() && !slug.ends_with('-') {
                slug.push('-');
            }
            if slug.len() >= 24 {
                break;
            }
        }
        let slug = slug.trim_end_matches('-');
        let slug = if slug.is_empty() { "job" } else { slug };
        JobId(format!("{slug}-{}", suffix(random)))
    }
}

/// The fencing number of a job: it grows by one with every assignment, and a message that carries a lower
/// one than the controller knows is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch of the next assignment.
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One rank of one assignment of a job. Written `job.epoch.rank`; that text is also its directory name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ReplicaId {
    /// The job.
    pub job: JobId,
    /// The assignment.
    pub epoch: Epoch,
    /// The rank among the replicas of that assignment, from 0.
    pub rank: u32,
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.job, self.epoch, self.rank)
    }
}

impl FromStr for ReplicaId {
    type Err = IdError;
    fn from_str(value: &str) -> Result<Self, IdError> {
        let fail = |rule| IdError { kind: "replica id", value: value.to_owned(), rule };
        let mut parts = value.splitn(3, '.');
        let (Some(job), Some(epoch), Some(rank)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(fail("it must be written `job.epoch.rank`"));
        };
        Ok(ReplicaId {
            job: job.parse()?,
            epoch: Epoch(epoch.parse().map_err(|_| fail("the epoch must be a number"))?),
            rank: rank.parse().map_err(|_| fail("the rank must be a number"))?,
        })
    }
}

impl TryFrom<String> for ReplicaId {
    type Error = IdError;
    fn try_from(value: String) -> Result<Self, IdError> {
        value.parse()
    }
}

impl From<ReplicaId> for String {
    fn from(id: ReplicaId) -> String {
        id.to_string()
    }
}

/// The name of a blob: the SHA-256 of its bytes, and how many there are. Both must match.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest {
    /// SHA-256 of the content.
    pub hash: [u8; 32],
    /// Length of the content in bytes.
    pub size: u64,
}

/// The name of a snapshot: the digest of its root directory message.
pub type SnapshotId = Digest;

impl Digest {
    /// The digest of no bytes at all; every store has it.
    pub const EMPTY: Digest = Digest {
        hash: [
            0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14, 0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24,
            0x27, 0xae, 0x41, 0xe4, 0x64, 0x9b, 0x93, 0x4c, 0xa4, 0x95, 0x99, 0x1b, 0x78, 0x52, 0xb8, 0x55,
        ],
        size: 0,
    };

    /// The hash in lower-case hexadecimal.
    pub fn hex(&self) -> String {
        hex(&self.hash)
    }

    /// From a lower-case hexadecimal hash and a size.
    pub fn from_parts(hex: &str, size: u64) -> Result<Digest, IdError> {
        let fail =
            || IdError { kind: "digest", value: hex.to_owned(), rule: "64 lower-case hexadecimal digits" };
        let bytes = hex.as_bytes();
        if bytes.len() != 64 {
            return Err(fail());
        }
        let (mut hash, mut odd) = ([0; 32], 0);
        for (byte, pair) in hash.iter_mut().zip(bytes.chunks_exact(2)) {
            let [high, low] = [NIBBLES[usize::from(pair[0])], NIBBLES[usize::from(pair[1])]];
            odd |= high | low;
            *byte = high << 4 | low;
        }
        if odd > 15 {
            return Err(fail());
        }
        Ok(Digest { hash, size })
    }
}

/// The value of each byte as a lower-case hexadecimal digit; more than 15 where it is none. A table, because branches
/// on the digits of a hash cannot be predicted, and a query to a store has thousands of hashes.
const NIBBLES: [u8; 256] = {
    let mut worth = [u8::MAX; 256];
    let (mut value, digits) = (0, b"0123456789abcdef");
    while value < digits.len() {
        worth[digits[value] as usize] = value as u8;
        value += 1;
    }
    worth
};

/// Bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    // Two look-ups for speed, because a snapshot formats a digest for each of its files.
    let digits = |byte: &u8| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]];
    String::from_utf8(bytes.iter().flat_map(digits).collect()).expect("digits are ASCII")
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.hex(), self.size)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = IdError;
    fn from_str(value: &str) -> Result<Self, IdError> {
        let fail =
            || IdError { kind: "digest", value: value.to_owned(), rule: "it must be written `hash/size`" };
        let (hash, size) = value.split_once('/').ok_or_else(fail)?;
        Digest::from_parts(hash, size.parse().map_err(|_| fail())?)
    }
}

impl TryFrom<String> for Digest {
    type Error = IdError;
    fn try_from(value: String) -> Result<Self, IdError> {
        value.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

/// A log of a replica. Each has its own byte offsets; the agent's messages never share one with the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// What the job wrote to standard output and standard error, in the order it wrote it.
    Job,
    /// What building the environment printed.
    Build,
}

impl Stream {
    /// Every stream there is.
    pub const ALL: [Stream; 2] = [Stream::Job, Stream::Build];

    /// The file that holds it, below a job's `log` folder and in downloads.
    pub fn file_name(self) -> &'static str {
        match self {
            Stream::Job => "std_log.txt",
            Stream::Build => "build_log.txt",
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Stream::Job => "job",
            Stream::Build => "build",
        })
    }
}

/// What is shipped of a replica, and kept. Each has its own byte offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Channel {
    /// A log.
    Log(Stream),
    /// Metrics, parameters and tags, one JSON record a line.
    Tracking,
    /// What it took of its machine, one JSON record a line.
    System,
}

impl Channel {
    /// From its name on the wire.
    pub fn parse(word: &str) -> Option<Channel> {
        let all = Stream::ALL.map(Channel::Log).into_iter().chain([Channel::Tracking, Channel::System]);
        all.into_iter().find(|channel| channel.to_string() == word)
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Channel::Log(stream) => stream.fmt(f),
            Channel::Tracking => f.pad("tracking"),
            Channel::System => f.pad("system"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_generated_name_is_a_valid_name() {
        for title in ["", "Über—Modell", "a b  c", "x".repeat(300).as_str(), "--"] {
            let id = JobId::generate(title, 0xdead_beef);
            assert_eq!(id.as_str().parse::<JobId>().unwrap(), id);
        }
        assert!(JobId::generate("Train ResNet!", 7).as_str().starts_with("train-resnet-"));
    }

    #[test]
    fn test_name_of_a_task_is_taken_apart_again() {
        let id = |name: &str| name.parse::<JobId>().unwrap();
        assert_eq!(id("sweep-x7k2p").task(12).unwrap(), id("sweep-x7k2p--12"));
        assert_eq!(id("sweep--1--12").as_task(), Some((id("sweep--1"), 12)));
        for other in ["sweep", "sweep-7", "sweep--", "sweep--07", "sweep--a", "sweep---7x", "s--99999999999"]
        {
            assert_eq!(id(other).as_task(), None, "{other}");
        }
        assert_eq!(id(&"x".repeat(95)).task(7), None);
    }

    #[test]
    fn test_name_refuses_what_a_path_must_not_hold() {
        for bad in ["", ".", "..", "a/b", "a.b", "-a", "a b", &"x".repeat(97)] {
            assert!(bad.parse::<JobId>().is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn test_replica_id_round_trips() {
        let id: ReplicaId = "train-1.12.3".parse().unwrap();
        assert_eq!((id.job.as_str(), id.epoch, id.rank), ("train-1", Epoch(12), 3));
        assert_eq!(id.to_string(), "train-1.12.3");
        assert!("train-1.12".parse::<ReplicaId>().is_err());
    }

    #[test]
    fn test_digest_round_trips_and_is_strict() {
        let text = Digest::EMPTY.to_string();
        assert_eq!(text.parse::<Digest>().unwrap(), Digest::EMPTY);
        assert!(text.to_uppercase().parse::<Digest>().is_err());
        assert!("abc/3".parse::<Digest>().is_err());
    }
}
