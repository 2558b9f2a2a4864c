//! Named data, to the wire: clients read it as it stands there.

use agent_model::Principal;
use agent_model::asset::Asset;

use crate::v1;

impl From<Asset> for v1::Asset {
    fn from(asset: Asset) -> v1::Asset {
        v1::Asset {
            name: asset.name,
            version: asset.version,
            labels: asset.labels,
            data: Some(asset.data.into()),
            description: asset.description,
            owner: asset.owner.as_ref().map(Principal::to_string).unwrap_or_default(),
            visible_to_all: asset.visible_to_all,
            added_ms: asset.added_at.0,
            archived: asset.archived,
            key: String::new(),
        }
    }
}
