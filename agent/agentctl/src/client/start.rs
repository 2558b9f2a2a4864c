//! Starts `agentd` where none runs, and runs its probe: the only two processes that this program starts.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use agent_model::node::Inventory;
use agent_model::paths::Places;
use agent_model::{Code, Fault};
use tokio::time::{Instant, sleep, timeout};

use crate::cli::variable;
use crate::failure::Failure;
use crate::output::Output;

/// How long a daemon may take until it answers.
const START: Duration = Duration::from_secs(20);
/// How long `agentd probe` may take.
const PROBE: Duration = Duration::from_secs(30);
/// Where systemd looks for units of the machine.
const UNITS: [&str; 4] = [
    "/etc/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
/// What `agentd` returns when another one has its state directory.
const IN_USE: i32 = 75;

/// Starts a daemon in user mode and waits until its socket accepts connections. It keeps running when this program
/// ends.
pub(super) async fn start(places: &Places, output: &mut Output) -> Result<(), Failure> {
    let agentd = find_agentd()?;
    let log = places.state_dir.join("agentd.log");
    let (mut child, begin) = spawn(&agentd, places, &log).map_err(|error| {
        Fault::new(Code::Unreachable, "no daemon runs, and starting one failed")
            .why(format!("{}: {error}", agentd.display()))
            .fix("check that the program and the state directory are yours to use")
    })?;
    output
        .note(&format!("no daemon runs: starting one of your own, state in {}", places.state_dir.display()));
    let end = Instant::now() + START;
    // The daemon does not report that its socket is ready, so connecting is tried until it works.
    while tokio::net::UnixStream::connect(&places.socket).await.is_err() {
        // Another client may have started a daemon at the same time; then that one is used.
        let ended = child.try_wait().ok().flatten().filter(|status| status.code() != Some(IN_USE));
        if ended.is_some() || Instant::now() > end {
            let what = match ended {
                Some(status) => format!("the daemon ended at once ({status})"),
                None => format!("the daemon does not answer after {} s", START.as_secs()),
            };
            let fault = Fault::new(Code::Unreachable, what).fix(format!("see {}", log.display()));
            return Err(last_words(&log, begin).into_iter().fold(fault, Fault::why).into());
        }
        sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// A path below `root` which shows that agentd is installed as a service, whether it runs or not.
pub(super) fn installed(root: &Path) -> Option<PathBuf> {
    let system = Places::system();
    let kept =
        [Some(system.state_dir.as_path()), system.socket.parent()].into_iter().flatten().map(Path::to_owned);
    let units = UNITS.iter().map(|dir| Path::new(dir).join("agentd.service"));
    let mut signs = units.chain(kept).filter_map(|path| Some(root.join(path.strip_prefix("/").ok()?)));
    // A masked unit is a link to `/dev/null`, and counts too.
    signs.find(|sign| sign.symlink_metadata().is_ok())
}

/// Starts it in a process group of its own, so that a Ctrl-C here does not reach it.
#[allow(clippy::disallowed_methods, reason = "starts a daemon for a user who has none")]
fn spawn(agentd: &Path, places: &Places, log: &Path) -> io::Result<(Child, u64)> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&places.state_dir)?;
    let log = File::options().create(true).append(true).mode(0o600).open(log)?;
    let begin = log.metadata()?.len();
    let mut command = Command::new(agentd);
    command.args(["run", "--user", "--state-dir"]).arg(&places.state_dir);
    command.arg("--socket").arg(&places.socket).current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok((command.spawn()?, begin))
}

fn last_words(log: &Path, begin: u64) -> Option<String> {
    let mut file = File::open(log).ok()?;
    file.seek(SeekFrom::Start(begin)).ok()?;
    let mut text = String::new();
    file.take(1 << 20).read_to_string(&mut text).ok()?;
    let lines: Vec<&str> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(8)..].join("\n");
    (!last.is_empty()).then_some(last)
}

/// `agentd` beside this program, else on the search path.
fn find_agentd() -> Result<PathBuf, Fault> {
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name("agentd"));
    let path = variable("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("agentd"));
    beside.into_iter().chain(on_path).find(|path| path.is_file()).ok_or_else(|| {
        Fault::new(Code::Unreachable, "no daemon runs, and there is no `agentd` to start")
            .why("it is neither beside agentctl nor on the search path")
            .fix("install agentd, or name the socket of one that runs with --socket")
    })
}

/// The inventory of this machine from `agentd probe`, which needs no daemon.
#[allow(clippy::disallowed_methods, reason = "asks agentd about a machine where no daemon runs")]
pub(crate) async fn probe() -> Result<Inventory, Failure> {
    let agentd = find_agentd()?;
    let failed = |why: String| {
        Fault::new(Code::Bug, "this machine could not be looked at")
            .why(format!("{} probe --json: {why}", agentd.display()))
            .fix("run that command yourself to see more")
    };
    let mut command = tokio::process::Command::new(&agentd);
    command.args(["probe", "--json"]).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(PROBE, command.output())
        .await
        .map_err(|_| failed(format!("no answer within {} s", PROBE.as_secs())))?
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()).into());
    }
    Ok(serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))?)
}

/// Neither `HOME` nor `XDG_DATA_HOME` gives a directory for the state of a daemon.
pub(super) fn no_home() -> Fault {
    Fault::new(Code::Unreachable, "no daemon runs, and there is no place for one of your own")
        .why("neither XDG_DATA_HOME nor HOME is set to an absolute path")
        .fix("set HOME, or name the socket of a daemon that runs with --socket")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_service_is_known_by_its_unit_or_by_what_it_keeps() {
        for sign in [
            "etc/systemd/system/agentd.service",
            "lib/systemd/system/agentd.service",
            "run/agentd",
            "var/lib/agentd",
        ] {
            let root = tempfile::tempdir().unwrap();
            assert_eq!(installed(root.path()), None);
            let sign = root.path().join(sign);
            fs::create_dir_all(sign.parent().unwrap()).unwrap();
            assert_eq!(installed(root.path()), None);
            std::os::unix::fs::symlink("/dev/null", &sign).unwrap();
            assert_eq!(installed(root.path()), Some(sign));
        }
    }
}
