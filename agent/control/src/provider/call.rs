//! One call of a provider's program: started, told, listened to, ended, and what its answer says, in which everything
//! may be wrong.
//!
//! Owns its environment, which has nothing of the daemon's, and what is kept of its words. A program that does not end
//! in time, or says too much, is killed with its process group; one that ended has its process group killed, too, so
//! that what it left behind holds neither its output nor anything else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use agent_command::{Command, CommandError};
use agent_model::{NodeId, causes};
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::Notify;

use super::{Machine, MachineState, Provider, ProviderError};

/// The most output that is kept, in bytes; whoever writes more is killed.
pub(crate) const MOST: usize = 1 << 20;
/// How much of the end of standard error is kept, in bytes, and how much of that is shown, in lines and characters.
const TAIL: usize = 16 << 10;
const SHOWN_LINES: usize = 3;
const SHOWN: usize = 500;

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Provider {
    /// Runs the program with a verb and a document. `secret` is blanked in all that it says.
    pub(crate) async fn ask(
        &self,
        verb: &str,
        document: &Value,
        deadline: Duration,
        secret: Option<&str>,
    ) -> Result<ProviderAnswer, ProviderError> {
        make_private(&self.dir)
            .map_err(|error| self.not_there(format!("{}: {error}", self.dir.display())))?;
        let command = Command::new(&self.program)
            .arg(verb)
            .envs(self.environment())
            .cwd(&self.dir)
            .stall(deadline * 2) // the deadline below is what counts
            .input(document.to_string());
        let (mut output, mut error, too_much) = (Vec::new(), Vec::new(), Notify::new());
        let run = command.talk(
            |bytes| match output.len() + bytes.len() > MOST {
                true => too_much.notify_one(),
                false => output.extend_from_slice(bytes),
            },
            |bytes| keep_end(&mut error, bytes),
        );
        let ended = tokio::select! {
            ended = tokio::time::timeout(deadline, run) => ended,
            () = too_much.notified() => {
                let said = shown(&error, secret);
                return Err(self.odd(format!("it is longer than {MOST} bytes"), said));
            }
        };
        let (provider, said) = (self.name.clone(), shown(&error, secret));
        let status = match ended {
            Ok(Ok(status)) => status,
            Ok(Err(CommandError::Spawn { source, .. })) => return Err(self.not_there(source.to_string())),
            Ok(Err(error)) => {
                return Err(ProviderError::Temporary { provider, said: causes::tell(&error) });
            }
            Err(_) => return Err(ProviderError::Late { provider, after: deadline, said }),
        };
        answer_of(&output, status, said).map_err(|refusal| match refusal {
            AnswerError::Quota(said) => ProviderError::Quota { provider, said: blank(&said, secret) },
            AnswerError::Temporary(said) => ProviderError::Temporary { provider, said: blank(&said, secret) },
            AnswerError::Permanent(said) => ProviderError::Permanent { provider, said: blank(&said, secret) },
            AnswerError::NotUnderstood { what, said } => self.odd(blank(&what, secret), said),
        })
    }

    fn environment(&self) -> BTreeMap<String, String> {
        let home = self.dir.display().to_string();
        let usual = [("PATH", PATH), ("LANG", "C.UTF-8"), ("HOME", home.as_str())];
        let mut all: BTreeMap<String, String> =
            usual.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        all.extend(self.config.environment.clone());
        all
    }

    fn not_there(&self, why: String) -> ProviderError {
        ProviderError::NotThere { provider: self.name.clone(), program: self.program.clone(), why }
    }
}

fn make_private(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Adds to what is kept of a long text: its end.
fn keep_end(kept: &mut Vec<u8>, bytes: &[u8]) {
    kept.extend_from_slice(bytes);
    if kept.len() > 2 * TAIL {
        kept.drain(..kept.len() - TAIL);
    }
}

/// The last lines of what a program wrote for people, on one line, without the secret.
fn shown(error: &[u8], secret: Option<&str>) -> String {
    let text = String::from_utf8_lossy(&error[error.len().saturating_sub(TAIL)..]).into_owned();
    let lines: Vec<String> = text.lines().map(plain).filter(|line| !line.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(SHOWN_LINES)..].join(" | ");
    shorter(&blank(&last, secret))
}

/// A line without the codes of terminals and other control characters.
pub(crate) fn plain(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            // A code of a terminal goes to its first letter.
            '\u{1b}' => drop(chars.find(char::is_ascii_alphabetic)),
            '\t' => text.push(' '),
            c if c.is_control() => {}
            c => text.push(c),
        }
    }
    text.trim().to_owned()
}

/// The end of a long text.
pub(crate) fn shorter(text: &str) -> String {
    let length = text.chars().count();
    if length <= SHOWN {
        return text.to_owned();
    }
    let end: String = text.chars().skip(length - SHOWN).collect();
    format!("...{end}")
}

fn blank(text: &str, secret: Option<&str>) -> String {
    match secret.filter(|secret| !secret.is_empty()) {
        Some(secret) => text.replace(secret, "***"),
        None => text.to_owned(),
    }
}

/// The longest id, in bytes, and the most machines of a list.
const LONGEST_ID: usize = 256;
const MOST_MACHINES: usize = 10_000;

/// An object that a program answered with, which ended well, and its words.
#[derive(Debug)]
pub(crate) struct ProviderAnswer {
    object: Value,
    pub(crate) said: String,
}

/// Why an answer is none.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AnswerError {
    Quota(String),
    Temporary(String),
    Permanent(String),
    NotUnderstood { what: String, said: String },
}

/// The error that a program may answer with.
#[derive(Deserialize)]
struct ToldError {
    kind: String,
    message: String,
}

/// A machine as a program writes it.
#[derive(Deserialize)]
struct Listed {
    id: Value,
    request: Option<String>,
    name: Option<String>,
    state: MachineState,
}

/// Understands what a program wrote to standard output. `said` are its words on standard error.
pub(crate) fn answer_of(
    output: &[u8],
    status: ExitStatus,
    said: String,
) -> Result<ProviderAnswer, AnswerError> {
    let object = serde_json::from_slice::<Value>(output);
    let error = object.as_ref().ok().and_then(|object| object.get("error"));
    if let Some(error) = error.filter(|error| !error.is_null()) {
        return Err(refusal(error, said));
    }
    if !status.success() {
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "it ended in no known way".to_owned(),
        };
        return Err(AnswerError::Temporary(if said.is_empty() { how } else { format!("{said} ({how})") }));
    }
    let not = |what: String| Err(AnswerError::NotUnderstood { what, said: said.clone() });
    match object {
        Ok(object @ Value::Object(_)) => Ok(ProviderAnswer { object, said }),
        Ok(other) => not(format!("it is {}, not an object", kind(&other))),
        Err(_) if output.trim_ascii().is_empty() => not("it is empty".to_owned()),
        Err(error) => not(format!("it is no JSON: {error}: {}", begin(output))),
    }
}

/// The error that a program told itself.
fn refusal(error: &Value, said: String) -> AnswerError {
    let Ok(ToldError { kind, message }) = ToldError::deserialize(error) else {
        let what = format!("its error has no `kind` and `message`: {}", begin(error.to_string().as_bytes()));
        return AnswerError::NotUnderstood { what, said };
    };
    let message = shorter(&plain(&message.replace('\n', " | ")));
    match kind.as_str() {
        "quota" => AnswerError::Quota(message),
        "temporary" => AnswerError::Temporary(message),
        "permanent" => AnswerError::Permanent(message),
        _ => AnswerError::NotUnderstood {
            what: format!("there is no error of the kind `{}`: {message}", begin(kind.as_bytes())),
            said,
        },
    }
}

impl ProviderAnswer {
    /// The machine that was made.
    pub(crate) fn id(&self) -> Result<String, String> {
        match self.object.get("id") {
            Some(id) => id_of(id),
            None => Err("it has no `id`".to_owned()),
        }
    }

    /// All machines, or none where anything of them is wrong: who believed a part would take the others for gone.
    pub(crate) fn machines(&self) -> Result<Vec<Machine>, String> {
        let Some(listed) = self.object.get("machines").and_then(Value::as_array) else {
            return Err("it has no list of `machines`".to_owned());
        };
        if listed.len() > MOST_MACHINES {
            return Err(format!("it has {} machines, at most {MOST_MACHINES} are taken", listed.len()));
        }
        let mut ids = BTreeSet::new();
        let one = |(index, value): (usize, &Value)| {
            let machine = machine(value).map_err(|what| format!("machine {}: {what}", index + 1))?;
            match ids.insert(machine.id.clone()) {
                true => Ok(machine),
                false => Err(format!("machine {}: the id `{}` was there before", index + 1, machine.id)),
            }
        };
        listed.iter().enumerate().map(one).collect()
    }
}

fn machine(value: &Value) -> Result<Machine, String> {
    let listed = Listed::deserialize(value).map_err(|error| error.to_string())?;
    // Whoever makes a machine by hand has neither, and says so with nothing or with an empty text.
    let word = |text: Option<String>, what: &str| {
        let text = text.filter(|text| !text.is_empty());
        text.map(|text| text.parse::<NodeId>().map_err(|error| format!("its {what}: {}", error.rule)))
            .transpose()
    };
    Ok(Machine {
        id: id_of(&listed.id)?,
        request: word(listed.request, "request")?.map(String::from),
        name: word(listed.name, "name")?,
        state: listed.state,
    })
}

/// An id, also one that is a number.
fn id_of(value: &Value) -> Result<String, String> {
    match value {
        Value::String(id) => checked_id(id),
        Value::Number(number) => checked_id(&number.to_string()),
        other => Err(format!("the id is {}", kind(other))),
    }
}

/// An id as it may be: what it holds is shown to people and handed to programs.
pub(crate) fn checked_id(id: &str) -> Result<String, String> {
    let is_good = (1..=LONGEST_ID).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    let rule = || format!("the id `{}` is not 1 to {LONGEST_ID} printable characters", begin(id.as_bytes()));
    // A program could take it for an option.
    if is_good && !id.starts_with('-') { Ok(id.to_owned()) } else { Err(rule()) }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The beginning of something odd, to be shown.
fn begin(bytes: &[u8]) -> String {
    let text = plain(&String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).replace('\n', " "));
    let begin: String = text.chars().take(80).collect();
    if begin.len() < text.len() { format!("{begin}...") } else { begin }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_words_are_short_plain_and_without_the_secret() {
        assert_eq!(shown(b"a\nb\n\n\x1b[31mc\x1b[0m\r\nd\te\n", None), "b | c | d e");
        assert_eq!(shown(b"+ join tok-1 now\n", Some("tok-1")), "+ join *** now");
        assert_eq!(shown(b"\xff\n", None), "\u{fffd}");
        let long = format!("{}end", "x".repeat(9000));
        let said = shown(long.as_bytes(), None);
        assert!(said.len() == SHOWN + 3 && said.starts_with("...x") && said.ends_with("end"));
    }

    #[test]
    fn test_the_end_of_a_long_text_is_kept() {
        let mut kept = Vec::new();
        for number in 0..20_000 {
            keep_end(&mut kept, format!("{number}\n").as_bytes());
        }
        assert!(kept.len() <= 2 * TAIL);
        assert_eq!(shown(&kept, None), "19997 | 19998 | 19999");
    }

    fn answer(output: &str) -> Result<ProviderAnswer, AnswerError> {
        answer_of(output.as_bytes(), ExitStatus::from_raw(0), "words".to_owned())
    }

    fn odd(output: &str) -> String {
        match answer(output) {
            Err(AnswerError::NotUnderstood { what, said }) if said == "words" => what,
            other => panic!("{output}: {other:?}"),
        }
    }

    #[test]
    fn test_only_an_object_is_an_answer() {
        for (output, what) in [
            ("", "it is empty"),
            ("null", "it is nothing, not an object"),
            ("[]", "it is a list, not an object"),
            ("{} {}", "it is no JSON: trailing characters"),
            ("{\"id\": \"a\"", "it is no JSON: EOF"),
            ("ready\u{7}\n", "it is no JSON: expected value at line 1 column 1: ready"),
            (
                "{\"error\": {\"kind\": \"odd\", \"message\": \"m\"}}",
                "there is no error of the kind `odd`: m",
            ),
            ("{\"error\": \"m\"}", "its error has no `kind` and `message`: \"m\""),
        ] {
            assert!(odd(output).starts_with(what), "{output}: {}", odd(output));
        }
        answer("{\"error\": null, \"later\": 1}").unwrap();
    }

    #[test]
    fn test_an_error_is_believed_whatever_the_exit_status_is() {
        for status in [0, 256] {
            for (kind, due) in [
                ("quota", AnswerError::Quota("a | b".to_owned())),
                ("temporary", AnswerError::Temporary("a | b".to_owned())),
                ("permanent", AnswerError::Permanent("a | b".to_owned())),
            ] {
                let output = format!("{{\"error\": {{\"kind\": \"{kind}\", \"message\": \"a\\nb\"}}}}");
                let found = answer_of(output.as_bytes(), ExitStatus::from_raw(status), String::new());
                assert_eq!(found.unwrap_err(), due);
            }
        }
        let failed = |raw, said: &str| match answer_of(b"{}", ExitStatus::from_raw(raw), said.to_owned()) {
            Err(AnswerError::Temporary(said)) => said,
            other => panic!("{other:?}"),
        };
        assert_eq!(failed(3 << 8, ""), "exit status 3");
        assert_eq!(failed(9, "no"), "no (signal 9)");
    }

    #[test]
    fn test_ids_are_printable_and_no_options() {
        let id = |text: &str| answer(text).unwrap().id();
        assert_eq!(id(r#"{"id": "/subscriptions/1/vm:a"}"#).unwrap(), "/subscriptions/1/vm:a");
        assert_eq!(id(r#"{"id": 17}"#).unwrap(), "17");
        let long = format!(r#"{{"id": "{}"}}"#, "x".repeat(257));
        for bad in
            ["{}", r#"{"id": ""}"#, r#"{"id": "a b"}"#, r#"{"id": "-rf"}"#, r#"{"id": "\u0007"}"#, &long]
        {
            id(bad).unwrap_err();
        }
    }

    #[test]
    fn test_a_list_is_believed_as_a_whole() {
        let list = |text: &str| answer(&format!("{{\"machines\": {text}}}")).unwrap().machines();
        let good = list(
            r#"[{"id": 7, "request": "r-1", "name": "n", "state": "running"},
                {"id": "b", "request": "", "name": null, "state": "gone", "zone": 3}]"#,
        );
        let one = |id: &str, request: Option<&str>, name: Option<&str>, state| Machine {
            id: id.to_owned(),
            request: request.map(str::to_owned),
            name: name.map(|name| name.parse().unwrap()),
            state,
        };
        assert_eq!(
            good.unwrap(),
            [
                one("7", Some("r-1"), Some("n"), MachineState::Running),
                one("b", None, None, MachineState::Gone)
            ]
        );
        for (bad, what) in [
            (r#"{}"#, "it has no list of `machines`"),
            (r#"[{"id": "a", "state": "asleep"}]"#, "machine 1: unknown variant `asleep`"),
            (
                r#"[{"id": "a", "state": "running"}, {"id": "a", "state": "gone"}]"#,
                "machine 2: the id `a` was",
            ),
            (r#"[{"state": "running"}]"#, "machine 1: missing field `id`"),
            (
                r#"[{"id": "a", "request": "../x", "state": "running"}]"#,
                "machine 1: its request: it must start",
            ),
            (r#"[{"id": "a", "name": "a b", "state": "running"}]"#, "machine 1: its name: it may hold only"),
        ] {
            let found = list(bad).unwrap_err();
            assert!(found.starts_with(what), "{bad}: {found}");
        }
    }
}
