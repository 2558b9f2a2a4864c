//! The two system calls for a program that the kernel asks whether a device may be opened.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::libc;

const LOAD: libc::c_int = 5;
const ATTACH: libc::c_int = 8;
/// `BPF_PROG_TYPE_CGROUP_DEVICE`.
const DEVICE_PROGRAM: u32 = 15;
/// `BPF_CGROUP_DEVICE`.
const AT_OPEN: u32 = 6;
/// `BPF_F_ALLOW_MULTI`: systemd may have a program there, too, and each of them may deny.
const BESIDE_OTHERS: u32 = 2;

/// The beginning of `union bpf_attr` as it is for this call; what is missing counts as zero.
#[repr(C)]
struct LoadArguments {
    kind: u32,
    count: u32,
    operations: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
}

#[repr(C)]
struct AttachArguments {
    target: u32,
    program: u32,
    at: u32,
    flags: u32,
}

/// Loads a program for devices; the kernel checks it first. Needs `CAP_SYS_ADMIN`.
pub(crate) fn load_device_filter(operations: &[u64]) -> io::Result<OwnedFd> {
    let arguments = LoadArguments {
        kind: DEVICE_PROGRAM,
        count: operations.len() as u32,
        operations: operations.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel: 0,
        flags: 0,
    };
    // SAFETY: the pointers are to a slice of `count` operations of 8 bytes, to a constant string, and to a local of the
    // size that is passed; all live as long as the call.
    let program =
        unsafe { libc::syscall(libc::SYS_bpf, LOAD, &raw const arguments, size_of::<LoadArguments>()) };
    match i32::try_from(program) {
        // SAFETY: the kernel just made it, and nobody else has it.
        Ok(program @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(program) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel ask a program for each device that a process in the group opens, from now on and for as long as the
/// group exists.
pub(crate) fn attach_device_filter(program: BorrowedFd<'_>, group: BorrowedFd<'_>) -> io::Result<()> {
    let arguments = AttachArguments {
        target: group.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        at: AT_OPEN,
        flags: BESIDE_OTHERS,
    };
    // SAFETY: the pointer is to a local of the size that is passed.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, ATTACH, &raw const arguments, size_of::<AttachArguments>()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
