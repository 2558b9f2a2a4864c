//! What the pages of the faults advise, typed: each row causes a fault, does what its page says, and the job runs.
//!
//! [`FIXES`] has every code. One without a row here names the test or the row of a suite that does it, or says why nobody
//! can: so a new fault begins with the question how it is mended.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use agent_model::Code;
use agent_tests::{Host, Ran, root};

/// Who types the fix of a fault.
enum Fix {
    /// A row of this file.
    Row(fn(&Bed)),
    /// A test elsewhere.
    Test(&'static str),
    /// A row of a suite.
    Suite(&'static str, &'static str),
    /// Nobody: why.
    No(&'static str),
}

use Fix::{No, Row, Suite, Test};

const REFUSAL: &str = "the refusal is the answer, and nothing is to be mended for a job";
const HARDWARE: &str = "it needs a machine or a part that breaks";

const FIXES: &[(Code, Fix)] = &[
    (Code::JobFile, Row(job_file)),
    (Code::JobInvalid, Row(job_invalid)),
    (Code::JobUnsupported, Row(job_unsupported)),
    (Code::JobNotFound, Row(job_not_found)),
    (Code::JobConflict, Row(job_conflict)),
    (Code::JobActive, Row(job_active)),
    (Code::JobNotWaiting, Row(job_not_waiting)),
    (Code::JobNeverDue, Row(job_never_due)),
    (Code::SessionRefused, Row(session_refused)),
    (Code::TasksFailed, Row(tasks_failed)),
    (Code::JobTooLarge, Row(job_too_large)),
    (Code::MetricMissing, Row(metric_missing)),
    (
        Code::SnapshotUnreadable,
        No("the tests run as root, who may read everything, and a file that grows is sent as it was"),
    ),
    (Code::SnapshotUnsafe, Row(snapshot_unsafe)),
    (Code::SnapshotMissing, Suite("snapshots", "O2")),
    (Code::SnapshotStore, Suite("snapshots", "E2")),
    (Code::SnapshotDamaged, Suite("snapshots", "O2")),
    (Code::DataUnknown, Row(data_unknown)),
    (Code::DataAbsent, Row(data_absent)),
    (
        Code::DataDenied,
        No("the store that wants credentials is a server of the tests of data; the next job is not tried"),
    ),
    (Code::DataRefused, Row(data_refused)),
    (Code::DataUnreachable, No("a server that comes back is waited for; nothing is typed")),
    (Code::DataDamaged, No("a server that is well again is waited for; nothing is typed")),
    (Code::DataNode, Row(data_node)),
    (Code::AssetUnknown, Row(asset_unknown)),
    (Code::AssetInvalid, Row(asset_invalid)),
    (Code::OutputRefused, Row(output_refused)),
    (
        Code::OutputUnsent,
        Test("test_a_share_that_does_not_take_an_output_fails_the_job_and_the_output_is_not_lost"),
    ),
    (Code::PythonMissing, Row(python_missing)),
    (
        Code::PythonIncomplete,
        No("it needs a Python without its module venv, which the machine of the tests has"),
    ),
    (Code::EnvUnsatisfied, Row(env_unsatisfied)),
    (Code::EnvBuild, No("what is missing to build, a compiler or memory, is the machine's to give")),
    (Code::EnvUnsupported, No("it needs a machine without `agent-env`, and the engine is built apart")),
    (Code::EnvNetwork, No("an index that comes back is waited for; nothing is typed")),
    (Code::EnvDenied, No("the channel that wants credentials is a server of the tests of environments")),
    (Code::EnvDamaged, No("a mirror that is well again is asked again; nothing is typed")),
    (Code::EnvLacks, Row(env_lacks)),
    (Code::EnvUnknown, Row(env_unknown)),
    (Code::EnvInUse, No("an environment in use is removed later; no job waits for that")),
    (Code::ImageMissing, Suite("containers", "I3")),
    (Code::ImageBuild, No("it needs a container engine: tests/run containers")),
    (Code::ImageCarrier, No("it needs an image without glibc: tests/run containers")),
    (Code::ImagePlatform, No("it needs an image for other machines: tests/run containers")),
    (Code::CommandFailed, Row(command_failed)),
    (Code::CommandNotFound, Row(command_not_found)),
    (Code::CommandSignaled, Row(command_signaled)),
    (Code::OutOfMemory, No("it needs a limit of memory, which the machine may not give: tests/run bed")),
    (Code::TimeLimit, Row(time_limit)),
    (
        Code::LaunchFailed,
        No("what the page names is the machine's: a limit to raise, or a program to install"),
    ),
    (Code::RunLost, Test("test_a_lost_job_runs_again_when_it_may")),
    (Code::Unkilled, No("a process that no signal ends needs a disk that hangs")),
    (Code::OutputsUnstored, Suite("snapshots", "O2")),
    (Code::DiskFull, Test("test_jobs_wait_while_the_disk_is_too_full_and_say_so")),
    (
        Code::NodeLost,
        No("the node is declared lost in the tests of fleets; the job goes elsewhere by its `retry`"),
    ),
    (Code::NodeRebooted, No("nothing is wrong with the job: it is submitted again, as any")),
    (Code::LeaseOver, No("a node that lost contact finds it again; nothing is typed")),
    (Code::NodeUnknown, No(REFUSAL)),
    (Code::NodeAnswers, No(REFUSAL)),
    (Code::GpuLost, No(HARDWARE)),
    (Code::GangIncomplete, No("the ranks of a gang need several machines: tests/run gangs")),
    (Code::GangUnreachable, No("the ranks of a gang need several machines: tests/run gangs")),
    (Code::GangLate, No("the ranks of a gang need several machines: tests/run gangs")),
    (Code::GangUnlike, No("the ranks of a gang need several machines: tests/run gangs")),
    (Code::GangPlace, No("the ranks of a gang need several machines: tests/run gangs")),
    (Code::NodeTwice, No("the fix is a membership of its own for the copy: tests of fleets")),
    (Code::NodeBusy, No(REFUSAL)),
    (Code::NodeTaken, No(REFUSAL)),
    (Code::NodeRemoved, No("the fix is a new token and a new join: tests of fleets")),
    (Code::NodeUnfit, Suite("faults", "C20")),
    (Code::Preempted, Suite("faults", "A17")),
    (Code::ControllerStore, Suite("faults", "C14")),
    (Code::Fenced, No(REFUSAL)),
    (Code::RequestInvalid, No("a client that does not keep to the protocol is not ours")),
    (Code::Unreachable, Test("test_daemon_gone_is_said_and_found_again")),
    (Code::Denied, No(REFUSAL)),
    (Code::Unidentified, No("the fix is a new login: tests of fleets")),
    (Code::TokenRefused, No("the fix is a new token: tests of fleets")),
    (Code::ClocksApart, No("the fix is the clock of a machine")),
    (Code::NotKnownHere, No(REFUSAL)),
    (Code::NameUsed, No(REFUSAL)),
    (Code::NoListener, No("the fix is a line of the configuration and a restart: tests of fleets")),
    (
        Code::ConfigInvalid,
        No("the fix is the line of the configuration that the message names; a daemon starts with it"),
    ),
    (Code::StateInUse, No("the fix is to use the daemon that has the directory")),
    (Code::StateUnusable, No("the fix is a release, or rights, that fit the directory")),
    (Code::JoinedElsewhere, No("the fix is to leave the other controller: tests of fleets")),
    (Code::HostLogin, No("the fix is a password or a key at hand: tests/run attach L2")),
    (Code::HostKey, No("the fix is to compare a key and to write it down: tests/run attach L1")),
    (Code::HostUnfit, No("the fix is to install what the machine lacks: tests/run attach M2")),
    (Code::HostUnfinished, No("a connection that is cut goes on where it was: tests/run attach")),
    (Code::Bug, No("what nobody expects has no remedy but a report")),
];

/// One box, and the file of its data stores.
struct Bed {
    host: Host,
    stores: PathBuf,
    share: PathBuf,
}

impl Bed {
    fn new() -> Bed {
        let mut host = Host::new();
        let (stores, share) = (host.home().join("data.yaml"), host.home().join("share"));
        fs::create_dir(&share).unwrap();
        fs::write(share.join("iris.csv"), "1,2\n").unwrap();
        fs::write(&stores, "datastores: {}\n").unwrap();
        host.set("AGENTD_DATA_STORES", stores.to_str().unwrap());
        host.start();
        Bed { host, stores, share }
    }

    /// Runs a job of this file.
    fn run(&self, name: &str, file: &str) -> Ran {
        let dir = self.host.project(name, &[("job.yml", file)]);
        self.host.ctl(&["run", dir.to_str().unwrap()])
    }

    /// A job of this file fails with the fault, and with another file, or after what was done, it runs.
    fn mended(&self, name: &str, code: Code, wrong: &str, mend: impl FnOnce() -> String) {
        let failed = self.run(name, wrong);
        assert_ne!(failed.code, 0, "{name}: {}", failed.stdout);
        failed.says(&format!("error[{code}]"));
        let right = mend();
        let ran = self.run(name, &right).ok();
        assert!(ran.stdout.ends_with("ran\n"), "{name}: {}", ran.stdout);
    }

    fn refused(&self, words: &[&str], code: Code) {
        let ran = self.host.ctl(words);
        assert_ne!(ran.code, 0, "{words:?}");
        ran.says(&format!("error[{code}]"));
    }

    fn submit(&self, words: &[&str]) -> String {
        self.host.ctl(&[&["submit"], words].concat()).ok().stdout.trim().to_owned()
    }
}

const GOOD: &str = "command: echo ran\nenvironment: host\n";

#[test]
fn test_what_a_page_advises_lets_the_job_run() {
    let bed = Bed::new();
    let mut failed = Vec::new();
    for (code, fix) in FIXES {
        let Row(row) = fix else { continue };
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| row(&bed))) {
            failed.push(format!("{code}: {}", agent_tests::queue::said(&*panic)));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn test_every_fault_says_who_types_its_fix() {
    let sources = sources(&root().join("tests"));
    let mut named = BTreeSet::new();
    for (code, fix) in FIXES {
        assert!(named.insert(code.as_str()), "{code} is there twice");
        let wanted = match fix {
            Row(_) => continue,
            Test(name) => format!("fn {name}("),
            Suite(_, row) => format!("\"{row}\""),
            No(why) => {
                assert!(why.contains(' '), "{code}: {why}");
                continue;
            }
        };
        assert!(sources.contains(&wanted), "{code}: there is no {wanted}");
        if let Suite(suite, _) = fix {
            assert!(root().join(format!("tests/{suite}.rs")).exists(), "{code}: there is no suite {suite}");
        }
    }
    let missing: Vec<&Code> = Code::ALL.iter().filter(|code| !named.contains(code.as_str())).collect();
    assert!(missing.is_empty(), "nobody types the fix of {missing:?}");
}

/// Every source file below a directory, one after the other.
fn sources(dir: &Path) -> String {
    let mut all = String::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all.push_str(&sources(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            all.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
    all
}

fn job_file(bed: &Bed) {
    let dir = bed.host.project("job-file", &[("job.yml", "command: [a, b\n")]);
    let file = dir.join("job.yml");
    let file = file.to_str().unwrap();
    let told = bed.host.ctl(&["check", file]);
    assert!(format!("{}{}", told.stdout, told.stderr).contains("line 2"), "{}", told.stdout);
    bed.mended("job-file", Code::JobFile, "command: [a, b\n", || GOOD.into());
    bed.host.ctl(&["check", file]).ok();
}

fn job_invalid(bed: &Bed) {
    let wrong = format!("{GOOD}limits: {{timeout: soon}}\n");
    bed.mended("job-invalid", Code::JobInvalid, &wrong, || format!("{GOOD}limits: {{timeout: 2h}}\n"));
}

fn job_unsupported(bed: &Bed) {
    bed.mended("unsupported", Code::JobUnsupported, "type: automl\ntask: regression\n", || GOOD.into());
}

fn job_not_found(bed: &Bed) {
    bed.refused(&["show", "no-such-job"], Code::JobNotFound);
    bed.run("found", GOOD).ok();
    let listed = bed.host.ctl(&["jobs", "--all", "--json"]).ok().json();
    bed.host.ctl(&["show", listed["jobs"][0]["job"].as_str().unwrap()]).ok();
}

fn job_conflict(bed: &Bed) {
    let named = format!("name: train-1\n{GOOD}");
    bed.run("conflict", &named).ok();
    bed.mended("conflict", Code::JobConflict, &named, || {
        bed.host.ctl(&["rm", "train-1"]).ok();
        named.clone()
    });
}

fn job_active(bed: &Bed) {
    let job = bed.host.submit("sleep 1000");
    bed.host.wait_for(&job, &["Running"]);
    bed.refused(&["rm", &job], Code::JobActive);
    bed.host.ctl(&["cancel", "--wait", &job]).ok();
    bed.host.ctl(&["rm", &job]).ok();
}

fn job_not_waiting(bed: &Bed) {
    let job = bed.host.submit("sleep 1000");
    bed.host.wait_for(&job, &["Running"]);
    bed.refused(&["hold", &job], Code::JobNotWaiting);
    bed.host.ctl(&["cancel", &job]).ok();
    bed.run("again", GOOD).ok();
}

fn job_never_due(bed: &Bed) {
    let first = bed.host.submit("exit 1");
    let dir = bed.host.project("due", &[("job.yml", GOOD)]);
    let after = bed.submit(&[dir.to_str().unwrap(), "--after", &first]);
    bed.host.wait_for(&after, &["Failed", "Canceled"]);
    assert_eq!(bed.host.show(&after)["fault"]["code"], Code::JobNeverDue.as_str());
    bed.host.ctl(&["why", &first]).ok();
    let again = bed.host.submit("true");
    let after = bed.submit(&[dir.to_str().unwrap(), "--after", &again]);
    bed.host.wait_for(&after, &["Completed"]);
}

fn session_refused(bed: &Bed) {
    let ended = bed.host.submit("true");
    bed.host.wait_for(&ended, &["Completed"]);
    bed.refused(&["exec", &ended, "--", "true"], Code::SessionRefused);
    let runs = bed.host.submit("sleep 1000");
    bed.host.wait_for(&runs, &["Running"]);
    assert_eq!(bed.host.ctl(&["exec", &runs, "--", "echo", "inside"]).ok().stdout.trim(), "inside");
    bed.host.ctl(&["cancel", &runs]).ok();
}

fn tasks_failed(bed: &Bed) {
    let (sign, dir) = (bed.host.home().join("sign"), bed.host.project("tasks", &[("t.sh", "")]));
    let command = format!("[ $AGENTD_ARRAY_INDEX = 0 ] || [ -e {} ]", sign.display());
    let job = bed.submit(&[dir.to_str().unwrap(), "--array", "0-1", "--", "sh", "-c", &command]);
    bed.host.wait_for(&job, &["Failed"]);
    assert_eq!(bed.host.show(&job)["fault"]["code"], Code::TasksFailed.as_str());
    bed.host.ctl(&["why", &format!("{job}[1]")]).ok();
    fs::write(sign, "").unwrap();
    let again = bed.host.ctl(&["rerun", &job, "--failed"]).ok().stdout.trim().to_owned();
    bed.host.ctl(&["wait", if again.is_empty() { "-" } else { &again }]).ok();
}

fn job_too_large(bed: &Bed) {
    let long = "x".repeat(100_000);
    let variables: String = (0..20).map(|number| format!("  V{number}: {long}\n")).collect();
    let wrong = format!("{GOOD}environment_variables:\n{variables}");
    let dir = bed.host.project("large", &[("job.yml", &wrong)]);
    let ran = bed.host.ctl(&["run", dir.to_str().unwrap()]);
    assert!(ran.code != 0 && ran.stderr.contains(Code::JobTooLarge.as_str()), "{}", ran.stderr);
    fs::write(dir.join("values.txt"), long).unwrap();
    fs::write(dir.join("job.yml"), "command: wc -c <values.txt; echo ran\nenvironment: host\ncode: .\n")
        .unwrap();
    assert_eq!(bed.host.ctl(&["run", dir.to_str().unwrap()]).ok().stdout, "100000\nran\n");
}

fn metric_missing(bed: &Bed) {
    let sweep = |logged: &str| {
        let dir = bed.host.project(
            "sweep",
            &[("t.sh", &format!("echo '{{\"metric\": \"{logged}\", \"value\": 1}}' >>$AGENTD_METRICS\n"))],
        );
        let words =
            ["sweep", dir.to_str().unwrap(), "--set", "lr=choice(1,2)", "--minimize", "loss", "--max", "1"];
        bed.host.ctl(&[&words[..], &["--", "sh", "t.sh"]].concat())
    };
    let ran = sweep("los");
    assert!(ran.code != 0 && ran.stderr.contains(Code::MetricMissing.as_str()), "{}", ran.stderr);
    sweep("loss").ok();
}

fn snapshot_unsafe(bed: &Bed) {
    let home = bed.host.home().to_str().unwrap();
    let words = ["run", home, "--", "echo", "ran"];
    let ran = bed.host.client(&words).env("HOME", home).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(!ran.status.success() && said.contains(Code::SnapshotUnsafe.as_str()), "{said}");
    bed.run("its-code", GOOD).ok();
}

fn with_input(path: &str, kind: &str) -> String {
    format!(
        "command: test -e ${{{{inputs.data}}}} && echo ran\nenvironment: host\ninputs:\n  data: {{type: {kind}, path: '{path}'}}\n"
    )
}

fn data_unknown(bed: &Bed) {
    let job = with_input("azureml://datastores/lab/paths/iris.csv", "uri_file");
    bed.mended("unknown", Code::DataUnknown, &job, || {
        fs::write(&bed.stores, format!("datastores:\n  lab: {{path: {}}}\n", bed.share.display())).unwrap();
        job.clone()
    });
}

fn data_absent(bed: &Bed) {
    let job = with_input("azureml://datastores/lab/paths/rose.csv", "uri_file");
    bed.mended("absent", Code::DataAbsent, &job, || {
        with_input("azureml://datastores/lab/paths/iris.csv", "uri_file")
    });
}

fn data_refused(bed: &Bed) {
    let address = "http://127.0.0.1:1/iris";
    bed.mended("refused", Code::DataRefused, &with_input(address, "uri_folder"), || {
        let map = format!("data_map:\n  '{address}': {}\n", bed.share.display());
        fs::write(&bed.stores, format!("datastores:\n  lab: {{path: {}}}\n{map}", bed.share.display()))
            .unwrap();
        with_input(address, "uri_folder")
    });
}

fn data_node(bed: &Bed) {
    let right = fs::read_to_string(&bed.stores).unwrap();
    fs::write(&bed.stores, "datastores: [\n").unwrap();
    let job = with_input("azureml://datastores/lab/paths/iris.csv", "uri_file");
    bed.mended("node", Code::DataNode, &job, || {
        fs::write(&bed.stores, right).unwrap();
        job.clone()
    });
}

fn asset_unknown(bed: &Bed) {
    let file = bed.share.join("iris.csv");
    let create = |version: &str| {
        bed.host.ctl(&["data", "create", "rose", file.to_str().unwrap(), "--version", version]).ok();
    };
    create("1");
    let job = with_input("azureml:rose:2", "uri_file");
    bed.mended("named-data", Code::AssetUnknown, &job, || {
        let known = bed.host.ctl(&["data", "show", "rose"]).ok().stdout;
        assert!(known.contains('1'), "{known}");
        create("2");
        job.clone()
    });
}

fn asset_invalid(bed: &Bed) {
    let file = bed.share.join("iris.csv");
    fs::write(&file, "3,4\n").unwrap();
    let create = ["data", "create", "rose", file.to_str().unwrap()];
    bed.refused(&[&create[..], &["--version", "1"]].concat(), Code::AssetInvalid);
    bed.host.ctl(&create).ok();
    assert!(bed.run("newest", &with_input("azureml:rose@latest", "uri_file")).ok().stdout.ends_with("ran\n"));
}

fn output_refused(bed: &Bed) {
    let job = "command: echo x >${{outputs.model}}/x; echo ran\nenvironment: host\noutputs:\n  model: {path: 'azureml://datastores/lab/paths/runs'}\n";
    bed.mended("output", Code::OutputRefused, job, || {
        let stores = format!("datastores:\n  lab: {{path: {}, writable: true}}\n", bed.share.display());
        fs::write(&bed.stores, stores).unwrap();
        job.to_owned()
    });
    assert!(bed.share.join("runs/x").exists());
}

fn python_missing(bed: &Bed) {
    let wrong = "command: echo ran\nenvironment: {python: /nowhere/python9.9}\n";
    bed.mended("python", Code::PythonMissing, wrong, || "command: echo ran\nenvironment: host\n".into());
}

fn env_unsatisfied(bed: &Bed) {
    let job = "command: echo ran\nenvironment: {python: python3, requirements: requirements.txt}\n";
    let dir = bed
        .host
        .project("packages", &[("job.yml", job), ("requirements.txt", "--no-index\nno-such-package==1\n")]);
    let run = || bed.host.ctl(&["run", dir.to_str().unwrap()]);
    let ran = run();
    assert!(ran.code != 0 && ran.stderr.contains(Code::EnvUnsatisfied.as_str()), "{}", ran.stderr);
    let job = bed.host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    bed.host.ctl(&["logs", "--build", &job]).ok();
    fs::write(dir.join("requirements.txt"), "--no-index\n").unwrap();
    run().ok();
}

fn env_lacks(bed: &Bed) {
    let dir = bed.host.project("lacks", &[("requirements.txt", "no-such-package\n")]);
    let wrong = "command: echo ran\nenvironment: {python: python3, requirements: requirements.txt, user_managed_dependencies: true}\n";
    fs::write(dir.join("job.yml"), wrong).unwrap();
    let run = || bed.host.ctl(&["run", dir.to_str().unwrap()]);
    let ran = run();
    assert!(ran.code != 0 && ran.stderr.contains(Code::EnvLacks.as_str()), "{}", ran.stderr);
    fs::write(dir.join("requirements.txt"), "pip\n").unwrap();
    run().ok();
}

fn env_unknown(bed: &Bed) {
    let wrong = "command: echo ran\nenvironment: azureml:no-such-environment@latest\n";
    bed.mended("named", Code::EnvUnknown, wrong, || GOOD.into());
}

fn command_failed(bed: &Bed) {
    bed.mended("failed", Code::CommandFailed, "command: echo so far; exit 3\nenvironment: host\n", || {
        let job =
            bed.host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
        assert_eq!(bed.host.ctl(&["logs", "-n", "50", &job]).ok().stdout, "so far\n");
        GOOD.into()
    });
}

fn command_not_found(bed: &Bed) {
    let dir = bed.host.project("script", &[("x", "")]);
    let words = ["run", dir.to_str().unwrap(), "--", "sh", "-c", "exec ./t.sh"];
    let ran = bed.host.ctl(&words);
    assert!(ran.code != 0 && ran.stderr.contains(Code::CommandNotFound.as_str()), "{}", ran.stderr);
    let listed = bed.host.ctl(&["run", dir.to_str().unwrap(), "--", "find", ".", "-type", "f"]).ok().stdout;
    assert!(listed.contains("./x") && !listed.contains("t.sh"), "{listed}");
    fs::write(dir.join("t.sh"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(dir.join("t.sh"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(bed.host.ctl(&words).ok().stdout, "ran\n");
}

fn command_signaled(bed: &Bed) {
    let job = |command: &str| format!("command: {command}\nenvironment: host\n");
    bed.mended("signaled", Code::CommandSignaled, &job("kill -9 $$"), || job("echo ran"));
}

fn time_limit(bed: &Bed) {
    let job = |limit: &str| {
        format!("command: sleep 3; echo ran\nenvironment: host\nlimits: {{timeout: {limit}}}\n")
    };
    bed.mended("limit", Code::TimeLimit, &job("1"), || job("6h"));
}
