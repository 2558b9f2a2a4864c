//! Group H: machines of a list, with a real SSH server each, that are woken and suspended by commands.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use agent_control::provider::{MachineState, ProviderError};
use agent_tests::machines::{Machine, Special, package};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, binaries, eventually, finish};

use crate::pools::bed::{Bed, Lab, free_port, refused};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "H1", promise: "ssh: a machine is woken, joins, leaves and is suspended", run: joins },
    Row { id: "H2", promise: "ssh: machines without agentd are attached and detached", run: attached },
];

struct Site {
    bed: Bed,
    machines: Vec<(Machine, u16)>,
}

impl Site {
    fn new(count: usize, has_agentd: bool) -> Site {
        let bed = Bed::new();
        keygen(&bed.path("key"));
        let key = fs::read_to_string(bed.path("key.pub")).expect("a key").trim().to_owned();
        let link = format!("ln -s {} /usr/local/bin/agentd\n", binaries().join("agentd").display());
        let machines = (0..count).map(|index| {
            let port = free_port();
            let sshd = format!("-p {port} -o ListenAddress=127.0.0.1");
            let prepare = if has_agentd { link.as_str() } else { "" };
            let special = Special { prepare, sshd: &sshd, ..Special::default() };
            (Machine::start(&[], bed.path(&format!("m{index}")), &special, &key), port)
        });
        let machines: Vec<_> = machines.collect();
        machines.iter().for_each(|(machine, _)| machine.listens());
        Site { bed, machines }
    }

    /// The provider of these machines, as root or ada.
    fn lab(&self, user: &str, more: &str) -> Lab<'_> {
        let one = |(_, port): &(Machine, u16)| {
            format!("{{host: 127.0.0.1, port: {port}, user: {user}, mac: 'aa:{port}'}}")
        };
        let machines: Vec<String> = self.machines.iter().map(one).collect();
        self.bed.provider(&format!(
            "{{use: ssh, key: '{}', accept_new: true, machines: [{}], {more}}}",
            self.bed.path("key").display(),
            machines.join(", ")
        ))
    }

    fn id(&self, index: usize) -> String {
        format!("127.0.0.1:{}", self.machines[index].1)
    }
}

#[allow(clippy::disallowed_methods, reason = "makes what the tests need")]
fn keygen(file: &Path) {
    finish(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(file)).ok();
}

/// The daemons on a machine; the supervisor of a job is none.
fn daemons(machine: &Machine) -> String {
    machine.sh("for at in /proc/[0-9]*; do case $(readlink $at/exe) in */agentd) echo $at;; esac; done 2>/dev/null; true").stdout
}

fn joins(tally: &mut Tally, _: &Scale) {
    let site = Site::new(2, true);
    let marks: PathBuf = site.bed.path("marks");
    let commands = format!(
        "wake: [sh, -c, 'echo wake $1 >>{0}', sh, '{{mac}}'], suspend: [sh, -c, 'echo suspend $1 >>{0}', sh, '{{mac}}']",
        marks.display()
    );
    let lab = site.lab("root", &commands);
    let Some(id) = tally.case("the first free machine is woken and joins", || {
        let id = lab.create("r-1", "metal-1").expect("a machine");
        assert_eq!(id, site.id(0));
        site.bed.joined("metal-1");
        assert_eq!(lab.there(), [(id.clone(), "r-1".to_owned(), "metal-1".to_owned())]);
        assert_eq!(fs::read_to_string(&marks).expect("marks"), format!("wake aa:{}\n", site.machines[0].1));
        id
    }) else {
        return;
    };
    tally.case("the same request is the same machine, another is another, and then there is none", || {
        assert_eq!(lab.create("r-1", "metal-1").expect("a machine"), id);
        assert_eq!(lab.create("r-2", "metal-2").expect("a machine"), site.id(1));
        site.bed.joined("metal-2");
        assert_eq!(refused(lab.create("r-3", "metal-3"), "all 2 machines are lent"), "quota");
    });
    tally.case("the token is in no argument, variable or file", || {
        crate::pools::bed::nobody_shows(&site.bed.token, &site.bed.path("lab"));
    });
    tally.case("it leaves, is suspended, and is lent to the next as another node", || {
        lab.delete(&id).expect("it goes");
        lab.is(&id, MachineState::Gone);
        assert_eq!(daemons(&site.machines[0].0), "");
        assert!(
            fs::read_to_string(&marks)
                .expect("marks")
                .ends_with(&format!("suspend aa:{}\n", site.machines[0].1))
        );
        lab.delete(&id).expect("it is gone");
        assert_eq!(lab.create("r-3", "metal-3").expect("a machine"), id);
        site.bed.joined("metal-3");
    });
    tally.case("a user's own daemon, and a request without an id", || {
        lab.delete_request("r-3").expect("it goes");
        let ada = site.lab("ada", "");
        assert_eq!(ada.create("r-4", "metal-4").expect("a machine"), id);
        site.bed.joined("metal-4");
        ada.delete_request("r-4").expect("it goes");
        assert_eq!(daemons(&site.machines[0].0), "");
    });
    tally.case("who does not let us in, and commands that cannot be filled in", || {
        let nobody = site.lab("nobody", "");
        assert_eq!(refused(nobody.create("r-5", "n"), "does not let us in"), "permanent");
        let odd = site.lab("root", "wake: [wol, '{bmc}']");
        assert_eq!(refused(odd.create("r-5", "n"), "`{bmc}` cannot be filled in"), "permanent");
        nobody.delete_request("r-5").expect_err("it cannot be told to leave");
        site.lab("root", "").delete_request("r-5").expect("it goes");
    });
}

fn attached(tally: &mut Tally, _: &Scale) {
    let site = Site::new(1, false);
    let (ctl, socket) = (binaries().join("agentctl"), site.bed.controller.socket());
    let more = format!(
        "attach: ['{}'], attach_args: [--package, '{}'], environment: {{AGENTD_SOCKET: '{}', HOME: '{}'}}",
        ctl.display(),
        package().display(),
        socket.display(),
        site.bed.path("home").display()
    );
    fs::create_dir(site.bed.path("home")).expect("a directory");
    let lab = site.lab("root", &more);
    let before = site.machines[0].0.written();
    tally.case("a machine with nothing but an SSH server becomes a node", || {
        assert_eq!(lab.create("r-1", "bare-1").expect("a machine"), site.id(0));
        site.bed.joined("bare-1");
    });
    tally.case("and is afterwards as it was before", || {
        // Asked again where the machine was too busy for a step, as a controller does.
        eventually("it goes", SOON * 2, || match lab.delete_request("r-1") {
            Err(ProviderError::Temporary { .. }) => None,
            answered => answered.map(Some).expect("it goes"),
        });
        eventually("no daemon is left", SOON, || daemons(&site.machines[0].0).is_empty().then_some(()));
        assert_eq!(site.machines[0].0.written(), before);
        assert!(lab.list().is_empty());
    });
}
