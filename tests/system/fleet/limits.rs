//! What one user may have at a time, and what strangers take from nobody.

use std::fs;
use std::io::Write;
use std::net::TcpStream;

use agent_identity::{Authority, Contexts, Credentials, Trust};
use agent_model::{Clock, Code, SystemClock};
use agent_proto::v1;
use agent_proto::v1::jobs_client::JobsClient;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_tests::client::{Client, runtime};
use agent_tests::{SOON, eventually};
use tonic::Status;
use tonic::transport::Channel;

use super::{Site, calls};
use crate::descriptors::beside_silent_connections;

fn authority(site: &Site) -> Authority {
    let state = site.controller.state();
    Authority::open(&state.join("controller/authority.json"), SystemClock.now()).unwrap()
}

/// What anybody has.
fn by_nobody(site: &Site) -> Channel {
    calls::channel(site, &authority(site), None)
}

/// What a user has who writes his own client.
pub(super) fn by_hand(site: &Site, user: &str) -> Channel {
    let file = site.path(user).join(".config/agentctl/contexts.json");
    calls::channel(site, &authority(site), Some(&Contexts::read(&file).unwrap().contexts["lab"]))
}

/// Submits what no client of ours would.
fn submit(channel: &Channel, spec: v1::JobSpec) -> Result<String, Status> {
    let request =
        v1::SubmitRequest { request_id: Client::request_id(), spec: Some(spec), name_hint: "big".into() };
    let submitted = runtime().block_on(JobsClient::new(channel.clone()).submit(request));
    submitted.map(|answer| answer.into_inner().job)
}

fn spec() -> v1::JobSpec {
    let draft = agent_model::JobDraft { command: "true".to_owned(), ..agent_model::JobDraft::default() };
    draft.validate().unwrap().into()
}

#[test]
fn test_a_job_larger_than_a_job_may_be_is_refused() {
    let site = Site::new();
    site.add_user("eve", "submit");
    let eve = by_hand(&site, "eve");
    let refused = |spec: v1::JobSpec, says: &str| {
        let fault = agent_proto::fault(&submit(&eve, spec).unwrap_err());
        assert_eq!(fault.code, Code::JobTooLarge);
        assert!(fault.what.contains(says), "{fault}");
    };
    let long = "x".repeat(2_500_000);
    refused(v1::JobSpec { description: long.clone(), ..spec() }, "`description` has 2,500,000 characters");
    refused(v1::JobSpec { tags: [("t".into(), long)].into(), ..spec() }, "`tags.t` has 2,500,000");
    let value = |n: usize| (format!("V{n}"), "x".repeat(100_000));
    refused(
        v1::JobSpec { environment_variables: (0..20).map(value).collect(), ..spec() },
        "bytes as JSON, and at most 1,048,576",
    );
    // The command line says so before it sends anything.
    let file = format!("command: 'true'\ndescription: '{}'\n", "x".repeat(10_001));
    let project = site.project("eve", &file);
    site.by("eve", &["submit", &project]).code(1).says("JOB-111").says("10,001 characters");
    assert_eq!(site.json(&["jobs", "--json"])["jobs"].as_array().unwrap().len(), 0);
}

#[test]
fn test_lists_come_to_everybody_whatever_was_submitted() {
    let site = Site::new();
    ["ada", "eve"].iter().for_each(|user| site.add_user(user, "submit"));
    let (ada, eve) = (by_hand(&site, "ada"), by_hand(&site, "eve"));
    let value = |n: usize| (format!("V{n}"), "x".repeat(100_000));
    for _ in 0..8 {
        let large = v1::JobSpec {
            environment_variables: (0..10).map(value).collect(),
            visible_to_all: true,
            ..spec()
        };
        submit(&eve, large).unwrap();
    }
    let small = submit(&ada, spec()).unwrap();
    // A client that sets no limit of its own takes 4 MiB.
    for active in [true, false] {
        let (mut names, mut after) = (Vec::new(), String::new());
        loop {
            let request = v1::ListJobsRequest { limit: 1000, active, after, ..Default::default() };
            let page = runtime().block_on(JobsClient::new(ada.clone()).list(request)).unwrap().into_inner();
            names.extend(page.jobs.into_iter().map(|job| job.job));
            after = names.last().cloned().unwrap_or_default();
            if !page.more {
                break;
            }
        }
        assert_eq!((names.len(), &names[0]), (9, &small), "active: {active}");
    }
    for line in [&["jobs", "--all", "--json"][..], &["jobs", "--active", "--json"], &["status", "--json"]] {
        for shown in [site.ctl(line).ok().json(), site.by("ada", line).ok().json()] {
            assert_eq!(shown["jobs"].as_array().unwrap().len(), 9, "{line:?}");
        }
    }
    site.by("ada", &["show", &small]).ok();
    site.by("eve", &["cancel", "--all"]).ok();
}

#[test]
fn test_only_so_many_jobs_of_a_user_wait() {
    let site = Site::with(&[("AGENTD_LIMITS_PER_USER", "waiting=2")]);
    ["ada", "eve"].iter().for_each(|user| site.add_user(user, "submit"));
    let (ada, eve) = (by_hand(&site, "ada"), by_hand(&site, "eve"));
    submit(&eve, v1::JobSpec { array: "0-99".into(), ..spec() }).unwrap();
    let second = submit(&eve, spec()).unwrap();
    let fault = agent_proto::fault(&submit(&eve, spec()).unwrap_err());
    assert_eq!(fault.code, Code::JobTooLarge);
    assert!(fault.what.contains("has 2 jobs that wait"), "{fault}");
    assert!(fault.fix.unwrap().contains("make one array"));
    submit(&ada, spec()).unwrap();
    site.by("eve", &["cancel", &second]).ok();
    submit(&eve, spec()).unwrap();
}

#[test]
fn test_refused_calls_push_nothing_out_of_the_audit_log() {
    let site = Site::new();
    site.add_user("ada", "submit");
    let (ada, nobody) = (by_hand(&site, "ada"), by_nobody(&site));
    let unknown = format!("/agent.v1.Jobs/{}", "x".repeat(7_900));
    for _ in 0..300 {
        for (channel, code) in [(&ada, tonic::Code::Unimplemented), (&nobody, tonic::Code::Unauthenticated)] {
            assert_eq!(calls::call(channel, &unknown, "a").unwrap_err().code(), code);
        }
        let denied = calls::call(&ada, "/agent.v1.Nodes/Preempt", "n0").unwrap_err();
        assert_eq!(denied.code(), tonic::Code::PermissionDenied);
        let refused = calls::call(&nobody, "/agent.v1.Jobs/Submit", "a").unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unauthenticated);
    }
    let read =
        |file: &str| fs::read_to_string(site.controller.state().join("controller").join(file)).unwrap();
    let (audit, refused) = (read("audit.jsonl"), read("refused.jsonl"));
    for said in ["Identity/AddUser", "Identity/Login", "Nodes/Preempt"] {
        assert!(audit.contains(said), "no {said} in {audit}");
    }
    let by_nobody = audit.lines().filter(|line| line.contains("nobody") && !line.contains("Identity/Login"));
    assert!(audit.lines().count() < 20 && by_nobody.count() == 0, "{audit}");
    assert!(refused.lines().count() < 20 && refused.contains("unknown call"), "{refused}");
    for line in audit.lines().chain(refused.lines()) {
        assert!(line.len() < 1_000, "{line}");
    }
}

#[test]
fn test_a_node_writes_logs_of_its_own_ranks_alone() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    ["n0", "n1"].iter().for_each(|node| site.add_node(node, "127.0.0.1"));
    let project = site.project("ada", "command: 'echo mine; sleep 600'\n");
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    eventually("it runs", SOON, || site.by("ada", &["logs", &job]).stdout.contains("mine").then_some(()));
    let on = site.json(&["show", &job, "--json"])["replicas"][0]["node"].as_str().unwrap().to_owned();
    site.nodes.iter_mut().for_each(|node| node.kill()); // a process of a node speaks alone
    let append = |node: usize, replica: String| {
        let held = Credentials::read(&site.nodes[node].state().join("identity.json")).unwrap().unwrap();
        let channel = calls::channel(&site, &authority(&site), Some(&held));
        let (channel_name, data) = ("job".to_owned(), b"FORGED\n".to_vec().into());
        let request = v1::AppendRequest { replica, channel: channel_name, offset: 5, data };
        runtime().block_on(async {
            let mut telemetry = TelemetryClient::new(channel);
            let answers = telemetry.append(tokio_stream::once(request)).await?;
            answers.into_inner().message().await
        })
    };
    let (own, other) = if on == "n0" { (0, 1) } else { (1, 0) };
    let code = |answer: Result<Option<v1::AppendResponse>, Status>| {
        answer.map(|answer| answer.unwrap().failed).map_err(|status| agent_proto::fault(&status).code)
    };
    assert_eq!(code(append(other, format!("{job}.1.0"))), Err(Code::Denied), "the rank is on the other one");
    for rank in [1, 5, 4_000_000_000_u64] {
        for node in [own, other] {
            assert_eq!(code(append(node, format!("{job}.1.{rank}"))), Err(Code::Fenced), "rank {rank}");
        }
    }
    assert_eq!(code(append(own, format!("{job}.1.0"))), Ok(String::new()));
    let archive = site.controller.state().join("controller/archive").join(&job);
    let ranks: Vec<_> = fs::read_dir(&archive).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(ranks.iter().all(|name| name.to_string_lossy().starts_with("1.0.")), "{ranks:?}");
}

#[test]
fn test_a_user_at_a_limit_waits_for_the_own_jobs_and_nobody_else_does() {
    let mut site = Site::with(&[("AGENTD_LIMITS_PER_USER", "jobs=1")]);
    ["ada", "bob"].iter().for_each(|user| site.add_user(user, "submit"));
    site.add_node("n0", "127.0.0.1");
    let gate = site.path("gate");
    let waits = format!("command: 'while ! [ -e {} ]; do sleep 0.05; done'\n", gate.display());
    let submit = |user: &str| {
        let project = site.project(user, &waits);
        site.by(user, &["submit", &project]).ok().stdout.trim().to_owned()
    };
    let state =
        |job: &str| site.json(&["show", job, "--json"])["state"].as_str().unwrap_or_default().to_owned();
    let runs = |job: &str| eventually("it runs", SOON, || (state(job) == "Running").then_some(()));
    let (first, second) = (submit("ada"), submit("ada"));
    runs(&first);
    let others = submit("bob");
    runs(&others);
    assert_eq!(state(&second), "Queued");
    let why = site.by("ada", &["why", &second]).ok().stdout;
    for part in ["user ada has 1 job already", "`limits_per_user`", "allows 1 job at a time"] {
        assert!(why.split_whitespace().collect::<Vec<_>>().join(" ").contains(part), "no `{part}` in {why}");
    }
    let jobs = site.by("ada", &["jobs"]).ok().stdout;
    assert!(jobs.contains("limits_per_user") || jobs.contains("user ada has"), "{jobs}");

    site.by("ada", &["cancel", "--wait", &first]).ok();
    runs(&second);
    fs::write(&gate, "").unwrap();
    for job in [&second, &others] {
        eventually("it ends", SOON, || (state(job) == "Completed").then_some(()));
    }
}

/// How a stranger at a TLS listener begins, before it says nothing more: the second is the head of a handshake.
const BEGUN: [&[u8]; 2] = [b"", b"\x16\x03\x01\x02\x00\x01\x00"];

/// More clients without a certificate than are ever kept.
const STRANGERS: usize = 300;

fn begun(port: u16, said: &[u8]) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(said).ok()?;
    Some(stream)
}

#[test]
fn test_silent_strangers_keep_no_user_and_no_node_out() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    let logs_in = |user: &str| {
        let code = site.json(&["user", "add", user, "--json"])["token"].as_str().unwrap().to_owned();
        site.log_in(user, &code).ok();
    };
    for (number, said) in BEGUN.iter().enumerate() {
        beside_silent_connections(
            || begun(site.port, said),
            || {
                site.by("ada", &["jobs"]).ok();
                logs_in(&format!("early{number}"));
                Some(())
            },
        );
    }
    // Each has shaken hands without a certificate, was refused a call, and stays.
    let strangers: Vec<Channel> = (0..STRANGERS).map(|_| by_nobody(&site)).collect();
    for stranger in &strangers {
        let refused = calls::call(stranger, "/agent.v1.Jobs/List", "a").unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unauthenticated);
    }
    site.by("ada", &["jobs"]).ok();
    logs_in("late");
    drop(strangers);

    let (mut machine, token) = (site.machine("n0"), site.token(&[]));
    beside_silent_connections(
        || begun(site.port, b""),
        || {
            site.join(&machine, "127.0.0.1", &token).ok();
            machine.set("HTTPS_PROXY", "http://127.0.0.1:9");
            machine.spawn();
            site.until_ready("n0");
            Some(())
        },
    );
    site.nodes.push(machine);
}

#[test]
fn test_silent_strangers_keep_no_node_from_the_blobs_of_another() {
    let mut site = Site::new();
    ["n0", "n1"].iter().for_each(|node| site.add_node(node, "127.0.0.1"));
    let log = site.nodes[0].log();
    let line = log.lines().rfind(|line| line.contains("serving blobs to other nodes")).expect("it says so");
    let port = line.split("port=").nth(1).expect("a port");
    let port = port.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("a port");
    let held = Credentials::read(&site.nodes[1].state().join("identity.json")).unwrap().unwrap();
    for said in BEGUN {
        beside_silent_connections(
            || begun(port, said),
            || {
                let trust = Trust::Node(held.authority().unwrap(), "n0".parse().unwrap());
                let other = calls::channel_to(port, trust, Some(&held));
                let blob = format!("blobs/{}/9", "0".repeat(64));
                let read = calls::call(&other, "/google.bytestream.ByteStream/Read", &blob).unwrap_err();
                assert_eq!(read.code(), tonic::Code::NotFound, "{read:?}");
                Some(())
            },
        );
    }
}
