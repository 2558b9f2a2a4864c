//! A store at the other end of a connection: any server of the Remote Execution API v2.
//!
//! Hides the protocol, the limits servers announce and the ways they differ from what they announce.
//! Nothing that arrives is believed: every blob is hashed, every answer matched with its question. Batches
//! are budgeted by encoded size; one that is refused as a whole is halved until the blob at fault is alone,
//! and a blob too large for any message goes as a stream. Each call has a deadline, and each message of a
//! stream. A call that fails because the server or the way to it is away for a moment is repeated for
//! [`patience::LONGEST`]; a stream from the server goes on where it broke. Only a stream to the server is not
//! repeated here, because its bytes are gone: `push` does it.
//!
//! The channel is made by the caller, who knows the transport and its settings.

mod batch;
mod patience;
mod wire;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use agent_model::Digest;
use agent_model::ids::hex;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bazel_remote_apis::google::bytestream;
use bytes::Bytes;
use bytestream::byte_stream_client::ByteStreamClient;
use futures_util::stream::{self, Stream, StreamExt, TryStreamExt};
use reapi::capabilities_client::CapabilitiesClient;
use reapi::content_addressable_storage_client::ContentAddressableStorageClient;
use tokio::sync::OnceCell;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

pub(crate) use patience::Patience;
pub use wire::{Resource, ResourceError, digest_from_wire, digest_to_wire};

use crate::Hasher;
use crate::store::{BlobStore, Chunks, MissingError, ReadError, WriteError, verified};

/// The largest batch a message carries, in bytes.
pub const MAX_BATCH: u64 = 4 * 1024 * 1024;

/// The largest message of our own server: a batch and its frame, in bytes.
pub const MAX_MESSAGE: usize = 4 * 1024 * 1024 + 64 * 1024;

/// The largest message accepted from a server, in bytes. Some answer a little above the common limit.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

/// Bytes in one message of a stream.
const PIECE: usize = 1024 * 1024;

/// Digests in one question.
const QUESTION: usize = 10_000;

/// Calls on their way at once.
const IN_FLIGHT: usize = 4;

/// The longest silence of a server that is still at work.
const SILENCE: Duration = Duration::from_secs(60);

/// The slowest connection an upload is worth, in bytes per second.
const SLOWEST: u64 = 64 * 1024;

/// A remote store. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Remote {
    cas: ContentAddressableStorageClient<Channel>,
    streams: ByteStreamClient<Channel>,
    capabilities: CapabilitiesClient<Channel>,
    /// Encoded bytes a batch may have, once the server was asked.
    budget: Arc<OnceCell<u64>>,
}

impl Remote {
    /// The store behind `channel`. It is asked for its limits with the first batch.
    pub fn new(channel: Channel) -> Remote {
        Remote {
            cas: ContentAddressableStorageClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            streams: ByteStreamClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            capabilities: CapabilitiesClient::new(channel),
            budget: Arc::default(),
        }
    }

    async fn budget(&self) -> Result<u64, Status> {
        self.budget.get_or_try_init(|| self.ask_budget()).await.copied()
    }

    async fn ask_budget(&self) -> Result<u64, Status> {
        let ask = || {
            let mut client = self.capabilities.clone();
            async move { client.get_capabilities(reapi::GetCapabilitiesRequest::default()).await }
        };
        let cache = match persist(ask).await {
            Ok(answer) => answer.into_inner().cache_capabilities.unwrap_or_default(),
            Err(status) if status.code() == Code::Unimplemented => Default::default(),
            Err(status) => return Err(status),
        };
        let sha256 = reapi::digest_function::Value::Sha256 as i32;
        if !cache.digest_functions.is_empty() && !cache.digest_functions.contains(&sha256) {
            return Err(Status::failed_precondition("the store does not name blobs by SHA-256"));
        }
        // Zero means that only the transport limits a message.
        let announced = u64::try_from(cache.max_batch_total_size_bytes).unwrap_or(0);
        let limit = if announced == 0 { MAX_BATCH } else { announced.min(MAX_BATCH) };
        Ok(limit - limit / 20)
    }

    async fn ask_missing(&self, digests: Vec<Digest>) -> Result<Vec<Digest>, MissingError> {
        let question = reapi::FindMissingBlobsRequest {
            blob_digests: digests.iter().map(digest_to_wire).collect(),
            digest_function: reapi::digest_function::Value::Sha256 as i32,
            ..Default::default()
        };
        let ask = || {
            let (mut client, question) = (self.cas.clone(), question.clone());
            async move { client.find_missing_blobs(question).await }
        };
        let answer =
            persist(ask).await.map_err(|status| MissingError::Remote { source: status.into() })?.into_inner();
        let missing: Result<HashSet<Digest>, _> =
            answer.missing_blob_digests.iter().map(digest_from_wire).collect();
        let missing = missing.map_err(|_| MissingError::Answer)?;
        let known: Vec<Digest> = digests.into_iter().filter(|digest| missing.contains(digest)).collect();
        if known.len() == missing.len() { Ok(known) } else { Err(MissingError::Answer) }
    }

    /// Asks whether an upload that was acknowledged in an odd way is there.
    async fn confirm(&self, digest: Digest) -> Result<(), WriteError> {
        match self.missing(&[digest]).await {
            Ok(missing) if missing.is_empty() => Ok(()),
            Err(MissingError::Remote { source }) => Err(WriteError::Remote { digest, source }),
            _ => Err(WriteError::Vanished { digest }),
        }
    }
}

impl BlobStore for Remote {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        let mut seen = HashSet::from([Digest::EMPTY]);
        let asked: Vec<Digest> = digests.iter().copied().filter(|digest| seen.insert(*digest)).collect();
        let questions: Vec<Vec<Digest>> = asked.chunks(QUESTION).map(<[Digest]>::to_vec).collect();
        let questions = questions.into_iter().map(|question| self.ask_missing(question));
        stream::iter(questions).buffered(IN_FLIGHT).try_concat().await
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        let beyond = ReadError::Offset { digest, offset };
        if offset > digest.size {
            return Err(beyond);
        }
        if digest == Digest::EMPTY {
            return Ok(stream::empty().boxed());
        }
        let Ok(read_offset) = i64::try_from(offset) else { return Err(beyond) };
        let mut download = Download::new(self.streams.clone(), digest, read_offset);
        download.open().await.map_err(|status| read_failure(digest, status))?;
        let chunks = stream::try_unfold(download, move |mut download| async move {
            let message = download.next().await.map_err(|status| read_failure(digest, status))?;
            Ok(message.map(|bytes| (bytes, download)))
        });
        Ok(if offset == 0 { verified(digest, chunks.boxed()) } else { chunks.boxed() })
    }

    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        batch::run(&batch::Get(self), digests).await
    }

    async fn write(&self, digest: Digest, source: Chunks) -> Result<(), WriteError> {
        if digest == Digest::EMPTY {
            return Ok(());
        }
        let mut id = [0; 16];
        getrandom::fill(&mut id)
            .map_err(|error| write_failure(digest, Status::internal(format!("no random bits: {error}"))))?;
        let upload = Upload::new(hex(&id), digest, source);
        let failure = Arc::clone(&upload.failure);
        let patience = SILENCE + Duration::from_secs(digest.size / SLOWEST);
        let mut client = self.streams.clone();
        let answer = within(patience, client.write(upload.messages())).await;
        if let Some(error) = lock(&failure).take() {
            return Err(error);
        }
        let committed = answer.map_err(|status| write_failure(digest, status))?.into_inner().committed_size;
        if u64::try_from(committed) == Ok(digest.size) { Ok(()) } else { self.confirm(digest).await }
    }

    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        batch::run(&batch::Put(self), blobs).await
    }

    async fn distrust(&self, _: Digest) {
        // The server reads its own blobs with its own checks.
    }

    async fn file(&self, _: Digest) -> Option<std::fs::File> {
        None
    }
}

/// A blob on its way from a server. When the stream breaks another one goes on where it was.
struct Download {
    client: ByteStreamClient<Channel>,
    resource_name: String,
    offset: i64,
    messages: Option<Streaming<bytestream::ReadResponse>>,
}

impl Download {
    fn new(client: ByteStreamClient<Channel>, digest: Digest, offset: i64) -> Download {
        Download { client, resource_name: Resource::Blob(digest).to_string(), offset, messages: None }
    }

    async fn open(&mut self) -> Result<(), Status> {
        let ask = || {
            let mut client = self.client.clone();
            let (resource_name, read_offset) = (self.resource_name.clone(), self.offset);
            async move { client.read(bytestream::ReadRequest { resource_name, read_offset, read_limit: 0 }).await }
        };
        self.messages = Some(persist(ask).await?.into_inner());
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        let mut patience = Patience::default();
        loop {
            let Some(messages) = &mut self.messages else { return Ok(None) };
            match within(SILENCE, says_something(messages)).await {
                Ok(Some(message)) => {
                    self.offset =
                        self.offset.saturating_add(i64::try_from(message.data.len()).unwrap_or(i64::MAX));
                    return Ok(Some(message.data.into()));
                }
                Ok(None) => return Ok(None),
                Err(status) => {
                    patience.wait(status).await?;
                    self.open().await?;
                }
            }
        }
    }
}

/// The next message with bytes in it: a server that sends empty ones for ever is silent too.
async fn says_something(
    messages: &mut Streaming<bytestream::ReadResponse>,
) -> Result<Option<bytestream::ReadResponse>, Status> {
    loop {
        match messages.message().await? {
            Some(message) if message.data.is_empty() => {}
            other => return Ok(other),
        }
    }
}

/// A blob on its way to a server. The last message is held back until the bytes are known to be the blob, so
/// a wrong one is never finished.
struct Upload {
    resource_name: String,
    digest: Digest,
    source: Chunks,
    hasher: Hasher,
    held: Bytes,
    offset: u64,
    /// Why the messages ended early; a stream of messages cannot say it.
    failure: Arc<Mutex<Option<WriteError>>>,
}

impl Upload {
    fn new(id: String, digest: Digest, source: Chunks) -> Upload {
        let resource_name = Resource::Upload { id, digest }.to_string();
        let (hasher, held, failure) = (Hasher::new(), Bytes::new(), Arc::default());
        Upload { resource_name, digest, source, hasher, held, offset: 0, failure }
    }

    fn messages(self) -> impl Stream<Item = bytestream::WriteRequest> + Send + 'static {
        stream::unfold(Some(self), |upload| async move {
            let mut upload = upload?;
            match upload.next().await {
                Ok(message) => {
                    let rest = (!message.finish_write).then_some(upload);
                    Some((message, rest))
                }
                Err(error) => {
                    *lock(&upload.failure) = Some(error);
                    None
                }
            }
        })
    }

    async fn next(&mut self) -> Result<bytestream::WriteRequest, WriteError> {
        let digest = self.digest;
        while self.held.len() <= PIECE {
            let Some(chunk) = self.source.next().await else { break };
            let chunk = chunk.map_err(|source| WriteError::Source { digest, source: source.into() })?;
            self.hasher.update(&chunk);
            if self.hasher.size() > digest.size {
                return Err(WriteError::Mismatch { digest, actual: self.hasher.clone().finish() });
            }
            if !chunk.is_empty() {
                let held = std::mem::replace(&mut self.held, chunk);
                if !held.is_empty() {
                    return Ok(self.message(held, false));
                }
            }
        }
        if self.held.len() > PIECE {
            let piece = self.held.split_to(PIECE);
            return Ok(self.message(piece, false));
        }
        match self.hasher.clone().finish() {
            actual if actual == digest => {
                let last = std::mem::take(&mut self.held);
                Ok(self.message(last, true))
            }
            actual => Err(WriteError::Mismatch { digest, actual }),
        }
    }

    fn message(&mut self, data: Bytes, finish_write: bool) -> bytestream::WriteRequest {
        let write_offset = i64::try_from(self.offset).unwrap_or(i64::MAX);
        self.offset += data.len() as u64;
        let resource_name = self.resource_name.clone();
        bytestream::WriteRequest { resource_name, write_offset, finish_write, data: data.into() }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The answer to a call that may be repeated.
async fn persist<T, F: Future<Output = Result<T, Status>>>(call: impl Fn() -> F) -> Result<T, Status> {
    let mut patience = Patience::default();
    loop {
        match within(SILENCE, call()).await {
            Ok(answer) => return Ok(answer),
            Err(status) => patience.wait(status).await?,
        }
    }
}

/// The answer, if it comes in time.
async fn within<T>(limit: Duration, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    tokio::time::timeout(limit, call)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("no answer within {} s", limit.as_secs()))))
}

fn read_failure(digest: Digest, status: Status) -> ReadError {
    match status.code() {
        Code::NotFound => ReadError::Absent { digest },
        _ => ReadError::Remote { digest, source: status.into() },
    }
}

fn write_failure(digest: Digest, status: Status) -> WriteError {
    WriteError::Remote { digest, source: status.into() }
}

#[cfg(test)]
mod tests;
