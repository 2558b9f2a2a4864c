//! What a stream of blobs costs over TCP, against the bare socket and against the usual settings of gRPC.
//!
//! Both ends are in this process, so the processor's time is that of both. The transport is measured by itself,
//! with messages that are made of nothing, and then with all that a blob goes through: hashed at both ends, and
//! on the disk of a real controller. A far machine is a relay that holds back what passes it, both ways, and
//! however much that is.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_cas::gc::{Collector, StoreLimits};
use agent_cas::remote::bytestream::byte_stream_client::ByteStreamClient;
use agent_cas::remote::bytestream::byte_stream_server::{ByteStream, ByteStreamServer};
use agent_cas::remote::{self, FAR_CONNECTION_WINDOW, FAR_STREAM_WINDOW, FRAME, MAX_MESSAGE, bytestream};
use agent_cas::{BlobStore, Chunks, Disk, Remote, Store, digest_of};
use agent_control::{Controller, ControllerConfig, Operators, Peer};
use agent_model::disk::Watermarks;
use agent_model::{Digest, SystemClock};
use agent_tests::client::runtime;
use agent_tests::cpu_seconds;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::service::{InterceptorLayer, Routes};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// Bytes of one transfer next door, and of one far away.
const NEAR: u64 = 1 << 30;
const FAR: u64 = 128 << 20;

/// Bytes in one message, and in one piece of the bare socket.
const MESSAGE: usize = 256 << 10;
const PIECE: usize = 1 << 20;

/// What the way takes in one direction: 20 ms there and back.
const WAY: Duration = Duration::from_millis(10);

/// Digests in one question.
const DIGESTS: u32 = 20_000;

/// Rounds of each side; they take turns.
const ROUNDS: usize = 5;

/// All rows.
pub(crate) fn all() {
    runtime().block_on(async {
        println!(
            "{:<52} {:>9} {:>9} {:>7} {:>6}  {:>8} {:>8}",
            "MB/s, and CPU s per GB", "ours", "other", "ratio", "goal", "ours", "other"
        );
        transport().await;
        whole_way().await;
        far_away().await;
        missing().await;
    });
}

/// What some rounds of a transfer took.
#[derive(Default)]
struct Rounds(Vec<(f64, f64)>);

impl Rounds {
    /// One more transfer of so many bytes.
    async fn add(&mut self, bytes: u64, transfer: impl Future<Output = u64>) {
        let (begun, before) = (Instant::now(), cpu_seconds(std::process::id()));
        assert_eq!(transfer.await, bytes, "bytes are lost");
        let cpu = cpu_seconds(std::process::id()) - before;
        self.0.push((bytes as f64 / 1e6 / begun.elapsed().as_secs_f64(), cpu * 1e9 / bytes as f64));
    }

    /// The median of the rates in MB/s, and of the processor's seconds for a GB.
    fn medians(&self) -> (f64, f64) {
        let median = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        (
            median(self.0.iter().map(|round| round.0).collect()),
            median(self.0.iter().map(|round| round.1).collect()),
        )
    }
}

fn row(what: &str, ours: &Rounds, other: &Rounds, goal: f64) {
    let ((rate, cpu), (other_rate, other_cpu)) = (ours.medians(), other.medians());
    let ratio = rate / other_rate;
    println!(
        "{what:<52} {rate:>9.0} {other_rate:>9.0} {ratio:>7.2} {goal:>6.2}  {cpu:>8.2} {other_cpu:>8.2}"
    );
}

/// How the ends of a connection are set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Settings {
    /// As the daemon sets them.
    Ours,
    /// As they come.
    Usual,
}

/// Serves `routes` until the program ends.
async fn serve(routes: Routes, settings: Settings) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let accepted = TcpListenerStream::new(listener).map(|socket| {
        let socket = socket?;
        socket.set_nodelay(true)?;
        Ok::<_, std::io::Error>(socket)
    });
    let mut server = Server::builder().layer(InterceptorLayer::new(by_root));
    if settings == Settings::Ours {
        server = server
            .initial_connection_window_size(FAR_CONNECTION_WINDOW)
            .initial_stream_window_size(FAR_STREAM_WINDOW)
            .max_frame_size(FRAME);
    }
    drop(tokio::runtime::Handle::current().spawn(server.add_routes(routes).serve_with_incoming(accepted)));
    address
}

/// The port tells nothing of its callers, as a unix socket would.
fn by_root(mut request: Request<()>) -> Result<Request<()>, Status> {
    request.extensions_mut().insert(Peer::Local { uid: 0 });
    Ok(request)
}

async fn connect(address: SocketAddr, settings: Settings) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let endpoint = match settings {
        Settings::Ours => remote::far(endpoint),
        Settings::Usual => endpoint,
    };
    endpoint.connect().await.expect("a connection")
}

/// Sends bytes without content, as many as the limit of a request says, and takes any.
struct Nothing;

#[tonic::async_trait]
impl ByteStream for Nothing {
    type ReadStream = Messages;

    async fn read(&self, request: Request<bytestream::ReadRequest>) -> Result<Response<Messages>, Status> {
        let limit = u64::try_from(request.into_inner().read_limit).unwrap_or(0);
        let data = Bytes::from(vec![7; MESSAGE]);
        let messages =
            (0..limit / MESSAGE as u64).map(move |_| Ok(bytestream::ReadResponse { data: data.clone() }));
        Ok(Response::new(Box::pin(tokio_stream::iter(messages))))
    }

    async fn write(
        &self,
        request: Request<Streaming<bytestream::WriteRequest>>,
    ) -> Result<Response<bytestream::WriteResponse>, Status> {
        let (mut messages, mut committed_size) = (request.into_inner(), 0);
        while let Some(message) = messages.message().await? {
            committed_size += message.data.len() as i64;
        }
        Ok(Response::new(bytestream::WriteResponse { committed_size }))
    }

    async fn query_write_status(
        &self,
        _: Request<bytestream::QueryWriteStatusRequest>,
    ) -> Result<Response<bytestream::QueryWriteStatusResponse>, Status> {
        Err(Status::unimplemented("nothing is kept"))
    }
}

type Messages = std::pin::Pin<
    Box<dyn tokio_stream::Stream<Item = Result<bytestream::ReadResponse, Status>> + Send + 'static>,
>;

fn nothing() -> Routes {
    Routes::new(ByteStreamServer::new(Nothing).max_decoding_message_size(MAX_MESSAGE))
}

async fn down(channel: Channel, bytes: u64) -> u64 {
    let mut client = ByteStreamClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let question = bytestream::ReadRequest { read_limit: bytes as i64, ..Default::default() };
    let mut messages = client.read(question).await.expect("an answer").into_inner();
    let mut came = 0;
    while let Some(message) = messages.message().await.expect("a message") {
        came += message.data.len() as u64;
    }
    came
}

async fn up(channel: Channel, bytes: u64) -> u64 {
    let data = Bytes::from(vec![7; MESSAGE]);
    let messages = (0..bytes / MESSAGE as u64)
        .map(move |_| bytestream::WriteRequest { data: data.clone(), ..Default::default() });
    let mut client = ByteStreamClient::new(channel);
    let answer = client.write(tokio_stream::iter(messages)).await.expect("an answer").into_inner();
    answer.committed_size as u64
}

/// The same bytes through a bare socket.
async fn bare(bytes: u64) -> u64 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let sender = tokio::runtime::Handle::current().spawn(async move {
        let (mut socket, _) = listener.accept().await.expect("a connection");
        socket.set_nodelay(true).expect("a setting");
        let piece = vec![7; PIECE];
        for _ in 0..bytes / PIECE as u64 {
            socket.write_all(&piece).await.expect("it is sent");
        }
    });
    let mut socket = TcpStream::connect(address).await.expect("a connection");
    let (mut buffer, mut came) = (vec![0; PIECE], 0);
    loop {
        match socket.read(&mut buffer).await.expect("it comes") {
            0 => break,
            length => came += length as u64,
        }
    }
    sender.await.expect("the sender ends");
    came
}

async fn transport() {
    let address = serve(nothing(), Settings::Ours).await;
    let [mut downs, mut ups, mut bares] = std::array::from_fn(|_| Rounds::default());
    for _ in 0..ROUNDS {
        bares.add(NEAR, bare(NEAR)).await;
        downs.add(NEAR, down(connect(address, Settings::Ours).await, NEAR)).await;
        ups.add(NEAR, up(connect(address, Settings::Ours).await, NEAR)).await;
    }
    row("P9 one stream down / bare TCP", &downs, &bares, 0.85);
    row("P9 one stream up / bare TCP", &ups, &bares, 0.85);
}

/// A controller at a port, and its directory.
async fn controller() -> (tempfile::TempDir, Remote) {
    let home = tempfile::Builder::new().prefix("streams-").tempdir().expect("a directory");
    let clock = Arc::new(SystemClock);
    let disk = Disk::open(&home.path().join("cas")).expect("a store");
    let limits = StoreLimits { size: u64::MAX, marks: Watermarks::new(0), lease: Duration::MAX };
    let collector = Collector::new(disk.clone(), limits, &[Controller::BLOB_USER], clock.clone());
    let config = ControllerConfig::new(home.path(), Operators::new(0, |_| false));
    let opened = Controller::open(config, clock, Store::Disk(disk), collector).await;
    let routes = opened.expect("a controller").routes();
    let address = serve(routes, Settings::Ours).await;
    (home, Remote::new(connect(address, Settings::Ours).await))
}

/// Bytes that no store has, in pieces as they come from a file.
fn pieces(content: &Bytes) -> Chunks {
    let content = content.clone();
    let pieces = (0..content.len()).step_by(256 * 1024);
    let piece = move |from: usize| Ok(content.slice(from..content.len().min(from + 256 * 1024)));
    Box::pin(tokio_stream::iter(pieces.map(piece)))
}

/// What hashing the bytes takes that nobody can do without, at one end.
async fn hashed(content: &Bytes) -> u64 {
    digest_of(content).size
}

async fn whole_way() {
    let (_home, remote) = controller().await;
    let [mut downs, mut ups, mut hashes] = std::array::from_fn(|_| Rounds::default());
    for round in 0..3u64 {
        let mut content = vec![7; NEAR as usize];
        content[..8].copy_from_slice(&round.to_le_bytes());
        let content = Bytes::from(content);
        hashes.add(NEAR, hashed(&content)).await;
        let digest = digest_of(&content);
        let write = async {
            remote.write(digest, pieces(&content)).await.expect("it is taken");
            digest.size
        };
        ups.add(NEAR, write).await;
        let read = async {
            let mut came = 0;
            let mut chunks = remote.read(digest, 0).await.expect("it is there");
            while let Some(chunk) = chunks.next().await {
                came += chunk.expect("it comes").len() as u64;
            }
            came
        };
        downs.add(NEAR, read).await;
    }
    row("  a blob from a controller, checked / SHA-256 alone", &downs, &hashes, 0.5);
    row("  a blob to a controller, on its disk / SHA-256", &ups, &hashes, 0.3);
}

/// A port behind which is `to`, a way off.
async fn relay(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    drop(tokio::runtime::Handle::current().spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(to).await else { return };
            let set = near.set_nodelay(true).and_then(|()| far.set_nodelay(true));
            set.expect("a setting");
            let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
            let handle = tokio::runtime::Handle::current();
            drop((handle.spawn(hold_back(from_near, to_far)), handle.spawn(hold_back(from_far, to_near))));
        }
    }));
    address
}

/// Passes on what comes when it has been on its way for long enough.
async fn hold_back(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf) {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<(tokio::time::Instant, Bytes)>();
    let writer = async move {
        let mut under_way = UnboundedReceiverStream::new(receiver);
        while let Some((at, bytes)) = under_way.next().await {
            tokio::time::sleep_until(at + WAY).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    let reader = async move {
        loop {
            let mut bytes = Vec::with_capacity(PIECE);
            match from.read_buf(&mut bytes).await {
                Ok(length) if length > 0 => {
                    let sent = sender.send((tokio::time::Instant::now(), bytes.into()));
                    if sent.is_err() {
                        return;
                    }
                }
                _ => return,
            }
        }
    };
    tokio::join!(reader, writer);
}

async fn far_away() {
    let ours = relay(serve(nothing(), Settings::Ours).await).await;
    let usual = relay(serve(nothing(), Settings::Usual).await).await;
    let [mut downs, mut ups, mut usual_downs, mut usual_ups] = std::array::from_fn(|_| Rounds::default());
    for _ in 0..3 {
        downs.add(FAR, down(connect(ours, Settings::Ours).await, FAR)).await;
        usual_downs.add(FAR, down(connect(usual, Settings::Usual).await, FAR)).await;
        ups.add(FAR, up(connect(ours, Settings::Ours).await, FAR)).await;
        usual_ups.add(FAR, up(connect(usual, Settings::Usual).await, FAR)).await;
    }
    row("P10 20 ms away, down / usual settings", &downs, &usual_downs, 5.0);
    row("P10 20 ms away, up / usual settings", &ups, &usual_ups, 5.0);
}

/// Half of them are there.
async fn missing() {
    let (_home, remote) = controller().await;
    let blobs: Vec<(Digest, Bytes)> = (0..DIGESTS)
        .map(|number| Bytes::copy_from_slice(&number.to_le_bytes()))
        .map(|bytes| (digest_of(&bytes), bytes))
        .collect();
    let kept = blobs.iter().step_by(2).cloned().collect();
    assert!(remote.write_batch(kept).await.iter().all(Result::is_ok), "the store takes them");
    let digests: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
    let mut took = Vec::new();
    const TIMES: u32 = 50;
    let before = cpu_seconds(std::process::id());
    for _ in 0..TIMES {
        let begun = Instant::now();
        let lacking = remote.missing(&digests).await.expect("an answer");
        took.push(begun.elapsed());
        assert_eq!(lacking.len(), blobs.len() / 2);
    }
    let cpu = (cpu_seconds(std::process::id()) - before) / f64::from(TIMES);
    took.sort_unstable();
    let (least, median) = (took[0].as_secs_f64() * 1e3, took[took.len() / 2].as_secs_f64() * 1e3);
    println!("P12 {DIGESTS} digests asked for: {median:.1} ms there and back (least {least:.1}, goal 15)");
    println!(
        "    CPU of both ends: {:.2} us for a digest (goal of the server alone: 0.5)",
        cpu * 1e6 / f64::from(DIGESTS)
    );
}
