//! Files that a job logs: stores and returns them, never outside the job's own folder.
//!
//! The job can write to that folder too, and replace it, so every step starts from the open parent directory and
//! follows no link ([`agent_fs::open_beneath`]).

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_fs::{Links, open_beneath};
use agent_model::failpoint;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio_util::io::ReaderStream;

use super::Caller;
use super::answer::{Answer, Asked, Refusal};
use super::run::Run;

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY);

/// The folder of a job's artifacts.
#[derive(Debug, Clone)]
pub(super) struct Artifacts {
    root: PathBuf,
}

/// Where an artifact is: the segments below the folder.
type ArtifactPath = Vec<String>;

impl Artifacts {
    pub(super) fn of(run: &Run) -> Artifacts {
        Artifacts { root: run.facts.artifacts.clone() }
    }

    /// The entries of a folder of the run with this label; each path begins with `shown`.
    pub(super) fn list(&self, label: &str, path: &str, shown: &str) -> Result<Vec<Value>, Refusal> {
        let place = segments(label)?.into_iter().chain(segments(path)?).collect::<ArtifactPath>();
        let entries = match self.entries(&place) {
            Err(error) if is_absence(&error) => Vec::new(),
            other => other.map_err(|error| Refusal::disk("the artifacts cannot be listed", &error))?,
        };
        let prefix = if shown.is_empty() { String::new() } else { format!("{}/", shown.trim_matches('/')) };
        Ok(entries.into_iter().map(|entry| entry.show(&prefix)).collect())
    }

    fn entries(&self, place: &[String]) -> io::Result<Vec<FolderEntry>> {
        let directory = inside(&self.open_root()?, &join(place), DIRECTORY, Mode::empty())?;
        let mut entries = Vec::new();
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            if name.starts_with(PART) || matches!(name.as_str(), "." | "..") {
                continue;
            }
            if entries.len() == MOST_LISTED {
                return Err(io::Error::other(format!("there are more than {MOST_LISTED} of them")));
            }
            let seen = fs::statat(&directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(seen.st_mode) {
                FileType::Directory => entries.push(FolderEntry { name, size: None }),
                FileType::RegularFile => entries.push(FolderEntry { name, size: Some(seen.st_size) }),
                _ => {}
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn open_root(&self) -> io::Result<OwnedFd> {
        let (around, name) = self.around()?;
        inside(&around, &name, DIRECTORY, Mode::empty())
    }

    /// The open directory around the folder, and the name of the folder in it.
    fn around(&self) -> io::Result<(OwnedFd, String)> {
        let name = self.root.file_name().and_then(|name| name.to_str()).ok_or(ErrorKind::InvalidInput)?;
        let around = self.root.parent().ok_or(ErrorKind::InvalidInput)?;
        Ok((agent_fs::open_directory(around)?, name.to_owned()))
    }

    fn open(&self, place: &[String]) -> io::Result<std::fs::File> {
        agent_fs::open_file_beneath(self.open_root()?, join(place))
    }

    /// Makes a temporary file in the artifact's folder, and the folders above it.
    fn create(&self, place: &[String]) -> io::Result<ArtifactUpload> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let (name, folders) = place.split_last().ok_or(ErrorKind::InvalidInput)?;
        let (mut folder, root) = self.around()?;
        for segment in std::iter::once(&root).chain(folders) {
            match fs::mkdirat(&folder, segment.as_str(), Mode::from_raw_mode(0o775)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            folder = inside(&folder, segment, DIRECTORY, Mode::empty())?;
        }
        let part = format!("{PART}{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
        let file = inside(&folder, &part, flags, Mode::from_raw_mode(0o664))?;
        Ok(ArtifactUpload { file: Some(file.into()), folder, part: Some(part), name: name.clone() })
    }

    fn remove(&self, place: &[String]) -> io::Result<()> {
        let (name, folders) = place.split_last().ok_or(ErrorKind::InvalidInput)?;
        let folder = inside(&self.open_root()?, &join(folders), DIRECTORY, Mode::empty())?;
        Ok(fs::unlinkat(folder, name.as_str(), AtFlags::empty())?)
    }
}

/// The most entries of a folder that are listed; clients ask for all of them at once.
const MOST_LISTED: usize = 20_000;

/// The prefix of the name of an unfinished upload.
const PART: &str = ".agentd-upload-";

struct FolderEntry {
    name: String,
    /// Absent for a folder.
    size: Option<i64>,
}

impl FolderEntry {
    fn show(self, prefix: &str) -> Value {
        let path = format!("{prefix}{}", self.name);
        match self.size {
            Some(size) => json!({ "path": path, "is_dir": false, "file_size": size }),
            None => json!({ "path": path, "is_dir": true }),
        }
    }
}

/// An unfinished upload; its file is removed on drop unless it is finished.
struct ArtifactUpload {
    file: Option<std::fs::File>,
    folder: OwnedFd,
    part: Option<String>,
    name: String,
}

impl ArtifactUpload {
    fn finish(mut self) -> io::Result<()> {
        if let Some(part) = self.part.take() {
            let renamed =
                fs::renameat(self.folder.as_fd(), part.as_str(), self.folder.as_fd(), self.name.as_str());
            if let Err(error) = renamed {
                self.part = Some(part);
                return Err(error.into());
            }
        }
        Ok(())
    }
}

impl Drop for ArtifactUpload {
    fn drop(&mut self) {
        if let Some(part) = self.part.take() {
            let _ = fs::unlinkat(&self.folder, part.as_str(), AtFlags::empty()); // else it goes with the job
        }
    }
}

fn inside(folder: &OwnedFd, path: &str, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
    Ok(open_beneath(folder, path, flags, mode, Links::Never)?)
}

fn join(place: &[String]) -> String {
    if place.is_empty() { ".".to_owned() } else { place.join("/") }
}

/// The segments of a path, which must not lead out of the artifacts.
fn segments(path: &str) -> Result<ArtifactPath, Refusal> {
    let segments = path.split('/').filter(|segment| !segment.is_empty() && *segment != ".");
    segments
        .map(|segment| match segment {
            ".." => Err(Refusal::invalid(format!("`{path}` leads out of the artifacts"))),
            segment if segment.contains('\0') || segment.starts_with(PART) => {
                Err(Refusal::invalid(format!("`{segment}` cannot be the name of an artifact")))
            }
            segment => Ok(segment.to_owned()),
        })
        .collect()
}

/// The path for `EXPERIMENT/RUN/artifacts/PATH`, `EXPERIMENT/models/MODEL/artifacts/PATH` or the same of a trace.
async fn place(run: &Arc<Run>, address: &str) -> Result<ArtifactPath, Refusal> {
    let missing = || Refusal::missing(format!("there are no artifacts at `{address}`"));
    let segments = segments(address)?;
    let parts: Vec<&str> = segments.iter().map(String::as_str).collect();
    let (label, owner, path) = match parts.as_slice() {
        [experiment, kind @ ("models" | "traces"), id, "artifacts", path @ ..]
            if *experiment == run.experiment_id =>
        {
            ("", Some([*kind, *id]), path)
        }
        [experiment, owner, "artifacts", path @ ..] if *experiment == run.experiment_id => {
            (run.label_in(owner).ok_or_else(missing)?, None, path)
        }
        _ => return Err(missing()),
    };
    let wanted = label.to_owned();
    let exists = run.clone().with(move |open| Ok(open.runs()?.contains_key(&wanted))).await?;
    if !exists {
        return Err(missing());
    }
    let label = (!label.is_empty()).then_some(label);
    let parts = label.into_iter().chain(owner.into_iter().flatten()).chain(path.iter().copied());
    Ok(parts.map(str::to_owned).collect())
}

/// `PUT`: stores the body.
pub(super) async fn put(Caller(run): Caller, Path(address): Path<String>, request: Request) -> Answer {
    let _turn = run.file_turn().await?;
    let place = place(&run, &address).await?;
    let artifacts = Artifacts::of(&run);
    let mut upload = blocking("the artifact cannot be stored", move || artifacts.create(&place)).await?;
    let fail = |error| Refusal::disk("the artifact cannot be stored", &error);
    let Some(file) = upload.file.take() else { return Err(fail(ErrorKind::NotFound.into())) };
    let mut file = tokio::fs::File::from_std(file);
    let mut body = request.into_body().into_data_stream();
    while let Some(bytes) = body.next().await {
        let bytes = bytes.map_err(|error| Refusal::invalid(format!("the body broke off: {error}")))?;
        failpoint::hit("node.artifact.write").map_err(fail)?;
        file.write_all(&bytes).await.map_err(fail)?;
    }
    file.flush().await.map_err(fail)?;
    blocking("the artifact cannot be stored", move || upload.finish()).await?;
    Ok(Json(json!({})))
}

/// `GET`: the bytes.
pub(super) async fn fetch(Caller(run): Caller, Path(address): Path<String>) -> Result<Response, Refusal> {
    let turn = run.file_turn().await?;
    let place = place(&run, &address).await?;
    let artifacts = Artifacts::of(&run);
    let opened = blocking("the artifact cannot be read", move || match artifacts.open(&place) {
        Err(error) if is_absence(&error) => Ok(None),
        other => other.and_then(|file| Ok(Some((file.metadata()?.len(), file)))),
    });
    let found =
        opened.await?.ok_or_else(|| Refusal::missing(format!("there is no artifact at `{address}`")))?;
    let (length, file) = found;
    let headers =
        [(CONTENT_LENGTH, length.to_string()), (CONTENT_TYPE, "application/octet-stream".to_owned())];
    let bytes = ReaderStream::new(tokio::fs::File::from_std(file));
    let body = Body::from_stream(bytes.inspect(move |_| {
        let _held = &turn;
    }));
    Ok((headers, body).into_response())
}

/// `DELETE`: one file.
pub(super) async fn delete(Caller(run): Caller, Path(address): Path<String>) -> Answer {
    let _turn = run.file_turn().await?;
    let place = place(&run, &address).await?;
    let artifacts = Artifacts::of(&run);
    let remove = move || match artifacts.remove(&place) {
        Err(error) if is_absence(&error) => Ok(()),
        other => other,
    };
    blocking("the artifact cannot be removed", remove).await?;
    Ok(Json(json!({})))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct List {
    path: String,
}

/// Lists a folder by its artifact address; here names are relative to the folder.
pub(super) async fn list(Caller(run): Caller, Asked(asked): Asked<List>) -> Answer {
    let _turn = run.file_turn().await?;
    let place = place(&run, &asked.path).await?;
    let artifacts = Artifacts::of(&run);
    let is_root = place.is_empty();
    let listed = agent_blocking::spawn_blocking(move || artifacts.list("", &join(&place), ""));
    let mut files =
        listed.await.map_err(|error| Refusal::disk("the call was interrupted", &error.into()))??;
    if is_root {
        let hidden = run.clone().with(move |open| open.hide_folders_of_others(&mut files).map(|()| files));
        files = hidden.await?;
    }
    Ok(Json(json!({ "files": files })))
}

fn is_absence(error: &io::Error) -> bool {
    let link = rustix::io::Errno::LOOP.raw_os_error();
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
        || error.raw_os_error() == Some(link)
}

async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Refusal> {
    let done = agent_blocking::blocking_io(work).await;
    done.map_err(|error| Refusal::disk(what, &error))
}
