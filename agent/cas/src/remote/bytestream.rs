//! The messages of blobs in streams, and both ends of their service.
//!
//! Generated of `proto/google/bytestream/bytestream.proto`, so that the bytes of a blob are shared with the message
//! they came in, or are to go out with: the published crate copies them at each end.

#![allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines, reason = "generated code")]

include!("generated/google.bytestream.rs");
