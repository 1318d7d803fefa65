"""Networks beside the policy: frozen ones that score its tokens, and the critic.

They are divided over ranks as the policy is, and scored in like passes: one way serves a reference,
which may be the policy's own start, and a teacher of any size. On a GPU the weights of frozen ones
lie in host memory and are on the GPU while they score alone, before the step has any activations to
keep.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from areal_hpc.recipe.sections.trainer import (
    ParallelConfig,
    TrainerConfig,
    compute_learning_rate,
)
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
"""The head of transformers' classifiers and reward models of one output."""


def load_critic(
    model_dir: Path, config: TrainerConfig, device: torch.device, key: str
) -> TrainedNetwork:
    """The critic of a model directory, which the recipe names at `key`, with its weights."""
    # Its head is never that of the embedding, however the policy's is.
    arch = replace(read_architecture(model_dir), tied=False)
    parallel, dtype = (
        get_side_layout(arch, config.parallel),
        TORCH_DTYPE_BY_NAME[config.dtype],
    )
    network = build_network(arch, parallel, dtype, device, config.activations, gives_values=True)
    critic = prepare_for_training(network, config.activations)
    reader = HfModelReader(model_dir, key)
    critic.weight_map = [one for one in critic.weight_map if one.megatron != OUTPUT_LAYER_NAME]
    if reader.has_tensor(HEAD_TENSOR_NAME):  # else it begins at 0, and so do all values
        head = HfTensorSpec(HEAD_TENSOR_NAME, (1, arch.hidden))
        critic.weight_map.append(ParamMap(OUTPUT_LAYER_NAME, (head,), TpSplit.WHOLE))
    load_hf(critic, reader.read_tensor)
    return critic


CRITIC_MODEL_RECIPE_KEY = "trainer.objective.critic.model"


class CriticTrainer:
    """The critic of a run with its optimizer, at the step that the policy is at."""

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
        """Its values of the states before all trained tokens of the rows. A collective."""
        return _score_rows(self.network, rows, self._config)

    def train(
        self, rows: Sequence[TrainingRow], scores: BatchScores, step: int
    ) -> tuple[dict[str, float], list[float]]:
        """An optimizer step for each mini-batch; metrics and gradient norms. A collective."""
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
            # One that is not finite is not hidden by the others: max(1.0, nan) is 1.0.
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
    """What the critic said before the step, and how much of the returns' variance that explains.

    Over the tokens that are trained. The share is 1 of a perfect critic, 0 of one that says the
    same everywhere, below 0 of a worse one, and 0 where all returns are equal.
    """
    seen = [(row.channels, np.append(False, row.loss_mask_T[1:] != 0)) for row in rows]
    values_N, returns_N = (
        np.concatenate(
            [np.empty(0), *(channels[name][mask_T].astype(np.float64) for channels, mask_T in seen)]
        )
        for name in CRITIC_CHANNELS
    )
    if not len(values_N):
        return {"critic/mean_value": 0.0, "critic/explained_variance": 0.0}
    spread = float(returns_N.var())
    left = float((returns_N - values_N).var())
    return {
        "critic/mean_value": float(values_N.mean()),
        "critic/explained_variance": 1.0 - left / spread if spread else 0.0,
    }
