//! The names that users and jobs gave to data.
//!
//! Owns the records of assets and the rules of names. Reads are served from memory. Changes are made by the task of the
//! queue, one at a time ([`Register`]), so a job that ends names its outputs in the commit with which it ends; a change
//! takes effect when it is on disk.
//!
//! Invariants: a name belongs to each user apart, so nobody learns the names of others and nobody changes what a name
//! means for others; of names that all may read there is one, so that it means the same for everybody; a version is
//! never changed, only removed; what an asset names stays in the store ([`Assets::pins`]).

mod register;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use agent_cas::gc::{Holder, Pin};
use agent_model::asset::{Asset, LATEST};
use agent_model::data::AssetRef;
use agent_model::job::Input;
use agent_model::{DataInput, DataUri, JobDraft, Principal};
use parking_lot::RwLock;

use crate::queue::{AskError, Queue};
use crate::store::Naming;
use register::Names;
pub(crate) use register::Register;

/// How many versions a user may have, of all names together.
const MOST: usize = 10_000;

/// Why an asset is not added, changed or found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AssetError {
    #[error("`{0}` cannot be a name, a version or a label")]
    Word(String),
    #[error("`{LATEST}` is the label of the version that was added last: nobody sets it")]
    Latest,
    #[error("`{0}` is there already")]
    Exists(AssetRef),
    #[error("another user has data for everybody with the name `{0}`")]
    Taken(String),
    #[error("`{0}` is a name of the operator's `data_map`")]
    Mapped(String),
    #[error("you have {MOST} versions of data already")]
    Many,
    #[error("there is no `{asked}`")]
    Unknown { asked: String, known: Vec<String> },
    #[error("`{input}` is one file, and `{reference}` is a folder")]
    Folder { input: String, reference: String },
    #[error(transparent)]
    Ask(#[from] AskError),
}

/// What a user wants to do with his versions of a name.
#[derive(Debug, Clone)]
pub(crate) struct AssetChange {
    pub(crate) owner: Principal,
    pub(crate) name: String,
    /// All of them when absent.
    pub(crate) version: Option<String>,
    pub(crate) want: AssetWant,
}

/// What is to be done with a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AssetWant {
    Archive,
    Restore,
    Remove,
    /// To another owner.
    HandTo(Principal),
}

/// What a replica left in its outputs.
#[derive(Debug, Default)]
pub(crate) struct FoundOutputs {
    /// Of those that get names.
    pub(crate) named: BTreeMap<String, Naming>,
    /// Of a step of a pipeline: of all in which it left something.
    pub(crate) made: BTreeMap<String, Input>,
}

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Assets {
    names: Arc<RwLock<Names>>,
    queue: Queue,
}

impl Assets {
    pub(crate) fn new(register: &Register, queue: Queue) -> Assets {
        Assets { names: Arc::clone(&register.0), queue }
    }

    /// All that a user may read; an operator reads everything.
    pub(crate) fn readable(&self, who: &Principal, is_operator: bool) -> Vec<Asset> {
        let names = self.names.read();
        names.known.values().filter(|asset| is_operator || may_read(asset, who)).cloned().collect()
    }

    /// What must stay in the store.
    pub(crate) fn pins(&self) -> Vec<Pin> {
        let names = self.names.read();
        let all = names.known.values().chain(names.coming.values().flatten());
        all.filter_map(|asset| asset.data.snapshot()).map(|root| Pin::tree(root, Holder::Assets)).collect()
    }

    /// Adds a version; one without a name for it gets the next number. Its labels leave the other versions.
    pub(crate) async fn add(&self, asset: Asset) -> Result<Asset, AssetError> {
        self.queue.add_asset(asset).await?
    }

    /// The names of data that somebody has.
    pub(crate) fn names_of(&self, who: &Principal) -> BTreeSet<String> {
        let names = self.names.read();
        names
            .all()
            .filter(|asset| asset.owner.as_ref() == Some(who))
            .map(|asset| asset.name.clone())
            .collect()
    }

    /// Archives, restores, removes or hands over every version that is meant; returns them as they are then, or were.
    pub(crate) async fn change(&self, change: AssetChange) -> Result<Vec<Asset>, AssetError> {
        self.queue.change_assets(change).await?
    }

    /// Whether no output of the job is to be a version that is there already.
    pub(crate) fn require_free(&self, draft: &JobDraft, who: &Principal) -> Result<(), AssetError> {
        let names = self.names.read();
        let wanted = draft.output_names.values().filter_map(|name| Some((name, name.reference()?)));
        for (name, reference) in wanted {
            let is_it = |asset: &&Asset| {
                asset.owner.as_ref() == Some(who)
                    && asset.name == name.name
                    && Some(&asset.version) == name.version.as_ref()
            };
            if names.all().any(|asset| is_it(&asset)) {
                return Err(AssetError::Exists(reference));
            }
        }
        Ok(())
    }

    /// The job with the data itself in place of the names of data, and for people what is not his own. A name that no user
    /// gave stays: a node may know it; so does one of another user that is among those of the operator's `data_map`.
    pub(crate) fn resolve(
        &self,
        draft: JobDraft,
        who: &Principal,
        mapped: &BTreeSet<String>,
    ) -> Result<(JobDraft, Vec<String>), AssetError> {
        let (names, mut notes) = (self.names.read(), Vec::new());
        let mut inputs = draft.inputs.clone();
        for (name, input) in &mut inputs {
            let Input::Data(DataInput { uri: DataUri::Asset(text), is_file, is_own_copy }) = &*input else {
                continue;
            };
            let Some(reference) = AssetRef::parse(text) else { continue };
            let is_own = |asset: &&Asset| asset.owner.as_ref() == Some(who);
            let known = names.known.values();
            let asset = match mapped.contains(&reference.name) {
                true => find(&reference, who, known.filter(is_own))?,
                false => find(&reference, who, known)?,
            };
            let Some(asset) = asset else { continue };
            if !is_own(&asset) {
                let whose = asset.owner.as_ref().map_or("somebody".to_owned(), Principal::to_string);
                let (of, version) = (&reference.name, &asset.version);
                notes.push(format!("inputs.{name} reads azureml:{of}:{version}, which {whose} made"));
            }
            if *is_file && !asset.is_file() {
                let (input, reference) = (format!("inputs.{name}"), reference.to_string());
                return Err(AssetError::Folder { input, reference });
            }
            *input = match &asset.data {
                Input::Data(data) => Input::Data(DataInput { is_own_copy: *is_own_copy, ..data.clone() }),
                sent => sent.clone(),
            };
        }
        Ok((JobDraft { inputs, ..draft }, notes))
    }
}

fn may_read(asset: &Asset, who: &Principal) -> bool {
    asset.visible_to_all || asset.owner.as_ref() == Some(who)
}

/// What a reference of a user means: his own data go before those of others. `None` where nobody gave the name.
fn find<'a>(
    reference: &AssetRef,
    who: &Principal,
    all: impl Iterator<Item = &'a Asset>,
) -> Result<Option<&'a Asset>, AssetError> {
    let readable: Vec<&Asset> =
        all.filter(|asset| asset.name == reference.name && may_read(asset, who)).collect();
    let (own, others): (Vec<&Asset>, Vec<&Asset>) =
        readable.into_iter().partition(|asset| asset.owner.as_ref() == Some(who));
    let meant = if own.is_empty() { others } else { own };
    match (reference.of(&meant), meant.is_empty()) {
        (Some(asset), _) => Ok(Some(asset)),
        (None, true) => Ok(None),
        (None, false) => Err(unknown(&reference.to_string(), &reference.name, meant.into_iter())),
    }
}

fn unknown<'a>(asked: &str, name: &str, all: impl Iterator<Item = &'a Asset>) -> AssetError {
    let known = all.filter(|asset| asset.name == name).map(|asset| asset.version.clone()).collect();
    AssetError::Unknown { asked: asked.to_owned(), known }
}

#[cfg(test)]
mod tests {
    use agent_model::{Digest, Timestamp};

    use super::*;

    pub(super) fn who(uid: u32) -> Principal {
        Principal::Local { uid }
    }

    pub(super) fn asset(owner: u32, name: &str, version: &str, visible_to_all: bool) -> Asset {
        Asset {
            name: name.into(),
            version: version.into(),
            labels: Vec::new(),
            data: Input::Folder(Digest { size: u64::from(owner), ..Digest::EMPTY }),
            description: String::new(),
            owner: Some(who(owner)),
            visible_to_all,
            added_at: Timestamp(1),
            archived: false,
        }
    }

    #[test]
    fn test_a_name_means_the_callers_own_data_first_then_what_all_may_read() {
        let all = [asset(1, "iris", "1", true), asset(2, "iris", "1", false), asset(2, "rose", "1", false)];
        let found = |reference: &str, uid: u32| {
            let found = find(&AssetRef::parse(reference).unwrap(), &who(uid), all.iter());
            found
                .map(|asset| asset.map(|asset| asset.owner.clone().unwrap()))
                .map_err(|error| error.to_string())
        };
        assert_eq!(found("iris:1", 1), Ok(Some(who(1))));
        assert_eq!(found("iris@latest", 2), Ok(Some(who(2))));
        assert_eq!(found("iris:1", 3), Ok(Some(who(1))));
        assert_eq!(found("rose:1", 3), Ok(None), "nobody learns that it exists");
        assert_eq!(found("iris:9", 3), Err("there is no `azureml:iris:9`".to_owned()));
    }
}
