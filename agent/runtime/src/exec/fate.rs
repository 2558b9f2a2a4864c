//! Why a container ended without an exit record. For display only: the caller already knows that the job has ended.

use std::time::Duration;

use agent_model::failpoint;
use agent_shim::JobDir;
use bollard::Docker as Client;
use bollard::models::ContainerState;
use bollard::query_parameters::{InspectContainerOptions, LogsOptionsBuilder};
use futures_util::TryStreamExt as _;
use tokio::time::Instant;

use super::last_line;
use super::note::Note;
use crate::docker::{Docker, DockerError};

/// How long the engine may take to answer.
const WITHIN: Duration = Duration::from_secs(5);

/// How long the engine may take to notice the end itself.
const NOTICE: Duration = Duration::from_secs(5);

/// Pause between two looks until it has.
const AGAIN: Duration = Duration::from_millis(100);

/// Why the container of a lost job ended; `None` for a job without one.
pub(super) async fn of(dir: &JobDir) -> Option<String> {
    // The job may have rewritten what an earlier release wrote down.
    let note = Note::read(dir).ok().flatten().filter(|_| !dir.is_shared())?;
    let docker = Docker::at(&note.socket);
    let deadline = Instant::now() + NOTICE;
    let found = loop {
        let found = inspect(&docker, note.key()).await;
        let is_running = matches!(&found, Ok(state) if state.running == Some(true));
        if !is_running || Instant::now() >= deadline {
            break found;
        }
        tokio::time::sleep(AGAIN).await;
    };
    let why = match found {
        Ok(state) => told(&state),
        Err(error) if error.is_missing() => "its container was removed by somebody".to_owned(),
        Err(error) => format!("its container ended; why, the container engine does not say: {error}"),
    };
    let restarted = note.engine.is_some_and(super::note::Engine::is_gone);
    Some(if restarted { format!("{why}; the container engine was stopped or restarted") } else { why })
}

/// The state of a container according to the engine.
pub(super) async fn inspect(docker: &Docker, key: &str) -> Result<ContainerState, DockerError> {
    let step = "look at a container";
    failpoint::hit("node.container.look").map_err(DockerError::planned(step))?;
    let ask =
        |client: Client| async move { client.inspect_container(key, None::<InspectContainerOptions>).await };
    Ok(docker.ask(step, WITHIN, ask).await?.state.unwrap_or_default())
}

/// The last line of a container's output outside of its shim's log; empty if there is none, or no answer.
pub(super) async fn last_words(docker: &Docker, key: &str) -> String {
    let options = LogsOptionsBuilder::default().stdout(true).stderr(true).tail("1").build();
    let read = |client: Client| async move { client.logs(key, Some(options)).try_collect::<Vec<_>>().await };
    let said = docker.ask("say what a container said", WITHIN, read).await.unwrap_or_default();
    last_line(&said.iter().map(ToString::to_string).collect::<String>())
}

fn told(state: &ContainerState) -> String {
    const KILLED: i64 = 137;
    let error = state.error.as_deref().unwrap_or_default();
    let why = match state.exit_code {
        _ if state.running == Some(true) => "its container ended, and its engine has not noticed".to_owned(),
        _ if state.oom_killed == Some(true) => {
            "its container was killed, and the kernel had ended processes in it for want of memory".to_owned()
        }
        Some(KILLED) => "its container was killed".to_owned(),
        Some(code) => format!("its container ended with {code}"),
        None => "its container ended".to_owned(),
    };
    if error.is_empty() { why } else { format!("{why}: {error}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_words_say_what_ended_the_container() {
        let state = |code, oom| ContainerState {
            running: Some(false),
            exit_code: Some(code),
            oom_killed: Some(oom),
            ..ContainerState::default()
        };
        assert_eq!(told(&state(137, false)), "its container was killed");
        assert!(told(&state(137, true)).contains("want of memory"));
        assert_eq!(told(&state(70, false)), "its container ended with 70");
        let error = ContainerState { error: Some("no such device".into()), ..state(128, false) };
        assert_eq!(told(&error), "its container ended with 128: no such device");
    }
}
