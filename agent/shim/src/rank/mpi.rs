//! The first rank of a job that `mpirun` starts: runs `mpirun` once, with the command, for all ranks.
//!
//! Each kind of `mpirun` has its own options for the same facts: where the ranks are, that [`super::lend::rsh`] is
//! its remote shell, and which network and ports there are. On each machine the command is started by a script that
//! its own rank wrote, as paths are not the same everywhere.

use std::ffi::OsString;
use std::process::Child;
use std::time::Duration;
use std::{io, thread};

use agent_shim::gang::{GangLaunch, Mpi};

use agent_model::words::count;

use super::lend::write_rsh;
use super::{FAILED, FOLDER, FailedProcess, RankError, become_command, code_of, command, quoted, say, write};

/// The script that starts the command of one process.
const SCRIPT: &str = "rank";

/// How often that is checked.
const LOOK: Duration = Duration::from_millis(100);

/// The command that `mpirun` starts: the script of the machine it runs on.
const ANYWHERE: &str = "cd \"$AZUREML_CR_EXECUTION_WORKING_DIR_PATH\" && exec sh .agentd/rank";

/// The kind of `mpirun`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MpiKind {
    OpenMpi,
    /// MPICH's, Intel's and others'.
    Hydra,
}

/// Runs the command under `mpirun`; returns the exit code of that.
pub(super) fn lead(order: &GangLaunch, network: &Mpi, argv: &[OsString]) -> Result<u8, RankError> {
    #[allow(clippy::disallowed_methods, reason = "the variables of the job")]
    let program = std::env::var("AGENTD_MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    write_script(order, argv)?;
    let processes: u32 = order.hosts.iter().map(|host| host.slots).sum();
    let kind = match kind_of(&program) {
        // One process needs no `mpirun` to start it.
        Err(RankError::NoMpi { .. }) if processes == 1 => {
            say(&format!("there is no `{program}`; the one process is started without it"));
            return Err(become_command(argv));
        }
        kind => kind?,
    };
    let rsh = write_rsh(order)?;
    let is_root = nix::unistd::geteuid().is_root();
    let words = match kind {
        MpiKind::OpenMpi => open_mpi(order, network, &rsh, is_root),
        MpiKind::Hydra => hydra(order, network, &rsh),
    };
    let words: Vec<String> = std::iter::once(program.clone())
        .chain(words)
        .chain(["sh", "-c", ANYWHERE].map(str::to_owned))
        .collect();
    let nodes = order.hosts.len();
    say(&format!("{} on {} by {kind:?}", count(processes as u64, "process"), count(nodes as u64, "node")));
    let mut command = command(&words);
    if kind == MpiKind::Hydra
        && let Some([services, _]) = network.ports
    {
        command.env("MPIEXEC_PORT_RANGE", format!("{}:{}", services.0, services.1));
    }
    let child = command.spawn().map_err(|source| RankError::Start { program, source })?;
    see_to_its_end(child).map_err(RankError::Wait)
}

/// Waits for `mpirun`. One that keeps running although a process has failed here is ended.
fn see_to_its_end(mut child: Child) -> io::Result<u8> {
    let mut failure = FailedProcess::default();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(code_of(status));
        }
        if let Some(code) = failure.look() {
            say("a process has failed, and mpirun goes on: it is ended");
            child.kill()?;
            child.wait()?;
            return Ok(code);
        }
        thread::sleep(LOOK);
    }
}

fn kind_of(program: &str) -> Result<MpiKind, RankError> {
    let asked = command(&[program, "--version"]).output().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => RankError::NoMpi { program: program.to_owned() },
        _ => RankError::Start { program: program.to_owned(), source },
    })?;
    let said = String::from_utf8_lossy(&asked.stdout).into_owned() + &String::from_utf8_lossy(&asked.stderr);
    told_kind(&said).ok_or_else(|| {
        let said = said.chars().take(200).collect();
        RankError::StrangeMpi { program: program.to_owned(), said }
    })
}

fn told_kind(said: &str) -> Option<MpiKind> {
    let lower = said.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    if has(&["open mpi", "openrte", "open-mpi", "prrte"]) {
        Some(MpiKind::OpenMpi)
    } else if has(&["hydra", "intel(r) mpi", "mpich"]) {
        Some(MpiKind::Hydra)
    } else {
        None
    }
}

/// The words between `mpirun` and the command.
fn open_mpi(order: &GangLaunch, network: &Mpi, rsh: &str, is_root: bool) -> Vec<String> {
    let processes: u32 = order.hosts.iter().map(|host| host.slots).sum();
    let mut words: Vec<String> = Vec::new();
    let mut add = |all: &[&str]| words.extend(all.iter().map(|word| (*word).to_owned()));
    if is_root {
        add(&["--allow-run-as-root"]);
    }
    add(&["-np", &processes.to_string(), "--hostfile", &format!("{FOLDER}/hosts")]);
    // Other jobs of the machine would be bound to the same processors.
    add(&["--bind-to", "none", "--map-by", "slot"]);
    if order.hosts.len() > 1 {
        add(&["--leave-session-attached"]);
        add(&["--mca", "plm_rsh_agent", rsh, "--mca", "plm_rsh_no_tree_spawn", "1"]);
        let networks = network.networks.join(",");
        // Addresses of bridges are the same on every machine: peers would look for each other there.
        add(&["--mca", "btl_tcp_if_include", &networks, "--mca", "oob_tcp_if_include", &networks]);
        if let Some([services, processes]) = network.ports {
            add(&["--mca", "oob_tcp_dynamic_ipv4_ports", &format!("{}-{}", services.0, services.1)]);
            let count = u32::from(processes.1 - processes.0) + 1;
            add(&["--mca", "btl_tcp_port_min_v4", &processes.0.to_string()]);
            add(&["--mca", "btl_tcp_port_range_v4", &count.to_string()]);
        }
    }
    words
}

/// The same for Hydra.
fn hydra(order: &GangLaunch, network: &Mpi, rsh: &str) -> Vec<String> {
    let processes: u32 = order.hosts.iter().map(|host| host.slots).sum();
    let hosts: Vec<String> =
        order.hosts.iter().map(|host| format!("{}:{}", host.address, host.slots)).collect();
    // Each machine has the variables of its own rank, and its own directory for the job: the script goes there.
    let mut words: Vec<String> =
        ["-genvnone", "-wdir", "/", "-n", &processes.to_string()].map(str::to_owned).into();
    if order.hosts.len() > 1 {
        words.extend(
            ["-launcher", "ssh", "-launcher-exec", rsh, "-hosts", &hosts.join(",")].map(str::to_owned),
        );
        if !network.interface.is_empty() && network.interface != "lo" {
            words.extend(["-iface".to_owned(), network.interface.clone()]);
        }
    }
    words
}

/// Writes the script that starts the command of one process on this machine.
pub(super) fn write_script(order: &GangLaunch, argv: &[OsString]) -> Result<(), RankError> {
    let processes: u32 = order.hosts.iter().map(|host| host.slots).sum();
    let own = order.hosts.get(order.rank as usize);
    let (first, last) = own.map_or((0, 0), |own| own.ports);
    let own = own.map(|host| host.address.to_string()).unwrap_or_default();
    let words: Vec<String> = argv.iter().map(|word| quoted(word)).collect();
    let script = format!(
        "RANK=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}\n\
         WORLD_SIZE=${{OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}}\n\
         LOCAL_RANK=${{OMPI_COMM_WORLD_LOCAL_RANK:-${{MPI_LOCALRANKID:-0}}}}\n\
         if [ \"$WORLD_SIZE\" != {processes} ]; then\n\
         echo \"agentd: mpirun made a world of ${{WORLD_SIZE:-no}} processes instead of {processes}\" >&2\n\
         exit 1\n\
         fi\n\
         export RANK WORLD_SIZE LOCAL_RANK\n\
         export MPICH_INTERFACE_HOSTNAME={own} MPICH_PORT_RANGE={first}:{last}\n\
         {}\n\
         code=$?\n\
         [ $code = 0 ] || echo $code > {FOLDER}/{FAILED}\n\
         exit $code\n",
        words.join(" ")
    );
    write(SCRIPT, script.as_bytes(), 0o600)
}

#[cfg(test)]
mod tests {
    use agent_model::protocol::gang::Secret;
    use agent_shim::gang::{Host, Way};

    use super::*;

    fn order(nodes: u8) -> (GangLaunch, Mpi) {
        let host =
            |last| Host { address: [10, 0, 0, last].into(), port: 20_001, ports: (20_004, 20_005), slots: 2 };
        let network = Mpi {
            networks: vec!["10.0.0.0/24".into()],
            interface: "eth0".into(),
            ports: Some([(20_002, 20_003), (20_004, 20_005)]),
        };
        let hosts = (1..=nodes).map(host).collect();
        (GangLaunch { rank: 0, hosts, secret: Secret::new("s"), way: Way::Lend }, network)
    }

    #[test]
    fn test_every_mpirun_is_told_apart() {
        assert_eq!(told_kind("mpirun (Open MPI) 4.1.4\n"), Some(MpiKind::OpenMpi));
        assert_eq!(told_kind("HYDRA build details:\n    Version: 4.0.2"), Some(MpiKind::Hydra));
        assert_eq!(told_kind("Intel(R) MPI Library for Linux* OS, Version 2021"), Some(MpiKind::Hydra));
        assert_eq!(told_kind("command not found"), None);
    }

    #[test]
    fn test_open_mpi_is_told_ranks_network_and_shell() {
        let (order, network) = order(3);
        let words = open_mpi(&order, &network, "/w/rsh", true).join(" ");
        for part in [
            "--allow-run-as-root -np 6 --hostfile .agentd/hosts",
            "--mca plm_rsh_agent /w/rsh --mca plm_rsh_no_tree_spawn 1",
            "--mca btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24",
            "--mca oob_tcp_dynamic_ipv4_ports 20002-20003 --mca btl_tcp_port_min_v4 20004 --mca btl_tcp_port_range_v4 2",
        ] {
            assert!(words.contains(part), "{part} in {words}");
        }
        assert!(!open_mpi(&order, &network, "/w/rsh", false).join(" ").contains("root"));
    }

    #[test]
    fn test_one_machine_needs_no_shell_elsewhere() {
        let (order, network) = order(1);
        let open_mpi = open_mpi(&order, &network, "/w/rsh", false).join(" ");
        assert_eq!(open_mpi, "-np 2 --hostfile .agentd/hosts --bind-to none --map-by slot");
        assert_eq!(hydra(&order, &network, "/w/rsh").join(" "), "-genvnone -wdir / -n 2");
    }

    #[test]
    fn test_hydra_is_told_the_same() {
        let (order, network) = order(2);
        let words = hydra(&order, &network, "/w/rsh").join(" ");
        assert_eq!(
            words,
            "-genvnone -wdir / -n 4 -launcher ssh -launcher-exec /w/rsh -hosts 10.0.0.1:2,10.0.0.2:2 -iface eth0"
        );
    }
}
