//! One build shared by all its waiters.
//!
//! A build is a shared future: its waiters poll it, and when the last one leaves, it is dropped, and the builder's
//! processes with it. Its output is written to a [`Transcript`], which each waiter copies into a log of its own. A
//! failure that would happen again is answered from memory for a minute, and the answer says so.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agent_model::EnvSpec;
use agent_model::words::duration;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::aftercare::Aftercare;
use super::builder::Builder;
use super::cache::EnvDir;
use super::{AcquireError, BuildWorkspace, EnvBuilder, Left, Phase, Progress};

/// How long a lasting failure is answered from memory.
const REMEMBERED: Duration = Duration::from_secs(60);

/// How often an engine may break off a build without getting further than before.
const BREAKS: u32 = 3;

/// How an environment became ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Made {
    /// It was built, by this agent or by another that was waited for, in this time.
    Anew(Duration),
    /// It was ready already, but an earlier look found its lock taken by another one's look.
    Before,
}

type Outcome = Result<Made, AcquireError>;
type Build = Shared<BoxFuture<'static, Outcome>>;

/// The builds of this process.
pub(super) struct SingleFlights {
    by_name: Mutex<HashMap<String, SingleFlight>>,
    /// For builds that the container engine broke off: how far they got at best, and how often no further.
    broken: Mutex<HashMap<String, (u64, u32)>>,
    stall: Duration,
    memory: u64,
    aftercare: Aftercare,
}

enum SingleFlight {
    Building { build: WeakShared<BoxFuture<'static, Outcome>>, transcript: Arc<Transcript> },
    Failed { error: AcquireError, transcript: Arc<Transcript>, at: Instant },
}

impl SingleFlights {
    pub(super) fn new(stall: Duration, memory: u64) -> SingleFlights {
        SingleFlights {
            by_name: Mutex::default(),
            broken: Mutex::default(),
            stall,
            memory,
            aftercare: Aftercare::default(),
        }
    }

    /// Does the remaining work for a new environment, see [`super::aftercare`].
    pub(super) fn look_after(&self, place: &EnvDir, left: Left, who: Option<Builder>) {
        self.aftercare.start(place, left, who);
    }

    /// Stops that work for an environment.
    pub(super) fn leave(&self, name: &str) {
        self.aftercare.stop(name);
    }

    /// Joins the build of an environment, or the memory of its failure, or starts a build, in which `who` runs other
    /// people's code.
    pub(super) fn join(
        flights: &Arc<SingleFlights>,
        place: &EnvDir,
        builder: &Arc<dyn EnvBuilder>,
        spec: &EnvSpec,
        who: Option<Builder>,
    ) -> Result<Seat, AcquireError> {
        let mut by_name = flights.by_name.lock();
        by_name.retain(|_, flight| flight.is_current());
        if let Some(seat) = by_name.get(place.name()).and_then(SingleFlight::seat) {
            return Ok(seat);
        }
        let transcript = Arc::new(Transcript::create(place)?);
        let build = SingleFlights::fly(
            flights.clone(),
            place.clone(),
            builder.clone(),
            (spec.clone(), who),
            transcript.clone(),
        );
        let build = build.boxed().shared();
        if let Some(weak) = build.downgrade() {
            by_name.insert(
                place.name().to_owned(),
                SingleFlight::Building { build: weak, transcript: transcript.clone() },
            );
        }
        Ok(Seat { build, transcript })
    }

    async fn fly(
        flights: Arc<SingleFlights>,
        place: EnvDir,
        builder: Arc<dyn EnvBuilder>,
        (spec, who): (EnvSpec, Option<Builder>),
        transcript: Arc<Transcript>,
    ) -> Outcome {
        let outcome = build(&place, builder.as_ref(), (&spec, who), &transcript, &flights).await;
        let outcome = flights.bounded(place.name(), outcome);
        let mut by_name = flights.by_name.lock();
        by_name.remove(place.name());
        if let Err(error) = outcome.as_ref()
            && error.is_lasting()
        {
            let failed = SingleFlight::Failed { error: error.clone(), transcript, at: Instant::now() };
            by_name.insert(place.name().to_owned(), failed);
        }
        outcome
    }

    /// A build that the engine broke off may be tried again while tries get further, or only few did not.
    fn bounded(&self, name: &str, outcome: Outcome) -> Outcome {
        let mut broken = self.broken.lock();
        let (error, done) = match outcome {
            Err(AcquireError::BrokenOff { error, done, .. }) => (error, done),
            // The engine was absent before the build could begin.
            Err(error) if error.is_waiting() => return Err(error),
            other => {
                broken.remove(name);
                return other;
            }
        };
        let times = match broken.get(name) {
            Some((best, times)) if done <= *best => times + 1,
            _ => 1,
        };
        if times < BREAKS {
            let best = broken.get(name).map_or(done, |(best, _)| done.max(*best));
            broken.insert(name.to_owned(), (best, times));
            return Err(AcquireError::Engine(error));
        }
        broken.remove(name);
        Err(AcquireError::BrokenOff { error, done, times })
    }
}

impl SingleFlight {
    fn is_current(&self) -> bool {
        match self {
            SingleFlight::Building { build, .. } => build.upgrade().is_some(),
            SingleFlight::Failed { at, .. } => at.elapsed() < REMEMBERED,
        }
    }

    fn seat(&self) -> Option<Seat> {
        let (build, transcript) = match self {
            SingleFlight::Building { build, transcript } => (build.upgrade()?, transcript),
            SingleFlight::Failed { error, transcript, at } => {
                let ago = at.elapsed();
                let left = REMEMBERED.saturating_sub(ago);
                let error = AcquireError::Remembered { error: Box::new(error.clone()), ago, left };
                (std::future::ready(Err(error)).boxed().shared(), transcript)
            }
        };
        Some(Seat { build, transcript: transcript.clone() })
    }
}

async fn build(
    place: &EnvDir,
    builder: &dyn EnvBuilder,
    (spec, who): (&EnvSpec, Option<Builder>),
    transcript: &Arc<Transcript>,
    flights: &SingleFlights,
) -> Outcome {
    let (mut waited, begun) = (false, Instant::now());
    let waiting = || {
        waited = true;
        transcript.write(b"waiting for another agent that works on this environment\n");
        transcript.tell(Some(Progress::of(Phase::Waiting, "another agent")));
    };
    let Some(lock) = place.exclusive(waiting).await? else {
        if !waited {
            return Ok(Made::Before);
        }
        transcript.repeat(place);
        return Ok(Made::Anew(begun.elapsed()));
    };
    transcript.keep(place)?;
    let scaffold = lock.scaffold().await?;
    let started = Instant::now();
    let prefix = place.prefix().to_owned();
    let (stall, memory) = (flights.stall, flights.memory);
    let workspace = BuildWorkspace::new(prefix, transcript.clone(), stall, memory, who);
    let workspace = Arc::new(workspace);
    let mut built = builder.build(spec, &workspace).await;
    for attempt in 1..ATTEMPTS {
        let Err(killed @ AcquireError::Killed { .. }) = &built else { break };
        workspace.say(&format!("{killed}; the build begins anew"));
        tokio::time::sleep(pause(attempt)).await;
        scaffold.clear().await?;
        built = builder.build(spec, &workspace).await;
    }
    match built {
        Ok(built) => {
            let made = workspace.clone();
            let taken =
                agent_blocking::spawn_blocking(move || made.take_back()).await.map_err(io::Error::other);
            taken.flatten().map_err(AcquireError::io("take over", place.prefix()))?;
            scaffold.finish(built).await?;
            let took = started.elapsed();
            tracing::info!(key = place.name(), seconds = took.as_secs(), "built environment");
            workspace.say(&format!("{} is ready after {}", place.name(), duration(took)));
            Ok(Made::Anew(took))
        }
        Err(error) => {
            workspace.say(&format!("{} could not be built: {error}", place.name()));
            Err(error)
        }
    }
}

/// One waiter of a build.
pub(super) struct Seat {
    build: Build,
    transcript: Arc<Transcript>,
}

impl Seat {
    /// Waits for the end of the build; meanwhile appends its output to a log and passes on its progress.
    pub(super) async fn follow(mut self, log: &Path, told: &watch::Sender<Option<Progress>>) -> Outcome {
        let fail = |error| AcquireError::io("write", log)(error);
        let mut file = OpenOptions::new().create(true).append(true).open(log).map_err(fail)?;
        let mut grown = self.transcript.length.subscribe();
        let mut further = self.transcript.progress.subscribe();
        further.mark_changed(); // report what was sent before this waiter joined
        let mut copied = 0;
        loop {
            let outcome = tokio::select! {
                biased;
                outcome = &mut self.build => Some(outcome),
                _ = grown.changed() => None, // the senders live in this seat
                _ = further.changed() => {
                    told.send_replace(further.borrow_and_update().clone());
                    None
                }
            };
            copied = self.transcript.copy(copied, &mut file).map_err(fail)?;
            if let Some(outcome) = outcome {
                told.send_replace(None);
                return outcome;
            }
        }
    }
}

/// The output of one build. Only the build writes it, and all waiters read it.
pub(super) struct Transcript {
    path: PathBuf,
    file: File,
    length: watch::Sender<u64>,
    progress: watch::Sender<Option<Progress>>,
}

impl Transcript {
    fn create(place: &EnvDir) -> Result<Transcript, AcquireError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = place.log().with_extension(format!("log.{}-{number}", std::process::id()));
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).read(true).write(true).mode(0o600);
        let file = options.open(&path).map_err(AcquireError::io("create", &path))?;
        Ok(Transcript { path, file, length: watch::Sender::new(0), progress: watch::Sender::new(None) })
    }

    /// Appends text; a failure loses that text, because the build matters more than its log.
    pub(super) fn write(&self, bytes: &[u8]) {
        let at = *self.length.borrow();
        match self.file.write_all_at(bytes, at) {
            Ok(()) => drop(self.length.send_replace(at + bytes.len() as u64)),
            Err(error) => tracing::warn!(path = %self.path.display(), %error, "part of a build log is lost"),
        }
    }

    /// Reports the progress of the build.
    pub(super) fn tell(&self, progress: Option<Progress>) {
        self.progress.send_replace(progress);
    }

    /// Makes it the log of the environment: this process builds.
    fn keep(&self, place: &EnvDir) -> Result<(), AcquireError> {
        match fs::rename(&self.path, place.log()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(AcquireError::io("keep", &self.path)(error))
            }
            _ => Ok(()), // another process that started meanwhile removed it as a leftover
        }
    }

    /// Copies the log of the environment, which another process built meanwhile.
    fn repeat(&self, place: &EnvDir) {
        if let Ok(text) = fs::read(place.log()) {
            self.write(&text);
        }
    }

    fn copy(&self, mut from: u64, log: &mut File) -> io::Result<u64> {
        let until = *self.length.borrow();
        let mut buffer = [0; 8 << 10];
        while from < until {
            let count = self.file.read_at(&mut buffer, from)?;
            if count == 0 {
                break;
            }
            log.write_all(&buffer[..count])?;
            from += count as u64;
        }
        Ok(from)
    }
}

impl Drop for Transcript {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // does nothing if it became the log of the environment
    }
}

/// How often a command is started that is killed from outside.
pub(super) const ATTEMPTS: u32 = 5;

/// The pause before a command is started again that was killed this often.
pub(super) fn pause(killed: u32) -> Duration {
    Duration::from_millis(125) * 2_u32.pow(killed.min(ATTEMPTS))
}
