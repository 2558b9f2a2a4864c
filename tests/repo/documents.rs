//! Documents stay true: every path they name exists, and every fault has its page.

use agent_model::Code;

use crate::{files_below, none, read, root};

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
