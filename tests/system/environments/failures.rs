//! What keeps an environment from being built is said in the words of the user, and remembered only while it is
//! true.

use std::fs;
use std::path::Path;

use agent_tests::{SOON, eventually};

use super::site::{self, Site, conda_file, files_below};

/// Two packages that cannot be together.
fn conflict() -> String {
    let traps = site::traps();
    format!("channels: ['{traps}']\ndependencies:\n  - left\n  # not with the one above\n  - right\n")
}

#[test]
fn test_what_cannot_be_satisfied_is_explained_with_its_line_and_remembered() {
    let site = Site::started();
    let ran = site.run("p", &conflict(), "true").code(125).says("error[ENV-103]").says("fix:");
    let ran = ran.says("conda.yml, line 5").says("right").says("shared-base");
    let job = site.host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    let why = site.host.ctl(&["why", &job]).ok().stdout;
    for words in ["ENV-103", "conda.yml, line 5", "shared-base"] {
        assert!(why.contains(words), "`why` does not say `{words}`:\n{why}");
    }
    // The same again is known already: nobody is asked.
    site.channel.clear();
    let again = site.run("p", &conflict(), "true").code(125).says("error[ENV-103]").says("shared-base");
    assert_eq!(site.asked(), Vec::<String>::new(), "{}", ran.stderr);
    drop(again);
    // What is written better is built at once.
    site.run("p", &format!("channels: ['{}']\ndependencies: [left]\n", site::traps()), "true").ok();
}

#[test]
fn test_what_is_nowhere_is_named_with_its_line() {
    let site = Site::started();
    let file = "channels: [main]\ndependencies:\n  - python\n  - agentd-no-such-package\n";
    let ran = site.run("p", file, "true").code(125).says("error[ENV-103]").says("line 4");
    ran.says("agentd-no-such-package");
    // A version that `==` pins too exactly gets a hint.
    let file = "channels: [main]\ndependencies:\n  - python==3\n";
    site.run("p", file, "true").code(125).says("error[ENV-103]").says("line 3").says("fix:");
}

#[test]
fn test_a_channel_that_is_not_there_is_no_network_failure() {
    let site = Site::started();
    let file = "channels: [nowhere]\ndependencies: [python]\n";
    site.run("p", file, "true").code(125).says("error[ENV-103]").says("nowhere");
}

/// What the server wants in its manner `basic`.
const SECRET: &str = "basic-secret";

/// The text is in no file below the directory.
#[track_caller]
fn assert_nowhere(dir: &Path, secret: &str) {
    let holds = |path: &Path| {
        let bytes = fs::read(dir.join(path)).unwrap_or_default();
        bytes.windows(secret.len()).any(|window| window == secret.as_bytes())
    };
    let found: Vec<_> = files_below(dir).into_iter().filter(|path| holds(path)).collect();
    assert!(found.is_empty(), "the secret is in {found:?}");
}

#[test]
fn test_credentials_of_a_channel_come_from_a_file_and_go_nowhere() {
    let mut site = Site::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    let write = |password: &str| {
        let text = format!(
            r#"{{"127.0.0.1": {{"BasicHTTP": {{"username": "reader", "password": "{password}"}}}}}}"#
        );
        fs::write(file.path(), text).unwrap();
    };
    write(SECRET);
    site.channel.set("basic");
    site.host.set("AGENTD_CONDA_CREDENTIALS", file.path().to_str().unwrap());
    site.host.start();
    let command = "python -c 'import tiny_one'";
    let ran = site.run("p", &conda_file(&["python", "tiny-one"], &[]), command).ok();
    assert!(!ran.stderr.contains(SECRET), "{}", ran.stderr);
    assert_nowhere(site.host.home(), SECRET);
    // Credentials in the file of a job are refused before anything is stored.
    let url = site.channel.alias().replace("http://", &format!("http://reader:{SECRET}@"));
    let inline = format!("channels: ['{url}/main']\ndependencies: [python]\n");
    let dir = site.job("inline", &inline, "true");
    let ran = site::run(&site.host, &dir);
    assert_eq!(ran.code, 125, "{}", ran.stderr);
    let ran = ran.says("line 1").says("conda_credentials");
    assert!(!ran.stderr.contains(SECRET), "{}", ran.stderr);
    fs::remove_dir_all(dir).unwrap();
    assert_nowhere(site.host.home(), SECRET);

    // Wrong ones: a new channel list is wanted, because what is known is not asked for again.
    write("wrong");
    site.host.kill();
    fs::remove_dir_all(site.host.state().join("packages/conda")).unwrap();
    site.host.start();
    let ran = site.run("q", &conda_file(&["python", "tiny-two"], &[]), "true").code(125);
    ran.says("error[ENV-107]").says("127.0.0.1").says("conda_credentials");
}

#[test]
fn test_a_channel_that_is_down_is_tried_again() {
    let site = Site::started();
    site.channel.set("broken");
    let file = conda_file(&["python", "tiny-one"], &[]);
    let job = site.submit("p", &file, "python -c 'import tiny_one'");
    // The attempt ends, the job does not: the network is nobody's fault.
    eventually("it is said", 2 * SOON, || {
        site.host.ctl(&["why", &job]).ok().stdout.contains("ENV-106").then_some(())
    });
    assert!(["Queued", "Preparing"].contains(&site.host.job_state(&job).as_str()));
    site.channel.set("plain");
    assert_eq!(site.ended(&job), "Completed");
}

#[test]
fn test_a_package_that_arrives_damaged_is_said_and_fetched_again() {
    let site = Site::started();
    site.channel.set("flipped");
    let job = site.submit("p", &conda_file(&["python"], &[]), "python -c 1");
    eventually("it is said", 2 * SOON, || {
        site.host.ctl(&["why", &job]).ok().stdout.contains("ENV-108").then_some(())
    });
    site.channel.set("plain");
    assert_eq!(site.ended(&job), "Completed");
}

#[test]
fn test_offline_uses_what_is_there_and_says_what_is_not() {
    let mut site = Site::started();
    site.run("p", &conda_file(&["python", "tiny-two"], &[]), "true").ok();
    site.host.kill();
    site.host.set("AGENTD_OFFLINE", "true");
    site.host.start();
    site.channel.clear();
    // Another environment of packages that are in the cache.
    site.run("p", &conda_file(&["python", "tiny-one"], &[]), "python -c 'import tiny_one'").ok();
    let ran = site.run("q", &conda_file(&["python", "wheel"], &[]), "true");
    assert_eq!(ran.code, 125, "{}", ran.stderr);
    ran.says("offline").says("fix:");
    assert_eq!(site.asked(), Vec::<String>::new());
}
