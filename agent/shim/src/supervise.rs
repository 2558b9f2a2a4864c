//! The loop of the supervisor and the phases of its job.
//!
//! ```text
//! Waiting ──go──▶ Running ──main process ends──▶ Clearing ──no process left──▶ Over
//!    │                                                                          ▲
//!    └──────── stop, or a minute without go, or the start fails ────────────────┘
//! ```
//!
//! Invariants: the exit record is written when no process of the job is left, or when the rest has survived
//! the final signal for half a minute, which the record then states. Dates count the time the machine sleeps:
//! neither a lease nor a limit of time grows because a machine was suspended.

mod life;
mod mend;

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use agent_model::words::count;
use agent_model::{Boot, Clock as _, ExitStatus, SystemClock};
use agent_shim::KillCount;
use agent_shim::apart;
use agent_shim::cgroup::{self, Containment};
use agent_shim::sys::{self, Children, reap};
use agent_shim::tracking::Intake;
use agent_shim::wire::{Event, Progress, Request};
use agent_shim::{
    CgroupRequest, End, ExitRecord, Hello, JobDir, Launch, NotStarted, Sender, VERSION, WriteError, process,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

pub(crate) use self::life::Life;
use self::life::{Phase, earliest};
use crate::alarm::Alarm;
use crate::attendant::Attendant;
use crate::clients::Clients;
use crate::exit_file::ExitFile;
use crate::job;
use crate::job_log::JobLog;
use crate::kill_escalation::KillStep;
use crate::mask::Mask;
use crate::memory::Memory;
use crate::notes::Notes;
use crate::tree::Tree;
use crate::watch::Watch;
use crate::{ShimError, step};

/// How long a shim waits for `go`. If the daemon died before it sent that, the next one starts another shim.
const GO: Duration = Duration::from_secs(60);

/// How long processes that outlive the command may take to end by themselves once asked.
const LEFTOVER_GRACE: Duration = Duration::from_secs(2);

/// How often the job's groups are checked for processes that are no children of this one.
const LOOK: Duration = Duration::from_millis(50);

/// A command that ended within so many milliseconds before a signal is taken to have ended by the same signal.
const AT_ONE_MOMENT: u64 = 1000;

/// How often such a signal is looked for.
const SIGNAL_LOOK: Duration = Duration::from_millis(5);

/// How often the exit record is tried, once a second.
const RECORD_TRIES: u32 = 600;

/// The supervisor of one job.
#[derive(Debug)]
pub(crate) struct Supervisor<'a> {
    pub(crate) dir: JobDir,
    /// The job's part of it, as the job finds it.
    pub(crate) folder: PathBuf,
    pub(crate) launch: Launch,
    /// It gives up the rights that it does not need once the command is started.
    pub(crate) gives_up: bool,
    pub(crate) hello: Hello,
    pub(crate) notes: &'a Notes,
    pub(crate) signals: SignalFd,
    pub(crate) alarm: Alarm,
    pub(crate) clients: Clients,
    pub(crate) log: JobLog,
    pub(crate) tracking: Tracking,
    pub(crate) exit_file: ExitFile,
    pub(crate) tree: Tree,
    pub(crate) life: Life,
    pub(crate) attendant: Attendant,
    /// The port of the daemon, for as long as the job may look for it there.
    pub(crate) _held_port: Option<OwnedFd>,
}

/// The tracking records, and the watch for changes of their file.
#[derive(Debug)]
pub(crate) struct Tracking {
    pub(crate) watch: Watch,
    pub(crate) intake: Intake,
}

impl Tracking {
    /// Takes new records; returns when to do so again even if no change is reported.
    fn take(&mut self, now: Instant) -> Option<Instant> {
        if self.intake.take(now) { Some(now) } else { self.intake.due() }
    }
}

/// What ended the wait.
#[derive(Debug)]
struct Ready {
    signals: bool,
    tracking: bool,
    alarm: bool,
    output: bool,
    clients: Vec<bool>,
}

impl Supervisor<'_> {
    /// Supervises the job until the exit record is durable and reported.
    pub(crate) fn run(mut self) -> Result<(), ShimError> {
        let (mut publish_at, mut take_at) = (None, Some(Instant::now()));
        let end = loop {
            step("set the alarm", self.alarm.set(self.life.next_date()))?;
            let look_at = self.tracking.watch.next_look();
            let wake_at = earliest(earliest(publish_at, take_at), look_at);
            let mut ready = step("wait for something to happen", self.wait(wake_at))?;
            ready.tracking |= look_at.is_some_and(|at| at <= Instant::now());
            if ready.alarm {
                self.alarm.rang();
            }
            if ready.tracking {
                self.take_changes();
            }
            if ready.tracking || take_at.is_some_and(|at| at <= Instant::now()) {
                take_at = self.tracking.take(Instant::now());
            }
            if ready.output || self.log.is_due(Instant::now()) {
                self.log.pump(Instant::now());
            }
            if ready.signals {
                self.take_signals();
            }
            if ready.clients.contains(&true) {
                // Whoever connects reads the streams next; one that has lost its file says so when it is written.
                let _ = (self.log.keep_name(), self.tracking.intake.keep_name());
            }
            for (place, request) in self.clients.serve(&ready.clients, !self.life.is_waiting()) {
                self.obey(place, request);
            }
            self.keep_time(SystemClock.boot());
            if let Phase::Over { end } = &self.life.phase {
                break end.clone();
            }
            publish_at = self.clients.publish(self.progress(), self.log.is_in_line(), Instant::now());
        };
        self.finish(end);
        Ok(())
    }

    fn wait(&self, wake_at: Option<Instant>) -> nix::Result<Ready> {
        let now = Instant::now();
        let (output, resume_at) = self.log.interest(now);
        let date = earliest(wake_at, resume_at);
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
            PollFd::new(self.alarm.as_fd(), PollFlags::POLLIN),
        ];
        let watched = self.tracking.watch.as_fd().map(|watch| PollFd::new(watch, PollFlags::POLLIN));
        let tracking = watched.is_some().then_some(fds.len());
        fds.extend(watched);
        let output = output.map(|output| PollFd::new(output, PollFlags::POLLIN));
        let output_at = output.is_some().then_some(fds.len());
        fds.extend(output);
        let clients_from = fds.len();
        fds.extend(self.clients.interests());
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|flags| !flags.is_empty());
        Ok(Ready {
            signals: is_ready(&fds[0]),
            alarm: is_ready(&fds[1]),
            tracking: tracking.is_some_and(|place| is_ready(&fds[place])),
            output: output_at.is_some_and(|place| is_ready(&fds[place])),
            clients: fds[clients_from..].iter().map(is_ready).collect(),
        })
    }

    fn progress(&self) -> Progress {
        Progress { log_bytes: self.log.bytes(), tracking_bytes: self.tracking.intake.bytes() }
    }

    fn take_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            let ends = [Signal::SIGTERM, Signal::SIGINT];
            if let Some(number) = ends.into_iter().find(|end| *end as u32 == signal.ssi_signo) {
                let (pid, uid) = (signal.ssi_pid, signal.ssi_uid);
                self.stop_for(number, Sender { pid, uid, name: process::name(pid) });
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
            Request::Renew { until_ms } => {
                let answer = match self.life.renew(Boot::from_millis(until_ms)) {
                    Ok(until) => Event::Renewed { until_ms: until.millis() },
                    Err(why) => Event::Refused { why: why.to_owned() },
                };
                self.clients.answer(place, &answer);
            }
            Request::Limit { timeout_ms } => {
                let answer = match self
                    .life
                    .raise_limit(&mut self.launch.timeout, Duration::from_millis(timeout_ms))
                {
                    Ok(limit) => {
                        Event::Limited { timeout_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX) }
                    }
                    Err(why) => Event::Refused { why: why.to_owned() },
                };
                self.clients.answer(place, &answer);
            }
            Request::Secret { name, value } => {
                let answer = match self.life.is_waiting() {
                    true => {
                        self.launch.secrets.insert(name, value);
                        Event::Taken
                    }
                    false => Event::Refused { why: "the command was executed already".to_owned() },
                };
                self.clients.answer(place, &answer);
            }
            Request::Session => {
                let is_running = matches!(self.life.phase, Phase::Running { .. });
                let runs = is_running && !self.life.escalation.is_begun();
                self.attendant.open(&mut self.clients, place, runs, self.notes);
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
        if self.life.lease.is_over(SystemClock.boot()) {
            self.life.lease_over = true;
            return self.over(End::NeverStarted(NotStarted::LeaseOver));
        }
        let groups = match self.contain() {
            Ok(groups) => groups,
            Err(error) => {
                self.notes.error(&error);
                let step = error.to_string();
                return self.over(End::NeverStarted(NotStarted::Setup { step, os_error: 0 }));
            }
        };
        self.hide();
        self.life.started_at = Some(SystemClock.now());
        let (attendant, attends) = Attendant::prepare().ok().unzip();
        match job::start(&self.dir, &self.folder, &self.launch, &self.hello.instance, &groups, attends) {
            Ok(started) => {
                let attendant = attendant.ok_or(io::ErrorKind::Other.into()).and_then(Attendant::started);
                self.attendant = attendant.unwrap_or_else(|error| {
                    self.notes.say(format_args!("nobody can open sessions in the job: {error}"));
                    Attendant::default()
                });
                if self.gives_up
                    && let Err(error) = sys::keep_only_kill()
                {
                    self.notes.say(format_args!("it keeps rights that it needs no more: {error}"));
                }
                self.notes.say(format_args!("started, process {}", started.pid));
                let until = self.launch.timeout.map(|timeout| SystemClock.boot() + timeout);
                self.life.phase = Phase::Running { main: started.pid, until };
                self.log.connect(started, Mask::of(self.launch.secrets.values().map(|value| &*value.0)));
            }
            Err(why) => {
                attendant.and_then(|attendant| attendant.started().ok()).unwrap_or_default().end();
                self.life.started_at = None;
                self.over(End::NeverStarted(why));
            }
        }
    }

    /// Gives the job mounts of its own, as far as the machine allows.
    fn hide(&mut self) {
        let view = self.launch.view.as_ref().filter(|view| view.state.is_none());
        let has_own = self.launch.tmp.is_some() || view.is_some() || self.launch.nameless;
        if self.launch.container || !has_own {
            return;
        }
        for unmet in apart::hide(&self.launch, view, self.dir.path()) {
            self.notes.say(format_args!("not in effect: {unmet}"));
            self.life.limits_unmet.push(unmet);
        }
    }

    /// Makes the job's control groups, and records them before: a daemon that finds this shim dead must know them.
    fn contain(&mut self) -> Result<sys::Entrances, WriteError> {
        if self.launch.container {
            return self.contained();
        }
        let places = cgroup::places_of(&self.launch);
        let name = cgroup::name_of(&self.hello.replica, &self.hello.instance);
        self.hello.groups = cgroup::paths(&places, &name);
        self.hello.containment = Containment::of(&places).to_string();
        self.hello.kills = KillCount::beside(&places);
        self.dir.write_hello(&self.hello)?;
        let made = cgroup::make(&places, &name, self.launch.limits).kept_from(&self.launch.denied);
        self.notes.say(format_args!("contained by {}", made.containment));
        for unmet in &made.unmet {
            self.notes.say(format_args!("limit not in effect: {unmet}"));
        }
        self.life.memory = Some(Memory::watch(&made.groups, &cgroup::places(&CgroupRequest::default())));
        self.life.limits = made.limits;
        self.life.limits_unmet = made.unmet;
        self.tree = Tree::new(made.groups);
        let foreseen = self.hello.clone(); // mostly it is as it came
        self.hello.containment = made.containment.to_string();
        self.hello.kills = KillCount::beside(&places);
        if self.hello != foreseen
            && let Err(error) = self.dir.write_hello(&self.hello)
        {
            self.notes.error(&error); // what matters is in the first
        }
        Ok(made.entrances)
    }

    /// The container keeps the job together, and its limits are those of the job: they exist, and are only read.
    fn contained(&mut self) -> Result<sys::Entrances, WriteError> {
        let groups = cgroup::of_container();
        let (limits, unmet) = cgroup::limits_of(&groups, self.launch.limits);
        for unmet in &unmet {
            self.notes.say(format_args!("limit not in effect: {unmet}"));
        }
        self.life.memory = Some(Memory::of_container(&groups));
        (self.life.limits, self.life.limits_unmet) = (limits, unmet);
        self.hello.containment = Containment::Container.to_string();
        self.dir.write_hello(&self.hello)?;
        Ok(sys::Entrances::default())
    }

    /// Somebody ends the surroundings of the shim: its scope, its container, the machine. That is no order to cancel
    /// the job, and a job that was not started may still be started. All processes may have got the signal at one
    /// moment, so a command that ended just before the shim got it ended because of it, too.
    fn stop_for(&mut self, signal: Signal, sender: Sender) {
        self.notes.say(format_args!("got {signal} from {sender:?}"));
        let ended_the_command = match &self.life.phase {
            Phase::Waiting { .. } => return self.over(End::NeverStarted(NotStarted::NoGo)),
            Phase::Running { .. } => true,
            Phase::Clearing { .. } | Phase::Over { end: End::Exited(_) } => {
                let ended_at = self.life.ended_at.map_or(0, |at| at.0);
                SystemClock.now().0.saturating_sub(ended_at) <= AT_ONE_MOMENT
            }
            Phase::Over { .. } => false,
        };
        if ended_the_command && !self.life.timed_out && !self.life.lease_over {
            self.life.signaled.get_or_insert((signal, sender));
        }
        if !matches!(self.life.phase, Phase::Over { .. }) {
            self.life.escalation.stop(SystemClock.boot(), self.launch.grace);
        }
    }

    fn stop(&mut self, grace: Duration, reason: String) {
        self.notes.say(format_args!("stop within {grace:?}: {}", reason.escape_debug()));
        let now = SystemClock.boot();
        match self.life.phase {
            Phase::Waiting { .. } => {
                self.life.stopped = Some(reason);
                self.over(End::NeverStarted(NotStarted::Stopped));
            }
            Phase::Running { .. } => {
                self.life.stopped.get_or_insert(reason);
                self.life.escalation.stop(now, grace);
            }
            // The command ended by itself; its remaining processes are being ended.
            Phase::Clearing { .. } => self.life.escalation.stop(now, grace),
            Phase::Over { .. } => {}
        }
    }

    fn reap(&mut self) {
        loop {
            match reap() {
                Children::Ended(pid, status) => {
                    self.attendant.reaped(pid);
                    if matches!(self.life.phase, Phase::Running { main, .. } if main == pid) {
                        self.main_ended(status);
                    }
                }
                Children::Running => return self.clear_leftovers(None),
                Children::None => {
                    match self.life.phase {
                        Phase::Clearing { status, .. } if self.tree.is_vacant() => {
                            self.over(End::Exited(status))
                        }
                        // A process that entered the group from elsewhere is no child, so its end is not reported.
                        _ => self.clear_leftovers(Some(SystemClock.boot() + LOOK)),
                    }
                    return;
                }
            }
        }
    }

    fn clear_leftovers(&mut self, look_at: Option<Boot>) {
        let Phase::Clearing { look, .. } = &mut self.life.phase else { return };
        *look = look_at;
        if !self.life.escalation.is_begun() {
            self.life.leftovers = self.tree.count();
            self.life.escalation.stop(SystemClock.boot(), LEFTOVER_GRACE);
        }
    }

    fn main_ended(&mut self, status: ExitStatus) {
        self.notes.say(format_args!("the command ended with {status:?}"));
        let killed_here = self.life.escalation.has_killed();
        let evidence = self.life.memory.as_ref().map(Memory::evidence);
        self.life.oom = evidence.and_then(|evidence| evidence.blames(status, killed_here));
        self.life.ended_at = Some(SystemClock.now());
        self.attendant.end();
        self.life.phase = Phase::Clearing { status, look: None };
    }

    fn keep_time(&mut self, now: Boot) {
        match self.life.phase {
            Phase::Waiting { until } if now >= until => self.over(End::NeverStarted(NotStarted::NoGo)),
            Phase::Running { main, until: Some(until) } if now >= until => {
                self.notes.say("its time is over");
                self.life.timed_out = !self.life.escalation.is_begun();
                self.life.escalation.stop(now, self.launch.grace);
                self.life.phase = Phase::Running { main, until: None };
            }
            Phase::Running { .. } if self.life.lease_end().is_some_and(|until| now >= until) => {
                self.notes.say("its lease is over");
                self.life.lease_over = true;
                self.life.escalation.stop(now, self.launch.grace);
            }
            Phase::Clearing { look: Some(at), .. } if now >= at => self.reap(),
            _ => {}
        }
        match self.life.escalation.due(now) {
            Some(KillStep::Term) => self.tree.ask(),
            Some(KillStep::Kill) => {
                self.tree.kill();
                self.reap();
            }
            Some(KillStep::GiveUp) => self.give_up(),
            None => {}
        }
    }

    /// The kernel holds the remaining processes; only it can end them.
    fn give_up(&mut self) {
        let end = match self.life.phase {
            Phase::Clearing { status, .. } => End::Exited(status),
            Phase::Running { .. } => End::Exited(ExitStatus::Signal(Signal::SIGKILL as i32)),
            Phase::Waiting { .. } | Phase::Over { .. } => return,
        };
        self.life.unkilled = self.tree.count();
        self.notes.say(format_args!(
            "left after the final signal: {}",
            count(self.life.unkilled.into(), "process")
        ));
        self.over(end);
    }

    fn over(&mut self, end: End) {
        self.life.ended_at.get_or_insert_with(|| SystemClock.now());
        self.life.phase = Phase::Over { end };
    }

    fn finish(mut self, end: End) {
        self.log.drain();
        self.tracking.intake.finish();
        // The log can be shipped while it is made durable here.
        self.clients.publish_final(self.progress());
        self.log.sync();
        let gaps = self.log.gaps();
        if gaps.count > 0 {
            self.notes.say(format_args!("{} bytes of output were dropped", gaps.bytes));
        }
        self.await_signal(&end);
        let record = self.record(end);
        if !self.tree.clear() {
            self.notes.say("a control group could not be removed");
        }
        self.notes.say(format_args!("over: {:?}", record.end));
        for _ in 0..RECORD_TRIES {
            match self.exit_file.commit(&self.dir, &record) {
                Ok(()) => break,
                // The directory was removed: nobody needs the record.
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => self.notes.say(format_args!("could not write the exit record: {error}")),
            }
            thread::sleep(Duration::from_secs(1));
        }
        self.clients.farewell();
        let _ = std::fs::remove_file(self.dir.socket()); // a socket nobody listens at does no harm
    }

    /// A signal to all processes may have ended the command before it reaches this one. It is waited for after an end
    /// that such a signal causes, and where no client is kept waiting by that.
    fn await_signal(&mut self, end: &End) {
        let ended_by_term = match end {
            End::Exited(status) => status.shell_code() == 128 + Signal::SIGTERM as i32,
            End::NeverStarted(_) => return self.take_signals(),
        };
        let ordered = self.life.stopped.is_some() || self.life.timed_out || self.life.lease_over;
        let end_of_wait = Instant::now() + Duration::from_millis(AT_ONE_MOMENT / 2);
        loop {
            self.take_signals();
            let is_known = ordered || self.life.signaled.is_some();
            let keeps_waiting = !ended_by_term && self.clients.is_connected();
            if is_known || keeps_waiting || Instant::now() >= end_of_wait {
                return;
            }
            thread::sleep(SIGNAL_LOOK);
        }
    }

    fn record(&self, end: End) -> ExitRecord {
        let kills = self.life.memory.as_ref().map(|memory| memory.evidence().kills());
        let containment = match self.hello.containment.as_str() {
            "" => Containment::ProcessGroup.to_string(), // it never came so far
            made => made.to_owned(),
        };
        let signaled = self.life.signaled.as_ref().filter(|_| self.life.stopped.is_none());
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN).ok();
        let millis = |time: nix::sys::time::TimeVal| (time.tv_sec() * 1000 + time.tv_usec() / 1000) as u64;
        ExitRecord {
            version: VERSION,
            instance: self.hello.instance.clone(),
            replica: self.launch.replica.clone(),
            end,
            started_at: self.life.started_at,
            ended_at: self.life.ended_at.unwrap_or_else(|| SystemClock.now()),
            stopped: self.life.stopped.clone(),
            stop_signal: signaled.map(|(signal, _)| *signal as i32),
            stop_sender: signaled.map(|(_, sender)| sender.clone()),
            timed_out: self.life.timed_out,
            lease_over: self.life.lease_over,
            oom: self.life.oom,
            oom_kills: kills.unwrap_or(0),
            memory_peak: self.life.memory.as_ref().and_then(Memory::peak),
            limits: self.life.limits,
            limits_unmet: self.life.limits_unmet.clone(),
            containment,
            log_bytes: self.log.bytes(),
            log_dropped: self.log.gaps().bytes,
            log_error: self.log.error().map(str::to_owned),
            gaps: self.log.gaps(),
            log_sha256: Some(self.log.sha256()),
            tracking_bytes: self.progress().tracking_bytes,
            tracking_error: self.tracking.intake.error(),
            max_rss: usage.map_or(0, |usage| usage.max_rss() as u64 * 1024),
            cpu_ms: usage.map_or(0, |usage| millis(usage.user_time()) + millis(usage.system_time())),
            leftovers: self.life.leftovers,
            unkilled: self.life.unkilled,
        }
    }
}
