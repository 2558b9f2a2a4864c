//! Jobs in containers, each with the shim as the first process.
//!
//! The container engine makes the container and starts the shim in it, and is not needed after that: the shim owns
//! log, stop, lease and exit record, in the job directory. The container has only the job's part of that directory,
//! at the same path. So an engine that does not answer does not affect a running job, and the fate of a job is found
//! out, as of any other, from its directory: the shim's lock shows whether it lives, and when the first process of a
//! container ends, the kernel kills all others.
//!
//! Owns: the names and labels of containers, `container.json` in the job directory (`note`), what a container may do
//! (`body`), how the shim gets into any image and to its directory (`supervisor`), and the description of why a
//! container ended (`fate`).
//!
//! Invariants: a container is removed or reported on only if its label names this very directory, whatever a file
//! says; the job directory has the container's name before the engine is asked to make it, and the engine's ID before
//! anything is started in it; a container is removed by force only while nothing of the command was started, or when
//! its shim is gone; no answer of the engine is never taken for an answer.
//!
//! Networking is the host's own: the tracking endpoint listens on its loopback.

mod body;
mod supervisor;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::container::Options;
use agent_model::{ReplicaId, failpoint};
use agent_shim::{JobDir, Launch, User};
use bollard::Docker as Client;
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, InspectContainerOptions, ListContainersOptionsBuilder,
    StartContainerOptions,
};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::connection::{AGAIN, ANSWER, JobTrace};
use super::local::{last_words, remove_if_there, told_by};
use super::note::{Engine, Note};
use super::{LaunchError, fate};
use crate::docker::{Docker, DockerError, Image};

use supervisor::Door;
pub use supervisor::SupervisorError;

/// How long each call to the engine may take. It is pinged first, so that silence is noticed soon.
const ANSWERS: Duration = Duration::from_secs(5);
const CREATE: Duration = Duration::from_secs(60);
const START: Duration = Duration::from_secs(60);
const REMOVE: Duration = Duration::from_secs(30);
const LIST: Duration = Duration::from_secs(30);

/// How often the engine is asked whether a container still exists whose shim has not answered yet.
const STILL_THERE: Duration = Duration::from_millis(500);

/// Pause between two tries to take a name that is being released.
const NAME_AGAIN: Duration = Duration::from_millis(100);

/// The labels of containers, by which they are found again.
const JOB: &str = "agentd.job";
const REPLICA: &str = "agentd.replica";
const EPOCH: &str = "agentd.epoch";
const NODE: &str = "agentd.node";
const DIR: &str = "agentd.dir";

/// The container that a job runs in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerSpec {
    /// The image, and the directories of this machine that are mounted into it.
    pub image: Image,
    /// Size of its shared memory, in bytes; 0 is the usual 2 GiB.
    pub shm: u64,
    /// The GPUs it gets, by UUID.
    pub gpus: Vec<String>,
    /// The other options of the job.
    pub options: Options,
}

/// The containers of one node.
#[derive(Debug, Clone)]
pub struct Containers {
    docker: Docker,
    shim: PathBuf,
    node: String,
}

impl Containers {
    /// Those that `docker` makes for the node `node`, a name that no other node on that engine has.
    pub fn new(docker: Docker, shim: PathBuf, node: impl Into<String>) -> Containers {
        Containers { docker, shim, node: node.into() }
    }

    /// Makes the container and waits until the shim in it listens; the command is not started. Does nothing if it
    /// listens already, or if the job has ended or was lost. May be dropped and repeated.
    pub(super) async fn prepare(
        &self,
        dir: &JobDir,
        launch: &Launch,
        container_spec: &ContainerSpec,
    ) -> Result<(), LaunchError> {
        match told_by(dir).await? {
            JobTrace::Fresh => self.stand(dir, launch, container_spec).await,
            JobTrace::Live(_) | JobTrace::Ended(_) | JobTrace::Lost(_) => Ok(()),
        }
    }

    /// Removes the container of a job that is over, or that will not be started any more. Does nothing for a job
    /// without one, and for a job that runs.
    pub(super) async fn clear(&self, dir: &JobDir) -> Result<(), DockerError> {
        let Ok(Some(note)) = Note::read(dir) else { return Ok(()) };
        while dir.is_started() && dir.has_shim().unwrap_or(true) {
            if !dir.exit().exists() {
                return Ok(());
            }
            tokio::time::sleep(AGAIN).await; // a shim takes a moment to exit after it recorded how the job ended
        }
        // It may never have been made, because a container that is not this job's has the name.
        match self.named(note.key()).await? {
            Some((id, of)) if Path::new(&of) == dir.path() => self.remove(&id).await,
            Some((id, of)) => {
                tracing::warn!(dir = %dir.path().display(), id, of, "a container that is not this job's stays");
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Removes containers of this node that nobody needs: their shim is gone, and no runner still wants to know why
    /// (`is_open` is false). Returns how many there were.
    pub fn sweep<'a>(
        &'a self,
        is_open: &'a (dyn Fn(&ReplicaId) -> bool + Sync),
    ) -> BoxFuture<'a, Result<usize, DockerError>> {
        async move {
            let label = format!("{NODE}={}", self.node);
            let filters = HashMap::from([("label".to_owned(), vec![label])]);
            let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
            let step = "list its containers";
            failpoint::hit("node.container.list").map_err(DockerError::planned(step))?;
            let list = |client: Client| async move { client.list_containers(Some(options)).await };
            let mut swept = 0;
            for found in self.docker.ask(step, LIST, list).await? {
                let labels = found.labels.unwrap_or_default();
                let (Some(id), Some(dir)) = (found.id, labels.get(DIR).map(JobDir::new)) else { continue };
                let replica = labels.get(REPLICA).and_then(|replica| replica.parse::<ReplicaId>().ok());
                // If a directory cannot be examined, it may have a shim.
                let wanted =
                    replica.is_some_and(|replica| is_open(&replica)) || dir.has_shim().unwrap_or(true);
                if !wanted {
                    self.remove(&id).await?;
                    swept += 1;
                }
            }
            Ok(swept)
        }
        .boxed()
    }

    /// Starts a shim for a directory where nothing was started yet.
    pub(super) async fn stand(
        &self,
        dir: &JobDir,
        launch: &Launch,
        container_spec: &ContainerSpec,
    ) -> Result<(), LaunchError> {
        remove_if_there(dir.exit())?;
        dir.write_launch(&Launch { container: true, ..launch.clone() })?;
        supervisor::check(&self.shim)?;
        self.docker.ping(ANSWERS).await?;
        let door = Door::open(dir)?;
        let mut note = Note {
            version: Note::VERSION,
            name: format!("agentd-{}", launch.replica),
            id: String::new(),
            socket: self.docker.socket().to_owned(),
            engine: Engine::at(self.docker.socket()).await,
        };
        self.note(&note, dir)?;
        note.id = self.create(&note.name, dir, launch, container_spec).await?;
        self.note(&note, dir)?;
        if let Err(error) = self.start(&note.id).await {
            if !error.is_unknown() {
                let removed = self.remove(&note.id).await;
                tracing::debug!(name = note.name, ?removed, "cannot start container");
            }
            return Err(error.into());
        }
        tokio::select! {
            ready = self.until_ready(dir, &note.id) => ready,
            never = door.serve() => match never {},
        }
    }

    fn note(&self, note: &Note, dir: &JobDir) -> Result<(), LaunchError> {
        note.write(dir).map_err(|source| LaunchError::Note { dir: dir.path().to_owned(), source })
    }

    /// Makes the container; returns the engine's ID. One of the same name from an earlier try is removed first.
    async fn create(
        &self,
        name: &str,
        dir: &JobDir,
        launch: &Launch,
        container_spec: &ContainerSpec,
    ) -> Result<String, LaunchError> {
        let labels = self.labels(dir, launch);
        let body = body::body(dir, &self.shim, launch, container_spec, labels, shim_user());
        let step = "make a container";
        let deadline = Instant::now() + ANSWER;
        loop {
            failpoint::hit("node.container.create").map_err(DockerError::planned(step))?;
            let options = CreateContainerOptionsBuilder::default().name(name).build();
            let create = |client: Client| {
                let body = body.clone();
                async move { client.create_container(Some(options), body).await }
            };
            match self.docker.ask(step, CREATE, create).await {
                Ok(made) => {
                    for warning in made.warnings {
                        tracing::warn!(name, warning, "got warning of container engine");
                    }
                    return Ok(made.id);
                }
                Err(error) if error.is_conflict() && Instant::now() < deadline => {
                    self.free_name(name, dir).await?;
                }
                Err(error) if error.is_missing() => {
                    return Err(LaunchError::ImageGone {
                        reference: container_spec.image.reference.clone(),
                        source: error,
                    });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn labels(&self, dir: &JobDir, launch: &Launch) -> HashMap<String, String> {
        let replica = &launch.replica;
        let labels = [
            (JOB, replica.job.to_string()),
            (REPLICA, replica.to_string()),
            (EPOCH, replica.epoch.to_string()),
            (NODE, self.node.clone()),
            (DIR, dir.path().display().to_string()),
        ];
        labels.map(|(name, value)| (name.to_owned(), value)).into()
    }

    /// Removes a container of this job that has the name; nothing was ever started in it, or the directory would show
    /// it. A container that is not this job's is left alone.
    async fn free_name(&self, name: &str, dir: &JobDir) -> Result<(), LaunchError> {
        let Some((id, of)) = self.named(name).await? else { return Ok(()) };
        if Path::new(&of) != dir.path() {
            return Err(LaunchError::NameTaken { name: name.to_owned(), id, of });
        }
        match told_by(dir).await? {
            JobTrace::Fresh => {
                self.remove(name).await?;
                tokio::time::sleep(NAME_AGAIN).await;
                Ok(())
            }
            // Its shim was about to start at the look before.
            _ => Err(LaunchError::Silent { dir: dir.path().to_owned(), after: Duration::ZERO }),
        }
    }

    /// The container with a name, and the job directory in its label; empty if it has no such label.
    async fn named(&self, name: &str) -> Result<Option<(String, String)>, DockerError> {
        let step = "look whose container has the name";
        failpoint::hit("node.container.look").map_err(DockerError::planned(step))?;
        let ask = |client: Client| async move {
            client.inspect_container(name, None::<InspectContainerOptions>).await
        };
        let found = match self.docker.ask(step, LIST, ask).await {
            Err(error) if error.is_missing() => return Ok(None),
            found => found?,
        };
        let labels = found.config.and_then(|config| config.labels).unwrap_or_default();
        let id = found.id.unwrap_or_default().chars().take(12).collect();
        Ok(Some((id, labels.get(DIR).cloned().unwrap_or_default())))
    }

    async fn start(&self, id: &str) -> Result<(), DockerError> {
        let step = "start a container";
        failpoint::hit("node.container.start").map_err(DockerError::planned(step))?;
        let start =
            |client: Client| async move { client.start_container(id, None::<StartContainerOptions>).await };
        self.docker.ask(step, START, start).await
    }

    async fn remove(&self, key: &str) -> Result<(), DockerError> {
        failpoint::hit("node.container.remove").map_err(DockerError::planned("remove a container"))?;
        self.docker.remove_container(key, REMOVE).await
    }

    /// Waits until the shim of a started container listens.
    async fn until_ready(&self, dir: &JobDir, id: &str) -> Result<(), LaunchError> {
        let deadline = Instant::now() + ANSWER;
        let mut ask_at = Instant::now() + STILL_THERE;
        while Instant::now() < deadline {
            if !matches!(told_by(dir).await?, JobTrace::Fresh) {
                return Ok(());
            }
            if Instant::now() >= ask_at {
                ask_at = Instant::now() + STILL_THERE;
                let state = fate::inspect(&self.docker, id).await?;
                if state.running != Some(true) && matches!(told_by(dir).await?, JobTrace::Fresh) {
                    let status = state.exit_code.unwrap_or_default();
                    let before = fate::last_words(&self.docker, id).await;
                    let said = [state.error.unwrap_or_default(), before, last_words(dir)];
                    let said = said.into_iter().find(|said| !said.is_empty()).unwrap_or_default();
                    let _ = self.remove(id).await; // else it is removed when the name is needed, or by a sweep
                    return Err(LaunchError::Unready { dir: dir.path().to_owned(), status, said });
                }
            }
            tokio::time::sleep(AGAIN / 2).await;
        }
        Err(LaunchError::Silent { dir: dir.path().to_owned(), after: ANSWER })
    }
}

/// The user that the shim of a container starts as: this process's user, who owns the job directory, or user 0 with a
/// helper; as user 0 it switches to the owner of the directory once it has it.
fn shim_user() -> User {
    match agent_spawn::has_helper() {
        true => User { uid: 0, gid: 0, groups: Vec::new() },
        false => User::own(),
    }
}
