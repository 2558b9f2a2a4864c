//! The keys of a mapping, as a table: the one list from which a document is read, its JSON Schema is made, and its
//! reference page is checked.
//!
//! Invariant: a reader asks only for keys of its table, and in the way the table says ([`super::Section`] asserts both
//! in debug builds).

/// What a value is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ValueKind {
    /// A plain value.
    Text,
    /// `true` or `false`.
    Flag,
    /// A whole number, not negative.
    Whole,
    /// A length of time.
    Duration,
    /// A number of bytes.
    Size,
    /// One of these words, in any case.
    Word(&'static [&'static str]),
    /// Names that the user chooses, each with a plain value.
    Texts,
    /// A plain value, or a list of plain values.
    Lines,
    /// A mapping with these keys.
    Mapping(&'static Keys),
    /// Names that the user chooses, each with such a value.
    Named(&'static ValueKind),
    /// A value of one of these kinds.
    Either(&'static [ValueKind]),
    /// Anything; who reads it has rules of its own.
    Free,
}

/// What becomes of a key.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Effect {
    /// It is read.
    Read,
    /// It is understood, and nothing follows from it.
    Ignored,
    /// Nothing follows from it, and a reader might count on it: a warning that says why.
    Unused {
        /// Values that nobody needs to be warned of: what the old tools wrote into every file.
        usual: &'static [&'static str],
        /// Why nothing follows from it, or what to do instead.
        why: &'static str,
    },
    /// The document is refused.
    Refused {
        /// Values that are not refused: what the old tools wrote into every file.
        usual: &'static [&'static str],
        /// What to do instead.
        fix: &'static str,
    },
}

/// A key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) kind: ValueKind,
    pub(crate) effect: Effect,
    /// What it means, for the schema and the reference; empty where a page of its own says it.
    pub(crate) about: &'static str,
}

impl Row {
    const fn new(name: &'static str, kind: ValueKind, effect: Effect) -> Row {
        Row { name, kind, effect, about: "" }
    }

    /// The same key with its meaning.
    pub(crate) const fn about(self, about: &'static str) -> Row {
        Row { about, ..self }
    }
}

/// A key that is read.
pub(crate) const fn read(name: &'static str, kind: ValueKind) -> Row {
    Row::new(name, kind, Effect::Read)
}

/// A key from which nothing follows.
pub(crate) const fn ignored(name: &'static str) -> Row {
    Row::new(name, ValueKind::Free, Effect::Ignored)
}

/// A key from which nothing follows, with the reason.
pub(crate) const fn unused(name: &'static str, usual: &'static [&'static str], why: &'static str) -> Row {
    Row::new(name, ValueKind::Free, Effect::Unused { usual, why })
}

/// A key that is refused, with what to do instead.
pub(crate) const fn refused(name: &'static str, usual: &'static [&'static str], fix: &'static str) -> Row {
    Row::new(name, ValueKind::Free, Effect::Refused { usual, fix })
}

/// The keys of a mapping.
#[derive(Debug)]
pub(crate) struct Keys {
    pub(crate) rows: &'static [Row],
    /// `nodeCount` may be written `node_count` as well.
    pub(crate) either_case: bool,
}

impl Keys {
    /// Of a mapping whose names the user chooses.
    pub(crate) const CHOSEN: &'static Keys = &Keys::exact(&[]);

    /// Keys that are written in one way.
    pub(crate) const fn exact(rows: &'static [Row]) -> Keys {
        Keys { rows, either_case: false }
    }

    /// Keys that may be written in camelCase and in snake_case.
    pub(crate) const fn either_case(rows: &'static [Row]) -> Keys {
        Keys { rows, either_case: true }
    }

    /// The key that is written so.
    pub(crate) fn find(&self, written: &str) -> Option<&'static Row> {
        let exact = self.rows.iter().find(|row| row.name == written);
        exact.or_else(|| {
            let lower = self.either_case && written.starts_with(|first: char| first.is_ascii_lowercase());
            self.rows.iter().find(|row| lower && fold(row.name) == fold(written))
        })
    }

    /// Every key and those below it, with its path; an alternative is a key of its own.
    #[cfg(test)]
    pub(crate) fn walk(&self, path: &str, visit: &mut impl FnMut(&str, &'static Row)) {
        for row in self.rows {
            let name = if path.is_empty() { row.name.to_owned() } else { format!("{path}.{}", row.name) };
            visit(&name, row);
            row.kind.walk(&name, visit);
        }
    }
}

impl ValueKind {
    #[cfg(test)]
    fn walk(self, path: &str, visit: &mut impl FnMut(&str, &'static Row)) {
        match self {
            ValueKind::Mapping(keys) => keys.walk(path, visit),
            ValueKind::Named(kind) => kind.walk(&format!("{path}.NAME"), visit),
            ValueKind::Either(kinds) => kinds.iter().for_each(|kind| kind.walk(path, visit)),
            _ => {}
        }
    }

    /// The table of such a mapping.
    pub(crate) fn keys(self) -> &'static Keys {
        match self {
            ValueKind::Mapping(keys) => keys,
            ValueKind::Either(kinds) => {
                let mappings = kinds.iter().filter(|kind| matches!(kind, ValueKind::Mapping(_)));
                mappings.map(|kind| kind.keys()).next().unwrap_or(Keys::CHOSEN)
            }
            ValueKind::Named(kind) => kind.keys(),
            _ => Keys::CHOSEN,
        }
    }
}

/// The same text for `nodeCount`, `node_count` and `nodecount`.
fn fold(name: &str) -> String {
    name.chars().filter(|c| *c != '_').map(|c| c.to_ascii_lowercase()).collect()
}

/// `node_count` for `nodeCount`.
pub(crate) fn snake(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;

    static CAMEL: Keys = Keys::either_case(&[ignored("nodeCount"), ignored("amlcompute")]);

    #[test]
    fn test_either_case_finds_both_spellings_and_nothing_else() {
        for written in ["nodeCount", "node_count", "amlcompute", "amlCompute", "aml_compute"] {
            assert!(CAMEL.find(written).is_some(), "{written}");
        }
        for written in ["NodeCount", "node-count", "nodes", ""] {
            assert!(CAMEL.find(written).is_none(), "{written}");
        }
        static EXACT: Keys = Keys::exact(&[ignored("node_count")]);
        assert!(EXACT.find("node_count").is_some() && EXACT.find("nodeCount").is_none());
        assert_eq!(
            (snake("pathOnDataStore"), snake("script")),
            ("path_on_data_store".into(), "script".into())
        );
    }
}
