//! Reads the directory or file that the user names: a draft, and the files that still have to be sent.

use std::fs;
use std::path::{Path, PathBuf};

use agent_jobfile::{self as jobfile, EnvironmentRef, InputRef, JobFile, Runconfig};
use agent_model::job::WantedEnd;
use agent_model::{Code, EnvSpec, Fault, JobDraft, JobId};

use crate::cli::Needs;

use super::{PipelinePlan, Remark, Source, conda, in_file, read, requirements, text};

const REQUIREMENTS: &str = "requirements.txt";

/// What the command line changes in a job.
#[derive(Debug, Default, Clone)]
pub(crate) struct Changes {
    /// The run configuration of the project; the command is then a script and its arguments.
    pub(crate) config: Option<String>,
    /// The directory with its code, where that is not the project.
    pub(crate) source: Option<PathBuf>,
    /// Another experiment.
    pub(crate) experiment: Option<String>,
    /// Another name.
    pub(crate) name: Option<String>,
    /// Another command, as separate words; empty for the job file's.
    pub(crate) command: Vec<String>,
    /// Other values of inputs, by key.
    pub(crate) set: Vec<(String, String)>,
    /// More variables for the command.
    pub(crate) env: Vec<(String, String)>,
    /// Variables whose values are secrets, and the names of those.
    pub(crate) secrets: Vec<(String, String)>,
    /// What else it needs.
    pub(crate) needs: Needs,
    /// Of a pipeline: every step is run, also where the same ran before.
    pub(crate) force_rerun: bool,
    /// Keys that look like slips are only told of.
    pub(crate) allow_unknown: bool,
    /// The file that says the environment of a job without a job file.
    pub(crate) env_file: Option<PathBuf>,
}

/// A job that is complete except for its files.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Everything that needs no file to be sent.
    pub(crate) draft: JobDraft,
    /// The code directory.
    pub(crate) code: Option<PathBuf>,
    /// Inputs that are files or directories, by name.
    pub(crate) inputs: Vec<(String, PathBuf)>,
    /// The context of an image to build, and the Dockerfile in it.
    pub(crate) context: Option<(PathBuf, String)>,
    /// The steps of a pipeline.
    pub(crate) pipeline: Option<Box<PipelinePlan>>,
    /// The jobs that it comes after, as they are named there, and how each must end.
    pub(crate) after: Vec<(String, WantedEnd)>,
    /// What the generated name of the job is made from.
    pub(crate) hint: String,
    /// What chose the environment, where nobody wrote it down.
    pub(crate) environment: Option<String>,
    /// Warnings about what was read, with the place.
    pub(crate) warnings: Vec<Remark>,
}

/// What there is to say about a document that names files which are not as they should be.
#[derive(Debug)]
pub(super) struct Wrong {
    /// At least one.
    pub(super) faults: Vec<Fault>,
    pub(super) warnings: Vec<Remark>,
}

impl From<Fault> for Wrong {
    fn from(fault: Fault) -> Wrong {
        Wrong { faults: vec![fault], warnings: Vec::new() }
    }
}

/// The first fault, with everything else as its causes.
impl From<Wrong> for Fault {
    fn from(Wrong { faults, warnings }: Wrong) -> Fault {
        let also = |fault: Fault, other: Fault| fault.and(&other);
        let none = || Fault::new(Code::Bug, "a job was refused without a fault");
        let fault = faults.into_iter().reduce(also).unwrap_or_else(none);
        warnings.into_iter().fold(fault, |fault, warning| fault.also(warning, None))
    }
}

/// A document, and what its paths are relative to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Home<'a> {
    file: &'a Path,
    base: &'a Path,
}

impl Home<'_> {
    /// Of a file whose paths are relative to it.
    pub(super) fn of(file: &Path) -> Home<'_> {
        Home { file, base: file.parent().unwrap_or(Path::new("")) }
    }
}

impl Plan {
    /// Reads a directory, a job file, a run configuration, or a script, which runs in its directory.
    pub(crate) fn read(target: &Path, changes: Changes) -> Result<Plan, Fault> {
        Ok(Plan::of(&Source::find(target, &changes)?, changes)?)
    }

    /// Reads what was found.
    pub(super) fn of(source: &Source, mut changes: Changes) -> Result<Plan, Wrong> {
        let mut plan = match source {
            Source::Directory(dir) => Plan::of_directory(dir, &changes)?,
            Source::Script { dir, name, program } => {
                let file = dir.join(name);
                match text::read(&file).ok().filter(|text| jobfile::is_batch_script(text)) {
                    Some(text) => Plan::of_batch_script(&file, &text, program, &mut changes)?,
                    None => {
                        let script = [(*program).to_owned(), name.clone()];
                        changes.command = script.into_iter().chain(changes.command).collect();
                        Plan::of_directory(dir, &changes)?
                    }
                }
            }
            Source::Job(file) => Plan::of_job_file(file, &changes)?,
            Source::Runconfig { file, project, folder } => {
                Plan::of_runconfig(file, project, folder, &mut changes)?
            }
        };
        plan.apply(changes)?;
        plan.warnings.extend(plan.windows_script());
        Ok(plan)
    }

    /// A script of its command that no shell on Linux reads as it is meant.
    fn windows_script(&self) -> Option<Remark> {
        let code = self.code.as_deref()?;
        let script = text::windows_script(code, &self.draft.command)?;
        let file = code.join(script);
        let message = format!(
            "its lines end as on Windows, so a shell does not run it as it is meant: `sed -i 's/\\r$//' {}`",
            file.display()
        );
        Some(Remark::of(&file, message))
    }

    /// A directory without a job file: the command line says what to run.
    pub(super) fn of_directory(dir: &Path, changes: &Changes) -> Result<Plan, Fault> {
        refuse_set(changes)?;
        if changes.command.is_empty() {
            return Err(Fault::new(Code::JobFile, format!("`{}` has no job.yml", dir.display())).fix(
                format!(
                    "say what to run: `agentctl run {} -- python train.py`, or write a job.yml",
                    dir.display()
                ),
            ));
        }
        let mut warnings = Vec::new();
        let (environment, chosen) = environment_of(dir, changes.env_file.as_deref(), &mut warnings)?;
        let name = directory_name(dir);
        Ok(Plan {
            environment: Some(chosen),
            draft: JobDraft { environment, experiment: name.clone(), ..JobDraft::default() },
            code: Some(dir.to_owned()),
            inputs: Vec::new(),
            context: None,
            pipeline: None,
            after: Vec::new(),
            hint: name,
            warnings,
        })
    }

    fn of_job_file(file: &Path, changes: &Changes) -> Result<Plan, Wrong> {
        let text = read(file, "the job file")?;
        if jobfile::is_pipeline(&text) {
            return Plan::of_pipeline(file, &text, changes);
        }
        let refused = |refused: jobfile::Refused| in_file(file, refused.into());
        let mut job = jobfile::command_job(&text, &changes.set).map_err(refused)?;
        if !changes.allow_unknown {
            job.warnings = jobfile::Warning::without_slips(job.warnings).map_err(refused)?;
        }
        refuse_env_file(changes, file)?;
        let base = file.parent().unwrap_or(Path::new(""));
        let mut plan = Plan::of_read(job, file, base)?;
        if plan.code.is_none() && plan.draft.code.is_none() && changes.command.is_empty() {
            plan.warnings.extend(not_sent(file, base, &plan.draft.command));
        }
        Ok(plan)
    }

    /// With a run configuration that is named, the command line says which script runs in its way.
    fn of_runconfig(file: &Path, project: &Path, folder: &str, changes: &mut Changes) -> Result<Plan, Wrong> {
        refuse_set(changes)?;
        let text = read(file, "the run configuration")?;
        let given = match &changes.config {
            Some(_) => std::mem::take(&mut changes.command),
            None => Vec::new(),
        };
        let Runconfig { job, script } =
            jobfile::runconfig(&text, &given, folder).map_err(|refused| in_file(file, refused.into()))?;
        let code = changes.source.as_deref().unwrap_or(project);
        if let Some((script, place)) = script
            && changes.command.is_empty()
            && !code.join(&script).is_file()
        {
            let place =
                if given.is_empty() { format!("{}: {place}: ", file.display()) } else { String::new() };
            let what = format!("{place}`script`: there is no file `{script}` in `{}`", code.display());
            let fault = Fault::new(Code::JobInvalid, what);
            return Err(fault.fix("correct the path: it is relative to the project's directory").into());
        }
        let plan = Plan::of_read(job, file, project)?;
        Ok(Plan { code: changes.source.clone().or(plan.code), ..plan })
    }

    /// From a job file that was read; what it names is relative to `base`.
    fn of_read(job: JobFile, file: &Path, base: &Path) -> Result<Plan, Wrong> {
        Plan::of_homes(job, [Home { file, base }; 3])
    }

    /// From a job that was read; where its inputs, its code and its environment are named.
    pub(super) fn of_homes(
        job: JobFile,
        [inputs_at, code_at, environment_at]: [Home<'_>; 3],
    ) -> Result<Plan, Wrong> {
        let JobFile { draft, code, environment, inputs, warnings } = job;
        let Home { file, base } = inputs_at;
        let path = |input| input_path(file, base, input);
        let (found, missing): (Vec<_>, Vec<_>) = inputs.into_iter().map(path).partition(Result::is_ok);
        let mut wrong: Vec<Fault> = missing.into_iter().filter_map(Result::err).collect();
        let mut plan = Plan {
            hint: match draft.display_name.is_empty() {
                true => directory_name(base),
                false => draft.display_name.clone(),
            },
            draft,
            code: code.map(|path| code_at.base.join(path)),
            inputs: found.into_iter().flatten().collect(),
            context: None,
            pipeline: None,
            after: Vec::new(),
            environment: None,
            warnings: warnings.into_iter().map(|warning| Remark::at(file, warning)).collect(),
        };
        wrong.extend(plan.code.iter().filter_map(|code| no_directory(code_at.file, code)));
        wrong.extend(plan.environment(environment_at.file, environment_at.base, environment).err());
        if plan.draft.experiment.is_empty() {
            plan.draft.experiment = directory_name(base);
        }
        match wrong.is_empty() {
            true => Ok(plan),
            false => Err(Wrong { faults: wrong, warnings: plan.warnings }),
        }
    }

    /// Reads the files that an environment names, which are relative to `base`; `file` defines it.
    fn environment(&mut self, file: &Path, base: &Path, environment: EnvironmentRef) -> Result<(), Fault> {
        let warnings = &mut self.warnings;
        self.draft.environment = match environment {
            EnvironmentRef::Spec(spec) => complete(spec, file, warnings)?,
            EnvironmentRef::Requirements { python, path, user_managed } => {
                let requirements = requirements::read(&base.join(path))?;
                match user_managed {
                    true => EnvSpec::Host { python, requirements },
                    false => EnvSpec::Pip { python, requirements },
                }
            }
            EnvironmentRef::CondaFile { image, path, lock } => {
                let file = base.join(&path);
                let text = read(&file, "the conda file")?;
                let (document, parsed) = conda::document(&text, &file, warnings)?;
                let lock =
                    lock.map(|lock| conda::lock(&base.join(lock), Some(&parsed), warnings)).transpose()?;
                match image {
                    Some(image) => EnvSpec::Image { image, conda: Some(document) },
                    None => EnvSpec::Conda { file: path, document, lock },
                }
            }
            EnvironmentRef::CondaLock { document: None, path } => {
                let lock = conda::lock(&base.join(&path), None, warnings)?;
                EnvSpec::Conda { file: path, document: String::new(), lock: Some(lock) }
            }
            EnvironmentRef::CondaLock { document: Some(document), path } => {
                let (document, parsed) = conda::document(&document, file, warnings)?;
                let lock = conda::lock(&base.join(path), Some(&parsed), warnings)?;
                EnvSpec::Conda { file: file_name(file), document, lock: Some(lock) }
            }
            EnvironmentRef::BuildContext { path, dockerfile } => {
                self.context = Some((base.join(path), dockerfile));
                return Ok(());
            }
            EnvironmentRef::Document { path } => {
                let file = base.join(path);
                let text = read(&file, "the environment document")?;
                let (environment, warnings) =
                    jobfile::environment_document(&text).map_err(|fault| in_file(&file, fault))?;
                self.warnings.extend(warnings.into_iter().map(|warning| Remark::at(&file, warning)));
                let base = file.parent().unwrap_or(Path::new(""));
                return self.environment(&file, base, environment);
            }
        };
        Ok(())
    }

    fn apply(&mut self, changes: Changes) -> Result<(), Fault> {
        if let Some(name) = changes.name {
            self.draft.name = Some(job_name(&name)?);
        }
        if let Some(experiment) = changes.experiment {
            self.draft.experiment = experiment;
        }
        if self.pipeline.is_some() {
            return Ok(()); // what else there is was given to its steps
        }
        if !changes.command.is_empty() {
            self.draft.command = shell_line(&changes.command);
        }
        self.draft.environment_variables.extend(changes.env);
        self.draft.secrets.extend(changes.secrets);
        let (needs, resources) = (changes.needs, &mut self.draft.resources);
        resources.gpus = needs.gpus.unwrap_or(resources.gpus);
        resources.cpus = needs.cpus.unwrap_or(resources.cpus);
        resources.memory = needs.memory.unwrap_or(resources.memory);
        self.draft.limits.timeout = needs.time.or(self.draft.limits.timeout);
        Ok(())
    }
}

/// Without `code` a command finds no files. Said only where it names one that is beside the job file: many commands
/// need none.
fn not_sent(file: &Path, base: &Path, command: &str) -> Option<Remark> {
    let words = text::words(command);
    // A word such as `test` may well be no file; one with a dot or a slash inside is meant as a path.
    let mut paths = words.map(|word| word.strip_prefix("./").unwrap_or(word)).filter(|word| {
        let inner = word.trim_matches(['.', '/']);
        inner.contains(['.', '/']) && Path::new(word).is_relative()
    });
    let there = paths.find(|path| base.join(path).is_file())?;
    let message = format!(
        "no `code`: the command starts in an empty directory and will not find `{there}`; `code: .` sends the \
         directory of this file"
    );
    Some(Remark::of(file, message))
}

/// An environment that was written into `file`, with the files its lines include.
fn complete(spec: EnvSpec, file: &Path, warnings: &mut Vec<Remark>) -> Result<EnvSpec, Fault> {
    Ok(match spec {
        EnvSpec::Conda { document, lock, .. } => {
            // A lock alone has no document beside it.
            let read = match document.is_empty() && lock.is_some() {
                true => None,
                false => Some(conda::document(&document, file, warnings)?),
            };
            let (document, parsed) = read.unzip();
            if let Some(lock) = &lock {
                conda::check_lock(lock, file, parsed.as_ref(), warnings)?;
            }
            EnvSpec::Conda { file: file_name(file), document: document.unwrap_or_default(), lock }
        }
        EnvSpec::Image { image, conda: Some(document) } => {
            let (document, _) = conda::document(&document, file, warnings)?;
            EnvSpec::Image { image, conda: Some(document) }
        }
        EnvSpec::Pip { python, requirements } => {
            EnvSpec::Pip { python, requirements: requirements::listed(&requirements, file)? }
        }
        EnvSpec::Host { python, requirements } => {
            EnvSpec::Host { python, requirements: requirements::listed(&requirements, file)? }
        }
        other => other,
    })
}

/// A name as it is given on the command line.
pub(crate) fn job_name(name: &str) -> Result<JobId, Fault> {
    name.parse().map_err(|error| {
        Fault::new(Code::JobInvalid, "the job cannot have that name")
            .because(&error)
            .fix("give another --name, or none: then one is made")
    })
}

/// Only a command job has inputs that the command line may set.
fn refuse_set(changes: &Changes) -> Result<(), Fault> {
    match changes.set.first() {
        Some((key, _)) => {
            Err(Fault::new(Code::JobInvalid, format!("`--set {key}` names nothing of this job"))
                .fix("the job has no inputs; write a job.yml that names them"))
        }
        None => Ok(()),
    }
}

/// A job file says its environment itself.
fn refuse_env_file(changes: &Changes, file: &Path) -> Result<(), Fault> {
    let Some(given) = &changes.env_file else { return Ok(()) };
    let what =
        format!("`--env-file {}` has no place: {} says the environment", given.display(), file.display());
    Err(Fault::new(Code::JobInvalid, what).fix("name it there: `environment: {conda_file: environment.yml}`"))
}

/// Files that say an environment and are not taken without being asked for.
const NOT_TAKEN: [&str; 5] =
    ["environment.yml", "environment.yaml", "conda.yml", "pyproject.toml", "uv.lock"];

/// The environment of a directory without a job file, and what chose it.
fn environment_of(
    dir: &Path,
    given: Option<&Path>,
    warnings: &mut Vec<Remark>,
) -> Result<(EnvSpec, String), Fault> {
    if let Some(file) = given {
        return Ok((environment_in(file, warnings)?, format!("{}, as you said", file.display())));
    }
    let file = dir.join(REQUIREMENTS);
    if file.is_file() {
        return Ok((pip(EnvSpec::DEFAULT_PYTHON, &file)?, format!("{REQUIREMENTS} here")));
    }
    let as_it_is = format!("{} of the machine as it is", EnvSpec::DEFAULT_PYTHON);
    let chosen = match NOT_TAKEN.iter().find(|name| dir.join(name).is_file()) {
        None => as_it_is,
        Some(name) => format!("{as_it_is}; {name} is not used: {}", use_of(&dir.join(name))),
    };
    Ok((EnvSpec::host(), chosen))
}

/// How to use a file that says an environment.
fn use_of(file: &Path) -> String {
    match file.extension().is_some_and(|ending| ending == "toml" || ending == "lock") {
        true => {
            format!("make a {REQUIREMENTS} of it: uv export --no-hashes --no-emit-project >{REQUIREMENTS}")
        }
        false => format!("--env-file {}", file.display()),
    }
}

fn environment_in(file: &Path, warnings: &mut Vec<Remark>) -> Result<EnvSpec, Fault> {
    let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    if ["txt", "in"].contains(&ending) {
        return pip(EnvSpec::DEFAULT_PYTHON, file);
    }
    if ending == "toml" || file_name(file) == "uv.lock" {
        let what = format!("`{}` is not read", file.display());
        return Err(Fault::new(Code::JobUnsupported, what).fix(use_of(file)));
    }
    let text = read(file, "the environment file")?;
    if text.lines().any(|line| line.trim() == "@EXPLICIT") {
        let lock = Some(conda::lock(file, None, warnings)?);
        return Ok(EnvSpec::Conda { file: file_name(file), document: String::new(), lock });
    }
    let (document, _) = conda::document(&text, file, warnings)?;
    Ok(EnvSpec::Conda { file: file_name(file), document, lock: None })
}

fn pip(python: &str, file: &Path) -> Result<EnvSpec, Fault> {
    Ok(EnvSpec::Pip { python: python.to_owned(), requirements: requirements::read(file)? })
}

fn file_name(file: &Path) -> String {
    file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn input_path(file: &Path, base: &Path, input: InputRef) -> Result<(String, PathBuf), Fault> {
    let base = if input.is_given { Path::new("") } else { base };
    let path = base.join(&input.path);
    let refuse = |message: String| {
        let (place, fix) = match input.is_given {
            true => (
                format!("`--set inputs.{}`", input.name),
                "correct the path: it is relative to the directory you are in",
            ),
            false => (
                format!("{}: {}: `{}.{}`", file.display(), input.place, input.key, input.name),
                "correct the path: it is relative to the job file, or to the project of a run configuration",
            ),
        };
        Err(Fault::new(Code::JobInvalid, format!("{place} {message}")).fix(fix))
    };
    match fs::metadata(&path) {
        Err(error) => refuse(format!("cannot be read at `{}`: {error}", path.display())),
        Ok(metadata) if metadata.is_dir() && input.is_file => {
            refuse(format!("is a `uri_file`, but `{}` is a directory", path.display()))
        }
        Ok(_) => Ok((input.name, path)),
    }
}

fn no_directory(file: &Path, code: &Path) -> Option<Fault> {
    let why = match fs::metadata(code) {
        Ok(there) if there.is_dir() => return None,
        Ok(_) => "it is a file".to_owned(),
        Err(error) => error.to_string(),
    };
    let what = format!("{}: `code` is to be a directory, `{}`: {why}", file.display(), code.display());
    let fix = "correct the path: it is relative to the job file; `.` is its own directory";
    Some(Fault::new(Code::JobInvalid, what).fix(fix))
}

pub(super) fn directory_name(dir: &Path) -> String {
    // What a file that is named without a directory is in.
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
    name(dir).or_else(|| name(&dir.canonicalize().ok()?)).unwrap_or_default()
}

/// Words as one line that a shell splits into the same words. A single word is used as the line.
pub(super) fn shell_line(words: &[String]) -> String {
    match words {
        [line] => line.clone(),
        words => words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "),
    }
}

/// A word as a shell reads it back.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@%^".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use agent_model::job::{Input, Resources};

    use super::super::tests::project;
    use super::*;

    fn command(words: &[&str]) -> Changes {
        Changes { command: words.iter().map(|word| (*word).to_owned()).collect(), ..Changes::default() }
    }

    #[test]
    fn test_a_slip_in_a_key_stops_the_job_unless_that_is_wanted() {
        let text = "command: x\nenviroment: {python: python3}\nresources: {gpu: 1}\ndescripton: y\nlimit: {timeout: 5}\n";
        let dir = project(&[("job.yml", text)]);
        let fault = Plan::read(dir.path(), Changes::default()).unwrap_err();
        let told = fault.to_string() + &fault.why.join("\n");
        for slip in ["`enviroment`", "`resources.gpu`", "`limit`", "`descripton`"] {
            assert!(told.contains(slip), "{slip}: {told}");
        }
        assert!(fault.fix.is_some_and(|fix| fix.contains("--allow-unknown")));
        let plan = Plan::read(dir.path(), Changes { allow_unknown: true, ..Changes::default() }).unwrap();
        assert_eq!(plan.warnings.iter().filter(|remark| remark.message.contains("is not known")).count(), 4);
        let dir = project(&[("job.yml", "command: x\ndescripton: y\nfoo: 1\n")]);
        assert_eq!(Plan::read(dir.path(), Changes::default()).unwrap().draft.command, "x");
    }

    #[test]
    fn test_directory_without_a_job_file_needs_a_command() {
        let dir = project(&[("train.py", "")]);
        let plan = Plan::read(dir.path(), command(&["python", "train.py", "--name", "a b"])).unwrap();
        assert_eq!(plan.draft.command, "python train.py --name 'a b'");
        assert_eq!(plan.draft.environment, EnvSpec::host());
        assert_eq!(plan.code.as_deref(), Some(dir.path()));
        let fault = Plan::read(dir.path(), Changes::default()).unwrap_err();
        assert!(fault.fix.unwrap().contains("-- python train.py"));
    }

    #[test]
    fn test_script_runs_in_its_directory() {
        let dir = project(&[("train.py", ""), ("go.sh", ""), ("requirements.txt", "numpy\n")]);
        let plan = Plan::read(&dir.path().join("train.py"), command(&["--lr", "0.1"])).unwrap();
        assert_eq!(plan.draft.command, "python train.py --lr 0.1");
        assert_eq!(plan.code.as_deref(), Some(dir.path()));
        assert!(matches!(plan.draft.environment, EnvSpec::Pip { .. }));
        let plan = Plan::read(&dir.path().join("go.sh"), Changes::default()).unwrap();
        assert_eq!(plan.draft.command, "bash go.sh");
    }

    #[test]
    fn test_requirements_of_a_directory_are_its_environment() {
        let dir = project(&[("requirements.txt", "numpy # fast\n")]);
        let plan = Plan::read(dir.path(), command(&["true"])).unwrap();
        let requirements = vec!["numpy".to_owned()];
        assert_eq!(plan.draft.environment, EnvSpec::Pip { python: "python3".into(), requirements });
    }

    #[test]
    fn test_what_chose_the_environment_is_told_and_another_file_may_be_named() {
        let dir =
            project(&[("environment.yml", "dependencies: [numpy]\n"), ("r.txt", "numpy\n"), ("t.py", "")]);
        let plan = Plan::read(dir.path(), command(&["true"])).unwrap();
        assert_eq!(plan.draft.environment, EnvSpec::host());
        let told = plan.environment.unwrap();
        let file = dir.path().join("environment.yml");
        let expected = format!("is not used: --env-file {}", file.display());
        assert!(told.starts_with("python3 of the machine as it is; ") && told.ends_with(&expected), "{told}");
        let named = |name: &str| Changes { env_file: Some(dir.path().join(name)), ..command(&["true"]) };
        let plan = Plan::read(dir.path(), named("environment.yml")).unwrap();
        assert!(matches!(plan.draft.environment, EnvSpec::Conda { .. }), "{:?}", plan.draft.environment);
        let plan = Plan::read(dir.path(), named("r.txt")).unwrap();
        assert!(matches!(plan.draft.environment, EnvSpec::Pip { .. }));
        let fault = Plan::read(dir.path(), named("uv.lock")).unwrap_err();
        assert!(fault.fix.unwrap().contains("uv export"));
        let dir = project(&[("job.yml", "command: x\n"), ("r.txt", "numpy\n")]);
        let fault = Plan::read(dir.path(), Changes { env_file: Some("r.txt".into()), ..Changes::default() })
            .unwrap_err();
        assert!(fault.what.contains("says the environment"), "{fault}");
    }

    #[test]
    fn test_job_file_names_its_files_relative_to_itself() {
        let job = "command: cat ${{inputs.data}} ${{inputs.n}}\ncode: src\nenvironment: file:env/e.yml\n\
                   inputs: {data: {type: uri_file, path: data/x}, n: 1}\n";
        let dir = project(&[
            ("job.yaml", job),
            ("src/train.py", ""),
            ("data/x", "1"),
            ("env/e.yml", "conda_file: c.yml\nfoo: 1\n"),
            ("env/c.yml", "dependencies: [numpy]\nprefix: /p\n"),
        ]);
        let changes = Changes {
            set: vec![("inputs.n".into(), "7".into())],
            env: vec![("A".into(), "1".into())],
            name: Some("j-1".into()),
            ..Changes::default()
        };
        let plan = Plan::read(&dir.path().join("job.yaml"), changes).unwrap();
        assert_eq!(plan.code, Some(dir.path().join("src")));
        assert_eq!(plan.inputs, [("data".to_owned(), dir.path().join("data/x"))]);
        assert_eq!(
            plan.draft.environment,
            EnvSpec::Conda {
                file: "c.yml".into(),
                document: "dependencies: [numpy]\nprefix: /p\n".into(),
                lock: None
            }
        );
        assert_eq!(plan.draft.inputs["n"], Input::Literal("7".into()));
        assert_eq!(plan.draft.environment_variables["A"], "1");
        assert!(
            plan.warnings[0].to_string().contains("e.yml: line 2, column 1: `foo`"),
            "{:?}",
            plan.warnings
        );
        assert!(
            plan.warnings[1].to_string().contains("c.yml: line 2, column 9: `prefix`"),
            "{:?}",
            plan.warnings
        );
    }

    fn environment(files: &[(&str, &str)]) -> Result<EnvSpec, Fault> {
        let dir = project(files);
        let plan = Plan::read(&dir.path().join("job.yml"), Changes::default())?;
        assert!(
            plan.warnings.iter().all(|warning| warning.message.contains("no `code`")),
            "{:?}",
            plan.warnings
        );
        Ok(plan.draft.environment)
    }

    #[test]
    fn test_a_job_without_code_is_warned_of_files_that_its_command_will_not_find() {
        for (command, warned) in [
            ("python ./train.py --lr 1", true),
            ("cat 'data/x.csv'; ls", true),
            ("echo hello world", false),
            ("ls data", false),
            ("cat ${{inputs.d}}/x.csv > outputs/y.csv", false),
        ] {
            let job = format!("command: {command}\ninputs: {{d: {{path: data}}}}\n");
            let dir = project(&[("job.yml", &job), ("train.py", ""), ("data/x.csv", ""), ("hello", "")]);
            let warnings = Plan::read(dir.path(), Changes::default()).unwrap().warnings;
            let told = warnings.iter().any(|warning| warning.message.contains("`code: .` sends"));
            assert_eq!((told, warnings.len()), (warned, usize::from(warned)), "{command}");
        }
    }

    #[test]
    fn test_the_code_of_a_run_configuration_may_be_in_a_directory_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in [
            (
                ".azureml/a.runconfig",
                "script: t.py\nenvironment: {python: {userManagedDependencies: false}}\n",
            ),
            (".azureml/conda_dependencies.yml", "dependencies: [python=3.11]\n"),
            ("scripts/t.py", ""),
        ] {
            std::fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
            std::fs::write(dir.path().join(path), text).unwrap();
        }
        let (config, scripts) = (Some("a".to_owned()), dir.path().join("scripts"));
        let changes = Changes { config, ..Changes::default() };
        let fault = Plan::read(dir.path(), changes.clone()).unwrap_err();
        assert!(fault.what.contains("there is no file `t.py`"), "{fault}");
        let changes = Changes { source: Some(scripts.clone()), ..changes };
        let plan = Plan::read(dir.path(), changes).unwrap();
        assert_eq!(plan.code, Some(scripts));
        assert!(matches!(plan.draft.environment, EnvSpec::Conda { .. }), "the conda file is the project's");
    }

    #[test]
    fn test_locks_travel_with_their_conda_file_or_alone() {
        let lock = "@EXPLICIT\nhttps://h/c/noarch/a-1-0.conda\n";
        let conda = |file: &str, document: &str| EnvSpec::Conda {
            file: file.into(),
            document: document.into(),
            lock: Some(lock.into()),
        };
        let files = |job| [("job.yml", job), ("c.yml", "dependencies: [a]"), ("l", lock)];
        let job = "command: x\nenvironment: {conda_file: ./c.yml, conda_lock: l}\n";
        assert_eq!(environment(&files(job)).unwrap(), conda("./c.yml", "dependencies: [a]"));
        let job = "command: x\nenvironment: {conda_lock: ./l}\n";
        assert_eq!(environment(&files(job)).unwrap(), conda("./l", ""));
        let job = "environment:\n  conda_lock: l\n  conda_file:\n    dependencies: [a]\ncommand: x\n";
        let EnvSpec::Conda { file, document, lock: Some(_) } = environment(&files(job)).unwrap() else {
            panic!("no lock");
        };
        assert_eq!((file.as_str(), document.lines().count()), ("job.yml", 4));
        let job = "command: x\nenvironment: {conda_lock: c.yml}\n";
        let fault = environment(&files(job)).unwrap_err();
        assert!(fault.what.contains("c.yml: line 1, column 1: `dependencies"), "{fault}");
    }

    #[test]
    fn test_environments_written_into_the_job_are_looked_through() {
        let job = "command: x\nenvironment:\n  conda_file:\n    dependencies:\n    - pip\n    - pip:\n      - -r r.txt\n";
        let EnvSpec::Conda { file, document, .. } =
            environment(&[("job.yml", job), ("r.txt", "b\n")]).unwrap()
        else {
            panic!("no conda environment");
        };
        assert_eq!(file, "job.yml");
        assert!(document.contains(r#"["b"]"#), "{document}");
        let fault = environment(&[("job.yml", &job.replace("- -r r.txt", "- ./a.whl"))]).unwrap_err();
        assert!(fault.what.contains("job.yml: line 7, column 9: `./a.whl`"), "{fault}");
        let job = "command: x\nenvironment: {requirements: [a, ./b]}\n";
        assert!(environment(&[("job.yml", job)]).unwrap_err().what.contains("job.yml: `./b` names a path"));
    }

    #[test]
    fn test_user_managed_requirements_are_read_and_not_installed() {
        let job = "command: x\nenvironment: {requirements: r.txt, user_managed_dependencies: true}\n";
        let expected = EnvSpec::Host { python: "python3".into(), requirements: vec!["a>=1".into()] };
        assert_eq!(environment(&[("job.yml", job), ("r.txt", "a>=1 # b\n")]).unwrap(), expected);
    }

    #[test]
    fn test_faults_name_the_file_and_the_place() {
        let dir = project(&[("job.yml", "command: x\nlimits: {timeout: soon}\n")]);
        let fault = Plan::read(dir.path(), Changes::default()).unwrap_err();
        assert!(fault.what.contains("job.yml: line 2, column 19"), "{}", fault.what);

        let dir = project(&[("job.yml", "command: x\ninputs: {d: {path: nowhere}}\n")]);
        let fault = Plan::read(dir.path(), Changes::default()).unwrap_err();
        assert!(fault.what.contains("job.yml: line 2, column 20: `inputs.d`"), "{}", fault.what);

        let fault = Plan::read(&dir.path().join("nowhere"), Changes::default()).unwrap_err();
        assert!(fault.what.contains("nowhere"));
    }

    #[test]
    fn test_set_knows_the_inputs_of_the_job() {
        let dir = project(&[("job.yml", "command: x\ninputs: {lr: 1}\n")]);
        assert!(Plan::read(dir.path(), set("inputs.lr", "2")).is_ok());
        for key in ["lr", "inputs.rl", "limits.timeout"] {
            let fault = Plan::read(dir.path(), set(key, "2")).unwrap_err();
            assert_eq!(fault.fix.unwrap(), "what can be set: inputs.lr");
        }
        let mut changes = set("inputs.lr", "2");
        changes.command = vec!["true".into()];
        let fault = Plan::read(&dir.path().join("nothing"), changes.clone()).unwrap_err();
        assert!(fault.what.contains("cannot find"), "{fault}");
        let empty = project(&[("a.py", "")]);
        let fault = Plan::read(empty.path(), changes).unwrap_err();
        assert!(fault.what.contains("`--set inputs.lr` names nothing"), "{fault}");
    }

    fn set(key: &str, value: &str) -> Changes {
        Changes { set: vec![(key.into(), value.into())], ..Changes::default() }
    }

    #[test]
    fn test_set_gives_a_file_input_another_file_and_what_it_replaces_is_not_judged() {
        let job = "command: cat ${{inputs.d}}\ncode: .\ninputs: {d: {type: uri_file, path: nowhere.csv}}\n";
        let dir = project(&[("job.yml", job), ("b.csv", "1")]);
        let given = dir.path().join("b.csv");
        let plan = Plan::read(dir.path(), set("inputs.d", given.to_str().unwrap())).unwrap();
        assert_eq!(plan.inputs, [("d".to_owned(), given)]);
        assert!(plan.draft.inputs.is_empty());
        let fault = Plan::read(dir.path(), set("inputs.d", "/nowhere/c.csv")).unwrap_err();
        assert!(fault.what.starts_with("`--set inputs.d` cannot be read at `/nowhere/c.csv`"), "{fault}");
        let fault = Plan::read(dir.path(), set("inputs.d", "azureml://x")).unwrap_err();
        assert!(fault.what.contains("`inputs.d` is not fetched from `azureml://x`"), "{fault}");
        // An input without a value, optional or not, gets one.
        for input in ["{type: uri_folder}", "{type: integer}", "{type: string, optional: true}"] {
            let job = format!("command: x ${{{{inputs.d}}}}\ncode: .\ninputs: {{d: {input}}}\n");
            let dir = project(&[("job.yml", &job)]);
            let plan = Plan::read(dir.path(), set("inputs.d", "/tmp")).unwrap();
            assert_eq!(
                (plan.inputs.len(), plan.draft.inputs.len()),
                if input.contains("uri") { (1, 0) } else { (0, 1) }
            );
        }
    }

    #[test]
    fn test_needs_of_the_command_line_go_before_those_of_the_job_file() {
        let job = "command: x\ncode: .\nresources: {gpus: 4, cpus: 2, memory: 1g}\nlimits: {timeout: 60}\n";
        let dir = project(&[("job.yml", job)]);
        let needs = Needs { gpus: Some(0), memory: Some(2 << 30), ..Needs::default() };
        let draft = Plan::read(dir.path(), Changes { needs, ..Changes::default() }).unwrap().draft;
        let Resources { gpus, cpus, memory, .. } = draft.resources;
        assert_eq!((gpus, cpus, memory), (0, 2, 2 << 30));
        assert_eq!(draft.limits.timeout, Some(Duration::from_secs(60)));
        let needs = Needs { cpus: Some(8), time: Some(Duration::from_secs(5)), ..Needs::default() };
        let draft = Plan::read(dir.path(), Changes { needs, ..Changes::default() }).unwrap().draft;
        assert_eq!((draft.resources.cpus, draft.limits.timeout), (8, Some(Duration::from_secs(5))));
    }

    #[test]
    fn test_a_directory_has_a_name_however_it_is_written() {
        let here = std::env::current_dir().unwrap();
        let expected = here.file_name().unwrap().to_str().unwrap();
        for written in ["", ".", "../agentctl", "src/.."].map(Path::new).into_iter().chain([here.as_path()]) {
            assert_eq!(directory_name(written), expected, "{}", written.display());
        }
    }

    #[test]
    fn test_shell_line_keeps_the_words() {
        let line = |words: &[&str]| shell_line(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        assert_eq!(line(&["python a.py | tee log"]), "python a.py | tee log");
        assert_eq!(line(&["sh", "-c", "echo $X 'y'", ""]), r#"sh -c 'echo $X '\''y'\''' ''"#);
    }
}
