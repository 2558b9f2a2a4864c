//! The blob store for clients: the Remote Execution API's `Capabilities`, `ContentAddressableStorage` and
//! `ByteStream` over the controller's [`Store`], as published.
//!
//! Hides only the translation: the store checks all content. Instance names are accepted and ignored, because there
//! is one store. Blobs may be sent and received in zstd, in streams and in batches: the size in its digest limits a
//! received one, and a sent one is compressed where that makes it smaller. Calls for chunked blobs are answered with
//! `UNIMPLEMENTED`.

mod tree;
mod uploads;

use std::sync::Arc;
use std::time::Duration;

use agent_cas::gc::Collector;
use agent_cas::remote::bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use agent_cas::remote::bytestream::{
    QueryWriteStatusRequest, QueryWriteStatusResponse, ReadRequest, ReadResponse, WriteRequest, WriteResponse,
};
use agent_cas::remote::compression::{InflateError, deflate_all, deflated, inflate_all};
use agent_cas::remote::{
    ANNOUNCED, CHECKS_TREES, ENCODED, Form, IDENTITY, MAX_BATCH, MAX_MESSAGE, Resource, ResourceError, ZSTD,
    digest_from_wire, digest_to_wire, told,
};
use agent_cas::store::BATCH_BLOBS;
use agent_cas::{BlobStore, Ingest, MissingError, ReadError, Store, WriteError};
use agent_model::{Digest, causes};
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bazel_remote_apis::build::bazel::semver::SemVer;
use bazel_remote_apis::google::rpc;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use prost::Message;
use reapi::capabilities_server::{Capabilities, CapabilitiesServer};
use reapi::content_addressable_storage_server::{ContentAddressableStorage, ContentAddressableStorageServer};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

use tree::TreeWalk;
use uploads::Uploads;

/// Items one message may hold: more than fit with a digest each. A message with more was made to be costly.
const ITEMS: usize = 65_536;

/// Bytes of an answer for each blob in addition to its content: its digest, its status, and the frames around them.
const AROUND: u64 = 96;

/// The most bytes of all compressed blobs of one batch, inflated: so much is in memory at once.
const INFLATED: u64 = 4 * MAX_BATCH;

/// The longest silence of a client that is still uploading.
const SILENCE: Duration = Duration::from_secs(60);

/// Adds the services over `store` to `routes`; `collector` makes room in the part of it on this disk.
pub(crate) fn add(routes: Routes, store: Store, collector: Collector) -> Routes {
    let service = Service { store, collector, uploads: Arc::default() };
    routes
        .add_service(CapabilitiesServer::new(service.clone()))
        .add_service(
            ContentAddressableStorageServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE),
        )
        .add_service(ByteStreamServer::new(service).max_decoding_message_size(MAX_MESSAGE))
}

#[derive(Debug, Clone)]
struct Service {
    store: Store,
    /// Makes room for a blob when there is none.
    collector: Collector,
    uploads: Arc<Uploads>,
}

#[tonic::async_trait]
impl Capabilities for Service {
    async fn get_capabilities(
        &self,
        _: Request<reapi::GetCapabilitiesRequest>,
    ) -> Result<Response<reapi::ServerCapabilities>, Status> {
        let version = |minor| Some(SemVer { major: 2, minor, ..SemVer::default() });
        let cache = reapi::CacheCapabilities {
            digest_functions: vec![reapi::digest_function::Value::Sha256 as i32],
            max_batch_total_size_bytes: ANNOUNCED as i64,
            supported_compressors: vec![ZSTD],
            supported_batch_update_compressors: vec![ZSTD],
            symlink_absolute_path_strategy: reapi::symlink_absolute_path_strategy::Value::Disallowed as i32,
            ..Default::default()
        };
        let mut answer = Response::new(reapi::ServerCapabilities {
            cache_capabilities: Some(cache),
            low_api_version: version(0),
            high_api_version: version(3),
            ..Default::default()
        });
        answer.metadata_mut().insert(ENCODED, MAX_BATCH.into());
        // Of a store elsewhere only the roots are looked for.
        if let Store::Disk(_) = self.store {
            answer.metadata_mut().insert(CHECKS_TREES, 1.into());
        }
        Ok(answer)
    }
}

#[tonic::async_trait]
impl ContentAddressableStorage for Service {
    type GetTreeStream = BoxStream<'static, Result<reapi::GetTreeResponse, Status>>;
    type GetChunkMappingStream = BoxStream<'static, Result<reapi::GetChunkMappingResponse, Status>>;

    async fn find_missing_blobs(
        &self,
        request: Request<reapi::FindMissingBlobsRequest>,
    ) -> Result<Response<reapi::FindMissingBlobsResponse>, Status> {
        let request = request.into_inner();
        check_function(request.digest_function)?;
        let asked: Result<Vec<Digest>, _> = request.blob_digests.iter().map(digest_from_wire).collect();
        let asked = asked.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let missing = self.store.missing(&asked).await.map_err(|error| lookup_status(&error))?;
        let missing_blob_digests = missing.iter().map(digest_to_wire).collect();
        let answer = reapi::FindMissingBlobsResponse { missing_blob_digests };
        match answer.encoded_len() as u64 {
            0..=MAX_BATCH => Ok(Response::new(answer)),
            _ => Err(Status::resource_exhausted(
                "more are missing than an answer holds: ask for fewer at a time",
            )),
        }
    }

    async fn batch_update_blobs(
        &self,
        request: Request<reapi::BatchUpdateBlobsRequest>,
    ) -> Result<Response<reapi::BatchUpdateBlobsResponse>, Status> {
        use reapi::batch_update_blobs_response::Response as Item;
        let request = request.into_inner();
        check_function(request.digest_function)?;
        if request.requests.len() > ITEMS {
            return Err(Status::resource_exhausted(format!("more than {ITEMS} items in one batch")));
        }
        let mut responses = Vec::with_capacity(request.requests.len());
        let (mut blobs, mut names) = (Vec::new(), Vec::new());
        let (mut compressed, mut room) = (Vec::new(), INFLATED);
        for item in request.requests {
            match accept(&item, &mut room) {
                Ok((digest, Form::Plain)) => {
                    blobs.push((digest, Bytes::from(item.data)));
                    names.push(item.digest);
                }
                Ok((digest, Form::Zstd)) => compressed.push((digest, Bytes::from(item.data))),
                Err(status) => responses.push(Item { digest: item.digest, status: Some(to_rpc(&status)) }),
            }
        }
        for (digest, result) in inflate_all(compressed).await {
            let name = Some(digest_to_wire(&digest));
            match result {
                Ok(content) => {
                    blobs.push((digest, content));
                    names.push(name);
                }
                Err(error) => {
                    responses.push(Item { digest: name, status: Some(to_rpc(&inflate_status(&error))) });
                }
            }
        }
        for (digest, result) in names.into_iter().zip(self.write_batch(blobs).await) {
            let status =
                result.map_or_else(|error| to_rpc(&write_status(&error)), |()| rpc::Status::default());
            responses.push(Item { digest, status: Some(status) });
        }
        let mut answer = reapi::BatchUpdateBlobsResponse { responses };
        if answer.encoded_len() as u64 > MAX_BATCH {
            answer.responses.iter_mut().for_each(|item| without_words(&mut item.status));
        }
        Ok(Response::new(answer))
    }

    async fn batch_read_blobs(
        &self,
        request: Request<reapi::BatchReadBlobsRequest>,
    ) -> Result<Response<reapi::BatchReadBlobsResponse>, Status> {
        use reapi::batch_read_blobs_response::Response as Item;
        let request = request.into_inner();
        check_function(request.digest_function)?;
        let asked: Result<Vec<Digest>, _> = request.digests.iter().map(digest_from_wire).collect();
        let asked = asked.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let total = asked.iter().fold(0u64, |sum, digest| sum.saturating_add(digest.size + AROUND));
        if total > MAX_BATCH {
            let most = "what a message of 4 MiB holds, with what is around each blob";
            return Err(Status::invalid_argument(format!("{} blobs are more than {most}", asked.len())));
        }
        let results = self.store.read_batch(asked).await;
        let forms = match request.acceptable_compressors.contains(&ZSTD) {
            true => deflate_all(results.iter().map(|read| read.as_ref().cloned().unwrap_or_default())).await,
            false => vec![None; results.len()],
        };
        let answer =
            |((digest, result), form): ((reapi::Digest, Result<Bytes, ReadError>), Option<Vec<u8>>)| {
                let compressor = if form.is_some() { ZSTD } else { IDENTITY };
                let (data, status) = match result {
                    Ok(data) => (form.unwrap_or_else(|| data.into()), rpc::Status::default()),
                    Err(error) => (Vec::new(), to_rpc(&read_status(&error))),
                };
                Item { digest: Some(digest), data, status: Some(status), compressor }
            };
        let responses = request.digests.into_iter().zip(results).zip(forms).map(answer).collect();
        let mut answer = reapi::BatchReadBlobsResponse { responses };
        if answer.encoded_len() as u64 > MAX_BATCH {
            answer.responses.iter_mut().for_each(|item| without_words(&mut item.status));
        }
        Ok(Response::new(answer))
    }

    async fn get_tree(
        &self,
        request: Request<reapi::GetTreeRequest>,
    ) -> Result<Response<Self::GetTreeStream>, Status> {
        let request = request.into_inner();
        check_function(request.digest_function)?;
        if !request.page_token.is_empty() {
            return Err(Status::invalid_argument("a tree is one stream, without page tokens"));
        }
        let root = request.root_digest.as_ref().ok_or_else(|| Status::invalid_argument("no root"))?;
        let root = digest_from_wire(root).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let missing = self.store.missing(&[root]).await.map_err(|error| lookup_status(&error))?;
        if !missing.is_empty() {
            return Err(Status::not_found(format!("the root {root} is not in the store")));
        }
        let page = usize::try_from(request.page_size).ok().filter(|size| *size > 0).unwrap_or(BATCH_BLOBS);
        let walk = TreeWalk::new(self.store.clone(), root, page.min(BATCH_BLOBS));
        Ok(Response::new(stream::try_unfold(walk, TreeWalk::next_page).boxed()))
    }

    async fn split_blob(
        &self,
        _: Request<reapi::SplitBlobRequest>,
    ) -> Result<Response<reapi::SplitBlobResponse>, Status> {
        Err(no_chunks())
    }

    async fn get_chunk_mapping(
        &self,
        _: Request<reapi::GetChunkMappingRequest>,
    ) -> Result<Response<Self::GetChunkMappingStream>, Status> {
        Err(no_chunks())
    }

    async fn splice_blob(
        &self,
        _: Request<reapi::SpliceBlobRequest>,
    ) -> Result<Response<reapi::SpliceBlobResponse>, Status> {
        Err(no_chunks())
    }

    async fn register_chunk_mapping(
        &self,
        _: Request<Streaming<reapi::RegisterChunkMappingRequest>>,
    ) -> Result<Response<reapi::RegisterChunkMappingResponse>, Status> {
        Err(no_chunks())
    }
}

fn no_chunks() -> Status {
    Status::unimplemented("this store does not cut blobs into chunks")
}

/// A client that names no digest function means the only one.
fn check_function(function: i32) -> Result<(), Status> {
    use reapi::digest_function::Value;
    match Value::try_from(function) {
        Ok(Value::Unknown | Value::Sha256) => Ok(()),
        _ => Err(Status::invalid_argument("this store names blobs by SHA-256 only")),
    }
}

/// The digest and form of an item of a batch. Compressed items must fit into `room`, which they reduce.
fn accept(
    item: &reapi::batch_update_blobs_request::Request,
    room: &mut u64,
) -> Result<(Digest, Form), Status> {
    let digest = item.digest.as_ref().ok_or_else(|| Status::invalid_argument("no digest"))?;
    let digest = digest_from_wire(digest).map_err(|error| Status::invalid_argument(error.to_string()))?;
    match item.compressor {
        IDENTITY => Ok((digest, Form::Plain)),
        ZSTD => {
            let full = || Status::resource_exhausted(format!("more than {INFLATED} bytes in one batch"));
            *room = room.checked_sub(digest.size).ok_or_else(full)?;
            Ok((digest, Form::Zstd))
        }
        _ => Err(Status::invalid_argument("this store knows zstd and no other compression")),
    }
}

#[tonic::async_trait]
impl ByteStream for Service {
    type ReadStream = BoxStream<'static, Result<ReadResponse, Status>>;

    async fn read(&self, request: Request<ReadRequest>) -> Result<Response<Self::ReadStream>, Status> {
        let request = request.into_inner();
        let Resource::Blob { digest, form } = resource(&request.resource_name)? else {
            return Err(Status::invalid_argument("an upload cannot be read"));
        };
        let offset = u64::try_from(request.read_offset)
            .map_err(|_| Status::out_of_range("the offset must not be negative"))?;
        let limit = match u64::try_from(request.read_limit) {
            Ok(0) => u64::MAX,
            Ok(limit) => limit,
            Err(_) => return Err(Status::invalid_argument("the limit must not be negative")),
        };
        if form == Form::Zstd && limit != u64::MAX {
            return Err(Status::invalid_argument("a compressed blob is read to its end"));
        }
        let chunks = self.store.read(digest, offset).await.map_err(|error| read_status(&error))?;
        let chunks = if form == Form::Zstd { deflated(digest, chunks) } else { chunks };
        let messages = stream::try_unfold((chunks, limit), |(mut chunks, left)| async move {
            let chunk = if left == 0 { None } else { chunks.next().await };
            let Some(chunk) = chunk else { return Ok(None) };
            let mut chunk = chunk.map_err(|error| read_status(&error))?;
            chunk.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            let left = left - chunk.len() as u64;
            Ok(Some((ReadResponse { data: chunk }, (chunks, left))))
        });
        Ok(Response::new(messages.boxed()))
    }

    async fn write(
        &self,
        request: Request<Streaming<WriteRequest>>,
    ) -> Result<Response<WriteResponse>, Status> {
        let mut messages = request.into_inner();
        let first = next(&mut messages).await?.ok_or_else(|| Status::invalid_argument("no message"))?;
        let (digest, form) = upload_of(&first.resource_name)?;
        if self.has(digest).await? {
            // The size of the compressed stream is not known.
            let committed_size = if form == Form::Zstd { -1 } else { to_i64(digest.size) };
            return Ok(Response::new(WriteResponse { committed_size }));
        }
        let name = first.resource_name.clone();
        let mut upload = self.uploads.begin(self, &name, (digest, form), first.write_offset).await?;
        let mut message = Some(first);
        while let Some(part) = message {
            if !part.resource_name.is_empty() && part.resource_name != name {
                return Err(Status::invalid_argument("the resource changes within the stream"));
            }
            upload.append(part.write_offset, part.data).await?;
            if part.finish_write {
                let whole = if form == Form::Zstd { upload.received() } else { digest.size };
                upload.finish(&self.store).await?;
                let committed_size = to_i64(whole);
                return Ok(Response::new(WriteResponse { committed_size }));
            }
            message = next(&mut messages).await?;
        }
        Ok(Response::new(WriteResponse { committed_size: to_i64(upload.written()) }))
    }

    async fn query_write_status(
        &self,
        request: Request<QueryWriteStatusRequest>,
    ) -> Result<Response<QueryWriteStatusResponse>, Status> {
        let name = request.into_inner().resource_name;
        let (digest, _) = upload_of(&name)?;
        let complete = self.has(digest).await?;
        let committed = if complete { digest.size } else { self.uploads.written(&name) };
        let committed_size = to_i64(committed);
        Ok(Response::new(QueryWriteStatusResponse { committed_size, complete }))
    }
}

impl Service {
    async fn has(&self, digest: Digest) -> Result<bool, Status> {
        let missing = self.store.missing(&[digest]).await.map_err(|error| lookup_status(&error))?;
        Ok(missing.is_empty())
    }

    /// Stores whole blobs; those without room are tried once more if room could be made.
    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        let mut results = self.store.keep_batch(blobs.clone()).await;
        let refused = |result: &Result<(), WriteError>| result.as_ref().is_err_and(WriteError::is_no_space);
        let again: Vec<usize> = (0..results.len()).filter(|index| refused(&results[*index])).collect();
        let bytes = again.iter().map(|index| blobs[*index].0.size).sum();
        if !again.is_empty() && self.collector.make_room(bytes).await {
            let retried = again.iter().map(|index| blobs[*index].clone()).collect();
            for (index, result) in again.into_iter().zip(self.store.keep_batch(retried).await) {
                results[index] = result;
            }
        }
        results
    }

    /// Begins a blob; one without room is tried once more if room could be made.
    async fn ingest(&self, digest: Digest) -> Result<Ingest, WriteError> {
        match self.store.ingest(digest).await {
            Err(error) if error.is_no_space() && self.collector.make_room(digest.size).await => {
                self.store.ingest(digest).await
            }
            begun => begun,
        }
    }
}

async fn next(messages: &mut Streaming<WriteRequest>) -> Result<Option<WriteRequest>, Status> {
    tokio::time::timeout(SILENCE, messages.message())
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("no message of the upload for too long")))
}

fn resource(name: &str) -> Result<Resource, Status> {
    Resource::parse(name).map_err(|error| match error {
        ResourceError::Compressor { .. } => Status::unimplemented(error.to_string()),
        ResourceError::Malformed { .. } => Status::invalid_argument(error.to_string()),
    })
}

fn upload_of(name: &str) -> Result<(Digest, Form), Status> {
    match resource(name)? {
        Resource::Upload { digest, form, .. } => Ok((digest, form)),
        Resource::Blob { .. } => Err(Status::invalid_argument("the resource names no upload")),
    }
}

fn to_i64(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

fn lookup_status(error: &MissingError) -> Status {
    match error {
        MissingError::Remote { source } => far_status(source),
        MissingError::Answer => far_status(&Status::unknown(error.to_string())),
    }
}

fn read_status(error: &ReadError) -> Status {
    let code = match error {
        ReadError::Absent { .. } => Code::NotFound,
        ReadError::Offset { .. } => Code::OutOfRange,
        error if error.is_damage() => Code::DataLoss,
        ReadError::Disk { .. } if error.is_away() => Code::Unavailable,
        ReadError::Remote { source, .. } => return far_status(source),
        _ => Code::Internal,
    };
    Status::new(code, causes::tell(error))
}

fn write_status(error: &WriteError) -> Status {
    let code = match error {
        WriteError::Mismatch { .. } => Code::InvalidArgument,
        error if error.is_no_space() => Code::ResourceExhausted,
        WriteError::Remote { source, .. } => return far_status(source),
        WriteError::Vanished { .. } => return far_status(&Status::unknown(error.to_string())),
        _ => Code::Internal,
    };
    Status::new(code, causes::tell(error))
}

fn inflate_status(error: &InflateError) -> Status {
    Status::invalid_argument(causes::tell(error))
}

/// The status for a client when the remote store fails: unavailable if it may succeed later, else final.
fn far_status(said: &Status) -> Status {
    let (code, what) = match agent_cas::remote::is_away(said) {
        true => (Code::Unavailable, "the server that keeps the blobs does not answer as it should"),
        false => (Code::FailedPrecondition, "the server that keeps the blobs refuses"),
    };
    let fault = super::far_fault(what).why(told(said));
    let details = Bytes::copy_from_slice(agent_proto::status(&fault).details());
    Status::with_details(code, format!("{what}: {}", told(said)), details)
}

fn to_rpc(status: &Status) -> rpc::Status {
    rpc::Status { code: status.code() as i32, message: status.message().to_owned(), ..Default::default() }
}

/// Removes the text of a status, so that it fits into any answer.
fn without_words(status: &mut Option<rpc::Status>) {
    status.iter_mut().for_each(|status| status.message.clear());
}

#[cfg(test)]
mod tests;
