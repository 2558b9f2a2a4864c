//! The few system calls that no safe library wraps. The only unsafe code of the workspace.
//!
//! Each function is safe to call: it takes owned or borrowed descriptors, passes no pointer that outlives
//! the call, and what runs between fork and exec is async-signal-safe, or says that it is for a process of one thread.

pub(crate) mod bpf;
mod spawn;

use std::ffi::{CStr, CString};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use agent_model::ExitStatus;
use nix::libc;
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, signal, sigprocmask};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::{Gid, Uid};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use serde::{Deserialize, Serialize};

pub use self::spawn::{Entrances, spawn_in};
use crate::session::TerminalSize;

/// A user and its groups, by number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Group number.
    pub gid: u32,
    /// The other groups it belongs to.
    #[serde(default)]
    pub groups: Vec<u32>,
}

impl User {
    /// This process's user.
    pub fn own() -> User {
        User {
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
            groups: Vec::new(),
        }
    }
}

/// A descriptor of the process that has this number now; it refers to that process for ever.
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

/// Sends a descriptor through a socket, with one byte.
pub fn send_descriptor(socket: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    send_message(socket, b"d", &[descriptor])
}

/// Receives one descriptor through a socket; no program that this process starts inherits it.
pub fn receive_descriptor(socket: impl AsFd) -> io::Result<OwnedFd> {
    let descriptor =
        receive_message(socket.as_fd(), 1)?.and_then(|(_, descriptors)| descriptors.into_iter().next());
    descriptor.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Sends one message through a socket that keeps message boundaries, with these descriptors.
pub fn send_message(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<i32> = descriptors.iter().map(|descriptor| descriptor.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Takes the next connection of a listening socket.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let raw = nix::sys::socket::accept4(listener.as_raw_fd(), nix::sys::socket::SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: the kernel made it for this call, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// The most descriptors in a message.
pub const MOST_DESCRIPTORS: usize = 3;

/// Receives one message from such a socket: its bytes and descriptors, which no started program inherits. `None` when
/// the other side is gone. A message that is longer than `most`, or has more descriptors, is an error; whatever came with
/// it has an owner first, and is closed with that.
pub fn receive_message(socket: BorrowedFd<'_>, most: usize) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; most];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let message = rustix::net::recvmsg(socket, &mut parts, &mut rights, RecvFlags::CMSG_CLOEXEC)?;
    let of_part = |part| match part {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    };
    let descriptors: Vec<OwnedFd> = rights.drain().filter_map(of_part).flatten().collect();
    let is_cut = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    if is_cut || descriptors.len() > MOST_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.truncate(message.bytes);
    Ok((message.bytes > 0).then_some((bytes, descriptors)))
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
/// The same for its view of the files.
const NO_VIEW: i32 = 2 << 16;

fn told_as(step: i32, error: &io::Error) -> io::Error {
    io::Error::from_raw_os_error(step + error.raw_os_error().unwrap_or(0))
}

/// The step before the program that failed, if `error` is of one, and its error number.
pub fn failed_before(error: &io::Error) -> Option<(&'static str, i32)> {
    match error.raw_os_error()? {
        number @ NO_VIEW.. => Some(("give the job its own view of files", number - NO_VIEW)),
        number @ NOT_ENTERED.. => Some(("enter the job's control groups", number - NOT_ENTERED)),
        _ => None,
    }
}

/// A program that is started beside the command of a job, in the same surroundings.
#[derive(Debug)]
pub struct Beside {
    /// Its arguments, the first of which is its path.
    pub argv: Vec<CString>,
    /// All its variables.
    pub env: Vec<CString>,
    /// Its standard input, to which its number is written first.
    pub socket: OwnedFd,
}

impl Beside {
    /// Starts it as a child of whoever takes in orphans, so that the command has no child that it does not know.
    /// Between fork and exec of a process of one thread. Without it the command runs as well.
    fn start(&self) {
        // SAFETY: one thread; the children use nothing that another one could have held.
        match unsafe { nix::unistd::fork() } {
            Ok(nix::unistd::ForkResult::Parent { child }) => {
                let _ = nix::sys::wait::waitpid(child, None); // it ends at once
            }
            Ok(nix::unistd::ForkResult::Child) => {
                // No signal to the group of the command reaches it.
                let _ = nix::unistd::setsid();
                // SAFETY: likewise.
                if matches!(unsafe { nix::unistd::fork() }, Ok(nix::unistd::ForkResult::Child)) {
                    let _ = self.execute();
                }
                // SAFETY: ends this process without running anything of it.
                unsafe { libc::_exit(0) }
            }
            Err(_) => {}
        }
    }

    fn execute(&self) -> nix::Result<()> {
        use nix::fcntl::{OFlag, open};
        use nix::sys::stat::Mode;
        let none = open(c"/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
        nix::unistd::dup2_stdout(&none)?;
        nix::unistd::dup2_stderr(&none)?;
        nix::unistd::dup2_stdin(&self.socket)?;
        nix::unistd::write(&self.socket, &std::process::id().to_ne_bytes())?;
        let program = self.argv.first().map_or(c"", CString::as_c_str);
        nix::unistd::execve::<&CStr, &CStr>(
            program,
            &self.argv.iter().map(CString::as_c_str).collect::<Vec<_>>(),
            &self.env.iter().map(CString::as_c_str).collect::<Vec<_>>(),
        )?;
        Ok(())
    }
}

/// Makes `command` lead a session of its own, whose terminal is its standard input if it has one.
pub fn lead_session(command: &mut Command, terminal: bool) {
    let prepare = move || {
        nix::unistd::setsid()?;
        // SAFETY: the argument is no pointer.
        if terminal && unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only.
    unsafe { command.pre_exec(prepare) };
}

/// Tells a terminal its size.
pub fn set_terminal_size(terminal: BorrowedFd<'_>, size: TerminalSize) -> io::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the pointer is to a local of the right type.
    match unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What a job enters before its command: its view of the files, and its working directory.
pub type Entering = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

/// Makes `command` start as a job must: in a session of its own, as `user` with its groups alone, with default signals,
/// the usual file mode mask, no capability in any set, no way to gain privileges, and before the machine's own processes
/// when the kernel must end one for want of memory. A job that runs as root on the machine itself keeps its
/// capabilities. What it must enter itself, `enter` does. What is started `beside` it has all of that, too.
pub fn start_as_job(
    command: &mut Command,
    user: Option<User>,
    container: bool,
    enter: Option<Entering>,
    beside: Option<Beside>,
) {
    let groups: Vec<Gid> =
        user.iter().flat_map(|user| &user.groups).map(|group| Gid::from_raw(*group)).collect();
    let user = user.map(|user| (Uid::from_raw(user.uid), Gid::from_raw(user.gid)));
    let uid = user.map_or_else(nix::unistd::geteuid, |(uid, _)| uid);
    let gives_up = container || !uid.is_root();
    let prepare = move || {
        nix::unistd::setsid()?;
        if container {
            // Nobody may inspect the supervisor. The program may be inspected, and writes its own score.
            let _ = nix::sys::prctl::set_dumpable(true);
        }
        go_first_without_memory();
        if gives_up {
            narrow_capabilities();
        }
        if let Some((uid, gid)) = user {
            nix::unistd::setgroups(&groups)?;
            nix::unistd::setresgid(gid, gid, gid)?;
            nix::unistd::setresuid(uid, uid, uid)?;
        }
        if let Some(enter) = &enter {
            enter().map_err(|error| told_as(NO_VIEW, &error))?;
        }
        nix::sys::prctl::set_no_new_privs()?;
        if gives_up {
            drop_capabilities()?;
        }
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
        reset_signals();
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
        if let Some(beside) = &beside {
            beside.start();
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only: no allocation, no lock, no environment. Entering a view allocates,
    // which the child of a process of one thread may do.
    unsafe { command.pre_exec(prepare) };
}

/// Continues as the second process of a PID namespace of its own, where the machine allows that: when it ends, all
/// that it started ends with it. The first process waits for it and ends as it ends, and so does the caller, to which
/// this never returns. Without a namespace the caller waits for it, and then ends what it left. For a process of one
/// thread.
#[allow(
    clippy::exit,
    clippy::disallowed_methods,
    reason = "each of the processes ends where the next one goes on"
)]
pub(crate) fn enter_own_processes(end_left: fn()) -> io::Result<()> {
    let apart = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWPID).is_ok();
    if !apart {
        nix::sys::prctl::set_child_subreaper(true)?;
    }
    // The first fork makes the first process of the namespace, which the kernel would let no signal end.
    for _ in 0..if apart { 2 } else { 1 } {
        // SAFETY: one thread; the child uses nothing that another one could have held.
        match unsafe { nix::unistd::fork()? } {
            nix::unistd::ForkResult::Child => nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?,
            nix::unistd::ForkResult::Parent { child } => {
                let code = await_end(child.as_raw());
                if !apart {
                    end_left();
                }
                std::process::exit(code)
            }
        }
    }
    Ok(())
}

/// The exit code of a child, as a shell reports it; other children are reaped meanwhile.
fn await_end(child: i32) -> i32 {
    loop {
        let mut status = 0;
        // SAFETY: the pointer is to a local of the right type.
        match unsafe { libc::waitpid(-1, &raw mut status, 0) } {
            pid if pid == child && libc::WIFEXITED(status) => return libc::WEXITSTATUS(status),
            pid if pid == child && libc::WIFSIGNALED(status) => return 128 + libc::WTERMSIG(status),
            pid if pid < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted => return 70,
            _ => {}
        }
    }
}

/// Empties the capability bounding set, so that no program can gain any. A process that may not do that cannot gain
/// any either: programs give no privileges where new ones are forbidden.
pub(crate) fn narrow_capabilities() {
    for capability in 0..64 {
        // SAFETY: no pointer is passed; a capability that does not exist is an error.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            return;
        }
    }
}

/// Gives up every capability, which a process of user 0 would have kept, and those it would pass on.
pub(crate) fn drop_capabilities() -> io::Result<()> {
    // SAFETY: no pointer is passed; kernels before 4.3 have no such set.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    set_capabilities(0)
}

/// Capabilities, one bit each.
const CHOWN: u32 = 1 << 0;
const DAC_OVERRIDE: u32 = 1 << 1;
const FOWNER: u32 = 1 << 3;
const KILL: u32 = 1 << 5;
const SETGID: u32 = 1 << 6;
const SETUID: u32 = 1 << 7;
const SETPCAP: u32 = 1 << 8;
const SYS_PTRACE: u32 = 1 << 19;
const SYS_ADMIN: u32 = 1 << 21;
const SYS_RESOURCE: u32 = 1 << 24;

/// The capabilities that a supervisor in a container needs.
pub const IN_CONTAINER: u32 = KILL | SETGID | SETUID | SETPCAP;
/// Those of one on the machine: also to mount, to see processes of others, and to be spared when memory runs out.
pub const ON_MACHINE: u32 = IN_CONTAINER | SYS_PTRACE | SYS_ADMIN | SYS_RESOURCE;
/// Those with which an overlay acts on the files of its layers; not in effect but for that.
const IN_OVERLAY: u32 = CHOWN | DAC_OVERRIDE | FOWNER;

/// Keeps only the capabilities to end the processes of others, and to see them where `/proc` hides them. A process
/// without capabilities has nothing to give up.
pub fn keep_only_kill() -> io::Result<()> {
    let has = capabilities()?;
    if has == 0 {
        return Ok(());
    }
    narrow_capabilities();
    set_capabilities(has & (KILL | SYS_PTRACE))
}

/// Becomes a user without its other groups, and keeps these capabilities, which only root can do; on the machine those
/// of [`with_every_capability`] as well. For a process of one thread. No process with fewer capabilities can inspect it,
/// not even one of the same user.
pub fn become_with(uid: u32, gid: u32, keep: u32) -> io::Result<()> {
    nix::sys::prctl::set_keepcaps(true)?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)?;
    let permitted = capabilities_permitted()?;
    let reserve = if keep & SYS_ADMIN == 0 { 0 } else { IN_OVERLAY };
    set_capability_sets(keep & permitted, (keep | reserve) & permitted)
}

/// Runs `act` with all capabilities in effect that this process may have. For a process of one thread.
pub(crate) fn with_every_capability<T>(act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let (usual, permitted) = (capabilities()?, capabilities_permitted()?);
    set_capability_sets(permitted, permitted)?;
    let done = act();
    set_capability_sets(usual, permitted)?;
    done
}

/// The capabilities in effect, the lower 32.
fn capabilities() -> io::Result<u32> {
    Ok(capability_sets()?[0])
}

fn capabilities_permitted() -> io::Result<u32> {
    Ok(capability_sets()?[1])
}

const VERSION_3: u32 = 0x2008_0522;

/// Effective, permitted and inheritable, the lower 32 first.
fn capability_sets() -> io::Result<[u32; 6]> {
    let header = [VERSION_3, 0];
    let mut sets = [0_u32; 6];
    // SAFETY: the pointers are to locals of the sizes that version 3 of the call reads and writes.
    let result = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(sets) }
}

fn set_capabilities(wanted: u32) -> io::Result<()> {
    set_capability_sets(wanted, wanted)
}

fn set_capability_sets(effective: u32, permitted: u32) -> io::Result<()> {
    let header = [VERSION_3, 0];
    let sets = [effective, permitted, 0, 0, 0, 0_u32];
    // SAFETY: the pointers are to locals of the sizes that version 3 of the call reads: a version and a process
    // number, and twice three sets of 32.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Mounts a directory over itself in which the files of one user and group are those of `user`, who has the group of
/// the same number. For a process of one thread.
pub(crate) fn show_as(dir: &Path, (uid, gid): (u32, u32), user: u32) -> io::Result<()> {
    let names = user_namespace(&format!("{uid} {user} 1"), &format!("{gid} {user} 1"))?;
    let path = CString::new(dir.as_os_str().as_bytes())?;
    let flags = libc::OPEN_TREE_CLONE | libc::O_CLOEXEC as u32;
    // SAFETY: the pointer is to a string that lives as long as the call; a result is a descriptor of nobody else.
    let tree =
        unsafe { descriptor(libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags))? };
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: names.as_raw_fd() as u64,
    };
    let size = size_of::<libc::mount_attr>();
    let empty = libc::AT_EMPTY_PATH;
    // SAFETY: the pointers are to locals, of the size that is passed, and to constants.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            empty,
            &raw const attributes,
            size,
        )
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    let (from, to, flags) = (tree.as_raw_fd(), path.as_ptr(), libc::MOVE_MOUNT_F_EMPTY_PATH);
    // SAFETY: the pointers are to a constant and to a string that lives as long as the call.
    let moved = unsafe { libc::syscall(libc::SYS_move_mount, from, c"".as_ptr(), libc::AT_FDCWD, to, flags) };
    if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A user namespace with these users and groups, without a process.
fn user_namespace(users: &str, groups: &str) -> io::Result<std::fs::File> {
    let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
    // SAFETY: like a fork of a process of one thread; the child only waits for its end.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } as i32;
    match child {
        0 => loop {
            nix::unistd::pause();
        },
        ..0 => return Err(io::Error::last_os_error()),
        _ => {}
    }
    let proc = format!("/proc/{child}");
    let made = std::fs::write(format!("{proc}/uid_map"), users)
        .and_then(|()| std::fs::write(format!("{proc}/gid_map"), groups))
        .and_then(|()| std::fs::File::open(format!("{proc}/ns/user")));
    let pid = nix::unistd::Pid::from_raw(child);
    let _ = nix::sys::signal::kill(pid, Signal::SIGKILL);
    let _ = nix::sys::wait::waitpid(pid, None);
    made
}

/// From here on this process and its children send signals only among themselves, from Linux 6.12 on.
pub(crate) fn confine_signals() {
    /// `struct landlock_ruleset_attr`: the accesses of files and of the network that are governed, and scopes.
    const SIGNALS: [u64; 3] = [0, 0, 1 << 1];
    let _ = nix::sys::prctl::set_no_new_privs();
    // SAFETY: the pointer is to a constant of the size that is passed; a result is a descriptor of nobody else.
    let rules = unsafe {
        descriptor(libc::syscall(
            libc::SYS_landlock_create_ruleset,
            SIGNALS.as_ptr(),
            size_of_val(&SIGNALS),
            0,
        ))
    };
    if let Ok(rules) = rules {
        // SAFETY: no pointer is passed.
        unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) };
    }
}

/// The new descriptor that a system call returned.
///
/// # Safety
/// If it is one, nobody else may own it.
unsafe fn descriptor(result: libc::c_long) -> io::Result<OwnedFd> {
    // SAFETY: as this function demands.
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
    }
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

/// Asks the kernel to end others first when memory runs out. Only a process that may lower its score can do that.
pub fn ask_for_oom_protection() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-998")
}

/// Gives memory that was freed back to the kernel. The allocator keeps it otherwise, in one arena for each processor.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointer is passed, and other threads may go on.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// What the children of this process are doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Children {
    /// The one with this number ended with this status, and was reaped.
    Ended(i32, ExitStatus),
    /// There are some, and none has ended.
    Running,
    /// There are none.
    None,
}

/// Reaps one child. Real-time signals, which the safe wrappers refuse, are reported like any other.
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

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, BorrowedFd};

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    /// A message with more descriptors than are allowed leaves none of them open.
    #[test]
    fn test_descriptors_of_a_message_that_is_refused_are_closed() {
        let pair =
            || socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let (here, there) = pair();
        for count in 0..60 {
            let (reader, writer) = std::io::pipe().unwrap();
            let sent: Vec<BorrowedFd<'_>> = vec![writer.as_fd(); count];
            super::send_message(here.as_fd(), b"x", &sent).unwrap();
            drop(writer);
            let received = super::receive_message(there.as_fd(), 10);
            match received {
                Ok(Some((bytes, descriptors))) if count <= super::MOST_DESCRIPTORS => {
                    assert_eq!((bytes.as_slice(), descriptors.len()), (&b"x"[..], count));
                }
                received => assert!(received.is_err() && count > super::MOST_DESCRIPTORS, "{count}"),
            }
            assert!(is_closed(&reader), "{count} descriptors: one is still open");
        }
        super::send_message(here.as_fd(), b"too long", &[]).unwrap();
        super::receive_message(there.as_fd(), 3).unwrap_err();
    }

    /// Nobody has the other end of a pipe; what another test starts has it until it runs its program.
    fn is_closed(reader: &std::io::PipeReader) -> bool {
        let mut waits = [nix::poll::PollFd::new(reader.as_fd(), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut waits, 5_000_u16).unwrap();
        waits[0].revents().is_some_and(|events| events.contains(nix::poll::PollFlags::POLLHUP))
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn test_memory_is_given_back() {
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
        };
        let mut blocks: Vec<Vec<u8>> = (0..100_000).map(|_| vec![1; 1000]).collect();
        let last = blocks.pop(); // in use, after all that is free
        drop(blocks);
        let before = resident();
        super::give_memory_back();
        let given = before.saturating_sub(resident());
        assert!(given > 50 << 20, "{given} bytes of 100 MB");
        drop(last);
    }
}
