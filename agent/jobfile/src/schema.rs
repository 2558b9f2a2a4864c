//! JSON Schemas of the job files, for editors. They are made from the tables that the readers use.
//!
//! Where a reader takes more than a schema can say in short (any case of a word), the schema says what is usual. What
//! is only warned of is `deprecated`.

use serde_json::{Map, Value, json};

use super::Dialect;
use super::keys::{Effect, Keys, Row, ValueKind, snake};

/// The schema of a dialect.
pub fn schema(dialect: Dialect) -> Value {
    let title = match dialect {
        Dialect::Job => "a command job",
        Dialect::Runconfig => "a run configuration",
    };
    let Value::Object(mut schema) = mapping(dialect.keys()) else { return Value::Null };
    schema.insert("$schema".to_owned(), json!("http://json-schema.org/draft-07/schema#"));
    schema.insert("title".to_owned(), json!(title));
    Value::Object(schema)
}

/// A mapping; a key without a value counts as absent everywhere.
fn mapping(keys: &Keys) -> Value {
    let mut properties = Map::new();
    for row in keys.rows {
        let schema = property(row);
        let other = snake(row.name);
        if keys.either_case && other != row.name {
            properties.insert(other, schema.clone());
        }
        properties.insert(row.name.to_owned(), schema);
    }
    json!({ "type": ["object", "null"], "properties": properties, "additionalProperties": false })
}

fn property(row: &Row) -> Value {
    let (mut schema, about) = match row.effect {
        Effect::Read => (value(row.kind), row.about.to_owned()),
        Effect::Ignored => (json!({}), String::new()),
        Effect::Unused { why, .. } => (json!({ "deprecated": true }), format!("has no effect: {why}")),
        Effect::Refused { usual, fix } => {
            let mut allowed = vec![Value::Null, json!([]), json!({})];
            allowed.extend(usual.iter().map(|usual| json!(usual)));
            (json!({ "enum": allowed }), format!("is not supported: {fix}"))
        }
    };
    if let (false, Value::Object(schema)) = (about.is_empty(), &mut schema) {
        schema.insert("description".to_owned(), json!(about));
    }
    schema
}

fn value(kind: ValueKind) -> Value {
    let text = || json!({ "type": ["string", "number", "boolean", "null"] });
    match kind {
        ValueKind::Text => text(),
        ValueKind::Flag => json!({ "enum": [true, false, "true", "false", "yes", "no", "on", "off", null] }),
        ValueKind::Whole => {
            json!({ "type": ["integer", "string", "null"], "minimum": 0, "pattern": "^[0-9]+$" })
        }
        ValueKind::Duration => {
            json!({ "type": ["integer", "string", "null"], "minimum": 0, "pattern": "^[0-9]+ *[smhd]?$" })
        }
        ValueKind::Size => {
            json!({ "type": ["integer", "string", "null"], "minimum": 0, "pattern": "^[0-9]+ *[kmgtKMGT]?(i?[bB])?$" })
        }
        // Editors offer the first; the reader takes any case.
        ValueKind::Word(words) => json!({ "anyOf": [
            { "enum": words.iter().copied().map(Value::from).chain([Value::Null]).collect::<Vec<_>>() },
            { "type": "string", "pattern": in_any_case(words) },
        ] }),
        ValueKind::Texts => json!({ "type": ["object", "null"], "additionalProperties": text() }),
        ValueKind::Lines => json!({ "anyOf": [text(), { "type": "array", "items": text() }] }),
        ValueKind::Mapping(keys) => mapping(keys),
        ValueKind::Named(kind) => json!({ "type": ["object", "null"], "additionalProperties": value(*kind) }),
        ValueKind::Either(kinds) => {
            json!({ "anyOf": kinds.iter().map(|kind| value(*kind)).collect::<Vec<_>>() })
        }
        ValueKind::Free => json!({}),
    }
}

/// A pattern for these words, as JSON Schema has none that ignores case.
fn in_any_case(words: &[&str]) -> String {
    let letter = |c: char| match c.is_ascii_alphabetic() {
        true => format!("[{}{}]", c.to_ascii_lowercase(), c.to_ascii_uppercase()),
        false => c.to_string(),
    };
    let words: Vec<String> = words.iter().map(|word| word.chars().map(letter).collect()).collect();
    format!("^({})$", words.join("|"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::yaml::{self, Node};

    /// Files of the shapes that people have.
    pub(crate) fn examples() -> [String; 4] {
        [
            include_str!("../../../tests/fixtures/runconfig/smallest.runconfig"),
            include_str!("../../../tests/fixtures/runconfig/whole.runconfig"),
            include_str!("../../../tests/fixtures/runconfig/data.runconfig"),
            include_str!("../../../tests/fixtures/runconfig/cluster.runconfig"),
        ]
        .map(str::to_owned)
    }

    /// The places of a document that its schema does not allow.
    pub(crate) fn checked(dialect: Dialect, text: &str) -> Vec<String> {
        let mut wrong = Vec::new();
        check(&plain(&yaml::parse(text).unwrap()), &schema(dialect), "", &mut wrong);
        wrong
    }

    /// The value as a parser of JSON sees it.
    fn plain(node: &Node) -> Value {
        match &node.value {
            yaml::Value::Null => Value::Null,
            yaml::Value::Scalar(text) => match serde_json::from_str(text) {
                Ok(value @ (Value::Bool(_) | Value::Number(_))) => value,
                _ => Value::from(text.as_str()),
            },
            yaml::Value::List(items) => items.iter().map(plain).collect(),
            yaml::Value::Map(entries) => {
                Value::Object(entries.iter().map(|(key, node)| (key.text.clone(), plain(node))).collect())
            }
        }
    }

    /// What the words of our schemas mean. Another word is a mistake of the test.
    fn check(value: &Value, schema: &Value, path: &str, wrong: &mut Vec<String>) {
        let mut add = |is: bool| wrong.extend((!is).then(|| path.to_owned()));
        for (word, says) in schema.as_object().into_iter().flatten() {
            match word.as_str() {
                "type" => add(is_of(value, says)),
                "enum" => add(says.as_array().unwrap().contains(value)),
                "minimum" => add(value.as_f64().is_none_or(|number| number >= says.as_f64().unwrap())),
                "anyOf" => {
                    let fits = |schema: &Value| {
                        let mut wrong = Vec::new();
                        check(value, schema, path, &mut wrong);
                        wrong.is_empty()
                    };
                    add(says.as_array().unwrap().iter().any(fits));
                }
                "items" | "properties" | "additionalProperties" => {}
                "pattern" if says.as_str().is_some_and(|says| says.starts_with("^(")) => {
                    add(is_word(value, says))
                }
                "$schema" | "title" | "description" | "deprecated" | "pattern" => {}
                other => panic!("`{other}`"),
            }
        }
        for item in value.as_array().into_iter().flatten() {
            check(item, &schema["items"], path, wrong);
        }
        for (key, below) in value.as_object().into_iter().flatten() {
            let path = format!("{path}/{key}");
            match (&schema["properties"][key], &schema["additionalProperties"]) {
                (Value::Null, Value::Bool(false)) => wrong.push(path),
                (Value::Null, Value::Null) => {}
                (Value::Null, all) => check(below, all, &path, wrong),
                (own, _) => check(below, own, &path, wrong),
            }
        }
    }

    /// Whether it matches a pattern of [`in_any_case`].
    fn is_word(value: &Value, pattern: &Value) -> bool {
        let words = pattern.as_str().unwrap().trim_start_matches("^(").trim_end_matches(")$");
        value
            .as_str()
            .is_none_or(|text| words.split('|').any(|word| in_any_case(&[text]) == format!("^({word})$")))
    }

    fn is_of(value: &Value, types: &Value) -> bool {
        let name = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_u64() || number.is_i64() => "integer",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let is = |of: &Value| of == name || (of == "number" && name == "integer");
        types.as_array().map_or_else(|| is(types), |types| types.iter().any(is))
    }

    #[test]
    fn test_the_schema_of_a_job_takes_what_the_reader_takes() {
        let page = include_str!("../../docs/job-file.md");
        let shown = page.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
        let more = "command: x\nenvironment: {image: ubuntu, conda_file: {dependencies: [a]}}\noutputs: {m: }\n\
                    distribution: {type: PyTorch}\nlimits: {timeout: 2h, on_disconnect: Hold}\n\
                    inputs: {a: 1, b: {type: integer, default: 3, min: 1}}\nresources: {docker_args: [--cpus, 2]}\n";
        for text in [shown, more, "command: x\nenvironment: host\n"] {
            assert_eq!(checked(Dialect::Job, text), [""; 0], "{text}");
        }
        let wrong = checked(
            Dialect::Job,
            "comand: x\nresources: {gpus: -1}\njobs: {a: {}}\nlimits: {grace: [1]}\ndistribution: {type: torch}\n",
        );
        let told: std::collections::BTreeSet<String> = wrong.into_iter().collect();
        let expected = ["/comand", "/distribution/type", "/jobs", "/limits/grace", "/resources/gpus"];
        assert_eq!(told.into_iter().collect::<Vec<_>>(), expected);
    }
}
