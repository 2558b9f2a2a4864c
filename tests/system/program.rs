//! The program as operators and scripts meet it.

use std::process::Stdio;

use agent_tests::finish;
use agent_tests::fleet::Daemon;

/// The program with this configuration file and nothing else, and its directory.
fn configured(lines: &str) -> (tempfile::TempDir, Daemon) {
    let home = tempfile::tempdir().unwrap();
    let daemon = Daemon::new(home.path().join("daemon"), lines.to_owned());
    (home, daemon)
}

fn says((_, daemon): &(tempfile::TempDir, Daemon), arguments: &[&str]) -> (i32, String) {
    let ran = finish(daemon.command_of(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()));
    (ran.code, ran.stdout + &ran.stderr)
}

#[test]
fn test_exit_codes_tell_usage_from_configuration() {
    let good = configured("slots: 3");
    assert_eq!(says(&good, &["check-config"]), (0, "the configuration is valid\n".into()));
    assert!(says(&good, &["show-config"]).1.contains("slots: 3"));
    assert_eq!(says(&good, &["--no-such-flag"]).0, 64);
    assert_eq!(says(&good, &["--version"]).0, 0);
    let bad = configured("slots: 3\nslotz: 4");
    let (code, text) = says(&bad, &["run"]);
    assert_eq!(code, 78);
    assert!(
        text.contains("error[CFG-101]") && text.contains("line 2, column 1: unknown key `slotz`"),
        "{text}"
    );
}

#[test]
fn test_state_that_cannot_be_used_now_may_be_tried_again() {
    let daemon = configured("");
    std::fs::create_dir_all(daemon.1.state().join("journal.db")).unwrap();
    let (code, text) = says(&daemon, &["run"]);
    assert_eq!(code, 74, "{text}");
    assert!(text.contains("cannot open the journal"), "{text}");
}

#[test]
fn test_probe_needs_no_daemon() {
    let (code, text) = says(&configured("slots: 5"), &["probe", "--json"]);
    assert_eq!(code, 0, "{text}");
    let inventory: agent_model::node::Inventory = serde_json::from_str(&text).unwrap();
    assert_eq!(inventory.slots, 5);
    assert!(!inventory.findings.is_empty());
}
