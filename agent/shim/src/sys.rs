//! The few system calls that no safe library wraps. The only unsafe code of the workspace.
//!
//! Each function is safe to call: it takes owned or borrowed descriptors, passes no pointer that outlives
//! the call, and what runs between fork and exec is async-signal-safe.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use agent_model::ExitStatus;
use nix::libc;
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, signal, sigprocmask};
use nix::unistd::{Gid, Uid};

use crate::record::User;

/// A descriptor of the process that has this number now; it goes on meaning that process for ever.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed; a non-negative result is a new descriptor that nobody else owns.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as i32)) }
    }
}

/// Sends a signal to the process of a descriptor.
pub fn pidfd_send_signal(process: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    let no_info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the kernel accepts a null signal information and fills it in itself.
    let result =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal as i32, no_info, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives every signal its default effect, whatever was inherited, but for the two that would end a process
/// for a failed write: there the error is enough.
pub fn survive_failed_writes() {
    reset_signals();
    for number in [Signal::SIGPIPE, Signal::SIGXFSZ] {
        // SAFETY: no handler function is installed.
        let _ = unsafe { signal(number, SigHandler::SigIgn) };
    }
}

fn reset_signals() {
    for number in 1..=libc::SIGRTMAX() {
        // SAFETY: no handler function is installed. Those that cannot be changed answer with an error.
        unsafe { libc::signal(number, libc::SIG_DFL) };
    }
}

/// Added to the error number when the job's control groups could not be entered, to tell it from an error
/// of the program itself: only a number comes back from between fork and exec.
const NOT_ENTERED: i32 = 1 << 16;

/// The error number of why the job's control groups could not be entered, if that is what `error` says.
pub fn not_entered(error: &io::Error) -> Option<i32> {
    error.raw_os_error().filter(|number| *number >= NOT_ENTERED).map(|number| number - NOT_ENTERED)
}

/// Makes `command` start as a job must: in the control groups behind `doors`, in a session of its own, as
/// `user`, with default signals, the usual file mode mask, no way to gain privileges, and before the machine's own
/// processes when the kernel must end one for want of memory. In a container it loses what the container's first process
/// may do beyond others, whoever it runs as.
pub fn start_as_job(command: &mut Command, user: Option<User>, doors: Vec<OwnedFd>, container: bool) {
    let prepare = move || {
        for door in &doors {
            // SAFETY: the pointer is to a constant of the stated length.
            if unsafe { libc::write(door.as_raw_fd(), c"0".as_ptr().cast(), 1) } != 1 {
                let number = io::Error::last_os_error().raw_os_error().unwrap_or(0);
                return Err(io::Error::from_raw_os_error(NOT_ENTERED + number));
            }
        }
        nix::unistd::setsid()?;
        go_first_without_memory();
        if container {
            narrow_capabilities();
        }
        if let Some(user) = user {
            nix::unistd::setgroups(&[])?;
            nix::unistd::setgid(Gid::from_raw(user.gid))?;
            nix::unistd::setuid(Uid::from_raw(user.uid))?;
        }
        nix::sys::prctl::set_no_new_privs()?;
        if container {
            drop_capabilities()?;
        }
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
        reset_signals();
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
        Ok(())
    };
    // SAFETY: the closure makes system calls only: no allocation, no lock, no environment.
    unsafe { command.pre_exec(prepare) };
}

/// Leaves nothing that a program could gain. Who may not do that has nothing to gain either: no privileges come with a
/// program where new ones are forbidden.
fn narrow_capabilities() {
    for capability in 0..64 {
        // SAFETY: no pointer is passed; a capability that does not exist is an error.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            return;
        }
    }
}

/// Gives up every capability, which a process of user 0 would have kept.
fn drop_capabilities() -> io::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    let none = [0_u32; 6];
    // SAFETY: the pointers are to locals of the sizes that version 3 of the call reads: a version and a process number,
    // and twice three sets of 32.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Offers this process to the memory killer before logins and services: a job that takes all memory, a fork
/// bomb for example, must not take the machine with it. Raising one's own score is always allowed; where the
/// file cannot be opened, the usual score stays.
fn go_first_without_memory() {
    let score = c"300";
    // SAFETY: both pointers are to constants of the stated length; the descriptor is closed before return.
    unsafe {
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, score.as_ptr().cast(), 3);
            libc::close(fd);
        }
    }
}

/// Asks the kernel to end others first when memory runs out. Only who may lower the score can have that.
pub fn ask_for_oom_protection() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-998")
}

/// What the children of this process are doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Children {
    /// The one with this number ended so, and was reaped.
    Ended(i32, ExitStatus),
    /// There are some, and none has ended.
    Running,
    /// There are none.
    None,
}

/// Reaps one child. Real-time signals, which the safe wrappers refuse, are told like any other.
pub fn reap() -> Children {
    loop {
        let mut status = 0;
        // SAFETY: the pointer is to a local of the right type.
        match unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) } {
            0 => return Children::Running,
            pid if pid > 0 && libc::WIFEXITED(status) => {
                return Children::Ended(pid, ExitStatus::Code(libc::WEXITSTATUS(status)));
            }
            pid if pid > 0 && libc::WIFSIGNALED(status) => {
                return Children::Ended(pid, ExitStatus::Signal(libc::WTERMSIG(status)));
            }
            pid if pid < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted => {
                return Children::None;
            }
            _ => {}
        }
    }
}
