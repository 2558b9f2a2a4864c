//! Which images are ours: those that we pulled or built for an environment and that did not exist before.
//!
//! They are recorded before the engine is asked, in a file beside the environment (`ROOT/KEY.image`), which outlives
//! it: so an image is found again if its environment was removed, or never finished, while the engine did not answer.
//! Removing an environment never waits for the engine.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use agent_model::failpoint;
use serde::{Deserialize, Serialize};

use super::super::AcquireError;
use super::super::cache::{EnvCache, EnvDir};
use super::{ASK, Access};
use crate::docker::DockerError;

/// The images that were brought for one environment.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Held {
    #[serde(skip)]
    path: PathBuf,
    images: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    /// The name that we gave it, or asked for.
    reference: String,
    /// Its ID; unknown until the engine is done.
    id: Option<String>,
}

impl Held {
    /// The record of the environment in a directory.
    pub(super) fn beside(prefix: &Path) -> Held {
        Held::read(&prefix.with_extension("image"))
    }

    fn read(path: &Path) -> Held {
        let known = fs::read(path).ok().and_then(|text| serde_json::from_slice::<Held>(&text).ok());
        Held { path: path.to_owned(), ..known.unwrap_or_default() }
    }

    /// Whether we brought an existing image: by an earlier build, or by an interrupted one.
    pub(super) fn owns(&self, reference: &str, id: &str) -> bool {
        let own =
            |entry: &Entry| entry.reference == reference && entry.id.as_ref().is_none_or(|known| known == id);
        self.images.iter().any(own)
    }

    /// Records that an image is about to be brought.
    pub(super) fn intend(&mut self, reference: &str) -> Result<(), AcquireError> {
        let entry = Entry { reference: reference.to_owned(), id: None };
        if !self.images.contains(&entry) {
            self.images.push(entry);
        }
        self.write().map_err(AcquireError::io("write", &self.path))
    }

    /// Records that it was not brought after all: if others bring it later, it is not ours.
    pub(super) fn give_up(&mut self, reference: &str) {
        self.images.retain(|entry| entry.reference != reference || entry.id.is_some());
        if let Err(error) = self.write() {
            tracing::debug!(path = %self.path.display(), %error, "cannot strike image off list");
        }
    }

    /// Records that it was brought.
    pub(super) fn brought(&mut self, reference: &str, id: &str) -> Result<(), AcquireError> {
        let entry = Entry { reference: reference.to_owned(), id: Some(id.to_owned()) };
        self.images.retain(|known| *known != entry && !(known.reference == reference && known.id.is_none()));
        self.images.push(entry);
        self.write().map_err(AcquireError::io("write", &self.path))
    }

    /// An incomplete file counts as absent: then an image stays that could be removed.
    fn write(&self) -> io::Result<()> {
        if self.images.is_empty() {
            return fs::remove_file(&self.path);
        }
        failpoint::hit("env.image.note")?;
        agent_fs::write_whole(&self.path, &serde_json::to_vec(self)?)
    }
}

/// Removes images that were brought for environments that are gone, or that have another image now.
pub(super) async fn discard(access: &Access, cache: &EnvCache) {
    for place in cache.with_images() {
        if let Err(error) = discard_of(access, &place).await {
            tracing::debug!(place = place.name(), %error, "cannot remove unneeded image yet");
        }
    }
}

async fn discard_of(access: &Access, place: &EnvDir) -> Result<(), DockerError> {
    let Ok(Some(_guard)) = place.hold_off() else { return Ok(()) };
    let needed = place.marker().and_then(|marker| marker.image).map(|image| image.id);
    let mut held = Held::read(&place.images());
    let (kept, excess): (Vec<Entry>, Vec<Entry>) =
        held.images.into_iter().partition(|entry| needed.is_some() && entry.id == needed);
    if excess.is_empty() {
        return Ok(());
    }
    held.images = kept;
    let mut failed = None;
    for entry in excess {
        match remove(access, &entry).await {
            Ok(()) => tracing::info!(image = entry.reference, place = place.name(), "removed an image"),
            Err(error) => {
                held.images.push(entry);
                failed = Some(error);
            }
        }
    }
    if let Err(error) = held.write() {
        tracing::warn!(place = place.name(), %error, "cannot note which images are ours");
    }
    failed.map_or(Ok(()), Err)
}

/// Removes our name from an image; the engine deletes the image with its last name.
async fn remove(access: &Access, entry: &Entry) -> Result<(), DockerError> {
    let named = access.look(&entry.reference).await?;
    let is_it = |id: &str| entry.id.as_deref().is_none_or(|known| known == id);
    if named.is_some_and(|found| is_it(&found.image.id)) {
        return delete(access, &entry.reference).await;
    }
    let Some(id) = &entry.id else { return Ok(()) };
    match access.look(id).await? {
        // It has a name that is not ours.
        Some(found) if !found.tags.is_empty() => Ok(()),
        Some(_) => delete(access, id).await,
        None => Ok(()),
    }
}

async fn delete(access: &Access, name: &str) -> Result<(), DockerError> {
    const STEP: &str = "remove an image";
    failpoint::hit("env.image.remove").map_err(DockerError::planned(STEP))?;
    let name = name.to_owned();
    let options = None::<bollard::query_parameters::RemoveImageOptions>;
    let removed =
        access.docker.ask(STEP, ASK, |client| async move { client.remove_image(&name, options, None).await });
    match removed.await {
        Err(error) if !error.is_missing() => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_was_brought_is_ours_and_what_was_there_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("image-0");
        let mut held = Held::beside(&prefix);
        assert!(!held.owns("a:1", "x"));
        held.intend("a:1").unwrap();
        assert!(Held::beside(&prefix).owns("a:1", "x"), "a build that was cut short brought it");
        held.brought("a:1", "x").unwrap();
        let mut held = Held::beside(&prefix);
        held.intend("a:2").unwrap();
        held.give_up("a:2");
        assert!(held.owns("a:1", "x") && !held.owns("a:1", "y") && !held.owns("a:2", "x"));
        assert_eq!(held.images.len(), 1);
        fs::write(prefix.with_extension("image"), "{").unwrap();
        assert!(!Held::beside(&prefix).owns("a:1", "x"));
    }
}
