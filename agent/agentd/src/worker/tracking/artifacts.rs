//! Files that a job logs: bytes in, bytes out, never outside the job's own folder.
//!
//! The job can write to that folder as well, links included, so no path is ever followed by name: every step
//! starts from an open directory and refuses links.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_model::failpoint;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use rustix::fs::{self, AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio_util::io::ReaderStream;

use super::Caller;
use super::answer::{Answer, Asked, Refusal};
use super::run::Run;

const INSIDE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC);

/// The folder of a job's artifacts.
#[derive(Debug, Clone)]
pub(super) struct Artifacts {
    root: PathBuf,
}

/// Where an artifact is: the segments below the folder.
type Place = Vec<String>;

impl Artifacts {
    pub(super) fn new(root: PathBuf) -> Artifacts {
        Artifacts { root }
    }

    /// What is directly in a folder of the run with this label; each path begins with `shown`.
    pub(super) fn list(&self, label: &str, path: &str, shown: &str) -> Result<Vec<Value>, Refusal> {
        let place = segments(label)?.into_iter().chain(segments(path)?).collect::<Place>();
        let entries = match self.entries(&place) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Vec::new()
            }
            other => other.map_err(|error| Refusal::disk("the artifacts cannot be listed", &error))?,
        };
        let prefix = if shown.is_empty() { String::new() } else { format!("{}/", shown.trim_matches('/')) };
        Ok(entries.into_iter().map(|entry| entry.show(&prefix)).collect())
    }

    fn entries(&self, place: &[String]) -> io::Result<Vec<Entry>> {
        let directory = fs::openat2(self.open_root()?, join(place), DIRECTORY, Mode::empty(), INSIDE)?;
        let mut entries = Vec::new();
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            if name.starts_with(PART) || matches!(name.as_str(), "." | "..") {
                continue;
            }
            let seen = fs::statat(&directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(seen.st_mode) {
                FileType::Directory => entries.push(Entry { name, size: None }),
                FileType::RegularFile => entries.push(Entry { name, size: Some(seen.st_size) }),
                _ => {}
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn open_root(&self) -> io::Result<OwnedFd> {
        Ok(fs::openat(CWD, &self.root, DIRECTORY, Mode::empty())?)
    }

    fn open(&self, place: &[String]) -> io::Result<std::fs::File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file =
            std::fs::File::from(fs::openat2(self.open_root()?, join(place), flags, Mode::empty(), INSIDE)?);
        if file.metadata()?.is_file() { Ok(file) } else { Err(ErrorKind::NotFound.into()) }
    }

    /// A new file beside the place it is to take, and the folders on the way.
    fn create(&self, place: &[String]) -> io::Result<Upload> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.root)?;
        let (name, folders) = place.split_last().ok_or(ErrorKind::InvalidInput)?;
        let mut folder = self.open_root()?;
        for segment in folders {
            match fs::mkdirat(&folder, segment.as_str(), Mode::from_raw_mode(0o775)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            folder = fs::openat2(&folder, segment.as_str(), DIRECTORY, Mode::empty(), INSIDE)?;
        }
        let part = format!("{PART}{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = fs::openat2(&folder, part.as_str(), flags, Mode::from_raw_mode(0o664), INSIDE)?;
        Ok(Upload { file: Some(file.into()), folder, part: Some(part), name: name.clone() })
    }

    fn remove(&self, place: &[String]) -> io::Result<()> {
        let (name, folders) = place.split_last().ok_or(ErrorKind::InvalidInput)?;
        let folder = fs::openat2(self.open_root()?, join(folders), DIRECTORY, Mode::empty(), INSIDE)?;
        Ok(fs::unlinkat(folder, name.as_str(), AtFlags::empty())?)
    }
}

/// How the name of an upload begins that is not whole yet.
const PART: &str = ".agentd-upload-";

struct Entry {
    name: String,
    /// Absent for a folder.
    size: Option<i64>,
}

impl Entry {
    fn show(self, prefix: &str) -> Value {
        let path = format!("{prefix}{}", self.name);
        match self.size {
            Some(size) => json!({ "path": path, "is_dir": false, "file_size": size }),
            None => json!({ "path": path, "is_dir": true }),
        }
    }
}

/// A file that is not whole yet; removed unless it is finished.
struct Upload {
    file: Option<std::fs::File>,
    folder: OwnedFd,
    part: Option<String>,
    name: String,
}

impl Upload {
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

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(part) = self.part.take() {
            let _ = fs::unlinkat(&self.folder, part.as_str(), AtFlags::empty()); // goes with the job otherwise
        }
    }
}

fn join(place: &[String]) -> String {
    if place.is_empty() { ".".to_owned() } else { place.join("/") }
}

/// The segments of a path that stays where it is.
fn segments(path: &str) -> Result<Place, Refusal> {
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

/// The place behind `EXPERIMENT/RUN/artifacts/PATH` or `EXPERIMENT/models/MODEL/artifacts/PATH`.
async fn place(run: &Arc<Run>, address: &str) -> Result<Place, Refusal> {
    let missing = || Refusal::missing(format!("there are no artifacts at `{address}`"));
    let segments = segments(address)?;
    let parts: Vec<&str> = segments.iter().map(String::as_str).collect();
    let (label, model, path) = match parts.as_slice() {
        [experiment, "models", model, "artifacts", path @ ..] if *experiment == run.experiment_id => {
            ("", Some(["models", model]), path)
        }
        [experiment, owner, "artifacts", path @ ..] if *experiment == run.experiment_id => {
            (run.label_in(owner).ok_or_else(missing)?, None, path)
        }
        _ => return Err(missing()),
    };
    let wanted = label.to_owned();
    let exists = run.clone().with(move |desk| Ok(desk.runs()?.contains_key(&wanted))).await?;
    if !exists {
        return Err(missing());
    }
    let label = (!label.is_empty()).then_some(label);
    let parts = label.into_iter().chain(model.into_iter().flatten()).chain(path.iter().copied());
    Ok(parts.map(str::to_owned).collect())
}

/// `PUT`: stores the body.
pub(super) async fn put(Caller(run): Caller, Path(address): Path<String>, request: Request) -> Answer {
    let place = place(&run, &address).await?;
    let artifacts = run.artifacts.clone();
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
    let place = place(&run, &address).await?;
    let artifacts = run.artifacts.clone();
    let opened = blocking("the artifact cannot be read", move || match artifacts.open(&place) {
        Err(error) if is_absence(&error) => Ok(None),
        other => other.and_then(|file| Ok(Some((file.metadata()?.len(), file)))),
    });
    let found =
        opened.await?.ok_or_else(|| Refusal::missing(format!("there is no artifact at `{address}`")))?;
    let (length, file) = found;
    let headers =
        [(CONTENT_LENGTH, length.to_string()), (CONTENT_TYPE, "application/octet-stream".to_owned())];
    let body = Body::from_stream(ReaderStream::new(tokio::fs::File::from_std(file)));
    Ok((headers, body).into_response())
}

/// `DELETE`: one file.
pub(super) async fn delete(Caller(run): Caller, Path(address): Path<String>) -> Answer {
    let place = place(&run, &address).await?;
    let artifacts = run.artifacts.clone();
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

/// The same folder listed by the address of the bytes; here names are relative to the folder.
pub(super) async fn list(Caller(run): Caller, Asked(asked): Asked<List>) -> Answer {
    let place = place(&run, &asked.path).await?;
    let artifacts = run.artifacts.clone();
    let listed = tokio::task::spawn_blocking(move || artifacts.list("", &join(&place), ""));
    let files = listed.await.map_err(|error| Refusal::disk("the call was interrupted", &error.into()))??;
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
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
    done.map_err(|error| Refusal::disk(what, &error))
}
