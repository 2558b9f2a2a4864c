//! Data that users gave a name to: `azureml:NAME:VERSION` and `azureml:NAME@LABEL` in job files.
//!
//! Owns what an asset is and which one a reference means. Invariant: what a version means never changes, so a job that
//! names one reads the same data for ever; a label is moved from version to version.

use serde::{Deserialize, Serialize};

use crate::data::{AssetRef, Which};
use crate::job::Input;
use crate::{Principal, Timestamp};

/// The label that nobody sets: the version that was added last and is not archived.
pub const LATEST: &str = "latest";

/// One version of data with a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asset {
    /// Its name.
    pub name: String,
    /// Its version, of which each name has one.
    pub version: String,
    /// Its labels; each is at one version of a name only.
    #[serde(default)]
    pub labels: Vec<String>,
    /// The data: files that the controller has, or an address. Never a value.
    pub data: Input,
    /// Free text.
    #[serde(default)]
    pub description: String,
    /// Who added it.
    pub owner: Option<Principal>,
    /// Every user may read it, not only its owner.
    #[serde(default)]
    pub visible_to_all: bool,
    /// When it was added.
    pub added_at: Timestamp,
    /// It is not listed, and `@latest` passes over it. Its version means the same as before.
    #[serde(default)]
    pub archived: bool,
}

impl Asset {
    /// It is one file, and not a folder.
    pub fn is_file(&self) -> bool {
        match &self.data {
            Input::File { .. } => true,
            Input::Data(data) => data.is_file,
            Input::Folder(_) | Input::Literal(_) => false,
        }
    }
}

impl AssetRef {
    /// The one that is meant of all versions of the name.
    pub fn of<'a>(&self, versions: &[&'a Asset]) -> Option<&'a Asset> {
        let mut versions = versions.iter().copied().filter(|asset| asset.name == self.name);
        match &self.which {
            Which::Version(version) => versions.find(|asset| asset.version == *version),
            Which::Label(label) if label == LATEST => {
                versions.filter(|asset| !asset.archived).max_by_key(|asset| (asset.added_at, number(asset)))
            }
            Which::Label(label) => versions.find(|asset| asset.labels.contains(label)),
        }
    }
}

fn number(asset: &Asset) -> u64 {
    asset.version.parse().unwrap_or(0)
}

/// The version of an asset for which nobody named one: one more than the greatest number there is.
pub fn next_version(versions: &[&Asset]) -> String {
    (versions.iter().map(|asset| number(asset)).max().unwrap_or(0) + 1).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;

    fn asset(version: &str, at: u64, labels: &[&str]) -> Asset {
        Asset {
            name: "iris".into(),
            version: version.into(),
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
            data: Input::Folder(Digest::EMPTY),
            description: String::new(),
            owner: None,
            visible_to_all: false,
            added_at: Timestamp(at),
            archived: false,
        }
    }

    #[test]
    fn test_a_reference_means_one_version() {
        let mut all = [asset("1", 1, &["good"]), asset("2", 2, &[]), asset("10", 2, &[])];
        let of = |text: &str, all: &[Asset]| {
            let all: Vec<&Asset> = all.iter().collect();
            AssetRef::parse(text).unwrap().of(&all).map(|asset| asset.version.clone())
        };
        let some = |version: &str| Some(version.to_owned());
        assert_eq!(of("iris:2", &all), some("2"));
        assert_eq!(of("iris@good", &all), some("1"));
        assert_eq!(of("iris@latest", &all), some("10"), "of those added at once, the greatest");
        all[2].archived = true;
        assert_eq!(of("iris@latest", &all), some("2"));
        assert_eq!(of("iris:10", &all), some("10"), "a version means the same for ever");
        for none in ["iris:3", "iris@bad", "rose@latest"] {
            assert_eq!(of(none, &all), None, "{none}");
        }
        assert_eq!(next_version(&all.iter().collect::<Vec<_>>()), "11");
        assert_eq!(next_version(&[]), "1");
    }
}
