//! `token`, `user` and `node remove`: the nodes and the users of a controller.

use std::collections::HashMap;

use agent_model::joining::{self, Joining, Package};
use agent_model::{Clock, SystemClock, Timestamp};
use agent_proto::v1;
use serde_json::json;

use super::drain::introduce;
use super::preempt::end_jobs;
use crate::cli::{TokenVerb, UserVerb};
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{count, moment};
use crate::output::{Output, Paper};

/// Makes, shows and revokes tokens.
pub(super) async fn token(verb: TokenVerb, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    match verb {
        TokenVerb::Create { label, uses, lasts, cloud_init, json } => {
            let package = cloud_init.map(|package| Package::parse(&package)).transpose();
            let package = package.map_err(|error| Failure::refused(error.to_string(), error.fix))?;
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
                Some(package) => {
                    let (controller, token) = (made.address.as_str(), made.token.as_str());
                    let joining = Joining { controller, token, name: None, slots: None };
                    output.print(&joining::cloud_init(&joining, &package))
                }
                None => output
                    .print(&format!("sudo agentd join {} --token-file - <<< {}\n", made.address, made.token)),
            }
        }
        TokenVerb::List { json } => {
            let tokens = client.tokens().await?;
            if json {
                return output.json(&tokens.iter().map(token_json).collect::<Vec<_>>());
            }
            if tokens.is_empty() {
                output.note("no tokens; a machine joins with one: agentctl token create");
                return Ok(());
            }
            let paper = output.paper();
            output.print(&tokens_table(&tokens, SystemClock.now(), paper))
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

fn tokens_table(tokens: &[v1::TokenInfo], now: Timestamp, paper: Paper) -> String {
    let mut table = Table::new(&["TOKEN", "FOR", "LEFT", "UNTIL", "BY", "LABELS"], &[]).with_names(&[1, 4]);
    for token in tokens {
        let left = match (token.uses_left, Timestamp(token.until_ms) < now) {
            (0, _) => "used up".to_owned(),
            (_, true) => "over".to_owned(),
            (left, _) => count(left.into(), "use"),
        };
        let mut labels: Vec<String> =
            token.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        labels.sort();
        let whose = match token.user.as_str() {
            "" => "a machine".to_owned(),
            user => format!("user {user}"),
        };
        let until = moment(Timestamp(token.until_ms));
        table.row([&token.id, &whose, &left, &until, &token.by, &labels.join(" ")].map(Cell::from));
    }
    table.render(paper)
}

fn users_table(users: &[v1::User], paper: Paper) -> String {
    let mut table = Table::new(&["USER", "ROLE", "SINCE"], &[]);
    for user in users {
        table.row([&user.name, &user.role, &moment(Timestamp(user.added_ms))].map(Cell::from));
    }
    table.render(paper)
}

/// Adds, shows and removes users.
pub(super) async fn user(verb: UserVerb, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    match verb {
        UserVerb::Add { name, role, lasts, same_person, new_person, json } => {
            let person = match (same_person, new_person) {
                (true, _) => "same",
                (_, true) => "new",
                _ => "",
            };
            let request = v1::AddUserRequest {
                name: name.clone(),
                role: role.unwrap_or_default(),
                seconds: lasts.as_secs(),
                person: person.to_owned(),
            };
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
            let users = client.users().await?;
            if json {
                let shown = |user: &v1::User| json!({ "name": user.name, "role": user.role, "added_ms": user.added_ms });
                return output.json(&users.iter().map(shown).collect::<Vec<_>>());
            }
            if users.is_empty() {
                output.note("no users; let one in: agentctl user add NAME");
                return Ok(());
            }
            let paper = output.paper();
            output.print(&users_table(&users, paper))
        }
        UserVerb::Revoke { name } => {
            answer(client.identity().revoke_user(v1::RevokeUserRequest { name: name.clone() })).await?;
            output.note(&format!(
                "{name} is logged in nowhere any more, and stays a user; for a new code: agentctl user add {name}"
            ));
            Ok(())
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
    if lose_jobs {
        end_jobs(&client, node, &mut |text| output.note(text)).await?;
    }
    let request = v1::RemoveNodeRequest { node: node.to_owned(), lose_jobs };
    let jobs = answer(client.identity().remove_node(request)).await?.jobs;
    if json {
        return output.json(&json!({ "node": node, "jobs": jobs }));
    }
    let lost = if jobs.is_empty() { String::new() } else { format!("; lost with it: {}", jobs.join(", ")) };
    output.note(&format!("{node} is no machine of this controller any more{lost}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::text::Ink;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 80 };

    #[test]
    fn test_tokens_and_users_fit_80_columns() {
        let token = |id: &str, uses_left, until_ms, user: &str| v1::TokenInfo {
            id: id.into(),
            kind: if user.is_empty() { "join" } else { "login" }.into(),
            uses_left,
            until_ms,
            by: "ada".into(),
            labels: if user.is_empty() { [("rack".into(), "7".into())].into() } else { HashMap::new() },
            user: user.into(),
        };
        let tokens = [
            token("k3x9a2", 7, 90_000_000, ""),
            token("m8q1zz", 1, 90_000_000, "somebody-with-a-long-name"),
            token("b7c2d1", 0, 90_000_000, ""),
            token("c1d2e3", 1, 1_000, "eve"),
        ];
        insta::assert_snapshot!(tokens_table(&tokens, Timestamp(2_000), PAPER), @r"
            TOKEN   FOR                        LEFT     UNTIL                    BY   LABELS
            k3x9a2  a machine                  7 uses   1970-01-02 01:00:00 UTC  ada  rack=7
            m8q1zz  user somebod…-a-long-name  1 use    1970-01-02 01:00:00 UTC  ada
            b7c2d1  a machine                  used up  1970-01-02 01:00:00 UTC  ada  rack=7
            c1d2e3  user eve                   over     1970-01-01 00:00:01 UTC  ada
        ");
        let user = |name: &str| v1::User { name: name.into(), role: "submit".into(), added_ms: 90_000_000 };
        insta::assert_snapshot!(users_table(&[user("ada"), user("eve")], PAPER), @r"
            USER  ROLE    SINCE
            ada   submit  1970-01-02 01:00:00 UTC
            eve   submit  1970-01-02 01:00:00 UTC
        ");
    }
}
