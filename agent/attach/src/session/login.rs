//! Logs in with keys of the agent and of files, answers to questions, and passwords: what the host accepts, in ssh's
//! order.

use std::path::Path;
use std::sync::Arc;

use russh::client::{AuthResult, Handle, KeyboardInteractiveAuthResponse as Answer};
use russh::keys::agent::AgentIdentity;
use russh::keys::agent::client::AgentClient;
use russh::keys::{HashAlg, PrivateKey, PrivateKeyWithHashAlg, PublicKey, load_public_key, ssh_key};
use russh::{MethodKind, MethodSet};
use tokio::net::UnixStream;

use super::{ConnectError, Judge};
use crate::Desk;
use crate::target::{Hop, Route};

/// A host usually disconnects after six failed tries.
const MOST_KEYS: usize = 5;
const MOST_PASSWORDS: usize = 3;
/// How many rounds of questions are answered before logging in is given up.
const MOST_QUESTIONS: usize = 10;

/// Logs in as the user of the hop. `target` is given for the last hop only, because a given password is for that
/// host.
pub(super) async fn login(
    handle: &mut Handle<Judge>,
    hop: &Hop,
    target: Option<&Route>,
    desk: &dyn Desk,
) -> Result<(), ConnectError> {
    let ended = |source| ConnectError::Ended { host: hop.to_string(), source };
    let given = target.and_then(|target| target.password.as_deref());
    let mut tries = Tries { handle, hop, given, desk, tried: Vec::new() };
    let mut offered = match tries.handle.authenticate_none(&hop.user).await.map_err(ended)? {
        AuthResult::Success => return Ok(()),
        AuthResult::Failure { remaining_methods, .. } => remaining_methods,
    };
    // A host that requires two methods names after the first which others it accepts.
    let mut done: Vec<MethodKind> = Vec::new();
    while let Some(method) = next(&offered, &done, given.is_some()) {
        let tried = match method {
            MethodKind::PublicKey => tries.keys().await,
            MethodKind::KeyboardInteractive => tries.questions().await,
            _ => tries.passwords().await,
        };
        match tried.map_err(ended)? {
            Tried::In => return Ok(()),
            Tried::More(left) => {
                offered = left;
                done.clear();
                done.push(method);
            }
            Tried::No => done.push(method),
        }
    }
    let wanted: Vec<String> = offered.iter().map(String::from).collect();
    let tried = if tries.tried.is_empty() { "nothing".to_owned() } else { tries.tried.join(", ") };
    let tried = format!("tried: {tried}; the host takes: {}", wanted.join(", "));
    Err(ConnectError::Refused { host: hop.to_string(), user: hop.user.clone(), tried })
}

/// The method to try next. A given password is tried before questions, which a script cannot answer.
fn next(offered: &MethodSet, done: &[MethodKind], has_password: bool) -> Option<MethodKind> {
    use MethodKind::{KeyboardInteractive, Password, PublicKey};
    let order = if has_password {
        [PublicKey, Password, KeyboardInteractive]
    } else {
        [PublicKey, KeyboardInteractive, Password]
    };
    order.into_iter().find(|method| offered.contains(method) && !done.contains(method))
}

enum Tried {
    In,
    /// It was accepted, and the host requires one of these as well.
    More(MethodSet),
    No,
}

impl From<AuthResult> for Tried {
    fn from(result: AuthResult) -> Tried {
        match result {
            AuthResult::Success => Tried::In,
            AuthResult::Failure { remaining_methods, partial_success: true } => {
                Tried::More(remaining_methods)
            }
            AuthResult::Failure { .. } => Tried::No,
        }
    }
}

struct Tries<'a> {
    handle: &'a mut Handle<Judge>,
    hop: &'a Hop,
    given: Option<&'a str>,
    desk: &'a dyn Desk,
    /// What was tried, in words.
    tried: Vec<String>,
}

impl Tries<'_> {
    async fn keys(&mut self) -> Result<Tried, russh::Error> {
        let hash = self.handle.best_supported_rsa_hash().await?.flatten();
        let mut left = MOST_KEYS;
        let (agent, mut held) = self.held_by_agent().await;
        if self.hop.keys_only {
            let named: Vec<PublicKey> = self.hop.keys.iter().filter_map(|path| public_half(path)).collect();
            held.retain(|key| named.iter().any(|named| named.key_data() == key.key_data()));
        }
        let mut agent = agent;
        for key in held {
            let Some(agent) = agent.as_mut().filter(|_| left > 0) else { break };
            left -= 1;
            self.tried.push(format!("a key of the agent ({})", key.fingerprint(HashAlg::Sha256)));
            let hash = if key.algorithm().is_rsa() { hash } else { None };
            // If the agent refuses to sign, only this key is skipped.
            let tried = self.handle.authenticate_publickey_with(&self.hop.user, key, hash, agent).await;
            match tried.map(Tried::from) {
                Ok(Tried::No) | Err(_) => {}
                Ok(done) => return Ok(done),
            }
        }
        for path in &self.hop.keys {
            let Some(key) = (left > 0).then(|| self.load(path)).flatten() else { continue };
            left -= 1;
            self.tried.push(path.display().to_string());
            let key = PrivateKeyWithHashAlg::new(Arc::new(key), hash);
            match self.handle.authenticate_publickey(&self.hop.user, key).await?.into() {
                Tried::No => {}
                done => return Ok(done),
            }
        }
        Ok(Tried::No)
    }

    async fn held_by_agent(&mut self) -> (Option<AgentClient<UnixStream>>, Vec<PublicKey>) {
        let Some(socket) = &self.hop.agent else { return (None, Vec::new()) };
        let Ok(mut agent) = AgentClient::connect_uds(socket).await else {
            self.tried.push("the agent, which does not answer".to_owned());
            return (None, Vec::new());
        };
        let held = agent.request_identities().await.unwrap_or_default();
        let plain = |identity| match identity {
            AgentIdentity::PublicKey { key, .. } => Some(key),
            AgentIdentity::Certificate { .. } => None,
        };
        (Some(agent), held.into_iter().filter_map(plain).collect())
    }

    /// The key of a file; asks for the passphrase if there is one.
    fn load(&mut self, path: &Path) -> Option<PrivateKey> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if self.hop.named.contains(&path.to_owned()) => {
                self.tried.push(format!("{} ({error})", path.display()));
                return None;
            }
            Err(_) => return None,
        };
        if let Ok(key) = russh::keys::decode_secret_key(&text, None) {
            return Some(key);
        }
        for _ in 0..MOST_PASSWORDS {
            let Some(passphrase) = self.desk.secret(&format!("Passphrase of {}: ", path.display())) else {
                break;
            };
            if let Ok(key) = russh::keys::decode_secret_key(&text, Some(&passphrase)) {
                return Some(key);
            }
        }
        self.tried.push(format!("{} (it cannot be opened)", path.display()));
        None
    }

    async fn passwords(&mut self) -> Result<Tried, russh::Error> {
        for _ in 0..MOST_PASSWORDS {
            let given = self.given.take().map(str::to_owned);
            let was_given = given.is_some();
            let ask = || self.desk.secret(&format!("Password of {}@{}: ", self.hop.user, self.hop));
            let Some(password) = given.or_else(ask) else { break };
            self.tried.push("a password".to_owned());
            match self.handle.authenticate_password(&self.hop.user, password).await?.into() {
                Tried::No if was_given => break,
                Tried::No => {}
                done => return Ok(done),
            }
        }
        Ok(Tried::No)
    }

    /// Answers the host's questions; a given password answers the first hidden one.
    async fn questions(&mut self) -> Result<Tried, russh::Error> {
        let mut answer =
            self.handle.authenticate_keyboard_interactive_start(&self.hop.user, None::<String>).await?;
        self.tried.push("answers to its questions".to_owned());
        for _ in 0..MOST_QUESTIONS {
            let prompts = match answer {
                Answer::Success => return Ok(Tried::In),
                Answer::Failure { remaining_methods, partial_success: true } => {
                    return Ok(Tried::More(remaining_methods));
                }
                Answer::Failure { .. } => return Ok(Tried::No),
                Answer::InfoRequest { prompts, .. } => prompts,
            };
            let mut answers = Vec::new();
            for prompt in prompts {
                let given = if prompt.echo { None } else { self.given.take().map(str::to_owned) };
                match given.or_else(|| self.desk.secret(&prompt.prompt)) {
                    Some(said) => answers.push(said),
                    None => return Ok(Tried::No),
                }
            }
            answer = self.handle.authenticate_keyboard_interactive_respond(answers).await?;
        }
        Ok(Tried::No)
    }
}

/// The public key of a key file, read without its passphrase.
fn public_half(path: &Path) -> Option<PublicKey> {
    let beside = load_public_key(path.with_added_extension("pub"));
    let inside = || Some(ssh_key::PrivateKey::read_openssh_file(path).ok()?.public_key().clone());
    beside.ok().or_else(inside)
}
