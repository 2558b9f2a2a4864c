//! The workspace of one build: its directory, its log, and the way to run a command there.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;

use agent_command::{Command, MemoryGroup};
use agent_model::{failpoint, size};
use agent_shim::kills::on_machine;

use super::AcquireError;
use super::Progress;
use super::builder::Builder;
use super::downloads::Downloads;
use super::single_flight::Transcript;
use crate::docker::Image;
use agent_shim::says_lack;

/// How much of a command's output is kept to diagnose an error, in bytes.
const KEPT: usize = 64 << 10;

/// How much nicer builders are than the daemon.
const NICE: i32 = 5;

/// Whether the daemon's log says that memory cannot be limited here.
static WARNED: Once = Once::new();

/// The result of a build.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Built {
    /// The variables a command needs to use it, besides `PATH`.
    pub vars: BTreeMap<String, String>,
    /// The directories that are first on `PATH`.
    pub path_entries: Vec<PathBuf>,
    /// The version of its interpreter, which is `python` in one of these places; empty for none.
    pub python_version: String,
    /// A description of what it was built from, for people.
    pub summary: String,
    /// How many packages it has.
    pub packages: u32,
    /// The explicit list of its packages; `None` when nothing can be locked.
    pub lock: Option<String>,
    /// It contains the files of its packages, which only a builder may change. False if it only refers to an
    /// interpreter elsewhere.
    pub holds_files: bool,
    /// Where the packages of its interpreter are, if that is not in its own directory.
    pub elsewhere_prefix: Option<PathBuf>,
    /// Its Python files are compiled already.
    pub compiled: bool,
    /// The image that commands run in; `None` for those that run on the machine itself.
    pub image: Option<Image>,
    /// Bytes that removing it frees elsewhere: the image that was brought for it.
    pub elsewhere: u64,
    /// The keys of the environments that it consists of.
    pub parts: Vec<String>,
}

/// How a command of a builder ended.
pub(super) struct Ran {
    pub(super) success: bool,
    /// The end of its output.
    pub(super) text: String,
}

/// The workspace of one build.
pub struct BuildWorkspace {
    prefix: PathBuf,
    transcript: Arc<Transcript>,
    stall: Duration,
    /// The memory limit, and the group that has it after the first command.
    memory: u64,
    builder: Option<Builder>,
    group: OnceLock<Option<Arc<MemoryGroup>>>,
}

impl BuildWorkspace {
    pub(super) fn new(
        prefix: PathBuf,
        transcript: Arc<Transcript>,
        stall: Duration,
        memory: u64,
        builder: Option<Builder>,
    ) -> BuildWorkspace {
        BuildWorkspace { prefix, transcript, stall, memory, builder, group: OnceLock::new() }
    }

    /// Makes a command that runs other people's code run as the builders' user.
    pub(super) fn apart(&self, command: Command) -> Command {
        match &self.builder {
            Some(builder) => builder.runs(command),
            None => command,
        }
    }

    /// Who runs other people's code here, if that is not the daemon's user.
    pub(super) fn builder(&self) -> Option<&Builder> {
        self.builder.as_ref()
    }

    /// Gives all files that were made here to the daemon. Blocks: looks at each file.
    pub(super) fn take_back(&self) -> io::Result<()> {
        self.builder.as_ref().map_or(Ok(()), |builder| builder.take_back(&self.prefix))
    }

    /// The directory to build in, empty at first. The environment stays there.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// How long a builder may be silent.
    pub(super) fn stall(&self) -> Duration {
        self.stall
    }

    /// Adds a line of the agent's own to the build log.
    pub fn say(&self, line: &str) {
        self.transcript.write(format!("{line}\n").as_bytes());
    }

    /// Reports the progress of the build.
    pub fn tell(&self, progress: Progress) {
        self.transcript.tell(Some(progress));
    }

    /// Runs a command; its output is added to the build log. It is killed when it is silent for too long, when the
    /// build is dropped, and, by its mark, after the daemon has died.
    pub(super) async fn run(&self, step: &'static str, command: Command) -> Result<Ran, AcquireError> {
        let mut kept = Kept::default();
        let sink = |bytes: &[u8]| {
            self.transcript.write(bytes);
            kept.add(bytes);
        };
        let status = self.stream(step, command, sink).await?;
        Ok(kept.ran(status))
    }

    /// As [`BuildWorkspace::run`] for an installer: its downloads are reported as progress.
    pub(super) async fn install(
        &self,
        step: &'static str,
        command: Command,
        mut downloads: Downloads,
    ) -> Result<Ran, AcquireError> {
        let mut kept = Kept::default();
        let sink = |bytes: &[u8]| {
            let (shown, progress) = downloads.hear(bytes);
            self.transcript.write(&shown);
            kept.add(&shown);
            progress.into_iter().for_each(|progress| self.tell(progress));
        };
        let status = self.stream(step, command, sink).await;
        let rest = downloads.end();
        self.transcript.write(&rest);
        kept.add(&rest);
        Ok(kept.ran(status?))
    }

    /// Runs a command that may have been somebody else's, and passes its output on as it arrives.
    async fn stream(
        &self,
        step: &'static str,
        command: Command,
        sink: impl FnMut(&[u8]) + Send,
    ) -> Result<ExitStatus, AcquireError> {
        let deaths = Deaths::watch();
        let is_lent = command.is_somebody_else();
        let status = self.prepare(command)?.stream(sink).await.map_err(AcquireError::command(step))?;
        self.recover(is_lent)?;
        deaths.check(step, status)?;
        Ok(status)
    }

    /// As [`BuildWorkspace::run`] for a command whose standard output is a protocol: only its standard error is added
    /// to the build log. Nothing is lent to it, if it is somebody else.
    pub(super) async fn talk(
        &self,
        step: &'static str,
        command: Command,
        output: impl FnMut(&[u8]) + Send,
    ) -> Result<Ran, AcquireError> {
        let (mut kept, deaths) = (Kept::default(), Deaths::watch());
        let error = |bytes: &[u8]| {
            self.transcript.write(bytes);
            kept.add(bytes);
        };
        let command = self.surround(command)?;
        let status = command.talk(output, error).await.map_err(AcquireError::command(step))?;
        deaths.check(step, status)?;
        Ok(kept.ran(status))
    }

    /// Runs a command that only answers a question; nothing is added to the build log.
    pub(super) async fn ask(&self, step: &'static str, command: Command) -> Result<Ran, AcquireError> {
        let deaths = Deaths::watch();
        let is_lent = command.is_somebody_else();
        let output = self.prepare(command)?.capture().await.map_err(AcquireError::command(step))?;
        self.recover(is_lent)?;
        deaths.check(step, output.status)?;
        let text = String::from_utf8_lossy(&output.text).into_owned();
        Ok(Ran { success: output.status.success(), text })
    }

    fn prepare(&self, command: Command) -> Result<Command, AcquireError> {
        let builder = self.builder.as_ref().filter(|_| command.is_somebody_else());
        let command = self.surround(command)?;
        let lent = builder.map_or(Ok(()), |builder| builder.lend(&self.prefix));
        lent.map_err(AcquireError::io("build in", &self.prefix))?;
        Ok(command)
    }

    fn surround(&self, command: Command) -> Result<Command, AcquireError> {
        failpoint::hit("env.build.spawn").map_err(AcquireError::io("build in", &self.prefix))?;
        let command = command.cwd(&self.prefix).mark(&self.prefix.to_string_lossy()).stall(self.stall);
        Ok(command.may_work_silently().nice(NICE).within(self.group()))
    }

    /// A daemon that is not root cannot use a directory that is lent. No process of its builder runs any more.
    fn recover(&self, is_lent: bool) -> Result<(), AcquireError> {
        let builder = self.builder.as_ref().filter(|_| is_lent && agent_spawn::has_helper());
        let taken = builder.map_or(Ok(()), |builder| builder.take_back(&self.prefix));
        taken.map_err(AcquireError::io("take back", &self.prefix))
    }

    /// The group that limits the memory of this build, if there is a limit.
    fn group(&self) -> Option<Arc<MemoryGroup>> {
        let make = || {
            let limited = (self.memory > 0).then(|| Arc::new(MemoryGroup::make(self.memory)))?;
            if let Some(why) = limited.unmet() {
                // A property of the machine, which `agentctl doctor` shows: no news for whoever builds.
                let limit = size::binary(self.memory);
                let warn = || tracing::warn!(limit, why, "each process of a build has the limit by itself");
                WARNED.call_once(warn);
            }
            Some(limited)
        };
        self.group.get_or_init(make).clone()
    }
}

/// The end of a command's output.
#[derive(Default)]
struct Kept(Vec<u8>);

impl Kept {
    fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        let excess = self.0.len().saturating_sub(2 * KEPT);
        if excess > 0 {
            self.0.drain(..excess + KEPT);
        }
    }

    fn ran(&self, status: ExitStatus) -> Ran {
        Ran { success: status.success(), text: String::from_utf8_lossy(&self.0).into_owned() }
    }
}

/// Distinguishes a command that was killed from outside from one that failed.
pub(super) struct Deaths {
    /// How many processes the kernel had killed for lack of memory when the command started.
    before: Option<u64>,
}

impl Deaths {
    /// To be called before the command starts.
    pub(super) fn watch() -> Deaths {
        Deaths { before: on_machine() }
    }

    /// An error if the command was killed from outside.
    pub(super) fn check(&self, step: &'static str, status: ExitStatus) -> Result<(), AcquireError> {
        let Some(signal) = killed_by(status) else { return Ok(()) };
        Err(AcquireError::Killed { step, signal, starved: signal == KILL && on_machine() > self.before })
    }
}

const KILL: i32 = 9;
const TERM: i32 = 15;

/// The signal that killed a command; a shell reports that of its child as its own exit code.
fn killed_by(status: ExitStatus) -> Option<i32> {
    let by_shell = status.code().map(|code| code - 128).filter(|signal| [KILL, TERM].contains(signal));
    status.signal().or(by_shell)
}

impl Ran {
    /// A reported lack of descriptors, processes or memory, as the reason why `step` failed.
    pub(super) fn lack(&self, step: &'static str) -> Option<AcquireError> {
        let said = self.text.lines().rfind(|line| says_lack(line))?;
        Some(AcquireError::Failed { step, detail: said.trim().to_owned() })
    }

    /// The last lines of the output, for an error without a better description.
    pub(super) fn tail(&self) -> String {
        const LINES: usize = 5;
        let lines: Vec<&str> = self.text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        match lines.len() {
            0 => "it printed nothing".to_owned(),
            count => lines[count.saturating_sub(LINES)..].join(" | "),
        }
    }
}
