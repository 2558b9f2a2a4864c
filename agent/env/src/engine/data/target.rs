//! Where files are sent to: a store of objects, or a folder of this machine.
//!
//! Owns how one file gets its place there. Hides the stores' protocols, their parts, and how a file of a folder is
//! replaced.
//!
//! Invariants: a file of the same name is there as it was, or whole as it was sent, never in between; nothing else at
//! the target is changed or removed; no link of the folder is followed; no error names a credential; what is held in
//! memory of all files together is bounded.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use agent_env::{Failure, FailureKind, UploadTarget};
use agent_fs::Links;
use bytes::Bytes;
use object_store::path::Path as Location;
use object_store::{MultipartUpload, ObjectStoreExt};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::super::{Advise, Done, failed, net};
use super::source::{self, OpenedStore, Trouble};

/// The length of a part of a large file, in bytes; smaller files are sent at once. Stores want at least 5 MiB.
const PART: u64 = 8 << 20;
/// The most parts that every store takes for one file, with some to spare.
const MOST_PARTS: u64 = 9_000;
/// How much of all files together is in memory, in MiB; a single part may be larger.
const IN_MEMORY: u32 = 64;
/// How long the parts of a file that failed may take to be given up.
const GIVE_UP: Duration = Duration::from_secs(10);
/// The beginning of the name of a file that is not whole yet.
const UNFINISHED: &str = ".agentd-unfinished-";

/// Where files are sent to.
pub(super) enum DataTarget {
    Store { opened: OpenedStore, memory: Arc<Semaphore> },
    Folder { root: OwnedFd, path: String, owner: Option<(u32, u32)> },
}

/// A file that is sent.
pub(super) struct Outgoing<'a> {
    /// Its path below the target; empty if the target is the file itself.
    pub(super) name: &'a str,
    pub(super) file: &'a File,
    /// Its length, when it was found.
    pub(super) size: u64,
    /// Is told what of it has arrived, in bytes.
    pub(super) arrived: &'a (dyn Fn(u64) + Sync),
}

impl DataTarget {
    /// Opens it; blocks.
    pub(super) fn open(target: &UploadTarget, stall: Duration) -> Done<DataTarget> {
        match target {
            UploadTarget::Store { url, path, options } => {
                // Also makes the cryptography of the whole process known.
                drop(net::plain(stall));
                let mut opened = source::open_store(&source::address(url)?, options.0.clone(), Some(stall))?;
                opened.root = located(opened.root.as_ref(), path)?;
                let memory = Arc::new(Semaphore::new(IN_MEMORY as usize));
                Ok(DataTarget::Store { opened, memory })
            }
            UploadTarget::Folder { root, path, owner } => {
                let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
                let opened = rustix::fs::open(root, flags, Mode::empty()).map_err(|error| {
                    let what = format!("{} cannot be opened: {}", root.display(), io::Error::from(error));
                    // A share may come back.
                    let kind = if error == Errno::NOENT { FailureKind::Network } else { kind_of(error) };
                    failed(kind, what).advise("Is the share mounted?")
                })?;
                Ok(DataTarget::Folder { root: opened, path: path.clone(), owner: *owner })
            }
        }
    }

    /// Sends one file.
    pub(super) async fn put(&self, outgoing: &Outgoing<'_>) -> Done<()> {
        match self {
            DataTarget::Store { opened, memory } => match put_object(opened, memory, outgoing).await {
                Err(Trouble::Lasting(failure) | Trouble::Passing(failure, _)) => Err(failure),
                Ok(()) => Ok(()),
            },
            DataTarget::Folder { root, path, owner } => {
                let place = joined(path, outgoing.name);
                tokio::task::block_in_place(|| put_file(root, &place, *owner, outgoing))
            }
        }
    }
}

fn joined(path: &str, name: &str) -> String {
    [path, name].iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join("/")
}

/// The place of a name below a root. It is parsed, not converted: a conversion would escape what is unusual in it.
fn located(root: &str, name: &str) -> Done<Location> {
    let place = joined(root, name);
    Location::parse(&place)
        .map_err(|error| failed(FailureKind::Refused, format!("`{place}` is no name in a store: {error}")))
}

fn changed(name: &str) -> Failure {
    failed(FailureKind::Other, format!("`{name}` was changed while it was sent"))
}

/// What of the file begins at `from`; it must have that much.
fn read(outgoing: &Outgoing<'_>, from: u64, length: u64) -> Done<Bytes> {
    let mut part = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    let read = tokio::task::block_in_place(|| outgoing.file.read_exact_at(&mut part, from));
    match read {
        Ok(()) => Ok(part.into()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(changed(outgoing.name)),
        Err(error) => Err(failed(FailureKind::Other, format!("`{}` cannot be read: {error}", outgoing.name))),
    }
}

async fn put_object(
    opened: &OpenedStore,
    memory: &Arc<Semaphore>,
    outgoing: &Outgoing<'_>,
) -> Result<(), Trouble> {
    let OpenedStore { store, root, host } = opened;
    let location = located(root.as_ref(), outgoing.name).map_err(Trouble::Lasting)?;
    let trouble = |error: &object_store::Error| refusal(host, &location, error);
    if outgoing.size <= PART {
        let _held = reserve(memory, outgoing.size).await;
        let whole = read(outgoing, 0, outgoing.size).map_err(Trouble::Lasting)?;
        store.put(&location, whole.into()).await.map_err(|error| trouble(&error))?;
        (outgoing.arrived)(outgoing.size);
        return Ok(());
    }
    let mut upload = store.put_multipart(&location).await.map_err(|error| trouble(&error))?;
    let sent = match put_parts(upload.as_mut(), memory, outgoing).await {
        Ok(()) => upload.complete().await.map(drop).map_err(|error| trouble(&error)),
        Err(Cut::Here(failure)) => Err(Trouble::Lasting(failure)),
        Err(Cut::There(error)) => Err(trouble(&error)),
    };
    if sent.is_err() {
        // The store may keep the parts otherwise.
        let _ = tokio::time::timeout(GIVE_UP, upload.abort()).await;
    }
    sent
}

/// Why the parts of a file did not all arrive.
enum Cut {
    Here(Failure),
    There(object_store::Error),
}

async fn put_parts(
    upload: &mut dyn MultipartUpload,
    memory: &Arc<Semaphore>,
    outgoing: &Outgoing<'_>,
) -> Result<(), Cut> {
    let length = PART.max(outgoing.size.div_ceil(MOST_PARTS));
    // Tasks of their own go on while this one waits for room.
    let (mut parts, mut from) = (JoinSet::new(), 0);
    let arrived = |done: Result<Result<u64, object_store::Error>, tokio::task::JoinError>| match done {
        Ok(sent) => sent.map(outgoing.arrived).map_err(Cut::There),
        Err(error) => Err(Cut::Here(failed(FailureKind::Other, error.to_string()))),
    };
    while from < outgoing.size {
        let length = length.min(outgoing.size - from);
        let held = reserve(memory, length).await;
        let part = upload.put_part(read(outgoing, from, length).map_err(Cut::Here)?.into());
        parts.spawn(async move {
            let _held = held;
            part.await.map(|()| length)
        });
        from += length;
        while let Some(done) = parts.try_join_next() {
            arrived(done)?;
        }
    }
    while let Some(done) = parts.join_next().await {
        arrived(done)?;
    }
    Ok(())
}

/// Room in memory for so many bytes; a closed semaphore, which there is none of, would not hold it back.
async fn reserve(memory: &Arc<Semaphore>, bytes: u64) -> Option<tokio::sync::OwnedSemaphorePermit> {
    let wanted = u32::try_from(bytes.div_ceil(1 << 20)).unwrap_or(IN_MEMORY).clamp(1, IN_MEMORY);
    memory.clone().acquire_many_owned(wanted).await.ok()
}

/// The trouble with an object that is written.
fn refusal(host: &str, location: &Location, error: &object_store::Error) -> Trouble {
    use object_store::Error as E;
    let lasting = |kind, what: &str| Trouble::Lasting(failed(kind, format!("{host} {what} `{location}`")));
    match error {
        E::NotFound { .. } => lasting(FailureKind::NotFound, "has no bucket or container for"),
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
            lasting(FailureKind::Denied, "does not let this node write")
        }
        other => source::of_store(host, location, other),
    }
}

/// Writes a file beside its place, and then gives it its name.
fn put_file(root: &OwnedFd, place: &str, owner: Option<(u32, u32)>, outgoing: &Outgoing<'_>) -> Done<()> {
    let (folders, name) = place.rsplit_once('/').unwrap_or(("", place));
    let fail = |error: Errno| {
        let cause = io::Error::from(error);
        if agent_fs::is_full(&cause) {
            return failed(FailureKind::DiskFull, format!("there is no room for `{place}`"));
        }
        failed(kind_of(error), format!("`{place}` cannot be written: {cause}"))
    };
    let folder = make_folders(root, folders, owner).map_err(fail)?;
    let unfinished = format!("{UNFINISHED}{}", super::key_of([place]));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
    let to = agent_fs::open_beneath(&folder, &unfinished, flags, Mode::from(0o644), Links::Never);
    let mut to = File::from(to.map_err(fail)?);
    let written = copy(outgoing, &mut to, &fail).and_then(|()| {
        give(&to, owner, 0o644);
        to.sync_all().map_err(|error| fail(errno(&error)))?;
        rustix::fs::renameat(&folder, unfinished.as_str(), &folder, name).map_err(fail)?;
        // Stores of files without it give an error, and keep the name anyway.
        let _ = rustix::fs::fsync(&folder);
        Ok(())
    });
    if written.is_err() {
        let _ = rustix::fs::unlinkat(&folder, unfinished.as_str(), AtFlags::empty());
    }
    written
}

fn copy(outgoing: &Outgoing<'_>, to: &mut File, fail: &dyn Fn(Errno) -> Failure) -> Done<()> {
    let mut from = 0;
    while from < outgoing.size {
        let length = (1 << 20).min(outgoing.size - from);
        to.write_all(&read(outgoing, from, length)?).map_err(|error| fail(errno(&error)))?;
        from += length;
        (outgoing.arrived)(length);
    }
    Ok(())
}

/// Opens a folder below the root; makes what is missing of it.
fn make_folders(root: &OwnedFd, path: &str, owner: Option<(u32, u32)>) -> Result<OwnedFd, Errno> {
    let open = |at: &OwnedFd, name: &str| {
        agent_fs::open_beneath(at, name, OFlags::DIRECTORY, Mode::empty(), Links::Never)
    };
    let mut at = open(root, "")?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        let made = rustix::fs::mkdirat(&at, name, Mode::from(0o755));
        let folder = open(&at, name)?;
        if made.is_ok() {
            give(&folder, owner, 0o755);
        }
        at = folder;
    }
    Ok(at)
}

/// Gives what was just made to the owner, for all to read. Not every user may, and not every share takes it.
fn give(made: impl AsFd, owner: Option<(u32, u32)>, mode: u32) {
    let _ = rustix::fs::fchmod(&made, Mode::from(mode));
    if let Some((uid, gid)) = owner {
        let _ = rustix::fs::fchown(&made, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

fn kind_of(error: Errno) -> FailureKind {
    match error {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => FailureKind::Denied,
        Errno::NOENT => FailureKind::NotFound,
        Errno::LOOP | Errno::NOTDIR | Errno::ISDIR | Errno::EXIST | Errno::NAMETOOLONG | Errno::XDEV => {
            FailureKind::Refused
        }
        _ => FailureKind::Network,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn put(root: &Path, path: &str, name: &str, text: &str) -> Done<()> {
        let target = UploadTarget::Folder { root: root.to_owned(), path: path.to_owned(), owner: None };
        let DataTarget::Folder { root, path, owner } = DataTarget::open(&target, Duration::from_secs(1))?
        else {
            panic!("a folder")
        };
        let source = tempfile::tempdir().unwrap();
        fs::write(source.path().join("file"), text).unwrap();
        let file = File::open(source.path().join("file")).unwrap();
        let outgoing = Outgoing { name, file: &file, size: text.len() as u64, arrived: &|_| {} };
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        runtime.block_on(async {
            tokio::task::block_in_place(|| put_file(&root, &joined(&path, name), owner, &outgoing))
        })
    }

    #[test]
    fn test_a_file_of_a_folder_is_replaced_and_what_is_beside_it_stays() {
        let share = tempfile::tempdir().unwrap();
        put(share.path(), "runs/1", "deep/model", "first").unwrap();
        fs::write(share.path().join("runs/1/other"), "stays").unwrap();
        put(share.path(), "runs/1", "deep/model", "second").unwrap();
        put(share.path(), "runs/file", "", "alone").unwrap();
        let read = |path: &str| fs::read_to_string(share.path().join(path)).unwrap();
        assert_eq!(read("runs/1/deep/model"), "second");
        assert_eq!((read("runs/1/other"), read("runs/file")), ("stays".to_owned(), "alone".to_owned()));
        assert_eq!(
            fs::read_dir(share.path().join("runs/1/deep")).unwrap().count(),
            1,
            "nothing else is left"
        );
    }

    #[test]
    fn test_no_link_leads_out_of_a_folder() {
        let (share, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("precious"), "kept").unwrap();
        symlink(outside.path(), share.path().join("way")).unwrap();
        symlink(outside.path().join("precious"), share.path().join("file")).unwrap();
        let refused = put(share.path(), "way", "precious", "lost").unwrap_err();
        assert_eq!(refused.kind, FailureKind::Refused, "{}", refused.message);
        put(share.path(), "", "file", "new").unwrap();
        assert_eq!(fs::read_to_string(outside.path().join("precious")).unwrap(), "kept");
        assert_eq!(fs::read_to_string(share.path().join("file")).unwrap(), "new");
        let failure = put(share.path(), "way", "", "a folder is there").err();
        assert!(failure.is_none(), "a link itself is replaced");
        fs::create_dir(share.path().join("folder")).unwrap();
        let failure = put(share.path(), "folder", "", "x").unwrap_err();
        assert_eq!(failure.kind, FailureKind::Refused, "{}", failure.message);
        assert_eq!(fs::read_dir(share.path()).unwrap().count(), 3, "nothing unfinished is left");
    }

    #[test]
    fn test_a_share_that_is_away_is_told() {
        let target = UploadTarget::Folder { root: "/nowhere".into(), path: String::new(), owner: None };
        let failure = DataTarget::open(&target, Duration::from_secs(1)).err().unwrap();
        assert_eq!(failure.kind, FailureKind::Network);
        assert!(failure.message.contains("/nowhere"), "{}", failure.message);
    }
}
