//! `init`: the first job file of a directory. What is there already is left as it is.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use agent_jobfile::{Dialect, schema};

use crate::cli::InitArgs;
use crate::failure::Failure;
use crate::output::{Output, pretty};

/// Scripts that a directory is likely to start with, the first one that is there.
const SCRIPTS: [&str; 4] = ["train.py", "main.py", "run.py", "app.py"];

/// Writes what is missing of a job file, or of a run configuration, and its schema.
pub(super) fn init(args: &InitArgs, output: &mut Output) -> Result<(), Failure> {
    let script = SCRIPTS.into_iter().find(|name| args.directory.join(name).is_file());
    let has_requirements = args.directory.join("requirements.txt").is_file();
    let files = match args.runconfig {
        true => vec![
            (".azureml/local.runconfig", runconfig(script.unwrap_or(SCRIPTS[0]))),
            (".azureml/conda_dependencies.yml", CONDA.to_owned()),
            (".azureml/runconfig.schema.json", pretty(&schema(Dialect::Runconfig)) + "\n"),
        ],
        false => vec![
            ("job.yml", job(script.unwrap_or(SCRIPTS[0]), has_requirements)),
            (".azureml/job.schema.json", pretty(&schema(Dialect::Job)) + "\n"),
        ],
    };
    for (name, text) in files {
        let path = args.directory.join(name);
        match write_new(&path, &text) {
            Ok(()) => output.note(&format!("wrote {}", path.display())),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                output.note(&format!("{} is there already, and stays as it is", path.display()));
            }
            Err(error) => {
                let what = format!("{} cannot be written: {error}", path.display());
                return Err(Failure::refused(what, "name a directory that is yours"));
            }
        }
    }
    if script.is_none() {
        output.note(&format!("write {}, or name your own script in its place", SCRIPTS[0]));
    }
    output.note(&format!("next: agentctl check {0} && agentctl run {0}", args.directory.display()));
    Ok(())
}

/// Writes a file that is not there yet.
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    File::create_new(path)?.write_all(text.as_bytes())
}

fn job(script: &str, has_requirements: bool) -> String {
    let environment = match has_requirements {
        true => "environment: {python: python3, requirements: requirements.txt}",
        false => "environment: host                 # or {python: python3, requirements: requirements.txt}",
    };
    format!(
        "\
# yaml-language-server: $schema=.azureml/job.schema.json
# Every key: agentctl schema job
command: python {script}
code: .
{environment}
# inputs:
#   rate: 0.1                         # ${{{{inputs.rate}}}} in the command
#   data: {{type: uri_folder, path: data}}
# resources: {{gpus: 1, memory: 8g}}
# limits: {{timeout: 2h}}
"
    )
}

fn runconfig(script: &str) -> String {
    format!(
        "\
# yaml-language-server: $schema=runconfig.schema.json
# Every key: agentctl schema runconfig
script: {script}
arguments: []
target: local
framework: Python
communicator: None
nodeCount: 1
maxRunDurationSeconds:
environmentVariables: {{}}
environment:
  python:
    userManagedDependencies: true       # false: the packages of the conda file are installed
    interpreterPath: python
    condaDependenciesFile: .azureml/conda_dependencies.yml
  docker:
    enabled: false
    # baseImage: IMAGE
"
    )
}

const CONDA: &str = "\
name: project
channels:
  - conda-forge
dependencies:
  - python=3.11
  - pip
";

#[cfg(test)]
mod tests {
    use agent_jobfile::{command_job, runconfig as read_runconfig};

    use super::*;

    #[test]
    fn test_templates_are_read_without_a_warning() {
        for has_requirements in [true, false] {
            let text = job("t.py", has_requirements);
            assert_eq!(command_job(&text, &[]).unwrap().warnings, []);
            let all =
                text.replace("# inputs", "inputs").replace("#   ", "  ").replace("# resources", "resources");
            let read = command_job(&all.replace("# limits", "limits"), &[]).unwrap();
            assert_eq!((read.inputs.len(), read.draft.resources.gpus, read.warnings.len()), (1, 1, 0));
        }
        let read = read_runconfig(&runconfig("t.py"), &[], ".azureml").unwrap();
        assert_eq!((read.job.draft.command.as_str(), read.job.warnings), ("python t.py", vec![]));
        agent_jobfile::condafile::parse(CONDA).unwrap();
    }

    #[test]
    fn test_what_is_there_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b.txt");
        write_new(&path, "one").unwrap();
        assert_eq!(write_new(&path, "two").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(path).unwrap(), "one");
    }
}
