//! `Worker`: the calls of nodes to their controller.
//!
//! Sync is one stream per node; the stream with the most recent first report speaks for it, an older one ends. An
//! outcome is accepted only when every log it names has arrived, complete and with the right content, and so have its
//! outputs. A log that it does not name is accepted as it is, even if the disk fails.

use std::pin::Pin;
use std::sync::Arc;

use agent_model::machine::Eligibility;
use agent_model::protocol::orders::{EnvironmentWant, Obeyed};
use agent_model::{
    Boot, Channel, Clock, Code, Digest, Fault, NodeId, Outcome, Preemption, Principal, ReplicaId,
    ReplicaStep, Retry, Timestamp,
};
use agent_proto::v1;
use futures_util::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status, Streaming};

use super::grants::Grants;
use super::inside::ServeStream;
use super::nodes::words;
use super::{Caller, Refusal, Services, invalid};
use crate::archive::{Archive, ArchiveError};
use crate::lease::{Desired, Order, Orders};
use crate::pins;
use crate::queue::{Held, OrdersReceiver, Queue, Report, Standing};
use crate::registry::Registry;
use crate::sessions::{Process, Sessions, Speaker};

/// One Sync stream.
struct Session {
    reports: Streaming<v1::NodeReport>,
    queue: Queue,
    lease: prost_types::Duration,
    /// Set by the first report: the number of the link, and for which node.
    link: Option<(u64, NodeId, OrdersReceiver)>,
    caller: Caller,
    sessions: Sessions,
    registry: Registry,
    grants: Grants,
    clock: Arc<dyn Clock>,
    /// Set with the link.
    speaker: Option<Speaker>,
}

impl Session {
    /// The next orders for the node; `None` when the stream is over.
    async fn next(&mut self) -> Result<Option<v1::NodeOrders>, Status> {
        loop {
            let orders = async {
                match &mut self.link {
                    Some((.., orders)) => orders.changed().await.map(|()| orders.borrow_and_update().clone()),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                report = self.reports.message() => match report? {
                    Some(report) => self.hear(report).await?,
                    None => return Ok(None),
                },
                orders = orders => match orders {
                    Ok(orders) => return Ok(Some(self.to_wire(&orders))),
                    Err(_) => return Err(superseded()),
                },
                lost = self.caller.until_lost() => return Err(lost),
                () = self.queue.closed() => return Err(Refusal::Stopping.into()),
            }
        }
    }

    async fn hear(&mut self, report: v1::NodeReport) -> Result<(), Status> {
        self.caller.still()?;
        let clock = Timestamp(report.clock_ms);
        let process = Process {
            session: report.session.clone(),
            boot_id: report.boot_id.clone(),
            from: self.caller.from().to_owned(),
        };
        let mut report = self.read(report)?;
        self.caller.speaks_for(&report.node).inspect_err(|_| {
            if report.own {
                self.sessions.refuse_own(&report.node);
            }
        })?;
        if let Some(inventory) = &mut report.inventory {
            // The labels of the token override those that the node reports itself.
            inventory.labels.extend(self.registry.labels(&report.node));
        }
        if self.speaker.is_none() {
            // The kernel identifies processes of this machine: there is no copy among them.
            self.speaker = Some(match self.caller.who() {
                Principal::Node { .. } => {
                    self.sessions.speak(&report.node, process).await.map_err(Refusal::from)?
                }
                Principal::Local { .. } | Principal::User { .. } => self.sessions.take(&report.node, process),
            });
        }
        self.speaker.iter().for_each(|speaker| speaker.heard(clock, self.clock.now()));
        match &self.link {
            None => {
                let node = report.node.clone();
                let (link, orders) = self.queue.link(report).await.map_err(Refusal::from)?;
                self.link = Some((link, node, orders));
            }
            Some((link, ..)) => {
                if !self.queue.report(*link, report).await.map_err(Refusal::from)? {
                    return Err(superseded());
                }
            }
        }
        Ok(())
    }

    fn read(&self, wire: v1::NodeReport) -> Result<Report, Refusal> {
        let node: NodeId = wire.node.parse()?;
        let held = |wire| held(wire, &node, &self.grants);
        Ok(Report {
            replicas: wire.replicas.into_iter().map(held).collect::<Result<_, _>>()?,
            own: matches!(self.caller.who(), Principal::Local { .. }),
            boot_id: wire.boot_id,
            sent: Boot::from_millis(wire.sent_ms),
            obeyed: (wire.obeyed_controller_epoch != 0).then(|| Obeyed {
                controller_epoch: wire.obeyed_controller_epoch,
                answers: Boot::from_millis(wire.obeyed_ms),
            }),
            inventory: wire.inventory.map(TryInto::try_into).transpose()?,
            load: wire.load.unwrap_or_default().into(),
            preemption: wire.preemption.map(|notice| Preemption {
                until: Boot::from_millis(notice.until_ms),
                deadline: Timestamp::default(), // as the controller's own clock says
                reason: words(&notice.reason),
            }),
            node,
        })
    }

    fn to_wire(&self, orders: &Orders) -> v1::NodeOrders {
        let environment = |(key, want): &(String, EnvironmentWant)| v1::EnvironmentOrder {
            key: key.clone(),
            want: want.name().to_owned(),
        };
        let answers_ms = orders.answers.millis();
        v1::NodeOrders {
            lease: Some(self.lease),
            answers_ms,
            revision: orders.revision,
            controller_epoch: orders.controller_epoch,
            orders: orders.list.iter().map(|order| self.order(order)).collect(),
            environments: orders.environments.iter().map(environment).collect(),
            outputs: orders.outputs.iter().map(ReplicaId::to_string).collect(),
            running_outputs: orders.running_outputs.iter().map(ReplicaId::to_string).collect(),
            discard: orders.discard.iter().map(ReplicaId::to_string).collect(),
            preemption: orders
                .preemption
                .clone()
                .map(|(until, reason)| v1::PreemptionNotice { until_ms: until.millis(), reason }),
            eligibility: orders.eligibility.map(Eligibility::name).unwrap_or_default().to_owned(),
        }
    }

    fn order(&self, order: &Order) -> v1::Order {
        use v1::order::Desired as Wire;
        let desired = match &order.desired {
            Desired::Run { spec, until, gang, placed } => {
                let node = self.link.as_ref().map(|(_, node, _)| node);
                let given = node.zip(placed.as_ref());
                let given = given.map(|(node, placed)| self.grants.give(node, &order.replica, spec, placed));
                let (document, grant) = given.unzip();
                Wire::Run(v1::RunOrder {
                    spec: Some(spec.clone().into()),
                    // 0 means no limit; no lease ends at 0.
                    until_ms: until.map_or(0, Boot::millis),
                    gang: gang.clone().map(Into::into),
                    document: document.unwrap_or_default(),
                    grant,
                })
            }
            Desired::Describe => Wire::Describe(v1::DescribeOrder {}),
            Desired::Stop { grace, reason } => {
                Wire::Stop(v1::StopOrder { grace: Some(duration(*grace)), reason: reason.clone() })
            }
            Desired::Forget => Wire::Forget(v1::ForgetOrder {}),
        };
        v1::Order { replica: order.replica.to_string(), desired: Some(desired) }
    }
}

fn superseded() -> Status {
    Status::aborted("a newer stream speaks for this node")
}

fn held(wire: v1::HeldReplica, node: &NodeId, grants: &Grants) -> Result<Held, Refusal> {
    let step = ReplicaStep::ALL.into_iter().find(|step| step.to_string() == wire.step);
    let replica: ReplicaId = wire.replica.parse()?;
    Ok(Held {
        step: step.ok_or_else(|| invalid(format!("`{}` is not a step", wire.step)))?,
        described: grants.check(node, &replica, &wire),
        replica,
        detail: wire.detail,
        alive: wire.alive,
        started_at: (wire.started_ms != 0).then_some(Timestamp(wire.started_ms)),
        ready: wire.ready.map(TryInto::try_into).transpose()?,
        preempted: wire.preempted,
    })
}

fn duration(duration: std::time::Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or(prost_types::Duration { seconds: i64::MAX, nanos: 0 })
}

impl Services {
    async fn take_outcome(&self, request: v1::ReportOutcomeRequest) -> Result<(), Status> {
        let replica: ReplicaId = request.replica.parse().map_err(Refusal::from)?;
        let node: NodeId = request.node.parse().map_err(Refusal::from)?;
        let wire = request.outcome.ok_or_else(|| Refusal::from(invalid("`outcome` is missing")))?;
        let mut outcome = Outcome::try_from(wire).map_err(Refusal::from)?;
        let standing = self.queue.standing(&replica, &node).await.map_err(Refusal::from)?;
        let standing = if standing == Standing::Open {
            outcome.tracking = self.require_complete(&replica, &outcome).await?;
            Box::pin(self.observe(&replica, true)).await.map_err(Status::from)?;
            self.observer.forget(&replica);
            // From here until the outcome is on disk nothing that it names is removed.
            let relied = self.collector.rely_on(pins::of_outcome(&outcome)).await;
            self.require_outputs(&outcome).await?;
            let found = self.find_named(&replica, &outcome, &relied).await?;
            self.queue.settle(&replica, &node, outcome, found).await.map_err(Refusal::from)?
        } else {
            standing
        };
        match standing {
            Standing::Open | Standing::Settled => Ok(()),
            Standing::Fenced => Err(Refusal::from(fenced(&replica)).into()),
            Standing::Ahead => Err(Refusal::Unheard.into()),
            Standing::Unknown => Ok(self.confirm_ended(&replica).await?),
        }
    }

    /// A repeated delivery of the outcome that ended a job is accepted; any other is not of the present attempt.
    async fn confirm_ended(&self, replica: &ReplicaId) -> Result<(), Refusal> {
        // Every replica belongs to a job: the record is lost, and the node is being asked for it.
        let job = self.store.job(&replica.job).await?.ok_or(Refusal::Unheard)?;
        let known = job.epoch == replica.epoch && job.replicas.iter().any(|known| known.rank == replica.rank);
        if known { Ok(()) } else { Err(fenced(replica).into()) }
    }

    /// Checks that the logs and records that the outcome names have arrived; what the records are. A log with wrong
    /// content is set aside.
    async fn require_complete(
        &self,
        replica: &ReplicaId,
        outcome: &Outcome,
    ) -> Result<Option<Box<Digest>>, Status> {
        for stream in agent_model::Stream::ALL {
            if outcome.streams.iter().all(|end| end.stream != stream) {
                let settled = match self.archive.log_file(replica, Channel::Log(stream)).await {
                    Ok(log_file) => Archive::blocking(move || log_file.settle_for_what_there_is()).await,
                    Err(error) => Err(error),
                };
                if let Err(error) = settled {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(%replica, %stream, error, "cannot force log to disk");
                }
            }
        }
        for end in &outcome.streams {
            let log_file = self.archive.log_file(replica, Channel::Log(end.stream)).await.map_err(not_now)?;
            let expected = end.digest;
            if log_file.len() < expected.size {
                return Err(incomplete(&format!("{} log", end.stream), log_file.len(), expected.size));
            }
            let found = self.archive.conclude(log_file, expected).await.map_err(not_now)?;
            if found != expected {
                tracing::warn!(%replica, stream = %end.stream, %found, %expected, "found wrong bytes in stored log");
                return Err(incomplete(&format!("{} log", end.stream), 0, expected.size));
            }
        }
        if outcome.tracking_bytes == 0 {
            return Ok(None);
        }
        let log_file = self.archive.log_file(replica, Channel::Tracking).await.map_err(not_now)?;
        if log_file.len() < outcome.tracking_bytes {
            return Err(incomplete("tracking records", log_file.len(), outcome.tracking_bytes));
        }
        let digest = Archive::blocking(move || log_file.sync().and_then(|_| log_file.digest()));
        Ok(Some(Box::new(digest.await.map_err(not_now)?)))
    }

    /// Checks that every file of the outputs has arrived. A node that was away for long sends them again.
    pub(super) async fn require_outputs(&self, outcome: &Outcome) -> Result<(), Status> {
        let roots: Vec<_> = outcome.artifacts.iter().map(|artifacts| artifacts.root).collect();
        let missing =
            self.first_missing(&roots).await.map_err(|error| Refusal::from(super::unsearched(&error)))?;
        match missing {
            None => Ok(()),
            Some(blob) => Err(not_yet(
                Fault::new(Code::SnapshotMissing, "the outputs are not here, or not all of them")
                    .why(format!("`{blob}` is not in the store")),
            )),
        }
    }
}

fn fenced(replica: &ReplicaId) -> Fault {
    Fault::new(Code::Fenced, format!("`{replica}` is not the present attempt of its job"))
}

fn incomplete(what: &str, stored: u64, expected: u64) -> Status {
    not_yet(
        Fault::new(Code::RequestInvalid, format!("the {what} of the replica are not complete yet"))
            .why(format!("{stored} of {expected} bytes are stored")),
    )
}

/// A log or the records cannot be read or forced to the disk. The node tries again, and then goes on without.
fn not_now(error: ArchiveError) -> Status {
    let fault =
        Fault::new(Code::ControllerStore, "the logs of the replica cannot be made safe").because(&error);
    not_yet(fault)
}

/// An outcome that arrived too early: to be delivered again when the rest has arrived.
pub(super) fn not_yet(fault: Fault) -> Status {
    let status = agent_proto::status(&fault.with_retry(Retry::SameNode));
    Status::with_details(tonic::Code::FailedPrecondition, status.message(), status.details().to_vec().into())
}

#[tonic::async_trait]
impl v1::worker_server::Worker for Services {
    type SyncStream = Pin<Box<dyn Stream<Item = Result<v1::NodeOrders, Status>> + Send>>;

    async fn sync(
        &self,
        request: Request<Streaming<v1::NodeReport>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        let session = Session {
            caller: Caller::of(&request)?,
            sessions: self.gate.sessions.clone(),
            registry: self.gate.registry.clone(),
            grants: self.grants.clone(),
            clock: Arc::clone(&self.gate.clock),
            speaker: None,
            reports: request.into_inner(),
            queue: self.queue.clone(),
            lease: duration(self.lease),
            link: None,
        };
        let orders = stream::try_unfold(session, |mut session| async move {
            Ok(session.next().await?.map(|orders| (orders, session)))
        });
        Ok(Response::new(orders.boxed()))
    }

    type ServeSessionStream = ServeStream;

    async fn serve_session(
        &self,
        request: Request<Streaming<v1::SessionOutput>>,
    ) -> Result<Response<ServeStream>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.offer_session(caller, request.into_inner()).await?))
    }

    async fn report_outcome(
        &self,
        request: Request<v1::ReportOutcomeRequest>,
    ) -> Result<Response<v1::ReportOutcomeResponse>, Status> {
        Caller::speaking(&request, &request.get_ref().node)?;
        self.take_outcome(request.into_inner()).await?;
        Ok(Response::new(v1::ReportOutcomeResponse {}))
    }

    async fn report_outputs(
        &self,
        request: Request<v1::ReportOutputsRequest>,
    ) -> Result<Response<v1::ReportOutputsResponse>, Status> {
        Caller::speaking(&request, &request.get_ref().node)?;
        self.take_outputs(request.into_inner()).await?;
        Ok(Response::new(v1::ReportOutputsResponse {}))
    }

    async fn read_secrets(
        &self,
        request: Request<v1::ReadSecretsRequest>,
    ) -> Result<Response<v1::ReadSecretsResponse>, Status> {
        Caller::speaking(&request, &request.get_ref().node)?;
        Ok(Response::new(self.secrets_of(request.into_inner()).await?))
    }

    async fn find_peer(
        &self,
        request: Request<v1::FindPeerRequest>,
    ) -> Result<Response<v1::FindPeerResponse>, Status> {
        Caller::speaking(&request, &request.get_ref().node)?;
        Ok(Response::new(self.find_source(request.get_ref())?))
    }

    async fn admit_peer(
        &self,
        request: Request<v1::AdmitPeerRequest>,
    ) -> Result<Response<v1::AdmitPeerResponse>, Status> {
        Caller::speaking(&request, &request.get_ref().node)?;
        self.admit_peer_of(request.get_ref())?;
        Ok(Response::new(v1::AdmitPeerResponse {}))
    }
}
