//! `Nodes`: the calls of clients about nodes, the environments they keep, and the controller itself. Those about its
//! blobs are in `blobs`.
//!
//! Changes are logged with the caller's name; who may make them is in [`super::access`].

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::machine::EligibilityEvent;
use agent_model::node::Finding;
use agent_model::protocol::orders::EnvironmentWant;
use agent_model::words::count;
use agent_model::{Code, Fault, JobState, NodeId, ReplicaId, Timestamp};
use agent_proto::v1;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use tokio::time::{Instant, sleep_until};
use tonic::{Request, Response, Status};

use super::pages::Page;
use super::{Caller, Refusal, Services, invalid};
use crate::queue::{DeclaredLost, JobView, Judgement, NodeState, Unproved, Wish, WishState};
use crate::scheduler::used_by;
use crate::sessions::{Twice, describe};
use crate::store::Recovery;

/// How long a node may take to do something with one of its environments.
const ENVIRONMENT_WITHIN: Duration = Duration::from_secs(60);

/// The longest time before which an operator can say that a machine will be taken away.
const LONGEST_NOTICE: Duration = Duration::from_secs(7 * 24 * 3600);

/// The most characters of a reason.
const REASON: usize = 200;

/// A reason that somebody gave, as one line.
pub(super) fn words(reason: &str) -> String {
    reason.trim().chars().filter(|c| !c.is_control()).take(REASON).collect()
}

impl Services {
    async fn list_nodes(
        &self,
        request: &v1::ListNodesRequest,
        caller: &Caller,
    ) -> Result<v1::ListNodesResponse, Refusal> {
        let all = caller.is_operator().await;
        let nodes = self.queue.shown_nodes().await?;
        let jobs = self.queue.shown_jobs().await?;
        let queued = jobs.iter().filter(|view| view.job.state == JobState::Queued).count();
        let unproved: BTreeMap<String, v1::Notice> =
            nodes.iter().filter_map(|node| Some((node.record.id.to_string(), not_proved(node)?))).collect();
        let wire = nodes.into_iter().map(|node| self.node_with_use(node, &jobs));
        let wire = wire.map(|node| if all { node } else { without_digests(node) });
        let page = Page::after(&request.after, wire, |node| node.node.clone());
        let of_page = page.entries.iter().filter_map(|node| unproved.get(&node.node).cloned());
        let notices = self.notices().into_iter().chain(of_page).collect();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(v1::ListNodesResponse {
            nodes: page.entries,
            more: page.more,
            controller: Some(v1::Controller {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                started_ms: self.about.started_at.0,
                state_dir: self.about.state_dir.display().to_string(),
                queued: count(queued),
                running: count(jobs.len() - queued),
                pid: u64::from(std::process::id()),
                incarnation: self.store.incarnation().to_owned(),
                notices,
                store_bytes: self.collector.room().await.taken,
                store_limit_bytes: self.collector.limits().size,
                shutdown: self.shutdown(),
            }),
            uplink: None,
        })
    }

    /// When the machine is shut down; `None` where nothing does that.
    fn shutdown(&self) -> Option<v1::Shutdown> {
        let (plan, awake_until) = self.board.look()?;
        let now = self.gate.clock.now();
        let at = |at: Option<Timestamp>| at.map_or(0, |at| at.0);
        Some(v1::Shutdown {
            idle_since_ms: at(plan.idle_since),
            due_ms: at(plan.due),
            rule: plan.rule,
            kept_up_by: plan.kept_up_by,
            awake_until_ms: at(awake_until.filter(|until| *until > now)),
            running: plan.running,
            failed: plan.failed,
        })
    }

    /// Keeps the machine up for so long, or with 0 no longer.
    async fn keep_awake_for(&self, length: Duration, who: &str) -> Result<v1::Shutdown, Refusal> {
        if length > LONGEST_NOTICE {
            return Err(invalid("a machine can be kept up for seven days, no longer").into());
        }
        if self.board.look().is_none() {
            return Ok(v1::Shutdown::default()); // it stays up anyway
        }
        let until = (!length.is_zero()).then(|| self.gate.clock.now() + length);
        let board = self.board.clone();
        let written = agent_blocking::spawn_blocking(move || board.keep_awake(until)).await;
        written.map_err(std::io::Error::other).flatten().map_err(|error| {
            Fault::new(Code::ControllerStore, "the controller could not store the change").because(&error)
        })?;
        tracing::info!(who, ?length, "asked to keep the machine up");
        Ok(self.shutdown().unwrap_or_default())
    }

    /// The problems of the controller itself.
    fn notices(&self) -> Vec<v1::Notice> {
        let mut notices = Vec::new();
        if !self.store.has_room() {
            notices.push(v1::Notice {
                what: "the disk of the controller is full: new jobs are refused; those it has go on"
                    .to_owned(),
                fix: format!("make room on the disk that holds {}", self.about.state_dir.display()),
            });
        }
        let damaged = self.collector.disk().damaged();
        if damaged > 0 {
            notices.push(v1::Notice {
                what: format!(
                    "damage was found in the snapshot store: {} taken out of it",
                    count(damaged, "file")
                ),
                fix: "check the disk and the memory of this machine; jobs that lack a file say so".to_owned(),
            });
        }
        notices.extend(self.board.look().filter(|(plan, _)| !plan.failed.is_empty()).map(|(plan, _)| {
            v1::Notice {
                what: format!("the machine could not be shut down: {}", plan.failed),
                fix: "it is tried again; try the command of `shutdown_run` as the daemon's user".to_owned(),
            }
        }));
        notices.extend(self.tunnels_down());
        notices.extend(self.store.recovery().map(mended));
        notices.extend(self.store.moved().map(|what| v1::Notice {
            what: format!(
                "{what} while the controller had it open; it was written back, and nothing of it is lost"
            ),
            fix: "find out what touches files of the state directory: nobody else may".to_owned(),
        }));
        notices.extend(self.store.damage().map(|problem| v1::Notice {
            what: format!("damage was found in the controller's database ({problem}); jobs go on"),
            fix: "restart agentd, which rebuilds the database and loses no job that has not ended; check the disk"
                .to_owned(),
        }));
        notices.extend(self.gate.sessions.twice().iter().map(lives_twice));
        notices.extend(self.gate.sessions.refused().into_iter().map(|node| v1::Notice {
            what: format!("the node of this machine takes no jobs: a machine that joined has its name, `{node}`"),
            fix: format!(
                "give this one another `node_name` and restart agentd; or remove the other: agentctl node remove {node}"
            ),
        }));
        notices
    }

    async fn set_node_eligibility(
        &self,
        request: v1::SetEligibilityRequest,
        who: &str,
    ) -> Result<v1::Node, Refusal> {
        let id: NodeId = request.node.parse()?;
        let event = match request.want.as_str() {
            "drain" => EligibilityEvent::Drain,
            "cordon" => EligibilityEvent::Cordon,
            "uncordon" => EligibilityEvent::Uncordon,
            other => return Err(invalid(format!("`{other}` is not drain, cordon or uncordon")).into()),
        };
        let node = self.queue.set_eligibility(&id, event, who).await?.ok_or_else(|| unknown_node(&id))?;
        Ok(self.node_to_wire(node))
    }

    async fn preempt_node(&self, request: v1::PreemptRequest, who: &str) -> Result<v1::Node, Refusal> {
        let id: NodeId = request.node.parse()?;
        let after = Duration::from_millis(request.in_ms);
        if after > LONGEST_NOTICE {
            return Err(invalid("a machine can be said to go within seven days, no later").into());
        }
        let reason = match words(&request.reason) {
            none if none.is_empty() => format!("{who} says so"),
            reason => reason,
        };
        let said = (!request.withdraw).then_some((after, reason));
        let node = self.queue.preempt(&id, said, who).await?.ok_or_else(|| unknown_node(&id))?;
        Ok(self.node_to_wire(node))
    }

    /// A node for the wire, with what its jobs count for.
    fn node_with_use(&self, node: NodeState, jobs: &[JobView]) -> v1::Node {
        let here = jobs.iter().filter(|view| node.jobs.contains(&view.job.id));
        let asked = here.map(|view| &view.job.spec.resources);
        let (cpus_used, memory_used_bytes) = used_by(&node.record.inventory, asked);
        v1::Node { cpus_used, memory_used_bytes, ..self.node_to_wire(node) }
    }

    /// A node for the wire, with the labels of its token and the error of its clock.
    fn node_to_wire(&self, node: NodeState) -> v1::Node {
        let id = node.record.id.clone();
        let mut wire = to_wire(node, self.gate.clock.now());
        wire.tunnel = self.tunnel_of(&id);
        wire.labels = self.gate.registry.labels(&id).into_iter().collect();
        if let (Some(ahead), Some(inventory)) = (self.gate.sessions.skew(&id), &mut wire.inventory) {
            inventory.findings.push(clock_off(ahead).into());
        }
        if let (Some(faults), Some(inventory)) = (self.source_faults(&id), &mut wire.inventory) {
            inventory.findings.push(faults.into());
        }
        wire
    }

    async fn judge(&self, asked: v1::JudgeReplicaRequest, who: &str) -> Result<(), Refusal> {
        let (node, replica): (NodeId, ReplicaId) = (asked.node.parse()?, asked.replica.parse()?);
        let judgement = if asked.adopt { Judgement::Adopt } else { Judgement::End };
        match self.queue.judge(&node, &replica, judgement, who).await? {
            true => Ok(()),
            false => {
                let what = format!("{node} holds no `{replica}` about which that could be decided");
                Err(Fault::new(Code::NotKnownHere, what)
                    .why("only what a node cannot prove that it was given is adopted or ended by name")
                    .why("what contradicts the records can be ended, and not adopted")
                    .fix("see what there is: agentctl status")
                    .into())
            }
        }
    }

    async fn declare_node_lost(&self, id: &NodeId, who: &str) -> Result<Vec<String>, Refusal> {
        match self.queue.declare_lost(id, who).await? {
            DeclaredLost::Done(jobs) => Ok(jobs.into_iter().map(String::from).collect()),
            DeclaredLost::Unknown => Err(unknown_node(id).into()),
            DeclaredLost::Answers => {
                Err(Fault::new(Code::NodeAnswers, format!("{id} answers: it is not lost"))
                    .why("what runs there would go on while it starts elsewhere")
                    .fix(format!("to let it run empty: agentctl drain {id}"))
                    .into())
            }
        }
    }
}

impl Services {
    async fn manage(
        &self,
        request: v1::ManageEnvironmentRequest,
        who: &str,
        within: Duration,
    ) -> Result<v1::ManageEnvironmentResponse, Refusal> {
        let want = EnvironmentWant::parse(&request.want)
            .ok_or_else(|| invalid(format!("`{}` is not remove, pin or unpin", request.want)))?;
        let wish = Wish { node: request.node.parse()?, key: request.environment, want };
        let (before, mut state) = self.queue.wish(wish.clone(), who).await?;
        let end = Instant::now() + within;
        loop {
            let now = state.borrow_and_update().clone();
            match now {
                WishState::NoNode => return Err(unknown_node(&wish.node).into()),
                WishState::NoEnvironment { has } => return Err(unknown_environment(&wish, &has).into()),
                WishState::InUse { jobs } => return Err(in_use(&wish, &jobs).into()),
                WishState::Done(after) => {
                    let environment = after.or(before).map(Into::into);
                    return Ok(v1::ManageEnvironmentResponse { environment });
                }
                WishState::Open { connected, uses } => tokio::select! {
                    changed = state.changed() => changed.map_err(|_| Refusal::Stopping)?,
                    () = sleep_until(end) => return Err(not_done(&wish, connected, uses, within).into()),
                },
            }
        }
    }
}

fn unknown_environment(wish: &Wish, has: &[String]) -> Fault {
    let Wish { node, key, .. } = wish;
    let why = match has {
        [] => format!("{node} keeps no environment at all"),
        has => format!("{node} keeps {}", has.join(", ")),
    };
    Fault::new(Code::EnvUnknown, format!("{node} keeps no environment `{key}`"))
        .why(why)
        .fix("list them with `agentctl envs list`")
}

fn in_use(wish: &Wish, jobs: &[agent_model::JobId]) -> Fault {
    let names: Vec<&str> = jobs.iter().map(agent_model::JobId::as_str).collect();
    Fault::new(Code::EnvInUse, format!("the environment `{}` of {} is in use", wish.key, wish.node))
        .why(format!("by {}", names.join(", ")))
        .fix(format!("wait until they have ended, or end them: agentctl cancel {}", names.join(" ")))
}

/// The node did not do it in time, and the wish is withdrawn.
fn not_done(wish: &Wish, connected: bool, uses: u32, within: Duration) -> Fault {
    let Wish { node, key, want } = wish;
    let what = format!("{node} did not {} `{key}` within {} s", want.name(), within.as_secs());
    if uses > 0 && *want == EnvironmentWant::Remove {
        return Fault::new(Code::EnvInUse, what)
            .why(format!("{uses} of its jobs hold the environment, or something else on that machine does"))
            .fix("see with `agentctl jobs --active` what runs there, and try again");
    }
    let fault = Fault::new(Code::NodeLost, what);
    match connected {
        true => fault
            .why("it is connected, and its list of environments still shows it as before")
            .fix(format!("look at the log of agentd on {node}, and try again")),
        false => fault.why("it is not connected").fix("see with `agentctl nodes` when it is, and try again"),
    }
}

/// A node as it is shown to whoever is no operator: with a digest he could read what is in the environments of others.
fn without_digests(mut node: v1::Node) -> v1::Node {
    for environment in node.inventory.iter_mut().flat_map(|inventory| &mut inventory.environments) {
        (environment.lock, environment.log) = (String::new(), String::new());
    }
    node
}

pub(super) fn unknown_node(id: &NodeId) -> Fault {
    Fault::new(Code::NodeUnknown, format!("there is no machine `{id}`"))
        .fix("list them with `agentctl nodes`")
}

/// What happened to the database, as text for users.
fn mended(recovery: &Recovery) -> v1::Notice {
    let Some(kept) = &recovery.kept else {
        return v1::Notice {
            what: format!(
                "the controller's database was behind: {}; brought up to date: {}",
                recovery.problem,
                count(recovery.copied as u64, "job")
            ),
            fix: "nothing, if you restored it from a backup; otherwise check the disk".to_owned(),
        };
    };
    let mut what = format!(
        "the controller's database was damaged ({}) and rebuilt: {} from what could be read, {} from its \
         second copy",
        recovery.problem,
        count(recovery.rows as u64, "job"),
        recovery.copied
    );
    if recovery.bad > 0 {
        what.push_str(&format!(", {} unreadable", count(recovery.bad as u64, "row")));
    }
    if !recovery.lost.is_empty() {
        what.push_str(&format!("; lost but for the name: {}", recovery.lost.join(", ")));
    }
    v1::Notice {
        what,
        fix: format!("check the disk; remove {} when nobody needs it any more", kept.display()),
    }
}

/// A wrong clock does no harm to leases, which count elapsed time; but users and certificates depend on it.
fn clock_off(ahead: i64) -> Finding {
    let by = (ahead.unsigned_abs() + 500) / 1000;
    let by = if by < 180 { format!("{by} s") } else { format!("{} min", (by + 30) / 60) };
    let side = if ahead > 0 { "ahead of" } else { "behind" };
    Finding::limited(
        "clock",
        format!("{by} {side} the controller's"),
        "times in logs do not match; more than an hour, and the machine cannot join again",
        "set the clocks of both by NTP: `sudo timedatectl set-ntp true`",
    )
}

/// What a node holds and cannot prove that it was given.
fn not_proved(node: &NodeState) -> Option<v1::Notice> {
    const SHOWN: usize = 5;
    let first = node.unproved.first()?;
    let told = |one: &Unproved| format!("`{}`: {}", one.replica, one.why);
    let shown: Vec<String> = node.unproved.iter().take(SHOWN).map(told).collect();
    let more = match node.unproved.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let (id, replica) = (&node.record.id, &first.replica);
    Some(v1::Notice {
        what: format!(
            "{id} runs what this controller never gave it, as far as can be told; it goes on and takes room there: \
             {}{more}",
            shown.join("; ")
        ),
        fix: format!(
            "agentctl node end {id} {replica}; or, if you know what it is: agentctl node adopt {id} {replica}"
        ),
    })
}

fn lives_twice(twice: &Twice) -> v1::Notice {
    let Twice { node, first, second, .. } = twice;
    v1::Notice {
        what: format!(
            "two machines live as `{node}`: {} has its place, and {} is kept out",
            describe(first),
            describe(second)
        ),
        fix: "one is a copy of the other: on the copy, `agentd leave`, then join with a token of its own"
            .to_owned(),
    }
}

fn to_wire(node: NodeState, now: Timestamp) -> v1::Node {
    v1::Node {
        labels: Default::default(),
        tunnel: None,
        node: node.record.id.to_string(),
        liveness: node.record.liveness.name().to_owned(),
        eligibility: node.record.eligibility.name().to_owned(),
        last_seen_ms: node.record.last_seen.0,
        inventory: Some(node.record.inventory.into()),
        load: Some(node.load.into()),
        cpus_used: 0,
        memory_used_bytes: 0,
        slots_used: u32::try_from(node.jobs.len()).unwrap_or(u32::MAX),
        preemption: node
            .record
            .preemption
            .notice()
            .map(|notice| v1::Preemption { deadline_ms: notice.deadline.0, reason: notice.reason.clone() }),
        held_back: node
            .record
            .breaker
            .hold(now)
            .map(|hold| v1::HeldBack { until_ms: hold.until().0, reason: hold.why.clone() }),
    }
}

#[tonic::async_trait]
impl v1::nodes_server::Nodes for Services {
    async fn list(
        &self,
        request: Request<v1::ListNodesRequest>,
    ) -> Result<Response<v1::ListNodesResponse>, Status> {
        Ok(Response::new(self.list_nodes(request.get_ref(), &Caller::of(&request)?).await?))
    }

    async fn keep_awake(
        &self,
        request: Request<v1::KeepAwakeRequest>,
    ) -> Result<Response<v1::Shutdown>, Status> {
        let who = Caller::of(&request)?.to_string();
        let length = Duration::from_millis(request.into_inner().for_ms);
        Ok(Response::new(self.keep_awake_for(length, &who).await?))
    }

    async fn preempt(&self, request: Request<v1::PreemptRequest>) -> Result<Response<v1::Node>, Status> {
        let caller = Caller::of(&request)?;
        caller.concerns(format!("node {}", request.get_ref().node));
        let who = caller.to_string();
        Ok(Response::new(self.preempt_node(request.into_inner(), &who).await?))
    }

    async fn judge_replica(
        &self,
        request: Request<v1::JudgeReplicaRequest>,
    ) -> Result<Response<v1::JudgeReplicaResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let word = if asked.adopt { "adopt" } else { "end" };
        caller.concerns(format!("node {}: {word} {}", asked.node, asked.replica));
        self.judge(asked, &caller.to_string()).await?;
        Ok(Response::new(v1::JudgeReplicaResponse {}))
    }

    async fn set_eligibility(
        &self,
        request: Request<v1::SetEligibilityRequest>,
    ) -> Result<Response<v1::Node>, Status> {
        let caller = Caller::of(&request)?;
        caller.concerns(format!("node {}: {}", request.get_ref().node, request.get_ref().want));
        Ok(Response::new(self.set_node_eligibility(request.into_inner(), &caller.to_string()).await?))
    }

    type CheckBlobsStream = BoxStream<'static, Result<v1::CheckBlobsResponse, Status>>;

    type StoreOutputsStream = BoxStream<'static, Result<v1::StoreOutputsResponse, Status>>;

    async fn store_outputs(
        &self,
        request: Request<v1::StoreOutputsRequest>,
    ) -> Result<Response<Self::StoreOutputsStream>, Status> {
        let (caller, services) = (Caller::of(&request)?, self.clone());
        let stored =
            async move { Ok(Services::store_outputs(&services, request.into_inner(), &caller).await?) };
        Ok(Response::new(stream::once(stored).boxed()))
    }

    async fn collect_blobs(
        &self,
        request: Request<v1::CollectBlobsRequest>,
    ) -> Result<Response<v1::CollectBlobsResponse>, Status> {
        let who = Caller::of(&request)?.to_string();
        Ok(Response::new(self.collect(request.into_inner(), &who).await?))
    }

    async fn check_blobs(
        &self,
        request: Request<v1::CheckBlobsRequest>,
    ) -> Result<Response<Self::CheckBlobsStream>, Status> {
        let who = Caller::of(&request)?.to_string();
        Ok(Response::new(self.check(&who)))
    }

    async fn get_tunnel_key(
        &self,
        _: Request<v1::GetTunnelKeyRequest>,
    ) -> Result<Response<v1::GetTunnelKeyResponse>, Status> {
        Ok(Response::new(v1::GetTunnelKeyResponse { public_key: self.tunnel_key().await? }))
    }

    async fn keep_tunnel(
        &self,
        request: Request<v1::KeepTunnelRequest>,
    ) -> Result<Response<v1::KeepTunnelResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        caller.concerns(format!("node {}: {}@{}:{}", asked.node, asked.user, asked.host, asked.port));
        Services::keep_tunnel(self, asked).await?;
        Ok(Response::new(v1::KeepTunnelResponse {}))
    }

    async fn drop_tunnel(
        &self,
        request: Request<v1::DropTunnelRequest>,
    ) -> Result<Response<v1::DropTunnelResponse>, Status> {
        let caller = Caller::of(&request)?;
        let node: NodeId = request.into_inner().node.parse().map_err(Refusal::from)?;
        caller.concerns(format!("node {node}"));
        self.members.drop_tunnel(&node).await?;
        Ok(Response::new(v1::DropTunnelResponse {}))
    }

    async fn declare_lost(
        &self,
        request: Request<v1::DeclareLostRequest>,
    ) -> Result<Response<v1::DeclareLostResponse>, Status> {
        let caller = Caller::of(&request)?;
        caller.concerns(format!("node {}", request.get_ref().node));
        let id: NodeId = request.into_inner().node.parse().map_err(Refusal::from)?;
        let jobs = self.declare_node_lost(&id, &caller.to_string()).await?;
        Ok(Response::new(v1::DeclareLostResponse { jobs }))
    }

    async fn manage_environment(
        &self,
        request: Request<v1::ManageEnvironmentRequest>,
    ) -> Result<Response<v1::ManageEnvironmentResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.get_ref();
        caller.concerns(format!("node {}: {} {}", asked.node, asked.want, asked.environment));
        Ok(Response::new(self.manage(request.into_inner(), &caller.to_string(), ENVIRONMENT_WITHIN).await?))
    }
}
