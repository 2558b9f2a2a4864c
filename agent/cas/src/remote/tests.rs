//! The client against a server that may be told to be difficult in the ways real ones are.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use futures_util::stream::BoxStream;
use reapi::capabilities_server::{Capabilities, CapabilitiesServer};
use reapi::content_addressable_storage_server::{ContentAddressableStorage, ContentAddressableStorageServer};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Streaming};

use super::*;
use crate::conformance::{self, content, read_all, source};
use crate::{Memory, digest_of};

/// How a server differs from a good one.
#[derive(Debug, Clone, Default)]
struct Habits {
    /// What it announces.
    batch_limit: i64,
    /// What a batch may really have, if that is less.
    real_limit: Option<usize>,
    /// What it says of the size of a finished upload.
    committed: Option<i64>,
    /// It takes uploads and forgets them.
    forgetful: bool,
    /// It names blobs by another function.
    other_function: bool,
    /// It is away at every other call, and breaks off every stream from it that is not short.
    restless: bool,
    /// One wrong item spoils the whole batch.
    spoiled: bool,
}

#[derive(Debug, Clone, Default)]
struct Server {
    store: Memory,
    habits: Habits,
    calls: Arc<AtomicUsize>,
    /// Calls that found it away, or came after one that did.
    visits: Arc<AtomicUsize>,
}

impl Server {
    fn be_there(&self) -> Result<(), Status> {
        match self.habits.restless && self.visits.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            true => Err(Status::unavailable("back in a moment")),
            false => Ok(()),
        }
    }

    fn check_size(&self, bytes: usize) -> Result<(), Status> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.habits.real_limit {
            Some(limit) if bytes > limit => Err(Status::out_of_range("message too large")),
            _ => Ok(()),
        }
    }
}

fn status_of(result: &Result<(), WriteError>) -> bazel_remote_apis::google::rpc::Status {
    let code = match result {
        Ok(()) => Code::Ok,
        Err(WriteError::Mismatch { .. }) => Code::InvalidArgument,
        Err(_) => Code::Internal,
    };
    bazel_remote_apis::google::rpc::Status { code: code as i32, ..Default::default() }
}

#[tonic::async_trait]
impl Capabilities for Server {
    async fn get_capabilities(
        &self,
        _: Request<reapi::GetCapabilitiesRequest>,
    ) -> Result<Response<reapi::ServerCapabilities>, Status> {
        use reapi::digest_function::Value;
        self.be_there()?;
        let function = if self.habits.other_function { Value::Blake3 } else { Value::Sha256 };
        let cache = reapi::CacheCapabilities {
            digest_functions: vec![function as i32],
            max_batch_total_size_bytes: self.habits.batch_limit,
            ..Default::default()
        };
        Ok(Response::new(reapi::ServerCapabilities { cache_capabilities: Some(cache), ..Default::default() }))
    }
}

#[tonic::async_trait]
impl ContentAddressableStorage for Server {
    type GetTreeStream = BoxStream<'static, Result<reapi::GetTreeResponse, Status>>;
    type GetChunkMappingStream = BoxStream<'static, Result<reapi::GetChunkMappingResponse, Status>>;

    async fn find_missing_blobs(
        &self,
        request: Request<reapi::FindMissingBlobsRequest>,
    ) -> Result<Response<reapi::FindMissingBlobsResponse>, Status> {
        self.be_there()?;
        let asked: Vec<Digest> =
            request.into_inner().blob_digests.iter().map(|wire| digest_from_wire(wire).unwrap()).collect();
        let missing_blob_digests =
            self.store.missing(&asked).await.unwrap().iter().rev().map(digest_to_wire).collect();
        Ok(Response::new(reapi::FindMissingBlobsResponse { missing_blob_digests }))
    }

    async fn batch_update_blobs(
        &self,
        request: Request<reapi::BatchUpdateBlobsRequest>,
    ) -> Result<Response<reapi::BatchUpdateBlobsResponse>, Status> {
        use prost::Message;
        self.be_there()?;
        let request = request.into_inner();
        self.check_size(request.encoded_len())?;
        let mut responses = Vec::new();
        for item in request.requests {
            let digest = digest_from_wire(item.digest.as_ref().unwrap()).unwrap();
            let result = self.store.write_batch(vec![(digest, item.data.into())]).await.remove(0);
            if self.habits.spoiled && result.is_err() {
                return Err(Status::invalid_argument("one of the blobs is wrong"));
            }
            let status = Some(status_of(&result));
            responses.push(reapi::batch_update_blobs_response::Response { digest: item.digest, status });
        }
        responses.reverse();
        Ok(Response::new(reapi::BatchUpdateBlobsResponse { responses }))
    }

    async fn batch_read_blobs(
        &self,
        request: Request<reapi::BatchReadBlobsRequest>,
    ) -> Result<Response<reapi::BatchReadBlobsResponse>, Status> {
        use prost::Message;
        self.be_there()?;
        let mut responses = Vec::new();
        for wire in request.into_inner().digests {
            let found = self.store.get(&digest_from_wire(&wire).unwrap());
            let code = if found.is_some() { Code::Ok } else { Code::NotFound } as i32;
            responses.push(reapi::batch_read_blobs_response::Response {
                digest: Some(wire),
                data: found.unwrap_or_default().into(),
                status: Some(bazel_remote_apis::google::rpc::Status { code, ..Default::default() }),
                ..Default::default()
            });
        }
        responses.reverse();
        let answer = reapi::BatchReadBlobsResponse { responses };
        self.check_size(answer.encoded_len())?;
        Ok(Response::new(answer))
    }

    async fn get_tree(
        &self,
        _: Request<reapi::GetTreeRequest>,
    ) -> Result<Response<Self::GetTreeStream>, Status> {
        Err(Status::unimplemented("as some servers have it"))
    }

    async fn split_blob(
        &self,
        _: Request<reapi::SplitBlobRequest>,
    ) -> Result<Response<reapi::SplitBlobResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_chunk_mapping(
        &self,
        _: Request<reapi::GetChunkMappingRequest>,
    ) -> Result<Response<Self::GetChunkMappingStream>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn splice_blob(
        &self,
        _: Request<reapi::SpliceBlobRequest>,
    ) -> Result<Response<reapi::SpliceBlobResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn register_chunk_mapping(
        &self,
        _: Request<Streaming<reapi::RegisterChunkMappingRequest>>,
    ) -> Result<Response<reapi::RegisterChunkMappingResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

#[tonic::async_trait]
impl ByteStream for Server {
    type ReadStream = BoxStream<'static, Result<bytestream::ReadResponse, Status>>;

    async fn read(
        &self,
        request: Request<bytestream::ReadRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        self.be_there()?;
        let request = request.into_inner();
        let Ok(Resource::Blob(digest)) = Resource::parse(&request.resource_name) else {
            return Err(Status::invalid_argument("name"));
        };
        // The error comes within the stream here, as it does from servers that answer before they look.
        let found = self.store.get(&digest).ok_or_else(|| Status::not_found("blob"));
        let mut messages: Vec<Result<bytestream::ReadResponse, Status>> = match found {
            Ok(bytes) => bytes[request.read_offset as usize..]
                .chunks(100_000)
                .map(|data| Ok(bytestream::ReadResponse { data: data.to_vec() }))
                .collect(),
            Err(status) => vec![Err(status)],
        };
        if self.habits.restless && messages.len() > 2 {
            messages.truncate(2);
            messages.push(Err(Status::unavailable("back in a moment")));
        }
        Ok(Response::new(stream::iter(messages).boxed()))
    }

    async fn write(
        &self,
        request: Request<Streaming<bytestream::WriteRequest>>,
    ) -> Result<Response<bytestream::WriteResponse>, Status> {
        self.be_there()?;
        let mut messages = request.into_inner();
        let (mut bytes, mut finished, mut name) = (Vec::new(), false, String::new());
        while let Some(message) = messages.message().await? {
            assert_eq!(message.write_offset as usize, bytes.len());
            assert!(message.data.len() <= PIECE);
            bytes.extend(message.data);
            (finished, name) = (message.finish_write, message.resource_name);
        }
        let Ok(Resource::Upload { digest, .. }) = Resource::parse(&name) else {
            return Err(Status::invalid_argument("name"));
        };
        assert_eq!(finished, digest_of(&bytes) == digest, "only the right bytes are finished");
        if finished && !self.habits.forgetful {
            self.store.write_batch(vec![(digest, bytes.into())]).await.remove(0).unwrap();
        }
        let committed_size = self.habits.committed.unwrap_or(digest.size as i64);
        Ok(Response::new(bytestream::WriteResponse { committed_size }))
    }

    async fn query_write_status(
        &self,
        _: Request<bytestream::QueryWriteStatusRequest>,
    ) -> Result<Response<bytestream::QueryWriteStatusResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

/// A client of a server with these habits; everything ends with the test's runtime.
async fn serve(habits: Habits) -> (tempfile::TempDir, Server, Remote) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let server = Server { habits, ..Server::default() };
    let router = tonic::transport::Server::builder()
        .add_service(CapabilitiesServer::new(server.clone()))
        .add_service(
            ContentAddressableStorageServer::new(server.clone()).max_decoding_message_size(MAX_MESSAGE),
        )
        .add_service(ByteStreamServer::new(server.clone()).max_decoding_message_size(MAX_MESSAGE));
    let incoming = UnixListenerStream::new(listener);
    drop(tokio::runtime::Handle::current().spawn(router.serve_with_incoming(incoming)));
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix:{}", path.display())).unwrap();
    (dir, server, Remote::new(endpoint.connect().await.unwrap()))
}

#[tokio::test]
async fn test_remote_conforms_whatever_limit_a_server_announces_or_has() {
    let habits = [
        Habits { batch_limit: 1, ..Habits::default() },
        Habits { batch_limit: -1, ..Habits::default() },
        Habits { batch_limit: 65_536, spoiled: true, ..Habits::default() },
        Habits { batch_limit: 0, real_limit: Some(50_000), ..Habits::default() },
    ];
    for habits in habits {
        let (_dir, _, remote) = serve(habits).await;
        conformance::check(&remote).await;
    }
}

#[tokio::test]
async fn test_small_blobs_share_messages() {
    let (_dir, server, remote) = serve(Habits::default()).await;
    let blobs: Vec<(Digest, Bytes)> =
        (0..500).map(|seed| content(seed, 5000)).map(|bytes| (digest_of(&bytes), bytes)).collect();
    assert!(remote.write_batch(blobs).await.iter().all(Result::is_ok));
    assert_eq!(server.calls.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn test_odd_acknowledgements_are_confirmed() {
    let bytes = content(1, 3_000_000);
    let digest = digest_of(&bytes);
    for committed in [-1, 0, 17] {
        let (_dir, _, remote) = serve(Habits { committed: Some(committed), ..Habits::default() }).await;
        remote.write(digest, source(&bytes, 100_000)).await.unwrap();
    }
    let (_dir, _, remote) = serve(Habits { committed: Some(-1), forgetful: true, ..Habits::default() }).await;
    let result = remote.write(digest, source(&bytes, 100_000)).await;
    assert!(matches!(result, Err(WriteError::Vanished { .. })), "{result:?}");
}

#[tokio::test]
async fn test_wrong_bytes_of_a_server_are_noticed() {
    let (_dir, server, remote) = serve(Habits::default()).await;
    let bytes = content(1, 300_000);
    let digest = digest_of(&bytes);
    let mut flipped = bytes.to_vec();
    flipped[7] ^= 1;
    for wrong in [Bytes::from(flipped), bytes.slice(1..), Bytes::new(), [&bytes[..], b"x"].concat().into()] {
        server.store.corrupt(digest, wrong);
        assert!(matches!(read_all(&remote, digest, 0).await, Err(ReadError::Corrupt { .. })));
        assert!(matches!(remote.read_batch(vec![digest]).await.remove(0), Err(ReadError::Corrupt { .. })));
    }
}

#[tokio::test]
async fn test_server_with_another_digest_function_is_refused() {
    let (_dir, _, remote) = serve(Habits { other_function: true, ..Habits::default() }).await;
    let bytes = content(1, 10);
    let result = remote.write_batch(vec![(digest_of(&bytes), bytes)]).await.remove(0);
    assert!(matches!(result, Err(WriteError::Remote { .. })), "{result:?}");
}

#[tokio::test]
async fn test_server_that_is_away_for_a_moment_costs_nothing() {
    let (dir, server, remote) = serve(Habits { restless: true, ..Habits::default() }).await;
    let code = dir.path().join("code");
    std::fs::create_dir(&code).unwrap();
    for (i, size) in [10, 2000, 1_500_000, 2_100_000].into_iter().enumerate() {
        std::fs::write(code.join(format!("f{i}")), content(i as u64, size)).unwrap();
    }
    let scanned = crate::snapshot::scan(&code).unwrap();
    crate::snapshot::push(&scanned, &remote, |_| {}).await.unwrap();
    let to = dir.path().join("to");
    crate::snapshot::materialize(&remote, scanned.root, &to).await.unwrap();
    for i in 0..4 {
        let name = format!("f{i}");
        assert_eq!(std::fs::read(code.join(&name)).unwrap(), std::fs::read(to.join(&name)).unwrap());
    }
    assert!(server.visits.load(Ordering::Relaxed) > 30);
}
