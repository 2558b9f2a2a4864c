//! `agent-env`: builds one conda environment, or fetches or uploads data, and ends.
//!
//! Owns the order of things: read the request, do it, report the outcome. Hides nothing; all knowledge of conda is
//! below [`engine`].
//!
//! Invariants: the last line on standard output is the outcome, and the exit status repeats it; no process of this
//! program outlives its caller.

mod engine;

use std::io::Read;
use std::process::ExitCode;

use agent_env::{EngineEvent, EngineRequest, Failure, FailureKind, VERSION};

use engine::tell::Teller;

fn main() -> ExitCode {
    let teller = Teller::to_stdout();
    engine::orphan::end_with_parent();
    let outcome = match read() {
        Ok(request) => engine::perform(request.task, &teller),
        Err(message) => EngineEvent::Failed(engine::failed(FailureKind::Other, message)),
    };
    let done = !matches!(outcome, EngineEvent::Failed(Failure { .. }));
    teller.tell(&outcome);
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn read() -> Result<EngineRequest, String> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|error| format!("cannot read the request: {error}"))?;
    // The version is checked first: nothing else in a newer request can be relied on.
    let version = serde_json::from_str::<serde_json::Value>(&text)
        .map_err(|error| format!("the request is not JSON: {error}"))?
        .get("version")
        .and_then(serde_json::Value::as_u64);
    if version != Some(u64::from(VERSION)) {
        return Err(format!(
            "this engine understands requests of version {VERSION}, not {}; install the agentd and agent-env of one release",
            version.map_or("without a version".to_owned(), |v| v.to_string())
        ));
    }
    serde_json::from_str(&text).map_err(|error| format!("the request cannot be understood: {error}"))
}
