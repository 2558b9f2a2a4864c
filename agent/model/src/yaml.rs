//! YAML (and so JSON) with a line and a column on everything.
//!
//! Scalars keep the text they were written with: `3.10` stays `3.10`. Duplicate keys and runaway aliases are
//! errors. Every complaint about a document, of syntax or of meaning, is an [`At`] and so names its place.

use std::fmt;

use saphyr::{MarkedYaml, ScalarStyle, ScanError, YamlData, YamlLoader};
use saphyr_parser::Parser;

/// A place in a document, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Place {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// A complaint about a place of a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct At {
    /// Where.
    pub place: Place,
    /// What is wrong there.
    pub message: String,
}

/// A value and where it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Where it starts.
    pub place: Place,
    /// What it is.
    pub value: Value,
}

/// What a node is.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Nothing, `~` or `null`.
    Null,
    /// A scalar, as written.
    Scalar(String),
    /// A list.
    List(Vec<Node>),
    /// A mapping, in the order written.
    Map(Vec<(Key, Node)>),
}

/// A key of a mapping.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// Where it stands.
    pub place: Place,
    /// Its text.
    pub text: String,
}

/// The deepest nesting accepted; a job file has five levels.
const MAX_DEPTH: usize = 64;

/// Reads the first document of `text`; an empty text is [`Value::Null`].
pub fn parse(text: &str) -> Result<Node, At> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut loader = YamlLoader::<MarkedYaml<'_>>::default();
    loader.early_parse(false);
    Parser::new_from_str(text).load(&mut loader, true).map_err(|error| syntax(&error))?;
    if let Some(error) = loader.error() {
        return Err(syntax(error));
    }
    match loader.into_documents().into_iter().next() {
        Some(document) => convert(document, 0),
        None => Ok(Node { place: Place { line: 1, column: 1 }, value: Value::Null }),
    }
}

fn syntax(error: &ScanError) -> At {
    let place = Place { line: error.marker().line(), column: error.marker().col() + 1 };
    At { place, message: error.info().to_owned() }
}

fn convert(node: MarkedYaml<'_>, depth: usize) -> Result<Node, At> {
    let start = node.span.start;
    let place = Place { line: start.line(), column: start.col() + 1 };
    let fail = |message: &str| Err(At { place, message: message.to_owned() });
    if depth > MAX_DEPTH {
        return fail("nested too deeply");
    }
    let value = match node.data {
        YamlData::Representation(text, style, _) => {
            let plain = style == ScalarStyle::Plain;
            if plain && matches!(text.as_ref(), "" | "~" | "null" | "Null" | "NULL") {
                Value::Null
            } else {
                Value::Scalar(text.into_owned())
            }
        }
        YamlData::Sequence(items) => {
            Value::List(items.into_iter().map(|item| convert(item, depth + 1)).collect::<Result<_, _>>()?)
        }
        YamlData::Mapping(entries) => {
            let mut map = Vec::with_capacity(entries.len());
            for (key, value) in entries {
                let key = convert(key, depth + 1)?;
                let text = match key.value {
                    Value::Scalar(text) => text,
                    Value::Null => "null".to_owned(),
                    _ => return fail("a key must be a word"),
                };
                map.push((Key { place: key.place, text }, convert(value, depth + 1)?));
            }
            Value::Map(map)
        }
        YamlData::Tagged(_, inner) => return convert(*inner, depth + 1),
        YamlData::Value(_) | YamlData::Alias(_) | YamlData::BadValue => return fail("unreadable value"),
    };
    Ok(Node { place, value })
}

impl Node {
    /// A complaint about this node.
    pub fn fault(&self, message: impl Into<String>) -> At {
        At { place: self.place, message: message.into() }
    }

    /// What the node is, for messages.
    pub fn describe(&self) -> &'static str {
        match self.value {
            Value::Null => "nothing",
            Value::Scalar(_) => "a plain value",
            Value::List(_) => "a list",
            Value::Map(_) => "a mapping",
        }
    }

    /// The text of a scalar.
    pub fn text(&self) -> Result<&str, At> {
        match &self.value {
            Value::Scalar(text) => Ok(text),
            _ => Err(self.fault(format!("expected a plain value, found {}", self.describe()))),
        }
    }

    /// A scalar of a type that is parsed from text; `expected` names it, for example `a whole number`.
    pub fn parsed<T: std::str::FromStr>(&self, expected: &str) -> Result<T, At> {
        let text = self.text()?;
        text.trim().parse().map_err(|_| self.fault(format!("expected {expected}, found `{text}`")))
    }

    /// A truth value, in any of the ways YAML users write one.
    pub fn flag(&self) -> Result<bool, At> {
        match self.text()?.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Ok(true),
            "false" | "no" | "off" => Ok(false),
            other => Err(self.fault(format!("expected `true` or `false`, found `{other}`"))),
        }
    }

    /// The items of a list.
    pub fn list(&self) -> Result<&[Node], At> {
        match &self.value {
            Value::List(items) => Ok(items),
            _ => Err(self.fault(format!("expected a list, found {}", self.describe()))),
        }
    }

    /// The entries of a mapping, to be taken one by one.
    pub fn map(self) -> Result<Entries, At> {
        match self.value {
            Value::Map(entries) => Ok(Entries { place: self.place, entries }),
            _ => Err(self.fault(format!("expected a mapping, found {}", self.describe()))),
        }
    }
}

/// The entries of a mapping. Take what is known; what is left was not understood.
#[derive(Debug)]
pub struct Entries {
    /// Where the mapping starts.
    pub place: Place,
    entries: Vec<(Key, Node)>,
}

impl Entries {
    /// Takes the value of `key`. A value of nothing counts as absent.
    pub fn take(&mut self, key: &str) -> Option<Node> {
        let index = self.entries.iter().position(|(k, _)| k.text == key)?;
        let (_, node) = self.entries.remove(index);
        (node.value != Value::Null).then_some(node)
    }

    /// Takes the value of `key`, even if it is nothing.
    pub fn take_present(&mut self, key: &str) -> Option<Node> {
        let index = self.entries.iter().position(|(k, _)| k.text == key)?;
        Some(self.entries.remove(index).1)
    }

    /// Takes every entry that is left.
    pub fn rest(self) -> Vec<(Key, Node)> {
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_scalars_keep_their_text_and_place() {
        let mut map = parse("a: 3.10\nb:\n  - \"x\"\n  - null\n").unwrap().map().unwrap();
        assert_eq!(map.take("a").unwrap().text().unwrap(), "3.10");
        let b = map.take("b").unwrap();
        assert_eq!(b.list().unwrap()[0].place, Place { line: 3, column: 5 });
        assert_eq!(b.list().unwrap()[1].value, Value::Null);
    }

    #[test]
    fn test_json_is_read() {
        let mut map = parse(r#"{"a": {"b": [1, "two"]}}"#).unwrap().map().unwrap();
        let inner = map.take("a").unwrap().map().unwrap().take("b").unwrap();
        assert_eq!(inner.list().unwrap()[1].text().unwrap(), "two");
    }

    #[test]
    fn test_complaints_name_their_place() {
        let error = parse("a: 1\nb: [1, 2\nc: 3\n").unwrap_err();
        assert!(error.place.line >= 2, "{error}");
        let error = parse("a: 1\na: 2\n").unwrap_err();
        assert_eq!(error.place.line, 2, "{error}");
        let node = parse("a:\n  b: x\n").unwrap().map().unwrap().take("a").unwrap();
        assert_eq!(
            node.text().unwrap_err().to_string(),
            "line 2, column 3: expected a plain value, found a mapping"
        );
    }

    #[test]
    fn test_hostile_documents_end_soon() {
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
        for i in 1..12 {
            let prev = format!("*a{}", i - 1);
            bomb += &format!("a{i}: &a{i} [{}]\n", [prev.as_str(); 9].join(","));
        }
        assert!(parse(&bomb).is_err());
        assert!(parse(&"[".repeat(200)).is_err());
        assert!(parse(&format!("{}{}", "[".repeat(100), "]".repeat(100))).is_err());
    }
}
