//! Real `agentd`, `agent-shim` and `agentctl` on one box, used as people use them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod cancel;
mod codes;
mod command_line;
mod daemons;
mod data;
mod descriptors;
mod documents;
mod environments;
mod faults;
mod fleet;
mod gc;
mod metrics;
mod one_job;
mod outputs;
mod people;
mod queue;
mod removal;
mod resubmit;
mod retry;
mod rootless;
mod runconfig;
mod service;
mod survive;
