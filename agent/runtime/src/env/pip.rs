//! Pip requirements on top of an interpreter of the host: a virtual environment of its own.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_model::{EnvSpec, failpoint};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::bench::Ran;
use super::interpreter::{Interpreter, Interpreters};
use super::{AcquireError, Bench, Built, EnvBuilder, EnvConfig};
use crate::exec::Command;

/// Grows when the same identity would be built in another way.
const VERSION: u32 = 1;

const MAKE: &str = "making a virtual environment";
const INSTALL: &str = "installing packages";

/// Makes virtual environments.
pub(super) struct Pip {
    config: Arc<EnvConfig>,
    interpreters: Arc<Interpreters>,
}

impl Pip {
    pub(super) fn new(config: Arc<EnvConfig>, interpreters: Arc<Interpreters>) -> Pip {
        Pip { config, interpreters }
    }

    async fn make(&self, python: &Interpreter, bench: &Bench) -> Result<(), AcquireError> {
        bench.say(&format!("{MAKE} with {} ({})", python.executable.display(), python.version));
        let command = Command::new(&python.executable).args(["-I", "-m", "venv"]).arg(bench.prefix());
        let ran = bench.run(MAKE, self.clean(command, bench)).await?;
        if ran.success { Ok(()) } else { Err(judge_venv(&ran, python, bench.prefix())) }
    }

    async fn install(&self, requirements: &[String], bench: &Bench) -> Result<(), AcquireError> {
        let list = bench.prefix().join("requirements.txt");
        let lines = requirements.join("\n") + "\n";
        let written = failpoint::hit("env.requirements.write").and_then(|()| fs::write(&list, lines));
        written.map_err(AcquireError::io("write", &list))?;
        bench.say(&format!("{INSTALL}: {}", requirements.join(", ")));
        let command = Command::new(bench.prefix().join("bin/python"))
            .args(["-m", "pip", "install", "--no-input", "--disable-pip-version-check"])
            .args(["--progress-bar", "off", "-r"])
            .arg(&list);
        let mut ran = bench.run(INSTALL, self.clean(command, bench)).await?;
        if ran.success {
            return Ok(());
        }
        ran.text = name_lines(&ran.text, &list, requirements);
        Err(judge_install(&ran, bench.prefix()))
    }

    /// Gives a command what a builder may see, and nothing of the daemon's own environment. Scratch files go
    /// into the environment, so that they are wiped with it.
    fn clean(&self, command: Command, bench: &Bench) -> Command {
        let path = format!("{}:{}", bench.prefix().join("bin").display(), self.config.path);
        command.envs(&self.config.vars).envs([
            ("PATH", path.as_str()),
            ("TMPDIR", &scratch(bench).to_string_lossy()),
            ("LC_ALL", "C.UTF-8"), // the messages of pip are read below
            ("PYTHONNOUSERSITE", "1"),
            ("PYTHONUNBUFFERED", "1"),
        ])
    }
}

impl EnvBuilder for Pip {
    fn handles(&self, spec: &EnvSpec) -> bool {
        matches!(spec, EnvSpec::Pip { .. })
    }

    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        async move {
            let (python, requirements) = parts(spec)?;
            let python = self.interpreters.find(python).await?;
            let files = local_files(requirements);
            Ok(format!("pip {VERSION}\n{}\n{files}{}", python.identity(), spec.normalized()))
        }
        .boxed()
    }

    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        bench: &'a Bench,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        async move {
            let (python, requirements) = parts(spec)?;
            let python = self.interpreters.find(python).await?;
            let scratch = scratch(bench);
            fs::create_dir(&scratch).map_err(AcquireError::io("create", &scratch))?;
            self.make(&python, bench).await?;
            if !requirements.is_empty() {
                self.install(requirements, bench).await?;
            }
            fs::remove_dir_all(&scratch).map_err(AcquireError::io("remove", &scratch))?;
            let vars = [("VIRTUAL_ENV".to_owned(), bench.prefix().display().to_string())];
            Ok(Built {
                vars: BTreeMap::from(vars),
                path_entries: vec![bench.prefix().join("bin")],
                python_version: python.version.clone(),
            })
        }
        .boxed()
    }
}

fn scratch(bench: &Bench) -> PathBuf {
    bench.prefix().join("tmp")
}

fn parts(spec: &EnvSpec) -> Result<(&str, &[String]), AcquireError> {
    match spec {
        EnvSpec::Pip { python, requirements } => Ok((python, requirements)),
        other => Err(AcquireError::Unsupported { kind: other.kind() }),
    }
}

/// A line may name a file of the node: a wheel, or another list. A changed file is another environment.
fn local_files(requirements: &[String]) -> String {
    let words = requirements.iter().flat_map(|line| line.split([' ', '\t', '=']));
    let paths =
        words.map(|word| word.strip_prefix("file://").unwrap_or(word)).filter(|word| word.starts_with('/'));
    let seen = paths.filter_map(|path| Some((path, fs::metadata(path).ok()?)));
    seen.filter(|(_, file)| file.is_file())
        .map(|(path, file)| format!("{path} {} {}.{}\n", file.len(), file.mtime(), file.mtime_nsec()))
        .collect()
}

/// Why a virtual environment was not made.
fn judge_venv(ran: &Ran, python: &Interpreter, prefix: &Path) -> AcquireError {
    let says = |text| ran.text.contains(text);
    if says("No space left on device") {
        return AcquireError::DiskFull { path: prefix.to_owned() };
    }
    // Distributions leave out `ensurepip`, or `venv`, or the wheels that `ensurepip` installs.
    if says("No module named") || says("ensurepip") {
        let package = python.venv_package();
        return AcquireError::VenvMissing { python: python.executable.clone(), package };
    }
    AcquireError::Failed { step: MAKE, detail: ran.tail() }
}

/// Pip names a requirement by its line in a file that nobody but the builder knows; puts the line itself there.
fn name_lines(text: &str, list: &Path, requirements: &[String]) -> String {
    requirements.iter().enumerate().fold(text.to_owned(), |text, (index, requirement)| {
        let place = format!("-r {} (line {})", list.display(), index + 1);
        text.replace(&format!(" (from {place})"), "").replace(&place, requirement)
    })
}

/// What pip prints when it cannot reach an index; without a match it may still print that no package was found.
const UNREACHABLE: [&str; 7] = [
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "NameResolutionError",
    "SSLError",
    "connection broken by",
];

/// Why packages were not installed, from what pip printed.
fn judge_install(ran: &Ran, prefix: &Path) -> AcquireError {
    let lines = || ran.text.lines().map(str::trim);
    let errors = || lines().filter_map(|line| line.strip_prefix("ERROR: "));
    if ran.text.contains("No space left on device") {
        return AcquireError::DiskFull { path: prefix.to_owned() };
    }
    if let Some(line) = lines().rfind(|line| UNREACHABLE.iter().any(|sign| line.contains(sign))) {
        return AcquireError::Network { detail: line.to_owned() };
    }
    if let Some(requirement) =
        errors().find_map(|line| line.strip_prefix("No matching distribution found for "))
    {
        let reason = errors().find(|line| line.starts_with("Could not find a version"));
        let detail = reason.unwrap_or("no version of it was found").to_owned();
        return AcquireError::Unsatisfied { requirement: requirement.to_owned(), detail };
    }
    if let Some(line) = errors().find(|line| line.starts_with("Cannot install ")) {
        let packages = line.trim_start_matches("Cannot install ").split(" because ").next().unwrap_or(line);
        let detail = "their requirements exclude each other".to_owned();
        return AcquireError::Unsatisfied {
            requirement: packages.to_owned(),
            detail: conflict(lines(), detail),
        };
    }
    if let Some(line) = errors().find(|line| line.contains("requires a different Python")) {
        let package = line.split_whitespace().nth(1).unwrap_or(line).trim_matches('\'').to_owned();
        return AcquireError::Unsatisfied { requirement: package, detail: line.to_owned() };
    }
    AcquireError::Failed { step: INSTALL, detail: ran.tail() }
}

/// The lines below `The conflict is caused by:`, if they are there.
fn conflict<'a>(lines: impl Iterator<Item = &'a str>, otherwise: String) -> String {
    let causes = lines.skip_while(|line| *line != "The conflict is caused by:").skip(1);
    let causes: Vec<&str> = causes.take_while(|line| !line.is_empty()).collect();
    if causes.is_empty() { otherwise } else { causes.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(text: &str) -> AcquireError {
        judge_install(&Ran { success: false, text: text.to_owned() }, Path::new("/env"))
    }

    #[test]
    fn test_output_of_pip_is_understood() {
        let missing = "ERROR: Could not find a version that satisfies the requirement nope==9 (from versions: 1, 2)\n\
                       ERROR: No matching distribution found for nope==9\n";
        let AcquireError::Unsatisfied { requirement, detail } = judge(missing) else { panic!() };
        assert_eq!(requirement, "nope==9");
        assert!(detail.contains("from versions: 1, 2"), "{detail}");

        let offline = format!(
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/x/\n{missing}"
        );
        assert!(matches!(judge(&offline), AcquireError::Network { .. }));

        let conflict = "ERROR: Cannot install a==1 and b==2 because these package versions have conflicting \
                        dependencies.\n\nThe conflict is caused by:\n    a 1 depends on c==1\n    b 2 depends on c==2\n\n\
                        To fix this\n";
        let AcquireError::Unsatisfied { requirement, detail } = judge(conflict) else { panic!() };
        assert_eq!(requirement, "a==1 and b==2");
        assert_eq!(detail, "a 1 depends on c==1, b 2 depends on c==2");

        let python = "ERROR: Package 'x' requires a different Python: 3.8.1 not in '>=3.13'\n";
        assert!(matches!(judge(python), AcquireError::Unsatisfied { requirement, .. } if requirement == "x"));

        let full =
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n";
        assert!(matches!(judge(full), AcquireError::DiskFull { .. }));

        let other = "one\n\nerror: subprocess-exited-with-error\n";
        assert!(matches!(judge(other), AcquireError::Failed { detail, .. }
            if detail == "one | error: subprocess-exited-with-error"));
    }

    #[test]
    fn test_lines_of_the_list_are_named() {
        let lines = ["nope==9".to_owned(), "other".to_owned()];
        let text =
            "for nope==9 (from -r /e/list (line 1))\ninstall -r /e/list (line 1) and -r /e/list (line 2)";
        let named = name_lines(text, Path::new("/e/list"), &lines);
        assert_eq!(named, "for nope==9\ninstall nope==9 and other");
    }

    #[test]
    fn test_changed_local_file_is_another_environment() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = dir.path().join("x-1-py3-none-any.whl");
        fs::write(&wheel, "1").unwrap();
        let lines = |wheel: &Path| {
            let wheel = wheel.display();
            [format!("{wheel}"), format!("x @ file://{wheel}"), format!("--requirement={wheel}")]
        };
        for line in lines(&wheel) {
            fs::write(&wheel, "1").unwrap();
            let before = local_files(std::slice::from_ref(&line));
            fs::write(&wheel, "12").unwrap();
            assert_ne!(local_files(std::slice::from_ref(&line)), before, "{line}");
        }
        assert_eq!(local_files(&["numpy==1.0".to_owned(), "/not/there.whl".to_owned()]), "");
    }
}
