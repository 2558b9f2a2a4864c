//! What batch scripts of Slurm find where they run: the variables that they read, and the two programs that they call.
//!
//! Owns those names and their values, and the programs, which are part of this one. Hides that there is no Slurm: a
//! script runs on every machine of its job at once, so `srun` starts only the processes of its own machine.
//!
//! Invariants: only a job that has [`JOB_NAME`] among its variables has any of this, because libraries that find some of
//! these variables take themselves to be under Slurm; what the job says itself counts more. `SLURM_JOB_ID` is a number,
//! for scripts and libraries calculate with it; it is made from the job's name, so all tasks and ranks see the same one.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt;

use agent_jobfile::SLURM_JOB_NAME as JOB_NAME;
use agent_model::job::JobDraft;
use agent_model::{JobId, ReplicaId};
use agent_shim::JobDir;

const PROGRAMS: [(&str, &str); 2] =
    [("srun", include_str!("slurm/srun")), ("scontrol", include_str!("slurm/scontrol"))];

/// The only machine of a job, as the script is told it.
const HERE: &str = "localhost";

/// The job is such a script.
pub(crate) fn is_meant(job: &JobDraft) -> bool {
    job.environment_variables.contains_key(JOB_NAME)
}

/// Writes the programs. What an earlier try left is replaced. Blocking.
pub(crate) fn lay_out(dir: &JobDir) -> io::Result<()> {
    let place = dir.slurm();
    agent_spawn::remove_tree(&place)?;
    std::fs::create_dir_all(&place)?;
    for (name, text) in PROGRAMS {
        let file = place.join(name);
        std::fs::write(&file, text)?;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o555))?;
    }
    std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o555))
}

/// Adds the variables, and puts the programs first in the search path. `addresses` are those of the ranks; none of a job
/// on one machine.
pub(crate) fn complete(
    variables: &mut BTreeMap<String, String>,
    job: &JobDraft,
    replica: &ReplicaId,
    dir: &JobDir,
    addresses: &[String],
) {
    let (wants, rank) = (&job.resources, replica.rank);
    let said = |name: &str| variables.get(name).and_then(|value| value.parse::<u32>().ok());
    let tasks = said("SLURM_NTASKS_PER_NODE").unwrap_or(1).max(1);
    let own = addresses.get(rank as usize).map_or(HERE, String::as_str);
    let nodes = if addresses.is_empty() { HERE.to_owned() } else { addresses.join(",") };
    let all = |count: u32| Some(count.saturating_mul(wants.nodes)).filter(|all| *all > 0);
    let some = |count: u32| Some(count).filter(|count| *count > 0);
    let megabytes = (wants.memory > 0).then_some(wants.memory >> 20);
    let megabytes = megabytes.filter(|_| !variables.contains_key("SLURM_MEM_PER_CPU"));
    let each = match wants.nodes {
        1 => tasks.to_string(),
        nodes => format!("{tasks}(x{nodes})"),
    };
    let id = number(&replica.job).to_string();
    let text = |value: Option<u32>| value.map(|value| value.to_string());
    let values = [
        ("SLURM_JOB_ID", Some(id.clone())),
        ("SLURM_JOBID", Some(id)),
        ("SLURM_NNODES", text(Some(wants.nodes))),
        ("SLURM_JOB_NUM_NODES", text(Some(wants.nodes))),
        ("SLURM_NTASKS_PER_NODE", text(Some(tasks))),
        ("SLURM_TASKS_PER_NODE", Some(each)),
        ("SLURM_NTASKS", text(all(tasks))),
        ("SLURM_NPROCS", text(all(tasks))),
        ("SLURM_NODEID", text(Some(rank))),
        ("SLURM_PROCID", text(Some(rank.saturating_mul(tasks)))),
        ("SLURM_LOCALID", text(Some(0))),
        ("SLURM_CPUS_ON_NODE", text(some(wants.cpus))),
        ("SLURM_JOB_CPUS_PER_NODE", text(some(wants.cpus))),
        ("SLURM_MEM_PER_NODE", megabytes.map(|megabytes| megabytes.to_string())),
        ("SLURM_GPUS", text(all(wants.gpus))),
        ("SLURM_GPUS_ON_NODE", text(some(wants.gpus))),
        ("SLURM_GPUS_PER_NODE", text(some(wants.gpus))),
        ("SLURM_JOB_PARTITION", job.compute.clone()),
        ("SLURM_JOB_NODELIST", Some(nodes.clone())),
        ("SLURM_NODELIST", Some(nodes)),
        ("SLURMD_NODENAME", Some(own.to_owned())),
        ("SLURM_SUBMIT_DIR", Some(dir.work().display().to_string())),
        ("SLURM_CLUSTER_NAME", Some("agentd".to_owned())),
    ];
    for (name, value) in values.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        variables.entry(name.to_owned()).or_insert(value);
    }
    // Of an array every task has the name, which is no number.
    if let Some((array, _)) = replica.job.as_task() {
        variables.insert("SLURM_ARRAY_JOB_ID".to_owned(), number(&array).to_string());
    }
    let path = variables.entry("PATH".to_owned()).or_default();
    *path = format!("{}:{path}", dir.slurm().display());
}

/// A number of eight digits, the same wherever it is asked for (FNV-1a).
fn number(job: &JobId) -> u64 {
    let hash = job.as_str().bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    10_000_000 + hash % 90_000_000
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn replica(job: &str, rank: u32) -> ReplicaId {
        format!("{job}.1.{rank}").parse().unwrap()
    }

    fn job(variables: &[(&str, &str)]) -> JobDraft {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        JobDraft { environment_variables: variables.collect(), ..JobDraft::default() }
    }

    fn found(job: &JobDraft, replica: &ReplicaId, addresses: &[&str]) -> BTreeMap<String, String> {
        let mut variables = job.environment_variables.clone();
        variables.insert("PATH".into(), "/usr/bin".into());
        let addresses: Vec<String> = addresses.iter().map(|address| (*address).to_owned()).collect();
        complete(&mut variables, job, replica, &JobDir::new("/j/train.1.0"), &addresses);
        variables
    }

    #[test]
    fn test_a_script_finds_what_slurm_would_set() {
        let mut job = job(&[(JOB_NAME, "a"), ("SLURM_NTASKS_PER_NODE", "4"), ("SLURM_SUBMIT_DIR", "/x")]);
        assert!(is_meant(&job) && !is_meant(&JobDraft::default()));
        (job.resources.nodes, job.resources.gpus, job.resources.memory) = (2, 4, 64 << 30);
        let seen = found(&job, &replica("train", 1), &["10.0.0.1", "10.0.0.2"]);
        for (name, value) in [
            ("SLURM_NTASKS", "8"),
            ("SLURM_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_NNODES", "2"),
            ("SLURM_NODEID", "1"),
            ("SLURM_PROCID", "4"),
            ("SLURM_GPUS", "8"),
            ("SLURM_GPUS_ON_NODE", "4"),
            ("SLURM_MEM_PER_NODE", "65536"),
            ("SLURM_JOB_NODELIST", "10.0.0.1,10.0.0.2"),
            ("SLURMD_NODENAME", "10.0.0.2"),
            ("SLURM_SUBMIT_DIR", "/x"),
            ("PATH", "/j/train.1.0/job/slurm:/usr/bin"),
        ] {
            assert_eq!(seen.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(!seen.contains_key("SLURM_CPUS_ON_NODE"), "nobody asked for processors");
        let id: u64 = seen["SLURM_JOB_ID"].parse().unwrap();
        assert!((10_000_000..100_000_000).contains(&id));
        let first = found(&job, &replica("train", 0), &["10.0.0.1", "10.0.0.2"]);
        assert_eq!((&first["SLURM_JOB_ID"], first["SLURM_PROCID"].as_str()), (&seen["SLURM_JOB_ID"], "0"));
    }

    #[test]
    fn test_tasks_of_an_array_have_numbers_of_their_own_and_one_in_common() {
        let job = job(&[(JOB_NAME, "a"), ("SLURM_ARRAY_JOB_ID", "sweep"), ("SLURM_ARRAY_TASK_ID", "7")]);
        let [one, other] = ["sweep--7", "sweep--8"].map(|task| found(&job, &replica(task, 0), &[]));
        assert_eq!(one["SLURM_ARRAY_JOB_ID"], other["SLURM_ARRAY_JOB_ID"]);
        assert!(one["SLURM_ARRAY_JOB_ID"].parse::<u64>().is_ok());
        assert_ne!(one["SLURM_JOB_ID"], other["SLURM_JOB_ID"]);
        assert_eq!((one["SLURM_JOB_NODELIST"].as_str(), one["SLURM_NTASKS"].as_str()), ("localhost", "1"));
    }

    /// Runs a line as a job would, on the second of two machines with two tasks each; what it printed, sorted, and its
    /// exit code.
    #[allow(clippy::disallowed_methods, reason = "a test of a program that shells call")]
    fn run(line: &str) -> (Vec<String>, i32) {
        let home = tempfile::tempdir().unwrap();
        let dir = JobDir::new(home.path().join("train.1.0"));
        lay_out(&dir).unwrap();
        lay_out(&dir).unwrap();
        let mut job = job(&[(JOB_NAME, "a"), ("SLURM_NTASKS_PER_NODE", "2")]);
        job.resources.nodes = 2;
        let mut variables = job.environment_variables.clone();
        variables.insert("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into());
        complete(&mut variables, &job, &replica("train", 1), &dir, &["10.0.0.1".into(), "10.0.0.2".into()]);
        variables.insert("CUDA_VISIBLE_DEVICES".into(), "A,B,C,D".into());
        let ran = Command::new("bash").args(["-c", line]).env_clear().envs(variables).output().unwrap();
        let mut lines: Vec<String> =
            String::from_utf8(ran.stdout).unwrap().lines().map(str::to_owned).collect();
        lines.extend(String::from_utf8(ran.stderr).unwrap().lines().map(str::to_owned));
        lines.sort();
        (lines, ran.status.code().unwrap())
    }

    #[test]
    fn test_srun_starts_the_processes_of_its_own_machine() {
        let tell = "sh -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NTASKS $0'";
        for (line, expected) in [
            (format!("srun {tell}"), &["2 0 4 sh", "3 1 4 sh"][..]),
            (format!("srun -N 2 --cpu-bind=none --mpi none -l -u {tell}"), &["2 0 4 sh", "3 1 4 sh"]),
            (format!("srun --ntasks=1 --nodes 1 -w box {tell}"), &["1 0 2 sh"]),
            (format!("srun -n1 -- {tell} word"), &["1 0 2 word"]),
            (format!("srun --ntasks-per-node 3 {tell}"), &["3 0 6 sh", "4 1 6 sh", "5 2 6 sh"]),
            ("srun --gpus-per-task=2 sh -c 'echo $CUDA_VISIBLE_DEVICES'".to_owned(), &["A,B", "C,D"]),
            ("RANK=9 WORLD_SIZE=9 srun sh -c 'echo $RANK/$WORLD_SIZE'".to_owned(), &["2/4", "3/4"]),
            ("srun sh -c 'echo ${RANK-none}'".to_owned(), &["none", "none"]),
            ("scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1".to_owned(), &["10.0.0.1"]),
            ("scontrol show hostname".to_owned(), &["10.0.0.1", "10.0.0.2"]),
        ] {
            assert_eq!(run(&line), (expected.iter().map(|line| (*line).to_owned()).collect(), 0), "{line}");
        }
    }

    #[test]
    fn test_srun_fails_as_its_processes_do_and_says_what_it_cannot_do() {
        // The other process does not wait for one that failed.
        assert_eq!(run("srun sh -c 'test $SLURM_LOCALID = 0 && exec sleep 100; exit 7'"), (Vec::new(), 7));
        for (line, said) in [
            ("srun --container-image=x true", "--container-image"),
            ("srun --multi-prog x", "--multi-prog"),
            ("srun --mpi=pmix ./a.out", "distribution: {type: mpi}"),
            ("srun", "no command"),
            ("scontrol requeue 1", "agentctl"),
        ] {
            let (told, code) = run(line);
            assert!(code == 2 && told.join(" ").contains(said), "{line}: {told:?}");
        }
    }
}
