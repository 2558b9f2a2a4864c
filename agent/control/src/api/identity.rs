//! `Identity`: the calls that admit and remove nodes and users.
//!
//! A token is checked, a request is signed, and the decision is on disk before the certificate is sent. The caller's
//! time is checked first: with a clock that is far off, the certificate would be useless.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_identity::{CLOCK_TOLERANCE, Certified, IssueError, Subject, TokenKind};
use agent_model::words::count;
use agent_model::{Code, Fault, NodeId, Principal, Role, Timestamp, UserName};
use agent_proto::v1;
use tonic::{Request, Response, Status};

use super::access::{About, Peer};
use super::nodes::unknown_node;
use super::pages::Page;
use super::{Caller, Refusal, Services, invalid};
use crate::members::{IdentityConfig, busy};
use crate::registry::TokenRefused;
use crate::store::TokenRecord;

/// How long a token or a code is valid by default.
const HOUR: Duration = Duration::from_secs(3600);
/// The longest time it may be valid.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

impl Services {
    fn identity(&self) -> Result<&IdentityConfig, Refusal> {
        self.identity.as_ref().ok_or_else(|| {
            Fault::new(Code::NoListener, "this controller serves its own machine alone")
                .fix("set `listen: 0.0.0.0:7443` in its configuration and start it again")
                .into()
        })
    }

    /// A certificate for the key of a request.
    fn sign(
        &self,
        request: &agent_identity::SigningRequest,
        subject: &Subject,
    ) -> Result<v1::CertificateResponse, Refusal> {
        let identity = self.identity()?;
        let (life, name) = match &subject.who {
            Principal::Node { name } => (identity.node_life, name.to_string()),
            Principal::User { name } => (identity.user_life, name.to_string()),
            Principal::Local { .. } => return Err(invalid("this machine needs no certificate").into()),
        };
        let made = identity.authority.issue(request, subject, self.gate.clock.now(), life);
        Ok(v1::CertificateResponse { certificate: made.map_err(|error| unsigned(&error))?, name })
    }

    /// `shown` is the certificate that the machine presented, if it has one of this authority.
    async fn join(
        &self,
        asked: v1::JoinRequest,
        shown: Option<Certified>,
    ) -> Result<v1::CertificateResponse, Refusal> {
        self.identity()?;
        let (node, now): (NodeId, _) = (asked.node.parse()?, self.gate.clock.now());
        require_time(asked.clock_ms, now)?;
        let request = read(&asked.request)?;
        let refused = |refused| not_taken(refused, Some(&node));
        if !asked.jobs.is_empty() {
            return Err(brings_jobs(asked.jobs.len()).into());
        }
        let shown = shown.filter(|shown| shown.until >= now).map(|shown| shown.subject);
        let is_known = self.queue.nodes().await?.iter().any(|known| known.record.id == node);
        let registry = &self.gate.registry;
        let subject = registry.join(&asked.secret, &node, &request.key(), shown, is_known, now).await;
        let subject = subject.map_err(refused)?;
        tracing::info!(%node, "joined");
        self.sign(&request, &subject)
    }

    async fn log_in(&self, asked: v1::LoginRequest) -> Result<v1::CertificateResponse, Refusal> {
        self.identity()?;
        let now = self.gate.clock.now();
        require_time(asked.clock_ms, now)?;
        let request = read(&asked.request)?;
        let subject = self.gate.registry.log_in(&asked.secret, now).await;
        let subject = subject.map_err(|refused| not_taken(refused, None))?;
        tracing::info!(who = %subject.who, "logged in");
        self.sign(&request, &subject)
    }

    async fn renew(
        &self,
        certificate: &Certified,
        asked: v1::RenewRequest,
    ) -> Result<v1::CertificateResponse, Refusal> {
        let request = read(&asked.request)?;
        if let Principal::Node { name } = &certificate.subject.who {
            self.gate.registry.rekey(name, &certificate.key, &request.key()).await?;
        }
        self.sign(&request, &certificate.subject)
    }

    /// Makes a token, of which only the hash is stored.
    async fn give_token(
        &self,
        token: TokenRecord,
        kind: TokenKind,
    ) -> Result<v1::CreateTokenResponse, Refusal> {
        let identity = self.identity()?;
        let (fingerprint, now) = (identity.authority.fingerprint(), self.gate.clock.now());
        let issued = self.gate.registry.issue(kind, fingerprint, token, now).await;
        let (made, token) = issued.map_err(|refused| not_taken(refused, None))?;
        Ok(v1::CreateTokenResponse {
            token: made.to_string(),
            address: identity.address.clone(),
            until_ms: token.until.0,
            id: token.id().to_owned(),
        })
    }

    async fn create_token(
        &self,
        asked: v1::CreateTokenRequest,
        by: &Caller,
    ) -> Result<v1::CreateTokenResponse, Refusal> {
        let labels = asked.labels.into_iter().collect();
        check_labels(&labels)?;
        let token = TokenRecord {
            hash: String::new(),
            user: None,
            labels,
            node: None,
            uses_left: asked.uses.max(1),
            until: self.gate.clock.now() + life(asked.seconds),
            by: by.to_string(),
        };
        self.give_token(token, TokenKind::Join).await
    }

    async fn add_user(
        &self,
        asked: v1::AddUserRequest,
        by: &Caller,
    ) -> Result<v1::CreateTokenResponse, Refusal> {
        self.identity()?;
        let (name, now): (UserName, _) = (asked.name.parse()?, self.gate.clock.now());
        let role = match asked.role.as_str() {
            "" => None,
            text => Some(
                Role::parse(text)
                    .ok_or_else(|| invalid(format!("`{text}` is not submit, operate or admin")))?,
            ),
        };
        let owns_since = self.owns_since(&name, &asked.person, now).await?;
        let added = self.gate.registry.add_user(&name, role, owns_since, now).await;
        added.map_err(|refused| not_taken(refused, None))?;
        let token = TokenRecord {
            hash: String::new(),
            user: Some(name),
            labels: Default::default(),
            node: None,
            uses_left: 1,
            until: now + life(asked.seconds),
            by: by.to_string(),
        };
        self.give_token(token, TokenKind::Login).await
    }

    async fn remove_node(
        &self,
        asked: v1::RemoveNodeRequest,
        by: &Caller,
    ) -> Result<v1::RemoveNodeResponse, Refusal> {
        let node: NodeId = asked.node.parse()?;
        let known = self.queue.nodes().await?.into_iter().find(|known| known.record.id == node);
        if let Some(known) = known.filter(|known| !known.jobs.is_empty() && !asked.lose_jobs) {
            return Err(busy(&node, known.jobs.iter()).into());
        }
        let (lost, was_known) = self.members.forget(&node, asked.lose_jobs, &by.to_string()).await?;
        if !was_known {
            return Err(unknown_node(&node).into());
        }
        Ok(v1::RemoveNodeResponse { jobs: lost.into_iter().map(String::from).collect() })
    }
}

/// For a machine of the release before, which could bring the jobs of its own controller.
fn brings_jobs(jobs: usize) -> Fault {
    Fault::new(Code::JobActive, "a machine joins without the jobs of its own controller")
        .why(format!("it would bring {}", count(jobs as u64, "job")))
        .fix("let them end, or end them: agentctl cancel --wait JOB; or join without those that wait: --lose-jobs")
}

/// Labels are plain text.
pub(super) fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Fault> {
    let plain =
        |text: &str| !text.is_empty() && text.len() <= 63 && text.bytes().all(|b| b.is_ascii_graphic());
    match labels.iter().find(|(key, value)| !plain(key) || !plain(value)) {
        Some((key, value)) => {
            Err(invalid(format!("the label `{key}={value}` is not plain text of 1 to 63 characters")))
        }
        None => Ok(()),
    }
}

fn life(seconds: u64) -> Duration {
    if seconds == 0 { HOUR } else { Duration::from_secs(seconds).min(LONGEST) }
}

fn read(request: &[u8]) -> Result<agent_identity::SigningRequest, Refusal> {
    agent_identity::SigningRequest::read(request)
        .map_err(|error| invalid("the signing request is not valid").because(&error).into())
}

fn unsigned(error: &IssueError) -> Fault {
    Fault::new(Code::Bug, "the certificate could not be made").because(error)
}

/// Both times are reported, because it is not known which clock is wrong.
fn require_time(theirs: u64, ours: Timestamp) -> Result<(), Fault> {
    let theirs = Timestamp(theirs);
    let apart = theirs.since(ours).max(ours.since(theirs));
    if apart <= CLOCK_TOLERANCE {
        return Ok(());
    }
    Err(Fault::new(Code::ClocksApart, "the clocks of this machine and of the controller are too far apart")
        .why(format!("this machine says {}, the controller {}", theirs.utc(), ours.utc()))
        .why(format!(
            "they differ by {} min, and may by {}",
            apart.as_secs() / 60,
            CLOCK_TOLERANCE.as_secs() / 60
        ))
        .fix("set the one that is wrong, best by NTP: `timedatectl set-ntp true`"))
}

fn not_taken(refused: TokenRefused, node: Option<&NodeId>) -> Refusal {
    match (refused, node) {
        (TokenRefused::Ask(error), _) => error.into(),
        (TokenRefused::Chance, _) => Fault::new(Code::Bug, "the system gave no random numbers").into(),
        (TokenRefused::NameTaken, Some(node)) => Fault::new(
            Code::NodeTaken,
            format!("there is a machine `{node}` already, and this is another one"),
        )
        .why(
            "it has another key, or is known without one, as the controller's own node is: either it is another \
             machine, or this one lost what it kept",
        )
        .fix(format!(
            "give this machine another `node_name`; or, if the old one is gone: agentctl node remove {node}"
        ))
        .into(),
        (refused, node) => {
            let fix = match node {
                Some(_) => "ask an operator for a new one: `agentctl token create`",
                None => "ask an operator for a new code: `agentctl user add NAME`",
            };
            Fault::new(Code::TokenRefused, "the token is not accepted").because(&refused).fix(fix).into()
        }
    }
}

fn unknown(what: String, list: &str) -> Refusal {
    Fault::new(Code::NotKnownHere, what).fix(format!("list them with `{list}`")).into()
}

#[tonic::async_trait]
impl v1::identity_server::Identity for Services {
    async fn join(
        &self,
        request: Request<v1::JoinRequest>,
    ) -> Result<Response<v1::CertificateResponse>, Status> {
        About::of(&request).inspect(|about| about.say(format!("node {}", request.get_ref().node)));
        let shown = request.extensions().get::<Peer>().and_then(Peer::certificate).cloned();
        Ok(Response::new(Services::join(self, request.into_inner(), shown).await?))
    }

    async fn login(
        &self,
        request: Request<v1::LoginRequest>,
    ) -> Result<Response<v1::CertificateResponse>, Status> {
        let about = About::of(&request);
        let made = self.log_in(request.into_inner()).await?;
        about.inspect(|about| about.say(format!("user {}", made.name)));
        Ok(Response::new(made))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::CertificateResponse>, Status> {
        let caller = Caller::of(&request)?;
        let certificate = caller.certificate();
        let certificate =
            certificate.ok_or_else(|| Refusal::from(invalid("this machine needs no certificate")))?;
        Ok(Response::new(Services::renew(self, certificate, request.into_inner()).await?))
    }

    async fn create_token(
        &self,
        request: Request<v1::CreateTokenRequest>,
    ) -> Result<Response<v1::CreateTokenResponse>, Status> {
        let caller = Caller::of(&request)?;
        let made = Services::create_token(self, request.into_inner(), &caller).await?;
        caller.concerns(format!("token {}", made.id));
        Ok(Response::new(made))
    }

    async fn list_tokens(
        &self,
        request: Request<v1::ListTokensRequest>,
    ) -> Result<Response<v1::ListTokensResponse>, Status> {
        let info = |token: TokenRecord| v1::TokenInfo {
            id: token.id().to_owned(),
            kind: if token.user.is_some() { "login" } else { "join" }.to_owned(),
            uses_left: token.uses_left,
            until_ms: token.until.0,
            by: token.by,
            labels: token.labels.into_iter().collect(),
            user: token.user.map(String::from).unwrap_or_default(),
        };
        let tokens = self.gate.registry.tokens().into_iter().map(info);
        let page = Page::after(&request.get_ref().after, tokens, |token| token.id.clone());
        Ok(Response::new(v1::ListTokensResponse { tokens: page.entries, more: page.more }))
    }

    async fn revoke_token(
        &self,
        request: Request<v1::RevokeTokenRequest>,
    ) -> Result<Response<v1::RevokeTokenResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner().id;
        caller.concerns(format!("token {asked}"));
        let revoked = self.gate.registry.revoke(&asked).await.map_err(Refusal::from)?;
        let id = revoked.ok_or_else(|| {
            unknown(format!("no token begins with `{asked}`, or several do"), "agentctl token list")
        })?;
        Ok(Response::new(v1::RevokeTokenResponse { id }))
    }

    async fn add_user(
        &self,
        request: Request<v1::AddUserRequest>,
    ) -> Result<Response<v1::CreateTokenResponse>, Status> {
        let caller = Caller::of(&request)?;
        caller.concerns(format!("user {}: {}", request.get_ref().name, request.get_ref().role));
        Ok(Response::new(Services::add_user(self, request.into_inner(), &caller).await?))
    }

    async fn list_users(
        &self,
        request: Request<v1::ListUsersRequest>,
    ) -> Result<Response<v1::ListUsersResponse>, Status> {
        let users = self.gate.registry.users().into_iter().map(|user| v1::User {
            name: user.name.into(),
            role: user.role.name().to_owned(),
            added_ms: user.added_at.0,
        });
        let page = Page::after(&request.get_ref().after, users, |user| user.name.clone());
        Ok(Response::new(v1::ListUsersResponse { users: page.entries, more: page.more }))
    }

    async fn remove_user(
        &self,
        request: Request<v1::RemoveUserRequest>,
    ) -> Result<Response<v1::RemoveUserResponse>, Status> {
        let caller = Caller::of(&request)?;
        let name: UserName = request.into_inner().name.parse().map_err(Refusal::from)?;
        caller.concerns(format!("user {name}"));
        match self.gate.registry.remove_user(&name).await.map_err(Refusal::from)? {
            true => Ok(Response::new(v1::RemoveUserResponse {})),
            false => Err(unknown(format!("there is no user `{name}`"), "agentctl user list").into()),
        }
    }

    async fn revoke_user(
        &self,
        request: Request<v1::RevokeUserRequest>,
    ) -> Result<Response<v1::RevokeUserResponse>, Status> {
        let caller = Caller::of(&request)?;
        let name: UserName = request.into_inner().name.parse().map_err(Refusal::from)?;
        caller.concerns(format!("user {name}"));
        let revoked = self.gate.registry.revoke_user(&name).await;
        match revoked.map_err(|refused| not_taken(refused, None))? {
            true => Ok(Response::new(v1::RevokeUserResponse {})),
            false => Err(unknown(format!("there is no user `{name}`"), "agentctl user list").into()),
        }
    }

    async fn remove_node(
        &self,
        request: Request<v1::RemoveNodeRequest>,
    ) -> Result<Response<v1::RemoveNodeResponse>, Status> {
        let caller = Caller::of(&request)?;
        caller.concerns(format!("node {}", request.get_ref().node));
        Ok(Response::new(Services::remove_node(self, request.into_inner(), &caller).await?))
    }
}
