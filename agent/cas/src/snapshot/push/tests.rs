use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::super::{Elsewhere, list, scan, scan_outputs};
use super::*;
use crate::Memory;
use crate::conformance::content;

fn tree(count: usize) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..count {
        let folder = dir.path().join(format!("d{}", i % 7));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("f{i}")), content(i as u64, 500)).unwrap();
    }
    fs::write(dir.path().join("large"), content(1000, 3_000_000)).unwrap();
    fs::write(dir.path().join("copy"), content(1000, 3_000_000)).unwrap();
    dir
}

#[tokio::test]
async fn test_push_sends_each_content_once_and_then_nothing() {
    let (dir, store) = (tree(100), Memory::new());
    let snapshot = scan(dir.path()).unwrap();
    let seen = Mutex::new(Vec::new());
    let pushed = push(&snapshot, &store, |progress| seen.lock().unwrap().push(progress)).await.unwrap();
    let messages: u64 = snapshot.directories().iter().map(|folder| folder.digest.size).sum();
    assert_eq!((pushed.files, pushed.files_sent), (102, 101));
    assert_eq!(pushed.bytes_sent, 3_050_000 + messages);
    let seen = seen.into_inner().unwrap();
    let last = seen.last().unwrap();
    assert_eq!((last.files, last.bytes), (101, 3_050_000));
    assert!(seen.windows(2).all(|pair| pair[0].bytes <= pair[1].bytes && pair[1].bytes_total == 3_050_000));
    assert_eq!(list(&store, snapshot.root).await.unwrap().len(), 102);

    let again = push(&scan(dir.path()).unwrap(), &store, |_| {}).await.unwrap();
    assert_eq!(again, Pushed { files: 102, files_sent: 0, bytes_sent: 0 });
}

#[tokio::test]
async fn test_bytes_of_a_large_file_count_while_it_is_sent() {
    let under_way = Arc::new(AtomicU64::new(7));
    let meter = Meter::new(&under_way);
    let chunks = [3, 5].map(|length| Ok(Bytes::from(vec![0; length])));
    let mut counted = meter.count(futures_util::stream::iter(chunks).boxed());
    counted.next().await.unwrap().unwrap();
    assert_eq!(under_way.load(Ordering::Relaxed), 10);
    counted.next().await.unwrap().unwrap();
    assert_eq!(under_way.load(Ordering::Relaxed), 15);
    // It was sent whole, or is sent again from its start.
    drop(meter);
    assert_eq!(under_way.load(Ordering::Relaxed), 7);
}

#[tokio::test]
async fn test_push_after_one_change_sends_one_file_and_the_way_to_it() {
    let (dir, store) = (tree(100), Memory::new());
    push(&scan(dir.path()).unwrap(), &store, |_| {}).await.unwrap();
    fs::write(dir.path().join("d3/f3"), "changed").unwrap();
    let snapshot = scan(dir.path()).unwrap();
    let pushed = push(&snapshot, &store, |_| {}).await.unwrap();
    assert_eq!(pushed.files_sent, 1);
    assert!(pushed.bytes_sent < 4000, "{} bytes", pushed.bytes_sent);
}

#[tokio::test]
async fn test_push_sends_what_is_both_a_file_and_a_directory_once_for_each() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Memory::new());
    fs::create_dir(dir.path().join("a")).unwrap();
    fs::write(dir.path().join("a/x"), "1").unwrap();
    let (digest, message) = scan(&dir.path().join("a")).unwrap().top.message();
    fs::write(dir.path().join("message"), &message).unwrap();
    let snapshot = scan(dir.path()).unwrap();
    let pushed = push(&snapshot, &store, |_| {}).await.unwrap();
    assert_eq!(pushed.files_sent, 2);
    assert_eq!(store.get(&digest).unwrap(), message);
    assert_eq!(list(&store, snapshot.root).await.unwrap().len(), 2);
}

#[tokio::test]
async fn test_push_completes_what_an_eviction_took() {
    let (dir, store) = (tree(10), Memory::new());
    let snapshot = scan(dir.path()).unwrap();
    push(&snapshot, &store, |_| {}).await.unwrap();
    for folder in snapshot.directories().iter().take(2) {
        store.remove(&folder.digest);
    }
    store.remove(&snapshot.contents()[4].digest());
    assert_eq!(push(&snapshot, &store, |_| {}).await.unwrap().files_sent, 1);
    list(&store, snapshot.root).await.unwrap();
}

#[tokio::test]
async fn test_push_names_a_file_that_changed_since_the_scan() {
    for (path, change) in
        [("d1/f1", content(9, 500)), ("d1/f1", content(9, 501)), ("large", content(9, 3_000_000))]
    {
        let (dir, store) = (tree(10), Memory::new());
        fs::remove_file(dir.path().join("copy")).unwrap();
        let snapshot = scan(dir.path()).unwrap();
        fs::write(dir.path().join(path), change).unwrap();
        let error = push(&snapshot, &store, |_| {}).await.unwrap_err();
        assert!(matches!(&error, PushError::Changed { path: named } if named.ends_with(path)), "{error:?}");
        assert!(store.get(&snapshot.root).is_none(), "no root without its tree");
    }
}

#[tokio::test]
async fn test_push_sends_what_was_scanned_of_a_file_that_only_grew_but_not_of_outputs() {
    use std::io::Write;
    let (dir, store) = (tree(10), Memory::new());
    let (code, stop) = (scan(dir.path()).unwrap(), AtomicBool::new(false));
    let outputs =
        scan_outputs(dir.path(), &[("outputs", Path::new("d1"))], &[], &Elsewhere::default(), &stop).unwrap();
    for path in ["d1/f1", "large"] {
        fs::File::options().append(true).open(dir.path().join(path)).unwrap().write_all(b"more").unwrap();
    }
    let error = push(&outputs, &store, |_| {}).await.unwrap_err();
    assert!(matches!(&error, PushError::Changed { path } if path.ends_with("d1/f1")), "{error:?}");
    push(&code, &store, |_| {}).await.unwrap();
    assert!(code.digests().iter().all(|digest| store.get(digest).is_some()));
}

#[tokio::test]
async fn test_push_follows_no_link_that_took_the_place_of_a_file_or_directory() {
    let (dir, store) = (tree(10), Memory::new());
    let snapshot = scan(dir.path()).unwrap();
    fs::rename(dir.path().join("d1"), dir.path().join("moved")).unwrap();
    std::os::unix::fs::symlink("moved", dir.path().join("d1")).unwrap();
    assert!(matches!(push(&snapshot, &store, |_| {}).await, Err(PushError::Read { .. })));
}

/// Forgets what it took so many times; a liar also reports every blob as missing.
#[derive(Debug, Clone, Default)]
struct Careless {
    store: Memory,
    forgets: std::sync::Arc<std::sync::atomic::AtomicUsize>,
    liar: bool,
    /// How many blobs each question was about, if its server checks trees.
    checks: Option<std::sync::Arc<Mutex<Vec<usize>>>>,
}

impl Careless {
    fn forget(&self, digests: &[Digest]) {
        use std::sync::atomic::Ordering::Relaxed;
        if self.forgets.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok() {
            digests.iter().for_each(|digest| self.store.remove(digest));
        }
    }
}

impl BlobStore for Careless {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        self.checks.iter().for_each(|asked| asked.lock().unwrap().push(digests.len()));
        if self.liar { Ok(digests.to_vec()) } else { self.store.missing(digests).await }
    }
    async fn read(&self, digest: Digest, offset: u64) -> Result<crate::store::Chunks, crate::ReadError> {
        self.store.read(digest, offset).await
    }
    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, crate::ReadError>> {
        self.store.read_batch(digests).await
    }
    async fn write(&self, digest: Digest, source: crate::store::Chunks) -> Result<(), WriteError> {
        self.store.write(digest, source).await?;
        self.forget(&[digest]);
        Ok(())
    }
    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        let digests: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
        let results = self.store.write_batch(blobs).await;
        self.forget(&digests);
        results
    }
    async fn quarantine(&self, _: Digest) {}
    async fn file(&self, _: Digest) -> Option<fs::File> {
        None
    }
    async fn checks_trees(&self) -> bool {
        self.checks.is_some()
    }
}

#[tokio::test]
async fn test_a_light_push_asks_for_little_and_trusts_what_was_sent_before() {
    use agent_model::{Clock as _, ManualClock, SystemClock};

    let (dir, home) = (tree(100), tempfile::tempdir().unwrap());
    let clock = Arc::new(ManualClock::new(SystemClock.now()));
    let cache =
        crate::snapshot::StatCache::with_clock(home.path().join("scans"), Arc::<ManualClock>::clone(&clock));
    let scan = || {
        clock.advance(Duration::from_secs(3600)); // what was written is old enough to be remembered
        cache.scan(dir.path()).unwrap()
    };
    let asked = Arc::new(Mutex::new(Vec::new()));
    let store = Careless { checks: Some(Arc::clone(&asked)), ..Careless::default() };
    let questions = || std::mem::take(&mut *asked.lock().unwrap());
    let first = scan();
    assert_eq!(push_lightly(&first, &store, |_| {}).await.unwrap().files_sent, 101);
    assert_eq!(list(&store.store, first.root).await.unwrap().len(), 102);
    assert_eq!(questions()[..1], [109], "all that was read, and eight directories");

    fs::write(dir.path().join("d3/f3"), "changed").unwrap();
    let changed = scan();
    let pushed = push_lightly(&changed, &store, |_| {}).await.unwrap();
    assert_eq!((changed.read, pushed.files_sent), (1, 1));
    assert_eq!(questions(), [9], "the file and eight directories, once");
    assert_eq!(list(&store.store, changed.root).await.unwrap().len(), 102);

    // A store that has none of the directories is asked for every file, one that lost a file is not: that is found
    // by whoever checks the tree.
    let other = Careless { store: Memory::new(), ..store.clone() };
    assert_eq!(push_lightly(&scan(), &other, |_| {}).await.unwrap().files_sent, 101);
    assert_eq!(questions(), [8, 101]);
    store.store.remove(&changed.digests()[0]);
    assert_eq!(push_lightly(&scan(), &store, |_| {}).await.unwrap().files_sent, 0);
    assert_eq!(push(&scan(), &store, |_| {}).await.unwrap().files_sent, 1);
    // Whose server checks nothing is asked for everything, before and after.
    let plain = Careless { store: store.store.clone(), ..Careless::default() };
    store.store.remove(&changed.digests()[0]);
    assert_eq!(push_lightly(&scan(), &plain, |_| {}).await.unwrap().files_sent, 1);
}

#[tokio::test(start_paused = true)]
async fn test_what_a_store_takes_and_does_not_keep_is_sent_again_and_told_when_it_never_does() {
    let dir = tree(20);
    let snapshot = scan(dir.path()).unwrap();
    let forgets =
        |times: usize| Careless { forgets: std::sync::Arc::new(times.into()), ..Careless::default() };
    let store = forgets(3);
    push(&snapshot, &store, |_| {}).await.unwrap();
    assert_eq!(list(&store.store, snapshot.root).await.unwrap().len(), 22);
    let error = push(&snapshot, &forgets(usize::MAX), |_| {}).await.unwrap_err();
    assert!(matches!(error, PushError::Unkept(WriteError::Vanished { .. })), "{error:?}");
    // A blob that can be read is present, whatever the store reports.
    let liar = Careless { liar: true, ..Careless::default() };
    push(&snapshot, &liar, |_| {}).await.unwrap();
}
