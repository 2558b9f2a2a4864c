//! Conda environments with an engine that follows a script: the requests to it, what its answers become, and that
//! none of its processes is left when nobody waits.

use super::*;

/// Speaks the protocol: records the request, and follows the files beside it.
const ENGINE: &str = r##"#!/bin/sh
here=$(dirname "$0")
request=$(cat)
printf '%s\n' "$request" >> "$here/requests"
case "$request" in
*'"kind":"probe"'*)
    if [ -f "$here/on_probe" ]; then . "$here/on_probe"; fi
    echo '{"event":"probed","subdir":"linux-64","virtual_packages":["__glibc=2.36=0","__linux=6.1.0=0"]}'
    exit 0;;
*'"kind":"sweep"'*)
    echo '{"event":"swept","freed":42}'
    exit 0;;
esac
prefix=$(printf '%s' "$request" | sed 's/.*"prefix":"\([^"]*\)".*/\1/')
case "$request" in
*'"kind":"activate"'*)
    env > "$here/activated_with"
    if [ -f "$here/on_activate" ]; then . "$here/on_activate"; fi
    printf '%s\n' '{"event":"activated","vars":{"SET":"yes","NO=NAME":"x","LONG":"a\u0000b"},"path_entries":["'$prefix'/bin","relative","/a:/b"]}'
    exit 0;;
esac
echo 'a library complains' >&2
echo '{"event":"say","line":"asked two channels"}'
echo '{"event":"progress","phase":"download","done":1,"total":4,"bytes":1000000,"bytes_total":9000000,"what":"numpy"}'
if [ -f "$here/on_build" ]; then . "$here/on_build"; fi
mkdir -p "$prefix/bin" "$prefix/lib/python3.11/site-packages" "$prefix/conda-meta"
ln -s REAL "$prefix/bin/python"
echo 'x = 1' > "$prefix/lib/python3.11/site-packages/module.py"
printf '%s\n' '{"event":"built","python_version":"3.11.9","vars":{"CONDA_PREFIX":"'$prefix'"},"path_entries":["'$prefix'/bin"],"has_scripts":'${scripts:-false}',"lock":"# platform: linux-64\n@EXPLICIT\nfile:///c/noarch/a-1-0.conda\n","packages":1,"files":2}'
"##;

/// An environments directory whose engine is a script.
struct Conda {
    fixture: Fixture,
    config: EnvConfig,
    /// Its text.
    engine: String,
}

impl Conda {
    async fn new() -> Conda {
        let fixture = Fixture::new();
        let real = fixture.real_python().await;
        let engine = fixture.path("agent-env");
        let script = ENGINE.replace("REAL", &real);
        executable(&engine, &script);
        let config = EnvConfig { engine: Some(engine), ..fixture.config() };
        Conda { fixture, config, engine: script }
    }

    fn open(&self) -> Environments {
        Environments::open(self.config.clone()).unwrap()
    }

    fn on_build(&self, script: &str) {
        fs::write(self.fixture.path("on_build"), script).unwrap();
    }

    fn requests(&self) -> String {
        fs::read_to_string(self.fixture.path("requests")).unwrap_or_default()
    }

    async fn acquire(&self, environments: &Environments, spec: &EnvSpec) -> Result<EnvLease, AcquireError> {
        environments.acquire(spec, &self.fixture.path("log"), &nobody()).await
    }
}

fn executable(path: &Path, script: &str) {
    fs::write(path, script).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn conda(document: &str) -> EnvSpec {
    EnvSpec::Conda { file: "conda.yml".to_owned(), document: document.to_owned(), lock: None }
}

const FILE: &str = "channels: [defaults, https://h/c/mine]\ndependencies:\n- python=3.11\n- numpy=99\n";

#[tokio::test]
async fn test_conda_environment_is_asked_for_once_and_described() {
    let conda_node = Conda::new().await;
    let environments = conda_node.open();
    let told = nobody();
    let mut hears = told.subscribe();
    let log = conda_node.fixture.path("log");
    let spec = conda(FILE);
    conda_node.on_build("sleep 0.2");
    let (lease, heard) = tokio::join!(environments.acquire(&spec, &log, &told), async {
        let heard = hears.wait_for(|progress| progress.as_ref().is_some_and(|now| now.done == 1)).await;
        describe(heard.unwrap().as_ref().unwrap())
    });
    let lease = lease.unwrap();
    assert_eq!(heard, "downloading packages, 1 of 4, 1 of 8.6 MiB: numpy");
    assert!(told.borrow().is_none(), "nothing is being built any more");
    assert_eq!(lease.python_version(), "3.11.9");
    assert_eq!(lease.vars()["CONDA_PREFIX"], lease.prefix().display().to_string());
    let locked = fs::read_to_string(lease.lock_file().unwrap()).unwrap();
    assert!(locked.contains("@EXPLICIT\nfile:///c/noarch/a-1-0.conda"), "{locked}");
    let log = fs::read_to_string(lease.log_file()).unwrap();
    for line in
        ["asked two channels", "a library complains", "downloading packages, 1 of 4, 1 of 8.6 MiB: numpy"]
    {
        assert!(log.contains(line), "{line}: {log}");
    }

    let requests = conda_node.requests();
    assert_eq!((count(&requests, "probe"), count(&requests, "\"kind\":\"build\"")), (1, 1), "{requests}");
    for part in [
        r#""url":"https://conda.anaconda.org/pkgs/main""#,
        r#""url":"https://conda.anaconda.org/pkgs/r""#,
        r#"{"name":"https://h/c/mine","url":"https://h/c/mine","mirrors":[]}"#,
        r#"{"text":"numpy=99","line":4}"#,
        r#""priority":"strict""#,
        "__linux=6.1.0=0",
    ] {
        assert!(requests.contains(part), "{part}: {requests}");
    }
    drop(lease);
    assert!(conda_node.acquire(&environments, &spec).await.unwrap().reused());
    assert_eq!(conda_node.requests(), requests, "no child for an environment that is there");
    let [kept] = &environments.list()[..] else { panic!() };
    assert_eq!(kept.summary, "conda.yml: python=3.11, numpy=99");
    assert_eq!((kept.python.as_str(), kept.packages), ("3.11.9", 1));
}

#[tokio::test]
async fn test_activation_scripts_run_apart_and_only_what_can_be_used_is_taken() {
    let mut node = Conda::new().await;
    node.config.vars.insert("PIP_INDEX_URL".into(), "https://user:hunter2@h/simple".into());
    let environments = node.open();
    let bin = |lease: &EnvLease| lease.prefix().join("bin");
    let lease = node.acquire(&environments, &conda(FILE)).await.unwrap();
    assert!(!node.requests().contains("activate"), "it has no scripts");
    drop(lease);
    node.on_build("scripts=true");
    let lease = node.acquire(&environments, &conda("dependencies: [python=3.11, a]\n")).await.unwrap();
    assert_eq!(count(&node.requests(), "\"kind\":\"activate\""), 1);
    let vars = lease.vars();
    assert_eq!(vars.get("SET").map(String::as_str), Some("yes"), "{vars:?}");
    assert!(!vars.contains_key("NO=NAME") && !vars.contains_key("LONG"), "{vars:?}");
    assert_eq!(lease.path_entries(), [bin(&lease)]);
    let seen = fs::read_to_string(node.fixture.path("activated_with")).unwrap();
    assert!(!seen.contains("hunter2"), "{seen}");
    // Without them an environment is usable, and the log says that they are missing.
    fs::write(node.fixture.path("on_activate"), "echo no bash here >&2; exit 1").unwrap();
    let lease = node.acquire(&environments, &conda("dependencies: [python=3.11, b]\n")).await.unwrap();
    assert_eq!(lease.path_entries(), [bin(&lease)]);
    let log = fs::read_to_string(lease.log_file()).unwrap();
    assert!(log.contains("the activation scripts are left out: no bash here"), "{log}");
}

#[tokio::test]
async fn test_variables_and_names_make_no_other_environment_but_reach_each_job() {
    let node = Conda::new().await;
    let environments = node.open();
    let first = conda("name: one\ndependencies: [python=3.11, scipy]\nvariables: {MODE: a}\n");
    let second =
        conda("# a comment\nname: two\ndependencies:\n- scipy\n- python=3.11\nvariables: {MODE: b}\n");
    let first = node.acquire(&environments, &first).await.unwrap();
    let second = node.acquire(&environments, &second).await.unwrap();
    assert_eq!(first.key(), second.key());
    assert_eq!((first.vars()["MODE"].as_str(), second.vars()["MODE"].as_str()), ("a", "b"));
    let other = node.acquire(&environments, &conda("dependencies: [python=3.12, scipy]\n")).await.unwrap();
    assert_ne!(first.key(), other.key());
}

#[tokio::test]
async fn test_probe_that_is_killed_is_begun_anew_a_few_times() {
    let node = Conda::new().await;
    let environments = node.open();
    let killed = node.fixture.path("killed").display().to_string();
    for (signal, times) in [("KILL", 2), ("TERM", 3), ("KILL", 1000)] {
        let _ = fs::remove_file(&killed);
        let script = format!("echo x >> {killed}; [ $(wc -l < {killed}) -gt {times} ] || kill -{signal} $$");
        fs::write(node.fixture.path("on_probe"), script).unwrap();
        // A new modification time makes it another engine, which is asked again.
        executable(node.config.engine.as_ref().unwrap(), &format!("{}# {signal} {times}\n", node.engine));
        let file = format!("dependencies: [python=3.11, a={times}]\n");
        let acquired = node.acquire(&environments, &conda(&file)).await;
        match (times, acquired) {
            (1000, Err(error)) => {
                assert!(matches!(error, AcquireError::Killed { signal: 9, .. }), "{error:?}");
                assert_eq!(count(&fs::read_to_string(&killed).unwrap(), "x"), 5);
            }
            (_, acquired) => drop(acquired.unwrap()),
        }
    }
}

#[tokio::test]
async fn test_failures_of_the_engine_name_the_line() {
    let table = [
        (
            "unsatisfiable",
            "nothing provides numpy 99",
            "conda.yml, line 4: `numpy=99`: nothing provides numpy 99",
        ),
        ("spec", "no version", "conda.yml, line 4: `numpy=99`: no version"),
        ("refused", "it leaves the prefix", "conda.yml, line 4: `numpy=99`: it leaves the prefix"),
        ("network", "timed out", "the package index cannot be reached: timed out (look)"),
        ("denied", "401", "a server refused the packages: 401 (look)"),
        ("damaged", "wrong hash", "a package is damaged: wrong hash (look)"),
        ("too_long", "120 s", "choosing packages took too long: 120 s (look)"),
    ];
    for (kind, message, expected) in table {
        let node = Conda::new().await;
        let environments = node.open();
        node.on_build(&format!(
            r#"echo '{{"event":"failed","kind":"{kind}","message":"{message}","lines":[4],"hint":"look"}}'; exit 1"#
        ));
        let error = node.acquire(&environments, &conda(FILE)).await.unwrap_err();
        assert_eq!(error.to_string(), expected, "{error:?}");
        assert!(environments.list().is_empty());
    }
    let node = Conda::new().await;
    node.on_build("echo out of luck >&2; exit 3");
    let error = node.acquire(&node.open(), &conda(FILE)).await.unwrap_err();
    assert!(
        matches!(&error, AcquireError::Failed { detail, .. } if detail.contains("out of luck")),
        "{error:?}"
    );
}

#[tokio::test]
async fn test_node_without_an_engine_refuses_conda_alone() {
    let fixture = Fixture::new();
    let environments = fixture.open();
    let error = environments.acquire(&conda(FILE), &fixture.path("log"), &nobody()).await.unwrap_err();
    assert!(matches!(error, AcquireError::EngineMissing { .. }), "{error:?}");
    assert!(environments.acquire(&EnvSpec::host(), &fixture.path("log"), &nobody()).await.is_ok());
}

#[tokio::test]
async fn test_file_that_cannot_be_read_is_refused_with_its_place() {
    let node = Conda::new().await;
    let error = node.acquire(&node.open(), &conda("dependencies:\n- python: 3.11\n")).await.unwrap_err();
    assert!(matches!(error, AcquireError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("conda.yml") && error.to_string().contains("line 2"), "{error}");
}

#[tokio::test]
async fn test_cancelled_build_leaves_no_process_and_no_new_file() {
    let node = Conda::new().await;
    let environments = node.open();
    let (pids, work) = (node.fixture.path("pids"), node.fixture.path("work"));
    // It leaves its process group, and goes on writing.
    node.on_build(&format!(
        "setsid sh -c 'echo $$ >> {0}; while :; do date >> {1}; sleep 0.02; done' & echo $$ >> {0}; sleep 1000",
        pids.display(),
        work.display()
    ));
    let spec = conda(FILE);
    let (log, told) = (node.fixture.path("log"), nobody());
    let mut build = Box::pin(environments.acquire(&spec, &log, &told));
    let written = || fs::read_to_string(&pids).map_or(0, |text| text.lines().count());
    tokio::select! {
        _ = &mut build => panic!("it sleeps"),
        () = until("the engine works", || written() == 2 && work.exists()) => {}
    }
    drop(build);
    let pids: Vec<i32> = fs::read_to_string(&pids).unwrap().lines().map(|pid| pid.parse().unwrap()).collect();
    let lives = || pids.iter().any(|pid| agent_shim::process::Process::find(*pid).is_some());
    until("nothing of it lives", || !lives()).await;
    let length = fs::metadata(&work).unwrap().len();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(fs::metadata(&work).unwrap().len(), length);
    let envs = node.fixture.path("envs");
    until("the half-built environment is gone", || {
        envs.read_dir().unwrap().all(|entry| !entry.unwrap().path().is_dir())
    })
    .await;
}

#[tokio::test]
async fn test_lock_is_an_environment_of_its_own_whatever_the_file_says() {
    let node = Conda::new().await;
    let environments = node.open();
    let lock =
        "# platform: linux-64\n@EXPLICIT\nhttps://h/c/noarch/a-1-0.conda#5f2c5f2c5f2c5f2c5f2c5f2c5f2c5f2c\n";
    let of = |document: &str| EnvSpec::Conda {
        file: "conda.yml".to_owned(),
        document: document.to_owned(),
        lock: Some(lock.to_owned()),
    };
    let first = node.acquire(&environments, &of("")).await.unwrap();
    let second = node.acquire(&environments, &of(FILE)).await.unwrap();
    assert_eq!(first.key(), second.key());
    assert!(node.requests().contains("@EXPLICIT"), "{}", node.requests());
}

#[tokio::test]
async fn test_kept_environments_are_listed_pinned_and_removed() {
    let node = Conda::new().await;
    let environments = node.open();
    let lease = node.acquire(&environments, &conda(FILE)).await.unwrap();
    let key = lease.key().to_owned();
    environments.pin(&key, true).unwrap();
    let [kept] = &environments.list()[..] else { panic!() };
    assert!(kept.pinned && kept.uses == 1 && kept.key == key && kept.bytes > 0);
    assert!(kept.lock_file().unwrap().exists() && kept.log_file().exists());
    assert!(kept.used >= kept.built);
    environments.pin(&key, false).unwrap();
    let error = environments.remove(&key).unwrap_err();
    assert!(matches!(error, RemoveError::InUse { uses: 1, .. }), "{error:?}");
    let prefix = lease.prefix().to_owned();
    drop(lease);
    let (environments, freed) = tokio::task::spawn_blocking({
        let key = key.clone();
        move || {
            let freed = environments.remove(&key);
            (environments, freed)
        }
    })
    .await
    .unwrap();
    assert!(freed.unwrap() > 0 && !prefix.exists() && environments.list().is_empty());
    for unknown in [key.as_str(), "../envs", ""] {
        assert!(matches!(environments.remove(unknown), Err(RemoveError::Unknown { .. })), "{unknown}");
        assert!(matches!(environments.pin(unknown, true), Err(RemoveError::Unknown { .. })), "{unknown}");
    }
    let root = node.fixture.path("envs");
    until("its files are gone as well", || {
        root.read_dir().unwrap().all(|entry| !entry.unwrap().path().is_dir())
    })
    .await;
    fs::create_dir_all(node.fixture.path("packages/conda")).unwrap();
    assert_eq!(environments.sweep(Duration::from_secs(1)).await.unwrap(), 42);
    assert!(!node.acquire(&environments, &conda(FILE)).await.unwrap().reused());
}

#[tokio::test]
async fn test_environment_that_a_job_changed_is_built_anew() {
    let node = Conda::new().await;
    let environments = node.open();
    let lease = node.acquire(&environments, &conda(FILE)).await.unwrap();
    let packages = lease.prefix().join("lib/python3.11/site-packages");
    drop(lease);
    // Bytecode written by Python itself is no damage.
    fs::create_dir_all(packages.join("__pycache__")).unwrap();
    fs::write(packages.join("__pycache__/module.cpython-311.pyc"), "x").unwrap();
    assert!(node.acquire(&environments, &conda(FILE)).await.unwrap().reused());
    fs::write(packages.join("intruder.py"), "").unwrap();
    assert!(!node.acquire(&environments, &conda(FILE)).await.unwrap().reused());
    assert!(!packages.join("intruder.py").exists());
    assert!(node.fixture.log("log").contains("was changed since it was built"));

    // A file that is changed in place is noticed after a restart of the machine.
    let lease = node.acquire(&environments, &conda(FILE)).await.unwrap();
    fs::write(packages.join("module.py"), "x = 'longer'\n").unwrap();
    let used = lease.prefix().with_extension("used");
    let noted = fs::read_to_string(&used).unwrap();
    fs::write(&used, noted.replace(&agent_shim::process::boot_id(), "an earlier boot")).unwrap();
    drop(lease);
    assert!(!node.acquire(&environments, &conda(FILE)).await.unwrap().reused());
    assert_eq!(fs::read_to_string(packages.join("module.py")).unwrap(), "x = 1\n");
}

#[tokio::test]
async fn test_new_environment_is_compiled_when_nobody_waits() {
    let node = Conda::new().await;
    let environments = node.open();
    let lease = node.acquire(&environments, &conda(FILE)).await.unwrap();
    let packages = lease.prefix().join("lib/python3.11/site-packages/__pycache__");
    until("its modules are compiled", || packages.read_dir().is_ok_and(|mut files| files.next().is_some()))
        .await;
    drop(lease);
    until("that is noted", || {
        fs::read_dir(node.fixture.path("envs")).unwrap().flatten().any(|entry| {
            let path = entry.path();
            path.extension().is_some_and(|ending| ending == "used")
                && fs::read_to_string(path).unwrap().contains("\"compiled\":true")
        })
    })
    .await;
    assert!(node.acquire(&environments, &conda(FILE)).await.unwrap().reused());
}

#[tokio::test]
async fn test_named_environment_is_what_its_definition_says() {
    let mut node = Conda::new().await;
    node.config.curated_builtin =
        &[("base-1", "conda_file:\n  dependencies: [python=3.11]\n"), ("other-2", "conda_file: ./x.yml\n")];
    let dir = node.fixture.path("curated");
    fs::create_dir(&dir).unwrap();
    node.config.curated = Some(dir.clone());
    let environments = node.open();
    let named = |reference: &str| EnvSpec::Named { reference: reference.to_owned() };
    let builtin = node.acquire(&environments, &named("azureml:AzureML-base-1@latest")).await.unwrap();
    let same = conda("dependencies: [python=3.11]\n");
    assert_eq!(node.acquire(&environments, &same).await.unwrap().key(), builtin.key());

    fs::write(dir.join("base-1.yml"), "conda_file: ./base.conda.yml\n").unwrap();
    fs::write(dir.join("base.conda.yml"), "dependencies: [python=3.12]\n").unwrap();
    let replaced = node.acquire(&environments, &named("azureml:base-1:3")).await.unwrap();
    assert_ne!(replaced.key(), builtin.key());
    let error = node.acquire(&environments, &named("azureml:nothing:1")).await.unwrap_err();
    let AcquireError::NameUnknown { known, .. } = &error else { panic!("{error:?}") };
    assert_eq!(known, &["base-1", "base.conda", "other-2"]);
    let error = node.acquire(&environments, &named("azureml:other-2:1")).await.unwrap_err();
    assert!(matches!(error, AcquireError::Refused { .. }), "{error:?}");
}
