//! Group E: blobs in a server that is not ours. The daemon is told one address and runs as always; the server is
//! stopped, started again and odd while jobs go on.
//!
//! The server is the one of [`peers`](crate::snapshots::peers), which keeps what it takes in files.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use agent_cas::{Remote, digest_of, snapshot};
use agent_model::{Digest, JobDraft};
use agent_tests::client::{channel, runtime};
use agent_tests::eventually;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};

use crate::snapshots::peers::Server;

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "E1",
        promise: "a whole job runs with its blobs in another server, on one box and on a node",
        run: whole_jobs,
    },
    Row {
        id: "E2",
        promise: "jobs wait for a server of blobs that is away, say so, and go on when it is back",
        run: away,
    },
    Row { id: "E3", promise: "a daemon runs beside a server that cannot be used, and says why", run: odd },
];

/// For what waits until a server has been given up once, on however slow a machine.
const LONG: Duration = Duration::from_secs(180);

/// A server at a port of its own, which can be stopped and started.
struct Place {
    port: u16,
    home: tempfile::TempDir,
    /// Its key and its certificate, where it encrypts.
    seal: Option<tempfile::TempDir>,
    server: Option<Server>,
}

impl Place {
    fn new() -> Place {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        Place { port, home: tempfile::tempdir().expect("a directory"), seal: None, server: None }
    }

    /// One whose way is encrypted, with a certificate that only they trust who are told.
    #[allow(clippy::disallowed_methods, reason = "makes what it tests with")]
    fn sealed() -> Place {
        let seal = tempfile::tempdir().expect("a directory");
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=blobs"])
            .args(["-addext", "subjectAltName=IP:127.0.0.1"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .current_dir(seal.path())
            .output()
            .expect("openssl");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Place { seal: Some(seal), ..Place::new() }
    }

    fn start(&mut self, habit: &str) {
        let address = format!("127.0.0.1:{}", self.port);
        let places = [Some(&self.home), self.seal.as_ref()].into_iter().flatten();
        let places: Vec<&Path> = places.map(tempfile::TempDir::path).collect();
        self.server = Some(Server::start(&address, habit, &places));
    }

    /// Ends it as a crash does.
    fn kill(&mut self) {
        self.server = None;
    }

    fn has(&self, digest: Digest) -> bool {
        self.home.path().join(digest.hex()).exists()
    }

    /// A fleet whose blobs are there, and whose daemons trust its certificate.
    fn fleet(&self, nodes: usize) -> Fleet {
        let mut fleet = self.strangers(nodes);
        if let Some(seal) = &self.seal {
            let certificate = seal.path().join("cert.pem").display().to_string();
            fleet.controller.set("SSL_CERT_FILE", &certificate);
            fleet.nodes.iter_mut().for_each(|node| node.set("SSL_CERT_FILE", &certificate));
        }
        fleet.start();
        fleet
    }

    /// A fleet that does not run yet, and trusts nobody but whom its machine trusts.
    fn strangers(&self, nodes: usize) -> Fleet {
        let scheme = if self.seal.is_some() { "https" } else { "http" };
        let line = format!("blob_store: {scheme}://127.0.0.1:{}/an/instance\n", self.port);
        Fleet::new(&Setup { nodes, controller: line.clone(), node: line, ..Setup::default() })
    }
}

/// A job that reads a file of its code, waits for a word, and writes an output.
fn draft(code: Digest, word: &Path) -> JobDraft {
    let command = format!(
        "cat data.txt; while [ ! -e {} ]; do sleep 0.05; done; tr a-z A-Z < data.txt > outputs/loud.txt",
        word.display()
    );
    JobDraft { command, code: Some(code), ..JobDraft::default() }
}

/// The content of the job's file, and what it makes of it.
fn contents() -> (String, String) {
    let quiet = "a line of data\n".repeat(1000);
    (quiet.clone(), quiet.to_uppercase())
}

fn push(fleet: &Fleet) -> Digest {
    let (quiet, _) = contents();
    fleet.client.try_push(&[("data.txt", &quiet), ("other.txt", "other")]).expect("the code is taken")
}

/// The job has done what it should, and everybody can see it.
fn check(fleet: &Fleet, job: &str, place: &Place) {
    let ended = fleet.client.reached_within(LONG, job, &["Completed", "Failed", "Canceled"]);
    assert_eq!(ended.state, "Completed", "{ended:?}");
    let (quiet, loud) = contents();
    assert_eq!(String::from_utf8_lossy(&fleet.client.log(job, "job")), quiet);
    for content in [&quiet, &loud] {
        assert!(place.has(digest_of(content.as_bytes())), "the server lacks a blob of the job");
    }
    let artifacts = ended.outcome.and_then(|outcome| outcome.artifacts).expect("outputs");
    let root: Digest = artifacts.root.parse().expect("a digest");
    let to = fleet.home().join(format!("{job}-outputs"));
    let remote = Remote::new(channel(&fleet.controller.socket()));
    runtime().block_on(snapshot::download(&remote, root, &to)).expect("the outputs come back");
    assert_eq!(fs::read_to_string(to.join("outputs/loud.txt")).expect("an output"), loud);
}

fn word(fleet: &Fleet) -> PathBuf {
    fleet.home().join("go-on")
}

fn whole_jobs(tally: &mut Tally, _: &Scale) {
    for (name, nodes, sealed) in [
        ("one box", 0, false),
        ("a controller and a node", 1, false),
        ("a controller and a node, encrypted", 1, true),
    ] {
        tally.case(name, || {
            let mut place = if sealed { Place::sealed() } else { Place::new() };
            place.start("none");
            let fleet = place.fleet(nodes);
            fs::write(word(&fleet), "").expect("a file");
            let job = fleet.client.submit(&draft(push(&fleet), &word(&fleet)));
            check(&fleet, &job, &place);
            // A large file goes as a stream, which waits on the disk of the controller until the server has it.
            let large = "0123456789abcdef".repeat(200_000);
            fleet.client.try_push(&[("large", &large)]).expect("it is taken");
            assert!(place.has(digest_of(large.as_bytes())));
        });
    }
}

/// Waits until a job says that it waits for the server.
fn waits(fleet: &Fleet, job: &str, step: &str) {
    eventually("the job says what it waits for", LONG, || {
        let view = fleet.client.try_job(job).ok()?;
        let replica = view.replicas.first()?;
        (replica.step.eq_ignore_ascii_case(step) && replica.detail.contains("waiting for the store of blobs"))
            .then_some(())
    });
}

fn away(tally: &mut Tally, _: &Scale) {
    for (name, nodes) in [("one box", 0), ("a controller and a node", 1)] {
        tally.case(name, || {
            let mut place = Place::new();
            let mut fleet = place.fleet(nodes); // it is away when the daemons start
            place.start("none");
            let node = if nodes == 0 { "box" } else { "n0" };
            fleet.client.set_eligibility(node, "cordon").expect("it takes no jobs");
            let job = fleet.client.submit(&draft(push(&fleet), &word(&fleet)));
            place.kill();
            fleet.client.set_eligibility(node, "uncordon").expect("it takes jobs again");
            // A box has near copies of what was sent through it, and needs no server to start the job.
            if nodes > 0 {
                waits(&fleet, &job, "Fetching");
                fleet.node().bounce();
                place.start("none");
            }
            fleet.client.reached_within(LONG, &job, &["Running"]);
            place.kill();
            fs::write(word(&fleet), "").expect("a file");
            waits(&fleet, &job, "Uploading");
            place.start("none");
            check(&fleet, &job, &place);
        });
    }
}

/// Why a directory cannot be sent, each link of it once.
fn refusal(fleet: &Fleet) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("a"), "b").expect("a file");
    let scanned = snapshot::scan(dir.path()).expect("a directory can be scanned");
    let remote = Remote::new(channel(&fleet.controller.socket()));
    let push = async { tokio::time::timeout(LONG, snapshot::push(&scanned, &remote, |_| {})).await };
    let error = runtime().block_on(push).expect("it takes for ever").expect_err("it cannot be sent");
    let (mut text, mut next): (String, Option<&dyn Error>) = (String::new(), Some(&error));
    while let Some(link) = next {
        text = format!("{text}{link}\n");
        next = link.source();
    }
    text
}

fn odd(tally: &mut Tally, _: &Scale) {
    tally.case("it names blobs by another function", || {
        let mut place = Place::new();
        place.start("other-function");
        let mut fleet = place.fleet(0);
        let refused = refusal(&fleet);
        assert!(refused.contains("SHA-256"), "{refused}");
        assert!(fleet.controller.ended().is_none(), "the daemon ended");
        assert!(fleet.client.nodes().is_ok_and(|nodes| nodes.len() == 1));
    });
    tally.case("nobody here knows its certificate", || {
        let mut place = Place::sealed();
        place.start("none");
        let mut fleet = place.strangers(0);
        fleet.start();
        let refused = refusal(&fleet);
        assert!(refused.contains("certificate"), "{refused}");
        assert!(fleet.controller.ended().is_none(), "the daemon ended");
    });
    tally.case("what is there is no such server", || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        drop(std::thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                let _ = socket.write_all(b"SSH-2.0-OpenSSH_9.6\r\n");
            }
        }));
        let line = format!("blob_store: http://127.0.0.1:{port}\n");
        let mut fleet = Fleet::started(&Setup { controller: line, ..Setup::default() });
        let refused = refusal(&fleet);
        assert!(refused.contains("the remote store"), "{refused}");
        assert!(fleet.controller.ended().is_none(), "the daemon ended");
    });
}
