//! Sends outputs to the data stores that the job names, after its command has ended.
//!
//! Owns when: whether the stores take them is asked before the command is started, so that nobody learns it after
//! hours; they are sent once all that the controller keeps is stored, so that nothing is lost with a store. Hides
//! retries.
//!
//! Invariants: an attempt that is cut, by the end of the daemon too, is repeated and sends what is missing; trouble
//! that may pass is waited out for a while, and the view says what is waited for; neither a job that is canceled nor a
//! machine that will be taken away waits for a store; the replica ends in any case.

use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use agent_model::{DataOutput, Fault, causes};
use agent_runtime::data::Uploaded;
use agent_runtime::env::{Phase, Progress};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Runner, Step, or_end};
use crate::worker::backoff::Backoff;
use crate::worker::data::SendingOutput;
use crate::worker::faults::{self, Ending, Unsent};

/// How long a store that does not take an output is asked again: what a job computed in hours is worth some minutes.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

impl Runner {
    /// Fails if the node knows already that it cannot send an output.
    pub(super) async fn check_destinations(&self) -> Step<()> {
        for (name, output) in self.sent_outputs() {
            let target = self.worker.data.target(output, &self.record.replica.job, None).await;
            or_end(target.map(drop).map_err(|error| {
                faults::unsent(name, &output.uri_of(&self.record.replica.job), &Unsent::Failed(error))
            }))?;
        }
        Continue(())
    }

    /// Sends all of them; returns why not, of each that could not be sent, and what was left out of the others. What did
    /// not begin left nothing, and what ends because its machine is taken away is done again.
    pub(super) async fn send_outputs(&self, ending: &Ending) -> (Option<Fault>, Vec<String>) {
        let (mut fault, mut all_left_out, begun) = (None, Vec::new(), Instant::now());
        if ending.started_at.is_none() || self.record.preempted.is_some() {
            return (fault, all_left_out);
        }
        for (name, output) in self.sent_outputs() {
            let (told, uri) = (watch::Sender::new(None), output.uri_of(&self.record.replica.job));
            let sent = tokio::select! {
                sent = self.send_one(name, output, begun, &told) => sent,
                _ = self.noticed() => Err(Unsent::Leaving),
                never = self.follow_progress(told.subscribe()) => match never {},
            };
            let replica = &self.record.replica;
            match sent {
                Ok(Uploaded { files, bytes, left_out }) => {
                    info!(%replica, output = name, %uri, files, bytes, ?left_out, "sent output to data store");
                    // With the controller they are all the same.
                    all_left_out.extend(left_out.iter().map(|why| {
                        format!("outputs.{name}: {why}; it is not in {uri}, but in `agentctl download`")
                    }));
                }
                Err(error) => {
                    let unsent = faults::unsent(name, &uri, &error);
                    warn!(%replica, output = name, fault = %unsent, "cannot send output to data store");
                    fault = Some(match fault.take() {
                        Some(first) => Fault::and(first, &unsent),
                        None => unsent,
                    });
                }
            }
        }
        (fault, all_left_out)
    }

    /// The outputs that this rank sends: a single file is that of the first rank.
    fn sent_outputs(&self) -> impl Iterator<Item = (&str, &DataOutput)> {
        let is_first = self.record.replica.rank == 0;
        let sent = self
            .record
            .spec
            .outputs
            .iter()
            .filter_map(|(name, output)| Some((name.as_str(), output.data()?)));
        sent.filter(move |(_, output)| is_first || !output.is_file)
    }

    async fn send_one(
        &self,
        name: &str,
        output: &DataOutput,
        begun: Instant,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<Uploaded, Unsent> {
        let owner = self.record.user.as_ref().map(|user| (user.uid, user.gid));
        let sending = SendingOutput { name, output, replica: &self.record.replica, dir: &self.dir, owner };
        let (mut backoff, ends_anyway) = (Backoff::default(), !self.desired.borrow().is_run());
        loop {
            let sent = self.worker.data.send(&sending, told);
            let sent = match ends_anyway {
                true => sent.await,
                false => match self.unless_canceled(sent).await {
                    Continue(sent) => sent,
                    Break(_) => return Err(Unsent::Canceled),
                },
            };
            let error = match sent {
                Err(error) if error.is_passing() && !ends_anyway && begun.elapsed() < PATIENCE => error,
                sent => return sent.map_err(Unsent::Failed),
            };
            let what = format!("for the data store of `outputs.{name}`: {}", causes::tell(&error));
            let tell = |what: &str| drop(told.send_replace(Some(Progress::of(Phase::Waiting, what))));
            if self.unless_canceled(self.wait_telling(&mut backoff, &what, tell)).await.is_break() {
                return Err(Unsent::Failed(error));
            }
        }
    }
}
