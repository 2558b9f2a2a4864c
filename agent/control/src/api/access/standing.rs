//! Streams that end when their caller loses what he opened them with.
//!
//! A stream is checked when it is opened, and may stay open for weeks. When its user or node is removed, when a user's
//! certificates are revoked, or when he loses a role, it ends at once with an error; who still may opens it again.

use agent_model::Principal;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt, StreamExt};
use tonic::Status;

use super::Caller;

impl Caller {
    /// Waits until the caller has lost something, and says what.
    pub(in crate::api) async fn until_lost(&self) -> Status {
        if let Principal::Local { .. } = &self.who {
            return std::future::pending().await; // nothing is taken from the users of this machine
        }
        let registry = &self.gate.registry;
        let (mut changes, had) = (registry.withdrawals(), registry.role(&self.who));
        loop {
            if let Err(refusal) = self.still() {
                return refusal.into();
            }
            if registry.role(&self.who) < had {
                return Status::unavailable(
                    "the role of the caller was changed: the call has to be made again",
                );
            }
            if changes.changed().await.is_err() {
                return Status::unavailable("the controller is stopping");
            }
        }
    }

    /// The same stream, which ends with an error when the caller has lost something.
    pub(in crate::api) fn while_allowed<T: Send + 'static>(
        self,
        stream: impl stream::Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> BoxStream<'static, Result<T, Status>> {
        let lost = async move { self.until_lost().await }.boxed();
        let open = Some((stream.boxed(), lost));
        stream::unfold(open, |open| async move {
            let (mut stream, mut lost) = open?;
            tokio::select! {
                biased;
                status = &mut lost => Some((Err(status), None)),
                item = stream.next() => Some((item?, Some((stream, lost)))),
            }
        })
        .boxed()
    }
}
