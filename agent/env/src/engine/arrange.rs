//! Decides what goes where in an environment.
//!
//! Owns the one place for each file of each package, and which package gets it where several ask. Hides where packages
//! for any Python put their files.
//!
//! Invariants: no two things have one place, nothing lies below something that is no directory, a link of any package
//! included, and all of it is where packages may have something. The same packages are always arranged alike.

use std::collections::{BTreeSet, HashMap, HashSet};

use agent_env::{Failure, FailureKind};
use rattler::install::PythonInfo;
use rattler_conda_types::PackageRecord;
use rattler_conda_types::package::{EntryPoint, PathType};

use super::fetch::CachedPackage;
use super::package::{ListedFile, PackageInfo, is_free};
use super::tree::PlainPath;
use super::{Advise, Done, failed};

/// What is where.
#[derive(Debug, Default)]
pub(crate) struct Arranged<'a> {
    /// The directories, parents first.
    pub(crate) directories: BTreeSet<PlainPath>,
    /// The rest.
    pub(crate) items: Vec<Item<'a>>,
    /// Where several packages want something, and one of them got it.
    pub(crate) clashes: BTreeSet<PlainPath>,
}

/// Something in its place.
#[derive(Debug)]
pub(crate) struct Item<'a> {
    /// The place of its package in the list.
    pub(crate) package: usize,
    /// Where.
    pub(crate) way: PlainPath,
    /// What.
    pub(crate) what: What<'a>,
}

/// What is put somewhere.
#[derive(Debug)]
pub(crate) enum What<'a> {
    /// A file, link or directory of the package.
    Listed(&'a ListedFile),
    /// A program that is made for it.
    Program(&'a EntryPoint),
}

impl Item<'_> {
    pub(crate) fn is_link(&self) -> bool {
        self.is(PathType::SoftLink)
    }

    fn is(&self, kind: PathType) -> bool {
        matches!(self.what, What::Listed(listed) if listed.entry.path_type == kind)
    }
}

/// Arranges packages. Where several want one place, the one that needs the others gets it.
pub(crate) fn arrange<'a>(packages: &'a [CachedPackage], python: Option<&PythonInfo>) -> Done<Arranged<'a>> {
    let mut arranged = Arranged::default();
    let mut places = Places::default();
    for at in order(packages) {
        let CachedPackage { place, whole, .. } = &packages[at];
        for (way, what) in wanted(&place.name, &whole.package, python)? {
            places.add(Item { package: at, way, what }, &mut arranged);
        }
    }
    // Files of one package, and of one directory, are together.
    arranged.items.sort_by(|a, b| (a.package, &a.way).cmp(&(b.package, &b.way)));
    Ok(arranged)
}

/// The packages, those first that need others.
fn order(packages: &[CachedPackage]) -> Vec<usize> {
    #[derive(Clone)]
    struct At<'a>(usize, &'a PackageRecord);
    impl AsRef<PackageRecord> for At<'_> {
        fn as_ref(&self) -> &PackageRecord {
            self.1
        }
    }
    let records = packages.iter().enumerate().map(|(at, package)| At(at, &package.record.package_record));
    let sorted = PackageRecord::sort_topologically(records.collect());
    sorted.into_iter().rev().map(|At(at, _)| at).collect()
}

/// What a package wants where; the programs first, as what is called is them.
fn wanted<'a>(
    name: &str,
    package: &'a PackageInfo,
    python: Option<&PythonInfo>,
) -> Done<Vec<(PlainPath, What<'a>)>> {
    let refused = |path: &std::path::Path| -> Failure {
        let path = path.display();
        failed(
            FailureKind::Refused,
            format!("the package {name} is not installed: its `{path}` would lie outside of the environment"),
        )
        .advise(
            "No sound package is like that, or the package of Python is not: use other versions or channels.",
        )
    };
    let free = |path: &std::path::Path| PlainPath::of(path).filter(is_free).ok_or_else(|| refused(path));
    if !package.index.noarch.is_python() {
        return Ok(package.listed.iter().map(|listed| (listed.way.clone(), What::Listed(listed))).collect());
    }
    let python = python.ok_or_else(|| {
        failed(FailureKind::Unsatisfiable, "a package needs Python, and the environment has none")
            .advise("Add `python`.")
    })?;
    let programs = package
        .entry_points
        .iter()
        .map(|program| free(&python.bin_dir.join(&program.command)).map(|way| (way, What::Program(program))));
    let files = package.listed.iter().map(|listed| {
        free(&python.get_python_noarch_target_path(listed.way.path())).map(|way| (way, What::Listed(listed)))
    });
    programs.chain(files).collect()
}

/// What is taken.
#[derive(Debug, Default)]
struct Places {
    /// By what is no directory: the package.
    taken: HashMap<PlainPath, usize>,
    directories: HashSet<PlainPath>,
}

impl Places {
    fn add<'a>(&mut self, item: Item<'a>, arranged: &mut Arranged<'a>) {
        let is_directory = item.is(PathType::Directory);
        let is_twice = self.taken.get(&item.way) == Some(&item.package);
        let is_below = item.way.parents().any(|parent| self.taken.contains_key(&parent));
        let is_taken = self.taken.contains_key(&item.way);
        if is_below || is_taken || !is_directory && self.directories.contains(&item.way) {
            if !is_twice {
                arranged.clashes.insert(item.way);
            }
            return;
        }
        for parent in item.way.parents() {
            if !self.directories.insert(parent.clone()) {
                break; // and all above it
            }
            arranged.directories.insert(parent);
        }
        if is_directory {
            self.directories.insert(item.way.clone());
            arranged.directories.insert(item.way.clone());
        } else {
            self.taken.insert(item.way.clone(), item.package);
        }
        arranged.items.push(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(path: &str, kind: &str) -> ListedFile {
        let entry = serde_json::json!({"_path": path, "path_type": kind});
        ListedFile { way: PlainPath::of(path).unwrap(), entry: serde_json::from_value(entry).unwrap() }
    }

    /// What is where of packages with these files, the first of which comes first.
    fn arranged(packages: &[&[(&str, &str)]]) -> (Vec<String>, Vec<String>) {
        let lists: Vec<Vec<ListedFile>> = packages
            .iter()
            .map(|files| files.iter().map(|(path, kind)| listed(path, kind)).collect())
            .collect();
        let (mut arranged, mut places) = (Arranged::default(), Places::default());
        for (package, list) in lists.iter().enumerate() {
            for listed in list {
                let item = Item { package, way: listed.way.clone(), what: What::Listed(listed) };
                places.add(item, &mut arranged);
            }
        }
        let text = |way: &PlainPath| way.path().display().to_string();
        let items = arranged.items.iter().map(|item| format!("{} {}", item.package, text(&item.way)));
        (items.collect(), arranged.clashes.iter().map(text).collect())
    }

    #[test]
    fn test_one_place_is_for_one_thing_and_nothing_lies_below_a_link() {
        type Case<'a> = (&'a [&'a [(&'a str, &'a str)]], &'a [&'a str], &'a [&'a str]);
        let file = "hardlink";
        let cases: [Case<'_>; 7] = [
            (&[&[("a/b", file)], &[("a/c", file)]], &["0 a/b", "1 a/c"], &[]),
            (&[&[("a", file)], &[("a", "softlink")]], &["0 a"], &["a"]),
            (&[&[("bin", "softlink")], &[("bin/x", file)]], &["0 bin"], &["bin/x"]),
            (&[&[("bin/x", file)], &[("bin", "softlink")]], &["0 bin/x"], &["bin"]),
            (&[&[("a", file), ("a/b/c", file)]], &["0 a"], &["a/b/c"]),
            (&[&[("a", file), ("a", file)]], &["0 a"], &[]),
            (&[&[("d", "directory")], &[("d", "directory"), ("d/x", file)]], &["0 d", "1 d", "1 d/x"], &[]),
        ];
        for (packages, items, clashes) in cases {
            let (found, clashed) = arranged(packages);
            assert_eq!(found, items, "{packages:?}");
            assert_eq!(clashed, clashes, "{packages:?}");
        }
    }

    #[test]
    fn test_a_python_that_is_elsewhere_takes_no_package_along() {
        let index = serde_json::json!({"name": "x", "version": "1", "build": "0", "build_number": 0,
            "subdir": "noarch", "noarch": "python", "depends": []});
        let package = PackageInfo {
            index: serde_json::from_value(index).unwrap(),
            listed: vec![listed("site-packages/x.py", "hardlink")],
            entry_points: vec!["run = x:main".parse().unwrap()],
        };
        let version: rattler_conda_types::Version = "3.11".parse().unwrap();
        let python = |place: Option<&str>| {
            PythonInfo::from_version(&version, place, rattler_conda_types::Subdir::Linux64).unwrap()
        };
        let usual = python(None);
        let ways: Vec<_> =
            wanted("x", &package, Some(&usual)).unwrap().into_iter().map(|(way, _)| way).collect();
        assert_eq!(
            ways,
            ["bin/run", "lib/python3.11/site-packages/x.py"].map(|way| PlainPath::of(way).unwrap())
        );
        for place in ["../../elsewhere", "/var/elsewhere", "conda-meta"] {
            let failure = wanted("x", &package, Some(&python(Some(place)))).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Refused, "{place}");
        }
        assert_eq!(wanted("x", &package, None).unwrap_err().kind, FailureKind::Unsatisfiable);
    }
}
