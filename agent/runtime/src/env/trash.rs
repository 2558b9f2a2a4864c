//! What was removed, until its files are gone: a directory goes out of the way by a rename, its files a little later.

use std::io;
use std::path::PathBuf;

/// What the directory of something removed is called first.
pub(super) const TRASH: &str = ".trash-";

/// Removes what was moved away, meanwhile. A process that ends before it is done leaves the rest to the next.
pub(super) fn empty_trash(trash: Vec<PathBuf>) {
    let empty = move || remove_all(trash);
    let _ = std::thread::Builder::new().name("trash".to_owned()).spawn(empty); // else it stays for later
}

/// Removes directories with all that is below them, also such as somebody else is removing.
pub(super) fn remove_all(dirs: Vec<PathBuf>) {
    for path in dirs {
        while let Err(error) = agent_spawn::remove_tree(&path) {
            if !path.exists() {
                break;
            }
            // A directory of it that somebody else has just removed is no reason to leave the rest.
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "cannot remove all of something");
                break;
            }
        }
    }
}
