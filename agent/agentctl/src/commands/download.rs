//! `download`: writes a job's outputs as files; of a job that runs, what it has written so far.
//!
//! Everything is written beside the destination first and moved to its place when it is complete, so that an
//! interrupted download leaves nothing half done.

use std::convert::Infallible;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_cas::snapshot::{self, Laid, MaterializeError};
use agent_cas::{ByteCounter, ReadError};
use agent_model::{Artifacts, Code, Digest, Fault, Stream, causes, size};
use agent_proto::v1;
use serde_json::json;
use tokio::time::{Duration, Instant, interval, sleep};

use super::arrays::tasks_or_self;
use super::view::JobView;
use super::{pipelines, sweeps};
use crate::cli::DownloadArgs;
use crate::client::{self, Client, Target, answer, next};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{clean, count};
use crate::prepare::made;

/// For how long to ask a store again for blobs that it lacks or holds damaged.
const DOUBT: Duration = Duration::from_secs(20);
/// How often.
const AGAIN: Duration = Duration::from_secs(2);
/// How often it is shown how much has arrived.
const SHOWN_EVERY: Duration = Duration::from_millis(200);

/// The folder of logs in a download, as the cloud names it.
const LOGS: &str = "user_logs";

/// What there is to fetch.
pub(super) struct Stored {
    /// Each tree with its folder in the download: none for the first rank.
    pub(super) trees: Vec<(String, Digest)>,
    /// What is not in them, each path with the reason: what is no content of the job, and, of one that runs, what could not
    /// be copied.
    pub(super) left_out: Vec<String>,
    /// The tasks of an array, each with its folder; otherwise the job itself, without one.
    logs: Vec<(String, JobView)>,
}

/// Fetches the outputs, and the logs if wanted.
pub(super) async fn download(
    args: &DownloadArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    let job = match job.spec.sweep.is_some() && !args.all {
        true => {
            let best = sweeps::best_of(&client, &job).await?;
            output.note(&format!("{} is the best trial of {}", best.job, job.job));
            best
        }
        false => job,
    };
    let dest = args.output.clone().unwrap_or_else(|| PathBuf::from(&job.job));
    if dest.exists() && !args.force {
        return Err(Failure::refused(
            format!("`{}` exists", dest.display()),
            "name another directory with -o, or replace what it has of the same names with --force",
        ));
    }
    let (name, state, has_ended) = (job.job.clone(), job.state.clone(), job.has_ended());
    let own = job.spec.pipeline.clone().filter(|pipeline| !pipeline.outputs.is_empty() && !args.all);
    let stored = match own {
        Some(pipeline) => {
            let (trees, left_out) = pipelines::outputs_of(&client, &job, &pipeline).await?;
            Stored { trees, left_out, logs: Vec::new() }
        }
        None => stored(&client, job, output).await?,
    };
    if stored.trees.is_empty() && !args.logs {
        let none = if has_ended { "left no outputs" } else { "has no outputs yet" };
        output.note(&format!("{name} {none}; --logs fetches its logs"));
        tell_left_out(&stored.left_out, output);
        return match args.json {
            true => output.json(&json!({ "job": name, "directory": null, "files": 0, "bytes": 0 })),
            false => Ok(()),
        };
    }
    let unwritable = |error: io::Error| unwritable(&dest, &error);
    let room = room_beside(&dest)?;
    let tree = room.path().join("tree");
    let mut laid = Laid::default();
    for (folder, root) in &stored.trees {
        let Some(parts) = parts_of(&args.parts, folder, &stored.trees) else { continue };
        let to = tree.join(folder);
        fs::create_dir_all(to.parent().unwrap_or(&tree)).map_err(unwritable)?;
        let of_rank = fetch_tree(&client, *root, &parts, &to, &dest, output).await;
        let of_rank = of_rank.map_err(|error| unlaid(&name, &dest, &error, lost_outputs(&name)))?;
        laid = Laid { files: laid.files + of_rank.files, bytes: laid.bytes + of_rank.bytes };
    }
    if args.logs {
        for (folder, job) in &stored.logs {
            let logs = tree.join(folder).join(LOGS);
            fs::create_dir_all(&logs).map_err(unwritable)?;
            for (rank, log) in (0..job.ranks()).flat_map(|rank| Stream::ALL.map(|log| (rank, log))) {
                fetch_log(&client, &job.job, log, rank, &logs.join(log_name(log, rank)), &dest).await?;
            }
        }
    }
    put_in_place(&tree, &dest, &room.path().join("replaced"), !args.parts.is_empty()).map_err(unwritable)?;
    let Laid { files, bytes } = laid;
    let logs = if args.logs { format!(", logs in {LOGS}") } else { String::new() };
    made::remember(&dest);
    if args.json {
        let document = json!({ "job": name, "directory": dest, "files": files, "bytes": bytes });
        output.json(&document)?;
    }
    output.note(&format!("{}: {}, {}{logs}", dest.display(), count(files, "file"), size::binary(bytes)));
    tell_left_out(&stored.left_out, output);
    if !has_ended {
        output.note(&format!("{name} is {state}: these are its outputs so far"));
    }
    Ok(())
}

pub(super) fn tell_left_out(left_out: &[String], output: &mut Output) {
    for left_out in left_out {
        output.note(&format!("left out: {}", clean(left_out)));
    }
}

/// What a job left, or has written so far.
pub(super) async fn stored(client: &Client, job: JobView, output: &mut Output) -> Result<Stored, Failure> {
    match job.has_ended() {
        _ if job.tasks.is_some() => of_tasks(client, job).await,
        true => {
            let (trees, left_out) = (trees_of(&job), left_out_of(&job));
            Ok(Stored { trees, left_out, logs: vec![(String::new(), job)] })
        }
        false => so_far(client, job, output).await,
    }
}

/// What to do if the store lost part of what a job left: the machine that ran it may still have it.
pub(super) fn lost_outputs(job: &str) -> String {
    format!("where its machine still keeps the job's directory: agentctl node outputs {job}")
}

/// What stands among the outputs of a job that has ended and is no content of it, each path with the reason.
pub(super) fn left_out_of(job: &JobView) -> Vec<String> {
    let of_rank = |rank: u32| {
        let folder = folder_of(rank);
        let lines = job.outcome_of(rank).into_iter().flat_map(|outcome| outcome.left_out.iter());
        lines.map(move |line| match folder.as_str() {
            "" => line.clone(),
            folder => format!("{folder}: {line}"),
        })
    };
    (0..job.ranks()).flat_map(of_rank).collect()
}

/// The outputs of a job that has ended.
fn trees_of(job: &JobView) -> Vec<(String, Digest)> {
    let first = job.outcome.as_ref().and_then(|outcome| outcome.artifacts);
    let others =
        (1..job.ranks()).filter_map(|rank| Some((folder_of(rank), job.outcome_of(rank)?.artifacts?.root)));
    first.map(|artifacts| (folder_of(0), artifacts.root)).into_iter().chain(others).collect()
}

/// What the tasks of an array left that have ended, each in the folder of its index.
async fn of_tasks(client: &Client, array: JobView) -> Result<Stored, Failure> {
    let mut found = Stored { trees: Vec::new(), left_out: Vec::new(), logs: Vec::new() };
    for task in tasks_or_self(client, array).await? {
        let step = task.spec.environment_variables.get("AGENTD_STEP");
        let index = step.cloned().unwrap_or_else(|| task.index.unwrap_or_default().to_string());
        let folder = |rank: String| if rank.is_empty() { index.clone() } else { format!("{index}/{rank}") };
        match task.has_ended() {
            true => {
                found.trees.extend(trees_of(&task).into_iter().map(|(rank, root)| (folder(rank), root)));
                found.left_out.extend(left_out_of(&task).iter().map(|line| format!("task {index}: {line}")));
            }
            false => found.left_out.push(format!("task {index}: it is {}", task.state)),
        }
        found.logs.push((index, task));
    }
    Ok(found)
}

/// What a job that runs has written so far, which its machines store now.
async fn so_far(client: &Client, job: JobView, output: &mut Output) -> Result<Stored, Failure> {
    output.busy(&format!("waiting until what {} has written so far is stored", job.job));
    let request = v1::StoreOutputsRequest { job: job.job.clone() };
    let mut told = answer(client.nodes().store_outputs(request)).await?;
    // No deadline, because large outputs take long; the connection notices a daemon that is gone.
    let stored = told.message().await.map_err(|status| client::fault(&status))?.unwrap_or_default();
    output.rest();
    let mut found = Stored { trees: Vec::new(), left_out: Vec::new(), logs: vec![(String::new(), job)] };
    for v1::OutputsSoFar { rank, artifacts, left_out } in stored.so_far {
        if let Some(artifacts) = artifacts {
            found.trees.push((folder_of(rank), Artifacts::try_from(artifacts).map_err(Fault::from)?.root));
        }
        found.left_out.extend(left_out);
    }
    Ok(found)
}

/// The folder of a rank in a download.
fn folder_of(rank: u32) -> String {
    if rank == 0 { String::new() } else { format!("rank-{rank}") }
}

/// The parts that are in the folder of a rank, relative to it; `None` if parts are named and none is there. All parts that
/// are not in the folder of another rank are of the first one, which has none.
fn parts_of(parts: &[String], folder: &str, trees: &[(String, Digest)]) -> Option<Vec<String>> {
    fn below<'a>(part: &'a str, folder: &str) -> Option<&'a str> {
        let rest = part.strip_prefix(folder)?;
        if rest.is_empty() { Some(rest) } else { rest.strip_prefix('/') }
    }
    let plain = parts.iter().map(|part| part.trim_start_matches("./").trim_end_matches('/'));
    let found = plain.filter_map(|part| match folder {
        "" => trees.iter().all(|(other, _)| other.is_empty() || below(part, other).is_none()).then_some(part),
        folder => below(part, folder),
    });
    let found: Vec<String> = found.map(str::to_owned).collect();
    (parts.is_empty() || !found.is_empty()).then_some(found)
}

/// Fetches a tree that goes to `dest` later, or parts of it, and shows how much of it is there. A store that lacks a
/// part, or holds it damaged, is asked again for a while.
pub(super) async fn fetch_tree(
    client: &Client,
    root: Digest,
    parts: &[String],
    tree: &Path,
    dest: &Path,
    output: &mut Output,
) -> Result<Laid, MaterializeError> {
    let (begun, counter) = (Instant::now(), Arc::default());
    loop {
        output.busy(&format!("fetching to {}", dest.display()));
        let blobs = client.blobs();
        let laid = tokio::select! {
            laid = snapshot::download_parts(&blobs, root, parts, tree, &counter) => laid,
            never = show(dest, &counter, output) => match never {},
        };
        match laid {
            Err(error)
                if read_error(&error).is_some_and(ReadError::is_unsound) && begun.elapsed() < DOUBT =>
            {
                output.busy(&format!("asking the store again: {}", causes::tell(&error)));
                sleep(AGAIN).await;
            }
            laid => return laid,
        }
    }
}

/// Shows how much has arrived: `fetching 120 of 480 MiB to results`.
async fn show(dest: &Path, counter: &ByteCounter, output: &Output) -> Infallible {
    let (tick, mut next) = (output.ticker(), interval(SHOWN_EVERY));
    loop {
        next.tick().await;
        let (done, all) = counter.part();
        if all > 0 {
            tick(format!("fetching {} to {}", size::part(done, all), dest.display()));
        }
    }
}

/// The file of a log; those of ranks after the first have their number before the extension.
fn log_name(log: Stream, rank: u32) -> String {
    let name = log.file_name();
    match (rank, name.rsplit_once('.')) {
        (0, _) => name.to_owned(),
        (rank, Some((stem, extension))) => format!("{stem}_{rank}.{extension}"),
        (rank, None) => format!("{name}_{rank}"),
    }
}

async fn fetch_log(
    client: &Client,
    job: &str,
    log: Stream,
    rank: u32,
    to: &Path,
    dest: &Path,
) -> Result<(), Failure> {
    let request =
        v1::ReadLogRequest { job: job.to_owned(), stream: log.to_string(), rank, ..Default::default() };
    let mut chunks = answer(client.telemetry().read_log(request)).await?;
    let mut file = fs::File::create(to).map_err(|error| unwritable(dest, &error))?;
    while let Some(chunk) = next(&mut chunks).await? {
        file.write_all(&chunk.data).map_err(|error| unwritable(dest, &error))?;
    }
    Ok(())
}

/// Moves `tree` to `dest`. What `dest` has of the same names goes to `replaced`; of a tree that is a `part`, of the same
/// paths, so that what was fetched before stays.
fn put_in_place(tree: &Path, dest: &Path, replaced: &Path, part: bool) -> io::Result<()> {
    if !dest.exists() {
        return fs::rename(tree, dest);
    }
    fs::create_dir(replaced)?;
    for entry in fs::read_dir(tree)? {
        let entry = entry?;
        let (from, to) = (entry.path(), dest.join(entry.file_name()));
        let gone = replaced.join(entry.file_name());
        match to.symlink_metadata() {
            Ok(there) if part && there.is_dir() && entry.file_type()?.is_dir() => {
                put_in_place(&from, &to, &gone, part)?;
                continue;
            }
            Ok(_) => fs::rename(&to, gone)?,
            Err(_) => {}
        }
        fs::rename(from, to)?;
    }
    Ok(())
}

/// A new directory on the file system of `dest`, where it is filled before it gets its name; it goes when it is
/// dropped.
pub(super) fn room_beside(dest: &Path) -> Result<tempfile::TempDir, Failure> {
    let parent = dest.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let room = tempfile::Builder::new().prefix(".download-").tempdir_in(parent);
    room.map_err(|error| unwritable(dest, &error))
}

pub(super) fn unwritable(dest: &Path, error: &io::Error) -> Failure {
    Failure::refused(
        format!("cannot write to `{}`: {error}", dest.display()),
        "check the path, who may write there, and the room on its disk",
    )
}

fn read_error(error: &MaterializeError) -> Option<&ReadError> {
    causes(error).find_map(|cause| cause.downcast_ref())
}

/// Why a tree could not be laid out; `lost` is what to do if the store has lost part of it.
pub(super) fn unlaid(job: &str, dest: &Path, error: &MaterializeError, lost: String) -> Failure {
    let what = format!("what was fetched of {job} could not be brought to `{}`", dest.display());
    let fault = |code| Fault::new(code, what.clone()).because(error);
    if let MaterializeError::NoSuchPart { path } = error {
        return Failure::refused(
            format!("{job} left no `{path}`"),
            "a path begins as in the job's directory, for example `outputs/model.pkl`; without one all of it is fetched",
        );
    }
    match read_error(error) {
        Some(ReadError::Absent { .. }) => fault(Code::SnapshotMissing).fix(lost),
        Some(error) if error.is_damage() => fault(Code::SnapshotDamaged).fix(lost),
        Some(ReadError::Remote { source, .. }) => client::refused(what, source),
        _ => fault(Code::SnapshotStore).fix("try again; what was written so far has been removed"),
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_parts_belong_to_the_rank_whose_folder_they_are_in() {
        let others = ["rank-1", "rank-2"].map(|folder| (folder.to_owned(), Digest::EMPTY));
        let of = |parts: &[&str], folder| {
            let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
            parts_of(&parts, folder, &others)
        };
        let some = |parts: &[&str]| Some(parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>());
        assert_eq!([of(&[], ""), of(&[], "rank-1")], [some(&[]), some(&[])]);
        let parts = ["./outputs/a", "rank-1/outputs/", "rank-10/b", "rank-2"];
        assert_eq!(of(&parts, ""), some(&["outputs/a", "rank-10/b"]));
        assert_eq!(of(&parts, "rank-1"), some(&["outputs"]));
        assert_eq!(of(&parts, "rank-2"), some(&[""]));
        assert_eq!(of(&["outputs"], "rank-1"), None);
    }

    #[test]
    fn test_only_what_has_the_same_name_is_replaced() {
        let room = tempfile::tempdir().unwrap();
        let (tree, dest) = (room.path().join("tree"), room.path().join("dest"));
        let write = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(tree.join("outputs/model"), "new");
        write(dest.join("outputs/old"), "old");
        write(dest.join("mine"), "mine");
        put_in_place(&tree, &dest, &room.path().join("replaced"), false).unwrap();
        assert_eq!(fs::read_to_string(dest.join("outputs/model")).unwrap(), "new");
        assert!(!dest.join("outputs/old").exists());
        assert_eq!(fs::read_to_string(dest.join("mine")).unwrap(), "mine");
        // Of a part only what has the same path.
        write(tree.join("outputs/model"), "newer");
        write(dest.join("outputs/other"), "other");
        put_in_place(&tree, &dest, &room.path().join("replaced again"), true).unwrap();
        assert_eq!(fs::read_to_string(dest.join("outputs/model")).unwrap(), "newer");
        assert_eq!(fs::read_to_string(dest.join("outputs/other")).unwrap(), "other");
    }
}
