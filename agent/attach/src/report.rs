//! The facts about a host, what they mean for a node there, and how it is to be installed. Pure.
//!
//! Invariant: everything that prevents a node there is found before anything is changed, and all of it at once.

use std::collections::BTreeMap;

use agent_model::node::Finding;
use agent_model::size;

/// The answers of the script on the host; a key may occur more than once.
#[derive(Debug, Default, Clone)]
pub(crate) struct Facts(BTreeMap<String, Vec<String>>);

/// The script's lines begin so, and nothing else that a shell prints.
const MARK: &str = "agentd-attach ";

impl Facts {
    pub(crate) fn parse(text: &str) -> Facts {
        let mut facts: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for line in text.lines().filter_map(|line| line.strip_prefix(MARK)) {
            let (key, value) = line.split_once(' ').unwrap_or((line, ""));
            facts.entry(key.to_owned()).or_default().push(value.trim().to_owned());
        }
        Facts(facts)
    }

    /// The last value of a key, if it is not empty.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.last().map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    pub(crate) fn all(&self, key: &str) -> &[String] {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }

    /// These and `more`, which replaces values of the same keys.
    pub(crate) fn with(mut self, more: Facts) -> Facts {
        self.0.extend(more.0);
        self
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.get(key)?.parse().ok()
    }
}

/// How the daemon runs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// For the machine, as root.
    System,
    /// For the user who logs in.
    User,
}

/// What starts the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// A unit of the machine.
    Systemd,
    /// A unit of the user.
    UserUnit,
    /// Nothing: it is a process that runs until the machine is restarted.
    Plain,
}

/// How to become root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sudo {
    /// It is root already.
    Root,
    /// No password is needed.
    Free,
    Password,
    None,
}

/// How a host reaches the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControllerWay {
    /// It connects to it.
    Direct,
    /// By a tunnel, at this port of its loopback.
    Tunnel(u16),
    /// A tunnel was asked for, and its SSH server listens at no port for us.
    NoPort,
    /// A tunnel was asked for, and it is reached through other hosts.
    Behind,
}

/// The controller as a host reaches it, which may be at a port of its loopback.
pub(crate) fn address(controller: &str, tunnel: Option<u16>) -> String {
    tunnel.map_or_else(|| controller.to_owned(), |port| format!("https://127.0.0.1:{port}"))
}

/// The requirements for a host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs<'a> {
    pub(crate) controller: &'a str,
    pub(crate) way: ControllerWay,
    /// The size of the package in bytes, as it is sent and unpacked.
    pub(crate) packed: u64,
    pub(crate) unpacked: u64,
    /// The version of the C library that its programs need.
    pub(crate) glibc: (u32, u32),
    /// The time here, in seconds since 1970.
    pub(crate) now: u64,
}

/// Left free for jobs.
const ROOM: u64 = 1 << 30;
const LITTLE_MEMORY: u64 = 1 << 30;
/// Differences between clocks in seconds: above the first a warning, above the second no machine can join.
const SKEW: (u64, u64) = (5, 3600);

/// How the node would be installed, if nothing prevents it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstallPlan {
    /// For whom.
    pub mode: Mode,
    /// By what.
    pub service: Service,
    pub(crate) sudo: Sudo,
}

/// What attach installed there already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Installed {
    pub(crate) mode: Mode,
    pub(crate) controller: String,
    pub(crate) name: String,
    /// The port of its loopback that leads to the controller, if a tunnel does.
    pub(crate) tunnel: Option<u16>,
}

pub(crate) fn sudo(facts: &Facts) -> Sudo {
    match facts.get("sudo") {
        Some("root") => Sudo::Root,
        Some("free") => Sudo::Free,
        Some("password") => Sudo::Password,
        _ => Sudo::None,
    }
}

/// For the machine if `is_root` can be had, else for the user.
pub(crate) fn plan(facts: &Facts, is_root: bool) -> InstallPlan {
    let mode = if is_root { Mode::System } else { Mode::User };
    let service = match mode {
        Mode::System if facts.has("systemd") => Service::Systemd,
        Mode::User if facts.has("user_systemd") => Service::UserUnit,
        _ => Service::Plain,
    };
    InstallPlan { mode, service, sudo: if is_root { sudo(facts) } else { Sudo::None } }
}

pub(crate) fn installed(facts: &Facts) -> Option<Installed> {
    let of = |mode, word: &str| {
        facts.has(&format!("{word}_manifest")).then(|| Installed {
            mode,
            controller: facts.get(&format!("{word}_controller")).unwrap_or_default().to_owned(),
            name: facts.get(&format!("{word}_name")).unwrap_or_default().to_owned(),
            tunnel: facts.get(&format!("{word}_tunnel")).and_then(|port| port.parse().ok()),
        })
    };
    of(Mode::System, "system").or_else(|| of(Mode::User, "user"))
}

/// All findings, good or bad.
pub(crate) fn findings(facts: &Facts, plan: InstallPlan, needs: &Needs<'_>) -> Vec<Finding> {
    let mut found = vec![os(facts), architecture(facts), glibc(facts, needs), rights(facts, plan)];
    found.extend(tools(facts));
    found.push(disk(facts, plan, needs));
    found.push(memory(facts));
    found.push(clock(facts, needs));
    found.push(controller(facts, needs));
    found.push(agent(facts, plan, needs));
    found.push(service(facts, plan));
    found.push(python(facts));
    found.push(docker(facts));
    found.extend(gpu(facts));
    found
}

fn version(text: &str) -> (u32, u32) {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn os(facts: &Facts) -> Finding {
    let id = facts.get("os_id").unwrap_or("nothing that /etc/os-release names");
    let said = facts.get("os_version").unwrap_or("");
    let name = facts.get("os_name").map_or_else(|| format!("{id} {said}"), str::to_owned);
    let least = match id {
        "ubuntu" => (20, 4),
        "debian" => (11, 0),
        _ => {
            let means = "a node is Ubuntu 20.04 or later, or Debian 11 or later: nothing else is tested";
            return Finding::bad(
                "os",
                name,
                means,
                "take a machine with one of these: `cat /etc/os-release` there says what it is",
            );
        }
    };
    // Debian testing has no version number.
    if version(said) < least && !said.is_empty() {
        let means = "it is too old: a node is Ubuntu 20.04 or later, or Debian 11 or later";
        return Finding::bad(
            "os",
            name,
            means,
            "upgrade the machine's system, there: `sudo do-release-upgrade`",
        );
    }
    Finding::good("os", name, "it is supported")
}

fn architecture(facts: &Facts) -> Finding {
    match facts.get("arch").unwrap_or("unknown") {
        "x86_64" => Finding::good("architecture", "amd64", "the programs are made for it"),
        other => Finding::bad(
            "architecture",
            other,
            "the programs are made for amd64 alone",
            "take a machine where `uname -m` says x86_64",
        ),
    }
}

fn glibc(facts: &Facts, needs: &Needs<'_>) -> Finding {
    let (major, minor) = needs.glibc;
    match facts.get("glibc") {
        Some(there) if version(there) >= needs.glibc => {
            Finding::good("glibc", there, "the programs run with it")
        }
        there => {
            let found = format!("{}, and the programs need {major}.{minor}", there.unwrap_or("none"));
            let fix = "use the package of a release, which is made for old systems: `agentctl attach --package FILE`";
            Finding::bad("glibc", found, "the programs would not start", fix)
        }
    }
}

fn rights(facts: &Facts, plan: InstallPlan) -> Finding {
    let found = match sudo(facts) {
        Sudo::Root => "root",
        Sudo::Free => "sudo without a password",
        Sudo::Password if plan.mode == Mode::System => "sudo with a password",
        Sudo::Password => "no sudo that is granted",
        Sudo::None => "no sudo",
    };
    if plan.mode == Mode::System {
        return Finding::good("rights", found, "it is installed for the machine");
    }
    let means = "it is installed for this user alone, and jobs run as him";
    if facts.get("home_writable") == Some("yes") {
        let fix =
            "for a node of the machine log in as somebody who may use sudo: `agentctl attach USER@HOST`";
        return Finding::limited("rights", found, means, fix);
    }
    let home = facts.get("home").unwrap_or("the home");
    Finding::bad(
        "rights",
        format!("{found}, and {home} is read-only"),
        "there is no place where it could be installed",
        "log in as somebody who may use sudo, or who has a home: `agentctl attach USER@HOST`",
    )
}

fn tools(facts: &Facts) -> Option<Finding> {
    let lacking = facts.all("lacks").join(", ");
    let means = "installing needs it";
    let fix = format!("it lacks {lacking}; there: `sudo apt-get install tar gzip coreutils util-linux`");
    (!lacking.is_empty()).then(|| Finding::bad("tools", format!("no {lacking}"), means, &fix))
}

fn disk(facts: &Facts, plan: InstallPlan, needs: &Needs<'_>) -> Finding {
    let free = |key| facts.number(key).unwrap_or(0) * 1024;
    let places = match plan.mode {
        Mode::System => [("/usr/local", free("system_kb")), ("/var/lib", free("state_kb"))],
        Mode::User => [("the home", free("home_kb")), ("the home", free("home_kb"))],
    };
    // While it is unpacked, the package and the unpacked files are both on the disk.
    let wanted = needs.unpacked + needs.packed;
    let short = |(place, free): (&str, u64), wanted| {
        (free < wanted)
            .then(|| format!("{} free of the {} needed in {place}", size::binary(free), size::binary(wanted)))
    };
    let stage = (facts.get("stage_writable") != Some("yes")).then(|| "/var/tmp is not writable".to_owned());
    let short = [
        stage,
        short(("/var/tmp", free("stage_kb")), needs.packed),
        short(places[0], wanted),
        short(places[1], ROOM),
    ];
    let short: Vec<String> = short.into_iter().flatten().collect();
    if short.is_empty() {
        return Finding::good("disk", format!("{} free", size::binary(places[1].1)), "there is room");
    }
    Finding::bad(
        "disk",
        short.join("; "),
        "there is no room for it",
        "make room there; `df -h /usr/local /var/lib /var/tmp ~` says where",
    )
}

fn memory(facts: &Facts) -> Finding {
    let bytes = facts.number("memory_kb").unwrap_or(0) * 1024;
    if bytes >= LITTLE_MEMORY {
        return Finding::good("memory", size::binary(bytes), "the daemon itself needs little");
    }
    Finding::limited(
        "memory",
        size::binary(bytes),
        "few jobs will find room",
        "take a machine with more; `free -h` there says what it has",
    )
}

fn clock(facts: &Facts, needs: &Needs<'_>) -> Finding {
    let apart = facts.number("now").unwrap_or(0).abs_diff(needs.now);
    let found = format!("{apart} s from this machine's");
    let fix = "there: `sudo timedatectl set-ntp true`";
    match apart {
        _ if apart <= SKEW.0 => Finding::good("clock", found, "times of logs are right"),
        _ if apart <= SKEW.1 => Finding::limited("clock", found, "times of logs are off by that", fix),
        _ => Finding::bad("clock", found, "a certificate would not be good there", fix),
    }
}

fn controller(facts: &Facts, needs: &Needs<'_>) -> Finding {
    let no_tunnel = |found: &str, fix: &str| {
        Finding::bad("controller", found, "there is no tunnel to the controller", fix)
    };
    match needs.way {
        ControllerWay::Direct => {}
        ControllerWay::Tunnel(port) => {
            let found = format!("port {port} of its loopback");
            return Finding::good("controller", found, "it reaches the controller by a tunnel");
        }
        ControllerWay::NoPort => {
            return no_tunnel(
                "its SSH server listens on no port for others",
                "there: `AllowTcpForwarding yes` in sshd_config, and no `PermitListen` against ports 17443 to 17450",
            );
        }
        ControllerWay::Behind => {
            return no_tunnel(
                "it is reached through other hosts",
                "run this on the controller's host, from which a tunnel must reach it without `--jump`",
            );
        }
    }
    match facts.get("reach") {
        Some("yes") => Finding::good("controller", needs.controller, "it can be reached from there"),
        Some(why) => Finding::bad(
            "controller",
            format!("{}: {why}", needs.controller),
            "the node could not reach it",
            "open its port for this host; name the controller as the host knows it: `--controller https://HOST:7443`; or \
                 have the controller keep an SSH connection to the host: `--tunnel`",
        ),
        None => Finding::limited(
            "controller",
            "not tried: neither bash nor python3 is there",
            "joining will tell",
            "there: `sudo apt-get install python3`",
        ),
    }
}

fn agent(facts: &Facts, plan: InstallPlan, needs: &Needs<'_>) -> Finding {
    let bad = |found: String, means: &str, fix: &str| Finding::bad("agent", found, means, fix);
    let joined = facts.get("joined").map(str::to_owned);
    if let Some(there) = installed(facts) {
        // The address of a tunnel is the same whatever controller it leads to.
        let of = match joined {
            Some(joined) if there.tunnel.is_none_or(|port| joined != address("", Some(port))) => joined,
            _ => there.controller,
        };
        if of != needs.controller {
            let fix = format!("let go of it there first: `agentctl detach`, of a user of {of}");
            return bad(format!("a node of {of}"), "it belongs to another controller", &fix);
        }
        if there.mode != plan.mode {
            return bad(
                "attached before, with other rights".to_owned(),
                "two daemons would run there",
                "detach it as the one who attached it: `agentctl detach USER@HOST`",
            );
        }
        return Finding::good("agent", "attached before", "what is missing is done");
    }
    if let Some(of) = joined {
        let fix = "let go of it there: stop agentd, then `agentd leave`";
        return bad(format!("a node of {of}, which attach did not install"), "it would be torn in two", fix);
    }
    if facts.has("packaged") {
        let fix = "there: `sudo agentd join`, with a token of `agentctl token create`, and `sudo systemctl start agentd`";
        return bad("the package agentd is installed".to_owned(), "it needs no second one", fix);
    }
    let state = match plan.mode {
        Mode::System => "system_state",
        Mode::User => "user_state",
    };
    if facts.has(state) {
        return bad(
            "a state directory that attach did not make".to_owned(),
            "a daemon keeps jobs there, or did",
            "there: move it away, as by `sudo mv /var/lib/agentd /var/lib/agentd.old` or the same in ~/.local/share; or join with the daemon that is there",
        );
    }
    Finding::good("agent", "none", "it is installed anew")
}

fn service(facts: &Facts, plan: InstallPlan) -> Finding {
    match plan.service {
        Service::Systemd => Finding::good("service", "systemd", "it starts with the machine"),
        Service::UserUnit => {
            Finding::good("service", "systemd of the user", "it starts with the machine, as its user")
        }
        Service::Plain => {
            let found = if facts.has("systemd") { "systemd, but none of this user" } else { "no systemd" };
            let means = "it runs until the machine is restarted; attach it again then";
            Finding::limited("service", found, means, "after a restart: `agentctl attach USER@HOST` again")
        }
    }
}

fn python(facts: &Facts) -> Finding {
    let fix = "there: `sudo apt-get install python3-venv`";
    match (facts.get("python"), facts.has("venv") && facts.get("venv").is_some()) {
        (Some(version), true) => Finding::good("python", version, "jobs may use it and its packages"),
        (Some(version), false) => {
            Finding::limited("python", format!("{version} without venv"), "no packages of pip", fix)
        }
        (None, _) => Finding::limited("python", "none", "jobs need conda or a container", fix),
    }
}

fn docker(facts: &Facts) -> Finding {
    if facts.has("docker") {
        return Finding::good("docker", "there", "jobs may run in containers");
    }
    let fix = "there: `sudo apt-get install docker.io`";
    Finding::limited("docker", "none", "no jobs in containers", fix)
}

fn gpu(facts: &Facts) -> Option<Finding> {
    match facts.get("gpu")? {
        "none" => {
            let fix = "there: install the driver of NVIDIA, for example `sudo apt-get install nvidia-driver-535-server`";
            Some(Finding::limited("gpu", "a card without a driver", "jobs cannot use it", fix))
        }
        version => Some(Finding::good("gpu", format!("driver {version}"), "jobs may use GPUs")),
    }
}

#[cfg(test)]
mod tests {
    use agent_model::node::Grade;

    use super::*;

    const BARE: &str = "Welcome!\nagentd-attach os_id ubuntu\nagentd-attach os_version 22.04\n\
        agentd-attach os_name Ubuntu 22.04.4 LTS\nagentd-attach arch x86_64\nagentd-attach glibc 2.35\n\
        agentd-attach sudo free\nagentd-attach home /home/ada\nagentd-attach home_writable yes\n\
        agentd-attach stage_writable yes\nagentd-attach stage_kb 9000000\nagentd-attach system_kb 9000000\n\
        agentd-attach state_kb 9000000\nagentd-attach home_kb 9000000\nagentd-attach memory_kb 8000000\n\
        agentd-attach now 1000\nagentd-attach python 3.10.12\nagentd-attach venv yes\nagentd-attach docker yes\n\
        agentd-attach systemd yes\nagentd-attach reach yes\nagentd-attach done\nbye\n";

    fn needs() -> Needs<'static> {
        Needs {
            controller: "https://c:7443",
            way: ControllerWay::Direct,
            packed: 50 << 20,
            unpacked: 150 << 20,
            glibc: (2, 31),
            now: 1001,
        }
    }

    /// The facts of a bare host, with some lines replaced.
    fn found(lines: &str, is_root: bool) -> Vec<(String, Grade, String)> {
        let facts = Facts::parse(&format!("{BARE}{lines}"));
        let found = findings(&facts, plan(&facts, is_root), &needs());
        let mute: Vec<_> = found.iter().filter(|finding| !finding.ends_in_a_command()).collect();
        assert!(mute.is_empty(), "{mute:?}");
        found.into_iter().map(|f| (f.topic, f.grade, f.found)).collect()
    }

    #[test]
    fn test_a_bare_host_is_good() {
        let all = found("", true);
        assert!(all.iter().all(|(_, grade, _)| *grade == Grade::Good), "{all:?}");
        let facts = Facts::parse(BARE);
        let wanted = InstallPlan { mode: Mode::System, service: Service::Systemd, sudo: Sudo::Free };
        assert_eq!(plan(&facts, true), wanted);
        assert_eq!(plan(&facts, false).service, Service::Plain);
    }

    #[test]
    fn test_each_thing_that_stands_against_it() {
        use Grade::{Bad, Limited};
        let rows = [
            ("os_version 18.04", true, "os", Bad),
            ("os_id alpine", true, "os", Bad),
            ("arch aarch64", true, "architecture", Bad),
            ("glibc 2.28", true, "glibc", Bad),
            ("glibc ", true, "glibc", Bad),
            ("sudo none", false, "rights", Limited),
            ("home_writable no", false, "rights", Bad),
            ("lacks flock", true, "tools", Bad),
            ("system_kb 100000", true, "disk", Bad),
            ("stage_writable no", true, "disk", Bad),
            ("home_kb 100", false, "disk", Bad),
            ("memory_kb 500000", true, "memory", Limited),
            ("now 1100", true, "clock", Limited),
            ("now 9000", true, "clock", Bad),
            ("reach Connection refused", true, "controller", Bad),
            ("packaged yes", true, "agent", Bad),
            ("system_state yes", true, "agent", Bad),
            ("joined https://c:7443", true, "agent", Bad),
            ("system_manifest yes\nagentd-attach system_controller https://d:7443", true, "agent", Bad),
            ("user_manifest yes\nagentd-attach user_controller https://c:7443", true, "agent", Bad),
            ("venv ", true, "python", Limited),
            ("python ", true, "python", Limited),
            ("reach ", true, "controller", Limited),
            ("gpu none", true, "gpu", Limited),
        ];
        for (line, is_root, topic, grade) in rows {
            let all = found(&format!("agentd-attach {line}\n"), is_root);
            let one = all.iter().find(|(found, ..)| found == topic).unwrap();
            assert_eq!(one.1, grade, "{line}: {one:?}");
        }
    }

    #[test]
    fn test_who_cannot_reach_the_controller_may_do_so_by_a_tunnel() {
        use Grade::{Bad, Good};
        let lines = "agentd-attach reach Connection refused\nagentd-attach system_manifest yes\n\
            agentd-attach system_controller https://c:7443\nagentd-attach system_tunnel 17443\n\
            agentd-attach joined https://127.0.0.1:17443\n";
        let facts = Facts::parse(&format!("{BARE}{lines}"));
        assert_eq!(installed(&facts).and_then(|there| there.tunnel), Some(17443));
        let graded = |way, controller, topic: &str| {
            let found = findings(&facts, plan(&facts, true), &Needs { way, controller, ..needs() });
            assert!(found.iter().all(Finding::ends_in_a_command), "{found:?}");
            found.into_iter().find(|finding| finding.topic == topic).map(|finding| finding.grade)
        };
        let ours = "https://c:7443";
        for (way, grade) in [
            (ControllerWay::Direct, Bad),
            (ControllerWay::Tunnel(17443), Good),
            (ControllerWay::NoPort, Bad),
            (ControllerWay::Behind, Bad),
        ] {
            assert_eq!(graded(way, ours, "controller"), Some(grade), "{way:?}");
        }
        let tunnel = ControllerWay::Tunnel(17443);
        assert_eq!(graded(tunnel, ours, "agent"), Some(Good));
        assert_eq!(graded(tunnel, "https://d:7443", "agent"), Some(Bad));
    }

    #[test]
    fn test_what_is_well_all_the_same() {
        let rows = [
            ("os_id debian\nagentd-attach os_version 12", "os"),
            ("os_id debian\nagentd-attach os_version ", "os"),
            (
                "system_manifest yes\nagentd-attach system_controller https://c:7443\nagentd-attach system_state yes",
                "agent",
            ),
        ];
        for (line, topic) in rows {
            let all = found(&format!("agentd-attach {line}\n"), true);
            assert!(
                all.iter().any(|(found, grade, _)| found == topic && *grade == Grade::Good),
                "{line}: {all:?}"
            );
        }
    }

    #[test]
    fn test_what_is_not_there_is_told_with_the_command_that_brings_it() {
        let lines: Vec<&str> =
            BARE.lines().filter(|line| !line.contains("docker") && !line.contains("systemd")).collect();
        let facts = Facts::parse(&lines.join("\n"));
        let found = findings(&facts, plan(&facts, true), &needs());
        for topic in ["docker", "service"] {
            let one = found.iter().find(|finding| finding.topic == topic).unwrap();
            assert!(one.grade == Grade::Limited && one.ends_in_a_command(), "{one:?}");
        }
    }

    #[test]
    fn test_all_findings_come_at_once() {
        let lines = "agentd-attach os_id alpine\nagentd-attach arch aarch64\nagentd-attach reach refused\n";
        let bad = found(lines, true).into_iter().filter(|(_, grade, _)| *grade == Grade::Bad).count();
        assert_eq!(bad, 3);
    }
}
