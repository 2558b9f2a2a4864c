//! Directories that this program filled with what jobs left. They often are in a project, and belong to no job that is sent
//! from it.
//!
//! Owns their list in the user's cache. A directory that somebody made anew under the same path is none of them. Where the
//! list cannot be kept they are sent as any other directory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use agent_model::paths::user_cache;

use crate::cli::variable;

/// Directories that are remembered.
const MOST: usize = 500;

/// Remembers one.
pub(crate) fn remember(dir: &Path) {
    let Some((list, dir)) = list().zip(dir.canonicalize().ok()) else { return };
    let mut known = read(&list);
    known.retain(|known| *known != dir);
    known.push(dir);
    let line = |dir: &PathBuf| Some(format!("{} {}\n", number(dir)?, dir.to_str()?));
    let lines: String = known[known.len().saturating_sub(MOST)..].iter().filter_map(line).collect();
    // A list that is cut off names fewer of them, and no other directory.
    let _ = fs::create_dir_all(list.parent().unwrap_or(&list)).and_then(|()| fs::write(&list, lines));
}

/// Those below a directory, itself not among them.
pub(super) fn below(dir: &Path) -> Vec<PathBuf> {
    let (Some(list), Ok(dir)) = (list(), dir.canonicalize()) else { return Vec::new() };
    let mut known = read(&list);
    known.retain(|known| known.starts_with(&dir) && *known != dir);
    known
}

fn list() -> Option<PathBuf> {
    Some(user_cache(variable)?.join("fetched"))
}

/// Those that are still there.
fn read(list: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(list).unwrap_or_default();
    let known = text.lines().filter_map(|line| line.split_once(' '));
    let known = known.filter(|(kept, dir)| number(Path::new(dir)).is_some_and(|now| now == *kept));
    known.map(|(_, dir)| PathBuf::from(dir)).collect()
}

/// What tells a directory from a later one of the same path: its number and when it was made, because a file system gives
/// the number of one that is gone to the next.
fn number(dir: &Path) -> Option<String> {
    let there = fs::symlink_metadata(dir).ok().filter(fs::Metadata::is_dir)?;
    let made = there.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    Some(format!("{}-{}", there.ino(), made.as_nanos()))
}
