//! How a run configuration says that a script is started: framework, communicator, and the counts of each.

use std::num::NonZeroU32;

use crate::distribution::check;
use crate::section::{Mistakes, Rejection, Section, Warning};
use agent_model::job::Distribution;
use agent_model::words::count;

/// How the script is started.
#[derive(Debug, Default)]
pub(super) struct Launch {
    pub(super) nodes: u32,
    pub(super) distribution: Option<Distribution>,
    /// By `spark-submit`.
    pub(super) spark: bool,
}

/// The form of start that a framework and a communicator ask for together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// Once on each node.
    Plain,
    Mpi,
    /// With the variables of `torch.distributed`; `asked` is false where only the framework says so.
    PyTorch {
        asked: bool,
    },
    TensorFlow,
}

fn start(framework: &str, communicator: &str) -> Start {
    match (framework, communicator) {
        (_, "ParameterServer") | ("TensorFlowParameterServer", _) => Start::TensorFlow,
        // Whatever MPI is named, it is the one of the environment.
        (_, "OpenMpi" | "IntelMpi" | "Mpi") | ("PythonMpi" | "PythonIntelMpi", _) => Start::Mpi,
        (_, "Nccl" | "Gloo") => Start::PyTorch { asked: true },
        ("PyTorch", _) => Start::PyTorch { asked: false },
        _ => Start::Plain,
    }
}

/// Reads how the script is started.
pub(super) fn launch(top: &mut Section, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) -> Launch {
    let framework = wrong.note(top.word("framework")).unwrap_or("Python");
    let communicator = wrong.note(read_communicator(top)).unwrap_or("None");
    let start = start(framework, communicator);
    let at = top.at("nodeCount");
    let count = wrong.note(top.parsed::<NonZeroU32>("nodeCount", COUNT)).map_or(1, NonZeroU32::get);
    let [batch] = counts(top, "batchai", ["nodeCount"], warnings, wrong);
    let nodes = |own: Option<u32>| if count > 1 { count } else { own.or(batch).unwrap_or(1) };
    let (nodes, distribution) = match start {
        Start::Plain => (nodes(None), None),
        Start::Mpi => {
            let [processes, own] = counts(top, "mpi", ["processCountPerNode", "nodeCount"], warnings, wrong);
            (nodes(own), Some(Distribution::Mpi { processes: processes.unwrap_or(1) }))
        }
        Start::PyTorch { asked } => {
            let [all, own] = counts(top, "pytorch", ["processCount", "nodeCount"], warnings, wrong);
            let nodes = nodes(own);
            let processes = wrong.note(per_node(all, nodes, top));
            let alone = nodes == 1 && processes == 1 && !asked;
            (nodes, (!alone).then_some(Distribution::PyTorch { processes }))
        }
        Start::TensorFlow => {
            let [workers, servers] =
                counts(top, "tensorflow", ["workerCount", "parameterServerCount"], warnings, wrong);
            let (workers, parameter_servers) = (workers.unwrap_or(1), servers.unwrap_or(1));
            (nodes(None), Some(Distribution::TensorFlow { workers, parameter_servers }))
        }
    };
    // The old tools write these sections into every file, also where they do not count.
    top.skip(&["mpi", "pytorch", "tensorflow"]);
    if let Some(distribution) = &distribution {
        wrong.note(check(distribution, nodes, at));
    }
    Launch { nodes, distribution, spark: framework.starts_with("PySpark") }
}

const COUNT: &str = "a whole number of at least 1";

fn read_communicator(top: &mut Section) -> Result<Option<&'static str>, Rejection> {
    let place = top.at("communicator");
    match top.word("communicator")? {
        Some("ParallelTask") => Err(Rejection::unsupported(
            place,
            "`communicator: ParallelTask` is not run",
            "leave `communicator` out: the script then runs once on each of `nodeCount` nodes",
        )),
        word => Ok(word),
    }
}

/// Numbers of a section, all of them optional.
fn counts<const N: usize>(
    top: &mut Section,
    key: &'static str,
    names: [&'static str; N],
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> [Option<u32>; N] {
    let Some(mut section) = wrong.note(top.section(key)) else { return [None; N] };
    let read = names.map(|name| wrong.note(section.parsed::<u32>(name, "a whole number")));
    section.close(warnings, wrong);
    read
}

/// Processes on each node, of so many in all.
fn per_node(all: Option<u32>, nodes: u32, top: &Section) -> Result<u32, Rejection> {
    let all = all.unwrap_or(nodes);
    match all % nodes {
        0 => Ok(all / nodes),
        _ => Err(Rejection::invalid(
            top.place(),
            format!(
                "`pytorch.processCount` is {all}, which cannot be spread evenly over {}",
                count(nodes.into(), "node")
            ),
        )
        .fix("make it a multiple of the number of nodes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_framework_and_communicator_say_together_how_a_script_is_started() {
        let torch = |asked| Start::PyTorch { asked };
        for (framework, communicator, expected) in [
            ("Python", "None", Start::Plain),
            ("PySpark", "None", Start::Plain),
            ("CNTK", "OpenMpi", Start::Mpi),
            ("Python", "IntelMpi", Start::Mpi),
            ("PythonMpi", "None", Start::Mpi),
            ("TensorFlow", "Mpi", Start::Mpi),
            ("TensorFlow", "None", Start::Plain),
            ("TensorFlow", "ParameterServer", Start::TensorFlow),
            ("TensorFlowParameterServer", "None", Start::TensorFlow),
            ("PyTorch", "None", torch(false)),
            ("PyTorch", "Nccl", torch(true)),
            ("Python", "Gloo", torch(true)),
        ] {
            assert_eq!(start(framework, communicator), expected, "{framework} {communicator}");
        }
    }
}
