//! Finds out which images can run a conda environment of this machine: those whose C library is new enough for it.
//!
//! The library is read from a container of the image that is made and never started, so that nothing of the image
//! runs. Each image is examined once.

use std::collections::HashMap;
use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bollard::models::{ContainerCreateBody, HostConfig, HostConfigLogConfig};
use bollard::query_parameters::{
    DownloadFromContainerOptionsBuilder, ListContainersOptionsBuilder, LogsOptionsBuilder,
    StartContainerOptions, WaitContainerOptions,
};
use futures_util::{StreamExt, TryStreamExt};
use parking_lot::Mutex;

use super::super::glibc::Glibc;
use super::super::{AcquireError, Image};
use super::{ASK, Access, MISLEADING};
use crate::docker::{Docker, DockerError};

/// The label of our containers; its value is the process that made one.
const PROBE: &str = "agentd.probe";
const LOOK: &str = "look into an image";
/// The paths of the C library in various distributions.
const LIBRARIES: [&str; 7] = [
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/lib/aarch64-linux-gnu/libc.so.6",
    "/lib64/libc.so.6",
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/lib/aarch64-linux-gnu/libc.so.6",
    "/usr/lib64/libc.so.6",
    "/usr/lib/libc.so.6",
];
/// The paths of the loader of another C library.
const MUSL: [&str; 2] = ["/lib/ld-musl-x86_64.so.1", "/lib/ld-musl-aarch64.so.1"];
/// How many links are followed, and how large a library may be, in bytes.
const LINKS: usize = 5;
const LARGEST: usize = 32 << 20;

/// The known C libraries of images.
pub(super) struct Carriers {
    access: Arc<Access>,
    known: Mutex<HashMap<String, Glibc>>,
    /// Containers from before a restart were looked for.
    tidy: AtomicBool,
}

impl Carriers {
    pub(super) fn new(access: Arc<Access>) -> Carriers {
        Carriers { access, known: Mutex::default(), tidy: AtomicBool::new(false) }
    }

    /// The C library of an image; an error if no conda environment works with it.
    pub(super) async fn glibc(&self, image: &Image) -> Result<Glibc, AcquireError> {
        let known = self.known.lock().get(&image.id).copied();
        if let Some(glibc) = known {
            return Ok(glibc);
        }
        let body = body(image, Vec::new(), vec!["/nothing".to_owned()], Vec::new());
        let container = Probe::create(&self.access.docker, body).await.map_err(unread)?;
        let glibc = match library(&container).await.map_err(unread)? {
            Some(bytes) => Glibc::of_library(&bytes).ok_or("its C library does not say its version"),
            None if has_musl(&container).await.map_err(unread)? => {
                Err("its C library is musl, and conda packages need glibc")
            }
            None => Err("it has no C library"),
        };
        container.remove().await;
        let refused =
            |why: &str| AcquireError::CannotCarry { image: image.reference.clone(), why: why.to_owned() };
        let glibc = glibc.map_err(refused)?;
        self.known.lock().insert(image.id.clone(), glibc);
        Ok(glibc)
    }

    /// Removes containers from before a restart, once.
    pub(super) async fn discard(&self) {
        if self.tidy.load(Ordering::Relaxed) {
            return;
        }
        let own = std::process::id().to_string();
        let filter = HashMap::from([("label".to_owned(), vec![PROBE.to_owned()])]);
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filter).build();
        let list = |client: bollard::Docker| async move { client.list_containers(Some(options)).await };
        let Ok(found) = self.access.docker.ask("list containers", ASK, list).await else { return };
        for container in found {
            let labels = container.labels.unwrap_or_default();
            let made_by = labels.get(PROBE).cloned().unwrap_or_default();
            let lives = std::path::Path::new("/proc").join(&made_by).exists();
            if let (Some(id), false) = (container.id, made_by == own || lives) {
                remove(&self.access.docker, &id).await;
            }
        }
        self.tidy.store(true, Ordering::Relaxed);
    }
}

fn unread(error: DockerError) -> AcquireError {
    AcquireError::engine("looking into the image")(error)
}

/// A container without a network or rights.
fn body(image: &Image, binds: Vec<String>, entrypoint: Vec<String>, cmd: Vec<String>) -> ContainerCreateBody {
    ContainerCreateBody {
        image: Some(image.id.clone()),
        user: Some("65534:65534".to_owned()),
        // A name without a value removes the image's variable.
        env: Some(MISLEADING.into_iter().chain(["PYTHONDONTWRITEBYTECODE=1"]).map(str::to_owned).collect()),
        entrypoint: Some(entrypoint),
        cmd: Some(cmd),
        working_dir: Some("/".to_owned()),
        labels: Some(HashMap::from([(PROBE.to_owned(), std::process::id().to_string())])),
        host_config: Some(HostConfig {
            binds: Some(binds),
            network_mode: Some("none".to_owned()),
            cap_drop: Some(vec!["ALL".to_owned()]),
            security_opt: Some(vec!["no-new-privileges".to_owned()]),
            log_config: Some(HostConfigLogConfig { typ: Some("json-file".to_owned()), config: None }),
            ..HostConfig::default()
        }),
        ..ContainerCreateBody::default()
    }
}

/// A container of ours, which is removed on drop.
struct Probe {
    docker: Docker,
    id: Option<String>,
}

impl Probe {
    async fn create(docker: &Docker, body: ContainerCreateBody) -> Result<Probe, DockerError> {
        let create = |client: bollard::Docker| async move { client.create_container(None, body).await };
        let made = docker.ask(LOOK, ASK, create).await?;
        Ok(Probe { docker: docker.clone(), id: Some(made.id) })
    }

    fn id(&self) -> String {
        self.id.clone().unwrap_or_default()
    }

    async fn remove(mut self) {
        if let Some(id) = self.id.take() {
            remove(&self.docker, &id).await;
        }
    }

    /// The file at a path: its content, or the target of a link. `None` if there is none.
    async fn file(&self, path: &str) -> Result<Option<Entry>, DockerError> {
        let (id, options) = (self.id(), DownloadFromContainerOptionsBuilder::new().path(path).build());
        let read = |client: bollard::Docker| async move {
            let mut parts = client.download_from_container(&id, Some(options));
            let mut bytes = Vec::new();
            while let Some(part) = parts.try_next().await? {
                bytes.extend_from_slice(&part);
                if bytes.len() > LARGEST {
                    break;
                }
            }
            Ok(bytes)
        };
        match self.docker.ask(LOOK, ASK, read).await {
            Ok(bytes) => Ok(entry_of(&bytes)),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Probe {
    /// Removes the container in the background. If the runtime is gone as well, this is done after the next start.
    fn drop(&mut self) {
        let (Some(id), Ok(runtime)) = (self.id.take(), tokio::runtime::Handle::try_current()) else { return };
        let docker = self.docker.clone();
        runtime.spawn(async move { remove(&docker, &id).await });
    }
}

async fn remove(docker: &Docker, id: &str) {
    if let Err(error) = docker.remove_container(id, ASK).await {
        tracing::warn!(%error, "cannot remove probe container yet");
    }
}

enum Entry {
    Content(Vec<u8>),
    Link(String),
    Other,
}

/// The first entry of a tar archive.
fn entry_of(bytes: &[u8]) -> Option<Entry> {
    let mut archive = tar::Archive::new(bytes);
    let mut entry = archive.entries().ok()?.next()?.ok()?;
    if let Some(target) = entry.link_name().ok().flatten() {
        return Some(Entry::Link(target.to_string_lossy().into_owned()));
    }
    if !entry.header().entry_type().is_file() {
        return Some(Entry::Other);
    }
    let mut content = Vec::new();
    entry.read_to_end(&mut content).ok()?;
    Some(Entry::Content(content))
}

async fn library(container: &Probe) -> Result<Option<Vec<u8>>, DockerError> {
    for path in LIBRARIES {
        let mut path = path.to_owned();
        for _ in 0..LINKS {
            match container.file(&path).await? {
                Some(Entry::Content(bytes)) => return Ok(Some(bytes)),
                Some(Entry::Link(target)) => path = followed(&path, &target),
                Some(Entry::Other) | None => break,
            }
        }
    }
    Ok(None)
}

/// The target of a link in an image.
fn followed(link: &str, target: &str) -> String {
    if target.starts_with('/') {
        return target.to_owned();
    }
    let parent = link.rsplit_once('/').map_or("", |(parent, _)| parent);
    format!("{parent}/{target}")
}

async fn has_musl(container: &Probe) -> Result<bool, DockerError> {
    for path in MUSL {
        if container.file(path).await?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Starts the Python of a conda environment in a container of an image, as a user without rights; returns why it does
/// not work, if so.
pub(super) async fn try_python(
    access: &Access,
    image: &Image,
    python: &str,
    mounts: &[String],
) -> Result<Option<String>, AcquireError> {
    let binds = mounts.iter().map(|path| format!("{path}:{path}:ro")).collect();
    let code = ["-I", "-B", "-c", "import sys, os, math, json"].map(str::to_owned).to_vec();
    let body = body(image, binds, vec![python.to_owned()], code);
    let container = Probe::create(&access.docker, body).await.map_err(unread)?;
    let id = container.id();
    let start = |client: bollard::Docker| async move {
        client.start_container(&id, None::<StartContainerOptions>).await
    };
    let started = access.docker.ask(LOOK, ASK, start).await;
    let why = match started {
        Err(DockerError::Refused { message, .. }) => Some(message),
        Err(error) => return Err(AcquireError::Engine(error)),
        Ok(()) => ended(access, &container).await.map_err(unread)?,
    };
    container.remove().await;
    Ok(why)
}

/// How a container ended: `None` if successful, else its last output.
async fn ended(access: &Access, container: &Probe) -> Result<Option<String>, DockerError> {
    let id = container.id();
    let wait = |client: bollard::Docker| async move {
        let mut wait = client.wait_container(&id, None::<WaitContainerOptions>);
        match wait.next().await {
            Some(Ok(answer)) => Ok(answer.status_code),
            // The library reports every other exit code as an error of its own.
            Some(Err(bollard::errors::Error::DockerContainerWaitError { code, .. })) => Ok(code),
            Some(Err(error)) => Err(error),
            None => Ok(-1),
        }
    };
    let code = access.docker.ask(LOOK, ASK, wait).await?;
    if code == 0 {
        return Ok(None);
    }
    let id = container.id();
    let options = LogsOptionsBuilder::new().stdout(true).stderr(true).tail("5").build();
    let read = |client: bollard::Docker| async move {
        let lines: Vec<_> = client.logs(&id, Some(options)).try_collect().await?;
        Ok(lines.iter().map(ToString::to_string).collect::<String>())
    };
    let said = access.docker.ask(LOOK, ASK, read).await?;
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Ok(Some(format!("its Python returned {code} in it: {}", lines.join(" | "))))
}
