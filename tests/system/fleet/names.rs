//! Names of data of several users, and those of the operator.

use std::fs;

use agent_tests::fleet::Daemon;
use agent_tests::{SOON, eventually, finish};

use super::Site;

fn reads(site: &Site, reference: &str) -> String {
    site.project(
        "ada",
        &format!(
            "command: 'cat ${{{{inputs.data}}}}'\ninputs: {{data: {{type: uri_file, path: '{reference}'}}}}\n"
        ),
    )
}

#[test]
fn test_a_name_of_another_user_is_told_and_takes_no_place_of_the_operators() {
    let home = tempfile::tempdir().unwrap();
    let stores = home.path().join("data.yaml");
    let site = Site::configured(&format!("roles: controller\ndata_stores: {}\n", stores.display()), &[]);
    ["ada", "eve"].iter().for_each(|user| site.add_user(user, "submit"));
    let file = site.path("eve").join("evil.csv");
    fs::write(&file, "EVIL\n").unwrap();
    let create = |name: &str, more: &[&str]| {
        let line = ["data", "create", name, file.to_str().unwrap(), "--visibility", "all"];
        site.by("eve", &[&line, more].concat())
    };
    create("iris", &[]).ok();
    create("rose", &[]).ok();
    let input = |job: &str| site.json(&["show", job, "--json"])["spec"]["inputs"]["data"].clone();

    // Whose it is, is told to whoever reads it.
    let submitted = site.by("ada", &["submit", &reads(&site, "azureml:iris:1")]).ok();
    let submitted = submitted.says("inputs.data reads azureml:iris:1, which user eve made");
    assert_eq!(input(submitted.stdout.trim())["file"], "evil.csv");
    let own = site.project("eve", "command: 'true'\ninputs: {data: {path: 'azureml:iris:1'}}\n");
    let told = site.by("eve", &["submit", &own]).ok();
    assert!(!told.stderr.contains("which"), "{told:?}");

    // From now on the name is the operator's, in every version.
    fs::write(&stores, "data_map:\n  'azureml:iris:1': /srv/share/ok.txt\n").unwrap();
    for reference in ["azureml:iris:1", "azureml:iris@latest"] {
        let submitted = site.by("ada", &["submit", &reads(&site, reference)]).ok();
        assert_eq!(input(submitted.stdout.trim())["uri"], reference);
    }
    create("iris", &["--version", "2"]).code(1).says("DAT-109").says("data_map");
    let submitted = site.by("ada", &["submit", &reads(&site, "azureml:rose:1")]).ok();
    assert_eq!(input(submitted.stdout.trim())["file"], "evil.csv", "others stay as they are");
}

fn until_it_says(site: &Site, job: &str, text: &str) {
    let said = said(site, "ada", job);
    assert!(said.contains(text), "{job}: {said}");
}

/// What a job of a user printed, once it has completed.
fn said(site: &Site, user: &str, job: &str) -> String {
    eventually(&format!("{job} has ended"), SOON, || {
        (site.json(&["show", job, "--json"])["state"] == "Completed").then_some(())
    });
    site.by(user, &["logs", job]).ok().stdout
}

#[test]
fn test_who_gets_the_name_of_a_removed_user_has_nothing_of_that_one_unless_it_is_the_same() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    site.add_node("n0", "127.0.0.1");
    let project = site.project("ada", "command: 'echo hers'\nsecrets: {KEY: wandb}\n");
    let file = site.path("ada").join("d.csv");
    fs::write(&file, "a-b-c-1\n").unwrap();
    let mut set = site.client("ada", &["secret", "set", "wandb"]);
    finish(set.stdin(fs::File::open(&file).unwrap())).ok();
    site.by("ada", &["data", "create", "iris", file.to_str().unwrap()]).ok();
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    until_it_says(&site, &job, "hers");
    let add = |more: &[&str]| site.ctl(&[&["user", "add", "ada"], more].concat());
    add(&["--new-person"]).code(1).says("NET-108").says("ada is a user");
    site.ctl(&["user", "remove", "ada"]).ok();

    let told = add(&[]).code(1);
    told.says("NET-108").says("1 job, 1 name of data, 1 secret").says("--same-person").says("--new-person");
    let log_in = |code: &str| site.log_in("ada", code.trim()).ok();
    log_in(&add(&["--same-person"]).ok().stdout);
    until_it_says(&site, &job, "hers");
    assert!(site.by("ada", &["secret", "list"]).ok().stdout.contains("wandb"));

    let lasting = site.project("ada", "command: 'sleep 600'\n");
    let lasting = site.by("ada", &["submit", &lasting]).ok().stdout.trim().to_owned();
    site.ctl(&["user", "remove", "ada"]).ok();
    add(&["--new-person"]).code(1).says("JOB-106").says(&lasting);
    site.ctl(&["cancel", "--wait", &lasting]).ok();
    log_in(&add(&["--new-person"]).ok().stdout);
    site.by("ada", &["logs", &job]).code(4).says("NET-102").says("an earlier user ada");
    site.by("ada", &["cancel", &job]).code(4).says("NET-102").says("an earlier user ada");
    assert_eq!(site.by("ada", &["secret", "list", "--json"]).ok().stdout.trim(), "[]");
    site.by("ada", &["data", "show", "iris"]).code(1).says("there is no data `iris`");
    assert!(site.ctl(&["logs", &job]).ok().stdout.contains("hers"));
    site.ctl(&["data", "show", "iris"]).ok();

    // What she does in that name is hers, and stays so.
    let own = site.project("ada", "command: 'echo new'\n");
    let own = site.by("ada", &["submit", &own]).ok().stdout.trim().to_owned();
    until_it_says(&site, &own, "new");
    site.controller.kill();
    site.start_controller();
    site.by("ada", &["logs", &job]).code(4).says("NET-102").says("an earlier user ada");
    until_it_says(&site, &own, "new");
    // Gone and back, she is still not the first of her name.
    site.ctl(&["user", "remove", "ada"]).ok();
    site.controller.kill();
    site.start_controller();
    assert!(!site.ctl(&["user", "list"]).ok().stdout.contains("ada"));
    site.log_in("ada", site.ctl(&["user", "add", "ada", "--same-person"]).ok().stdout.trim()).ok();
    site.by("ada", &["logs", &job]).code(4).says("an earlier user ada");
    until_it_says(&site, &own, "new");
    assert!(
        site.json(&["show", &own, "--json"])["spec"]["owner_since"].is_null(),
        "it is no matter of people"
    );
}

#[test]
fn test_a_user_of_the_fleet_has_the_own_name_in_jobs_unless_it_is_somebodys_here() {
    let mut site = Site::new();
    ["ada", "daemon"].iter().for_each(|user| site.add_user(user, "submit"));
    let config = "node_name: n0\ndisk_reserve: 64MiB\njob_user: per-run\n";
    let mut node = Daemon::new(site.path("n0"), config.to_owned());
    site.join(&node, "127.0.0.1", &site.token(&[])).ok();
    node.spawn();
    site.nodes.push(node);
    site.until_ready("n0");
    let names_of = |user: &str| {
        let job = "command: 'echo $(id -un) $(id -gn) $USER $(getent passwd $(id -u) | cut -d: -f1) ~'\n";
        let job = site.by(user, &["submit", &site.project(user, job)]).ok().stdout.trim().to_owned();
        said(&site, user, &job).trim().split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    let names = names_of("ada");
    assert_eq!(names[..4], ["ada"; 4]);
    assert!(names[4].contains("/n0/"), "a home of the job's own: {names:?}");
    let names = names_of("daemon");
    assert!(names[0].starts_with("job-2") && names[..4].iter().all(|name| *name == names[0]), "{names:?}");
}
