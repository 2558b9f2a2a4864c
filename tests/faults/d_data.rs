//! Group D: what a job is given is what was meant for it, whole.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_model::{EnvSpec, JobDraft};
use agent_tests::chance::Chance;
use agent_tests::fleet::{Fleet, Setup, processes_below};
use agent_tests::{SOON, binaries, eventually, signal};
use rustix::process::Signal;

use crate::look::{PYTHON, command, files_below};
use crate::row::{Row, Scale, Tally};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "D1", promise: "no job runs on bytes that are not those that were sent", run: bad_blobs },
    Row { id: "D2", promise: "no job runs in an environment that is half built", run: half_built },
    Row {
        id: "D3",
        promise: "an environment is built once, however many want it and whoever dies",
        run: built_once,
    },
];

/// A project of small files and one large one, with a job that checks all of them.
struct Project {
    dir: PathBuf,
}

impl Project {
    /// Files of which none was ever stored before.
    fn new(home: &Path, number: usize, chance: &mut Chance) -> Project {
        let dir = home.join(format!("project-{number}"));
        fs::create_dir_all(dir.join("data")).expect("a directory");
        for file in 0..12 {
            // Pairs of one size, so that they can be mistaken for each other.
            let length = if file == 0 { 3 << 20 } else { 1000 + 500 * (file / 2) };
            let bytes: Vec<u8> = (0..length / 8).flat_map(|_| chance.number().to_le_bytes()).collect();
            fs::write(dir.join(format!("data/{file}")), bytes).expect("a file");
        }
        let sums =
            command("sh").args(["-c", "sha256sum data/*"]).current_dir(&dir).output().expect("sha256sum");
        fs::write(dir.join("sums"), sums.stdout).expect("a file");
        let check = "sha256sum --quiet -c sums || exit 55; stat -c %i data/*; for f in data/*; do echo mine > $f; done";
        let job = format!("command: {}\ncode: .\nenvironment: host\n", serde_json::Value::from(check));
        fs::write(dir.join("job.yml"), job).expect("a file");
        Project { dir }
    }

    /// Submits it as people do, which sends what the store says it does not have; the job, if it was taken.
    fn submit(&self, fleet: &Fleet) -> Result<String, String> {
        let mut ctl = command(binaries().join("agentctl"));
        ctl.arg("--socket").arg(fleet.controller.socket()).arg("submit").arg(&self.dir);
        let ran = ctl.output().expect("agentctl starts");
        match ran.status.success() {
            true => Ok(String::from_utf8_lossy(&ran.stdout).trim().to_owned()),
            false => Err(String::from_utf8_lossy(&ran.stderr).into_owned()),
        }
    }
}

fn blobs(state: &Path) -> BTreeSet<PathBuf> {
    files_below(&state.join("cas/blobs")).into_iter().collect()
}

fn rewrite(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("the blob");
    change(&mut bytes);
    // In its place, as a bad disk would do it; the store's files are read-only, which root need not heed.
    fs::write(path, bytes).expect("the blob is written");
}

/// Spoils blobs between the moment they are stored and the moment a job needs them, and while one has them.
fn bad_blobs(scale: &Scale) -> Tally {
    let (mut tally, mut chance) = (Tally::default(), scale.chance());
    for nodes in [0, 1] {
        let mut fleet = Fleet::started(&Setup { nodes, ..Setup::default() });
        for round in 0..scale.of(6, 50) {
            let how =
                ["one bit is flipped", "it is cut short", "two are swapped", "it has grown", "it is gone"]
                    [usize::try_from(chance.below(5)).unwrap_or(0)];
            let place = if nodes == 1 && chance.percent(50) { "on the node" } else { "in the store" };
            let project = Project::new(fleet.home(), 100 * nodes + round, &mut chance);
            tally.case(&format!("a blob {place}: {how}"), || {
                spoil(&mut fleet, &project, place, how, &mut chance)
            });
        }
    }
    tally
}

fn spoil(fleet: &mut Fleet, project: &Project, place: &str, how: &str, chance: &mut Chance) {
    let before = blobs(&fleet.controller.state());
    let first = project.submit(fleet).expect("the first job is taken");
    assert_eq!(fleet.client.ended(&first).state, "Completed");
    let inodes = String::from_utf8(fleet.client.log(&first, "job")).expect("numbers");
    let stored: Vec<PathBuf> = blobs(&fleet.controller.state()).difference(&before).cloned().collect();
    let shared: Vec<u64> = stored
        .iter()
        .filter_map(|path| fs::metadata(path).ok())
        .map(|blob| blob.ino())
        .filter(|inode| inodes.lines().any(|line| line == inode.to_string()))
        .collect();
    assert!(shared.is_empty(), "the job writes to the store's own files: {shared:?}");

    let state = if place == "on the node" { fleet.node().state() } else { fleet.controller.state() };
    let name = |path: &PathBuf| path.file_name().expect("a name").to_owned();
    let ours: BTreeSet<_> = stored.iter().map(name).collect();
    let victims: Vec<PathBuf> = blobs(&state).into_iter().filter(|path| ours.contains(&name(path))).collect();
    let victim = chance.pick(&victims).clone();
    let size = fs::metadata(&victim).expect("the blob").len();
    match how {
        "one bit is flipped" => rewrite(&victim, |bytes| {
            let at = usize::try_from(chance.below(bytes.len() as u64)).unwrap_or(0);
            bytes[at] ^= 1 << chance.below(8);
        }),
        "it is cut short" => rewrite(&victim, |bytes| bytes.truncate(bytes.len() / 2)),
        "it has grown" => rewrite(&victim, |bytes| bytes.extend_from_slice(b"more")),
        "it is gone" => fs::remove_file(&victim).expect("the blob is removed"),
        _ => {
            let twin = victims
                .iter()
                .find(|path| **path != victim && fs::metadata(path).is_ok_and(|m| m.len() == size));
            let other = twin.or_else(|| victims.iter().find(|path| **path != victim)).expect("another blob");
            let (one, two) = (fs::read(&victim).expect("a blob"), fs::read(other).expect("a blob"));
            rewrite(&victim, |bytes| *bytes = two);
            rewrite(other, |bytes| *bytes = one);
        }
    }
    // Whatever it takes: no job on bad bytes, and after a few tries a good one.
    let mut tries = Vec::new();
    for _ in 0..4 {
        let job = match project.submit(fleet) {
            Ok(job) => fleet.client.ended(&job),
            Err(refused) => {
                tries.push(refused);
                continue;
            }
        };
        let outcome = job.outcome.unwrap_or_default();
        let log = String::from_utf8_lossy(&fleet.client.log(&job.job, "job")).into_owned();
        let code = outcome.fault.as_ref().map(|fault| fault.code.clone()).unwrap_or_default();
        assert!(!log.contains("FAILED") && code != "RUN-101", "{how}: a job ran on bad bytes:\n{log}");
        if job.state == "Completed" {
            return;
        }
        tries.push(format!("{:?}", outcome.fault));
    }
    panic!("{how} {place}, size {size}: it does not heal:\n{}", tries.join("\n"));
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

/// An environment with a package of its own, and a job that looks whether all of it is there.
struct Environment {
    draft: JobDraft,
    witness: PathBuf,
}

impl Environment {
    fn new(home: &Path, name: &str) -> Environment {
        let dir = home.join(format!("package-{name}"));
        let witness = home.join(format!("witness-{name}"));
        fs::create_dir_all(&dir).expect("a directory");
        let backend = BACKEND.replace("NAME", name).replace("WITNESS", &witness.display().to_string());
        fs::write(dir.join("backend.py"), backend).expect("a file");
        fs::write(dir.join("pyproject.toml"), PYPROJECT).expect("a file");
        let requirement = format!("faults-{name} @ file://{}", dir.display());
        let draft = JobDraft {
            command: format!("exec python -c 'import faults_{name}'"),
            environment: EnvSpec::Pip {
                python: PYTHON.into(),
                requirements: vec!["--no-index".into(), requirement],
            },
            ..JobDraft::default()
        };
        Environment { draft, witness }
    }

    /// How often its package was built to the end.
    fn built(&self) -> usize {
        fs::read_to_string(&self.witness).unwrap_or_default().lines().filter(|line| *line == "end").count()
    }
}

/// What is left of builders: files, and processes.
fn leavings(fleet: &Fleet) -> Vec<String> {
    let envs = fleet.controller.state().join("envs");
    let processes = processes_below(&envs).into_iter().map(|pid| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        format!("process {pid}: {}", command.replace('\0', " "))
    });
    let entries = fs::read_dir(&envs).into_iter().flatten().flatten().map(|entry| entry.path());
    let scratch =
        entries.filter(|path| path.join("tmp").exists()).map(|path| format!("{}/tmp", path.display()));
    processes.chain(scratch).collect()
}

fn half_built(scale: &Scale) -> Tally {
    let (mut tally, mut chance) = (Tally::default(), scale.chance());
    let mut fleet = Fleet::one_box();
    let (environments, kills) = scale.of((2, 4), (8, 5));
    let mut killed = 0;
    for number in 0..environments {
        let environment = Environment::new(fleet.home(), &format!("h{number}"));
        let job = fleet.client.submit(&environment.draft);
        for _ in 0..kills {
            std::thread::sleep(chance.millis(50, 1800));
            if fleet.client.job(&job).state != "Preparing" {
                break;
            }
            killed += 1;
            fleet.controller.bounce();
            fleet.ready();
        }
        tally.case("the job waits for a whole environment", || {
            let ended = fleet.client.reached_within(Duration::from_secs(120), &job, &["Completed", "Failed"]);
            let log = String::from_utf8_lossy(&fleet.client.log(&job, "job")).into_owned();
            assert_eq!(ended.state, "Completed", "{:?}\n{log}", ended.outcome);
        });
        tally.case("the next job finds it ready", || {
            let before = environment.built();
            let next = fleet.client.submit(&environment.draft);
            assert_eq!(fleet.client.ended(&next).state, "Completed");
            assert_eq!(environment.built(), before, "it was built again");
        });
    }
    tally.count(killed, "", &[]);
    tally
        .case("nothing is left of builders that died", || assert_eq!(leavings(&fleet), Vec::<String>::new()));
    tally.note(format!("{killed} kills of the daemon while {environments} environments were built"));
    tally
}

/// The processes that build below the directory of environments.
fn builders(fleet: &Fleet) -> Vec<u32> {
    processes_below(&fleet.controller.state().join("envs"))
}

fn built_once(scale: &Scale) -> Tally {
    let mut tally = Tally::default();
    let jobs = scale.of(8, 20);
    let mut fleet = Fleet::started(&Setup { slots: jobs, ..Setup::default() });
    for (name, who) in [("d", "the daemon"), ("p", "the builder")] {
        let environment = Environment::new(fleet.home(), name);
        let names: Vec<String> = (0..jobs).map(|_| fleet.client.submit(&environment.draft)).collect();
        let mut killed = 0;
        for _ in 0..3 {
            let begun = Instant::now();
            eventually("it is being built", SOON, || {
                let building = !builders(&fleet).is_empty();
                (building || names.iter().all(|job| agent_tests::client::is_over(&fleet.client.job(job))))
                    .then_some(())
            });
            std::thread::sleep(Duration::from_millis(300).saturating_sub(begun.elapsed()));
            match who {
                "the daemon" => {
                    fleet.controller.bounce();
                    fleet.ready();
                    killed += 1;
                }
                _ => {
                    let found = builders(&fleet);
                    killed += u32::from(!found.is_empty());
                    found.into_iter().for_each(|pid| signal(pid, Signal::KILL));
                }
            }
        }
        for job in &names {
            tally.case(&format!("a job that waits while {who} is killed"), || {
                let ended =
                    fleet.client.reached_within(Duration::from_secs(120), job, &["Completed", "Failed"]);
                assert_eq!(ended.state, "Completed", "{:?}", ended.outcome);
            });
        }
        tally.case(&format!("{who} is killed, and it is built once"), || assert_eq!(environment.built(), 1));
        tally.note(format!("{jobs} jobs, {who} killed {killed} times, built {} times", environment.built()));
    }
    tally
}
