"""One rank's end of updates: from parameters to the replicas that it sends to."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.plan import TensorSpec, get_bucket_bytes, plan_buckets
from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.probe import Probe
from areal_hpc.weights.transports.broadcast import BroadcastTransport
from areal_hpc.weights.transports.disk import DiskTransport
from areal_hpc.weights.transports.transport import Transport, UpdateReport, UpdateRequest
from areal_hpc.wire.weight_version import WeightVersion


class WeightSender:
    """Sends versions of the weights to the replicas that it is told.

    Args:
        backend: `gloo` reaches replicas on CPUs, `nccl` replicas on GPUs.
        device: Where buckets are packed; must suit the backend.
        weights_dir: Where `weights.transport=disk` writes; on storage that the cells see.
    """

    def __init__(
        self,
        config: WeightsConfig,
        service_key: str,
        backend: str,
        device: torch.device,
        weights_dir: Path,
    ) -> None:
        self._bucket_bytes = get_bucket_bytes(config.bucket_bytes, device.type)
        self._transport: Transport[Any] = (
            DiskTransport(config, service_key, device, weights_dir)
            if config.transport == "disk"
            else BroadcastTransport(config, service_key, device, backend)
        )
        # The specs of all updates are the same.
        self._plan_buckets = lru_cache(maxsize=1)(plan_buckets)

    def update_replicas(
        self,
        version: WeightVersion,
        specs: Sequence[TensorSpec],
        parameters: Iterable[tuple[str, torch.Tensor]],
        replicas: Sequence[ReplicaKey],
        probe: Probe,
    ) -> UpdateReport:
        """Send `version` to `replicas`, verify it there and put them into service.

        Generations in progress stop and go on under the new weights. A replica that fails
        takes only its own group out of service; the rest proceeds.

        Args:
            version: What tokens sampled from now on carry.
            specs: All parameters in Hugging Face naming, in the order of `parameters`, in the
                dtype that the replicas serve. A tied output embedding is left out.
            parameters: Consumed exactly once and to its end, whatever fails: exporting is a
                collective on all trainer ranks.
            replicas: As `Publisher.discover_outdated_training_replicas` named them.
            probe: What they must say under these weights.
        """
        arrivals = iter(parameters)
        try:
            buckets = self._plan_buckets(tuple(specs), self._bucket_bytes)
            return self._transport.update(
                UpdateRequest(version, buckets, arrivals, replicas, probe)
            )
        finally:
            for _ in arrivals:
                pass

    def close(self) -> None:
        self._transport.close()
