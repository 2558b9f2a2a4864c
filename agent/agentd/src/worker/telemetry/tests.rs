//! The hub against a controller that misbehaves, over connections that exist in memory alone.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Mutex;

use agent_model::Fault;
use agent_proto::v1::telemetry_server::{Telemetry as Service, TelemetryServer};
use agent_shim::LogPolicy;
use agent_shim::segments::{Reader, Writer};
use futures_util::{Stream as Answers, StreamExt, stream};
use hyper_util::rt::TokioIo;
use tokio::task::JoinSet;
use tonic::transport::{Endpoint, Server};
use tonic::{Request as Call, Response, Streaming};

use super::*;

/// How a connection behaves after this many answers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mood {
    Well,
    /// Never answers again.
    Silent,
    /// Breaks.
    Broken,
    /// Cannot store this many requests.
    Full(u32),
    /// Is of a release that knows no channel `system`.
    Old,
    /// Has lost the last bytes, which it had not acknowledged, as after a crash.
    Forgetful,
}

/// The bytes that a controller has, by replica and channel.
type Stored = BTreeMap<(String, String), Vec<u8>>;

/// A controller with one connection after the other, each in a mood of its own.
#[derive(Debug, Clone, Default)]
struct Controller {
    moods: Arc<Mutex<VecDeque<(u32, Mood)>>>,
    stored: Arc<Mutex<Stored>>,
    connections: Arc<Mutex<u32>>,
}

impl Controller {
    fn answer(&self, request: v1::AppendRequest, full: bool) -> v1::AppendResponse {
        let mut stored = self.stored.lock().unwrap();
        let known = stored.entry((request.replica.clone(), request.channel.clone())).or_default();
        let offset = request.offset as usize;
        let end = request.offset + request.data.len() as u64;
        if !full && offset <= known.len() && offset + request.data.len() > known.len() {
            let fresh = known.len() - offset;
            known.extend_from_slice(&request.data[fresh..]);
        }
        let failed = if full { "the disk is full".to_owned() } else { String::new() };
        let stored = known.len() as u64;
        v1::AppendResponse { replica: request.replica, channel: request.channel, stored, failed, end }
    }
}

type Stream<T> = Pin<Box<dyn Answers<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Service for Controller {
    type AppendStream = Stream<v1::AppendResponse>;
    type ReadLogStream = Stream<v1::LogChunk>;
    type ReadTrackingStream = Stream<v1::TrackingChunk>;

    async fn append(
        &self,
        request: Call<Streaming<v1::AppendRequest>>,
    ) -> Result<Response<Self::AppendStream>, Status> {
        *self.connections.lock().unwrap() += 1;
        let (mut left, mut mood) = self.moods.lock().unwrap().pop_front().unwrap_or((0, Mood::Well));
        if mood == Mood::Forgetful {
            for known in self.stored.lock().unwrap().values_mut() {
                known.truncate(known.len() / 2);
            }
        }
        let controller = self.clone();
        let answers = stream::unfold(request.into_inner(), move |mut requests| {
            let (controller, well) = (controller.clone(), left > 0);
            left = left.saturating_sub(1);
            let now = mood;
            if let (Mood::Full(times), false) = (mood, well) {
                mood = if times > 1 { Mood::Full(times - 1) } else { Mood::Well };
            }
            async move {
                let request = requests.message().await.ok()??;
                let answer = match now {
                    Mood::Silent if !well => std::future::pending().await,
                    Mood::Old if request.channel == "system" => {
                        let fault = Fault::new(Code::RequestInvalid, "the request is not valid");
                        Err(agent_proto::status(&fault.why("`system` is not a channel")))
                    }
                    Mood::Broken if !well => Err(Status::unavailable("broken")),
                    Mood::Full(_) if !well => Ok(controller.answer(request, true)),
                    _ => Ok(controller.answer(request, false)),
                };
                Some((answer, requests))
            }
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn read_log(&self, _: Call<v1::ReadLogRequest>) -> Result<Response<Self::ReadLogStream>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn read_tracking(
        &self,
        _: Call<v1::ReadTrackingRequest>,
    ) -> Result<Response<Self::ReadTrackingStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

/// A connection to `controller` in memory; it is made again whenever it broke.
fn connect(controller: &Controller, tasks: &Arc<Mutex<JoinSet<()>>>) -> transport::Channel {
    let (controller, tasks) = (controller.clone(), tasks.clone());
    let connector = tower::service_fn(move |_| {
        let (near, far) = tokio::io::duplex(1 << 16);
        let server = Server::builder().add_service(TelemetryServer::new(controller.clone()));
        let incoming = stream::iter([Ok::<_, std::io::Error>(far)]);
        tasks.lock().unwrap().spawn(async move {
            let _ = server.serve_with_incoming(incoming).await;
        });
        async move { Ok::<_, std::io::Error>(TokioIo::new(near)) }
    });
    Endpoint::from_static("http://controller").connect_with_connector_lazy(connector)
}

struct Bench {
    controller: Controller,
    telemetry: Telemetry,
    tasks: Arc<Mutex<JoinSet<()>>>,
    home: tempfile::TempDir,
}

impl Bench {
    fn new(moods: &[(u32, Mood)]) -> Bench {
        let controller = Controller::default();
        *controller.moods.lock().unwrap() = moods.to_vec().into();
        let tasks = Arc::new(Mutex::new(JoinSet::new()));
        let (telemetry, hub) = Telemetry::new(ToController::Far(connect(&controller, &tasks)));
        tasks.lock().unwrap().spawn(hub.run(CancellationToken::new()));
        Bench { controller, telemetry, tasks, home: tempfile::tempdir().unwrap() }
    }

    fn job(&self, replica: &str) -> (ReplicaId, JobDir) {
        (replica.parse().unwrap(), JobDir::new(self.home.path().join(replica)))
    }

    fn stored(&self, replica: &str) -> Vec<u8> {
        let stored = self.controller.stored.lock().unwrap();
        stored.get(&(replica.to_owned(), "job".to_owned())).cloned().unwrap_or_default()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.tasks.lock().unwrap().abort_all();
    }
}

fn numbered(bytes: usize) -> Vec<u8> {
    (0..).flat_map(|number| format!("line {number}\n").into_bytes()).take(bytes).collect()
}

#[tokio::test(start_paused = true)]
async fn test_whatever_a_controller_does_the_log_arrives_whole() {
    let moods = [
        (3, Mood::Silent),
        (0, Mood::Broken),
        (2, Mood::Full(3)),
        (0, Mood::Silent),
        (5, Mood::Forgetful),
        (9, Mood::Broken),
        (0, Mood::Full(9)),
    ];
    for first in 0..moods.len() {
        let mut moods = moods;
        moods.rotate_left(first);
        let bench = Bench::new(&moods);
        let (replica, dir) = bench.job("t.1.0");
        let mut writer = Writer::open(dir.segments(), LogPolicy::default()).unwrap();
        let log = numbered(3_000_000);
        writer.append(&log, std::time::Instant::now());
        let shipper = bench.telemetry.ship_job(&replica, &dir);
        assert_eq!(shipper.stored(log.len() as u64).await, ShipEnd::Whole);
        assert!(bench.stored("t.1.0") == log, "moods from {first}");
    }
}

#[tokio::test(start_paused = true)]
async fn test_a_controller_of_an_earlier_release_gets_the_logs_all_the_same() {
    let bench = Bench::new(&[(0, Mood::Old); 9]);
    let log = numbered(100_000);
    for replica in ["t.1.0", "u.1.0"] {
        let (replica, dir) = bench.job(replica);
        let mut writer = Writer::open(dir.segments(), LogPolicy::default()).unwrap();
        writer.append(&log, std::time::Instant::now());
        std::fs::create_dir_all(dir.system().parent().unwrap()).unwrap();
        std::fs::write(dir.system(), "{}\n").unwrap();
        let system = bench.telemetry.ship_system(&replica, &dir);
        let shipper = bench.telemetry.ship_job(&replica, &dir);
        assert_eq!(shipper.stored(log.len() as u64).await, ShipEnd::Whole);
        assert!(matches!(system.stored(3).await, ShipEnd::Part { stored: 0, .. }));
        assert!(bench.stored(&replica.to_string()) == log);
    }
    assert_eq!(*bench.controller.connections.lock().unwrap(), 2, "it was asked once");
}

#[tokio::test(start_paused = true)]
async fn test_controller_that_stops_answering_is_left_for_another_connection() {
    let bench = Bench::new(&[(0, Mood::Silent)]);
    let (replica, dir) = bench.job("t.1.0");
    Writer::open(dir.segments(), LogPolicy::default()).unwrap().append(b"hello\n", std::time::Instant::now());
    let shipper = bench.telemetry.ship_job(&replica, &dir);
    assert_eq!(shipper.stored(6).await, ShipEnd::Whole);
    assert_eq!(
        (bench.stored("t.1.0"), *bench.controller.connections.lock().unwrap()),
        (b"hello\n".to_vec(), 2)
    );
}

#[tokio::test(start_paused = true)]
async fn test_file_that_lacks_what_was_promised_is_told_as_a_part() {
    let bench = Bench::new(&[]);
    let (replica, dir) = bench.job("t.1.0");
    dir.create().unwrap();
    let part = |kept: &ShipEnd| matches!(kept, ShipEnd::Part { stored: 6, .. });
    let mut writer = Writer::open(dir.segments(), LogPolicy::default()).unwrap();
    writer.append(b"hello\n", std::time::Instant::now());
    let shipper = bench.telemetry.ship_job(&replica, &dir);
    assert!(part(&shipper.stored(100).await), "the last segment was cut");
    let build = dir.log(agent_model::Stream::Build);
    std::fs::write(&build, "built\n").unwrap();
    let shipper = bench.telemetry.ship_build(&replica, build.clone());
    assert_eq!(shipper.stored(6).await, ShipEnd::Whole);
    std::fs::remove_file(&build).unwrap();
    let kept = shipper.stored(60).await;
    assert!(part(&kept), "the build log is gone: {kept:?}");
}

/// An hour of a controller that stores nothing, then one that is away: only the first is given up.
#[tokio::test(start_paused = true)]
async fn test_controller_that_stores_nothing_is_waited_for_only_so_long() {
    let begun = Instant::now();
    for (mood, hurried, least, most) in [
        (Mood::Full(3600), false, PATIENCE, PATIENCE * 2),
        (Mood::Full(3600), true, PATIENCE_WITH_STOPPED, PATIENCE_WITH_STOPPED * 2),
        (Mood::Full(PATIENCE_WITH_STOPPED.as_secs() as u32), false, Duration::ZERO, PATIENCE),
    ] {
        let bench = Bench::new(&[(0, mood)]);
        let (replica, dir) = bench.job("t.1.0");
        let mut writer = Writer::open(dir.segments(), LogPolicy::default()).unwrap();
        writer.append(b"hello\n", std::time::Instant::now());
        let (shipper, begun) = (bench.telemetry.ship_job(&replica, &dir), Instant::now());
        if hurried {
            shipper.hurry();
        }
        let kept = shipper.stored(6).await;
        let is_given_up = matches!(&kept, ShipEnd::Part { stored: 0, why } if why == "the disk is full");
        assert_eq!(is_given_up, least > Duration::ZERO, "{mood:?}: {kept:?}");
        assert!((least..most).contains(&begun.elapsed()), "{mood:?}: {:?}", begun.elapsed());
    }
    let bench = Bench::new(&[(0, Mood::Silent); 30]);
    let (replica, dir) = bench.job("t.1.0");
    let mut writer = Writer::open(dir.segments(), LogPolicy::default()).unwrap();
    writer.append(b"hello\n", std::time::Instant::now());
    let shipper = bench.telemetry.ship_job(&replica, &dir);
    assert_eq!(shipper.stored(6).await, ShipEnd::Whole, "after {:?}", begun.elapsed());
}

#[tokio::test]
async fn test_what_is_stored_is_trimmed_and_room_is_made_for_more() {
    let bench = Bench::new(&[]);
    let (replica, dir) = bench.job("t.1.0");
    let policy = LogPolicy { quota: 64 << 10, segment: 8 << 10, block: true };
    let mut writer = Writer::open(dir.segments(), policy).unwrap();
    let shipper = bench.telemetry.ship_job(&replica, &dir);
    let log = numbered(1 << 20);
    let mut written = 0;
    while written < log.len() {
        written += writer.append(&log[written..], std::time::Instant::now());
        shipper.written(writer.len());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    shipper.stored(writer.len()).await;
    assert!(bench.stored("t.1.0") == log);
    assert_eq!(writer.gaps().count, 0, "it waited for room instead");
    let start = Reader::of(&dir).unwrap().start();
    assert!(start >= (1 << 20) - (128 << 10), "{start}");
}

/// Removed while nobody has shipped them: what is there keeps its place, and what is not is said.
#[tokio::test]
async fn test_a_removed_segment_costs_itself_alone_and_is_told() {
    let bench = Bench::new(&[]);
    let (replica, dir) = bench.job("t.1.0");
    let policy = LogPolicy { quota: 1 << 20, segment: 4096, block: false };
    let log = numbered(20_000);
    Writer::open(dir.segments(), policy).unwrap().append(&log, std::time::Instant::now());
    for start in [0, 8192] {
        std::fs::remove_file(dir.segments().join(format!("{start:020}.seg"))).unwrap();
    }
    let shipper = bench.telemetry.ship_job(&replica, &dir);
    assert_eq!(shipper.stored(20_000).await, ShipEnd::Holed { gone: 8192 });
    let stored = bench.stored("t.1.0");
    assert_eq!(stored.len(), 20_000);
    assert!(stored[4096..8192] == log[4096..8192] && stored[12_288..] == log[12_288..]);
    let text = String::from_utf8(stored).unwrap();
    assert_eq!(text.matches("output is missing here").count(), 2);
}

#[tokio::test]
async fn test_files_take_turns() {
    let bench = Bench::new(&[]);
    let log = numbered(64 << 20);
    let (loud, loud_dir) = bench.job("loud.1.0");
    let mut writer = Writer::open(loud_dir.segments(), LogPolicy::default()).unwrap();
    writer.append(&log, std::time::Instant::now());
    let shippers: Vec<Shipper> = (0..20)
        .map(|number| {
            let (quiet, dir) = bench.job(&format!("quiet-{number}.1.0"));
            Writer::open(dir.segments(), LogPolicy::default())
                .unwrap()
                .append(b"a line\n", std::time::Instant::now());
            bench.telemetry.ship_job(&quiet, &dir)
        })
        .collect();
    let loud = bench.telemetry.ship_job(&loud, &loud_dir);
    loud.written(log.len() as u64);
    shippers.iter().for_each(|quiet| quiet.written(7));
    for quiet in &shippers {
        quiet.stored(7).await;
    }
    assert!(bench.stored("loud.1.0").len() < log.len(), "the quiet ones did not wait for the loud one");
    loud.stored(log.len() as u64).await;
    assert!(bench.stored("loud.1.0") == log);
}
