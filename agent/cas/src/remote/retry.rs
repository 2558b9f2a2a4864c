//! For how long a failed call is repeated, and which errors are final.
//!
//! Only errors about the blob or the call itself are final. Every other error may come from a proxy, a restarting
//! server or a full disk, whatever its code: the same call may succeed later.
//!
//! A server may ask for a delay: then it is not called earlier, and the call is repeated whatever its error was.

use std::time::Duration;

use bazel_remote_apis::google::{protobuf, rpc};
use prost::Message;
use tokio::time::{Instant, sleep};
use tonic::{Code, Status};

use crate::store::is_away;

/// The longest time between the first failure and the last attempt. A server that is restarted, or replaced by a
/// new version, is back by then.
pub(crate) const LONGEST: Duration = Duration::from_secs(20);

/// The pause between the first attempt and the second; it doubles.
const FIRST: Duration = Duration::from_millis(50);

/// The longest pause between two attempts, unless the server wants more.
const PAUSE: Duration = Duration::from_secs(2);

/// The type of the status detail with the delay that a server asks for.
const RETRY_INFO: &str = "google.rpc.RetryInfo";

/// That detail, of `google/rpc/error_details.proto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    pub(super) retry_delay: Option<protobuf::Duration>,
}

/// The retries of a call so far.
#[derive(Debug, Default)]
pub(crate) struct RetryPolicy {
    since: Option<Instant>,
    attempts: u32,
}

impl RetryPolicy {
    /// Waits before the next attempt, or returns the failure when there should be none.
    pub(crate) async fn wait(&mut self, status: Status) -> Result<(), Status> {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let wanted = wanted_pause(&status);
        let own = FIRST.saturating_mul(1 << self.attempts.min(10)).min(PAUSE);
        let pause = wanted.unwrap_or_default().max(own);
        let waited = now.duration_since(since);
        let too_long =
            waited > LONGEST || wanted.is_some_and(|wanted| waited.saturating_add(wanted) > LONGEST);
        if too_long || !(wanted.is_some() || is_transient(&status)) {
            return Err(status);
        }
        self.attempts += 1;
        sleep(pause).await;
        Ok(())
    }
}

/// The delay that the server asks for.
pub(super) fn wanted_pause(status: &Status) -> Option<Duration> {
    let details = rpc::Status::decode(status.details()).ok()?.details;
    let detail = details.iter().find(|detail| detail.type_url.rsplit('/').next() == Some(RETRY_INFO))?;
    let delay = RetryInfo::decode(detail.value.as_slice()).ok()?.retry_delay.unwrap_or_default();
    let (seconds, nanos) = (u64::try_from(delay.seconds).ok()?, u32::try_from(delay.nanos).ok()?);
    (nanos < 1_000_000_000).then(|| Duration::new(seconds, nanos))
}

/// The status of a server, in one line.
pub fn told(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        said => format!("{}: {said}", status.code()),
    }
}

/// The same call may succeed in a moment. A server that did not answer in time has used up its time already.
pub(super) fn is_transient(status: &Status) -> bool {
    status.code() != Code::DeadlineExceeded && is_away(status)
}
