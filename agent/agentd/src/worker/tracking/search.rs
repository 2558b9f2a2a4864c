//! MLflow's search language, for runs, models, traces and the registry: comparisons joined by `and`, and orders.
//!
//! An expression that is not understood is refused with a message, never answered wrongly.

use std::cmp::Ordering;

use serde_json::Value;

use super::answer::{Integer, Refusal};

/// The kind of entity to search: JSON pointers to the parts that comparisons name.
#[derive(Clone, Copy)]
pub(super) struct Searched {
    /// The part with the attributes.
    pub(super) attributes: &'static str,
    pub(super) metrics: &'static str,
    pub(super) params: &'static str,
    pub(super) tags: &'static str,
    /// Other names of attributes; a pointer leads to one that is kept elsewhere.
    pub(super) aliases: &'static [(&'static str, &'static str)],
}

impl Searched {
    pub(super) const RUN: Searched = Searched {
        attributes: "/info",
        metrics: "/data/metrics",
        params: "/data/params",
        tags: "/data/tags",
        aliases: &[("created", "start_time"), ("Created", "start_time"), ("run name", "run_name")],
    };
    pub(super) const MODEL: Searched = Searched {
        attributes: "/info",
        metrics: "/data/metrics",
        params: "/data/params",
        tags: "/info/tags",
        aliases: &[
            ("creation_time", "creation_timestamp_ms"),
            ("creation_timestamp", "creation_timestamp_ms"),
            ("last_updated_timestamp", "last_updated_timestamp_ms"),
        ],
    };
    /// A trace; its metadata are used as parameters.
    pub(super) const TRACE: Searched = Searched {
        attributes: "",
        metrics: "/none",
        params: "/trace_metadata",
        tags: "/tags",
        aliases: &[
            ("timestamp_ms", "request_time"),
            ("timestamp", "request_time"),
            ("status", "state"),
            ("request_id", "trace_id"),
            ("run_id", "/trace_metadata/mlflow.sourceRun"),
            ("name", "/tags/mlflow.traceName"),
        ],
    };
    /// A registered model or a version of one.
    pub(super) const REGISTERED: Searched = Searched {
        attributes: "",
        metrics: "/none",
        params: "/none",
        tags: "/tags",
        aliases: &[("version_number", "version"), ("source_path", "source")],
    };

    fn value<'a>(&self, field: &Field, of: &'a Value) -> Option<&'a Value> {
        let list = match field.part {
            FieldPart::Metric => self.metrics,
            FieldPart::Param => self.params,
            FieldPart::Tag => self.tags,
            FieldPart::Attribute => {
                let alias = self.aliases.iter().find(|(name, _)| *name == field.key).map(|(_, key)| *key);
                return match alias {
                    Some(pointer) if pointer.starts_with('/') => of.pointer(pointer),
                    alias => of.pointer(self.attributes)?.get(alias.unwrap_or(&field.key)),
                };
            }
            FieldPart::Dataset => return None, // a run may have several: see `Condition::accepts`
        };
        match of.pointer(list)? {
            // If there are several values, the last one counts.
            Value::Array(all) => {
                all.iter().rev().find(|entry| entry["key"] == field.key.as_str()).map(|entry| &entry["value"])
            }
            map => map.get(&field.key),
        }
    }
}

/// The conditions that an entity must meet.
#[derive(Debug, PartialEq)]
pub(super) struct Filter(Vec<Condition>);

#[derive(Debug, PartialEq)]
struct Condition {
    field: Field,
    operator: Operator,
    values: Vec<String>,
}

/// What is compared: `metrics.loss`, `tags."mlflow.parentRunId"`, `attributes.status`, …
#[derive(Debug, PartialEq)]
struct Field {
    part: FieldPart,
    key: String,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum FieldPart {
    Attribute,
    Metric,
    Param,
    Tag,
    Dataset,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Like,
    LikeInAnyCase,
    In,
    NotIn,
    IsNull,
    IsNotNull,
}

impl Filter {
    pub(super) fn parse(text: &str) -> Result<Filter, Refusal> {
        let words = words(text).ok_or_else(|| not_understood(text))?;
        let (mut rest, mut conditions) = (words.as_slice(), Vec::new());
        while !rest.is_empty() {
            if !conditions.is_empty() {
                let [and, after @ ..] = rest else { break };
                if !and.eq_ignore_ascii_case("and") {
                    return Err(not_understood(text));
                }
                rest = after;
            }
            let condition;
            (condition, rest) = Condition::parse(rest).ok_or_else(|| not_understood(text))?;
            conditions.push(condition);
        }
        Ok(Filter(conditions))
    }

    pub(super) fn accepts(&self, subject: Searched, entity: &Value) -> bool {
        self.0.iter().all(|condition| condition.accepts(subject, entity))
    }
}

impl Condition {
    /// The condition at the start of `words`, and the words after it.
    fn parse(words: &[String]) -> Option<(Condition, &[String])> {
        let [field, rest @ ..] = words else { return None };
        let field = Field::parse(field)?;
        let (operator, rest) = Operator::parse(rest)?;
        let (values, rest) = if matches!(operator, Operator::In | Operator::NotIn) {
            list(rest)?
        } else if operator.is_of_presence() {
            (Vec::new(), rest)
        } else {
            let [value, rest @ ..] = rest else { return None };
            (vec![unquote(value)], rest)
        };
        let is_number = |value: &String| value.parse::<f64>().is_ok();
        let fits = match field.part {
            _ if operator.is_of_presence() => matches!(field.part, FieldPart::Tag | FieldPart::Param),
            FieldPart::Metric => operator.is_for_numbers() && values.iter().all(is_number),
            // As texts, 10 is less than 9.
            FieldPart::Param | FieldPart::Tag | FieldPart::Dataset => operator.is_for_texts(),
            FieldPart::Attribute => true,
        };
        fits.then_some((Condition { field, operator, values }, rest))
    }

    fn accepts(&self, subject: Searched, entity: &Value) -> bool {
        if self.field.part == FieldPart::Dataset {
            let inputs = entity["inputs"]["dataset_inputs"].as_array().into_iter().flatten();
            let named = |input: &Value| match self.field.key.as_str() {
                // A tag of the input holds what it was used for.
                "context" => {
                    let tags = input["tags"].as_array()?;
                    tags.iter()
                        .find(|tag| tag["key"] == "mlflow.data.context")
                        .map(|tag| tag["value"].clone())
                }
                key => input["dataset"].get(key).cloned(),
            };
            return inputs.filter_map(named).any(|found| self.holds(&found));
        }
        let found = subject.value(&self.field, entity);
        match self.operator {
            Operator::IsNull => found.is_none(),
            Operator::IsNotNull => found.is_some(),
            _ => found.is_some_and(|found| self.holds(found)),
        }
    }

    fn holds(&self, found: &Value) -> bool {
        let value = self.values.first().map(String::as_str).unwrap_or_default();
        let order = || match (number(found), value.parse::<f64>()) {
            (Some(found), Ok(wanted)) => found.partial_cmp(&wanted),
            _ => Some(text(found).as_str().cmp(value)),
        };
        match self.operator {
            Operator::Equal => order() == Some(Ordering::Equal),
            Operator::NotEqual => order() != Some(Ordering::Equal),
            Operator::Less => order() == Some(Ordering::Less),
            Operator::LessOrEqual => matches!(order(), Some(Ordering::Less | Ordering::Equal)),
            Operator::Greater => order() == Some(Ordering::Greater),
            Operator::GreaterOrEqual => matches!(order(), Some(Ordering::Greater | Ordering::Equal)),
            Operator::Like => is_like(&text(found), value),
            Operator::LikeInAnyCase => is_like(&text(found).to_lowercase(), &value.to_lowercase()),
            Operator::In => self.values.contains(&text(found)),
            Operator::NotIn => !self.values.contains(&text(found)),
            Operator::IsNull | Operator::IsNotNull => false, // a value says nothing of that
        }
    }
}

impl Field {
    fn parse(word: &str) -> Option<Field> {
        if word.starts_with(['\'', '"', '(', ')', ',']) {
            return None;
        }
        let (kind, key) = word.split_once('.').unwrap_or(("attributes", word));
        let part = match kind.to_ascii_lowercase().as_str() {
            "metric" | "metrics" => FieldPart::Metric,
            "param" | "params" | "parameter" | "parameters" | "metadata" | "request_metadata" => {
                FieldPart::Param
            }
            "tag" | "tags" => FieldPart::Tag,
            "attribute" | "attributes" | "attr" | "run" | "trace" => FieldPart::Attribute,
            "dataset" | "datasets" => FieldPart::Dataset,
            _ => return None,
        };
        let key = unquote(key);
        (part != FieldPart::Dataset || matches!(key.as_str(), "name" | "digest" | "context"))
            .then_some(Field { part, key })
    }
}

impl Operator {
    /// The operator at the start of `words`, and the words after it.
    fn parse(words: &[String]) -> Option<(Operator, &[String])> {
        let [word, rest @ ..] = words else { return None };
        let operator = match word.to_ascii_uppercase().as_str() {
            "=" | "==" => Operator::Equal,
            "!=" | "<>" => Operator::NotEqual,
            "<" => Operator::Less,
            "<=" => Operator::LessOrEqual,
            ">" => Operator::Greater,
            ">=" => Operator::GreaterOrEqual,
            "LIKE" => Operator::Like,
            "ILIKE" => Operator::LikeInAnyCase,
            "IN" => Operator::In,
            "NOT" if rest.first().is_some_and(|next| next.eq_ignore_ascii_case("in")) => {
                return Some((Operator::NotIn, &rest[1..]));
            }
            "IS" => {
                let is = |word: Option<&String>, other: &str| {
                    word.is_some_and(|word| word.eq_ignore_ascii_case(other))
                };
                return match rest {
                    [null, after @ ..] if is(Some(null), "null") => Some((Operator::IsNull, after)),
                    [not, null, after @ ..] if is(Some(not), "not") && is(Some(null), "null") => {
                        Some((Operator::IsNotNull, after))
                    }
                    _ => None,
                };
            }
            _ => return None,
        };
        Some((operator, rest))
    }

    fn is_of_presence(self) -> bool {
        matches!(self, Operator::IsNull | Operator::IsNotNull)
    }

    fn is_for_numbers(self) -> bool {
        !matches!(self, Operator::Like | Operator::LikeInAnyCase | Operator::In | Operator::NotIn)
    }

    fn is_for_texts(self) -> bool {
        !self.is_for_numbers() || matches!(self, Operator::Equal | Operator::NotEqual)
    }
}

/// A key to sort by.
pub(super) struct SortKey {
    field: Field,
    is_descending: bool,
}

impl SortKey {
    /// Reads `metrics.loss DESC` and the like.
    pub(super) fn parse(text: &str) -> Result<SortKey, Refusal> {
        let words = words(text).ok_or_else(|| not_understood(text))?;
        let (field, is_descending) = match words.as_slice() {
            [field] => (field, false),
            [field, to] if to.eq_ignore_ascii_case("asc") => (field, false),
            [field, to] if to.eq_ignore_ascii_case("desc") => (field, true),
            _ => return Err(not_understood(text)),
        };
        SortKey::of(field, is_descending)
    }

    pub(super) fn of(field: &str, is_descending: bool) -> Result<SortKey, Refusal> {
        Ok(SortKey { field: Field::parse(field).ok_or_else(|| not_understood(field))?, is_descending })
    }
}

/// Sorts by the first key, then by the second, …; in either direction those that are no number come behind all
/// numbers, and entities without a value last.
pub(super) fn sort(entities: &mut [Value], subject: Searched, keys: &[SortKey]) {
    for SortKey { field, is_descending } in keys.iter().rev() {
        let is_metric = field.part == FieldPart::Metric;
        entities.sort_by(|a, b| match (subject.value(field, a), subject.value(field, b)) {
            (Some(a), Some(b)) if is_metric && (is_nan(a) || is_nan(b)) => is_nan(a).cmp(&is_nan(b)),
            (Some(a), Some(b)) if *is_descending => compare(b, a),
            (Some(a), Some(b)) => compare(a, b),
            (a, b) => b.is_some().cmp(&a.is_some()),
        });
    }
}

/// One page of an answer, and the token of the next page; empty when there is none. `usual` is the default page size.
pub(super) fn page(
    found: Vec<Value>,
    token: &str,
    asked: Integer,
    usual: usize,
) -> Result<(Vec<Value>, String), Refusal> {
    let most = usize::try_from(asked.0).ok().filter(|most| *most > 0).unwrap_or(usual);
    let from: usize = match token {
        "" => 0,
        token => token.parse().map_err(|_| Refusal::invalid(format!("Invalid page token: `{token}`")))?,
    };
    let next = from.saturating_add(most);
    let token = if next < found.len() { next.to_string() } else { String::new() };
    Ok((found.into_iter().skip(from).take(most).collect(), token))
}

/// A number; those that JSON has not are texts.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| match value.as_str()? {
        "NaN" => Some(f64::NAN),
        "Infinity" => Some(f64::INFINITY),
        "-Infinity" => Some(f64::NEG_INFINITY),
        _ => None,
    })
}

fn is_nan(value: &Value) -> bool {
    number(value).is_some_and(f64::is_nan)
}

fn compare(a: &Value, b: &Value) -> Ordering {
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        _ => text(a).cmp(&text(b)),
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Whether a text matches a pattern: `%` stands for any characters, `_` for one.
fn is_like(text: &str, pattern: &str) -> bool {
    let (text, pattern): (Vec<char>, Vec<char>) = (text.chars().collect(), pattern.chars().collect());
    let (mut at, mut seen) = (0, 0);
    // The position of the last `%`, and the end of the text it matched.
    let mut any = None;
    while seen < text.len() {
        match pattern.get(at) {
            Some('%') => {
                any = Some((at, seen));
                at += 1;
            }
            Some(wanted) if *wanted == '_' || *wanted == text[seen] => (at, seen) = (at + 1, seen + 1),
            _ => {
                let Some((percent, taken)) = any else { return false };
                any = Some((percent, taken + 1));
                (at, seen) = (percent + 1, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|rest| *rest == '%')
}

/// The values of `('a', 'b')`, and the words after it.
fn list(words: &[String]) -> Option<(Vec<String>, &[String])> {
    let [open, rest @ ..] = words else { return None };
    let end = rest.iter().position(|word| word == ")")?;
    let (inside, rest) = rest.split_at(end);
    let values: Vec<&[String]> = inside.split(|word| word == ",").filter(|value| !value.is_empty()).collect();
    let is_list = open == "(" && !values.is_empty() && values.iter().all(|value| value.len() == 1);
    is_list.then(|| (values.iter().map(|value| unquote(&value[0])).collect(), &rest[1..]))
}

fn unquote(word: &str) -> String {
    let quotes = ['\'', '"', '`'];
    let quoted = quotes.iter().find_map(|quote| word.strip_prefix(*quote)?.strip_suffix(*quote));
    quoted.unwrap_or(word).to_owned()
}

/// Splits at blanks, around operators, parentheses and commas, but not within quotes; `None` when a quote does not
/// end.
fn words(text: &str) -> Option<Vec<String>> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for c in text.chars() {
        let is_operator = |c: char| matches!(c, '=' | '!' | '<' | '>');
        let last = words.last_mut()?;
        match quote {
            Some(open) => {
                last.push(c);
                quote = (c != open).then_some(open);
            }
            None if c.is_whitespace() => words.push(String::new()),
            None if matches!(c, '(' | ')' | ',') => words.extend([c.to_string(), String::new()]),
            None => {
                if matches!(c, '\'' | '"' | '`') {
                    quote = Some(c);
                }
                if last.is_empty() || last.ends_with(is_operator) == is_operator(c) {
                    last.push(c);
                } else {
                    words.push(c.to_string());
                }
            }
        }
    }
    words.retain(|word| !word.is_empty());
    quote.is_none().then_some(words)
}

fn not_understood(text: &str) -> Refusal {
    Refusal::invalid(format!(
        "`{text}` is not understood: inside a job, write comparisons such as `metrics.loss < 0.5`, \
         `tags.team = 'vision'`, `params.kind LIKE 'a%'` or `attributes.run_id IN ('a', 'b')`, joined by `and`"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(loss: f64, team: &str) -> Value {
        json!({
            "info": { "run_id": "r1", "status": "RUNNING", "start_time": loss },
            "data": {
                "metrics": [{ "key": "loss", "value": loss }],
                "params": [{ "key": "a b", "value": "7" }],
                "tags": [{ "key": "mlflow.team", "value": team }],
            },
            "inputs": { "dataset_inputs": [{
                "dataset": { "name": "iris", "digest": "d1" },
                "tags": [{ "key": "mlflow.data.context", "value": "train" }],
            }] },
        })
    }

    fn accepts(filter: &str) -> bool {
        Filter::parse(filter).unwrap().accepts(Searched::RUN, &run(0.5, "vision and more"))
    }

    #[test]
    fn test_conditions_are_joined() {
        for yes in [
            "",
            "metrics.loss < 0.6",
            "metrics.loss<=0.5 and tags.mlflow.team = 'vision and more'",
            "tags.`mlflow.team`!='x' AND params.\"a b\" = '7'",
            "attributes.status = 'RUNNING'",
            "status = 'RUNNING'",
            "run_id IN ('r0','r1') and attributes.run_id not in ( 'r2' )",
            "tags.mlflow.team LIKE 'vision%' and tags.mlflow.team like '%and_more'",
            "tags.mlflow.team ILIKE 'VISION%MORE'",
            "dataset.name = 'iris' and datasets.context IN ('train')",
        ] {
            assert!(accepts(yes), "{yes}");
        }
        for no in [
            "metrics.loss > 0.5",
            "metrics.acc = 1",
            "metrics.loss < 0.6 and tags.x = 'y'",
            "tags.mlflow.team LIKE 'VISION%'",
            "tags.mlflow.team LIKE 'vision'",
            "run_id NOT IN ('r1')",
            "dataset.name = 'boston'",
        ] {
            assert!(!accepts(no), "{no}");
        }
        for bad in [
            "metrics.loss",
            "metrics.loss ~ 1",
            "metrics.loss = 'much'",
            "metrics.loss LIKE '1'",
            "params.`a b` > '10'",
            "x.y = 1",
            "a = 'b",
            "a = 1 or b = 2",
            "a = 1 b = 2",
            "a IN 'b'",
            "a IN ()",
            "a IN ('b'",
            "dataset.profile = 'x'",
        ] {
            assert!(Filter::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn test_patterns() {
        for (text, pattern, is) in [
            ("", "", true),
            ("", "%", true),
            ("abcabd", "a%abd", true),
            ("abcabd", "%b_", true),
            ("abc", "a_", false),
            ("a%c", "a%c", true),
            ("äß", "__", true),
        ] {
            assert_eq!(is_like(text, pattern), is, "{text} {pattern}");
        }
    }

    #[test]
    fn test_runs_are_sorted_and_those_without_a_value_come_last() {
        let mut runs = vec![json!({ "info": {}, "data": {} }), run(2.0, "a"), run(1.0, "a"), run(3.0, "b")];
        let losses =
            |runs: &[Value]| runs.iter().map(|run| run["info"]["start_time"].as_f64()).collect::<Vec<_>>();
        let keys = ["tags.mlflow.team DESC", "metrics.loss ASC"].map(|key| SortKey::parse(key).unwrap());
        sort(&mut runs, Searched::RUN, &keys);
        assert_eq!(losses(&runs), [Some(3.0), Some(1.0), Some(2.0), None]);
        let nan = json!({ "info": {}, "data": { "metrics": [{ "key": "loss", "value": "NaN" }] } });
        let great = json!({ "info": {}, "data": { "metrics": [{ "key": "loss", "value": "Infinity" }] } });
        for (direction, first) in [("DESC", "Infinity"), ("ASC", "1.0")] {
            let mut runs = vec![nan.clone(), run(1.0, "a"), great.clone(), run(2.0, "a")];
            sort(&mut runs, Searched::RUN, &[SortKey::parse(&format!("metrics.loss {direction}")).unwrap()]);
            let values = |n: usize| text(&runs[n]["data"]["metrics"][0]["value"]);
            assert_eq!((values(0).as_str(), values(3).as_str()), (first, "NaN"), "{direction}");
        }
        assert!(SortKey::parse("nonsense of a kind").is_err() && SortKey::parse("metrics.a up").is_err());
    }

    #[test]
    fn test_pages() {
        let all: Vec<Value> = (0..5).map(|n| json!(n)).collect();
        let page = |token: &str, most, usual| page(all.clone(), token, Integer(most), usual).unwrap();
        assert_eq!(page("", 2, 9), (vec![json!(0), json!(1)], "2".to_owned()));
        assert_eq!(page("4", 2, 9), (vec![json!(4)], String::new()));
        assert_eq!(page("9", 2, 9), (vec![], String::new()));
        assert_eq!(page("", 0, 4).1, "4", "the usual number");
        assert!(super::page(all, "garbage", Integer(2), 9).is_err());
    }
}
