//! Group F: chance. Bytes, trees, patterns and calls that nobody thought of, made from right ones by small changes,
//! and for each a judge that shares no code with what is judged. The seed makes the same again.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use agent_cas::snapshot::{self, MaterializeError};
use agent_cas::{BlobStore, Disk, Remote, digest_of};
use agent_model::Digest;
use agent_tests::chance::Chance;
use agent_tests::client::runtime;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use bytes::Bytes;

use crate::snapshots::corpus::{self, Case};
use crate::snapshots::forge::{self, Forge};
use crate::snapshots::probe::{MEMORY, peak};
use crate::snapshots::raw;
use crate::snapshots::scans::{git, kept_by_git, kept_by_us};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "F1",
        promise: "a directory message with any bytes changed is refused, or laid out as what it says",
        run: messages,
    },
    Row {
        id: "F2",
        promise: "a tree of any names, links and kinds is laid out as it is, or not at all",
        run: trees,
    },
    Row { id: "F3", promise: "any pattern ignores what git ignores, and nothing else", run: patterns },
    Row {
        id: "F4",
        promise: "a store that is asked nonsense says so, stays small and loses nothing",
        run: calls,
    },
];

/// Complaints that are kept of a row; more of them say no more.
const COMPLAINTS: usize = 20;

/// Changes bytes in one of the ways that break decoders.
fn mutate(bytes: &mut Vec<u8>, others: &[Vec<u8>], chance: &mut Chance) {
    let place = |bytes: &[u8], chance: &mut Chance| chance.below(bytes.len() as u64 + 1) as usize;
    let (one, two) = (place(bytes, chance), place(bytes, chance));
    let (from, to) = (one.min(two), one.max(two).min(one.min(two) + 300));
    match chance.below(8) {
        0 if !bytes.is_empty() => {
            let at = from.min(bytes.len() - 1);
            bytes[at] ^= 1 << chance.below(8);
        }
        1 => drop(bytes.drain(from..to)),
        2 => {
            let part = bytes[from..to].to_vec();
            bytes.splice(to..to, part);
        }
        3 => {
            const ODD: [u8; 12] = [0, 1, 8, 0x0a, 0x12, 0x1a, 0x22, b'.', b'/', 0x7f, 0x80, 0xff];
            let odd: Vec<u8> = (0..=chance.below(4)).map(|_| *chance.pick(&ODD)).collect();
            bytes.splice(from..from, odd);
        }
        4 => bytes.truncate(from),
        5 => {
            let other = chance.pick(others).clone();
            bytes.splice(from..from, other);
        }
        6 => {
            // One that is longer than it must be, or than all there is.
            let number = forge::varint(1 << chance.below(64));
            bytes.splice(from..to.min(from + number.len()), number);
        }
        _ => bytes[from..to].reverse(),
    }
}

/// Where trees are laid out: a store, and a directory in which nothing else may appear.
struct Ground {
    home: tempfile::TempDir,
    disk: Disk,
}

impl Ground {
    fn new() -> Ground {
        let home = tempfile::tempdir().expect("a directory");
        fs::create_dir(home.path().join("sandbox")).expect("a directory");
        fs::write(home.path().join("canary"), "alive").expect("a file");
        let disk = Disk::open(&home.path().join("store")).expect("a store");
        Ground { home, disk }
    }

    /// Lays out the tree, if it is not refused, and judges what came of it. `true` if it was laid out.
    fn judge(&self, root: Digest, blobs: Vec<Bytes>) -> Result<bool, String> {
        let named = blobs.into_iter().map(|bytes| (digest_of(&bytes), bytes)).collect();
        let kept = runtime().block_on(self.disk.write_batch(named));
        if let Some(error) = kept.into_iter().find_map(Result::err) {
            return Err(format!("an honest blob was refused: {error}"));
        }
        let sandbox = self.home.path().join("sandbox");
        let dest = sandbox.join("dest");
        let laid = runtime().block_on(snapshot::download(&self.disk, root, &dest));
        let verdict = match &laid {
            Ok(_) => match encoded(&dest) {
                found if found == root => Ok(true),
                found => Err(format!("{root} was laid out, and it is {found}")),
            },
            Err(MaterializeError::Write { path, source }) => Err(format!("{}: {source}", path.display())),
            Err(_) if dest.exists() => Err("it was refused, and is there".to_owned()),
            Err(_) => Ok(false),
        };
        let _ = fs::remove_dir_all(&dest);
        let left: Vec<_> = fs::read_dir(&sandbox).expect("a directory").collect();
        if !left.is_empty() || fs::read(self.home.path().join("canary")).ok().as_deref() != Some(b"alive") {
            return Err(format!("something else was touched: {left:?}"));
        }
        verdict
    }
}

/// What is at `dir`, as a message; every directory of it is made from what the disk has, sorted by name.
fn encoded(dir: &Path) -> Digest {
    let mut kinds: [Vec<(Vec<u8>, Vec<u8>)>; 3] = Default::default();
    for entry in fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry")) {
        let (path, name) = (entry.path(), entry.file_name().into_encoded_bytes());
        let text = String::from_utf8(name.clone()).expect("only text is laid out");
        let meta = path.symlink_metadata().expect("it is there");
        let (kind, bytes) = if meta.is_dir() {
            (1, forge::directory(&text, &encoded(&path)))
        } else if meta.is_symlink() {
            let target = fs::read_link(&path).expect("a link").into_os_string().into_encoded_bytes();
            (2, forge::link(&name, &target))
        } else {
            let content = forge::content(&digest_of(&fs::read(&path).expect("a file")));
            let executable = meta.permissions().mode() & 0o100 != 0;
            let mark = if executable { forge::number(4, 1) } else { Vec::new() };
            let inside = [forge::node(&name, &content), mark].concat();
            (0, forge::entry(forge::Kind::File, &inside))
        };
        kinds[kind].push((name, bytes));
    }
    let mut message = Vec::new();
    for mut kind in kinds {
        kind.sort();
        message.extend(kind.into_iter().flat_map(|(_, bytes)| bytes));
    }
    digest_of(&message)
}

fn told(tally: &mut Tally, what: &str, tried: u32, laid: u32, complaints: &[String]) {
    tally.note(format!("{tried} {what}, {laid} of them harmless"));
    tally.count(tried, what, complaints);
    tally.case("some are harmless and some are not", || assert!(laid > 0 && laid < tried, "{laid}"));
}

fn messages(tally: &mut Tally, scale: &Scale) {
    let (mut chance, ground) = (scale.chance(), Ground::new());
    let cases: Vec<Case> = [corpus::names(), corpus::links(), corpus::encodings()].concat();
    let cases: Vec<Case> = cases.into_iter().filter(|case| case.forged.is_empty()).collect();
    let entries: Vec<Vec<u8>> =
        forge::Kind::ALL.iter().flat_map(|kind| [kind.named(b"a"), kind.named(b"z")]).collect();
    let (tried, mut laid, mut complaints) = (scale.of(1500, 50_000), 0, Vec::new());
    for number in 0..tried {
        let case = chance.pick(&cases);
        let mut forge = Forge::new();
        forge.blobs.clone_from(&case.blobs);
        let mut message =
            case.blobs.iter().find(|blob| digest_of(blob) == case.root).map_or_else(Vec::new, |b| b.to_vec());
        if message.len() > 100_000 {
            continue;
        }
        for _ in 0..=chance.below(3) {
            mutate(&mut message, &entries, &mut chance);
        }
        let mut root = forge.keep(message);
        if chance.percent(30) {
            root = forge.directory(&[forge::directory("below", &root)]);
        }
        match ground.judge(root, forge.blobs) {
            Ok(was_laid) => laid += u32::from(was_laid),
            Err(complaint) => complaints.push(format!("message {number} ({}): {complaint}", case.name)),
        }
        if complaints.len() >= COMPLAINTS {
            break;
        }
    }
    told(tally, "messages", tried, laid, &complaints);
}

/// Names and targets of which a tree is made: few, so that they meet.
const NAMES: &[&str] = &["a", "b", "c", "A", "a.partial", "é", "..", ".", "", "a/b", "a\0", "...", "-", "~"];
const TARGETS: &[&str] =
    &["a", "b", "../a", "../../a", "a/../b", "/etc/passwd", "..", ".", "./a", "c/a", "../../../../x", ""];

/// A directory of up to `depth` levels; most of it is right.
fn grow(forge: &mut Forge, depth: u64, chance: &mut Chance) -> Digest {
    let contents = [Digest::EMPTY, forge.keep("one"), forge.keep("two".repeat(50_000))];
    let mut kinds: [Vec<(String, Vec<u8>)>; 3] = Default::default();
    let mut used = Vec::new();
    for _ in 0..chance.below(6) {
        let odd = chance.percent(4);
        let name = *chance.pick(if odd { NAMES } else { &NAMES[..6] });
        if used.contains(&name) && !chance.percent(2) {
            continue;
        }
        used.push(name);
        let kind = chance.below(3) as usize;
        let entry = match kind {
            0 => forge::file(name, chance.pick(&contents)),
            1 if depth > 0 => {
                let inner = grow(forge, depth - 1, chance);
                forge::directory(name, &inner)
            }
            1 => continue,
            _ => forge::link(name.as_bytes(), chance.pick(TARGETS).as_bytes()),
        };
        kinds[kind].push((name.to_owned(), entry));
    }
    let sorted = !chance.percent(3);
    let mut message = Vec::new();
    for mut kind in kinds {
        if sorted {
            kind.sort();
        }
        message.extend(kind.into_iter().flat_map(|(_, entry)| entry));
    }
    forge.keep(message)
}

fn trees(tally: &mut Tally, scale: &Scale) {
    let (mut chance, ground) = (scale.chance(), Ground::new());
    let (tried, mut laid, mut complaints) = (scale.of(1500, 50_000), 0, Vec::new());
    for number in 0..tried {
        let mut forge = Forge::new();
        let root = grow(&mut forge, 4, &mut chance);
        match ground.judge(root, forge.blobs) {
            Ok(was_laid) => laid += u32::from(was_laid),
            Err(complaint) => complaints.push(format!("tree {number}: {complaint}")),
        }
        if complaints.len() >= COMPLAINTS {
            break;
        }
    }
    told(tally, "trees", tried, laid, &complaints);
}

/// What patterns are made of.
const PIECES: &[&str] = &[
    "a",
    "b",
    "ab",
    "1",
    "*",
    "*",
    "**",
    "?",
    "/",
    "/",
    "!",
    "#",
    " ",
    ".",
    "[ab]",
    "[!a]",
    "[a-c]",
    "[",
    "]",
    "-",
    "^",
    "[[:digit:]]",
    "[^[:alpha:]]",
    "[.-0]",
    "[a/b]",
    "[/",
    "[b-a]",
    "[b- ",
    "{",
    "}",
    "{a,b}",
    "[!-]",
    "\\*",
    "\\ ",
    "\\a",
    "[\\]]",
    "***",
    "a**/",
];

fn pattern(chance: &mut Chance) -> String {
    let line =
        |chance: &mut Chance| -> String { (0..=chance.below(5)).map(|_| *chance.pick(PIECES)).collect() };
    (0..=chance.below(3)).map(|_| line(chance) + "\n").collect()
}

fn patterns(tally: &mut Tally, scale: &Scale) {
    let home = tempfile::tempdir().expect("a directory");
    let (code, mut chance) = (home.path().join("code"), scale.chance());
    for name in [
        "a", "b", "ab", "c/a", "c/b", "c/ab", "d/a/b", "d/b/a/b", "#", "!a", ".a", "a b", "e/.a/b", "c/*",
        "1", "c/1", "]", "-", "a]", "[a", "!", "d/-", "^b", "{a,b}", "c/{",
    ] {
        let path = code.join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, name).expect("a file");
    }
    git(&code, &["init", "-q"]);
    let disk = Disk::open(&home.path().join("store")).expect("a store");
    let (tried, mut complaints) = (scale.of(250, 10_000), Vec::new());
    for _ in 0..tried {
        let text = pattern(&mut chance);
        fs::write(code.join(".gitignore"), &text).expect("a file");
        let (wanted, kept) = (kept_by_git(&code), kept_by_us(&code, &disk));
        if kept != wanted {
            complaints.push(format!("{text:?}: git keeps {wanted:?}, we keep {kept:?}"));
        }
        if complaints.len() >= COMPLAINTS {
            break;
        }
    }
    tally.note(format!("{tried} files of patterns"));
    tally.count(tried, "patterns", &complaints);
}

/// Nonsense to every method of the store, and to its socket; then it must still serve what it had.
fn calls(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let mut fleet = Fleet::started(&Setup::default());
    let honest: Vec<(Digest, Bytes)> = [10usize, 3000, 900_000]
        .iter()
        .map(|size| Bytes::from(vec![b'h'; *size]))
        .map(|bytes| (digest_of(&bytes), bytes))
        .collect();
    let remote = Remote::new(fleet.client.channel());
    let sent = runtime().block_on(remote.write_batch(honest.clone()));
    assert!(sent.iter().all(Result::is_ok), "{sent:?}");
    let names: Vec<Digest> = honest.iter().map(|(digest, _)| *digest).collect();
    let parts = raw::parts(&names);
    let (tried, mut answers) = (scale.of(1500, 100_000), std::collections::BTreeMap::new());
    for number in 0..tried {
        let mut messages = raw::messages(&names, &mut chance);
        for message in &mut messages.1 {
            for _ in 0..chance.below(4) {
                mutate(message, &parts, &mut chance);
            }
        }
        let answer = raw::call(fleet.client.channel(), messages.0, messages.1);
        *answers.entry(answer).or_insert(0) += 1;
        if number % 100 == 0 {
            let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".repeat(usize::from(chance.percent(70)));
            bytes.extend((0..chance.below(4000)).map(|_| chance.below(256) as u8));
            raw::shout(&fleet.controller.socket(), &bytes);
        }
        assert!(fleet.controller.ended().is_none(), "the controller ended at call {number}");
    }
    tally.note(format!("{tried} calls: {answers:?}"));
    tally.count(tried, "calls", &[]);
    tally.case("what it had, it has", || {
        let read = runtime().block_on(remote.read_batch(names));
        for ((digest, bytes), read) in honest.iter().zip(read) {
            assert_eq!(&read.expect("it is there"), bytes, "{digest}");
        }
    });
    tally.case("it understood some and refused some", || assert!(answers.len() > 2, "{answers:?}"));
    let memory = peak(fleet.controller.pid());
    tally.case("its memory", || assert!(memory > 0 && memory <= MEMORY, "{} MiB", memory >> 20));
}
