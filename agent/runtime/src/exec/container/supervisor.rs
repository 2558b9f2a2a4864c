//! How the shim gets into a container of any image, and gets its job directory.
//!
//! It is linked statically, so only its program is mounted, read-only, and nothing of an image is run with it: no
//! loader and no library. It receives the job directory through a socket ([`agent_shim::door`]), whose listener is
//! closed before the command is started.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use agent_shim::JobDir;
use agent_shim::door::{DOOR, hand_over};
use tokio::net::{UnixListener, UnixStream};

use super::super::local::remove_if_there;
use super::LaunchError;

/// The paths of the program and of the socket in the container.
pub(super) const PROGRAM: &str = "/.agentd/agent-shim";
pub(super) const DOOR_INSIDE: &str = "/.agentd/door";

/// Why the shim cannot be run in a container.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SupervisorError {
    #[error("could not read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not linked statically: build it in the repository, where cargo is told so", path.display())]
    Dynamic { path: PathBuf },
    #[error("an earlier release made {} and nothing was started there: the job needs another try", dir.display())]
    Former { dir: PathBuf },
    #[error("could not open {} to it", dir.display())]
    Door { dir: PathBuf, source: io::Error },
}

/// Makes sure that the shim's program needs no loader.
pub(super) fn check(shim: &Path) -> Result<(), SupervisorError> {
    let needs = File::open(shim).and_then(|file| has_loader(&file));
    match needs.map_err(|source| SupervisorError::Read { path: shim.to_owned(), source })? {
        false => Ok(()),
        true => Err(SupervisorError::Dynamic { path: shim.to_owned() }),
    }
}

/// Whether a 64-bit ELF program names a loader.
fn has_loader(file: &File) -> io::Result<bool> {
    const INTERPRETER: u64 = 3;
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        let what = "it is no program for 64 bits, little-endian";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let (table, size, count) = (number(&header[32..40]), number(&header[54..56]), number(&header[56..58]));
    for index in 0..count {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, table + index * size)?;
        if number(&kind) == INTERPRETER {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The socket of one job directory, open while this lives.
#[derive(Debug)]
pub(super) struct Door {
    listener: UnixListener,
    directory: OwnedFd,
    path: PathBuf,
}

impl Door {
    pub(super) fn open(dir: &JobDir) -> Result<Door, LaunchError> {
        if dir.is_shared() {
            return Err(SupervisorError::Former { dir: dir.path().to_owned() }.into());
        }
        let path = dir.path().join(DOOR);
        remove_if_there(path.clone())?;
        let open = || {
            let directory = agent_fs::open_directory(dir.path())?;
            // The path may be longer than the address of a socket can be.
            let listener = UnixListener::bind(format!("/proc/self/fd/{}/{DOOR}", directory.as_raw_fd()))?;
            // Only the daemon's own user can reach this directory. With a helper, user 0 of a container connects
            // instead, and may not open files that are closed to others; the peer is checked after it has connected.
            let mode = if agent_spawn::has_helper() { 0o666 } else { 0o600 };
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
            Ok(Door { listener, directory, path: path.clone() })
        };
        let dir = || dir.path().to_owned();
        Ok(open().map_err(|source| SupervisorError::Door { dir: dir(), source })?)
    }

    /// Passes the directory to every admitted client.
    pub(super) async fn serve(&self) -> Infallible {
        loop {
            let handed = match self.listener.accept().await {
                Ok((stream, _)) => {
                    admit(&stream).and_then(|()| hand_over(stream.as_fd(), self.directory.as_fd()))
                }
                Err(error) => Err(error),
            };
            if let Err(error) = handed {
                tracing::debug!(path = %self.path.display(), %error, "a supervisor did not get its directory");
                tokio::time::sleep(super::super::connection::AGAIN).await;
            }
        }
    }
}

/// A job's user may be able to connect to the socket of its own job, but gets nothing.
fn admit(stream: &UnixStream) -> io::Result<()> {
    let who = stream.peer_cred()?.uid();
    let is_due = who == 0 || who == nix::unistd::geteuid().as_raw();
    if is_due { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path); // nobody listens at it any more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_loader_is_seen_in_a_program() {
        assert!(has_loader(&File::open("/proc/self/exe").unwrap()).unwrap());
        let other = tempfile::tempfile().unwrap();
        other.write_all_at(&[b'#'; 200], 0).unwrap();
        assert!(has_loader(&other).is_err());
    }
}
