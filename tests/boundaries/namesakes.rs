//! Who gets the name of a user who was removed: what packages of that one have written is on the nodes still.

#![allow(clippy::disallowed_methods, reason = "is a client that no daemon starts")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, Ran, finish};

use crate::boundaries::helper::{begun, needs, slow_package};
use crate::boundaries::users::{BUILDERS, ENDED, shared, witness};

pub(crate) const ROWS: &[Row] = &[Row {
    id: "U13",
    promise: "a new person with the name of a removed one gets no cache and no environment of that one",
    run: heirs,
}];

/// What the package of the first person leaves for the next, and what its build sees of caches.
fn left_behind(witness: &Path) -> String {
    format!(
        r#"cache = os.environ["PIP_CACHE_DIR"]
    seen = [os.path.join(at, name) for at, dirs, files in os.walk(os.path.dirname(cache)) for name in dirs + files]
    open("{w}/seen-%d" % os.getuid(), "w").write("\n".join(["looked"] + seen))
    os.makedirs(cache, exist_ok=True)
    open(cache + "/planted", "w").write("of the first")"#,
        w = witness.display()
    )
}

/// A laptop of the user `ada`, who logged in with a code.
struct Laptop<'a> {
    host: &'a Host,
    home: PathBuf,
}

impl Laptop<'_> {
    fn of<'a>(host: &'a Host, name: &str, address: &str, code: &str) -> Laptop<'a> {
        let laptop = Laptop { host, home: host.home().join(name) };
        fs::create_dir_all(laptop.home.join("p")).expect("a directory");
        let file = laptop.home.join("code");
        fs::write(&file, code.trim()).expect("a file");
        finish(laptop.command(&["login", address]).stdin(File::open(file).expect("a file"))).ok();
        laptop
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.host.home().join("bin/agentctl"));
        command.args(arguments).env("HOME", &self.home).env("XDG_CACHE_HOME", self.home.join("cache"));
        for name in ["XDG_CONFIG_HOME", "XDG_DATA_HOME", "AGENTCTL_CONTEXT", "AGENTD_SOCKET"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).current_dir(&self.home);
        command
    }

    fn ran(&self, arguments: &[&str]) -> Ran {
        finish(&mut self.command(arguments))
    }

    /// Runs a job that needs this package; what it printed.
    #[track_caller]
    fn uses(&self, package: &Path) -> String {
        let job = format!("command: \"python -c 'import slow; print(slow.x)'\"\ncode: .\n{}", needs(package));
        fs::write(self.home.join("p/job.yml"), job).expect("a file");
        let job = self.ran(&["submit", "p"]).ok().stdout.trim().to_owned();
        let state = self.host.wait_for(&job, ENDED);
        assert_eq!(state, "Completed", "{}", self.host.ctl(&["logs", "--build", &job]).stdout);
        self.ran(&["logs", &job]).ok().stdout
    }
}

fn heirs(tally: &mut Tally, _: &Scale) {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let listen = format!("127.0.0.1:{port}");
    let host = shared(&[("AGENTD_UV", "never"), ("AGENTD_LISTEN", &listen)]);
    let (dir, address) = (witness(&host), format!("https://{listen}"));
    let package = slow_package(&host, "slow", &dir, &left_behind(&dir));
    let code = |more: &[&str]| host.ctl(&[&["user", "add", "ada"], more].concat()).ok().stdout;

    let first = Laptop::of(&host, "first", &address, &code(&[]));
    tally.case("the first of the name builds, and leaves something for the next", || {
        assert_eq!(first.uses(&package), "1\n");
        assert_eq!((first.uses(&package).as_str(), begun(&dir)), ("1\n", 1), "it is there already");
        let cache = host.state().join("packages/of/user-ada/pip/planted");
        assert_eq!(fs::read_to_string(cache).expect("root reads it"), "of the first");
    });
    tally.case("the same person has what was built before", || {
        host.ctl(&["user", "remove", "ada"]).ok();
        let same = Laptop::of(&host, "same", &address, &code(&["--same-person"]));
        assert_eq!((same.uses(&package).as_str(), begun(&dir)), ("1\n", 1));
    });
    host.ctl(&["user", "remove", "ada"]).ok();
    let new = Laptop::of(&host, "new", &address, &code(&["--new-person"]));
    tally.case("for a new person it is built again, from nothing that was there", || {
        assert_eq!((new.uses(&package).as_str(), begun(&dir)), ("1\n", 2));
    });
    tally.case("by a builder of another number, which sees caches of its own alone", || {
        let of = host.state().join("packages/of");
        let entries = fs::read_dir(&of).expect("caches").map(|entry| entry.expect("a cache").file_name());
        let names = entries.map(|name| name.to_string_lossy().into_owned());
        let of_ada: BTreeMap<String, u32> = names
            .filter(|name| name.starts_with("user-ada"))
            .map(|name| (name.clone(), of.join(name).metadata().expect("a cache").uid()))
            .collect();
        // The first of the name has it alone; to that of the next, the time is added.
        let builders: Vec<u32> = of_ada.values().copied().collect();
        let [old, heir] = builders[..] else { panic!("caches of two: {of_ada:?}") };
        assert!(old != heir && builders.iter().all(|builder| BUILDERS.contains(builder)), "{of_ada:?}");
        let seen =
            |builder| fs::read_to_string(dir.join(format!("seen-{builder}"))).expect("what its build saw");
        assert!(seen(old).starts_with("looked") && !seen(heir).contains("planted"), "{}", seen(heir));
    });
    tally.case("and she keeps it", || {
        assert_eq!((new.uses(&package).as_str(), begun(&dir)), ("1\n", 2));
    });
}
