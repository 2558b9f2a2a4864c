//! `Telemetry`: logs and tracking records, received from nodes and sent to readers.
//!
//! Append takes all waiting requests, writes their bytes, wakes the followers, forces the bytes to the disk, and only
//! then answers: many small appends share one forced write. Memory is bounded by [`BATCH`] for each stream, whatever
//! a node sends. A reader that follows goes through the attempts of a job, one after the other, and ends when the job
//! has ended and every byte is sent.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use agent_model::{Code, Epoch, Fault, JobId, Principal, ReplicaId};
use agent_proto::v1;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use super::{Caller, Refusal, Services, invalid};
use crate::archive::{self, Archive, ArchiveError, Channel, LogFile};
use crate::queue::{JobView, Standing};

/// Bytes taken from an append stream before they are written.
const BATCH: usize = 4 * 1024 * 1024;
/// Channels an append stream keeps open.
const OPEN_LOG_FILES: usize = 64;
/// Bytes in one message to a reader.
const CHUNK: usize = 256 * 1024;
/// The longest line of tracking records; a longer one is skipped.
const LONGEST_LINE: usize = 1024 * 1024;

/// Replica and channel, as they are written on the wire.
type ChannelKey = (String, String);

/// One append stream.
struct Intake {
    services: Services,
    requests: Streaming<v1::AppendRequest>,
    /// The log files written lately; `false` for one that accepts no more bytes.
    log_files: HashMap<ChannelKey, (Arc<LogFile>, bool)>,
    caller: Caller,
    /// Why the request after the last answered one is refused.
    refusal: Option<Refusal>,
}

impl Intake {
    /// Stores the waiting requests; one answer for each. `None` when the stream is over.
    ///
    /// A refusal ends the stream, after every request before the refused one was answered: so the node knows
    /// which one it was.
    async fn next(&mut self) -> Result<Option<Vec<v1::AppendResponse>>, Status> {
        let batch = match self.refusal.take() {
            Some(refusal) => return Err(refusal.into()),
            None => self.batch().await?,
        };
        let mut work = Vec::with_capacity(batch.len());
        for request in batch {
            match self.log_file(&request.replica, &request.channel).await {
                Ok((log_file, writable)) => work.push((request, log_file, writable)),
                Err(refusal) if work.is_empty() => return Err(refusal.into()),
                Err(refusal) => {
                    self.refusal = Some(refusal);
                    break;
                }
            }
        }
        if work.is_empty() {
            return Ok(None);
        }
        let answers = Archive::blocking(move || Ok(store(work))).await.map_err(Refusal::from)?;
        Ok(Some(answers))
    }

    /// The next request and those that wait behind it; empty when the stream is over.
    async fn batch(&mut self) -> Result<Vec<v1::AppendRequest>, Status> {
        let first = tokio::select! {
            request = self.requests.message() => request?,
            () = self.services.queue.closed() => return Err(Refusal::Stopping.into()),
        };
        let Some(first) = first else { return Ok(Vec::new()) };
        let mut taken = first.data.len();
        let mut batch = vec![first];
        // A broken stream fails again at the next call; earlier requests are stored first.
        while taken < BATCH
            && let Some(Ok(request)) = self.waiting().await
        {
            taken += request.data.len();
            batch.push(request);
        }
        Ok(batch)
    }

    /// The next request if it is here already.
    async fn waiting(&mut self) -> Option<Result<v1::AppendRequest, Status>> {
        std::future::poll_fn(|context| match self.requests.poll_next_unpin(context) {
            Poll::Ready(request) => Poll::Ready(request),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    /// A node with a certificate may not write logs of replicas on other nodes.
    async fn require_its_own(&self, replica: &ReplicaId) -> Result<(), Refusal> {
        let job = self.services.queue.job(&replica.job).await?.map(|view| view.job);
        let latest = job.filter(|job| job.epoch == replica.epoch);
        match latest.as_ref().and_then(|job| job.rank(replica.rank)) {
            Some(placed) => self.caller.speaks_for(&placed.node),
            None => Ok(()),
        }
    }

    /// The caller is a machine that may bring jobs.
    fn brings_jobs(&self) -> bool {
        match self.caller.who() {
            Principal::Node { name } => !self.services.gate.registry.takes_jobs_of(name).is_empty(),
            Principal::User { .. } | Principal::Local { .. } => false,
        }
    }

    async fn log_file(&mut self, replica: &str, channel: &str) -> Result<(Arc<LogFile>, bool), Refusal> {
        let key = (replica.to_owned(), channel.to_owned());
        if let Some(open) = self.log_files.get(&key) {
            return Ok(open.clone());
        }
        let replica: ReplicaId = replica.parse()?;
        let channel = parse_channel(channel)?;
        self.require_its_own(&replica).await?;
        let writable = match self.services.queue.wants_log(&replica).await? {
            Standing::Open => true,
            Standing::Settled => false,
            Standing::Fenced => return Err(no_attempt(&replica).into()),
            Standing::Ahead => return Err(Refusal::Unheard),
            Standing::Unknown => match self.services.store.job(&replica.job).await? {
                // A machine that joins with its jobs sends their logs first.
                None if self.brings_jobs() => true,
                None => return Err(Refusal::Unheard),
                Some(job) if replica.epoch > job.epoch => return Err(no_attempt(&replica).into()),
                Some(_) => false,
            },
        };
        let log_file = self.services.archive.log_file(&replica, channel).await?;
        if self.log_files.len() >= OPEN_LOG_FILES {
            self.log_files.clear();
        }
        self.log_files.insert(key, (Arc::clone(&log_file), writable));
        Ok((log_file, writable))
    }
}

/// Writes a batch, forces its log files to the disk together, and returns how much of each is stored. A log file that
/// cannot be written or forced now fails alone. Blocks.
fn store(work: Vec<(v1::AppendRequest, Arc<LogFile>, bool)>) -> Vec<v1::AppendResponse> {
    let mut log_files: Vec<Arc<LogFile>> = Vec::new();
    let mut answers = Vec::with_capacity(work.len());
    for (request, log_file, writable) in work {
        let appended = if writable { log_file.append(request.offset, &request.data) } else { Ok(()) };
        let failed = appended.err().map(|error| why(&error)).unwrap_or_default();
        let known = log_files.iter().position(|known| Arc::ptr_eq(known, &log_file));
        let index = known.unwrap_or_else(|| {
            log_files.push(log_file);
            log_files.len() - 1
        });
        let end = request.offset.saturating_add(request.data.len() as u64);
        let (replica, channel) = (request.replica, request.channel);
        answers.push((index, v1::AppendResponse { replica, channel, stored: 0, failed, end }));
    }
    let stored = archive::sync_all(&log_files);
    let complete = |(index, answer): (usize, v1::AppendResponse)| match &stored[index] {
        Ok(stored) => v1::AppendResponse { stored: *stored, ..answer },
        // The length that was safe before is not known here, and 0 is never too much: the node asks before it goes
        // on.
        Err(error) => v1::AppendResponse { failed: why(error), ..answer },
    };
    answers.into_iter().map(complete).collect()
}

/// An error with its causes, in one line for the node's log.
fn why(error: &ArchiveError) -> String {
    tracing::warn!(error = error as &dyn std::error::Error, "cannot store log now");
    Fault::new(Code::ControllerStore, "cannot store log now").because(error).to_string()
}

fn parse_channel(word: &str) -> Result<Channel, Fault> {
    Channel::parse(word).ok_or_else(|| invalid(format!("`{word}` is not a channel")))
}

fn no_attempt(replica: &ReplicaId) -> Fault {
    Fault::new(Code::Fenced, format!("there was never an attempt `{replica}`"))
}

/// The request of a reader.
struct Wish {
    job: JobId,
    epoch: u64,
    rank: u32,
    channel: Channel,
    offset: u64,
    follow: bool,
    tail_lines: u64,
}

/// The position of one reader.
struct LogReader {
    archive: Archive,
    job: JobId,
    rank: u32,
    channel: Channel,
    follow: bool,
    /// The job, as it changes.
    view: watch::Receiver<JobView>,
    epoch: Epoch,
    offset: u64,
    log_file: Arc<LogFile>,
    growth: watch::Receiver<u64>,
}

/// Bytes of one attempt.
struct AttemptPiece {
    epoch: Epoch,
    offset: u64,
    data: Vec<u8>,
}

impl LogReader {
    async fn open(
        services: &Services,
        wish: Wish,
        mut view: watch::Receiver<JobView>,
    ) -> Result<LogReader, Refusal> {
        view.mark_unchanged();
        let latest = view.borrow().job.epoch;
        let epoch = if wish.epoch == 0 { latest } else { Epoch(wish.epoch) };
        if epoch > latest {
            return Err(no_attempt(&ReplicaId { job: wish.job, epoch, rank: wish.rank }).into());
        }
        let replica = ReplicaId { job: wish.job, epoch, rank: wish.rank };
        let log_file = services.archive.log_file(&replica, wish.channel).await?;
        let mut offset = wish.offset;
        if wish.tail_lines > 0 {
            let (log_file, lines) = (Arc::clone(&log_file), wish.tail_lines);
            offset = Archive::blocking(move || log_file.tail(lines)).await?;
        }
        Ok(LogReader {
            archive: services.archive.clone(),
            job: replica.job,
            rank: wish.rank,
            channel: wish.channel,
            follow: wish.follow,
            view,
            epoch,
            offset,
            growth: log_file.growth(),
            log_file,
        })
    }

    /// The next bytes; `None` when there will be none.
    async fn next(&mut self) -> Result<Option<AttemptPiece>, Refusal> {
        loop {
            // In this order: once the attempt is over its log file does not grow.
            let (over, next_epoch) = self.attempt();
            self.growth.mark_unchanged();
            if let Some(piece) = self.read().await? {
                return Ok(Some(piece));
            }
            if !self.follow || (over && next_epoch.is_none() && self.ended()) {
                return Ok(None);
            }
            match next_epoch {
                Some(epoch) if over => self.turn_to(epoch).await?,
                _ => self.wait().await?,
            }
        }
    }

    /// Whether the present attempt is over, and which one follows it.
    fn attempt(&self) -> (bool, Option<Epoch>) {
        let view = self.view.borrow();
        let next = (view.job.epoch > self.epoch).then(|| self.epoch.next());
        (next.is_some() || !view.job.state.is_placed(), next)
    }

    fn ended(&self) -> bool {
        self.view.borrow().job.state.is_terminal()
    }

    async fn turn_to(&mut self, epoch: Epoch) -> Result<(), Refusal> {
        let replica = ReplicaId { job: self.job.clone(), epoch, rank: self.rank };
        self.log_file = self.archive.log_file(&replica, self.channel).await?;
        self.growth = self.log_file.growth();
        (self.epoch, self.offset) = (epoch, 0);
        Ok(())
    }

    async fn wait(&mut self) -> Result<(), Refusal> {
        tokio::select! {
            grown = self.growth.changed() => grown.map_err(|_| Refusal::Stopping),
            changed = self.view.changed() => changed.map_err(|_| Refusal::Stopping),
        }
    }

    /// Bytes that are stored already; of tracking records, whole lines.
    async fn read(&mut self) -> Result<Option<AttemptPiece>, Refusal> {
        let mut most = CHUNK;
        while self.log_file.len() > self.offset {
            let (log_file, offset) = (Arc::clone(&self.log_file), self.offset);
            let mut data = match log_file.read_cached(offset, most) {
                Some(data) => data,
                None => Archive::blocking(move || log_file.read(offset, most)).await?,
            };
            if self.channel == Channel::Tracking {
                match data.iter().rposition(|byte| *byte == b'\n') {
                    Some(end) => data.truncate(end + 1),
                    None if data.len() >= LONGEST_LINE => {
                        self.offset += data.len() as u64; // the rest of the line fails to parse, and is skipped
                        continue;
                    }
                    None if data.len() == most => {
                        most *= 2;
                        continue;
                    }
                    None => return Ok(None),
                }
            }
            self.offset += data.len() as u64;
            return Ok(Some(AttemptPiece { epoch: self.epoch, offset, data }));
        }
        Ok(None)
    }

    /// All pieces, to the end.
    fn pieces(self) -> impl Stream<Item = Result<AttemptPiece, Status>> + Send {
        stream::try_unfold(
            self,
            |mut reader| async move { Ok(reader.next().await?.map(|piece| (piece, reader))) },
        )
    }
}

/// A stream of answers.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl v1::telemetry_server::Telemetry for Services {
    type AppendStream = Answers<v1::AppendResponse>;
    type ReadLogStream = Answers<v1::LogChunk>;
    type ReadTrackingStream = Answers<v1::TrackingChunk>;

    async fn append(
        &self,
        request: Request<Streaming<v1::AppendRequest>>,
    ) -> Result<Response<Self::AppendStream>, Status> {
        let caller = Caller::of(&request)?;
        let (services, requests, log_files) = (self.clone(), request.into_inner(), HashMap::new());
        let intake = Intake { services, requests, log_files, caller, refusal: None };
        let batches = stream::try_unfold(intake, |mut intake| async move {
            Ok::<_, Status>(intake.next().await?.map(|answers| (answers, intake)))
        });
        let answers = batches.map_ok(|answers| stream::iter(answers.into_iter().map(Ok))).try_flatten();
        Ok(Response::new(answers.boxed()))
    }

    async fn read_log(
        &self,
        request: Request<v1::ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let job = request.job.parse().map_err(Refusal::from)?;
        let view = self.watch_job(&job, &caller).await?;
        let channel = Channel::parse(&request.stream).filter(|channel| *channel != Channel::Tracking);
        let wish = Wish {
            job,
            epoch: request.epoch,
            rank: request.rank,
            channel: channel
                .ok_or_else(|| Refusal::from(invalid(format!("`{}` is not a log", request.stream))))?,
            offset: request.offset,
            follow: request.follow,
            tail_lines: request.tail_lines,
        };
        let pieces = LogReader::open(self, wish, view).await?.pieces().map_ok(|piece| v1::LogChunk {
            epoch: piece.epoch.0,
            offset: piece.offset,
            data: piece.data,
        });
        Ok(Response::new(pieces.boxed()))
    }

    async fn read_tracking(
        &self,
        request: Request<v1::ReadTrackingRequest>,
    ) -> Result<Response<Self::ReadTrackingStream>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let job = request.job.parse().map_err(Refusal::from)?;
        let view = self.watch_job(&job, &caller).await?;
        let wish = Wish {
            job,
            epoch: request.epoch,
            rank: request.rank,
            channel: Channel::Tracking,
            offset: request.offset,
            follow: request.follow,
            tail_lines: 0,
        };
        let pieces = LogReader::open(self, wish, view).await?.pieces().map_ok(|piece| v1::TrackingChunk {
            epoch: piece.epoch.0,
            offset: piece.offset,
            lines: piece.data,
        });
        Ok(Response::new(pieces.boxed()))
    }
}
