//! A type has a name of its own: who reads `Place` in three crates has to ask each time which one is meant.

use std::collections::{BTreeMap, BTreeSet};

use crate::{defined, files_below, none, production, read};

/// Crates that may have a type of the same name.
const CRATES: usize = 2;

#[test]
fn test_a_type_name_stands_in_at_most_two_crates() {
    let mut crates: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in ["agent", "proto"].iter().flat_map(|dir| files_below(dir, &[".rs"])) {
        let name = path.to_string_lossy().into_owned();
        if ["/generated/", "/tests", "/sim"].iter().any(|part| name.contains(part)) {
            continue;
        }
        let home = name.split("/src").next().unwrap_or_default().to_owned();
        let text = read(&path);
        let outside = production(&text).lines().filter(|line| !line.starts_with(' ')).filter_map(defined);
        for (_, name) in outside.filter(|(kind, _)| *kind != "fn") {
            crates.entry(name.to_owned()).or_default().insert(home.clone());
        }
    }
    assert!(crates.len() > 500, "the types are found");
    let complaints = crates
        .iter()
        .filter(|(_, homes)| homes.len() > CRATES)
        .map(|(name, homes)| format!("`{name}` is a type in {homes:?}: at most {CRATES}"))
        .collect();
    none("names of types", complaints);
}

/// What `doctor` finds wanting comes with a remedy: the constructors of a finding ask for one, a literal does not.
#[test]
fn test_a_finding_is_made_by_its_constructors() {
    let mut complaints = Vec::new();
    for path in files_below("agent", &[".rs"]) {
        let name = path.to_string_lossy().into_owned();
        if name == "agent/model/src/node.rs" || name.contains("/tests") {
            continue;
        }
        let text = read(&path);
        let production = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (index, line) in production.lines().enumerate() {
            // Types, patterns and copies may name it.
            let others = ["-> Finding {", "struct Finding {", "let Finding {", ".. }", "..finding"];
            if line.contains("Finding {") && !others.iter().any(|other| line.contains(other)) {
                complaints.push(format!("{name}, line {}: `Finding::limited` and its like", index + 1));
            }
        }
    }
    none("findings", complaints);
}

/// A table may say which test holds one of its rows; who renames the test must hear of it before a long run does.
#[test]
fn test_a_test_that_is_named_exists() {
    let sources: Vec<String> = ["agent", "proto", "tests"]
        .iter()
        .flat_map(|dir| files_below(dir, &[".rs"]))
        .map(|path| read(&path))
        .collect();
    let names = |text: &str, before: &str| -> Vec<String> {
        let found = text.split(before).skip(1);
        found
            .map(|rest| {
                rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default()
            })
            .map(|name| format!("test_{name}"))
            .collect()
    };
    let defined: BTreeSet<String> = sources.iter().flat_map(|text| names(text, "fn test_")).collect();
    let named: BTreeSet<String> = sources.iter().flat_map(|text| names(text, "\"test_")).collect();
    assert!(named.len() > 10, "the names are found");
    let complaints =
        named.difference(&defined).map(|name| format!("`{name}` is named, and no test is called so"));
    none("names of tests", complaints.collect());
}
