//! Whose builder a user number is: that of the owner whose caches belong to it.
//!
//! Only root gives a directory to another user, so who it belongs to is a record that the daemon cannot change. It can name
//! the directory differently, and gains what it has already: it chooses what is built.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, Dir};

use crate::limits::{HelperLimits, LimitError, Undone};

/// The directory with the caches of all owners.
const OWNERS: &str = "packages/of";

/// The number of the builder of an owner.
pub(crate) fn builder_of(limits: &HelperLimits, owner: &str) -> Result<u32, Undone> {
    let refused = || LimitError::Owner(owner.chars().take(100).collect());
    let is_name = Path::new(owner).components().eq([Component::Normal(owner.as_ref())]);
    if !is_name {
        return Err(refused().into());
    }
    let uid = rustix::fs::fstat(limits.open(&Path::new(OWNERS).join(owner))?)?.st_uid;
    match limits.is_of_an_owner(uid) && of(limits, uid)? == [OsStr::new(owner)] {
        true => Ok(uid),
        false => Err(refused().into()),
    }
}

/// The number of an owner is given his own caches, once, and otherwise what is to be built for him. Directories of jobs are
/// not looked at: jobs of the release before may have these numbers.
pub(crate) fn may_lend(limits: &HelperLimits, path: &Path, uid: u32) -> Result<(), Undone> {
    if !limits.is_of_an_owner(uid) || path.starts_with("jobs") {
        return Ok(());
    }
    let owners = of(limits, uid)?;
    let below: Option<Vec<&OsStr>> = path.strip_prefix(OWNERS).ok().map(|below| below.iter().collect());
    let is_due = match (owners.as_slice(), below.as_deref()) {
        ([], Some([_])) | ([_], None) => true,
        ([owner], Some([name, ..])) => owner == name,
        _ => false,
    };
    if is_due { Ok(()) } else { Err(LimitError::User(uid).into()) }
}

/// The names of the directories that belong to this number.
fn of(limits: &HelperLimits, uid: u32) -> io::Result<Vec<OsString>> {
    let all = match limits.open(Path::new(OWNERS)) {
        Ok(all) => all,
        Err(Undone::Failed(error)) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => return Ok(Vec::new()),
    };
    let mut found = Vec::new();
    for entry in Dir::read_from(&all)? {
        let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        let is_its = rustix::fs::statat(&all, &name, AtFlags::SYMLINK_NOFOLLOW)?.st_uid == uid;
        if is_its && name != "." && name != ".." {
            found.push(name);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::chown;

    use super::*;
    use crate::limits::tests::limits;

    #[test]
    fn test_a_number_builds_for_one_owner_and_is_lent_what_is_his() {
        if !nix::unistd::geteuid().is_root() {
            return; // only root gives files to others
        }
        let state = tempfile::tempdir().unwrap();
        let limits = HelperLimits { state_dir: state.path().to_owned(), ..limits() };
        let places = state.path().join(OWNERS);
        let [ada, bob, free] = [2_000_000_001, 2_000_000_002, 2_000_000_003];
        for (name, uid) in [("ada", ada), ("bob", bob), ("job", 2_000_060_000), ("new", 990)] {
            fs::create_dir_all(places.join(name)).unwrap();
            chown(places.join(name), Some(uid), Some(uid)).unwrap();
        }
        assert_eq!(builder_of(&limits, "ada").ok(), Some(ada));
        for name in ["job", "new", "none", "", ".", "..", "ada/x", "../of/ada", "/ada"] {
            assert!(builder_of(&limits, name).is_err(), "{name}");
        }
        let lent = |path: &str, uid| may_lend(&limits, Path::new(path), uid).is_ok();
        assert!(lent("envs/pip-1", ada) && lent("packages/of/ada", ada) && lent("packages/of/new", free));
        assert!(lent("envs/pip-1", limits.builder()), "the first of all builders");
        for (path, uid) in [
            ("packages/of/bob", ada),
            ("packages/of/new", ada),
            ("packages/of/ada/pip", bob),
            ("envs/pip-1", free),
            ("packages/of/new/pip", free),
            ("packages/pip", free),
        ] {
            assert!(!lent(path, uid), "{path} to {uid}");
        }
        fs::create_dir(places.join("second")).unwrap();
        chown(places.join("second"), Some(ada), Some(ada)).unwrap();
        assert!(builder_of(&limits, "ada").is_err() && !lent("envs/pip-1", ada), "it has two owners");
    }
}
