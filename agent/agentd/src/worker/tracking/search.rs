//! The part of MLflow's search language that scripts use on their own runs: comparisons joined by `and`.
//!
//! What is not understood is refused with words, never answered wrongly.

use std::cmp::Ordering;

use serde_json::Value;

use super::answer::Refusal;

/// Which runs are wanted.
#[derive(Debug, PartialEq)]
pub(super) struct Filter(Vec<Condition>);

#[derive(Debug, PartialEq)]
struct Condition {
    field: Field,
    operator: Operator,
    value: String,
}

/// What is compared: `metrics.loss`, `tags."mlflow.parentRunId"`, `attributes.status`, …
#[derive(Debug, PartialEq)]
struct Field {
    /// The list below `data` that holds it; an attribute when absent.
    list: Option<&'static str>,
    key: String,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Filter {
    pub(super) fn parse(text: &str) -> Result<Filter, Refusal> {
        let mut words = words(text).ok_or_else(|| not_understood(text))?.into_iter().peekable();
        let mut conditions = Vec::new();
        while words.peek().is_some() {
            if !conditions.is_empty() && !words.next().is_some_and(|word| word.eq_ignore_ascii_case("and")) {
                return Err(not_understood(text));
            }
            let condition = (|| {
                let field = Field::parse(&words.next()?)?;
                Some(Condition {
                    field,
                    operator: Operator::parse(&words.next()?)?,
                    value: unquote(&words.next()?),
                })
            })();
            conditions.push(condition.ok_or_else(|| not_understood(text))?);
        }
        Ok(Filter(conditions))
    }

    pub(super) fn accepts(&self, run: &Value) -> bool {
        self.0.iter().all(|condition| condition.accepts(run))
    }
}

impl Condition {
    fn accepts(&self, run: &Value) -> bool {
        let Some(found) = self.field.of(run) else { return false };
        let order = match (number(found), self.value.parse::<f64>()) {
            (Some(found), Ok(wanted)) => found.partial_cmp(&wanted),
            _ => Some(text(found).as_str().cmp(&self.value)),
        };
        match self.operator {
            Operator::Equal => order == Some(Ordering::Equal),
            Operator::NotEqual => order != Some(Ordering::Equal),
            Operator::Less => order == Some(Ordering::Less),
            Operator::LessOrEqual => matches!(order, Some(Ordering::Less | Ordering::Equal)),
            Operator::Greater => order == Some(Ordering::Greater),
            Operator::GreaterOrEqual => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
        }
    }
}

impl Field {
    fn parse(word: &str) -> Option<Field> {
        let (kind, key) = word.split_once('.').unwrap_or(("attributes", word));
        let list = match kind.to_ascii_lowercase().as_str() {
            "metric" | "metrics" => Some("metrics"),
            "param" | "params" | "parameter" | "parameters" => Some("params"),
            "tag" | "tags" => Some("tags"),
            "attribute" | "attributes" | "attr" | "run" => None,
            _ => return None,
        };
        let key = unquote(key);
        Some(Field {
            list,
            key: if list.is_none() && key == "created" { "start_time".to_owned() } else { key },
        })
    }

    fn of<'a>(&self, run: &'a Value) -> Option<&'a Value> {
        let Some(list) = self.list else { return run["info"].get(&self.key) };
        let all = run["data"][list].as_array()?;
        all.iter().find(|entry| entry["key"] == self.key.as_str()).map(|entry| &entry["value"])
    }
}

impl Operator {
    fn parse(word: &str) -> Option<Operator> {
        Some(match word {
            "=" | "==" => Operator::Equal,
            "!=" => Operator::NotEqual,
            "<" => Operator::Less,
            "<=" => Operator::LessOrEqual,
            ">" => Operator::Greater,
            ">=" => Operator::GreaterOrEqual,
            _ => return None,
        })
    }
}

/// Sorts by `metrics.loss DESC` and the like; runs without the value come last.
pub(super) fn sort(runs: &mut [Value], order_by: &[String]) -> Result<(), Refusal> {
    for order in order_by.iter().rev() {
        let words = words(order).ok_or_else(|| not_understood(order))?;
        let (field, direction) = match words.as_slice() {
            [field] => (field, "asc".to_owned()),
            [field, direction] => (field, direction.to_ascii_lowercase()),
            _ => return Err(not_understood(order)),
        };
        let field = Field::parse(field).ok_or_else(|| not_understood(order))?;
        runs.sort_by(|a, b| match (field.of(a), field.of(b)) {
            (Some(a), Some(b)) if direction == "desc" => compare(b, a),
            (Some(a), Some(b)) => compare(a, b),
            (a, b) => b.is_some().cmp(&a.is_some()),
        });
    }
    Ok(())
}

fn compare(a: &Value, b: &Value) -> Ordering {
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        _ => text(a).cmp(&text(b)),
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn unquote(word: &str) -> String {
    let quotes = ['\'', '"', '`'];
    let quoted = quotes.iter().find_map(|quote| word.strip_prefix(*quote)?.strip_suffix(*quote));
    quoted.unwrap_or(word).to_owned()
}

/// Splits at blanks and around operators, but not within quotes; `None` when a quote does not end.
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
        "`{text}` is not understood: inside a job, write comparisons such as `metrics.loss < 0.5` or \
         `tags.team = 'vision'`, joined by `and`"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(loss: f64, team: &str) -> Value {
        json!({
            "info": { "status": "RUNNING", "start_time": loss },
            "data": {
                "metrics": [{ "key": "loss", "value": loss }],
                "params": [{ "key": "a b", "value": "7" }],
                "tags": [{ "key": "mlflow.team", "value": team }],
            },
        })
    }

    fn accepts(filter: &str) -> bool {
        Filter::parse(filter).unwrap().accepts(&run(0.5, "vision and more"))
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
        ] {
            assert!(accepts(yes), "{yes}");
        }
        for no in ["metrics.loss > 0.5", "metrics.acc = 1", "metrics.loss < 0.6 and tags.x = 'y'"] {
            assert!(!accepts(no), "{no}");
        }
        for bad in ["metrics.loss", "metrics.loss ~ 1", "x.y = 1", "a = 'b", "a = 1 or b = 2", "a = 1 b = 2"]
        {
            assert!(Filter::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn test_runs_are_sorted_and_those_without_a_value_come_last() {
        let mut runs = vec![json!({ "info": {}, "data": {} }), run(2.0, "a"), run(1.0, "a"), run(3.0, "b")];
        let losses =
            |runs: &[Value]| runs.iter().map(|run| run["info"]["start_time"].as_f64()).collect::<Vec<_>>();
        sort(&mut runs, &["tags.mlflow.team DESC".into(), "metrics.loss ASC".into()]).unwrap();
        assert_eq!(losses(&runs), [Some(3.0), Some(1.0), Some(2.0), None]);
        assert!(sort(&mut runs, &["nonsense of a kind".into()]).is_err());
    }
}
