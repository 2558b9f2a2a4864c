//! The job files people have.
//!
//! The native form is the command job of the Azure ML CLI v2, with two additions: an environment may be
//! `{python, requirements}` (pip on the node's interpreter) or `{python}` alone (the node's interpreter as it
//! is), and `resources` knows `gpus` and `memory`.
//!
//! Reading is pure: a document names files (`code`, `conda_file`, a requirements file), and the caller brings
//! them. What cannot be run is refused with its place; what is not known is a warning with its place.

mod command_job;

pub use command_job::{CommandJob, EnvironmentRef, InputRef, Warning, command_job};
