//! Keys of hosts, and ways to log in.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::Stdio;

use agent_tests::hosts::address;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually, finish};

use crate::attach::bed::{Bed, Special, package, place, told};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "L1",
        promise: "an unknown, changed, other or revoked key is refused, and nothing is sent",
        run: keys,
    },
    Row {
        id: "L2",
        promise: "password, questions, agent, passphrase, and what is said when none is taken",
        run: logins,
    },
    Row { id: "L3", promise: "a jump host, MaxSessions 1, a noisy shell, ~/.ssh/config", run: odd },
    Row {
        id: "L4",
        promise: "an SSH server that turns away whoever comes too often is tried again",
        run: busy,
    },
];

fn keys(tally: &mut Tally, _: &Scale) {
    let bed = Bed::plain();
    let (root, host) = (place("root", 1), address(1));
    let public = |kind: &str| {
        let line = bed.machines[0].sh(&format!("cat /etc/ssh/ssh_host_{kind}_key.pub")).ok().stdout;
        line.split(' ').take(2).collect::<Vec<_>>().join(" ")
    };
    let known = |text: &str| std::fs::write(bed.path(".ssh/known_hosts"), text).expect("a file");
    let ours = std::fs::read_to_string(bed.path("key.pub")).expect("a key");
    let ours = ours.split(' ').take(2).collect::<Vec<_>>().join(" ");
    // The package is no package, so that a host that is taken for the right one is told by another error.
    let refused = |more: &[&str], what: &str| {
        let ran = bed.attach(&root, more).code(1);
        assert!(ran.stderr.contains("SSH-102") && ran.stderr.contains(what), "{}", ran.stderr);
    };
    tally.case("unknown", || refused(&[], "is not known: SHA256:"));
    tally
        .case("another fingerprint", || refused(&["--fingerprint", "SHA256:wrong"], "is not known: SHA256:"));
    tally.case("changed", || {
        known(&format!("# mine\n{host} {ours}\n"));
        refused(&["--accept-new"], "known_hosts, line 2");
    });
    tally.case("of another kind", || {
        known(&format!("{host} ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBHwf2HMM5TRXvo2SQJjsNkiDD5KqiiNjrGVv3UUh+mMT5RHxiRtOnlqvjhQtBq0VpmpCV/PwUdhOig4vkbqAcEc=\n"));
        refused(&["--accept-new"], "shows another key");
    });
    tally.case("revoked", || {
        known(&format!("@revoked * {}\n", public("ed25519")));
        refused(&["--accept-new"], "revoked");
    });
    tally.case("nothing was sent or changed", || {
        assert_eq!(bed.machines[0].sh("ls -A /var/tmp").stdout, "");
    });
    tally.case("known by a hash, and by its fingerprint", || {
        known(&format!("{host} {}\n", public("ed25519")));
        let mut hash = bed_command("ssh-keygen");
        finish(hash.arg("-H").arg("-f").arg(bed.path(".ssh/known_hosts"))).ok();
        bed.attach(&root, &[]).ok();
        bed.detach(&root, &[]).ok();
        known("");
        let shown = bed.machines[0].sh("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").ok().stdout;
        let fingerprint = shown.split(' ').nth(1).unwrap_or_default().to_owned();
        bed.attach(&root, &["--fingerprint", &fingerprint]).ok();
    });
}

#[allow(clippy::disallowed_methods, reason = "runs what the tests need")]
fn bed_command(program: &str) -> std::process::Command {
    std::process::Command::new(program)
}

fn logins(tally: &mut Tally, _: &Scale) {
    let questions = "-o UsePAM=yes -o PasswordAuthentication=no -o KbdInteractiveAuthentication=yes";
    let bed = Bed::new(&[Special::default(), Special { sshd: questions, ..Special::default() }]);
    let password = |index: usize, words: &[&str]| {
        let more = [&["--accept-new", "--password-stdin"], words].concat();
        told(bed.attaching(&place("ada", index), &more), "secret\n")
    };
    tally.case("a password, with a warning", || {
        password(1, &[]).ok().says("warning: a password can be guessed");
        let done = bed.ready();
        assert_eq!(done, ["host1"]);
    });
    tally.case("questions", || drop(password(2, &[]).ok()));
    tally.case("a wrong password says what was tried", || {
        let ran = told(bed.attaching(&place("ada", 1), &["--password-stdin"]), "wrong\n").code(1);
        assert!(ran.stderr.contains("SSH-101") && ran.stderr.contains("tried: a password"), "{}", ran.stderr);
        assert!(!ran.stderr.contains("wrong"), "{}", ran.stderr);
    });
    tally.case("a key of the agent", || {
        let socket = bed.path("agent.sock");
        let mut agent = bed_command("ssh-agent").arg("-D").arg("-a").arg(&socket).spawn().expect("ssh-agent");
        agent_tests::eventually("the agent listens", agent_tests::SOON, || socket.exists().then_some(()));
        let mut add = bed_command("ssh-add");
        finish(add.arg(bed.path("key")).env("SSH_AUTH_SOCK", &socket)).ok();
        let mut command =
            bed.command(&["detach", &place("ada", 1), "--controller", &crate::attach::bed::controller()]);
        let ran = finish(command.env("SSH_AUTH_SOCK", &socket));
        let _ = agent.kill();
        let _ = agent.wait();
        ran.ok();
    });
    tally.case("a key that cannot be opened", || {
        bed.keygen("locked", "phrase");
        let mut command = bed.command(&["attach", &place("root", 1), "--package"]);
        command.arg(package()).arg("--key").arg(bed.path("locked"));
        finish(&mut command).code(1).says("it cannot be opened");
    });
}

fn odd(tally: &mut Tally, _: &Scale) {
    let noisy = "for home in /root /home/ada; do printf 'echo Welcome to $HOSTNAME\\necho agentd >&2\\n\
                 cat /etc/os-release\\n%s' \"$(cat $home/.bashrc 2>/dev/null)\" >$home/.bashrc; done\n\
                 echo 'Authorized use only' >/etc/issue.net\n";
    let bed = Bed::new(&[
        Special { sshd: "-o MaxSessions=1", ..Special::default() },
        Special { prepare: noisy, sshd: "-o Banner=/etc/issue.net -o MaxSessions=1", ..Special::default() },
    ]);
    tally.case("MaxSessions 1", || {
        bed.attach(&place("root", 1), &["--accept-new"]).ok();
        bed.detach(&place("root", 1), &[]).ok();
    });
    tally.case("a noisy shell, by way of another host", || {
        let gate = place("ada", 1);
        bed.attach(&place("root", 2), &["--accept-new", "--jump", &gate]).ok();
        bed.detach(&place("root", 2), &["--jump", &gate]).ok();
    });
    tally.case("a name of ~/.ssh/config", || {
        let config = format!(
            "Host box\n  HostName {}\n  User root\n  IdentityFile {}\n  ProxyJump gate\nHost gate\n  HostName {}\n  \
             User ada\n  IdentityFile {}\n",
            address(2),
            bed.path("key").display(),
            address(1),
            bed.path("key").display()
        );
        std::fs::write(bed.path(".ssh/config"), config).expect("a file");
        let mut command = bed.command(&["attach", "box", "--package"]);
        finish(command.arg(package()).args(["--controller", &crate::attach::bed::controller()])).ok();
        assert_eq!(bed.ready(), ["host2"]);
    });
}

/// Its one place for those who have not logged in is taken, for a while or longer than is waited.
fn busy(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new(&[Special { sshd: "-o MaxStartups=1:100:1", ..Special::default() }]);
    let taken = || {
        let connect = || TcpStream::connect((address(1).as_str(), 22)).expect("an SSH server");
        // It has the place from when it was greeted, which may be that of one who is just going.
        eventually("there is a place", SOON, || {
            let (mut one, mut greeting) = (bed.hosts.inside(0, connect), [0; 4]);
            one.read_exact(&mut greeting).expect("a greeting");
            (greeting == *b"SSH-").then_some(one)
        })
    };
    tally.case("longer than is waited", || {
        let _one = taken();
        let ran = bed.attach(&place("root", 1), &["--accept-new", "--timeout", "2s"]).code(1);
        for says in ["SSH-101", "drops connections from here, for", "Exceeded MaxStartups", "--timeout 5m"] {
            assert!(ran.stderr.contains(says), "{says}: {}", ran.stderr);
        }
    });
    tally.case("for a while", || {
        let one = taken();
        let mut command = bed.attaching(&place("root", 1), &["--accept-new"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut attach = command.spawn().expect("agentctl");
        let mut told = BufReader::new(attach.stderr.take().expect("a pipe"));
        let mut line = String::new();
        told.read_line(&mut line).expect("a line");
        assert!(line.contains("drops connections from here"), "{line}");
        drop(one);
        std::io::copy(&mut told, &mut std::io::sink()).expect("a pipe");
        assert!(attach.wait().expect("agentctl").success());
        assert_eq!(bed.ready(), ["host1"]);
    });
}
