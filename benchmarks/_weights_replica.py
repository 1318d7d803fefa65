"""One real cell that generates while it is updated, for `benchmarks.weights`."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
import transformers
import yaml

from areal_hpc.inference.config import resolve_device
from areal_hpc.jobs.config import get_interpreter
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.inference import InferenceConfig, WeightsConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_client_tls
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.publisher import Publisher, make_transport
from areal_hpc.weights.update import Probe, choose_probe_ids
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

START_TIMEOUT_S = 300.0
STREAMS = 4
PROMPT_TOKENS = 128
REPLY_TOKENS = 200
TRANSPORTS: Mapping[str, Mapping[str, Any]] = {
    "broadcast": {},
    "disk": {"transport": "disk"},
}


@dataclass(frozen=True, slots=True)
class Update:
    """One update, measured on all sides."""

    seconds: Mapping[str, float]
    """Times of the update's phases, measured by the sender."""
    publish_s: float
    """Time of the whole update, but for joining the group."""
    silence_s: float
    """Longest time in which no client got a token."""


class Streams:
    """Clients that always have a generation running, and the times of its pieces."""

    def __init__(self, server: ReplicaView) -> None:
        self._server = server
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._heard: list[float] = []
        self._threads = [
            threading.Thread(target=self._follow, args=(number,), daemon=True)
            for number in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, number: int) -> None:
        sampling = {"max_new_tokens": REPLY_TOKENS, "temperature": 1.0, "ignore_eos": True}
        begins = 0
        while not self._stop.is_set():
            begins += 1
            ids = [3 + (number * 37 + begins + at) % 200 for at in range(PROMPT_TOKENS)]
            body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
            with httpx.stream(
                "POST",
                f"{self._server.url}/generate",
                json=body,
                headers={"authorization": f"Bearer {self._server.keys.api}"},
                timeout=300,
                trust_env=False,
            ) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        with self._lock:
                            self._heard.append(time.monotonic())
                    if self._stop.is_set():
                        return

    def await_piece(self, after: float) -> None:
        """Return once a piece came after that time."""
        while True:
            with self._lock:
                if self._heard and self._heard[-1] > after:
                    return
            time.sleep(0.005)

    def longest_gap_s(self, began: float, ended: float) -> float:
        """The longest silence that touches the time between."""
        with self._lock:
            heard = list(self._heard)
        gaps = itertools.pairwise(heard)
        return max((b - a for a, b in gaps if b > began and a < ended), default=0.0)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def score_with_transformers(model_dir: Path) -> Probe:
    """The fixed prompt under the weights of a model directory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = choose_probe_ids(model.config.vocab_size)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return Probe(ids, logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())


class Replica:
    """One replica of one cell, and every way to update it."""

    def __init__(self, paths: RunPaths, weights: Mapping[str, torch.Tensor], bucket_bytes: int):
        self._paths = paths
        self._weights = weights
        self._specs = [
            TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in weights.items()
        ]
        self._probe = score_with_transformers(paths.starting_model_dir)
        self._step = 0
        device = torch.device(resolve_device("auto"))
        self._publishers = {
            name: Publisher(
                make_transport(
                    WeightsConfig(bucket_bytes=bucket_bytes, **settings),
                    paths.service_key.read_text(),
                    "nccl" if device.type == "cuda" else "gloo",
                    device,
                    paths.published_weights_dir,
                ),
                paths.rendezvous_dir,
                1,
                paths.service_key.read_text(),
            )
            for name, settings in TRANSPORTS.items()
        }

    def _next(self, transport: str) -> tuple[Publisher, WeightVersion]:
        self._step += 1
        return self._publishers[transport], WeightVersion(1, self._step)

    def warm_up(self) -> ReplicaView:
        """Wait until it is there, update it in every way; the server."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self._publishers["disk"].discover_outdated_training_replicas(WeightVersion(1, 0)):
            assert time.monotonic() < give_up_at, "the replica does not get ready"
            time.sleep(0.5)
        for transport in TRANSPORTS:
            publisher, version = self._next(transport)
            replicas = publisher.discover_outdated_training_replicas(version)
            arrivals = iter(self._weights.items())
            report = publisher.transport.update(
                version, self._specs, arrivals, replicas, self._probe
            )
            assert not report.failed, report.failed
        relay = rendezvous.find_endpoint(self._paths.rendezvous_dir, "control-cell-0")
        assert relay is not None
        service_key = rendezvous.read_service_key(self._paths.service_key)
        headers = {"Authorization": f"Bearer {derive_bearer_key(service_key, 'control-cell-0')}"}
        tls = make_client_tls(service_key)
        answer = httpx.get(f"{relay.url}/replicas", headers=headers, verify=tls, trust_env=False)
        return msgspec.json.decode(answer.content, type=ReplicasOfCell).replicas[0]

    def update(self, transport: str, streams: Streams) -> Update:
        publisher, version = self._next(transport)
        streams.await_piece(time.monotonic())
        replicas = publisher.discover_outdated_training_replicas(version)
        assert replicas, "the relay did not answer"
        began = time.monotonic()
        report = publisher.transport.update(
            version, self._specs, iter(self._weights.items()), replicas, self._probe
        )
        ended = time.monotonic()
        assert not report.failed, report.failed
        streams.await_piece(ended)
        return Update(
            seconds=report.seconds,
            publish_s=ended - began - report.seconds.get("group_join", 0.0),
            silence_s=streams.longest_gap_s(began, ended),
        )

    def close(self) -> None:
        """Leave the groups."""
        for publisher in self._publishers.values():
            publisher.close()


@contextmanager
def running_replica(
    run_dir: Path, weights: Mapping[str, torch.Tensor], bucket_bytes: int
) -> Iterator[Replica]:
    """A cell that serves the model in `run_dir`, with random weights at first."""
    paths = RunPaths(run_dir)
    rendezvous.ensure_service_key(paths.service_key)
    recipe = load_recipe("quickstart").model_copy(
        update={"inference": InferenceConfig(max_running_requests=STREAMS)}
    )
    paths.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    config = {
        "run_dir": str(run_dir),
        "cell": "cell-0",
        "model_path": str(paths.starting_model_dir),
        "serve_python": get_interpreter("serve", "auto"),
    }
    (run_dir / "cell.json").write_text(json.dumps(config))
    entry = ("areal_hpc.inference.job:run", str(run_dir / "cell.json"))
    with (run_dir / "cell.log").open("wb") as log_file:
        job = subprocess.Popen(
            [sys.executable, "-m", "areal_hpc.jobs.processes.process_main", *entry],
            stdout=log_file,
            stderr=log_file,
            env={**os.environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())},
        )
    replica = Replica(paths, weights, bucket_bytes)
    try:
        yield replica
    finally:
        replica.close()
        job.send_signal(signal.SIGTERM)
        job.wait(30)


def measure(replica: Replica, rounds: int) -> Mapping[str, Sequence[Update]]:
    """Measure updates by every transport in turn, under load."""
    streams = Streams(replica.warm_up())
    updates: dict[str, list[Update]] = {name: [] for name in TRANSPORTS}
    for number in range(rounds):
        for transport in TRANSPORTS if number % 2 else reversed([*TRANSPORTS]):
            updates[transport].append(replica.update(transport, streams))
    streams.stop()
    return updates
