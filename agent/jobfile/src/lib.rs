//! The job files that users write, in two dialects.
//!
//! The native form is the command job of the Azure ML CLI v2, with a few additions: an environment may be
//! `{python, requirements}` (pip on the node's interpreter), `{python}` alone or the word `host` (the node's
//! interpreter as it is); `resources` has `gpus` and `memory`; `limits` has `grace`; and `retry` sets how
//! often a job is tried. The other is the run configuration of the Azure ML SDK and CLI v1, see [`runconfig()`].
//!
//! [`job_text`] writes a job as such a file again.
//!
//! Reading is pure: a document names files (`code`, `conda_file`, a requirements file), and the caller reads
//! them. A feature that cannot be run is refused with its place; an unknown key is a warning with its place.

mod command_job;
pub mod condafile;
mod dialect;
mod distribution;
pub mod env;
mod keys;
mod pipeline;
pub mod requirement;
mod runconfig;
mod schema;
mod section;
mod slurm;
mod writer;
pub mod yaml;

pub use command_job::environment::{EnvironmentRef, environment_document};
pub use command_job::{InputRef, JobFile, command_job, written as written_distribution};
pub use dialect::Dialect;
pub use pipeline::{Misread, OpenFile, PipelineFile, PipelineSettings, StepFile, is_pipeline, pipeline};
pub use runconfig::{Runconfig, runconfig};
pub use schema::schema;
pub use section::{Refused, Rejection, Warning, nearest};
pub use slurm::{BatchScript, JOB_NAME as SLURM_JOB_NAME, batch_script, is_batch_script};
pub use writer::{job_entries, job_text, locked};

pub(crate) use section::{Section, UnknownKey, within};
