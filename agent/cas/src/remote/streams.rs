//! A blob too large for one message, in a stream of messages.
//!
//! Owns both directions: [`Download`] resumes a stream where it broke, uncompressed where a compressed one failed;
//! [`Upload`] never finishes a stream whose bytes are not the blob.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_model::Digest;
use bytes::Bytes;
use futures_util::future::ready;
use futures_util::stream::{self, Stream, StreamExt};
use parking_lot::Mutex;
use tonic::{Status, Streaming};

use super::bytestream::{ReadRequest, ReadResponse, WriteRequest};
use super::compression::{Inflater, deflated};
use super::{Form, PIECE, Remote, Resource, RetryPolicy, SILENCE, persist, within};
use crate::store::{Chunks, ReadError, WriteError, verified};

/// A blob that is read from a server. When the stream breaks, another one continues where it was.
pub(super) struct Download {
    remote: Remote,
    digest: Digest,
    /// Bytes of the blob before the next one.
    offset: u64,
    messages: Option<Streaming<ReadResponse>>,
    /// While the stream is compressed.
    compressed: Option<Compressed>,
}

/// The decompressor, and the input it has not consumed yet.
struct Compressed {
    inflater: Inflater,
    input: Bytes,
}

impl Download {
    pub(super) fn new(remote: Remote, digest: Digest, offset: u64, form: Form) -> Download {
        let inflater = if form == Form::Zstd { Inflater::new(digest, offset).ok() } else { None };
        let compressed = inflater.map(|inflater| Compressed { inflater, input: Bytes::new() });
        Download { remote, digest, offset, messages: None, compressed }
    }

    /// Asks for the rest of the blob.
    pub(super) async fn open(&mut self) -> Result<(), Status> {
        let form = if self.compressed.is_some() { Form::Zstd } else { Form::Plain };
        let name = Resource::Blob { digest: self.digest, form }.within(&self.remote.instance);
        let read_offset =
            i64::try_from(self.offset).map_err(|_| Status::out_of_range("no blob is so large"))?;
        let ask = || {
            let (mut client, resource_name) = (self.remote.streams.clone(), name.clone());
            async move { client.read(ReadRequest { resource_name, read_offset, read_limit: 0 }).await }
        };
        self.messages = match persist(ask).await {
            Ok(answer) => Some(answer.into_inner()),
            Err(_) if self.compressed.is_some() => return Box::pin(self.open_plain()).await,
            Err(status) => return Err(status),
        };
        Ok(())
    }

    /// Asks for the rest uncompressed. A compressed stream that broke cannot be resumed.
    async fn open_plain(&mut self) -> Result<(), Status> {
        self.compressed = None;
        if self.offset == self.digest.size {
            self.messages = None;
            return Ok(());
        }
        self.open().await
    }

    /// The next bytes of the blob; `None` at its end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        let mut retry = RetryPolicy::default();
        loop {
            if let Some(Compressed { inflater, input }) = &mut self.compressed {
                match inflater.next(input) {
                    Ok(None) => {}
                    Ok(Some(piece)) => return Ok(Some(self.passed(piece))),
                    Err(error) => {
                        tracing::warn!(digest = %self.digest, %error, "fetching blob uncompressed");
                        self.remote.link.give_up_compression();
                        self.open_plain().await?;
                    }
                }
            }
            let Some(messages) = &mut self.messages else { return Ok(None) };
            match within(SILENCE, says_something(messages)).await {
                Ok(Some(message)) => match &mut self.compressed {
                    Some(Compressed { input, .. }) => *input = message.data,
                    None => return Ok(Some(self.passed(message.data))),
                },
                Ok(None) if self.is_cut() => self.open_plain().await?,
                Ok(None) => return Ok(None),
                Err(_) if self.compressed.is_some() => self.open_plain().await?,
                Err(status) => {
                    retry.wait(status).await?;
                    self.open_plain().await?;
                }
            }
        }
    }

    fn passed(&mut self, piece: Bytes) -> Bytes {
        self.offset += piece.len() as u64;
        piece
    }

    /// A compressed form that ends before the blob does.
    fn is_cut(&self) -> bool {
        let within = |Compressed { inflater, .. }: &Compressed| {
            inflater.finish().is_err() || self.offset != self.digest.size
        };
        self.compressed.as_ref().is_some_and(within)
    }
}

/// The next message with bytes in it: a server that sends empty ones for ever is silent too.
async fn says_something(messages: &mut Streaming<ReadResponse>) -> Result<Option<ReadResponse>, Status> {
    loop {
        match messages.message().await? {
            Some(message) if message.data.is_empty() => {}
            other => return Ok(other),
        }
    }
}

/// A blob that is sent to a server. The last message is held back until the bytes are known to be the blob, so
/// a wrong one is never finished.
pub(super) struct Upload {
    resource_name: String,
    digest: Digest,
    /// The bytes to send; ends with an error when they are not the blob.
    source: Chunks,
    held: Bytes,
    sent: Arc<AtomicU64>,
    failure: UploadFailure,
}

/// Why the messages of an upload ended early; the stream of messages cannot carry an error.
type UploadFailure = Arc<Mutex<Option<WriteError>>>;

impl Upload {
    pub(super) fn new(resource_name: String, digest: Digest, form: Form, source: Chunks) -> Upload {
        let failure = UploadFailure::default();
        let told = Arc::clone(&failure);
        let until_it_fails = source.scan((), move |(), chunk| {
            let failed = |source: ReadError| WriteError::Source { digest, source: source.into() };
            ready(chunk.map_err(|source| *told.lock() = Some(failed(source))).ok().map(Ok))
        });
        let plain = verified(digest, until_it_fails.boxed());
        let source = if form == Form::Zstd { deflated(digest, plain) } else { plain };
        Upload { resource_name, digest, source, held: Bytes::new(), sent: Arc::default(), failure }
    }

    /// Where the reason is stored when the messages end early.
    pub(super) fn failure(&self) -> UploadFailure {
        Arc::clone(&self.failure)
    }

    /// How many bytes are in messages so far.
    pub(super) fn sent(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.sent)
    }

    pub(super) fn messages(self) -> impl Stream<Item = WriteRequest> + Send + 'static {
        stream::unfold(Some(self), |upload| async move {
            let mut upload = upload?;
            match upload.next().await {
                Ok(message) => {
                    let rest = (!message.finish_write).then_some(upload);
                    Some((message, rest))
                }
                Err(error) => {
                    upload.failure.lock().get_or_insert(error);
                    None
                }
            }
        })
    }

    async fn next(&mut self) -> Result<WriteRequest, WriteError> {
        let digest = self.digest;
        while self.held.len() <= PIECE {
            match self.source.next().await {
                Some(Ok(chunk)) if chunk.is_empty() => {}
                Some(Ok(chunk)) => {
                    let held = std::mem::replace(&mut self.held, chunk);
                    if !held.is_empty() {
                        return Ok(self.message(held, false));
                    }
                }
                Some(Err(ReadError::Corrupt { actual, .. })) => {
                    return Err(WriteError::Mismatch { digest, actual });
                }
                Some(Err(source)) => return Err(WriteError::Source { digest, source: source.into() }),
                None => {
                    let last = std::mem::take(&mut self.held);
                    return Ok(self.message(last, true));
                }
            }
        }
        let piece = self.held.split_to(PIECE);
        Ok(self.message(piece, false))
    }

    fn message(&mut self, data: Bytes, finish_write: bool) -> WriteRequest {
        let offset = self.sent.fetch_add(data.len() as u64, Ordering::Relaxed);
        let write_offset = i64::try_from(offset).unwrap_or(i64::MAX);
        let resource_name = self.resource_name.clone();
        WriteRequest { resource_name, write_offset, finish_write, data }
    }
}
