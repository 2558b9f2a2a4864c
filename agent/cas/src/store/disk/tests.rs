use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::conformance::{self, content, read_all, source};
use crate::{Memory, Tiered};

fn open() -> (tempfile::TempDir, Disk) {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(&dir.path().join("store")).unwrap();
    (dir, disk)
}

fn temp_files(disk: &Disk) -> usize {
    std::fs::read_dir(disk.shared.path.join("temp")).unwrap().count()
}

#[tokio::test]
async fn test_memory_conforms() {
    conformance::check(&Memory::new()).await;
}

#[tokio::test]
async fn test_disk_conforms_and_leaves_no_temporary_files() {
    let (_dir, disk) = open();
    conformance::check(&disk).await;
    assert_eq!(temp_files(&disk), 0);
}

#[tokio::test]
async fn test_tiered_conforms() {
    let (_dir, disk) = open();
    conformance::check(&Tiered::new(disk, Memory::new())).await;
}

#[tokio::test]
async fn test_tiered_reads_each_blob_from_afar_once() {
    let (_dir, near) = open();
    let far = Memory::new();
    let store = Tiered::new(near.clone(), far.clone());
    let (small, large) = (content(1, 100), content(2, 3_000_000));
    for bytes in [&small, &large] {
        store.write(digest_of(bytes), source(bytes, 100_000)).await.unwrap();
    }
    assert_eq!(near.missing(&[digest_of(&small)]).await.unwrap(), [digest_of(&small)], "writes go far only");
    store.read_batch(vec![digest_of(&small)]).await.remove(0).unwrap();
    read_all(&store, digest_of(&large), 10).await.unwrap();
    for bytes in [&small, &large] {
        far.remove(&digest_of(bytes));
        assert_eq!(read_all(&store, digest_of(bytes), 0).await.unwrap(), bytes);
    }
}

#[tokio::test]
async fn test_tiered_keeps_nothing_of_a_lying_far_store() {
    let (_dir, near) = open();
    let far = Memory::new();
    let digest = digest_of(b"truth");
    far.corrupt(digest, "wrong");
    let store = Tiered::new(near.clone(), far);
    assert!(matches!(read_all(&store, digest, 0).await, Err(ReadError::Corrupt { .. })));
    assert!(matches!(store.read_batch(vec![digest]).await.remove(0), Err(ReadError::Corrupt { .. })));
    assert_eq!(near.missing(&[digest]).await.unwrap(), [digest]);
}

#[tokio::test]
async fn test_blobs_survive_reopening_and_unfinished_files_do_not() {
    let (dir, disk) = open();
    let bytes = content(1, 1000);
    disk.write_batch(vec![(digest_of(&bytes), bytes.clone())]).await.remove(0).unwrap();
    let mut ingest = disk.ingest(digest_of(b"never finished")).await.unwrap();
    ingest.append(Bytes::from_static(b"never")).await.unwrap();
    std::mem::forget(ingest); // as a killed process does
    assert_eq!(temp_files(&disk), 1);
    drop(disk);
    let disk = Disk::open(&dir.path().join("store")).unwrap();
    assert_eq!(temp_files(&disk), 0);
    assert_eq!(read_all(&disk, digest_of(&bytes), 0).await.unwrap(), bytes);
}

#[tokio::test]
async fn test_damaged_blob_is_reported_and_a_short_one_replaced() {
    let (_dir, disk) = open();
    let bytes = content(1, 1000);
    let digest = digest_of(&bytes);
    disk.write(digest, source(&bytes, 100)).await.unwrap();
    let path = disk.shared.path.join(blob_name(&digest));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();

    std::fs::write(&path, vec![0; 1000]).unwrap();
    assert!(matches!(read_all(&disk, digest, 0).await, Err(ReadError::Corrupt { .. })));
    assert_eq!(disk.missing(&[digest]).await.unwrap(), [digest], "it is not there any more");
    std::fs::write(&path, vec![0; 1000]).unwrap();
    assert!(matches!(disk.read_batch(vec![digest]).await.remove(0), Err(ReadError::Corrupt { .. })));
    assert!(matches!(disk.read_batch(vec![digest]).await.remove(0), Err(ReadError::Absent { .. })));

    std::fs::write(&path, b"short").unwrap();
    assert_eq!(disk.missing(&[digest]).await.unwrap(), [digest]);
    disk.write(digest, source(&bytes, 100)).await.unwrap();
    assert_eq!(read_all(&disk, digest, 0).await.unwrap(), bytes);
}

#[tokio::test]
async fn test_ingest_refuses_everything_after_an_error() {
    let (_dir, disk) = open();
    let digest = digest_of(b"abc");
    let mut ingest = disk.ingest(digest).await.unwrap();
    ingest.append(Bytes::from_static(b"abcd")).await.unwrap_err();
    let again = ingest.append(Bytes::from_static(b"abc")).await;
    assert!(matches!(again, Err(WriteError::Abandoned { .. })));
    assert!(matches!(ingest.commit().await, Err(WriteError::Abandoned { .. })));
    assert_eq!(disk.missing(&[digest]).await.unwrap(), [digest]);
    assert_eq!(temp_files(&disk), 0);
}

#[tokio::test]
async fn test_two_writers_of_one_blob_both_succeed() {
    let (_dir, disk) = open();
    let blobs: Vec<(Digest, Bytes)> =
        (0..200).map(|seed| content(seed, 500)).map(|bytes| (digest_of(&bytes), bytes)).collect();
    let (one, two) = tokio::join!(disk.write_batch(blobs.clone()), disk.write_batch(blobs.clone()));
    assert!(one.into_iter().chain(two).all(|result| result.is_ok()));
    let digests = blobs.iter().map(|(digest, _)| *digest).collect();
    assert!(disk.read_batch(digests).await.iter().all(Result::is_ok));
}

#[test]
fn test_open_says_which_directory_is_unusable() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let error = Disk::open(&file).unwrap_err();
    assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
}

#[tokio::test]
async fn test_blobs_leave_the_reserve_alone() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open_with_reserve(&dir.path().join("cas"), u64::MAX).unwrap();
    let bytes = Bytes::from_static(b"one too many");
    let refused = disk.write_batch(vec![(digest_of(&bytes), bytes.clone())]).await;
    assert!(refused[0].as_ref().unwrap_err().is_no_space());
    assert!(disk.ingest(digest_of(&bytes)).await.unwrap_err().is_no_space());
}

/// Damages a blob on the disk: a flipped bit, a lost tail, or the content of another one.
fn damage(disk: &Disk, digest: &Digest, other: &Digest, kind: usize) {
    let path = |digest| disk.shared.path.join(blob_name(digest));
    let mut bytes = std::fs::read(path(digest)).unwrap();
    match kind % 3 {
        0 => {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
        }
        1 => bytes.truncate(bytes.len() - 1),
        _ => bytes = std::fs::read(path(other)).unwrap(),
    }
    std::fs::set_permissions(path(digest), std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(path(digest), bytes).unwrap();
}

/// A directory of 120 files, one in ten of them large; pairs of them have the same size.
fn project(at: &std::path::Path) -> crate::snapshot::Snapshot {
    std::fs::create_dir(at).unwrap();
    for i in 0..120 {
        let size = if i % 10 < 2 { 1_100_000 } else { 2000 };
        std::fs::write(at.join(format!("f{i}")), content(i, size)).unwrap();
    }
    crate::snapshot::scan(at).unwrap()
}

fn same_tree(left: &std::path::Path, right: &std::path::Path) -> bool {
    (0..120).all(|i| {
        let name = format!("f{i}");
        std::fs::read(left.join(&name)).unwrap() == std::fs::read(right.join(&name)).unwrap()
    })
}

#[tokio::test]
async fn test_damaged_blobs_never_reach_a_job_and_are_fetched_again() {
    let (dir, near) = open();
    let far = Memory::new();
    let code = dir.path().join("code");
    let scanned = project(&code);
    crate::snapshot::push(&scanned, &far, |_| {}).await.unwrap();
    let store = Tiered::new(near.clone(), far);
    crate::snapshot::materialize(&store, scanned.root, &dir.path().join("first")).await.unwrap();
    let all = scanned.digests();
    for (kind, digest) in all[..100].iter().enumerate() {
        let other = all.iter().find(|other| other.size == digest.size && *other != digest).unwrap();
        damage(&near, digest, other, kind);
    }
    let job = dir.path().join("job");
    crate::snapshot::materialize(&store, scanned.root, &job).await.unwrap();
    assert!(same_tree(&code, &job));
    assert_eq!(near.damaged(), 100);
    let kept = std::fs::read_dir(near.shared.path.join("quarantine")).unwrap().count();
    assert_eq!(kept, QUARANTINED, "some are kept for someone to look at, not all");
    assert_eq!(near.missing(&all).await.unwrap(), [], "all of them are back");
    for result in near.read_batch(all).await {
        result.unwrap();
    }
}

#[tokio::test]
async fn test_damaged_blob_of_an_only_store_is_named_and_taken_again() {
    let (dir, disk) = open();
    let code = dir.path().join("code");
    let scanned = project(&code);
    crate::snapshot::push(&scanned, &disk, |_| {}).await.unwrap();
    let all = scanned.digests();
    let large = all.iter().find(|digest| digest.size > 1_000_000).unwrap();
    let small = all.iter().find(|digest| digest.size < 1_000_000).unwrap();
    for (kind, bad) in [(0, large), (1, large), (2, large), (0, small), (1, small), (2, small)] {
        let other = all.iter().find(|other| other.size == bad.size && *other != bad).unwrap();
        damage(&disk, bad, other, kind);
        let to = dir.path().join("job");
        let error = crate::snapshot::materialize(&disk, scanned.root, &to).await.unwrap_err();
        let text = format!("{error:?}");
        assert!(text.contains(&bad.to_string()) || text.contains(&format!("{bad:?}")), "{text}");
        assert!(!to.exists());
        assert_eq!(disk.missing(&all).await.unwrap(), [*bad], "so that it is sent again");
        let pushed = crate::snapshot::push(&scanned, &disk, |_| {}).await.unwrap();
        assert_eq!(pushed.files_sent, 1);
        crate::snapshot::materialize(&disk, scanned.root, &to).await.unwrap();
        assert!(same_tree(&code, &to));
        std::fs::remove_dir_all(to).unwrap();
    }
    assert_eq!(disk.damaged(), 6);
}

#[tokio::test]
async fn test_good_blob_is_not_put_away_on_a_readers_word() {
    let (_dir, disk) = open();
    let bytes = content(1, 100);
    let digest = digest_of(&bytes);
    disk.write(digest, source(&bytes, 10)).await.unwrap();
    disk.distrust(digest).await;
    disk.distrust(digest_of(b"absent")).await;
    assert_eq!((disk.damaged(), disk.missing(&[digest]).await.unwrap()), (0, vec![]));
}

#[tokio::test]
async fn test_job_that_writes_to_its_files_does_not_write_to_the_store() {
    use std::os::unix::fs::MetadataExt;
    let (dir, disk) = open();
    let code = dir.path().join("code");
    let scanned = project(&code);
    crate::snapshot::push(&scanned, &disk, |_| {}).await.unwrap();
    let job = dir.path().join("job");
    crate::snapshot::materialize(&disk, scanned.root, &job).await.unwrap();
    let inode = |path: &std::path::Path| path.metadata().unwrap().ino();
    for digest in scanned.digests() {
        assert_eq!(disk.shared.path.join(blob_name(&digest)).metadata().unwrap().nlink(), 1);
    }
    for i in 0..120 {
        let path = job.join(format!("f{i}"));
        let before = inode(&path);
        let mut file = File::options().write(true).open(&path).unwrap();
        file.write_all(b"overwritten in place").unwrap();
        assert_eq!(inode(&path), before);
    }
    crate::snapshot::materialize(&disk, scanned.root, &dir.path().join("next")).await.unwrap();
    assert!(same_tree(&code, &dir.path().join("next")));
    assert_eq!(disk.damaged(), 0);
}

#[tokio::test]
async fn test_disk_without_room_or_names_keeps_whole_blobs_or_none() {
    // Bytes run out in one, names in the other: the store alone has 260 directories.
    for options in ["size=4m", "size=64m,nr_inodes=400"] {
        let Some(small) = crate::SmallDisk::mount(options) else { return };
        let disk = Disk::open(&small.path().join("store")).unwrap();
        let blobs: Vec<(Digest, Bytes)> =
            (0..300).map(|i| content(i, 30_000)).map(|bytes| (digest_of(&bytes), bytes)).collect();
        let (mut kept, mut refused) = (Vec::new(), Vec::new());
        for batch in blobs.chunks(20) {
            for ((digest, _), result) in batch.iter().zip(disk.write_batch(batch.to_vec()).await) {
                match result {
                    Ok(()) => kept.push(*digest),
                    Err(error) => {
                        assert!(error.is_no_space(), "{error:?}");
                        refused.push(*digest);
                    }
                }
            }
        }
        assert!(!kept.is_empty() && !refused.is_empty(), "{options}: {} kept", kept.len());
        let large = content(900, 70_000_000);
        let error = disk.write(digest_of(&large), source(&large, 1 << 20)).await.unwrap_err();
        assert!(error.is_no_space(), "{error:?}");
        assert_eq!(temp_files(&disk), 0);

        drop(disk);
        let disk = Disk::open(&small.path().join("store")).unwrap();
        assert_eq!(disk.missing(&kept).await.unwrap(), [], "what was acknowledged is there");
        assert_eq!(disk.missing(&refused).await.unwrap(), refused, "and nothing else");
        for result in disk.read_batch(kept.clone()).await {
            result.unwrap();
        }
        // Room comes back without a restart.
        for digest in &kept {
            std::fs::remove_file(disk.shared.path.join(blob_name(digest))).unwrap();
        }
        let (digest, bytes) = blobs.iter().find(|(digest, _)| refused.contains(digest)).unwrap();
        disk.write(*digest, source(bytes, 1000)).await.unwrap();
        assert_eq!(disk.damaged(), 0);
    }
}
