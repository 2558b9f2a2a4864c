//! Calls to the services of a store that no client library would make: the bytes of the messages are ours.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent_model::Digest;
use agent_tests::chance::Chance;
use agent_tests::client::runtime;
use bytes::{Buf, BufMut};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::snapshots::forge;

/// A store that says nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(75);

/// Takes and gives messages as the bytes they are.
#[derive(Debug, Clone, Copy, Default)]
struct Plain;

impl Codec for Plain {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Plain;
    type Decoder = Plain;

    fn encoder(&mut self) -> Plain {
        Plain
    }

    fn decoder(&mut self) -> Plain {
        Plain
    }
}

impl Encoder for Plain {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut bytes = vec![0; buffer.remaining()];
        buffer.copy_to_slice(&mut bytes);
        Ok(Some(bytes))
    }
}

const CAS: &str = "/build.bazel.remote.execution.v2.ContentAddressableStorage";
const STREAM: &str = "/google.bytestream.ByteStream";
const CAPABILITIES: &str = "/build.bazel.remote.execution.v2.Capabilities";

/// Messages of which there are some right ones for each method of the services.
pub(crate) fn messages(names: &[Digest], chance: &mut Chance) -> (String, Vec<Vec<u8>>) {
    let digest = *chance.pick(names);
    let content = forge::content(&digest);
    let resource = |kind: &str| format!("{kind}blobs/{}/{}", digest.hex(), digest.size);
    let upload = resource("uploads/7f5b1b3e-6a0c-4b50-9c7b-1f1d5a0f3a11/");
    let item = [forge::bytes(1, &content), forge::bytes(2, b"hhhhhhhhhh")].concat();
    let (service, method, messages) = match chance.below(12) {
        0 => (CAPABILITIES, "GetCapabilities", vec![forge::bytes(1, b"main")]),
        1 => (CAS, "FindMissingBlobs", vec![forge::bytes(2, &content).repeat(1 + chance.below(50) as usize)]),
        2 => (CAS, "BatchUpdateBlobs", vec![forge::bytes(2, &item).repeat(1 + chance.below(5) as usize)]),
        3 => (CAS, "BatchReadBlobs", vec![forge::bytes(2, &content).repeat(1 + chance.below(5) as usize)]),
        4 => (CAS, "GetTree", vec![[forge::bytes(2, &content), forge::number(3, 10)].concat()]),
        5 => (CAS, "SplitBlob", vec![forge::bytes(2, &content)]),
        6 => (CAS, "SpliceBlob", vec![[forge::bytes(2, &content), forge::bytes(3, &content)].concat()]),
        7 | 8 => {
            let offset = forge::number(2, chance.below(2_000_000));
            (STREAM, "Read", vec![[forge::bytes(1, resource("").as_bytes()), offset].concat()])
        }
        9 => (STREAM, "QueryWriteStatus", vec![forge::bytes(1, upload.as_bytes())]),
        _ => {
            let piece = |number: u64| {
                let name = forge::bytes(1, upload.as_bytes());
                let offset = forge::number(2, number * 100);
                let finish = if number == 3 { forge::number(3, 1) } else { Vec::new() };
                [name, offset, finish, forge::bytes(10, &[b'h'; 100])].concat()
            };
            (STREAM, "Write", (0..=chance.below(4)).map(piece).collect())
        }
    };
    (format!("{service}/{method}"), messages)
}

/// Pieces that are put into messages where they do not belong.
pub(crate) fn parts(names: &[Digest]) -> Vec<Vec<u8>> {
    let mut parts: Vec<Vec<u8>> = names.iter().map(forge::content).collect();
    parts.push(forge::digest(b"ABCDEF", -1));
    parts.push(forge::digest(&[b'0'; 64], i64::MAX));
    parts.push(forge::number(4, u64::MAX));
    parts.push(forge::bytes(10, &[0; 70_000]));
    parts.push(b"uploads//blobs//".to_vec());
    parts
}

/// Makes the call, with all of the messages as a stream, and takes in all it answers; how it ended.
pub(crate) fn call(channel: Channel, path: String, messages: Vec<Vec<u8>>) -> String {
    let path = PathAndQuery::try_from(path).expect("a path");
    let call = async {
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let request = Request::new(tokio_stream::iter(messages));
        let mut answers = grpc.streaming(request, path, Plain).await?.into_inner();
        while answers.message().await?.is_some() {}
        Ok::<(), Status>(())
    };
    let ended = runtime().block_on(async { tokio::time::timeout(PATIENCE, call).await });
    let code = match ended.expect("the store hangs") {
        Ok(()) => Code::Ok,
        Err(status) => status.code(),
    };
    assert!(!matches!(code, Code::Unavailable | Code::Unknown), "{code:?}: the call was not answered");
    format!("{code:?}")
}

/// Writes bytes to the socket, and reads whatever comes until the other end has had enough of it.
pub(crate) fn shout(socket: &Path, bytes: &[u8]) {
    let mut stream = UnixStream::connect(socket).expect("somebody listens");
    stream.set_read_timeout(Some(Duration::from_millis(200))).expect("a socket");
    // It may hang up at any byte.
    let _ = stream.write_all(bytes);
    let _ = stream.read(&mut [0; 4096]);
}
