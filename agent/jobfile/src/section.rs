//! One mapping of a document, read key by key.
//!
//! Owns three guarantees for every mapping of a job file: a wrong value is refused with its key and its place, a key
//! that is without effect is a warning or refused as its table says, and an unknown key is a warning that guesses what
//! was meant.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use super::keys::{Effect, Keys, Row, ValueKind};
use crate::yaml::{At, Entries, Key, Node, Place, Value};
use agent_model::fault::{Code, Fault};

/// Something in a document that has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where it is.
    pub place: Place,
    /// What it is and that it is ignored.
    pub message: String,
    /// It is written almost like a key that changes what runs: who wrote it meant that, and the job would run otherwise.
    is_slip: bool,
}

impl Warning {
    pub(crate) fn new(place: Place, message: impl Into<String>) -> Warning {
        Warning { place, message: message.into(), is_slip: false }
    }

    /// The others, if none of these is a slip.
    pub fn without_slips(warnings: Vec<Warning>) -> Result<Vec<Warning>, Refused> {
        let (slips, warnings): (Vec<_>, Vec<_>) = warnings.into_iter().partition(|warning| warning.is_slip);
        let mistake = |slip: Warning| {
            Rejection::invalid(slip.place, slip.message)
                .fix("correct the key; `--allow-unknown` runs the job without it")
        };
        match slips.is_empty() {
            true => Ok(warnings),
            false => Err(Refused { mistakes: slips.into_iter().map(mistake).collect(), warnings }),
        }
    }
}

/// Keys that change what runs, and what is below them.
const DECIDES: [&str; 11] = [
    "array",
    "code",
    "command",
    "distribution",
    "environment",
    "environment_variables",
    "inputs",
    "limits",
    "outputs",
    "resources",
    "secrets",
];

/// Why a document is refused: one mistake in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The kind of mistake.
    pub code: Code,
    /// Where it is, and what is wrong there.
    pub at: At,
    /// What to write instead.
    pub fix: Option<String>,
}

/// What there is to say about a document that is refused, each list in the order of the document.
#[derive(Debug)]
pub struct Refused {
    /// The mistakes; at least one.
    pub mistakes: Vec<Rejection>,
    /// What would be ignored once the mistakes are corrected.
    pub warnings: Vec<Warning>,
}

impl From<Rejection> for Refused {
    fn from(mistake: Rejection) -> Refused {
        Refused { mistakes: vec![mistake], warnings: Vec::new() }
    }
}

/// The first mistake as a fault, everything else as its causes.
impl From<Refused> for Fault {
    fn from(refused: Refused) -> Fault {
        let mut mistakes = refused.mistakes.into_iter();
        let also = |fault: Fault, other: Rejection| fault.also(other.at, other.fix.as_deref());
        let fault = match mistakes.next() {
            Some(first) => mistakes.fold(first.into(), also),
            None => Fault::new(Code::Bug, "a document was refused without a mistake"),
        };
        let also =
            |fault: Fault, Warning { place, message, .. }| fault.also(format!("{place}: {message}"), None);
        refused.warnings.into_iter().fold(fault, also)
    }
}

impl Rejection {
    /// The document breaks a rule at `place`.
    pub(crate) fn invalid(place: Place, message: impl Into<String>) -> Rejection {
        Rejection { code: Code::JobInvalid, at: At { place, message: message.into() }, fix: None }
    }

    /// The document asks at `place` for something that is not supported; `fix` names what is.
    pub(crate) fn unsupported(place: Place, message: impl Into<String>, fix: &str) -> Rejection {
        let at = At { place, message: message.into() };
        Rejection { code: Code::JobUnsupported, at, fix: Some(fix.to_owned()) }
    }

    /// The text is not a document at all.
    pub(crate) fn syntax(at: At) -> Rejection {
        let fix = "check the indentation, quotes and brackets around that place".to_owned();
        Rejection { code: Code::JobFile, at, fix: Some(fix) }
    }

    /// Sets what to write instead.
    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Rejection {
        self.fix = Some(fix.into());
        self
    }
}

impl From<Rejection> for Fault {
    fn from(refusal: Rejection) -> Fault {
        let fault = Fault::new(refusal.code, refusal.at.to_string());
        match refusal.fix {
            Some(fix) => fault.fix(fix),
            None => fault.fix("correct the file at that place"),
        }
    }
}

/// The mistakes of a document: reading continues after each, so that all are reported at once.
#[derive(Default)]
pub(crate) struct Mistakes(Vec<Rejection>);

impl Mistakes {
    /// What was read, or the default after a mistake.
    pub(crate) fn note<T: Default>(&mut self, read: Result<T, Rejection>) -> T {
        read.unwrap_or_else(|refusal| {
            self.0.push(refusal);
            T::default()
        })
    }

    /// How many there are so far.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Adds one.
    pub(crate) fn add(&mut self, refusal: Rejection) {
        self.0.push(refusal);
    }

    /// The warnings, if there is no mistake.
    pub(crate) fn told(self, mut warnings: Vec<Warning>) -> Result<Vec<Warning>, Refused> {
        let Mistakes(mut mistakes) = self;
        // An unknown key that stands where a needed one is missing is already the mistake.
        let told = |warning: &Warning, mistake: &Rejection| {
            mistake.at.place == warning.place && warning.message.starts_with(&mistake.at.message)
        };
        warnings.retain(|warning| !mistakes.iter().any(|mistake| told(warning, mistake)));
        warnings.sort_by_key(|warning| warning.place);
        mistakes.sort_by_key(|mistake| mistake.at.place);
        if mistakes.is_empty() { Ok(warnings) } else { Err(Refused { mistakes, warnings }) }
    }
}

/// A mapping being read, and the path of keys that leads to it.
pub(crate) struct Section {
    path: String,
    entries: Entries,
    keys: &'static Keys,
}

impl Section {
    /// Opens the mapping `node` with these keys, reached by `path`; the document itself has an empty path.
    pub(crate) fn open(node: Node, path: &str, keys: &'static Keys) -> Result<Section, Rejection> {
        let mut entries = node.map().map_err(|at| within(path, at))?;
        if keys.either_case {
            entries
                .rename(|written| keys.find(written).map(|row| row.name))
                .map_err(|at| within(path, at))?;
        }
        Ok(Section { path: path.to_owned(), entries, keys })
    }

    /// Where the mapping starts.
    pub(crate) fn place(&self) -> Place {
        self.entries.place
    }

    /// The full name of one of its keys.
    pub(crate) fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of `key`; a value of nothing counts as absent.
    pub(crate) fn node(&mut self, key: &'static str) -> Option<Node> {
        debug_assert!(self.row(key).is_some(), "`{}` is in no table", self.name(key));
        self.entries.take(key)
    }

    /// Puts back what was taken, or what stands in its place.
    pub(crate) fn put(&mut self, key: Key, node: Node) {
        self.entries.put(key, node);
    }

    /// The value of `key`, which stays there.
    pub(crate) fn at_node(&self, key: &'static str) -> Option<&Node> {
        self.entries.get(key)
    }

    /// Where the value of `key` is; the mapping's own place if there is none.
    pub(crate) fn at(&self, key: &'static str) -> Place {
        self.entries.get(key).map_or(self.place(), |node| node.place)
    }

    fn row(&self, key: &str) -> Option<&'static Row> {
        self.keys.rows.iter().find(|row| row.name == key)
    }

    fn kind(&self, key: &str) -> ValueKind {
        self.row(key).map_or(ValueKind::Free, |row| row.kind)
    }

    /// The mapping under `key`.
    pub(crate) fn section(&mut self, key: &'static str) -> Result<Option<Section>, Rejection> {
        let (path, keys) = (self.name(key), self.kind(key).keys());
        self.node(key).map(|node| Section::open(node, &path, keys)).transpose()
    }

    /// The text of `key`.
    pub(crate) fn text(&mut self, key: &'static str) -> Result<Option<String>, Rejection> {
        self.read(key, |node| node.text().map(str::to_owned))
    }

    /// The value of `key`, parsed from its text; `expected` names the type for messages.
    pub(crate) fn parsed<T: FromStr>(
        &mut self,
        key: &'static str,
        expected: &str,
    ) -> Result<Option<T>, Rejection> {
        self.read(key, |node| node.parsed(expected))
    }

    /// `true` or `false`.
    pub(crate) fn flag(&mut self, key: &'static str) -> Result<Option<bool>, Rejection> {
        self.is(key, matches!(self.kind(key), ValueKind::Flag));
        self.read(key, Node::flag)
    }

    /// A length of time: whole seconds, or a number with `s`, `m`, `h` or `d`.
    pub(crate) fn duration(&mut self, key: &'static str) -> Result<Option<Duration>, Rejection> {
        self.is(key, matches!(self.kind(key), ValueKind::Duration));
        self.read(key, |node| {
            let text = node.text()?;
            seconds(text).map(Duration::from_secs).ok_or_else(|| {
                node.fault(format!("expected a number of seconds, for example 3600 or `2h`, found `{text}`"))
            })
        })
    }

    /// A number of bytes: a number with `b`, `k`, `m`, `g` or `t`.
    pub(crate) fn bytes(&mut self, key: &'static str) -> Result<Option<u64>, Rejection> {
        self.is(key, matches!(self.kind(key), ValueKind::Size));
        self.read(key, |node| {
            let text = node.text()?;
            agent_model::size::meant(text).map_err(|why| node.fault(format!("`{text}`: {why}")))
        })
    }

    /// One of the words of the table, in any case; the result is the word as it is there.
    pub(crate) fn word(&mut self, key: &'static str) -> Result<Option<&'static str>, Rejection> {
        let words = match self.kind(key) {
            ValueKind::Word(words) => words,
            _ => &[],
        };
        self.is(key, !words.is_empty());
        self.read(key, |node| {
            let text = node.text()?.trim();
            words.iter().copied().find(|word| word.eq_ignore_ascii_case(text)).ok_or_else(|| {
                node.fault(format!("`{text}` is not one of {}{}", words.join(", "), guess(text, words)))
            })
        })
    }

    /// A mapping of names to texts; a value of nothing is an empty text.
    pub(crate) fn texts(&mut self, key: &'static str) -> Result<BTreeMap<String, String>, Rejection> {
        self.is(key, matches!(self.kind(key), ValueKind::Texts));
        let path = self.name(key);
        let Some(section) = self.section(key)? else { return Ok(BTreeMap::new()) };
        let text_of = |node: &Node| match node.value {
            Value::Null => Ok(String::new()),
            _ => node.text().map(str::to_owned),
        };
        let entries = section.entries.rest().into_iter().map(|(name, node)| {
            let text = text_of(&node).map_err(|at| within(&format!("{path}.{}", name.text), at))?;
            Ok((name.text, text))
        });
        entries.collect()
    }

    /// One plain value, or several, as texts, and where they are.
    pub(crate) fn lines(&mut self, key: &'static str) -> Result<Option<(Vec<String>, Place)>, Rejection> {
        self.is(key, matches!(self.kind(key), ValueKind::Lines));
        self.read(key, |node| {
            let texts = match &node.value {
                Value::List(items) => {
                    items.iter().map(|item| item.text().map(str::to_owned)).collect::<Result<_, _>>()?
                }
                _ => vec![node.text()?.to_owned()],
            };
            Ok((texts, node.place))
        })
    }

    /// The free-named entries of the mapping, in the order written.
    pub(crate) fn into_entries(self) -> Vec<(Key, Node)> {
        self.entries.rest()
    }

    /// Ends the reading: keys without effect are warnings, and the entries that are not known are returned.
    pub(crate) fn strangers(mut self, warnings: &mut Vec<Warning>) -> Vec<UnknownKey> {
        self.pass_over(warnings);
        let Section { path, entries, keys } = self;
        let known: Vec<&'static str> = keys.rows.iter().map(|row| row.name).collect();
        let stranger = |key: Key| UnknownKey {
            place: key.place,
            name: if path.is_empty() { key.text.clone() } else { format!("{path}.{}", key.text) },
            resembles: nearest(&key.text, &known),
        };
        let unknown = |(key, _): &(Key, Node)| keys.rows.iter().all(|row| row.name != key.text);
        entries.rest().into_iter().filter(unknown).map(|(key, _)| stranger(key)).collect()
    }

    /// Ends the reading of a table that refuses nothing: the remaining entries are warnings.
    pub(crate) fn finish(self, warnings: &mut Vec<Warning>) {
        let strangers = self.strangers(warnings);
        warnings.extend(strangers.into_iter().map(UnknownKey::into_warning));
    }

    /// Ends the reading: keys that the table refuses are mistakes, the remaining entries are warnings.
    pub(crate) fn close(mut self, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) {
        for row in self.keys.rows {
            if let Effect::Refused { usual, fix } = row.effect
                && let Some(node) = self.entries.take(row.name).filter(|node| !is_usual(node, usual))
            {
                let message = format!("`{}` is not supported", self.name(row.name));
                wrong.add(Rejection::unsupported(node.place, message, fix));
            }
        }
        self.finish(warnings);
    }

    /// Takes the keys from which nothing follows, those among them that are read only beside others.
    fn pass_over(&mut self, warnings: &mut Vec<Warning>) {
        for row in self.keys.rows {
            let (usual, why): (&[&str], _) = match row.effect {
                Effect::Unused { usual, why } => (usual, format!(": {why}")),
                Effect::Read => (&[], " here".to_owned()),
                Effect::Ignored | Effect::Refused { .. } => continue,
            };
            if let Some(node) = self.entries.take(row.name).filter(|node| !is_usual(node, usual)) {
                let message = format!("`{}` has no effect{why}", self.name(row.name));
                warnings.push(Warning::new(node.place, message));
            }
        }
    }

    /// Leaves keys unread that count only for jobs of another kind.
    pub(crate) fn skip(&mut self, keys: &[&'static str]) {
        keys.iter().for_each(|key| drop(self.node(key)));
    }

    /// A key is read in the way that its table says.
    fn is(&self, key: &str, agreed: bool) {
        debug_assert!(agreed, "the table says otherwise of `{}`", self.name(key));
    }

    fn read<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Node) -> Result<T, At>,
    ) -> Result<Option<T>, Rejection> {
        let Some(node) = self.node(key) else { return Ok(None) };
        read(&node).map(Some).map_err(|at| within(&self.name(key), at))
    }
}

/// Whether a value is one of those that nobody needs to be told of; an empty list or mapping is.
fn is_usual(node: &Node, usual: &[&str]) -> bool {
    let is = |text: &str| usual.iter().any(|usual| usual.eq_ignore_ascii_case(text.trim()));
    match &node.value {
        Value::Null => true,
        Value::Scalar(text) => is(text),
        Value::List(items) => items.iter().all(|item| item.text().is_ok_and(is)),
        Value::Map(entries) => entries.iter().all(|(_, node)| is_usual(node, usual)),
    }
}

/// A key that is not known.
pub(crate) struct UnknownKey {
    /// Where it is.
    pub(crate) place: Place,
    /// Its full name.
    pub(crate) name: String,
    /// The known key that was most likely meant.
    pub(crate) resembles: Option<&'static str>,
}

impl UnknownKey {
    /// The warning that it is ignored.
    pub(crate) fn into_warning(self) -> Warning {
        let hint = self.resembles.map(|key| format!("; did you mean `{key}`?")).unwrap_or_default();
        let root = match self.name.split_once('.') {
            Some((root, _)) => Some(root),
            None => self.resembles,
        };
        Warning {
            is_slip: self.resembles.is_some() && root.is_some_and(|root| DECIDES.contains(&root)),
            ..Warning::new(self.place, format!("`{}` is not known and has no effect{hint}", self.name))
        }
    }
}

/// A complaint about the value under `path`.
pub(crate) fn within(path: &str, at: At) -> Rejection {
    if path.is_empty() {
        return Rejection::invalid(at.place, at.message);
    }
    Rejection::invalid(at.place, format!("`{path}`: {}", at.message))
}

/// `; did you mean …` when a word resembles what was written.
fn guess(written: &str, words: &[&'static str]) -> String {
    nearest(written, words).map(|word| format!("; did you mean `{word}`?")).unwrap_or_default()
}

/// The known word that was most likely meant by `written`.
pub fn nearest<'a>(written: &str, known: &[&'a str]) -> Option<&'a str> {
    let fold = |word: &str| word.to_lowercase().replace('-', "_");
    let written = fold(written);
    let distances = known.iter().map(|word| (strsim::osa_distance(&written, &fold(word)), *word));
    let (distance, word) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= 2 && distance * 3 <= word.len()).then_some(word)
}

fn seconds(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match text[split..].trim() {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    text[..split].parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_nearest_forgives_small_slips_and_invents_nothing() {
        let known = ["command", "environment", "environment_variables", "inputs", "outputs"];
        for (written, meant) in [
            ("comand", Some("command")),
            ("Command", Some("command")),
            ("enviroment", Some("environment")),
            ("environment-variables", Some("environment_variables")),
            ("ipnuts", Some("inputs")),
            ("x", None),
            ("framework", None),
        ] {
            assert_eq!(nearest(written, &known), meant, "{written}");
        }
    }

    #[test]
    fn test_sizes_and_times() {
        for (text, bytes) in [("8g", Some(8 << 30)), ("512M", Some(512 << 20)), ("1GiB", Some(1 << 30))] {
            assert_eq!(agent_model::size::parse(text), bytes, "{text}");
        }
        for bad in ["", "g", "8 apples", "-1g", "1.5g", "99999999999t"] {
            assert_eq!(agent_model::size::parse(bad), None, "{bad}");
        }
        assert_eq!(seconds("90"), Some(90));
        assert_eq!(seconds("2h"), Some(7200));
        for bad in ["", "h", "soon", "-3", "1w"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }
}
