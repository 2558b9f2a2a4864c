//! How the processes of a job that has several are started, and how they find each other.
//!
//! A job without a distribution starts its command once on each of its nodes. What each kind means for the command is
//! decided on the node; here is what a user may ask for, and how many processes that makes.

use serde::{Deserialize, Serialize};

use crate::fault::{Code, Fault};
use crate::words::count;

/// Most processes of one job on one node.
pub const MAX_PROCESSES: u32 = 1024;

/// How the processes of a job are started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// By the `mpirun` of its environment, which is run once, on the first node.
    Mpi {
        /// Processes on each node.
        processes: u32,
    },
    /// That many on each node, with the variables that `torch.distributed` reads.
    PyTorch {
        /// Processes on each node.
        processes: u32,
    },
    /// One for each task of the cluster in `TF_CONFIG`.
    TensorFlow {
        /// How many work.
        workers: u32,
        /// How many serve parameters.
        parameter_servers: u32,
    },
    /// Ray's head on the first node, with the command beside it, and its workers on the others.
    Ray {
        /// Where the head listens; 0 is the first of the ports that the job has.
        port: u16,
        /// Whether the head has a dashboard.
        dashboard: Option<bool>,
        /// Where that listens; 0 is Ray's own choice.
        dashboard_port: u16,
        /// More words for `ray start` of the head.
        head_arguments: String,
        /// More words for `ray start` of the others.
        worker_arguments: String,
    },
    /// Spark's master on the first node, with the command beside it, and a worker on each.
    Spark,
}

impl Distribution {
    /// What users write.
    pub fn name(&self) -> &'static str {
        match self {
            Distribution::Mpi { .. } => "mpi",
            Distribution::PyTorch { .. } => "pytorch",
            Distribution::TensorFlow { .. } => "tensorflow",
            Distribution::Ray { .. } => "ray",
            Distribution::Spark => "spark",
        }
    }

    /// The command runs on the first node alone, and the others work for it: the job is over when the command is.
    pub fn is_led(&self) -> bool {
        matches!(self, Distribution::Mpi { .. } | Distribution::Ray { .. } | Distribution::Spark)
    }

    /// How many processes of the command the node of this rank starts, out of so many nodes.
    pub fn processes(&self, rank: u32, nodes: u32) -> u32 {
        match self {
            Distribution::Mpi { processes } | Distribution::PyTorch { processes } => *processes,
            Distribution::TensorFlow { workers, parameter_servers } => {
                let (tasks, nodes) = (workers + parameter_servers, nodes.max(1));
                tasks / nodes + u32::from(rank < tasks % nodes)
            }
            Distribution::Ray { .. } | Distribution::Spark => 1,
        }
    }

    /// The first rule that is broken by a job on so many nodes.
    pub fn check(&self, nodes: u32) -> Result<(), Fault> {
        let wrong = |what: String, fix: &str| Err(Fault::new(Code::JobInvalid, what).fix(fix));
        if (0..nodes.min(2)).any(|rank| self.processes(rank, nodes) > MAX_PROCESSES) {
            let what = format!("`distribution` starts more than {MAX_PROCESSES} processes on a node");
            return wrong(what, "ask for fewer processes, or for more nodes");
        }
        match self {
            Distribution::Mpi { processes: 0 } | Distribution::PyTorch { processes: 0 } => {
                let what = "`distribution.process_count_per_instance` is 0".to_owned();
                wrong(what, "ask for at least one process on each node, or leave the key out")
            }
            Distribution::TensorFlow { workers: 0, .. } => {
                let what = "`distribution.worker_count` is 0".to_owned();
                wrong(what, "ask for at least one worker, or leave the key out")
            }
            Distribution::TensorFlow { workers, parameter_servers }
                if workers + parameter_servers < nodes =>
            {
                let tasks = workers + parameter_servers;
                let what = format!(
                    "`distribution` has {} for {}",
                    count(tasks.into(), "task"),
                    count(nodes.into(), "node")
                );
                wrong(
                    what,
                    "ask for a task on each node at least, or for fewer nodes under `resources.instance_count`",
                )
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_tasks_are_spread_evenly_and_none_is_left_out() {
        for (workers, parameter_servers, nodes) in [(4, 1, 2), (3, 0, 3), (2, 2, 3), (1, 0, 1)] {
            let tensorflow = Distribution::TensorFlow { workers, parameter_servers };
            let of: Vec<u32> = (0..nodes).map(|rank| tensorflow.processes(rank, nodes)).collect();
            assert_eq!(of.iter().sum::<u32>(), workers + parameter_servers);
            assert!(
                of.iter().max().unwrap() - of.iter().min().unwrap() <= 1 && of.is_sorted_by(|a, b| a >= b)
            );
            tensorflow.check(nodes).unwrap();
        }
    }

    #[test]
    fn test_what_starts_nothing_or_too_much_is_refused() {
        let of = |processes| Distribution::Mpi { processes };
        assert!(of(0).check(1).is_err() && of(MAX_PROCESSES + 1).check(1).is_err() && of(8).check(4).is_ok());
        let fault = Distribution::TensorFlow { workers: 1, parameter_servers: 0 }.check(2).unwrap_err();
        assert_eq!(
            (fault.code, fault.what.as_str()),
            (Code::JobInvalid, "`distribution` has 1 task for 2 nodes")
        );
        assert!(Distribution::TensorFlow { workers: 0, parameter_servers: 3 }.check(2).is_err());
    }
}
