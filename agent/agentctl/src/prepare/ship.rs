//! The files of a plan on their way into the store.

use std::error::Error;
use std::path::{Path, PathBuf};

use agent_cas::Remote;
use agent_cas::snapshot::{self, Progress, PushError, ScanError, Snapshot};
use agent_model::job::Input;
use agent_model::{Code, Digest, EnvSpec, Fault, JobSpec, size};
use tonic::Status;

use super::Plan;
use crate::client;
use crate::output::Output;
use crate::output::text::count;

/// Code above this size, in bytes, is remarked upon.
const LARGE: u64 = 300_000_000;
/// Warnings of one directory that are shown one by one.
const SHOWN: usize = 5;

impl Plan {
    /// Sends what the store lacks and completes the job.
    pub(crate) async fn ship(self, blobs: &Remote, output: &mut Output) -> Result<JobSpec, Fault> {
        let Plan { mut draft, code, inputs, context, .. } = self;
        // What needs no file may be wrong too, and is cheaper to find out.
        let mut complete = draft.clone();
        let stand_in = |name: &String| (name.clone(), Input::Folder(Digest::EMPTY));
        complete.inputs.extend(inputs.iter().map(|(name, _)| stand_in(name)));
        complete.validate()?;
        if let Some(dir) = code {
            draft.code = Some(send("code", &dir, blobs, output).await?);
        }
        for (name, path) in inputs {
            let root = send(&format!("input {name}"), &path, blobs, output).await?;
            let input = match path.file_name().filter(|_| path.is_file()) {
                Some(file) => Input::File { root, name: file.to_string_lossy().into_owned() },
                None => Input::Folder(root),
            };
            draft.inputs.insert(name, input);
        }
        if let Some((dir, dockerfile)) = context {
            let context = send_all("build context", &dir, blobs, output).await?;
            draft.environment = EnvSpec::Build { context, dockerfile };
        }
        draft.validate()
    }
}

async fn send(what: &str, path: &Path, blobs: &Remote, output: &mut Output) -> Result<Digest, Fault> {
    let file = path.is_file();
    let by_rules = move |path: &Path| if file { snapshot::scan_file(path) } else { snapshot::scan(path) };
    transfer(what, path, by_rules, blobs, output).await
}

/// Sends a directory with all it holds: a build has ignore rules of its own, and whoever builds knows them.
async fn send_all(what: &str, dir: &Path, blobs: &Remote, output: &mut Output) -> Result<Digest, Fault> {
    transfer(what, dir, snapshot::scan_whole, blobs, output).await
}

async fn transfer(
    what: &str,
    path: &Path,
    scan: impl FnOnce(&Path) -> Result<Snapshot, ScanError> + Send + 'static,
    blobs: &Remote,
    output: &mut Output,
) -> Result<Digest, Fault> {
    output.busy(&format!("{what}: reading {}", path.display()));
    let snapshot = read(path.to_owned(), scan).await.map_err(|error| unreadable(what, path, &error))?;
    warn(&snapshot, path, output);
    output.busy(&format!("{what}: asking what is new"));
    let tick = output.ticker();
    let progress = |sent: Progress| {
        let (done, all) = (size::decimal(sent.bytes), size::decimal(sent.bytes_total));
        tick(format!("{what}: {} of {} files, {done} of {all} sent", sent.files, sent.files_total));
    };
    let pushed =
        snapshot::push(&snapshot, blobs, progress).await.map_err(|error| unsent(what, path, &error))?;
    let (files, sent) = (count(pushed.files, "file"), size::decimal(pushed.bytes_sent));
    output.note(&format!("{what}: {files}, {} changed, {sent} sent", pushed.files_sent));
    Ok(snapshot.root)
}

async fn read(
    path: PathBuf,
    scan: impl FnOnce(&Path) -> Result<Snapshot, ScanError> + Send + 'static,
) -> Result<Snapshot, ScanError> {
    match tokio::task::spawn_blocking(move || scan(&path)).await {
        Ok(scanned) => scanned,
        Err(panicked) => std::panic::resume_unwind(panicked.into_panic()), // it is never cancelled
    }
}

fn warn(snapshot: &Snapshot, path: &Path, output: &mut Output) {
    for warning in snapshot.warnings.iter().take(SHOWN) {
        output.warn(warning);
    }
    if snapshot.warnings.len() > SHOWN {
        output.warn(&format!("and {} more of this kind", snapshot.warnings.len() - SHOWN));
    }
    if snapshot.bytes > LARGE {
        let largest = snapshot.largest.iter().take(3);
        let largest: Vec<_> =
            largest.map(|(name, size)| format!("{name} ({})", size::decimal(*size))).collect();
        output.warn(&format!(
            "{} has {}; the largest: {}. What the job does not need can stand in a .amlignore there",
            path.display(),
            size::decimal(snapshot.bytes),
            largest.join(", ")
        ));
    }
}

fn unreadable(what: &str, path: &Path, error: &ScanError) -> Fault {
    let (code, fix) = match error {
        ScanError::Directory { .. } | ScanError::Read { .. } => {
            (Code::SnapshotUnreadable, "check that it exists and that you may read it")
        }
        ScanError::Changed { .. } => {
            (Code::SnapshotUnreadable, "end what writes there, or keep it out with a .amlignore")
        }
        ScanError::Ignore { .. } => (Code::SnapshotUnreadable, "correct that line of the ignore file"),
        ScanError::TooDeep { .. } | ScanError::NotAFile { .. } => {
            (Code::SnapshotUnsafe, "keep it out with a .amlignore, or give it another place or name")
        }
    };
    Fault::new(code, format!("{what}: `{}` cannot be read", path.display())).because(error).fix(fix)
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
        Some(status) => {
            let mut fault = client::fault(status);
            fault.why.insert(0, fault.what);
            fault.what = what;
            fault.fix.get_or_insert_with(|| "see the daemon's log".to_owned());
            fault
        }
        None => Fault::new(Code::SnapshotStore, what).because(error).fix("see the daemon's log"),
    }
}

/// What the daemon answered, if it is why something failed.
fn status_in<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Status> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let boxed = error.downcast_ref::<Box<Status>>().map(Box::as_ref);
        if let Some(status) = boxed.or_else(|| error.downcast_ref()) {
            return Some(status);
        }
        cause = error.source();
    }
    None
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
        assert_eq!(refused(Status::unavailable("gone")).code, Code::Unreachable);
        let changed = PushError::Changed { path: "src/log".into() };
        assert_eq!(unsent("code", Path::new("src"), &changed).code, Code::SnapshotUnreadable);
    }
}
