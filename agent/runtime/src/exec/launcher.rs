//! The one way to start and find jobs, whether in a container or as processes of the machine.

use agent_shim::{JobDir, Launch};

use super::{Containers, Enclosure, Executor as _, Found, LaunchError, Process, ReattachError, Running};
use crate::docker::DockerError;

/// Starts jobs either way. What was started is found again, and followed, in one way.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// For jobs on the machine itself.
    pub processes: Process,
    /// For jobs in containers.
    pub containers: Containers,
}

impl Launcher {
    /// Does what takes long and may have to wait for others before a command is started in a container. May be dropped,
    /// and done again.
    pub async fn prepare(
        &self,
        dir: &JobDir,
        launch: &Launch,
        enclosure: &Enclosure,
    ) -> Result<(), LaunchError> {
        Box::pin(self.containers.prepare(dir, launch, enclosure)).await
    }

    /// Starts the command of a job, as [`Executor::launch`](super::Executor::launch) says.
    pub async fn launch(
        &self,
        dir: &JobDir,
        launch: &Launch,
        enclosure: Option<&Enclosure>,
    ) -> Result<Running, LaunchError> {
        match enclosure {
            None => self.processes.launch(dir, launch).await,
            Some(enclosure) => Box::pin(self.containers.within(enclosure).launch(dir, launch)).await,
        }
    }

    /// What became of a job, as [`Executor::reattach`](super::Executor::reattach) says.
    pub async fn reattach(&self, dir: &JobDir) -> Result<Found, ReattachError> {
        super::process::reattach(dir).await
    }

    /// Removes what is left of a job that is over beyond its directory.
    pub async fn clear(&self, dir: &JobDir) -> Result<(), DockerError> {
        self.containers.clear(dir).await
    }
}
