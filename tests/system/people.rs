//! Two people share a box: each sees and ends what is his own.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;

use agent_tests::{Host, Ran, finish};

/// Users that every machine has, and their groups.
const NOBODY: u32 = 65534;
const DAEMON: u32 = 1;

/// A box with the daemon of a machine, which root runs and the group of `nobody` may use.
fn shared(operators: &str) -> Host {
    let mut host = Host::for_everybody();
    let home = host.home().to_owned();
    let socket = home.join("run.sock");
    let runner = home.join("runner");
    let script = format!(
        "#!/bin/sh\nexport AGENTD_SOCKET_GROUP=nogroup AGENTD_OPERATOR_GROUP={operators} AGENTD_ROOT_JOBS=true\n\
         exec \"$1\" run --state-dir {} --socket {}\n",
        host.state().display(),
        socket.display()
    );
    fs::write(&runner, script).unwrap();
    fs::set_permissions(&runner, Permissions::from_mode(0o755)).unwrap();
    let theirs = home.join("nobody");
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(NOBODY), Some(NOBODY)).unwrap();
    host.set("AGENTD_SOCKET", socket.to_str().unwrap());
    host.run_by(&runner);
    host.start();
    host
}

/// `agentctl` as somebody else.
fn by(host: &Host, user: u32, arguments: &[&str]) -> Ran {
    let theirs = host.home().join("nobody");
    let mut command = host.client(arguments);
    command.uid(user).gid(user).env("HOME", &theirs).env("XDG_CACHE_HOME", theirs.join("cache"));
    command.current_dir(&theirs);
    finish(&mut command)
}

#[test]
fn test_two_people_share_a_box() {
    let host = shared("");
    let dir = host.project("secret", &[("job.yml", "command: 'echo $TOKEN; sleep 600'\ncode: .\nenvironment: host\nenvironment_variables: {TOKEN: hunter2}\n")]);
    let roots = host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned();
    host.wait_for(&roots, &["Running"]);

    // What belongs to root is root's.
    for call in [
        &["show", &roots][..],
        &["logs", &roots],
        &["why", &roots],
        &["metrics", &roots],
        &["download", &roots],
        &["cancel", &roots],
        &["wait", &roots],
    ] {
        let ran = by(&host, NOBODY, call);
        assert!(ran.stderr.contains("NET-102") && ran.stderr.contains("is not yours"), "{call:?}: {ran:?}");
        assert!(!format!("{ran:?}").contains("hunter2"), "{call:?}: {ran:?}");
    }
    for call in [&["drain", "box"][..], &["gc"], &["gc", "--check"]] {
        let ran = by(&host, NOBODY, call);
        assert!(ran.code != 0 && !ran.stderr.contains("panicked"), "{call:?}: {ran:?}");
    }
    let listed = by(&host, NOBODY, &["jobs", "--json"]).ok();
    assert!(listed.stdout.contains(&roots) && !listed.stdout.contains("hunter2"), "{}", listed.stdout);
    assert_eq!(host.job_state(&roots), "Running");

    // Their own is theirs, and the operator's.
    let theirs = host.home().join("nobody/p");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join("job.yml"), "command: 'echo done > outputs/x'\ncode: .\nenvironment: host\n")
        .unwrap();
    let theirs = by(&host, NOBODY, &["submit", theirs.to_str().unwrap()]).ok().stdout.trim().to_owned();
    by(&host, NOBODY, &["wait", &theirs]).ok();
    by(&host, NOBODY, &["download", &theirs, "-o", "results"]).ok();
    assert_eq!(fs::read_to_string(host.home().join("nobody/results/outputs/x")).unwrap(), "done\n");
    assert_eq!(host.show(&theirs)["owner"], "nobody");
    let table = host.ctl(&["jobs"]).ok().stdout;
    assert!(table.contains("OWNER") && table.contains("nobody") && table.contains("root"), "{table}");

    // Who is not of the group does not even connect.
    by(&host, DAEMON, &["jobs"]).code(4).says("NET-102");
    host.ctl(&["cancel", &roots]).ok();
}

#[test]
fn test_an_operator_may_what_root_may() {
    let host = shared("nogroup");
    let roots = host.submit("sleep 600");
    host.wait_for(&roots, &["Running"]);
    by(&host, NOBODY, &["show", &roots]).ok();
    by(&host, NOBODY, &["gc", "--dry-run"]).ok();
    by(&host, NOBODY, &["cancel", &roots]).ok();
    host.wait_for(&roots, &["Canceled"]);
    let why = host.ctl(&["why", &roots]).ok().stdout;
    assert!(why.contains("canceled by nobody"), "{why}");
}

#[test]
fn test_fetched_data_is_read_by_all_and_written_by_none() {
    let host = shared("");
    agent_tests::copy_program(agent_tests::engine(), &host.home().join("bin/agent-env"));
    let server = crate::data::server::Server::started(crate::data::server::Manner::Plain);
    let theirs = host.home().join("nobody/p");
    fs::create_dir(&theirs).unwrap();
    let command = "head -n 1 ${{inputs.data}}; chmod u+w ${{inputs.data}} || (echo x >>${{inputs.data}}) || echo cannot write";
    let job = format!(
        "command: {}\nenvironment: host\ninputs: {{data: {{type: uri_file, path: '{}'}}}}\n",
        serde_json::Value::from(command),
        server.url("a.csv")
    );
    fs::write(theirs.join("job.yml"), job).unwrap();
    for _ in 0..2 {
        let ran = by(&host, NOBODY, &["run", theirs.to_str().unwrap()]).ok();
        assert!(ran.stdout.starts_with("version 1\n") && ran.stdout.ends_with("cannot write\n"), "{ran:?}");
    }
    assert_eq!(server.asked("GET"), 1);
    // A job that asks for a copy of its own gets one that it may change.
    let job =
        fs::read_to_string(theirs.join("job.yml")).unwrap().replace("uri_file,", "uri_file, mode: download,");
    fs::write(theirs.join("job.yml"), job).unwrap();
    let ran = by(&host, NOBODY, &["run", theirs.to_str().unwrap()]).ok();
    assert_eq!(ran.stdout, "version 1\n");
}
