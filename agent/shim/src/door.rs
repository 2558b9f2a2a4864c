//! How the supervisor of a job in a container gets the job directory.
//!
//! The container sees only the job's part of the directory. The rest is passed to the supervisor as an open
//! descriptor, through a socket whose listener is closed before any process of the job is started. It becomes the
//! current directory of the supervisor, which no process of the job may inspect (`PR_SET_DUMPABLE`), and no path in
//! the container leads there.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::sys;

/// The socket, in the job directory.
pub const DOOR: &str = "door.sock";

/// How long the supervisor waits for its directory.
const WAIT: Duration = Duration::from_secs(60);

/// Hands over an open directory to the connected peer.
pub fn hand_over(stream: BorrowedFd<'_>, directory: BorrowedFd<'_>) -> io::Result<()> {
    sys::send_descriptor(stream, directory)
}

/// Connects to the socket and waits for the directory.
pub fn enter(door: &Path) -> io::Result<OwnedFd> {
    let stream = UnixStream::connect(door)?;
    stream.set_read_timeout(Some(WAIT))?;
    sys::receive_descriptor(&stream)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn test_directory_is_handed_over_open() {
        let temp = tempfile::tempdir().unwrap();
        let door = temp.path().join(DOOR);
        let listener = UnixListener::bind(&door).unwrap();
        let giver = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let directory = agent_fs::open_directory(temp.path()).unwrap();
            hand_over(stream.as_fd(), directory.as_fd()).unwrap();
            drop(listener.accept()); // who comes without a gift
            temp
        });
        let directory = enter(&door).unwrap();
        assert!(enter(&door).is_err(), "nothing was handed over");
        let temp = giver.join().unwrap();
        agent_fs::open_file_beneath(&directory, DOOR).unwrap_err();
        std::fs::write(temp.path().join("a"), "a").unwrap();
        agent_fs::open_file_beneath(&directory, "a").unwrap();
    }
}
