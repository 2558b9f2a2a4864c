//! The command line that a run configuration stands for.

use super::data::{Data, is_variable};
use super::environment::Software;
use super::launch::Launch;
use crate::section::{Mistakes, Rejection, Section, Warning};
use crate::yaml::{Place, Value};

/// The command of the job.
#[derive(Debug, Default)]
pub(super) struct Invocation {
    pub(super) line: String,
    /// A title, where the beginning of the line would be none.
    pub(super) title: String,
    /// The script and where it is named.
    pub(super) script: Option<(String, Place)>,
}

/// An argument that stands for the path of data.
const DATA_ARGUMENT: &str = "DatasetConsumptionConfig:";

/// Reads `script` and `arguments`, or `command`; `given` words take the place of all of them.
pub(super) fn command(
    top: &mut Section,
    given: &[String],
    launch: &Launch,
    software: &Software,
    data: &Data,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> Invocation {
    let starter = wrong.note(starter(top, launch, software, warnings));
    let said = wrong.note(read_words(top, given, warnings));
    let (line, title, script) = match said {
        Said::Line(line) => (line, None, None),
        Said::Script { words, place } => {
            let quoted = words.iter().map(|word| wrong.note(quote(word, data, place)));
            let words_of_line: Vec<String> = starter.into_iter().chain(quoted).collect();
            let script = words.into_iter().next().unwrap_or_default();
            (words_of_line.join(" "), Some(script.clone()), Some((script, place)))
        }
    };
    let exports =
        data.variables.iter().map(|(name, input)| format!("export {name}=\"${{{{inputs.{input}}}}}\"\n"));
    let exports: String = exports.collect();
    let title = if exports.is_empty() { None } else { title };
    Invocation { line: exports + &line, title: title.unwrap_or_default(), script }
}

/// What is to run.
enum Said {
    /// A line for a shell.
    Line(String),
    /// A script and its arguments.
    Script { words: Vec<String>, place: Place },
}

impl Default for Said {
    fn default() -> Said {
        Said::Line(String::new())
    }
}

fn read_words(top: &mut Section, given: &[String], warnings: &mut Vec<Warning>) -> Result<Said, Rejection> {
    let (start, place) = (top.place(), top.at("script"));
    let command = top.lines("command")?.map(|(words, at)| (words.join(" "), at));
    let command = command.filter(|(line, _)| !line.trim().is_empty());
    let script = top.text("script")?.filter(|script| !script.trim().is_empty());
    let is_one = top.at_node("arguments").is_some_and(|node| matches!(node.value, Value::Scalar(_)));
    let arguments = top.lines("arguments")?;
    if !given.is_empty() {
        return Ok(Said::Script { words: given.to_vec(), place: start });
    }
    if let (true, Some((words, at))) = (is_one, &arguments)
        && words.iter().any(|word| word.trim().contains(' '))
    {
        let message =
            "`arguments` is one text, which the script gets as one argument; write a list".to_owned();
        warnings.push(Warning::new(*at, message));
    }
    match (command, script) {
        (Some((_, at)), Some(_)) => {
            Err(Rejection::invalid(at, "there is a `command` and a `script`").fix("keep one of them"))
        }
        (Some((line, _)), None) => Ok(Said::Line(line)),
        (None, Some(script)) => {
            let arguments = arguments.map(|(words, _)| words).unwrap_or_default();
            Ok(Said::Script { words: std::iter::once(script).chain(arguments).collect(), place })
        }
        (None, None) => Err(Rejection::invalid(start, "there is neither a `script` nor a `command`")
            .fix("add the script that starts your training, for example `script: train.py`")),
    }
}

/// The words before the script.
fn starter(
    top: &mut Section,
    launch: &Launch,
    software: &Software,
    warnings: &mut Vec<Warning>,
) -> Result<Vec<String>, Rejection> {
    if !launch.spark {
        top.skip(&["spark"]);
        return Ok(vec![shell_word(&software.python)]);
    }
    let mut words = vec!["spark-submit".to_owned()];
    if let Some(mut section) = top.section("spark")? {
        for (name, value) in section.texts("configuration")? {
            words.extend(["--conf".to_owned(), shell_word(&format!("{name}={value}"))]);
        }
        section.finish(warnings);
    }
    words.extend(software.spark_words.iter().map(|word| shell_word(word)));
    Ok(words)
}

/// An argument as a word of a shell's line that becomes the same argument, with its variables replaced.
fn quote(word: &str, data: &Data, place: Place) -> Result<String, Rejection> {
    let Some(name) = word.strip_prefix(DATA_ARGUMENT) else { return Ok(shell_word(word)) };
    match data.names(name) {
        true => Ok(format!("\"${{{{inputs.{name}}}}}\"")),
        false => {
            Err(Rejection::invalid(place, format!("an argument is `{word}`, and `data` has no `{name}`"))
                .fix(format!("add `{name}` under `data`, or correct the argument")))
        }
    }
}

/// `$NAME` and `${NAME}` are replaced by a shell, and stay as they are where there is no such variable.
fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@%^".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    let mut quoted = String::from("\"");
    let mut rest = word;
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        let (text, next) = match c {
            '$' => variable(after),
            '"' | '\\' | '`' => (format!("\\{c}"), after),
            _ => (c.to_string(), after),
        };
        quoted.push_str(&text);
        rest = next;
    }
    quoted + "\""
}

/// What stands for a `$`, and what is left of the text after it.
fn variable(after: &str) -> (String, &str) {
    if after.starts_with("{{") {
        return ("$".to_owned(), after); // an expression of the job, which is replaced before a shell sees it
    }
    let braced = after.strip_prefix('{').and_then(|inside| inside.split_once('}'));
    let (name, written, rest) = match braced {
        Some((name, rest)) => (name, format!("\\${{{name}\\}}"), rest),
        None => {
            let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let end = after.find(|c| !letter(c)).unwrap_or(after.len());
            (&after[..end], format!("\\${}", &after[..end]), &after[end..])
        }
    };
    match is_variable(name) {
        true => (format!("${{{name}-{written}}}"), rest),
        false => ("\\$".to_owned(), after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_words_reach_the_script_as_they_are_written_but_for_variables() {
        for (word, line) in [
            ("train.py", "train.py"),
            ("0.5", "0.5"),
            ("", "\"\""),
            ("a b", "\"a b\""),
            ("$HOME", "\"${HOME-\\$HOME}\""),
            ("x/${DATA}/y", "\"x/${DATA-\\${DATA\\}}/y\""),
            ("5$", "\"5\\$\""),
            ("$(rm)", "\"\\$(rm)\""),
            ("`x` \"y\" \\", "\"\\`x\\` \\\"y\\\" \\\\\""),
            ("${{inputs.x}}", "\"${{inputs.x}}\""),
        ] {
            assert_eq!(shell_word(word), line, "{word}");
        }
    }
}
