//! Group R: environments in use: jobs that change them, long paths, other users, and a Python that works.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};

use agent_tests::channel::Channel;

use crate::environments::bench::{Room, files, text, tiny};
use agent_tests::table::{Row, Scale, Tally};

/// The cases of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "R1",
        promise: "a job that writes into its environment changes no other, and not the cache",
        run: written,
    },
    Row { id: "R2", promise: "a path of 200 characters works", run: long },
    Row { id: "R3", promise: "an engine leaves nothing outside of the prefix and the cache", run: tidy },
    Row { id: "R4", promise: "a real Python runs, imports and finds its packages, by any user", run: real },
    Row { id: "R5", promise: "pip works in it, and changes nothing but this environment", run: pip },
    Row { id: "R6", promise: "a model is fitted", run: fitted },
];

#[allow(clippy::disallowed_methods, reason = "runs what was built")]
fn run(program: &Path, arguments: &[&str], user: Option<u32>) -> Output {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    command.output().unwrap_or_else(|error| panic!("{} does not start: {error}", program.display()))
}

#[track_caller]
fn says(program: &Path, arguments: &[&str], user: Option<u32>) -> String {
    let output = run(program, arguments, user);
    let (said, complaint) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{said}\n{complaint}", output.status);
    said.trim().to_owned()
}

fn written(tally: &mut Tally, _: &Scale) {
    const FILE: &str = "share/writable.txt";
    let append = |path: &Path| {
        let mut file = fs::File::options().append(true).open(path).expect("root may write");
        file.write_all(b"changed\n").expect("a write");
    };
    for spec in ["writable", "linked", "many-files"] {
        tally.case(&format!("appended to every file of {spec}"), || {
            let room = Room::new();
            let (first, _) = room.made(&tiny("main"), &[spec]);
            let kept = |prefix: &Path| {
                let mut paths = files(prefix);
                paths.retain(|path| !path.starts_with("conda-meta") && !prefix.join(path).is_symlink());
                paths
            };
            let before: Vec<_> = kept(&first)
                .into_iter()
                .map(|path| (fs::read(first.join(&path)).expect("a file"), path))
                .collect();
            for (_, path) in &before {
                append(&first.join(path));
            }
            let (second, _) = room.made(&tiny("main"), &[spec]);
            for (data, path) in before {
                assert!(
                    fs::read(second.join(&path)).expect("a file") == data,
                    "{} has changed",
                    path.display()
                );
            }
        });
    }
    for hard_links in [false, true] {
        tally.case(&format!("files are those of the cache only where it is allowed: {hard_links}"), || {
            let room = Room::new();
            let mut wish = room.wish(&tiny("main"), &["writable", "text-prefix"]);
            wish.hard_links = hard_links;
            room.build(&wish).built();
            let links = fs::metadata(wish.prefix.join(FILE)).expect("a file").nlink();
            // Blocks that are shared are better than files that are.
            assert!(links == 1 || hard_links, "{links} names for one file");
            let own = fs::metadata(wish.prefix.join("etc/text-prefix.conf")).expect("a file").nlink();
            assert_eq!(own, 1, "what names the prefix belongs to this environment alone");
        });
    }
    tally.case("cut to nothing, made executable, and removed", || {
        let room = Room::new();
        let (first, _) = room.made(&tiny("main"), &["writable"]);
        fs::write(first.join(FILE), "").expect("a file");
        fs::set_permissions(first.join(FILE), fs::Permissions::from_mode(0o777)).expect("a mode");
        let (second, _) = room.made(&tiny("main"), &["writable"]);
        fs::remove_dir_all(&first).expect("a directory");
        assert_eq!(text(&second, FILE), "as it was made\n");
        assert_eq!(fs::metadata(second.join(FILE)).expect("a file").mode() & 0o777, 0o644);
        room.made(&tiny("main"), &["writable"]);
    });
}

fn long(tally: &mut Tally, _: &Scale) {
    for length in [100, 200, 240] {
        tally.case(&format!("{length} characters"), || {
            let room = Room::new();
            let mut wish = room
                .wish(&tiny("main"), &["python", "text-prefix", "binary-prefix", "noarch-tool", "activated"]);
            let missing = length - room.home.as_os_str().len() - 1;
            wish.prefix = room.home.join("e".repeat(missing));
            fs::create_dir(&wish.prefix).expect("a directory");
            room.build(&wish).built();
            let here = wish.prefix.display().to_string();
            assert_eq!(here.len(), length);
            assert!(text(&wish.prefix, "etc/text-prefix.conf").contains(&format!("prefix = {here}\n")));
            let vars = room.activate(&wish.prefix).vars;
            assert_eq!(vars.get("ACTIVATED_BY"), Some(&format!("script of {here}")));
            // Such a path is too long for the first line of a script in some kernels; it must start all the same.
            says(&wish.prefix.join("bin/noarch-tool"), &[], None);
        });
    }
}

fn tidy(tally: &mut Tally, _: &Scale) {
    tally.case("its home stays empty", || {
        let room = Room::new();
        let (prefix, _) = room.made(&tiny("main"), &["linked", "activated"]);
        room.activate(&prefix);
        room.sweep(0);
        assert_eq!(files(&room.home.join("home")), Vec::<std::path::PathBuf>::new());
        let beside: Vec<_> =
            fs::read_dir(&room.home).expect("a directory").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(beside.len(), 3, "cache, environments and home: {beside:?}");
    });
    tally.case("without a home", || {
        let room = Room::new();
        let wish = room.wish(&tiny("main"), &["linked"]);
        let request = agent_env::EngineRequest {
            version: agent_env::VERSION,
            task: agent_env::Task::Build(Box::new(wish)),
        };
        let mut command = room.command();
        command.env_remove("HOME");
        room.start_with(&serde_json::to_string(&request).expect("JSON"), &mut command).finish().built();
    });
}

fn real(tally: &mut Tally, _: &Scale) {
    const NOBODY: u32 = 65534;
    let (room, channel) = (Room::new(), Channel::t1());
    fs::set_permissions(&room.home, fs::Permissions::from_mode(0o755)).expect("a mode");
    let (prefix, built) = room.made(&channel.file_url("main"), &["python", "tiny-two", "tiny-one ==1.0"]);
    let python = prefix.join("bin/python");
    tally.case("its version and prefix", || {
        assert_eq!(built.python_version.as_deref(), Some(channel.python()));
        let code = "import sys, platform; print(platform.python_version(), sys.prefix)";
        assert_eq!(
            says(&python, &["-I", "-c", code], None),
            format!("{} {}", channel.python(), prefix.display())
        );
    });
    for user in [None, Some(NOBODY)] {
        tally.case(&format!("imports as {user:?}"), || {
            let code = "import bz2, ctypes, hashlib, lzma, sqlite3, ssl, zlib; import tiny_two, tiny_one; \
                        print(tiny_one.__version__, tiny_one.__file__)";
            let said = says(&python, &["-c", code], user);
            assert!(said.starts_with(&format!("1.0 {}", prefix.display())), "{said}");
            assert_eq!(says(&prefix.join("bin/tiny-two"), &[], user), "tiny-two 1.0");
        });
    }
    tally.case("the same from its lock", || {
        let wish = room.wish_locked(&built.lock);
        room.build(&wish).built();
        assert_eq!(says(&wish.prefix.join("bin/tiny-one"), &[], None), "tiny-one 1.0");
    });
    tally.case("at a path of 200 characters", || {
        let mut wish = room.wish_locked(&built.lock);
        wish.prefix = room.home.join("e".repeat(199 - room.home.as_os_str().len()));
        fs::create_dir(&wish.prefix).expect("a directory");
        room.build(&wish).built();
        assert_eq!(says(&wish.prefix.join("bin/tiny-one"), &[], None), "tiny-one 1.0");
    });
}

fn pip(tally: &mut Tally, _: &Scale) {
    let (room, channel) = (Room::new(), Channel::t1());
    let specs = ["python", "pip", "tiny-one ==1.0"];
    let (first, built) = room.made(&channel.file_url("main"), &specs);
    let wheels = channel.wheels();
    let wheels = wheels.to_str().expect("UTF-8");
    let compiled = |dir: &Path| {
        files(dir).iter().filter(|path| path.extension().is_some_and(|ending| ending == "pyc")).count()
    };
    let shipped = compiled(&room.cache);
    tally.case("it replaces a package of conda", || {
        let install = [
            "-I",
            "-m",
            "pip",
            "install",
            "--no-index",
            "--no-input",
            "--find-links",
            wheels,
            "tiny-one==2.0",
            "tiny-two",
        ];
        says(&first.join("bin/python"), &install, None);
        assert_eq!(says(&first.join("bin/tiny-one"), &[], None), "tiny-one 2.0");
        assert_eq!(says(&first.join("bin/tiny-two"), &[], None), "tiny-two 1.0");
    });
    tally.case("the next environment has what conda has", || {
        let wish = room.wish_locked(&built.lock);
        room.build(&wish).built();
        assert_eq!(says(&wish.prefix.join("bin/tiny-one"), &[], None), "tiny-one 1.0");
        assert!(!wish.prefix.join("bin/tiny-two").exists());
    });
    tally.case("bytecode stays where it was compiled", || {
        let code = "import compileall, pip; compileall.compile_dir(pip.__path__[0], quiet=1)";
        says(&first.join("bin/python"), &["-I", "-c", code], None);
        assert!(compiled(&first) > shipped, "nothing was compiled");
        assert_eq!(compiled(&room.cache), shipped, "bytecode that no package brought is in the cache");
    });
}

fn fitted(tally: &mut Tally, _: &Scale) {
    let (room, channel) = (Room::new(), Channel::t2());
    tally.case("a random forest", || {
        let (prefix, _) = room.made(&channel.file_url("main"), &["python", "scikit-learn"]);
        let code = "from sklearn.ensemble import RandomForestClassifier as F; \
                    print(F(5).fit([[0], [1]] * 20, [0, 1] * 20).predict([[0], [1]]).tolist())";
        assert_eq!(says(&prefix.join("bin/python"), &["-I", "-c", code], None), "[0, 1]");
    });
}
