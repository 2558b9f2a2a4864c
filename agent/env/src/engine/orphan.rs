//! Ending with whoever asked.
//!
//! Owns the thread that watches. Hides the two signs: the parent is another one, and nobody can read what is
//! told. The kernel's own signal for this goes with the parent's *thread*, which ends at any time in a daemon
//! that keeps a pool of them, so it is not used.
//!
//! Invariants: a request whose asker is gone is given up within a second; what it had half made is cleaned up by
//! the next request.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, getpid, getppid, kill_process};

const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 300_000_000 };

/// Ends this process when its parent is gone.
pub(crate) fn end_with_parent() {
    let parent = getppid();
    // Without a thread nobody watches, and the parent's own means are left.
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
