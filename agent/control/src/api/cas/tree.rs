//! A tree for a client that asks for all its directories at once.
//!
//! A blob that is named as a directory may contain anything: its entries are counted before it is decoded, and a tree
//! of more directories than a snapshot may have is not sent to its end.

use std::collections::{HashSet, VecDeque};

use agent_cas::remote::{MAX_BATCH, digest_from_wire};
use agent_cas::snapshot::MAX_DIRECTORIES;
use agent_cas::store::fitting;
use agent_cas::{BlobStore, ReadError, Store};
use agent_model::Digest;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use prost::Message;
use tonic::Status;

use super::{ITEMS, read_status};

/// Bytes of a page for each directory in addition to its content.
const FRAMING: u64 = 8;

/// A message of a directory may be all entries without content, which take two bytes there and far more in memory. So
/// they are counted before they are decoded.
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
pub(super) struct TreeWalk {
    store: Store,
    page: usize,
    open: VecDeque<Digest>,
    seen: HashSet<Digest>,
}

impl TreeWalk {
    /// From `root` down, at most `page` directories at a time.
    pub(super) fn new(store: Store, root: Digest, page: usize) -> TreeWalk {
        TreeWalk { store, page, open: VecDeque::from([root]), seen: HashSet::from([root]) }
    }

    /// The next page. Directories that the store lacks are left out; the client has to notice that.
    pub(super) async fn next_page(mut self) -> Result<Option<(reapi::GetTreeResponse, TreeWalk)>, Status> {
        let batch = self.next_batch()?;
        if batch.is_empty() {
            return Ok(None);
        }
        let mut directories = Vec::with_capacity(batch.len());
        for (digest, result) in batch.iter().zip(self.store.read_batch(batch.clone()).await) {
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
        let sizes = self.open.iter().map(|directory| directory.size.saturating_add(FRAMING));
        let count = fitting(sizes, MAX_BATCH, self.page);
        let batch: Vec<Digest> = self.open.drain(..count).collect();
        match batch.iter().find(|directory| directory.size > MAX_BATCH - FRAMING) {
            Some(large) => Err(Status::resource_exhausted(format!("directory {large} exceeds a message"))),
            None => Ok(batch),
        }
    }
}
