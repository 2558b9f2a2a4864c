//! Where the links of a tree lead.
//!
//! A link is followed over the entries of its own tree, as the system would follow it where the tree is laid out:
//! through directories and other links, segment by segment. Its target need not exist, so that `latest ->
//! outputs/last.ckpt` is kept as it is; a name that does not exist is treated as a directory. Pure.

use super::MAX_PATH;

/// Links that the system follows one after the other, at most.
const HOPS: usize = 40;

/// How many segments of links may be resolved in one tree: more than any honest tree needs, so that one that was made
/// to be costly is not.
#[derive(Debug)]
pub(super) struct Steps(u64);

impl Steps {
    /// For a tree with so many links.
    pub(super) fn for_links(links: u64) -> Steps {
        Steps(links.saturating_mul(64).saturating_add(100_000))
    }
}

/// Where a link leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leads<D> {
    /// To a place in the tree, whether or not anything is there: to this directory, if it is one.
    Inside(Option<D>),
    /// Out of it.
    Outside,
    /// In a circle, or over more links than the system follows; never out.
    Round,
    /// It was not followed to its end.
    Unknown,
}

/// What a directory has under a name.
pub(super) enum LinkTarget<'a, D> {
    Directory(D),
    /// A link with this target.
    Link(&'a str),
    /// A file, or nothing.
    Other,
}

/// Where a link with this target leads, in the last of the directories `way`, which begins with the root of the tree.
pub(super) fn follow<'a, D: Copy>(
    way: &[D],
    target: &'a str,
    steps: &mut Steps,
    find: impl Fn(D, &str) -> LinkTarget<'a, D>,
) -> Leads<D> {
    // A directory that is not there has no entries.
    let mut at: Vec<Option<D>> = way.iter().copied().map(Some).collect();
    let (mut left, mut hops) = (Vec::new(), 0);
    if !push(&mut left, target) {
        return Leads::Outside;
    }
    while let Some(segment) = left.pop() {
        let Some(fewer) = steps.0.checked_sub(1) else { return Leads::Unknown };
        steps.0 = fewer;
        match segment {
            "" | "." => {}
            ".." if at.len() <= 1 => return Leads::Outside,
            ".." => drop(at.pop()),
            name => match at.last().copied().flatten().map_or(LinkTarget::Other, |dir| find(dir, name)) {
                LinkTarget::Directory(dir) => at.push(Some(dir)),
                LinkTarget::Other => at.push(None),
                LinkTarget::Link(_) if hops == HOPS => return Leads::Round,
                LinkTarget::Link(target) => {
                    hops += 1;
                    if !push(&mut left, target) {
                        return Leads::Outside;
                    }
                }
            },
        }
    }
    Leads::Inside(at.pop().flatten())
}

/// Adds the segments of a target, the first one on top; `false` for a target that no link in a tree may have.
fn push<'a>(left: &mut Vec<&'a str>, target: &'a str) -> bool {
    left.extend(target.rsplit('/'));
    !target.is_empty() && !target.starts_with('/') && !target.contains('\0') && target.len() <= MAX_PATH
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree by the paths of its directories and links; a directory is its path.
    fn leads(from: &str, target: &str) -> Leads<&'static str> {
        const DIRECTORIES: [&str; 5] = ["a", "a/b", "a/b/c", "d", "outputs"];
        const LINKS: [(&str, &str); 8] = [
            ("d/up", "../a/b"),
            ("deep", "a/b/c"),
            ("round", "a/../d"),
            ("one", "two"),
            ("two", "one"),
            ("root", "."),
            ("out", "../x"),
            ("absolute", "/etc"),
        ];
        let find = |dir: &'static str, name: &str| {
            let path = if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
            if let Some(found) = DIRECTORIES.into_iter().find(|known| *known == path) {
                return LinkTarget::Directory(found);
            }
            LINKS
                .into_iter()
                .find(|(known, _)| *known == path)
                .map_or(LinkTarget::Other, |(_, to)| LinkTarget::Link(to))
        };
        let mut way = vec![""];
        way.extend(
            DIRECTORIES.into_iter().filter(|dir| from == *dir || from.starts_with(&format!("{dir}/"))),
        );
        follow(&way, target, &mut Steps::for_links(1), find)
    }

    #[test]
    fn test_links_lead_where_the_system_would_be_led() {
        for (from, target) in [
            ("", "a"),
            ("", "no/such/thing"),
            ("", "outputs/last.ckpt"),
            ("", "a/../d"),
            ("d", "../d/../d/x"),
            ("a", ".."),
            ("a/b", "../../d"),
            ("", "d/up/../../d"), // d/up is a/b
            ("", "deep/../../.."),
            ("", "no/../d"),
            ("", "root/root/root/a"),
            ("", "./a//b/"),
            ("", "round/up"),
        ] {
            assert!(matches!(leads(from, target), Leads::Inside(_)), "{target} in {from:?}");
        }
        for (from, target) in [
            ("", ".."),
            ("a", "../.."),
            ("", "d/up/../../.."),
            ("", "deep/../../../.."),
            ("", "no/../.."),
            ("", "root/.."),
            ("", "out"),
            ("", "a/../out"),
            ("", "absolute/passwd"),
            ("a", "/etc/passwd"),
            ("", ""),
            ("a", "a\0"),
        ] {
            assert_eq!(leads(from, target), Leads::Outside, "{target} in {from:?}");
        }
        for target in ["one", "a/../two", "one/.."] {
            assert_eq!(leads("", target), Leads::Round, "{target}");
        }
        assert_eq!(leads("", &"a/../".repeat(700)), Leads::Inside(Some("")));
        assert_eq!(leads("", "d/up/../../deep"), Leads::Inside(Some("a/b/c")));
        assert_eq!(leads("", "a/no"), Leads::Inside(None));
    }

    /// Each link of the chain is long, and there are many.
    #[test]
    fn test_costly_links_are_given_up() {
        let target = format!("{}x", "./".repeat(2000));
        let find = |(), _: &str| LinkTarget::Link(target.as_str());
        let mut steps = Steps::for_links(10);
        let led: Vec<Leads<()>> = (0..10).map(|_| follow(&[()], "x", &mut steps, find)).collect();
        assert!(led.iter().all(|leads| matches!(leads, Leads::Round | Leads::Unknown)));
        assert_eq!(steps.0, 0, "looked at more than there is to be looked at");
    }
}
