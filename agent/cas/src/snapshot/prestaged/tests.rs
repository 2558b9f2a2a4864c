use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use proptest::prelude::*;

use super::super::{materialize, push, scan};
use super::*;
use crate::Memory;
use crate::conformance::content;
use crate::store::ReadError;

/// Longer than a tick of any clock of the system, and shorter than anybody waits.
const TICK: Duration = Duration::from_millis(30);

/// Files that are the same in all trees here, so that small changes are small.
const FILLER: usize = 60;

/// A directory to make trees of.
struct Source(tempfile::TempDir);

impl Source {
    fn new() -> Source {
        let source = Source(tempfile::tempdir().unwrap());
        for i in 0..FILLER {
            source.write(&format!("filler/{}/{i}", i % 3), &content(i as u64, 100 * i));
        }
        source.write("a/b/deep", b"deep");
        source.write("a/large", &content(99, 1_500_000));
        source.write("run.sh", b"#!/bin/sh");
        fs::create_dir(source.path("hollow")).unwrap();
        symlink("../a/large", source.path("filler/link")).unwrap();
        source
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), bytes).unwrap();
    }

    async fn push(&self, store: &impl BlobStore) -> Digest {
        let snapshot = scan(self.0.path()).unwrap();
        push(&snapshot, store, |_| {}).await.unwrap();
        snapshot.root
    }
}

async fn prestaged(store: &impl BlobStore, root: Digest, path: &Path) -> Arc<PrestagedTree> {
    Arc::new(PrestagedTree::lay_settled(store, root, path, None, TICK).await.unwrap())
}

async fn near(
    store: &impl BlobStore,
    root: Digest,
    dest: &Path,
    prestaged: &Arc<PrestagedTree>,
) -> Result<Laid, MaterializeError> {
    materialize(store, root, dest, None, std::slice::from_ref(prestaged)).await
}

/// Everything below a directory: its mode, how many names it has, and what is in it.
fn all(dir: &Path) -> BTreeMap<String, (u32, u64, Vec<u8>)> {
    fn collect(path: &Path, name: String, into: &mut BTreeMap<String, (u32, u64, Vec<u8>)>) {
        let about = fs::symlink_metadata(path).unwrap();
        let held = match about.file_type() {
            kind if kind.is_dir() => Vec::new(),
            kind if kind.is_symlink() => fs::read_link(path).unwrap().into_os_string().into_encoded_bytes(),
            _ => fs::read(path).unwrap(),
        };
        if about.is_dir() {
            for entry in fs::read_dir(path).unwrap().flatten() {
                let below = format!("{name}/{}", entry.file_name().to_str().unwrap());
                collect(&entry.path(), below, into);
            }
        }
        let links = if about.is_dir() { 0 } else { about.nlink() };
        into.insert(name, (about.mode(), links, held));
    }
    let mut found = BTreeMap::new();
    collect(dir, String::new(), &mut found);
    found
}

/// `dest` is what a tree of this root is that is laid out anew, and nothing is beside it.
async fn check(store: &impl BlobStore, root: Digest, dest: &Path) {
    let anew = tempfile::tempdir().unwrap();
    materialize(store, root, &anew.path().join("tree"), None, &[]).await.unwrap();
    let (found, right) = (all(dest), all(&anew.path().join("tree")));
    for (path, is) in &right {
        assert!(found.get(path) == Some(is), "{path}");
    }
    assert_eq!(found.len(), right.len());
    assert!(!staging_path(dest).unwrap().exists());
}

#[tokio::test]
async fn test_equal_tree_is_the_prestaged_tree_itself_and_needs_no_store() {
    let (store, home) = (Memory::new(), tempfile::tempdir().unwrap());
    let root = Source::new().push(&store).await;
    let prestaged = prestaged(&store, root, &home.path().join("prestaged")).await;
    let (inode, dest) = (fs::metadata(&prestaged.path).unwrap().ino(), home.path().join("work"));
    fs::create_dir(&dest).unwrap();
    let laid = near(&Memory::new(), root, &dest, &prestaged).await.unwrap();
    assert_eq!(laid.files, FILLER as u64 + 3);
    assert_eq!(fs::metadata(&dest).unwrap().ino(), inode);
    assert!(prestaged.is_claimed() && !prestaged.path.exists());
    check(&store, root, &dest).await;
}

#[tokio::test]
async fn test_only_what_differs_is_read_and_written() {
    let (store, home, source) = (Memory::new(), tempfile::tempdir().unwrap(), Source::new());
    let before = source.push(&store).await;
    let prestaged = prestaged(&store, before, &home.path().join("prestaged")).await;
    let kept = fs::metadata(prestaged.path.join("a/large")).unwrap().ino();
    source.write("filler/1/1", b"new");
    fs::remove_dir_all(source.path("hollow")).unwrap();
    source.write("hollow", b"a file now");
    fs::remove_file(source.path("run.sh")).unwrap();
    source.write("run.sh/is/a/directory", b"");
    fs::remove_file(source.path("filler/link")).unwrap();
    symlink("2/2", source.path("filler/link")).unwrap();
    let after = source.push(&store).await;
    let all_of = Memory::new();
    assert_eq!(source.push(&all_of).await, after);
    // What both have cannot be read any more.
    for gone in ["a", "filler/0", "filler/2"] {
        store.remove(&scan(&source.path(gone)).unwrap().root);
    }
    store.remove(&crate::digest_of(&content(99, 1_500_000)));
    let dest = home.path().join("work");
    near(&store, after, &dest, &prestaged).await.unwrap();
    assert_eq!(fs::metadata(dest.join("a/large")).unwrap().ino(), kept);
    check(&all_of, after, &dest).await;
}

#[tokio::test]
async fn test_far_tree_and_other_owner_leave_the_prestaged_tree_alone() {
    let (store, home, source) = (Memory::new(), tempfile::tempdir().unwrap(), Source::new());
    let root = source.push(&store).await;
    let prestaged = prestaged(&store, root, &home.path().join("prestaged")).await;
    source.write("a/larger", &content(98, 9_000_000));
    let far = source.push(&store).await;
    near(&store, far, &home.path().join("far"), &prestaged).await.unwrap();
    check(&store, far, &home.path().join("far")).await;
    let me = Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
    let mine = home.path().join("mine");
    materialize(&store, root, &mine, Some(me), std::slice::from_ref(&prestaged)).await.unwrap();
    check(&store, root, &mine).await;
    assert!(!prestaged.is_claimed());
    near(&store, root, &home.path().join("equal"), &prestaged).await.unwrap();
    assert!(prestaged.is_claimed());
}

#[tokio::test]
async fn test_everything_belongs_to_its_owner() {
    if !rustix::process::geteuid().is_root() {
        return; // nobody else may give files away
    }
    let (store, home, source) = (Memory::new(), tempfile::tempdir().unwrap(), Source::new());
    let owner = Some(Owner { uid: 12345, gid: 23456 });
    let root = source.push(&store).await;
    let laid =
        PrestagedTree::lay_settled(&store, root, &home.path().join("prestaged"), owner, TICK).await.unwrap();
    source.write("new/file", b"new");
    symlink("file", source.path("new/link")).unwrap();
    let root = source.push(&store).await;
    let [near, anew] = ["near", "anew"].map(|name| home.path().join(name));
    materialize(&store, root, &near, owner, &[Arc::new(laid)]).await.unwrap();
    materialize(&store, root, &anew, owner, &[]).await.unwrap();
    for dest in [near, anew] {
        for path in all(&dest).keys() {
            let about = fs::symlink_metadata(dest.join(path.trim_start_matches('/'))).unwrap();
            assert_eq!((about.uid(), about.gid()), (12345, 23456), "{path}");
        }
    }
}

/// Puts back the time that a program can put back.
fn restore_time(path: &Path, to: &fs::Metadata) {
    let times = fs::FileTimes::new().set_modified(to.modified().unwrap());
    fs::File::options().write(true).open(path).unwrap().set_times(times).unwrap();
}

type Deed = fn(&Path);

/// What somebody who gets at a prestaged tree may do to it.
const DEEDS: &[(&str, Deed)] = &[
    ("another content of the same size at the same time", |prestaged| {
        let (path, about) = (prestaged.join("a/b/deep"), fs::metadata(prestaged.join("a/b/deep")).unwrap());
        fs::write(&path, b"evil").unwrap();
        restore_time(&path, &about);
    }),
    ("a file that grew", |prestaged| {
        use std::io::Write;
        let mut file = fs::File::options().append(true).open(prestaged.join("run.sh")).unwrap();
        file.write_all(b"\nrm -rf ~").unwrap();
    }),
    ("a file without content", |prestaged| fs::write(prestaged.join("a/large"), b"").unwrap()),
    ("a file of another mode", |prestaged| {
        fs::set_permissions(prestaged.join("run.sh"), fs::Permissions::from_mode(0o4777)).unwrap();
    }),
    ("a directory of another mode", |prestaged| {
        fs::set_permissions(prestaged.join("a/b"), fs::Permissions::from_mode(0o700)).unwrap();
    }),
    ("a root of another mode", |prestaged| {
        fs::set_permissions(prestaged, fs::Permissions::from_mode(0o777)).unwrap();
    }),
    ("a file more", |prestaged| fs::write(prestaged.join("hollow/sitecustomize.py"), b"evil").unwrap()),
    ("a directory more", |prestaged| fs::create_dir(prestaged.join("hollow/more")).unwrap()),
    ("a link more", |prestaged| symlink("/etc", prestaged.join("etc")).unwrap()),
    ("a file less", |prestaged| fs::remove_file(prestaged.join("run.sh")).unwrap()),
    ("a directory less", |prestaged| fs::remove_dir(prestaged.join("hollow")).unwrap()),
    ("nothing left", |prestaged| fs::remove_dir_all(prestaged).unwrap()),
    ("another file in the place of one", |prestaged| {
        fs::write(prestaged.join("../other"), b"deep").unwrap();
        fs::rename(prestaged.join("../other"), prestaged.join("a/b/deep")).unwrap();
    }),
    ("two files with each other's names", |prestaged| {
        for (from, to) in [("run.sh", "t"), ("filler/1/1", "run.sh"), ("t", "filler/1/1")] {
            fs::rename(prestaged.join(from), prestaged.join(to)).unwrap();
        }
    }),
    ("a second name of a file outside", |prestaged| {
        fs::hard_link(prestaged.join("a/large"), prestaged.join("../twin")).unwrap();
    }),
    ("another target of a link", |prestaged| {
        fs::remove_file(prestaged.join("filler/link")).unwrap();
        symlink("../../../../etc", prestaged.join("filler/link")).unwrap();
    }),
    ("a link to a directory in the place of one", |prestaged| {
        fs::rename(prestaged.join("a"), prestaged.join("../elsewhere")).unwrap();
        symlink("../elsewhere", prestaged.join("a")).unwrap();
    }),
    ("a link in the place of the root", |prestaged| {
        fs::rename(prestaged, prestaged.join("../aside")).unwrap();
        symlink("aside", prestaged).unwrap();
    }),
    ("the store of a mapping", |prestaged| {
        // As a mapping does when its page is written back: the content changes, and both times.
        use std::os::unix::fs::FileExt;
        let file = fs::File::options().write(true).open(prestaged.join("a/large")).unwrap();
        file.write_all_at(b"M", 4096).unwrap();
    }),
];

#[tokio::test]
async fn test_touched_prestaged_tree_is_noticed_and_goes() {
    let (store, source) = (Memory::new(), Source::new());
    let before = source.push(&store).await;
    source.write("run.sh", b"#!/bin/bash");
    let after = source.push(&store).await;
    for (what, deed) in DEEDS {
        for root in [before, after] {
            let home = tempfile::tempdir().unwrap();
            let prestaged = prestaged(&store, before, &home.path().join("prestaged")).await;
            deed(&prestaged.path);
            assert!(prestaged.prove().is_err(), "{what}");
            let dest = home.path().join("work");
            near(&store, root, &dest, &prestaged).await.unwrap();
            check(&store, root, &dest).await;
            assert!(prestaged.is_claimed(), "{what}");
            assert!(!prestaged.path.is_dir() || prestaged.path.is_symlink(), "{what}");
        }
    }
}

#[tokio::test]
async fn test_prestaged_tree_that_changes_while_it_settles_is_none() {
    let (store, home) = (Memory::new(), tempfile::tempdir().unwrap());
    let root = Source::new().push(&store).await;
    let path = home.path().join("prestaged");
    let change = async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(10 * TICK).await;
        fs::write(path.join("a/b/deep"), b"evil").unwrap();
    };
    let (laid, ()) = tokio::join!(PrestagedTree::lay_settled(&store, root, &path, None, 20 * TICK), change);
    assert!(matches!(laid, Err(PrestageError::Touched { .. })), "{laid:?}");
}

#[tokio::test]
async fn test_of_two_jobs_one_gets_the_prestaged_tree() {
    let (store, home, source) = (Memory::new(), tempfile::tempdir().unwrap(), Source::new());
    let root = source.push(&store).await;
    for round in 0..20 {
        let prestaged = prestaged(&store, root, &home.path().join(format!("prestaged-{round}"))).await;
        let inode = fs::metadata(&prestaged.path).unwrap().ino();
        let dests = [1, 2, 3].map(|job| home.path().join(format!("work-{round}-{job}")));
        let lay = dests.clone().map(|dest| {
            let (store, prestaged) = (store.clone(), Arc::clone(&prestaged));
            async move { near(&store, root, &dest, &prestaged).await }
        });
        for laid in futures_util::future::join_all(lay).await {
            laid.unwrap();
        }
        let is_spare = |dest: &&PathBuf| fs::metadata(dest).unwrap().ino() == inode;
        assert_eq!(dests.iter().filter(is_spare).count(), 1);
        for dest in &dests {
            check(&store, root, dest).await;
        }
    }
}

#[tokio::test]
async fn test_discarded_prestaged_tree_is_not_used_and_used_one_not_discarded() {
    let (store, home) = (Memory::new(), tempfile::tempdir().unwrap());
    let root = Source::new().push(&store).await;
    let one = prestaged(&store, root, &home.path().join("prestaged")).await;
    Arc::clone(&one).discard().await.unwrap();
    assert!(!one.path.exists());
    near(&store, root, &home.path().join("anew"), &one).await.unwrap();
    check(&store, root, &home.path().join("anew")).await;
    let other = prestaged(&store, root, &home.path().join("prestaged")).await;
    near(&store, root, &home.path().join("used"), &other).await.unwrap();
    other.discard().await.unwrap();
    check(&store, root, &home.path().join("used")).await;
}

#[tokio::test]
async fn test_content_that_is_nowhere_is_told_and_nothing_stays() {
    let (store, home, source) = (Memory::new(), tempfile::tempdir().unwrap(), Source::new());
    let before = source.push(&store).await;
    let prestaged = prestaged(&store, before, &home.path().join("prestaged")).await;
    source.write("a/b/deep", b"deeper");
    let after = source.push(&store).await;
    store.remove(&crate::digest_of(b"deeper"));
    let refused = near(&store, after, &home.path().join("work"), &prestaged).await;
    let is_absent = |source: &ReadError| matches!(source, ReadError::Absent { .. });
    assert!(
        matches!(&refused, Err(MaterializeError::Read { source, .. }) if is_absent(source)),
        "{refused:?}"
    );
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn test_full_disk_costs_the_prestaged_tree_and_then_says_so() {
    let Some(small) = agent_fs::SmallDisk::mount("size=8m") else { return };
    let (store, source) = (Memory::new(), Source::new());
    source.write("a/other", &content(97, 3_000_000));
    let before = source.push(&store).await;
    let prestaged = prestaged(&store, before, &small.path().join("prestaged")).await;
    // What changes finds no room beside the prestaged tree; all of it finds room once that is gone, or not even then.
    source.write("a/other", b"");
    source.write("a/new", &content(96, 2_000_000));
    let after = source.push(&store).await;
    fs::write(small.path().join("full"), vec![0; 2_400_000]).unwrap();
    let dest = small.path().join("work");
    near(&store, after, &dest, &prestaged).await.unwrap();
    check(&store, after, &dest).await;
    fs::remove_dir_all(&dest).unwrap();
    fs::write(small.path().join("full"), vec![0; 6_000_000]).unwrap();
    let refused = near(&store, after, &dest, &prestaged).await;
    let is_full = |source: &io::Error| source.kind() == io::ErrorKind::StorageFull;
    assert!(
        matches!(&refused, Err(MaterializeError::Write { source, .. }) if is_full(source)),
        "{refused:?}"
    );
    assert_eq!(fs::read_dir(small.path()).unwrap().count(), 1);
}

/// A change of a directory. What cannot be done is not done.
#[derive(Debug, Clone)]
enum Edit {
    Write(String, u8),
    Link(String, String),
    Directory(String),
    Remove(String),
    Move(String, String),
}

fn edits(most: usize) -> impl Strategy<Value = Vec<Edit>> {
    // Few names, of which one begins another: so kinds change, and orders matter.
    let name = || "(a|b|ab|filler|hollow|a-b)(/(a|b|0|1|ab|a.b)){0,2}";
    let edit = prop_oneof![
        4 => (name(), any::<u8>()).prop_map(|(path, seed)| Edit::Write(path, seed)),
        1 => (name(), "(a|b|0)").prop_map(|(path, to)| Edit::Link(path, to)),
        1 => name().prop_map(Edit::Directory),
        2 => name().prop_map(Edit::Remove),
        1 => (name(), name()).prop_map(|(from, to)| Edit::Move(from, to)),
    ];
    proptest::collection::vec(edit, 0..most)
}

fn apply(source: &Source, edits: &[Edit]) {
    for edit in edits {
        let _ = match edit {
            Edit::Write(path, seed) => {
                let path = source.path(path);
                let _ = fs::create_dir_all(path.parent().unwrap());
                fs::write(path, content(u64::from(*seed), usize::from(*seed)))
            }
            Edit::Link(path, to) => symlink(to, source.path(path)),
            Edit::Directory(path) => fs::create_dir_all(source.path(path)),
            Edit::Remove(path) => match fs::remove_dir_all(source.path(path)) {
                Err(_) => fs::remove_file(source.path(path)),
                removed => removed,
            },
            Edit::Move(from, to) => fs::rename(source.path(from), source.path(to)),
        };
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn test_prestaged_tree_and_difference_are_the_tree(first in edits(12), second in edits(12)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
        runtime.unwrap().block_on(async {
            let (store, home, source) = (Memory::new(), tempfile::tempdir().unwrap(), Source::new());
            source.write("a/large", b"small here, so that this takes no longer than it must");
            apply(&source, &first);
            let before = source.push(&store).await;
            let path = home.path().join("prestaged");
            let laid = PrestagedTree::lay_settled(&store, before, &path, None, Duration::ZERO).await;
            let prestaged = Arc::new(laid.unwrap());
            apply(&source, &second);
            let after = source.push(&store).await;
            let wanted = tree::fetch(&store, after).await.unwrap();
            let is_near = Difference::between(&prestaged.tree, &wanted).is_some();
            let (inode, dest) = (fs::metadata(&prestaged.path).unwrap().ino(), home.path().join("work"));
            near(&store, after, &dest, &prestaged).await.unwrap();
            check(&store, after, &dest).await;
            assert_eq!(is_near, prestaged.is_claimed());
            assert_eq!(is_near, fs::metadata(&dest).unwrap().ino() == inode);
        });
    }
}

type Meddle = fn(&Path);

/// Changes of somebody who may enter the agent's own directories, each made while a prestaged tree is laid out.
const MEDDLING: [(&str, Meddle); 7] = [
    ("bytes in place", |tree| {
        let mut bytes = fs::read(tree.join("a/large")).unwrap();
        bytes[700_000] ^= 1;
        // Through the file that is there, as an editor with a mapping or a log does.
        let mut file = fs::File::options().write(true).open(tree.join("a/large")).unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
    }),
    ("bytes at the end", |tree| {
        let mut file = fs::File::options().append(true).open(tree.join("run.sh")).unwrap();
        std::io::Write::write_all(&mut file, b"\ntrue").unwrap();
    }),
    ("another file of this name", |tree| {
        fs::write(tree.join("new"), b"#!/bin/cat").unwrap();
        fs::set_permissions(tree.join("new"), fs::Permissions::from_mode(0o775)).unwrap();
        fs::rename(tree.join("new"), tree.join("run.sh")).unwrap();
    }),
    ("one more name", |tree| fs::write(tree.join("hollow/sitecustomize.py"), b"").unwrap()),
    ("one name less", |tree| fs::remove_file(tree.join("filler/1/4")).unwrap()),
    ("another target", |tree| {
        fs::remove_file(tree.join("filler/link")).unwrap();
        symlink("/etc/passwd", tree.join("filler/link")).unwrap();
    }),
    ("a name elsewhere", |tree| {
        fs::hard_link(tree.join("run.sh"), tree.with_file_name("kept")).unwrap();
    }),
];

/// Whatever is done to a prestaged tree before its stamps are taken is found when it is read back.
#[tokio::test]
async fn test_what_changes_while_a_prestaged_tree_is_laid_out_reaches_no_job() {
    let (store, source) = (Memory::new(), Source::new());
    let root = source.push(&store).await;
    for (what, meddle) in MEDDLING {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("prestaged");
        let tree = Arc::new(tree::fetch(&store, root).await.unwrap());
        lay(&store, &tree, &path, Manner::Job(None), &Arc::default()).await.unwrap();
        meddle(&path);
        let settled = PrestagedTree::settle(path, tree, None, TICK).await;
        assert!(
            matches!(settled, Err(PrestageError::Touched { .. } | PrestageError::Disk { .. })),
            "{what}: {settled:?}"
        );
    }
}

/// The same as it happens: somebody writes again and again while prestaged trees are laid out and used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_a_writer_beside_the_layout_reaches_no_job() {
    let (store, source) = (Memory::new(), Source::new());
    let root = source.push(&store).await;
    let (mut taken, mut refused) = (0, 0);
    for round in 0..60 {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("prestaged");
        let target = path.join("a/large");
        let writer = tokio::task::spawn_blocking(move || {
            // Once, as early as it can.
            for _ in 0..2000 {
                if let Ok(mut file) = fs::File::options().write(true).open(&target)
                    && file.metadata().unwrap().len() > 500_000 * (round % 3)
                {
                    return std::io::Write::write_all(&mut file, b"changed").is_ok();
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            false
        });
        let made = PrestagedTree::lay_settled(&store, root, &path, None, TICK).await;
        writer.await.unwrap();
        let prestaged_trees: Vec<_> = made.into_iter().map(Arc::new).collect();
        if prestaged_trees.is_empty() {
            refused += 1
        } else {
            taken += 1
        }
        let dest = home.path().join("work");
        materialize(&store, root, &dest, None, &prestaged_trees).await.unwrap();
        let bytes = fs::read(dest.join("a/large")).unwrap();
        assert!(bytes == content(99, 1_500_000), "round {round}: changed bytes reached a job");
    }
    assert!(refused > 0, "no write met a layout: {taken} prestaged_trees were whole");
}
