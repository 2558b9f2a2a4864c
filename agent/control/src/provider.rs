//! Providers: programs that make machines, list them and take them away again.
//!
//! Owns what is asked of such a program and what is believed of its answers; who writes one reads
//! `agent/docs/providers.md`. Hides processes, JSON and deadlines. What machines are wanted for, and what follows from
//! an answer, is decided elsewhere.
//!
//! Invariants: no call takes longer than its deadline, and nothing that the program started in its own process group is
//! left after it; at most [`call::MOST`] of its output is kept; an answer is believed as a whole or not at all; the token
//! of a machine is in no argument, variable, error or log.

mod call;
mod config;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::joining::{self, Joining};
use agent_model::{NodeId, words};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use config::{Deadlines, NodeShape, ProviderConfig, json_of, read_providers};

/// Whether machines may be taken away while they are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachinePriority {
    /// They are ours until we give them back.
    #[default]
    Dedicated,
    /// They are cheaper, and whoever owns them may take them back.
    Low,
}

/// A machine that is wanted.
#[derive(Clone)]
pub struct CreateMachine<'a> {
    /// Names this wish: the same one again is the same machine. Letters, digits, `-` and `_`.
    pub request: &'a str,
    /// The pool it is for, of the same characters.
    pub pool: &'a str,
    /// What the node is to be called.
    pub name: &'a NodeId,
    /// Whether it may be taken away.
    pub priority: MachinePriority,
    /// The labels that its token gives it.
    pub labels: &'a BTreeMap<String, String>,
    /// `https://HOST:PORT` of the controller, as the machine knows it.
    pub address: &'a str,
    /// What it joins with.
    pub token: &'a str,
}

impl fmt::Debug for CreateMachine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("CreateMachine");
        shown.field("request", &self.request).field("pool", &self.pool).field("name", &self.name);
        shown.finish_non_exhaustive()
    }
}

/// A machine that is wanted no longer. The provider finds it by whatever of this it knows.
#[derive(Debug, Clone)]
pub struct DeleteMachine<'a> {
    /// The pool it is of.
    pub pool: &'a str,
    /// What the provider called it, if it said so.
    pub id: Option<&'a str>,
    /// The wish that it was made for; empty for a machine that has none.
    pub request: &'a str,
    /// What its node is called; empty where nobody knows.
    pub name: &'a str,
}

/// What a provider says of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// What the provider calls it: printable ASCII without blanks, at most 256 characters.
    pub id: String,
    /// The wish it was made for, if the provider knows. Several machines may name the same one.
    pub request: Option<String>,
    /// What its node is called, if the provider knows.
    pub name: Option<NodeId>,
    /// Where it is in its life.
    pub state: MachineState,
}

/// Where a machine is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// It is ordered, or starts.
    Creating,
    /// It runs.
    Running,
    /// It is going away.
    Stopping,
    /// It ended, and what may be left of it goes with a delete. One that is not listed is gone with nothing left.
    Gone,
}

/// Why a provider did not do what was asked. After each of these the machine may still be there, or come yet: only a
/// list tells. The text has the provider's own words.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ProviderError {
    #[error("{provider} has no machine to give: {said}")]
    Quota { provider: String, said: String },
    #[error("{provider} failed: {said}")]
    Temporary { provider: String, said: String },
    #[error("{provider} refused: {said}")]
    Permanent { provider: String, said: String },
    #[error("{provider} did not answer within {}{}", words::duration(*after), followed(said))]
    Late { provider: String, after: Duration, said: String },
    #[error("the answer of {provider} is not understood: {what}{}", followed(said))]
    NotUnderstood { provider: String, what: String, said: String },
    #[error("{provider} cannot be asked: {} does not start: {why}", program.display())]
    NotThere { provider: String, program: PathBuf, why: String },
    #[error("{provider} was not asked: {what}")]
    BadRequest { provider: String, what: String },
}

/// Words behind something else, if there are any.
fn followed(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!("; it said: {said}") }
}

/// A provider of this controller.
#[derive(Debug, Clone)]
pub struct Provider {
    name: String,
    program: PathBuf,
    dir: PathBuf,
    config: ProviderConfig,
}

impl Provider {
    /// The provider of this name. `programs` is the directory of the programs that are named by a word, `dir` a directory
    /// of this provider alone, for what its program has to remember; it is made when it is needed.
    pub fn new(name: &str, config: ProviderConfig, programs: &Path, dir: &Path) -> Provider {
        // A path that is absolute replaces the directory.
        let program = programs.join(&config.program);
        Provider { name: name.to_owned(), program, dir: dir.to_owned(), config }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What its machines are like.
    pub fn config(&self) -> &ProviderConfig {
        &self.config
    }

    /// Has a machine made, and returns what the provider calls it. The machine need not run yet. Asked again with the
    /// same request it returns the same machine.
    pub async fn create(&self, wish: &CreateMachine<'_>) -> Result<String, ProviderError> {
        self.check(&[("request", wish.request), ("pool", wish.pool)])?;
        // Both are put between quotes of a shell.
        let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\'');
        if !is_plain(wish.address) || !is_plain(wish.token) {
            return Err(self.bad("the address and the token may hold no blanks and no quotes".to_owned()));
        }
        let joining = Joining {
            controller: wish.address,
            token: wish.token,
            name: Some(wish.name),
            slots: self.config.node.slots,
        };
        let asked = json!({
            "request": wish.request,
            "pool": wish.pool,
            "name": wish.name,
            "priority": wish.priority,
            "labels": wish.labels,
            "node": self.config.node,
            "join": {
                "address": wish.address,
                "token": wish.token,
                "cloud_init": joining::cloud_init(&joining, &self.config.package),
                "script": joining::script(&joining),
            },
            "settings": self.config.settings,
        });
        let answered = self.ask("create", &asked, self.config.deadlines.create, Some(wish.token)).await?;
        answered.id().map_err(|what| self.odd(what, answered.said))
    }

    /// The machines of a pool that the provider knows of.
    pub async fn list(&self, pool: &str) -> Result<Vec<Machine>, ProviderError> {
        self.check(&[("pool", pool)])?;
        let asked = json!({"pool": pool, "settings": self.config.settings});
        let answered = self.ask("list", &asked, self.config.deadlines.list, None).await?;
        answered.machines().map_err(|what| self.odd(what, answered.said))
    }

    /// Has a machine taken away; one that is not there is taken away already. It need not be gone yet when this returns.
    pub async fn delete(&self, machine: &DeleteMachine<'_>) -> Result<(), ProviderError> {
        self.check(&[("pool", machine.pool)])?;
        let named = [("request", machine.request), ("name", machine.name)];
        self.check(&named.into_iter().filter(|(_, text)| !text.is_empty()).collect::<Vec<_>>())?;
        let mut asked = json!({
            "pool": machine.pool,
            "request": machine.request,
            "name": machine.name,
            "settings": self.config.settings,
        });
        if let Some(id) = machine.id {
            asked["id"] = Value::from(call::checked_id(id).map_err(|what| self.bad(what))?);
        }
        self.ask("delete", &asked, self.config.deadlines.delete, None).await.map(drop)
    }

    /// Words that programs may use for names of their own.
    fn check(&self, words: &[(&str, &str)]) -> Result<(), ProviderError> {
        let broken = |(what, text): &(&str, &str)| {
            text.parse::<NodeId>().err().map(|error| format!("the {what} `{text}`: {}", error.rule))
        };
        words.iter().find_map(broken).map_or(Ok(()), |what| Err(self.bad(what)))
    }

    fn bad(&self, what: String) -> ProviderError {
        ProviderError::BadRequest { provider: self.name.clone(), what }
    }

    fn odd(&self, what: String, said: String) -> ProviderError {
        ProviderError::NotUnderstood { provider: self.name.clone(), what, said }
    }
}

/// What a program answers, for tests that answer otherwise.
#[cfg(feature = "fuzz")]
pub mod fuzz {
    use std::process::ExitStatus;

    /// Understands an answer, as that to each of the verbs; whether it is one to any.
    pub fn answer(output: &[u8]) -> bool {
        let answer = super::call::answer_of(output, ExitStatus::default(), String::new());
        answer.is_ok_and(|answer| answer.id().is_ok() | answer.machines().is_ok())
    }
}

#[cfg(test)]
mod tests;
