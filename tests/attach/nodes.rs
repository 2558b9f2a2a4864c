//! What attach is for: a node that runs jobs, and nothing of it after detach.

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::bed::{Bed, PORT, Special, controller, package, place, told};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "N1",
        promise: "a machine becomes a node, runs a job, and is afterwards as before",
        run: whole,
    },
    Row { id: "N2", promise: "two at once: one waits, both end well", run: twice },
    Row { id: "N3", promise: "a machine of another controller is refused", run: others },
    Row { id: "N4", promise: "the machines of a file are attached at once, each with its result", run: file },
];

fn whole(tally: &mut Tally, _: &Scale) {
    let bed = Bed::plain();
    let machine = &bed.machines[0];
    let before = machine.written();
    let root = place("root", 1);
    let started = std::time::Instant::now();
    tally.case("attach", || {
        let ran = bed.attach(&root, &["--accept-new", "--label", "rack=7"]).ok();
        assert!(ran.stderr.contains("host1 is a node; it was seen"), "{}", ran.stderr);
        assert_eq!(bed.ready(), ["host1"]);
    });
    tally.notes.push(format!("attach {:.1} s", started.elapsed().as_secs_f64()));
    tally.case("a token is nowhere on the machine", || {
        let found =
            machine.sh("grep -rlI agentd-join /var /usr/local /root /etc /run /tmp 2>/dev/null; true").stdout;
        assert_eq!(found, "");
        assert!(
            bed.ctl(&["token", "list"]).ok().stdout.lines().skip(1).all(|line| line.contains("used up")),
            "a token is left"
        );
    });
    tally.case("a job runs there", || {
        let code = bed.ctl(&["user", "add", "ada"]).ok().stdout;
        let login = bed.command(&["login", &controller()]);
        told(login, &code).ok();
        let mut run =
            bed.command(&["--context", "10.77.0.2", "run", "--", "sh", "-c", "echo I am on $(hostname)"]);
        let code = bed.path("code");
        std::fs::create_dir_all(&code).expect("a directory");
        run.env_remove("AGENTD_SOCKET").current_dir(&code);
        let ran = agent_tests::finish(&mut run).ok();
        assert!(ran.stdout.contains("I am on host1"), "{}{}", ran.stdout, ran.stderr);
    });
    tally.case("attach again changes nothing", || {
        let daemons = machine.daemons();
        assert_eq!(daemons.lines().count(), 1, "{daemons}");
        bed.attach(&root, &[]).ok();
        assert_eq!(machine.daemons(), daemons);
        assert_eq!(bed.ready(), ["host1"]);
    });
    tally.case("detach leaves nothing", || {
        bed.detach(&root, &[]).ok();
        assert_eq!(machine.agents(), "");
        assert_eq!(machine.written(), before);
        assert_eq!(machine.sh("ls -A /var/tmp /run | grep -i agentd || true").stdout, "");
        assert!(!bed.ctl(&["nodes"]).ok().stdout.contains("host1"));
        bed.detach(&root, &[]).ok().says("installed nothing");
    });
    tally.case("and once more", || {
        bed.attach(&root, &["--name", "other"]).ok();
        assert_eq!(bed.ready(), ["other"]);
        bed.detach(&root, &[]).ok();
        assert_eq!(machine.written(), before);
    });
}

fn twice(tally: &mut Tally, _: &Scale) {
    let bed = Bed::plain();
    tally.case("two attaches", || {
        let start = || {
            let mut command = bed.attaching(&place("root", 1), &["--accept-new"]);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            command.spawn().expect("agentctl")
        };
        for ran in [start(), start()].map(|child| child.wait_with_output().expect("agentctl")) {
            assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        }
        assert_eq!(bed.ready(), ["host1"]);
        assert_eq!(bed.machines[0].daemons().lines().count(), 1);
    });
}

fn others(tally: &mut Tally, _: &Scale) {
    let bed = Bed::plain();
    let root = place("root", 1);
    tally.case("refused, and nothing is changed", || {
        bed.attach(&root, &["--accept-new"]).ok();
        let written = bed.machines[0].sh("find /usr/local/lib/agentd /var/lib/agentd-attach | sort").stdout;
        let other = format!("https://host0:{PORT}");
        let mut command = bed.command(&["attach", &root, "--package"]);
        command.arg(package()).args(["--controller", &other]).arg("--key").arg(bed.path("key"));
        let ran = agent_tests::finish(&mut command).code(1);
        assert!(ran.stderr.contains("it belongs to another controller"), "{}", ran.stderr);
        assert!(ran.stderr.contains("SSH-103"), "{}", ran.stderr);
        assert_eq!(
            bed.machines[0].sh("find /usr/local/lib/agentd /var/lib/agentd-attach | sort").stdout,
            written
        );
        assert_eq!(bed.ready(), ["host1"]);
    });
    tally.case("detach by another is refused", || {
        let mut command = bed.command(&["detach", &root, "--controller", "https://other:7443"]);
        agent_tests::finish(command.arg("--key").arg(bed.path("key"))).code(1).says("CFG-104");
    });
}

fn file(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new(&[Special::default(), Special::default()]);
    tally.case("two machines and one that is not there", || {
        let key = bed.path("key");
        let text = format!(
            "hosts:\n- {}\n- host: {}\n  name: second\n  labels: {{rack: 8}}\n- root@10.77.0.99\n",
            place("root", 1),
            place("root", 2)
        );
        std::fs::write(bed.path("hosts.yml"), text).expect("a file");
        let mut command = bed.command(&["attach", "--accept-new", "--timeout", "3s", "-f"]);
        command.arg(bed.path("hosts.yml")).arg("--key").arg(key).arg("--package").arg(package());
        let ran = agent_tests::finish(command.args(["--controller", &controller()])).code(1);
        let row = |host: &str| {
            ran.stdout.lines().find(|line| line.starts_with(host)).unwrap_or_default().to_owned()
        };
        assert!(row("root@10.77.0.3").contains("attached"), "{}{}", ran.stdout, ran.stderr);
        assert!(row("root@10.77.0.4").contains("second"), "{}{}", ran.stdout, ran.stderr);
        assert!(row("root@10.77.0.99").contains("SSH-101"), "{}{}", ran.stdout, ran.stderr);
        eventually("both are ready", SOON, || (bed.ready() == ["host1", "second"]).then_some(()));
    });
}
