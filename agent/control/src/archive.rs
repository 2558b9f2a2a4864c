//! Logs, tracking records and what was taken of machines, of every attempt, kept as plain files that only grow.
//!
//! Owns `archive/JOB/EPOCH.RANK.CHANNEL`; the length of the file is the length of the channel, so there is no index
//! that could disagree. Hides files, forced writes and the wake-up of followers. Invariants: bytes once stored at an
//! offset never change, except that [`LogFile::conclude`] sets a channel aside whose content was proven wrong; a
//! repeated append is trimmed, a gap stores nothing; a length is reported to a node only after a successful forced
//! write, but to followers at once. A forced write that failed is never simply repeated: its data is cut off and sent
//! again, or written to another file. No channel exceeds its quota ([`Archive::new`]), and all of them together leave
//! some room on the disk: the outcomes of jobs are written there too, and matter more than their logs. The last pieces
//! of a log that somebody follows stay in memory, [`Fresh`], so that a follower who keeps up reads no file.
//!
//! All file access blocks: it happens in [`Archive::blocking`]. A log file is open while somebody holds it.

mod fresh;

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::ScopedJoinHandle;

use agent_cas::Hasher;
use agent_model::protocol::log::{Splice, splice};
use agent_model::{Channel, Digest, JobId, ReplicaId, failpoint};
use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::fstatvfs;
use tokio::sync::watch;

use self::fresh::Fresh;

/// The step of storing bytes that failed.
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
    #[error("cannot remove {}", path.display())]
    Remove { path: PathBuf, source: io::Error },
    #[error("the archive is stopping")]
    Stopping,
}

impl ArchiveError {
    /// There is no room for more.
    pub(crate) fn is_full(&self) -> bool {
        match self {
            ArchiveError::Open { source, .. }
            | ArchiveError::Write { source, .. }
            | ArchiveError::Sync { source, .. } => agent_fs::is_full(source),
            ArchiveError::Read { .. } | ArchiveError::Remove { .. } | ArchiveError::Stopping => false,
        }
    }
}

/// The log files somebody holds.
type LogFiles = HashMap<(ReplicaId, Channel), Weak<LogFile>>;

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Archive {
    root: Arc<Path>,
    /// How much of a log is kept, in bytes.
    quota: u64,
    log_files: Arc<Mutex<LogFiles>>,
    /// Those that were concluded last, so that their hashes are still there when the call is repeated.
    recent: Arc<Mutex<VecDeque<Arc<LogFile>>>>,
}

/// How many log files are kept open that nobody else holds.
const RECENT: usize = 16;

/// The quota of records is that of a log divided by this.
const RECORDS_PART: u64 = 4;

/// What a job took of its machine is kept up to so many bytes, or up to the quota of a log: months of a job with many
/// GPUs.
const SYSTEM: u64 = 32 << 20;

/// The bytes on the disk that are left to the controller's database, which cannot work without them, and to the blobs
/// of small outputs; on a small disk, a part of it.
const LEAVE: u64 = 256 << 20;
const LEAVE_PART: u64 = 16;

impl Archive {
    /// The archive below `root`, which exists. Of each log of a replica it keeps the first `quota` bytes, and of its
    /// records a part of that.
    pub(crate) fn new(root: &Path, quota: u64) -> Archive {
        Archive { root: root.into(), quota, log_files: Arc::default(), recent: Arc::default() }
    }

    /// Runs file access where it may block.
    pub(crate) async fn blocking<T: Send + 'static>(
        work: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
    ) -> Result<T, ArchiveError> {
        agent_blocking::spawn_blocking(work).await.unwrap_or(Err(ArchiveError::Stopping))
    }

    /// The log file of one channel of a replica. Everybody who asks while one is held gets the same one.
    pub(crate) async fn log_file(
        &self,
        replica: &ReplicaId,
        channel: Channel,
    ) -> Result<Arc<LogFile>, ArchiveError> {
        if let Some(log_file) = self.log_files.lock().get(&(replica.clone(), channel)).and_then(Weak::upgrade)
        {
            return Ok(log_file);
        }
        let (archive, replica) = (self.clone(), replica.clone());
        Self::blocking(move || {
            let mut log_files = archive.log_files.lock();
            if let Some(log_file) = log_files.get(&(replica.clone(), channel)).and_then(Weak::upgrade) {
                return Ok(log_file);
            }
            let path = file_of(&archive.root, &replica, channel);
            let quota = match channel {
                Channel::Log(_) => archive.quota,
                Channel::Tracking => archive.quota / RECORDS_PART,
                Channel::System => archive.quota.min(SYSTEM),
            };
            let log_file = Arc::new(LogFile::open(path, quota)?);
            log_files.retain(|_, log_file| log_file.strong_count() > 0);
            log_files.insert((replica, channel), Arc::downgrade(&log_file));
            Ok(log_file)
        })
        .await
    }

    /// [`LogFile::conclude`]; a caller that stops waiting and asks again loses none of the work.
    pub(crate) async fn conclude(
        &self,
        log_file: Arc<LogFile>,
        expected: Digest,
    ) -> Result<Digest, ArchiveError> {
        {
            let mut recent = self.recent.lock();
            recent.retain(|known| !Arc::ptr_eq(known, &log_file));
            recent.push_back(log_file.clone());
            let over = recent.len().saturating_sub(RECENT);
            recent.drain(..over);
        }
        Self::blocking(move || log_file.conclude(expected)).await
    }

    /// Removes everything there is of a job.
    pub(crate) async fn remove(&self, job: &JobId) -> Result<(), ArchiveError> {
        let (archive, job) = (self.clone(), job.clone());
        archive.recent.lock().retain(|log_file| !log_file.path.starts_with(archive.job_directory(&job)));
        Self::blocking(move || {
            let directory = archive.job_directory(&job);
            std::fs::remove_dir_all(&directory)
                .or_else(unless_missing)
                .map_err(|source| ArchiveError::Remove { path: directory, source })
        })
        .await
    }

    fn job_directory(&self, job: &JobId) -> PathBuf {
        self.root.join(job.as_str())
    }
}

/// Where the archive in `root` keeps one channel of a replica.
pub(crate) fn file_of(root: &Path, replica: &ReplicaId, channel: Channel) -> PathBuf {
    root.join(replica.job.as_str()).join(format!("{}.{}.{channel}", replica.epoch, replica.rank))
}

/// One channel of one replica. Its blocking methods belong into [`Archive::blocking`].
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    quota: u64,
    /// `None` until the file exists.
    file: Mutex<Option<Arc<File>>>,
    writer: Mutex<LogWriter>,
    /// What followers may read.
    length: watch::Sender<u64>,
    fresh: Mutex<Fresh>,
    /// Has hashed a first part of the log file. When that is all of it, an append is hashed at once, so that a long
    /// log need not be read again when it is complete.
    hasher: Mutex<Hasher>,
}

#[derive(Debug)]
struct LogWriter {
    /// How much was written; [`LogFile::tell`] makes it known.
    length: u64,
    /// Below this, everything is on the disk.
    synced: u64,
    /// A forced write failed: above `synced`, the kernel's view of the file is not reliable.
    doubtful: bool,
    /// The file's name is on the disk too.
    named: bool,
    /// The content was proven complete; nothing is added any more.
    sealed: bool,
}

impl LogFile {
    fn open(path: PathBuf, quota: u64) -> Result<LogFile, ArchiveError> {
        let mut file = None;
        let mut length = 0;
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(found) => {
                length = found.metadata().map_err(|source| open_error(&path, source))?.len();
                file = Some(Arc::new(found));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(open_error(&path, source)),
        }
        // What an earlier daemon wrote may not have reached the disk: the first sync forces it.
        let writer = LogWriter { length, synced: 0, doubtful: false, named: false, sealed: false };
        Ok(LogFile {
            path,
            quota,
            file: Mutex::new(file),
            writer: Mutex::new(writer),
            length: watch::Sender::new(length),
            fresh: Mutex::default(),
            hasher: Mutex::default(),
        })
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> u64 {
        *self.length.borrow()
    }

    /// Wakes whenever there are more.
    pub(crate) fn growth(&self) -> watch::Receiver<u64> {
        self.length.subscribe()
    }

    /// Stores `data` at `offset`. Bytes that are there already are trimmed; after a gap, in a sealed log file or
    /// beyond the quota nothing is stored. Followers are woken by [`tell`](Self::tell). Blocks.
    pub(crate) fn append(&self, offset: u64, data: &Bytes) -> Result<(), ArchiveError> {
        let mut writer = self.writer.lock();
        self.restore_trust(&mut writer)?;
        let length = writer.length;
        let Splice::Append(part) = splice(length, offset, data.len()) else { return Ok(()) };
        if writer.sealed {
            return Ok(());
        }
        let allowed = usize::try_from(self.quota.saturating_sub(length)).unwrap_or(usize::MAX);
        let mut fresh = data.slice(part);
        fresh.truncate(allowed);
        if fresh.is_empty() {
            return Ok(());
        }
        let file = self.create()?;
        let written = failpoint::hit("control.archive.write")
            .and_then(|()| leave_room(&file, fresh.len() as u64))
            .and_then(|()| file.write_all_at(&fresh, length));
        written.map_err(|source| ArchiveError::Write {
            path: self.path.clone(),
            offset: length,
            bytes: fresh.len(),
            source,
        })?;
        let mut hasher = self.hasher.lock();
        if hasher.size() == length {
            hasher.update(&fresh);
        }
        writer.length += fresh.len() as u64;
        let is_followed = self.length.receiver_count() > 0;
        self.fresh.lock().add(length, is_followed.then_some(fresh));
        drop((hasher, writer));
        Ok(())
    }

    /// Makes known to followers what was written; wakes them on this thread, which therefore should run tasks.
    pub(crate) fn tell(&self) {
        let writer = self.writer.lock();
        self.length.send_if_modified(|told| std::mem::replace(told, writer.length) != writer.length);
        drop(writer);
    }

    fn file(&self) -> Option<Arc<File>> {
        self.file.lock().clone()
    }

    fn create(&self) -> Result<Arc<File>, ArchiveError> {
        if let Some(file) = self.file() {
            return Ok(file);
        }
        let cannot = |source| open_error(&self.path, source);
        if let Some(parent) = self.path.parent() {
            std::fs::create_dir_all(parent).map_err(cannot)?;
        }
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
        let file = failpoint::hit("control.archive.create").and_then(|()| options.open(&self.path));
        let file = Arc::new(file.map_err(cannot)?);
        *self.file.lock() = Some(file.clone());
        Ok(file)
    }

    /// After a forced write that failed: goes back to what is known to be on the disk. If that is not known, because
    /// it was the first one of this daemon, everything is written to another file, which replaces the first when it
    /// is on disk. So is the content of a file that somebody removed while it was open.
    fn restore_trust(&self, writer: &mut LogWriter) -> Result<(), ArchiveError> {
        let Some(file) = self.file() else { return Ok(()) };
        let failed = |source| ArchiveError::Sync { path: self.path.clone(), source };
        let is_gone = file.metadata().is_ok_and(|file| file.nlink() == 0);
        if !writer.doubtful && !is_gone {
            return Ok(());
        }
        if is_gone {
            tracing::error!(path = %self.path.display(), "writing log back: somebody removed its file");
            self.path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
            writer.named = false;
        }
        if writer.synced > 0 && !is_gone {
            file.set_len(writer.synced).map_err(failed)?;
            let safe = writer.synced;
            self.shrink(writer, safe);
        } else if writer.length > 0 {
            let copy = self.copy(&file, writer.length).map_err(failed)?;
            *self.file.lock() = Some(Arc::new(copy));
            writer.synced = writer.length;
        }
        writer.doubtful = false;
        Ok(())
    }

    fn shrink(&self, writer: &mut LogWriter, length: u64) {
        writer.length = length;
        *self.fresh.lock() = Fresh::default();
        let mut hasher = self.hasher.lock();
        if hasher.size() > length {
            *hasher = Hasher::new();
        }
        self.length.send_replace(length);
    }

    fn copy(&self, file: &File, length: u64) -> io::Result<File> {
        let beside = self.beside("copy");
        failpoint::hit("control.archive.create")?;
        let copy = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&beside)?;
        let mut block = vec![0; 1 << 20];
        let mut done = 0;
        while done < length {
            let part = usize::try_from(length - done).unwrap_or(usize::MAX).min(block.len());
            file.read_exact_at(&mut block[..part], done)?;
            failpoint::hit("control.archive.write").and_then(|()| copy.write_all_at(&block[..part], done))?;
            done += part as u64;
        }
        failpoint::hit("control.archive.sync").and_then(|()| copy.sync_all())?;
        failpoint::hit("control.archive.rename").and_then(|()| std::fs::rename(beside, &self.path))?;
        self.path.parent().map_or(Ok(()), agent_fs::flush_directory)?;
        Ok(copy)
    }

    /// A file next to the log file's.
    fn beside(&self, kind: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".");
        name.push(kind);
        name.into()
    }

    /// Forces the whole file to the disk and returns its length. Blocks.
    pub(crate) fn sync(&self) -> Result<u64, ArchiveError> {
        self.force()
    }

    /// Appends go on while the file is forced.
    fn force(&self) -> Result<u64, ArchiveError> {
        let (file, length, synced, named) = {
            let mut writer = self.writer.lock();
            self.restore_trust(&mut writer)?;
            (self.file(), writer.length, writer.synced, writer.named)
        };
        let Some(file) = file else { return Ok(length) };
        let failed = |source| ArchiveError::Sync { path: self.path.clone(), source };
        if synced < length
            && let Err(error) = failpoint::hit("control.archive.sync").and_then(|()| file.sync_data())
        {
            self.writer.lock().doubtful = true;
            return Err(failed(error));
        }
        if !named {
            for directory in self.path.ancestors().skip(1).take(2) {
                let forced = failpoint::hit("control.archive.sync");
                forced.and_then(|()| agent_fs::flush_directory(directory)).map_err(failed)?;
            }
        }
        let mut writer = self.writer.lock();
        if writer.doubtful {
            return Err(failed(io::Error::other("another forced write of it failed meanwhile")));
        }
        writer.synced = writer.synced.max(length);
        writer.named = true;
        Ok(length)
    }

    /// The bytes from `offset` on, as they came in, if that is the way for a follower to have them.
    pub(crate) fn fresh(&self, offset: u64) -> Option<Bytes> {
        self.fresh.lock().get(offset, self.len())
    }

    /// Up to `most` bytes from `offset` on. Blocks.
    pub(crate) fn read(&self, offset: u64, most: usize) -> Result<Vec<u8>, ArchiveError> {
        let size = self.part(offset, most);
        let Some(file) = self.file().filter(|_| size > 0) else { return Ok(Vec::new()) };
        let mut data = vec![0; size];
        file.read_exact_at(&mut data, offset).map_err(|source| ArchiveError::Read {
            path: self.path.clone(),
            offset,
            source,
        })?;
        Ok(data)
    }

    /// As [`read`](Self::read), if all of that is in memory; does not block.
    pub(crate) fn read_cached(&self, offset: u64, most: usize) -> Option<Vec<u8>> {
        let file = self.file()?;
        let mut data = vec![0; self.part(offset, most)];
        agent_fs::read_cached(&file, &mut data, offset).then_some(data)
    }

    /// How many bytes there are from `offset` on, up to `most`.
    fn part(&self, offset: u64, most: usize) -> usize {
        let there = self.len().saturating_sub(offset);
        usize::try_from(there).unwrap_or(usize::MAX).min(most)
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

    /// Compares the content with the digest from its writer: if equal, the log file is sealed and safe on the disk;
    /// if not, and if it is not too short, it is set aside, so that it can be sent again. Returns the digest found.
    /// Blocks.
    pub(crate) fn conclude(self: &Arc<Self>, expected: Digest) -> Result<Digest, ArchiveError> {
        self.writer.lock().sealed = true; // no append may follow the check
        let found = self.sync().and_then(|_| self.digest());
        let mut writer = self.writer.lock();
        match &found {
            Ok(found) if *found == expected => {
                *self.fresh.lock() = Fresh::default();
                return Ok(expected);
            }
            // The missing rest can be sent; the sender may not have the first part any more.
            Ok(found) if found.size < expected.size => {}
            Ok(_) => {
                let aside = failpoint::hit("control.archive.rename")
                    .and_then(|()| std::fs::rename(&self.path, self.beside("wrong")));
                aside.or_else(unless_missing).map_err(|source| open_error(&self.path, source))?;
                *self.file.lock() = None;
                (writer.synced, writer.named, writer.doubtful) = (0, false, false);
                self.shrink(&mut writer, 0);
            }
            Err(_) => {}
        }
        writer.sealed = false;
        found
    }

    /// Accepts the present content, because its writer does not know the right one or cannot send it again. Of the
    /// file that was set aside as wrong and the one after it, the longer one is kept. Blocks.
    pub(crate) fn settle_for_what_there_is(self: &Arc<Self>) -> Result<(), ArchiveError> {
        let mut writer = self.writer.lock();
        let wrong = self.beside("wrong");
        let length = wrong.metadata().map_or(0, |found| found.len());
        // One that is as long was sent again by a node that has not all of it any more.
        if length > 0 && length >= self.len() {
            let cannot = |source| open_error(&self.path, source);
            failpoint::hit("control.archive.rename")
                .and_then(|()| std::fs::rename(&wrong, &self.path))
                .map_err(cannot)?;
            let file = OpenOptions::new().read(true).write(true).open(&self.path).map_err(cannot)?;
            *self.file.lock() = Some(Arc::new(file));
            (writer.synced, writer.named) = (0, false);
            self.shrink(&mut writer, length);
            *self.hasher.lock() = Hasher::new();
        }
        drop(writer);
        self.sync().map(drop)
    }

    /// Of all that is there. Blocks.
    pub(crate) fn digest(&self) -> Result<Digest, ArchiveError> {
        const BLOCK: usize = 1024 * 1024;
        let mut hasher = self.hasher.lock();
        loop {
            let block = self.read(hasher.size(), BLOCK)?;
            if block.is_empty() {
                return Ok(hasher.clone().finish());
            }
            hasher.update(&block);
        }
    }
}

/// Forces `log_files` to the disk and returns the length of each, or its error. Appends go on meanwhile. Blocks.
///
/// All parts are forced side by side, because a journaling file system makes one commit of them.
pub(crate) fn sync_all<'t>(log_files: &'t [Arc<LogFile>]) -> Vec<Result<u64, ArchiveError>> {
    let mut last_first: Vec<&'t Arc<LogFile>> = log_files.iter().collect();
    let last = last_first.pop(); // the usual case needs no thread
    std::thread::scope(|scope| {
        let start = |log_file: &'t Arc<LogFile>| {
            let force = move || log_file.force();
            // If no thread can be started, it is done here.
            std::thread::Builder::new().spawn_scoped(scope, force).map_err(|_| force())
        };
        let running: Vec<_> = last_first.into_iter().map(start).collect();
        let forced = last.map(|log_file| log_file.force());
        let join = |part: Result<ScopedJoinHandle<'_, _>, _>| match part {
            Ok(part) => part.join().unwrap_or(Err(ArchiveError::Stopping)),
            Err(done) => done,
        };
        running.into_iter().map(join).chain(forced).collect()
    })
}

/// Refuses a write into the room that is left to the database. If the free room is not known, the write is tried.
fn leave_room(file: &File, bytes: u64) -> io::Result<()> {
    let Ok(disk) = fstatvfs(file) else { return Ok(()) };
    let leave = LEAVE.min(disk.f_blocks.saturating_mul(disk.f_frsize) / LEAVE_PART);
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < leave.saturating_add(bytes) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
}

fn unless_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn open_error(path: &Path, source: io::Error) -> ArchiveError {
    ArchiveError::Open { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
