//! `token`, `user` and `node remove`: the nodes and the users of a controller.

use std::collections::HashMap;
use std::fmt::Write as _;

use agent_model::{Clock, SystemClock, Timestamp};
use agent_proto::v1;
use serde_json::json;

use super::cloud_init;
use super::drain::introduce;
use crate::cli::{TokenVerb, UserVerb};
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{clean, count, moment};

/// Makes, shows and revokes tokens.
pub(super) async fn token(verb: TokenVerb, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    match verb {
        TokenVerb::Create { label, uses, lasts, cloud_init, json } => {
            let package = cloud_init.map(|package| cloud_init::Package::parse(&package)).transpose()?;
            let labels: HashMap<String, String> = label.into_iter().collect();
            let request = v1::CreateTokenRequest { labels, uses, seconds: lasts.as_secs() };
            let made = answer(client.identity().create_token(request)).await?;
            if json {
                return output.json(&made_json(&made));
            }
            output.note(&format!(
                "whoever has this can add {} until {}; take it back with: agentctl token revoke {}",
                count(uses.into(), "machine"),
                moment(Timestamp(made.until_ms)),
                made.id
            ));
            match package {
                Some(package) => output.print(&cloud_init::user_data(&made.address, &made.token, &package)),
                None => output
                    .print(&format!("sudo agentd join {} --token-file - <<< {}\n", made.address, made.token)),
            }
        }
        TokenVerb::List { json } => {
            let tokens = answer(client.identity().list_tokens(v1::ListTokensRequest {})).await?.tokens;
            if json {
                return output.json(&tokens.iter().map(token_json).collect::<Vec<_>>());
            }
            let now = SystemClock.now();
            output.print(&tokens.iter().map(|token| line(token, now)).collect::<String>())
        }
        TokenVerb::Revoke { id } => {
            let id = answer(client.identity().revoke_token(v1::RevokeTokenRequest { id })).await?.id;
            output.note(&format!("{id} is good for nothing any more; machines that joined with it stay"));
            Ok(())
        }
    }
}

fn made_json(made: &v1::CreateTokenResponse) -> serde_json::Value {
    json!({ "id": made.id, "token": made.token, "controller": made.address, "until_ms": made.until_ms })
}

fn token_json(token: &v1::TokenInfo) -> serde_json::Value {
    json!({
        "id": token.id,
        "kind": token.kind,
        "uses_left": token.uses_left,
        "until_ms": token.until_ms,
        "by": token.by,
        "labels": token.labels,
        "user": token.user,
    })
}

fn line(token: &v1::TokenInfo, now: Timestamp) -> String {
    let state = match (token.uses_left, Timestamp(token.until_ms) < now) {
        (0, _) => "used up".to_owned(),
        (_, true) => "over".to_owned(),
        (left, _) => format!("{left} left, until {}", moment(Timestamp(token.until_ms))),
    };
    let whose = if token.user.is_empty() { String::new() } else { format!(" for {}", clean(&token.user)) };
    let mut labels: Vec<String> = token.labels.iter().map(|(key, value)| format!(" {key}={value}")).collect();
    labels.sort();
    format!(
        "{}  {}{whose}  {state}  by {}{}\n",
        token.id,
        token.kind,
        clean(&token.by),
        clean(&labels.concat())
    )
}

/// Adds, shows and removes users.
pub(super) async fn user(verb: UserVerb, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    match verb {
        UserVerb::Add { name, role, lasts, json } => {
            let role = role.unwrap_or_default();
            let request = v1::AddUserRequest { name: name.clone(), role, seconds: lasts.as_secs() };
            let made = answer(client.identity().add_user(request)).await?;
            if json {
                return output.json(&made_json(&made));
            }
            output.note(&format!(
                "{name} logs in with: agentctl login {}, and this code, once, until {}",
                made.address,
                moment(Timestamp(made.until_ms))
            ));
            output.print(&format!("{}\n", made.token))
        }
        UserVerb::List { json } => {
            let users = answer(client.identity().list_users(v1::ListUsersRequest {})).await?.users;
            if json {
                let shown = |user: &v1::User| json!({ "name": user.name, "role": user.role, "added_ms": user.added_ms });
                return output.json(&users.iter().map(shown).collect::<Vec<_>>());
            }
            let mut text = String::new();
            for user in users {
                // Writing to a string cannot fail.
                let _ = writeln!(
                    text,
                    "{}  {}  since {}",
                    clean(&user.name),
                    user.role,
                    moment(Timestamp(user.added_ms))
                );
            }
            output.print(&text)
        }
        UserVerb::Remove { name } => {
            answer(client.identity().remove_user(v1::RemoveUserRequest { name: name.clone() })).await?;
            output.note(&format!("{name} is no user any more; jobs that were submitted go on"));
            Ok(())
        }
    }
}

/// Removes a machine from the controller.
pub(super) async fn remove(
    node: &str,
    lose_jobs: bool,
    json: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    introduce(&client, output).await?;
    let request = v1::RemoveNodeRequest { node: node.to_owned(), lose_jobs };
    let jobs = answer(client.identity().remove_node(request)).await?.jobs;
    if json {
        return output.json(&json!({ "node": node, "jobs": jobs }));
    }
    let lost = if jobs.is_empty() { String::new() } else { format!("; lost with it: {}", jobs.join(", ")) };
    output.note(&format!("{node} is no machine of this controller any more{lost}"));
    Ok(())
}
