//! The nodes and users that belong to the controller, and the tokens that admit more of them.
//!
//! Owns the records and the rules of tokens. Hides hashes and the database. Reads are served from memory, so every
//! call of every connection can make one; one change is made at a time.
//!
//! Invariants: a grant of rights takes effect when it is on disk; a withdrawal takes effect at once, also when the
//! disk fails; a token is never used more often than its record allows; the time of a token's lookup does not reveal
//! how much of it is right.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agent_identity::{Certified, Subject, Token, TokenKind, same};
use agent_model::{NodeId, Principal, Role, Timestamp, UserName};
use parking_lot::RwLock;
use tokio::sync::{Mutex, watch};

use crate::queue::{AskError, Queue};
use crate::store::{Document, Loaded, MemberRecord, RemovedRecord, TokenRecord, UserRecord};

/// How long an expired token is kept, so that a refusal can say that it expired.
const REMEMBERED: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long it is kept that a node was removed: longer than any certificate of one is valid.
const SHOWN_FOR: Duration = Duration::from_secs(30 * 24 * 3600);

/// Why a token is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenRefused {
    #[error("there is no such token: it was revoked, is of another controller, or was over long ago")]
    Unknown,
    #[error("it is for something else: a machine joins with a token, a user logs in with his code")]
    Kind,
    #[error("it is for one machine of a pool, and this is another")]
    Node,
    #[error("it was used as often as it may be")]
    Used,
    #[error("its time is over")]
    Over,
    #[error("there is a machine of this name already, with another key or known without one")]
    NameTaken,
    #[error("the user was removed")]
    NoUser,
    #[error("the system gave no random numbers")]
    Chance,
    #[error(transparent)]
    Ask(#[from] AskError),
}

#[derive(Debug, Default)]
struct Known {
    members: BTreeMap<NodeId, MemberRecord>,
    users: BTreeMap<UserName, UserRecord>,
    /// Users who were removed, and who were not the first of their name.
    gone: BTreeMap<UserName, UserRecord>,
    tokens: BTreeMap<String, TokenRecord>,
    /// Nodes that were removed, by enrollment.
    removed: BTreeMap<String, RemovedRecord>,
}

impl Known {
    /// Adds a document, in place of an earlier one.
    fn put(&mut self, document: Document) {
        match document {
            Document::Member(member) => drop(self.members.insert(member.node.clone(), member)),
            Document::User(user) if user.is_removed => {
                self.users.remove(&user.name);
                self.gone.insert(user.name.clone(), user);
            }
            Document::User(user) => {
                self.gone.remove(&user.name);
                self.users.insert(user.name.clone(), user);
            }
            Document::Token(token) => drop(self.tokens.insert(token.hash.clone(), token)),
            Document::Removed(removed) => drop(self.removed.insert(removed.enrollment.clone(), removed)),
            Document::Node(_)
            | Document::Settled(_)
            | Document::Pool(_)
            | Document::Machine(_)
            | Document::Asset(_)
            | Document::Life(_) => {}
        }
    }
}

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Registry {
    known: Arc<RwLock<Known>>,
    /// Held during a change.
    changing: Arc<Mutex<()>>,
    /// Counts the changes by which somebody may have lost something.
    withdrawals: Arc<watch::Sender<u64>>,
    queue: Queue,
}

impl Registry {
    pub(crate) fn new(loaded: &Loaded, queue: Queue) -> Registry {
        let mut known = Known::default();
        loaded.documents.iter().cloned().for_each(|document| known.put(document));
        let withdrawals = Arc::new(watch::Sender::new(0));
        Registry { known: Arc::new(RwLock::new(known)), changing: Arc::default(), withdrawals, queue }
    }

    /// Whether the holder of a certificate still belongs to the controller. A node shows the key on record or its
    /// successor.
    pub(crate) fn knows(&self, certificate: &Certified) -> bool {
        let has_key = match &certificate.subject.who {
            Principal::Node { name } => {
                self.known.read().members.get(name).is_some_and(|member| member.has_key(&certificate.key))
            }
            Principal::User { .. } | Principal::Local { .. } => true,
        };
        has_key && self.is_enrolled(&certificate.subject)
    }

    /// Changes whenever a user or a node is removed, certificates are revoked, or a role is changed.
    pub(crate) fn withdrawals(&self) -> watch::Receiver<u64> {
        self.withdrawals.subscribe()
    }

    /// Whether this name has this enrollment now.
    pub(crate) fn is_enrolled(&self, subject: &Subject) -> bool {
        let known = self.known.read();
        let enrollment = match &subject.who {
            Principal::Node { name } => known.members.get(name).map(|member| &member.enrollment),
            Principal::User { name } => known.users.get(name).map(|user| &user.enrollment),
            Principal::Local { .. } => None,
        };
        enrollment == Some(&subject.enrollment)
    }

    /// The role of a user from another machine.
    pub(crate) fn role(&self, who: &Principal) -> Option<Role> {
        let Principal::User { name } = who else { return None };
        self.known.read().users.get(name).map(|user| user.role)
    }

    /// Whether a job that was submitted then in this name is this one's: it may be of an earlier user who was called so.
    pub(crate) fn is_of(&self, who: &Principal, submitted_at: Timestamp) -> bool {
        self.owns_since(who).is_none_or(|since| submitted_at >= since)
    }

    /// Since when the name is that of this person, who is or was a user; `None` if nobody else had it before.
    pub(crate) fn owns_since(&self, who: &Principal) -> Option<Timestamp> {
        let Principal::User { name } = who else { return None };
        let known = self.known.read();
        known.users.get(name).or_else(|| known.gone.get(name))?.owns_since
    }

    pub(crate) fn has_user(&self, name: &UserName) -> bool {
        self.known.read().users.contains_key(name)
    }

    pub(crate) fn labels(&self, node: &NodeId) -> BTreeMap<String, String> {
        self.known.read().members.get(node).map(|member| member.labels.clone()).unwrap_or_default()
    }

    /// The enrollment of a node; empty for one that did not join.
    pub(crate) fn enrollment(&self, node: &NodeId) -> String {
        self.known.read().members.get(node).map(|member| member.enrollment.clone()).unwrap_or_default()
    }

    pub(crate) fn has_node(&self, node: &NodeId) -> bool {
        self.known.read().members.contains_key(node)
    }

    /// All users, by name.
    pub(crate) fn users(&self) -> Vec<UserRecord> {
        self.known.read().users.values().cloned().collect()
    }

    /// All tokens that are remembered.
    pub(crate) fn tokens(&self) -> Vec<TokenRecord> {
        self.known.read().tokens.values().cloned().collect()
    }

    /// Makes a machine a node with this key; the same key again is the same node, and spends no use of the token.
    ///
    /// `shown` is the subject of a certificate of this authority that the machine presented: if that is its own name, it
    /// keeps the enrollment, unless that was removed. `is_known`: the controller has heard of a node of the name.
    pub(crate) async fn join(
        &self,
        secret: &str,
        node: &NodeId,
        key: &str,
        shown: Option<Subject>,
        is_known: bool,
        now: Timestamp,
    ) -> Result<Subject, TokenRefused> {
        let _one = self.changing.lock().await;
        let mut token = self.join_token(secret, now)?;
        if token.node.as_ref().is_some_and(|only| only != node) {
            return Err(TokenRefused::Node);
        }
        let who = Principal::Node { name: node.clone() };
        let kept = shown.filter(|shown| shown.who == who && !self.was_removed(&shown.enrollment));
        let old = self.known.read().members.get(node).cloned();
        if let Some(old) = old {
            return match old.has_key(key) {
                true => Subject::new(who, old.enrollment).ok_or(TokenRefused::Chance),
                false => Err(TokenRefused::NameTaken),
            };
        }
        // Each try of a pool to make a machine has a token for its name, and the machine may show any of them.
        let is_reserved = |token: &TokenRecord| token.node.as_ref() == Some(node) && token.until >= now;
        let is_taken = is_known || (token.node.is_none() && self.tokens().iter().any(is_reserved));
        if is_taken && kept.is_none() {
            return Err(TokenRefused::NameTaken);
        }
        let enrollment = match kept {
            Some(kept) => kept.enrollment,
            None => agent_identity::random_name().map_err(|_| TokenRefused::Chance)?,
        };
        token.uses_left = token.uses_left.checked_sub(1).ok_or(TokenRefused::Used)?;
        let member = MemberRecord {
            node: node.clone(),
            enrollment: enrollment.clone(),
            key: key.to_owned(),
            successor: None,
            labels: token.labels.clone(),
            joined_at: now,
        };
        self.add(vec![Document::Member(member), Document::Token(token)]).await?;
        Subject::new(who, enrollment).ok_or(TokenRefused::Chance)
    }

    fn join_token(&self, secret: &str, now: Timestamp) -> Result<TokenRecord, TokenRefused> {
        let token = self.find(secret, now)?;
        if token.user.is_some() { Err(TokenRefused::Kind) } else { Ok(token) }
    }

    /// The user whose code this is; one use of it is spent.
    pub(crate) async fn log_in(&self, secret: &str, now: Timestamp) -> Result<Subject, TokenRefused> {
        let _one = self.changing.lock().await;
        let mut token = self.find(secret, now)?;
        let name = token.user.clone().ok_or(TokenRefused::Kind)?;
        token.uses_left = token.uses_left.checked_sub(1).ok_or(TokenRefused::Used)?;
        let user = self.known.read().users.get(&name).cloned().ok_or(TokenRefused::NoUser)?;
        self.add(vec![Document::Token(token)]).await?;
        Subject::new(Principal::User { name }, user.enrollment).ok_or(TokenRefused::Chance)
    }

    /// A node that presented `key` gets a certificate for another one.
    pub(crate) async fn rekey(&self, node: &NodeId, key: &str, successor: &str) -> Result<(), AskError> {
        let _one = self.changing.lock().await;
        let member = self.known.read().members.get(node).cloned();
        let Some(member) = member else { return Ok(()) }; // it was removed meanwhile, and its next call is refused
        let (key, successor) = (key.to_owned(), Some(successor.to_owned()));
        self.add(vec![Document::Member(MemberRecord { key, successor, ..member })]).await
    }

    /// Issues a token of a controller whose authority has this fingerprint; the record gets the hash of its secret.
    /// Those that expired long ago are removed.
    pub(crate) async fn issue(
        &self,
        kind: TokenKind,
        fingerprint: [u8; 32],
        token: TokenRecord,
        now: Timestamp,
    ) -> Result<(Token, TokenRecord), TokenRefused> {
        let made = Token::generate(kind, fingerprint).map_err(|_| TokenRefused::Chance)?;
        let token = TokenRecord { hash: agent_model::ids::hex(&Token::hash(&made.secret())), ..token };
        let _one = self.changing.lock().await;
        let over = |token: &&TokenRecord| token.until + REMEMBERED < now;
        let old: Vec<TokenRecord> = self.known.read().tokens.values().filter(over).cloned().collect();
        self.add(vec![Document::Token(token.clone())]).await?;
        self.withdraw(old.into_iter().map(Document::Token).collect()).await?;
        Ok((made, token))
    }

    /// Revokes the tokens that admit this node alone.
    pub(crate) async fn revoke_for(&self, node: &NodeId) -> Result<(), AskError> {
        let _one = self.changing.lock().await;
        let ours = self.tokens().into_iter().filter(|token| token.node.as_ref() == Some(node));
        self.withdraw(ours.map(Document::Token).collect()).await
    }

    /// Revokes the token whose id begins with `id`, if there is exactly one; returns the whole id.
    pub(crate) async fn revoke(&self, id: &str) -> Result<Option<String>, AskError> {
        let _one = self.changing.lock().await;
        let all = self.tokens();
        let meant: Vec<&TokenRecord> =
            all.iter().filter(|token| !id.is_empty() && token.id().starts_with(id)).collect();
        let [token] = meant[..] else { return Ok(None) };
        self.withdraw(vec![Document::Token(token.clone())]).await?;
        Ok(Some(token.id().to_owned()))
    }

    /// Adds a user, or changes the role of one. To a new one belong the jobs of the name since `owns_since`, or all.
    pub(crate) async fn add_user(
        &self,
        name: &UserName,
        role: Option<Role>,
        owns_since: Option<Timestamp>,
        now: Timestamp,
    ) -> Result<(), TokenRefused> {
        let _one = self.changing.lock().await;
        let old = self.known.read().users.get(name).cloned();
        let enrollment = agent_identity::random_name().map_err(|_| TokenRefused::Chance)?;
        let new = UserRecord {
            name: name.clone(),
            role: Role::Submit,
            enrollment,
            added_at: now,
            owns_since,
            is_removed: false,
        };
        let user = old.unwrap_or(new);
        let role = role.unwrap_or(user.role);
        Ok(self.add(vec![Document::User(UserRecord { role, ..user })]).await?)
    }

    /// Removes a user and the user's codes; false if there is no such user.
    pub(crate) async fn remove_user(&self, name: &UserName) -> Result<bool, AskError> {
        let _one = self.changing.lock().await;
        let user = self.known.read().users.get(name).cloned();
        let Some(user) = user else { return Ok(false) };
        let codes = self.tokens().into_iter().filter(|token| token.user.as_ref() == Some(name));
        let codes = codes.map(Document::Token);
        if user.owns_since.is_none() {
            return self.withdraw(codes.chain([Document::User(user)]).collect()).await.map(|()| true);
        }
        // Should he come back, what was before him is still not his.
        let gone = Document::User(UserRecord { enrollment: String::new(), is_removed: true, ..user });
        self.known.write().put(gone.clone());
        self.withdrawals.send_modify(|changes| *changes += 1);
        self.queue.write(vec![gone], Vec::new()).await?;
        self.withdraw(codes.collect()).await?;
        Ok(true)
    }

    /// From now on none of the user's certificates is valid, and he stays a user; false if there is no such user.
    pub(crate) async fn revoke_user(&self, name: &UserName) -> Result<bool, TokenRefused> {
        let _one = self.changing.lock().await;
        let user = self.known.read().users.get(name).cloned();
        let Some(user) = user else { return Ok(false) };
        let enrollment = agent_identity::random_name().map_err(|_| TokenRefused::Chance)?;
        let user = UserRecord { enrollment, ..user };
        // It takes effect at once, also when the disk fails.
        self.known.write().put(Document::User(user.clone()));
        self.withdrawals.send_modify(|changes| *changes += 1);
        self.queue.write(vec![Document::User(user)], Vec::new()).await?;
        Ok(true)
    }

    /// From now on no certificate of the node is valid; false if it has none.
    pub(crate) async fn remove_node(&self, node: &NodeId, now: Timestamp) -> Result<bool, AskError> {
        let _one = self.changing.lock().await;
        let member = self.known.read().members.get(node).cloned();
        let Some(member) = member else { return Ok(false) };
        let removed = RemovedRecord { node: node.clone(), enrollment: member.enrollment.clone(), at: now };
        let over = |removed: &&RemovedRecord| removed.at + SHOWN_FOR < now;
        let old: Vec<RemovedRecord> = self.known.read().removed.values().filter(over).cloned().collect();
        self.withdraw(
            [Document::Member(member)].into_iter().chain(old.into_iter().map(Document::Removed)).collect(),
        )
        .await?;
        self.add(vec![Document::Removed(removed)]).await?;
        Ok(true)
    }

    /// Whether the removal of a node with this enrollment is on record.
    pub(crate) fn was_removed(&self, enrollment: &str) -> bool {
        self.known.read().removed.contains_key(enrollment)
    }

    fn find(&self, secret: &str, now: Timestamp) -> Result<TokenRecord, TokenRefused> {
        let hash = agent_model::ids::hex(&Token::hash(secret));
        let known = self.known.read();
        // Every token is compared in full, also after one was found.
        let found = known.tokens.values().fold(None, |found, token| {
            if same(token.hash.as_bytes(), hash.as_bytes()) { Some(token) } else { found }
        });
        let token = found.cloned().ok_or(TokenRefused::Unknown)?;
        if token.until < now { Err(TokenRefused::Over) } else { Ok(token) }
    }

    /// Takes effect when it is on disk.
    async fn add(&self, documents: Vec<Document>) -> Result<(), AskError> {
        self.queue.write(documents.clone(), Vec::new()).await?;
        {
            let mut known = self.known.write();
            documents.into_iter().for_each(|document| known.put(document));
        }
        self.withdrawals.send_modify(|changes| *changes += 1);
        Ok(())
    }

    /// Takes effect at once.
    async fn withdraw(&self, documents: Vec<Document>) -> Result<(), AskError> {
        if documents.is_empty() {
            return Ok(());
        }
        let names = documents.iter().map(Document::name).collect();
        {
            let mut known = self.known.write();
            for document in documents {
                match document {
                    Document::Member(member) => drop(known.members.remove(&member.node)),
                    Document::User(user) => drop(known.users.remove(&user.name)),
                    Document::Token(token) => drop(known.tokens.remove(&token.hash)),
                    Document::Removed(removed) => drop(known.removed.remove(&removed.enrollment)),
                    Document::Node(_)
                    | Document::Settled(_)
                    | Document::Pool(_)
                    | Document::Machine(_)
                    | Document::Asset(_)
                    | Document::Life(_) => {}
                }
            }
        }
        self.withdrawals.send_modify(|changes| *changes += 1);
        self.queue.write(Vec::new(), names).await
    }
}
