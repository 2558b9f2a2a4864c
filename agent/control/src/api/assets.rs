//! `Assets`: users give names to data, and find out what names mean.

use agent_model::asset::Asset;
use agent_model::job::Input;
use agent_model::{Code, Fault, JobSpec, Principal};
use agent_proto::v1;
use tonic::{Request, Response, Status};

use super::{Caller, Refusal, Services, invalid};
use crate::assets::{AssetChange, AssetError, AssetWant};
use crate::pins;

/// Most characters of a description.
const LONGEST: usize = 10_000;

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
            AssetError::Taken(_) => {
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
    pub(super) fn with_assets(&self, spec: JobSpec, owner: &Principal) -> Result<JobSpec, Refusal> {
        self.assets.require_free(&spec, owner)?;
        Ok(self.assets.resolve(spec.into(), owner)?.validate()?)
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
        Ok(v1::ListAssetsResponse { assets: changed.into_iter().map(v1::Asset::from).collect() })
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
        let name = request.into_inner().name;
        let mut assets = self.assets.readable(caller.who(), caller.is_operator().await);
        assets.retain(|asset| name.is_empty() || asset.name == name);
        Ok(Response::new(v1::ListAssetsResponse {
            assets: assets.into_iter().map(v1::Asset::from).collect(),
        }))
    }

    async fn change(
        &self,
        request: Request<v1::ChangeAssetRequest>,
    ) -> Result<Response<v1::ListAssetsResponse>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.change_asset(request.into_inner(), &caller).await?))
    }
}
