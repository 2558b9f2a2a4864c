//! `login` and `context`: the controllers elsewhere that a user may use.

use std::fmt::Write as _;
use std::io::{BufRead, IsTerminal, Read};

use agent_identity::{Credentials, PrivateKey, Token, TokenKind, Trust};
use agent_model::{Clock, Code, Fault, Principal, SystemClock};
use agent_proto::v1;
use agent_proto::v1::identity_client::IdentityClient;
use serde_json::json;

use crate::cli::{ContextVerb, LoginArgs};
use crate::client::target::{self, Context};
use crate::client::{answer, person};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::ask::ask;
use crate::output::text::moment;

/// Longer than any code.
const LONGEST_CODE: u64 = 4096;

/// Gets a certificate for the code of an operator, and makes that controller the one in use.
pub(super) async fn login(
    args: &LoginArgs,
    context: Option<&str>,
    output: &mut Output,
) -> Result<(), Failure> {
    let place = target::place(&args.controller)?;
    let token = read_code(output)?;
    let dialer = target::dialer(&place, Trust::Fingerprint(token.authority()), None)?;
    let authority = dialer.authority().await.map_err(|error| {
        Fault::new(
            Code::Unreachable,
            format!("no controller that gave the code answers at {}", args.controller),
        )
        .because(&error)
        .fix("check the address and the firewall, and that the code is of this controller")
    })?;
    let odd = |error: &agent_identity::KeyError| Fault::new(Code::Bug, "no key can be made").because(error);
    let key = PrivateKey::generate().map_err(|error| odd(&error))?;
    let request = v1::LoginRequest {
        secret: token.secret(),
        request: key.request().map_err(|error| odd(&error))?,
        clock_ms: SystemClock.now().0,
    };
    let made = answer(IdentityClient::new(target::channel(dialer)).login(request)).await?;
    let controller = args.controller.trim_end_matches('/');
    let credentials = Credentials::new(controller, &authority, &made.certificate, &key);
    let name = context.map_or_else(|| place.0.clone(), str::to_owned);
    target::change(|contexts| {
        contexts.contexts.insert(name.clone(), credentials);
        contexts.current = Some(name.clone());
    })?;
    output.note(&format!(
        "logged in to {controller} as {}; every command speaks to it now (context {name})",
        made.name
    ));
    Ok(())
}

/// Reads the code from the terminal or standard input, because other users can see the arguments of a process.
fn read_code(output: &mut Output) -> Result<Token, Failure> {
    let refused = |why: &dyn std::error::Error| {
        Fault::new(Code::TokenRefused, "this is no code")
            .why(why.to_string())
            .fix("an operator makes one: `agentctl user add NAME`")
    };
    let stdin = std::io::stdin();
    let mut text = String::new();
    if stdin.is_terminal() {
        output.rest();
        text = ask("Code: ", true).unwrap_or_default();
    } else {
        stdin.lock().take(LONGEST_CODE).read_line(&mut text).map_err(|error| refused(&error))?;
    }
    let token: Token = text.parse().map_err(|error| refused(&error))?;
    match token.kind() {
        TokenKind::Login => Ok(token),
        TokenKind::Join => Err(Fault::new(Code::TokenRefused, "this is a token for a machine")
            .fix("a machine joins with it: `agentd join`; a user logs in with a code: `agentctl user add NAME`")
            .into()),
    }
}

/// Shows and changes the contexts of this user.
pub(super) fn context(verb: &ContextVerb, output: &mut Output) -> Result<(), Failure> {
    match verb {
        ContextVerb::List { json } => list(*json, output),
        ContextVerb::Use { name } => {
            require(name)?;
            target::change(|contexts| contexts.current = Some(name.clone()))?;
            output.note(&format!("every command speaks to {name} now"));
            Ok(())
        }
        ContextVerb::Remove { name } => {
            require(name)?;
            target::change(|contexts| {
                contexts.contexts.remove(name);
                contexts.current.take_if(|current| current == name);
            })?;
            output.note(&format!(
                "{name} is forgotten here; its certificate ends by itself, or with `agentctl user remove`"
            ));
            Ok(())
        }
    }
}

fn require(name: &str) -> Result<(), Fault> {
    match target::read()?.contexts.contains_key(name) {
        true => Ok(()),
        false => Err(Fault::new(Code::NotKnownHere, format!("there is no context `{name}`"))
            .fix("list them with `agentctl context list`")),
    }
}

fn list(json: bool, output: &mut Output) -> Result<(), Failure> {
    let contexts = target::read()?;
    let rows = contexts.contexts.iter().map(|(name, credentials)| {
        let context = Context { name: name.clone(), credentials: credentials.clone() };
        let user = match context.who() {
            Some(Principal::User { name }) => name.to_string(),
            other => other.map(|who| person(&who.to_string())).unwrap_or_default(),
        };
        (contexts.current.as_ref() == Some(name), context, user)
    });
    if json {
        let shown = rows.map(|(current, context, user)| {
            json!({
                "name": context.name,
                "current": current,
                "controller": context.credentials.controller,
                "user": user,
                "until_ms": context.until().0,
            })
        });
        return output.json(&shown.collect::<Vec<_>>());
    }
    let mut text = String::new();
    for (current, context, user) in rows {
        let mark = if current { "*" } else { " " };
        let until = moment(context.until());
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{mark} {}  {}  {user}  until {until}",
            context.name, context.credentials.controller
        );
    }
    if text.is_empty() {
        output.note("there are no contexts: agentctl login https://HOST:7443");
    }
    output.print(&text)
}
