//! Names for data: users give them, a job reads what they mean when it is submitted, and nobody else can change that.

use std::fs;

use agent_tests::{Host, SOON, eventually};

fn job(input: &str) -> String {
    format!("command: cat ${{{{inputs.data}}}}\nenvironment: host\ninputs:\n  data: {{{input}}}\n")
}

fn project(host: &Host, name: &str, input: &str) -> String {
    host.project(name, &[("job.yml", &job(input))]).to_str().unwrap().to_owned()
}

#[test]
fn test_a_name_is_read_as_what_it_meant_at_the_submit() {
    let host = Host::started();
    let file = host.home().join("iris.csv");
    let path = file.to_str().unwrap();
    let create = |more: &[&str]| host.ctl(&[&["data", "create", "iris", path][..], more].concat());
    fs::write(&file, "first\n").unwrap();
    assert_eq!(create(&["--label", "checked"]).ok().stdout, "azureml:iris:1\n");
    let latest = project(&host, "latest", "type: uri_file, path: 'azureml:iris@latest'");
    assert_eq!(host.ctl(&["run", &latest]).ok().stdout, "first\n");
    let first = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();

    fs::write(&file, "second\n").unwrap();
    assert_eq!(create(&[]).ok().stdout, "azureml:iris:2\n");
    assert_eq!(host.ctl(&["run", &latest]).ok().stdout, "second\n");
    for (name, reference, said) in
        [("one", "azureml:iris:1", "first\n"), ("two", "azureml:iris@checked", "first\n")]
    {
        let dir = project(&host, name, &format!("type: uri_file, path: '{reference}'"));
        assert_eq!(host.ctl(&["run", &dir]).ok().stdout, said, "{reference}");
    }
    // A job on record keeps the data that it had, and so does its rerun.
    let again = host.ctl(&["rerun", &first]).ok().stdout.trim().to_owned();
    host.wait_for(&again, &["Completed"]);
    assert_eq!(host.ctl(&["logs", &again]).ok().stdout, "first\n");

    host.ctl(&["data", "archive", "iris", "--version", "2"]).ok().says("azureml:iris:2 is archived");
    assert_eq!(host.ctl(&["run", &latest]).ok().stdout, "first\n");
    host.ctl(&["data", "restore", "iris"]).ok();
    assert_eq!(host.ctl(&["run", &latest]).ok().stdout, "second\n");
    let listed = host.ctl(&["data", "show", "iris", "--json"]).ok().json();
    let versions: Vec<&str> =
        listed.as_array().unwrap().iter().map(|one| one["version"].as_str().unwrap()).collect();
    assert_eq!(versions, ["2", "1"]);
    assert_eq!(listed[1]["labels"][0], "checked");
    assert!(listed[0]["path"].as_str().unwrap().ends_with("/iris.csv"), "{listed}");
}

#[test]
fn test_names_outlive_the_daemon_and_what_they_name_is_not_collected() {
    let mut host = Host::started();
    let dir = host.project("images", &[("one", "1"), ("deep/two", "2")]);
    host.ctl(&["data", "create", "images", dir.to_str().unwrap()]).ok();
    fs::remove_dir_all(&dir).unwrap();
    host.kill();
    host.start();
    // Until the node has said what it needs nothing is removed.
    eventually("unneeded files are removed", SOON, || (host.ctl(&["gc", "--all"]).code == 0).then_some(()));
    let text = "command: find ${{inputs.data}}/ -type f -exec cat {} +\nenvironment: host\n\
                inputs: {data: {path: 'azureml:images:1'}}\n";
    let job = host.project("p", &[("job.yml", text)]);
    let ran = host.ctl(&["run", job.to_str().unwrap()]).ok().stdout;
    assert!(ran == "12" || ran == "21", "{ran}");

    host.ctl(&["data", "rm", "images"]).ok().says("azureml:images:1 is removed");
    host.ctl(&["data", "show", "images"]).code(1).says("there is no data `images`");
    host.ctl(&["run", job.to_str().unwrap()]).code(125).says("DAT-101");
}

#[test]
fn test_what_a_name_cannot_mean_is_refused_with_a_reason() {
    let host = Host::started();
    let dir = host.project("images", &[("one", "1")]);
    let path = dir.to_str().unwrap();
    host.ctl(&["data", "create", "images", path, "--version", "2024-01"]).ok();
    host.ctl(&["data", "create", "images", path, "--version", "2024-01"])
        .code(1)
        .says("DAT-109")
        .says("there already");
    host.ctl(&["data", "create", "images", path, "--label", "latest"]).code(1).says("DAT-109");
    host.ctl(&["data", "create", "no/name", path]).code(1).says("DAT-109").says("cannot be a name");
    let unknown = project(&host, "unknown", "type: uri_folder, path: 'azureml:images:7'");
    host.ctl(&["submit", &unknown]).code(1).says("DAT-108").says("2024-01");
    let folder = project(&host, "folder", "type: uri_file, path: 'azureml:images:2024-01'");
    host.ctl(&["submit", &folder]).code(1).says("JOB-102").says("is a folder");
    host.ctl(&["data", "archive", "images", "--version", "7"]).code(1).says("DAT-108");
    // An address is not fetched for its name.
    host.ctl(&["data", "create", "far", "https://h.example/a.csv"]).ok();
    let listed = host.ctl(&["data", "list", "--json"]).ok().json();
    assert_eq!(listed[0]["path"], "https://h.example/a.csv");
    assert_eq!(listed[0]["type"], "uri_file");
}
