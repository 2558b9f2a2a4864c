//! The steps that turn one tree into another.
//!
//! Pure. Two trees are compared from their roots down, and directories of equal digest are not entered; so the cost
//! grows with the differences, not with the trees. The executable bit does not count: in the tree of a job all files
//! have it.

use std::cmp::Ordering;

use agent_model::Digest;

use super::tree::{Directory, Entry, Extent, Tree, join};

/// The cost of a file, directory or link beside its bytes, as the number of bytes that could be written meanwhile.
const PLACE: u64 = 64 * 1024;

/// The steps from one tree to another, in the order in which they can be taken. A changed file is removed and made.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Difference {
    /// Files and links to remove.
    pub(super) unlinked: Vec<String>,
    /// Directories to remove, each after those in it.
    pub(super) emptied: Vec<String>,
    /// Directories to make, each before those in it.
    pub(super) directories: Vec<String>,
    /// Files to write.
    pub(super) files: Vec<Entry>,
    /// Links to make: path, target.
    pub(super) links: Vec<(String, String)>,
    /// The cost of all steps, in bytes written.
    pub(super) cost: u64,
}

impl Difference {
    /// From `old` to `new`, unless that costs more than half of what making `new` does.
    pub(super) fn between(old: &Tree, new: &Tree) -> Option<Difference> {
        let Extent { directories, files, links, bytes, .. } = new.extent();
        let whole = bytes.saturating_add((directories + files + links).saturating_mul(PLACE));
        let mut comparison = Comparison { old, new, most: whole / 2, found: Difference::default() };
        comparison.directory("", &old.root(), &new.root())?;
        Some(comparison.found)
    }

    /// The room that the new entries need.
    pub(super) fn extent(&self) -> Extent {
        Extent {
            directories: self.directories.len() as u64,
            files: self.files.len() as u64,
            links: self.links.len() as u64,
            bytes: self.files.iter().fold(0, |sum, file| sum.saturating_add(file.digest.size)),
            ..Extent::default()
        }
    }
}

/// A comparison in progress. Each step is `None` once it would cost too much.
struct Comparison<'a> {
    old: &'a Tree,
    new: &'a Tree,
    most: u64,
    found: Difference,
}

impl Comparison<'_> {
    fn spend(&mut self, bytes: u64) -> Option<()> {
        self.found.cost = self.found.cost.saturating_add(PLACE).saturating_add(bytes);
        (self.found.cost <= self.most).then_some(())
    }

    /// Compares the directory at `path` in both trees. The depth of a tree limits this recursion.
    fn directory(&mut self, path: &str, old: &Digest, new: &Digest) -> Option<()> {
        if old == new {
            return Some(());
        }
        let (old, new) = (self.old.directory(old)?, self.new.directory(new)?);
        self.leaves(path, old, new)?;
        for pair in side_by_side(&old.directories, &new.directories, |(name, _)| name) {
            match pair {
                (Some((name, old)), Some((_, new))) => self.directory(&join(path, name), old, new)?,
                (Some((name, old)), None) => self.goes(join(path, name), old)?,
                (None, Some((name, new))) => self.comes(join(path, name), new)?,
                (None, None) => {}
            }
        }
        Some(())
    }

    /// Files and links of one directory.
    fn leaves(&mut self, path: &str, old: &Directory, new: &Directory) -> Option<()> {
        for (old, new) in side_by_side(&old.files, &new.files, |(name, ..)| name) {
            if old.map(|(_, content, _)| content) == new.map(|(_, content, _)| content) {
                continue;
            }
            if let Some((name, ..)) = old {
                self.spend(0)?;
                self.found.unlinked.push(join(path, name));
            }
            if let Some((name, digest, executable)) = new {
                self.spend(digest.size)?;
                let file = Entry { path: join(path, name), digest: *digest, executable: *executable };
                self.found.files.push(file);
            }
        }
        for (old, new) in side_by_side(&old.links, &new.links, |(name, _)| name) {
            if old == new {
                continue;
            }
            if let Some((name, _)) = old {
                self.spend(0)?;
                self.found.unlinked.push(join(path, name));
            }
            if let Some((name, target)) = new {
                self.spend(0)?;
                self.found.links.push((join(path, name), target.clone()));
            }
        }
        Some(())
    }

    fn goes(&mut self, path: String, old: &Digest) -> Option<()> {
        self.spend(0)?;
        let old = self.old.directory(old)?;
        self.leaves(&path, old, &Directory::default())?;
        for (name, child) in &old.directories {
            self.goes(join(&path, name), child)?;
        }
        self.found.emptied.push(path);
        Some(())
    }

    fn comes(&mut self, path: String, new: &Digest) -> Option<()> {
        self.spend(0)?;
        self.found.directories.push(path.clone());
        let new = self.new.directory(new)?;
        self.leaves(&path, &Directory::default(), new)?;
        new.directories.iter().try_for_each(|(name, child)| self.comes(join(&path, name), child))
    }
}

/// Two sorted lists, paired by name.
fn side_by_side<'a, T>(
    old: &'a [T],
    new: &'a [T],
    name: impl Fn(&T) -> &String,
) -> impl Iterator<Item = (Option<&'a T>, Option<&'a T>)> {
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    std::iter::from_fn(move || {
        let order = match (old.peek(), new.peek()) {
            (Some(old), Some(new)) => name(old).cmp(name(new)),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return None,
        };
        Some(match order {
            Ordering::Less => (old.next(), None),
            Ordering::Equal => (old.next(), new.next()),
            Ordering::Greater => (None, new.next()),
        })
    })
}
