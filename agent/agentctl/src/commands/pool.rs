//! `pool`: machines that are made when jobs wait for them.

use std::time::Duration;

use agent_model::{Clock, Code, Fault, SystemClock, Timestamp};
use agent_proto::v1;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::cli::{PoolSettings, PoolVerb};
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, age, count, moment};
use crate::output::{Output, Paper};

/// Time between two looks at a pool that is waited for.
const LOOK: Duration = Duration::from_millis(500);
/// How long to wait for the last machine of a pool that is removed.
const GONE: Duration = Duration::from_secs(24 * 3600);

/// Makes, changes, shows and removes pools.
pub(super) async fn pool(verb: PoolVerb, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    match verb {
        PoolVerb::Create { name, provider, settings } => {
            set(&client, request(name, true, Some(provider), settings), output).await
        }
        PoolVerb::Set { name, provider, settings } => {
            set(&client, request(name, false, provider, settings), output).await
        }
        PoolVerb::List { json } => {
            let listed = client.all_pools().await?;
            if json {
                return output.json(&listed.pools.iter().map(to_json).collect::<Vec<_>>());
            }
            if listed.pools.is_empty() {
                output.note(&match &listed.providers[..] {
                    [] => {
                        "no pools, and no provider that could make machines: agent/docs/pools.md".to_owned()
                    }
                    some => format!(
                        "no pools; make one: agentctl pool create NAME --provider {} --max 4",
                        some.join("|")
                    ),
                });
                return Ok(());
            }
            let paper = output.paper();
            output.print(&table(&listed.pools, paper))
        }
        PoolVerb::Show { name, json } => {
            let pool = find(&client, &name).await?;
            if json {
                return output.json(&to_json(&pool));
            }
            let paper = output.paper();
            output.print(&text(&pool, SystemClock.now(), paper))
        }
        PoolVerb::Wait { name, min_nodes, timeout } => wait(&client, &name, min_nodes, timeout, output).await,
        PoolVerb::Delete { name, no_wait } => {
            let request = v1::DeletePoolRequest { name: name.clone() };
            let left = answer(client.pools().delete(request)).await?.machines;
            if no_wait && !left.is_empty() {
                output.note(&format!("{name} is removed once its machines are: {}", left.join(", ")));
                return Ok(());
            }
            until_gone(&client, &name, output).await
        }
    }
}

fn request(
    name: String,
    create: bool,
    provider: Option<String>,
    settings: PoolSettings,
) -> v1::SetPoolRequest {
    let PoolSettings { min, max, idle, priority, label } = settings;
    v1::SetPoolRequest {
        name,
        create,
        provider,
        min,
        max,
        idle: idle.and_then(|idle| prost_types::Duration::try_from(idle).ok()),
        priority,
        change_labels: !label.is_empty(),
        labels: label.into_iter().collect(),
    }
}

async fn set(client: &Client, request: v1::SetPoolRequest, output: &mut Output) -> Result<(), Failure> {
    let pool = answer(client.pools().set(request)).await?;
    output.note(&format!(
        "{} has {} to {}, made by {}; idle ones go after {} s. Jobs name it: `compute: {}`",
        pool.name,
        pool.min,
        count(pool.max.into(), "machine"),
        pool.provider,
        idle_of(&pool),
        pool.name
    ));
    Ok(())
}

async fn find(client: &Client, name: &str) -> Result<v1::Pool, Failure> {
    let pools = client.all_pools().await?.pools;
    pools.into_iter().find(|pool| pool.name == name).ok_or_else(|| {
        Fault::new(Code::NotKnownHere, format!("there is no pool `{name}`"))
            .fix("list them with `agentctl pool list`")
            .into()
    })
}

/// Waits for machines that take jobs, and says what is waited for.
async fn wait(
    client: &Client,
    name: &str,
    min_nodes: u32,
    timeout: Duration,
    output: &mut Output,
) -> Result<(), Failure> {
    let end = Instant::now() + timeout;
    loop {
        let pool = find(client, name).await?;
        let ready = in_state(&pool, "idle") + in_state(&pool, "running");
        if ready >= min_nodes as usize {
            output.rest();
            output.note(&format!("{name} has {}", count(ready as u64, "machine")));
            return Ok(());
        }
        let waits = format!("{ready} of {}{}", count(min_nodes.into(), "machine"), because(&pool));
        output.busy(&waits);
        if Instant::now() >= end {
            output.rest();
            return Err(Failure::refused(
                format!("{name} has {waits} after {} s", timeout.as_secs()),
                format!(
                    "see what its machines wait for: agentctl pool show {name}; `--min` makes it keep some"
                ),
            ));
        }
        sleep(LOOK).await;
    }
}

async fn until_gone(client: &Client, name: &str, output: &mut Output) -> Result<(), Failure> {
    let end = Instant::now() + GONE;
    loop {
        match find(client, name).await {
            Err(Failure::Fault(fault)) if fault.code == Code::NotKnownHere => break,
            Err(failure) => return Err(failure),
            Ok(pool) if Instant::now() >= end => {
                let left = count(pool.machines.len() as u64, "machine");
                return Err(Failure::refused(format!("{name} still has {left}"), "it goes on being removed"));
            }
            Ok(pool) => {
                let left: Vec<String> =
                    pool.machines.iter().map(|one| format!("{} ({})", one.name, one.state)).collect();
                output.busy(&format!("{name} is being removed: {}{}", left.join(", "), because(&pool)));
            }
        }
        sleep(LOOK).await;
    }
    output.rest();
    output.note(&format!("{name} is removed"));
    Ok(())
}

/// The last failure of its provider, as the end of a sentence.
fn because(pool: &v1::Pool) -> String {
    let failure = pool.failure.as_ref();
    failure.map_or_else(String::new, |failure| {
        format!("; {}; it is tried again at {}", failure.what, moment(Timestamp(failure.again_ms)))
    })
}

fn in_state(pool: &v1::Pool, state: &str) -> usize {
    pool.machines.iter().filter(|machine| machine.state == state).count()
}

fn idle_of(pool: &v1::Pool) -> i64 {
    pool.idle.as_ref().map_or(0, |idle| idle.seconds)
}

fn table(pools: &[v1::Pool], paper: Paper) -> String {
    let headings =
        ["POOL", "PROVIDER", "MIN", "MAX", "NOW", "WANTED", "RUNNING", "IDLE", "STARTING", "FAILURE"];
    let mut table = Table::new(&headings, &[2, 3, 4, 5, 6, 7, 8]);
    for pool in pools {
        let number = |number: usize| Cell::from(number.to_string());
        table.row([
            Cell::from(&pool.name),
            Cell::from(&pool.provider),
            number(pool.min as usize),
            number(pool.max as usize),
            number(pool.machines.len()),
            number(pool.target as usize),
            number(in_state(pool, "running")),
            number(in_state(pool, "idle")),
            number(in_state(pool, "preparing")),
            Cell::new(Tone::Warn, pool.failure.as_ref().map_or("", |failure| failure.what.as_str())),
        ]);
    }
    table.render(paper)
}

/// A pool and its machines.
fn text(pool: &v1::Pool, now: Timestamp, paper: Paper) -> String {
    let mut parts = vec![table(std::slice::from_ref(pool), paper)];
    if let Some(failure) = &pool.failure {
        parts.push(format!(
            "failure of {}: {}\ntried again at {}\n",
            pool.provider,
            failure.what,
            moment(Timestamp(failure.again_ms))
        ));
    }
    if !pool.orphans.is_empty() {
        parts.push(format!(
            "{} has, and nobody asked for: {}\nthey are left alone; remove them with its own tools\n",
            pool.provider,
            pool.orphans.join(", ")
        ));
    }
    if !pool.machines.is_empty() {
        let mut table = Table::new(&["MACHINE", "STATE", "SINCE", "ID", "DETAIL"], &[]);
        for machine in &pool.machines {
            let since = age(Timestamp(machine.since_ms), now);
            table.row([&machine.name, &machine.state, &since, &machine.id, &machine.detail].map(Cell::from));
        }
        parts.push(table.render(paper));
    }
    parts.join("\n")
}

/// With the fields that scripts know from the cloud's command line, and ours.
fn to_json(pool: &v1::Pool) -> Value {
    let time = |ms: u64| (ms > 0).then(|| Timestamp(ms).rfc3339());
    let states = ["preparing", "running", "idle", "unusable", "leaving", "preempted"];
    let counts: serde_json::Map<String, Value> =
        states.iter().map(|state| (format!("{state}NodeCount"), json!(in_state(pool, state)))).collect();
    let resizing = pool.deleting || pool.target as usize != pool.machines.len();
    let machine = |machine: &v1::PoolMachine| {
        json!({
            "name": machine.name,
            "id": (!machine.id.is_empty()).then_some(&machine.id),
            "state": machine.state,
            "step": machine.step,
            "since": time(machine.since_ms),
            "detail": machine.detail,
        })
    };
    json!({
        "name": pool.name,
        "provider": pool.provider,
        "labels": pool.labels,
        "currentNodeCount": pool.machines.len(),
        "targetNodeCount": pool.target,
        "nodeStateCounts": counts,
        "allocationState": if resizing { "Resizing" } else { "Steady" },
        "allocationStateTransitionTime": time(pool.target_since_ms),
        "errors": pool.failure.iter().map(|failure| json!({
            "message": failure.what,
            "time": time(failure.at_ms),
            "nextTry": time(failure.again_ms),
        })).collect::<Vec<_>>(),
        "creationTime": time(pool.created_ms),
        "modifiedTime": time(pool.modified_ms),
        "provisioningState": if pool.deleting { "Deleting" } else { "Succeeded" },
        "provisioningStateTransitionTime": time(pool.modified_ms),
        "scaleSettings": {
            "minNodeCount": pool.min,
            "maxNodeCount": pool.max,
            "nodeIdleTimeBeforeScaleDown": format!("PT{}S", idle_of(pool)),
        },
        "vmPriority": if pool.priority == "low" { "LowPriority" } else { "Dedicated" },
        "machines": pool.machines.iter().map(machine).collect::<Vec<_>>(),
        "orphans": pool.orphans,
    })
}
