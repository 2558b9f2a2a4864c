//! `top` and `nodes`: who uses what now.
//!
//! What is used is what jobs asked for, counted from the jobs that have not ended: what their processes take of it is not
//! known here. Of disks it is told what fills them, as far as agentd knows it.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::{Clock, SystemClock, size};
use serde::Serialize;
use serde_json::json;

use super::jobs::{self, JobQuery, list};
use super::nodes;
use super::view::{JobView, NodeView};
use crate::cli::{JsonArgs, StatusArgs};
use crate::client::{Client, Target, person};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, wrap};
use crate::output::{Output, Paper};

/// What one owner has now.
#[derive(Debug, Default, Serialize)]
struct Share {
    owner: String,
    /// Jobs, and tasks of arrays, that have a machine.
    running: u32,
    waiting: u32,
    gpus: u32,
    cpus: u32,
    memory_bytes: u64,
    /// The machines that his jobs run on.
    nodes: BTreeSet<String>,
}

/// Everything that is shown.
struct Usage {
    nodes: Vec<NodeView>,
    /// Of every owner of a job that has not ended, the one with most first.
    shares: Vec<Share>,
    /// By machine: its owners, and how many jobs of each run there.
    users: BTreeMap<String, BTreeMap<String, u32>>,
    /// Of the controller's store what it takes, and what it may take at most.
    store: (u64, u64),
}

/// Shows what each user has and what each machine gives.
pub(super) async fn top(args: &StatusArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    if args.watch {
        return jobs::watch(&client, output, async |paper| Ok(Usage::take(&client).await?.render(paper)))
            .await;
    }
    let usage = Usage::take(&client).await?;
    if args.json {
        return output.json(&json!({ "owners": usage.shares, "nodes": usage.nodes }));
    }
    let paper = output.paper();
    output.print(&usage.render(paper))
}

/// Lists the machines.
pub(super) async fn nodes(args: &JsonArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let usage = Usage::take(&client).await?;
    if args.json {
        return output.json(&json!({ "nodes": usage.nodes }));
    }
    let paper = output.paper();
    output.print(&nodes::described(&usage.nodes, &users(&usage.users), SystemClock.now(), paper))
}

impl Usage {
    async fn take(client: &Client) -> Result<Usage, Failure> {
        let active = JobQuery { active: true, standing: true, ..JobQuery::default() };
        let (machines, jobs) = tokio::join!(Box::pin(client.machines()), Box::pin(list(client, &active)));
        let machines = machines?;
        let store = machines.controller.unwrap_or_default();
        let store = (store.store_bytes, store.store_limit_bytes);
        let nodes = machines.nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
        let (mut all, mut waiting) = (Vec::new(), Vec::new());
        for job in jobs?.0 {
            let Some(tasks) = &job.tasks else {
                all.push(job);
                continue;
            };
            waiting.push((job.owner.clone(), tasks.waiting.len()));
            if !tasks.active.is_empty() {
                let of_array = JobQuery { active: true, array: job.job.clone(), ..JobQuery::default() };
                all.extend(list(client, &of_array).await?.0);
            }
        }
        Ok(Usage { store, ..Usage::of(nodes, &all, &waiting) })
    }

    /// Of jobs and tasks that have not ended, and of how many tasks of each owner no record exists yet.
    fn of(nodes: Vec<NodeView>, jobs: &[JobView], waiting: &[(String, u32)]) -> Usage {
        let mut shares: BTreeMap<&str, Share> = BTreeMap::new();
        let mut users: BTreeMap<String, BTreeMap<String, u32>> = BTreeMap::new();
        for job in jobs {
            let share = shares.entry(&job.owner).or_default();
            if job.state == "Queued" {
                share.waiting += 1;
                continue;
            }
            let (resources, machines) = (&job.spec.resources, job.ranks());
            share.running += 1;
            share.gpus += resources.gpus * machines;
            share.cpus += resources.cpus * machines;
            share.memory_bytes =
                share.memory_bytes.saturating_add(resources.memory.saturating_mul(machines.into()));
            let there: BTreeSet<&String> = job.replicas.iter().map(|replica| &replica.node).collect();
            for node in there.into_iter().filter(|node| !node.is_empty()) {
                share.nodes.insert(node.clone());
                *users.entry(node.clone()).or_default().entry(job.owner.clone()).or_default() += 1;
            }
        }
        for (owner, tasks) in waiting {
            shares.entry(owner).or_default().waiting += tasks;
        }
        let named = shares.into_iter().map(|(owner, share)| Share { owner: owner.to_owned(), ..share });
        let mut shares: Vec<Share> = named.collect();
        shares.sort_by_key(|share| std::cmp::Reverse((share.gpus, share.cpus, share.running, share.waiting)));
        Usage { nodes, shares, users, store: (0, 0) }
    }

    fn render(&self, paper: Paper) -> String {
        let machines = nodes::table(&self.nodes, &users(&self.users), SystemClock.now(), paper);
        let disks = self.disks(paper);
        if self.shares.is_empty() {
            return format!("{machines}\n{disks}\nno job runs or waits\n");
        }
        let headings = ["OWNER", "RUNNING", "WAITING", "GPUS", "CPUS", "MEMORY", "ON"];
        let mut table = Table::new(&headings, &[1, 2, 3, 4, 5]);
        let some = |number: u32| if number == 0 { String::new() } else { number.to_string() };
        for share in &self.shares {
            let memory =
                if share.memory_bytes == 0 { String::new() } else { size::binary(share.memory_bytes) };
            table.row([
                Cell::from(&share.owner),
                Cell::from(some(share.running)),
                Cell::from(some(share.waiting)),
                Cell::from(some(share.gpus)),
                Cell::from(some(share.cpus)),
                Cell::from(memory),
                Cell::from(share.nodes.iter().map(String::as_str).collect::<Vec<_>>().join(", ")),
            ]);
        }
        let told = paper
            .ink
            .paint(Tone::Dim, "Numbers are what jobs asked for. Their jobs: agentctl jobs --user NAME");
        format!("{machines}\n{}{told}\n\n{disks}", table.render(paper))
    }

    /// What agentd keeps on each disk, and whose it is where it is somebody's.
    fn disks(&self, paper: Paper) -> String {
        let mut table = Table::new(&["DISK OF", "FREE", "ENVIRONMENTS", "RESULTS KEPT THERE"], &[1, 2]);
        for node in &self.nodes {
            let mut kept: BTreeMap<String, u64> = BTreeMap::new();
            for result in &node.inventory.kept {
                *kept.entry(person(&result.owner)).or_default() += result.bytes;
            }
            let kept = kept.iter().map(|(owner, bytes)| format!("{owner} {}", size::binary(*bytes)));
            table.row([
                Cell::from(&node.node),
                Cell::from(size::binary(node.disk_free_bytes)),
                Cell::from(size::binary(node.inventory.environments.iter().map(|kept| kept.bytes).sum())),
                Cell::from(kept.collect::<Vec<_>>().join(", ")),
            ]);
        }
        let (taken, most) = (size::binary(self.store.0), size::binary(self.store.1));
        let told = format!(
            "The store has {taken} of at most {most}: code, data and results. What stays, and why: agentctl gc --dry-run"
        );
        let told = wrap(&told, paper.width, 0);
        format!("{}{}\n", table.render(paper), paper.ink.paint(Tone::Dim, &told))
    }
}

/// By machine, `ada 2, bert`.
fn users(users: &BTreeMap<String, BTreeMap<String, u32>>) -> BTreeMap<String, String> {
    let words = |owners: &BTreeMap<String, u32>| {
        let word = |(owner, jobs): (&String, &u32)| match jobs {
            1 => owner.clone(),
            jobs => format!("{owner} {jobs}"),
        };
        owners.iter().map(word).collect::<Vec<_>>().join(", ")
    };
    users.iter().map(|(node, owners)| (node.clone(), words(owners))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::nodes::tests::small;
    use super::super::view::tests::ended;
    use super::*;
    use crate::output::text::Ink;

    #[test]
    fn test_each_owner_has_what_his_jobs_asked_for() {
        let job = |owner: &str, state: &str| JobView { owner: owner.into(), state: state.into(), ..ended() };
        let jobs =
            [job("ada", "Running"), job("bert", "Running"), job("ada", "Preparing"), job("bert", "Queued")];
        let usage = Usage::of(vec![small()], &jobs, &[("bert".to_owned(), 7), ("eve".to_owned(), 1)]);
        let text = usage.render(Paper { ink: Ink::PLAIN, width: 80 });
        let mut parts = text.split("\n\n").skip(1);
        let (owners, disks) = (parts.next().unwrap(), parts.next().unwrap());
        assert!(
            disks.starts_with(
                "DISK OF     FREE  ENVIRONMENTS  RESULTS KEPT THERE\nbox      120 GiB           0 B\n"
            ),
            "{disks}"
        );
        insta::assert_snapshot!(owners, @r"
        OWNER  RUNNING  WAITING  GPUS  CPUS  MEMORY  ON
        ada          2                               box
        bert         1        8                      box
        eve                   1
        Numbers are what jobs asked for. Their jobs: agentctl jobs --user NAME
        ");
        assert_eq!(users(&usage.users)["box"], "ada 2, bert");
        let nothing = Usage::of(vec![small()], &[], &[]).render(Paper { ink: Ink::PLAIN, width: 80 });
        assert!(nothing.ends_with("no job runs or waits\n"), "{nothing}");
    }
}
