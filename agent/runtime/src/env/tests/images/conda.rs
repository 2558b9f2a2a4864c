//! Images with a conda environment beside them, which is built by an engine that follows a script.

use super::*;

const ENGINE: &str = r##"#!/bin/sh
here=$(dirname "$0")
request=$(cat)
printf '%s\n' "$request" >> "$here/requests"
case "$request" in
*'"kind":"probe"'*)
    echo '{"event":"probed","subdir":"linux-64","virtual_packages":["__glibc=2.36=0","__linux=6.1.0=0"]}'
    exit 0;;
esac
prefix=$(printf '%s' "$request" | sed 's/.*"prefix":"\([^"]*\)".*/\1/')
mkdir -p "$prefix/bin"
cp "$here/python" "$prefix/bin/python"
printf '%s\n' '{"event":"built","python_version":"3.11.9","vars":{"CONDA_PREFIX":"'$prefix'"},"path_entries":["'$prefix'/bin"],"lock":"@EXPLICIT\nfile:///c/noarch/a-1-0.conda\n","packages":1,"files":1}'
"##;

const FILE: &str = "dependencies:\n- python=3.11\nvariables:\n  MINE: '1'\n";

struct Carried {
    node: Node,
}

impl Carried {
    fn new(engine: &Engine) -> Carried {
        let mut node = Node::with(&engine.docker);
        let program = node.fixture.path("agent-env");
        executable(&program, ENGINE);
        node.config.engine = Some(program);
        let carried = Carried { node };
        carried.python("#!/bin/sh\nexit 0\n");
        carried
    }

    fn python(&self, script: &str) {
        executable(&self.node.fixture.path("python"), script);
    }

    fn requests(&self, part: &str) -> usize {
        count(&self.node.fixture.log("requests"), part)
    }
}

fn executable(path: &Path, script: &str) {
    fs::write(path, script).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn both(name: &str) -> EnvSpec {
    EnvSpec::Image { image: name.to_owned(), conda: Some(FILE.to_owned()) }
}

/// The text in which the C library contains its version.
fn libc(version: &str) -> Vec<(&'static str, u32, Vec<u8>)> {
    let text = format!("\x7fELF\0GNU C Library (Some) stable release version {version}.\n");
    vec![
        ("lib/x86_64-linux-gnu/libc-2.so", 0o755, text.into_bytes()),
        ("lib/x86_64-linux-gnu/libc.so.6", 0, b"libc-2.so".to_vec()),
    ]
}

#[tokio::test]
async fn test_conda_environment_is_made_for_the_image_and_mounted() {
    let Some(engine) = Engine::find().await else { return };
    let name = engine.name("older");
    engine.shell(&name, &libc("2.31"), &["ENV PYTHONPATH=/wrong OTHER=1"]).await;
    let carried = Carried::new(&engine);
    let environments = carried.node.open();
    let lease = carried.node.acquire(&environments, &both(&name)).await.unwrap();
    let found = lease.image().unwrap();
    assert!(!found.env.contains_key("PYTHONPATH") && found.env["OTHER"] == "1", "{found:?}");
    let prefix = &found.mounts[0];
    assert!(prefix.join("bin/python").exists() && lease.path_entries() == [prefix.join("bin")]);
    assert_eq!(lease.vars()["MINE"], "1");
    assert_eq!(lease.vars()["CONDA_PREFIX"], prefix.display().to_string());
    assert_eq!(lease.python_version(), "3.11.9");
    assert_eq!(carried.requests("__glibc=2.31=0"), 1);
    assert!(carried.node.acquire(&environments, &both(&name)).await.unwrap().reused());
    // The environments that it consists of are kept while it is used, also by a command from before a restart.
    let keys: Vec<String> = environments.list().into_iter().map(|kept| kept.key).collect();
    assert_eq!(keys.len(), 3, "{keys:?}");
    let key = lease.key().to_owned();
    drop(lease);
    let again = carried.node.open();
    let held = again.hold(&key).unwrap();
    for key in &keys {
        assert!(matches!(again.remove(key), Err(RemoveError::InUse { .. })), "{key}");
    }
    drop(held);
    // The packages are gone, so it is built again.
    let packages = keys.iter().find(|key| key.starts_with("conda-")).unwrap();
    removed(&again, packages).await;
    let lease = carried.node.acquire(&again, &both(&name)).await.unwrap();
    assert!(!lease.reused() && lease.path_entries()[0].join("python").exists());
}

#[tokio::test]
async fn test_packages_are_shared_with_jobs_without_an_image() {
    let Some(engine) = Engine::find().await else { return };
    let name = engine.name("newer");
    engine.shell(&name, &libc("2.39"), &[]).await;
    let carried = Carried::new(&engine);
    let environments = carried.node.open();
    let plain = EnvSpec::Conda { file: "c.yml".into(), document: FILE.into(), lock: None };
    let plain = carried.node.acquire(&environments, &plain).await.unwrap();
    let lease = carried.node.acquire(&environments, &both(&name)).await.unwrap();
    assert_eq!(lease.image().unwrap().mounts, [plain.prefix()]);
    assert_eq!(carried.requests("\"kind\":\"build\""), 1);
}

#[tokio::test]
async fn test_images_that_cannot_carry_it_are_refused_with_the_reason() {
    let Some(engine) = Engine::find().await else { return };
    let [empty, musl, broken] = ["empty", "musl", "broken"].map(|tag| engine.name(tag));
    engine.shell(&empty, &[], &[]).await;
    engine.shell(&musl, &[("lib/ld-musl-x86_64.so.1", 0o755, b"x".to_vec())], &[]).await;
    engine.shell(&broken, &libc("2.31"), &[]).await;
    let carried = Carried::new(&engine);
    carried.python("#!/bin/sh\necho it needs a library >&2\nexit 127\n");
    let environments = carried.node.open();
    for (name, words) in
        [(&empty, "no C library"), (&musl, "musl"), (&broken, "returned 127 in it: it needs a library")]
    {
        let error = carried.node.acquire(&environments, &both(name)).await.unwrap_err();
        assert!(matches!(&error, AcquireError::CannotCarry { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
        let built = carried.requests("\"kind\":\"build\"");
        assert_eq!(built, usize::from(name == &broken), "refused before packages are fetched");
    }
    let wrong = EnvSpec::Image { image: empty.clone(), conda: Some("dependencies: 3".into()) };
    let error = carried.node.acquire(&environments, &wrong).await.unwrap_err();
    assert!(matches!(&error, AcquireError::Refused { .. }), "{error:?}");
}
