//! Group B: servers that are broken, lie, or never finish, and packages that are not what was announced.

use std::fs;
use std::time::Duration;

use agent_env::FailureKind::{self, Damaged, Denied, Network, NotFound, Other};
use agent_env::Task;
use agent_tests::channel::{Channel, Server};
use agent_tests::{SOON, eventually};

use crate::environments::bench::{Room, Told, server, text};
use agent_tests::table::{Row, Scale, Tally};

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
