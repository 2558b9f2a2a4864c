//! `stop`: end the daemon. Running jobs go on, and the next daemon takes them over.

use std::fs;

use agent_model::{Code, Fault};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::drain::introduce;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::Output;

/// How long an orderly shutdown of the daemon may take, in seconds.
const ORDERLY: i64 = 60;

/// Starts the caller's own daemon, unless one answers.
pub(super) async fn start(to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find_or_start(to, output).await?;
    let whom = client.whom().await?;
    output.note(&format!("{whom} answers; what it has to do: agentctl jobs"));
    Ok(())
}

/// Asks the daemon to end and waits until it has.
pub(super) async fn stop(to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let whom = introduce(&client, output).await?;
    if client.socket().is_none() {
        return Err(Failure::refused(
            "a daemon is stopped on its own machine",
            "there: `agentctl stop`, or `sudo systemctl stop agentd`",
        ));
    }
    let controller = client.machines().await?.controller.unwrap_or_default();
    let pid = controller.pid;
    let failed = |error: Errno| match error {
        Errno::PERM => Fault::new(Code::Denied, format!("process {pid} is not yours to end"))
            .fix("if it runs as a service: `sudo systemctl stop agentd`"),
        _ => Fault::new(Code::Unreachable, format!("process {pid} could not be asked to end"))
            .because(&std::io::Error::from(error))
            .fix("check that it runs on this machine: `agentctl status`"),
    };
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| failed(Errno::SRCH))?;
    let is_service =
        fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|groups| is_service(&groups));
    // The descriptor refers to this process only, even when its number is reused.
    let process = pidfd_open(process, PidfdFlags::NONBLOCK).map_err(failed)?;
    pidfd_send_signal(&process, Signal::TERM).map_err(failed)?;
    output.busy("waiting for the daemon to end");
    // The daemon lets its clients finish first, so this one must disconnect before it waits for the daemon.
    drop(client);
    let waited = agent_blocking::spawn_blocking(move || {
        let limit = Timespec { tv_sec: ORDERLY, tv_nsec: 0 };
        poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit))
    });
    let in_time = match waited.await {
        Ok(ready) => ready.map_err(failed)? > 0,
        Err(panicked) => std::panic::resume_unwind(panicked.into_panic()), // it is never cancelled
    };
    if !in_time {
        return Err(Failure::refused(
            format!("process {pid} has not ended after {} s", ORDERLY),
            format!("look at its log; `kill -9 {pid}` ends it at once, and jobs survive that too"),
        ));
    }
    let running = match controller.running {
        0 => String::new(),
        1 => "; 1 job goes on and is taken up by the next one".to_owned(),
        jobs => format!("; {jobs} jobs go on and are taken up by the next one"),
    };
    output.note(&format!("{whom} has ended{running}"));
    if is_service {
        output.warn(
            "it is a service, so systemd starts it again; to have it stay down: sudo systemctl stop agentd",
        );
    }
    Ok(())
}

/// Whether a process with these control groups was started by the machine's systemd as the service of the package.
fn is_service(groups: &str) -> bool {
    groups.lines().any(|line| line.contains(":/system.slice/agentd.service"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_service_is_told_by_its_control_group() {
        for (groups, service) in [
            ("0::/system.slice/agentd.service\n", true),
            ("12:pids:/\n1:name=systemd:/system.slice/agentd.service/main\n0::/\n", true),
            ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/agentd.service\n", false),
            ("0::/system.slice/ssh.service\n", false),
            ("0::/user.slice/user-0.slice/session-3.scope\n", false),
            ("", false),
        ] {
            assert_eq!(is_service(groups), service, "{groups}");
        }
    }
}
