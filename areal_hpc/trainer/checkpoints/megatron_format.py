"""Weights and optimizer as Megatron's distributed checkpoint, in its `fully_reshardable` form.

Any other tp, pp, cp and dp can load it. Megatron 0.16 loses or spoils parts of AdamW's state on
the way unless Transformer Engine or Apex is installed; the mends are here and in `optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from areal_hpc.errors import ShardError
from areal_hpc.trainer.checkpoints.refusal import commit_refused
from areal_hpc.trainer.model.policy import Policy

OpenCopy = Callable[[], AbstractContextManager[BinaryIO]]
"""Opens a stream that takes what would be a rank's data file."""

DATA_SUFFIX = ".distcp"
MOMENTS = ("param", "exp_avg", "exp_avg_sq")
"""What the optimizer holds of each parameter, as Megatron names it; all float32."""


def save(policy: Policy, optimizer: Any, directory: Path, open_copy: OpenCopy) -> str:
    """Write the small files of a checkpoint into `directory`, and a rank's data to `open_copy`.

    A collective. Nothing is forced to disk. Returns the name of this rank's data file, which the
    small files (rank 0's) already refer to.

    Raises:
        ClusterError: A rank could not write its part.
    """
    strategy = _SaveApart(open_copy)
    state = _sharded_state(policy, optimizer, is_loading=False)
    try:
        dist_checkpointing.save(state, str(directory), strategy)
    except CheckpointException as error:
        raise commit_refused(directory, _first_failure(error)) from error
    return strategy.data_name


def load(policy: Policy, optimizer: Any, directory: Path) -> None:
    """Restore weights and optimizer. A collective; the layout may differ from the saved one.

    Raises:
        ShardError: The checkpoint is damaged.
    """
    state = _sharded_state(policy, optimizer, is_loading=True)
    try:
        loaded = dist_checkpointing.load(state, str(directory), TorchDistLoadShardedStrategy())
    except CheckpointException as error:
        raise ShardError(
            f"a commit cannot be read: {_first_failure(error)}",
            key=str(directory),
            hint="move it aside: the run then goes on from the commit before",
        ) from error
    policy.gpt.load_state_dict(loaded["model"])
    with _replaced(optimizer, "_set_main_param_and_optimizer_states", _keeping_step):
        optimizer.load_state_dict(loaded["optimizer"])
    _unshare_steps(optimizer)


def _first_failure(collected: CheckpointException) -> str:
    """One of the failures that PyTorch collects in what `except Exception` lets pass."""
    rank, (failure, _) = next(iter(collected.failures.items()))
    return f"{type(failure).__name__} on rank {rank}: {failure}"


def _sharded_state(policy: Policy, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        # Moments are gathered on the first data-parallel rank alone. Otherwise every rank would
        # hold those of its whole replica in host memory, a hundred gigabytes for large models.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        # The names of moments must not depend on how many optimizers the layout makes.
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {"model": policy.gpt.sharded_state_dict(metadata=metadata)}
    with _replaced(optimizer, "get_parameter_state_dp_zero", _gathering_in_place):
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


def _unshare_steps(optimizer: Any) -> None:
    """Megatron 0.16 hands one step tensor to all parameters (distrib_optimizer.py, line 825).

    AdamW counts it up in place, once per parameter: its bias correction would be wrong from the
    first step after a load, without any error.
    """
    for part in optimizer.chained_optimizers:
        for moments in part.optimizer.state.values():
            moments["step"] = moments["step"].clone()


def _gathering_in_place(part: Any, _: Any) -> Any:
    """Gather moments and master weights on the first data-parallel rank, each copied once.

    Megatron 0.16 leaves out the padding between buckets as it gathers, yet counts it later: with
    several pipeline stages a tied embedding has a bucket of its own, and all that lies behind it
    would be saved shifted. It also copies everything four times, most of the time of a commit.
    """

    def gather(
        *, empty_data: bool = False, return_on_all_ranks: bool = False, use_gloo_comm: bool = True
    ) -> dict[int, Any] | None:
        group = part.data_parallel_group_gloo
        is_kept = group.rank() == 0 or return_on_all_ranks
        state = {}
        for index, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
            ((dtype, buckets),) = ranges.items()
            sizes = [bucket.grad_data.numel() for bucket in buffer.buckets]
            whole = {name: torch.empty(sum(sizes) if is_kept else 0) for name in MOMENTS}
            if not empty_data:
                for name, kept in whole.items():
                    # Of no elements on the other ranks, as is each of its parts.
                    places = torch.split(kept, sizes) if is_kept else [kept] * len(sizes)
                    for place, size, own in zip(places, sizes, buckets, strict=True):
                        _gather_bucket(part, name, own["param_map"], place, size // group.size())
            state[index] = {dtype: whole}
        return state if is_kept else None

    return gather


def _gather_bucket(
    part: Any, name: str, ranges: dict[Any, Any], place: torch.Tensor, share: int
) -> None:
    """Bring every rank's `share` elements of a bucket to their place on the first rank."""
    group = part.data_parallel_group_gloo
    own = place if group.size() == 1 else torch.empty(share)
    for parameter, found in ranges.items():
        moments = part._get_main_param_and_optimizer_states(parameter)
        local = found["gbuf_local"]
        own[local.start : local.end].copy_(moments[name].detach())
    if group.size() > 1:
        parts = list(place.chunk(group.size())) if group.rank() == 0 else None
        dist.gather(own, parts, dist.get_global_rank(group, 0), group)


class _SaveApart(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format through PyTorch's own writer, the bulk of it going somewhere else.

    Megatron's writers, synchronous or not, spawn helper processes at every save: seconds each
    time, and children that hold the output pipe open when their parent is killed.
    """

    def __init__(self, open_copy: OpenCopy) -> None:
        super().__init__("torch_dist", 1)
        self._files = _Files(open_copy)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        writer = FileSystemWriter(checkpoint_dir, sync_files=False)
        writer.fs = self._files
        torch_checkpoint.save(  # type: ignore[attr-defined]
            mcore_to_pyt_state_dict(by_key),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def data_name(self) -> str:
        """The name under which the checkpoint expects this rank's data."""
        return self._files.data_name


class _Files(FileSystem):
    """A directory whose data file, one a rank, is a stream elsewhere."""

    def __init__(self, open_copy: OpenCopy) -> None:
        self._open_copy = open_copy
        self.data_name = ""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file of the checkpoint."""
        if not str(path).endswith(DATA_SUFFIX):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        assert not self.data_name, f"one data file a rank, got {self.data_name} and {path}"
        self.data_name = Path(path).name
        with self._open_copy() as copy:
            yield copy
