//! Linking packages into the environment.
//!
//! Owns how files come from the cache into an environment: patched, cloned, as hard links or copied. Hides the records
//! that other tools of conda read, and threads. What goes where is decided by [`super::arrange`].
//!
//! Invariants: no program of a package is run; both sides are beneath descriptors, no link is followed on either, and
//! nothing is written in the place of something; no link of the environment leads out of it once this is done; files
//! are hard links of the cache's files only if the request allows it; records are readable for all.

use std::fs::{File, FileTimes, Permissions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use agent_env::{Failure, FailureKind, Phase, Progress};
use agent_model::{causes, words};
use parking_lot::Mutex;
use rattler::install::{PythonInfo, link::copy_and_replace_placeholders, python_entry_point_template};
use rattler_conda_types::package::{EntryPoint, FileMode, PathType};
use rattler_conda_types::prefix_record::{self, Link, LinkType, PathsEntry};
use rattler_conda_types::{MatchSpec, PackageNameMatcher, PrefixRecord, Subdir};
use sha2::{Digest, Sha256};

use super::arrange::{self, Arranged, Item, What};
use super::fetch::CachedPackage;
use super::package::{ListedFile, RECORDS, WORKSHOP};
use super::tell::Teller;
use super::tree::{self, OpenTree, PlainPath};
use super::{Advise, Done, disk, failed};

/// How many files a thread takes at a time.
const CHUNK: usize = 32;

/// Files from this size on, in bytes, are patched one at a time: each is in memory as a whole.
const LARGE: u64 = 32 << 20;

/// Tells programs that make backups that this can be made again.
const TAG: &str = "CACHEDIR.TAG";
const TAGGED: &[u8] = b"Signature: 8a477f597d28d172789f06886806bc55\n";

/// What is linked, and how.
pub(crate) struct Plan<'a> {
    /// The target.
    pub(crate) prefix: &'a Path,
    /// The packages, each of them locked.
    pub(crate) packages: &'a [CachedPackage],
    /// The specifications, which are noted with the packages.
    pub(crate) specs: &'a [MatchSpec],
    /// For which platform.
    pub(crate) subdir: Subdir,
    /// Whether files may be hard links of the cache's files.
    pub(crate) hard_links: bool,
}

/// Why linking failed.
pub(crate) enum Unlinked {
    /// Perhaps because the cached copy of the package at this place of the list is damaged.
    Package(usize, Failure),
    /// For another reason.
    Otherwise(Failure),
}

/// Links packages. Blocks.
pub(crate) fn link(plan: &Plan<'_>, teller: &Arc<Teller>) -> Result<(), Unlinked> {
    let trouble =
        |error: io::Error| Unlinked::Otherwise(disk::trouble(plan.prefix, "linking packages", &error));
    for package in plan.packages.iter().filter(|package| has_script(package)) {
        let name = package.record.package_record.name.as_normalized();
        teller.say(format!("{name} has a script to be run after linking; such scripts are not run"));
    }
    let python = python(plan).map_err(Unlinked::Otherwise)?;
    let arranged = arrange::arrange(plan.packages, python.as_ref()).map_err(Unlinked::Otherwise)?;
    let tree = OpenTree::open(plan.prefix).map_err(trouble)?;
    let site = Site::new(plan, &tree, python, &arranged, teller).map_err(trouble)?;
    let records = site.everything(&arranged.items)?;
    site.judge_links(&arranged.items).map_err(Unlinked::Otherwise)?;
    for (package, paths) in plan.packages.iter().zip(records) {
        site.record(package, paths).map_err(trouble)?;
    }
    if !arranged.clashes.is_empty() {
        let paths: Vec<_> =
            arranged.clashes.iter().take(5).map(|way| way.path().display().to_string()).collect();
        let several = words::count(arranged.clashes.len() as u64, "file");
        teller.say(format!("{several} of more than one package: {}", paths.join(", ")));
    }
    teller.mark(site.progress("", true));
    Ok(())
}

fn has_script(package: &CachedPackage) -> bool {
    let script = format!("bin/.{}-post-link.sh", package.record.package_record.name.as_normalized());
    package.whole.package.listed.iter().any(|listed| listed.way.path() == Path::new(&script))
}

/// The Python of the environment, if one of the packages is that.
fn python(plan: &Plan<'_>) -> Done<Option<PythonInfo>> {
    let records = plan.packages.iter().map(|package| &package.record.package_record);
    let python = records.into_iter().find(|record| record.name.as_normalized() == "python");
    let info = python.map(|record| PythonInfo::from_python_record(record, plan.subdir)).transpose();
    info.map_err(|error| failed(FailureKind::Other, error.to_string()))
}

/// An environment that is being made.
struct Site<'a> {
    plan: &'a Plan<'a>,
    tree: &'a OpenTree,
    python: Option<PythonInfo>,
    /// The prefix, as it is written into files.
    here: String,
    /// When patched files of a package were changed: after all that is in it, or byte code of before would pass for it.
    stamps: Vec<SystemTime>,
    /// The file system can share blocks.
    clones: AtomicBool,
    large: Mutex<()>,
    /// How many files each package lacks.
    missing: Vec<AtomicUsize>,
    done: AtomicU64,
    teller: &'a Arc<Teller>,
}

type Placed = (usize, PathsEntry);

impl<'a> Site<'a> {
    fn new(
        plan: &'a Plan<'a>,
        tree: &'a OpenTree,
        python: Option<PythonInfo>,
        arranged: &Arranged<'_>,
        teller: &'a Arc<Teller>,
    ) -> io::Result<Self> {
        let missing: Vec<AtomicUsize> = plan.packages.iter().map(|_| AtomicUsize::new(0)).collect();
        for item in &arranged.items {
            missing[item.package].fetch_add(1, Ordering::Relaxed);
        }
        let done = missing.iter().filter(|count| count.load(Ordering::Relaxed) == 0).count();
        let site = Self {
            plan,
            tree,
            python,
            here: plan.prefix.display().to_string(),
            stamps: plan.packages.iter().map(stamp).collect(),
            clones: AtomicBool::new(clones(tree)),
            large: Mutex::default(),
            missing,
            done: AtomicU64::new(done as u64),
            teller,
        };
        teller.mark(site.progress("", false));
        let directories =
            [RECORDS].into_iter().filter_map(PlainPath::of).chain(arranged.directories.iter().cloned());
        for way in directories {
            tree.make_directory(&way)?;
        }
        site.write(Path::new(RECORDS).join("history"), b"")?;
        site.write(TAG.into(), TAGGED)?;
        Ok(site)
    }

    fn progress(&self, what: &str, over: bool) -> Progress {
        let total = self.plan.packages.len() as u64;
        let done = if over { total } else { self.done.load(Ordering::Relaxed) };
        Progress { phase: Phase::Link, done, total, bytes: 0, bytes_total: 0, what: what.to_owned() }
    }

    /// Puts everything in its place, by several threads; returns what is in the record of each package.
    fn everything(&self, items: &[Item<'_>]) -> Result<Vec<Vec<PathsEntry>>, Unlinked> {
        let (next, broken) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || -> Result<Vec<Placed>, Unlinked> {
            let mut placed = Vec::new();
            loop {
                let from = next.fetch_add(CHUNK, Ordering::Relaxed);
                let Some(rest) = items.get(from..).filter(|rest| !rest.is_empty()) else { return Ok(placed) };
                for item in rest.iter().take(CHUNK) {
                    if broken.load(Ordering::Relaxed) {
                        return Ok(placed);
                    }
                    let entry = self.place(item).inspect_err(|_| broken.store(true, Ordering::Relaxed));
                    placed.push((item.package, entry.map_err(|error| self.unlinked(item, &error))?));
                    self.count(item.package);
                }
            }
        };
        let workers = std::thread::available_parallelism().map_or(4, usize::from);
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let mut records = vec![Vec::new(); self.plan.packages.len()];
        for outcome in outcomes {
            for (package, entry) in outcome? {
                records[package].push(entry);
            }
        }
        Ok(records)
    }

    fn count(&self, package: usize) {
        if self.missing[package].fetch_sub(1, Ordering::Relaxed) == 1 {
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        let name = || self.plan.packages[package].record.package_record.name.as_normalized();
        self.teller.pass(|| self.progress(name(), false));
    }

    fn unlinked(&self, item: &Item<'_>, error: &io::Error) -> Unlinked {
        if disk::is_full(error) {
            return Unlinked::Otherwise(disk::full(self.plan.prefix, "linking packages"));
        }
        let name = &self.plan.packages[item.package].place.name;
        let text = format!("linking `{}` of {name}: {}", item.way.path().display(), causes::tell(error));
        if error.to_string().contains("longer than the placeholder") {
            return Unlinked::Otherwise(failed(FailureKind::Refused, text).advise(
                "The path of the environment is too long for this package: let the node keep environments in a shorter one.",
            ));
        }
        Unlinked::Package(item.package, failed(FailureKind::Other, text))
    }

    /// Puts one thing in its place.
    fn place(&self, item: &Item<'_>) -> io::Result<PathsEntry> {
        match &item.what {
            What::Program(entry_point) => self.program(&item.way, entry_point),
            What::Listed(listed) => {
                let from = &self.plan.packages[item.package].whole.tree;
                let mut entry = recorded(&item.way, listed);
                match listed.entry.path_type {
                    PathType::Directory => self.tree.make_directory(&item.way)?,
                    PathType::SoftLink => self.tree.make_link(&item.way, &from.target(&listed.way)?)?,
                    PathType::HardLink => {
                        self.file(from, item, listed, &mut entry)?;
                    }
                }
                Ok(entry)
            }
        }
    }

    fn file(
        &self,
        from: &OpenTree,
        item: &Item<'_>,
        listed: &ListedFile,
        entry: &mut PathsEntry,
    ) -> io::Result<()> {
        let source = from.file(&listed.way)?;
        if let Some(placeholder) = &listed.entry.prefix_placeholder {
            let stamp = self.stamps[item.package];
            let (digest, len) =
                self.patched(&item.way, source, &placeholder.placeholder, placeholder.file_mode, stamp)?;
            let digest = digest.into();
            entry.sha256_in_prefix = (entry.sha256 != Some(digest)).then_some(digest);
            (entry.size_in_bytes, entry.file_mode) = (Some(len), Some(placeholder.file_mode));
            return Ok(());
        }
        let may_clone = self.clones.load(Ordering::Relaxed);
        let may_link = self.plan.hard_links && !listed.entry.no_link && !may_clone;
        if may_link && self.tree.make_name(&item.way, &source).is_ok() {
            return Ok(());
        }
        let (mut target, seen) = (self.tree.make_file(&item.way)?, source.metadata()?);
        let cloned = may_clone && rustix::fs::ioctl_ficlone(&target, &source).is_ok();
        if !cloned {
            io::copy(&mut &source, &mut target)?;
        }
        finish(&target, seen.permissions().mode(), seen.modified()?)
    }

    /// Writes a file with the prefix in the place of what stands for it.
    fn patched(
        &self,
        way: &PlainPath,
        mut source: File,
        placeholder: &str,
        mode: FileMode,
        stamp: SystemTime,
    ) -> io::Result<([u8; 32], u64)> {
        let seen = source.metadata()?;
        let _alone = (seen.len() >= LARGE).then(|| self.large.lock());
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes)?;
        let mut target =
            Measured { file: BufWriter::new(self.tree.make_file(way)?), hash: Sha256::new(), len: 0 };
        copy_and_replace_placeholders(&bytes, &mut target, placeholder, &self.here, &self.plan.subdir, mode)?;
        let Measured { file, hash, len } = target;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        finish(&file, seen.permissions().mode(), stamp)?;
        Ok((hash.finalize().into(), len))
    }

    /// Writes a program that calls a function of a package.
    fn program(&self, way: &PlainPath, entry_point: &EntryPoint) -> io::Result<PathsEntry> {
        let python = self.python.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let text = python_entry_point_template(&self.here, false, entry_point, python);
        let mut file = self.tree.make_file(way)?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(Permissions::from_mode(0o755))?;
        let digest: [u8; 32] = Sha256::digest(text.as_bytes()).into();
        Ok(PathsEntry {
            relative_path: way.path().to_owned(),
            original_path: None,
            path_type: prefix_record::PathType::UnixPythonEntryPoint,
            no_link: false,
            sha256: Some(digest.into()),
            sha256_in_prefix: None,
            size_in_bytes: Some(text.len() as u64),
            prefix_placeholder: None,
            file_mode: None,
        })
    }

    /// Refuses links that lead out now that all are there: one of a package may lead over one of another. None of them
    /// was followed so far, and the bad ones are removed.
    fn judge_links(&self, items: &[Item<'_>]) -> Done<()> {
        let mut refused = Ok(());
        for item in items.iter().filter(|item| item.is_link()) {
            let name = &self.plan.packages[item.package].place.name;
            let way = item.way.path().display();
            if self.tree.leads_out(&item.way).unwrap_or(true) {
                let removed = self.tree.remove(&item.way);
                removed.map_err(|error| disk::trouble(self.plan.prefix, "removing a link", &error))?;
                refused = Err(failed(
                    FailureKind::Refused,
                    format!("the package {name} is not installed: its link `{way}` leads outside of the environment"),
                )
                .advise("No sound package is like that: use another version or channel, and tell whoever keeps it."));
            }
        }
        refused
    }

    /// Writes the record of a package.
    fn record(&self, package: &CachedPackage, mut paths: Vec<PathsEntry>) -> io::Result<()> {
        paths.sort_by(|a, b| a.relative_path.cmp(&b.relative_path));
        let name = &package.record.package_record.name;
        let asks =
            |spec: &&MatchSpec| matches!(&spec.name, PackageNameMatcher::Exact(asked) if asked == name);
        let link_type = if self.plan.hard_links { LinkType::HardLink } else { LinkType::Copy };
        let record = PrefixRecord {
            extracted_package_dir: Some(package.place.dir.clone()),
            link: Some(Link { source: package.place.dir.clone(), link_type: Some(link_type) }),
            requested_specs: self.plan.specs.iter().filter(asks).map(ToString::to_string).collect(),
            ..PrefixRecord::from_repodata_record(package.record.clone(), paths)
        };
        let text = serde_json::to_vec_pretty(&record)?;
        self.write(Path::new(RECORDS).join(record.file_name()), &text)
    }

    /// Writes a file of the environment's own.
    fn write(&self, path: PathBuf, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.tree.make_file(&PlainPath::of(path).ok_or(io::ErrorKind::InvalidFilename)?)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(0o644))
    }
}

/// What the record of a package says of a file.
fn recorded(way: &PlainPath, listed: &ListedFile) -> PathsEntry {
    let entry = &listed.entry;
    PathsEntry {
        relative_path: way.path().to_owned(),
        original_path: None,
        path_type: entry.path_type.into(),
        no_link: entry.no_link,
        sha256: entry.sha256,
        sha256_in_prefix: None,
        size_in_bytes: entry.size_in_bytes,
        prefix_placeholder: entry.prefix_placeholder.as_ref().map(|found| found.placeholder.clone()),
        file_mode: None,
    }
}

fn finish(file: &File, mode: u32, changed: SystemTime) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(tree::mode_for_all(mode)))?;
    file.set_times(FileTimes::new().set_accessed(changed).set_modified(changed))
}

/// A moment after all files of a package were made, the same each time: their description is written last.
fn stamp(package: &CachedPackage) -> SystemTime {
    let about = PlainPath::of("info/about.json").and_then(|way| package.whole.tree.file(&way).ok());
    let made = about.and_then(|file| file.metadata().ok()?.modified().ok());
    let made = made.or_else(|| package.whole.tree.changed().ok());
    made.unwrap_or(SystemTime::UNIX_EPOCH) + Duration::from_secs(1)
}

/// Whether files in the tree can share their blocks.
fn clones(tree: &OpenTree) -> bool {
    let try_it = || -> io::Result<()> {
        let ways = ["one", "two"].map(|name| PlainPath::of(Path::new(WORKSHOP).join(name)));
        let [Some(one), Some(two)] = ways else { return Err(io::ErrorKind::InvalidFilename.into()) };
        let _ = (tree.remove(&one), tree.remove(&two)); // of an attempt before
        tree.make_file(&one)?.write_all(b"to be shared")?;
        Ok(rustix::fs::ioctl_ficlone(tree.make_file(&two)?, tree.file(&one)?)?)
    };
    try_it().is_ok()
}

/// Writes a file, and measures what is written.
struct Measured {
    file: BufWriter<File>,
    hash: Sha256,
    len: u64,
}

impl Write for Measured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Empties a half-built environment, but keeps the mark that it is one.
pub(crate) fn empty(prefix: &Path) -> Done<()> {
    let emptied = || -> io::Result<()> {
        for entry in std::fs::read_dir(prefix)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                _ if entry.file_name() == WORKSHOP => {}
                true => tree::remove(&entry.path())?,
                false => std::fs::remove_file(entry.path())?,
            }
        }
        Ok(())
    };
    emptied().map_err(|error| disk::trouble(prefix, "emptying what was half made", &error))
}
