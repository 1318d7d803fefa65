"""Quarantined batches: consumed like any other, but not trained.

A file of `quarantine/` counts whenever its batch is handed out: it holds for a batch that no
checkpoint has consumed. Of those behind a checkpoint, the checkpoint itself says what was trained.
"""

from collections.abc import Mapping

import msgspec

from areal_hpc.errors import Problem, ShardError
from areal_hpc.rundir.atomic import fsync_path, write_once
from areal_hpc.rundir.checkpoints import TrainerState, UntrainedBatchPart, find_latest_checkpoint
from areal_hpc.rundir.manifests import list_batch_steps, read_json_file
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.fault_points import fault_point


def quarantine_batch_or_read_earlier_record(
    paths: RunPaths, record: UntrainedBatchPart
) -> UntrainedBatchPart:
    """Set a batch aside, durably; what says so: the first one's record if somebody was first."""
    fault_point("quarantine.before_write")
    is_first = write_once(paths.quarantine(record.step), msgspec.json.encode(record))
    fault_point("quarantine.after_write")
    return (None if is_first else read_quarantine(paths, record.step)) or record


def delete_quarantine(paths: RunPaths, step: int) -> None:
    """Have a batch trained after all, durably."""
    paths.quarantine(step).unlink(missing_ok=True)
    fault_point("quarantine.after_delete")
    fsync_path(paths.quarantine_dir)


def read_quarantine(paths: RunPaths, step: int) -> UntrainedBatchPart | None:
    """Why the batch of `step` is quarantined; None if it is not."""
    return read_json_file(paths.quarantine(step), UntrainedBatchPart)


def read_quarantine_files(
    paths: RunPaths, problems: list[Problem] | None = None
) -> dict[int, UntrainedBatchPart]:
    """All files by step; `problems` takes what is wrong with those that cannot be read.

    Raises:
        ShardError: One is damaged, and nobody takes problems.
    """
    found = {}
    for step in list_batch_steps(paths.quarantine_dir):
        try:
            record = read_quarantine(paths, step)
        except ShardError as error:
            if problems is None:
                raise
            problems += error.problems
        else:
            if record is not None:  # else somebody deleted it just now
                found[step] = record
    return found


def merge_quarantines(
    state: TrainerState, files: Mapping[int, UntrainedBatchPart]
) -> dict[int, UntrainedBatchPart]:
    held = {one.step: one for one in state.untrained if one.quarantine}
    return held | {step: one for step, one in files.items() if step > state.step}


def read_quarantined_batches(paths: RunPaths) -> dict[int, UntrainedBatchPart]:
    """Quarantined batches by step, of the newest checkpoint and after it."""
    newest = find_latest_checkpoint(paths.checkpoints_dir)
    state = newest.state if newest else TrainerState(seed=0)
    return merge_quarantines(state, read_quarantine_files(paths))
