//! The generated protocol code is what the `.proto` files say.
//!
//! `AGENT_UPDATE_GENERATED=1 cargo test -p agent-tests --test repo generated` writes it anew.

use std::path::Path;

const PROTOS: [&str; 4] =
    ["agent/v1/job.proto", "agent/v1/node.proto", "agent/v1/telemetry.proto", "agent/v1/worker.proto"];

#[test]
#[allow(clippy::disallowed_methods, reason = "a switch for whoever changes the protocol")]
fn test_generated_protocol_code_is_current() {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto");
    let made = tempfile::tempdir().unwrap();
    let descriptors = protox::compile(PROTOS, [&proto]).unwrap();
    tonic_prost_build::configure().out_dir(made.path()).compile_fds(descriptors).unwrap();
    let made = std::fs::read_to_string(made.path().join("agent.v1.rs")).unwrap();
    let stored = proto.join("src/generated/agent.v1.rs");
    if std::env::var_os("AGENT_UPDATE_GENERATED").is_some() {
        std::fs::write(&stored, made).unwrap();
        return;
    }
    let is = std::fs::read_to_string(&stored).unwrap_or_default();
    assert!(is == made, "{} is stale: see the top of {}", stored.display(), file!());
}
