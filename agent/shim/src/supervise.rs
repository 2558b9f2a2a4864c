//! The loop of the supervisor and the life of its job.
//!
//! ```text
//! Waiting ──go──▶ Running ──main process ends──▶ Clearing ──no process left──▶ Over
//!    │                                                                          ▲
//!    └──────── stop, or a minute without go, or the start fails ────────────────┘
//! ```
//!
//! Invariant: the exit record is written when nothing of the job is left, or when what is left has survived
//! the final signal for half a minute, and then it says so.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

use agent_model::{Clock as _, ExitStatus, SystemClock, Timestamp};
use agent_shim::sys::{Children, reap};
use agent_shim::wire::{Event, Progress, Request};
use agent_shim::{End, ExitRecord, JobDir, Launch, NotStarted, VERSION};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::Inotify;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use crate::clients::Clients;
use crate::exit_file::ExitFile;
use crate::job_log::JobLog;
use crate::ladder::{Ladder, Rung};
use crate::notes::Notes;
use crate::setup::{ShimError, step};
use crate::{job, memory, tree};

/// How long a shim waits to be told to go. A daemon that died before it said so starts another one.
const GO: Duration = Duration::from_secs(60);

/// How long processes that outlive the command may take to end by themselves once asked.
const LEFTOVER_GRACE: Duration = Duration::from_secs(2);

/// How often the exit record is tried, once a second.
const RECORD_TRIES: u32 = 600;

/// The supervisor of one job.
#[derive(Debug)]
pub(crate) struct Supervisor<'a> {
    pub(crate) dir: JobDir,
    pub(crate) launch: Launch,
    pub(crate) instance: String,
    pub(crate) notes: &'a Notes,
    pub(crate) signals: SignalFd,
    pub(crate) clients: Clients,
    pub(crate) log: JobLog,
    pub(crate) tracking: Tracking,
    pub(crate) exit_file: ExitFile,
    pub(crate) life: Life,
}

/// The tracking file, whose growth is watched.
#[derive(Debug)]
pub(crate) struct Tracking {
    pub(crate) inotify: Inotify,
    pub(crate) file: File,
}

/// What has happened to the job.
#[derive(Debug)]
pub(crate) struct Life {
    phase: Phase,
    ladder: Ladder,
    started_at: Option<Timestamp>,
    ended_at: Option<Timestamp>,
    stopped: Option<String>,
    timed_out: bool,
    memory_kills: u64,
    oom: bool,
    leftovers: u32,
    unkilled: u32,
}

#[derive(Debug)]
enum Phase {
    Waiting { until: Instant },
    Running { main: i32, until: Option<Instant> },
    Clearing { status: ExitStatus },
    Over { end: End },
}

impl Life {
    /// Nothing yet.
    pub(crate) fn new(now: Instant) -> Life {
        Life {
            phase: Phase::Waiting { until: now + GO },
            ladder: Ladder::default(),
            started_at: None,
            ended_at: None,
            stopped: None,
            timed_out: false,
            memory_kills: 0,
            oom: false,
            leftovers: 0,
            unkilled: 0,
        }
    }

    fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    fn next_date(&self) -> Option<Instant> {
        let of_phase = match self.phase {
            Phase::Waiting { until } => Some(until),
            Phase::Running { until, .. } => until,
            Phase::Clearing { .. } | Phase::Over { .. } => None,
        };
        earliest(of_phase, self.ladder.next())
    }
}

fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

/// What the wait was ended by.
#[derive(Debug)]
struct Ready {
    signals: bool,
    tracking: bool,
    output: bool,
    clients: Vec<bool>,
}

impl Supervisor<'_> {
    /// Stands by the job until the exit record is durable and told.
    pub(crate) fn run(mut self) -> Result<(), ShimError> {
        let mut publish_at = None;
        let end = loop {
            let ready = step("wait for something to happen", self.wait(publish_at))?;
            if ready.tracking {
                while self.tracking.inotify.read_events().is_ok_and(|events| !events.is_empty()) {}
            }
            if ready.output || self.log.is_due(Instant::now()) {
                self.log.pump(Instant::now());
            }
            if ready.signals {
                self.take_signals();
            }
            for (place, request) in self.clients.serve(&ready.clients, !self.life.is_waiting()) {
                self.obey(place, request);
            }
            self.keep_time(Instant::now());
            if let Phase::Over { end } = &self.life.phase {
                break end.clone();
            }
            publish_at = self.clients.publish(self.progress(), Instant::now());
        };
        self.finish(end);
        Ok(())
    }

    fn wait(&self, publish_at: Option<Instant>) -> nix::Result<Ready> {
        let now = Instant::now();
        let (output, resume_at) = self.log.interest(now);
        let date = earliest(earliest(publish_at, resume_at), self.life.next_date());
        let timeout = match date {
            // Rounded up: to wake before the time would be to wake twice.
            Some(date) => {
                let millis = date.saturating_duration_since(now).as_micros().div_ceil(1000);
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
            }
            None => PollTimeout::NONE,
        };
        let mut fds = vec![
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.tracking.inotify.as_fd(), PollFlags::POLLIN),
        ];
        fds.extend(output.map(|output| PollFd::new(output, PollFlags::POLLIN)));
        let clients_from = fds.len();
        fds.extend(self.clients.interests());
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|flags| !flags.is_empty());
        Ok(Ready {
            signals: is_ready(&fds[0]),
            tracking: is_ready(&fds[1]),
            output: clients_from > 2 && is_ready(&fds[2]),
            clients: fds[clients_from..].iter().map(is_ready).collect(),
        })
    }

    fn progress(&self) -> Progress {
        let tracking_bytes = self.tracking.file.metadata().map_or(0, |found| found.len());
        Progress { log_bytes: self.log.bytes(), tracking_bytes }
    }

    fn take_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            let number = signal.ssi_signo as i32;
            if number == Signal::SIGTERM as i32 || number == Signal::SIGINT as i32 {
                self.stop(self.launch.grace, format!("the supervisor got signal {number}"));
            }
        }
        self.reap();
    }

    fn obey(&mut self, place: usize, request: Request) {
        match request {
            Request::Watch => self.clients.watch(place, Instant::now()),
            Request::Stop { grace_ms, reason } => {
                self.stop(Duration::from_millis(grace_ms), reason);
                self.clients.answer(place, &Event::Stopping);
            }
            Request::Renew { .. } => {
                self.clients.answer(place, &Event::Refused { why: "this job has no lease".to_owned() });
            }
            Request::Go => {
                if self.life.is_waiting() {
                    self.start();
                }
                self.clients.answer(place, &Event::Going);
            }
        }
    }

    fn start(&mut self) {
        self.life.memory_kills = memory::kills();
        self.life.started_at = Some(SystemClock.now());
        match job::start(&self.dir, &self.launch, &self.instance) {
            Ok(started) => {
                self.notes.say(format_args!("started, process {}", started.pid));
                let until = self.launch.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
                self.life.phase = Phase::Running { main: started.pid, until };
                self.log.connect(started);
            }
            Err(why) => {
                self.life.started_at = None;
                self.over(End::NeverStarted(why));
            }
        }
    }

    fn stop(&mut self, grace: Duration, reason: String) {
        self.notes.say(format_args!("stop within {grace:?}: {}", reason.escape_debug()));
        match self.life.phase {
            Phase::Waiting { .. } => {
                self.life.stopped = Some(reason);
                self.over(End::NeverStarted(NotStarted::Stopped));
            }
            Phase::Running { .. } => {
                self.life.stopped.get_or_insert(reason);
                self.life.ladder.stop(Instant::now(), grace);
            }
            // The command ended by itself; what is left of it is on its way.
            Phase::Clearing { .. } => self.life.ladder.stop(Instant::now(), grace),
            Phase::Over { .. } => {}
        }
    }

    fn reap(&mut self) {
        loop {
            match reap() {
                Children::Ended(pid, status) => {
                    if matches!(self.life.phase, Phase::Running { main, .. } if main == pid) {
                        self.main_ended(status);
                    }
                }
                Children::Running => {
                    if matches!(self.life.phase, Phase::Clearing { .. }) && !self.life.ladder.is_climbed() {
                        self.life.leftovers = tree::count();
                        self.life.ladder.stop(Instant::now(), LEFTOVER_GRACE);
                    }
                    return;
                }
                Children::None => {
                    if let Phase::Clearing { status } = self.life.phase {
                        self.over(End::Exited(status));
                    }
                    return;
                }
            }
        }
    }

    fn main_ended(&mut self, status: ExitStatus) {
        self.notes.say(format_args!("the command ended with {status:?}"));
        let killed_here = self.life.ladder.has_killed();
        self.life.oom = memory::is_to_blame(status, killed_here, self.life.memory_kills, memory::kills());
        self.life.ended_at = Some(SystemClock.now());
        self.life.phase = Phase::Clearing { status };
    }

    fn keep_time(&mut self, now: Instant) {
        match self.life.phase {
            Phase::Waiting { until } if now >= until => self.over(End::NeverStarted(NotStarted::NoGo)),
            Phase::Running { main, until: Some(until) } if now >= until => {
                self.notes.say("its time is over");
                self.life.timed_out = !self.life.ladder.is_climbed();
                self.life.ladder.stop(now, self.launch.grace);
                self.life.phase = Phase::Running { main, until: None };
            }
            _ => {}
        }
        match self.life.ladder.due(now) {
            Some(Rung::Term) => tree::ask(),
            Some(Rung::Kill) => {
                tree::kill();
                self.reap();
            }
            Some(Rung::GiveUp) => self.give_up(),
            None => {}
        }
    }

    /// The kernel holds what is left; only it can end that.
    fn give_up(&mut self) {
        let end = match self.life.phase {
            Phase::Clearing { status } => End::Exited(status),
            Phase::Running { .. } => End::Exited(ExitStatus::Signal(Signal::SIGKILL as i32)),
            Phase::Waiting { .. } | Phase::Over { .. } => return,
        };
        self.life.unkilled = tree::count();
        self.notes.say(format_args!("{} processes survive the final signal", self.life.unkilled));
        self.over(end);
    }

    fn over(&mut self, end: End) {
        self.life.ended_at.get_or_insert_with(|| SystemClock.now());
        self.life.phase = Phase::Over { end };
    }

    fn finish(mut self, end: End) {
        self.log.drain();
        // Whoever ships the log can do so while it is made durable here.
        self.clients.publish_final(self.progress());
        self.log.sync();
        let gaps = self.log.gaps();
        if gaps.count > 0 {
            self.notes.say(format_args!("{} bytes of output were dropped", gaps.bytes));
        }
        let record = self.record(end);
        self.notes.say(format_args!("over: {:?}", record.end));
        for _ in 0..RECORD_TRIES {
            match self.exit_file.commit(&self.dir, &record) {
                Ok(()) => break,
                // The directory was removed: nobody wants to know.
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => self.notes.say(format_args!("could not write the exit record: {error}")),
            }
            thread::sleep(Duration::from_secs(1));
        }
        self.clients.farewell();
        let _ = std::fs::remove_file(self.dir.socket()); // a socket nobody listens at does no harm
    }

    fn record(&self, end: End) -> ExitRecord {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN).ok();
        let millis = |time: nix::sys::time::TimeVal| (time.tv_sec() * 1000 + time.tv_usec() / 1000) as u64;
        ExitRecord {
            version: VERSION,
            instance: self.instance.clone(),
            replica: self.launch.replica.clone(),
            end,
            started_at: self.life.started_at,
            ended_at: self.life.ended_at.unwrap_or_else(|| SystemClock.now()),
            stopped: self.life.stopped.clone(),
            timed_out: self.life.timed_out,
            lease_over: false,
            oom: self.life.oom.then_some(agent_shim::OomScope::Own),
            oom_kills: 0,
            memory_peak: None,
            limits: agent_shim::Limits::default(),
            limits_unmet: Vec::new(),
            containment: "process group".to_owned(),
            log_bytes: self.log.bytes(),
            log_dropped: self.log.gaps().bytes,
            log_error: self.log.error().map(str::to_owned),
            gaps: self.log.gaps(),
            log_sha256: Some(self.log.sha256()),
            tracking_bytes: self.progress().tracking_bytes,
            max_rss: usage.map_or(0, |usage| usage.max_rss() as u64 * 1024),
            cpu_ms: usage.map_or(0, |usage| millis(usage.user_time()) + millis(usage.system_time())),
            leftovers: self.life.leftovers,
            unkilled: self.life.unkilled,
        }
    }
}
