//! What goes wrong is said: what, why and what to do, with the right exit code, and nothing stored is lost.

use std::fs;
use std::path::Path;

use agent_tests::bounds::SmallDisk;
use agent_tests::{Host, Ran};

/// The parts every fault shown to a person has.
#[track_caller]
fn fault(ran: Ran, code: &str) -> Ran {
    ran.says(&format!("error[{code}]")).says("fix:")
}

fn run(host: &Host, dir: &Path, command: &[&str]) -> Ran {
    let mut arguments = vec!["run", dir.to_str().unwrap()];
    if !command.is_empty() {
        arguments.push("--");
        arguments.extend(command);
    }
    host.ctl(&arguments)
}

#[test]
fn test_bad_job_files_name_line_and_column() {
    let host = Host::started();
    for (text, code, place) in [
        ("command: [a, b\ntype: command\n", "JOB-101", "line 2"),
        ("command: echo\nlimits: {timeout: soon}\n", "JOB-102", "line 2, column 19"),
        ("command: echo ${{inputs.x}}\n", "JOB-102", "inputs.x"),
        ("type: pipeline\njobs: {}\n", "JOB-102", "line 2"),
        ("jobs: {a: {type: automl}}\n", "JOB-103", "line 1, column 18"),
        ("type: command\n", "JOB-102", "command"),
    ] {
        let dir = host.project("bad", &[("job.yml", text)]);
        fault(run(&host, &dir, &[]).code(125), code).says(place);
    }
    let dir =
        host.project("unknown", &[("job.yml", "command: echo hi\nenviroment: host\nenvironment: host\n")]);
    fault(run(&host, &dir, &[]).code(125), "JOB-102").says("line 2").says("enviroment");
    let ran = host
        .ctl(&["run", "--allow-unknown", &dir.display().to_string()])
        .ok()
        .says("line 2")
        .says("enviroment");
    assert_eq!(ran.stdout, "hi\n");
}

#[test]
fn test_directory_that_is_not_there() {
    let host = Host::started();
    let ran = host.ctl(&["run", "nowhere", "--", "true"]);
    ran.code(125).says("nowhere").says("error[");
}

#[test]
fn test_missing_script_and_missing_command() {
    let host = Host::started();
    let dir = host.project("p", &[("x", "")]);
    fault(run(&host, &dir, &["python", "nowhere.py"]).code(2), "RUN-102").says("nowhere.py");
    fault(run(&host, &dir, &["no-such-command"]).code(127), "RUN-102").says("no-such-command");
}

#[test]
fn test_a_failing_script_gives_its_code_and_its_last_words() {
    let host = Host::started();
    let dir = host.project("p", &[("t.py", "print('so far')\nraise ValueError('too few rows')\n")]);
    let ran = run(&host, &dir, &["python", "t.py"]).code(1);
    assert!(ran.stdout.starts_with("so far\n"), "{}", ran.stdout);
    fault(ran, "RUN-101").says("the command returned 1").says("too few rows");
    let told = host.show("-")["fault"].clone();
    let why: Vec<&str> = told["why"].as_array().unwrap().iter().filter_map(|line| line.as_str()).collect();
    assert!(why.first() == Some(&"so far") && why.last() == Some(&"ValueError: too few rows"), "{told}");
    fault(run(&host, &dir, &["sh", "-c", "kill -9 $$"]).code(137), "RUN-103").says("9");
}

#[test]
fn test_whoever_follows_or_waits_gets_the_verdict_and_nothing_else_looks_like_it() {
    let host = Host::started();
    let jobs = ["exit 0", "exit 1", "kill -9 $$"].map(|command| host.submit(command));
    for (job, code) in jobs.iter().zip([0, 1, 137]) {
        let said = format!("exit code {code}");
        host.ctl(&["logs", "-f", job]).code(code).says(job).says(&said);
        host.ctl(&["wait", job]).code(code).says(job).says(&said);
    }
    fault(host.ctl(&["wait", &jobs[1]]).code(1), "RUN-101");
    let [good, bad, killed] = &jobs;
    host.ctl(&["wait", good, killed, bad]).code(137).says(bad);
    let long = host.submit("sleep 1000");
    host.ctl(&["wait", good, &long, "--timeout", "1"]).code(124).says("goes on");
    for own in
        [&["wait", "no-such-job"][..], &["logs", "-f", "no-such-job"], &["run", "--no-such-flag"], &["wait"]]
    {
        assert_eq!(host.ctl(own).code, 125, "{own:?}");
    }
    host.ctl(&["cancel", &long]).ok();
    host.ctl(&["wait", &long]).code(143).says("Canceled");
}

#[test]
fn test_python_that_is_not_there() {
    let host = Host::started();
    let dir =
        host.project("p", &[("job.yml", "command: python x\nenvironment: {python: /nowhere/python9.9}\n")]);
    fault(run(&host, &dir, &[]).code(125), "ENV-101").says("python9.9");
}

#[test]
fn test_package_that_is_not_there() {
    let host = Host::started();
    let lines = "--no-index\nagentd-no-such-package==1.0\n";
    let dir = host.project("p", &[("requirements.txt", lines), ("t.py", "")]);
    fault(run(&host, &dir, &["python", "t.py"]).code(125), "ENV-103").says("agentd-no-such-package");
}

#[test]
fn test_full_disk_is_said_and_nothing_stored_is_lost() {
    let small = SmallDisk::mount("size=48m,mode=700");
    let mut host = Host::new();
    host.set("AGENTD_STATE_DIR", small.path().to_str().unwrap());
    host.set("AGENTD_SOCKET", small.path().join("agentd.sock").to_str().unwrap());
    host.set("AGENTD_DISK_RESERVE", "8m");
    host.start();
    let kept = host.submit("echo kept; printf x > outputs/kept");
    host.wait_for(&kept, &["Completed"]);

    let dir = host.project("big", &[("t.py", "")]);
    fs::write(dir.join("big.bin"), vec![7; 40 << 20]).unwrap();
    let ran = run(&host, &dir, &["python", "t.py"]);
    assert!(ran.code == 1 || ran.code == 125, "{}: {}", ran.code, ran.stderr);
    ran.says("error[").says("disk");

    // A job that fills the disk itself ends; the box still answers, stores results and runs the next one.
    let fill =
        host.submit("head -c 60m /dev/zero > outputs/fill; echo filled; rm -f outputs/fill; echo removed");
    host.wait_for(&fill, &["Completed", "Failed"]);
    assert_eq!(host.ctl(&["logs", &kept]).ok().stdout, "kept\n");
    let after = host.submit("echo after");
    host.wait_for(&after, &["Completed"]);
    host.ctl(&["status"]).ok();
    host.kill();
}

#[test]
fn test_daemon_gone_is_said_and_found_again() {
    let mut host = Host::started();
    let job = host.submit("echo hello");
    host.wait_for(&job, &["Completed"]);
    host.kill();
    fault(host.ctl(&["jobs"]).code(4), "NET-101");
    fault(host.ctl(&["logs", &job]).code(4), "NET-101");
    host.start();
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "hello\n");
    fault(host.ctl(&["show", "no-such-job"]).code(1), "JOB-104").says("no-such-job");
    assert_eq!(host.ctl(&["no-such-verb"]).code, 2);
}

#[test]
fn test_every_code_is_explained() {
    let host = Host::new();
    for code in agent_model::Code::ALL {
        let page = host.ctl(&["explain", code.as_str()]).ok().stdout;
        assert!(page.contains(code.as_str()), "{page}");
    }
}
