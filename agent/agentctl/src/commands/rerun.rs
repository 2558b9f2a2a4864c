//! `rerun`: submits a job once more as it is on record, and `code`: fetches what it was made from. Neither looks at the
//! directory that the job came from.

use std::fs;
use std::path::PathBuf;

use agent_model::job::{Array, Input, JobDraft};
use agent_model::size;

use super::view::JobView;
use super::{as_job, download, pipelines, submit, sweeps};
use crate::cli::{CodeArgs, RerunArgs};
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::count;
use crate::prepare::job_name;

/// Submits and prints the new job's name.
pub(super) async fn rerun(args: &RerunArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    let hint = stem(&job.job, job.spec.name.is_some()).to_owned();
    let mut draft = as_job::draft(&client, &job, args.locked, output).await?;
    draft.name = args.name.as_deref().map(job_name).transpose()?;
    draft.predecessors.clear();
    if draft.pipeline.is_some() || args.from.is_some() {
        pipelines::again(&mut draft, &job, args)?;
    } else if args.failed {
        draft.array = Some(failed(&job)?);
    }
    if let Some(sweep) = draft.sweep.as_mut().filter(|_| args.failed) {
        // What was drawn for a trial is its own, also in another sweep.
        for trial in sweeps::trials(&client, &job).await? {
            if let (Some(index), Some(values)) = (trial.index, trial.trial.map(|trial| trial.values)) {
                sweep.given.insert(index, values);
            }
        }
        let again = draft.array.as_ref().map(Array::indices);
        sweep.given.retain(|index, _| again.is_some_and(|again| again.contains(*index)));
    }
    set(&mut draft, &args.set)?;
    let again = Box::pin(submit::enqueue(&client, draft.validate()?, hint, output)).await;
    let again = again.map_err(|failure| as_job::explain_gone(failure, &job.job))?;
    output.print(&format!("{again}\n"))
}

/// The tasks of an array that failed, as an array.
fn failed(job: &JobView) -> Result<Array, Failure> {
    let Some(tasks) = &job.tasks else {
        let fix = format!("run all of it again: agentctl rerun {}", job.job);
        return Err(Failure::refused(format!("{} is no array: --failed chooses tasks of one", job.job), fix));
    };
    let at_once = job.spec.array.as_ref().and_then(Array::at_once);
    Array::new(tasks.failed.clone(), at_once).map_err(|_| {
        let fix = format!("see how they stand: agentctl jobs {}", job.job);
        Failure::refused(format!("no task of {} failed", job.job), fix)
    })
}

/// What the name of a new job is made from. A name that was made has a random part at its end.
fn stem(name: &str, is_given: bool) -> &str {
    match name.rsplit_once('-') {
        Some((stem, _)) if !is_given => stem,
        _ => name,
    }
}

/// Gives inputs that are values other ones.
fn set(draft: &mut JobDraft, values: &[(String, String)]) -> Result<(), Failure> {
    for (key, value) in values {
        match key.strip_prefix("inputs.").and_then(|name| draft.inputs.get_mut(name)) {
            Some(Input::Literal(literal)) => value.clone_into(literal),
            Some(_) => {
                return Err(Failure::refused(
                    format!("`{key}` is not a value: rerun keeps the files of the job"),
                    "for other files submit the job again from its directory",
                ));
            }
            None => {
                let inputs = draft.inputs.iter().filter(|(_, input)| matches!(input, Input::Literal(_)));
                let known: Vec<String> = inputs.map(|(name, _)| format!("inputs.{name}")).collect();
                let fix = match known.is_empty() {
                    true => "it has no input that is a value".to_owned(),
                    false => format!("what can be set: {}", known.join(", ")),
                };
                return Err(Failure::refused(format!("`--set {key}` names nothing of this job"), fix));
            }
        }
    }
    Ok(())
}

/// Fetches the code.
pub(super) async fn code(args: &CodeArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    let Some(root) = job.spec.code else {
        output.note(&format!("{} has no code", job.job));
        return Ok(());
    };
    let dest = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}-code", job.job)));
    if dest.exists() {
        let what = format!("`{}` exists", dest.display());
        return Err(Failure::refused(what, "name another directory with -o"));
    }
    let room = download::room_beside(&dest)?;
    let tree = room.path().join("tree");
    let laid = download::fetch_tree(&client, root, &[], &tree, &dest, output).await;
    let laid = laid.map_err(|error| {
        download::unlaid(&job.job, &dest, &error, "the code is not kept any more".to_owned())
    })?;
    fs::rename(&tree, &dest).map_err(|error| download::unwritable(&dest, &error))?;
    output.note(&format!("{}: {}, {}", dest.display(), count(laid.files, "file"), size::decimal(laid.bytes)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_only_values_are_set() {
        let literal = Input::Literal("0.1".to_owned());
        let folder = Input::Folder(agent_model::Digest::EMPTY);
        let inputs = [("lr".to_owned(), literal), ("data".to_owned(), folder)];
        let mut draft = JobDraft { inputs: inputs.into(), ..JobDraft::default() };
        let mut try_set = |key: &str| set(&mut draft, &[(key.to_owned(), "0.2".to_owned())]);
        let refused = |failure: Result<(), Failure>| match failure.unwrap_err() {
            Failure::Refused { what, fix } => format!("{what}: {fix}"),
            other => panic!("{other:?}"),
        };
        try_set("inputs.lr").unwrap();
        assert!(refused(try_set("inputs.data")).contains("is not a value"));
        assert!(refused(try_set("inputs.x")).ends_with("what can be set: inputs.lr"));
        assert!(refused(try_set("lr")).contains("names nothing"));
        assert_eq!(draft.inputs["lr"], Input::Literal("0.2".to_owned()));
    }

    #[test]
    fn test_new_name_is_made_from_the_old_one() {
        assert_eq!(stem("train-a-x7k2p", false), "train-a");
        assert_eq!(stem("train-a", true), "train-a");
        assert_eq!(stem("train", false), "train");
    }
}
