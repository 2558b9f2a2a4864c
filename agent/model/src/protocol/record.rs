//! What a node writes down about a replica: everything that is needed to go on with it, by another process or another boot.
//!
//! Owns the form of these records. They are in the node's journal and, as they were at the beginning, beside the files of
//! the job. Invariant: what an earlier release wrote is read: a field that is new has a value where it is not there.

use serde::{Deserialize, Serialize};

use super::grant::Given;
use crate::outcome::Usage;
use crate::{
    Boot, Digest, ExitStatus, Fault, JobSpec, Outcome, Preemption, ReplicaId, ReplicaStep, Timestamp, Verdict,
};

/// The user that a job runs as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobUser {
    /// The login name.
    pub name: String,
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
    /// The other groups it belongs to.
    #[serde(default)]
    pub groups: Vec<u32>,
    /// The home directory; empty where it is to be in the job's own directory.
    pub home: String,
}

/// How a command ended; certain, although its logs and outputs are still to be stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ending {
    /// What that makes of the replica.
    pub verdict: Verdict,
    /// How its process ended; none if it never ran.
    pub exit: Option<ExitStatus>,
    /// What went wrong.
    pub fault: Option<Fault>,
    /// When it was started.
    pub started_at: Option<Timestamp>,
    /// When it ended, or that it will not run was certain.
    pub ended_at: Timestamp,
    /// What it took.
    #[serde(default)]
    pub usage: Option<Usage>,
}

impl Ending {
    /// Of a command that never ran because something failed.
    pub fn failed(fault: Fault, at: Timestamp) -> Ending {
        Ending { fault: Some(fault), ..Ending::never_ran(Verdict::Failed, at) }
    }

    /// Of a command that never ran because it was canceled.
    pub fn canceled(at: Timestamp) -> Ending {
        Ending::never_ran(Verdict::Canceled, at)
    }

    fn never_ran(verdict: Verdict, ended_at: Timestamp) -> Ending {
        Ending { verdict, exit: None, fault: None, started_at: None, ended_at, usage: None }
    }
}

/// Everything needed to go on with a replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Which replica.
    pub replica: ReplicaId,
    /// What it runs.
    pub spec: JobSpec,
    /// The same as the controller wrote it, with its proof; `None` from a controller of a release before grants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<Given>,
    /// The boot in which it was accepted; after another boot none of its processes is left.
    pub boot_id: String,
    /// The secret of its tracking endpoint.
    pub token: String,
    /// The step it is in.
    pub step: ReplicaStep,
    /// When the command was started.
    pub started_at: Option<Timestamp>,
    /// How the command ended, from the moment that is certain.
    pub ending: Option<Ending>,
    /// The outcome, from the moment its outputs are stored.
    pub outcome: Option<Outcome>,
    /// Some of its data is nowhere else, so its directory is kept for a while after its end.
    #[serde(default)]
    pub precious: bool,
    /// The key of the environment it was started in, which is held until it has ended.
    #[serde(default)]
    pub environment: Option<String>,
    /// The list of packages of that environment, as far as there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<Digest>,
    /// The GPUs it has, from before its command is started until no process of it can use them any more.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// For a job that may be replaced: until when its lease is valid at least. A restarted daemon uses it while the
    /// supervisor does not answer.
    #[serde(default)]
    pub leave: Option<Boot>,
    /// The user it runs as on the machine itself, from before any file is laid out for that user; the daemon's own
    /// user when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<JobUser>,
    /// The machine will be taken away: the replica ends because of that, from before anything of it is told to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preempted: Option<Preemption>,
}

impl Record {
    /// Of a replica that was just ordered.
    pub fn accepted(replica: ReplicaId, spec: JobSpec, boot_id: &str, token: String) -> Record {
        Record {
            replica,
            spec,
            given: None,
            boot_id: boot_id.to_owned(),
            token,
            step: ReplicaStep::Accepted,
            started_at: None,
            ending: None,
            outcome: None,
            precious: false,
            environment: None,
            lock: None,
            gpus: Vec::new(),
            leave: None,
            user: None,
            preempted: None,
        }
    }

    /// Whether it must outlive a power cut, and not only this process. After one, nothing of the replica runs, nothing
    /// of it is started, and its outputs are stored from its directory: so it matters that there is one, how it ended,
    /// and that its machine was to be taken away. Between these, a step is for the next process of the same boot.
    pub fn is_for_another_boot(&self) -> bool {
        let ended_just_now = self.ending.is_some() && self.outcome.is_none();
        self.step == ReplicaStep::Accepted || ended_just_now || self.preempted.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::JobDraft;

    fn record(replica: &str) -> Record {
        let draft = JobDraft { command: "python train.py".into(), ..JobDraft::default() };
        Record::accepted(replica.parse().unwrap(), draft.validate().unwrap(), "boot", "secret".into())
    }

    #[test]
    fn test_record_from_before_there_were_gpus_is_read() {
        let with = Record { gpus: vec!["GPU-1".into()], ..record("a.1.0") };
        let mut json = serde_json::to_value(&with).unwrap();
        assert_eq!(serde_json::from_value::<Record>(json.clone()).unwrap(), with);
        json.as_object_mut().unwrap().remove("gpus");
        assert_eq!(serde_json::from_value::<Record>(json).unwrap(), record("a.1.0"));
    }

    #[test]
    fn test_what_another_boot_needs_is_forced() {
        let ending = Some(Ending::canceled(Timestamp(1)));
        let at = |step| Record { step, ..record("a.1.0") };
        assert!(at(ReplicaStep::Accepted).is_for_another_boot());
        assert!(!at(ReplicaStep::Running).is_for_another_boot());
        assert!(Record { ending, ..at(ReplicaStep::Uploading) }.is_for_another_boot());
    }
}
