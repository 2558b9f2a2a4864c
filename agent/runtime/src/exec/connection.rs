//! One conversation with a shim, and the one place that tells from a job directory who is there.

use std::io;
use std::time::Duration;

use agent_model::protocol::start::{Found, Traces};
use agent_model::{Boot, failpoint};
use agent_shim::cgroup::Groups;
use agent_shim::wire::{Event, MAX_LINE, Request};
use agent_shim::{End, ExitRecord, Hello, JobDir, MARK, NotStarted, process};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::container::note::Note;
use super::{Lost, ReattachError};

/// How long a shim may take to answer. Generous: it fsyncs, and machines that train are busy.
pub(super) const ANSWER: Duration = Duration::from_secs(30);

/// The first version of a shim that knows leases.
pub(super) const LEASES: u32 = 2;

/// Between two looks at a directory whose shim is about to listen or about to end.
pub(super) const AGAIN: Duration = Duration::from_millis(10);

/// How long killing the remains of a lost job may take.
const KILL_WITHIN: Duration = Duration::from_secs(30);

/// Somebody else answers at the socket.
#[derive(Debug, thiserror::Error)]
#[error("whoever listens there is not the supervisor of this job")]
struct Stranger;

/// A connection to the shim of a job, past the handshake.
#[derive(Debug)]
pub(super) struct Connection {
    stream: BufReader<UnixStream>,
    /// `go` had been said before this connection was made.
    pub(super) gone: bool,
    /// What the shim speaks.
    pub(super) version: u32,
}

impl Connection {
    /// Connects, and makes sure that it is the shim of this job that answers.
    pub(super) async fn open(dir: &JobDir) -> io::Result<Connection> {
        let stranger = || io::Error::new(io::ErrorKind::InvalidData, Stranger);
        let (_keep, path) = dir.short_socket_path()?;
        let stream = BufReader::new(UnixStream::connect(path).await?);
        let mut connection = Connection { stream, gone: false, version: 0 };
        let Some(Event::Hello { version, instance, gone }) = connection.next().await? else {
            return Err(stranger());
        };
        let hello = dir.read_hello().map_err(io::Error::other)?;
        if hello.is_none_or(|hello| hello.instance != instance) {
            return Err(stranger());
        }
        connection.gone = gone;
        connection.version = version;
        Ok(connection)
    }

    pub(super) async fn send(&mut self, request: &Request) -> io::Result<()> {
        failpoint::hit("node.shim.ask")?;
        self.stream.get_mut().write_all(request.to_line().as_bytes()).await
    }

    /// Asks, and waits for an answer that `wanted` accepts.
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

    /// Says until when the job may run; the answer may be that it may not.
    pub(super) async fn renew(&mut self, until: Boot) -> io::Result<Event> {
        let wanted =
            |event: &Event| matches!(event, Event::Renewed { .. } | Event::Refused { .. } | Event::Ended);
        self.ask(&Request::Renew { until_ms: until.millis() }, wanted).await
    }

    /// What it says next; `None` when it has closed the connection.
    pub(super) async fn next(&mut self) -> io::Result<Option<Event>> {
        let mut line = Vec::new();
        (&mut self.stream).take(MAX_LINE as u64).read_until(b'\n', &mut line).await?;
        match line.last() {
            Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
            _ => Ok(None),
        }
    }

    /// Reads until one of the events that `wanted` accepts; an end of the conversation is an error.
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

/// What there is at a job directory.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one at a time, taken apart at once")]
pub(super) enum Place {
    /// A shim, connected.
    Live(Connection),
    /// An exit record that counts.
    Ended(ExitRecord),
    /// Nothing that was ever started.
    Fresh,
    /// The mark of a start, and nothing else.
    Lost,
}

/// Looks what there is at a job directory. A shim that comes or goes meanwhile is waited for.
pub(super) async fn look(dir: &JobDir) -> Result<Place, ReattachError> {
    let deadline = Instant::now() + ANSWER;
    let path = || dir.path().to_owned();
    let mut last = None;
    loop {
        // In this order: a shim writes its record, or is killed, before its lock goes.
        let shim = dir.has_shim().map_err(|source| ReattachError::Look { dir: path(), source })?;
        let record = dir.read_exit()?;
        let no_go = |record: &ExitRecord| record.end == End::NeverStarted(NotStarted::NoGo);
        let traces = Traces {
            supervised: shim,
            started: dir.is_started(),
            ended: record.is_some(),
            may_start: record.as_ref().is_some_and(no_go),
        };
        match (traces.found(), record) {
            (Found::Ended, Some(record)) => return Ok(Place::Ended(record)),
            (Found::Fresh, _) => return Ok(Place::Fresh),
            (Found::Lost, _) => return Ok(Place::Lost),
            (Found::Live | Found::Ended, _) => {}
        }
        match tokio::time::timeout_at(deadline, Connection::open(dir)).await {
            Ok(Ok(connection)) => return Ok(Place::Live(connection)),
            Ok(Err(error)) if Instant::now() < deadline => last = Some(error),
            Ok(Err(error)) => {
                return Err(ReattachError::Silent { dir: path(), after: ANSWER, source: Some(error) });
            }
            Err(_) => return Err(ReattachError::Silent { dir: path(), after: ANSWER, source: last }),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Kills what is left of a job whose shim is gone, and finds out why it is. Safe to repeat.
pub(super) async fn clear_lost(dir: &JobDir) -> Result<Lost, ReattachError> {
    let nothing = Lost { rebooted: false, killed: 0, left: 0, why: None };
    let Some(hello) = dir.read_hello()? else { return Ok(nothing) };
    if hello.boot_id != agent_shim::process::boot_id() {
        // A container keeps its groups when it is given another boot.
        let groups = Groups::of(&hello);
        let _ = groups.is_empty() && groups.remove();
        return Ok(Lost { rebooted: true, ..nothing });
    }
    let (found, left) = kill(dir, hello, KILL_WITHIN).await;
    let why = super::container::fate::of(dir).await;
    Ok(Lost { killed: found - left, left, why, ..nothing })
}

/// Kills every process of a job that can be found, with its shim where that is in a container. Returns how many there
/// were, and how many are left.
pub async fn end_all(dir: &JobDir, within: Duration) -> Result<(usize, usize), ReattachError> {
    match dir.read_hello()? {
        Some(hello) => Ok(kill(dir, hello, within).await),
        None => Ok((0, 0)),
    }
}

async fn kill(dir: &JobDir, hello: Hello, within: Duration) -> (usize, usize) {
    let container = Note::read(dir).ok().flatten().map(|note| note.id).filter(|_| hello.container);
    let kill = move || {
        if let Some(id) = container {
            return process::kill_container(&id, MARK, &hello.instance, within);
        }
        let groups = Groups::of(&hello);
        let counts = process::kill_all(&groups, MARK, &hello.instance, within);
        if counts.1 == 0 && !groups.remove() {
            tracing::warn!(groups = ?groups.dirs(), "the control groups of a lost job cannot be removed");
        }
        counts
    };
    tokio::task::spawn_blocking(kill).await.unwrap_or_default()
}
