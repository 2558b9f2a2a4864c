//! The part of a runner that deals with the store of blobs: it brings what the job reads and stores what it left.
//!
//! A store that is elsewhere may answer oddly for a while, and so may whatever is in front of it. What is not its last
//! word is waited for, and whoever asks why the job waits is told what it said. Outputs are safe in the job's directory
//! meanwhile: the wait for them ends when they are stored, when somebody cancels the job, or when the disk runs short.

use std::error::Error;
use std::time::Duration;

use agent_cas::snapshot::{Laid, Unread};
use agent_model::{Digest, causes};
use tokio::time::Instant;
use tracing::warn;

use super::super::backoff::Backoff;
use super::super::fetch::FetchError;
use super::super::journal::Journal;
use super::super::outputs::{CollectError, Collected};
use super::super::{faults, fetch, outputs};
use super::{Runner, unless_stopped};
use crate::config::JobUser;

/// For how long a store is asked again for what it lacks or holds damaged, after everybody else was asked for it.
const DOUBT: Duration = Duration::from_secs(20);

/// How often storing outputs is tried where the store is not what fails.
const ATTEMPTS: u32 = 3;

/// How long outputs wait for room in a store that is on this disk: they take room themselves as long as they wait, and a
/// slot. After that they stay where they are, and can be stored later.
const FOR_ROOM: Duration = Duration::from_secs(10 * 60);

/// How many files that change each time they are read are left out. Where there are more, the outputs are not those that
/// the job left.
const UNSTEADY: usize = 16;

impl<J: Journal> Runner<J> {
    /// Everything the job reads, as soon as the store that holds it gives it; trees that wait for jobs to come make
    /// room for it.
    pub(super) async fn lay_out(&self, user: Option<&JobUser>) -> Result<Vec<(Digest, Laid)>, FetchError> {
        let (store, spares, spec) = (&self.worker.store, &self.worker.spares, &self.record.spec);
        let (mut backoff, mut unsound) = (Backoff::default(), None);
        loop {
            let error = match fetch::lay_out(store, &spares.list(), spec, &self.dir, user).await {
                Err(error) if faults::is_no_space(&error) && spares.give_way().await => continue,
                Err(error) if faults::is_no_space(&error) && self.room().is_err() => {
                    self.until_room().await;
                    continue;
                }
                Err(error) => error,
                laid => return laid,
            };
            let doubtful = store.is_elsewhere() && faults::is_unsound(&error);
            let waits = match doubtful {
                true => unsound.get_or_insert_with(Instant::now).elapsed() < DOUBT,
                false => faults::is_away(&error),
            };
            if !waits {
                return Err(error);
            }
            self.wait_for_store(&error, &mut backoff).await;
        }
    }

    /// Stores the outputs. They are stored of a job that was canceled too; one that is canceled while they are stored
    /// does without them.
    pub(super) async fn collect(&self) -> Result<Collected, CollectError> {
        let (mut backoff, mut attempts, mut waits) = (Backoff::default(), 1, None);
        let (mut unsteady, ends_anyway) = (Vec::new(), !self.desired.borrow().is_run());
        let begun = Instant::now();
        loop {
            let (store, spec) = (&self.worker.store, &self.record.spec);
            let collect = Box::pin(outputs::collect(store, &self.dir, spec, unsteady.clone()));
            let is_first = waits.is_none();
            let attempt = async {
                if let Some(error) = &waits {
                    self.wait_for_store(error, &mut backoff).await;
                }
                collect.await
            };
            let collected = match is_first && ends_anyway {
                true => attempt.await,
                false => match unless_stopped(self.desired.clone(), attempt).await {
                    Ok(collected) => collected,
                    Err(_) => {
                        let why = "the job was canceled meanwhile";
                        return Err(CollectError::given_up(why, waits.unwrap_or(CollectError::Stopped)));
                    }
                },
            };
            waits = None;
            let error = match collected {
                Err(error) => error,
                Ok(collected) => return Ok(collected),
            };
            if faults::is_away(&error) {
                match self.short_of_room().await {
                    Some(why) => return Err(CollectError::given_up(why, error)),
                    None => waits = Some(error),
                }
            } else if attempts < ATTEMPTS {
                attempts += 1;
                warn!(replica = %self.record.replica, %error, "the outputs are not stored yet");
                if faults::is_no_space(&error) {
                    // What found no room is larger than what is free: so much again, each time.
                    let free = agent_node::disk_free(&self.worker.config.state_dir);
                    self.worker.collector.make_room(free.saturating_mul(2)).await;
                }
                tokio::time::sleep(backoff.next()).await;
            } else if faults::is_no_space(&error) && begun.elapsed() < FOR_ROOM {
                let why = format!("waiting for room to store the outputs: {}", causes::tell(&error));
                warn!(replica = %self.record.replica, why);
                self.say(&why);
                if unless_stopped(self.desired.clone(), tokio::time::sleep(backoff.next())).await.is_err() {
                    return Err(CollectError::given_up("the job was canceled meanwhile", error));
                }
            } else if let Some(path) = error.unsteady().filter(|_| unsteady.len() < UNSTEADY) {
                let why = "changed each time it was read: end what still writes to it".to_owned();
                unsteady.push(Unread { path: path.to_owned(), why });
            } else {
                return Err(error);
            }
        }
    }

    async fn wait_for_store(&self, error: &(dyn Error + Send + Sync + 'static), backoff: &mut Backoff) {
        let why = faults::store_says(error);
        warn!(replica = %self.record.replica, why, "waiting for the store of blobs");
        self.say(&format!("waiting for the store of blobs: {why}"));
        tokio::time::sleep(backoff.next()).await;
    }

    /// Why outputs cannot wait here any longer: the node needs the room of its disk for what is to come.
    async fn short_of_room(&self) -> Option<String> {
        self.room().err()?;
        self.worker.collector.make_room(self.worker.config.disk_reserve.saturating_mul(2)).await;
        Some(format!("the node needs the room: {}", self.room().err()?))
    }
}
