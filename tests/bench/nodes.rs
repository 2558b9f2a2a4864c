//! One controller with many nodes that speak the real protocol over TLS and run nothing: what it costs, and how long it
//! takes until all of them are back when it was killed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_model::job::{Limits, OnDisconnect};
use agent_tests::client::{Client, runtime};
use agent_tests::fleet::Daemon;
use agent_tests::simulated::{Seen, Simulated};
use agent_tests::{SOON, cpu_seconds, eventually, resident};
use tokio::sync::{Semaphore, watch};

/// Where the controller listens.
const AT: (&str, u16) = ("127.0.0.1", 17_443);
/// How many join at a time: a controller takes only so many without a certificate.
const JOINING: usize = 16;
/// How long nothing happens while the cost is measured.
const QUIET: Duration = Duration::from_secs(30);

pub(crate) fn all(count: usize) {
    let home = tempfile::Builder::new().prefix("nodes-").tempdir().expect("a directory");
    let config = format!("roles: controller\ndisk_reserve: 64MiB\nlisten: {}:{}\nlog: info\n", AT.0, AT.1);
    let mut controller = Daemon::new(home.path().join("c"), config);
    controller.set("AGENTD_LOG", "info");
    controller.spawn();
    let client = Client::new(controller.socket());
    eventually("the controller answers", SOON, || client.nodes().ok());

    let (token, begun) = (client.token(u32::try_from(count).expect("few")), Instant::now());
    let nodes = runtime().block_on(join(count, &token));
    println!("{count} nodes joined in {:.1} s", begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    let seen: Vec<watch::Receiver<Seen>> = nodes
        .into_iter()
        .map(|node| {
            let (tell, seen) = watch::channel(Seen::default());
            runtime().spawn(node.live(1, tell));
            seen
        })
        .collect();
    all_connected(&seen, &client, count);
    println!("all connected in {:.1} s", begun.elapsed().as_secs_f64());

    let begun = Instant::now();
    let draft = JobDraft {
        command: "true".to_owned(),
        limits: Limits { on_disconnect: OnDisconnect::Replace, ..Limits::default() },
        ..JobDraft::default()
    };
    (0..count).for_each(|_| drop(client.submit(&draft)));
    let runs = || seen.iter().map(|seen| seen.borrow().replicas.len()).sum::<usize>();
    eventually("every node runs a job", SOON * 3, || (runs() == count).then_some(()));
    println!("{count} jobs run {:.1} s after the first was submitted", begun.elapsed().as_secs_f64());
    cost("with a job on each node", &controller);

    let before: BTreeSet<String> = seen.iter().flat_map(|seen| seen.borrow().replicas.clone()).collect();
    controller.kill();
    std::thread::sleep(Duration::from_millis(500)); // every node sees that
    let begun = Instant::now();
    controller.spawn();
    all_connected(&seen, &client, count);
    println!("after kill -9: all back in {:.1} s", begun.elapsed().as_secs_f64());
    std::thread::sleep(Duration::from_secs(70)); // longer than any lease
    let after: BTreeSet<String> = seen.iter().flat_map(|seen| seen.borrow().replicas.clone()).collect();
    let running = running(&client);
    println!("leases lost: {}, jobs that do not run: {}", before.difference(&after).count(), count - running);
    cost("after that", &controller);
    controller.kill();
}

async fn join(count: usize, token: &str) -> Vec<Simulated> {
    let room = Arc::new(Semaphore::new(JOINING));
    let joins: Vec<_> = (0..count)
        .map(|number| {
            let (room, token) = (Arc::clone(&room), token.to_owned());
            runtime().spawn(async move {
                let _one = room.acquire().await;
                loop {
                    match Simulated::join(AT, &token, &format!("n{number:05}")).await {
                        Ok(node) => return node,
                        Err(status) => assert!(status.code() == tonic::Code::Unavailable, "{status}"),
                    }
                }
            })
        })
        .collect();
    let mut nodes = Vec::with_capacity(count);
    for join in joins {
        nodes.push(join.await.expect("it joins"));
    }
    nodes
}

fn all_connected(seen: &[watch::Receiver<Seen>], client: &Client, count: usize) {
    eventually("every node is connected", SOON * 3, || {
        if !seen.iter().all(|seen| seen.borrow().is_connected) {
            return None;
        }
        let ready = client.nodes().ok()?.iter().filter(|node| node.liveness == "ready").count();
        (ready == count).then_some(())
    });
}

fn running(client: &Client) -> usize {
    let listed = client.jobs(true).expect("a list");
    listed.iter().filter(|job| job.state == "Running" && job.epoch == 1).count()
}

fn cost(when: &str, controller: &Daemon) {
    let (before, ours) = (cpu_seconds(controller.pid()), cpu_seconds(std::process::id()));
    std::thread::sleep(QUIET);
    let used = |before: f64, pid: u32| (cpu_seconds(pid) - before) / QUIET.as_secs_f64();
    println!(
        "{when}: controller {:.2} cores, {:.0} MiB; all nodes together {:.2} cores",
        used(before, controller.pid()),
        resident(controller.pid()) as f64 / f64::from(1 << 20),
        used(ours, std::process::id()),
    );
}
