"""The process of the S3 server for tests: moto's S3 on a free port of the loopback, which it prints, until stdin ends.

Moto does what S3 does; this module defines how requests and answers are sent. The server that moto brings closes the
connection after each request, so that every one costs a connection and a thread on both sides, and it waits then for
what may still come.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.core import serialize
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class _Lasting(MotoRequestHandler):
    """Questions request after request on one connection; each is read to its end first, and answered in one piece."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def run_wsgi(self) -> None:
        """Answer one request."""
        # A client may have asked whether to go on; that it may has been written already.
        self.wfile.flush()
        environ = self.make_environ()
        given = environ["wsgi.input"]
        # What is chunked comes with something that reads to its end, and no further.
        content = (
            given.read() if "wsgi.input_terminated" in environ else given.read(int(self.headers["Content-Length"] or 0))
        )
        environ["wsgi.input"] = io.BytesIO(content)
        self._answer(*_answer_of(self.server.app, environ))

    def _answer(self, status: str, headers: list[tuple[str, str]], content: bytes) -> None:
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            self.send_header(name, value)
        has_length = any(name.lower() == "content-length" for name, _ in headers)
        if not has_length and self.command != "HEAD" and int(code) not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()


def _answer_of(
    app: Callable[..., Iterable[bytes]], environ: dict[str, Any]
) -> tuple[str, list[tuple[str, str]], bytes]:
    answers: list[tuple[str, list[tuple[str, str]]]] = []

    def start(status: str, headers: list[tuple[str, str]], error: object = None) -> None:
        answers.append((status, headers))

    parts = app(environ, start)
    try:
        content = b"".join(parts)
    finally:
        if hasattr(parts, "close"):
            parts.close()
    return *answers[-1], content


def main() -> None:
    """Serve until the standard input ends."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    # A third of what a listing takes is the reading of times that moto has written itself, for every object again.
    taken = vars(serialize)
    if "parse_to_aware_datetime" in taken:
        taken["parse_to_aware_datetime"] = functools.lru_cache(1 << 16)(taken["parse_to_aware_datetime"])
    # Its S3 alone: what else moto serves has it look through two hundred folders at every request.
    server = make_server("127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=_Lasting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
