//! Names that the file store of MLflow takes: they are names of its files.
//!
//! A job may have any text as the name of a metric, parameter or tag. Clients refuse the whole run if one of its names
//! has another character, or leads elsewhere. Pure functions: the same name always becomes the same one.

use std::collections::{BTreeMap, BTreeSet};

use agent_cas::digest_of;

/// The longest part of a name between slashes, in bytes. File systems take 255.
const LONGEST: usize = 240;
/// The longest id of a run, in bytes.
const LONGEST_ID: usize = 200;

/// Each name with the one that it gets here. No two get the same one, and none is a folder of another.
pub(super) fn fit<'a>(names: impl Iterator<Item = &'a String>) -> BTreeMap<&'a String, String> {
    let (mut fitted, mut taken) = (BTreeMap::new(), BTreeSet::new());
    let mut folders = BTreeSet::new();
    for name in names {
        let plain = characters(name);
        let base = match above(&plain).any(|folder| taken.contains(folder)) || folders.contains(&plain) {
            true => plain.replace('/', "."),
            false => plain,
        };
        let others = (2..).map(|number: u32| format!("{base}-{number}"));
        let is_free = |name: &String| !taken.contains(name) && !folders.contains(name);
        let Some(chosen) = std::iter::once(base.clone()).chain(others).find(is_free) else { continue };
        folders.extend(above(&chosen).map(str::to_owned));
        taken.insert(chosen.clone());
        fitted.insert(name, chosen);
    }
    fitted
}

/// The folders of a name: `a` and `a/b` of `a/b/c`.
fn above(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('/').map(|(at, _)| &name[..at])
}

/// The name with only such characters and parts as are taken.
fn characters(name: &str) -> String {
    let is_fit = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | ' ' | ':' | '/');
    let plain: String = name.chars().map(|c| if is_fit(c) { c } else { '_' }).collect();
    let parts = plain.split('/').filter(|part| !part.is_empty()).map(|part| match part {
        "." | ".." => "_".repeat(part.len()),
        part => shorten(part, LONGEST),
    });
    let plain = parts.collect::<Vec<_>>().join("/");
    if plain.is_empty() { "_".to_owned() } else { plain }
}

/// A text that is too long, cut, with something of its digest in place of its end.
fn shorten(text: &str, longest: usize) -> String {
    if text.len() <= longest {
        return text.to_owned();
    }
    let cut = text.floor_char_boundary(longest - 9);
    format!("{}-{}", &text[..cut], &digest_of(text.as_bytes()).hex()[..8])
}

/// An id of a run. MLflow takes fewer characters than names of jobs have.
pub(super) fn id(text: &str) -> String {
    let plain: String = text
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '_' | '-') { c } else { '_' })
        .collect();
    let begins = plain.starts_with(|c: char| c.is_ascii_alphanumeric());
    match plain == text && begins && plain.len() <= LONGEST_ID {
        true => plain,
        false => {
            let cut = &plain[..plain.len().min(LONGEST_ID)];
            format!("r{cut}-{}", &digest_of(text.as_bytes()).hex()[..8])
        }
    }
}

/// The id of an experiment: digits, made from its name.
pub(super) fn experiment(name: &str) -> String {
    let number = u64::from_str_radix(&digest_of(name.as_bytes()).hex()[..16], 16).unwrap_or_default();
    (number % 1_000_000_000_000_000_000).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitted(names: &[&str]) -> Vec<String> {
        let mut names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        names.sort();
        fit(names.iter()).into_values().collect()
    }

    #[test]
    fn test_names_are_files_of_their_own() {
        assert_eq!(fitted(&["val/loss", "a b:c-d.e_f", "größe"]), ["a b:c-d.e_f", "größe", "val/loss"]);
        assert_eq!(fitted(&["loss (val)", "loss [val]"]), ["loss _val_", "loss _val_-2"]);
        assert_eq!(fitted(&["a", "a/b", "a.b"]), ["a", "a.b", "a.b-2"]);
        assert_eq!(fitted(&["../../x", "/etc/passwd", "", "//"]), ["_", "__/__/x", "_-2", "etc/passwd"]);
        // The folder is there before the file.
        assert_eq!(fitted(&["(/x", "_"]), ["_/x", "_-2"]);
        let long = fitted(&[&"x".repeat(300), &format!("{}y", "x".repeat(299))]);
        assert!(long.iter().all(|name| name.len() <= LONGEST) && long[0] != long[1]);
    }

    #[test]
    fn test_ids_of_runs_are_those_of_jobs_where_that_is_one() {
        assert_eq!(id("train-a3f--trial_1"), "train-a3f--trial_1");
        let dotted = id("v1.2--x");
        assert!(dotted.starts_with("rv1_2--x-") && dotted != id("v1_2--x"), "{dotted}");
        assert!(id("-x").starts_with("r-x-") && id(&"x".repeat(300)).len() <= 210);
    }
}
