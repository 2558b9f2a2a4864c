//! A store of blobs that is well until it is told to be odd, and well again when it is told so: the protocol over a map
//! in memory, with what stores that fail, and the proxies in front of them, make of it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_cas::remote::bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use agent_cas::remote::bytestream::{
    QueryWriteStatusRequest, QueryWriteStatusResponse, ReadRequest, ReadResponse, WriteRequest, WriteResponse,
};
use agent_cas::remote::{Resource, digest_from_wire};
use agent_cas::{Remote, digest_of};
use agent_model::Digest;
use agent_tests::client::runtime;
use axum::body::Body;
use axum::extract::{Request as HttpRequest, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response as HttpResponse;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bazel_remote_apis::google::rpc;
use bytes::Bytes;
use reapi::capabilities_server::{Capabilities, CapabilitiesServer};
use reapi::content_addressable_storage_server::{ContentAddressableStorage, ContentAddressableStorageServer};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};

/// One way not to be well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Oddity {
    /// A proxy answers every call with a page of its own and this status.
    Page(u16),
    /// Every call ends without a word of how it ended.
    NoTrailers,
    /// Every answer breaks off after its first bytes.
    Reset,
    /// Every call ends with this code.
    Says(Code),
    /// One item of each batch, and every stream, ends with this code.
    Item(Code),
    /// Every blob that is read has one bit changed.
    Rotten,
    /// No blob that is read is there, although it says that all are.
    Lacks,
    /// What it takes it acknowledges and does not keep.
    Forgets,
}

/// The server. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Odd {
    address: SocketAddr,
    blobs: Arc<Mutex<HashMap<Digest, Bytes>>>,
    oddity: Arc<Mutex<Option<Oddity>>>,
}

impl Odd {
    /// A server that listens, and is well.
    pub(crate) fn start() -> Odd {
        let listener = runtime().block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        let odd = Odd { address, blobs: Arc::default(), oddity: Arc::default() };
        let router = Routes::new(CapabilitiesServer::new(odd.clone()))
            .add_service(ContentAddressableStorageServer::new(odd.clone()).max_decoding_message_size(8 << 20))
            .add_service(ByteStreamServer::new(odd.clone()).max_decoding_message_size(8 << 20))
            .into_axum_router()
            .layer(from_fn_with_state(odd.clone(), in_front));
        let served = Server::builder().add_routes(Routes::from(router));
        runtime().spawn(served.serve_with_incoming(TcpListenerStream::new(listener)));
        odd
    }

    /// What `blob_store` is set to for it.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A client of it.
    pub(crate) fn remote(&self) -> Remote {
        let _inside = runtime().enter();
        Remote::new(Endpoint::from_shared(self.url()).expect("an address").connect_lazy())
    }

    /// From now on it is so; `None` is well.
    pub(crate) fn be(&self, oddity: Option<Oddity>) {
        *lock(&self.oddity) = oddity;
    }

    /// Lets go of everything.
    pub(crate) fn evict(&self) {
        lock(&self.blobs).clear();
    }

    pub(crate) fn has(&self, content: &[u8]) -> bool {
        lock(&self.blobs).contains_key(&digest_of(content))
    }

    fn is(&self) -> Option<Oddity> {
        *lock(&self.oddity)
    }

    /// What all calls end with.
    fn visit(&self) -> Result<(), Status> {
        match self.is() {
            Some(Oddity::Says(code)) => Err(Status::new(code, "not just now")),
            _ => Ok(()),
        }
    }

    /// What a stream ends with, and the `first` item of a batch.
    fn meet(&self, first: bool) -> Result<(), Status> {
        match self.is() {
            Some(Oddity::Item(code)) if first => Err(Status::new(code, "not this one")),
            _ => Ok(()),
        }
    }

    fn get(&self, digest: &Digest, first: bool) -> Result<Bytes, Status> {
        self.meet(first)?;
        let absent = || Status::not_found("no such blob");
        let found = lock(&self.blobs).get(digest).cloned().ok_or_else(absent)?;
        match self.is() {
            Some(Oddity::Lacks) => Err(absent()),
            Some(Oddity::Rotten) => {
                let mut rotten = found.to_vec();
                rotten[0] ^= 1;
                Ok(rotten.into())
            }
            _ => Ok(found),
        }
    }

    /// Keeps what it has not: like most stores it does not look twice at what it has.
    fn put(&self, digest: Digest, bytes: Bytes, first: bool) -> Result<(), Status> {
        self.meet(first)?;
        if digest_of(&bytes) != digest {
            return Err(Status::invalid_argument("these bytes are others"));
        }
        if self.is() != Some(Oddity::Forgets) {
            lock(&self.blobs).entry(digest).or_insert(bytes);
        }
        Ok(())
    }
}

/// What a proxy makes of a call.
async fn in_front(State(odd): State<Odd>, request: HttpRequest, next: Next) -> HttpResponse {
    let answer = |status: u16, kind: &str, body: Body| {
        let built = HttpResponse::builder().status(status).header("content-type", kind).body(body);
        built.expect("an answer")
    };
    match odd.is() {
        Some(Oddity::Page(status)) => {
            answer(status, "text/html", Body::from("<html><body>nginx</body></html>"))
        }
        Some(Oddity::NoTrailers) => answer(200, "application/grpc", Body::empty()),
        Some(Oddity::Reset) => {
            let _ = next.run(request).await;
            let begun = [Ok(Bytes::from_static(&[0, 0])), Err(std::io::Error::other("reset"))];
            answer(200, "application/grpc", Body::from_stream(tokio_stream::iter(begun)))
        }
        _ => next.run(request).await,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn named(digest: Option<&reapi::Digest>) -> Result<Digest, Status> {
    let digest = digest.ok_or_else(|| Status::invalid_argument("no digest"))?;
    digest_from_wire(digest).map_err(|error| Status::invalid_argument(error.to_string()))
}

fn told(result: &Result<impl Sized, Status>) -> Option<rpc::Status> {
    let (code, message) =
        result.as_ref().err().map_or((0, String::new()), |s| (s.code() as i32, s.message().into()));
    Some(rpc::Status { code, message, ..rpc::Status::default() })
}

#[tonic::async_trait]
impl Capabilities for Odd {
    async fn get_capabilities(
        &self,
        _: Request<reapi::GetCapabilitiesRequest>,
    ) -> Result<Response<reapi::ServerCapabilities>, Status> {
        self.visit()?;
        let sha256 = reapi::digest_function::Value::Sha256 as i32;
        let cache = reapi::CacheCapabilities { digest_functions: vec![sha256], ..Default::default() };
        Ok(Response::new(reapi::ServerCapabilities { cache_capabilities: Some(cache), ..Default::default() }))
    }
}

#[tonic::async_trait]
impl ContentAddressableStorage for Odd {
    type GetTreeStream = Pin<Box<dyn Stream<Item = Result<reapi::GetTreeResponse, Status>> + Send>>;
    type GetChunkMappingStream =
        Pin<Box<dyn Stream<Item = Result<reapi::GetChunkMappingResponse, Status>> + Send>>;

    async fn find_missing_blobs(
        &self,
        request: Request<reapi::FindMissingBlobsRequest>,
    ) -> Result<Response<reapi::FindMissingBlobsResponse>, Status> {
        self.visit()?;
        let mut missing_blob_digests = request.into_inner().blob_digests;
        let blobs = lock(&self.blobs);
        missing_blob_digests
            .retain(|wire| !named(Some(wire)).is_ok_and(|digest| blobs.contains_key(&digest)));
        Ok(Response::new(reapi::FindMissingBlobsResponse { missing_blob_digests }))
    }

    async fn batch_update_blobs(
        &self,
        request: Request<reapi::BatchUpdateBlobsRequest>,
    ) -> Result<Response<reapi::BatchUpdateBlobsResponse>, Status> {
        self.visit()?;
        let items = request.into_inner().requests.into_iter().enumerate().map(|(index, item)| {
            let put =
                named(item.digest.as_ref()).and_then(|digest| self.put(digest, item.data.into(), index == 0));
            reapi::batch_update_blobs_response::Response { digest: item.digest, status: told(&put) }
        });
        Ok(Response::new(reapi::BatchUpdateBlobsResponse { responses: items.collect() }))
    }

    async fn batch_read_blobs(
        &self,
        request: Request<reapi::BatchReadBlobsRequest>,
    ) -> Result<Response<reapi::BatchReadBlobsResponse>, Status> {
        self.visit()?;
        let items = request.into_inner().digests.into_iter().enumerate().map(|(index, wire)| {
            let got = named(Some(&wire)).and_then(|digest| self.get(&digest, index == 0));
            let (status, data) = (told(&got), got.map(Vec::from).unwrap_or_default());
            reapi::batch_read_blobs_response::Response { digest: Some(wire), data, status, compressor: 0 }
        });
        Ok(Response::new(reapi::BatchReadBlobsResponse { responses: items.collect() }))
    }

    async fn get_tree(
        &self,
        _: Request<reapi::GetTreeRequest>,
    ) -> Result<Response<Self::GetTreeStream>, Status> {
        Err(Status::unimplemented("nobody asks that here"))
    }

    async fn split_blob(
        &self,
        _: Request<reapi::SplitBlobRequest>,
    ) -> Result<Response<reapi::SplitBlobResponse>, Status> {
        Err(Status::unimplemented("nobody asks that here"))
    }

    async fn get_chunk_mapping(
        &self,
        _: Request<reapi::GetChunkMappingRequest>,
    ) -> Result<Response<Self::GetChunkMappingStream>, Status> {
        Err(Status::unimplemented("nobody asks that here"))
    }

    async fn splice_blob(
        &self,
        _: Request<reapi::SpliceBlobRequest>,
    ) -> Result<Response<reapi::SpliceBlobResponse>, Status> {
        Err(Status::unimplemented("nobody asks that here"))
    }

    async fn register_chunk_mapping(
        &self,
        _: Request<Streaming<reapi::RegisterChunkMappingRequest>>,
    ) -> Result<Response<reapi::RegisterChunkMappingResponse>, Status> {
        Err(Status::unimplemented("nobody asks that here"))
    }
}

#[tonic::async_trait]
impl ByteStream for Odd {
    type ReadStream = Pin<Box<dyn Stream<Item = Result<ReadResponse, Status>> + Send>>;

    async fn read(&self, request: Request<ReadRequest>) -> Result<Response<Self::ReadStream>, Status> {
        self.visit()?;
        let request = request.into_inner();
        let named = Resource::parse(&request.resource_name);
        let Ok(Resource::Blob { digest, .. }) = named else {
            return Err(Status::invalid_argument("no blob"));
        };
        let bytes = self.get(&digest, true)?;
        let from = usize::try_from(request.read_offset).unwrap_or_default().min(bytes.len());
        let pieces: Vec<_> = bytes[from..].chunks(100_000).map(Bytes::copy_from_slice).collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(pieces).map(|data| Ok(ReadResponse { data })))))
    }

    async fn write(
        &self,
        request: Request<Streaming<WriteRequest>>,
    ) -> Result<Response<WriteResponse>, Status> {
        self.visit()?;
        let (mut messages, mut name, mut data) = (request.into_inner(), String::new(), Vec::new());
        while let Some(message) = messages.message().await? {
            if !message.resource_name.is_empty() {
                name = message.resource_name;
            }
            data.extend(message.data);
        }
        let Ok(Resource::Upload { digest, .. }) = Resource::parse(&name) else {
            return Err(Status::invalid_argument("no upload"));
        };
        self.put(digest, data.into(), true)?;
        Ok(Response::new(WriteResponse { committed_size: i64::try_from(digest.size).unwrap_or(i64::MAX) }))
    }

    async fn query_write_status(
        &self,
        _: Request<QueryWriteStatusRequest>,
    ) -> Result<Response<QueryWriteStatusResponse>, Status> {
        Err(Status::unimplemented("nobody asks that here"))
    }
}
