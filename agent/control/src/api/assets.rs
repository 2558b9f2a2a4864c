//! `Assets`: users give names to data, and find out what names mean.

use std::collections::BTreeSet;

use agent_model::asset::Asset;
use agent_model::job::Input;
use agent_model::{Code, DataInput, DataUri, Fault, JobSpec, Principal};
use agent_proto::v1;
use tonic::{Request, Response, Status};

use super::pages::Page;
use super::{Caller, Refusal, Services, invalid};
use crate::pins;
use crate::queue::assets::{AssetChange, AssetError, AssetWant};
use crate::store::Document;

/// Most characters of a description, and of an address.
const LONGEST: usize = 10_000;
/// Most labels of a version.
const LABELS: usize = 100;

impl From<AssetError> for Refusal {
    fn from(error: AssetError) -> Refusal {
        let what = error.to_string();
        let (code, fix) = match error {
            AssetError::Ask(error) => return error.into(),
            AssetError::Word(_) => (
                Code::AssetInvalid,
                "use at most 100 letters, digits, `_`, `-` and `.`, not starting with `.`".to_owned(),
            ),
            AssetError::Latest => (Code::AssetInvalid, "use another label".to_owned()),
            AssetError::Exists(_) => {
                (Code::AssetInvalid, "leave out the version: then it gets the next number".to_owned())
            }
            AssetError::Taken(_) | AssetError::Mapped(_) => {
                (Code::AssetInvalid, "use another name, or keep it for yourself".to_owned())
            }
            AssetError::Many => {
                (Code::AssetInvalid, "remove some: agentctl data rm NAME --version VERSION".to_owned())
            }
            AssetError::Unknown { known, .. } if known.is_empty() => {
                (Code::AssetUnknown, "list what there is: agentctl data list".to_owned())
            }
            AssetError::Unknown { known, .. } => {
                (Code::AssetUnknown, format!("versions of that name: {}", known.join(", ")))
            }
            AssetError::Folder { .. } => (
                Code::JobInvalid,
                "write `type: uri_folder`, and the path of the file in the command: `${{inputs.NAME}}/FILE`"
                    .to_owned(),
            ),
        };
        Fault::new(code, what).fix(fix).into()
    }
}

/// Where data are, or the name of the file that they are.
fn address_of(data: &Input) -> String {
    match data {
        Input::Data(data) => data.uri.to_string(),
        Input::File { name, .. } => name.clone(),
        Input::Folder(_) | Input::Literal(_) => String::new(),
    }
}

/// A page of a list.
fn listed(after: &str, assets: Vec<Asset>) -> v1::ListAssetsResponse {
    let keyed = assets.into_iter().map(|asset| {
        let key = Document::name_of_asset(&asset);
        v1::Asset { key, ..asset.into() }
    });
    let page = Page::after(after, keyed, |asset| asset.key.clone());
    v1::ListAssetsResponse { assets: page.entries, more: page.more }
}

impl Services {
    async fn add_asset(&self, request: v1::AddAssetRequest, caller: &Caller) -> Result<v1::Asset, Refusal> {
        let data = request.data.ok_or_else(|| invalid("`data` is missing"))?;
        let data = Input::try_from(data)?;
        if matches!(data, Input::Literal(_)) {
            return Err(invalid("a value is no data").into());
        }
        if request.description.chars().count() > LONGEST {
            return Err(invalid(format!("the description has more than {LONGEST} characters")).into());
        }
        if request.labels.len() > LABELS {
            return Err(invalid(format!("there are more than {LABELS} labels")).into());
        }
        if address_of(&data).chars().count() > LONGEST {
            return Err(invalid(format!("the address has more than {LONGEST} characters")).into());
        }
        let asset = Asset {
            name: request.name,
            version: request.version,
            labels: request.labels,
            data,
            description: request.description,
            owner: Some(caller.who().clone()),
            visible_to_all: request.visible_to_all,
            added_at: self.gate.clock.now(),
            archived: false,
        };
        if asset.visible_to_all && self.mapped_names().await?.contains(&asset.name) {
            return Err(AssetError::Mapped(asset.name).into());
        }
        self.require_room()?;
        // From here until its record is on disk nothing that it names is removed.
        let reads = agent_model::JobDraft {
            inputs: [(String::new(), asset.data.clone())].into(),
            ..agent_model::JobDraft::default()
        };
        let _relied = self.collector.rely_on(pins::of_spec(&reads)).await;
        self.require_snapshots(&reads.snapshots()).await?;
        let asset = self.assets.add(asset).await?;
        caller.concerns(format!("data {}:{}", asset.name, asset.version));
        Ok(asset.into())
    }

    /// The job with the data that its names mean for its owner; none of its outputs may be to get a name that is given.
    /// Besides, what its owner should know of these data.
    pub(super) async fn with_assets(
        &self,
        spec: JobSpec,
        owner: &Principal,
    ) -> Result<(JobSpec, Vec<String>), Refusal> {
        self.assets.require_free(&spec, owner)?;
        let is_name = |input: &Input| matches!(input, Input::Data(DataInput { uri: DataUri::Asset(_), .. }));
        let mapped = match spec.inputs.values().any(is_name) {
            true => self.mapped_names().await?,
            false => BTreeSet::new(),
        };
        let (draft, notes) = self.assets.resolve(spec.into(), owner, &mapped)?;
        Ok((draft.validate()?, notes))
    }

    /// The names of data that the operator's `data_map` says.
    async fn mapped_names(&self) -> Result<BTreeSet<String>, Refusal> {
        let mapped = self.mapped.clone();
        agent_blocking::spawn_blocking(move || mapped.names()).await.map_err(|_| Refusal::Stopping)
    }

    async fn change_asset(
        &self,
        request: v1::ChangeAssetRequest,
        caller: &Caller,
    ) -> Result<v1::ListAssetsResponse, Refusal> {
        let want = match request.want.as_str() {
            "archive" => AssetWant::Archive,
            "restore" => AssetWant::Restore,
            "remove" => AssetWant::Remove,
            other => return Err(invalid(format!("`{}` is nothing to do", other.escape_debug())).into()),
        };
        let version = Some(request.version.as_str()).filter(|version| !version.is_empty());
        let change = AssetChange {
            owner: caller.who().clone(),
            name: request.name.clone(),
            version: version.map(str::to_owned),
            want,
        };
        let changed = self.assets.change(change).await?;
        caller.concerns(format!("data {}", request.name));
        Ok(listed("", changed))
    }
}

#[tonic::async_trait]
impl v1::assets_server::Assets for Services {
    async fn add(&self, request: Request<v1::AddAssetRequest>) -> Result<Response<v1::Asset>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.add_asset(request.into_inner(), &caller).await?))
    }

    async fn list(
        &self,
        request: Request<v1::ListAssetsRequest>,
    ) -> Result<Response<v1::ListAssetsResponse>, Status> {
        let caller = Caller::of(&request)?;
        let v1::ListAssetsRequest { name, after } = request.into_inner();
        let mut assets = self.assets.readable(caller.who(), caller.is_operator().await);
        assets.retain(|asset| name.is_empty() || asset.name == name);
        Ok(Response::new(listed(&after, assets)))
    }

    async fn change(
        &self,
        request: Request<v1::ChangeAssetRequest>,
    ) -> Result<Response<v1::ListAssetsResponse>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.change_asset(request.into_inner(), &caller).await?))
    }
}
