//! `nodes`: the machines, one line each, and below them their GPUs.

use std::path::Path;

use agent_model::{Clock, SystemClock, Timestamp, size};
use serde_json::json;

use super::gpus;
use super::view::NodeView;
use crate::cli::JsonArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::age;
use crate::output::{Output, Paper};

/// Lists the machines.
pub(super) async fn nodes(
    args: &JsonArgs,
    socket: Option<&Path>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(socket).await?;
    let nodes = client.machines().await?.nodes;
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    if args.json {
        return output.json(&json!({ "nodes": nodes }));
    }
    let paper = output.paper();
    let gpus = gpus::table(&nodes, paper);
    let gap = if gpus.is_empty() { "" } else { "\n" };
    output.print(&format!("{}{gap}{gpus}", table(&nodes, SystemClock.now(), paper)))
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
            Cell::from(format!("{}/{}", node.slots_used, inventory.slots)),
            Cell::from(inventory.cpus.to_string()),
            Cell::from(gpus::fit(inventory)),
            Cell::from(size::decimal(inventory.memory)),
            Cell::from(size::decimal(node.disk_free_bytes)),
            Cell::from(age(Timestamp(node.last_seen_ms), now)),
            Cell::from(&inventory.os),
        ]);
    }
    table.render(paper)
}

#[cfg(test)]
pub(super) mod tests {
    use agent_model::node::{Finding, Grade, Inventory};

    use super::*;
    use crate::output::text::Ink;

    /// A small machine with one good and one limited finding.
    pub(crate) fn small() -> NodeView {
        let finding = |topic: &str, grade, found: &str, means: &str, fix: Option<&str>| Finding {
            topic: topic.into(),
            grade,
            found: found.into(),
            means: means.into(),
            fix: fix.map(str::to_owned),
        };
        NodeView {
            node: "box".into(),
            liveness: "ready".into(),
            eligibility: "open".into(),
            last_seen_ms: 1_000_000,
            slots_used: 1,
            disk_free_bytes: 120_000_000_000,
            memory_free_bytes: 8_000_000_000,
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
    fn test_table_fits_80_columns() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        assert_eq!(
            table(&[small()], Timestamp(1_003_000), paper),
            "NODE  CONDITION  SLOTS  CPUS  GPUS  MEMORY  DISK FREE  SEEN  SYSTEM\n\
             box   ready        1/2     8     0   16 GB     120 GB   3 s  Ubuntu 22.04.4 LTS\n"
        );
    }
}
