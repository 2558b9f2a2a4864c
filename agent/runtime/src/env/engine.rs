//! The conda engine: a child process that takes requests and streams progress. It is killed when nobody waits for it.
//!
//! Builds requests, remembers the answers of probes and interprets results. Hides the protocol of `agent-env`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_command::Command;
use agent_env::{Activation, Build, EngineEvent, EngineRequest, Failure, FailureKind, Platform, Sweep, Task};

use super::build_workspace::Deaths;
use super::progress::Narrator;
use super::single_flight::{ATTEMPTS, pause};
use super::{AcquireError, BuildWorkspace, EnvConfig};

const ASK: &str = "asking the conda engine what this machine offers";
const BUILD: &str = "installing conda packages";
const ACTIVATE: &str = "running activation scripts";
const SWEEP: &str = "sweeping the package cache";

/// Solving is given up after this time.
pub(super) const SOLVE_WITHIN: Duration = Duration::from_secs(120);
/// A download without progress for this long is restarted.
pub(super) const STALL: Duration = Duration::from_secs(30);
/// How long the engine may take to look at the machine: a driver may be slow.
const PROBE_WITHIN: Duration = Duration::from_secs(60);

/// The file with the version of a graphics driver.
const DRIVER: &str = "/proc/driver/nvidia/version";

/// The engine of this node.
pub(super) struct Engine {
    config: Arc<EnvConfig>,
    /// What the machine offers, and its state when that was asked.
    known: tokio::sync::Mutex<Option<(Look, Platform)>>,
}

/// What could change the answer of a probe: another engine, another driver.
#[derive(PartialEq, Eq)]
struct Look(Option<(u64, i64, u64)>, Option<String>);

impl Look {
    fn at(engine: &Path) -> Look {
        let engine = engine.metadata().ok().map(|file| (file.ino(), file.mtime(), file.size()));
        Look(engine, fs::read_to_string(DRIVER).ok())
    }
}

impl Engine {
    pub(super) fn new(config: Arc<EnvConfig>) -> Engine {
        Engine { config, known: tokio::sync::Mutex::default() }
    }

    fn program(&self) -> Result<&Path, AcquireError> {
        let missing = || AcquireError::EngineMissing { looked: self.config.engine.clone() };
        self.config.engine.as_deref().filter(|program| program.is_file()).ok_or_else(missing)
    }

    /// The packages that conda environments share.
    pub(super) fn cache(&self) -> PathBuf {
        self.config.packages.join("conda")
    }

    /// What this machine offers to packages. Asked once, and again after a change or a failure.
    pub(super) async fn platform(&self) -> Result<Platform, AcquireError> {
        let look = Look::at(self.program()?);
        let mut known = self.known.lock().await;
        if let Some((then, platform)) = known.as_ref()
            && *then == look
        {
            return Ok(platform.clone());
        }
        match self.alone(ASK, Task::Probe, PROBE_WITHIN).await? {
            EngineEvent::Probed(platform) => {
                *known = Some((look, platform.clone()));
                Ok(platform)
            }
            other => Err(unexpected(ASK, &other)),
        }
    }

    /// Builds an environment in the prefix of a build workspace. `at` describes a line of the user's file.
    pub(super) async fn build(
        &self,
        build: Build,
        workspace: &BuildWorkspace,
        at: impl Fn(usize) -> String + Send + Sync,
    ) -> Result<agent_env::Built, AcquireError> {
        let cache = self.cache();
        fs::create_dir_all(&cache).map_err(AcquireError::io("create", &cache))?;
        let (mut ear, mut narrator) = (Ear::default(), Narrator::default());
        let mut hear = |event: Option<EngineEvent>, line: &str| match event {
            Some(EngineEvent::Progress(progress)) => {
                narrator.hear(&progress, Instant::now()).iter().for_each(|line| workspace.say(line));
                workspace.tell(progress);
            }
            Some(EngineEvent::Say { line }) => workspace.say(&line),
            Some(_) => {}
            None => workspace.say(line),
        };
        let prefix = build.prefix.clone();
        let command = self.command(Task::Build(Box::new(build)))?;
        let ran = workspace.talk(BUILD, command, |bytes| ear.hear(bytes, &mut hear)).await?;
        ear.end(&mut hear);
        narrator.end(Instant::now()).iter().for_each(|line| workspace.say(line));
        match ear.last {
            Some(EngineEvent::Built(built)) if ran.success => self.activated(built, &prefix, workspace).await,
            Some(EngineEvent::Failed(failure)) => Err(failed(BUILD, failure, &prefix, at)),
            _ => Err(AcquireError::Failed { step: BUILD, detail: ran.tail() }),
        }
    }

    /// Adds to an environment that was built what its activation scripts set. They are code of packages, so they run
    /// as the builders' user, to whom nothing is lent; without their result the environment is usable all the same.
    async fn activated(
        &self,
        built: agent_env::Built,
        prefix: &Path,
        workspace: &BuildWorkspace,
    ) -> Result<agent_env::Built, AcquireError> {
        if !built.has_scripts {
            return Ok(built);
        }
        let command =
            Command::new(self.program()?).input(request(Task::Activate { prefix: prefix.to_owned() })?);
        let command = command.envs([("PATH", self.config.path.as_str()), ("LC_ALL", "C.UTF-8")]);
        let mut ear = Ear::default();
        let mut hear = |event: Option<EngineEvent>, line: &str| match event {
            Some(EngineEvent::Say { line }) => workspace.say(&line),
            Some(_) => {}
            None => workspace.say(line),
        };
        let ran =
            workspace.talk(ACTIVATE, workspace.apart(command), |bytes| ear.hear(bytes, &mut hear)).await?;
        ear.end(&mut hear);
        match ear.last {
            Some(EngineEvent::Activated(activation)) if ran.success => {
                Ok(agent_env::Built { activation: usable(activation), ..built })
            }
            Some(EngineEvent::Failed(failure)) => {
                workspace.say(&format!("the activation scripts are left out: {}", failure.message));
                Ok(built)
            }
            _ => {
                workspace.say(&format!("the activation scripts are left out: {}", ran.tail()));
                Ok(built)
            }
        }
    }

    /// Removes packages that no environment needs. Returns how many bytes that freed.
    pub(super) async fn sweep(&self, unused_for: Duration) -> Result<u64, AcquireError> {
        let cache = self.cache();
        if self.program().is_err() || !cache.is_dir() {
            return Ok(0);
        }
        let task = Task::Sweep(Sweep { cache, unused_for_s: unused_for.as_secs() });
        match self.alone(SWEEP, task, self.config.stall).await? {
            EngineEvent::Swept { freed } => Ok(freed),
            other => Err(unexpected(SWEEP, &other)),
        }
    }

    /// Performs a task that belongs to no build; repeats it if it is killed from outside.
    async fn alone(
        &self,
        step: &'static str,
        task: Task,
        stall: Duration,
    ) -> Result<EngineEvent, AcquireError> {
        let command = self.command(task)?.cwd(&self.config.root).stall(stall);
        let command = command.mark(&self.cache().to_string_lossy());
        let mut done = self.once(step, &command).await;
        for attempt in 1..ATTEMPTS {
            let Err(killed @ AcquireError::Killed { .. }) = &done else { break };
            tracing::warn!(%killed, "retrying killed step of build");
            tokio::time::sleep(pause(attempt)).await;
            done = self.once(step, &command).await;
        }
        done
    }

    async fn once(&self, step: &'static str, command: &Command) -> Result<EngineEvent, AcquireError> {
        let (mut ear, mut complaint, deaths) = (Ear::default(), Vec::new(), Deaths::watch());
        let keep = |bytes: &[u8]| complaint.extend_from_slice(bytes);
        let status = command
            .talk(|bytes| ear.hear(bytes, &mut |_, _| {}), keep)
            .await
            .map_err(AcquireError::command(step))?;
        deaths.check(step, status)?;
        ear.end(&mut |_, _| {});
        match ear.last {
            Some(EngineEvent::Failed(failure)) => {
                Err(failed(step, failure, &self.config.packages, |_| String::new()))
            }
            Some(event) => Ok(event),
            None => {
                let said = String::from_utf8_lossy(&complaint).trim().to_owned();
                let detail = if said.is_empty() { "it said nothing".to_owned() } else { said };
                Err(AcquireError::Failed { step, detail })
            }
        }
    }

    fn command(&self, task: Task) -> Result<Command, AcquireError> {
        // Those of installers may contain credentials, and are nothing to the engine: it is told by its input.
        let is_its = |(name, _): &(&String, &String)| !name.starts_with("PIP_") && !name.starts_with("UV_");
        let command = Command::new(self.program()?).envs(self.config.vars.iter().filter(is_its));
        Ok(command.envs([("PATH", self.config.path.as_str()), ("LC_ALL", "C.UTF-8")]).input(request(task)?))
    }
}

fn request(task: Task) -> Result<Vec<u8>, AcquireError> {
    let request = EngineRequest { version: agent_env::VERSION, task };
    let failed = |error| AcquireError::Failed {
        step: BUILD,
        detail: format!("the request cannot be written: {error}"),
    };
    serde_json::to_vec(&request).map_err(failed)
}

/// What scripts of packages told, without what no variable and no `PATH` can hold.
fn usable(mut told: Activation) -> Activation {
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
    told.vars.retain(|name, value| is_name(name) && !value.contains('\0'));
    let is_entry = |path: &str| path.starts_with('/') && !path.contains([':', '\0']);
    told.path_entries.retain(|path| path.to_str().is_some_and(is_entry));
    told
}

fn unexpected(step: &'static str, event: &EngineEvent) -> AcquireError {
    AcquireError::Failed { step, detail: format!("the engine answered something else: {event:?}") }
}

/// Assembles the lines that the engine writes.
#[derive(Default)]
pub(crate) struct Ear {
    rest: Vec<u8>,
    /// The last event that ends a task.
    pub(crate) last: Option<EngineEvent>,
}

impl Ear {
    /// Takes what arrived; `what` is given progress, lines for the log, and lines that are no event.
    pub(crate) fn hear(&mut self, bytes: &[u8], what: &mut impl FnMut(Option<EngineEvent>, &str)) {
        self.rest.extend_from_slice(bytes);
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            self.line(&line, what);
        }
    }

    /// Nothing more arrives.
    pub(crate) fn end(&mut self, what: &mut impl FnMut(Option<EngineEvent>, &str)) {
        let line = std::mem::take(&mut self.rest);
        self.line(&line, what);
    }

    fn line(&mut self, line: &[u8], what: &mut impl FnMut(Option<EngineEvent>, &str)) {
        let line = String::from_utf8_lossy(line);
        let line = line.trim();
        if line.is_empty() {
            return;
        }
        match serde_json::from_str(line) {
            Ok(event @ (EngineEvent::Progress(_) | EngineEvent::Say { .. })) => what(Some(event), line),
            Ok(event) => self.last = Some(event),
            Err(_) => what(None, line), // printed by some library; it is still a line of the log
        }
    }
}

/// Translates a failure of the engine into an error for waiters.
fn failed(step: &'static str, failure: Failure, place: &Path, at: impl Fn(usize) -> String) -> AcquireError {
    let Failure { kind, message: detail, lines, hint } = failure;
    let at = || lines.iter().filter(|line| **line > 0).map(|line| at(*line)).collect();
    // If the error has no field for a hint, the hint is added to the text.
    let advised = || hint.as_ref().map_or_else(|| detail.clone(), |hint| format!("{detail} ({hint})"));
    match kind {
        FailureKind::NotFound | FailureKind::Unsatisfiable => {
            AcquireError::Unsolvable { at: at(), detail, hint }
        }
        FailureKind::Spec | FailureKind::Refused => AcquireError::Refused { at: at(), detail, hint },
        FailureKind::Network => AcquireError::Network { detail: advised() },
        FailureKind::Denied => AcquireError::Denied { detail: advised() },
        FailureKind::Damaged => AcquireError::Damaged { detail: advised() },
        FailureKind::DiskFull => AcquireError::DiskFull { path: place.to_owned() },
        FailureKind::TooLong => AcquireError::TooLong { detail: advised() },
        FailureKind::Other => AcquireError::Failed { step, detail: advised() },
    }
}

/// A build without packages or channels.
pub(super) fn blank(config: &EnvConfig, engine: &Engine, prefix: &Path, platform: Platform) -> Build {
    Build {
        prefix: prefix.to_owned(),
        cache: engine.cache(),
        channels: Vec::new(),
        specs: Vec::new(),
        lock: None,
        priority: match config.conda.flexible {
            true => agent_env::Priority::Flexible,
            false => agent_env::Priority::Strict,
        },
        offline: config.conda.offline,
        platform,
        credentials: config.conda.credentials.clone(),
        solve_within_s: SOLVE_WITHIN.as_secs(),
        stall_s: STALL.as_secs(),
        hard_links: config.hard_links,
        for_everybody: config.builder.is_some(),
    }
}
