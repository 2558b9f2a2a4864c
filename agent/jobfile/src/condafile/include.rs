//! Files that the pip part of a conda file includes, inserted where they are named.
//!
//! A line `-r FILE` becomes a list of the lines of that file, in its place: the numbers of all other lines do not
//! change, and the lines of the file have the number of the line that includes them.

use super::document;
use crate::Rejection;
use crate::requirement;
use crate::yaml::{self, Node, NotPlain, Value};
use agent_model::fault::Fault;

/// The text with the files that its pip part includes inserted. `read` returns the lines of a file, whose path is
/// relative to the conda file.
pub fn inline(text: &str, mut read: impl FnMut(&str) -> Result<Vec<String>, Fault>) -> Result<String, Fault> {
    let root = document(text)?;
    let mut inlined = String::with_capacity(text.len());
    let mut copied = 0;
    let written = yaml::plain(text).map_err(|error| match error {
        NotPlain::Syntax(at) | NotPlain::Fancy(at) => Rejection::syntax(at),
    })?;
    for (node, path) in includes(&root) {
        let Some(scalar) = written.iter().find(|scalar| scalar.place == node.place) else { continue };
        if text[scalar.span.clone()].contains('\n') {
            return Err(Rejection::invalid(node.place, "`pip`: an entry has more than one line")
                .fix("write one package in each entry")
                .into());
        }
        let lines = read(path)?;
        inlined.push_str(&text[copied..scalar.span.start]);
        inlined.push_str(&serde_json::to_string(&lines).unwrap_or_default()); // texts always serialise
        copied = scalar.span.end;
    }
    inlined.push_str(&text[copied..]);
    Ok(inlined)
}

/// The lines of the pip part that include a file, and the path each names.
fn includes(root: &Node) -> Vec<(&Node, &str)> {
    let mut found = Vec::new();
    for dependencies in values(root, "dependencies") {
        for item in items(dependencies) {
            for pip in values(item, "pip") {
                for line in items(pip) {
                    if let Value::Scalar(text) = &line.value
                        && let requirement::Line::Include(path) = requirement::judge(text.trim())
                    {
                        found.push((line, path));
                    }
                }
            }
        }
    }
    found
}

fn values<'a>(node: &'a Node, key: &'a str) -> impl Iterator<Item = &'a Node> {
    let entries = match &node.value {
        Value::Map(entries) => entries.as_slice(),
        _ => &[],
    };
    entries.iter().filter(move |(known, _)| known.text == key).map(|(_, value)| value)
}

fn items(node: &Node) -> &[Node] {
    match &node.value {
        Value::List(items) => items,
        _ => &[],
    }
}
