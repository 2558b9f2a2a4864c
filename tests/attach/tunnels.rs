//! Machines that cannot connect to the controller, and are nodes all the same.

use std::process::Stdio;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually, finish};

use crate::attach::bed::{Bed, PORT, Special, place, told};
use crate::attach::cuts::cut;

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "T1",
        promise: "who cannot reach the controller does so by a tunnel, which comes back",
        run: whole,
    },
    Row {
        id: "T2",
        promise: "a tunnel to a user's own daemon, and to a server that allows none",
        run: others,
    },
];

/// Machines from which nothing gets out to the controller.
fn shut_in(machines: &[Special<'_>]) -> Bed {
    let bed = Bed::new(machines);
    (1..=machines.len()).for_each(|index| bed.hosts.keep_in(index, PORT));
    bed
}

fn node(bed: &Bed) -> serde_json::Value {
    bed.ctl(&["nodes", "--json"]).ok().json()["nodes"][0].clone()
}

fn await_up(bed: &Bed) {
    eventually("the tunnel is up, and the node is seen", SOON, || {
        (node(bed)["tunnel"]["up"] == true && bed.ready() == ["host1"]).then_some(())
    });
}

fn whole(tally: &mut Tally, scale: &Scale) {
    let mut bed = shut_in(&[Special::default()]);
    let before = bed.machines[0].written();
    let root = place("root", 1);
    tally.case("without one, it is named", || {
        let ran = bed.attach(&root, &["--accept-new"]).code(1);
        assert!(ran.stderr.contains("SSH-103") && ran.stderr.contains("--tunnel"), "{}", ran.stderr);
        assert_eq!(bed.machines[0].written(), before);
    });
    tally.case("attach", || {
        bed.attach(&root, &["--tunnel"]).ok();
        assert_eq!(bed.ready(), ["host1"]);
        assert_eq!(node(&bed)["tunnel"]["through"], root);
        let shown = bed.ctl(&["nodes"]).ok().stdout;
        assert!(shown.contains(&format!("{root}, up")), "{shown}");
        bed.log_in();
    });
    tally.case("a job goes on while it is cut, and it comes back", || {
        let running = "echo I am on $(hostname); while [ ! -e go ]; do sleep 0.1; done; echo done";
        let mut job =
            bed.run(running).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("agentctl");
        eventually("the job runs", SOON, || {
            (bed.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["state"] == "Running").then_some(())
        });
        cut(&bed.machines[0]);
        eventually("it is seen that it was cut", SOON, || {
            (node(&bed)["tunnel"]["up"] == false).then_some(())
        });
        await_up(&bed);
        bed.machines[0]
            .sh("for pid in $(pgrep -f 'wh[i]le . ! -e go'); do touch /proc/$pid/cwd/go; done")
            .ok();
        let end = eventually("the job ends", SOON, || job.try_wait().expect("agentctl"));
        let mut said = String::new();
        let mut stdout = job.stdout.take().expect("a pipe");
        std::io::Read::read_to_string(&mut stdout, &mut said).expect("a pipe");
        assert!(end.success() && said.contains("I am on host1"), "{said}");
        assert!(said.ends_with("done\n"), "{said}");
    });
    tally.case("the controller is restarted", || {
        bed.controller.kill();
        bed.controller.spawn();
        eventually("it answers", SOON, || (bed.ctl(&["nodes"]).code == 0).then_some(()));
        await_up(&bed);
    });
    if scale.full {
        tally.case("its connection is dead, and the machine has not noticed", || {
            bed.machines[0].sh("kill -STOP $(pgrep -f '^sshd: root')").ok();
            eventually("that is seen", 2 * SOON, || (node(&bed)["tunnel"]["up"] == false).then_some(()));
            await_up(&bed);
        });
    }
    tally.case("its key is good for nothing else", || {
        let key = bed.controller.state().join("controller/tunnels/key.openssh");
        let mut ssh = bed.on(0, "ssh");
        ssh.args(["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-i"]).arg(key);
        let ran = finish(ssh.arg(&root).arg("id").stdin(Stdio::null()));
        assert!(ran.stdout == "agentd-tunnel ready\n", "{}{}", ran.stdout, ran.stderr);
        await_up(&bed);
    });
    tally.case("attach again changes nothing, and detach leaves nothing", || {
        let daemons = bed.machines[0].daemons();
        bed.attach(&root, &[]).ok();
        assert_eq!(bed.machines[0].daemons(), daemons);
        bed.detach(&root, &[]).ok();
        assert_eq!(bed.machines[0].written(), before);
        let left = std::fs::read_dir(bed.controller.state().join("controller/tunnels")).expect("a directory");
        assert_eq!(left.count(), 1, "more than the key");
    });
}

fn others(tally: &mut Tally, _: &Scale) {
    let bare = "rm -rf /usr/bin/sudo /home/ada/.ssh\n";
    let cut_short = "printf '%s' \"$(cat /root/.ssh/authorized_keys)\" >/root/.ssh/authorized_keys\n";
    let bed = shut_in(&[
        Special { prepare: bare, ..Special::default() },
        Special { sshd: "-o AllowTcpForwarding=no", ..Special::default() },
        Special { prepare: cut_short, ..Special::default() },
    ]);
    tally.case("a user without sudo and without keys", || {
        let before = bed.machines[0].written();
        let ada = place("ada", 1);
        let words = ["--accept-new", "--tunnel", "--password-stdin"];
        told(bed.attaching(&ada, &words), "secret\n").ok();
        assert_eq!(bed.ready(), ["host1"]);
        let mut detach = bed.command(&["detach", &ada, "--password-stdin"]);
        detach.args(["--controller", &crate::attach::bed::controller()]);
        told(detach, "secret\n").ok();
        assert_eq!(bed.machines[0].written(), before);
    });
    tally.case("a server that allows none", || {
        let ran = bed.attach(&place("root", 2), &["--accept-new", "--tunnel"]).code(1);
        assert!(ran.stderr.contains("AllowTcpForwarding yes"), "{}", ran.stderr);
    });
    tally.case("by way of another host, which is refused before anything is changed", || {
        let gate = place("root", 1);
        let before = bed.machines[1].written();
        let ran = bed.attach(&place("root", 2), &["--accept-new", "--tunnel", "--jump", &gate]).code(1);
        assert!(ran.stderr.contains("it is reached through other hosts"), "{}", ran.stderr);
        assert!(ran.stderr.contains("SSH-103") && ran.stderr.contains("without `--jump`"), "{}", ran.stderr);
        assert_eq!(bed.machines[1].written(), before);
    });
    tally.case("a file of keys without an end of its last line has none afterwards", || {
        let keys = bed.machines[2].file("/root/.ssh/authorized_keys");
        let before = std::fs::read_to_string(&keys).expect("the file of keys");
        assert!(!before.ends_with('\n'), "{before}");
        let root = place("root", 3);
        bed.attach(&root, &["--accept-new", "--tunnel"]).ok();
        let with = std::fs::read_to_string(&keys).expect("the file of keys");
        assert!(with.starts_with(&format!("{before}\n")) && with.contains(" agentd-tunnel"), "{with}");
        bed.detach(&root, &[]).ok();
        assert_eq!(std::fs::read_to_string(&keys).expect("the file of keys"), before);
    });
}
