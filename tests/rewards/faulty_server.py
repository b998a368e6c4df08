"""A reward server of the standard library that does what it is told: fine answers, and every fault of RELIABILITY.md F16 and S8.

A behaviour is a function of the request's handler; the server works off a list of them, and then answers well. The score of a
sample is the length of its response.
"""

from __future__ import annotations

import gzip
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """One request. asked: its JSON."""

    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def do_POST(self) -> None:
        self.asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behave = self.server.take(self)
        with suppress(BrokenPipeError, ConnectionResetError):  # a client that has seen enough
            behave(self)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    @property
    def scores(self) -> list[float]:
        return [float(len(sample.get("response", ""))) for sample in self.asked["samples"]]

    def log_message(self, *_: Any) -> None:
        pass


class FaultyServer(ThreadingHTTPServer):
    """requests: (headers, JSON) of all since the last `do`. url_of_now: for clients whose late requests count for nobody."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours: list[Behaviour] = []
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.round = 0
        self.lock = threading.Lock()
        self.scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/score"

    @property
    def url_of_now(self) -> str:
        return f"{self.url}/{self.round}"

    def do(self, behaviours: Iterable[Behaviour]) -> None:
        """Answer the next requests so."""
        with self.lock:
            self.behaviours, self.requests = list(behaviours), []
            self.round += 1

    def take(self, handler: Handler) -> Behaviour:
        with self.lock:
            if handler.path.rpartition("/")[2] not in ("score", str(self.round)):
                return fine  # sent by a client that has been closed
            self.requests.append((dict(handler.headers), handler.asked))
            return self.behaviours.pop(0) if self.behaviours else fine

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up


@contextmanager
def serving(certificate: tuple[Path, Path] | None = None, make: type[FaultyServer] = FaultyServer) -> Iterator[FaultyServer]:
    """A server on a free port. certificate: PEM files of certificate and key, for https."""
    server = make()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -------------------------------------------------------------------------------------------------------------- behaviours


def fine(handler: Handler) -> None:
    handler.answer(200, json.dumps({"scores": handler.scores}).encode())


def saying(text: str | bytes, status: int = 200, **headers: str) -> Behaviour:
    """Answer with this body."""
    return lambda handler: handler.answer(status, text if isinstance(text, bytes) else text.encode(), **headers)


def late(seconds: float) -> Behaviour:
    """Answer well after a while."""

    def behave(handler: Handler) -> None:
        time.sleep(seconds)
        fine(handler)

    return behave


def dripping_body(handler: Handler) -> None:
    """A byte each 0.1 s, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.1)


def dripping_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"X: y\r\n")
        time.sleep(0.1)


def closing(handler: Handler) -> None:
    """Hang up without a word."""
    handler.close_connection = True
    handler.connection.close()


def closing_in_the_middle(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [1')
    handler.close_connection = True


def streaming_gigabyte(handler: Handler) -> None:
    """1 GiB in chunks, without Content-Length."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for _ in range(1024):
        handler.wfile.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")


def announcing_gigabyte(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(2**30))
    handler.end_headers()
    for _ in range(1024):
        handler.wfile.write(b" " * 2**20)


# 64 MiB in 64 KiB, of members, as every worker imports this file and packs one of them.
BOMB = gzip.compress(b'{"scores": [') + 64 * gzip.compress(b" " * 2**20) + gzip.compress(b"1]}")


def gzip_bomb(handler: Handler) -> None:
    handler.answer(200, BOMB, Content_Encoding="gzip")


def speaking_no_http(handler: Handler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    handler.close_connection = True
