//! What an output is that gets a name as data, or that other steps of a pipeline read: looked up when the outcome of its
//! job arrives.
//!
//! An output that is not sent to a store is the part of the stored outputs that it is, so no file is stored twice. It
//! has to be a tree of its own: a link that leads out of it would lead nowhere where the data are read.

use agent_cas::BlobStore;
use agent_cas::gc::{Holder, Pin, Relied};
use agent_cas::snapshot::{self, TreeError};
use agent_model::job::{Input, Output};
use agent_model::pipeline::ARTIFACTS;
use agent_model::{Artifacts, Code, DataInput, Fault, Outcome, ReplicaId, Verdict, causes};
use tonic::Status;

use super::worker::not_yet;
use super::{Refusal, Services};
use crate::queue::assets::FoundOutputs;
use crate::store::Naming;

impl Services {
    /// The outputs of a replica that get names or are read by others, if it can be what completes its job. `relied`
    /// keeps what is written for them.
    pub(super) async fn find_named(
        &self,
        replica: &ReplicaId,
        outcome: &Outcome,
        relied: &Relied<'_>,
    ) -> Result<FoundOutputs, Status> {
        let mut found = FoundOutputs::default();
        if replica.rank != 0 || outcome.verdict != Verdict::Completed {
            return Ok(found);
        }
        let Some(view) = self.queue.job(&replica.job).await.map_err(Refusal::from)? else { return Ok(found) };
        let (is_step, names) = (view.job.made.is_some(), &view.job.spec.output_names);
        if let Some(stored) = outcome.artifacts.filter(|_| is_step) {
            found.made.insert(ARTIFACTS.to_owned(), Input::Folder(stored.root));
        }
        for (output, kind) in &view.job.spec.outputs {
            if !is_step && !names.contains_key(output) {
                continue;
            }
            let left = self.left_in(outcome.artifacts, output, kind, relied).await?;
            if is_step {
                found.made.remove(output); // a step may have an output of its own with that name
                found.made.extend(left.iter().map(|left| (output.clone(), left.clone())));
            }
            if !names.contains_key(output) {
                continue;
            }
            let naming = match left {
                Ok(left) => Naming::Found(match kind.data() {
                    Some(sent) => {
                        let (uri, is_file) = (sent.uri_of(&replica.job), sent.is_file);
                        Input::Data(DataInput { uri, is_file, is_own_copy: false })
                    }
                    None => left,
                }),
                Err(why) => Naming::Unnamed(why),
            };
            found.named.insert(output.clone(), naming);
        }
        Ok(found)
    }

    /// What the job left in an output, or why that can get no name.
    async fn left_in(
        &self,
        stored: Option<Artifacts>,
        output: &str,
        kind: &Output,
        relied: &Relied<'_>,
    ) -> Result<Result<Input, String>, Status> {
        let nothing = || Ok(Err("the job left nothing there".to_owned()));
        let Some(stored) = stored else { return nothing() };
        let path = format!("named-outputs/{output}");
        let folder = match snapshot::part(&self.blobs, stored.root, &path).await {
            Ok(Some(folder)) => folder,
            Ok(None) => return nothing(),
            Err(error) => return unusable(&error),
        };
        if !kind.is_file() {
            return Ok(Ok(Input::Folder(folder)));
        }
        let (root, message) = match snapshot::file_alone(&self.blobs, folder, output).await {
            Ok(Some(alone)) => alone,
            Ok(None) => return Ok(Err("the job left no file there".to_owned())),
            Err(error) => return unusable(&error),
        };
        relied.add(vec![Pin::blob(root, Holder::Outputs)]);
        let written = self.blobs.write_batch(vec![(root, message)]).await;
        written.into_iter().collect::<Result<(), _>>().map_err(|error| unstored(&error))?;
        Ok(Ok(Input::File { root, name: output.to_owned() }))
    }
}

/// A store that does not answer is asked again with the next delivery; a tree that cannot stand alone gets no name.
fn unusable(error: &TreeError) -> Result<Result<Input, String>, Status> {
    match error {
        TreeError::Read(_) => Err(unstored(error)),
        other => Ok(Err(causes::tell(other))),
    }
}

fn unstored(error: &(dyn std::error::Error + 'static)) -> Status {
    not_yet(
        Fault::new(Code::ControllerStore, "the named outputs cannot be looked up").why(causes::tell(error)),
    )
}
