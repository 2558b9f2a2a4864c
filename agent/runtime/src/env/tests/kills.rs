//! Daemons and builders that are killed: no half-built environment is ever used, and one key is built once.
//!
//! The daemon that is killed is this test program, started again for [`test_life_that_others_kill`] alone.

use std::process::{Child, Stdio};

use super::*;

/// The arguments of a started daemon: its directory, its python, and how many jobs want the environment.
const LIFE: &str = "AGENTD_TEST_LIFE";

/// Makes twenty files, slowly; the last ones after the interpreter is there. To kill it is to end it half-way.
const STEPS: &str = r#"for n in 1 2 3 4 5 6 7 8 9 10; do echo part > "$P/a$n"; sleep 0.01; done; mkdir "$P/bin"; ln -s /bin/sh "$P/bin/python"; for n in 1 2 3 4 5 6 7 8 9 10; do echo part > "$P/b$n"; sleep 0.01; done"#;

fn is_whole(lease: &EnvLease) -> bool {
    let part =
        |name: String| fs::read_to_string(lease.prefix().join(name)).is_ok_and(|text| text == "part\n");
    (1..=10).all(|n| part(format!("a{n}")) && part(format!("b{n}"))) && !lease.prefix().join("junk").exists()
}

impl Fixture {
    /// A python whose virtual environments are made by [`STEPS`], with a line in a file for each start and end.
    async fn slow_python(&self, first: &str) -> String {
        let note = self.path("builds").display().to_string();
        let on_venv = format!(
            "for P; do :; done; echo begun $PPID >> {note}; touch \"$P/junk\"; {first}; {STEPS}; rm \"$P/junk\"; echo ended >> {note}"
        );
        self.python("slow", &on_venv).await
    }

    /// Starts a daemon in which `jobs` want the environment.
    #[allow(clippy::disallowed_methods, reason = "the process under test is this one")]
    fn life(&self, python: &str, jobs: usize, failpoints: &str) -> Child {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--ignored", "env::tests::kills::test_life_that_others_kill"]);
        command.env(LIFE, format!("{}|{python}|{jobs}", self.dir.path().display()));
        command.env(agent_model::failpoint::VARIABLE, failpoints);
        let said = fs::File::create(self.path("life")).unwrap();
        command.stdin(Stdio::null()).stdout(said).stderr(Stdio::null()).spawn().unwrap()
    }

    fn builds(&self, what: &str) -> usize {
        count(&fs::read_to_string(self.path("builds")).unwrap_or_default(), what)
    }
}

#[tokio::test]
#[ignore = "started by the tests below, which kill it"]
#[allow(clippy::disallowed_methods, reason = "the other half of a test")]
async fn test_life_that_others_kill() {
    let Ok(told) = std::env::var(LIFE) else { return };
    let mut told = told.split('|');
    let mut next = || told.next().unwrap().to_owned();
    let (dir, python, jobs) = (PathBuf::from(next()), next(), next().parse::<usize>().unwrap());
    let config = EnvConfig::plain(dir.join("envs"), std::env::var("PATH").unwrap());
    let environments = Environments::open(config).unwrap();
    let mut waiters = tokio::task::JoinSet::new();
    for number in 0..jobs {
        let (environments, spec) = (environments.clone(), pip(&python, &[]));
        let log = dir.join(format!("log-{}-{number}", std::process::id()));
        waiters.spawn(async move { environments.acquire(&spec, &log, &nobody()).await.unwrap() });
    }
    assert!(waiters.join_all().await.iter().all(is_whole), "somebody got half an environment");
    if std::env::var(agent_model::failpoint::VARIABLE).is_ok_and(|points| !points.is_empty()) {
        tokio::time::sleep(Duration::from_secs(60)).await; // some of it is done when everybody has it
    }
}

/// After a kill: the remains are no environment, or a whole one; and the next daemon gets one.
async fn assert_recovers(fixture: &Fixture, python: &str, when: &str) {
    let spec = pip(python, &[]);
    let deadline = Instant::now() + Duration::from_secs(20);
    let environments = loop {
        let config = fixture.config();
        let opened = tokio::task::spawn_blocking(move || Environments::open(config).unwrap()).await.unwrap();
        let half = fixture.path("envs").read_dir().unwrap().map(|entry| entry.unwrap().path()).find(|path| {
            let gone = path.file_name().unwrap().to_string_lossy().starts_with(".trash-");
            !gone && path.is_dir() && !path.join("ready.json").exists()
        });
        let Some(half) = half else { break opened };
        // A child that had not yet called `exec` still has its parent's descriptors, with the lock.
        assert!(Instant::now() < deadline, "{when}: {} is left", half.display());
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let lease = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
    assert!(is_whole(&lease), "{when}: half an environment is used");
    let prefix = lease.prefix().to_owned();
    drop(lease);
    fs::remove_dir_all(prefix).unwrap();
}

#[tokio::test]
async fn test_killed_daemon_leaves_no_half_environment_that_is_used() {
    let fixture = Fixture::new();
    let python = fixture.slow_python(":").await;
    for at in 0..24_u32 {
        let begun = fixture.builds("begun");
        let mut life = fixture.life(&python, 1, "");
        if at >= 4 {
            until("the build begins", || {
                let ended = life.try_wait().unwrap();
                assert!(ended.is_none(), "kill {at}: it ended itself: {ended:?}: {}", fixture.log("life"));
                fixture.builds("begun") > begun
            })
            .await;
            tokio::time::sleep(Duration::from_millis(15) * (at - 4)).await;
        } else {
            tokio::time::sleep(Duration::from_millis(40) * at).await;
        }
        life.kill().unwrap();
        life.wait().unwrap();
        assert_recovers(&fixture, &python, &format!("kill {at}")).await;
    }
}

#[tokio::test]
async fn test_daemon_that_dies_at_any_write_leaves_no_half_environment() {
    let fixture = Fixture::new();
    let python = fixture.slow_python(":").await;
    for point in [
        "env.place.make",
        "env.build.spawn",
        "env.ready.sync",
        "env.ready.write",
        "env.ready.rename",
        "env.ready.done",
    ] {
        assert!(agent_model::failpoint::NAMES.contains(&point), "{point}");
        let mut life = fixture.life(&python, 1, &format!("{point}=kill"));
        let status = life.wait().unwrap();
        assert!(status.code().is_none(), "{point} was not met: {}", fixture.log("life"));
        assert_recovers(&fixture, &python, point).await;
    }
}

#[tokio::test]
async fn test_killed_builder_is_started_anew_for_all_who_wait() {
    let fixture = Fixture::new();
    let killed = fixture.path("killed").display().to_string();
    let first = format!("echo x >> {killed}; [ $(wc -l < {killed}) -gt 3 ] || kill -9 $$");
    let python = fixture.slow_python(&first).await;
    let (environments, spec) = (fixture.open(), pip(&python, &[]));
    let mut waiters = tokio::task::JoinSet::new();
    for number in 0..20 {
        let (environments, spec) = (environments.clone(), spec.clone());
        let log = fixture.path(&format!("log-{number}"));
        waiters.spawn(async move { environments.acquire(&spec, &log, &nobody()).await.unwrap() });
    }
    let leases = waiters.join_all().await;
    assert!(leases.iter().all(|lease| is_whole(lease) && lease.key() == leases[0].key()));
    assert_eq!((fixture.builds("begun"), fixture.builds("ended")), (4, 1));
    assert_eq!(count(&fixture.log("log-7"), "was killed by signal 9 (KILL); the build begins anew"), 3);
}

#[tokio::test]
async fn test_builder_that_is_always_killed_is_told() {
    let fixture = Fixture::new();
    let python = fixture.slow_python("kill -9 $$").await;
    let error =
        fixture.open().acquire(&pip(&python, &[]), &fixture.path("log"), &nobody()).await.unwrap_err();
    assert!(matches!(error, AcquireError::Killed { signal: 9, .. }), "{error:?}");
}

#[tokio::test]
async fn test_daemons_that_share_a_directory_build_once_though_three_of_them_die() {
    let fixture = Fixture::new();
    // The first three builds last until they are killed.
    let note = fixture.path("builds").display().to_string();
    let python = fixture.slow_python(&format!("[ $(wc -l < {note}) -gt 3 ] || sleep 60")).await;
    let mut lives: Vec<Child> = (0..4).map(|_| fixture.life(&python, 5, "")).collect();
    for killed in 0..3 {
        until("somebody builds", || fixture.builds("begun") > killed).await;
        let notes = fs::read_to_string(&note).unwrap();
        let builder = notes.lines().last().unwrap().strip_prefix("begun ").unwrap().to_owned();
        let who = lives.iter().position(|life| life.id().to_string() == builder);
        let mut life = lives.remove(who.expect("one of them builds"));
        life.kill().unwrap();
        life.wait().unwrap();
    }
    assert!(lives.remove(0).wait().unwrap().success(), "who is left has a whole environment, five times");
    assert_eq!(fixture.builds("ended"), 1);
}

#[tokio::test]
async fn test_environment_of_a_running_job_is_held_after_a_restart() {
    let fixture = Fixture::new();
    let spec = EnvSpec::host();
    let key = {
        let environments = fixture.scripted([]);
        environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap().key().to_owned()
    };
    let next_life = fixture.scripted([]);
    let held = next_life.hold(&key).unwrap();
    assert_eq!(held.key(), key);
    let place = next_life.cache.found(&key).unwrap();
    let waits = place.exclusive(|| {});
    assert!(
        tokio::time::timeout(Duration::from_millis(1), waits).await.is_ok(),
        "it is ready, nobody builds"
    );
    assert!(place.try_exclusive().unwrap().is_none(), "nobody else has the right to remove it");
    drop(held);
    assert!(place.try_exclusive().unwrap().is_some());
    assert!(next_life.hold("host-000000000000").is_none() && next_life.hold("../journal.db").is_none());
}
