//! The package for a host: a `.tar.gz` with `bin/`, or the programs beside this one, packed the same way.
//!
//! Invariant: the same programs give the same bytes, so that an interrupted upload can be continued.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

/// The programs of a node; the first two must exist.
const PROGRAMS: [&str; 4] = ["agentd", "agent-shim", "agentctl", "agent-env"];
/// A digest in hexadecimal, as the tools on the host print it.
pub(crate) type Hash = String;

/// Why there is no package to install.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PackageError {
    #[error("{} is missing beside agentctl", .0.display())]
    Missing(PathBuf),
    #[error("{} is no package: {what}", file.display())]
    Odd { file: PathBuf, what: String },
    #[error("{}", file.display())]
    File { file: PathBuf, source: io::Error },
}

/// A package, ready to be sent to many hosts.
#[derive(Debug)]
pub struct Package {
    file: File,
    pub(crate) hash: Hash,
    pub(crate) packed: u64,
    pub(crate) unpacked: u64,
    /// The version of the C library that its programs need.
    pub(crate) glibc: (u32, u32),
}

impl Package {
    /// Opens a package file.
    pub fn open(path: &Path) -> Result<Package, PackageError> {
        let failed = |source| PackageError::File { file: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        Package::read(file, path)
    }

    /// Packs the programs of a directory.
    pub fn pack(directory: &Path) -> Result<Package, PackageError> {
        let failed = |source| PackageError::File { file: directory.to_owned(), source };
        let mut file = tempfile::tempfile().map_err(failed)?;
        let mut tar = tar::Builder::new(GzEncoder::new(&mut file, Compression::fast()));
        for (index, name) in PROGRAMS.iter().enumerate() {
            let path = directory.join(name);
            let failed = |source| PackageError::File { file: path.clone(), source };
            let mut program = match File::open(&path) {
                Ok(program) => program,
                Err(error) if error.kind() == io::ErrorKind::NotFound && index < 2 => {
                    return Err(PackageError::Missing(path));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed(error)),
            };
            let mut header = tar::Header::new_gnu();
            header.set_size(program.metadata().map_err(failed)?.len());
            header.set_mode(0o755);
            header.set_mtime(0);
            tar.append_data(&mut header, format!("bin/{name}"), &mut program).map_err(failed)?;
        }
        tar.into_inner().and_then(GzEncoder::finish).and_then(|file| file.flush()).map_err(failed)?;
        Package::read(file, directory)
    }

    fn read(mut file: File, path: &Path) -> Result<Package, PackageError> {
        let odd = |what: String| PackageError::Odd { file: path.to_owned(), what };
        let failed = |source| PackageError::File { file: path.to_owned(), source };
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let (mut unpacked, mut glibc, mut has_daemon) = (0, (2, 0), false);
        let mut tar = tar::Archive::new(GzDecoder::new(io::BufReader::new(&mut file)));
        for entry in tar.entries().map_err(failed)? {
            let mut entry = entry.map_err(|error| odd(error.to_string()))?;
            unpacked += entry.size();
            let name = entry.path().map_err(|error| odd(error.to_string()))?.into_owned();
            if name.ends_with("bin/agentd") {
                has_daemon = true;
                glibc = wanted_glibc(&mut entry).map_err(|error| odd(error.to_string()))?;
            }
        }
        drop(tar);
        if !has_daemon {
            return Err(odd("there is no bin/agentd in it".to_owned()));
        }
        let packed = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let hash = hash_of(&file, packed).map_err(failed)?;
        Ok(Package { file, hash, packed, unpacked, glibc })
    }

    /// The digest of its first bytes.
    pub(crate) fn hash_of_first(&self, length: u64) -> io::Result<Hash> {
        hash_of(&self.file, length)
    }

    /// A reader of its bytes from `start` on.
    pub(crate) fn from(&self, start: u64) -> io::Result<File> {
        // Each reader has an offset of its own, because it is sent to several hosts at the same time.
        let mut file = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.file)))?;
        file.seek(SeekFrom::Start(start))?;
        Ok(file)
    }
}

fn hash_of(file: &File, length: u64) -> io::Result<Hash> {
    use std::os::unix::fs::FileExt;
    let (mut digest, mut at, mut piece) = (Sha256::new(), 0, vec![0; 1 << 20]);
    while at < length {
        let wanted = piece.len().min(usize::try_from(length - at).unwrap_or(usize::MAX));
        let read = file.read_at(&mut piece[..wanted], at)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        digest.update(&piece[..read]);
        at += read as u64;
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The latest version of the C library that a program names.
fn wanted_glibc(program: &mut impl Read) -> io::Result<(u32, u32)> {
    const NAME: &[u8] = b"GLIBC_2.";
    /// Bytes of name and number, which may be split between two pieces.
    const LONGEST: usize = 16;
    let (mut latest, mut piece, mut kept) = (0, vec![0; 1 << 20], 0);
    loop {
        let read = program.read(&mut piece[kept..])?;
        let end = kept + read;
        let text = &piece[..end];
        let mut at = 0;
        while let Some(found) = text[at..].windows(NAME.len()).position(|window| window == NAME) {
            at += found + NAME.len();
            let digits = text[at..].iter().take_while(|byte| byte.is_ascii_digit()).take(4);
            let number = digits.fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
            latest = latest.max(number);
        }
        if read == 0 {
            return Ok((2, latest));
        }
        kept = end.min(LONGEST);
        piece.copy_within(end - kept..end, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(programs: &[(&str, &[u8])]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, bytes) in programs {
            std::fs::write(directory.path().join(name), bytes).unwrap();
        }
        directory
    }

    #[test]
    fn test_same_programs_same_bytes() {
        let daemon = b"\x7fELF GLIBC_2.4\0GLIBC_2.30\0GLIBC_2.9\0";
        let here = directory(&[("agentd", daemon), ("agent-shim", b"shim"), ("other", b"no")]);
        let (one, two) = (Package::pack(here.path()).unwrap(), Package::pack(here.path()).unwrap());
        assert_eq!((one.hash.len(), one.glibc), (64, (2, 30)));
        assert_eq!(one.hash, two.hash);
        assert_eq!(one.hash_of_first(one.packed).unwrap(), one.hash);
        let mut rest = Vec::new();
        one.from(one.packed - 5).unwrap().read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), 5);
        assert_eq!(one.unpacked, daemon.len() as u64 + 4);
    }

    #[test]
    fn test_what_is_no_package_says_so() {
        let lacking = Package::pack(directory(&[("agentd", b"x")]).path()).unwrap_err().to_string();
        assert!(lacking.ends_with("agent-shim is missing beside agentctl"), "{lacking}");
        let here = directory(&[("text", b"no archive")]);
        let odd = Package::open(&here.path().join("text")).unwrap_err().to_string();
        assert!(odd.contains("is no package"), "{odd}");
    }

    #[test]
    fn test_a_name_on_the_edge_of_a_piece_is_read() {
        let mut program = vec![b'x'; (1 << 20) - 4];
        program.extend_from_slice(b"GLIBC_2.34\0");
        assert_eq!(wanted_glibc(&mut program.as_slice()).unwrap(), (2, 34));
    }
}
