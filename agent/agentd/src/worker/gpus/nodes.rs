//! The device nodes of GPUs: those that a job must not open.
//!
//! A node is called after the number that the driver has for its GPU, so each node that is not of a GPU of the job is
//! another's, also one of a GPU that the driver does not tell of.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use agent_shim::DeviceNode;

/// Where they are.
pub(crate) const PLACE: &str = "/dev";

/// The nodes at `place` of the GPUs that do not have these numbers. Blocks briefly.
pub(crate) fn of_others(place: &Path, own: &[u32]) -> io::Result<Vec<DeviceNode>> {
    let mut found = Vec::new();
    for entry in place.read_dir()? {
        let entry = entry?;
        if entry.file_name().to_str().and_then(number).is_none_or(|number| own.contains(&number)) {
            continue;
        }
        let about = match fs::metadata(entry.path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // it is gone, or leads nowhere
            about => about?,
        };
        if about.file_type().is_char_device() {
            let (major, minor) = (rustix::fs::major(about.rdev()), rustix::fs::minor(about.rdev()));
            found.push(DeviceNode { major, minor });
        }
    }
    found.sort_unstable_by_key(|node| (node.major, node.minor));
    Ok(found)
}

/// The number in the name of a GPU's node; the driver has other nodes for all of them together.
fn number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("nvidia")?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_nodes_of_gpus_are_told_from_those_of_the_driver() {
        let numbers = ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "nvidia1x", "nvidia-caps"];
        assert_eq!(numbers.map(number), [Some(0), Some(12), None, None, None, None, None]);
    }

    #[test]
    fn test_only_devices_are_denied() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("nvidia0"), "").unwrap();
        std::os::unix::fs::symlink("/dev/null", place.path().join("nvidia1")).unwrap();
        std::os::unix::fs::symlink("nowhere", place.path().join("nvidia2")).unwrap();
        assert_eq!(of_others(place.path(), &[]).unwrap(), [DeviceNode { major: 1, minor: 3 }]);
        assert_eq!(of_others(place.path(), &[1]).unwrap(), []);
    }
}
