//! What environments cost, against the other programs that make them from the same packages.
//!
//! A goal is a ratio to what was measured beside it in the same run. Where a row says `job`, all of it is in: the
//! client, the queue, the environment and the end of the job; where it says `agent-env`, the engine alone.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agent_env::{Build, EngineEvent, EngineRequest, Platform, Priority, Spec, Task, VERSION};
use agent_tests::channel::{Channel, Server};
use agent_tests::{Host, SOON, engine, engines, eventually, resident};

use crate::measure::{Series, time};
use crate::peers::Peers;

const SPECS: [&str; 4] = ["python", "numpy", "scipy", "scikit-learn"];
const WHEELS: [&str; 3] = ["numpy", "scipy", "scikit-learn"];
const WHEELS_COMPILED: [&str; 4] = ["--compile-bytecode", "numpy", "scipy", "scikit-learn"];

/// How long a job with an environment may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// All rows.
pub(crate) fn all() {
    let bench = Bench::new();
    println!("{:<58} {:>10} {:>10} {:>7} {:>7}", "measure", "ours", "other", "ratio", "goal");
    bench.cold();
    bench.warm();
    bench.one_more();
    bench.ready();
    bench.pip_part();
    bench.eight_jobs();
    bench.stalled();
    bench.huge();
    bench.cancel();
    bench.first_import();
}

/// Prints a row; the ratio is of the medians, and the goal is what it should not exceed.
pub(crate) fn row(measure: &str, ours: &Series, other: &Series, goal: Option<f64>) {
    ratio(measure, ours.median(), other.median(), goal);
    println!("{:<58} {:>10} {:>10}", "  least", ms(ours.least()), ms(other.least()));
}

/// Prints a row of two times, and whether their ratio is as good as it should be.
pub(crate) fn ratio(measure: &str, ours: Duration, other: Duration, goal: Option<f64>) {
    let ratio = ours.as_secs_f64() / other.as_secs_f64().max(1e-6);
    let told = goal.map_or_else(String::new, |goal| match ratio <= goal {
        true => format!("{goal:.2}"),
        false => format!("{goal:.2} MISSED"),
    });
    println!("{measure:<58} {:>10} {:>10} {ratio:>7.2} {told:>7}", ms(ours), ms(other));
}

/// Milliseconds, for people.
pub(crate) fn ms(duration: Duration) -> String {
    format!("{:.1} ms", duration.as_secs_f64() * 1e3)
}

/// What all rows use.
struct Bench {
    peers: Peers,
    channel: Server,
    scratch: tempfile::TempDir,
    python: String,
    wheels: PathBuf,
    platform: Platform,
    next: std::cell::Cell<u32>,
}

impl Bench {
    #[allow(clippy::disallowed_methods, reason = "asks for the interpreter behind the wrappers")]
    fn new() -> Bench {
        engine();
        let peers = Peers::find();
        let channel = Server::start(Channel::t2());
        let said = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
        let python = String::from_utf8_lossy(&said.expect("Python starts").stdout).trim().to_owned();
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let wheels = peers.wheels();
        let mut bench = Bench {
            peers,
            channel,
            scratch,
            python,
            wheels,
            platform: Platform::default(),
            next: std::cell::Cell::new(0),
        };
        bench.platform = bench.probe();
        bench
    }

    /// A path that was never used.
    fn fresh(&self, what: &str) -> PathBuf {
        self.next.set(self.next.get() + 1);
        self.scratch.path().join(format!("{what}-{}", self.next.get()))
    }

    /// The engine with this task as its only input.
    #[allow(clippy::disallowed_methods, reason = "runs what it measures")]
    fn engine(&self, task: Task) -> (Command, PathBuf) {
        let path = self.fresh("request");
        let request = EngineRequest { version: VERSION, task };
        fs::write(&path, serde_json::to_string(&request).expect("JSON") + "\n").expect("a file");
        let mut command = Command::new(engine());
        command.stdin(File::open(&path).expect("a file"));
        (command, path)
    }

    fn probe(&self) -> Platform {
        let said = self.engine(Task::Probe).0.stderr(Stdio::inherit()).output().expect("the engine starts");
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let last = text.lines().last().unwrap_or_default();
        match serde_json::from_str(last) {
            Ok(EngineEvent::Probed(platform)) => platform,
            other => panic!("the engine says no platform: {other:?} in {text}"),
        }
    }

    /// One environment by the engine alone.
    fn create(&self, cache: &Path, prefix: &Path, channel: &str, specs: &[&str]) -> Command {
        self.request(cache, prefix, channel, specs).0
    }

    /// The same, and the file of its input.
    fn request(&self, cache: &Path, prefix: &Path, channel: &str, specs: &[&str]) -> (Command, PathBuf) {
        fs::create_dir_all(cache).expect("a directory");
        fs::create_dir_all(prefix).expect("a directory");
        let spec = |(index, text): (usize, &&str)| Spec { text: (*text).to_owned(), line: index + 1 };
        self.engine(Task::Build(Box::new(Build {
            prefix: prefix.to_owned(),
            cache: cache.to_owned(),
            channels: vec![agent_env::Channel { name: "main".into(), url: channel.into(), mirrors: vec![] }],
            specs: specs.iter().enumerate().map(spec).collect(),
            lock: None,
            priority: Priority::Strict,
            offline: false,
            platform: self.platform.clone(),
            credentials: None,
            solve_within_s: 120,
            stall_s: 60,
            hard_links: true,
            for_everybody: false,
        })))
    }

    /// A box that uses the channel.
    fn host(&self, settings: &[(&str, &str)]) -> Host {
        let mut host = Host::new();
        host.set("AGENTD_CONDA_ALIAS", &self.channel.alias());
        host.set("PIP_NO_INDEX", "1");
        host.set("PIP_FIND_LINKS", Channel::t2().wheels().to_str().expect("UTF-8"));
        settings.iter().for_each(|(name, value)| host.set(name, value));
        host.start();
        host
    }

    fn cold(&self) {
        let url = self.channel.url("plain");
        let [mut engine, mut job, mut rattler, mut py, mut uv, mut venv] = series();
        for round in 0..5 {
            let places = || (self.fresh("cache"), self.fresh("env"));
            let (cache, prefix) = places();
            engine.push(time(self.create(&cache, &prefix, &url, &SPECS)));
            let (cache, prefix) = places();
            rattler.push(time(self.peers.rattler(&cache, &prefix, &url, &SPECS)));
            let host = self.host(&[]);
            job.push(run(&host, "cold", &conda(&SPECS, &[]), "true"));
            let (cache, prefix) = places();
            py.push(time(self.peers.py_rattler(&cache, &prefix, &url, &SPECS)));
            let (cache, prefix) = places();
            uv.push(time(self.peers.uv(&cache, &prefix, &self.python, &self.wheels, &WHEELS)));
            if round < 2 {
                let (cache, prefix) = places();
                venv.push(time(self.peers.venv(&cache, &prefix, &self.python, &self.wheels, &WHEELS)));
            }
        }
        row("cold: agent-env / rattler create", &engine, &rattler, Some(1.25));
        row("cold: job / rattler create", &job, &rattler, Some(1.25));
        row("cold: agent-env / py-rattler", &engine, &py, None);
        row("cold: agent-env / uv venv and install, wheels at hand", &engine, &uv, None);
        row("cold: agent-env / venv and pip, wheels at hand", &engine, &venv, None);
    }

    fn warm(&self) {
        let url = self.channel.url("plain");
        let [mut engine, mut new, mut bare, mut rattler, mut py, mut uv, mut compiled] = series();
        let caches = ["ours", "rattler", "py", "uv"].map(|name| self.scratch.path().join(name));
        let host = self.host(&[]);
        for round in 0..8 {
            let prefix = || self.fresh("env");
            let times = [
                time(self.create(&caches[0], &prefix(), &url, &SPECS)),
                time(self.peers.rattler(&caches[1], &prefix(), &url, &SPECS)),
                time(self.peers.py_rattler(&caches[2], &prefix(), &url, &SPECS)),
                time(self.peers.uv(&caches[3], &prefix(), &self.python, &self.wheels, &WHEELS)),
                time(self.peers.uv(&caches[3], &prefix(), &self.python, &self.wheels, &WHEELS_COMPILED)),
                run(&host, "warm", &conda(&varied(&SPECS, round), &[]), "true"),
                run_on_host(&host),
            ];
            if round == 0 {
                continue; // it filled the caches
            }
            for (series, time) in
                [&mut engine, &mut rattler, &mut py, &mut uv, &mut compiled, &mut new, &mut bare]
                    .into_iter()
                    .zip(times)
            {
                series.push(time);
            }
        }
        row("warm: agent-env / uv venv and install", &engine, &uv, Some(1.0));
        row("warm: agent-env / the same with bytecode, as packages have it", &engine, &compiled, None);
        let adds = new.median().saturating_sub(bare.median());
        ratio("warm: what a new one adds to a job / uv", adds, uv.median(), Some(1.0));
        row("warm: agent-env / rattler create", &engine, &rattler, None);
        row("warm: agent-env / py-rattler", &engine, &py, None);
    }

    fn one_more(&self) {
        let url = self.channel.url("plain");
        let [mut ours, mut theirs, ..] = series::<2>();
        for round in 0..5 {
            let more = ["tiny-one", "tiny-two", "setuptools", "wheel", "pip"][round];
            let specs = [&SPECS[..], &[more]].concat();
            let [ours_cache, theirs_cache] = ["ours", "rattler"].map(|name| self.scratch.path().join(name));
            ours.push(time(self.create(&ours_cache, &self.fresh("env"), &url, &specs)));
            theirs.push(time(self.peers.rattler(&theirs_cache, &self.fresh("env"), &url, &specs)));
        }
        row("one package more: agent-env / rattler create", &ours, &theirs, None);
    }

    fn ready(&self) {
        let host = self.host(&[]);
        let file = conda(&SPECS, &[]);
        run(&host, "ready", &file, "true");
        let [mut ready, mut bare, ..] = series::<2>();
        for _ in 0..30 {
            ready.push(run(&host, "ready", &file, "true"));
            bare.push(run_on_host(&host));
        }
        row("a job in a ready environment / on the host", &ready, &bare, None);
        let adds = ready.median().as_secs_f64() * 1e3 - bare.median().as_secs_f64() * 1e3;
        let files = count_files(&host.state().join("envs")) as f64;
        let limit = 5.0_f64.max(30.0 * files / 5000.0);
        let told = if adds <= limit { "" } else { " MISSED" };
        println!(
            "{:<58} {adds:>7.1} ms {:>10} {:>7} {limit:>4.0} ms{told}",
            format!("  it adds, with {files} files"),
            "",
            ""
        );
    }

    fn pip_part(&self) {
        let uv = self.peers.uv_path().display().to_string();
        let with_uv = self.host(&[("AGENTD_UV", &uv)]);
        let with_pip = self.host(&[("AGENTD_UV", "never")]);
        let [mut none, mut uv, mut pip, mut plain, ..] = series::<4>();
        let cache = self.scratch.path().join("ours");
        let lines = ["tiny-one", "tiny-two"];
        for round in 0..6 {
            let specs = varied(&["python", "pip"], round);
            let prefix = self.fresh("env"); // as for the jobs, nobody has used pip in it yet
            time(self.create(&cache, &prefix, &self.channel.url("plain"), &["python", "pip"]));
            let times = [
                run(&with_uv, "none", &conda(&specs, &[]), "true"),
                run(&with_uv, "uv", &conda(&specs, &lines), "true"),
                run(&with_pip, "pip", &conda(&specs, &lines), "true"),
                time(plain_pip(&prefix, &Channel::t2().wheels())),
            ];
            if round == 0 {
                continue; // it filled the caches
            }
            for (series, time) in [&mut none, &mut uv, &mut pip, &mut plain].into_iter().zip(times) {
                series.push(time);
            }
        }
        let adds = |series: &Series| series.median().saturating_sub(none.median());
        ratio("pip part of two wheels: with uv / with pip", adds(&uv), adds(&pip), Some(0.3));
        ratio("pip part of two wheels: with pip / plain pip", adds(&pip), plain.median(), Some(1.1));
    }

    fn eight_jobs(&self) {
        let [mut one, mut eight, ..] = series::<2>();
        for _ in 0..3 {
            for (series, jobs) in [(&mut one, 1), (&mut eight, 8)] {
                let host = self.host(&[("AGENTD_SLOTS", "8")]);
                let dir = job(&host, "same", &conda(&SPECS, &[]), "true");
                let begun = Instant::now();
                let names: Vec<String> = (0..jobs).map(|_| submit(&host, &dir)).collect();
                names.iter().for_each(|name| ended(&host, name));
                series.push(begun.elapsed());
            }
        }
        row("eight jobs of one new environment / one job", &eight, &one, Some(1.1));
    }

    fn stalled(&self) {
        let [mut beside, mut alone, ..] = series::<2>();
        for _ in 0..3 {
            for (series, stalls) in [(&mut alone, false), (&mut beside, true)] {
                let host = self.host(&[("AGENTD_SLOTS", "4")]);
                self.channel.set("plain");
                run(&host, "first", &conda(&["python", "numpy"], &[]), "true");
                if stalls {
                    self.channel.hold();
                    self.channel.set("stall~scipy");
                    submit(&host, &job(&host, "stalls", &conda(&["python", "scipy"], &[]), "true"));
                    eventually("the download stalls", SOON, || (self.channel.stalled() > 0).then_some(()));
                }
                series.push(run(&host, "other", &conda(&["python", "joblib", "tiny-two"], &[]), "true"));
                self.channel.release();
                self.channel.set("plain");
            }
        }
        row("a job whose packages arrive, beside a stalled one / alone", &beside, &alone, Some(1.2));
    }

    fn huge(&self) {
        // Half of the records in each of two lists.
        let url = self.channel.url("huge~180000");
        time(self.peers.rattler(&self.fresh("cache"), &self.fresh("env"), &url, &["python"])); // the server makes it
        let (mut times, mut memory) = (series::<2>(), [0_u64; 2]);
        for _ in 0..3 {
            let (ours, input) = self.request(&self.fresh("cache"), &self.fresh("env"), &url, &["python"]);
            let theirs = self.peers.rattler(&self.fresh("cache"), &self.fresh("env"), &url, &["python"]);
            for (index, measured) in [(ours, Some(input)), (theirs, None)].into_iter().enumerate() {
                let (took, peak) = peak(measured);
                times[index].push(took);
                memory[index] = memory[index].max(peak);
            }
        }
        let [ours, theirs] = &times;
        row("a channel of 360,000 records: agent-env / rattler create", ours, theirs, None);
        let mb = |bytes: u64| format!("{} MB", bytes / 1_000_000);
        let of = memory[0] as f64 / memory[1] as f64;
        let measure = "  memory at its peak (conda 26 took 1040 MB and 12.8 s)";
        println!("{measure:<58} {:>10} {:>10} {of:>7.2}", mb(memory[0]), mb(memory[1]));
        let host = self.host(&[]);
        let before = resident(host.pid());
        self.channel.set("huge~180000");
        run(&host, "huge", &conda(&["python"], &[]), "true");
        self.channel.set("plain");
        let grown = resident(host.pid()).saturating_sub(before);
        println!("{:<58} {:>10}", "  by which the daemon itself grew", mb(grown));
    }

    fn cancel(&self) {
        let mut gone = Series::default();
        for round in 0..3 {
            let host = self.host(&[]);
            self.channel.set("slow~2000000");
            let name = submit(&host, &job(&host, "slow", &conda(&SPECS, &[]), "true"));
            eventually("it is built", SOON, || (!engines(host.home(), host.pid()).is_empty()).then_some(()));
            std::thread::sleep(Duration::from_millis(700 * (round + 1)));
            let begun = Instant::now();
            host.ctl(&["cancel", &name]).ok();
            eventually("the engine is gone", SOON, || {
                engines(host.home(), host.pid()).is_empty().then_some(())
            });
            gone.push(begun.elapsed());
            self.channel.set("plain");
        }
        let told = if gone.most() <= Duration::from_secs(3) { "" } else { " MISSED" };
        let measure = "cancel while it is built, to the end of the engine, at most";
        println!("{measure:<58} {:>10} {:>10} {:>7} 3000 ms{told}", ms(gone.most()), "", "");
    }

    fn first_import(&self) {
        const IMPORT: &str =
            "import time; begun = time.perf_counter(); import sklearn; print(time.perf_counter() - begun)";
        let [mut builds, mut cached, mut venv, ..] = series::<3>();
        for round in 0..3 {
            let host = self.host(&[]);
            let file = conda(&varied(&SPECS, round), &[]);
            let command = format!("python -c '{IMPORT}'");
            let dir = job(&host, "import", &file, &command);
            for series in [&mut builds, &mut cached] {
                let ran = host.ctl(&["run", dir.to_str().expect("UTF-8")]).ok();
                series.push(seconds(&ran.stdout));
            }
            let (cache, prefix) = (self.fresh("cache"), self.fresh("env"));
            time(self.peers.venv(&cache, &prefix, &self.python, &self.wheels, &WHEELS));
            venv.push(import_in(&prefix, IMPORT));
        }
        row("first import sklearn: second job of it / a new venv", &cached, &venv, Some(1.0));
        row("first import sklearn: the job that had it built / a new venv", &builds, &venv, None);
    }
}

fn series<const N: usize>() -> [Series; N] {
    std::array::from_fn(|_| Series::default())
}

/// The same packages, asked for in words that nobody used before.
fn varied(specs: &[&str], round: usize) -> Vec<String> {
    let last = specs.len() - 1;
    let vary = |(index, spec): (usize, &&str)| match index == last {
        true => format!("{spec} >=0.{round}"),
        false => (*spec).to_owned(),
    };
    specs.iter().enumerate().map(vary).collect()
}

/// An environment file.
fn conda<S: AsRef<str>>(specs: &[S], pip: &[&str]) -> String {
    let mut text = "channels: [main]\ndependencies:\n".to_owned();
    specs.iter().for_each(|spec| text.push_str(&format!("- {}\n", spec.as_ref())));
    if !pip.is_empty() {
        text.push_str("- pip:\n");
        pip.iter().for_each(|line| text.push_str(&format!("  - {line}\n")));
    }
    text
}

fn job(host: &Host, name: &str, conda: &str, command: &str) -> PathBuf {
    let command = serde_json::Value::from(command);
    let job = format!("command: {command}\ncode: .\nenvironment: {{conda_file: conda.yml}}\n");
    host.project(name, &[("job.yml", &job), ("conda.yml", conda)])
}

fn submit(host: &Host, dir: &Path) -> String {
    host.ctl(&["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned()
}

fn ended(host: &Host, name: &str) {
    // One who looks from time to time would add to what is measured.
    host.ctl(&["wait", name, "--timeout", &PATIENCE.as_secs().to_string()]).ok();
}

/// From the start of `agentctl run` to its end.
fn run(host: &Host, name: &str, conda: &str, command: &str) -> Duration {
    let dir = job(host, name, conda, command);
    time(host.client(&["run", dir.to_str().expect("UTF-8")]))
}

fn run_on_host(host: &Host) -> Duration {
    let dir = host.project("bare", &[("job.yml", "command: 'true'\ncode: .\nenvironment: host\n")]);
    time(host.client(&["run", dir.to_str().expect("UTF-8")]))
}

/// What a user would type in the environment.
#[allow(clippy::disallowed_methods, reason = "the other side of the ratio")]
fn plain_pip(prefix: &Path, wheels: &Path) -> Command {
    let mut command = Command::new(prefix.join("bin/python"));
    command.args(["-m", "pip", "install", "--quiet", "--no-index", "--find-links"]);
    command.arg(wheels).args(["tiny-one", "tiny-two"]).stdin(Stdio::null());
    command
}

#[allow(clippy::disallowed_methods, reason = "the other side of the ratio")]
fn import_in(prefix: &Path, script: &str) -> Duration {
    let said = Command::new(prefix.join("bin/python")).args(["-c", script]).output().expect("Python starts");
    seconds(&String::from_utf8_lossy(&said.stdout))
}

fn seconds(text: &str) -> Duration {
    Duration::from_secs_f64(text.trim().parse().unwrap_or_else(|_| panic!("no time in `{text}`")))
}

/// How long a command runs, and the most memory that a process of it has.
#[allow(clippy::disallowed_methods, reason = "measures a process as its parent")]
fn peak(measured: (Command, Option<PathBuf>)) -> (Duration, u64) {
    const WATCH: &str = "
import resource, subprocess, sys, time
begun, quiet = time.monotonic(), subprocess.DEVNULL
subprocess.run(sys.argv[2:], stdin=open(sys.argv[1]), stdout=quiet, stderr=quiet, check=True)
print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
";
    let (command, input) = measured;
    let mut watch = Command::new("python3");
    watch.args(["-c", WATCH]).arg(input.unwrap_or_else(|| "/dev/null".into()));
    watch.arg(command.get_program()).args(command.get_args());
    watch.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let said = watch.output().expect("Python starts");
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let (took, bytes) = text.trim().split_once(' ').unwrap_or_else(|| panic!("{said:?}"));
    (seconds(took), bytes.parse().expect("a number"))
}

fn count_files(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => count_files(&entry.path()),
            _ => 1,
        })
        .sum()
}
