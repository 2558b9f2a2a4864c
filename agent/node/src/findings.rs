//! Findings about a machine, and what they mean for jobs in this version.
//!
//! One function per topic; each reads a few files and judges. Topic names are stable, because tools look for them.

use std::path::Path;

use agent_model::gpu::{Driver, Look, Seen};
use agent_model::node::{Capability, Finding};
use agent_model::size;
use agent_model::words::count;

use crate::docker::{self, Engine};
use crate::{Disk, JobsRunAs, Machine, ProbeConfig, disk, limits, python};

/// The first kernel with `openat2`, with which snapshots are laid out.
const OLDEST_KERNEL: (u32, u32) = (5, 6);
/// Below this, larger environments do not fit.
const DISK_LOW: u64 = 5 << 30;
/// Below this many files that can still be made, no job is started.
pub(crate) const FILES_LOW: u64 = 1000;

/// Every finding, in the order people read them.
pub(crate) fn all(machine: &Machine, config: &ProbeConfig) -> Vec<Finding> {
    vec![
        kernel(&rustix::system::uname().release().to_string_lossy()),
        init(machine),
        rights(config),
        python_of(python::find(&config.path)),
        conda(&config.engine),
        disk_of(&config.state_dir, config.disk_reserve),
        clean_kill(machine),
        cgroups(machine),
        limits_of_user(machine),
        isolation(config.jobs),
        gpu(machine),
        engine(machine, config),
    ]
}

/// What the kernel has left for the user that the daemon runs as.
pub(crate) fn limits_of_user(machine: &Machine) -> Finding {
    limits::finding(machine, rustix::process::geteuid().as_raw())
}

/// How the container engine answers.
pub(crate) fn engine(machine: &Machine, config: &ProbeConfig) -> Finding {
    docker_of(docker::ask(&config.docker), gpus_of(machine))
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < OLDEST_KERNEL {
        return Finding::bad(
            "kernel",
            release,
            "code cannot be laid out safely, so no job runs",
            "install a kernel of version 5.6 or later and start into it: on Ubuntu 20.04 `sudo apt install linux-generic-hwe-20.04`, then `sudo reboot`",
        );
    }
    Finding::good("kernel", release, "code is laid out so that no path can leave its directory")
}

fn init(machine: &Machine) -> Finding {
    if machine.at("run/systemd/system").is_dir() {
        return Finding::good("init", "systemd", "agentd can be a service; jobs outlive its restarts");
    }
    let first = machine.read("proc/1/comm");
    let found = first.as_deref().map_or("unknown", str::trim);
    Finding::limited(
        "init",
        format!("{found}, not systemd"),
        "nothing starts agentd again after a reboot; jobs outlive its restarts all the same",
        "let your own supervisor keep `agentd run` going, or write `@reboot agentd run --user` into `crontab -e`",
    )
}

/// What the daemon may do, and whether root's helper does the rest for it.
pub(crate) fn rights(config: &ProbeConfig) -> Finding {
    match (config.helper)() {
        Some(wrong) => unhelped(wrong),
        None => privileges(rustix::process::geteuid().is_root(), config.jobs),
    }
}

fn unhelped(wrong: String) -> Finding {
    Finding::limited(
        "privileges",
        wrong,
        "no job begins until it does; jobs that run go on",
        "start it anew: `sudo systemctl restart agent-spawn.socket agent-spawn.service`",
    )
}

fn privileges(root: bool, jobs: JobsRunAs) -> Finding {
    const TOPIC: &str = "privileges";
    match (root, jobs) {
        (true, JobsRunAs::Daemon) => Finding::limited(
            TOPIC,
            "agentd runs as root, and its jobs too",
            "a job has the rights of root",
            "name who else may submit (`socket_group`), then jobs run as their users; or a `job_user`; then `sudo systemctl restart agentd`",
        ),
        (true, _) => Finding::good(
            TOPIC,
            "agentd runs as root, and its jobs do not",
            "a job has the rights of its user, and can gain no others",
        ),
        (false, JobsRunAs::One | JobsRunAs::Users) => Finding::good(
            TOPIC,
            "agentd runs as an ordinary user, and its jobs as others",
            "a job has the rights of its user, and can gain no others",
        ),
        (false, JobsRunAs::Daemon | JobsRunAs::KeptOut) => Finding::good(
            TOPIC,
            "agentd runs as an ordinary user",
            "a job has the rights of that user, and can gain no others",
        ),
    }
}

fn python_of(found: Option<python::Python>) -> Finding {
    let Some(python) = found else {
        return Finding::limited(
            "python",
            "no python3 in the search path",
            "only jobs that bring or name their own interpreter run",
            "install it: `sudo apt install python3 python3-venv`",
        );
    };
    let version = python.version.as_deref().unwrap_or("of unknown version");
    let found = format!("{} ({version})", python.path.display());
    match python.venv {
        Some(true) => Finding::good(
            "python",
            found,
            "jobs with pip requirements get their own environment (judged by its files; it was not run)",
        ),
        Some(false) => Finding::limited(
            "python",
            found,
            "jobs run with the packages it has; environments for pip requirements cannot be made",
            format!("install what is missing: `sudo apt install python{version}-venv`"),
        ),
        None => Finding::good(
            "python",
            found,
            "whether it can make environments shows at the first job with pip requirements",
        ),
    }
}

/// Whether the engine of conda environments is installed; whether it works shows at the first job that needs it.
pub(crate) fn conda(engine: &Path) -> Finding {
    let program = engine.metadata().is_ok_and(|found| {
        found.is_file() && std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o111 != 0
    });
    if program {
        return Finding::good(
            "conda",
            engine.display().to_string(),
            "jobs with a conda file get their environment; no conda needs to be installed",
        );
    }
    Finding::limited(
        "conda",
        format!("no {}", engine.display()),
        "jobs with a conda file run elsewhere, or wait; those with a curated environment (ENV-105) or data by \
         address (DAT-107) fail; all others run",
        "install `agent-env` beside `agentd`; from the sources: `cargo build --release -p agent-env --features engine`",
    )
    .lacking(Capability::Conda)
}

/// The disk of the state directory, of which `reserve` bytes must stay free.
pub(crate) fn disk_of(state_dir: &Path, reserve: u64) -> Finding {
    match disk(state_dir) {
        Some(disk) => judge_disk(&disk, state_dir, reserve),
        None => Finding::limited(
            "disk",
            "unknown",
            "a full disk shows only when a job fails",
            format!("see what the system says of it: `df {}`", state_dir.display()),
        ),
    }
}

/// The same of one that did not take a record of a job.
pub(crate) fn failing_disk(why: &str) -> Finding {
    let means = "no job starts until it takes them again; jobs that run go on";
    Finding::bad(
        "disk",
        format!("it takes no records of jobs: {why}"),
        means,
        "look at it: `sudo dmesg` has its errors",
    )
}

fn judge_disk(disk: &Disk, state_dir: &Path, reserve: u64) -> Finding {
    let place = state_dir.display();
    let bad = |found: String, means: &str, fix: &str| Finding::bad("disk", found, means, fix);
    let found = format!("{} of {} free for {place}", size::binary(disk.free), size::binary(disk.size));
    match disk {
        Disk { read_only: true, .. } => bad(
            format!("{place} can only be read"),
            "nothing can be written, so no job starts (NODE-101)",
            "look into `dmesg` for what is wrong with the disk, then mount it for writing: `mount -o remount,rw`",
        ),
        Disk { free, .. } if *free < reserve => bad(
            found,
            "that is less than `disk_reserve`, so no job starts (NODE-101); jobs wait",
            "make room: `agentctl gc --all`; or lower `disk_reserve`, or set `state_dir` to a larger disk",
        ),
        Disk { files: Some(files), .. } if *files < FILES_LOW => {
            let found = format!("{} can still be made in {place}", count(*files, "file"));
            bad(
                found,
                "there is no room for more files, so no job starts (NODE-101); jobs wait",
                "remove files that nobody needs: `agentctl gc --all`; or set `state_dir` to a larger disk",
            )
        }
        Disk { free, .. } if *free < DISK_LOW => Finding::limited(
            "disk",
            found,
            "small jobs run; large environments and outputs do not fit, and below `disk_reserve` no job starts",
            "make room: `agentctl gc --all`; or set `state_dir` to a larger disk",
        ),
        Disk { .. } => Finding::good("disk", found, "there is room for code, environments and outputs"),
    }
}

#[allow(clippy::cast_precision_loss, reason = "shown with one digit after the point")]
fn clean_kill(machine: &Machine) -> Finding {
    if machine.at("proc/self/stat").exists() {
        return Finding::good(
            "clean kill",
            "every descendant of a job is found through its supervisor",
            "when a job ends, nothing it started stays behind, not even what detached itself",
        );
    }
    Finding::bad(
        "clean kill",
        "/proc is not mounted",
        "the processes of a job cannot be found",
        "mount it: `sudo mount -t proc proc /proc`",
    )
}

/// Which control groups are mounted, and what the groups the agent may make in them do for a job.
fn cgroups(machine: &Machine) -> Finding {
    let mounts = machine.read("proc/self/mounts").unwrap_or_default();
    let mounted = |kind: &str| mounts.lines().any(|line| line.split(' ').nth(2) == Some(kind));
    let version = match (mounted("cgroup"), mounted("cgroup2")) {
        (false, true) => "v2",
        (true, false) => "v1",
        (true, true) => "v1 and v2 mixed",
        (false, false) => {
            return Finding::limited(
                "cgroups",
                "none mounted",
                UNLIMITED,
                "mount them: `sudo mount -t cgroup2 none /sys/fs/cgroup`",
            );
        }
    };
    let systemd = machine.at("run/systemd/system").is_dir();
    let limits = ["memory", "pids"].map(|name| can_limit(machine, &mounts, name, systemd));
    limits_of(&if systemd { format!("{version}, through systemd") } else { version.to_owned() }, limits)
}

/// What the groups do for a job if they limit its memory and its processes, or not.
fn limits_of(by: &str, limits: [bool; 2]) -> Finding {
    match limits {
        [true, true] => Finding::good(
            "cgroups",
            by,
            "a job gets the memory it asked for and no more, and its processes are limited and killed together",
        ),
        [true, false] => Finding::limited(
            "cgroups",
            format!("{by}, memory only"),
            "a job gets the memory it asked for and no more, but may start processes until the machine has no numbers left",
            PASS_ON,
        ),
        [false, true] => Finding::limited(
            "cgroups",
            format!("{by}, processes only"),
            "the processes of a job are limited and killed together, but it may take all memory of the machine",
            PASS_ON,
        ),
        [false, false] => Finding::limited("cgroups", format!("{by}, without limits"), UNLIMITED, PASS_ON),
    }
}

/// How agentd gets the controllers with which it limits jobs.
const PASS_ON: &str = "run agentd as root or under systemd, or pass the controllers on to its group: `echo +memory +pids | sudo tee \
                       /sys/fs/cgroup/cgroup.subtree_control`";
const UNLIMITED: &str = "a job may take all memory and process numbers of the machine; it still ends cleanly, as a tree of processes";

/// Whether a group that limits `controller` can be made where this process is.
fn can_limit(machine: &Machine, mounts: &str, controller: &str, systemd: bool) -> bool {
    let has = |dir: &Path, file: &str| {
        let text = std::fs::read_to_string(dir.join(file)).unwrap_or_default();
        text.split_whitespace().any(|name| name == controller)
    };
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields.any(|mount| {
        let [_, at, kind, options, ..] = mount[..] else { return false };
        let at = machine.at(at.trim_start_matches('/'));
        match kind {
            "cgroup" if options.split(',').any(|option| option == controller) => {
                own_group(machine, controller).is_some_and(|group| is_writable(&at.join(group)))
            }
            // A scope of systemd has the controllers; below the own group only those that it passes on.
            "cgroup2" if systemd => has(&at, "cgroup.controllers"),
            "cgroup2" => own_group(machine, "").is_some_and(|group| {
                let own = at.join(&group);
                let passed = group.is_empty() || has(&own, "cgroup.subtree_control");
                is_writable(&own) && has(&own, "cgroup.controllers") && passed
            }),
            _ => false,
        }
    })
}

/// The group this process is in, below the mount of its hierarchy.
fn own_group(machine: &Machine, controller: &str) -> Option<String> {
    let groups = machine.read("proc/self/cgroup")?;
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        controllers.split(',').any(|name| name == controller).then(|| path.trim_start_matches('/').to_owned())
    })
}

fn is_writable(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
}

fn isolation(jobs: JobsRunAs) -> Finding {
    const TOPIC: &str = "isolation";
    match jobs {
        JobsRunAs::Users => Finding::good(
            TOPIC,
            "jobs of different users are apart; one network",
            "a job reaches files and processes of its user alone, and ports of everybody",
        ),
        JobsRunAs::One => Finding::limited(
            TOPIC,
            "all jobs run as one user, one network",
            "jobs see each other's files and processes: share it only among people who trust each other",
            "set `job_user: owner` or `per-run`, then `sudo systemctl restart agentd`",
        ),
        JobsRunAs::KeptOut => Finding::limited(
            TOPIC,
            "jobs run as the user of the daemon, without access to its state; one network",
            "a job can change your other files, and reach your other processes and ports: run here only what you \
             would run yourself",
            "for jobs of others install it for the machine: `sudo apt install ./agentd_*.deb ./agentctl_*.deb`",
        ),
        JobsRunAs::Daemon => Finding::limited(
            TOPIC,
            "jobs run as the user of the daemon; one file system, one network",
            "a job can change files of other jobs, shared environments and what the daemon keeps, and may leave \
             processes behind: run here only what you would run yourself",
            "let users make user namespaces, on Ubuntu `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`; the daemon's log says what refuses it (`jobs cannot be kept from its files`)",
        ),
    }
}

/// What is known of GPUs without the driver's library, which may hang; more is known once that was asked.
fn gpu(machine: &Machine) -> Finding {
    match gpus_of(machine) {
        0 if machine.at("dev/nvidiactl").exists() => {
            Finding::good("gpu", "a driver, but no GPU behind it", PROCESSORS_ONLY)
        }
        0 => Finding::good("gpu", "none", PROCESSORS_ONLY),
        count => Finding::limited(
            "gpu",
            format!("{count} behind the driver, which was not asked yet"),
            "jobs that ask for GPUs wait until the daemon has asked it",
            "give it a minute, then `agentctl doctor` again; `nvidia-smi` asks it now",
        ),
    }
}

const PROCESSORS_ONLY: &str = "jobs run on processors; those that ask for GPUs wait";
const GPUS_WAIT: &str = "jobs that ask for GPUs wait; all others run";

/// How many GPUs the kernel module has. The names of the directories are known without asking a GPU.
fn gpus_of(machine: &Machine) -> usize {
    machine.at("proc/driver/nvidia/gpus").read_dir().map_or(0, |gpus| gpus.flatten().count())
}

/// What the driver reported about the GPUs.
pub(crate) fn gpus(look: &Look) -> Finding {
    let limited = |found: String, fix: &str| Finding::limited("gpu", found, GPUS_WAIT, fix);
    match &look.driver {
        Driver::Absent => Finding::good("gpu", "none", PROCESSORS_ONLY),
        Driver::NotLoaded => limited(
            "the driver is installed, its kernel module is not loaded".to_owned(),
            "if there is a GPU: `modprobe nvidia`, or restart the machine; if there is none, all is well",
        ),
        Driver::Mismatch { detail } => limited(
            detail.clone(),
            "the driver was upgraded while it ran; restart the machine: `sudo reboot`",
        ),
        Driver::Failed { detail } => limited(
            format!("the driver does not work: {detail}"),
            "see what `nvidia-smi` and `dmesg` say; then `sudo reboot`, or install the driver again",
        ),
        Driver::Hung { after_s } => limited(
            format!("the driver did not answer for {after_s} s"),
            "look into `dmesg` for lines with `Xid` and reset the GPU they name, or restart the machine; \
             it is asked again by itself",
        ),
        Driver::Works { version, cuda } => works(&look.gpus, version, cuda),
    }
}

fn works(gpus: &[Seen], version: &str, cuda: &str) -> Finding {
    let mut driver = format!("driver {}", if version.is_empty() { "of unknown version" } else { version });
    if !cuda.is_empty() {
        driver += &format!(", CUDA {cuda}");
    }
    if gpus.is_empty() {
        return Finding::good("gpu", format!("{driver}, but no GPU behind it"), PROCESSORS_ONLY);
    }
    let mut models: Vec<(&str, usize)> = Vec::new();
    for gpu in gpus {
        let name = if gpu.name.is_empty() { "GPU" } else { &gpu.name };
        match models.iter_mut().find(|(model, _)| *model == name) {
            Some((_, count)) => *count += 1,
            None => models.push((name, 1)),
        }
    }
    let mut found = models.iter().map(|(model, count)| format!("{count} x {model}")).collect::<Vec<_>>();
    found.push(driver);
    let divided = gpus.iter().filter(|gpu| gpu.mig && gpu.broken.is_none());
    found
        .extend(divided.map(|gpu| format!("GPU {} in {}", gpu.index, count(gpu.parts.len() as u64, "part"))));
    let mut found = found.join(", ");
    let broken: Vec<&Seen> = gpus.iter().filter(|gpu| gpu.broken.is_some()).collect();
    for gpu in &broken {
        let error = gpu.xid.as_ref().filter(|xid| xid.is_fatal());
        let logged = error.map(|xid| format!(" (Xid {}: {})", xid.code, xid.detail)).unwrap_or_default();
        let why = gpu.broken.as_deref().unwrap_or_default();
        found += &format!("; GPU {} cannot be used: {why}{logged}", gpu.index);
    }
    match broken.len() {
        0 => Finding::good("gpu", found, "each is given to one job at a time, by its identifier"),
        all if all == gpus.len() => Finding::limited("gpu", found, GPUS_WAIT, MEND),
        _ => Finding::limited("gpu", found, "jobs are given the others", MEND),
    }
}

const MEND: &str = "look into `dmesg` for lines with `Xid`; reset the GPU (`nvidia-smi --gpu-reset -i N`) or \
                    restart the machine; if it comes back, have it replaced";

/// Whether jobs can run in containers; and with GPUs, when there are `gpus`.
fn docker_of(engine: Engine, gpus: usize) -> Finding {
    let limited = |found: &str, means: &str, fix: &str| Finding::limited("docker", found, means, fix);
    match engine {
        Engine::Answers { gpus: Some(false) } if gpus > 0 => limited(
            "answers, but cannot give GPUs to containers",
            "jobs that name an image run; those of them that ask for GPUs do not start",
            "install the NVIDIA container toolkit (`sudo apt install nvidia-container-toolkit`), then \
             `sudo nvidia-ctk runtime configure --runtime=docker` and `sudo systemctl restart docker`",
        ),
        Engine::Answers { .. } => {
            Finding::good("docker", "answers", "jobs can name an image, and run in containers")
        }
        Engine::Absent => limited(
            "not there",
            "jobs that name an image run elsewhere, or wait; all others run",
            "install Docker 20.10 or later: `sudo apt install docker.io`; or say with `docker_socket` where its engine listens",
        )
        .lacking(Capability::Containers),
        Engine::Denied => limited(
            "there, but not for this user",
            "jobs that name an image run elsewhere, or wait; all others run",
            "add the user of agentd to its group: `sudo usermod -aG docker agentd`, then `sudo systemctl restart agentd`; whoever is in that group can \
             become root on this machine",
        )
        .lacking(Capability::Containers),
        Engine::Silent => limited(
            "there, but does not answer",
            "jobs that name an image wait until it does; jobs in containers that run already go on",
            "see whether `docker ps` answers, and if it does not: `sudo systemctl restart docker`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use agent_model::gpu::Xid;
    use agent_model::node::Grade;

    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = Machine { root: root.path().to_owned() };
        (root, machine)
    }

    #[test]
    fn test_kernel_is_judged_by_its_numbers() {
        for (release, grade) in [
            ("5.15.0-91-generic", Grade::Good),
            ("6.1.0", Grade::Good),
            ("5.6.0", Grade::Good),
            ("5.4.0-1103-azure", Grade::Bad),
            ("4.19", Grade::Bad),
            ("", Grade::Bad),
        ] {
            assert_eq!(kernel(release).grade, grade, "{release}");
        }
    }

    #[test]
    fn test_disk_that_takes_no_job_is_told_with_its_reason() {
        let disk = Disk { size: 100 << 30, free: 10 << 30, files: Some(1 << 20), read_only: false };
        let judge = |disk: Disk, reserve| judge_disk(&disk, Path::new("/s"), reserve);
        assert_eq!(judge(Disk { ..disk }, 1 << 30).grade, Grade::Good);
        assert_eq!(judge(Disk { free: 4 << 30, ..disk }, 1 << 30).grade, Grade::Limited);
        assert_eq!(judge(Disk { files: None, ..disk }, 1 << 30).grade, Grade::Good);
        for (disk, found) in [
            (Disk { free: 1 << 29, ..disk }, "512 MiB of 100 GiB free for /s"),
            (Disk { files: Some(7), ..disk }, "7 files can still be made in /s"),
            (Disk { read_only: true, ..disk }, "/s can only be read"),
        ] {
            let judged = judge(disk, 1 << 30);
            assert_eq!((judged.grade, judged.found.as_str()), (Grade::Bad, found));
            assert!(judged.fix.is_some() && judged.means.contains("NODE-101"), "{judged:?}");
        }
    }

    #[test]
    fn test_cgroups_are_told_apart_by_what_they_limit() {
        let v1 = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n";
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        let both = format!("{v1}cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n");
        let own1 = "5:memory:/a\n4:pids:/\n0::/\n";
        let own2 = "0::/a\n";
        let dirs1 = [("sys/fs/cgroup/memory/a/x", ""), ("sys/fs/cgroup/pids/x", "")];
        let dirs2 = [
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory pids"),
            ("sys/fs/cgroup/a/cgroup.controllers", "cpu memory pids"),
            ("sys/fs/cgroup/a/cgroup.subtree_control", "memory pids"),
        ];
        let scopes = [dirs2[0], ("run/systemd/system/x", "")];
        for (mounts, own, files, found, grade) in [
            ("", own2, &[][..], "none mounted", Grade::Limited),
            (v1, own1, &dirs1[..], "v1", Grade::Good),
            (&both, own1, &dirs1[..], "v1 and v2 mixed", Grade::Good),
            (v1, own1, &dirs1[..1], "v1, memory only", Grade::Limited),
            (v1, own1, &dirs1[1..], "v1, processes only", Grade::Limited),
            (v2, own2, &dirs2[..], "v2", Grade::Good),
            (v2, own2, &dirs2[..2], "v2, without limits", Grade::Limited),
            (v2, own2, &scopes[..], "v2, through systemd", Grade::Good),
            (v2, "0::/gone\n", &dirs2[..1], "v2, without limits", Grade::Limited),
        ] {
            let known = [("proc/self/mounts", mounts), ("proc/self/cgroup", own)];
            let (_root, machine) = machine(&[&known[..], files].concat());
            let finding = cgroups(&machine);
            assert_eq!((finding.found.as_str(), finding.grade), (found, grade), "{files:?}");
        }
    }

    #[test]
    fn test_gpus_are_counted_without_asking_the_driver() {
        let (_root, none) = machine(&[]);
        assert_eq!(gpu(&none).found, "none");
        let (_root, driver) = machine(&[("dev/nvidiactl", "")]);
        assert_eq!(gpu(&driver).found, "a driver, but no GPU behind it");
        let gpus = ["0000:01:00.0", "0000:02:00.0"].map(|at| format!("proc/driver/nvidia/gpus/{at}/power"));
        let (_root, two) = machine(&gpus.each_ref().map(|path| (path.as_str(), "")));
        assert_eq!((gpus_of(&two), gpu(&two).grade), (2, Grade::Limited));
    }

    #[test]
    fn test_every_state_of_the_driver_says_what_becomes_of_jobs() {
        let detail = || "words".to_owned();
        let judged = |driver| gpus(&Look { driver, gpus: Vec::new() });
        for driver in [
            Driver::NotLoaded,
            Driver::Mismatch { detail: detail() },
            Driver::Failed { detail: detail() },
            Driver::Hung { after_s: 10 },
        ] {
            let judged = judged(driver);
            assert_eq!((judged.grade, judged.means.as_str()), (Grade::Limited, GPUS_WAIT));
            assert!(judged.fix.is_some(), "{judged:?}");
        }
        assert_eq!(judged(Driver::Absent).grade, Grade::Good);
        let empty = judged(Driver::Works { version: String::new(), cuda: String::new() });
        assert_eq!(empty.found, "driver of unknown version, but no GPU behind it");
    }

    #[test]
    fn test_gpu_that_cannot_be_used_is_named_with_its_last_error() {
        let xid = Xid { code: 79, at_us: 1, detail: "GPU has fallen off the bus".to_owned() };
        let broken =
            Seen { index: 1, broken: Some("it is lost".to_owned()), xid: Some(xid), ..Seen::default() };
        let whole = Seen { name: "NVIDIA A100".to_owned(), ..Seen::default() };
        let driver = Driver::Works { version: "550.1".to_owned(), cuda: "12.4".to_owned() };
        let judged = gpus(&Look { driver: driver.clone(), gpus: vec![whole, broken.clone()] });
        assert_eq!(
            judged.found,
            "1 x NVIDIA A100, 1 x GPU, driver 550.1, CUDA 12.4; GPU 1 cannot be used: it is lost (Xid 79: GPU has \
             fallen off the bus)"
        );
        assert_eq!((judged.grade, judged.means.as_str()), (Grade::Limited, "jobs are given the others"));
        assert_eq!(gpus(&Look { driver, gpus: vec![broken] }).means, GPUS_WAIT);
    }

    #[test]
    fn test_engine_is_judged_by_what_it_can_do_for_jobs() {
        for (engine, gpus, grade) in [
            (Engine::Answers { gpus: Some(false) }, 0, Grade::Good),
            (Engine::Answers { gpus: Some(false) }, 1, Grade::Limited),
            (Engine::Answers { gpus: Some(true) }, 1, Grade::Good),
            (Engine::Answers { gpus: None }, 1, Grade::Good),
            (Engine::Absent, 0, Grade::Limited),
            (Engine::Denied, 0, Grade::Limited),
            (Engine::Silent, 0, Grade::Limited),
        ] {
            let judged = docker_of(engine, gpus);
            assert_eq!((judged.grade, judged.fix.is_some()), (grade, grade == Grade::Limited), "{judged:?}");
            assert!(judged.means.contains("image"), "{judged:?}");
        }
    }

    #[test]
    fn test_machine_without_procfs_is_bad() {
        let (_root, empty) = machine(&[]);
        assert_eq!(clean_kill(&empty).grade, Grade::Bad);
        assert_eq!(init(&empty).found, "unknown, not systemd");
    }

    /// Every state that each topic can be in.
    fn every_finding() -> Vec<Finding> {
        let (_root, bare) = machine(&[]);
        let (_root, asked) = machine(&[("proc/driver/nvidia/gpus/a/power", "")]);
        let disk = Disk { size: 100 << 30, free: 10 << 30, files: Some(1 << 20), read_only: false };
        let detail = || "words".to_owned();
        let broken = Seen { broken: Some("it is lost".to_owned()), ..Seen::default() };
        let look = |driver, seen| gpus(&Look { driver, gpus: seen });
        let works = || Driver::Works { version: "550.1".to_owned(), cuda: String::new() };
        let python = |venv| python::Python { path: "/usr/bin/python3".into(), version: None, venv };
        let of = |mounts: &str| cgroups(&machine(&[("proc/self/mounts", mounts)]).1);
        let mut every = vec![
            kernel("4.19"),
            init(&bare),
            python_of(None),
            python_of(Some(python(Some(false)))),
            python_of(Some(python(None))),
            conda(Path::new("/nowhere")),
            disk_of(Path::new("/nowhere"), 0),
            clean_kill(&bare),
            of(""),
            of("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"),
            limits_of("v1", [true, false]),
            limits_of("v1", [false, true]),
            gpu(&bare),
            gpu(&asked),
            look(Driver::NotLoaded, vec![]),
            look(Driver::Mismatch { detail: detail() }, vec![]),
            look(Driver::Failed { detail: detail() }, vec![]),
            look(Driver::Hung { after_s: 10 }, vec![]),
            look(works(), vec![broken.clone()]),
            look(works(), vec![broken, Seen::default()]),
            docker_of(Engine::Answers { gpus: Some(false) }, 1),
            docker_of(Engine::Absent, 0),
            docker_of(Engine::Denied, 0),
            docker_of(Engine::Silent, 0),
        ];
        every.extend(
            [
                Disk { read_only: true, ..disk },
                Disk { files: Some(7), ..disk },
                disk,
                Disk { free: 4 << 30, ..disk },
            ]
            .map(|disk| judge_disk(&disk, Path::new("/s"), 1 << 30)),
        );
        every.push(judge_disk(&disk, Path::new("/s"), u64::MAX));
        every.push(unhelped("agent-spawn does not answer since 7 s".to_owned()));
        for jobs in [JobsRunAs::Daemon, JobsRunAs::KeptOut, JobsRunAs::One, JobsRunAs::Users] {
            every.extend([privileges(true, jobs), privileges(false, jobs), isolation(jobs)]);
        }
        every
    }

    #[test]
    fn test_every_finding_that_is_not_good_ends_in_a_command() {
        let every = every_finding();
        let mute: Vec<_> = every.iter().filter(|finding| !finding.ends_in_a_command()).collect();
        assert!(mute.is_empty(), "{mute:#?}");
    }

    #[test]
    fn test_topics_are_unique() {
        let (root, machine) = machine(&[]);
        let config = ProbeConfig {
            state_dir: root.path().to_owned(),
            sharing: crate::Sharing::Slots(1),
            path: String::new(),
            disk_reserve: 0,
            engine: root.path().join("agent-env"),
            docker: root.path().join("docker.sock"),
            jobs: JobsRunAs::Users,
            helper: || None,
            labels: Default::default(),
        };
        let mut topics: Vec<_> = all(&machine, &config).into_iter().map(|finding| finding.topic).collect();
        let count = topics.len();
        topics.sort();
        topics.dedup();
        assert_eq!(topics.len(), count);
    }
}
