//! What attach is for: a node that runs jobs, and nothing of it after detach.

use std::time::Instant;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::attach::bed::{Bed, PORT, Special, controller, package, place};

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
    Row { id: "N5", promise: "many machines of a file become nodes at once", run: many },
];

fn whole(tally: &mut Tally, _: &Scale) {
    let bed = Bed::plain();
    let machine = &bed.machines[0];
    machine.sh("rm -r /usr/local/lib").ok(); // attach makes it, and detach takes it away
    let before = machine.written();
    let root = place("root", 1);
    let started = Instant::now();
    tally.case("attach", || {
        let ran = bed.attach(&root, &["--accept-new", "--label", "rack=7"]).ok();
        assert!(ran.stderr.contains("host1 is a node; it was seen"), "{}", ran.stderr);
        // It has no container engine, which is told and stands in nobody's way.
        assert!(ran.stderr.contains("docker"), "{}", ran.stderr);
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
        bed.log_in();
        let ran = agent_tests::finish(&mut bed.run("echo I am on $(hostname)")).ok();
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

/// What programs that were run and ended have taken of the processor, in seconds: `agentctl` and no host.
fn taken() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("a process");
    let times = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().skip(13).take(2);
    times.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn many(tally: &mut Tally, scale: &Scale) {
    let count = scale.of(4, 20);
    let machines: Vec<Special<'_>> = (0..=count).map(|_| Special::default()).collect();
    let bed = Bed::new(&machines);
    let attach = |what: &str, tally: &mut Tally, run: &dyn Fn()| {
        let (started, before) = (Instant::now(), taken());
        tally.case(what, run);
        (started.elapsed().as_secs_f64(), taken() - before)
    };
    let (one, client_of_one) = attach("one", tally, &|| {
        bed.attach(&place("root", 1), &["--accept-new"]).ok();
    });
    let (all, client_of_all) = attach("all others at once", tally, &|| {
        let places: String = (2..=count + 1).map(|index| format!("- {}\n", place("root", index))).collect();
        std::fs::write(bed.path("hosts.yml"), format!("hosts:\n{places}")).expect("a file");
        let mut command = bed.command(&["attach", "--accept-new", "-f"]);
        command.arg(bed.path("hosts.yml")).arg("--key").arg(bed.path("key")).arg("--package").arg(package());
        let ran = agent_tests::finish(command.args(["--controller", &controller()])).ok();
        assert_eq!(ran.stdout.matches("attached").count(), count, "{}{}", ran.stdout, ran.stderr);
        assert_eq!(bed.ready().len(), count + 1);
    });
    tally.note(format!("one {one:.1} s, {count} at once {all:.1} s: {:.1} times as long", all / one));
    // The hosts' own work is done by this machine, too, where it would be done by each of them.
    let (more, each) = (all - one, (client_of_all - client_of_one) / (count - 1) as f64);
    tally.note(format!(
        "agentctl has the processor for {client_of_one:.2} s of one, and for {each:.2} s of each more host, \
         {:.0} % of the {more:.1} s by which all take longer",
        each * (count - 1) as f64 / more * 100.0
    ));
}
