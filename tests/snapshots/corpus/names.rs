//! Names that are no names, at every place where one can stand; and odd ones that are.

use super::{Case, Fate, Group, plain};
use crate::snapshots::forge::{Forge, Kind, directory};

/// What no file can be called.
const BAD: &[&str] = &[
    "",
    ".",
    "..",
    "/",
    "//",
    "a/b",
    "/a",
    "a/",
    "a//b",
    "./a",
    "../a",
    "../../../../../../../../etc/agentd-hostile",
    "/tmp/agentd-hostile",
    "a/../b",
    "a/..",
    "..//",
    "a\0b",
    "\0",
    "..\0",
    "\u{0}/etc",
];

/// What a file can be called, though nobody should.
const ODD: &[&str] = &[
    "...",
    "..a",
    "a..",
    " ",
    " a",
    "a ",
    "a.",
    "-rf",
    "--help",
    "~",
    "*",
    "$(reboot)",
    "`id`",
    "CON",
    "NUL.txt",
    "C:\\Windows",
    "a\\..\\b",
    ".git",
    ".hidden",
    "work.partial",
    "a\nb",
    "\u{1b}[2J",
    "\u{7f}",
    "\u{202e}exe.txt",
    "\u{feff}bom",
    "\u{200b}",
    "%2e%2e%2f",
    "file;rm",
    "a|b",
    "\u{ff0e}\u{ff0e}\u{ff0f}",
    "\u{10ffff}",
];

/// Bytes that are no text.
const NOT_TEXT: &[&[u8]] =
    &[b"\xff", b"a\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"];

pub(crate) fn names() -> Vec<Case> {
    let mut group = Group::default();
    let long = ["x".repeat(256), "é".repeat(128), "y".repeat(5000)];
    for kind in Kind::ALL {
        for name in BAD.iter().copied().chain(long.iter().map(String::as_str)) {
            let shown: String = name.chars().take(30).collect();
            group.refused(format!("{} {shown:?}", kind.word()), &["name"], &[kind.named(name.as_bytes())]);
        }
        let huge = "z".repeat(9000);
        group.refused(
            format!("{} of 9000 bytes", kind.word()),
            &["large entry"],
            &[kind.named(huge.as_bytes())],
        );
        for name in NOT_TEXT {
            let shown = name.escape_ascii();
            group.refused(format!("{} {shown}", kind.word()), &["malformed"], &[kind.named(name)]);
        }
        places(&mut group, kind);
    }
    for name in ODD {
        group.laid(format!("odd but harmless: {name:?}"), &[plain(Kind::File, name)]);
    }
    group.laid("255 bytes", &[plain(Kind::File, &"n".repeat(255))]);
    // Two names here; one on file systems that fold them, which then say so themselves.
    group.laid("names that differ in case", &[plain(Kind::File, "README"), plain(Kind::File, "readme")]);
    group.laid("one name in two normal forms", &[plain(Kind::File, "e\u{301}"), plain(Kind::File, "é")]);
    group.fated("a hook", Fate::Laid(3), |forge| {
        let hook = forge.keep("#!/bin/sh\n");
        let hooks = forge.directory(&[crate::snapshots::forge::file("post-checkout", &hook)]);
        forge.below(2, ".git", hooks)
    });
    group.0
}

/// Bad names after good ones, before them, and further down.
fn places(group: &mut Group, kind: Kind) {
    for name in ["", ".", "..", "a/b", "m\0"] {
        let bad = kind.named(name.as_bytes());
        let (first, last) = (plain(kind, "!"), plain(kind, "~"));
        let shown = format!("{} {name:?}", kind.word());
        group.refused(format!("{shown} after others"), &["name"], &[first.clone(), bad.clone()]);
        group.refused(format!("{shown} between others"), &["name"], &[first, bad.clone(), last]);
        for depth in [1, 3] {
            group.fated(
                format!("{shown} at depth {depth}"),
                Fate::Refused(&["name"]),
                |forge: &mut Forge| {
                    let inner = forge.directory(std::slice::from_ref(&bad));
                    forge.below(depth, "d", inner)
                },
            );
        }
        group.fated(format!("{shown} in one of many"), Fate::Refused(&["name"]), |forge| {
            let inner = forge.directory(std::slice::from_ref(&bad));
            let good = forge.directory(&[plain(Kind::File, "f")]);
            let children: Vec<_> = (0..50)
                .map(|i| directory(&format!("d{i:02}"), if i == 31 { &inner } else { &good }))
                .collect();
            forge.directory(&children)
        });
    }
}
