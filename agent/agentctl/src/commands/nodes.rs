//! `nodes`: the machines, one line each, and below them their GPUs.

use agent_model::{Clock, SystemClock, Timestamp, size};
use agent_proto::v1;
use serde::Serialize;
use serde_json::json;

use super::gpus;
use super::view::NodeView;
use crate::cli::JsonArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, age, clean};
use crate::output::{Output, Paper};

/// How the controller makes itself reachable for a machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TunnelView {
    pub(crate) through: String,
    pub(crate) up: bool,
    /// Why it is not up.
    pub(crate) why: Option<String>,
}

impl TunnelView {
    /// `root@gpu-1, up`
    pub(crate) fn describe(&self) -> String {
        let state = self.why.as_ref().map_or_else(|| "up".to_owned(), |why| format!("down: {why}"));
        clean(&format!("{}, {state}", self.through)).into_owned()
    }
}

impl From<v1::Tunnel> for TunnelView {
    fn from(wire: v1::Tunnel) -> TunnelView {
        TunnelView { through: wire.through, up: wire.up, why: (!wire.up).then_some(wire.why) }
    }
}

/// Lists the machines.
pub(super) async fn nodes(args: &JsonArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let nodes = client.machines().await?.nodes;
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    if args.json {
        return output.json(&json!({ "nodes": nodes }));
    }
    let paper = output.paper();
    let gpus = gpus::table(&nodes, paper);
    let told = notices(&nodes, paper);
    let parts =
        [table(&nodes, SystemClock.now(), paper), told, labels(&nodes, paper), tunnels(&nodes, paper), gpus];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    output.print(&parts.join("\n"))
}

/// Which will be taken away, and which could not start jobs; nothing where none is either.
fn notices(nodes: &[NodeView], paper: Paper) -> String {
    let told = nodes.iter().flat_map(|node| node.notices().map(|told| (&node.node, told)));
    let line =
        |(node, told): (&String, String)| format!("{} {}\n", clean(node), paper.ink.paint(Tone::Warn, &told));
    told.map(line).collect()
}

/// The labels of those that have some, as a table; nothing where none has.
fn labels(nodes: &[NodeView], paper: Paper) -> String {
    let labeled: Vec<&NodeView> = nodes.iter().filter(|node| !node.inventory.labels.is_empty()).collect();
    if labeled.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&["NODE", "LABELS"], &[]);
    for node in labeled {
        table.row([Cell::from(&node.node), Cell::from(node.labels())]);
    }
    table.render(paper)
}

/// The tunnels by which some reach the controller, as a table; nothing where none does.
fn tunnels(nodes: &[NodeView], paper: Paper) -> String {
    let mut table = Table::new(&["NODE", "TUNNEL"], &[]);
    let mut any = false;
    for (node, tunnel) in nodes.iter().filter_map(|node| Some((node, node.tunnel.as_ref()?))) {
        any = true;
        let tone = if tunnel.up { Tone::Plain } else { Tone::Warn };
        table.row([Cell::from(&node.node), Cell::new(tone, tunnel.describe())]);
    }
    if any { table.render(paper) } else { String::new() }
}

/// Machines as a table.
pub(super) fn table(nodes: &[NodeView], now: Timestamp, paper: Paper) -> String {
    let headings = ["NODE", "CONDITION", "SLOTS", "CPUS", "GPUS", "MEMORY", "DISK FREE", "SEEN", "SYSTEM"];
    let mut table = Table::new(&headings, &[2, 3, 4, 5, 6, 7]);
    for node in nodes {
        let inventory = &node.inventory;
        table.row([
            Cell::from(&node.node),
            Cell::new(node.tone(), node.condition()),
            Cell::from(match inventory.job_cpus {
                0 => format!("{}/{}", node.slots_used, inventory.slots),
                _ => format!("{}/auto", node.slots_used),
            }),
            Cell::from(inventory.cpus.to_string()),
            Cell::from(gpus::fit(inventory)),
            Cell::from(size::binary(inventory.memory)),
            Cell::from(size::binary(node.disk_free_bytes)),
            Cell::from(age(Timestamp(node.last_seen_ms), now)),
            Cell::from(&inventory.os),
        ]);
    }
    table.render(paper)
}

#[cfg(test)]
pub(super) mod tests {
    use agent_model::node::{Finding, Grade, Inventory};
    use agent_proto::v1;

    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    /// A small machine with one good and one limited finding.
    pub(crate) fn small() -> NodeView {
        let finding = |topic: &str, grade, found: &str, means: &str, fix: Option<&str>| Finding {
            topic: topic.into(),
            grade,
            found: found.into(),
            means: means.into(),
            fix: fix.map(str::to_owned),
            lacks: None,
        };
        NodeView {
            node: "box".into(),
            liveness: "ready".into(),
            eligibility: "open".into(),
            last_seen_ms: 1_000_000,
            slots_used: 1,
            cpus_used: 0,
            memory_used_bytes: 0,
            disk_free_bytes: 120_000_000_000,
            memory_free_bytes: 8_000_000_000,
            tunnel: None,
            preemption: None,
            held_back: None,
            inventory: Inventory {
                os: "Ubuntu 22.04.4 LTS".into(),
                cpus: 8,
                slots: 2,
                memory: 16_000_000_000,
                disk: 500_000_000_000,
                findings: vec![
                    finding("python", Grade::Good, "3.11", "pip environments can be built", None),
                    finding(
                        "gpu",
                        Grade::Limited,
                        "none",
                        "jobs that ask for a GPU wait",
                        Some("install a driver"),
                    ),
                ],
                ..Inventory::default()
            },
        }
    }

    #[test]
    fn test_labels_are_listed_where_there_are_some() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let mut node = small();
        assert_eq!(labels(&[node.clone()], paper), "");
        node.inventory.labels = [("rack", "7"), ("instance_type", "Standard_NC6")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let shown = labels(&[small(), node], paper);
        assert_eq!(shown, "NODE  LABELS\nbox   instance_type=Standard_NC6, rack=7\n");
    }

    #[test]
    fn test_machines_that_go_are_named_with_the_reason() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let mut node = small();
        assert_eq!(notices(&[node.clone()], paper), "");
        let told = v1::Preemption { deadline_ms: 1_800_000_000_000, reason: "reclaimed".into() };
        node.preemption = Some(told.into());
        assert_eq!(
            notices(&[small(), node.clone()], paper),
            "box will be taken away at 08:00:00 UTC: reclaimed\n"
        );
        assert_eq!(node.condition(), "preempted");
        node.liveness = "not_responding".into();
        assert_eq!(node.condition(), "not_responding", "it is gone, or about to be");
        let mut node = small();
        let reason = "the node cannot keep track of the job: Input/output error".to_owned();
        node.held_back = Some(v1::HeldBack { until_ms: 1_800_000_000_000, reason }.into());
        let told = "box could not start jobs and is tried again at 08:00:00 UTC: the node cannot keep track of the job: \
                    Input/output error\n";
        assert_eq!((notices(&[node.clone()], paper).as_str(), node.condition()), (told, "held_back"));
    }

    #[test]
    fn test_tunnels_are_listed_where_there_are_some() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let mut node = small();
        assert_eq!(tunnels(&[node.clone()], paper), "");
        node.tunnel =
            Some(v1::Tunnel { through: "root@gpu-1".into(), up: true, ..Default::default() }.into());
        assert_eq!(tunnels(&[small(), node.clone()], paper), "NODE  TUNNEL\nbox   root@gpu-1, up\n");
        node.tunnel = Some(
            v1::Tunnel { through: "root@gpu-1".into(), up: false, why: "the connection ended".into() }.into(),
        );
        assert!(tunnels(&[node], paper).ends_with("root@gpu-1, down: the connection ended\n"));
    }

    #[test]
    fn test_table_fits_80_columns() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        insta::assert_snapshot!(table(&[small()], Timestamp(1_003_000), paper), @r"
            NODE  CONDITION  SLOTS  CPUS  GPUS  MEMORY  DISK FREE  SEEN  SYSTEM
            box   ready        1/2     8     0   16 GB     120 GB   3 s  Ubuntu 22.04.4 LTS
        ");
        let mut long = small();
        long.node = "gpu-worker-eu-central-1a-0123456789abcdef.compute.internal".into();
        long.liveness = "not_responding".into();
        insta::assert_snapshot!(table(&[small(), long], Timestamp(1_003_000), paper), @r"
            NODE                CONDITION       SLOTS  CPUS  GPUS  MEMORY  DISK FREE  SEEN
            box                 ready             1/2     8     0   16 GB     120 GB   3 s
            gpu-worke…internal  not_responding    1/2     8     0   16 GB     120 GB   3 s
        ");
        insta::assert_snapshot!("json", pretty(&small()));
    }
}
