//! Which program installs packages of pip, and what a host interpreter must have already.

use super::*;

impl Fixture {
    /// A `uv` that records its arguments, and then runs the script.
    fn uv(&self, script: &str) -> Uv {
        let path = self.path("uv");
        let told = self.path("uv-told").display().to_string();
        let text = format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && {{ echo uv 0.9.9; exit 0; }}\n\
             echo \"$* cache=$UV_CACHE_DIR index=$UV_DEFAULT_INDEX\" >> {told}\n{script}\n"
        );
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Uv::At(path)
    }

    fn uv_told(&self) -> String {
        fs::read_to_string(self.path("uv-told")).unwrap_or_default()
    }
}

/// Installs a package in the same place as the real one.
const INSTALLS: &str = r#"case "$*" in *"pip install --index-strategy"*)
    site=$(echo $(dirname $UV_PYTHON)/../lib/python3*/site-packages)
    mkdir -p $site/tiny-1.5.dist-info; echo uv > $site/tiny-1.5.dist-info/INSTALLER; echo 'VERSION = "1.5"' > $site/tiny.py;;
*"pip compile"*) printf 'tiny==1.5 \\\n    --hash=sha256:0a0b\n';; esac"#;

#[tokio::test]
async fn test_uv_installs_where_it_is() {
    let fixture = Fixture::new();
    let mut config = EnvConfig { uv: fixture.uv(INSTALLS), ..fixture.config() };
    config.vars.insert("PIP_INDEX_URL".into(), "https://index".into());
    let environments = Environments::open(config).unwrap();
    let spec = pip("python3", &["tiny".to_owned()]);
    let lease = environments.acquire(&spec, &fixture.path("log"), &nobody()).await.unwrap();
    assert_eq!(run(&lease, "import tiny; print(tiny.VERSION)").await, "1.5");
    let told = fixture.uv_told();
    let cache = format!("cache={} index=https://index", fixture.path("packages/uv").display());
    assert!(told.contains(&cache) && told.contains("-r "), "{told}");
    assert!(
        told.contains("pip-") && told.contains("--no-index"),
        "pip itself comes with the interpreter: {told}"
    );
    let locked = fs::read_to_string(lease.lock_file().unwrap()).unwrap();
    assert!(locked.contains("# pip tiny==1.5 --hash=sha256:0a0b"), "{locked}");
}

#[tokio::test]
async fn test_downloads_of_an_installer_are_told_while_they_go_on() {
    let fixture = Fixture::new();
    let go_on = fixture.path("go-on");
    let slow = format!(
        "case \"$*\" in *\"pip install --index-strategy\"*) echo 'Downloading tiny (33.7MiB)'; \
         while [ ! -e {} ]; do sleep 0.05; done; echo ' Downloaded tiny';; esac\n{INSTALLS}",
        go_on.display()
    );
    let environments = Environments::open(EnvConfig { uv: fixture.uv(&slow), ..fixture.config() }).unwrap();
    let told = watch::Sender::new(None);
    let mut hears = told.subscribe();
    let (spec, log) = (pip("python3", &["tiny".to_owned()]), fixture.path("log"));
    let watches = async {
        let is = |what: &'static str| {
            move |told: &Option<Progress>| told.as_ref().is_some_and(|told| describe(told) == what)
        };
        hears.wait_for(is("installing pip packages: downloading tiny (33.7 MiB)")).await.unwrap();
        fs::write(&go_on, "").unwrap();
        hears.wait_for(Option::is_none).await.unwrap();
    };
    let (lease, ()) = tokio::join!(environments.acquire(&spec, &log, &told), watches);
    let took = lease.unwrap().took().unwrap();
    let log = fixture.log("log");
    assert!(log.contains("Downloading tiny (33.7MiB)\n Downloaded tiny\n"), "{log}");
    assert!(log.ends_with(&format!(" is ready after {}\n", duration(took))), "{log}");
}

#[tokio::test]
async fn test_pip_installs_what_uv_does_not_understand() {
    let fixture = Fixture::new();
    let mut lines = fixture.wheel("tiny", "1.5", "").await;
    lines.extend(["--use-feature=fast-deps".to_owned(), "tiny".to_owned()]);
    let config = EnvConfig { uv: fixture.uv("exit 9"), ..fixture.config() };
    let environments = Environments::open(config).unwrap();
    let lease = environments.acquire(&pip("python3", &lines), &fixture.path("log"), &nobody()).await.unwrap();
    assert_eq!(run(&lease, "import tiny; print(tiny.VERSION)").await, "1.5");
    let log = fixture.log("log");
    assert!(log.contains("uv does not understand `--use-feature=fast-deps`; pip is used instead"), "{log}");
    assert!(fixture.uv_told().is_empty());
}

#[tokio::test]
async fn test_uv_that_does_not_work_is_passed_over() {
    let fixture = Fixture::new();
    let mut lines = fixture.wheel("tiny", "1.5", "").await;
    lines.push("tiny".to_owned());
    let broken = fixture.path("broken-uv");
    fs::write(&broken, "#!/bin/sh\necho no such machine; exit 1\n").unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
    let environments = Environments::open(EnvConfig { uv: Uv::At(broken), ..fixture.config() }).unwrap();
    environments.acquire(&pip("python3", &lines), &fixture.path("log"), &nobody()).await.unwrap();
    let log = fixture.log("log");
    assert!(log.contains("does not work: no such machine; pip is used instead"), "{log}");
}

#[tokio::test]
async fn test_host_interpreter_is_asked_for_what_the_job_lists() {
    let fixture = Fixture::new();
    let venv = fixture.path("mine");
    let python = fixture.real_python().await;
    let made = Command::new(python).args(["-m", "venv"]).arg(&venv).capture().await.unwrap();
    assert!(made.status.success());
    let python = venv.join("bin/python").display().to_string();
    let environments = fixture.open();
    let host = |lines: &[&str]| EnvSpec::Host {
        python: python.clone(),
        requirements: lines.iter().map(|line| (*line).to_owned()).collect(),
    };
    let log = fixture.path("log");
    let wanted =
        ["pip>=1", "absent", "pip>=9999", "absent-too>=2", "other; python_version < '3'", "-i https://x"];
    let error = environments.acquire(&host(&wanted), &log, &nobody()).await.unwrap_err();
    let AcquireError::Lacks { missing, .. } = &error else { panic!("{error:?}") };
    assert_eq!(
        (missing.len(), missing[0].as_str(), missing[2].as_str()),
        (3, "absent", "absent-too>=2"),
        "{missing:?}"
    );
    assert!(missing[1].starts_with("pip>=9999 (") && missing[1].ends_with(" is installed)"), "{missing:?}");

    assert!(environments.acquire(&host(&["pip", "late"]), &log, &nobody()).await.is_err());
    let site = venv.join("lib").read_dir().unwrap().next().unwrap().unwrap().path().join("site-packages");
    let info = site.join("late-1.0.dist-info");
    fs::create_dir(&info).unwrap();
    fs::write(info.join("METADATA"), "Metadata-Version: 2.1\nName: late\nVersion: 1.0\n").unwrap();
    environments.acquire(&host(&["pip", "late"]), &log, &nobody()).await.unwrap();
}
