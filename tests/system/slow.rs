//! A controller that takes a log far more slowly than the job writes it.
//!
//! Between node and controller stands a post office that delivers output at a given pace, and everything else at once.

use std::fs;
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_shim::{ExitRecord, JobDir};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::post::Rules;
use agent_tests::{SOON, eventually, resident};

/// Bytes of logs that the controller takes in a second.
const PACE: u64 = 1024;

/// Bytes that the loud job writes in a second.
const LOUD: u64 = 200_000_000;

/// Writes numbered lines of 100 bytes at a pace, and says how long the writing itself took.
const WRITER: &str = "
import json, os, sys, time
rate, seconds = int(sys.argv[1]), float(sys.argv[2])
piece = rate // 100 // 100
number, busy, begun = 0, 0.0, time.monotonic()
while number * 100 < rate * seconds:
    text = b''.join(b'%099d\\n' % n for n in range(number, number + 200)) * (piece // 200)
    now = time.monotonic()
    os.write(1, text) == len(text) or sys.exit('a short write')
    busy += time.monotonic() - now
    number += len(text) // 100
    time.sleep(max(0, begun + number * 100 / rate - time.monotonic()))
took = time.monotonic() - begun
json.dump({'bytes': number * 100, 'busy': busy, 'took': took}, open('outputs/told', 'w'))
";

/// Says what time it is, ten times a second.
const TICKER: &str = "
import sys, time
end = time.time() + float(sys.argv[1])
while time.time() < end:
    print('%.3f' % time.time(), flush=True)
    time.sleep(0.1)
";

/// Produced minus stored is what the gaps say, and the stream says it where it is missing.
fn check_gaps(record: &ExitRecord, produced: u64) -> u64 {
    assert!(record.log_error.is_some() && record.gaps.count >= 1, "{record:?}");
    // What is on the disk besides output: each gap's own line.
    let notes = record.log_bytes + record.gaps.bytes - produced;
    assert!(notes > 0 && notes < 200 * record.gaps.count, "{notes} bytes of notes: {record:?}");
    notes
}

#[test]
fn test_slow_controller_costs_neither_memory_nor_time_nor_other_jobs() {
    const SECONDS: u64 = 4;
    let rules = Rules { pace: PACE, ..Rules::default() };
    let node = "log_quota: 256MiB\n".into();
    let fleet = Fleet::started(&Setup { nodes: 1, node, post: Some((rules, 0)), ..Setup::default() });
    let code = fleet.client.try_push(&[("writer.py", WRITER), ("ticker.py", TICKER)]).unwrap();
    let submit =
        |command: String| fleet.client.submit(&JobDraft { command, code: Some(code), ..JobDraft::default() });
    let loud = submit(format!("exec /usr/bin/python3 writer.py {LOUD} {SECONDS}"));
    fleet.client.reached(&loud, &["Running"]);
    let quiet = submit(format!("exec /usr/bin/python3 ticker.py {}", SECONDS + 10));
    fleet.client.reached(&quiet, &["Running"]);

    let (mut agent, mut shim, mut late) = (0, 0, Vec::new());
    let mut dirs = fleet.nodes[0].job_dirs().into_iter();
    let dir = JobDir::new(dirs.find(|dir| dir.ends_with(format!("{loud}.1.0"))).unwrap());
    let end = Instant::now() + Duration::from_secs(SECONDS + 9);
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(250));
        agent = agent.max(resident(fleet.nodes[0].pid()));
        fleet.nodes[0].shims().iter().for_each(|(_, pid)| shim = shim.max(resident(*pid)));
        let log = fleet.client.text(&quiet);
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        if let Some(last) = whole.lines().last().and_then(|line| line.parse::<f64>().ok()) {
            late.push(now() - last);
        }
    }
    let record = eventually("the loud job ends", SOON, || dir.read_exit().unwrap());
    let told = fs::read_to_string(dir.work().join("outputs/told")).unwrap();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let produced = told["bytes"].as_u64().unwrap();
    let notes = check_gaps(&record, produced);
    assert!(late.len() > 10, "the other job's log does not arrive");
    late.sort_by(f64::total_cmp);
    let p99 = late[late.len() * 99 / 100];
    println!(
        "{produced} bytes produced in {} s ({} s in writes), {} stored, {} dropped in {} gaps ({notes} bytes of notes); \
         agent {} KiB, shim {} KiB; age of the other job's last line: median {:.2} s, p99 {p99:.2} s of {}",
        told["took"],
        told["busy"],
        record.log_bytes - notes,
        record.gaps.bytes,
        record.gaps.count,
        agent >> 10,
        shim >> 10,
        late[late.len() / 2],
        late.len(),
    );
    assert!(agent < 64 << 20, "the agent takes {agent} bytes");
    assert!(shim < 16 << 20, "the shim takes {shim} bytes");
}

#[allow(clippy::disallowed_methods, reason = "the job tells the time of the same clock")]
fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
}
