//! Digests and resource names as they are written on the wire.

use std::fmt;

use agent_model::Digest;
use agent_model::ids::IdError;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;

/// The digest as a message.
pub fn digest_to_wire(digest: &Digest) -> reapi::Digest {
    reapi::Digest { hash: digest.hex(), size_bytes: i64::try_from(digest.size).unwrap_or(i64::MAX) }
}

/// The longest resource name there may be, in bytes.
const MAX_NAME: usize = 1024;

/// How much of a peer's text is repeated in an error, in characters.
const QUOTED: usize = 100;

/// The beginning of a text of any length, for an error: a status travels in headers, which must be short.
fn quoted(text: &str) -> String {
    text.chars().take(QUOTED).collect()
}

/// The digest of a message; its hash must be a lower-case SHA-256 and its size not negative.
pub fn digest_from_wire(wire: &reapi::Digest) -> Result<Digest, IdError> {
    let size = u64::try_from(wire.size_bytes).map_err(|_| IdError {
        kind: "digest",
        value: wire.size_bytes.to_string(),
        rule: "the size must not be negative",
    })?;
    Digest::from_parts(&wire.hash, size).map_err(|error| IdError { value: quoted(&error.value), ..error })
}

/// Marks a blob in a batch as compressed.
pub const ZSTD: i32 = reapi::compressor::Value::Zstd as i32;

/// Marks a blob in a batch as uncompressed.
pub const IDENTITY: i32 = reapi::compressor::Value::Identity as i32;

/// How the bytes of a blob are encoded in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As they are.
    Plain,
    /// Compressed with zstd: `compressed-blobs/zstd` in place of `blobs`.
    Zstd,
}

/// What a byte stream is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resource {
    /// A blob to read: `{instance/}blobs/{hash}/{size}`.
    Blob {
        /// The blob.
        digest: Digest,
        /// The form to read it in.
        form: Form,
    },
    /// A blob to write: `{instance/}uploads/{id}/blobs/{hash}/{size}{/anything}`.
    Upload {
        /// The client's own name for this upload.
        id: String,
        /// The blob.
        digest: Digest,
        /// The form it is sent in.
        form: Form,
    },
}

/// Why a resource name cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ResourceError {
    #[error("the resource `{name}` is compressed in a way that is not zstd")]
    Compressor { name: String },
    #[error("`{name}` is no resource of this store")]
    Malformed { name: String },
}

impl Resource {
    /// Parses a resource name; an instance name before it may have any number of segments.
    pub fn parse(name: &str) -> Result<Resource, ResourceError> {
        let malformed = || ResourceError::Malformed { name: quoted(name) };
        if name.len() > MAX_NAME {
            return Err(malformed());
        }
        let segments: Vec<&str> = name.split('/').collect();
        let start = segments
            .iter()
            .position(|segment| matches!(*segment, "blobs" | "uploads" | "compressed-blobs"))
            .ok_or_else(malformed)?;
        let digest = |hash: &str, size: &str| {
            Digest::from_parts(hash, size.parse().map_err(|_| malformed())?).map_err(|_| malformed())
        };
        let (id, blob) = match &segments[start..] {
            ["uploads", id, blob @ ..] => (Some((*id).to_owned()), blob),
            blob => (None, blob),
        };
        let (form, hash, size, rest) = match blob {
            ["blobs", hash, size, rest @ ..] => (Form::Plain, hash, size, rest),
            ["compressed-blobs", "zstd", hash, size, rest @ ..] => (Form::Zstd, hash, size, rest),
            ["compressed-blobs", other, ..] if *other != "zstd" => {
                return Err(ResourceError::Compressor { name: quoted(name) });
            }
            _ => return Err(malformed()),
        };
        let digest = digest(hash, size)?;
        match id {
            Some(id) => Ok(Resource::Upload { id, digest, form }),
            None if rest.is_empty() => Ok(Resource::Blob { digest, form }),
            None => Err(malformed()),
        }
    }

    /// The name in the instance `instance` of a server; an empty one means its only instance.
    pub fn within(&self, instance: &str) -> String {
        if instance.is_empty() { self.to_string() } else { format!("{instance}/{self}") }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::Plain => "blobs",
            Form::Zstd => "compressed-blobs/zstd",
        })
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resource::Blob { digest, form } => write!(f, "{form}/{digest}"),
            Resource::Upload { id, digest, form } => write!(f, "uploads/{id}/{form}/{digest}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_resource_names_round_trip_with_and_without_an_instance() {
        for form in [Form::Plain, Form::Zstd] {
            let digest = Digest::EMPTY;
            let upload = Resource::Upload { id: "u-1".into(), digest, form };
            for resource in [Resource::Blob { digest, form }, upload] {
                for instance in ["", "main", "a/b/c"] {
                    assert_eq!(Resource::parse(&resource.within(instance)), Ok(resource.clone()));
                }
            }
        }
    }

    #[test]
    fn test_resource_names_refuse_what_is_not_ours() {
        let hash = Digest::EMPTY.hex();
        for name in ["compressed-blobs/deflate", "a/uploads/u/compressed-blobs/brotli"] {
            let refused = Resource::parse(&format!("{name}/{hash}/0"));
            assert!(matches!(refused, Err(ResourceError::Compressor { .. })), "{refused:?}");
        }
        for bad in [
            String::new(),
            "blobs".into(),
            format!("blobs/{hash}"),
            format!("blobs/{hash}/-1"),
            format!("blobs/{hash}/0/more"),
            format!("blobs/blake3/{hash}/0"),
            format!("blobs/{}/0", hash.to_uppercase()),
            format!("uploads/blobs/{hash}/0"),
            format!("compressed-blobs/zstd/{hash}"),
            format!("compressed-blobs/zstd/{hash}/0/more"),
            format!("compressed-blobs/zstd/blake3/{hash}/0"),
            "compressed-blobs".into(),
        ] {
            assert!(matches!(Resource::parse(&bad), Err(ResourceError::Malformed { .. })), "{bad}");
        }
    }

    #[test]
    fn test_long_names_are_refused_in_few_words() {
        let long = "x".repeat(1 << 20);
        let refused = Resource::parse(&format!("{long}/blobs/{}", Digest::EMPTY)).unwrap_err();
        assert!(refused.to_string().len() < 200, "{}", refused.to_string().len());
        let refused = digest_from_wire(&reapi::Digest { hash: long, size_bytes: 1 }).unwrap_err();
        assert!(refused.to_string().len() < 300, "{}", refused.to_string().len());
    }

    #[test]
    fn test_digest_from_wire_refuses_negative_sizes() {
        let wire = reapi::Digest { size_bytes: -1, ..digest_to_wire(&Digest::EMPTY) };
        assert!(digest_from_wire(&wire).is_err());
        assert_eq!(digest_from_wire(&digest_to_wire(&Digest::EMPTY)), Ok(Digest::EMPTY));
    }
}
