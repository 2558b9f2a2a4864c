//! The shim on its way into any image: its program and, where it is linked to libraries, these and their loader.
//!
//! An image need not have a loader, or may have another one. So everything the shim needs is mounted, each file alone
//! and read-only, below a directory that no image has. Called by [`super::Containers`].

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::{Command, CommandError};

/// Where it all is inside.
const INSIDE: &str = "/.agentd";

/// How long the loader may take to name the libraries.
const STALL: Duration = Duration::from_secs(30);

/// What is mounted, and how the shim is started there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Carried {
    /// Files of this machine and their places inside.
    pub(super) files: Vec<(PathBuf, String)>,
    /// The command that is followed by the job directory.
    pub(super) command: Vec<String>,
}

/// Why the shim cannot be brought into a container.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// Its program cannot be read.
    #[error("could not read {}", path.display())]
    Read {
        /// The program.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Its loader did not run.
    #[error("could not ask which libraries it needs")]
    Ask(#[from] CommandError),
    /// Its loader cannot find all libraries.
    #[error("the libraries of {} are not all there: {said}", path.display())]
    Libraries {
        /// The program.
        path: PathBuf,
        /// The loader's words.
        said: String,
    },
}

/// Which file a shim is: another one needs another look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stamp(u64, u64, i64, i64);

impl Stamp {
    pub(super) fn of(path: &Path) -> Result<Stamp, CarryError> {
        let found = path.metadata().map_err(|source| CarryError::Read { path: path.to_owned(), source })?;
        Ok(Stamp(found.dev(), found.ino(), found.mtime(), found.mtime_nsec()))
    }
}

/// What it takes to start `shim` in any container.
pub(super) async fn carry(shim: &Path) -> Result<Carried, CarryError> {
    let read = |source| CarryError::Read { path: shim.to_owned(), source };
    let program = format!("{INSIDE}/agent-shim");
    let mut files = vec![(shim.to_owned(), program.clone())];
    let Some(loader) = File::open(shim).and_then(|file| loader_of(&file)).map_err(read)? else {
        return Ok(Carried { files, command: vec![program] });
    };
    let listed = Command::new(&loader).arg("--list").arg(shim).stall(STALL).capture().await?;
    let text = String::from_utf8_lossy(&listed.text);
    let libraries = libraries(&text).filter(|_| listed.status.success());
    let Some(libraries) = libraries else {
        return Err(CarryError::Libraries { path: shim.to_owned(), said: text.trim().to_owned() });
    };
    let (inner_loader, inner_libraries) = (format!("{INSIDE}/ld.so"), format!("{INSIDE}/lib"));
    files.push((loader, inner_loader.clone()));
    files.extend(libraries.into_iter().map(|(name, path)| (path, format!("{inner_libraries}/{name}"))));
    let command = vec![inner_loader, "--library-path".to_owned(), inner_libraries, program];
    Ok(Carried { files, command })
}

/// The loader that an ELF program of 64 bits names; `None` for one that needs none.
fn loader_of(file: &File) -> io::Result<Option<PathBuf>> {
    const INTERPRETER: u32 = 3;
    let unknown =
        || io::Error::new(io::ErrorKind::InvalidData, "it is no program for 64 bits, little-endian");
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return Err(unknown());
    }
    let table = number(&header[32..40]);
    let (size, count) = (number(&header[54..56]), number(&header[56..58]));
    for index in 0..count {
        let mut entry = [0; 56];
        file.read_exact_at(&mut entry, table + index * size)?;
        if number(&entry[..4]) == u64::from(INTERPRETER) {
            let mut name = vec![0; usize::try_from(number(&entry[32..40])).unwrap_or(0).min(4096)];
            file.read_exact_at(&mut name, number(&entry[8..16]))?;
            let name = String::from_utf8(name).map_err(|_| unknown())?;
            return Ok(Some(PathBuf::from(name.trim_end_matches('\0'))));
        }
    }
    Ok(None)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The libraries of a loader's list, by the name the program has for each; `None` when one was not found, or none is
/// named: a program with a loader has some.
fn libraries(list: &str) -> Option<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for line in list.lines().map(str::trim) {
        let Some((name, place)) = line.split_once(" => ") else { continue };
        let path = Path::new(place.rsplit_once(" (").map_or(place, |(path, _)| path));
        let name = Path::new(name).file_name()?.to_str()?;
        if !path.is_absolute() {
            return None;
        }
        found.push((name.to_owned(), path.to_owned()));
    }
    (!found.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_libraries_are_those_that_have_a_place() {
        let list = "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibgcc_s.so.1 => /lib/x/libgcc_s.so.1 (0x00007f01)\n\
                    \tlibc.so.6 => /lib/x/libc.so.6 (0x00007f02)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f03)\n";
        let expected = [("libgcc_s.so.1", "/lib/x/libgcc_s.so.1"), ("libc.so.6", "/lib/x/libc.so.6")];
        let expected = expected.map(|(name, path)| (name.to_owned(), PathBuf::from(path)));
        assert_eq!(libraries(list).unwrap(), expected);
        assert!(libraries("\tlibfar.so.1 => not found\n").is_none());
        assert!(libraries("").is_none());
    }

    #[test]
    fn test_loader_is_read_from_the_program() {
        let own = File::open("/proc/self/exe").unwrap();
        assert!(loader_of(&own).unwrap().unwrap().is_absolute());
        let other = tempfile::tempfile().unwrap();
        other.write_all_at(&[b'#'; 200], 0).unwrap();
        assert!(loader_of(&other).is_err());
    }
}
