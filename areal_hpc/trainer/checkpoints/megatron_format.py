"""Megatron distributed checkpoint of weights and optimizer, which any other layout can load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from areal_hpc.errors import ShardError
from areal_hpc.rundir.checkpoints import build_checkpoint_write_error
from areal_hpc.trainer.megatron_private import (
    build_sharded_state,
    load_optimizer_state,
    to_torch_state,
)
from areal_hpc.trainer.model.policy import Policy

OpenCopy = Callable[[], AbstractContextManager[BinaryIO]]
"""Opens a stream that takes what would be a rank's data file."""

DATA_SUFFIX = ".distcp"


def save_sharded(policy: Policy, optimizer: Any, directory: Path, open_copy: OpenCopy) -> str:
    """Write the small files of a checkpoint into `directory`, and a rank's data to `open_copy`.

    A collective. Nothing is forced to disk. Returns the name of this rank's data file, which the
    small files (rank 0's) already refer to.

    Raises:
        ClusterError: A rank could not write its part.
    """
    files = _StreamedFileSystem(open_copy)
    state = build_sharded_state(policy.gpt, optimizer, is_loading=False)
    try:
        dist_checkpointing.save(state, str(directory), _StreamedSaveStrategy(files))
    except CheckpointException as error:
        raise build_checkpoint_write_error(directory, _describe_first_failure(error)) from error
    return files.data_name


def load_sharded(policy: Policy, optimizer: Any, directory: Path) -> None:
    """Restore weights and optimizer. A collective; the layout may differ from the saved one.

    Raises:
        ShardError: The checkpoint is damaged.
    """
    state = build_sharded_state(policy.gpt, optimizer, is_loading=True)
    try:
        loaded = dist_checkpointing.load(state, str(directory), TorchDistLoadShardedStrategy())
    except CheckpointException as error:
        raise ShardError(
            f"a checkpoint cannot be read: {_describe_first_failure(error)}",
            key=str(directory),
            hint="move it aside: the run then goes on from the checkpoint before",
        ) from error
    policy.gpt.load_state_dict(loaded["model"])
    load_optimizer_state(optimizer, loaded["optimizer"])


def _describe_first_failure(collected: CheckpointException) -> str:
    """One of the failures that PyTorch collects, in an exception that is no `Exception`."""
    rank, (failure, _) = next(iter(collected.failures.items()))
    return f"{type(failure).__name__} on rank {rank}: {failure}"


class _StreamedSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format through PyTorch's own writer, the bulk of it going somewhere else.

    Megatron's writers, synchronous or not, spawn helper processes at every save: seconds each
    time, and children that hold the output pipe open when their parent is killed.
    """

    def __init__(self, files: _StreamedFileSystem) -> None:
        super().__init__("torch_dist", 1)
        self._files = files

    def save(self, sharded_state_dict: Any, checkpoint_dir: str) -> None:
        writer = FileSystemWriter(checkpoint_dir, sync_files=False)
        writer.fs = self._files
        torch_checkpoint.save(  # type: ignore[attr-defined]
            to_torch_state(sharded_state_dict),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class _StreamedFileSystem(FileSystem):
    """A directory whose data file, one a rank, is a stream elsewhere."""

    def __init__(self, open_copy: OpenCopy) -> None:
        self._open_copy = open_copy
        self.data_name = ""
        """The name under which the checkpoint expects this rank's data."""

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
