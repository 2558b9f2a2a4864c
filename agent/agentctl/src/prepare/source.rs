//! Finds what a job is made from: a job file, a run configuration, a script, or a directory with neither.
//!
//! Owns where run configurations are looked for. Reads a file only where its name does not say what it is.

use std::fs;
use std::path::{Path, PathBuf};

use agent_jobfile::Dialect;
use agent_model::{Code, Fault};

use super::Changes;

/// The names a job file may have in a directory.
const JOB_FILES: [&str; 2] = ["job.yml", "job.yaml"];
/// Where a project keeps its run configurations; the first one that exists counts.
const FOLDERS: [&str; 2] = ["aml_config", ".azureml"];
const EXTENSION: &str = "runconfig";

/// What a job is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A directory: the command line says what to run.
    Directory(PathBuf),
    /// A script, which runs in its directory by this program.
    Script { dir: PathBuf, name: String, program: &'static str },
    /// A command job.
    Job(PathBuf),
    /// A run configuration; `folder` is the project's folder of them, or empty if it has none.
    Runconfig { file: PathBuf, project: PathBuf, folder: &'static str },
}

impl Source {
    /// What `target` is, or what is meant by the run configuration that the command line names.
    pub(crate) fn find(target: &Path, changes: &Changes) -> Result<Source, Fault> {
        let metadata = fs::metadata(target).map_err(|error| {
            Fault::new(Code::JobFile, format!("cannot find `{}`", target.display())).because(&error).fix(
                match resembling(target) {
                    Some(meant) => format!("did you mean `{}`?", meant.display()),
                    None => "name a directory with your code, a script, or a job file".to_owned(),
                },
            )
        })?;
        match &changes.config {
            Some(name) if metadata.is_dir() => named(target, name),
            Some(name) => Err(Fault::new(
                Code::JobFile,
                format!("`{}` is no directory, and `-c {name}` belongs to a project", target.display()),
            )
            .fix("name the project's directory first, and a script behind it: `DIR -c NAME train.py`")),
            None if metadata.is_dir() => in_directory(target, changes.command.is_empty()),
            None => Ok(of_file(target)),
        }
    }
}

/// What is beside a path that leads nowhere, and has nearly its name.
fn resembling(target: &Path) -> Option<PathBuf> {
    let (dir, name) = (target.parent()?, target.file_name()?.to_str()?);
    let here = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let names = fs::read_dir(here).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let names: Vec<String> = names.collect();
    let known: Vec<&str> = names.iter().map(String::as_str).collect();
    agent_jobfile::nearest(name, &known).map(|found| dir.join(found))
}

/// `-c NAME`: a file of that name; else one in the project's folder, or beside the code.
fn named(project: &Path, name: &str) -> Result<Source, Fault> {
    let folder = folder_of(project);
    let with_extension = format!("{name}.{EXTENSION}");
    let candidates = [
        PathBuf::from(name),
        project.join(folder).join(name),
        project.join(folder).join(&with_extension),
        project.join(&with_extension),
    ];
    if let Some(file) = candidates.iter().find(|file| file.is_file()) {
        return Ok(Source::Runconfig { file: file.clone(), project: project.to_owned(), folder });
    }
    let looked: Vec<String> = candidates[1..].iter().map(|file| format!("`{}`", file.display())).collect();
    let there = runconfigs(project);
    Err(Fault::new(Code::JobFile, format!("there is no run configuration `{name}`"))
        .why(format!("looked for {}", looked.join(", ")))
        .fix(match there.is_empty() {
            true => "`agentctl init --runconfig` writes one".to_owned(),
            false => format!("there is: {}", names(&there)),
        }))
}

/// A job file goes before run configurations; `must` is whether one of them has to say what to run.
fn in_directory(dir: &Path, must: bool) -> Result<Source, Fault> {
    if let Some(file) = JOB_FILES.iter().map(|name| dir.join(name)).find(|file| file.is_file()) {
        return Ok(Source::Job(file));
    }
    match runconfigs(dir).as_slice() {
        [file] => {
            Ok(Source::Runconfig { file: file.clone(), project: dir.to_owned(), folder: folder_of(dir) })
        }
        several @ [_, _, ..] if must => {
            let what = format!("`{}` has several run configurations", dir.display());
            Err(Fault::new(Code::JobFile, what).fix(format!("choose one with `-c`: {}", names(several))))
        }
        _ => Ok(Source::Directory(dir.to_owned())),
    }
}

fn of_file(file: &Path) -> Source {
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let dir = file.parent().unwrap_or(Path::new(""));
    if let Some(program) = interpreter(file) {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        return Source::Script { dir: dir.to_owned(), name, program };
    }
    // A file that cannot be read is told of when it is read as a job file.
    let text = super::read_text(file).unwrap_or_default();
    if let Some(program) = shebang(&text).filter(|_| agent_jobfile::is_batch_script(&text)) {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        return Source::Script { dir: dir.to_owned(), name, program };
    }
    match Dialect::of(&name, &text) {
        Dialect::Job => Source::Job(file.to_owned()),
        Dialect::Runconfig => {
            let (project, folder) = project_of(dir);
            Source::Runconfig { file: file.to_owned(), project, folder }
        }
    }
}

/// The interpreter of a script, by its extension.
fn interpreter(target: &Path) -> Option<&'static str> {
    match target.extension()?.to_str()? {
        "py" => Some("python"),
        "sh" => Some("bash"),
        _ => None,
    }
}

/// The interpreter that the first line of a script names.
fn shebang(text: &str) -> Option<&'static str> {
    let line = text.strip_prefix("#!")?.lines().next()?;
    let known = [("python", "python"), ("zsh", "zsh")].into_iter().find(|(name, _)| line.contains(name));
    Some(known.map_or("bash", |(_, program)| program))
}

/// The project whose run configurations are in `dir`, and its folder of them.
fn project_of(dir: &Path) -> (PathBuf, &'static str) {
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    match FOLDERS.iter().find(|folder| whole.file_name().is_some_and(|name| name == **folder)) {
        Some(folder) if dir.file_name().is_some_and(|name| name == *folder) => {
            let project = dir.parent().filter(|project| !project.as_os_str().is_empty());
            (project.unwrap_or(Path::new(".")).to_owned(), folder)
        }
        Some(folder) => (dir.join(".."), folder),
        None => (dir.to_owned(), ""),
    }
}

/// The folder of a project's run configurations.
fn folder_of(project: &Path) -> &'static str {
    FOLDERS.into_iter().find(|folder| project.join(folder).is_dir()).unwrap_or(FOLDERS[1])
}

/// Every run configuration in the folder of a project, by name.
fn runconfigs(project: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(project.join(folder_of(project))).into_iter().flatten().flatten();
    let is = |file: &PathBuf| file.extension().is_some_and(|extension| extension == EXTENSION);
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is).collect();
    files.sort();
    files
}

fn names(files: &[PathBuf]) -> String {
    let names = files.iter().filter_map(|file| Some(file.file_stem()?.to_string_lossy().into_owned()));
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::tests::project;
    use super::*;

    fn find(dir: &Path, config: Option<&str>) -> Result<Source, Fault> {
        Source::find(dir, &Changes { config: config.map(str::to_owned), ..Changes::default() })
    }

    fn file_of(source: Source, dir: &Path) -> String {
        let Source::Runconfig { file, .. } = source else { panic!("{source:?}") };
        file.strip_prefix(dir).unwrap().display().to_string()
    }

    #[test]
    fn test_names_are_looked_for_in_the_order_of_the_old_tools() {
        let dir = project(&[
            (".azureml/a", "x: 1"),
            (".azureml/a.runconfig", "x: 1"),
            (".azureml/b.runconfig", "x: 1"),
            ("b.runconfig", "x: 1"),
            ("c.runconfig", "x: 1"),
        ]);
        for (name, found) in [("a", ".azureml/a"), ("b", ".azureml/b.runconfig"), ("c", "c.runconfig")] {
            assert_eq!(file_of(find(dir.path(), Some(name)).unwrap(), dir.path()), found);
        }
        let path = dir.path().join("c.runconfig");
        let source = find(dir.path(), path.to_str()).unwrap();
        let expected = Source::Runconfig { file: path, project: dir.path().to_owned(), folder: ".azureml" };
        assert_eq!(source, expected);
        let fault = find(dir.path(), Some("d")).unwrap_err();
        assert!(fault.why[0].contains(".azureml/d.runconfig") && fault.fix.unwrap().ends_with("a, b"));
        // The older folder hides the other.
        let dir = project(&[(".azureml/a.runconfig", "x: 1"), ("aml_config/a.runconfig", "x: 1")]);
        assert_eq!(file_of(find(dir.path(), Some("a")).unwrap(), dir.path()), "aml_config/a.runconfig");
    }

    #[test]
    fn test_the_only_run_configuration_of_a_directory_needs_no_name_and_a_job_file_goes_before() {
        let dir = project(&[(".azureml/a.runconfig", "x: 1"), (".azureml/conda_dependencies.yml", "x: 1")]);
        assert_eq!(file_of(find(dir.path(), None).unwrap(), dir.path()), ".azureml/a.runconfig");
        fs::write(dir.path().join(".azureml/b.runconfig"), "").unwrap();
        let fault = find(dir.path(), None).unwrap_err();
        assert_eq!(fault.fix.unwrap(), "choose one with `-c`: a, b");
        fs::write(dir.path().join("job.yml"), "").unwrap();
        assert_eq!(find(dir.path(), None).unwrap(), Source::Job(dir.path().join("job.yml")));
        let fault = find(&dir.path().join("job.yml"), Some("a")).unwrap_err();
        assert!(fault.what.contains("is no directory"), "{fault}");
    }

    #[test]
    fn test_a_file_of_nearly_that_name_is_offered() {
        let dir = project(&[("train.py", ""), ("notes.txt", "")]);
        let fix =
            |name: &str| Source::find(&dir.path().join(name), &Changes::default()).unwrap_err().fix.unwrap();
        assert_eq!(fix("trian.py"), format!("did you mean `{}`?", dir.path().join("train.py").display()));
        assert_eq!(fix("evaluate.py"), "name a directory with your code, a script, or a job file");
    }

    #[test]
    fn test_a_file_is_what_its_name_or_its_text_says() {
        let dir = project(&[
            ("p/.azureml/x.yml", "script: a.py\ntarget: local\n"),
            ("t.py", ""),
            ("j.yml", "command: x"),
            ("train.slurm", "#!/bin/bash -l\n#SBATCH -c 2\n"),
            ("job", "#!/usr/bin/env python3\n#SBATCH -c 2\n"),
        ]);
        let of = |path: &str| find(&dir.path().join(path), None).unwrap();
        let Source::Runconfig { project, folder, .. } = of("p/.azureml/x.yml") else { panic!("a job") };
        assert_eq!(
            (project.canonicalize().unwrap(), folder),
            (dir.path().join("p").canonicalize().unwrap(), ".azureml")
        );
        assert!(matches!(of("t.py"), Source::Script { program: "python", .. }));
        assert!(matches!(of("j.yml"), Source::Job(_)));
        // A batch script of Slurm has any name.
        assert!(matches!(of("train.slurm"), Source::Script { program: "bash", .. }));
        assert!(matches!(of("job"), Source::Script { program: "python", .. }));
    }
}
