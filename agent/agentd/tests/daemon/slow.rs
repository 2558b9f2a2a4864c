//! A controller that takes a log far more slowly than the job writes it.
//!
//! Between node and controller stands a proxy that lets `Append` through at a given pace and everything
//! else at once. `SLOW_SECONDS` is how long the loud job writes; a release build with 60 gives the figures.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_shim::{ExitRecord, JobDir};
use axum::body::{Body, Bytes};
use futures_util::StreamExt;
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::{Channel, Server};
use tower::{Service, ServiceExt};

use crate::harness::{Daemon, eventually};

/// Bytes of logs that the controller takes in a second.
const PACE: f64 = 1024.0;

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

/// Passes calls on to the controller at `to`, and what nodes append at [`PACE`].
async fn slow_proxy(to: Channel, at: PathBuf, tasks: &mut JoinSet<()>) {
    let listener = UnixListener::bind(at).unwrap();
    let pass = tower::service_fn(move |request: axum::extract::Request| {
        let to = to.clone();
        async move {
            let slow = request.uri().path().ends_with("/Append");
            let request = request.map(|body| {
                let pieces = body.into_data_stream().then(move |piece| async move {
                    let bytes = piece.as_ref().map_or(0, Bytes::len);
                    if slow {
                        tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / PACE)).await;
                    }
                    piece
                });
                tonic::body::Body::new(Body::from_stream(pieces))
            });
            let mut to = to;
            let answer = match to.ready().await {
                Ok(ready) => ready.call(request).await,
                Err(error) => Err(error),
            };
            let response = answer.unwrap_or_else(|error| {
                tonic::Status::unavailable(error.to_string()).into_http::<tonic::body::Body>()
            });
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let routes = Routes::from(axum::Router::new().fallback_service(pass));
    let server = Server::builder().add_routes(routes);
    tasks.spawn(async move {
        server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
    });
}

fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}

/// The processes whose program is the shim of a job below `jobs`.
fn shims(jobs: &str) -> Vec<u32> {
    crate::harness::processes_below(jobs.as_ref())
        .into_iter()
        .filter(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.trim() == "agent-shim"
        })
        .collect()
}

/// Produced minus stored is what the gaps say, and the stream says it where it is missing.
fn check_gaps(record: &ExitRecord, produced: u64) -> u64 {
    assert!(record.log_error.is_some() && record.gaps.count >= 1, "{record:?}");
    // What is on the disk besides output: each gap's own line.
    let notes = record.log_bytes + record.gaps.bytes - produced;
    assert!(notes > 0 && notes < 200 * record.gaps.count, "{notes} bytes of notes: {record:?}");
    notes
}

#[tokio::test]
async fn test_slow_controller_costs_neither_memory_nor_time_nor_other_jobs() {
    #[allow(clippy::disallowed_methods, reason = "a switch for whoever measures")]
    let seconds: u64 = std::env::var("SLOW_SECONDS").map_or(4, |seconds| seconds.parse().unwrap());
    let controller = Daemon::started("roles: controller").await;
    let mut tasks = JoinSet::new();
    let proxy = controller.state().join("slow.sock");
    slow_proxy(controller.channel(), proxy.clone(), &mut tasks).await;
    let quota = if seconds > 30 { "4GiB" } else { "256MiB" };
    let mut node = Daemon::new(&format!(
        "roles: node\nslots: 4\ndisk_reserve: 64MiB\nlog_quota: {quota}\ncontroller: unix:{}\n",
        proxy.display()
    ));
    node.spawn();
    let code = Some(controller.push(&[("writer.py", WRITER), ("ticker.py", TICKER)]).await);
    let job = |command: String| JobDraft { command, code, ..JobDraft::default() };
    let python = "exec /usr/bin/python3";
    // What the pipe and the disk cost without anybody behind them, on this machine, today.
    let alone = controller.submit(job(format!("{python} writer.py {LOUD} 1 > plain"))).await;
    controller.ended(&alone).await;
    let loud = controller.submit(job(format!("{python} writer.py {LOUD} {seconds}"))).await;
    controller.reached(&loud, &["Running"]).await;
    let quiet = controller.submit(job(format!("{python} ticker.py {}", seconds + 10))).await;
    controller.reached(&quiet, &["Running"]).await;

    let (mut agent, mut shim, mut late) = (0, 0, Vec::new());
    let jobs = node.state().join("jobs");
    let dir = fs::read_dir(&jobs).unwrap().map(|entry| entry.unwrap().path());
    let dir = JobDir::new(dir.into_iter().find(|dir| dir.display().to_string().contains(&loud)).unwrap());
    let end = Instant::now() + Duration::from_secs(seconds + 9);
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(250)).await;
        agent = agent.max(resident(node.process()));
        shims(&jobs.display().to_string()).into_iter().for_each(|pid| shim = shim.max(resident(pid)));
        let log = controller.log(&quiet, "job").await;
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        if let Some(last) = whole.lines().last().and_then(|line| line.parse::<f64>().ok()) {
            late.push(now() - last);
        }
    }
    let record = eventually("the loud job ends", async || dir.read_exit().unwrap()).await;
    let told = fs::read_to_string(dir.work().join("outputs/told")).unwrap();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let produced = told["bytes"].as_u64().unwrap();
    let notes = check_gaps(&record, produced);
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
    assert!(late.len() > 10, "the other job's log does not arrive");
}

#[allow(clippy::disallowed_methods, reason = "the job tells the time of the same clock")]
fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
}
