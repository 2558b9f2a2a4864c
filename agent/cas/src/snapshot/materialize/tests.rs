use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::super::{push, scan};
use super::*;
use crate::conformance::content;
use crate::snapshot::{materialize, materialize_counted};
use crate::{Disk, Memory, Tiered};

/// A tree with everything a tree may hold, in `store`; returns its root and what it holds.
async fn example(store: &impl BlobStore) -> (Digest, Laid) {
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str, bytes: &[u8]| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    write("train.py", b"print(1)");
    write("empty", b"");
    write("a/b/c/deep", b"deep");
    write("a/large", &content(1, 2_500_000));
    write("a/large-again", &content(1, 2_500_000));
    for i in 0..300 {
        write(&format!("many/{i}"), &content(i % 100, 5000));
    }
    fs::create_dir(dir.path().join("hollow")).unwrap();
    fs::set_permissions(dir.path().join("train.py"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("../a/large", dir.path().join("many/link")).unwrap();
    let snapshot = scan(dir.path()).unwrap();
    push(&snapshot, store, |_| {}).await.unwrap();
    (snapshot.root, Laid { files: snapshot.files, bytes: snapshot.bytes })
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

async fn check_round_trip(store: &impl BlobStore) {
    let (root, expected) = example(store).await;
    let home = tempfile::tempdir().unwrap();
    let dest = home.path().join("work");
    let counter = Arc::default();
    assert_eq!(materialize_counted(store, root, &dest, None, &[], &counter).await.unwrap(), expected);
    assert_eq!(counter.part(), (expected.bytes, expected.bytes));
    assert_eq!(scan(&dest.join("many")).unwrap().files, 300);
    assert_eq!(fs::read(dest.join("a/large-again")).unwrap(), content(1, 2_500_000));
    assert_eq!(fs::read_link(dest.join("many/link")).unwrap(), Path::new("../a/large"));
    assert!(dest.join("hollow").is_dir());
    for path in ["", "a/b", "hollow", "train.py", "empty", "many/7"] {
        assert_eq!(mode(&dest.join(path)), 0o775, "{path}");
    }
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1, "nothing but the tree stays");
}

#[tokio::test]
async fn test_materialize_from_memory() {
    check_round_trip(&Memory::new()).await;
}

#[tokio::test]
async fn test_materialize_from_disk_and_through_it() {
    let dir = tempfile::tempdir().unwrap();
    check_round_trip(&Disk::open(&dir.path().join("one")).unwrap()).await;
    let near = Disk::open(&dir.path().join("two")).unwrap();
    check_round_trip(&Tiered::new(near, Memory::new())).await;
}

#[tokio::test]
async fn test_download_keeps_the_tree_as_it_was() {
    let store = Memory::new();
    let (root, _) = example(&store).await;
    let home = tempfile::tempdir().unwrap();
    let dest = home.path().join("copy");
    download(&store, root, &dest).await.unwrap();
    assert_eq!(scan(&dest).unwrap().root, root);
    assert_eq!(mode(&dest.join("empty")) & 0o111, 0);
}

#[tokio::test]
async fn test_parts_are_laid_alone_or_named_when_they_are_not_there() {
    let store = Memory::new();
    let (root, all) = example(&store).await;
    let home = tempfile::tempdir().unwrap();
    let dest = home.path().join("copy");
    let lay = async |parts: &[&str]| {
        let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
        let laid = download_parts(&store, root, &parts, &dest, &Arc::default()).await;
        let found = dest.exists().then(|| scan(&dest).unwrap().named(|_, _| true));
        let _ = fs::remove_dir_all(&dest);
        laid.map(|laid| (laid, found.unwrap_or_default()))
    };
    assert_eq!(lay(&[]).await.unwrap().0, all);
    let (laid, found) = lay(&["train.py", "a/b", "many/7", "many/8"]).await.unwrap();
    assert_eq!(laid, Laid { files: 4, bytes: 8 + 4 + 2 * 5000 });
    for path in ["train.py", "a/b/c/deep", "many/7", "many/8"] {
        assert!(found.iter().any(|name| name == path), "{path}: {found:?}");
    }
    assert_eq!(lay(&["many", "a/large", "many/7"]).await.unwrap().0.files, 301);
    for absent in ["nope", "a/nope", "train.py/x", "a//b"] {
        let refused = lay(&["train.py", absent]).await.unwrap_err();
        assert!(matches!(&refused, MaterializeError::NoSuchPart { path } if path == absent), "{refused}");
    }
    assert_eq!(lay(&["many"]).await.unwrap().0.files, 300, "its link leads nowhere then");
}

#[tokio::test]
async fn test_a_job_cannot_reach_the_store_through_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let store = Disk::open(&dir.path().join("store")).unwrap();
    let (root, _) = example(&store).await;
    let first = dir.path().join("first");
    materialize(&store, root, &first, None, &[]).await.unwrap();
    for path in ["train.py", "a/large", "empty"] {
        assert_eq!(fs::metadata(first.join(path)).unwrap().nlink(), 1);
        fs::write(first.join(path), "mine").unwrap();
    }
    let second = dir.path().join("second");
    download(&store, root, &second).await.unwrap();
    assert_eq!(scan(&second).unwrap().root, root);
}

#[tokio::test]
async fn test_destination_may_be_an_empty_directory_and_nothing_else() {
    let store = Memory::new();
    let (root, _) = example(&store).await;
    let home = tempfile::tempdir().unwrap();
    let dest = home.path().join("work");
    fs::create_dir(&dest).unwrap();
    materialize(&store, root, &dest, None, &[]).await.unwrap();
    fs::write(dest.join("train.py"), "mine").unwrap();
    let refused = materialize(&store, root, &dest, None, &[]).await;
    assert!(matches!(refused, Err(MaterializeError::Exists { .. })), "{refused:?}");
    assert_eq!(fs::read(dest.join("train.py")).unwrap(), b"mine");
    let file = home.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(
        materialize(&store, root, &file, None, &[]).await,
        Err(MaterializeError::Exists { .. })
    ));
    let nowhere = materialize(&store, root, Path::new("/"), None, &[]).await;
    assert!(matches!(nowhere, Err(MaterializeError::Destination { .. })));
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 2);
}

#[tokio::test]
async fn test_failed_materialize_leaves_nothing_and_may_be_repeated() {
    let store = Memory::new();
    let (root, _) = example(&store).await;
    let home = tempfile::tempdir().unwrap();
    let dest = home.path().join("work");
    let large = crate::digest_of(&content(1, 2_500_000));
    let small = crate::digest_of(b"deep");
    for (digest, bytes) in [(large, content(1, 2_500_000)), (small, Bytes::from_static(b"deep"))] {
        store.remove(&digest);
        let error = materialize(&store, root, &dest, None, &[]).await.unwrap_err();
        assert!(matches!(&error, MaterializeError::Read { source: ReadError::Absent { .. }, .. }), "{error}");
        store.corrupt(digest, "lies");
        let error = materialize(&store, root, &dest, None, &[]).await.unwrap_err();
        assert!(
            matches!(&error, MaterializeError::Read { source: ReadError::Corrupt { .. }, .. }),
            "{error}"
        );
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        store.corrupt(digest, bytes);
    }
    fs::create_dir_all(home.path().join("work.partial/many")).unwrap(); // as a killed process leaves it
    materialize(&store, root, &dest, None, &[]).await.unwrap();
}

#[tokio::test]
async fn test_damaged_file_of_the_store_never_reaches_a_job() {
    let dir = tempfile::tempdir().unwrap();
    let store = Disk::open(&dir.path().join("store")).unwrap();
    let (root, _) = example(&store).await;
    let large = crate::digest_of(&content(1, 2_500_000));
    crate::damage(&dir.path().join("store"), &large, |bytes| *bytes = content(2, 2_500_000).to_vec());
    let error = materialize(&store, root, &dir.path().join("work"), None, &[]).await.unwrap_err();
    assert!(matches!(&error, MaterializeError::Read { source: ReadError::Corrupt { .. }, .. }), "{error}");
    assert!(!dir.path().join("work").exists());
}

/// A root with these files.
async fn flat(store: &Memory, files: Vec<(String, Digest, bool)>) -> Digest {
    let (root, bytes) = tree::Directory { files, ..Default::default() }.encode();
    store.write_batch(vec![(root, bytes)]).await.remove(0).unwrap();
    root
}

#[tokio::test]
async fn test_tree_larger_than_the_disk_is_refused_before_its_content_is_asked_for() {
    let store = Memory::new();
    let huge = Digest { hash: [1; 32], size: i64::MAX as u64 };
    let files = ["a", "b", "c", "d", "e"].map(|name| (name.to_owned(), huge, false));
    let root = flat(&store, files.to_vec()).await;
    let home = tempfile::tempdir().unwrap();
    let refused = materialize(&store, root, &home.path().join("work"), None, &[]).await;
    let is_full = |source: &io::Error| source.kind() == io::ErrorKind::StorageFull;
    assert!(
        matches!(&refused, Err(MaterializeError::Write { source, .. }) if is_full(source)),
        "{refused:?}"
    );
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn test_more_files_than_are_looked_at_together_are_all_laid() {
    let store = Memory::new();
    let digest = crate::digest_of(b"x");
    store.write_batch(vec![(digest, Bytes::from_static(b"x"))]).await.remove(0).unwrap();
    let count = WINDOW + 100;
    let root = flat(&store, (0..count).map(|i| (format!("{i:06}"), digest, false)).collect()).await;
    let home = tempfile::tempdir().unwrap();
    let dest = home.path().join("work");
    let laid = materialize(&store, root, &dest, None, &[]).await.unwrap();
    assert_eq!(laid, Laid { files: count as u64, bytes: count as u64 });
    assert_eq!(fs::read_dir(&dest).unwrap().count(), count);
    assert_eq!(fs::read(dest.join(format!("{:06}", count - 1))).unwrap(), b"x");
}
