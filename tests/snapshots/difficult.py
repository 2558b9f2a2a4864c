"""A blob store that speaks the Remote Execution API and is difficult in one way: those real servers have, and some
that only a hostile one has.

    difficult.py SOCKET|HOST:PORT HABIT [DIRECTORY]

Says `ready` when it listens; ends when its standard input does, and says then how many blobs came or went compressed.
What it takes is in the directory, where one is named, and so are the blobs of one before it. `HABITS` below names what
there is.
"""

import hashlib
import sys
import threading
import time
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor

import grpc
import zstandard
from buildgrid.common.protos.build.bazel.remote.execution.v2 import remote_execution_pb2 as re
from buildgrid.common.protos.build.bazel.remote.execution.v2 import remote_execution_pb2_grpc as re_grpc
from buildgrid.common.protos.google.bytestream import bytestream_pb2 as bs
from buildgrid.common.protos.google.bytestream import bytestream_pb2_grpc as bs_grpc

HABITS = {
    "none",
    # What it announces, and what it takes.
    "limit-0", "limit-1", "limit-64k", "limit-negative", "limit-lies-high", "other-function", "no-capabilities",
    # What it answers.
    "large-answers", "reversed", "leaves-out", "twice", "unasked", "committed-negative", "committed-small",
    "early-answer", "says-all-is-here", "says-all-is-missing", "forgetful", "bad-digests",
    # What it sends.
    "flips", "cuts", "adds", "swaps", "empties", "dribbles", "endless", "evicts", "ignores-offsets",
    # How it is there.
    "restless", "breaks-streams", "dies-in-writes",
    # What it makes of compression, which all of these say they know. They are slow, or nobody would compress.
    "zstd", "zstd-counts", "zstd-minus-one", "zstd-refuses", "zstd-cuts", "zstd-adds", "zstd-bombs", "zstd-breaks",
}
ZSTD = 1


class Directory(dict):
    """Blobs by hash; each is in a file too."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        super().__init__((file.name, file.read_bytes()) for file in self.path.iterdir() if "." not in file.name)

    def __setitem__(self, name, data):
        super().__setitem__(name, data)
        new = self.path / f"{name}.{threading.get_ident()}"
        new.write_bytes(data)
        new.rename(self.path / name)


def number_of(message, field):
    """The last value of a field that the message's publisher does not know yet."""
    data, at, found = message.SerializeToString(), 0, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        value = varint()
        if key & 7 == 2:  # a packed list of one, perhaps
            packed, at = data[at:at + value], at + value
            value = packed[0] if packed else 0
        if key >> 3 == field:
            found = value
    return found


def with_number(message, field, value):
    message.MergeFromString(bytes([field << 3, value]))
    return message


class Store:
    def __init__(self, habit, directory=None):
        self.habit = habit
        self.blobs = Directory(directory) if directory else {}
        self.blobs[hashlib.sha256(b"").hexdigest()] = b""
        self.compressed = 0
        self.calls = 0
        self.lock = threading.Lock()

    def visit(self, context):
        """Away at every other call, if it is restless."""
        with self.lock:
            self.calls += 1
            away = self.habit == "restless" and self.calls % 2
        if away:
            context.abort(grpc.StatusCode.UNAVAILABLE, "back in a moment")

    def put(self, digest, data):
        """Keeps bytes that are what the digest says; 0 or the code of the refusal."""
        if hashlib.sha256(data).hexdigest() != digest.hash or len(data) != digest.size_bytes:
            return 3
        if self.habit != "forgetful":
            self.blobs[digest.hash] = data
        return 0

    def inflated(self, digest, form):
        """What came compressed."""
        with self.lock:
            self.compressed += 1
        if self.habit == "zstd-refuses":
            return b"refused"
        return zstandard.ZstdDecompressor().decompress(form, max_output_size=max(digest.size_bytes, 1))

    def deflated(self, data):
        """What goes compressed."""
        with self.lock:
            self.compressed += 1
        form = zstandard.ZstdCompressor(1).compress(data)
        return {
            "zstd-cuts": form[:-1],
            "zstd-adds": form + b"garbage",
            "zstd-bombs": zstandard.ZstdCompressor(1).compress(bytes(100 << 20)),
        }.get(self.habit, form)

    def slow(self):
        if self.habit.startswith("zstd"):
            time.sleep(0.05)

    def spoiled(self, data):
        """What is sent in place of these bytes."""
        if not data:
            return data
        return {
            "flips": bytes([data[0] ^ 1]) + data[1:],
            "cuts": data[:-1],
            "adds": data + b"x",
            "swaps": bytes(len(data)),
        }.get(self.habit, data)


class Capabilities(re_grpc.CapabilitiesServicer):
    def __init__(self, store):
        self.store = store

    def GetCapabilities(self, request, context):
        self.store.visit(context)
        habit = self.store.habit
        if habit == "no-capabilities":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "nobody asks that here")
        limits = {"limit-0": 0, "limit-1": 1, "limit-64k": 65536, "limit-negative": -1, "limit-lies-high": 1 << 40}
        function = 9 if habit == "other-function" else 1  # BLAKE3, SHA-256
        cache = re.CacheCapabilities(digest_function=[function], max_batch_total_size_bytes=limits.get(habit, 4 << 20))
        if habit.startswith("zstd"):
            with_number(with_number(cache, 6, ZSTD), 7, ZSTD)
        return re.ServerCapabilities(cache_capabilities=cache)


class Cas(re_grpc.ContentAddressableStorageServicer):
    def __init__(self, store):
        self.store = store

    def FindMissingBlobs(self, request, context):
        store = self.store
        store.visit(context)
        missing = [d for d in request.blob_digests if d.hash not in store.blobs]
        if store.habit == "says-all-is-here":
            missing = []
        if store.habit == "says-all-is-missing":
            missing = list(request.blob_digests)
        if store.habit == "unasked":
            missing.append(re.Digest(hash="0" * 64, size_bytes=1))
        if store.habit == "bad-digests":
            missing.append(re.Digest(hash="..", size_bytes=-1))
        return re.FindMissingBlobsResponse(missing_blob_digests=missing)

    def answers(self, items):
        habit = self.store.habit
        if habit == "reversed":
            items.reverse()
        if habit == "leaves-out" and items:
            items.pop()
        if habit == "twice":
            items.extend(items[:])
        return items

    def BatchUpdateBlobs(self, request, context):
        store = self.store
        store.visit(context)
        if store.habit == "limit-lies-high" and request.ByteSize() > 50_000:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "the message is too large")
        store.slow()
        answer, items = re.BatchUpdateBlobsResponse(), []
        for item in request.requests:
            one = answer.Response(digest=item.digest)
            data = store.inflated(item.digest, item.data) if number_of(item, 3) == ZSTD else item.data
            one.status.code = store.put(item.digest, data)
            items.append(one)
        answer.responses.extend(self.answers(items))
        return answer

    def BatchReadBlobs(self, request, context):
        store = self.store
        store.visit(context)
        store.slow()
        wanted = number_of(request, 3) == ZSTD
        answer, items = re.BatchReadBlobsResponse(), []
        for digest in request.digests:
            one = answer.Response(digest=digest)
            data = store.blobs.get(digest.hash)
            if data is None or store.habit == "evicts":
                one.status.code = 5
            else:
                one.data = store.spoiled(data)
                if wanted and store.habit.startswith("zstd") and store.habit != "zstd-refuses":
                    one = with_number(answer.Response(digest=digest, data=store.deflated(data)), 4, ZSTD)
                if store.habit == "large-answers":
                    one.status.message = "x" * 20_000
            items.append(one)
        answer.responses.extend(self.answers(items))
        if store.habit == "limit-lies-high" and answer.ByteSize() > 50_000:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "the answer is too large")
        return answer


class Streams(bs_grpc.ByteStreamServicer):
    def __init__(self, store):
        self.store = store

    def Read(self, request, context):
        store = self.store
        store.visit(context)
        data = store.blobs.get(request.resource_name.split("/")[-2])
        if data is None or store.habit == "evicts":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such blob")
        offset = 0 if store.habit == "ignores-offsets" else request.read_offset
        data = store.spoiled(data)[offset:]
        size = 1000 if store.habit == "dribbles" else 100_000
        is_compressed = "compressed-blobs/zstd/" in request.resource_name
        if is_compressed and store.habit in ("none", "zstd-refuses"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nothing is compressed here")
        if is_compressed:
            data, size = store.deflated(data), 1000
        for number, start in enumerate(range(0, len(data), size)):
            if is_compressed and store.habit == "zstd-breaks" and number == 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "back in a moment")
            if store.habit in ("breaks-streams", "restless", "ignores-offsets") and number == 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "back in a moment")
            if store.habit in ("empties", "dribbles"):
                yield bs.ReadResponse()
            yield bs.ReadResponse(data=data[start:start + size])
        while store.habit == "endless" and context.is_active():
            yield bs.ReadResponse(data=bytes(100_000))

    def Write(self, messages, context):
        store = self.store
        store.visit(context)
        data, name = b"", ""
        for message in messages:
            name = message.resource_name or name
            data += message.data
            digest = re.Digest(hash=name.split("/")[-2], size_bytes=int(name.split("/")[-1]))
            if store.habit == "early-answer":
                break
            with store.lock:
                store.calls += 1
                dies = store.habit == "dies-in-writes" and store.calls < 4
            if dies:
                context.abort(grpc.StatusCode.UNAVAILABLE, "back in a moment")
        else:
            came = len(data)
            if "/compressed-blobs/zstd/" in name:
                data = store.inflated(digest, data)
            if store.put(digest, data):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "these bytes are others")
            if store.habit == "zstd-counts":
                return bs.WriteResponse(committed_size=came)
        sizes = {"committed-negative": -1, "committed-small": 17, "zstd-minus-one": -1}
        return bs.WriteResponse(committed_size=sizes.get(store.habit, digest.size_bytes))


def main():
    address, habit, *places = sys.argv[1:]
    assert habit in HABITS, f"there is no habit {habit}"
    store = Store(habit, *places[:1])
    options = [("grpc.max_receive_message_length", 8 << 20), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(16), options=options)
    re_grpc.add_CapabilitiesServicer_to_server(Capabilities(store), server)
    re_grpc.add_ContentAddressableStorageServicer_to_server(Cas(store), server)
    bs_grpc.add_ByteStreamServicer_to_server(Streams(store), server)
    if len(places) == 2:
        key, certificate = ((Path(places[1]) / name).read_bytes() for name in ("key.pem", "cert.pem"))
        server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    else:
        server.add_insecure_port(f"unix:{address}" if "/" in address else address)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(0)
    print(f"compressed {store.compressed}", flush=True)


if __name__ == "__main__":
    main()
