//! Which view of the daemon's files jobs have: [`agent_shim::view`] is how they get it.
//!
//! A daemon that starts jobs as other users gives each job a layer over its environment where the machine can. The jobs of
//! a user's own daemon also see nothing of its state; whether that is possible is tried once, when the daemon starts,
//! because environments are checked less if no job can change them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use agent_model::protocol::record::JobUser;
use agent_runtime::env::EnvLease;
use agent_shim::view::{Cover, View};
use agent_shim::{JobDir, TRY_VIEW};
use tracing::warn;

use crate::config::Config;

/// Which view jobs have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Views {
    /// That of the machine.
    #[default]
    Machine,
    /// A layer over their environment.
    Layered,
    /// The same, and of this directory only what is theirs.
    Own(PathBuf),
}

impl Views {
    /// The view for jobs of this daemon. Blocking: tries it.
    pub(crate) fn find(config: &Config, shim: &Path) -> Views {
        if !config.jobs.view {
            return Views::Machine;
        }
        if agent_spawn::serves_others() {
            return Views::Layered;
        }
        match try_out(&config.state_dir, shim) {
            Ok(()) => Views::Own(config.state_dir.clone()),
            Err(why) => {
                warn!(%why, "jobs cannot be kept from its files");
                Views::Machine
            }
        }
    }

    /// No job can change an environment for others, and none can trace the daemon.
    pub(crate) fn keeps_out(&self) -> bool {
        matches!(self, Views::Own(_))
    }

    /// The view of one job outside of a container. Blocking: looks at its environment.
    pub(crate) fn of(&self, dir: &JobDir, environment: &EnvLease, user: Option<&JobUser>) -> Option<View> {
        let packages = environment.packages_in().filter(|packages| can_cover(packages, dir, user));
        let (environment, layer) = (packages.map(Path::to_owned), dir.layer());
        match self {
            Views::Machine => None,
            Views::Layered => environment.is_some().then_some(View { environment, layer, state: None }),
            Views::Own(state) => {
                let readable = ["envs", "data"].map(|part| state.join(part)).to_vec();
                let state = Cover { dir: state.clone(), readable, writable: vec![dir.data().to_owned()] };
                Some(View { environment, layer, state: Some(state) })
            }
        }
    }
}

/// Whether a layer can be over this directory: it is the daemon's or the job's own, and what the job writes beside its
/// packages is not lost in it.
fn can_cover(packages: &Path, dir: &JobDir, user: Option<&JobUser>) -> bool {
    let daemon = rustix::process::geteuid().as_raw();
    let owner = packages.metadata().map(|found| found.uid());
    let is_own = owner.is_ok_and(|owner| owner == daemon || Some(owner) == user.map(|user| user.uid));
    let home = user.map(|user| Path::new(&user.home));
    let above = [Some(dir.path()), home].into_iter().flatten().any(|place| place.starts_with(packages));
    is_own && !above && !["/", "/usr", "/usr/local"].iter().any(|system| packages == Path::new(system))
}

/// Tries it on the file system of the jobs, if there is one yet.
#[allow(clippy::disallowed_methods, reason = "it ends at once, and is part of the daemon's start")]
fn try_out(state_dir: &Path, shim: &Path) -> Result<(), String> {
    let jobs = super::jobs_dir(state_dir);
    let place = if jobs.exists() { jobs } else { std::env::temp_dir() };
    let place = place.join(format!(".view-{}", std::process::id()));
    let tried =
        agent_spawn::remove_tree(&place).and_then(|()| std::fs::create_dir_all(&place)).and_then(|()| {
            Command::new(shim).arg(TRY_VIEW).arg(&place).env_clear().stdin(Stdio::null()).output()
        });
    if let Err(error) = agent_spawn::remove_tree(&place) {
        warn!(path = %place.display(), %error, "cannot remove a trial");
    }
    match tried {
        Ok(tried) if tried.status.success() => Ok(()),
        Ok(tried) => Err(String::from_utf8_lossy(&tried.stdout).trim().to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
