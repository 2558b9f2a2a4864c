//! Brings the data that jobs name by an address, and sends their outputs: finds out where it is, fetches what is not on
//! this machine, and sends what is to lie elsewhere.
//!
//! Owns the use of the file of data stores ([`stores`]), which is read at each use, so that a change counts at once;
//! and how much of the disk fetched data takes. Hides `agent_runtime::data`, which fetches, keeps and sends it.
//!
//! Invariants: credentials go from that file to the program that fetches and sends, and nowhere else; what a job is
//! just being given is not removed.

pub(crate) mod stores;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use agent_blocking::blocking;
use agent_model::{Clock, DataInput, DataOutput, JobId, ReplicaId, size};
use agent_runtime::data::{
    DataCache, DataConfig, DataError, DataSource, DataUpload, HeldData, UploadTarget, Uploaded,
};
use agent_runtime::env::Progress;
use agent_shim::JobDir;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tracing::{info, warn};

use super::environments;
use super::environments::eviction::{Candidate, EnvLimits, choose_victims};
use super::users;
use crate::config::Config;
use crate::disk::Reclaimer;
use stores::{DataPlace, Stores, StoresError};

/// How often what is too much is removed.
const TIDY_EVERY: Duration = Duration::from_secs(60);

/// Where in the directory of a job is noted what of its outputs has arrived.
const NOTES: &str = "sent";

/// An output of a replica that is sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendingOutput<'a> {
    /// The name of the output.
    pub(crate) name: &'a str,
    /// Where it goes.
    pub(crate) output: &'a DataOutput,
    /// Whose it is. The first rank's goes to the address itself, that of another one to `rank-N` below it.
    pub(crate) replica: &'a ReplicaId,
    /// The directory of the replica.
    pub(crate) dir: &'a JobDir,
    /// The user and the group of the job.
    pub(crate) owner: Option<(u32, u32)>,
}

/// Data for one input of a job.
#[derive(Debug)]
pub(crate) enum Supply {
    /// It is on this machine, outside of what the daemon keeps.
    Here(PathBuf),
    /// It was fetched, and is kept while this is held.
    Fetched(HeldData),
}

/// Why there is no data for an input.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SupplyError {
    #[error(transparent)]
    Stores(#[from] StoresError),
    #[error("there is nothing at {}", path.display())]
    Nothing { path: PathBuf, source: io::Error },
    #[error("{} is {}", path.display(), if *is_file { "a file" } else { "a folder" })]
    OtherKind { path: PathBuf, is_file: bool },
    #[error(transparent)]
    Fetch(#[from] DataError),
}

impl SupplyError {
    /// Whether it may be different in a while.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, SupplyError::Fetch(DataError::Unreachable(_)))
    }

    /// Whether there is too little room.
    pub(crate) fn is_no_room(&self) -> bool {
        match self {
            SupplyError::Fetch(DataError::NoRoom(_)) => true,
            SupplyError::Fetch(DataError::File { source, .. }) => agent_fs::is_full(source),
            _ => false,
        }
    }
}

/// The data of this node. Clones share its state.
#[derive(Clone)]
pub(crate) struct Data {
    cache: DataCache,
    /// The file of data stores.
    stores: PathBuf,
    /// How much of the disk all data may take together, in bytes.
    size: u64,
    clock: Arc<dyn Clock>,
}

impl Data {
    /// For this daemon. `shim` is the program that switches to the user of builders.
    pub(crate) fn open(config: &Config, shim: &Path, clock: &Arc<dyn Clock>) -> io::Result<Data> {
        let cache = DataCache::open(DataConfig {
            root: config.state_dir.join("data"),
            program: environments::engine(),
            vars: config.host.builder.clone(),
            builder: users::builder(config, shim),
            offline: config.environments.offline,
        })?;
        Ok(Data { cache, stores: config.data.stores.clone(), size: config.data.size, clock: clock.clone() })
    }

    /// Makes sure that the data is on this machine; `told` is sent the progress.
    pub(crate) async fn supply(
        &self,
        input: &DataInput,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<Supply, SupplyError> {
        let (file, wanted) = (self.stores.clone(), input.clone());
        let place = blocking(move || {
            let place = Stores::read(&file)?.place(&wanted.uri, &file)?;
            if let DataPlace::Here(path) = &place {
                check(path, wanted.is_file)?;
            }
            Ok::<_, SupplyError>(place)
        });
        match place.await? {
            DataPlace::Here(path) => Ok(Supply::Here(path)),
            DataPlace::There { url, options } => {
                let source = DataSource { url, is_file: input.is_file, options };
                Ok(Supply::Fetched(self.cache.obtain(&source, told).await?))
            }
        }
    }

    /// Where an output of this job is sent; what is made in a directory is to belong to `owner`.
    pub(crate) async fn target(
        &self,
        output: &DataOutput,
        job: &JobId,
        owner: Option<(u32, u32)>,
    ) -> Result<UploadTarget, SupplyError> {
        let (file, uri) = (self.stores.clone(), output.uri_of(job));
        blocking(move || Ok(Stores::read(&file)?.target(&uri, owner, &file)?)).await
    }

    /// Sends what a rank left in one of its outputs, and has not arrived yet; `told` is sent the progress.
    pub(crate) async fn send(
        &self,
        sending: &SendingOutput<'_>,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<Uploaded, SupplyError> {
        let SendingOutput { name, output, replica, dir, owner } = *sending;
        let mut to = self.target(output, &replica.job, owner).await?;
        if replica.rank > 0 {
            let (UploadTarget::Store { path, .. } | UploadTarget::Folder { path, .. }) = &mut to;
            let below = format!("{path}/rank-{}", replica.rank);
            below.trim_start_matches('/').clone_into(path);
        }
        let folder = dir.out().join(name);
        let upload = DataUpload {
            base: dir.data().to_owned(),
            folder: folder.strip_prefix(dir.data()).unwrap_or(&folder).to_owned(),
            file: output.is_file.then(|| name.to_owned()),
            to,
            notes: dir.path().join(NOTES).join(name),
        };
        Ok(self.cache.upload(&upload, told).await?)
    }

    /// Removes what is above the limit, and more until `wanted` bytes are freed.
    async fn evict(&self, wanted: u64) {
        let cache = self.cache.clone();
        let kept = match blocking(move || cache.list()).await {
            Ok(kept) => kept,
            Err(error) => return warn!(%error, "cannot list kept data"),
        };
        let candidate = |index: usize| Candidate {
            key: &kept[index].key,
            bytes: kept[index].bytes,
            used: kept[index].used,
            spared: kept[index].is_in_use,
        };
        let candidates: Vec<_> = (0..kept.len()).map(candidate).collect();
        let now = SystemTime::UNIX_EPOCH + Duration::from_millis(self.clock.now().0);
        let limits = EnvLimits { size: self.size, age: Duration::MAX };
        let mut victims = choose_victims(&candidates, &limits, now, wanted);
        let stale = kept.iter().filter(|data| !data.is_in_use && DataCache::is_stale(data, now));
        victims.extend(stale.map(|data| data.key.clone()));
        for data in kept.iter().filter(|data| victims.contains(&data.key)) {
            match self.cache.remove(&data.key).await {
                Ok(true) => {
                    info!(url = data.url, freed = size::binary(data.bytes), "removed data to make room")
                }
                Ok(false) => {}
                Err(error) => warn!(url = data.url, %error, "cannot remove data"),
            }
        }
    }
}

impl Reclaimer for Data {
    fn tidy(&self) -> BoxFuture<'_, Duration> {
        async {
            self.evict(0).await;
            TIDY_EVERY
        }
        .boxed()
    }

    fn reclaim(&self, bytes: u64) -> BoxFuture<'_, ()> {
        self.evict(bytes).boxed()
    }
}

/// Whether what the input asks for is at this path.
fn check(path: &Path, is_file: bool) -> Result<(), SupplyError> {
    let found = path.metadata().map_err(|source| SupplyError::Nothing { path: path.to_owned(), source })?;
    match found.is_dir() == is_file {
        true => Err(SupplyError::OtherKind { path: path.to_owned(), is_file: !is_file }),
        false => Ok(()),
    }
}
