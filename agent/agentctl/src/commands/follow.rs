//! Follows a job until it has ended, even if the daemon is away for a while.
//!
//! One session is a set of open streams: the job as it changes, and its logs. When the connection breaks, the next
//! session opens them again where the last one stopped, so that no byte is shown twice and none is left out.
//!
//! Invariants: a byte of a log is shown once; the job counts as over when it is in a terminal state and as much of
//! its log was shown as its outcome records.

use std::pin::Pin;
use std::process::ExitCode;

use agent_model::{Code, Fault, Stream, last_lines};
use agent_proto::v1;
use futures_util::stream::{SelectAll, Stream as AnyStream, StreamExt};
use tokio::time::{Duration, Instant, sleep};
use tonic::{Status, Streaming};

use super::view::JobView;
use super::why::waiting_advice;
use crate::client::{self, Client, answer};
use crate::failure::{DETACHED, Failure, NOT_THE_JOBS};
use crate::output::Output;

/// How long to wait for a daemon that is away.
const AWAY: Duration = Duration::from_secs(60);
/// Time between two sessions that brought nothing.
const PAUSE: Duration = Duration::from_millis(200);

/// What is shown while a job is followed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wants {
    /// The log on standard output, if one is wanted.
    pub(crate) log: Option<Stream>,
    /// Also messages around it: why the job waits, the build log, which environment it has.
    pub(crate) story: bool,
    /// Begin this many lines before the end of the log; 0 is from its start.
    pub(crate) tail: u64,
    /// Begin with this attempt; 0 is the latest.
    pub(crate) attempt: u64,
    /// Show the log of this rank.
    pub(crate) rank: u32,
}

/// How following ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// With the job.
    Job(Box<JobView>),
    /// The user stopped following; the job goes on.
    Detached,
}

impl Ended {
    /// The job's own code if its command ran; never 0 for a job that did not complete.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Ended::Detached => DETACHED,
            Ended::Job(job) => code_of(job),
        })
    }

    /// Prints in two lines how it ended, and whose fault it was.
    pub(crate) fn tell(&self, output: &mut Output) {
        if let Ended::Job(job) = self {
            let verdict = job.verdict(output.note_paper());
            output.say(&format!("{verdict}\n"));
            job.cause().into_iter().for_each(|fault| output.fault(fault));
        }
    }
}

fn code_of(job: &JobView) -> u8 {
    match job.exit_code {
        // Also with a code that the job file calls a success.
        Some(_) if job.state == "Completed" => 0,
        Some(0) if job.state != "Completed" => 1,
        Some(code) => u8::try_from(code).unwrap_or(1),
        None if job.started_ms.is_some() => 1,
        None => NOT_THE_JOBS,
    }
}

enum FollowEvent {
    Job(Box<v1::Job>),
    Log(Stream, v1::LogChunk),
}

type Events = SelectAll<Pin<Box<dyn AnyStream<Item = Result<FollowEvent, Status>>>>>;

/// More bytes than the lines of a log that a fault has.
const END: usize = 8 << 10;

/// How far one log was shown.
#[derive(Debug, Default, Clone, Copy)]
struct Position {
    epoch: u64,
    offset: u64,
}

struct Follower<'a> {
    client: &'a Client,
    job: &'a str,
    wants: Wants,
    log: Position,
    build: Position,
    /// The job as last seen.
    last: Option<JobView>,
    /// The end of what was shown of the log, at most [`END`] bytes.
    end: Vec<u8>,
    /// When the daemon went away, if it has sent nothing since.
    away: Option<Instant>,
    /// The last messages about waiting, and about the environment.
    said: String,
    environment: String,
    /// The last advice.
    advice: &'static str,
    /// That some of what was to be shown is gone.
    gone: Option<Fault>,
}

/// Follows `job` to its end.
pub(crate) async fn follow(
    client: &Client,
    job: &str,
    wants: Wants,
    output: &mut Output,
) -> Result<Ended, Failure> {
    let log = Position { epoch: wants.attempt, offset: 0 };
    let mut follower = Follower {
        client,
        job,
        wants,
        log,
        build: Position::default(),
        last: None,
        end: Vec::new(),
        away: None,
        said: String::new(),
        environment: String::new(),
        advice: "",
        gone: None,
    };
    tokio::select! {
        ended = follower.until_ended(output) => ended,
        _ = tokio::signal::ctrl_c() => Ok(Ended::Detached),
    }
}

impl Follower<'_> {
    async fn until_ended(&mut self, output: &mut Output) -> Result<Ended, Failure> {
        loop {
            let why = match self.session(output).await {
                Ok(()) if self.last.as_ref().is_some_and(|job| self.has_all_of(job)) => break,
                Ok(()) => Fault::new(Code::Unreachable, "the daemon sent less of the log than there is"),
                Err(Failure::Fault(fault)) if fault.code == Code::Unreachable => *fault,
                Err(failure) => return Err(failure),
            };
            self.wait(why, output).await?;
        }
        output.job_ended()?;
        self.gone.iter().for_each(|fault| output.fault(fault));
        match self.last.take() {
            Some(mut job) => {
                if output.is_one_screen() {
                    job.leave_out_of_cause(&last_lines(&self.end));
                }
                if self.wants.story && self.environment.is_empty() {
                    self.recall_environment(output).await?;
                }
                Ok(Ended::Job(Box::new(job)))
            }
            None => Err(Fault::new(Code::Bug, "the job ended without having been seen").into()),
        }
    }

    /// Opens the streams and shows what they deliver, until all of them have ended.
    async fn session(&mut self, output: &mut Output) -> Result<(), Failure> {
        let mut events = Events::new();
        let request = v1::GetJobRequest { job: self.job.to_owned(), ..Default::default() };
        let changes = answer(self.client.jobs().watch(request)).await?;
        events.push(changes.map(|job| job.map(|job| FollowEvent::Job(Box::new(job)))).boxed_local());
        let logs: &[Stream] = if self.wants.story { &Stream::ALL } else { self.wants.log.as_slice() };
        for log in logs.iter().copied() {
            let chunks = self.open(log).await?;
            events
                .push(chunks.map(move |chunk| chunk.map(|chunk| FollowEvent::Log(log, chunk))).boxed_local());
        }
        while let Some(event) = events.next().await {
            match event {
                Ok(FollowEvent::Job(job)) => self.see(JobView::try_from(*job)?, output),
                Ok(FollowEvent::Log(log, chunk)) => self.show(log, &chunk, output)?,
                Err(status) if client::is_loss(&status) => self.gone = Some(client::fault(&status)),
                Err(status) => return Err(client::fault(&status).into()),
            }
        }
        Ok(())
    }

    /// The job has ended, and all was shown that there is.
    fn has_all_of(&self, job: &JobView) -> bool {
        job.has_ended() && (self.gone.is_some() || is_over(job, self.wants, self.log))
    }

    async fn open(&self, log: Stream) -> Result<Streaming<v1::LogChunk>, Failure> {
        let at = self.position(log);
        let request = v1::ReadLogRequest {
            job: self.job.to_owned(),
            epoch: at.epoch,
            rank: self.wants.rank,
            stream: log.to_string(),
            offset: at.offset,
            follow: true,
            // Only the first time: later sessions continue at an offset.
            tail_lines: if self.last.is_none() { self.wants.tail } else { 0 },
        };
        answer(self.client.telemetry().read_log(request)).await
    }

    fn position(&self, log: Stream) -> Position {
        if Some(log) == self.wants.log { self.log } else { self.build }
    }

    fn show(&mut self, log: Stream, chunk: &v1::LogChunk, output: &mut Output) -> Result<(), Failure> {
        let at = if Some(log) == self.wants.log { &mut self.log } else { &mut self.build };
        *at = Position { epoch: chunk.epoch, offset: chunk.offset + chunk.data.len() as u64 };
        self.away = None;
        if Some(log) == self.wants.log {
            self.end.extend_from_slice(&chunk.data[chunk.data.len().saturating_sub(END)..]);
            self.end.drain(..self.end.len().saturating_sub(END));
            return output.job_bytes(&chunk.data);
        }
        // The end of a build log that arrives after the environment was reported is not needed any more.
        if self.environment.is_empty() {
            output.build_bytes(&chunk.data);
        }
        Ok(())
    }

    fn see(&mut self, job: JobView, output: &mut Output) {
        if self.wants.story {
            self.tell(&job, output);
        }
        if let Some(tasks) = job.tasks.as_ref().filter(|_| !job.has_ended()) {
            let failed = tasks.failed.to_string();
            if failed != self.said && !failed.is_empty() {
                output.note(&format!("failed so far: {failed}; why: agentctl why '{}[INDEX]'", job.job));
                self.said = failed;
            }
            output.busy(&tasks.counts());
        }
        // Once a job has ended, only more of its log shows progress.
        if !job.has_ended() {
            self.away = None;
        }
        self.last = Some(job);
    }

    /// Reports the changes that matter to a user who waits.
    fn tell(&mut self, job: &JobView, output: &mut Output) {
        let attempt = self.last.as_ref().map_or(0, |last| last.attempt);
        if job.attempt > 1 && job.attempt != attempt {
            output.build_ended();
            self.environment.clear();
            output.note(&format!("attempt {} begins", job.attempt));
        }
        let detail = job.replicas.first().map_or("", |replica| replica.detail.as_str());
        if detail.starts_with("environment ") && detail != self.environment {
            detail.clone_into(&mut self.environment);
            output.build_ended();
            output.note(&environment_line(detail));
        }
        match job.state.as_str() {
            "Queued" if !job.detail.is_empty() => {
                self.advise(job, output);
                self.waits(&format!("waiting: {}", job.detail), true, output);
            }
            "Queued" => output.busy("waiting"),
            "Preparing" => self.waits(&job.work(), false, output),
            "NotResponding" => self.waits(&job.detail, true, output),
            "Finalizing" => output.busy(&job.detail),
            // Until it prints: a script may load data for minutes without a word.
            "Running" if self.is_silent(job) => output.busy("running, no output yet"),
            _ => output.rest(),
        }
    }

    /// Whether a log is wanted, and nothing of this attempt was in it.
    fn is_silent(&self, job: &JobView) -> bool {
        let shown = self.log.epoch == job.attempt && self.log.offset > 0;
        self.wants.log.is_some() && !shown
    }

    /// Prints advice about a wait that does not end by itself.
    fn advise(&mut self, job: &JobView, output: &mut Output) {
        let advice = waiting_advice(&job.detail).unwrap_or_default();
        if !advice.is_empty() && self.advice != advice {
            self.said = format!("waiting: {}", job.detail);
            output.note(&self.said);
            output.note(&format!("{advice} Or end it: agentctl cancel {}", job.job));
        }
        self.advice = advice;
    }

    /// Shows a reason to wait; one that `matters` also where there is no terminal.
    fn waits(&mut self, reason: &str, matters: bool, output: &mut Output) {
        if matters && !output.is_lively() && self.said != reason {
            reason.clone_into(&mut self.said);
            output.note(reason);
        }
        output.busy(reason);
    }

    /// Waits for a daemon that went away.
    async fn wait(&mut self, why: Fault, output: &mut Output) -> Result<(), Failure> {
        let now = Instant::now();
        let since = *self.away.get_or_insert_with(|| {
            output.note("the daemon went away; the job goes on without it; waiting for it to come back");
            now
        });
        output.busy("waiting for the daemon to come back");
        sleep(PAUSE.min(now - since)).await;
        if now < since + AWAY && self.client.until_back(since + AWAY).await {
            return Ok(());
        }
        let what = format!("the daemon has been away for {} s", AWAY.as_secs());
        let fault = Fault::new(Code::Unreachable, what).why(why.what).fix(format!(
            "start it again (your own: `agentctl start`), then `agentctl logs -f {}`; the job goes on",
            self.job
        ));
        Err(why.why.into_iter().fold(fault, Fault::why).into())
    }

    /// A short job may have ended before its environment was reported; its history has it.
    async fn recall_environment(&mut self, output: &mut Output) -> Result<(), Failure> {
        let history = self.client.history(self.job).await?;
        let told = |event: &v1::HistoryEvent| {
            let (_, told) = event.text.split_once(": ")?;
            told.starts_with("environment ").then(|| told.to_owned())
        };
        if let Some(told) = history.iter().rev().find_map(told) {
            output.note(&environment_line(&told));
        }
        Ok(())
    }
}

/// The job has ended, and all that its latest attempt wrote was shown.
fn is_over(job: &JobView, wants: Wants, shown: Position) -> bool {
    let ends = job.outcome_of(wants.rank).into_iter().flat_map(|outcome| &outcome.streams);
    let mut ends = ends.filter(|end| Some(end.stream) == wants.log);
    // The outcome is of the latest attempt; if that wrote nothing, its epoch was never shown.
    let missing = |size: u64| if shown.epoch == job.attempt { shown.offset < size } else { size > 0 };
    job.has_ended() && !ends.any(|end| missing(end.digest.size))
}

/// `environment KEY reused` beside the lines about the code and the job.
fn environment_line(detail: &str) -> String {
    format!("env:  {}", detail.trim_start_matches("environment "))
}

#[cfg(test)]
mod tests {
    use agent_model::{Digest, StreamEnd};

    use super::super::view::tests::{ended, failed};
    use super::*;

    #[test]
    fn test_exit_code_is_the_jobs_and_never_0_for_a_failure() {
        assert_eq!(code_of(&ended()), 0);
        let mut job = failed();
        for (told, code) in [(Some(3), 3), (Some(0), 1), (Some(137), 137), (None, 1)] {
            job.exit_code = told;
            assert_eq!(code_of(&job), code, "{told:?}");
        }
        job.started_ms = None;
        assert_eq!(code_of(&job), NOT_THE_JOBS, "it never ran");
    }

    #[test]
    fn test_the_end_is_believed_when_the_whole_log_was_shown() {
        let of = |log| Wants { log: Some(log), story: false, tail: 0, attempt: 0, rank: 0 };
        let mut job = ended();
        assert!(is_over(&job, of(Stream::Job), Position::default()), "an outcome without a log is complete");
        let digest = Digest { size: 10, ..Digest::EMPTY };
        let end = StreamEnd { stream: Stream::Job, digest };
        job.outcome.as_mut().unwrap().streams.push(end);
        for (epoch, offset, over) in [(1, 10, true), (1, 9, false), (0, 0, false)] {
            assert_eq!(is_over(&job, of(Stream::Job), Position { epoch, offset }), over, "{epoch} {offset}");
        }
        assert!(is_over(&job, of(Stream::Build), Position::default()));
        job.state = "Running".into();
        assert!(!is_over(&job, of(Stream::Job), Position { epoch: 1, offset: 10 }));
    }
}
