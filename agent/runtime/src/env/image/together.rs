//! An image and a conda environment of this machine that work together.
//!
//! The conda environment is an ordinary one, built for the older of two C libraries, so jobs without an image and
//! other images can share it. This record only says that it was tried in that image and works; the directory of the
//! packages is mounted into containers at its path on the machine, read-only. Why it is not a layer of an image:
//! agent/docs/adr/0009-containers.md.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use agent_env::{Phase, Progress};
use agent_jobfile::condafile;
use agent_model::EnvSpec;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::super::glibc::{self, Glibc};
use super::super::{AcquireError, BuildWorkspace, Built, EnvBuilder, EnvLease, Image};
use super::{Access, MISLEADING, carrier};

/// Increased when the same identity would be built differently.
const VERSION: u32 = 1;

/// Combines the two.
pub(super) struct Together {
    access: Arc<Access>,
    image: Image,
    glibc: Glibc,
    /// The packages: their directory, and how they are used.
    prefix: PathBuf,
    built: Built,
}

impl Together {
    pub(super) fn new(access: Arc<Access>, ground: &EnvLease, glibc: Glibc, packages: &EnvLease) -> Together {
        let image = ground.image().cloned().unwrap_or_default();
        let prefix = packages.prefix().to_owned();
        let built = Built {
            vars: packages.own_vars().clone(),
            path_entries: packages.path_entries().to_vec(),
            python_version: packages.python_version().to_owned(),
            packages: packages.packages(),
            parts: vec![ground.key().to_owned(), packages.key().to_owned()],
            ..Built::default()
        };
        Together { access, image, glibc, prefix, built }
    }

    /// Checks that the packages work with the C library of the image.
    async fn check(&self, workspace: &BuildWorkspace) -> Result<(), AcquireError> {
        let refuse = |why| Err(AcquireError::CannotCarry { image: self.image.reference.clone(), why });
        let (prefix, glibc) = (self.prefix.clone(), self.glibc);
        let looked = agent_blocking::spawn_blocking(move || glibc::too_new(&prefix, glibc)).await;
        let too_new = looked.unwrap_or_default();
        if !too_new.is_empty() {
            return refuse(format!(
                "its C library is glibc {glibc}, and pip installed what needs a newer one: {}",
                too_new.join(", ")
            ));
        }
        if self.built.python_version.is_empty() {
            return Ok(());
        }
        let python = self.prefix.join("bin/python").display().to_string();
        workspace.say(&format!("trying {python} in {}", self.image.reference));
        let mounts = [self.prefix.display().to_string()];
        match carrier::try_python(&self.access, &self.image, &python, &mounts).await? {
            Some(why) => refuse(why),
            None => Ok(()),
        }
    }
}

impl EnvBuilder for Together {
    fn handles(&self, spec: &EnvSpec) -> bool {
        matches!(spec, EnvSpec::Image { conda: Some(_), .. })
    }

    fn identity<'a>(&'a self, _: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        let identity = format!("together {VERSION}\n{}\n{}", self.image.id, self.built.parts.join("\n"));
        std::future::ready(Ok(identity)).boxed()
    }

    fn variables(&self, spec: &EnvSpec) -> BTreeMap<String, String> {
        let EnvSpec::Image { conda: Some(document), .. } = spec else { return BTreeMap::new() };
        condafile::parse(document).map(|(file, _)| file.variables).unwrap_or_default()
    }

    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        async move {
            workspace.tell(Progress::of(Phase::Check, &self.image.reference));
            workspace.say(&format!("{} has glibc {}", self.image.reference, self.glibc));
            self.check(workspace).await?;
            let mut image = Image { mounts: vec![self.prefix.clone()], ..self.image.clone() };
            MISLEADING.iter().for_each(|name| drop(image.env.remove(*name)));
            Ok(Built { summary: agent_jobfile::env::summary(spec), image: Some(image), ..self.built.clone() })
        }
        .boxed()
    }
}
