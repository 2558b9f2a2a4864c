//! Jobs that `mpirun` starts, with both families of it and no remote shell anywhere.

use std::path::PathBuf;

use agent_model::JobDraft;
use agent_model::job::Distribution;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::images::Image;
use agent_tests::python;
use agent_tests::table::{Row, Scale, Tally};

use crate::gangs::bed::{
    completed, draft, fleet, fleet_with_engines, from_file, log, nothing_left, open_to_all, setup, told,
};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "X1",
        promise: "Open MPI runs over three hosts, sums up, and ends with the first bad code",
        run: open_mpi,
    },
    Row { id: "X2", promise: "MPICH does", run: mpich },
    Row {
        id: "X3",
        promise: "both run as a user of the job's own, and as a user of the machine",
        run: users,
    },
    Row {
        id: "X4",
        promise: "Open MPI runs in containers of two hosts; ranks of an image that was made twice do not start",
        run: containers,
    },
];

/// The sum of all ranks, of a small thing and of a large one.
const SUM: &str = r#"
from mpi4py import MPI
import os, sys
world = MPI.COMM_WORLD
small = world.allreduce(world.rank + 1)
large = world.allreduce(b'x' * 100000, op=MPI.Op.Create(lambda a, b, d: max(a, b)))
here = os.getcwd() == os.environ['AZUREML_CR_EXECUTION_WORKING_DIR_PATH']
first = world.bcast(os.environ['AGENTD_ADDRESS']) == os.environ['MASTER_ADDR']
# One write for a line: mpirun brings together what its processes write, not their lines.
print(f"rank {world.rank} of {world.size} sum {small} {len(large)} {os.environ['AGENTD_RANK']} {here} {first}\n", end='', flush=True)
if len(sys.argv) > 1 and world.rank == int(sys.argv[1]):
    os._exit(7)
world.Barrier()
"#;

/// A Python with mpi4py, which works with whatever library it is told.
fn interpreter() -> PathBuf {
    static MADE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = MADE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let dir = agent_tests::binaries().join("../test-python-mpi");
    python::make(&dir, "mpi4py", &[&["mpi4py>=4.1"]]);
    dir.join("bin/python").canonicalize().map_or_else(|_| dir.join("bin/python"), |_| dir.join("bin/python"))
}

const OPEN_MPI: Family = Family { mpirun: "mpirun.openmpi", abi: "openmpi" };
const MPICH: Family = Family { mpirun: "mpiexec.hydra", abi: "mpich" };

struct Family {
    mpirun: &'static str,
    /// What mpi4py calls its library.
    abi: &'static str,
}

/// MPICH's library under the name by which others look for it: the distribution has another for it.
fn libraries(fleet: &Fleet) -> PathBuf {
    let dir = fleet.home().join("libraries");
    let _ = std::fs::create_dir(&dir);
    let ours = PathBuf::from(format!("/usr/lib/{}-linux-gnu/libmpich.so.12", std::env::consts::ARCH));
    let _ = std::os::unix::fs::symlink(ours, dir.join("libmpi.so.12"));
    dir
}

fn job(family: &Family, fleet: &Fleet, nodes: u32, processes: u32, argument: &str) -> JobDraft {
    let script = fleet.home().join("sum.py");
    std::fs::write(&script, SUM).expect("a script");
    let command = format!("{} {} {argument}", interpreter().display(), script.display());
    let mut new = draft(nodes, &command, Some(Distribution::Mpi { processes }));
    new.environment_variables = [
        ("AGENTD_MPIRUN".to_owned(), family.mpirun.to_owned()),
        ("MPI4PY_MPIABI".to_owned(), family.abi.to_owned()),
        ("LD_LIBRARY_PATH".to_owned(), libraries(fleet).display().to_string()),
    ]
    .into();
    new
}

fn open_mpi(tally: &mut Tally, scale: &Scale) {
    run(tally, scale, &OPEN_MPI);
}

fn mpich(tally: &mut Tally, scale: &Scale) {
    run(tally, scale, &MPICH);
}

fn run(tally: &mut Tally, _: &Scale, family: &Family) {
    let fleet = fleet(3);
    for (nodes, processes) in [(3, 1), (2, 2), (1, 2)] {
        tally.case(&format!("{processes} on each of {nodes}"), || {
            let id = fleet.client.submit(&job(family, &fleet, nodes, processes, ""));
            let ended = completed(&fleet, &id);
            let (said, all) = (log(&fleet, &id, 0), nodes * processes);
            let sum = all * (all + 1) / 2;
            for rank in 0..all {
                let node = rank / processes;
                let line = format!("rank {rank} of {all} sum {sum} 100000 {node} True True");
                assert!(said.contains(&line), "no `{line}` in {}", told(&fleet, &ended));
            }
            nothing_left(&fleet);
        });
    }
    tally.case("a process that fails gives the job its code", || {
        let id = fleet.client.submit(&job(family, &fleet, 3, 1, "1"));
        let ended = fleet.client.ended(&id);
        let exit = ended.outcome.as_ref().and_then(|outcome| outcome.exit);
        assert!(
            ended.state == "Failed" && format!("{exit:?}").contains("Code(7)"),
            "{}",
            told(&fleet, &ended)
        );
        nothing_left(&fleet);
    });
    tally.case("no `mpirun` is said so", || {
        let mut new = draft(2, "true", Some(Distribution::Mpi { processes: 1 }));
        new.environment_variables = [("AGENTD_MPIRUN".to_owned(), "no-such-mpirun".to_owned())].into();
        let id = fleet.client.submit(&new);
        let ended = fleet.client.ended(&id);
        assert!(
            ended.state == "Failed" && log(&fleet, &id, 0).contains("no-such-mpirun"),
            "{}",
            told(&fleet, &ended)
        );
    });
}

/// The interpreter that every user of the machine can start, and that images of the tests have as well.
const PYTHON: &str = "/usr/bin/python3";

/// What a rank says of itself: its sum, its user, and whether it is on the machine itself.
const WHO: &str = r#"
from mpi4py import MPI
import os
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
image = os.environ.get("FROM_THE_IMAGE", "no")
print(f"rank {world.rank} of {world.size} sum {total} user {os.getuid()} image {image}\n", end="", flush=True)
world.Barrier()
"#;

/// Submits the job file of a family with mpi4py in its code: so any user can read it, in any container.
#[track_caller]
fn submit_file(fleet: &Fleet, family: &Family, environment: &str, variables: &str) -> String {
    let made = agent_tests::binaries().join("../test-python-mpi-system");
    python::make_by(PYTHON, &made, "mpi4py", &[&["mpi4py>=4.1"]]);
    let name = format!("{}-{}", family.abi, if environment == "host" { "host" } else { "image" });
    let packages =
        std::fs::read_dir(made.join("lib")).expect("a directory").flatten().next().expect("a Python");
    let to = fleet.home().join(&name);
    std::fs::create_dir_all(&to).expect("a directory");
    if !to.join("mpi4py").exists() {
        agent_tests::copy_tree(&packages.path().join("site-packages/mpi4py"), &to.join("mpi4py"));
    }
    let job = format!(
        "command: {PYTHON} who.py\n\
         environment: {environment}\n\
         environment_variables: {{AGENTD_MPIRUN: {}, MPI4PY_MPIABI: {}{variables}}}\n\
         resources: {{instance_count: 2}}\n\
         distribution: {{type: mpi, process_count_per_instance: 2}}\n",
        family.mpirun, family.abi
    );
    from_file(fleet, &name, &job, &[("who.py", WHO)])
}

/// The users that four processes on two nodes say they are.
#[track_caller]
fn summed_up(fleet: &Fleet, job: &str, image: &str) -> Vec<u32> {
    let ended = completed(fleet, job);
    let said = log(fleet, job, 0);
    let user = |rank: u32| {
        let before = format!("rank {rank} of 4 sum 10 user ");
        let line = said
            .lines()
            .find_map(|line| line.strip_prefix(&before)?.strip_suffix(&format!(" image {image}")));
        line.unwrap_or_else(|| panic!("nothing of rank {rank}: {}", told(fleet, &ended)))
            .parse()
            .expect("a number")
    };
    let users = (0..4).map(user).collect();
    nothing_left(fleet);
    users
}

fn users(tally: &mut Tally, _: &Scale) {
    const GAMES: u32 = 5;
    const RUNS: std::ops::RangeInclusive<u32> = 2_000_000_000..=2_000_065_535;
    for (job_user, users) in [("per-run", RUNS), ("games", GAMES..=GAMES)] {
        let mut fleet = Fleet::new(&Setup { node: format!("job_user: {job_user}\n"), ..setup(2) });
        open_to_all(fleet.home());
        fleet.start();
        let libraries = format!(", LD_LIBRARY_PATH: {}", libraries(&fleet).display());
        for family in [&OPEN_MPI, &MPICH] {
            tally.case(&format!("{} as {job_user}", family.abi), || {
                let job = submit_file(&fleet, family, "host", &libraries);
                let found = summed_up(&fleet, &job, "no");
                assert!(found.iter().all(|user| users.contains(user)), "{found:?}");
            });
        }
    }
}

fn containers(tally: &mut Tally, _: &Scale) {
    let (fleet, engines) = fleet_with_engines(2, Image::Mpi);
    let image = format!("{{image: '{}'}}", Image::Mpi.tag());
    // MPICH sums up as well, and then often waits for ever in its own end.
    tally.case("Open MPI in containers", || {
        let job = submit_file(&fleet, &OPEN_MPI, &image, "");
        summed_up(&fleet, &job, "yes");
    });
    tally.case("an image that was made twice is said to be two", || {
        engines[1].docker().import(
            Image::Mpi.tag(),
            std::fs::read(Image::Mpi.archive()).expect("an archive"),
            &["ENV PATH=/usr/bin:/bin"],
        );
        let job = submit_file(&fleet, &OPEN_MPI, &image, "");
        let fault = fleet.client.ended(&job).outcome.and_then(|outcome| outcome.fault).expect("a fault");
        assert_eq!(fault.code, "GANG-104", "{fault:?}");
    });
    // Engines go after what runs in them.
    drop(fleet);
    drop(engines);
}
