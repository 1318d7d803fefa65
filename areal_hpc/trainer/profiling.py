"""Traces of chosen steps on chosen ranks: `trainer.profile`."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from areal_hpc.recipe.sections.trainer import ProfileConfig
from areal_hpc.rundir.files import make_folder
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.private_apis.torch_private import (
    dump_gpu_memory_snapshot,
    record_gpu_memory_history,
)

logger = logging.getLogger(__name__)


@contextmanager
def trace_step(
    config: ProfileConfig | None, paths: RunPaths, step: int, device: torch.device
) -> Iterator[None]:
    """Trace the block if the recipe names the step and this rank, also if the block fails.

    Storage that takes no file costs the trace, not the step.
    """
    rank = dist.get_rank()
    if config is None or step not in config.steps or rank not in config.ranks:
        yield
        return
    profile = torch.profiler.profile(with_stack=True)
    writers: dict[str, Callable[[str], object]] = {
        f"trainer-{rank}.trace.json.gz": profile.export_chrome_trace
    }
    if config.memory and device.type == "cuda":
        record_gpu_memory_history("all")
        writers[f"trainer-{rank}.memory.pickle"] = dump_gpu_memory_snapshot
    try:
        with profile:
            yield
    finally:
        for file_name, write in writers.items():
            path = paths.profile(step, file_name)
            try:
                make_folder(path.parent)
                write(str(path))
            except OSError as error:
                logger.warning("step %d is not traced: %s was not written: %s", step, path, error)
        if len(writers) > 1:
            record_gpu_memory_history(None)
