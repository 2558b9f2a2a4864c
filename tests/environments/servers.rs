//! Group B: servers that are broken, lie, or never finish, and packages that are not what was announced.

use std::fs;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::slice;
use std::time::Duration;

use agent_env::FailureKind::{self, Damaged, Denied, Network, NotFound, Other};
use agent_env::{EngineRequest, Task, VERSION};
use agent_tests::channel::{Channel, Server};
use agent_tests::{SOON, copy_tree, eventually, mutate};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::environments::bench::{Room, Told, server, text};
use agent_tests::table::{Row, Scale, Tally};

/// The packages of the channels of tests are for it.
const PLATFORM: &str = "linux-64";

/// The cases of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "B1", promise: "a server that does not work is told as that, and later it works", run: broken },
    Row {
        id: "B2",
        promise: "a package that is not what was announced is never linked, nor kept",
        run: damaged,
    },
    Row { id: "B3", promise: "what stalls is given up, in the list as in a package", run: stalled },
    Row { id: "B4", promise: "what stalls and then goes on is built", run: resumed },
    Row { id: "B5", promise: "nobody at the address is a failure of the network", run: nobody },
    Row { id: "B6", promise: "a list that is no list is told as damaged", run: lists },
    Row {
        id: "B7",
        promise: "lists and packages changed by chance end as a failure or as an environment, in 1 GiB",
        run: changed,
    },
];

/// Builds `big` and `linked` in a mode that cannot work, then in one that does, with the same cache.
#[track_caller]
fn fails_then_works(mode: &str, kinds: &[FailureKind]) -> Told {
    let (room, server) = (Room::new(), server());
    let mut wish = room.wish(&server.url(mode), &["big", "linked"]);
    wish.stall_s = 1;
    let told = room.build(&wish);
    told.failed(kinds);
    unusable(&wish.prefix);
    let (prefix, _) = room.made(&server.url("plain"), &["big", "linked"]);
    sound(&prefix);
    told
}

/// Nothing in a failed environment can be mistaken for one.
#[track_caller]
fn unusable(prefix: &std::path::Path) {
    let records = fs::read_dir(prefix.join("conda-meta")).into_iter().flatten().flatten();
    let complete = records.filter(|entry| entry.file_name().to_string_lossy().starts_with("big-")).count();
    assert_eq!(complete, 0, "a package that failed is recorded as installed");
    assert!(!prefix.join("share/big.bin").exists(), "a package that failed was linked");
}

#[track_caller]
fn sound(prefix: &std::path::Path) {
    assert_eq!(text(prefix, "share/linked/target"), "1\n");
    assert_eq!(fs::metadata(prefix.join("share/big.bin")).expect("big.bin").len(), 4 << 20);
}

fn broken(tally: &mut Tally, _: &Scale) {
    let modes: &[(&str, &[FailureKind])] = &[
        ("broken", &[Network]),
        ("missing", &[NotFound]),
        ("forbidden", &[Denied]),
        ("loop", &[Network]),
        ("gone~big", &[NotFound]),
    ];
    for (mode, kinds) in modes {
        tally.case(mode, || {
            let told = fails_then_works(mode, kinds);
            let failure = told.failed(kinds);
            assert!(failure.message.contains("127.0.0.1"), "which server? {failure:#?}");
        });
    }
}

fn damaged(tally: &mut Tally, _: &Scale) {
    for mode in ["truncated", "flipped"] {
        tally.case(mode, || {
            let told = fails_then_works(mode, &[Damaged, Network]);
            let failure = told.failed(&[Damaged, Network]);
            assert!(
                failure.message.contains("big") || failure.message.contains("linked"),
                "which? {failure:#?}"
            );
            assert!(mode == "truncated" || failure.kind == Damaged, "{failure:#?}");
        });
    }
    tally.case("another package under the same name", || {
        let room = Room::new();
        let channel = Channel::t0().copy(&room.home.join("channel"));
        let place = channel.dir().join("main/linux-64");
        fs::copy(place.join("linked-1.0-0.conda"), place.join("big-1.0-0.conda")).expect("a copy");
        let server = Server::start(&channel);
        let wish = room.wish(&server.url("plain"), &["big"]);
        let told = room.build(&wish);
        assert!(told.failed(&[Damaged]).message.contains("big"), "{told:#?}");
        unusable(&wish.prefix);
    });
    tally.case("another package in a directory", || {
        let room = Room::new();
        let channel = Channel::t0().copy(&room.home.join("channel"));
        let place = channel.dir().join("main/linux-64");
        fs::copy(place.join("linked-1.0-0.conda"), place.join("big-1.0-0.conda")).expect("a copy");
        let wish = room.wish(&channel.file_url("main"), &["big"]);
        room.build(&wish).failed(&[Damaged]);
        unusable(&wish.prefix);
    });
    tally.case("a wrong size with the right sum", || {
        let (room, server) = (Room::new(), server());
        let wish = room.wish(&server.url("wrong-size"), &["big", "linked"]);
        let told = room.build(&wish);
        // The sum is what counts: to install it is as right as to refuse it.
        if told.status.success() {
            sound(&wish.prefix);
        } else {
            told.failed(&[Damaged]);
        }
    });
    tally.case("a lock with another sum", || {
        let (room, server) = (Room::new(), server());
        let (_, built) = room.made(&server.url("plain"), &["linked"]);
        let (before, sum) = built.lock.split_once("#sha256:").expect("a sum in the lock");
        let other = if sum.starts_with('0') { "1" } else { "0" };
        let lock = format!("{before}#sha256:{other}{}", &sum[1..]);
        for room in [room, Room::new()] {
            let wish = room.wish_locked(&lock);
            room.build(&wish).failed(&[Damaged]);
            assert!(!wish.prefix.join("share/linked").exists());
        }
    });
}

fn stalled(tally: &mut Tally, _: &Scale) {
    for mode in ["stall~big", "stall-repodata"] {
        let mut took = None;
        tally.case(mode, || {
            let told = fails_then_works(mode, &[Network]);
            took = Some(told.took);
        });
        tally.note(format!("{mode}, given up after {took:?} with a stall of 1 s"));
    }
}

fn resumed(tally: &mut Tally, _: &Scale) {
    for (mode, what) in [("stall~big", "big"), ("stall-repodata", "repodata")] {
        tally.case(mode, || {
            let (room, server) = (Room::new(), server());
            let wish = room.wish(&server.url(mode), &["big", "linked"]);
            let running = room.start(&Task::Build(Box::new(wish.clone())));
            eventually("it stalls", SOON, || (server.stalled() > 0).then_some(()));
            std::thread::sleep(Duration::from_millis(300));
            server.release();
            running.finish().built();
            sound(&wish.prefix);
            assert!(server.requests(what) > 0);
        });
    }
}

fn nobody(tally: &mut Tally, _: &Scale) {
    for url in ["http://127.0.0.1:9/main", "http://no-such-host.invalid/main", "https://127.0.0.1:9/main"] {
        tally.case(url, || {
            let room = Room::new();
            let told = room.build(&room.wish(url, &["linked"]));
            let failure = told.failed(&[Network]);
            assert!(
                failure.message.contains("127.0.0.1") || failure.message.contains("invalid"),
                "{failure:#?}"
            );
        });
    }
    tally.case("a server that speaks no TLS", || {
        let (room, server) = (Room::new(), server());
        room.build(&room.wish(&server.url("plain").replace("http:", "https:"), &["linked"]))
            .failed(&[Network]);
    });
    tally.case("a server that ended", || {
        let (room, server) = (Room::new(), server());
        room.made(&server.url("plain"), &["linked"]);
        let url = server.url("plain");
        drop(server);
        // Not even a list that is known is taken for what there is now, unless it is said: offline.
        room.build(&room.wish(&url, &["linked"])).failed(&[Network]);
    });
}

fn lists(tally: &mut Tally, _: &Scale) {
    tally.case("a page that asks for a password", || {
        let told = fails_then_works("login", &[Damaged, Denied, Network]);
        let failure = told.failed(&[Damaged, Denied, Network]);
        assert!(failure.message.contains("127.0.0.1"), "which server? {failure:#?}");
    });
    for text in
        ["", "{", "[]", "{}", "null", "{\"packages\": 7}", "{\"packages.conda\": {\"x-1-0.conda\": {}}}"]
    {
        tally.case(&format!("{text:?}"), || {
            let room = Room::new();
            let channel = Channel::t0().copy(&room.home.join("channel"));
            fs::write(channel.dir().join("main/linux-64/repodata.json"), text).expect("a list");
            let server = Server::start(&channel);
            let told = room.build(&room.wish(&server.url("plain"), &["linked"]));
            // An object without packages is an empty list.
            told.failed(&[Damaged, FailureKind::Unsatisfiable, Other]);
        });
    }
}

/// A folder with one list and its packages.
struct Folder {
    dir: PathBuf,
    list: Value,
}

impl Folder {
    /// A copy of the folder with packages in both forms of archives.
    fn copy(room: &Room) -> Folder {
        let (from, dir) = (Channel::t0().dir().join("main"), room.home.join("channel"));
        copy_tree(&from, &dir);
        let list = fs::read(dir.join(PLATFORM).join("repodata.json")).expect("a list");
        Folder { dir, list: serde_json::from_slice(&list).expect("JSON") }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(PLATFORM).join(name)
    }

    /// Puts another archive in the place of one. It is announced, so that it is unpacked.
    fn announce(&mut self, name: &str, archive: &[u8]) {
        fs::write(self.file(name), archive).expect("an archive");
        let digest: String = Sha256::digest(archive).iter().map(|byte| format!("{byte:02x}")).collect();
        for part in ["packages", "packages.conda"] {
            if let Some(record) = self.list[part].get_mut(name).and_then(Value::as_object_mut) {
                record.remove("md5");
                record.insert("sha256".into(), digest.clone().into());
                record.insert("size".into(), archive.len().into());
            }
        }
        fs::write(self.file("repodata.json"), self.list.to_string()).expect("a list");
    }
}

/// Compresses (`bz2.compress`) or does the opposite, as Python does it.
#[allow(clippy::disallowed_methods, reason = "makes what the engine is given")]
fn bz2(call: &str, bytes: &[u8]) -> Vec<u8> {
    let script = format!("import bz2, sys; sys.stdout.buffer.write(bz2.{call}(sys.stdin.buffer.read()))");
    let mut python = Command::new("python3");
    let mut python =
        python.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("Python");
    let mut stdin = python.stdin.take().expect("a pipe");
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let output = python.wait_with_output().expect("its output");
    writer.join().expect("no panic").expect("written");
    assert!(output.status.success());
    output.stdout
}

/// The list, an archive, and what is in one, each changed in a few places.
fn changed(tally: &mut Tally, scale: &Scale) {
    let (room, mut chance) = (Room::new(), scale.chance());
    let mut folder = Folder::copy(&room);
    let list = fs::read(folder.file("repodata.json")).expect("a list");
    let (zipped, packed) = ("text-prefix-1.0-0.conda", "old-format-1.0-0.tar.bz2");
    let archive = |name: &str| fs::read(folder.file(name)).expect("an archive");
    let (old, new) = (archive(packed), archive(zipped));
    let plain = bz2("decompress", &old);
    let (mut complaints, mut built, tries) = (Vec::new(), 0, scale.of(40, 2_000));
    for at in 0..tries {
        match at % 4 {
            0 => {
                fs::write(folder.file("repodata.json"), mutate::changed(slice::from_ref(&list), &mut chance))
                    .expect("a list")
            }
            1 => folder
                .announce(packed, &bz2("compress", &mutate::changed(slice::from_ref(&plain), &mut chance))),
            2 => folder.announce(packed, &mutate::changed(slice::from_ref(&old), &mut chance)),
            _ => folder.announce(zipped, &mutate::changed(slice::from_ref(&new), &mut chance)),
        }
        let wish = room.wish(&format!("file://{}", folder.dir.display()), &["old-format", "text-prefix"]);
        let request = EngineRequest { version: VERSION, task: Task::Build(Box::new(wish)) };
        let request = serde_json::to_string(&request).expect("JSON");
        let mut limited = within(&room.command());
        let told = catch_unwind(AssertUnwindSafe(|| room.start_with(&request, &mut limited).finish()));
        match told {
            Ok(told) if told.took < Duration::from_secs(20) => built += u32::from(told.status.success()),
            Ok(told) => complaints.push(format!("input {at} took {:?}", told.took)),
            Err(_) => complaints.push(format!("input {at}: the engine ended without an outcome")),
        }
        folder.announce(packed, &old);
        folder.announce(zipped, &new);
    }
    tally.count(tries, "inputs", &complaints);
    tally.note(format!("{built} of them were built all the same"));
}

/// The same command, with 1 GiB of memory to write in.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
fn within(command: &Command) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -d 1048576; exec \"$0\""]).arg(command.get_program()).env_clear();
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    limited.current_dir(command.get_current_dir().expect("a directory"));
    limited
}
