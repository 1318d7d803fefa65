"""Commits: everything a restarted trainer needs, in one directory that appears whole.

`step_00000040/` holds Megatron's distributed checkpoint in its `fully_reshardable` form (any
other tp, pp, cp and dp can load it), `trainer.json`, and `COMMITTED`, written last. The
directory is built under a hidden name and renamed when all of it is on disk.

Random state needs no file: nothing draws random numbers but the order of data, which is a
function of `seed` and `step`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from areal_hpc.layout import step_name
from areal_hpc.trainer.huggingface import sync_path, sync_tree
from areal_hpc.trainer.metrics import Line
from areal_hpc.trainer.model import Policy
from areal_hpc.weights.version import Fork

MARKER = "COMMITTED"
STATE_FILE = "trainer.json"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a commit stands in the run's history."""

    step: int
    """Optimizer batches behind these weights."""
    epoch: int
    """The start of the trainer that made the commit."""
    seed: int
    """Of everything random; with `step` it fixes what comes next."""
    parent: str | None = None
    """The commit this one was trained from."""
    consumed: list[int] = []
    """Steps of the manifests trained on, from the first."""
    forks: list[Fork] = []
    """Every epoch of this chain of commits, with the step it began from."""
    line: Line = {}
    """The metrics of this step as far as they were known: its line is written after the commit."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A complete commit on disk."""

    path: Path
    state: TrainerState


class CommitStore:
    """The commits of one training stage.

    Args:
        directory: Holds one folder per commit.
        keep: Complete commits kept; older ones are deleted.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def complete(self) -> list[Commit]:
        """Every complete commit, oldest first; a later epoch's come after an earlier one's.

        A trainer that was replaced may still commit a higher step. It sorts before the commits
        of its successor, so the newest epoch's chain is the one that is followed.
        """
        if not self._directory.is_dir():
            return []
        commits = [
            Commit(path, msgspec.json.decode((path / STATE_FILE).read_bytes(), type=TrainerState))
            for path in self._directory.iterdir()
            if re.fullmatch(r"step_\d+", path.name) and (path / MARKER).exists()
        ]
        return sorted(commits, key=lambda commit: (commit.state.epoch, commit.state.step))

    def latest(self) -> Commit | None:
        """The commit to resume from."""
        commits = self.complete()
        return commits[-1] if commits else None

    def clean(self) -> None:
        """Delete what interrupted commits left behind. For rank 0, before the first commit."""
        if self._directory.is_dir():
            for path in self._directory.glob(".step_*"):
                shutil.rmtree(path)

    def commit(self, policy: Policy, optimizer: Any, state: TrainerState) -> Path:
        """Write a commit. A collective; returns when it is visible and durable."""
        target = self._directory / step_name(state.step)
        partial = self._directory / f".{target.name}.epoch_{state.epoch}"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(
            _sharded_state(policy, optimizer, is_loading=False),
            str(partial),
            _InProcessSave("torch_dist", 1),
        )
        if dist.get_rank() == 0:
            (partial / STATE_FILE).write_bytes(msgspec.json.encode(state))
            sync_tree(partial)
            (partial / MARKER).touch()
            sync_path(partial / MARKER)
            sync_path(partial)
            self._put_in_place(partial, target)
        dist.barrier()
        return target

    def _put_in_place(self, partial: Path, target: Path) -> None:
        if target.exists():  # of an abandoned epoch
            replaced = target.with_name(f".{target.name}.replaced")
            target.rename(replaced)
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)
        sync_path(self._directory)
        for old in self.complete()[: -self._keep]:
            # Hidden first: a half-deleted commit must not look complete.
            doomed = old.path.with_name(f".{old.path.name}.old")
            old.path.rename(doomed)
            shutil.rmtree(doomed)


def load_commit(policy: Policy, optimizer: Any, commit: Commit) -> None:
    """Restore weights and optimizer. A collective; the layout may differ from the saved one."""
    loaded = dist_checkpointing.load(
        _sharded_state(policy, optimizer, is_loading=True),
        str(commit.path),
        TorchDistLoadShardedStrategy(),
    )
    policy.gpt.load_state_dict(loaded["model"])
    with _replaced(optimizer, "_set_main_param_and_optimizer_states", _keeping_step):
        optimizer.load_state_dict(loaded["optimizer"])
    for part in optimizer.chained_optimizers:
        for moments in part.optimizer.state.values():
            # Megatron hands one step tensor to all parameters; AdamW counts it up in place, once
            # per parameter, and its bias correction would be wrong from here on.
            moments["step"] = moments["step"].clone()


def _sharded_state(policy: Policy, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {"model": policy.gpt.sharded_state_dict(metadata=metadata)}
    with _replaced(optimizer, "get_parameter_state_dp_zero", _keeping_bucket_padding):
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
    return state


@contextmanager
def _replaced(optimizer: Any, name: str, wrap: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Each part's method `name` replaced by `wrap(part, method)` for the time of the block."""
    for part in optimizer.chained_optimizers:
        setattr(part, name, wrap(part, getattr(part, name)))
    try:
        yield
    finally:
        for part in optimizer.chained_optimizers:
            delattr(part, name)


def _keeping_step(part: Any, load: Any) -> Any:
    """Megatron 0.16 copies every moment of torch's AdamW but has no step count to copy."""

    def load_with_step(parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][place]
        load(parameter, {**tensors, "step": part.optimizer.state[main]["step"]})

    return load_with_step


def _keeping_bucket_padding(part: Any, gather: Any) -> Any:
    """Megatron 0.16 gathers moments without the padding between buckets, yet counts it later.

    A tied embedding has a bucket of its own when there are several pipeline stages: every moment
    and master weight behind it would be saved shifted.
    """

    def gather_padded(**arguments: Any) -> Any:
        state = gather(**arguments)
        for index, buffer in enumerate(part.buffers):
            for moments in state[index].values():
                for name in ("param", "exp_avg", "exp_avg_sq"):
                    moments[name] = _pad_buckets(moments[name], buffer.buckets)
        return state

    return gather_padded


def _pad_buckets(unpadded: torch.Tensor, buckets: Sequence[Any]) -> torch.Tensor:
    parts = unpadded.split([bucket.numel_unpadded for bucket in buckets])  # type: ignore[no-untyped-call]
    return torch.cat(
        [
            torch.nn.functional.pad(part, (0, bucket.grad_data.numel() - len(part)))
            for part, bucket in zip(parts, buckets, strict=True)
        ]
    )


class _InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format through PyTorch's own writer.

    Megatron's writer spawns a helper process at every save: seconds each time, and a child that
    holds the output pipe open when its parent is killed.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.save(  # type: ignore[attr-defined]
            mcore_to_pyt_state_dict(by_key),
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
