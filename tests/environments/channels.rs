//! Group C: servers that work, that want to know who asks, or that work only later.

use agent_env::{FailureKind, Priority};
use agent_tests::channel::{Channel, Server};

use crate::environments::bench::{Room, SECRETS, from, holding, server, text, tiny};
use agent_tests::table::{Row, Scale, Tally};

/// The cases of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "C1",
        promise: "what is in the cache is not fetched again, and offline nothing is asked",
        run: once,
    },
    Row {
        id: "C2",
        promise: "credentials are used where they belong and are found nowhere afterwards",
        run: credentials,
    },
    Row { id: "C3", promise: "wrong or missing credentials are told as that", run: denied },
    Row { id: "C4", promise: "a server that is busy for a moment costs a moment", run: moments },
    Row {
        id: "C5",
        promise: "a mirror that is dead or bad is passed over, and is not where things come from",
        run: mirrors,
    },
    Row {
        id: "C6",
        promise: "what a channel offers is asked for again, and a lock asks no channel",
        run: news,
    },
    Row { id: "C7", promise: "a slow download is not a stalled one, and its progress is told", run: slow },
    Row { id: "C8", promise: "a channel of 20,000 packages more, or 360,000, is no obstacle", run: huge },
];

const BASIC: &str = r#"{"BasicHTTP": {"username": "reader", "password": "basic-secret"}}"#;
const BEARER: &str = r#"{"BearerToken": "bearer-secret"}"#;
const TOKEN: &str = r#"{"CondaToken": "token-secret"}"#;

fn once(tally: &mut Tally, _: &Scale) {
    let (room, server) = (Room::new(), server());
    let url = server.url("plain");
    let specs = ["parts", "big", "noarch-tool"];
    tally.case("a cold cache", || {
        room.made(&url, &specs);
        for package in ["part-00-1.0", "part-29-1.0", "big-1.0", "noarch-tool-1.0", "python-3.11.0"] {
            assert_eq!(server.requests(package), 1, "{package}: {:#?}", server.all_requests());
        }
        assert_eq!(server.requests("left"), 0);
    });
    server.clear();
    tally.case("a warm cache", || {
        room.made(&url, &specs);
        assert_eq!(server.requests(".conda"), 0, "{:#?}", server.all_requests());
    });
    tally.case("one package more", || {
        room.made(&url, &["parts", "big", "noarch-tool", "linked"]);
        assert_eq!((server.requests(".conda"), server.requests("linked-1.0")), (1, 1));
    });
    server.clear();
    tally.case("offline, all there", || {
        let mut wish = room.wish(&url, &specs);
        wish.offline = true;
        room.build(&wish).built();
        assert_eq!(server.all_requests().len(), 0, "{:#?}", server.all_requests());
    });
    tally.case("offline, a package missing", || {
        let mut wish = room.wish(&url, &["many-files"]);
        wish.offline = true;
        let told = room.build(&wish);
        let failure = told.failed(&[FailureKind::NotFound, FailureKind::Network, FailureKind::Unsatisfiable]);
        assert!(format!("{failure:?}").to_lowercase().contains("offline"), "{failure:#?}");
        assert_eq!(server.all_requests().len(), 0);
    });
    tally.case("offline, nothing there", || {
        let room = Room::new();
        let mut wish = room.wish(&url, &["linked"]);
        wish.offline = true;
        let told = room.build(&wish);
        let failure = told.failed(&[FailureKind::NotFound, FailureKind::Network, FailureKind::Unsatisfiable]);
        assert!(format!("{failure:?}").to_lowercase().contains("offline"), "{failure:#?}");
        assert_eq!(server.all_requests().len(), 0);
    });
}

fn credentials(tally: &mut Tally, _: &Scale) {
    for (mode, json) in [("basic", BASIC), ("bearer", BEARER), ("token", TOKEN)] {
        tally.case(mode, || {
            let (room, server) = (Room::new(), server());
            let mut wish = room.wish(&server.url(mode), &["linked", "parts"]);
            let file = room.credentials(&server, json);
            wish.credentials = Some(file.clone());
            let told = room.build(&wish);
            let lock = told.built().lock.clone();
            std::fs::remove_file(&file).expect("a file");
            for secret in SECRETS {
                assert_eq!(
                    holding(&room.home, secret.as_bytes()),
                    Vec::<std::path::PathBuf>::new(),
                    "{secret}"
                );
            }
            assert!(lock.contains(&server.url(mode)), "the lock does not name the channel: {lock}");
        });
    }
    tally.case("a server that was not meant", || {
        let (room, meant, other) = (Room::new(), server(), server());
        let mut wish = room.wish(&other.url("bearer"), &["linked"]);
        let path = room.home.join("credentials.json");
        std::fs::write(&path, format!("{{\"127.0.0.1:{}\": {BEARER}}}", meant.port())).expect("a file");
        wish.credentials = Some(path);
        room.build(&wish).failed(&[FailureKind::Denied]);
    });
}

fn denied(tally: &mut Tally, _: &Scale) {
    let wrong = [
        ("basic", None),
        ("bearer", None),
        ("token", None),
        ("forbidden", Some(BEARER)),
        ("basic", Some(r#"{"BasicHTTP": {"username": "reader", "password": "guessed-word"}}"#)),
        ("bearer", Some(r#"{"BearerToken": "guessed-word"}"#)),
        ("token", Some(r#"{"CondaToken": "guessed-word"}"#)),
    ];
    for (mode, json) in wrong {
        tally.case(&format!("{mode} with {json:?}"), || {
            let (room, server) = (Room::new(), server());
            let mut wish = room.wish(&server.url(mode), &["linked"]);
            wish.credentials = json.map(|json| room.credentials(&server, json));
            let told = room.build(&wish);
            let failure = told.failed(&[FailureKind::Denied]);
            assert!(failure.message.contains("127.0.0.1"), "who denies it? {failure:#?}");
            assert!(failure.hint.is_some(), "what is to be done? {failure:#?}");
            assert!(!format!("{told:?}").contains("guessed-word"), "the secret was told: {told:#?}");
        });
    }
    for text in ["", "{", "[1]", "{\"127.0.0.1\": {\"BearerToken\": 7}}"] {
        tally.case(&format!("a file of {text:?}"), || {
            let (room, server) = (Room::new(), server());
            let mut wish = room.wish(&server.url("plain"), &["linked"]);
            let path = room.home.join("credentials.json");
            std::fs::write(&path, text).expect("a file");
            wish.credentials = Some(path);
            let told = room.build(&wish);
            let failure = told.failed(&[FailureKind::Other, FailureKind::Denied, FailureKind::Spec]);
            assert!(failure.message.contains("credentials.json"), "which file? {failure:#?}");
        });
    }
}

fn moments(tally: &mut Tally, _: &Scale) {
    for mode in ["unavailable", "busy", "redirect"] {
        tally.case(mode, || {
            let (room, server) = (Room::new(), server());
            let (prefix, built) = room.made(&server.url(mode), &["linked", "part-00", "part-01"]);
            assert_eq!(built.packages, 3);
            assert_eq!(text(&prefix, "share/linked/target"), "1\n");
        });
    }
}

fn mirrors(tally: &mut Tally, _: &Scale) {
    const CHANNEL: &str = "http://channel.invalid/main";
    for bad in ["missing", "broken", "login", "flipped", "truncated", "forbidden", "dead"] {
        tally.case(bad, || {
            let (room, server) = (Room::new(), server());
            let mut wish = room.wish(CHANNEL, &["linked", "part-00"]);
            // Port 9 is that of a service nobody runs.
            let bad = if bad == "dead" { "http://127.0.0.1:9/main".to_owned() } else { server.url(bad) };
            wish.channels[0].mirrors = vec![bad, server.url("plain")];
            let told = room.build(&wish);
            let lock = &told.built().lock;
            assert!(lock.contains(CHANNEL) && !lock.contains("127.0.0.1"), "it comes from a mirror: {lock}");
            assert_eq!(text(&wish.prefix, "share/linked/target"), "1\n");
        });
    }
    tally.case("only bad ones", || {
        let (room, server) = (Room::new(), server());
        let mut wish = room.wish(CHANNEL, &["linked"]);
        wish.channels[0].mirrors = vec![server.url("broken"), "http://127.0.0.1:9/main".to_owned()];
        room.build(&wish).failed(&[FailureKind::Network]);
    });
    tally.case("a lock goes through mirrors as well", || {
        let (room, server) = (Room::new(), server());
        let mut wish = room.wish(CHANNEL, &["linked"]);
        wish.channels[0].mirrors = vec![server.url("plain")];
        let lock = room.build(&wish).built().lock.clone();
        let other = Room::new();
        let mut again = other.wish_locked(&lock);
        again.channels.clone_from(&wish.channels);
        other.build(&again).built();
    });
}

fn news(tally: &mut Tally, _: &Scale) {
    let room = Room::new();
    let channel = Channel::t0().copy(&room.home.join("channel"));
    let server = Server::start(&channel);
    let url = server.url("plain");
    let mut lock = String::new();
    tally.case("as it was", || {
        lock = room.made(&url, &["linked", "part-00"]).1.lock;
    });
    std::fs::copy(
        channel.dir().join("empty/linux-64/repodata.json"),
        channel.dir().join("main/linux-64/repodata.json"),
    )
    .expect("another list");
    tally.case("the package is gone from the list", || {
        room.build(&room.wish(&url, &["linked", "part-00"])).failed(&[FailureKind::Unsatisfiable]);
    });
    server.clear();
    tally.case("a lock from a warm cache", || {
        let told = room.build(&room.wish_locked(&lock));
        assert_eq!(told.built().packages, 2);
        assert_eq!(server.all_requests().len(), 0, "{:#?}", server.all_requests());
    });
    tally.case("a lock from a cold cache", || {
        let other = Room::new();
        let told = other.build(&other.wish_locked(&lock));
        assert_eq!((told.built().packages, &told.built().lock), (2, &lock));
        assert_eq!(server.requests("repodata"), 0, "{:#?}", server.all_requests());
    });
    tally.case("a flexible choice among channels with one list changed", || {
        let mut wish = room.wish(&url, &["layered"]);
        wish.channels.push(from("second", &tiny("second")));
        wish.priority = Priority::Flexible;
        room.build(&wish).built();
        assert_eq!(text(&wish.prefix, "share/layered").trim(), "second");
    });
}

fn slow(tally: &mut Tally, _: &Scale) {
    tally.case("4 MiB at 1 MB/s, with a stall of one second", || {
        let (room, server) = (Room::new(), server());
        let mut wish = room.wish(&server.url("slow~1000000"), &["big"]);
        wish.stall_s = 1;
        let told = room.build(&wish);
        told.built();
        assert_eq!(server.requests("big-1.0"), 1, "it was begun anew");
        let bytes: Vec<u64> = told
            .events
            .iter()
            .filter_map(|event| match event {
                agent_env::EngineEvent::Progress(at) if at.phase == agent_env::Phase::Download => {
                    Some(at.bytes)
                }
                _ => None,
            })
            .collect();
        assert!(bytes.len() > 2, "no progress was told: {bytes:?}");
        assert!(bytes.is_sorted(), "progress went back: {bytes:?}");
    });
}

fn huge(tally: &mut Tally, scale: &Scale) {
    let mode = format!("huge~{}", if scale.full { 360_000 } else { 20_000 });
    let (room, server) = (Room::new(), server());
    for state in ["cold", "warm"] {
        let mut took = None;
        tally.case(state, || {
            let told = room.build(&room.wish(&server.url(&mode), &["linked"]));
            assert_eq!(told.built().packages, 1);
            took = Some(told.took);
        });
        tally.note(format!("{state}: {took:?}"));
    }
}
