"""Untrained parts of consumed batches: tickets left out, steps not taken, batches quarantined."""

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_hpc.errors import NonFiniteGradientError, ShardError
from areal_hpc.rundir.checkpoints import UntrainedBatchPart

MAX_CONSECUTIVE_UNTRAINED_BATCHES = 3
"""One has an odd row or a damaged file; with three one after another it is the weights, the
settings or the storage."""


def build_nonfinite_records_or_raise(
    norms: Sequence[float],
    step: int,
    earlier_records: Sequence[UntrainedBatchPart],
    *,
    key: str,
    name_step: Callable[[int], str],
    hint: str,
) -> list[UntrainedBatchPart]:
    """What the gradient norms of a batch's optimizer steps leave untrained: one entry, or none.

    Pure, and the same on all ranks, as the norms are. The streak is read from what earlier batches
    left, which checkpoints hold: a resumed run decides as the one that was not interrupted.
    An error names steps by `name_step`, the recipe's `key`, and gives `hint`.

    Raises:
        NonFiniteGradientError: A norm is not finite, in the last of
            `MAX_CONSECUTIVE_UNTRAINED_BATCHES` such batches.
    """
    odd = [norm for norm in norms if not math.isfinite(norm)]
    if not odd:
        return []
    reason = (
        f"the gradient norm is {odd[0]}: {len(odd)} of {len(norms)} optimizer steps are not taken"
    )
    before = range(step - MAX_CONSECUTIVE_UNTRAINED_BATCHES + 1, step)
    if {*before} <= {one.step for one in earlier_records if not one.tickets and not one.quarantine}:
        raise NonFiniteGradientError(
            f"{name_step(step)}: {reason}, the same as at {' and '.join(map(name_step, before))}: "
            f"{MAX_CONSECUTIVE_UNTRAINED_BATCHES} batches in a row end the run",
            key=key,
            hint=hint,
        )
    return [UntrainedBatchPart(step, reason)]


def build_damaged_batch_record_or_raise(
    step: int, earlier_records: Sequence[UntrainedBatchPart], reason: str, run_dir: Path
) -> UntrainedBatchPart:
    """The record of a batch that no rank can read. Pure, and the same on all ranks.

    The streak is read as in `build_nonfinite_records_or_raise`; batches set aside by hand do
    not belong to it.

    Raises:
        ShardError: This is the last of `MAX_CONSECUTIVE_UNTRAINED_BATCHES` such batches.
    """
    before = range(step - MAX_CONSECUTIVE_UNTRAINED_BATCHES + 1, step)
    if {*before} <= {one.step for one in earlier_records if one.quarantine == "damaged"}:
        run = shlex.quote(str(run_dir))
        raise ShardError(
            f"batch {step} cannot be read: {reason}; nor could "
            f"{' and '.join(f'batch {one}' for one in before)}: "
            f"{MAX_CONSECUTIVE_UNTRAINED_BATCHES} in a row end the run",
            key="shards/",
            hint=f"areal-hpc shards verify {run} names what is damaged: restore it from a copy, "
            f"undo with areal-hpc quarantine {run} {step - 1} --undo and so on, and resume; or go "
            f"on without batch {step} by areal-hpc quarantine {run} {step}",
        )
    return UntrainedBatchPart(step, reason, quarantine="damaged")


def is_optimizer_step_taken(norm: float) -> bool:
    return math.isfinite(norm) and norm > 0.0


def build_norm_metrics(norms: Sequence[float], *, were_due: bool = True) -> dict[str, float]:
    """The largest gradient norm of a batch, and how many optimizer steps were not taken.

    A batch of which nothing is left counts as one step, not taken. Steps that were not due, as a
    critic warmed up, are not missed.
    """
    if not were_due:
        return {"grad_norm": 0.0, "step/skipped": 0, "step/nonfinite": 0}
    norms = norms or [0.0]
    return {
        "grad_norm": max(norms) if all(map(math.isfinite, norms)) else math.nan,
        "step/skipped": sum(not is_optimizer_step_taken(norm) for norm in norms),
        "step/nonfinite": sum(not math.isfinite(norm) for norm in norms),
    }
