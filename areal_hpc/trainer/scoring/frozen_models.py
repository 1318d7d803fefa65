"""Frozen models of a run: which the objective needs, and what they score.

They are divided over ranks as the policy is, and scored in like passes: one way serves a reference,
which may be the policy's own start, and a teacher of any size. On a GPU their weights lie in host
memory and are on the GPU while they score alone, before the step has any activations to keep.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from areal_hpc.recipe.sections.trainer import ParallelConfig, TrainerConfig
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.training_rows import NO_SCORES, BatchScores
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.families.lora import switch_adapter_off
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf
from areal_hpc.trainer.model.memory_estimate import get_side_layout
from areal_hpc.trainer.model.policy import (
    TORCH_DTYPE_BY_NAME,
    Network,
    TrainedNetwork,
    build_network,
)
from areal_hpc.trainer.private_apis.torch_private import pin_host_memory
from areal_hpc.trainer.scoring.served_teacher import ServedTeacher
from areal_hpc.trainer.step import ScoresByRow, score_rows


@dataclass(slots=True, eq=False)
class FrozenNetwork:
    """A network without gradients, whose weights wait on the host."""

    network: Network
    _host: dict[torch.nn.Parameter, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        parameters = list(self.network.gpt.parameters())
        places = torch.empty(sum(one.numel() for one in parameters), dtype=self.network.dtype)
        if self.network.device.type == "cuda" and len(places):
            pin_host_memory(places)
        parts = places.split([one.numel() for one in parameters])
        self._host = {
            one: part.view(one.shape) for one, part in zip(parameters, parts, strict=True)
        }
        for parameter, waiting in self._host.items():
            parameter.data = waiting

    @contextmanager
    def hold_weights_on_device(self) -> Iterator[Network]:
        """The network, ready to compute."""
        for parameter, waiting in self._host.items():
            parameter.data = waiting.to(self.network.device, non_blocking=True)
        try:
            yield self.network
        finally:
            for parameter, waiting in self._host.items():
                parameter.data = waiting


def load_frozen_network(
    model_dir: Path,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    key: str,
) -> FrozenNetwork:
    """The network of a model directory, which the recipe names at `key`."""
    arch = read_architecture(model_dir)
    layout = get_side_layout(arch, parallel)
    network = build_network(arch, layout, dtype, device)
    frozen = FrozenNetwork(network)
    load_hf(network, HfModelReader(model_dir, key).read_tensor)
    return frozen


REFERENCE_KEY, TEACHER_KEY = "trainer.objective.kl.reference", "trainer.objective.teacher.path"


class FrozenModels:
    """Models that a run scores its batches with."""

    def __init__(
        self,
        config: TrainerConfig,
        model_path: Path,
        device: torch.device,
        is_stop_requested: Callable[[], bool],
    ) -> None:
        self._config, self._device = config, device
        objective = config.objective
        self._reference = self._teacher = None
        self._served_teacher: ServedTeacher | None = None
        if objective.kl.coef and not config.reference_is_base:
            initial = objective.kl.reference == "initial"
            reference = model_path if initial else Path(objective.kl.reference)
            self._reference = self._load(reference, REFERENCE_KEY)
        if objective.teacher.path is not None:
            self._teacher = self._load(objective.teacher.path, TEACHER_KEY)
        if objective.teacher.url is not None:
            self._served_teacher = ServedTeacher(objective.teacher, model_path, is_stop_requested)

    @property
    def are_needed(self) -> bool:
        objective = self._config.objective
        return objective.kl.coef > 0 or objective.teacher.coef > 0

    def score(self, policy: TrainedNetwork, step: int, rows: Sequence[TrainingRow]) -> BatchScores:
        """What the objective has to know of the rows that lead to `step`. A collective.

        Raises as `ServedTeacher.score` does.
        """
        if not rows:
            return NO_SCORES
        start = (
            self._score(policy, rows) if self._config.objective.advantages_need_logprobs else None
        )
        return BatchScores(
            start,
            self._score_reference(policy, rows),
            self._score_frozen(self._teacher, rows)
            if self._served_teacher is None
            else self._served_teacher.score(step, rows),
        )

    def build_metrics(self, sums: Mapping[str, float], scores: BatchScores) -> dict[str, float]:
        """How far the policy is from them: what the passes of a step added up, and its scores."""
        tokens, found = max(1.0, sums["tokens"]), {}
        if self._config.objective.kl.coef:
            found["kl/reference"] = sums["reference"] / tokens
        if self._config.objective.teacher.coef:
            gaps = scores.teacher_minus_policy_logprobs or []
            found["kl/teacher"] = -sum(float(gap_T.sum(dtype=float)) for gap_T in gaps) / tokens
        return found

    def close(self) -> None:
        if self._served_teacher is not None:
            self._served_teacher.close()

    def _load(self, model_dir: Path, key: str) -> FrozenNetwork:
        config = self._config
        dtype = TORCH_DTYPE_BY_NAME[config.dtype]
        return load_frozen_network(model_dir, config.parallel, dtype, self._device, key)

    def _score_reference(
        self, policy: TrainedNetwork, rows: Sequence[TrainingRow]
    ) -> ScoresByRow | None:
        if self._config.objective.kl.coef and self._config.reference_is_base:
            with switch_adapter_off(policy.gpt):
                return self._score(policy, rows)
        return self._score_frozen(self._reference, rows)

    def _score_frozen(
        self, frozen: FrozenNetwork | None, rows: Sequence[TrainingRow]
    ) -> ScoresByRow | None:
        if frozen is None:
            return None
        with frozen.hold_weights_on_device() as network:
            return self._score(network, rows)

    def _score(self, network: Network, rows: Sequence[TrainingRow]) -> ScoresByRow:
        config = self._config
        return score_rows(
            network,
            rows,
            minibatch_count=config.minibatches,
            max_tokens=config.max_tokens_per_microbatch,
        )
