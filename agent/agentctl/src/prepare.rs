//! From what a person names to a job the daemon can take.
//!
//! ```text
//! DIR | FILE [-- command] ─ plan ─▶ Plan (a draft, and the files it names) ─ ship ─▶ JobSpec, blobs stored
//! ```
//!
//! [`Plan::read`] touches only small files: the job file, requirements, conda files. [`Plan::ship`] walks
//! directories and sends what the store lacks. Owns the meaning of a directory without a job file.
//! Callers: `run` and `submit`.

mod plan;
mod requirements;
mod ship;

pub(crate) use plan::{Changes, Plan};
