//! Which daemon a command connects to: one at a socket, or a controller that this user logged in to.
//!
//! Owns the order of that choice, and the file of contexts. A context named on the command line comes first, then a
//! socket, then the context in `AGENTCTL_CONTEXT`, then the one in use; without any of them the sockets of this
//! machine are tried.

use std::path::PathBuf;
use std::sync::Arc;

use agent_identity::{Contexts, Credentials, Dialer, PrivateKey, Proxy, ShownIdentity, Trust};
use agent_model::{Address, Clock, Code, Fault, Principal, SystemClock, Timestamp};
use agent_proto::transport::{self, Way};
use agent_proto::v1;
use agent_proto::v1::identity_client::IdentityClient;
use tonic::transport::Channel;

use super::{answer, endpoint};
use crate::cli::variable;
use crate::failure::Failure;

/// See the module.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// A socket of this machine.
    Socket(PathBuf),
    /// A controller elsewhere.
    Context(Box<Context>),
}

/// A controller that this user logged in to.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    /// What the user calls it.
    pub(crate) name: String,
    pub(crate) credentials: Credentials,
}

impl Target {
    /// The target of a command; `None` if the sockets of this machine are to be tried.
    pub(crate) fn resolve(context: Option<&str>, socket: Option<PathBuf>) -> Result<Option<Target>, Fault> {
        let named = match (context, socket) {
            (Some(name), _) => Some(name.to_owned()),
            (None, Some(socket)) => return Ok(Some(Target::Socket(socket))),
            (None, None) => variable("AGENTCTL_CONTEXT"),
        };
        if named.is_none() && file().is_none_or(|file| !file.exists()) {
            return Ok(None);
        }
        let contexts = read()?;
        let Some(name) = named.or_else(|| contexts.current.clone()) else { return Ok(None) };
        let known = || contexts.contexts.keys().cloned().collect::<Vec<_>>().join(", ");
        let credentials = contexts.contexts.get(&name).cloned().ok_or_else(|| {
            Fault::new(Code::NotKnownHere, format!("there is no context `{name}`"))
                .why(format!("there are: {}", known()))
                .fix("log in: `agentctl login https://HOST:7443`, or choose one: `agentctl context use NAME`")
        })?;
        Ok(Some(Target::Context(Box::new(Context { name, credentials }))))
    }
}

impl Context {
    /// The user's principal there.
    pub(crate) fn who(&self) -> Option<Principal> {
        self.credentials.certified().ok().map(|certified| certified.subject.who)
    }

    /// When its certificate expires.
    pub(crate) fn until(&self) -> Timestamp {
        self.credentials.certified().map(|certified| certified.until).unwrap_or_default()
    }

    /// How to connect. An expired certificate is reported here, because the controller only refuses the connection.
    pub(crate) fn way(&self) -> Result<Way, Fault> {
        let unusable = |error: &agent_identity::KeyError| damaged().because(error);
        let certified = self.credentials.certified().map_err(|error| unusable(&error))?;
        if certified.until < SystemClock.now() {
            let what = format!("your certificate for {} ended on {}", self.name, certified.until.utc());
            let fix =
                format!("ask an operator for a code, then: agentctl login {}", self.credentials.controller);
            return Err(Fault::new(Code::Unidentified, what).fix(fix));
        }
        let place = place(&self.credentials.controller)?;
        let trust = Trust::Authority(self.credentials.authority().map_err(|error| unusable(&error))?);
        let held = ShownIdentity::new(&self.credentials).map_err(|error| unusable(&error))?;
        Ok(Way::Tls(dialer(&place, trust, Some(held))?))
    }

    /// Replaces a certificate after two thirds of its lifetime. A failure is harmless: the next command tries again.
    pub(super) async fn renew(&self, channel: &Channel) -> Result<(), Failure> {
        let odd = |error: &agent_identity::KeyError| damaged().because(error);
        let certified = self.credentials.certified().map_err(|error| odd(&error))?;
        if SystemClock.now() < certified.renew_at() {
            return Ok(());
        }
        let key = PrivateKey::generate().map_err(|error| odd(&error))?;
        let request = v1::RenewRequest { request: key.request().map_err(|error| odd(&error))? };
        let made = answer(IdentityClient::new(channel.clone()).renew(request)).await?;
        let authority = self.credentials.authority().map_err(|error| odd(&error))?;
        let new = Credentials::new(&self.credentials.controller, &authority, &made.certificate, &key);
        change(|contexts| drop(contexts.contexts.insert(self.name.clone(), new)))?;
        Ok(())
    }
}

/// A channel that connects when it is first used.
pub(crate) fn channel(dialer: Dialer) -> Channel {
    transport::dial(endpoint(), Way::Tls(dialer))
}

/// A dialer for a host and port, through a proxy if the environment names one.
pub(crate) fn dialer(
    (host, port): &(String, u16),
    trust: Trust,
    held: Option<ShownIdentity>,
) -> Result<Dialer, Fault> {
    Dialer::new((host.as_str(), *port), trust, held, Proxy::from_variables(variable), Arc::new(SystemClock))
        .map_err(|error| damaged().because(&error))
}

/// A controller's host and port.
pub(crate) fn place(controller: &str) -> Result<(String, u16), Fault> {
    match controller.parse() {
        Ok(Address::Tls { host, port }) => Ok((host, port)),
        _ => Err(Fault::new(Code::RequestInvalid, format!("`{controller}` is no controller"))
            .fix("write it as `https://HOST:7443`")),
    }
}

/// The file of contexts.
fn file() -> Option<PathBuf> {
    let home = || Some(PathBuf::from(variable("HOME")?).join(".config"));
    let directory = variable("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home)?;
    Some(directory.join("agentctl/contexts.json"))
}

/// Reads all contexts.
pub(crate) fn read() -> Result<Contexts, Fault> {
    let Some(file) = file() else { return Err(no_home()) };
    Contexts::read(&file).map_err(|error| {
        Fault::new(Code::StateUnusable, format!("cannot read {}", file.display()))
            .because(&error)
            .fix("put back a copy of it, or remove it and log in again")
    })
}

/// Changes the contexts and writes the file.
pub(crate) fn change(change: impl FnOnce(&mut Contexts)) -> Result<Contexts, Fault> {
    let mut contexts = read()?;
    change(&mut contexts);
    let Some(file) = file() else { return Err(no_home()) };
    contexts.write(&file).map_err(|error| {
        Fault::new(Code::StateUnusable, format!("cannot write {}", file.display())).because(&error)
    })?;
    Ok(contexts)
}

fn no_home() -> Fault {
    Fault::new(Code::StateUnusable, "there is no place for contexts")
        .why("neither XDG_CONFIG_HOME nor HOME is set")
        .fix("set HOME")
}

fn damaged() -> Fault {
    Fault::new(Code::StateUnusable, "the identity of the context cannot be used").fix("log in again")
}
