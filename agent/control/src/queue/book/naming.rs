//! The part of the book about names of data, the outputs that get one, and those that other steps read.
//!
//! An output gets its name with the end of its job, in the same commit: so it is given once, also if the controller is
//! killed, and whoever sees that the job completed sees the name. Of several ranks the first one's output counts.

use std::collections::BTreeMap;

use agent_model::asset::Asset;
use agent_model::job::OutputName;
use agent_model::{JobId, JobState, NodeId, ReplicaId};

use super::{Book, Moment, Standing};
use crate::queue::assets::{AssetChange, AssetError, FoundOutputs, Register};
use crate::store::Naming;

impl Book {
    /// The names of data, for whoever reads them.
    pub(crate) fn names(&self) -> Register {
        self.names.shared()
    }

    /// The names that were on their way are on disk: all see them.
    pub(crate) fn show_names(&mut self) {
        self.names.written();
    }

    pub(crate) fn add_asset(&mut self, asset: Asset) -> Result<Asset, AssetError> {
        self.urgent = true;
        self.names.add(asset)
    }

    pub(crate) fn change_assets(&mut self, change: &AssetChange) -> Result<Vec<Asset>, AssetError> {
        self.urgent = true;
        self.names.change(change)
    }

    /// Keeps what the outputs of a replica are that get names or are read by other steps, until its job ends.
    pub(crate) fn note_found(&mut self, replica: &ReplicaId, node: &NodeId, found: FoundOutputs) {
        let FoundOutputs { named, made } = found;
        let is_nothing = named.is_empty() && made.is_empty();
        if replica.rank == 0 && !is_nothing && self.standing(replica, node) == Standing::Open {
            self.jobs.edit(&replica.job, |job| {
                job.named = named;
                job.made.iter_mut().for_each(|known| known.clone_from(&made));
            });
        }
    }

    /// The job has ended: its outputs get their names if it completed.
    pub(super) fn name_outputs(&mut self, id: &JobId, now: Moment) {
        let Some(job) = self.jobs.get(id).filter(|job| !job.named.is_empty()) else { return };
        let job = std::sync::Arc::clone(job);
        let owner = job.owner();
        let mut named = BTreeMap::new();
        if job.state == JobState::Completed {
            for (output, found) in &job.named {
                let Some(OutputName { name, version }) = job.spec.output_names.get(output) else { continue };
                let asset = |data| Asset {
                    name: name.clone(),
                    version: version.clone().unwrap_or_default(),
                    labels: Vec::new(),
                    data,
                    description: format!("output `{output}` of {id}"),
                    owner: owner.cloned(),
                    visible_to_all: false,
                    added_at: now.wall,
                    archived: false,
                };
                let naming = match found.clone() {
                    Naming::Found(_) if owner.is_none() => {
                        Naming::Unnamed("nobody knows whose it is".to_owned())
                    }
                    Naming::Found(data) => match self.names.add(asset(data)) {
                        Ok(asset) => Naming::Named(asset.version),
                        Err(error) => Naming::Unnamed(error.to_string()),
                    },
                    other => other,
                };
                let told = match &naming {
                    Naming::Unnamed(why) => format!("output `{output}` is not named `{name}`: {why}"),
                    Naming::Named(version) => format!("output `{output}` is `azureml:{name}:{version}`"),
                    Naming::Found(_) => continue, // never: it was named
                };
                self.jobs.tell(id, None, now, told);
                named.insert(output.clone(), naming);
            }
        }
        self.jobs.edit(id, |job| job.named = named);
    }
}
