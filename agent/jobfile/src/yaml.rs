//! YAML (and so JSON) with a line and a column for every node.
//!
//! Scalars keep the text they were written with: `3.10` stays `3.10`. Duplicate keys and runaway aliases are
//! errors. Every error in a document, of syntax or of meaning, is an [`At`] and so names its place.
//!
//! [`write`] is the way back: what it writes is read as the same texts, here and by other readers of YAML.

use std::fmt;
use std::ops::Range;

use saphyr::{MarkedYaml, Scalar, ScalarStyle, ScanError, Yaml, YamlData, YamlEmitter, YamlLoader};
use saphyr_parser::{Event, Marker, Parser};

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

/// A value and its place.
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
    /// Where it is.
    pub place: Place,
    /// Its text.
    pub text: String,
}

const BOM: char = '\u{feff}';
/// The deepest nesting accepted; a job file has five levels.
const MAX_DEPTH: usize = 64;

/// Reads the first document of `text`; an empty text is [`Value::Null`].
pub fn parse(text: &str) -> Result<Node, At> {
    let text = text.strip_prefix(BOM).unwrap_or(text);
    check_depth(text)?;
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

/// Part of a document that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// Text, quoted where it would be taken for something else; as a block where it has several lines.
    Text(String),
    /// A number.
    Whole(u64),
    /// Another number, as its text.
    Number(String),
    /// A truth value.
    Flag(bool),
    /// A list.
    List(Vec<Item>),
    /// A mapping, in this order.
    Map(Vec<(String, Item)>),
}

impl From<&str> for Item {
    fn from(text: &str) -> Item {
        Item::Text(text.to_owned())
    }
}

impl Item {
    fn to_yaml(&self) -> Yaml<'_> {
        match self {
            Item::Text(text) => text_of(text),
            // No number here is near the largest.
            Item::Whole(number) => Yaml::Value(Scalar::Integer(i64::try_from(*number).unwrap_or(i64::MAX))),
            Item::Number(number) => Yaml::Representation(number.into(), ScalarStyle::Plain, None),
            Item::Flag(flag) => Yaml::Value(Scalar::Boolean(*flag)),
            Item::List(items) => Yaml::Sequence(items.iter().map(Item::to_yaml).collect()),
            Item::Map(entries) => {
                Yaml::Mapping(entries.iter().map(|(key, item)| (text_of(key), item.to_yaml())).collect())
            }
        }
    }
}

/// Readers of the older YAML 1.1 take `1_000`, `1:30` and `y` for something else than text.
fn text_of(text: &str) -> Yaml<'_> {
    let is_word = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let quoted = is_word || matches!(text, "y" | "Y" | "n" | "N");
    match quoted && text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '"' | '\\')) {
        true => Yaml::Representation(text.into(), ScalarStyle::DoubleQuoted, None),
        false => Yaml::Value(Scalar::String(text.into())),
    }
}

/// A document as text.
pub fn write(item: &Item) -> String {
    let mut text = String::new();
    let mut emitter = YamlEmitter::new(&mut text);
    emitter.multiline(true);
    // Writing to a string cannot fail.
    let _ = emitter.dump(&item.to_yaml());
    let text = text.strip_prefix("---\n").unwrap_or(&text).trim_end_matches('\n');
    format!("{text}\n")
}

/// A scalar as it is written in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Where it starts.
    pub place: Place,
    /// Its bytes in the text, quotes included.
    pub span: Range<usize>,
}

/// Why a text is not plain YAML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum NotPlain {
    #[error(transparent)]
    Syntax(At),
    #[error(transparent)]
    Fancy(At),
}

/// The scalars of a text that holds at most one document, without anchors, aliases and tags: such a document means
/// what a reader sees.
pub fn plain(text: &str) -> Result<Vec<Written>, NotPlain> {
    let body = text.strip_prefix(BOM).unwrap_or(text);
    let mut bytes = Offsets::new(body, text.len() - body.len());
    let mut scalars = Vec::new();
    let mut documents = 0;
    let mut depth = 0;
    for event in Parser::new_from_str(body) {
        let (event, span) = event.map_err(|error| NotPlain::Syntax(syntax(&error)))?;
        let place = place_of(&span.start);
        let refuse = |message: &str| Err(NotPlain::Fancy(At { place, message: message.to_owned() }));
        let (anchor, tag) = match &event {
            Event::Scalar(_, _, anchor, tag) => (*anchor, tag.is_some()),
            Event::SequenceStart(anchor, tag) | Event::MappingStart(anchor, tag) => (*anchor, tag.is_some()),
            Event::Alias(_) => return refuse("an alias (`*`) is not read here"),
            _ => (0, false),
        };
        if anchor != 0 {
            return refuse("an anchor (`&`) is not read here");
        }
        if tag {
            return refuse("a tag (`!`) is not read here");
        }
        match event {
            Event::DocumentStart(_) if documents > 0 => return refuse("a second document begins here"),
            Event::DocumentStart(_) => documents += 1,
            Event::Scalar(_, style, ..) => {
                let (start, end) = (bytes.at(span.start.index()), bytes.at(span.end.index()));
                scalars
                    .push(Written { place, span: start..start + written_length(&text[start..end], style) });
            }
            other => depth = deeper(depth, &other, place).map_err(NotPlain::Fancy)?,
        }
    }
    Ok(scalars)
}

/// The length of the scalar at the start of a text. The parser's span may include the blanks and comments after it.
fn written_length(text: &str, style: ScalarStyle) -> usize {
    let quote = match style {
        ScalarStyle::SingleQuoted => '\'',
        ScalarStyle::DoubleQuoted => '"',
        _ => return text.trim_end().len(),
    };
    let mut inside = text.char_indices().skip(1).peekable();
    while let Some((at, c)) = inside.next() {
        let escaped = match quote {
            '"' => c == '\\',
            _ => c == quote && inside.peek().is_some_and(|(_, next)| *next == quote),
        };
        if escaped {
            inside.next();
        } else if c == quote {
            return at + 1;
        }
    }
    text.trim_end().len()
}

/// Loading is recursive, so too deep nesting is found before.
fn check_depth(text: &str) -> Result<(), At> {
    let mut depth = 0;
    for event in Parser::new_from_str(text) {
        let Ok((event, span)) = event else { return Ok(()) }; // loading meets it again, and says so
        depth = deeper(depth, &event, place_of(&span.start))?;
    }
    Ok(())
}

fn deeper(depth: usize, event: &Event<'_>, place: Place) -> Result<usize, At> {
    match event {
        Event::SequenceStart(..) | Event::MappingStart(..) if depth == MAX_DEPTH => {
            Err(At { place, message: "nested too deeply".to_owned() })
        }
        Event::SequenceStart(..) | Event::MappingStart(..) => Ok(depth + 1),
        Event::SequenceEnd | Event::MappingEnd => Ok(depth.saturating_sub(1)),
        _ => Ok(depth),
    }
}

/// Converts numbers of characters, asked for in growing order, to numbers of bytes.
struct Offsets<'a> {
    text: std::str::Chars<'a>,
    chars: usize,
    bytes: usize,
}

impl Offsets<'_> {
    fn new(text: &str, before: usize) -> Offsets<'_> {
        Offsets { text: text.chars(), chars: 0, bytes: before }
    }

    fn at(&mut self, chars: usize) -> usize {
        while self.chars < chars
            && let Some(next) = self.text.next()
        {
            self.chars += 1;
            self.bytes += next.len_utf8();
        }
        self.bytes
    }
}

fn place_of(marker: &Marker) -> Place {
    Place { line: marker.line(), column: marker.col() + 1 }
}

fn syntax(error: &ScanError) -> At {
    At { place: place_of(error.marker()), message: error.info().to_owned() }
}

fn convert(node: MarkedYaml<'_>, depth: usize) -> Result<Node, At> {
    let place = place_of(&node.span.start);
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

/// The entries of a mapping. Take the known keys; the remaining ones were not understood.
#[derive(Debug)]
pub struct Entries {
    /// Where the mapping starts.
    pub place: Place,
    entries: Vec<(Key, Node)>,
}

impl Entries {
    /// The value of `key`, which stays there.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entries.iter().find(|(k, _)| k.text == key).map(|(_, node)| node)
    }

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

    /// Every value that is left.
    pub fn values_mut(&mut self) -> impl Iterator<Item = (&Key, &mut Node)> {
        self.entries.iter_mut().map(|(key, node)| (&*key, node))
    }

    /// Adds an entry at the end.
    pub fn put(&mut self, key: Key, node: Node) {
        self.entries.push((key, node));
    }

    /// Gives keys other names; `Err` where two keys become one.
    pub fn rename(&mut self, name: impl Fn(&str) -> Option<&'static str>) -> Result<(), At> {
        let mut seen: Vec<&str> = Vec::new();
        for (key, _) in &mut self.entries {
            let Some(name) = name(&key.text) else { continue };
            if seen.contains(&name) {
                let message = format!("`{}` is the same key as `{name}`, which is there already", key.text);
                return Err(At { place: key.place, message });
            }
            seen.push(name);
            name.clone_into(&mut key.text);
        }
        Ok(())
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
        assert!(plain(&bomb).is_err());
        for deep in ["[", "{a: ", "- ", "? "] {
            let deep = deep.repeat(100_000);
            assert!(parse(&deep).is_err() && plain(&deep).is_err());
        }
    }

    #[test]
    fn test_spans_cover_what_was_written() {
        let text = "\u{feff}é: [a, 'ü b' , \"c\"]\r\nd:\r\n- -r x.txt  # why\r\n- 'e ''f' # g\r\n# h\r\n- \"i\\\"\" # j\r\n";
        let written: Vec<_> = plain(text).unwrap().into_iter().map(|scalar| &text[scalar.span]).collect();
        assert_eq!(written, ["é", "a", "'ü b'", "\"c\"", "d", "-r x.txt", "'e ''f'", "\"i\\\"\""]);
        let places: Vec<_> = plain(text).unwrap().into_iter().map(|scalar| scalar.place.line).collect();
        assert_eq!(places, [1, 1, 1, 1, 2, 3, 4, 6]);
    }

    #[test]
    fn test_plain_text_is_one_document_that_says_what_it_shows() {
        for (text, line) in
            [("a: 1\n---\nb: 2\n", 2), ("a: &x 1\n", 1), ("a:\n- !!str b\n", 2), ("--- !t a", 1)]
        {
            let Err(NotPlain::Fancy(at)) = plain(text) else { panic!("{text}") };
            assert_eq!(at.place.line, line, "{text}");
        }
        for text in ["", "---\na: 1\n...\n", "# only a comment\n", "{\"a\": [1]}"] {
            assert!(plain(text).is_ok(), "{text}");
        }
    }
}
