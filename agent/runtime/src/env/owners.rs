//! The users of builders, one for each owner of jobs, and the caches of installers that belong to them.
//!
//! ```text
//! PACKAGES/of/NAME/        the caches of one owner: `pip/` and `uv/`, of the user that builds for him
//! PACKAGES/of/.used-NAME   written when it was last used
//! ```
//!
//! Which number builds for whom is said by the owner of the directory alone: only root gives it, so no record of the daemon
//! can differ from it. A number is free again when the directory is removed, which is done when nothing was built for its
//! owner for a while.
//!
//! Invariants: no number has two directories; a directory is not removed while a [`Builder`] of its owner exists.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::builder::{Builder, OwnerCache};
use super::marker::own_bytes;

/// Beginning of the name of a note of the last use.
const USED: &str = ".used-";

/// Gives each owner a builder of his own.
#[derive(Debug)]
pub struct OwnerBuilders {
    /// The builder that works for nobody in particular; its number is the first of the range.
    common: Builder,
    uids: RangeInclusive<u32>,
    places: PathBuf,
    /// The caches that builders use now, by name. Locked while a number is given or taken away.
    used: Mutex<BTreeMap<String, Weak<OwnerCache>>>,
}

impl OwnerBuilders {
    /// With these numbers, and caches in `packages`.
    pub fn new(common: Builder, uids: RangeInclusive<u32>, packages: &Path) -> OwnerBuilders {
        OwnerBuilders { common, uids, places: packages.join("of"), used: Mutex::default() }
    }

    /// The builder of this owner. Blocks: looks at the directories of all.
    pub(super) fn of(&self, owner: &str) -> io::Result<Builder> {
        let name = plain(owner);
        let mut used = self.used.lock();
        let dir = self.places.join(&name);
        fs::create_dir_all(&dir)?;
        let id = match dir.symlink_metadata()?.uid() {
            id if self.is_given(id) => id,
            _ => {
                let taken: BTreeSet<u32> = self.given()?.into_values().chain(running()).collect();
                let id = free(self.given_out(), &taken).ok_or_else(|| {
                    io::Error::other("no number of `job_uids` is free for builds of one more owner")
                })?;
                Builder { id, ..self.common.clone() }.own(&dir)?;
                id
            }
        };
        File::create(self.places.join(format!("{USED}{name}")))?;
        let cache = used.get(&name).and_then(Weak::upgrade);
        let cache = cache.unwrap_or_else(|| Arc::new(OwnerCache { name: name.clone(), dir }));
        used.insert(name, Arc::downgrade(&cache));
        Ok(Builder { id, owned: Some(cache), ..self.common.clone() })
    }

    /// Removes the caches that nobody has used for this long, and what builders shared before each owner had his own.
    /// Returns how many bytes that freed. Blocks.
    pub(super) fn sweep(&self, unused_for: Duration) -> io::Result<u64> {
        let mut freed = 0;
        for old in ["pip", "uv"] {
            freed += self.remove(&self.places.with_file_name(old), self.common.id)?;
        }
        let mut used = self.used.lock();
        used.retain(|_, cache| cache.strong_count() > 0);
        for (name, id) in self.given()? {
            let note = self.places.join(format!("{USED}{name}"));
            let last = note.metadata().and_then(|note| note.modified());
            let is_old = last.map_or(true, |last| last.elapsed().is_ok_and(|since| since >= unused_for));
            if is_old && !used.contains_key(&name) {
                freed += self.remove(&self.places.join(&name), id)?;
                let _ = fs::remove_file(note); // it is written anew
            }
        }
        Ok(freed)
    }

    /// Of a cache that only its builder may read, the size is known once it is the daemon's.
    fn remove(&self, dir: &Path, id: u32) -> io::Result<u64> {
        if dir.symlink_metadata().is_err() {
            return Ok(0);
        }
        Builder { id, ..self.common.clone() }.take_back(dir)?;
        let bytes = own_bytes(dir);
        agent_spawn::remove_tree(dir)?;
        Ok(bytes)
    }

    /// The number of each directory that has one.
    fn given(&self) -> io::Result<BTreeMap<String, u32>> {
        let entries = match self.places.read_dir() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            entries => entries?,
        };
        let mut given = BTreeMap::new();
        for entry in entries {
            let entry = entry?;
            let id = entry.metadata()?.uid();
            if self.is_given(id)
                && let Some(name) = entry.file_name().to_str()
            {
                given.insert(name.to_owned(), id);
            }
        }
        Ok(given)
    }

    fn is_given(&self, id: u32) -> bool {
        self.given_out().contains(&id)
    }

    /// The numbers of owners.
    fn given_out(&self) -> RangeInclusive<u32> {
        self.uids.start() + 1..=*self.uids.end()
    }
}

fn free(mut uids: RangeInclusive<u32>, taken: &BTreeSet<u32>) -> Option<u32> {
    uids.find(|uid| !taken.contains(uid))
}

/// The users of all processes: jobs of a release before may have numbers that builders have now.
fn running() -> impl Iterator<Item = u32> {
    let is_process = |name: &OsStr| name.to_str().is_some_and(|name| name.parse::<u32>().is_ok());
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(move |entry| is_process(&entry.file_name()))
        .filter_map(|entry| Some(entry.metadata().ok()?.uid()))
}

/// The name of an owner as that of a directory.
fn plain(owner: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_@".contains(&byte);
    owner.bytes().fold(String::new(), |mut name, byte| {
        match is_plain(byte) {
            true => name.push(char::from(byte)),
            false => _ = write!(name, "%{byte:02x}"),
        }
        name
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builders(packages: &Path) -> OwnerBuilders {
        let common =
            Builder { id: 2_000_000_000, shim: PathBuf::new(), state_dir: PathBuf::new(), owned: None };
        OwnerBuilders::new(common, 2_000_000_000..=2_000_000_002, packages)
    }

    #[test]
    fn test_each_owner_keeps_a_number_that_no_other_has() {
        if agent_shim::User::own().uid != 0 {
            return; // only root gives files to others
        }
        let packages = tempfile::tempdir().unwrap();
        let all = builders(packages.path());
        let (ada, bob) = (all.of("user ada").unwrap(), all.of("user bob").unwrap());
        let mut ids = [ada.id, bob.id];
        ids.sort_unstable();
        assert_eq!(ids, [2_000_000_001, 2_000_000_002]);
        let found = packages.path().join("of/user%20ada").metadata().unwrap();
        assert_eq!((found.uid(), found.gid()), (ada.id, ada.id));
        assert_eq!(builders(packages.path()).of("user ada").unwrap().id, ada.id, "after a restart, too");
        assert!(all.of("user eve").unwrap_err().to_string().contains("job_uids"));
    }

    #[test]
    fn test_a_cache_goes_when_it_is_not_used_and_its_number_is_free() {
        if agent_shim::User::own().uid != 0 {
            return;
        }
        let packages = tempfile::tempdir().unwrap();
        let all = builders(packages.path());
        let (ada, bob) = (all.of("ada").unwrap(), all.of("bob").unwrap());
        fs::write(packages.path().join("of/ada/wheel"), [0; 5000]).unwrap();
        assert_eq!(all.sweep(Duration::from_secs(3600)).unwrap(), 0);
        drop(ada);
        assert!(all.sweep(Duration::ZERO).unwrap() >= 4096);
        assert!(!packages.path().join("of/ada").exists() && packages.path().join("of/bob").exists());
        assert_ne!(all.of("eve").unwrap().id, bob.id);
    }

    #[test]
    fn test_no_two_owners_have_one_directory() {
        let names = ["a", "a/b", "a%2fb", "..", ".", "", "ä", "A"].map(plain);
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        assert!(names.iter().all(|name| !name.contains(['/', '.'])));
    }
}
