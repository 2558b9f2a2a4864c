//! Lists of a controller, which come in pages: each is asked for after the last entry of the one before.

use agent_proto::v1;

use super::{Client, answer, with_people};
use crate::failure::Failure;

/// Jobs asked for at a time.
const PAGE: u32 = 500;

/// Where a list goes on; `None` at its end.
fn next_after<T>(more: bool, entries: &[T], key: impl Fn(&T) -> String) -> Option<String> {
    entries.last().filter(|_| more).map(key)
}

/// All entries of a list. `page` gives those after a key, and whether there are more.
async fn all_pages<T>(
    page: impl AsyncFn(String) -> Result<(Vec<T>, bool), Failure>,
    key: impl Fn(&T) -> String,
) -> Result<Vec<T>, Failure> {
    let (mut all, mut next) = (Vec::new(), Some(String::new()));
    while let Some(after) = next {
        let (entries, more) = page(after).await?;
        next = next_after(more, &entries, &key);
        all.extend(entries);
    }
    Ok(all)
}

impl Client {
    /// The latest jobs that are no tasks, newest first, at most so many.
    pub(crate) async fn latest_jobs(&self, most: u32) -> Result<Vec<v1::Job>, Failure> {
        let (mut jobs, mut after) = (Vec::new(), String::new());
        loop {
            let missing = most.saturating_sub(u32::try_from(jobs.len()).unwrap_or(u32::MAX));
            let request = v1::ListJobsRequest { limit: missing.min(PAGE), after, ..Default::default() };
            let page = answer(self.jobs().list(request)).await?;
            let next = next_after(page.more, &page.jobs, |job| job.job.clone());
            jobs.extend(page.jobs);
            match next {
                Some(next) if jobs.len() < most as usize => after = next,
                _ => return Ok(jobs),
            }
        }
    }

    /// What happened to a job, in order.
    pub(crate) async fn history(&self, job: &str) -> Result<Vec<v1::HistoryEvent>, Failure> {
        let mut events: Vec<v1::HistoryEvent> = Vec::new();
        loop {
            let request = v1::GetJobRequest { job: job.to_owned(), after_events: events.len() as u64 };
            let page = answer(self.jobs().history(request)).await?;
            let more = page.more && !page.events.is_empty();
            events.extend(
                page.events
                    .into_iter()
                    .map(|event| v1::HistoryEvent { text: with_people(&event.text), ..event }),
            );
            if !more {
                return Ok(events);
            }
        }
    }

    /// The machines and the controller.
    pub(crate) async fn machines(&self) -> Result<v1::ListNodesResponse, Failure> {
        let mut all = answer(self.nodes().list(v1::ListNodesRequest::default())).await?;
        let mut next = next_after(all.more, &all.nodes, |node| node.node.clone());
        while let Some(after) = next {
            let page = answer(self.nodes().list(v1::ListNodesRequest { after })).await?;
            next = next_after(page.more, &page.nodes, |node| node.node.clone());
            all.nodes.extend(page.nodes);
            // What each page says of the controller itself is the same.
            let said = page.controller.map(|controller| controller.notices).unwrap_or_default();
            if let Some(controller) = &mut all.controller {
                let new = said.into_iter().filter(|notice| !controller.notices.contains(notice));
                let new: Vec<v1::Notice> = new.collect();
                controller.notices.extend(new);
            }
        }
        Ok(all)
    }

    /// The versions of data of this name that the caller may read; with an empty one, of all names.
    pub(crate) async fn names_of_data(&self, name: &str) -> Result<Vec<v1::Asset>, Failure> {
        let page = async |after: String| {
            let page =
                answer(self.assets().list(v1::ListAssetsRequest { name: name.to_owned(), after })).await?;
            Ok((page.assets, page.more))
        };
        all_pages(page, |asset| asset.key.clone()).await
    }

    /// The tokens that the controller remembers.
    pub(crate) async fn tokens(&self) -> Result<Vec<v1::TokenInfo>, Failure> {
        let page = async |after: String| {
            let page = answer(self.identity().list_tokens(v1::ListTokensRequest { after })).await?;
            Ok((page.tokens, page.more))
        };
        all_pages(page, |token| token.id.clone()).await
    }

    /// The users of the controller.
    pub(crate) async fn users(&self) -> Result<Vec<v1::User>, Failure> {
        let page = async |after: String| {
            let page = answer(self.identity().list_users(v1::ListUsersRequest { after })).await?;
            Ok((page.users, page.more))
        };
        all_pages(page, |user| user.name.clone()).await
    }

    /// The names of the caller's secrets.
    pub(crate) async fn secret_names(&self) -> Result<Vec<v1::SecretName>, Failure> {
        let page = async |after: String| {
            let page = answer(self.secrets().list(v1::ListSecretsRequest { after })).await?;
            Ok((page.secrets, page.more))
        };
        all_pages(page, |secret| secret.name.clone()).await
    }

    /// The pools, and the providers that the controller knows.
    pub(crate) async fn all_pools(&self) -> Result<v1::ListPoolsResponse, Failure> {
        let mut all = answer(self.pools().list(v1::ListPoolsRequest::default())).await?;
        let mut next = next_after(all.more, &all.pools, |pool| pool.name.clone());
        while let Some(after) = next {
            let page = answer(self.pools().list(v1::ListPoolsRequest { after })).await?;
            next = next_after(page.more, &page.pools, |pool| pool.name.clone());
            all.pools.extend(page.pools);
        }
        Ok(all)
    }
}
