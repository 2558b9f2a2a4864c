//! Every call of every service, over the real listener, by everybody whom it is not for.
//!
//! The calls are read from the `.proto` files, so one that is added is tried here without a word; one without a rule is
//! refused to all, which this suite notices because nobody can make it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_identity::{
    Authority, Credentials, Dialer, PrivateKey, Proxy, ShownIdentity, SigningRequest, Subject, Trust,
};
use agent_model::{Clock, SystemClock, Timestamp};
use agent_proto::transport::{self, Way};
use agent_proto::v1::assets_client::AssetsClient;
use agent_proto::v1::jobs_client::JobsClient;
use agent_proto::v1::nodes_client::NodesClient;
use agent_proto::{declared_calls, v1};
use agent_tests::client::runtime;
use agent_tests::{SOON, eventually};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::Site;
use super::limits::by_hand;

/// And of the protocol of blobs.
const BLOBS: [&str; 8] = [
    "/build.bazel.remote.execution.v2.Capabilities/GetCapabilities",
    "/build.bazel.remote.execution.v2.ContentAddressableStorage/FindMissingBlobs",
    "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchUpdateBlobs",
    "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchReadBlobs",
    "/build.bazel.remote.execution.v2.ContentAddressableStorage/GetTree",
    "/google.bytestream.ByteStream/Read",
    "/google.bytestream.ByteStream/Write",
    "/google.bytestream.ByteStream/QueryWriteStatus",
];

/// Those that take a token instead of a certificate.
const TAKE_A_TOKEN: [&str; 2] = ["/agent.v1.Identity/Join", "/agent.v1.Identity/Login"];

/// Certificates for a key of its own.
fn made(authority: &Authority, subject: &Subject, now: Timestamp, life: Duration) -> Credentials {
    let key = PrivateKey::generate().unwrap();
    let request = SigningRequest::read(&key.request().unwrap()).unwrap();
    let certificate = authority.issue(&request, subject, now, life).unwrap();
    Credentials::new("https://here:1", authority.certificate(), &certificate, &key)
}

/// A connection that shows what it holds; the controller is trusted whoever it is.
pub(super) fn channel(site: &Site, ours: &Authority, held: Option<&Credentials>) -> Channel {
    channel_to(site.port, Trust::Authority(ours.certificate().to_vec()), held)
}

/// The same to a port of this machine, where this is trusted.
pub(super) fn channel_to(port: u16, trust: Trust, held: Option<&Credentials>) -> Channel {
    let held = held.map(|held| ShownIdentity::new(held).unwrap());
    let dialer =
        Dialer::new(("127.0.0.1", port), trust, held, Proxy::default(), Arc::new(SystemClock)).unwrap();
    let _inside = runtime().enter();
    transport::dial(transport::endpoint(), Way::Tls(dialer))
}

/// Makes a call with nothing but the name of a job, which is the first field of every message that names one.
pub(super) fn call(channel: &Channel, path: &str, job: &str) -> Result<(), Status> {
    let call = async {
        let mut client = tonic::client::Grpc::new(channel.clone());
        let broken = |error: tonic::transport::Error| Status::unavailable(format!("{error:?}"));
        client.ready().await.map_err(broken)?;
        let message = v1::GetJobRequest { job: job.into(), ..Default::default() };
        let codec = tonic_prost::ProstCodec::<v1::GetJobRequest, ()>::default();
        let path = PathAndQuery::try_from(path).unwrap();
        let mut answers = client.server_streaming(Request::new(message), path, codec).await?.into_inner();
        // A first answer with fields that nobody looks at.
        answers.message().await.map(|_| ())
    };
    runtime().block_on(async {
        let limited = tokio::time::timeout(Duration::from_secs(30), call).await;
        limited.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")))
    })
}

/// The controller said no, or did not even shake hands.
fn is_refused(called: &Result<(), Status>) -> bool {
    called.as_ref().is_err_and(|status| {
        matches!(status.code(), Code::PermissionDenied | Code::Unauthenticated) || hung_up(status)
    })
}

fn hung_up(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
        && status.details().is_empty()
}

/// Every call by the owner of a job, another user and a node, in this order; how many that were.
fn try_members(site: &Site, authority: &Authority, held: &[Credentials; 3], job: &str) -> usize {
    let mut tried = 0;
    let (ada, eve) = (channel(site, authority, held.first()), channel(site, authority, held.get(1)));
    let node = channel(site, authority, held.get(2));
    let denied = |called: &Result<(), Status>| {
        called.as_ref().is_err_and(|status| status.code() == Code::PermissionDenied)
    };
    let owned = [
        "Jobs/Get",
        "Jobs/Watch",
        "Jobs/Cancel",
        "Jobs/Hold",
        "Jobs/Change",
        "Jobs/Remove",
        "Jobs/History",
        "Jobs/Session",
        "Nodes/StoreOutputs",
        "Telemetry/ReadLog",
        "Telemetry/ReadTracking",
    ];
    let users = [
        "Jobs/Submit",
        "Jobs/List",
        "Nodes/List",
        "Nodes/KeepAwake",
        "Identity/Renew",
        "Secrets/Set",
        "Secrets/List",
        "Secrets/Remove",
        "Assets/Add",
        "Assets/List",
        "Assets/Change",
        "Pools/List",
    ];
    let nodes = [
        "Worker/Sync",
        "Worker/ReportOutcome",
        "Worker/ReportOutputs",
        "Worker/FindPeer",
        "Worker/AdmitPeer",
        "Worker/ServeSession",
        "Worker/ReadSecrets",
        "Telemetry/Append",
        "Identity/Renew",
    ];
    let mut calls = declared_calls();
    calls.sort_by_key(|path| path.ends_with("Jobs/Remove")); // it takes the job away
    for path in calls.iter().filter(|path| !TAKE_A_TOKEN.contains(&path.as_str())) {
        let name = path.trim_start_matches("/agent.v1.");
        let (by_ada, by_eve) = (call(&ada, path, job), call(&eve, path, job));
        // The first field of what nodes say is their name.
        let by_node = call(&node, path, "n0");
        let for_users = owned.contains(&name) || users.contains(&name);
        assert_eq!(denied(&by_ada), !for_users, "{path} by the owner: {by_ada:?}");
        assert_eq!(denied(&by_eve), !users.contains(&name), "{path} by another user: {by_eve:?}");
        assert_eq!(denied(&by_node), !nodes.contains(&name), "{path} by a node: {by_node:?}");
        for called in [&by_ada, &by_eve, &by_node] {
            let there = called.as_ref().err().is_none_or(|status| status.code() != Code::Unimplemented);
            assert!(there, "{path} has no rule: {called:?}");
        }
        tried += 3;
    }
    for name in ["ReportOutcome", "ReportOutputs", "ReadSecrets", "FindPeer", "AdmitPeer", "ServeSession"] {
        let as_another = call(&node, &format!("/agent.v1.Worker/{name}"), "n1");
        assert!(denied(&as_another), "{name} by a node that speaks for another: {as_another:?}");
        tried += 1;
    }
    tried
}

#[test]
fn test_nobody_gets_what_is_not_for_him() {
    let mut site = Site::new();
    let now = SystemClock.now();
    for user in ["ada", "eve", "gone"] {
        site.add_user(user, "submit");
    }
    site.add_node("n0", "127.0.0.1");
    site.nodes[0].kill();
    let project = site.project("ada", "command: 'true'\n");
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    let authority = Authority::open(&site.controller.state().join("controller/authority.json"), now).unwrap();
    let held = |user: &str| {
        let file = site.path(user).join(".config/agentctl/contexts.json");
        agent_identity::Contexts::read(&file).unwrap().contexts["lab"].clone()
    };
    let subject = |credentials: &Credentials| credentials.certified().unwrap().subject;
    let node = Credentials::read(&site.nodes[0].state().join("identity.json")).unwrap().unwrap();
    let foreign = Authority::open(&site.path("foreign.json"), now).unwrap();
    let (day, hour) = (Duration::from_secs(24 * 3600), Duration::from_secs(3600));
    let ended = Timestamp(now.0 - 2 * 3_600_000);
    let gone = held("gone");
    site.ctl(&["user", "remove", "gone"]).ok();
    // Who is there at all: each is refused every call that takes more than a token.
    let nobodies = [
        ("no certificate", None),
        ("an ended certificate of a user", Some(made(&authority, &subject(&held("ada")), ended, hour))),
        ("an ended certificate of a node", Some(made(&authority, &subject(&node), ended, hour))),
        ("a user of another authority", Some(made(&foreign, &subject(&held("ada")), now, day))),
        ("a node of another authority", Some(made(&foreign, &subject(&node), now, day))),
        ("a user who was removed", Some(gone)),
        (
            "a user of another enrollment",
            Some(made(&authority, &"agentd://user/ada/00".parse().unwrap(), now, day)),
        ),
        (
            "a node that never joined",
            Some(made(&authority, &"agentd://node/n9/00".parse().unwrap(), now, day)),
        ),
    ];
    let calls: Vec<String> = declared_calls().into_iter().chain(BLOBS.map(str::to_owned)).collect();
    assert!(calls.len() >= 39, "{calls:?}");
    let mut tried = 0;
    for (who, held) in &nobodies {
        let channel = channel(&site, &authority, held.as_ref());
        for path in &calls {
            let called = call(&channel, path, &job);
            let said = called.as_ref().err().map(|status| status.code());
            match TAKE_A_TOKEN.contains(&path.as_str()) {
                // Its handler finds no token in the message; before that, a bad certificate is no certificate.
                true => assert!(called.is_err(), "{path} by {who}: {called:?}"),
                false => assert!(is_refused(&called), "{path} by {who}: {said:?}"),
            }
            tried += 1;
        }
    }
    let held = [held("ada"), held("eve"), node];
    tried += try_members(&site, &authority, &held, &job);
    let ada = channel(&site, &authority, held.first());
    // What nobody wrote a rule for is not there, whoever asks.
    for path in [
        "/agent.v1.Jobs/Burn",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ] {
        assert_eq!(call(&ada, path, &job).unwrap_err().code(), Code::Unimplemented, "{path}");
    }
    println!("{tried} calls were tried by somebody whom they are not for, or whom they are");
    assert!(Path::new(&site.controller.state()).join("controller/audit.jsonl").exists());
}

/// What is told of jobs and data of others where a list or another job names them.
#[test]
fn test_lists_and_names_show_nothing_of_others() {
    let mut site = Site::new();
    [("ada", "submit"), ("eve", "submit"), ("bob", "operate")]
        .iter()
        .for_each(|(user, role)| site.add_user(user, role));
    site.add_node("n0", "127.0.0.1");
    let project = site.project("ada", "");
    let job = Path::new(&project).join("job.yml");
    std::fs::write(job, "command: 'echo hers'\ncode: .\nenvironment: {python: /usr/bin/python3}\n").unwrap();
    let data = site.path("ada").join("d.csv");
    std::fs::write(&data, "hers\n").unwrap();
    site.by("ada", &["data", "create", "iris", data.to_str().unwrap()]).ok();
    let submit =
        |more: &[&str]| site.by("ada", &[&["submit", &project], more].concat()).ok().stdout.trim().to_owned();
    let (job, array) = (submit(&[]), submit(&["--array", "0-1"]));
    site.by("ada", &["wait", &job, &array]).ok();
    let [ada, eve, bob] = ["ada", "eve", "bob"].map(|user| by_hand(&site, user));

    // A job cannot wait for one that its owner may not see: its end would tell how that one ended.
    let own = site.project("eve", "command: 'true'\n");
    site.by("eve", &["submit", &own, "--after", &job]).code(4).says("NET-102");
    let list = |channel: &Channel, array: &str| {
        let request = v1::ListJobsRequest { array: array.into(), ..v1::ListJobsRequest::default() };
        let listed = runtime().block_on(JobsClient::new(channel.clone()).list(request));
        listed.map(|answer| answer.into_inner().jobs)
    };
    assert_eq!(list(&ada, &array).unwrap().len(), 2);
    assert_eq!(list(&eve, &array).unwrap_err().code(), Code::PermissionDenied, "the tasks of an array");
    let commands = |channel: &Channel| {
        let jobs = list(channel, "").unwrap().into_iter();
        jobs.map(|job| job.spec.unwrap_or_default().command).collect::<Vec<_>>()
    };
    assert_eq!(commands(&ada), ["echo hers"; 2]);
    assert_eq!(commands(&eve), ["(private)"; 2]);

    let logs = |channel: Channel| {
        let nodes = runtime().block_on(NodesClient::new(channel).list(v1::ListNodesRequest::default()));
        let nodes = nodes.unwrap().into_inner().nodes.into_iter().filter_map(|node| node.inventory);
        let environments = nodes.flat_map(|inventory| inventory.environments);
        environments.map(|environment| environment.log).collect::<Vec<_>>()
    };
    let own = eventually("the node tells of its environment", SOON, || {
        let own = logs(bob.clone());
        (!own.is_empty()).then_some(own)
    });
    assert!(own.iter().all(|log| !log.is_empty()), "{own:?}");
    let told = logs(eve.clone());
    assert_eq!(told, vec![String::new(); own.len()], "where the logs of builds are");
    let names = |channel: Channel| {
        let assets = runtime().block_on(AssetsClient::new(channel).list(v1::ListAssetsRequest::default()));
        assets.unwrap().into_inner().assets.len()
    };
    assert_eq!((names(ada), names(eve)), (1, 0));
}
