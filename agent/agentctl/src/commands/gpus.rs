//! The GPUs of machines: which there are, which job has each, and why one is not handed out.

use agent_model::node::{Gpu, Inventory};
use agent_model::{ReplicaId, size};

use super::view::NodeView;
use crate::output::Paper;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, clean, count, wrap};

/// `8 GPUs`, or `8 GPUs (1 not handed out)`.
pub(super) fn total(inventory: &Inventory) -> String {
    let total = count(inventory.gpus.len() as u64, "GPU");
    match inventory.gpus.iter().filter(|gpu| gpu.unfit.is_some()).count() {
        0 => total,
        unfit => format!("{total} ({unfit} not handed out)"),
    }
}

/// `GPU 3: NVIDIA H100, 80 GiB, used by train-1`, with what keeps it from being handed out.
pub(super) fn line(gpu: &Gpu) -> String {
    let mut parts = vec![clean(&gpu.name).into_owned()];
    parts.extend((gpu.memory > 0).then(|| size::binary(gpu.memory)));
    parts.push(state(gpu));
    format!("GPU {}: {}", gpu.index, parts.join(", "))
}

fn state(gpu: &Gpu) -> String {
    let user = gpu.held.as_deref().map(job_of);
    match (user, &gpu.unfit) {
        (None, None) => "free".to_owned(),
        (Some(job), None) => format!("used by {job}"),
        (None, Some(unfit)) => clean(unfit).into_owned(),
        (Some(job), Some(unfit)) => format!("used by {job}: {}", clean(unfit)),
    }
}

/// The job of a replica; a text that is not a replica is shown as it is.
fn job_of(replica: &str) -> String {
    let parsed = replica.parse::<ReplicaId>();
    parsed.map_or_else(|_| clean(replica).into_owned(), |replica| replica.job.to_string())
}

/// The lines of one machine, for its place in `status`.
pub(super) fn lines(inventory: &Inventory, paper: Paper) -> Vec<String> {
    let mut lines: Vec<String> =
        inventory.gpus.iter().map(|gpu| wrap(&format!("  {}", line(gpu)), paper.width, 9)).collect();
    if !inventory.gpu_driver.is_empty() {
        let cuda = match inventory.cuda.is_empty() {
            true => String::new(),
            false => format!(", CUDA {}", clean(&inventory.cuda)),
        };
        lines.push(format!("  GPU driver: {}{cuda}", clean(&inventory.gpu_driver)));
    }
    lines
}

/// The GPUs of all machines; nothing when none has any.
pub(super) fn table(nodes: &[NodeView], paper: Paper) -> String {
    let mut table =
        Table::new(&["NODE", "GPU", "MODEL", "MEMORY", "DRIVER", "USE"], &[1, 3]).with_names(&[0, 2]);
    for node in nodes {
        for gpu in &node.inventory.gpus {
            let memory = if gpu.memory > 0 { size::binary(gpu.memory) } else { String::new() };
            let tone = if gpu.unfit.is_some() { Tone::Warn } else { Tone::Plain };
            table.row([
                Cell::from(&node.node),
                Cell::from(gpu.index.to_string()),
                Cell::from(&gpu.name),
                Cell::from(memory),
                Cell::from(&node.inventory.gpu_driver),
                Cell::new(tone, state(gpu)),
            ]);
        }
    }
    match nodes.iter().all(|node| node.inventory.gpus.is_empty()) {
        true => String::new(),
        false => table.render(paper),
    }
}

/// The GPUs that a job has now.
pub(super) fn of_job<'a>(job: &str, nodes: &'a [NodeView]) -> Vec<(&'a str, &'a Gpu)> {
    let has = |gpu: &&Gpu| gpu.held.as_deref().is_some_and(|held| job_of(held) == job);
    let of_node =
        |node: &'a NodeView| node.inventory.gpus.iter().filter(has).map(move |gpu| (node.node.as_str(), gpu));
    nodes.iter().flat_map(of_node).collect()
}

#[cfg(test)]
mod tests {
    use super::super::nodes::tests::small;
    use super::*;
    use crate::output::text::Ink;

    fn gpus() -> NodeView {
        let gpu = |index, held: Option<&str>, unfit: Option<&str>| Gpu {
            index,
            uuid: format!("GPU-{index}"),
            name: "NVIDIA T4".into(),
            memory: 16 << 30,
            held: held.map(str::to_owned),
            unfit: unfit.map(str::to_owned),
        };
        let quarantined = "quarantined: process 4711 (python) of nobody's job uses 3.2 GiB of it";
        let gpus = vec![gpu(0, None, None), gpu(1, Some("train.2.0"), None), gpu(2, None, Some(quarantined))];
        let mut node = small();
        (node.inventory.gpus, node.inventory.gpu_driver) = (gpus, "550.54".into());
        node.inventory.cuda = "12.4".into();
        node
    }

    #[test]
    fn test_each_gpu_says_who_has_it_and_why_it_is_not_handed_out() {
        let (node, paper) = (gpus(), Paper { ink: Ink::PLAIN, width: 120 });
        assert_eq!(total(&node.inventory), "3 GPUs (1 not handed out)");
        insta::assert_snapshot!(lines(&node.inventory, paper).join("\n"), @r"
            GPU 0: NVIDIA T4, 16 GiB, free
            GPU 1: NVIDIA T4, 16 GiB, used by train
            GPU 2: NVIDIA T4, 16 GiB, quarantined: process 4711 (python) of nobody's job uses 3.2 GiB of it
            GPU driver: 550.54, CUDA 12.4
        ");
        insta::assert_snapshot!(table(&[node.clone(), small()], paper), @r"
            NODE  GPU  MODEL      MEMORY  DRIVER  USE
            box     0  NVIDIA T4  16 GiB  550.54  free
            box     1  NVIDIA T4  16 GiB  550.54  used by train
            box     2  NVIDIA T4  16 GiB  550.54  quarantined: process 4711 (python) of nobody's job uses 3.2 GiB of it
        ");
        assert_eq!(table(&[small()], paper), "");
        let nodes = [node];
        let of_job = of_job("train", &nodes);
        assert_eq!(of_job.iter().map(|(node, gpu)| (*node, gpu.index)).collect::<Vec<_>>(), [("box", 1)]);
    }
}
