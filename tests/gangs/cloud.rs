//! Job files as people wrote them for the cloud: its environments by name, its cluster, its counts. Nothing in them is
//! changed; an operator has said what the names of the environments mean here.

use std::fs;
use std::path::Path;

use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};

use crate::gangs::bed::{completed, ctl, log, nothing_left, setup, told};
use crate::gangs::frameworks::{SQUARES, SUM, TORCH_PYTHON, need_torch, with_package};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "J1",
        promise: "job files of the cloud for MPI and TensorFlow run unchanged on two hosts",
        run: plain,
    },
    Row { id: "J2", promise: "those for PyTorch do, and sum up", run: pytorch },
    Row { id: "J3", promise: "those for Ray do", run: ray },
];

/// A fleet of two hosts where each of these environments is a Python of the machine.
fn fleet(environments: &[(&str, &Path)]) -> (tempfile::TempDir, Fleet) {
    let definitions = tempfile::tempdir().expect("a directory");
    crate::gangs::bed::open_to_all(definitions.path());
    for (name, python) in environments {
        let text = format!("python: {}\nuser_managed_dependencies: true\n", python.display());
        fs::write(definitions.path().join(format!("{name}.yml")), text).expect("a definition");
    }
    let node = format!("curated_environments: {}\n", definitions.path().display());
    let fleet = Fleet::started(&Setup { node, ..setup(2) });
    (definitions, fleet)
}

/// Submits a project as it is: `job.yml`, and its code in `src`.
#[track_caller]
fn submit(fleet: &Fleet, name: &str, job: &str, script: &str) -> String {
    let dir = fleet.home().join(name);
    fs::create_dir_all(dir.join("src")).expect("a directory");
    fs::write(dir.join("job.yml"), job).expect("a file");
    fs::write(dir.join("src/train.py"), script).expect("a file");
    ctl(fleet, &["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned()
}

/// The beginning and end that all of them have.
fn job(name: &str, environment: &str, distribution: &str) -> String {
    format!(
        "$schema: https://azuremlschemas.azureedge.net/latest/commandJob.schema.json\n\
         code: src\n\
         command: >-\n  python train.py\n  --epochs ${{{{inputs.epochs}}}}\n  --model-dir ${{{{inputs.model_dir}}}}\n\
         inputs:\n  epochs: 1\n  model_dir: outputs/model\n\
         environment: azureml:{environment}\n\
         compute: azureml:cpu-cluster\n\
         resources:\n  instance_count: 2\n\
         distribution:\n{distribution}\
         display_name: {name}-example\n\
         experiment_name: {name}-example\n\
         description: Train a basic network, distributed.\n"
    )
}

const MPI: &str = r#"
import argparse, os, socket
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--model-dir")
args = parser.parse_args()
rank, size, local = (os.environ["OMPI_COMM_WORLD_" + name] for name in ("RANK", "SIZE", "LOCAL_RANK"))
node = os.environ["AZUREML_CR_NODE_RANK"] if "AZUREML_CR_NODE_RANK" in os.environ else "?"
print(f"mpi rank {rank} of {size}, {local} on node {node}, {args.epochs} epochs\n", end="", flush=True)
if rank == "0":
    os.makedirs(args.model_dir, exist_ok=True)
    open(os.path.join(args.model_dir, "saved"), "w").write("model")
"#;

/// As a script of the cloud finds its cluster: a server at its own address, and a word from every worker to the first.
const TENSORFLOW: &str = r#"
import json, os, socket, time
config = json.loads(os.environ["TF_CONFIG"])
workers, task = config["cluster"]["worker"], config["task"]
assert task["type"] == "worker" and len(workers) == 2, config
here = workers[task["index"]].rsplit(":", 1)
server = socket.create_server((here[0], int(here[1])))
def reach(address):
    host, port = address.rsplit(":", 1)
    for _ in range(100):
        try:
            return socket.create_connection((host, int(port)), 5)
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"cannot reach {address}")
others = [reach(address) for place, address in enumerate(workers) if place != task["index"]]
server.accept()
time.sleep(0.5)
print(f"worker {task['index']} of {len(workers)} met {len(others)} in {config.get('environment')}")
"#;

fn plain(tally: &mut Tally, _: &Scale) {
    let python = Path::new(TORCH_PYTHON);
    let (_definitions, fleet) =
        fleet(&[("tensorflow-2.4-ubuntu18.04-py37-cuda11-gpu", python), ("openmpi4.1.0", python)]);
    tally.case("mpi", || {
        let text =
            job("mpi", "AzureML-openmpi4.1.0@latest", "  type: mpi\n  process_count_per_instance: 2\n");
        let id = submit(&fleet, "mpi", &text, MPI);
        let ended = completed(&fleet, &id);
        let said = log(&fleet, &id, 0);
        for (rank, local, node) in [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)] {
            let line = format!("mpi rank {rank} of 4, {local} on node {node}, 1 epochs\n");
            assert!(said.contains(&line), "no `{line}`: {}", told(&fleet, &ended));
        }
        let kept = ended.outcome.and_then(|outcome| outcome.artifacts).expect("outputs");
        assert_eq!((kept.files, kept.bytes), (1, 5));
        nothing_left(&fleet);
    });
    tally.case("tensorflow", || {
        let text = job(
            "tensorflow",
            "AzureML-tensorflow-2.4-ubuntu18.04-py37-cuda11-gpu:14",
            "  type: tensorflow\n  worker_count: 2\n",
        );
        let id = submit(&fleet, "tensorflow", &text, TENSORFLOW);
        let ended = completed(&fleet, &id);
        for rank in 0..2 {
            let line = format!("worker {rank} of 2 met 1 in cloud");
            assert!(log(&fleet, &id, rank).contains(&line), "no `{line}`: {}", told(&fleet, &ended));
        }
        nothing_left(&fleet);
    });
}

fn pytorch(tally: &mut Tally, _: &Scale) {
    tally.case("there is a PyTorch", need_torch);
    let (_definitions, fleet) = fleet(&[("acpt-pytorch-2.2-cuda12.1", Path::new(TORCH_PYTHON))]);
    tally.case("two processes on each of two nodes", || {
        let distribution = "  type: pytorch \n  process_count_per_instance: 2\n";
        let text = job("pytorch", "AzureML-acpt-pytorch-2.2-cuda12.1@latest", distribution);
        let id = submit(&fleet, "pytorch", &text, SUM);
        let ended = completed(&fleet, &id);
        for rank in 0..4 {
            let line = format!("rank {rank} of 4 sum 10\n");
            assert!(log(&fleet, &id, rank / 2).contains(&line), "no `{line}`: {}", told(&fleet, &ended));
        }
        nothing_left(&fleet);
    });
}

fn ray(tally: &mut Tally, _: &Scale) {
    let python = with_package("ray", "ray").join("bin/python");
    let (_definitions, fleet) = fleet(&[("ray-2.9", &python)]);
    tally.case("squares", || {
        let text = job("ray", "AzureML-ray-2.9@latest", "  type: ray\n  include_dashboard: false\n");
        let id = submit(&fleet, "ray", &text, SQUARES);
        completed(&fleet, &id);
        let said = log(&fleet, &id, 0);
        assert!(said.contains("sum 140 on 10.77.0.2 10.77.0.3"), "{said}");
        nothing_left(&fleet);
    });
}
