//! Fetches data into a directory, and goes on there after an interruption.
//!
//! Owns the order of things: what is there ([`source`]), whether it is known already, whether there is room, then file
//! after file, several at a time. Hides retries and how a cut download is resumed.
//!
//! Invariants: what an interrupted fetch left is used only if the data still has the version that is written beside it;
//! a file has the announced length when it is done, or the fetch fails; the data is on the disk before success is
//! reported.

mod source;
mod target;
pub(crate) mod upload;

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use agent_env::{Failure, FailureKind, Fetch, Fetched, Phase, Progress};
use agent_model::size;
use futures_util::{StreamExt, TryStreamExt};
use sha2::{Digest, Sha256};

use self::source::{DataSource, Object, Trouble};
use super::net::{LONGEST_WAIT, ROUNDS};
use super::tell::{Teller, busy};
use super::{Advise, Done, disk, failed};

/// How many files are fetched at a time.
const AT_ONCE: usize = 8;

/// The file with the version of the data that an unfinished fetch left.
const VERSION_FILE: &str = "version";

/// Fetches data, unless it still has the version that is known.
pub(crate) async fn fetch(fetch: Fetch, teller: Arc<Teller>) -> Done<Fetched> {
    teller.mark(busy(Phase::Data, &fetch.url));
    let stall = Duration::from_secs(fetch.stall_s.max(1));
    let source = DataSource::open(&fetch, stall)?;
    let objects = patiently(|| source.look(fetch.is_file)).await?;
    let version = version_of(&objects);
    let files = objects.len() as u64;
    let told = |is_new, bytes| Fetched { is_new, version: version.clone(), files, bytes };
    if version.is_some() && version == fetch.known {
        return Ok(told(false, announced(&objects)));
    }
    let data = prepare(&fetch.to, version.as_deref())?;
    check_room(&objects, &data)?;
    let meter = Meter::new(Phase::Data, (files, announced(&objects)), teller);
    let download = Download { source, data, is_resumable: version.is_some(), meter };
    let work = futures_util::stream::iter(objects).map(|object| download.one(object));
    let bytes = work.buffer_unordered(AT_ONCE).try_fold(0, async |sum, length| Ok(sum + length)).await?;
    Ok(told(true, bytes))
}

/// The length of everything, as far as it is announced.
fn announced(objects: &[Object]) -> u64 {
    objects.iter().filter_map(|object| object.size).sum()
}

/// One text that changes when any file does; `None` if that cannot be seen of one of them.
fn version_of(objects: &[Object]) -> Option<String> {
    let mut hash = Sha256::new();
    for Object { name, size, tag, .. } in objects {
        hash.update(format!("{name}\n{size:?}\n{}\n", tag.as_ref()?));
    }
    Some(format!("{:x}", hash.finalize()))
}

/// A name for some texts: other texts have another one.
fn key_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update(format!("{}\n{text}", text.len()));
    }
    format!("{:x}", hash.finalize())
}

/// Makes the folder for the data. What is there stays only if it is of the same version.
fn prepare(to: &Path, version: Option<&str>) -> Done<PathBuf> {
    let (data, mark) = (to.join(Fetch::DATA), to.join(VERSION_FILE));
    let fail = |error| disk::trouble(to, "the folder for the data cannot be prepared", &error);
    let left = fs::read_to_string(&mark).ok();
    if left.is_none() || left.as_deref() != version {
        match fs::remove_dir_all(&data) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(fail(error)),
            _ => {}
        }
        fs::write(&mark, version.unwrap_or_default()).map_err(fail)?;
    }
    fs::create_dir_all(&data).map_err(fail)?;
    Ok(data)
}

fn check_room(objects: &[Object], data: &Path) -> Done<()> {
    let there = |object: &Object| fs::metadata(data.join(&object.name)).map_or(0, |file| file.len());
    let missing: u64 =
        objects.iter().map(|object| object.size.unwrap_or(0).saturating_sub(there(object))).sum();
    match disk::free(data) {
        Some(free) if free < missing => Err(failed(
            FailureKind::DiskFull,
            format!("the data takes {} more, and {} are free", size::binary(missing), size::binary(free)),
        )),
        _ => Ok(()),
    }
}

/// Asks again after trouble that may pass.
async fn patiently<T, F: Future<Output = Result<T, Trouble>>>(ask: impl Fn() -> F) -> Done<T> {
    let mut in_vain = 0;
    loop {
        let trouble = match ask().await {
            Ok(answer) => return Ok(answer),
            Err(trouble) => trouble,
        };
        in_vain += 1;
        wait_after(trouble, in_vain).await?;
    }
}

/// Waits until the next try; fails if there is to be none.
async fn wait_after(trouble: Trouble, in_vain: u32) -> Done<()> {
    match trouble {
        Trouble::Lasting(failure) => Err(failure),
        Trouble::Passing(failure, _) if in_vain >= ROUNDS => Err(failure),
        Trouble::Passing(_, asked) => {
            let usual = Duration::from_millis(300 << in_vain.min(8));
            tokio::time::sleep(asked.unwrap_or(usual).min(LONGEST_WAIT)).await;
            Ok(())
        }
    }
}

/// A download in progress.
struct Download {
    source: DataSource,
    data: PathBuf,
    /// A file that was begun can be gone on with.
    is_resumable: bool,
    meter: Meter,
}

/// How much of several files is done.
struct Meter {
    phase: Phase,
    done: AtomicU64,
    files: AtomicU64,
    /// The number of files, and their bytes as announced.
    total: (u64, u64),
    begun: Instant,
    teller: Arc<Teller>,
}

impl Meter {
    fn new(phase: Phase, total: (u64, u64), teller: Arc<Teller>) -> Meter {
        let (done, files) = (AtomicU64::new(0), AtomicU64::new(0));
        Meter { phase, done, files, total, begun: Instant::now(), teller }
    }

    /// These bytes are done, too.
    fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// These bytes are to be done again.
    fn take(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// One file is done.
    fn file_done(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    /// Reports the progress now and then; `name` is the file that is being worked on.
    fn pass(&self, name: &str) {
        self.teller.pass(|| self.progress(name));
    }

    fn progress(&self, name: &str) -> Progress {
        let bytes = self.done.load(Ordering::Relaxed);
        let seconds = self.begun.elapsed().as_secs_f64().max(0.001);
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let rate = (bytes as f64 / seconds) as u64;
        Progress {
            phase: self.phase,
            done: self.files.load(Ordering::Relaxed),
            total: if self.total.0 > 1 { self.total.0 } else { 0 },
            bytes,
            bytes_total: self.total.1,
            what: format!("{name}, {}/s", size::binary(rate)),
        }
    }
}

impl Download {
    /// Fetches one file; returns its length.
    async fn one(&self, object: Object) -> Done<u64> {
        let path = self.data.join(&object.name);
        let fail = |error| disk::trouble(&path, "a file of the data cannot be written", &error);
        fs::create_dir_all(path.parent().unwrap_or(&self.data)).map_err(fail)?;
        let mut file = File::options().create(true).append(true).read(true).open(&path).map_err(fail)?;
        let mut length = match file.metadata().map_err(fail)?.len() {
            length if self.is_resumable && object.size.is_some_and(|size| length <= size) => length,
            _ => {
                file.set_len(0).map_err(fail)?;
                0
            }
        };
        self.meter.add(length);
        let mut in_vain = 0;
        while object.size != Some(length) || length == 0 {
            let before = length;
            let Err(trouble) = self.go_on(&object, &mut file, &mut length).await else { break };
            if let Trouble::Passing(..) = &trouble
                && (!self.is_resumable || object.size.is_some_and(|size| length > size))
            {
                file.set_len(0).map_err(fail)?;
                self.meter.take(length);
                length = 0;
            }
            in_vain = if length > before { 1 } else { in_vain + 1 };
            wait_after(trouble, in_vain).await?;
        }
        file.sync_all().map_err(fail)?;
        self.meter.file_done();
        Ok(length)
    }

    /// Appends what is missing of a file; `length` is what it has.
    async fn go_on(&self, object: &Object, file: &mut File, length: &mut u64) -> Result<(), Trouble> {
        let fail = |error| {
            Trouble::Lasting(disk::trouble(&self.data, "a file of the data cannot be written", &error))
        };
        let (from, mut pieces) = self.source.read(object, *length).await?;
        if from != *length {
            file.set_len(from).map_err(fail)?;
            self.meter.take(*length - from);
            *length = from;
        }
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            file.write_all(&piece).map_err(fail)?;
            *length += piece.len() as u64;
            self.meter.add(piece.len() as u64);
            self.meter.pass(&object.name);
        }
        match object.size {
            Some(size) if *length != size => Err(Trouble::Passing(short(object, *length, size), None)),
            _ => Ok(()),
        }
    }
}

fn short(object: &Object, length: u64, size: u64) -> Failure {
    let message = format!("the server announces {size} bytes of {} and sends {length}", object.name);
    failed(FailureKind::Damaged, message).advise("It may have been changed meanwhile: try again later.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str, size: Option<u64>, tag: Option<&str>) -> Object {
        Object { name: name.to_owned(), place: name.to_owned(), size, tag: tag.map(str::to_owned) }
    }

    #[test]
    fn test_a_version_changes_with_every_part() {
        let base = version_of(&[object("a", Some(1), Some("t"))]).unwrap();
        for other in [
            object("b", Some(1), Some("t")),
            object("a", Some(2), Some("t")),
            object("a", Some(1), Some("u")),
        ] {
            assert_ne!(version_of(&[other]), Some(base.clone()));
        }
        let two = [object("a", Some(1), Some("t")), object("b", Some(1), None)];
        assert_eq!(version_of(&two), None, "what cannot be told apart is fetched anew");
    }

    #[test]
    fn test_remains_of_another_version_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let data = prepare(dir.path(), Some("1")).unwrap();
        let part = data.join("file");
        fs::write(&part, "begun").unwrap();
        prepare(dir.path(), Some("1")).unwrap();
        assert!(part.exists());
        prepare(dir.path(), Some("2")).unwrap();
        assert!(!part.exists());
        fs::write(&part, "begun").unwrap();
        prepare(dir.path(), None).unwrap();
        fs::write(&part, "begun").unwrap();
        prepare(dir.path(), None).unwrap();
        assert!(!part.exists(), "without a version nothing is gone on with");
    }
}
