//! What whoever keeps a machine asks of the daemon: another configuration without an end, and word of every job.

use std::fs;

use agent_tests::{Host, SOON, eventually, signal};
use rustix::process::Signal;

#[test]
fn test_hangup_reads_the_configuration_anew_and_ends_nothing() {
    let mut host = Host::new();
    let dir = host.home().join("config");
    host.set("XDG_CONFIG_HOME", dir.to_str().unwrap());
    let write = |text: &str| {
        fs::create_dir_all(dir.join("agentd")).unwrap();
        fs::write(dir.join("agentd/agentd.yaml"), text).unwrap();
    };
    write("log: warn\n");
    host.start();
    let pid = host.pid();
    let told = |what: &str, text: &str| {
        signal(pid, Signal::HUP);
        eventually(what, SOON, || host.log().contains(text).then_some(()));
    };
    // Nothing is told of jobs as long as only warnings are.
    let quiet = host.submit("true");
    host.wait_for(&quiet, &["Completed"]);
    write("log: [\n");
    told("a bad file is told", "cannot read configuration anew: everything stays as it was");
    write("log: info\nslots: 5\n");
    told("what counts later is named", "after_restart=\"slots\"");
    let job = host.submit("exit 3");
    host.wait_for(&job, &["Failed"]);
    for line in [format!("queued job job={job} who="), format!("ended job job={job} state=\"Failed\" exit=3")]
    {
        eventually("both ends of a job are told", SOON, || host.log().contains(&line).then_some(()));
    }
    assert!(!host.log().contains(&format!("job={quiet}")), "{}", host.log());
    assert_eq!((host.pid(), host.stop()), (pid, 0));
}
