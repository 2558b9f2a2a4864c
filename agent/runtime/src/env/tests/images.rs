//! Environments of images, with the real container engine and images made by the tests.
//!
//! Everything made here has a label, by which it is removed when a test ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use agent_model::Digest;
use bollard::query_parameters::{
    CreateImageOptionsBuilder, ListImagesOptionsBuilder, RemoveImageOptionsBuilder, TagImageOptionsBuilder,
};
use bytes::Bytes;

use super::super::config::Contexts;
use super::*;
use crate::docker::{Docker, DockerError};

mod builds;
mod conda;
mod pulls;
mod registry;

const SOCKET: &str = "/var/run/docker.sock";
/// The label of everything that a test makes; its value is unique to the test.
const LABEL: &str = "agentd.test";
const WITHIN: Duration = Duration::from_secs(120);

/// The engine, and the images of one test.
struct Engine {
    docker: Docker,
    /// Part of every name.
    own: String,
}

impl Engine {
    /// The engine of this machine; without one the test is skipped, silently only on a developer's machine.
    #[allow(clippy::disallowed_methods, reason = "a test of a pipeline may not be left out")]
    async fn find() -> Option<Engine> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let docker = Docker::at(SOCKET);
        let ping = docker.ask("answer", WITHIN, |client| async move { client.ping().await }).await;
        if let Err(error) = ping {
            assert!(std::env::var("CI").is_err(), "the container engine is needed: {error}");
            println!("left out, there is no container engine: {error}");
            return None;
        }
        let own = format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        Some(Engine { docker, own })
    }

    /// A name for an image of this test that no registry has.
    fn name(&self, tag: &str) -> String {
        format!("agentd-test/{}:{tag}", self.own)
    }

    fn label(&self) -> String {
        format!("LABEL {LABEL}={}", self.own)
    }

    /// Makes an image of files: path, mode and content.
    async fn import(&self, name: &str, files: &[(&str, u32, Vec<u8>)], changes: &[&str]) -> String {
        let body = Bytes::from(tarball(files));
        let (repo, tag) = name.rsplit_once(':').unwrap();
        let mut changes: Vec<String> = changes.iter().map(|change| (*change).to_owned()).collect();
        changes.push(self.label());
        let options =
            CreateImageOptionsBuilder::new().from_src("-").repo(repo).tag(tag).changes(changes).build();
        let import = |client: bollard::Docker| async move {
            use futures_util::TryStreamExt as _;
            let told = client.create_image(Some(options), Some(bollard::body_full(body)), None);
            told.try_collect::<Vec<_>>().await
        };
        self.docker.ask("import", WITHIN, import).await.unwrap();
        self.id(name).await.unwrap()
    }

    /// An image with a shell.
    async fn shell(&self, name: &str, more: &[(&str, u32, Vec<u8>)], changes: &[&str]) -> String {
        let mut files = shell_files();
        files.extend_from_slice(more);
        self.import(name, &files, changes).await
    }

    async fn id(&self, name: &str) -> Option<String> {
        let asked = name.to_owned();
        let look = |client: bollard::Docker| async move { client.inspect_image(&asked).await };
        match self.docker.ask("look", WITHIN, look).await {
            Ok(found) => found.id,
            Err(error) if error.is_missing() => None,
            Err(error) => panic!("{error}"),
        }
    }

    async fn remove(&self, name: &str) {
        let name = name.to_owned();
        let remove = |client: bollard::Docker| async move {
            let options = RemoveImageOptionsBuilder::new().force(true).build();
            client.remove_image(&name, Some(options), None).await
        };
        self.docker.ask("remove", WITHIN, remove).await.unwrap();
    }

    async fn tag(&self, from: &str, to: &str) {
        let (repo, tag) = to.rsplit_once(':').unwrap();
        let (from, options) = (from.to_owned(), TagImageOptionsBuilder::new().repo(repo).tag(tag).build());
        let tag = |client: bollard::Docker| async move { client.tag_image(&from, Some(options)).await };
        self.docker.ask("tag", WITHIN, tag).await.unwrap();
    }
}

impl Drop for Engine {
    /// Removes everything the test made, on a thread of its own: the test may have failed anywhere.
    fn drop(&mut self) {
        let (docker, label) = (Docker::at(self.docker.socket()), format!("{LABEL}={}", self.own));
        let clean = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let filter = HashMap::from([("label".to_owned(), vec![label])]);
                let options = ListImagesOptionsBuilder::new().all(true).filters(&filter).build();
                let remove = |client: bollard::Docker| async move {
                    // An image can be removed only after those built on it, so it takes some rounds.
                    for _ in 0..10 {
                        for image in client.list_images(Some(options.clone())).await? {
                            let options = RemoveImageOptionsBuilder::new().force(true).build();
                            let _ = client.remove_image(&image.id, Some(options), None).await;
                        }
                    }
                    Ok(())
                };
                let _ = docker.ask("clean up", WITHIN, remove).await;
            });
        };
        let _ = std::thread::spawn(clean).join();
    }
}

/// A tar of files; those with mode 0 are links to the path in their content.
fn tarball(files: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, mode, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(*mode);
        if *mode == 0 {
            header.set_mode(0o777);
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            tar.append_link(&mut header, path, std::str::from_utf8(content).unwrap()).unwrap();
        } else {
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, path, content.as_slice()).unwrap();
        }
    }
    tar.into_inner().unwrap()
}

fn shell_files() -> Vec<(&'static str, u32, Vec<u8>)> {
    let busybox = fs::read("/bin/busybox").expect("a static busybox is needed: install busybox-static");
    let link = |path: &'static str| (path, 0, b"busybox".to_vec());
    vec![("bin/busybox", 0o755, busybox), link("bin/sh"), link("bin/test"), link("bin/cat"), link("bin/echo")]
}

/// Removes an environment as soon as its files are forced to the disk; returns how many bytes that frees.
async fn removed(environments: &Environments, key: &str) -> u64 {
    let deadline = Instant::now() + WITHIN;
    loop {
        match environments.remove(key) {
            Err(RemoveError::InUse { uses: 0, .. }) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            freed => return freed.unwrap(),
        }
    }
}

fn image(name: &str) -> EnvSpec {
    EnvSpec::Image { image: name.to_owned(), conda: None }
}

/// A node with the engine.
struct Node {
    fixture: Fixture,
    config: EnvConfig,
}

impl Node {
    fn with(docker: &Docker) -> Node {
        let fixture = Fixture::new();
        let config = EnvConfig { docker: Some(docker.clone()), ..fixture.config() };
        Node { fixture, config }
    }

    fn open(&self) -> Environments {
        Environments::open(self.config.clone()).unwrap()
    }

    async fn acquire(&self, environments: &Environments, spec: &EnvSpec) -> Result<EnvLease, AcquireError> {
        environments.acquire(spec, &self.fixture.path("log"), &nobody()).await
    }

    fn log(&self) -> String {
        self.fixture.log("log")
    }
}

#[tokio::test]
async fn test_without_an_engine_images_wait_and_everything_else_works() {
    let node = Node::with(&Docker::at("/nowhere/docker.sock"));
    let environments = node.open();
    for spec in [image("a:1"), EnvSpec::Build { context: Digest::EMPTY, dockerfile: "Dockerfile".into() }] {
        let error = node.acquire(&environments, &spec).await.unwrap_err();
        assert!(error.is_waiting(), "{error}");
        assert!(matches!(&error, AcquireError::Engine(DockerError::Absent { .. })), "{error}");
        assert!(error.to_string().contains("/nowhere/docker.sock"), "{error}");
    }
    assert!(!node.fixture.path("log").exists(), "waiting floods no build log");
    environments.discard().await;
    node.acquire(&environments, &EnvSpec::host()).await.unwrap();
    let none = Node { config: EnvConfig { docker: None, ..node.config.clone() }, fixture: Fixture::new() };
    let error = none.acquire(&none.open(), &image("a:1")).await.unwrap_err();
    assert!(matches!(error, AcquireError::Unsupported { kind: "image" }), "{error}");
}

#[tokio::test]
async fn test_image_that_is_there_is_used_and_stays() {
    let Some(engine) = Engine::find().await else { return };
    let name = engine.name("there");
    let id = engine.import(&name, &[("hello", 0o644, b"1".to_vec())], &["ENV A=1 B=x=y"]).await;
    let node = Node::with(&engine.docker);
    let environments = node.open();
    let lease = node.acquire(&environments, &image(&name)).await.unwrap();
    let found = lease.image().unwrap().clone();
    assert_eq!((found.id.as_str(), found.reference.as_str(), found.gpu), (id.as_str(), name.as_str(), None));
    assert_eq!((found.env["A"].as_str(), found.env["B"].as_str()), ("1", "x=y"));
    assert!(!lease.reused() && lease.python_version().is_empty() && lease.path_entries().is_empty());
    assert!(node.acquire(&environments, &image(&name)).await.unwrap().reused());
    let kept = &environments.list()[0];
    assert!(kept.summary.starts_with(&name), "{kept:?}");
    let key = lease.key().to_owned();
    drop(lease);
    // A daemon finds it after a restart.
    let again = node.open();
    assert_eq!(again.hold(&key).unwrap().image().unwrap().id, id);
    let freed = removed(&again, &key).await;
    assert!(freed < 1 << 20, "{freed}: the image was there before");
    again.discard().await;
    assert_eq!(engine.id(&name).await.as_deref(), Some(id.as_str()), "it was there before");
}

#[tokio::test]
async fn test_name_of_another_image_is_noticed() {
    let Some(engine) = Engine::find().await else { return };
    let name = engine.name("moves");
    let first = engine.import(&name, &[("hello", 0o644, b"1".to_vec())], &[]).await;
    let node = Node::with(&engine.docker);
    let environments = node.open();
    let lease = node.acquire(&environments, &image(&name)).await.unwrap();
    assert_eq!(lease.image().unwrap().id, first);
    drop(lease);
    let second = engine.import(&name, &[("hello", 0o644, b"2".to_vec())], &[]).await;
    let lease = node.acquire(&environments, &image(&name)).await.unwrap();
    assert_eq!(lease.image().unwrap().id, second);
    assert!(node.log().contains("names another image now"), "{}", node.log());
    drop(lease);
    engine.remove(&name).await;
    let error = node.acquire(&environments, &image(&name)).await.unwrap_err();
    let gone = matches!(error, AcquireError::Registry { .. } | AcquireError::ImageMissing { .. });
    assert!(gone, "{error:?}");
    assert!(node.log().contains("has no "), "{}", node.log());
}

#[tokio::test]
async fn test_image_for_gpus_is_refused_before_anything_is_pulled() {
    let Some(engine) = Engine::find().await else { return };
    let mut node = Node::with(&engine.docker);
    node.config.gpus = watch::channel(Some(false)).1;
    let environments = node.open();
    // Nobody listens there, so a request to it would fail with another error.
    let error = node.acquire(&environments, &image("127.0.0.1:1/tool:1-cuda12")).await.unwrap_err();
    assert!(matches!(error, AcquireError::NeedsGpu { .. }), "{error:?}");
    let name = engine.name("labelled");
    engine.import(&name, &[("hello", 0o644, b"1".to_vec())], &["ENV NVIDIA_VISIBLE_DEVICES=all"]).await;
    let error = node.acquire(&environments, &image(&name)).await.unwrap_err();
    assert!(matches!(error, AcquireError::NeedsGpu { .. }), "{error:?}");
    assert!(engine.id(&name).await.is_some());
}
