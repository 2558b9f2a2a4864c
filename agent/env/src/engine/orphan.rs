//! Ends this process with its parent.
//!
//! Owns the thread that watches. Hides the two signs: the parent process has changed, and nobody reads standard
//! output. The kernel's own parent-death signal is sent at the end of the parent's *thread*, which can end at any
//! time in a daemon with a thread pool, so it is not used.
//!
//! Invariants: a request is given up within a second after its caller is gone; the next request removes what it left
//! half-built.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, getpid, getppid, kill_process};

const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 300_000_000 };

/// Kills this process when its parent is gone.
pub(crate) fn end_with_parent() {
    let parent = getppid();
    // Without the thread nobody watches, and only the parent's own means are left.
    let _ = std::thread::Builder::new().name("orphan".into()).spawn(move || {
        loop {
            let stdout = std::io::stdout();
            let mut watched = [PollFd::new(&stdout, PollFlags::empty())];
            let gone = match rustix::event::poll(&mut watched, Some(&PAUSE)) {
                Ok(0) => false,
                Ok(_) => watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL),
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(300));
                    false
                }
            };
            if gone || getppid() != parent {
                let _ = kill_process(getpid(), Signal::KILL);
            }
        }
    });
}
