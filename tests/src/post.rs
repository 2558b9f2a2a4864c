//! A post office between a node and its controller that loses no message, but delivers some late, some twice
//! and some long after they were overtaken.
//!
//! It carries gRPC messages without knowing what they mean. Within one call messages are delayed (those
//! behind them wait) and doubled. A call of one message may be made a second time later. A report of a node
//! may arrive again, long after newer ones, on a stream of its own: as if it had been stuck in an old
//! connection.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::uri::PathAndQuery;
use bytes::{Buf, BufMut, Bytes};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::StreamingService;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::chance::Chance;
use crate::client::{channel, runtime};

/// How unreliable it is, each in so many of a hundred messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rules {
    /// Delivered twice.
    pub doubled: u64,
    /// Delivered later.
    pub delayed: u64,
    /// At most so much later.
    pub delay: Duration,
    /// Reports delivered again when newer ones have come.
    pub stale: u64,
    /// So many bytes a second are delivered of each call that brings output; 0 is as they come.
    pub pace: u64,
}

/// The post office.
#[derive(Debug)]
pub struct Post {
    office: Arc<Office>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Office {
    upstream: PathBuf,
    rules: Rules,
    chance: Mutex<Chance>,
    /// Reports that were delivered a while ago.
    reports: Mutex<VecDeque<Bytes>>,
    carried: AtomicU64,
    doubled: AtomicU64,
    delayed: AtomicU64,
    stale: AtomicU64,
}

/// The one kind of call whose requests are levels that newer ones replace.
const SYNC: &str = "/agent.v1.Worker/Sync";
/// Calls that are safe to make again, as the protocol says.
const REPEATABLE: [&str; 1] = ["/agent.v1.Worker/ReportOutcome"];
/// The call that brings output.
const APPEND: &str = "/agent.v1.Telemetry/Append";
/// Calls whose messages are doubled and delayed one by one.
const CHATTY: [&str; 2] = [SYNC, APPEND];

impl Post {
    /// Listens at `socket` and delivers to `upstream`.
    pub fn new(socket: &Path, upstream: &Path, rules: Rules, seed: u64) -> Post {
        let _inside = runtime().enter();
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).expect("the post office listens");
        let office = Arc::new(Office {
            upstream: upstream.to_owned(),
            rules,
            chance: Mutex::new(Chance::new(seed)),
            reports: Mutex::default(),
            carried: AtomicU64::new(0),
            doubled: AtomicU64::new(0),
            delayed: AtomicU64::new(0),
            stale: AtomicU64::new(0),
        });
        let shared = office.clone();
        let app = axum::Router::new().fallback(move |request: axum::extract::Request| {
            let office = shared.clone();
            async move {
                let path = request.uri().path_and_query().cloned().expect("a call has a path");
                let mut grpc =
                    tonic::server::Grpc::new(Raw).apply_max_message_size_config(Some(MOST), Some(MOST));
                grpc.streaming(Forward { office, path }, request).await
            }
        });
        let serve = Server::builder()
            .add_routes(tonic::service::Routes::from(app))
            .serve_with_incoming(UnixListenerStream::new(listener));
        let task = runtime().spawn(async move {
            let _ = serve.await; // until the fleet ends
        });
        Post { office, task }
    }

    /// What it did: messages carried, and how many were doubled, delayed and delivered again when stale.
    pub fn counts(&self) -> [u64; 4] {
        let office = &self.office;
        [&office.carried, &office.doubled, &office.delayed, &office.stale].map(|n| n.load(Ordering::Relaxed))
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Larger than any message there is.
const MOST: usize = 64 << 20;

/// One call on its way.
struct Forward {
    office: Arc<Office>,
    path: PathAndQuery,
}

type Answers = std::pin::Pin<Box<dyn Stream<Item = Result<Bytes, Status>> + Send>>;

impl StreamingService<Bytes> for Forward {
    type Response = Bytes;
    type ResponseStream = Answers;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response<Answers>, Status>> + Send>>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        let (office, path) = (self.office.clone(), self.path.clone());
        Box::pin(async move {
            let (metadata, _, messages) = request.into_parts();
            let (forward, onwards) = mpsc::channel(1);
            runtime().spawn(office.clone().deliver(path.clone(), messages, forward));
            let mut onwards = Request::new(ReceiverStream::new(onwards));
            *onwards.metadata_mut() = metadata;
            let answer = office.send(path.clone(), onwards).await?;
            let (metadata, answers, _) = answer.into_parts();
            let mut response = Response::new(office.answers(path, answers));
            *response.metadata_mut() = metadata;
            Ok(response)
        })
    }
}

impl Office {
    /// Makes a call to the controller.
    async fn send(
        &self,
        path: PathAndQuery,
        request: Request<ReceiverStream<Bytes>>,
    ) -> Result<Response<Streaming<Bytes>>, Status> {
        let mut grpc = tonic::client::Grpc::new(channel(&self.upstream))
            .max_decoding_message_size(MOST)
            .max_encoding_message_size(MOST);
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        grpc.streaming(request, path, Raw).await
    }

    /// Passes on the messages of a caller.
    async fn deliver(
        self: Arc<Self>,
        path: PathAndQuery,
        mut messages: Streaming<Bytes>,
        to: mpsc::Sender<Bytes>,
    ) {
        let chatty = CHATTY.contains(&path.as_str());
        while let Ok(Some(message)) = messages.message().await {
            self.carried.fetch_add(1, Ordering::Relaxed);
            if chatty {
                self.dawdle().await;
            }
            if path.as_str() == APPEND && self.rules.pace > 0 {
                let seconds = message.len() as f64 / self.rules.pace as f64;
                tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            }
            if path.as_str() == SYNC {
                self.remember(&message);
            }
            if to.send(message.clone()).await.is_err() {
                return;
            }
            if chatty && self.chooses(self.rules.doubled) {
                self.doubled.fetch_add(1, Ordering::Relaxed);
                let _ = to.send(message).await;
            } else if REPEATABLE.contains(&path.as_str()) && self.chooses(self.rules.doubled) {
                self.doubled.fetch_add(1, Ordering::Relaxed);
                runtime().spawn(self.clone().call_later(path.clone(), message, false));
            }
        }
    }

    /// Passes on the answers of the controller, some of them late.
    fn answers(self: Arc<Self>, path: PathAndQuery, answers: Streaming<Bytes>) -> Answers {
        let chatty = CHATTY.contains(&path.as_str());
        Box::pin(answers.then(move |answer| {
            let office = self.clone();
            async move {
                office.carried.fetch_add(1, Ordering::Relaxed);
                if chatty {
                    office.dawdle().await;
                }
                answer
            }
        }))
    }

    async fn dawdle(&self) {
        if self.chooses(self.rules.delayed) {
            self.delayed.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(self.some_time()).await;
        }
    }

    /// Keeps a report, and sends one of before again.
    fn remember(self: &Arc<Self>, report: &Bytes) {
        const KEPT: usize = 50;
        let mut reports = self.reports.lock().expect("nobody panics here");
        reports.push_back(report.clone());
        if reports.len() > KEPT {
            reports.pop_front();
        }
        if self.chooses(self.rules.stale) {
            self.stale.fetch_add(1, Ordering::Relaxed);
            let index = self.chance.lock().expect("nobody panics here").below(reports.len() as u64);
            let old = reports[usize::try_from(index).unwrap_or(0)].clone();
            runtime().spawn(self.clone().call_later(PathAndQuery::from_static(SYNC), old, true));
        }
    }

    /// Makes a call of one message some time from now and reads one answer; `lingers` leaves it open a while.
    async fn call_later(self: Arc<Self>, path: PathAndQuery, message: Bytes, lingers: bool) {
        tokio::time::sleep(self.some_time()).await;
        let (send, messages) = mpsc::channel(1);
        let _ = send.send(message).await;
        if !lingers {
            drop(send);
        }
        if let Ok(answer) = self.send(path, Request::new(ReceiverStream::new(messages))).await {
            let mut answers = answer.into_inner();
            let _ = tokio::time::timeout(Duration::from_secs(2), answers.message()).await;
        }
    }

    fn chooses(&self, of_a_hundred: u64) -> bool {
        self.chance.lock().expect("nobody panics here").percent(of_a_hundred)
    }

    fn some_time(&self) -> Duration {
        let most = u64::try_from(self.rules.delay.as_millis()).unwrap_or(u64::MAX);
        self.chance.lock().expect("nobody panics here").millis(0, most)
    }
}

/// Messages as they are on the wire.
#[derive(Debug, Clone, Copy)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
