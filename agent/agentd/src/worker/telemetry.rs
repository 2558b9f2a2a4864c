//! Ships logs, tracking records and what jobs take of their machine to the controller, without loss and with certainty
//! about what is stored.
//!
//! Owns: the one `Append` stream of the node, and how far each file has been shipped. Hides: offsets,
//! windows, reconnects.
//!
//! Invariants: a file's bytes are not kept in memory (a lost chunk is read again); after every reconnect the
//! controller returns the offset to go on from; the bytes in flight are bounded, and so few when the controller is
//! slow that no job waits long behind another ([`pace`]); files take turns; of a job's log, only segments that are
//! stored as a whole are removed; nothing is polled, so a node whose jobs are silent does nothing.
//!
//! ```text
//! runner ── Shipper::written(length) ──▶ ┌─────┐ ── Append{offset, bytes} ──▶ controller
//! runner ◀── Shipper::stored(length) ─── │ Hub │ ◀── stored length ──────────
//!                                        └─────┘
//! ```
//!
//! Only one task ([`Hub::run`]) changes state; shippers only raise a length and wake it.

mod flow;
mod pace;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use agent_control::LogIntake;
use agent_model::{Channel, Code, ReplicaId, Stream, failpoint};
use agent_proto::v1;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_shim::JobDir;
use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport;
use tracing::{debug, info};

use super::backoff::Backoff;
use flow::{Allowance, Feed, FilePosition, Flow, FlowRequest, PATIENCE, PATIENCE_WITH_STOPPED, Stored};
use pace::{Pace, Sent};

/// The most requests in flight.
const REQUESTS: usize = 256;
/// A controller that owes an answer and gives none for this long is treated as unreachable.
const SILENCE: Duration = Duration::from_secs(20);
/// When a controller that knew no channel `system` is asked for it again: it may be of a later release by then.
const ASKED_AGAIN: Duration = Duration::from_secs(600);
/// Why nothing of that channel is shipped meanwhile.
const OLD_CONTROLLER: &str = "the controller is of a release that does not keep it";

/// The result of shipping a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ShipEnd {
    /// The controller has all of it.
    Whole,
    /// It has the first `stored` bytes, and will not get more.
    Part { stored: u64, why: String },
    /// It has all of it but for so many bytes, which the node has no more.
    Holed { gone: u64 },
}

/// Accepts files to be shipped. Clones use the same hub.
#[derive(Debug, Clone)]
pub(crate) struct Telemetry {
    feeds: mpsc::UnboundedSender<Arc<Feed>>,
    wake: Arc<Notify>,
}

/// The runner's handle of a file that is shipped. Bytes that were announced before the drop are still shipped.
#[derive(Debug)]
pub(crate) struct Shipper {
    feed: Arc<Feed>,
    wake: Arc<Notify>,
}

impl Shipper {
    /// The file now holds `length` bytes. A smaller length than before changes nothing.
    pub(crate) fn written(&self, length: u64) {
        if self.feed.written.fetch_max(length, Ordering::AcqRel) < length {
            self.wake.notify_one();
        }
    }

    /// Waits until the controller has the first `length` bytes, which are the whole file. An unreachable controller
    /// is waited for; one that answers and stores nothing only for [`PATIENCE`].
    pub(crate) async fn stored(&self, length: u64) -> ShipEnd {
        self.be_patient(PATIENCE);
        self.written(length);
        let mut stored = self.feed.stored.subscribe();
        let is_over = |stored: &Stored| stored.bytes >= length || stored.given_up.is_some();
        // The sender lives in `self.feed`, so the wait cannot fail.
        match stored.wait_for(is_over).await.as_deref() {
            Ok(Stored { bytes, given_up: Some(why), .. }) if *bytes < length => {
                ShipEnd::Part { stored: *bytes, why: why.clone() }
            }
            Ok(Stored { gone, .. }) if *gone > 0 => ShipEnd::Holed { gone: *gone },
            _ => ShipEnd::Whole,
        }
    }

    /// Shortens the wait, because somebody waits for the end of the job.
    pub(crate) fn hurry(&self) {
        self.be_patient(PATIENCE_WITH_STOPPED);
    }

    fn be_patient(&self, patience: Duration) {
        let millis = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        self.feed.patience.fetch_min(millis, Ordering::AcqRel);
    }

    /// How many bytes the controller has, as far as is known.
    pub(crate) fn known(&self) -> u64 {
        self.feed.stored.borrow().bytes
    }

    /// Ends the shipping of the file.
    pub(crate) fn give_up(&self, why: &str) {
        self.feed.give_up(why);
        self.wake.notify_one();
    }

    /// Asks the controller again how much it has, because it refused an outcome for missing bytes.
    pub(crate) fn doubt(&self) {
        self.feed.stored.send_modify(|stored| *stored = Stored { gone: stored.gone, ..Stored::default() });
        self.feed.doubted.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

impl Drop for Shipper {
    fn drop(&mut self) {
        self.feed.closed.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

impl Telemetry {
    /// The handle that accepts files, and the task that ships them over `controller`.
    pub(crate) fn new(controller: ToController) -> (Telemetry, Hub) {
        let (feeds, arrivals) = mpsc::unbounded_channel();
        let wake = Arc::new(Notify::new());
        let hub = Hub {
            arrivals,
            wake: wake.clone(),
            controller,
            flows: Vec::new(),
            turn: 0,
            without_system: None,
        };
        (Telemetry { feeds, wake }, hub)
    }

    /// Ships the build log, a file that need not exist before its first byte is announced.
    pub(crate) fn ship_build(&self, replica: &ReplicaId, path: PathBuf) -> Shipper {
        self.take(Feed::new(replica.clone(), Channel::Log(Stream::Build), FilePosition::Plain(path)))
    }

    /// Ships the tracking records of the job in `dir`.
    pub(crate) fn ship_tracking(&self, replica: &ReplicaId, dir: &JobDir) -> Shipper {
        self.take(Feed::new(replica.clone(), Channel::Tracking, FilePosition::Tracking(dir.clone())))
    }

    /// Ships what the job in `dir` takes of its machine.
    pub(crate) fn ship_system(&self, replica: &ReplicaId, dir: &JobDir) -> Shipper {
        self.take(Feed::new(replica.clone(), Channel::System, FilePosition::Plain(dir.system())))
    }

    /// Ships the log of the job in `dir`, and removes what the controller has of it.
    pub(crate) fn ship_job(&self, replica: &ReplicaId, dir: &JobDir) -> Shipper {
        self.take(Feed::new(replica.clone(), Channel::Log(Stream::Job), FilePosition::Job(dir.clone())))
    }

    fn take(&self, feed: Feed) -> Shipper {
        let feed = Arc::new(feed);
        // The hub runs as long as the daemon; nobody must wait for one that has ended.
        if self.feeds.send(feed.clone()).is_err() {
            feed.give_up("the daemon stops");
        }
        Shipper { feed, wake: self.wake.clone() }
    }
}

/// A request that has not been answered.
struct Pending {
    feed: Arc<Feed>,
    bytes: u64,
    end: u64,
    sent: Sent,
}

impl Pending {
    fn is_meant(&self, answer: &v1::AppendResponse) -> bool {
        // An older controller does not name the request that it answers.
        let is_told = answer.end == 0 || answer.end == self.end;
        is_told
            && answer.channel == self.feed.channel.to_string()
            && answer.replica == self.feed.replica.to_string()
    }
}

/// Where logs go.
#[derive(Clone)]
pub(crate) enum ToController {
    /// To the controller of this process.
    Near(Box<LogIntake>),
    /// To one at the other end of a channel.
    Far(transport::Channel),
}

impl ToController {
    /// The way to the controller of this process, if there is one, or else over the channel.
    pub(crate) fn new(near: Option<LogIntake>, far: &transport::Channel) -> ToController {
        near.map_or_else(|| ToController::Far(far.clone()), |intake| ToController::Near(Box::new(intake)))
    }
}

/// One `Append` stream.
struct Connection {
    requests: mpsc::Sender<v1::AppendRequest>,
    answers: BoxStream<'static, Result<v1::AppendResponse, Status>>,
    /// Answers come in the order of the requests.
    pending: VecDeque<Pending>,
    pace: Pace,
    /// When it last answered.
    heard: Instant,
}

/// The state of the task that ships.
pub(crate) struct Hub {
    arrivals: mpsc::UnboundedReceiver<Arc<Feed>>,
    wake: Arc<Notify>,
    controller: ToController,
    flows: Vec<Flow>,
    /// The index of the file whose turn it is.
    turn: usize,
    /// Until when nothing of what jobs take of their machine is shipped: the controller is of a release that knows none.
    without_system: Option<Instant>,
}

impl Hub {
    /// Ships until `stop`, then ships what was written before and returns.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        while self.wait_for_work(&stop).await {
            match self.ship(&mut backoff, &stop).await {
                Ok(()) => {}
                Err(_) if stop.is_cancelled() => return,
                Err(status) => {
                    let wait = backoff.next();
                    debug!(%status, ?wait, "interrupted log shipping");
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    /// Waits until a file has bytes to ship; `false` when there are none at a stop.
    async fn wait_for_work(&mut self, stop: &CancellationToken) -> bool {
        loop {
            self.take_arrivals();
            if self.flows.iter().any(Flow::is_behind) {
                return true;
            }
            tokio::select! {
                () = self.wake.notified() => {}
                () = stop.cancelled() => return false,
            }
        }
    }

    fn take_arrivals(&mut self) {
        let without_system = self.without_system.is_some_and(|until| Instant::now() < until);
        while let Ok(feed) = self.arrivals.try_recv() {
            if without_system && feed.channel == Channel::System {
                feed.give_up(OLD_CONTROLLER);
            }
            self.flows.push(Flow::new(feed));
        }
        let is_done =
            |flow: &Flow| flow.feed.closed.load(Ordering::Acquire) && !flow.is_behind() && flow.pending == 0;
        self.flows.retain(|flow| !is_done(flow));
    }

    /// One connection, until it breaks or a stop finds nothing left to ship.
    async fn ship(&mut self, backoff: &mut Backoff, stop: &CancellationToken) -> Result<(), Status> {
        self.flows.iter_mut().for_each(Flow::reconnect);
        let mut connection = Connection::open(&self.controller).await?;
        loop {
            self.take_arrivals();
            self.send(&mut connection).await?;
            let flushed = stop.is_cancelled() && !self.flows.iter().any(Flow::is_behind);
            if flushed {
                return Ok(());
            }
            let wake_at = self.flows.iter().filter_map(Flow::resting).min();
            tokio::select! {
                () = self.wake.notified() => {}
                () = stop.cancelled(), if !stop.is_cancelled() => {}
                () = until(wake_at), if wake_at.is_some() => {}
                answer = connection.answer() => {
                    self.take_answer(&mut connection, answer)?;
                    backoff.reset();
                }
            }
        }
    }

    /// Sends what the window allows, a chunk of each file in turn, starting after the file that was sent last.
    async fn send(&mut self, connection: &mut Connection) -> Result<(), Status> {
        let mut idle = 0;
        while idle < self.flows.len() && connection.pending.len() < REQUESTS {
            self.turn = (self.turn + 1) % self.flows.len();
            let flow = &mut self.flows[self.turn];
            idle += 1;
            let Some(request) = flow.plan(connection.allowance(), Instant::now()) else { continue };
            let (offset, data) = match request {
                FlowRequest::Ask => (0, Vec::new()),
                FlowRequest::Send { offset, length } => match flow.read(offset, length).await {
                    Some(data) => (offset, data),
                    None => continue,
                },
            };
            connection.push(flow, offset, data)?;
            idle = 0;
        }
        Ok(())
    }

    /// What is not sent again after the stream was refused.
    fn take_refusal(&mut self, connection: &Connection, status: &Status) {
        // Answers arrive in order, so the oldest request was refused.
        if let Some(pending) = connection.pending.front().filter(|_| is_refusal(status)) {
            info!(replica = %pending.feed.replica, %status, "forgetting replica: the controller wants no more of it");
            self.flows
                .iter()
                .filter(|flow| flow.feed.replica == pending.feed.replica)
                .for_each(|flow| flow.feed.give_up("it wants no more of this replica"));
        }
        let is_system = |feed: &Feed| feed.channel == Channel::System;
        if agent_proto::fault(status).code == Code::RequestInvalid
            && connection.pending.iter().any(|pending| is_system(&pending.feed))
        {
            // It refuses the whole stream for what it does not know, and logs are on the same one.
            info!(%status, "keeping what jobs take of this machine to itself: the controller knows no such channel");
            self.without_system = Some(Instant::now() + ASKED_AGAIN);
            let system = self.flows.iter().filter(|flow| is_system(&flow.feed));
            system.for_each(|flow| flow.feed.give_up(OLD_CONTROLLER));
        }
    }

    fn take_answer(
        &mut self,
        connection: &mut Connection,
        answer: Result<v1::AppendResponse, Status>,
    ) -> Result<(), Status> {
        let answer = match answer {
            Ok(answer) => answer,
            Err(status) => {
                self.take_refusal(connection, &status);
                return Err(status);
            }
        };
        // A duplicate answer must not be taken for one to the next request.
        let Some(pending) = connection.pending.pop_front_if(|pending| pending.is_meant(&answer)) else {
            debug!(replica = answer.replica, channel = answer.channel, "skipped answer to no request");
            return Ok(());
        };
        connection.heard = Instant::now();
        connection.pace.answered(pending.sent, connection.heard);
        if let Some(flow) = self.flows.iter_mut().find(|flow| Arc::ptr_eq(&flow.feed, &pending.feed)) {
            if answer.failed.is_empty() {
                flow.answered(pending.bytes, pending.end, answer.stored);
            } else {
                debug!(replica = %pending.feed.replica, why = answer.failed, "cannot ship log: the controller cannot store it now");
                flow.failed(pending.bytes, &answer.failed, connection.heard);
            }
            flow.trim();
        }
        Ok(())
    }
}

impl Connection {
    async fn open(controller: &ToController) -> Result<Connection, Status> {
        failpoint::hit("node.append.open").map_err(|error| Status::unavailable(error.to_string()))?;
        let (requests, stream) = mpsc::channel(REQUESTS);
        let stream = ReceiverStream::new(stream);
        let answers = match controller {
            ToController::Near(intake) => intake.append(stream),
            ToController::Far(channel) => {
                let mut client = TelemetryClient::new(channel.clone());
                let opening = tokio::time::timeout(SILENCE, client.append(stream));
                opening.await.map_err(|_| silent())??.into_inner().boxed()
            }
        };
        let (pending, pace) = (VecDeque::new(), Pace::new());
        Ok(Connection { requests, answers, pending, pace, heard: Instant::now() })
    }

    fn allowance(&self) -> Allowance {
        Allowance { budget: self.pace.budget(), chunk: self.pace.chunk(), share: self.pace.share() }
    }

    /// The next answer. It has a deadline only while a request is unanswered.
    async fn answer(&mut self) -> Result<v1::AppendResponse, Status> {
        let deadline = self.pending.front().map(|oldest| self.heard.max(oldest.sent.at) + SILENCE);
        tokio::select! {
            answer = self.answers.try_next() => {
                answer?.ok_or_else(|| Status::unavailable("the controller closed the stream"))
            }
            () = until(deadline), if deadline.is_some() => Err(silent()),
        }
    }

    fn push(&mut self, flow: &mut Flow, offset: u64, data: Vec<u8>) -> Result<(), Status> {
        failpoint::hit("node.append.send").map_err(|error| Status::unavailable(error.to_string()))?;
        let bytes = data.len() as u64;
        let request = v1::AppendRequest {
            replica: flow.feed.replica.to_string(),
            channel: flow.feed.channel.to_string(),
            offset,
            data: data.into(),
        };
        // The channel has room for all requests in flight, so it is only full when nobody receives them.
        self.requests
            .try_send(request)
            .map_err(|_| Status::unavailable("the controller closed the stream"))?;
        let sent = self.pace.sent(bytes, Instant::now());
        self.pending.push_back(Pending { feed: flow.feed.clone(), bytes, end: offset + bytes, sent });
        flow.pending += 1;
        flow.in_flight += bytes;
        flow.next = flow.next.map(|next| next + bytes);
        Ok(())
    }
}

/// Sleeps until a date, which must be `Some`.
async fn until(date: Option<Instant>) {
    tokio::time::sleep_until(date.unwrap_or_else(Instant::now)).await;
}

fn silent() -> Status {
    Status::deadline_exceeded(format!("no answer for {SILENCE:?}"))
}

/// Whether the controller will never accept it, however often it is sent.
fn is_refusal(status: &Status) -> bool {
    matches!(agent_proto::fault(status).code, Code::Fenced | Code::JobNotFound)
}

#[cfg(test)]
mod tests;
