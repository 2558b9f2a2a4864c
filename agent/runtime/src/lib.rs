//! Environments and execution: everything that starts a process.
//!
//! [`env`] builds software environments and keeps them; [`exec`] starts jobs, finds them again after the daemon was
//! restarted, stops them and waits for them; both use the container engine through [`docker`]. [`data`] fetches what jobs
//! read and nobody sends. Within this crate only
//! `exec` starts processes: `env` runs its builders through [`exec::Command`].

pub mod data;
pub mod docker;
pub mod env;
pub mod exec;
