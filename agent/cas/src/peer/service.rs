//! What a node serves to others.
//!
//! Reads only. So many calls are served at a time that jobs of this node notice little; one more is refused, and
//! whoever made it goes elsewhere. A blob that was removed is a miss.

use std::sync::Arc;
use std::time::Duration;

use agent_model::Digest;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bazel_remote_apis::google::rpc;
use futures_util::stream::{BoxStream, StreamExt};
use reapi::content_addressable_storage_server::{ContentAddressableStorage, ContentAddressableStorageServer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::remote::bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use crate::remote::bytestream::{
    QueryWriteStatusRequest, QueryWriteStatusResponse, ReadRequest, ReadResponse, WriteRequest, WriteResponse,
};
use crate::remote::{Form, MAX_BATCH, Resource, digest_from_wire};
use crate::store::BATCH_BLOBS;
use crate::{BlobStore, Chunks, Disk, ReadError};

/// Calls that are served at a time: four for each of a few nodes.
const CALLS: usize = 32;

/// For how long a call waits for what this node fetches itself. Then the caller is told that it is awaited.
const WAIT: Duration = Duration::from_secs(2);

/// Whether this node is fetching the tree whose root has this digest.
pub type IsAwaited = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The two calls, over the blobs of `disk`.
pub fn service(disk: Disk, is_awaited: IsAwaited) -> Routes {
    let service = BlobService { disk, is_awaited, calls: Arc::new(Semaphore::new(CALLS)) };
    Routes::default()
        .add_service(ContentAddressableStorageServer::new(service.clone()))
        .add_service(ByteStreamServer::new(service))
}

#[derive(Clone)]
struct BlobService {
    disk: Disk,
    is_awaited: IsAwaited,
    calls: Arc<Semaphore>,
}

impl BlobService {
    fn admit(&self) -> Result<OwnedSemaphorePermit, Status> {
        let busy = |_| Status::resource_exhausted("this node serves as many as it may");
        Arc::clone(&self.calls).try_acquire_owned().map_err(busy)
    }

    /// Waits until all of these are here, as long as the tree is being fetched here, but not for long; with `or_comes`
    /// only until the first of them arrives. Whether the rest is awaited.
    async fn wait(&self, tree: &str, digests: &[Digest], or_comes: bool) -> bool {
        let (until, mut news) = (Instant::now() + WAIT, self.disk.arrivals());
        loop {
            // In this order: what is not there after the fetch has ended does not come.
            let is_awaited = (self.is_awaited)(tree);
            news.borrow_and_update();
            let are_here = self.disk.missing(digests).await.is_ok_and(|missing| missing.is_empty());
            let comes = |digest: &Digest| or_comes && self.disk.arriving(*digest).is_some();
            if are_here || !is_awaited || digests.first().is_some_and(comes) {
                return false;
            }
            if timeout_at(until, news.changed()).await.is_err() {
                return true;
            }
        }
    }

    /// Everything of a blob that is here, or comes.
    async fn open(&self, digest: Digest, tree: &str) -> Result<Chunks, Status> {
        let is_awaited = self.wait(tree, &[digest], true).await;
        if let Some(arriving) = self.disk.arriving(digest) {
            return Ok(arriving);
        }
        // It may have arrived between the two looks.
        match self.disk.read(digest, 0).await {
            Err(ReadError::Absent { .. }) if is_awaited => Err(awaited()),
            read => read.map_err(|error| status(&error)),
        }
    }
}

fn awaited() -> Status {
    Status::aborted("this node awaits it itself")
}

fn status(error: &ReadError) -> Status {
    match error {
        ReadError::Absent { .. } => Status::not_found(error.to_string()),
        error if error.is_damage() => Status::data_loss(error.to_string()),
        error => Status::internal(error.to_string()),
    }
}

fn only_reads<T>() -> Result<T, Status> {
    Err(Status::unimplemented("a node lets others read blobs, and nothing else"))
}

#[tonic::async_trait]
impl ContentAddressableStorage for BlobService {
    type GetTreeStream = BoxStream<'static, Result<reapi::GetTreeResponse, Status>>;
    type GetChunkMappingStream = BoxStream<'static, Result<reapi::GetChunkMappingResponse, Status>>;

    async fn batch_read_blobs(
        &self,
        request: Request<reapi::BatchReadBlobsRequest>,
    ) -> Result<Response<reapi::BatchReadBlobsResponse>, Status> {
        use reapi::batch_read_blobs_response::Response as Item;
        let _call = self.admit()?;
        let request = request.into_inner();
        let asked: Result<Vec<Digest>, _> = request.digests.iter().map(digest_from_wire).collect();
        let asked = asked.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let total = asked.iter().fold(0u64, |sum, digest| sum.saturating_add(digest.size));
        if total > MAX_BATCH / 2 || asked.len() > BATCH_BLOBS {
            return Err(Status::invalid_argument("that is more than a batch"));
        }
        let is_awaited = self.wait(&request.instance_name, &asked, false).await;
        let answer = |(digest, read): (reapi::Digest, Result<bytes::Bytes, ReadError>)| {
            let (data, status) = match read {
                Ok(data) => (data.into(), Status::new(Code::Ok, "")),
                Err(ReadError::Absent { .. }) if is_awaited => (Vec::new(), awaited()),
                Err(error) => (Vec::new(), status(&error)),
            };
            // Without words, as a thousand of them may be more than a message holds.
            let status = Some(rpc::Status { code: status.code() as i32, ..rpc::Status::default() });
            Item { digest: Some(digest), data, status, ..Item::default() }
        };
        let read = self.disk.read_batch(asked).await;
        let responses = request.digests.into_iter().zip(read).map(answer).collect();
        Ok(Response::new(reapi::BatchReadBlobsResponse { responses }))
    }

    async fn find_missing_blobs(
        &self,
        _: Request<reapi::FindMissingBlobsRequest>,
    ) -> Result<Response<reapi::FindMissingBlobsResponse>, Status> {
        only_reads()
    }

    async fn batch_update_blobs(
        &self,
        _: Request<reapi::BatchUpdateBlobsRequest>,
    ) -> Result<Response<reapi::BatchUpdateBlobsResponse>, Status> {
        only_reads()
    }

    async fn get_tree(
        &self,
        _: Request<reapi::GetTreeRequest>,
    ) -> Result<Response<Self::GetTreeStream>, Status> {
        only_reads()
    }

    async fn split_blob(
        &self,
        _: Request<reapi::SplitBlobRequest>,
    ) -> Result<Response<reapi::SplitBlobResponse>, Status> {
        only_reads()
    }

    async fn get_chunk_mapping(
        &self,
        _: Request<reapi::GetChunkMappingRequest>,
    ) -> Result<Response<Self::GetChunkMappingStream>, Status> {
        only_reads()
    }

    async fn splice_blob(
        &self,
        _: Request<reapi::SpliceBlobRequest>,
    ) -> Result<Response<reapi::SpliceBlobResponse>, Status> {
        only_reads()
    }

    async fn register_chunk_mapping(
        &self,
        _: Request<Streaming<reapi::RegisterChunkMappingRequest>>,
    ) -> Result<Response<reapi::RegisterChunkMappingResponse>, Status> {
        only_reads()
    }
}

#[tonic::async_trait]
impl ByteStream for BlobService {
    type ReadStream = BoxStream<'static, Result<ReadResponse, Status>>;

    async fn read(&self, request: Request<ReadRequest>) -> Result<Response<Self::ReadStream>, Status> {
        let call = self.admit()?;
        let name = request.into_inner().resource_name;
        let resource = Resource::parse(&name).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let Resource::Blob { digest, form: Form::Plain } = resource else { return only_reads() };
        let tree = name.split('/').next().unwrap_or_default();
        let pieces = self.open(digest, tree).await?.map(move |piece| {
            let _call = &call; // until the stream ends
            piece.map(|data| ReadResponse { data }).map_err(|error| status(&error))
        });
        Ok(Response::new(pieces.boxed()))
    }

    async fn write(&self, _: Request<Streaming<WriteRequest>>) -> Result<Response<WriteResponse>, Status> {
        only_reads()
    }

    async fn query_write_status(
        &self,
        _: Request<QueryWriteStatusRequest>,
    ) -> Result<Response<QueryWriteStatusResponse>, Status> {
        only_reads()
    }
}
