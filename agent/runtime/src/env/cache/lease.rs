//! The right to use an environment, and what a command needs to know of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::{Marker, Use};
use crate::env::Image;

/// A ready environment. It is neither rebuilt nor removed while this lives.
#[derive(Debug)]
pub struct EnvLease {
    pub(super) name: String,
    pub(super) marker: Marker,
    pub(super) vars: BTreeMap<String, String>,
    pub(super) reused: bool,
    pub(super) lock_file: Option<PathBuf>,
    pub(super) log_file: PathBuf,
    pub(super) parts: Vec<EnvLease>,
    pub(super) _use: Use,
    pub(super) _lock: File,
}

impl EnvLease {
    /// What the environment is called on this node: its kind and the start of its digest.
    pub fn key(&self) -> &str {
        &self.name
    }

    /// Its directory.
    pub fn prefix(&self) -> &Path {
        &self.marker.prefix
    }

    /// With the variables that a specification sets for whatever runs in its environment. They make no other
    /// environment, so each lease has those of its own.
    pub(in crate::env) fn with_variables(mut self, variables: BTreeMap<String, String>) -> EnvLease {
        self.vars.extend(variables);
        self
    }

    /// With what it is put together from, which stays as long as it does.
    pub(in crate::env) fn with_parts(mut self, parts: Vec<EnvLease>) -> EnvLease {
        self.reused &= parts.iter().all(EnvLease::reused);
        self.parts = parts;
        self
    }

    /// The keys of what it is put together from.
    pub(in crate::env) fn parts(&self) -> &[String] {
        &self.marker.parts
    }

    /// The variables a command needs to use it, besides `PATH`; those that the job's own file sets among them.
    pub fn vars(&self) -> &BTreeMap<String, String> {
        &self.vars
    }

    /// What goes first on `PATH`.
    pub fn path_entries(&self) -> &[PathBuf] {
        &self.marker.path_entries
    }

    /// The image that commands run in; `None` for those that run on the machine itself.
    pub fn image(&self) -> Option<&Image> {
        self.marker.image.as_ref()
    }

    /// It was there already: nothing was built, and nobody was waited for.
    pub fn reused(&self) -> bool {
        self.reused
    }

    /// The version of its interpreter, for example `3.10.12`; empty for none.
    pub fn python_version(&self) -> &str {
        &self.marker.python_version
    }

    /// The variables that its packages need, without those of a specification.
    pub(in crate::env) fn own_vars(&self) -> &BTreeMap<String, String> {
        &self.marker.vars
    }

    /// How many packages it has.
    pub(in crate::env) fn packages(&self) -> u32 {
        self.marker.packages
    }

    /// The explicit list of its packages; `None` when nothing can be locked.
    pub fn lock_file(&self) -> Option<&Path> {
        self.lock_file.as_deref()
    }

    /// What its builder printed. May be gone.
    pub fn log_file(&self) -> &Path {
        &self.log_file
    }
}
