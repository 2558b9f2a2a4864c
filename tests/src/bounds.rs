//! Bounds a machine may set to what runs on it: a small file system, a control group. Each is gone with its test.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use crate::fleet::Daemon;
use crate::{signal, within};

/// A control group of one hierarchy, gone with the test.
#[derive(Debug)]
pub struct Group(PathBuf);

impl Group {
    /// Makes one with this limit; `None` on a machine that has no such hierarchy.
    pub fn new(hierarchy: &str, limit: (&str, &str)) -> Option<Group> {
        let top = Path::new("/sys/fs/cgroup");
        let parent = match hierarchy {
            _ if unified() => top.to_owned(),
            "memory" => top.join(hierarchy).join(own_group("memory")),
            other => top.join(other),
        };
        let path = parent.join(format!("faults-{}-{}", std::process::id(), crate::witness::boottime()));
        fs::create_dir(&path).ok()?;
        let group = Group(path);
        fs::write(group.0.join(limit.0), limit.1).ok()?;
        Some(group)
    }

    /// What one of its files says; 0 when it says no number.
    pub fn number(&self, file: &str) -> u64 {
        fs::read_to_string(self.0.join(file)).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// What its `memory.stat` says of a kind of memory.
    pub fn memory(&self, kind: &str) -> u64 {
        let text = fs::read_to_string(self.0.join("memory.stat")).unwrap_or_default();
        let said = text.lines().find_map(|line| line.strip_prefix(kind)?.trim().parse().ok());
        said.unwrap_or(0)
    }

    /// Sets a limit; `false` when the kernel refuses it, as one below what is used.
    pub fn limit(&self, file: &str, to: &str) -> bool {
        fs::write(self.0.join(file), to).is_ok()
    }

    /// Puts a process into it.
    pub fn take(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("a process of one's own can be moved");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = within(Duration::from_secs(5), || {
            let text = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
            text.lines().filter_map(|line| line.parse().ok()).for_each(|pid| signal(pid, Signal::KILL));
            fn remove(dir: &Path) {
                let inner = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
                inner.filter(|path| path.is_dir()).for_each(|path| remove(&path));
                let _ = fs::remove_dir(dir);
            }
            remove(&self.0);
            (!self.0.exists()).then_some(())
        });
    }
}

/// Whether the machine has the one hierarchy of version 2, where files have other names.
pub fn unified() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

/// The group of this process in one hierarchy, without its first `/`.
fn own_group(hierarchy: &str) -> String {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        (fields.next()? == hierarchy)
            .then(|| fields.next().map(|path| path.trim_start_matches('/').to_owned()))?
    };
    text.lines().find_map(of).unwrap_or_default()
}

/// A small file system in the place of a daemon's state directory, gone with the test.
#[derive(Debug)]
pub struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Mounts one with these options of tmpfs.
    pub fn mount(options: &str) -> SmallDisk {
        let dir = tempfile::Builder::new().prefix("faults-disk-").tempdir().expect("a directory");
        let path = std::ffi::CString::new(dir.path().display().to_string()).expect("a path");
        let options = std::ffi::CString::new(options).expect("options");
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", path.as_c_str(), "tmpfs", flags, Some(options.as_c_str()))
            .expect("mounting a small file system needs root");
        SmallDisk(dir)
    }

    /// The state of this daemon is there from now on.
    pub fn hold(&self, daemon: &Daemon) {
        let state = daemon.state();
        fs::create_dir_all(state.parent().expect("a home")).expect("a home");
        let _ = fs::remove_dir(&state);
        fs::set_permissions(self.0.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .expect("a mode");
        std::os::unix::fs::symlink(self.0.path(), &state).expect("a link");
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Nothing more is written there.
    pub fn make_read_only(&self) {
        rustix::mount::mount_remount(self.path(), rustix::mount::MountFlags::RDONLY, "")
            .expect("remounting needs root");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}
