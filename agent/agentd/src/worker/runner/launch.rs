//! From a job that could start to a running command: `Launching`.
//!
//! Owns what is needed in between: the GPUs, the other ranks of its gang, the permission to start, the container. In
//! this order, because each may take long: GPUs are taken before a rank reports that it could start, and the
//! permission is checked again after each wait. A stop ends every wait; the launch itself is never dropped, because
//! then it would be unknown whether the command runs. From then on only its shim ends it.

use std::collections::BTreeMap;
use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use agent_cas::digest_of;
use agent_model::machine::ReplicaEvent;
use agent_model::protocol::orders::Desired;
use agent_model::protocol::record::JobUser;
use agent_model::protocol::start::Deadline;
use agent_model::words::duration;
use agent_model::{Boot, Fault};
use agent_runtime::env::EnvLease;
use agent_runtime::exec::{ContainerSpec, LaunchError, Running};
use agent_shim::{Hidden, Launch};
use tokio::time::Instant;

use super::wait::{DISK_PATIENCE, LACK_PATIENCE};
use super::{End, Runner, Step, or_end};
use crate::worker::backoff::Backoff;
use crate::worker::launch::Facts;
use crate::worker::launch::gang::Seating;
use crate::worker::secrets::Answer;
use crate::worker::tracking::experiment_id;
use crate::worker::{containers, faults, fetch};

/// How often a job that waits for GPUs asks again although no change is known.
const GPUS_EVERY: Duration = Duration::from_secs(10);

impl Runner {
    /// Starts the command under its shim. From then on only the shim ends it.
    pub(super) async fn launch(&mut self, environment: &EnvLease) -> Step<Running> {
        self.record.environment = Some(environment.key().to_owned());
        // The keeper of environments stores the list itself.
        let lock = environment.lock_file().and_then(|file| std::fs::read(file).ok());
        self.record.lock = lock.map(|text| digest_of(&text));
        self.enter(ReplicaEvent::StepDone, &about(environment)).await?;
        self.take_gpus(&about(environment)).await?;
        let seating = self.muster(environment).await?;
        let lease_until = self.leave_to_start().await?;
        let mut container_spec = containers::of(environment, &self.record.spec, &self.record.gpus);
        if let Some(container_spec) = &mut container_spec {
            container_spec.image.mounts.extend(fetch::linked(&self.dir, &self.record.spec));
        }
        let user = self.user(container_spec.is_some());
        let launch =
            self.order(environment, container_spec.as_ref(), user.as_ref(), lease_until, seating.as_ref());
        let mut launch = or_end(launch)?;
        launch.secrets = self.secrets().await?;
        if container_spec.is_some() {
            or_end(self.give_home(user).await)?;
        } else {
            let python = Some(environment.python_version()).filter(|_| self.worker.config.jobs.view);
            let layered = launch.view.as_ref().is_some_and(|view| view.environment.is_some());
            let usual = launch.env.get(fetch::USUAL_BASE).map(String::as_str);
            let made = fetch::make_layers(&self.dir, user, layered, python, usual).await;
            or_end(made.map_err(|error| faults::fetch(&error, false)))?;
        }
        self.start(launch, container_spec.as_ref()).await
    }

    /// The secrets that the job names; waits for the controller to send them.
    async fn secrets(&self) -> Step<BTreeMap<String, Hidden>> {
        let (usual, mut backoff) = (self.view.borrow().detail.clone(), Backoff::default());
        if self.record.spec.secrets.is_empty() {
            return Continue(BTreeMap::new());
        }
        loop {
            let asked = self.worker.secrets.read(&self.record.replica);
            match self.unless_stopped(asked).await? {
                Answer::Are(secrets) => {
                    self.say(&usual);
                    return Continue(secrets);
                }
                Answer::Refused(fault) => return Break(End::Failed(fault)),
                Answer::Away(why) => {
                    let what = format!("for the controller, which keeps its secrets: {why}");
                    self.unless_stopped(self.wait(&mut backoff, &what)).await?;
                }
            }
        }
    }

    /// The launch order for its shim.
    fn order(
        &self,
        environment: &EnvLease,
        container_spec: Option<&ContainerSpec>,
        user: Option<&JobUser>,
        lease_until: Option<Boot>,
        seating: Option<&Seating>,
    ) -> Result<Launch, Fault> {
        let denied = match container_spec {
            None => self.worker.gpus.nodes_of_others(&self.record.gpus),
            Some(_) => Vec::new(), // the engine gives it its own alone
        };
        let facts = Facts {
            replica: &self.record.replica,
            spec: &self.record.spec,
            dir: &self.dir,
            host: &self.worker.config.host,
            user,
            image: container_spec.map(|container_spec| &container_spec.image),
            log_quota: self.worker.config.keep.log_quota,
            path_entries: environment.path_entries(),
            environment: environment.vars(),
            tracking_uri: &self.worker.tracking.uri(),
            tracking_port: self.worker.tracking.port(),
            tracking_token: &self.record.token,
            experiment_id: &experiment_id(&self.record.spec.experiment),
            gpus: &self.record.gpus,
            denied: &denied,
            usual_memory: self.worker.job_memory,
            own_packages: self.worker.config.jobs.view,
            private: container_spec.is_none() && user.is_some() && self.worker.gives_tmp(),
            view: container_spec
                .is_none()
                .then(|| self.worker.views.of(&self.dir, environment, user))
                .flatten(),
            metadata: self.worker.config.jobs.metadata,
            lease_until,
            seating,
        };
        facts.launch()
    }

    /// Gives the container's user a home, and the job's files if it was not known earlier that the job runs in a
    /// container.
    async fn give_home(&self, user: Option<JobUser>) -> Result<(), Fault> {
        let known = containers::is_sure(&self.record.spec.environment);
        fetch::settle(&self.dir, user, !known).await.map_err(|error| faults::fetch(&error, false))
    }

    /// Starts it, as soon as its container is created and the node has the resources for a start.
    async fn start(&mut self, mut launch: Launch, container_spec: Option<&ContainerSpec>) -> Step<Running> {
        let usual = self.view.borrow().detail.clone();
        let (begun, mut backoff) = (Instant::now(), Backoff::default());
        loop {
            if let Some(container_spec) = container_spec {
                self.prepare(&mut launch, container_spec).await?;
            }
            self.until_helped().await?;
            let error = match self.worker.executor.launch(&self.dir, &launch, container_spec).await {
                Ok(running) => {
                    self.limit_told = launch.timeout;
                    return Continue(running);
                }
                Err(error) => error,
            };
            if let Some(running) = self.after_failed_start(&error, begun.elapsed(), &mut backoff).await? {
                return Continue(running);
            }
            self.say(&usual);
            launch.lease_until = self.leave_to_start().await?;
        }
    }

    /// The running command, if it runs although its start failed; `None` when the start may be tried again, because
    /// the command did not begin and the lack may be over.
    async fn after_failed_start(
        &mut self,
        error: &LaunchError,
        waited: Duration,
        backoff: &mut Backoff,
    ) -> Step<Option<Running>> {
        let patient = waited < LACK_PATIENCE;
        match error {
            // The container is gone, and the engine is unreachable.
            error if error.is_engine_away() => return Continue(None),
            // The shim found no room for its first files.
            LaunchError::Refused { .. } if self.worker.disk.room().is_err() => {
                self.admit().await?;
                return Continue(None);
            }
            error if faults::is_lack(error) && patient => {}
            error if faults::disk_fails(error) && waited < DISK_PATIENCE => {}
            // It must not be reported as failed while it may run.
            error if faults::is_unsure(error) => match self.recall().await? {
                None if patient => {} // its supervisor was killed before it was allowed to begin
                found => return or_end(found.map(Some).ok_or_else(|| faults::launch(error))),
            },
            error => return Break(End::Failed(faults::launch(error))),
        }
        let what = format!("for what the node lacks: {}", faults::launch(error));
        self.unless_stopped(self.wait(backoff, &what)).await?;
        Continue(None)
    }

    /// Creates the container. An unreachable engine is waited for, and the view shows it. This may take long, so the
    /// permission to start is checked again.
    async fn prepare(&mut self, launch: &mut Launch, container_spec: &ContainerSpec) -> Step<()> {
        let (usual, mut backoff) = (self.view.borrow().detail.clone(), Backoff::default());
        loop {
            let prepare = self.worker.executor.prepare(&self.dir, launch, container_spec);
            let error = match self.unless_stopped(prepare).await? {
                Ok(()) => break,
                Err(error) => error,
            };
            if !error.is_engine_away() && !matches!(error, LaunchError::Silent { .. }) {
                return Break(End::Failed(faults::launch(&error)));
            }
            let what = format!("for the container engine: {error}");
            self.unless_stopped(self.wait(&mut backoff, &what)).await?;
        }
        self.say(&usual);
        launch.lease_until = self.leave_to_start().await?;
        Continue(())
    }

    /// Waits until it has the GPUs it asked for, each of them empty, and journals which.
    async fn take_gpus(&mut self, detail: &str) -> Step<()> {
        let wanted = self.record.spec.resources.gpus;
        if wanted == 0 {
            return Continue(());
        }
        let mut changes = self.worker.gpus.changes();
        let gpus = loop {
            changes.mark_unchanged();
            let taken = self.worker.gpus.take(&self.record.replica, wanted);
            match self.unless_stopped(taken).await? {
                Ok(gpus) => break gpus,
                Err(wait) => self.say(&wait.to_string()),
            }
            let changed = tokio::time::timeout(GPUS_EVERY, changes.changed());
            let _ = self.unless_stopped(changed).await?;
        };
        self.record.gpus = gpus;
        let detail = format!("{detail}; on {}", self.record.gpus.join(", "));
        self.note(&detail).await
    }

    /// Waits for permission to start; returns the end of the lease. The lease of a job that may be replaced must be
    /// known, which it is not from an order to an earlier process of the daemon, and it must not be over: then the
    /// controller may have given the job to another node.
    pub(super) async fn leave_to_start(&mut self) -> Step<Option<Boot>> {
        let (policy, detail) = (self.record.spec.limits.on_disconnect, self.view.borrow().detail.clone());
        loop {
            let (until, go) = match &*self.desired.borrow_and_update() {
                Desired::Run { until, gang } => (*until, gang.as_ref().and_then(|gang| gang.go)),
                _ => return Break(End::Stopped),
            };
            if go.is_some_and(|go| go <= self.worker.clock.boot()) {
                return Break(End::Failed(self.late()));
            }
            let deadline = until.map_or(Deadline::found(policy), |until| Deadline::new(Some(until)));
            if let Some(notice) = self.worker.preemptions.notice() {
                return Break(End::Preempted(notice));
            }
            if !deadline.is_over(self.worker.clock.boot()) {
                self.say(&detail);
                self.record.leave = deadline.at();
                return Continue(deadline.at());
            }
            self.say("waiting for the controller to say until when it may run");
            let mut desired = self.desired.clone();
            if self.unless_stopped(desired.changed()).await?.is_err() {
                // There are no more orders: the daemon stops.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// What users see about an environment.
fn about(environment: &EnvLease) -> String {
    let built = |took| format!("built in {}", duration(took));
    let how = environment.took().map_or_else(|| "reused".to_owned(), built);
    format!("environment {} {how}", environment.key())
}
