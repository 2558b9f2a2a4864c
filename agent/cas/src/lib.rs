//! Bytes by digest, and directories as trees of them.
//!
//! Owns the stores ([`BlobStore`]: [`Disk`], [`Remote`], [`Tiered`], [`Store`]), their garbage collection ([`gc`]),
//! blobs from other nodes ([`peer`]),
//! and the conversion of a directory to a digest ([`snapshot::scan`], [`snapshot::push`]) and back
//! ([`snapshot::materialize`]).
//! Objects are those of the Remote Execution API v2: blobs named by SHA-256 and size, and canonical
//! `Directory` messages, so any server of that protocol can hold them.
//!
//! Hides file layout, durability, batching, the wire protocol and every check of data from a peer or a disk.
//!
//! Invariants: no byte enters a store under a digest that is not its own; a tree gets its directory only after it
//! passed the strict decoder and each of its files was hashed as it was written; files that were written ahead of
//! time are proven untouched since; a laid-out file never shares an inode with a store or another tree.

mod counter;
mod digest;
pub mod gc;
mod holes;
mod parallel;
pub mod peer;
pub mod remote;
pub mod snapshot;
pub mod store;
mod tiered;

pub use counter::ByteCounter;
pub use digest::{Hasher, digest_of};
pub use remote::Remote;
#[cfg(any(test, feature = "fakes"))]
pub use store::conformance;
#[cfg(any(test, feature = "fakes"))]
pub use store::memory::Memory;
pub use store::{
    BlobStore, Checked, Chunks, Disk, Evicted, Ingest, Kept, MissingError, OpenError, ReadError, WriteError,
    remove_tree,
};
#[cfg(any(test, feature = "fakes"))]
pub use store::{damage, place_of};
pub use tiered::{Store, Tiered};
