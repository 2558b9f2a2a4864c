//! Inspects the local machine.
//!
//! Owns what can be found out about it: its inventory ([`probe`]), how full it is ([`load`]), which boot this is
//! ([`boot_id`]), what the driver reports about its GPUs ([`gpu`]), and where other machines reach it ([`net`]).
//! Hides procfs, sysfs, the file system calls and the differences between distributions.
//!
//! Invariants: nothing here starts a process, needs a privilege, or waits longer than a second, except [`gpu::look`],
//! which is called in a process of its own, and [`ProbeConfig::helper`]; a value that cannot be found out is absent or reported as unknown, never
//! invented. A finding always says what it means for jobs *in this version*. There are no tasks: every function is a
//! plain, blocking call, made by the worker when it starts and when it reports.

mod docker;
mod findings;
pub mod gpu;
mod limits;
pub mod net;
mod python;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use agent_model::node::{Finding, Inventory, Load};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

/// What the probe needs to know of the daemon.
#[derive(Debug, Clone)]
pub struct ProbeConfig {
    /// The state directory of the daemon, whose disk is looked at; it need not exist yet.
    pub state_dir: PathBuf,
    /// How many replicas run at a time.
    pub sharing: Sharing,
    /// Where interpreters are looked for, as in `PATH`.
    pub path: String,
    /// Free bytes of the disk below which no job may be started.
    pub disk_reserve: u64,
    /// Where the program that makes conda environments is, if it is installed.
    pub engine: PathBuf,
    /// The socket of the container engine.
    pub docker: PathBuf,
    /// The users that jobs run as.
    pub jobs: JobsRunAs,
    /// Says what is wrong with root's helper, if there is one and it does not answer; takes two seconds at most.
    pub helper: fn() -> Option<String>,
    /// The labels that its operators gave it.
    pub labels: BTreeMap<String, String>,
}

/// How its operators divide the machine among jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Among this many jobs, whatever their size.
    Slots(u32),
    /// By size.
    Size {
        /// The processors that a job counts for if it names none.
        job_cpus: u32,
        /// Processors that are kept from jobs.
        reserved_cpus: u32,
        /// Bytes of memory that are kept from jobs.
        reserved_memory: u64,
    },
}

impl Sharing {
    /// Tells it in an inventory, which has the processors and the memory already. At least one processor is for jobs.
    fn tell(self, inventory: &mut Inventory) {
        match self {
            Sharing::Slots(slots) => inventory.slots = slots,
            Sharing::Size { job_cpus, reserved_cpus, reserved_memory } => {
                inventory.reserved_cpus = reserved_cpus.min(inventory.cpus.saturating_sub(1));
                inventory.reserved_memory = reserved_memory.min(inventory.memory);
                // Each job counts for a processor at least.
                inventory.slots = inventory.cpus - inventory.reserved_cpus;
                inventory.job_cpus = job_cpus.clamp(1, inventory.slots.max(1));
            }
        }
    }
}

/// The users that the jobs of a daemon run as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JobsRunAs {
    /// The daemon's own user.
    #[default]
    Daemon,
    /// The same, but it reaches nothing of the daemon's state, and changes environments for itself alone.
    KeptOut,
    /// One other user.
    One,
    /// The user who submitted the job, or a separate user for each job.
    Users,
}

/// Looks at this machine. Blocking, for less than a second even when what it looks at hangs.
///
/// No GPU is listed, although one may be there (a finding says so): only [`gpu::look`] asks the driver.
pub fn probe(config: &ProbeConfig) -> Inventory {
    let machine = Machine::here();
    let uname = rustix::system::uname();
    let text = |value: &std::ffi::CStr| value.to_string_lossy().into_owned();
    let mut inventory = Inventory {
        hostname: text(uname.nodename()),
        os: machine.os_name(),
        kernel: text(uname.release()),
        arch: text(uname.machine()),
        cpus: std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
        memory: memory().total,
        disk: disk(&config.state_dir).map_or(0, |disk| disk.size),
        gpus: Vec::new(),
        labels: config.labels.clone(),
        gangs: true,
        findings: findings::all(&machine, config),
        ..Inventory::default()
    };
    config.sharing.tell(&mut inventory);
    inventory
}

/// The findings that may change at any moment: they are checked again and again, so this costs next to nothing.
pub fn check(config: &ProbeConfig) -> Vec<Finding> {
    vec![findings::disk_of(&config.state_dir, config.disk_reserve)]
}

/// The finding about a disk that did not take a record of a job.
pub fn failing_disk(why: &str) -> Finding {
    findings::failing_disk(why)
}

/// The findings about the container engine, root's helper and what the kernel has left for this user, which may change
/// at any moment. Asks them, so not too often.
pub fn check_others(config: &ProbeConfig) -> [Finding; 4] {
    let machine = Machine::here();
    [
        findings::engine(&machine, config),
        findings::rights(config),
        findings::conda(&config.engine),
        findings::limits_of_user(&machine),
    ]
}

/// How full the machine is now. A value that cannot be measured is 0, which no caller takes for free space.
pub fn load(state_dir: &Path) -> Load {
    Load { disk_free: disk_free(state_dir), memory_free: memory().available }
}

/// The free bytes of the file system of a directory; 0 when unknown.
pub fn disk_free(dir: &Path) -> u64 {
    disk(dir).map_or(0, |disk| disk.free)
}

/// How many files can still be made in a directory, if that is too few for a job.
pub fn few_files(dir: &Path) -> Option<u64> {
    disk(dir)?.files.filter(|files| *files < findings::FILES_LOW)
}

/// The size of the file system of a directory, in bytes; 0 when unknown.
pub fn disk_size(dir: &Path) -> u64 {
    disk(dir).map_or(0, |disk| disk.size)
}

/// Names this boot: it changes when every process of the machine, or of the container, has ended.
pub fn boot_id() -> Result<String, BootIdError> {
    Machine::here().boot_id()
}

/// The kernel does not report which boot this is.
#[derive(Debug, thiserror::Error)]
#[error("cannot read `{}`, which names this boot", path.display())]
pub struct BootIdError {
    path: PathBuf,
    source: io::Error,
}

/// The machine as files below a root, so that a test can provide its own.
struct Machine {
    root: PathBuf,
}

impl Machine {
    fn here() -> Machine {
        Machine { root: PathBuf::from("/") }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.at(path)).ok()
    }

    fn os_name(&self) -> String {
        let release = self.read("etc/os-release").unwrap_or_default();
        let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        name.unwrap_or_default().trim_matches('"').to_owned()
    }

    /// A container that is started again keeps the boot id of its machine, though all its processes are gone;
    /// the start of the first process it sees tells the difference.
    fn boot_id(&self) -> Result<String, BootIdError> {
        let path = self.at("proc/sys/kernel/random/boot_id");
        let boot = std::fs::read_to_string(&path).map_err(|source| BootIdError { path, source })?;
        let first = self.read("proc/1/stat").as_deref().and_then(start_ticks).unwrap_or_default();
        Ok(format!("{}.{first}", boot.trim()))
    }
}

/// The start of a process in clock ticks since boot: field 22, counted after the name, which may hold anything.
fn start_ticks(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

struct MemoryInfo {
    total: u64,
    available: u64,
}

/// MemoryInfo of the machine, or of the container's limit when that is lower.
fn memory() -> MemoryInfo {
    let kind = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let Ok(system) = System::new_with_specifics(kind) else { return MemoryInfo { total: 0, available: 0 } };
    let (total, available) = (system.total_memory(), system.available_memory());
    match system.cgroup_limits() {
        Some(limit) if limit.total_memory > 0 && limit.total_memory < total => {
            MemoryInfo { total: limit.total_memory, available: available.min(limit.free_memory) }
        }
        _ => MemoryInfo { total, available },
    }
}

#[derive(Clone, Copy)]
struct Disk {
    size: u64,
    free: u64,
    /// Files that can still be made, where the file system counts them.
    files: Option<u64>,
    read_only: bool,
}

/// The file system of a directory, or of the nearest parent that exists.
fn disk(dir: &Path) -> Option<Disk> {
    let found = dir.ancestors().find_map(|dir| rustix::fs::statvfs(dir).ok())?;
    Some(Disk {
        size: found.f_blocks.saturating_mul(found.f_frsize),
        free: found.f_bavail.saturating_mul(found.f_frsize),
        files: (found.f_files > 0).then_some(found.f_favail),
        read_only: found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY),
    })
}

#[cfg(test)]
mod tests {
    use agent_model::node::Grade;

    use super::*;

    fn config(dir: &Path) -> ProbeConfig {
        ProbeConfig {
            state_dir: dir.to_owned(),
            sharing: Sharing::Slots(3),
            path: "/usr/local/bin:/usr/bin:/bin".to_owned(),
            disk_reserve: 0,
            engine: PathBuf::from("/nowhere"),
            docker: PathBuf::from("/nowhere"),
            jobs: JobsRunAs::Daemon,
            helper: || None,
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn test_probe_says_what_every_linux_machine_has() {
        let dir = tempfile::tempdir().unwrap();
        let inventory = probe(&config(&dir.path().join("not/yet/there")));
        assert!(inventory.cpus > 0 && inventory.memory > 0 && inventory.disk > 0, "{inventory:?}");
        assert!(!inventory.hostname.is_empty() && !inventory.kernel.is_empty() && !inventory.arch.is_empty());
        assert_eq!((inventory.slots, inventory.gpus.len()), (3, 0));
        for finding in &inventory.findings {
            assert!(!finding.found.is_empty() && !finding.means.is_empty(), "{finding:?}");
            assert!(finding.grade != Grade::Bad || finding.fix.is_some(), "{finding:?}");
        }
    }

    #[test]
    fn test_reserve_is_kept_from_jobs_and_never_takes_all() {
        let told = |cpus, memory, job_cpus, reserved_cpus, reserved_memory| {
            let mut inventory = Inventory { cpus, memory, ..Inventory::default() };
            Sharing::Size { job_cpus, reserved_cpus, reserved_memory }.tell(&mut inventory);
            let Inventory { slots, job_cpus, reserved_cpus, reserved_memory, .. } = inventory;
            (slots, job_cpus, reserved_cpus, reserved_memory)
        };
        assert_eq!(told(8, 100, 2, 1, 5), (7, 2, 1, 5));
        assert_eq!(told(1, 100, 4, 1, 500), (1, 1, 0, 100));
    }

    #[test]
    fn test_load_is_below_the_inventory() {
        let dir = tempfile::tempdir().unwrap();
        let (inventory, load) = (probe(&config(dir.path())), load(dir.path()));
        assert!(load.disk_free > 0 && load.disk_free <= inventory.disk);
        assert!(load.memory_free > 0 && load.memory_free <= inventory.memory);
    }

    #[test]
    fn test_boot_id_is_stable_and_changes_with_the_first_process() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());

        let root = tempfile::tempdir().unwrap();
        let machine = Machine { root: root.path().to_owned() };
        assert!(machine.boot_id().unwrap_err().to_string().contains("boot_id"));
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/random/boot_id", "abc\n");
        let stat = |start: u32| format!("1 (a b) c) S 0 1 1 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 {start} 9 9");
        write("proc/1/stat", &stat(17));
        assert_eq!(machine.boot_id().unwrap(), "abc.17");
        write("proc/1/stat", &stat(90_210));
        assert_eq!(machine.boot_id().unwrap(), "abc.90210");
    }
}
