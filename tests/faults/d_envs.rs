//! Group D, environments: none is used before it is whole, each is built once, and nothing is left of builders.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use agent_model::{EnvSpec, JobDraft};
use agent_tests::chance::Chance;
use agent_tests::channel::{Channel, Server};
use agent_tests::client::is_over;
use agent_tests::fleet::{Fleet, Setup, processes_below};
use agent_tests::{SOON, engine, engines, eventually, signal, within};
use rustix::process::Signal;

use crate::faults::look::{PYTHON, files_below};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this part of the group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "D2",
        promise: "no job runs in an environment that is half built",
        run: |tally, scale| {
            [Kind::Pip, Kind::Conda].into_iter().for_each(|kind| half_built(kind, tally, scale))
        },
    },
    Row {
        id: "D3",
        promise: "an environment is built once, however many want it and whoever dies",
        run: |tally, scale| {
            [Kind::Pip, Kind::Conda].into_iter().for_each(|kind| built_once(kind, tally, scale))
        },
    },
];

/// What an environment is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Packages of pip on the Python of the machine.
    Pip,
    /// Packages of conda, Python among them, and one of pip.
    Conda,
}

const PYPROJECT: &str =
    "[build-system]\nrequires = []\nbuild-backend = \"backend\"\nbackend-path = [\".\"]\n";

/// Builds a package of many files, slowly, and tells of it in WITNESS.
const BACKEND: &str = r#"
import os, time, zipfile

def tell(word):
    with open("WITNESS", "a") as file:
        file.write(word + "\n")

def build_wheel(directory, config_settings=None, metadata_directory=None):
    tell("begin")
    name = "faults_NAME-1.0-py3-none-any.whl"
    package = "faults_NAME"
    check = "import pathlib\nhere = pathlib.Path(__file__).parent\nassert all((here / f'm{n}.py').read_text() == f'N = {n}\\n' for n in range(150))\n"
    files = {f"{package}/m{n}.py": f"N = {n}\n" for n in range(150)}
    files[f"{package}/__init__.py"] = check
    info = f"{package}-1.0.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: faults-NAME\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in list(files)) + f"{info}/RECORD,,\n"
    time.sleep(0.5)
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    tell("end")
    return name
"#;

/// Every file of every conda package is there and is what its package says; then the package of pip is.
const LOOK: &str = r#"
import glob, hashlib, importlib, json, os, sys
prefix, files = os.environ["CONDA_PREFIX"], 0
for record in glob.glob(f"{prefix}/conda-meta/*.json"):
    for entry in json.load(open(record))["paths_data"]["paths"]:
        path = os.path.join(prefix, entry["_path"])
        assert os.path.lexists(path), f"{path} is missing"
        wanted = entry.get("sha256_in_prefix") or entry.get("sha256")
        if wanted and not os.path.islink(path):
            files += 1
            assert hashlib.sha256(open(path, "rb").read()).hexdigest() == wanted, f"{path} is damaged"
assert files > 100, f"only {files} files"
importlib.import_module(sys.argv[1])
"#;

/// Bytes a second at which a channel serves, so that packages are on their way for a while.
const SLOW: &str = "slow~20000000";

/// An environment with a package of its own, and a job that looks whether all of it is there.
struct Environment {
    draft: JobDraft,
    witness: PathBuf,
}

impl Environment {
    fn new(home: &Path, name: &str, kind: Kind) -> Environment {
        let dir = home.join(format!("package-{name}"));
        let witness = home.join(format!("witness-{name}"));
        fs::create_dir_all(&dir).expect("a directory");
        let backend = BACKEND.replace("NAME", name).replace("WITNESS", &witness.display().to_string());
        fs::write(dir.join("backend.py"), backend).expect("a file");
        fs::write(dir.join("pyproject.toml"), PYPROJECT).expect("a file");
        let requirement = format!("faults-{name} @ file://{}", dir.display());
        let mut draft = JobDraft::default();
        match kind {
            Kind::Pip => {
                draft.command = format!("exec python -c 'import faults_{name}'");
                draft.environment = EnvSpec::Pip {
                    python: PYTHON.into(),
                    requirements: vec!["--no-index".into(), requirement],
                };
            }
            Kind::Conda => {
                draft.command = format!("exec python -c \"$LOOK\" faults_{name}");
                draft.environment_variables.insert("LOOK".into(), LOOK.into());
                let document = format!(
                    "channels: [main]\ndependencies:\n- python\n- pip\n- tiny-one\n- pip:\n  - --no-index\n  - {requirement}\n"
                );
                draft.environment = EnvSpec::Conda { file: "conda.yml".into(), document, lock: None };
            }
        }
        Environment { draft, witness }
    }

    /// How often its package was built to the end.
    fn built(&self) -> usize {
        fs::read_to_string(&self.witness).unwrap_or_default().lines().filter(|line| *line == "end").count()
    }
}

/// One box, and the channel it has packages from.
struct Site {
    fleet: Fleet,
    _channel: Option<Server>, // it serves as long as this lives
}

impl Site {
    fn started(kind: Kind, slots: usize) -> Site {
        let mut fleet = Fleet::new(&Setup { slots, ..Setup::default() });
        let channel = (kind == Kind::Conda).then(|| {
            engine();
            let channel = Server::start(Channel::t1());
            channel.set(SLOW);
            fleet.controller.set("AGENTD_CONDA_ALIAS", &channel.alias());
            channel
        });
        fleet.start();
        Site { fleet, _channel: channel }
    }

    fn envs(&self) -> PathBuf {
        self.fleet.controller.state().join("envs")
    }

    /// The processes that build.
    fn builders(&self) -> Vec<u32> {
        let mut found = processes_below(&self.envs());
        found.extend(engines(self.fleet.home(), self.fleet.controller.pid()));
        found.retain(|pid| *pid != self.fleet.controller.pid());
        found
    }

    fn kill_builders(&self) -> bool {
        let found = self.builders();
        found.iter().for_each(|pid| signal(*pid, Signal::KILL));
        !found.is_empty()
    }

    /// Waits until nothing of builders is left beside the environments: byte code is still made when jobs have long
    /// begun, and is then moved to where it belongs.
    fn is_tidy(&self) {
        let of_builders = |path: PathBuf| {
            path.extension().is_some_and(|ending| ending == "compiled") || path.join("tmp").exists()
        };
        let left = || {
            fs::read_dir(self.envs()).into_iter().flatten().flatten().any(|entry| of_builders(entry.path()))
        };
        let tidy = || self.builders().is_empty() && !left();
        eventually("nobody builds, and nothing of builders is left", SOON, || tidy().then_some(()));
    }

    /// Waits until the job is over, and complains unless it ended well.
    #[track_caller]
    fn ends_well(&self, job: &str) {
        let ended = self.fleet.client.reached_within(2 * SOON, job, &["Completed", "Failed"]);
        let log = || String::from_utf8_lossy(&self.fleet.client.log(job, "job")).into_owned();
        assert_eq!(ended.state, "Completed", "{:?}\n{}", ended.outcome, log());
    }
}

fn half_built(kind: Kind, tally: &mut Tally, scale: &Scale) {
    const KILLS: u32 = 4; // of one environment; after the fifth a builder gives up
    let (mut chance, points) = (scale.chance(), scale.of(8, 40));
    let (mut killed, mut environments) = (0, 0);
    while killed < points && environments < points {
        let mut site = Site::started(kind, 4);
        // The second finds in the package cache what was left by the first.
        for _ in 0..2 {
            environments += 1;
            let environment = Environment::new(site.fleet.home(), &format!("h{environments}"), kind);
            let job = site.fleet.client.submit(&environment.draft);
            for _ in 0..KILLS {
                std::thread::sleep(chance.millis(50, 1800));
                if !["Queued", "Preparing"].contains(&site.fleet.client.job(&job).state.as_str()) {
                    break;
                }
                killed += 1;
                strike(&mut site, &mut chance);
            }
            tally.case("the job waits for a whole environment", || site.ends_well(&job));
            tally.case("the next job finds it ready", || {
                let before = environment.built();
                site.ends_well(&site.fleet.client.submit(&environment.draft));
                assert_eq!(environment.built(), before, "it was built again");
            });
        }
        tally.case("nothing is left of builders that died", || site.is_tidy());
        if kind == Kind::Conda {
            tally.case("no byte of theirs is left", || assert_eq!(orphans(&mut site.fleet), BTreeSet::new()));
        }
    }
    tally.count(killed, "", &[]);
    tally.note(format!(
        "{kind:?}: {killed} kills of the daemon, the builder or both, {environments} environments"
    ));
}

/// Kills the daemon, what builds for it, or first one and then the other.
fn strike(site: &mut Site, chance: &mut Chance) {
    let whom = chance.below(3);
    if whom > 0 {
        site.kill_builders();
    }
    if whom < 2 {
        site.fleet.controller.bounce();
        site.fleet.ready();
    }
}

/// What is in the package cache that no package and no list needs, once nobody has used a package for long: the
/// sweep at the start of the daemon removes all the others.
fn orphans(fleet: &mut Fleet) -> BTreeSet<PathBuf> {
    let packages = fleet.controller.state().join("packages/conda");
    fleet.controller.stop();
    for lock in files_below(&packages.join("locks")) {
        fs::File::open(lock).and_then(|lock| lock.set_modified(SystemTime::UNIX_EPOCH)).expect("root may");
    }
    fleet.controller.spawn();
    fleet.ready();
    let left = || -> BTreeSet<PathBuf> {
        let is_kept = |path: &PathBuf| {
            let lists = path.parent().is_some_and(|dir| dir.ends_with("repodata"));
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            path.starts_with(packages.join("locks")) || lists && !name.starts_with(".tmp")
        };
        files_below(&packages).into_iter().filter(|path| !is_kept(path)).collect()
    };
    let _ = within(SOON, || left().is_empty().then_some(()));
    left()
}

fn built_once(kind: Kind, tally: &mut Tally, scale: &Scale) {
    let jobs = scale.of(8, 20);
    let mut site = Site::started(kind, jobs);
    for (name, who) in [("d", "the daemon"), ("p", "the builder")] {
        let environment = Environment::new(site.fleet.home(), name, kind);
        let names: Vec<String> = (0..jobs).map(|_| site.fleet.client.submit(&environment.draft)).collect();
        let mut killed = 0;
        for _ in 0..3 {
            let begun = Instant::now();
            eventually("it is being built", SOON, || {
                let over = || names.iter().all(|job| is_over(&site.fleet.client.job(job)));
                (!site.builders().is_empty() || over()).then_some(())
            });
            std::thread::sleep(Duration::from_millis(300).saturating_sub(begun.elapsed()));
            match who {
                "the daemon" => {
                    site.fleet.controller.bounce();
                    site.fleet.ready();
                    killed += 1;
                }
                _ => killed += u32::from(site.kill_builders()),
            }
        }
        for job in &names {
            tally.case(&format!("a job that waits while {who} is killed"), || site.ends_well(job));
        }
        tally.case(&format!("{who} is killed, and it is built once"), || assert_eq!(environment.built(), 1));
        let built = environment.built();
        tally.note(format!("{kind:?}: {jobs} jobs, {who} killed {killed} times, built {built} times"));
    }
}
