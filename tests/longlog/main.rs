//! A long log through a controller and a node that are killed again and again: every line must arrive once,
//! in its place.
//!
//! `LONGLOG_LINES` is how many lines, at [`RATE`] a second; kills are in proportion. Without it the run is short
//! enough for a merge; `tests/run longlog` runs ten million.

#![allow(clippy::print_stdout, reason = "the figures of the run are what it is for")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agent_tests::{SOON, binaries, eventually, signal};
use rustix::process::Signal;

/// Lines a second.
const RATE: u64 = 50_000;

/// Lines after which the node is killed once more, at most every third of a second.
const NODE_DIES: u64 = 40_000;

/// The same for the controller.
const CONTROLLER_DIES: u64 = 66_000;

/// Writes numbered lines, in pieces of a hundredth of a second.
const WRITER: &str = "
import sys, time
lines, rate = int(sys.argv[1]), int(sys.argv[2])
begun, number = time.monotonic(), 0
while number < lines:
    due = min(lines, int((time.monotonic() - begun) * rate) + 1)
    sys.stdout.write(''.join('line %010d\\n' % n for n in range(number, due)))
    sys.stdout.flush()
    number = due
    time.sleep(0.01)
";

/// A controller and a node, each a process with a state directory of its own.
struct Pair {
    home: tempfile::TempDir,
    running: [Option<Child>; 2],
}

const CONTROLLER: usize = 0;
const NODE: usize = 1;

impl Pair {
    fn started() -> Pair {
        let home = tempfile::Builder::new().prefix("agentd-long-").tempdir().expect("a directory");
        let mut pair = Pair { home, running: [None, None] };
        pair.spawn(CONTROLLER);
        eventually("the controller answers", SOON, || (pair.ctl(&["nodes"]).0 == 0).then_some(()));
        pair.spawn(NODE);
        pair
    }

    fn place(&self, which: usize) -> PathBuf {
        self.home.path().join(["controller", "node"][which])
    }

    fn socket(&self) -> PathBuf {
        self.place(CONTROLLER).join("agentd.sock")
    }

    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    fn spawn(&mut self, which: usize) {
        let state = self.place(which);
        let config = state.with_extension("yaml");
        let text = match which {
            CONTROLLER => "roles: controller\n".to_owned(),
            _ => format!("roles: node\ncontroller: unix:{}\ndisk_reserve: 64MiB\n", self.socket().display()),
        };
        fs::write(&config, text).expect("a file");
        let log = File::options().create(true).append(true).open(state.with_extension("log")).expect("a log");
        let mut agentd = Command::new(binaries().join("agentd"));
        agentd.arg("--user").arg("--config").arg(config).arg("--state-dir").arg(state).arg("run");
        agentd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.running[which] = Some(agentd.spawn().expect("agentd starts"));
    }

    /// Ends a daemon as a crash does, and starts it again.
    fn crash(&mut self, which: usize) {
        let mut child = self.running[which].take().expect("it runs");
        child.kill().expect("SIGKILL is sent");
        child.wait().expect("it is reaped");
        self.spawn(which);
    }

    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    fn client(&self, arguments: &[&str]) -> Command {
        let mut ctl = Command::new(binaries().join("agentctl"));
        ctl.arg("--socket").arg(self.socket()).args(arguments).env("NO_COLOR", "1").stdin(Stdio::null());
        ctl.current_dir(self.home.path());
        ctl
    }

    /// Runs `agentctl` to its end.
    fn ctl(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.client(arguments).output().expect("agentctl runs");
        (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn submit(&self, lines: u64) -> String {
        let code = self.home.path().join("code");
        fs::create_dir_all(&code).expect("a directory");
        fs::write(code.join("writer.py"), WRITER).expect("a file");
        let command = format!("exec /usr/bin/python3 writer.py {lines} {RATE}");
        let code = code.to_str().expect("UTF-8");
        let (status, job) = self.ctl(&["submit", code, "--", "sh", "-c", &command]);
        assert_eq!(status, 0, "the job is submitted");
        job
    }

    fn wait_for(&self, job: &str, state: &str, deadline: Duration) {
        eventually(&format!("{job} to be {state}"), deadline, || {
            let (status, shown) = self.ctl(&["show", job, "--json"]);
            let shown: serde_json::Value = serde_json::from_str(&shown).ok().filter(|_| status == 0)?;
            (shown["state"] == state).then_some(())
        });
    }
}

impl Drop for Pair {
    #[allow(clippy::print_stderr, reason = "what the daemons said belongs to a failing test")]
    fn drop(&mut self) {
        for which in [CONTROLLER, NODE] {
            if let Some(mut child) = self.running[which].take() {
                let _ = child.kill();
                let _ = child.wait();
            }
            if std::thread::panicking() {
                let log = fs::read_to_string(self.place(which).with_extension("log")).unwrap_or_default();
                eprintln!("--- {}\n{log}", self.place(which).display());
            }
        }
        let home = self.home.path().display().to_string();
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        for pid in pids {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let cwd = fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
            if cwd.starts_with(&home) || String::from_utf8_lossy(&command).contains(&home) {
                signal(pid, Signal::KILL);
            }
        }
    }
}

/// What a log lacks, has twice, or has in another place.
#[derive(Debug, Default, PartialEq, Eq)]
struct Verdict {
    lines: u64,
    lost: u64,
    repeated: u64,
    reordered: u64,
    foreign: u64,
}

fn judge(log: impl BufRead, lines: u64) -> Verdict {
    let mut verdict = Verdict::default();
    let mut seen = vec![false; usize::try_from(lines).expect("it fits")];
    let mut next = 0;
    for line in log.lines() {
        verdict.lines += 1;
        let line = line.expect("the log is read");
        let number = line.strip_prefix("line ").and_then(|number| number.parse::<usize>().ok());
        let Some(number) = number.filter(|number| line.len() == 15 && *number < seen.len()) else {
            verdict.foreign += 1;
            continue;
        };
        if std::mem::replace(&mut seen[number], true) {
            verdict.repeated += 1;
        } else if number < next {
            verdict.reordered += 1;
        }
        next = next.max(number + 1);
    }
    verdict.lost = seen.iter().filter(|seen| !**seen).count() as u64;
    verdict
}

#[test]
fn test_long_log_arrives_whole_through_kills_of_both_sides() {
    #[allow(clippy::disallowed_methods, reason = "a switch for whoever runs it")]
    let lines: u64 = std::env::var("LONGLOG_LINES").map_or(200_000, |lines| lines.parse().expect("a number"));
    let mut pair = Pair::started();
    let job = pair.submit(lines);
    pair.wait_for(&job, "Running", SOON);
    let begun = Instant::now();
    let writing = Duration::from_secs_f64(lines as f64 / RATE as f64);
    let (node_kills, controller_kills) =
        ((lines / NODE_DIES).clamp(5, 50), (lines / CONTROLLER_DIES).clamp(3, 20));
    let mut plan: Vec<(Duration, usize)> = Vec::new();
    for (which, kills) in [(NODE, node_kills), (CONTROLLER, controller_kills)] {
        // Evenly, but never at the same instant of a round.
        plan.extend((1..=kills).map(|kill| {
            let at =
                writing.mul_f64((kill as f64 - 0.37 * ((kill * 7) % 5) as f64 / 5.0) / (kills + 1) as f64);
            (at, which)
        }));
    }
    plan.sort();
    for (at, which) in plan {
        std::thread::sleep((begun + at).saturating_duration_since(Instant::now()));
        pair.crash(which);
    }
    pair.wait_for(&job, "Completed", writing + 3 * SOON);
    let took = begun.elapsed();
    let mut shown = pair.client(&["logs", &job]).stdout(Stdio::piped()).spawn().expect("agentctl runs");
    let verdict = judge(BufReader::new(shown.stdout.take().expect("a pipe")), lines);
    assert!(shown.wait().expect("agentctl is reaped").success());
    println!(
        "{lines} lines, {node_kills} kills of the node, {controller_kills} of the controller, {:.1} s: {verdict:?}",
        took.as_secs_f64()
    );
    assert_eq!(verdict, Verdict { lines, ..Verdict::default() });
}

#[test]
fn test_judge_sees_what_is_wrong() {
    let log =
        "line 0000000000\nline 0000000002\nline 0000000001\nline 0000000002\nline 00\nline 0000000004\n";
    let verdict = judge(log.as_bytes(), 5);
    assert_eq!(verdict, Verdict { lines: 6, lost: 1, repeated: 1, reordered: 1, foreign: 1 });
}
