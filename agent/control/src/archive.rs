//! Logs and tracking records of every attempt, kept as plain files that only grow.
//!
//! Owns `archive/JOB/EPOCH.RANK.CHANNEL`; the length of the file is the length of the channel, so there is no
//! index that could disagree. Hides files, forced writes and the wake-up of followers. Invariants: bytes
//! once stored at an offset never change, except that [`Tape::conclude`] empties a channel whose content was
//! proven wrong; a repeated append is trimmed, a gap stores nothing; a length is told to a node only after
//! [`sync_all`], but to followers at once.
//!
//! All file access blocks: it happens in [`Archive::blocking`]. Tapes live while somebody holds them.
//!
//! Called by `api::telemetry` (append, read, follow) and `api::worker` (the check before an outcome counts).

use std::collections::{BTreeSet, HashMap};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::ScopedJoinHandle;

use agent_model::{Digest, JobId, ReplicaId, Stream};
use tokio::sync::watch;

/// What is kept of a replica, each with its own byte offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Channel {
    /// A log.
    Log(Stream),
    /// Metrics, parameters and tags, one JSON record a line.
    Tracking,
}

impl Channel {
    /// From the word on the wire.
    pub(crate) fn parse(word: &str) -> Option<Channel> {
        let all = Stream::ALL.map(Channel::Log).into_iter().chain([Channel::Tracking]);
        all.into_iter().find(|channel| channel.to_string() == word)
    }
}

impl std::fmt::Display for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Channel::Log(stream) => stream.fmt(f),
            Channel::Tracking => f.pad("tracking"),
        }
    }
}

/// Which step of keeping bytes failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    #[error("cannot open {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot read {} at {offset}", path.display())]
    Read { path: PathBuf, offset: u64, source: io::Error },
    #[error("cannot write {bytes} bytes to {} at {offset}", path.display())]
    Write { path: PathBuf, offset: u64, bytes: usize, source: io::Error },
    #[error("cannot force {} to the disk", path.display())]
    Sync { path: PathBuf, source: io::Error },
    #[error("the archive is stopping")]
    Stopping,
}

impl ArchiveError {
    /// There is no room for more.
    pub(crate) fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            ArchiveError::Open { source, .. }
            | ArchiveError::Write { source, .. }
            | ArchiveError::Sync { source, .. } => matches!(source.kind(), StorageFull | QuotaExceeded),
            ArchiveError::Read { .. } | ArchiveError::Stopping => false,
        }
    }
}

/// The tapes somebody holds.
type Tapes = HashMap<(ReplicaId, Channel), Weak<Tape>>;

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Archive {
    root: Arc<Path>,
    tapes: Arc<Mutex<Tapes>>,
}

impl Archive {
    /// The archive below `root`, which exists.
    pub(crate) fn new(root: &Path) -> Archive {
        Archive { root: root.into(), tapes: Arc::default() }
    }

    /// Runs file access where it may block.
    pub(crate) async fn blocking<T: Send + 'static>(
        work: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
    ) -> Result<T, ArchiveError> {
        tokio::task::spawn_blocking(work).await.unwrap_or(Err(ArchiveError::Stopping))
    }

    /// The tape of one channel of a replica. Everybody who asks while one is held gets the same one.
    pub(crate) async fn tape(
        &self,
        replica: &ReplicaId,
        channel: Channel,
    ) -> Result<Arc<Tape>, ArchiveError> {
        if let Some(tape) = locked(&self.tapes).get(&(replica.clone(), channel)).and_then(Weak::upgrade) {
            return Ok(tape);
        }
        let (archive, replica) = (self.clone(), replica.clone());
        Self::blocking(move || {
            let mut tapes = locked(&archive.tapes);
            if let Some(tape) = tapes.get(&(replica.clone(), channel)).and_then(Weak::upgrade) {
                return Ok(tape);
            }
            let directory = archive.job_directory(&replica.job);
            let name = format!("{}.{}.{channel}", replica.epoch, replica.rank);
            let tape = Arc::new(Tape::open(directory.join(name))?);
            tapes.retain(|_, tape| tape.strong_count() > 0);
            tapes.insert((replica, channel), Arc::downgrade(&tape));
            Ok(tape)
        })
        .await
    }

    fn job_directory(&self, job: &JobId) -> PathBuf {
        self.root.join(job.as_str())
    }
}

/// One channel of one replica. Its blocking methods belong into [`Archive::blocking`].
#[derive(Debug)]
pub(crate) struct Tape {
    path: PathBuf,
    /// Set once the file exists.
    file: OnceLock<File>,
    writer: Mutex<Writer>,
    length: watch::Sender<u64>,
}

#[derive(Debug)]
struct Writer {
    /// Below this, everything is on the disk.
    synced: u64,
    /// The file's name is on the disk too.
    named: bool,
    /// The content was proven complete; nothing is added any more.
    sealed: bool,
}

impl Tape {
    fn open(path: PathBuf) -> Result<Tape, ArchiveError> {
        let file = OnceLock::new();
        let mut length = 0;
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(found) => {
                length = found.metadata().map_err(|source| open_error(&path, source))?.len();
                let _ = file.set(found); // it was empty a line ago
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(open_error(&path, source)),
        }
        // What a daemon before us wrote may not have reached the disk: the first sync forces it.
        let writer = Mutex::new(Writer { synced: 0, named: false, sealed: false });
        Ok(Tape { path, file, writer, length: watch::Sender::new(length) })
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> u64 {
        *self.length.borrow()
    }

    /// Wakes whenever there are more.
    pub(crate) fn growth(&self) -> watch::Receiver<u64> {
        self.length.subscribe()
    }

    /// Stores `data` at `offset`. What is there already is trimmed; a gap, or more for a sealed tape, stores
    /// nothing. Blocks.
    pub(crate) fn append(&self, offset: u64, data: &[u8]) -> Result<(), ArchiveError> {
        let writer = locked(&self.writer);
        let length = self.len();
        let Some(known) = length.checked_sub(offset) else { return Ok(()) };
        let known = usize::try_from(known).unwrap_or(usize::MAX).min(data.len());
        let fresh = &data[known..];
        if fresh.is_empty() || writer.sealed {
            return Ok(());
        }
        let file = self.create()?;
        file.write_all_at(fresh, length).map_err(|source| ArchiveError::Write {
            path: self.path.clone(),
            offset: length,
            bytes: fresh.len(),
            source,
        })?;
        self.length.send_replace(length + fresh.len() as u64);
        drop(writer);
        Ok(())
    }

    fn create(&self) -> Result<&File, ArchiveError> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let cannot = |source| open_error(&self.path, source);
        if let Some(parent) = self.path.parent() {
            std::fs::create_dir_all(parent).map_err(cannot)?;
        }
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
        let file = options.open(&self.path).map_err(cannot)?;
        Ok(self.file.get_or_init(|| file))
    }

    /// Forces everything there is to the disk and returns how much that is. Blocks.
    pub(crate) fn sync(self: &Arc<Self>) -> Result<u64, ArchiveError> {
        let lengths = sync_all(std::slice::from_ref(self))?;
        Ok(lengths.first().copied().unwrap_or_default())
    }

    /// Up to `most` bytes from `offset` on. Blocks.
    pub(crate) fn read(&self, offset: u64, most: usize) -> Result<Vec<u8>, ArchiveError> {
        let there = self.len().saturating_sub(offset);
        let size = usize::try_from(there).unwrap_or(usize::MAX).min(most);
        let Some(file) = self.file.get().filter(|_| size > 0) else { return Ok(Vec::new()) };
        let mut data = vec![0; size];
        file.read_exact_at(&mut data, offset).map_err(|source| ArchiveError::Read {
            path: self.path.clone(),
            offset,
            source,
        })?;
        Ok(data)
    }

    /// Where the last `lines` lines begin. Blocks.
    pub(crate) fn tail(&self, lines: u64) -> Result<u64, ArchiveError> {
        const BLOCK: u64 = 64 * 1024;
        let length = self.len();
        let mut wanted = lines;
        let mut end = length;
        while end > 0 {
            let start = end.saturating_sub(BLOCK);
            let block = self.read(start, usize::try_from(end - start).unwrap_or_default())?;
            for (i, _) in block.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
                let after = start + i as u64 + 1;
                if after == length {
                    continue; // it ends the last line
                }
                wanted -= 1;
                if wanted == 0 {
                    return Ok(after);
                }
            }
            end = start;
        }
        Ok(0)
    }

    /// Compares everything there is with what its writer says it wrote: if equal, the tape is sealed and safe
    /// on the disk; if not, it is emptied, so that it can be sent again. Returns what was found. Blocks.
    pub(crate) fn conclude(self: &Arc<Self>, expected: Digest) -> Result<Digest, ArchiveError> {
        locked(&self.writer).sealed = true; // nothing may slip in behind the check
        let found = self.sync().and_then(|_| self.digest());
        let mut writer = locked(&self.writer);
        match &found {
            Ok(found) if *found == expected => return Ok(expected),
            Ok(_) => {
                if let Some(file) = self.file.get() {
                    file.set_len(0).map_err(|source| open_error(&self.path, source))?;
                }
                writer.synced = 0;
                self.length.send_replace(0);
            }
            Err(_) => {}
        }
        writer.sealed = false;
        found
    }

    fn digest(&self) -> Result<Digest, ArchiveError> {
        const BLOCK: usize = 1024 * 1024;
        let mut hasher = agent_cas::Hasher::new();
        loop {
            let block = self.read(hasher.size(), BLOCK)?;
            if block.is_empty() {
                return Ok(hasher.finish());
            }
            hasher.update(&block);
        }
    }
}

/// Forces everything there is on `tapes` to the disk and returns how much that is on each. Appends go on
/// meanwhile. Blocks.
///
/// All parts are forced side by side, because a journaling file system makes one commit of them.
pub(crate) fn sync_all(tapes: &[Arc<Tape>]) -> Result<Vec<u64>, ArchiveError> {
    let lengths: Vec<u64> = tapes.iter().map(|tape| tape.len()).collect();
    let there: Vec<(&Arc<Tape>, u64)> =
        tapes.iter().zip(lengths.iter().copied()).filter(|(tape, _)| tape.file.get().is_some()).collect();
    let mut files = Vec::new();
    let mut directories = BTreeSet::new();
    for (tape, length) in &there {
        let writer = locked(&tape.writer);
        if writer.synced < *length
            && let Some(file) = tape.file.get()
        {
            files.push((tape.path.as_path(), file));
        }
        if !writer.named {
            directories.extend(tape.path.ancestors().skip(1).take(2));
        }
    }
    let failed = |path: &Path, source| ArchiveError::Sync { path: path.to_owned(), source };
    let force = |(path, file): (&Path, &File)| file.sync_data().map_err(|source| failed(path, source));
    let force_directory = |path: &Path| {
        File::open(path).and_then(|file| file.sync_all()).map_err(|source| failed(path, source))
    };
    let last = if directories.is_empty() { files.pop() } else { None }; // the usual case needs no thread
    std::thread::scope(|scope| {
        let files = files.into_iter().map(|part| scope.spawn(move || force(part)));
        let directories = directories.into_iter().map(|path| scope.spawn(move || force_directory(path)));
        let running: Vec<_> = files.chain(directories).collect();
        let forced = last.map_or(Ok(()), force);
        let join = |part: ScopedJoinHandle<'_, _>| part.join().unwrap_or(Err(ArchiveError::Stopping));
        running.into_iter().map(join).fold(forced, Result::and)
    })?;
    for (tape, length) in there {
        let mut writer = locked(&tape.writer);
        writer.synced = writer.synced.max(length);
        writer.named = true;
    }
    Ok(lengths)
}

fn open_error(path: &Path, source: io::Error) -> ArchiveError {
    ArchiveError::Open { path: path.to_owned(), source }
}

/// A panic while one of these was held left no half-made state behind.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
