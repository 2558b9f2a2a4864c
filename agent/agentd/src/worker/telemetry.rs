//! Ships logs and tracking records to the controller, without loss and without doubt.
//!
//! Owns: the one `Append` stream of the node, and how far each file has been shipped. Hides: offsets,
//! windows, reconnects.
//!
//! Invariants: a file is read, never remembered (a chunk that got lost is read again); after every reconnect
//! the controller says where to go on; at most [`WINDOW`] bytes of a file and [`WINDOWS`] of all are on their
//! way; nothing is polled, so a node whose jobs are silent does nothing.
//!
//! ```text
//! runner ── Shipper::written(length) ──▶ ┌─────┐ ── Append{offset, bytes} ──▶ controller
//! runner ◀── Shipper::stored(length) ─── │ Hub │ ◀── stored length ──────────
//!                                        └─────┘
//! ```
//!
//! One task ([`Hub::run`]) mutates; shippers only raise a length and wake it. Called by `worker::runner`.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use agent_model::{Code, ReplicaId, Stream};
use agent_proto::v1;
use agent_proto::v1::telemetry_client::TelemetryClient;
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tracing::{debug, info, warn};

use super::backoff::Backoff;

/// The most bytes of one request.
const CHUNK: u64 = 256 * 1024;
/// The most bytes of one file on their way.
const WINDOW: u64 = 16 * CHUNK;
/// The most bytes of all files on their way.
const WINDOWS: u64 = 32 * CHUNK;
/// Requests that may wait for the connection to take them; more than the windows let through.
const REQUESTS: usize = 256;

/// What a shipped file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// A log.
    Log(Stream),
    /// Tracking records.
    Tracking,
}

impl Content {
    fn channel(self) -> String {
        match self {
            Content::Log(stream) => stream.to_string(),
            Content::Tracking => "tracking".to_owned(),
        }
    }
}

/// Takes files to be shipped. Clones lead to the same hub.
#[derive(Debug, Clone)]
pub(crate) struct Telemetry {
    feeds: mpsc::UnboundedSender<Arc<Feed>>,
    wake: Arc<Notify>,
}

/// What runner and hub both know about a file.
#[derive(Debug)]
struct Feed {
    replica: ReplicaId,
    content: Content,
    path: PathBuf,
    /// How much of the file may be shipped.
    written: AtomicU64,
    /// How much of it the controller has; everything, when the controller wants none of it.
    stored: watch::Sender<u64>,
    /// The controller said that it lacks what it had acknowledged.
    doubted: AtomicBool,
    /// Nobody will raise `written` any more.
    closed: AtomicBool,
}

/// The runner's hold on a file that is shipped. What was written before the drop is shipped still.
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

    /// Waits until the controller has the first `length` bytes, or wants none, and gives how many it has.
    pub(crate) async fn stored(&self, length: u64) -> u64 {
        self.written(length);
        let mut stored = self.feed.stored.subscribe();
        // The sender lives in `self.feed`, so the wait cannot fail.
        let stored = stored.wait_for(|stored| *stored >= length).await.map_or(length, |stored| *stored);
        if stored == u64::MAX { length } else { stored }
    }

    /// Asks the controller again how much it has, because it refused an outcome for want of it.
    pub(crate) fn doubt(&self) {
        self.feed.stored.send_replace(0);
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
    /// Where to hand files in, and the task that ships them over `controller`.
    pub(crate) fn new(controller: Channel) -> (Telemetry, Hub) {
        let (feeds, arrivals) = mpsc::unbounded_channel();
        let wake = Arc::new(Notify::new());
        let hub = Hub { arrivals, wake: wake.clone(), controller, flows: Vec::new() };
        (Telemetry { feeds, wake }, hub)
    }

    /// Takes charge of a file, which need not exist before its first byte is announced.
    pub(crate) fn ship(&self, replica: &ReplicaId, content: Content, path: PathBuf) -> Shipper {
        let feed = Arc::new(Feed {
            replica: replica.clone(),
            content,
            path,
            written: AtomicU64::new(0),
            stored: watch::Sender::new(0),
            doubted: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        });
        // The hub lives as long as the daemon; nobody must wait for one that is gone.
        if self.feeds.send(feed.clone()).is_err() {
            feed.stored.send_replace(u64::MAX);
        }
        Shipper { feed, wake: self.wake.clone() }
    }
}

/// How far the hub is with a file.
#[derive(Debug)]
struct Flow {
    feed: Arc<Feed>,
    file: Option<Arc<File>>,
    /// Where the next chunk begins; unknown until the controller said so on this connection.
    next: Option<u64>,
    /// Bytes on their way.
    in_flight: u64,
    /// Requests on their way.
    pending: usize,
    /// Nothing is sent until every request on its way is answered: the controller is asked, or was ahead of
    /// or behind what was thought.
    settling: bool,
}

impl Flow {
    fn new(feed: Arc<Feed>) -> Flow {
        Flow { feed, file: None, next: None, in_flight: 0, pending: 0, settling: false }
    }

    fn written(&self) -> u64 {
        self.feed.written.load(Ordering::Acquire)
    }

    fn is_behind(&self) -> bool {
        *self.feed.stored.borrow() < self.written() || self.feed.doubted.load(Ordering::Acquire)
    }

    /// A new connection knows nothing.
    fn reconnect(&mut self) {
        (self.next, self.in_flight, self.pending, self.settling) = (None, 0, 0, false);
    }

    /// What to do next: `None` is nothing now.
    fn plan(&mut self, budget: u64) -> Option<Request> {
        if self.feed.doubted.swap(false, Ordering::AcqRel) {
            (self.next, self.settling) = (None, true);
            return Some(Request::Ask);
        }
        if self.settling || !self.is_behind() || self.in_flight >= WINDOW {
            return None;
        }
        let written = self.written();
        let Some(next) = self.next else {
            if written <= CHUNK {
                self.next = Some(0); // sending is asking: what is there already is trimmed
                return self.plan(budget);
            }
            self.settling = true;
            return Some(Request::Ask);
        };
        let length = (written.saturating_sub(next)).min(CHUNK).min(budget);
        // The first bytes go at once; while they are being stored, what comes after them gathers.
        let worth_it = length == CHUNK || (length > 0 && self.pending == 0);
        worth_it.then_some(Request::Send { offset: next, length })
    }

    /// The controller has `stored` bytes, after a request of `bytes` that ended at `expected`.
    fn answered(&mut self, bytes: u64, expected: u64, stored: u64) {
        self.in_flight -= bytes;
        self.pending -= 1;
        if bytes > 0 && stored == expected - bytes {
            return self.refused(); // it was offered just what comes next, and did not take it
        }
        // What was given up stays given up.
        self.feed
            .stored
            .send_if_modified(|known| *known != u64::MAX && std::mem::replace(known, stored) != stored);
        if stored < expected {
            self.settling = true;
        }
        if self.pending == 0 && self.settling {
            (self.next, self.settling) = (Some(stored), false);
        }
        if self.next.is_some_and(|next| next < stored) {
            self.next = Some(stored);
        }
    }

    /// The controller wants none of it.
    fn refused(&self) {
        self.feed.stored.send_replace(u64::MAX);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Request {
    /// Ask what the controller has.
    Ask,
    /// Send a part of the file.
    Send { offset: u64, length: u64 },
}

/// A request that has not been answered.
struct Pending {
    feed: Arc<Feed>,
    bytes: u64,
    end: u64,
}

/// One `Append` stream.
struct Connection {
    requests: mpsc::Sender<v1::AppendRequest>,
    answers: Streaming<v1::AppendResponse>,
    /// Answers come in the order of the requests.
    pending: VecDeque<Pending>,
}

/// The task that ships.
pub(crate) struct Hub {
    arrivals: mpsc::UnboundedReceiver<Arc<Feed>>,
    wake: Arc<Notify>,
    controller: Channel,
    flows: Vec<Flow>,
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
                    debug!(%status, ?wait, "shipping logs was interrupted");
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    /// Waits until a file is behind; `false` when there is nothing left to ship at a stop.
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
        while let Ok(feed) = self.arrivals.try_recv() {
            self.flows.push(Flow::new(feed));
        }
        let is_done =
            |flow: &Flow| flow.feed.closed.load(Ordering::Acquire) && !flow.is_behind() && flow.pending == 0;
        self.flows.retain(|flow| !is_done(flow));
    }

    /// One connection, until it breaks or a stop finds nothing left to ship.
    async fn ship(&mut self, backoff: &mut Backoff, stop: &CancellationToken) -> Result<(), Status> {
        self.flows.iter_mut().for_each(Flow::reconnect);
        let (requests, stream) = mpsc::channel(REQUESTS);
        let mut client = TelemetryClient::new(self.controller.clone());
        let answers = client.append(ReceiverStream::new(stream)).await?.into_inner();
        let mut connection = Connection { requests, answers, pending: VecDeque::new() };
        loop {
            self.take_arrivals();
            self.send(&mut connection).await?;
            let flushed = stop.is_cancelled() && !self.flows.iter().any(Flow::is_behind);
            if flushed {
                return Ok(());
            }
            tokio::select! {
                () = self.wake.notified() => {}
                () = stop.cancelled(), if !stop.is_cancelled() => {}
                answer = connection.answers.message() => {
                    self.take_answer(&mut connection, answer)?;
                    backoff.reset();
                }
            }
        }
    }

    /// Sends what the windows allow, a chunk of each file in turn.
    async fn send(&mut self, connection: &mut Connection) -> Result<(), Status> {
        let mut idle = false;
        while !idle {
            idle = true;
            for flow in &mut self.flows {
                let budget =
                    WINDOWS.saturating_sub(connection.pending.iter().map(|pending| pending.bytes).sum());
                let Some(request) = flow.plan(budget) else { continue };
                let (offset, data) = match request {
                    Request::Ask => (0, Vec::new()),
                    Request::Send { offset, length } => match read(flow, offset, length).await {
                        Some(data) => (offset, data),
                        None => continue,
                    },
                };
                connection.push(flow, offset, data).await?;
                idle = false;
            }
        }
        Ok(())
    }

    fn take_answer(
        &mut self,
        connection: &mut Connection,
        answer: Result<Option<v1::AppendResponse>, Status>,
    ) -> Result<(), Status> {
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => return Err(Status::unavailable("the controller closed the stream")),
            Err(status) => {
                // Answers come in order, so it is the oldest request that was refused.
                if let Some(pending) = connection.pending.front().filter(|_| is_refusal(&status)) {
                    info!(replica = %pending.feed.replica, %status, "the controller wants no more of this replica");
                    self.flows
                        .iter()
                        .filter(|flow| flow.feed.replica == pending.feed.replica)
                        .for_each(Flow::refused);
                }
                return Err(status);
            }
        };
        let Some(pending) = connection.pending.pop_front() else {
            return Err(Status::internal("an answer without a request"));
        };
        if let Some(flow) = self.flows.iter_mut().find(|flow| Arc::ptr_eq(&flow.feed, &pending.feed)) {
            flow.answered(pending.bytes, pending.end, answer.stored);
        }
        Ok(())
    }
}

impl Connection {
    async fn push(&mut self, flow: &mut Flow, offset: u64, data: Vec<u8>) -> Result<(), Status> {
        let bytes = data.len() as u64;
        let request = v1::AppendRequest {
            replica: flow.feed.replica.to_string(),
            channel: flow.feed.content.channel(),
            offset,
            data,
        };
        let gone = |_| Status::unavailable("the controller closed the stream");
        self.requests.send(request).await.map_err(gone)?;
        self.pending.push_back(Pending { feed: flow.feed.clone(), bytes, end: offset + bytes });
        flow.pending += 1;
        flow.in_flight += bytes;
        flow.next = flow.next.map(|next| next + bytes);
        Ok(())
    }
}

/// The controller will never take it, however often it is sent.
fn is_refusal(status: &Status) -> bool {
    matches!(agent_proto::fault(status).code, Code::Fenced | Code::JobNotFound)
}

/// A part of a file; `None` when it is not there, which is said once by giving the file up.
async fn read(flow: &mut Flow, offset: u64, length: u64) -> Option<Vec<u8>> {
    let (file, path) = (flow.file.clone(), flow.feed.path.clone());
    let reading = tokio::task::spawn_blocking(move || -> io::Result<(Arc<File>, Vec<u8>)> {
        let file = match file {
            Some(file) => file,
            None => Arc::new(File::open(path)?),
        };
        let mut data = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut data, offset)?;
        Ok((file, data))
    });
    match reading.await.map_err(io::Error::other).flatten() {
        Ok((file, data)) => {
            flow.file = Some(file);
            Some(data)
        }
        Err(error) => {
            let replica = &flow.feed.replica;
            warn!(%replica, path = %flow.feed.path.display(), %error, "a log cannot be shipped");
            flow.refused();
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(written: u64) -> Flow {
        let feed = Feed {
            replica: "t.1.0".parse().unwrap(),
            content: Content::Log(Stream::Job),
            path: "/nowhere".into(),
            written: AtomicU64::new(written),
            stored: watch::Sender::new(0),
            doubted: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        };
        Flow::new(Arc::new(feed))
    }

    /// Lets the flow send, without a wire; gives what it asked for.
    fn push(flow: &mut Flow) -> Option<Request> {
        let request = flow.plan(u64::MAX)?;
        flow.pending += 1;
        if let Request::Send { length, .. } = request {
            flow.in_flight += length;
            flow.next = flow.next.map(|next| next + length);
        }
        Some(request)
    }

    #[test]
    fn test_small_file_is_sent_without_asking() {
        let mut flow = flow(100);
        assert_eq!(push(&mut flow), Some(Request::Send { offset: 0, length: 100 }));
        assert_eq!(push(&mut flow), None);
        flow.answered(100, 100, 100);
        assert!(!flow.is_behind());
    }

    #[test]
    fn test_large_file_goes_on_where_the_controller_says() {
        let mut flow = flow(10 * CHUNK);
        assert_eq!(push(&mut flow), Some(Request::Ask));
        assert_eq!(push(&mut flow), None, "nothing is sent before the answer");
        flow.answered(0, 0, 9 * CHUNK + 1);
        assert_eq!(push(&mut flow), Some(Request::Send { offset: 9 * CHUNK + 1, length: CHUNK - 1 }));
        assert_eq!(push(&mut flow), None);
    }

    #[test]
    fn test_window_bounds_what_is_on_its_way() {
        let mut flow = flow(100 * CHUNK);
        push(&mut flow);
        flow.answered(0, 0, 0);
        let sent = std::iter::from_fn(|| push(&mut flow)).count() as u64;
        assert_eq!((sent, flow.in_flight), (WINDOW / CHUNK, WINDOW));
        flow.answered(CHUNK, CHUNK, CHUNK);
        assert_eq!(push(&mut flow), Some(Request::Send { offset: WINDOW, length: CHUNK }));
    }

    #[test]
    fn test_small_pieces_gather_behind_the_one_on_its_way() {
        let mut flow = flow(10);
        push(&mut flow);
        flow.feed.written.store(30, Ordering::Release);
        assert_eq!(push(&mut flow), None);
        flow.answered(10, 10, 10);
        assert_eq!(push(&mut flow), Some(Request::Send { offset: 10, length: 20 }));
    }

    #[test]
    fn test_attempt_that_is_over_is_not_offered_for_ever() {
        let mut flow = flow(10);
        push(&mut flow);
        flow.answered(10, 10, 0);
        assert!(!flow.is_behind());
        assert_eq!(push(&mut flow), None);
    }

    #[test]
    fn test_gap_is_settled_once() {
        let mut flow = flow(3 * CHUNK);
        push(&mut flow);
        flow.answered(0, 0, 0);
        for _ in 0..3 {
            push(&mut flow);
        }
        // The controller lost what it had: each answer names the same length.
        for end in [CHUNK, 2 * CHUNK] {
            flow.answered(CHUNK, end, 5);
            assert_eq!(push(&mut flow), None, "older requests are still on their way");
        }
        flow.answered(CHUNK, 3 * CHUNK, 5);
        assert_eq!(push(&mut flow), Some(Request::Send { offset: 5, length: CHUNK }));
    }

    #[test]
    fn test_reconnect_forgets_offsets_but_not_lengths() {
        let mut flow = flow(2 * CHUNK);
        push(&mut flow);
        flow.answered(0, 0, 0);
        push(&mut flow);
        flow.reconnect();
        assert_eq!(push(&mut flow), Some(Request::Ask));
        flow.answered(0, 0, CHUNK);
        assert_eq!(push(&mut flow), Some(Request::Send { offset: CHUNK, length: CHUNK }));
    }

    #[test]
    fn test_doubt_asks_again() {
        let mut flow = flow(10);
        push(&mut flow);
        flow.answered(10, 10, 10);
        flow.feed.doubted.store(true, Ordering::Release);
        assert_eq!(push(&mut flow), Some(Request::Ask));
        flow.answered(0, 0, 4);
        assert_eq!(push(&mut flow), Some(Request::Send { offset: 4, length: 6 }));
    }
}
