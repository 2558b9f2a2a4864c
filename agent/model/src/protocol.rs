//! What a node decides about the replicas it holds, as pure functions.
//!
//! Owns the rules by which orders, marks on the disk, leases and log offsets become actions; hides nothing:
//! the caller passes the facts in and executes the results. The same functions are used by the node's daemon and
//! by the simulator that tries to break them.
//!
//! | Module | Decides |
//! |---|---|
//! | [`orders`] | which orders count, and what they change |
//! | [`gang`] | when the ranks of a gang start |
//! | [`grant`] | what proves to a controller that it gave a replica to a node |
//! | [`peers`] | what a node tells of another one that should have sent it blobs |
//! | [`record`] | what of a replica is written down, and what of that must outlive a power cut |
//! | [`start`] | what a job directory means after a restart, and whether a lease lets a command start |
//! | [`log`] | what part of an upload is new, and what to send next |

pub mod gang;
pub mod grant;
pub mod log;
pub mod orders;
pub mod peers;
pub mod record;
pub mod start;
