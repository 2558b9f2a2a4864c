//! Group P: what packages hold, from placeholders to attempts to leave the environment.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use agent_env::FailureKind::{self, Damaged, NotFound, Other, Refused, Unsatisfiable};

use crate::environments::bench::{Room, files, holding, machine, text, tiny};
use agent_tests::copy_tree;
use agent_tests::table::{Row, Scale, Tally};

/// The cases of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "P1", promise: "the prefix is put in wherever a package names it", run: placeholders },
    Row { id: "P2", promise: "a prefix that does not fit is a failure, not a broken program", run: short },
    Row { id: "P3", promise: "what activation sets is told", run: activation },
    Row {
        id: "P4",
        promise: "all kinds of packages are installed, and recorded for other tools",
        run: kinds,
    },
    Row { id: "P5", promise: "no package writes outside of its environment, or points there", run: hostile },
    Row { id: "P6", promise: "no script of a package is run", run: scripts },
    Row { id: "P7", promise: "two packages with one file give the same environment each time", run: clash },
    Row { id: "P8", promise: "packages whose names lead elsewhere lead nowhere", run: names },
    Row { id: "P9", promise: "a lock makes the same again, and a strange one is refused", run: locks },
    Row {
        id: "P10",
        promise: "a link over a link leads nowhere: nothing outside is read, written, or made readable",
        run: over_links,
    },
    Row { id: "P11", promise: "a file of a package is for all to read and for nobody to write", run: modes },
    Row {
        id: "P12",
        promise: "a build reads nothing but its own and its channels (Linux 5.19)",
        run: confined,
    },
];

const ESCAPED: &str = "agent-env-escaped";

fn placeholders(tally: &mut Tally, _: &Scale) {
    let room = Room::new();
    let (prefix, built) =
        room.made(&tiny("main"), &["text-prefix", "binary-prefix", "old-format", "noarch-tool", "part-00"]);
    let here = prefix.display().to_string();
    tally.case("none is left", || {
        // What records how a package was made keeps them.
        let left: Vec<_> = holding(&prefix, b"/opt/placeholder")
            .into_iter()
            .filter(|path| !path.starts_with("conda-meta"))
            .collect();
        assert_eq!(left, Vec::<PathBuf>::new());
    });
    tally.case("text", || {
        assert_eq!(text(&prefix, "etc/text-prefix.conf"), format!("prefix = {here}\nlib = {here}/lib\n"));
        assert_eq!(text(&prefix, "share/old-format").trim(), here);
        assert_eq!(text(&prefix, "share/part-00/3.txt"), format!("0 3 {here}\n"));
        assert!(text(&prefix, "bin/text-prefix").starts_with(&format!("#!{here}/bin/python\n")));
        assert_eq!(mode(&prefix.join("bin/text-prefix")), 0o755);
    });
    tally.case("binary, padded to its length", || {
        let data = fs::read(prefix.join("lib/binary-prefix.bin")).expect("a file");
        assert_eq!(data.len(), 5 + 255 + "/share/data".len() + 1 + "after".len() + 1);
        let begins = [b"\x7fBIN\x00".as_slice(), here.as_bytes(), b"/share/data\x00"].concat();
        assert!(data.starts_with(&begins) && data.ends_with(b"\x00after\x00"), "{data:?}");
    });
    tally.case("entry points", || {
        let script = text(&prefix, "bin/noarch-tool");
        assert!(script.starts_with(&format!("#!{here}/bin/python")), "{script}");
        assert_eq!(mode(&prefix.join("bin/noarch-tool")) & 0o111, 0o111);
        assert!(prefix.join("lib/python3.11/site-packages/noarch_tool.py").exists());
        assert_eq!(built.python_version.as_deref(), Some("3.11.0"));
    });
}

fn short(tally: &mut Tally, _: &Scale) {
    tally.case("a placeholder of 19 characters", || {
        let room = Room::new();
        let wish = room.wish(&tiny("main"), &["short-placeholder", "linked"]);
        let told = room.build(&wish);
        let failure = told.failed(&[Refused, Other]);
        assert!(failure.message.contains("short-placeholder"), "which? {failure:#?}");
        assert!(!prefix_has_record(&wish.prefix, "short-placeholder"));
        // The package itself is sound; nothing is to be fetched anew.
        room.made(&tiny("main"), &["linked"]);
    });
    tally.case("a prefix of 300 characters", || {
        let room = Room::new();
        let mut wish = room.wish(&tiny("main"), &["binary-prefix"]);
        wish.prefix = room.home.join(format!("{0}/{0}/{0}", "x".repeat(90)));
        fs::create_dir_all(&wish.prefix).expect("a directory");
        room.build(&wish).failed(&[Refused, Other]);
        assert!(!prefix_has_record(&wish.prefix, "binary-prefix"));
    });
}

fn prefix_has_record(prefix: &Path, package: &str) -> bool {
    files(&prefix.join("conda-meta")).iter().any(|path| {
        let name = path.to_string_lossy();
        name.starts_with(&format!("{package}-")) && name.ends_with(".json")
    })
}

fn activation(tally: &mut Tally, _: &Scale) {
    let room = Room::new();
    let (prefix, built) = room.made(&tiny("main"), &["activated", "python"]);
    tally.case("a build runs no script, and says that there is one", || {
        assert!(built.has_scripts);
        assert!(!built.activation.vars.contains_key("ACTIVATED_BY"), "{:#?}", built.activation);
        assert_eq!(built.activation.path_entries, [prefix.join("bin")]);
    });
    let activation = room.activate(&prefix);
    tally.case("variables", || {
        let (vars, here) = (&activation.vars, prefix.display());
        assert_eq!(vars.get("ACTIVATED_BY"), Some(&format!("script of {here}")), "{vars:#?}");
        assert_eq!(vars.get("ACTIVATED_VAR"), Some(&"from a list".to_owned()), "{vars:#?}");
        assert!(!vars.contains_key("PATH") && !vars.contains_key("HOME"), "{vars:#?}");
    });
    tally.case("the path", || {
        let entries = &activation.path_entries;
        assert!(entries.contains(&prefix.join("bin")), "{entries:#?}");
        assert!(entries.contains(&prefix.join("opt/activated/bin")), "{entries:#?}");
        let foreign: Vec<_> = entries.iter().filter(|path| !path.starts_with(&prefix)).collect();
        assert!(foreign.is_empty(), "{foreign:?}");
    });
    tally.case("without scripts", || {
        let (prefix, built) = room.made(&tiny("main"), &["linked"]);
        assert!(built.activation.path_entries.contains(&prefix.join("bin")) && !built.has_scripts);
    });
}

fn kinds(tally: &mut Tally, _: &Scale) {
    let room = Room::new();
    let specs = ["old-format", "noarch-generic", "noarch-tool", "linked", "many-files", "parts"];
    let (prefix, built) = room.made(&tiny("main"), &specs);
    tally.case("every package is recorded", || {
        let records = files(&prefix.join("conda-meta"));
        let records = records.iter().filter(|path| path.extension().is_some_and(|ending| ending == "json"));
        assert_eq!(records.count(), usize::try_from(built.packages).expect("a number"));
        assert_eq!(built.packages, 6 + 1 + 30, "python and the parts are what was not named");
    });
    tally.case("every file is there", || {
        for number in 0..2000 {
            assert_eq!(
                text(&prefix, &format!("share/many/{}/{number}.txt", number % 40)),
                format!("file {number}\n")
            );
        }
        assert!(built.files >= 2000 + 30 * 25, "{}", built.files);
        assert_eq!(text(&prefix, "share/noarch-generic"), "1\n");
    });
    tally.case("links within a package stay links", || {
        assert_eq!(fs::read_link(prefix.join("share/linked/link")).expect("a link"), PathBuf::from("target"));
        assert_eq!(fs::read_link(prefix.join("linked")).expect("a link"), PathBuf::from("share"));
        assert_eq!(text(&prefix, "linked/linked/link"), "1\n");
    });
    tally.case("every user may read it", || {
        let closed: Vec<_> = files(&prefix)
            .into_iter()
            .filter(|path| !prefix.join(path).is_symlink() && mode(&prefix.join(path)) & 0o444 != 0o444)
            .collect();
        assert_eq!(closed, Vec::<PathBuf>::new());
    });
    tally.case("no file can be written by everybody", || {
        let open: Vec<_> = files(&prefix)
            .into_iter()
            .filter(|path| !prefix.join(path).is_symlink() && mode(&prefix.join(path)) & 0o002 != 0)
            .collect();
        assert_eq!(open, Vec::<PathBuf>::new());
    });
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        .permissions()
        .mode()
        & 0o777
}

/// Whatever a package put where none may.
fn escaped(room: &Room) -> Vec<PathBuf> {
    let mut found: Vec<_> =
        files(&room.home).into_iter().filter(|path| path.to_string_lossy().contains(ESCAPED)).collect();
    found.extend(Path::new("/tmp").join(ESCAPED).exists().then(|| Path::new("/tmp").join(ESCAPED)));
    let above = room.home.parent().expect("a parent").join(ESCAPED);
    found.extend(above.exists().then_some(above));
    found
}

fn hostile(tally: &mut Tally, _: &Scale) {
    let _ = fs::remove_file(Path::new("/tmp").join(ESCAPED));
    let packages = [
        "traversal",
        "absolute-path",
        "listed-traversal",
        "absolute-symlink",
        "escaping-symlink",
        "through-symlink",
        "evil-entry-point",
    ];
    for package in packages {
        tally.case(package, || {
            let room = Room::new();
            let wish = room.wish(&tiny("main"), &["linked", package]);
            let told = room.build(&wish);
            assert_eq!(escaped(&room), Vec::<PathBuf>::new());
            let failure = told.failed(&[Refused]);
            assert!(failure.message.contains(package), "which? {failure:#?}");
            assert!(!prefix_has_record(&wish.prefix, package), "it is recorded as installed");
            // With the same cache again, where it may lie half unpacked.
            room.build(&room.wish(&tiny("main"), &[package])).failed(&[Refused]);
            assert_eq!(escaped(&room), Vec::<PathBuf>::new());
            room.made(&tiny("main"), &["linked"]);
        });
    }
}

/// What packages of the channel `links` lead to, if they get so far.
struct Victim(PathBuf);

impl Victim {
    const SECRET: &[u8] = b"the secret of somebody else";

    fn new() -> Victim {
        let place = PathBuf::from("/tmp/agent-env-victim");
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(place.join("bin")).expect("a directory");
        fs::write(place.join("secret"), Victim::SECRET).expect("a file");
        fs::set_permissions(place.join("secret"), fs::Permissions::from_mode(0o600)).expect("a mode");
        Victim(place)
    }

    /// Nothing became of it, and nothing of it is in the room.
    #[track_caller]
    fn is_untouched(&self, room: &Room) {
        assert_eq!(files(&self.0), [PathBuf::from("secret")], "something was written");
        assert_eq!(mode(&self.0.join("secret")), 0o600, "it was made readable");
        assert_eq!(holding(&room.home, Victim::SECRET), Vec::<PathBuf>::new(), "it was read");
        let environments = room.home.join("environments");
        let led = |path: &PathBuf| {
            let path = environments.join(path);
            path.is_symlink() && path.canonicalize().is_ok_and(|end| end.starts_with(&self.0))
        };
        let links: Vec<_> = files(&environments).into_iter().filter(led).collect();
        assert_eq!(links, Vec::<PathBuf>::new(), "links lead there");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn over_links(tally: &mut Tally, _: &Scale) {
    let refused = [
        "leak",
        "leak-old",
        "leak-copied",
        "pointing",
        "unlisted",
        "dotted-record",
        "doubled-record",
        "linked-meta",
        "half-a half-b",
        "linked-bin",
        "linked-bin planting",
        "python=3.8 planting",
    ];
    for wanted in refused {
        tally.case(wanted, || {
            let (room, victim) = (Room::new(), Victim::new());
            let specs: Vec<_> = wanted.split(' ').collect();
            // Again with what the first left in the cache, where all of it is known.
            for _ in 0..3 {
                let told = room.build(&room.wish(&tiny("links"), &specs));
                victim.is_untouched(&room);
                told.failed(&[Refused, Damaged]);
            }
            room.made(&tiny("links"), &["innocent"]);
        });
    }
    tally.case("links that stay inside are links", || {
        let room = Room::new();
        let (prefix, _) = room.made(&tiny("links"), &["innocent"]);
        assert_eq!(fs::read_link(prefix.join("d/up")).expect("a link"), PathBuf::from("l1/../d"));
        assert_eq!(prefix.join("d/up").canonicalize().expect("a way"), prefix.join("d"));
    });
    // What two packages ask for at one place is one of both, and never the one through the other.
    for wanted in ["inner-bin planting", "filled-bin planting", "inner-bin filled-bin"] {
        tally.case(wanted, || {
            let room = Room::new();
            let specs: Vec<_> = wanted.split(' ').collect();
            let wish = room.wish(&tiny("links"), &specs);
            let told = room.build(&wish);
            assert!(told.built().files > 0 && told.said().contains("more than one package"), "{told:#?}");
            assert!(!wish.prefix.join("share/tools/planted").exists(), "it was written through a link");
        });
    }
}

/// A folder of a channel may lead to one of the same name and to no other: what is read there shows whether the kernel
/// holds the engine to its own.
fn confined(tally: &mut Tally, _: &Scale) {
    let from = PathBuf::from(tiny("links").trim_start_matches("file://"));
    let platform = machine().subdir.as_str();
    for (name, is_its_own) in [(platform, true), ("secrets", false)] {
        tally.case(name, || {
            let room = Room::new();
            let (elsewhere, channel) = (room.home.join("elsewhere").join(name), room.home.join("channel"));
            copy_tree(&from.join("noarch"), &channel.join("noarch"));
            copy_tree(&from.join(platform), &elsewhere);
            symlink(elsewhere, channel.join(platform)).expect("a link");
            let told = room.build(&room.wish(&format!("file://{}", channel.display()), &["innocent"]));
            if is_its_own {
                told.built();
            } else {
                let failure = told.failed(&[Damaged]);
                assert!(failure.message.contains("Permission denied"), "{failure:#?}");
            }
        });
    }
}

fn modes(tally: &mut Tally, _: &Scale) {
    for hard_links in [false, true] {
        tally.case(if hard_links { "linked" } else { "copied" }, || {
            let room = Room::new();
            let mut wish = room.wish(&tiny("links"), &["odd-modes"]);
            wish.hard_links = hard_links;
            room.build(&wish).built();
            let modes = ["open", "closed", "program"].map(|name| {
                let path = wish.prefix.join("share/odd-modes").join(name);
                fs::symlink_metadata(path).expect("a file").permissions().mode() & 0o7777
            });
            assert_eq!(modes, [0o644, 0o644, 0o755]);
        });
    }
}

fn scripts(tally: &mut Tally, _: &Scale) {
    let told = Path::new("/tmp/agent-env-post-link-ran");
    let _ = fs::remove_file(told);
    tally.case("a post-link script that never ends", || {
        let room = Room::new();
        let wish = room.wish(&tiny("main"), &["post-link"]);
        let outcome = room.build(&wish);
        if outcome.status.success() {
            assert!(
                outcome.said().contains("post-link"),
                "nobody is told that it was not run: {}",
                outcome.said()
            );
        } else {
            outcome.failed(&[Refused]);
        }
        assert!(!wish.prefix.join("post-link-ran").exists() && !told.exists(), "it ran");
    });
}

fn clash(tally: &mut Tally, _: &Scale) {
    let mut seen = Vec::new();
    for specs in [["clash-a", "clash-b"], ["clash-b", "clash-a"]] {
        for _ in 0..3 {
            tally.case(&specs.join(", "), || {
                let room = Room::new();
                let wish = room.wish(&tiny("main"), &specs);
                let told = room.build(&wish);
                if told.status.success() {
                    seen.push(text(&wish.prefix, "share/clash.txt"));
                    assert!(told.said().contains("clash.txt"), "nobody is told: {}", told.said());
                    assert!(
                        wish.prefix.join("share/clash-a").exists()
                            && wish.prefix.join("share/clash-b").exists()
                    );
                } else {
                    seen.push(format!("{:?}", told.failed(&[Refused]).kind));
                }
            });
        }
    }
    tally.case("always the same", || {
        seen.dedup();
        assert_eq!(seen.len(), 1, "{seen:?}");
    });
}

fn names(tally: &mut Tally, _: &Scale) {
    for spec in ["honest", "strange", "misnamed", "con/../../strange", "honest misnamed"] {
        tally.case(spec, || {
            let room = Room::new();
            let specs: Vec<_> = spec.split(' ').collect();
            let wish = room.wish(&tiny("odd"), &specs);
            let told = room.build(&wish);
            assert_eq!(escaped(&room), Vec::<PathBuf>::new());
            assert!(
                !wish.prefix.join("share/strange").exists() && !wish.prefix.join("share/misnamed").exists()
            );
            if spec != "honest" {
                told.failed(&[Refused, NotFound, Unsatisfiable, Damaged, FailureKind::Spec]);
            } else if !told.status.success() {
                // To refuse the whole channel is as good as to pass over what is wrong in it.
                told.failed(&[Damaged, Refused]);
            }
        });
    }
}

fn locks(tally: &mut Tally, _: &Scale) {
    let room = Room::new();
    let specs = ["python", "noarch-tool", "old-format", "linked", "parts"];
    let (_, built) = room.made(&tiny("main"), &specs);
    tally.case("the same packages", || {
        let again = room.build(&room.wish_locked(&built.lock)).built().clone();
        assert_eq!((again.packages, &again.lock), (built.packages, &built.lock));
        let lines = built.lock.lines().filter(|line| line.contains("#sha256:")).count();
        assert_eq!(lines, usize::try_from(built.packages).expect("a number"), "{}", built.lock);
        assert!(
            built.lock.contains("@EXPLICIT") && built.lock.contains("# platform: linux-64"),
            "{}",
            built.lock
        );
    });
    tally.case("in another order, with comments and blank lines", || {
        let (head, list) = built.lock.split_once("@EXPLICIT").expect("a list");
        let mut lines: Vec<_> = list.lines().collect();
        lines.reverse();
        let lock = format!("{head}# a comment\n\n@EXPLICIT\n{}\n\n", lines.join("\n"));
        assert_eq!(room.build(&room.wish_locked(&lock)).built().packages, built.packages);
    });
    tally.case("without digests it is the package of the address, and not of the name", || {
        let (other, _) = room.made(&tiny("links"), &["layered"]);
        let lock = format!("@EXPLICIT\n{}/linux-64/layered-1.0-0.conda\n", tiny("main"));
        for _ in 0..2 {
            let wish = room.wish_locked(&lock);
            room.build(&wish).built();
            assert_eq!(text(&wish.prefix, "share/layered"), "main\n");
        }
        assert_eq!(text(&other, "share/layered"), "another of the same name\n");
    });
    let refused: &[(&str, String, &[FailureKind])] = &[
        (
            "of another platform",
            built.lock.replace("linux-64", "osx-arm64"),
            &[Refused, FailureKind::Spec, NotFound],
        ),
        ("garbage", "this is no lock\n".into(), &[FailureKind::Spec]),
        ("a package that is not there", built.lock.replace("linked-1.0", "linked-7.0"), &[NotFound, Damaged]),
        (
            "an address that leads elsewhere",
            lock_of("file:///etc/../../x-1.0-0.conda"),
            &[NotFound, Refused, FailureKind::Spec],
        ),
        ("a file that is no package", lock_of("file:///etc/passwd"), &[Refused, FailureKind::Spec, NotFound]),
        ("an address without a package", lock_of("http://127.0.0.1:9/"), &[FailureKind::Spec, Refused]),
    ];
    for (name, lock, kinds) in refused {
        tally.case(name, || {
            let room = Room::new();
            let wish = room.wish_locked(lock);
            room.build(&wish).failed(kinds);
            assert!(!wish.prefix.join("share").exists(), "something was linked");
        });
    }
}

fn lock_of(url: &str) -> String {
    format!("# platform: linux-64\n@EXPLICIT\n{url}#sha256:{}\n", "0".repeat(64))
}
