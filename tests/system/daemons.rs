//! Which daemon answers where there may be two, and none that nobody asked for.

use std::os::unix::fs::symlink;
use std::process::Command;

use agent_tests::{Host, Ran, finish};

/// `agentctl` on a machine whose `/run` holds nothing but the directory of a service, made by `prepare`.
#[allow(clippy::disallowed_methods, reason = "gives what it tests a machine of its own")]
fn on_a_machine_with_a_service(host: &Host, prepare: &str, arguments: &[&str]) -> Ran {
    let client = host.client(arguments);
    let mut command = Command::new("unshare");
    let script = format!("mount -t tmpfs none /run && mkdir /run/agentd && {prepare} && exec \"$@\"");
    command.args(["--mount", "sh", "-c", &script, "sh"]).arg(client.get_program()).args(client.get_args());
    for (name, value) in client.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    finish(command.current_dir(host.home()))
}

#[test]
fn test_no_daemon_is_started_beside_a_service() {
    let host = Host::new();
    let dir = host.project("p", &[("t.py", "")]);
    let dir = dir.to_str().unwrap();
    for (line, code) in
        [(&["run", dir, "--", "true"][..], 125), (&["submit", dir, "--", "true"], 4), (&["status"], 4)]
    {
        let ran = on_a_machine_with_a_service(&host, "true", line).code(code).says("error[NET-101]");
        // Long lines are wrapped.
        let said = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        for told in [
            "installed here as a service",
            ": /run/agentd",
            "sudo systemctl start agentd",
            "agentd run --user",
        ] {
            assert!(said.contains(told), "no `{told}` in {said}");
        }
    }
    assert!(!host.state().exists(), "nothing was started");

    // One's own that runs is spoken to.
    let mut host = host;
    host.start();
    on_a_machine_with_a_service(&host, "true", &["run", dir, "--", "true"]).ok();
}

#[test]
fn test_answers_name_the_daemon_and_the_other_one() {
    let (own, service) = (Host::started(), Host::started());
    // Once a job ran, the node has joined.
    let dir = own.project("p", &[("t.py", "")]);
    own.ctl(&["run", dir.to_str().unwrap(), "--", "true"]).ok();
    let [at, other] = [&own, &service].map(|host| host.state().join("agentd.sock"));
    let link = own.home().join("service");
    symlink(&other, &link).unwrap();
    let prepare = format!("ln -s {} /run/agentd/agentd.sock", other.display());
    let ask = |line: &[&str]| on_a_machine_with_a_service(&own, &prepare, line).ok();
    let who = format!("the daemon of root at {}", at.display());
    let too = "the daemon of root at /run/agentd/agentd.sock runs on this machine too";
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");

    let told = flat(&ask(&["status"]).stdout);
    assert!(told.contains(" of root, up ") && told.contains(&at.display().to_string()), "{told}");
    assert!(told.contains(too), "{told}");
    let told = ask(&["status", "--json"]).json();
    assert_eq!(
        (&told["user"], &told["others"][0]["socket"]),
        (&"root".into(), &"/run/agentd/agentd.sock".into())
    );
    for line in [&["drain"][..], &["undrain"], &["stop"]] {
        let told = flat(&ask(line).stderr);
        assert!(told.contains(&who) && told.contains(too), "{line:?}: {told}");
    }
    assert!(flat(&own.ctl(&["status"]).code(4).stderr).contains(&at.display().to_string()));

    // With one's own gone the service answers, and says that it does; by another path it is still the same one.
    let told = ask(&["status", "--json"]).json();
    assert_eq!(
        (&told["socket"], &told["others"]),
        (&"/run/agentd/agentd.sock".into(), &serde_json::json!([]))
    );
    let told = ask(&["--socket", link.to_str().unwrap(), "status", "--json"]).json();
    assert_eq!(told["others"], serde_json::json!([]));
}
