//! Trees that are small where they are stored and large everywhere else.

use agent_cas::snapshot::{MAX_DEPTH, MAX_PATH};
use agent_model::Digest;

use super::{Case, Fate, Group, plain};
use crate::snapshots::forge::{Forge, Kind, bytes, content, directory, entry, file, link, node};

pub(crate) fn shapes() -> Vec<Case> {
    let mut group = Group::default();
    depth(&mut group);
    paths(&mut group);
    exponential(&mut group);
    memory(&mut group);
    group.0
}

fn depth(group: &mut Group) {
    for depth in [MAX_DEPTH + 1, MAX_DEPTH + 2, 300, 1000, 4000] {
        group.fated(format!("{depth} directories deep"), Fate::Refused(&["deep"]), |forge| {
            forge.below(depth - 1, "d", Digest::EMPTY)
        });
    }
    group.fated("as deep as may be", Fate::Laid(MAX_DEPTH - 1), |forge| {
        forge.below(MAX_DEPTH - 1, "d", Digest::EMPTY)
    });
    group.fated("shallow by levels, deep along a path", Fate::Refused(&["deep"]), |forge| {
        let mut all = vec![forge.directory(&[plain(Kind::File, "f")])];
        for _ in 0..MAX_DEPTH {
            all.push(forge.directory(&[directory("d", &all[all.len() - 1])]));
        }
        let children: Vec<_> =
            all.iter().enumerate().map(|(i, child)| directory(&format!("{i:04}"), child)).collect();
        forge.directory(&children)
    });
}

/// A tree whose longest path, that of a file, has so many bytes.
fn path_of(forge: &mut Forge, length: usize) -> Digest {
    let levels = length / 201;
    let name = "n".repeat(length - levels * 201);
    let inner = forge.directory(&[file(&name, &Digest::EMPTY)]);
    forge.below(levels, &"d".repeat(200), inner)
}

fn paths(group: &mut Group) {
    for length in [MAX_PATH + 1, 5000, 20_000] {
        group.fated(format!("a path of {length} bytes"), Fate::Refused(&["long path"]), |forge| {
            path_of(forge, length)
        });
    }
    group.fated("a path as long as may be", Fate::Laid(MAX_PATH / 201 + 1), |forge| path_of(forge, MAX_PATH));
    group.fated("paths of 50 kB, a hundred thousand times", Fate::Refused(&["long path"]), |forge| {
        let files: Vec<_> = (0..20_000).map(|i| file(&format!("{i:05}"), &Digest::EMPTY)).collect();
        let inner = forge.directory(&files);
        let five: Vec<_> = (0..5).map(|i| directory(&format!("{i}"), &inner)).collect();
        let inner = forge.directory(&five);
        forge.below(195, &"d".repeat(255), inner)
    });
}

/// Each level names the one below it `width` times.
fn doubled(forge: &mut Forge, inner: Digest, width: usize, levels: usize) -> Digest {
    (0..levels).fold(inner, |inner, _| {
        let children: Vec<_> = (0..width).map(|i| directory(&format!("{i:05}"), &inner)).collect();
        forge.directory(&children)
    })
}

fn exponential(group: &mut Group) {
    for (width, levels) in [(2, 20), (2, 30), (2, 64), (2, 150), (10, 7), (10, 20), (1000, 2), (1000, 30)] {
        let shown = format!("{width} to the power of {levels} directories");
        group.fated(shown, Fate::Refused(&["many directories"]), |forge| {
            doubled(forge, Digest::EMPTY, width, levels)
        });
    }
    for kind in [Kind::File, Kind::Link] {
        for (entries, width, levels) in [(5000, 1000, 1), (5001, 30, 2), (10_000, 2, 10), (100, 2, 17)] {
            let shown = format!("{entries} {}s, {width} to the power of {levels} times", kind.word());
            group.fated(shown, Fate::Refused(&["many files"]), |forge| {
                let entries: Vec<_> = (0..entries).map(|i| plain(kind, &format!("{i:05}"))).collect();
                let inner = forge.directory(&entries);
                doubled(forge, inner, width, levels)
            });
        }
    }
}

/// Messages that are small and take much memory when they are understood all at once.
fn memory(group: &mut Group) {
    for kind in Kind::ALL {
        let empty = entry(kind, b"");
        let shown = format!("two million {} entries of two bytes", kind.word());
        group.fated(shown, Fate::Refused(&["name"]), |forge| forge.keep(empty.repeat(2_000_000)));
    }
    let crowded = [node(b"a", &content(&Digest::EMPTY)), bytes(6, &bytes(1, b"").repeat(2_000_000))].concat();
    group.refused("a file with two million attributes", &["large entry"], &[entry(Kind::File, &crowded)]);
    group.fated("a directory with two million attributes", Fate::Refused(&["not canonical"]), |forge| {
        forge.keep(bytes(5, &bytes(1, b"").repeat(2_000_000)))
    });
    group.fated("two million fields that nobody knows", Fate::Refused(&["not canonical"]), |forge| {
        forge.keep(bytes(15, b"").repeat(2_000_000))
    });
    group.fated("far more links than there is memory for", Fate::Refused(&["heavy"]), |forge| {
        let links = |from: u32| (from..from + 300_000).map(|i| link(format!("{i:07}").as_bytes(), b"t"));
        let parts: Vec<_> = (0..5).map(|part| links(part * 300_000).collect::<Vec<_>>()).collect();
        let children: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(i, links)| directory(&format!("{i}"), &forge.directory(links)))
            .collect();
        forge.directory(&children)
    });
}
