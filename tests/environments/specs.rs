//! Group S: what is asked for, from what nobody can understand to what contradicts itself.

use std::fs;

use agent_env::{FailureKind, Priority, Task};

use crate::environments::bench::{Room, from, machine_with_cuda, text, tiny};
use agent_tests::table::{Row, Scale, Tally};

/// The cases of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "S1", promise: "a line that is no specification is named by its number", run: nonsense },
    Row {
        id: "S2",
        promise: "what cannot be satisfied is explained, with the lines that are at fault",
        run: conflicts,
    },
    Row { id: "S3", promise: "what people write is understood as conda understands it", run: spellings },
    Row { id: "S4", promise: "channels are preferred in their order, and chosen by name", run: priorities },
    Row {
        id: "S5",
        promise: "a channel that is not there, or only half there, is told as that",
        run: absent,
    },
    Row { id: "S6", promise: "a request that cannot be honoured touches nothing", run: requests },
    Row {
        id: "S7",
        promise: "virtual packages are those of the request, whatever the surroundings say",
        run: overrides,
    },
];

const UNDERSTOOD: &[FailureKind] = &[FailureKind::Spec];
const CHOSEN: &[FailureKind] = &[FailureKind::Unsatisfiable];

fn nonsense(tally: &mut Tally, _: &Scale) {
    let lines = [
        "",
        "python >=",
        "[[[",
        "!!python/object:os.system",
        "python >=3.8,,",
        "=1.0",
        "python[version='3",
        "a b c d e f",
        "python; rm -rf /",
        "\u{0}",
        "../../etc",
    ];
    for line in lines {
        tally.case(&format!("{line:?}"), || {
            let room = Room::new();
            let wish = room.wish(&tiny("main"), &["linked", line]);
            let told = room.build(&wish);
            // What reads as a strange build string or name is understood, and not found.
            let failure = told.failed(&[FailureKind::Spec, FailureKind::Unsatisfiable]);
            assert_eq!(failure.lines, [2], "{failure:#?}");
            assert!(!wish.prefix.join("share").exists(), "something was linked");
        });
    }
    tally.case("two lines", || {
        let room = Room::new();
        let told = room.build(&room.wish(&tiny("main"), &["[[[", "linked", "]]]"]));
        let failure = told.failed(UNDERSTOOD);
        assert!(failure.lines.contains(&1), "{failure:#?}");
    });
}

fn conflicts(tally: &mut Tally, _: &Scale) {
    let impossible: &[(&[&str], &[usize], &str)] = &[
        (&["linked", "left", "linked", "right"], &[2, 4], "shared-base"),
        (&["linked", "no-such-package"], &[2], "no-such-package"),
        (&["linked", "python ==99"], &[2], "99"),
        (&["python 3.11.*", "linked", "python 3.10.*"], &[1, 3], "python"),
        (&["only-osx"], &[1], "only-osx"),
        (&["linked", "needs-cuda"], &[2], "__cuda"),
        (&["needs-glibc"], &[1], "__glibc"),
        (&["text-prefix=1.0 extra junk"], &[1], "text-prefix"),
    ];
    for (specs, guilty, word) in impossible {
        tally.case(&specs.join(", "), || {
            let room = Room::new();
            let mut wish = room.wish(&tiny("main"), specs);
            wish.platform = machine_with_cuda(None);
            let told = room.build(&wish);
            let failure = told.failed(&[FailureKind::Unsatisfiable, FailureKind::Spec]);
            assert!(failure.message.contains(word), "it does not name {word}: {failure:#?}");
            assert!(!failure.lines.is_empty(), "no line is named: {failure:#?}");
            assert!(failure.lines.iter().all(|line| guilty.contains(line)), "not {guilty:?}: {failure:#?}");
            assert!(!wish.prefix.join("share").exists(), "something was linked");
        });
    }
}

fn spellings(tally: &mut Tally, _: &Scale) {
    let python = [
        "python",
        "python=3.11",
        "python==3.11",
        "python ==3.11.0",
        "python >=3.8,<3.12",
        "python 3.11.*",
        "Python=3.11",
        "main::python",
        "python=3.11=fake_0",
        "python>=3.8",
        "python[version='>=3.11']",
        "python !=3.10.0",
        "python ~=3.8",
    ];
    for spec in python {
        tally.case(spec, || {
            let room = Room::new();
            let (prefix, built) = room.made(&tiny("main"), &[spec]);
            assert_eq!(built.python_version.as_deref(), Some("3.11.0"), "{built:#?}");
            assert!(prefix.join("bin/python").exists());
        });
    }
    tally.case("nothing at all", || {
        let built = Room::new().made(&tiny("main"), &[]).1;
        assert_eq!((built.packages, built.python_version), (0, None));
    });
    tally.case("no Python", || {
        let built = Room::new().made(&tiny("main"), &["linked"]).1;
        assert_eq!((built.packages, built.python_version), (1, None));
    });
    tally.case("the same line twice", || {
        assert_eq!(Room::new().made(&tiny("main"), &["linked", "linked", "linked ==1.0"]).1.packages, 1);
    });
}

fn priorities(tally: &mut Tally, _: &Scale) {
    let layered = |first: &str, spec: &str, priority: Priority| {
        let room = Room::new();
        let mut wish = room.wish(&tiny(first), &[spec]);
        let other = if first == "main" { "second" } else { "main" };
        wish.channels = vec![from(first, &tiny(first)), from(other, &tiny(other))];
        wish.priority = priority;
        (room.build(&wish), wish.prefix.clone(), room)
    };
    let gives = [
        ("main", "layered", Priority::Strict, "main"),
        ("second", "layered", Priority::Strict, "second"),
        ("main", "second::layered", Priority::Strict, "second"),
        ("second", "main::layered", Priority::Strict, "main"),
        ("main", "layered >=2", Priority::Flexible, "second"),
    ];
    for (first, spec, priority, holds) in gives {
        tally.case(&format!("{first} first, {spec}, {priority:?}"), || {
            let (told, prefix, _room) = layered(first, spec, priority);
            told.built();
            assert_eq!(text(&prefix, "share/layered").trim(), holds);
        });
    }
    tally.case("strict hides the better version", || {
        let (told, _, _room) = layered("main", "layered >=2", Priority::Strict);
        told.failed(CHOSEN);
    });
    tally.case("a channel nobody named", || {
        let (told, _, _room) = layered("main", "elsewhere::layered", Priority::Strict);
        let failure = told.failed(&[FailureKind::Spec, FailureKind::Unsatisfiable, FailureKind::NotFound]);
        assert!(failure.message.contains("elsewhere"), "{failure:#?}");
    });
}

fn absent(tally: &mut Tally, _: &Scale) {
    tally.case("no directory", || {
        let room = Room::new();
        let url = format!("file://{}/nowhere", room.home.display());
        let told = room.build(&room.wish(&url, &["linked"]));
        let failure = told.failed(&[FailureKind::NotFound]);
        assert!(failure.message.contains("nowhere"), "{failure:#?}");
    });
    tally.case("no noarch", || {
        let room = Room::new();
        let wish = room.wish(&tiny("incomplete"), &["lonely"]);
        let told = room.build(&wish);
        let failure = told.failed(&[FailureKind::NotFound]);
        assert!(failure.message.contains("noarch"), "{failure:#?}");
    });
    tally.case("an empty channel", || {
        let room = Room::new();
        room.build(&room.wish(&tiny("empty"), &["linked"])).failed(CHOSEN);
    });
    tally.case("no channel", || {
        let room = Room::new();
        let mut wish = room.wish("", &["linked"]);
        wish.channels.clear();
        room.build(&wish).failed(&[FailureKind::Unsatisfiable, FailureKind::Spec, FailureKind::NotFound]);
    });
    for url in ["", "not a url", "ftp://127.0.0.1/main", "http://", "file://relative/main"] {
        tally.case(&format!("the address {url:?}"), || {
            let room = Room::new();
            room.build(&room.wish(url, &["linked"])).failed(&[
                FailureKind::Spec,
                FailureKind::NotFound,
                FailureKind::Network,
                FailureKind::Refused,
            ]);
        });
    }
}

fn requests(tally: &mut Tally, _: &Scale) {
    for request in
        ["", "{", "[]", "{\"version\":1}", "{\"version\":99,\"task\":{\"kind\":\"probe\"}}", "\u{0}"]
    {
        tally.case(&format!("{request:?}"), || {
            let room = Room::new();
            let told = room.start_with(request, &mut room.command()).finish();
            told.failed(&[FailureKind::Other]);
        });
    }
    tally.case("a prefix that is not empty", || {
        let room = Room::new();
        let wish = room.wish(&tiny("main"), &["linked"]);
        fs::create_dir(wish.prefix.join("share")).expect("a directory");
        fs::write(wish.prefix.join("share/mine"), "mine").expect("a file");
        room.build(&wish).failed(&[FailureKind::Other, FailureKind::Refused]);
        assert_eq!(text(&wish.prefix, "share/mine"), "mine");
        assert!(!wish.prefix.join("share/linked").exists());
    });
    for prefix in ["relative", "../above", "/etc/passwd", "/etc/passwd/below"] {
        tally.case(&format!("the prefix {prefix}"), || {
            let room = Room::new();
            let mut wish = room.wish(&tiny("main"), &["linked"]);
            wish.prefix = prefix.into();
            room.build(&wish).failed(&[FailureKind::Other, FailureKind::Refused, FailureKind::Spec]);
            assert!(!room.home.join("relative").exists());
        });
    }
}

fn overrides(tally: &mut Tally, _: &Scale) {
    let build = |cuda: Option<&str>| {
        let room = Room::new();
        let mut wish = room.wish(&tiny("main"), &["needs-cuda"]);
        wish.platform = machine_with_cuda(cuda);
        let request =
            agent_env::EngineRequest { version: agent_env::VERSION, task: Task::Build(Box::new(wish)) };
        let request = serde_json::to_string(&request).expect("JSON");
        let mut command = room.command();
        command
            .env("CONDA_OVERRIDE_CUDA", "12.9")
            .env("CONDA_OVERRIDE_GLIBC", "9.9")
            .env("CONDA_PREFIX", "/nowhere");
        command
            .env("CONDA_PKGS_DIRS", room.home.join("elsewhere"))
            .env("RATTLER_CACHE_DIR", room.home.join("elsewhere"));
        let told = room.start_with(&request, &mut command).finish();
        assert!(!room.home.join("elsewhere").exists(), "another cache was used");
        told
    };
    tally.case("no driver", || {
        build(None).failed(CHOSEN);
    });
    tally.case("an older driver", || {
        build(Some("11.8")).failed(CHOSEN);
    });
    tally.case("a driver", || {
        build(Some("12.4")).built();
    });
}
