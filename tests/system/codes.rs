//! What scripts see of a job: its exit code and the line that says how it ended, apart from what goes wrong here.

use std::process::Stdio;

use agent_tests::{Host, SOON, eventually};
use serde_json::Value;

#[test]
fn test_exit_codes_tell_the_job_from_the_client() {
    let host = Host::started();
    let dir = host.project("p", &[("t.sh", "echo out; exit $1\n")]);
    let dir = dir.to_str().unwrap();
    let submit =
        |code: &str| host.ctl(&["submit", dir, "--", "sh", "t.sh", code]).ok().stdout.trim().to_owned();
    let (good, bad) = (submit("0"), submit("3"));

    // Who follows, or waits, learns how it ended, whenever he comes.
    for _ in 0..2 {
        let ran = host.ctl(&["logs", "-f", &bad]).code(3);
        assert_eq!(ran.stdout, "out\n");
        ran.says(&format!("{bad} Failed after")).says("exit code 3").says("RUN-101");
        host.ctl(&["wait", &bad]).code(3).says(&format!("{bad} Failed after"));
    }
    host.ctl(&["logs", "-f", &good]).ok().says(&format!("{good} Completed after"));
    host.ctl(&["wait", &good, &bad]).code(3).says("Completed").says("Failed");
    assert_eq!(host.ctl(&["logs", &bad]).ok().stdout, "out\n");

    // A script's 1 is told from a refusal by the code alone.
    host.ctl(&["run", dir, "--", "sh", "t.sh", "1"]).code(1).says("exit code 1");
    host.ctl(&["run", &format!("{dir}/nowhere"), "--", "true"]).code(125).says("error[JOB-101]");
    for line in [
        &["run", "--bogus"][..],
        &["wait"],
        &["logs", "-f"],
        &["logs", "-f", "no-such"],
        &["wait", "no-such"],
    ] {
        host.ctl(line).code(125).says("error");
    }
    host.ctl(&["logs", "no-such"]).code(1).says("JOB-104");
    host.ctl(&["jobs", "--bogus"]).code(2);
    let help = host.ctl(&["--help"]).ok().stdout;
    assert!(help.contains("  125  ") && help.contains("  4    no daemon answers"), "{help}");

    // A wait has its own end.
    let long = host.submit("sleep 600");
    host.ctl(&["wait", &long, "--timeout", "1"]).code(124).says("goes on");
    host.ctl(&["cancel", &long]).ok();
    host.ctl(&["wait", &long]).code(143).says("Canceled");
    host.ctl(&["stop"]).ok();
    host.ctl(&["jobs"]).code(4);
    host.ctl(&["wait", &long]).code(125);
}

#[test]
fn test_interrupt_while_files_are_read_leaves_no_job() {
    let host = Host::started();
    let dir = host.project("p", &[("t.py", "")]);
    // It takes minutes to read, and no room.
    let huge = std::fs::File::create(dir.join("huge")).unwrap();
    huge.set_len(200 << 30).unwrap();
    for verb in ["run", "submit"] {
        let mut client = host.client(&[verb, dir.to_str().unwrap(), "--", "true"]);
        let child = client.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let open = format!("/proc/{}/fd", child.id());
        eventually("the file is read", SOON, || {
            let files = std::fs::read_dir(&open).ok()?.flatten();
            let mut files = files.filter_map(|entry| std::fs::read_link(entry.path()).ok());
            files.any(|path| path.ends_with("huge")).then_some(())
        });
        agent_tests::signal(child.id(), rustix::process::Signal::INT);
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(130), "{said}");
        assert!(said.contains("no job was submitted"), "{said}");
    }
    let jobs = host.ctl(&["jobs", "--json"]).ok().json();
    assert_eq!(jobs["jobs"].as_array().unwrap().len(), 0, "{jobs}");
}

#[test]
fn test_codes_that_a_job_file_calls_a_success_are_one_for_everybody() {
    let host = Host::started();
    let file = "command: echo ran; exit ${{inputs.code}}\nenvironment: host\ninputs: {code: 3}\nretry: {max_attempts: 3}\n\
                success_exit_codes: [3, 75]\n";
    let dir = host.project("p", &[("job.yml", file)]);
    let dir = dir.to_str().unwrap();
    host.ctl(&["run", dir]).ok().says("Completed");
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    let shown = host.show(&job);
    assert_eq!(
        (&shown["state"], &shown["exit_code"], &shown["fault"]),
        (&"Completed".into(), &3.into(), &Value::Null)
    );
    assert_eq!(
        (&shown["attempt"], &shown["spec"]["success_exit_codes"]),
        (&1.into(), &serde_json::json!([3, 75]))
    );
    let again = host.ctl(&["show", &job, "--as-job"]).ok().stdout;
    assert!(again.contains("success_exit_codes"), "{again}");
    host.ctl(&["wait", &job]).ok();
    let after =
        host.ctl(&["submit", dir, "--after", &job, "--set", "inputs.code=4"]).ok().stdout.trim().to_owned();
    host.ctl(&["wait", &after]).code(4).says("RUN-101");
    let array = host.ctl(&["submit", dir, "--array", "0-1"]).ok().stdout.trim().to_owned();
    host.ctl(&["wait", &array]).ok();
    let wrong = host.project("wrong", &[("job.yml", "command: echo\nsuccess_exit_codes: [300]\n")]);
    host.ctl(&["run", wrong.to_str().unwrap()]).code(125).says("error[JOB-102]").says("line 2").says("`300`");
}
