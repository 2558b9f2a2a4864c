//! Images that are built.

use super::*;

/// A node whose contexts are directories of the test.
struct Works {
    node: Node,
    spec: EnvSpec,
}

impl Works {
    fn new(engine: &Engine, files: &[(&str, &str)]) -> Works {
        let mut node = Node::with(&engine.docker);
        // A proxy on the loopback: then the engine needs no network of its own.
        node.config.vars.insert("http_proxy".to_owned(), "http://127.0.0.1:1".to_owned());
        let source = node.fixture.path("source");
        for (path, text) in files {
            let path = source.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let lay_out = move |_, to: PathBuf| -> BoxFuture<'static, Result<(), String>> {
            let copied = copy(&source, &to).map_err(|error| error.to_string());
            std::future::ready(copied).boxed()
        };
        node.config.contexts = Some(Contexts(Arc::new(lay_out)));
        let spec = EnvSpec::Build { context: Digest::EMPTY, dockerfile: "Dockerfile".to_owned() };
        Works { node, spec }
    }

    async fn acquire(&self, environments: &Environments) -> Result<EnvLease, AcquireError> {
        self.node.acquire(environments, &self.spec).await
    }
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name()))?,
            false => drop(fs::copy(entry.path(), to.join(entry.file_name()))?),
        }
    }
    Ok(())
}

#[tokio::test]
async fn test_image_is_built_once_and_goes_with_its_environment() {
    let Some(engine) = Engine::find().await else { return };
    let base = engine.name("base");
    engine.shell(&base, &[], &[]).await;
    let dockerfile = format!(
        "ARG BASE={base}\nFROM ${{BASE}}\nENV MADE=here\nCOPY . /made/\n\
         RUN test -e /made/wanted && test ! -e /made/secret && echo all is well\n"
    );
    let works = Works::new(
        &engine,
        &[("Dockerfile", &dockerfile), (".dockerignore", "secret\n"), ("wanted", "1"), ("secret", "2")],
    );
    let environments = works.node.open();
    let lease = works.acquire(&environments).await.unwrap();
    let made = lease.image().unwrap().clone();
    assert_eq!(made.env["MADE"], "here");
    let log = works.node.log();
    assert!(log.contains("Step 4/") && log.contains("all is well"), "{log}");
    assert!(!lease.prefix().join("context").exists());
    assert!(works.acquire(&environments).await.unwrap().reused());
    assert_eq!(works.node.log(), log, "the second time nothing is built");
    let (key, kept) = (lease.key().to_owned(), environments.list());
    assert!(kept[0].summary.contains(&base) && kept[0].bytes < 1 << 20, "{kept:?}: its base was there");
    drop(lease);

    // Its base is another image now.
    engine.shell(&base, &[("more", 0o644, b"1".to_vec())], &[]).await;
    let lease = works.acquire(&environments).await.unwrap();
    let again = lease.image().unwrap().id.clone();
    assert_ne!(again, made.id);
    assert!(works.node.log().contains("names another image now"), "{}", works.node.log());
    drop(lease);
    environments.discard().await;
    assert_eq!(engine.id(&made.id).await, None, "nobody needs the first one");
    assert!(engine.id(&again).await.is_some());
    removed(&environments, &key).await;
    environments.discard().await;
    assert_eq!(engine.id(&again).await, None);
    assert!(engine.id(&base).await.is_some(), "it was there before");
}

#[tokio::test]
async fn test_step_that_fails_is_named_with_its_last_words() {
    let Some(engine) = Engine::find().await else { return };
    let base = engine.name("base");
    engine.shell(&base, &[], &[]).await;
    let dockerfile = format!("FROM {base}\nRUN echo fine\nRUN echo a; echo it is broken >&2; exit 7\n");
    let works = Works::new(&engine, &[("Dockerfile", &dockerfile)]);
    let environments = works.node.open();
    let error = works.acquire(&environments).await.unwrap_err();
    let AcquireError::ImageBuild { step, detail, tail } = &error else { panic!("{error:?}") };
    assert!(step.starts_with("step 3 of 4, `RUN echo a;"), "{error}");
    assert!(detail.contains("non-zero code: 7") && tail.contains(&"it is broken".to_owned()), "{error}");
    assert!(works.node.log().contains("it is broken"));
}

#[tokio::test]
async fn test_base_and_dockerfile_that_are_not_there_are_named() {
    let Some(engine) = Engine::find().await else { return };
    let works = Works::new(&engine, &[("Dockerfile", "FROM 127.0.0.1:1/none:3\nRUN x\n")]);
    let environments = works.node.open();
    let error = works.acquire(&environments).await.unwrap_err();
    let AcquireError::Registry { registry, .. } = &error else { panic!("{error:?}") };
    assert_eq!(registry, "127.0.0.1:1");
    let spec = EnvSpec::Build { context: Digest::EMPTY, dockerfile: "docker/File".to_owned() };
    let error = works.node.acquire(&environments, &spec).await.unwrap_err();
    assert!(matches!(&error, AcquireError::Refused { at, .. } if at[0] == "docker/File"), "{error:?}");
}

#[tokio::test]
async fn test_more_certificates_are_in_the_context() {
    let Some(engine) = Engine::find().await else { return };
    let base = engine.name("base");
    engine.shell(&base, &[], &[]).await;
    let dockerfile = format!(
        "FROM {base}\nCOPY .agentd-ca.pem /ca\nARG PIP_CERT\nRUN echo \"$PIP_CERT has $(cat /ca)\"\n"
    );
    let files = [("Dockerfile", dockerfile.as_str()), (".dockerignore", "*\n")];
    let mut works = Works::new(&engine, &files);
    let ca = works.node.fixture.path("ca.pem");
    fs::write(&ca, "CERTIFICATES").unwrap();
    works.node.config.build_ca = Some(ca);
    works.acquire(&works.node.open()).await.unwrap();
    let log = works.node.log();
    assert!(log.contains("agentd-ca.pem has CERTIFICATES"), "{log}");
}
