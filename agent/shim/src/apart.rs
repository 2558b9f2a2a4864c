//! Isolation of a process from the others of the machine: its user, its rights, and its view of the file system.
//!
//! [`hide`] gives this process and its children mounts of their own; [`run_as`] changes the user for good and
//! executes a program; a supervisor that a helper started becomes the [`Assigned`] user. Everything that must be
//! privileged for a job or a builder is here and in [`sys`](crate::sys).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid};

use crate::record::Launch;
use crate::room::{self, BuilderRoom};
use crate::sys;
use crate::sys::User;
use crate::view::{self, View};

/// The first argument of a shim that becomes another program; who it is then, the [`BuilderRoom`] and the program are
/// next.
pub const AS: &str = "as";

/// In the place of a number: the user that the shim is.
pub const ITSELF: &str = "itself";

/// The first argument of a supervisor whose starter does not trust its directory; the order is next.
pub const ASSIGNED: &str = "--assigned";

/// The prefix of the name of each variable for a program that is started by [`run_as`], so that none affects the
/// processes that are root until then.
pub const FOR_PROGRAM: &str = "as:";

/// The variable with the working directory of that program, which is entered as its new user.
pub const WORKS_IN: &str = "as-in";

/// The variable with the number of the process that started it, with which it ends.
pub const STARTER: &str = "as-of";

/// The variable with the path of the gate that it waits at ([`pass`]).
pub const GATE: &str = "as-gate";

/// The variable with the number of files that the program may have open.
pub const FILES: &str = "as-files";

/// The users of a supervisor and of its job, whatever its directory contains. The supervisor is the user of the
/// daemon, so that nothing that the daemon put into the directory gives it more access than the daemon has; beside
/// that it has the capabilities to become the job's user and to end its processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assigned {
    /// The daemon's user and group.
    pub keeper: (u32, u32),
    /// The job's.
    pub user: User,
}

impl Assigned {
    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Option<Assigned> {
        let numbers =
            |text: &str| text.split(',').map(|word| word.parse().ok()).collect::<Option<Vec<u32>>>();
        let all = numbers(text)?;
        let [keeper, keeper_group, uid, gid, groups @ ..] = all.as_slice() else { return None };
        let user = User { uid: *uid, gid: *gid, groups: groups.to_vec() };
        Some(Assigned { keeper: (*keeper, *keeper_group), user })
    }

    /// Becomes the daemon's user. Root alone can, while it has one thread.
    pub fn enter(&self) -> io::Result<()> {
        let _ = sys::ask_for_oom_protection(); // told when it is tried again
        sys::become_with(self.keeper.0, self.keeper.1, sys::ON_MACHINE)?;
        // What is in `/proc` of this process is its own again: the job writes its score there.
        Ok(nix::sys::prctl::set_dumpable(true)?)
    }
}

impl fmt::Display for Assigned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let User { uid, gid, groups } = &self.user;
        write!(f, "{},{},{uid},{gid}", self.keeper.0, self.keeper.1)?;
        groups.iter().try_for_each(|group| write!(f, ",{group}"))
    }
}

/// The first kernel on which each `/proc` mount hides by itself; before, hiding was for the whole PID namespace.
const HIDES: (u32, u32) = (5, 8);

/// Gives this process, and what it starts from here on, mounts of its own: the layer of the job over its environment,
/// its `/tmp`, with an empty `/dev/shm` and a `/proc` that shows only processes of the same user, and a name for its
/// user, whose lists are kept in `dir`. Only root can. Returns what could not be done; that is left as it was.
pub fn hide(launch: &Launch, view: Option<&View>, dir: &Path) -> Vec<String> {
    let (tmp, user) = (launch.tmp.as_deref(), launch.user.as_ref());
    const NONE: Option<&str> = None;
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    // Later mounts of the machine are seen all the same.
    let own = unshare(CloneFlags::CLONE_NEWNS).and_then(|()| mount(NONE, "/", NONE, slave, NONE));
    if let Err(error) = own {
        return vec![format!("mounts of its own: {error}")];
    }
    // The first, because the others may cover what it needs.
    let layered = view.map(|view| ("an environment that the job can change", view::layer(view, user)));
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let hidden = || match kernel() >= HIDES {
        true => mount(Some("proc"), "/proc", Some("proc"), plain | MsFlags::MS_NOEXEC, Some("hidepid=2")),
        false => Err(nix::errno::Errno::ENOSYS),
    };
    let private = tmp.map(|tmp| {
        [
            ("a /tmp of its own", mount(Some(tmp), "/tmp", NONE, MsFlags::MS_BIND, NONE)),
            (
                "a /dev/shm of its own",
                mount(Some("shm"), "/dev/shm", Some("tmpfs"), plain, Some("mode=1777")),
            ),
            ("processes of others hidden", hidden()),
        ]
    });
    let private =
        private.into_iter().flatten().map(|(what, done)| (what, done.map_err(std::io::Error::from)));
    let nameless = user.filter(|_| launch.nameless);
    let listed = nameless.map(|user| ("a name of its own", be_named(user, &launch.env, dir)));
    let tried = layered.into_iter().chain(private).chain(listed);
    tried.filter_map(|(what, done)| Some(format!("{what}: {}", done.err()?))).collect()
}

/// Adds a user to the lists of users and groups that are seen from here on. Programs ask them who they are: `id`, `ssh`,
/// Open MPI, Spark.
fn be_named(user: &User, variables: &BTreeMap<String, String>, dir: &Path) -> io::Result<()> {
    const NONE: Option<&str> = None;
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
    let of = |name: &str| variables.get(name).map_or("", String::as_str);
    let (name, home) = (of("USER"), of("HOME"));
    if [name, home].iter().any(|text| text.is_empty() || text.contains([':', '\n'])) {
        return Ok(());
    }
    let User { uid, gid, .. } = user;
    let lists = [
        ("passwd", "/etc/passwd", format!("{name}:x:{uid}:{gid}::{home}:/bin/sh\n")),
        ("group", "/etc/group", format!("{name}:x:{gid}:\n")),
    ];
    for (file, place, own) in lists {
        let list = dir.join(file);
        std::fs::write(&list, own + &std::fs::read_to_string(place)?)?;
        std::fs::set_permissions(&list, Permissions::from_mode(0o644))?;
        mount(Some(&list), place, NONE, MsFlags::MS_BIND, NONE)?;
        mount(NONE, place, NONE, read_only, NONE)?;
    }
    Ok(())
}

/// Major and minor number of the running kernel.
pub fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.trim().parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// From here on, this process and those it starts may have so many files open, if they could have more.
pub fn allow_files(files: u64) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((now, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, files.min(now), most); // lowering it is always allowed
    }
}

/// From here on this process is killed when `starter`, which is its parent, ends: the thread that started it waits for
/// it as long. An error if that has ended already.
pub fn end_with(starter: i32) -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    match nix::unistd::getppid().as_raw() == starter {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::NotFound, "whoever started this has ended")),
    }
}

/// Waits at the gate: until whoever started this has limited the memory of this process and of what it will start. What
/// is read is the limit that each process has to have by itself, where they have none together. A gate that is gone is
/// open.
pub fn pass(gate: &Path) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let said = std::fs::read_to_string(gate).unwrap_or_default();
    if let Ok(each) = said.parse::<u64>()
        && let Ok((_, most)) = getrlimit(Resource::RLIMIT_DATA)
    {
        let _ = setrlimit(Resource::RLIMIT_DATA, each.min(most), each.min(most));
    }
}

/// Becomes `program` in this room, as the user and group of this number, with no other group, no capability and no way
/// to gain any; without a number, as the user that this process is. What it starts ends with it.
pub fn run_as(id: Option<u32>, room: &BuilderRoom, program: &mut Command) -> io::Result<Infallible> {
    use std::os::unix::process::CommandExt as _;
    room::enter(room)?;
    let Some(id) = id else { return Err(program.exec()) };
    sys::narrow_capabilities();
    nix::unistd::setgroups(&[])?;
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    nix::unistd::setresgid(gid, gid, gid)?;
    let ends = nix::sys::prctl::get_pdeathsig().ok().flatten();
    nix::unistd::setresuid(uid, uid, uid)?;
    // The kernel forgets it with the user.
    nix::sys::prctl::set_pdeathsig(ends)?;
    nix::sys::prctl::set_no_new_privs()?;
    sys::drop_capabilities()?;
    Err(program.exec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_an_order_is_read_as_it_was_written_and_not_otherwise() {
        for groups in [vec![], vec![4, 27]] {
            let order = Assigned { keeper: (990, 991), user: User { uid: 1000, gid: 100, groups } };
            assert_eq!(Assigned::parse(&order.to_string()), Some(order));
        }
        for text in ["", "1,2,3", "1,2,3,x", "1,2,3,4,", "-1,2,3,4", "1, 2,3,4"] {
            assert_eq!(Assigned::parse(text), None, "{text}");
        }
    }
}
