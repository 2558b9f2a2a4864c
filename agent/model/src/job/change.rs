//! Changes to a job after it was submitted: which there are, what may change when, and what is told of it.
//!
//! Pure. Invariants: a job that waits may be given everything that is here; one that has a machine only what takes nothing
//! from it and from others there, another priority for its next attempt and a longer time; what comes of a change is a
//! valid job.

use std::time::Duration;

use super::{JobDraft, JobSpec, Priority, Resources};
use crate::words::{count, duration};
use crate::{Code, Fault, Timestamp, size};

/// What is to be otherwise; what is absent stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Which jobs go first.
    pub priority: Option<Priority>,
    /// The longest time the command may run.
    pub timeout: Option<Duration>,
    /// GPUs on each node.
    pub gpus: Option<u32>,
    /// Processors on each node; 0 is no requirement.
    pub cpus: Option<u32>,
    /// Memory on each node, in bytes; 0 is no requirement.
    pub memory: Option<u64>,
    /// It may not start before; 0 is no such moment.
    pub begin: Option<Timestamp>,
    /// By then it is to have ended; 0 is no such moment.
    pub deadline: Option<Timestamp>,
    /// A user holds it, or does not any more.
    pub held: Option<bool>,
}

impl Change {
    /// It asks for nothing that is part of the job itself.
    pub fn is_only_of_hold(&self) -> bool {
        *self == Change { held: self.held, ..Change::default() }
    }

    /// What of it a job takes that has a machine.
    #[must_use]
    pub fn while_placed(&self, job: &JobDraft) -> Change {
        let longer = |timeout: &Duration| job.limits.timeout.is_some_and(|known| *timeout > known);
        Change { priority: self.priority, timeout: self.timeout.filter(longer), ..Change::default() }
    }

    /// Why a job that has a machine cannot take it.
    pub fn refused_while_placed(&self, job: &JobDraft) -> Option<Fault> {
        let fault = |what: &str| Fault::new(Code::JobNotWaiting, what);
        let Resources { gpus, cpus, memory, .. } = job.resources;
        let wants = [
            ("GPUs", self.gpus.is_some_and(|new| new != gpus)),
            ("CPUs", self.cpus.is_some_and(|new| new != cpus)),
            ("memory", self.memory.is_some_and(|new| new != memory)),
        ];
        if let Some((what, _)) = wants.into_iter().find(|(_, is)| *is) {
            return Some(
                fault(&format!("it has its {what} already, and they stay until it ends"))
                    .fix("cancel it and submit it again with other needs"),
            );
        }
        if self.begin.is_some() || self.deadline.is_some() {
            let fix = "its time limit says how long it may run: --time";
            return Some(fault("it has started, so its begin and its deadline count no more").fix(fix));
        }
        if self.held.is_some() {
            let fix = "to end it: agentctl cancel; a job is held or released while it waits";
            return Some(fault("it does not wait").fix(fix));
        }
        match (self.timeout, job.limits.timeout) {
            (Some(_), None) => {
                let fix = "leave --time out; a job gets a limit before it starts";
                Some(fault("it runs without a time limit, and cannot be given one now").fix(fix))
            }
            (Some(new), Some(known)) if new < known => Some(
                fault("the time limit of a job that runs can only be raised")
                    .why(format!("it is {}", duration(known)))
                    .fix("give it more time than that, or cancel it"),
            ),
            _ => None,
        }
    }

    /// The job with it, and each difference in words: `priority from medium to high`. Of one that has begun the moment of
    /// its begin counts no more: with a longer time it could lie too near to the deadline.
    pub fn applied_to(&self, job: &JobSpec, has_begun: bool) -> Result<(JobSpec, Vec<String>), Fault> {
        let mut draft = JobDraft::from(job.clone());
        if has_begun {
            draft.begin = None;
        }
        let mut told = Vec::new();
        let mut tell = |what: &str, before: String, after: String| {
            if before != after {
                told.push(format!("{what} from {before} to {after}"));
            }
        };
        if let Some(priority) = self.priority {
            let before = std::mem::replace(&mut draft.priority, priority);
            tell("priority", before.name().to_owned(), priority.name().to_owned());
        }
        if let Some(timeout) = self.timeout {
            let before = draft.limits.timeout.replace(timeout);
            let before = before.map_or_else(|| "none".to_owned(), duration);
            tell("time limit", before, duration(timeout));
        }
        let needs = &mut draft.resources;
        if let Some(gpus) = self.gpus {
            let before = std::mem::replace(&mut needs.gpus, gpus);
            tell("GPUs", before.to_string(), gpus.to_string());
        }
        if let Some(cpus) = self.cpus {
            let before = std::mem::replace(&mut needs.cpus, cpus);
            tell("CPUs", before.to_string(), cpus.to_string());
        }
        if let Some(memory) = self.memory {
            let words = |bytes: u64| if bytes == 0 { "none".to_owned() } else { size::binary(bytes) };
            let before = std::mem::replace(&mut needs.memory, memory);
            tell("memory", words(before), words(memory));
        }
        let date = |at: Option<Timestamp>| at.map_or_else(|| "none".to_owned(), Timestamp::utc);
        let dates =
            [("begin", self.begin, &mut draft.begin), ("deadline", self.deadline, &mut draft.deadline)];
        for (what, new, known) in dates {
            if let Some(new) = new {
                let before = std::mem::replace(known, Some(new).filter(|at| at.0 > 0));
                tell(what, date(before), date(*known));
            }
        }
        Ok((JobSpec::try_from(draft)?, told))
    }
}

/// The fault of a pipeline that is to be changed.
pub fn refused_of_pipeline(steps: usize) -> Fault {
    let what = format!("it is a pipeline of {}, and each has needs of its own", count(steps as u64, "step"));
    Fault::new(Code::JobInvalid, what)
        .fix("name a step that waits or runs, JOB[STEP]; the pipeline as a whole can be held and released")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(draft: JobDraft) -> JobSpec {
        JobDraft { command: "true".into(), ..draft }.validate().unwrap()
    }

    fn limited(seconds: u64) -> JobSpec {
        let mut draft = JobDraft::default();
        draft.limits.timeout = Some(Duration::from_secs(seconds));
        job(draft)
    }

    #[test]
    fn test_each_difference_is_told_and_nothing_else_changes() {
        let change = Change {
            priority: Some(Priority::High),
            timeout: Some(Duration::from_secs(28_800)),
            gpus: Some(2),
            cpus: Some(0),
            memory: Some(8 << 30),
            begin: Some(Timestamp(1_000)),
            deadline: Some(Timestamp(0)),
            held: None,
        };
        let before = job(JobDraft::default());
        let (after, told) = change.applied_to(&before, false).unwrap();
        assert_eq!(
            told,
            [
                "priority from medium to high",
                "time limit from none to 8 h",
                "GPUs from 0 to 2",
                "memory from none to 8 GiB",
                "begin from none to 1970-01-01 00:00:01 UTC"
            ]
        );
        assert_eq!(
            change.applied_to(&after, false).unwrap(),
            (after.clone(), Vec::new()),
            "asked again it tells nothing"
        );
        let mut expected = JobDraft::from(before);
        (expected.priority, expected.limits.timeout) = (Priority::High, change.timeout);
        (expected.resources.gpus, expected.resources.memory) = (2, 8 << 30);
        expected.begin = change.begin;
        assert_eq!(JobDraft::from(after), expected);
        let odd = Change { timeout: Some(Duration::ZERO), ..Change::default() };
        assert_eq!(odd.applied_to(&job(JobDraft::default()), false).unwrap_err().code, Code::JobInvalid);
    }

    #[test]
    fn test_dates_that_contradict_each_other_are_refused() {
        let at = |ms| Some(Timestamp(ms));
        let dated = job(JobDraft { deadline: at(5_000), ..JobDraft::default() });
        let change = |begin| Change { begin, ..Change::default() }.applied_to(&dated, false);
        assert_eq!(change(at(5_000)).unwrap_err().code, Code::JobInvalid);
        assert!(change(at(4_999)).is_ok());
        let mut limited = JobDraft { deadline: at(5_000), ..JobDraft::default() };
        assert_eq!(limited.latest_start(), at(5_000));
        limited.limits.timeout = Some(Duration::from_secs(2));
        assert_eq!((limited.latest_start(), JobDraft::default().latest_start()), (at(3_000), None));
    }

    #[test]
    fn test_a_job_with_a_machine_keeps_it_and_may_only_be_given_more_time() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let change = Change::default;
        for (wanted, job, refused) in [
            (Change { priority: Some(Priority::Low), ..change() }, limited(60), None),
            (Change { timeout: seconds(61), ..change() }, limited(60), None),
            (Change { timeout: seconds(60), ..change() }, limited(60), None),
            (Change { timeout: seconds(59), ..change() }, limited(60), Some("can only be raised")),
            (
                Change { timeout: seconds(61), ..change() },
                job(JobDraft::default()),
                Some("without a time limit"),
            ),
            (Change { gpus: Some(1), ..change() }, limited(60), Some("it has its GPUs already")),
            (Change { gpus: Some(0), ..change() }, limited(60), None),
            (Change { cpus: Some(1), ..change() }, limited(60), Some("it has its CPUs already")),
            (Change { memory: Some(1 << 30), ..change() }, limited(60), Some("it has its memory already")),
            (Change { held: Some(true), ..change() }, limited(60), Some("it does not wait")),
            (Change { begin: Some(Timestamp(1)), ..change() }, limited(60), Some("it has started")),
        ] {
            let fault = wanted.refused_while_placed(&job);
            assert_eq!(fault.is_some(), refused.is_some(), "{wanted:?}: {fault:?}");
            if let (Some(fault), Some(what)) = (fault, refused) {
                assert!(fault.what.contains(what) && fault.fix.is_some(), "{fault}");
                assert_eq!(fault.code, Code::JobNotWaiting);
            }
        }
        let all = Change { priority: Some(Priority::Low), timeout: seconds(90), gpus: Some(4), ..change() };
        let part = Change { gpus: None, ..all.clone() };
        assert_eq!(all.while_placed(&limited(60)), part);
        assert_eq!(all.while_placed(&limited(91)), Change { timeout: None, ..part });
        assert!(Change { held: Some(true), ..change() }.is_only_of_hold() && !all.is_only_of_hold());
    }
}
