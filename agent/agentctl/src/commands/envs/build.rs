//! `envs build`: an environment ahead of the jobs that need it.
//!
//! A job that does nothing builds it, so the build is treated as any job: it waits in the queue, its build log is
//! stored, and `agentctl why` shows its history.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use agent_model::{Code, Fault, JobDraft, Stream};
use agent_proto::v1;
use serde_json::json;

use crate::cli::EnvBuildArgs;
use crate::client::{Client, Target};
use crate::commands::follow::{Ended, Wants, follow};
use crate::failure::{DETACHED, Failure};
use crate::output::Output;
use crate::prepare::{Care, Changes, Plan};

/// What the job runs.
const NOTHING: &str = "true";

/// Builds, follows, and prints the key.
pub(super) async fn build(
    args: EnvBuildArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let plan = plan(&args.target)?;
    plan.warnings.iter().for_each(|warning| output.warn(&warning.to_string()));
    let client = Client::find_or_start(to, output).await?;
    let hint = plan.hint.clone();
    let never = client.own_directories().await?;
    let spec = plan.ship(&client.blobs(), &never, Care::Usual, output).await?;
    let job = Box::pin(client.enqueue(spec, hint, output)).await?;
    output.note(&format!("job:  {job}"));
    let wants = Wants { log: Some(Stream::Job), story: true, tail: 0, attempt: 0, rank: 0 };
    let ended = match follow(&client, &job, wants, output).await? {
        Ended::Job(ended) => ended,
        Ended::Detached => {
            output.note(&format!("detached; the build goes on. Follow it: agentctl logs -f --build {job}"));
            return Ok(ExitCode::from(DETACHED));
        }
    };
    if let Some(fault) = ended.cause() {
        output.fault(fault);
    }
    if ended.state != "Completed" {
        return Ok(ExitCode::FAILURE);
    }
    let (key, built) = made(&client, &job).await?;
    let node = ended.replicas.first().map(|replica| replica.node.clone());
    if args.json {
        output.json(&json!({ "job": job, "node": node, "key": key, "built": built }))?;
    } else {
        output.print(&format!("{key}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads from the job's history the key, and whether the environment was built or existed already.
async fn made(client: &Client, job: &str) -> Result<(String, bool), Failure> {
    let history = client.history(job).await?;
    let told = |event: &v1::HistoryEvent| outcome(&event.text);
    let unknown = || Fault::new(Code::Bug, "the job ended without a word about its environment");
    Ok(history.iter().rev().find_map(told).ok_or_else(unknown)?)
}

/// The key in `environment KEY built in 41 s` or `environment KEY reused`, and whether it was built.
fn outcome(text: &str) -> Option<(String, bool)> {
    let (key, how) = text.split_once("environment ")?.1.split_once(' ')?;
    let is_built = how.starts_with("built");
    (is_built || how == "reused").then(|| (key.to_owned(), is_built))
}

/// A job with nothing but the environment that `target` defines.
fn plan(target: &Path) -> Result<Plan, Failure> {
    let changes = || Changes { command: vec![NOTHING.to_owned()], ..Changes::default() };
    let mut plan = match form(target) {
        Form::Job => Plan::read(target, changes())?,
        Form::Part(environment) => {
            let dir = tempfile::tempdir().map_err(|error| {
                Failure::refused(format!("cannot make a temporary file: {error}"), "make room below /tmp")
            })?;
            let file = dir.path().join("job.yml");
            let text = format!("command: {NOTHING}\nenvironment: {environment}\n");
            fs::write(&file, text).map_err(|error| {
                Failure::refused(format!("cannot write a temporary file: {error}"), "make room below /tmp")
            })?;
            Plan::read(&file, changes())?
        }
    };
    let name = target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    plan.draft = JobDraft {
        command: NOTHING.to_owned(),
        environment: plan.draft.environment,
        display_name: format!("build the environment of {name}"),
        experiment: "environments".to_owned(),
        ..JobDraft::default()
    };
    (plan.code, plan.hint) = (None, "env".to_owned());
    plan.inputs.clear();
    Ok(plan)
}

/// What a file is.
#[derive(Debug, PartialEq, Eq)]
enum Form {
    /// A directory or a job file, which names its environment.
    Job,
    /// A part of a job file: the text that would be under `environment`.
    Part(String),
}

/// What `target` is, by its content, because users name these files as they like.
fn form(target: &Path) -> Form {
    let Ok(text) = crate::prepare::read_text(target) else { return Form::Job }; // reading it says what is wrong
    let path = target.canonicalize().unwrap_or_else(|_| PathBuf::from(target));
    let quoted = format!("'{}'", path.display().to_string().replace('\'', "''"));
    let has = |key: &str| text.lines().any(|line| line.starts_with(&format!("{key}:")));
    if text.lines().any(|line| line.trim() == "@EXPLICIT") {
        return Form::Part(format!("{{conda_lock: {quoted}}}"));
    }
    if path.extension().is_some_and(|end| end == "txt" || end == "in") {
        return Form::Part(format!("{{requirements: {quoted}}}"));
    }
    if has("command") {
        return Form::Job;
    }
    if has("dependencies") {
        return Form::Part(format!("{{conda_file: {quoted}}}"));
    }
    let document = ["image", "conda_file", "conda_lock", "build", "python", "requirements"];
    match document.into_iter().any(has) {
        true => Form::Part(format!("'file:{}'", path.display().to_string().replace('\'', "''"))),
        false => Form::Job,
    }
}

#[cfg(test)]
mod tests {
    use agent_model::EnvSpec;

    use super::*;

    #[test]
    fn test_files_are_told_by_what_is_in_them() {
        let dir = tempfile::tempdir().unwrap();
        let is = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            match form(&path) {
                Form::Job => "job".to_owned(),
                Form::Part(part) => {
                    part.replace(&dir.path().canonicalize().unwrap().display().to_string(), "")
                }
            }
        };
        assert_eq!(is("e.yml", "name: x\ndependencies: [python]\n"), "{conda_file: '/e.yml'}");
        assert_eq!(is("it's.txt", "numpy\n"), "{requirements: '/it''s.txt'}");
        assert_eq!(is("env.lock", "# platform: linux-64\n@EXPLICIT\n"), "{conda_lock: '/env.lock'}");
        assert_eq!(is("job.yml", "command: x\nenvironment: host\n"), "job");
        assert_eq!(is("d.yml", "conda_file: c.yml\n"), "'file:/d.yml'");
        assert_eq!(form(dir.path()), Form::Job);
    }

    #[test]
    fn test_job_has_the_environment_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("requirements.txt"), "numpy\n").unwrap();
        let job =
            "command: python t.py\ncode: .\ninputs: {n: 1}\nenvironment: {requirements: requirements.txt}\n";
        fs::write(dir.path().join("job.yml"), job).unwrap();
        let pip = EnvSpec::Pip { python: "python3".into(), requirements: vec!["numpy".into()] };
        for target in [dir.path().to_owned(), dir.path().join("job.yml"), dir.path().join("requirements.txt")]
        {
            let plan = plan(&target).ok().unwrap();
            assert_eq!(plan.draft.environment, pip, "{}", target.display());
            assert!(plan.code.is_none() && plan.draft.inputs.is_empty());
            assert_eq!(plan.draft.command, NOTHING);
        }
    }
}
