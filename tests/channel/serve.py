"""Serves the channels below a directory on the loopback, well or badly, as the path asks for.

    serve.py DIR [PORT]

The address of a file is `http://127.0.0.1:PORT/MODE/PATH`; the port is the first line printed. A mode may have an
argument: `slow~20000`. Modes:

    plain           as it should be
    basic           wants user `reader`, password `basic-secret`
    bearer          wants the bearer token `bearer-secret`
    token           wants `/t/token-secret` before the mode
    forbidden       403 for everything
    missing         404 for everything
    broken          500 for everything
    unavailable     503 the first two times, for each path
    busy            429 with `Retry-After: 1` the first time, for each path
    redirect        to `plain`
    loop            redirects to itself
    login           a page that asks for a password, with status 200
    truncated       packages end half-way
    flipped         one bit of each package is another one
    wrong-size      repodata.json claims one byte more for each package
    gone~NAME       404 for the package NAME
    stall-repodata  repodata.json stops half-way until it is released
    stall~NAME      the package NAME stops half-way until it is released
    slow~N          packages come at N bytes per second
    huge~N          repodata.json has N more records
    told            as the mode that was told last: one address whose server changes

Control: `GET /control/requests` tells how often each path was asked for, `GET /control/stalled` how many answers
wait. `POST /control/release` lets them go on, now and from then on; `POST /control/hold` makes later ones wait
again; `POST /control/clear` forgets the requests; `POST /control/mode/MODE` tells a mode. The server ends with its
standard input.

Owns what a bad server looks like; knows nothing about conda but the names of its files.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

BASIC = "Basic " + base64.b64encode(b"reader:basic-secret").decode()
BEARER = "Bearer bearer-secret"
TOKEN = "token-secret"

#: How long a stall may last: a test that forgot to release must not hold up everything.
LONGEST_STALL = 300.0

LOGIN_PAGE = (
    b"<!DOCTYPE html><html><body><form>User <input name=user> Password <input></form></body></html>\n"
)


@dataclass
class State:
    """What the server remembers."""

    directory: Path
    requests: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)
    stalled: int = 0
    told: str = "plain"

    def count(self, path: str) -> int:
        """Notes a request; the how manieth it is."""
        with self.lock:
            self.requests[path] += 1
            return self.requests[path]

    def stall(self) -> None:
        """Waits for the release."""
        with self.lock:
            self.stalled += 1
        self.released.wait(LONGEST_STALL)
        with self.lock:
            self.stalled -= 1


@dataclass(frozen=True)
class Asked:
    """A request: `/MODE~ARGUMENT/PATH`, with a token before it if one was given."""

    mode: str
    argument: str
    path: str
    token: str | None

    @property
    def is_repodata(self) -> bool:
        """Whether it is about what a channel offers."""
        return Path(self.path).name.startswith(("repodata", "current_repodata"))

    @property
    def is_package(self) -> bool:
        """Whether it is about a package."""
        return self.path.endswith((".conda", ".tar.bz2"))

    @property
    def is_named(self) -> bool:
        """Whether it is about the package that the argument names."""
        return self.is_package and Path(self.path).name.rsplit("-", 2)[0] == self.argument


def understand(target: str, told: str) -> Asked:
    """Takes an address apart; `told` is the mode of those that leave it open."""
    parts = [unquote(part) for part in urlsplit(target).path.split("/") if part]
    token = None
    if len(parts) > 2 and parts[0] == "t":
        token, parts = parts[1], parts[2:]
    first = parts[0] if parts else ""
    mode, _, argument = (told if first == "told" else first).partition("~")
    return Asked(mode, argument, "/".join(parts[1:]), token)


@functools.cache
def enlarged(path: Path, more: int) -> bytes:
    """A repodata.json with more records than packages."""
    repodata = json.loads(path.read_bytes())
    for number in range(more):
        name = f"filler-{number // 20}"
        record = {
            "name": name, "version": f"{number % 20}.0", "build": "0", "build_number": 0, "depends": [],
            "subdir": repodata["info"]["subdir"], "size": 1000, "sha256": hashlib.sha256(name.encode()).hexdigest(),
            "md5": hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), "timestamp": 1_700_000_000_000,
        }  # fmt: skip
        repodata["packages.conda"][f"{name}-{number % 20}.0-0.conda"] = record
    return json.dumps(repodata).encode()


def oversized(path: Path) -> bytes:
    """A repodata.json that is wrong about sizes."""
    repodata = json.loads(path.read_bytes())
    for kind in ("packages", "packages.conda"):
        for record in repodata[kind].values():
            record["size"] += 1
    return json.dumps(repodata).encode()


def flipped(data: bytes) -> bytes:
    """The same bytes but for one bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    state: State

    def do_GET(self) -> None:
        """A file, or a question of the test."""
        if self.path.startswith("/control/"):
            self.control()
            return
        times = self.state.count(urlsplit(self.path).path)
        asked = understand(self.path, self.state.told)
        if not (self.refuse(asked) or self.turn_away(asked, times)):
            self.send_file(asked)

    def do_HEAD(self) -> None:
        """As for the whole file; not counted as one."""
        asked = understand(self.path, self.state.told)
        if not self.refuse(asked):
            self.send_file(asked)

    def do_POST(self) -> None:
        """An order of the test."""
        order = self.path.removeprefix("/control/")
        if order == "release":
            self.state.released.set()
        elif order == "hold":
            self.state.released.clear()
        elif order == "clear":
            with self.state.lock:
                self.state.requests.clear()
        elif order.startswith("mode/"):
            self.state.told = unquote(order.removeprefix("mode/"))
        self.answer(204)

    def control(self) -> None:
        """What the test wants to know."""
        with self.state.lock:
            known = {"requests": dict(self.state.requests), "stalled": self.state.stalled}
        told = known.get(self.path.removeprefix("/control/"))
        self.answer(404 if told is None else 200, json.dumps(told).encode())

    def refuse(self, asked: Asked) -> bool:
        """Whether whoever asks was turned away for who they are."""
        given = self.headers.get("Authorization")
        if asked.mode == "basic" and given != BASIC:
            self.answer(401, headers={"WWW-Authenticate": 'Basic realm="channel"'})
        elif asked.mode == "bearer" and given != BEARER:
            self.answer(401, headers={"WWW-Authenticate": "Bearer"})
        elif asked.mode == "token" and asked.token != TOKEN or asked.mode == "forbidden":
            self.answer(403)
        else:
            return False
        return True

    def turn_away(self, asked: Asked, times: int) -> bool:
        """Whether the answer was anything but the file."""
        if asked.mode == "missing" or asked.mode == "gone" and asked.is_named:
            self.answer(404)
        elif asked.mode == "broken":
            self.answer(500)
        elif asked.mode == "unavailable" and times <= 2:
            self.answer(503)
        elif asked.mode == "busy" and times == 1:
            self.answer(429, headers={"Retry-After": "1"})
        elif asked.mode == "redirect":
            self.answer(302, headers={"Location": f"/plain/{asked.path}"})
        elif asked.mode == "loop":
            self.answer(302, headers={"Location": self.path})
        elif asked.mode == "login":
            self.answer(200, LOGIN_PAGE, {"Content-Type": "text/html"})
        else:
            return False
        return True

    def send_file(self, asked: Asked) -> None:
        """The file, in the way of the mode."""
        path = self.state.directory / asked.path
        if ".." in path.parts or not path.is_file():
            self.answer(404)
            return
        data = self.content(asked, path)
        tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
        if self.headers.get("If-None-Match") == tag:
            self.answer(304, headers={"ETag": tag})
            return
        # What a channel offers is asked for again each time, as from any server that is not a cache.
        headers = {"ETag": tag, "Cache-Control": "no-cache" if asked.is_repodata else "max-age=3600"}
        half = len(data) // 2
        if asked.mode == "truncated" and asked.is_package:
            self.answer(200, data, headers, pieces=[data[:half]])
            self.close_connection = True
        elif asked.mode == "stall-repodata" and asked.is_repodata or asked.mode == "stall" and asked.is_named:
            self.answer(200, data, headers, pieces=[data[:half], None, data[half:]])
        elif asked.mode == "slow" and asked.is_package:
            piece = max(int(asked.argument) // 10, 1)
            pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
            self.answer(200, data, headers, pieces, pause=0.1)
        else:
            self.answer(200, data, headers)

    def content(self, asked: Asked, path: Path) -> bytes:
        """What the file holds in this mode."""
        if asked.mode == "huge" and asked.is_repodata:
            return enlarged(path, int(asked.argument))
        if asked.mode == "wrong-size" and asked.is_repodata:
            return oversized(path)
        data = path.read_bytes()
        return flipped(data) if asked.mode == "flipped" and asked.is_package else data

    def answer(
        self,
        status: int,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        pieces: Sequence[bytes | None] | None = None,
        pause: float = 0.0,
    ) -> None:
        """Sends an answer that announces `data`, in pieces if there are any; `None` is a stall."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD" or status in (204, 304):
            return
        try:
            for piece in [data] if pieces is None else pieces:
                if piece is None:
                    self.state.stall()
                    continue
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(pause)
        except OSError:  # whoever asked has gone, which is their right
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged: what matters is counted."""


class Server(ThreadingHTTPServer):
    """Many connections at once; none holds up the end."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that breaks is nothing to talk about."""


def main() -> int:
    """Serves until the standard input ends."""
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    Handler.state = State(Path(sys.argv[1]).resolve())
    server = Server(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) == 3 else 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
