//! Who may call what.
//!
//! Owns the one table of rules, a line for each call of every service: a call without a rule does not exist. The layer
//! [`guard`] stands before all services; it lets a call through with its [`Caller`], or answers itself. What belongs to
//! a job asks further: [`Services::owned`] gives a job to its owner and to operators alone.
//!
//! Who is there says the transport ([`Peer`]), never the caller.

use std::fmt;
use std::sync::Arc;

use agent_model::{Code, Fault, JobId, Principal};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use tonic::Status;

use super::{Refusal, Services};
use crate::queue::JobView;
use crate::store::JobRecord;

/// What a transport knows of whoever connected; every connection to the controller has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer(pub Option<Principal>);

/// Who may do what concerns everybody: root, the controller's own user, and whoever the machine says.
#[derive(Clone)]
pub struct Operators {
    own: u32,
    others: Arc<dyn Fn(&Principal) -> bool + Send + Sync>,
}

impl Operators {
    /// `own` is the user of this process. `others` is asked about everybody else, and may block.
    pub fn new(own: u32, others: impl Fn(&Principal) -> bool + Send + Sync + 'static) -> Operators {
        Operators { own, others: Arc::new(others) }
    }

    /// The controller's own processes: its nodes on this machine.
    fn are_own(&self, who: &Principal) -> bool {
        matches!(who, Principal::Local { uid } if *uid == 0 || *uid == self.own)
    }

    async fn have(&self, who: &Principal) -> bool {
        if self.are_own(who) {
            return true;
        }
        let (others, who) = (Arc::clone(&self.others), who.clone());
        // A lookup that panics makes nobody an operator.
        tokio::task::spawn_blocking(move || others(&who)).await.unwrap_or(false)
    }
}

impl fmt::Debug for Operators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operators").field("own", &self.own).finish_non_exhaustive()
    }
}

/// Who may make a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// Everybody who is somebody.
    Anyone,
    /// Whoever owns the job it names, and operators: its handler asks.
    Owner,
    /// Operators.
    Operator,
    /// Nodes.
    Node,
}

const JOBS: &[(&str, Rule)] = &[
    ("Submit", Rule::Anyone),
    ("Get", Rule::Owner),
    ("List", Rule::Anyone), // of others' jobs it hides what is private
    ("Watch", Rule::Owner),
    ("Cancel", Rule::Owner),
    ("History", Rule::Owner),
];

const NODES: &[(&str, Rule)] = &[
    ("List", Rule::Anyone),
    ("SetEligibility", Rule::Operator),
    ("DeclareLost", Rule::Operator),
    ("ManageEnvironment", Rule::Operator),
    ("StoreOutputs", Rule::Owner),
    ("CollectBlobs", Rule::Operator),
    ("CheckBlobs", Rule::Operator),
];

const TELEMETRY: &[(&str, Rule)] =
    &[("Append", Rule::Node), ("ReadLog", Rule::Owner), ("ReadTracking", Rule::Owner)];

const WORKER: &[(&str, Rule)] =
    &[("Sync", Rule::Node), ("ReportOutcome", Rule::Node), ("ReportOutputs", Rule::Node)];

/// A blob is had by its digest, which nobody can guess: who knows it was told, or has the content.
const BLOBS: [&str; 4] = [
    "build.bazel.remote.execution.v2.Capabilities",
    "build.bazel.remote.execution.v2.ContentAddressableStorage",
    "build.bazel.remote.execution.v2.ActionCache",
    "google.bytestream.ByteStream",
];

/// The rule of a call, by its path `/service/method`.
pub(super) fn rule(path: &str) -> Option<Rule> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    let methods = match service {
        "agent.v1.Jobs" => JOBS,
        "agent.v1.Nodes" => NODES,
        "agent.v1.Telemetry" => TELEMETRY,
        "agent.v1.Worker" => WORKER,
        blobs if BLOBS.contains(&blobs) => return Some(Rule::Anyone),
        _ => return None,
    };
    methods.iter().find(|(name, _)| *name == method).map(|(_, rule)| *rule)
}

/// Whoever makes a call that its rule allows.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    who: Principal,
    operators: Operators,
}

impl Caller {
    /// The caller of a request that came through [`guard`].
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Result<Caller, Refusal> {
        let caller = request.extensions().get::<Caller>().cloned();
        caller.ok_or_else(|| Fault::new(Code::Bug, "a call passed nobody who looked at its caller").into())
    }

    pub(super) fn who(&self) -> &Principal {
        &self.who
    }

    pub(super) fn owns(&self, job: &JobRecord) -> bool {
        job.owner.as_ref() == Some(&self.who)
    }

    pub(super) async fn is_operator(&self) -> bool {
        self.operators.have(&self.who).await
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.who.fmt(f)
    }
}

/// Stands before every service.
pub(super) async fn guard(State(operators): State<Operators>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>().and_then(|peer| peer.0.clone());
    match admit(operators, peer, request.uri().path()).await {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(status) => status.into_http(),
    }
}

async fn admit(operators: Operators, peer: Option<Principal>, path: &str) -> Result<Caller, Status> {
    let rule = rule(path).ok_or_else(|| Status::unimplemented(format!("there is no call `{path}`")))?;
    let Some(who) = peer else {
        return Err(agent_proto::status(&Fault::new(Code::Denied, "the system does not say who calls")));
    };
    let caller = Caller { who, operators };
    let allowed = match rule {
        Rule::Anyone | Rule::Owner => true,
        Rule::Operator => caller.is_operator().await,
        Rule::Node => caller.operators.are_own(&caller.who),
    };
    match allowed {
        true => Ok(caller),
        false => Err(agent_proto::status(&denied(rule, &caller))),
    }
}

fn denied(rule: Rule, caller: &Caller) -> Fault {
    let what = match rule {
        Rule::Node => "only a node of this controller may do that",
        _ => "only an operator of this machine may do that",
    };
    Fault::new(Code::Denied, what).why(format!("you are {caller}")).fix(
        "ask an operator: root, the user the daemon runs as, or a member of the group that `operator_group` names",
    )
}

impl Services {
    /// A job as it stands, for whom it belongs to and for operators.
    pub(super) async fn owned(&self, id: &JobId, caller: &Caller) -> Result<JobView, Refusal> {
        let view = self.view(id).await?;
        if caller.owns(&view.job) || caller.is_operator().await {
            return Ok(view);
        }
        let owner = view.job.owner.as_ref().map_or("somebody else".to_owned(), Principal::to_string);
        Err(Fault::new(Code::Denied, format!("the job `{id}` is not yours"))
            .why(format!("it belongs to {owner}, and you are {caller}"))
            .fix("ask its owner, or an operator of this machine")
            .into())
    }
}
