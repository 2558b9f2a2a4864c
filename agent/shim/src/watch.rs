//! When to look at the files of the job directory: the tracking file, and those by which others find this shim. The
//! kernel reports changes; where it has no watch left for this user (`fs.inotify.max_user_instances`, 128 of them on most
//! machines, for all programs of a user), or cannot watch, they are looked at every second instead.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use agent_shim::JobDir;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

/// How often the files are looked at without a watch.
const EVERY: Duration = Duration::from_secs(1);

/// The events when somebody removes, replaces or empties a file in a directory, or changes its rights.
const HARM: AddWatchFlags = AddWatchFlags::IN_DELETE
    .union(AddWatchFlags::IN_MOVE)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_CLOSE_WRITE);

/// The watch, or the time of the next look.
#[derive(Debug)]
pub(crate) enum Watch {
    /// The kernel reports changes.
    Told {
        inotify: Inotify,
        /// The watch of the directory itself, with the files by which others find this shim.
        control: WatchDescriptor,
    },
    /// It does not.
    Looks { next: Instant },
}

impl Watch {
    /// Watches the directory; without a watch of the kernel, also returns why.
    pub(crate) fn of(dir: &JobDir) -> (Watch, Option<io::Error>) {
        match Watch::told(dir) {
            Ok(watch) => (watch, None),
            Err(error) => (Watch::Looks { next: Instant::now() + EVERY }, Some(error)),
        }
    }

    fn told(dir: &JobDir) -> io::Result<Watch> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // The watch of the folder also reports writes to files that were removed from it and are still written.
        let changes = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | HARM;
        let control = inotify.add_watch(dir.path(), if dir.is_shared() { changes } else { HARM })?;
        if !dir.is_shared() {
            inotify.add_watch(dir.data(), changes)?;
        }
        Ok(Watch::Told { inotify, control })
    }

    /// What becomes readable when there is a change.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Watch::Told { inotify, .. } => Some(inotify.as_fd()),
            Watch::Looks { .. } => None,
        }
    }

    /// When to look, whether or not anything becomes readable.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        match self {
            Watch::Told { .. } => None,
            Watch::Looks { next } => Some(*next),
        }
    }

    /// Takes the reports, or looks now; returns whether one of the `own` files may have been harmed.
    pub(crate) fn take(&mut self, own: &[PathBuf], now: Instant) -> bool {
        let (inotify, control) = match self {
            Watch::Told { inotify, control } => (inotify, *control),
            Watch::Looks { next } => {
                *next = now + EVERY;
                return true;
            }
        };
        let mut harmed = false;
        while let Ok(events) = inotify.read_events() {
            if events.is_empty() {
                break;
            }
            let names = events.into_iter().filter(|event| event.wd == control).filter_map(|event| event.name);
            harmed |= names.into_iter().any(|name| own.iter().any(|own| own.file_name() == Some(&name)));
        }
        harmed
    }
}
