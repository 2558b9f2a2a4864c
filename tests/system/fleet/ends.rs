//! What is open ends when whoever opened it loses what he opened it with.

use std::time::Duration;

use agent_proto::v1;
use agent_proto::v1::jobs_client::JobsClient;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_tests::client::runtime;
use agent_tests::{SOON, eventually};
use tokio_stream::StreamExt;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::Site;
use super::limits::by_hand;

/// Something that is open, until its end.
type Open = Box<dyn FnOnce() -> Option<Status>>;

/// The end of a stream that has begun: its error, `None` where it ends well.
fn end_of<T: Send + 'static>(mut stream: Streaming<T>) -> Open {
    Box::new(move || {
        runtime().block_on(async {
            let read = async {
                loop {
                    match stream.message().await {
                        Ok(Some(_)) => {}
                        Ok(None) => break None,
                        Err(status) => break Some(status),
                    }
                }
            };
            tokio::time::timeout(Duration::from_secs(30), read).await.expect("it is open for ever")
        })
    })
}

fn log(channel: &Channel, job: &str) -> Open {
    let request = v1::ReadLogRequest {
        job: job.to_owned(),
        stream: "job".to_owned(),
        follow: true,
        ..v1::ReadLogRequest::default()
    };
    let mut stream =
        runtime().block_on(TelemetryClient::new(channel.clone()).read_log(request)).unwrap().into_inner();
    assert!(runtime().block_on(stream.message()).unwrap().is_some());
    end_of(stream)
}

/// Everything that is open for long.
fn open_all(channel: &Channel, job: &str) -> Vec<(&'static str, Open)> {
    let get = v1::GetJobRequest { job: job.to_owned(), ..v1::GetJobRequest::default() };
    let watch = runtime().block_on(JobsClient::new(channel.clone()).watch(get)).unwrap().into_inner();
    let tracking =
        v1::ReadTrackingRequest { job: job.to_owned(), follow: true, ..v1::ReadTrackingRequest::default() };
    let tracking = runtime().block_on(TelemetryClient::new(channel.clone()).read_tracking(tracking));
    let command = v1::SessionCommand {
        argv: ["sh", "-c", "echo open; sleep 600"].map(str::to_owned).into(),
        ..v1::SessionCommand::default()
    };
    let first = v1::SessionInput {
        job: job.to_owned(),
        open: Some(v1::SessionOpen { to: Some(v1::session_open::To::Command(command)) }),
        ..v1::SessionInput::default()
    };
    let inputs = tokio_stream::once(first).chain(tokio_stream::pending());
    let session = runtime().block_on(JobsClient::new(channel.clone()).session(inputs)).unwrap();
    vec![
        ("Watch", end_of(watch)),
        ("ReadLog", log(channel, job)),
        ("ReadTracking", end_of(tracking.unwrap().into_inner())),
        ("Session", end_of(session.into_inner())),
    ]
}

#[test]
fn test_what_is_open_ends_with_its_user() {
    let mut site = Site::new();
    site.add_user("ada", "submit");
    site.add_user("bob", "operate");
    site.add_node("n0", "127.0.0.1");
    let project = site.project("ada", "command: 'echo begun; sleep 600'\n");
    let job = site.by("ada", &["submit", &project]).ok().stdout.trim().to_owned();
    eventually("it runs", SOON, || site.by("ada", &["logs", &job]).stdout.contains("begun").then_some(()));
    let (ada, bob) = (by_hand(&site, "ada"), by_hand(&site, "bob"));

    // Who loses a role loses what he opened with it, and nothing else does.
    let (of_bob, of_ada) = (log(&bob, &job), open_all(&ada, &job));
    site.ctl(&["user", "add", "bob", "--role", "submit"]).ok();
    assert_eq!(of_bob().expect("an error").code(), Code::Unavailable);
    let request = v1::GetJobRequest { job: job.clone(), ..v1::GetJobRequest::default() };
    let again = runtime().block_on(JobsClient::new(bob).watch(request)).unwrap_err();
    assert_eq!(again.code(), Code::PermissionDenied);

    // A machine was lost: nothing of it is good any more, and its owner goes on elsewhere.
    site.ctl(&["user", "revoke", "ada"]).ok().says("stays a user");
    for (what, end) in of_ada {
        assert_eq!(end().expect(what).code(), Code::Unauthenticated, "{what}");
    }
    site.by("ada", &["jobs"]).says("NET-103");
    let code = site.json(&["user", "add", "ada", "--json"])["token"].as_str().unwrap().to_owned();
    site.log_in("ada", &code).ok();
    site.by("ada", &["show", &job]).ok();

    let opened = open_all(&by_hand(&site, "ada"), &job);
    site.ctl(&["user", "remove", "ada"]).ok();
    for (what, end) in opened {
        assert_eq!(end().expect(what).code(), Code::Unauthenticated, "{what}");
    }
    site.ctl(&["user", "revoke", "ada"]).code(1).says("there is no user `ada`");
    site.ctl(&["cancel", "--wait", &job]).ok();
}
