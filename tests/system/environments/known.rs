//! What is known of a built environment: its list of packages, which makes it again elsewhere, and what need not
//! be fetched again.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use agent_proto::v1;
use agent_proto::v1::nodes_client::NodesClient;
use agent_tests::channel::Channel;
use agent_tests::client::Client;
use agent_tests::{Host, SOON, eventually};
use serde_json::json;

use super::site::{self, Site, conda_file, files_below, kept};

/// The content of every file of an environment by its path, with its prefix taken out, because two boxes have
/// different ones. Left out: records of conda and of pip that hold the time of the installation or the place of
/// a cache, what the daemon itself keeps there, and bytecode, which holds times of files.
fn content(prefix: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let own = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        path.starts_with("conda-meta")
            || ["ready.json", "environment.lock", "requirements.txt", "direct_url.json", "RECORD"]
                .contains(&name)
            || name.ends_with(".pyc")
    };
    let here = prefix.to_str().expect("UTF-8").as_bytes();
    let read = |path: PathBuf| {
        let full = prefix.join(&path);
        let kind = fs::symlink_metadata(&full).expect("it was listed");
        let bytes = match kind.is_symlink() {
            true => fs::read_link(&full).expect("a link").into_os_string().into_encoded_bytes(),
            false => fs::read(&full).expect("a file"),
        };
        (path, (kind.permissions().mode(), without(&bytes, here)))
    };
    files_below(prefix).into_iter().filter(|path| !own(path)).map(read).collect()
}

/// The bytes with every occurrence of a path replaced.
fn without(bytes: &[u8], path: &[u8]) -> Vec<u8> {
    let mut rest = bytes;
    let mut made = Vec::with_capacity(bytes.len());
    while let Some(at) = rest.windows(path.len()).position(|window| window == path) {
        made.extend_from_slice(&rest[..at]);
        made.extend_from_slice(b"PREFIX");
        rest = &rest[at + path.len()..];
    }
    made.extend_from_slice(rest);
    made
}

/// The directory of the only environment.
fn only(host: &Host) -> (String, PathBuf) {
    let listed = kept(host);
    assert_eq!(listed.len(), 1, "{listed:?}");
    let key = listed[0]["key"].as_str().expect("a key").to_owned();
    let dir = host.state().join("envs").join(&key);
    (key, dir)
}

#[test]
fn test_an_exported_lock_makes_the_same_environment_on_another_box() {
    let site = Site::started();
    let file = conda_file(&["python", "pip", "tiny-one=1.0"], &["tiny-two"]);
    let command = "python -c 'import tiny_two'";
    site.run("p", &file, command).ok();
    let (key, prefix) = only(&site.host);
    let lock = site.host.ctl(&["envs", "export", &key]).ok().stdout;
    assert!(lock.contains("@EXPLICIT") && lock.contains("# platform: linux-64"), "{lock}");
    assert!(lock.lines().any(|line| line.contains("/python-3") && line.contains("#sha256:")), "{lock}");

    // A fresh box that can reach packages, and not the lists of what there is.
    let mut other = site::beside(&site.channel.alias());
    other.start();
    site.channel.clear();
    let job = "command: python -c 'import tiny_two'\ncode: .\nenvironment: {conda_lock: env.lock}\n";
    let dir = other.project("locked", &[("job.yml", job), ("env.lock", &lock)]);
    site::run(&other, &dir).ok();
    let lists = site.asked().into_iter().filter(|path| path.contains("repodata")).count();
    assert_eq!(lists, 0, "a lock needs no list of packages");
    let (_, copy) = only(&other);
    let (one, two) = (content(&prefix), content(&copy));
    let names = |of: &BTreeMap<PathBuf, _>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&one), names(&two));
    let differs: Vec<_> =
        one.iter().filter(|(path, what)| two[*path] != **what).map(|(path, _)| path).collect();
    assert!(differs.is_empty(), "these differ: {differs:?}");
    println!("{} files are the same", one.len());
    // And again from there: the lock of the copy is the lock it was made from.
    let again = other.ctl(&["envs", "export", &only(&other).0]).ok().stdout;
    let packages = |text: &str| {
        let mut lines: Vec<String> = text
            .lines()
            .filter(|line| line.contains("#sha256:") || line.starts_with("# pip "))
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    };
    assert_eq!(packages(&again), packages(&lock));
}

#[test]
fn test_jobs_are_compared_by_the_packages_that_they_ran_with() {
    let site = Site::started();
    let ended = |job: String| {
        assert_eq!(site.ended(&job), "Completed");
        job
    };
    let file = conda_file(&["python", "pip", "tiny-one=1.0"], &["tiny-two"]);
    let one = ended(site.submit("p", &file, "python -c 'import tiny_two'"));
    let again = ended(site.host.ctl(&["rerun", &one]).ok().stdout.trim().to_owned());
    let facts = |job: &str| {
        let shown = site.host.show(job);
        [
            shown["spec"]["code"].clone(),
            shown["environment"]["key"].clone(),
            shown["environment"]["lock"].clone(),
        ]
    };
    assert_eq!(facts(&again), facts(&one));
    assert!(facts(&one).iter().all(|fact| fact.is_string()), "{:?}", facts(&one));
    let same = site.host.ctl(&["diff", &one, &again, "--json"]).ok().json();
    let differ = |told: &serde_json::Value, part: &str| {
        let all = told["differences"].as_array().expect("a list").iter();
        all.filter(|one| one["part"] == part).cloned().collect::<Vec<_>>()
    };
    assert!(differ(&same, "packages").is_empty() && differ(&same, "environment").is_empty(), "{same}");
    assert_eq!((&same["files"], &same["notes"]), (&json!([]), &json!([])), "{same}");

    let newer = conda_file(&["python", "pip", "tiny-one=2.0"], &[]);
    let other = ended(site.submit("q", &newer, "python -c 'import tiny_one'"));
    let told = site.host.ctl(&["diff", &one, &other, "--json"]).ok().json();
    let packages = differ(&told, "packages");
    let of =
        |at: usize, key: &str| packages[at][key].as_str().map(|text| text.split('-').next().unwrap_or(""));
    assert_eq!(packages.len(), 2, "{packages:?}");
    assert_eq!(
        [of(0, "name"), of(0, "one"), of(0, "other")],
        [Some("tiny"), Some("1.0 (conda, pyh_0)"), Some("2.0 (conda, pyh_0)")]
    );
    assert_eq!(packages[1], json!({"part": "packages", "name": "tiny-two", "one": "1.0", "other": null}));
}

#[test]
fn test_environments_are_listed_shown_pinned_and_removed() {
    let site = Site::started();
    let gate = site.host.home().join("gate");
    let wait = format!("python -c 'import tiny_one'; while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let job = site.submit("p", &conda_file(&["python", "tiny-one"], &[]), &wait);
    eventually("it runs", site::BUILT, || (site.host.job_state(&job) == "Running").then_some(()));
    let key = eventually("it is told", SOON, || {
        let listed = kept(&site.host);
        let one = listed.first()?;
        (one["uses"] == 1).then(|| one["key"].as_str().map(str::to_owned))?
    });
    let one = &kept(&site.host)[0];
    assert!(one["built_ms"].as_u64() > Some(0) && one["log"].is_string() && one["pinned"] == false, "{one}");
    // What a job uses is not removed, and both the fault and the exit code say so.
    site.host.ctl(&["envs", "rm", &key]).code(1).says("error[ENV-111]").says(&job).says("fix:");
    fs::write(&gate, "").unwrap();
    assert_eq!(site.ended(&job), "Completed");

    let shown = site.host.ctl(&["envs", "show", &key]).ok().stdout;
    for words in [key.as_str(), "conda.yml", "tiny-one", "3."] {
        assert!(shown.contains(words), "no `{words}` in:\n{shown}");
    }
    let table = site.host.ctl(&["envs", "list"]).ok().stdout;
    assert!(table.contains(&key), "{table}");
    eventually("it is free", SOON, || (kept(&site.host)[0]["uses"] == 0).then_some(()));
    site.host.ctl(&["envs", "pin", &key]).ok();
    eventually("it is pinned", SOON, || (kept(&site.host)[0]["pinned"] == true).then_some(()));
    site.host.ctl(&["envs", "unpin", &key]).ok();
    eventually("it is not pinned any more", SOON, || (kept(&site.host)[0]["pinned"] == false).then_some(()));
    // The controller looks for itself, whatever a client found out before it asks.
    let own = site.host.ctl(&["nodes", "--json"]).ok().json()["nodes"][0]["node"].clone();
    let client = Client::new(site.host.state().join("agentd.sock"));
    for (node, key, code) in [(own.as_str().unwrap(), "pip-0", "ENV-110"), ("moon", key.as_str(), "NODE-105")]
    {
        let [node, environment, want] = [node, key, "remove"].map(str::to_owned);
        let request = v1::ManageEnvironmentRequest { node, environment, want };
        let refused =
            client.wait(NodesClient::new(client.channel()).manage_environment(request)).unwrap_err();
        let fault = agent_proto::fault(&refused);
        assert!(fault.code.as_str() == code && fault.fix.is_some(), "{fault:?}");
    }
    site.host.ctl(&["envs", "rm", &key]).ok();
    assert!(site.host.log().contains("removed an environment as asked"));
    eventually("it is gone", SOON, || kept(&site.host).is_empty().then_some(()));
    assert!(!site.host.state().join("envs").join(&key).exists());
    site.host.ctl(&["envs", "rm", &key]).code(1).says("no environment is called").says("fix:");
}

#[test]
fn test_what_was_built_before_the_index_went_down_is_not_fetched_again() {
    let mut site = Site::new();
    // The packages of pip come from a folder that is not there yet.
    let wheels = site.host.home().join("wheels");
    site.host.set("PIP_FIND_LINKS", wheels.to_str().unwrap());
    site.host.start();
    let file = conda_file(&["python", "pip"], &["tiny-two"]);
    site.run("p", &file, "python -c 'import tiny_two'").code(125).says("tiny-two");
    std::os::unix::fs::symlink(Channel::t1().wheels(), &wheels).unwrap();
    site.host.kill(); // what failed is remembered a while, by the daemon that saw it
    site.host.start();
    site.channel.clear();
    site.run("p", &file, "python -c 'import tiny_two'").ok();
    assert_eq!(site.packages_served(), 0, "{:?}", site.asked());
}

#[test]
fn test_a_build_that_was_killed_fetches_only_what_is_missing() {
    let mut site = Site::started();
    site.channel.set("stall~tiny-two");
    let file = conda_file(&["python", "tiny-two"], &[]);
    let job = site.submit("p", &file, "python -c 'import tiny_two'");
    eventually("the others have arrived", site::BUILT, || {
        let cache = site.host.state().join("packages/conda");
        let whole =
            |path: &PathBuf| path.starts_with("pkgs/python-3.11.7-311_0") && path.ends_with("bin/python");
        files_below(&cache).iter().any(whole).then_some(())
    });
    std::thread::sleep(std::time::Duration::from_millis(500));
    site.host.kill();
    site.channel.set("plain");
    site.channel.clear();
    site.host.start();
    assert_eq!(site.ended(&job), "Completed");
    let again: Vec<String> = site.asked().into_iter().filter(|path| path.contains("/python-3")).collect();
    assert!(again.is_empty(), "{again:?}");
}

#[test]
fn test_mirrors_serve_what_a_channel_is_recorded_for() {
    let site = Site::started();
    let mut host = site::beside(&site.channel.alias());
    let nowhere = "http://packages.invalid/pkgs/main";
    host.set("AGENTD_CONDA_MIRRORS", &format!("{nowhere}={}", site.channel.url("plain")));
    host.start();
    let file = format!("channels: ['{nowhere}']\ndependencies: [python, tiny-one]\n");
    let dir = site::job(&host, "p", &file, "python -c 'import tiny_one'");
    site::run(&host, &dir).ok();
    let lock = host.ctl(&["envs", "export", &only(&host).0]).ok().stdout;
    assert!(lock.contains(nowhere), "the lock names the channel, not the mirror:\n{lock}");
}
