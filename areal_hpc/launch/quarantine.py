"""Quarantine of a batch, so that the trainer skips it, and its undoing (`areal-hpc quarantine`).

The trainer reads the quarantine's file when it receives the batch, now or after a restart.
"""

import shlex

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.checkpoints import TrainerState, UntrainedBatchPart, find_latest_checkpoint
from areal_hpc.rundir.files import read_newest_number
from areal_hpc.rundir.manifests import (
    delete_quarantine,
    list_manifest_steps,
    read_quarantine,
    record_quarantine,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.run_view import RunView


def quarantine_batch(paths: RunPaths, step: int) -> str:
    state = _read_newest_trainer_state(paths)
    parts = (part for part in state.untrained if part.step == step and part.quarantine)
    if (skipped := next(parts, None)) is not None:
        return f"batch {step} is quarantined already, for good: {skipped.reason}"
    if step in state.consumed:
        raise _build_refusal(
            f"batch {step} was trained already: the checkpoint of step {state.step} holds it",
            f"choose a batch after {state.step}",
        )
    steps = list_manifest_steps(paths)
    if step not in steps:
        existing = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
        raise _build_refusal(
            f"this run has no batch {step}; those handed out: {existing}",
            "read manifests/ for the tickets of each",
        )
    if (recorded := read_quarantine(paths, step)) is not None:
        return f"batch {step} is quarantined already: {recorded.reason}"
    trained_step = _read_trained_step(paths, state.step)
    if trained_step is not None and step <= trained_step:
        raise _build_refusal(
            f"batch {step} was trained already: the trainer at work has reached step "
            f"{trained_step}, and its next checkpoint will hold it",
            _build_cancel_hint(paths),
        )
    reason = "areal-hpc quarantine asked for it"
    record = UntrainedBatchPart(step, reason, quarantine="requested")
    record_quarantine(paths, record)
    return f"batch {step} is quarantined: {_describe_effect(step, trained_step, 'sets it aside')}"


def undo_quarantine(paths: RunPaths, step: int) -> str:
    state = _read_newest_trainer_state(paths)
    trained_step = _read_trained_step(paths, state.step)
    if step in state.consumed:
        raise _build_refusal(
            f"batch {step} is behind the checkpoint of step {state.step}: too late to undo",
            "areal-hpc audit reports the state of its tickets",
        )
    if read_quarantine(paths, step) is None:
        raise _build_refusal(
            f"batch {step} is not quarantined", "areal-hpc audit lists the batches that are"
        )
    if trained_step is not None and step <= trained_step:
        raise _build_refusal(
            f"the trainer at work has reached step {trained_step} without batch {step}",
            _build_cancel_hint(paths),
        )
    delete_quarantine(paths, step)
    effect = _describe_effect(step, trained_step, "trains it")
    return f"batch {step} is no longer quarantined: {effect}"


def _build_refusal(message: str, hint: str) -> RecipeError:
    return RecipeError(message, key="BATCH", hint=hint)


def _build_cancel_hint(paths: RunPaths) -> str:
    run = shlex.quote(str(paths.root))
    return f"areal-hpc cancel {run} --now ends the run without another checkpoint; then try again"


def _read_newest_trainer_state(paths: RunPaths) -> TrainerState:
    newest = find_latest_checkpoint(paths.checkpoints_dir)
    return newest.state if newest else TrainerState(seed=0)


def _read_trained_step(paths: RunPaths, checkpoint_step: int) -> int | None:
    status = RunView(paths).ledger
    if status is None:
        return None
    is_replaced = read_newest_number(paths.generations_dir) > status.generation
    return (
        checkpoint_step if is_replaced else status.version_step
    )  # a new trainer starts from the checkpoint


def _describe_effect(step: int, trained_step: int | None, effect: str) -> str:
    if trained_step is None:
        return f"the trainer {effect} when the run is resumed (no ledger answers now)"
    if step > trained_step + 1:
        return f"the trainer {effect} when it gets there from step {trained_step}"
    return (
        f"the trainer {effect} when it is handed that batch next. "
        "If it is at work on it right now, it goes on as before: "
        "areal-hpc audit reports whether it was trained"
    )
