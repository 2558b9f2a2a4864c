//! One call of a provider's program: started, told, listened to, and ended.
//!
//! Owns its environment, which has nothing of the daemon's, and what is kept of its words. A program that does not end
//! in time, or says too much, is killed with its process group; one that ended has its process group killed, too, so
//! that what it left behind holds neither its output nor anything else.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::time::Duration;

use agent_command::{Command, CommandError};
use agent_model::causes;
use serde_json::Value;
use tokio::sync::Notify;

use crate::answer::{AnswerError, ProviderAnswer, answer_of};
use crate::{Provider, ProviderError};

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
}
