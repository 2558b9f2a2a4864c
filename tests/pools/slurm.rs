//! Group S: nodes that are jobs of a Slurm cluster, with a real controller and a real node of Slurm.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use agent_control::provider::{MachinePriority, MachineState};
use agent_tests::fleet::processes_below;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Ran, SOON, binaries, end_all, eventually, finish, signal};
use rustix::process::Signal;

use crate::pools::bed::{Bed, Lab, free_port, refused};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "S1",
        promise: "slurm: a job of a real cluster joins as a node, and leaves with its allocation",
        run: joins,
    },
    Row { id: "S2", promise: "slurm: a full cluster, what it refuses, jobs of others", run: odd },
];

/// A cluster of one node with two processors. The processes of Slurm and of its jobs end with it.
pub(crate) struct Cluster {
    dir: PathBuf,
    daemons: Vec<Child>,
}

impl Cluster {
    pub(crate) fn start(dir: PathBuf) -> Cluster {
        fs::create_dir_all(dir.join("munge")).expect("a directory");
        for name in ["state", "spool", "scratch"] {
            fs::create_dir(dir.join(name)).expect("a directory");
        }
        let mut open = Some(dir.as_path());
        // The daemon of munge wants everybody to be able to see its socket.
        while let Some(at) =
            open.filter(|at| at.starts_with(std::env::temp_dir()) && *at != std::env::temp_dir())
        {
            fs::set_permissions(at, PermissionsExt::from_mode(0o755)).expect("it is ours");
            open = at.parent();
        }
        let mut cluster = Cluster { dir, daemons: Vec::new() };
        cluster.configure();
        cluster.daemon("munged", &cluster.munge_words());
        let socket = cluster.dir.join("munge/socket");
        eventually("munged listens", SOON, || socket.exists().then_some(()));
        let config = cluster.config();
        cluster.daemon("slurmctld", &["-D".into(), "-f".into(), config.clone()]);
        cluster.daemon("slurmd", &["-D".into(), "-f".into(), config]);
        eventually("the cluster is idle", SOON, || {
            let said = cluster.ask("sinfo", &["--noheader", "--format=%T"]);
            said.stdout.contains("idle").then_some(())
        });
        cluster
    }

    fn config(&self) -> String {
        self.dir.join("slurm.conf").display().to_string()
    }

    fn munge_words(&self) -> Vec<String> {
        let key = self.dir.join("munge/key");
        fs::write(&key, [7; 1024]).expect("a key");
        fs::set_permissions(&key, PermissionsExt::from_mode(0o400)).expect("it is ours");
        let at =
            |option: &str, name: &str| format!("--{option}={}", self.dir.join("munge").join(name).display());
        let mut words = vec!["--foreground".to_owned(), "--force".to_owned()];
        words.extend([
            at("socket", "socket"),
            at("key-file", "key"),
            at("pid-file", "pid"),
            at("log-file", "log"),
            at("seed-file", "seed"),
        ]);
        words
    }

    fn configure(&self) {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
        let host = host.trim().split('.').next().unwrap_or("localhost").to_owned();
        let (dir, ports) = (self.dir.display(), [free_port(), free_port()]);
        let text = format!(
            "ClusterName=tests\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\n\
             AuthType=auth/munge\nAuthInfo=socket={dir}/munge/socket\nCredType=cred/munge\n\
             SlurmctldPort={}\nSlurmdPort={}\nStateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool\n\
             SlurmctldPidFile={dir}/slurmctld.pid\nSlurmdPidFile={dir}/slurmd.pid\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nSwitchType=switch/none\n\
             ReturnToService=2\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n\
             SchedulerType=sched/backfill\nSchedulerParameters=batch_sched_delay=1\nKillWait=10\nMinJobAge=300\n\
             JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
             PropagateResourceLimits=NONE\nNodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN\n\
             PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n\
             PartitionName=other Nodes={host} MaxTime=INFINITE State=UP\n",
            ports[0], ports[1]
        );
        fs::write(self.dir.join("slurm.conf"), text).expect("a configuration");
        fs::write(self.dir.join("cgroup.conf"), "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
            .expect("a configuration");
    }

    #[allow(clippy::disallowed_methods, reason = "runs what the tests need")]
    fn daemon(&mut self, name: &str, words: &[String]) {
        use std::os::unix::process::CommandExt as _;
        let log = File::create(self.dir.join(format!("{name}.log"))).expect("a log");
        let usual = Path::new("/usr/sbin").join(name);
        let mut command = Command::new(if usual.exists() { usual } else { name.into() });
        command.args(words).env("SLURM_CONF", self.config()).current_dir(&self.dir).process_group(0);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        let started = command.spawn();
        self.daemons.push(started.unwrap_or_else(|error| {
            panic!("{name} does not start: {error}; packages slurmctld, slurmd, slurm-client and munge")
        }));
    }

    #[allow(clippy::disallowed_methods, reason = "asks what it tests")]
    fn ask(&self, program: &str, words: &[&str]) -> Ran {
        finish(Command::new(program).args(words).env("SLURM_CONF", self.config()))
    }

    /// The daemons of jobs.
    fn agents(&self) -> Vec<u32> {
        processes_below(&self.dir.join("scratch"))
    }

    pub(crate) fn lab<'a>(&self, bed: &'a Bed, more: &str) -> Lab<'a> {
        bed.provider(&self.config_of(more))
    }

    /// What a file of providers says of it.
    pub(crate) fn config_of(&self, more: &str) -> String {
        let dir = self.dir.display();
        let agentd = binaries().join("agentd").display().to_string();
        format!(
            "{{use: slurm, config: {dir}/slurm.conf, agentd: '{agentd}', scratch: {dir}/scratch, log: {dir}/job.log, {more}}}"
        )
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.ask("scancel", &["--user=root", "--signal=KILL", "--full"]);
        for pid in self.agents() {
            signal(pid, Signal::KILL);
        }
        for daemon in self.daemons.iter_mut().rev() {
            signal(daemon.id(), Signal::KILL);
            let _ = daemon.wait();
        }
        // What keeps a step is a process of its own, and writes until it is gone.
        end_all(|| processes_below(&self.dir));
    }
}

fn joins(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new();
    let cluster = Cluster::start(bed.path("slurm"));
    let lab = cluster.lab(&bed, "partition: all, node: {cpus: 1}");
    let begun = std::time::Instant::now();
    let Some(id) = tally.case("a job of the cluster joins", || {
        let id = lab.create("r-1", "job-1").expect("a job");
        bed.joined("job-1");
        assert_eq!(lab.there(), [(id.clone(), "r-1".to_owned(), "job-1".to_owned())]);
        id
    }) else {
        return;
    };
    tally.note(format!("from the wish to a ready node: {:.1} s", begun.elapsed().as_secs_f64()));
    tally.case("the same request is the same job", || {
        assert_eq!(lab.create("r-1", "job-1").expect("a job"), id);
        assert_eq!(lab.there().len(), 1);
    });
    tally.case("a second one beside it, found by its request alone", || {
        lab.create("r-2", "job-2").expect("a job");
        bed.joined("job-2");
        lab.delete_request("r-2").expect("it goes");
        eventually("one is left", SOON, || (lab.there().len() == 1).then_some(()));
    });
    tally.case("it leaves with its allocation, and leaves nothing", || {
        lab.delete(&id).expect("it goes");
        lab.is(&id, MachineState::Gone);
        eventually("its processes are gone", SOON, || cluster.agents().is_empty().then_some(()));
        let scratch = cluster.dir.join("scratch");
        eventually("its state is gone", SOON, || fs::read_dir(&scratch).ok()?.next().is_none().then_some(()));
        lab.delete(&id).expect("it is gone");
    });
    tally.case("one that Slurm ended is gone, and another may have the request", || {
        let id = lab.create("r-3", "job-3").expect("a job");
        bed.joined("job-3");
        cluster.ask("scancel", &[&id]).ok();
        lab.is(&id, MachineState::Gone);
        let again = lab.create("r-3", "job-3b").expect("a job");
        assert_ne!(again, id);
        lab.delete(&again).expect("it goes");
    });
}

fn odd(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new();
    let cluster = Cluster::start(bed.path("slurm"));
    tally.case("what Slurm refuses is told with its words", || {
        let none = cluster.lab(&bed, "partition: nowhere");
        assert_eq!(refused(none.create("r-1", "n-1"), "invalid partition"), "permanent");
        let low = cluster.lab(&bed, "low_qos: cheap, sbatch_args: [--no-such-option]");
        assert_eq!(refused(low.create_as("r-1", "n-1", MachinePriority::Low), "sbatch"), "temporary");
    });
    tally.case("one that waits for room is being created, and can be taken back", || {
        let lab = cluster.lab(&bed, "node: {cpus: 2}");
        let first = lab.create("r-1", "n-1").expect("a job");
        let second = lab.create("r-2", "n-2").expect("a job");
        bed.joined("n-1");
        lab.is(&second, MachineState::Creating);
        lab.delete(&second).expect("it goes");
        lab.is(&second, MachineState::Gone);
        lab.delete(&first).expect("it goes");
        lab.is(&first, MachineState::Gone);
    });
    tally.case("a job of somebody else is not listed and not deleted", || {
        let lab = cluster.lab(&bed, "node: {cpus: 1}");
        let words = ["--parsable", "--job-name=agentd.other.r-1.n", "--output=/dev/null", "--wrap=sleep 600"];
        let id = cluster.ask("sbatch", &words).ok().stdout.trim().to_owned();
        assert!(lab.list().iter().all(|one| one.id != id));
        lab.delete(&id).expect("it is none of ours");
        assert!(cluster.ask("squeue", &["--noheader", "--format=%i"]).ok().stdout.contains(&id));
    });
}
