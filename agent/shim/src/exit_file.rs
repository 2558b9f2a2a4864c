//! The exit record on its way to disk. Its space is taken before the job starts, so that a job that fills
//! the disk cannot keep its own end from being recorded.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use agent_model::failpoint;
use agent_shim::{ExitRecord, JobDir};

/// More than a record takes, in bytes.
const RESERVE: usize = 4096;

/// The reserved file.
#[derive(Debug)]
pub(crate) struct ExitFile {
    file: File,
    path: PathBuf,
}

impl ExitFile {
    /// Takes the space.
    pub(crate) fn reserve(dir: &JobDir) -> io::Result<ExitFile> {
        failpoint::hit("shim.exit.reserve")?;
        let path = dir.exit().with_extension("tmp");
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        file.write_all_at(&[b' '; RESERVE], 0)?;
        Ok(ExitFile { file, path })
    }

    /// Makes the record the exit record of the directory: whole and durable when this returns `Ok`. May be
    /// tried again.
    pub(crate) fn commit(&self, dir: &JobDir, record: &ExitRecord) -> io::Result<()> {
        let text = agent_shim::seal(record)?;
        failpoint::hit("shim.exit.write")?;
        self.file.write_all_at(&text, 0)?;
        self.file.set_len(text.len() as u64)?;
        failpoint::hit("shim.exit.sync")?;
        self.file.sync_all()?;
        JobDir::clear_way(&dir.exit());
        failpoint::hit("shim.exit.rename")?;
        match self.is_there()? {
            true => fs::rename(&self.path, dir.exit())?,
            // Somebody removed it, or an earlier attempt got this far.
            false => agent_fs::write_durable(&dir.exit(), &text)?,
        }
        dir.sync()
    }

    /// The reserved file is still where it was made.
    fn is_there(&self) -> io::Result<bool> {
        let own = self.file.metadata()?;
        let is_own = |found: Metadata| (found.dev(), found.ino()) == (own.dev(), own.ino());
        Ok(fs::symlink_metadata(&self.path).is_ok_and(is_own))
    }
}
