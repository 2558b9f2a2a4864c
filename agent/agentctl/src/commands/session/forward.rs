//! `forward`: ports of a job on this machine's loopback.
//!
//! Each connection is a session of its own. No port is opened on the node.

use std::future::pending;
use std::io;
use std::net::Ipv4Addr;

use agent_proto::v1;
use agent_proto::v1::session_input::More as Input;
use agent_proto::v1::session_open::To;
use agent_proto::v1::session_output::More;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::{Inputs, OpenSession, PIECE, SessionPlace, input};
use crate::cli::{ForwardArgs, Ports};
use crate::client::{Client, Target, answer};
use crate::commands::view::JobView;
use crate::failure::Failure;
use crate::output::Output;

/// Forwards ports until the job ends or the user has enough.
pub(super) async fn forward(
    args: ForwardArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let place = SessionPlace { job: client.named(&args.job).await?, rank: args.rank };
    let mut listeners = Vec::new();
    for ports in args.ports {
        let (at, listener) = listen(ports).await?;
        output
            .print(&format!("127.0.0.1:{at} is port {} of {}; Ctrl-C ends it\n", ports.remote, place.job))?;
        listeners.push((ports.remote, listener));
    }
    serve(&client, &place, listeners, pending(), output).await
}

/// Listens on this machine's loopback; returns the port, too, which may be any free one.
pub(super) async fn listen(ports: Ports) -> Result<(u16, TcpListener), Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports.local)).await.map_err(|error| {
        let what = format!("port {} of this machine cannot be used: {error}", ports.local);
        Failure::refused(what, format!("name another one, or any free one: {}:0", ports.remote))
    })?;
    Ok((listener.local_addr().map_or(ports.local, |at| at.port()), listener))
}

/// Serves connections until the job ends, the user has enough, or `fails`.
pub(super) async fn serve(
    client: &Client,
    place: &SessionPlace,
    listeners: Vec<(u16, TcpListener)>,
    fails: impl Future<Output = Failure>,
    output: &mut Output,
) -> Result<(), Failure> {
    let mut accepting = JoinSet::new();
    for (port, listener) in listeners {
        accepting.spawn(async move { accept(port, listener).await });
    }
    let mut open = JoinSet::new();
    // One for the whole time: a signal that comes between two would be lost.
    let (ended, interrupted) = (ended(client, &place.job), tokio::signal::ctrl_c());
    tokio::pin!(ended, fails, interrupted);
    loop {
        tokio::select! {
            Some(Ok(accepted)) = accepting.join_next() => {
                let (port, listener, stream) = accepted;
                accepting.spawn(async move { accept(port, listener).await });
                let (client, place) = (client.clone(), place.clone());
                open.spawn(async move { carry(&client, &place, port, stream).await });
            }
            Some(Ok(carried)) = open.join_next() => {
                if let Err(Failure::Fault(fault)) = carried {
                    output.fault(&fault);
                }
            }
            state = &mut ended => {
                output.note(&format!("{} is {}: its ports are gone", place.job, state?));
                return Ok(());
            }
            failure = &mut fails => return Err(failure),
            _ = &mut interrupted => return Ok(()),
        }
    }
}

async fn accept(port: u16, listener: TcpListener) -> (u16, TcpListener, TcpStream) {
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            return (port, listener, stream);
        }
        tokio::task::yield_now().await;
    }
}

/// Waits until a job has ended; its state then.
async fn ended(client: &Client, job: &str) -> Result<String, Failure> {
    let mut states =
        answer(client.jobs().watch(v1::GetJobRequest { job: job.to_owned(), ..Default::default() })).await?;
    while let Ok(Some(seen)) = states.message().await {
        let job = JobView::try_from(seen)?;
        if job.has_ended() {
            return Ok(job.state);
        }
    }
    Err(super::lost().into())
}

/// Carries one connection to its end.
async fn carry(client: &Client, place: &SessionPlace, port: u16, stream: TcpStream) -> Result<(), Failure> {
    let _ = stream.set_nodelay(true); // only slower without
    let (from, mut into) = stream.into_split();
    let mut session = OpenSession::open(client, place, To::Port(port.into())).await?;
    let sends = send(from, session.inputs.clone());
    tokio::pin!(sends);
    let mut sent = false;
    loop {
        let more = tokio::select! {
            more = session.next() => more?,
            read = &mut sends, if !sent => match read {
                Ok(()) => {
                    sent = true;
                    continue;
                }
                // The program here is gone, or has enough.
                Err(_) => return Ok(()),
            },
        };
        match more {
            More::Out(data) if into.write_all(&data).await.is_err() => return Ok(()),
            More::End(_) => return Ok(()),
            _ => {}
        }
    }
}

/// Sends what the program here says, until its end.
async fn send(mut from: OwnedReadHalf, inputs: Inputs) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
    loop {
        match from.read(&mut piece).await? {
            0 => return inputs.send(input(Input::EndOfData(v1::SessionEof {}))).await.map_err(gone),
            length => inputs.send(input(Input::Data(piece[..length].to_vec()))).await.map_err(gone)?,
        }
    }
}
