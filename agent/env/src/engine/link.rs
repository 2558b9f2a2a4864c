//! Linking packages into the environment.
//!
//! Owns the installer and its options. Hides that the library locks a whole cache while it links: it gets a small
//! cache of the environment's own to lock, and the shared one read-only, where each package is locked already.
//!
//! Invariants: no program of a package is run; no link leads out of the environment; files are hard links of the
//! cache's files only if the request allows it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agent_env::{Failure, FailureKind, Phase, Progress};
use agent_model::causes;
use agent_model::words;
use rattler::install::{
    ExternalSymlinkPolicy, Installer, InstallerError, LinkOptions, Reporter, Transaction,
};
use rattler_cache::package_cache::{PackageCache, PackageCacheLayer};
use rattler_conda_types::{MatchSpec, PrefixRecord, RepoDataRecord, Subdir};

use super::cache::Cache;
use super::net::Net;
use super::tell::Teller;
use super::{Advise, Done, disk, failed};

/// Temporary directory of an environment that is being built; it also marks one as unfinished.
pub(crate) const WORKSHOP: &str = ".agent-env";

/// What is linked, and how.
pub(crate) struct Plan<'a> {
    /// The target.
    pub(crate) prefix: &'a Path,
    /// The source.
    pub(crate) cache: &'a Cache,
    /// The packages, each of them locked.
    pub(crate) records: Vec<RepoDataRecord>,
    /// The specifications, which are noted with the packages.
    pub(crate) specs: Vec<MatchSpec>,
    /// For which platform.
    pub(crate) subdir: Subdir,
    /// Whether files may be hard links of the cache's files.
    pub(crate) hard_links: bool,
}

/// Why linking failed.
pub(crate) enum Unlinked {
    /// Perhaps because the cached copy of this package is damaged.
    Package(String, Failure),
    /// For another reason.
    Otherwise(Failure),
}

/// Links packages.
pub(crate) async fn link(plan: Plan<'_>, teller: &Arc<Teller>) -> Result<(), Unlinked> {
    let Plan { prefix, cache, records, specs, subdir, hard_links } = plan;
    let layers = [PackageCacheLayer::new(prefix.join(WORKSHOP)), PackageCacheLayer::new(&cache.pkgs)];
    let scripts: Vec<String> = records.iter().filter_map(|record| post_link(cache, record)).collect();
    for name in scripts {
        teller.say(format!("{name} has a script to be run after linking; such scripts are not run"));
    }
    let total = records.len() as u64;
    let counter = Counter { teller: teller.clone(), total, done: AtomicU64::new(0) };
    teller.mark(counter.progress(""));
    let outcome = Installer::new()
        .with_installed_packages(Vec::new())
        .with_package_cache(PackageCache::from_layers(layers, false))
        .with_download_client(Net::none())
        .with_target_platform(subdir)
        .with_execute_link_scripts(false)
        .with_external_symlink_policy(ExternalSymlinkPolicy::Deny)
        .with_link_options(LinkOptions {
            allow_symbolic_links: Some(true),
            allow_hard_links: Some(hard_links),
            allow_ref_links: None,
        })
        .with_requested_specs(specs)
        .with_reporter(counter)
        .install(prefix, records)
        .await;
    match outcome {
        Ok(result) => {
            let clashes = result.clobbered_paths.len();
            if clashes > 0 {
                let paths: Vec<_> =
                    result.clobbered_paths.keys().take(5).map(|path| path.display().to_string()).collect();
                let several = format!("{} of more than one package", words::count(clashes as u64, "file"));
                teller.say(format!("{several}: {}", paths.join(", ")));
            }
            teller.mark(Progress {
                phase: Phase::Link,
                done: total,
                total,
                bytes: 0,
                bytes_total: 0,
                what: String::new(),
            });
            Ok(())
        }
        Err(error) => Err(explain(&error, prefix)),
    }
}

fn post_link(cache: &Cache, record: &RepoDataRecord) -> Option<String> {
    let name = record.package_record.name.as_normalized();
    let script = cache.place(&record.package_record).dir.join(format!("bin/.{name}-post-link.sh"));
    script.exists().then(|| name.to_owned())
}

fn explain(error: &InstallerError, prefix: &Path) -> Unlinked {
    if disk::is_full(error) {
        return Unlinked::Otherwise(disk::full(prefix, "linking packages"));
    }
    let text = causes::tell(error);
    let refused = |hint: &str| Unlinked::Otherwise(failed(FailureKind::Refused, text.clone()).advise(hint));
    if text.contains("outside") {
        return refused("No sound package is like that: use another version or channel.");
    }
    if text.contains("no python version specified") {
        return Unlinked::Otherwise(
            failed(FailureKind::Unsatisfiable, "a package needs Python, and the environment has none")
                .advise("Add `python`."),
        );
    }
    if text.to_lowercase().contains("prefix") && text.contains("long") {
        return refused(
            "The path of the environment is too long for this package: let the node keep environments in a shorter one.",
        );
    }
    match error {
        InstallerError::LinkError(name, _) | InstallerError::FailedToFetch(name, _) => {
            Unlinked::Package(name.clone(), failed(FailureKind::Other, text))
        }
        InstallerError::UnsafePackageRecord(_) => Unlinked::Otherwise(failed(FailureKind::Refused, text)),
        _ => Unlinked::Otherwise(failed(FailureKind::Other, text)),
    }
}

/// Empties a half-built environment, but keeps the mark that it is one.
pub(crate) async fn empty(prefix: &Path) -> Done<()> {
    let trouble = |error: std::io::Error| disk::trouble(prefix, "emptying what was half made", &error);
    // Work that began before a failure is not stopped by it; it soon ends by itself.
    let mut before = u64::MAX;
    for _ in 0..50 {
        let now = count(prefix);
        if now == before {
            break;
        }
        before = now;
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    for entry in std::fs::read_dir(prefix).map_err(trouble)? {
        let entry = entry.map_err(trouble)?;
        let removed = match entry.file_type().map_err(trouble)?.is_dir() {
            _ if entry.file_name() == WORKSHOP => Ok(()),
            true => std::fs::remove_dir_all(entry.path()),
            false => std::fs::remove_file(entry.path()),
        };
        removed.map_err(trouble)?;
    }
    Ok(())
}

fn count(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| {
            1 + if entry.file_type().is_ok_and(|kind| kind.is_dir()) { count(&entry.path()) } else { 0 }
        })
        .sum()
}

/// Makes readable for all users what the library wrote for its owner alone.
pub(crate) fn open_records(prefix: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let records: Vec<PathBuf> =
        std::fs::read_dir(prefix.join("conda-meta"))?.flatten().map(|e| e.path()).collect();
    for record in records {
        std::fs::set_permissions(record, std::fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Turns what the library reports into progress.
struct Counter {
    teller: Arc<Teller>,
    total: u64,
    done: AtomicU64,
}

impl Counter {
    fn progress(&self, what: &str) -> Progress {
        Progress {
            phase: Phase::Link,
            done: self.done.load(Ordering::Relaxed),
            total: self.total,
            bytes: 0,
            bytes_total: 0,
            what: what.to_owned(),
        }
    }
}

impl Reporter for Counter {
    fn on_transaction_start(&self, _: &Transaction<PrefixRecord, RepoDataRecord>) {}
    fn on_transaction_operation_start(&self, _: usize) {}
    fn on_populate_cache_start(&self, _: usize, _: &RepoDataRecord) -> usize {
        0
    }
    fn on_validate_start(&self, _: usize) -> usize {
        0
    }
    fn on_validate_complete(&self, _: usize) {}
    fn on_download_start(&self, _: usize) -> usize {
        0
    }
    fn on_download_progress(&self, _: usize, _: u64, _: Option<u64>) {}
    fn on_download_completed(&self, _: usize) {}
    fn on_populate_cache_complete(&self, _: usize) {}
    fn on_unlink_start(&self, _: usize, _: &PrefixRecord) -> usize {
        0
    }
    fn on_unlink_complete(&self, _: usize) {}
    fn on_link_start(&self, _: usize, record: &RepoDataRecord) -> usize {
        self.teller.pass(|| self.progress(record.package_record.name.as_normalized()));
        0
    }
    fn on_link_complete(&self, _: usize) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.teller.pass(|| self.progress(""));
    }
    fn on_transaction_operation_complete(&self, _: usize) {}
    fn on_transaction_complete(&self) {}
    fn on_post_link_start(&self, _: &str, _: &str) -> usize {
        0
    }
    fn on_post_link_complete(&self, _: usize, _: bool) {}
    fn on_pre_unlink_start(&self, _: &str, _: &str) -> usize {
        0
    }
    fn on_pre_unlink_complete(&self, _: usize, _: bool) {}
}
