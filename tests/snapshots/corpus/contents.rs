//! Contents that are named wrongly, are not there, are not what was named, or could never be.

use agent_cas::digest_of;
use agent_model::Digest;

use super::{Case, Fate, Group};
use crate::snapshots::forge::{Kind, content, digest, directory, entry, file, node};

pub(crate) fn contents() -> Vec<Case> {
    let mut group = Group::default();
    wrong_digests(&mut group);
    sizes(&mut group);
    missing(&mut group);
    forged(&mut group);
    roots(&mut group);
    group.0
}

fn wrong_digests(group: &mut Group) {
    let hash = digest_of(b"payload").hex();
    let sized = |hash: &[u8]| digest(hash, 7);
    let wrong: Vec<(&str, Vec<u8>)> = vec![
        ("no digest", Vec::new()),
        ("an upper-case hash", sized(hash.to_uppercase().as_bytes())),
        ("a hash of 63 digits", sized(&hash.as_bytes()[1..])),
        ("a hash of 65 digits", sized(format!("{hash}0").as_bytes())),
        ("a hash with a space", sized(format!(" {}", &hash[1..]).as_bytes())),
        ("no hash", digest(b"", 7)),
        ("MD5", sized(&hash.as_bytes()[..32])),
        ("SHA-1", sized(&hash.as_bytes()[..40])),
        ("SHA-512", sized(hash.repeat(2).as_bytes())),
        ("the bytes of a hash", sized(b"12345678901234567890123456789012")),
        ("a path for a hash", sized(b"../../../../../../../../../../../../../../../../../../etc/passwd")),
        ("a path of the right length", sized(format!("{:/<64}", "../../etc/passwd").as_bytes())),
        ("a hash with NUL", sized(format!("{}\0", &hash[1..]).as_bytes())),
        ("a hash of wide digits", sized("０".repeat(64).as_bytes())),
        ("size -1", digest(hash.as_bytes(), -1)),
        ("the least size", digest(hash.as_bytes(), i64::MIN)),
    ];
    for kind in [Kind::File, Kind::Directory] {
        for (what, wire) in &wrong {
            let inside =
                if wire.is_empty() { crate::snapshots::forge::bytes(1, b"a") } else { node(b"a", wire) };
            group.refused(format!("{} with {what}", kind.word()), &["content"], &[entry(kind, &inside)]);
        }
    }
    let huge = sized("f".repeat(1 << 20).as_bytes());
    group.refused("a hash of a mebibyte", &["large entry"], &[entry(Kind::File, &node(b"a", &huge))]);
}

/// The right hash with another size names another blob, which is not there.
fn sizes(group: &mut Group) {
    let resized = |size: i64| move |of: Digest| digest(of.hex().as_bytes(), size);
    for (what, size) in [("a byte less", 6), ("a byte more", 8), ("nothing", 0), ("1 MiB", 1 << 20)] {
        group.fated(format!("a file that is said to have {what}"), Fate::Refused(&["absent"]), |forge| {
            let payload = forge.keep("payload");
            forge.directory(&[entry(Kind::File, &node(b"a", &resized(size)(payload)))])
        });
    }
    group.fated("a directory that is said to have a byte more", Fate::Refused(&["absent"]), |forge| {
        let inner = forge.directory(&[file("f", &Digest::EMPTY)]);
        let wire = digest(inner.hex().as_bytes(), inner.size.cast_signed() + 1);
        forge.directory(&[entry(Kind::Directory, &node(b"d", &wire))])
    });
    let empty = Digest::EMPTY.hex();
    for kind in [Kind::File, Kind::Directory] {
        let wire = digest(empty.as_bytes(), 5);
        let entries = [entry(kind, &node(b"a", &wire))];
        group.refused(format!("five bytes of nothing as a {}", kind.word()), &["absent"], &entries);
    }
    // More than any disk has: refused before a byte of it is asked for.
    for (what, size, files) in [("an exbibyte", 1 << 60, 1), ("all there can be", i64::MAX, 3)] {
        let wire = digest(digest_of(b"sparse").hex().as_bytes(), size);
        let names = ["a", "b", "c"];
        let entries: Vec<_> =
            names[..files].iter().map(|n| entry(Kind::File, &node(n.as_bytes(), &wire))).collect();
        group.refused(format!("{files} files of {what}"), &["no room"], &entries);
    }
    group.fated("a MiB that is named a million times", Fate::Refused(&["no room"]), |forge| {
        let payload = forge.keep(vec![7; 1 << 20]);
        let files: Vec<_> = (0..1000).map(|i| file(&format!("{i:04}"), &payload)).collect();
        let inner = forge.directory(&files);
        let children: Vec<_> = (0..1000).map(|i| directory(&format!("{i:04}"), &inner)).collect();
        forge.directory(&children)
    });
    for (what, size) in [("33 MiB", 33 << 20), ("all there can be", i64::MAX)] {
        let wire = digest(digest_of(b"large").hex().as_bytes(), size);
        let entries = [entry(Kind::Directory, &node(b"d", &wire))];
        group.refused(format!("a directory message of {what}"), &["large directory"], &entries);
    }
    let heavy = |i: u32| digest(digest_of(&i.to_le_bytes()).hex().as_bytes(), 30 << 20);
    let entries: Vec<_> =
        (10..20).map(|i| entry(Kind::Directory, &node(i.to_string().as_bytes(), &heavy(i)))).collect();
    group.refused("ten directory messages of 30 MiB", &["heavy"], &entries);
}

fn missing(group: &mut Group) {
    for depth in [0, 1, 4] {
        for size in [10, 3 << 20] {
            let shown = format!("a file of {size} bytes is missing at depth {depth}");
            group.fated(shown, Fate::Refused(&["absent"]), |forge| {
                let absent = Digest { size, ..digest_of(b"absent") };
                let here = forge.keep("here");
                let inner = forge.directory(&[file("a", &here), file("b", &absent)]);
                forge.below(depth, "d", inner)
            });
        }
        group.fated(
            format!("a directory is missing at depth {depth}"),
            Fate::Refused(&["absent"]),
            |forge| {
                let inner = forge.directory(&[directory("x", &digest_of(b"no such directory"))]);
                forge.below(depth, "d", inner)
            },
        );
    }
    group.fated("every file is missing", Fate::Refused(&["absent"]), |forge| {
        let files = (0..3000).map(|i| file(&format!("{i:05}"), &digest_of(format!("{i}").as_bytes())));
        forge.directory(&files.collect::<Vec<_>>())
    });
}

/// What a store may come to hold that verifies nothing, or whose disk is bad.
fn forged(group: &mut Group) {
    let damage = &["damaged", "absent"];
    let (small, large) = (vec![1u8; 5000], vec![2u8; 3 << 20]);
    for (size, right) in [("small", small), ("large", large)] {
        let digest = digest_of(&right);
        let mut flipped = right.clone();
        flipped[right.len() / 2] ^= 4;
        let wrong = [
            ("with one bit flipped", flipped),
            ("cut short", right[..right.len() - 1].to_vec()),
            ("with a byte more", [&right[..], b"x"].concat()),
            ("that is empty", Vec::new()),
            ("of other bytes", vec![9; right.len()]),
        ];
        for (what, bytes) in wrong {
            group.fated(format!("a {size} file {what}"), Fate::Refused(damage), |forge| {
                forge.forged.push((digest, bytes.into()));
                forge.directory(&[file("a", &digest)])
            });
        }
    }
    group.fated("a directory that names itself", Fate::Refused(damage), |forge| {
        let claimed = Digest { size: 75, ..digest_of(b"myself") };
        let message = directory("d", &claimed);
        forge.forged.push((Digest { size: message.len() as u64, ..claimed }, message.into()));
        Digest { size: forge.forged[0].1.len() as u64, ..claimed }
    });
    group.fated("two directories that name each other", Fate::Refused(damage), |forge| {
        let one = Digest { size: 75, ..digest_of(b"one") };
        let two = Digest { size: 75, ..digest_of(b"two") };
        let (first, second) = (directory("d", &two), directory("d", &one));
        forge.forged = vec![
            (Digest { size: first.len() as u64, ..one }, first.into()),
            (Digest { size: second.len() as u64, ..two }, second.into()),
        ];
        forge.forged[0].0
    });
    group.fated("a directory that was swapped for another", Fate::Refused(damage), |forge| {
        let good = forge.directory(&[file("a", &Digest::EMPTY)]);
        let evil = [file("b", &Digest::EMPTY)].concat();
        forge.blobs.clear();
        forge.forged.push((good, evil.into()));
        forge.directory(&[directory("d", &good)])
    });
}

fn roots(group: &mut Group) {
    group.fated("no root", Fate::Refused(&["absent"]), |_| digest_of(b"nobody has this"));
    group.fated("a root of size 0 with another hash", Fate::Refused(&["absent"]), |_| Digest {
        size: 0,
        ..digest_of(b"nothing")
    });
    group.fated("a root of 33 MiB", Fate::Refused(&["large directory"]), |_| Digest {
        size: 33 << 20,
        ..digest_of(b"large")
    });
    group.fated("an empty root", Fate::Laid(0), |_| Digest::EMPTY);
    group.fated("a directory that is the empty blob", Fate::Laid(1), |forge| {
        forge.directory(&[entry(Kind::Directory, &node(b"d", &content(&Digest::EMPTY)))])
    });
    group.fated("a file that is a directory message", Fate::Laid(1), |forge| {
        let inner = forge.directory(&[file("f", &Digest::EMPTY)]);
        forge.directory(&[file("a", &inner)])
    });
    group.fated("a directory that is a file", Fate::Refused(&["malformed", "not canonical"]), |forge| {
        let payload = forge.keep("print('hello')");
        forge.directory(&[directory("d", &payload)])
    });
}
