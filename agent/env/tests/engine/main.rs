//! The engine as its callers see it: a process, a request, events; with packages of a few bytes.
#![cfg(feature = "engine")]
#![allow(clippy::disallowed_methods, reason = "these tests start the program they are about")]
#![allow(clippy::unwrap_used, reason = "what helps a test fails it")]

mod channel;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agent_env::{
    Build, Built, EngineEvent, EngineRequest, Failure, FailureKind, Phase, Platform, Priority, Spec, Sweep,
    Task, VERSION,
};
use channel::{Served, Site};

fn start(task: Task) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_agent-env"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let request = serde_json::to_vec(&EngineRequest { version: VERSION, task }).unwrap();
    child.stdin.take().unwrap().write_all(&request).unwrap();
    child
}

fn finish(child: Child) -> Vec<EngineEvent> {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let events: Vec<EngineEvent> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let failed = matches!(events.last(), Some(EngineEvent::Failed(_)));
    assert_eq!(output.status.success(), !failed, "the exit status repeats the outcome");
    events
}

fn run(build: &Build) -> Result<Built, Failure> {
    match finish(start(Task::Build(Box::new(build.clone())))).pop() {
        Some(EngineEvent::Built(built)) => Ok(built),
        Some(EngineEvent::Failed(failure)) => Err(failure),
        other => panic!("{other:?}"),
    }
}

fn sweep(cache: &Path, unused_for_s: u64) -> u64 {
    let task = Task::Sweep(Sweep { cache: cache.to_owned(), unused_for_s });
    match finish(start(task)).pop() {
        Some(EngineEvent::Swept { freed }) => freed,
        other => panic!("{other:?}"),
    }
}

/// A request for an environment below `home`.
fn request(site: &Site, home: &Path, name: &str, specs: &[&str]) -> Build {
    let prefix = home.join("envs").join(name);
    fs::create_dir_all(&prefix).unwrap();
    Build {
        prefix,
        cache: home.join("cache"),
        channels: vec![site.channel()],
        specs: specs.iter().enumerate().map(|(n, text)| Spec { text: (*text).into(), line: n + 3 }).collect(),
        lock: None,
        priority: Priority::Strict,
        offline: false,
        platform: Platform { subdir: "linux-64".into(), virtual_packages: vec!["__glibc=2.36=0".into()] },
        credentials: None,
        solve_within_s: 60,
        stall_s: 20,
        hard_links: true,
        for_everybody: false,
    }
}

/// Everything below a directory but the records, which say when and from where: path and content or target.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk(root: &Path, dir: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                walk(root, &path, found);
            } else {
                let content = if kind.is_symlink() {
                    fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
                } else {
                    fs::read(&path).unwrap()
                };
                found.insert(path.strip_prefix(root).unwrap().to_owned(), content);
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(dir, dir, &mut found);
    found.retain(|path, _| !path.starts_with("conda-meta"));
    found
}

#[test]
fn test_an_environment_is_built_and_its_lock_builds_it_again() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let build = request(&site, home.path(), "one", &["app", "active", "python=3.11"]);
    let built = run(&build).unwrap();
    assert_eq!((built.python_version.as_deref(), built.packages), (Some("3.11.4"), 4));
    assert_eq!(fs::read(build.prefix.join("share/app.txt")).unwrap(), b"app");
    let text = fs::read_to_string(build.prefix.join("bin/where")).unwrap();
    assert_eq!(text, format!("#!/bin/sh\necho {}\n", build.prefix.display()), "the prefix is written in");
    assert!(built.has_scripts && !built.activation.vars.contains_key("ACTIVE"), "a build runs no script");
    let activated = finish(start(Task::Activate { prefix: build.prefix.clone() }));
    let Some(EngineEvent::Activated(activation)) = activated.last() else { panic!("{activated:?}") };
    assert_eq!(activation.vars["ACTIVE"], build.prefix.join("x").display().to_string());
    assert_eq!(activation.path_entries, [build.prefix.join("bin")]);
    for record in fs::read_dir(build.prefix.join("conda-meta")).unwrap().map(Result::unwrap) {
        assert_eq!(record.metadata().unwrap().permissions().mode() & 0o777, 0o644, "{record:?}");
    }
    assert!(!build.prefix.join(".agent-env").exists());

    let other = tempfile::tempdir().unwrap();
    let mut locked = request(&site, other.path(), "one", &[]);
    locked.channels.clear();
    locked.lock = Some(built.lock.clone());
    let again = run(&locked).unwrap();
    assert_eq!(again.lock, built.lock);
    assert_eq!(
        (again.packages, again.files, again.python_version),
        (built.packages, built.files, built.python_version)
    );
    let (mut first, mut second) = (tree(&build.prefix), tree(&locked.prefix));
    first.remove(Path::new("bin/where"));
    second.remove(Path::new("bin/where"));
    assert_eq!(first, second);
}

#[test]
fn test_a_refusal_of_the_solver_names_lines() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let failure = run(&request(&site, home.path(), "a", &["active", "app", "old-lib"])).unwrap_err();
    assert_eq!((failure.kind, failure.lines), (FailureKind::Unsatisfiable, vec![4, 5]));
    let failure = run(&request(&site, home.path(), "b", &["python==3.11"])).unwrap_err();
    assert_eq!((failure.kind, failure.lines), (FailureKind::Unsatisfiable, vec![3]));
    assert!(failure.hint.unwrap().contains("`python=3.11`"));
    let failure = run(&request(&site, home.path(), "c", &["app >>1"])).unwrap_err();
    assert_eq!((failure.kind, failure.lines), (FailureKind::Spec, vec![3]));
}

#[test]
fn test_packages_that_lead_out_are_refused() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    for package in ["evil-link", "evil-path"] {
        let build = request(&site, home.path(), package, &[package]);
        let failure = run(&build).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Refused, "{failure:?}");
        assert!(failure.message.contains(package) && failure.message.contains("outside"), "{failure:?}");
        assert!(!build.cache.join(format!("pkgs/{package}-1-0")).exists());
        assert!(tree(&build.prefix).is_empty());
    }
}

#[test]
fn test_a_damaged_package_is_refused_and_a_missing_one_named() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let archive = site.archive("app-1.0-0");
    let mut bytes = fs::read(&archive).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&archive, bytes).unwrap();
    let failure = run(&request(&site, home.path(), "a", &["app"])).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Damaged, "{failure:?}");
    assert!(failure.message.contains("app-1.0-0"));
    fs::remove_file(&archive).unwrap();
    let failure = run(&request(&site, home.path(), "a", &["app"])).unwrap_err();
    assert_eq!(failure.kind, FailureKind::NotFound, "{failure:?}");
}

#[test]
fn test_what_is_missing_or_empty_in_the_cache_is_fetched_again() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let whole = request(&site, home.path(), "whole", &["app"]);
    run(&whole).unwrap();
    let file = whole.cache.join("pkgs/app-1.0-0/share/app.txt");
    fs::remove_file(&file).unwrap();
    let missing = request(&site, home.path(), "missing", &["app"]);
    run(&missing).unwrap();
    fs::remove_file(&file).unwrap();
    fs::write(&file, b"").unwrap();
    let empty = request(&site, home.path(), "empty", &["app"]);
    run(&empty).unwrap();
    fs::remove_file(whole.cache.join("pkgs/app-1.0-0/info/paths.json")).unwrap();
    let unlisted = request(&site, home.path(), "unlisted", &["app"]);
    run(&unlisted).unwrap();
    for build in [&missing, &empty, &unlisted] {
        assert_eq!(fs::read(build.prefix.join("share/app.txt")).unwrap(), b"app", "{:?}", build.prefix);
    }
}

#[test]
fn test_killed_at_any_moment_the_same_request_succeeds() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let expected = request(&site, home.path(), "expected", &["many", "app"]);
    let begun = Instant::now();
    run(&expected).unwrap();
    let whole = begun.elapsed();
    let expected = tree(&expected.prefix);
    for n in 0..6u32 {
        let other = tempfile::tempdir().unwrap();
        let build = request(&site, other.path(), "e", &["many", "app"]);
        // Once with an empty cache and once with what the killed one left.
        for _ in 0..2 {
            let mut child = start(Task::Build(Box::new(build.clone())));
            std::thread::sleep(whole * n / 6);
            child.kill().unwrap();
            child.wait().unwrap();
        }
        run(&build).unwrap();
        let mut made = tree(&build.prefix);
        let mut wanted = expected.clone();
        made.remove(Path::new("bin/where"));
        wanted.remove(Path::new("bin/where"));
        assert_eq!(made, wanted, "killed after {n} sixths");
        sweep(&build.cache, 3600);
        let orphans: Vec<_> = fs::read_dir(build.cache.join("pkgs"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with('.'))
            .collect();
        assert_eq!(orphans, Vec::<String>::new());
    }
}

#[test]
fn test_builds_share_a_cache() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let builds: Vec<_> =
        (0..4).map(|n| request(&site, home.path(), &format!("e{n}"), &["many", "app", "active"])).collect();
    let children: Vec<_> = builds.iter().map(|build| start(Task::Build(Box::new(build.clone())))).collect();
    for child in children {
        assert!(matches!(finish(child).pop(), Some(EngineEvent::Built(_))));
    }
    for build in &builds {
        assert_eq!(fs::read(build.prefix.join("share/app.txt")).unwrap(), b"app");
        assert_eq!(fs::read_dir(build.prefix.join("share/many")).unwrap().count(), 300);
    }
}

#[test]
fn test_a_package_that_somebody_fetches_delays_only_who_needs_it() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let cache = home.path().join("cache");
    fs::create_dir_all(cache.join("locks")).unwrap();
    let held = fs::File::create(cache.join("locks/app-1.0-0")).unwrap();
    held.lock().unwrap();
    run(&request(&site, home.path(), "other", &["active"])).unwrap();

    let child = start(Task::Build(Box::new(request(&site, home.path(), "same", &["app"]))));
    let waits = std::thread::spawn(move || finish(child));
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!waits.is_finished());
    drop(held);
    let events = waits.join().unwrap();
    let told = |event: &EngineEvent| matches!(event, EngineEvent::Progress(p) if p.phase == Phase::Waiting && p.what.contains("app-1.0-0"));
    assert!(events.iter().any(told), "{events:?}");
    assert!(matches!(events.last(), Some(EngineEvent::Built(_))));
}

#[test]
fn test_a_job_that_may_write_does_not_share_files_with_the_cache() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let mut build = request(&site, home.path(), "own", &["app"]);
    build.hard_links = false;
    run(&build).unwrap();
    let cached = build.cache.join("pkgs/app-1.0-0/share/app.txt");
    let mut file = fs::File::options().append(true).open(build.prefix.join("share/app.txt")).unwrap();
    file.write_all(b"changed").unwrap();
    assert_eq!(fs::read(&cached).unwrap(), b"app");
    assert_eq!(cached.metadata().unwrap().nlink(), 1);
}

#[test]
fn test_a_sweep_leaves_what_is_used() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let build = request(&site, home.path(), "e", &["app", "active"]);
    run(&build).unwrap();
    let pkgs = build.cache.join("pkgs");
    // Half made, as a killed process leaves it; and one that somebody is making just now.
    for half in [".app-1.0-0aB3dEf", ".busy-1-0Qq9xYz"] {
        fs::create_dir(pkgs.join(half)).unwrap();
        fs::write(pkgs.join(half).join("part"), [1; 10_000]).unwrap();
    }
    let busy = fs::File::create(build.cache.join("locks/busy-1-0")).unwrap();
    busy.lock().unwrap();
    assert!(sweep(&build.cache, 0) >= 10_000);
    assert!(!pkgs.join(".app-1.0-0aB3dEf").exists() && pkgs.join(".busy-1-0Qq9xYz").exists());
    assert!(pkgs.join("app-1.0-0/share/app.txt").exists(), "an environment shares it");

    fs::remove_dir_all(&build.prefix).unwrap();
    assert_eq!(sweep(&build.cache, 3600), 0, "not unused for long enough");
    assert!(pkgs.join("app-1.0-0").exists());
    assert!(sweep(&build.cache, 0) > 0);
    assert!(!pkgs.join("app-1.0-0").exists());
    assert_eq!(sweep(&home.path().join("nothing"), 0), 0);
}

#[test]
fn test_a_directory_of_somebody_else_is_not_emptied() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let build = request(&site, home.path(), "e", &["app"]);
    fs::write(build.prefix.join("thesis.txt"), b"mine").unwrap();
    let failure = run(&build).unwrap_err();
    assert!(failure.message.contains("is not empty"), "{failure:?}");
    assert_eq!(fs::read(build.prefix.join("thesis.txt")).unwrap(), b"mine");
}

#[test]
fn test_a_request_of_another_version_is_not_guessed_at() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_agent-env"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(br#"{"version": 99, "task": {"kind": "dance"}}"#).unwrap();
    let Some(EngineEvent::Failed(failure)) = finish(child).pop() else { panic!("it was done") };
    assert!(failure.message.contains("version 2, not 99"), "{failure:?}");
}

#[test]
fn test_the_engine_ends_when_nobody_listens() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let build = request(&site, home.path(), "e", &["app"]);
    fs::create_dir_all(build.cache.join("locks")).unwrap();
    let held = fs::File::create(build.cache.join("locks/app-1.0-0")).unwrap();
    held.lock().unwrap();
    let mut child = start(Task::Build(Box::new(build)));
    drop(child.stdout.take());
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn test_mirrors_and_credentials_leave_no_trace() {
    let (site, home) = (Site::new(), tempfile::tempdir().unwrap());
    let served = Served::start(site.root(), "Bearer very-hidden");
    let mut build = request(&site, home.path(), "e", &["app"]);
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    build.channels[0].url = "https://channel.example/main".into();
    build.channels[0].mirrors = vec![format!("http://{dead}/gone"), served.url()];
    let failure = run(&build).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Denied, "{failure:?}");
    assert!(failure.hint.unwrap().contains("conda_credentials"));

    let credentials = home.path().join("credentials.json");
    fs::write(&credentials, r#"{"127.0.0.1": {"BearerToken": "very-hidden"}}"#).unwrap();
    build.credentials = Some(credentials);
    let events = finish(start(Task::Build(Box::new(build.clone()))));
    let Some(EngineEvent::Built(built)) = events.last() else { panic!("{events:?}") };
    assert!(
        built.lock.contains("https://channel.example/main/noarch/app-1.0-0.tar.bz2#sha256:"),
        "{}",
        built.lock
    );
    assert!(!format!("{events:?}").contains("very-hidden"));
    fn none(dir: &Path) {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                none(&entry.path());
            } else if entry.file_type().unwrap().is_file() {
                let text = String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned();
                assert!(!text.contains("very-hidden"), "{:?}", entry.path());
            }
        }
    }
    none(&build.prefix);
    none(&build.cache);

    // Nobody is there any more; what was fetched is.
    drop(served);
    let mut offline = request(&site, home.path(), "offline", &["app"]);
    offline.channels = build.channels.clone();
    offline.offline = true;
    assert_eq!(run(&offline).unwrap().lock, built.lock);
    let empty = tempfile::tempdir().unwrap();
    let mut nothing = request(&site, empty.path(), "nothing", &[]);
    nothing.offline = true;
    nothing.lock = Some(built.lock.clone());
    let failure = run(&nothing).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Network);
    assert!(failure.message.contains("offline") && failure.message.contains("app"), "{failure:?}");
}
