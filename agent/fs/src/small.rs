//! A small file system, which fills up soon, for tests of a full disk.

use std::ffi::CString;
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A file system of its own, which is unmounted on drop.
#[derive(Debug)]
pub struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// One with these options of `tmpfs`, for example `size=4m`; `None` where that is not allowed.
    #[allow(clippy::print_stderr, reason = "a test that tries nothing must say so")]
    pub fn mount(options: &str) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().expect("a directory");
        let options = CString::new(options).expect("options without a NUL");
        match mount("tmpfs", dir.path(), "tmpfs", MountFlags::empty(), Some(options.as_c_str())) {
            Ok(()) => Some(SmallDisk(dir)),
            Err(error) => {
                eprintln!("SKIPPED: a small file system cannot be mounted here: {error}");
                None
            }
        }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}
