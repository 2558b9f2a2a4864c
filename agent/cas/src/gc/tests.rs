use std::collections::BTreeMap;

use agent_model::SystemClock;
use agent_model::disk::Watermarks;

use super::*;
use crate::{damage, digest_of, snapshot};

/// A store whose blobs are all old enough to go, and what its one user holds.
struct Bench {
    dir: tempfile::TempDir,
    disk: Disk,
    pins: Arc<Mutex<Result<Vec<Pin>, Unknown>>>,
    collector: Collector,
}

const NO_LEASE: StoreLimits = StoreLimits { size: 1 << 40, marks: Watermarks::new(0), lease: Duration::ZERO };

impl Bench {
    fn new(limits: StoreLimits) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(&dir.path().join("store")).unwrap();
        let collector = Collector::new(disk.clone(), limits, &["jobs"], Arc::new(SystemClock));
        let pins = Arc::new(Mutex::new(Ok(Vec::new())));
        let held = Arc::clone(&pins);
        collector.held_by(
            "jobs",
            Box::new(move || {
                let held = held.lock().clone();
                Box::pin(async move { held })
            }),
        );
        Bench { dir, disk, pins, collector }
    }

    fn hold(&self, pins: Vec<Pin>) {
        *self.pins.lock() = Ok(pins);
    }

    /// Stores a directory with these files.
    async fn tree(&self, name: &str, files: &[(&str, &str)]) -> Digest {
        let dir = self.dir.path().join(name);
        for (path, text) in files {
            std::fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
            std::fs::write(dir.join(path), text).unwrap();
        }
        let scanned = snapshot::scan(&dir).unwrap();
        snapshot::push(&scanned, &self.disk, |_| {}).await.unwrap();
        scanned.root
    }

    async fn has(&self, text: &str) -> bool {
        self.disk.missing(&[digest_of(text.as_bytes())]).await.unwrap().is_empty()
    }

    async fn blobs(&self) -> usize {
        self.disk.listing().await.len()
    }

    /// Damages a blob behind the store's back.
    fn damage(&self, digest: Digest) {
        damage(&self.dir.path().join("store"), &digest, |bytes| bytes[0] ^= 1);
    }
}

#[tokio::test]
async fn test_what_hangs_on_a_pin_stays_and_the_rest_goes() {
    let bench = Bench::new(NO_LEASE);
    let shared = [("deep/er/shared", "shared"), ("deep/er/also", "also")];
    let one = bench.tree("one", &[&shared[..], &[("only", "one")]].concat()).await;
    let two = bench.tree("two", &[&shared[..], &[("only", "two")]].concat()).await;
    bench.tree("three", &[("only", "three"), ("shared", "shared")]).await;
    bench.hold(vec![Pin::tree(two, Holder::Outputs), Pin::tree(one, Holder::Jobs)]);
    let dry = bench.collector.collect(Goal::All, true).await.unwrap();
    assert_eq!((dry.freed.blobs, bench.blobs().await), (2, 10), "the file and the root of the third");
    let done = bench.collector.collect(Goal::All, false).await.unwrap();
    assert_eq!((done.freed.blobs, bench.blobs().await), (2, 8));
    let held: BTreeMap<Reason, u64> = done.stays.iter().map(|stay| (stay.reason, stay.blobs)).collect();
    // What both hold counts once: the shared files and the two directories above them are the jobs'.
    let expected = [(Reason::Held(Holder::Jobs), 6), (Reason::Held(Holder::Outputs), 2)];
    assert_eq!(held, BTreeMap::from(expected));
    for root in [one, two] {
        assert_eq!(bench.collector.first_missing(&[root]).await.unwrap(), None);
    }
    assert!(!bench.has("three").await && bench.has("shared").await);
}

#[tokio::test]
async fn test_a_tree_with_gaps_holds_what_is_left_of_it() {
    let bench = Bench::new(NO_LEASE);
    let root = bench.tree("t", &[("a/x", "x"), ("b/y", "y"), ("z", "z")]).await;
    let a = snapshot::scan(&bench.dir.path().join("t/a")).unwrap().root;
    bench.damage(a);
    bench.disk.quarantine(a).await;
    bench.hold(vec![Pin::tree(root, Holder::Jobs), Pin::tree(digest_of(b"never there"), Holder::Jobs)]);
    bench.collector.collect(Goal::All, false).await.unwrap();
    assert!(bench.has("y").await && bench.has("z").await && !bench.has("x").await);
    assert_eq!(bench.collector.first_missing(&[root]).await.unwrap(), Some(a));
}

#[tokio::test]
async fn test_nothing_goes_while_a_user_cannot_say_what_he_holds() {
    let bench = Bench::new(NO_LEASE);
    bench.tree("t", &[("x", "x")]).await;
    *bench.pins.lock() = Err(Unknown("its database is away".into()));
    assert!(matches!(bench.collector.collect(Goal::All, false).await, Err(CollectError::Pins { .. })));
    let silent = Collector::new(bench.disk.clone(), NO_LEASE, &["jobs", "replicas"], Arc::new(SystemClock));
    silent.held_by("jobs", Box::new(|| Box::pin(async { Ok(Vec::new()) })));
    let refused = silent.collect(Goal::All, false).await;
    assert!(matches!(refused, Err(CollectError::NotYet { user: "replicas" })));
    assert_eq!(bench.blobs().await, 2);
}

#[tokio::test]
async fn test_a_lease_holds_what_was_just_sent() {
    let bench = Bench::new(StoreLimits { lease: Duration::from_secs(1800), ..NO_LEASE });
    bench.tree("t", &[("x", "x")]).await;
    let done = bench.collector.collect(Goal::All, false).await.unwrap();
    assert_eq!((done.freed.blobs, done.stays.len(), done.stays[0].reason), (0, 1, Reason::Recent));
    assert!(!done.is_enough());
}

#[tokio::test]
async fn test_a_damaged_directory_that_is_needed_ends_the_collection() {
    let bench = Bench::new(NO_LEASE);
    let root = bench.tree("t", &[("x", "x"), ("y", "y")]).await;
    bench.damage(root);
    bench.hold(vec![Pin::tree(root, Holder::Outputs)]);
    assert!(matches!(bench.collector.collect(Goal::All, false).await, Err(CollectError::Read(_))));
    assert!(bench.has("x").await && bench.has("y").await);
}

#[tokio::test]
async fn test_what_is_relied_on_during_a_collection_stays() {
    let bench = Bench::new(NO_LEASE);
    let root = bench.tree("t", &[("x", "x"), ("d/y", "y")]).await;
    bench.tree("other", &[("z", "z")]).await;
    // Between the report of the user and the removal, somebody submits.
    let user = Collector::new(bench.disk.clone(), NO_LEASE, &["jobs"], Arc::new(SystemClock));
    let relying = user.clone();
    let say = move || {
        let relying = relying.clone();
        async move {
            drop(relying.rely_on(vec![Pin::tree(root, Holder::Jobs)]).await);
            Ok(Vec::new())
        }
    };
    user.held_by("jobs", Box::new(move || Box::pin(say())));
    user.collect(Goal::All, false).await.unwrap();
    assert_eq!(user.first_missing(&[root]).await.unwrap(), None);
    assert!(!bench.has("z").await);
    assert!(user.shared.relied().is_none(), "nothing is written down when none is on its way");
}

#[tokio::test]
async fn test_completeness_is_asked_again_when_something_went() {
    let bench = Bench::new(NO_LEASE);
    let root = bench.tree("t", &[("d/x", "x")]).await;
    let roots = [root];
    let whole = || bench.collector.first_missing(&roots);
    assert_eq!(whole().await.unwrap(), None);
    assert!(!bench.collector.shared.whole().complete.is_empty());
    bench.collector.collect(Goal::All, false).await.unwrap();
    assert_eq!(whole().await.unwrap(), Some(root));
    bench.tree("t", &[("d/x", "x")]).await;
    assert_eq!(whole().await.unwrap(), None);
    // A blob that is found damaged is missing from then on.
    let x = digest_of(b"x");
    bench.damage(x);
    bench.disk.quarantine(x).await;
    assert_eq!(whole().await.unwrap(), Some(x));
    assert_eq!(
        bench.collector.first_missing(&[digest_of(b"no tree")]).await.unwrap(),
        Some(digest_of(b"no tree"))
    );
}

#[tokio::test]
async fn test_the_limit_of_the_store_is_kept() {
    let bench = Bench::new(StoreLimits { size: 400_000, ..NO_LEASE });
    let text = |n: u8| String::from_utf8(vec![b'a' + n; 100_000]).unwrap();
    for n in 0..6 {
        bench.tree(&format!("t{n}"), &[("x", &text(n))]).await;
        // Within a second the order of uses is known by the listings between them.
        bench.disk.listing().await;
    }
    assert!(bench.collector.is_due().await);
    let done = bench.collector.collect(Goal::Limits, false).await.unwrap();
    assert!(done.is_enough() && !bench.collector.is_due().await);
    assert!(!bench.has(&text(0)).await && bench.has(&text(5)).await, "the oldest went");
    assert_eq!(bench.collector.collect(Goal::Limits, false).await.unwrap().freed, Evicted::default());
}
