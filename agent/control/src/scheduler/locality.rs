//! What nodes probably have of what jobs need, so that a job is placed where less is fetched and built.
//!
//! A node has the environment and the snapshots of each job that ran there, until it makes room. It is a hint: it is
//! kept in memory only, of the latest jobs of each node, and a wrong one costs what no hint would have cost.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use agent_model::{EnvSpec, JobDraft};

/// How many environments, and how many snapshots, are remembered of a node.
const REMEMBERED: usize = 64;

/// What a job needs on its node, as hashes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct JobNeeds {
    /// Its environment, if that must be built or fetched.
    environment: Option<u64>,
    snapshots: Vec<u64>,
}

impl JobNeeds {
    pub(crate) fn of(job: &JobDraft) -> JobNeeds {
        let built = !matches!(job.environment, EnvSpec::Host { .. });
        JobNeeds {
            environment: built.then(|| hash(&job.environment)),
            snapshots: job.snapshots().iter().map(hash).collect(),
        }
    }
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// What a node has, latest last.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NodeCache {
    environments: VecDeque<u64>,
    snapshots: VecDeque<u64>,
}

impl NodeCache {
    /// Notes that a job runs there.
    pub(crate) fn note(&mut self, needs: &JobNeeds) {
        needs.environment.iter().for_each(|one| remember(&mut self.environments, *one));
        needs.snapshots.iter().for_each(|one| remember(&mut self.snapshots, *one));
    }

    /// It lacks the environment of a job.
    pub(super) fn lacks_environment(&self, needs: &JobNeeds) -> bool {
        needs.environment.is_some_and(|one| !self.environments.contains(&one))
    }

    /// How many snapshots of a job it lacks.
    pub(super) fn lacks_snapshots(&self, needs: &JobNeeds) -> usize {
        needs.snapshots.iter().filter(|one| !self.snapshots.contains(one)).count()
    }
}

fn remember(known: &mut VecDeque<u64>, one: u64) {
    known.retain(|other| *other != one);
    known.push_back(one);
    if known.len() > REMEMBERED {
        known.pop_front();
    }
}
