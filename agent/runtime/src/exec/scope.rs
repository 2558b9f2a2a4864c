//! Scopes of systemd around supervisors and builders, where it runs the machine ([`agent_spawn::Scope`]). A machine
//! without it, or one that refuses, costs nothing: the shim then makes groups where it stands.

use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_shim::Hello;
use agent_spawn::{Scope, ScopeError};

use super::Command;

pub(super) use agent_spawn::can_make_scopes as is_possible;

/// How long systemd may take to answer.
const WITHIN: Duration = Duration::from_secs(5);

/// Where its programs are looked for.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The machine is being stopped: what is ended now is ended because of that.
pub async fn is_stopping() -> bool {
    if !Path::new("/run/systemd/system").is_dir() {
        return false;
    }
    let ask = Command::new("systemctl").envs([("PATH", PATH)]).stall(WITHIN).arg("is-system-running");
    ask.capture().await.is_ok_and(|said| said.text.trim_ascii() == b"stopping")
}

/// Puts the shim that says `hello` into a scope of its own and waits until it is there. Said again of one
/// that is in its scope, it changes nothing.
pub(super) async fn enclose(hello: &Hello, metadata: bool) -> Result<(), ScopeError> {
    if !is_possible() {
        return Ok(());
    }
    let scope = Scope::Job { replica: hello.replica.clone(), instance: hello.instance.clone(), metadata };
    make(hello.pid, scope).await.map(drop)
}

/// Puts a child into a scope of its own that limits its memory, and returns its control group.
pub(super) async fn limit(pid: i32, number: u64, memory: u64) -> Result<PathBuf, ScopeError> {
    make(pid, Scope::Builder { number, memory }).await
}

async fn make(pid: i32, scope: Scope) -> Result<PathBuf, ScopeError> {
    let made = tokio::task::spawn_blocking(move || agent_spawn::enclose(pid, &scope)).await;
    made.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
