//! Both ends over a real connection, good nodes and bad ones.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use agent_model::protocol::peers::PeerFailure;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use tokio_stream::wrappers::UnixListenerStream;

use super::*;
use crate::Tiered;
use crate::conformance::content;
use crate::remote::near;
use crate::{BlobStore, ByteCounter, Chunks, Disk, Memory, digest_of};

/// A node that has a disk and fetches trees, or not.
struct Node {
    dir: tempfile::TempDir,
    disk: Disk,
    fetches: Arc<AtomicBool>,
    channel: tonic::transport::Channel,
}

impl Node {
    async fn start() -> Node {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(&dir.path().join("cas")).unwrap();
        let fetches = Arc::new(AtomicBool::new(false));
        let awaited = Arc::clone(&fetches);
        let routes = service(disk.clone(), Arc::new(move |_| awaited.load(Ordering::Relaxed)));
        let path = dir.path().join("socket");
        let incoming = UnixListenerStream::new(tokio::net::UnixListener::bind(&path).unwrap());
        let server = tonic::transport::Server::builder().add_routes(routes).serve_with_incoming(incoming);
        drop(tokio::runtime::Handle::current().spawn(server));
        let endpoint = tonic::transport::Endpoint::try_from(format!("unix:{}", path.display())).unwrap();
        Node { disk, fetches, channel: near(endpoint).connect().await.unwrap(), dir }
    }

    fn peer(&self) -> Peer {
        Peer::new(self.channel.clone(), Digest::EMPTY)
    }
}

async fn all(chunks: Chunks) -> Result<Vec<u8>, ReadError> {
    Ok(chunks.try_collect::<Vec<Bytes>>().await?.concat())
}

#[tokio::test]
async fn test_a_blob_is_read_while_it_arrives_and_its_end_when_it_is_checked() {
    let node = Node::start().await;
    let bytes = [content(1, 3_000_000), Bytes::from(vec![0; 1 << 20])].concat();
    let digest = digest_of(&bytes);
    let mut ingest = node.disk.ingest(digest).await.unwrap();
    let mut chunks = node.peer().read(digest).await.unwrap();
    ingest.append(Bytes::copy_from_slice(&bytes[..1_000_000])).await.unwrap();
    let mut got = Vec::new();
    while got.len() < 1_000_000 {
        got.extend(chunks.next().await.unwrap().unwrap());
    }
    ingest.append(Bytes::copy_from_slice(&bytes[1_000_000..])).await.unwrap();
    while got.len() < bytes.len() - 1 {
        got.extend(chunks.next().await.unwrap().unwrap());
    }
    // All has arrived, and nobody has checked it.
    assert!(tokio::time::timeout(Duration::from_millis(200), chunks.next()).await.is_err());
    ingest.commit().await.unwrap();
    got.extend(all(chunks).await.unwrap());
    assert!(got == bytes);
    assert!(
        all(node.peer().read(digest).await.unwrap()).await.unwrap() == bytes,
        "it is there as well later"
    );
}

#[tokio::test]
async fn test_what_turns_out_to_be_wrong_is_never_passed_on_to_its_end() {
    let node = Node::start().await;
    let (bytes, digest) = (content(1, 1_000_000), digest_of(b"other"));
    let digest = Digest { size: bytes.len() as u64, ..digest };
    let mut ingest = node.disk.ingest(digest).await.unwrap();
    let chunks = node.peer().read(digest).await.unwrap();
    ingest.append(bytes).await.unwrap();
    assert!(ingest.commit().await.is_err());
    let error = all(chunks).await.unwrap_err();
    assert_eq!(failure(&error), PeerFailure::Lacks, "the node is not to blame: {error}");
}

#[tokio::test]
async fn test_what_belongs_to_a_tree_that_is_fetched_is_waited_for() {
    let node = Node::start().await;
    let blobs: Vec<(Digest, Bytes)> =
        (0..50).map(|seed| content(seed, 2000)).map(|bytes| (digest_of(&bytes), bytes)).collect();
    let large = content(77, 500_000);
    let names: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
    let (none, error) = node.peer().read_batch(&names).await;
    assert!(none.is_empty() && failure(&error.unwrap()) == PeerFailure::Lacks, "it fetches nothing");
    node.fetches.store(true, Ordering::Relaxed);
    let (disk, first, rest) = (node.disk.clone(), blobs[..20].to_vec(), blobs[20..].to_vec());
    let arrives = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        disk.write_batch(first).await;
        tokio::time::sleep(Duration::from_millis(2500)).await; // longer than a call waits
        disk.write_batch(rest).await;
        disk.write_batch(vec![(digest_of(&large), large.clone())]).await;
    };
    let peer = node.peer();
    let streamed = async { all(peer.read(digest_of(&large)).await?).await };
    let ((got, error), streamed, ()) = tokio::join!(peer.read_batch(&names), streamed, arrives);
    assert!(error.is_none(), "{error:?}");
    assert!(blobs.iter().all(|(digest, bytes)| got.get(digest) == Some(bytes)));
    assert!(streamed.unwrap() == large);
}

#[tokio::test]
async fn test_a_node_lets_others_read_and_nothing_else_and_only_so_many() {
    use crate::Remote;
    let node = Node::start().await;
    let blob = (digest_of(b"mine"), Bytes::from_static(b"mine"));
    let remote = Remote::new(node.channel.clone());
    let question = tokio::time::timeout(Duration::from_secs(1), remote.missing(&[blob.0])).await;
    assert!(!matches!(question, Ok(Ok(_))), "nobody is told what is here");
    // Calls that wait take up all there is.
    node.fetches.store(true, Ordering::Relaxed);
    let names = vec![blob.0];
    let waiting: Vec<_> =
        (0..40).map(|_| async { node.peer().ask(&names, &mut Default::default()).await }).collect();
    let answers = futures_util::future::join_all(waiting).await;
    let busy =
        answers.iter().filter(|a| a.as_ref().is_err_and(|s| s.code() == tonic::Code::ResourceExhausted));
    assert_eq!(busy.count(), 8);
    drop(node.dir);
}

/// Names these, one after the other, and notes what they did.
#[derive(Debug, Default)]
struct Sources {
    peers: Mutex<Vec<Arc<Peer>>>,
    failures: Mutex<Vec<PeerFailure>>,
    asked: AtomicU64,
}

#[derive(Debug)]
struct Always(Arc<Sources>);

impl Peers for Always {
    fn tree(&self, _: Digest) -> Arc<dyn TreeSources> {
        Arc::clone(&self.0) as _
    }
}

impl TreeSources for Sources {
    fn next(&self, bytes: u64) -> BoxFuture<'_, Option<Arc<Peer>>> {
        self.asked.fetch_add(bytes, Ordering::Relaxed);
        std::future::ready(self.peers.lock().first().cloned()).boxed()
    }

    fn failed<'a>(&'a self, peer: &'a Arc<Peer>, error: &'a ReadError) -> BoxFuture<'a, ()> {
        assert!(Arc::ptr_eq(peer, &self.peers.lock().remove(0)));
        self.failures.lock().push(failure(error));
        std::future::ready(()).boxed()
    }
}

/// A node that sends something else under each name.
#[derive(Clone)]
struct Liar;

#[tonic::async_trait]
impl crate::remote::bytestream::byte_stream_server::ByteStream for Liar {
    type ReadStream = futures_util::stream::BoxStream<
        'static,
        Result<crate::remote::bytestream::ReadResponse, tonic::Status>,
    >;

    async fn read(
        &self,
        _: tonic::Request<crate::remote::bytestream::ReadRequest>,
    ) -> Result<tonic::Response<Self::ReadStream>, tonic::Status> {
        let garbage = crate::remote::bytestream::ReadResponse { data: content(9, 1_500_000) };
        Ok(tonic::Response::new(futures_util::stream::iter([Ok(garbage)]).boxed()))
    }

    async fn write(
        &self,
        _: tonic::Request<tonic::Streaming<crate::remote::bytestream::WriteRequest>>,
    ) -> Result<tonic::Response<crate::remote::bytestream::WriteResponse>, tonic::Status> {
        Err(tonic::Status::unimplemented(""))
    }

    async fn query_write_status(
        &self,
        _: tonic::Request<crate::remote::bytestream::QueryWriteStatusRequest>,
    ) -> Result<tonic::Response<crate::remote::bytestream::QueryWriteStatusResponse>, tonic::Status> {
        Err(tonic::Status::unimplemented(""))
    }
}

#[tokio::test]
async fn test_whatever_peers_do_the_blob_comes_from_elsewhere() {
    let (good, lacking) = (Node::start().await, Node::start().await);
    let liars = tempfile::tempdir().unwrap();
    let path = liars.path().join("socket");
    let incoming = UnixListenerStream::new(tokio::net::UnixListener::bind(&path).unwrap());
    let liar = crate::remote::bytestream::byte_stream_server::ByteStreamServer::new(Liar);
    let server = tonic::transport::Server::builder().add_service(liar).serve_with_incoming(incoming);
    drop(tokio::runtime::Handle::current().spawn(server));
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix:{}", path.display())).unwrap();
    let liar = Peer::new(endpoint.connect_lazy(), Digest::EMPTY);
    let gone = liars.path().join("nobody");
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix:{}", gone.display())).unwrap();
    let gone = Peer::new(endpoint.connect_lazy(), Digest::EMPTY);

    let sources = Arc::new(Sources::default());
    let (near, far) = (Memory::default(), Memory::default());
    let store = Tiered::new(near, far.clone()).beside(Arc::new(Always(Arc::clone(&sources))));
    let counter = Arc::new(ByteCounter::default());
    let store = store.for_tree(Digest::EMPTY, &counter);
    let name = |peers: Vec<Peer>| *sources.peers.lock() = peers.into_iter().map(Arc::new).collect();

    let (large, small) = (content(1, 1_500_000), content(2, 1000));
    let (large, small) = ((digest_of(&large), large), (digest_of(&small), small));
    good.disk.write_batch(vec![large.clone(), small.clone()]).await;
    name(vec![liar.clone(), gone.clone(), lacking.peer(), good.peer()]);
    assert!(all(store.read(large.0, 0).await.unwrap()).await.unwrap() == large.1);
    let three = [PeerFailure::Lies, PeerFailure::Away, PeerFailure::Lacks];
    assert_eq!(*sources.failures.lock(), three);
    assert_eq!(far.missing(&[large.0]).await.unwrap(), [large.0], "the far store was not needed");
    assert_eq!(store.read_batch(vec![small.0]).await.remove(0).unwrap(), small.1);

    // Nobody has it but the far store.
    let last = (digest_of(b"last"), Bytes::from_static(b"last"));
    far.write_batch(vec![last.clone()]).await;
    name(vec![gone, lacking.peer(), good.peer()]);
    let both = store.read_batch(vec![last.0, last.0]).await;
    assert!(both.into_iter().all(|read| read.unwrap() == last.1));
    assert_eq!(sources.failures.lock().len(), 6);
}
