//! A machine that will be taken away: what a replica does with the notice, in each of its steps.
//!
//! Before the command is started the replica gives up ([`Runner::noticed`] ends every wait). A running command is told:
//! the deadline in a file, and a stop whose grace ends so long before the deadline that its outputs can be stored.
//! After its end nothing changes: the outputs are stored as fast as they can be.
//!
//! The record has the notice before anything is told, so that a later process of the daemon ends what this one began.

use agent_model::{Preemption, failpoint};
use agent_shim::JobDir;
use serde_json::json;
use tracing::{error, warn};

use super::Runner;
use super::follow::Stop;

impl Runner {
    /// Returns when the replica has to end because the machine will be taken away.
    pub(super) async fn noticed(&self) -> Preemption {
        match &self.record.preempted {
            Some(notice) => notice.clone(),
            None => self.worker.preemptions.noticed().await,
        }
    }

    /// Takes in a notice while the command runs: from then on there is a stop for its supervisor. An earlier deadline
    /// than the one that was told makes the stop shorter; a later one changes nothing.
    pub(super) async fn heed_notice(&mut self) {
        let known = self.record.preempted.clone();
        let told = self.worker.preemptions.notice();
        let notice = match (known, told) {
            (Some(known), Some(told)) if told.until < known.until && !told.repeats(&known) => told,
            (Some(known), _) if self.notice_stop.is_none() => known, // of an earlier process of the daemon
            (None, Some(told)) => told,
            _ => return,
        };
        if self.record.preempted.as_ref() != Some(&notice) {
            self.record.preempted = Some(notice.clone());
            if let Err(error) = self.worker.journal.enter(&self.record).await {
                warn!(replica = %self.record.replica, %error, "cannot journal notice");
            }
        }
        if let Err(error) = tell(&self.dir, &notice) {
            error!(replica = %self.record.replica, %error, "cannot write the deadline of the machine for job");
        }
        let reason = format!("the machine {}", notice.describe());
        self.notice_stop = Some(Stop { grace: self.worker.preemptions.grace(&notice), reason });
    }

    /// Whether it ends because of a notice, and nothing changes that any more.
    pub(super) fn is_preempted(&self) -> bool {
        let told = self.told_to_stop.is_some() && self.told_to_stop == self.notice_stop;
        let not_running = !matches!(
            self.record.step,
            agent_model::ReplicaStep::Launching | agent_model::ReplicaStep::Running
        );
        self.record.preempted.is_some() && (told || not_running)
    }

    /// Publishes that.
    pub(super) fn show_preempted(&self) {
        let preempted = self.is_preempted();
        let changed =
            self.view.send_if_modified(|view| std::mem::replace(&mut view.preempted, preempted) != preempted);
        if changed {
            self.changed.notify_one();
        }
    }
}

/// Writes the file that the job finds by its variable.
fn tell(dir: &JobDir, notice: &Preemption) -> std::io::Result<()> {
    failpoint::hit("node.preemption.tell")?;
    let text = json!({
        "deadline": notice.deadline.rfc3339(),
        "deadline_ms": notice.deadline.0,
        "reason": notice.reason,
    });
    agent_fs::write_for_all(&dir.preemption(), format!("{text}\n").as_bytes())
}
