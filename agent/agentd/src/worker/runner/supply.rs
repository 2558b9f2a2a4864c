//! Gets the data that a job names by address, before its files are laid out.
//!
//! Invariants: trouble that may pass is waited out for a while, and the view says what is waited for; a stop ends it at
//! once, and what was fetched until then is used by the next job that wants it.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::job::Input;
use agent_model::{DataInput, Stream, causes, size};
use agent_runtime::env::{Phase, Progress, note};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Runner, Step, or_end};
use crate::worker::backoff::Backoff;
use crate::worker::data::{Supply, SupplyError};
use crate::worker::{faults, outputs};

/// How long a server that does not answer is asked again.
const PATIENCE: Duration = Duration::from_secs(300);

impl Runner {
    /// Gets all of it, by the names of the inputs.
    pub(super) async fn supply(&self) -> Step<BTreeMap<String, Supply>> {
        let mut supplies = BTreeMap::new();
        for (name, input) in &self.record.spec.inputs {
            let Input::Data(input) = input else { continue };
            let told = watch::Sender::new(None);
            let supplied = tokio::select! {
                supplied = self.unless_stopped(self.supply_one(name, input, &told)) => supplied?,
                never = self.follow_progress(told.subscribe()) => match never {},
            };
            let supply = or_end(supplied.map_err(|error| faults::data(name, input, &error)))?;
            self.note_supply(name, input, &supply);
            supplies.insert(name.clone(), supply);
        }
        std::ops::ControlFlow::Continue(supplies)
    }

    async fn supply_one(
        &self,
        name: &str,
        input: &DataInput,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<Supply, SupplyError> {
        let (begun, mut backoff) = (Instant::now(), Backoff::default());
        loop {
            let error = match self.worker.data.supply(input, told).await {
                Err(error) if error.is_no_room() && self.worker.disk.room().is_err() => {
                    self.until_room().await;
                    continue;
                }
                Err(error) if error.is_passing() && begun.elapsed() < PATIENCE => error,
                supplied => return supplied,
            };
            let what = format!("for the data of `inputs.{name}`: {}", causes::tell(&error));
            let tell = |what: &str| drop(told.send_replace(Some(Progress::of(Phase::Waiting, what))));
            self.wait_telling(&mut backoff, &what, tell).await;
        }
    }

    /// A line for the build log.
    fn note_supply(&self, name: &str, input: &DataInput, supply: &Supply) {
        let what = match supply {
            Supply::Here(path) => format!("is {}", path.display()),
            Supply::Fetched(held) => {
                let (files, bytes) = held.size;
                let how = if held.is_new { "was fetched" } else { "was here already" };
                let count = if files == 1 { String::new() } else { format!("{files} files, ") };
                format!("{how}: {count}{}", size::binary(bytes))
            }
        };
        let log = self.dir.log(Stream::Build);
        note(&log, &format!("{} ({name}) {what}\n", input.uri));
        self.shipping.build.written(outputs::length(&log));
    }
}
