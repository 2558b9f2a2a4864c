//! Errors of GPUs as the driver writes them into the kernel's log.
//!
//! The driver's library reports such errors only to a process that waits for them; the log keeps them, so a
//! short-lived process can read them. A user who may not read the log gets nothing, which is no error.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use agent_model::gpu::Xid;

/// The log is a ring of a few MiB at most; more than this is not read.
const MOST: usize = 64 << 20;
/// How much of the driver's text is kept.
const LONGEST: usize = 200;

/// The last error of each GPU, by [`slot`], in the order of the log.
pub(super) fn latest(log: &Path) -> Vec<((u32, u32, u32), Xid)> {
    let mut found: Vec<((u32, u32, u32), Xid)> = Vec::new();
    for (slot, xid) in records(log).lines().filter_map(parse) {
        found.retain(|(other, _)| *other != slot);
        found.push((slot, xid));
    }
    found
}

/// Where a GPU is plugged in: domain, bus and device of `0000:3b:00.0` or `00000000:3B:00`.
pub(super) fn slot(pci: &str) -> Option<(u32, u32, u32)> {
    let mut parts = pci.split('.').next()?.split(':').map(|part| u32::from_str_radix(part, 16).ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

/// The records in the log now. Each read gives one, and the end shows as "would block".
fn records(log: &Path) -> String {
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let Ok(mut log) = OpenOptions::new().read(true).custom_flags(nonblock).open(log) else {
        return String::new();
    };
    let (mut all, mut record) = (Vec::new(), vec![0; 16 << 10]);
    while all.len() < MOST {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(read) => all.extend_from_slice(&record[..read]),
            // A record was overwritten before it was read; the next read gives the oldest that is left.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&all).into_owned()
}

/// Reads `4,1234,5678,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=42, GPU has fallen off the bus.`
fn parse(line: &str) -> Option<((u32, u32, u32), Xid)> {
    let (head, text) = line.split_once(';')?;
    let text = text.strip_prefix("NVRM: Xid (")?;
    let (place, text) = text.split_once("): ")?;
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (code, detail) = text.split_at(digits);
    let detail = detail.trim_start_matches([',', ' ']).chars().filter(|c| !c.is_control());
    let xid = Xid {
        code: code.parse().ok()?,
        at_us: head.split(',').nth(2)?.parse().ok()?,
        detail: detail.take(LONGEST).collect(),
    };
    Some((slot(place.strip_prefix("PCI:").unwrap_or(place))?, xid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_last_error_of_each_gpu_is_read_from_the_log() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let lines = [
            "6,1,100,-;Linux version 6.1",
            "4,2,200,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=42, name=python, Ch 00000008, intr 00000000.",
            " SUBSYSTEM=pci",
            "4,3,300,-;NVRM: Xid (PCI:0000:5e:00): 13, pid=7, Graphics Exception",
            "4,4,400,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
            "4,5,500,-;NVRM: Xid (PCI:nonsense): 79, pid=1",
            "4,6,600,-;NVRM: Xid (PCI:0000:3b:00): x",
            "4,7,?,-;NVRM: Xid (PCI:0000:3b:00): 48",
        ];
        std::fs::write(log.path(), lines.join("\n")).unwrap();
        let found = latest(log.path());
        assert_eq!(found.len(), 2, "{found:?}");
        let (place, xid) = &found[1];
        assert_eq!(*place, slot("00000000:3B:00.0").unwrap());
        assert_eq!((xid.code, xid.at_us, xid.is_fatal()), (79, 400, true));
        assert_eq!(xid.detail, "pid='<unknown>', GPU has fallen off the bus.");
        assert!(found[0].0 == (0, 0x5e, 0) && !found[0].1.is_fatal(), "{found:?}");
    }

    #[test]
    fn test_log_that_cannot_be_read_tells_nothing() {
        assert_eq!(latest(Path::new("/nowhere/kmsg")), []);
        // Reading the real log ends although more may be written to it, whichever user runs this.
        latest(Path::new("/dev/kmsg"));
    }
}
