//! The messages of blob streams, and both ends of their service.
//!
//! Generated from `proto/google/bytestream/bytestream.proto`, so that a blob shares its bytes with the message that
//! carries it: the published crate copies them at each end.

#![allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines, reason = "generated code")]

include!("generated/google.bytestream.rs");
