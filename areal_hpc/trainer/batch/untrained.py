"""Untrained parts of a batch: replies that cannot be trained, skipped steps, tickets, batches.

The trainer computes the softmax of the logits at the reply's temperature. Tokens sampled from
another distribution are left out of the loss: their log-probabilities are those of another
policy, so that a gradient of the plain softmax would be wrong.
"""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_hpc.errors import NonFiniteGradientError, ShardError, UntrainableBatchError
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.wire.trajectory import CallRecord, SamplingMask, TrajectoryRow

MAX_UNTRAINABLE_FRACTION = 0.5
"""Largest share of a batch's sampled tokens; beyond it the rest does not represent the agent."""
NO_TOP_K = 1 << 20
"""Size above every vocabulary: such a top_k excludes no token."""
_GRAMMAR_PARAMETERS = ("json_schema", "regex", "ebnf", "structural_tag")
_NEUTRAL_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def list_sampling_distortions(
    sampling: Mapping[str, Any], *, is_recorded: bool = False
) -> Iterator[str]:
    """Yield the parameters that made a reply's distribution differ from the trained softmax.

    With `is_recorded` the row records the tokens that could be sampled, and the trained softmax is
    one over these. Missing parameters had SGLang's default. `min_new_tokens` counts only if the
    tokens that it forbade were not recorded (`forbid_end_tokens`).
    """
    if sampling.get("temperature", 1.0) == 0:
        yield "temperature=0"
    if sampling.get("top_p", 1.0) < 1 and not is_recorded:
        yield "top_p"
    if 0 < sampling.get("top_k", -1) < NO_TOP_K and not is_recorded:
        yield "top_k"
    if sampling.get("min_p", 0.0) > 0 and not is_recorded:
        yield "min_p"
    if any(sampling.get(name) is not None for name in _GRAMMAR_PARAMETERS) and not is_recorded:
        yield "a grammar"
    if sampling.get("min_new_tokens") and not sampling.get("stop_token_ids") and not is_recorded:
        yield "min_new_tokens"
    if sampling.get("logit_bias"):
        yield "logit_bias"
    for name, neutral in _NEUTRAL_PENALTIES.items():
        if sampling.get(name, neutral) != neutral:
            yield name


def get_reply_span(call: CallRecord) -> slice:
    return slice(call.prompt_tokens, call.prompt_tokens + call.reply_tokens)


def _list_reply_distortions(
    row: TrajectoryRow, call: CallRecord, is_recorded: bool = False
) -> list[str]:
    if row.sampling_mask is not None:
        counts = row.sampling_mask.counts_T[get_reply_span(call)]
        is_recorded |= len(counts) > 0 and bool(counts.all())
    return list(list_sampling_distortions(call.sampling, is_recorded=is_recorded))


def drop_distorted_replies_from_loss_mask(
    row: TrajectoryRow, mask_T: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Return the row's loss mask without replies that were not sampled from the plain softmax."""
    calls = [call for call in row.record.calls if _list_reply_distortions(row, call)]
    spans = [get_reply_span(call) for call in calls]
    if not spans:
        return mask_T
    mask_T = mask_T.copy()
    for span in spans:
        mask_T[span] = 0
    return mask_T


def forbid_end_tokens(row: TrajectoryRow) -> SamplingMask | None:
    """Add to the row's sampling mask the tokens that `min_new_tokens` excluded from sampling.

    Up to that length no token can be sampled that ends a reply: the proxy requests this with
    `stop_token_ids`. A position whose tokens were recorded keeps them.
    """
    mask = row.sampling_mask
    counts_T = np.zeros(row.num_tokens, np.uint16) if mask is None else mask.counts_T.copy()
    forbids_T = np.zeros(row.num_tokens, np.bool_)
    ids_of = dict[int, npt.NDArray[np.int32]]()
    for call in row.record.calls:
        ids = np.array(call.sampling.get("stop_token_ids") or [], np.int32)
        if not len(ids):
            continue
        minimum = min(call.sampling.get("min_new_tokens") or 0, call.reply_tokens)
        for position in range(call.prompt_tokens, call.prompt_tokens + minimum):
            if not counts_T[position]:
                forbids_T[position], ids_of[position] = True, ids
    if not ids_of:
        return mask
    if mask is not None:
        starts = np.cumsum([0, *mask.counts_T.tolist()]).tolist()
        for position in np.flatnonzero(mask.counts_T).tolist():
            ids_of[position] = mask.ids[starts[position] : starts[position + 1]]
    for position, ids in ids_of.items():
        counts_T[position] = len(ids)
    flat = np.concatenate([ids_of[position] for position in sorted(ids_of)])
    return SamplingMask(counts_T, flat, forbids_T)


def count_untrainable_tokens(
    batch: Sequence[TrajectoryRow], *, assumes_sampling_mask: bool = False
) -> Counter[str]:
    """Count the trained tokens of such replies by the reasons of each reply, joined.

    With `assumes_sampling_mask` all rows count as having a sampling mask.
    """
    tokens = Counter[str]()
    for row in batch:
        for call in row.record.calls:
            if reasons := " and ".join(_list_reply_distortions(row, call, assumes_sampling_mask)):
                tokens[reasons] += int(np.count_nonzero(row.loss_mask_T[get_reply_span(call)]))
    return +tokens


def check_trainable_share(step: int, sampled: int, untrainable: Mapping[str, int]) -> None:
    """Raise an UntrainableBatchError if more than half of a batch's tokens are untrainable."""
    total = sum(untrainable.values())
    if total <= MAX_UNTRAINABLE_FRACTION * sampled:
        return
    ranked = sorted(untrainable.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{name} ({tokens})" for name, tokens in ranked)
    raise UntrainableBatchError(
        f"batch {step}: {total} of {sampled} sampled tokens were not sampled from the plain "
        f"softmax, which is what is trained: {reasons}. At most half of a batch may be left out",
        key="rollout.agent.sampling",
        hint="set it to recipe, which replaces the agent's temperature, top_p and top_k, or "
        "rollout.record_sampling_mask=true, which makes top_p, top_k, min_p and grammars "
        "trainable; have the agent ask without others; areal-hpc quarantine sets this batch aside",
    )


MAX_CONSECUTIVE_UNTRAINED_BATCHES = 3
"""Batches in a row that end the run: a single one has a bad row or a damaged file, three point to
the weights, the settings or the storage."""


def record_skipped_steps(
    norms: Sequence[float],
    step: int,
    earlier_records: Sequence[UntrainedBatchPart],
    *,
    key: str,
    name_step: Callable[[int], str],
    hint: str,
) -> list[UntrainedBatchPart]:
    """Return the record of a batch's skipped steps, judged by its gradient norms; [] without any.

    Pure, and the same on all ranks, as the norms are. The streak is read from the records of
    earlier batches, which checkpoints hold: a resumed run decides like an uninterrupted one. An
    error names steps by `name_step` and the recipe's `key`, and gives `hint`.

    Raises:
        NonFiniteGradientError: A norm is not finite, in the last of
            `MAX_CONSECUTIVE_UNTRAINED_BATCHES` such batches.
    """
    bad = [norm for norm in norms if not math.isfinite(norm)]
    if not bad:
        return []
    reason = (
        f"the gradient norm is {bad[0]}: {len(bad)} of {len(norms)} optimizer steps are not taken"
    )
    before = range(step - MAX_CONSECUTIVE_UNTRAINED_BATCHES + 1, step)
    if {*before} <= {
        part.step for part in earlier_records if not part.tickets and not part.quarantine
    }:
        raise NonFiniteGradientError(
            f"{name_step(step)}: {reason}, the same as at {' and '.join(map(name_step, before))}: "
            f"{MAX_CONSECUTIVE_UNTRAINED_BATCHES} batches in a row end the run",
            key=key,
            hint=hint,
        )
    return [UntrainedBatchPart(step, reason)]


def record_damaged_batch(
    step: int, earlier_records: Sequence[UntrainedBatchPart], reason: str, run_dir: Path
) -> UntrainedBatchPart:
    """Return the record of a batch that no rank can read. Pure, and the same on all ranks.

    The streak is read as in `record_skipped_steps`; batches quarantined by hand do not count.

    Raises:
        ShardError: This is the last of `MAX_CONSECUTIVE_UNTRAINED_BATCHES` such batches.
    """
    before = range(step - MAX_CONSECUTIVE_UNTRAINED_BATCHES + 1, step)
    if {*before} <= {part.step for part in earlier_records if part.quarantine == "damaged"}:
        run = shlex.quote(str(run_dir))
        raise ShardError(
            f"batch {step} cannot be read: {reason}; nor could "
            f"{' and '.join(f'batch {number}' for number in before)}: "
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
    """Return the largest gradient norm of a batch, and the number of skipped optimizer steps.

    A batch without trainable tokens counts as one skipped step. Steps that were not due, because a
    critic warmed up, do not count as skipped.
    """
    if not were_due:
        return {"grad_norm": 0.0, "step/skipped": 0, "step/nonfinite": 0}
    norms = norms or [0.0]
    return {
        "grad_norm": max(norms) if all(map(math.isfinite, norms)) else math.nan,
        "step/skipped": sum(not is_optimizer_step_taken(norm) for norm in norms),
        "step/nonfinite": sum(not math.isfinite(norm) for norm in norms),
    }
