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
use crate::prepare::{job_name, quoted};

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
    if !args.arguments.is_empty() {
        draft.command = with_arguments(&draft.command, &args.arguments)?;
    }
    set(&mut draft, &args.set)?;
    let again = Box::pin(client.enqueue(draft.validate()?, hint, output)).await;
    let again = again.map_err(|failure| as_job::explain_gone(failure, &job.job))?;
    submit::tell_name(&again, args.json, output)
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
        if let Some(command) = with_argument(&draft.command, key, value) {
            draft.command = command;
            continue;
        }
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
                    true => {
                        "it has no input that is a value, and no such argument; other arguments: agentctl rerun JOB -- \
                         ARGUMENTS"
                            .to_owned()
                    }
                    false => format!("what can be set: {}", known.join(", ")),
                };
                return Err(Failure::refused(format!("`--set {key}` names nothing of this job"), fix));
            }
        }
    }
    Ok(())
}

/// The command with other arguments behind its program, or behind the script that its program runs.
fn with_arguments(command: &str, arguments: &[String]) -> Result<String, Failure> {
    let cannot = |why: &str| {
        let fix = "write another job file: agentctl show JOB --as-job";
        Failure::refused(format!("the arguments of `{command}` cannot be replaced: {why}"), fix)
    };
    if command.contains(['\n', ';', '|', '&', '<', '>', '`', '(']) {
        return Err(cannot("a shell reads it as more than one program and its arguments"));
    }
    let mut words = command.split_whitespace();
    let program = words.next().ok_or_else(|| cannot("it is empty"))?;
    let name = program.rsplit('/').next().unwrap_or(program);
    let mut kept = vec![program];
    if name.starts_with("python") || ["bash", "sh"].contains(&name) {
        // `python -u train.py --lr 1`: up to the first word that is no option.
        let mut is_script = false;
        kept.extend(words.take_while(|word| !std::mem::replace(&mut is_script, !word.starts_with('-'))));
        if !is_script && kept.len() == 1 {
            return Err(cannot("it names no script"));
        }
    }
    let new = arguments.iter().map(|argument| quoted(argument));
    Ok(kept.into_iter().map(str::to_owned).chain(new).collect::<Vec<_>>().join(" "))
}

/// The command with another value for its argument `--KEY`, if it has that.
fn with_argument(command: &str, key: &str, value: &str) -> Option<String> {
    let (option, value) = (format!("--{key}"), quoted(value));
    let plain = |word: &&str| !word.contains(['\'', '"', '\\']);
    let mut words: Vec<String> = command.split(' ').map(str::to_owned).collect();
    let joined = format!("{option}=");
    if let Some(word) = words.iter_mut().find(|word| word.starts_with(&joined) && plain(&word.as_str())) {
        *word = format!("{joined}{value}");
        return Some(words.join(" "));
    }
    let at = words.iter().position(|word| *word == option)? + 1;
    let old = words.get_mut(at).filter(|word| plain(&word.as_str()) && !word.starts_with("--"))?;
    *old = value;
    Some(words.join(" "))
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
    output.note(&format!("{}: {}, {}", dest.display(), count(laid.files, "file"), size::binary(laid.bytes)));
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
    fn test_arguments_are_replaced_behind_the_script() {
        let new = |command: &str, line: &str| {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            with_arguments(command, &arguments).ok()
        };
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(new("python train.py --lr 0.1", "--lr 0.3"), is("python train.py --lr 0.3"));
        assert_eq!(new("python3 -u train.py", "a"), is("python3 -u train.py a"));
        assert_eq!(new("./train --lr 0.1", "$X"), is("./train '$X'"));
        assert_eq!(new("cd src && python train.py", "x"), None);
    }

    #[test]
    fn test_one_argument_gets_another_value() {
        let new = |command: &str| with_argument(command, "lr", "0.3");
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(new("python t.py --lr 0.1 --n 2"), is("python t.py --lr 0.3 --n 2"));
        assert_eq!(new("python t.py --lr=0.1"), is("python t.py --lr=0.3"));
        assert_eq!(new("python t.py --lrate 0.1"), None);
        assert_eq!(new("python t.py --lr"), None);
        assert_eq!(new("python t.py --lr 'a b'"), None);
    }

    #[test]
    fn test_new_name_is_made_from_the_old_one() {
        assert_eq!(stem("train-a-x7k2p", false), "train-a");
        assert_eq!(stem("train-a", true), "train-a");
        assert_eq!(stem("train", false), "train");
    }
}
