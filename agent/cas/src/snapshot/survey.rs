//! Which part of a directory becomes a snapshot: the choice that every scan is made with, and a survey of its result
//! that reads no file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::scan::{ScanError, Snapshot, scan_chosen, sums};
use super::statcache::StatCache;
use super::walk::{Folder, LeftOut, Root, Rules, walk};

/// Left out of every snapshot of code.
pub(super) const GIT: &str = "nothing named .git is sent";
/// How many of the entries that one rule left out are named.
const EXAMPLES: usize = 3;

/// Which part of a directory counts, and how it is read.
#[derive(Clone, Copy, Default)]
pub struct Choice<'a> {
    /// All it holds: no ignore rules, because the caller has rules of its own for it.
    pub whole: bool,
    /// Hashes of files that were read before.
    pub cache: Option<&'a StatCache>,
    /// Directories that are never entered, by whatever path the walk reaches them. A missing one is ignored.
    pub never: &'a [PathBuf],
}

impl Choice<'_> {
    /// Reads the directory. Blocks.
    pub fn scan(&self, dir: &Path) -> Result<Snapshot, ScanError> {
        scan_chosen(*self, dir)
    }

    /// What a scan would contain; no file is read. Blocks.
    pub fn survey(&self, dir: &Path) -> Result<Survey, ScanError> {
        let mut left_out = LeftOut::default();
        let top = self.walk(dir, &mut left_out)?;
        let (files, bytes, largest) = sums(&top);
        let warnings = left_out.told();
        let rules = left_out.rules;
        Ok(Survey { files, bytes, largest, rules, warnings, top })
    }

    pub(super) fn rules(&self) -> Rules {
        if self.whole { Rules::Everything } else { Rules::Code }
    }

    pub(super) fn walk(&self, dir: &Path, left_out: &mut LeftOut) -> Result<Folder, ScanError> {
        let identity = |path: &PathBuf| rustix::fs::stat(path).ok().map(|stat| (stat.st_dev, stat.st_ino));
        let never: Vec<_> = self.never.iter().filter_map(identity).collect();
        walk(&Arc::new(Root::open(dir)?), self.rules(), &never, left_out)
    }
}

/// What a snapshot of a directory would have.
#[derive(Debug)]
pub struct Survey {
    /// Files in it.
    pub files: u64,
    /// Bytes in these files.
    pub bytes: u64,
    /// The largest files and their sizes in bytes, largest first.
    pub largest: Vec<(String, u64)>,
    /// What ignore rules left out, by the rule: `.amlignore:3: *.ckpt`.
    pub rules: BTreeMap<String, Ruled>,
    /// What else was left out or is doubtful, one sentence each.
    pub warnings: Vec<String>,
    top: Folder,
}

impl Survey {
    /// The files whose directory and name are `wanted`.
    pub fn named(&self, wanted: impl Fn(&str, &str) -> bool) -> Vec<String> {
        self.top.named(wanted)
    }
}

/// What one rule left out. A directory counts once.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Ruled {
    /// How many.
    pub count: u64,
    /// The first few by name.
    pub examples: Vec<String>,
}

impl Ruled {
    pub(super) fn add(&mut self, count: u64, paths: impl IntoIterator<Item = String>) {
        self.count += count;
        self.examples.extend(paths);
        // The same ones are named whichever thread was first.
        self.examples.sort_unstable();
        self.examples.truncate(EXAMPLES);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn test_a_survey_comes_to_what_a_scan_comes_to_and_names_the_rules() {
        let ignore = "# big things\r\n*.ckpt\n\nruns/\n!last.ckpt\n";
        let dir = tree(&[
            (".gitignore", ignore),
            (".git/config", "x"),
            ("train.py", "1234"),
            ("a/b.ckpt", "x"),
            ("a/c.ckpt", "x"),
            ("a/d.ckpt", "x"),
            ("e.ckpt", "x"),
            ("last.ckpt", "123456"),
            ("runs/1/log", "x"),
        ]);
        let choice = Choice::default();
        let (survey, scanned) = (choice.survey(dir.path()).unwrap(), choice.scan(dir.path()).unwrap());
        assert_eq!((survey.files, survey.bytes), (scanned.files, scanned.bytes));
        assert_eq!(survey.largest, scanned.largest);
        assert_eq!(survey.warnings, scanned.warnings);
        let told: Vec<_> = survey.rules.iter().map(|(rule, ruled)| (&**rule, ruled.count)).collect();
        assert_eq!(told, [(".gitignore:2: *.ckpt", 4), (".gitignore:4: runs/", 1), (GIT, 1)]);
        assert_eq!(survey.rules[".gitignore:2: *.ckpt"].examples, ["a/b.ckpt", "a/c.ckpt", "a/d.ckpt"]);
        assert_eq!(scanned.skipped, survey.rules.values().map(|ruled| ruled.count).sum::<u64>());
        let wanted = |dir: &str, name: &str| dir.is_empty() && name.ends_with(".ckpt");
        assert_eq!(survey.named(wanted), ["last.ckpt"]);
        assert_eq!(scanned.named(wanted), ["last.ckpt"]);

        let whole = Choice { whole: true, ..choice };
        assert_eq!(whole.survey(dir.path()).unwrap().files, 9);
    }

    #[test]
    fn test_directories_that_are_never_entered_are_known_by_what_they_are() {
        let dir = tree(&[("train.py", "x"), (".local/share/agentd/cas/big", "x"), ("other/cas/x", "x")]);
        let elsewhere = tempfile::tempdir().unwrap();
        let link = elsewhere.path().join("state");
        symlink(dir.path().join(".local/share/agentd"), &link).unwrap();
        let never = [link, dir.path().join("not-there")];
        for whole in [false, true] {
            let choice = Choice { whole, never: &never, ..Choice::default() };
            let scanned = choice.scan(dir.path()).unwrap();
            assert_eq!((scanned.files, scanned.skipped), (2, 1));
            assert_eq!(scanned.warnings, [".local/share/agentd belongs to agentd itself; left out"]);
            assert_eq!(choice.survey(dir.path()).unwrap().files, 2);
        }
    }

    #[test]
    fn test_ignore_file_that_switches_the_other_one_off_says_so() {
        let warnings =
            |files: &[(&str, &str)]| Choice::default().survey(tree(files).path()).unwrap().warnings;
        let said = [".amlignore is there, so .gitignore has no effect"];
        assert_eq!(warnings(&[(".amlignore", "a\n"), (".gitignore", "*.bin\n")]), said);
        for quiet in [
            &[(".amlignore", "a\n")][..],
            &[(".gitignore", "a\n")],
            &[(".amlignore", "a\n"), (".gitignore", "a\n")],
            &[(".amlignore", "a\n"), (".gitignore", "# none\n\n")],
        ] {
            assert_eq!(warnings(quiet), [""; 0], "{quiet:?}");
        }
    }
}
