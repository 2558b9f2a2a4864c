//! Whom builders run as, where that is not the daemon's own user.
//!
//! What installers run is code of strangers: it must not be root's, nor that of a user whose jobs could change what
//! others use. So it runs as a user of its own, to whom the directories of what is being built are lent; what it made
//! is the daemon's before anybody uses it, and nobody else can write to it.
//!
//! Invariant: nothing of a builder runs any more when its work is taken back: its processes have numbers of their own,
//! and the kernel ends them with the first of them.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use agent_spawn::GivenPart;

/// A user that builds, and the program that becomes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Builder {
    /// Its user and group number.
    pub id: u32,
    /// The supervisor's program.
    pub shim: PathBuf,
}

impl Builder {
    /// Lets it add, replace and remove what is in a directory; not change the files that are there already, which others
    /// may share.
    pub(super) fn lend(&self, dir: &Path) -> io::Result<()> {
        agent_spawn::give(dir, self.id, self.id, GivenPart::Directories)
    }

    /// Makes everything that it made the daemon's.
    pub(super) fn take_back(&self, dir: &Path) -> io::Result<()> {
        agent_spawn::take(dir, Some(self.id))
    }

    /// A cache that is its alone. The root changes hands last: when it is cut short, that still says that something is
    /// to be done.
    pub(super) fn own(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        match dir.symlink_metadata()?.uid() == self.id {
            true => Ok(()),
            false => agent_spawn::give(dir, self.id, self.id, GivenPart::Everything),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, lchown, symlink};

    use super::*;
    use crate::exec::own_user;

    const ID: u32 = 2_000_000_000;

    fn builder() -> Builder {
        Builder { id: ID, shim: PathBuf::new() }
    }

    fn uid(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().uid()
    }

    #[test]
    fn test_what_is_lent_comes_back_safe_and_what_was_there_stays_as_it_is() {
        if own_user().uid != 0 {
            return; // nobody else can lend
        }
        let temp = tempfile::tempdir().unwrap();
        let prefix = temp.path().join("env");
        fs::create_dir_all(prefix.join("lib/python")).unwrap();
        let (shared, outside) = (prefix.join("lib/shared.so"), temp.path().join("outside"));
        fs::write(&shared, "of the cache").unwrap();
        fs::write(&outside, "root's").unwrap();
        symlink(&outside, prefix.join("lib/link")).unwrap();
        builder().lend(&prefix).unwrap();
        assert_eq!([uid(&prefix), uid(&prefix.join("lib/python"))], [ID; 2]);
        assert_eq!([uid(&shared), uid(&prefix.join("lib/link")), uid(&outside)], [0; 3]);

        let made = prefix.join("lib/python/made");
        fs::write(&made, "x").unwrap();
        fs::set_permissions(&made, Permissions::from_mode(0o6777)).unwrap();
        let link = prefix.join("lib/python/link");
        symlink(&outside, &link).unwrap();
        for path in [&made, &link] {
            lchown(path, Some(ID), Some(ID)).unwrap();
        }
        // A change of the owner takes set-id bits away, and a builder can give them to what is its.
        fs::set_permissions(&made, Permissions::from_mode(0o6777)).unwrap();
        builder().take_back(&prefix).unwrap();
        assert_eq!(uid(&made), 0);
        assert_eq!(made.metadata().unwrap().mode() & 0o7777, 0o755);
        assert_eq!([uid(&prefix), uid(&link), uid(&outside)], [0; 3]);
        assert_eq!(outside.metadata().unwrap().mode() & 0o7777, 0o644);
    }

    #[test]
    fn test_a_cache_of_before_becomes_its_own() {
        if own_user().uid != 0 {
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        let cache = temp.path().join("uv");
        fs::create_dir(&cache).unwrap();
        fs::write(cache.join("wheel"), "x").unwrap();
        builder().own(&cache).unwrap();
        assert_eq!([uid(&cache), uid(&cache.join("wheel"))], [ID; 2]);
    }
}
