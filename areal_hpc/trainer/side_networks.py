"""Networks beside the policy: frozen ones that score its tokens (reference, teacher), the critic.

They are divided over ranks and scored as the policy is. This serves a reference, which may be the
policy's own start, and a teacher of any size. On a GPU the weights of frozen networks lie in host
memory, and are on the GPU only while the network scores, before the step has any activations.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from areal_hpc.recipe.sections.trainer import ParallelConfig, TrainerConfig, compute_learning_rate
from areal_hpc.trainer.batch.packing import (
    CRITIC_CHANNELS,
    Channel,
    TrainingRow,
    count_scored_tokens,
    split_minibatches,
)
from areal_hpc.trainer.batch.training_rows import NO_SCORES, BatchScores
from areal_hpc.trainer.checkpoints.rank_state import NetworkWithOptimizer
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.families.lora import switch_adapter_off
from areal_hpc.trainer.model.families.weight_map import (
    OUTPUT_LAYER_NAME,
    HfTensorSpec,
    ParamMap,
    TpSplit,
)
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf
from areal_hpc.trainer.model.parameter_counts import get_side_layout
from areal_hpc.trainer.model.policy import (
    TORCH_DTYPE_BY_NAME,
    Network,
    TrainedNetwork,
    build_network,
    prepare_for_training,
)
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.objective.policy_loss import (
    VALUE_SUM_NAMES,
    compute_minibatch_factors,
    compute_value_loss,
)
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.trainer.private_apis.torch_private import pin_host_memory
from areal_hpc.trainer.served_teacher import ServedTeacher
from areal_hpc.trainer.step import (
    MicroBatch,
    ScoresByRow,
    apply_gradients,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    score_rows,
)


def _score_rows(
    network: Network, rows: Sequence[TrainingRow], config: TrainerConfig
) -> ScoresByRow:
    return score_rows(
        network,
        rows,
        minibatch_count=config.minibatches,
        max_tokens=config.max_tokens_per_microbatch,
    )


@dataclass(slots=True, eq=False)
class FrozenNetwork:
    """Network without gradients, whose weights are in host memory between uses."""

    network: Network
    _host: dict[torch.nn.Parameter, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        parameters = list(self.network.gpt.parameters())
        host = torch.empty(sum(weight.numel() for weight in parameters), dtype=self.network.dtype)
        if self.network.device.type == "cuda" and len(host):
            pin_host_memory(host)
        parts = host.split([weight.numel() for weight in parameters])
        self._host = {
            weight: part.view(weight.shape) for weight, part in zip(parameters, parts, strict=True)
        }
        for parameter, host_weight in self._host.items():
            parameter.data = host_weight

    @contextmanager
    def hold_weights_on_device(self) -> Iterator[Network]:
        for parameter, host_weight in self._host.items():
            parameter.data = host_weight.to(self.network.device, non_blocking=True)
        try:
            yield self.network
        finally:
            for parameter, host_weight in self._host.items():
                parameter.data = host_weight


def load_frozen_network(
    model_dir: Path,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    key: str,
) -> FrozenNetwork:
    """Load the network of a model directory, which the recipe names at `key`."""
    arch = read_architecture(model_dir)
    layout = get_side_layout(arch, parallel)
    network = build_network(arch, layout, dtype, device)
    frozen = FrozenNetwork(network)
    load_hf(network, HfModelReader(model_dir, key).read_tensor)
    return frozen


REFERENCE_KEY, TEACHER_KEY = "trainer.objective.kl.reference", "trainer.objective.teacher.path"


class FrozenModels:
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
        """Score the rows that lead to `step` with all networks that the objective needs.

        A collective. Raises as `ServedTeacher.score` does.
        """
        if not rows:
            return NO_SCORES
        start = (
            _score_rows(policy, rows, self._config)
            if self._config.objective.advantages_need_logprobs
            else None
        )
        return BatchScores(
            start,
            self._score_reference(policy, rows),
            self._score_frozen(self._teacher, rows)
            if self._served_teacher is None
            else self._served_teacher.score(step, rows),
        )

    def build_metrics(self, sums: Mapping[str, float], scores: BatchScores) -> dict[str, float]:
        """Return the policy's divergences from them, of the step's sums and of the scores."""
        tokens, metrics = max(1.0, sums["tokens"]), {}
        if self._config.objective.kl.coef:
            metrics["kl/reference"] = sums["reference"] / tokens
        if self._config.objective.teacher.coef:
            gaps = scores.teacher_minus_policy_logprobs or []
            metrics["kl/teacher"] = -sum(float(gap_T.sum(dtype=float)) for gap_T in gaps) / tokens
        return metrics

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
                return _score_rows(policy, rows, self._config)
        return self._score_frozen(self._reference, rows)

    def _score_frozen(
        self, frozen: FrozenNetwork | None, rows: Sequence[TrainingRow]
    ) -> ScoresByRow | None:
        if frozen is None:
            return None
        with frozen.hold_weights_on_device() as network:
            return _score_rows(network, rows, self._config)


HEAD_TENSOR_NAME = "score.weight"
"""Name of the head in transformers' classifiers and reward models with one output."""


def load_critic(
    model_dir: Path, config: TrainerConfig, device: torch.device, key: str
) -> TrainedNetwork:
    """Load the critic of a model directory, which the recipe names at `key`."""
    # Its head is never tied to the embedding, even if the policy's is.
    arch = replace(read_architecture(model_dir), tied=False)
    parallel, dtype = (
        get_side_layout(arch, config.parallel),
        TORCH_DTYPE_BY_NAME[config.dtype],
    )
    network = build_network(arch, parallel, dtype, device, config.activations, gives_values=True)
    critic = prepare_for_training(network, config.activations)
    reader = HfModelReader(model_dir, key)
    critic.weight_map = [item for item in critic.weight_map if item.megatron != OUTPUT_LAYER_NAME]
    if HEAD_TENSOR_NAME in reader.list_tensor_names():  # else it and all values start at 0
        head = HfTensorSpec(HEAD_TENSOR_NAME, (1, arch.hidden))
        critic.weight_map.append(ParamMap(OUTPUT_LAYER_NAME, (head,), TpSplit.WHOLE))
    load_hf(critic, reader.read_tensor)
    return critic


CRITIC_MODEL_RECIPE_KEY = "trainer.objective.critic.model"


class CriticTrainer:
    """Critic of a run with its optimizer, at the same step as the policy."""

    def __init__(self, config: TrainerConfig, model_path: Path, device: torch.device) -> None:
        self._config = config
        self._keys = config.objective.critic
        folder = self._keys.model if isinstance(self._keys.model, Path) else model_path
        self.network = load_critic(folder, config, device, CRITIC_MODEL_RECIPE_KEY)
        self._adam = config.optimizer.model_copy(update={"lr": self._keys.lr})
        self._optimizer = build_optimizer(
            self.network, self._adam, is_offloaded=config.offload.optimizer
        )

    @property
    def state(self) -> NetworkWithOptimizer:
        return self.network, self._optimizer

    def is_warming_up(self, batches: int) -> bool:
        return batches < self._keys.warmup_steps

    def score(self, rows: Sequence[TrainingRow]) -> ScoresByRow:
        """Return its values of the states before all trained tokens of the rows. A collective."""
        return _score_rows(self.network, rows, self._config)

    def train(
        self, rows: Sequence[TrainingRow], scores: BatchScores, step: int
    ) -> tuple[dict[str, float], list[float]]:
        """Take an optimizer step per minibatch; return metrics and gradient norms. A collective."""
        rate = compute_learning_rate(step, self._config.total_steps, self._adam)
        stats, norms = LossStats(), []
        parts = split_minibatches(rows, self._config.minibatches)
        factors = compute_minibatch_factors([count_scored_tokens(part) for part in parts])
        for part, factor in zip(parts, factors, strict=True):
            batches = make_micro_batches_of_this_rank(
                self.network, part, CRITIC_CHANNELS, self._config.max_tokens_per_microbatch
            )
            loss = partial(self._compute_loss, factor=factor)
            stats.add(run_forward_backward(self.network, batches, loss, backward=True))
            norms.append(apply_gradients(self._optimizer, rate))
        sums = stats.reduce_over_ranks(VALUE_SUM_NAMES, ()).sums
        tokens = max(1.0, sums["tokens"])
        return {
            "critic/loss": sums["value_loss"] / tokens,
            "critic/clip_fraction": sums["value_clipped"] / tokens,
            # A norm that is not finite stays visible: max(1.0, nan) would be 1.0.
            "critic/grad_norm": max(norms, default=0.0) if np.isfinite(norms).all() else math.nan,
            "critic/lr": rate,
            **measure_values(rows),
        }, norms

    def _compute_loss(
        self, batch: MicroBatch, values_N: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, LossStats]:
        total, sums = compute_value_loss(
            values_N,
            batch.channels_N[Channel.VALUE],
            batch.channels_N[Channel.RETURN],
            self._keys.clip_value,
        )
        return total * factor, LossStats(sums)


def measure_values(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Return the mean of the critic's values, and the share of the returns' variance they explain.

    Only trained tokens count. The share is 1 for a perfect critic, 0 for a constant one, negative
    for a worse one, and 0 if all returns are equal.
    """
    kept = [(row.channels, np.append(False, row.loss_mask_T[1:] != 0)) for row in rows]
    values_N, returns_N = (
        np.concatenate(
            [
                np.empty(0),
                *(channels[name][mask_T].astype(np.float64) for channels, mask_T in kept),
            ]
        )
        for name in CRITIC_CHANNELS
    )
    if not len(values_N):
        return {"critic/mean_value": 0.0, "critic/explained_variance": 0.0}
    spread = float(returns_N.var())
    residual = float((returns_N - values_N).var())
    return {
        "critic/mean_value": float(values_N.mean()),
        "critic/explained_variance": 1.0 - residual / spread if spread else 0.0,
    }
