//! The store stays small, and nothing that is needed goes.

use std::fs;
use std::path::{Path, PathBuf};

use agent_tests::{Host, Ran, SOON, eventually};
use serde_json::Value;

/// The size of each project's file, in bytes: two of them are too much for the store of [`small`].
const LARGE: usize = 500_000;

/// A box with room for one and a half projects, where nothing is recent for long.
fn small() -> Host {
    let mut host = Host::new();
    host.set("AGENTD_STORE_SIZE", "1000KiB");
    host.set("AGENTD_TEST_BLOB_LEASE", "1s");
    host.start();
    host
}

/// A project of one large file that no other has.
fn project(host: &Host, name: &str) -> PathBuf {
    let text = format!("{name}, which is only here. ").repeat(LARGE / 20);
    host.project(name, &[("large.txt", &text[..LARGE])])
}

fn run(host: &Host, dir: &Path) -> Ran {
    let command = "wc -c < large.txt; printf weights > outputs/model";
    host.ctl(&["run", dir.to_str().unwrap(), "--", "sh", "-c", command]).ok()
}

fn last_job(host: &Host) -> String {
    host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned()
}

/// The bytes that stay for a reason when everything goes that may.
fn stays(collected: &Value, reason: &str) -> u64 {
    let all = collected["stays"].as_array().unwrap();
    all.iter().find(|stay| stay["reason"] == reason).map_or(0, |stay| stay["bytes"].as_u64().unwrap())
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

#[test]
fn test_old_snapshots_make_room_and_outputs_stay() {
    let host = small();
    let (first, second) = (project(&host, "first"), project(&host, "second"));
    run(&host, &first).says("1 file, 1 changed");
    let job = last_job(&host);
    run(&host, &second).says("1 file, 1 changed");
    eventually("the store is within its limit", SOON, || {
        let told = host.ctl(&["gc", "--dry-run", "--json"]).ok().json();
        assert_eq!(told["store_limit_bytes"], 1000 << 10);
        (told["store_bytes"].as_u64()? < 900 << 10).then_some(())
    });
    assert!(host.log().contains("removed blobs that nobody needs"), "the daemon says what it does");
    let to = host.home().join("got");
    host.ctl(&["download", &job, "-o", to.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(to.join("outputs/model")).unwrap(), "weights");
    // The one that was used last is still there; the other one travels again.
    run(&host, &second).says("1 file, 0 changed");
    assert_eq!(run(&host, &first).says("1 file, 1 changed").stdout.trim(), LARGE.to_string());
    // Even if everything is to go that may.
    eventually("nothing is recent", SOON, || {
        (stays(&host.ctl(&["gc", "--all", "--json"]).ok().json(), "recent") == 0).then_some(())
    });
    host.ctl(&["download", &job, "--force", "-o", to.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(to.join("outputs/model")).unwrap(), "weights");
}

#[test]
fn test_code_of_a_job_stays_until_it_has_ended_whatever_becomes_of_the_daemon() {
    let mut host = small();
    let dir = project(&host, "code");
    let gate = host.home().join("gate");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let submitted = host.ctl(&["submit", dir.to_str().unwrap(), "--", "sh", "-c", &wait]).ok();
    let job = submitted.stdout.trim().to_owned();
    host.wait_for(&job, &["Running"]);
    let all = |host: &Host| host.ctl(&["gc", "--all", "--json"]).ok().json();
    assert!(stays(&all(&host), "jobs") >= LARGE as u64);
    host.kill();
    host.start();
    // A daemon that has just started removes nothing before each of its parts has said what it needs.
    let told = eventually("it is known what is needed", SOON, || {
        let ran = host.ctl(&["gc", "--all", "--json"]);
        (ran.code == 0).then(|| ran.json())
    });
    assert!(stays(&told, "jobs") >= LARGE as u64, "what is needed follows from what is on disk");
    fs::write(&gate, "").unwrap();
    host.wait_for(&job, &["Completed"]);
    eventually("its code is gone", SOON, || {
        let told = all(&host);
        (["jobs", "replicas", "recent"].iter().all(|reason| stays(&told, reason) == 0)).then_some(())
    });
    run(&host, &dir).says("1 file, 1 changed");
}

#[test]
fn test_a_flipped_bit_is_found_and_what_was_damaged_is_sent_again() {
    let host = Host::started();
    let dir = project(&host, "flipped");
    run(&host, &dir);
    host.ctl(&["gc", "--check"]).ok().says("all are as they were written");
    let marked = |path: &PathBuf| {
        let bytes = fs::read(path).unwrap_or_default();
        bytes.windows(7).position(|window| window == b"flipped").map(|at| (path.clone(), bytes, at))
    };
    let (path, mut bytes, at) =
        files_below(&host.state().join("cas")).iter().find_map(marked).expect("the file is in the store");
    bytes[at] ^= 1;
    let mode = fs::metadata(&path).unwrap().permissions();
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, mode).unwrap();
    host.ctl(&["gc", "--check"]).code(1).says("1 damaged");
    assert_eq!(host.ctl(&["gc", "--check", "--json"]).ok().json()["damaged"], 0, "it was taken out");
    let ran = run(&host, &dir).says("1 file, 1 changed");
    assert_eq!(ran.stdout.trim(), LARGE.to_string());
}
