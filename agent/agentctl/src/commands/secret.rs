//! `secret`: the caller's secrets, which only jobs read. A value is read from standard input and never printed.

use std::io::{IsTerminal, Read};

use agent_model::{Code, Fault};
use agent_proto::v1;
use serde_json::json;

use crate::cli::SecretVerb;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::ask::ask;
use crate::output::table::{Cell, Table};
use crate::output::text;

/// More than any secret may have, in bytes.
const ENOUGH: u64 = 64 << 10;

/// Sets, lists or removes.
pub(super) async fn secret(
    verb: SecretVerb,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    match verb {
        SecretVerb::Set { name } => {
            let value = read(&name)?;
            let client = Client::find_or_start(to, output).await?;
            answer(client.secrets().set(v1::SetSecretRequest { name: name.clone(), value })).await?;
            output.note(&format!("{name} is set; in a job file: `secrets: {{VARIABLE: {name}}}`"));
        }
        SecretVerb::Rm { name } => {
            let client = Client::find(to).await?;
            answer(client.secrets().remove(v1::RemoveSecretRequest { name: name.clone() })).await?;
            output.note(&format!("{name} is removed"));
        }
        SecretVerb::List { json } => {
            let client = Client::find(to).await?;
            let secrets = client.secret_names().await?;
            if json {
                let shown = |secret: &v1::SecretName| json!({ "name": secret.name, "set_ms": secret.set_ms });
                output.json(&secrets.iter().map(shown).collect::<Vec<_>>())?;
            } else {
                output.print(&table(&secrets, output))?;
            }
        }
    }
    Ok(())
}

fn table(secrets: &[v1::SecretName], output: &Output) -> String {
    if secrets.is_empty() {
        return "no secrets; set one with `agentctl secret set NAME`\n".to_owned();
    }
    let mut table = Table::new(&["NAME", "SET"], &[]);
    for secret in secrets {
        table.row([
            Cell::from(secret.name.clone()),
            Cell::from(text::moment(agent_model::Timestamp(secret.set_ms))),
        ]);
    }
    table.render(output.paper())
}

/// The value: typed where nobody sees it, or standard input without the line feed that `echo` and editors add.
fn read(name: &str) -> Result<Vec<u8>, Failure> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        let typed = ask(&format!("Value of {name}: "), true);
        return Ok(typed.unwrap_or_default().into_bytes());
    }
    let mut value = Vec::new();
    let read = stdin.lock().take(ENOUGH).read_to_end(&mut value);
    let failed = |error: std::io::Error| {
        Fault::new(Code::JobInvalid, "the value cannot be read from standard input").because(&error)
    };
    read.map_err(failed)?;
    if value.last() == Some(&b'\n') {
        value.pop();
    }
    Ok(value)
}
