//! The device nodes that a job may not open: those of GPUs that are not its own.
//!
//! A job is kept from them by its control group: in the unified hierarchy by a program that the kernel asks at each open
//! ([`program`]), else by the controller `devices` of version 1. Every other node stays as it is; so a list of what is denied
//! is enough, and nothing of a machine is broken by what this does not know.
//!
//! Invariant: what is denied is denied before the first process of the job is in the group, and as long as that exists.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;

use super::Groups;
use crate::record::DeviceNode;
use crate::sys::bpf;

/// The most of them that one program compares, well below the 4096 instructions that every kernel takes.
const MOST: usize = 512;

/// The file of version 1 to which a node is written that may not be opened.
const DENY: &str = "devices.deny";

/// Keeps what will be in the groups from these nodes.
pub(crate) fn deny(groups: &Groups, nodes: &[DeviceNode]) -> io::Result<()> {
    let nodes = nodes.get(..MOST).unwrap_or(nodes);
    if nodes.is_empty() {
        return Ok(());
    }
    match (groups.with(DENY), groups.with("cgroup.controllers")) {
        (Some(group), _) => by_controller(&group.join(DENY), nodes),
        (None, Some(group)) => {
            let program = bpf::load_device_filter(&program(nodes))?;
            bpf::attach_device_filter(program.as_fd(), File::open(group)?.as_fd())
        }
        (None, None) => Err(io::Error::new(io::ErrorKind::Unsupported, "no control group here can do it")),
    }
}

/// In version 1: a group may open what its parent may, but for what is written here.
fn by_controller(file: &Path, nodes: &[DeviceNode]) -> io::Result<()> {
    let mut file = File::options().write(true).open(file)?;
    // Each line is a call of its own.
    nodes
        .iter()
        .try_for_each(|node| file.write_all(format!("c {}:{} rwm", node.major, node.minor).as_bytes()))
}

/// Whether a program for these nodes would be taken: it is loaded and dropped.
pub fn try_out() -> io::Result<()> {
    bpf::load_device_filter(&program(&[DeviceNode { major: 195, minor: 0 }])).map(drop)
}

/// Instructions of a filter: 0 (denied) for a character device of the list, 1 for all others. The kernel hands it the
/// kind of the device in the lower half of the first word, the numbers in the two that follow.
pub(crate) fn program(nodes: &[DeviceNode]) -> Vec<u64> {
    /// Loads a word of what register 1 points to.
    const LOAD: u8 = 0x61;
    const AND: u8 = 0x54;
    const UNLESS: u8 = 0x56; // on 32 bits, as the numbers are
    const SET: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    const CHARACTER: u32 = 2;
    let operation = |code: u8, registers: u8, offset: u16, value: u32| {
        u64::from(code) | u64::from(registers) << 8 | u64::from(offset) << 16 | u64::from(value) << 32
    };
    let answer = |value| [operation(SET, 0x00, 0, value), operation(EXIT, 0, 0, 0)];
    let each = |node: &DeviceNode| {
        let [set, exit] = answer(0);
        [operation(UNLESS, 0x03, 3, node.major), operation(UNLESS, 0x04, 2, node.minor), set, exit]
    };
    let compared: Vec<u64> = nodes.iter().flat_map(each).collect();
    let mut all = vec![
        operation(LOAD, 0x12, 0, 0),
        operation(AND, 0x02, 0, 0xffff),
        operation(LOAD, 0x13, 4, 0),
        operation(LOAD, 0x14, 8, 0),
        operation(UNLESS, 0x02, u16::try_from(compared.len()).unwrap_or(u16::MAX), CHARACTER),
    ];
    all.extend(compared);
    all.extend(answer(1));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_the_program_is_what_the_kernel_reads() {
        let one = program(&[DeviceNode { major: 195, minor: 7 }]);
        let bytes: Vec<[u8; 8]> = one.iter().map(|operation| operation.to_le_bytes()).collect();
        assert_eq!(
            bytes,
            [
                [0x61, 0x12, 0, 0, 0, 0, 0, 0],       // w2 = kind and access
                [0x54, 0x02, 0, 0, 0xff, 0xff, 0, 0], // w2 &= 0xffff
                [0x61, 0x13, 4, 0, 0, 0, 0, 0],       // w3 = major
                [0x61, 0x14, 8, 0, 0, 0, 0, 0],       // w4 = minor
                [0x56, 0x02, 4, 0, 2, 0, 0, 0],       // if it is no character device, it is allowed
                [0x56, 0x03, 3, 0, 195, 0, 0, 0],
                [0x56, 0x04, 2, 0, 7, 0, 0, 0],
                [0xb7, 0x00, 0, 0, 0, 0, 0, 0], // denied
                [0x95, 0, 0, 0, 0, 0, 0, 0],
                [0xb7, 0x00, 0, 0, 1, 0, 0, 0], // allowed
                [0x95, 0, 0, 0, 0, 0, 0, 0],
            ]
        );
        assert_eq!(program(&[]).len(), 7);
    }

    #[test]
    fn test_the_longest_program_is_taken_where_programs_are() {
        let nodes: Vec<DeviceNode> =
            (0..MOST).map(|minor| DeviceNode { major: 195, minor: minor as u32 }).collect();
        if try_out().is_ok() {
            bpf::load_device_filter(&program(&nodes)).unwrap();
        }
    }
}
