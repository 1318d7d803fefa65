"""HTTP servers of a few lines, in threads of a test's process."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

POLL_S = 0.02
NO_HEADERS: Mapping[str, str] = {}


class JsonHandler(BaseHTTPRequestHandler):
    """Base of handlers that answer in JSON and print nothing."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        with suppress(ConnectionError):  # of a caller that has given up
            super().handle()

    def do_GET(self) -> None:
        self.get()

    def do_HEAD(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(self.rfile.read(int(self.headers["content-length"])))

    def get(self) -> None:
        self.answer(404, {})

    def post(self, content: bytes) -> None:
        self.answer(404, {})

    def answer(self, status: int, body: object, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Answer with bytes as they are, and with anything else in JSON."""
        kind, content = "text/plain", body
        if not isinstance(content, bytes):
            kind, content = "application/json", msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep standard error empty."""


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[POLL_S])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
