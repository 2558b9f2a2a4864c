//! Sends the files that a job left to a store, or to a folder of this machine.
//!
//! Owns the order of things: what there is ([`list`]), what has arrived before ([`Notes`]), then file after file,
//! several at a time. Hides how a repetition goes on. How a file gets its place is of [`super::target`].
//!
//! Invariants: what is sent lies below the folder, and no link led out of it; a file is noted when all of it has
//! arrived, so that an upload which was cut can be repeated from its beginning; a file that was changed since is sent
//! again.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_env::{FailureKind, Phase, StoreUpload, UploadTarget, Uploaded};
use agent_fs::Links;
use futures_util::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::super::tell::{Teller, busy};
use super::super::{Done, disk, failed};
use super::target::{DataTarget, Outgoing};
use super::{Meter, key_of};

/// How many files are sent at a time.
const AT_ONCE: usize = 4;
/// How many folders may lie in each other.
const MOST_DEPTH: usize = 64;
/// How many files are sent at most: the names of all are in memory.
const MOST_FILES: usize = 1_000_000;

/// Sends all files that have not arrived yet.
pub(crate) async fn upload(upload: StoreUpload, teller: Arc<Teller>) -> Done<Uploaded> {
    teller.mark(busy(Phase::Upload, ""));
    let FoundFiles { folder, files, left_out } = list(&upload)?;
    let bytes = files.iter().map(|file| file.size).sum();
    let told = Uploaded { files: files.len() as u64, bytes, left_out };
    let target = DataTarget::open(&upload.to, Duration::from_secs(upload.stall_s.max(1)))?;
    let notes = Notes::open(&upload.notes, &upload.to)
        .map_err(|error| disk::trouble(&upload.notes, "the notes of an upload cannot be read", &error))?;
    let sending =
        Sending { folder, target, notes, meter: Meter::new(Phase::Upload, (told.files, bytes), teller) };
    let work = futures_util::stream::iter(files).map(|file| sending.one(file));
    work.buffer_unordered(AT_ONCE).try_collect::<()>().await?;
    Ok(told)
}

/// A file that a job left.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LeftFile {
    /// Its path below the folder.
    path: String,
    /// Its path below the target; empty if it is the target.
    name: String,
    size: u64,
    /// When it was last changed, in a form that only has to differ.
    changed: String,
}

/// An upload in progress.
struct Sending {
    folder: OwnedFd,
    target: DataTarget,
    notes: Notes,
    meter: Meter,
}

impl Sending {
    async fn one(&self, left: LeftFile) -> Done<()> {
        if !self.notes.has(&left) {
            let file = open(&self.folder, &left.path).map_err(|error| {
                failed(
                    FailureKind::Other,
                    format!("`{}` cannot be read: {}", left.path, io::Error::from(error)),
                )
            })?;
            let arrived = |bytes| {
                self.meter.add(bytes);
                self.meter.pass(&left.path);
            };
            let outgoing = Outgoing { name: &left.name, file: &file, size: left.size, arrived: &arrived };
            self.target.put(&outgoing).await?;
            self.notes.add(&left);
        } else {
            self.meter.add(left.size);
        }
        self.meter.file_done();
        Ok(())
    }
}

/// What there is to send.
struct FoundFiles {
    folder: OwnedFd,
    files: Vec<LeftFile>,
    left_out: Vec<String>,
}

/// Finds the files. A job that removed the folder left none.
fn list(upload: &StoreUpload) -> Done<FoundFiles> {
    let shown = upload.base.join(&upload.folder);
    let fail = |error: Errno| disk::trouble(&shown, "an output cannot be listed", &io::Error::from(error));
    let base =
        rustix::fs::open(&upload.base, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(fail)?;
    let flags = OFlags::DIRECTORY | OFlags::RDONLY;
    let (folder, is_there) =
        match agent_fs::open_beneath(&base, &upload.folder, flags, Mode::empty(), Links::Never) {
            Ok(folder) => (folder, true),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => (base, false),
            Err(error) => return Err(fail(error)),
        };
    let mut found = FoundFiles { folder, files: Vec::new(), left_out: Vec::new() };
    match &upload.file {
        _ if !is_there => {}
        Some(name) => match look(&found.folder, name) {
            Ok(stat) => found.files.push(LeftFile { name: String::new(), ..left(name.clone(), &stat) }),
            Err(Errno::NOENT) => {}
            Err(error) => found.left_out.push(format!("{name} {}", io::Error::from(error))),
        },
        None => {
            let (mut files, mut left_out) = (Vec::new(), Vec::new());
            walk(&found.folder, "", 0, &mut files, &mut left_out).map_err(fail)?;
            (found.files, found.left_out) = (files, left_out);
        }
    }
    if found.files.len() > MOST_FILES {
        return Err(failed(FailureKind::Refused, format!("an output has more than {MOST_FILES} files")));
    }
    Ok(found)
}

/// Adds the files below a folder. A link counts as the file that it leads to, as long as that is below the folder.
fn walk(
    folder: &OwnedFd,
    below: &str,
    depth: usize,
    files: &mut Vec<LeftFile>,
    left_out: &mut Vec<String>,
) -> Result<(), Errno> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY;
    let at = agent_fs::open_beneath(folder, below, flags, Mode::empty(), Links::Never)?;
    for entry in Dir::read_from(&at)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") || files.len() > MOST_FILES {
            continue;
        }
        let Ok(text) = name.to_str() else {
            let folder = if below.is_empty() { String::new() } else { format!("{below}/") };
            left_out.push(format!("{folder}{} has a name that is no text", name.to_string_lossy()));
            continue;
        };
        let path = if below.is_empty() { text.to_owned() } else { format!("{below}/{text}") };
        let stat = match rustix::fs::statat(&at, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => continue,
            stat => stat?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if depth < MOST_DEPTH => walk(folder, &path, depth + 1, files, left_out)?,
            FileType::Directory => left_out.push(format!("{path} lies too deep")),
            FileType::RegularFile => files.push(left(path, &stat)),
            FileType::Symlink => match look(folder, &path) {
                Ok(stat) => files.push(left(path, &stat)),
                Err(_) => left_out.push(format!("{path} is a link that leads to no file of the output")),
            },
            _ => left_out.push(format!("{path} is no file")),
        }
    }
    Ok(())
}

fn left(path: String, stat: &Stat) -> LeftFile {
    let size = u64::try_from(stat.st_size).unwrap_or_default();
    LeftFile { name: path.clone(), path, size, changed: format!("{}.{}", stat.st_mtime, stat.st_mtime_nsec) }
}

fn open(folder: &OwnedFd, path: &str) -> Result<File, Errno> {
    agent_fs::open_beneath(folder, path, OFlags::RDONLY, Mode::empty(), Links::Inside).map(File::from)
}

/// What is known of a regular file.
fn look(folder: &OwnedFd, path: &str) -> Result<Stat, Errno> {
    let stat = rustix::fs::fstat(open(folder, path)?)?;
    if FileType::from_raw_mode(stat.st_mode).is_file() { Ok(stat) } else { Err(Errno::INVAL) }
}

/// What has arrived: a line for each file, which is the hash of where it went, its name and its state. Remains of a
/// line that was not written to its end stand for no file.
struct Notes {
    target: String,
    known: HashSet<String>,
    file: Mutex<File>,
}

impl Notes {
    fn open(path: &Path, target: &UploadTarget) -> io::Result<Notes> {
        let known = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => String::new(),
            text => text?,
        };
        let target = match target {
            UploadTarget::Store { url, path, .. } => format!("{url}\n{path}"),
            UploadTarget::Folder { root, path, .. } => format!("{}\n{path}", root.display()),
        };
        let file = Mutex::new(File::options().create(true).append(true).open(path)?);
        Ok(Notes { target, known: known.lines().map(str::to_owned).collect(), file })
    }

    fn key(&self, left: &LeftFile) -> String {
        key_of([self.target.as_str(), &left.name, &left.size.to_string(), &left.changed])
    }

    fn has(&self, left: &LeftFile) -> bool {
        self.known.contains(&self.key(left))
    }

    /// Notes that a file has arrived. Without the note it is sent again.
    fn add(&self, left: &LeftFile) {
        let line = format!("\n{}\n", self.key(left));
        let _ = self.file.lock().write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn request(dir: &Path, file: Option<&str>) -> StoreUpload {
        let share = dir.join("share");
        fs::create_dir_all(&share).unwrap();
        StoreUpload {
            base: dir.to_owned(),
            folder: "out/model".into(),
            file: file.map(str::to_owned),
            to: UploadTarget::Folder { root: share, path: "runs/1".to_owned(), owner: None },
            notes: dir.join("notes"),
            stall_s: 1,
        }
    }

    fn sent(request: StoreUpload) -> Done<Uploaded> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(upload(request, Teller::to_stdout()))
    }

    #[test]
    fn test_all_that_is_below_the_folder_is_sent_and_nothing_from_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out/model");
        fs::create_dir_all(out.join("deep")).unwrap();
        fs::write(out.join("a"), "a").unwrap();
        fs::write(out.join("deep/ä b%41+.bin"), "b").unwrap();
        fs::write(dir.path().join("secret"), "s").unwrap();
        symlink("deep/ä b%41+.bin", out.join("latest")).unwrap();
        symlink("../../secret", out.join("stolen")).unwrap();
        symlink("/etc/passwd", out.join("passwd")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, out.join("pipe"), Mode::from(0o600)).unwrap();
        let told = sent(request(dir.path(), None)).unwrap();
        assert_eq!((told.files, told.bytes, told.left_out.len()), (3, 3, 3), "{told:?}");
        let share = dir.path().join("share/runs/1");
        for (name, text) in [("a", "a"), ("deep/ä b%41+.bin", "b"), ("latest", "b")] {
            assert_eq!(fs::read_to_string(share.join(name)).unwrap(), text, "{name}");
        }
        assert!(!share.join("stolen").exists() && !share.join("passwd").exists());
    }

    #[test]
    fn test_what_has_arrived_is_not_sent_again_unless_it_was_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (out, share) = (dir.path().join("out/model"), dir.path().join("share/runs/1"));
        fs::create_dir_all(&out).unwrap();
        fs::write(out.join("a"), "first").unwrap();
        fs::write(out.join("b"), "b").unwrap();
        sent(request(dir.path(), None)).unwrap();
        fs::write(share.join("b"), "noted").unwrap();
        fs::write(out.join("a"), "second, and longer").unwrap();
        // A note that was cut.
        let mut notes = File::options().append(true).open(dir.path().join("notes")).unwrap();
        notes.write_all(b"0123").unwrap();
        assert_eq!(sent(request(dir.path(), None)).unwrap().files, 2);
        let read = |name: &str| fs::read_to_string(share.join(name)).unwrap();
        assert_eq!((read("a"), read("b")), ("second, and longer".to_owned(), "noted".to_owned()));
        let other = UploadTarget::Folder { root: dir.path().join("share"), path: "2".into(), owner: None };
        sent(StoreUpload { to: other, ..request(dir.path(), None) }).unwrap();
        assert!(dir.path().join("share/2/b").exists(), "it had arrived elsewhere");
    }

    #[test]
    fn test_one_file_gets_exactly_the_address_and_nothing_is_no_mistake() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(sent(request(dir.path(), Some("model"))).unwrap().files, 0);
        let out = dir.path().join("out/model");
        fs::create_dir_all(&out).unwrap();
        assert_eq!(sent(request(dir.path(), Some("model"))).unwrap().files, 0);
        fs::write(out.join("model"), "m").unwrap();
        fs::write(out.join("other"), "o").unwrap();
        assert_eq!(sent(request(dir.path(), Some("model"))).unwrap().files, 1);
        assert_eq!(fs::read_to_string(dir.path().join("share/runs/1")).unwrap(), "m");
    }
}
