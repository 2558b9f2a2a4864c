//! The job files that users write.
//!
//! The native form is the command job of the Azure ML CLI v2, with a few additions: an environment may be
//! `{python, requirements}` (pip on the node's interpreter), `{python}` alone or the word `host` (the node's
//! interpreter as it is); `resources` has `gpus` and `memory`; `limits` has `grace`; and `retry` sets how
//! often a job is tried.
//!
//! Reading is pure: a document names files (`code`, `conda_file`, a requirements file), and the caller reads
//! them. A feature that cannot be run is refused with its place; an unknown key is a warning with its place.

mod command_job;
mod distribution;
mod environment;
pub(crate) mod section;

pub use command_job::{CommandJob, InputRef, command_job};
pub use environment::{EnvironmentRef, environment_document};
pub(crate) use section::{Rejection, Section, UnknownKey, within};
pub use section::{Warning, nearest, size};
