//! The dependency tree stays lean: one version of each crate, but for what `deny.toml` excuses.

use std::collections::BTreeMap;
use std::process::Command;

use crate::{none, read, root};

#[test]
#[allow(clippy::disallowed_methods, reason = "asks cargo which crates are built")]
fn test_one_version_of_each_crate() {
    let tree = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--workspace",
            "--locked",
            "--duplicates",
            "--depth",
            "0",
            "--prefix",
            "none",
            "-e",
            "normal,build",
        ])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in String::from_utf8(tree.stdout).unwrap().lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            let known = versions.entry(name.to_owned()).or_default();
            if !known.iter().any(|v| v == version) {
                known.push(version.to_owned());
            }
        }
    }
    let excused = read("deny.toml");
    let complaints = versions
        .iter()
        .filter(|(name, versions)| versions.len() > 1 && !excused.contains(&format!("\"{name}\"")))
        .map(|(name, versions)| format!("{name}: {}", versions.join(", ")))
        .collect();
    none("crates with more than one version", complaints);
}

#[test]
fn test_every_crate_comes_from_the_registry() {
    let lock = read("Cargo.lock");
    let complaints = lock
        .lines()
        .filter(|line| line.starts_with("source = ") && !line.contains("registry+"))
        .map(str::to_owned)
        .collect();
    none("sources", complaints);
}
