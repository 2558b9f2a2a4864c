//! The blob store for clients: the Remote Execution API's `Capabilities`, `ContentAddressableStorage` and
//! `ByteStream` over the controller's [`Disk`], as published.
//!
//! Hides nothing but the translation: every check of content is the store's. Instance names are understood
//! and ignored, for there is one store. Compression and chunked blobs are not offered and answered with
//! `UNIMPLEMENTED`, or for one item of a batch `INVALID_ARGUMENT`.
//!
//! An upload that breaks off keeps its bytes for a while, so that the client can ask how far it came and go
//! on from there. A handful of them is kept; the oldest gives way.

use std::collections::{HashSet, VecDeque};
use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use agent_cas::remote::{MAX_BATCH, MAX_MESSAGE, Resource, ResourceError, digest_from_wire};
use agent_cas::snapshot::MAX_DIRECTORIES;
use agent_cas::store::BATCH_BLOBS;
use agent_cas::{BlobStore, Disk, Ingest, MissingError, ReadError, WriteError};
use agent_model::Digest;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bazel_remote_apis::build::bazel::semver::SemVer;
use bazel_remote_apis::google::{bytestream, rpc};
use bytes::Bytes;
use bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use futures_util::stream::{self, BoxStream, StreamExt};
use prost::Message;
use reapi::capabilities_server::{Capabilities, CapabilitiesServer};
use reapi::content_addressable_storage_server::{ContentAddressableStorage, ContentAddressableStorageServer};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

/// Items one message may hold: more than fit with a digest each. What has more is made to be costly.
const ITEMS: usize = 65_536;

/// Broken-off uploads that are kept.
const PARKED: usize = 16;

/// How long they are kept, and then until the next call about an upload.
const PARKED_FOR: Duration = Duration::from_secs(300);

/// The longest silence of a client that is still uploading.
const SILENCE: Duration = Duration::from_secs(60);

/// Adds the services over `disk` to `routes`.
pub(crate) fn add(routes: Routes, disk: Disk) -> Routes {
    let service = Service { disk, uploads: Arc::default() };
    routes
        .add_service(CapabilitiesServer::new(service.clone()))
        .add_service(
            ContentAddressableStorageServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE),
        )
        .add_service(ByteStreamServer::new(service).max_decoding_message_size(MAX_MESSAGE))
}

#[derive(Debug, Clone)]
struct Service {
    disk: Disk,
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
            max_batch_total_size_bytes: MAX_BATCH as i64,
            symlink_absolute_path_strategy: reapi::symlink_absolute_path_strategy::Value::Disallowed as i32,
            ..Default::default()
        };
        Ok(Response::new(reapi::ServerCapabilities {
            cache_capabilities: Some(cache),
            low_api_version: version(0),
            high_api_version: version(3),
            ..Default::default()
        }))
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
        let missing: HashSet<Digest> =
            self.disk.missing(&asked).await.map_err(|error| lookup_status(&error))?.into_iter().collect();
        let blobs = request.blob_digests.into_iter().zip(asked);
        let missing_blob_digests =
            blobs.filter(|(_, digest)| missing.contains(digest)).map(|(wire, _)| wire).collect();
        Ok(Response::new(reapi::FindMissingBlobsResponse { missing_blob_digests }))
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
        for item in request.requests {
            match accept(&item) {
                Ok(digest) => {
                    blobs.push((digest, Bytes::from(item.data)));
                    names.push(item.digest);
                }
                Err(status) => responses.push(Item { digest: item.digest, status: Some(to_rpc(&status)) }),
            }
        }
        for (digest, result) in names.into_iter().zip(self.disk.write_batch(blobs).await) {
            let status =
                result.map_or_else(|error| to_rpc(&write_status(&error)), |()| rpc::Status::default());
            responses.push(Item { digest, status: Some(status) });
        }
        Ok(Response::new(reapi::BatchUpdateBlobsResponse { responses }))
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
        let total = asked.iter().fold(0u64, |sum, digest| sum.saturating_add(digest.size));
        if total > MAX_BATCH {
            return Err(Status::invalid_argument(format!("{total} bytes are more than a batch may have")));
        }
        let results = self.disk.read_batch(asked).await;
        let answer = |(digest, result): (reapi::Digest, Result<Bytes, ReadError>)| {
            let (data, status) = match result {
                Ok(data) => (data.into(), rpc::Status::default()),
                Err(error) => (Vec::new(), to_rpc(&read_status(&error))),
            };
            Item { digest: Some(digest), data, status: Some(status), ..Default::default() }
        };
        let responses = request.digests.into_iter().zip(results).map(answer).collect();
        Ok(Response::new(reapi::BatchReadBlobsResponse { responses }))
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
        let missing = self.disk.missing(&[root]).await.map_err(|error| lookup_status(&error))?;
        if !missing.is_empty() {
            return Err(Status::not_found(format!("the root {root} is not in the store")));
        }
        let page = usize::try_from(request.page_size).ok().filter(|size| *size > 0).unwrap_or(BATCH_BLOBS);
        let walk = TreeWalk {
            disk: self.disk.clone(),
            page: page.min(BATCH_BLOBS),
            open: VecDeque::from([root]),
            seen: HashSet::from([root]),
        };
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

/// Clients that do not say which function they mean, mean the one there is.
fn check_function(function: i32) -> Result<(), Status> {
    use reapi::digest_function::Value;
    match Value::try_from(function) {
        Ok(Value::Unknown | Value::Sha256) => Ok(()),
        _ => Err(Status::invalid_argument("this store names blobs by SHA-256 only")),
    }
}

fn accept(item: &reapi::batch_update_blobs_request::Request) -> Result<Digest, Status> {
    if item.compressor != reapi::compressor::Value::Identity as i32 {
        return Err(Status::invalid_argument("this store takes blobs uncompressed only"));
    }
    let digest = item.digest.as_ref().ok_or_else(|| Status::invalid_argument("no digest"))?;
    digest_from_wire(digest).map_err(|error| Status::invalid_argument(error.to_string()))
}

/// A message of a directory may be all entries without content, which take two bytes there and far more in
/// memory. So they are counted before they are understood.
fn check_entries(digest: &Digest, bytes: &[u8]) -> Result<(), Status> {
    let no_directory = |why: &str| Status::failed_precondition(format!("{digest} is no directory: {why}"));
    let (mut rest, mut count) = (bytes, 0);
    while !rest.is_empty() {
        let number = |rest: &mut &[u8]| {
            prost::decode_length_delimiter(rest).map_err(|error| no_directory(&error.to_string()))
        };
        // Each field of a directory is a key, which ends with the mark of a message, a length, and the entry.
        if number(&mut rest)? & 7 != 2 {
            return Err(no_directory("it has a field that no directory has"));
        }
        let length = number(&mut rest)?;
        rest = rest.get(length..).ok_or_else(|| no_directory("it ends within an entry"))?;
        count += 1;
        if count > ITEMS {
            return Err(Status::resource_exhausted(format!("{digest} has more than {ITEMS} entries")));
        }
    }
    Ok(())
}

/// A tree on its way to a client: each directory once, parents before children.
struct TreeWalk {
    disk: Disk,
    page: usize,
    open: VecDeque<Digest>,
    seen: HashSet<Digest>,
}

impl TreeWalk {
    /// The next page; what the store lacks is left out, and the client is to notice.
    async fn next_page(mut self) -> Result<Option<(reapi::GetTreeResponse, TreeWalk)>, Status> {
        let batch = self.next_batch()?;
        if batch.is_empty() {
            return Ok(None);
        }
        let mut directories = Vec::with_capacity(batch.len());
        for (digest, result) in batch.iter().zip(self.disk.read_batch(batch.clone()).await) {
            let bytes = match result {
                Err(ReadError::Absent { .. }) => continue,
                other => other.map_err(|error| read_status(&error))?,
            };
            check_entries(digest, &bytes)?;
            let directory = reapi::Directory::decode(bytes)
                .map_err(|error| Status::failed_precondition(format!("{digest} is no directory: {error}")))?;
            for child in directory.directories.iter().filter_map(|node| node.digest.as_ref()) {
                let child =
                    digest_from_wire(child).map_err(|e| Status::failed_precondition(e.to_string()))?;
                if self.seen.insert(child) {
                    self.open.push_back(child);
                }
            }
            directories.push(directory);
        }
        if self.seen.len() as u64 > MAX_DIRECTORIES {
            return Err(Status::resource_exhausted(format!("more than {MAX_DIRECTORIES} directories")));
        }
        Ok(Some((reapi::GetTreeResponse { directories, ..Default::default() }, self)))
    }

    /// Directories that fit into one message.
    fn next_batch(&mut self) -> Result<Vec<Digest>, Status> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while let Some(digest) = self.open.front() {
            if digest.size > MAX_BATCH {
                return Err(Status::resource_exhausted(format!("directory {digest} exceeds a message")));
            }
            // Four bytes of framing for each, within the room a message has above a batch.
            bytes += digest.size + 4;
            if batch.len() == self.page || (bytes > MAX_BATCH && !batch.is_empty()) {
                break;
            }
            batch.extend(self.open.pop_front());
        }
        Ok(batch)
    }
}

#[tonic::async_trait]
impl ByteStream for Service {
    type ReadStream = BoxStream<'static, Result<bytestream::ReadResponse, Status>>;

    async fn read(
        &self,
        request: Request<bytestream::ReadRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let request = request.into_inner();
        let Resource::Blob(digest) = resource(&request.resource_name)? else {
            return Err(Status::invalid_argument("an upload cannot be read"));
        };
        let offset = u64::try_from(request.read_offset)
            .map_err(|_| Status::out_of_range("the offset must not be negative"))?;
        let limit = match u64::try_from(request.read_limit) {
            Ok(0) => u64::MAX,
            Ok(limit) => limit,
            Err(_) => return Err(Status::invalid_argument("the limit must not be negative")),
        };
        let chunks = self.disk.read(digest, offset).await.map_err(|error| read_status(&error))?;
        let messages = stream::try_unfold((chunks, limit), |(mut chunks, left)| async move {
            let chunk = if left == 0 { None } else { chunks.next().await };
            let Some(chunk) = chunk else { return Ok(None) };
            let mut chunk = chunk.map_err(|error| read_status(&error))?;
            chunk.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            let left = left - chunk.len() as u64;
            Ok(Some((bytestream::ReadResponse { data: chunk.into() }, (chunks, left))))
        });
        Ok(Response::new(messages.boxed()))
    }

    async fn write(
        &self,
        request: Request<Streaming<bytestream::WriteRequest>>,
    ) -> Result<Response<bytestream::WriteResponse>, Status> {
        let mut messages = request.into_inner();
        let first = next(&mut messages).await?.ok_or_else(|| Status::invalid_argument("no message"))?;
        let digest = upload_digest(&first.resource_name)?;
        let full = bytestream::WriteResponse { committed_size: to_i64(digest.size) };
        if self.has(digest).await? {
            return Ok(Response::new(full));
        }
        let name = first.resource_name.clone();
        let mut upload = self.upload(&name, digest, first.write_offset).await?;
        let mut message = Some(first);
        while let Some(part) = message {
            if !part.resource_name.is_empty() && part.resource_name != name {
                return Err(Status::invalid_argument("the resource changes within the stream"));
            }
            if u64::try_from(part.write_offset) != Ok(upload.written()) {
                return Err(wrong_offset(upload.written()));
            }
            upload.append(part.data.into()).await?;
            if part.finish_write {
                upload.finish().await?;
                return Ok(Response::new(full));
            }
            message = next(&mut messages).await?;
        }
        Ok(Response::new(bytestream::WriteResponse { committed_size: to_i64(upload.written()) }))
    }

    async fn query_write_status(
        &self,
        request: Request<bytestream::QueryWriteStatusRequest>,
    ) -> Result<Response<bytestream::QueryWriteStatusResponse>, Status> {
        let name = request.into_inner().resource_name;
        let digest = upload_digest(&name)?;
        let complete = self.has(digest).await?;
        let committed = if complete { digest.size } else { self.uploads.written(&name) };
        let committed_size = to_i64(committed);
        Ok(Response::new(bytestream::QueryWriteStatusResponse { committed_size, complete }))
    }
}

impl Service {
    async fn has(&self, digest: Digest) -> Result<bool, Status> {
        let missing = self.disk.missing(&[digest]).await.map_err(|error| lookup_status(&error))?;
        Ok(missing.is_empty())
    }

    /// A new upload, or the one that broke off at `offset`.
    async fn upload(&self, name: &str, digest: Digest, offset: i64) -> Result<Upload, Status> {
        let parked = self.uploads.take(name);
        let ingest = match parked.filter(|_| offset != 0) {
            Some(ingest) => ingest,
            None if offset == 0 => self.disk.ingest(digest).await.map_err(|error| write_status(&error))?,
            None => return Err(wrong_offset(0)),
        };
        Ok(Upload { name: name.to_owned(), ingest: Some(ingest), uploads: Arc::clone(&self.uploads) })
    }
}

async fn next(
    messages: &mut Streaming<bytestream::WriteRequest>,
) -> Result<Option<bytestream::WriteRequest>, Status> {
    tokio::time::timeout(SILENCE, messages.message())
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("no message of the upload for too long")))
}

fn resource(name: &str) -> Result<Resource, Status> {
    Resource::parse(name).map_err(|error| match error {
        ResourceError::Compressed { .. } => Status::unimplemented(error.to_string()),
        ResourceError::Malformed { .. } => Status::invalid_argument(error.to_string()),
    })
}

fn upload_digest(name: &str) -> Result<Digest, Status> {
    match resource(name)? {
        Resource::Upload { digest, .. } => Ok(digest),
        Resource::Blob(_) => Err(Status::invalid_argument("the resource names no upload")),
    }
}

fn wrong_offset(expected: u64) -> Status {
    Status::out_of_range(format!("the upload goes on at offset {expected}"))
}

fn to_i64(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// An upload that is going on. Dropped unfinished, it is parked.
struct Upload {
    name: String,
    ingest: Option<Ingest>,
    uploads: Arc<Uploads>,
}

impl Upload {
    fn written(&self) -> u64 {
        self.ingest.as_ref().map_or(0, Ingest::written)
    }

    async fn append(&mut self, bytes: Bytes) -> Result<(), Status> {
        let Some(ingest) = &mut self.ingest else { return Err(wrong_offset(0)) };
        let result = ingest.append(bytes).await;
        if result.is_err() {
            self.ingest = None;
        }
        result.map_err(|error| write_status(&error))
    }

    async fn finish(mut self) -> Result<(), Status> {
        let Some(ingest) = self.ingest.take() else { return Err(wrong_offset(0)) };
        ingest.commit().await.map_err(|error| write_status(&error))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(ingest) = self.ingest.take() {
            self.uploads.park(std::mem::take(&mut self.name), ingest);
        }
    }
}

/// The uploads that broke off, oldest first.
#[derive(Debug, Default)]
struct Uploads(Mutex<VecDeque<Parked>>);

#[derive(Debug)]
struct Parked {
    name: String,
    ingest: Ingest,
    since: Instant,
}

impl Uploads {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Parked>> {
        let mut parked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parked.retain(|upload| upload.since.elapsed() < PARKED_FOR);
        parked
    }

    fn park(&self, name: String, ingest: Ingest) {
        let mut parked = self.lock();
        parked.retain(|upload| upload.name != name);
        if parked.len() == PARKED {
            parked.pop_front();
        }
        parked.push_back(Parked { name, ingest, since: Instant::now() });
    }

    fn take(&self, name: &str) -> Option<Ingest> {
        let mut parked = self.lock();
        let at = parked.iter().position(|upload| upload.name == name)?;
        parked.remove(at).map(|upload| upload.ingest)
    }

    fn written(&self, name: &str) -> u64 {
        self.lock().iter().find(|upload| upload.name == name).map_or(0, |upload| upload.ingest.written())
    }
}

fn lookup_status(error: &MissingError) -> Status {
    Status::internal(with_sources(error))
}

fn read_status(error: &ReadError) -> Status {
    let code = match error {
        ReadError::Absent { .. } => Code::NotFound,
        ReadError::Offset { .. } => Code::OutOfRange,
        ReadError::Corrupt { .. } => Code::DataLoss,
        _ => Code::Internal,
    };
    Status::new(code, with_sources(error))
}

fn write_status(error: &WriteError) -> Status {
    let code = match error {
        WriteError::Mismatch { .. } => Code::InvalidArgument,
        error if error.is_no_space() => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    Status::new(code, with_sources(error))
}

fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

fn to_rpc(status: &Status) -> rpc::Status {
    rpc::Status { code: status.code() as i32, message: status.message().to_owned(), ..Default::default() }
}

#[cfg(test)]
mod tests;
