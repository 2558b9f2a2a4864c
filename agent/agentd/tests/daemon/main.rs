//! The daemon as a whole: the real program, real jobs, and the clients anybody may write.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod environments;
mod gpu_jobs;
mod gpus;
mod harness;
mod jobs;
mod program;
mod slow;
mod survival;
mod upkeep;
