//! One mapping of a document, read key by key.
//!
//! Owns two guarantees for every mapping of a job file: a wrong value is refused with its key and its place, and
//! an unknown key is a warning that guesses what was meant.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use crate::fault::{Code, Fault};
use crate::yaml::{At, Entries, Key, Node, Place, Value};

/// Something in a document that has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where it is.
    pub place: Place,
    /// What it is and that it is ignored.
    pub message: String,
}

/// Why a document is refused.
#[derive(Debug)]
pub(crate) struct Rejection {
    code: Code,
    at: At,
    fix: Option<String>,
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

    /// The first in the document as a fault, the others as its causes.
    pub(crate) fn told(mut self) -> Result<(), Fault> {
        self.0.sort_by_key(|refusal| refusal.at.place);
        let mut refusals = self.0.into_iter();
        let Some(first) = refusals.next() else { return Ok(()) };
        let also = |fault: Fault, other: Rejection| {
            let fix = other.fix.map(|fix| format!("; {fix}")).unwrap_or_default();
            fault.why(format!("also {}{fix}", other.at))
        };
        Err(refusals.fold(first.into(), also))
    }
}

/// A mapping being read, and the path of keys that leads to it.
pub(crate) struct Section {
    path: String,
    entries: Entries,
    known: Vec<&'static str>,
}

impl Section {
    /// Opens the mapping `node`, reached by `path`; the document itself has an empty path.
    pub(crate) fn open(node: Node, path: &str) -> Result<Section, Rejection> {
        let entries = node.map().map_err(|at| within(path, at))?;
        Ok(Section { path: path.to_owned(), entries, known: Vec::new() })
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
        #[cfg(test)]
        ASKED.with_borrow_mut(|asked| asked.insert(self.name(key)));
        self.take(key)
    }

    fn take(&mut self, key: &'static str) -> Option<Node> {
        self.known.push(key);
        self.entries.take(key)
    }

    /// The mapping under `key`.
    pub(crate) fn section(&mut self, key: &'static str) -> Result<Option<Section>, Rejection> {
        let path = self.name(key);
        self.node(key).map(|node| Section::open(node, &path)).transpose()
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

    /// A length of time: whole seconds, or a number with `s`, `m`, `h` or `d`.
    pub(crate) fn duration(&mut self, key: &'static str) -> Result<Option<Duration>, Rejection> {
        self.read(key, |node| {
            let text = node.text()?;
            seconds(text).map(Duration::from_secs).ok_or_else(|| {
                node.fault(format!("expected a number of seconds, for example 3600 or `2h`, found `{text}`"))
            })
        })
    }

    /// A number of bytes: a number with `b`, `k`, `m`, `g` or `t`.
    pub(crate) fn bytes(&mut self, key: &'static str) -> Result<Option<u64>, Rejection> {
        self.read(key, |node| {
            let text = node.text()?;
            size(text).ok_or_else(|| node.fault(format!("expected a size, for example `8g`, found `{text}`")))
        })
    }

    /// One of a few words, in any case; the result is the word as it is in `words`.
    pub(crate) fn word(
        &mut self,
        key: &'static str,
        words: &[&'static str],
    ) -> Result<Option<&'static str>, Rejection> {
        self.read(key, |node| {
            let text = node.text()?.trim();
            words.iter().copied().find(|word| word.eq_ignore_ascii_case(text)).ok_or_else(|| {
                node.fault(format!("`{text}` is not one of {}{}", words.join(", "), guess(text, words)))
            })
        })
    }

    /// A mapping of names to texts; a value of nothing is an empty text.
    pub(crate) fn texts(&mut self, key: &'static str) -> Result<BTreeMap<String, String>, Rejection> {
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

    /// Keys that are understood and change nothing here.
    pub(crate) fn ignore(&mut self, keys: &[&'static str]) {
        keys.iter().for_each(|key| drop(self.take(key)));
    }

    /// Keys that a reader might count on although they change nothing here.
    pub(crate) fn warn_of(&mut self, keys: &[(&'static str, &str)], warnings: &mut Vec<Warning>) {
        for (key, consequence) in keys {
            if let Some(node) = self.take(key) {
                let message = format!("`{}` has no effect: {consequence}", self.name(key));
                warnings.push(Warning { place: node.place, message });
            }
        }
    }

    /// Ends the reading: the entries that were not asked for.
    pub(crate) fn strangers(self) -> Vec<UnknownKey> {
        let Section { path, entries, known } = self;
        let stranger = |key: Key| UnknownKey {
            place: key.place,
            name: if path.is_empty() { key.text.clone() } else { format!("{path}.{}", key.text) },
            resembles: nearest(&key.text, &known),
        };
        entries.rest().into_iter().map(|(key, _)| stranger(key)).collect()
    }

    /// The free-named entries of the mapping, in the order written.
    pub(crate) fn into_entries(self) -> Vec<(Key, Node)> {
        self.entries.rest()
    }

    /// Ends the reading: the remaining entries are warnings.
    pub(crate) fn finish(self, warnings: &mut Vec<Warning>) {
        warnings.extend(self.strangers().into_iter().map(UnknownKey::into_warning));
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
        Warning {
            place: self.place,
            message: format!("`{}` is not known and has no effect{hint}", self.name),
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

/// A number of bytes as job files write it: a number with `b`, `k`, `m`, `g` or `t`, in powers of 1024.
pub fn size(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = text[split..].trim();
    let power = match unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b')).unwrap_or(unit) {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    text[..split].parse::<u64>().ok()?.checked_mul(1 << power)
}

#[cfg(test)]
thread_local! {
    /// The full names of all keys that have an effect and were asked for.
    pub(crate) static ASKED: std::cell::RefCell<std::collections::BTreeSet<String>> = Default::default();
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
            assert_eq!(size(text), bytes, "{text}");
        }
        for bad in ["", "g", "8 apples", "-1g", "1.5g", "99999999999t"] {
            assert_eq!(size(bad), None, "{bad}");
        }
        assert_eq!(seconds("90"), Some(90));
        assert_eq!(seconds("2h"), Some(7200));
        for bad in ["", "h", "soon", "-3", "1w"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }
}
