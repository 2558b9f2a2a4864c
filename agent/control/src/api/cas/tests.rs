//! The services as a client sees them: our own, and one that speaks the protocol by hand.

use agent_cas::conformance::{self, content, read_all, source};
use agent_cas::gc::StoreLimits;
use agent_cas::remote::digest_to_wire;
use agent_cas::{Disk, Remote, digest_of, snapshot};
use agent_model::SystemClock;
use agent_model::disk::Watermarks;
use bazel_remote_apis::google::bytestream;
use bytestream::byte_stream_client::ByteStreamClient;
use bytestream::{QueryWriteStatusRequest, ReadRequest, WriteRequest};
use futures_util::TryStreamExt;
use prost::Message;
use reapi::capabilities_client::CapabilitiesClient;
use reapi::content_addressable_storage_client::ContentAddressableStorageClient;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};

use super::uploads::PARKED;
use super::*;

/// A server over an empty store, which ends with the test's runtime.
struct Bench {
    dir: tempfile::TempDir,
    disk: Disk,
    channel: Channel,
}

impl Bench {
    async fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(&dir.path().join("store")).unwrap();
        let path = dir.path().join("socket");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let limits = StoreLimits { size: 1 << 40, marks: Watermarks::new(0), lease: Duration::ZERO };
        let collector = Collector::new(disk.clone(), limits, &[], Arc::new(SystemClock));
        let routes = add(Routes::default(), Store::Disk(disk.clone()), collector);
        let serving =
            Server::builder().add_routes(routes).serve_with_incoming(UnixListenerStream::new(listener));
        drop(tokio::runtime::Handle::current().spawn(serving));
        let endpoint = Endpoint::try_from(format!("unix:{}", path.display())).unwrap();
        Bench { dir, disk, channel: endpoint.connect().await.unwrap() }
    }

    fn cas(&self) -> ContentAddressableStorageClient<Channel> {
        ContentAddressableStorageClient::new(self.channel.clone())
    }

    fn streams(&self) -> ByteStreamClient<Channel> {
        ByteStreamClient::new(self.channel.clone())
    }

    fn unfinished(&self) -> usize {
        std::fs::read_dir(self.dir.path().join("store/temp")).unwrap().count()
    }

    async fn keep(&self, bytes: Bytes) -> reapi::Digest {
        let digest = digest_of(&bytes);
        self.disk.write_batch(vec![(digest, bytes)]).await.remove(0).unwrap();
        digest_to_wire(&digest)
    }
}

fn part(name: &str, offset: usize, data: &[u8], finish_write: bool) -> WriteRequest {
    let (resource_name, write_offset) = (name.to_owned(), offset as i64);
    WriteRequest { resource_name, write_offset, finish_write, data: data.to_vec() }
}

async fn send(bench: &Bench, parts: Vec<WriteRequest>) -> Result<i64, Code> {
    let answer = bench.streams().write(stream::iter(parts)).await;
    answer.map(|answer| answer.into_inner().committed_size).map_err(|status| status.code())
}

async fn progress(bench: &Bench, name: &str) -> (i64, bool) {
    let question = QueryWriteStatusRequest { resource_name: name.to_owned() };
    let answer = bench.streams().query_write_status(question).await.unwrap().into_inner();
    (answer.committed_size, answer.complete)
}

async fn read(bench: &Bench, name: &str, read_offset: i64, read_limit: i64) -> Result<Vec<u8>, Code> {
    let question = ReadRequest { resource_name: name.to_owned(), read_offset, read_limit };
    let answer = bench.streams().read(question).await.map_err(|status| status.code())?.into_inner();
    let messages: Vec<_> = answer.try_collect().await.map_err(|status| status.code())?;
    Ok(messages.into_iter().flat_map(|message| message.data).collect())
}

#[tokio::test]
async fn test_our_client_finds_every_promise_kept() {
    let bench = Bench::new().await;
    conformance::check(&Remote::new(bench.channel.clone())).await;
}

#[tokio::test]
async fn test_snapshot_travels_to_the_server_and_back() {
    let bench = Bench::new().await;
    let source = bench.dir.path().join("source");
    std::fs::create_dir_all(source.join("a/b")).unwrap();
    for i in 0..300 {
        std::fs::write(source.join(format!("a/b/{i}")), content(i, 3000)).unwrap();
    }
    std::fs::write(source.join("large"), content(1000, 6_000_000)).unwrap();
    let remote = Remote::new(bench.channel.clone());
    let snapshot = snapshot::scan(&source).unwrap();
    let pushed = snapshot::push(&snapshot, &remote, |_| {}).await.unwrap();
    assert_eq!(pushed.files_sent, 301);
    let again = snapshot::push(&snapshot, &remote, |_| {}).await.unwrap();
    assert_eq!((again.files_sent, again.bytes_sent), (0, 0));
    let dest = bench.dir.path().join("dest");
    snapshot::download(&remote, snapshot.root, &dest).await.unwrap();
    assert_eq!(snapshot::scan(&dest).unwrap().root, snapshot.root);
}

#[tokio::test]
async fn test_capabilities_say_what_is_offered() {
    let bench = Bench::new().await;
    let question = reapi::GetCapabilitiesRequest { instance_name: "any/instance".into() };
    let answer = CapabilitiesClient::new(bench.channel.clone()).get_capabilities(question).await.unwrap();
    assert_eq!(answer.metadata().get(ENCODED).unwrap(), "4194304");
    let cache = answer.into_inner().cache_capabilities.unwrap();
    assert_eq!(cache.digest_functions, [reapi::digest_function::Value::Sha256 as i32]);
    assert_eq!(cache.max_batch_total_size_bytes, 64 * 1024);
    assert_eq!((cache.supported_compressors, cache.supported_batch_update_compressors), (vec![1], vec![1]));
    assert!(!cache.split_blob_support && cache.action_cache_update_capabilities.is_none());
}

#[tokio::test]
async fn test_full_batch_fits_into_a_message_both_ways() {
    let bench = Bench::new().await;
    let bytes = content(1, (MAX_BATCH - AROUND) as usize);
    let digest = Some(digest_to_wire(&digest_of(&bytes)));
    let requests = vec![reapi::batch_update_blobs_request::Request {
        digest: digest.clone(),
        data: bytes.to_vec(),
        compressor: 0,
    }];
    let question = reapi::BatchUpdateBlobsRequest { requests, ..Default::default() };
    let answer = bench.cas().batch_update_blobs(question).await.unwrap().into_inner();
    assert_eq!(answer.responses[0].status.as_ref().unwrap().code, 0);
    let question =
        reapi::BatchReadBlobsRequest { digests: digest.into_iter().collect(), ..Default::default() };
    let answer = bench.cas().batch_read_blobs(question).await.unwrap().into_inner();
    assert!(answer.responses[0].data == bytes);
}

#[tokio::test]
async fn test_batch_items_fail_one_by_one() {
    let bench = Bench::new().await;
    let good = digest_to_wire(&digest_of(b"good"));
    let item = |digest: Option<reapi::Digest>, data: &[u8], compressor| {
        reapi::batch_update_blobs_request::Request { digest, data: data.to_vec(), compressor }
    };
    let upper = reapi::Digest { hash: good.hash.to_uppercase(), ..good.clone() };
    let sized = reapi::Digest { size_bytes: 5, ..good.clone() };
    let requests = vec![
        item(Some(good.clone()), b"good", 0),
        item(None, b"good", 0),
        item(Some(upper), b"good", 0),
        item(Some(sized.clone()), b"good", 0),
        item(Some(good.clone()), b"good", ZSTD),
        item(Some(good.clone()), b"good", reapi::compressor::Value::Deflate as i32),
        item(Some(good.clone()), b"evil", 0),
    ];
    let question = reapi::BatchUpdateBlobsRequest { requests, ..Default::default() };
    let answer = bench.cas().batch_update_blobs(question).await.unwrap().into_inner();
    assert_eq!(answer.responses.len(), 7);
    let codes = answer.responses.iter().map(|item| item.status.as_ref().unwrap().code);
    assert_eq!(codes.clone().filter(|code| *code == 0).count(), 1);
    assert_eq!(codes.filter(|code| *code == Code::InvalidArgument as i32).count(), 6);

    let digests = vec![good.clone(), sized.clone(), digest_to_wire(&Digest::EMPTY)];
    let question = reapi::BatchReadBlobsRequest { digests: digests.clone(), ..Default::default() };
    let answer = bench.cas().batch_read_blobs(question).await.unwrap().into_inner();
    let codes: Vec<i32> = answer.responses.iter().map(|item| item.status.as_ref().unwrap().code).collect();
    assert_eq!(codes, [0, Code::NotFound as i32, 0]);
    let question = reapi::FindMissingBlobsRequest { blob_digests: digests, ..Default::default() };
    let answer = bench.cas().find_missing_blobs(question).await.unwrap().into_inner();
    assert_eq!(answer.missing_blob_digests, [sized]);
}

#[tokio::test]
async fn test_requests_beyond_the_offer_are_refused() {
    let bench = Bench::new().await;
    let blake3 = reapi::digest_function::Value::Blake3 as i32;
    let question = reapi::FindMissingBlobsRequest { digest_function: blake3, ..Default::default() };
    let refused = bench.cas().find_missing_blobs(question).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let much = digest_to_wire(&Digest { hash: [1; 32], size: MAX_BATCH + 1 });
    let question = reapi::BatchReadBlobsRequest { digests: vec![much], ..Default::default() };
    assert_eq!(bench.cas().batch_read_blobs(question).await.unwrap_err().code(), Code::InvalidArgument);
    let refused = bench.cas().split_blob(reapi::SplitBlobRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    let brotli = format!("compressed-blobs/brotli/{}", Digest::EMPTY);
    assert_eq!(read(&bench, &brotli, 0, 0).await, Err(Code::Unimplemented));
    assert_eq!(read(&bench, "blobs/abc/3", 0, 0).await, Err(Code::InvalidArgument));
}

#[tokio::test]
async fn test_reads_obey_offset_and_limit() {
    let bench = Bench::new().await;
    let bytes = content(1, 700_000);
    bench.keep(bytes.clone()).await;
    let name = format!("main/blobs/{}", digest_of(&bytes));
    for (offset, limit) in [(0, 0), (0, 700_000), (0, 1), (300_000, 300_000), (699_999, 0), (700_000, 0)] {
        let end = if limit == 0 { 700_000 } else { offset + limit };
        assert_eq!(read(&bench, &name, offset as i64, limit as i64).await.unwrap(), bytes[offset..end]);
    }
    assert_eq!(read(&bench, &name, 700_001, 0).await, Err(Code::OutOfRange));
    assert_eq!(read(&bench, &name, -1, 0).await, Err(Code::OutOfRange));
    assert_eq!(read(&bench, &name, 0, -1).await, Err(Code::InvalidArgument));
    let empty = format!("blobs/{}", Digest::EMPTY);
    assert_eq!(read(&bench, &empty, 0, 0).await.unwrap(), b"");
    assert_eq!(read(&bench, &format!("blobs/{}", digest_of(b"absent")), 0, 0).await, Err(Code::NotFound));
}

#[tokio::test]
async fn test_broken_off_upload_goes_on_where_it_stopped() {
    let bench = Bench::new().await;
    let bytes = content(1, 1_000_000);
    let name = format!("main/uploads/a-client/blobs/{}", digest_of(&bytes));
    assert_eq!(progress(&bench, &name).await, (0, false));
    let first = part(&name, 0, &bytes[..400_000], false);
    assert_eq!(send(&bench, vec![first]).await, Ok(400_000));
    assert_eq!(progress(&bench, &name).await, (400_000, false));
    assert_eq!(
        send(&bench, vec![part(&name, 400_001, &bytes[400_001..], true)]).await,
        Err(Code::OutOfRange)
    );
    let rest = vec![
        part(&name, 400_000, &bytes[400_000..700_000], false),
        part("", 700_000, &bytes[700_000..], true),
    ];
    assert_eq!(send(&bench, rest).await, Ok(1_000_000));
    assert_eq!(progress(&bench, &name).await, (1_000_000, true));
    assert_eq!(bench.unfinished(), 0);
}

#[tokio::test]
async fn test_open_upload_tells_how_far_it_is() {
    let bench = Bench::new().await;
    let bytes = content(1, 900_000);
    let name = format!("uploads/open/blobs/{}", digest_of(&bytes));
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let mut client = bench.streams();
    let call = async move { client.write(tokio_stream::wrappers::ReceiverStream::new(receiver)).await };
    let ask = async {
        sender.send(part(&name, 0, &bytes[..500_000], false)).await.unwrap();
        let mut said = (0, false);
        while said == (0, false) {
            said = progress(&bench, &name).await;
        }
        sender.send(part(&name, 500_000, &bytes[500_000..], true)).await.unwrap();
        drop(sender);
        said
    };
    let both = async { tokio::join!(call, ask) };
    let (sent, said) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("it is told");
    assert_eq!(said, (500_000, false));
    assert_eq!(sent.unwrap().into_inner().committed_size, 900_000);
    assert_eq!(progress(&bench, &name).await, (900_000, true));
}

#[tokio::test]
async fn test_upload_of_what_is_there_ends_early() {
    let bench = Bench::new().await;
    let bytes = content(1, 100_000);
    bench.keep(bytes.clone()).await;
    let name = format!("uploads/x/blobs/{}/metadata", digest_of(&bytes));
    assert_eq!(send(&bench, vec![part(&name, 0, &bytes[..10], false)]).await, Ok(100_000));
    let empty = format!("uploads/x/blobs/{}", Digest::EMPTY);
    assert_eq!(send(&bench, vec![part(&empty, 0, b"", true)]).await, Ok(0));
}

#[tokio::test]
async fn test_wrong_uploads_leave_nothing_behind() {
    let bench = Bench::new().await;
    let digest = digest_of(b"right");
    let name = format!("uploads/x/blobs/{digest}");
    for data in [b"wrong" as &[u8], b"righ", b"right and more"] {
        assert_eq!(send(&bench, vec![part(&name, 0, data, true)]).await, Err(Code::InvalidArgument));
    }
    assert_eq!(send(&bench, vec![part(&name, 3, b"ht", true)]).await, Err(Code::OutOfRange));
    let other = part("uploads/y/blobs/other", 2, b"ght", true);
    assert_eq!(send(&bench, vec![part(&name, 0, b"ri", false), other]).await, Err(Code::InvalidArgument));
    assert_eq!(send(&bench, vec![]).await, Err(Code::InvalidArgument));
    assert_eq!(bench.disk.missing(&[digest]).await.unwrap(), [digest]);
    assert_eq!(send(&bench, vec![part(&name, 0, b"right", true)]).await, Ok(5));
    assert_eq!(bench.unfinished(), 0);
}

#[tokio::test]
async fn test_only_some_broken_off_uploads_are_kept() {
    let bench = Bench::new().await;
    // Large enough to have a file of its own.
    let digest = digest_of(&content(1, 1_000_000));
    for i in 0..PARKED + 5 {
        let name = format!("uploads/{i}/blobs/{digest}");
        assert_eq!(send(&bench, vec![part(&name, 0, b"x", false)]).await, Ok(1));
    }
    assert_eq!(bench.unfinished(), PARKED);
    assert_eq!(progress(&bench, &format!("uploads/0/blobs/{digest}")).await, (0, false));
    assert_eq!(progress(&bench, &format!("uploads/{}/blobs/{digest}", PARKED + 4)).await, (1, false));
}

async fn keep_directory(bench: &Bench, children: Vec<(&str, reapi::Digest)>) -> reapi::Digest {
    let node = |(name, digest): (&str, reapi::Digest)| reapi::DirectoryNode {
        name: name.to_owned(),
        digest: Some(digest),
    };
    let directories = children.into_iter().map(node).collect();
    bench.keep(reapi::Directory { directories, ..Default::default() }.encode_to_vec().into()).await
}

async fn get_tree(bench: &Bench, root: reapi::Digest, page_size: i32) -> Result<Vec<usize>, Code> {
    let question = reapi::GetTreeRequest { root_digest: Some(root), page_size, ..Default::default() };
    let answer = bench.cas().get_tree(question).await.map_err(|status| status.code())?.into_inner();
    let pages: Vec<_> = answer.try_collect().await.map_err(|status| status.code())?;
    Ok(pages.iter().map(|page| page.directories.len()).collect())
}

#[tokio::test]
async fn test_tree_names_each_directory_once_and_leaves_out_what_is_missing() {
    let bench = Bench::new().await;
    let absent = digest_to_wire(&digest_of(b"absent"));
    let leaf = keep_directory(&bench, vec![("gone", absent.clone())]).await;
    let mut root = keep_directory(&bench, vec![("a", leaf.clone()), ("b", leaf)]).await;
    for _ in 0..30 {
        root = keep_directory(&bench, vec![("a", root.clone()), ("b", root)]).await;
    }
    assert_eq!(get_tree(&bench, root.clone(), 0).await.unwrap().iter().sum::<usize>(), 32);
    assert!(get_tree(&bench, root, 5).await.unwrap().iter().all(|page| *page <= 5));
    assert_eq!(get_tree(&bench, absent, 0).await, Err(Code::NotFound));
    let file = bench.keep(Bytes::from_static(b"\xff\xff no directory")).await;
    assert_eq!(get_tree(&bench, file, 0).await, Err(Code::FailedPrecondition));
}

#[tokio::test]
async fn test_large_tree_comes_in_pages_below_the_message_limit() {
    let bench = Bench::new().await;
    let mut leaves = Vec::new();
    for i in 0..40 {
        let files = (0..2000).map(|n| reapi::FileNode { name: format!("{i}-{n:06}"), ..Default::default() });
        let directory = reapi::Directory { files: files.collect(), ..Default::default() };
        leaves.push(bench.keep(directory.encode_to_vec().into()).await);
    }
    let names: Vec<String> = (0..leaves.len()).map(|i| format!("{i:03}")).collect();
    let root = keep_directory(&bench, names.iter().map(String::as_str).zip(leaves).collect()).await;
    assert_eq!(get_tree(&bench, root, 0).await.unwrap().iter().sum::<usize>(), 41);
}

#[tokio::test]
async fn test_lost_connection_keeps_what_arrived() {
    let bench = Bench::new().await;
    let bytes = content(1, 500_000);
    let name = format!("uploads/lost/blobs/{}", digest_of(&bytes));
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let mut client = bench.streams();
    let messages = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let call = tokio::runtime::Handle::current().spawn(async move { client.write(messages).await });
    sender.send(part(&name, 0, &bytes[..100_000], false)).await.unwrap();
    let arrived = tokio::time::timeout(Duration::from_secs(20), async {
        while bench.unfinished() == 0 {
            tokio::task::yield_now().await;
        }
        sender.send(part(&name, 100_000, &bytes[100_000..200_000], false)).await.unwrap();
        sender.reserve().await.unwrap();
        call.abort();
        loop {
            // More may arrive between the answer and the end of the stream before.
            let arrived = usize::try_from(progress(&bench, &name).await.0).unwrap();
            let sent = send(&bench, vec![part(&name, arrived, &bytes[arrived..], true)]).await;
            if arrived > 0 && sent != Err(Code::OutOfRange) {
                return sent;
            }
        }
    });
    assert_eq!(arrived.await.expect("the broken-off upload is kept"), Ok(500_000));
    assert_eq!(read_all(&bench.disk, digest_of(&bytes), 0).await.unwrap(), bytes);
    bench.disk.write(digest_of(&bytes), source(&bytes, 1000)).await.unwrap();
}

fn text(length: usize) -> Bytes {
    b"a line of a log that says little\n".iter().copied().cycle().take(length).collect()
}

fn zstd_of(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 1).unwrap()
}

async fn update(bench: &Bench, items: &[(Digest, &[u8], i32)]) -> Vec<i32> {
    let request = |(digest, data, compressor): &(Digest, &[u8], i32)| {
        let (digest, data) = (Some(digest_to_wire(digest)), data.to_vec());
        reapi::batch_update_blobs_request::Request { digest, data, compressor: *compressor }
    };
    let requests = items.iter().map(request).collect();
    let question = reapi::BatchUpdateBlobsRequest { requests, ..Default::default() };
    let answer = bench.cas().batch_update_blobs(question).await.unwrap().into_inner();
    let code = |digest: &Digest| {
        let wire = Some(digest_to_wire(digest));
        answer.responses.iter().find(|item| item.digest == wire).unwrap().status.as_ref().unwrap().code
    };
    items.iter().map(|(digest, ..)| code(digest)).collect()
}

#[tokio::test]
async fn test_compressed_blobs_come_and_go_in_batches() {
    let bench = Bench::new().await;
    let (log, noise, short) = (text(300_000), content(1, 300_000), Bytes::from_static(b"short"));
    let blobs = [log.clone(), noise.clone(), short.clone(), Bytes::new()];
    let digests = blobs.each_ref().map(|bytes| digest_of(bytes));
    let forms =
        [zstd_of(&log), [zstd_of(&noise[..9]), zstd_of(&noise[9..])].concat(), short.to_vec(), vec![]];
    let compressors = [ZSTD, ZSTD, IDENTITY, ZSTD];
    let items: Vec<_> = (0..4).map(|i| (digests[i], &forms[i][..], compressors[i])).collect();
    assert_eq!(update(&bench, &items).await, [0; 4]);
    for acceptable in [vec![], vec![ZSTD]] {
        let question = reapi::BatchReadBlobsRequest {
            digests: digests.iter().map(digest_to_wire).collect(),
            acceptable_compressors: acceptable.clone(),
            ..Default::default()
        };
        let answer = bench.cas().batch_read_blobs(question).await.unwrap().into_inner();
        for (item, bytes) in answer.responses.iter().zip(&blobs) {
            let shrinks = *bytes == log && !acceptable.is_empty();
            assert_eq!(item.compressor, if shrinks { ZSTD } else { IDENTITY });
            let data = if shrinks {
                zstd::bulk::decompress(&item.data, 300_000).unwrap()
            } else {
                item.data.clone()
            };
            assert!(data == *bytes);
        }
    }
}

#[tokio::test]
async fn test_hostile_compressed_items_are_refused_one_by_one() {
    let bench = Bench::new().await;
    let log = text(300_000);
    let named = |bytes: &[u8], size: u64| Digest { size, ..digest_of(bytes) };
    let (form, bomb) = (zstd_of(&log), zstd_of(&vec![0; 64 << 20]));
    let other = digest_of(b"other");
    let garbage = [&form[..], b"garbage"].concat();
    let items = [
        (digest_of(&log), &form[..], ZSTD),
        (Digest { size: 300_000, ..other }, &form[..], ZSTD),
        (named(b"cut", 300_000), &form[..form.len() - 1], ZSTD),
        (named(b"garbage", 300_000), &garbage[..], ZSTD),
        (named(b"bomb", 1000), &bomb[..], ZSTD),
        (named(b"boast", 2 << 30), &form[..17], ZSTD),
        (named(b"plain", 300_000), &log[..], ZSTD),
        (Digest::EMPTY, &bomb[..], ZSTD),
    ];
    let invalid = Code::InvalidArgument as i32;
    let full = Code::ResourceExhausted as i32;
    let codes = update(&bench, &items).await;
    assert_eq!(codes, [0, invalid, invalid, invalid, invalid, full, invalid, invalid]);
}

#[tokio::test]
async fn test_compressed_streams_come_and_go() {
    let bench = Bench::new().await;
    for bytes in [text(3_000_000), content(1, 3_000_000)] {
        let (digest, form) = (digest_of(&bytes), zstd_of(&bytes));
        let name = format!("main/uploads/u/compressed-blobs/zstd/{digest}");
        let (front, back) = form.split_at(form.len() / 2);
        let parts = vec![part(&name, 0, front, false), part("", front.len(), back, true)];
        assert_eq!(send(&bench, parts).await, Ok(form.len() as i64));
        assert_eq!(send(&bench, vec![part(&name, 0, front, false)]).await, Ok(-1), "it is there");
        assert_eq!(progress(&bench, &name).await, (3_000_000, true));
        for offset in [0, 1_000_000, 3_000_000] {
            let form =
                read(&bench, &format!("compressed-blobs/zstd/{digest}"), offset as i64, 0).await.unwrap();
            assert!(zstd::bulk::decompress(&form, 3_000_000).unwrap() == bytes[offset..]);
        }
        let name = format!("compressed-blobs/zstd/{digest}");
        assert_eq!(read(&bench, &name, 0, 100).await, Err(Code::InvalidArgument));
        assert_eq!(read(&bench, &name, 3_000_001, 0).await, Err(Code::OutOfRange));
    }
    let empty = read(&bench, &format!("compressed-blobs/zstd/{}", Digest::EMPTY), 0, 0).await.unwrap();
    assert_eq!(zstd::bulk::decompress(&empty, 10).unwrap(), b"");
    let upload = format!("uploads/u/compressed-blobs/zstd/{}", Digest::EMPTY);
    assert_eq!(send(&bench, vec![part(&upload, 0, &zstd_of(b""), true)]).await, Ok(-1));
}

#[tokio::test]
async fn test_broken_off_compressed_upload_goes_on_in_a_new_frame() {
    let bench = Bench::new().await;
    let bytes = content(1, 1_000_000);
    let name = format!("uploads/u/compressed-blobs/zstd/{}", digest_of(&bytes));
    let form = zstd_of(&bytes);
    assert!(send(&bench, vec![part(&name, 0, &form[..form.len() / 2], false)]).await.is_ok());
    let (arrived, complete) = progress(&bench, &name).await;
    assert!(0 < arrived && arrived < 1_000_000 && !complete, "{arrived}");
    let arrived = arrived as usize;
    let rest = zstd_of(&bytes[arrived..]);
    let parts = vec![part(&name, arrived, &rest[..10], false), part("", arrived + 10, &rest[10..], true)];
    assert_eq!(send(&bench, parts).await, Ok(rest.len() as i64));
    assert_eq!(read_all(&bench.disk, digest_of(&bytes), 0).await.unwrap(), bytes);
    assert_eq!(bench.unfinished(), 0);
}

#[tokio::test]
async fn test_hostile_compressed_streams_leave_nothing_behind() {
    let bench = Bench::new().await;
    let log = text(300_000);
    let form = zstd_of(&log);
    let bomb = zstd_of(&vec![0; 64 << 20]);
    let right = digest_of(&log);
    let wrong = [
        (right, form[..form.len() - 1].to_vec()),
        (right, [&form[..], b"garbage"].concat()),
        (right, zstd_of(&log[1..])),
        (right, log.to_vec()),
        (right, vec![]),
        (Digest { size: 1000, ..right }, bomb.clone()),
        (Digest { size: 2 << 30, ..right }, form[..17].to_vec()),
        (Digest { size: 2 << 30, ..right }, bomb),
        (Digest { size: 200, ..right }, zstd_of(b"").repeat(200_000)),
    ];
    for (digest, form) in wrong {
        let name = format!("uploads/u/compressed-blobs/zstd/{digest}");
        assert_eq!(send(&bench, vec![part(&name, 0, &form, true)]).await, Err(Code::InvalidArgument));
        assert_eq!(bench.unfinished(), 0);
    }
    assert_eq!(bench.disk.missing(&[right]).await.unwrap(), [right]);
}
