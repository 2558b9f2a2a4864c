//! A store at the other end of a connection: any server of the Remote Execution API v2.
//!
//! Hides the protocol, the limits servers announce and the ways they differ from what they announce.
//! Nothing that arrives is trusted: every blob is hashed, every answer matched with its request. Batches
//! are budgeted by encoded size; one that is refused as a whole is halved until the blob at fault is alone,
//! and a blob too large for any message is sent as a stream. Each call has a deadline, and so has each message of a
//! stream. A call whose error is not final ([`is_away`]) is repeated for [`retry::LONGEST`], and so are single items
//! of a batch; a download stream is resumed where it broke. Only an upload stream is not repeated here, because its
//! bytes are gone: `push` repeats it.
//!
//! Blobs are sent compressed where the server offers it, the connection is slow ([`link`]) and they shrink. If a
//! compressed blob arrives damaged, it is read once more uncompressed, and nothing is compressed after that.
//!
//! The caller, which knows the transport, makes the channel from an endpoint that [`near`] or [`far`] has configured;
//! a server sets [`FRAME`] and the windows for its end.

mod batch;
pub mod bytestream;
pub mod compression;
mod link;
mod retry;
mod streams;
mod wire;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use agent_model::Digest;
use agent_model::ids::hex;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use reapi::capabilities_client::CapabilitiesClient;
use reapi::content_addressable_storage_client::ContentAddressableStorageClient;
use tokio::sync::OnceCell;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

pub use crate::store::is_away;
use bytestream::byte_stream_client::ByteStreamClient;
use link::Link;
pub(crate) use retry::RetryPolicy;
pub use retry::told;
use streams::{Download, Upload};
pub use wire::{Form, IDENTITY, Resource, ResourceError, ZSTD, digest_from_wire, digest_to_wire};

use crate::store::{BlobStore, Chunks, MissingError, ReadError, WriteError, verified};

/// The largest message that gRPC clients of every language take unless they are told otherwise, in bytes.
pub const MAX_BATCH: u64 = 4 * 1024 * 1024;

/// The limit for all blobs of a batch that our own server announces, in bytes. Clients count blobs alone, not
/// the digests and statuses around them: with this much even blobs of one and two bytes fit into [`MAX_BATCH`],
/// both ways.
pub const ANNOUNCED: u64 = 64 * 1024;

/// The header in which it also announces the limit of an encoded message, for clients that count that.
pub const ENCODED: &str = "agentd-encoded-batch";

/// The header by which our own server says that a submission is refused while anything of its snapshots is missing.
pub const CHECKS_TREES: &str = "agentd-checks-trees";

/// The largest message our own server takes, in bytes: some clients make larger batches than announced.
pub const MAX_MESSAGE: usize = 6 * 1024 * 1024;

/// The largest message accepted from a server, in bytes. Some answer a little above the common limit.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

/// Bytes the other side may put into one frame: with the usual 16 KiB, framing is half of what blobs cost.
pub const FRAME: u32 = 1 << 20;

/// Bytes either side may send on one stream before the other has read them.
pub const STREAM_WINDOW: u32 = 4 << 20;

/// The same for all streams of a connection together: enough for logs at full speed beside blobs.
pub const CONNECTION_WINDOW: u32 = 8 << 20;

/// Bytes on one stream where the other side is far away: so much is on the wire in 20 ms at 800 MB/s.
pub const FAR_STREAM_WINDOW: u32 = 16 << 20;

/// The same for all streams of such a connection together.
pub const FAR_CONNECTION_WINDOW: u32 = 32 << 20;

/// An endpoint on this machine, set so that neither frames nor windows hold a transfer up.
pub fn near(endpoint: Endpoint) -> Endpoint {
    with_windows(endpoint, CONNECTION_WINDOW, STREAM_WINDOW)
}

/// The same for one on another machine.
pub fn far(endpoint: Endpoint) -> Endpoint {
    with_windows(endpoint, FAR_CONNECTION_WINDOW, FAR_STREAM_WINDOW)
}

fn with_windows(endpoint: Endpoint, connection: u32, stream: u32) -> Endpoint {
    endpoint
        .initial_connection_window_size(connection)
        .initial_stream_window_size(stream)
        .max_frame_size(FRAME)
}

/// Bytes in one message of a stream.
const PIECE: usize = 1024 * 1024;

/// Digests in one request.
const QUESTION: usize = 10_000;

/// Calls in flight at once.
const IN_FLIGHT: usize = 4;

/// The longest silence of a server that is still at work.
const SILENCE: Duration = Duration::from_secs(60);

/// The slowest connection that an upload is continued on, in bytes per second.
const SLOWEST: u64 = 64 * 1024;

/// A remote store. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Remote {
    cas: ContentAddressableStorageClient<Channel>,
    streams: ByteStreamClient<Channel>,
    capabilities: CapabilitiesClient<Channel>,
    /// Which of the server's stores.
    instance: Arc<str>,
    /// What it offers, once it was asked.
    terms: Arc<OnceCell<Terms>>,
    link: Arc<Link>,
}

/// What a server offers.
#[derive(Debug, Clone, Copy)]
struct Terms {
    /// Encoded bytes a batch may have.
    budget: u64,
    /// It sends blobs under zstd, and takes streams of them.
    zstd: bool,
    /// It takes batches of them.
    zstd_batches: bool,
    checks_trees: bool,
}

impl Remote {
    /// The store behind a channel to this machine. It is asked what it offers with the first call.
    pub fn new(channel: Channel) -> Remote {
        Remote {
            cas: ContentAddressableStorageClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            streams: ByteStreamClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            capabilities: CapabilitiesClient::new(channel),
            instance: "".into(),
            terms: Arc::default(),
            link: Arc::default(),
        }
    }

    /// The store named `instance` behind a channel to another machine, to which blobs may travel compressed.
    pub fn far(channel: Channel, instance: &str) -> Remote {
        Remote { instance: instance.into(), link: Arc::new(Link::far()), ..Remote::new(channel) }
    }

    fn instance(&self) -> String {
        self.instance.as_ref().to_owned()
    }

    async fn terms(&self) -> Result<Terms, Status> {
        self.terms.get_or_try_init(|| self.ask_terms()).await.copied()
    }

    async fn ask_terms(&self) -> Result<Terms, Status> {
        let ask = || {
            let mut client = self.capabilities.clone();
            let question = reapi::GetCapabilitiesRequest { instance_name: self.instance() };
            async move { client.get_capabilities(question).await }
        };
        let (cache, encoded, checks_trees) = match persist(ask).await {
            Ok(answer) => {
                let encoded =
                    answer.metadata().get(ENCODED).and_then(|told| told.to_str().ok()?.parse().ok());
                let checks_trees = answer.metadata().contains_key(CHECKS_TREES);
                (answer.into_inner().cache_capabilities.unwrap_or_default(), encoded, checks_trees)
            }
            Err(status) if status.code() == Code::Unimplemented => Default::default(),
            Err(status) => return Err(status),
        };
        let sha256 = reapi::digest_function::Value::Sha256 as i32;
        if !cache.digest_functions.is_empty() && !cache.digest_functions.contains(&sha256) {
            return Err(Status::invalid_argument("the store does not name blobs by SHA-256"));
        }
        // Zero means that only the transport limits a message.
        let announced = encoded.or(u64::try_from(cache.max_batch_total_size_bytes).ok()).unwrap_or(0);
        let limit = if announced == 0 { MAX_BATCH } else { announced.min(MAX_BATCH) };
        Ok(Terms {
            budget: limit - limit / 20,
            zstd: cache.supported_compressors.contains(&ZSTD),
            zstd_batches: cache.supported_batch_update_compressors.contains(&ZSTD),
            checks_trees,
        })
    }

    /// What the server offers, if blobs are better compressed by now.
    async fn compressing(&self) -> Option<Terms> {
        if self.link.is_worth_compression() { self.terms().await.ok() } else { None }
    }

    async fn ask_missing(&self, digests: Vec<Digest>) -> Result<Vec<Digest>, MissingError> {
        let question = reapi::FindMissingBlobsRequest {
            blob_digests: digests.iter().map(digest_to_wire).collect(),
            digest_function: reapi::digest_function::Value::Sha256 as i32,
            instance_name: self.instance(),
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

    /// The better form to send a blob in, judged by its beginning.
    async fn form_of(&self, mut source: Chunks) -> (Form, Chunks) {
        if !self.compressing().await.is_some_and(|terms| terms.zstd) {
            return (Form::Plain, source);
        }
        let first = source.next().await;
        let shrinks = matches!(&first, Some(Ok(bytes)) if compression::shrinks(bytes));
        let form = if shrinks { Form::Zstd } else { Form::Plain };
        (form, stream::iter(first).chain(source).boxed())
    }

    /// A server that refuses a compressed upload although it offered it may take a plain one in a moment.
    fn refused(&self, form: Form, status: Status) -> Status {
        match (form, status.code()) {
            (Form::Zstd, Code::InvalidArgument | Code::Unimplemented) => {
                self.link.give_up_compression();
                Status::aborted(format!("the compressed blob is refused: {}", status.message()))
            }
            _ => status,
        }
    }

    /// Asks whether a blob is there whose upload was acknowledged with an unexpected size.
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
        // Together, for one round trip.
        let answers = stream::iter(questions).buffered(IN_FLIGHT).try_concat();
        let (terms, missing) = tokio::join!(self.terms(), answers);
        terms.map_err(|status| MissingError::Remote { source: status.into() })?;
        missing
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        let beyond = ReadError::Offset { digest, offset };
        if offset > digest.size {
            return Err(beyond);
        }
        if digest == Digest::EMPTY {
            return Ok(stream::empty().boxed());
        }
        // A blob that is read from its middle on cannot be checked; compression would be one more thing to go wrong.
        let zstd = offset == 0 && self.compressing().await.is_some_and(|terms| terms.zstd);
        let form = if zstd { Form::Zstd } else { Form::Plain };
        let mut download = Download::new(self.clone(), digest, offset, form);
        download.open().await.map_err(|status| read_failure(digest, status))?;
        let chunks = stream::try_unfold(download, move |mut download| async move {
            let piece = download.next().await.map_err(|status| read_failure(digest, status))?;
            Ok(piece.map(|bytes| (bytes, download)))
        });
        if offset > 0 {
            return Ok(chunks.boxed());
        }
        let link = Arc::clone(&self.link);
        let spoiled = move |error: &ReadError| {
            if form == Form::Zstd && error.is_damage() {
                link.give_up_compression();
            }
        };
        Ok(verified(digest, chunks.boxed()).inspect_err(spoiled).boxed())
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
        let (form, source) = self.form_of(source).await;
        let name = Resource::Upload { id: hex(&id), digest, form }.within(&self.instance);
        let upload = Upload::new(name, digest, form, source);
        let (failure, sent) = (upload.failure(), upload.sent());
        let retry = SILENCE + Duration::from_secs(digest.size / SLOWEST);
        let mut client = self.streams.clone();
        let answer = within(retry, client.write(upload.messages())).await;
        if let Some(error) = failure.lock().take() {
            return Err(error);
        }
        let answer = answer.map_err(|status| self.refused(form, status));
        let committed = answer.map_err(|status| write_failure(digest, status))?.into_inner().committed_size;
        // For a compressed upload some servers return the bytes received, others the size of the blob.
        let right = [digest.size, sent.load(Ordering::Relaxed)].map(i64::try_from).contains(&Ok(committed));
        if right { Ok(()) } else { self.confirm(digest).await }
    }

    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        batch::run(&batch::Put(self), blobs).await
    }

    async fn quarantine(&self, _: Digest) {
        // The server reads its own blobs with its own checks.
    }

    async fn file(&self, _: Digest) -> Option<std::fs::File> {
        None
    }

    async fn checks_trees(&self) -> bool {
        self.terms().await.is_ok_and(|terms| terms.checks_trees)
    }
}

/// The answer to a call that may be repeated.
async fn persist<T, F: Future<Output = Result<T, Status>>>(call: impl Fn() -> F) -> Result<T, Status> {
    let mut retry = RetryPolicy::default();
    loop {
        match within(SILENCE, call()).await {
            Ok(answer) => return Ok(answer),
            Err(status) => retry.wait(status).await?,
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
