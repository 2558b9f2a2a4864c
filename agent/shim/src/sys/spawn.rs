//! The start of a program as a process that is in control groups from its first moment on.
//!
//! Hides: how a group is entered in each version, and how an error between fork and exec comes back.

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::fcntl::{OFlag, openat};
use nix::libc;
use nix::sys::stat::Mode;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

use super::{NOT_ENTERED, told_as};

/// The control groups that a process is in from its start on.
#[derive(Debug, Default)]
pub struct Entrances {
    /// The directory of a group of version 2, in which it is born.
    pub birth: Option<OwnedFd>,
    /// Files of other groups: a thread that writes `0` is in.
    pub files: Vec<OwnedFd>,
}

/// Starts `command` in these groups, and returns its number; for a process of one thread, whose child it is. To move a
/// process, the kernel waits until nobody on the machine forks, which takes 5 to 15 ms. A process that is born in a
/// group, or one thread that moves itself, waits for nobody.
pub fn spawn_in(groups: &Entrances, command: &mut Command) -> io::Result<i32> {
    let (mut outcome, tells) = io::pipe()?;
    let born = groups.birth.as_ref().and_then(|group| fork_into(group.as_fd()).ok());
    let child = match born {
        Some(child) => child,
        // SAFETY: one thread, so the child may do what this process may.
        None => match unsafe { fork()? } {
            ForkResult::Child => 0,
            ForkResult::Parent { child } => child.as_raw(),
        },
    };
    if child == 0 {
        let birth = groups.birth.as_ref().filter(|_| born.is_none());
        let error = match enter(birth, &groups.files) {
            Ok(()) => command.exec(),
            Err(error) => told_as(NOT_ENTERED, &error),
        };
        // An argument or a variable that holds a NUL byte never reaches the system.
        let number = error.raw_os_error().unwrap_or(libc::EINVAL);
        let _ = nix::unistd::write(&tells, &number.to_ne_bytes());
        // SAFETY: ends this process without running anything of its parent.
        unsafe { libc::_exit(127) }
    }
    drop(tells);
    let mut number = [0; 4];
    match outcome.read_exact(&mut number) {
        Ok(()) => {
            let _ = waitpid(Pid::from_raw(child), None); // it ends at once
            Err(io::Error::from_raw_os_error(i32::from_ne_bytes(number)))
        }
        Err(_) => Ok(child), // the pipe was closed when the program was executed
    }
}

/// Of the flags of `clone3`; the type that `libc` has it in is too narrow.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// Forks into a group of version 2; 0 is the child. Fails before Linux 5.7, and where a filter forbids it.
fn fork_into(group: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: all zeroes is what the call takes for "nothing".
    let mut order: libc::clone_args = unsafe { std::mem::zeroed() };
    order.flags = CLONE_INTO_CGROUP;
    order.exit_signal = libc::SIGCHLD as u64;
    order.cgroup = u64::try_from(group.as_raw_fd()).unwrap_or(u64::MAX);
    // SAFETY: like a fork of a process of one thread; the pointer is to a local of the stated size.
    let child = unsafe { libc::syscall(libc::SYS_clone3, &raw const order, size_of::<libc::clone_args>()) };
    if child < 0 { Err(io::Error::last_os_error()) } else { Ok(child as i32) }
}

/// Moves this process, which has one thread.
fn enter(group: Option<&OwnedFd>, files: &[OwnedFd]) -> io::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    let procs = group.map(|group| openat(group, "cgroup.procs", flags, Mode::empty()));
    for file in procs.transpose()?.iter().chain(files) {
        if nix::unistd::write(file, b"0")? != 1 {
            return Err(io::ErrorKind::WriteZero.into());
        }
    }
    Ok(())
}

#[allow(clippy::disallowed_methods, reason = "these are the processes that are started")]
#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use nix::sys::wait::WaitStatus;

    use super::super::failed_before;
    use super::*;

    #[test]
    fn test_where_no_process_can_be_born_it_moves_itself_and_errors_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let procs = dir.path().join("cgroup.procs");
        fs::write(&procs, "").unwrap();
        // No directory of a control group: the kernel refuses a birth there.
        let group = || Entrances { birth: Some(File::open(dir.path()).unwrap().into()), files: Vec::new() };
        let pid = Pid::from_raw(spawn_in(&group(), &mut Command::new("true")).unwrap());
        assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 0));
        assert_eq!(fs::read_to_string(&procs).unwrap(), "0");

        let error = spawn_in(&Entrances::default(), &mut Command::new("/no/such/program")).unwrap_err();
        assert_eq!((error.raw_os_error(), failed_before(&error)), (Some(libc::ENOENT), None));
        let error = spawn_in(&group(), Command::new("true").arg("a\0b")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        fs::remove_file(&procs).unwrap();
        let error = spawn_in(&group(), &mut Command::new("true")).unwrap_err();
        assert_eq!(failed_before(&error), Some(("enter the job's control groups", libc::ENOENT)));
    }
}
