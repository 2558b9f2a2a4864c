//! Sessions in jobs that run: a command in one, or a connection to one of its ports.
//!
//! Nodes dial out, so each keeps one offer here ([`Offers`]). A user's call takes the offer of the node that runs the
//! job, and the two calls exchange their incoming streams: what the user sends becomes the answer to the node, and what
//! the node sends becomes the answer to the user. So each direction is read only as fast as its other end takes it, the
//! directions do not wait for each other, and the end of either call ends both. Nothing of it is stored.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Code, Fault, JobId, JobState, NodeId};
use agent_proto::v1;
use futures_util::{Stream, stream};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tonic::{Status, Streaming};

use super::{Caller, Refusal, Services, invalid};
use crate::queue::Queue;

/// How long the first message of a call may take.
const FIRST: Duration = Duration::from_secs(20);
/// How long a node may take to make its next offer, and to answer a user. One that is not connected may be just about
/// to: after a restart of its daemon or of this one.
const OFFERED: Duration = Duration::from_secs(10);

type Inputs = Streaming<v1::SessionInput>;
type Outputs = Streaming<v1::SessionOutput>;

/// The offers of nodes to serve a session. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Offers(Arc<KeptOffers>);

#[derive(Debug, Default)]
struct KeptOffers {
    offers: Mutex<HashMap<NodeId, oneshot::Sender<Taker>>>,
    made: Notify,
}

/// A user who takes an offer.
#[derive(Debug)]
struct Taker {
    first: v1::SessionInput,
    inputs: Inputs,
    caller: Caller,
    outputs: oneshot::Sender<Outputs>,
}

impl Offers {
    /// Of a node's offers only the latest counts: of an earlier one the connection is gone.
    fn make(&self, node: NodeId) -> oneshot::Receiver<Taker> {
        let (offer, taker) = oneshot::channel();
        self.0.offers.lock().insert(node, offer);
        self.0.made.notify_waiters();
        taker
    }

    /// The offer of a node, when there is one.
    async fn take(&self, node: &NodeId) -> oneshot::Sender<Taker> {
        loop {
            let made = self.0.made.notified();
            tokio::pin!(made);
            made.as_mut().enable();
            if let Some(offer) = self.0.offers.lock().remove(node).filter(|offer| !offer.is_closed()) {
                return offer;
            }
            made.await;
        }
    }
}

/// The call of a node, before and after its offer is taken.
enum Serving {
    Offered(Outputs, oneshot::Receiver<Taker>),
    Taken(Inputs, Box<Caller>),
}

impl Serving {
    /// The next message for the node, and the call after it; `None` when the call is over.
    async fn next(self, queue: &Queue) -> Result<Option<(v1::SessionInput, Serving)>, Status> {
        match self {
            Serving::Offered(mut outputs, taker) => tokio::select! {
                Ok(Taker { first, inputs, caller, outputs: to }) = taker => {
                    let taken = to.send(outputs).is_ok();
                    Ok(taken.then_some((first, Serving::Taken(inputs, Box::new(caller)))))
                }
                // Only the end of the call can come before it is taken.
                _ = outputs.message() => Ok(None),
                () = queue.closed() => Err(Refusal::Stopping.into()),
            },
            Serving::Taken(mut inputs, caller) => tokio::select! {
                input = inputs.message() => match input {
                    Ok(Some(input)) if caller.still().is_ok() => Ok(Some((input, Serving::Taken(inputs, caller)))),
                    _ => Ok(None),
                },
                // Its user sees why.
                _ = caller.until_lost() => Ok(None),
                () = queue.closed() => Err(Refusal::Stopping.into()),
            },
        }
    }
}

/// What a session answers to a node.
pub(super) type ServeStream = Pin<Box<dyn Stream<Item = Result<v1::SessionInput, Status>> + Send>>;
/// What a session answers to a user.
pub(super) type SessionStream = Pin<Box<dyn Stream<Item = Result<v1::SessionOutput, Status>> + Send>>;

impl Services {
    /// Keeps the offer of a node until a user takes it.
    pub(super) async fn offer_session(
        &self,
        caller: Caller,
        mut outputs: Outputs,
    ) -> Result<ServeStream, Status> {
        let first = first_of(&mut outputs).await?;
        let node: NodeId = first.node.parse().map_err(Refusal::from)?;
        caller.speaks_for(&node)?;
        let offered = Serving::Offered(outputs, self.offers.make(node));
        let queue = self.queue.clone();
        let inputs = stream::try_unfold((offered, queue), |(serving, queue)| async move {
            let next = serving.next(&queue).await?;
            Ok(next.map(|(input, serving)| (input, (serving, queue))))
        });
        Ok(caller.while_allowed(inputs))
    }

    /// Opens a session for a user in a job of his, or of anybody's for an operator.
    pub(super) async fn open_session(
        &self,
        caller: Caller,
        mut inputs: Inputs,
    ) -> Result<SessionStream, Status> {
        let mut first = first_of(&mut inputs).await?;
        let node = self.prepare_session(&mut first, &caller).await?;
        let end = Instant::now() + OFFERED;
        let offer = match timeout_at(end, self.offers.take(&node)).await {
            Ok(offer) => offer,
            Err(_) => return Err(Refusal::from(unreached(&node)).into()),
        };
        let (outputs, taken) = oneshot::channel();
        let of_user = caller.clone();
        let taker = Taker { first, inputs, caller, outputs };
        if offer.send(taker).is_err() {
            return Err(Refusal::from(unreached(&node)).into());
        }
        match timeout_at(end, taken).await {
            Ok(Ok(outputs)) => Ok(of_user.while_allowed(outputs)),
            Ok(Err(_)) | Err(_) => Err(Refusal::from(unreached(&node)).into()),
        }
    }

    /// Checks who opens a session where, and completes the first message; returns the node that serves it.
    async fn prepare_session(
        &self,
        first: &mut v1::SessionInput,
        caller: &Caller,
    ) -> Result<NodeId, Refusal> {
        let id: JobId = first.job.parse()?;
        let job = self.owned(&id, caller).await?.job;
        if job.state != JobState::Running {
            let fault = Fault::new(Code::SessionRefused, format!("no session can be opened in {id}"));
            let fault =
                fault.why(format!("it is {}; there are sessions while its command runs", job.state.name()));
            return Err(fault.fix("wait until it runs, or submit it again").into());
        }
        let Some(held) = job.replicas.iter().find(|held| held.rank == first.rank) else {
            return Err(invalid(format!("{id} has no rank {}", first.rank)).into());
        };
        first.replica = job.replica(held.rank).to_string();
        tracing::info!(job = %id, rank = held.rank, who = %caller, "opening session in job");
        Ok(held.node.clone())
    }
}

async fn first_of<T>(messages: &mut Streaming<T>) -> Result<T, Status> {
    let first = timeout(FIRST, messages.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("the first message did not come"))??;
    first.ok_or_else(|| Refusal::from(invalid("there is no first message")).into())
}

fn unreached(node: &NodeId) -> Fault {
    Fault::new(Code::NodeLost, format!("{node}, which runs the job, does not answer"))
        .why("it is not connected, or its agentd is of a release without sessions")
        .fix("see with `agentctl nodes` when it is, and try again")
}
