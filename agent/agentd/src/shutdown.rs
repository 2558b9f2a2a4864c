//! Shuts the machine down by a command of its operators: when nothing has kept it up for a while, and at set times.
//!
//! Owns the command, its deadline and its repetitions. What is done when is decided by [`countdown`], a pure function of
//! what is seen; the times are words of [`schedule`]. Only a daemon that is its own controller does that: the machines
//! of a fleet are its controller's.
//!
//! Invariants: the queue is closed before the command is started, so no job starts on a machine that is going; a
//! machine that is still there afterwards takes jobs again; a command that fails is not repeated before its wait is
//! over. A set time ends no job: from then on none is started, and the machine goes when the last has ended.

mod countdown;

use std::sync::Arc;
use std::time::Duration;

use agent_command::Command;
use agent_control::{ControllerStops, ShutdownPlan, Standby, Work};
use agent_model::causes;
use agent_model::words::count;
use agent_model::{Clock, Timestamp};
use tracing::{info, warn};

use crate::config::{Config, ShutdownSettings};
use crate::supervisor::{Supervisor, TaskKind};
use countdown::{Countdown, Reason, Sight, Step};

/// How often is looked.
const LOOK: Duration = Duration::from_secs(1);
/// How long the command may take.
const COMMAND_WITHIN: Duration = Duration::from_secs(60);

/// See the module.
struct Shutdown {
    settings: ShutdownSettings,
    standby: Standby,
    clock: Arc<dyn Clock>,
    /// The `PATH` of the command.
    path: String,
}

/// Starts the task that shuts the machine down, if that is configured.
pub(crate) fn look_after(config: &Config, standby: Standby, clock: &Arc<dyn Clock>, supervisor: &Supervisor) {
    let (settings, path) = (config.shutdown.clone(), config.host.path.clone());
    if settings.is_set() {
        let shutdown = Arc::new(Shutdown { settings, standby, clock: clock.clone(), path });
        supervisor.spawn_again(TaskKind::Upkeep, "shutdown", move || shutdown.clone().watch());
    }
}

impl Shutdown {
    /// Looks again and again, until the controller stops.
    async fn watch(self: Arc<Self>) {
        info!(rule = self.rule(), "watching for a reason to shut the machine down");
        let mut plan = Countdown::new(self.settings.idle_after);
        // A task of before may have ended between both.
        let mut going = self.standby.open().await;
        while going.is_ok() {
            going = self.look(&mut plan).await;
            tokio::time::sleep(LOOK).await;
        }
        std::future::pending().await // the daemon ends
    }

    async fn look(&self, plan: &mut Countdown) -> Result<(), ControllerStops> {
        let (kept_up_by, placed) =
            (self.standby.kept_up_by(Work::Any).await?, self.standby.kept_up_by(Work::Placed).await?);
        let (now, boot) = (self.clock.now(), self.clock.boot());
        let seen = Sight {
            boot,
            awake: self.standby.awake_until().is_some_and(|until| until > now),
            busy: kept_up_by.is_some(),
            placed: placed.is_some(),
            // The machine was started on purpose after an earlier one.
            due: self.settings.stop_at.last(now).filter(|due| now.since(*due) < boot.0),
        };
        let step = plan.next(seen);
        let kept = placed.filter(|_| plan.is_closed()).or(kept_up_by).unwrap_or_default();
        self.show(plan, &kept, false);
        match step {
            Step::Stay => Ok(()),
            Step::Open => self.standby.open().await,
            Step::Close => self.standby.close(&self.closing(Reason::Time), None).await.map(drop),
            Step::Run(reason) => self.run(plan, reason).await,
        }
    }

    /// Runs the command, unless something began to keep the machine up meanwhile.
    async fn run(&self, plan: &mut Countdown, reason: Reason) -> Result<(), ControllerStops> {
        let work = match reason {
            Reason::Idle => Work::Any,
            Reason::Time => Work::Placed,
        };
        if self.standby.close(&self.closing(reason), Some(work)).await?.is_some() {
            return Ok(());
        }
        self.show(plan, "", true);
        info!(reason = self.why(reason), command = self.settings.run, "shutting the machine down");
        let failed = match self.command(plan, reason).await {
            Ok(()) => {
                tokio::time::sleep(self.settings.gone_within).await;
                let within = self.settings.gone_within.as_secs();
                format!(
                    "the command succeeded, and {} later the machine was still there",
                    count(within, "second")
                )
            }
            Err(why) => why,
        };
        warn!(failed, "machine is still there: taking jobs again");
        plan.failed(reason, failed, self.clock.boot(), self.clock.now());
        self.show(plan, "", false);
        self.standby.open().await
    }

    /// Runs the command to its end; an error is for people.
    async fn command(&self, plan: &Countdown, reason: Reason) -> Result<(), String> {
        let idle = plan.idle_for(self.clock.boot()).map_or(0, |idle| idle.as_secs());
        let variables = [
            ("PATH", self.path.clone()),
            ("AGENTD_SHUTDOWN_REASON", reason.word().to_owned()),
            ("AGENTD_SHUTDOWN_RULE", self.why(reason)),
            ("AGENTD_IDLE_SECONDS", idle.to_string()),
        ];
        let command = Command::new("/bin/sh").args(["-c", &self.settings.run]).envs(variables);
        let command = command.stall(COMMAND_WITHIN * 2); // the deadline is what counts
        match tokio::time::timeout(COMMAND_WITHIN, command.capture()).await {
            Err(_) => {
                Err(format!("the command was ended after {}", count(COMMAND_WITHIN.as_secs(), "second")))
            }
            Ok(Err(error)) => Err(causes::tell(&error)),
            Ok(Ok(ended)) if ended.status.success() => Ok(()),
            Ok(Ok(ended)) => {
                let text = String::from_utf8_lossy(&ended.text);
                let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
                let last: String = last.chars().filter(|c| !c.is_control()).take(200).collect();
                Err(format!("the command ended with {}: {last}", ended.status))
            }
        }
    }

    /// Shows users what is planned.
    fn show(&self, plan: &Countdown, kept_up_by: &str, running: bool) {
        let (now, boot) = (self.clock.now(), self.clock.boot());
        let idle_since = plan.idle_for(boot).map(|idle| Timestamp(now.0.saturating_sub(millis(idle))));
        let by_idle = plan.due_in(boot).map(|wait| now + wait);
        let by_time = self.settings.stop_at.next(now);
        self.standby.show(ShutdownPlan {
            idle_since,
            due: by_idle.into_iter().chain(by_time).min(),
            rule: self.rule(),
            kept_up_by: kept_up_by.to_owned(),
            running,
            failed: plan.failure().to_owned(),
        });
    }

    /// All rules: `idle for 30 min, at 19:00 mon-fri`.
    fn rule(&self) -> String {
        let idle = self.settings.idle_after.map(|_| self.why(Reason::Idle));
        let time = (!self.settings.stop_at.is_empty()).then(|| self.why(Reason::Time));
        idle.into_iter().chain(time).collect::<Vec<_>>().join(", ")
    }

    /// Why nothing is placed, for users.
    fn closing(&self, reason: Reason) -> String {
        format!("this machine is about to be shut down, {}", self.why(reason))
    }

    /// The rule that counts.
    fn why(&self, reason: Reason) -> String {
        match (reason, self.settings.idle_after) {
            (Reason::Idle, Some(after)) if after.as_secs() >= 60 => {
                format!("idle for {} min", after.as_secs() / 60)
            }
            (Reason::Idle, after) => format!("idle for {} s", after.unwrap_or_default().as_secs()),
            (Reason::Time, _) => format!("at {}", self.settings.stop_at),
        }
    }
}

fn millis(length: Duration) -> u64 {
    u64::try_from(length.as_millis()).unwrap_or(u64::MAX)
}
