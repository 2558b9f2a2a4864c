//! The generated protocol code is what the `.proto` files say.
//!
//! `AGENT_UPDATE_GENERATED=1 cargo test --workspace --test repo generated` writes it anew.

use std::path::Path;

/// What is generated: its file, and of which ones below `proto`.
const GENERATED: [(&str, &[&str]); 2] = [
    (
        "proto/src/generated/agent.v1.rs",
        &[
            "agent/v1/identity.proto",
            "agent/v1/job.proto",
            "agent/v1/node.proto",
            "agent/v1/pool.proto",
            "agent/v1/telemetry.proto",
            "agent/v1/worker.proto",
        ],
    ),
    ("agent/cas/src/remote/generated/google.bytestream.rs", &["google/bytestream/bytestream.proto"]),
];

/// Messages whose bytes are not copied.
const SHARED: [&str; 4] =
    [".google.bytestream", ".agent.v1.AppendRequest", ".agent.v1.LogChunk", ".agent.v1.TrackingChunk"];

#[test]
#[allow(clippy::disallowed_methods, reason = "a switch for whoever changes the protocol")]
fn test_generated_protocol_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (stored, protos) in GENERATED {
        let stored = root.join(stored);
        let made = tempfile::tempdir().unwrap();
        let descriptors = protox::compile(protos, [root.join("proto")]).unwrap();
        let builder = tonic_prost_build::configure().out_dir(made.path());
        SHARED
            .iter()
            .fold(builder, |builder, shared| builder.bytes(shared))
            .compile_fds(descriptors)
            .unwrap();
        let made = std::fs::read_to_string(made.path().join(stored.file_name().unwrap())).unwrap();
        if std::env::var_os("AGENT_UPDATE_GENERATED").is_some() {
            std::fs::write(&stored, made).unwrap();
            continue;
        }
        let is = std::fs::read_to_string(&stored).unwrap_or_default();
        assert!(is == made, "{} is stale: see the top of {}", stored.display(), file!());
    }
}
