"""Run a relay: `python -m tests.integration.trainer.scripted_relay CELL DIRECTORY [HANG_S [HELD]]`.

It speaks the wire of `areal_hpc.wire.replicas` and takes its part in update groups, but has no
model. With `HANG_S` it answers the joining of a group after so long, with an error. In the folder
`HELD` it notes each bucket that it is called for, and all but the last wait there until let go.
"""

import itertools
import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_hpc.rundir import rendezvous
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaState, ReplicaView
from tests.support.deadlines import Deadline, scaled
from tests.support.json_server import JsonHandler, serving_http
from tests.support.weight_updates import SCORE_WITHOUT_MODEL

CELL, DIRECTORY, HANG_S = sys.argv[1], Path(sys.argv[2]), float((*sys.argv, "0")[3])
HELD = Path(sys.argv[4]) if len(sys.argv) > 4 else None
HELD_AT_MOST_S = 60.0


class Replica:
    version = served = ""
    group: Any = None
    buckets = 0

    def __init__(self) -> None:
        self.calls = itertools.count(1)
        self.at_work = threading.Lock()

    def view(self) -> ReplicaView:
        state: ReplicaState = "serving" if self.served else "ready"
        return ReplicaView(0, 1, state, "http://127.0.0.1:1", self.served)

    def call(self, route: str, body: Any) -> tuple[int, object]:
        match route:
            case "fence":
                self.served = ""
            case "serve":
                self.served = body["version"]
            case "init_weights_update_group" if HANG_S:
                time.sleep(HANG_S)
                return 500, {"error": "this one never joins"}
            case "init_weights_update_group":
                self.join(body)
            case "update_weights_from_distributed":
                self.receive(body)
            case "model_info":
                return 200, {"weight_version": self.version}
            case "score":
                return 200, SCORE_WITHOUT_MODEL
        return 200, self.view() if route in ("fence", "serve") else {}

    def join(self, body: Any) -> None:
        store = dist.TCPStore(body["master_address"], body["master_port"], None, False)  # type: ignore[attr-defined]
        self.group, _ = c10d._new_process_group_helper(
            body["world_size"],
            body["rank_offset"],
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(body["group_name"], store),
            group_name=c10d.GroupName(body["group_name"]),
            timeout=timedelta(seconds=scaled(60)),
        )
        c10d._world.pg_group_ranks[self.group] = {rank: rank for rank in range(body["world_size"])}

    def receive(self, body: Any) -> None:
        """Receive one part after the other, as SGLang does."""
        if HELD is not None:
            (HELD / f"called-{next(self.calls)}").touch()
        with self.at_work:
            messages = [
                torch.empty(shape, dtype=getattr(torch, dtype))
                for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
            ]
            if body["load_format"] == "flattened_bucket":
                messages = [torch.empty(sum(part.nbytes for part in messages), dtype=torch.uint8)]
            for message in messages:
                dist.broadcast(message, src=0, group=self.group)
            self.load(body["weight_version"])

    def load(self, version: str | None) -> None:
        self.version = version or self.version
        if HELD is not None:
            self.buckets += 1
            if not version:
                await_file(HELD / f"go-{self.buckets}")


def await_file(path: Path) -> None:
    deadline = Deadline(HELD_AT_MOST_S)
    while not path.exists():
        assert not deadline.is_over(), f"{path} never came"
        time.sleep(0.01)


REPLICA = Replica()


class Handler(JsonHandler):
    protocol_version = "HTTP/1.1"

    def get(self) -> None:
        self.answer(200, ReplicasOfCell(CELL, [REPLICA.view()]))

    def post(self, content: bytes) -> None:
        self.answer(*REPLICA.call(self.path.rpartition("/")[2], json.loads(content)))


if __name__ == "__main__":
    with serving_http(Handler) as url:
        rendezvous.publish_endpoint(DIRECTORY, f"control-{CELL}", url)
        threading.Event().wait()
