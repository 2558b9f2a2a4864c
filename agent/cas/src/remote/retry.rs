//! For how long a call is repeated that did not do, and which answers are the last word.
//!
//! Only what is said of the blob or of the call itself is final. Every other answer may be one of a proxy, of a
//! server that is started again or of a disk that is full, whatever code it has: the same call may do later.
//!
//! A server may say itself when to come again: then it is not asked earlier, and what it refused is asked once
//! more whatever the reason was.

use std::time::Duration;

use bazel_remote_apis::google::{protobuf, rpc};
use prost::Message;
use tokio::time::{Instant, sleep};
use tonic::{Code, Status};

/// The longest time between the first failure and the last attempt. A server that is started again, or
/// replaced by a new version, is back by then.
pub(crate) const LONGEST: Duration = Duration::from_secs(20);

/// Between the first attempt and the second; it doubles.
const FIRST: Duration = Duration::from_millis(50);

/// Between two attempts at most, unless the server wants more.
const PAUSE: Duration = Duration::from_secs(2);

/// What names the detail of a status that says when to come again.
const RETRY_INFO: &str = "google.rpc.RetryInfo";

/// That detail, of `google/rpc/error_details.proto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    pub(super) retry_delay: Option<protobuf::Duration>,
}

/// What has been waited.
#[derive(Debug, Default)]
pub(crate) struct RetryPolicy {
    since: Option<Instant>,
    attempts: u32,
}

impl RetryPolicy {
    /// Waits before the next attempt, or gives the failure back when there should be none.
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

/// What the server said of when to come again.
pub(super) fn wanted_pause(status: &Status) -> Option<Duration> {
    let details = rpc::Status::decode(status.details()).ok()?.details;
    let detail = details.iter().find(|detail| detail.type_url.rsplit('/').next() == Some(RETRY_INFO))?;
    let delay = RetryInfo::decode(detail.value.as_slice()).ok()?.retry_delay.unwrap_or_default();
    let (seconds, nanos) = (u64::try_from(delay.seconds).ok()?, u32::try_from(delay.nanos).ok()?);
    (nanos < 1_000_000_000).then(|| Duration::new(seconds, nanos))
}

/// What a server said, in one line.
pub fn told(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        said => format!("{}: {said}", status.code()),
    }
}

/// The same call may do in a moment. A server that is there and says nothing used up its time already.
pub(super) fn is_transient(status: &Status) -> bool {
    status.code() != Code::DeadlineExceeded && is_away(status)
}

/// The same call may do later: the answer says nothing of the blob, and nothing of the call.
pub fn is_away(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::Ok
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::OutOfRange
            | Code::DataLoss
    )
}
