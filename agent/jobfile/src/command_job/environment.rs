//! The environment of a job file, inline or as a document of its own.

use super::keys::{CONDA, ENVIRONMENT};
use super::read_snapshot;
use crate::section::{Rejection, Section, UnknownKey, Warning, within};
use crate::yaml::{self, Node, Place, Value};
use agent_model::fault::Fault;
use agent_model::{EnvSpec, SnapshotRef};

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
        /// The packages are installed already, and none is added.
        user_managed: bool,
    },
    /// A conda environment file.
    CondaFile {
        /// The image it goes into, if any.
        image: Option<String>,
        /// The file, relative to the document.
        path: String,
        /// The lock that goes with it, relative to the document.
        lock: Option<String>,
    },
    /// A lock without a conda file beside it.
    CondaLock {
        /// The text of a conda file that was written inline.
        document: Option<String>,
        /// The lock, relative to the document.
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

/// Reads an environment document, which `environment: file:./env.yml` names. Paths in it are relative to it.
/// The fault names the line and the column.
pub fn environment_document(text: &str) -> Result<(EnvironmentRef, Vec<Warning>), Fault> {
    let mut warnings = Vec::new();
    let node = yaml::parse(text).map_err(Rejection::syntax)?;
    let environment = mapping(node, "", &mut warnings)?;
    Ok((environment, warnings))
}

/// The environment under the key `environment`.
pub(super) fn environment(node: Node, warnings: &mut Vec<Warning>) -> Result<EnvironmentRef, Rejection> {
    match &node.value {
        Value::Scalar(text) => reference(&node, text.trim()),
        _ => mapping(node, "environment", warnings),
    }
}

fn reference(node: &Node, text: &str) -> Result<EnvironmentRef, Rejection> {
    if let Some(path) = text.strip_prefix("file:") {
        return Ok(EnvironmentRef::Document { path: path.to_owned() });
    }
    if text.starts_with("azureml:") || text.starts_with("/subscriptions/") {
        return Ok(EnvironmentRef::Spec(EnvSpec::Named { reference: text.to_owned() }));
    }
    if text == "host" {
        return Ok(EnvironmentRef::Spec(EnvSpec::host()));
    }
    Err(Rejection::invalid(node.place, format!("`environment` cannot be `{text}`")).fix(
        "write `host`, `azureml:NAME:VERSION`, `file:./environment.yml`, or a mapping such as \
         `{python: python3, requirements: requirements.txt}`",
    ))
}

fn mapping(node: Node, path: &str, warnings: &mut Vec<Warning>) -> Result<EnvironmentRef, Rejection> {
    let mut section = Section::open(node, path, &ENVIRONMENT)?;
    let place = section.place();
    refuse_windows(&mut section)?;
    let image = section.text("image")?;
    let conda = section.node("conda_file");
    let lock = section.text("conda_lock")?;
    let build = section.section("build")?;
    let python = section.text("python")?;
    let requirements = section.node("requirements");
    let user_managed = user_managed(&mut section, conda.is_some() || lock.is_some() || build.is_some())?;
    if section.node("channels").is_some() || section.node("dependencies").is_some() {
        return Err(Rejection::invalid(place, "this is a conda file, not an environment").fix(CONDA));
    }
    let strangers = section.strangers(warnings);
    let slip = strangers
        .iter()
        .find_map(|stranger| Some((stranger.place, stranger.name.clone(), stranger.resembles?)));
    warnings.extend(strangers.into_iter().map(UnknownKey::into_warning));
    match (image, conda, lock, build, python, requirements) {
        (None, None, None, Some(build), None, None) => build_context(build, warnings),
        (Some(_), _, Some(_), None, None, None) => Err(Rejection::unsupported(
            place,
            "`conda_lock` is not used in an image",
            "remove the `image`, or the `conda_lock`",
        )),
        (image, Some(file), lock, None, None, None) => conda_file(image, file, lock),
        (None, None, Some(lock), None, None, None) => Ok(match is_text(&lock) {
            true => locked(String::new(), lock),
            false => EnvironmentRef::CondaLock { document: None, path: local(&lock).to_owned() },
        }),
        (Some(image), None, None, None, None, None) => {
            Ok(EnvironmentRef::Spec(EnvSpec::Image { image, conda: None }))
        }
        (None, None, None, None, python, Some(list)) => requirement_list(python, &list, user_managed),
        (None, None, None, None, python, None) if python.is_some() || user_managed => {
            let python = python.unwrap_or_else(|| EnvSpec::DEFAULT_PYTHON.to_owned());
            Ok(EnvironmentRef::Spec(EnvSpec::Host { python, requirements: Vec::new() }))
        }
        (None, None, None, None, None, None) => Err(match slip {
            Some((place, name, meant)) => Rejection::invalid(place, format!("`{name}` is not known"))
                .fix(format!("did you mean `{meant}`?")),
            None => Rejection::invalid(place, "the environment names nothing")
                .fix("give it an `image`, a `conda_file`, a `build`, or a `python` with `requirements`"),
        }),
        _ => Err(Rejection::invalid(place, "the environment names two things that exclude each other").fix(
            "keep one of: `image` with or without `conda_file`, `conda_file` with or without `conda_lock`, \
             `build`, `python` with `requirements`",
        )),
    }
}

/// Whether the packages are declared to be installed already.
fn user_managed(section: &mut Section, built: bool) -> Result<bool, Rejection> {
    let key = "user_managed_dependencies";
    let Some(node) = section.node(key) else { return Ok(false) };
    let flag = node.flag().map_err(|at| within(&section.name(key), at))?;
    if flag && built {
        return Err(Rejection::invalid(
            node.place,
            format!("`{key}` leaves nothing to build, but something is to be"),
        )
        .fix("remove it, or name a `python` and perhaps its `requirements` instead"));
    }
    Ok(flag)
}

fn refuse_windows(section: &mut Section) -> Result<(), Rejection> {
    let place = section.place();
    match section.word("os_type")? {
        Some("windows") => Err(Rejection::unsupported(
            place,
            "`os_type: windows` is not run",
            "jobs run on Linux: use an environment of `os_type: linux`",
        )),
        _ => Ok(()),
    }
}

fn build_context(mut build: Section, warnings: &mut Vec<Warning>) -> Result<EnvironmentRef, Rejection> {
    let place = build.place();
    let path = build.text("path")?;
    let dockerfile = build.text("dockerfile_path")?.unwrap_or_else(|| "Dockerfile".to_owned());
    build.finish(warnings);
    let path = path.ok_or_else(|| {
        Rejection::invalid(place, "`build` has no `path`").fix("name the folder that holds the Dockerfile")
    })?;
    if path.split_once(':').is_some_and(|(scheme, _)| scheme.trim() == SnapshotRef::SCHEME) {
        let context = read_snapshot("build.path", &path, place)?;
        return Ok(EnvironmentRef::Spec(EnvSpec::Build { context, dockerfile }));
    }
    Ok(EnvironmentRef::BuildContext { path, dockerfile })
}

/// A text of several lines is what a file would hold, and not the path of one.
fn is_text(written: &str) -> bool {
    written.trim_end().contains('\n') || written.ends_with('\n')
}

fn locked(document: String, lock: String) -> EnvironmentRef {
    EnvironmentRef::Spec(EnvSpec::Conda { file: String::new(), document, lock: Some(lock) })
}

pub(crate) fn conda_file(
    image: Option<String>,
    file: Node,
    lock: Option<String>,
) -> Result<EnvironmentRef, Rejection> {
    let document = match &file.value {
        Value::Scalar(text) if is_text(text) => text.clone(),
        Value::Scalar(path) => {
            let lock = match lock {
                Some(lock) if is_text(&lock) => {
                    let message = "`conda_lock` is a text, and `conda_file` the path of a file";
                    return Err(Rejection::invalid(file.place, message)
                        .fix("save the lock beside the conda file and name it, or write both as texts"));
                }
                lock => lock.map(|lock| local(&lock).to_owned()),
            };
            return Ok(EnvironmentRef::CondaFile { image, path: local(path).to_owned(), lock });
        }
        Value::Map(_) => inline_text(&file),
        _ => {
            let message = format!("expected a path, found {}", file.describe());
            return Err(within("conda_file", file.fault(message)));
        }
    };
    Ok(match (image, lock) {
        (Some(image), _) => EnvironmentRef::Spec(EnvSpec::Image { image, conda: Some(document) }),
        (None, Some(lock)) if is_text(&lock) => locked(document, lock),
        (None, Some(path)) => {
            EnvironmentRef::CondaLock { document: Some(document), path: local(&path).to_owned() }
        }
        (None, None) => EnvironmentRef::Spec(EnvSpec::Conda { file: String::new(), document, lock: None }),
    })
}

fn requirement_list(
    python: Option<String>,
    list: &Node,
    user_managed: bool,
) -> Result<EnvironmentRef, Rejection> {
    let python = python.unwrap_or_else(|| EnvSpec::DEFAULT_PYTHON.to_owned());
    if let Value::Scalar(path) = &list.value {
        return Ok(EnvironmentRef::Requirements { python, path: local(path).to_owned(), user_managed });
    }
    let lines = list.list().map_err(|at| within("requirements", at))?;
    let line = |node: &Node| node.text().map(|text| text.trim().to_owned());
    let requirements =
        lines.iter().map(line).collect::<Result<_, _>>().map_err(|at| within("requirements", at))?;
    Ok(EnvironmentRef::Spec(match user_managed {
        true => EnvSpec::Host { python, requirements },
        false => EnvSpec::Pip { python, requirements },
    }))
}

/// A path without the `file:` that some write before it.
pub(super) fn local(path: &str) -> &str {
    path.strip_prefix("file:").unwrap_or(path).trim()
}

/// A part of a document as a document of its own. Lines in messages about it are those of the whole document,
/// because everything stays on its line, and in its column where possible. It is JSON, which is YAML.
fn inline_text(node: &Node) -> String {
    let mut text = String::new();
    write_inline(node, &mut text, &mut Place { line: 1, column: 1 });
    text
}

fn write_inline(node: &Node, text: &mut String, at: &mut Place) {
    match &node.value {
        Value::Null => put("null", node.place, text, at),
        Value::Scalar(scalar) => {
            put(&serde_json::Value::from(scalar.as_str()).to_string(), node.place, text, at)
        }
        Value::List(items) => {
            put("[", Place { column: 1, ..node.place }, text, at);
            for (index, item) in items.iter().enumerate() {
                put(if index > 0 { "," } else { "" }, Place::default(), text, at);
                write_inline(item, text, at);
            }
            put("]", Place::default(), text, at);
        }
        Value::Map(entries) => {
            put("{", Place { column: 1, ..node.place }, text, at);
            for (index, (key, value)) in entries.iter().enumerate() {
                put(if index > 0 { "," } else { "" }, Place::default(), text, at);
                put(&serde_json::Value::from(key.text.as_str()).to_string(), key.place, text, at);
                put(":", Place::default(), text, at);
                write_inline(value, text, at);
            }
            put("}", Place::default(), text, at);
        }
    }
}

/// Writes a token no earlier than at its place.
fn put(token: &str, place: Place, text: &mut String, at: &mut Place) {
    if at.line < place.line {
        text.extend(std::iter::repeat_n('\n', place.line - at.line));
        *at = Place { line: place.line, column: 1 };
    }
    if at.line == place.line && at.column < place.column {
        text.extend(std::iter::repeat_n(' ', place.column - at.column));
        at.column = place.column;
    }
    text.push_str(token);
    at.column += token.chars().count();
}

#[cfg(test)]
mod tests {
    use agent_model::curated;

    use super::*;
    use agent_model::Code;

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
        let conda_path = |image: Option<&str>, lock: Option<&str>| EnvironmentRef::CondaFile {
            image: image.map(str::to_owned),
            path: "./c.yml".into(),
            lock: lock.map(str::to_owned),
        };
        let host = |python: &str, lines: &[&str]| {
            let requirements = lines.iter().map(|line| (*line).to_owned()).collect();
            EnvironmentRef::Spec(EnvSpec::Host { python: python.into(), requirements })
        };
        let requirements = |user_managed| EnvironmentRef::Requirements {
            python: "python3.11".into(),
            path: "r.txt".into(),
            user_managed,
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
            ("{image: ubuntu, conda_file: ./c.yml}", conda_path(Some("ubuntu"), None)),
            ("{conda_file: ./c.yml}", conda_path(None, None)),
            ("{conda_file: file:./c.yml, conda_lock: file:c.lock}", conda_path(None, Some("c.lock"))),
            ("{conda_lock: ./c.lock}", EnvironmentRef::CondaLock { document: None, path: "./c.lock".into() }),
            (
                "conda_lock: c.lock\nconda_file: {name: e}",
                EnvironmentRef::CondaLock {
                    document: Some("\n{            \"name\":\"e\"}".into()),
                    path: "c.lock".into(),
                },
            ),
            ("conda_file: {name: e}\nimage: ubuntu", image(Some("{            \"name\":\"e\"}"))),
            (
                "{build: {path: ctx}}",
                EnvironmentRef::BuildContext { path: "ctx".into(), dockerfile: "Dockerfile".into() },
            ),
            (
                "{python: python3.11}",
                EnvironmentRef::Spec(EnvSpec::Host { python: "python3.11".into(), requirements: vec![] }),
            ),
            ("{requirements: [numpy, ' scipy==1.2 ']}", pip(&["numpy", "scipy==1.2"])),
            ("{python: python3.11, requirements: r.txt}", requirements(false)),
            (
                "{python: python3.11, requirements: r.txt, user_managed_dependencies: true}",
                requirements(true),
            ),
            ("{requirements: [numpy], user_managed_dependencies: yes}", host("python3", &["numpy"])),
            ("{user_managed_dependencies: true}", host("python3", &[])),
            ("{python: /opt/p, user_managed_dependencies: true}", host("/opt/p", &[])),
            ("{requirements: [numpy], user_managed_dependencies: false}", pip(&["numpy"])),
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
            ("{conda_file: c.yml, user_managed_dependencies: true}", Code::JobInvalid, "`python`"),
            ("{python: p, user_managed_dependencies: perhaps}", Code::JobInvalid, "correct"),
            ("{image: a, conda_lock: l}", Code::JobUnsupported, "`conda_lock`"),
            ("{conda_lock: l, requirements: [a]}", Code::JobInvalid, "keep one of"),
            ("./conda.yml", Code::JobInvalid, "`file:./environment.yml`"),
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

    #[test]
    fn test_inline_conda_file_keeps_its_lines() {
        let text = "command: x\nenvironment:\n  name: e\n  conda_file:\n    channels: [conda-forge]  # all\n\n\
                    \x20   dependencies:\n      - python=3.11\n      - pip\n      - pip:\n          - a\n          - 'b\"'\n";
        let node = yaml::parse(text).unwrap().map().unwrap().take("environment").unwrap();
        let EnvironmentRef::Spec(EnvSpec::Conda { document, .. }) =
            environment(node, &mut Vec::new()).unwrap()
        else {
            panic!("no conda environment");
        };
        let (file, _) = crate::condafile::parse(&document).unwrap();
        let lines = |lines: &[crate::condafile::Line]| {
            lines.iter().map(|line| (line.text.clone(), line.line)).collect::<Vec<_>>()
        };
        assert_eq!(lines(&file.channels), [("conda-forge".to_owned(), 5)]);
        assert_eq!(lines(&file.specs), [("python=3.11".to_owned(), 8), ("pip".to_owned(), 9)]);
        assert_eq!(lines(&file.pip), [("a".to_owned(), 11), ("b\"".to_owned(), 12)]);
        let wrong = document.replace("python=3.11", "python=>3.11");
        let fault = crate::condafile::parse(&wrong).unwrap_err();
        assert!(fault.what.starts_with("line 8, column 9: "), "{fault}");
    }

    #[test]
    fn test_every_definition_that_is_shipped_can_be_read() {
        for (known, document) in curated::SHIPPED {
            assert_eq!(curated::name(&format!("azureml:AzureML-{known}@latest")).as_deref(), Some(*known));
            assert_eq!(curated::shipped(known), Some(*document));
            let (environment, warnings) = environment_document(document).unwrap();
            assert_eq!(warnings, [], "{known}");
            let EnvironmentRef::Spec(EnvSpec::Conda { document, lock: None, .. }) = environment else {
                panic!("{known} is no conda environment: {environment:?}");
            };
            let (file, warnings) = crate::condafile::parse(&document).unwrap();
            assert_eq!(warnings, [], "{known}");
            assert!(file.specs.iter().any(|spec| spec.text.starts_with("python=")), "{known}");
            assert!(file.pip.iter().any(|line| line.text.contains("mlflow")), "{known}");
        }
        assert_eq!(curated::shipped("sklearn-9"), None);
    }
}
