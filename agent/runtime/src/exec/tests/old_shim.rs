//! The exact protocol of a shim of version 1: a daemon of this version must follow, stop and understand it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use agent_model::{Clock as _, SystemClock};

use super::*;

const HELLO: &str = r#"{"version":1,"instance":"0f3c8a52-1111-4222-8333-444455556666","replica":"train.1.0","pid":999999999,"boot_id":"BOOT","at":1790000000000}"#;
const LAUNCH: &str = r#"{"version":1,"replica":"train.1.0","argv":["bash","-c","exit 3"],"env":{"PATH":"/bin"},"cwd":"work","grace_ms":1000,"timeout_ms":null,"user":null}"#;
const EXIT: &str = r#"{"version":1,"instance":"0f3c8a52-1111-4222-8333-444455556666","replica":"train.1.0","end":{"exited":{"code":3}},"started_at":1790000000001,"ended_at":1790000000900,"stopped":"enough","timed_out":false,"oom":false,"log_bytes":0,"log_dropped":0,"log_error":null,"tracking_bytes":0,"max_rss":1048576,"cpu_ms":4,"leftovers":0,"unkilled":0}"#;

/// Answers one client as version 1 did, until it is told to stop the job; then the job ends.
fn serve(mut stream: UnixStream, exit: PathBuf) {
    let mut say = {
        let mut stream = stream.try_clone().unwrap();
        move |line: &str| drop(writeln!(stream, "{line}"))
    };
    say(r#"{"event":"hello","version":1,"instance":"0f3c8a52-1111-4222-8333-444455556666","gone":true}"#);
    for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
        let verb = line.split('"').nth(3).unwrap().to_owned();
        match verb.as_str() {
            "watch" => say(r#"{"event":"progress","log_bytes":7,"tracking_bytes":0}"#),
            "go" => say(r#"{"event":"going"}"#),
            "stop" => {
                say(r#"{"event":"stopping"}"#);
                fs::write(&exit, EXIT).unwrap();
            }
            other => say(&format!(
                r#"{{"event":"refused","why":"unknown variant `{other}`, expected one of `go`, `stop`, `watch` at line 1 column 18"}}"#
            )),
        }
    }
    let _ = stream.flush();
}

/// Runs as a shim of version 1 for the bench, with a running job.
fn stand(bench: &Bench) {
    let place = bench.dir.take_place().unwrap().unwrap();
    fs::write(bench.dir.launch(), LAUNCH).unwrap();
    fs::write(bench.dir.hello(), HELLO.replace("BOOT", &agent_shim::process::boot_id())).unwrap();
    bench.dir.mark_started("0f3c8a52-1111-4222-8333-444455556666").unwrap();
    let (_keep, path) = bench.dir.short_socket_path().unwrap();
    let listener = UnixListener::bind(path).unwrap();
    let exit = bench.dir.exit();
    thread::spawn(move || {
        while !exit.exists() {
            let (stream, _) = listener.accept().unwrap();
            let exit = exit.clone();
            thread::spawn(move || serve(stream, exit));
        }
        drop(place);
    });
}

#[tokio::test]
async fn test_shim_of_the_former_version_is_followed_stopped_and_understood() {
    let mut bench = Bench::new();
    // Version 1 had one directory for everything.
    fs::remove_dir_all(bench.dir.data()).unwrap();
    fs::create_dir(bench.dir.path().join("work")).unwrap();
    stand(&bench);
    bench.dir = JobDir::new(bench.dir.path());
    assert!(bench.dir.is_shared() && bench.dir.tracking() == bench.dir.path().join("tracking.jsonl"));
    let Found::Running(running) = bench.executor.reattach(&bench.dir).await.unwrap() else {
        panic!("it runs")
    };
    let mut progress = running.progress();
    let seen = progress.wait_for(|progress| progress.log_bytes == 7);
    tokio::time::timeout(LONG, seen).await.unwrap().unwrap();
    let renewed = running.renew(SystemClock.boot()).await;
    assert!(matches!(renewed, Err(RenewError::Unsupported { version: 1, .. })), "{renewed:?}");
    running.stop(Duration::from_secs(1), "enough").await.unwrap();
    // The record exists before the end is reported, and its writer is there for a moment longer.
    let ended = async {
        loop {
            if let Found::Ended(record) = bench.executor.reattach(&bench.dir).await.unwrap() {
                break record;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let record = tokio::time::timeout(LONG, ended).await.expect("it has ended");
    assert_eq!((record.version, record.end), (1, End::Exited(ExitStatus::Code(3))));
    assert_eq!((record.oom, record.lease_over, record.stopped.as_deref()), (None, false, Some("enough")));
    let launch = bench.dir.read_launch().unwrap().unwrap();
    assert_eq!((launch.lease_until, launch.limits), (None, agent_shim::Limits::default()));
}
