//! Outputs that get a name as data when their job has completed.

use agent_cas::{BlobStore, snapshot};
use agent_model::SnapshotRef;
use agent_model::job::Input;

use super::*;

/// A job with outputs of these names; `key`, whether it is a file, where it is sent, its name and its version.
fn naming(name: &str, outputs: &[(&str, bool, &str, &str, &str)]) -> v1::JobSpec {
    let output = |&(key, is_file, uri, name, version): &(&str, bool, &str, &str, &str)| {
        let [uri, name, version] = [uri, name, version].map(str::to_owned);
        (key.to_owned(), v1::Output { is_file, uri, name, version })
    };
    v1::JobSpec { outputs: outputs.iter().map(output).collect(), ..request(name) }
}

/// Stores these files as what a job left.
async fn left(dir: &std::path::Path, rig: &Rig, job: &str, files: &[&str]) -> v1::Outcome {
    let dir = dir.join(format!("left-{job}"));
    for path in files {
        std::fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
        std::fs::write(dir.join(path), format!("{job} {path}")).unwrap();
    }
    let scanned = snapshot::scan(&dir).unwrap();
    snapshot::push(&scanned, &rig.blobs().await, |_| {}).await.unwrap();
    let artifacts = Some(v1::Artifacts { root: scanned.root.to_string(), files: 1, bytes: 1 });
    v1::Outcome { artifacts, ..outcome(0, b"") }
}

/// Runs a job to this end.
async fn run(rig: &mut Rig, node: &mut Node, spec: v1::JobSpec, end: v1::Outcome) -> v1::Job {
    Box::pin(async {
        let name = spec.name.clone();
        rig.try_submit(&name, spec).await.unwrap();
        let replica = format!("{name}.1.0");
        node.ordered(&replica).await;
        node.step(&replica, ReplicaStep::Uploading).await;
        node.deliver(&replica, end).await.unwrap();
        rig.ended(&name).await
    })
    .await
}

/// What a name means, oldest first: the version and the data.
async fn versions(rig: &Rig, name: &str) -> Vec<(String, Input)> {
    let mut assets = rig.assets().await;
    let mut list = assets
        .list(v1::ListAssetsRequest { name: name.into(), ..Default::default() })
        .await
        .unwrap()
        .into_inner()
        .assets;
    list.sort_by(|one, other| one.version.cmp(&other.version));
    list.into_iter().map(|asset| (asset.version, asset.data.unwrap().try_into().unwrap())).collect()
}

fn told(job: &v1::Job) -> Vec<[&str; 4]> {
    job.named_outputs.iter().map(|one| [&*one.output, &*one.name, &*one.version, &*one.why]).collect()
}

#[tokio::test]
async fn test_an_output_is_data_with_a_name_once_its_job_completed_and_outlives_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 8).await;
    let outputs =
        [("model", false, "", "iris", ""), ("table", true, "", "scores", ""), ("none", false, "", "nil", "")];
    let files =
        ["named-outputs/model/a/w", "named-outputs/table/table", "named-outputs/table/more", "outputs/x"];
    let end = left(dir.path(), &rig, "first", &files).await;
    let job = run(&mut rig, &mut node, naming("first", &outputs), end.clone()).await;
    let nothing = "the job left nothing there";
    assert_eq!(
        told(&job),
        [["model", "iris", "1", ""], ["none", "nil", "", nothing], ["table", "scores", "1", ""]]
    );
    let history = rig.history("first").await;
    assert!(history.contains(&"output `model` is `azureml:iris:1`".to_owned()), "{history:?}");

    // The end is delivered again, also to the controller after this one: the name is given once.
    node.deliver("first.1.0", end.clone()).await.unwrap();
    rig.kill().await;
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 8).await;
    node.deliver("first.1.0", end).await.unwrap();
    let iris = versions(&rig, "iris").await;
    let [(version, Input::Folder(model))] = iris.as_slice() else { panic!("{iris:?}") };
    assert_eq!(version, "1");

    // The data stay when the job goes: the folder, and the one file without its neighbour.
    rig.jobs.remove(v1::RemoveJobRequest { job: "first".into() }).await.unwrap();
    let all = v1::CollectBlobsRequest { all: true, dry_run: false };
    let stays = rig.nodes.collect_blobs(all).await.unwrap().into_inner().stays;
    let stays: Vec<_> = stays.into_iter().map(|stay| (stay.reason, stay.blobs)).collect();
    assert_eq!(stays, [("assets".to_owned(), 5)]);
    let blobs = rig.blobs().await;
    let files = |root| {
        let blobs = &blobs;
        async move { snapshot::list(blobs, root).await.unwrap().into_iter().map(|entry| entry.path).collect() }
    };
    let paths: Vec<String> = files(*model).await;
    assert_eq!(paths, ["a/w"]);
    let scores = versions(&rig, "scores").await;
    let [(_, Input::File { root, name })] = scores.as_slice() else { panic!("{scores:?}") };
    let paths: Vec<String> = files(*root).await;
    assert_eq!((name.as_str(), paths.as_slice()), ("table", &["table".to_owned()][..]));
    assert!(blobs.missing(&[*root]).await.unwrap().is_empty());

    // The next one counts on, and what it reads is the data.
    let reads = v1::Input {
        kind: Some(v1::input::Kind::Data(v1::DataInput {
            uri: "azureml:iris@latest".into(),
            ..Default::default()
        })),
    };
    let spec =
        v1::JobSpec { inputs: [("model".to_owned(), reads)].into(), ..naming("second", &outputs[..1]) };
    let end = left(dir.path(), &rig, "second", &["named-outputs/model/w"]).await;
    let job = run(&mut rig, &mut node, spec, end).await;
    assert_eq!(told(&job), [["model", "iris", "2", ""]]);
    let read: Input = job.spec.unwrap().inputs["model"].clone().try_into().unwrap();
    assert_eq!(read, Input::Folder(*model), "{}", SnapshotRef { root: *model, file: None });
    rig.stop().await;
}

#[tokio::test]
async fn test_a_version_is_given_once_and_only_what_completed_gets_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 8).await;
    let outputs = [("model", false, "", "iris", "7")];
    let model = ["named-outputs/model/w"];
    let failed = v1::Outcome {
        verdict: "failed".into(),
        fault: Some(Fault::new(Code::CommandFailed, "exit 1").into()),
        ..left(dir.path(), &rig, "failed", &model).await
    };
    let job = run(&mut rig, &mut node, naming("failed", &outputs), failed).await;
    assert!(job.named_outputs.is_empty() && versions(&rig, "iris").await.is_empty());

    // While the job runs somebody gives the version to something else.
    rig.try_submit("late", naming("late", &outputs)).await.unwrap();
    let end = left(dir.path(), &rig, "late", &model).await;
    node.ordered("late.1.0").await;
    node.step("late.1.0", ReplicaStep::Uploading).await;
    let address = "azureml://datastores/share/paths/${{name}}";
    let mut assets = rig.assets().await;
    let data = Some(Input::Folder(agent_model::Digest::EMPTY).into());
    let add = v1::AddAssetRequest { name: "iris".into(), version: "7".into(), data, ..Default::default() };
    rig.blobs()
        .await
        .write_batch(vec![(agent_model::Digest::EMPTY, Default::default())])
        .await
        .remove(0)
        .unwrap();
    assets.add(add).await.unwrap();
    node.deliver("late.1.0", end).await.unwrap();
    let job = rig.ended("late").await;
    assert_eq!(job.state, "Completed");
    assert_eq!(told(&job), [["model", "iris", "", "`azureml:iris:7` is there already"]]);

    // And a third one is not even taken.
    let refused = rig.try_submit("third", naming("third", &outputs)).await.unwrap_err();
    assert_eq!(code(&refused), Code::AssetInvalid);

    // What was sent to a store is named by its address there.
    let sent = [("model", true, address, "sent", "")];
    let end = left(dir.path(), &rig, "sends", &["named-outputs/model/model"]).await;
    let job = run(&mut rig, &mut node, naming("sends", &sent), end).await;
    assert_eq!(told(&job), [["model", "sent", "1", ""]]);
    let list = versions(&rig, "sent").await;
    let [(_, Input::Data(data))] = list.as_slice() else { panic!("{list:?}") };
    assert_eq!(
        (data.uri.to_string().as_str(), data.is_file),
        ("azureml://datastores/share/paths/sends", true)
    );
    rig.stop().await;
}
