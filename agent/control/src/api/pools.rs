//! `Pools`: the calls about pools of machines, which one task carries out ([`crate::pools`]).

use std::time::Duration;

use agent_model::PoolName;
use agent_proto::v1;
use tonic::{Request, Response, Status};

use super::pages::Page;
use super::{Caller, Refusal, Services, invalid};
use crate::pools::{MachineReport, PoolChange, PoolReport};

impl From<PoolReport> for v1::Pool {
    fn from(report: PoolReport) -> v1::Pool {
        let PoolReport { record, machines, target, target_since, failing, orphans } = report;
        v1::Pool {
            name: record.name.into(),
            provider: record.provider,
            min: record.min,
            max: record.max,
            idle: prost_types::Duration::try_from(record.idle).ok(),
            priority: if record.low_priority { "low" } else { "dedicated" }.to_owned(),
            labels: record.labels.into_iter().collect(),
            created_ms: record.created_at.0,
            modified_ms: record.modified_at.0,
            deleting: record.deleting,
            machines: machines.into_iter().map(Into::into).collect(),
            target: u32::try_from(target).unwrap_or(u32::MAX),
            target_since_ms: target_since.map_or(0, |at| at.0),
            failure: failing.map(|failing| v1::PoolFailure {
                what: failing.what,
                at_ms: failing.at.0,
                again_ms: failing.again.0,
            }),
            orphans,
        }
    }
}

impl From<MachineReport> for v1::PoolMachine {
    fn from(report: MachineReport) -> v1::PoolMachine {
        let MachineReport { record, state, detail } = report;
        v1::PoolMachine {
            name: record.name.into(),
            id: record.id.unwrap_or_default(),
            step: record.step.name().to_owned(),
            since_ms: record.since.0,
            state: state.to_owned(),
            detail,
        }
    }
}

fn change(asked: v1::SetPoolRequest) -> Result<PoolChange, Refusal> {
    let low_priority = match asked.priority.as_deref() {
        None => None,
        Some("dedicated") => Some(false),
        Some("low") => Some(true),
        Some(other) => return Err(invalid(format!("`{other}` is not dedicated or low")).into()),
    };
    let idle = asked.idle.map(Duration::try_from).transpose();
    let labels: std::collections::BTreeMap<String, String> = asked.labels.into_iter().collect();
    super::identity::check_labels(&labels)?;
    Ok(PoolChange {
        name: asked.name.parse()?,
        create: asked.create,
        provider: asked.provider,
        min: asked.min,
        max: asked.max,
        idle: idle.map_err(|_| invalid("`idle` is not a length of time"))?,
        low_priority,
        labels: asked.change_labels.then_some(labels),
    })
}

#[tonic::async_trait]
impl v1::pools_server::Pools for Services {
    async fn set(&self, request: Request<v1::SetPoolRequest>) -> Result<Response<v1::Pool>, Status> {
        let caller = Caller::of(&request)?;
        let change = change(request.into_inner())?;
        caller.concerns(format!("pool {}", change.name));
        Ok(Response::new(self.pools.set(change).await?.into()))
    }

    async fn list(
        &self,
        request: Request<v1::ListPoolsRequest>,
    ) -> Result<Response<v1::ListPoolsResponse>, Status> {
        let pools = self.pools.list().await?.into_iter().map(v1::Pool::from);
        let page = Page::after(&request.get_ref().after, pools, |pool| pool.name.clone());
        Ok(Response::new(v1::ListPoolsResponse {
            pools: page.entries,
            more: page.more,
            providers: self.pools.providers().cloned().collect(),
        }))
    }

    async fn delete(
        &self,
        request: Request<v1::DeletePoolRequest>,
    ) -> Result<Response<v1::DeletePoolResponse>, Status> {
        let caller = Caller::of(&request)?;
        let name: PoolName = request.into_inner().name.parse().map_err(Refusal::from)?;
        caller.concerns(format!("pool {name}"));
        let machines = self.pools.delete(name).await?.into_iter().map(String::from).collect();
        Ok(Response::new(v1::DeletePoolResponse { machines }))
    }
}
