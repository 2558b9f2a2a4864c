//! Sends the files of a plan to the store.

use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use agent_blocking::blocking;
use agent_cas::Remote;
use agent_cas::snapshot::{self, PushError, PushProgress, Pushed, ScanError, Snapshot, StatCache};
use agent_model::job::Input;
use agent_model::{Blame, Code, Digest, EnvSpec, Fault, JobSpec, causes, paths, size};
use tonic::Status;

use super::Plan;

use super::pipeline::of_step;
use super::survey::{Kind, is_key, kept_out, keys, unreadable};
use crate::cli::variable;
use crate::client;
use crate::output::Output;
use crate::output::text::count;

/// A directory with more bytes than this causes a warning.
const LARGE: u64 = 300_000_000;
/// Warnings of one directory that are shown one by one.
const SHOWN: usize = 5;

impl Plan {
    /// Sends what the store lacks and completes the job; `never` are directories that are not sent.
    pub(crate) async fn ship(
        self,
        blobs: &Remote,
        never: &[PathBuf],
        care: Care,
        output: &mut Output,
    ) -> Result<JobSpec, Fault> {
        // Errors in the parts that need no file are found first, because that is cheaper.
        self.stand_in()?.validate()?;
        let mut sender = Sender { blobs, never: never.to_vec(), cache: cache(), care, sent: HashMap::new() };
        let Some(pipeline) = self.pipeline else { return sender.job(self, "", output).await };
        let mut jobs = Vec::new();
        for step in &pipeline.steps {
            let job = sender.job(step.plan.clone(), &format!("{}: ", step.name), output).await;
            jobs.push(job.map_err(|fault| of_step(&step.name, fault))?);
        }
        pipeline.of_jobs(self.draft, jobs).validate()
    }
}

/// Sends a file or a directory that is no part of a job.
pub(crate) async fn send(
    path: &Path,
    blobs: &Remote,
    never: &[PathBuf],
    output: &mut Output,
) -> Result<Input, Fault> {
    let care = Care::Usual;
    let mut sender = Sender { blobs, never: never.to_vec(), cache: cache(), care, sent: HashMap::new() };
    sender.input("data", path, output).await
}

/// How much is taken for granted when files are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Care {
    /// What was not changed since it was read was sent before: the caller notices if not, and sends it again.
    Light,
    /// The store is asked for everything.
    Usual,
    /// And every file is read, even if its metadata is unchanged.
    Rehash,
}

/// Reads files and sends them to a store.
struct Sender<'a> {
    blobs: &'a Remote,
    /// Directories that are not entered.
    never: Vec<PathBuf>,
    /// The cache of files read before. A user without a home has none.
    cache: Option<StatCache>,
    care: Care,
    /// What was sent already: steps of a pipeline often name the same.
    sent: HashMap<(Kind, PathBuf), Digest>,
}

impl Sender<'_> {
    /// Sends the files of one job; `whose` begins what is told of them.
    async fn job(&mut self, plan: Plan, whose: &str, output: &mut Output) -> Result<JobSpec, Fault> {
        let Plan { mut draft, code, inputs, context, .. } = plan;
        if let Some(dir) = code {
            draft.code = Some(self.transfer(&format!("{whose}code"), Kind::Code, &dir, output).await?);
        }
        for (name, path) in inputs {
            let input = self.input(&format!("{whose}input {name}"), &path, output).await?;
            draft.inputs.insert(name, input);
        }
        if let Some((dir, dockerfile)) = context {
            let what = format!("{whose}build context");
            let context = self.transfer(&what, Kind::Whole, &dir, output).await?;
            draft.environment = EnvSpec::Build { context, dockerfile };
        }
        draft.validate()
    }

    /// A file or a directory, as a job reads it.
    async fn input(&mut self, what: &str, path: &Path, output: &mut Output) -> Result<Input, Fault> {
        let kind = if path.is_file() { Kind::File } else { Kind::Folder };
        let root = self.transfer(what, kind, path, output).await?;
        Ok(match path.file_name().filter(|_| path.is_file()) {
            Some(file) => Input::File { root, name: file.to_string_lossy().into_owned() },
            None => Input::Folder(root),
        })
    }

    async fn transfer(
        &mut self,
        what: &str,
        kind: Kind,
        path: &Path,
        output: &mut Output,
    ) -> Result<Digest, Fault> {
        if let Some(sent) = self.sent.get(&(kind, path.to_owned())) {
            return Ok(*sent);
        }
        if let Some(cache) = self.cache.as_ref().filter(|_| self.care == Care::Rehash) {
            cache.forget(path);
        }
        let never = kept_out(kind, path, &self.never);
        let read = || read(kind, path.to_owned(), never.clone(), self.cache.clone());
        let unsent = |error| unsent(what, path, &error);
        output.busy(&format!("{what}: reading {}", path.display()));
        let mut snapshot = read().await.map_err(|error| unreadable(what, path, &error))?;
        if let Kind::Code = kind {
            make_way(&snapshot, path)?;
        }
        warn(&snapshot, path, output);
        if let Some(keys) = keys(&snapshot.named(is_key)) {
            output.warn(&format!("{what}: {keys}"));
        }
        let pushed = match (self.push(what, &snapshot, output).await, &self.cache) {
            // A file was changed just now, or without a change of its metadata: read everything again.
            (Err(PushError::Changed { .. }), Some(cache)) if snapshot.read < snapshot.files => {
                cache.forget(path);
                snapshot = read().await.map_err(|error| unreadable(what, path, &error))?;
                self.push(what, &snapshot, output).await.map_err(unsent)?
            }
            (pushed, _) => pushed.map_err(unsent)?,
        };
        let (files, sent) = (count(pushed.files, "file"), size::binary(pushed.bytes_sent));
        output.note(&format!("{what}: {files}, {} changed, {sent} sent", pushed.files_sent));
        self.sent.insert((kind, path.to_owned()), snapshot.root);
        Ok(snapshot.root)
    }

    async fn push(&self, what: &str, snapshot: &Snapshot, output: &mut Output) -> Result<Pushed, PushError> {
        output.busy(&format!("{what}: asking what is new"));
        let tick = output.ticker();
        let progress = |sent: PushProgress| {
            let part = size::part(sent.bytes, sent.bytes_total);
            tick(format!("{what}: {} of {}, {part} sent", sent.files, count(sent.files_total, "file")));
        };
        match self.care {
            Care::Light => snapshot::push_lightly(snapshot, self.blobs, progress).await,
            Care::Usual | Care::Rehash => snapshot::push(snapshot, self.blobs, progress).await,
        }
    }
}

async fn read(
    kind: Kind,
    path: PathBuf,
    never: Vec<PathBuf>,
    cache: Option<StatCache>,
) -> Result<Snapshot, ScanError> {
    blocking(move || match kind {
        Kind::File => snapshot::scan_file(&path),
        _ => kind.choice(&never, cache.as_ref()).scan(&path),
    })
    .await
}

/// Never in a project's directory: the cache of one send would be sent with the next.
fn cache() -> Option<StatCache> {
    Some(StatCache::at(paths::user_cache(variable)?.join("scans")))
}

/// Refuses code whose files are in the way of the folders that every job may write to.
fn make_way(snapshot: &Snapshot, path: &Path) -> Result<(), Fault> {
    let ways = ["outputs", "logs"].map(|name| Some(name).zip(snapshot.in_the_way(name)));
    let Some((name, what)) = ways.into_iter().flatten().next() else { return Ok(()) };
    let shown = path.join(name);
    Err(Fault::new(Code::SnapshotUnsafe, format!("code: `{}` is {what}", shown.display()))
        .why(format!("the job finds a folder `{name}` there, for what it leaves"))
        .fix(format!("rename it, or keep it out: put the line `/{name}` into a .amlignore")))
}

fn warn(snapshot: &Snapshot, path: &Path, output: &mut Output) {
    for warning in snapshot.warnings.iter().take(SHOWN) {
        output.warn(warning);
    }
    if snapshot.warnings.len() > SHOWN {
        output.warn(&format!("and {} more of this kind", snapshot.warnings.len() - SHOWN));
    }
    if snapshot.bytes > LARGE {
        let entries = snapshot.heaviest().into_iter().take(3);
        let largest: Vec<_> =
            entries.map(|(name, size)| format!("{name} ({})", size::binary(size))).collect();
        output.warn(&format!(
            "{} has {}; the largest: {}. What the job does not need can stand in a .amlignore there",
            path.display(),
            size::binary(snapshot.bytes),
            largest.join(", ")
        ));
    }
}

fn unsent(what: &str, path: &Path, error: &PushError) -> Fault {
    let what = format!("{what}: `{}` could not be sent", path.display());
    if let PushError::Changed { .. } | PushError::Read { .. } = error {
        return Fault::new(Code::SnapshotUnreadable, what)
            .because(error)
            .fix("run it again when nothing writes there, or keep the file out with a .amlignore");
    }
    match status_in(error) {
        Some(status) if status.code() == tonic::Code::ResourceExhausted => {
            Fault::new(Code::DiskFull, format!("{what}: the disk of the daemon is full"))
                .why(status.message())
                .fix(
                    "make room on the disk of its state directory: `agentctl status` says which and how full",
                )
        }
        Some(status) => client::refused(what, status),
        None => {
            let fault = Fault { blame: Blame::Network, ..Fault::new(Code::SnapshotStore, what) };
            fault.because(error).fix(client::LOOK_AT_STORE)
        }
    }
}

/// The daemon's status, if it caused the error.
fn status_in<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Status> {
    let status = |cause: &'a (dyn Error + 'static)| {
        cause.downcast_ref::<Box<Status>>().map(Box::as_ref).or_else(|| cause.downcast_ref())
    };
    causes(error).find_map(status)
}

#[cfg(test)]
mod tests {
    use agent_cas::WriteError;

    use super::*;

    #[test]
    fn test_what_the_daemon_answered_decides_the_fault() {
        let refused = |status: Status| {
            let source = WriteError::Remote { digest: Digest::EMPTY, source: Box::new(status) };
            unsent("code", Path::new("src"), &PushError::File { path: "src/big".into(), source })
        };
        let full = refused(Status::resource_exhausted("no space left on device"));
        assert_eq!(full.code, Code::DiskFull);
        assert!(full.what.contains("disk") && full.fix.is_some());
        let odd = refused(Status::unavailable("no upstream"));
        assert_eq!((odd.code, odd.blame), (Code::SnapshotStore, Blame::Network));
        assert!(odd.fix.is_some_and(|fix| fix.contains("blob_store")));
        let changed = PushError::Changed { path: "src/log".into() };
        assert_eq!(unsent("code", Path::new("src"), &changed).code, Code::SnapshotUnreadable);
    }
}
