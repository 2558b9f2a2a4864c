//! Who may call what.
//!
//! Owns the one table of rules, a line for each call of every service: a call without a rule is refused as unknown.
//! The layer [`guard`] runs before all services; it passes a call on with its [`Caller`], or refuses it. Handlers of
//! calls about a job check further: [`Services::owned`] returns a job only to its owner and to operators.
//!
//! The transport identifies the caller ([`Peer`]), not the message. A certificate proves an identity and grants no
//! rights: they are looked up at each call, and so is whether the caller still belongs to the controller.
//!
//! Every call that may change something, except those about blobs and those that nodes make all the time, and every
//! refusal is recorded: [`Audit`].

mod standing;

use std::fmt;
use std::sync::Arc;

use agent_identity::Certified;
use agent_model::{Clock, Code, Fault, JobId, NodeId, Principal, Role};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use parking_lot::Mutex;
use tonic::Status;

use super::{Refusal, Services};
use crate::audit::{Audit, AuditEntry};
use crate::queue::JobView;
use crate::registry::Registry;
use crate::sessions::Sessions;
use crate::standby::Transfers;
use crate::store::JobRecord;

/// What the transport knows about the other end of a connection; every connection to the controller has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// Not identified: no certificate, or no user from the kernel.
    Nobody {
        /// Its address.
        from: String,
    },
    /// A process of this machine.
    Local {
        /// The user that the kernel names.
        uid: u32,
    },
    /// A caller with a certificate of the controller's authority.
    Certified {
        /// The content of the certificate.
        certificate: Certified,
        /// Its address.
        from: String,
    },
}

impl Peer {
    /// Whom it proved to be.
    pub fn who(&self) -> Option<Principal> {
        match self {
            Peer::Nobody { .. } => None,
            Peer::Local { uid } => Some(Principal::Local { uid: *uid }),
            Peer::Certified { certificate, .. } => Some(certificate.subject.who.clone()),
        }
    }

    /// The certificate that it presented, if it has one.
    pub(super) fn certificate(&self) -> Option<&Certified> {
        match self {
            Peer::Certified { certificate, .. } => Some(certificate),
            Peer::Local { .. } | Peer::Nobody { .. } => None,
        }
    }

    fn from(&self) -> &str {
        match self {
            Peer::Local { .. } => "",
            Peer::Nobody { from } | Peer::Certified { from, .. } => from,
        }
    }
}

/// Who may do operations that affect everybody: root, the controller's own user, and others that the machine names.
#[derive(Clone)]
pub struct Operators {
    own: u32,
    others: Arc<dyn Fn(&Principal) -> bool + Send + Sync>,
}

impl Operators {
    /// `own` is the user of this process. `others` decides about everybody else, and may block.
    pub fn new(own: u32, others: impl Fn(&Principal) -> bool + Send + Sync + 'static) -> Operators {
        Operators { own, others: Arc::new(others) }
    }

    /// The controller's own processes: its nodes on this machine.
    fn are_own(&self, who: &Principal) -> bool {
        matches!(who, Principal::Local { uid } if *uid == 0 || *uid == self.own)
    }

    /// Whether `who` is one of them.
    pub async fn have(&self, who: &Principal) -> bool {
        if self.are_own(who) {
            return true;
        }
        let (others, who) = (Arc::clone(&self.others), who.clone());
        // A lookup that panics makes nobody an operator.
        agent_blocking::spawn_blocking(move || others(&who)).await.unwrap_or(false)
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
    /// Users, wherever they are.
    User,
    /// The owner of the job it names, operators, and for reads all users if the job says so: its handler checks that.
    Owner,
    /// Operators.
    Operator,
    /// Those who manage nodes and users: operators of the controller's own machine, and users of the role `admin`.
    Admin,
    /// Nodes.
    Node,
    /// Users and nodes.
    Member,
    /// Callers with a token, which need no certificate: its handler checks the token.
    Token,
}

const JOBS: &[(&str, Rule)] = &[
    ("Submit", Rule::User),
    ("Get", Rule::Owner),
    ("List", Rule::User), // private parts of others' jobs are hidden
    ("Watch", Rule::Owner),
    ("Cancel", Rule::Owner),
    ("Hold", Rule::Owner),
    ("Change", Rule::Owner),
    ("Remove", Rule::Owner),
    ("History", Rule::Owner),
    ("Session", Rule::Owner),
];

const NODES: &[(&str, Rule)] = &[
    ("List", Rule::User),
    ("SetEligibility", Rule::Operator),
    ("Preempt", Rule::Operator),
    ("DeclareLost", Rule::Operator),
    ("JudgeReplica", Rule::Admin),
    ("ManageEnvironment", Rule::Operator),
    ("StoreOutputs", Rule::Owner),
    ("KeepAwake", Rule::User),
    ("CollectBlobs", Rule::Operator),
    ("CheckBlobs", Rule::Operator),
    ("GetTunnelKey", Rule::Admin),
    ("KeepTunnel", Rule::Admin),
    ("DropTunnel", Rule::Admin),
];

const TELEMETRY: &[(&str, Rule)] =
    &[("Append", Rule::Node), ("ReadLog", Rule::Owner), ("ReadTracking", Rule::Owner)];

const WORKER: &[(&str, Rule)] = &[
    ("Sync", Rule::Node),
    ("ReportOutcome", Rule::Node),
    ("ReportOutputs", Rule::Node),
    ("ReadSecrets", Rule::Node),
    ("FindPeer", Rule::Node),
    ("AdmitPeer", Rule::Node),
    ("ServeSession", Rule::Node),
];

/// Each concerns only the caller's own secrets.
const SECRETS: &[(&str, Rule)] = &[("Set", Rule::User), ("List", Rule::User), ("Remove", Rule::User)];

/// Changes concern only the caller's own; reads what all may read, too.
const ASSETS: &[(&str, Rule)] = &[("Add", Rule::User), ("List", Rule::User), ("Change", Rule::User)];

const IDENTITY: &[(&str, Rule)] = &[
    ("Join", Rule::Token),
    ("Login", Rule::Token),
    ("Renew", Rule::Member),
    ("CreateToken", Rule::Admin),
    ("ListTokens", Rule::Admin),
    ("RevokeToken", Rule::Admin),
    ("AddUser", Rule::Admin),
    ("ListUsers", Rule::Admin),
    ("RevokeUser", Rule::Admin),
    ("RemoveUser", Rule::Admin),
    ("RemoveNode", Rule::Admin),
];

const POOLS: &[(&str, Rule)] = &[("Set", Rule::Admin), ("List", Rule::User), ("Delete", Rule::Admin)];

/// Calls that change nothing, or that nodes make all the time. All others go into the audit log.
const UNAUDITED: &[&str] = &[
    "/agent.v1.Jobs/Get",
    "/agent.v1.Jobs/List",
    "/agent.v1.Jobs/Watch",
    "/agent.v1.Jobs/History",
    "/agent.v1.Nodes/List",
    "/agent.v1.Telemetry/Append",
    "/agent.v1.Telemetry/ReadLog",
    "/agent.v1.Telemetry/ReadTracking",
    "/agent.v1.Worker/Sync",
    "/agent.v1.Worker/ReportOutcome",
    "/agent.v1.Worker/ReportOutputs",
    "/agent.v1.Worker/FindPeer",
    "/agent.v1.Worker/AdmitPeer",
    "/agent.v1.Worker/ServeSession",
    "/agent.v1.Secrets/List",
    "/agent.v1.Assets/List",
    "/agent.v1.Identity/ListTokens",
    "/agent.v1.Identity/ListUsers",
    "/agent.v1.Pools/List",
];

/// The stream by which a process starts to speak for its node.
const SYNC: &str = "/agent.v1.Worker/Sync";

/// A blob is read by its digest, which nobody can guess: a caller that knows it was given it, or has the content.
const BLOBS: [&str; 3] = [
    "build.bazel.remote.execution.v2.Capabilities",
    "build.bazel.remote.execution.v2.ContentAddressableStorage",
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
        "agent.v1.Secrets" => SECRETS,
        "agent.v1.Assets" => ASSETS,
        "agent.v1.Identity" => IDENTITY,
        "agent.v1.Pools" => POOLS,
        blobs if BLOBS.contains(&blobs) => return Some(Rule::Member),
        _ => return None,
    };
    methods.iter().find(|(name, _)| *name == method).map(|(_, rule)| *rule)
}

/// Whether a call that was allowed goes into the audit log.
fn is_audited(path: &str) -> bool {
    !is_of(&BLOBS, path) && !UNAUDITED.contains(&path)
}

/// Whether a call is one of these services.
fn is_of(services: &[&str], path: &str) -> bool {
    services.iter().any(|service| path.strip_prefix('/').is_some_and(|path| path.starts_with(service)))
}

/// Everything the rules are checked with. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Gate {
    pub(crate) operators: Operators,
    pub(crate) registry: Registry,
    pub(crate) sessions: Sessions,
    pub(crate) audit: Audit,
    pub(crate) clock: Arc<dyn Clock>,
    /// The calls about blobs that are going on.
    pub(crate) transfers: Transfers,
}

/// The caller of a call that its rule allows.
#[derive(Clone)]
pub(super) struct Caller {
    who: Principal,
    peer: Peer,
    gate: Gate,
    /// The object of the call, for the audit log.
    about: Arc<Mutex<String>>,
}

impl Caller {
    /// The caller of a request that came through [`guard`].
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Result<Caller, Refusal> {
        let caller = request.extensions().get::<Caller>().cloned();
        caller.ok_or_else(|| Fault::new(Code::Bug, "a call passed nobody who looked at its caller").into())
    }

    /// The controller's own process.
    pub(super) fn own(gate: &Gate) -> Caller {
        let uid = gate.operators.own;
        let (who, peer) = (Principal::Local { uid }, Peer::Local { uid });
        Caller { who, peer, gate: gate.clone(), about: Arc::default() }
    }

    pub(super) fn who(&self) -> &Principal {
        &self.who
    }

    /// The caller's address; empty for this machine.
    pub(super) fn from(&self) -> &str {
        self.peer.from()
    }

    /// The caller's certificate, if there is one.
    pub(super) fn certificate(&self) -> Option<&Certified> {
        self.peer.certificate()
    }

    /// Notes the object of the call: `job train-1`.
    pub(super) fn concerns(&self, what: String) {
        *self.about.lock() = what;
    }

    pub(super) fn owns(&self, job: &JobRecord) -> bool {
        job.owner() == Some(&self.who) && self.gate.registry.is_of(&self.who, job.submitted_at)
    }

    pub(super) async fn is_operator(&self) -> bool {
        match self.gate.registry.role(&self.who) {
            Some(role) => role >= Role::Operate,
            None => self.gate.operators.have(&self.who).await,
        }
    }

    async fn is_admin(&self) -> bool {
        match self.gate.registry.role(&self.who) {
            Some(role) => role == Role::Admin,
            None => self.gate.operators.have(&self.who).await,
        }
    }

    /// Checks that the caller of a request may speak for the node that the request names.
    pub(super) fn speaking<T>(request: &tonic::Request<T>, node: &str) -> Result<(), Refusal> {
        Caller::of(request)?.speaks_for(&node.parse()?)
    }

    /// A node speaks for itself alone; the controller's own processes for any node that did not join.
    pub(super) fn speaks_for(&self, node: &NodeId) -> Result<(), Refusal> {
        match &self.who {
            Principal::Node { name } if name != node => {
                let what = format!("the certificate is for `{name}`, and the message speaks for `{node}`");
                Err(Fault::new(Code::Denied, what)
                    .fix("join the machine under the name it is to have")
                    .into())
            }
            // A name for which a certificate was issued belongs to that machine.
            Principal::Local { .. } if self.gate.registry.has_node(node) => {
                let what = format!("`{node}` is a machine of its own, which joined with a token");
                Err(Fault::new(Code::NodeTaken, what).fix("give this one another `node_name`").into())
            }
            _ => Ok(()),
        }
    }

    /// Checks that the caller still belongs to the controller: a stream does that while it is open.
    pub(super) fn still(&self) -> Result<(), Refusal> {
        self.gate.standing(&self.peer).map_err(Refusal::from)
    }
}

/// The object of a call that has no [`Caller`] yet, for the audit log.
#[derive(Clone)]
pub(super) struct About(Arc<Mutex<String>>);

impl About {
    /// Of a request that came through [`guard`].
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Option<About> {
        request.extensions().get::<About>().cloned()
    }

    pub(super) fn say(&self, what: String) {
        *self.0.lock() = what;
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").field("who", &self.who).finish_non_exhaustive()
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.who.fmt(f)
    }
}

/// Checks every call before its service runs, and audits it.
pub(super) async fn guard(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let unknown = || Peer::Nobody { from: String::new() };
    let peer = request.extensions().get::<Peer>().cloned().unwrap_or_else(unknown);
    let path = request.uri().path().to_owned();
    let about = Arc::new(Mutex::new(String::new()));
    let session = session_of(&request);
    // Of a call that sends blobs all is over when it is answered.
    let _going_on = is_of(&BLOBS[1..], &path).then(|| gate.transfers.begin());
    let admitted = gate.admit(&peer, &path, &session, &about).await;
    let response = match admitted {
        Ok(caller) => {
            request.extensions_mut().insert(About(Arc::clone(&about)));
            caller.map(|caller| request.extensions_mut().insert(caller));
            next.run(request).await
        }
        Err(status) => status.into_http(),
    };
    let answer = match Status::from_header_map(response.headers()) {
        Some(status) if status.code() != tonic::Code::Ok => Some(status),
        _ => None,
    };
    let refused = |status: &Status| {
        matches!(
            status.code(),
            tonic::Code::PermissionDenied | tonic::Code::Unauthenticated | tonic::Code::Unimplemented
        )
    };
    let is_refused = answer.as_ref().is_some_and(refused);
    if is_audited(&path) || is_refused {
        let is_call = rule(&path).is_some();
        let entry = AuditEntry {
            at_ms: gate.clock.now(),
            who: peer.who().map_or_else(|| "nobody".to_owned(), |who| who.to_string()),
            from: peer.from().to_owned(),
            call: if is_call { path.trim_start_matches("/agent.v1.") } else { "unknown call" }.to_owned(),
            about: if is_call { std::mem::take(&mut *about.lock()) } else { path },
            answer: answer.map_or_else(|| "ok".to_owned(), |status| status.message().to_owned()),
            // Whoever has a token is known once it was good.
            is_known: is_call && (peer.who().is_some() || !is_refused),
            times: 1,
        };
        let audit = gate.audit.clone();
        // An entry that is lost by a panic was reported in the daemon's log.
        let _ = agent_blocking::spawn_blocking(move || match is_refused {
            true => audit.refuse(entry),
            false => audit.write(entry),
        })
        .await;
    }
    response
}

/// The session of a node's process, which it sends in the user agent.
fn session_of(request: &Request) -> String {
    let agent = request.headers().get("user-agent").and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    let named = agent.split(' ').find_map(|word| word.strip_prefix(agent_proto::transport::SESSION));
    named.unwrap_or_default().to_owned()
}

impl Gate {
    /// The caller of a call, if it is allowed; `None` for calls that take a token.
    async fn admit(
        &self,
        peer: &Peer,
        path: &str,
        session: &str,
        about: &Arc<Mutex<String>>,
    ) -> Result<Option<Caller>, Status> {
        let rule = rule(path);
        if rule == Some(Rule::Token) {
            return Ok(None);
        }
        // Whoever is not known learns nothing, not even which calls there are.
        self.standing(peer).map_err(|fault| agent_proto::status(&fault))?;
        let rule = rule.ok_or_else(|| Status::unimplemented("there is no such call"))?;
        let Some(who) = peer.who() else { return Err(agent_proto::status(&nobody())) };
        let caller = Caller { who, peer: peer.clone(), gate: self.clone(), about: Arc::clone(about) };
        let is_node = matches!(caller.who, Principal::Node { .. });
        let allowed = match rule {
            Rule::User | Rule::Owner => !is_node,
            Rule::Operator => caller.is_operator().await,
            Rule::Admin => caller.is_admin().await,
            Rule::Node => is_node || self.operators.are_own(&caller.who),
            Rule::Member | Rule::Token => true,
        };
        if !allowed {
            return Err(agent_proto::status(&denied(rule, &caller)));
        }
        match &caller.who {
            Principal::Node { name } if path != SYNC && !self.sessions.may_speak(name, session) => {
                let what = format!("another machine lives as `{name}`, and this one may not speak for it");
                Err(agent_proto::status(&Fault::new(Code::NodeTwice, what)))
            }
            _ => Ok(Some(caller)),
        }
    }

    /// Checks that what was proved at the handshake is still valid.
    fn standing(&self, peer: &Peer) -> Result<(), Fault> {
        let certificate = match peer {
            Peer::Local { .. } => return Ok(()),
            Peer::Nobody { .. } => return Err(nobody()),
            Peer::Certified { certificate, .. } => certificate,
        };
        let who = &certificate.subject.who;
        let again = match who {
            Principal::Node { .. } => "join it again with a token of an operator: `agentctl token create`",
            _ => "log in again with a code of an operator: `agentctl user add NAME`",
        };
        if certificate.until < self.clock.now() {
            return Err(
                Fault::new(Code::Unidentified, format!("the certificate of {who} has ended")).fix(again)
            );
        }
        if self.registry.knows(certificate) {
            return Ok(());
        }
        let removed = format!("{who} was removed from this controller");
        let (code, what) = match who {
            // What is only not on record, as after an old backup, may go on with what it runs.
            Principal::Node { .. } if !self.registry.was_removed(&certificate.subject.enrollment) => {
                (Code::Unidentified, format!("{who} is not on record at this controller"))
            }
            Principal::Node { .. } => (Code::NodeRemoved, removed),
            _ => (Code::Unidentified, removed),
        };
        Err(Fault::new(code, what).fix(again))
    }
}

fn nobody() -> Fault {
    Fault::new(Code::Unidentified, "nobody says who calls").fix(
        "join the machine (`agentd join`), or log in (`agentctl login`); on the controller's own machine use its socket",
    )
}

fn denied(rule: Rule, caller: &Caller) -> Fault {
    let (what, fix) = match rule {
        Rule::Node => ("only a node of this controller may do that", None),
        Rule::User | Rule::Owner => ("only a user may do that", None),
        Rule::Admin => (
            "only an administrator of this controller may do that",
            Some("ask a user of the role `admin`, or an operator of the controller's own machine"),
        ),
        _ => (
            "only an operator of this machine may do that",
            Some(
                "ask an operator: root, the user the daemon runs as, a member of the group that `operator_group` \
                 names, or a user of the role `operate`",
            ),
        ),
    };
    let fault = Fault::new(Code::Denied, what).why(format!("you are {caller}"));
    match fix {
        Some(fix) => fault.fix(fix),
        None => fault,
    }
}

impl Services {
    /// The present state of a job, for those who may read it: its owner, operators, and all users if the job says so.
    pub(super) async fn readable(&self, id: &JobId, caller: &Caller) -> Result<JobView, Refusal> {
        let view = self.view(id).await?;
        match view.job.spec.visible_to_all {
            true => Ok(view),
            false => self.owned(id, caller).await,
        }
    }

    /// The present state of a job, for its owner and for operators.
    pub(super) async fn owned(&self, id: &JobId, caller: &Caller) -> Result<JobView, Refusal> {
        caller.concerns(format!("job {id}"));
        let view = self.view(id).await?;
        if caller.owns(&view.job) || caller.is_operator().await {
            return Ok(view);
        }
        let owner = match view.job.owner() {
            Some(owner) if *owner == caller.who => format!("an earlier {owner}"),
            Some(owner) => owner.to_string(),
            None => "somebody else".to_owned(),
        };
        Err(Fault::new(Code::Denied, format!("the job `{id}` is not yours"))
            .why(format!("it belongs to {owner}, and you are {caller}"))
            .fix("ask its owner, or an operator of this machine")
            .into())
    }
}
