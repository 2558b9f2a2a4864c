//! Environments as jobs get them: from the file the user has, built once, never half, and kept.
//!
//! The channels are real ones, served on loopback; nothing here needs another network.

mod failures;
mod files;
mod kinds;
mod known;
mod room;
mod shared;
mod site;
