//! Images that are fetched.

use super::registry::{Manner, Registry};
use super::*;

#[tokio::test]
async fn test_image_is_pulled_once_for_all_and_goes_with_its_environment() {
    let Some(engine) = Engine::find().await else { return };
    let registry = Registry::start(&engine.own, Manner::default());
    let node = Node::with(&engine.docker);
    let environments = node.open();
    let spec = image(&registry.image());
    let told = nobody();
    let mut hears = told.subscribe();
    let logs: Vec<PathBuf> = (0..4).map(|n| node.fixture.path(&format!("log{n}"))).collect();
    let all = logs.iter().map(|log| environments.acquire(&spec, log, &told));
    let all = async {
        let leases = futures_util::future::join_all(all).await;
        leases.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let pulled = hears.wait_for(|told| told.as_ref().is_some_and(|told| told.phase == Phase::Pull));
    let (leases, pulled) = tokio::join!(all, async move { pulled.await.is_ok() });
    assert!(pulled);
    assert_eq!(registry.asked("GET /v2/tool/blobs/"), 2, "the layer and the configuration, once each");
    let id = leases[0].image().unwrap().id.clone();
    assert_eq!(leases[0].image().unwrap().env["FROM_REGISTRY"], "1");
    for log in &logs {
        let text = fs::read_to_string(log).unwrap();
        assert!(text.contains("pulling ") && text.contains(": downloading"), "{text}");
        assert!(text.lines().count() < 30, "{text}");
    }
    let key = leases[0].key().to_owned();
    assert!(environments.remove(&key).is_err(), "it is used");
    drop(leases);
    environments.discard().await;
    assert!(engine.id(&id).await.is_some(), "it is needed");
    // Removed by hand: fetched again, and still ours.
    engine.remove(&registry.image()).await;
    let lease = node.acquire(&environments, &spec).await.unwrap();
    assert!(!lease.reused() && lease.image().unwrap().id == id);
    drop(lease);
    // With a second name, it is not ours to remove.
    let other = engine.name("other");
    engine.tag(&id, &other).await;
    assert!(removed(&environments, &key).await > 100_000);
    environments.discard().await;
    assert_eq!(engine.id(&registry.image()).await, None, "it was brought for the environment");
    assert_eq!(engine.id(&other).await, Some(id), "another wants it");
    assert!(!node.config.root.join(format!("{key}.image")).exists());
}

#[tokio::test]
async fn test_registry_that_stalls_is_given_up() {
    let Some(engine) = Engine::find().await else { return };
    let registry = Registry::start(&engine.own, Manner { stalls: true, ..Manner::default() });
    let mut node = Node::with(&engine.docker);
    node.config.stall = Duration::from_secs(4);
    let environments = node.open();
    let error = node.acquire(&environments, &image(&registry.image())).await.unwrap_err();
    let AcquireError::Registry { registry: host, detail } = &error else { panic!("{error:?}") };
    assert!(*host == registry.host && detail.contains("nothing arrived"), "{error}");
}

#[tokio::test]
async fn test_registry_that_wants_to_know_who_asks() {
    let Some(engine) = Engine::find().await else { return };
    let knows = Some("ada:s3cret".to_owned());
    let registry = Registry::start(&engine.own, Manner { knows, ..Manner::default() });
    let mut node = Node::with(&engine.docker);
    let file = node.fixture.path("config.json");
    node.config.registry_credentials = Some(file.clone());
    let entry = |word: &str| {
        use base64::Engine as _;
        let auth = base64::engine::general_purpose::STANDARD.encode(format!("ada:{word}"));
        format!(r#"{{"auths": {{"http://{}/v1/": {{"auth": "{auth}"}}}}}}"#, registry.host)
    };
    let environments = node.open();
    for text in ["{}".to_owned(), entry("wrong")] {
        fs::write(&file, text).unwrap();
        let error = node.acquire(&environments, &image(&registry.image())).await.unwrap_err();
        assert!(matches!(error, AcquireError::ImageMissing { denied: true, .. }), "{error:?}");
    }
    fs::write(&file, entry("s3cret")).unwrap();
    node.acquire(&environments, &image(&registry.image())).await.unwrap();
    let log = node.log();
    assert!(log.contains("with credentials") && !log.contains("s3cret"), "{log}");
}

#[tokio::test]
async fn test_what_is_not_there_or_for_other_machines() {
    let Some(engine) = Engine::find().await else { return };
    let other = if cfg!(target_arch = "aarch64") { "amd64" } else { "arm64" };
    let manner = Manner { architecture: Some(other), ..Manner::default() };
    let registry = Registry::start(&engine.own, manner);
    let node = Node::with(&engine.docker);
    let environments = node.open();
    let error = node.acquire(&environments, &image(&format!("{}/tool:2", registry.host))).await.unwrap_err();
    let AcquireError::ImageMissing { image: named, denied: false, .. } = &error else { panic!("{error:?}") };
    assert!(named.ends_with("tool:2"), "{error}");
    let error = node.acquire(&environments, &image(&registry.image())).await.unwrap_err();
    assert!(matches!(&error, AcquireError::WrongPlatform { has, .. } if has.contains(other)), "{error:?}");
    // The image, which was pulled but refused, is removed meanwhile.
    let deadline = Instant::now() + WITHIN;
    while engine.id(&registry.image()).await.is_some() {
        assert!(Instant::now() < deadline, "waited too long until an image goes that nobody has use for");
        environments.discard().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let error = node.acquire(&environments, &image("127.0.0.1:1/tool:1")).await.unwrap_err();
    assert!(matches!(error, AcquireError::Registry { .. }), "{error:?}");
}
