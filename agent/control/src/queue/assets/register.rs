//! The names as the task of the queue changes them.
//!
//! Owns which changes are allowed, and those that are not on disk yet: they count for the changes after them, and for
//! nobody else. Only the [`Book`](crate::queue::Book) has a register, so two changes are never made at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_model::Principal;
use agent_model::asset::{Asset, LATEST, next_version};
use agent_model::data::{AssetRef, Which, is_asset_word};
use parking_lot::RwLock;

use super::{AssetChange, AssetError, AssetWant, MOST, unknown};
use crate::store::{Changes, Document, Loaded};

/// All names, by the names of their documents.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// As they are on disk.
    pub(super) known: BTreeMap<String, Asset>,
    /// Changes that are not on disk yet: `None` where one is removed.
    pub(super) coming: BTreeMap<String, Option<Asset>>,
}

impl Names {
    /// All of them, with the changes that are not on disk yet.
    pub(super) fn all(&self) -> impl Iterator<Item = &Asset> {
        let lasting = self.known.iter().filter(|(document, _)| !self.coming.contains_key(*document));
        lasting.map(|(_, asset)| asset).chain(self.coming.values().flatten())
    }

    /// Gives versions to another owner. One that he has of that name already gets the next number there.
    fn hand(&mut self, versions: Vec<Asset>, heir: &Principal) -> Vec<Asset> {
        let mut handed = Vec::new();
        for old in versions {
            let is_his = |known: &&Asset| known.owner.as_ref() == Some(heir) && known.name == old.name;
            let his: Vec<&Asset> = self.all().filter(is_his).collect();
            let mut new = Asset { owner: Some(heir.clone()), ..old.clone() };
            if his.iter().any(|known| known.version == new.version) {
                new.version = next_version(&his);
            }
            let labels: Vec<&String> = his.iter().flat_map(|known| &known.labels).collect();
            new.labels.retain(|label| !labels.contains(&label));
            self.coming.insert(Document::name_of_asset(&old), None);
            self.coming.insert(Document::name_of_asset(&new), Some(new.clone()));
            handed.push(new);
        }
        handed
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Register(pub(super) Arc<RwLock<Names>>);

impl Register {
    pub(crate) fn new(loaded: &Loaded) -> Register {
        let all = loaded.all(|one| if let Document::Asset(asset) = one { Some(&**asset) } else { None });
        let known = all.into_iter().map(|asset| (Document::name_of_asset(&asset), asset)).collect();
        Register(Arc::new(RwLock::new(Names { known, coming: BTreeMap::new() })))
    }

    /// The same names, for whoever reads them.
    pub(crate) fn shared(&self) -> Register {
        Register(Arc::clone(&self.0))
    }

    /// Adds a version; one without a name for it gets the next number. Its labels leave the other versions.
    pub(crate) fn add(&mut self, mut asset: Asset) -> Result<Asset, AssetError> {
        let mut names = self.0.write();
        let own: Vec<&Asset> = names.all().filter(|known| known.owner == asset.owner).collect();
        let of_name: Vec<&Asset> = own.iter().copied().filter(|known| known.name == asset.name).collect();
        if asset.version.is_empty() {
            asset.version = next_version(&of_name);
        }
        check(&asset, &own, names.all())?;
        let moved = of_name.into_iter().filter_map(|other| without(other, &asset.labels));
        let changed: Vec<Asset> = moved.chain([asset.clone()]).collect();
        names.coming.extend(changed.into_iter().map(|one| (Document::name_of_asset(&one), Some(one))));
        Ok(asset)
    }

    /// Archives, restores, removes or hands over every version that is meant; returns them as they are then, or were.
    pub(crate) fn change(&mut self, change: &AssetChange) -> Result<Vec<Asset>, AssetError> {
        let AssetChange { owner, name, version, want } = change;
        let mut names = self.0.write();
        let is_own = |asset: &&Asset| asset.owner.as_ref() == Some(owner);
        let is_meant = |asset: &&Asset| {
            asset.name == *name && version.as_ref().is_none_or(|version| asset.version == *version)
        };
        let mut meant: Vec<Asset> = names.all().filter(is_own).filter(is_meant).cloned().collect();
        if meant.is_empty() {
            let version = version.as_ref().map(|version| format!(":{version}")).unwrap_or_default();
            return Err(unknown(&format!("azureml:{name}{version}"), name, names.all().filter(is_own)));
        }
        if let AssetWant::HandTo(heir) = want {
            return Ok(names.hand(meant, heir));
        }
        for asset in &mut meant {
            let stays = *want != AssetWant::Remove;
            asset.archived = if stays { *want == AssetWant::Archive } else { asset.archived };
            names.coming.insert(Document::name_of_asset(asset), stays.then(|| asset.clone()));
        }
        Ok(meant)
    }

    /// Everything is on disk.
    pub(crate) fn is_written(&self) -> bool {
        self.0.read().coming.is_empty()
    }

    /// Adds what is not on disk yet to `changes`.
    pub(crate) fn collect(&self, changes: &mut Changes) {
        for (document, asset) in &self.0.read().coming {
            match asset {
                Some(asset) => changes.documents.push(Document::Asset(Box::new(asset.clone()))),
                None => changes.dropped.push(document.clone()),
            }
        }
    }

    /// Everything is on disk: all see it.
    pub(crate) fn written(&mut self) {
        let mut names = self.0.write();
        for (document, asset) in std::mem::take(&mut names.coming) {
            match asset {
                Some(asset) => drop(names.known.insert(document, asset)),
                None => drop(names.known.remove(&document)),
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::super::tests::{asset, who};
    use super::*;

    #[test]
    fn test_versions_are_counted_before_they_are_on_disk_and_seen_after() {
        let mut register = Register::default();
        let versions = |register: &mut Register| register.add(asset(1, "iris", "", false)).unwrap().version;
        assert_eq!([versions(&mut register), versions(&mut register)], ["1", "2"]);
        assert!(
            register.add(asset(1, "iris", "2", false)).unwrap_err().to_string().contains("there already")
        );
        assert!(register.0.read().known.is_empty() && !register.is_written());
        let mut changes = Changes::default();
        register.collect(&mut changes);
        assert_eq!(changes.documents.len(), 2);
        register.written();
        assert!(register.0.read().known.len() == 2 && register.is_written());

        let change = |want| AssetChange { owner: who(1), name: "iris".into(), version: None, want };
        assert!(register.change(&change(AssetWant::Archive)).unwrap().iter().all(|asset| asset.archived));
        register.written();
        assert_eq!(register.change(&change(AssetWant::Remove)).unwrap().len(), 2);
        assert!(register.change(&change(AssetWant::Remove)).is_err(), "they are going already");
        assert_eq!(versions(&mut register), "1");
        let mut changes = Changes::default();
        register.collect(&mut changes);
        assert_eq!((changes.documents.len(), changes.dropped.len()), (1, 1));
        register.written();
        assert_eq!(register.0.read().known.len(), 1);
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
