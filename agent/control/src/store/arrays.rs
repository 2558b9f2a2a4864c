//! The records of how the tasks of an array stand, and the steps of a pipeline, which are its tasks.
//!
//! Owns the sets of indices. Invariants: an index is in at most one of them, and one that is in none of them has
//! completed; it is moved, never copied, so it is neither lost nor started twice; what has ended stays as it is.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use agent_model::job::reuse::{ENVIRONMENT, NoReuse};
use agent_model::job::{Array, Indices, Input, JobSpec};
use agent_model::pipeline::{NotRun, StepOutput, StepState};
use agent_model::{Blame, Epoch, ExitStatus, JobId, Verdict};
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ArrayRecord {
    /// The last attempt of an earlier job of the array's name. The attempts of its tasks come after it.
    pub(crate) after: Epoch,
    /// They have not been started, and have no records of their own.
    pub(crate) waiting: Indices,
    /// They have records, and have not ended.
    pub(crate) active: Indices,
    pub(crate) failed: Indices,
    pub(crate) canceled: Indices,
    /// How the command of the task that failed first ended, if it ran.
    pub(crate) exit: Option<ExitStatus>,
    /// Whose fault it was that tasks failed: the user's if it was once, else that of the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) blame: Option<Blame>,
}

impl ArrayRecord {
    pub(crate) fn new(array: &Array, after: Epoch) -> ArrayRecord {
        ArrayRecord { after, waiting: array.indices().clone(), ..ArrayRecord::default() }
    }

    /// The indices that may be started now, at most `room` of them.
    pub(crate) fn startable(&self, at_once: Option<NonZeroU32>, room: usize) -> impl Iterator<Item = u32> {
        let most = at_once.map_or(u32::MAX, NonZeroU32::get).saturating_sub(self.active.len());
        self.waiting.iter().take(room.min(most as usize))
    }

    /// An index that waits gets a record of its own; false when it does not wait.
    pub(crate) fn begin(&mut self, index: u32) -> bool {
        self.waiting.remove(index) && self.active.insert(index)
    }

    /// A task failed, and this was to blame.
    pub(crate) fn blame(&mut self, blame: Blame) {
        if self.blame.is_none() || blame == Blame::User {
            self.blame = Some(blame);
        }
    }

    /// The task of an index has ended; false when it had before.
    pub(crate) fn settle(&mut self, index: u32, verdict: Verdict, exit: Option<ExitStatus>) -> bool {
        if !self.active.remove(index) {
            return false;
        }
        match verdict {
            Verdict::Completed => {}
            Verdict::Canceled => drop(self.canceled.insert(index)),
            Verdict::Failed => {
                if self.failed.is_empty() {
                    self.exit = exit;
                }
                self.failed.insert(index);
            }
        }
        true
    }

    /// This one is not started any more; false when it does not wait.
    pub(crate) fn skip(&mut self, index: u32) -> bool {
        self.waiting.remove(index) && self.canceled.insert(index)
    }

    /// Nothing more is started.
    pub(crate) fn give_up(&mut self) {
        for index in std::mem::take(&mut self.waiting).iter() {
            self.canceled.insert(index);
        }
    }

    /// Every task has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.active.is_empty()
    }

    /// How the array as a whole ends: failed if one task did, and completed only if all were.
    pub(crate) fn verdict(&self) -> Verdict {
        match (self.failed.is_empty(), self.canceled.is_empty()) {
            (false, _) => Verdict::Failed,
            (true, false) => Verdict::Canceled,
            (true, true) => Verdict::Completed,
        }
    }
}

/// Of a step of a pipeline that need not run again where the same ran: in what it may be like another one. All are
/// digests of texts ([`agent_model::job::reuse`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReuseRecord {
    /// Of all that decides what it leaves.
    pub(crate) key: String,
    /// Of its environment as it is defined.
    pub(crate) environment: String,
    /// Of the step that it is: its name, the experiment and the owner.
    pub(crate) step: String,
    /// Of each part of the key.
    pub(crate) parts: BTreeMap<String, String>,
}

impl ReuseRecord {
    /// Of the step `name` that this job is.
    ///
    /// # Errors
    ///
    /// Why it is always run.
    pub(crate) fn of(name: &str, spec: &JobSpec) -> Result<ReuseRecord, NoReuse> {
        let short = |text: &str| agent_cas::digest_of(text.as_bytes()).to_string();
        let parts: BTreeMap<String, String> =
            spec.reuse_parts()?.into_iter().map(|(part, text)| (part.to_owned(), short(&text))).collect();
        let all: Vec<&str> = parts.values().map(String::as_str).collect();
        Ok(ReuseRecord {
            key: short(&all.join("\n")),
            environment: parts.get(ENVIRONMENT).cloned().unwrap_or_default(),
            step: short(&format!("{name}\n{}\n{:?}\n{:?}", spec.experiment, spec.owner, spec.owner_since)),
            parts,
        })
    }
}

/// Of the steps of a pipeline, what their indices do not tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct StepsRecord {
    /// What each step that completed left in its outputs.
    pub(crate) made: BTreeMap<u32, BTreeMap<String, Input>>,
    /// Steps that are not run because they completed before: the jobs in which they did.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) reused: BTreeMap<u32, JobId>,
    /// Steps that have no record and never get one.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) not_run: BTreeMap<u32, NotRun>,
}

impl StepsRecord {
    /// What a step left in an output.
    pub(crate) fn made(&self, StepOutput { step, output }: &StepOutput) -> Option<&Input> {
        self.made.get(step)?.get(output)
    }

    /// How a step stands.
    pub(crate) fn state(&self, tasks: &ArrayRecord, step: u32) -> StepState {
        match step {
            _ if tasks.waiting.contains(step) => StepState::Waiting,
            _ if tasks.active.contains(step) => StepState::Active,
            _ if tasks.failed.contains(step) => StepState::Ended(Verdict::Failed),
            _ if self.not_run.contains_key(&step) => StepState::NotRun,
            _ if tasks.canceled.contains(step) => StepState::Ended(Verdict::Canceled),
            _ => StepState::Ended(Verdict::Completed),
        }
    }

    /// A step completed in this or in an earlier pipeline, `reused` if it is that one's.
    pub(crate) fn complete(&mut self, step: u32, made: BTreeMap<String, Input>, reused: Option<JobId>) {
        self.made.insert(step, made);
        self.reused.extend(reused.map(|job| (step, job)));
    }

    /// How the pipeline ends. What comes after a step that was canceled was not run because of that.
    pub(crate) fn verdict(&self, tasks: &ArrayRecord) -> Verdict {
        let nothing_made = self.not_run.values().any(|why| matches!(why, NotRun::Nothing { .. }));
        if nothing_made { Verdict::Failed } else { tasks.verdict() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(array: &str) -> ArrayRecord {
        ArrayRecord::new(&array.parse().unwrap(), Epoch(0))
    }

    fn startable(record: &ArrayRecord, at_once: u32, room: usize) -> Vec<u32> {
        record.startable(NonZeroU32::new(at_once), room).collect()
    }

    #[test]
    fn test_no_more_may_start_than_there_is_room_for_and_than_may_run_at_a_time() {
        let mut tasks = record("3-9");
        assert_eq!(startable(&tasks, 0, 2), [3, 4]);
        assert_eq!(startable(&tasks, 3, 9), [3, 4, 5]);
        assert!(tasks.begin(3) && tasks.begin(4));
        assert!(!tasks.begin(3) && !tasks.begin(10), "it does not wait");
        assert_eq!(startable(&tasks, 3, 9), [5]);
        assert!(tasks.settle(3, Verdict::Completed, None));
        assert_eq!(startable(&tasks, 3, 9), [5, 6]);
        assert_eq!(startable(&tasks, 1, 9), [] as [u32; 0]);
    }

    #[test]
    fn test_one_true_result_of_many() {
        let ends = |ends: &[Verdict]| {
            let mut tasks = record(&format!("0-{}", ends.len() - 1));
            for (index, verdict) in (0..).zip(ends) {
                assert!(!tasks.is_over());
                assert!(
                    tasks.begin(index) && tasks.settle(index, *verdict, Some(ExitStatus::Code(index as i32)))
                );
                assert!(!tasks.settle(index, Verdict::Failed, None), "an end counts once");
            }
            assert!(tasks.is_over());
            (tasks.verdict(), tasks.exit)
        };
        use Verdict::{Canceled, Completed, Failed};
        assert_eq!(ends(&[Completed; 3]), (Completed, None));
        assert_eq!(ends(&[Completed, Failed, Canceled, Failed]), (Failed, Some(ExitStatus::Code(1))));
        assert_eq!(ends(&[Completed, Canceled]), (Canceled, None));
        let mut tasks = record("0-3");
        tasks.begin(0);
        tasks.give_up();
        assert_eq!((tasks.canceled.to_string(), tasks.is_over()), ("1-3".to_owned(), false));
    }
}
