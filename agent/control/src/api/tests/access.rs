//! Every call of every service, by those who may not make it.

use agent_model::Code;
use agent_proto::{declared_calls, v1};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::super::access::{Rule, rule};
use super::rig::{OWN, Rig, STRANGER, connect, request};
use super::*;

/// Makes a call with nothing but the name of a job, which is the first field of every message that names one.
async fn call(channel: &Channel, path: &str) -> Result<(), Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let message = v1::GetJobRequest { job: "a".into(), ..Default::default() };
    let codec = tonic_prost::ProstCodec::<v1::GetJobRequest, ()>::default();
    let path = PathAndQuery::try_from(path).unwrap();
    let mut answers = client.server_streaming(Request::new(message), path, codec).await?.into_inner();
    match answers.message().await {
        // A first answer with fields that nobody looks at.
        Ok(_) => Ok(()),
        Err(status) => Err(status),
    }
}

fn is_denied(called: &Result<(), Status>) -> bool {
    called.as_ref().is_err_and(|status| status.code() == tonic::Code::PermissionDenied)
}

#[tokio::test]
async fn test_every_call_has_a_rule_and_keeps_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    let mut sockets = Vec::new();
    for socket in ["stranger", "operator", "sock"] {
        sockets.push(connect(&dir.path().join(socket)).await);
    }
    let [stranger, operator, own] = &sockets[..] else { unreachable!() };
    let calls = declared_calls();
    // Calls that remove something come last.
    let (mut calls, removals): (Vec<_>, Vec<_>) =
        calls.into_iter().partition(|path| !path.contains("Remove"));
    calls.extend(removals);
    assert!(calls.len() >= 19, "{calls:?}");
    for path in &calls {
        let rule = rule(path).unwrap_or_else(|| panic!("{path} has no rule"));
        let by_stranger = within("a call", call(stranger, path)).await;
        let by_operator = within("a call", call(operator, path)).await;
        let everybody = matches!(rule, Rule::User | Rule::Member | Rule::Token);
        assert_eq!(is_denied(&by_stranger), !everybody, "{path} by a stranger: {by_stranger:?}");
        assert_eq!(is_denied(&by_operator), rule == Rule::Node, "{path} by an operator: {by_operator:?}");
    }
    // A call without a rule does not exist, for any caller.
    for path in ["/agent.v1.Jobs/Burn", "/grpc.health.v1.Health/Check", "/agent.v1.Jobs"] {
        let status = call(own, path).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unimplemented, "{path}: {status}");
    }
    rig.stop().await;
}

#[tokio::test]
async fn test_a_list_hides_what_jobs_of_others_do() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let secret = "hunter2".to_owned();
    let spec = v1::JobSpec {
        command: format!("login {secret}"),
        description: secret.clone(),
        display_name: secret.clone(),
        experiment: secret.clone(),
        tags: [("t".to_owned(), secret.clone())].into(),
        environment_variables: [("TOKEN".to_owned(), secret.clone())].into(),
        inputs: [("i".to_owned(), v1::Input { kind: Some(v1::input::Kind::Literal(secret.clone())) })].into(),
        ..request("a")
    };
    rig.try_submit("r", spec).await.unwrap();
    let list = |channel: Channel| async {
        let mut jobs = v1::jobs_client::JobsClient::new(channel);
        jobs.list(v1::ListJobsRequest::default()).await.unwrap().into_inner().jobs.remove(0)
    };
    let own = list(connect(&dir.path().join("sock")).await).await;
    assert!(format!("{own:?}").contains(&secret));
    assert!(format!("{:?}", list(connect(&dir.path().join("operator")).await).await).contains(&secret));
    let others = list(connect(&dir.path().join("stranger")).await).await;
    assert!(!format!("{others:?}").contains(&secret), "{others:?}");
    assert_eq!((others.job.as_str(), others.state.as_str()), ("a", "Queued"));
    assert_eq!((&others.owner, &others.detail), (&format!("uid {OWN}"), &own.detail));
    // And it is still one that a client can read.
    agent_model::JobSpec::try_from(others.spec.unwrap()).unwrap();
    rig.stop().await;
}

#[tokio::test]
async fn test_a_job_is_its_owners_after_a_restart_too() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path()).await;
    let mut stranger = v1::jobs_client::JobsClient::new(connect(&dir.path().join("stranger")).await);
    let submit =
        v1::SubmitRequest { request_id: "r".into(), spec: Some(request("theirs")), name_hint: String::new() };
    stranger.submit(submit).await.unwrap();
    rig.stop().await;
    let rig = Rig::start(dir.path()).await;
    let mut stranger = v1::jobs_client::JobsClient::new(connect(&dir.path().join("stranger")).await);
    let job = v1::GetJobRequest { job: "theirs".into(), ..Default::default() };
    assert_eq!(stranger.get(job).await.unwrap().into_inner().owner, format!("uid {STRANGER}"));
    let canceled = stranger.cancel(v1::CancelJobRequest { job: "theirs".into() }).await.unwrap().into_inner();
    assert_eq!(canceled.state, "Canceled");
    let job = v1::GetJobRequest { job: "theirs".into(), ..Default::default() };
    let history = stranger.history(job).await.unwrap().into_inner().events;
    assert!(history.iter().any(|event| event.text == format!("canceled by uid {STRANGER}")), "{history:?}");
    assert_eq!(
        code(
            &stranger.get(v1::GetJobRequest { job: "none".into(), ..Default::default() }).await.unwrap_err()
        ),
        Code::JobNotFound
    );
    rig.stop().await;
}

#[tokio::test]
async fn test_secrets_are_their_owners_and_told_to_the_node_that_runs_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let [own, stranger] =
        [connect(&dir.path().join("sock")).await, connect(&dir.path().join("stranger")).await];
    let mut secrets = v1::secrets_client::SecretsClient::new(own.clone());
    let value = b"hunter2".to_vec();
    secrets.set(v1::SetSecretRequest { name: "wandb".into(), value }).await.unwrap();
    let spec = |owner: &str| v1::JobSpec {
        secrets: [("KEY".to_owned(), "wandb".to_owned())].into(),
        owner: owner.to_owned(),
        ..request("")
    };
    let job = rig.try_submit("r", spec(&format!("uid {STRANGER}"))).await.unwrap();
    let shown = rig
        .jobs
        .get(v1::GetJobRequest { job: job.clone(), ..Default::default() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(shown.spec.as_ref().unwrap().owner, format!("uid {OWN}"), "a client does not say whose it is");
    assert!(!format!("{shown:?}").contains("hunter2"));

    // A job cannot name the secret of another owner, whatever owner it claims.
    let mut theirs = v1::jobs_client::JobsClient::new(stranger.clone());
    let submit = v1::SubmitRequest {
        request_id: "s".into(),
        spec: Some(spec(&format!("uid {OWN}"))),
        name_hint: String::new(),
    };
    let refused = theirs.submit(submit).await.unwrap_err();
    assert_eq!((code(&refused), refused.message().contains("wandb")), (Code::JobInvalid, true), "{refused}");
    let listed = |channel: Channel| async {
        let mut secrets = v1::secrets_client::SecretsClient::new(channel);
        secrets.list(v1::ListSecretsRequest::default()).await.unwrap().into_inner().secrets
    };
    assert_eq!((listed(own.clone()).await.len(), listed(stranger).await.len()), (1, 0));

    // A node that was not given the job gets no secret.
    let mut worker = v1::worker_client::WorkerClient::new(own);
    let ask = v1::ReadSecretsRequest { node: "n".into(), replica: format!("{job}.1.0") };
    assert!(worker.read_secrets(ask).await.is_err());
    rig.stop().await;
}
