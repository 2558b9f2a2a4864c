//! Sessions in the jobs of this node, which users open over the controller.
//!
//! A node dials out, so it offers: one call waits at the controller for a user ([`Sessions::offer`]), and when it is
//! taken, the next one is made. Everything of a session goes through that call. It ends when either side ends it; the
//! end of this daemon, of the controller or of a connection between them ends it, and what it ran, too.

use std::path::PathBuf;
use std::time::Duration;

use agent_model::{Code, Fault, NodeId, ReplicaId};
use agent_proto::v1;
use agent_proto::v1::session_input::More as Input;
use agent_proto::v1::session_output::More as Output;
use agent_proto::v1::worker_client::WorkerClient;
use agent_runtime::exec::{SessionError, SessionReader, SessionWriter, open_session};
use agent_shim::JobDir;
use agent_shim::session::{FromJob, FromUser, MOST, SessionTarget, TerminalSize};
use futures_util::FutureExt;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tracing::{debug, info};

use super::backoff::Backoff;

/// How long the controller may take to take in an offer.
const ANSWER: Duration = Duration::from_secs(20);
/// How long a user may take to read the last messages.
const LAST: Duration = Duration::from_secs(60);
/// Messages on their way to the controller.
const AHEAD: usize = 8;

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Sessions {
    controller: Channel,
    node: NodeId,
    jobs: PathBuf,
}

/// An offer that was taken.
struct TakenOffer {
    first: v1::SessionInput,
    inputs: Streaming<v1::SessionInput>,
    outputs: mpsc::Sender<v1::SessionOutput>,
}

impl Sessions {
    /// Of the jobs in this directory.
    pub(crate) fn new(controller: Channel, node: NodeId, jobs: PathBuf) -> Sessions {
        Sessions { controller, node, jobs }
    }

    /// Serves sessions until the daemon stops, which ends them.
    pub(crate) async fn run(self) {
        let (mut open, mut backoff) = (JoinSet::new(), Backoff::default());
        loop {
            let offer = self.offer();
            tokio::pin!(offer);
            let offered = loop {
                tokio::select! {
                    offered = &mut offer => break offered,
                    Some(_) = open.join_next() => {}
                }
            };
            match offered {
                Ok(taken) => {
                    backoff.reset();
                    open.spawn(serve(self.jobs.clone(), taken).boxed());
                }
                Err(status) => {
                    debug!(code = ?status.code(), message = status.message(), "offering sessions again");
                    tokio::time::sleep(backoff.next()).await;
                }
            }
        }
    }

    /// Offers a session to the controller, and waits until somebody takes it.
    async fn offer(&self) -> Result<TakenOffer, Status> {
        let (outputs, stream) = mpsc::channel(AHEAD);
        let offer = v1::SessionOutput { node: self.node.to_string(), more: None };
        let closed = || Status::unavailable("the controller closed the offer");
        outputs.send(offer).await.map_err(|_| closed())?;
        let mut client = WorkerClient::new(self.controller.clone());
        let offered = tokio::time::timeout(ANSWER, client.serve_session(ReceiverStream::new(stream))).await;
        let mut inputs =
            offered.map_err(|_| Status::deadline_exceeded("the controller did not answer"))??.into_inner();
        let first = inputs.message().await?.ok_or_else(closed)?;
        Ok(TakenOffer { first, inputs, outputs })
    }
}

/// Carries a session until either side ends it.
async fn serve(jobs: PathBuf, taken: TakenOffer) {
    let TakenOffer { first, mut inputs, outputs } = taken;
    let replica = first.replica.clone();
    match open(jobs, first).await {
        Ok((reader, writer)) => {
            info!(replica, "opened session");
            tokio::select! {
                () = to_user(reader, &outputs) => {}
                () = to_job(&mut inputs, writer) => {}
            }
            debug!(replica, "closed session");
        }
        Err(fault) => {
            info!(replica, %fault, "refused session");
            let _ = outputs.send(output(Output::Failed((*fault).into()))).await; // the user may be gone
        }
    }
    drop(outputs);
    // A call that is dropped takes with it what is on its way: the user, who has the end, ends it.
    let over = async { while let Ok(Some(_)) = inputs.message().await {} };
    let _ = tokio::time::timeout(LAST, over).await; // or he does not read it
}

async fn open(jobs: PathBuf, first: v1::SessionInput) -> Result<(SessionReader, SessionWriter), Box<Fault>> {
    let strange = || Fault::new(Code::RequestInvalid, "the request is not valid");
    let replica: ReplicaId = first.replica.parse().map_err(|error| strange().because(&error))?;
    let to = target(first.open.unwrap_or_default())
        .ok_or_else(|| strange().why("it says neither a command nor a port"))?;
    let (reader, mut writer) = open_session(&JobDir::new(jobs.join(replica.to_string())))
        .await
        .map_err(|error| refusal(&replica, &error))?;
    let sent = writer.send(&FromUser::Open(to)).await;
    sent.map_err(|error| {
        Fault::new(Code::SessionRefused, format!("no session can be opened in {}", replica.job))
            .because(&error)
    })?;
    Ok((reader, writer))
}

fn refusal(replica: &ReplicaId, error: &SessionError) -> Fault {
    let fault = Fault::new(Code::SessionRefused, format!("no session can be opened in {}", replica.job));
    fault.because(error).fix(match error {
        SessionError::Over => "see how it ended: `agentctl why JOB`",
        _ => "jobs that are started from now on may have sessions: submit it again",
    })
}

fn target(open: v1::SessionOpen) -> Option<SessionTarget> {
    use v1::session_open::To;
    Some(match open.to? {
        To::Command(v1::SessionCommand { argv, terminal, term }) => {
            SessionTarget::Command { argv, terminal: terminal.map(size), term }
        }
        To::Port(port) => SessionTarget::Port(u16::try_from(port).ok().filter(|port| *port > 0)?),
    })
}

fn size(size: v1::SessionSize) -> TerminalSize {
    let small = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
    TerminalSize { rows: small(size.rows), columns: small(size.columns) }
}

fn output(more: Output) -> v1::SessionOutput {
    v1::SessionOutput { node: String::new(), more: Some(more) }
}

/// Passes on what the job sends, until its end.
async fn to_user(mut reader: SessionReader, outputs: &mpsc::Sender<v1::SessionOutput>) {
    loop {
        let (more, last) = match reader.next().await {
            Ok(Some(FromJob::Ready)) => (vec![Output::Ready(v1::SessionReady {})], false),
            Ok(Some(FromJob::Out(data))) => (vec![Output::Out(data)], false),
            Ok(Some(FromJob::Err(data))) => (vec![Output::Err(data)], false),
            Ok(Some(FromJob::End(code))) => (vec![end(code)], true),
            Ok(Some(FromJob::Failed(failure))) => (failed(failure), true),
            // The user is told that the session ended before its end.
            Ok(None) | Err(_) => return,
        };
        for more in more {
            if outputs.send(output(more)).await.is_err() {
                return;
            }
        }
        if last {
            return;
        }
    }
}

fn end(code: u8) -> Output {
    Output::End(v1::SessionEnd { code: code.into() })
}

/// A program that could not be started is told as a shell tells it.
fn failed(failure: agent_shim::session::SessionFailure) -> Vec<Output> {
    match failure.code {
        Some(code) => vec![Output::Err(format!("agentd: {}\n", failure.why).into_bytes()), end(code)],
        None => {
            let fault = Fault::new(Code::SessionRefused, "the session could not be opened");
            vec![Output::Failed(fault.why(failure.why).into())]
        }
    }
}

/// Passes on what the user sends, until he is gone or the job takes no more.
async fn to_job(inputs: &mut Streaming<v1::SessionInput>, mut writer: SessionWriter) {
    while let Ok(Some(input)) = inputs.message().await {
        let frames = match input.more {
            Some(Input::Data(data)) => data.chunks(MOST).map(|data| FromUser::Data(data.to_vec())).collect(),
            Some(Input::EndOfData(_)) => vec![FromUser::EndOfData],
            Some(Input::Size(new)) => vec![FromUser::Size(size(new))],
            Some(Input::Signal(number)) => i32::try_from(number).map(FromUser::Signal).into_iter().collect(),
            None => Vec::new(),
        };
        for frame in frames {
            if writer.send(&frame).await.is_err() {
                // What the job said last is still to be passed on.
                return std::future::pending().await;
            }
        }
    }
}
