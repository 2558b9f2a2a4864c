//! Conda environment files, and the lists of exact packages that lock them.
//!
//! ```yaml
//! name: example                  # for people
//! channels: [conda-forge]        # best first; none: those of the node
//! dependencies:
//!   - python=3.11
//!   - conda-forge::numpy>=1.26
//!   - pip
//!   - pip: [scikit-learn, --extra-index-url https://host/simple]
//! variables: {OMP_NUM_THREADS: "1"}
//! ```
//!
//! A file is read the same way where it is submitted and where it is built: plain YAML of at most 1 MiB, one
//! document, no aliases, no tags. An entry that conda would silently drop or misread is refused with its place; one
//! that merely has no effect is a warning. No accepted file holds credentials or names a path of the machine it was
//! written on. Reading is pure, and never panics.

mod include;
mod lock;
mod spec;

use std::collections::BTreeMap;
use std::fmt;

use crate::keys::{Keys, ValueKind, read as read_key, refused, unused};
use crate::requirement;
use crate::yaml::{self, Key, Node, NotPlain, Place, Value};
use crate::{Rejection, Section, UnknownKey, Warning, within};
use agent_model::fault::Fault;

pub use include::inline;
pub use lock::{Lock, LockedPackage, parse_lock};

/// The largest file or lock that is read, in bytes.
pub const LARGEST: usize = 1 << 20;

/// A conda environment file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CondaFile {
    /// Its name, for people.
    pub name: Option<String>,
    /// The channels, best first: names or addresses. `defaults` means the channels conda has by default.
    pub channels: Vec<Line>,
    /// The packages wanted of conda.
    pub specs: Vec<Line>,
    /// The lines for pip, options among them.
    pub pip: Vec<Line>,
    /// Variables that are set for programs in the environment. They change nothing in it.
    pub variables: BTreeMap<String, String>,
}

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Line {
    /// Its text.
    pub text: String,
    /// Its number, counted from 1.
    pub line: usize,
}

/// Reads a conda environment file whose included files are inserted already, see [`inline`].
/// A fault names the line and the column.
pub fn parse(text: &str) -> Result<(CondaFile, Vec<Warning>), Fault> {
    let node = document(text)?;
    let mut warnings = Vec::new();
    let file = read(node, &mut warnings)?;
    Ok((file, warnings))
}

impl CondaFile {
    /// The packages wanted of conda in a form in which equal lists mean the same: one spelling, sorted, each once.
    pub fn normalized_specs(&self) -> Vec<String> {
        let mut specs: Vec<String> = self.specs.iter().map(|spec| spec::normalized(&spec.text)).collect();
        specs.sort_unstable();
        specs.dedup();
        specs
    }

    /// Channels that packages name (`channel::package`) and [`CondaFile::channels`] does not, in their order.
    /// Conda searches them after all others.
    pub fn channels_of_specs(&self) -> Vec<Line> {
        let mut found: Vec<Line> = Vec::new();
        for spec in &self.specs {
            let Some(channel) = spec::channel(&spec.text) else { continue };
            let same = |line: &Line| line.text.trim_end_matches('/') == channel.trim_end_matches('/');
            if !self.channels.iter().chain(&found).any(same) {
                found.push(Line { text: channel.to_owned(), line: spec.line });
            }
        }
        found
    }

    /// The names of the packages wanted of conda, in small letters.
    pub fn names(&self) -> Vec<String> {
        self.specs.iter().map(|spec| spec::name(&spec.text)).collect()
    }

    /// The line that wants the package of this name, in small letters.
    pub fn spec_of(&self, name: &str) -> Option<&Line> {
        self.specs.iter().find(|line| spec::name(&line.text) == name)
    }

    /// There are lines for pip and no pip to install them: `pip` is to be added to the wanted packages.
    pub fn lacks_pip(&self) -> bool {
        !self.pip.is_empty() && self.spec_of("pip").is_none()
    }

    fn pip_packages(&self) -> usize {
        self.pip.iter().filter(|line| !line.text.starts_with('-')).count()
    }
}

/// The wanted packages, for people: `python=3.11, scikit-learn and 3 more, 2 pip packages`.
impl fmt::Display for CondaFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let python = self.spec_of("python");
        let others =
            self.specs.iter().filter(|spec| !matches!(spec::name(&spec.text).as_str(), "python" | "pip"));
        let specs: Vec<&str> = python.into_iter().chain(others).map(|spec| spec.text.as_str()).collect();
        let pip = match self.pip_packages() {
            0 => None,
            1 => Some("1 pip package".to_owned()),
            count => Some(format!("{count} pip packages")),
        };
        let specs = (!specs.is_empty()).then(|| listed(&specs));
        let parts: Vec<String> = specs.into_iter().chain(pip).collect();
        f.write_str(&parts.join(", "))
    }
}

/// The first few of a list, and how many more there are.
pub(crate) fn listed(items: &[&str]) -> String {
    match items {
        [first, second, rest @ ..] if rest.len() > 1 => format!("{first}, {second} and {} more", rest.len()),
        few => few.join(", "),
    }
}

/// The document of a text, plain YAML of a bearable size.
fn document(text: &str) -> Result<Node, Rejection> {
    let start = Place { line: 1, column: 1 };
    if text.len() > LARGEST {
        return Err(Rejection::invalid(start, "the file has more than 1 MiB, and larger ones are not read")
            .fix("name the conda environment file itself; a list of exact packages is a `conda_lock`"));
    }
    yaml::plain(text).map_err(|error| match error {
        NotPlain::Syntax(at) => Rejection::syntax(at),
        NotPlain::Fancy(at) => Rejection::invalid(at.place, at.message)
            .fix("write the file as one plain YAML document, as `conda env export` does"),
    })?;
    let node = yaml::parse(text).map_err(Rejection::syntax)?;
    if node.value == Value::Null {
        return Err(no_packages(start, None));
    }
    Ok(node)
}

fn no_packages(place: Place, stray: Option<&str>) -> Rejection {
    let refusal = Rejection::invalid(place, "the file names no packages");
    match stray {
        Some(key) => refusal.fix(format!("list them under `dependencies`; did you mean that by `{key}`?")),
        None => refusal.fix("list at least one under `dependencies`, for example `- python=3.11`"),
    }
}

/// The keys of a conda file.
static KEYS: Keys = Keys::exact(&[
    read_key("name", ValueKind::Text),
    read_key("channels", ValueKind::Free),
    read_key("dependencies", ValueKind::Free),
    read_key("variables", ValueKind::Texts),
    unused("prefix", &[], "the node decides where environments are kept"),
    refused("pip", &[], "indent it as the last entry of `dependencies`: `- pip:` and the list below it"),
]);

fn read(node: Node, warnings: &mut Vec<Warning>) -> Result<CondaFile, Rejection> {
    let start = node.place;
    if let Value::Scalar(_) | Value::List(_) = node.value {
        let message = format!("expected a mapping with `dependencies`, found {}", node.describe());
        return Err(Rejection::invalid(start, message).fix(
            "write the packages as a list under `dependencies`; a file of pip alone is named by `requirements`, \
             not `conda_file`",
        ));
    }
    let mut top = Section::open(node, "", &KEYS)?;
    let mut file = CondaFile { name: read_name(&mut top, warnings)?, ..CondaFile::default() };
    if let Some(node) = top.node("channels") {
        read_channels(&node, &mut file, warnings)?;
    }
    if let Some(node) = top.node("pip") {
        return Err(Rejection::invalid(node.place, "`pip` stands outside of `dependencies`")
            .fix("indent it as the last entry of `dependencies`: `- pip:` and the list below it"));
    }
    let dependencies = top.node("dependencies");
    file.variables = read_variables(&mut top)?;
    let strangers = top.strangers(warnings);
    let stray = strangers.iter().find(|stranger| stranger.resembles == Some("dependencies"));
    let Some(dependencies) = dependencies else {
        return Err(no_packages(start, stray.map(|stranger| stranger.name.as_str())));
    };
    warnings.extend(strangers.into_iter().map(UnknownKey::into_warning));
    read_dependencies(&dependencies, &mut file, warnings)?;
    if file.specs.is_empty() && file.pip.is_empty() {
        return Err(no_packages(dependencies.place, None));
    }
    warnings.sort_by_key(|warning| warning.place);
    Ok(file)
}

fn read_name(top: &mut Section, warnings: &mut Vec<Warning>) -> Result<Option<String>, Rejection> {
    let Some(node) = top.node("name") else { return Ok(None) };
    let name = node.text().map_err(|at| within("name", at))?.trim();
    if !name.is_empty() && !name.contains(['/', ':', '#']) && !name.contains(char::is_control) {
        return Ok(Some(name.to_owned()));
    }
    let message = "`name` is not one conda would take, and has no effect".to_owned();
    warnings.push(Warning::new(node.place, message));
    Ok(None)
}

fn read_variables(top: &mut Section) -> Result<BTreeMap<String, String>, Rejection> {
    let Some(node) = top.node("variables") else { return Ok(BTreeMap::new()) };
    let section = Section::open(node, "variables", Keys::CHOSEN)?;
    let read = |(key, node): (Key, Node)| {
        let letter = |c: char| c.is_ascii_alphabetic() || c == '_';
        let plain = key.text.starts_with(letter) && key.text.chars().all(|c| letter(c) || c.is_ascii_digit());
        if !plain {
            return Err(Rejection::invalid(
                key.place,
                format!("`variables`: `{}` cannot be a variable", key.text),
            )
            .fix("use letters, digits and `_`, not beginning with a digit"));
        }
        let text = match &node.value {
            Value::Null => String::new(),
            _ => node.text().map_err(|at| within(&format!("variables.{}", key.text), at))?.to_owned(),
        };
        match text.contains('\0') {
            true => {
                Err(within(&format!("variables.{}", key.text), node.fault("a variable cannot hold a NUL")))
            }
            false => Ok((key.text, text)),
        }
    };
    section.into_entries().into_iter().map(read).collect()
}

fn read_channels(node: &Node, file: &mut CondaFile, warnings: &mut Vec<Warning>) -> Result<(), Rejection> {
    let Value::List(items) = &node.value else {
        let message = format!("`channels`: expected a list, found {}", node.describe());
        return Err(Rejection::invalid(node.place, message).fix("write `channels: [conda-forge]`"));
    };
    for item in items {
        let text = item.text().map_err(|at| within("channels", at))?.trim();
        spec::check_channel(text).map_err(|complaint| complaint.at(item.place))?;
        if text == "default" {
            let message =
                "`default` is a channel like any other; those of conda itself are `defaults`".to_owned();
            warnings.push(Warning::new(item.place, message));
        }
        // With this conda ignores its own configuration, which has no effect here anyway.
        let new = text != "nodefaults" && file.channels.iter().all(|known| known.text != text);
        if new {
            file.channels.push(Line { text: text.to_owned(), line: item.place.line });
        }
    }
    Ok(())
}

fn read_dependencies(
    node: &Node,
    file: &mut CondaFile,
    warnings: &mut Vec<Warning>,
) -> Result<(), Rejection> {
    let Value::List(items) = &node.value else {
        let message = format!("`dependencies`: expected a list, found {}", node.describe());
        return Err(Rejection::invalid(node.place, message)
            .fix("write each package on a line of its own that begins with `- `"));
    };
    let mut pip_at = None;
    for item in items {
        match &item.value {
            Value::Scalar(text) => {
                let (text, remark) = spec::tidy(text).map_err(|complaint| complaint.at(item.place))?;
                let remark = remark.or_else(|| unexpanded(&text));
                warnings.extend(remark.map(|message| Warning::new(item.place, message)));
                file.specs.push(Line { text, line: item.place.line });
            }
            Value::Map(entries) => {
                for (key, value) in entries {
                    if key.text != "pip" {
                        return Err(not_pip(key, value));
                    }
                    pip_at.get_or_insert(key.place);
                    read_pip(value, file, warnings)?;
                }
            }
            Value::Null => {
                return Err(Rejection::invalid(item.place, "`dependencies` has an entry that says nothing")
                    .fix("name a package there, or remove the line"));
            }
            Value::List(_) => {
                return Err(Rejection::invalid(item.place, "`dependencies` has a list inside")
                    .fix("write its packages one level further out; only `- pip:` has a list below it"));
            }
        }
    }
    if let Some(place) = pip_at
        && file.lacks_pip()
    {
        let message = "`pip` is not among the dependencies; it is added, because there are packages for it";
        warnings.push(Warning::new(place, message));
    }
    Ok(())
}

/// An entry `- word: …` that is not the one of pip.
fn not_pip(key: &Key, value: &Node) -> Rejection {
    let word = &key.text;
    match &value.value {
        Value::Scalar(version) if version.starts_with(|c: char| c.is_ascii_digit() || c == '*') => {
            Rejection::invalid(key.place, format!("`{word}: {version}` is not how a version is asked for"))
                .fix(format!("write `- {word}={version}`"))
        }
        Value::Scalar(text) => Rejection::invalid(key.place, format!("`{word}: {text}` is not a package"))
            .fix("write a name, and after it a version if one matters: `- numpy>=1.26`"),
        Value::Null => Rejection::invalid(key.place, format!("`{word}:` is not a package"))
            .fix(format!("remove the colon: `- {word}`")),
        _ => Rejection::unsupported(
            key.place,
            format!("a list of `{word}` packages cannot be installed: only conda and pip are known"),
            "take them from conda or pip, or let the command install them",
        ),
    }
}

/// The lines for pip. A list in the list holds the lines of an included file.
fn read_pip(node: &Node, file: &mut CondaFile, warnings: &mut Vec<Warning>) -> Result<(), Rejection> {
    let items = match &node.value {
        Value::List(items) => items.as_slice(),
        Value::Null => &[],
        _ => {
            let message = format!("`pip`: expected a list, found {}", node.describe());
            return Err(Rejection::invalid(node.place, message)
                .fix("write each package on a line of its own, indented below `- pip:`"));
        }
    };
    if items.is_empty() {
        warnings.push(Warning::new(node.place, "`pip` lists no packages"));
    }
    for item in items {
        match &item.value {
            Value::List(included) => {
                for line in included {
                    read_pip_line(line, file, warnings)?;
                }
            }
            _ => read_pip_line(item, file, warnings)?,
        }
    }
    Ok(())
}

fn read_pip_line(node: &Node, file: &mut CondaFile, warnings: &mut Vec<Warning>) -> Result<(), Rejection> {
    let text = match &node.value {
        Value::Scalar(text) => text.trim(),
        Value::Map(entries) => {
            let name = entries.first().map_or("numpy", |(key, _)| key.text.as_str());
            return Err(Rejection::invalid(
                node.place,
                "`pip`: expected a line of requirements, found a mapping",
            )
            .fix(format!("write the version as pip does, for example `- {name}==1.0`")));
        }
        _ => {
            let message = format!("`pip`: expected a line of requirements, found {}", node.describe());
            return Err(
                Rejection::invalid(node.place, message).fix("name a package there, or remove the line")
            );
        }
    };
    check_pip_line(text).map_err(|complaint| complaint.at(node.place))?;
    warnings.extend(unexpanded(text).map(|message| Warning::new(node.place, message)));
    file.pip.push(Line { text: text.to_owned(), line: node.place.line });
    Ok(())
}

fn check_pip_line(text: &str) -> Result<(), Complaint> {
    if text.is_empty() {
        return Err(Complaint::invalid("`pip` has an entry that says nothing", "remove the line"));
    }
    if text.contains(char::is_control) {
        return Err(Complaint::invalid(
            "`pip`: an entry has more than one line",
            "write one package in each entry",
        ));
    }
    match requirement::judge(text) {
        requirement::Line::Package => Ok(()),
        requirement::Line::Include(path) => Err(Complaint::unsupported(
            format!("`-r {path}` names a file that did not come with the job"),
            "submit the job with `agentctl`, which reads such files in, or list the packages here",
        )),
        requirement::Line::Refused(refused) if refused.secret => {
            Err(Complaint::invalid(format!("the line {}", refused.why), refused.fix))
        }
        requirement::Line::Refused(refused) => {
            Err(Complaint::unsupported(format!("`{text}` {}", refused.why), refused.fix))
        }
    }
}

/// A remark on a variable that the writer may expect to be replaced.
fn unexpanded(text: &str) -> Option<String> {
    let variable = requirement::variable(text)?;
    Some(format!("`{variable}` stays as it is: variables of your machine are not known on a node"))
}

/// What is wrong with a text, without its place.
#[derive(Debug, PartialEq, Eq)]
struct Complaint {
    message: String,
    fix: String,
    unsupported: bool,
}

impl Complaint {
    fn invalid(message: impl Into<String>, fix: impl Into<String>) -> Complaint {
        Complaint { message: message.into(), fix: fix.into(), unsupported: false }
    }

    fn unsupported(message: impl Into<String>, fix: impl Into<String>) -> Complaint {
        Complaint { message: message.into(), fix: fix.into(), unsupported: true }
    }

    fn at(self, place: Place) -> Rejection {
        match self.unsupported {
            true => Rejection::unsupported(place, self.message, &self.fix),
            false => Rejection::invalid(place, self.message).fix(self.fix),
        }
    }
}

#[cfg(test)]
mod tests;
