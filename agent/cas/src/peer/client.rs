//! Another node as a source of blobs.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use agent_model::Digest;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use reapi::content_addressable_storage_client::ContentAddressableStorageClient;
use tokio::time::{Instant, timeout};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::digest_of;
use crate::remote::bytestream::byte_stream_client::ByteStreamClient;
use crate::remote::bytestream::{ReadRequest, ReadResponse};
use crate::remote::{Form, MAX_BATCH, Resource, digest_from_wire, digest_to_wire};
use crate::store::{Chunks, ReadError, verified};

/// The longest silence of a node that is at work: while it waits itself it says so every second.
const SILENCE: Duration = Duration::from_secs(6);

/// The longest wait for the next bytes from a node that waits itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// The pause before a node that waits itself is asked again.
const PAUSE: Duration = Duration::from_millis(50);

/// Another node, for the blobs of one tree. Clones share the connection.
#[derive(Clone)]
pub struct Peer {
    cas: ContentAddressableStorageClient<Channel>,
    streams: ByteStreamClient<Channel>,
    tree: Arc<str>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("tree", &self.tree).finish_non_exhaustive()
    }
}

impl Peer {
    /// The node behind a channel, for the tree with this root.
    pub fn new(channel: Channel, root: Digest) -> Peer {
        let most = usize::try_from(MAX_BATCH).unwrap_or(usize::MAX);
        Peer {
            cas: ContentAddressableStorageClient::new(channel.clone()).max_decoding_message_size(most),
            streams: ByteStreamClient::new(channel).max_decoding_message_size(most),
            tree: root.hex().into(),
        }
    }

    /// The content of a blob, checked at the latest when it ends.
    pub(crate) async fn read(&self, digest: Digest) -> Result<Chunks, ReadError> {
        let fail = move |status: Status| failure(digest, status);
        let resource_name = Resource::Blob { digest, form: Form::Plain }.within(&self.tree);
        let request = ReadRequest { resource_name, ..ReadRequest::default() };
        let begun = Instant::now();
        let messages = loop {
            let mut client = self.streams.clone();
            match in_time(client.read(request.clone())).await {
                Ok(answer) => break answer.into_inner(),
                Err(status) if status.code() == Code::Aborted && begun.elapsed() < PATIENCE => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(status) => return Err(fail(status)),
            }
        };
        let pieces = stream::try_unfold(messages, move |mut messages| async move {
            let piece = next_piece(&mut messages).await.map_err(fail)?;
            Ok(piece.map(|piece| (piece, messages)))
        });
        Ok(verified(digest, pieces.boxed()))
    }

    /// Whole blobs, which fit into a message together: those that came, checked, and why others did not.
    pub(crate) async fn read_batch(&self, digests: &[Digest]) -> (HashMap<Digest, Bytes>, Option<ReadError>) {
        let (mut got, mut progress) = (HashMap::with_capacity(digests.len()), Instant::now());
        loop {
            let wanted: Vec<Digest> =
                digests.iter().copied().filter(|digest| !got.contains_key(digest)).collect();
            let Some(first) = wanted.first().copied() else { return (got, None) };
            let before = got.len();
            let error = match self.ask(&wanted, &mut got).await {
                Ok(error) => error,
                Err(status) => Some(failure(first, status)),
            };
            if got.len() > before {
                progress = Instant::now();
            }
            match error {
                Some(ReadError::Remote { source, .. })
                    if source.code() == Code::Aborted && progress.elapsed() < PATIENCE =>
                {
                    tokio::time::sleep(PAUSE).await;
                }
                Some(error) => return (got, Some(error)),
                None if got.len() == before => {
                    let left_out = Status::internal("the answer leaves the blob out");
                    return (got, Some(failure(first, left_out)));
                }
                None => {}
            }
        }
    }

    /// Asks once; the worst of what was said of single blobs.
    pub(super) async fn ask(
        &self,
        digests: &[Digest],
        got: &mut HashMap<Digest, Bytes>,
    ) -> Result<Option<ReadError>, Status> {
        let question = reapi::BatchReadBlobsRequest {
            digests: digests.iter().map(digest_to_wire).collect(),
            digest_function: reapi::digest_function::Value::Sha256 as i32,
            instance_name: self.tree.as_ref().to_owned(),
            ..Default::default()
        };
        let mut client = self.cas.clone();
        let answer = in_time(client.batch_read_blobs(question)).await?.into_inner();
        let mut worst: Option<ReadError> = None;
        for item in answer.responses {
            let digest = item.digest.as_ref().map(digest_from_wire);
            let Some(Ok(digest)) = digest else { continue };
            let status = item.status.unwrap_or_default();
            let error = match (status.code, digest_of(&item.data)) {
                (0, actual) if actual == digest => {
                    got.insert(digest, item.data.into());
                    continue;
                }
                (0, actual) => ReadError::Corrupt { digest, actual },
                (code, _) => failure(digest, Status::new(code.into(), status.message)),
            };
            // What is absent is worse than what is awaited, and wrong bytes are worst.
            let rank = |error: &ReadError| (error.is_damage(), matches!(error, ReadError::Absent { .. }));
            if worst.as_ref().is_none_or(|worst| rank(&error) > rank(worst)) {
                worst = Some(error);
            }
        }
        Ok(worst)
    }
}

/// The next bytes; `None` at the end.
async fn next_piece(messages: &mut Streaming<ReadResponse>) -> Result<Option<Bytes>, Status> {
    let begun = Instant::now();
    loop {
        match in_time(messages.message()).await? {
            Some(message) if !message.data.is_empty() => return Ok(Some(message.data)),
            Some(_) if begun.elapsed() > PATIENCE => {
                return Err(Status::aborted(format!("no byte within {} s", PATIENCE.as_secs())));
            }
            Some(_) => {}
            None => return Ok(None),
        }
    }
}

async fn in_time<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| Err(Status::deadline_exceeded(format!("no answer within {} s", SILENCE.as_secs())));
    timeout(SILENCE, call).await.unwrap_or_else(late)
}

fn failure(digest: Digest, status: Status) -> ReadError {
    match status.code() {
        Code::NotFound => ReadError::Absent { digest },
        _ => ReadError::Remote { digest, source: status.into() },
    }
}
