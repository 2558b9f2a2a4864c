//! Results of actions, for build tools that use a box as their remote cache.
//!
//! Owns a directory of small files, one for each action, named by the action's digest. Hides how they are stored and
//! which are removed when there are too many: the least recently used ones. Invariants: a result is returned only
//! while every blob it names is in the store; a file is used only as it was written, which the digest at its
//! beginning proves. It is a cache: nothing is forced to the disk, and a file that cannot be read counts as absent.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_cas::remote::digest_from_wire;
use agent_cas::{BlobStore, digest_of};
use agent_model::Digest;
use agent_model::ids::hex;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use parking_lot::Mutex;
use prost::Message;
use reapi::action_cache_server::ActionCache;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use tonic::{Request, Response, Status};

use super::{Service, check_function, lookup_status, read_status};

/// The largest result that is kept, in bytes.
pub(super) const LARGEST: usize = 1 << 20;

/// The largest tree of an output directory that is read, in bytes.
const LARGEST_TREE: u64 = 2 << 20;

/// The limits of all results together.
const BOUNDS: Bounds = Bounds { files: 50_000, bytes: 256 << 20 };

#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) files: usize,
    pub(super) bytes: u64,
}

/// The results that are kept. Clones share the directory.
#[derive(Debug, Clone)]
pub(super) struct Actions {
    root: Arc<Path>,
    bounds: Bounds,
    /// Number and bytes of the results, once they were counted. Replaced ones count twice until the next count.
    held: Arc<Mutex<Option<(usize, u64)>>>,
}

impl Actions {
    /// Those in a directory, which need not exist yet.
    pub(super) fn at(root: PathBuf) -> Actions {
        Actions::within(root, BOUNDS)
    }

    pub(super) fn within(root: PathBuf, bounds: Bounds) -> Actions {
        Actions { root: root.into(), bounds, held: Arc::default() }
    }

    fn path(&self, action: &Digest) -> PathBuf {
        self.root.join(format!("{}-{}", hex(&action.hash), action.size))
    }

    /// The result of an action. Reading counts as use.
    fn read(&self, action: &Digest) -> Option<reapi::ActionResult> {
        let path = self.path(action);
        let bytes = fs::read(&path).ok()?;
        let (digest, message) = bytes.split_at_checked(32)?;
        if digest_of(message).hash != digest {
            return None;
        }
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        let _ = utimensat(CWD, &path, &times, AtFlags::empty());
        reapi::ActionResult::decode(message).ok()
    }

    fn write(&self, action: &Digest, result: &reapi::ActionResult) -> io::Result<()> {
        fs::create_dir_all(&self.root)?;
        let mut held = self.held.lock();
        let message = result.encode_to_vec();
        let bytes = [&digest_of(&message).hash[..], &message].concat();
        agent_fs::write_whole(&self.path(action), &bytes)?;
        let (files, size) = match *held {
            Some((files, size)) => (files + 1, size + bytes.len() as u64),
            None => self.make_room()?,
        };
        let is_full = files > self.bounds.files || size > self.bounds.bytes;
        *held = Some(if is_full { self.make_room()? } else { (files, size) });
        Ok(())
    }

    /// Counts the results. If they exceed the limits, the least recently used tenth is removed.
    fn make_room(&self) -> io::Result<(usize, u64)> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            let file = entry.metadata()?;
            all.push((file.modified()?, file.len(), entry.path()));
        }
        let (mut files, mut size) = (all.len(), all.iter().map(|(_, length, _)| length).sum::<u64>());
        if files <= self.bounds.files && size <= self.bounds.bytes {
            return Ok((files, size));
        }
        all.sort_unstable();
        for (_, length, path) in all {
            if files <= self.bounds.files / 10 * 9 && size <= self.bounds.bytes / 10 * 9 {
                break;
            }
            fs::remove_file(path)?;
            (files, size) = (files - 1, size - length);
        }
        Ok((files, size))
    }
}

#[tonic::async_trait]
impl ActionCache for Service {
    async fn get_action_result(
        &self,
        request: Request<reapi::GetActionResultRequest>,
    ) -> Result<Response<reapi::ActionResult>, Status> {
        let request = request.into_inner();
        check_function(request.digest_function)?;
        let action = named(request.action_digest.as_ref())?;
        let actions = self.actions.clone();
        let unknown = || Status::not_found("no result of this action is kept");
        let result = blocking(move || actions.read(&action)).await?.ok_or_else(unknown)?;
        match self.lacks(&result).await? {
            None => Ok(Response::new(result)),
            Some(_) => Err(Status::not_found("the store has not all outputs of this action any more")),
        }
    }

    async fn update_action_result(
        &self,
        request: Request<reapi::UpdateActionResultRequest>,
    ) -> Result<Response<reapi::ActionResult>, Status> {
        let request = request.into_inner();
        check_function(request.digest_function)?;
        let action = named(request.action_digest.as_ref())?;
        let result = request.action_result.ok_or_else(|| Status::invalid_argument("no result"))?;
        if result.encoded_len() > LARGEST {
            return Err(Status::invalid_argument(format!("a result may have {LARGEST} bytes")));
        }
        if let Some(lacks) = self.lacks(&result).await? {
            return Err(Status::failed_precondition(format!(
                "the store lacks {lacks}: upload the outputs first"
            )));
        }
        let (actions, kept) = (self.actions.clone(), result.clone());
        blocking(move || actions.write(&action, &kept)).await?.map_err(|error| {
            match agent_fs::is_full(&error) {
                true => Status::resource_exhausted("the disk is full"),
                false => Status::internal(format!("the result cannot be kept: {error}")),
            }
        })?;
        Ok(Response::new(result))
    }
}

impl Service {
    /// A blob that a result names and the store lacks.
    async fn lacks(&self, result: &reapi::ActionResult) -> Result<Option<Digest>, Status> {
        let files = result.output_files.iter().map(|file| file.digest.as_ref());
        let streams = [&result.stdout_digest, &result.stderr_digest].map(Option::as_ref);
        let streams = streams.into_iter().filter(Option::is_some);
        let mut blobs = files.chain(streams).map(named).collect::<Result<Vec<_>, _>>()?;
        for directory in &result.output_directories {
            let tree = named(directory.tree_digest.as_ref())?;
            match self.tree(tree).await? {
                Some(tree) => blobs.extend(files_of(&tree)?),
                None => return Ok(Some(tree)),
            }
        }
        let missing = self.store.missing(&blobs).await.map_err(|error| lookup_status(&error))?;
        Ok(missing.first().copied())
    }

    async fn tree(&self, digest: Digest) -> Result<Option<reapi::Tree>, Status> {
        if digest.size > LARGEST_TREE {
            return Err(Status::invalid_argument(format!("a tree may have {LARGEST_TREE} bytes")));
        }
        match self.store.read_batch(vec![digest]).await.pop() {
            None | Some(Err(agent_cas::ReadError::Absent { .. })) => Ok(None),
            Some(Err(error)) => Err(read_status(&error)),
            Some(Ok(bytes)) => reapi::Tree::decode(bytes)
                .map(Some)
                .map_err(|error| Status::invalid_argument(format!("{digest} is no tree: {error}"))),
        }
    }
}

fn files_of(tree: &reapi::Tree) -> Result<Vec<Digest>, Status> {
    let files = tree.root.iter().chain(&tree.children).flat_map(|directory| &directory.files);
    files.map(|file| named(file.digest.as_ref())).collect()
}

fn named(digest: Option<&reapi::Digest>) -> Result<Digest, Status> {
    let digest = digest.ok_or_else(|| Status::invalid_argument("no digest"))?;
    digest_from_wire(digest).map_err(|error| Status::invalid_argument(error.to_string()))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
    agent_blocking::spawn_blocking(work).await.map_err(|_| Status::unavailable("the controller is stopping"))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use super::*;

    fn result(size: usize) -> reapi::ActionResult {
        reapi::ActionResult { stdout_raw: vec![7; size], ..Default::default() }
    }

    #[test]
    fn test_results_that_were_not_used_for_longest_give_way() {
        let dir = tempfile::tempdir().unwrap();
        let actions = |bounds| Actions::within(dir.path().join("actions"), bounds);
        let few = actions(Bounds { files: 20, bytes: 1 << 30 });
        let named = |i: u8| digest_of(&[i]);
        for i in 0..20 {
            few.write(&named(i), &result(i.into())).unwrap();
            // Times of files are coarse.
            let at = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(i.into());
            File::options().append(true).open(few.path(&named(i))).unwrap().set_modified(at).unwrap();
        }
        assert_eq!(few.read(&named(0)), Some(result(0)), "it is used by that");
        few.write(&named(20), &result(20)).unwrap();
        let left =
            |actions: &Actions| (0..=20).filter(|i| actions.read(&named(*i)).is_some()).collect::<Vec<_>>();
        assert_eq!(left(&few), [vec![0], (4..=20).collect()].concat());
        // After a restart, with a limit of bytes alone.
        let small = actions(Bounds { files: 100, bytes: 2000 });
        assert_eq!(left(&small).len(), 18);
        small.write(&named(20), &result(1800)).unwrap();
        assert!(small.read(&named(20)).is_none_or(|kept| kept == result(1800)) && left(&small).len() < 18);
    }

    #[test]
    fn test_a_file_that_is_not_as_it_was_written_is_no_result() {
        let dir = tempfile::tempdir().unwrap();
        let actions = Actions::at(dir.path().to_owned());
        let action = digest_of(b"action");
        actions.write(&action, &result(10)).unwrap();
        let path = actions.path(&action);
        let whole = fs::read(&path).unwrap();
        for length in [0, 31, 32, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(actions.read(&action), None, "{length} bytes");
        }
        fs::write(&path, whole).unwrap();
        assert_eq!(actions.read(&action), Some(result(10)));
    }
}
