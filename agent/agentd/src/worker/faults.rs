//! How a command ended ([`exit`]), and what failed before it could start: errors become faults here.
//!
//! Pure. Each error of a step becomes a [`Fault`] in terms that the user who submitted the job knows.

mod data;
mod exit;

use std::error::Error;
use std::io;
use std::path::Path;
use std::time::Duration;

use agent_cas::remote::told;
use agent_cas::snapshot::{TreeError, Unread};
use agent_cas::{MissingError, ReadError, WriteError};
use agent_model::disk::Shortfall;
use agent_model::{Blame, Code, Fault, JobId, NodeId, Preemption, Retry, causes, size};
use agent_runtime::env::AcquireError;
use agent_runtime::exec::{LaunchError, Lost};
use tonic::Status;

pub(crate) use self::data::{Unsent, data, unsent};
use self::exit::node_out_of_memory;
pub(crate) use self::exit::{
    LEASE_OVER, is_from_elsewhere, judge, lease_over, may_be_of_the_machine, unstored,
};
use super::fetch::FetchError;
pub(crate) use super::journal::Ending;
use super::outputs::CollectError;

/// The fault for an attempt that ended because its machine will be taken away.
pub(crate) fn preempted(notice: &Preemption, node: &NodeId) -> Fault {
    Fault::new(Code::Preempted, format!("{node} was taken away under the job"))
        .why(format!("it {}", notice.describe()))
        .fix("nothing: the job is queued again, and this attempt does not count against `retry`")
}

/// Whether a machine that goes can be the cause of this ending.
pub(crate) fn is_of_the_machine(ending: &Ending) -> bool {
    let of_machine = |fault: &Fault| {
        matches!(
            fault.code,
            Code::NodeRebooted | Code::RunLost | Code::LaunchFailed | Code::NodeUnfit | Code::LeaseOver
        )
    };
    ending.fault.as_ref().is_some_and(of_machine)
}

/// The fault for too little room to go on.
pub(crate) fn disk_full(shortfall: &Shortfall, path: &Path) -> Fault {
    Fault::new(Code::DiskFull, format!("the disk of {} is full", path.display()))
        .because(shortfall)
        .fix("free space there, or lower `disk_reserve` in the node's configuration")
}

/// The fault for code or an input that could not be laid out.
///
/// A blob that a remote store (`elsewhere`) lacks may be there again later. Submitting the job again sends the blobs
/// that the store reports as missing, or that a reader found missing or damaged.
pub(crate) fn fetch(error: &FetchError, elsewhere: bool) -> Fault {
    let code = match error {
        _ if is_no_space(error) => Code::DiskFull,
        FetchError::Data { .. } => Code::DataNode,
        _ if is_of_the_disk(error) => Code::NodeUnfit,
        _ if is_damaged(error) => Code::SnapshotDamaged,
        _ if is_absent(error) => Code::SnapshotMissing,
        _ if is_unusable(error) => Code::SnapshotUnsafe,
        FetchError::Folder { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
            Code::SnapshotUnsafe
        }
        _ => Code::SnapshotStore,
    };
    let fault = Fault::new(code, error.to_string());
    let fault = error.source().into_iter().fold(fault, Fault::because);
    match code {
        Code::DiskFull => {
            fault.fix("free space on the node's disk; `agentctl doctor` shows how much there is")
        }
        Code::NodeUnfit => fault.fix(FAILING),
        Code::SnapshotMissing | Code::SnapshotDamaged if elsewhere => {
            let fix = "submit the job again with `agentctl`: it sends what the store lacks or holds damaged; look at \
                       the server that `blob_store` names";
            Fault { blame: Blame::Network, ..fault }.with_retry(Retry::After(LATER)).fix(fix)
        }
        Code::SnapshotMissing => fault.fix("submit the job again: what is missing is then sent again"),
        Code::SnapshotDamaged => fault.fix("submit the job again: what was damaged is then sent again"),
        Code::SnapshotUnsafe => {
            fault.fix("submit the job with `agentctl`, which says what is wrong before anything is sent")
        }
        _ => fault.fix("look at the log of agentd on the node"),
    }
}

/// What to do about a disk that fails.
const FAILING: &str = "look at the disk of agentd's state directory on the node: `sudo dmesg` has its errors";

/// Whether code or an input could not be laid out because the disk of the node fails.
pub(crate) fn is_of_the_disk(error: &FetchError) -> bool {
    !matches!(error, FetchError::Data { .. }) && disk_fails(error)
}

/// The wait before the retry of something that was killed or interrupted from outside.
const SOON: Duration = Duration::from_secs(30);

/// The fault for an environment that could not be prepared. `called` is what its user knows it as.
pub(crate) fn environment(error: &AcquireError, called: &str) -> Fault {
    use AcquireError as E;
    let what = format!("could not prepare the {called} environment");
    let fault = |code| Fault::new(code, what.clone()).because(error);
    let advised = |code, hint: &Option<String>, usual: &str| {
        fault(code).fix(hint.clone().unwrap_or_else(|| usual.to_owned()))
    };
    match error {
        lack if lack.is_lack() => Fault { blame: Blame::Node, ..fault(Code::EnvBuild) }
            .with_retry(Retry::OtherNode)
            .fix("find what holds so much of it on the node, or raise the limit of its service"),
        E::Unsupported { .. } => fault(Code::EnvUnsupported)
            .fix("use a `conda_file`, `{python, requirements}` for pip packages, or `environment: host`"),
        E::EngineMissing { .. } => fault(Code::EnvUnsupported)
            .fix("install `agent-env` beside `agentd` on the node; `agentctl doctor` says whether it is there"),
        E::PythonMissing { name } => fault(Code::PythonMissing)
            .fix(format!("install `{name}` on the node, or name a Python it has under `environment.python`")),
        E::PythonUnusable { .. } => fault(Code::PythonIncomplete)
            .fix("repair that interpreter, or name another under `environment.python`"),
        E::VenvMissing { package, .. } => fault(Code::PythonIncomplete)
            .fix(format!("install it on the node: sudo apt-get install {package}")),
        E::Unsatisfied { requirement, .. } => fault(Code::EnvUnsatisfied)
            .fix(format!("correct `{requirement}` in the requirements; the build log says what there is")),
        E::Unsolvable { at, hint, .. } => {
            let usual = match at.is_empty() {
                true => "relax a version in the conda file, or add the channel that has the package",
                false => "relax these lines, or add the channel that has the packages",
            };
            advised(Code::EnvUnsatisfied, hint, usual)
        }
        E::Refused { hint, .. } => advised(Code::EnvBuild, hint, "correct what it names in the conda file"),
        E::TooLong { .. } => {
            fault(Code::EnvBuild).fix("give versions for the largest packages: then there is less to choose from")
        }
        E::Denied { .. } => fault(Code::EnvDenied).fix(
            "put credentials for that host into the file that `conda_credentials` names in the node's configuration",
        ),
        E::Damaged { .. } => fault(Code::EnvDamaged)
            .fix("submit it again; if it stays so, compare the channel or its mirror with its origin"),
        E::Lacks { missing, .. } => fault(Code::EnvLacks).fix(format!(
            "install them on the node ({}), or let an environment be made: leave out `user_managed_dependencies`",
            shortly(missing)
        )),
        E::NameUnknown { known, .. } => fault(Code::EnvUnknown).fix(match known.is_empty() {
            true => "put its definition into the folder of `curated_environments` on the node".to_owned(),
            false => format!("name one that is defined: {}", shortly(known)),
        }),
        E::Network { .. } => fault(Code::EnvNetwork)
            .fix("check the node's network and proxy variables, and where packages come from: `agentd show-config`"),
        E::BrokenOff { .. } => Fault { blame: Blame::Node, ..fault(Code::EnvBuild) }
            .with_retry(Retry::After(SOON))
            .fix("look on the node why its container engine ends or restarts: `journalctl -u docker`"),
        E::Engine(_) | E::ImageMissing { .. } | E::Registry { .. } | E::ImageBuild { .. } => image(error, &what),
        E::WrongPlatform { .. } | E::CannotCarry { .. } | E::NeedsGpu { .. } => image(error, &what),
        E::DiskFull { .. } => fault(Code::DiskFull)
            .fix("free space on the node's disk; `agentctl envs list` shows what environments take of it"),
        E::OutOfMemory { limit, .. } => fault(Code::EnvBuild)
            .why(format!("builders may take {}", size::binary(*limit)))
            .fix("raise `builder_memory` in the node's configuration, or ask for fewer packages"),
        E::Killed { .. } => Fault { blame: Blame::Platform, ..fault(Code::EnvBuild) }
            .with_retry(Retry::After(SOON))
            .fix("it was begun anew several times; look on the node for who ends it, for example the kernel with `dmesg`"),
        E::Stalled { .. } | E::Failed { .. } => {
            fault(Code::EnvBuild).fix("the build log says more: `agentctl logs --build`")
        }
        E::Remembered { error, ago, left } => environment(error, called).why(format!(
            "this is remembered from a build {} s ago; a job that begins in {} s or later tries again",
            ago.as_secs(),
            left.as_secs() + 1
        )),
        E::Command { .. } | E::Io { .. } => Fault { blame: Blame::Node, ..fault(Code::EnvBuild) }
            .with_retry(Retry::OtherNode)
            .fix("look at the log of agentd on the node"),
    }
}

/// The fault for an image that could not be pulled or built, or is of no use here.
fn image(error: &AcquireError, what: &str) -> Fault {
    use AcquireError as E;
    let fault = |code| Fault::new(code, what.to_owned()).because(error);
    match error {
        E::ImageMissing { registry, denied: true, .. } => fault(Code::ImageMissing).fix(format!(
            "check the spelling; if it is private, put credentials for {registry} into the file that \
             `docker_credentials` names in the node's configuration"
        )),
        E::ImageMissing { image, .. } => fault(Code::ImageMissing).fix(format!(
            "correct `image` or its tag: `docker pull {image}` must work for whoever may see it"
        )),
        E::Registry { registry, .. } => fault(Code::EnvNetwork).fix(format!(
            "check from the node whether {registry} answers, and the proxy of its container engine; then submit it again"
        )),
        E::ImageBuild { .. } => fault(Code::ImageBuild)
            .fix("correct that step of the Dockerfile; the build log has all of it: `agentctl logs --build`"),
        E::CannotCarry { .. } => fault(Code::ImageCarrier).fix(
            "use an image with a newer glibc, such as `ubuntu:22.04` or `debian:12`, or install the packages in a \
             Dockerfile: `build: {path: …}`",
        ),
        E::NeedsGpu { .. } => fault(Code::ImagePlatform)
            .fix("ask for GPUs in `resources.gpus`, so that a node with GPUs is chosen, or name an image for processors"),
        E::WrongPlatform { node, .. } => fault(Code::ImagePlatform)
            .fix(format!("name an image that is made for {node}, or for several platforms")),
        _ => fault(Code::EnvBuild).fix("look at the container engine on the node: `agentctl doctor`"),
    }
}

/// The first few of a list.
fn shortly(list: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = list.len().saturating_sub(SHOWN);
    let shown = list[..list.len() - more].join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

/// Whether the shim may have received `go` although the launch failed.
pub(crate) fn is_unsure(error: &LaunchError) -> bool {
    matches!(error, LaunchError::Look { .. } | LaunchError::Silent { .. } | LaunchError::Talk { .. })
}

/// Whether no shim was started for lack of a resource that others may soon free, or it found such a lack itself, or it
/// was killed before it received `go`.
pub(crate) fn is_lack(error: &LaunchError) -> bool {
    if let LaunchError::Refused { status, .. } = error
        && status.code().is_none()
    {
        return true;
    }
    if found_lack(error) {
        return true;
    }
    let is_early =
        matches!(error, LaunchError::Clean { .. } | LaunchError::Write(_) | LaunchError::Spawn { .. });
    is_early
        && (is_no_space(error)
            || causes(error).filter_map(|cause| cause.downcast_ref()).any(agent_shim::is_lack))
}

/// Whether the disk of the node fails, and nothing was started because of that.
pub(crate) fn disk_fails(error: &(dyn Error + 'static)) -> bool {
    let said = |cause: &(dyn Error + 'static)| match cause.downcast_ref::<LaunchError>() {
        Some(LaunchError::Refused { status, .. }) => status.code() == Some(agent_shim::DISK_FAILS),
        Some(LaunchError::Unready { status, .. }) => *status == i64::from(agent_shim::DISK_FAILS),
        _ => cause.downcast_ref().is_some_and(agent_fs::is_failing),
    };
    causes(error).any(said)
}

/// Whether a shim found that the node lacks something, and began nothing.
fn found_lack(error: &LaunchError) -> bool {
    match error {
        LaunchError::Refused { status, .. } => status.code() == Some(agent_shim::LACKS),
        LaunchError::Unready { status, .. } => *status == i64::from(agent_shim::LACKS),
        _ => false,
    }
}

/// The fault for a shim or a command that could not be started.
pub(crate) fn launch(error: &LaunchError) -> Fault {
    match error {
        LaunchError::Lost { lost: found, .. } => lost(found),
        LaunchError::NameTaken { name, .. } => {
            Fault::new(Code::LaunchFailed, "the container could not be made")
                .because(error)
                .fix(format!("remove or rename it on the node: `docker rm --force {name}`"))
        }
        LaunchError::ImageGone { .. } => Fault::new(Code::LaunchFailed, "the container could not be made")
            .because(error)
            .fix("somebody removed the image on the node; the next attempt gets it again")
            .with_retry(Retry::SameNode),
        failing if disk_fails(failing) => unfit("the command could not be started", failing)
            .fix(FAILING),
        lack if found_lack(lack) => {
            Fault::new(Code::LaunchFailed, "the command could not be started")
                .because(lack)
                .fix("`agentctl doctor` counts what the node has of it; find what holds so much, or raise the limit")
        }
        LaunchError::Engine(_) | LaunchError::Unready { .. } | LaunchError::Supervisor(_) => {
            Fault::new(Code::LaunchFailed, "the container could not be started")
                .because(error)
                .fix("run `agentctl doctor` on the node; the container engine's own log says more")
        }
        full if is_no_space(full) => Fault::new(Code::DiskFull, "the command could not be started")
            .because(full)
            .fix("free space on the disk of agentd's state directory on the node"),
        LaunchError::Spawn { .. } if !is_lack(error) => unfit("the command could not be started", error)
            .fix("install `agent-shim` beside `agentd` on the node, of the same release"),
        other => Fault::new(Code::LaunchFailed, "the command could not be started")
            .because(other)
            .fix("run `agentctl doctor` on the node; what it marks as bad keeps jobs from starting"),
    }
}

/// The fault for a command that was started, and whose end is unknown. If the OOM killer has ended processes near its
/// supervisor since, that is the cause: a supervisor that may not lower its own OOM score can be killed too.
pub(crate) fn lost(lost: &Lost) -> Fault {
    if lost.rebooted {
        return rebooted();
    }
    let (fault, fix) = match (lost.starved, &lost.why) {
        (0, None) => (
            Fault::new(Code::RunLost, "the running command was lost"),
            "look for what killed `agent-shim` on the node, for example the kernel with `dmesg`",
        ),
        (0, Some(_)) => (
            Fault::new(Code::RunLost, "the running command was lost"),
            "look on the node for who ended the container, and at the log of its container engine",
        ),
        (kills, _) => (
            node_out_of_memory(format!(
                "since it was started the kernel has ended processes beside it for want of memory: {kills}"
            )),
            "see with `dmesg` on the node what took the memory; run fewer jobs at a time: `slots` of the node",
        ),
    };
    let fault = match &lost.damaged {
        None => fault.why("the process that watched over it is gone and left no record"),
        Some(damaged) => fault
            .why("the process that watched over it is gone, and its record proves nothing")
            .why(damaged.clone()),
    };
    let fault = lost.why.iter().cloned().fold(fault, Fault::why);
    let fault = match (lost.killed, lost.left) {
        (0, 0) if lost.loose => fault.why("no process of the job was found"),
        (0, 0) => fault.why("no process of the job was left"),
        (1, 0) => fault.why("1 process of the job was left and was ended"),
        (killed, 0) => fault.why(format!("{killed} processes of the job were left and were ended")),
        (_, 1) => fault.why("1 process of the job is left and cannot be ended"),
        (_, left) => fault.why(format!("{left} processes of the job are left and cannot be ended")),
    };
    let fault = match lost.loose {
        true => fault.why(
            "what left its group and cleared its environment may run on: there is no control group here to keep a \
             job's processes together",
        ),
        false => fault,
    };
    fault.fix(fix)
}

/// The fault for a supervisor that is gone and whose exit record cannot be read.
pub(crate) fn record_lost(error: &(dyn Error + 'static)) -> Fault {
    Fault::new(Code::RunLost, "how the command ended cannot be known")
        .why("the process that watched over it has ended, and its record is damaged")
        .because(error)
        .fix("look on the node for who changed files in the job's directory; `agentctl logs` has what was logged")
}

/// The fault for a command that was started, but left no trace in its directory.
pub(crate) fn traces_lost(dir: &Path) -> Fault {
    Fault::new(Code::RunLost, "how the command ended cannot be known")
        .why(format!("it was started, and nothing in {} says so any more", dir.display()))
        .fix("look on the node for who removed files there, and for processes of the job that are left")
}

/// If the command failed after it lost a GPU, the lost GPU becomes the fault, with the command's own reason below it.
pub(crate) fn gpu_lost(ending: Ending, trouble: &[String]) -> Ending {
    let own = |code| matches!(code, Code::CommandFailed | Code::CommandSignaled);
    match ending.fault {
        Some(fault) if !trouble.is_empty() && own(fault.code) => {
            let lost = Fault::new(Code::GpuLost, "the command failed after a GPU of it was lost");
            let lost = trouble.iter().cloned().fold(lost, Fault::why).why(fault.what);
            let lost = fault.why.into_iter().fold(lost, Fault::why);
            let lost = lost.fix("look on the node for `Xid` in the kernel's log (`sudo dmesg`); `retry` gives the job more attempts");
            Ending { fault: Some(lost), ..ending }
        }
        fault => Ending { fault, ..ending },
    }
}

/// The fault for a machine that was rebooted while it held the job.
pub(crate) fn rebooted() -> Fault {
    Fault::new(Code::NodeRebooted, "the node was restarted while it held the job")
        .fix("nothing is wrong with the job: submit it again, or allow retries")
}

/// The fault for a node that no job had a part in: whatever is placed there fails as well.
fn unfit(what: &str, error: &(dyn Error + 'static)) -> Fault {
    Fault::new(Code::NodeUnfit, what).because(error)
}

/// The fault for a replica whose record or directory cannot be read or written.
pub(crate) fn unusable(error: &(dyn Error + 'static)) -> Fault {
    let code = if is_no_space(error) { Code::DiskFull } else { Code::NodeUnfit };
    Fault::new(code, "the node cannot keep track of the job")
        .because(error)
        .fix("check space and permissions of agentd's state directory on the node")
}

/// The wait before an attempt that may find the remote store repaired.
const LATER: Duration = Duration::from_secs(30);

/// Whether the cause is a full disk.
pub(crate) fn is_no_space(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| cause.downcast_ref().is_some_and(agent_fs::is_full))
}

/// Whether the store has different bytes under a blob's name.
fn is_damaged(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| cause.downcast_ref().is_some_and(ReadError::is_damage))
}

/// Whether the store lacks a blob.
fn is_absent(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| matches!(cause.downcast_ref(), Some(ReadError::Absent { .. })))
}

/// Whether the store lacks a blob, or has different bytes under its name.
pub(crate) fn is_unsound(error: &(dyn Error + 'static)) -> bool {
    is_absent(error) || is_damaged(error)
}

/// The store's error, as the reason of a wait.
pub(crate) fn store_says(error: &(dyn Error + 'static)) -> String {
    let status = |cause: &(dyn Error + 'static)| {
        let boxed = cause.downcast_ref::<Box<Status>>().map(Box::as_ref);
        boxed.or_else(|| cause.downcast_ref()).map(told)
    };
    let innermost = || causes(error).last().map(ToString::to_string).unwrap_or_default();
    causes(error).find_map(status).unwrap_or_else(innermost)
}

/// Whether the store of blobs fails now, but may work later.
pub(crate) fn is_away(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| {
        cause.downcast_ref().is_some_and(MissingError::is_away)
            || cause.downcast_ref().is_some_and(ReadError::is_away)
            || cause.downcast_ref().is_some_and(WriteError::is_away)
    })
}

/// Whether the tree itself is invalid, not its store.
fn is_unusable(error: &(dyn Error + 'static)) -> bool {
    let of_the_tree = |cause: &TreeError| !matches!(cause, TreeError::Read(_));
    causes(error).filter_map(|cause| cause.downcast_ref()).any(of_the_tree)
}

/// The fault for outputs that are not stored, because they change each time they are read; they are kept in `kept`,
/// the job's part of its directory.
pub(crate) fn outputs_missing(missing: &[Unread], kept: &Path) -> Fault {
    /// Paths that a fault names; more are only counted.
    const NAMED: usize = 5;
    let shown = |path: &Path| path.strip_prefix(kept.join("work")).unwrap_or(path).display().to_string();
    let fault = Fault::new(Code::OutputsUnstored, "part of the outputs could not be stored; the rest is");
    let named =
        missing.iter().take(NAMED).map(|missing| format!("`{}` {}", shown(&missing.path), missing.why));
    let more = missing.len().saturating_sub(NAMED);
    let more = (more > 0).then(|| format!("and {more} more"));
    let fix = format!("they are kept on the node in {}", kept.display());
    named.chain(more).fold(Fault { blame: Blame::User, ..fault }, Fault::why).fix(fix)
}

/// The fault for outputs of a running job that could not be stored.
pub(crate) fn outputs_so_far(error: &CollectError, dir: &Path, job: &JobId) -> Fault {
    let fault = Fault::new(Code::OutputsUnstored, "the outputs so far could not be stored").because(error);
    let blame = if is_away(error) { Blame::Network } else { fault.blame };
    let fix = match is_no_space(error) {
        true => "the copy that is stored needs room on the node: make some, or wait until the job has ended",
        false => "the job goes on; try again, or wait until it has ended",
    };
    Fault { blame, ..fault }.why(format!("{job} writes them below {}", dir.display())).fix(fix)
}

/// The fault for outputs that could not be stored; they are kept on the node.
pub(crate) fn outputs(error: &CollectError, kept: &Path, job: &JobId) -> Fault {
    let fault = Fault::new(Code::OutputsUnstored, "the outputs could not be stored").because(error);
    let blame = if is_away(error) { Blame::Network } else { fault.blame };
    Fault { blame, ..fault }.fix(format!(
        "they are kept on the node in {}; when what is wrong is mended: agentctl node outputs {job}",
        kept.display()
    ))
}

#[cfg(test)]
mod tests;
