//! The program as operators and scripts meet it.

use std::process::Stdio;

use crate::harness::Daemon;

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
fn test_probe_needs_no_daemon() {
    let (code, text) = says(&Daemon::new("slots: 5"), &["probe", "--json"]);
    assert_eq!(code, 0, "{text}");
    let inventory: agent_model::node::Inventory = serde_json::from_str(&text).unwrap();
    assert_eq!(inventory.slots, 5);
    assert!(!inventory.findings.is_empty());
}
