//! The client against a server with injected faults, such as were seen in real ones.

use std::sync::atomic::{AtomicUsize, Ordering};

use bazel_remote_apis::google::{bytestream, protobuf};
use bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use futures_util::stream::BoxStream;
use parking_lot::Mutex;
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
    /// The size that it reports for a finished upload.
    committed: Option<i64>,
    /// It takes uploads and forgets them.
    forgetful: bool,
    /// It names blobs by another function.
    other_function: bool,
    /// It is unavailable at every other call, and breaks off every stream from it that is not short.
    restless: bool,
    /// One wrong item spoils the whole batch.
    spoiled: bool,
    /// It announces zstd.
    zstd: Option<Zstd>,
    /// It stops in the middle of every third batch, when it has begun to answer it, and restarts.
    replaced: bool,
    /// Its first so many calls end with this code.
    odd: Option<(usize, Code)>,
    /// The first item of every other batch ends with this code.
    odd_item: Option<Code>,
    /// It asks for this delay before each first call, with this code.
    later: Option<(Duration, Code)>,
}

/// How a server that announces zstd behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Zstd {
    Good,
    /// It takes and sends nothing compressed after all.
    Refuses,
    /// What it sends has another content.
    Lies,
    /// It ends before its end.
    Cuts,
    /// There is something behind it.
    Adds,
    /// It breaks off, and ignores where it should go on when asked again.
    Breaks,
}

#[derive(Debug, Clone, Default)]
struct Server {
    store: Memory,
    habits: Habits,
    calls: Arc<AtomicUsize>,
    /// Calls that found it unavailable, or came after one that did.
    visits: Arc<AtomicUsize>,
    /// Blobs that were received or sent compressed.
    compressed: Arc<AtomicUsize>,
    /// Asks the server to stop: it finishes its current calls and accepts no new ones.
    goodbye: Arc<tokio::sync::Notify>,
    /// When each call came.
    came: Arc<Mutex<Vec<std::time::Instant>>>,
}

impl Server {
    /// What it sends for a blob that may be compressed, and whether it is.
    fn form(&self, bytes: Bytes, asked: bool) -> (Vec<u8>, bool) {
        let habit = self.habits.zstd.filter(|habit| asked && *habit != Zstd::Refuses);
        let Some(habit) = habit else { return (bytes.into(), false) };
        self.compressed.fetch_add(1, Ordering::Relaxed);
        let content = if habit == Zstd::Lies { vec![7; bytes.len()].into() } else { bytes };
        let mut form = zstd::bulk::compress(&content, 1).unwrap();
        match habit {
            Zstd::Cuts => form.truncate(form.len() - 1),
            Zstd::Adds => form.extend(b"garbage"),
            _ => {}
        }
        (form, true)
    }

    /// The blob that came in this form.
    fn taken(&self, digest: Digest, bytes: Vec<u8>, is_compressed: bool) -> Result<Bytes, Status> {
        if !is_compressed {
            return Ok(bytes.into());
        }
        self.compressed.fetch_add(1, Ordering::Relaxed);
        match self.habits.zstd {
            None | Some(Zstd::Refuses) => Err(Status::invalid_argument("no zstd here")),
            Some(_) => compression::inflate(digest, bytes.into())
                .map_err(|e| Status::invalid_argument(e.to_string())),
        }
    }

    fn be_there(&self) -> Result<(), Status> {
        let mut came = self.came.lock();
        came.push(std::time::Instant::now());
        if let Some((delay, code)) = self.habits.later.filter(|_| came.len() % 2 == 1) {
            return Err(come_again(delay, code));
        }
        if let Some((_, code)) = self.habits.odd.filter(|(calls, _)| came.len() <= *calls) {
            return Err(Status::new(code, "not just now"));
        }
        drop(came);
        match self.habits.restless && self.visits.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            true => Err(Status::unavailable("back in a moment")),
            false => Ok(()),
        }
    }

    /// What the first item of a batch ends with, if it is this batch's turn.
    fn item_code(&self) -> Option<bazel_remote_apis::google::rpc::Status> {
        let code = self.habits.odd_item?;
        let is_turn = self.visits.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
        is_turn.then(|| bazel_remote_apis::google::rpc::Status { code: code as i32, ..Default::default() })
    }

    fn check_size(&self, bytes: usize) -> Result<(), Status> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.habits.real_limit {
            Some(limit) if bytes > limit => Err(Status::out_of_range("message too large")),
            _ => Ok(()),
        }
    }
}

fn come_again(delay: Duration, code: Code) -> Status {
    use prost::Message;
    let nanos = delay.subsec_nanos() as i32;
    let retry_delay = Some(protobuf::Duration { seconds: delay.as_secs() as i64, nanos });
    let value = retry::RetryInfo { retry_delay }.encode_to_vec();
    let detail = protobuf::Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(), value };
    let details = bazel_remote_apis::google::rpc::Status { details: vec![detail], ..Default::default() };
    Status::with_details(code, "later", details.encode_to_vec().into())
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
            supported_compressors: self.habits.zstd.map(|_| ZSTD).into_iter().collect(),
            supported_batch_update_compressors: self.habits.zstd.map(|_| ZSTD).into_iter().collect(),
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
        if self.habits.replaced && self.calls.load(Ordering::Relaxed).is_multiple_of(3) {
            self.goodbye.notify_one();
            tokio::time::sleep(Duration::from_millis(20)).await; // it is said before the answer
        }
        let mut responses = Vec::new();
        for item in request.requests {
            let digest = digest_from_wire(item.digest.as_ref().unwrap()).unwrap();
            let bytes = match self.taken(digest, item.data, item.compressor == ZSTD) {
                Ok(bytes) => bytes,
                Err(_) => Bytes::from_static(b"nothing of the kind"),
            };
            let result = self.store.write_batch(vec![(digest, bytes)]).await.remove(0);
            if self.habits.spoiled && result.is_err() {
                return Err(Status::invalid_argument("one of the blobs is wrong"));
            }
            let status = Some(status_of(&result));
            responses.push(reapi::batch_update_blobs_response::Response { digest: item.digest, status });
        }
        if let Some(code) = self.item_code() {
            responses[0].status = Some(code);
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
        let request = request.into_inner();
        let asked = request.acceptable_compressors.contains(&ZSTD);
        if asked && self.habits.zstd == Some(Zstd::Refuses) {
            return Err(Status::invalid_argument("no zstd here"));
        }
        for wire in request.digests {
            let found = self.store.get(&digest_from_wire(&wire).unwrap());
            let code = if found.is_some() { Code::Ok } else { Code::NotFound } as i32;
            let (data, is_compressed) = self.form(found.unwrap_or_default(), asked);
            responses.push(reapi::batch_read_blobs_response::Response {
                digest: Some(wire),
                data,
                status: Some(bazel_remote_apis::google::rpc::Status { code, ..Default::default() }),
                compressor: if is_compressed { ZSTD } else { 0 },
            });
        }
        if let Some(code) = self.item_code() {
            (responses[0].status, responses[0].data) = (Some(code), Vec::new());
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
        let Ok(Resource::Blob { digest, form }) = Resource::parse(&request.resource_name) else {
            return Err(Status::invalid_argument("name"));
        };
        if form == Form::Zstd && self.habits.zstd == Some(Zstd::Refuses) {
            return Err(Status::unimplemented("no zstd here"));
        }
        // The error is sent within the stream here, as by servers that answer before they look up the blob.
        let found = self.store.get(&digest).ok_or_else(|| Status::not_found("blob"));
        let mut messages: Vec<Result<bytestream::ReadResponse, Status>> = match found {
            Ok(bytes) => self
                .form(bytes.slice(request.read_offset as usize..), form == Form::Zstd)
                .0
                .chunks(if form == Form::Zstd { 1000 } else { 100_000 })
                .map(|data| Ok(bytestream::ReadResponse { data: data.to_vec() }))
                .collect(),
            Err(status) => vec![Err(status)],
        };
        let breaks = form == Form::Zstd && self.habits.zstd == Some(Zstd::Breaks);
        if (self.habits.restless || breaks) && messages.len() > 2 {
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
        let Ok(Resource::Upload { digest, form, .. }) = Resource::parse(&name) else {
            return Err(Status::invalid_argument("name"));
        };
        let sent = bytes.len() as i64;
        let bytes = if finished { self.taken(digest, bytes, form == Form::Zstd)? } else { bytes.into() };
        assert_eq!(finished, digest_of(&bytes) == digest, "only the right bytes are finished");
        if finished && !self.habits.forgetful {
            self.store.write_batch(vec![(digest, bytes)]).await.remove(0).unwrap();
        }
        // For compressed uploads many servers return the bytes received.
        let committed_size = self.habits.committed.unwrap_or(sent);
        Ok(Response::new(bytestream::WriteResponse { committed_size }))
    }

    async fn query_write_status(
        &self,
        _: Request<bytestream::QueryWriteStatusRequest>,
    ) -> Result<Response<bytestream::QueryWriteStatusResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

fn routes(server: &Server) -> tonic::transport::server::Router {
    tonic::transport::Server::builder()
        .add_service(CapabilitiesServer::new(server.clone()))
        .add_service(
            ContentAddressableStorageServer::new(server.clone()).max_decoding_message_size(MAX_MESSAGE),
        )
        .add_service(ByteStreamServer::new(server.clone()).max_decoding_message_size(MAX_MESSAGE))
}

/// A client of a server with these habits; everything ends with the test's runtime.
async fn serve(habits: Habits) -> (tempfile::TempDir, Server, Remote) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let server = Server { habits, ..Server::default() };
    let mut listener = tokio::net::UnixListener::bind(&path).unwrap();
    let (serving, at) = (server.clone(), path.clone());
    drop(tokio::runtime::Handle::current().spawn(async move {
        loop {
            let goodbye = serving.goodbye.notified();
            let incoming = UnixListenerStream::new(listener);
            routes(&serving).serve_with_incoming_shutdown(incoming, goodbye).await.unwrap();
            std::fs::remove_file(&at).unwrap();
            listener = tokio::net::UnixListener::bind(&at).unwrap();
        }
    }));
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix:{}", path.display())).unwrap();
    (dir, server, Remote::new(endpoint.connect().await.unwrap()))
}

/// A client of the same server, over a connection that seems to be slow and to lead far away.
async fn serve_slowly(habits: Habits) -> (tempfile::TempDir, Server, Remote) {
    let (dir, server, remote) = serve(habits).await;
    let remote = Remote { instance: "an/instance".into(), link: Arc::new(Link::slow()), ..remote };
    (dir, server, remote)
}

fn text(seed: u8, length: usize) -> Bytes {
    [&[b'0' + seed; 9][..], b" lines that are all alike\n"]
        .concat()
        .into_iter()
        .cycle()
        .take(length)
        .collect()
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
    crate::snapshot::materialize(&remote, scanned.root, &to, None, &[]).await.unwrap();
    for i in 0..4 {
        let name = format!("f{i}");
        assert_eq!(std::fs::read(code.join(&name)).unwrap(), std::fs::read(to.join(&name)).unwrap());
    }
    assert!(server.visits.load(Ordering::Relaxed) > 30);
}

#[tokio::test]
async fn test_remote_conforms_whatever_a_server_makes_of_compression() {
    for zstd in [None, Some(Zstd::Good), Some(Zstd::Refuses), Some(Zstd::Cuts), Some(Zstd::Adds)] {
        let (_dir, _, remote) = serve_slowly(Habits { zstd, ..Habits::default() }).await;
        conformance::check(&remote).await;
    }
}

#[tokio::test]
async fn test_what_shrinks_travels_compressed_over_a_slow_connection_only() {
    let blobs: Vec<Bytes> = (0..5).map(|seed| text(seed, 20_000)).chain([content(1, 20_000)]).collect();
    let blobs: Vec<(Digest, Bytes)> = blobs.into_iter().map(|bytes| (digest_of(&bytes), bytes)).collect();
    let large = text(7, 6_000_000);
    let digest = digest_of(&large);
    for (zstd, is_slow, expected) in
        [(Some(Zstd::Good), true, 13), (Some(Zstd::Good), false, 0), (None, true, 0)]
    {
        let habits = Habits { zstd, ..Habits::default() };
        let (_dir, server, remote) = if is_slow { serve_slowly(habits).await } else { serve(habits).await };
        assert!(remote.write_batch(blobs.clone()).await.iter().all(Result::is_ok));
        let digests = blobs.iter().map(|(digest, _)| *digest).collect();
        for ((_, bytes), read) in blobs.iter().zip(remote.read_batch(digests).await) {
            assert_eq!(read.unwrap(), bytes);
        }
        remote.write(digest, source(&large, 262_144)).await.unwrap();
        assert!(read_all(&remote, digest, 0).await.unwrap() == large);
        // Five were received and six sent in batches, of which the server compresses all; and a stream each way.
        assert_eq!(server.compressed.load(Ordering::Relaxed), expected);
        assert!(read_all(&remote, digest, 5_999_990).await.unwrap() == large.slice(5_999_990..));
        assert_eq!(server.compressed.load(Ordering::Relaxed), expected, "never from the middle on");
    }
}

#[tokio::test]
async fn test_compressed_answers_that_are_wrong_are_asked_for_again_as_they_are() {
    let bytes = text(3, 900_000);
    let digest = digest_of(&bytes);
    for zstd in [Zstd::Refuses, Zstd::Lies, Zstd::Cuts, Zstd::Adds] {
        let (_dir, server, remote) = serve_slowly(Habits { zstd: Some(zstd), ..Habits::default() }).await;
        server.store.write_batch(vec![(digest, bytes.clone())]).await.remove(0).unwrap();
        assert!(remote.read_batch(vec![digest]).await.remove(0).unwrap() == bytes, "{zstd:?}");
        assert!(!remote.link.is_worth_compression(), "{zstd:?} is tried once");
    }
    for zstd in [Zstd::Refuses, Zstd::Cuts, Zstd::Adds, Zstd::Breaks] {
        let (_dir, server, remote) = serve_slowly(Habits { zstd: Some(zstd), ..Habits::default() }).await;
        server.store.write_batch(vec![(digest, bytes.clone())]).await.remove(0).unwrap();
        assert!(read_all(&remote, digest, 0).await.unwrap() == bytes, "{zstd:?}");
    }
    let (_dir, server, remote) = serve_slowly(Habits { zstd: Some(Zstd::Lies), ..Habits::default() }).await;
    server.store.write_batch(vec![(digest, bytes.clone())]).await.remove(0).unwrap();
    assert!(matches!(read_all(&remote, digest, 0).await, Err(ReadError::Corrupt { .. })));
    assert!(read_all(&remote, digest, 0).await.unwrap() == bytes, "the second time as it is");
}

#[tokio::test]
async fn test_server_that_refuses_compressed_uploads_gets_plain_ones() {
    let (dir, server, remote) = serve_slowly(Habits { zstd: Some(Zstd::Refuses), ..Habits::default() }).await;
    let code = dir.path().join("code");
    std::fs::create_dir(&code).unwrap();
    std::fs::write(code.join("small"), text(1, 2000)).unwrap();
    std::fs::write(code.join("large"), text(2, 3_000_000)).unwrap();
    let scanned = crate::snapshot::scan(&code).unwrap();
    crate::snapshot::push(&scanned, &remote, |_| {}).await.unwrap();
    assert!(server.compressed.load(Ordering::Relaxed) > 0);
    let to = dir.path().join("to");
    crate::snapshot::download(&remote, scanned.root, &to).await.unwrap();
    assert_eq!(crate::snapshot::scan(&to).unwrap().root, scanned.root);
}

#[tokio::test]
async fn test_compressed_upload_of_wrong_bytes_is_never_finished() {
    let (_dir, server, remote) = serve_slowly(Habits { zstd: Some(Zstd::Good), ..Habits::default() }).await;
    let (bytes, digest) = (text(1, 3_000_000), digest_of(b"something else"));
    let named = Digest { size: bytes.len() as u64, ..digest };
    let result = remote.write(named, source(&bytes, 100_000)).await;
    assert!(matches!(result, Err(WriteError::Mismatch { .. })), "{result:?}");
    assert_eq!(server.compressed.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn test_odd_acknowledgements_of_compressed_uploads_are_confirmed() {
    let bytes = text(1, 3_000_000);
    let digest = digest_of(&bytes);
    for committed in [None, Some(-1), Some(3_000_000), Some(17)] {
        let habits = Habits { committed, zstd: Some(Zstd::Good), ..Habits::default() };
        let (_dir, server, remote) = serve_slowly(habits).await;
        remote.write(digest, source(&bytes, 100_000)).await.unwrap();
        assert_eq!(server.compressed.load(Ordering::Relaxed), 1);
    }
    let habits = Habits { committed: Some(-1), zstd: Some(Zstd::Good), forgetful: true, ..Habits::default() };
    let (_dir, _, remote) = serve_slowly(habits).await;
    let result = remote.write(digest, source(&bytes, 100_000)).await;
    assert!(matches!(result, Err(WriteError::Vanished { .. })), "{result:?}");
}

#[tokio::test]
async fn test_server_that_names_a_time_is_asked_no_earlier() {
    for code in [Code::Unavailable, Code::ResourceExhausted, Code::Internal] {
        let delay = Duration::from_millis(300);
        let (_dir, server, remote) = serve(Habits { later: Some((delay, code)), ..Habits::default() }).await;
        assert_eq!(remote.missing(&[digest_of(b"x")]).await.unwrap().len(), 1);
        let came = server.came.lock().clone();
        assert_eq!(came.len(), 4, "both calls twice, side by side");
        assert!(came[2] - came[0] >= delay && came[3] - came[1] >= delay);
    }
    let hour = Some((Duration::from_secs(3600), Code::Unavailable));
    let (_dir, server, remote) = serve(Habits { later: hour, ..Habits::default() }).await;
    assert!(matches!(remote.missing(&[digest_of(b"x")]).await, Err(MissingError::Remote { .. })));
    assert_eq!(server.came.lock().len(), 2, "nobody waits for an hour");
}

#[tokio::test]
async fn test_server_that_is_replaced_in_the_middle_of_batches_costs_nothing() {
    let habits = Habits { replaced: true, batch_limit: 20_000, ..Habits::default() };
    let (_dir, server, remote) = serve(habits).await;
    let blobs: Vec<(Digest, Bytes)> =
        (0..60).map(|seed| content(seed, 5000)).map(|bytes| (digest_of(&bytes), bytes)).collect();
    for result in remote.write_batch(blobs.clone()).await {
        result.unwrap();
    }
    let digests: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
    assert_eq!(remote.missing(&digests).await.unwrap(), []);
    assert!(server.calls.load(Ordering::Relaxed) >= 20, "it went away several times");
}

#[tokio::test]
async fn test_answers_that_are_no_last_word_are_asked_for_again() {
    let bytes = content(1, 3000);
    let digest = digest_of(&bytes);
    for code in [
        Code::Cancelled,
        Code::Unknown,
        Code::PermissionDenied,
        Code::ResourceExhausted,
        Code::FailedPrecondition,
        Code::Unimplemented,
        Code::Internal,
        Code::Unauthenticated,
    ] {
        let (_dir, server, remote) = serve(Habits { odd: Some((2, code)), ..Habits::default() }).await;
        assert_eq!(remote.missing(&[digest]).await.unwrap(), [digest], "{code:?}");
        server.came.lock().clear();
        remote.write_batch(vec![(digest, bytes.clone())]).await.remove(0).unwrap();
        server.came.lock().clear();
        assert!(remote.read_batch(vec![digest]).await.remove(0).unwrap() == bytes, "{code:?}");
        server.came.lock().clear();
        assert!(read_all(&remote, digest, 0).await.unwrap() == bytes, "{code:?}");
    }
    for code in [Code::InvalidArgument, Code::OutOfRange, Code::DataLoss] {
        let (_dir, server, remote) =
            serve(Habits { odd: Some((usize::MAX, code)), ..Habits::default() }).await;
        assert!(remote.missing(&[digest]).await.is_err());
        assert_eq!(server.came.lock().len(), 2, "{code:?} is the last word to each of the two calls");
    }
}

#[tokio::test]
async fn test_single_items_that_fail_for_a_moment_are_tried_again_by_themselves() {
    let blobs: Vec<(Digest, Bytes)> =
        (0..20).map(|seed| content(seed, 500)).map(|bytes| (digest_of(&bytes), bytes)).collect();
    let digests: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
    for code in [Code::Unavailable, Code::Internal, Code::ResourceExhausted] {
        let (_dir, server, remote) = serve(Habits { odd_item: Some(code), ..Habits::default() }).await;
        assert!(remote.write_batch(blobs.clone()).await.iter().all(Result::is_ok), "{code:?}");
        for (read, (_, bytes)) in remote.read_batch(digests.clone()).await.into_iter().zip(&blobs) {
            assert!(read.unwrap() == bytes, "{code:?}");
        }
        assert_eq!(server.calls.load(Ordering::Relaxed), 4, "each batch, and then its one item");
    }
    // An error about the blob itself is final.
    let (_dir, server, remote) = serve(Habits { odd_item: Some(Code::DataLoss), ..Habits::default() }).await;
    server.store.write_batch(blobs).await;
    assert!(remote.read_batch(digests).await[0].as_ref().is_err_and(ReadError::is_damage));
    assert_eq!(server.calls.load(Ordering::Relaxed), 1);
}
