//! A machine that is reached by SSH becomes a node, and stops being one.
//!
//! ```text
//! SshWish ─▶ target ─▶ session: connect, key, login ─▶ host.sh: probe ─▶ report: findings, plan
//!                                                        └─ lock ─ part, upload ─ place ─ join ─ start │ remove
//! ```
//!
//! Owns one connection ([`SshHost`]) and the steps over it; the caller owns the connection to the controller and the
//! terminal ([`Desk`]). Everything that runs on the host is in `host.sh`.
//!
//! Invariants: nothing on the host changes before all findings are known; each step may be interrupted at any byte
//! and repeated; a secret is passed on the standard input of a command, never on a command line.

mod config;
mod known_hosts;
mod package;
mod report;
mod session;
mod target;

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::time::Duration;

use agent_model::node::{Finding, Grade};
use agent_model::{Clock, SystemClock, TunnelSpec};
use tokio::time::{Instant, sleep};

pub use config::ConfigError;
pub use known_hosts::Place;
pub use package::{Package, PackageError};
pub use report::{InstallPlan, Mode, Service};
pub use session::{CommandError, ConnectError, TunnelError, TunnelKey, TunnelKeyError, hold};
pub use target::{Person, SshWish, TargetError};

use report::{ControllerWay, Facts, Installed, Needs, Sudo};
use session::{Command, Ran, Session};
use target::Route;

const SCRIPT: &str = include_str!("host.sh");
const UNIT: &str = include_str!("../../../systemd/agentd.service");
/// Attach creates no user for the daemon there, so it runs as root.
const ROOT: &str = include_str!("../../../systemd/agentd-root.conf");
const SLICE: &str = include_str!("../../../systemd/agentjobs.slice");
const TUNNEL: &str = include_str!("tunnel.sh");

/// Every login shell understands this; `sh` reads the input that follows. Its first line shows whether sudo read the
/// password or left it to the script.
const GUARD: &str = r#"sh -c 'IFS= read -r first; [ "$first" = agentd-attach ] || exit 97; exec sh -s'"#;
/// The exit code of the guard.
const PASSWORD_LEFT: u32 = 97;

const STEP: Duration = Duration::from_secs(60);
/// For unpacking on a slow disk, and for stopping a daemon that has much to write.
const LONG_STEP: Duration = Duration::from_secs(300);
/// For the whole upload, also over a slow line.
const UPLOAD: Duration = Duration::from_secs(3600);
/// The ports of a host's loopback that may lead to the controller: none that the kernel gives to connections.
const TUNNEL_PORTS: RangeInclusive<u16> = 17443..=17450;
/// How long to wait for another attach of the host.
const OTHERS: Duration = Duration::from_secs(60);

/// The user who attaches, with or without a terminal.
pub trait Desk {
    /// Asks for a secret; `None` if nobody answers.
    fn secret(&self, question: &str) -> Option<String>;
    /// Whether to accept the key of an unknown host.
    fn trusts(&self, key: &HostKey<'_>) -> bool;
    /// Reports what is waited for.
    fn waits(&self, what: &str);
    /// Reports how many bytes of the package were sent, of how many.
    fn sent(&self, bytes: u64, of: u64);
}

/// The key of an unknown host.
#[derive(Debug)]
pub struct HostKey<'a> {
    /// The host that shows it.
    pub host: &'a str,
    /// Its fingerprint.
    pub fingerprint: &'a str,
}

/// Why a host could not be attached or detached.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AttachError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Connect(Box<ConnectError>),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("{doing}: the host answers nothing that can be understood")]
    Odd { doing: &'static str, said: String },
    #[error("{doing}: {why}")]
    Step { doing: &'static str, why: String },
    #[error("what attach installed there is root's, and this login has no way to become root")]
    NotRoot,
    #[error("sudo wants a password there, and there is no terminal to ask for it")]
    NobodyToAsk,
    #[error("another attach or detach of this host is at work, from {0}")]
    Held(String),
    #[error("the package cannot be read")]
    Package(#[source] std::io::Error),
}

impl From<ConnectError> for AttachError {
    fn from(error: ConnectError) -> AttachError {
        AttachError::Connect(Box::new(error))
    }
}

/// A host that is logged in to.
pub struct SshHost {
    session: Session,
    /// The id of this attach.
    id: String,
    /// Its name in messages.
    pub shown_as: String,
    password: Option<String>,
    facts: Facts,
    /// When it said what its clock shows, in seconds.
    probed: u64,
    plan: Option<InstallPlan>,
    /// How the host reaches the controller.
    way: ControllerWay,
    /// What a tunnel to the host is, but for its port there.
    tunnel: TunnelSpec,
    /// It is reached through other hosts.
    is_behind: bool,
    /// It is to be installed for the user alone.
    no_sudo: bool,
}

/// A node that attach installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Its controller.
    pub controller: String,
    /// The node's name there.
    pub name: String,
    /// The port of the node's loopback at which it reaches the controller, if it does so by a tunnel.
    pub tunnel: Option<u16>,
}

impl Membership {
    /// The controller as the node reaches it.
    fn address(&self) -> String {
        report::address(&self.controller, self.tunnel)
    }
}

/// The variables of one step, besides those of every step.
type Variables<'a> = Vec<(&'a str, &'a str)>;

impl SshHost {
    /// Connects, logs in and probes the host without changing anything. `id` is unique to this attach.
    pub async fn open(
        wish: &SshWish,
        person: &Person,
        id: &str,
        controller: Option<(&str, u16)>,
        desk: &dyn Desk,
    ) -> Result<SshHost, AttachError> {
        let target = Route::new(wish, person)?;
        let session = Session::open(&target, desk).await?;
        let hop = target.host();
        let tunnel = TunnelSpec {
            host: hop.host.clone(),
            port: hop.port,
            user: hop.user.clone(),
            host_key: session.host_key.clone(),
            listens: 0,
        };
        let mut host = SshHost {
            session,
            id: id.to_owned(),
            shown_as: target.host().to_string(),
            password: target.password.clone(),
            facts: Facts::default(),
            probed: 0,
            plan: None,
            way: ControllerWay::Direct,
            tunnel,
            is_behind: target.hops.len() > 1,
            no_sudo: wish.no_sudo,
        };
        let port = controller.map(|(_, port)| port.to_string()).unwrap_or_default();
        let name = controller.map_or("", |(name, _)| name);
        let variables = vec![("CONTROLLER_HOST", name), ("CONTROLLER_PORT", &port)];
        host.facts = host.step("probe", "looking around", &variables, STEP).await?;
        host.probed = SystemClock.now().0 / 1000;
        host.plan = Some(host.ask_for_root(&target, desk).await?);
        Ok(host)
    }

    /// Finds out whether root is available, and the facts that only root can read.
    async fn ask_for_root(&mut self, target: &Route, desk: &dyn Desk) -> Result<InstallPlan, AttachError> {
        let for_user = report::installed(&self.facts).is_some_and(|there| there.mode == Mode::User);
        let sudo = match self.no_sudo {
            true => Sudo::None,
            false => report::sudo(&self.facts),
        };
        let mut plan = report::plan(&self.facts, sudo != Sudo::None);
        let given = self.password.is_some();
        for _ in 0..3 {
            if sudo == Sudo::Password && self.password.is_none() {
                let question = format!(
                    "Password of {} for sudo on {} (empty: install it for this user alone): ",
                    target.host().user,
                    target.host()
                );
                let typed = desk.secret(&question);
                if typed.is_none() && !for_user {
                    return Err(AttachError::NobodyToAsk);
                }
                self.password = typed.filter(|password| !password.is_empty());
                if self.password.is_none() {
                    plan = report::plan(&self.facts, false);
                }
            }
            self.plan = Some(plan);
            if self.facts.has("looked") {
                return Ok(plan);
            }
            match self.step("look", "looking around as root", &Vec::new(), STEP).await {
                Ok(seen) => {
                    self.facts = self.facts.clone().with(seen);
                    return Ok(plan);
                }
                Err(AttachError::Odd { .. }) if plan.mode == Mode::System => {
                    desk.waits("sudo does not take the password");
                    self.password = None;
                    if given {
                        break;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let plan = report::plan(&self.facts, false);
        self.plan = Some(plan);
        let seen = self.step("look", "looking around", &Vec::new(), STEP).await?;
        self.facts = self.facts.clone().with(seen);
        Ok(plan)
    }

    /// How it would be installed.
    pub fn plan(&self) -> Option<InstallPlan> {
        self.plan
    }

    /// What the host calls itself.
    pub fn own_name(&self) -> &str {
        self.facts.get("host").unwrap_or_default()
    }

    /// The node that attach installed there before.
    pub fn node(&self) -> Option<Membership> {
        report::installed(&self.facts).map(|Installed { controller, name, tunnel, .. }| Membership {
            controller,
            name,
            tunnel,
        })
    }

    /// Goes on with the rights with which it was installed there, which need not be those that this login would take.
    pub fn act_as_installed(&mut self) -> Result<(), AttachError> {
        match (report::installed(&self.facts).map(|there| there.mode), self.plan.map(|plan| plan.mode)) {
            (Some(Mode::User), _) => self.plan = Some(report::plan(&self.facts, false)),
            (Some(Mode::System), Some(Mode::User)) => return Err(AttachError::NotRoot),
            _ => {}
        }
        Ok(())
    }

    /// Has the host reach the controller by a tunnel: at the port it had before, or at one that is free.
    pub async fn use_tunnel(&mut self) {
        self.way = match self.node().and_then(|node| node.tunnel) {
            Some(port) => ControllerWay::Tunnel(port),
            None if self.is_behind => ControllerWay::Behind,
            None => match self.session.free_port(TUNNEL_PORTS).await {
                Some(port) => ControllerWay::Tunnel(port),
                None => ControllerWay::NoPort,
            },
        };
    }

    /// The tunnel that the controller must keep, if the host is to reach it by one.
    pub fn tunnel(&self) -> Option<TunnelSpec> {
        match self.way {
            ControllerWay::Tunnel(listens) => Some(TunnelSpec { listens, ..self.tunnel.clone() }),
            _ => None,
        }
    }

    /// All findings about the host; it can be a node if none of them is bad.
    pub fn findings(&self, controller: &str, package: &Package) -> Vec<Finding> {
        let needs = Needs {
            controller,
            way: self.way,
            packed: package.packed,
            unpacked: package.unpacked,
            glibc: package.glibc,
            now: self.probed,
        };
        self.plan.map(|plan| report::findings(&self.facts, plan, &needs)).unwrap_or_default()
    }

    /// Locks the host for this attach; waits for another one that holds the lock.
    pub async fn lock(&self, desk: &dyn Desk) -> Result<(), AttachError> {
        let end = Instant::now() + OTHERS;
        let session = self.facts.get("session").unwrap_or("0 0").to_owned();
        loop {
            let answer = self.step("lock", "taking the host", &vec![("SESSION", &session)], STEP).await?;
            let Some(by) = answer.get("held") else { return Ok(()) };
            if Instant::now() >= end {
                return Err(AttachError::Held(by.to_owned()));
            }
            desk.waits(&format!("another attach or detach is at work, from {by}"));
            sleep(Duration::from_secs(1)).await;
        }
    }

    /// Unlocks the host. The end of the connection unlocks it too.
    pub async fn unlock(self) {
        let _ = self.step("unlock", "letting go of the host", &Vec::new(), STEP).await;
        self.session.close().await;
    }

    /// Sends what the host lacks of a package, installs it and lets it join. If a step fails on a host that was not a
    /// node before, the installation is removed again. A node that the controller sees now needs no token. `key` is the
    /// controller's, for a tunnel; it is accepted there before a token is asked for. What waits for nothing from here is
    /// one step.
    pub async fn install(
        &self,
        package: &Package,
        node: &Membership,
        is_seen: bool,
        key: &str,
        token: impl AsyncFnOnce() -> Result<String, String>,
        desk: &dyn Desk,
    ) -> Result<(), AttachError> {
        let is_new = self.node().is_none();
        let installing = async {
            self.upload(package, desk).await?;
            let service = self.service();
            let address = node.address();
            let listens = node.tunnel.map(|port| port.to_string()).unwrap_or_default();
            let about: Variables<'_> = vec![
                ("HASH", &package.hash),
                ("NAME", &node.name),
                ("CONTROLLER", &node.controller),
                ("ADDRESS", &address),
                ("LISTENS", &listens),
                ("SERVICE", service),
            ];
            // Each step takes a round trip, and a shell there that reads the user's files, which may take longer.
            let mut verbs = "place join start";
            if node.tunnel.is_some() {
                self.step("place", "installing", &about, LONG_STEP).await?;
                let keys = vec![("LISTENS", listens.as_str()), ("KEY", key)];
                // The tunnel logs in as the one who logged in now.
                self.step_of("authorize", "letting the controller in", &keys, STEP, Sudo::Root).await?;
                verbs = "join start";
            }
            let no_token = |why| AttachError::Step { doing: "asking the controller for a token", why };
            let token = if is_seen { String::new() } else { token().await.map_err(no_token)? };
            let mut joining = about.clone();
            joining.push(("TOKEN", &token));
            joining.push(("SEEN", if is_seen { "yes" } else { "no" }));
            self.step(verbs, "installing, joining and starting the daemon", &joining, LONG_STEP).await
        };
        match installing.await {
            Err(error @ AttachError::Step { .. }) if is_new => {
                self.take_away("taking it away again").await.and(Err(error))
            }
            done => done.map(drop),
        }
    }

    async fn upload(&self, package: &Package, desk: &dyn Desk) -> Result<(), AttachError> {
        let about = vec![("HASH", package.hash.as_str())];
        let there =
            self.step_of("part", "looking for what was sent before", &about, STEP, Sudo::Root).await?;
        let mut words = there.get("part").unwrap_or("0 -").split(' ');
        let length: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        let hash = words.next().unwrap_or("-");
        let mut start = length;
        let is_ours =
            length <= package.packed && package.hash_of_first(length).map_err(AttachError::Package)? == hash;
        if length > 0 && !is_ours {
            self.step_of("drop_part", "dropping what is damaged", &about, STEP, Sudo::Root).await?;
            start = 0;
        }
        if start == package.packed {
            return Ok(());
        }
        let file = package.from(start).map_err(AttachError::Package)?;
        let line = format!("exec sh -c 'cat >>/var/tmp/agentd-attach-{}/{}.part'", self.uid(), package.hash);
        let told = |sent: u64| desk.sent(start + sent, package.packed);
        let command = Command {
            line: &line,
            input: &[],
            file: Some((tokio::fs::File::from_std(file), &told)),
            doing: "sending the package",
            limit: UPLOAD,
        };
        let ran = self.session.run(command).await?;
        if ran.code == Some(0) {
            return Ok(());
        }
        let why = ran.err.lines().last().unwrap_or("it ended early").to_owned();
        // Half a package must not stay on a full disk.
        let _ = self.step_of("drop_part", "dropping what was sent", &about, STEP, Sudo::Root).await;
        Err(AttachError::Step { doing: "sending the package", why })
    }

    /// The last messages of the daemon there, to explain why it does not appear at the controller.
    pub async fn trouble(&self) -> Result<String, AttachError> {
        let said = self
            .step(
                "trouble",
                "reading the daemon's log",
                &vec![("SERVICE", self.service()), ("HASH", "-")],
                STEP,
            )
            .await?;
        Ok(said.all("log").join(" | "))
    }

    /// Removes all that attach installed. Returns what was kept because something else uses it.
    pub async fn remove(&self) -> Result<Vec<String>, AttachError> {
        let doing = "taking it away";
        let facts = self.take_away(doing).await?;
        if facts.has("absent") {
            let why = "there is no record of what was installed with these rights".to_owned();
            return Err(AttachError::Step { doing, why });
        }
        Ok(facts.all("kept").to_vec())
    }

    async fn take_away(&self, doing: &'static str) -> Result<Facts, AttachError> {
        // Whether it has a tunnel is not asked: an attach that was cut may have left the key there.
        self.step_of("unauthorize", doing, &Vec::new(), STEP, Sudo::Root).await?;
        self.step("remove", doing, &Vec::new(), LONG_STEP).await
    }

    fn service(&self) -> &'static str {
        match self.plan.map(|plan| plan.service) {
            Some(Service::Systemd) => "systemd",
            Some(Service::UserUnit) => "user",
            _ => "plain",
        }
    }

    fn uid(&self) -> u32 {
        self.facts.get("uid").and_then(|uid| uid.parse().ok()).unwrap_or(0)
    }

    /// Runs functions of `host.sh` with the rights of the plan.
    async fn step(
        &self,
        verb: &'static str,
        doing: &'static str,
        variables: &Variables<'_>,
        limit: Duration,
    ) -> Result<Facts, AttachError> {
        let sudo = self.plan.map_or(Sudo::Root, |plan| plan.sudo);
        self.step_of(verb, doing, variables, limit, sudo).await
    }

    /// The same, with the rights of `sudo`.
    async fn step_of(
        &self,
        verb: &'static str,
        doing: &'static str,
        variables: &Variables<'_>,
        limit: Duration,
        sudo: Sudo,
    ) -> Result<Facts, AttachError> {
        let mut line = String::from("exec ");
        let mut input = String::new();
        match sudo {
            Sudo::Root | Sudo::None => {}
            Sudo::Free => line.push_str("sudo -k -n -- "),
            Sudo::Password => {
                line.push_str("sudo -k -S -p \"\" -- ");
                input.push_str(self.password.as_deref().unwrap_or_default());
                input.push('\n');
            }
        }
        line.push_str(GUARD);
        input.push_str("agentd-attach\n");
        input.push_str(&self.script(verb, variables));
        let command = Command { line: &line, input: input.as_bytes(), file: None, doing, limit };
        understand(self.session.run(command).await?, doing)
    }

    fn script(&self, verb: &str, variables: &Variables<'_>) -> String {
        let mode = match self.plan.map(|plan| plan.mode) {
            Some(Mode::System) => "system",
            _ => "user",
        };
        // After sudo `$(id -u)` is another user's, but the package belongs to the user who logged in.
        let stage = match self.facts.get("uid") {
            Some(uid) => quoted(&format!("/var/tmp/agentd-attach-{uid}")),
            None => "/var/tmp/agentd-attach-$(id -u)".to_owned(),
        };
        let mut text = format!("STAGE={stage}\n");
        for (name, value) in [("VERB", verb), ("MODE", mode), ("ID", &self.id)].iter().chain(variables) {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name}={}", quoted(value));
        }
        if verb.starts_with("place") {
            let _ = write!(text, "unit() {{\ncat <<'END-OF-UNIT'\n{UNIT}{ROOT}END-OF-UNIT\n}}\n");
            let _ = write!(text, "slice() {{\ncat <<'END-OF-UNIT'\n{SLICE}END-OF-UNIT\n}}\n");
            let _ = write!(text, "tunnel() {{\ncat <<'END-OF-UNIT'\n{TUNNEL}END-OF-UNIT\n}}\n");
        }
        text.push_str(SCRIPT);
        text
    }
}

/// What the script on a host says, for tests that say it otherwise.
#[cfg(feature = "fuzz")]
pub mod fuzz {
    use crate::report::{self, ControllerWay, Facts, Needs};

    /// Understands a report, and judges the host by it; whether the script came to its end.
    pub fn report(text: &str) -> bool {
        let facts = Facts::parse(text);
        let (controller, way) = ("https://x:1", ControllerWay::Direct);
        let needs = Needs { controller, way, packed: 1, unpacked: 1, glibc: (2, 31), now: 1_700_000_000 };
        for is_root in [true, false] {
            let _ = report::findings(&facts, report::plan(&facts, is_root), &needs);
        }
        let _ = report::installed(&facts);
        facts.has("done")
    }
}

/// Whether any of the findings is bad, so that the host cannot be a node.
pub fn is_unfit(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.grade == Grade::Bad)
}

/// A text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn understand(ran: Ran, doing: &'static str) -> Result<Facts, AttachError> {
    let facts = Facts::parse(&ran.out);
    if let Some(why) = facts.get("failed") {
        return Err(AttachError::Step { doing, why: why.to_owned() });
    }
    if ran.code == Some(0)
        && (facts.has("done") || facts.has("part") || facts.has("locked") || facts.has("held"))
    {
        return Ok(facts);
    }
    // The line that sudo left to the script is a password, so nothing of this output is shown.
    let said = if ran.code == Some(PASSWORD_LEFT) { "" } else { ran.err.trim() };
    let said = match (said.lines().last(), ran.code) {
        (Some(line), _) => line.to_owned(),
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => "it was killed".to_owned(),
    };
    Err(AttachError::Odd { doing, said })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(code: Option<u32>, out: &str, err: &str) -> Result<Facts, String> {
        let ran = Ran { code, out: out.to_owned(), err: err.to_owned() };
        understand(ran, "trying").map_err(|error| match error {
            AttachError::Odd { said, .. } => format!("odd: {said}"),
            other => other.to_string(),
        })
    }

    #[test]
    fn test_answers_among_noise() {
        let noisy = "fortune: be glad\nagentd-attach uid 7\n  agentd-attach no answer\nagentd-attach done\n";
        assert_eq!(ran(Some(0), noisy, "").unwrap().get("uid"), Some("7"));
        assert_eq!(ran(Some(3), "agentd-attach failed no room\n", "").unwrap_err(), "trying: no room");
        assert_eq!(ran(Some(0), "agentd-attach uid 7\n", "").unwrap_err(), "odd: exit code 0");
        assert_eq!(ran(Some(1), "", "a\nsudo: wrong\n").unwrap_err(), "odd: sudo: wrong");
        assert_eq!(ran(Some(PASSWORD_LEFT), "", "hunter2").unwrap_err(), "odd: exit code 97");
    }

    #[test]
    fn test_words_of_a_shell() {
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }

    #[test]
    fn test_units_end_in_a_line_of_their_own() {
        assert!([UNIT, ROOT, SLICE, TUNNEL].iter().all(|text| text.ends_with('\n')));
        assert!(UNIT.contains("ExecStart=/usr/bin/agentd run"));
    }
}
