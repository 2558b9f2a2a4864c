//! Environment files as people keep them.

use std::fs;
use std::path::PathBuf;

use agent_jobfile::condafile;
use agent_tests::channel::{Channel, Server};
use agent_tests::root;

use super::site;

/// The files, by name.
fn found() -> Vec<PathBuf> {
    let dir = root().join("tests/fixtures/environments");
    let listed = fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = listed
        .filter(|path| path.extension().is_some_and(|ending| ending == "yml" || ending == "yaml"))
        .collect();
    files.sort();
    files
}

#[test]
fn test_twenty_files_as_found_in_public_repositories_parse() {
    let files = found();
    assert!(files.len() >= 20, "{} files", files.len());
    for path in files {
        // The client puts the lines of a requirements file in place of its name.
        let text = fs::read_to_string(&path).unwrap();
        let line = |line: &str| match line.split_once("- -r ").or(line.split_once("- --requirement ")) {
            Some((indent, _)) => format!("{indent}- [numpy, pandas]\n"),
            None => format!("{line}\n"),
        };
        let inlined = text.contains("-r requirements").then(|| text.lines().map(line).collect::<String>());
        let text = inlined.unwrap_or(text);
        let parsed = condafile::parse(&text);
        let (file, _) = parsed.unwrap_or_else(|fault| panic!("{}: {fault:?}", path.display()));
        assert!(!(file.specs.is_empty() && file.pip.is_empty()), "{} asks for nothing", path.display());
    }
}

#[test]
fn test_those_whose_packages_are_in_the_local_channel_are_built() {
    let server = Server::start(Channel::t2());
    let mut host = site::beside(&server.alias());
    let local = server.url("plain");
    let origin = "https://conda.anaconda.org";
    let mirrors = ["conda-forge", "main", "anaconda"].map(|name| format!("{origin}/{name}={local}"));
    host.set("AGENTD_CONDA_ALIAS", origin);
    host.set("AGENTD_CONDA_MIRRORS", &mirrors.join(", "));
    host.start();
    let solvable = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("solvable-");
    let files: Vec<PathBuf> = found().into_iter().filter(solvable).collect();
    assert!(!files.is_empty());
    for (number, path) in files.iter().enumerate() {
        let text = fs::read_to_string(path).unwrap();
        let dir = site::job(&host, &format!("p{number}"), &text, "python -c 1");
        let ran = site::run(&host, &dir);
        assert_eq!(ran.code, 0, "{}:\n{}", path.display(), ran.stderr);
    }
}
