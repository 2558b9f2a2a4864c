"""A client of the Remote Execution API that is not ours: gRPC's own library for Python, and the messages as another
project publishes them. Says of each promise of the protocol whether the server at a socket keeps it:

    foreign.py SOCKET

One line a case: `held NAME`, or `broke NAME: what happened`.
"""

import hashlib
import os
import random
import sys
import threading
import time
import uuid

import grpc
import zstandard
from buildgrid.common.protos.build.bazel.remote.execution.v2 import remote_execution_pb2 as re
from buildgrid.common.protos.build.bazel.remote.execution.v2 import remote_execution_pb2_grpc as re_grpc
from buildgrid.common.protos.google.bytestream import bytestream_pb2 as bs
from buildgrid.common.protos.google.bytestream import bytestream_pb2_grpc as bs_grpc

PATIENCE = 120  # seconds for one call, on however slow a machine
SHA256, ZSTD = 1, 1
EMPTY = hashlib.sha256(b"").hexdigest()
CASES = []


def case(function):
    CASES.append(function)
    return function


def named(data):
    return re.Digest(hash=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def fresh(size):
    """Bytes that no server has seen."""
    return os.urandom(size)


class Peer:
    def __init__(self, socket):
        # As it is by default: it takes messages of 4 MiB, and its authority is the path of the socket.
        self.channel = grpc.insecure_channel(f"unix:{socket}")
        self.capabilities = re_grpc.CapabilitiesStub(self.channel)
        self.cas = re_grpc.ContentAddressableStorageStub(self.channel)
        self.streams = bs_grpc.ByteStreamStub(self.channel)
        self.actions = re_grpc.ActionCacheStub(self.channel)

    def missing(self, *digests, function=SHA256):
        request = with_number(re.FindMissingBlobsRequest(blob_digests=digests), 3, function)
        return list(self.cas.FindMissingBlobs(request, timeout=PATIENCE).missing_blob_digests)

    def update(self, *items, function=SHA256):
        """Sends (digest, bytes) pairs; the code of each."""
        one = re.BatchUpdateBlobsRequest.Request
        request = re.BatchUpdateBlobsRequest(requests=[one(digest=d, data=b) for d, b in items])
        with_number(request, 5, function)
        answer = self.cas.BatchUpdateBlobs(request, timeout=PATIENCE)
        codes = {(r.digest.hash, r.digest.size_bytes): r.status.code for r in answer.responses}
        return [codes[(d.hash, d.size_bytes)] for d, _ in items]

    def keep(self, data):
        digest = named(data)
        assert self.update((digest, data)) == [0]
        return digest

    def read_batch(self, *digests, function=SHA256):
        request = with_number(re.BatchReadBlobsRequest(digests=digests), 4, function)
        return list(self.cas.BatchReadBlobs(request, timeout=PATIENCE).responses)

    def read(self, name, offset=0, limit=0):
        request = bs.ReadRequest(resource_name=name, read_offset=offset, read_limit=limit)
        return b"".join(part.data for part in self.streams.Read(request, timeout=PATIENCE))

    def write(self, *parts):
        """Sends (name, offset, data, last) parts as one stream; the committed size."""
        messages = (bs.WriteRequest(resource_name=n, write_offset=o, data=d, finish_write=f) for n, o, d, f in parts)
        return self.streams.Write(messages, timeout=PATIENCE).committed_size

    def status(self, name):
        answer = self.streams.QueryWriteStatus(bs.QueryWriteStatusRequest(resource_name=name), timeout=PATIENCE)
        return answer.committed_size, answer.complete


def with_number(message, field, value):
    """The message with a field that its publisher does not know yet."""
    message.MergeFromString(bytes([field << 3, value]))
    return message


def upload_name(digest, instance=""):
    return f"{instance}uploads/{uuid.uuid4()}/blobs/{digest.hash}/{digest.size_bytes}"


def blob_name(digest, instance=""):
    return f"{instance}blobs/{digest.hash}/{digest.size_bytes}"


def refused(codes, call, *arguments, **more):
    """The call fails, with one of these codes and in few words."""
    try:
        answer = call(*arguments, **more)
    except grpc.RpcError as error:
        assert error.code().name in codes.split(), f"{error.code().name}: {error.details()}"
        assert len(error.details()) < 2000, f"a status of {len(error.details())} bytes"
        return
    raise AssertionError(f"it was not refused: {str(answer)[:200]}")


# ---- Capabilities

@case
def capabilities_name_the_function_and_the_limits(peer):
    for instance in ["", "main", "a/b"]:
        request = re.GetCapabilitiesRequest(instance_name=instance)
        cache = peer.capabilities.GetCapabilities(request, timeout=PATIENCE).cache_capabilities
        assert list(cache.digest_function) == [SHA256], cache
        assert 0 < cache.max_batch_total_size_bytes < 4 << 20, cache


@case
def capabilities_name_a_version_of_the_protocol(peer):
    answer = peer.capabilities.GetCapabilities(re.GetCapabilitiesRequest(), timeout=PATIENCE)
    assert answer.low_api_version.major == 2 and answer.high_api_version.major == 2, answer


# ---- FindMissingBlobs

@case
def missing_are_the_missing_ones_each_once(peer):
    have, lack = peer.keep(fresh(100)), [named(fresh(50)) for _ in range(3)]
    asked = [lack[0], have, lack[1], lack[0], lack[2]]
    found = {d.hash for d in peer.missing(*asked)}
    assert found == {d.hash for d in lack}, found


@case
def nothing_is_never_missing(peer):
    assert peer.missing(re.Digest(hash=EMPTY, size_bytes=0)) == []
    assert peer.missing() == []


@case
def hash_and_size_must_both_match(peer):
    digest = peer.keep(fresh(1000))
    for size in [0, 999, 1001, 1 << 40, (1 << 63) - 1]:
        other = re.Digest(hash=digest.hash, size_bytes=size)
        assert peer.missing(other) == [other], size
    assert peer.missing(re.Digest(hash=EMPTY, size_bytes=1)) != []


@case
def many_digests_are_answered(peer):
    asked = [named(str(i).encode()) for i in range(10_000)]
    assert len(peer.missing(*asked)) == 10_000


BAD_DIGESTS = [
    re.Digest(),
    re.Digest(hash=EMPTY[:-1], size_bytes=1),
    re.Digest(hash=EMPTY + "0", size_bytes=1),
    re.Digest(hash=EMPTY.upper(), size_bytes=0),
    re.Digest(hash=EMPTY[:32], size_bytes=1),
    re.Digest(hash="g" * 64, size_bytes=1),
    re.Digest(hash="../" * 21 + "x", size_bytes=1),
    re.Digest(hash=EMPTY, size_bytes=-1),
    re.Digest(hash=EMPTY, size_bytes=-(1 << 63)),
    re.Digest(hash="f" * (1 << 20), size_bytes=1),
]


@case
def wrong_digests_are_refused_everywhere(peer):
    data, good = b"x", peer.keep(fresh(10))
    for digest in BAD_DIGESTS:
        refused("INVALID_ARGUMENT", peer.missing, good, digest)
        refused("INVALID_ARGUMENT", peer.read_batch, good, digest)
        assert peer.update((digest, data), (named(data), data)) == [3, 0], digest
        refused("INVALID_ARGUMENT NOT_FOUND", peer.read, blob_name(digest))
        refused("INVALID_ARGUMENT", peer.write, (upload_name(digest), 0, data, True))
        refused("INVALID_ARGUMENT", peer.status, upload_name(digest))
        tree = re.GetTreeRequest(root_digest=digest)
        refused("INVALID_ARGUMENT NOT_FOUND", lambda: list(peer.cas.GetTree(tree, timeout=PATIENCE)))


@case
def other_functions_are_refused(peer):
    digest = peer.keep(fresh(10))
    for function in [2, 3, 9]:  # SHA-1, MD5, BLAKE3
        refused("INVALID_ARGUMENT", peer.missing, digest, function=function)
        refused("INVALID_ARGUMENT", peer.read_batch, digest, function=function)
        refused("INVALID_ARGUMENT", peer.update, (digest, b"x"), function=function)
    for function in [0, SHA256]:
        assert peer.missing(digest, function=function) == []


# ---- Batches

@case
def batches_go_in_and_out(peer):
    blobs = [fresh(size) for size in [0, 1, 2, 1000, 4095, 4096, 100_000]]
    assert peer.update(*[(named(b), b) for b in blobs]) == [0] * len(blobs)
    for data, item in zip(blobs, peer.read_batch(*map(named, blobs))):
        assert item.status.code == 0 and item.data == data and item.digest == named(data)


@case
def one_wrong_blob_harms_no_other(peer):
    good, other = fresh(100), fresh(100)
    wrong = [
        (named(fresh(100)), other),
        (re.Digest(hash=named(other).hash, size_bytes=99), other),
        (re.Digest(hash=named(other).hash, size_bytes=101), other),
        (named(fresh(100)), b""),
        (re.Digest(hash=EMPTY, size_bytes=0), other),
    ]
    for digest, data in wrong:
        assert peer.update((digest, data), (named(good), good)) == [3, 0], digest
    assert peer.missing(named(good)) == []
    assert len(peer.missing(wrong[0][0], wrong[3][0])) == 2


@case
def absent_blobs_are_told_one_by_one(peer):
    have, lack = peer.keep(fresh(10)), named(fresh(10))
    codes = [item.status.code for item in peer.read_batch(have, lack, re.Digest(hash=EMPTY, size_bytes=0))]
    assert codes == [0, 5, 0], codes


def limit_of(peer):
    request = re.GetCapabilitiesRequest()
    return peer.capabilities.GetCapabilities(request, timeout=PATIENCE).cache_capabilities.max_batch_total_size_bytes


def packed(peer, blobs):
    """As clients do it: only the bytes of the blobs count against the limit."""
    limit, batches, room = limit_of(peer), [], 0
    for blob in blobs:
        if len(blob) > room:
            batches, room = batches + [[]], limit
        batches[-1].append(blob)
        room -= len(blob)
    return batches


def there_and_back(peer, batches):
    for blobs in batches:
        assert peer.update(*[(named(b), b) for b in blobs]) == [0] * len(blobs)
        assert [(item.status.code, item.data) for item in peer.read_batch(*map(named, blobs))] == [(0, b) for b in blobs]


@case
def a_full_batch_goes_in_and_out(peer):
    there_and_back(peer, [[fresh(limit_of(peer))]])


@case
def a_batch_of_the_tiniest_blobs_goes_in_and_out(peer):
    blobs = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    batches = packed(peer, blobs)
    there_and_back(peer, batches)
    absent = [re.Digest(hash=uuid.uuid4().hex * 2, size_bytes=1) for _ in range(len(batches[0]))]
    assert {item.status.code for item in peer.read_batch(*absent)} == {5}
    wrong = [(digest, b"x") for digest in absent]
    assert set(peer.update(*wrong)) == {3}


@case
def a_hundred_thousand_tiny_blobs_go_in_and_out(peer):
    mark = fresh(8)
    there_and_back(peer, packed(peer, [mark + i.to_bytes(3, "big") for i in range(100_000)]))


@case
def a_directory_of_files_goes_in_and_out(peer):
    there_and_back(peer, packed(peer, [fresh(random.randrange(20_000)) for _ in range(1500)]))


@case
def more_than_a_batch_is_taken_where_it_fits_a_message(peer):
    blobs = [fresh(4194) for _ in range(1000)]
    assert peer.update(*[(named(b), b) for b in blobs]) == [0] * 1000
    refused("INVALID_ARGUMENT", peer.read_batch, *map(named, blobs))
    there_and_back(peer, [blobs[:900]])
    more = fresh(9 << 20)
    refused("OUT_OF_RANGE RESOURCE_EXHAUSTED", peer.update, (named(more), more))
    assert peer.missing(named(more)) != []


@case
def more_missing_blobs_than_an_answer_holds_are_refused(peer):
    refused("RESOURCE_EXHAUSTED", peer.missing, *[named(str(i).encode()) for i in range(70_000)])


@case
def the_same_blob_twice_in_a_batch(peer):
    data = fresh(5000)
    assert peer.update((named(data), data), (named(data), data)) == [0, 0]
    assert [item.data for item in peer.read_batch(named(data), named(data))] == [data, data]


def text(size):
    """Bytes that shrink, and that no server has seen."""
    return (uuid.uuid4().hex.encode() * (size // 32 + 1))[:size]


def squeezed(data, level=1, **more):
    params = zstandard.ZstdCompressionParameters.from_level(level, **more)
    return zstandard.ZstdCompressor(compression_params=params).compress(data)


def unsqueezed(form):
    """All frames of a compressed form, after each other."""
    inflater, data = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True), b""
    return data + inflater.decompress(form)


def update_zstd(peer, *items):
    """Sends (digest, compressed bytes) pairs; the code of each."""
    one = re.BatchUpdateBlobsRequest.Request
    requests = [with_number(one(digest=d, data=b), 3, ZSTD) for d, b in items]
    answer = peer.cas.BatchUpdateBlobs(re.BatchUpdateBlobsRequest(requests=requests), timeout=PATIENCE)
    codes = {(r.digest.hash, r.digest.size_bytes): r.status.code for r in answer.responses}
    return [codes[(d.hash, d.size_bytes)] for d, _ in items]


def zstd_name(digest):
    return f"compressed-blobs/zstd/{digest.hash}/{digest.size_bytes}"


def zstd_upload(digest):
    return f"uploads/{uuid.uuid4()}/{zstd_name(digest)}"


@case
def compressed_blobs_go_in_and_out_of_batches(peer):
    for data in [text(100_000), fresh(100_000), text(1)]:
        for form in [squeezed(data), squeezed(data, 19), squeezed(data[:7]) + squeezed(b"") + squeezed(data[7:])]:
            assert update_zstd(peer, (named(data), form)) == [0]
        request = with_number(re.BatchReadBlobsRequest(digests=[named(data)]), 3, ZSTD)
        came = peer.cas.BatchReadBlobs(request, timeout=PATIENCE).responses[0].data
        assert came == data or unsqueezed(came) == data
        assert peer.read_batch(named(data))[0].data == data


@case
def compressed_streams_go_in_and_out(peer):
    for data in [text(2_000_000), fresh(2_000_000)]:
        form = squeezed(data, 3, window_log=23)
        name, half = zstd_upload(named(data)), len(form) // 2
        assert peer.write((name, 0, form[:half], False), ("", half, form[half:], True)) in (len(form), len(data), -1)
        assert peer.write((zstd_upload(named(data)), 0, form, True)) == -1, "it was there"
        for offset in [0, 1, 1_000_000, 2_000_000]:
            assert unsqueezed(peer.read(zstd_name(named(data)), offset)) == data[offset:], offset
        refused("OUT_OF_RANGE", peer.read, zstd_name(named(data)), 2_000_001)
        refused("INVALID_ARGUMENT", peer.read, zstd_name(named(data)), 0, 5)


@case
def compressed_uploads_that_break_off_go_on_in_a_new_frame(peer):
    data = fresh(1_000_000)
    name, form = zstd_upload(named(data)), squeezed(data)
    peer.write((name, 0, form[:600_000], False))
    at, done = peer.status(name)
    assert 0 < at < 1_000_000 and not done, (at, done)
    peer.write((name, at, squeezed(data[at:]), True))
    assert peer.read(blob_name(named(data))) == data


@case
def the_empty_blob_is_there_in_every_form(peer):
    empty = re.Digest(hash=EMPTY, size_bytes=0)
    assert update_zstd(peer, (empty, squeezed(b""))) == [0]
    assert unsqueezed(peer.read(zstd_name(empty))) == b""
    assert peer.write((zstd_upload(empty), 0, squeezed(b""), True)) in (0, -1)
    assert peer.status(zstd_upload(empty)) == (0, True)
    request = with_number(re.BatchReadBlobsRequest(digests=[empty]), 3, ZSTD)
    assert peer.cas.BatchReadBlobs(request, timeout=PATIENCE).responses[0].status.code == 0


def hostile_forms():
    """(digest, bytes) pairs of which no blob can be made."""
    data = text(300_000)
    form, digest = squeezed(data), named(data)
    bomb = squeezed(bytes(1 << 27))
    claims = lambda size: re.Digest(hash=uuid.uuid4().hex * 2, size_bytes=size)
    return {
        "truncated": (digest, form[:-1]),
        "garbage": (digest, form + b"garbage"),
        "zeros": (digest, form + bytes(100)),
        "plain": (digest, data),
        "nothing": (digest, b""),
        "other": (claims(300_000), form),
        "bomb": (claims(1000), bomb),
        "bomb of all": (claims(2 << 30), bomb),
        "boast": (claims(2 << 30), form[:17]),
        "window": (digest, wide(data)),
        "frames of nothing": (claims(100), squeezed(b"") * 300_000),
    }


def wide(data):
    """A frame that wants a window of 128 MiB."""
    params = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    deflater = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return deflater.compress(data) + deflater.flush()


@case
def hostile_compressed_batches_are_refused(peer):
    for name, (digest, form) in hostile_forms().items():
        codes = update_zstd(peer, (digest, form)) if len(form) < 4 << 20 else [3]
        assert codes[0] in (3, 8), (name, codes)
        assert peer.missing(digest) == [digest], name


@case
def hostile_compressed_streams_are_refused(peer):
    for name, (digest, form) in hostile_forms().items():
        parts = [form[i:i + 1_000_000] for i in range(0, len(form), 1_000_000)] or [b""]
        upload, at, messages = zstd_upload(digest), 0, []
        for part in parts:
            messages.append((upload, at, part, False))
            at += len(part)
        messages[-1] = messages[-1][:3] + (True,)
        refused("INVALID_ARGUMENT RESOURCE_EXHAUSTED", peer.write, *messages)
        assert peer.missing(digest) == [digest], name


@case
def other_compressors_are_refused(peer):
    digest = peer.keep(fresh(100))
    for name in ["deflate", "brotli"]:
        refused("UNIMPLEMENTED INVALID_ARGUMENT", peer.read, zstd_name(digest).replace("zstd", name))
    one = with_number(re.BatchUpdateBlobsRequest.Request(digest=digest, data=b"x"), 3, 2)
    answer = peer.cas.BatchUpdateBlobs(re.BatchUpdateBlobsRequest(requests=[one]), timeout=PATIENCE)
    assert answer.responses[0].status.code == 3, answer


@case
def a_batch_of_a_million_nothings_is_refused(peer):
    nothing = re.BatchUpdateBlobsRequest.Request()
    refused("RESOURCE_EXHAUSTED INVALID_ARGUMENT OUT_OF_RANGE", peer.cas.BatchUpdateBlobs,
            re.BatchUpdateBlobsRequest(requests=[nothing] * 1_000_000), timeout=PATIENCE)


# ---- Streams

@case
def streams_go_in_and_out(peer):
    for size in [0, 1, 65_536, (3 << 20) + 17]:
        data = fresh(size)
        digest, parts = named(data), []
        for start in range(0, max(size, 1), 300_000):
            part = data[start:start + 300_000]
            parts.append((upload_name(digest) if not parts else "", start, part, start + len(part) == size))
        assert peer.write(*parts) == size
        for instance in ["", "main/", "a/b/"]:
            assert peer.read(blob_name(digest, instance)) == data


@case
def instances_and_trailing_names_are_understood(peer):
    data = fresh(100)
    digest = named(data)
    assert peer.write((upload_name(digest, "some/instance/") + "/train.py", 0, data, True)) == 100
    assert peer.read(blob_name(digest)) == data


@case
def reads_begin_and_end_where_they_are_told(peer):
    data = fresh(700_000)
    name = blob_name(peer.keep(data))
    for offset in [0, 1, 262_143, 262_144, 262_145, 699_999, 700_000]:
        assert peer.read(name, offset) == data[offset:], offset
        for limit in [1, 262_144, 10_000_000]:
            assert peer.read(name, offset, limit) == data[offset:offset + limit], (offset, limit)
    refused("OUT_OF_RANGE", peer.read, name, 700_001)
    refused("OUT_OF_RANGE", peer.read, name, (1 << 63) - 1)
    refused("OUT_OF_RANGE INVALID_ARGUMENT", peer.read, name, -1)
    refused("INVALID_ARGUMENT OUT_OF_RANGE", peer.read, name, 0, -1)
    refused("NOT_FOUND", peer.read, blob_name(named(fresh(10))))


@case
def nothing_can_be_read_and_written(peer):
    empty = re.Digest(hash=EMPTY, size_bytes=0)
    assert peer.read(blob_name(empty)) == b""
    assert peer.write((upload_name(empty), 0, b"", True)) == 0
    assert peer.update((empty, b"")) == [0]
    assert peer.status(upload_name(empty)) == (0, True)
    assert peer.read_batch(empty)[0].status.code == 0


@case
def uploads_that_break_off_go_on(peer):
    data = fresh(1_000_000)
    name = upload_name(named(data))
    assert peer.status(name) == (0, False)
    assert peer.write((name, 0, data[:400_000], False)) == 400_000
    assert peer.status(name) == (400_000, False)
    refused("OUT_OF_RANGE INVALID_ARGUMENT", peer.write, (name, 500_000, data[500_000:], True))
    at, done = peer.status(name)
    assert (at, done) == (400_000, False), (at, done)
    assert peer.write((name, at, data[at:700_000], False), ("", 700_000, data[700_000:], True)) == 1_000_000
    assert peer.status(name) == (1_000_000, True)
    assert peer.read(blob_name(named(data))) == data


@case
def uploads_may_begin_anew(peer):
    data = fresh(300_000)
    name = upload_name(named(data))
    peer.write((name, 0, data[:100_000], False))
    assert peer.write((name, 0, data, True)) == 300_000


@case
def a_cut_at_every_part_loses_nothing(peer):
    data = fresh(200_000)
    step = 20_000
    name, at = upload_name(named(data)), 0
    for end in range(step, len(data) + 1, step):
        peer.write((name, at, data[at:end], end == len(data)))
        at, done = peer.status(name)
        assert (at, done) == (end, end == len(data)), (at, done, end)
    assert peer.read(blob_name(named(data))) == data


@case
def a_read_cut_at_every_message_goes_on(peer):
    data = fresh(3_000_000)
    name, came, cuts = blob_name(peer.keep(data)), b"", 0
    while len(came) < len(data):
        messages = peer.streams.Read(bs.ReadRequest(resource_name=name, read_offset=len(came)), timeout=PATIENCE)
        came += next(messages).data
        messages.cancel()
        cuts += 1
    assert came == data and cuts > 3, (len(came), cuts)


@case
def slow_readers_and_writers_stop_nobody(peer):
    data = fresh(2_000_000)
    name = blob_name(peer.keep(data))
    asked = bs.ReadRequest(resource_name=name)
    readers = [peer.streams.Read(asked, timeout=PATIENCE) for _ in range(40)]
    firsts = [next(reader).data for reader in readers]
    go_on, begun = threading.Event(), []

    def slowly(upload):
        yield bs.WriteRequest(resource_name=upload, data=data[:1000])
        go_on.wait(PATIENCE)
        yield bs.WriteRequest(write_offset=1000, data=b"x", finish_write=True)

    for _ in range(40):
        other = re.Digest(hash=uuid.uuid4().hex * 2, size_bytes=len(data))
        begun.append(peer.streams.Write.future(slowly(upload_name(other)), timeout=PATIENCE))
    assert peer.read(name) == data
    assert peer.update((named(b"in between"), b"in between")) == [0]
    assert firsts[0] + b"".join(part.data for part in readers[0]) == data, "one that waited gets the rest"
    for reader in readers[1:]:
        reader.cancel()
    go_on.set()
    for upload in begun:
        assert upload.exception(PATIENCE).code().name == "INVALID_ARGUMENT", upload


@case
def an_open_upload_tells_how_far_it_is(peer):
    data = fresh(1_000_000)
    name, go_on, said = upload_name(named(data)), threading.Event(), (0, False)

    def parts():
        yield bs.WriteRequest(resource_name=name, data=data[:400_000])
        go_on.wait(PATIENCE)
        yield bs.WriteRequest(write_offset=400_000, data=data[400_000:], finish_write=True)

    call = peer.streams.Write.future(parts(), timeout=PATIENCE)
    end = time.monotonic() + PATIENCE
    while said == (0, False) and time.monotonic() < end:
        said = peer.status(name)
    go_on.set()
    assert call.result(PATIENCE).committed_size == 1_000_000
    assert said == (400_000, False), said
    assert peer.status(name) == (1_000_000, True)


@case
def cancelled_uploads_leave_no_blob(peer):
    data = fresh(500_000)
    name, sent = upload_name(named(data)), threading.Event()
    done = threading.Event()

    def parts():
        yield bs.WriteRequest(resource_name=name, write_offset=0, data=data[:100_000])
        sent.set()
        done.wait(PATIENCE)

    call = peer.streams.Write.future(parts(), timeout=PATIENCE)
    assert sent.wait(PATIENCE)
    call.cancel()
    done.set()
    assert peer.missing(named(data)) != []
    assert peer.write((name, 0, data, True)) == 500_000


@case
def what_is_there_is_not_sent_again(peer):
    data = fresh(2 << 20)
    digest = peer.keep(data[:1 << 20])
    assert peer.write((upload_name(digest), 0, data[:10], False)) == 1 << 20
    assert peer.status(upload_name(digest)) == (1 << 20, True)


@case
def wrong_uploads_leave_nothing(peer):
    data = fresh(100_000)
    digest = named(data)
    wrong = [data[:-1], data + b"x", bytes(reversed(data)), b""]
    for bytes_ in wrong:
        refused("INVALID_ARGUMENT", peer.write, (upload_name(digest), 0, bytes_, True))
        assert peer.missing(digest) == [digest]
    name = upload_name(digest)
    refused("INVALID_ARGUMENT", peer.write, (name, 0, data[:10], False), (upload_name(digest), 10, data[10:], True))
    refused("INVALID_ARGUMENT OUT_OF_RANGE", peer.write, (upload_name(digest), -1, data, True))
    refused("INVALID_ARGUMENT OUT_OF_RANGE", peer.write, (upload_name(digest), 10, data, True))
    refused("INVALID_ARGUMENT", peer.write)
    assert peer.missing(digest) == [digest]


@case
def an_upload_of_all_there_can_be_is_refused(peer):
    digest = re.Digest(hash=named(fresh(8)).hash, size_bytes=(1 << 63) - 1)
    refused("RESOURCE_EXHAUSTED INVALID_ARGUMENT", peer.write, (upload_name(digest), 0, b"x", False))
    small = re.Digest(hash=named(fresh(8)).hash, size_bytes=17)
    refused("INVALID_ARGUMENT", peer.write, (upload_name(small), 0, fresh(1 << 20), False))


@case
def two_writers_of_one_blob_both_succeed(peer):
    data, results = fresh(3 << 20), []
    digest = named(data)

    def send():
        name = upload_name(digest)
        parts = [(name, at, data[at:at + 65_536], at + 65_536 >= len(data)) for at in range(0, len(data), 65_536)]
        results.append(peer.write(*parts))

    threads = [threading.Thread(target=send) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == [len(data)] * 4, results
    assert peer.read(blob_name(digest)) == data


@case
def two_writers_under_one_name_spoil_nothing(peer):
    data = fresh(2 << 20)
    digest = named(data)
    name = upload_name(digest)

    def send():
        try:
            parts = [(name, at, data[at:at + 65_536], at + 65_536 >= len(data)) for at in range(0, len(data), 65_536)]
            peer.write(*parts)
        except grpc.RpcError:
            pass  # one of them may be told that the other is ahead

    threads = [threading.Thread(target=send) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if peer.missing(digest):
        peer.write((name, 0, data, True))
    assert peer.read(blob_name(digest)) == data


@case
def odd_names_of_resources_are_refused(peer):
    digest = peer.keep(fresh(10))
    names = ["", "/", "blobs", "blobs/", f"blobs/{digest.hash}", f"blobs/{digest.hash}/x", f"blobs/{digest.hash}/-10",
             f"blobs/{digest.hash}/10/../..", f"blobs/sha256/{digest.hash}/10", f"blobs/{digest.hash.upper()}/10",
             f"blobs/{digest.hash}/1e1", f"blobs/../../etc/passwd/10", "x" * (1 << 20), f"blobs/{digest.hash}/" + "9" * 40]
    for name in names:
        refused("INVALID_ARGUMENT NOT_FOUND", peer.read, name)
        refused("INVALID_ARGUMENT", peer.write, (name, 0, b"x", True))
        refused("INVALID_ARGUMENT", peer.status, name)
    refused("INVALID_ARGUMENT", peer.read, upload_name(digest))
    refused("INVALID_ARGUMENT", peer.write, (blob_name(digest), 0, b"x", True))


# ---- Trees

def directory(peer, children=(), files=()):
    message = re.Directory(
        files=[re.FileNode(name=n, digest=d) for n, d in files],
        directories=[re.DirectoryNode(name=n, digest=d) for n, d in children],
    )
    return peer.keep(message.SerializeToString(deterministic=True))


def tree(peer, root, **more):
    request = re.GetTreeRequest(root_digest=root, **more)
    pages = list(peer.cas.GetTree(request, timeout=PATIENCE))
    return pages, [d for page in pages for d in page.directories]


@case
def a_tree_comes_whole_and_each_directory_once(peer):
    leaf = directory(peer, files=[("f", peer.keep(fresh(9)))])
    root = directory(peer, [("a", leaf), ("b", leaf)])
    _, found = tree(peer, root)
    assert sorted(len(d.directories) for d in found) == [0, 2], found
    pages, found = tree(peer, root, page_size=1)
    assert len(pages) >= 2 and len(found) == 2


@case
def a_tree_of_a_billion_places_is_as_large_as_its_messages(peer):
    root = directory(peer)
    for _ in range(30):
        root = directory(peer, [("a", root), ("b", root)])
    assert len(tree(peer, root)[1]) == 31


@case
def what_a_tree_lacks_is_left_out(peer):
    root = directory(peer, [("gone", named(fresh(20))), ("here", directory(peer))])
    assert len(tree(peer, root)[1]) == 2
    refused("NOT_FOUND", tree, peer, named(fresh(30)))


@case
def a_tree_that_is_none_is_refused(peer):
    for data in [b"\xff\xff no directory", b"\x0a\x00" * 2_000_000, b"\x78\x80\x80\x04" + b"\x0a\x00" * 1_500_000]:
        refused("FAILED_PRECONDITION INVALID_ARGUMENT RESOURCE_EXHAUSTED", tree, peer, peer.keep(data))


@case
def an_empty_tree_is_one_directory(peer):
    assert len(tree(peer, re.Digest(hash=EMPTY, size_bytes=0))[1]) == 1


# ---- ActionCache

@case
def there_is_no_cache_of_actions_and_that_is_said(peer):
    request = re.GetCapabilitiesRequest()
    cache = peer.capabilities.GetCapabilities(request, timeout=PATIENCE).cache_capabilities
    assert not cache.action_cache_update_capabilities.update_enabled, cache
    action = re.GetActionResultRequest(action_digest=named(fresh(30)))
    refused("UNIMPLEMENTED", lambda: peer.actions.GetActionResult(action, timeout=PATIENCE))


def main():
    peer, broke = Peer(sys.argv[1]), 0
    for function in CASES:
        name = function.__name__.replace("_", " ")
        try:
            function(peer)
            print(f"held {name}", flush=True)
        except Exception as error:  # whatever it is, it is what happened
            what = f"{type(error).__name__}: {error}".replace("\n", " ")[:600]
            print(f"broke {name}: {what}", flush=True)
            broke += 1
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())
