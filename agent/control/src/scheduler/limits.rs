//! What one user may have on the nodes at a time, as an operator sets it.
//!
//! A job counts with all its ranks from its placement to its end, so a job of several ranks gets all it asks for or
//! nothing. A job that would exceed a limit gets no promise of nodes, so those of other users pass it; later jobs of
//! its user that need the same wait behind it, or small ones would hold up a large one for ever.

use std::collections::{HashMap, HashSet};
use std::fmt;

use agent_model::JobId;
use agent_model::job::Resources;
use agent_model::words::count;

use super::{Pending, Room, Wait};

/// The most that the jobs of one user may have at a time; where there is no number there is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserLimits {
    /// Jobs that are placed on nodes; one of several ranks is one job.
    pub jobs: Option<u32>,
    /// GPUs of all ranks of these jobs.
    pub gpus: Option<u32>,
    /// Processors that they reserved with `resources.cpus`, of all ranks.
    pub cpus: Option<u32>,
    /// Jobs that wait; an array is one job.
    pub waiting: u32,
}

impl UserLimits {
    /// How many jobs of a user may wait where nobody set another number.
    pub const WAITING: u32 = 10_000;
}

impl Default for UserLimits {
    fn default() -> UserLimits {
        UserLimits { jobs: None, gpus: None, cpus: None, waiting: UserLimits::WAITING }
    }
}

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limited {
    Jobs,
    Gpus,
    Cpus,
}

impl Limited {
    const ALL: [Limited; 3] = [Limited::Jobs, Limited::Gpus, Limited::Cpus];

    fn of(self, limits: UserLimits) -> Option<u64> {
        let limit = match self {
            Limited::Jobs => limits.jobs,
            Limited::Gpus => limits.gpus,
            Limited::Cpus => limits.cpus,
        };
        limit.map(u64::from)
    }

    fn needs(self, wants: &Resources) -> u64 {
        let ranks = u64::from(wants.nodes);
        match self {
            Limited::Jobs => 1,
            Limited::Gpus => ranks * u64::from(wants.gpus),
            Limited::Cpus => ranks * u64::from(wants.cpus),
        }
    }

    fn noun(self) -> &'static str {
        match self {
            Limited::Jobs => "job",
            Limited::Gpus => "GPU",
            Limited::Cpus => "CPU",
        }
    }
}

/// A job that waits because of a limit of its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Excess {
    owner: String,
    what: Limited,
    limit: u64,
    /// What the user has of it.
    has: u64,
    /// What the job asks for.
    wants: u64,
    /// The job of the user that waits for the same, and comes first.
    behind: Option<JobId>,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Excess { owner, what, limit, has, wants, behind } = self;
        let of = |number: u64| count(number, what.noun());
        let set = format!("`limits_per_user` in the configuration of the controller allows {}", of(*limit));
        match behind {
            _ if wants > limit => write!(
                f,
                "it asks for {} and never starts so: {set} at a time; ask for less, or ask an operator for more",
                of(*wants)
            ),
            Some(behind) => write!(f, "after {behind}, for which {owner} has no room: {set} at a time"),
            None => write!(f, "{owner} has {} already: {set} at a time", of(*has)),
        }
    }
}

/// What each user has, while jobs are placed.
pub(super) struct Ledger<'a> {
    limits: UserLimits,
    users: HashMap<&'a str, User<'a>>,
}

#[derive(Default)]
struct User<'a> {
    has: [u64; Limited::ALL.len()],
    /// The first job that waits for each.
    waits: [Option<&'a JobId>; Limited::ALL.len()],
}

impl<'a> Ledger<'a> {
    /// What the users of the waiting jobs have on the nodes.
    pub(super) fn new(limits: UserLimits, pending: &'a [Pending], nodes: &[Room]) -> Ledger<'a> {
        let mut users: HashMap<&str, User<'_>> = HashMap::new();
        if limits != UserLimits::default() {
            users.extend(pending.iter().filter_map(|job| Some((job.owner.as_deref()?, User::default()))));
            let mut known = HashSet::new();
            for taken in nodes.iter().flat_map(|node| &node.taken) {
                let Some(user) = taken.owner.as_deref().and_then(|owner| users.get_mut(owner)) else {
                    continue;
                };
                let jobs = u64::from(known.insert(&taken.job));
                let more = [jobs, u64::from(taken.size.gpus), u64::from(taken.size.cpus)];
                user.has.iter_mut().zip(more).for_each(|(has, more)| *has += more);
            }
        }
        Ledger { limits, users }
    }

    /// Why a job must wait for others of its user, if it must.
    pub(super) fn excess(&mut self, job: &'a Pending) -> Option<Excess> {
        let owner = job.owner.as_deref()?;
        let user = self.users.get_mut(owner)?;
        for (index, what) in Limited::ALL.into_iter().enumerate() {
            let Some(limit) = what.of(self.limits) else { continue };
            let (has, wants) = (user.has[index], what.needs(&job.wants));
            let behind = user.waits[index].filter(|_| wants > 0);
            if wants > 0 && (behind.is_some() || has + wants > limit) {
                if wants <= limit {
                    user.waits[index] = Some(behind.unwrap_or(&job.job));
                }
                return Some(Excess {
                    owner: owner.to_owned(),
                    what,
                    limit,
                    has,
                    wants,
                    behind: behind.cloned(),
                });
            }
        }
        None
    }

    /// Counts a job that was placed.
    pub(super) fn count(&mut self, job: &Pending) {
        let Some(user) = job.owner.as_deref().and_then(|owner| self.users.get_mut(owner)) else { return };
        let more = Limited::ALL.map(|what| what.needs(&job.wants));
        user.has.iter_mut().zip(more).for_each(|(has, more)| *has += more);
    }
}

impl From<Excess> for Wait {
    fn from(excess: Excess) -> Wait {
        Wait::Limit(Box::new(excess))
    }
}
