//! The same job in every kind of environment, and environments that are named instead of described.

use std::fs;
use std::path::Path;
use std::process::Command;

use agent_tests::channel::{Channel, Server};
use agent_tests::{Host, SOON, eventually, root};

use super::site::{self, Site, conda_file, run};

const SCRIPT: &str = "\
import os, sys, tiny_one
print('prefix', sys.prefix)
print('version', '%d.%d' % sys.version_info[:2])
print('tiny_one', tiny_one.__version__)
print('conda', os.environ.get('CONDA_PREFIX', '-'))
";

/// A word of what the script said.
fn said<'a>(stdout: &'a str, what: &str) -> &'a str {
    let line = stdout.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no `{what}` in:\n{stdout}"))
}

/// A virtual environment with tiny-one, as a user would make it on the machine.
#[allow(clippy::disallowed_methods, reason = "prepares the machine of the test")]
fn users_python(host: &Host) -> String {
    let dir = host.home().join("theirs");
    let wheels = Channel::t1().wheels();
    let made = Command::new("python3").args(["-m", "venv"]).arg(&dir).status().unwrap();
    let installed = Command::new(dir.join("bin/python"))
        .args(["-m", "pip", "install", "--quiet", "--no-index", "--find-links"])
        .args([wheels.as_os_str(), "tiny-one==1.0".as_ref()])
        .status()
        .unwrap();
    assert!(made.success() && installed.success());
    dir.join("bin/python").display().to_string()
}

/// Writes the job with this environment and runs it.
fn run_in(host: &Host, name: &str, environment: &str) -> agent_tests::Ran {
    let job = format!("command: python t.py\ncode: .\nenvironment: {environment}\n");
    let dir = host.project(
        name,
        &[
            ("job.yml", &job),
            ("t.py", SCRIPT),
            ("conda.yml", &conda_file(&["python", "tiny-one=1.0"], &[])),
            ("requirements.txt", "tiny-one==1.0\n"),
        ],
    );
    run(host, &dir)
}

#[test]
fn test_the_same_job_runs_in_conda_pip_and_host_environments() {
    let site = Site::started();
    let conda = run_in(&site.host, "conda", "{conda_file: conda.yml}").ok();
    let pip = run_in(&site.host, "pip", "{requirements: requirements.txt}").ok();
    let python = users_python(&site.host);
    let host = run_in(
        &site.host,
        "host",
        &format!("{{python: {python}, requirements: requirements.txt, user_managed_dependencies: true}}"),
    )
    .ok();
    for ran in [&conda, &pip, &host] {
        assert_eq!(said(&ran.stdout, "tiny_one"), "1.0");
    }
    let envs = site.host.state().join("envs");
    let prefix = Path::new(said(&conda.stdout, "prefix"));
    assert!(prefix.starts_with(&envs), "{}", conda.stdout);
    assert_eq!(said(&conda.stdout, "conda"), prefix.to_str().unwrap());
    assert!(Path::new(said(&pip.stdout, "prefix")).starts_with(&envs), "{}", pip.stdout);
    assert_eq!(Path::new(said(&host.stdout, "prefix")), site.host.home().join("theirs"));

    // The next job builds nothing and asks nobody.
    site.channel.clear();
    run_in(&site.host, "conda", "{conda_file: conda.yml}").ok();
    assert_eq!(site.asked(), Vec::<String>::new());
}

#[test]
fn test_pip_part_and_variables_of_a_conda_file() {
    let site = Site::started();
    let file = conda_file(&["python", "pip"], &["tiny-two"]) + "variables:\n  FROM_FILE: yes it is\n";
    let command = "python -c 'import os, tiny_one, tiny_two; print(tiny_one.__version__, os.environ[\"FROM_FILE\"])'; tiny-two";
    let ran = site.run("p", &file, command).ok();
    assert_eq!(ran.stdout, "2.0 yes it is\ntiny-two 1.0\n");
    let log = build_log(&site.host);
    for phase in ["choosing packages", "downloading packages", "linking packages", "installing packages"] {
        assert!(log.contains(phase), "no `{phase}` in:\n{log}");
    }
}

/// The build log of the only job.
fn build_log(host: &Host) -> String {
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    host.ctl(&["logs", &job, "--build"]).ok().stdout
}

#[test]
fn test_activation_sets_what_packages_ask_for() {
    let site = Site::started();
    let file = format!("channels: ['{}']\ndependencies: [activated]\n", site::traps());
    let ran = site.run("p", &file, "echo $ACTIVATED_VAR; echo $ACTIVATED_BY; activated-tool").ok();
    let mut lines = ran.stdout.lines();
    assert_eq!(lines.next(), Some("from a list"));
    assert!(lines.next().unwrap().starts_with("script of /"), "{}", ran.stdout);
    assert_eq!(lines.next(), Some("activated"));
}

#[test]
fn test_curated_names_come_from_a_folder_of_definitions() {
    let mut site = Site::new();
    let definitions = site.host.home().join("definitions");
    fs::create_dir(&definitions).unwrap();
    let definition = "conda_file:\n  channels: [main]\n  dependencies: [python, tiny-one=1.0]\n";
    fs::write(definitions.join("house-1.0.yml"), definition).unwrap();
    site.host.set("AGENTD_CURATED_ENVIRONMENTS", definitions.to_str().unwrap());
    site.host.start();
    for reference in [
        "azureml:AzureML-house-1.0@latest",
        "azureml://registries/azureml/environments/house-1.0/labels/latest",
    ] {
        let ran = run_in(&site.host, "named", reference).ok();
        assert_eq!(said(&ran.stdout, "tiny_one"), "1.0");
    }
    assert_eq!(site::kept(&site.host).len(), 1, "two names of one environment");
    let ran = run_in(&site.host, "unknown", "azureml:AzureML-nobody-knows-9@latest").code(125);
    ran.says("error[ENV-110]").says("nobody-knows-9").says("fix:");
}

#[test]
fn test_a_python_of_the_machine_that_lacks_modules_is_refused_with_all_of_them() {
    let site = Site::started();
    let python = users_python(&site.host);
    let requirements = "tiny-one==1.0\ntiny-two\nagentd-no-such-module>=3\n";
    let job = format!(
        "command: python -c 1\ncode: .\nenvironment: {{python: {python}, requirements: r.txt, user_managed_dependencies: true}}\n"
    );
    let dir = site.host.project("p", &[("job.yml", &job), ("r.txt", requirements)]);
    let ran = run(&site.host, &dir).code(125).says("error[ENV-109]").says("fix:");
    let ran = ran.says("tiny-two").says("agentd-no-such-module");
    assert!(!ran.stderr.contains("tiny-one"), "what is there is not missing:\n{}", ran.stderr);
    // Another version than wanted is as bad as none.
    fs::write(dir.join("r.txt"), "tiny-one>=2\n").unwrap();
    run(&site.host, &dir).code(125).says("error[ENV-109]").says("tiny-one");
}

#[test]
fn test_an_example_with_a_conda_file_runs_against_the_local_channel() {
    let server = Server::start(Channel::t2());
    agent_tests::engine();
    let mut host = Host::new();
    // The file says conda-forge, as users would; here is a mirror of what it needs of it.
    let mirror = format!("https://conda.anaconda.org/conda-forge={}", server.url("plain"));
    host.set("AGENTD_CONDA_MIRRORS", &mirror);
    host.start();
    let example = root().join("packaging/examples/conda");
    let ran = run(&host, &example).ok();
    assert!(!ran.stdout.is_empty());
    eventually("the outputs are stored", SOON, || ran.stderr.contains("outputs/").then_some(()));
}
