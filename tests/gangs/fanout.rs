//! Nodes that want the same snapshot get it from each other, whatever some of them do.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_cas::remote::bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use agent_cas::remote::bytestream::{
    QueryWriteStatusRequest, QueryWriteStatusResponse, ReadRequest, ReadResponse, WriteRequest, WriteResponse,
};
use agent_identity::{Credentials, Dialer, PeerTls, Proxy, ShownIdentity, Trust};
use agent_model::{JobDraft, SystemClock};
use agent_proto::transport::{self, Way};
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use agent_tests::chance::Chance;
use agent_tests::fleet::{Daemon, Fleet, Setup, TLS_PORT};
use agent_tests::hosts::address;
use agent_tests::simulated::{Seen, Simulated};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};
use bytes::Bytes;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tonic::codegen::tokio_stream::Stream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::gangs::bed::{completed, ctl, draft};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "D1",
        promise: "nodes that want one snapshot cost the controller one copy of it",
        run: one_copy,
    },
    Row {
        id: "D2",
        promise: "a source that freezes, dies or cannot be reached delays others a little",
        run: bad_luck,
    },
    Row {
        id: "D3",
        promise: "a source that lies is told, and whoever is no node gets nothing",
        run: bad_faith,
    },
];

const MB: usize = 1_000_000;

/// A project of so many bytes: half of it one file, the rest large and small ones, and the sums of all.
fn files(seed: u64, bytes: usize) -> Vec<(String, Vec<u8>)> {
    let mut chance = Chance::new(seed);
    let mut file = |name: String, size: usize| {
        let content: Vec<u8> = (0..size.div_ceil(8)).flat_map(|_| chance.number().to_le_bytes()).collect();
        (name, content)
    };
    let mut files = vec![file("large".into(), bytes / 2)];
    files.extend((0..10).map(|n| file(format!("middle/{n}"), bytes / 4 / 10)));
    files.extend((0..500).map(|n| file(format!("small/{}/{n}", n % 20), bytes / 4 / 500)));
    files
}

/// Submits a job of so many nodes, each of which says whether its files are right.
fn submit(fleet: &Fleet, nodes: usize, files: &[(String, Vec<u8>)]) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let mut sums = String::new();
    for (path, content) in files {
        let file = dir.path().join(path);
        fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
        fs::write(&file, content).expect("a file");
        sums += &format!("{}  {path}\n", agent_cas::digest_of(content).hex());
    }
    fs::write(dir.path().join("sums"), sums).expect("a file");
    let code = fleet.client.hasty(SOON).try_push_of(dir.path()).expect("a snapshot");
    let usual =
        draft(u32::try_from(nodes).expect("few"), "sha256sum --quiet -c sums && echo all is right", None);
    fleet.client.submit(&JobDraft { code: Some(code), ..usual })
}

#[track_caller]
fn check(fleet: &Fleet, job: &str, nodes: usize) {
    completed(fleet, job);
    for rank in 0..nodes {
        let log = crate::gangs::bed::log(fleet, job, u32::try_from(rank).expect("few"));
        assert!(log.contains("all is right"), "rank {rank}: {log}");
    }
}

/// How many copies of so many bytes left the controller while the job ran.
#[track_caller]
fn copies(fleet: &Fleet, nodes: usize, files: &[(String, Vec<u8>)]) -> f64 {
    let hosts = fleet.hosts.as_ref().expect("there are hosts");
    let before = hosts.sent(0);
    let job = submit(fleet, nodes, files);
    check(fleet, &job, nodes);
    let bytes: usize = files.iter().map(|(_, content)| content.len()).sum();
    (hosts.sent(0) - before) as f64 / bytes as f64
}

fn one_copy(tally: &mut Tally, scale: &Scale) {
    const NODES: usize = 4;
    let bytes = scale.of(48, 400) * MB;
    let fleet = Fleet::over_tls(&Setup { nodes: NODES, ..Setup::default() });
    tally.case("all at once", || {
        let left = copies(&fleet, NODES, &files(scale.seed, bytes));
        assert!(left <= 1.3, "{left:.2} copies left the controller");
    });
    tally.case("those that come later", || {
        let all = files(scale.seed + 1, bytes);
        let first = copies(&fleet, 1, &all);
        let others = copies(&fleet, NODES, &all);
        assert!(first + others <= 1.3, "{first:.2} and {others:.2} copies left the controller");
    });
    tally.case("who lacks what it had is missed by nobody", || {
        let all = files(scale.seed + 2, bytes);
        let first = submit(&fleet, 1, &all);
        check(&fleet, &first, 1);
        for node in &fleet.nodes {
            let blobs = node.state().join("cas/blobs");
            for prefix in fs::read_dir(blobs).expect("a store").flatten() {
                fs::remove_dir_all(prefix.path())
                    .and_then(|()| fs::create_dir(prefix.path()))
                    .expect("empty");
            }
        }
        let job = submit(&fleet, NODES, &all);
        check(&fleet, &job, NODES);
    });
    drop(fleet);
    tally.case("switched off", || {
        let node = "peer_port: off\n".to_owned();
        let fleet = Fleet::over_tls(&Setup { nodes: NODES, node, ..Setup::default() });
        let left = copies(&fleet, NODES, &files(scale.seed, bytes));
        assert!(left >= NODES as f64 - 0.1, "{left:.2} copies left the controller: who sent the others?");
    });
}

/// The nodes that others fetched from, by what they logged.
fn sources(fleet: &Fleet) -> Vec<usize> {
    let logs: String = fleet.nodes.iter().map(Daemon::log).collect();
    let chosen = |line: &&str| line.contains("fetching tree from another node");
    let named = |number: &usize| {
        let name = format!("node=n{number} ");
        logs.lines().filter(chosen).any(|line| line.contains(&name))
    };
    (1..=fleet.nodes.len()).filter(named).collect()
}

fn bad_luck(tally: &mut Tally, scale: &Scale) {
    const NODES: usize = 4;
    let bytes = scale.of(48, 200) * MB;
    for (what, seed) in [("frozen", 10), ("killed", 11), ("its wire is pulled", 12)] {
        tally.case(what, || {
            let mut fleet = Fleet::over_tls(&Setup { nodes: NODES, ..Setup::default() });
            let hosts = fleet.hosts.as_ref().expect("there are hosts");
            hosts.slow_down(0, 80);
            let job = submit(&fleet, NODES, &files(scale.seed + seed, bytes));
            let source = eventually("a node is a source", SOON, || sources(&fleet).first().copied());
            std::thread::sleep(Duration::from_secs(1));
            match what {
                "frozen" => fleet.nodes[source - 1].freeze(),
                "killed" => fleet.nodes[source - 1].bounce(),
                _ => hosts.plug(source, false),
            }
            std::thread::sleep(Duration::from_secs(8));
            fleet.nodes[source - 1].thaw();
            let hosts = fleet.hosts.as_ref().expect("there are hosts");
            hosts.plug(source, true);
            check(&fleet, &job, NODES);
            let logs: String = fleet.nodes.iter().map(Daemon::log).collect();
            assert!(logs.contains("fetching elsewhere"), "nobody noticed");
        });
    }
    tally.case("a firewall between nodes", || {
        let fleet = Fleet::over_tls(&Setup { nodes: 2, ..Setup::default() });
        let hosts = fleet.hosts.as_ref().expect("there are hosts");
        hosts.part(1, 2);
        hosts.part(2, 1);
        for round in 0..2 {
            let all = files(scale.seed + 20 + round, 20 * MB);
            let first = submit(&fleet, 1, &all);
            check(&fleet, &first, 1);
            // The other node cannot be told which one it should be: two jobs at a time are on both.
            let (b, c) = (submit(&fleet, 1, &all), submit(&fleet, 1, &all));
            check(&fleet, &b, 1);
            check(&fleet, &c, 1);
        }
        let logs: String = fleet.nodes.iter().map(Daemon::log).collect();
        let noticed = logs.matches("cannot be reached: fetching elsewhere").count();
        assert!(noticed <= 2, "it is forgotten at once: {noticed} times");
    });
}

/// A node that says it has a tree, and sends something else.
struct Liar {
    name: String,
    simulated: Simulated,
    runtime: Runtime,
}

#[derive(Clone)]
struct Garbage;

#[tonic::async_trait]
impl ByteStream for Garbage {
    type ReadStream = std::pin::Pin<Box<dyn Stream<Item = Result<ReadResponse, Status>> + Send>>;

    async fn read(&self, _: Request<ReadRequest>) -> Result<Response<Self::ReadStream>, Status> {
        let garbage = ReadResponse { data: Bytes::from(vec![7; 1 << 20]) };
        Ok(Response::new(Box::pin(tokio_stream::iter(vec![Ok(garbage); 200]))))
    }

    async fn write(&self, _: Request<Streaming<WriteRequest>>) -> Result<Response<WriteResponse>, Status> {
        Err(Status::unimplemented("it only lies"))
    }

    async fn query_write_status(
        &self,
        _: Request<QueryWriteStatusRequest>,
    ) -> Result<Response<QueryWriteStatusResponse>, Status> {
        Err(Status::unimplemented("it only lies"))
    }
}

impl Liar {
    /// Lives on a host of a fleet.
    fn start(fleet: &Fleet, host: usize, name: &str) -> Liar {
        let (token, hosts) = (fleet.client.token(1), fleet.hosts.as_ref().expect("there are hosts"));
        // Every socket must be made on the host: so must the threads.
        let runtime = hosts.inside(host, || {
            let runtime =
                Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
            // The thread is there, and so on the host, before this one leaves it.
            runtime.block_on(runtime.spawn(async {})).expect("a thread");
            runtime
        });
        let (controller, called) = (address(0), name.to_owned());
        let joined = async move { Simulated::join((&controller, TLS_PORT), &token, &called).await };
        let simulated = runtime.block_on(runtime.spawn(joined)).expect("no panic").expect("it joins");
        let (seen, mut sees) = watch::channel(Seen::default());
        runtime.spawn(simulated.clone().live(0, seen));
        let connected = async move { sees.wait_for(|seen| seen.is_connected).await.map(|_| ()) };
        runtime.block_on(connected).expect("it lives");
        Liar { name: name.to_owned(), simulated, runtime }
    }

    /// Whether a node told the controller, and the controller everybody who looks.
    fn is_told(&self, fleet: &Fleet) -> bool {
        let shown = ctl(fleet, &["doctor"]).stdout;
        let told = shown.contains("sent wrong bytes");
        assert_eq!(told, fleet.controller.log().contains("sent wrong bytes"), "{shown}");
        told
    }

    /// Says that it has this tree, and serves garbage for it.
    fn claims(&self, fleet: &Fleet, host: usize, tree: &str) {
        let listener = fleet
            .hosts
            .as_ref()
            .expect("hosts")
            .inside(host, || std::net::TcpListener::bind((address(host), 0)).expect("a port"));
        listener.set_nonblocking(true).expect("a listener");
        let at = listener.local_addr().expect("an address");
        let credentials = self.simulated.credentials.clone();
        self.runtime.spawn(async move {
            let authority = credentials.authority().expect("an authority");
            let shown = ShownIdentity::new(&credentials).expect("an identity");
            let tls = PeerTls::new(&authority, shown, Arc::new(SystemClock)).expect("TLS");
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            let (sender, connections) = tokio::sync::mpsc::channel(4);
            let server = tonic::transport::Server::builder()
                .add_service(ByteStreamServer::new(Garbage))
                .serve_with_incoming(tokio_stream::wrappers::ReceiverStream::new(connections));
            drop(tokio::runtime::Handle::current().spawn(server));
            while let Ok((stream, _)) = listener.accept().await {
                if let Ok((stream, _)) = tls.accept(stream).await {
                    let _ = sender.send(Ok::<_, std::io::Error>(stream)).await;
                }
            }
        });
        let request = v1::FindPeerRequest {
            node: self.name.clone(),
            tree: tree.to_owned(),
            address: at.to_string(),
            ..v1::FindPeerRequest::default()
        };
        let channel = {
            let _in = self.runtime.enter();
            self.simulated.channel()
        };
        for over in [false, true] {
            let (request, channel) = (v1::FindPeerRequest { over, ..request.clone() }, channel.clone());
            let told = async move { WorkerClient::new(channel).find_peer(request).await };
            self.runtime.block_on(self.runtime.spawn(told)).expect("no panic").expect("it is believed");
        }
    }
}

/// A liar claims to have a tree, and a node that wants it gets it all the same.
fn lie_once(fleet: &Fleet, liar: &Liar, seed: u64) {
    let mut all = files(seed, 40 * MB);
    all.retain(|(path, _)| path == "large"); // it lies in streams only
    // The tree is known before anybody fetches it.
    let job = submit(fleet, 1, &all);
    let root = root_of(fleet, &job);
    check(fleet, &job, 1);
    let begun = Instant::now();
    liar.claims(fleet, 2, &root);
    let job = submit(fleet, 2, &all);
    check(fleet, &job, 2);
    assert!(begun.elapsed() < SOON);
}

/// What the log of a node says about sources that failed.
fn found_elsewhere(node: &Daemon) -> String {
    node.log()
        .lines()
        .filter(|line| line.contains("fetching elsewhere"))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Makes a call to the port of a node, from another host; the node must be `name`.
fn call(fleet: &Fleet, from: usize, to: SocketAddr, name: &str, shows: &Credentials) -> Result<(), Status> {
    let authority = shows.authority().expect("an authority");
    let call = async {
        let shown = ShownIdentity::new(shows).expect("an identity");
        let host = to.ip().to_string();
        let trust = Trust::Node(authority, name.parse().expect("a name"));
        let dialer =
            Dialer::new((&host, to.port()), trust, Some(shown), Proxy::default(), Arc::new(SystemClock));
        let channel = transport::dial(transport::endpoint(), Way::Tls(dialer.expect("a way")));
        let mut client = agent_cas::remote::bytestream::byte_stream_client::ByteStreamClient::new(channel);
        let resource_name = format!("blobs/{}/9", "0".repeat(64));
        client.read(ReadRequest { resource_name, ..ReadRequest::default() }).await.map(|_| ())
    };
    fleet.hosts.as_ref().expect("hosts").inside(from, || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(20), call).await.expect("an answer in time")
        })
    })
}

/// The port at which a node serves, by its log.
fn peer_port(fleet: &Fleet, node: usize) -> SocketAddr {
    let log = fleet.nodes[node - 1].log();
    let line = log.lines().rfind(|line| line.contains("serving blobs to other nodes")).expect("it says so");
    let port = line.split("port=").nth(1).expect("a port");
    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
    format!("{}:{port}", address(node)).parse().expect("an address")
}

fn root_of(fleet: &Fleet, job: &str) -> String {
    let job = fleet.client.job(job);
    job.spec.expect("it has a specification").code
}

fn bad_faith(tally: &mut Tally, scale: &Scale) {
    let fleet = Fleet::over_tls(&Setup { nodes: 2, ..Setup::default() });
    let mut told_of = None;
    tally.case("a liar", || {
        // Where everything is slow, a liar is taken for one who is away, and not asked for a while: another one lies.
        for number in 0..4 {
            let liar = Liar::start(&fleet, 2, &format!("liar{number}"));
            lie_once(&fleet, &liar, scale.seed + 30 + number);
            if told_of.insert(liar).is_told(&fleet) {
                return;
            }
        }
        panic!("nobody told the controller: {}", fleet.nodes.iter().map(found_elsewhere).collect::<String>());
    });
    let liar = told_of.expect("a liar");
    let of_user = {
        let code = ctl(&fleet, &["user", "add", "ada", "--json"]).ok().json();
        login(&fleet, code["token"].as_str().expect("a code"))
    };
    let port = peer_port(&fleet, 1);
    let refused = |called: &Result<(), Status>| {
        called.as_ref().is_err_and(|status| !matches!(status.code(), Code::NotFound | Code::Ok))
    };
    tally.case("a node may ask", || {
        let called = call(&fleet, 2, port, "n1", &liar.simulated.credentials);
        assert!(called.as_ref().is_err_and(|status| status.code() == Code::NotFound), "{called:?}");
        let called = call(&fleet, 2, port, "n2", &liar.simulated.credentials);
        assert!(refused(&called), "it is another node than was wanted: {called:?}");
    });
    tally.case("a user may not", || {
        let called = call(&fleet, 2, port, "n1", &of_user);
        assert!(refused(&called), "{called:?}");
    });
    tally.case("nor who was removed", || {
        ctl(&fleet, &["node", "remove", &liar.name, "--lose-jobs"]).ok();
        let called = call(&fleet, 2, port, "n1", &liar.simulated.credentials);
        assert!(refused(&called), "{called:?}");
    });
}

/// The credentials of a user who logs in with a code.
fn login(fleet: &Fleet, code: &str) -> Credentials {
    let home = fleet.home().join("laptop");
    fs::create_dir_all(&home).expect("a directory");
    let to = format!("https://{}:{TLS_PORT}", address(0));
    let starter = fleet.hosts.as_ref().expect("hosts").on_network_of(2);
    logged_in(&starter, &home, &to, code)
}

#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
fn logged_in(starter: &[String], home: &Path, to: &str, code: &str) -> Credentials {
    let file = home.join("code");
    fs::write(&file, code).expect("a file");
    let mut command = std::process::Command::new(&starter[0]);
    command.args(&starter[1..]).arg(agent_tests::binaries().join("agentctl"));
    command.args(["login", to]).stdin(fs::File::open(&file).expect("a file"));
    command.env("HOME", home).env("XDG_CONFIG_HOME", home.join("config"));
    agent_tests::finish(&mut command).ok();
    let text = fs::read_to_string(home.join("config/agentctl/contexts.json")).expect("contexts");
    let contexts: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let found = find_credentials(&contexts).expect("an identity in it");
    serde_json::from_value(found).expect("credentials")
}

fn find_credentials(value: &serde_json::Value) -> Option<serde_json::Value> {
    match value {
        serde_json::Value::Object(map) if map.contains_key("certificate") => Some(value.clone()),
        serde_json::Value::Object(map) => map.values().find_map(find_credentials),
        serde_json::Value::Array(all) => all.iter().find_map(find_credentials),
        _ => None,
    }
}
