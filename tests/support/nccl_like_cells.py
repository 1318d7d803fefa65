"""Cells without a model whose replicas receive over an NCCL-like group, and die on request.

Each speaks the wire of `areal_hpc.wire.replicas`. A fault has two halves: the answer that the
sender gets over HTTP, and the fate of the receiver's end of the group.
"""

import json
import math
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from areal_hpc.rundir import rendezvous
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaState, ReplicaView
from tests.support.deadlines import scaled
from tests.support.json_server import JsonHandler, serving_http
from tests.support.nccl_like import NcclLikeGroup, join_as_member
from tests.support.weight_updates import SCORE_WITHOUT_MODEL

ITEM_BYTES = {"float32": 4}
SILENT_AT_MOST_S = 3600.0
WEIGHTS = {f"norm.{at}.weight": torch.full((1024,), float(at)) for at in range(3)}
BUCKET_BYTES = 4096
PATIENT_S = scaled(100.0)
PHASES = {
    "join": ("init_weights_update_group", 1),
    "paused": ("pause_generation", 1),
    "begin": ("begin_weight_update", 1),
    "communicator": ("update_weights_from_distributed", 1),
    "broadcast": ("update_weights_from_distributed", 2),
    "end": ("end_weight_update", 1),
    "version": ("model_info", 1),
    "verify": ("score", 1),
    "resume": ("continue_generation", 1),
}
"""The call that is under way as a party is lost."""


class Fault(NamedTuple):
    answer: Literal["breaks", "refuses", "none"]
    """Answer to the sender: a broken connection, a report that SGLang is gone, or none."""
    receiver: Literal["dies", "hangs"]


class NcclLikeCell:
    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.incarnation = 0
        self.received: list[bytes] = []
        self._over = threading.Event()
        self.directory = directory
        self.start()

    def start(self) -> None:
        """Start as after a restart: without weights, in no group."""
        self.incarnation += 1
        self.version = self.served = ""
        self.fault: tuple[str, int, Fault] | None = None
        self._lost: Fault | None = None
        self._calls: Counter[str] = Counter()
        self._group: NcclLikeGroup | None = None
        self._at_work = threading.Lock()
        cell = self

        class Handler(JsonHandler):
            protocol_version = "HTTP/1.1"

            def get(self) -> None:
                self.answer(200, ReplicasOfCell(cell.name, [cell.view()]))

            def post(self, content: bytes) -> None:
                body = json.loads(content)
                route = self.path.rpartition("/")[2]
                lost = cell.meet_fault(route)
                if lost is None:
                    with suppress(RuntimeError):  # the test is over
                        self.answer(*cell.call(route, body))
                elif lost.answer == "refuses":
                    self.answer(502, {"error": "SGLang is not reachable"})
                else:
                    if lost.answer == "none":
                        cell.wait_in_silence()
                    self.close_connection = True

        self._ends = ExitStack()
        url = self._ends.enter_context(serving_http(Handler))
        rendezvous.publish_endpoint(self.directory, f"control-{self.name}", url)

    def view(self) -> ReplicaView:
        state: ReplicaState = "serving" if self.served else "ready"
        return ReplicaView(0, self.incarnation, state, "http://127.0.0.1:1", self.served)

    def meet_fault(self, route: str) -> Fault | None:
        """Read the fault of this replica, from the call on for which it was set."""
        self._calls[route] += 1
        if self.fault is not None and self.fault[:2] == (route, self._calls[route]):
            self._lost = self.fault[2]
            if self._lost.receiver == "dies" and self._group is not None:
                self._group.die()
        return self._lost

    def wait_in_silence(self) -> None:
        self._over.wait(SILENT_AT_MOST_S)

    def call(self, route: str, body: Any) -> tuple[int, object]:
        """Make one control call; return its status and answer."""
        match route:
            case "fence":
                self.served = ""
            case "serve":
                self.served = body["version"]
            case "init_weights_update_group":
                self._group = join_as_member(
                    body["master_address"], body["master_port"], body["group_name"],
                    body["rank_offset"], body["world_size"],
                )  # fmt: skip
            case "begin_weight_update":
                self.received = []
            case "update_weights_from_distributed":
                self._receive(body)
            case "model_info":
                return 200, {"weight_version": self.version}
            case "score":
                return 200, SCORE_WITHOUT_MODEL
        return 200, self.view() if route in ("fence", "serve") else {}

    def _receive(self, body: Any) -> None:
        assert body["load_format"] == "flattened_bucket"
        assert self._group is not None
        with self._at_work:
            size_bytes = sum(
                math.prod(shape) * ITEM_BYTES[dtype]
                for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
            )
            self.received.append(self._group.receive(size_bytes))
            self.version = body["weight_version"] or self.version

    def restart(self) -> None:
        self.close()
        self._over = threading.Event()
        self.start()

    def close(self) -> None:
        self._over.set()
        self._ends.close()


def assert_served(cells: list[NcclLikeCell], version: str) -> None:
    content = [tensor.numpy().tobytes() for tensor in WEIGHTS.values()]
    assert [(cell.served, cell.received) for cell in cells] == [(version, content)] * len(cells)
