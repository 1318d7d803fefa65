"""New weights to many replicas: the face that the trainer's first rank sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.rundir.rendezvous import EVALUATION_CELL
from areal_hpc.weights.buckets.plan import TensorSpec, plan_buckets
from areal_hpc.weights.discovery import DiscoveredReplicas, ReplicaDiscovery
from areal_hpc.weights.report import ReplicaKey, UpdateReport
from areal_hpc.weights.transports.broadcast import BroadcastTransport
from areal_hpc.weights.transports.disk import DiskTransport
from areal_hpc.weights.transports.transport import Transport, UpdateOrder
from areal_hpc.wire.replicas import UpdatePause
from areal_hpc.wire.weight_version import WeightVersion


def find_outdated(replicas: DiscoveredReplicas, version: WeightVersion) -> list[ReplicaKey]:
    """The replicas that are up and do not serve `version`. Pure."""
    return [
        key
        for key, view in replicas
        if view.state == "ready" or (view.state == "serving" and view.version != str(version))
    ]


class Publisher:
    """Finds replicas that lack the current weights and sends them.

    Args:
        rendezvous_dir: Where the cells' control proxies are published.
        cells: How many cells the run has, that of evaluation not counted.
        backend: `gloo` reaches replicas on CPUs, `nccl` replicas on GPUs.
        device: Where buckets are packed; must suit the backend.
        weights_dir: Where `weights.transport=disk` writes; on storage that the cells see.
        evaluation_cell: The run has one.
    """

    def __init__(
        self,
        config: WeightsConfig,
        rendezvous_dir: Path,
        cells: int,
        admin_key: str,
        backend: str,
        device: torch.device,
        weights_dir: Path,
        *,
        evaluation_cell: bool = False,
    ) -> None:
        self._bucket_bytes = config.bucket_bytes
        self._discovery = ReplicaDiscovery(
            rendezvous_dir, cells, admin_key, evaluation_cell=evaluation_cell
        )
        self._transport: Transport[Any] = (
            DiskTransport(config, admin_key, device, weights_dir)
            if config.transport == "disk"
            else BroadcastTransport(config, admin_key, device, backend)
        )
        # The specs of all updates are the same.
        self._plan_buckets = lru_cache(maxsize=1)(plan_buckets)
        self.pauses: list[UpdatePause] = []
        """What the last update of each replica cost, as known when `outdated` was last asked."""
        self.evaluation_replicas: DiscoveredReplicas = []
        """Those of the evaluation cell as they were then; none when it did not answer."""

    def outdated(self, version: WeightVersion) -> list[ReplicaKey]:
        """Replicas of training that are up and do not serve `version`.

        Unreachable cells are left out, and so is that of evaluation: `evaluation_replicas` has it.
        """
        replicas = self._discovery.discover()
        self.evaluation_replicas = [one for one in replicas if one[0].cell == EVALUATION_CELL]
        training = [one for one in replicas if one[0].cell != EVALUATION_CELL]
        self.pauses = [view.pause for _, view in training if view.pause is not None]
        return find_outdated(training, version)

    def publish(
        self,
        version: WeightVersion,
        specs: Sequence[TensorSpec],
        parameters: Iterable[tuple[str, torch.Tensor]],
        replicas: Sequence[ReplicaKey],
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
            replicas: As `outdated` named them.

        Raises:
            WeightSyncError: The parameters are not what the specs promised. What goes wrong
                at replicas is in the report instead.
        """
        arrivals = iter(parameters)
        try:
            buckets = self._plan_buckets(tuple(specs), self._bucket_bytes)
            return self._transport.update(UpdateOrder(version, buckets, arrivals, replicas))
        finally:
            for _ in arrivals:
                pass

    def close(self) -> None:
        """Leave all replicas. They go on serving what they have."""
        self._transport.close()
        self._discovery.close()
