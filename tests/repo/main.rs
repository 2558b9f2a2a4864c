//! Rules of the repository that a compiler does not check.
//!
//! Each module is one rule. Nothing here is ever skipped: the rules need only the tree itself.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod dependencies;
mod documents;
mod failpoints;
mod files;
mod generated;
mod layering;
mod names;
mod registration;
mod structure;
mod wire;

use std::path::{Path, PathBuf};

/// The top of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// Every file below `dir` with one of these endings, by path relative to the top.
fn files_below(dir: &str, endings: &[&str]) -> Vec<PathBuf> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        let mut entries: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && name != ".git" {
                walk(&path, found);
            } else if path.is_file() {
                found.push(path);
            }
        }
    }
    let (root, mut found) = (root(), Vec::new());
    walk(&root.join(dir), &mut found);
    found
        .into_iter()
        .filter(|path| endings.iter().any(|ending| path.to_string_lossy().ends_with(ending)))
        .map(|path| path.strip_prefix(&root).unwrap().to_owned())
        .collect()
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The part of a file that is no module of tests.
fn production(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod ").next().unwrap_or_default()
}

/// What a line defines: of which kind it is, and its name.
fn defined(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let mut rest = match line.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => line.strip_prefix("pub ").unwrap_or(line),
    };
    for word in ["const ", "async ", "unsafe "] {
        rest = rest.strip_prefix(word).unwrap_or(rest);
    }
    let (kind, rest) = rest.split_once(' ')?;
    let is_kind = ["fn", "struct", "enum", "trait", "type", "union"].contains(&kind);
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    is_kind.then_some((kind, name))
}

/// Fails with every complaint at once.
fn none(rule: &str, complaints: Vec<String>) {
    assert!(complaints.is_empty(), "{rule}:\n  {}", complaints.join("\n  "));
}
