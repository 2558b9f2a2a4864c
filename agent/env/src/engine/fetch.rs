//! Fetching packages into the cache.
//!
//! Owns downloads: several at once, each watched, and restarted when it stalls. Hides archives.
//!
//! Invariants: a fetched package has the digest and size that were announced, and passed the inspection, before it
//! gets its final name; the holder of a [`CachedPackage`] has the package until it is dropped.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agent_env::{Failure, FailureKind, Phase, Progress};
use agent_model::causes;
use agent_model::size::binary;
use futures_util::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use rattler_cache::package_cache::{CacheKey, PackageCache};
use rattler_conda_types::package::{CondaArchiveType, DistArchiveType};
use rattler_conda_types::{PackageRecord, RepoDataRecord};
use rattler_package_streaming::{ExtractError, ExtractResult};
use tokio::io::AsyncRead;
use tokio_util::io::StreamReader;
use url::Url;

use super::cache::{Cache, PackageDir, Wanted, Whole};
use super::net::{self, Fault, Net};
use super::tell::{Teller, busy};
use super::{Advise, Done, disk, failed, inspect};

/// How many packages are fetched at once.
const AT_ONCE: usize = 8;

/// How often a package is fetched before the build fails.
const ATTEMPTS: u32 = 3;

/// Pause between two checks of how much an archive has unpacked to.
const LOOK: Duration = Duration::from_millis(200);

/// Pause between two tries of a lock that another process holds.
const PAUSE: Duration = Duration::from_millis(50);

/// How long to wait for a package of the same name that others use and that is not the wanted one. Without a limit
/// two builds could wait for each other for ever.
const LONGEST_CONTENTION: Duration = Duration::from_secs(300);

/// Bytes that must stay free on the disk of the cache.
const RESERVE: u64 = 32 << 20;

/// A package in the cache that is locked against removal.
pub(crate) struct CachedPackage {
    /// Its directory.
    pub(crate) place: PackageDir,
    /// What is known of it.
    pub(crate) whole: Whole,
    /// The record it was requested by, completed from the package itself if it was only listed in a lock file.
    pub(crate) record: RepoDataRecord,
    _lock: File,
}

/// Fetches packages.
pub(crate) struct Fetcher {
    cache: Cache,
    library: PackageCache,
    net: Arc<Net>,
    teller: Arc<Teller>,
    offline: bool,
    meter: Meter,
}

#[derive(Default)]
struct Meter {
    done: AtomicU64,
    total: AtomicU64,
    bytes: AtomicU64,
    bytes_total: AtomicU64,
}

/// The error that is returned to the library for a failed download; the [`Job`] keeps the reason.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the download failed")]
struct Failed;

impl Fetcher {
    /// Fetches into a cache.
    pub(crate) fn into_cache(cache: Cache, net: Arc<Net>, teller: Arc<Teller>, offline: bool) -> Self {
        let library = PackageCache::new(&cache.pkgs);
        Self { cache, library, net, teller, offline, meter: Meter::default() }
    }

    /// Makes sure that all packages are in the cache.
    pub(crate) async fn all(&self, records: Vec<RepoDataRecord>) -> Done<Vec<CachedPackage>> {
        for record in &records {
            inspect::record(&record.package_record).map_err(|why| refused(&record.url, &why))?;
        }
        // Packages that are there are only checked; so the missing ones are known, and can be counted.
        let looks = futures_util::stream::iter(records).map(|record| self.look(record)).buffer_unordered(32);
        let looked: Vec<Result<CachedPackage, RepoDataRecord>> = looks.try_collect().await?;
        let (mut held, mut missing) = (Vec::new(), Vec::new());
        for outcome in looked {
            match outcome {
                Ok(package) => held.push(package),
                Err(record) => missing.push(record),
            }
        }
        if missing.is_empty() {
            return Ok(held);
        }
        self.announce(&missing)?;
        // Large ones first, so that a small one is the last to end.
        missing.sort_by_key(|record| std::cmp::Reverse(record.package_record.size.unwrap_or(0)));
        let fetches =
            futures_util::stream::iter(missing).map(|record| self.ensure(record)).buffer_unordered(AT_ONCE);
        held.extend(fetches.try_collect::<Vec<_>>().await?);
        self.teller.mark(self.progress(""));
        Ok(held)
    }

    /// Makes sure that one package is in the cache.
    pub(crate) async fn ensure(&self, record: RepoDataRecord) -> Done<CachedPackage> {
        let place = self.cache.place(&record.package_record);
        let name = place.name.clone();
        let waiting =
            || self.teller.mark(busy(Phase::Waiting, format!("for {name}, which another build is fetching")));
        let trouble = |error: io::Error| disk::trouble(&self.cache.pkgs, &format!("keeping {name}"), &error);
        let lock = place.lock_file().map_err(trouble)?;
        let mut waiting = Some(waiting);
        let mut contended = Duration::ZERO;
        loop {
            if agent_fs::try_lock_shared(&lock).map_err(trouble)? {
                if let Some(whole) = look_at(&place, &record).await {
                    place.touch(&lock);
                    self.meter.done.fetch_add(1, Ordering::Relaxed);
                    self.teller.pass(|| self.progress(&name));
                    return held(place, whole, record, lock);
                }
                lock.unlock().map_err(trouble)?;
                if agent_fs::try_lock(&lock).map_err(trouble)? {
                    self.replace(&record, &place, &lock).await?;
                    lock.unlock().map_err(trouble)?;
                    continue;
                }
                // Others use the package that is there, and it is another archive of the same name.
                contended += PAUSE;
            } else {
                contended = Duration::ZERO;
            }
            if contended > LONGEST_CONTENTION {
                return Err(failed(
                    FailureKind::Network,
                    format!("other builds use another package of the name {name}, from another channel"),
                )
                .advise("Try again when they are done."));
            }
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Fetches a package whose exclusive lock is held, unless another build fetched it meanwhile.
    async fn replace(&self, record: &RepoDataRecord, place: &PackageDir, lock: &File) -> Done<()> {
        if look_at(place, record).await.is_some() {
            return Ok(());
        }
        place.evict().map_err(|error| disk::trouble(&place.dir, "removing a broken package", &error))?;
        // Before it is there: what is noted must never be older than what is there.
        place
            .note_origin(lock, &record.url)
            .map_err(|error| disk::trouble(&place.dir, "noting where a package is from", &error))?;
        self.fetch(record, place).await?;
        // A fetched package is checked like any other; if it is not whole, the archive does not contain the files
        // that it lists.
        match look_at(place, record).await {
            Some(_) => Ok(()),
            None => Err(failed(
                FailureKind::Damaged,
                format!("the package {} does not hold the files it lists", place.name),
            )),
        }
    }

    /// The package, if it is there and no build is changing it.
    async fn look(&self, record: RepoDataRecord) -> Done<Result<CachedPackage, RepoDataRecord>> {
        let place = self.cache.place(&record.package_record);
        let lock = place
            .lock_file()
            .map_err(|error| disk::trouble(&self.cache.pkgs, &format!("keeping {}", place.name), &error))?;
        if lock.try_lock_shared().is_err() {
            return Ok(Err(record));
        }
        match look_at(&place, &record).await {
            Some(whole) => {
                place.touch(&lock);
                held(place, whole, record, lock).map(Ok)
            }
            None => Ok(Err(record)),
        }
    }

    fn announce(&self, missing: &[RepoDataRecord]) -> Done<()> {
        let size: u64 = missing.iter().filter_map(|record| record.package_record.size).sum();
        if self.offline && missing.iter().any(|record| record.url.scheme() != "file") {
            let names: Vec<_> =
                missing.iter().take(5).map(|r| r.package_record.name.as_normalized()).collect();
            let more = missing.len().saturating_sub(names.len());
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            return Err(failed(
                FailureKind::Network,
                format!(
                    "the node is offline, and these packages are not in its cache: {}{more}",
                    names.join(", ")
                ),
            )
            .advise("Build the environment once with `offline` off."));
        }
        if let Some(free) = disk::free(&self.cache.pkgs)
            && free < size.saturating_mul(4).saturating_add(RESERVE)
        {
            let doing = format!(
                "{} of packages take about {} with what they hold, {} must stay free, and {} are free",
                binary(size),
                binary(size.saturating_mul(4)),
                binary(RESERVE),
                binary(free)
            );
            return Err(disk::full(&self.cache.pkgs, &doing));
        }
        self.meter.total.store(missing.len() as u64, Ordering::Relaxed);
        self.meter.bytes_total.store(size, Ordering::Relaxed);
        self.teller.mark(self.progress(""));
        Ok(())
    }

    fn progress(&self, what: &str) -> Progress {
        let Meter { done, total, bytes, bytes_total } = &self.meter;
        let total = total.load(Ordering::Relaxed);
        let bytes_total = bytes_total.load(Ordering::Relaxed);
        Progress {
            phase: Phase::Download,
            done: done.load(Ordering::Relaxed).min(total),
            total,
            bytes: bytes.load(Ordering::Relaxed).min(bytes_total),
            bytes_total,
            what: what.to_owned(),
        }
    }

    /// Fetches a package whose exclusive lock is held.
    async fn fetch(&self, record: &RepoDataRecord, place: &PackageDir) -> Done<()> {
        let mut attempt = 1;
        loop {
            let before = self.meter.bytes.load(Ordering::Relaxed);
            let Err(failure) = self.once(record, place).await else { return Ok(()) };
            let again = match failure.kind {
                FailureKind::Network => attempt < ATTEMPTS,
                // Damaged on the way, or at a mirror: each mirror gets one try.
                FailureKind::Damaged => (attempt as usize) < self.net.routes.of(&record.url).len().max(2),
                _ => false,
            };
            if !again {
                return Err(failure);
            }
            self.teller.say(format!("{}; it is fetched anew", failure.message));
            self.meter.bytes.fetch_min(before, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(300 << attempt)).await;
            attempt += 1;
        }
    }

    async fn once(&self, record: &RepoDataRecord, place: &PackageDir) -> Done<()> {
        let job = Arc::new(Job {
            url: record.url.clone(),
            record: record.package_record.clone(),
            kind: record.identifier.archive_type,
            name: place.name.clone(),
            pkgs: self.cache.pkgs.clone(),
            net: self.net.clone(),
            broken: Mutex::default(),
            from: Mutex::default(),
            received: AtomicU64::new(0),
            length: AtomicU64::new(0),
        });
        let (told, watched) = (self.teller.clone(), job.clone());
        let key = CacheKey::from(&record.package_record);
        let fetched = self.library.get_or_fetch(
            key,
            move |destination: PathBuf| {
                let job = job.clone();
                async move { job.run(&destination).await.map(|done| Some(done.sha256)).map_err(|_| Failed) }
            },
            None,
        );
        let mut fetched = std::pin::pin!(fetched);
        let mut counted = 0;
        let outcome = loop {
            let tick = tokio::time::timeout(Duration::from_millis(100), &mut fetched).await;
            let received = watched.received.load(Ordering::Relaxed);
            self.meter.bytes.fetch_add(received - counted, Ordering::Relaxed);
            counted = received;
            match tick {
                Ok(outcome) => break outcome,
                Err(_) => told.pass(|| self.progress(&place.name)),
            }
        };
        let Err(error) = outcome else { return Ok(()) };
        if let Some(from) = watched.from.lock().take() {
            self.net.routes.shun(&from);
        }
        // The reason kept by the job is nearer to the cause than the library's error.
        Err(watched
            .failure()
            .unwrap_or_else(|| disk::trouble(&self.cache.pkgs, &format!("keeping {}", place.name), &error)))
    }
}

async fn look_at(place: &PackageDir, record: &RepoDataRecord) -> Option<Whole> {
    let (place, digest) = (place.clone(), record.package_record.sha256);
    let wanted =
        digest.map_or_else(|| Wanted::From(record.url.clone()), |digest| Wanted::Digest(digest.into()));
    tokio::task::spawn_blocking(move || place.check(&wanted)).await.ok().flatten()
}

/// The package with its own description: a lock file gives only its name.
fn held(place: PackageDir, whole: Whole, mut record: RepoDataRecord, lock: File) -> Done<CachedPackage> {
    let known = &record.package_record;
    let own = &whole.package.index;
    if own.name.as_normalized() != known.name.as_normalized()
        || own.version != known.version
        || own.build != known.build
    {
        return Err(failed(
            FailureKind::Damaged,
            format!(
                "the package {} says that it is {}-{}-{}",
                place.name,
                own.name.as_normalized(),
                own.version,
                own.build
            ),
        ));
    }
    if known.depends.is_empty() {
        let (size, md5, subdir) = (known.size, known.md5, known.subdir.clone());
        // A package whose description is incomplete keeps the record it was requested by.
        if let Ok(read) = PackageRecord::from_index_json(own.clone(), size, known.sha256, md5) {
            record.package_record = PackageRecord { subdir, ..read };
        }
    }
    if record.package_record.sha256.is_none() {
        record.package_record.sha256 = whole.sha256.map(Into::into);
    }
    Ok(CachedPackage { place, whole, record, _lock: lock })
}

fn refused(url: &Url, why: &inspect::PackageRefused) -> Failure {
    let file = url.path_segments().and_then(Iterator::last).unwrap_or_default();
    failed(FailureKind::Refused, format!("the package {file} is not installed: {why}"))
        .advise("No sound package is like that: use another version or channel, and tell whoever keeps it.")
}

/// One download.
struct Job {
    url: Url,
    record: PackageRecord,
    kind: DistArchiveType,
    name: String,
    pkgs: PathBuf,
    net: Arc<Net>,
    /// The error while the body was read, or the failure it led to.
    broken: Mutex<Option<Broken>>,
    /// The mirror that sends it.
    from: Mutex<Option<Url>>,
    received: AtomicU64,
    /// Length of the archive as the server gives it, in bytes. A lock file does not contain it.
    length: AtomicU64,
}

#[derive(Clone)]
enum Broken {
    Fault(Fault),
    TooLong,
    Failure(Failure),
}

impl Job {
    async fn run(&self, destination: &Path) -> Done<ExtractResult> {
        let outcome = self.unpack(destination).await;
        if let Err(failure) = &outcome {
            self.breaks(Broken::Failure(failure.clone()));
        }
        outcome
    }

    fn breaks(&self, broken: Broken) {
        *self.broken.lock() = Some(broken);
    }

    fn failure(&self) -> Option<Failure> {
        match &*self.broken.lock() {
            Some(Broken::Failure(failure)) => Some(failure.clone()),
            _ => None,
        }
    }

    async fn unpack(&self, destination: &Path) -> Done<ExtractResult> {
        use rattler_package_streaming::tokio::async_read::{
            extract_conda, extract_conda_via_buffering, extract_tar_bz2,
        };
        let DistArchiveType::Conda(kind) = self.kind else {
            return Err(failed(
                FailureKind::Refused,
                format!("{} is a wheel, not a conda package", self.name),
            ));
        };
        let extraction = async {
            let reader = self.open().await?;
            let first = match kind {
                CondaArchiveType::TarBz2 => extract_tar_bz2(reader, destination).await,
                CondaArchiveType::Conda => extract_conda(reader, destination).await,
            };
            match first {
                // Some archives give the length of a part only after it, and cannot be unpacked while they arrive.
                Err(ExtractError::ZipError(error))
                    if error.to_string().contains("file length is not available") =>
                {
                    self.received.store(0, Ordering::Relaxed);
                    extract_conda_via_buffering(self.open().await?, destination).await
                }
                first => first,
            }
            .map_err(|error| self.explain(&error))
        };
        let result = tokio::select! {
            result = extraction => result?,
            failure = self.watch(destination) => return Err(failure),
        };
        self.compare(&result)?;
        let (dir, size) = (destination.to_owned(), result.total_size);
        tokio::task::spawn_blocking(move || inspect::extracted(&dir, inspect::limit(size), size))
            .await
            .map_err(|error| failed(FailureKind::Other, format!("{}: {error}", self.name)))?
            .map_err(|why| refused(&self.url, &why))?;
        Ok(result)
    }

    fn size(&self) -> u64 {
        self.record
            .size
            .unwrap_or_else(|| self.length.load(Ordering::Relaxed).max(self.received.load(Ordering::Relaxed)))
    }

    /// Notes how long the archive is, and checks that there is room for it.
    fn announced(&self, length: u64) -> Done<()> {
        self.length.store(length, Ordering::Relaxed);
        let needed = length.saturating_mul(4).saturating_add(RESERVE);
        if disk::free(&self.pkgs).is_some_and(|free| free < needed) {
            let doing = format!("{} and what it holds need about {}", self.name, binary(needed));
            return Err(disk::full(&self.pkgs, &doing));
        }
        Ok(())
    }

    /// The bytes of the archive, counted; an error meanwhile is kept in the job.
    async fn open(&self) -> Done<Box<dyn AsyncRead + Send + Unpin + '_>> {
        if self.url.scheme() == "file" {
            let path = self.url.to_file_path().map_err(|()| {
                failed(FailureKind::Spec, format!("`{}` is no path of this machine", self.url))
            })?;
            let file = tokio::fs::File::open(&path).await.map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    failed(FailureKind::NotFound, format!("the package {} is not there", path.display()))
                }
                _ => disk::trouble(&path, "reading a package", &error),
            })?;
            if let Ok(meta) = file.metadata().await {
                self.announced(meta.len())?;
            }
            return Ok(Box::new(file));
        }
        let answer = self.net.client.client().get(self.url.clone()).send().await;
        let answer =
            answer.map_err(|error| self.about(&self.net.explain(&self.net.fault(&self.url, &error))))?;
        if !answer.status().is_success() {
            let fault = self.net.of_status(&self.url, answer.status());
            return Err(self.about(&self.net.explain(&fault)));
        }
        self.announced(answer.content_length().unwrap_or(0))?;
        *self.from.lock() = Some(answer.url().clone());
        let bytes = answer.bytes_stream().map(move |chunk| match chunk {
            Ok(bytes) => {
                let received =
                    self.received.fetch_add(bytes.len() as u64, Ordering::Relaxed) + bytes.len() as u64;
                if self.record.size.is_some_and(|size| received > size) {
                    self.breaks(Broken::TooLong);
                    return Err(io::Error::other("too long"));
                }
                Ok(bytes)
            }
            Err(error) => {
                self.breaks(Broken::Fault(net::of_error(&self.url, &error)));
                Err(io::Error::other("broken"))
            }
        });
        Ok(Box::new(StreamReader::new(Box::pin(bytes))))
    }

    fn about(&self, failure: &Failure) -> Failure {
        Failure { message: format!("the package {}: {}", self.name, failure.message), ..failure.clone() }
    }

    fn explain(&self, error: &ExtractError) -> Failure {
        match self.broken.lock().take() {
            Some(Broken::Fault(fault)) => return self.about(&self.net.explain(&fault)),
            Some(Broken::TooLong) => return self.damaged("it is longer than the channel says"),
            Some(Broken::Failure(failure)) => return failure,
            None => {}
        }
        if disk::is_full(error) {
            return disk::full(&self.pkgs, &format!("unpacking {}", self.name));
        }
        let text = causes::tell(error);
        if text.contains("outside of destination") || text.contains("escapes the destination") {
            let why = inspect::PackageRefused::Escape;
            return refused(&self.url, &why);
        }
        self.damaged(&text)
    }

    fn damaged(&self, why: &str) -> Failure {
        failed(FailureKind::Damaged, format!("the package {} is damaged: {why}", self.name))
            .advise("Either the server has another file than its channel says, or something on the way changes files.")
    }

    fn compare(&self, result: &ExtractResult) -> Done<()> {
        let Self { record, .. } = self;
        if let Some(sha256) = record.sha256 {
            if sha256 != result.sha256 {
                return Err(self.damaged("its SHA-256 is not the one that was announced"));
            }
        } else if record.md5.is_some_and(|md5| md5 != result.md5) {
            return Err(self.damaged("its MD5 is not the one that was announced"));
        }
        if record.size.is_some_and(|size| size != result.total_size) {
            return Err(self.damaged("its size is not the one that was announced"));
        }
        Ok(())
    }

    /// Returns a failure once an archive has unpacked to too much, or the disk is nearly full.
    async fn watch(&self, destination: &Path) -> Failure {
        loop {
            tokio::time::sleep(LOOK).await;
            let limit = inspect::limit(self.size());
            let dir = destination.to_owned();
            let measured = tokio::task::spawn_blocking(move || disk::measure(&dir)).await;
            if let Ok(Ok((bytes, _))) = measured
                && bytes > limit
            {
                return refused(&self.url, &inspect::PackageRefused::Bomb { limit, size: self.size() });
            }
            if disk::free(&self.pkgs).is_some_and(|free| free < RESERVE / 4) {
                return disk::full(&self.pkgs, &format!("unpacking {}", self.name));
            }
        }
    }
}
