//! What it costs when many nodes want the same snapshot: the bytes that leave the controller, and the time, with nodes
//! that fetch from each other and with nodes that do not, in networks of the same speed.

use std::fs;
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_model::job::Resources;
use agent_tests::SOON;
use agent_tests::chance::Chance;
use agent_tests::fleet::{Fleet, Setup};

/// Of the snapshot.
const BYTES: usize = 256_000_000;
/// What every host may send, in megabits a second.
const SPEED: u32 = 400;

pub(crate) fn all() {
    println!("a snapshot of {} MB, each host sends {SPEED} Mbit/s", BYTES / 1_000_000);
    println!(
        "{:<8} {:>14} {:>10} {:>18} {:>10} {:>12}",
        "nodes", "copies sent", "time", "from controller", "time", "N x one node"
    );
    let mut one = Duration::ZERO;
    for nodes in [1, 2, 4, 8] {
        let (shared, time) = run(nodes, "");
        if nodes == 1 {
            one = time;
        }
        let (alone, slow) = if nodes == 1 { (shared, time) } else { run(nodes, "peer_port: off\n") };
        println!(
            "{nodes:<8} {shared:>14.2} {:>8.1} s {alone:>18.2} {:>8.1} s {:>10.1} s",
            time.as_secs_f64(),
            slow.as_secs_f64(),
            one.as_secs_f64() * nodes as f64
        );
    }
}

/// How many copies left the controller, and from the submission of a job on all nodes to its end.
fn run(nodes: usize, node: &str) -> (f64, Duration) {
    let fleet = Fleet::over_tls(&Setup { nodes, node: node.to_owned(), ..Setup::default() });
    let hosts = fleet.hosts.as_ref().expect("there are hosts");
    (0..=nodes).for_each(|host| hosts.slow_down(host, SPEED));
    let code = fleet.home().join("code");
    fs::create_dir_all(&code).expect("a directory");
    let mut chance = Chance::new(nodes as u64);
    let sizes = std::iter::once(BYTES / 2).chain([BYTES / 2 / 50; 50]);
    for (number, size) in sizes.enumerate() {
        let content: Vec<u8> = (0..size / 8).flat_map(|_| chance.number().to_le_bytes()).collect();
        fs::write(code.join(number.to_string()), content).expect("a file");
    }
    let root = fleet.client.hasty(SOON).try_push_of(&code).expect("a snapshot");
    let resources = Resources { nodes: u32::try_from(nodes).expect("few"), ..Resources::default() };
    let draft = JobDraft { code: Some(root), command: "true".to_owned(), resources, ..JobDraft::default() };
    let (before, begun) = (hosts.sent(0), Instant::now());
    let job = fleet.client.submit(&draft);
    let ended = fleet.client.ended(&job);
    assert_eq!(ended.state, "Completed", "{:?}", ended.outcome);
    ((hosts.sent(0) - before) as f64 / BYTES as f64, begun.elapsed())
}
