//! From an order to a job that could start: `Accepted`, `Fetching`, `Building`.
//!
//! Owns the directory of the replica as long as no command runs in it. Each step can be repeated from its beginning:
//! it uses nothing of an earlier try. No step begins on a disk that is too full. A stop ends the steps after
//! `Accepted` at any point; the directory and its order are always completed, so that the replica can be found again
//! and reported.
//!
//! A remote store, or a proxy in front of it, may give wrong answers for a while: errors that may pass are waited
//! out.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::ControlFlow::Continue;
use std::path::Path;
use std::time::Duration;

use agent_cas::snapshot::Laid;
use agent_model::machine::ReplicaEvent;
use agent_model::protocol::record::JobUser;
use agent_model::{Digest, EnvSpec, JobSpec, Principal, ReplicaStep, Stream, causes};
use agent_runtime::env::{AcquireError, EnvLease, GpuVerdict, Phase, Progress, describe, judge_gpu, note};
use tokio::sync::watch;
use tokio::time::Instant;

use super::wait::{DISK_PATIENCE, LACK_PATIENCE, Tries, for_helper};
use super::{Runner, Step, or_end};
use crate::worker::backoff::Backoff;
use crate::worker::data::Supply;
use crate::worker::fetch::{self, FetchError, Fetching};
use crate::worker::prestaged_trees::Wish;
use crate::worker::{containers, faults, outputs, recover};

/// How long a store is asked again for blobs that it lacks or holds damaged, after all other sources were asked.
const DOUBT: Duration = Duration::from_secs(20);

/// How often the length of a build log is checked, only during a build: all other files announce their growth.
const BUILD_LOG_EVERY: Duration = Duration::from_millis(200);

/// How often the numbers of a build or a fetch are published.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

impl Runner {
    /// Makes the directory and the first record; changes nothing for a replica that was accepted before.
    pub(super) async fn accept(&mut self) -> Step<()> {
        if self.record.step != ReplicaStep::Accepted {
            return Continue(());
        }
        let mut tries = Tries::begin();
        while let Err(error) = recover::prepare(&self.dir, &self.record).await {
            self.write_again(&error, &mut tries).await?;
        }
        self.note("").await
    }

    /// Lays out the code and the inputs.
    pub(super) async fn fetch(&mut self) -> Step<()> {
        self.choose_user().await?;
        self.enter(ReplicaEvent::StepDone, "").await?;
        self.admit().await?;
        self.until_helped().await?;
        let user = self.user(containers::is_sure(&self.record.spec.environment));
        self.check_destinations().await?;
        let data = self.supply().await?;
        let laid = self.unless_stopped(self.lay_out(user.as_ref(), &data)).await?;
        let laid = or_end(laid.map_err(|error| faults::fetch(&error, self.worker.store.is_elsewhere())))?;
        if let Some(left) = &self.record.spec.resumes {
            let log = self.dir.log(Stream::Build);
            note(&log, &format!("./outputs begins with {left}\n"));
            self.shipping.build.written(outputs::length(&log));
        }
        let owner = user.as_ref().and_then(fetch::owner);
        // A tree of a per-run user, whose id is not used again soon, would help no other job.
        let again = user.as_ref().is_none_or(|user| !self.worker.config.jobs.uids.contains(&user.uid));
        let wishes = laid.into_iter().map(|(root, laid)| Wish { root, laid, owner });
        self.laid = wishes.filter(|_| again).collect();
        Continue(())
    }

    /// Lays out everything the job reads, waiting for the store if needed; prestaged trees are removed to make room
    /// for it.
    async fn lay_out(
        &self,
        user: Option<&JobUser>,
        data: &BTreeMap<String, Supply>,
    ) -> Result<Vec<(Digest, Laid)>, FetchError> {
        let (store, prestaged_trees, spec) =
            (&self.worker.store, &self.worker.prestaged_trees, &self.record.spec);
        let (mut backoff, mut unsound, begun) = (Backoff::default(), None, Instant::now());
        loop {
            let trees = prestaged_trees.list();
            let fetching = Fetching::default();
            let laid = tokio::select! {
                laid = fetch::lay_out(store, &trees, spec, data, &self.dir, user, &fetching) => laid,
                never = self.follow_fetch(&fetching) => match never {},
            };
            let error = match laid {
                Err(error) if faults::is_no_space(&error) && prestaged_trees.give_way().await => continue,
                Err(error) if faults::is_no_space(&error) && self.worker.disk.room().is_err() => {
                    self.until_room().await;
                    continue;
                }
                Err(error) => error,
                laid => return laid,
            };
            if faults::is_of_the_disk(&error) && begun.elapsed() < DISK_PATIENCE {
                let what = format!("for the disk of the node: {}", causes::tell(&error));
                self.wait(&mut backoff, &what).await;
                continue;
            }
            let doubtful = store.is_elsewhere() && faults::is_unsound(&error);
            let waits = match doubtful {
                true => unsound.get_or_insert_with(Instant::now).elapsed() < DOUBT,
                false => faults::is_away(&error),
            };
            if !waits {
                return Err(error);
            }
            self.wait_for_store(&mut backoff, &error).await;
        }
    }

    /// Publishes how much is fetched.
    async fn follow_fetch(&self, fetching: &Fetching) -> Infallible {
        loop {
            tokio::time::sleep(PROGRESS_EVERY).await;
            let away = agent_spawn::is_waited_for().map(|wrong| format!("waiting {}", for_helper(&wrong)));
            if let Some(part) = away.or_else(|| fetching.describe()) {
                self.say(&part);
            }
        }
    }

    /// Gets the environment, and ships what its builder prints meanwhile.
    pub(super) async fn build(&mut self) -> Step<EnvLease> {
        let wanted = self.record.spec.environment.clone();
        self.enter(ReplicaEvent::StepDone, &wanted.called()).await?;
        self.admit().await?;
        self.until_helped().await?;
        let log = self.dir.log(Stream::Build);
        let told = watch::Sender::new(None);
        let acquired = tokio::select! {
            acquired = self.unless_stopped(self.acquire(&wanted, &log, &told)) => acquired?,
            never = self.follow_build_log() => match never {},
            never = self.follow_progress(told.subscribe()) => match never {},
        };
        self.shipping.build.written(outputs::length(&log));
        let environment = or_end(acquired.map_err(|error| faults::environment(&error, &wanted.called())))?;
        if !environment.reused() {
            self.worker.built.notify_one();
        }
        let wants = self.record.spec.resources.gpus > 0;
        let image =
            environment.image().map(|image| judge_gpu(image.gpu, self.worker.gpus.are_there(), wants));
        if let Some(GpuVerdict::Warn(why)) = image {
            note(&log, &format!("warning: {why}\n"));
            self.shipping.build.written(outputs::length(&log));
        }
        Continue(environment)
    }

    /// Gets the environment, waiting until the container engine answers, if one is needed, and the disk has room.
    async fn acquire(
        &self,
        wanted: &EnvSpec,
        log: &Path,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<EnvLease, AcquireError> {
        let (begun, mut backoff) = (Instant::now(), Backoff::default());
        let owner = owner_name(&self.record.spec);
        let environments = self.worker.environments.of(&owner);
        loop {
            let what = match environments.acquire(wanted, log, told).await {
                Err(error) if error.is_waiting() => format!("for the container engine: {error}"),
                Err(error) if error.is_lack() && begun.elapsed() < LACK_PATIENCE => {
                    format!("for what the node lacks: {}", causes::tell(&error))
                }
                Err(AcquireError::DiskFull { path }) if self.worker.disk.room().is_err() => {
                    format!("for room: the disk of {} is full", path.display())
                }
                acquired => return acquired,
            };
            // All messages of a build are sent through `told`, to keep their order.
            let tell = |what: &str| drop(told.send_replace(Some(Progress::of(Phase::Waiting, what))));
            self.wait_telling(&mut backoff, &what, tell).await;
        }
    }

    /// Publishes the progress of a build or a fetch: a new phase at once, the numbers now and then.
    pub(super) async fn follow_progress(&self, mut told: watch::Receiver<Option<Progress>>) -> Infallible {
        let usual = self.view.borrow().detail.clone();
        loop {
            let progress = told.borrow_and_update().clone();
            let away = agent_spawn::is_waited_for().map(|wrong| format!("waiting {}", for_helper(&wrong)));
            self.say(&away.or(progress.as_ref().map(describe)).unwrap_or_else(|| usual.clone()));
            let phase = progress.map(|progress| progress.phase);
            let other = |told: &Option<Progress>| told.as_ref().map(|told| told.phase) != phase;
            let next = tokio::time::timeout(PROGRESS_EVERY, told.wait_for(other));
            let gone = matches!(next.await, Ok(Err(_)));
            if gone {
                std::future::pending::<()>().await; // the result is handled elsewhere
            }
        }
    }

    /// Ships a build log as it grows.
    async fn follow_build_log(&self) -> Infallible {
        let log = self.dir.log(Stream::Build);
        loop {
            tokio::time::sleep(BUILD_LOG_EVERY).await;
            self.shipping.build.written(outputs::length(&log));
        }
    }

    /// Determines the user of the job; the next record holds it, before any file belongs to that user. Root's own
    /// jobs in containers have none.
    async fn choose_user(&mut self) -> Step<()> {
        let (worker, record) = (self.worker.clone(), self.record.clone());
        let chosen = agent_blocking::blocking(move || worker.users.user(&worker.config, &record)).await;
        self.record.user = match chosen {
            Err(_) if containers::is_sure(&self.record.spec.environment) => None,
            chosen => or_end(chosen)?,
        };
        Continue(())
    }

    /// The user of the command; `None` is the daemon's own user.
    pub(super) fn user(&self, in_container: bool) -> Option<JobUser> {
        let user = self.record.user.clone();
        if in_container { containers::user(&self.worker.config, user) } else { user }
    }
}

/// How the owner of a job is called among those that builders work for.
fn owner_name(spec: &JobSpec) -> String {
    match &spec.owner {
        // Another one than who had that name before.
        Some(Principal::User { name }) if let Some(since) = spec.owner_since => {
            format!("user-{name}-{}", since.0)
        }
        Some(Principal::Local { uid }) => format!("uid-{uid}"),
        Some(Principal::User { name }) => format!("user-{name}"),
        Some(Principal::Node { name }) => format!("node-{name}"),
        None => "unknown".to_owned(),
    }
}
