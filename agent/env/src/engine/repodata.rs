//! The package lists of channels.
//!
//! Owns the requests to the channels and their cache. Hides the formats of these lists.
//!
//! Invariants: no content of a channel makes this process run a program or ask another channel; a list that cannot be
//! read is removed from the cache.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_env::{Failure, FailureKind, Phase, Progress};
use agent_model::causes;
use agent_model::words::count;
use rattler_conda_types::Subdir;
use rattler_repodata_gateway::fetch::CacheAction;
use rattler_repodata_gateway::{
    ChannelConfig, ChannelRelationsMode, DownloadReporter, Gateway, GatewayError, RepoData, Reporter,
    SourceConfig, SubdirSelection,
};
use url::Url;

use super::cache::Cache;
use super::net::Net;
use super::specs::Wanted;
use super::tell::{Teller, busy};
use super::{Advise, Done, disk, failed};

/// The records in the channels of a request for every package that may be needed.
pub(crate) async fn read(
    wanted: &Wanted,
    cache: &Path,
    offline: bool,
    net: &Net,
    teller: &Arc<Teller>,
) -> Done<Vec<RepoData>> {
    teller.mark(busy(Phase::Repodata, ""));
    let _fetching = share_lists(cache)?;
    let cache_action = if offline { CacheAction::ForceCacheOnly } else { CacheAction::CacheOrFetch };
    let gateway = Gateway::builder()
        .with_client(net.client.clone())
        .with_cache_dir(cache.join("repodata"))
        .with_channel_config(ChannelConfig {
            default: SourceConfig { cache_action, ..SourceConfig::default() },
            ..ChannelConfig::default()
        })
        .with_max_concurrent_requests(16)
        .finish();
    // Asked for a specification, the library leaves out records that do not match it; but a package in a better
    // channel hides those of the same name in other channels even if none of its records matches.
    let asked = match wanted.channels.len() {
        1 => wanted.specs.clone(),
        _ => wanted.names(),
    };
    let counter = Counter { teller: teller.clone(), started: AtomicU64::new(0), done: AtomicU64::new(0) };
    let answer = gateway
        .query(wanted.channels.clone(), [wanted.subdir, Subdir::NoArch], asked)
        .recursive(true)
        .channel_relations(ChannelRelationsMode::Disabled)
        .with_reporter(counter)
        .execute()
        .await;
    match answer {
        Ok(output) => {
            let packages: usize = output.repodata.iter().map(RepoData::len).sum();
            teller
                .mark(busy(Phase::Repodata, format!("{} may be needed", count(packages as u64, "package"))));
            Ok(output.repodata)
        }
        Err(error) => {
            let failure = explain(&error, cache, net, offline);
            if failure.kind == FailureKind::Damaged {
                for channel in &wanted.channels {
                    // An entry that cannot be removed is found again next time.
                    let _ = gateway.clear_repodata_cache(
                        channel,
                        SubdirSelection::All,
                        rattler_repodata_gateway::CacheClearMode::InMemoryAndDisk,
                    );
                }
            }
            Err(failure)
        }
    }
}

/// Keeps a sweep from removing lists that are being fetched.
fn share_lists(cache: &Path) -> Done<std::fs::File> {
    let lock = Cache::open(cache).and_then(|cache| cache.lists());
    let shared = lock.and_then(|lock| lock.lock_shared().map(|()| lock)); // a sweep holds it for a moment
    shared.map_err(|error| disk::trouble(cache, "locking what channels offer", &error))
}

fn explain(error: &GatewayError, cache: &Path, net: &Net, offline: bool) -> Failure {
    if disk::is_full(error) {
        return disk::full(cache, "keeping what channels offer");
    }
    let text = net.scrub(&causes::tell(error));
    if offline
        && !matches!(error, GatewayError::SubdirNotFoundError(e) if e.channel.base_url.url().scheme() == "file")
    {
        return failed(FailureKind::Network, format!("what the channels offer is not in the cache: {text}"))
            .advise("The node is configured to be offline: build it once with `offline` off, or give a lock of packages that are in the cache.");
    }
    // The network's fault is nearer to the cause than the library's error.
    if let Some(failure) = net.blame() {
        return failure;
    }
    if text.contains("timed out") {
        return failed(
            FailureKind::Network,
            format!("a channel stopped sending its list of packages: {text}"),
        );
    }
    match error {
        GatewayError::SubdirNotFoundError(missing) => {
            let url = net.scrub(missing.channel.base_url.as_str());
            failed(
                FailureKind::NotFound,
                format!("the channel {url} is not there: it has no `{}` packages list", missing.subdir),
            )
            .advise("Check its name and spelling. A channel that exists has at least noarch/repodata.json.")
        }
        GatewayError::IoError(..) | GatewayError::ShardHashMismatch(_) => {
            failed(FailureKind::Damaged, format!("what a channel offers cannot be read: {text}"))
                .advise("It is asked anew next time; if that does not help, the channel is broken.")
        }
        GatewayError::FetchRepoDataError(_)
        | GatewayError::ReqwestError(_)
        | GatewayError::ReqwestMiddlewareError(_) => failed(FailureKind::Network, text),
        _ => failed(FailureKind::Other, text),
    }
}

/// Turns what the library reports into progress.
struct Counter {
    teller: Arc<Teller>,
    started: AtomicU64,
    done: AtomicU64,
}

impl Reporter for Counter {
    fn download_reporter(&self) -> Option<&dyn DownloadReporter> {
        Some(self)
    }
}

impl Counter {
    fn progress(&self, url: &Url, bytes: u64, total: u64) -> Progress {
        let channel = url.path().rsplit('/').nth(1).unwrap_or_default();
        Progress {
            phase: Phase::Repodata,
            done: self.done.load(Ordering::Relaxed),
            total: self.started.load(Ordering::Relaxed),
            bytes,
            bytes_total: total,
            what: format!("{} {channel}", super::net::host(url)),
        }
    }
}

impl DownloadReporter for Counter {
    fn on_download_start(&self, url: &Url) -> usize {
        self.started.fetch_add(1, Ordering::Relaxed);
        self.teller.pass(|| self.progress(url, 0, 0));
        0
    }

    fn on_download_progress(&self, url: &Url, _index: usize, bytes: usize, total: Option<usize>) {
        self.teller.pass(|| self.progress(url, bytes as u64, total.unwrap_or(0) as u64));
    }

    fn on_download_complete(&self, _url: &Url, _index: usize) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }
}
