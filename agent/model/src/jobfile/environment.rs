//! The environment of a job file, inline or as a document of its own.

use super::section::{Refusal, Section, Warning, within};
use crate::EnvSpec;
use crate::fault::Fault;
use crate::yaml::{self, Node, Value};

/// The environment of a command job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnvironmentRef {
    /// Complete as written.
    Spec(EnvSpec),
    /// A requirements file.
    Requirements {
        /// The interpreter.
        python: String,
        /// The file, relative to the document.
        path: String,
    },
    /// A conda environment file.
    CondaFile {
        /// The image it goes into, if any.
        image: Option<String>,
        /// The file, relative to the document.
        path: String,
    },
    /// An image build context.
    BuildContext {
        /// The directory, relative to the document.
        path: String,
        /// The Dockerfile, relative to the directory.
        dockerfile: String,
    },
    /// An environment document of its own, `file:./env.yml`; see [`environment_document`].
    Document {
        /// The file, relative to the document.
        path: String,
    },
}

/// Reads an environment document, what `environment: file:./env.yml` names. Paths in it are relative to it.
/// The fault names the line and the column.
pub fn environment_document(text: &str) -> Result<(EnvironmentRef, Vec<Warning>), Fault> {
    let mut warnings = Vec::new();
    let node = yaml::parse(text).map_err(Refusal::syntax)?;
    let environment = mapping(node, "", &mut warnings)?;
    Ok((environment, warnings))
}

/// The environment as it stands under the key `environment`.
pub(super) fn environment(node: Node, warnings: &mut Vec<Warning>) -> Result<EnvironmentRef, Refusal> {
    match &node.value {
        Value::Scalar(text) => reference(&node, text.trim()),
        _ => mapping(node, "environment", warnings),
    }
}

fn reference(node: &Node, text: &str) -> Result<EnvironmentRef, Refusal> {
    if let Some(path) = text.strip_prefix("file:") {
        return Ok(EnvironmentRef::Document { path: path.to_owned() });
    }
    if text.starts_with("azureml:") || text.starts_with("/subscriptions/") {
        return Ok(EnvironmentRef::Spec(EnvSpec::Named { reference: text.to_owned() }));
    }
    if text == "host" {
        return Ok(EnvironmentRef::Spec(EnvSpec::host()));
    }
    Err(Refusal::invalid(node.place, format!("`environment` cannot be `{text}`")).fix(
        "write `host`, `azureml:NAME:VERSION`, `file:./environment.yml`, or a mapping such as \
         `{python: python3, requirements: requirements.txt}`",
    ))
}

fn mapping(node: Node, path: &str, warnings: &mut Vec<Warning>) -> Result<EnvironmentRef, Refusal> {
    let mut section = Section::open(node, path)?;
    let place = section.place();
    section.ignore(&["$schema", "name", "version", "description", "tags", "properties"]);
    section.warn_of(&[("inference_config", "it is for endpoints, and this is a job")], warnings);
    refuse_windows(&mut section)?;
    let image = section.text("image")?;
    let conda = section.node("conda_file");
    let build = section.section("build")?;
    let python = section.text("python")?;
    let requirements = section.node("requirements");
    if section.node("channels").is_some() || section.node("dependencies").is_some() {
        return Err(Refusal::invalid(place, "this is a conda file, not an environment")
            .fix("save it beside the job file and write `environment: {conda_file: ./conda.yml}`"));
    }
    section.finish(warnings);
    match (image, conda, build, python, requirements) {
        (None, None, Some(build), None, None) => build_context(build, warnings),
        (image, Some(file), None, None, None) => conda_file(image, file),
        (Some(image), None, None, None, None) => {
            Ok(EnvironmentRef::Spec(EnvSpec::Image { image, conda: None }))
        }
        (None, None, None, python, Some(list)) => requirement_list(python, &list),
        (None, None, None, Some(python), None) => Ok(EnvironmentRef::Spec(EnvSpec::Host { python })),
        (None, None, None, None, None) => Err(Refusal::invalid(place, "the environment names nothing")
            .fix("give it an `image`, a `conda_file`, a `build`, or a `python` with `requirements`")),
        _ => Err(Refusal::invalid(place, "the environment names two things that exclude each other")
            .fix("keep one of: `image` with or without `conda_file`, `build`, `python` with `requirements`")),
    }
}

fn refuse_windows(section: &mut Section) -> Result<(), Refusal> {
    let place = section.place();
    match section.word("os_type", &["linux", "windows"])? {
        Some("windows") => Err(Refusal::unsupported(
            place,
            "`os_type: windows` is not run",
            "jobs run on Linux: use an environment of `os_type: linux`",
        )),
        _ => Ok(()),
    }
}

fn build_context(mut build: Section, warnings: &mut Vec<Warning>) -> Result<EnvironmentRef, Refusal> {
    let place = build.place();
    let path = build.text("path")?;
    let dockerfile = build.text("dockerfile_path")?.unwrap_or_else(|| "Dockerfile".to_owned());
    build.finish(warnings);
    let path = path.ok_or_else(|| {
        Refusal::invalid(place, "`build` has no `path`").fix("name the folder that holds the Dockerfile")
    })?;
    Ok(EnvironmentRef::BuildContext { path, dockerfile })
}

fn conda_file(image: Option<String>, file: Node) -> Result<EnvironmentRef, Refusal> {
    match &file.value {
        Value::Scalar(path) => Ok(EnvironmentRef::CondaFile { image, path: local(path).to_owned() }),
        Value::Map(_) => {
            let document = to_json(&file).to_string(); // JSON is YAML
            Ok(EnvironmentRef::Spec(match image {
                Some(image) => EnvSpec::Image { image, conda: Some(document) },
                None => EnvSpec::Conda { document },
            }))
        }
        _ => Err(within("conda_file", file.fault(format!("expected a path, found {}", file.describe())))),
    }
}

fn requirement_list(python: Option<String>, list: &Node) -> Result<EnvironmentRef, Refusal> {
    let python = python.unwrap_or_else(|| EnvSpec::DEFAULT_PYTHON.to_owned());
    if let Value::Scalar(path) = &list.value {
        return Ok(EnvironmentRef::Requirements { python, path: local(path).to_owned() });
    }
    let lines = list.list().map_err(|at| within("requirements", at))?;
    let line = |node: &Node| node.text().map(|text| text.trim().to_owned());
    let requirements =
        lines.iter().map(line).collect::<Result<_, _>>().map_err(|at| within("requirements", at))?;
    Ok(EnvironmentRef::Spec(EnvSpec::Pip { python, requirements }))
}

/// A path without the `file:` that some write before it.
pub(super) fn local(path: &str) -> &str {
    path.strip_prefix("file:").unwrap_or(path).trim()
}

fn to_json(node: &Node) -> serde_json::Value {
    match &node.value {
        Value::Null => serde_json::Value::Null,
        Value::Scalar(text) => text.clone().into(),
        Value::List(items) => items.iter().map(to_json).collect(),
        Value::Map(entries) => {
            let entries = entries.iter().map(|(key, value)| (key.text.clone(), to_json(value)));
            serde_json::Value::Object(entries.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code;

    fn inline(text: &str) -> Result<EnvironmentRef, Fault> {
        Ok(environment(yaml::parse(text).unwrap(), &mut Vec::new())?)
    }

    fn pip(lines: &[&str]) -> EnvironmentRef {
        let requirements = lines.iter().map(|line| (*line).to_owned()).collect();
        EnvironmentRef::Spec(EnvSpec::Pip { python: "python3".into(), requirements })
    }

    #[test]
    fn test_every_form_is_read() {
        let named = |reference: &str| EnvironmentRef::Spec(EnvSpec::Named { reference: reference.into() });
        let image = |conda: Option<&str>| {
            EnvironmentRef::Spec(EnvSpec::Image { image: "ubuntu".into(), conda: conda.map(str::to_owned) })
        };
        let conda_path = |image: Option<&str>| EnvironmentRef::CondaFile {
            image: image.map(str::to_owned),
            path: "./c.yml".into(),
        };
        let table = [
            ("host", EnvironmentRef::Spec(EnvSpec::host())),
            ("azureml:AzureML-sklearn-1.5@latest", named("azureml:AzureML-sklearn-1.5@latest")),
            (
                "azureml://registries/azureml/environments/a/versions/5",
                named("azureml://registries/azureml/environments/a/versions/5"),
            ),
            ("file:./env.yml", EnvironmentRef::Document { path: "./env.yml".into() }),
            ("{image: ubuntu}", image(None)),
            ("{image: ubuntu, conda_file: ./c.yml}", conda_path(Some("ubuntu"))),
            ("{conda_file: ./c.yml}", conda_path(None)),
            ("{image: ubuntu, conda_file: {name: e}}", image(Some(r#"{"name":"e"}"#))),
            (
                "{build: {path: ctx}}",
                EnvironmentRef::BuildContext { path: "ctx".into(), dockerfile: "Dockerfile".into() },
            ),
            ("{python: python3.11}", EnvironmentRef::Spec(EnvSpec::Host { python: "python3.11".into() })),
            ("{requirements: [numpy, ' scipy==1.2 ']}", pip(&["numpy", "scipy==1.2"])),
            (
                "{python: python3.11, requirements: r.txt}",
                EnvironmentRef::Requirements { python: "python3.11".into(), path: "r.txt".into() },
            ),
        ];
        for (text, expected) in table {
            assert_eq!(inline(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn test_what_is_no_environment_is_refused_with_a_hint() {
        for (text, code, hint) in [
            ("my-env", Code::JobInvalid, "azureml:NAME:VERSION"),
            ("{image: a, build: {path: b}}", Code::JobInvalid, "keep one of"),
            ("{build: {dockerfile_path: D}}", Code::JobInvalid, "folder that holds the Dockerfile"),
            ("{name: x}", Code::JobInvalid, "give it an `image`"),
            ("{dependencies: [python=3.10]}", Code::JobInvalid, "conda_file"),
            ("{image: a, os_type: Windows}", Code::JobUnsupported, "Linux"),
            ("[a]", Code::JobInvalid, ""),
        ] {
            let fault = inline(text).unwrap_err();
            assert_eq!(fault.code, code, "{text}");
            assert!(fault.fix.unwrap().contains(hint), "{text}");
        }
    }

    #[test]
    fn test_document_of_its_own_is_read() {
        let text = "$schema: x\nname: e\nversion: 3\nimage: ubuntu\nimege: u\n";
        let (environment, warnings) = environment_document(text).unwrap();
        assert_eq!(environment, EnvironmentRef::Spec(EnvSpec::Image { image: "ubuntu".into(), conda: None }));
        assert_eq!(warnings[0].message, "`imege` is not known and has no effect; did you mean `image`?");
        assert_eq!(warnings[0].place, yaml::Place { line: 5, column: 1 });
        assert_eq!(environment_document("a: [").unwrap_err().code, Code::JobFile);
    }
}
