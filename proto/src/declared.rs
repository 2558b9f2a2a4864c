//! What the `.proto` files declare, for tests of who may call what: a call that is added is found without a word.

use std::path::Path;

/// Every call of the product's own services, as `/service/method`. For tests: reads the repository, and panics where
/// there is none.
pub fn declared_calls() -> Vec<String> {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("agent/v1");
    let mut calls = Vec::new();
    for file in std::fs::read_dir(protos).expect("the protocol's directory") {
        let path = file.expect("an entry of it").path();
        let text = std::fs::read_to_string(path).expect("a file of the protocol");
        let mut service = "";
        for line in text.lines() {
            let words: Vec<&str> =
                line.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).collect();
            match words[..] {
                ["service", name, ..] if line.starts_with("service") => service = name,
                ["rpc", name, ..] => calls.push(format!("/agent.v1.{service}/{name}")),
                _ => {}
            }
        }
    }
    calls
}
