//! No forgotten tests: every file of a suite is part of its binary, and every suite has its binary.

use crate::{files_below, none, read};

#[test]
fn test_every_test_file_is_part_of_a_binary() {
    let manifest = read("tests/Cargo.toml");
    let roots = ["repo", "system", "longlog", "bench"].map(|suite| (suite.to_owned(), "main.rs"));
    let tables = read("tests/tables.rs");
    let modules = tables.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    let suites: Vec<(String, &str)> =
        roots.into_iter().chain(modules.map(|suite| (suite.to_owned(), "mod.rs"))).collect();
    let mut complaints = Vec::new();
    for (suite, root) in &suites {
        if *root == "main.rs" && !manifest.contains(&format!("path = \"{suite}/main.rs\"")) {
            complaints.push(format!("tests/Cargo.toml does not build tests/{suite}/main.rs"));
        }
        for file in files_below(&format!("tests/{suite}"), &[".rs"]) {
            let folder = file.parent().unwrap();
            let parent = match folder.ends_with(suite) {
                true => folder.join(root),
                false => folder.with_extension("rs"),
            };
            let name = file.file_stem().unwrap().to_string_lossy().into_owned();
            if !file.ends_with(root) && !read(parent).contains(&format!("mod {name};")) {
                complaints.push(format!("{} is not a module of its suite", file.display()));
            }
        }
    }
    for folder in files_below("tests", &["/mod.rs", "/main.rs"]) {
        let suite = folder.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned();
        if !suites.iter().any(|(known, _)| *known == suite) {
            complaints.push(format!("{} is part of no program", folder.display()));
        }
    }
    none("test registration", complaints);
}
