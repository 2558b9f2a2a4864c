//! Bytes by digest, and directories as trees of them.
//!
//! Owns the stores ([`BlobStore`]: [`Disk`], [`Remote`], [`Tiered`], [`Store`]), what keeps one small ([`gc`]), and
//! the two ways between a directory and a digest: [`snapshot::scan`] and [`snapshot::push`] there,
//! [`snapshot::materialize`] back.
//! Objects are those of the Remote Execution API v2: blobs named by SHA-256 and size, and canonical
//! `Directory` messages, so any server of that protocol can hold them.
//!
//! Hides file layout, durability, batching, the wire protocol and every check of what a peer or a disk says.
//!
//! Invariants: no byte enters a store under a digest that is not its own; no tree reaches a directory before
//! it passed the strict decoder and each of its files was hashed as it was written there, be it ahead of time: what
//! lay there since is proven untouched; a laid-out file never shares an inode with a store or another tree.

mod digest;
pub mod gc;
mod holes;
mod parallel;
pub mod remote;
pub mod snapshot;
pub mod store;

pub use digest::{Hasher, digest_of};
pub use parallel::blocking;
pub use remote::Remote;
#[cfg(any(test, feature = "fakes"))]
pub use store::conformance;
#[cfg(any(test, feature = "fakes"))]
pub use store::memory::Memory;
pub use store::{
    BlobStore, Checked, Chunks, Disk, Evicted, Ingest, Kept, MissingError, OpenError, ReadError, Store,
    Tiered, WriteError, remove_tree,
};
#[cfg(any(test, feature = "fakes"))]
pub use store::{damage, place_of};
