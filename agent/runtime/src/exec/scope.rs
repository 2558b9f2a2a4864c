//! Scopes of systemd around supervisors, if systemd runs the machine ([`agent_spawn::Scope`]). Without
//! it, or if it refuses, nothing is lost: the shim then makes groups where it runs.

use std::path::Path;
use std::time::Duration;

use agent_command::Command;
use agent_shim::Hello;
use agent_spawn::{Scope, ScopeError};

pub(super) use agent_spawn::can_make_scopes as is_possible;

/// How long systemd may take to answer.
const WITHIN: Duration = Duration::from_secs(5);

/// Where systemd's programs are looked for.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Whether the machine is being stopped, which then explains why processes end.
pub async fn is_stopping() -> bool {
    if !Path::new("/run/systemd/system").is_dir() {
        return false;
    }
    let ask = Command::new("systemctl").envs([("PATH", PATH)]).stall(WITHIN).arg("is-system-running");
    ask.capture().await.is_ok_and(|said| said.text.trim_ascii() == b"stopping")
}

/// Puts the shim of this `hello` into a scope of its own and waits until it is there. Does nothing to a shim that is
/// in its scope already.
pub(super) async fn enclose(hello: &Hello, metadata: bool) -> Result<(), ScopeError> {
    if !is_possible() {
        return Ok(());
    }
    let scope = Scope::Job { replica: hello.replica.clone(), instance: hello.instance.clone(), metadata };
    let pid = hello.pid;
    agent_blocking::blocking(move || agent_spawn::enclose(pid, &scope)).await.map(drop)
}
