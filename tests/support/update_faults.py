"""Faults of an update's parties at a chosen moment, and an observer of agents' replies meanwhile.

A gate stands between the sender and each cell's relay, as a network would. It forwards every
call, and at a chosen route of a chosen replica it does something first.
"""

import http.client
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from transformers import Qwen3ForCausalLM

from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.rendezvous import make_client_tls
from tests.support.deadlines import scaled
from tests.support.inference_cell import CALL_TIMEOUT_S, Cell, logprob_error
from tests.support.json_server import JsonHandler, serving_http

PROMPT = [10, 20, 30, 40, 50]
SAMPLING: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
POLL_S = 0.1


@dataclass
class Trap:
    """Action at the `nth` call of `route` for a replica that arrives at a gate."""

    route: str
    nth: int
    index: int
    spring: Callable[[Callable[[], None]], None]
    """Function that gets the forwarding of the call and starts it before, after or never."""
    seen: int = 0


class Gate:
    """Forwarder to one cell's relay, which springs the trap that is set."""

    def __init__(self, cell: Cell, directory: Path) -> None:
        self._cell = cell
        self._lock = threading.Lock()
        self.trap: Trap | None = None
        self.lost: set[int] = set()
        """Replicas for which calls go unanswered, as if their node had vanished."""
        gate = self

        class Handler(JsonHandler):
            protocol_version = "HTTP/1.1"

            def get(self) -> None:
                gate.forward(self, b"")

            def post(self, content: bytes) -> None:
                gate.pass_on(self, content)

        self._ends = ExitStack()
        url = self._ends.enter_context(serving_http(Handler))
        rendezvous.publish_endpoint(directory, f"control-{cell.name}", url)

    def pass_on(self, call: JsonHandler, body: bytes) -> None:
        """Forward a call, unless the trap is for it or the replica is lost."""
        _, _, index, route = call.path.split("/")
        if int(index) in self.lost:
            return
        with self._lock:
            trap = self.trap
            is_meant = trap is not None and (trap.route, trap.index) == (route, int(index))
            if trap is not None and is_meant:
                trap.seen += 1
                is_meant = trap.seen == trap.nth
        if trap is not None and is_meant:
            trap.spring(lambda: self.forward(call, body))
        else:
            self.forward(call, body)

    def forward(self, call: JsonHandler, body: bytes) -> None:
        relay, tls = self._cell.relay.base_url, make_client_tls(self._cell.service_key)
        upstream = http.client.HTTPSConnection(
            str(relay.host), relay.port, timeout=scaled(CALL_TIMEOUT_S), context=tls
        )
        headers = {name: value for name, value in call.headers.items() if name != "Host"}
        try:
            upstream.request(call.command, call.path, body or None, headers)
            if _has_left(call.connection, upstream.sock):
                return
            answer = upstream.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            call.close_connection = True  # as if the relay's own connection had broken
            with suppress(OSError):
                call.connection.shutdown(2)
            return
        finally:
            upstream.close()
        with suppress(OSError):
            call.send_response(answer.status)
            call.send_header("content-length", str(len(content)))
            call.end_headers()
            call.wfile.write(content)

    def close(self) -> None:
        self._ends.close()


def _has_left(caller: socket.socket, upstream: socket.socket) -> bool:
    """Wait for the answer; true when the caller's connection breaks before it is there."""
    while True:
        ready, _, _ = select.select([caller, upstream], [], [])
        if upstream in ready:
            return False
        if not caller.recv(1, socket.MSG_PEEK):
            return True


@dataclass
class Reader:
    """Client that asks one replica for tokens again and again while its relay says it serves."""

    cell: Cell
    index: int
    models: dict[str, Qwen3ForCausalLM]
    """Model of each version's weights."""
    wrong: list[str] = field(default_factory=list)
    """Tokens whose log-probability is not that of the version they are stamped with."""
    answered: list[tuple[float, str]] = field(default_factory=list)
    """(time, version of the last token) of each complete reply."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(scaled(30))

    def longest_silence_s(self, since: float, until: float) -> float:
        inside = [at for at, _ in self.answered if since < at < until]
        marks = [since, *inside, until]
        return max(late - early for early, late in itertools.pairwise(marks))

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(httpx.HTTPError):  # the relay, or the server, is gone
                if self.cell.replica(self.index).state == "serving":
                    self._check(self.cell.generate(PROMPT, self.index, **SAMPLING))

    def _check(self, reply: dict[str, Any]) -> None:
        meta = reply["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return  # the proxy makes such a call again
        for part in meta["weight_versions"]:
            version, span = part["version"], slice(part["start"], part["end"])
            model = self.models.get(version)
            if model is None:
                self.wrong.append(f"{version!r} was never verified anywhere")
            elif (error := logprob_error(model, PROMPT, reply, span)) > 1e-4:
                self.wrong.append(f"{version}: log-probabilities are off by {error:.3g}")
        self.answered.append((time.monotonic(), meta["weight_version"]))


@contextmanager
def gates(cells: list[Cell], directory: Path) -> Iterator[list[Gate]]:
    """Open one gate per cell; senders find them in `directory`."""
    directory.mkdir(exist_ok=True)
    made = [Gate(cell, directory) for cell in cells]
    try:
        yield made
    finally:
        for gate in made:
            gate.close()
