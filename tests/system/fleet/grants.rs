//! A node is believed about what it was given, and about nothing else; and a name belongs to its machine.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use agent_identity::{Authority, Credentials};
use agent_model::{Clock, SystemClock};
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use agent_tests::client::runtime;
use agent_tests::fleet::Daemon;
use agent_tests::{SOON, eventually, finish};
use serde_json::Value;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::Channel;

use super::{Site, calls};

/// A node that says what it likes: it has joined with a token, as any machine may.
struct Rogue {
    channel: Channel,
    sent_ms: u64,
    /// Of the orders that it heard last.
    obeyed: (u64, u64),
}

impl Rogue {
    fn join(site: &Site) -> Rogue {
        let machine = site.machine("rogue");
        site.join(&machine, "127.0.0.1", &site.token(&[])).ok();
        let place = site.controller.state().join("controller/authority.json");
        let authority = Authority::open(&place, SystemClock.now()).unwrap();
        let held = Credentials::read(&machine.state().join("identity.json")).unwrap().unwrap();
        Rogue { channel: calls::channel(site, &authority, Some(&held)), sent_ms: 1, obeyed: (0, 0) }
    }

    /// Reports these replicas until the orders have answered three reports; returns the last orders.
    fn report(&mut self, replicas: &[v1::HeldReplica]) -> Vec<v1::Order> {
        let mut worker = WorkerClient::new(self.channel.clone());
        runtime().block_on(async {
            let (reports, stream) = tokio::sync::mpsc::channel(8);
            let mut orders = Vec::new();
            reports.send(self.next(replicas)).await.unwrap();
            let mut heard = worker.sync(ReceiverStream::new(stream)).await.unwrap().into_inner();
            for _ in 0..3 {
                let told = tokio::time::timeout(Duration::from_secs(10), heard.message()).await;
                let told = told.expect("orders come").unwrap().unwrap();
                self.obeyed = (told.controller_epoch, told.answers_ms);
                orders = told.orders;
                tokio::time::sleep(Duration::from_millis(200)).await; // the store is asked meanwhile
                reports.send(self.next(replicas)).await.unwrap();
            }
            orders
        })
    }

    /// Reports for another node, after so many reports of its own; what it is told.
    fn reports_as(&mut self, node: &str, own: usize) -> Status {
        let mut worker = WorkerClient::new(self.channel.clone());
        let mut reports: Vec<_> = (0..own).map(|_| self.next(&[])).collect();
        reports.push(v1::NodeReport { node: node.into(), ..self.next(&[]) });
        runtime().block_on(async {
            let stream = tokio_stream::iter(reports).chain(tokio_stream::pending());
            let heard = async {
                let mut heard = worker.sync(stream).await?.into_inner();
                loop {
                    heard.message().await?;
                }
            };
            let limited: Result<Result<(), Status>, _> =
                tokio::time::timeout(Duration::from_secs(10), heard).await;
            limited.expect("it is refused").unwrap_err()
        })
    }

    fn next(&mut self, replicas: &[v1::HeldReplica]) -> v1::NodeReport {
        self.sent_ms += 1000;
        v1::NodeReport {
            node: "rogue".into(),
            boot_id: "a boot".into(),
            session: "a session".into(),
            sent_ms: self.sent_ms,
            obeyed_controller_epoch: self.obeyed.0,
            obeyed_ms: self.obeyed.1,
            inventory: Some(v1::Inventory { slots: 2, ..v1::Inventory::default() }),
            replicas: replicas.to_vec(),
            ..v1::NodeReport::default()
        }
    }

    fn secrets_of(&self, replica: &str) -> Result<v1::ReadSecretsResponse, Status> {
        let request = v1::ReadSecretsRequest { node: "rogue".into(), replica: replica.into() };
        let mut worker = WorkerClient::new(self.channel.clone());
        runtime().block_on(worker.read_secrets(request)).map(tonic::Response::into_inner)
    }

    fn ends(&self, replica: &str) -> Result<v1::ReportOutcomeResponse, Status> {
        let outcome = v1::Outcome { verdict: "completed".into(), ended_ms: 1, ..v1::Outcome::default() };
        let request = v1::ReportOutcomeRequest {
            node: "rogue".into(),
            replica: replica.into(),
            outcome: Some(outcome),
        };
        let mut worker = WorkerClient::new(self.channel.clone());
        runtime().block_on(worker.report_outcome(request)).map(tonic::Response::into_inner)
    }
}

fn running(replica: &str) -> v1::HeldReplica {
    v1::HeldReplica {
        replica: replica.into(),
        step: "Running".into(),
        started_ms: 5,
        alive: true,
        ..v1::HeldReplica::default()
    }
}

/// The file that holds what a node was given for a replica.
fn order(node: &Daemon, replica: &str) -> PathBuf {
    node.state().join("jobs").join(replica).join("order.json")
}

/// The same as the node shows it.
fn shown(node: &Daemon, replica: &str) -> v1::HeldReplica {
    let order: Value = serde_json::from_slice(&fs::read(order(node, replica)).unwrap()).unwrap();
    let (given, grant) = (&order["given"], &order["given"]["grant"]);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let grant = v1::Grant {
        key: text(&grant["key"]),
        life: text(&grant["mark"]["life"]),
        commit: grant["mark"]["commit"].as_u64().unwrap(),
        mac: text(&grant["mac"]),
    };
    v1::HeldReplica { document: text(&given["document"]), grant: Some(grant), ..running(replica) }
}

fn describes_only(orders: &[v1::Order]) -> bool {
    let describe = |order: &v1::Order| matches!(order.desired, Some(v1::order::Desired::Describe(_)));
    !orders.is_empty() && orders.iter().all(describe)
}

/// A job that waits for a file, and reads a secret.
fn gated(site: &Site, name: &str) -> String {
    let go = site.path(&format!("go-{name}"));
    let text = format!(
        "name: {name}\nsecrets: {{TOKEN: token}}\n\
         command: 'echo begun; while ! [ -e {} ]; do sleep 0.1; done; echo ended'\n",
        go.display()
    );
    let project = site.project("ada", &text);
    site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned()
}

fn site() -> Site {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    let value = site.path("value");
    fs::write(&value, "hf_of_ada").unwrap();
    let mut set = site.client("ada", &["secret", "set", "token"]);
    finish(set.stdin(fs::File::open(value).unwrap())).ok();
    site.add_node("n0", "127.0.0.1");
    site
}

fn job(site: &Site, job: &str) -> Value {
    site.ctl(&["show", job, "--json"]).ok().json()
}

/// What the controller tells whoever looks after it.
fn notices(site: &Site) -> String {
    site.json(&["status", "--json"])["controller"]["notices"].to_string()
}

fn until(site: &Site, name: &str, state: &str) {
    eventually(&format!("{name} is {state}"), SOON, || {
        let shown = site.ctl(&["show", name, "--json"]);
        (shown.code == 0 && shown.json()["state"] == state).then_some(())
    });
}

#[test]
fn test_a_node_takes_over_no_job_and_plants_none() {
    let site = site();
    let theirs = gated(&site, "theirs");
    until(&site, &theirs, "Running");
    let mut rogue = Rogue::join(&site);
    for own in 0..2 {
        let told = rogue.reports_as("n0", own);
        assert!(told.message().contains("speaks for"), "after {own} reports of its own: {told:?}");
    }
    let real = shown(&site.nodes[0], &format!("{theirs}.1.0"));
    let (later, planted) = (format!("{theirs}.2.0"), "planted.1.0");
    let with = |replica: &str, grant: &v1::Grant, document: &str| v1::HeldReplica {
        document: document.into(),
        grant: Some(grant.clone()),
        ..running(replica)
    };
    let grant = real.grant.clone().unwrap();
    let forged = v1::Grant { life: "00000000000000ff".into(), ..grant.clone() };
    // The grant of another node; a made-up life; nothing; a job that the release before would have told.
    let spec = v1::JobSpec { command: "id".into(), ..v1::JobSpec::default() };
    let tries = [
        vec![running(&later), running(planted)],
        vec![with(&later, &grant, &real.document), with(planted, &grant, &real.document)],
        vec![with(&later, &forged, &real.document), with(planted, &forged, &real.document)],
        vec![
            v1::HeldReplica { spec: Some(spec.clone()), ..running(&later) },
            v1::HeldReplica { spec: Some(spec), ..running(planted) },
        ],
        vec![real.clone()],
    ];
    for held in tries {
        let orders = rogue.report(&held);
        assert!(describes_only(&orders), "{held:?}: {orders:?}");
        for replica in held.iter().map(|held| held.replica.as_str()) {
            assert!(rogue.secrets_of(replica).is_err(), "{replica}");
            assert!(rogue.ends(replica).is_err(), "{replica}");
        }
        let now = job(&site, &theirs);
        assert_eq!((&now["state"], &now["attempt"]), (&"Running".into(), &1.into()), "{held:?}");
        site.ctl(&["show", "planted"]).code(1).says("JOB-104");
    }
    // Who looks after the machines sees it, and ends it by name.
    let told = notices(&site);
    assert!(told.contains(&format!("agentctl node end rogue {theirs}.1.0")), "{told}");
    site.by("ada", &["node", "end", "rogue", &format!("{theirs}.1.0")]).says("administrator");
    site.ctl(&["node", "end", "rogue", "theirs.9.0"]).code(1).says("agentctl status");
    site.ctl(&["node", "end", "rogue", &format!("{theirs}.1.0")]).ok();
    assert!(rogue.report(&[real]).is_empty(), "it is to end");
    fs::write(site.path("go-theirs"), "").unwrap();
    until(&site, &theirs, "Completed");
    assert_eq!(site.by("ada", &["logs", &theirs]).ok().stdout, "begun\nended\n");
}

/// Copies what a backup has: all of the controller's directory.
fn back_up(site: &mut Site, to: &str) {
    site.controller.stop();
    agent_tests::copy_tree(&site.controller.state().join("controller"), &site.path(to));
    site.start_controller();
}

/// Puts a backup back, as `operations.md` says.
fn restore(site: &mut Site, from: &str) {
    site.controller.kill();
    let home = site.controller.state().join("controller");
    fs::remove_dir_all(&home).unwrap();
    agent_tests::copy_tree(&site.path(from), &home);
    let _ = fs::remove_file(home.join("db.redo"));
    site.start_controller();
}

/// The node that was added last joins with a new token.
fn join_again(site: &mut Site, name: &str) {
    let mut node = site.nodes.pop().unwrap();
    node.stop();
    site.join(&node, "127.0.0.1", &site.token(&[])).ok();
    node.spawn();
    site.nodes.push(node);
    site.until_ready(name);
}

#[test]
fn test_after_a_restore_what_is_proved_goes_on_and_what_ended_before_does_not() {
    let mut site = site();
    let before = gated(&site, "before");
    until(&site, &before, "Running");
    let old = shown(&site.nodes[0], &format!("{before}.1.0"));
    fs::write(site.path("go-before"), "").unwrap();
    until(&site, &before, "Completed");
    back_up(&mut site, "backup");
    site.until_ready("n0");

    // A job, a node and a job of that node are later than the backup.
    let later = gated(&site, "later");
    until(&site, &later, "Running");
    site.ctl(&["cordon", "n0"]).ok();
    site.add_node("n1", "127.0.0.2");
    let newer = gated(&site, "newer");
    until(&site, &newer, "Running");
    restore(&mut site, "backup");
    site.until_ready("n0");
    until(&site, &later, "Running");
    let adopted = job(&site, &later);
    assert_eq!((&adopted["owner"], &adopted["attempt"]), (&"user ada".into(), &1.into()), "{adopted}");

    // The later node is not known any more, and comes back with a token: it keeps what it was given.
    join_again(&mut site, "n1");
    until(&site, &newer, "Running");
    assert_eq!(job(&site, &newer)["owner"], "user ada");

    // What ended before the backup says nothing new, whoever shows it.
    let mut rogue = Rogue::join(&site);
    assert!(rogue.report(&[old]).is_empty(), "its end is on record");
    assert_eq!(job(&site, &before)["state"], "Completed");

    for name in ["later", "newer"] {
        fs::write(site.path(&format!("go-{name}")), "").unwrap();
        until(&site, name, "Completed");
        let log = site.by("ada", &["logs", name]).ok().stdout;
        assert_eq!(log, "begun\nended\n", "{name}: {}", job(&site, name));
    }
    // The numbers of attempts go on above a gap.
    let next = gated(&site, "next");
    until(&site, &next, "Running");
    assert!(job(&site, &next)["attempt"].as_u64().unwrap() > 1000);
    fs::write(site.path("go-next"), "").unwrap();
    until(&site, &next, "Completed");
}

#[test]
fn test_without_the_key_or_after_a_removal_nothing_is_proved_until_somebody_says_so() {
    let mut site = site();
    back_up(&mut site, "backup");
    site.until_ready("n0");
    let [kept, ended] = ["kept", "ended"].map(|name| gated(&site, name));
    until(&site, &kept, "Running");
    until(&site, &ended, "Running");
    let old_key = shown(&site.nodes[0], "kept.1.0").grant.unwrap().key;
    fs::remove_file(site.path("backup").join("grant.keys")).unwrap();
    restore(&mut site, "backup");
    site.until_ready("n0");
    let unproved = |replica: &str| {
        let told = notices(&site);
        (told.contains("never gave it") && told.contains(replica) && told.contains("the key")).then_some(())
    };
    eventually("both are named", SOON, || unproved("kept.1.0").and_then(|()| unproved("ended.1.0")));
    site.ctl(&["show", &kept]).code(1).says("JOB-104");
    site.ctl(&["node", "adopt", "n0", "kept.1.0"]).ok();
    until(&site, &kept, "Running");
    assert_eq!(job(&site, &kept)["owner"], "user ada");
    let dir = order(&site.nodes[0], "ended.1.0");
    site.ctl(&["node", "end", "n0", "ended.1.0"]).ok().says("keeps its files");
    eventually("it has ended", SOON, || {
        let told = notices(&site);
        (!told.contains("ended.1.0")).then_some(())
    });
    assert!(dir.exists(), "its directory is kept");

    // It is proved again from now on: another restore finds it.
    eventually("the new proof is kept", SOON, || {
        (key_in_journal(&site.nodes[0], "kept.1.0")? != old_key).then_some(())
    });
    let new_key = site.controller.state().join("controller/grant.keys");
    fs::copy(new_key, site.path("backup").join("grant.keys")).unwrap();
    site.nodes[0].bounce();
    restore(&mut site, "backup");
    until(&site, &kept, "Running");

    // After a removal the same machine proves nothing of before.
    let dir = order(&site.nodes[0], "kept.1.0").with_file_name("");
    let before = job(&site, &kept)["attempt"].as_u64();
    site.ctl(&["node", "remove", "n0", "--lose-jobs"]).ok();
    eventually("it ends what it ran, because it hears that it was removed", SOON, || {
        (!dir.exists() || dir.join("exit.json").exists()).then_some(())
    });
    join_again(&mut site, "n0");
    let now = job(&site, &kept);
    assert!(now["state"] != "Running" || now["attempt"].as_u64() > before, "that attempt is over: {now}");
    fs::write(site.path("go-kept"), "").unwrap();
}

/// Two attempts of one job would write to the same files.
#[test]
fn test_a_node_that_answers_ends_its_jobs_before_it_is_removed_with_them() {
    let mut site = Site::new();
    site.add_node("n0", "127.0.0.1");
    let script = format!(
        "echo begun $AGENTD_REPLICA >>{told}; trap 'echo ended $AGENTD_REPLICA >>{told}; exit 1' TERM\n\
         while [ ! -e {go} ]; do sleep 0.1; done; echo ended $AGENTD_REPLICA >>{told}",
        told = site.path("told").display(),
        go = site.path("go").display()
    );
    let code = site.path("code");
    fs::create_dir(&code).unwrap();
    let words = ["submit", "--name", "moved", code.to_str().unwrap(), "--", "sh", "-c", &script];
    let job = site.ctl(&words).ok().stdout;
    let kept = site.path("told");
    let told = || fs::read_to_string(&kept).unwrap_or_default();
    eventually("it runs", SOON, || told().contains("begun").then_some(()));
    site.add_node("n1", "127.0.0.1");
    let removed = site.ctl(&["node", "remove", "n0", "--lose-jobs"]).ok();
    removed.says("on n0 get 20 s to end").says("n0 is no machine");
    eventually("it runs elsewhere", SOON, || told().contains("begun moved.2.0").then_some(()));
    fs::write(site.path("go"), "").unwrap();
    until(&site, job.trim(), "Completed");
    assert_eq!(told(), "begun moved.1.0\nended moved.1.0\nbegun moved.2.0\nended moved.2.0\n");
}

/// The name of the key of the grant that the journal of a node has.
fn key_in_journal(node: &Daemon, replica: &str) -> Option<String> {
    let journal = fs::read(node.state().join("journal.db-wal")).ok()?;
    let text = String::from_utf8_lossy(&journal);
    let at = text.rfind(&format!("\"replica\":\"{replica}\""))?;
    let key = text[at..].split("\"key\":\"").nth(1)?;
    Some(key.split('"').next()?.to_owned())
}

#[test]
fn test_a_name_on_record_is_taken_also_that_of_the_controllers_own_node() {
    let site = Site::configured("node_name: box\nslots: 2\n", &[]);
    site.until_ready("box");
    let impostor = Daemon::new(site.path("x"), "node_name: box\ndisk_reserve: 64MiB\n".into());
    let refused = site.join(&impostor, "127.0.0.1", &site.token(&[]));
    assert!(refused.code != 0 && refused.stderr.contains("NODE-110"), "{refused:?}");
    assert!(!impostor.state().join("identity.json").exists());
    // The box goes on working.
    let project = site.project("root", "command: 'echo mine'\n");
    assert!(site.ctl(&["run", &project]).ok().stdout.contains("mine"));
}
