//! Environments make room for each other, and never under a job.

use std::fs;

use agent_tests::{SOON, eventually};

use super::site::{self, Site, conda_file, kept};

fn keys(site: &Site) -> Vec<String> {
    kept(&site.host).iter().map(|one| one["key"].as_str().expect("a key").to_owned()).collect()
}

/// Builds an environment of its own and gives its key.
#[track_caller]
fn build(site: &Site, number: usize) -> String {
    let before = keys(site);
    let file = conda_file(&["python", &format!("tiny-one >=0.{number}")], &[]);
    site.run(&format!("p{number}"), &file, "python -c 'import tiny_one'").ok();
    eventually("the new one is told", SOON, || keys(site).into_iter().find(|key| !before.contains(key)))
}

#[test]
fn test_the_least_recently_used_goes_when_there_is_no_room() {
    let mut site = Site::started();
    let first = build(&site, 0);
    let pinned = build(&site, 1);
    site.host.ctl(&["envs", "pin", &pinned]).ok();
    let used = build(&site, 2);
    // A job that goes on uses the third.
    let gate = site.host.home().join("gate");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let job = site.submit("p2", &conda_file(&["python", "tiny-one >=0.2"], &[]), &wait);
    eventually("it runs", SOON, || (site.host.job_state(&job) == "Running").then_some(()));
    // No room at all: whatever may go, goes, and is built again by the next job that wants it.
    site.host.kill();
    site.host.set("AGENTD_ENVIRONMENTS_SIZE", "1MiB");
    site.host.start();
    eventually("the first is gone", 3 * SOON, || {
        let now = keys(&site);
        (now.contains(&pinned) && !now.contains(&first)).then_some(())
    });
    assert!(site.host.log().contains("removed an environment to make room"));
    let left = keys(&site);
    assert!(left.contains(&pinned) && left.contains(&used), "{left:?}");
    fs::write(&gate, "").unwrap();
    assert_eq!(site.ended(&job), "Completed");
    eventually("what was used goes, too", 3 * SOON, || (!keys(&site).contains(&used)).then_some(()));
    assert!(keys(&site).contains(&pinned));
    let is_trash = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with(".trash");
    let envs = site.host.state().join("envs");
    eventually("the trash is gone", SOON, || {
        (!fs::read_dir(&envs).unwrap().flatten().any(is_trash)).then_some(())
    });
    site.run("p0", &conda_file(&["python", "tiny-one >=0.0"], &[]), "python -c 'import tiny_one'").ok();
}

#[test]
fn test_room_is_made_while_jobs_start() {
    let mut site = Site::new();
    site.host.set("AGENTD_ENVIRONMENTS_SIZE", "1MiB");
    site.host.set("AGENTD_SLOTS", "4");
    site.host.start();
    let jobs: Vec<String> = (0..12)
        .map(|number| {
            let file = conda_file(&["python", &format!("tiny-one >=0.{}", number % 3)], &[]);
            site.submit(
                &format!("p{}", number % 3),
                &file,
                "sleep 0.3; python -c 'import tiny_one, json, ssl'",
            )
        })
        .collect();
    for job in &jobs {
        assert_eq!(site.ended(job), "Completed", "{}", site.host.show(job));
    }
}

#[test]
fn test_a_job_that_writes_into_its_environment_changes_no_other() {
    let site = Site::started();
    let one = format!("channels: ['{}']\ndependencies: [writable]\n", site::traps());
    let other = one.replace("[writable]", "[writable, layered]");
    site.run("p", &one, "echo changed >> $CONDA_PREFIX/share/writable.txt || true").code(0);
    let ran = site.run("q", &other, "cat $CONDA_PREFIX/share/writable.txt").ok();
    assert_eq!(ran.stdout, "as it was made\n");
}

#[test]
fn test_an_environment_that_lost_a_file_is_built_again() {
    let site = Site::started();
    let file = conda_file(&["python", "tiny-one"], &[]);
    let ran = site.run("p", &file, "python -c 'import tiny_one; print(tiny_one.__file__)'").ok();
    let module = ran.stdout.trim().to_owned();
    site.run("p", &file, &format!("rm {module}")).ok();
    let ran = site.run("p", &file, "python -c 'import tiny_one'");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(site::kept(&site.host).len(), 1);
}
