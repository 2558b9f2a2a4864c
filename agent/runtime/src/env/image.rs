//! Environments that are container images: pulled, built from a context, or with a conda environment beside them.
//!
//! Their directories contain little more than the marker: the image is stored by the container engine, and the marker
//! contains the engine's ID of it. Owns every call to the engine about images. Hides how images are fetched and
//! built, which of them are ours ([`held`]), and which image can run a conda environment of this machine
//! ([`carrier`]).
//!
//! Invariants: an image that was here before us is never removed; an engine that does not answer is waited for
//! ([`AcquireError::is_waiting`]), and its silence never means that it has no such image.
//!
//! No tasks except the removal of a container that nobody waits for any more.

mod build;
mod carrier;
mod context;
mod credentials;
mod gpu;
mod held;
mod layers;
mod pull;
mod reference;
mod refusal;
mod together;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bollard::models::ImageInspect;

use super::cache::EnvCache;
use super::conda::Conda;
use super::glibc::Glibc;
use super::{AcquireError, EnvBuilder, EnvConfig, EnvLease, Image};
use crate::docker::{Docker, DockerError};

use build::Build;
use carrier::Carriers;
use pull::Pull;
use together::Together;

pub use gpu::{GpuVerdict, judge_gpu};

/// How long the engine may take for calls without downloads.
const ASK: Duration = Duration::from_secs(60);
/// How long it may take to answer a ping.
const PING: Duration = Duration::from_secs(10);

const LOOK: &str = "look at an image";

/// Variables of an image that mislead any Python but its own.
const MISLEADING: [&str; 2] = ["PYTHONHOME", "PYTHONPATH"];

/// The label of images that are built for an environment; its value is the environment's key.
const LABEL: &str = "agentd.environment";

/// The builders of environments with images.
pub(super) struct Images {
    access: Arc<Access>,
    conda: Conda,
    pull: Arc<dyn EnvBuilder>,
    build: Arc<dyn EnvBuilder>,
    carriers: Carriers,
}

impl Images {
    pub(super) fn new(config: Arc<EnvConfig>, docker: Docker, conda: Conda) -> Images {
        let access = Arc::new(Access { config, docker });
        Images {
            pull: Arc::new(Pull::new(access.clone())),
            build: Arc::new(Build::new(access.clone())),
            carriers: Carriers::new(access.clone()),
            conda,
            access,
        }
    }

    /// The builders of environments that are a single image.
    pub(super) fn builders(&self) -> [Arc<dyn EnvBuilder>; 2] {
        [self.pull.clone(), self.build.clone()]
    }

    /// The builder of an environment that is a fetched image.
    pub(super) fn pull(&self) -> &Arc<dyn EnvBuilder> {
        &self.pull
    }

    /// The builder of conda environments for this machine.
    pub(super) fn conda(&self) -> &Conda {
        &self.conda
    }

    /// The builder of conda environments that also work in an image, and the image's C library.
    pub(super) async fn conda_in(
        &self,
        ground: &EnvLease,
    ) -> Result<(Arc<dyn EnvBuilder>, Glibc), AcquireError> {
        let glibc = self.carriers.glibc(image_of(ground)?).await?;
        Ok((Arc::new(self.conda.on(glibc)), glibc))
    }

    /// The builder of the record that the two work together.
    pub(super) fn together(
        &self,
        ground: &EnvLease,
        glibc: Glibc,
        packages: &EnvLease,
    ) -> Arc<dyn EnvBuilder> {
        Arc::new(Together::new(self.access.clone(), ground, glibc, packages))
    }

    /// Removes the images that were brought for environments that are gone.
    pub(super) async fn discard(&self, cache: &EnvCache) {
        self.carriers.discard().await;
        held::discard(&self.access, cache).await;
    }
}

/// The image of an environment that has one.
fn image_of(lease: &EnvLease) -> Result<&Image, AcquireError> {
    lease.image().ok_or_else(|| AcquireError::Failed {
        step: "reading the record of an image",
        detail: format!("{} names none", lease.key()),
    })
}

/// The engine's calls for images.
#[derive(Debug)]
struct Access {
    config: Arc<EnvConfig>,
    docker: Docker,
}

/// An image that the engine has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    image: Image,
    /// Including layers that it shares with others.
    size: u64,
    platform: String,
    /// Its names.
    tags: Vec<String>,
}

impl Access {
    /// Fails if the engine does not answer.
    async fn ping(&self) -> Result<(), AcquireError> {
        self.docker.ping(PING).await.map_err(AcquireError::engine("asking the container engine"))
    }

    /// The engine's image with this name; `None` when it answers that it has none.
    async fn look(&self, name: &str) -> Result<Option<Found>, DockerError> {
        let asked = name.to_owned();
        let answer =
            self.docker.ask(LOOK, ASK, |client| async move { client.inspect_image(&asked).await }).await;
        match answer {
            Ok(inspect) => Ok(Some(Found::read(name, inspect))),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn inspect(&self, name: &str) -> Result<Option<Found>, AcquireError> {
        self.look(name).await.map_err(AcquireError::engine("looking at the image"))
    }

    /// Refuses an image that cannot run on this machine.
    fn admit(&self, found: &Found) -> Result<(), AcquireError> {
        let node = platform();
        if found.platform != node {
            let (image, has) = (found.image.reference.clone(), found.platform.clone());
            return Err(AcquireError::WrongPlatform { image, has, node });
        }
        self.admit_gpu(&found.image.reference, found.image.gpu)
    }

    /// Refuses an image for GPUs on a machine without any.
    fn admit_gpu(&self, image: &str, says: Option<bool>) -> Result<(), AcquireError> {
        let node = *self.config.gpus.borrow();
        match judge_gpu(says, node, false) {
            GpuVerdict::Refuse(why) => {
                Err(AcquireError::NeedsGpu { image: image.to_owned(), why: why.to_owned() })
            }
            _ => Ok(()),
        }
    }
}

impl Found {
    fn read(reference: &str, inspect: ImageInspect) -> Found {
        let config = inspect.config.unwrap_or_default();
        let pairs = config.env.unwrap_or_default().into_iter();
        let pair =
            |line: String| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        let env: BTreeMap<String, String> = pairs.filter_map(pair).collect();
        let labels: HashMap<String, String> = config.labels.unwrap_or_default();
        let os = inspect.os.filter(|os| !os.is_empty()).unwrap_or_else(|| "linux".to_owned());
        let arch = inspect.architecture.filter(|arch| !arch.is_empty());
        Found {
            image: Image {
                id: inspect.id.unwrap_or_default(),
                reference: reference.to_owned(),
                gpu: gpu::of_image(&env, &labels).or_else(|| gpu::of_name(reference)),
                env,
                mounts: Vec::new(),
            },
            size: inspect.size.and_then(|size| u64::try_from(size).ok()).unwrap_or(0),
            platform: format!("{os}/{}", arch.as_deref().unwrap_or_else(|| architecture())),
            tags: inspect.repo_tags.unwrap_or_default(),
        }
    }
}

/// This machine's platform, in the notation of images.
fn platform() -> String {
    format!("linux/{}", architecture())
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
