//! A transient scope of systemd around each shim, so that jobs are nobody's children but their own: the
//! service of the daemon may be restarted or changed, and the job's limits and accounts are systemd's too.
//!
//! Asked for through `busctl`, which is there wherever systemd is. A machine without systemd, or one that
//! refuses, costs nothing: the shim then makes groups where it stands.

use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_shim::Hello;
use agent_shim::cgroup::SCOPE_PREFIX;

use super::{Command, CommandError};

/// How long systemd may take to make a scope.
const WITHIN: Duration = Duration::from_secs(5);

/// Between two looks whether the shim is in its scope.
const LOOK: Duration = Duration::from_millis(10);

/// The slice of all jobs.
const SLICE: &str = "agent-jobs.slice";

/// Where `busctl` is looked for.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a shim is not in a scope.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScopeError {
    /// `busctl` could not be run.
    #[error(transparent)]
    Run(#[from] CommandError),
    /// systemd would not.
    #[error("systemd made no scope: {0}")]
    Refused(String),
    /// The scope was promised, and the shim is not in it.
    #[error("systemd did not move the supervisor into its scope for {WITHIN:?}")]
    Slow,
}

/// Whether systemd runs this machine.
pub(super) fn is_possible() -> bool {
    Path::new("/run/systemd/system").is_dir() && (is_root() || user_bus().is_some())
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Where the manager of this user listens.
fn user_bus() -> Option<String> {
    let dir = format!("/run/user/{}", nix::unistd::geteuid());
    Path::new(&dir).join("bus").exists().then_some(dir)
}

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
pub(super) async fn enclose(hello: &Hello) -> Result<(), ScopeError> {
    if !is_possible() || is_in_scope(hello.pid) {
        return Ok(());
    }
    make(&request(hello)).await?;
    within(|| is_in_scope(hello.pid)).await
}

/// Puts a child into a scope of its own that limits its memory, and returns its control group.
pub(super) async fn limit(pid: i32, number: u64, memory: u64) -> Result<PathBuf, ScopeError> {
    let name = format!("agent-builder-{}-{number}.scope", std::process::id());
    let (process, memory) = (pid.to_string(), memory.to_string());
    let properties: [&[&str]; 7] = [
        &["Description", "s", "Builder of an environment"],
        &["Slice", "s", SLICE],
        &["PIDs", "au", "1", &process],
        &["MemoryMax", "t", &memory],
        &["MemorySwapMax", "t", "0"],
        &["CPUWeight", "t", "20"],
        &["CollectMode", "s", "inactive-or-failed"],
    ];
    make(&call(&name, &properties)).await?;
    let group = || {
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
        path.ends_with(&name).then(|| Path::new("/sys/fs/cgroup").join(path))
    };
    within(|| group().is_some()).await?;
    group().ok_or(ScopeError::Slow)
}

async fn make(request: &[String]) -> Result<(), ScopeError> {
    let mut command = Command::new("busctl").envs([("PATH", PATH)]).stall(WITHIN);
    if let Some(dir) = user_bus().filter(|_| !is_root()) {
        command = command.envs([("XDG_RUNTIME_DIR", dir)]).arg("--user");
    }
    let output = command.args(request).capture().await?;
    if !output.status.success() {
        return Err(ScopeError::Refused(String::from_utf8_lossy(&output.text).trim().to_owned()));
    }
    Ok(())
}

/// Waits until systemd did what it promised.
async fn within(done: impl Fn() -> bool) -> Result<(), ScopeError> {
    let there = async {
        while !done() {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(WITHIN, there).await.map_err(|_| ScopeError::Slow)
}

/// The call for the scope of a job.
fn request(hello: &Hello) -> Vec<String> {
    let instance = hello.instance.get(..8).unwrap_or(&hello.instance);
    let unit = format!("{SCOPE_PREFIX}{}-{instance}.scope", hello.replica);
    let (description, pid) = (format!("Job {}", hello.replica), hello.pid.to_string());
    let properties: [&[&str]; 6] = [
        &["Description", "s", &description],
        &["Slice", "s", SLICE],
        &["PIDs", "au", "1", &pid],
        &["Delegate", "b", "true"],
        &["TasksMax", "t", "18446744073709551615"], // the job's own group has the limit
        &["CollectMode", "s", "inactive-or-failed"],
    ];
    call(&unit, &properties)
}

/// The call, in the words of `busctl`: each property is its name, its type and its value.
fn call(unit: &str, properties: &[&[&str]]) -> Vec<String> {
    let call = [
        "--quiet",
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        unit,
        "fail",
    ];
    let count = properties.len().to_string();
    let words = call.into_iter().chain([count.as_str()]).chain(properties.iter().copied().flatten().copied());
    words.chain(["0"]).map(str::to_owned).collect()
}

fn is_in_scope(pid: i32) -> bool {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let of_scope = |part: &str| part.starts_with(SCOPE_PREFIX) && part.ends_with(".scope");
    groups.split(['/', '\n']).any(of_scope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_call_names_the_unit_the_slice_and_the_process() {
        let hello = Hello {
            version: 2,
            instance: "0123456789".into(),
            replica: "train.1.0".parse().unwrap(),
            pid: 77,
            boot_id: String::new(),
            at: agent_model::Timestamp(0),
            containment: String::new(),
            groups: Vec::new(),
            container: false,
            kills: None,
        };
        let words = request(&hello).join(" ");
        assert!(words.contains(" agent-job-train.1.0-01234567.scope fail 6 Description s "), "{words}");
        assert!(words.contains(" Slice s agent-jobs.slice PIDs au 1 77 Delegate b true "), "{words}");
        assert!(words.ends_with(" 0"), "{words}");
    }
}
