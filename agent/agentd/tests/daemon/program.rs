//! The program as operators and scripts meet it.

use std::process::Stdio;

use crate::harness::{Daemon, eventually};

fn says(daemon: &Daemon, arguments: &[&str]) -> (i32, String) {
    let output =
        daemon.command().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

#[tokio::test]
async fn test_second_daemon_gives_up_and_the_first_goes_on() {
    let daemon = Daemon::started("").await;
    let (code, text) = says(&daemon, &["run"]);
    assert_eq!(code, 75, "{text}");
    assert!(text.contains("error[CFG-102]") && text.contains(&daemon.process().to_string()), "{text}");
    daemon.nodes().await.unwrap();
}

#[tokio::test]
async fn test_of_many_daemons_on_one_directory_one_lives_and_the_next_takes_over() {
    let mut home = Daemon::new("roles: controller");
    for round in 0..4 {
        let mut many: Vec<_> =
            (0..6).map(|_| home.command().arg("run").stderr(Stdio::null()).spawn().unwrap()).collect();
        eventually("all but one give up", async || {
            many.iter_mut()
                .map(|one| one.try_wait().unwrap())
                .filter(Option::is_none)
                .count()
                .eq(&1)
                .then_some(())
        })
        .await;
        eventually("it serves", async || home.nodes().await.ok()).await;
        for mut one in many {
            match one.try_wait().unwrap() {
                Some(status) => assert_eq!(status.code(), Some(75), "round {round}"),
                None => {
                    one.kill().unwrap();
                    one.wait().unwrap();
                }
            }
        }
    }
    home.start().await;
    assert!(!home.state().join("controller/db.damaged-1").exists());
    assert!(home.stop().await.success());
}

#[test]
fn test_exit_codes_tell_usage_from_configuration() {
    let good = Daemon::new("slots: 3");
    assert_eq!(says(&good, &["check-config"]), (0, "the configuration is valid\n".into()));
    assert!(says(&good, &["show-config"]).1.contains("slots: 3"));
    assert_eq!(says(&good, &["--no-such-flag"]).0, 64);
    assert_eq!(says(&good, &["--version"]).0, 0);
    let bad = Daemon::new("slots: 3\nslotz: 4");
    let (code, text) = says(&bad, &["run"]);
    assert_eq!(code, 78);
    assert!(
        text.contains("error[CFG-101]") && text.contains("line 2, column 1: unknown key `slotz`"),
        "{text}"
    );
}

#[test]
fn test_state_that_cannot_be_used_now_may_be_tried_again() {
    let daemon = Daemon::new("");
    std::fs::create_dir_all(daemon.state().join("journal.db")).unwrap();
    let (code, text) = says(&daemon, &["run"]);
    assert_eq!(code, 74, "{text}");
    assert!(text.contains("cannot open the journal"), "{text}");
}

#[test]
fn test_probe_needs_no_daemon() {
    let (code, text) = says(&Daemon::new("slots: 5"), &["probe", "--json"]);
    assert_eq!(code, 0, "{text}");
    let inventory: agent_model::node::Inventory = serde_json::from_str(&text).unwrap();
    assert_eq!(inventory.slots, 5);
    assert!(!inventory.findings.is_empty());
}
