//! A transient scope of systemd around each supervisor, so that jobs do not belong to the daemon's service: it may be
//! restarted or changed, and systemd limits and accounts for each job, too. Also one around each builder, because a
//! service may not limit a part of itself.
//!
//! systemd is asked through `busctl`, which is installed wherever systemd is.

use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use agent_model::ReplicaId;
use agent_shim::cgroup::SCOPE_PREFIX;
use agent_shim::process::Process;
use agent_shim::sys;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

/// How long systemd may take to make a scope.
const WITHIN: Duration = Duration::from_secs(5);

/// Pause between two checks whether the process is in its scope.
const LOOK: Duration = Duration::from_millis(10);

/// The slice of all jobs.
const SLICE: &str = "agentjobs.slice";

/// Where `busctl` is looked for.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a scope is for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// A supervisor and its job.
    Job {
        /// The replica.
        replica: ReplicaId,
        /// Which supervisor of the replica this is.
        instance: String,
        /// The addresses of the cloud's metadata service stay reachable.
        metadata: bool,
    },
    /// A builder.
    Builder {
        /// Which of the daemon's builders.
        number: u64,
        /// The most memory it may take, in bytes.
        memory: u64,
    },
}

/// Why a process is not in a scope.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ScopeError {
    #[error("systemd could not be asked for a scope")]
    Run(#[from] io::Error),
    #[error("systemd made no scope: {0}")]
    Refused(String),
    #[error("systemd did not move the process into its scope for {WITHIN:?}")]
    Slow,
    #[error("the process has ended")]
    Gone,
}

/// Whether systemd runs this machine, and makes scopes for this process.
pub fn is_possible() -> bool {
    let has_manager = is_root() || crate::has_helper() || user_bus().is_some();
    Path::new("/run/systemd/system").is_dir() && has_manager
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The runtime directory of this user, if the user's own systemd manager listens there.
fn user_bus() -> Option<String> {
    let dir = format!("/run/user/{}", nix::unistd::geteuid());
    Path::new(&dir).join("bus").exists().then_some(dir)
}

/// Makes the scope, and waits until the process is in it. A process that is in a job's scope already stays there.
pub(crate) fn make(pid: i32, scope: &Scope) -> Result<PathBuf, ScopeError> {
    if let Some(group) = group_of(pid, SCOPE_PREFIX) {
        return Ok(group);
    }
    let lives = || Process::find(pid).is_some();
    let (name, request) = request(pid, scope);
    if !lives() {
        return Err(ScopeError::Gone);
    }
    call(&request)?;
    let deadline = Instant::now() + WITHIN;
    loop {
        match group_of(pid, &name) {
            Some(group) => return Ok(group),
            None if !lives() => return Err(ScopeError::Gone),
            None if Instant::now() >= deadline => return Err(ScopeError::Slow),
            None => thread::sleep(LOOK),
        }
    }
}

/// The control group (version 2, or else any) of the scope that a process is in and whose name begins with `name`.
pub(crate) fn group_of(pid: i32, name: &str) -> Option<PathBuf> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let is_scope = |part: &str| part.starts_with(name) && part.ends_with(".scope");
    let of_line = |line: &str| {
        let path = line.splitn(3, ':').nth(2)?.trim_start_matches('/');
        let end = path.split('/').position(is_scope)? + 1;
        Some(path.split('/').take(end).collect::<PathBuf>())
    };
    groups.lines().rev().find_map(of_line).map(|path| Path::new("/sys/fs/cgroup").join(path))
}

/// Runs `busctl`; its error output is a line or two.
fn call(request: &[String]) -> Result<(), ScopeError> {
    #[allow(clippy::disallowed_methods, reason = "this module asks systemd")]
    let mut command = Command::new("busctl");
    command.env_clear().env("PATH", PATH).current_dir("/").stdin(Stdio::null());
    if let Some(dir) = user_bus().filter(|_| !is_root()) {
        command.env("XDG_RUNTIME_DIR", dir).arg("--user");
    }
    let mut child = command.args(request).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let ended = sys::pidfd_open(child.id() as i32).map_err(ScopeError::from).and_then(|pidfd| {
        let timeout = PollTimeout::try_from(WITHIN).unwrap_or(PollTimeout::MAX);
        let ready = poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], timeout);
        if ready.map_err(io::Error::from)? == 0 { Err(ScopeError::Slow) } else { Ok(()) }
    });
    if ended.is_err() {
        let _ = child.kill(); // it has ended already, or ends now
    }
    let status = child.wait()?;
    ended?;
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    if let Some(mut error) = child.stderr.take() {
        let _ = error.read_to_string(&mut said); // only for the message
    }
    Err(ScopeError::Refused(said.trim().to_owned()))
}

/// Addresses of the metadata services of clouds, which also hand out keys: 169.254.169.254 and fd00:ec2::254.
const METADATA: [(&str, &str, &[&str]); 2] = [
    ("2", "32", &["169", "254", "169", "254"]),
    ("10", "128", &["253", "0", "14", "194", "0", "0", "0", "0", "0", "0", "0", "0", "0", "0", "2", "84"]),
];

fn resolvers() -> String {
    std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default()
}

/// The addresses to deny to a job or a builder, as `busctl` arguments. One that is also the name server, as in some clouds, stays.
fn denied(resolvers: &str) -> Vec<&'static str> {
    let is_resolver = resolvers.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("nameserver") && words.next() == Some("169.254.169.254")
    });
    let kept = &METADATA[usize::from(is_resolver)..];
    let count = if is_resolver { "1" } else { "2" };
    let mut words = vec!["IPAddressDeny", "a(iayu)", count];
    for (family, prefix, bytes) in kept {
        words.extend([*family, if bytes.len() == 4 { "4" } else { "16" }]);
        words.extend(bytes.iter());
        words.push(prefix);
    }
    words
}

/// The name of the scope, and the call for it.
fn request(pid: i32, scope: &Scope) -> (String, Vec<String>) {
    let (pid, pids) = (pid.to_string(), ["PIDs", "au", "1"]);
    let usual: [&[&str]; 2] = [&["Slice", "s", SLICE], &["CollectMode", "s", "inactive-or-failed"]];
    match scope {
        Scope::Job { replica, instance, metadata } => {
            let name = format!("{SCOPE_PREFIX}{replica}-{}.scope", instance.get(..8).unwrap_or(instance));
            let description = format!("Job {replica}");
            let denied = if !metadata && is_root() { denied(&resolvers()) } else { Vec::new() };
            let own: [&[&str]; 4] = [
                &["Description", "s", &description],
                &[&pids[..], &[&pid]].concat(),
                &["Delegate", "b", "true"],
                &["TasksMax", "t", "18446744073709551615"], // the job's own group has the limit
            ];
            let more = (!denied.is_empty()).then_some(denied.as_slice());
            let properties: Vec<&[&str]> = own.into_iter().chain(usual).chain(more).collect();
            let call = words(&name, &properties);
            (name, call)
        }
        Scope::Builder { number, memory } => {
            let name = format!("agent-builder-{}-{number}.scope", std::process::id());
            let memory = memory.to_string();
            let denied = if is_root() { denied(&resolvers()) } else { Vec::new() };
            let own: [&[&str]; 5] = [
                &["Description", "s", "Builder of an environment"],
                &[&pids[..], &[&pid]].concat(),
                &["MemoryMax", "t", &memory],
                &["MemorySwapMax", "t", "0"],
                &["CPUWeight", "t", "20"],
            ];
            let more = (!denied.is_empty()).then_some(denied.as_slice());
            let call = words(&name, &own.into_iter().chain(usual).chain(more).collect::<Vec<_>>());
            (name, call)
        }
    }
}

/// The call as `busctl` arguments: each property is its name, its type and its value.
fn words(unit: &str, properties: &[&[&str]]) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_process_that_has_ended_is_not_waited_for() {
        #[allow(clippy::disallowed_methods, reason = "a process that ends at once")]
        let mut child = Command::new("true").spawn().unwrap();
        while Process::find(child.id() as i32).is_some() {
            thread::sleep(LOOK);
        }
        // It is not reaped yet, and systemd, if it is there, is not asked.
        let made = make(child.id() as i32, &Scope::Builder { number: 0, memory: 1 << 30 });
        assert!(matches!(made, Err(ScopeError::Gone)), "{made:?}");
        child.wait().unwrap();
    }

    #[test]
    fn test_call_names_the_unit_the_slice_and_the_process() {
        let scope = |metadata| Scope::Job {
            replica: "train.1.0".parse().unwrap(),
            instance: "0123456789".into(),
            metadata,
        };
        let (name, words) = request(77, &scope(true));
        assert_eq!(name, "agent-job-train.1.0-01234567.scope");
        let words = words.join(" ");
        assert!(words.contains(&format!(" {name} fail 6 Description s ")), "{words}");
        assert!(words.contains(" PIDs au 1 77 Delegate b true "), "{words}");
        assert!(words.contains(" Slice s agentjobs.slice "), "{words}");
        assert!(words.ends_with(" 0"), "{words}");
        let (_, builder) = request(77, &Scope::Builder { number: 3, memory: 1 << 30 });
        assert!(builder.join(" ").contains(" MemoryMax t 1073741824 MemorySwapMax t 0 "));
        assert!(
            builder.contains(&"IPAddressDeny".to_owned()),
            "code of packages is nobody who may know the machine's keys"
        );
    }

    #[test]
    fn test_what_a_cloud_tells_of_the_machine_is_kept_from_jobs_unless_it_answers_for_names() {
        let usual = "IPAddressDeny a(iayu) 2 2 4 169 254 169 254 32 \
                     10 16 253 0 14 194 0 0 0 0 0 0 0 0 0 0 2 84 128";
        let words = |resolvers| denied(resolvers).join(" ");
        assert_eq!(words("nameserver 127.0.0.53\n# nameserver 169.254.169.254\n"), usual);
        let rest = "IPAddressDeny a(iayu) 1 10 16 253 0 14 194 0 0 0 0 0 0 0 0 0 0 2 84 128";
        assert_eq!(words("search x\nnameserver 169.254.169.254\n"), rest);
    }
}
