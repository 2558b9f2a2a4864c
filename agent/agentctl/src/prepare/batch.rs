//! A batch script of Slurm as a job: what its `#SBATCH` lines ask for, below what the command line says.
//!
//! Owns where such a script starts. With Slurm that is the directory in which `sbatch` was called, so a script that is
//! named by a path from here is sent with this directory; any other is sent with its own.

use std::path::{Component, Path};

use agent_jobfile::yaml::Place;
use agent_jobfile::{self as jobfile, BatchScript};
use agent_model::{Code, Fault, JobDraft};

use super::plan::{Wrong, shell_line};
use super::{Changes, Plan, Remark, in_file, quoted};
use crate::cli::{moment, variable};

impl Plan {
    /// A script with such lines. Its command is put into `changes`, for what is given behind it are its arguments.
    pub(super) fn of_batch_script(
        file: &Path,
        text: &str,
        program: &str,
        changes: &mut Changes,
    ) -> Result<Plan, Wrong> {
        let stem = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let read = jobfile::batch_script(text, &stem).map_err(|refused| in_file(file, refused.into()))?;
        let BatchScript { draft: asked, after, directory, exported, begin, deadline, warnings } = read;
        let (code, script) = place(file);
        let script = match &directory {
            None => script,
            Some(below) => "../".repeat(Path::new(below).components().count()) + &script,
        };
        let words = [program.to_owned(), script].into_iter().chain(std::mem::take(&mut changes.command));
        let words: Vec<String> = words.collect();
        changes.command = match &directory {
            None => words,
            Some(below) => vec![format!("cd {} && {}", quoted(below), shell_line(&words))],
        };
        let moment = |(place, text): (Place, String)| {
            let refuse =
                |why| Fault::new(Code::JobInvalid, format!("{}: {place}: `{text}`: {why}", file.display()));
            moment(&text).map_err(|why| refuse(why).fix("correct the line"))
        };
        let dates = (begin.map(moment).transpose()?, deadline.map(moment).transpose()?);
        let mut plan = Plan::of_directory(code, changes)?;
        plan.hint = if asked.display_name.is_empty() { stem } else { asked.display_name.clone() };
        plan.after = after;
        plan.warnings.extend(warnings.into_iter().map(|warning| Remark::at(file, warning)));
        plan.draft = JobDraft {
            display_name: asked.display_name,
            array: asked.array,
            compute: asked.compute,
            limits: asked.limits,
            resources: asked.resources,
            begin: dates.0,
            deadline: dates.1,
            environment_variables: asked.environment_variables,
            ..plan.draft
        };
        for name in exported {
            match variable(&name) {
                Some(value) => drop(plan.draft.environment_variables.insert(name, value)),
                None => {
                    plan.warnings.push(Remark::of(file, format!("`--export={name}`: {name} is not set here")))
                }
            }
        }
        Ok(plan)
    }
}

/// The directory that is sent with a script, and the path of the script in it.
fn place(file: &Path) -> (&Path, String) {
    let is_below = file.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    let name = file.file_name().map(Path::new).unwrap_or(file);
    let (code, script) = match is_below {
        true => (Path::new("."), file.strip_prefix(".").unwrap_or(file)),
        false => (file.parent().unwrap_or(Path::new("/")), name),
    };
    (code, script.display().to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use agent_model::job::WantedEnd;

    use super::super::tests::project;
    use super::*;
    use crate::cli::Needs;

    const SCRIPT: &str = "#!/bin/bash\n#SBATCH --job-name=mnist --gres=gpu:2 --time=60 --array=0-3\n\
                          #SBATCH -o x.out -d afterok:prep\npython train.py\n";

    #[test]
    fn test_a_batch_script_is_a_job_and_the_command_line_counts_more() {
        let dir = project(&[("train.slurm", SCRIPT), ("requirements.txt", "numpy\n")]);
        let file = dir.path().join("train.slurm");
        let read = |changes| Plan::read(&file, changes).unwrap();
        let plan = read(Changes::default());
        assert_eq!(plan.draft.command, "bash train.slurm");
        assert_eq!((plan.hint.as_str(), plan.code.as_deref()), ("mnist", Some(dir.path())));
        assert_eq!(
            (plan.draft.resources.gpus, plan.draft.limits.timeout),
            (2, Some(Duration::from_secs(3600)))
        );
        assert_eq!(plan.draft.array.map(|array| array.to_string()).as_deref(), Some("0-3"));
        assert_eq!(plan.after, [("prep".to_owned(), WantedEnd::Completed)]);
        assert_eq!(plan.draft.environment_variables[jobfile::SLURM_JOB_NAME], "mnist");
        assert!(matches!(plan.draft.environment, agent_model::EnvSpec::Pip { .. }));
        let [told] = plan.warnings.as_slice() else { panic!("{:?}", plan.warnings) };
        assert!(
            told.to_string().contains("train.slurm: line 3, column 9: `--output` has no effect"),
            "{told}"
        );
        let needs = Needs { gpus: Some(1), ..Needs::default() };
        let words = ["--lr".to_owned(), "0.1 x".to_owned()].to_vec();
        let plan = read(Changes { needs, command: words, name: Some("n".into()), ..Changes::default() });
        assert_eq!(plan.draft.command, "bash train.slurm --lr '0.1 x'");
        assert_eq!(plan.draft.resources.gpus, 1);
    }

    #[test]
    fn test_a_batch_script_starts_where_slurm_would_start_it() {
        let dir = project(&[
            ("a.sh", "#!/bin/bash\n#SBATCH --chdir='runs/my a'\necho\n"),
            ("b.sh", "#!/bin/sh\n#SBATCH -t x\n"),
        ]);
        let plan = Plan::read(&dir.path().join("a.sh"), Changes::default()).unwrap();
        assert_eq!(plan.draft.command, "cd 'runs/my a' && bash ../../a.sh");
        let fault = Plan::read(&dir.path().join("b.sh"), Changes::default()).unwrap_err();
        assert!(fault.what.contains("b.sh: line 2, column 9: `--time`: `x` is no time"), "{fault}");
        for (file, code, script) in [
            ("train.sh", ".", "train.sh"),
            ("./train.sh", ".", "train.sh"),
            ("scripts/train.sh", ".", "scripts/train.sh"),
            ("../scripts/train.sh", "../scripts", "train.sh"),
            ("/p/train.sh", "/p", "train.sh"),
        ] {
            assert_eq!(place(Path::new(file)), (Path::new(code), script.to_owned()), "{file}");
        }
    }
}
