//! One controller, nodes that join it over TLS, users who come from elsewhere: on the addresses of this machine.

mod calls;
mod ends;
mod far;
mod grants;
mod joining;
mod limits;
mod names;
mod networks;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use agent_tests::fleet::{Daemon, processes_below};
use agent_tests::{Ran, SOON, binaries, end_all, eventually, finish};
use serde_json::Value;

/// A controller and whoever joined it.
struct Site {
    home: tempfile::TempDir,
    controller: Daemon,
    nodes: Vec<Daemon>,
    port: u16,
}

impl Site {
    /// A controller that runs.
    fn new() -> Site {
        Site::with(&[])
    }

    fn with(variables: &[(&str, &str)]) -> Site {
        Site::configured("roles: controller\n", variables)
    }

    /// The same with these lines of configuration.
    fn configured(lines: &str, variables: &[(&str, &str)]) -> Site {
        let home = tempfile::Builder::new().prefix("fleet-").tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!("{lines}listen: 0.0.0.0:{port}\ndisk_reserve: 64MiB\n");
        let mut controller = Daemon::new(home.path().join("c"), config);
        variables.iter().for_each(|(name, value)| controller.set(name, value));
        let mut site = Site { home, controller, nodes: Vec::new(), port };
        site.start_controller();
        site
    }

    fn start_controller(&mut self) {
        self.controller.spawn();
        eventually("the controller answers", SOON, || (self.ctl(&["nodes"]).code == 0).then_some(()));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn address(&self, host: &str) -> String {
        format!("https://{host}:{}", self.port)
    }

    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    fn client(&self, user: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(binaries().join("agentctl"));
        let theirs = self.path(user);
        fs::create_dir_all(&theirs).unwrap();
        command.args(arguments).env("HOME", &theirs).env("XDG_CACHE_HOME", theirs.join("cache"));
        command.env_remove("XDG_CONFIG_HOME").env_remove("XDG_DATA_HOME").env_remove("AGENTCTL_CONTEXT");
        // Whatever is on this machine is reached without it.
        command.env("HTTPS_PROXY", "http://127.0.0.1:9").env_remove("AGENTD_SOCKET").current_dir(&theirs);
        command.stdin(Stdio::null());
        command
    }

    /// `agentctl` of the operator, at the controller's own socket.
    fn ctl(&self, arguments: &[&str]) -> Ran {
        let mut command = self.client("root", arguments);
        command.env("AGENTD_SOCKET", self.controller.socket());
        finish(&mut command)
    }

    /// `agentctl` of a user who logged in.
    fn by(&self, user: &str, arguments: &[&str]) -> Ran {
        finish(&mut self.client(user, arguments))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        self.ctl(arguments).ok().json()
    }

    fn token(&self, arguments: &[&str]) -> String {
        let made = self.json(&[&["token", "create", "--json"], arguments].concat());
        made["token"].as_str().unwrap().to_owned()
    }

    fn add_user(&self, name: &str, role: &str) {
        let code =
            self.json(&["user", "add", name, "--role", role, "--json"])["token"].as_str().unwrap().to_owned();
        self.log_in(name, &code).ok();
    }

    fn log_in(&self, name: &str, code: &str) -> Ran {
        self.log_in_at(name, code, &self.address("127.0.0.1"))
    }

    fn log_in_at(&self, name: &str, code: &str, address: &str) -> Ran {
        let file = self.path(&format!("{name}.code"));
        fs::write(&file, code).unwrap();
        let mut command = self.client(name, &["login", address, "--context", "lab"]);
        finish(command.stdin(File::open(file).unwrap()))
    }

    /// A machine that has not joined.
    fn machine(&self, name: &str) -> Daemon {
        Daemon::new(self.path(name), format!("node_name: {name}\nslots: 4\ndisk_reserve: 64MiB\n"))
    }

    fn join(&self, machine: &Daemon, host: &str, token: &str) -> Ran {
        let file = machine.state().with_file_name("token");
        fs::write(&file, token).unwrap();
        let mut command =
            machine.command_of(&["join", &self.address(host), "--token-file", file.to_str().unwrap()]);
        finish(command.env("HTTPS_PROXY", "http://127.0.0.1:9").stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    /// Starts a node that joins at one of the addresses of this machine.
    fn add_node(&mut self, name: &str, host: &str) {
        let mut machine = self.machine(name);
        self.join(&machine, host, &self.token(&[])).ok();
        machine.set("HTTPS_PROXY", "http://127.0.0.1:9");
        machine.spawn();
        self.nodes.push(machine);
        self.until_ready(name);
    }

    fn node(&self, name: &str) -> Option<Value> {
        let nodes = self.ctl(&["nodes", "--json"]);
        let nodes: Value = serde_json::from_str(&nodes.stdout).ok()?;
        nodes["nodes"].as_array()?.iter().find(|node| node["node"] == name).cloned()
    }

    fn until_ready(&self, name: &str) {
        self.until(name, "ready");
    }

    fn until(&self, name: &str, liveness: &str) {
        eventually(&format!("{name} is {liveness}"), SOON, || {
            (self.node(name)?["liveness"] == liveness).then_some(())
        });
    }

    fn project(&self, user: &str, job: &str) -> String {
        let dir = self.path(user).join("p");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("data.txt"), "a line of code\n").unwrap();
        fs::write(dir.join("job.yml"), format!("code: .\nenvironment: host\n{job}")).unwrap();
        dir.to_str().unwrap().to_owned()
    }

    fn audit(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.controller.state().join("controller/audit.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Site {
    #[allow(clippy::print_stdout, reason = "what the daemons said, for whoever looks at a failed test")]
    fn drop(&mut self) {
        self.controller.kill();
        self.nodes.iter_mut().for_each(Daemon::kill);
        if std::thread::panicking() {
            for daemon in std::iter::once(&self.controller).chain(&self.nodes) {
                let log = daemon.log();
                let lines: Vec<&str> = log.lines().collect();
                println!(
                    "--- {}\n{}",
                    daemon.state().display(),
                    lines[lines.len().saturating_sub(40)..].join("\n")
                );
            }
        }
        end_all(|| processes_below(self.home.path()));
    }
}

#[test]
fn test_a_fleet_from_nothing() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    site.add_node("n0", "127.0.0.1");
    site.add_node("n1", "127.0.0.2");

    // Code, log and outputs travel.
    let project = site.project("ada", "command: 'cat data.txt; echo out > outputs/x'\ncompute: cpu\n");
    let ran = site.by("ada", &["run", &project]).ok().says("`compute: cpu` has no effect");
    assert!(ran.stdout.contains("a line of code"), "{ran:?}");
    site.by("ada", &["download", "-", "-o", "results"]).ok();
    assert_eq!(fs::read_to_string(site.path("ada/results/outputs/x")).unwrap(), "out\n");
    let status = site.by("ada", &["status"]).ok().stdout;
    assert!(status.contains(&site.address("127.0.0.1")) && status.contains("user ada"), "{status}");

    // Node and controller die while a job runs; the log is followed all the time.
    let go = site.path("go");
    let command =
        format!("command: 'echo begun; while ! [ -e {} ]; do sleep 0.1; done; echo ended'\n", go.display());
    let project = site.project("ada", &command);
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    let shown = |what: &str| site.by("ada", &["show", &job, "--json"]).ok().json()[what].clone();
    eventually("the job runs", SOON, || (shown("state") == "Running").then_some(()));
    let follower = site.client("ada", &["logs", "-f", &job]).stdout(Stdio::piped()).spawn().unwrap();
    let mut nodes = std::mem::take(&mut site.nodes);
    nodes.iter_mut().for_each(Daemon::bounce);
    site.nodes = nodes;
    site.controller.kill();
    site.start_controller();
    site.until_ready("n0");
    site.until_ready("n1");
    fs::write(go, "").unwrap();
    let followed = follower.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&followed.stdout), "begun\nended\n");
    assert_eq!(followed.status.code(), Some(0));
    let ended = site.by("ada", &["show", &job, "--json"]).ok().json();
    assert_eq!((&ended["state"], &ended["attempt"]), (&"Completed".into(), &1.into()), "{ended}");

    // Who did what is written down.
    let audit = site.audit();
    let told = |call: &str, who: &str| audit.iter().any(|line| line["call"] == call && line["who"] == who);
    assert!(told("Jobs/Submit", "user ada") && told("Identity/Join", "nobody"), "{audit:?}");
    assert!(told("Identity/CreateToken", "uid 0"), "{audit:?}");
    assert!(audit.iter().any(|line| line["about"] == format!("job {job}")), "{audit:?}");
}

/// A machine that is only a node tells of itself, to whoever is on it, whether its controller answers or not.
#[test]
fn test_a_node_tells_of_itself_on_its_own_machine() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    site.add_node("n0", "127.0.0.1");
    let socket = site.nodes[0].socket().display().to_string();
    let here = |site: &Site, arguments: &[&str]| site.by("op", &[&["--socket", &socket], arguments].concat());
    let status = |site: &Site| here(site, &["status", "--json"]).ok().json();
    let project = site.project("ada", "display_name: a secret\ncommand: 'echo begun; sleep 600'\n");
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    let running =
        || status(&site)["jobs"].as_array()?.iter().find(|known| known["state"] == "Running").cloned();
    let known = eventually("the node tells of the job", SOON, running);
    assert_eq!((&known["job"], &known["replicas"][0]["step"]), (&job.as_str().into(), &"Running".into()));
    assert_eq!(known["title"], "a secret", "root is an operator of the machine");

    let told = status(&site);
    let uplink = &told["uplink"];
    assert_eq!((&uplink["up"], &uplink["controller"]), (&true.into(), &site.address("127.0.0.1").into()));
    let node = &told["nodes"][0];
    assert_eq!((&node["node"], &node["slots_used"]), (&"n0".into(), &1.into()), "{told}");
    assert!(here(&site, &["status"]).ok().stdout.contains("role    node of https://"), "{told}");
    assert!(here(&site, &["doctor", "--json"]).json()["nodes"][0]["findings"][0]["topic"].is_string());

    // What only the controller does is refused with its address.
    let refused = here(&site, &["cancel", &job]);
    assert!(refused.code != 0 && refused.stderr.contains("agentctl login https://"), "{refused:?}");

    // What the controller decides is known here, and it is known when the controller went away.
    site.ctl(&["drain", "n0", "--timeout", "1"]);
    eventually("the node knows it", SOON, || {
        (status(&site)["nodes"][0]["eligibility"] == "draining").then_some(())
    });
    site.controller.kill();
    let told = eventually("the node knows it", SOON, || {
        let told = status(&site);
        let refused = told["uplink"]["why"].as_str().is_some_and(|why| why.contains("refused"));
        (refused && told["uplink"]["up"] == false).then_some(told)
    });
    assert_eq!(
        (&told["jobs"][0]["job"], &told["nodes"][0]["liveness"]),
        (&known["job"], &"not_responding".into())
    );

    // A daemon that does not run is told by what is on the disk.
    site.nodes[0].kill();
    let stopped = site.by("op", &["--socket", &socket, "status"]).code(4);
    for says in ["node n0 of https://", &format!("{job}.1.0"), "jobs go on without it"] {
        assert!(stopped.stderr.contains(says), "{says}: {stopped:?}");
    }
}

#[test]
fn test_a_token_is_good_for_what_it_says_and_no_more() {
    let site = Site::new();
    let (first, second) = (site.machine("n0"), site.machine("n1"));
    let token = site.token(&["--label", "rack=7"]);
    let joined = site.join(&first, "127.0.0.1", &token).ok();
    assert!(joined.stdout.contains("joined"), "{joined:?}");
    let again = site.join(&first, "127.0.0.1", "no token is needed").ok();
    assert!(again.stdout.contains("already"), "{again:?}");
    let refused = |machine: &Daemon, token: &str, code: &str, says: &str| {
        let ran = site.join(machine, "127.0.0.1", token);
        assert!(ran.code != 0 && ran.stderr.contains(code) && ran.stderr.contains(says), "{ran:?}");
    };
    refused(&second, &token, "NET-104", "as often as");
    refused(&second, "agentd-join-x", "NET-104", "not whole");
    let short = site.token(&["--for", "1s"]);
    std::thread::sleep(Duration::from_millis(1500));
    refused(&second, &short, "NET-104", "time is over");
    let id = site.json(&["token", "create", "--json"]);
    site.ctl(&["token", "revoke", id["id"].as_str().unwrap()]).ok();
    refused(&second, id["token"].as_str().unwrap(), "NET-104", "revoked");
    let code = site.json(&["user", "add", "ada", "--json"])["token"].as_str().unwrap().to_owned();
    refused(&second, &code, "NET-104", "code of a user");
    // The name of a machine is its own.
    let other = Daemon::new(site.path("x"), "node_name: n0\ndisk_reserve: 64MiB\n".into());
    refused(&other, &site.token(&[]), "NODE-110", "agentctl node remove n0");
    // Nothing is trusted because it answers: the token is of another authority.
    let elsewhere = Site::new();
    refused(&second, &elsewhere.token(&[]), "NET-101", "that gave the token");
    let other = elsewhere.join(&first, "127.0.0.1", &elsewhere.token(&[]));
    assert!(other.code != 0 && other.stderr.contains("CFG-104"), "{other:?}");
    assert!(other.stderr.contains("agentd leave"), "{other:?}");
    let tokens = site.ctl(&["token", "list"]).ok().stdout;
    assert!(
        tokens.contains("used up") && tokens.contains("rack=7") && !tokens.contains("agentd-join"),
        "{tokens}"
    );
    // A code is good once.
    site.log_in("ada", &code).ok();
    site.log_in("ada", &code).code(1).says("NET-104");
    site.by("ada", &["jobs"]).ok();
    // And a machine that leaves may come back under its name when the controller lets it.
    let left = finish(first.command_of(&["leave"]).stdout(Stdio::piped())).ok();
    assert!(left.stdout.contains("no controller"), "{left:?}");
    refused(&first, &site.token(&[]), "NODE-110", "another key");
    site.ctl(&["node", "remove", "n0"]).ok();
    site.join(&first, "127.0.0.1", &site.token(&[])).ok();
}

#[test]
fn test_who_is_removed_gets_nothing_any_more() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    site.add_user("eve", "submit");
    site.add_user("bob", "operate");
    site.add_node("n0", "127.0.0.1");
    let project = site.project("ada", "command: 'sleep 600'\n");
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    eventually("the job is placed", SOON, || (site.node("n0")?["slots_used"] == 1).then_some(()));
    // Jobs of others: an operator, and nobody else.
    for call in [&["show", &job][..], &["cancel", &job], &["logs", &job], &["download", &job]] {
        let ran = site.by("eve", call);
        assert!(ran.code != 0 && ran.stderr.contains("NET-102"), "{call:?}: {ran:?}");
    }
    site.by("eve", &["drain", "n0", "--no-wait"]).code(4);
    // One that is for all is read by all, and ended by its owner alone.
    let open = site.project("ada", "command: 'echo for all'\nvisibility: all\n");
    let open = site.by("ada", &["run", "--detach", &open]).ok().stdout.trim().to_owned();
    site.by("ada", &["wait", &open]).ok();
    assert_eq!(site.by("eve", &["logs", &open]).ok().stdout, "for all\n");
    site.by("eve", &["cancel", &open]).code(4).says("NET-102");
    site.by("bob", &["show", &job]).ok();
    site.by("bob", &["user", "list"]).code(4);
    site.ctl(&["node", "remove", "n0"]).code(1).says("NODE-109");
    site.by("ada", &["cancel", "--wait", &job]).ok();

    site.ctl(&["user", "remove", "ada"]).ok();
    site.by("ada", &["jobs"]).says("NET-103");
    // Under the same name somebody else comes; the old certificate stays what it is.
    site.json(&["user", "add", "ada", "--new-person", "--json"]);
    site.by("ada", &["jobs"]).says("NET-103");

    site.ctl(&["node", "remove", "n0"]).ok();
    assert!(site.node("n0").is_none());
    eventually("the node is told", SOON, || site.nodes[0].log().contains("NODE-112").then_some(()));
    assert!(site.node("n0").is_none(), "it does not come back by itself");
    let refusals = site.audit();
    let refused = |who: &str, code: &str| {
        refusals.iter().any(|line| line["who"] == who && line["answer"].as_str().unwrap().contains(code))
    };
    assert!(refused("node n0", "NODE-112") && refused("user ada", "NET-103"), "{refusals:?}");
}

#[test]
fn test_certificates_are_renewed_before_they_end() {
    let mut site = Site::with(&[("AGENTD_TEST_CERTIFICATE_LIFE", "10s")]);
    site.add_node("n0", "127.0.0.1");
    site.add_user("ada", "submit");
    let project = site.project("ada", "command: 'for i in $(seq 150); do echo $i; sleep 0.1; done'\n");
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    // More than two lives of every certificate: the controller's own, the node's, and the user's.
    let end = std::time::Instant::now() + Duration::from_secs(24);
    while std::time::Instant::now() < end {
        site.by("ada", &["jobs"]).ok();
        std::thread::sleep(Duration::from_millis(500));
    }
    site.by("ada", &["wait", &job]).ok();
    let log = site.by("ada", &["logs", &job]).ok().stdout;
    assert_eq!(
        log.lines().count(),
        150,
        "no line is lost or repeated when a connection ends with its certificate"
    );
    assert!(site.nodes[0].log().matches("was renewed").count() >= 2, "{}", site.nodes[0].log());
    // One that was not used in time says so itself.
    std::thread::sleep(Duration::from_secs(11));
    site.by("ada", &["jobs"]).code(4).says("NET-103").says("agentctl login");
}

#[test]
fn test_a_copied_machine_is_kept_out_and_a_restarted_one_is_not() {
    let mut site = Site::new();
    site.add_node("n0", "127.0.0.1");
    let project = site.project("root", "command: 'sleep 600'\n");
    let job = site.ctl(&["submit", &project]).ok().stdout.trim().to_owned();
    eventually("the job runs", SOON, || {
        (site.ctl(&["show", &job, "--json"]).ok().json()["state"] == "Running").then_some(())
    });
    let mut copy = Daemon::new(site.path("copy"), "node_name: n0\nslots: 4\ndisk_reserve: 64MiB\n".into());
    fs::create_dir_all(copy.state()).unwrap();
    copy_all(&site.nodes[0].state(), &copy.state());
    copy.reboot("another-boot"); // a copy is another machine
    copy.spawn();
    eventually("the copy is told", SOON, || copy.log().contains("NODE-108").then_some(()));
    eventually("both are named", SOON, || {
        let status = site.ctl(&["status"]).ok().stdout;
        (status.contains("two machines live as") && status.contains("kept out")).then_some(())
    });
    assert_eq!(site.ctl(&["show", &job, "--json"]).ok().json()["state"], "Running", "the copy ended nothing");
    copy.kill();
    site.nodes[0].bounce();
    site.until_ready("n0");
    eventually("its job is still its own", SOON, || {
        (site.ctl(&["show", &job, "--json"]).ok().json()["state"] == "Running").then_some(())
    });
    assert!(!site.nodes[0].log().contains("NODE-108"), "a restart is no copy");
    site.ctl(&["cancel", "--wait", &job]).ok();
}

fn copy_all(from: &Path, to: &Path) {
    for name in ["identity.json", "journal.db", "journal.db-wal", "jobs"] {
        let (from, to) = (from.join(name), to.join(name));
        if from.is_dir() {
            agent_tests::copy_tree(&from, &to);
        } else if from.exists() {
            fs::copy(&from, &to).unwrap();
        }
    }
}

#[test]
fn test_clocks_that_are_apart_are_told_or_refused() {
    let mut site = Site::new();
    let mut machine = site.machine("n0");
    machine.set("AGENTD_TEST_CLOCK_AHEAD", "7200000");
    let ran = site.join(&machine, "127.0.0.1", &site.token(&[]));
    assert!(
        ran.code != 0 && ran.stderr.contains("NET-105") && ran.stderr.matches(" UTC").count() == 2,
        "{ran:?}"
    );
    for (ahead, told) in [("-1800000", "30 min behind"), ("600000", "10 min ahead of")] {
        machine.set("AGENTD_TEST_CLOCK_AHEAD", ahead);
        site.join(&machine, "127.0.0.1", &site.token(&[])).ok();
        machine.spawn();
        eventually("the clock is told", SOON, || {
            let told_of = format!("{:?}", site.node("n0")?);
            (told_of.contains(told) && told_of.contains("NTP")).then_some(())
        });
        machine.kill();
    }
    site.nodes.push(machine);
}
