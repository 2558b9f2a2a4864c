//! Segments and notes that were cut, damaged or lost: each costs only its own blobs, and what was acknowledged
//! is there.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

/// A store as it would be found now if its process were killed.
fn killed(store: &Path) -> tempfile::TempDir {
    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
            match entry.file_type().unwrap().is_dir() {
                true => copy(&entry.path(), &to.join(entry.file_name())),
                false => _ = fs::copy(entry.path(), to.join(entry.file_name())).unwrap(),
            }
        }
    }
    let copied = tempfile::tempdir().unwrap();
    copy(store, copied.path());
    copied
}

fn below(store: &Path, suffix: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(store.join("segments")).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<PathBuf> = all.filter(|path| path.to_str().unwrap().ends_with(suffix)).collect();
    all.sort_unstable();
    all
}

/// A store of several segments, closed, and what it holds.
async fn several(dir: &Path) -> Vec<(Digest, Bytes)> {
    let disk = Disk::open_with(dir, 0, 20_000).unwrap();
    let kept = blobs(1, &[3000; 20]);
    for some in kept.chunks(4) {
        keep(&disk, some).await;
    }
    kept
}

#[tokio::test]
async fn test_torn_tail_costs_nothing_that_was_acknowledged() {
    let (dir, disk) = open();
    let store = dir.path().join("store");
    let (first, second) = (blobs(1, &[100, 7000, 1]), blobs(2, &[50, 60]));
    keep(&disk, &first).await;
    let acknowledged = fs::metadata(&below(&store, "")[0]).unwrap().len();
    keep(&disk, &second).await;
    let length = fs::metadata(&below(&store, "")[0]).unwrap().len();
    for cut in (acknowledged..length).step_by(7) {
        let copy = killed(&store);
        File::options().write(true).open(&below(copy.path(), "")[0]).unwrap().set_len(cut).unwrap();
        let again = Disk::open(copy.path()).unwrap();
        holds_all(&again, &first).await;
        assert!(!again.missing(&digests(&second)).await.unwrap().is_empty());
        keep(&again, &second).await;
        assert_eq!(again.check(|_| {}).await, Checked { blobs: 5, bytes: 7211, ..Checked::default() });
    }
}

#[tokio::test]
async fn test_garbage_behind_the_last_record_is_cut_and_written_over() {
    let (dir, disk) = open();
    let store = dir.path().join("store");
    let kept = blobs(1, &[100, 200]);
    keep(&disk, &kept).await;
    for garbage in [vec![0; 5000], content(3, 5000).to_vec(), b"blobblobblob".repeat(9)] {
        let copy = killed(&store);
        let path = &below(copy.path(), "")[0];
        let bytes = fs::read(path).unwrap();
        fs::write(path, [&bytes[..], &garbage].concat()).unwrap();
        let again = Disk::open(copy.path()).unwrap();
        assert_eq!(fs::read(path).unwrap(), bytes);
        let more = blobs(2, &[300]);
        keep(&again, &more).await;
        drop(again);
        let again = Disk::open(copy.path()).unwrap();
        holds_all(&again, &[kept.clone(), more].concat()).await;
    }
}

#[tokio::test]
async fn test_notes_that_are_gone_damaged_or_of_another_segment_are_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let kept = several(dir.path()).await;
    assert_eq!(below(dir.path(), ".note").len(), 5);
    let harms: [fn(&Path); 4] = [
        |note| fs::remove_file(note).unwrap(),
        |note| {
            let mut bytes = fs::read(note).unwrap();
            bytes[60] ^= 1;
            fs::remove_file(note).unwrap();
            fs::write(note, bytes).unwrap();
        },
        |note| {
            fs::write(note.with_extension("new"), "")
                .and_then(|()| fs::rename(note.with_extension("new"), note))
                .unwrap()
        },
        |note| _ = fs::copy(note, note.with_file_name("00000002.note")).unwrap(),
    ];
    for harm in harms {
        let copy = killed(dir.path());
        harm(&below(copy.path(), ".note")[0]);
        let disk = Disk::open_with(copy.path(), 0, 20_000).unwrap();
        holds_all(&disk, &kept).await;
        drop(disk);
        assert_eq!(below(copy.path(), ".note").len(), 5, "they are there again");
        let disk = Disk::open_with(copy.path(), 0, 20_000).unwrap();
        assert_eq!(disk.check(|_| {}).await.damaged, 0);
        holds_all(&disk, &kept).await;
    }
}

#[tokio::test]
async fn test_segment_that_cannot_be_read_costs_its_own_blobs() {
    let dir = tempfile::tempdir().unwrap();
    let kept = several(dir.path()).await;
    for (what, harm) in [
        (
            "a directory in its place",
            (|path| fs::remove_file(path).and_then(|()| fs::create_dir(path)).unwrap()) as fn(&Path),
        ),
        ("gone", |path| fs::remove_file(path).unwrap()),
        ("empty", |path| drop(File::create(path).unwrap())),
        ("cut in its head", |path| fs::write(path, "agentd1").unwrap()),
        ("something else", |path| fs::write(path, "something else altogether").unwrap()),
    ] {
        for which in [2, 5] {
            let copy = killed(dir.path());
            harm(&copy.path().join(format!("segments/{which:08x}")));
            let disk = Disk::open_with(copy.path(), 0, 20_000).unwrap();
            let lost = disk.missing(&digests(&kept)).await.unwrap();
            assert!((1..=6).contains(&lost.len()), "{what}: {} lost", lost.len());
            keep(&disk, &kept).await;
            drop(disk);
            let disk = Disk::open_with(copy.path(), 0, 20_000).unwrap();
            holds_all(&disk, &kept).await;
            assert_eq!(disk.damaged(), 0, "{what}");
        }
    }
}

#[tokio::test]
async fn test_flipped_bit_in_the_head_of_a_segment_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let kept = several(dir.path()).await;
    for at in [0, 9] {
        let copy = killed(dir.path());
        for path in below(copy.path(), "").iter().filter(|path| path.extension().is_none()) {
            let mut bytes = fs::read(path).unwrap();
            bytes[at] ^= 1;
            fs::write(path, bytes).unwrap();
        }
        let disk = Disk::open_with(copy.path(), 0, 20_000).unwrap();
        holds_all(&disk, &kept).await;
    }
}

#[tokio::test]
async fn test_damaged_blob_does_not_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let kept = several(dir.path()).await;
    let disk = Disk::open_with(dir.path(), 0, 20_000).unwrap();
    let last = kept.len() - 1;
    for at in [0, last] {
        damage(dir.path(), &kept[at].0, |bytes| bytes[7] ^= 1);
        assert!(disk.read_batch(vec![kept[at].0]).await.remove(0).is_err());
    }
    let gone = [kept[0].0, kept[last].0];
    let killed = killed(dir.path());
    drop(disk);
    for path in [killed.path(), dir.path()] {
        let disk = Disk::open_with(path, 0, 20_000).unwrap();
        assert_eq!(disk.missing(&digests(&kept)).await.unwrap(), gone);
        assert_eq!(fs::read_dir(path.join("quarantine")).unwrap().count(), 2);
        keep(&disk, &kept).await;
        holds_all(&disk, &kept).await;
    }
}

#[tokio::test]
async fn test_segments_in_use_at_a_kill_are_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open_with(dir.path(), 0, 20_000).unwrap();
    let kept = blobs(1, &[3000; 20]);
    for some in kept.chunks(4) {
        keep(&disk, some).await;
    }
    let killed = killed(dir.path());
    assert_eq!(below(killed.path(), ".note").len(), 4, "those that are full");
    holds_all(&Disk::open_with(killed.path(), 0, 20_000).unwrap(), &kept).await;
}
