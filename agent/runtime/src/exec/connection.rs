//! A connection to a shim, and the only place that finds out from a job directory whether one is running.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use agent_model::protocol::start::{Found, Traces};
use agent_model::{Boot, causes, failpoint};
use agent_shim::KillCount;
use agent_shim::cgroup::Groups;
use agent_shim::process::Process;
use agent_shim::wire::{Event, MAX_LINE, Request};
use agent_shim::{End, ExitRecord, Hello, JobDir, MARK, NotStarted, process};
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::note::Note;
use super::{Lost, ReattachError, SHIM};

/// How long a shim may take to answer. Long, because it calls fsync, and machines that train are busy.
pub(super) const ANSWER: Duration = Duration::from_secs(30);

/// The first shim version with leases.
pub(super) const LEASES: u32 = 2;

/// Pause between two looks at a directory whose shim is about to listen or about to end.
pub(super) const AGAIN: Duration = Duration::from_millis(10);

/// How long a listener may take to greet if it holds no lock.
const GREETING: Duration = Duration::from_secs(1);

/// How long killing the remains of a lost job may take.
const KILL_WITHIN: Duration = Duration::from_secs(30);

/// Another program answers at the socket.
#[derive(Debug, thiserror::Error)]
#[error("whoever listens there is not the supervisor of this job")]
struct OtherListener;

/// A connection to the shim of a job, past the handshake.
#[derive(Debug)]
pub(super) struct Connection {
    stream: BufReader<UnixStream>,
    /// `go` had been sent before this connection was made.
    pub(super) gone: bool,
    /// The protocol version of the shim.
    pub(super) version: u32,
}

impl Connection {
    /// Connects, and checks that the shim of this job answers.
    pub(super) async fn open(dir: &JobDir) -> io::Result<Connection> {
        let stranger = || io::Error::new(io::ErrorKind::InvalidData, OtherListener);
        let (_keep, path) = dir.short_socket_path()?;
        let stream = BufReader::new(UnixStream::connect(path).await?);
        let mut connection = Connection { stream, gone: false, version: 0 };
        let Some(Event::Hello { version, instance, gone }) = connection.next().await? else {
            return Err(stranger());
        };
        // Each file has the instance, in case the other was damaged.
        let hello = dir.read_hello().ok().flatten().map(|hello| hello.instance);
        if hello.or_else(|| dir.started_instance()) != Some(instance) {
            return Err(stranger());
        }
        connection.gone = gone;
        connection.version = version;
        Ok(connection)
    }

    /// The connection itself, for whom the supervisor handed it over to. Nothing was read ahead, because nobody there
    /// speaks first.
    pub(super) fn into_stream(self) -> UnixStream {
        self.stream.into_inner()
    }

    pub(super) async fn send(&mut self, request: &Request) -> io::Result<()> {
        failpoint::hit("node.shim.ask")?;
        self.stream.get_mut().write_all(request.to_line().as_bytes()).await
    }

    /// Sends a request, and waits for an answer that `wanted` accepts.
    pub(super) async fn ask(
        &mut self,
        request: &Request,
        wanted: impl Fn(&Event) -> bool,
    ) -> io::Result<Event> {
        let conversation = async {
            self.send(request).await?;
            self.until(wanted).await
        };
        let silent = |_| io::Error::from(io::ErrorKind::TimedOut);
        tokio::time::timeout(ANSWER, conversation).await.map_err(silent).flatten()
    }

    /// Sets until when the job may run; the answer may be a refusal.
    pub(super) async fn renew(&mut self, until: Boot) -> io::Result<Event> {
        let wanted =
            |event: &Event| matches!(event, Event::Renewed { .. } | Event::Refused { .. } | Event::Ended);
        self.ask(&Request::Renew { until_ms: until.millis() }, wanted).await
    }

    /// Sets how long the command may run in all; the answer may be a refusal.
    pub(super) async fn limit(&mut self, timeout: Duration) -> io::Result<Event> {
        let wanted =
            |event: &Event| matches!(event, Event::Limited { .. } | Event::Refused { .. } | Event::Ended);
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.ask(&Request::Limit { timeout_ms }, wanted).await
    }

    /// The next event; `None` when the shim has closed the connection.
    pub(super) async fn next(&mut self) -> io::Result<Option<Event>> {
        let mut line = Vec::new();
        (&mut self.stream).take(MAX_LINE as u64).read_until(b'\n', &mut line).await?;
        match line.last() {
            Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
            _ => Ok(None),
        }
    }

    /// Reads until an event that `wanted` accepts; a closed connection is an error.
    pub(super) async fn until(&mut self, wanted: impl Fn(&Event) -> bool) -> io::Result<Event> {
        loop {
            match self.next().await? {
                Some(event) if wanted(&event) => return Ok(event),
                Some(_) => {}
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

/// What a job directory shows.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one at a time, taken apart at once")]
pub(super) enum JobTrace {
    /// A shim, connected.
    Live(Connection),
    /// A valid exit record.
    Ended(ExitRecord),
    /// Nothing was ever started.
    Fresh,
    /// The mark of a start, and at most a damaged record of the end: what is wrong with that.
    Lost(Option<String>),
}

/// Looks at a job directory. If a shim is starting or ending meanwhile, this waits for it.
pub(super) async fn look(dir: &JobDir) -> Result<JobTrace, ReattachError> {
    let deadline = Instant::now() + ANSWER;
    let path = || dir.path().to_owned();
    let mut last = None;
    loop {
        // In this order: a shim writes its record, or is killed, before its lock is released.
        let shim = dir.has_shim().map_err(|source| ReattachError::Look { dir: path(), source })?;
        let record = dir.read_exit();
        let no_go = |record: &ExitRecord| record.end == End::NeverStarted(NotStarted::NoGo);
        let traces = Traces {
            supervised: shim,
            started: dir.is_started(),
            ended: matches!(record, Ok(Some(_))),
            may_start: matches!(&record, Ok(Some(record)) if no_go(record)),
        };
        match (traces.found(), record) {
            (Found::Ended, Ok(Some(record))) => return Ok(JobTrace::Ended(record)),
            // A running supervisor rewrites a damaged record.
            (Found::Live | Found::Ended, _) => {}
            (Found::Lost, Err(error)) if !error.is_damage() => return Err(error.into()),
            (Found::Fresh, Err(error)) => return Err(error.into()),
            (found, record) => {
                let damaged = record.err().map(|error| causes::tell(&error));
                // A shim of an earlier release is known only by its log, which may have been removed.
                if let Ok(Ok(connection)) = tokio::time::timeout(GREETING, Connection::open(dir)).await {
                    return Ok(JobTrace::Live(connection));
                }
                return Ok(if found == Found::Fresh { JobTrace::Fresh } else { JobTrace::Lost(damaged) });
            }
        }
        match tokio::time::timeout_at(deadline, Connection::open(dir)).await {
            Ok(Ok(connection)) => return Ok(JobTrace::Live(connection)),
            Ok(Err(error)) if Instant::now() < deadline => last = Some(error),
            Ok(Err(error)) => {
                return Err(ReattachError::Silent { dir: path(), after: ANSWER, source: Some(error) });
            }
            Err(_) => return Err(ReattachError::Silent { dir: path(), after: ANSWER, source: last }),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Kills the remaining processes of a job whose shim is gone, and finds out why it is gone. May be repeated.
pub(super) async fn clear_lost(dir: &JobDir, damaged: Option<String>) -> Result<Lost, ReattachError> {
    let nothing = Lost { rebooted: false, killed: 0, left: 0, loose: false, starved: 0, why: None, damaged };
    let hello = match (dir.read_hello(), dir.started_instance()) {
        (Ok(Some(hello)), _) => hello,
        // The processes of that start are known by the mark that they bear.
        (_, Some(instance)) => {
            let (found, left) = kill_of(Vec::new(), instance, KILL_WITHIN).await;
            return Ok(Lost { killed: found - left, left, loose: true, ..nothing });
        }
        (Err(error), None) if !error.is_damage() => return Err(error.into()),
        (_, None) => return Ok(nothing),
    };
    if hello.boot_id != agent_shim::process::boot_id() {
        // After a container was restarted its boot id is new, but its groups are still there.
        let groups = Groups::of(&hello);
        let _ = groups.is_empty() && groups.remove();
        return Ok(Lost { rebooted: true, ..nothing });
    }
    let starved = hello.kills.as_ref().map_or(0, KillCount::since);
    // The groups in the hello are those that were to be made.
    let loose = !hello.container && !Groups::of(&hello).dirs().iter().any(|group| group.exists());
    let (found, left) = kill(dir, hello, KILL_WITHIN).await;
    let why = super::fate::of(dir).await;
    Ok(Lost { killed: found - left, left, loose, starved, why, ..nothing })
}

/// Kills a job from outside, together with its supervisor, which does not obey. Frozen processes are thawed, so that
/// they receive the signal. Returns how many processes there were, and how many are left.
pub(super) async fn end_all(dir: &JobDir, within: Duration) -> Result<(usize, usize), ReattachError> {
    let Some(hello) = dir.read_hello()? else { return Ok((0, 0)) };
    // The supervisor is killed first: otherwise it would find its job dead and record that the job died by itself.
    let supervisor = Process::find(hello.pid)
        .filter(|_| !hello.container && hello.boot_id == process::boot_id())
        .filter(|found| process::name(found.pid as u32) == SHIM && found.works_at(dir.path()));
    if let Some(supervisor) = supervisor {
        let killed = supervisor.signal(Signal::SIGKILL);
        tracing::warn!(dir = %dir.path().display(), pid = hello.pid, ?killed, "ending silent supervisor");
        process::thaw(supervisor.pid);
    }
    Ok(kill(dir, hello, within).await)
}

async fn kill_of(groups: Vec<PathBuf>, instance: String, within: Duration) -> (usize, usize) {
    let kill = move || agent_spawn::kill(&groups, &instance, within);
    agent_blocking::spawn_blocking(kill).await.unwrap_or_default()
}

async fn kill(dir: &JobDir, hello: Hello, within: Duration) -> (usize, usize) {
    // The job may have rewritten the note of an earlier release: then its processes are known by their mark.
    let is_told = hello.container && !dir.is_shared();
    let container = Note::read(dir).ok().flatten().map(|note| note.id).filter(|_| is_told);
    if let Some(id) = container {
        let kill = move || agent_shim::cgroup::kill_container(&id, MARK, &hello.instance, within);
        return agent_blocking::spawn_blocking(kill).await.unwrap_or_default();
    }
    let groups = Groups::of(&hello);
    let counts = kill_of(groups.dirs().to_vec(), hello.instance, within).await;
    if counts.1 == 0 && !agent_blocking::spawn_blocking(move || groups.remove()).await.unwrap_or_default() {
        tracing::warn!(dir = %dir.path().display(), "cannot remove control groups of lost job");
    }
    counts
}
