//! What the product costs, as ratios to what the machine itself and other programs do, measured in one run.
//!
//! ```text
//! bench [jobs] [far] [environments] [containers] [snapshots [FILES]] [streams] [fanout] [sessions] [nodes [COUNT]]
//! ```
//!
//! Nothing is asserted: machines differ, and so do their moods. Both sides of a ratio take turns, so that a
//! slow moment hits both; the median of the rounds is printed, with the least beside it.

#![allow(clippy::print_stdout, reason = "printing is what a benchmark is for")]

mod containers;
mod environments;
mod fanout;
mod far;
mod measure;
mod nodes;
mod peers;
mod sessions;
mod snapshots;
mod streams;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use agent_tests::{Host, SOON, cpu_seconds, eventually, resident};
use measure::{Series, first_line, time};

fn main() {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, words)) = parts.split_first()
        && first == "move"
    {
        return snapshots::move_one(words);
    }
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|named| named == part);
    if wanted("jobs") {
        jobs();
    }
    if wanted("far") {
        far::all();
    }
    if wanted("environments") {
        environments::all();
    }
    if wanted("containers") {
        containers::all();
    }
    if wanted("snapshots") {
        snapshots::all(parts.iter().find_map(|part| part.parse().ok()));
    }
    if wanted("streams") {
        streams::all();
    }
    if wanted("fanout") {
        fanout::all();
    }
    if wanted("sessions") {
        sessions::all();
    }
    if wanted("nodes") {
        nodes::all(parts.iter().find_map(|part| part.parse().ok()).unwrap_or(2000));
    }
}

fn jobs() {
    println!("{:<46} {:>10} {:>10} {:>7}", "measure", "ours", "other", "ratio");
    let host = Host::started();
    submit_to_first_line(&host);
    resubmit_of_20000_files(&host);
    tiny_jobs(&host);
    log_throughput(&host);
    drop(host);
    idle();
}

/// Prints one row; the ratio is of the medians.
fn row(measure: &str, ours: &Series, other: &Series) {
    let ms = |d: Duration| format!("{:.1} ms", d.as_secs_f64() * 1e3);
    let ratio = ours.median().as_secs_f64() / other.median().as_secs_f64();
    println!("{measure:<46} {:>10} {:>10} {ratio:>7.2}", ms(ours.median()), ms(other.median()));
    println!("{:<46} {:>10} {:>10}", "  least", ms(ours.least()), ms(other.least()));
}

#[allow(clippy::disallowed_methods, reason = "the other side of the ratio")]
fn other(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    command
}

fn submit_to_first_line(host: &Host) {
    let code = host.project("first", &[("t.py", "print('hello')\n")]);
    let script = code.join("t.py").display().to_string();
    let run = ["run", code.to_str().expect("UTF-8"), "--", "python", "t.py"];
    host.ctl(&run).ok();
    // The interpreter itself: a wrapper script in front of it would flatter us.
    let python =
        other("python3", &["-c", "import sys; print(sys.executable)"]).output().expect("python3 runs");
    let python = String::from_utf8_lossy(&python.stdout).trim().to_owned();
    let (mut ours, mut bare) = (Series::default(), Series::default());
    for _ in 0..15 {
        bare.push(first_line(other(&python, &[&script])));
        ours.push(first_line(host.client(&run)));
    }
    row("submit to first line / bare python3 script", &ours, &bare);
}

fn resubmit_of_20000_files(host: &Host) {
    let code = host.home().join("many");
    let mut bytes = 0_usize;
    for index in 0..20_000 {
        let dir = code.join(format!("d{:03}/e{:02}", index % 200, index % 7));
        fs::create_dir_all(&dir).expect("a directory");
        let text = format!("file {index}\n").repeat(1 + index % 400);
        bytes += text.len();
        fs::write(dir.join(format!("f{index}.txt")), text).expect("a file");
    }
    println!("20,000 files, {} MB", bytes / 1_000_000);
    let copy = host.home().join("copy");
    let from = format!("{}/", code.display());
    let rsync = ["-a", &from, copy.to_str().expect("UTF-8")];
    let submit = ["submit", code.to_str().expect("UTF-8"), "--", "true"];
    let (mut ours, mut theirs) = (Series::default(), Series::default());
    ours.push(time(host.client(&submit)));
    theirs.push(time(other("rsync", &rsync)));
    row("first submit of 20,000 files / rsync -a", &ours, &theirs);
    let (mut ours, mut theirs) = (Series::default(), Series::default());
    for round in 0..5 {
        fs::write(code.join("d000/e00/f0.txt"), format!("changed {round}\n")).expect("a file");
        ours.push(time(host.client(&submit)));
        theirs.push(time(other("rsync", &rsync)));
    }
    row("again with 1 file changed / rsync -a", &ours, &theirs);
    all_ended(host);
}

fn tiny_jobs(host: &Host) {
    let code = host.project("tiny", &[("x", "")]);
    let submit = ["submit", code.to_str().expect("UTF-8"), "--", "true"];
    let mut ours = Series::default();
    let start = std::time::Instant::now();
    for _ in 0..200 {
        time(host.client(&submit));
    }
    all_ended(host);
    ours.push(start.elapsed());
    let mut bare = Series::default();
    bare.push(time(other("sh", &["-c", "seq 200 | xargs -P2 -I{} sh -c true"])));
    row("200 tiny jobs, two slots / xargs -P2", &ours, &bare);
}

fn all_ended(host: &Host) {
    eventually("every job to end", 10 * SOON, || {
        let listed = host.ctl(&["jobs", "--json", "--active"]).ok().json();
        listed["jobs"].as_array()?.is_empty().then_some(())
    });
}

fn log_throughput(host: &Host) {
    let script = "import sys\nline = 'x' * 99 + '\\n'\nfor _ in range(2000): sys.stdout.write(line * 1000)\n";
    let code = host.project("loud", &[("t.py", script)]);
    let run = ["run", code.to_str().expect("UTF-8"), "--", "python", "t.py"];
    let path = code.join("t.py").display().to_string();
    let (mut ours, mut bare) = (Series::default(), Series::default());
    for _ in 0..3 {
        ours.push(time(host.client(&run)));
        bare.push(time(other("sh", &["-c", &format!("python3 {path} | cat > {path}.out")])));
    }
    row("200 MB of output, stored and followed / pipe", &ours, &bare);
    println!("{:<46} {:>7.0} MB/s", "  that is", 200.0 / ours.median().as_secs_f64());
}

fn idle() {
    let host = Host::started();
    let job = host.submit("sleep 600");
    host.wait_for(&job, &["Running"]);
    let shim = shim_of(&host);
    std::thread::sleep(Duration::from_secs(5));
    let (before, window) = (cpu_seconds(host.pid()), Duration::from_secs(30));
    std::thread::sleep(window);
    let used = cpu_seconds(host.pid()) - before;
    let mib = |bytes: u64| bytes as f64 / (1024.0 * 1024.0);
    println!("{:<46} {:>7.1} MiB", "idle daemon, resident", mib(resident(host.pid())));
    println!("{:<46} {:>7.3} %", "idle daemon, of one core", 100.0 * used / window.as_secs_f64());
    println!("{:<46} {:>7.1} MiB", "shim of a running job, resident", mib(resident(shim)));
}

fn shim_of(host: &Host) -> u32 {
    let is_shim = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "agent-shim")
    };
    host.processes().into_iter().find(is_shim).expect("a running job has a shim")
}
