//! The variables of a rank among several, and how its command is started. Pure.
//!
//! The names are those that frameworks read, and those that old and new scripts for the cloud expect.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use agent_model::job::{Distribution, JobDraft};
use agent_model::protocol::gang::{RankPlace, Roster, Secret};
use agent_shim::JobDir;
use agent_shim::gang::{GangLaunch, Host, Mpi, Way};
use serde_json::json;

use crate::worker::rendezvous::ports;

/// The place of a rank, and those of all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seating {
    pub(crate) rank: u32,
    pub(crate) roster: Roster,
    pub(crate) secret: Secret,
    /// The name of the interface of its address; may be empty.
    pub(crate) interface: String,
}

/// How many ports each rank of a job needs.
pub(crate) fn ports_of(job: &JobDraft) -> u16 {
    let nodes = job.resources.nodes;
    let of =
        |distribution: &Distribution| (0..nodes.min(2)).map(|rank| distribution.processes(rank, nodes)).max();
    let processes = job.distribution.as_ref().and_then(of).unwrap_or(1);
    ports::PROCESS + u16::try_from(processes.clamp(1, 4096)).unwrap_or(1)
}

impl Seating {
    fn place(&self, rank: u32) -> Option<&RankPlace> {
        self.roster.seat(rank).map(|seat| &seat.place)
    }

    fn own(&self) -> Option<&RankPlace> {
        self.place(self.rank)
    }

    fn nodes(&self) -> u32 {
        u32::try_from(self.roster.0.len()).unwrap_or(u32::MAX)
    }

    /// Where each rank is reached, in their order.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.roster.0.iter().map(|seat| seat.place.address.to_string()).collect()
    }

    /// The processes of the command on a node.
    fn processes(&self, job: &JobDraft, rank: u32) -> u32 {
        let nodes = self.nodes();
        job.distribution.as_ref().map_or(1, |distribution| distribution.processes(rank, nodes))
    }

    /// How many processes the nodes before this rank have.
    fn before(&self, job: &JobDraft, rank: u32) -> u32 {
        (0..rank).map(|rank| self.processes(job, rank)).sum()
    }

    /// The variables of the command, whichever process of this rank it is.
    pub(crate) fn variables(&self, job: &JobDraft, dir: &JobDir) -> BTreeMap<String, String> {
        let (Some(first), Some(own)) = (self.place(0), self.own()) else { return BTreeMap::new() };
        let (nodes, addresses) = (self.nodes(), self.addresses());
        let world = self.before(job, nodes);
        let service = first.port(ports::SERVICE);
        let mut variables: BTreeMap<String, String> = [
            ("AGENTD_RANK", self.rank.to_string()),
            ("AGENTD_NODES", nodes.to_string()),
            ("AGENTD_ADDRESS", own.address.to_string()),
            ("AGENTD_PORTS", format!("{}-{}", own.first_port, own.first_port + own.ports - 1)),
            ("MASTER_ADDR", first.address.to_string()),
            ("MASTER_PORT", first.port(ports::MASTER).to_string()),
            ("NODE_RANK", self.rank.to_string()),
            ("WORLD_SIZE", world.to_string()),
            ("AZ_BATCH_HOST_LIST", addresses.join(",")),
            ("AZ_BATCH_NODE_LIST", addresses.join(";")),
            ("AZ_BATCH_MASTER_NODE", SocketAddr::new(first.address, service).to_string()),
            ("AZ_BATCH_IS_CURRENT_NODE_MASTER", (self.rank == 0).to_string()),
            (
                "AZ_BATCH_NODE_ID",
                self.roster.seat(self.rank).map_or_else(String::new, |seat| seat.node.to_string()),
            ),
            ("AZ_BATCHAI_JOB_MASTER_NODE_IP", first.address.to_string()),
            ("AZ_BATCHAI_MPI_MASTER_NODE", first.address.to_string()),
            ("AZ_BATCHAI_MPI_HOST_FILE", dir.work().join(".agentd/hosts").display().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        // Without these, the libraries may choose the interface of a bridge that exists on every machine.
        if !own.address.is_loopback() && !self.interface.is_empty() {
            for name in ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] {
                variables.insert(name.to_owned(), self.interface.clone());
            }
        }
        if !matches!(job.distribution, Some(Distribution::Mpi { .. })) {
            variables.extend(self.process(job, 0));
        }
        variables
    }

    /// The variables of one process of this rank.
    fn process(&self, job: &JobDraft, local: u32) -> BTreeMap<String, String> {
        let index = self.before(job, self.rank) + local;
        let mut variables: BTreeMap<String, String> = [
            ("RANK", index.to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", self.processes(job, self.rank).to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if let Some(Distribution::TensorFlow { workers, .. }) = job.distribution {
            variables.extend(self.task(job, index, workers));
        }
        variables
    }

    /// The variables of one task of a TensorFlow cluster: workers come first, then parameter servers.
    fn task(&self, job: &JobDraft, task: u32, workers: u32) -> [(String, String); 5] {
        let tasks: Vec<String> = (0..self.nodes())
            .flat_map(|rank| {
                (0..self.processes(job, rank)).filter_map(move |local| {
                    let port = u16::try_from(local).ok().map(|local| ports::PROCESS + local)?;
                    let place = self.place(rank)?;
                    Some(format!("{}:{}", place.address, place.port(port)))
                })
            })
            .collect();
        let (worker, serving) = tasks.split_at(tasks.len().min(workers as usize));
        let (kind, index) = if task < workers { ("worker", task) } else { ("ps", task - workers) };
        let cluster = match serving.is_empty() {
            true => json!({ "worker": worker }),
            false => json!({ "worker": worker, "ps": serving }),
        };
        let config =
            json!({ "cluster": cluster, "task": { "type": kind, "index": index }, "environment": "cloud" });
        [
            ("TF_CONFIG", config.to_string()),
            ("AZ_BATCHAI_TASK_TYPE", kind.to_owned()),
            ("AZ_BATCHAI_TASK_INDEX", index.to_string()),
            ("AZ_BATCHAI_WORKER_HOSTS", worker.join(",")),
            ("AZ_BATCHAI_PS_HOSTS", serving.join(",")),
        ]
        .map(|(name, value)| (name.to_owned(), value))
    }

    /// The command, preceded by what must be started before it.
    pub(crate) fn command(&self, job: &JobDraft, command: String) -> String {
        let (Some(first), Some(own)) = (self.place(0), self.own()) else { return command };
        match &job.distribution {
            Some(Distribution::Ray { .. }) => ray(job, self.rank, first, own, &command),
            Some(Distribution::Spark) => spark(self.rank, first, own, &command),
            _ => command,
        }
    }

    /// How the command is started.
    pub(crate) fn launch(&self, job: &JobDraft) -> GangLaunch {
        let host = |(seat, rank): (&agent_model::protocol::gang::Seat, u32)| Host {
            address: seat.place.address,
            port: seat.place.port(ports::LAUNCH),
            ports: (seat.place.port(ports::PROCESS), seat.place.port(u16::MAX)),
            slots: self.processes(job, rank),
        };
        let way = match &job.distribution {
            Some(Distribution::Mpi { .. }) if self.rank > 0 => Way::Lend,
            Some(Distribution::Mpi { .. }) => Way::Lead(self.mpi()),
            _ => match self.processes(job, self.rank) {
                0 | 1 => Way::Once,
                several => Way::Each((0..several).map(|local| self.process(job, local)).collect()),
            },
        };
        let hosts = self.roster.0.iter().zip(0..).map(host).collect();
        GangLaunch { rank: self.rank, hosts, secret: self.secret.clone(), way }
    }

    fn mpi(&self) -> Mpi {
        let mut networks: Vec<String> = self.roster.0.iter().map(|seat| seat.place.network.clone()).collect();
        networks.sort();
        networks.dedup();
        let alike =
            |place: &RankPlace| self.roster.0.iter().all(|seat| seat.place.first_port == place.first_port);
        let ports = self.own().filter(|own| alike(own)).map(|own| {
            let last = own.first_port + own.ports - 1;
            [(own.port(ports::SERVICE), own.port(ports::PROCESS) - 1), (own.port(ports::PROCESS), last)]
        });
        Mpi { networks, interface: self.interface.clone(), ports }
    }
}

/// A text quoted as one word for a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The command in the shell that it would run in otherwise.
fn in_its_shell(command: &str) -> String {
    format!("\"${{BASH:-sh}}\" -c {}", quoted(command))
}

fn ray(job: &JobDraft, rank: u32, first: &RankPlace, own: &RankPlace, command: &str) -> String {
    let Some(Distribution::Ray { port, dashboard, dashboard_port, head_arguments, worker_arguments }) =
        &job.distribution
    else {
        return command.to_owned();
    };
    let port = if *port == 0 { first.port(ports::MASTER) } else { *port };
    let head = SocketAddr::new(first.address, port).to_string();
    if rank > 0 {
        return format!(
            "tries=0\n\
             while ! ray start --address={head} --node-ip-address={} --block {worker_arguments}; do\n\
             tries=$((tries + 1))\n\
             if [ $tries -ge 60 ]; then echo 'agentd: the head of Ray does not answer' >&2; exit 1; fi\n\
             sleep 2\n\
             done\n",
            own.address
        );
    }
    let mut board = dashboard.map(|on| format!(" --include-dashboard={on}")).unwrap_or_default();
    if *dashboard_port > 0 {
        board += &format!(" --dashboard-port={dashboard_port}");
    }
    format!(
        "ray start --head --node-ip-address={} --port={port}{board} {head_arguments} || exit\n\
         export RAY_ADDRESS={head}\n\
         {}\n",
        own.address,
        in_its_shell(command)
    )
}

fn spark(rank: u32, first: &RankPlace, own: &RankPlace, command: &str) -> String {
    let (port, web, worker_web) =
        (first.port(ports::MASTER), first.port(ports::SERVICE), own.port(ports::SERVICE + 1));
    let master = format!("spark://{}", SocketAddr::new(first.address, port));
    let worker = format!(
        "spark-class org.apache.spark.deploy.worker.Worker --host {} --webui-port {worker_web} \
         --work-dir \"$PWD/.agentd/spark\" {master}",
        own.address
    );
    // Otherwise each Spark program looks up the machine's name, which is often a loopback address or unknown.
    let address = format!("export SPARK_LOCAL_IP={}\n", own.address);
    if rank > 0 {
        return format!("{address}exec {worker}\n");
    }
    format!(
        "{address}\
         spark-class org.apache.spark.deploy.master.Master --host {} --port {port} --webui-port {web} &\n\
         {worker} &\n\
         export MASTER={master}\n\
         export PYSPARK_SUBMIT_ARGS=\"--master {master} pyspark-shell\"\n\
         {}\n",
        first.address,
        in_its_shell(command)
    )
}

#[cfg(test)]
mod tests {
    use agent_model::job::Resources;
    use agent_model::protocol::gang::Seat;

    use super::*;

    fn seating(rank: u32, nodes: u8) -> Seating {
        let seat = |last: u8| Seat {
            node: format!("n{last}").parse().unwrap(),
            place: RankPlace {
                address: [10, 0, 0, last + 2].into(),
                network: "10.0.0.0/24".into(),
                first_port: 20_000,
                ports: 6,
            },
        };
        let roster = Roster((0..nodes).map(seat).collect());
        Seating { rank, roster, secret: Secret::new("s"), interface: "eth0".into() }
    }

    fn job(nodes: u32, distribution: Option<Distribution>) -> JobDraft {
        let resources = Resources { nodes, ..Resources::default() };
        JobDraft { command: "x".into(), resources, distribution, ..JobDraft::default() }
    }

    fn variable(seating: &Seating, job: &JobDraft, name: &str) -> String {
        seating.variables(job, &JobDir::new("/j/a.1.1")).get(name).cloned().unwrap_or_default()
    }

    #[test]
    fn test_every_rank_knows_the_others() {
        let (seating, job) = (seating(1, 3), job(3, None));
        for (name, value) in [
            ("MASTER_ADDR", "10.0.0.2"),
            ("MASTER_PORT", "20000"),
            ("NODE_RANK", "1"),
            ("RANK", "1"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "3"),
            ("AZ_BATCH_HOST_LIST", "10.0.0.2,10.0.0.3,10.0.0.4"),
            ("AZ_BATCH_NODE_LIST", "10.0.0.2;10.0.0.3;10.0.0.4"),
            ("AZ_BATCH_MASTER_NODE", "10.0.0.2:20002"),
            ("AZ_BATCH_IS_CURRENT_NODE_MASTER", "false"),
            ("AZ_BATCHAI_MPI_HOST_FILE", "/j/a.1.1/job/work/.agentd/hosts"),
            ("AGENTD_PORTS", "20000-20005"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
        ] {
            assert_eq!(variable(&seating, &job, name), value, "{name}");
        }
        assert_eq!(seating.launch(&job).way, Way::Once);
        assert_eq!(seating.command(&job, "x".into()), "x");
    }

    #[test]
    fn test_processes_of_pytorch_are_numbered_through() {
        let (seating, job) = (seating(1, 2), job(2, Some(Distribution::PyTorch { processes: 2 })));
        assert_eq!(variable(&seating, &job, "WORLD_SIZE"), "4");
        let Way::Each(each) = seating.launch(&job).way else { panic!("one process") };
        let of = |index: usize| [&each[index]["RANK"], &each[index]["LOCAL_RANK"]].map(String::as_str);
        assert_eq!((each.len(), of(0), of(1)), (2, ["2", "0"], ["3", "1"]));
        assert_eq!(ports_of(&job), 6);
    }

    #[test]
    fn test_tensorflow_is_told_its_cluster() {
        let tensorflow = Distribution::TensorFlow { workers: 2, parameter_servers: 1 };
        let (seating, job) = (seating(1, 3), job(3, Some(tensorflow)));
        assert_eq!(
            variable(&seating, &job, "TF_CONFIG"),
            r#"{"cluster":{"ps":["10.0.0.4:20004"],"worker":["10.0.0.2:20004","10.0.0.3:20004"]},"environment":"cloud","task":{"index":1,"type":"worker"}}"#
        );
        let last = Seating { rank: 2, ..seating };
        assert!(variable(&last, &job, "TF_CONFIG").contains(r#""task":{"index":0,"type":"ps"}"#));
        assert_eq!(variable(&last, &job, "AZ_BATCHAI_TASK_TYPE"), "ps");
    }

    #[test]
    fn test_mpi_is_led_by_the_first_and_the_others_lend_themselves() {
        let job = job(2, Some(Distribution::Mpi { processes: 2 }));
        assert_eq!(seating(1, 2).launch(&job).way, Way::Lend);
        let Way::Lead(mpi) = seating(0, 2).launch(&job).way else { panic!("it does not lead") };
        assert_eq!(mpi.ports, Some([(20_002, 20_003), (20_004, 20_005)]));
        assert_eq!(mpi.networks, ["10.0.0.0/24"]);
        assert!(variable(&seating(0, 2), &job, "RANK").is_empty(), "the library says it");
        let mut odd = seating(0, 2);
        odd.roster.0[1].place.first_port = 20_010;
        let Way::Lead(mpi) = odd.launch(&job).way else { panic!("it does not lead") };
        assert_eq!(mpi.ports, None, "there is one setting for all");
    }

    #[test]
    fn test_ray_and_spark_surround_the_command() {
        let ray = Distribution::Ray {
            port: 0,
            dashboard: Some(false),
            dashboard_port: 0,
            head_arguments: "--num-cpus=1".into(),
            worker_arguments: "--num-cpus=2".into(),
        };
        let ray = job(2, Some(ray));
        let head = seating(0, 2).command(&ray, "python 'a b.py'".into());
        assert!(head.contains("--port=20000 --include-dashboard=false --num-cpus=1 || exit"), "{head}");
        assert!(head.contains(r#"-c 'python '\''a b.py'\'''"#), "{head}");
        assert!(
            seating(1, 2)
                .command(&ray, "x".into())
                .contains("--address=10.0.0.2:20000 --node-ip-address=10.0.0.3")
        );
        let spark = job(2, Some(Distribution::Spark));
        assert!(seating(0, 2).command(&spark, "x".into()).contains("export MASTER=spark://10.0.0.2:20000"));
        assert!(
            seating(1, 2)
                .command(&spark, "x".into())
                .starts_with("export SPARK_LOCAL_IP=10.0.0.3\nexec spark-class")
        );
    }
}
