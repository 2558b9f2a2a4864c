//! Environments and execution: how jobs get what they need, and run.
//!
//! [`env`] builds software environments and keeps them; [`exec`] starts jobs, finds them again after the daemon was
//! restarted, stops them and waits for them; both use the container engine through [`docker`]. [`data`] fetches what jobs
//! read and nobody sends. Builders and fetchers
//! are short children, each an [`agent_command::Command`].

pub mod data;
pub mod docker;
pub mod env;
pub mod exec;
