//! A builder that follows a script, for tests of the code around builders.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use agent_model::EnvSpec;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;

use super::{AcquireError, BuildWorkspace, Built, EnvBuilder, Image};

/// The script of one build.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// How long it takes.
    pub takes: Duration,
    /// How it fails, if it does.
    pub fails: Option<AcquireError>,
    /// The image that commands are to run in, if any.
    pub image: Option<Image>,
}

/// Uses one script for each build, in order, and then builds at once. Handles every kind of environment; the
/// directory gets an empty file `bin/python`.
#[derive(Debug, Default)]
pub struct Scripted {
    scripts: Mutex<VecDeque<Script>>,
}

impl Scripted {
    /// A builder with these scripts.
    pub fn new(scripts: impl IntoIterator<Item = Script>) -> Scripted {
        Scripted { scripts: Mutex::new(scripts.into_iter().collect()) }
    }
}

impl EnvBuilder for Scripted {
    fn handles(&self, _: &EnvSpec) -> bool {
        true
    }

    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        async move { Ok(agent_jobfile::env::normalized(spec)) }.boxed()
    }

    fn build<'a>(
        &'a self,
        _: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        let next = self.scripts.lock().pop_front();
        let script = next.unwrap_or_default();
        async move {
            workspace.say("the script begins");
            let bin = workspace.prefix().join("bin");
            std::fs::create_dir(&bin).map_err(AcquireError::io("create", &bin))?;
            tokio::time::sleep(script.takes).await;
            if let Some(error) = script.fails {
                return Err(error);
            }
            let python = bin.join("python");
            std::fs::write(&python, "").map_err(AcquireError::io("write", &python))?;
            workspace.say("the script ends");
            Ok(Built {
                vars: BTreeMap::new(),
                path_entries: vec![bin],
                python_version: "3.0.0".to_owned(),
                image: script.image,
                ..Built::default()
            })
        }
        .boxed()
    }
}
