use std::io::Write;

mod kept;
mod kills;
mod scarce;
mod torn;

use super::home::QUARANTINED;
use super::*;
use crate::conformance::{self, content, read_all, source};
use crate::{Checked, Evicted, Memory, Tiered, damage};

/// The size of a blob that has a file of its own.
const LARGE: usize = 200_000;

fn open() -> (tempfile::TempDir, Disk) {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(&dir.path().join("store")).unwrap();
    (dir, disk)
}

fn temp_files(disk: &Disk) -> usize {
    std::fs::read_dir(disk.shared.home.at("temp")).unwrap().count()
}

/// Blobs of these sizes; others for each seed.
fn blobs(seed: u64, sizes: &[usize]) -> Vec<(Digest, Bytes)> {
    let blob = |(n, size): (usize, &usize)| content(seed * 1000 + n as u64, *size);
    sizes.iter().enumerate().map(blob).map(|bytes| (digest_of(&bytes), bytes)).collect()
}

async fn keep(disk: &Disk, blobs: &[(Digest, Bytes)]) {
    for result in disk.write_batch(blobs.to_vec()).await {
        result.unwrap();
    }
}

/// What a collection does.
async fn evict(disk: &Disk, victims: Vec<Kept>) -> Evicted {
    let evicted = disk.evict(victims).await;
    disk.compact().await;
    evicted
}

fn digests(blobs: &[(Digest, Bytes)]) -> Vec<Digest> {
    blobs.iter().map(|(digest, _)| *digest).collect()
}

/// All of them are there and right, read together and one by one.
async fn holds_all(disk: &Disk, blobs: &[(Digest, Bytes)]) {
    assert_eq!(disk.missing(&digests(blobs)).await.unwrap(), []);
    for ((digest, bytes), read) in blobs.iter().zip(disk.read_batch(digests(blobs)).await) {
        assert_eq!(read.unwrap(), bytes);
        assert_eq!(read_all(disk, *digest, 1).await.unwrap(), bytes.slice(1..));
    }
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
    // As a killed process leaves it.
    std::fs::write(disk.shared.home.at("temp/7"), "never finished").unwrap();
    drop(disk);
    let disk = Disk::open(&dir.path().join("store")).unwrap();
    assert_eq!(temp_files(&disk), 0);
    assert_eq!(read_all(&disk, digest_of(&bytes), 0).await.unwrap(), bytes);
}

#[tokio::test]
async fn test_damaged_blob_is_reported_and_can_be_sent_again() {
    let (dir, disk) = open();
    let store = dir.path().join("store");
    let kept = blobs(1, &[1000, LARGE]);
    let changes: [fn(&mut Vec<u8>); 2] = [|bytes| bytes[500] ^= 1, |bytes| bytes.truncate(5)];
    for (digest, bytes) in &kept {
        for change in changes {
            for together in [false, true] {
                disk.write(*digest, source(bytes, 100)).await.unwrap();
                damage(&store, digest, change);
                let read = match together {
                    true => disk.read_batch(vec![*digest]).await.remove(0),
                    false => read_all(&disk, *digest, 0).await,
                };
                assert!(read.is_err(), "{read:?}");
                assert_eq!(disk.missing(&[*digest]).await.unwrap(), [*digest], "it is not there any more");
                let again = read_all(&disk, *digest, 0).await;
                assert!(matches!(again, Err(ReadError::Absent { .. })), "{again:?}");
            }
        }
    }
    assert_eq!(disk.damaged(), 8);
    keep(&disk, &kept).await;
    holds_all(&disk, &kept).await;
}

#[tokio::test]
async fn test_file_that_somebody_removed_is_missing_once_it_was_asked_for() {
    let (dir, disk) = open();
    let kept = blobs(1, &[LARGE]);
    keep(&disk, &kept).await;
    let (path, _) = crate::place_of(&dir.path().join("store"), &kept[0].0).unwrap();
    std::fs::remove_file(path).unwrap();
    assert!(matches!(read_all(&disk, kept[0].0, 0).await, Err(ReadError::Absent { .. })));
    assert_eq!(disk.missing(&digests(&kept)).await.unwrap(), digests(&kept));
    keep(&disk, &kept).await;
    holds_all(&disk, &kept).await;
    assert_eq!(disk.damaged(), 0);
}

#[tokio::test]
async fn test_store_of_an_earlier_release_opens_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let kept = blobs(1, &[10, 5000, LARGE]);
    for (digest, bytes) in &kept {
        let path = dir.path().join(blob_name(digest));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let disk = Disk::open(dir.path()).unwrap();
    holds_all(&disk, &kept).await;
    for (digest, _) in &kept {
        assert!(disk.file(*digest).await.is_some() && dir.path().join(blob_name(digest)).exists());
    }
    let more = blobs(2, &[10, 5000, LARGE]);
    keep(&disk, &more).await;
    drop(disk);
    let disk = Disk::open(dir.path()).unwrap();
    holds_all(&disk, &[kept, more].concat()).await;
}

#[tokio::test]
async fn test_only_a_blob_with_a_file_of_its_own_is_given_as_a_file() {
    let (_dir, disk) = open();
    let kept = blobs(1, &[SMALL as usize, SMALL as usize + 1]);
    keep(&disk, &kept).await;
    assert!(disk.file(kept[0].0).await.is_none());
    let mut bytes = Vec::new();
    disk.file(kept[1].0).await.unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, kept[1].1);
    assert_eq!(std::fs::read_dir(disk.shared.home.at("segments")).unwrap().count(), 1);
    assert!(disk.taken() > 2 * SMALL);
}

#[tokio::test]
async fn test_store_that_is_open_cannot_be_opened_again() {
    let (dir, disk) = open();
    let store = dir.path().join("store");
    let refused = tokio::task::spawn_blocking({
        let store = store.clone();
        move || Disk::open(&store).unwrap_err()
    });
    let refused = refused.await.unwrap();
    assert!(matches!(refused, OpenError::InUse { .. }) && refused.to_string().contains("another process"));
    drop(disk);
    Disk::open(&store).unwrap();
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
fn garble(disk: &Disk, digest: &Digest, other: &Bytes, kind: usize) {
    damage(&disk.shared.home.at(""), digest, |bytes| match kind % 3 {
        0 => {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
        }
        1 => bytes.truncate(bytes.len() - 1),
        _ => *bytes = other.to_vec(),
    });
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
    crate::snapshot::materialize(&store, scanned.root, &dir.path().join("first"), None, &[]).await.unwrap();
    let all = scanned.digests();
    for (kind, digest) in all[..100].iter().enumerate() {
        garble(&near, digest, &content(5000, digest.size as usize), kind);
    }
    let job = dir.path().join("job");
    crate::snapshot::materialize(&store, scanned.root, &job, None, &[]).await.unwrap();
    assert!(same_tree(&code, &job));
    assert_eq!(near.damaged(), 100);
    let kept = std::fs::read_dir(near.shared.home.at("quarantine")).unwrap().count();
    // Of two that are put there at once, each may see room for itself.
    assert!((QUARANTINED..80).contains(&kept), "some are kept for someone to look at, not all: {kept}");
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
        garble(&disk, bad, &content(5000, bad.size as usize), kind);
        let to = dir.path().join("job");
        let error = crate::snapshot::materialize(&disk, scanned.root, &to, None, &[]).await.unwrap_err();
        let text = format!("{error:?}");
        assert!(text.contains(&bad.to_string()) || text.contains(&format!("{bad:?}")), "{text}");
        assert!(!to.exists());
        assert_eq!(disk.missing(&all).await.unwrap(), [*bad], "so that it is sent again");
        let pushed = crate::snapshot::push(&scanned, &disk, |_| {}).await.unwrap();
        assert_eq!(pushed.files_sent, 1);
        crate::snapshot::materialize(&disk, scanned.root, &to, None, &[]).await.unwrap();
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
    disk.quarantine(digest).await;
    disk.quarantine(digest_of(b"absent")).await;
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
    crate::snapshot::materialize(&disk, scanned.root, &job, None, &[]).await.unwrap();
    let inode = |path: &std::path::Path| path.metadata().unwrap().ino();
    for digest in scanned.digests() {
        let (path, _) = crate::place_of(&dir.path().join("store"), &digest).unwrap();
        assert_eq!(path.metadata().unwrap().nlink(), 1);
    }
    for i in 0..120 {
        let path = job.join(format!("f{i}"));
        let before = inode(&path);
        let mut file = File::options().write(true).open(&path).unwrap();
        file.write_all(b"overwritten in place").unwrap();
        assert_eq!(inode(&path), before);
    }
    crate::snapshot::materialize(&disk, scanned.root, &dir.path().join("next"), None, &[]).await.unwrap();
    assert!(same_tree(&code, &dir.path().join("next")));
    assert_eq!(disk.damaged(), 0);
}

#[tokio::test]
async fn test_disk_without_room_or_names_keeps_whole_blobs_or_none() {
    // Bytes run out in two of them, names in the other: the store alone has 260 directories.
    for (options, size) in [("size=4m", 30_000), ("size=4m", LARGE), ("size=64m,nr_inodes=400", LARGE)] {
        let Some(small) = agent_fs::SmallDisk::mount(options) else { return };
        let disk = Disk::open(&small.path().join("store")).unwrap();
        let blobs = blobs(7, &[size; 160]);
        let (mut kept, mut refused) = (Vec::new(), Vec::new());
        for batch in blobs.chunks(20) {
            for (blob, result) in batch.iter().zip(disk.write_batch(batch.to_vec()).await) {
                match result {
                    Ok(()) => kept.push(blob.clone()),
                    Err(error) => {
                        assert!(error.is_no_space(), "{error:?}");
                        refused.push(blob.clone());
                    }
                }
            }
        }
        assert!(!kept.is_empty() && !refused.is_empty(), "{options}: {} kept", kept.len());
        let large = content(900, 5_000_000);
        let error = disk.write(digest_of(&large), source(&large, 1 << 20)).await.unwrap_err();
        assert!(error.is_no_space(), "{error:?}");
        assert_eq!(temp_files(&disk), 0);

        drop(disk);
        let disk = Disk::open(&small.path().join("store")).unwrap();
        holds_all(&disk, &kept).await;
        assert_eq!(disk.missing(&digests(&refused)).await.unwrap(), digests(&refused), "and nothing else");
        // Room is found again without a restart.
        let gone = evict(&disk, disk.listing().await).await;
        assert_eq!(gone.blobs, kept.len() as u64);
        keep(&disk, &refused[..3]).await;
        assert_eq!(disk.damaged(), 0);
    }
}
