//! For how long a call is repeated whose server, or the way to it, is away for a moment.
//!
//! Called by `remote` for calls that may be repeated, and by `snapshot::push` for uploads, which only it can
//! begin again.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tonic::{Code, Status};

/// The longest time between the first failure and the last attempt. A server that is started again, or
/// replaced by a new version, is back by then.
pub(crate) const LONGEST: Duration = Duration::from_secs(20);

/// Between the first attempt and the second; it doubles.
const FIRST: Duration = Duration::from_millis(50);

/// Between two attempts at most.
const PAUSE: Duration = Duration::from_secs(2);

/// What has been waited.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    since: Option<Instant>,
    attempts: u32,
}

impl Patience {
    /// Waits before the next attempt, or gives the failure back when there should be none.
    pub(crate) async fn wait(&mut self, status: Status) -> Result<(), Status> {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if !is_transient(&status) || now.duration_since(since) > LONGEST {
            return Err(status);
        }
        let pause = FIRST.saturating_mul(1 << self.attempts.min(10)).min(PAUSE);
        self.attempts += 1;
        sleep(pause).await;
        Ok(())
    }
}

/// The server said that it is away, or the connection broke: the same call may do in a moment. A server that
/// is there and says nothing used up its time already.
fn is_transient(status: &Status) -> bool {
    match status.code() {
        Code::Unavailable | Code::Aborted => true,
        // Statuses that were made here, of a connection that broke, have a source; those of a server have none.
        Code::Unknown | Code::Internal | Code::Cancelled => std::error::Error::source(status).is_some(),
        _ => false,
    }
}
