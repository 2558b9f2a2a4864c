//! What a daemon tells of its environments and interpreters, and what may be wanted of them.

use agent_model::{EnvSpec, Fault, JobDraft};
use agent_proto::v1;
use agent_proto::v1::nodes_client::NodesClient;

use crate::harness::{Daemon, eventually};

/// The environments that the daemon shows.
async fn shown(daemon: &Daemon) -> Vec<v1::CachedEnvironment> {
    let node = daemon.nodes().await.unwrap().remove(0);
    node.inventory.map(|inventory| inventory.environments).unwrap_or_default()
}

async fn manage(
    daemon: &Daemon,
    key: &str,
    want: &str,
    node: Option<&str>,
) -> Result<v1::CachedEnvironment, Fault> {
    let own = daemon.nodes().await.unwrap().remove(0).node;
    let node = node.map_or(own, str::to_owned);
    let (environment, want) = (key.to_owned(), want.to_owned());
    let request = v1::ManageEnvironmentRequest { node, environment, want };
    match NodesClient::new(daemon.channel()).manage_environment(request).await {
        Ok(done) => Ok(done.into_inner().environment.unwrap()),
        Err(status) => Err(agent_proto::fault(&status)),
    }
}

#[tokio::test]
async fn test_job_waits_for_a_python_that_no_node_has_and_says_which_there_are() {
    let daemon = Daemon::started("").await;
    let interpreters = eventually("the interpreters are told", async || {
        let inventory = daemon.nodes().await.unwrap().into_iter().next()?.inventory?;
        Some(inventory.interpreters).filter(|interpreters| !interpreters.is_empty())
    })
    .await;
    assert!(interpreters.iter().any(|one| one.name == "python3" && one.version.starts_with("3.")));
    let environment = EnvSpec::Host { python: "python9.9".into(), requirements: vec![] };
    let job = daemon.submit(JobDraft { command: "true".into(), environment, ..JobDraft::default() }).await;
    let why = eventually("it is said why the job waits", async || {
        Some(daemon.job(&job).await?.detail).filter(|detail| !detail.is_empty())
    })
    .await;
    assert!(why.starts_with("no node has a Python called python9.9; "), "{why}");
    assert!(why.contains(" has python3 (3."), "{why}");
    let other = daemon.run("true").await;
    assert_eq!(daemon.ended(&other).await.state, "Completed", "it holds up nobody");
    daemon.cancel(&job).await;
    assert_eq!(daemon.ended(&job).await.state, "Canceled");
}

#[tokio::test]
async fn test_environment_is_shown_pinned_and_removed_once_no_job_uses_it() {
    let daemon = Daemon::started("").await;
    let environment = EnvSpec::Pip { python: "python3".into(), requirements: Vec::new() };
    let command = "echo up; while [ ! -e go ]; do sleep 0.02; done";
    let job = daemon.submit(JobDraft { command: command.into(), environment, ..JobDraft::default() }).await;
    eventually("the job is up", async || (daemon.log(&job, "job").await == "up\n").then_some(())).await;
    let kept = eventually("its environment is shown as used", async || {
        shown(&daemon).await.into_iter().find(|kept| kept.key.starts_with("pip-") && kept.uses == 1)
    })
    .await;
    assert!(kept.built_ms > 0 && !kept.log.is_empty() && !kept.pinned, "{kept:?}");

    let refused = manage(&daemon, &kept.key, "remove", None).await.unwrap_err();
    assert_eq!(refused.code.as_str(), "ENV-111");
    assert!(refused.why.iter().any(|why| why.contains(&job)), "{refused:?}");
    assert!(manage(&daemon, &kept.key, "pin", None).await.unwrap().pinned);
    assert!(!manage(&daemon, &kept.key, "unpin", None).await.unwrap().pinned);
    for (key, node, code) in [("pip-0", None, "ENV-110"), (kept.key.as_str(), Some("moon"), "NODE-105")] {
        let refused = manage(&daemon, key, "remove", node).await.unwrap_err();
        assert!(refused.code.as_str() == code && refused.fix.is_some(), "{refused:?}");
    }

    std::fs::write(daemon.job_dirs()[0].join("job/work/go"), "").unwrap();
    assert_eq!(daemon.ended(&job).await.state, "Completed");
    assert_eq!(manage(&daemon, &kept.key, "remove", None).await.unwrap().key, kept.key);
    assert!(shown(&daemon).await.iter().all(|left| left.key != kept.key));
    assert!(!daemon.state().join("envs").join(&kept.key).exists());
    assert!(daemon.said().contains("removed an environment as asked"));
}

#[tokio::test]
async fn test_environments_that_take_too_much_go_by_themselves() {
    let mut daemon = Daemon::started("environments_size: 1").await;
    let environment = EnvSpec::Pip { python: "python3".into(), requirements: Vec::new() };
    let job = daemon.submit(JobDraft { command: "true".into(), environment, ..JobDraft::default() }).await;
    assert_eq!(daemon.ended(&job).await.state, "Completed");
    // It is looked at right after the start, and then once a minute.
    daemon.kill();
    daemon.start().await;
    eventually("it makes room", async || {
        daemon.said().contains("removed an environment to make room").then_some(())
    })
    .await;
}

#[tokio::test]
async fn test_job_with_an_image_waits_for_the_container_engine_and_says_so() {
    let daemon = Daemon::started("docker_socket: /nowhere/docker.sock").await;
    let environment = EnvSpec::Image { image: "ubuntu:22.04".into(), conda: None };
    let job = daemon.submit(JobDraft { command: "true".into(), environment, ..JobDraft::default() }).await;
    eventually("it is said what the job waits for", async || {
        let detail = daemon.job(&job).await?.detail;
        (detail.contains("waiting: for the container engine") && detail.contains("/nowhere/docker.sock"))
            .then_some(())
    })
    .await;
    let other = daemon.run("true").await;
    assert_eq!(daemon.ended(&other).await.state, "Completed", "it holds up nobody");
    daemon.cancel(&job).await;
    assert_eq!(daemon.ended(&job).await.state, "Canceled");
}
