//! One environment for many jobs: built once, followed by all, ended when nobody wants it any more.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use agent_tests::{SOON, eventually};

use super::site::{Site, conda_file, files_below};

fn files_of_environments(site: &Site) -> BTreeSet<PathBuf> {
    let mut files = files_below(&site.host.state().join("envs"));
    files.extend(files_below(&site.host.state().join("packages")));
    files
}

/// Slow enough that a build can be met at work, for a few seconds.
const SLOW: &str = "slow~2000000";

#[test]
fn test_cancel_while_building_leaves_no_process_and_no_new_file() {
    let site = Site::started();
    site.channel.set("slow~300000");
    let job = site.submit("p", &conda_file(&["python", "tiny-one"], &[]), "true");
    let engine = site.building();
    eventually("packages arrive", SOON, || (site.packages_served() > 0).then_some(()));
    site.host.ctl(&["cancel", "--wait", &job]).ok();
    assert_eq!(site.host.job_state(&job), "Canceled");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(site.engines(), Vec::<u32>::new(), "engine {engine} goes on");
    let before = files_of_environments(&site);
    std::thread::sleep(Duration::from_secs(2));
    let new: Vec<PathBuf> = files_of_environments(&site).difference(&before).cloned().collect();
    assert_eq!(new, Vec::<PathBuf>::new(), "files that came after the end");
    // What was asked for again is built.
    site.channel.set("plain");
    site.run("p", &conda_file(&["python", "tiny-one"], &[]), "python -c 'import tiny_one'").ok();
}

#[test]
fn test_the_first_of_three_followers_leaves_and_the_others_get_the_environment() {
    let mut site = Site::new();
    site.host.set("AGENTD_SLOTS", "3");
    site.host.start();
    site.channel.set(SLOW);
    let file = conda_file(&["python", "tiny-one"], &[]);
    let first = site.submit("p", &file, "python -c 'import tiny_one'");
    eventually("packages arrive", SOON, || (site.packages_served() > 0).then_some(()));
    let engine = site.building(); // what says what the machine offers is over by now
    let others = [0, 1].map(|_| site.submit("p", &file, "python -c 'import tiny_one'"));
    others.iter().for_each(|job| drop(site.host.wait_for(job, &["Preparing"])));
    site.host.ctl(&["cancel", "--wait", &first]).ok();
    assert_eq!(site.engines(), [engine], "the build went on as it was");
    site.channel.set("plain");
    for job in &others {
        assert_eq!(site.ended(job), "Completed");
        let log = site.host.ctl(&["logs", "--build", job]).ok().stdout;
        assert!(log.contains("choosing packages") && log.contains("linking packages"), "{log}");
    }
    assert_eq!(site.host.job_state(&first), "Canceled");
}

#[test]
fn test_twenty_jobs_share_a_build_whose_builder_is_killed_three_times() {
    let mut site = Site::new();
    site.host.set("AGENTD_SLOTS", "20");
    site.host.start();
    site.channel.set(SLOW);
    let file = conda_file(&["python", "tiny-two"], &[]);
    let jobs: Vec<String> = (0..20)
        .map(|_| site.submit("p", &file, "python -c 'import tiny_two; print(tiny_two.__version__)'"))
        .collect();
    for round in 0..3 {
        let engine = site.building();
        std::thread::sleep(Duration::from_millis(150 + 250 * round));
        agent_tests::signal(engine, rustix::process::Signal::KILL);
        eventually("it is gone", SOON, || (!site.engines().contains(&engine)).then_some(()));
    }
    site.channel.set("plain");
    let mut logs = BTreeSet::new();
    for job in &jobs {
        assert_eq!(site.ended(job), "Completed", "{}", site.host.show(job));
        assert_eq!(site.host.ctl(&["logs", job]).ok().stdout, "1.0\n");
        logs.insert(site.host.ctl(&["logs", "--build", job]).ok().stdout);
    }
    for log in &logs {
        assert!(log.contains("choosing packages") && log.contains("linking packages"), "{log}");
    }
    assert_eq!(super::site::kept(&site.host).len(), 1);
    println!("20 jobs, 3 kills of the builder: 1 environment, {} different build logs", logs.len());
}

#[test]
fn test_progress_is_told_while_it_is_built() {
    let site = Site::started();
    site.channel.set("slow~1000000");
    let job = site.submit("p", &conda_file(&["python", "tiny-one"], &[]), "true");
    eventually("the download is told", SOON, || {
        site.host.show(&job)["detail"].as_str()?.contains("downloading packages").then_some(())
    });
    site.channel.set("plain");
    assert_eq!(site.ended(&job), "Completed");
}

#[test]
fn test_a_restart_of_the_daemon_in_each_phase_of_a_build() {
    let mut site = Site::new();
    site.host.start();
    for (number, phase) in
        ["reading what channels offer", "downloading packages", "linking packages", "installing pip packages"]
            .into_iter()
            .enumerate()
    {
        site.channel.set("slow~1000000");
        let file = conda_file(&["python", "pip", &format!("tiny-one >=0.{number}")], &["tiny-two"]);
        let job = site.submit("p", &file, "python -c 'import tiny_one, tiny_two'");
        // Some phases are over at once: then it is met in whatever comes.
        let seen = phase_seen(&site, &job, phase);
        site.host.kill();
        site.channel.set("plain");
        site.host.start();
        assert_eq!(site.ended(&job), "Completed", "killed {seen:?} of {phase}: {}", site.host.show(&job));
    }
    assert_eq!(site.engines(), Vec::<u32>::new());
}

/// Waits until the build is in this phase, or further.
fn phase_seen(site: &Site, job: &str, phase: &str) -> bool {
    eventually("the phase", 3 * SOON, || {
        let shown = site.host.show(job);
        let detail = shown["detail"].as_str().unwrap_or_default().to_owned();
        let state = shown["state"].as_str().unwrap_or_default().to_owned();
        match detail.contains(phase) {
            true => Some(true),
            false => (!["Queued", "Preparing"].contains(&state.as_str())).then_some(false),
        }
    })
}
