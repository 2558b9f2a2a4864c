//! Removes directories in two steps: a rename takes them out of the way, their files are deleted a little later.

use std::io;
use std::path::PathBuf;

/// Prefix of the name of a removed directory.
pub(super) const TRASH: &str = ".trash-";

/// Deletes directories in the background. If the process ends before that is done, the next one does the rest.
pub(super) fn empty_trash(trash: Vec<PathBuf>) {
    let empty = move || remove_all(trash);
    let _ = std::thread::Builder::new().name("trash".to_owned()).spawn(empty); // otherwise it is left for later
}

/// Deletes directories with their contents, even while others delete them, too.
pub(super) fn remove_all(dirs: Vec<PathBuf>) {
    for path in dirs {
        while let Err(error) = agent_spawn::remove_tree(&path) {
            if !path.exists() {
                break;
            }
            // If another process has just deleted a part of it, the rest is still deleted.
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "cannot remove all of something");
                break;
            }
        }
    }
}
