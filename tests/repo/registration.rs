//! No forgotten tests: every file of a suite is part of its binary, and every suite has its binary.

use crate::{files_below, none, read};

#[test]
fn test_every_test_file_is_part_of_a_binary() {
    let manifest = read("tests/Cargo.toml");
    let mut complaints = Vec::new();
    for suite in [
        "repo",
        "system",
        "longlog",
        "bench",
        "faults",
        "environments",
        "boundaries",
        "containers",
        "gangs",
        "snapshots",
        "scarcity",
    ] {
        if !manifest.contains(&format!("path = \"{suite}/main.rs\"")) {
            complaints.push(format!("tests/Cargo.toml does not build tests/{suite}/main.rs"));
        }
        for file in files_below(&format!("tests/{suite}"), &[".rs"]) {
            let name = file.file_stem().unwrap().to_string_lossy().into_owned();
            let folder = file.parent().unwrap();
            let parent = match folder.ends_with(suite) {
                true => folder.join("main.rs"),
                false => folder.with_extension("rs"),
            };
            if name != "main" && !read(parent).contains(&format!("mod {name};")) {
                complaints.push(format!("{} is not a module of its suite", file.display()));
            }
        }
    }
    none("test registration", complaints);
}
