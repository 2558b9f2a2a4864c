use agent_cas::Disk;
use agent_model::{EnvSpec, SystemClock};
use agent_runtime::env::{EnvBuilder, Script, Scripted};

use super::eviction::EnvLimits;
use super::room::Unused;
use super::*;
use crate::cli::Flags;
use crate::config::Variables;

/// A node with scripted builders, and the channels of its keeper.
struct Rig {
    dir: tempfile::TempDir,
    keeper: Keeper,
    unused: Unused,
    told: watch::Sender<Vec<Wish>>,
    inventory: watch::Receiver<Inventory>,
    pauses: u32,
}

fn config(state: &Path) -> Config {
    let flags = Flags { user: true, state_dir: Some(state.display().to_string()), ..Flags::default() };
    let mut config = Config::resolve(&flags, &Variables::of_process()).unwrap();
    config.disk_reserve = 0;
    config
}

fn rig(change: impl FnOnce(&mut Config)) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    change(&mut config);
    let builders: [Arc<dyn EnvBuilder>; 1] = [Arc::new(Scripted::new(std::iter::empty::<Script>()))];
    let plain = EnvConfig::plain(dir.path().join("envs"), String::new());
    let environments = Environments::with_builders(&plain, Arc::new(builders)).unwrap();
    let store = Store::Disk(Disk::open(&dir.path().join("cas")).unwrap());
    let (told, wishes) = watch::channel(Vec::new());
    let (sender, inventory) = watch::channel(Inventory::default());
    let limits = EnvLimits { size: config.environments.size, age: config.environments.age };
    let unused = Unused { environments: environments.clone(), limits, clock: Arc::new(SystemClock) };
    let keeper = Keeper::new(environments, store, sender, wishes, Arc::default());
    Rig { dir, keeper, unused, told, inventory, pauses: 0 }
}

impl Rig {
    /// Builds an environment of this name; returns its key and a lease.
    async fn build(&self, name: &str) -> agent_runtime::env::EnvLease {
        let spec = EnvSpec::Pip { python: name.to_owned(), requirements: Vec::new() };
        let log = self.dir.path().join("build.log");
        self.keeper.environments.acquire(&spec, &log, &watch::Sender::new(None)).await.unwrap()
    }

    fn shown(&mut self) -> Vec<CachedEnvironment> {
        self.inventory.borrow_and_update().environments.clone()
    }

    /// The pause between two tries; fails when it was tried for too long.
    async fn pause(&mut self) {
        self.pauses += 1;
        assert!(self.pauses < 12_000, "after two minutes: {:?}", self.shown());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    fn wish(&self, key: &str, want: Want) {
        self.told.send_replace(vec![Wish { key: key.to_owned(), want }]);
    }
}

#[tokio::test]
async fn test_what_is_wanted_is_done_once_nothing_is_in_the_way() {
    let mut rig = rig(|_| {});
    let lease = rig.build("a").await;
    let key = lease.key().to_owned();
    rig.keeper.show().await;
    let shown = rig.shown();
    assert_eq!((shown.len(), shown[0].key.as_str(), shown[0].uses, shown[0].pinned), (1, &*key, 1, false));

    rig.wish(&key, Want::Pin);
    rig.keeper.fulfil().await;
    rig.keeper.show().await;
    assert!(rig.shown()[0].pinned);

    rig.wish(&key, Want::Remove);
    rig.keeper.fulfil().await;
    rig.keeper.show().await;
    assert_eq!(rig.shown().len(), 1, "a lease is held");
    drop(lease);
    while !rig.shown().is_empty() {
        rig.pause().await; // what is forced to the disk is in use for a moment more
        rig.keeper.fulfil().await;
        rig.keeper.show().await;
    }
    rig.keeper.fulfil().await; // a removed environment can be wanted again
}

#[tokio::test]
async fn test_log_of_a_build_is_in_the_store() {
    let mut rig = rig(|_| {});
    rig.build("a").await;
    rig.keeper.show().await;
    let log = rig.shown()[0].log.unwrap();
    let text = rig.keeper.store.read_batch(vec![log]).await.remove(0).unwrap();
    assert!(String::from_utf8_lossy(&text).contains("the script ends"), "{text:?}");
}

#[tokio::test]
async fn test_least_recently_used_goes_when_there_is_too_much_and_a_pin_stays() {
    let mut rig = rig(|config| config.environments.age = Duration::ZERO);
    let pinned = rig.build("a").await.key().to_owned();
    let held = rig.build("b").await;
    rig.build("c").await;
    rig.keeper.environments.pin(&pinned, true).unwrap();
    let mut left = vec![pinned, held.key().to_owned()];
    left.sort();
    loop {
        rig.pause().await; // what is forced to the disk is in use for a moment more
        rig.unused.evict(0).await;
        rig.keeper.show().await;
        let mut keys: Vec<String> = rig.shown().into_iter().map(|shown| shown.key).collect();
        keys.sort();
        assert!(left.iter().all(|key| keys.contains(key)), "{keys:?}");
        if keys == left {
            break;
        }
    }
}

#[tokio::test]
async fn test_inventory_changes_with_what_matters_and_not_with_every_use() {
    let mut rig = rig(|_| {});
    drop(rig.build("a").await);
    rig.keeper.show().await;
    rig.shown();
    rig.keeper.show().await;
    assert!(!rig.inventory.has_changed().unwrap());
    let one = CachedEnvironment { used: Timestamp(100_000), ..CachedEnvironment::default() };
    let later = |ms: u64| [CachedEnvironment { used: Timestamp(100_000 + ms), ..one.clone() }];
    assert!(
        is_same(std::slice::from_ref(&one), &later(59_999))
            && !is_same(std::slice::from_ref(&one), &later(60_000))
    );
    assert!(!is_same(std::slice::from_ref(&one), &[CachedEnvironment { uses: 1, ..one.clone() }]));
    assert!(!is_same(&[one], &[]));
}

#[test]
fn test_settings_follow_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    let store = Store::Disk(Disk::open(&dir.path().join("cas")).unwrap());
    config.devices.docker_socket = "/elsewhere/docker.sock".into();
    let usual = settings(&config, 1 << 30, Path::new("shim"), false, store.clone(), watch::channel(None).1);
    assert_eq!(usual.docker.unwrap().socket(), Path::new("/elsewhere/docker.sock"));
    assert_eq!((usual.memory, usual.hard_links), (3 << 28, false));
    assert_eq!(usual.root, dir.path().join("envs"));
    assert_eq!(usual.packages, dir.path().join("packages"), "beside them, so that files can be shared");
    assert_eq!(usual.engine.unwrap().file_name().unwrap(), "agent-env");
    assert!(
        usual.curated_builtin.iter().any(|(name, text)| *name == "sklearn-1.5" && text.contains("conda"))
    );
    config.environments.builder_memory = 7;
    config.environments.offline = true;
    let told = settings(&config, 1 << 30, Path::new("shim"), false, store, watch::channel(Some(true)).1);
    assert!(told.memory == 7 && told.conda.offline);
}

#[tokio::test]
async fn test_build_contexts_are_laid_out_as_they_were() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for (name, mode) in [("run.sh", 0o755), ("plain", 0o644), (".gitignore", 0o644), ("ignored", 0o644)] {
        let path = source.join(name);
        std::fs::write(&path, "ignored\n").unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let store = Store::Disk(Disk::open(&dir.path().join("cas")).unwrap());
    let scanned = agent_cas::snapshot::scan_whole(&source).unwrap();
    agent_cas::snapshot::push(&scanned, &store, |_| {}).await.unwrap();
    let contexts =
        settings(&config(dir.path()), 1 << 30, Path::new("shim"), false, store, watch::channel(None).1)
            .contexts
            .unwrap();
    let to = dir.path().join("to");
    (contexts.0)(scanned.root, to.clone()).await.unwrap();
    let mode = |name: &str| to.join(name).metadata().unwrap().permissions().mode() & 0o111;
    assert!(mode("run.sh") != 0 && mode("plain") == 0 && to.join("ignored").exists());
    let absent = Digest { size: scanned.root.size + 1, ..scanned.root };
    assert!((contexts.0)(absent, dir.path().join("other")).await.is_err());
}
