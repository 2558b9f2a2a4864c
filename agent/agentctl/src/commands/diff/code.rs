//! The code of two jobs, file by file and line by line.
//!
//! Snapshots name every file by its content, so only files that differ are read, and of those only texts of a size that
//! people read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use agent_cas::BlobStore;
use agent_cas::snapshot::{self, Entry};
use agent_model::{Digest, causes};
use serde::Serialize;
use similar::TextDiff;

use crate::client::Client;
use crate::output::Paper;
use crate::output::text::{Tone, clean};

/// A file with more bytes than this is not compared line by line.
const LARGEST: u64 = 1 << 20;
/// Files that are compared line by line; more are only named.
const MOST: usize = 200;
/// How long the lines of one file may be compared; then fewer of them are found to be the same.
const PATIENCE: Duration = Duration::from_secs(2);
/// Lines before and after a change.
const AROUND: usize = 3;

/// A file that is not the same in both.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct ChangedFile {
    path: String,
    /// `added`, `removed`, `changed`, or `mode`, where only its right to be executed differs.
    change: &'static str,
    /// Why it has no lines to show: `binary`, `large`, `many` files are changed, or `missing` in the store.
    hidden: Option<&'static str>,
    /// Lines that were removed (`-`), added (`+`), or stand beside them, as `diff -u` prints them.
    lines: Vec<String>,
}

impl ChangedFile {
    pub(super) fn render(&self, paper: Paper) -> String {
        let why = self.hidden.map(|why| format!(" ({why})")).unwrap_or_default();
        format!("  {} {}{why}\n{}", self.change, clean(&self.path), render_lines(&self.lines, paper))
    }
}

/// Lines as they are shown, in the colours of their kind.
pub(super) fn render_lines(lines: &[String], paper: Paper) -> String {
    let mut text = String::new();
    for line in lines {
        let tone = match line.as_bytes().first() {
            Some(b'+') => Tone::Good,
            Some(b'-') => Tone::Bad,
            Some(b'@') => Tone::Dim,
            _ => Tone::Plain,
        };
        let _ = writeln!(text, "    {}", paper.ink.paint(tone, &clean(line))); // into memory
    }
    text
}

/// Every file that differs; an error in words if that cannot be found out.
pub(super) async fn changed(
    client: &Client,
    one: Option<Digest>,
    other: Option<Digest>,
) -> Result<Vec<ChangedFile>, String> {
    if one == other {
        return Ok(Vec::new());
    }
    let (one, other) = (listed(client, one).await?, listed(client, other).await?);
    let mut files = Vec::new();
    for (path, pair) in pairs(&one, &other) {
        files.push(compare(client, path, pair, files.len()).await);
    }
    Ok(files)
}

async fn listed(client: &Client, root: Option<Digest>) -> Result<BTreeMap<String, Entry>, String> {
    let Some(root) = root else { return Ok(BTreeMap::new()) };
    let entries = snapshot::list(&client.blobs(), root).await.map_err(|error| causes::tell(&error))?;
    Ok(entries.into_iter().map(|entry| (entry.path.clone(), entry)).collect())
}

type Pair<'a> = (Option<&'a Entry>, Option<&'a Entry>);

fn pairs<'a>(
    one: &'a BTreeMap<String, Entry>,
    other: &'a BTreeMap<String, Entry>,
) -> BTreeMap<&'a str, Pair<'a>> {
    let paths = one.keys().chain(other.keys()).map(|path| (path.as_str(), (one.get(path), other.get(path))));
    let of = |entry: Option<&Entry>| entry.map(|entry| (entry.digest, entry.executable));
    paths.filter(|(_, (one, other))| of(*one) != of(*other)).collect()
}

async fn compare(client: &Client, path: &str, pair: Pair<'_>, before: usize) -> ChangedFile {
    let change = match pair {
        (None, _) => "added",
        (_, None) => "removed",
        (Some(one), Some(other)) if one.digest == other.digest => "mode",
        _ => "changed",
    };
    let entries = [pair.0, pair.1];
    let large = entries.iter().flatten().any(|entry| entry.digest.size > LARGEST);
    let read = match (change, large, before >= MOST) {
        ("mode", ..) => Ok(Vec::new()),
        (_, true, _) => Err("large"),
        (_, _, true) => Err("many"),
        _ => lines(client, entries).await,
    };
    let hidden = read.as_ref().err().copied();
    ChangedFile { path: path.to_owned(), change, hidden, lines: read.unwrap_or_default() }
}

/// The lines that differ; where there are none to show, the reason.
async fn lines(client: &Client, entries: [Option<&Entry>; 2]) -> Result<Vec<String>, &'static str> {
    let mut texts = [String::new(), String::new()];
    for (text, entry) in texts.iter_mut().zip(entries) {
        let Some(entry) = entry else { continue };
        let read = client.blobs().read_batch(vec![entry.digest]).await.pop();
        let bytes = read.and_then(Result::ok).ok_or("missing")?;
        *text = String::from_utf8(bytes.to_vec()).ok().filter(|text| !text.contains('\0')).ok_or("binary")?;
    }
    Ok(unified(&texts[0], &texts[1]))
}

/// The changes between two texts, as `diff -u` prints them.
pub(super) fn unified(one: &str, other: &str) -> Vec<String> {
    let diff = TextDiff::configure().timeout(PATIENCE).diff_lines(one, other);
    let is_short = one.lines().count().max(other.lines().count()) <= 2 * AROUND;
    let mut lines = Vec::new();
    for hunk in diff.unified_diff().context_radius(AROUND).iter_hunks() {
        if !is_short {
            lines.push(hunk.header().to_string());
        }
        for change in hunk.iter_changes() {
            lines.push(format!("{}{}", change.tag(), change.value().trim_end_matches('\n')));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, size: u64, executable: bool) -> Entry {
        Entry { path: path.to_owned(), digest: Digest { size, ..Digest::EMPTY }, executable }
    }

    #[test]
    fn test_only_files_that_differ_are_compared() {
        let of = |entries: &[Entry]| -> BTreeMap<String, Entry> {
            entries.iter().map(|entry| (entry.path.clone(), entry.clone())).collect()
        };
        let one =
            of(&[entry("a", 1, false), entry("b", 1, false), entry("c", 1, false), entry("d", 1, false)]);
        let other =
            of(&[entry("a", 1, false), entry("b", 2, false), entry("c", 1, true), entry("e", 1, false)]);
        assert_eq!(pairs(&one, &other).into_keys().collect::<Vec<_>>(), ["b", "c", "d", "e"]);
    }

    #[test]
    fn test_changes_are_shown_with_the_lines_around_them() {
        let one: String = (1..=20).map(|number| format!("{number}\n")).collect();
        let other = one.replace("10\n", "ten\n");
        let expected = ["@@ -7,7 +7,7 @@", " 7", " 8", " 9", "-10", "+ten", " 11", " 12", " 13"];
        assert_eq!(unified(&one, &other), expected);
        assert_eq!(unified("a\n", "a"), ["-a", "+a"]);
        assert!(unified(&one, &one).is_empty());
    }
}
