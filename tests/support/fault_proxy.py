"""A proxy between a client and an S3 server that counts what passes, and breaks requests on purpose.

A fault either keeps a request from the server (``refused`` kinds) or lets it take effect and loses or falsifies
the answer (``after`` kinds). Clients that trust such answers lose checkpoints.
"""

from __future__ import annotations

import http.client
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LEAK = "403"
"""A refusal whose text repeats what the client has signed with, as servers' do."""

REFUSED = ("500", "503", "409", "412", "reset", "silence", "200-error")
AFTER = ("500-after", "reset-after", "silence-after")
FAULTS = (*REFUSED, *AFTER)

_ERROR = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>%s</Code><Message>%s</Message></Error>'
_CODES = {
    "403": b"SignatureDoesNotMatch",
    "500": b"InternalError",
    "503": b"SlowDown",
    "409": b"ConditionalRequestConflict",
    "412": b"PreconditionFailed",
    "200-error": b"InternalError",
}
_HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"})


@dataclass(frozen=True, slots=True)
class Seen:
    """One request that passed, or did not."""

    method: str
    path: str
    fault: str = ""
    answered_nbytes: int = 0


@dataclass(slots=True)
class FaultProxy:
    """A proxy that runs.

    Attributes:
        endpoint: Where it listens.
        choose: Called with the number of a request, from 0, and its method and path; returns a fault, or nothing.
        silence_seconds: How long it says nothing when it is to say nothing.
        seen: All requests since the last ``begin``.
    """

    endpoint: str = ""
    choose: Callable[[int, str, str], str] = lambda number, method, path: ""
    silence_seconds: float = 0.9
    seen: list[Seen] = field(default_factory=list)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, choose: Callable[[int, str, str], str] | None = None) -> None:
        """Count from 0 again, with other faults, or none."""
        with self._lock:
            self._count = 0
            self.seen = []
            self.choose = choose or (lambda number, method, path: "")

    def begin_at(self, wanted: int, fault: str, *, is_for_ever: bool = False) -> None:
        """Count from 0 again, and break the request with this number, or all from it on."""
        self.begin(lambda number, *_: fault if number == wanted or (is_for_ever and number > wanted) else "")

    def _fault_of(self, method: str, path: str) -> str:
        with self._lock:
            number, self._count = self._count, self._count + 1
        return self.choose(number, method, path)

    def _note(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    @property
    def answered_nbytes(self) -> int:
        """Bytes of bodies that were passed on to the client."""
        return sum(each.answered_nbytes for each in self.seen)


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Run a proxy before a server until the block ends."""
    proxy = FaultProxy()
    place = urlsplit(upstream)

    class Passing(_Passing):
        state = proxy
        host, port = place.hostname or "", place.port or 80

    server = _Server(("127.0.0.1", 0), Passing)
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are sent apart, and the second would wait 40 ms for the client to acknowledge the first.
    disable_nagle_algorithm = True
    state: FaultProxy
    host: str
    port: int
    upstream: http.client.HTTPConnection | None = None

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _pass(self) -> None:
        body = self._body()
        fault = self.state._fault_of(self.command, self.path)
        if fault in (*REFUSED, LEAK):
            self.state._note(Seen(self.command, self.path, fault))
            self._break(fault)
            return
        status, headers, content, length = self._forward(body)
        if fault in AFTER:
            self.state._note(Seen(self.command, self.path, fault))
            self._break(fault.removesuffix("-after"))
            return
        self.state._note(Seen(self.command, self.path, "", len(content)))
        self._answer(status, headers, content, length)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes, str | None]:
        upstream = self._upstream()
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
        upstream.request(self.command, self.path, body=body or None, headers=headers)
        response = upstream.getresponse()
        content = response.read()
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP_HEADERS]
        return response.status, kept, content, response.getheader("Content-Length")

    def _upstream(self) -> http.client.HTTPConnection:
        """Return the connection to the server that goes with the client's, as long as the server keeps it."""
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(self.host, self.port, timeout=60)
        elif self.upstream.sock is not None:
            # Between two requests a server has nothing to say but that it goes.
            poll = select.poll()
            poll.register(self.upstream.sock, select.POLLIN)
            if poll.poll(0):
                self.upstream.close()
        return self.upstream

    def finish(self) -> None:
        """Close both connections."""
        if self.upstream is not None:
            self.upstream.close()
        super().finish()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: str | None) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", (length or "0") if is_head else str(len(content)))
        self.end_headers()
        if not is_head:
            self.wfile.write(content)

    def _break(self, fault: str) -> None:
        if fault in _CODES:
            said = b"on purpose" if fault != LEAK else self.headers.get("Authorization", "").encode()
            content = _ERROR % (_CODES[fault], said)
            self._answer(int(fault[:3]), [("Content-Type", "application/xml")], content, None)
            return
        if fault == "silence":
            # The client gives up first; a connection of its own, so that no other request waits.
            threading.Event().wait(self.state.silence_seconds)
        # A reset instead of an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
