//! What the code of a job is sent without, whatever an ignore file says: what earlier jobs left, and what tools make again.
//!
//! Owns when `outputs` and `logs` are part of the code: where git tracks something in them, or where they hold a script.
//! Invariant: a directory without any of these entries has the same digest as without these rules.

use std::fs;
use std::path::Path;

use super::ignore::Ignore;
use super::left_out::LeftOut;

/// Made again by the tool that made it.
const TOOLS: &str =
    "__pycache__/\n.ipynb_checkpoints/\n.mypy_cache/\n.pytest_cache/\n.ruff_cache/\n/wandb/\n/mlruns/\n";
/// Every job begins with these, and they are empty: what is in them here would be taken for what it left.
const LEFT_BY_JOBS: [&str; 2] = ["outputs", "logs"];
/// Entries that are looked at in one of them.
const LOOKED_AT: usize = 10_000;

/// The rules of a project: these, and behind them those of its ignore file.
pub(super) fn rules(dir: &Path, ignore: Ignore, left_out: &mut LeftOut) -> Ignore {
    let is_left = |name: &&str| {
        let there = dir.join(name);
        let is_decided = ignore.last(name, name, true).is_some();
        !is_decided && is_filled(&there) && !is_tracked(dir, name) && !has_script(&there, &mut 0)
    };
    let left: Vec<&str> = LEFT_BY_JOBS.into_iter().filter(is_left).collect();
    for name in &left {
        left_out.warnings.push(format!(
            "{name} is not sent: a job begins with an empty one. The line !/{name}/ in {} sends it",
            ignore.file()
        ));
    }
    let left: String = left.iter().map(|name| format!("/{name}/\n")).collect();
    ignore.behind(&(left + TOOLS))
}

/// Whether it is a directory, no link to one, with something in it.
fn is_filled(dir: &Path) -> bool {
    let is_dir = fs::symlink_metadata(dir).is_ok_and(|there| there.is_dir());
    is_dir && fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

/// Whether git may track a file in it, by the names in its index. In the form 4 of an index names are cut, so there
/// everything counts as tracked.
fn is_tracked(dir: &Path, name: &str) -> bool {
    let Ok(index) = fs::read(dir.join(".git/index")) else { return false };
    let begin = format!("{name}/").into_bytes();
    index.get(4..8) == Some(&[0, 0, 0, 4]) || index.windows(begin.len()).any(|part| part == begin)
}

/// Whether there is a Python script below. Among very many entries it is not looked for any longer.
fn has_script(dir: &Path, seen: &mut usize) -> bool {
    fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| {
        *seen += 1;
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_script = entry.path().extension().is_some_and(|ending| ending == "py");
        *seen <= LOOKED_AT && (is_script || (is_dir && has_script(&entry.path(), seen)))
    })
}
