//! Builds an environment: from a request to a prefix.
//!
//! Owns the order of the steps. Hides nothing.
//!
//! Invariants: an environment is built in its final place; only a prefix that an earlier attempt left there, and that
//! was never marked ready, is emptied first; packages are locked until they are linked.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use agent_env::{Build, Built, Failure, FailureKind, Phase};
use rattler_conda_types::package::{BuildString, CondaArchiveIdentifier, DistArchiveType};
use rattler_conda_types::{MatchSpec, PackageRecord, RepoDataRecord};

use agent_model::words::count;

use super::cache::Cache;
use super::fetch::{CachedPackage, Fetcher};
use super::link::{self, Plan, Unlinked};
use super::net::Net;
use super::package::WORKSHOP;
use super::tell::{Teller, busy};
use super::{Advise, Done, activate, confine, disk, explicit, failed, repodata, solve, specs, tree};

/// Marks a prefix that was built here; without [`TAKEN`] it may be built again. No package may have a file there.
const MARK: &str = "conda-meta/agent-env";

/// Written by the daemon when it marks an environment ready.
const TAKEN: &str = "ready.json";

/// A build whose directories are there and whose credentials are read.
pub(crate) struct Prepared {
    build: Build,
    cache: Cache,
    net: Arc<Net>,
}

/// Prepares a build, and confines this thread and those that it starts to it.
pub(crate) fn prepare(build: Build) -> Done<Prepared> {
    allow_many_files();
    clear(&build.prefix)?;
    let cache = Cache::open(&build.cache)
        .map_err(|error| disk::trouble(&build.cache, "making the package cache", &error))?;
    let net = Arc::new(Net::of(&build)?);
    confine::confine(&build)?;
    Ok(Prepared { build, cache, net })
}

/// Builds the environment.
pub(crate) async fn build(prepared: Prepared, teller: Arc<Teller>) -> Done<Built> {
    let Prepared { build, cache, net } = prepared;
    let begun = Instant::now();
    let begin = if build.lock.is_some() { Phase::Download } else { Phase::Repodata };
    teller.mark(busy(begin, ""));
    let (records, wanted) = match &build.lock {
        Some(lock) => (locked(lock, &build)?, Vec::new()),
        None => chosen(&build, &net, &teller).await?,
    };
    let chosen_at = begun.elapsed();
    let fetcher = Fetcher::into_cache(cache.clone(), net, teller.clone(), build.offline);
    let held = fetcher.all(records).await.map_err(|failure| located(failure, &build))?;
    let fetched_at = begun.elapsed();
    let held = join(&build, &fetcher, held, &wanted, &teller).await?;
    teller.mark(busy(Phase::Check, ""));
    let linked_at = begun.elapsed();
    let finishing = |error| disk::trouble(&build.prefix, "finishing the environment", &error);
    let activation = activate::without_scripts(&build.prefix, &teller).map_err(finishing)?;
    std::fs::write(build.prefix.join(MARK), b"")
        .and_then(|()| tree::remove(&build.prefix.join(WORKSHOP)))
        .map_err(finishing)?;
    teller.say(format!(
        "{}: chosen after {:.2} s, in the cache after {:.2} s, linked after {:.2} s",
        count(held.len() as u64, "package"),
        chosen_at.as_secs_f64(),
        fetched_at.as_secs_f64(),
        linked_at.as_secs_f64()
    ));
    let python = held.iter().find(|held| held.record.package_record.name.as_normalized() == "python");
    let packages: Vec<_> = held
        .iter()
        .map(|held| {
            (held.record.url.clone(), held.record.package_record.sha256.map(|digest| digest.to_vec()))
        })
        .collect();
    Ok(Built {
        python_version: python.map(|held| held.record.package_record.version.to_string()),
        has_scripts: activate::has_scripts(&build.prefix).map_err(finishing)?,
        activation,
        lock: explicit::print(&build.platform.subdir, &packages),
        packages: u32::try_from(held.len()).unwrap_or(u32::MAX),
        files: held.iter().map(|held| held.whole.package.listed.len() as u64).sum(),
    })
}

/// Each package is kept locked through an open file, and some environments have a thousand packages.
fn allow_many_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Makes the directory of the environment, empty but for what marks it as unfinished.
fn clear(prefix: &Path) -> Done<()> {
    let trouble = |error: std::io::Error| disk::trouble(prefix, "making the environment", &error);
    if !prefix.is_absolute() {
        return Err(failed(FailureKind::Spec, format!("{} is not an absolute path", prefix.display())));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/+@".contains(c);
    if !prefix.to_str().is_some_and(|text| text.chars().all(plain)) {
        return Err(failed(
            FailureKind::Spec,
            format!(
                "environments cannot be in {}: only letters, digits and ._-/ may be in the path",
                prefix.display()
            ),
        )
        .advise("Give the node another directory for environments."));
    }
    std::fs::create_dir_all(prefix).map_err(trouble)?;
    let workshop = prefix.join(WORKSHOP);
    let is_there = |name: &str| prefix.join(name).symlink_metadata().is_ok();
    let is_ours = is_there(WORKSHOP) || is_there(MARK) && !is_there(TAKEN);
    if !is_ours && std::fs::read_dir(prefix).map_err(trouble)?.next().is_some() {
        return Err(failed(FailureKind::Other, format!("{} is not empty", prefix.display())));
    }
    // A builder that worked here before may have left something else there.
    if workshop.symlink_metadata().is_ok_and(|found| !found.is_dir()) {
        std::fs::remove_file(&workshop).map_err(trouble)?;
    }
    // First, so that an end in the middle of emptying leaves the mark of something unfinished.
    std::fs::create_dir_all(workshop).map_err(trouble)?;
    if is_ours { link::empty(prefix) } else { Ok(()) }
}

async fn chosen(
    build: &Build,
    net: &Net,
    teller: &Arc<Teller>,
) -> Done<(Vec<RepoDataRecord>, Vec<MatchSpec>)> {
    let wanted = specs::understand(build)?;
    let asked = wanted.specs.clone();
    let offers = repodata::read(&wanted, &build.cache, build.offline, net, teller).await?;
    let records = solve::choose(wanted, offers, build, teller).await?;
    Ok((records, asked))
}

/// Adds the lines that ask for the package that failed.
fn located(mut failure: Failure, build: &Build) -> Failure {
    if failure.lines.is_empty() {
        let asks = |spec: &&agent_env::Spec| {
            let named = spec.text.rsplit("::").next().unwrap_or_default().trim();
            let end = named
                .find(|c: char| !(c.is_ascii_alphanumeric() || "._-".contains(c)))
                .unwrap_or(named.len());
            !named[..end].is_empty() && failure.message.contains(&format!("package {}-", &named[..end]))
        };
        failure.lines = specs::lines(build.specs.iter().filter(asks).map(|spec| spec.line));
    }
    failure
}

/// The packages of a lock file. Until a package is fetched, only what its address contains is known of it.
fn locked(text: &str, build: &Build) -> Done<Vec<RepoDataRecord>> {
    let list = explicit::parse(text).map_err(|error| failed(FailureKind::Spec, error.to_string()))?;
    specs::subdir(build)?;
    if let Some(platform) = &list.platform
        && *platform != build.platform.subdir
    {
        return Err(failed(
            FailureKind::Spec,
            format!("the lock is for {platform}, and this machine is {}", build.platform.subdir),
        )
        .advise("Make a lock on a machine of this kind, or leave the lock out."));
    }
    list.entries.iter().map(record).collect()
}

fn record(entry: &explicit::ListedPackage) -> Done<RepoDataRecord> {
    let wrong = |why: &str| {
        failed(
            FailureKind::Spec,
            format!("line {} of the lock: {} {why}", entry.line, super::net::scrub_urls(entry.url.as_str())),
        )
    };
    let identifier =
        CondaArchiveIdentifier::try_from_url(&entry.url).ok_or_else(|| wrong("is not a conda package"))?;
    let id = &identifier.identifier;
    let name = id.name.parse().map_err(|_| wrong("has no name of a package"))?;
    let version: rattler_conda_types::VersionWithSource =
        id.version.parse().map_err(|_| wrong("has no version of a package"))?;
    let mut package = PackageRecord::new(name, version, BuildString::new_unchecked(&id.build_string));
    package.sha256 = entry.sha256.map(Into::into);
    package.md5 = entry.md5.map(Into::into);
    let mut segments: Vec<&str> = entry.url.path().split('/').collect();
    segments.pop();
    package.subdir = segments.pop().unwrap_or_default().to_owned();
    let mut channel = entry.url.clone();
    channel.set_path(&format!("{}/", segments.join("/")));
    let archive_type = DistArchiveType::from(identifier.archive_type);
    Ok(RepoDataRecord {
        package_record: package,
        identifier: rattler_conda_types::package::DistArchiveIdentifier::new(
            identifier.identifier.clone(),
            archive_type,
        ),
        url: entry.url.clone(),
        channel: Some(channel.to_string()),
    })
}

/// Links the locked packages. A package that cannot be linked is fetched once more: its copy may be damaged.
async fn join(
    build: &Build,
    fetcher: &Fetcher,
    mut held: Vec<CachedPackage>,
    specs: &[MatchSpec],
    teller: &Arc<Teller>,
) -> Done<Vec<CachedPackage>> {
    let subdir = specs::subdir(build)?;
    let mut again = true;
    loop {
        let (prefix, hard_links) = (build.prefix.as_path(), build.hard_links);
        let plan = Plan { prefix, packages: &held, specs, subdir, hard_links };
        let (at, failure) = match tokio::task::block_in_place(|| link::link(&plan, teller)) {
            Ok(()) => return Ok(held),
            Err(Unlinked::Package(at, failure)) if again => (at, failure),
            Err(Unlinked::Package(_, failure) | Unlinked::Otherwise(failure)) => return Err(failure),
        };
        again = false;
        teller.say(format!("{}; the package is fetched anew", failure.message));
        let broken = held.swap_remove(at);
        held.push(renew(broken, fetcher, &failure).await?);
        link::empty(&build.prefix)?;
    }
}

/// Fetches a package anew, unless another build uses it now and so finds it sound.
async fn renew(broken: CachedPackage, fetcher: &Fetcher, failure: &Failure) -> Done<CachedPackage> {
    let (place, record) = (broken.place.clone(), broken.record.clone());
    drop(broken);
    let lock = place.lock_file().map_err(|error| disk::trouble(&place.dir, "keeping a package", &error))?;
    lock.try_lock().map_err(|_| failure.clone())?;
    place.evict().map_err(|error| disk::trouble(&place.dir, "removing a package", &error))?;
    drop(lock);
    fetcher.ensure(record).await
}
