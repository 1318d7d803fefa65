"""Trainer's end of weight updates, and checks of their results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors.torch import save_file

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.publisher import Publisher, make_transport
from areal_hpc.weights.replicas import ReplicaKey
from areal_hpc.weights.update import Probe, UpdateReport, choose_probe_ids
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.deadlines import Deadline
from tests.support.service_keys import SERVICE_KEY

if TYPE_CHECKING:  # its import takes senders and relays two of three seconds
    from transformers import PreTrainedModel

AWAIT_S = 20.0
WITHOUT_MODEL = Probe([3, 4, 5], [0.0, 0.0])
"""Probe of replicas that have no model: they make up weights and log-probabilities."""
SCORE_WITHOUT_MODEL = {
    "meta_info": {"input_token_logprobs": [[None, 3, None], *[[0.0, 4, None]] * 2]}
}


def probe_of(model: PreTrainedModel) -> Probe:
    """The fixed prompt as transformers scores it."""
    ids = choose_probe_ids(model.config.vocab_size)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return Probe(ids, logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())


def save_update(model: PreTrainedModel, path: Path) -> None:
    """Write a model's weights and its probe for a sender in another process."""
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    path.with_suffix(".probe").write_bytes(msgspec.json.encode(probe_of(model)))


def read_probe(path: Path) -> Probe:
    probe = path.with_suffix(".probe")
    return msgspec.json.decode(probe.read_bytes(), type=Probe) if probe.exists() else WITHOUT_MODEL


def specs_of(weights: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in weights.items()
    ]


@contextmanager
def publishing(
    rendezvous_dir: Path,
    service_key: str = SERVICE_KEY,
    *,
    cells: int = 1,
    weights_dir: Path | None = None,
    backend: str = "gloo",
    **weights: Any,
) -> Iterator[Publisher]:
    """A publisher to the cells whose control proxies are published in a folder."""
    transport = make_transport(
        WeightsConfig(**weights),
        service_key,
        backend,
        torch.device("cpu"),
        weights_dir or rendezvous_dir.parent / "weights",
    )
    publisher = Publisher(transport, rendezvous_dir, cells, service_key)
    try:
        yield publisher
    finally:
        publisher.close()


def await_outdated(
    publisher: Publisher, version: WeightVersion, at_least: int = 1
) -> list[ReplicaKey]:
    """The replicas that lack the version; a control proxy that was slow once is asked again."""
    deadline = Deadline(AWAIT_S)
    while len(replicas := publisher.discover_outdated_training_replicas(version)) < at_least:
        if deadline.is_over():
            break
        time.sleep(0.05)
    return replicas


def publish(
    publisher: Publisher,
    version: WeightVersion,
    weights: Mapping[str, torch.Tensor],
    at_least: int = 1,
    probe: Probe = WITHOUT_MODEL,
) -> UpdateReport:
    """Publish one update to all replicas that lack the version."""
    replicas = await_outdated(publisher, version, at_least)
    return publisher.transport.update(
        version, specs_of(weights), iter(weights.items()), replicas, probe
    )


def raise_if_failed(report: UpdateReport) -> None:
    for error in report.failed.values():
        raise WeightSyncError(error)
