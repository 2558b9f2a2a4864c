//! The container spec of a job, its user in there, and the removal of containers that nobody needs.
//!
//! Only a job whose environment is an image runs in a container.

use std::sync::Arc;
use std::time::Duration;

use agent_model::JobSpec;
use agent_model::container::Options;
use agent_model::env::EnvSpec;
use agent_model::protocol::record::JobUser;
use agent_runtime::env::EnvLease;
use agent_runtime::exec::{ContainerSpec, Containers, Executor};
use agent_shim::JobDir;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::journal::Journal;
use crate::config::Config;

/// How often unneeded containers are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(15);

/// How long the end of a replica waits for the removal of its container; a container that is not removed by then is
/// left to the sweep.
const CLEAR_WITHIN: Duration = Duration::from_secs(20);

/// An ordinary user without rights, used if none is configured.
const NOBODY: (&str, u32) = ("nobody", 65_534);

/// The container spec of a job; `None` for one that runs on the machine itself. `gpus` are the UUIDs of its GPUs.
pub(crate) fn of(environment: &EnvLease, spec: &JobSpec, gpus: &[String]) -> Option<ContainerSpec> {
    let image = environment.image()?.clone();
    let gpus = gpus.to_vec();
    // Options that are not allowed were refused when the job was validated.
    let options = Options::parse(&spec.resources.docker_args).unwrap_or_default();
    Some(ContainerSpec { image, shm: spec.resources.shm, gpus, options })
}

/// Whether it is known before the build that an environment is an image. A named one may also turn out to be one.
pub(crate) fn is_sure(environment: &EnvSpec) -> bool {
    matches!(environment, EnvSpec::Image { .. } | EnvSpec::Build { .. })
}

/// The user in a container of a job that would run on the machine itself as `user`; `None` is the daemon's own user,
/// if it cannot switch users. Otherwise never root. The machine's groups mean nothing inside.
pub(crate) fn user(config: &Config, user: Option<JobUser>) -> Option<JobUser> {
    let (name, id) = NOBODY;
    let nobody = JobUser { name: name.to_owned(), uid: id, gid: id, groups: Vec::new(), home: String::new() };
    let named = config.devices.container_user.clone().or(user).filter(|user| user.uid != 0);
    agent_spawn::serves_others().then(|| JobUser { groups: Vec::new(), ..named.unwrap_or(nobody) })
}

/// Removes the container of an ended job, unless the engine takes too long.
pub(crate) async fn clear(executor: &dyn Executor, dir: &JobDir) {
    match tokio::time::timeout(CLEAR_WITHIN, executor.clear(dir)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(dir = %dir.path().display(), %error, "the container of a job stays for now"),
        Err(_) => warn!(dir = %dir.path().display(), "the container of a job stays for now"),
    }
}

/// Runs forever: removes containers that nobody needs.
pub(crate) async fn sweep(journal: Arc<dyn Journal>, containers: Containers) {
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
        // For a replica with an ending, it is already known why its container ended.
        let is_open =
            |replica: &_| open.iter().any(|record| record.replica == *replica && record.ending.is_none());
        match containers.sweep(&is_open).await {
            Ok(0) => {}
            Ok(swept) => info!(swept, "removed containers that nobody needed"),
            // Not a warning: a node without containers needs no engine.
            Err(error) => debug!(%error, "cannot sweep containers"),
        }
    }
}
