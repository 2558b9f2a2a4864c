//! A session in a job that runs: `exec` runs a command in it, `forward` reaches a port of it, `open` a service. This is
//! what they share: the call, and what it means when it ends.

mod exec;
mod forward;
mod open;

use std::process::ExitCode;

use agent_model::{Code, Fault};
use agent_proto::v1;
use agent_proto::v1::session_input::More as Input;
use agent_proto::v1::session_open::To;
use agent_proto::v1::session_output::More;
use tokio::sync::mpsc;
use tonic::Streaming;

use crate::cli::InsideVerb;
use crate::client::{self, Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;

/// Performs one of these commands.
pub(super) async fn perform(
    verb: InsideVerb,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    match verb {
        InsideVerb::Exec(args) => return exec::exec(args, to).await,
        InsideVerb::Forward(args) => forward::forward(args, to, output).await?,
        InsideVerb::Open(args) => open::open(args, to, output).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Messages on their way to the daemon.
const AHEAD: usize = 8;

/// How much is sent at once, in bytes.
const PIECE: usize = 64 * 1024;

/// Where a session is opened.
#[derive(Debug, Clone)]
struct SessionPlace {
    job: String,
    rank: u32,
}

/// What is sent to a session. When all are dropped, it ends.
type Inputs = mpsc::Sender<v1::SessionInput>;

/// A session that is open.
struct OpenSession {
    inputs: Inputs,
    outputs: Streaming<v1::SessionOutput>,
}

impl OpenSession {
    /// Opens one; returns when the daemon has taken it, not when it is ready.
    async fn open(client: &Client, place: &SessionPlace, to: To) -> Result<OpenSession, Failure> {
        let (inputs, messages) = mpsc::channel(AHEAD);
        let open = Some(v1::SessionOpen { to: Some(to) });
        let SessionPlace { job, rank } = place.clone();
        let first = v1::SessionInput { job, rank, open, ..v1::SessionInput::default() };
        inputs.send(first).await.map_err(|_| Failure::from(lost()))?;
        let stream = futures_util::stream::unfold(messages, |mut messages| async {
            messages.recv().await.map(|message| (message, messages))
        });
        let outputs = answer(client.jobs().session(stream)).await?;
        Ok(OpenSession { inputs, outputs })
    }

    /// The next message; that the session is over without having ended is an error.
    async fn next(&mut self) -> Result<More, Failure> {
        match self.outputs.message().await {
            Ok(Some(v1::SessionOutput { more: Some(More::Failed(wire)), .. })) => {
                Err(Fault::try_from(wire).unwrap_or_else(|_| lost()).into())
            }
            Ok(Some(output)) => Ok(output.more.unwrap_or(More::Out(Vec::new()))),
            Ok(None) => Err(lost().into()),
            Err(status) => Err(lost().because(&client::fault(&status)).into()),
        }
    }
}

fn input(more: Input) -> v1::SessionInput {
    v1::SessionInput { more: Some(more), ..v1::SessionInput::default() }
}

fn lost() -> Fault {
    Fault::new(Code::Unreachable, "the connection into the job was lost")
        .why("what ran in it was ended with it; the job is not touched by that")
        .fix("see that the job still runs, `agentctl jobs`, and open it again")
}
