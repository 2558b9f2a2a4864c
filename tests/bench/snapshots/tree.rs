//! The directory that is moved, and the least that hashing it can cost.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_cas::{digest_of, snapshot};
use agent_model::Digest;
use bytes::Bytes;

/// Directories on each of three levels; a file is in one of the last.
const SPREAD: [usize; 3] = [8, 10, 15];

/// One file of this many is large.
const LARGE_EACH: usize = 667;
const LARGE: usize = 50_000_000;

/// A directory with files whose sizes and bytes follow from their number.
pub(crate) struct Tree {
    pub(crate) path: PathBuf,
    pub(crate) files: Vec<PathBuf>,
    pub(crate) bytes: u64,
    random: Random,
    /// Where the next change is made.
    next: usize,
}

impl Tree {
    pub(crate) fn make(path: &Path, count: usize) -> Tree {
        let mut tree =
            Tree { path: path.to_owned(), files: Vec::new(), bytes: 0, random: Random(1), next: 0 };
        for number in 0..count {
            let dir = SPREAD.iter().scan(number, |rest, among| {
                let here = *rest % among;
                *rest /= among;
                Some(format!("dir-{here:02}"))
            });
            let dir = path.join(dir.collect::<PathBuf>());
            let file = dir.join(format!("file-{number:05}.py"));
            if !dir.is_dir() {
                fs::create_dir_all(&dir).expect("a directory");
            }
            let size = if number % LARGE_EACH == LARGE_EACH - 1 { LARGE } else { tree.random.small_size() };
            fs::write(&file, tree.random.bytes(size)).expect("a file");
            if number % 200 == 0 {
                std::os::unix::fs::symlink(
                    file.file_name().expect("a name"),
                    dir.join(format!("link-{number}")),
                )
                .expect("a link");
            }
            tree.bytes += size as u64;
            tree.files.push(file);
        }
        tree
    }

    /// Writes this many small files anew, in another place than before; how many bytes they have.
    pub(crate) fn change(&mut self, count: usize) -> u64 {
        let mut changed = 0;
        for _ in 0..count {
            self.next = (self.next + 97) % self.files.len();
            if self.next % LARGE_EACH == LARGE_EACH - 1 {
                self.next = (self.next + 1) % self.files.len();
            }
            let size = self.random.small_size();
            fs::write(&self.files[self.next], self.random.bytes(size)).expect("a file");
            changed += size as u64;
        }
        changed
    }

    /// A content that is nowhere yet, and its digest.
    pub(crate) fn fresh(&mut self, size: usize) -> (Digest, Bytes) {
        let bytes = Bytes::from(self.random.bytes(size));
        (digest_of(&bytes), bytes)
    }

    /// The digest of what is there now, for a command line.
    pub(crate) fn root(&self) -> String {
        snapshot::scan(&self.path).expect("it can be scanned").root.to_string()
    }
}

/// The same numbers each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Half are below 10 kB, one of twenty above 72 kB: the sum of twelve dice is as good as a bell curve.
    fn small_size(&mut self) -> usize {
        let dice: f64 = (0..12).map(|_| (self.next() >> 11) as f64 / (1_u64 << 53) as f64).sum();
        (10_000.0 * (1.2 * (dice - 6.0)).exp()) as usize
    }

    fn bytes(&mut self, size: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..size.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(size);
        bytes
    }
}

/// How long all processors together hash that many bytes which are in their caches.
pub(crate) fn hash_floor(bytes: u64) -> Duration {
    let buffer = vec![7; 256 * 1024];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let rounds = bytes / buffer.len() as u64 / threads as u64;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| (0..rounds).fold(0, |sum, _| sum ^ std::hint::black_box(digest_of(&buffer)).size));
        }
    });
    begun.elapsed()
}

/// How long it takes to clone every file of a directory into a new one.
pub(crate) fn clone_all(from: &Path, to: &Path) -> Duration {
    let begun = Instant::now();
    fs::create_dir(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let source = fs::File::open(entry.path()).expect("a file");
        let clone = fs::File::create_new(to.join(entry.file_name())).expect("a file");
        rustix::fs::ioctl_ficlone(&clone, &source).expect("XFS can");
    }
    begun.elapsed()
}

/// How long it takes to write these as files of `home`, each flushed, and its name as well, before the next.
pub(crate) fn flushed_one_by_one<'a>(
    home: &Path,
    blobs: impl Iterator<Item = &'a (Digest, Bytes)>,
) -> Duration {
    let directory = fs::File::open(home).expect("a directory");
    let begun = Instant::now();
    for (digest, bytes) in blobs {
        let new = home.join("new");
        let mut file = fs::File::create(&new).expect("a file");
        file.write_all(bytes).and_then(|()| file.sync_all()).expect("it is written");
        fs::rename(&new, home.join(digest.hex())).expect("it gets its name");
        directory.sync_all().expect("the name is kept");
    }
    begun.elapsed()
}
