//! Lists of jobs: which of them, in which order, and how much of each a caller is shown.
//!
//! Hides that the jobs that have not ended are in memory and the others on the disk. Invariants: a list is of the jobs
//! that its caller could tell apart anyway, so nothing is learnt from whether a job that is hidden is in it; the jobs
//! that ended are found by index.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use agent_model::access::PrincipalError;
use agent_model::job::Priority;
use agent_model::{JobId, JobState, Principal};
use agent_proto::v1;

use super::pages::Page;
use super::{Caller, Refusal, Services, ended, hide_what_it_does, invalid, to_wire};
use crate::queue::JobView;
use crate::store::{Among, JobFilter, JobRecord};

/// Jobs in a page by default.
const PAGE: u32 = 50;
/// The most jobs in a page.
const LARGEST_PAGE: u32 = 1000;
/// Jobs that are read from the disk at a time: each may have a megabyte.
const READ: u32 = 32;

/// One answer, as it is filled.
struct Answer<'a> {
    page: Page<v1::Job>,
    limit: usize,
    choice: &'a JobFilter,
    caller: &'a Caller,
    sees_all: bool,
}

impl Answer<'_> {
    /// Takes a job if it is meant; false when there is no room for it, or for any more.
    fn take(&mut self, view: &JobView) -> bool {
        let job = &view.job;
        let is_open = self.sees_all || self.caller.owns(job) || job.spec.visible_to_all;
        // Of a job that is hidden nobody is told the experiment.
        if !self.choice.has(job) || (self.choice.experiment.is_some() && !is_open) {
            return true;
        }
        if self.page.entries.len() == self.limit {
            self.page.more = true;
            return false;
        }
        let whole = to_wire(view);
        self.page.take(if is_open { whole } else { hide_what_it_does(whole) })
    }

    fn done(self) -> v1::ListJobsResponse {
        v1::ListJobsResponse { jobs: self.page.entries, more: self.page.more }
    }
}

impl Services {
    /// See [`v1::ListJobsRequest`].
    pub(super) async fn list_jobs(
        &self,
        request: v1::ListJobsRequest,
        caller: &Caller,
    ) -> Result<v1::ListJobsResponse, Refusal> {
        let limit = match request.limit {
            0 => PAGE,
            limit => limit.min(LARGEST_PAGE),
        };
        let choice = choice(&request)?;
        let answer = Answer {
            page: Page::new(),
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            choice: &choice,
            caller,
            sees_all: caller.is_operator().await,
        };
        if !request.begins.is_empty() {
            return self.list_named(&request, answer).await;
        }
        let array = Some(request.array.as_str()).filter(|array| !array.is_empty());
        let array = array.map(str::parse::<JobId>).transpose()?;
        if let Some(array) = &array {
            self.readable(array, caller).await?;
        }
        let after = match request.after.as_str() {
            "" => None,
            name => Some(self.view(&name.parse()?).await?.job),
        };
        let mut live = self.queue.shown_jobs().await?;
        live.retain(|view| view.job.task().map(|(array, _)| array) == array);
        let known: HashSet<JobId> = live.iter().map(|view| view.job.id.clone()).collect();
        match request.standing {
            true => live.sort_by_cached_key(|view| standing(&view.job)),
            false => live.sort_by_key(|view| Reverse(view.job.seq)),
        }
        let mut before = None;
        if let Some(after) = &after {
            match request.standing {
                true if known.contains(&after.id) => {
                    let at = live.iter().position(|view| view.job.id == after.id).unwrap_or_default();
                    live.drain(..=at);
                }
                true => {
                    live.clear();
                    before = Some(after.seq);
                }
                false => {
                    live.retain(|view| view.job.seq < after.seq);
                    before = Some(after.seq);
                }
            }
        }
        let among = array.as_ref().map_or(Among::Ended(&choice), Among::TasksOf);
        let on_disk = !request.active && choice.may_have_ended();
        self.list_all(answer, live, &known, on_disk.then_some((among, before)), request.standing).await
    }

    /// Jobs that have not ended in their order, among them or after them those on the disk, without `known` ones.
    async fn list_all(
        &self,
        mut answer: Answer<'_>,
        live: Vec<JobView>,
        known: &HashSet<JobId>,
        on_disk: Option<(Among<'_>, Option<u64>)>,
        live_first: bool,
    ) -> Result<v1::ListJobsResponse, Refusal> {
        let mut live = live.into_iter().peekable();
        if on_disk.is_none() || live_first {
            for view in live.by_ref() {
                if !answer.take(&view) {
                    return Ok(answer.done());
                }
            }
        }
        let Some((among, mut before)) = on_disk else { return Ok(answer.done()) };
        self.queue.flush_if_possible().await?;
        loop {
            let stored = self.store.page(among, before, READ).await?;
            let is_last = stored.len() < READ as usize;
            before = stored.last().map(|job| job.seq);
            for job in stored {
                while let Some(newer) = live.next_if(|view| view.job.seq > job.seq) {
                    if !answer.take(&newer) {
                        return Ok(answer.done());
                    }
                }
                let is_over = job.state.is_terminal() && !known.contains(&job.id);
                if is_over && !answer.take(&ended(job)) {
                    return Ok(answer.done());
                }
            }
            if is_last {
                break;
            }
        }
        let _ = live.all(|view| answer.take(&view));
        Ok(answer.done())
    }

    /// Jobs whose name begins with what was asked for.
    async fn list_named(
        &self,
        request: &v1::ListJobsRequest,
        mut answer: Answer<'_>,
    ) -> Result<v1::ListJobsResponse, Refusal> {
        let (begins, after) = (request.begins.as_str(), request.after.as_str());
        let is_meant = |id: &JobId| id.as_str().starts_with(begins) && id.as_str() > after;
        let live = self.queue.shown_jobs().await?.into_iter();
        let live = live.filter(|view| is_meant(&view.job.id) && view.job.task().is_none());
        let mut found: BTreeMap<String, JobView> = live.map(|view| (view.job.id.to_string(), view)).collect();
        self.queue.flush_if_possible().await?;
        // One more than there is room for, to know whether there is one.
        let enough = u32::try_from(answer.limit).unwrap_or(u32::MAX).saturating_add(1);
        for job in self.store.page(Among::Named(begins, after), None, enough).await? {
            found.entry(job.id.to_string()).or_insert_with(|| ended(job));
        }
        let _ = found.values().all(|view| answer.take(view));
        Ok(answer.done())
    }
}

/// What the jobs must be like.
fn choice(request: &v1::ListJobsRequest) -> Result<JobFilter, Refusal> {
    let owners: Result<Vec<Principal>, _> = request.owners.iter().map(|owner| owner.parse()).collect();
    Ok(JobFilter {
        owners: owners.map_err(|error: PrincipalError| invalid(error.to_string()))?,
        states: request.states.clone(),
        experiment: Some(request.experiment.clone()).filter(|experiment| !experiment.is_empty()),
    })
}

/// What runs comes first, then what waits: what may start at once, what waits for other jobs or a date, and what is held.
fn standing(job: &JobRecord) -> (u8, Reverse<Priority>, u64) {
    if job.state != JobState::Queued {
        return (0, Reverse(Priority::default()), job.seq);
    }
    let class = if job.held.is_some() {
        3
    } else if !job.waits_for.is_empty() || job.not_before.is_some() {
        2
    } else {
        1
    };
    (class, Reverse(job.spec.priority), job.seq)
}
