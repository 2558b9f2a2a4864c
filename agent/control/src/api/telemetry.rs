//! `Telemetry`: logs and tracking records, received from nodes and sent to readers.
//!
//! Append writes what comes in and wakes the followers; whenever no forced write goes on, one begins for all that was
//! written since the last, and only after that it is answered. So many small appends share one forced write, and none
//! waits for one before it is read. Memory is bounded by [`BATCH`] for each stream, whatever a node sends, and what is
//! not forced yet by [`UNFORCED`]. A reader that follows goes through the attempts of a job, one after the other, and
//! ends when the job has ended and every byte is sent.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use agent_blocking::{Blocking, spawn_blocking};
use agent_cas::Hasher;
use agent_model::{Channel, Code, Epoch, Fault, JobId, ReplicaId, size};
use agent_proto::v1;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt, Stream, StreamExt, TryStreamExt};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use super::{Caller, Refusal, Services, invalid};
use crate::archive::{self, Archive, ArchiveError, LogFile};
use crate::queue::{JobView, Standing};
use crate::store::{RankEnd, RankPlace};

/// Bytes taken from an append stream before they are written.
const BATCH: usize = 4 * 1024 * 1024;
/// Bytes that are written and not forced, beside those that are being forced.
const UNFORCED: usize = 64 * 1024 * 1024;
/// Requests that are written and not answered, likewise.
const UNANSWERED: usize = 1024;
/// Channels an append stream keeps open.
const OPEN_LOG_FILES: usize = 256;
/// Bytes in one message to a reader.
const CHUNK: usize = 256 * 1024;
/// The longest line of tracking records; a longer one is skipped.
pub(super) const LONGEST_LINE: usize = 1024 * 1024;

/// The word for the channel of tracking records.
const TRACKING: &str = "tracking";

/// Replica and channel, as they are written on the wire.
type ChannelKey = (String, String);

/// The requests of one append stream.
type Requests = BoxStream<'static, Result<v1::AppendRequest, Status>>;
/// A stream of answers.
type Answers<T> = BoxStream<'static, Result<T, Status>>;

/// Takes the logs of a node that is in the controller's own process: what `Append` does, without a connection, so that
/// no byte is encoded, and the task that sends does the work. Clones do the same.
#[derive(Clone)]
pub struct LogIntake(Services);

impl LogIntake {
    pub(crate) fn new(services: Services) -> LogIntake {
        LogIntake(services)
    }

    /// Answers each of `requests`, in order, with the length that is then safely stored.
    pub fn append(
        &self,
        requests: impl Stream<Item = v1::AppendRequest> + Send + 'static,
    ) -> BoxStream<'static, Result<v1::AppendResponse, Status>> {
        let caller = Caller::own(&self.0.gate);
        Intake::new(self.0.clone(), requests.map(Ok).boxed(), caller).answers()
    }
}

/// One append stream.
struct Intake {
    services: Services,
    requests: Requests,
    /// The log files written lately; `false` for one that accepts no more bytes.
    log_files: HashMap<ChannelKey, (Arc<LogFile>, bool)>,
    caller: Caller,
    /// What was written and is not being forced yet, in the order of the requests.
    written: Written,
    /// The forced write that goes on, with the answers to what it forces.
    forcing: Option<Blocking<Vec<v1::AppendResponse>>>,
    /// Whose records were stored and answered, and may be those of a trial.
    stored: BTreeSet<ReplicaId>,
    /// How the stream ends when everything is answered.
    end: Option<Result<(), Status>>,
}

impl Intake {
    fn new(services: Services, requests: Requests, caller: Caller) -> Intake {
        let (log_files, written) = (HashMap::new(), Written::default());
        let stored = BTreeSet::new();
        Intake { services, requests, log_files, caller, written, forcing: None, stored, end: None }
    }

    fn answers(self) -> Answers<v1::AppendResponse> {
        let batches = stream::try_unfold(self, |mut intake| async move {
            Ok::<_, Status>(intake.next().await?.map(|answers| (answers, intake)))
        });
        batches.map_ok(|answers| stream::iter(answers.into_iter().map(Ok))).try_flatten().boxed()
    }

    /// Stores requests as they come; returns answers, one for each. `None` when the stream is over.
    ///
    /// A refusal ends the stream, after every request before the refused one was answered: so the node knows
    /// which one it was.
    async fn next(&mut self) -> Result<Option<Vec<v1::AppendResponse>>, Status> {
        for replica in std::mem::take(&mut self.stored) {
            if let Err(refusal) = Box::pin(self.services.observe(&replica, false)).await {
                let error = Status::from(refusal);
                tracing::warn!(%replica, %error, "cannot look at records of a trial now");
            }
        }
        loop {
            let takes_more = self.end.is_none() && !self.written.is_much();
            tokio::select! {
                answers = forced(&mut self.forcing), if self.forcing.is_some() => {
                    self.force();
                    let answers = answers?;
                    let of_tracking = answers.iter().filter(|answer| answer.channel == TRACKING);
                    self.stored.extend(of_tracking.filter_map(|answer| answer.replica.parse().ok()));
                    return Ok(Some(answers));
                }
                batch = batch(&mut self.requests, &self.services), if takes_more => match batch {
                    Ok(batch) if batch.is_empty() => self.end = Some(Ok(())),
                    Ok(batch) => self.take(batch).await?,
                    Err(status) => self.end = Some(Err(status)),
                },
                else => return self.end.take().unwrap_or(Ok(())).map(|()| None),
            }
            if self.forcing.is_none() {
                self.force();
            }
        }
    }

    /// Writes a batch, and wakes the followers of its logs.
    async fn take(&mut self, batch: Vec<v1::AppendRequest>) -> Result<(), Status> {
        let mut work = Vec::with_capacity(batch.len());
        for request in batch {
            match self.log_file(&request.replica, &request.channel).await {
                Ok((log_file, writable)) => work.push((request, log_file, writable)),
                Err(refusal) => {
                    self.end = Some(Err(refusal.into()));
                    break;
                }
            }
        }
        let bytes: usize = work.iter().map(|(request, ..)| request.data.len()).sum();
        let written = Archive::blocking(move || Ok(write(work))).await.map_err(Refusal::from)?;
        self.written.add(written, bytes);
        self.written.log_files.iter().for_each(|log_file| log_file.tell());
        tokio::task::yield_now().await; // followers first
        Ok(())
    }

    /// Begins to force what was written.
    fn force(&mut self) {
        let written = std::mem::take(&mut self.written);
        self.forcing = (!written.answers.is_empty()).then(|| spawn_blocking(|| written.force()));
    }

    async fn log_file(&mut self, replica: &str, channel: &str) -> Result<(Arc<LogFile>, bool), Refusal> {
        let key = (replica.to_owned(), channel.to_owned());
        if let Some(open) = self.log_files.get(&key) {
            return Ok(open.clone());
        }
        let replica: ReplicaId = replica.parse()?;
        let channel = parse_channel(channel)?;
        require_its_own(&self.services, &self.caller, &replica).await?;
        let writable = match self.services.queue.wants_log(&replica).await? {
            Standing::Open => true,
            Standing::Settled => false,
            Standing::Fenced => return Err(no_attempt(&replica).into()),
            Standing::Ahead => return Err(Refusal::Unheard),
            Standing::Unknown => match self.services.store.job(&replica.job).await? {
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

/// A node writes the logs of those ranks alone that it has or had. What the controller does not know yet, because it is
/// ahead of the record, is looked at when it is known.
async fn require_its_own(services: &Services, caller: &Caller, replica: &ReplicaId) -> Result<(), Refusal> {
    let job = match services.queue.job(&replica.job).await? {
        Some(view) => Some(view.job),
        None => services.store.job(&replica.job).await?.map(Arc::new),
    };
    let Some(job) = job.filter(|job| replica.epoch <= job.epoch && !job.is_removed()) else { return Ok(()) };
    match job.seat(replica) {
        RankPlace::On(node) => caller.speaks_for(node),
        RankPlace::Unrecorded => Ok(()),
        RankPlace::NotYet => Err(Refusal::Unheard),
        RankPlace::Nowhere => Err(no_attempt(replica).into()),
    }
}

/// The answers of a forced write, once it is over.
async fn forced(
    forcing: &mut Option<Blocking<Vec<v1::AppendResponse>>>,
) -> Result<Vec<v1::AppendResponse>, Status> {
    let Some(running) = forcing else { return Ok(Vec::new()) };
    let answers = running.await;
    *forcing = None;
    answers.map_err(|_| Refusal::Stopping.into())
}

/// The next request and those that wait behind it; empty when the stream is over.
async fn batch(requests: &mut Requests, services: &Services) -> Result<Vec<v1::AppendRequest>, Status> {
    let first = tokio::select! {
        request = requests.try_next() => request?,
        () = services.queue.closed() => return Err(Refusal::Stopping.into()),
    };
    let Some(first) = first else { return Ok(Vec::new()) };
    let mut taken = first.data.len();
    let mut batch = vec![first];
    // A broken stream fails again at the next call; earlier requests are stored first.
    while taken < BATCH
        && let Some(Some(Ok(request))) = requests.next().now_or_never()
    {
        taken += request.data.len();
        batch.push(request);
    }
    Ok(batch)
}

/// Requests whose bytes were written.
#[derive(Default)]
struct Written {
    log_files: Vec<Arc<LogFile>>,
    /// One for each request, with the index of its log file.
    answers: Vec<(usize, v1::AppendResponse)>,
    bytes: usize,
}

impl Written {
    fn is_much(&self) -> bool {
        self.bytes >= UNFORCED || self.answers.len() >= UNANSWERED
    }

    fn add(&mut self, answers: Vec<(Arc<LogFile>, v1::AppendResponse)>, bytes: usize) {
        self.bytes += bytes;
        for (log_file, answer) in answers {
            let known = self.log_files.iter().position(|known| Arc::ptr_eq(known, &log_file));
            let index = known.unwrap_or_else(|| {
                self.log_files.push(log_file);
                self.log_files.len() - 1
            });
            self.answers.push((index, answer));
        }
    }

    /// Forces the log files to the disk together, and says how much of each is stored. One that cannot be forced now
    /// fails alone. Blocks.
    fn force(self) -> Vec<v1::AppendResponse> {
        let stored = archive::sync_all(&self.log_files);
        let complete = |(index, answer): (usize, v1::AppendResponse)| match &stored[index] {
            Ok(stored) => v1::AppendResponse { stored: *stored, ..answer },
            // The length that was safe before is not known here, and 0 is never too much: the node asks before it
            // goes on.
            Err(error) => v1::AppendResponse { failed: why(error), ..answer },
        };
        self.answers.into_iter().map(complete).collect()
    }
}

/// Writes a batch; an answer for each request, without how much is stored. One that cannot be written now fails alone.
/// Blocks.
fn write(work: Vec<(v1::AppendRequest, Arc<LogFile>, bool)>) -> Vec<(Arc<LogFile>, v1::AppendResponse)> {
    let one = |(request, log_file, writable): (v1::AppendRequest, Arc<LogFile>, bool)| {
        let appended = if writable { log_file.append(request.offset, &request.data) } else { Ok(()) };
        let failed = appended.err().map(|error| why(&error)).unwrap_or_default();
        let end = request.offset.saturating_add(request.data.len() as u64);
        let (replica, channel) = (request.replica, request.channel);
        (log_file, v1::AppendResponse { replica, channel, stored: 0, failed, end })
    };
    work.into_iter().map(one).collect()
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
    /// What was read of the attempt, as long as that is all of it from its beginning.
    read: Hasher,
}

/// Bytes of one attempt.
struct AttemptPiece {
    epoch: Epoch,
    offset: u64,
    data: Bytes,
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
            read: Hasher::new(),
        })
    }

    /// The record of an attempt knows how long the log was when it was complete, and what was in it. What is missing of
    /// that, or is something else, is told after what there is.
    fn require_all(&mut self) -> Result<(), Status> {
        let there = self.log_file.len();
        let read = std::mem::take(&mut self.read).finish();
        let (whole, digest) = {
            let view = self.view.borrow();
            let rank = view.job.rank(self.rank).filter(|_| view.job.epoch == self.epoch);
            let outcome = rank.and_then(|rank| match &rank.end {
                Some(RankEnd::Told(outcome)) => Some(outcome),
                _ => None,
            });
            match (outcome, self.channel) {
                (None, _) => (0, None),
                (Some(outcome), Channel::Tracking) => match &outcome.tracking {
                    Some(digest) => (digest.size, Some(**digest)),
                    None => (outcome.tracking_bytes, None),
                },
                (Some(_), Channel::System) => (0, None), // nothing promises how much there is
                (Some(outcome), Channel::Log(stream)) => {
                    let end = outcome.streams.iter().find(|end| end.stream == stream);
                    end.map_or((0, None), |end| (end.digest.size, Some(end.digest)))
                }
            }
        };
        let is_other = digest.is_some_and(|digest| digest.size == read.size && digest.hash != read.hash);
        if there >= whole && !is_other {
            return Ok(());
        }
        let what = match self.channel {
            Channel::Tracking => "metrics".to_owned(),
            Channel::System => "use of the machine".to_owned(),
            Channel::Log(stream) => format!("{stream} log"),
        };
        let (told, why) = match is_other {
            true => (
                format!("some of the {} of the {what} are not what the job wrote", size::binary(whole)),
                format!(
                    "{} had another digest of them when it ended; somebody or the disk changed its file",
                    self.job
                ),
            ),
            false => (
                format!(
                    "{} of {} of the {what} are gone from the archive",
                    size::binary(whole - there),
                    size::binary(whole)
                ),
                format!("{} had them when the job ended; somebody removed or shortened its file", self.job),
            ),
        };
        let fault = Fault::new(Code::ControllerStore, told)
            .why(why)
            .fix("bring the file back from a backup of `controller/archive`, if there is one");
        let status = agent_proto::status(&fault);
        Err(Status::with_details(tonic::Code::DataLoss, status.message(), status.details().to_vec().into()))
    }

    /// The next bytes; `None` when there will be none.
    async fn next(&mut self) -> Result<Option<AttemptPiece>, Refusal> {
        loop {
            // In this order: once the attempt is over its log file does not grow.
            let (over, next_epoch) = self.attempt();
            self.growth.mark_unchanged();
            if let Some(piece) = self.read().await? {
                if piece.offset == self.read.size() {
                    self.read.update(&piece.data);
                }
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
        (self.epoch, self.offset, self.read) = (epoch, 0, Hasher::new());
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
            // Of records whole lines are read, which pieces need not be.
            let fresh = log_file.fresh(offset).filter(|_| self.channel != Channel::Tracking);
            let mut data = match fresh {
                Some(data) => data,
                None => match log_file.read_cached(offset, most) {
                    Some(data) => data.into(),
                    None => Archive::blocking(move || log_file.read(offset, most)).await?.into(),
                },
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
                    None => {
                        if self.attempt().0 && self.offset == self.read.size() {
                            self.read.update(&data); // no line, and there will be no more of it
                        }
                        return Ok(None);
                    }
                }
            }
            self.offset += data.len() as u64;
            return Ok(Some(AttemptPiece { epoch: self.epoch, offset, data }));
        }
        Ok(None)
    }

    /// All pieces, to the end.
    fn pieces(self) -> impl Stream<Item = Result<AttemptPiece, Status>> + Send {
        stream::try_unfold(self, |mut reader| async move {
            let next = reader.next().await?;
            if next.is_none() {
                reader.require_all()?;
            }
            Ok(next.map(|piece| (piece, reader)))
        })
    }
}

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
        let of_stream = caller.clone();
        let intake = Intake::new(self.clone(), request.into_inner().boxed(), caller);
        Ok(Response::new(of_stream.while_allowed(intake.answers())))
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
        Ok(Response::new(caller.while_allowed(pieces)))
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
        Ok(Response::new(caller.while_allowed(pieces)))
    }
}
