//! Links that lead out of the tree, or would if another link helped; names that are a link and something else.

use super::{Case, Fate, Group, plain};
use crate::snapshots::forge::{Kind, directory, file, link};

/// Targets that lead out of wherever they stand, or may.
const OUT: &[&str] = &[
    "",
    "/",
    "//",
    "/etc/passwd",
    "/proc/self/root",
    "/proc/self/cwd/..",
    "/dev/fd/3",
    "//etc",
    "a/../../../../..",
    "a/b/../../../../../../x",
    "a/./../../../../..",
    "a//../../../../..",
    "../../../../../../../../../../etc/passwd",
    "..//..//..//..//..//..",
    "./../../../../..",
    "x\0y",
    "\0",
];

/// Targets that leave a directory by one level.
const UP: &[&str] = &["..", "../", "../x", "./..", "./../x", ".//..//x", "../../x/y"];

pub(crate) fn links() -> Vec<Case> {
    let mut group = Group::default();
    for target in OUT {
        for depth in [0, 1, 3] {
            let shown = format!("-> {target:?} at depth {depth}");
            group.fated(shown, Fate::Refused(&["link"]), |forge| {
                let inner = forge.directory(&[link(b"l", target.as_bytes())]);
                forge.below(depth, "d", inner)
            });
        }
    }
    for target in UP {
        group.refused(format!("-> {target:?} in the root"), &["link"], &[link(b"l", target.as_bytes())]);
    }
    for depth in [1, 2, 5, 50] {
        let target = "../".repeat(depth + 1);
        group.fated(format!("one level too far up from depth {depth}"), Fate::Refused(&["link"]), |forge| {
            let inner = forge.directory(&[link(b"l", target.as_bytes())]);
            forge.below(depth, "d", inner)
        });
    }
    for length in [4096, 5000] {
        let target = "t".repeat(length);
        group.refused(format!("a target of {length} bytes"), &["link"], &[link(b"l", target.as_bytes())]);
    }
    group.refused("a target of 9000 bytes", &["large entry"], &[link(b"l", "t".repeat(9000).as_bytes())]);
    group.refused("a target that is no text", &["malformed"], &[link(b"l", b"\xff\xfe")]);
    group.fated("inside at one place, outside at another", Fate::Refused(&["link"]), |forge| {
        let inner = forge.directory(&[link(b"l", b"../../f")]);
        let deep = forge.below(1, "d", inner);
        forge.directory(&[directory("a", &deep), directory("c", &inner)])
    });
    doubles(&mut group);
    harmless(&mut group);
    group.0
}

/// A link, and something below it or in its place.
fn doubles(group: &mut Group) {
    for (one, kind_one) in Kind::ALL.into_iter().enumerate() {
        for kind_two in &Kind::ALL[one..] {
            for depth in [0, 2] {
                let shown =
                    format!("{} and {} of one name at depth {depth}", kind_one.word(), kind_two.word());
                group.fated(shown, Fate::Refused(&["not canonical"]), |forge| {
                    let inner = forge.directory(&[plain(kind_one, "same"), plain(*kind_two, "same")]);
                    forge.below(depth, "d", inner)
                });
            }
        }
    }
    group.fated("a link out, and a file through it", Fate::Refused(&["not canonical", "link"]), |forge| {
        let payload = forge.keep("owned");
        let inner = forge.directory(&[file("agentd-hostile", &payload)]);
        forge.directory(&[directory("x", &inner), link(b"x", b"/tmp")])
    });
    group.fated("a link inside, and a file through it", Fate::Refused(&["not canonical"]), |forge| {
        let payload = forge.keep("owned");
        let inner = forge.directory(&[file("f", &payload)]);
        let other = forge.directory(&[]);
        forge.directory(&[directory("other", &other), directory("x", &inner), link(b"x", b"other")])
    });
    group.fated("the link first, the directory after it", Fate::Refused(&["not canonical"]), |forge| {
        let inner = forge.directory(&[plain(Kind::File, "f")]);
        forge.directory(&[link(b"x", b"."), directory("x", &inner)])
    });
    group.refused(
        "a file, a link and a file of one name",
        &["not canonical"],
        &[plain(Kind::File, "x"), plain(Kind::File, "x"), plain(Kind::Link, "x")],
    );
}

/// What goes nowhere, or round and round, but not out.
fn harmless(group: &mut Group) {
    group.laid("a link to itself", &[link(b"l", b"l")]);
    group.laid("two links to each other", &[link(b"a", b"b"), link(b"b", b"a")]);
    group.laid("a link to its directory", &[link(b"l", b".")]);
    group.laid(
        "back from where nothing is",
        &[link(b"l", b"a/.."), link(b"m", b"a/b/../../x"), link(b"n", b"a//./..")],
    );
    group.laid("a link to nothing", &[link(b"l", b"nothing/at/all")]);
    group.laid("a link with a name of dots", &[link(b"...", b"....")]);
    let chain = (0..60).map(|i| link(format!("{i:02}").as_bytes(), format!("{:02}", i + 1).as_bytes()));
    group.laid("a chain of links", &chain.collect::<Vec<_>>());
    group.laid("a target of 4095 bytes", &[link(b"l", "t/".repeat(2047).as_bytes())]);
    group.fated("up to the root and no further", Fate::Laid(6), |forge| {
        let inner = forge.directory(&[link(b"l", b"../../../../..")]);
        forge.below(5, "d", inner)
    });
}
