//! The package cache: which packages are in it and whole, and who uses or changes them.
//!
//! Owns `pkgs` (extracted packages, laid out as the libraries do it) and `locks` (a lock file for each package, with the
//! address it came from) below the cache. Hides how a whole package is distinguished from a broken one.
//!
//! Invariants: a package is used under its shared lock and changed under its exclusive one, so that fetching one
//! package delays no build that does not need it; a package is used only if it was completed (its digest is written
//! last) and each of its files is there with its size, so a power cut or a file changed by hand leads to another
//! download and never to a broken environment; and only if each of its files is one and each of its links stays in it,
//! whoever unpacked it.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use rattler_conda_types::PackageRecord;
use url::Url;

use super::package::PackageInfo;
use super::tree::{self, OpenTree};

/// Offset of the digest in the file that completes a package: after a revision.
const DIGEST_AT: usize = 8;

/// A package cache.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    /// The extracted packages.
    pub(crate) pkgs: PathBuf,
    locks: PathBuf,
}

/// The directory and the lock file of one package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PackageDir {
    /// Its name, version and build.
    pub(crate) name: String,
    /// Its directory.
    pub(crate) dir: PathBuf,
    lock: PathBuf,
}

/// Which package of a name is meant.
#[derive(Debug, Clone)]
pub(crate) enum Wanted {
    /// Whichever is there.
    Any,
    /// That of an archive with this digest.
    Digest([u8; 32]),
    /// That of this address, whose digest nobody knows: another channel has another one of the same name.
    From(Url),
}

/// A whole package.
#[derive(Debug)]
pub(crate) struct Whole {
    /// Its files.
    pub(crate) tree: OpenTree,
    /// What it says of itself.
    pub(crate) package: PackageInfo,
    /// Digest of the archive it came from.
    pub(crate) sha256: Option<[u8; 32]>,
}

impl Cache {
    /// Opens a cache, and creates directories that are missing.
    pub(crate) fn open(root: &Path) -> io::Result<Self> {
        let cache = Self { pkgs: root.join("pkgs"), locks: root.join("locks") };
        std::fs::create_dir_all(&cache.pkgs)?;
        std::fs::create_dir_all(&cache.locks)?;
        std::fs::create_dir_all(root.join("repodata"))?;
        Ok(cache)
    }

    /// The directory of a package.
    pub(crate) fn place(&self, record: &PackageRecord) -> PackageDir {
        self.named(&format!("{}-{}-{}", record.name.as_normalized(), record.version, record.build))
    }

    /// The same, by the name of the directory.
    pub(crate) fn named(&self, name: &str) -> PackageDir {
        PackageDir { name: name.to_owned(), dir: self.pkgs.join(name), lock: self.locks.join(name) }
    }

    /// The lock file of all package lists of channels; shared by builds that fetch one.
    pub(crate) fn lists(&self) -> io::Result<File> {
        agent_fs::open_lock(&self.locks.join("lists of channels")) // no package is called so
    }
}

impl PackageDir {
    /// Its lock file, whose modification time is the package's last use.
    pub(crate) fn lock_file(&self) -> io::Result<File> {
        agent_fs::open_lock(&self.lock)
    }

    /// Notes that it is used now. An error, such as a full disk, is ignored.
    pub(crate) fn touch(&self, lock: &File) {
        use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW as _ };
        let _ = futimens(lock, &Timestamps { last_access: now, last_modification: now });
    }

    fn completion(&self) -> PathBuf {
        let mut path = self.dir.clone().into_os_string();
        path.push(".lock");
        path.into()
    }

    /// Notes where the package was fetched from; the caller holds its exclusive lock, through this file.
    pub(crate) fn note_origin(&self, mut lock: &File, url: &Url) -> io::Result<()> {
        lock.set_len(0)?;
        lock.rewind()?;
        lock.write_all(url.as_str().as_bytes())
    }

    fn is(&self, wanted: &Wanted, digest: [u8; 32]) -> bool {
        match wanted {
            Wanted::Any => true,
            Wanted::Digest(wanted) => *wanted == digest,
            Wanted::From(url) => std::fs::read(&self.lock).is_ok_and(|from| from == url.as_str().as_bytes()),
        }
    }

    /// The package, if it is whole and the wanted one. Examines every file: for blocking threads.
    pub(crate) fn check(&self, wanted: &Wanted) -> Option<Whole> {
        let completion = std::fs::read(self.completion()).ok()?;
        let sha256: Option<[u8; 32]> =
            completion.get(DIGEST_AT..DIGEST_AT + 32).and_then(|digest| digest.try_into().ok());
        if !self.is(wanted, sha256?) {
            return None;
        }
        let tree = OpenTree::open(&self.dir).ok()?;
        let package = PackageInfo::read(&tree).ok()?;
        let whole = package.listed.iter().all(|listed| listed.is_sound(&tree).unwrap_or(false));
        whole.then_some(Whole { tree, package, sha256 })
    }

    /// Removes the package; the caller holds its exclusive lock.
    pub(crate) fn evict(&self) -> io::Result<()> {
        let gone = |result: io::Result<()>| match result {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        };
        // The completion file is removed first: if this is killed, the rest does not count as a package.
        gone(std::fs::remove_file(self.completion()))?;
        tree::remove(&self.dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(cache: &Cache, name: &str) -> PackageDir {
        let place = cache.named(name);
        std::fs::create_dir_all(place.dir.join("info")).unwrap();
        std::fs::write(place.dir.join("a"), b"abc").unwrap();
        std::fs::write(
            place.dir.join("info/index.json"),
            r#"{"name":"a","version":"1","build":"0","build_number":0,"depends":[],"subdir":"noarch"}"#,
        )
        .unwrap();
        std::fs::write(
            place.dir.join("info/paths.json"),
            r#"{"paths_version":1,"paths":[{"_path":"a","path_type":"hardlink","size_in_bytes":3}]}"#,
        )
        .unwrap();
        let mut completion = vec![0; DIGEST_AT];
        completion.extend([9; 32]);
        std::fs::write(place.completion(), completion).unwrap();
        place
    }

    #[test]
    fn test_only_a_whole_and_completed_package_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path()).unwrap();
        let place = package(&cache, "a-1-0");
        assert_eq!(place.check(&Wanted::Digest([9; 32])).map(|whole| whole.package.listed.len()), Some(1));
        assert!(place.check(&Wanted::Any).is_some());
        assert!(place.check(&Wanted::Digest([8; 32])).is_none(), "another archive");

        let url = |text: &str| Url::parse(text).unwrap();
        let (here, there) = (url("https://a.example/a-1-0.conda"), url("https://b.example/a-1-0.conda"));
        assert!(place.check(&Wanted::From(here.clone())).is_none(), "nobody knows where it is from");
        place.note_origin(&place.lock_file().unwrap(), &there).unwrap();
        place.note_origin(&place.lock_file().unwrap(), &here).unwrap();
        assert!(place.check(&Wanted::From(here)).is_some() && place.check(&Wanted::From(there)).is_none());

        std::fs::write(place.dir.join("a"), b"").unwrap();
        assert!(place.check(&Wanted::Any).is_none(), "zero length, as after a power cut");
        std::fs::remove_file(place.dir.join("a")).unwrap();
        assert!(place.check(&Wanted::Any).is_none(), "missing");
        std::fs::write(place.dir.join("a"), b"abc").unwrap();
        assert!(place.check(&Wanted::Any).is_some());

        std::fs::remove_file(place.dir.join("a")).unwrap();
        std::os::unix::fs::symlink("info/index.json", place.dir.join("a")).unwrap();
        assert!(place.check(&Wanted::Any).is_none(), "a link in the place of a file");
        std::fs::remove_file(place.dir.join("a")).unwrap();
        std::fs::write(place.dir.join("a"), b"abc").unwrap();

        std::fs::write(place.completion(), [0; DIGEST_AT]).unwrap();
        assert!(place.check(&Wanted::Any).is_none(), "not completed");
        place.evict().unwrap();
        place.evict().unwrap();
        assert!(!place.dir.exists() && !place.completion().exists());
    }

    #[test]
    fn test_users_exclude_whoever_changes_a_package() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path()).unwrap();
        let place = cache.named("a-1-0");
        let (one, two) = (place.lock_file().unwrap(), place.lock_file().unwrap());
        one.try_lock_shared().unwrap();
        two.try_lock_shared().unwrap();
        assert!(place.lock_file().unwrap().try_lock().is_err());
        drop((one, two));
        let lock = place.lock_file().unwrap();
        lock.try_lock().unwrap();
        place.touch(&lock);
    }
}
