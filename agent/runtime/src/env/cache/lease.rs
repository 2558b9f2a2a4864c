//! The right to use an environment, and the information that a command needs about it.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Marker, Use};
use crate::env::Image;

/// A ready environment. It is neither rebuilt nor removed while this exists.
#[derive(Debug)]
pub struct EnvLease {
    pub(super) name: String,
    pub(super) marker: Marker,
    pub(super) vars: BTreeMap<String, String>,
    pub(super) took: Option<Duration>,
    pub(super) lock_file: Option<PathBuf>,
    pub(super) log_file: PathBuf,
    pub(super) parts: Vec<EnvLease>,
    pub(super) _use: Use,
    pub(super) _lock: File,
}

impl EnvLease {
    /// The environment's name on this node: its kind and the start of its digest.
    pub fn key(&self) -> &str {
        &self.name
    }

    /// Its directory.
    pub fn prefix(&self) -> &Path {
        &self.marker.prefix
    }

    /// The directory with its packages, which a command may want to change: its own, or that of an interpreter of the
    /// machine.
    pub fn packages_in(&self) -> Option<&Path> {
        let own = self.marker.has_files().then(|| self.prefix());
        own.or(self.marker.elsewhere_prefix.as_deref())
    }

    /// Adds the variables that a specification sets for commands in its environment. They are not part of its
    /// identity, so each lease has its own.
    pub(in crate::env) fn with_variables(mut self, variables: BTreeMap<String, String>) -> EnvLease {
        self.vars.extend(variables);
        self
    }

    /// Adds leases of the environments that it consists of, for as long as this exists.
    pub(in crate::env) fn with_parts(mut self, parts: Vec<EnvLease>) -> EnvLease {
        self.took = parts.iter().filter_map(EnvLease::took).chain(self.took).reduce(|one, other| one + other);
        self.parts = parts;
        self
    }

    /// The keys of the environments that it consists of.
    pub(in crate::env) fn parts(&self) -> &[String] {
        &self.marker.parts
    }

    /// The variables a command needs to use it, besides `PATH`; including those of the job's own file.
    pub fn vars(&self) -> &BTreeMap<String, String> {
        &self.vars
    }

    /// The directories that are first on `PATH`.
    pub fn path_entries(&self) -> &[PathBuf] {
        &self.marker.path_entries
    }

    /// The image that commands run in; `None` for those that run on the machine itself.
    pub fn image(&self) -> Option<&Image> {
        self.marker.image.as_ref()
    }

    /// It was ready already: nothing was built, and no build was waited for.
    pub fn reused(&self) -> bool {
        self.took.is_none()
    }

    /// How long it took to build it, with what it consists of; `None` where nothing was built.
    pub fn took(&self) -> Option<Duration> {
        self.took
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

    /// The output of its builder. The file may be missing.
    pub fn log_file(&self) -> &Path {
        &self.log_file
    }
}
