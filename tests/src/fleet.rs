//! A controller and its nodes, each a process of its own with a state directory of its own, to be killed,
//! frozen, cut off and started again; or one box that is both.
//!
//! Nothing of a fleet outlives it. When the test around it failed, its directory stays, and is named.

use std::cell::Cell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use agent_model::JobDraft;
use rustix::process::Signal;

use crate::client::Client;
use crate::hosts::{Hosts, address};
use crate::link::Link;
use crate::post::{Post, Rules};
use crate::witness::Witness;
use crate::{SOON, binaries, end_all, eventually, finish, once_free, signal};

/// Where the controller of a fleet over TLS listens.
pub const TLS_PORT: u16 = 7443;

thread_local! {
    static FAILED: Cell<bool> = const { Cell::new(false) };
}

/// The test of this thread failed: fleets that end from now on keep their directories.
pub fn keep_evidence(keep: bool) {
    FAILED.set(keep);
}

fn keeps_evidence() -> bool {
    std::thread::panicking() || FAILED.get()
}

/// One daemon: the real program with a home of its own.
#[derive(Debug)]
pub struct Daemon {
    home: PathBuf,
    /// Where its program is.
    programs: PathBuf,
    config: String,
    variables: Vec<(String, String)>,
    boot_id: Option<String>,
    /// What its program is started by, if not by itself: a host of its own.
    starter: Vec<String>,
    child: Option<Child>,
}

impl Daemon {
    /// One that has this home and configuration, and does not run yet.
    pub fn new(home: PathBuf, config: String) -> Daemon {
        fs::create_dir_all(&home).expect("a home");
        let programs = binaries().to_owned();
        Daemon {
            home,
            programs,
            config,
            variables: Vec::new(),
            boot_id: None,
            starter: Vec::new(),
            child: None,
        }
    }

    /// Its program, and the supervisors that it starts, are those of this directory from the next start on.
    pub fn use_programs(&mut self, from: &Path) {
        self.programs = from.to_owned();
    }

    /// The same, started by these words: on a host of its own.
    #[must_use]
    pub fn started_by(self, starter: Vec<String>) -> Daemon {
        Daemon { starter, ..self }
    }

    /// Its program is started by these words from the next start on.
    pub fn start_by(&mut self, starter: &[&str]) {
        self.starter = starter.iter().map(|word| (*word).to_owned()).collect();
    }

    /// Its state directory.
    pub fn state(&self) -> PathBuf {
        self.home.join("state")
    }

    /// Where it listens, if it is a controller.
    pub fn socket(&self) -> PathBuf {
        self.state().join("agentd.sock")
    }

    /// Changes its configuration from the next start on.
    pub fn configure(&mut self, lines: &str) {
        self.config.push_str(lines);
    }

    /// Sets a variable for it from the next start on; an empty value removes it.
    pub fn set(&mut self, name: &str, value: &str) {
        self.variables.retain(|(known, _)| known != name);
        if !value.is_empty() {
            self.variables.push((name.to_owned(), value.to_owned()));
        }
    }

    /// Whether a variable is set for its next start.
    pub fn has(&self, name: &str) -> bool {
        self.variables.iter().any(|(known, _)| known == name)
    }

    /// The command that starts it.
    pub fn command(&self) -> Command {
        self.command_of(&["run"])
    }

    /// The same program with another verb.
    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    pub fn command_of(&self, words: &[&str]) -> Command {
        let config = self.home.join("agentd.yaml");
        fs::write(&config, &self.config).expect("a configuration");
        let mut command = match &self.boot_id {
            Some(boot_id) => self.in_another_boot(boot_id),
            None if !self.starter.is_empty() => {
                let mut command = Command::new(&self.starter[0]);
                command.args(&self.starter[1..]).arg(self.programs.join("agentd"));
                command
            }
            None => Command::new(self.programs.join("agentd")),
        };
        command.args(words).arg("--user").arg("--config").arg(config).arg("--state-dir").arg(self.state());
        command.env("AGENTD_LOG", "info,agentd=debug,agent_control=debug").env_remove("AGENTD_SOCKET");
        command.env("XDG_DATA_HOME", &self.home).stdin(Stdio::null()).stdout(Stdio::null());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let log = File::options().create(true).append(true).open(self.home.join("agentd.log"));
        command.stderr(log.expect("a log"));
        command
    }

    /// A program that starts the daemon where the kernel seems to name another boot.
    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    fn in_another_boot(&self, boot_id: &str) -> Command {
        const ENTER: &str = r#"mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@""#;
        let file = self.home.join("boot_id");
        fs::write(&file, boot_id).expect("a boot id");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", ENTER, "sh"]).arg(file).arg(self.programs.join("agentd"));
        command
    }

    /// What a sudden restart of its machine does: every process is gone, and the next boot has this name.
    pub fn reboot(&mut self, boot_id: &str) {
        self.kill();
        eventually("every process is gone", SOON, || {
            let left = self.processes();
            left.iter().for_each(|pid| signal(*pid, Signal::KILL));
            left.is_empty().then_some(())
        });
        self.boot_id = Some(boot_id.to_owned());
    }

    /// Starts the program, which may take a while to answer.
    pub fn spawn(&mut self) {
        assert!(self.child.is_none(), "it runs already");
        self.child = Some(once_free(|| self.command().spawn()).expect("agentd starts"));
    }

    /// Its process id; 0 when it does not run.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// How it ended, if it did so by itself.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().expect("its own child")
    }

    /// Ends it as a crash does; fine when it is dead already.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            child.wait().expect("the daemon is reaped");
        }
    }

    /// Kills it and starts it again at once.
    pub fn bounce(&mut self) {
        self.kill();
        self.spawn();
    }

    /// Ends it as an operator does.
    #[track_caller]
    pub fn stop(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the daemon runs");
        signal(child.id(), Signal::TERM);
        eventually("the daemon stops", SOON, || child.try_wait().expect("its own child"))
    }

    /// How it ended by itself, once it has.
    #[track_caller]
    pub fn exited(&mut self) -> ExitStatus {
        let status = eventually("the daemon ends by itself", SOON, || self.ended());
        self.kill(); // only to be reaped
        status
    }

    /// It gets no processor any more.
    pub fn freeze(&self) {
        signal(self.pid(), Signal::STOP);
    }

    /// It goes on.
    pub fn thaw(&self) {
        signal(self.pid(), Signal::CONT);
    }

    /// Directories of the replicas it holds.
    pub fn job_dirs(&self) -> Vec<PathBuf> {
        let listed = fs::read_dir(self.state().join("jobs")).into_iter().flatten().flatten();
        listed.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    }

    /// Puts an empty file where its only job runs, which waits for that.
    #[track_caller]
    pub fn open_gate(&self, name: &str) {
        let dirs = self.job_dirs();
        assert_eq!(dirs.len(), 1, "{dirs:?}");
        fs::write(dirs[0].join("job/work").join(name), "").expect("a file");
    }

    /// The supervisors of its jobs: the directory of the replica and the process.
    pub fn shims(&self) -> Vec<(PathBuf, u32)> {
        let is_shim = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "agent-shim")
        };
        let of = |pid: u32| {
            let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let command = String::from_utf8_lossy(&command).into_owned();
            let dirs = self.job_dirs();
            let words: Vec<&str> = command.split('\0').collect();
            let dir = dirs.into_iter().find(|dir| words.iter().any(|word| Path::new(word) == dir))?;
            Some((dir, pid))
        };
        processes_below(&self.state()).into_iter().filter(is_shim).filter_map(of).collect()
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.home.join("agentd.log")).unwrap_or_default()
    }

    /// The processes below its home, itself included.
    pub fn processes(&self) -> Vec<u32> {
        processes_below(&self.home)
    }

    fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }
}

/// A controller and its nodes.
#[derive(Debug)]
pub struct Fleet {
    home: Option<tempfile::TempDir>,
    /// The controller; the whole box when there are no nodes.
    pub controller: Daemon,
    /// The nodes, `n0`, `n1` and so on.
    pub nodes: Vec<Daemon>,
    /// The wire of each node.
    pub links: Vec<Link>,
    /// What carries the messages of each node, if the fleet has such.
    pub posts: Vec<Post>,
    /// What the jobs leave.
    pub witness: Witness,
    /// A client of the controller.
    pub client: Client,
    /// The hosts of the nodes, if they have some.
    pub hosts: Option<Hosts>,
}

/// How the fleet is configured.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    /// Nodes beside the controller; 0 is one box with both roles.
    pub nodes: usize,
    /// Jobs a node runs at a time; 0 is 4.
    pub slots: usize,
    /// More lines for the configuration of the controller, or of the box.
    pub controller: String,
    /// More lines for the configuration of each node.
    pub node: String,
    /// Messages between nodes and controller go through a post office, with this seed.
    pub post: Option<(Rules, u64)>,
    /// Each node is on a host of its own.
    pub hosts: bool,
}

impl Fleet {
    /// One box that is both, running.
    pub fn one_box() -> Fleet {
        Fleet::started(&Setup::default())
    }

    /// A controller and so many nodes, running.
    pub fn of(nodes: usize) -> Fleet {
        Fleet::started(&Setup { nodes, ..Setup::default() })
    }

    /// A fleet that runs.
    pub fn started(setup: &Setup) -> Fleet {
        let mut fleet = Fleet::new(setup);
        fleet.start();
        fleet
    }

    /// A fleet that does not run yet.
    pub fn new(setup: &Setup) -> Fleet {
        let home = tempfile::Builder::new().prefix("faults-").tempdir().expect("a temporary directory");
        let slots = if setup.slots == 0 { 4 } else { setup.slots };
        let both = if setup.nodes == 0 {
            format!("slots: {slots}\nnode_name: box\n")
        } else {
            "roles: controller\n".into()
        };
        let controller =
            Daemon::new(home.path().join("c"), format!("{both}disk_reserve: 64MiB\n{}", setup.controller));
        fs::create_dir_all(controller.state()).expect("a state directory");
        let posts: Vec<Post> = setup.post.map_or_else(Vec::new, |(rules, seed)| {
            let socket = |index| home.path().join(format!("p{index}"));
            (0..setup.nodes)
                .map(|index| Post::new(&socket(index), &controller.socket(), rules, seed))
                .collect()
        });
        let link = |index| {
            let upstream = match setup.post {
                Some(_) => home.path().join(format!("p{index}")),
                None => controller.socket(),
            };
            Link::new(&home.path().join(format!("l{index}")), &upstream)
        };
        let links: Vec<Link> = (0..setup.nodes).map(link).collect();
        let node = |(index, link): (usize, &Link)| {
            let to = link.socket().display();
            let said = &setup.node;
            let config = format!(
                "roles: node\nnode_name: n{index}\ncontroller: unix:{to}\nslots: {slots}\ndisk_reserve: 64MiB\n{said}"
            );
            Daemon::new(home.path().join(format!("n{index}")), config)
        };
        let mut nodes: Vec<Daemon> = links.iter().enumerate().map(node).collect();
        let hosts = setup.hosts.then(|| Hosts::new(setup.nodes));
        for (index, node) in nodes.iter_mut().enumerate() {
            node.starter = hosts.as_ref().map(|hosts| hosts.on(index)).unwrap_or_default();
        }
        let client = Client::new(controller.socket());
        let witness = Witness::new(home.path().join("witness"));
        Fleet { home: Some(home), controller, nodes, links, posts, witness, client, hosts }
    }

    /// Starts every daemon and waits until every node is ready.
    #[track_caller]
    pub fn start(&mut self) {
        self.controller.spawn();
        self.nodes.iter_mut().for_each(Daemon::spawn);
        self.ready();
    }

    /// Starts the controller, or the box, and waits until it answers; it need not be ready for jobs.
    #[track_caller]
    pub fn serve(&mut self) {
        self.controller.spawn();
        eventually("the controller answers", SOON, || self.client.nodes().ok());
    }

    /// Kills the controller, or the box, and starts it again; it answers afterwards.
    #[track_caller]
    pub fn bounce(&mut self) {
        self.controller.kill();
        self.serve();
    }

    /// Waits until the controller answers and every node of the fleet is ready.
    #[track_caller]
    pub fn ready(&mut self) {
        let wanted = self.nodes.len().max(1);
        eventually("every node is ready", SOON, || {
            for daemon in std::iter::once(&mut self.controller).chain(&mut self.nodes) {
                let ended = daemon.ended();
                assert!(ended.is_none(), "a daemon ended with {ended:?}:\n{}", daemon.tail());
            }
            let ready = self.client.nodes().ok()?.iter().filter(|node| node.liveness == "ready").count();
            (ready >= wanted).then_some(())
        });
    }

    /// Nodes that joined a controller over TLS, all on hosts of their own: the controller is on the first host, and
    /// node `n1` on the second. It runs.
    #[track_caller]
    pub fn over_tls(setup: &Setup) -> Fleet {
        let mut fleet = Fleet::new(&Setup { nodes: setup.nodes + 1, hosts: true, ..setup.clone() });
        fleet.move_to_tls(setup);
        fleet
    }

    /// Has the controller on the first host, and on each of the others a node, which joins it; none of them ran before.
    #[track_caller]
    pub fn move_to_tls(&mut self, setup: &Setup) {
        let starter = self.hosts.as_ref().expect("there are hosts").on(0);
        let controller = format!("{}:{TLS_PORT}", address(0));
        let config =
            format!("roles: controller\ndisk_reserve: 64MiB\nlisten: {controller}\n{}", setup.controller);
        let home = self.home().to_owned();
        self.controller = Daemon::new(home.join("tls"), config).started_by(starter);
        self.client = Client::new(self.controller.socket());
        self.serve();
        let (file, hosts) = (home.join("token"), self.hosts.as_ref().expect("there are hosts"));
        fs::write(&file, self.client.token(1000)).expect("a file");
        let node = |index: usize| {
            let config = format!("node_name: n{index}\nslots: 4\ndisk_reserve: 64MiB\n{}", setup.node);
            Daemon::new(home.join(format!("t{index}")), config).started_by(hosts.on(index))
        };
        self.nodes = (1..self.nodes.len()).map(node).collect();
        for node in &self.nodes {
            let to = format!("https://{controller}");
            finish(&mut node.command_of(&["join", &to, "--token-file", file.to_str().expect("UTF-8")])).ok();
        }
        self.nodes.iter_mut().for_each(Daemon::spawn);
        self.ready();
    }

    /// Where everything of the fleet is.
    pub fn home(&self) -> &Path {
        self.home.as_ref().expect("it is there until the end").path()
    }

    /// The daemon that runs jobs: the only node there is, or the box.
    pub fn node(&mut self) -> &mut Daemon {
        self.nodes.first_mut().unwrap_or(&mut self.controller)
    }

    /// The command that runs `fix` with these wishes and the fleet's witness.
    pub fn fix(&self, wishes: &str) -> String {
        let (fix, witness) = (binaries().join("fix"), self.witness.path());
        format!("exec {} --witness {} {wishes}", fix.display(), witness.display())
    }

    /// A job that runs `fix`, to be changed before it is submitted.
    pub fn draft(&self, wishes: &str) -> JobDraft {
        JobDraft { command: self.fix(wishes), ..JobDraft::default() }
    }

    /// Submits a job that runs `fix`.
    #[track_caller]
    pub fn submit(&self, wishes: &str) -> String {
        self.client.submit(&self.draft(wishes))
    }

    /// Every daemon with what it logged last.
    fn evidence(&self) -> String {
        let daemons = std::iter::once(("controller".to_owned(), &self.controller))
            .chain(self.nodes.iter().enumerate().map(|(index, node)| (format!("n{index}"), node)));
        daemons.map(|(name, daemon)| format!("--- {name}\n{}\n", daemon.tail())).collect()
    }
}

impl Drop for Fleet {
    #[allow(clippy::print_stderr, reason = "evidence belongs to a failing test")]
    fn drop(&mut self) {
        let Some(home) = self.home.take() else { return };
        if keeps_evidence() {
            eprintln!("{}", self.evidence());
        }
        std::iter::once(&mut self.controller).chain(&mut self.nodes).for_each(Daemon::kill);
        // Jobs are made to outlive their daemon.
        end_all(|| processes_below(home.path()));
        if keeps_evidence() {
            eprintln!("--- everything is kept in {}", home.keep().display());
        }
    }
}

/// The processes that were started, or run, below a directory; never this one.
pub fn processes_below(dir: &Path) -> Vec<u32> {
    let text = dir.to_string_lossy().into_owned();
    let belongs = |pid: &u32| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let mentions = |bytes: &[u8]| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        *pid != std::process::id()
            && (fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(dir))
                || mentions(&read("cmdline"))
                || mentions(&read("environ")))
    };
    let names = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.parse().ok()).filter(belongs).collect()
}
