//! Messages that mean a directory and are not written as one, and bytes that mean nothing.

use agent_model::Digest;

use super::{Case, Fate, Group, plain};
use crate::snapshots::forge::{Kind, bytes, content, digest, entry, file, link, node, number, varint};

const FOREIGN: &[&str] = &["not canonical"];

/// Refused for what it is, or for what it seems to be.
const GARBAGE: &[&str] = &["malformed", "not canonical", "large entry", "name", "content"];

pub(crate) fn encodings() -> Vec<Case> {
    let mut group = Group::default();
    order(&mut group);
    unknown_fields(&mut group);
    properties(&mut group);
    long_numbers(&mut group);
    garbage(&mut group);
    truncated(&mut group);
    group.0
}

fn order(group: &mut Group) {
    for kind in Kind::ALL {
        let word = kind.word();
        let pairs = [("b", "a"), ("a", "B"), ("aa", "a"), ("é", "z"), ("\u{10000}", "\u{ffff}")];
        for (one, two) in pairs {
            let entries = [plain(kind, one), plain(kind, two)];
            group.refused(format!("{word} {one:?} before {two:?}"), FOREIGN, &entries);
        }
    }
    for (one, two) in [(Kind::Directory, Kind::File), (Kind::Link, Kind::File), (Kind::Link, Kind::Directory)]
    {
        let entries = [plain(one, "a"), plain(two, "b")];
        group.refused(format!("a {} before a {}", one.word(), two.word()), FOREIGN, &entries);
    }
    let interleaved = [plain(Kind::File, "a"), plain(Kind::Directory, "b"), plain(Kind::File, "c")];
    group.refused("kinds mixed", FOREIGN, &interleaved);
}

fn unknown_fields(group: &mut Group) {
    let good = plain(Kind::File, "a");
    for field in [4, 6, 7, 15, 16, 100, 1 << 20, (1 << 29) - 1] {
        group.refused(format!("field {field}, a message"), FOREIGN, &[good.clone(), bytes(field, b"x")]);
        group.refused(format!("field {field}, a number"), FOREIGN, &[good.clone(), number(field, 1)]);
    }
    for wire in [0u64, 1, 3, 4, 5, 6, 7] {
        let odd = [varint(1 << 3 | wire), vec![0; 8]].concat();
        group.refused(format!("the field of files with wire type {wire}"), GARBAGE, &[odd]);
    }
    group.refused("field 0", GARBAGE, &[bytes(0, b"x"), good]);
    let inside = [node(b"a", &content(&Digest::EMPTY)), number(9, 1)].concat();
    for kind in Kind::ALL {
        group.refused(
            format!("an unknown field in a {}", kind.word()),
            FOREIGN,
            &[entry(kind, &[node(b"a", &content(&Digest::EMPTY)), number(9, 1)].concat())],
        );
    }
    group.refused("an unknown field far down", FOREIGN, &[entry(Kind::File, &inside)]);
    let noisy = [content(&Digest::EMPTY), bytes(3, b"more")].concat();
    group.refused("an unknown field in a digest", FOREIGN, &[entry(Kind::File, &node(b"a", &noisy))]);
}

/// Modes, times and attributes: not ours to set, so a tree that wants some is refused.
fn properties(group: &mut Group) {
    let mode = |mode: u64| bytes(3, &number(1, mode));
    let time = |seconds: i64| bytes(2, &number(1, seconds.cast_unsigned()));
    let attribute = |name: &[u8], value: &[u8]| bytes(1, &[bytes(1, name), bytes(2, value)].concat());
    let wishes = [
        ("none at all", Vec::new()),
        ("mode 0644", mode(0o644)),
        ("setuid", mode(0o104_755)),
        ("setgid", mode(0o102_755)),
        ("sticky", mode(0o1777)),
        ("mode 0777", mode(0o777)),
        ("a device", mode(0o060_660)),
        ("a pipe", mode(0o010_600)),
        ("a socket", mode(0o140_700)),
        ("time 0", time(0)),
        ("a time before all time", time(-62_135_596_801)),
        ("a time to come", time(i64::MAX)),
        ("a capability", attribute(b"security.capability", b"\x01\x00\x00\x02")),
        ("an owner", attribute(b"uid", b"0")),
    ];
    for (what, properties) in wishes {
        let file = [node(b"a", &content(&Digest::EMPTY)), bytes(6, &properties)].concat();
        group.refused(format!("a file with {what}"), FOREIGN, &[entry(Kind::File, &file)]);
        let link = [bytes(1, b"l"), bytes(2, b"t"), bytes(4, &properties)].concat();
        group.refused(format!("a link with {what}"), FOREIGN, &[entry(Kind::Link, &link)]);
        let root = [plain(Kind::File, "a"), bytes(5, &properties)];
        group.refused(format!("a directory with {what}"), FOREIGN, &root);
    }
}

/// The same meaning in more bytes, twice, or in another order.
fn long_numbers(group: &mut Group) {
    let good = node(b"a", &content(&Digest::EMPTY));
    let length =
        |extra: &[u8]| [varint(1 << 3 | 2), vec![good.len() as u8 | 0x80], extra.to_vec(), good.clone()];
    group.refused("a length in two bytes", FOREIGN, &[length(b"\x00").concat()]);
    group.refused("a length in five bytes", FOREIGN, &[length(b"\x80\x80\x80\x00").concat()]);
    group.refused("a length of eleven bytes", &["malformed"], &[length(&[0x80; 11]).concat()]);
    let key = [vec![0x8a, 0x00], varint(good.len() as u64), good.clone()].concat();
    group.refused("a key in two bytes", FOREIGN, &[key]);
    let executable =
        |value: &[u8]| entry(Kind::File, &[good.clone(), varint(4 << 3), value.to_vec()].concat());
    group.refused("not executable, in words", FOREIGN, &[executable(b"\x00")]);
    group.refused("executable, but as 2", FOREIGN, &[executable(b"\x02")]);
    group.refused("executable, in two bytes", FOREIGN, &[executable(b"\x81\x00")]);
    let twice = [bytes(1, b"b"), good.clone()].concat();
    group.refused("a name twice, the last one counts", FOREIGN, &[entry(Kind::File, &twice)]);
    let swapped = [bytes(2, &content(&Digest::EMPTY)), bytes(1, b"a")].concat();
    group.refused("the content before the name", FOREIGN, &[entry(Kind::File, &swapped)]);
    let doubled = [good.clone(), bytes(2, &content(&Digest::EMPTY))].concat();
    group.refused("a content twice", FOREIGN, &[entry(Kind::File, &doubled)]);
    let hash = Digest::EMPTY.hex();
    let sized = [bytes(1, hash.as_bytes()), number(2, 0)].concat();
    group.refused("size 0, in words", FOREIGN, &[entry(Kind::File, &node(b"a", &sized))]);
    let turned = [number(2, 5), bytes(1, hash.as_bytes())].concat();
    group.refused("the size before the hash", FOREIGN, &[entry(Kind::File, &node(b"a", &turned))]);
    let executable_first = [number(4, 1), good.clone()].concat();
    group.refused("executable before its name", FOREIGN, &[entry(Kind::File, &executable_first)]);
    for kind in Kind::ALL {
        let nameless = [bytes(1, b""), bytes(2, b"")].concat();
        group.refused(
            format!("a {} without a name, in words", kind.word()),
            GARBAGE,
            &[entry(kind, &nameless)],
        );
    }
}

/// Files that somebody may take for a snapshot.
fn garbage(group: &mut Group) {
    let texts: &[(&str, &[u8])] = &[
        ("text", b"print('hello')\n"),
        ("one byte", b"\x0a"),
        ("ones", &[0xff; 100]),
        ("noughts", &[0; 100]),
        ("an archive of zip", b"PK\x03\x04\x14\x00\x00\x00\x08\x00"),
        ("an archive of gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"),
        ("an archive of zstd", b"\x28\xb5\x2f\xfd\x04\x00"),
        ("a program", b"\x7fELF\x02\x01\x01\x00"),
        ("JSON", b"{\"files\": []}"),
        ("an entry that is longer than the message", b"\x0a\x7fabc"),
        ("an entry of almost all memory", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7fabc"),
        ("an entry of 2 GiB", b"\x0a\x80\x80\x80\x80\x08abc"),
        ("a group that never ends", b"\x0b\x0b\x0b\x0b"),
    ];
    for (what, text) in texts {
        group.fated(*what, Fate::Refused(GARBAGE), |forge| forge.keep(text.to_vec()));
    }
    // A header of a tape archive: a name and zeroes.
    let mut tape = b"../../etc/cron.d/x".to_vec();
    tape.resize(1024, 0);
    group.fated("an archive of tar", Fate::Refused(GARBAGE), |forge| forge.keep(tape));
}

/// A good message, cut where no entry ends.
fn truncated(group: &mut Group) {
    let payload = agent_cas::digest_of(b"payload");
    let entries = [file("a", &payload), file("b", &payload), link(b"z", b"a")];
    let message = entries.concat();
    let mut ends = vec![0];
    entries.iter().for_each(|entry| ends.push(ends[ends.len() - 1] + entry.len()));
    for length in (1..message.len()).filter(|length| !ends.contains(length)).step_by(5) {
        group.fated(
            format!("cut after {length} bytes"),
            Fate::Refused(&["malformed", "not canonical"]),
            |forge| {
                forge.keep(b"payload".to_vec());
                forge.keep(message[..length].to_vec())
            },
        );
    }
    let noisy = digest(Digest::EMPTY.hex().as_bytes(), 0);
    let trailing = [entry(Kind::File, &node(b"a", &noisy)), vec![0]].concat();
    group.fated("a byte too much", Fate::Refused(GARBAGE), |forge| forge.keep(trailing));
}
