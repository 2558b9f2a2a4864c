//! A session in a job that runs: the daemon's end of its connection to the attendant ([`agent_shim::session`]).
//!
//! What the attendant says comes from the job, and is only passed on.

use std::io;
use std::path::PathBuf;

use agent_shim::JobDir;
use agent_shim::session::{FromJob, FromUser, HEAD, parse_head};
use agent_shim::wire::{Event, Request};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::ReattachError;
use super::connection::{JobTrace, look};

/// Why a session could not be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SessionError {
    #[error(transparent)]
    Look(#[from] ReattachError),
    #[error("the job does not run any more")]
    Over,
    #[error("its supervisor refuses: {why}")]
    Refused { why: String },
    #[error("could not talk to the supervisor of {}", dir.display())]
    Talk { dir: PathBuf, source: io::Error },
}

/// What a session sends.
#[derive(Debug)]
pub struct SessionReader(BufReader<OwnedReadHalf>);

/// What is sent to a session.
#[derive(Debug)]
pub struct SessionWriter(OwnedWriteHalf);

/// Opens a session in the job of a directory. It ends when both ends are dropped.
pub fn open_session(dir: &JobDir) -> BoxFuture<'_, Result<(SessionReader, SessionWriter), SessionError>> {
    async move {
        let JobTrace::Live(mut connection) = look(dir).await? else { return Err(SessionError::Over) };
        let wanted = |event: &Event| matches!(event, Event::Attached | Event::Refused { .. } | Event::Ended);
        match connection.ask(&Request::Session, wanted).await {
            Ok(Event::Attached) => {
                let (reader, writer) = connection.into_stream().into_split();
                Ok((SessionReader(BufReader::with_capacity(ROOM, reader)), SessionWriter(writer)))
            }
            Ok(Event::Refused { why }) => Err(SessionError::Refused { why }),
            Ok(_) => Err(SessionError::Over),
            Err(source) => Err(SessionError::Talk { dir: dir.path().to_owned(), source }),
        }
    }
    .boxed()
}

/// How much is read at once, in bytes.
const ROOM: usize = 128 * 1024;

impl SessionReader {
    /// The next frame; `None` at the end.
    pub async fn next(&mut self) -> io::Result<Option<FromJob>> {
        let mut head = [0; HEAD];
        match self.0.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        };
        let (kind, length) = parse_head(head)?;
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).await?;
        FromJob::of_frame(kind, bytes).map(Some)
    }
}

impl SessionWriter {
    /// Sends a frame.
    pub async fn send(&mut self, frame: &FromUser) -> io::Result<()> {
        self.0.write_all(&frame.to_frame()).await
    }
}
