"""A Hugging Face hub of one repository or more, over HTTP: the routes that downloads use."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee00" * 5


class SmallHub(ThreadingHTTPServer):
    """Repositories as `{"models/owner/name": {"file": bytes}}`; large files are those over 64 B."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        for name, files in self.server.repos.items():
            plain = name.removeprefix("models/")
            listed = [{"rfilename": file} for file in files]
            described = {"id": plain.removeprefix("datasets/"), "sha": COMMIT, "siblings": listed}
            tree = [{"type": "file", "path": file, "size": 1, "oid": "0"} for file in files]
            api = {
                f"/api/{name}/revision/main": described,
                f"/api/{name}/revision/{COMMIT}": described,
                f"/api/{name}/tree/{COMMIT}": tree,
            }
            if path in api:
                body = json.dumps(api[path]).encode()
                return self._send(body, {"Content-Type": "application/json"}, with_body=with_body)
            file = path.removeprefix(f"/{plain}/resolve/{COMMIT}/")
            if file in files:
                return self._send(files[file], _headers(files[file]), with_body=with_body)
        self._send(b"", {"X-Error-Code": "RepoNotFound"}, status=404, with_body=with_body)

    def _send(
        self, body: bytes, headers: dict[str, str], *, with_body: bool, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _headers(body: bytes) -> dict[str, str]:
    """The hub names large files by their SHA-256, small ones as git does."""
    large = len(body) > 64
    git = hashlib.sha1(b"blob %d\0" % len(body) + body)
    etag = hashlib.sha256(body).hexdigest() if large else git.hexdigest()
    return {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
