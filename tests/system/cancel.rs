//! Cancel cancels.

use std::fs;
use std::time::{Duration, Instant};

use agent_tests::{Host, SOON, eventually};

/// A main process, a child that ignores TERM, and a grandchild in its own session that ignores it too.
const FAMILY: &str = r#"
import os, signal, sys, time
def stay(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    open(os.environ["WITNESS"] + "." + name, "w").write(str(os.getpid()))
    time.sleep(1000)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            stay("grandchild")
        os._exit(0)
    stay("child")
open(os.environ["WITNESS"] + ".main", "w").write(str(os.getpid()))
print("up", flush=True)
time.sleep(1000)
"#;

#[test]
fn test_cancel_leaves_no_process_of_the_family() {
    let host = Host::started();
    let witness = host.home().join("pid").display().to_string();
    let job = format!(
        "command: python family.py\ncode: .\nenvironment: host\nenvironment_variables: {{WITNESS: {witness}}}\nlimits: {{grace: 1}}\n"
    );
    let code = host.project("p", &[("job.yml", &job), ("family.py", FAMILY)]);
    let job = host.ctl(&["submit", code.to_str().unwrap()]).ok().stdout.trim().to_owned();
    let pids: Vec<u32> = ["main", "child", "grandchild"]
        .iter()
        .map(|name| {
            eventually(&format!("{name} runs"), SOON, || {
                fs::read_to_string(format!("{witness}.{name}")).ok()?.parse().ok()
            })
        })
        .collect();
    host.ctl(&["cancel", &job]).ok();
    host.wait_for(&job, &["Canceled"]);
    for pid in pids {
        assert!(!fs::exists(format!("/proc/{pid}")).unwrap(), "process {pid} is left");
    }
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "up\n");
    // Asking again, or asking of an ended job, changes nothing and is no error.
    host.ctl(&["cancel", &job]).ok();
    assert_eq!(host.job_state(&job), "Canceled");
}

#[test]
fn test_cancel_of_a_waiting_job_ends_it_at_once() {
    let host = Host::started();
    let first = [host.submit("sleep 1000"), host.submit("sleep 1000")];
    let waiting = host.submit("echo never");
    host.ctl(&["cancel", &waiting]).ok();
    assert_eq!(host.job_state(&waiting), "Canceled");
    first.iter().for_each(|job| drop(host.ctl(&["cancel", job]).ok()));
    first.iter().for_each(|job| drop(host.wait_for(job, &["Canceled"])));
    assert_eq!(host.ctl(&["logs", &waiting]).ok().stdout, "");
}

#[test]
fn test_a_job_that_ends_itself_on_term_is_given_the_time() {
    let host = Host::started();
    let job = host.submit("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done");
    eventually("the job is up", SOON, || host.ctl(&["logs", &job]).ok().stdout.contains("up").then_some(()));
    let asked = Instant::now();
    host.ctl(&["cancel", &job]).ok();
    host.wait_for(&job, &["Canceled"]);
    assert!(asked.elapsed() < Duration::from_secs(25), "the whole grace was waited for");
    let log = host.ctl(&["logs", &job]).ok().stdout; // the shell may have told of its child, too
    assert!(log.starts_with("up\n") && log.ends_with("saved\n"), "{log}");
}

#[test]
fn test_cancel_while_the_environment_is_built() {
    let host = Host::started();
    let dir = host.project("slow", &[("pkg/pyproject.toml", PYPROJECT), ("pkg/backend.py", BACKEND)]);
    let requirement = format!("slow @ file://{}\n", dir.join("pkg").display());
    let code = host.project("p", &[("requirements.txt", &requirement), ("t.py", "")]);
    let job =
        host.ctl(&["submit", code.to_str().unwrap(), "--", "python", "t.py"]).ok().stdout.trim().to_owned();
    eventually("the build runs", SOON, || host.home().join("slow/pkg/building").exists().then_some(()));
    host.ctl(&["cancel", &job]).ok();
    host.wait_for(&job, &["Canceled"]);
    eventually("the builder is gone", SOON, || {
        let left = host.processes();
        left.iter()
            .all(|pid| {
                !fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().contains("pip")
            })
            .then_some(())
    });
}

const PYPROJECT: &str =
    "[build-system]\nrequires = []\nbuild-backend = \"backend\"\nbackend-path = [\".\"]\n";
const BACKEND: &str =
    "import pathlib, time\npathlib.Path(__file__).with_name('building').touch()\ntime.sleep(1000)\n";
