//! The section `distribution` of a command job. Its words are read in any case.

use super::section::{Rejection, Section, Warning};
use crate::yaml::Place;
use agent_model::job::Distribution;

const COUNT: &str = "a whole number";

/// Reads the section, of a job on so many nodes.
pub(super) fn distribution(
    top: &mut Section,
    nodes: u32,
    warnings: &mut Vec<Warning>,
) -> Result<Option<Distribution>, Rejection> {
    let Some(mut section) = top.section("distribution")? else { return Ok(None) };
    let place = section.place();
    let Some(kind) = section.word("type")? else {
        return Err(Rejection::invalid(place, "`distribution` does not say its `type`")
            .fix("add `pytorch`, `mpi`, `tensorflow`, `ray` or `spark`"));
    };
    let read = match kind {
        "mpi" => Distribution::Mpi { processes: section.parsed(PROCESSES, COUNT)?.unwrap_or(1) },
        "pytorch" => Distribution::PyTorch { processes: section.parsed(PROCESSES, COUNT)?.unwrap_or(1) },
        "tensorflow" => Distribution::TensorFlow {
            workers: section.parsed("worker_count", COUNT)?.unwrap_or(nodes),
            parameter_servers: section.parsed("parameter_server_count", COUNT)?.unwrap_or(0),
        },
        "ray" => read_ray(&mut section)?,
        _ => Distribution::Spark,
    };
    section.finish(warnings);
    check(&read, nodes, place)?;
    Ok(Some(read))
}

/// The rules of a distribution over so many nodes, told at a place.
pub(super) fn check(distribution: &Distribution, nodes: u32, place: Place) -> Result<(), Rejection> {
    distribution.check(nodes).map_err(|fault| {
        Rejection::invalid(place, fault.what)
            .fix(fault.fix.unwrap_or_else(|| "correct the section".to_owned()))
    })
}

/// Processes on each node.
const PROCESSES: &str = "process_count_per_instance";

fn read_ray(section: &mut Section) -> Result<Distribution, Rejection> {
    let dashboard = section.flag("include_dashboard")?;
    let mut words = |key| Ok::<_, Rejection>(section.text(key)?.unwrap_or_default());
    let head_arguments = words("head_node_additional_args")?;
    let worker_arguments = words("worker_node_additional_args")?;
    Ok(Distribution::Ray {
        port: section.parsed("port", "a port")?.unwrap_or(0),
        dashboard,
        dashboard_port: section.parsed("dashboard_port", "a port")?.unwrap_or(0),
        head_arguments,
        worker_arguments,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_job;
    use agent_model::Fault;

    fn of(text: &str) -> (Option<Distribution>, u32) {
        let job = command_job(&format!("command: x\n{text}"), &[]).unwrap();
        assert_eq!(job.warnings, [], "{text}");
        (job.draft.distribution, job.draft.resources.nodes)
    }

    #[test]
    fn test_every_kind_is_read_in_any_case_and_with_its_defaults() {
        use Distribution::{Mpi, PyTorch, Spark, TensorFlow};
        for (text, read) in [
            ("distribution: {type: PyTorch}", PyTorch { processes: 1 }),
            ("distribution: {type: pytorch, process_count_per_instance: 4}", PyTorch { processes: 4 }),
            ("distribution: {type: MPI, process_count_per_instance: 2}", Mpi { processes: 2 }),
            ("distribution: {type: spark}", Spark),
            ("distribution: {type: TensorFlow}", TensorFlow { workers: 1, parameter_servers: 0 }),
        ] {
            assert_eq!(of(text), (Some(read), 1), "{text}");
        }
        let text =
            "resources: {instance_count: 3}\ndistribution: {type: tensorflow, parameter_server_count: 1}";
        assert_eq!(of(text), (Some(TensorFlow { workers: 3, parameter_servers: 1 }), 3));
        let text = "distribution: {type: Ray, port: 6379, include_dashboard: true, head_node_additional_args: --x 1}";
        let Some(Distribution::Ray { port, dashboard, head_arguments, .. }) = of(text).0 else {
            panic!("no ray")
        };
        assert_eq!((port, dashboard, head_arguments.as_str()), (6379, Some(true), "--x 1"));
    }

    #[test]
    fn test_what_is_wrong_is_told_with_its_place() {
        for (text, place, said) in [
            ("distribution: {type: horovod}", "line 2, column 22", "`horovod` is not one of"),
            ("distribution: {process_count_per_instance: 2}", "line 2, column 15", "does not say its `type`"),
            ("distribution: {type: mpi, process_count_per_instance: 0}", "line 2, column 15", "is 0"),
            (
                "distribution: {type: mpi, process_count_per_instance: x}",
                "line 2, column 55",
                "a whole number",
            ),
        ] {
            let fault: Fault = command_job(&format!("command: x\n{text}\n"), &[]).unwrap_err().into();
            assert!(fault.what.contains(place) && fault.what.contains(said), "{fault}");
        }
        let warned =
            command_job("command: x\ndistribution: {type: mpi, worker_count: 2}\n", &[]).unwrap().warnings;
        assert!(warned[0].message.contains("worker_count"), "{warned:?}");
    }
}
