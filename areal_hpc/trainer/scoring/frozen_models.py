"""Frozen models of a run: which the objective needs, what they score, how a reference follows.

They are divided over ranks as the policy is, and scored in like passes: one way serves a reference,
which may be the policy's own start, and a teacher of any size. On a GPU their weights lie in host
memory and are on the GPU while they score alone, before the step has any activations to keep.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import HeadDtype, ParallelConfig, TrainerConfig
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.training_rows import NO_SCORES, BatchScores
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf, save_hf_model
from areal_hpc.trainer.model.memory_estimate import drop_ep_for_dense_network
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

    def copy_weights_from(self, policy: TrainedNetwork) -> None:
        held = dict(policy.gpt.named_parameters())
        for name, parameter in self.network.gpt.named_parameters():
            self._host[parameter].copy_(held[name].data)


def load_frozen_network(
    model_dir: Path,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    key: str,
    head_dtype: HeadDtype = "mixed",
) -> FrozenNetwork:
    """The network of a model directory, which the recipe names at `key`."""
    arch = read_architecture(model_dir)
    layout = drop_ep_for_dense_network(arch, parallel)
    network = build_network(arch, layout, dtype, device, head_dtype=head_dtype)
    frozen = FrozenNetwork(network)
    load_hf(network, HfModelReader(model_dir, key).read_tensor)
    return frozen


REFERENCE_KEY, TEACHER_KEY = "trainer.objective.kl.reference", "trainer.objective.teacher.path"


class FrozenModels:
    """Models that a run scores its batches with.

    With `kl.update_every_steps` the reference is the policy of the last step that they divide: its
    weights are kept in the run directory too, where a run that resumes finds them.
    """

    def __init__(
        self,
        config: TrainerConfig,
        paths: RunPaths,
        model_path: Path,
        device: torch.device,
        step: int,
        check_generation: Callable[[], None],
        is_stop_requested: Callable[[], bool],
    ) -> None:
        self._config, self._paths, self._model_path = config, paths, model_path
        self._device, self._check_generation = device, check_generation
        objective = config.objective
        self._reference = self._teacher = None
        self._served_teacher: ServedTeacher | None = None
        if objective.kl.coef:
            self._reference = self._load(self._find_reference(step), REFERENCE_KEY)
        if objective.teacher.path is not None:
            self._teacher = self._load(objective.teacher.path, TEACHER_KEY)
        if objective.teacher.url is not None:
            self._served_teacher = ServedTeacher(objective.teacher, model_path, is_stop_requested)

    @property
    def are_needed(self) -> bool:
        return self._reference is not None or self._config.objective.teacher.coef > 0

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
            self._score_frozen(self._reference, rows),
            self._score_frozen(self._teacher, rows)
            if self._served_teacher is None
            else self._served_teacher.score(step, rows),
        )

    def build_metrics(self, sums: Mapping[str, float], scores: BatchScores) -> dict[str, float]:
        """How far the policy is from them: what the passes of a step added up, and its scores."""
        tokens, found = max(1.0, sums["tokens"]), {}
        if self._reference is not None:
            found["kl/reference"] = sums["reference"] / tokens
        if self._config.objective.teacher.coef:
            gaps = scores.teacher_minus_policy_logprobs or []
            found["kl/teacher"] = -sum(float(gap_T.sum(dtype=float)) for gap_T in gaps) / tokens
        return found

    def update_and_save_reference_if_due(self, policy: TrainedNetwork, step: int) -> None:
        """Let the policy of this step be the reference, if it is time. A collective."""
        every = self._config.objective.kl.update_every_steps
        if self._reference is None or not every or step % every:
            return
        self._reference.copy_weights_from(policy)
        if dist.get_rank() == 0:
            self._check_generation()
        save_hf_model(policy, self._model_path, self._paths.reference(step))
        if dist.get_rank() == 0:
            self._delete_outdated(every)

    def close(self) -> None:
        if self._served_teacher is not None:
            self._served_teacher.close()

    def _find_reference(self, step: int) -> Path:
        kl = self._config.objective.kl
        taken = step - step % kl.update_every_steps if kl.update_every_steps else 0
        if kl.reference != "initial" or not taken:
            return self._model_path if kl.reference == "initial" else kl.reference
        found = self._paths.reference(taken)
        if not found.is_dir():
            raise RecipeError(
                f"at step {step} the reference is the policy of step {taken}, but there is no "
                f"{found}",
                key="trainer.objective.kl.update_every_steps",
                hint="leave it as the run had it until then, or start over with --fresh",
            )
        return found

    def _load(self, model_dir: Path, key: str) -> FrozenNetwork:
        config = self._config
        dtype = TORCH_DTYPE_BY_NAME[config.dtype]
        return load_frozen_network(
            model_dir, config.parallel, dtype, self._device, key, config.head_dtype
        )

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

    def _delete_outdated(self, every: int) -> None:
        steps = [one.state.step for one in list_checkpoints(self._paths.checkpoints_dir)]
        oldest = min(steps, default=0)
        for folder in self._paths.references_dir.iterdir():
            if folder.name >= format_step_dir(oldest - oldest % every):
                continue
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(folder)
