//! The definitions of a job, a replica, a node and a fault.
//!
//! Owns the vocabulary of the product and every rule that can be stated without a clock, a disk or a
//! network: identifiers, the job specification and its validation, the state machines, placement-independent
//! resources, and the faults users read.
//!
//! Invariants: no async, no I/O (the exceptions are [`clock::SystemClock`], which reads the time, and
//! [`failpoint`], which does nothing outside of debug builds);
//! a [`JobSpec`] has always passed [`JobDraft::validate`]; a state changes only through its machine.
//!
//! All crates of the workspace depend on this one; it depends on none of them.

pub mod access;
pub mod address;
pub mod asset;
pub mod breaker;
pub mod causes;
pub mod clock;
pub mod container;
pub mod curated;
pub mod data;
pub mod disk;
pub mod env;
pub mod exposition;
pub mod expr;
pub mod failpoint;
pub mod fault;
pub mod gpu;
pub mod ids;
pub mod job;
pub mod joining;
pub mod lease;
pub mod machine;
pub mod node;
pub mod outcome;
pub mod paths;
pub mod preemption;
pub mod protocol;
pub mod size;
pub mod sweep;
pub mod system;
pub mod tracking;
pub mod tunnel;
pub mod words;

pub use access::{Principal, Role};
pub use address::Address;
pub use breaker::Breaker;
pub use causes::causes;
pub use clock::{Boot, Clock, ManualClock, SystemClock, Timestamp};
pub use data::{DataInput, DataOutput, DataUri, SnapshotRef};
pub use env::EnvSpec;
pub use fault::{Blame, Code, Fault, Retry};
pub use ids::{Channel, Digest, Epoch, JobId, NodeId, PoolName, ReplicaId, Stream, UserName};
pub use job::{JobDraft, JobSpec, pipeline};
pub use machine::{JobEvent, JobState, ReplicaStep, Verdict};
pub use outcome::{Artifacts, ExitStatus, Outcome, StreamEnd, last_lines};
pub use preemption::Preemption;
pub use tunnel::{TunnelSpec, TunnelState};
