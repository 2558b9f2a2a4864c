//! Environments and execution: everything that starts a process.

pub mod env;
pub mod exec;
