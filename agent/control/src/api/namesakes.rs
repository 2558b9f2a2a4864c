//! What a user who was removed left, and whose it is when somebody gets that name again.
//!
//! Owns that decision. A name alone does not say who somebody is: whoever gets the name of a removed user is asked for as
//! the same person, who has everything as before, or as a new one, who has nothing of it.
//!
//! Invariant: to a new person belongs no job, name of data or secret from before. For that no job of the name may be
//! going on: it would get the secrets of the new one.

use agent_model::words::count;
use agent_model::{Code, Fault, JobId, Principal, Timestamp, UserName};

use super::{Refusal, Services, invalid};
use crate::queue::assets::{AssetChange, AssetWant};
use crate::secrets::Secrets;

/// How many records are read at a time.
const AT_A_TIME: u32 = 1000;

/// What is there in a name.
#[derive(Debug, Default)]
struct Remains {
    ended: usize,
    going_on: Vec<JobId>,
    data: Vec<String>,
    secrets: usize,
}

impl Remains {
    fn is_nothing(&self) -> bool {
        self.ended == 0 && self.going_on.is_empty() && self.data.is_empty() && self.secrets == 0
    }

    fn told(&self) -> String {
        let jobs = self.ended + self.going_on.len();
        let parts = [(jobs, "job"), (self.data.len(), "name of data"), (self.secrets, "secret")];
        let parts = parts.into_iter().filter(|(number, _)| *number > 0);
        parts
            .map(|(number, what)| match (number, what) {
                (1, _) | (_, "job" | "secret") => count(number as u64, what),
                _ => format!("{number} names of data"),
            })
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl Services {
    /// Since when jobs of the name are those of whoever is made a user now; `None` for all. The same person has what was
    /// his, and that is not what was of others before him. A new person's predecessor loses the secrets, and his names of
    /// data become the operators'.
    pub(super) async fn owns_since(
        &self,
        name: &UserName,
        person: &str,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, Refusal> {
        if !["", "same", "new"].contains(&person) {
            return Err(invalid(format!("`{person}` is neither same nor new")).into());
        }
        if self.gate.registry.has_user(name) {
            return match person {
                "new" => Err(Fault::new(Code::NameUsed, format!("{name} is a user"))
                    .fix(format!(
                        "if another person is to have this name, first: agentctl user remove {name}"
                    ))
                    .into()),
                _ => Ok(None),
            };
        }
        let who = Principal::User { name: name.clone() };
        let before = self.gate.registry.owns_since(&who);
        let left = self.left_by(&who).await?;
        match person {
            _ if left.is_nothing() || person == "same" => Ok(before),
            "new" => self.disinherit(&who, left).await.map(|()| Some(now)),
            _ => Err(Fault::new(Code::NameUsed, format!("there was a user {name} before, who was removed"))
                .why(format!("there is still of that name: {}", left.told()))
                .fix("say who this is: `--same-person` gives it all back, with `--new-person` it is the operators'")
                .into()),
        }
    }

    async fn left_by(&self, who: &Principal) -> Result<Remains, Refusal> {
        let mut left =
            Remains { data: self.assets.names_of(who).into_iter().collect(), ..Remains::default() };
        self.queue.flush().await?;
        let mut after = 0;
        loop {
            let jobs = self.store.oldest(after, AT_A_TIME).await?;
            let Some(last) = jobs.last() else { break };
            after = last.seq;
            for job in jobs.into_iter().filter(|job| job.owner() == Some(who)) {
                match job.state.is_terminal() {
                    true => left.ended += 1,
                    false => left.going_on.push(job.id),
                }
            }
        }
        let owner = who.clone();
        left.secrets = self.with_secrets(move |secrets: &Secrets| secrets.list(&owner)).await?.len();
        Ok(left)
    }

    async fn disinherit(&self, who: &Principal, left: Remains) -> Result<(), Refusal> {
        if let Some(job) = left.going_on.first() {
            return Err(Fault::new(Code::JobActive, format!("jobs of the one who was {who} have not ended"))
                .why(format!("{}, {job} among them", count(left.going_on.len() as u64, "job")))
                .fix("let them end, or end them: agentctl cancel JOB; then repeat this")
                .into());
        }
        let heir = super::Caller::own(&self.gate).who().clone();
        for name in left.data {
            let want = AssetWant::HandTo(heir.clone());
            self.assets.change(AssetChange { owner: who.clone(), name, version: None, want }).await?;
        }
        let owner = who.clone();
        self.with_secrets(move |secrets: &Secrets| secrets.remove_all(&owner)).await
    }
}
