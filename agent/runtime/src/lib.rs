//! Environments and execution: everything that starts a process.
//!
//! [`env`] makes software environments ready and keeps them; [`exec`] starts jobs, finds them again after
//! the daemon died, stops them and waits for them; [`docker`] is the container engine that both of them ask.
//! Within this crate only `exec` starts processes: `env` runs its builders through [`exec::Command`].

pub mod docker;
pub mod env;
pub mod exec;
