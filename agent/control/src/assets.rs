//! The names that users gave to data.
//!
//! Owns the records of assets and the rules of names. Reads are served from memory; one change is made at a time, and
//! takes effect when it is on disk.
//!
//! Invariants: a name belongs to each user apart, so nobody learns the names of others and nobody changes what a name
//! means for others; of names that all may read there is one, so that it means the same for everybody; a version is
//! never changed, only removed; what an asset names stays in the store ([`Assets::pins`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_cas::gc::{Holder, Pin};
use agent_model::asset::{Asset, AssetRef, LATEST, Which, is_asset_word, next_version};
use agent_model::job::Input;
use agent_model::{DataInput, DataUri, JobDraft, Principal};
use parking_lot::RwLock;
use tokio::sync::Mutex;

use crate::queue::{AskError, Queue};
use crate::store::{Document, Loaded};

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
    #[error("you have {MOST} versions of data already")]
    Many,
    #[error("there is no `{asked}`")]
    Unknown {
        asked: String,
        /// What there is of that name.
        known: Vec<String>,
    },
    #[error("`{input}` is one file, and `{reference}` is a folder")]
    Folder { input: String, reference: String },
    #[error(transparent)]
    Ask(#[from] AskError),
}

/// What is to be done with a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AssetWant {
    Archive,
    Restore,
    Remove,
}

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Assets {
    /// By the name of the document.
    known: Arc<RwLock<BTreeMap<String, Asset>>>,
    /// Held during a change.
    changing: Arc<Mutex<()>>,
    queue: Queue,
}

impl Assets {
    pub(crate) fn new(loaded: &Loaded, queue: Queue) -> Assets {
        let all = loaded.all(|one| if let Document::Asset(asset) = one { Some(&**asset) } else { None });
        let known = all.into_iter().map(|asset| (Document::name_of_asset(&asset), asset)).collect();
        Assets { known: Arc::new(RwLock::new(known)), changing: Arc::default(), queue }
    }

    /// All that a user may read; an operator reads everything.
    pub(crate) fn readable(&self, who: &Principal, is_operator: bool) -> Vec<Asset> {
        let known = self.known.read();
        known.values().filter(|asset| is_operator || may_read(asset, who)).cloned().collect()
    }

    /// What must stay in the store.
    pub(crate) fn pins(&self) -> Vec<Pin> {
        let root = |asset: &Asset| match &asset.data {
            Input::Folder(root) | Input::File { root, .. } => Some(*root),
            Input::Literal(_) | Input::Data(_) => None,
        };
        self.known.read().values().filter_map(root).map(|root| Pin::tree(root, Holder::Assets)).collect()
    }

    /// Adds a version; one without a name for it gets the next number. Its labels leave the other versions.
    pub(crate) async fn add(&self, mut asset: Asset) -> Result<Asset, AssetError> {
        let _one = self.changing.lock().await;
        let documents = {
            let known = self.known.read();
            let own: Vec<&Asset> = known.values().filter(|known| known.owner == asset.owner).collect();
            let of_name: Vec<&Asset> = own.iter().copied().filter(|known| known.name == asset.name).collect();
            if asset.version.is_empty() {
                asset.version = next_version(&of_name);
            }
            check(&asset, &own, known.values())?;
            let moved = of_name.into_iter().filter_map(|other| without(other, &asset.labels));
            moved.chain([asset.clone()]).collect::<Vec<_>>()
        };
        self.write(documents).await?;
        Ok(asset)
    }

    /// Archives, restores or removes every version that is meant; returns them as they are then, or were.
    pub(crate) async fn change(
        &self,
        owner: &Principal,
        name: &str,
        version: Option<&str>,
        want: AssetWant,
    ) -> Result<Vec<Asset>, AssetError> {
        let _one = self.changing.lock().await;
        let mut meant: Vec<Asset> = {
            let known = self.known.read();
            let is_meant = |asset: &&Asset| {
                asset.owner.as_ref() == Some(owner)
                    && asset.name == name
                    && version.is_none_or(|version| asset.version == version)
            };
            let meant: Vec<Asset> = known.values().filter(is_meant).cloned().collect();
            if meant.is_empty() {
                let version = version.map(|version| format!(":{version}")).unwrap_or_default();
                let own = known.values().filter(|asset| asset.owner.as_ref() == Some(owner));
                return Err(unknown(&format!("azureml:{name}{version}"), name, own));
            }
            meant
        };
        if want == AssetWant::Remove {
            let names: Vec<String> = meant.iter().map(Document::name_of_asset).collect();
            self.queue.write(Vec::new(), names.clone()).await?;
            let mut known = self.known.write();
            names.iter().for_each(|name| drop(known.remove(name)));
            return Ok(meant);
        }
        meant.iter_mut().for_each(|asset| asset.archived = want == AssetWant::Archive);
        self.write(meant.clone()).await?;
        Ok(meant)
    }

    /// The job with the data itself in place of the names of data. A name that no user gave stays: a node may know it.
    pub(crate) fn resolve(&self, draft: JobDraft, who: &Principal) -> Result<JobDraft, AssetError> {
        let known = self.known.read();
        let mut inputs = draft.inputs.clone();
        for (name, input) in &mut inputs {
            let Input::Data(DataInput { uri: DataUri::Asset(text), is_file, is_own_copy }) = &*input else {
                continue;
            };
            let Some(reference) = AssetRef::parse(text) else { continue };
            let Some(asset) = find(&reference, who, known.values())? else { continue };
            if *is_file && !asset.is_file() {
                let (input, reference) = (format!("inputs.{name}"), reference.to_string());
                return Err(AssetError::Folder { input, reference });
            }
            *input = match &asset.data {
                Input::Data(data) => Input::Data(DataInput { is_own_copy: *is_own_copy, ..data.clone() }),
                sent => sent.clone(),
            };
        }
        Ok(JobDraft { inputs, ..draft })
    }

    async fn write(&self, assets: Vec<Asset>) -> Result<(), AssetError> {
        let documents = assets.iter().cloned().map(|asset| Document::Asset(Box::new(asset))).collect();
        self.queue.write(documents, Vec::new()).await?;
        let mut known = self.known.write();
        known.extend(assets.into_iter().map(|asset| (Document::name_of_asset(&asset), asset)));
        Ok(())
    }
}

fn may_read(asset: &Asset, who: &Principal) -> bool {
    asset.visible_to_all || asset.owner.as_ref() == Some(who)
}

/// The rules for a new version, whose owner has `own`.
fn check<'a>(
    asset: &Asset,
    own: &[&Asset],
    mut all: impl Iterator<Item = &'a Asset>,
) -> Result<(), AssetError> {
    let words = [&asset.name, &asset.version].into_iter().chain(&asset.labels);
    if let Some(wrong) = words.into_iter().find(|word| !is_asset_word(word)) {
        return Err(AssetError::Word(wrong.escape_debug().to_string()));
    }
    if asset.labels.iter().any(|label| label == LATEST) {
        return Err(AssetError::Latest);
    }
    if own.len() >= MOST {
        return Err(AssetError::Many);
    }
    if own.iter().any(|other| (&other.name, &other.version) == (&asset.name, &asset.version)) {
        let which = Which::Version(asset.version.clone());
        return Err(AssetError::Exists(AssetRef { name: asset.name.clone(), which }));
    }
    let is_taken =
        |other: &Asset| other.visible_to_all && other.name == asset.name && other.owner != asset.owner;
    match asset.visible_to_all && all.any(is_taken) {
        true => Err(AssetError::Taken(asset.name.clone())),
        false => Ok(()),
    }
}

/// The asset without these labels, if it has one of them.
fn without(asset: &Asset, labels: &[String]) -> Option<Asset> {
    let mut other = asset.clone();
    other.labels.retain(|label| !labels.contains(label));
    (other.labels != asset.labels).then_some(other)
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

    fn who(uid: u32) -> Principal {
        Principal::Local { uid }
    }

    fn asset(owner: u32, name: &str, version: &str, visible_to_all: bool) -> Asset {
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

    #[test]
    fn test_what_breaks_a_rule_is_not_added() {
        let all = [asset(1, "iris", "1", true), asset(2, "rose", "1", false)];
        let refused = |new: Asset| {
            let own: Vec<&Asset> = all.iter().filter(|known| known.owner == new.owner).collect();
            check(&new, &own, all.iter()).map_err(|error| error.to_string()).err()
        };
        assert_eq!(refused(asset(2, "iris", "1", false)), None, "a name of his own");
        assert!(refused(asset(2, "iris", "1", true)).unwrap().contains("another user"));
        assert!(refused(asset(1, "iris", "1", true)).unwrap().contains("is there already"));
        assert_eq!(refused(asset(1, "iris", "2", true)), None);
        assert!(refused(asset(1, "../x", "2", true)).unwrap().contains("cannot be a name"));
        let latest = Asset { labels: vec!["latest".into()], ..asset(1, "iris", "2", true) };
        assert!(refused(latest).unwrap().contains("nobody sets it"));
    }

    #[test]
    fn test_a_label_leaves_the_version_that_had_it() {
        let old = Asset { labels: vec!["good".into(), "old".into()], ..asset(1, "iris", "1", false) };
        assert_eq!(without(&old, &["good".into()]).unwrap().labels, ["old"]);
        assert_eq!(without(&old, &["other".into()]), None);
    }
}
