//! Hosts for the nodes of a fleet: network and host name of their own, with a wire that can be pulled.
//!
//! Each is a pair of namespaces, joined to the others by a bridge in a namespace of its own, where no rules of this
//! machine's firewall hold; files and processes are shared. Each host has a bridge of a container engine with the address that all such bridges have, as machines do. Needs root.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Some hosts on one network.
#[derive(Debug)]
pub struct Hosts {
    /// The namespace of the bridge.
    switch: String,
    names: Vec<String>,
}

impl Hosts {
    /// So many hosts: the first is at 10.77.0.2.
    pub fn new(count: usize) -> Hosts {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("a{}x{}", std::process::id() % 100_000, NEXT.fetch_add(1, Ordering::Relaxed));
        let hosts = Hosts {
            switch: format!("{name}s"),
            names: (0..count).map(|index| format!("{name}h{index}")).collect(),
        };
        let switch = &hosts.switch;
        ip(&format!("netns add {switch}"));
        ip(&format!("-n {switch} link add bridge type bridge"));
        ip(&format!("-n {switch} link set bridge up"));
        for (index, host) in hosts.names.iter().enumerate() {
            ip(&format!("netns add {host}"));
            ip(&format!("-n {switch} link add {host}v type veth peer name eth0 netns {host}"));
            ip(&format!("-n {switch} link set {host}v master bridge up"));
            ip(&format!("-n {host} link set lo up"));
            ip(&format!("-n {host} addr add {}/24 dev eth0", address(index)));
            ip(&format!("-n {host} link set eth0 up"));
            ip(&format!("-n {host} link add docker0 type bridge"));
            ip(&format!("-n {host} addr add 172.17.0.1/16 dev docker0"));
            ip(&format!("-n {host} link set docker0 up"));
        }
        hosts
    }

    /// The words that start a program on a host.
    pub fn on(&self, index: usize) -> Vec<String> {
        const ENTER: &str = "hostname \"$1\" && shift && exec \"$@\"";
        let mut words = self.on_network_of(index);
        words.extend(
            ["unshare", "--uts", "sh", "-c", ENTER, "sh", &format!("host{index}")].map(str::to_owned),
        );
        words
    }

    /// The words that start a program which has the network of a host and nothing else of it.
    pub fn on_network_of(&self, index: usize) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--net=/run/netns/{}", self.names[index])]
    }

    /// Gives a host a second network, where it is alone although its address is that of every such host, and by which
    /// it reaches everybody else. Its interface comes first of all by name.
    pub fn add_dead_end(&self, index: usize) {
        let host = &self.names[index];
        ip(&format!("-n {host} link add aside type bridge"));
        ip(&format!("-n {host} addr add 192.168.77.1/24 dev aside"));
        ip(&format!("-n {host} link set aside up"));
        ip(&format!("-n {host} route add default dev aside"));
    }

    /// Limits what leaves a host to so many megabits a second.
    pub fn slow_down(&self, index: usize, megabits: u32) {
        // A bucket that is refilled some hundred times a second.
        let burst = u64::from(megabits) * 1_000_000 / 8 / 100;
        tc(&format!(
            "-n {} qdisc replace dev eth0 root tbf rate {megabits}mbit burst {} latency 50ms",
            self.names[index],
            burst.max(16_000)
        ));
    }

    /// Refuses connections between two hosts, as a firewall does that drops packets.
    pub fn part(&self, index: usize, from: usize) {
        ip(&format!("-n {} route add blackhole {}/32", self.names[index], address(from)));
    }

    /// Lets nothing out of a host to a port of others, as a firewall that allows connections in alone.
    pub fn keep_in(&self, index: usize, port: u16) {
        ip(&format!("-n {} rule add pref 10 ipproto tcp dport {port} prohibit", self.names[index]));
    }

    /// How many bytes a host sent so far.
    pub fn sent(&self, index: usize) -> u64 {
        let inside = || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        let text = self.inside(index, inside);
        let line = text.lines().find_map(|line| line.trim().strip_prefix("eth0:"));
        let sent = line.and_then(|line| line.split_whitespace().nth(8)?.parse().ok());
        sent.expect("an interface counts what it sends")
    }

    /// Does something in the network of a host: sockets that are made there stay there.
    pub fn inside<T: Send>(&self, index: usize, work: impl FnOnce() -> T + Send) -> T {
        let space = std::fs::File::open(format!("/run/netns/{}", self.names[index])).expect("a host");
        std::thread::scope(|scope| {
            let entered = scope.spawn(move || {
                use std::os::fd::AsFd;

                use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
                move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).expect("root");
                work()
            });
            entered.join().expect("it does not panic")
        })
    }

    /// Pulls the wire of a host, or puts it back.
    pub fn plug(&self, index: usize, is_in: bool) {
        let state = if is_in { "up" } else { "down" };
        ip(&format!("-n {} link set {}v {state}", self.switch, self.names[index]));
    }
}

/// The address of a host.
pub fn address(index: usize) -> String {
    format!("10.77.0.{}", index + 2)
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            try_ip(&format!("netns del {name}"));
        }
        try_ip(&format!("netns del {}", self.switch));
    }
}

#[track_caller]
fn ip(words: &str) {
    assert!(try_ip(words), "`ip {words}` failed: hosts need root and iproute2");
}

#[track_caller]
fn tc(words: &str) {
    assert!(succeeds("tc", words), "`tc {words}` failed: hosts need root and iproute2");
}

fn try_ip(words: &str) -> bool {
    succeeds("ip", words)
}

#[allow(clippy::disallowed_methods, reason = "makes what the tests need")]
fn succeeds(program: &str, words: &str) -> bool {
    let mut command = Command::new(program);
    command.args(words.split(' ')).stdin(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
