//! `mlflow`: what jobs recorded, in the form that MLflow's own programs read.
//!
//! Hides the file store ([`filestore`]). Everything is read with the calls that `metrics` and `download` use.

mod filestore;
mod names;
mod recorded;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use agent_model::sweep::Scalar;
use agent_model::{Clock, JobId, SystemClock};

use self::filestore::{FileStore, JobFacts, RunStatus};
use self::recorded::Recording;
use super::arrays::tasks_or_self;
use super::download::{fetch_tree, lost_outputs, room_beside, stored, unlaid, unwritable};
use super::jobs;
use super::view::JobView;
use crate::cli::{ExportArgs, MlflowVerb, UiArgs, variable};
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::count;
use crate::prepare::made;

/// How many jobs are shown if none is named.
const LATEST: u32 = 20;

/// The variable without which MLflow 3 reads no file store.
const ALLOW: &str = "MLFLOW_ALLOW_FILE_STORE";

pub(super) async fn mlflow(
    verb: MlflowVerb,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let client = Client::find(to).await?;
    match verb {
        MlflowVerb::Export(args) => {
            export(&client, &args, output).await?;
            Ok(ExitCode::SUCCESS)
        }
        MlflowVerb::Ui(args) => Box::pin(ui(&client, args, output)).await,
    }
}

/// Exports the jobs that are named.
async fn export(client: &Client, args: &ExportArgs, output: &mut Output) -> Result<(), Failure> {
    let meant = named(client, &args.jobs).await?;
    Box::pin(write(client, meant, &args.to, !args.no_artifacts, output)).await?;
    made::remember(&args.to);
    let dir = args.to.display();
    output.note(&format!("see them: {ALLOW}=true mlflow ui --backend-store-uri {dir}"));
    Ok(())
}

/// The jobs of these names.
async fn named(client: &Client, names: &[String]) -> Result<Vec<JobView>, Failure> {
    let mut jobs = Vec::new();
    for name in names {
        jobs.push(JobView::try_from(client.job(name).await?)?);
    }
    Ok(jobs)
}

/// Exports jobs, and lets MLflow show them. This process becomes MLflow's.
async fn ui(client: &Client, args: UiArgs, output: &mut Output) -> Result<ExitCode, Failure> {
    let latest = jobs::JobQuery { limit: LATEST, owners: vec![client.own()], ..jobs::JobQuery::default() };
    let meant = match args.jobs.is_empty() {
        true => jobs::list(client, &latest).await?.0,
        false => named(client, &args.jobs).await?,
    };
    let dir = match args.to {
        Some(dir) => dir,
        None => {
            let made = tempfile::Builder::new().prefix("agentctl-mlflow-").tempdir();
            made.map_err(|error| unwritable(&std::env::temp_dir(), &error))?.keep()
        }
    };
    Box::pin(write(client, meant, &dir, !args.no_artifacts, output)).await?;
    let Some(mut command) = installed() else {
        return Err(Failure::refused(
            "there is no `mlflow`, and `python3` has no such module with its pages",
            format!(
                "install it: pip install mlflow (mlflow-skinny has no pages). The jobs are in `{0}`: {ALLOW}=true mlflow ui --backend-store-uri {0}",
                dir.display()
            ),
        ));
    };
    command.arg("ui").arg("--backend-store-uri").arg(&dir).args(&args.arguments).env(ALLOW, "true");
    let error = std::os::unix::process::CommandExt::exec(&mut command);
    Err(Failure::refused(
        format!("`mlflow ui` could not be started: {error}"),
        "see whether `mlflow --version` works",
    ))
}

/// Asks Python whether it has MLflow, and not only the part of it that has no pages.
const HAS_PAGES: &str =
    "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('mlflow', 'flask'))))";

/// The user's own MLflow: the program, otherwise the module.
#[allow(clippy::disallowed_methods, reason = "it takes the place of this process")]
fn installed() -> Option<Command> {
    let path = variable("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|dir| dir.join("mlflow").is_file()) {
        return Some(Command::new("mlflow"));
    }
    let asked = Command::new("python3").args(["-c", HAS_PAGES]).stdin(Stdio::null()).status();
    asked.is_ok_and(|status| status.success()).then(|| {
        let mut python = Command::new("python3");
        python.args(["-m", "mlflow"]);
        python
    })
}

/// Writes jobs to the store in a directory.
async fn write(
    client: &Client,
    meant: Vec<JobView>,
    dir: &Path,
    with_artifacts: bool,
    output: &mut Output,
) -> Result<(), Failure> {
    let fails = |error| unwritable(dir, &error);
    let room = room_beside(dir)?;
    let root = std::path::absolute(dir).map_err(fails)?;
    let store = FileStore::open(root, room.path().to_owned()).map_err(fails)?;
    let (mut jobs, mut runs) = (0, 0);
    for named in meant {
        // A sweep is a run itself, and its trials are runs in it.
        if named.spec.sweep.is_some() {
            runs += store.write(&facts_of(&named), &Recording::read(&[]), None).map_err(fails)?;
            jobs += 1;
        }
        for job in tasks_or_self(client, named).await? {
            let recording = Recording::read(&client.tracking(&job.job, job.ranks(), output).await?);
            let facts = facts_of(&job);
            let artifacts = match with_artifacts {
                true => Some(fetch(client, job, &room.path().join("artifacts"), dir, output).await?),
                false => None,
            };
            runs += store.write(&facts, &recording, artifacts.as_deref()).map_err(fails)?;
            jobs += 1;
        }
    }
    output.note(&format!("{}: {}, {}", dir.display(), count(jobs, "job"), count(runs as u64, "run")));
    Ok(())
}

/// Fetches the files of a job to a directory, which is emptied before. Returns it.
async fn fetch(
    client: &Client,
    job: JobView,
    to: &Path,
    dir: &Path,
    output: &mut Output,
) -> Result<PathBuf, Failure> {
    let fails = |error| unwritable(dir, &error);
    if to.exists() {
        std::fs::remove_dir_all(to).map_err(fails)?;
    }
    std::fs::create_dir_all(to).map_err(fails)?;
    let (name, has_started) = (job.job.clone(), job.started_ms.is_some());
    if !has_started && !job.has_ended() {
        return Ok(to.to_owned());
    }
    let stored = stored(client, job, output).await?;
    for (folder, root) in stored.trees {
        let tree = to.join(folder);
        let fetched = fetch_tree(client, root, &[], &tree, dir, output).await;
        fetched.map_err(|error| unlaid(&name, dir, &error, lost_outputs(&name)))?;
    }
    for left_out in &stored.left_out {
        output.note(&format!("left out of {name}: {left_out}"));
    }
    Ok(to.to_owned())
}

/// The sweep that a job is a trial of.
fn sweep_of(job: &JobView) -> Option<String> {
    job.trial.as_ref()?;
    let (sweep, _) = job.job.parse::<JobId>().ok()?.as_task()?;
    Some(sweep.to_string())
}

fn facts_of(job: &JobView) -> JobFacts {
    let status = match job.state.as_str() {
        "Completed" => RunStatus::Finished,
        "Failed" => RunStatus::Failed,
        "Canceled" => RunStatus::Killed,
        _ if job.started_ms.is_some() => RunStatus::Running,
        _ => RunStatus::Scheduled,
    };
    let trial = job.trial.as_ref();
    let text = |(name, value): (&String, &Scalar)| (name.clone(), value.to_string());
    JobFacts {
        job: job.job.clone(),
        title: job.title.clone(),
        owner: job.owner.clone(),
        experiment: job.experiment.clone(),
        command: job.spec.command.trim().to_owned(),
        tags: job.spec.tags.clone(),
        started: job.started_ms.unwrap_or(job.submitted_ms),
        ended: job.has_ended().then(|| job.ended_ms.unwrap_or_else(|| SystemClock.now().0)),
        status,
        sweep: sweep_of(job),
        values: trial.map(|trial| trial.values.iter().map(text).collect()).unwrap_or_default(),
    }
}
