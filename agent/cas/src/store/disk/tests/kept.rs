//! What is kept and what is removed: the list, evictions beside writes and reads, and segments copied forward.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// The size of segments in the tests.
const TINY: u64 = 40_000;

fn segment_files(disk: &Disk) -> usize {
    let all = std::fs::read_dir(disk.shared.home.at("segments")).unwrap();
    all.filter(|entry| !entry.as_ref().unwrap().file_name().to_str().unwrap().ends_with(".note")).count()
}

async fn listing_of(disk: &Disk, some: &[(Digest, Bytes)]) -> Vec<Kept> {
    let wanted: BTreeSet<Digest> = digests(some).into_iter().collect();
    disk.listing().await.into_iter().filter(|kept| wanted.contains(&kept.digest)).collect()
}

#[tokio::test]
async fn test_eviction_gives_the_disk_back_and_leaves_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open_with(dir.path(), 0, TINY).unwrap();
    let sizes: Vec<usize> = (0..100).map(|n| if n % 10 == 0 { LARGE } else { 3000 }).collect();
    let kept = blobs(1, &sizes);
    keep(&disk, &kept).await;
    let (full, before) = (disk.taken(), segment_files(&disk));
    let (stay, go): (Vec<_>, Vec<_>) = kept.into_iter().enumerate().partition(|(n, _)| n % 4 == 0);
    let [stay, go] = [stay, go].map(|part| part.into_iter().map(|(_, blob)| blob).collect::<Vec<_>>());
    let evicted = evict(&disk, listing_of(&disk, &go).await).await;
    assert_eq!(evicted.blobs, go.len() as u64);
    assert!(evicted.bytes >= go.iter().map(|(digest, _)| digest.size).sum());
    assert_eq!(disk.missing(&digests(&go)).await.unwrap(), digests(&go));
    holds_all(&disk, &stay).await;
    assert!(disk.taken() < full / 2, "{} of {full}", disk.taken());
    assert!(segment_files(&disk) < before / 2 + 1, "{} of {before}", segment_files(&disk));
    drop(disk);
    let disk = Disk::open_with(dir.path(), 0, TINY).unwrap();
    assert_eq!(disk.missing(&digests(&go)).await.unwrap(), digests(&go), "they do not come back");
    holds_all(&disk, &stay).await;
    evict(&disk, disk.listing().await).await;
    assert_eq!((disk.taken(), segment_files(&disk)), (0, 0));
    keep(&disk, &go).await;
    holds_all(&disk, &go).await;
}

#[tokio::test]
async fn test_blob_used_since_the_listing_stays() {
    let (_dir, disk) = open();
    let kept = blobs(1, &[10, 10, 10, 10, LARGE, LARGE, LARGE, LARGE]);
    keep(&disk, &kept).await;
    let told = disk.listing().await;
    disk.missing(&[kept[0].0, kept[4].0]).await.unwrap();
    disk.read_batch(vec![kept[1].0, kept[5].0]).await;
    keep(&disk, &[kept[2].clone(), kept[6].clone()]).await;
    assert_eq!(evict(&disk, told).await.blobs, 2);
    assert_eq!(disk.missing(&digests(&kept)).await.unwrap(), [kept[3].0, kept[7].0]);
}

#[tokio::test]
async fn test_last_use_is_known_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let kept = blobs(1, &[10, LARGE, 10, LARGE]);
    let disk = Disk::open(dir.path()).unwrap();
    keep(&disk, &kept).await;
    let then = disk.listing().await[0].used - Duration::from_secs(5_000_000);
    let second = then.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as u32;
    disk.shared.index.lock().remember(|digest| digests(&kept[..2]).contains(digest).then_some(second));
    drop(disk);
    let told = |disk: Disk| async move {
        let old = |kept: &Kept| kept.used == then;
        disk.listing().await.into_iter().filter(old).map(|kept| kept.digest).collect::<BTreeSet<_>>()
    };
    let old: BTreeSet<Digest> = digests(&kept[..2]).into_iter().collect();
    assert_eq!(told(Disk::open(dir.path()).unwrap()).await, old);
    // Without what was noted a blob is as old as its file.
    std::fs::write(dir.path().join("torn"), "torn").unwrap();
    std::fs::rename(dir.path().join("torn"), dir.path().join("uses")).unwrap();
    assert_eq!(told(Disk::open(dir.path()).unwrap()).await, BTreeSet::new());
}

#[tokio::test]
async fn test_check_reads_all_and_puts_away_what_is_damaged() {
    let (dir, disk) = open();
    let kept = blobs(1, &[1000, 2000, LARGE, LARGE, 40_000_000]);
    keep(&disk, &kept).await;
    for at in [1, 3] {
        damage(&dir.path().join("store"), &kept[at].0, |bytes| bytes[999] ^= 128);
    }
    let told = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&told);
    let checked = disk.check(move |checked| listener.lock().push(checked)).await;
    let bytes = kept.iter().map(|(digest, _)| digest.size).sum();
    assert_eq!(checked, Checked { blobs: 5, bytes, damaged: 2, ..Checked::default() });
    let told = told.lock().clone();
    assert!(told.len() > 1 && told.last() == Some(&checked), "{told:?}");
    assert_eq!(disk.missing(&digests(&kept)).await.unwrap(), [kept[1].0, kept[3].0]);
    assert_eq!((disk.check(|_| {}).await.damaged, disk.damaged()), (0, 2));
}

#[tokio::test]
async fn test_damaged_blob_is_not_copied_forward() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open_with(dir.path(), 0, TINY).unwrap();
    let kept = blobs(1, &[3000; 40]);
    keep(&disk, &kept).await;
    damage(dir.path(), &kept[0].0, |bytes| bytes[1] ^= 1);
    evict(&disk, listing_of(&disk, &kept[2..]).await).await;
    assert_eq!(disk.missing(&digests(&kept[..2])).await.unwrap(), [kept[0].0]);
    assert_eq!((disk.damaged(), segment_files(&disk)), (1, 1));
    holds_all(&disk, &kept[1..2]).await;
}

/// Writers that each keep, ask for and read blobs, and one who removes whatever nobody holds: what is held is
/// there, and what is read is right.
#[tokio::test(flavor = "multi_thread")]
async fn test_what_is_held_stays_while_others_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open_with(dir.path(), 0, TINY).unwrap();
    let sizes: Vec<usize> = (0..60).map(|n| if n % 12 == 0 { LARGE } else { 500 + 100 * n }).collect();
    let pool = Arc::new(blobs(1, &sizes));
    let held: Arc<Mutex<BTreeMap<Digest, usize>>> = Arc::default();
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..4u64 {
        let (disk, pool, held) = (disk.clone(), Arc::clone(&pool), Arc::clone(&held));
        tasks.spawn(async move {
            for round in 0..60 {
                let start = (writer * 7 + round * 13) as usize % 50;
                let some = &pool[start..start + 6];
                some.iter().for_each(|(digest, _)| *held.lock().entry(*digest).or_default() += 1);
                keep(&disk, some).await;
                holds_all(&disk, some).await;
                for (digest, bytes) in some {
                    disk.write(*digest, source(bytes, 1000)).await.unwrap();
                    *held.lock().entry(*digest).or_default() -= 1;
                }
            }
        });
    }
    let mut removed = 0;
    while !tasks.is_empty() {
        let told = disk.listing().await;
        let free = |kept: &Kept| held.lock().get(&kept.digest).is_none_or(|holders| *holders == 0);
        let victims: Vec<Kept> = told.into_iter().filter(free).collect();
        removed += evict(&disk, victims).await.blobs;
        while let Some(ended) = tasks.try_join_next() {
            ended.unwrap();
        }
    }
    assert!(removed > 0);
    assert_eq!(disk.check(|_| {}).await.damaged, 0);
    let kept: BTreeSet<Digest> = disk.listing().await.into_iter().map(|kept| kept.digest).collect();
    drop(disk);
    let disk = Disk::open_with(dir.path(), 0, TINY).unwrap();
    assert_eq!(disk.listing().await.into_iter().map(|kept| kept.digest).collect::<BTreeSet<_>>(), kept);
    assert_eq!(disk.check(|_| {}).await.damaged, 0);
}

#[derive(Debug, Clone)]
enum Step {
    Write(Vec<usize>),
    Evict(Vec<usize>),
    Damage(usize),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let some = || prop::collection::vec(0..POOL, 1..12);
    prop_oneof![
        4 => some().prop_map(Step::Write),
        3 => some().prop_map(Step::Evict),
        1 => (0..POOL).prop_map(Step::Damage),
        1 => Just(Step::Reopen),
    ]
}

const POOL: usize = 30;

async fn live(steps: Vec<Step>) {
    let sizes: Vec<usize> = (0..POOL).map(|n| if n % 10 == 0 { LARGE } else { 1 + 321 * n }).collect();
    let pool = blobs(3, &sizes);
    let dir = tempfile::tempdir().unwrap();
    let mut disk = Disk::open_with(dir.path(), 0, 12_000).unwrap();
    let mut model = BTreeSet::new();
    for step in steps {
        match step {
            Step::Write(which) => {
                let some: Vec<_> = which.iter().map(|n| pool[*n].clone()).collect();
                keep(&disk, &some).await;
                model.extend(which);
            }
            Step::Evict(which) => {
                let some: Vec<_> = which.iter().map(|n| pool[*n].clone()).collect();
                let there = which.iter().filter(|n| model.contains(*n)).collect::<BTreeSet<_>>().len();
                assert_eq!(evict(&disk, listing_of(&disk, &some).await).await.blobs, there as u64);
                which.iter().for_each(|n| _ = model.remove(n));
            }
            Step::Damage(n) => {
                if model.remove(&n) {
                    damage(dir.path(), &pool[n].0, |bytes| bytes[0] ^= 1);
                    assert!(disk.read_batch(vec![pool[n].0]).await.remove(0).is_err());
                }
            }
            Step::Reopen => {
                drop(disk);
                disk = Disk::open_with(dir.path(), 0, 12_000).unwrap();
            }
        }
        let there: Vec<_> = model.iter().map(|n| pool[*n].clone()).collect();
        holds_all(&disk, &there).await;
        assert_eq!(disk.listing().await.len(), there.len());
        let on_disk = std::fs::read_dir(dir.path().join("segments")).unwrap().map(|entry| entry.unwrap());
        let segments = on_disk.filter(|entry| entry.path().extension().is_none_or(|end| end != "note"));
        let bytes: u64 = segments.map(|entry| entry.metadata().unwrap().len()).sum();
        let loose = model.iter().filter(|n| *n % 10 == 0).count() as u64 * LARGE.div_ceil(4096) as u64 * 4096;
        assert_eq!(disk.on_disk(), bytes + loose, "what it says it takes is what it takes");
    }
    assert_eq!(disk.check(|_| {}).await.damaged, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]

    #[test]
    fn test_store_agrees_with_a_set_whatever_happens_to_it(steps in prop::collection::vec(step(), 1..30)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(live(steps));
    }
}
