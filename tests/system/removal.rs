//! Jobs go from the record when their owner says so, and what they left with them.

use agent_tests::Host;

fn names(host: &Host) -> Vec<String> {
    let listed = host.ctl(&["jobs", "--all", "--json"]).ok().json();
    listed["jobs"].as_array().unwrap().iter().map(|job| job["job"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn test_jobs_are_removed_with_what_they_left_and_their_names_are_free() {
    let mut host = Host::new();
    host.set("AGENTD_TEST_BLOB_LEASE", "1s");
    host.start();
    let dir = host.project("p", &[("a.txt", "a")]);
    let dir = dir.to_str().unwrap();
    let write = "printf 0123456789 > outputs/model; echo said";
    host.ctl(&["run", dir, "--name", "first", "--", "sh", "-c", write]).ok();
    host.ctl(&["run", dir, "--name", "second", "--", "false"]);
    host.ctl(&["run", dir, "--name", "third", "--", "false"]);
    let job = "experiment: apart\ncommand: 'true'\nname: fourth\nenvironment: host\n";
    let apart = host.project("apart", &[("job.yml", job)]);
    host.ctl(&["run", apart.to_str().unwrap()]).ok();
    host.ctl(&["submit", dir, "--name", "runs", "--", "sleep", "1000"]).ok();

    // What has not ended stays, and it is said how to end it.
    host.ctl(&["rm", "runs"]).code(1).says("JOB-106").says("agentctl cancel --wait runs");
    // By what they are only those that are meant, and nobody is asked without a terminal.
    host.ctl(&["rm", "--state", "failed"]).code(1).says("2 jobs").says("--yes");
    host.ctl(&["rm", "--state", "failed", "--older-than", "1h", "--yes"]).ok().says("you have no such job");
    host.ctl(&["rm", "--state", "failed", "--yes"]).ok().says("removed 2 jobs");
    host.ctl(&["rm", "--experiment", "apart", "--yes"]).ok().says("fourth: removed");
    assert_eq!(names(&host), ["runs", "first"]);

    host.ctl(&["run", dir, "--name", "first", "--", "true"]).code(125).says("agentctl rm first");
    host.ctl(&["rm", "first"]).ok().says("first: removed").says("10 B of outputs");
    for verb in ["show", "logs", "why", "metrics", "download"] {
        host.ctl(&[verb, "first"]).says("JOB-104");
    }
    std::thread::sleep(std::time::Duration::from_millis(1100)); // nothing of it is recent any more
    let collected = host.ctl(&["gc", "--all", "--json"]).ok().json();
    let outputs = collected["stays"].as_array().unwrap().iter().find(|stay| stay["reason"] == "outputs");
    assert!(outputs.is_none(), "{collected}");
    let again = host.ctl(&["run", dir, "--name", "first", "--", "echo", "anew"]).ok();
    assert_eq!(again.stdout, "anew\n");

    host.ctl(&["cancel", "--all"]).ok().says("runs: asked to end");
    host.ctl(&["wait", "runs"]).code(143);
    host.ctl(&["rm", "--all", "--yes"]).ok();
    assert_eq!(names(&host), [""; 0]);
    host.ctl(&["rm"]).code(2);
}
