//! The user that builders run as, if it is not the daemon's own user.
//!
//! Installers run code of unknown authors: it must not run as root, nor as a user whose jobs could change what others
//! use. So it runs as a user of its own, to whom the directories of the build are lent; the files it made are given
//! to the daemon before anybody uses them, and nobody else can write to them.
//!
//! Invariant: no process of a builder runs any more when its files are taken back: they are in a PID namespace of
//! their own, and the kernel kills them with its first process.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_command::Command;
use agent_spawn::GivenPart;

/// The user of builders, and the program that switches to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Builder {
    /// Its user and group number.
    pub id: u32,
    /// The supervisor's program.
    pub shim: PathBuf,
    /// The state directory, of which it sees what it works on.
    pub state_dir: PathBuf,
    /// The owner of jobs that it builds for, and his caches; absent where it works for nobody in particular.
    pub owned: Option<Arc<OwnerCache>>,
}

/// The caches of the installers of one owner. It is not removed while somebody holds it.
#[derive(Debug, PartialEq, Eq)]
pub struct OwnerCache {
    /// The name of its directory.
    pub(super) name: String,
    /// The directory.
    pub(super) dir: PathBuf,
}

impl Builder {
    /// Makes a command run as this user.
    pub(crate) fn runs(&self, command: Command) -> Command {
        let command = command.run_as(&self.shim, self.id, &self.state_dir);
        match &self.owned {
            Some(cache) => command.of_owner(&cache.name).sees(&cache.dir),
            None => command,
        }
    }

    /// Lets it add, replace and remove files in a directory; but not change those that are there already, which
    /// others may share.
    pub(super) fn lend(&self, dir: &Path) -> io::Result<()> {
        agent_spawn::give(dir, self.id, self.id, GivenPart::Directories)
    }

    /// Gives everything that it made to the daemon.
    pub(crate) fn take_back(&self, dir: &Path) -> io::Result<()> {
        agent_spawn::take(dir, self.id)
    }

    /// Makes a cache that belongs to it alone. The root directory changes its owner last: so after an interruption it
    /// still shows that this must be repeated.
    pub(crate) fn own(&self, dir: &Path) -> io::Result<()> {
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

    const ID: u32 = 2_000_000_000;

    fn builder() -> Builder {
        Builder { id: ID, shim: PathBuf::new(), state_dir: PathBuf::new(), owned: None }
    }

    fn uid(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().uid()
    }

    #[test]
    fn test_what_is_lent_comes_back_safe_and_what_was_there_stays_as_it_is() {
        if agent_shim::User::own().uid != 0 {
            return; // only root and a helper can lend
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
        // A change of the owner clears set-id bits, and a builder can set them on its own files.
        fs::set_permissions(&made, Permissions::from_mode(0o6777)).unwrap();
        builder().take_back(&prefix).unwrap();
        assert_eq!(uid(&made), 0);
        assert_eq!(made.metadata().unwrap().mode() & 0o7777, 0o755);
        assert_eq!([uid(&prefix), uid(&link), uid(&outside)], [0; 3]);
        assert_eq!(outside.metadata().unwrap().mode() & 0o7777, 0o644);
    }

    #[test]
    fn test_a_cache_of_before_becomes_its_own() {
        if agent_shim::User::own().uid != 0 {
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
