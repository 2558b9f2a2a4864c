//! Files stay readable: they open with what they are, and none is too long.

use crate::{files_below, none, production, read};

/// Lines of production code a file may have.
const LONGEST: usize = 900;
/// Lines of a file that holds nothing but tests, or what they are made of.
const LONGEST_OF_TESTS: usize = 700;
/// Lines of a file in C, which tests alone have.
const LONGEST_IN_C: usize = 400;

fn sources() -> Vec<std::path::PathBuf> {
    ["agent", "proto", "tests"]
        .iter()
        .flat_map(|dir| files_below(dir, &[".rs"]))
        .filter(|path| !path.to_string_lossy().contains("/generated/"))
        .collect()
}

#[test]
fn test_no_file_is_too_long() {
    let complaints = sources()
        .iter()
        .filter_map(|path| {
            let text = read(path);
            let lines = production(&text).lines().count();
            let name = path.to_string_lossy();
            let is_test = name.starts_with("tests/") || name.contains("/tests") || name.contains("/sim/");
            let most = if is_test { LONGEST_OF_TESTS } else { LONGEST };
            (lines > most).then(|| format!("{name} has {lines} lines, at most {most}"))
        })
        .collect();
    none("file length", complaints);
}

#[test]
fn test_every_file_opens_with_what_it_is() {
    let complaints = sources()
        .iter()
        .filter(|path| !path.ends_with("tests.rs"))
        .filter(|path| !read(path).starts_with("//!"))
        .map(|path| format!("{} does not begin with `//!`", path.display()))
        .collect();
    none("module documentation", complaints);
}

#[test]
fn test_files_in_c_are_short_and_open_with_what_they_are() {
    let mut complaints = Vec::new();
    for path in ["agent", "tests"].iter().flat_map(|dir| files_below(dir, &[".c", ".h"])) {
        let text = read(&path);
        if !text.starts_with("/*") {
            complaints.push(format!("{} does not begin with `/*`", path.display()));
        }
        if text.lines().count() > LONGEST_IN_C {
            complaints.push(format!("{} has more than {LONGEST_IN_C} lines", path.display()));
        }
        complaints.extend(path.starts_with("agent").then(|| format!("{} is in C", path.display())));
    }
    none("files in C", complaints);
}

#[test]
fn test_a_module_is_named_by_its_file() {
    let complaints = sources()
        .iter()
        .filter(|path| path.ends_with("mod.rs"))
        .map(|path| format!("{}: name the file after the module, beside its directory", path.display()))
        .collect();
    none("module files", complaints);
}

/// Who calls changes, and nobody who changes it looks here.
#[test]
fn test_no_module_says_who_calls_it() {
    let complaints = sources()
        .iter()
        .filter(|path| {
            let text = read(path);
            let head: String = text.lines().take_while(|line| line.starts_with("//!")).collect();
            ["Called by ", "Caller: ", "Callers: "].iter().any(|words| head.contains(words))
        })
        .map(|path| format!("{} says who calls it", path.display()))
        .collect();
    none("callers", complaints);
}

#[test]
fn test_nothing_is_left_to_be_done_later() {
    let marks = ["TODO", "FIXME", "XXX", "HACK"];
    let complaints = sources()
        .iter()
        .filter(|path| !path.ends_with("repo/files.rs"))
        .flat_map(|path| {
            let text = read(path);
            marks
                .iter()
                .filter(|mark| text.contains(**mark))
                .map(|mark| format!("{} holds `{mark}`", path.display()))
                .collect::<Vec<_>>()
        })
        .collect();
    none("marks of unfinished work", complaints);
}
