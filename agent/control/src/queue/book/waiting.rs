//! How much of one user may wait: the number of his jobs, and how large they are together.
//!
//! Owns the count. Whatever waits is kept in memory and looked through when jobs are placed, so without a limit one user
//! could take both from everybody. An array counts once, with its one document, however many tasks it has.

use std::collections::HashMap;

use agent_model::{Code, Fault, JobId, JobSpec, JobState, Principal};

use super::{Book, Moment, Submission};
use crate::store::JobRecord;

/// The most bytes of the documents of the jobs of one user that wait.
const MOST_BYTES: u64 = 64 * 1024 * 1024;

/// What jobs amount to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Amount {
    jobs: u64,
    bytes: u64,
}

impl Amount {
    fn and(self, bytes: u64) -> Amount {
        Amount { jobs: self.jobs + 1, bytes: self.bytes + bytes }
    }

    fn without(self, bytes: u64) -> Amount {
        Amount { jobs: self.jobs.saturating_sub(1), bytes: self.bytes.saturating_sub(bytes) }
    }

    fn is_within(self, jobs: u32) -> bool {
        self.jobs <= u64::from(jobs) && self.bytes <= MOST_BYTES
    }
}

/// The sizes of the jobs that have not ended, and of all of each user. Tasks are no jobs of their own here.
#[derive(Debug, Default)]
pub(super) struct Amounts {
    sizes: HashMap<JobId, u64>,
    users: HashMap<Principal, Amount>,
}

impl Amounts {
    pub(super) fn add(&mut self, job: &JobRecord) {
        let Some(owner) = job.owner().filter(|_| !job.is_task) else { return };
        let bytes = job.spec.document_bytes() as u64;
        let before = self.sizes.insert(job.id.clone(), bytes);
        let amount = self.users.entry(owner.clone()).or_default();
        *amount = before.map_or(*amount, |before| amount.without(before)).and(bytes);
    }

    pub(super) fn remove(&mut self, job: &JobRecord) {
        let Some(bytes) = self.sizes.remove(&job.id) else { return };
        let Some(owner) = job.owner() else { return };
        let left = self.users.get(owner).copied().unwrap_or_default().without(bytes);
        match left.jobs {
            0 => _ = self.users.remove(owner),
            _ => _ = self.users.insert(owner.clone(), left),
        }
    }
}

impl Book {
    /// Puts a job in line, unless too much of its owner waits. `None` when the name is taken.
    pub(crate) fn try_submit(&mut self, new: Submission, now: Moment) -> Result<Option<JobId>, Fault> {
        self.check_waiting(&new.request, &new.spec)?;
        Ok(self.submit(new, now))
    }

    /// Refuses another job of a user of whom as much waits as may. A repeated submission is no other job.
    fn check_waiting(&self, request: &str, spec: &JobSpec) -> Result<(), Fault> {
        let Some(owner) = spec.owner.as_ref() else { return Ok(()) };
        if self.jobs.submitted(request).is_some() {
            return Ok(());
        }
        let (new, amounts) = (spec.document_bytes() as u64, &self.jobs.amounts);
        // Whoever has no more at all, waiting or not, is not looked at further.
        let all = amounts.users.get(owner).copied().unwrap_or_default();
        if all.and(new).is_within(self.limits.waiting) {
            return Ok(());
        }
        let waits = |job: &&std::sync::Arc<JobRecord>| {
            let waits = job.state == JobState::Queued || job.has_waiting_tasks();
            waits && !job.is_task && job.owner() == Some(owner)
        };
        let sizes = self.jobs.iter().filter(waits).map(|job| amounts.sizes.get(&job.id).copied());
        let waiting = sizes.flatten().fold(Amount::default(), Amount::and);
        match waiting.and(new).is_within(self.limits.waiting) {
            true => Ok(()),
            false => Err(refusal(owner, waiting, self.limits.waiting)),
        }
    }
}

fn refusal(owner: &Principal, waiting: Amount, most: u32) -> Fault {
    let what = match waiting.jobs < u64::from(most) {
        false => format!("{owner} has {} jobs that wait, and more than {most} may not", waiting.jobs),
        true => format!(
            "the jobs of {owner} that wait have {} MB as JSON, and with this one they would have more than {} MB",
            waiting.bytes / 1_000_000,
            MOST_BYTES / 1_000_000
        ),
    };
    Fault::new(Code::JobTooLarge, what).why("an array counts as one job, however many tasks it has").fix(
        "make one array of many jobs (agent/docs/arrays.md), wait until some have started, or cancel some",
    )
}

#[cfg(test)]
mod tests {
    use agent_model::job::Priority;
    use agent_model::{Boot, JobDraft};

    use super::super::tests::{book, moment, submission};
    use super::*;
    use crate::scheduler::UserLimits;

    fn of(owner: u32, name: &str, draft: JobDraft) -> Submission {
        let owner = Some(Principal::Local { uid: owner });
        let spec = JobDraft { command: "true".into(), ..draft }.validate().unwrap().owned_by(owner, None);
        Submission { spec, ..submission(name, Priority::Low, 1) }
    }

    fn try_submit(book: &mut Book, new: Submission) -> Result<(), Fault> {
        book.try_submit(new, moment(0, Boot::default())).map(|id| assert!(id.is_some()))
    }

    #[test]
    fn test_a_user_has_only_so_many_jobs_that_wait_and_others_have_their_own() {
        let mut book =
            book(1, Boot::default()).with_limits(UserLimits { waiting: 2, ..UserLimits::default() });
        let sweep = JobDraft { array: Some("0-99".parse().unwrap()), ..JobDraft::default() };
        try_submit(&mut book, of(1, "sweep", sweep)).unwrap();
        try_submit(&mut book, of(1, "a", JobDraft::default())).unwrap();
        let fault = try_submit(&mut book, of(1, "b", JobDraft::default())).unwrap_err();
        assert_eq!(fault.code, Code::JobTooLarge);
        assert!(fault.what.contains("has 2 jobs that wait"), "{fault}");
        // The same again is the same job, and others are not concerned.
        try_submit(&mut book, of(1, "a", JobDraft::default())).unwrap();
        try_submit(&mut book, of(2, "c", JobDraft::default())).unwrap();
        book.cancel(&"a".parse().unwrap(), "ada", moment(0, Boot::default())).unwrap();
        try_submit(&mut book, of(1, "b", JobDraft::default())).unwrap();
    }

    #[test]
    fn test_what_waits_of_a_user_has_only_so_many_bytes() {
        let mut book = book(1, Boot::default());
        let large = || JobDraft {
            environment_variables: (0..10).map(|n| (format!("V{n}"), "x".repeat(100_000))).collect(),
            ..JobDraft::default()
        };
        let most = MOST_BYTES / 1_000_000;
        let mut taken = 0;
        let fault = loop {
            match try_submit(&mut book, of(1, &format!("j{taken}"), large())) {
                Ok(()) => taken += 1,
                Err(fault) => break fault,
            }
        };
        assert!((most - 2..=most).contains(&taken), "{taken}");
        assert!(fault.what.contains("MB as JSON"), "{fault}");
        try_submit(&mut book, of(2, "small", JobDraft::default())).unwrap();
        assert!(try_submit(&mut book, of(1, "small-too", JobDraft::default())).is_ok());
    }
}
