//! `login` and `context`: the controllers elsewhere that a user may use.

use std::io::{BufRead, IsTerminal, Read};

use agent_identity::{Credentials, PrivateKey, Token, TokenKind, Trust};
use agent_model::{Clock, Code, Fault, Principal, SystemClock, Timestamp};
use agent_proto::v1;
use agent_proto::v1::identity_client::IdentityClient;
use serde::Serialize;

use crate::cli::{ContextVerb, LoginArgs};
use crate::client::target::{self, Context};
use crate::client::{answer, person};
use crate::failure::Failure;
use crate::output::ask::ask;
use crate::output::table::{Cell, Table};
use crate::output::text::moment;
use crate::output::{Output, Paper};

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
pub(super) async fn context(verb: &ContextVerb, output: &mut Output) -> Result<(), Failure> {
    match verb {
        ContextVerb::List { json } => list(*json, output),
        ContextVerb::Use { name } => {
            require(name)?;
            target::change(|contexts| contexts.current = Some(name.clone()))?;
            output.note(&format!("every command speaks to {name} now"));
            Ok(())
        }
        ContextVerb::Move { name, controller } => {
            require(name)?;
            follow(name, controller).await?;
            output.note(&format!("{name} is reached at {controller} from now on"));
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

/// Has a context reach its controller at another address, if the one that answers there has the same authority.
async fn follow(name: &str, controller: &str) -> Result<(), Failure> {
    let place = target::place(controller)?;
    let Some(known) = target::read()?.contexts.remove(name) else { return Ok(()) };
    let unusable = |error: &agent_identity::KeyError| {
        Fault::new(Code::StateUnusable, format!("the certificate of {name} cannot be used")).because(error)
    };
    let authority = known.authority().map_err(|error| unusable(&error))?;
    let dialer = target::dialer(&place, Trust::Authority(authority), None)?;
    dialer.authority().await.map_err(|error| {
        Fault::new(Code::Unreachable, format!("the controller of {name} does not answer at {controller}"))
            .because(&error)
            .fix("check the address and the firewall; a controller with another authority needs a new login")
    })?;
    target::change(|contexts| {
        if let Some(context) = contexts.contexts.get_mut(name) {
            controller.trim_end_matches('/').clone_into(&mut context.controller);
        }
    })?;
    Ok(())
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
        Row {
            name: name.clone(),
            current: contexts.current.as_ref() == Some(name),
            controller: credentials.controller.clone(),
            user,
            until_ms: context.until().0,
        }
    });
    let rows: Vec<Row> = rows.collect();
    if json {
        return output.json(&rows);
    }
    if rows.is_empty() {
        output.note("there are no contexts: agentctl login https://HOST:7443");
        return Ok(());
    }
    let paper = output.paper();
    output.print(&table(&rows, paper))
}

/// A context, see `agent/docs/json.md`.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    current: bool,
    controller: String,
    user: String,
    until_ms: u64,
}

fn table(rows: &[Row], paper: Paper) -> String {
    let mut table = Table::new(&["", "CONTEXT", "USER", "UNTIL", "CONTROLLER"], &[]).with_names(&[1, 2]);
    for Row { name, current, controller, user, until_ms } in rows {
        let (mark, until) = (if *current { "*" } else { "" }, moment(Timestamp(*until_ms)));
        table.row([mark, name, user, &until, controller].map(Cell::from));
    }
    table.render(paper)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::text::Ink;

    #[test]
    fn test_contexts_fit_80_columns() {
        let row = |name: &str, current| Row {
            name: name.into(),
            current,
            controller: format!("https://{name}:7443"),
            user: "ada".into(),
            until_ms: 90_000_000,
        };
        let rows = [row("controller.lab", true), row("controller.eu-central-1.compute.example.org", false)];
        insta::assert_snapshot!(table(&rows, Paper { ink: Ink::PLAIN, width: 80 }), @r"
               CONTEXT                       USER  UNTIL                    CONTROLLER
            *  controller.lab                ada   1970-01-02 01:00:00 UTC  https://control…
               controller.eu-…e.example.org  ada   1970-01-02 01:00:00 UTC  https://control…
        ");
    }
}
