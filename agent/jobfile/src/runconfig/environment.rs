//! The software of a run configuration: `environment`, and `docker` of the run itself, which wins.

use std::collections::BTreeMap;

use super::keys;
use crate::command_job::environment::{EnvironmentRef, conda_file};
use crate::command_job::read_docker_args;
use crate::section::{Mistakes, Rejection, Section, Warning, within};
use crate::yaml::{Node, Place, Value};
use agent_model::EnvSpec;

/// What the script needs beside its code.
#[derive(Debug)]
pub(super) struct Software {
    pub(super) environment: EnvironmentRef,
    /// The program that starts the script.
    pub(super) python: String,
    pub(super) variables: BTreeMap<String, String>,
    pub(super) shm: u64,
    pub(super) docker_args: Vec<String>,
    /// Words for `spark-submit`.
    pub(super) spark_words: Vec<String>,
}

impl Default for Software {
    fn default() -> Software {
        Software {
            environment: EnvironmentRef::Spec(EnvSpec::host()),
            python: PYTHON.to_owned(),
            variables: BTreeMap::new(),
            shm: 0,
            docker_args: Vec::new(),
            spark_words: Vec::new(),
        }
    }
}

/// The interpreter of every environment that is built.
const PYTHON: &str = "python";

/// The name that the old tools gave an environment without one.
const UNNAMED: &str = "default-environment";

/// The conda file of a run configuration that names none, beside it.
const CONDA_FILE: &str = "conda_dependencies.yml";

/// Reads both sections. `in_container`: the target is a container; `folder` is where the file is.
pub(super) fn software(
    top: &mut Section,
    in_container: bool,
    folder: &str,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> Software {
    let place = top.place();
    let run = read_container(wrong.note(top.section("docker")), "useDocker", warnings, wrong);
    let Some(node) = top.node("environment") else {
        let message = "no `environment`: the script runs with the machine's Python as it is".to_owned();
        warnings.push(Warning::new(place, message));
        return Software::default();
    };
    let Some(mut section) = wrong.note(open(node).map(Some)) else { return Software::default() };
    let place = section.place();
    let mut software =
        Software { variables: wrong.note(section.texts("environmentVariables")), ..Software::default() };
    software.spark_words = read_spark(&mut section, warnings, wrong);
    let named = wrong.note(read_name(&mut section));
    let python = wrong.note(section.section("python"));
    let docker = wrong.note(section.section("docker"));
    let is_named = python.is_none() && docker.is_none();
    let mut docker = read_docker(docker, warnings, wrong);
    let python = read_python(python, warnings, wrong);
    section.close(warnings, wrong);
    docker.container = run.over(docker.container);
    docker.container.on = docker.container.on.or(Some(false)).map(|on| on || in_container);
    if docker.container.on == Some(true) {
        software.shm = docker.container.shm.unwrap_or(0);
        software.docker_args = std::mem::take(&mut docker.container.arguments);
        if python.user_managed {
            software.python.clone_from(&python.interpreter);
        }
    } else if !docker.container.arguments.is_empty() {
        let message = "`docker.arguments` has no effect: the script does not run in a container".to_owned();
        warnings.push(Warning::new(docker.place.unwrap_or(place), message));
    }
    software.environment = match named.filter(|_| is_named) {
        Some(reference) => EnvironmentRef::Spec(EnvSpec::Named { reference }),
        None => match compose(python, docker, folder, place) {
            Ok(environment) => environment,
            Err(refusal) => {
                wrong.add(refusal);
                software.environment
            }
        },
    };
    software
}

fn open(node: Node) -> Result<Section, Rejection> {
    match node.value {
        Value::Scalar(_) => Err(Rejection::unsupported(
            node.place,
            "`environment` names a file, which is not read",
            "write what is in that file in its place: `python` and `docker`",
        )),
        _ => Section::open(node, "environment", &keys::ENVIRONMENT),
    }
}

fn read_name(section: &mut Section) -> Result<Option<String>, Rejection> {
    let (name, version) = (section.text("name")?, section.text("version")?);
    let name = name.filter(|name| !name.is_empty() && name != UNNAMED);
    Ok(name.map(|name| match version {
        Some(version) => format!("azureml:{name}:{version}"),
        None => format!("azureml:{name}@latest"),
    }))
}

fn read_spark(section: &mut Section, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) -> Vec<String> {
    let Some(mut spark) = wrong.note(section.section("spark")) else { return Vec::new() };
    let path = spark.name("packages");
    let repositories = wrong.note(spark.lines("repositories")).unwrap_or_default().0.join(",");
    let packages = spark.node("packages").map(|node| wrong.note(packages(&node, &path, warnings)));
    spark.close(warnings, wrong);
    let given = [("--repositories", repositories), ("--packages", packages.unwrap_or_default())];
    let given = given.into_iter().filter(|(_, value)| !value.is_empty());
    given.flat_map(|(option, value)| [option.to_owned(), value]).collect()
}

/// The coordinates of packages, as `spark-submit` takes them.
fn packages(node: &Node, path: &str, warnings: &mut Vec<Warning>) -> Result<String, Rejection> {
    let items = node.list().map_err(|at| within(path, at))?;
    let one = |node: &Node| {
        let mut section = Section::open(node.clone(), path, &super::keys::PACKAGE)?;
        let parts = ["group", "artifact", "version"].map(|key| section.text(key));
        section.finish(warnings);
        let parts: Vec<String> = parts.into_iter().filter_map(Result::transpose).collect::<Result<_, _>>()?;
        Ok(parts.join(":"))
    };
    Ok(items.iter().map(one).collect::<Result<Vec<_>, Rejection>>()?.join(","))
}

/// Where packages come from.
#[derive(Default)]
struct Python {
    user_managed: bool,
    interpreter: String,
    conda: Option<Node>,
}

fn read_python(section: Option<Section>, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) -> Python {
    let usual = || EnvSpec::DEFAULT_PYTHON.to_owned();
    let Some(mut section) = section else { return Python { interpreter: usual(), ..Python::default() } };
    let at = section.at("interpreterPath");
    let user_managed = wrong.note(section.flag("userManagedDependencies")).unwrap_or(false);
    let interpreter = wrong.note(section.text("interpreterPath")).filter(|path| path != PYTHON);
    if let (false, Some(path)) = (user_managed, &interpreter) {
        let message = format!(
            "`environment.python.interpreterPath` has no effect: `{path}` is used where `userManagedDependencies` is true"
        );
        warnings.push(Warning::new(at, message));
    }
    let (inline, file) = (section.node("condaDependencies"), section.node("condaDependenciesFile"));
    section.close(warnings, wrong);
    Python { user_managed, interpreter: interpreter.unwrap_or_else(usual), conda: inline.or(file) }
}

/// Whether and how the script runs in a container.
#[derive(Default)]
struct Container {
    on: Option<bool>,
    shm: Option<u64>,
    arguments: Vec<String>,
}

impl Container {
    /// What this one says, and otherwise the other.
    fn over(self, other: Container) -> Container {
        Container {
            on: self.on.or(other.on),
            shm: self.shm.or(other.shm),
            arguments: if self.arguments.is_empty() { other.arguments } else { self.arguments },
        }
    }
}

/// The part that both places of `docker` have.
fn read_container(
    section: Option<Section>,
    on: &'static str,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> Container {
    let Some(mut section) = section else { return Container::default() };
    let read = container_of(&mut section, on, wrong);
    section.close(warnings, wrong);
    read
}

fn container_of(section: &mut Section, on: &'static str, wrong: &mut Mistakes) -> Container {
    Container {
        on: wrong.note(section.flag(on)),
        shm: wrong.note(section.bytes("shmSize")),
        arguments: wrong.note(read_docker_args(section, "arguments")),
    }
}

/// What `environment.docker` says.
#[derive(Default)]
struct Docker {
    place: Option<Place>,
    container: Container,
    image: Option<String>,
    dockerfile: Option<(String, Place)>,
}

fn read_docker(section: Option<Section>, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) -> Docker {
    let Some(mut section) = section else { return Docker::default() };
    let container = container_of(&mut section, "enabled", wrong);
    let image = wrong.note(section.text("baseImage")).filter(|image| !image.is_empty());
    let at = section.at("baseDockerfile");
    let dockerfile = wrong.note(section.text("baseDockerfile")).map(|path| (path, at));
    if let Some(mut platform) = wrong.note(section.section("platform")) {
        wrong.note(platform.word("os"));
        platform.close(warnings, wrong);
    }
    let mut address = None;
    if let Some(mut registry) = wrong.note(section.section("baseImageRegistry")) {
        address = wrong.note(registry.text("address")).filter(|address| !address.is_empty());
        registry.close(warnings, wrong);
    }
    let place = Some(section.place());
    section.close(warnings, wrong);
    Docker { place, container, image: image.map(|image| of_registry(address.as_deref(), image)), dockerfile }
}

/// The whole name of an image of a registry.
fn of_registry(address: Option<&str>, image: String) -> String {
    match address.map(|address| address.trim_end_matches('/')) {
        Some(address) if !image.starts_with(&format!("{address}/")) => format!("{address}/{image}"),
        _ => image,
    }
}

/// The environment that Python and container make together.
fn compose(python: Python, docker: Docker, folder: &str, place: Place) -> Result<EnvironmentRef, Rejection> {
    let on = docker.container.on == Some(true);
    let at = docker.place.unwrap_or(place);
    let (image, dockerfile) = (docker.image.filter(|_| on), docker.dockerfile.filter(|_| on));
    match (image, dockerfile) {
        (None, None) if on => Err(Rejection::invalid(at, "the container has no image")
            .fix("name it as `environment.docker.baseImage`; which one the cloud takes is not known here")),
        (Some(_), Some((_, at))) => {
            Err(Rejection::invalid(at, "there is a `baseImage` and a `baseDockerfile`")
                .fix("keep one of them"))
        }
        (None, Some((path, at))) => dockerfile_of(&python, &path, at),
        (None, None) if python.user_managed => {
            Ok(EnvironmentRef::Spec(EnvSpec::Host { python: python.interpreter, requirements: Vec::new() }))
        }
        (Some(image), None) if python.user_managed => {
            Ok(EnvironmentRef::Spec(EnvSpec::Image { image, conda: None }))
        }
        (image, None) => match python.conda {
            Some(node) => conda_file(image, node, None),
            None => {
                let path = match folder {
                    "" => CONDA_FILE.to_owned(),
                    folder => format!("{folder}/{CONDA_FILE}"),
                };
                Ok(EnvironmentRef::CondaFile { image, path, lock: None })
            }
        },
    }
}

/// An image that is made from a Dockerfile of the project.
fn dockerfile_of(python: &Python, path: &str, at: Place) -> Result<EnvironmentRef, Rejection> {
    if path.contains('\n') || path.trim_start().starts_with("FROM ") {
        return Err(Rejection::unsupported(
            at,
            "`baseDockerfile` is the text of a Dockerfile",
            "save it in the project and name the file, for example `baseDockerfile: image/Dockerfile`",
        ));
    }
    if !python.user_managed {
        return Err(Rejection::unsupported(
            at,
            "an image of a `baseDockerfile` gets no conda environment",
            "install the packages in the Dockerfile, and set `python: {userManagedDependencies: true}`",
        ));
    }
    let (context, dockerfile) = path.rsplit_once('/').unwrap_or((".", path));
    Ok(EnvironmentRef::BuildContext { path: context.to_owned(), dockerfile: dockerfile.to_owned() })
}
