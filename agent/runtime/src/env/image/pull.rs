//! Existing images: used as they are if the engine has them, else fetched.

use std::sync::Arc;

use agent_env::{Phase, Progress};
use agent_model::{EnvSpec, failpoint, size};
use bollard::models::CreateImageInfo;
use bollard::query_parameters::CreateImageOptionsBuilder;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};

use super::super::{AcquireError, BuildWorkspace, Built, EnvBuilder, EnvLease};
use super::credentials::Credentials;
use super::held::Held;
use super::layers::{Layers, Told};
use super::reference::Reference;
use super::{Access, gpu, image_of, platform, refusal};

/// Increased when the same identity would be built differently.
const VERSION: u32 = 1;
const PULL: &str = "pull an image";

/// Fetches images.
pub(super) struct Pull {
    access: Arc<Access>,
}

impl Pull {
    pub(super) fn new(access: Arc<Access>) -> Pull {
        Pull { access }
    }

    /// Fetches an image, and logs the progress of each layer. It is cancelled when nothing arrives for too long, and
    /// when this is dropped, because the connection closes.
    async fn fetch(&self, reference: &Reference, workspace: &BuildWorkspace) -> Result<(), AcquireError> {
        let credentials = Credentials::read(self.access.config.registry_credentials.as_deref())?;
        let ours = credentials.of(reference);
        if ours.is_none() && credentials.has_elsewhere() {
            workspace
                .say("credentials that a helper program keeps are not used: only those in the file itself");
        }
        let known = if ours.is_some() { " with credentials" } else { "" };
        workspace.say(&format!("pulling {} from {}{known}", reference.text, reference.host()));
        workspace.tell(Progress::of(Phase::Pull, &reference.text));
        failpoint::hit("env.image.pull").map_err(AcquireError::io("pull into", workspace.prefix()))?;
        let docker = &self.access.docker;
        let client = docker.client(PULL).await.map_err(AcquireError::Engine)?;
        let options = CreateImageOptionsBuilder::new().from_image(&reference.text).build();
        let mut told = std::pin::pin!(client.create_image(Some(options), None, ours));
        let (mut layers, stall) = (Layers::default(), workspace.stall());
        let mut last = tokio::time::Instant::now();
        loop {
            let next = tokio::time::timeout_at(last + stall, told.next()).await;
            let Ok(next) = next else {
                let detail = format!("nothing arrived for {} s", stall.as_secs());
                return Err(AcquireError::Registry { registry: reference.host().to_owned(), detail });
            };
            let info = match next {
                None => return Ok(()),
                Some(Ok(info)) => info,
                Some(Err(error)) => {
                    let done = layers.progress("").map_or(0, |progress| progress.done);
                    return Err(refusal::judge(reference, docker.judge(PULL, error)).midway(done));
                }
            };
            if follow(&mut layers, &info, &reference.text, workspace) {
                last = tokio::time::Instant::now();
            }
        }
    }

    /// The image; it is fetched if it is not there. Also returns whether we brought it.
    async fn have(
        &self,
        reference: &Reference,
        workspace: &BuildWorkspace,
    ) -> Result<(super::Found, bool), AcquireError> {
        let mut held = Held::beside(workspace.prefix());
        if let Some(found) = self.access.inspect(&reference.text).await? {
            workspace.say(&format!("{} is on this machine: {}", reference.text, found.image.id));
            let ours = held.owns(&reference.text, &found.image.id);
            if ours {
                held.brought(&reference.text, &found.image.id)?;
            }
            return Ok((found, ours));
        }
        if reference.registry.is_none() {
            return Err(AcquireError::ImageMissing {
                image: reference.text.clone(),
                registry: "this machine".to_owned(),
                denied: false,
                detail: "an image that is named by its content alone cannot be fetched".to_owned(),
            });
        }
        self.access.admit_gpu(&reference.text, gpu::of_name(&reference.text))?;
        held.intend(&reference.text)?;
        if let Err(error) = self.fetch(reference, workspace).await {
            if !matches!(error, AcquireError::Engine(_) | AcquireError::BrokenOff { .. }) {
                held.give_up(&reference.text);
            }
            return Err(error);
        }
        let found = self.access.inspect(&reference.text).await?.ok_or_else(|| AcquireError::Registry {
            registry: reference.host().to_owned(),
            detail: "the engine says that it pulled the image, and does not have it".to_owned(),
        })?;
        held.brought(&reference.text, &found.image.id)?;
        Ok((found, true))
    }
}

/// Passes on the engine's report on a layer; returns whether it shows progress.
pub(super) fn follow(
    layers: &mut Layers,
    info: &CreateImageInfo,
    what: &str,
    workspace: &BuildWorkspace,
) -> bool {
    let detail = info.progress_detail.as_ref();
    let told = Told {
        id: info.id.as_deref(),
        status: info.status.as_deref().unwrap_or_default(),
        current: detail.and_then(|detail| detail.current),
        total: detail.and_then(|detail| detail.total),
    };
    if let Some(line) = layers.hear(&told) {
        workspace.say(&line);
    }
    if let Some(progress) = layers.progress(what) {
        workspace.tell(progress);
    }
    Layers::is_progress(&told)
}

fn reference(spec: &EnvSpec) -> Result<Reference, AcquireError> {
    match spec {
        EnvSpec::Image { image, conda: None } => Reference::parse(image),
        other => Err(AcquireError::Unsupported { kind: other.kind() }),
    }
}

impl EnvBuilder for Pull {
    fn handles(&self, spec: &EnvSpec) -> bool {
        matches!(spec, EnvSpec::Image { conda: None, .. })
    }

    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        async move {
            let reference = reference(spec)?;
            self.access.ping().await?;
            Ok(format!("image {VERSION}\n{}\n{}", platform(), reference.text))
        }
        .boxed()
    }

    fn verify<'a>(
        &'a self,
        spec: &'a EnvSpec,
        lease: &'a EnvLease,
    ) -> BoxFuture<'a, Result<Option<String>, AcquireError>> {
        async move {
            let (reference, image) = (reference(spec)?, image_of(lease)?);
            Ok(match self.access.inspect(&reference.text).await? {
                None => Some(format!("the container engine has no {} any more", reference.text)),
                Some(found) if found.image.id != image.id => {
                    Some(format!("{} names another image now, {}", reference.text, found.image.id))
                }
                Some(_) => None,
            })
        }
        .boxed()
    }

    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        async move {
            let reference = reference(spec)?;
            let (found, ours) = self.have(&reference, workspace).await?;
            self.access.admit(&found)?;
            Ok(Built {
                summary: format!("{} ({})", reference.text, size::binary(found.size)),
                elsewhere: if ours { found.size } else { 0 },
                image: Some(found.image),
                ..Built::default()
            })
        }
        .boxed()
    }
}
