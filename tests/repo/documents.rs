//! Documents stay true: every path they name exists, the tour of the code names what is there and is short, and every
//! fault has its page.

use agent_model::Code;

use crate::{defined, files_below, none, read, root};

#[test]
fn test_paths_in_documents_exist() {
    let tops = ["agent/", "proto/", "packaging/", "systemd/", "tests/", ".ci/"];
    let mut documents = files_below("agent/docs", &[".md"]);
    documents.push("README.md".into());
    let mut complaints = Vec::new();
    for document in documents {
        let text = read(&document);
        for quoted in text.split('`').skip(1).step_by(2) {
            // A command line names paths too; a pattern or a placeholder does not.
            for word in quoted.split_whitespace() {
                let plain = !word.contains(['*', '{', '<', 'N']) || root().join(word).exists();
                if tops.iter().any(|top| word.starts_with(top)) && plain && !root().join(word).exists() {
                    complaints.push(format!("{} names `{word}`, which does not exist", document.display()));
                }
            }
        }
    }
    none("paths in documents", complaints);
}

/// Lines of the tour that somebody reads in ten minutes.
const TOUR: usize = 1200;

#[test]
fn test_tour_of_the_code_names_what_is_there_and_is_short() {
    let readme = read("README.md");
    let (_, tour) = readme.split_once("## The code in ten minutes\n").unwrap();
    let (walk, rest) = tour.split_once("\n### ").unwrap();
    let (rest, _) = rest.split_once("\n## ").unwrap();
    let mut complaints = Vec::new();
    let lines: usize = walk.lines().map(|row| lines_of(row, &mut complaints)).sum();
    for row in rest.lines() {
        lines_of(row, &mut complaints);
    }
    if !(TOUR / 4..=TOUR).contains(&lines) {
        complaints.push(format!("the first tour has {lines} lines, of {TOUR}"));
    }
    none("the tour of the code", complaints);
}

/// The lines of what a row of a table names; each name is defined in one of the files that the row names.
fn lines_of(row: &str, complaints: &mut Vec<String>) -> usize {
    let quoted = row.split('`').skip(1).step_by(2);
    let (files, names): (Vec<&str>, Vec<&str>) = quoted.partition(|quoted| quoted.contains('/'));
    let sources: Vec<String> = files.into_iter().filter(|file| file.ends_with(".rs")).map(read).collect();
    let is_table = row.starts_with('|');
    let mut lines = 0;
    for name in names.into_iter().filter(|_| is_table) {
        match sources.iter().find_map(|source| definition(source, name)) {
            Some(length) => lines += length,
            None => complaints.push(format!("`{name}` is not defined where the tour says: {row}")),
        }
    }
    lines
}

/// How many lines the definition of `name` has.
fn definition(source: &str, name: &str) -> Option<usize> {
    let mut lines = source.lines().skip_while(|line| defined(line).is_none_or(|(_, found)| found != name));
    let first = lines.next()?;
    let indent = &first[..first.len() - first.trim_start().len()];
    let end = format!("{indent}}}");
    let whole = first.ends_with(';') || first.ends_with('}');
    Some(if whole { 1 } else { 2 + lines.take_while(|line| *line != end).count() })
}

#[test]
fn test_every_fault_has_a_page() {
    let mut complaints = Vec::new();
    for code in Code::ALL {
        let page = root().join(format!("agent/docs/faults/{code}.md"));
        match std::fs::read_to_string(&page) {
            Ok(text) if text.starts_with(&format!("# {code}")) && text.len() > 200 => {}
            Ok(_) => complaints.push(format!("{} does not explain `# {code}`", page.display())),
            Err(_) => complaints.push(format!("{code} has no page")),
        }
    }
    for page in files_below("agent/docs/faults", &[".md"]) {
        let name = page.file_stem().unwrap().to_string_lossy().into_owned();
        if Code::parse(&name).is_none() {
            complaints.push(format!("{} explains no fault", page.display()));
        }
    }
    none("fault pages", complaints);
}
