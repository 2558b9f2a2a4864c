//! Gives a job the files of an entry.
//!
//! Invariant: whatever the job does with what it was given, the entry stays as it is.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::Path;

/// Lays out a file or a folder; it belongs to the user and the group with these numbers.
pub(super) fn place(from: &Path, to: &Path, owner: Option<(u32, u32)>, may_link: bool) -> io::Result<()> {
    if !from.symlink_metadata()?.is_dir() {
        return place_file(from, to, owner, may_link);
    }
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        place(&entry.path(), &to.join(entry.file_name()), owner, may_link)?;
    }
    own(to, owner)
}

fn place_file(from: &Path, to: &Path, owner: Option<(u32, u32)>, may_link: bool) -> io::Result<()> {
    // Fails where the job's directory is on another file system, or a file has too many names.
    if may_link && fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    let (mut source, mut copy) = (File::open(from)?, File::create_new(to)?);
    // Where the file system can share blocks, a copy takes no room.
    if rustix::fs::ioctl_ficlone(&copy, &source).is_err() {
        io::copy(&mut source, &mut copy)?;
    }
    copy.set_permissions(Permissions::from_mode(0o664))?;
    own(to, owner)
}

fn own(path: &Path, owner: Option<(u32, u32)>) -> io::Result<()> {
    owner.map_or(Ok(()), |(uid, gid)| lchown(path, Some(uid), Some(gid)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn test_a_copy_is_its_own_and_a_link_is_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let (from, copy, link) = (dir.path().join("from"), dir.path().join("copy"), dir.path().join("link"));
        fs::create_dir_all(from.join("sub")).unwrap();
        fs::write(from.join("sub/a"), "rows").unwrap();
        fs::set_permissions(from.join("sub/a"), Permissions::from_mode(0o444)).unwrap();
        place(&from, &copy, None, false).unwrap();
        place(&from, &link, None, true).unwrap();
        let file = |at: &Path| at.join("sub/a").metadata().unwrap();
        assert_eq!(file(&link).ino(), file(&from).ino());
        assert_ne!(file(&copy).ino(), file(&from).ino());
        fs::write(copy.join("sub/a"), "changed").unwrap();
        assert_eq!(fs::read_to_string(from.join("sub/a")).unwrap(), "rows");
        assert!(place(&from, &copy, None, false).is_err(), "nothing is written over");
    }
}
