//! What can become scarce under a daemon, how that is done to one that runs, and how it ends.
//!
//! It is done for real: by a limit of the kernel, a full file system, or calls that wait. A daemon is made with what
//! its scarcity needs ([`Bed::new`]); then it can be made scarce and plenty again as often as wanted.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use agent_proto::v1;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_tests::bounds::{Group, SmallDisk, unified};
use agent_tests::client::{Client, runtime};
use agent_tests::fleet::{Fleet, Setup};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};

/// A resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Means {
    Descriptors,
    Memory,
    Processes,
    Inodes,
    Bytes,
    Threads,
    Entropy,
    /// Of files, for programs that want to hear of changes.
    Watches,
    Namespaces,
}

/// Descriptors a daemon may open beyond those it has.
const SPARE_DESCRIPTORS: u64 = 3;
/// Descriptors of a daemon that is started while they are scarce.
const DESCRIPTORS_AT_START: u64 = 24;
/// Memory a group may have beyond what its processes hold.
const SPARE_MEMORY: u64 = 3 << 20;
/// Calls that wait at a time: more than a daemon has threads for what blocks.
const WAITING_CALLS: usize = 700;

/// What the kernel gives each user of something that is not scarce.
const PLENTY: u64 = 10_000;

impl Means {
    /// What a message may call it; one of these is enough.
    pub(crate) fn names(self) -> &'static [&'static str] {
        match self {
            Means::Descriptors => &["too many open files", "descriptor"],
            Means::Memory => &["memory"],
            Means::Processes => &["resource temporarily unavailable", "process", "thread"],
            Means::Inodes | Means::Bytes => {
                &["no space left", "no storage space", "disk is full", "disk of", "room"]
            }
            Means::Threads => &["in time", "deadline", "timed out", "takes too long"],
            Means::Entropy => &["random"],
            Means::Watches => &["too many open files", "inotify", "watch"],
            Means::Namespaces => &["no space left", "namespace"],
        }
    }

    /// The limits of the kernel that are set for it, where it is a number for each user: those of a namespace of users.
    fn counted(self) -> &'static [&'static str] {
        match self {
            Means::Watches => &["max_inotify_instances", "max_inotify_watches"],
            Means::Namespaces => &["max_user_namespaces", "max_mnt_namespaces"],
            _ => &[],
        }
    }
}

/// One box, controller and node, that something can be made scarce for.
#[derive(Debug)]
pub(crate) struct Bed {
    pub(crate) fleet: Fleet,
    pub(crate) means: Means,
    disk: Option<SmallDisk>,
    group: Option<Group>,
    filler: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
    waiting: Vec<tokio::task::AbortHandle>,
    limit: Option<Rlimit>,
}

impl Bed {
    /// One that runs and has plenty.
    pub(crate) fn new(means: Means) -> Bed {
        let mut fleet = Fleet::new(&Setup { slots: 5, ..Setup::default() });
        fleet.controller.set("AGENTD_DISK_RESERVE", "8m"); // it counts more than the file
        let disk = match means {
            Means::Inodes => Some(SmallDisk::mount("size=512m,nr_inodes=12000")),
            Means::Bytes => Some(SmallDisk::mount("size=192m")),
            _ => None,
        };
        if let Some(disk) = &disk {
            disk.hold(&fleet.controller);
        }
        let limit = |v1: &'static str, v2: &'static str| if unified() { v2 } else { v1 };
        let group = match means {
            Means::Memory => {
                Some(("memory", limit("memory.limit_in_bytes", "memory.max"), limit("-1", "max")))
            }
            Means::Processes => Some(("pids", "pids.max", "max")),
            _ => None,
        };
        let group = group.map(|(hierarchy, file, plenty)| {
            Group::new(hierarchy, (file, plenty)).expect("the machine has control groups")
        });
        if matches!(means, Means::Threads | Means::Entropy) {
            let (below, home) = (format!("{}/", fleet.controller.state().display()), fleet.home().to_owned());
            fleet.controller.set("LD_PRELOAD", &library().display().to_string());
            fleet.controller.set("HOLD_BELOW", &below);
            fleet.controller.set("HOLD_OPENS", &home.join("hold-opens").display().to_string());
            fleet.controller.set("HOLD_RANDOM", &home.join("hold-random").display().to_string());
        }
        if !means.counted().is_empty() {
            fleet.controller.start_by(&["unshare", "--user", "--map-root-user"]);
        }
        let mut bed = Bed { fleet, means, disk, group, filler: None, waiting: Vec::new(), limit: None };
        bed.spawn();
        bed.fleet.ready();
        bed
    }

    /// Starts the daemon, within what it is bound by.
    pub(crate) fn spawn(&mut self) {
        self.fleet.controller.spawn();
        let pid = self.fleet.controller.pid();
        if let Some(group) = &self.group {
            group.take(pid);
        }
        if self.limit.is_some() {
            set_descriptors(pid, DESCRIPTORS_AT_START, Some(DESCRIPTORS_AT_START));
        }
    }

    /// Makes it scarce; `log` is one that can be read.
    pub(crate) fn squeeze(&mut self, log: &str) {
        let (pid, home) = (self.fleet.controller.pid(), self.fleet.home().to_owned());
        match self.means {
            Means::Descriptors => {
                let open = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count) as u64;
                let hard = getrlimit(Resource::Nofile).maximum;
                self.limit = Some(set_descriptors(pid, open + SPARE_DESCRIPTORS, hard));
            }
            Means::Memory => self.bound_memory(),
            Means::Processes => {
                let group = self.group.as_ref().expect("it is made with one");
                group.limit("pids.max", &(group.number("pids.current") + 1).to_string());
            }
            Means::Inodes | Means::Bytes => self.fill(),
            Means::Threads => {
                fs::write(home.join("hold-opens"), "").expect("a file");
                self.waiting = wait_for_logs(&self.fleet.client, log);
            }
            Means::Entropy => fs::write(home.join("hold-random"), "").expect("a file"),
            Means::Watches | Means::Namespaces => self.count(0),
        }
    }

    /// Sets the limits of the kernel that hold for the daemon's own namespace of users.
    #[allow(clippy::disallowed_methods, reason = "does what an administrator does")]
    fn count(&self, most: u64) {
        let pid = self.fleet.controller.pid();
        let files = self.means.counted().iter().map(|name| format!("echo {most} >/proc/sys/user/{name}"));
        let script = files.collect::<Vec<_>>().join("; ");
        if pid != 0 && !script.is_empty() {
            let mut enter = std::process::Command::new("nsenter");
            enter.args([
                "--target",
                &pid.to_string(),
                "--user",
                "--preserve-credentials",
                "sh",
                "-c",
                &script,
            ]);
            let set = enter.status().expect("nsenter starts");
            assert!(set.success() || self.fleet.controller.pid() != pid, "the limits cannot be set");
        }
    }

    /// The lowest limit the kernel takes now.
    fn bound_memory(&self) {
        let group = self.group.as_ref().expect("it is made with one");
        let (kinds, file) = match unified() {
            true => (["anon ", "kernel "], "memory.max"),
            false => (["total_rss ", "total_unevictable "], "memory.limit_in_bytes"),
        };
        let kernel = group.number("memory.kmem.usage_in_bytes");
        let held: u64 = kinds.iter().map(|kind| group.memory(kind)).sum::<u64>() + kernel;
        let limits = (0..64).map(|step| held + SPARE_MEMORY + (step << 20));
        limits.into_iter().find(|limit| group.limit(file, &limit.to_string()));
    }

    /// Takes what is left on the disk, and what is given back.
    fn fill(&mut self) {
        let dir = self.disk.as_ref().expect("it is made with one").path().join("filler");
        fs::create_dir_all(&dir).expect("a directory");
        let (over, inodes) = (Arc::new(AtomicBool::new(false)), self.means == Means::Inodes);
        let (fill, full) = (Arc::clone(&over), std::sync::mpsc::channel());
        let filler = std::thread::spawn(move || {
            let mut number = 0;
            while !fill.load(Ordering::Relaxed) {
                let path = dir.join(number.to_string());
                let more = match inodes {
                    true => fs::write(path, ""),
                    false => fs::File::create(path).and_then(|mut file| file.write_all(&[7; 1 << 16])),
                };
                number += 1;
                if more.is_err() {
                    let _ = full.0.send(());
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            let _ = fs::remove_dir_all(dir);
        });
        full.1.recv().expect("it fills");
        self.filler = Some((over, filler));
    }

    /// Whether the daemon still runs; one that the kernel ended for want of memory is started again, as a service
    /// manager does.
    pub(crate) fn lives(&mut self) -> Result<String, String> {
        let Some(status) = self.fleet.controller.ended() else { return Ok("alive".into()) };
        if self.means != Means::Memory || status.signal() != Some(Signal::KILL.as_raw()) {
            return Err(format!("the daemon ended with {status}"));
        }
        self.fleet.controller.kill();
        self.release();
        self.spawn();
        Ok("ended by the kernel, started again".into())
    }

    /// There is plenty again.
    pub(crate) fn release(&mut self) {
        if let Some(limit) = self.limit.take() {
            let pid = Pid::from_raw(self.fleet.controller.pid().cast_signed());
            let _ = prlimit(pid, Resource::Nofile, limit); // it may have ended
        }
        if let Some((over, filler)) = self.filler.take() {
            over.store(true, Ordering::Relaxed);
            filler.join().expect("it does not panic");
        }
        if let Some(group) = &self.group {
            let (file, plenty) = match (self.means, unified()) {
                (Means::Memory, false) => ("memory.limit_in_bytes", "-1"),
                (Means::Memory, true) => ("memory.max", "max"),
                _ => ("pids.max", "max"),
            };
            assert!(group.limit(file, plenty), "the limit stays");
        }
        self.count(PLENTY);
        for name in ["hold-opens", "hold-random"] {
            let _ = fs::remove_file(self.fleet.home().join(name));
        }
        self.waiting.drain(..).for_each(|task| task.abort());
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.release();
    }
}

/// Lets a process have so many descriptors, and raise that so far; what it might have before.
fn set_descriptors(pid: u32, number: u64, hard: Option<u64>) -> Rlimit {
    let limit = Rlimit { current: Some(number), maximum: hard };
    prlimit(Pid::from_raw(pid.cast_signed()), Resource::Nofile, limit).expect("a process of one's own")
}

/// Asks for a log so often that no thread is left.
fn wait_for_logs(client: &Client, job: &str) -> Vec<tokio::task::AbortHandle> {
    let _inside = runtime().enter();
    let read = |channel: tonic::transport::Channel| {
        let request = v1::ReadLogRequest { job: job.to_owned(), stream: "job".into(), ..Default::default() };
        async move {
            if let Ok(chunks) = TelemetryClient::new(channel).read_log(request).await {
                let mut chunks = chunks.into_inner();
                while chunks.message().await.is_ok_and(|chunk| chunk.is_some()) {}
            }
        }
    };
    // A connection carries so many calls at a time.
    let channels: Vec<_> = (0..WAITING_CALLS / 50).map(|_| client.channel()).collect();
    let calls = channels.iter().cycle().take(WAITING_CALLS);
    calls.map(|channel| runtime().spawn(read(channel.clone())).abort_handle()).collect()
}

/// The library of `hold.c`, built once.
#[allow(clippy::disallowed_methods, reason = "builds what the daemon is to load")]
fn library() -> &'static Path {
    static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let (source, path) = (dir.path().join("hold.c"), dir.path().join("hold.so"));
        fs::write(&source, include_str!("hold.c")).expect("a file");
        let mut cc = std::process::Command::new("cc");
        let built = cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&path).arg(&source).status();
        assert!(built.expect("cc starts").success(), "hold.c does not build");
        (dir, path)
    });
    path
}
