//! What one user may have at a time.

use std::fs;

use agent_tests::{SOON, eventually};

use super::Site;

#[test]
fn test_a_user_at_a_limit_waits_for_the_own_jobs_and_nobody_else_does() {
    let mut site = Site::with(&[("AGENTD_LIMITS_PER_USER", "jobs=1")]);
    ["ada", "bob"].iter().for_each(|user| site.add_user(user, "submit"));
    site.add_node("n0", "127.0.0.1");
    let gate = site.path("gate");
    let waits = format!("command: 'while ! [ -e {} ]; do sleep 0.05; done'\n", gate.display());
    let submit = |user: &str| {
        let project = site.project(user, &waits);
        site.by(user, &["submit", &project]).ok().stdout.trim().to_owned()
    };
    let state =
        |job: &str| site.json(&["show", job, "--json"])["state"].as_str().unwrap_or_default().to_owned();
    let runs = |job: &str| eventually("it runs", SOON, || (state(job) == "Running").then_some(()));
    let (first, second) = (submit("ada"), submit("ada"));
    runs(&first);
    let others = submit("bob");
    runs(&others);
    assert_eq!(state(&second), "Queued");
    let why = site.by("ada", &["why", &second]).ok().stdout;
    for part in ["user ada has 1 job already", "`limits_per_user`", "allows 1 job at a time"] {
        assert!(why.split_whitespace().collect::<Vec<_>>().join(" ").contains(part), "no `{part}` in {why}");
    }
    let jobs = site.by("ada", &["jobs"]).ok().stdout;
    assert!(jobs.contains("limits_per_user") || jobs.contains("user ada has"), "{jobs}");

    site.by("ada", &["cancel", "--wait", &first]).ok();
    runs(&second);
    fs::write(&gate, "").unwrap();
    for job in [&second, &others] {
        eventually("it ends", SOON, || (state(job) == "Completed").then_some(()));
    }
}
