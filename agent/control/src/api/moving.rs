//! The jobs that a machine brings when it joins.
//!
//! A token may name the users of a machine whose jobs it takes, each with the user of this controller that owns them
//! from then on. What the machine announces in the call `Join` is checked before it becomes a node; its jobs follow in
//! the call `MoveJobs`, once their blobs and logs are here. Invariants: a machine speaks for nobody whom its token does
//! not name; from its first report as a node on, it brings nothing; a job that came is never taken a second time.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::words::count;
use agent_model::{Code, Fault, JobId, NodeId, Principal, Timestamp, UserName};
use agent_proto::v1;

use super::{Refusal, Services, invalid};
use crate::pins;
use crate::store::{JobRecord, ReplicaRecord};

/// Names in one message.
const SHOWN: usize = 5;
/// More attempts than any job ever has.
const MOST_ATTEMPTS: u64 = 1 << 32;

impl Services {
    /// Whose jobs a token is to take: users of this controller.
    pub(super) fn users_named(
        &self,
        named: impl IntoIterator<Item = (String, String)>,
    ) -> Result<BTreeMap<String, UserName>, Refusal> {
        let user = |(local, user): (String, String)| {
            let user: UserName = user.parse()?;
            match self.gate.registry.has_user(&user) {
                true => Ok((local, user)),
                false => Err(no_user(&user).into()),
            }
        };
        named.into_iter().map(user).collect()
    }

    /// Refuses what cannot be taken, before anything changes. `takes` is what the token says.
    pub(super) async fn require_movable(
        &self,
        takes: &BTreeMap<String, UserName>,
        jobs: &[v1::MovingJob],
    ) -> Result<(), Refusal> {
        if let Some(fault) = not_taken(takes, jobs.iter().map(|job| job.owner.as_str())) {
            return Err(fault.into());
        }
        self.require_room()?;
        if let Some(gone) = takes.values().find(|user| !self.gate.registry.has_user(user)) {
            return Err(no_user(gone).into());
        }
        let mut taken = Vec::new();
        for job in jobs {
            let id: JobId = job.job.parse()?;
            if self.store.job(&id).await?.is_some() {
                taken.push(id);
            }
            if let Some(owner) = takes.get(&job.owner) {
                let owner = Principal::User { name: owner.clone() };
                self.require_secret_names(job.secrets.clone(), &owner).await?;
            }
        }
        if taken.is_empty() { Ok(()) } else { Err(names_taken(&taken).into()) }
    }

    /// Takes jobs of a machine that may bring them: all, or none. Those that came before are left as they are.
    pub(super) async fn take_moved(&self, asked: v1::MoveJobsRequest) -> Result<(), Refusal> {
        let node: NodeId = asked.node.parse()?;
        let takes = self.gate.registry.takes_jobs_of(&node);
        if takes.is_empty() {
            return Err(Fault::new(Code::Denied, format!("{node} may bring no jobs"))
                .why("a machine brings them when it joins with a token for that, before it works as a node")
                .fix("submit them here: `agentctl run`")
                .into());
        }
        let now = self.gate.clock.now();
        let mut jobs = Vec::new();
        for moved in asked.jobs {
            let owner = takes.get(&moved.owner).ok_or_else(|| {
                Fault::new(Code::Denied, format!("{node} may bring no jobs of `{}`", moved.owner))
            })?;
            let record = serde_json::from_slice(&moved.record)
                .map_err(|error| invalid("the record of a job cannot be read").because(&error))?;
            let job = arriving(record, owner, &node, now)?;
            match self.store.submitted(&job.request).await? {
                Some(known) if known.id == job.id => {}
                Some(_) => return Err(names_taken(&[job.id]).into()),
                None => jobs.push(job),
            }
        }
        for job in &jobs {
            self.require_own_array(job, &jobs).await?;
            if self.store.job(&job.id).await?.is_some() {
                return Err(names_taken(std::slice::from_ref(&job.id)).into());
            }
        }
        self.require_room()?;
        // From here until the jobs are on disk nothing that they name is removed.
        let _relied = self.collector.rely_on(jobs.iter().flat_map(pins::of_job).collect()).await;
        for job in &jobs {
            self.require_snapshots(&job.trees()).await?;
        }
        let moved = jobs.len();
        match self.queue.move_in(jobs, &node).await? {
            None => {
                tracing::info!(%node, jobs = moved, "took over jobs of machine that joins");
                Ok(())
            }
            Some(id) => Err(names_taken(&[id]).into()),
        }
    }

    /// A task needs its array, which must be of the same owner.
    async fn require_own_array(&self, job: &JobRecord, beside: &[JobRecord]) -> Result<(), Refusal> {
        let Some((array, _)) = job.task() else { return Ok(()) };
        let beside = beside.iter().find(|known| known.id == array).map(|known| known.owner.clone());
        let owner = match beside {
            Some(owner) => owner,
            None => self.store.job(&array).await?.and_then(|array| array.owner),
        };
        match owner == job.owner {
            true => Ok(()),
            false => {
                Err(Fault::new(Code::Denied, format!("`{}` is no task of an array of its owner", job.id))
                    .into())
            }
        }
    }
}

/// Why a token does not take the jobs of these owners, if it does not.
fn not_taken<'a>(takes: &BTreeMap<String, UserName>, owners: impl Iterator<Item = &'a str>) -> Option<Fault> {
    let missing: BTreeSet<&str> = owners.filter(|owner| !takes.contains_key(*owner)).collect();
    if missing.is_empty() {
        return None;
    }
    let names: Vec<&str> = missing.iter().copied().collect();
    let wanted: Vec<String> = names.iter().map(|name| format!("--jobs-of {name}=USER")).collect();
    let what = format!("the token takes no jobs of {}", names.join(", "));
    let why = "a machine brings the jobs of those whom its token names";
    Some(Fault::new(Code::TokenRefused, what).why(why).fix(format!(
        "ask an operator for one that does: agentctl token create {}, each USER a user there who is to own them",
        wanted.join(" ")
    )))
}

fn no_user(user: &UserName) -> Fault {
    Fault::new(Code::NotKnownHere, format!("there is no user `{user}` to own the jobs"))
        .fix(format!("add the user first: agentctl user add {user}"))
}

fn names_taken(taken: &[JobId]) -> Fault {
    let names: Vec<&str> = taken.iter().take(SHOWN).map(JobId::as_str).collect();
    let what = match taken {
        [one] => format!("the controller has, or had, another job `{one}`"),
        several => {
            format!("the controller has, or had, other jobs of {}", count(several.len() as u64, "name"))
        }
    };
    let first = names.first().copied().unwrap_or_default();
    Fault::new(Code::JobConflict, what)
        .why(names.join(", "))
        .fix(format!("end them on the machine before it joins: agentctl cancel --wait {first}"))
}

/// The record of a job as it begins here: of that of its machine only what a job may have that has not ended, and that
/// runs on that machine, if it runs.
fn arriving(job: JobRecord, owner: &UserName, node: &NodeId, now: Timestamp) -> Result<JobRecord, Fault> {
    let odd = |what: &str| Err(invalid(format!("the job `{}` {what}", job.id)));
    if job.state.is_terminal() || job.removed_at.is_some() {
        return odd("has ended");
    }
    if job.is_task != job.id.as_task().is_some() || job.tasks.is_some() != job.spec.array.is_some() {
        return odd("has the name or the record of something else");
    }
    if job.epoch.0 > MOST_ATTEMPTS || job.uncharged > job.epoch.0 {
        return odd("has more attempts than a job can have");
    }
    let array = job.tasks.as_ref().zip(job.spec.array.as_ref());
    if array.is_some_and(|(tasks, array)| !tasks.is_of(array) || tasks.after > job.epoch) {
        return odd("has tasks that its array has not");
    }
    let replicas = match &job.replicas[..] {
        [] => Vec::new(),
        [one] if one.rank == 0 && one.end.is_none() && job.spec.resources.nodes == 1 && job.epoch.0 > 0 => {
            vec![ReplicaRecord { node: node.clone(), ..one.clone() }]
        }
        _ => return odd("runs on other machines"),
    };
    // An array that has begun counts as placed, without a run of its own.
    if job.tasks.is_none() && job.state.is_placed() == replicas.is_empty() {
        return odd("runs nowhere");
    }
    let owner = Principal::User { name: owner.clone() };
    Ok(JobRecord {
        seq: 0,
        spec: job.spec.owned_by(Some(owner.clone())),
        owner: Some(owner),
        submitted_at: job.submitted_at.min(now),
        replicas,
        avoid: None,
        ended_at: None,
        outcome: None,
        go: None,
        broken: None,
        named: BTreeMap::new(),
        ..job
    })
}

#[cfg(test)]
mod tests {
    use agent_model::{Epoch, JobState};

    use super::*;
    use crate::store::tests::job;

    fn named(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn arrives(job: JobRecord) -> Result<JobRecord, Fault> {
        arriving(job, &"ada".parse().unwrap(), &named("box"), Timestamp(100))
    }

    fn running(name: &str) -> JobRecord {
        let replicas = vec![ReplicaRecord::on(&named("elsewhere"), "b1")];
        JobRecord { state: JobState::Running, epoch: Epoch(2), replicas, ..job(name, 7) }
    }

    #[test]
    fn test_a_job_that_comes_is_of_its_new_owner_and_runs_on_the_machine_that_brings_it() {
        let came = arrives(running("a")).unwrap();
        assert_eq!(came.replicas[0].node, named("box"));
        assert_eq!((came.epoch, came.state, came.seq), (Epoch(2), JobState::Running, 0));
        let ada = Some(Principal::User { name: "ada".parse().unwrap() });
        assert_eq!((&came.owner, &came.spec.owner), (&ada, &ada));
        let late = JobRecord { submitted_at: Timestamp(500), ..job("b", 1) };
        assert_eq!(arrives(late).unwrap().submitted_at, Timestamp(100));
    }

    #[test]
    fn test_what_no_honest_machine_sends_is_refused() {
        let two =
            JobRecord { replicas: [running("a").replicas, running("a").replicas].concat(), ..running("a") };
        for odd in [
            JobRecord { state: JobState::Completed, ..job("a", 1) },
            JobRecord { removed_at: Some(Timestamp(1)), ..job("a", 1) },
            JobRecord { is_task: true, ..job("a", 1) },
            job("a--3", 1),
            JobRecord { tasks: Some(Box::default()), ..job("a", 1) },
            JobRecord { uncharged: 3, ..running("a") },
            JobRecord { epoch: Epoch(u64::MAX), ..running("a") },
            JobRecord { replicas: Vec::new(), ..running("a") },
            JobRecord { state: JobState::Queued, ..running("a") },
            JobRecord { epoch: Epoch(0), ..running("a") },
            two,
        ] {
            assert_eq!(arrives(odd.clone()).unwrap_err().code, Code::RequestInvalid, "{odd:?}");
        }
    }

    #[test]
    fn test_every_owner_whom_the_token_does_not_name_is_told_at_once() {
        let takes = BTreeMap::from([("root".to_owned(), "ada".parse().unwrap())]);
        assert_eq!(not_taken(&takes, ["root", "root"].into_iter()), None);
        let fault = not_taken(&takes, ["eve", "root", "bob", "eve"].into_iter()).unwrap();
        assert_eq!(fault.what, "the token takes no jobs of bob, eve");
        assert!(fault.fix.unwrap().contains("--jobs-of bob=USER --jobs-of eve=USER"));
    }
}
