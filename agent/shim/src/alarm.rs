//! The shim's only timer. Time in suspend counts, as it does for leases and limits.

use std::os::fd::{AsFd, BorrowedFd};

use agent_model::Boot;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// A timer at a moment of this boot.
#[derive(Debug)]
pub(crate) struct Alarm {
    timer: TimerFd,
    at: Option<Boot>,
}

impl Alarm {
    /// A timer that is not set.
    pub(crate) fn new() -> nix::Result<Alarm> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        Ok(Alarm { timer: TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)?, at: None })
    }

    /// Wakes the shim at `at`, and at no other time. A time in the past wakes it at once.
    pub(crate) fn set(&mut self, at: Option<Boot>) -> nix::Result<()> {
        if self.at == at {
            return Ok(());
        }
        match at {
            Some(at) => {
                let moment = TimeSpec::from_duration(at.0.max(std::time::Duration::from_nanos(1)));
                self.timer.set(Expiration::OneShot(moment), TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
            }
            None => self.timer.unset()?,
        }
        self.at = at;
        Ok(())
    }

    /// It went off and is not set any more.
    pub(crate) fn rang(&mut self) {
        let _ = self.timer.wait(); // nothing there is as good
        self.at = None;
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
