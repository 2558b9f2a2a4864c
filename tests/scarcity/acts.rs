//! What is done while a resource is scarce, and what must hold of each.
//!
//! A round has three parts: what must be there before ([`Round::lay`]), what happens meanwhile ([`Round::begin`]) and
//! what came of it, looked at when there is plenty again ([`Round::came`]). It may end well, at once or after waiting,
//! or be refused by a fault that names what is scarce and does not blame who asked; then the same must do now.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use agent_model::{Blame, Code, EnvSpec, Fault, JobDraft};
use agent_proto::v1;
use agent_tests::fleet::Fleet;
use agent_tests::{SOON, binaries, eventually, witness};

use crate::scarcity::means::{Bed, Means};

/// The Python of the machine.
const PYTHON: &str = "/usr/bin/python3";
/// Lines of the job that runs all the time.
const LINES: u64 = 1500;
/// Lines of the job that begins meanwhile.
const FEW_LINES: u64 = 200;
/// Files of the directory that is fetched.
const FILES: usize = 300;

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Act {
    Submit,
    Fetch,
    Build,
    Run,
    Log,
    Upload,
    Download,
    Gc,
}

impl Act {
    pub(crate) const ALL: [Act; 8] =
        [Act::Submit, Act::Fetch, Act::Build, Act::Run, Act::Log, Act::Upload, Act::Download, Act::Gc];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Act::Submit => "submit",
            Act::Fetch => "fetch",
            Act::Build => "build",
            Act::Run => "run",
            Act::Log => "log",
            Act::Upload => "upload",
            Act::Download => "download",
            Act::Gc => "gc",
        }
    }
}

/// A job that ended before anything was scarce, and what it left.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) job: String,
    files: BTreeMap<PathBuf, Vec<u8>>,
    log: Vec<u8>,
}

impl Kept {
    pub(crate) fn new(fleet: &Fleet) -> Kept {
        let fix = fleet.fix("--lines 300").replacen("exec ", "", 1);
        let leave = "for i in $(seq 60); do echo kept $i > outputs/f$i; done; yes kept | head -c 1500000 > outputs/big";
        let job = fleet.client.run(&format!("{fix} && {leave}"));
        assert_eq!(fleet.client.ended(&job).state, "Completed");
        let files = download(fleet, &job).expect("there is plenty");
        assert_eq!(files.len(), 61, "{:?}", files.keys());
        Kept { log: fleet.client.log(&job, "job"), job, files }
    }

    /// It is still there, byte for byte, and the store lacks nothing.
    pub(crate) fn check(&self, fleet: &Fleet) -> Result<(), String> {
        let now = download(fleet, &self.job)?;
        let other = self.files.iter().filter(|(path, bytes)| now.get(*path) != Some(bytes)).count();
        demand(other == 0 && now.len() == self.files.len(), || {
            format!("{other} outputs are lost or changed")
        })?;
        demand(fleet.client.log(&self.job, "job") == self.log, || "the log of before changed".into())?;
        agentctl(fleet, &["gc", "--check"]).map(drop)
    }
}

/// What one scarcity is for.
pub(crate) struct Round {
    name: String,
    means: Means,
    gate: PathBuf,
    jobs: BTreeMap<Act, String>,
    asked: BTreeMap<Act, JoinHandle<Result<String, String>>>,
}

impl Round {
    /// Everything these operations need, up to the moment they begin: all slots are taken, what is to be fetched,
    /// built and run waits for one.
    pub(crate) fn lay(bed: &Bed, acts: &[Act], name: &str) -> Round {
        const SLOTS: usize = 5;
        let (fleet, gate) = (&bed.fleet, bed.fleet.home().join(format!("gate-{name}")));
        let mut jobs = BTreeMap::new();
        let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
        let late = gate.with_extension("late");
        if acts.contains(&Act::Log) {
            let wishes = format!("--lines {LINES} --rate 200 --until {}", late.display());
            jobs.insert(Act::Log, fleet.submit(&wishes));
        }
        if acts.contains(&Act::Upload) {
            let leave = format!("for i in $(seq 40); do echo {name} $i > outputs/f$i; done");
            let written = gate.with_extension("written");
            let command = format!("{leave}; touch {}; {wait}", written.display());
            jobs.insert(Act::Upload, fleet.client.run(&command));
            eventually("the outputs are written", SOON, || written.exists().then_some(()));
        }
        let mut running: Vec<String> = jobs.values().cloned().collect();
        running.extend((running.len()..SLOTS).map(|_| fleet.client.run(&wait)));
        running.iter().for_each(|job| drop(fleet.client.reached(job, &["Running"])));
        for act in [Act::Fetch, Act::Build, Act::Run] {
            if acts.contains(&act) {
                let job = match act {
                    Act::Fetch => fleet.client.try_submit_dir(&large(fleet.home(), name)).expect("plenty"),
                    Act::Build => fleet.client.submit(&environment(name)),
                    _ => fleet.submit(&format!("--lines {FEW_LINES} --seconds 0.5")),
                };
                jobs.insert(act, job);
            }
        }
        Round { name: name.to_owned(), means: bed.means, gate, jobs, asked: BTreeMap::new() }
    }

    /// Lets all of it happen.
    pub(crate) fn begin(&mut self, fleet: &Fleet, acts: &[Act], kept: &Kept) {
        fs::write(&self.gate, "").expect("a file");
        for act in acts {
            let Some(arguments) = self.asks(*act, fleet, kept) else { continue };
            let socket = fleet.controller.socket();
            let ask = std::thread::spawn(move || ask(&socket, &arguments));
            self.asked.insert(*act, ask);
        }
    }

    /// What somebody asks of the daemon for this operation, if it is one that somebody asks for.
    fn asks(&self, act: Act, fleet: &Fleet, kept: &Kept) -> Option<Vec<String>> {
        let words: Vec<String> = match act {
            Act::Submit => {
                let dir = fleet.home().join(format!("small-{}", self.name));
                fs::create_dir_all(&dir).expect("a directory");
                fs::write(dir.join("text"), &self.name).expect("a file");
                let dir = dir.display().to_string();
                vec!["submit".into(), dir, "--".into(), "cat".into(), "text".into()]
            }
            Act::Log => vec!["logs".into(), kept.job.clone()],
            Act::Download => {
                let to = fleet.home().join(format!("download-{}", self.name)).display().to_string();
                vec!["download".into(), kept.job.clone(), "-o".into(), to, "--force".into()]
            }
            Act::Gc => vec!["gc".into(), "--all".into()],
            _ => return None,
        };
        Some(words)
    }

    /// What runs to the end of the scarcity may end now.
    pub(crate) fn over(&self) {
        fs::write(self.gate.with_extension("late"), "").expect("a file");
    }

    /// What came of an operation: it was done, was refused and then done, or ended with a true fault; an error says
    /// what did not hold.
    pub(crate) fn came(&mut self, act: Act, bed: &Bed, kept: &Kept) -> Result<String, String> {
        let fleet = &bed.fleet;
        let (mut came, mut said) = ("done", String::new());
        if let Some(asked) = self.asked.remove(&act) {
            match asked.join().map_err(|_| "the client panicked".to_owned())? {
                Ok(answer) => said = answer,
                Err(refusal) => {
                    came = "refused";
                    told_truly(self.means, &refusal, None)?;
                    let words = self.asks(act, fleet, kept).unwrap_or_default();
                    said =
                        ask(&fleet.controller.socket(), &words).map_err(|again| format!("again: {again}"))?;
                }
            }
        }
        let mut ended = |job: &str| {
            let log = self.completed(fleet, job)?;
            if log.is_none() {
                came = "told";
            }
            Ok::<_, String>(log)
        };
        match act {
            Act::Submit => {
                if let Some(log) = ended(said.trim())? {
                    demand(log == self.name.as_bytes(), || format!("the job wrote {log:?}"))?;
                }
            }
            Act::Log => {
                demand(said.as_bytes() == kept.log, || "the log that was read is not whole".into())?;
                went_on(self.means, fleet, &self.jobs[&act], LINES)?;
            }
            Act::Run => {
                let job = &self.jobs[&act];
                if ended(job)?.is_some() {
                    went_on(self.means, fleet, job, FEW_LINES)?;
                }
            }
            Act::Fetch | Act::Build => drop(ended(&self.jobs[&act])?),
            Act::Upload => {
                let job = &self.jobs[&act];
                if ended(job)?.is_some() {
                    let found = download(fleet, job)?.len();
                    demand(found == 40, || format!("{found} of 40 outputs of {job} are there"))?;
                }
            }
            Act::Download => {
                let to = fleet.home().join(format!("download-{}", self.name));
                demand(files(&to) == kept.files, || "what was downloaded differs".into())?;
            }
            Act::Gc => {}
        }
        Ok(came.to_owned())
    }

    /// The log of a job that ended well; nothing for one that a true fault ended.
    fn completed(&self, fleet: &Fleet, job: &str) -> Result<Option<Vec<u8>>, String> {
        let ended = fleet.client.ended(job);
        if ended.state == "Completed" {
            return Ok(Some(fleet.client.log(job, "job")));
        }
        let code = ended_truly(self.means, &ended)?;
        // Room comes back, and is waited for.
        let waits = matches!(self.means, Means::Inodes | Means::Bytes);
        demand(!waits, || format!("{job} was ended by {code} and not kept waiting")).map(|()| None)
    }
}

/// A job failed for what was scarce, and says so; the code of its fault.
fn ended_truly(means: Means, ended: &v1::Job) -> Result<&str, String> {
    let fault = ended.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref());
    let fault = fault.ok_or("it failed and nobody says why")?;
    let (job, why) = (&ended.job, fault.why.join(": "));
    let text = format!("{job} ended: error[{}]: {}: {why}", fault.code, fault.what);
    told_truly(means, &text, Some(&fault.blame)).map(|()| fault.code.as_str())
}

/// A job that ran before went on to its end with every line, or with word of how many could not be written. Nobody but
/// the kernel may end it.
pub(crate) fn went_on(means: Means, fleet: &Fleet, job: &str, lines: u64) -> Result<(), String> {
    let ended = fleet.client.ended(job);
    if ended.state != "Completed" {
        let code = ended_truly(means, &ended)?;
        return demand(code == Code::OutOfMemory.as_str(), || format!("{job} was ended by {code}"));
    }
    let found = witness::lines(&fleet.client.log(job, "job"), lines);
    let told: u64 = found.strange.iter().filter_map(|line| dropped(line)).sum();
    let in_order = found.duplicated == 0 && found.reordered == 0;
    demand(in_order && found.lost == told && found.read + told == lines, || format!("{job}: {found:?}"))
}

/// How many lines the log says were dropped at this place.
fn dropped(line: &str) -> Option<u64> {
    let (lines, _) = line.strip_prefix("[agentd: ")?.split_once(" lines of output were dropped here")?;
    lines.rsplit(' ').next()?.parse().ok()
}

fn demand(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// Whether a refusal names what is scarce, is not blamed on who asked, and is not taken for something worse.
fn told_truly(means: Means, text: &str, blame: Option<&str>) -> Result<(), String> {
    const NEVER: [&str; 4] = ["damaged", "missing from the store", "not found", "no such"];
    let lower = text.to_lowercase();
    let code = lower.split("error[").nth(1).and_then(|rest| Code::parse(rest.split(']').next()?));
    let untrue = NEVER.iter().find(|word| lower.contains(**word));
    let complaint = match code.map(|code| Fault::new(code, "").blame) {
        _ if untrue.is_some() => format!("it says `{}`", untrue.unwrap_or(&"")),
        None => "it has no code".into(),
        Some(usual) if blame.map_or(usual == Blame::User, |blame| blame == "user") => {
            "it blames who asked".into()
        }
        _ if !means.names().iter().any(|name| lower.contains(name)) => {
            "it does not say what is scarce".into()
        }
        Some(_) => return Ok(()),
    };
    Err(format!("{complaint}: {text}"))
}

/// A directory of many files and the job that looks whether it has all of them.
fn large(home: &Path, name: &str) -> PathBuf {
    let dir = home.join(format!("large-{name}"));
    fs::create_dir_all(dir.join("d")).expect("a directory");
    let mut bytes = 0;
    for number in 0..FILES {
        let text = format!("{name} {number} ").repeat(100 + number);
        bytes += text.len();
        fs::write(dir.join(format!("d/{number}")), text).expect("a file");
    }
    let job = format!("command: test $(cat d/* | wc -c) = {bytes}\ncode: .\nenvironment: host\n");
    fs::write(dir.join("job.yml"), job).expect("a file");
    dir
}

/// An environment of its own, which needs no package of anybody.
fn environment(name: &str) -> JobDraft {
    let dir = std::env::temp_dir().display().to_string();
    let requirements = vec!["--no-index".into(), format!("--find-links={dir}/none-{name}")];
    JobDraft {
        command: "exec python -c 'import sys; assert sys.prefix != sys.base_prefix'".into(),
        environment: EnvSpec::Pip { python: PYTHON.into(), requirements },
        ..JobDraft::default()
    }
}

/// The outputs of a job, as its owner gets them.
fn download(fleet: &Fleet, job: &str) -> Result<BTreeMap<PathBuf, Vec<u8>>, String> {
    let to = tempfile::tempdir().expect("a directory");
    let tree = to.path().join("tree");
    agentctl(fleet, &["download", job, "-o", &tree.display().to_string()])?;
    Ok(files(&tree))
}

fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else {
                let bytes = fs::read(&path).expect("a file");
                found.insert(path.strip_prefix(dir).expect("it is below").to_owned(), bytes);
            }
        }
    }
    found
}

fn agentctl(fleet: &Fleet, words: &[&str]) -> Result<String, String> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    ask(&fleet.controller.socket(), &words)
}

/// Runs the client to its end: what it says, or why not.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
fn ask(socket: &Path, words: &[String]) -> Result<String, String> {
    let mut ctl = Command::new(binaries().join("agentctl"));
    ctl.arg("--socket").arg(socket).args(words).stdin(Stdio::null()).env("NO_COLOR", "1");
    let mut child = ctl.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("agentctl starts");
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let read = std::thread::spawn(move || std::io::read_to_string(&mut out).unwrap_or_default());
    let read_errors = std::thread::spawn(move || std::io::read_to_string(&mut err).unwrap_or_default());
    let status = eventually("the client ends", SOON, || child.try_wait().expect("its own child"));
    let (out, err) = (read.join().expect("it reads"), read_errors.join().expect("it reads"));
    if status.success() { Ok(out) } else { Err(format!("`agentctl {}`: {err}", words.join(" "))) }
}
