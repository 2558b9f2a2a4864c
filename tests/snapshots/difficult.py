"""A blob store that speaks the Remote Execution API and is difficult in one way: those real servers have, and some
that only a hostile one has.

    difficult.py SOCKET HABIT

Says `ready` when it listens; ends when its standard input does. `HABITS` below names what there is.
"""

import hashlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
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
}


class Store:
    def __init__(self, habit):
        self.habit = habit
        self.blobs = {hashlib.sha256(b"").hexdigest(): b""}
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
        answer, items = re.BatchUpdateBlobsResponse(), []
        for item in request.requests:
            one = answer.Response(digest=item.digest)
            one.status.code = store.put(item.digest, item.data)
            items.append(one)
        answer.responses.extend(self.answers(items))
        return answer

    def BatchReadBlobs(self, request, context):
        store = self.store
        store.visit(context)
        answer, items = re.BatchReadBlobsResponse(), []
        for digest in request.digests:
            one = answer.Response(digest=digest)
            data = store.blobs.get(digest.hash)
            if data is None or store.habit == "evicts":
                one.status.code = 5
            else:
                one.data = store.spoiled(data)
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
        for number, start in enumerate(range(0, len(data), size)):
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
            if store.put(digest, data):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "these bytes are others")
        sizes = {"committed-negative": -1, "committed-small": 17}
        return bs.WriteResponse(committed_size=sizes.get(store.habit, digest.size_bytes))


def main():
    socket, habit = sys.argv[1:]
    assert habit in HABITS, f"there is no habit {habit}"
    store = Store(habit)
    options = [("grpc.max_receive_message_length", 8 << 20), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(16), options=options)
    re_grpc.add_CapabilitiesServicer_to_server(Capabilities(store), server)
    re_grpc.add_ContentAddressableStorageServicer_to_server(Cas(store), server)
    bs_grpc.add_ByteStreamServicer_to_server(Streams(store), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(0)


if __name__ == "__main__":
    main()
