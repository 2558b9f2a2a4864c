//! What a job left, as one [`Snapshot`]: several directories, each below its prefix, with all they hold.
//!
//! A job may have put anything anywhere. So of each entry one of three things is said, and none is passed over: it is
//! stored; or its content is lost with the directory ([`Snapshot::unread`]); or there is nothing of the job's in it
//! ([`Snapshot::left_out`]): links that lead out or nowhere, pipes, sockets.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::left_out::{LeftOut, ScanError, Unread, is_kept_back};
use super::scan::{Snapshot, complete, each_unknown, hash};
use super::tree::join;
use super::walk::{Folder, Root, Rules, walk};

/// Which directories outside of a job's own it may have left its outputs in, by a link in the place of a folder.
#[derive(Debug, Clone, Default)]
pub struct Elsewhere {
    /// None, and why, for people.
    pub closed: Option<String>,
    /// Only those of this user, and only files of that user in them; whatever this process may read when absent.
    pub owner: Option<u32>,
    /// Directories that the job saw in another place than they are, or that are gone.
    pub moved: Vec<(PathBuf, Option<PathBuf>)>,
}

impl Elsewhere {
    /// Opens what the link in the place of the folder at `path` leads to.
    fn open(&self, path: &Path) -> Result<Root, Missed> {
        let target = std::fs::read_link(path)
            .map_err(|error| Missed::lost(path, format!("cannot be read: {error}")))?;
        let leads = |why: &str| format!("is a link to {}, {why}", target.display());
        if let Some(why) = &self.closed {
            return Err(Missed::lost(path, leads(why)));
        }
        let moved = self.moved.iter().find_map(|(from, to)| Some((target.strip_prefix(from).ok()?, to)));
        let place = match moved {
            None => path.to_owned(),
            Some((rest, Some(to))) => to.join(rest),
            Some((_, None)) => {
                return Err(Missed::lost(path, leads("which was the job's own and went with it")));
            }
        };
        if place.canonicalize().is_ok_and(|place| path.starts_with(place)) {
            return Err(Missed::lost(path, leads("and the job's own directory is in it")));
        }
        Root::open_foreign(&place, self.owner).map_err(|error| match error {
            Errno::NOENT | Errno::LOOP => Missed::Nothing(leads("which does not exist")),
            Errno::NOTDIR => Missed::lost(path, leads("which is no directory")),
            Errno::ACCESS if self.owner.is_some() => {
                Missed::lost(path, leads("which is no directory of the job's user"))
            }
            error => Missed::lost(path, leads(&format!("which cannot be read: {}", io::Error::from(error)))),
        })
    }
}

/// What is said of a folder that is none.
enum Missed {
    /// What the job left there is lost.
    Lost(Unread),
    /// The job left nothing there.
    Nothing(String),
}

impl Missed {
    fn lost(path: &Path, why: String) -> Missed {
        Missed::Lost(Unread { path: path.to_owned(), why })
    }
}

/// Several directories below `base` as one, each below its prefix (`""`, `outputs`, `named-outputs/model`),
/// with all they hold: no ignore rules. A directory that does not exist is empty; one that is a link out of `base` is
/// read as far as it may be (`elsewhere`). Where two parts have the same path, directories are merged, and of anything
/// else the first part's is kept, which is told. Files that this process may not read, that a broken disk does not
/// return, or that are larger than their disk are listed in [`Snapshot::unread`], and so are the files named in
/// `without`; the rest is read. Ends soon after `stop` is set. Blocks.
pub fn scan_outputs(
    base: &Path,
    parts: &[(&str, &Path)],
    without: &[Unread],
    elsewhere: &Elsewhere,
    stop: &AtomicBool,
) -> Result<Snapshot, ScanError> {
    let mut left_out = LeftOut { unread: without.to_vec(), ..LeftOut::default() };
    let mut whole = Folder::new();
    for (prefix, dir) in parts {
        let Some(root) = open_part(base, dir, prefix, elsewhere, &mut left_out)? else { continue };
        let mut of_part = LeftOut::default();
        let mut part = walk(&Arc::new(root), Rules::Outputs, &[], &mut of_part)?;
        left_out.count += of_part.count;
        left_out.unread.append(&mut of_part.unread);
        left_out.entries.extend(of_part.entries.iter().map(|entry| join(prefix, entry)));
        if !without.is_empty() {
            part.retain_files(&|leaf| !without.iter().any(|unread| unread.path == leaf.place.shown()));
        }
        for segment in prefix.split('/').rev().filter(|segment| !segment.is_empty()) {
            part = Folder { folders: vec![(segment.into(), part)], ..Folder::new() };
        }
        join_folders(&mut whole, part, "", &mut left_out);
    }
    let disk = disk_size(base);
    let unread = Mutex::new(std::mem::take(&mut left_out.unread));
    let read = each_unknown(&mut whole, |buffer, leaf| match hash(leaf, buffer, disk, stop) {
        // A file that vanished since it was listed counts as absent.
        Err(ScanError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(ScanError::Read { path, source }) if is_kept_back(&source) => {
            unread.lock().push(Unread::because(path, &source));
            Ok(())
        }
        Err(ScanError::Unfit(unfit)) => {
            unread.lock().push(unfit);
            Ok(())
        }
        hashed => hashed,
    })?;
    whole.retain_files(&|leaf| leaf.hash.is_some());
    left_out.unread = unread.into_inner();
    left_out.unread.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    complete(base, whole, read, left_out)
}

/// The directory of a part; `None` if there is none, which was noted where that is not just nothing.
fn open_part(
    base: &Path,
    dir: &Path,
    prefix: &str,
    elsewhere: &Elsewhere,
    left_out: &mut LeftOut,
) -> Result<Option<Root>, ScanError> {
    let (path, source) = match Root::open_below(base, dir) {
        Ok(root) => return Ok(Some(root)),
        Err(ScanError::Directory { path, source }) => (path, source),
        Err(error) => return Err(error),
    };
    let kind = match rustix::fs::lstat(&path) {
        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
        Err(Errno::NOENT) => return Ok(None),
        Err(_) => FileType::Unknown,
    };
    let missed = match kind {
        FileType::Symlink => match elsewhere.open(&path) {
            Ok(root) => return Ok(Some(root)),
            Err(missed) => missed,
        },
        FileType::RegularFile => Missed::lost(&path, "is a file in the place of a folder".to_owned()),
        FileType::Directory | FileType::Unknown if is_kept_back(&source) => {
            Missed::Lost(Unread::because(path, &source))
        }
        FileType::Directory | FileType::Unknown => return Err(ScanError::Directory { path, source }),
        _ => Missed::Nothing("is neither file, directory nor link".to_owned()),
    };
    match missed {
        Missed::Lost(unread) => left_out.unread.push(unread),
        Missed::Nothing(why) => left_out.warn(prefix, &why),
    }
    Ok(None)
}

/// The bytes of the whole file system that `path` is on; `u64::MAX` where that is unknown.
pub(super) fn disk_size(path: &Path) -> u64 {
    let told = rustix::fs::statvfs(path).map_or(0, |disk| disk.f_blocks.saturating_mul(disk.f_frsize));
    if told == 0 { u64::MAX } else { told }
}

fn join_folders(into: &mut Folder, from: Folder, path: &str, left_out: &mut LeftOut) {
    let mut taken: HashSet<Box<str>> = into.names().map(Box::from).collect();
    let mut twice = |name: &str, left_out: &mut LeftOut| {
        let twice = !taken.insert(name.into());
        if twice {
            left_out.warn(
                &join(path, name),
                "exists twice: what the job wrote is kept, and what it logged is not",
            );
        }
        twice
    };
    into.files.extend(from.files.into_iter().filter(|leaf| !twice(&leaf.place.name, left_out)));
    into.links.extend(from.links.into_iter().filter(|(name, _)| !twice(name, left_out)));
    for (name, folder) in from.folders {
        match into.folders.iter_mut().find(|(other, _)| *other == name) {
            Some((_, into)) => join_folders(into, folder, &join(path, &name), left_out),
            None if twice(&name, left_out) => {}
            None => into.folders.push((name, folder)),
        }
    }
    into.sort();
}

#[cfg(test)]
mod tests;
