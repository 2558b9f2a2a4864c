//! Wishes about the environments that nodes keep.

use super::*;

async fn show(node: &mut Node, environments: &[v1::CachedEnvironment]) {
    let environments = environments.to_vec();
    node.send(Some(v1::Inventory { slots: 1, environments, ..Default::default() })).await;
}

fn kept(key: &str, pinned: bool) -> v1::CachedEnvironment {
    v1::CachedEnvironment { key: key.into(), pinned, bytes: 7, ..Default::default() }
}

/// Waits until exactly this is wanted of the node's environments.
async fn wanted(node: &mut Node, wanted: &[(&str, &str)]) {
    within("a wish", async {
        loop {
            let orders = node.orders.message().await.unwrap().expect("orders go on");
            let told: Vec<_> =
                orders.environments.iter().map(|order| (order.key.as_str(), order.want.as_str())).collect();
            if told == wanted {
                return;
            }
        }
    })
    .await;
}

/// Waits until the controller knows what the node keeps.
async fn known(rig: &Rig, environments: usize) {
    within("the inventory to be heard", async {
        loop {
            let nodes =
                rig.nodes.clone().list(v1::ListNodesRequest::default()).await.unwrap().into_inner().nodes;
            let inventory = nodes.first().and_then(|node| node.inventory.as_ref());
            if inventory.is_some_and(|inventory| inventory.environments.len() == environments) {
                return;
            }
        }
    })
    .await;
}

/// The result of the one call of a set.
async fn finished(
    mut calls: JoinSet<Result<tonic::Response<v1::ManageEnvironmentResponse>, Status>>,
) -> tonic::Response<v1::ManageEnvironmentResponse> {
    calls.join_next().await.unwrap().unwrap().unwrap()
}

fn request(key: &str, want: &str) -> v1::ManageEnvironmentRequest {
    v1::ManageEnvironmentRequest { node: "box".into(), environment: key.into(), want: want.into() }
}

#[tokio::test]
async fn test_answer_comes_when_the_node_shows_it_and_a_wish_of_nobody_is_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 1).await;
    show(&mut node, &[kept("pip-1", false)]).await;
    known(&rig, 1).await;

    let mut nodes = rig.nodes.clone();
    let call = JoinSet::from_iter([async move { nodes.manage_environment(request("pip-1", "pin")).await }]);
    wanted(&mut node, &[("pip-1", "pin")]).await;
    show(&mut node, &[kept("pip-1", true)]).await;
    let answer = within("the answer", finished(call)).await.into_inner();
    assert!(answer.environment.unwrap().pinned);
    wanted(&mut node, &[]).await;

    let mut nodes = rig.nodes.clone();
    let call =
        JoinSet::from_iter([async move { nodes.manage_environment(request("pip-1", "remove")).await }]);
    wanted(&mut node, &[("pip-1", "remove")]).await;
    drop(call); // nobody waits for it any more
    node.report().await;
    within("the wish to be withdrawn", async {
        loop {
            let orders = node.orders.message().await.unwrap().expect("orders go on");
            if orders.environments.is_empty() {
                return;
            }
            node.report().await;
        }
    })
    .await;

    let mut nodes = rig.nodes.clone();
    let call =
        JoinSet::from_iter([async move { nodes.manage_environment(request("pip-1", "remove")).await }]);
    wanted(&mut node, &[("pip-1", "remove")]).await;
    show(&mut node, &[]).await;
    let answer = within("the answer", finished(call)).await.into_inner();
    assert_eq!(answer.environment.unwrap().bytes, 7, "as it was");
    let refused = rig.nodes.clone().manage_environment(request("pip-1", "remove")).await.unwrap_err();
    assert_eq!(agent_proto::fault(&refused).code, Code::EnvUnknown);
    let refused = rig.nodes.clone().manage_environment(request("pip-1", "burn")).await.unwrap_err();
    assert_eq!(agent_proto::fault(&refused).code, Code::RequestInvalid);
    rig.stop().await;
}
