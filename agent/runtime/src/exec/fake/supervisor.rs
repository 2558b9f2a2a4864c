//! A supervisor that is a task, and a command that is a few words of shell.
//!
//! A command is words with `;` between: `true`, `echo WORDS`, `echo WORDS >> FILE`, `sleep SECONDS`, `exit CODE` and
//! `trap '' TERM`, after which only SIGKILL ends it. Anything else is a program that does not exist.
//!
//! Owns one job from the first client to the exit record. Hides that there is no process. Invariant: everything is
//! one future, so to drop it is to kill the whole job at once, and to stop polling it is to halt the job.

use std::fs::OpenOptions;
use std::future::Future;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, Instant};

use agent_model::protocol::start::Deadline;
use agent_model::{Boot, Clock as _, ExitStatus, SystemClock, Timestamp};
use agent_shim::KillCount;
use agent_shim::segments::Writer;
use agent_shim::tracking::Intake;
use agent_shim::wire::{Event, Progress, Request};
use agent_shim::{End, ExitRecord, Hello, JobDir, Launch, NotStarted, ShimPlace, VERSION, process};
use futures_util::future::FutureExt as _;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

/// How long it waits for `go`, and how long clients that were told of the end may take to leave.
const GO: Duration = Duration::from_secs(60);
const FAREWELL: Duration = Duration::from_secs(1);

const TERM: i32 = 15;
const KILL: i32 = 9;

/// Where the kernel counts the processes it kills next to the supervisor of a job.
pub(super) fn kills(dir: &JobDir) -> PathBuf {
    dir.path().join("kills")
}

/// A command and its output.
pub(super) struct Job {
    dir: JobDir,
    launch: Launch,
    instance: String,
    log: Writer,
    tracking: Intake,
    life: watch::Sender<Life>,
}

/// The state of a job.
#[derive(Debug, Default, Clone)]
struct Life {
    told_to_go: bool,
    started_at: Option<Timestamp>,
    progress: Progress,
    /// SIGTERM has no effect.
    stubborn: bool,
    lease: Deadline,
    /// It is being ended, and SIGKILL is sent at this time.
    kill_at: Option<Boot>,
    stopped: Option<String>,
    /// How much longer than it was ordered it may run.
    more: Duration,
    timed_out: bool,
    lease_over: bool,
    /// Its exit record is there.
    over: bool,
}

impl Life {
    /// SIGTERM now, SIGKILL after `grace`; a shorter grace counts.
    fn end(&mut self, now: Boot, grace: Duration) {
        let kill_at = now + grace;
        self.kill_at = Some(self.kill_at.map_or(kill_at, |other| other.min(kill_at)));
    }

    /// How the command was ended from outside by now, or when to look again.
    fn keep_time(
        &mut self,
        now: Boot,
        launch: &Launch,
        timeout: Option<Boot>,
    ) -> Result<ExitStatus, Option<Boot>> {
        let is_over = |date: Option<Boot>| date.is_some_and(|date| now >= date);
        let timeout = timeout.map(|timeout| timeout + self.more);
        if self.kill_at.is_none() {
            self.timed_out = is_over(timeout);
            self.lease_over = !self.timed_out && self.lease.is_over(now);
            if !self.timed_out && !self.lease_over {
                return Err(timeout.into_iter().chain(self.lease.at()).min());
            }
            self.end(now, launch.grace);
        }
        match is_over(self.kill_at) {
            _ if !self.stubborn => Ok(ExitStatus::Signal(TERM)),
            true => Ok(ExitStatus::Signal(KILL)),
            false => Err(self.kill_at),
        }
    }

    /// Lets it run until `until` at least, or returns why not.
    fn renew(&mut self, until: Boot) -> Event {
        let refused = |why: &str| Event::Refused { why: why.to_owned() };
        match self.lease.at() {
            None => refused("this job has no lease"),
            Some(_) if self.kill_at.is_some() || self.over => refused("the job is being ended"),
            Some(known) => {
                self.lease.hear(until);
                Event::Renewed { until_ms: known.max(until).millis() }
            }
        }
    }
}

/// Lets a job run so long in all, or says why not.
fn limit(life: &mut Life, known: Option<Duration>, limit: Duration) -> Event {
    let refused = |why: &str| Event::Refused { why: why.to_owned() };
    match known {
        None => refused("this job has no time limit"),
        Some(_) if life.kill_at.is_some() || life.over => refused("the job is being ended"),
        Some(known) => {
            life.more = life.more.max(limit.saturating_sub(known));
            let all = known + life.more;
            Event::Limited { timeout_ms: u64::try_from(all.as_millis()).unwrap_or(u64::MAX) }
        }
    }
}

impl Job {
    pub(super) fn new(dir: &JobDir, launch: Launch) -> io::Result<Job> {
        let instance = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned();
        let log = Writer::open(dir.segments(), launch.log)?;
        OpenOptions::new().append(true).create(true).open(dir.tracking())?;
        let tracking = Intake::open(dir, launch.log)?;
        let life = watch::Sender::new(Life { lease: Deadline::new(launch.lease_until), ..Life::default() });
        Ok(Job { dir: dir.clone(), launch, instance, log, tracking, life })
    }

    pub(super) fn hello(&self) -> Hello {
        Hello {
            version: VERSION,
            instance: self.instance.clone(),
            replica: self.launch.replica.clone(),
            // Not a real process number, like that in a container: no reader signals or moves that process.
            pid: 1,
            container: true,
            boot_id: process::boot_id(),
            at: SystemClock.now(),
            containment: String::new(),
            groups: Vec::new(),
            kills: Some(KillCount { file: kills(&self.dir), kills: 0 }),
        }
    }

    /// From the wait for `go` to the end.
    async fn live(&mut self) -> End {
        let never = End::NeverStarted;
        let mut life = self.life.subscribe();
        let told = life.wait_for(|life| life.told_to_go || life.kill_at.is_some()).map(drop);
        if tokio::time::timeout(GO, told).await.is_err() {
            return never(NotStarted::NoGo);
        }
        if self.life.borrow().kill_at.is_some() {
            return never(NotStarted::Stopped);
        }
        let begun = SystemClock.boot();
        if self.life.borrow().lease.is_over(begun) {
            self.life.send_modify(|life| life.lease_over = true);
            return never(NotStarted::LeaseOver);
        }
        if let Err(error) = self.dir.mark_started(&self.instance) {
            let os_error = error.raw_os_error().unwrap_or(0);
            return never(NotStarted::Setup { step: "mark the start".to_owned(), os_error });
        }
        self.life.send_modify(|life| life.started_at = Some(SystemClock.now()));
        let ended = self.ended_by_others(begun);
        tokio::select! {
            biased;
            status = ended => End::Exited(status),
            status = self.run() => End::Exited(status),
        }
    }

    /// Waits until the command is ended from outside: by an order, or because its time or its lease is over.
    fn ended_by_others(&self, begun: Boot) -> impl Future<Output = ExitStatus> + use<> {
        let (life, launch) = (self.life.clone(), self.launch.clone());
        let timeout = launch.timeout.map(|timeout| begun + timeout);
        async move {
            let mut changes = life.subscribe();
            loop {
                let now = SystemClock.boot();
                let mut kept = Err(None);
                life.send_if_modified(|life| {
                    kept = life.keep_time(now, &launch, timeout);
                    false
                });
                let date = match kept {
                    Ok(status) => return status,
                    Err(date) => date,
                };
                // Every change wakes it anyway.
                let pause = date.map_or(GO, |date| date.since(now));
                let _ = tokio::time::timeout(pause, changes.changed()).await;
            }
        }
    }

    /// Runs the command.
    async fn run(&mut self) -> ExitStatus {
        let script = self.launch.argv.last().cloned().unwrap_or_default();
        for command in script.split(';') {
            let words: Vec<&str> = command.split_whitespace().collect();
            match words.as_slice() {
                [] | ["true"] => {}
                ["trap", "''", "TERM"] => self.life.send_modify(|life| life.stubborn = true),
                ["sleep", seconds] => {
                    let seconds = seconds.parse().unwrap_or_default();
                    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
                }
                ["exit", code] => return ExitStatus::Code(code.parse().unwrap_or_default()),
                ["echo", words @ .., ">>", file] => {
                    let path = self.dir.data().join(&self.launch.cwd).join(file);
                    if append(&path, &words.join(" ")).is_err() {
                        return ExitStatus::Code(1);
                    }
                }
                ["echo", words @ ..] => {
                    let line = words.join(" ") + "\n";
                    self.log.append(line.as_bytes(), Instant::now());
                }
                _ => return ExitStatus::Code(127),
            }
            self.tracking.take(Instant::now());
            self.publish();
        }
        ExitStatus::Code(0)
    }

    /// Reports to watching clients how much there is.
    fn publish(&self) {
        let now = Progress { log_bytes: self.log.len(), tracking_bytes: self.tracking.bytes() };
        self.life.send_modify(|life| life.progress = now);
    }

    /// Writes the exit record.
    fn finish(&mut self, end: End) {
        self.log.finish();
        self.log.sync();
        self.tracking.finish();
        self.publish();
        let life = self.life.borrow().clone();
        let record = ExitRecord {
            version: VERSION,
            instance: self.instance.clone(),
            replica: self.launch.replica.clone(),
            end,
            started_at: life.started_at,
            ended_at: SystemClock.now(),
            stopped: life.stopped,
            stop_signal: None,
            stop_sender: None,
            timed_out: life.timed_out,
            lease_over: life.lease_over,
            oom: None,
            oom_kills: 0,
            memory_peak: None,
            limits: self.launch.limits,
            limits_unmet: Vec::new(),
            containment: "process group".to_owned(),
            log_bytes: self.log.len(),
            log_dropped: self.log.gaps().bytes,
            log_error: self.log.error().map(str::to_owned),
            gaps: self.log.gaps(),
            log_sha256: Some(self.log.sha256()),
            tracking_bytes: self.tracking.bytes(),
            tracking_error: self.tracking.error(),
            max_rss: 0,
            cpu_ms: 0,
            leftovers: 0,
            unkilled: 0,
        };
        // If the directory was removed, nobody needs the record.
        let text = serde_json::to_vec(&record).unwrap_or_default();
        let _ = agent_fs::write_durable(&self.dir.exit(), &text);
        self.life.send_modify(|life| life.over = true);
    }
}

fn append(path: &Path, line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())
}

/// Runs the supervisor of a job, as a shim does, until the end is recorded and reported.
pub(super) async fn supervise(mut job: Job, place: ShimPlace, listener: UnixListener) {
    let (life, instance, socket) = (job.life.clone(), job.instance.clone(), job.dir.socket());
    let timeout = job.launch.timeout;
    let mut clients = FuturesUnordered::new();
    let end = {
        let mut ended = pin!(job.live());
        loop {
            tokio::select! {
                end = &mut ended => break end,
                Ok((stream, _)) = listener.accept() => {
                    clients.push(serve(stream, life.clone(), instance.clone(), timeout));
                }
                Some(_) = clients.next() => {} // a client has left
            }
        }
    };
    job.finish(end);
    let _ = tokio::time::timeout(FAREWELL, clients.for_each(|_| std::future::ready(()))).await;
    let _ = std::fs::remove_file(socket);
    drop(place);
}

/// Serves one connection.
async fn serve(
    stream: UnixStream,
    life: watch::Sender<Life>,
    instance: String,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let (input, mut output) = stream.into_split();
    let (mut lines, mut changes) = (BufReader::new(input).lines(), life.subscribe());
    let mut say = async |event: Event| output.write_all(event.to_line().as_bytes()).await;
    let (gone, mut watches, mut sent) = (life.borrow().told_to_go, false, None);
    say(Event::Hello { version: VERSION, instance, gone }).await?;
    loop {
        let (progress, over) = {
            let now = changes.borrow_and_update();
            (now.progress, now.over)
        };
        if watches && sent.replace(progress) != Some(progress) {
            say(Event::Progress(progress)).await?;
        }
        if over {
            return say(Event::Ended).await;
        }
        let line = tokio::select! {
            _ = changes.changed() => continue,
            line = lines.next_line() => line?,
        };
        let Some(line) = line else { return Ok(()) };
        let answer = match serde_json::from_str(&line) {
            Err(error) => Event::Refused { why: error.to_string() },
            Ok(Request::Watch) => {
                watches = true;
                continue;
            }
            Ok(Request::Go) => {
                life.send_modify(|life| life.told_to_go = true);
                let _ = changes.wait_for(|life| life.started_at.is_some() || life.over).await;
                Event::Going
            }
            Ok(Request::Secret { .. }) => Event::Taken,
            Ok(Request::Session) => Event::Refused { why: "nothing of this job is real".to_owned() },
            Ok(Request::Stop { grace_ms, reason }) => {
                let grace = Duration::from_millis(grace_ms);
                life.send_modify(|life| {
                    life.stopped.get_or_insert(reason);
                    life.end(SystemClock.boot(), grace);
                });
                Event::Stopping
            }
            Ok(Request::Limit { timeout_ms }) => {
                let mut answer = Event::Unknown;
                let wanted = Duration::from_millis(timeout_ms);
                life.send_modify(|life| answer = limit(life, timeout, wanted));
                answer
            }
            Ok(Request::Renew { until_ms }) => {
                let mut answer = Event::Unknown;
                life.send_modify(|life| answer = life.renew(Boot::from_millis(until_ms)));
                answer
            }
        };
        say(answer).await?;
    }
}
