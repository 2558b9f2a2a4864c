//! Real `agentd`, `agent-shim` and `agentctl` on one box, used as people use them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod again;
mod apart;
mod arrays;
mod cancel;
mod codes;
mod command_line;
mod daemons;
mod data;
mod descriptors;
mod documents;
mod endpoint;
mod environments;
mod faults;
mod fleet;
mod gc;
mod gpu_jobs;
mod gpus;
mod inside;
mod instance;
mod jobs;
mod kills;
mod metrics;
mod mlflow;
mod named_data;
mod named_outputs;
mod one_job;
mod outputs;
mod people;
mod pipelines;
mod program;
mod queue;
mod removal;
mod resubmit;
mod resume;
mod retry;
mod rootless;
mod runconfig;
mod sdk;
mod sent_outputs;
mod service;
mod slow;
mod survive;
mod sweeps;
mod upkeep;
