//! No forgotten tests: every file of a suite is part of its binary, and every suite has its binary.

use std::path::PathBuf;

use crate::{files_below, none, read};

#[test]
fn test_every_test_file_is_part_of_a_binary() {
    let manifest = read("tests/Cargo.toml");
    let programs = ["repo", "system", "longlog", "fuzz", "bench"]
        .map(|suite| (suite.to_owned(), format!("{suite}/main.rs")));
    let tables = read("tests/tables.rs");
    let modules = tables.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    let modules = modules.map(|suite| (suite.to_owned(), format!("{suite}.rs")));
    let suites: Vec<(String, String)> = programs.into_iter().chain(modules).collect();
    let mut complaints = Vec::new();
    for (suite, root) in &suites {
        if root.ends_with("main.rs") && !manifest.contains(&format!("path = \"{root}\"")) {
            complaints.push(format!("tests/Cargo.toml does not build tests/{root}"));
        }
        for file in files_below(&format!("tests/{suite}"), &[".rs"]) {
            let folder = file.parent().unwrap();
            let parent = match folder.ends_with(suite) {
                true => PathBuf::from("tests").join(root),
                false => folder.with_extension("rs"),
            };
            let name = file.file_stem().unwrap().to_string_lossy().into_owned();
            // A program of its own beside that of the suite.
            let is_program = manifest.contains(&format!("path = \"{suite}/{name}.rs\""));
            if file != parent && !is_program && !read(parent).contains(&format!("mod {name};")) {
                complaints.push(format!("{} is not a module of its suite", file.display()));
            }
        }
    }
    for file in files_below("tests", &[".rs"]) {
        let below: Vec<_> = file.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let suite = below[1].trim_end_matches(".rs");
        if !["src", "tables"].contains(&suite) && !suites.iter().any(|(known, _)| known == suite) {
            complaints.push(format!("{} is part of no program", file.display()));
        }
    }
    none("test registration", complaints);
}
