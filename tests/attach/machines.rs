//! Machines of all kinds: with what rights one is a node, and what stands against it.

use agent_tests::table::{Row, Scale, Tally};

use crate::attach::bed::{Bed, Special, place, told};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "M1",
        promise: "without sudo a user's own, with sudo the machine's, with or without its password",
        run: rights,
    },
    Row {
        id: "M2",
        promise: "all that stands against it is told at once, and nothing is changed",
        run: unfit,
    },
    Row {
        id: "M3",
        promise: "a disk that runs full and programs that do not run leave nothing",
        run: failing,
    },
];

fn rights(tally: &mut Tally, _: &Scale) {
    let free = "echo 'ada ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ada\n";
    let asked = "echo 'ada ALL=(ALL) ALL' >/etc/sudoers.d/ada\n";
    let none = "rm -f /usr/bin/sudo\n";
    let special = |prepare| Special { prepare, ..Special::default() };
    let bed = Bed::new(&[special(free), special(asked), special(none)]);
    let whose = |index: usize| {
        bed.machines[index - 1].sh("stat -c %U /proc/[0-9]*/exe -L 2>/dev/null; ps -eo user:20,comm | awk '$2 == \"agentd\" { print $1 }'")
    };
    let cases =
        [(1, "sudo without a password", "root"), (2, "sudo with a password", "root"), (3, "no sudo", "ada")];
    for (index, name, user) in cases {
        tally.case(name, || {
            let ada = place("ada", index);
            let before = bed.machines[index - 1].written();
            let mut words = vec!["--accept-new"];
            if index == 2 {
                words.push("--password-stdin");
            }
            told(bed.attaching(&ada, &words), "secret\n").ok();
            assert!(whose(index).stdout.lines().last() == Some(user), "{}", whose(index).stdout);
            assert!(bed.ready().contains(&format!("host{index}")));
            let mut detach =
                bed.command(&["detach", &ada, "--controller", &crate::attach::bed::controller()]);
            match index {
                2 => drop(detach.arg("--password-stdin")),
                _ => drop(detach.arg("--key").arg(bed.path("key"))),
            }
            told(detach, "secret\n").ok();
            assert_eq!(bed.machines[index - 1].written(), before);
        });
    }
    tally.case("it is taken away with the rights with which it was installed, or that is said", || {
        let ada = place("ada", 2);
        let (before, controller) = (bed.machines[1].written(), crate::attach::bed::controller());
        let key = bed.path("key");
        let detach = |words: &[&str]| {
            let mut command = bed.command(&["detach", &ada, "--controller", &controller]);
            command.args(words).arg("--key").arg(&key);
            told(command, "secret\n")
        };
        // Nobody can be asked for the password of sudo; only by word is it the user's own.
        let ran = told(bed.attaching(&ada, &["--accept-new"]), "").code(1);
        ran.says("there is no terminal to ask for it").says("--no-sudo");
        assert_eq!(bed.machines[1].written(), before);
        told(bed.attaching(&ada, &["--accept-new", "--no-sudo"]), "").ok();
        assert_eq!(whose(2).stdout.lines().last(), Some("ada"));
        detach(&["--password-stdin"]).ok();
        assert_eq!(bed.machines[1].written(), before);
        assert_ne!(whose(2).stdout.lines().last(), Some("ada"));
        told(bed.attaching(&ada, &["--accept-new", "--password-stdin"]), "secret\n").ok();
        detach(&[]).code(1).says("root's");
        assert!(bed.ready().contains(&"host2".to_owned()), "it was not removed from the controller");
        detach(&["--password-stdin"]).ok();
        assert_eq!(bed.machines[1].written(), before);
    });
    tally.case("the password is in no log of sudo or of the shell", || {
        let found =
            bed.machines[1].sh("grep -rl secret /var/log/auth.log /home/ada 2>/dev/null; true").stdout;
        assert_eq!(found, "");
    });
}

fn unfit(tally: &mut Tally, _: &Scale) {
    let alpine = "printf 'ID=alpine\\nVERSION_ID=3.19\\nPRETTY_NAME=\"Alpine Linux v3.19\"\\n' >/tmp/os\n\
                  rm -f /etc/os-release; cp /tmp/os /etc/os-release\n\
                  printf '#!/bin/sh\\necho aarch64\\n' >/usr/local/bin/uname; chmod +x /usr/local/bin/uname\n";
    let aged =
        "printf '#!/bin/sh\\necho glibc 2.27\\n' >/usr/local/bin/getconf; chmod +x /usr/local/bin/getconf\n";
    let shut = "rm -f /usr/bin/sudo; mount -t tmpfs tmpfs /home/ada; mkdir -p /home/ada/.ssh\n\
                echo \"$KEY\" >/home/ada/.ssh/authorized_keys; mount -o remount,ro /home/ada\n";
    let bed = Bed::new(&[
        Special { prepare: alpine, ..Special::default() },
        Special { size: Some("60m"), ..Special::default() },
        Special { prepare: aged, ..Special::default() },
        Special { prepare: shut, ..Special::default() },
    ]);
    let refused_of = |user: &str, index: usize, more: &[&str], found: &[&str]| {
        let before = bed.machines[index - 1].written();
        let ran = bed.attach(&place(user, index), more).code(1);
        assert!(ran.stderr.contains("SSH-103"), "{}", ran.stderr);
        for what in found {
            assert!(ran.stderr.contains(what), "no `{what}` in: {}", ran.stderr);
        }
        assert_eq!(bed.machines[index - 1].written(), before);
        assert_eq!(bed.machines[index - 1].sh("ls -A /var/tmp").stdout, "");
    };
    let refused = |index, more: &[&str], found: &[&str]| refused_of("root", index, more, found);
    tally.case("another system, another processor, no controller", || {
        let words = ["--accept-new", "--controller", "https://10.77.0.2:7"];
        let found = ["Alpine Linux v3.19", "aarch64", "Connection refused"];
        refused(1, &words, &found);
    });
    tally.case("no room", || refused(2, &["--accept-new"], &["there is no room for it"]));
    tally.case("an old C library", || refused(3, &["--accept-new"], &["2.27, and the programs need 2."]));
    tally.case("no sudo, and a home that is read-only", || {
        refused_of("ada", 4, &["--accept-new"], &["no sudo, and /home/ada is read-only"]);
    });
}

fn failing(tally: &mut Tally, _: &Scale) {
    let small = "mount -t tmpfs -o size=2m tmpfs /var/tmp && chmod 1777 /var/tmp\n\
                 printf '#!/bin/sh\\nexec /bin/df \"$@\" | sed s/2048/9999999/g\\n' >/usr/local/bin/df\n\
                 printf '#!/bin/sh\\necho Filesystem 1 2 Available; echo x x x 99999999\\n' >/usr/local/bin/df\n\
                 chmod +x /usr/local/bin/df\n";
    let broken = "printf '#!/bin/sh\\nexit 1\\n' >/usr/local/bin/tar; chmod +x /usr/local/bin/tar\n";
    let bed = Bed::new(&[
        Special { prepare: small, ..Special::default() },
        Special { prepare: broken, ..Special::default() },
    ]);
    for (index, what) in [(1, "No space left on device"), (2, "the package cannot be unpacked")] {
        tally.case(what, || {
            let before = bed.machines[index - 1].written();
            let ran = bed.attach(&place("root", index), &["--accept-new"]).code(1);
            assert!(ran.stderr.contains("SSH-104") && ran.stderr.contains(what), "{}", ran.stderr);
            assert_eq!(bed.machines[index - 1].written(), before);
            assert!(!bed.machines[index - 1].sh("ls -A /var/lib").stdout.contains("agentd"));
        });
    }
}
