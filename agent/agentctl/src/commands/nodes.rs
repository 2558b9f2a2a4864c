//! The machines, one line each with what is used of them, and below them their GPUs.

use std::collections::BTreeMap;

use agent_model::{Timestamp, size};

use super::gpus;
use super::view::NodeView;
use crate::output::Paper;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, clean, short};

/// Everything about the machines; `users` are those whose jobs run there, in words, by machine.
pub(super) fn described(
    nodes: &[NodeView],
    users: &BTreeMap<String, String>,
    now: Timestamp,
    paper: Paper,
) -> String {
    let parts = [
        table(nodes, users, now, paper),
        notices(nodes, paper),
        labels(nodes, paper),
        tunnels(nodes, paper),
        gpus::table(nodes, paper),
    ];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
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

/// Machines as a table: of what they have, how much is used.
pub(super) fn table(
    nodes: &[NodeView],
    users: &BTreeMap<String, String>,
    now: Timestamp,
    paper: Paper,
) -> String {
    let headings = ["NODE", "CONDITION", "JOBS", "CPUS", "MEMORY", "GPUS", "DISK", "SEEN", "USERS"];
    let mut table = Table::new(&headings, &[2, 3, 4, 5, 6, 7]);
    for node in nodes {
        let inventory = &node.inventory;
        // Where jobs have slots, nobody counts the rest.
        let by_size = inventory.job_cpus != 0;
        let used = |used: String, total: String| if by_size { format!("{used}/{total}") } else { total };
        let held = inventory.gpus.iter().filter(|gpu| gpu.held.is_some()).count();
        table.row([
            Cell::from(&node.node),
            Cell::new(node.tone(), node.condition()),
            Cell::from(match by_size {
                false => format!("{}/{}", node.slots_used, inventory.slots),
                true => format!("{}/auto", node.slots_used),
            }),
            Cell::from(used(node.cpus_used.to_string(), inventory.cpus.to_string())),
            Cell::from(match by_size {
                false => size::binary(inventory.memory),
                true => of(node.memory_used_bytes, inventory.memory),
            }),
            Cell::from(match inventory.gpus.len() {
                0 => "0".to_owned(),
                total => format!("{held}/{total}"),
            }),
            Cell::from(of(inventory.disk.saturating_sub(node.disk_free_bytes), inventory.disk)),
            Cell::from(short(now.since(Timestamp(node.last_seen_ms)))),
            Cell::from(users.get(&node.node).map_or("", String::as_str)),
        ]);
    }
    table.render(paper)
}

/// `380/500 GiB`
fn of(used: u64, whole: u64) -> String {
    size::part(used, whole).replace(" of ", "/")
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
            disk_free_bytes: 120 << 30,
            memory_free_bytes: 8 << 30,
            tunnel: None,
            preemption: None,
            held_back: None,
            inventory: Inventory {
                os: "Ubuntu 22.04.4 LTS".into(),
                cpus: 8,
                slots: 2,
                memory: 16 << 30,
                disk: 500 << 30,
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
        let users = BTreeMap::from([("box".to_owned(), "ada 2, bert".to_owned())]);
        let shown = |nodes: &[NodeView]| table(nodes, &users, Timestamp(1_003_000), paper);
        insta::assert_snapshot!(shown(&[small()]), @r"
            NODE  CONDITION  JOBS  CPUS  MEMORY  GPUS         DISK  SEEN  USERS
            box   ready       1/2     8  16 GiB     0  380/500 GiB    3s  ada 2, bert
        ");
        let mut long = small();
        long.node = "gpu-worker-eu-central-1a-0123456789abcdef.compute.internal".into();
        long.liveness = "not_responding".into();
        long.inventory.job_cpus = 7;
        (long.cpus_used, long.memory_used_bytes) = (3, 4 << 30);
        insta::assert_snapshot!(shown(&[small(), long]), @r"
            NODE                CONDITION         JOBS  CPUS    MEMORY  GPUS         DISK  SEEN
            box                 ready              1/2     8    16 GiB     0  380/500 GiB    3s
            gpu-worke…internal  not_responding  1/auto   3/8  4/16 GiB     0  380/500 GiB    3s
        ");
        insta::assert_snapshot!("json", pretty(&small()));
    }
}
