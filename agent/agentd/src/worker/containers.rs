//! What surrounds a job that runs in a container, whom it runs as there, and the removal of containers nobody needs.
//!
//! A job whose environment is an image runs in a container; nothing else does.

use std::sync::Arc;
use std::time::Duration;

use agent_model::JobSpec;
use agent_model::container::Options;
use agent_model::env::EnvSpec;
use agent_runtime::env::EnvLease;
use agent_runtime::exec::{ContainerSpec, Containers, Executor};
use agent_shim::JobDir;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::journal::Journal;
use crate::config::{Config, JobUser};

/// How often containers are looked for that nobody needs.
const SWEEP_EVERY: Duration = Duration::from_secs(15);

/// How long the directory of a job stays for its container to be removed, when the outcome is told already; what is
/// not removed then goes with a sweep.
const CLEAR_WITHIN: Duration = Duration::from_secs(20);

/// An ordinary user without rights, where nobody named one.
const NOBODY: (&str, u32) = ("nobody", 65_534);

/// What surrounds a job; `None` for one that runs on the machine itself. `gpus` are those it was given, by UUID.
pub(crate) fn of(environment: &EnvLease, spec: &JobSpec, gpus: &[String]) -> Option<ContainerSpec> {
    let image = environment.image()?.clone();
    let gpus = gpus.to_vec();
    // What is not allowed was refused when the job was validated.
    let options = Options::parse(&spec.resources.docker_args).unwrap_or_default();
    Some(ContainerSpec { image, shm: spec.resources.shm, gpus, options })
}

/// Whether an environment is surely an image before it is there. A name may turn out to be one.
pub(crate) fn is_sure(environment: &EnvSpec) -> bool {
    matches!(environment, EnvSpec::Image { .. } | EnvSpec::Build { .. })
}

/// Whom a job in a container runs as, which on the machine itself would run as `user`; the daemon's own user where it
/// may not choose, and never root. The names of the machine's groups mean nothing inside.
pub(crate) fn user(config: &Config, user: Option<JobUser>) -> Option<JobUser> {
    let (name, id) = NOBODY;
    let nobody = JobUser { name: name.to_owned(), uid: id, gid: id, groups: Vec::new(), home: String::new() };
    let named = config.devices.container_user.clone().or(user).filter(|user| user.uid != 0);
    agent_spawn::serves_others().then(|| JobUser { groups: Vec::new(), ..named.unwrap_or(nobody) })
}

/// Removes the container of a job that is over, if the engine does so soon.
pub(crate) async fn clear(executor: &dyn Executor, dir: &JobDir) {
    match tokio::time::timeout(CLEAR_WITHIN, executor.clear(dir)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(dir = %dir.path().display(), %error, "the container of a job stays for now"),
        Err(_) => warn!(dir = %dir.path().display(), "the container of a job stays for now"),
    }
}

/// Looks for containers that nobody needs, again and again.
pub(crate) async fn sweep<J: Journal>(journal: Arc<J>, containers: Containers) {
    let mut next = Instant::now() + SWEEP_EVERY;
    loop {
        tokio::time::sleep_until(next).await;
        next = Instant::now() + SWEEP_EVERY;
        let open = match journal.open_replicas().await {
            Ok(open) => open,
            Err(error) => {
                warn!(%error, "cannot sweep containers");
                continue;
            }
        };
        // Of those that have an ending it was found out already why they ended.
        let is_open =
            |replica: &_| open.iter().any(|record| record.replica == *replica && record.ending.is_none());
        match containers.sweep(is_open).await {
            Ok(0) => {}
            Ok(swept) => info!(swept, "removed containers that nobody needed"),
            // Nobody needs an engine who has no containers.
            Err(error) => debug!(%error, "cannot sweep containers"),
        }
    }
}
