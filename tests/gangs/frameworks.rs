//! The job files of the guide, with the real frameworks: that each finds its processes on several hosts.

use std::path::{Path, PathBuf};

use agent_tests::fleet::Fleet;
use agent_tests::images::Image;
use agent_tests::python;
use agent_tests::table::{Row, Scale, Tally};

use crate::gangs::bed::{completed, fleet, fleet_with_engines, from_file, log, nothing_left, told};

/// The rows of this module: each fetches a framework once.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "F1", promise: "torchrun and plain PyTorch sum up over two hosts by Gloo", run: torch },
    Row { id: "F2", promise: "tasks of Ray run on both hosts", run: ray },
    Row { id: "F3", promise: "Spark counts words on both hosts, by spark-submit and by python", run: spark },
    Row {
        id: "F4",
        promise: "PyTorch sums up as in F1, in a container on each host",
        run: torch_in_containers,
    },
];

pub(crate) const SUM: &str = r#"
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} sum {int(value.item())}\n", end="", flush=True)
dist.barrier()
"#;

/// The PyTorch of the distribution, which is small and built for processors alone.
pub(crate) const TORCH_PYTHON: &str = "/usr/bin/python3";

#[allow(clippy::disallowed_methods, reason = "asks for what the tests need")]
pub(crate) fn need_torch() {
    let import = std::process::Command::new(TORCH_PYTHON).args(["-c", "import torch.distributed"]).status();
    let works = import.is_ok_and(|status| status.success());
    assert!(
        works,
        "{TORCH_PYTHON} has no PyTorch: install the packages python3-torch and python3-setuptools"
    );
}

fn torch(tally: &mut Tally, _: &Scale) {
    tally.case("there is a PyTorch", need_torch);
    sum_up(tally, &fleet(2), "host");
}

fn torch_in_containers(tally: &mut Tally, _: &Scale) {
    let (fleet, engines) = fleet_with_engines(2, Image::Torch);
    sum_up(tally, &fleet, &format!("{{image: '{}'}}", Image::Torch.tag()));
    // Engines go after what runs in them.
    drop(fleet);
    drop(engines);
}

fn sum_up(tally: &mut Tally, fleet: &Fleet, environment: &str) {
    // Two processes of each node say the sum of all four.
    let sums_up = |job: &str| {
        let ended = completed(fleet, job);
        for node in 0..2 {
            let said = log(fleet, job, node);
            for rank in [2 * node, 2 * node + 1] {
                assert!(said.contains(&format!("rank {rank} of 4 sum 10\n")), "{}", told(fleet, &ended));
            }
        }
        nothing_left(fleet);
    };
    tally.case("torchrun", || {
        // The last line is for a PyTorch that is older than its Python: it does not know its own defaults there.
        let job = format!(
            "command: >-\n  \
               torchrun --nnodes $AZUREML_NODE_COUNT --node_rank $NODE_RANK --nproc_per_node 2\n  \
               --master_addr $MASTER_ADDR --master_port $MASTER_PORT\n  \
               --redirects 0:1,1:1 --tee 0:1,1:1 train.py\n\
             environment: {environment}\n\
             resources: {{instance_count: 2}}\n\
             distribution: {{type: pytorch}}\n"
        );
        sums_up(&from_file(fleet, "torchrun", &job, &[("train.py", SUM)]));
    });
    tally.case("a process of each GPU there would be", || {
        let job = format!(
            "command: {TORCH_PYTHON} train.py\nenvironment: {environment}\nresources: {{instance_count: 2}}\n\
             distribution: {{type: PyTorch, process_count_per_instance: 2}}\n"
        );
        sums_up(&from_file(fleet, "pytorch", &job, &[("train.py", SUM)]));
    });
}

/// A Python with a package of its own, made once.
pub(crate) fn with_package(name: &str, install: &str) -> PathBuf {
    let dir = agent_tests::binaries().join(format!("../test-python-{name}"));
    python::make(&dir, name, &[&[install]]);
    dir.canonicalize().expect("it was made a moment ago")
}

/// The lines of a job file that put the programs of a Python first.
fn on_path(python: &Path) -> String {
    format!("environment_variables: {{PATH: '{}/bin:/usr/bin:/bin'}}\n", python.display())
}

/// What the job that a file describes says on its first rank.
#[track_caller]
fn says(fleet: &Fleet, name: &str, job: &str, files: &[(&str, &str)]) -> String {
    let id = from_file(fleet, name, job, files);
    completed(fleet, &id);
    let said = log(fleet, &id, 0);
    nothing_left(fleet);
    said
}

pub(crate) const SQUARES: &str = r#"
import ray, time

ray.init()

@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def square(number):
    time.sleep(0.5)
    return ray.util.get_node_ip_address(), number * number

while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.5)
done = ray.get([square.remote(number) for number in range(8)])
print("sum", sum(square for _, square in done), "on", *sorted({address for address, _ in done}))
"#;

fn ray(tally: &mut Tally, _: &Scale) {
    let python = with_package("ray", "ray");
    let fleet = fleet(2);
    tally.case("squares", || {
        let job = format!(
            "command: python squares.py\n{}resources: {{instance_count: 2}}\n\
             distribution: {{type: ray, include_dashboard: false}}\n",
            on_path(&python)
        );
        let said = says(&fleet, "squares", &job, &[("squares.py", SQUARES)]);
        assert!(said.contains("sum 140 on 10.77.0.2 10.77.0.3"), "{said}");
    });
}

const COUNT: &str = r#"
import os, time
from pyspark.sql import SparkSession

context = SparkSession.builder.getOrCreate().sparkContext
lines = context.parallelize(["to be or not to be"] * 1000, 8)
counts = lines.flatMap(str.split).map(lambda word: (word, 1)).reduceByKey(lambda a, b: a + b).collect()
where = lambda _: (time.sleep(0.2), os.environ["AGENTD_ADDRESS"])[1]
seen = set()
while len(seen) < 2:
    seen |= set(context.parallelize(range(8), 8).map(where).collect())
print(context.master.split(":")[0], *sorted(counts), "on", *sorted(seen))
"#;

fn spark(tally: &mut Tally, _: &Scale) {
    let python = with_package("pyspark", "pyspark==3.5.*");
    let fleet = fleet(2);
    for command in ["spark-submit count.py", "python count.py"] {
        tally.case(command, || {
            let job = format!(
                "command: {command}\n{}resources: {{instance_count: 2}}\ndistribution: {{type: spark}}\n",
                on_path(&python)
            );
            let said = says(&fleet, "count", &job, &[("count.py", COUNT)]);
            let counted = "spark ('be', 2000) ('not', 1000) ('or', 1000) ('to', 2000) on 10.77.0.2 10.77.0.3";
            assert!(said.contains(counted), "{said}");
        });
    }
}
