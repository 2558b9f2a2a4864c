//! How the code hangs together: no files that need each other in a circle, and no crate that grows unnoticed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::{files_below, none, production, read};

/// Files side by side that still need each other: to be undone, and never added to.
const LEFT: &[(&str, &[&str])] = &[];

/// Lines of code that each crate may have, its tests not counted. Whoever raises one says in the commit what it is for.
const CODE: &[(&str, usize)] = &[
    ("agent/agentctl", 15_300),
    ("agent/agentd", 18_300),
    ("agent/attach", 2_400),
    ("agent/blocking", 100),
    ("agent/cas", 8_900),
    ("agent/command", 600),
    ("agent/control", 17_600),
    ("agent/env", 4_300),
    ("agent/fs", 400),
    ("agent/identity", 1_200),
    ("agent/jobfile", 6_800),
    ("agent/model", 6_400),
    ("agent/node", 1_300),
    ("agent/runtime", 8_800),
    ("agent/shim", 6_400),
    ("agent/spawn", 2_000),
    ("proto", 8_300),
];

/// How far below its limit a crate may be, so that a limit says something.
const SLACK: usize = 300;

/// The module that a file is, as the names that lead to it from its crate.
type Module = Vec<String>;

/// The directories of the crates.
fn crates() -> BTreeSet<PathBuf> {
    let manifests = ["agent", "proto"].into_iter().flat_map(|dir| files_below(dir, &["/Cargo.toml"]));
    manifests.filter_map(|manifest| Some(manifest.parent()?.to_owned())).collect()
}

/// The files of a crate that are part of what is installed.
fn files_of(dir: &Path) -> Vec<PathBuf> {
    let of_tests = |path: &Path| {
        path.components()
            .any(|part| matches!(part.as_os_str().to_str(), Some("tests" | "tests.rs" | "sim" | "sim.rs")))
    };
    let files = files_below(&dir.join("src").to_string_lossy(), &[".rs"]).into_iter();
    files.filter(|path| !of_tests(path.strip_prefix(dir).unwrap())).collect()
}

/// The lines of a file that are code of the product: no comments, no blank lines, no tests.
fn code(path: &Path) -> String {
    let text = read(path);
    let lines = production(&text)
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

fn module(dir: &Path, path: &Path) -> Module {
    let names = path.strip_prefix(dir.join("src")).unwrap().with_extension("");
    let mut names: Module = names.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    if matches!(&*names.join("/"), "lib" | "main") {
        names.clear();
    }
    names
}

/// The paths that a tree of `use` stands for.
fn leaves(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((before, inside)) = tree.strip_suffix('}').and_then(|tree| tree.split_once('{')) else {
        return vec![tree.to_owned()];
    };
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in inside.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match c == ',' && depth == 0 {
            true => parts.push(String::new()),
            false => parts.last_mut().unwrap().push(c),
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| leaves(part)).map(|leaf| format!("{before}{leaf}")).collect()
}

/// Every path that begins with a word for a place in the same crate.
fn paths(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            if code[..at].chars().next_back().is_some_and(is_word) {
                continue;
            }
            let rest = &code[at..];
            let plain = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            match rest[plain..].starts_with('{') {
                true => found.extend(leaves(&rest[..rest.find(';').unwrap_or(rest.len())])),
                false => found.push(rest[..plain].to_owned()),
            }
        }
    }
    found
}

/// Where a path leads, of the modules that there are.
fn target(from: &Module, path: &str, modules: &BTreeSet<Module>) -> Option<Module> {
    let mut to = from.clone();
    for (at, name) in path.split("::").map(str::trim).enumerate() {
        match name {
            "crate" if at == 0 => to.clear(),
            "self" => {}
            "super" => drop(to.pop()?),
            name => to.push(name.to_owned()),
        }
    }
    while !modules.contains(&to) {
        to.pop()?;
    }
    Some(to)
}

/// Of the modules below one, who needs whom: the names of neighbours.
fn needs(dir: &Path) -> BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> {
    let files: Vec<_> = files_of(dir).into_iter().map(|path| (module(dir, &path), code(&path))).collect();
    let modules: BTreeSet<Module> = files.iter().map(|(module, _)| module.clone()).collect();
    let mut needs: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (from, code) in &files {
        for to in paths(code).iter().filter_map(|path| target(from, path, &modules)) {
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if let (Some(one), Some(other)) = (from.get(common), to.get(common)) {
                let of = needs.entry(from[..common].to_vec()).or_default();
                of.entry(one.clone()).or_default().insert(other.clone());
            }
        }
    }
    needs
}

/// All that a module leads to.
fn reached<'a>(needs: &'a BTreeMap<String, BTreeSet<String>>, from: &str) -> BTreeSet<&'a str> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(name) = next.pop() {
        let new = needs.get(name).into_iter().flatten().filter(|other| reached.insert(other.as_str()));
        next.extend(new.map(String::as_str).collect::<Vec<_>>());
    }
    reached
}

fn circles() -> BTreeSet<(String, Vec<String>)> {
    let mut found = BTreeSet::new();
    for dir in crates() {
        for (parent, needs) in needs(&dir) {
            let place =
                dir.join("src").join(parent.join("/")).to_string_lossy().trim_end_matches('/').to_owned();
            for name in needs.keys() {
                let own = reached(&needs, name);
                let circle = own.iter().filter(|other| reached(&needs, other).contains(name.as_str()));
                let circle: Vec<String> = circle.map(|other| (*other).to_owned()).collect();
                found.extend((!circle.is_empty()).then(|| (place.clone(), circle)));
            }
        }
    }
    found
}

#[test]
fn test_no_circle_between_files_is_added() {
    let is_left = |place: &str, circle: &[String]| {
        LEFT.iter()
            .any(|(at, names)| *at == place && circle.iter().all(|name| names.contains(&name.as_str())))
    };
    let found = circles();
    let new = found.iter().filter(|(place, circle)| !is_left(place, circle));
    let mut complaints: Vec<String> =
        new.map(|(place, circle)| format!("{place}: {}", circle.join(", "))).collect();
    let is_there = |place: &str, names: &[&str]| {
        found
            .iter()
            .any(|(at, circle)| at == place && circle.iter().all(|name| names.contains(&name.as_str())))
    };
    let undone = LEFT.iter().filter(|(place, names)| !is_there(place, names));
    complaints.extend(
        undone.map(|(place, names)| format!("{place}: {names:?} is undone: take it out of the list")),
    );
    none("circles between files (what both need goes into one of its own)", complaints);
}

#[test]
fn test_no_crate_grows_unnoticed() {
    let lines = |dir: &PathBuf| files_of(dir).iter().map(|path| code(path).lines().count()).sum::<usize>();
    let counted: BTreeMap<String, usize> =
        crates().iter().map(|dir| (dir.to_string_lossy().into_owned(), lines(dir))).collect();
    let limits: BTreeMap<String, usize> = CODE.iter().map(|(dir, most)| ((*dir).to_owned(), *most)).collect();
    let all = counted.keys().chain(limits.keys()).collect::<BTreeSet<_>>().into_iter();
    let complaints = all.filter_map(|dir| match (counted.get(dir), limits.get(dir)) {
        (Some(now), Some(most)) if now <= most && now + SLACK >= *most => None,
        (Some(now), Some(most)) => Some(format!("{dir} has {now} lines, its limit is {most}")),
        (Some(now), None) => Some(format!("{dir} has {now} lines and no limit")),
        (None, _) => Some(format!("{dir} is no crate")),
    });
    none("lines of code", complaints.collect());
}

#[test]
fn test_a_circle_is_found() {
    let one = |needs: &[(&str, &[&str])]| -> BTreeMap<String, BTreeSet<String>> {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        needs.iter().map(|(name, others)| ((*name).to_owned(), names(others))).collect()
    };
    let needs = one(&[("a", &["b"]), ("b", &["c"]), ("c", &["a", "d"])]);
    assert_eq!(reached(&needs, "a"), ["a", "b", "c", "d"].into());
    assert_eq!(reached(&needs, "d"), [].into());
    assert_eq!(leaves("crate::{a::{B, c}, d}"), ["crate::a::B", "crate::a::c", "crate::d"]);
    let modules = [vec![], vec!["a".to_owned()], vec!["a".to_owned(), "b".to_owned()]].into();
    let at = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(target(&at, "super::Thing", &modules), Some(vec!["a".to_owned()]));
    assert_eq!(target(&at, "crate::a::b::Thing", &modules), Some(at.clone()));
    assert_eq!(
        paths("use crate::x::{y, z};\nlet a = super::b(mycrate::c);"),
        ["crate::x::y", "crate::x::z", "super::b"]
    );
}
